"""NumPy in a graph: an array is a tensor there, with a wrapper at the border.

A call of NumPy's is made twice while it is captured: by NumPy itself on shadows, arrays of the same
dtypes, shapes and strides whose elements mean nothing, and by torch._numpy on the stand-ins of
tensors, which writes torch calls into the graph. NumPy's own result says what the program sees of
an array: its class (an array or a scalar), dtype, shape and strides, what it is a view of. Where
torch's result is another one, or there is none, or NumPy raises or warns, the call runs in Python.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusee.capture import calls
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import BY_TYPE, SPECIAL, leave_region, stands_for, stands_for_each
from fusee.capture.dynamic import LOADERS, Computed, Number, is_array, load_fixed
from fusee.capture.frame import having, is_scalar
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import Alias, EqualsMatch, TypeMatch
from fusee.capture.inputs import World
from fusee.capture.mirrors import Indexed
from fusee.capture.reconstruct import AS_IT_IS, MAKERS, Rebuild, makes
from fusee.capture.sources import Held, Origin, ResultOf
from fusee.capture.symbols import concrete, is_unbacked
from fusee.capture.torch_api import FakeTensor, as_array, by_torch, counterparts, pytree, tensor_of
from fusee.source import Args, Kwargs

# ---------------------------------------------------------------------------- arrays


np: Any = sys.modules.get("numpy")  # torch imports it, where there is one
if np is not None and int(np.__version__.partition(".")[0]) < 2:
    np = None  # whose dtypes hang on values
_SCALARS: tuple[Any, ...] = () if np is None else (*{*np.sctypeDict.values()},)
_KINDS_OF_DTYPE = tuple(type(np.dtype(kind)) for kind in _SCALARS)

# What NumPy's own result says of an array, and capture may tell the program.
_FACTS = frozenset("dtype itemsize nbytes ndim shape size strides".split())
_PARTS = {name: operator.attrgetter(name) for name in ("T", "real", "imag")}

_UNKNOWN = "needs the elements of an array, which are known only when the graph has run"


@dataclass(slots=True, eq=False, repr=False)
class Array(Computed):
    """A NumPy array or scalar that the graph computes.

    shadow   one like it in all but its elements
    tensor   the stand-in of the tensor that has the elements
    known    what its memory's arrays share: not empty while NumPy alone has written there what it
             made of constants; then the shadow's elements are its own
    """

    m: Capturing
    shadow: Any
    tensor: Tensor
    known: list[Any] = field(default_factory=list)
    __array_ufunc__ = None  # NumPy's own operators leave it to those below

    @property
    def kind(self) -> Any:
        return type(self.shadow)

    def attribute(self, m: Capturing, name: str) -> Any:
        if name == "__class__":
            return self.kind
        found = getattr(self.shadow, name)
        if name in _FACTS:
            return found
        if name in _PARTS:
            return _call(_PARTS[name], m, self)
        if not callable(found):
            raise GraphBreak(f"{name} of an array {_UNKNOWN}")
        return types.MethodType(getattr(self.kind, name), self)

    def number(self, is_place: bool = False) -> Number | Tensor:
        """What a torch call has in place of a scalar, or of an array that is an index."""
        is_row = is_place and isinstance(self.shadow, np.ndarray) and self.shadow.ndim
        if is_row and not self.m.modes and not self.m.world.seen:  # which hear of the array
            is_mask = self.shadow.dtype in (np.bool_, np.uint8)
            return self.tensor if is_mask else self.m.call(Tensor.long, self.tensor)
        if not isinstance(self.shadow, (np.floating, np.integer)):
            raise GraphBreak(f"a {self.kind.__name__} of NumPy among a torch call's arguments")
        recorder = self.m.recorder
        if isinstance(self.shadow, np.floating):
            return recorder.item(self.tensor)
        # a graph reads floats alone
        return recorder.item(recorder.call(Tensor.double, self.tensor), kind=int)

    def is_number(self) -> bool:
        """Whether float() and int() take it as they take a tensor of one number."""
        return self.shadow.ndim == 0 and self.shadow.dtype.kind in "fiu"

    def _need(self, *_: Any) -> Any:
        raise GraphBreak(f"the program {_UNKNOWN}")

    def __str__(self) -> Any:
        return str(self.shadow) if self.known else self._need()

    def __len__(self) -> int:
        return len(self.shadow)

    def __iter__(self) -> Iterator[Any]:
        return iter(Indexed(self.m, self, len(self)))

    def __getitem__(self, key: Any) -> Any:
        return _call(operator.getitem, self.m, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Array) and _shares(self.tensor, value.tensor):
            value = _call(np.ndarray.copy, self.m, value)  # NumPy reads before it writes
        _call(operator.setitem, self.m, self, key, value)


def _operators() -> None:
    def way(function: Any, order: int = 1) -> Callable[..., Any]:
        return lambda self, *others: _call(function, self.m, *(self, *others)[::order])

    def in_place(function: Any, plain: Any) -> Callable[..., Any]:
        def method(self: Array, other: Any) -> Any:
            is_array = isinstance(self.shadow, np.ndarray)
            return _call(function if is_array else plain, self.m, self, other)

        return method

    def asking(method: Any) -> Callable[..., Any]:
        return lambda self: method(self.shadow) if self.known else self._need()

    for name in "lt le eq ne gt ge neg pos invert abs".split():
        setattr(Array, f"__{name}__", way(getattr(operator, name)))
    for name in "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split():
        plain, changing = (getattr(operator, f"__{kind}{name}__") for kind in ("", "i"))
        setattr(Array, f"__{name}__", way(plain))
        setattr(Array, f"__r{name}__", way(plain, -1))
        setattr(Array, f"__i{name}__", in_place(changing, plain))
    for name, order in (("__divmod__", 1), ("__rdivmod__", -1)):
        setattr(Array, name, way(divmod, order))
    for name in "bool int float complex index repr".split():
        setattr(Array, f"__{name}__", asking(getattr(np.ndarray, f"__{name}__")))
    for name in "format hash array contains round trunc".split():
        setattr(Array, f"__{name}__", Array._need)


# ------------------------------------------------------------------------------ calls

# Where torch._numpy gives other values than NumPy for some operands, which no shadow shows, or
# signs and orders that libraries are free to choose.
_DIFFERS = set(
    """
    angle argpartition argsort broadcast_arrays cbrt convolve correlate eig eigh eigvals fix
    heaviside histogram histogram2d histogramdd modf partition real_if_close reciprocal resize sign
    svd
