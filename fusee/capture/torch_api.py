"""The private API of torch that capture stands on, in one place. Tested with torch 2.13.

torch._C._dynamo           TorchDynamo's hook: switches it off
torch._C                   switches of global state that programs flip through torch's classes
torch._ops                 the classes of operators
torch.fx.graph_module, _lazy_graph_module  what calls such modules; those that make code when asked
torch.fx._symbolic_trace   whether a tracer of torch.fx runs
torch._functorch           which axes vmap maps over; whether a transform is under way
torch.nn.parallel.distributed  what calls the module within
torch.autograd.forward_ad  its level: whether tensors may carry tangents
torch.utils._python_dispatch  switches modes off, while a subclass' method runs on the machine
torch.overrides, torch.utils._device  the stack of torch function modes, and what is on it
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import operator
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._functorch.vmap import _process_batched_inputs
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import _WrappedCall
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _python_dispatch, _pytree

from fusee.capture.bytecode import codes
from fusee.errors import GENERATED, user_frame
from fusee.fake import FakeTensor as FakeTensor
from fusee.fake import fake_again as fake_again
from fusee.fake import fake_mode as fake_mode
from fusee.fake import fake_of as fake_of
from fusee.fake import has_saved_tensor_hooks as has_saved_tensor_hooks
from fusee.fake import without_dynamo as without_dynamo
from fusee.fake.gradients import as_autograd_keeps as as_autograd_keeps
from fusee.fake.gradients import history as history
from fusee.fake.gradients import leaf_gradients as leaf_gradients
from fusee.fake.gradients import saves as saves
from fusee.source import Args, Function, leaves

pytree = _pytree
without_modes = _python_dispatch._disable_current_modes
# Inside, no mode hears of calls, the recorder's neither, nor a subclass.
no_torch_function: Any = torch._C.DisableTorchFunction

# Modules of C functions that compute tensors from tensors.
_GRAPH_MODULES = frozenset(
    "torch._C._nn torch._C._fft torch._C._linalg torch._C._special torch._C._nested"
    " torch._C._sparse".split()
)
# What a program that is captured learns from these.
FIXED_ANSWERS: dict[Any, Any] = {
    torch._jit_internal.is_scripting: False,
    torch._C._get_tracing_state: None,
    torch._C._is_tracing: False,
    torch._C._log_api_usage_once: None,
    _device._device_constructors: _device._device_constructors(),
    torch.jit.is_scripting: False,  # type: ignore[attr-defined]
    torch.jit.is_tracing: False,  # type: ignore[attr-defined]
    torch.fx._symbolic_trace.is_fx_tracing: False,
}

# Asked while the graph is made. An entry is guarded by what they say (of autocast: for CPUs and
# CUDA): `state_conditions`.
STATE_QUERIES: tuple[Any, ...] = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype,
    torch.is_autocast_enabled, torch.get_autocast_dtype, torch.is_autocast_cache_enabled,
    torch.is_autocast_cpu_enabled, torch.get_autocast_cpu_dtype, torch.get_autocast_gpu_dtype,
    torch._C._is_any_autocast_enabled, torch.finfo, torch.iinfo,
    torch.promote_types, torch.can_cast,
    torch._C._len_torch_dispatch_stack, torch._C._is_autocast_available,
    torch._C._get_privateuse1_backend_name,
)  # fmt: skip

# What kinds of devices there are: one answer in a process.
DEVICES: tuple[Any, ...] = (
    torch.cuda.is_available, torch._C._mps_is_available, torch._C._mtia_isBuilt,
    torch._C._mtia_getDeviceCount,
)  # fmt: skip

set_grad_enabled = torch._C._set_grad_enabled
infer_size: Any = torch._C._infer_size  # torch.broadcast_shapes of two

# `apply` of every class of autograd functions.
apply_function: Any = torch.autograd.Function.__dict__["apply"].__func__


def enter_inference_mode(mode: bool) -> Any:
    """Switch inference mode; `__exit__` of what this gives puts back what was."""
    context: Any = torch._C._InferenceMode(mode)
    context.__enter__()
    return context


def leaf_of_inference(data: torch.Tensor, requires_grad: bool, is_param: bool) -> torch.Tensor:
    """The leaf, or Parameter, that a program made in inference mode, which alone may make it."""
    with torch.inference_mode():
        leaf = data.detach().requires_grad_(requires_grad)
        return torch.nn.Parameter(data, requires_grad) if is_param else leaf


def of_inference(data: torch.Tensor) -> torch.Tensor:
    """The tensor that a program made in inference mode, of memory that a graph gave."""
    with torch.inference_mode():
        return data.new_empty(0).set_(data)  # type: ignore[call-overload, no-any-return]


set_deterministic: Any = torch._C._set_deterministic_algorithms
set_default_dtype: Any = torch._C._set_default_dtype

# Which kernels attention may take, and in which order: torch.nn.attention.sdpa_kernel.
_ATTENTION: dict[Any, Any] = {
    getattr(torch._C, f"_get_{name}_sdp_enabled"): getattr(torch._C, f"_set_sdp_use_{name}")
    for name in ("cudnn", "flash", "math", "mem_efficient", "overrideable")
}
_ATTENTION[torch._C._get_sdp_priority_order] = torch._C._set_sdp_priority_order


@functools.cache
def _order_attention() -> None:
    """torch puts a GPU's kernels for attention in order when it first chooses one: from then on
    the order changes only where a program changes it."""
    with _python_dispatch._disable_current_modes(), torch.no_grad():
        x = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(x, x, x)


_hooks: Any = torch._C._autograd
_HOOKS_OFF, _HOOKS_ON = _hooks._saved_tensors_hooks_disable, _hooks._saved_tensors_hooks_enable
_hooks_refusal: Callable[[], Any] = _hooks._saved_tensors_hooks_get_disabled_error_message

# Each becomes a node of the graph, and runs while the graph is made: `State`.
STATE_SWITCHES: tuple[Any, ...] = (
    set_grad_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled, torch.autocast_increment_nesting,
    torch.autocast_decrement_nesting, torch.clear_autocast_cache,
    set_deterministic, set_default_dtype, *_ATTENTION.values(), _HOOKS_OFF, _HOOKS_ON,
)  # fmt: skip
for _switch in STATE_SWITCHES:
    torch.fx.has_side_effect(_switch)  # passes of a backend's take calls away that nobody uses
# What a program may ask for, and what sets it: each is a fact until the program itself has set it.
SWITCHED_BY: dict[Any, tuple[Any, ...]] = {
    torch._C._get_deterministic_algorithms: (set_deterministic,),
    torch.is_deterministic_algorithms_warn_only_enabled: (set_deterministic,),
    **{get: (set_,) for get, set_ in _ATTENTION.items()},
    _hooks_refusal: (_HOOKS_OFF, _HOOKS_ON),
    torch.autograd.Variable._execution_engine.is_checkpoint_valid: (),
}

_GLOBAL_HOOKS = tuple(
    "_global_backward_pre_hooks _global_backward_hooks _global_forward_pre_hooks"
    " _global_forward_hooks _global_forward_hooks_always_called"
    " _global_forward_hooks_with_kwargs".split()
)
# Says whether hooks for all modules are registered: C, since each call asks it.
has_global_hooks: functools.partial[bool] = functools.partial(
    any, [getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS]
)
# What calling a module does when nothing is compiled in its place.
call_impl: Any = torch.nn.Module._call_impl


# All that torch itself does between a call of a module and its `forward`: hooks, and what the class
# that is made for each fx.GraphModule has in place of Module.__call__.
AROUND_FORWARD = {
    *codes(torch.nn.Module._wrapped_call_impl.__code__),
    *codes(call_impl.__code__),
    *(c for c in codes(torch.fx.GraphModule.recompile.__code__) if c.co_name == "call_wrapped"),
    _WrappedCall.__call__.__code__,
}


def is_parallel(function: Any) -> bool:
    """Whether a function is what calling a DistributedDataParallel runs."""
    is_forward: bool = function.__qualname__ == "DistributedDataParallel.forward"
    return is_forward and function.__module__ == "torch.nn.parallel.distributed"


def run_parallel(within: Function, forward: Any, module: Any, *given: Any, **kw: Any) -> Any:
    """`forward` of a DistributedDataParallel, with `within` in place of calling its module."""
    if module._delay_all_reduce_all_params:
        return forward(module, *given, **kw)
    with torch.profiler.record_function(forward.__qualname__):
        given, kw = module._pre_forward(*given, **kw)
        with module._inside_ddp_forward():
            found = within(module.module, *given, **kw)
        return module._post_forward(found)


_FUNCTIONS = torch._C._VariableFunctions


# Functions that tell TorchDynamo something, and nobody else: that a module was made; that a setting
# of its is another one for a while (dont_skip_tracing, which torch.export puts around guards).
FOR_DYNAMO = {
    ("torch._dynamo.mutation_guard", "GenerationTracker.tag"),
    ("torch._dynamo.decorators", "DynamoConfigPatchProxy.__enter__"),
    ("torch._dynamo.decorators", "DynamoConfigPatchProxy.__exit__"),
}


def marks_static(function: Any) -> bool:
    """Whether a function is mark_static, of torch or ours."""
    name = f"{function.__module__}.{function.__name__}"
    return name in ("torch._dynamo.decorators.mark_static", "fusee.compiler.mark_static")


class Mark(NamedTuple):
    """What a program has said of a size of a tensor by mark_dynamic and the like.

    dynamic   False: it is a constant
    is_strict whether it is an error that the program makes it one
    unbacked  whether even a branch on it is an error
    group     of sizes that are equal
    dim       the torch.export.Dim that it is, or is derived from
    """

    dynamic: bool
    is_strict: bool = False
    min: int | None = None
    max: int | None = None
    dim: Any = None
    unbacked: bool = False
    group: str | None = None


def marks(x: torch.Tensor) -> dict[int, Mark]:
    """By axis, as torch._dynamo.mark_dynamic and our own leave it on a tensor."""
    noted = x.__dict__
    if not noted:
        return {}
    found = dict.fromkeys(noted.get("_dynamo_static_indices", ()), Mark(False))
    found |= dict.fromkeys(noted.get("_dynamo_weak_dynamic_indices", ()), Mark(True))
    found |= dict.fromkeys(noted.get("_dynamo_dynamic_indices", ()), Mark(True, True))
    for of in noted.get("_dynamo_dynamic_range", ()):  # one for each call: all of them hold
        before = found[of.dim]
        low = max((end for end in (before.min, of.min) if end is not None), default=None)
        high = min((end for end in (before.max, of.max) if end is not None), default=None)
        found[of.dim] = Mark(True, True, low, high)
    bounds, groups = (noted.get(f"_dynamo_{name}", {}) for name in ("unbacked_bounds", "shape_ids"))
    for name in ("unbacked_indices", "strict_unbacked_indices"):
        for axis in noted.get(f"_dynamo_{name}", ()):
            low, high = bounds.get(axis, (None, None))
            is_strict, group = name.startswith("strict"), groups.get(axis)
            found[axis] = Mark(True, is_strict, low, high, None, True, group)
    return {axis % x.dim(): mark for axis, mark in found.items()} if x.dim() else {}


def has_fixed_address(x: torch.Tensor) -> bool:
    """Whether mark_static_address says that another address makes another version."""
    return x.__dict__.get("_dynamo_static_input_type") == "guarded"


def is_graph_function(fn: Any) -> bool:
    """Whether a C function computes tensors and does nothing else."""
    found = getattr(_FUNCTIONS, getattr(fn, "__name__", ""), None)
    is_one = found is not None and found == fn
    return is_one or getattr(fn, "__module__", None) in _GRAPH_MODULES


def scripted(
    call: Callable[..., Any], function: Any, args: Args, kwargs: dict[str, Any]
) -> tuple[Any, Args, dict[str, Any]]:
    """The function that torch.jit.script was given, and its arguments as TorchScript takes them.

    None in its place if one would be refused, or become another in a way that is not known.
    call   makes lists and dicts of those from outside
    """
    declared = {argument.name: argument.type for argument in function.schema.arguments}
    try:
        taken = [_as_declared(call, x, kind) for x, kind in zip(args, declared.values())]
        named = {
            name: _as_declared(call, x, declared[name]) if name in declared else x
            for name, x in kwargs.items()
        }
    except _Undeclared:
        return None, args, kwargs
    inner = getattr(function, "_torchdynamo_inline", None)
    return inner, (*taken, *args[len(taken) :]), named


class _Undeclared(Exception):
    """An argument that a scripted function may not take as it is."""


def _as_declared(call: Callable[..., Any], x: Any, kind: Any) -> Any:
    """What a scripted function gets for an argument: containers are copies of the declared kind."""
    if type(kind) is torch.OptionalType and x is not None:
        kind = kind.getElementType()
    if type(x) in (list, tuple) and type(kind) in (torch.ListType, torch.TupleType):
        items = call(list, x)
        is_list = type(kind) is torch.ListType
        kinds = [kind.getElementType()] * len(items) if is_list else kind.elements()
        if len(kinds) != len(items):
            raise _Undeclared
        return (list if is_list else tuple)(map(_as_declared, [call] * len(items), items, kinds))
    if type(x) is dict and type(kind) is torch.DictType:
        of = kind.getValueType()
        return {key: _as_declared(call, y, of) for key, y in call(dict, x).items()}
    if type(x) is int and type(kind) is torch.FloatType:
        return float(x)
    if type(x) in _SCRIPTED:
        found: Any = torch._C._jit_try_infer_type(x)
        if not found.success() or not found.type().isSubtypeOf(kind):
            raise _Undeclared
    return x


_SCRIPTED = (FakeTensor, bool, int, float, complex, str, type(None), tuple, list, dict)


def is_allowed_by_torch(function: Any) -> bool | None:
    """Whether torch.compiler.allow_in_graph was called for a function; it imports torch._dynamo.
    False: torch._dynamo.disallow_in_graph was, as for graph_break; None: neither."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None:
        return None
    known = rules._allowed_callable_ids.function_ids, rules._disallowed_callable_ids.function_ids
    at = id(function)
    return True if at in (known[0] or ()) else False if at in (known[1] or ()) else None


