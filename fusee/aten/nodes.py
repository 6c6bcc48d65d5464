"""Runs the fx graph of torch calls, node by node, on meta tensors.

What isn't an operator is dealt with here: grad mode switches are dropped, graphs inside
higher-order operators run inline, and whatever needs a tensor's value is refused.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusee.aten import control_flow
from fusee.aten.scalars import Scalar, holds_scalar, is_read, on_tensors, read, returned
from fusee.aten.torch_api import HigherOrderOperator, active, is_skipped
from fusee.aten.tracer import Tracer
from fusee.errors import TraceError, user_line

__all__ = ["WithData", "failed", "inline", "run_inner", "run_nodes"]


def run_nodes(
    t: Tracer,
    gm: torch.nn.Module,
    graph: fx.Graph,
    inputs: list[Any],
    attribute: Callable[[torch.nn.Module, str], Any],
) -> Any:
    """Run `graph`, a part of module `gm`, on these inputs; what its output node returns.

    attribute   gives the value of a get_attr node
    raises      TraceError with the user's line
    """
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    load = env.__getitem__
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
            continue
        if node.op == "output":
            return fx.node.map_aggregate(fx.map_arg(node.args[0], load), returned)
        if node.op == "get_attr":
            env[node] = attribute(gm, node.target)
            continue
        outer = t.b.stack_trace
        t.b.stack_trace = node.stack_trace or outer
        args = fx.map_arg(node.args, load)
        kwargs = fx.map_arg(node.kwargs, load)
        region = node.meta.get("ac_graph_id")  # of torch.utils.checkpoint
        if region is not None:
            t.b.marks["recompute"] = region
        env[node] = _run(t, gm, node, args, kwargs, attribute)
        if region is not None:
            del t.b.marks["recompute"]
        if type(env[node]) is Scalar:
            env[node].known = node.meta.get("example_value")
        t.b.stack_trace = outer
    raise TraceError("the captured graph has no output node")


def _run(
    t: Tracer,
    gm: torch.nn.Module,
    node: fx.Node,
    args: Any,
    kwargs: Any,
    attribute: Callable[[torch.nn.Module, str], Any],
) -> Any:
    target: Any = node.target
    if node.op == "call_function":
        if isinstance(target, HigherOrderOperator):
            name: str = target.name()  # type: ignore[no-untyped-call]
            inner: Callable[..., Any] = t.higher_order.get(name, inline)
            return inner(t, target, args, kwargs, attribute)
        if target is operator.getitem and not isinstance(args[0], torch.Tensor):
            return args[0][args[1]]
        if is_skipped(target, with_grad=t.above is not None):
            return None
        call = target
    elif node.op == "call_method":
        call = (
            getattr(torch.Tensor, target)
            if isinstance(args[0], torch.Tensor)
            else (getattr(type(args[0]), target))
        )
    else:
        call = _module(t, gm, target, attribute)
    if call is torch.Tensor.new_tensor:
        args, call = (t, *args), _new_tensor
    if is_read(call, args):
        call = read
    elif holds_scalar((*args, *kwargs.values())):
        form = on_tensors(call)
        if form is None:
            args, kwargs = fx.node.map_aggregate((args, kwargs), returned)
        call = form or call
    try:
        special = _DATA.get(call)
        if special is not None:
            args, kwargs = special(t, args, dict(kwargs))
        t.look_at_autocast()
        with active(t), t.above or (WithData(t) if _is_python(call) else _NOTHING):
            return call(*args, **kwargs)
    except (TraceError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        name = target if isinstance(target, str) else target.__name__
        raise failed(t, name, error) from error


def _module(
    t: Tracer,
    gm: torch.nn.Module,
    name: str,
    attribute: Callable[[torch.nn.Module, str], Any],
) -> Callable[..., Any]:
    """A module that the graph calls. With autograd on it must work on twins, as all does."""
    module = gm.get_submodule(name)
    if t.above is None:
        return module
    own = [*module.named_parameters(), *module.named_buffers()]
    twins = {inner: attribute(gm, f"{name}.{inner}") for inner, _ in own}
    return lambda *args, **kwargs: torch.func.functional_call(module, twins, args, kwargs)


def failed(t: Tracer, name: str, error: Exception) -> TraceError:
    """The error for something that raised while it was traced."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return TraceError(
        f"{name} cannot run on meta tensors: {first}",
        where=user_line(t.b.stack_trace),
        did="stopped tracing this graph; the caller may run it eagerly",
    )


# ------------------------------------------------------------------------------ literals

# Functions of torch put tensors that they make from Python data on the device of another tensor.
# For a meta twin that loses the data, so the data is made into a real tensor first.