""".split()
)
_POWERS = ("pow", "ipow", "power")
_DIVIDE = frozenset("floordiv ifloordiv floor_divide mod imod remainder fmod divmod".split())
_OF_FLOATS = frozenset("around ceil floor rint round trunc".split())
_EMPTY = "empty", "empty_like"
_ROWS = list, tuple, getattr(np, "ndarray", list)
# Methods of known arrays and of numbers that torch._numpy lacks.
_PLAIN = frozenset(
    "item tolist tobytes is_integer as_integer_ratio bit_count __copy__ __deepcopy__ __format__"
    " __array__".split()
)
_IN_MEMORY = object()
# What NumPy computes of singles in double precision, and rounds; pinv drops what is 0 then.
_IN_DOUBLE = () if np is None else tuple(
    getattr(np.linalg, name)
    for name in "cholesky cond det eigh eigvalsh inv lstsq pinv qr slogdet solve tensorinv"
    " tensorsolve".split()
)  # fmt: skip
_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_WIDER = {narrow: wide for wide, narrow in _NARROWER.items()} | {torch.float16: torch.float64}


# Of ordinary values these may make others that NumPy warns of.
_WARN = frozenset(
    """
    arccos arccosh arcsin arctanh cosh divide divmod exp exp2 expm1 float_power floor_divide
    floordiv fmod ifloordiv imod ipow itruediv log log10 log1p log2 mod pow power remainder sinh
    sqrt tan true_divide truediv