def allowed_by_torch() -> int:
    """For how many functions the program called one of the two."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None:
        return 0
    kept_out = rules._disallowed_callable_ids.function_ids
    own = {id(x) for x in vars(sys.modules["torch._dynamo.decorators"]).values()}
    return len(rules._allowed_callable_ids.function_ids) + len(kept_out - own)


def compiler_setting(name: str) -> str:
    """A text of torch.compiler.config, which reads torch's environment variables."""
    return getattr(sys.modules.get("torch.compiler.config"), name, None) or ""


DYNAMO = "torch._dynamo.eval_frame"

# What pybind11 keeps of a function: to make another one ends the process.
IN_CPP: Any = type(torch._C._is_tracing.__self__)  # type: ignore[attr-defined]

_dynamo: Any = torch._C._dynamo.eval_frame
_SKIPPED = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)


def skip_frame(code: types.CodeType) -> None:
    """Let TorchDynamo leave a function alone, except where it inlines it in what it traces."""
    _dynamo.set_code_exec_strategy(code, _SKIPPED)


# Of TorchDynamo's `_stance`, without a frame of Python's; and what it is unless it was set.
stance_fields: Callable[[Any], tuple[str, bool, Any]]
stance_fields = operator.attrgetter("stance", "skip_guard_eval_unsafe", "backend")
USUAL_STANCE = types.SimpleNamespace(stance="default", skip_guard_eval_unsafe=False, backend=None)


