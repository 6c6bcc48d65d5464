"""torch's own shape functions, without what they import. Tested with torch 2.11 and 2.13.

torch._subclasses, _refs, _prims, _prims_common, _decomp, _meta_registrations   the functions
torch.fx.experimental.symbolic_shapes   what they ask of sizes: said here of sizes of ours
torch._compile                          the wrapper that imports torch._dynamo
torch._ops                              kernels that are written in Python

sympy takes 0.2 s to import, torch._dynamo more than a second. So functions are taken over: the same
code, in a namespace where modules of torch give functions that are taken over too, and imports give
what is said here. torch's own functions, and sys.modules, stay as they are. Kernels that C++ calls
are chosen at each call, by `python_kernels`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import math
import operator
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._library import simple_registry
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode, fake_impls
from torch._subclasses.fake_tensor import FakeTensorConverter, UnsupportedOperatorException
from torch._subclasses.meta_utils import MetaConverter
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from fusee.loops.operators import is_pointwise as is_pointwise
from fusee.loops.operators import opmath as opmath
from fusee.source import Args, Kwargs, leaves, mapped

# ---------------------------------------------------------------------------- sizes


def _guard_or(default: bool, x: Any) -> bool:
    """Whether something holds of sizes; the default where only data knows."""
    data = x.node.shape_env if isinstance(x, torch.SymBool) else None
    return bool(x) if data is None else bool(data.evaluate_sym_node(x.node, False, default))


def _same(a: Any, b: Any) -> Any:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and _all(*map(_same, a, b))
    return a == b


def _all(*several: Any) -> Any:
    return functools.reduce(operator.and_, several, True)


class _Partly(types.ModuleType):
    """Of a module, what is said here; for all else the module is imported."""

    def __init__(self, name: str, **said: Any) -> None:
        super().__init__(name)
        vars(self).update(said)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


_INSTEAD: dict[str, Any] = {
    x.__name__: x
    for x in (
        _Partly("sympy", Basic=()),
        # of a tensor that is a constant, which a message might name
        _Partly(
            "torch._dynamo.source",
            ConstantSource=lambda name: types.SimpleNamespace(name=name),
            RandomValueSource=(),
        ),
        _Partly("torch.utils._sympy.functions", Max=torch.sym_max),
        _Partly(
            "torch.fx.experimental.symbolic_shapes",
            expect_true=lambda x: x.node.expect_true("", 0) if isinstance(x, torch.SymBool) else x,
            guard_or_true=functools.partial(_guard_or, True),
            guard_or_false=functools.partial(_guard_or, False),
            guard_int=int,
            guard_size_oblivious=bool,
            GuardOnDataDependentSymNode=(),
            sym_eq=_same,
            sym_and=_all,
            sym_or=lambda *several: functools.reduce(operator.or_, several, False),
            statically_known_true=lambda x: bool(
                x.node.maybe_as_bool() if isinstance(x, torch.SymBool) else x
            ),
            is_nested_int=lambda x: False,
            is_symbolic=lambda x: isinstance(x, torch.SymInt),
            # of symbols of torch's there are none
            free_unbacked_symbols=lambda x: (),
            has_free_unbacked_symbols=lambda x: False,
            _iterate_exprs=lambda x: (),
            _iterate_nodes=lambda x: (),
            compute_unbacked_bindings=lambda *_, **__: None,
            # asked where backed_size_oblivious is set
            has_hint=lambda x: True,
            has_guarding_hint=lambda x: True,
            guarding_hint_or_throw=int,
            size_hint=int,
        ),
    )
}

# What torch's mode asks torch._dynamo.config for.
_DYNAMO = types.SimpleNamespace(
    config=types.SimpleNamespace(
        fake_tensor_cache_enabled=True,
        fake_tensor_cache_crosscheck_enabled=False,
        _custom_ops_profile=None,
    )
)

# ---------------------------------------------------------------------------- functions

_HOMES = tuple(
    "torch._subclasses torch._refs torch._prims torch._prims_common torch._decomp"
    " torch._meta_registrations torch.functional torch.nn.functional torch._tensor torch._C"
    " torch._VF".split()
)
# The code of functions that `torch._disable_dynamo` has wrapped.
_LAZY_CODE = _disable_dynamo(lambda: None).__code__
_INSTEAD["torch._dynamo"] = _DYNAMO
_INSTEAD["torch._dynamo.config"] = _DYNAMO.config


def _is_home(name: str) -> bool:
    return name == "torch" or name.startswith(_HOMES)


def _import(
    name: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0
) -> Any:
    if level == 0 and name in _INSTEAD:
        return _INSTEAD[name] if names or "." not in name else _moved_module(torch)
    return moved(builtins.__import__(name, globals, locals, names, level))


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """torch's log, without the traces of operators that raise: Python says what they raise."""

    def exception(self, msg: object, *args: object, **kwargs: Any) -> None:
        if not str(msg).startswith("failed while attempting to run meta"):
            super().exception(msg, *args, **kwargs)