""".split()
)
_KINDS = "divide", "over", "invalid", "under"


def _wanted(numpy: Any) -> tuple[str, ...]:
    """What is done about each kind of wrong value."""
    found = numpy.geterr()
    return tuple(found[kind] for kind in _KINDS)


_ERRORS = ResultOf(Held(np, "numpy"), _wanted, "what is done about wrong values in ")


def _call(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    if m.modes and function in (np.array, np.asarray):
        raise GraphBreak("tensors may be in what an array is made of, and modes hear of them")
    with having(m, modes=[]):  # which hear nothing of arrays
        x: Any = args[0] if args else None
        places = args[1:] if function is operator.getitem else ()
        places = places[0] if places and type(places[0]) is tuple else places
        is_element = any(map(_varies, places)) and not x.known and len(places) == x.shadow.ndim
        if is_element and all(type(k) in (int, torch.SymInt) for k in places):
            now = concrete(places, is_fixed=False)
            if all(-n <= k < n for k, n in zip(now, x.shadow.shape)):  # else NumPy says it
                element = m.tensor_operator(operator.getitem, x.tensor, places)
                return _array(m, "getitem", [x], x.shadow[now], element)
        return _called(m, function, args, kwargs)


def _operands(m: Capturing, function: Any, name: str, given: list[Any]) -> list[Any]:
    """Arguments as NumPy takes them, which knows no sizes that vary."""
    if (_is_loop(function) and "pow" not in name) or function in (np.where, np.clip):
        # powers look at their exponents; of others a number of Python's that varies has the dtype
        # of the arrays beside it, and becomes an element of these where they are floats
        dtype, *others = {x.shadow.dtype for x in given if is_array(x)} - {np.dtype(bool)} or {None}
        is_float = not others and dtype is not None and dtype.kind == "f"
        for k in [k for k, x in enumerate(given) if is_float and _varies(x)]:
            one = m.call(torch.ones, (), dtype=torch.float64)
            tensor = m.call(Tensor.to, m.call(torch.mul, one, given[k]), torch_dtype(dtype))
            if dtype.itemsize < 8:
                _expect_no_warning(m, tensor, [])  # of an overflow
            given[k] = Array(m, _meaningless(dtype.type(1)), tensor)
    for k, x in enumerate(given):
        given[k] = concrete(x)
        if type(x) is slice:
            given[k] = slice(*map(concrete, (x.start, x.stop, x.step)))
        if function in _OF_TENSORS and type(x) is FakeTensor:
            given[k] = _numpy(m, m.call(Tensor.contiguous, x) if name.endswith("_like") else x)
    if name.strip("_") in (*_DIVIDE, *_POWERS) and len(given) > 1:
        # integers of NumPy's from outside are the same in all calls from here on: torch divides by
        # no 0, and has no powers below 0
        for made, origin, _, real in m.world.arrays.values():
            if made is given[1] and isinstance(real, np.integer):
                m.world.fact(EqualsMatch, origin, real)
                given[1] = real
    return given


def _called(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> Any:
    """A call of NumPy's, or an operator, or what a method's descriptor does, on arrays."""
    name = getattr(function, "__name__", "an attribute")
    is_read = name in ("item", "tolist") and len(args) == 1 and is_array(args[0])
    if is_read and not args[0].known:
        return m.call(getattr(Tensor, name), args[0].tensor)  # a FakeTensor has its own
    given, spec = pytree.tree_flatten((m.deep(args), m.deep(kwargs)))
    given = _operands(m, function, name, given)
    operands = [x for x in given if isinstance(x, Array)]
    by_name = function if _is_operator(function) else counterparts().get(function)
    is_known = all(x.known for x in operands)
    if is_known and name not in _EMPTY and (by_name or name in _PLAIN):
        made = _of_constants(m, name, function, given, spec)
        if made is not _IN_MEMORY:
            return made
    # a sequence's only element, which NumPy takes, is for torch a tensor of one dimension
    is_row = name == "fill" and any(isinstance(getattr(x, "shadow", x), _ROWS) for x in args[1:])
    is_unlike = is_row or _differs(function, name, given, operands)
    if by_name is None or (operands and is_unlike):
        raise GraphBreak(f"NumPy's {name} has no equal in torch._numpy")
    shadows = pytree.tree_unflatten([_shadow(name, x) for x in given], spec)
    shadow = _by_numpy(m, name, function, not is_known, *shadows)
    if is_unlike:
        raise GraphBreak(f"NumPy's {name} has no equal in torch._numpy")
    is_list = function in (np.array, np.asarray) and isinstance(args[0], (list, tuple))
    # in what integers are computed where NumPy makes floats of them, and not only `out` does
    made, (values, named) = shadow, shadows
    if isinstance(function, np.ufunc) and ("out" in named or len(values) > function.nin):
        named = {key: x for key, x in named.items() if key != "out"}
        made = _by_numpy(m, name, function, not is_known, values[: function.nin], named)
    is_rounded = function in _IN_DOUBLE and all(x.shadow.dtype.char in "fF" for x in operands)
    before = _versions(operands)
    try:
        with m.world.mode, by_torch():
            # to NumPy operands have the dtype of what it makes of them
            dtype = getattr(made, "dtype", np.dtype(bool))
            to = torch_dtype(dtype) if _is_loop(function) and dtype.kind in "fc" else None
            is_wide = is_rounded or dtype.char in "dD"
            pairs = [(_other(x, to), getattr(x, "shadow", None) is shadow) for x in given]
            others = [_cast(x, _WIDER) if is_wide and not is_out else x for x, is_out in pairs]
            if is_list:  # of tensors, which torch._numpy stacks
                others = [x if tensor_of(x) is None else tensor_of(x) for x in others]
            args, kwargs = pytree.tree_unflatten(others, spec)
            found = by_name(*args, **kwargs)
            found = pytree.tree_map(lambda x: _cast(x, _NARROWER), found) if is_rounded else found
    except Exception as error:  # noqa: BLE001  # whatever it does not take
        what = (str(error).splitlines() or [""])[0]
        raise GraphBreak(f"torch._numpy cannot run this {name}: {what}") from None
    written = [
        x for x, *versions in zip(operands, before, _versions(operands)) if len({*versions}) > 1
    ]
    if not is_known:  # nobody counts what is written in inference mode
        for x in written if None not in before else operands:
            x.known.clear()
    if any(m.recorder.has_gradients(x.tensor) for x in written):
        raise GraphBreak(f"{name} writes to memory of a tensor with gradients, unknown to autograd")
    if not is_known and _is_loop(function) and name.strip("_") in _WARN:
        for x in found if isinstance(found, tuple) else (found,):
            _expect_no_warning(m, tensor_of(x), [x for x in operands if x not in written])
    return _joined(m, name, operands, shadow, found)


def _varies(x: Any) -> bool:
    if type(x) is torch.SymInt:
        return not is_unbacked(x)
    return type(x) is Number and x.kind is float and not x.is_late


def _set_by(manager: Any, kind: str, before: str) -> str:
    """What np.errstate sets for a kind of wrong value; `before` if nothing."""
    found = [getattr(manager, f"_{name}", None) for name in (kind, "all")]
    return next((x for x in found if isinstance(x, str)), before)


def _expect_no_warning(m: Capturing, x: Any, operands: list[Array]) -> None:
    """Let the graph check that no wrong value came of right ones: else NumPy does it, and warns."""
    wanted = _wanted(np)
    for manager, _ in m.regions:
        if isinstance(manager, np.errstate):
            wanted = tuple(map(functools.partial(_set_by, manager), _KINDS, wanted))
    if "warn" not in wanted or x is None or not x.is_floating_point():
        return
    if m.checks is None or m.policy.is_exporting:
        return  # the graph writes to its inputs, and can't run again: the result is right, unsaid
    wrong, is_nan = torch.logical_not(torch.isfinite(x)), torch.isnan(x)
    for one in operands:
        if one.tensor.is_floating_point():
            wrong = torch.logical_and(wrong, torch.isfinite(one.tensor))
            is_nan = torch.logical_and(is_nan, torch.logical_not(torch.isnan(one.tensor)))
    holds = torch.logical_not(torch.any(torch.logical_or(wrong, is_nan)))
    m.checks.append(holds)
    torch._assert_async(holds)


def _versions(operands: list[Array]) -> list[int | None]:
    """How often each was written to; in inference mode nobody counts, and nothing has gradients."""
    with torch._C.DisableTorchFunction():
        return [None if x.tensor.is_inference() else x.tensor._version for x in operands]


def _of_constants(m: Capturing, name: str, function: Any, given: list[Any], spec: Any) -> Any:
    """What NumPy makes of what is known now, where it is new; else _IN_MEMORY: it is to be written,
    or to be a view."""
    copies = [x.shadow.copy("K") if isinstance(x, Array) else _shadow(name, x) for x in given]
    found = _by_numpy(m, name, function, False, *pytree.tree_unflatten(copies, spec))
    pairs = [(x.shadow, y) for x, y in zip(given, copies) if isinstance(x, Array)]
    is_written = any(x.tobytes() != y.tobytes() for x, y in pairs)
    roots = [_root(y) for _, y in pairs]
    leaves, of = pytree.tree_flatten(found)
    owners = [id(_root(x)) for x in leaves if isinstance(x, np.ndarray)]
    if found is None or is_written or len(set(owners)) < len(owners):
        return _IN_MEMORY
    for k, x in enumerate(leaves):
        if not isinstance(x, np.ndarray):
            continue
        if any(_root(x) is y for y in roots):
            return _IN_MEMORY
        if (dtype := torch_dtype(x.dtype)) is None:
            raise GraphBreak(f"an array of {x.dtype} in a graph")
        is_full = x.size and x.tobytes() == x.flat[0].tobytes() * x.size
        if not is_full and x.size > 256:
            return _IN_MEMORY  # only its call is short
        with m.world.mode:
            literal = (
                torch.full(x.shape, x.flat[0].item(), dtype=dtype)
                if is_full
                else torch.tensor(x.tolist(), dtype=dtype).reshape(x.shape)
            )
        leaves[k] = _array(m, name, [], x, literal)
    return pytree.tree_unflatten(leaves, of)


# Functions that look at a tensor as an array and give an array; others leave it to torch.
_OF_TENSORS = () if np is None else (
    np.array, np.asarray, np.ascontiguousarray, np.empty_like, np.full_like, np.ones_like,
    np.zeros_like, np.concatenate, np.hstack, np.stack, np.vstack, np.sort,
)  # fmt: skip


def _is_loop(function: Any) -> bool:
    """Whether a function goes through arrays element by element."""
    is_item = function in (operator.getitem, operator.setitem)
    return isinstance(function, np.ufunc) or (_is_operator(function) and not is_item)


def _differs(function: Any, name: str, given: list[Any], operands: list[Array]) -> bool:
    """Whether torch._numpy may give other values for these operands."""
    whole = [x.shadow.dtype for x in operands if x.shadow.dtype.kind in "iu"]
    ranges = [np.iinfo(x) for x in whole] if _is_loop(function) or name == "clip" else ()
    if any(type(x) is int and not one.min <= x <= one.max for one in ranges for x in given):
        return True
    if name.strip("_") in _POWERS and isinstance(given[1], Array):
        return given[1].shadow.dtype in whole  # NumPy raises for negative ones
    is_whole = all(x.shadow.dtype.kind in "iub" for x in operands) and float not in map(type, given)
    if name.strip("_") in _DIVIDE and len(given) > 1 and is_whole:
        divisor = given[1]  # where it is zero NumPy warns and gives zero; torch raises
        return isinstance(divisor, Array) or (type(divisor) is not Number and not divisor)
    if name in ("setitem", "fill") and operands and operands[0].shadow.dtype in whole:
        # a number has to fit, where an array would be cast
        stored = getattr(given[-1], "shadow", given[-1])
        is_number = type(stored) is Number and stored.kind is not bool
        is_scalar = isinstance(stored, np.generic) and isinstance(given[-1], Array)
        if is_number or (is_scalar and not np.can_cast(stored.dtype, operands[0].shadow.dtype)):
            return True
    if name in ("getitem", "setitem"):  # what goes backward beside what is looked up
        key = given[1:-1] if name == "setitem" else given[1:]
        is_backward = any(type(x) is slice and type(x.step) is int and x.step < 0 for x in key)
        if is_backward and not all(type(x) is slice or x is Ellipsis for x in key):
            return True
    is_float = bool(operands) and operands[0].shadow.dtype.kind == "f"
    return name in _DIFFERS or (name in _OF_FLOATS and not is_float)


def _is_operator(function: Any) -> bool:
    home = getattr(function, "__module__", None)
    return home == "_operator" or function is divmod or function in _PARTS.values()


def _shadow(name: str, x: Any) -> Any:
    """What NumPy is given for an argument."""
    if isinstance(x, Array):
        return x.shadow
    if type(x) is slice:
        return slice(*(_shadow(name, end) for end in (x.start, x.stop, x.step)))
    if type(x) is Number:
        x.need()
    if is_scalar(x) or isinstance(x, (type, np.generic, np.dtype)):
        return x
    raise GraphBreak(f"NumPy's {name} of a {type(x).__qualname__}")


def _other(x: Any, to: torch.dtype | None) -> Any:
    """What torch._numpy is given for an argument; integers in arrays become `to`."""
    if isinstance(x, Array):
        is_cast = to is not None and x.shadow.dtype.kind in "iub"
        return as_array(x.tensor.to(to) if is_cast else x.tensor)
    if type(x) is slice:
        return slice(*(_other(end, None) for end in (x.start, x.stop, x.step)))
    if isinstance(x, np.generic):
        return as_array(torch.full((), x.item(), dtype=to or getattr(torch, x.dtype.name)))
    is_dtype = isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic))
    return np.dtype(x).name if is_dtype else x


def _cast(x: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    """An array of torch._numpy's in another dtype; anything else as it is."""
    found = tensor_of(x)
    return x if found is None else as_array(found.to(dtypes.get(found.dtype, found.dtype)))