def dynamo_stance() -> tuple[str, bool, Any] | None:
    """What torch.compiler.set_stance, which imports TorchDynamo, was given; None if nothing."""
    found = stance_fields(getattr(sys.modules.get(DYNAMO), "_stance", USUAL_STANCE))
    return None if found == stance_fields(USUAL_STANCE) else found


def dynamo_switch(name: str) -> bool:
    """Whether torch._dynamo.config has a switch on, if it is imported."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), name, False))


def batch_axes(in_dims: Any, args: Args, function: Any) -> list[int | None]:
    """The axis that torch.vmap maps over, for each leaf of `args`; it raises for wrong ones."""
    return _process_batched_inputs(in_dims, args, function)[1]


def oddity(x: torch.Tensor) -> str:
    """How the elements of a tensor lie, if not by strides; "" if they do."""
    is_left = torch._C._functorch.is_functorch_wrapped_tensor(x)  # by a transform
    is_left |= torch._C._functorch.is_legacy_batchedtensor(x)  # a gradient of `is_grads_batched`
    if is_left or x._is_zerotensor() or torch._is_functional_tensor(x):
        return "without memory"
    by_strides = x.layout is torch.strided and not (x.is_quantized or x.is_nested)
    return "" if by_strides else "nested" if x.is_nested else f"of layout {x.layout}"


_is_functionalizing = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.Functionalize
)


def within_transform() -> bool:
    """Whether torch.vmap, torch.func, forward-mode autograd or C++'s functionalization runs."""
    stack: Any = torch._C._functorch.peek_interpreter_stack()
    has_tangents = forward_ad._current_level >= 0  # or torch.func.jvp's
    return stack is not None or has_tangents or _is_functionalizing()


