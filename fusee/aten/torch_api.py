"""The private API of torch that tracing and autodiff stand on. Tested with torch 2.13.

Everything here exists from 2.11 to 2.15; the names used are
    torch.utils._python_dispatch   the stack of dispatch modes
    torch._C                       guards that hide dispatch keys, registrations per dispatch key
    torch._ops                     the classes of operators and their composite kernels
    torch._decomp                  torch's tables of decompositions
    torch._subclasses              FakeTensor, which stock torch.compile shows symbolic sizes by
    torch._C._current_autograd_node, torch._C._autograd   the node whose backward formula runs;
                                   numbers of nodes; what backward frees; counts of writes
    torch.autograd.graph           the engine, without the checks that import sympy
    torch._C.DisableTorchFunction  hides modes that see functions
    torch._C._functorch            what transforms of torch.func have wrapped, and where they begin
    torch._C._has_storage          tensors that vmap has wrapped have none
    torch._C._storage_Use_Count    how many tensors share memory
    torch._C._construct_storage_from_data_pointer   memory that somebody else has
    torch._fused_sdp_choice        which attention kernel eager takes
    SymInt.node                    sizes as sympy's expressions, and what a ShapeEnv knows of them
    torch.utils._sympy             computes such an expression as a guard does
    ctx.maybe_clear_saved_tensors  frees what a Function saved, unless retain_graph keeps it
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from fusee.errors import TraceError
from fusee.fake import fake_mode
from fusee.fake import has_saved_tensor_hooks as has_saved_tensor_hooks
from fusee.fake.layouts import is_transforming as is_transforming
from fusee.fake.torch_python import overloads_of, python_kernels
from fusee.source import Args, Kwargs, leaves, mapped, tensors_in
from fusee.sym import Expr, Size, Symbol, floordiv, maximum, minimum, mod, product, symbols
from fusee.sym.shape_env import FloatNode, ShapeEnv, size_of

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_ABOVE_US = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class below_autograd:
    """Inside, a dispatch mode sees each operator whole, those composed of others too."""

    __slots__ = ("guards",)

    def __enter__(self) -> None:
        below: Any = torch._C._AutoDispatchBelowAutograd()
        views: Any = torch._C._ExcludeDispatchKeyGuard(_ABOVE_US)
        below.__enter__()
        views.__enter__()
        self.guards = below, views

    def __exit__(self, *error: object) -> None:
        below, views = self.guards
        views.__exit__(*error)
        below.__exit__(*error)


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """Inside the kernel of an operator: autograd records, which dispatching had left behind."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradOther, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


def unresolved() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators get tensors that are lazily conjugated or negated as they are."""
    keys, of = torch._C.DispatchKey, torch._C.DispatchKeySet
    return torch._C._ExcludeDispatchKeyGuard(of(keys.Conjugate) | of(keys.Negative))


def recurrent_layer(*args: Any) -> Any:
    """aten.mkldnn_rnn_layer, which leaves out what its backward needs unless grad mode is on."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


class active:
    """`mode` sees the operators called inside. Cheaper than `with mode`, which keeps more state."""

    __slots__ = ("mode",)

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        _push_mode(self.mode)

    def __exit__(self, *_: object) -> None:
        _pop_mode()


@functools.cache
def lists_are_tuples() -> bool:
    """Whether indexing takes a list of lists for a tuple: torch warns that a version will not."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(1, 1)[[[0], [0]]].dim() == 1


_make: Any = torch.library.Library  # torch does not annotate it
library = _make("fusee", "FRAGMENT")  # its operators live as long as it does


# `x.data`, as TorchDynamo calls it.
data_of: Any = getattr(torch._C._autograd, "_get_data_attr", None)


def laid_out(x: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy of `x` with these strides; along an axis of stride 0 it has one element."""
    held = x
    for axis, step in enumerate(stride):
        held = held if step else held.narrow(axis, 0, min(1, x.shape[axis]))
    made = torch.empty_strided(held.shape, stride, dtype=x.dtype, device=x.device).copy_(held)
    return made.expand(x.shape)


def storage_id(x: Tensor) -> int:
    """Equal for tensors that share memory; unique among the living storages."""
    found: int = x.untyped_storage()._cdata
    return found


def storage_holders(tensors: Sequence[Tensor]) -> Callable[[], list[int]]:
    """What counts how many tensors and views share the memory of each of these, which must live."""
    places = [*map(storage_id, tensors)]
    return lambda: [*map(torch._C._storage_Use_Count, places)]