class Space(dict[str, Any]):
    """The globals of functions that are taken over."""

    def __init__(self, home: dict[str, Any]) -> None:
        kept = {key: home[key] for key in "__name__ __package__ __spec__".split() if key in home}
        super().__init__(kept, __builtins__={**vars(builtins), "__import__": _import})
        self.home = home

    def __missing__(self, name: str) -> Any:
        found = self.home[name]
        if name == "op_implementations_checks":
            return [(is_for, moved(run)) for is_for, run in found]
        if name in _SHORT:
            return _SHORT[name]
        return _Quiet(found, {}) if name == "log" else moved(found)


_SHORT = {
    # A mode of FakeTensors keeps one for an error of two modes: it takes 0.1 to 2 ms, by its depth.
    "traceback": types.SimpleNamespace(extract_stack=list, format_list=list),
    # What an error says of a call. Operands are not printed: within transforms of torch.func that
    # may raise, and leaves torch's dispatch broken.
    "render_call": lambda op, args, kwargs: str(op),
}

# By a function in C++ that takes known sizes alone: what functions of torch's call in its place.
FORMS: dict[Any, Callable[..., Any]] = {}


class _MovedModule(types.ModuleType):
    """A module of torch's, with its functions taken over."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        return _INSTEAD[full] if full in _INSTEAD else moved(getattr(self.module, name))


class _Table(Mapping[Any, Any]):
    """A table of functions."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        self.table = table

    def __getitem__(self, key: Any) -> Any:
        return moved(self.table[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


@functools.cache
def moved_class(cls: type) -> Any:
    """A class with its methods taken over."""
    methods = {name: moved(x) for name, x in vars(cls).items() if isinstance(x, types.FunctionType)}
    return type(cls.__name__, (cls,), methods)


_moved_module = functools.cache(_MovedModule)
_space = functools.cache(lambda name: Space(vars(sys.modules[name])))


def moved(x: Any) -> Any:
    """A function or module of torch's, taken over; anything else as it is."""
    if isinstance(x, types.FunctionType):
        if not (_is_home(x.__module__ or "") or _is_home(x.__globals__.get("__name__", ""))):
            return x
        if x in _FUNCTIONS:
            return _FUNCTIONS[x]
        if x.__code__ is _LAZY_CODE:
            return moved(inspect.getclosurevars(x).nonlocals["fn"])  # __wrapped__ may be another
        cells = None if x.__closure__ is None else tuple(types.CellType() for _ in x.__closure__)
        space = _space(x.__globals__["__name__"])
        copy = types.FunctionType(x.__code__, space, x.__name__, x.__defaults__, cells)
        _FUNCTIONS[x] = copy
        copy.__kwdefaults__ = x.__kwdefaults__
        vars(copy).update((key, value) for key, value in vars(x).items() if key != "__wrapped__")
        for cell, there in zip(x.__closure__ or (), cells or ()):
            with contextlib.suppress(ValueError):  # an empty one
                there.cell_contents = moved(cell.cell_contents)
        return copy
    if isinstance(x, types.BuiltinFunctionType):
        return FORMS.get(x, x) if _OURS.is_on else x
    if isinstance(x, types.ModuleType):
        return _moved_module(x) if _is_home(x.__name__) else x
    if isinstance(x, type) and x in _CLASSES:
        return moved_class(x)
    if isinstance(x, functools.partial):
        return functools.partial(moved(x.func), *x.args, **x.keywords)
    if isinstance(x, dict) and x and isinstance(next(iter(x)), OpOverload):
        return _Table(x)
    return x


# K compares strides; torch 2.11 has it inside of a function
_CLASSES = (FakeTensorConverter, MetaConverter, vars(torch._prims_common).get("K"))
_FUNCTIONS: dict[types.FunctionType, Any] = {}


# ---------------------------------------------------------------------------- kernels


class _Ours(threading.local):
    """Whether kernels in Python that torch calls are to be those that are taken over."""

    is_on = False


_OURS = _Ours()


@contextlib.contextmanager
def python_kernels() -> Iterator[None]:
    """Inside, torch's kernels in Python are called taken over."""
    _choose()
    before, _OURS.is_on = _OURS.is_on, True
    try:
        yield
    finally:
        _OURS.is_on = before


@contextlib.contextmanager
def python_dispatcher() -> Iterator[None]:
    """Inside, torch prefers such kernels: they understand open sizes."""
    with python_kernels(), torch._C._EnablePythonDispatcher():
        yield


# Composite operators with kernels in Python that are in no table.
_MORE = """
    matmul stft istft broadcast_tensors one_hot tensor_split unsafe_chunk upsample_linear1d
    upsample_trilinear3d
"""


def with_open_ints(op: OpOverload, *args: Any) -> Any:
    """What an operator gives below autograd. C++ would ask which numbers open ones are."""
    mode: Any = _get_current_dispatch_mode()
    if mode is None:
        return op(*args)
    with _pop_mode_temporarily():
        return mode.__torch_dispatch__(op, (), args, {})


@functools.cache
def _choose() -> None:
    """Let torch's kernels in Python be chosen when they are called: C++ calls them."""
    more = [getattr(torch.ops.aten, name, None) for name in _MORE.split()]
    named = itertools.chain(*map(overloads_of, more))
    keys, own = torch._C.DispatchKey, vars(torch._prims).values()
    prims = [x for x in own if isinstance(x, OpOverload) and hasattr(x, "prim_meta_impl")]
    for prim in prims:  # C++ alone has their meta kernels
        prim.py_kernels[keys.Meta] = prim.prim_meta_impl
    tables = *torch._decomp.decomposition_table, *torch._decomp.meta_table
    for op in dict.fromkeys((*tables, *named, *prims)):
        for key in (keys.CompositeImplicitAutograd, keys.Autograd, keys.Meta):
            if isinstance(op, OpOverload) and (function := op.py_kernels.get(key)) is not None:
                op.py_kernels[key] = _chosen(op, function)
                op._dispatch_cache.clear()


_CHOSEN: dict[Any, Any] = {}  # what such a kernel is chosen instead of


def _chosen(op: OpOverload, function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (_ours(op, function) if _OURS.is_on else function)(*args, **kwargs)

    _CHOSEN[run] = function
    return run


# What torch does with FakeTensors beyond: find the device.
_OF_DEVICES = ("constructors", "index_put_impl", "multi_device_op_default", "multi_device_op_out")


def _has_fake(op: OpOverload) -> bool:
    """Whether torch has more to say of FakeTensors than of meta tensors."""
    run = fake_impls.op_implementations_dict.get(op)
    runs = [run] if run else [x for is_for, x in fake_impls.op_implementations_checks if is_for(op)]
    return runs != [] and runs[0].__name__ not in _OF_DEVICES


_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def kernel(op: Any) -> Any:
    """torch's own shape function of an operator, if it is written in Python; None: it is not."""
    if not isinstance(op, OpOverload) or _OF_DATA.intersection(op.tags):
        return None
    given, returns = op._schema.arguments, op._schema.returns
    is_of_tensor = bool(given) and str(given[0].type) == "Tensor"
    if is_of_tensor and not returns and not op._schema.is_mutable:  # it only looks, and may raise
        return lambda *_, **__: None
    found = getattr(op, "prim_meta_impl", None)
    if found is None and op in torch._decomp.meta_table:
        found = None if _has_fake(op) else torch._decomp.meta_table[op]
    elif found is None and op not in FakeTensorMode._cpp_meta_supports_symint:
        found = torch._decomp.decomposition_table.get(op)
        if found is None:
            found = op.py_kernels.get(torch._C.DispatchKey.CompositeImplicitAutograd)
            found = _CHOSEN.get(found, found)
        if found is None and (key := explicit_key(op)) is not None and not _has_fake(op):
            found = functools.partial(op._op_dk, key)
    return None if found is None else _ours(op, found)


def _ours(op: OpOverload, function: Any) -> Any:
    name = packet_name(op).lstrip("_")
    around = _out_of_meta if name == "to_copy" else None
    if name.startswith("upsample_"):
        around = _of_images
    return functools.partial(around, moved(function)) if around else moved(function)


def _out_of_meta(function: Callable[..., Any], x: Any, **kwargs: Any) -> Any:
    """A copy: where kernels ask for one on another device, torch's function would ask again."""
    device, meta = kwargs.get("device"), torch.device("meta")
    if device is not None and isinstance(x, Tensor) and x.device == meta != device:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    return function(x, **kwargs)


def _of_images(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An interpolation: it needs elements, and lays lines out in rows, which torch's own functions
    do not say."""
    made = function(*args, **kwargs)
    if any(n < 1 for n in made.shape[2:]):
        raise RuntimeError(f"an image of {[*made.shape[2:]]} elements")
    return made.contiguous() if made.dim() == 3 else made


# Operators on lists, with one kernel for all devices that calls others.
ON_LISTS = """
    _foreach_abs _foreach_neg _foreach_reciprocal _foreach_sign _foreach_sqrt _foreach_pow.Scalar
    _foreach_pow.ScalarAndTensor _foreach_add.List _foreach_add.Scalar _foreach_sub.List
    _foreach_sub.Scalar _foreach_mul.List _foreach_mul.Scalar _foreach_mul.ScalarList
    _foreach_div.List _foreach_div.Scalar _foreach_div.ScalarList
"""


def explicit_key(op: OpOverload) -> Any:
    """Under which an operator has one kernel in C++ for all devices, which calls others."""
    has, keys = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C.DispatchKey
    if not torch._C._dispatch_has_kernel(op._name):
        return None  # TorchScript's alone
    if has(op._name, keys.Meta) or any(r.alias_info for r in op._schema.returns):
        return None
    several = (
        keys.CompositeExplicitAutograd,
        keys.CompositeExplicitAutogradNonFunctional,
        keys.CompositeImplicitAutograd,
    )
    return next((key for key in several if has(op._name, key)), None)


@contextlib.contextmanager
def heard(hear: Callable[[warnings.WarningMessage], Any]) -> Iterator[None]:
    """Leads warnings of this thread to a function. Python's filters stay as they are: what changes
    them has every warning told anew.

    Adapter of `warnings._showwarnmsg_impl`, tested with Python 3.11 and 3.12.
    """
    module: Any = warnings
    before, thread, is_on = module._showwarnmsg_impl, threading.get_ident(), True

    def show(message: warnings.WarningMessage) -> None:
        (hear if is_on and threading.get_ident() == thread else before)(message)

    show.__wrapped__ = before  # type: ignore[attr-defined]
    module._showwarnmsg_impl = show
    try:
        yield
    finally:
        is_on = False
        if module._showwarnmsg_impl is show:  # another thread may have led them on
            module._showwarnmsg_impl = before


def mode_of(args: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode of the first FakeTensor, if any.

    Outside of it torch imports torch.distributed.tensor, to ask for the class of each operand.
    """
    modes = (x.fake_mode for x in leaves(args) if type(x) is FakeTensor)
    return next(modes, contextlib.nullcontext())


def on_ones(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """What the CPU's kernel gives for tensors of one element; the meta kernel, where that raises.

    It may raise for values (`x // 0`) as for dtypes: which is said when the program runs.
    """
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(False)
        try:
            return op(*_ones("cpu", args), **dict(zip(kwargs, _ones("cpu", kwargs.values()))))
        except RuntimeError:
            with python_dispatcher():
                return op(*_ones("meta", args), **dict(zip(kwargs, _ones("meta", kwargs.values()))))


def _ones(device: str, given: Iterable[Any]) -> list[Any]:
    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.ones((1,) * x.dim(), dtype=x.dtype, device=device)
        return {torch.SymInt: 1, torch.SymFloat: 1.0}.get(type(x), x)

    return [one(x) for x in given]


# ---------------------------------------------------------------------------- refusals
# What ATen refuses for its dtypes and meta kernels take: ATen is asked, once, with one element.

# Besides operators that go element by element: sizes of one and places of zero suit them.
_BY_PLACES = frozenset(
    """
    index index_put _index_put_impl index_copy index_add index_fill index_select gather scatter
    scatter_add scatter_reduce take put embedding nll_loss_forward
    """.split()
)
# By arguments that are sizes.
_OF_SHAPES = {"native_layer_norm": slice(1, 2), "native_group_norm": slice(3, 7)}
_RESIZING = """upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d"""
_OF_SHAPES |= dict.fromkeys(_RESIZING.split(), slice(1, 2))
_WINDOWS = [f"{x}_window" for x in ("hann", "hamming", "bartlett", "blackman", "kaiser")]
_PRODUCTS = frozenset("mm bmm addmm baddbmm mv addmv dot".split())
_OF_ALL_SIZES = frozenset(
    """
    binary_cross_entropy binary_cross_entropy_with_logits mse_loss smooth_l1_loss
    log_sigmoid_forward cumsum cumprod trace _softmax _log_softmax softmax log_softmax var std
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _cdist_forward _native_batch_norm_legit
    _native_batch_norm_legit_no_training native_batch_norm linalg_cross fill masked_fill complex
    polar _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """.split()
).union(_BY_PLACES, _OF_SHAPES, _PRODUCTS, _WINDOWS)
# These refuse floats; all others that go element by element take tensors of one of their dtypes.
_OF_INTEGERS = frozenset(
    """
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm
    """.split()
)
# These look at sizes first: they are asked with more elements, and what they say of dtypes counts.
_BY_SIZES = frozenset(
    """
    avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices glu im2col col2im
    reflection_pad1d reflection_pad2d reflection_pad3d grid_sampler_2d grid_sampler_3d
    logcumsumexp argmax argmin aminmax nansum huber_loss searchsorted bucketize _unique2
    unique_dim unique_consecutive masked_select max min sort max_pool1d
    """.split()
)
# These give of tensors without elements what their rules say, as all that is pointwise does.
OF_NOTHING = frozenset(
    "sum prod mean any all cumsum _softmax _log_softmax index index_put index_put_ index_select"
    " index_add index_add_ gather scatter scatter_add scatter_reduce cat stack mm addmm bmm"
    " embedding clone copy copy_ _to_copy fill full_like zeros_like ones_like empty_like"
    " rand_like randn_like new_zeros new_ones new_full new_empty repeat flip"
    " nll_loss_forward".split()
)
_DRAWS = frozenset(
    "uniform random normal bernoulli exponential geometric log_normal cauchy".split()
)
# These are asked whatever their dtypes are, for what else they refuse.
_ALWAYS = frozenset(
    """
    where uniform random clamp smooth_l1_loss huber_loss softshrink celu mvlgamma bucketize gelu
    avg_pool2d avg_pool3d masked_select unique_dim unique_consecutive sort
    """.split()
).union(_BY_PLACES, _OF_INTEGERS, _WINDOWS)
_SAYS_DTYPE = re.compile(
    "not implemented for|support|dtype|scalar type|BoolTensor|tensor must be|divisor"
    "|Dimension out of range"
)
# Of two dtypes: ATen gives the first, or refuses their gradients, and torch's formulas do neither.
_OF_ONE_DTYPE = ["huber_loss", "soft_margin_loss"]
_OF_ONE_DTYPE += ["mse_loss"] if torch.__version__ < "2.13" else []
# Of bytes as masks torch warns once, which is the program's to hear.
_WARN_OF_BYTES = frozenset("index index_put _index_put_impl where masked_scatter".split())


@functools.cache
def takes_any_size(op: Any) -> bool:
    """Whether ATen refuses the same dtypes of tensors with one element."""
    name = packet_name(op)
    # 25 operators in place lack the tag that those of the same name have
    whole = getattr(getattr(torch.ops.aten, name, None), op._overloadname, op)
    is_known = _is_each(op) or is_pointwise(whole) or name in _OF_ALL_SIZES
    is_sure = is_known and torch.Tag.nondeterministic_seeded not in op.tags
    return op.namespace == "aten" and (is_sure or name in _DRAWS)


def _is_each(op: Any) -> bool:  # of the elements, or of the tensors of lists
    return is_pointwise(op) or packet_name(op).startswith("_foreach_")


def overloads_of(packet: Any) -> list[OpOverload]:
    """Those of an operator; none if it is something else, or None."""
    if not isinstance(packet, OpOverloadPacket):
        return []
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    return [getattr(packet, name) for name in names if hasattr(packet, name)]


@functools.cache
def packet_name(op: Any) -> str:
    """`add` of aten.add_.Tensor."""
    return str(op._schema.name).partition("::")[2].rstrip("_")


@functools.cache
def takes_no_tensor(op: Any) -> bool:
    """Whether an operator of a user's would run as it is among tensors without data."""
    is_users = op.namespace not in ("aten", "prims", "prim")
    return is_users and not any("Tensor" in str(x.type) for x in op._schema.arguments)


_QUANTIZING = ("aten::quantize_per_tensor", "aten::quantize_per_tensor_dynamic")


def runs_itself(op: Any) -> bool:
    """Whether an operator has no fake kernel: what it does would be done by the capture.

    That of torch for quantized tensors gives floats.
    """
    if op._name.partition(".")[0] in _QUANTIZING:
        return True
    known = simple_registry.singleton.find
    return takes_no_tensor(op) and known(op._name).fake_impl.kernel is None


def lay_out(op: Any, args: Args, out: Tensor, **kwargs: Any) -> None:
    """Let an empty `out=` lie as the result does, as ATen's iterators have it: torch's functions
    in Python resize it to rows."""
    if (form := _into_nothing(op)) is None or out.numel():
        return
    like = form(*args, **kwargs)
    if like.shape != out.shape:
        out.resize_(like.shape).as_strided_(like.shape, like.stride())


@functools.cache
def _into_nothing(op: Any) -> Any:
    """The form without `out=` of an operator that goes element by element; None of another one."""
    kinds = [str(x.type) for x in op._schema.arguments if x.name != "out"]
    forms = filter(is_pointwise, overloads_of(getattr(torch.ops.aten, packet_name(op), None)))
    return next((x for x in forms if [str(a.type) for a in x._schema.arguments] == kinds), None)


def refuse(op: Any, args: Args, kwargs: Kwargs, device: torch.device | None) -> None:
    """Raise what ATen raises for operands that meta kernels take.

    device  of the operands; None: unknown, as where torch knows values
    """
    refuse_dtypes(op, args, kwargs, device)
    refuse_scalars(op, args, kwargs, device)
    refuse_undetermined(op, args, device)


def refuse_dtypes(op: Any, args: Args, kwargs: Kwargs, device: torch.device | None) -> None:
    """The same for dtypes, of which meta kernels take more."""
    if device is None and op._schema.is_mutable:
        device = getattr(args[0], "device", None)
    name = packet_name(op)
    if name in _OF_ONE_DTYPE and args[0].dtype is not args[1].dtype:
        raise UnsupportedOperatorException(op)
    is_large = name in _BY_SIZES
    if device is None or not (is_large or takes_any_size(op)):
        return
    given = [x for x in leaves((args, kwargs)) if type(x) is complex or isinstance(x, Tensor)]
    kinds = {x.dtype if isinstance(x, Tensor) else torch.complex128 for x in given}
    if (whom := _asked(device, name, kinds)) is None:
        return
    is_usual = len(kinds) == 1 and next(iter(kinds)).is_floating_point and "mask" not in name
    if is_usual and _is_each(op):  # x - True, alpha=True
        is_usual = {bool, complex}.isdisjoint(map(type, (*args, *kwargs.values())))
    if (is_usual and name not in _ALWAYS) or (torch.uint8 in kinds and name in _WARN_OF_BYTES):
        return
    key = device.type, op, _kind(args), _kind((*kwargs.items(),))
    found = _REFUSED.get(key, op)
    if found is op:
        value = 0 if name in _BY_PLACES else 1
        try:
            most = 16 if is_large else 3 if name == "linalg_cross" else 1
            smallest = functools.partial(_smallest, value=value, most=most, device=whom)
            small = [*mapped(args, smallest)]
            sizes = _OF_SHAPES.get(name, slice(0))
            small[sizes] = [1 if type(x) is int else [1] * len(x) for x in small[sizes]]
            with torch.random.fork_rng([], name in _DRAWS):
                op(*small, **mapped(kwargs, smallest))
            found = None
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            found = None if is_large and not _SAYS_DTYPE.search(str(error)) else error
        _REFUSED[key] = found
    if found is not None:
        raise type(found)(str(found))


def _asked(device: torch.device, name: str, kinds: set[torch.dtype]) -> Any:
    """Who is asked of operands there: a GPU what it makes of several floats and of products of
    integers, and of places beside floats the CPU, since a bad one ends a GPU's context."""
    floats, cuda = {x for x in kinds if x.is_floating_point}, torch.cuda
    is_asked = len(floats) > 1 or (name in _PRODUCTS and not floats)
    if device.type != "cuda" or not is_asked or name not in _OF_ALL_SIZES:
        return device if device.type == "cpu" else None
    if floats and not kinds - floats <= {torch.bool}:
        return "cpu" if name in _BY_PLACES else None
    return device if cuda.is_available() and not cuda.is_current_stream_capturing() else None


class NotDeterministic(UnsupportedOperatorException):
    """An operator runs by another algorithm, or none, where deterministic ones are asked for."""


# Of the operators whose algorithm torch.use_deterministic_algorithms() chooses: those in forwards.
_UNDETERMINED = {
    "cpu": frozenset({"put", "max_unpool2d", "max_unpool3d"}),
    "cuda": frozenset(
        """
        put max_unpool2d max_unpool3d index_put _index_put_impl index_add index_reduce index_copy
        scatter scatter_add scatter_reduce cumsum histc bincount kthvalue median nanmedian
        nll_loss2d_forward
        """.split()
    ),
}


def refuse_undetermined(op: Any, args: Args, device: torch.device | None) -> None:
    """Leave to ATen what it does by other algorithms, or refuses, where only deterministic ones
    may run.

    source   the documentation of torch.use_deterministic_algorithms
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    where = next((x.device for x in args if isinstance(x, Tensor)), device)
    if where is not None and packet_name(op) in _UNDETERMINED.get(where.type, ()):
        raise NotDeterministic(op)


def refuse_scalars(op: Any, args: Args, kwargs: Kwargs, device: torch.device | None) -> None:
    """Raise what ATen raises for a number that the dtype which it becomes does not have.

    source   c10/core/Scalar.h, Scalar::to; of an open number it is a guard that it fits
    """
    for at, name in _scalars(op) if device is not None and device.type == "cpu" else ():
        x: Any = args[at] if at < len(args) else kwargs.get(name)
        kind = {torch.SymInt: int, torch.SymFloat: float}.get(type(x), type(x))
        if kind not in (int, float) or (kind is type(x) and 0 <= x <= 127):
            continue
        named = dict(zip((x.name for x in op._schema.arguments), args)) | kwargs
        value = 0 if packet_name(op) in _BY_PLACES else 1
        # as few elements as ATen takes the same way for, and sizes of such ones
        small = {
            key: [n if type(n) is int and n < 2 else 2 for n in part]
            if isinstance(part, (list, tuple))
            else _smallest(part, value, 2)
            for key, part in named.items()
            if key != name
        }
        key = op, name, kind, _kind((*small.items(),))  # printing asks about transforms
        if key not in _FITTING:
            _FITTING[key] = "", -math.inf, math.inf, True
            try:
                op(**small, **{name: 1e300 if kind is float else 2**63 - 1})
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                found = re.search(r"converted to type (\S+) without overflow", str(error))
                dtype = None if found is None else _C_TYPES.get(found[1])
                if dtype is not None:
                    info: Any = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
                    # integers below zero wrap to unsigned ones
                    ends = info.min or (-info.max if kind is int else 0), info.max
                    _FITTING[key] = str(error), *ends, dtype.is_floating_point
        refused, least, most, has_infinity = _FITTING[key]
        # an open number is compared with what limits it alone
        if refused and not (least <= x <= most or (has_infinity and not -math.inf < x < math.inf)):
            raise RuntimeError(refused)


_FITTING: dict[Any, tuple[str, float, float, bool]] = {}
_C_TYPES = {
    "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16, "float": torch.float32,
    "uint8_t": torch.uint8, "int8_t": torch.int8, "int16_t": torch.int16, "int": torch.int32,
    "int64_t": torch.int64,
}  # fmt: skip
_FILLED = ("constant_pad_nd", "scalar_tensor", "full", "full_like", "new_full")


@functools.cache
def _scalars(op: Any) -> list[tuple[int, str]]:
    """The places and names of an operator's numbers that become elements' dtype."""
    if not takes_any_size(op) and packet_name(op) not in _FILLED:
        return []
    found = enumerate(op._schema.arguments)
    return [(k, x.name) for k, x in found if str(x.type) in ("number", "Optional[number]")]


OPEN_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_REFUSED: dict[Any, Exception | None] = {}


def _kind(x: Any) -> Any:
    """What ATen knows of an operand before it looks at elements."""
    if isinstance(x, (tuple, list)):
        return tuple([_kind(part) for part in x])
    if not isinstance(x, Tensor):
        return type(x), None if isinstance(x, (*OPEN_NUMBERS, torch.Generator)) else x
    return x.dtype, x.dim(), any(type(n) is int and n == 0 for n in x.shape)  # open sizes are none


def _smallest(x: Any, value: int, most: int, device: Any = "cpu") -> Any:
    """An operand with one element, or none; of vectors as long as `most`."""
    if not isinstance(x, Tensor):  # a generator is not to be drawn from
        return None if isinstance(x, torch.Generator) else 1 if isinstance(x, OPEN_NUMBERS) else x
    size: Iterable[Any] = x.shape
    sizes = [n if type(n) is int else max(n.node.hint, 1) for n in size]
    return torch.full([min(n, most) for n in sizes], value, dtype=x.dtype, device=device)