def is_of_hooks(error: Exception) -> bool:
    """Whether a hook on saved tensors raised it, as a checkpoint ends its own second run."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = hooks and hooks[0]
    while isinstance(pack, functools.partial):
        pack = pack.func
    codes = [getattr(x, "__code__", error) for x in (pack, getattr(pack, "__call__", None))]  # noqa: B004
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


# A thread's own in newer versions.
_is_fx_tracing: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag
)


def is_traced() -> bool:
    """Whether a tracer is to see each operator: torch.jit.trace, torch.fx, make_fx, torch.export.

    Or another torch dispatch mode.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing() or _is_fx_tracing()


def run_for_real(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function while a program is captured, without its torch calls being recorded."""
    with no_torch_function():
        return function(*args, **kwargs)


# What a subclass of torch.Tensor may have of what torch.Tensor has, or Python looks for.
_FREE = {
    f"__{name}__" for name in """
        module doc dict weakref qualname annotations annotate annotate_func annotations_cache
        static_attributes firstlineno slotnames init new repr str torch_function orig_bases
        parameters init_subclass class_getitem deepcopy reduce reduce_ex abstractmethods
    """.split()
}  # fmt: skip
_ROOTS = (torch.nn.Parameter, torch.nn.Buffer, torch.Tensor, torch._C.TensorBase, object)


def own_classes(kind: type) -> list[type]:
    """The classes that make a subclass of torch.Tensor another one."""
    return [cls for cls in kind.__mro__ if cls not in _ROOTS]


def why_unseen(kind: Any) -> str:
    """Why instances of a subclass of torch.Tensor cannot be captured; "" if they can."""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "it has __torch_dispatch__"
    if kind in _ROOTS:
        return "its class is called"
    if type(kind) not in (type(torch.Tensor), type(torch.nn.Parameter)):
        return f"it is a {type(kind).__name__}"
    for cls in own_classes(kind):
        for name in vars(cls):
            if name not in _FREE and (hasattr(torch.Tensor, name) or name[:2] == name[-2:] == "__"):
                return f"it has a {name} of its own"
        if cls.__module__.partition(".")[0] == "torch":
            return "it is torch's own"
        given = vars(cls).get("__torch_function__", _disabled)
        if given is not _disabled and not isinstance(given, classmethod):
            return "its __torch_function__ is no classmethod"
    return ""


_disabled = torch._C._disabled_torch_function_impl


def asks(kind: Any) -> bool:
    """Whether torch asks a class what becomes of calls with its instances."""
    return kind is not torch.Tensor and kind.__torch_function__ is not _disabled


def plain_tensor(x: torch.Tensor) -> torch.Tensor:
    """What a graph takes for an instance of a subclass: a view of it, in autograd's sense too."""
    with no_torch_function(), torch.enable_grad():
        return x.as_subclass(torch.Tensor)


def of_subclass(x: torch.Tensor, kind: Any, requires_grad: bool) -> torch.Tensor:
    """An instance of a subclass for what a graph gives."""
    with no_torch_function(), torch.set_grad_enabled(requires_grad):
        return x.as_subclass(kind)  # type: ignore[no-any-return]


def of_array(x: torch.Tensor) -> torch.Tensor:
    """What torch.from_numpy() makes of an array that lies here: nobody can resize its memory."""
    with no_torch_function():
        # one with a history is left as it is: its memory alone would lose that
        return x if x.requires_grad else torch.from_numpy(x.numpy())


def was_leaf(x: torch.Tensor) -> bool:
    """Whether it is a leaf of autograd, asked of the tensor and not of its class."""
    with no_torch_function():
        return x.is_leaf


def graph_module(
    graph: torch.fx.Graph, inner: torch.nn.Module | None = None
) -> torch.fx.GraphModule:
    """A graph as a module; `inner` has the graphs that its nodes name."""
    return _CapturedGraph(inner or torch.nn.Module(), graph)


class _CapturedGraph(_LazyGraphModule):
    """Its code is made when it is first asked for; the source, which torch keeps, goes with it."""

    @property
    def _lazy_forward(self) -> Function:
        self.real_recompile()
        return self.forward

    forward = _lazy_forward

    def _real_recompile(self) -> Any:
        made = super()._real_recompile()
        name = type(self).forward.__code__.co_filename
        _dies_with(self, linecache.cache, name)
        _dies_with(self, torch.fx.graph_module._loader.eval_cache, name)
        return made


def _dies_with(owner: Any, table: dict[str, Any], key: str) -> None:
    weakref.finalize(owner, table.pop, key, None).atexit = False


def note_lines(module: Any) -> None:
    """Let what is told of lines of an fx.GraphModule name the user's lines, or the modules."""
    code: Any = getattr(getattr(type(module), "forward", None), "__code__", None)
    is_graph = code is not None and isinstance(module, torch.fx.GraphModule)
    if not is_graph or code.co_filename in GENERATED:
        return
    title, nodes = f"<graph of {type(module).__name__}>", list(module.graph.nodes)
    origins: dict[int, str] = {}
    for offset, index in (module._lineno_map or {}).items():
        if index is None or index >= len(nodes):
            continue
        node, line = nodes[index], code.co_firstlineno + offset
        frame = user_frame(node.stack_trace)
        stack = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
        path = str(node.target) if node.op == "call_module" else next(reversed(stack), "")
        origins[line] = f"{title}:{line} in {path or code.co_name}"
        if frame is not None:
            origins[line] = f"{frame['file']}:{frame['line']} in {frame['function']}"
    GENERATED[code.co_filename] = title, origins
    _dies_with(module, GENERATED, code.co_filename)


def set_compiled_call(module: torch.nn.Module, call: Function) -> None:
    """Let calls of a module go to `call`."""
    module._compiled_call_impl = call


# Functions on torch's stack of torch function modes, by what they do.
MODE_STACK = types.SimpleNamespace(
    push=torch.overrides._push_mode,
    pop=torch.overrides._pop_mode,
    length=torch._C._len_torch_function_stack,
    all=torch.overrides._get_current_function_mode_stack,
)
DeviceContext: Any = _device.DeviceContext
is_deterministic: Any = torch._C._get_deterministic_algorithms
function_modes: Callable[[], list[Any]] = MODE_STACK.all


@contextlib.contextmanager
def without_function_modes() -> Iterator[list[Any]]:
    """Switches those of the program's off. Gives a list of them: what it has then is put back."""
    modes = function_modes()
    for _ in modes:
        MODE_STACK.pop()
    try:
        yield modes
    finally:
        for mode in modes:
            MODE_STACK.push(mode)


_AUTOCAST_ON, _AUTOCAST_AS = (
    {f"{name}_{device}": functools.partial(ask, device) for device in ("cpu", "cuda")}
    for name, ask in (("on", torch.is_autocast_enabled), ("as", torch.get_autocast_dtype))
)
forward_level = vars(forward_ad), "_current_level"
# What a graph relies on of torch's global state, by name: what gives it.
STATE_ASKED: dict[str, Callable[[], Any]] = {
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "autocast": torch._C._is_any_autocast_enabled,
    "deterministic": is_deterministic,  # some backends' code is of one kind
    "default": torch.get_default_dtype,
    "hooked": has_global_hooks,
    "transforms": torch._C._functorch.peek_interpreter_stack,
    "forward": functools.partial(operator.getitem, *forward_level),
    "traced": torch._C._is_tracing,
    "dispatching": torch._C._len_torch_dispatch_stack,
    "modes": MODE_STACK.length,
    "cache": torch.is_autocast_cache_enabled,
    **_AUTOCAST_AS,  # where it is off too: `torch.autocast("cpu")` within a program takes it
    **_AUTOCAST_ON,
    "transformed": within_transform,
}
# What of that decides on what a graph costs, or on who sees its check.
OF_PRICE = {"grad", "autocast", "modes", *_AUTOCAST_AS, *_AUTOCAST_ON}


def state_conditions() -> dict[str, Any]:
    """The global state that a graph depends on; within transforms there are none."""
    if within_transform():
        return {"transformed": True}
    is_on = torch._C._is_any_autocast_enabled()
    without = {"transformed", *(() if is_on else _AUTOCAST_ON)}
    return {name: ask() for name, ask in STATE_ASKED.items() if name not in without}


class State(NamedTuple):
    """Global state that programs switch: gradients; autocast by device, its cache, its depth;
    whether algorithms are deterministic, and whether that only warns; what attention may take;
    in which words hooks on saved tensors are refused; the dtype of what says none."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    depth: int
    deterministic: tuple[bool, bool]
    attention: tuple[Any, ...]
    hooks: str | None
    dtype: torch.dtype

    @classmethod
    def now(cls) -> State:
        torch.autocast_increment_nesting()
        autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ]
        cache, depth = torch.is_autocast_cache_enabled(), torch.autocast_decrement_nesting()
        deterministic = is_deterministic(), torch.is_deterministic_algorithms_warn_only_enabled()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _order_attention()
        attention = tuple(get() for get in _ATTENTION)
        on = torch.is_grad_enabled(), tuple(autocast), cache, depth
        refusal, dtype = _hooks_refusal(), torch.get_default_dtype()
        return cls(*on, deterministic, attention, refusal, dtype)

    def switches(self, then: State) -> Iterator[tuple[Function, tuple[Any, ...], Any]]:
        """The calls that lead from this state to another, with their arguments."""
        if self.grad != then.grad:
            yield set_grad_enabled, (then.grad,), {}
        for (device, on, dtype), (_, on_then, dtype_then) in zip(self.autocast, then.autocast):
            if on != on_then:
                yield torch.set_autocast_enabled, (device, on_then), {}
            if dtype != dtype_then:
                yield torch.set_autocast_dtype, (device, dtype_then), {}
        if self.cache != then.cache:
            yield torch.set_autocast_cache_enabled, (then.cache,), {}
        deeper = then.depth > self.depth
        step = torch.autocast_increment_nesting if deeper else torch.autocast_decrement_nesting
        yield from [(step, (), {})] * abs(then.depth - self.depth)
        if self.deterministic != then.deterministic:
            is_on, warn_only = then.deterministic
            yield set_deterministic, (is_on,), {"warn_only": warn_only}
        for set_, was, now in zip(_ATTENTION.values(), self.attention, then.attention):
            if was != now:
                yield set_, (now,), {}
        if self.hooks != then.hooks:
            yield (_HOOKS_ON, (), {}) if then.hooks is None else (_HOOKS_OFF, (then.hooks,), {})
        if self.dtype != then.dtype:
            yield set_default_dtype, (then.dtype,), {}


@contextlib.contextmanager
def state_restored() -> Iterator[None]:
    """Puts back the global state that a traced program switches."""
    before = State.now()
    try:
        yield
    finally:
        for function, args, kwargs in State.now().switches(before):
            function(*args, **kwargs)


# ---------------------------------------------------------------------------- stand-ins
# The private API of torch that stand-ins for its functions need. Tested with torch 2.11 to 2.13.
#
# torch._numpy             NumPy's functions on tensors
# torch.ops.higher_order   operators that take functions (torch._higher_order_ops)
# torch._shape_as_tensor   sizes, as a tensor
# torch.utils.checkpoint   the mode that asks a policy in a region's first run

higher_order: Any = torch.ops.higher_order
generic_scan: Any = generic_associative_scan
shape_as_tensor: Any = torch._shape_as_tensor
SelectiveMode: Any = torch.utils.checkpoint._CachingTorchDispatchMode


@functools.cache
def _torch_numpy() -> Any:
    return importlib.import_module("torch._numpy")


def as_array(tensor: torch.Tensor) -> Any:
    """What functions of torch._numpy take for a tensor."""
    return _torch_numpy().ndarray(tensor)


def tensor_of(x: Any) -> torch.Tensor | None:
    """The tensor behind what torch._numpy gives; None if it is no array."""
    found: torch.Tensor | None = x.tensor if isinstance(x, _torch_numpy().ndarray) else None
    return found


@functools.cache
def counterparts() -> dict[Any, Any]:
    """NumPy's functions and methods -> torch._numpy's, which have the same names."""
    numpy, made = sys.modules["numpy"], _torch_numpy()
    found: dict[Any, Any] = {}
    for name in ("", "linalg", "fft"):
        theirs, torchs = (getattr(x, name) if name else x for x in (numpy, made))
        for key, function in vars(torchs).items():
            if key[0] != "_" and callable(function) and callable(getattr(theirs, key, None)):
                found[getattr(theirs, key)] = function
    for key, function in vars(made.ndarray).items():
        for kind in {numpy.ndarray, numpy.generic, *numpy.sctypeDict.values()}:
            if key[:2] != "__" and callable(function) and hasattr(kind, key):
                found[getattr(kind, key)] = function
    return found


DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class _Explicit(TorchFunctionMode):
    """Data without a dtype get NumPy's: torch._numpy switches torch's default for them instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {
            key: DTYPE_OF.get(x, x) if key == "dtype" else x for key, x in (kwargs or {}).items()
        }
        if func is torch.as_tensor and not isinstance(args[0], torch.Tensor):
            data = sys.modules["numpy"].asarray(args[0])
            dtype = kwargs.get("dtype") or getattr(torch, data.dtype.name)
            if isinstance(args[0], (bool, int, float, complex)):
                return torch.full((), args[0], dtype=dtype)
            kwargs = {"dtype": dtype}
        return func(*args, **kwargs)


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Within it torch._numpy has NumPy's default dtypes; it would import torch._dynamo for them."""
    space: Any = importlib.import_module("torch._numpy._dtypes_impl")
    before = space._default_dtypes
    space._default_dtypes = space.DefaultDTypes(torch.float64, torch.complex128, torch.int64)
    try:
        with _Explicit():
            yield
    finally:
        space._default_dtypes = before


def is_the_programs(method: Any) -> bool:
    """Whether the program gave it to torch.Tensor; torch's own names it for what it replaces."""
    if type(method) is not types.FunctionType:
        return False
    return str(method.__globals__.get("__name__")).partition(".")[0] != "torch"


def is_method(func: Any) -> bool:
    """Methods of torch.Tensor, in C or Python."""
    func = getattr(func, "__wrapped__", func)  # `__pow__` is `pow`, wrapped
    name = getattr(func, "__name__", "")
    return getattr(torch.Tensor, name, None) is func or type(func).__name__ in (
        "method_descriptor", "wrapper_descriptor",
    )  # fmt: skip


def holds_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or any(isinstance(y, torch.Tensor) for y in leaves(x))
