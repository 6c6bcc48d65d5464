"""The private API of torch that capture stands on, in one place. Tested with torch 2.13.

torch._subclasses          FakeTensor and its mode: tensors without data, on their real device
torch._C                   switches of global state that programs flip through torch's classes
torch._ops                 the classes of operators
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._refs
import torch.fx
from torch._compile import _disable_dynamo
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

__all__ = [
    "FIXED_ANSWERS",
    "NEEDS_VALUES",
    "STATE_QUERIES",
    "STATE_SWITCHES",
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "call_impl",
    "fake_mode",
    "fake_of",
    "has_global_hooks",
    "is_allowed_by_torch",
    "is_bookkeeping",
    "is_graph_function",
    "recompile",
    "run_for_real",
    "set_compiled_call",
    "state_conditions",
    "state_restored",
]

# What a FakeTensor raises when it would have to know its elements.
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# Modules of C functions that compute tensors from tensors.
_GRAPH_MODULES = {
    "torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._nested",
    "torch._C._sparse",
}  # fmt: skip
# What a program that is captured learns from these.
FIXED_ANSWERS: dict[Any, Any] = {
    torch.compiler.is_compiling: True,
    torch.compiler.is_dynamo_compiling: True,
    torch._jit_internal.is_scripting: False,
    torch._C._get_tracing_state: None,
    torch._C._is_tracing: False,
    torch._C._log_api_usage_once: None,
    torch._C._has_torch_function: False,
    torch._C._has_torch_function_unary: False,
    torch._C._has_torch_function_variadic: False,
    torch._C._is_torch_function_enabled: True,
    torch._C._is_torch_function_mode_enabled: False,
    torch.jit.is_scripting: False,  # type: ignore[attr-defined]
    torch.jit.is_tracing: False,  # type: ignore[attr-defined]
    # nn.MultiheadAttention then is one call of nn.functional, as backends know it
    torch.backends.mha.get_fastpath_enabled: False,
}

# Asked while the graph is made. An entry is guarded by what they say: `state_conditions`.
STATE_QUERIES: tuple[Any, ...] = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype,
    torch.is_autocast_enabled, torch.get_autocast_dtype, torch.is_autocast_cache_enabled,
    torch._C._is_any_autocast_enabled, torch.finfo, torch.iinfo,
    torch.cuda.is_available, torch.promote_types, torch.can_cast,
    torch._C._len_torch_dispatch_stack, torch._C._is_autocast_available,
    torch._C._get_privateuse1_backend_name,
)  # fmt: skip

set_grad_enabled = torch._C._set_grad_enabled

# Each becomes a node of the graph, and runs while the graph is made: `State`.
STATE_SWITCHES: tuple[Any, ...] = (
    set_grad_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled, torch.autocast_increment_nesting,
    torch.autocast_decrement_nesting, torch.clear_autocast_cache,
)  # fmt: skip

# Says whether hooks for all modules are registered.
has_global_hooks: Callable[[], object] = torch.nn.modules.module._has_any_global_hook
# What calling a module does when nothing is compiled in its place.
call_impl: Any = torch.nn.Module._call_impl

_FUNCTIONS = torch._C._VariableFunctions


def fake_mode() -> Any:
    """A mode whose tensors are on the device they say, with static sizes."""
    if "torch._dynamo" not in sys.modules:
        _keep_dynamo_away()
    return _mode_without_dynamo()(allow_non_fake_inputs=False, shape_env=None)


# What FakeTensorMode asks torch._dynamo.config for, which takes more than a second to import.
_DYNAMO_CONFIG = types.SimpleNamespace(
    fake_tensor_cache_enabled=True,
    fake_tensor_cache_crosscheck_enabled=False,
    _custom_ops_profile=None,
)


@functools.cache
def _keep_dynamo_away() -> None:
    """Let torch's shape functions run without importing torch._dynamo.

    Many are wrapped so that their first call imports it, for the sake of telling it to stay away
    from them. Each such function gets what that call would find the next time: itself, as long as
    torch._dynamo is not there, and what torch puts there as soon as it is.
    """
    spaces: list[dict[Any, Any]] = [
        vars(torch._refs),
        vars(torch._refs.nn.functional),
        vars(torch._refs.special),
        vars(torch._decomp.decompositions),
        *torch._decomp.global_decomposition_table.values(),
    ]
    left = [x for space in spaces for x in space.values() if isinstance(x, types.FunctionType)]
    seen: set[int] = set()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        inner = [_contents(cell) for cell in function.__closure__ or ()]
        left += [x for x in inner if isinstance(x, types.FunctionType)]
        if function.__code__ is _LAZY_CODE:
            for wrapped in inner:
                if callable(wrapped) and not hasattr(wrapped, "__dynamo_disable"):
                    wrapped.__dynamo_disable = _without_dynamo(wrapped)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# The code of functions that `torch._disable_dynamo` has wrapped.
_LAZY_CODE = _disable_dynamo(lambda: None).__code__


def _without_dynamo(function: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):
            return function(*args, **kwargs)
        function.__dynamo_disable = disabled = dynamo.disable(function, True, wrapping=False)
        return disabled(*args, **kwargs)

    return run


@functools.cache
def _mode_without_dynamo() -> type[FakeTensorMode]:
    """FakeTensorMode, with those of its methods that look at torch._dynamo.config in a namespace
    in which `torch._dynamo` has nothing but the settings above, at their defaults.
    """
    torch_there = types.ModuleType("torch")
    torch_there.__dict__.update(torch.__dict__)
    torch_there.__dict__["_dynamo"] = types.SimpleNamespace(config=_DYNAMO_CONFIG)

    def import_there(name: str, *args: Any) -> Any:
        found = None if name == "torch._dynamo.config" else builtins.__import__(name, *args)
        return torch_there if found is torch or found is None else found

    space = {
        **sys.modules[FakeTensorMode.__module__].__dict__,
        "torch": torch_there,
        "__builtins__": {**builtins.__dict__, "__import__": import_there},
    }
    # torch's wrapper of __torch_dispatch__ imports torch._dynamo to tell it to stay away
    methods: dict[str, Any] = {
        "__torch_dispatch__": inspect.unwrap(FakeTensorMode.__torch_dispatch__),
        "_should_skip_dynamo": classmethod(lambda cls: False),
    }
    for name in ("__init__", "_dispatch_impl"):
        own: Any = getattr(FakeTensorMode, name)
        moved = types.FunctionType(own.__code__, space, name, own.__defaults__, own.__closure__)
        moved.__kwdefaults__ = own.__kwdefaults__
        methods[name] = moved
    return type("FakeTensorMode", (FakeTensorMode,), methods)


def fake_of(mode: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor without data like `x`, a leaf of autograd if it is one."""
    meta = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if not x.is_leaf:
        # computed from a leaf with the same layout: writing to it in place is allowed
        leaf = FakeTensor(mode, meta.new_empty(()), x.device, requires_grad=True)
        whole = FakeTensor(mode, meta.new_empty(_extent(x)), x.device)
        with torch.enable_grad(), mode:
            return whole.mul_(leaf).as_strided(x.size(), x.stride())
    fake = FakeTensor(mode, meta, x.device, requires_grad=x.requires_grad)
    if isinstance(x, torch.nn.Parameter):
        fake._is_param = True  # what isinstance(..., nn.Parameter) asks for
    return fake


