"""What must be decided above autograd in a joint trace: between the program and its operators.

On the way from a function to operators torch asks tensors for their device. Plain twins are on
the device "meta"; here they get the answers that eager's tensors give on a CPU. Symbolic sizes,
autocast and recurrent layers ask for more: there the twins are FakeTensors, which say "cpu".
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.nodes import WithData, inline, run_inner
from fusee.aten.tracer import Tracer
from fusee.autodiff.sparse import sparse_embedding
from fusee.autodiff.torch_api import uses_flash_attention
from fusee.sym.metas.table import suggested_layout

__all__ = ["HIGHER_ORDER", "AboveAutograd", "needs_devices"]

aten = torch.ops.aten


class AboveAutograd(WithData):
    """Sees each function that the program calls, those inside of Python functions of torch too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        special = _FUNCTIONS.get(func)
        if special is not None:
            return special(self.t, func, args, kwargs)
        opened = _opened(func)
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def _opened(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch without its first step: to hand itself over whole to a mode."""
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch."):
        return None
    if hasattr(Tensor.__base__, func.__name__) and getattr(Tensor, func.__name__, None) is func:
        return None  # the method in C that it ends with would come here by the same name
    names = func.__globals__
    found = {name: _never for name in _CHECKS if name in func.__code__.co_names and name in names}
    if not found:
        return None
    copy = types.FunctionType(
        func.__code__, {**names, **found}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*args: object) -> bool:
    return False


Function = Callable[[Tracer, Any, tuple[Any, ...], dict[str, Any]], Any]

_FUNCTIONS: dict[Any, Function] = {}


def _function(*functions: Any) -> Callable[[Function], Function]:
    def register(rule: Function) -> Function:
        _FUNCTIONS.update(dict.fromkeys(functions, rule))
        return rule

    return register


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "meta"


@_function(torch.nn.functional.scaled_dot_product_attention)
def _attention(t: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args)), **kwargs}
    q, k, v = given["query"], given["key"], given["value"]
    if not _is_plain(q):
        return func(*args, **kwargs)
    mask, dropout = given.get("attn_mask"), given.get("dropout_p", 0.0)
    is_causal, scale = given.get("is_causal", False), given.get("scale")
    enable_gqa = given.get("enable_gqa", False)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
    if uses_flash_attention(q, k, v, mask, dropout, is_causal, scale, enable_gqa):
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        return op(q, k, v, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    op = aten._scaled_dot_product_attention_math.default
    return op(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


@_function(torch.group_norm)
def _group_norm(t: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {**dict(zip(names, args)), **kwargs}
    x, groups = given["input"], given["num_groups"]
    layout = suggested_layout(x)
    if not _is_plain(x) or layout == torch.contiguous_format:
        return func(*args, **kwargs)
    n, channels, *pixels = x.shape
    rest = (n, channels, math.prod(pixels), groups, given.get("eps", 1e-5))
    x = x.contiguous(memory_format=layout)  # elsewhere than on a CPU it makes rows
    return torch.native_group_norm(x, given.get("weight"), given.get("bias"), *rest)[0]


_function(torch.embedding)(sparse_embedding)


@_function(Tensor.to, Tensor.cpu)
def _to(t: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_plain(args[0]):
        return func(*args, **kwargs)
    if func is Tensor.cpu:
        args = (args[0], torch.device("cpu"))
    home = t.value(args[0]).store.device
    kwargs = {name: x for name, x in kwargs.items() if name != "device" or not _is_home(x, home)}
    rest = [x for x in args[1:] if not _is_home(x, home)]
    return Tensor.to(args[0], *rest, **kwargs) if rest or kwargs else args[0]


def _is_home(x: object, home: torch.device) -> bool:
    """Whether an argument of `to` names the device where the tensor is."""
    if isinstance(x, str):
        x = torch.device(x)
    return isinstance(x, torch.device) and x.type == home.type and x.index in (None, home.index)


# ------------------------------------------------------------------------------ devices

_ASKING: frozenset[Any] = frozenset(
    {
        *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        *(torch.set_autocast_enabled, torch.amp.autocast_mode._enter_autocast),
    }
)


def needs_devices(gm: fx.GraphModule) -> bool:
    """Whether operators of this graph are made of others in ways that ask for the device."""
    if torch.is_autocast_enabled("cpu"):
        return True
    for module in gm.modules():
        if isinstance(module, torch.nn.RNNBase):
            return True
        if isinstance(module, fx.GraphModule) and any(map(_asks, module.graph.nodes)):
            return True
    return False


def _asks(node: fx.Node) -> bool:
    target: Any = node.target
    if target in _ASKING:
        return True
    return getattr(target, "name", None) is not None and _name(target) == "wrap_with_autocast"


def _name(target: Any) -> str:
    return target.name() if callable(target.name) else str(target.name)


# ------------------------------------------------------------------------------ inner graphs


def _with_grad_mode(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    with torch.set_grad_enabled(args[0]):
        return run_inner(t, args[1], list(args[2:]), attribute)


_regions = itertools.count()


def _checkpoint(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    outer = t.b.marks.get("recompute")
    if outer is not None:  # the outermost region recomputes all
        return inline(t, op, args, kwargs, attribute)
    t.b.marks["recompute"] = next(_regions)
    try:
        return inline(t, op, args, kwargs, attribute)
    finally:
        del t.b.marks["recompute"]


def _custom_function(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    """A torch.autograd.Function that capture has made two graphs of."""
    forward_graph, backward_graph, *inputs = args
    dirty = set(kwargs.get("dirty_idx", ()))
    plain = set(kwargs.get("non_differentiable_idx", ()))
    saved: list[Any] = []

    class Inlined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            out, kept = run_inner(t, forward_graph, list(given), attribute)
            saved[:] = kept
            flat = out if isinstance(out, (tuple, list)) else [out]
            ctx.mark_dirty(*(x for i, x in enumerate(flat) if i in dirty))
            ctx.mark_non_differentiable(*(x for i, x in enumerate(flat) if i in plain))
            return tuple(out) if isinstance(out, list) else out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = run_inner(t, backward_graph, [*grads, *saved], attribute)
            return tuple(found) if isinstance(found, list) else found

    return Inlined.apply(*inputs)  # type: ignore[no-untyped-call]


HIGHER_ORDER: Mapping[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": _with_grad_mode,
    "tag_activation_checkpoint": _checkpoint,
    "wrap_activation_checkpoint": _checkpoint,
    "autograd_function_apply": _custom_function,
}
