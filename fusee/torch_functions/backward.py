"""Backward passes within a compiled function: autograd runs between two graphs.

A graph takes and gives gradients as a whole. Where the program wants more of it, the gradient of
what it computes on its way, the function is eager's from the start.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.rebuild import Lost
from fusee.capture.stand_ins import Args, Kwargs, stands_for
from fusee.capture.torch_api import FakeTensor

__all__: list[str] = []


def _register(function: Any, name: str) -> None:
    signature = inspect.signature(function)

    @stands_for(function)
    def stop(m: Capturing, args: Args, kwargs: Kwargs) -> NoReturn:
        given = signature.bind(*args, **kwargs).arguments
        inputs = pytree.tree_leaves(given.get("inputs"))
        if any(isinstance(x, FakeTensor) and id(x) not in m.world.inputs for x in inputs):
            raise Lost(f"{name} asks for the gradient of a tensor that its own graph computes")
        raise GraphBreak(f"{name} runs autograd, between two graphs", "")


for _backward in (torch.Tensor.backward, torch.autograd.backward):
    _register(_backward, "backward()")
_register(torch.autograd.grad, "torch.autograd.grad")