def _extent(x: torch.Tensor) -> int:
    """How many elements a storage has that holds `x` at its beginning."""
    if not x.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.size(), x.stride()))


def is_bookkeeping(function: Any) -> bool:
    """Whether a function only notes, for TorchDynamo, that a module was made."""
    home = getattr(function, "__module__", None)
    return home == "torch._dynamo.mutation_guard" and function.__name__ == "tag"


def is_graph_function(fn: Any) -> bool:
    """Whether a C function computes tensors and does nothing else."""
    if isinstance(fn, (OpOverload, OpOverloadPacket)):
        return True
    if getattr(fn, "__module__", None) in _GRAPH_MODULES:
        return True
    return getattr(_FUNCTIONS, getattr(fn, "__name__", ""), None) is not None and (
        getattr(_FUNCTIONS, fn.__name__) == fn
    )


def is_allowed_by_torch(function: Any) -> bool:
    """Whether torch.compiler.allow_in_graph was called for a function; it imports torch._dynamo."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return rules is not None and id(function) in rules._allowed_callable_ids


def run_for_real(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function while a program is captured, without its torch calls being recorded."""
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


def recompile(gm: torch.fx.GraphModule) -> None:
    """Write a graph's code anew. Its source, which torch keeps for ever, goes with the graph."""
    _forget_source(gm.forward.__code__.co_filename)
    gm.recompile()
    weakref.finalize(gm, _forget_source, gm.forward.__code__.co_filename).atexit = False


