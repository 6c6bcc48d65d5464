"""Tensors without data, on torch's private API. Tested with torch 2.13.

torch._subclasses   FakeTensor and its mode: meta tensors that say they are on the real device
torch._library      the fake kernels that users have registered
torch._C            dispatch keys while a meta kernel runs; whether hooks see what is saved
torch._C._dynamo    TorchDynamo's hook: switched off where it should trace nothing

torch's own mode takes 50 to 500 us an operator, and imports sympy at its first. The mode here runs
the operators that models are made of at once, by fusee.fake.rules or as views, and leaves all
others to torch's: several devices, others than CPUs and NVIDIA's GPUs, constants whose values are
known. Tracing runs operators on `Twins`, by the same rules.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._library import fake_impl, simple_registry
from torch._ops import OpOverload
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode

import fusee.fake.gradients
import fusee.fake.open_composites  # noqa: F401  rules of the one, forms of the other
from fusee.errors import FuseeError, shown
from fusee.fake.layouts import (
    Spec,
    Unsure,
    broadcast,
    equal,
    extent,
    has_zero,
    is_row_major,
    let_be_filled,
    together,
)
from fusee.fake.open_sizes import OPEN_MAKERS, OPEN_VIEWS, UNBACKED, elements_put, unbacked
from fusee.fake.rules import ASKING, RULES, Found, goes_by_elements, results, results_there
from fusee.fake.torch_python import (
    OF_NOTHING,
    ON_LISTS,
    OPEN_NUMBERS,
    explicit_key,
    is_pointwise,
    kernel,
    lay_out,
    mode_of,
    moved,
    moved_class,
    overloads_of,
    packet_name,
    python_dispatcher,
    refuse,
    runs_itself,
    takes_no_tensor,
)
from fusee.loops.associative import SCAN as SCAN
from fusee.loops.associative import associative_scan as associative_scan
from fusee.loops.associative import combine_of as combine_of
from fusee.source import Args, Kwargs, OpRules, overload, overloads, tensors_in
from fusee.sym import only_symbol
from fusee.sym.shape_env import ShapeEnv, known_size, wrapped

# ---------------------------------------------------------------------------- mode


def fake_mode() -> Any:
    """A mode whose tensors are on the device they say, with static sizes."""
    return _quick_mode()(allow_non_fake_inputs=False, shape_env=None)


def fake_of(mode: Any, x: Tensor, size: Sequence[Any] = (), stride: Sequence[Any] = ()) -> Tensor:
    """A tensor without data like `x`, a leaf of autograd if it is one.

    size, stride   where some of them are open
    """
    if torch.is_inference_mode_enabled() and not x.is_inference():
        with torch.inference_mode(False):  # there, too, it is what has gradients, as its views do
            return fake_of(mode, x, size, stride)
    size, stride = size or x.size(), stride or x.stride()
    meta = torch.empty_strided(size, stride, dtype=x.dtype, device="meta")
    is_view = x.requires_grad and x._is_view()
    if x.is_leaf and not is_view:
        meta = with_bits(meta, x)
    else:
        # to what is computed writing in place is allowed, but not to a view of a leaf
        base = x._base if is_view else None
        is_of_leaf = base is not None and (base.is_leaf or x.is_leaf)
        with torch.enable_grad():
            meta = torch.empty_strided(size, stride, dtype=x.dtype, device="meta")
            leaf = FakeTensor(mode, meta.new_empty(()).requires_grad_(), x.device)
            # a view that is a leaf itself is older than its base's gradients
            is_newer = is_of_leaf and not x.is_leaf
            whole = meta.new_empty(extent(size, stride)).requires_grad_(is_newer)
            whole = FakeTensor(mode, whole, x.device)
            with mode:
                part = whole if is_of_leaf else whole.mul_(leaf)
                made = with_bits(part.as_strided(size, stride), x)
                whole.requires_grad_()
                return made.requires_grad_() if x.is_leaf else made
    fake = _fake(mode, meta, x.device, x.requires_grad)
    if isinstance(x, torch.nn.Parameter):
        fake._is_param = True  # what isinstance(..., nn.Parameter) asks for
    return fake


def with_bits(twin: Tensor, x: Tensor, apart: bool = False) -> Tensor:
    """`twin`, lazily conjugated or negated if `x` is; `apart`: a view of none, for autograd."""
    with mode_of((twin,)):
        made = torch.conj(twin) if x.dtype.is_complex and x.is_conj() else twin
        made = torch._neg_view(made) if x.is_neg() else made
        return made.detach() if apart and made is not twin else made


# ------------------------------------------------------------------------------ quick results

_CPU, _META = torch.device("cpu"), torch.device("meta")
_Mode = Any
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

# Besides OPEN_VIEWS: C++ kernels that take meta tensors.
_ON_METAS = "unfold transpose_ result_type.Tensor result_type.Scalar"
# They write their first operand, and give it back.
_IN_PLACE = """
    relu_ silu_ gelu_ hardswish_ hardsigmoid_ hardtanh_ leaky_relu_ elu_ sigmoid_ tanh_ exp_ clamp_
    clamp_min_ clamp_max_ zero_ fill_.Scalar copy_ add_.Tensor add_.Scalar sub_.Tensor
    sub_.Scalar mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar masked_fill_.Scalar
