"""What a call in a graph may do besides computing its result."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fusee.capture.torch_api import STATE_SWITCHES, OpOverload, OpOverloadPacket
from fusee.sym.raising import name_may_raise, raises

__all__ = ["BODY", "effects", "has_effect", "is_in_place", "is_mutable", "storages"]

# The attribute of a target that has the calls of a function under a transform: transforms.py.
BODY = "_fusee_body"


def effects(node: fx.Node) -> set[str]:
    """What a call may do besides computing.

    writes     to its operands
    anywhere   to what nobody knows
    draws      it moves a random generator
    raises     for values that the graph computes, such as an index
    """
    target: Any = node.target
    if node.op not in ("call_function", "call_method") or target in STATE_SWITCHES:
        return set()
    bodies = [x.meta[BODY] for x in node.all_input_nodes if BODY in x.meta]
    if hasattr(target, BODY) or bodies:
        calls = [n for body in (getattr(target, BODY, ()), *bodies) for n in body]
        found = set[str]().union(*map(effects, calls))
        return found | {"anywhere"} if "writes" in found else found
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or "torch"
    is_torchs = target is getattr or module.split(".")[0] in ("torch", "_operator")
    place, key, default = _WRITE_IF.get(name, (0, "inplace", None))
    written = node.args[place] if 0 < place < len(node.args) else node.kwargs.get(key, default)
    found = set()
    is_asked = (written is not None and written is not False) or node.kwargs.get("out") is not None
    if is_asked or target in _IN_PLACE or is_in_place(name):
        found.add("writes")
    is_operator = isinstance(target, (OpOverload, OpOverloadPacket))
    is_unknown = is_mutable(target) if is_operator else "generator" in node.kwargs or not is_torchs
    # without a result it was called for something else
    if node.meta.get("example_value", node) is None and not name.startswith("_assert"):
        is_unknown = True
    if is_unknown:
        found |= {"writes", "anywhere"}
    if not is_torchs or name in _RANDOM or any(word in name for word in _RANDOM_WORDS):
        found.add("draws")
    name = name.partition(".")[0]  # of an operator's overload
    indexes = target is operator.getitem and len(node.all_input_nodes) > 1
    with torch._C.DisableTorchFunction():  # the recorder may be on
        refuses = name_may_raise(name) or raises(node, name, "example_value")
    if indexes or refuses or name.startswith("_assert"):
        found.add("raises")
    return found


def is_in_place(name: str) -> bool:
    """Whether an operator with this name writes to its first operand."""
    return name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS


# Functions of the module `operator` that would otherwise be words of Python.
_KEYWORDS = ("and_", "or_", "not_")


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay even if nobody uses its result."""
    is_bound = node.op in ("placeholder", "output") or node.target in STATE_SWITCHES
    return is_bound or bool(effects(node))


_RANDOM = {"multinomial", "poisson", "rrelu", "gumbel_softmax", "scaled_dot_product_attention"}
_RANDOM_WORDS = ("rand", "drop", "bernoulli", "normal")

# Which argument, by place or name, says that these write to an operand; what it is by default.
_WRITE_IF: dict[str, tuple[int, str, Any]] = {
    **dict.fromkeys(("batch_norm", "native_batch_norm"), (5, "training", False)),
    "instance_norm": (5, "use_input_stats", True),
    **dict.fromkeys(("embedding", "embedding_bag"), (3, "max_norm", None)),
}

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ilshift, operator.irshift, operator.ixor,
    operator.iand, operator.ior,
}  # fmt: skip


def is_mutable(func: Any) -> bool:
    """Whether an operator's schema says that it writes to its operands."""
    if isinstance(func, OpOverloadPacket):
        names: list[str] = func.overloads()  # type: ignore[no-untyped-call]
        return any(is_mutable(getattr(func, name)) for name in names)
    return isinstance(func, OpOverload) and bool(func._schema.is_mutable)


def storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory behind the tensors that nodes give."""
    tensors = [node.meta.get("example_value") for node in nodes]
    return {x.untyped_storage()._cdata for x in tensors if isinstance(x, torch.Tensor)}
