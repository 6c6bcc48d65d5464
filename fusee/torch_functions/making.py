"""Tensors that a program makes by a class: `torch.LongTensor([1, 2])`, `torch.Tensor(2, 3)`."""

from __future__ import annotations

from typing import Any

import torch

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs, Stand

__all__: list[str] = []


def _by_class(name: str, dtype: torch.dtype | None) -> Stand:
    """What the class makes: of a sequence, its elements; of sizes, what lies there."""

    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        first = type(args[0]) if len(args) == 1 else None
        given = {"dtype": dtype or torch.get_default_dtype(), "device": "cpu"}
        if not kwargs and first in (list, tuple):
            return m.call(torch.tensor, args, given)
        if not kwargs and (first is torch.Size or all(type(x) is int for x in args)):
            return m.call(torch.empty, args or (0,), given)
        raise GraphBreak(f"torch.{name} makes a tensor of something else than numbers or sizes")

    return stand


_CLASSES = {
    "Tensor": None, "FloatTensor": torch.float32, "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8,
    "CharTensor": torch.int8, "ShortTensor": torch.int16, "IntTensor": torch.int32,
    "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip

for _name, _dtype in _CLASSES.items():
    SPECIAL[getattr(torch, _name)] = _by_class(_name, _dtype)