"""


def _written(x: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """The result of an operator in place; None if it may have to fail."""
    for operand in rest:
        if isinstance(operand, Tensor):
            if not equal(broadcast(x.shape, operand.shape), x.shape):
                return None
            if not torch.can_cast(operand.dtype, x.dtype):
                return None
        elif isinstance(operand, (float, complex)) and not x.is_floating_point():
            return None
    return x


# What needs more than that, and what torch's own says in modules that it imports for it.
_OWN: OpRules[Callable[..., Any]] = OpRules()
_OWN.rule("_unsafe_view")(overload("view"))
_OWN.rule("bernoulli_.float")(
    lambda x, p=0.5, *, generator=None: x if generator is None and 0 <= p <= 1 else None
)


@_OWN.rule("put_")
def _put(x: Tensor, index: Tensor, source: Tensor, *_: Any, **__: Any) -> Any:
    elements_put(x, index, source)
    return x if index.dtype is torch.int64 and source.dtype is x.dtype else None


@_OWN.rule("fill_.Tensor")
def _filled(x: Tensor, value: Tensor) -> Any:
    if value.dim():  # torch 2.11 does not say so of meta tensors
        raise RuntimeError(f"fill_ only supports a value of 0 dimensions, not {value.dim()}")
    return _written(x, value)


def _by_rule(find: Callable[..., Found], op: Any, *args: Any, **kwargs: Any) -> Any:
    return _on_device(find(op, args, kwargs), _new)


def _new(size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


def _on_device(found: Any, new: Callable[..., Tensor]) -> Any:
    """What a rule gives, with tensors for specs."""
    if type(found) is Spec:
        return new(*found)
    return tuple([_on_device(x, new) for x in found]) if type(found) is tuple else found


def _unless_unsure(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which gives None where sizes decide that are not known."""

    def quietly(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Unsure:
            return None

    return quietly


@functools.cache
def _quick(kind: str) -> dict[Any, Callable[..., Any]]:
    """How to run an operator on meta tensors that stand for those of a kind of device."""
    more = overloads(_ON_METAS + ON_LISTS)
    table: dict[Any, Callable[..., Any]] = {op: op for op in (*OPEN_VIEWS, *more)}
    find = results_there if kind == "cuda" else results
    table.update((op, functools.partial(_by_rule, find, op)) for op in RULES)
    table.update(dict.fromkeys(overloads(_IN_PLACE), _written))
    permute = overload("permute")
    table |= {**_OWN, permute: _unless_unsure(OPEN_VIEWS[permute])}
    for op in overloads("nonzero_static reshape as_strided_"):
        del table[op]
    return table


@functools.cache
def _quick_of_any_size(kind: str) -> dict[Any, Callable[..., Any]]:
    """The same where sizes are open; what they give is None where sizes decide."""
    runs = _quick(kind)
    more = "put_ result_type.Tensor result_type.Scalar"
    own = (RULES, overloads(_IN_PLACE), overloads(more))
    table = {op: _unless_unsure(runs[op]) for ops in own for op in ops if op in runs}
    table.update((op, _unless_unsure(run)) for op, run in OPEN_VIEWS.items())
    return table


class _Entered:
    """A mode that is entered as torch's own is, in 2 us for 30: without flags that only stand for
    modes of users. Devices are asked for once.

    env   for sizes that only data knows; None: such operators raise
    """

    env = None
    avoid_device_init = functools.cached_property(vars(FakeTensorMode)["avoid_device_init"].fget)
    _should_skip_dynamo = classmethod(lambda cls: False)
    enter_stack: list[tuple[Any, Any]]
    _mode_key: Any

    def __enter__(self) -> Any:
        lifts = None
        if self.avoid_device_init:
            lifts = torch._C._only_lift_cpu_tensors()
            torch._C._set_only_lift_cpu_tensors(True)
            torch._C._ensureCUDADeviceGuardSet()
        self.enter_stack.append((torch._C._unset_dispatch_mode(self._mode_key), lifts))
        torch._C._set_dispatch_mode(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: Any) -> None:
        before, lifts = self.enter_stack.pop()
        torch._C._unset_dispatch_mode(self._mode_key)
        if before is not None:
            torch._C._set_dispatch_mode(before)
        if lifts is not None:
            torch._C._set_only_lift_cpu_tensors(lifts)


_OF_DEVICE = (torch.ops.prim.device.default, overload("_to_copy"), overload("lift_fresh"))


def _of_device(mode: _Mode, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A device; a copy on another device; literals."""
    if func is _OF_DEVICE[2]:  # in torch.tensor(), which keeps the value of one number alone
        is_plain = type(args[0]) is Tensor and args[0].numel() != 1 and args[0].is_cpu
        return _on_meta(mode, fake_of, (mode, *args), {}) if is_plain else None
    if func is _OF_DEVICE[0]:
        return _META if mode.in_kernel_invocation else args[0].fake_device
    here = getattr(args[0], "device", _CPU)  # functorch makes tensors of numbers
    device = _with_index(torch.device(kwargs.get("device") or here))
    if device == here:
        return None
    if here == _META:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if args[0].requires_grad and not is_there(device):
        raise NotImplementedError(f"torch is built without {device.type}")
    with mode:  # torch's leaves the strides of an expanded tensor
        made = func(*args, **{**kwargs, "device": None})
    return _fake(mode, _new(made.shape, made.stride(), made.dtype), device)


@functools.cache
def _quick_mode() -> type[FakeTensorMode]:
    torch_mode: type[FakeTensorMode] = moved_class(FakeTensorMode)
    by_torch = moved(vars(FakeTensorMode)["__torch_dispatch__"])
    makers = frozenset((*OPEN_MAKERS, overload("scalar_tensor")))

    def dispatch(self: _Mode, func: Any, kinds: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_DEVICE and (found := _of_device(self, func, args, kwargs)) is not None:
            return found
        is_open = is_symbolic((args, kwargs))
        if self.env is not None and func._schema.is_mutable:
            if torch.is_inference_mode_enabled():  # where tensors do not count writes
                self.env.data.forget_counts()
        device = _home(self, func, args, kwargs, is_open, func in _WITH_BITS)
        if func not in OPEN_VIEWS:
            refuse(func, args, kwargs, device)
        if self.env is not None and func in UNBACKED and device is not None:
            found = unbacked(self.env, func, args, kwargs, device)
            return _wrapped(self, _on_device(found, _new), device)
        if is_open and packet_name(func) == "squeeze":
            _refuse_squeeze(*args)
        if func in makers:
            home = _with_index(torch.device(kwargs.get("device") or _CPU))
            for make in (OPEN_MAKERS.get(func), None if is_open or kernel(func) else func):
                if home.type in (*_KINDS, "meta") and make is not None:
                    found = _on_meta(self, make, args, {**kwargs, "device": _META})
                    if found is not None:
                        return _wrapped(self, found, home)
        elif device is not None:
            there = {**kwargs, "device": _META} if "device" in kwargs else kwargs
            runs = (_quick_of_any_size if is_open else _quick)(device.type)
            for run in (runs.get(func), _by_elements(func, is_open or device == _CPU)):
                found = None if run is None else _on_meta(self, run, args, there)
                if found is not None:
                    return _wrapped(self, found, device)
        if "out" in kwargs and device is not None:
            lay_out(func, args, **kwargs)
        if runs_itself(func):
            raise UnsupportedOperatorException(func)
        own = kernel(func) or _written_as(func)
        if own is not None and not func._schema.is_mutable:
            device = _home(self, func, args, kwargs, is_open, for_function=True)
        if own is not None and device is not None:
            return _by_function(self, own, args, kwargs, device)
        try:
            with _uncached(self) if is_open else _NOTHING, python_dispatcher():
                return by_torch(self, func, kinds, args, kwargs)
        except DynamicOutputShapeException:
            if self.env is None:
                raise
            return _by_users_kernel(self, self.env, func, args, kwargs)

    return type("QuickFakeTensorMode", (_Entered, torch_mode), {"__torch_dispatch__": dispatch})


class _NewSizes:
    """What torch.library.get_ctx() gives to the fake kernel of an operator of a user's."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        if min < 0:
            raise ValueError(f"new_dynamic_size(min={min}): no size is negative")
        return wrapped(self.env, self.env.data.new(min, max))

    create_unbacked_symint = new_dynamic_size


def _by_users_kernel(
    mode: FakeTensorMode, env: ShapeEnv, op: OpOverload, args: Args, kwargs: Any
) -> Any:
    """What the fake kernel of a user's operator gives, with sizes that only data knows.

    raises   DynamicOutputShapeException if one of them is no size of a result: nothing reads it
    """
    kernel, first = simple_registry.singleton.find(op._name).fake_impl.kernel, len(env.data.made)
    if kernel is None:
        raise DynamicOutputShapeException(op)
    with fake_impl.set_ctx_getter(functools.partial(_NewSizes, env)), mode:
        found = kernel(*args, **kwargs)
    sizes = {only_symbol(known_size(n)) for x in tensors_in(found) for n in x.shape}
    made = {*itertools.islice(env.data.made, first, None)}
    if not made <= sizes:
        for symbol in made:
            del env.data.made[symbol]
        raise DynamicOutputShapeException(op)
    return found


@functools.cache
def _written_as(op: Any) -> Callable[..., Any] | None:
    """How to run an operator in place that has a form which is not; None: another one."""
    packet = getattr(torch.ops.aten, packet_name(op), None)
    form = getattr(packet, op._overloadname, None)
    is_in_place, is_each = op._schema.name[-1] == "_", packet_name(op).startswith("_foreach_")
    is_one = len(op._schema.returns) == 1 and not (form and explicit_key(form))
    if not (is_in_place and form and (is_one or is_each)) or torch.Tag.inplace_view in op.tags:
        return None

    def run(given: Any, *args: Any, **kwargs: Any) -> Any:
        made = form(given, *args, **kwargs)
        for x, y in zip(given, made) if is_each else [(given, made)]:
            if not equal(y.shape, x.shape) or not torch.can_cast(y.dtype, x.dtype):
                raise RuntimeError(f"{op} of size {[*x.shape]} would give {[*y.shape]}")
        return None if is_each else given

    return run


@functools.cache
def _by_elements(op: Any, may_write: bool) -> Callable[..., Any] | None:
    """How to run an operator without a rule that goes element by element; None: another one.

    may_write   also one in place, whose dtypes nobody else refuses
    """
    if goes_by_elements(op):
        return _unless_unsure(functools.partial(_by_rule, results, op))
    is_in_place = is_pointwise(op) and str(op._schema.name).endswith("_")
    is_one = may_write and is_in_place and len(op._schema.returns) == 1
    return _unless_unsure(_written) if is_one else None


def _home(
    mode: _Mode, op: Any, args: Any, kwargs: Any, is_open: bool, for_function: bool
) -> torch.device | None:
    """Where all tensors are, if they are fakes, and torch does not know the values of its results.

    for_function   some may be lazily conjugated
    """
    home: torch.device | None = None
    count = known = 0
    for arg in (*args, *kwargs.values()):
        for x in arg if type(arg) in (list, tuple) else (arg,):
            if isinstance(x, Tensor):
                if type(x) is not FakeTensor or x.fake_mode is not mode:
                    return None
                if x.dim() > 64:  # which iterators of ATen's refuse, and meta kernels don't
                    raise UnsupportedOperatorException(op)
                if x.layout != torch.strided or (not for_function and (x.is_conj() or x.is_neg())):
                    return None
                device: torch.device = x.fake_device
                if device != (home or device):
                    return None
                home, count, known = device, count + 1, known + (x.constant is not None)
    if known and (op._schema.is_mutable or (known == count and not is_open)):
        return None
    home = home or _CPU
    asked = kwargs.get("device")
    if asked is not None and _with_index(torch.device(asked)) != home:
        return None
    return home if home.type in _KINDS else None


_KINDS = "cpu", "cuda"  # of devices


def _with_index(device: torch.device) -> torch.device:
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


@functools.cache
def is_there(device: torch.device) -> bool:
    """Whether torch is built for such a device: else autograd ends the process at one's tensor."""
    own = torch.accelerator.current_accelerator()
    return device.type in ("cpu", "meta", own and own.type)


def is_symbolic(x: Any) -> bool:
    """Whether an open size is among arguments."""
    if type(x) in (list, tuple, torch.Size):
        return any(map(is_symbolic, x))
    if type(x) is dict:
        return any(map(is_symbolic, x.values()))
    if isinstance(x, Tensor):
        return bool(x._has_symbolic_sizes_strides)
    return isinstance(x, OPEN_NUMBERS)


@contextlib.contextmanager
def _uncached(mode: _Mode) -> Iterator[None]:
    """Without torch's cache of results, whose keys know torch's own symbols alone."""
    mode.cache_enabled, before = False, mode.cache_enabled
    try:
        yield
    finally:
        mode.cache_enabled = before


def _on_meta(mode: _Mode, run: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a kernel on the meta tensors that fakes are."""
    before = mode.in_kernel_invocation
    by_cpp = torch._C._DisablePythonDispatcher()
    with by_cpp, torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        mode.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            return run(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = before


def _wrapped(mode: _Mode, found: Any, device: torch.device) -> Any:
    if type(found) in (tuple, list):
        return type(found)(_wrapped(mode, x, device) for x in found)
    return _fake(mode, found, device) if type(found) is Tensor else found


def _by_function(
    mode: _Mode, own: Callable[..., Any], args: Any, kwargs: Any, device: torch.device
) -> Any:
    """What a shape function of torch's gives; some name the device of meta kernels themselves."""

    def here(x: Any) -> Any:
        is_there = type(x) is FakeTensor and x.fake_device == _META
        return _fake(mode, _new(x.shape, x.stride(), x.dtype), device) if is_there else x

    with mode:
        found = own(*args, **kwargs)
    return fx.node.map_aggregate(found, here)


def _fake(
    mode: _Mode, meta: Tensor, device: torch.device, requires_grad: bool = False
) -> FakeTensor:
    """FakeTensor(mode, meta, device) in a tenth of the time: its attributes as they were before."""
    states: dict[torch.device, Any] = mode.__dict__.setdefault("_fusee_states", {})
    state = states.get(device)
    if state is None:
        first = FakeTensor(mode, meta.requires_grad_(requires_grad), device)
        states[device] = dict(vars(first))
        return first
    made: FakeTensor = Tensor._make_subclass(
        FakeTensor, meta, requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(state)
    return made


def fake_again(mode: _Mode, device: torch.device, *spec: Any) -> Any:
    """A new tensor without gradients: of this size, these strides and this dtype."""
    return _wrapped(mode, _on_meta(mode, _new, spec, {}), device)


def _refuse_squeeze(x: Any, axes: Any = None) -> None:
    """Refuse to drop an axis of which only data knows whether it has one element."""
    axes = range(x.dim()) if axes is None else [axes] if isinstance(axes, int) else axes
    for n in (x.shape[axis] for axis in axes):
        pending = n == 1
        if type(pending) is torch.SymBool and pending.node.is_pending():
            pending.node.env.data.refuse(pending.node.relation())


# Their results lie the same whether an operand is lazily conjugated.
_WITH_BITS = frozenset(overloads("_fft_r2c _fft_c2r _fft_c2c copy_ slice.Tensor select.int"))

# ------------------------------------------------------------------------------ tracing


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Keeps tensors that are saved here, which hold no data, from hooks on saved tensors, and what
    is computed after an interrupt from modes that were being entered or left when it came."""
    switch = torch._C._autograd._saved_tensors_hooks_set_tracing
    before, count = switch(True), torch._C._len_torch_dispatch_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_dispatch_stack() > count:
            _pop_mode()
        switch(before)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of which TorchDynamo traces nothing, nor of what it calls."""
    switch = torch._C._dynamo.eval_frame.set_eval_frame

    def run(*args: Any, **kwargs: Any) -> Any:
        before = switch(None)
        try:
            return function(*args, **kwargs)
        except FuseeError as error:
            raise shown(error)  # noqa: B904  # it is the same one
        finally:
            switch(before)

    return run


def has_saved_tensor_hooks() -> bool:
    """Whether torch.autograd.graph.saved_tensors_hooks is on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Nested(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch's shape function of an operator calls."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.twins = twins

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # the wrapper that does imports torch._dynamo
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.twins.run(op, args, kwargs or {})


# What torch's fakes of a GPU give, which layers ask again and again.
_LIES_THERE: dict[Any, Any] = {}


class Twins:
    """Makes tensors without data that stand for a program's, and runs operators on them.

    No tracer may be active. Plain meta tensors are quick; where open sizes or devices matter, twins
    are FakeTensors.

    mode   of FakeTensors; None: plain meta tensors do
    env    for sizes that only data knows; None: there are none
    """

    def __init__(self, mode: FakeTensorMode | None = None, env: ShapeEnv | None = None) -> None:
        self.mode, self.env = mode, env

    def empty(
        self, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # Under the mode torch.empty_strided takes 2 ms, most of it for a cache that never hits.
        data = _new(size, stride, dtype)
        return data if self.mode is None else _fake(self.mode, data, device)

    def run(self, op: Any, args: Args, kwargs: Kwargs, device: torch.device = _CPU) -> Any:
        """
        device   of the operands
        """
        if self.mode is None and "device" in kwargs:
            kwargs = {**kwargs, "device": _META}
        if self.env is not None and self.env.data.made:
            # Where an operator may refuse tensors without elements, or lay its result out as if
            # there were some, sizes that only data knows are let be no 0.
            is_plain = packet_name(op) in OF_NOTHING or torch.Tag.pointwise in op.tags
            for x in pytree.tree_leaves(args) if not op.is_view else ():
                if isinstance(x, Tensor) and not (is_plain and is_row_major(x)):
                    let_be_filled(x.shape)
        is_there = device.type == "cuda"
        if self.env is not None and op in UNBACKED:
            found = unbacked(self.env, op, args, kwargs, device)
        else:
            with torch._C._DisablePythonDispatcher():
                found = (results_there if is_there else results)(op, args, kwargs)
        if found is not None:
            return _on_device(found, functools.partial(self._beside, args) if self.mode else _new)
        if self.mode is None:
            if is_there and op in ASKING:
                kinds = op, device, _cur_sdpa_kernel_backends(), args, kwargs
                key = fx.node.map_aggregate(kinds, Spec.of)
                if key not in _LIES_THERE:
                    found = self.by_torch(op, args, kwargs, device)
                    _LIES_THERE[key] = fx.node.map_aggregate(found, Spec.of)
                return _on_device(_LIES_THERE[key], _new)
            if takes_no_tensor(op):
                return self.by_torch(op, args, kwargs, device)
            own = kernel(op)
            with _NOTHING if own is None else _Nested(self):
                return (own or op)(*args, **kwargs)
        make, home = OPEN_MAKERS.get(op), _with_index(torch.device(kwargs.get("device") or _CPU))
        if make is not None and home.type in _KINDS:
            made = _unless_unsure(make)(*args, **{**kwargs, "device": _META})
            if made is not None:
                return _fake(self.mode, made, home)
        try:
            with python_dispatcher(), self.mode:
                return op(*args, **kwargs)
        except DynamicOutputShapeException:
            if self.env is None:
                raise
            return _by_users_kernel(self.mode, self.env, op, args, kwargs)

    def by_torch(self, op: Any, args: Args, kwargs: Kwargs, device: torch.device = _CPU) -> Any:
        """What torch's own fakes give. On the CPU they let an operator without a meta kernel run on
        zeros.

        raises   RuntimeError where they don't
        """
        mode = fake_mode()

        def fake(x: Any) -> Any:
            return FakeTensor(mode, x, device) if isinstance(x, Tensor) else x

        def meta(x: Any) -> Any:
            is_dense = isinstance(x, Tensor) and x.layout is torch.strided
            return _new(x.shape, x.stride(), x.dtype) if is_dense else x

        given, named = fx.node.map_aggregate((args, kwargs), fake)
        with torch.random.fork_rng(devices=[]), mode:
            found = op(*given, **named)
        return fx.node.map_aggregate(found, meta)

    def _beside(self, args: Args, size: Any, stride: Any, dtype: Any) -> Tensor:
        """A result on the device of the operands; of numbers alone, on the CPU."""
        device = together((x, x.device) for x in tensors_in(args))
        return self.empty(size, stride, dtype, device or _CPU)

    def view(self, op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The twin of a view. Whether it shares the storage of `x` is the caller's to know."""
        rule = None if self.mode is None else OPEN_VIEWS.get(op)
        if rule not in (None, op):  # kernels in C++ run below the mode
            made = _on_meta(self.mode, _unless_unsure(rule), (x, *args), kwargs)
            if type(made) is Tensor:
                return _fake(self.mode, made, x.device)
        with self.mode or _NOTHING:
            out: Tensor = op(x, *args, **kwargs)
        return out


def on_metas(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an operator gives for twins, of which autograd may refuse what was since written to."""
    with torch.no_grad(), mode_of(args) as mode:
        if mode is None and isinstance(op, OpOverload) and not op.is_view:
            return Twins().run(op, args, kwargs)
        return op(*args, **kwargs)


# ---------------------------------------------------------------------------- raising
# Which calls may raise for what their operands hold. Such a call is never dead.
#
# An operator is listed by its schema where that says enough: it returns nothing, or takes a tensor
# of places. The rest are rows of a table. Adapter of torch's schema objects, tested with torch
# 2.13: the names used, `OpOverload._schema` with the names of its arguments, exist from 2.11 to
# 2.15.


# Arguments that say where: ATen compares them with the size of what they point into.
_PLACES = frozenset("index indices offsets lengths repeats pivots LU_pivots sorter".split())

# Compared with what they must lie between, solved, counted: by name, whatever the overload.
_NAMES = frozenset(
    """
    put binary_cross_entropy nll_loss nll_loss_nd nll_loss_forward nll_loss2d nll_loss2d_forward
    cross_entropy cross_entropy_loss one_hot multi_margin_loss multilabel_margin_loss
    multilabel_margin_loss_forward ctc_loss _ctc_loss masked_scatter histc histogram histogramdd
    bincount combinations embedding_bag take_along_dim bernoulli multinomial normal poisson binomial
    inverse det logdet slogdet cholesky cholesky_inverse cholesky_solve triangular_solve lu_solve
    lu_unpack geqrf ormqr orgqr svd pinverse qr matrix_exp matrix_power
    fake_quantize_per_channel_affine quantize_per_tensor quantize_per_channel
    fake_quantize_per_channel_affine_cachemask
    max_unpool1d max_unpool2d max_unpool3d tensor_split linear_cross_entropy as_strided_copy
    """.split()
)
_FACTORS = ("linalg_", "_linalg_")
_NEVER = frozenset("linalg_cross linalg_vector_norm linalg_vecdot linalg_diagonal".split())

# Of integers: by zero, or to a negative power.
_DIVIDE = frozenset(
    "div divide floor_divide floordiv true_divide remainder mod fmod pow ldexp".split()
)


@functools.cache
def may_raise(op: Any) -> bool:
    """Whether an operator may raise for the values of operands of any dtype.

    Gradients are of calls that did not raise.
    """
    if not isinstance(op, OpOverload):
        return False
    schema = op._schema
    name = schema.name.partition("::")[2]
    if not schema.returns:
        return True
    if name in _NEVER or name.endswith("_backward") or name.startswith("_unsafe_"):
        return False
    if name.rstrip("_") in _NAMES or name.startswith(_FACTORS):
        return True
    return any(a.name in _PLACES and "Tensor" in str(a.type) for a in schema.arguments)


@functools.cache
def name_may_raise(name: str) -> bool:
    """The same of what a program calls: `gather`, `index_add_`, `cross_entropy`."""
    name = name.strip("_")
    if name in _NAMES or name.startswith(_FACTORS):
        return name not in _NEVER
    return any(map(may_raise, overloads_of(getattr(torch.ops.aten, name, None))))


def raises(node: fx.Node, name: str, value: str) -> bool:
    """Whether this call may raise, beyond what its operator says.

    name    of the operator
    value   the entry of a node's meta that holds its result
    """
    name = name.strip("_")
    out = node.meta.get(value)
    if name in _DIVIDE or name[1:] in _DIVIDE:
        divisor = node.args[1] if len(node.args) > 1 else None
        is_safe = isinstance(divisor, (int, float)) and (divisor > 0 or "pow" not in name)
        is_whole = isinstance(out, Tensor) and not out.is_floating_point()
        return is_whole and not (is_safe and divisor != 0)
    found = (x.meta.get(value) for x in node.all_input_nodes)
    shapes = (x.shape for x in found if isinstance(x, Tensor))
    return _refuses_nothing(name) and any(map(has_zero, shapes))


@functools.cache
def _refuses_nothing(name: str) -> bool:
    """Whether an operator may refuse tensors without elements, which its rule takes."""
    names = {name, "_" + name}
    ops = [op for n in names for op in overloads_of(getattr(torch.ops.aten, n, None))]
    is_plain = not ops or any(op.is_view or torch.Tag.pointwise in op.tags for op in ops)
    is_plain |= name.endswith("backward")  # its forward has run
    return name in ("max", "min", "interpolate") or not (is_plain or names & OF_NOTHING)
