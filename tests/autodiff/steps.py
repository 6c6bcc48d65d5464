"""Training steps of functions and modules, eager and compiled, from the same start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusee.backends import lookup
from fusee.errors import FuseeWarning

BACKENDS = ("aot_eager", "fusee")

Fn = Callable[..., Any]


def compiled(function: Fn, backend: str = "fusee", **kwargs: Any) -> Fn:
    """torch.compile by a backend of ours; a graph that runs eagerly is a failure."""
    torch._dynamo.reset()
    inner = torch.compile(function, backend=lookup(backend), fullgraph=True, **kwargs)

    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FuseeWarning)
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # TorchDynamo's
            warnings.filterwarnings("ignore", ".*should not be instantiated")  # TorchDynamo's
            return inner(*args)

    return call


def copies(inputs: Sequence[Any]) -> list[Any]:
    """Copies that require grad where the originals do; one copy of what is there twice."""
    made: dict[int, Any] = {}
    for x in inputs:
        if isinstance(x, Tensor) and id(x) not in made:
            fresh = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
            made[id(x)] = fresh.requires_grad_(x.requires_grad)
    return [made.get(id(x), x) for x in inputs]


def compare(
    function: Fn,
    *inputs: Any,
    backend: str = "fusee",
    around: Fn | None = None,
    loss: Callable[[list[Any]], Tensor] | None = None,
) -> None:
    """Values, gradients of the inputs, what is written to them, against eager's, in two calls.

    around   (function, *inputs) -> results; what it does besides calling is not compiled
    loss     of the results; without one each that requires grad counts, with other weights
    """
    step = compiled(function, backend)
    call = around or (lambda f, *args: f(*args))
    for _ in range(2):
        ours = _outcome(lambda *args: call(step, *args), inputs, loss)
        theirs = _outcome(lambda *args: call(function, *args), inputs, loss)
        assert len(ours) == len(theirs)
        for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            same(f"item {k}", x, y)


def _outcome(function: Fn, inputs: Sequence[Any], loss: Any) -> list[Any]:
    given = copies(inputs)
    torch.manual_seed(0)
    out = function(*given)
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    ends = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if loss is not None:
        loss(results).backward()
    elif ends:
        weighted = [x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x) for x in ends]
        torch.autograd.backward([x.sum() for x in weighted])
    tensors = [x for x in given if isinstance(x, Tensor)]
    grads = [x.grad for x in tensors if x.is_leaf]
    return [*results, *(x.detach() for x in tensors), *grads]


def same(what: str, x: Any, y: Any) -> None:
    """Equal in kind, and in value as far as float32 can be."""
    if not isinstance(y, Tensor):
        assert type(x) is type(y) and x == y, (what, x, y)
        return
    torch.testing.assert_close(x, y, rtol=3e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")
    assert x.stride() == y.stride(), (what, x.stride(), y.stride())
    assert x.requires_grad == y.requires_grad, what
    assert x.is_leaf == y.is_leaf, what
