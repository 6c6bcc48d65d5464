"""Functions of torch that take functions: autograd.Function.apply, checkpoint.

A class of autograd functions is one node of the graph, which calls `apply`: whoever traces the
graph sees what eager's autograd makes of it. What its methods read from outside must be known, so
the machine runs them too, and drops the calls that this would put into the graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import checkpoint

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs, stands_for
from fusee.capture.torch_api import FakeTensor, apply_function, set_grad_enabled
from fusee.torch_functions.torch_api import higher_order

__all__: list[str] = []

_Function: Any = torch.autograd.Function


class _Context:
    """What `ctx` is to an autograd function that the machine runs."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def note(self, *_: Any) -> None:
        """What torch is told of results; it shows in them once `apply` is called."""

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = note


for _method in (_Context.save_for_backward, _Context.note):
    _method.__dict__["_fusee_inlined"] = True


@stands_for(apply_function)
def _apply(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    cls, *given = args
    if cls is checkpoint.CheckpointFunction and not kwargs:
        return _checkpoint_reentrant(m, tuple(given))
    if cls in m.made_classes or kwargs:
        raise GraphBreak(f"{cls.__qualname__}.apply is made, or called, in a way that differs")
    needs = tuple(isinstance(x, FakeTensor) and x.requires_grad for x in given)
    before = m.world.changes()[1:]
    is_grad = torch.is_grad_enabled()
    calls = m.world.recorder.calls
    with m.world.recorder.apart():
        set_grad_enabled(False)
        try:
            _run_methods(m, cls, given, needs if is_grad else (False,) * len(needs))
        finally:
            set_grad_enabled(is_grad)
    m.world.recorder.calls = calls
    if m.world.changes()[1:] != before:
        raise GraphBreak(f"{cls.__qualname__} does more than compute tensors")

    def apply(*args: Any) -> Any:
        return cls.apply(*args)

    apply.__name__ = apply.__qualname__ = cls.__name__
    apply.__module__ = cls.__module__
    return m.world.recorder.call_whole(apply, tuple(m.deep(x) for x in given), {})


def _run_methods(m: Capturing, cls: Any, given: list[Any], needs: tuple[bool, ...]) -> None:
    """What forward does and, if there will be gradients, backward."""
    context = _Context(needs)
    if cls.setup_context is _Function.setup_context:
        out = m.call(m.attribute(cls, "forward"), (context, *given), {})
    else:
        out = m.call(m.attribute(cls, "forward"), tuple(given), {})
        m.call(m.attribute(cls, "setup_context"), (context, tuple(given), out), {})
    if any(needs):
        results = out if isinstance(out, tuple) else (out,)
        grads = [m.call(torch.ones_like, (x,), {}) for x in results if isinstance(x, FakeTensor)]
        if len(grads) != len(results):
            raise GraphBreak(f"{cls.__qualname__} gives more than tensors")
        try:
            m.call(m.attribute(cls, "backward"), (context, *grads), {})
        except Exception as error:  # noqa: BLE001  # whatever it raises in the backward pass
            raise GraphBreak(f"{cls.__qualname__}.backward raises {error!r}") from None


_CHECKPOINT: Any = checkpoint.checkpoint


@stands_for(_CHECKPOINT)
def _checkpoint(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    """The function, inlined: its nodes are marked, for a backend to compute them again."""
    settings = _CHECKPOINT.__wrapped__.__kwdefaults__
    chosen = {**settings, **{key: kwargs[key] for key in settings if key in kwargs}}
    if chosen["use_reentrant"] is not False:  # torch's own code comes to `_checkpoint_reentrant`
        inner = m.world.hold(_CHECKPOINT.__wrapped__, "checkpoint")
        return m.call(inner, args, kwargs)
    if not all(chosen[key] is settings[key] for key in ("context_fn", "debug")):
        raise GraphBreak(
            "checkpoint() of this kind records the backward pass as it runs",
            "checkpoint(...) without context_fn and debug",
        )
    given = {key: x for key, x in kwargs.items() if key not in (*settings, "preserve_rng_state")}
    function, *rest = args
    return _recomputed(m, function, tuple(rest), given)


def _recomputed(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    before = m.world.changes()[1:]
    with m.world.recorder.recomputed() as made:
        result = m.call(function, args, kwargs)
    has_effects = m.world.changes()[1:] != before or m.world.recorder.changes_inputs(made)
    if torch.is_grad_enabled() and has_effects:
        raise GraphBreak("what runs under checkpoint() has effects, and has them twice in eager")
    return result


def _checkpoint_reentrant(m: Capturing, args: Args) -> Any:
    """The same, where it is sure that the outputs are differentiated as eager's are."""
    function, _, *given = args
    if not torch.is_grad_enabled():
        return m.call(function, tuple(given), {})
    if not any(isinstance(x, FakeTensor) and x.requires_grad for x in given):
        raise GraphBreak("a reentrant checkpoint() of what requires no grad warns")
    result = _recomputed(m, function, tuple(given), {})
    results = result if isinstance(result, tuple) else (result,)
    for x in results:
        is_float = isinstance(x, FakeTensor) and (x.is_floating_point() or x.is_complex())
        if any(x is y for y in given) or (is_float and not x.requires_grad):
            raise GraphBreak("a reentrant checkpoint() makes all that it gives require grad")
    return result


def _out_dtype(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    """out_dtype(op, dtype, ...): the operator on tensors that are converted first, as in eager."""
    op, dtype, *operands = args
    tensors = [x for x in operands if isinstance(x, FakeTensor)]
    if kwargs or any(x.requires_grad for x in tensors):
        raise GraphBreak("out_dtype of tensors that require grad, for which it has no gradient")
    wide = functools.reduce(torch.promote_types, (x.dtype for x in tensors), dtype)
    given = [
        m.call(torch.Tensor.to, (x, wide), {}) if isinstance(x, FakeTensor) else x for x in operands
    ]
    return m.call(torch.Tensor.to, (m.call(op, tuple(given), {}), dtype), {})


if hasattr(higher_order, "out_dtype"):
    SPECIAL[higher_order.out_dtype] = _out_dtype