def is_freed(x: Tensor) -> Callable[[], bool]:
    """What says whether the memory of `x` was given back; it does not keep it."""
    watch: Any = StorageWeakRef
    expired: Callable[[], bool] = watch(x.untyped_storage()).expired
    return expired


def borrowed(x: Tensor) -> Tensor:
    """The same elements, without keeping their memory."""
    storage = x.untyped_storage()
    given = storage.data_ptr(), x.device, storage.nbytes()
    same: Any = torch._C._construct_storage_from_data_pointer(*given)
    with torch.no_grad():
        return x.new_empty(0).set_(same, x.storage_offset(), x.size(), x.stride())


# `aten::mm`, `aten::add.Tensor`.
op_name: Callable[[OpOverload], str] = operator.attrgetter("_name")


def overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    """Those that a graph may have: the ones that TorchScript has for numbers have no kernels."""
    return [op for op in overloads_of(packet) if torch._C._dispatch_has_kernel(op_name(op))]


def is_composite(op: OpOverload) -> bool:
    """Whether `op` has a kernel that calls other operators, which autograd sees instead of it."""
    return _COMPOSITE in op.py_kernels or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), _COMPOSITE)
    )


def composite(op: OpOverload, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Run the composite kernel of `op`: torch's in C++, which is eager's."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), _COMPOSITE):
        return op._op_dk(_COMPOSITE, *args, **kwargs)
    return op.decompose(*args, **kwargs)


def composite_in_python(op: OpOverload, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Run the composite kernel of `op`: the one in Python, if any, for symbolic sizes."""
    with python_kernels():
        return op.decompose(*args, **kwargs)


def mutated_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that `op` writes to."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def ops_with_kernel(key: str) -> frozenset[str]:
    """Names, such as `aten::mm` or `aten::add.Tensor`, with a kernel of their own for this key."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def without_autocast(is_wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside, no operator casts its arguments, if that is wanted."""
    return torch._C._DisableAutocast() if is_wanted else contextlib.nullcontext()


@functools.cache
def decomposition_tables() -> Mapping[OpOverload, Callable[..., Any]]:
    """torch's decompositions down to core ATen, composite operators not among them.

    The public core_aten_decompositions has the same and takes a second to list the composite ones.
    """
    table: Any = torch._decomp._core_aten_decompositions_post_autograd()
    return cast(Mapping[OpOverload, Callable[..., Any]], table)


def further_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """All that torch has, of core operators too."""
    table: Any = torch._decomp.decomposition_table
    return cast(Mapping[OpOverload, Callable[..., Any]], table)


def is_explicit(op: OpOverload) -> bool:
    """Whether `op` has one kernel for all devices, made of other operators."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), _EXPLICIT))


def explicit(op: OpOverload, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Run the one kernel of `op`, for the operators that it calls."""
    return op._op_dk(_EXPLICIT, *args, **kwargs)


_SKIPPED = frozenset(
    {
        torch._C._functorch.set_single_level_autograd_function_allowed,
        torch._C._autograd._saved_tensors_hooks_disable,
        torch._C._autograd._saved_tensors_hooks_enable,
        torch._C._set_deterministic_algorithms,
    }
)
_GRAD_SWITCHES = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.autograd.grad_mode._enter_inference_mode,
        torch.autograd.grad_mode._exit_inference_mode,
    }
)


def is_skipped(target: Any, with_grad: bool = False) -> bool:
    """Whether a call has no effect on values: switches of autograd, records of profilers, and
    switches of ATen's algorithms (ours are deterministic).

    with_grad   autograd is traced too, so grad mode matters

    raises   TraceError for what TorchDynamo has done already, and the graph need not undo
    """
    if target is torch.set_default_dtype:
        raise TraceError("the default dtype is set within the graph")
    if isinstance(target, OpOverload):
        return target.namespace == "profiler"
    return target in _SKIPPED or (target in _GRAD_SWITCHES and not with_grad)


@contextlib.contextmanager
def switches_restored() -> Iterator[None]:
    """What is inside may leave autocast on for the CPU, or another default dtype; afterwards all
    is as it was."""
    state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    dtype = torch.get_default_dtype()
    nesting = torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_autocast_enabled("cpu", state[0])
        torch.set_autocast_dtype("cpu", state[1])
        while torch.autocast_decrement_nesting() >= nesting:
            pass


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def why_not_dense(x: Tensor) -> str | None:
    """None for a dense tensor; otherwise in words what `x` is."""
    if type(x) not in _PLAIN and not isinstance(x, FakeTensor):
        return f"a {type(x).__name__}, a subclass of torch.Tensor"
    if x.is_nested:
        return "a nested tensor"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}"
    if x.is_quantized:
        return "a quantized tensor"
    if x._is_zerotensor():
        return "a ZeroTensor, which has no memory"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "wrapped by a torch.func transform"
    return None