def _by_numpy(m: Capturing, name: str, function: Any, is_shadow: bool, *given: Any) -> Any:
    """What NumPy itself makes of a call."""
    wanted = _wanted(np)
    m.world.fact(EqualsMatch, _ERRORS, wanted)
    if {*wanted} - {"warn", "ignore"}:
        raise GraphBreak("np.seterr has it that wrong values raise, or are told otherwise")
    values = "ignore" if is_shadow else "warn"  # those of a shadow mean nothing
    with np.errstate(all=values), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = function(*given[0], **given[1])
        except Exception as error:  # noqa: BLE001  # whatever it refuses, Python will say it
            raise GraphBreak(f"NumPy's {name} raises {type(error).__name__}: {error}") from None
    if said:
        raise GraphBreak(f"NumPy's {name} warns: {said[0].message}")
    return found


# ------------------------------------------------------------------------------ results


def _joined(m: Capturing, name: str, operands: list[Array], shadow: Any, found: Any) -> Any:
    """What the program gets where NumPy has given one thing and torch another."""
    tensor = tensor_of(found)
    if isinstance(shadow, (np.ndarray, np.generic)) and tensor is not None:
        return _array(m, name, operands, shadow, tensor)
    if isinstance(shadow, (list, tuple)) and isinstance(found, (list, tuple)):
        items = [_joined(m, name, operands, *pair) for pair in zip(shadow, found, strict=True)]
        return type(shadow)(*items) if hasattr(shadow, "_fields") else type(shadow)(items)
    if shadow is None or isinstance(shadow, np.dtype):
        return shadow
    if type(shadow) is not type(found) or shadow != found:
        raise GraphBreak(f"torch._numpy's {name} gives a {type(found).__name__}")
    return shadow