Literal = Callable[[Tracer, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


def _tensor(t: Tracer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        kwargs["device"] = t.device
    return args, kwargs


def _index(t: Tracer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    x, index, *rest = args
    if not isinstance(x, torch.Tensor):
        return args, kwargs
    items = index if isinstance(index, tuple) else (index,)
    items = tuple(map(_index_tensor, items))
    if any(map(_is_symbolic, items)):
        with active(t):
            x, items = _index_symbolic(x, items)
    return (x, items if isinstance(index, tuple) else items[0], *rest), kwargs


def _is_symbolic(index: Any) -> bool:
    if isinstance(index, slice):
        return any(isinstance(at, torch.SymInt) for at in (index.start, index.stop, index.step))
    return isinstance(index, torch.SymInt)


def _index_symbolic(x: torch.Tensor, items: tuple[Any, ...]) -> tuple[torch.Tensor, Any]:
    """x[items] as y[items] without symbolic integers, which plain tensors don't accept there."""
    used = sum(_axes_used(item) for item in items)
    axis = 0
    plain = []
    for item in items:
        if _is_symbolic(item):
            if isinstance(item, slice):
                start, stop, step = item.start, item.stop, item.step
                x = torch.ops.aten.slice.Tensor(x, axis, start, stop, 1 if step is None else step)
                item = slice(None)
            else:
                start = item if item >= 0 else item + x.shape[axis]
                x = torch.ops.aten.slice.Tensor(x, axis, start, start + 1)
                item = 0
        axis += x.dim() - used if item is Ellipsis else _axes_used(item)
        plain.append(item)
    return x, tuple(plain)


def _axes_used(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


def _index_tensor(index: Any) -> Any:
    """A list of indices as the tensor that indexing makes of it; anything else as it is."""
    if not _is_index_list(index):
        return index
    if all(isinstance(i, bool) for i in index):
        index = [i for i, is_chosen in enumerate(index) if is_chosen]
    return torch.tensor(index, dtype=torch.int64)


def _is_index_list(index: Any) -> bool:
    if not isinstance(index, list) or not index:
        return False
    return all(isinstance(i, (int, bool)) or _is_index_list(i) for i in index)


_DATA: dict[Any, Literal] = {
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.asarray: _tensor,
    operator.getitem: _index,
    operator.setitem: _index,
    torch.Tensor.__getitem__: _index,
    torch.Tensor.__setitem__: _index,
}


class WithData(torch.overrides.TorchFunctionMode):
    """Does the same for what a Python function calls, and sees it switch autocast."""

    def __init__(self, t: Tracer) -> None:
        super().__init__()
        self.t = t

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.t.look_at_autocast()
        if func is torch.Tensor.new_tensor:
            return _new_tensor(self.t, *args, **kwargs)
        special = _DATA.get(func)
        if special is not None:
            args, kwargs = special(self.t, args, kwargs)
        return func(*args, **kwargs)


_NOTHING = contextlib.nullcontext()


def _is_python(call: Any) -> bool:
    """Whether Python code runs in a call: only that may look at a tensor's device."""
    return isinstance(call, (types.FunctionType, torch.nn.Module))


def _new_tensor(t: Tracer, x: torch.Tensor, data: Any, **kwargs: Any) -> Any:
    kwargs = {"dtype": x.dtype, "device": t.value(x).store.device, **kwargs}
    kwargs.pop("requires_grad", None)
    return torch.tensor(data, **kwargs)


# ------------------------------------------------------------------------------ inner graphs

# Position of the inner graph and of its first argument, per higher-order operator.
_INLINE = {
    "wrap": (0, 1),
    "tag_activation_checkpoint": (0, 1),
    "wrap_activation_checkpoint": (0, 1),
    "wrap_with_set_grad_enabled": (1, 2),
    "invoke_subgraph": (0, 2),
    "autograd_function_apply": (0, 2),
}


def inline(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    name = op.name()
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache, inner, *rest = args
        with torch.autocast(device, dtype, enabled, cache):
            return run_inner(t, inner, rest, attribute)
    if name == "strict_mode":
        return run_inner(t, args[0], list(args[1]), attribute)
    if name == "hints_wrapper":
        return run_inner(t, args[0], list(args[1]), attribute)
    if name in control_flow.NAMES:
        return control_flow.called(t, op, args, kwargs, attribute)
    if name not in _INLINE:
        raise t.b.unsupported(f"the higher-order operator {name} has no form in ATen operators")
    at, first = _INLINE[name]
    out = run_inner(t, args[at], list(args[first:]), attribute)
    return out[0] if name == "autograd_function_apply" else out


def run_inner(t: Tracer, inner: Any, inputs: list[Any], attribute: Any) -> Any:
    if not isinstance(inner, fx.GraphModule):
        raise t.b.unsupported("a higher-order operator on something that is not a graph")
    return run_nodes(t, inner, inner.graph, inputs, attribute)