def takes_gradients(graph: fx.Graph) -> bool:
    """Whether torch.func differentiates within a graph, as stock torch.compile writes it down."""
    return any(x.target is torch._C._functorch._grad_increment_nesting for x in graph.nodes)


def begins_gradients(graph: fx.Graph) -> bool:
    """Whether grad mode is switched on within a graph, and by no transform of torch.func."""
    switches = (x for x in graph.nodes if x.target is torch._C._set_grad_enabled)
    return any(x.args[0] for x in switches) and not takes_gradients(graph)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor that transforms of torch.func have wrapped; any other as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_state(x: Tensor) -> bool:
    """Whether `x` is a parameter or a buffer: stock torch.compile marks those of modules."""
    if isinstance(x, (torch.nn.Parameter, torch.nn.Buffer)):
        return True
    return getattr(x, "_dynamo_static_input_type", None) is not None


def is_missing_fake(error: Exception) -> bool:
    """Whether an operator failed on meta tensors for want of a meta or fake kernel."""
    if isinstance(error, NotImplementedError):
        return True
    return "no fake impl registered" in str(error)


sym_sqrt: Callable[..., Any] = torch._sym_sqrt  # type: ignore[attr-defined]


def symbolic_mode(examples: Iterable[Any]) -> FakeTensorMode | None:
    """The fake mode of these, if one of them is a symbolic integer or has a symbolic size."""
    examples = list(examples)
    tensors = [x for x in examples if isinstance(x, FakeTensor)]
    for x in tensors:
        if any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride(), x.storage_offset())):
            return x.fake_mode
    has_number = any(isinstance(x, torch.SymInt) for x in examples)
    if not has_number:
        return None
    return tensors[0].fake_mode if tensors else fake_mode()


def is_twin(x: Tensor) -> bool:
    """Whether `x` has no data."""
    return isinstance(x, FakeTensor) or x.device.type == "meta"


def is_opaque(x: Tensor) -> bool:
    """Whether only ATen reads `x`: complex numbers, or real ones that are negated when read."""
    return x.dtype.is_complex or x.is_neg()


def bits_of(x: Tensor) -> list[OpOverload]:
    """The views by which it is conjugated or negated when it is read."""
    ops = torch.ops.aten
    return [ops._conj.default] * x.is_conj() + [ops._neg_view.default] * x.is_neg()


def holds_opaque(args: Any) -> bool:
    """Whether one of these arguments is opaque, or has such a tensor in it."""
    return any(map(is_opaque, tensors_in(args)))


# ---------------------------------------------------------------------------- autograd


_flash: Any = torch.nn.attention.SDPBackend.FLASH_ATTENTION
_choose: Any = torch._fused_sdp_choice


