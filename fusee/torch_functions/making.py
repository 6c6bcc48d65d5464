"""Tensors that a program makes by a class, `torch.LongTensor([1, 2])`, or of sizes."""

from __future__ import annotations

from typing import Any

import torch

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.numbers import NUMPY
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs, Stand, stands_for
from fusee.torch_functions.arrays import Array
from fusee.torch_functions.torch_api import shape_as_tensor

__all__: list[str] = []


def _by_class(name: str, dtype: torch.dtype | None) -> Stand:
    """What the class makes: of a sequence, its elements; of sizes, what lies there."""

    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        first = type(args[0]) if len(args) == 1 else None
        given = {"dtype": dtype or torch.get_default_dtype(), "device": "cpu"}
        if not kwargs and first in (list, tuple):
            items = [x.item() if isinstance(x, NUMPY) else x for x in m.items(args[0])]
            if any(isinstance(x, Array) for x in items):
                tensors = [x.tensor if isinstance(x, Array) else _alone(m, x) for x in items]
                return _stacked(m, tensors, given)
            return m.call(torch.tensor, (items,), given)
        if not kwargs and (first is torch.Size or all(type(x) is int for x in args)):
            return m.call(torch.empty, args or (0,), given)
        raise GraphBreak(f"torch.{name} makes a tensor of something else than numbers or sizes")

    return stand


def _alone(m: Capturing, number: Any) -> Any:
    return m.call(torch.tensor, (number,), {})


def _stacked(m: Capturing, numbers: list[torch.Tensor], given: Kwargs) -> Any:
    """Of numbers of NumPy's that the graph computes."""
    is_whole = not given["dtype"].is_floating_point
    if any(x.dim() or (x.is_floating_point() and is_whole) for x in numbers):
        raise GraphBreak("a tensor is made of arrays, or an integer of a float")
    return m.call(torch.stack, ([m.call(torch.Tensor.to, (x,), given) for x in numbers],), {})


@stands_for(shape_as_tensor)
def _shape_as_tensor(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    given = {"dtype": torch.int64, "device": "cpu"}
    return m.call(torch.tensor, ([*m.attribute(x, "shape")],), given)


_CLASSES = {
    "Tensor": None, "FloatTensor": torch.float32, "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8,
    "CharTensor": torch.int8, "ShortTensor": torch.int16, "IntTensor": torch.int32,
    "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip

for _name, _dtype in _CLASSES.items():
    SPECIAL[getattr(torch, _name)] = _by_class(_name, _dtype)
