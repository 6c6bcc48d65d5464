"""Tensors that the program makes and at which autograd begins: Parameters, `requires_grad_()`.

In the graph one is what it was made of, detached; to the program it requires grad. What is computed
from it with gradients would be lost, so the graph ends there: the real one is made, and the next
graph takes it as it takes any leaf from outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.stand_ins import Args, Kwargs, stands_for
from fusee.capture.torch_api import FakeTensor

__all__: list[str] = []


@stands_for(nn.Parameter)
def _parameter(m: Capturing, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """nn.Parameter(data, requires_grad)."""
    data, requires_grad = _given(*args, **kwargs)
    if data is None:
        data = m.call(torch.empty, (0,), {})
    recorder = m.world.recorder
    if not isinstance(data, FakeTensor) or id(data) in m.world.seen or m.modes:
        raise GraphBreak("a Parameter of a tensor whose class, or a mode, is asked about it")
    if requires_grad is not False and not (data.is_floating_point() or data.is_complex()):
        raise GraphBreak("a Parameter of integers that requires grad, which is an error")
    if not recorder.is_main:
        raise GraphBreak("a Parameter that is made within a transform")
    fake = recorder.call(torch.Tensor.detach, (data,), {})
    fake._is_param = True
    recorder.leaves[id(fake)] = True
    recorder.begin_at(fake, m.truth(requires_grad))
    return fake  # type: ignore[no-any-return]


def _given(data: Any = None, requires_grad: Any = True) -> tuple[Any, Any]:
    """The arguments, by the names that a Parameter has for them."""
    return data, requires_grad