def _array(m: Capturing, name: str, operands: list[Array], shadow: Any, x: Tensor) -> Array:
    """The array that NumPy says it is, with the elements of a tensor."""
    is_view = isinstance(shadow, np.ndarray)
    for one in operands:
        if is_view and shadow is one.shadow:  # there is one False
            return one
    of = next((one for one in operands if is_view and _root(one.shadow) is _root(shadow)), None)
    with torch._C.DisableTorchFunction():
        is_same = tuple(x.shape) == shadow.shape and torch_dtype(shadow.dtype) is x.dtype
        is_laid_out = is_same and _has_strides(x, shadow)
        is_shared = any(_shares(x, one.tensor) for one in operands)
        if of is not None and shadow.size:
            begin = (x.storage_offset() - of.tensor.storage_offset()) * shadow.itemsize
            is_there = begin == _address(shadow) - _address(of.shadow)
            is_same &= is_laid_out and _shares(x, of.tensor) and is_there
    if is_same and of is None and (is_shared or not is_laid_out):
        order = sorted(range(x.dim()), key=lambda k: -shadow.strides[k])
        with m.world.mode:
            dense = x.permute(order).clone(memory_format=torch.contiguous_format)
            x = dense.permute([order.index(k) for k in range(x.dim())])
            is_same = _has_strides(x, shadow)
    if not is_same:
        raise GraphBreak(f"torch._numpy's {name} gives another kind of array than NumPy's")
    if name not in _EMPTY and all(one.known for one in operands):
        return Array(m, shadow, x, [True] if of is None else of.known)
    return Array(m, shadow if of is not None else _meaningless(shadow), x)


