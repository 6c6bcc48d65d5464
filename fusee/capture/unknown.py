"""Torch calls whose results nobody knows before they have run: they end the graph.

Adapter of what FakeTensors raise, torch._subclasses and its texts. Tested with torch 2.13.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fusee.capture.breaks import GraphBreak
from fusee.capture.effects import is_in_place
from fusee.capture.torch_api import OpOverload, OpOverloadPacket
from fusee.sym.metas.table import is_dense

__all__ = ["KEEP_ON_DEVICE", "VALUE", "ended_by", "refuse_masked_gradients", "refuse_overlaps"]

VALUE = "needs the value of a tensor, which is known only when the graph has run"
KEEP_ON_DEVICE = "compute on tensors (torch.where, masks) instead, or move the line out"
# Whose operators are not the user's to complete.
_TORCHS = ("aten", "prim", "prims", "quantized", "mkldnn", "torchvision")


def ended_by(error: Exception, function: Any, name: str) -> GraphBreak | None:
    """What a call on FakeTensors ends the graph with; None if eager may raise the same error."""
    if _needs_values(error):
        return GraphBreak(f"{getattr(error, 'func', None) or name} {VALUE}", KEEP_ON_DEVICE)
    operator = _without_fake(error)
    if operator is None:
        return None
    operator = _op_of(function) or operator or name
    remedy = ""
    if "::" in operator and operator.partition("::")[0] not in _TORCHS:
        remedy = f"torch.library.register_fake({operator!r}) says what they look like"
    return GraphBreak(f"{operator} has no fake kernel that says what its results look like", remedy)


def refuse_overlaps(name: str, args: Any, kwargs: Any) -> None:
    """End the graph at a write that ATen may refuse, since elements share memory.

    FakeTensors do not look. source   aten/src/ATen/MemoryOverlap.cpp
    """
    written = kwargs.get("out")
    may_be_operand = written is None or _is_pointwise(name)
    if written is None and is_in_place(name) and args:
        written = args[0]
    for x in written if isinstance(written, (tuple, list)) else (written,):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            continue
        shares = any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride()))
        if shares or any(_overlap(x, y, may_be_operand) for y in args):
            raise GraphBreak(
                f"{name} writes to memory that several elements or operands share", "clone() first"
            )


def refuse_masked_gradients(name: str, *operands: Any) -> None:
    """End the graph at `x[mask] = y` if y gets a gradient: of as many rows as mask has ones."""
    if name.strip("_") not in ("setitem", "index_put") or len(operands) < 3:
        return
    _, index, value = operands[:3]
    index = index if isinstance(index, (tuple, list)) else (index,)
    kinds = [i.dtype for i in index if isinstance(i, torch.Tensor)]
    if (torch.bool in kinds or torch.uint8 in kinds) and torch.is_grad_enabled():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise GraphBreak("the gradient of what is put at a mask " + VALUE, KEEP_ON_DEVICE)


def _overlap(x: torch.Tensor, y: Any, may_be_same: bool) -> bool:
    """Whether two dense tensors have a part of their memory in common, or all of it."""
    if y is x or not isinstance(y, torch.Tensor) or y.layout is not torch.strided:
        return y is x and not may_be_same
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    if not (is_dense(x) and is_dense(y)):
        return False
    first, second = ((t.storage_offset(), t.storage_offset() + t.numel()) for t in (x, y))
    if first == second and x.stride() == y.stride():
        return not may_be_same
    return first[0] < second[1] and second[0] < first[1]


@functools.lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    """Whether each element depends on those at its place alone: `out` may be an operand."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def _needs_values(error: Exception) -> bool:
    """Whether a call on FakeTensors would have to know their elements."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return True
    text = str(error)  # of a kernel in C++ that looked for them; of the indices in a mask
    return "data is not allocated yet" in text or "data-independent implementation" in text


def _without_fake(error: Exception) -> str | None:
    """The operator whose results nobody knows before it runs, if that is what an error says."""
    if isinstance(error, UnsupportedOperatorException):
        return _op_of(error.func) or str(error.func)
    text = str(error)
    if isinstance(error, NotImplementedError) or "no fake impl registered" in text:
        found = re.search(r"\w+::\w+", text)
        return found[0] if found else ""
    return None


def _op_of(function: Any) -> str | None:
    """`mylib::myop`, if a call is one of an operator."""
    if isinstance(function, OpOverload):
        return str(function._schema.name)
    return str(function._qualified_op_name) if isinstance(function, OpOverloadPacket) else None