def _forget_source(name: str) -> None:
    linecache.cache.pop(name, None)
    torch.fx.graph_module._loader.eval_cache.pop(name, None)


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let calls of a module go to `call`."""
    module._compiled_call_impl = call


def state_conditions() -> tuple[list[str], dict[str, Any]]:
    """The global state that a graph depends on: conditions, and the names that they use."""
    names: dict[str, Any] = {
        "_grad": torch.is_grad_enabled,
        "_inference": torch.is_inference_mode_enabled,
        "_autocast": torch._C._is_any_autocast_enabled,
        "_default": torch.get_default_dtype,
        "_dtype": torch.get_default_dtype(),
        "_hooked": has_global_hooks,
    }
    conditions = [
        f"_grad() is {torch.is_grad_enabled()}",
        f"_inference() is {torch.is_inference_mode_enabled()}",
        "_default() is _dtype",
        "_hooked()" if has_global_hooks() else "not _hooked()",
    ]
    if not names["_autocast"]():
        conditions.append("_autocast() is False")
        return conditions, names
    names["_on"], names["_as"] = torch.is_autocast_enabled, torch.get_autocast_dtype
    for device in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(device)
        conditions.append(f"_on({device!r}) is {on}")
        if on:
            names[f"_as_{device}"] = torch.get_autocast_dtype(device)
            conditions.append(f"_as({device!r}) is _as_{device}")
    return conditions, names


class State(NamedTuple):
    """Global state that programs switch: gradients; autocast by device, its cache, its depth."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    depth: int

    @classmethod
    def now(cls) -> State:
        torch.autocast_increment_nesting()
        autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ]
        cache, depth = torch.is_autocast_cache_enabled(), torch.autocast_decrement_nesting()
        return cls(torch.is_grad_enabled(), tuple(autocast), cache, depth)

    def switches(self, then: State) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """The calls that lead from this state to another."""
        if self.grad != then.grad:
            yield set_grad_enabled, (then.grad,)
        for (device, on, dtype), (_, on_then, dtype_then) in zip(self.autocast, then.autocast):
            if on != on_then:
                yield torch.set_autocast_enabled, (device, on_then)
            if dtype != dtype_then:
                yield torch.set_autocast_dtype, (device, dtype_then)
        if self.cache != then.cache:
            yield torch.set_autocast_cache_enabled, (then.cache,)
        deeper = then.depth > self.depth
        step = torch.autocast_increment_nesting if deeper else torch.autocast_decrement_nesting
        yield from [(step, ())] * abs(then.depth - self.depth)


@contextlib.contextmanager
def state_restored() -> Iterator[None]:
    """Puts back the global state that a traced program switches."""
    before = State.now()
    try:
        yield
    finally:
        for function, args in State.now().switches(before):
            function(*args)