def torch_dtype(dtype: Any) -> torch.dtype | None:
    is_numpys = dtype.isnative and dtype.isbuiltin == 1  # ml_dtypes has a bfloat16, too
    is_first = is_numpys and np.dtype(dtype.name).num == dtype.num  # np.longlong is an int64, too
    found = getattr(torch, dtype.name, None) if is_first else None
    return found if isinstance(found, torch.dtype) else None


def _has_strides(x: Tensor, shadow: Any, strides: tuple[int, ...] | None = None) -> bool:
    rows = zip(x.shape, x.stride(), strides or shadow.strides)
    return not shadow.size or all(n == 1 or a * shadow.itemsize == b for n, a, b in rows)


def _shares(a: Tensor, b: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _root(x: Any) -> Any:
    """The array whose memory this is."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def _address(x: Any) -> int:
    found: int = x.__array_interface__["data"][0]
    return found


def _meaningless(x: Any) -> Any:
    """An array with elements that NumPy's functions take: valid indices, matrices of full rank."""
    if not isinstance(x, np.ndarray):
        return type(x)(x.dtype.kind in "fc")
    if x.flags.writeable:
        is_float = x.dtype.kind in "fc"
        x[...] = np.eye(*x.shape[-2:]) if x.ndim > 1 and is_float else is_float
    return x


def _like(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
    """A shadow of this layout, strides in bytes."""
    size = sum((n - 1) * step for n, step in zip(shape, strides)) + dtype.itemsize
    buffer = np.zeros(size if 0 not in shape else 0, np.uint8)
    return _meaningless(np.ndarray(shape, dtype, buffer, strides=strides))


# ------------------------------------------------------------------------------ the border


def as_tensor(x: Any, inference: bool = False) -> Tensor:
    """How a graph is given an array from outside."""
    if torch.is_inference_mode_enabled() is not inference:
        with torch.inference_mode(inference):
            return as_tensor(x, inference)
    if not isinstance(x, np.ndarray):
        return torch.from_numpy(np.asarray(x))
    if x.flags.writeable:
        return torch.from_numpy(x)
    with warnings.catch_warnings():  # torch's, of arrays that are only to be read
        warnings.simplefilter("ignore")
        return torch.from_numpy(x)


def as_inference_tensor(x: Any) -> Tensor:
    """`as_tensor` of an array that the program first uses in inference mode."""
    return as_tensor(x, inference=True)


def layout_of(x: Any) -> tuple[Any, ...]:
    return x.dtype.str, x.shape, x.strides, x.flags.writeable


def as_numpy(
    x: Tensor, is_scalar: bool, is_writeable: bool, strides: tuple[int, ...] | None
) -> Any:
    """What the program gets for a graph's result; laid out anew where torch's kernel differs."""
    made = x.resolve_conj().resolve_neg().numpy()
    if is_scalar:
        return made[()]
    if strides is not None and not made.size:
        made = np.ndarray(made.shape, made.dtype, np.empty(0, np.uint8), strides=strides)
    elif strides is not None and not _has_strides(x, made, strides):
        order = sorted(range(made.ndim), key=lambda k: -strides[k])
        back = [order.index(k) for k in range(made.ndim)]
        made = np.ascontiguousarray(made.transpose(order)).transpose(back)
    else:
        made = made[...]  # whoever asks for its base finds an array, and no tensor
    if not is_writeable:
        made.flags.writeable = False
    return made


@makes(Array, parts=lambda x: (x.tensor,))
def _rebuilt(r: Rebuild, x: Array, tensor: str) -> str:
    is_scalar = not isinstance(x.shadow, np.ndarray)
    # a view must lie where it does
    is_own = not is_scalar and (_root(x.shadow) is x.shadow or not x.shadow.size)
    strides = x.shadow.strides if is_own else None
    return r.call(as_numpy, tensor, f"{is_scalar}, {x.shadow.flags.writeable}, {strides}")


@LOADERS.rule(*_SCALARS, *([] if np is None else [np.ndarray]))
def _load(world: World, x: Any, origin: Origin) -> Any:
    """The array that stands for one from outside; None if no graph takes it."""
    if id(x) in world.arrays:
        known, first, *_ = world.arrays[id(x)]
        world.fact(Alias, origin, first)
        return known
    is_scalar = not isinstance(x, np.ndarray)
    if torch_dtype(x.dtype) is None or (is_scalar and not world.varies(origin, x)):
        return None
    if not is_scalar and (any(s < 0 or s % x.itemsize for s in x.strides) or not x.flags.aligned):
        return None
    world.fact(TypeMatch, origin, type(x))
    if not is_scalar:
        world.gives(origin, layout_of, "the layout of ", layout_of(x))
    given = as_inference_tensor if torch.is_inference_mode_enabled() else as_tensor
    place = ResultOf(origin, given, "the tensor of ")
    with torch._C.DisableTorchFunction():
        tensor = world.input(given(x), place, origin)
    shadow = _meaningless(x) if is_scalar else _like(x.shape, x.strides, x.dtype)
    if not is_scalar:
        shadow.flags.writeable = x.flags.writeable
    made = world.know(Array(world.machine, shadow, tensor), origin)
    world.arrays[id(x)] = made, origin, place, x
    return made


@LOADERS.rule(*_KINDS_OF_DTYPE)
def _load_dtype(world: World, x: Any, origin: Origin) -> Any:
    world.fact(EqualsMatch, origin, x)
    return x


def _numpy(m: Capturing, x: Any, *, force: Any = False) -> Any:
    """Tensor.numpy."""
    if m.modes:  # which hear it, and come back with one less
        return calls.on_tensors(m, Tensor.numpy, (x,), {"force": force} if force else {})
    if m.truth(force):
        for way in ("detach", "cpu", "resolve_conj", "resolve_neg"):
            x = m.call(getattr(Tensor, way), x)
    with torch._C.DisableTorchFunction():
        plain = x.layout is torch.strided and x.device.type == "cpu"
        plain = plain and not (x.requires_grad or x.is_conj() or x.is_neg())
        width = x.element_size() if x.numel() else 0  # NumPy's own arrays without elements have 0
        strides = tuple(step * width for step in x.stride()) if plain else ()
    name = str(x.dtype).removeprefix("torch.")
    if not m.recorder.is_main:  # an autograd function, for one: its backward runs without data
        raise GraphBreak("numpy() in a function that the graph calls as a whole")
    if not plain or id(x) in m.world.seen or name == "bfloat16":
        raise GraphBreak("numpy() of a tensor whose elements must be computed or moved first")
    shadow = _like(tuple(x.shape), strides, np.dtype(name))
    return Array(m, shadow, m.attribute(x, "data"))  # whose writes nobody counts


@stands_for(*([] if np is None else [np.errstate.__enter__]))
def _enter_errstate(m: Capturing, manager: Any) -> None:
    """A graph checks what NumPy would warn of, and does nothing else about wrong values."""
    wanted = {_set_by(manager, kind, "warn") for kind in _KINDS}
    if wanted - {"warn", "ignore"}:
        raise GraphBreak("np.errstate has it that wrong values raise, or are told otherwise")
    m.regions.append((manager, contextlib.nullcontext()))


if np is not None:
    _operators()
    _FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
    _BASES = {x for kind in _SCALARS for x in kind.__mro__ if issubclass(x, np.generic)}
    stands_for_each(
        *(x for one in (np, np.linalg) for x in vars(one).values() if isinstance(x, _FUNCTIONS)),
        *(
            x for kind in (np.ndarray, *_BASES) for x in vars(kind).values()
            if isinstance(x, types.MethodDescriptorType)
        ),
        *_SCALARS, np.dtype, np.finfo, np.iinfo,
    )(_call)  # fmt: skip
    BY_TYPE.rule(np.ufunc, type(np.sum))(_call)
    LOADERS.rule(np.ufunc, type(np.sum))(load_fixed)
    MAKERS.update(dict.fromkeys((*_SCALARS, *_KINDS_OF_DTYPE), AS_IT_IS))
    SPECIAL[Tensor.numpy], SPECIAL[np.errstate.__exit__] = _numpy, leave_region