# The number that the next node of autograd gets. They grow in the order of the forward.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def current_node_number() -> tuple[int | None, bool]:
    """The node whose backward runs: its number, and whether it is a torch.autograd.Function's.

    (None, False) outside of backward.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None, False
    return node._sequence_nr(), isinstance(node, torch.autograd.function.BackwardCFunction)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Any], tangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad with allow_unused; `inputs` may be gradient edges."""
    run: Any = torch.autograd.graph._engine_run_backward
    # a device has a thread of its own otherwise, and a mode of fakes one state for all threads
    with torch.autograd.set_multithreading_enabled(False):
        found: tuple[Tensor | None, ...] = run(
            tuple(outputs),
            tuple(tangents),
            False,  # keep_graph
            False,  # create_graph
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    return found


def uses_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether eager's attention on the CPU is its flash kernel for tensors of these geometries."""
    with _disable_current_modes():  # else the tracer makes twins of what is to be on the CPU
        with torch.no_grad():
            given = [
                None
                if x is None
                else torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, requires_grad=x.requires_grad
                )
                for x in (q, k, v, mask)
            ]
        choice = _choose(*given, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    return int(choice) == int(_flash)


# Lets go of what a `ctx` saved, unless this backward retains the graph.
clear_saved: Callable[[Any], object] = operator.methodcaller("maybe_clear_saved_tensors")


@contextlib.contextmanager
def as_if_not_written(tensors: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
    """Inside, these have the numbers of writes that stand beside them."""
    written = [(x, before, x._version) for x, before in tensors if x._version != before]
    count: Any = torch._C._autograd._unsafe_set_version_counter
    found, before, now = zip(*written) if written else ((), (), ())
    count(found, before)
    try:
        yield
    finally:
        count(found, now)


# Whether a tensor has memory of its own or of its base: not so within vmap.
has_storage: Callable[[Tensor], bool] = torch._C._has_storage
# Whether the backward that runs was asked to retain the graph.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


# Inside, no mode sees the functions of torch that are called.
without_torch_functions: Callable[[], contextlib.AbstractContextManager[None]]
without_torch_functions = torch._C.DisableTorchFunction


def modified() -> RuntimeError:
    """Autograd's error for a write to what the backward needs."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace"
        " operation"
    )


# ---------------------------------------------------------------------------- autocast
# Autocast on meta tensors: torch's cast policy, applied where its dispatcher would apply it.
#
# Autocast is a dispatch key of a device, and meta tensors have none. But every operator comes to
# the tracer where it would come to that key, so its arguments are cast here, by torch's own list:
# the operators registered for the key. Those named below cast down or promote, all others on the
# list run in float32. Inside a listed operator autocast is off.
#
# source aten/src/ATen/autocast_mode.cpp; a test compares the kinds with what torch does

AutocastKind = Literal["lower", "float32", "promote", "dtype", "norm"]


class _Casts(NamedTuple):
    """Autocast of a device. Operators on its list that are named nowhere run in float32.

    lower    take the lower precision; promote: float32 if an argument has it
    dtype    are asked for a float32 result, and get no other arguments
    """

    key: str
    lower: frozenset[str]
    promote: frozenset[str]
    dtype: frozenset[str] = frozenset()


CASTS = {
    "cpu": _Casts(
        "AutocastCPU",
        frozenset(
            "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm"
            " conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
            " linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu"
            " scaled_dot_product_attention".split()
        ),
        frozenset("cat index_copy stack".split()),
    ),
    "cuda": _Casts(
        "AutocastCUDA",
        frozenset(
            "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d"
            " conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose prelu"
            " addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm"
            " chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell"
            " gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention"
            " scaled_dot_product_attention".split()
        ),
        frozenset(
            "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot"
            " scatter_add".split()
        ),
        frozenset(
            "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm"
            " sum".split()
        ),
    ),
}


@functools.cache
def autocast_kind(op: OpOverload, device: str) -> AutocastKind | None:
    """What autocast does to the arguments of `op` on a device; None if nothing."""
    casts = CASTS[device]
    if op.namespace != "aten" or op_name(op) not in ops_with_kernel(casts.key):
        return None  # the kernel of a library's runs itself
    name = op_name(op).removeprefix("aten::").partition(".")[0]
    if name in casts.dtype:
        return "dtype"
    if name == "norm" and casts.dtype:
        return "norm"
    return "lower" if name in casts.lower else "promote" if name in casts.promote else "float32"


# The form of `norm` that is asked for a dtype.
_NORMS = {
    torch.ops.aten.norm.Scalar: torch.ops.aten.norm.ScalarOpt_dtype,
    torch.ops.aten.norm.ScalarOpt_dim: torch.ops.aten.norm.ScalarOpt_dim_dtype,
}


def as_autocast_calls(
    op: OpOverload,
    kind: AutocastKind,
    lower: torch.dtype,
    args: Args,
    kwargs: Kwargs,
    convert: Callable[[Tensor, torch.dtype], Tensor],
) -> tuple[OpOverload, Args, Kwargs]:
    """An operator and its arguments as autocast passes them on: float64 is left alone."""
    if kind in ("dtype", "norm"):
        places = [x.name for x in op._schema.arguments].index("dtype") if kind == "dtype" else 99
        given = kwargs.get("dtype") or (args[places] if len(args) > places else None)
        if given is not None or not args[0].dtype.is_floating_point or args[0].dtype.itemsize > 4:
            return op, args, kwargs
        args = (*args, *((False,) if kind == "norm" and len(args) == 3 else ()))
        return _NORMS.get(op, op), args, {**kwargs, "dtype": torch.float32}
    target = torch.float32 if kind == "float32" else lower
    if kind == "promote" and any(x.dtype is torch.float32 for x in tensors_in((args, kwargs))):
        target = torch.float32

    def cast(x: Any) -> Any:
        is_float = isinstance(x, Tensor) and x.dtype.is_floating_point
        return convert(x, target) if is_float and x.dtype not in (target, torch.float64) else x

    return op, *mapped((args, kwargs), cast)


# ---------------------------------------------------------------------------- symbols
# torch's symbolic integers (sympy expressions in a SymInt) as sizes of ours.
#
# sympy is never imported here: a SymInt exists only where torch has imported it already.


def open_numbers(nodes: Iterable[fx.Node]) -> Iterator[torch.SymInt]:
    """The open integers that nodes of a captured graph give, and the open sizes of tensors."""
    for node in nodes:
        value = node.meta.get("example_value")
        for x in leaves(value):
            numbers: Iterable[Any] = x.shape if isinstance(x, Tensor) else (x,)
            yield from (n for n in numbers if type(n) is torch.SymInt)


class TorchSymbols:
    """The symbols of one graph. Call it with an int, SymInt or Size to get the Size.

    env      ours, if the symbols are: it may find out more about a size
    raises   TraceError for an expression that has no Size: unbacked symbols, non-integers
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Symbol] = {}
        self._sizes: dict[Any, Size] = {}
        self.env: ShapeEnv | None = None

    def __call__(self, x: Any) -> Size:
        if isinstance(x, int):
            return int(x)
        if isinstance(x, Expr):
            return x if self.env is None else self.env.simplified(x)
        if not isinstance(x, torch.SymInt):
            raise TraceError(f"{x} is a {type(x).__name__}: only integers are computed from sizes")
        constant = x.node.maybe_as_int()
        if constant is not None:
            return int(constant)
        if (size := size_of(x)) is not None:
            self.env = x.node.env
            self.by_name.update({s.name: s for s in symbols(size)})
            return size
        expr = x.node.expr
        found = self._sizes.get(expr)
        if found is None:
            found = self._sizes[expr] = self.convert(expr, x.node.shape_env)
        return found

    def convert(self, expr: Any, env: Any) -> Size:
        """A size of sympy's, of symbols of this ShapeEnv of torch's."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(expr, env).expr
        operands = [self.convert(item, env) for item in expr.args]
        if expr.is_Pow:
            base, exponent = operands
            if not isinstance(exponent, int) or exponent < 0:
                raise TraceError(f"the size ({base})**({exponent}) has no form")
            return product([base] * exponent)
        combine = _OPERATORS.get(type(expr).__name__)
        if combine is None:
            raise TraceError(f"the size {expr} has no form: {type(expr).__name__} is not supported")
        total = operands[0]
        for item in operands[1:]:
            total = combine(total, item)
        return total

    def _symbol(self, expr: Any, env: Any) -> Symbol:
        name = str(expr)
        found = self.by_name.get(name)
        if found is None:
            hint = _values_of(env).get(expr)
            if not getattr(hint, "is_Integer", False):  # of jagged tensors, too
                raise TraceError(f"the size {name} depends on the values of tensors")
            bounds = env.var_to_range.get(expr)
            low = int(bounds.lower) if bounds and bounds.lower.is_Integer else 0
            found = self.by_name[name] = Symbol(name, max(low, 0), hint=int(hint))
        return found


def _values_of(env: Any) -> Any:
    """What the symbols of a ShapeEnv of torch's are in this call."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def guarded_float(x: torch.SymFloat) -> float:
    """Its value, which is a guard of torch.compile's if it may vary.

    SymPy orders what a float is computed from anew, and a guard computes it in that order: where
    that rounds otherwise than Python did, the symbols are guarded in its place.
    """
    node = x.node
    if isinstance(node, FloatNode) or not node.has_hint():
        return float(x)
    values, expr = _values_of(node.shape_env), node.shape_env.simplify(node.expr)
    numbers = {s: float(v) if v.is_Float else int(v) for s, v in values.items()}
    python = importlib.import_module("torch.utils._sympy.reference").PythonReferenceAnalysis
    compute = importlib.import_module("torch.utils._sympy.interp").sympy_interp
    if not expr.is_number and compute(python, numbers, expr) == node.hint:
        return float(x)
    for symbol in sorted(expr.free_symbols, key=str):
        node.shape_env.evaluate_expr(symbol, values[symbol])
    return float(node.hint)


_OPERATORS: dict[str, Callable[[Size, Size], Size]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": floordiv,
    "CleanDiv": floordiv,
    "Mod": mod,
    "PythonMod": mod,
    "Min": minimum,
    "Max": maximum,
}
