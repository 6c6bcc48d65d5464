"""What capture does with functions of torch whose bytecode does not say it: stand-ins, by kind.

Capture itself knows Python and what a tensor is. This package registers stand-ins
(`capture/builtins.py`); whoever compiles imports it. Here are functions that ask for a value of a
tensor, or of a number that varies, lack a fake kernel, or make a tensor of many things: each goes
by torch's own formula, which its source names, where no mode of the user's hears of it.
Scans by a function of the program's are here, too, and launches of its Triton kernels.
"""

from __future__ import annotations

import array
import ast
import functools
import inspect
import itertools
import operator
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusee.capture import calls, symbols
from fusee.capture.attributes import Capturing
from fusee.capture.builtins import BY_NAME, SPECIAL, Stand, stands_for, stands_for_each
from fusee.capture.dynamic import NUMPY, Number, holds_number
from fusee.capture.frame import having
from fusee.capture.graph_break import GraphBreak, associative_scan, combine_of
from fusee.capture.guards import IdMatch
from fusee.capture.policy import inlined
from fusee.capture.symbols import concrete
from fusee.capture.torch_api import (
    FakeTensor,
    generic_scan,
    infer_size,
    no_torch_function,
    pytree,
    shape_as_tensor,
)
from fusee.capture.torch_api import higher_order as operators
from fusee.source import Args, Kwargs
from fusee.torch_functions import training  # noqa: F401
from fusee.torch_functions.arrays import Array, torch_dtype
from fusee.torch_functions.higher_order import effects_of, run_body


def composes(*functions: Any) -> Callable[[Stand], Stand]:
    """`stands_for_each`, where nothing hears which functions are called. What gives None leaves the
    call as it is."""

    def register(stand: Stand) -> Stand:
        def composed(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
            is_heard = m.modes or m.world.seen
            found = None if is_heard else stand(function, m, *args, **kwargs)
            return calls.on_tensors(m, function, args, kwargs) if found is None else found

        stands_for_each(*functions)(composed)
        return stand

    return register


@composes(shape_as_tensor)
def _shape_as_tensor(function: Any, m: Capturing, x: Any) -> Any:
    return m.call(torch.tensor, [*m.attribute(x, "shape")], dtype=torch.int64, device="cpu")


@composes(Tensor.dim_order)
def _dim_order(function: Any, m: Capturing, x: Any, **kwargs: Any) -> Any:
    """Torch does not tell `__torch_function__` of its keyword."""
    return m.recorder.call(function, x, **kwargs)


@composes(infer_size)
def _infer_size(function: Any, m: Capturing, *sizes: Any) -> Any:
    is_known = len(sizes) == 2 and all(isinstance(x, torch.Size) for x in sizes)
    return m.call(torch.broadcast_shapes, *sizes) if is_known else function(*sizes)


@composes(F.one_hot)
def _one_hot(function: Any, m: Capturing, x: Any, num_classes: Any = -1) -> Any:
    if type(num_classes) is int and num_classes == -1 and m.recorder.reads_numbers:
        num_classes = m.call(Tensor.item, m.call(Tensor.max, x)) + 1
    return calls.on_tensors(m, function, (x, num_classes), {})


# torch's own ask for the value of a tensor: whether observations are left after the correction.


@composes(torch.cov, Tensor.cov)
def _cov(function: Any, m: Capturing, x: Any, *, correction: Any = 1, **weights: Any) -> Any:
    is_plain = not weights and type(x) is FakeTensor and x.dtype is not torch.bool
    rows = m.call(Tensor.view, x, (1, -1)) if is_plain and x.dim() < 2 else x
    count = m.attribute(rows, "shape")[1] if is_plain and rows.dim() == 2 else 0
    if not is_plain or not m.truth(count > correction):
        return None
    return m.call(_covariances, rows, count, correction)


@inlined
def _covariances(rows: Tensor, count: Any, correction: Any) -> Tensor:
    """source   aten/src/ATen/native/Correlation.cpp"""
    rest = rows - rows.sum(1, True) / count
    return torch.squeeze(torch.mm(rest, torch.conj(torch.t(rest))) / (count - correction))


@composes(torch.corrcoef, Tensor.corrcoef)
def _corrcoef(function: Any, m: Capturing, x: Any) -> Any:
    if type(x) is not FakeTensor or x.dim() not in (1, 2):
        return None
    return m.call(_correlations, m.call(torch.cov, x))


@inlined
def _correlations(made: Tensor) -> Tensor:
    if not made.dim():
        return made / made
    spread = torch.diagonal(made)
    spread = torch.sqrt(torch.real(spread) if made.is_complex() else spread)
    made = made / torch.unsqueeze(spread, 1) / torch.unsqueeze(spread, 0)
    if not made.is_complex():
        return torch.clip(made, -1, 1)
    return torch.complex(torch.clip(made.real, -1, 1), torch.clip(made.imag, -1, 1))


@composes(torch.kaiser_window)
def _kaiser(
    function: Any, m: Capturing, n: Any, periodic: Any = True, beta: Any = 12.0, **named: Any
) -> Any:
    made = named.get("dtype") or torch.get_default_dtype()
    is_usual = made in (torch.float32, torch.float64) and {*named} <= {"dtype", "device"}
    if not is_usual or type(periodic) is not bool or not m.truth(n > 1):
        return None
    return m.call(_kaiser_window, n, periodic, beta, **{**named, "dtype": made})


@inlined
def _kaiser_window(n: Any, periodic: bool, beta: Any, **given: Any) -> Tensor:
    """source   aten/src/ATen/native/TensorFactories.cpp, kaiser_window, which has no fake kernel"""
    half = (n + periodic - 1) / 2
    at = (torch.arange(n + periodic, **given) - half) / half
    root = torch.sqrt(1 - torch.square(at))
    window = torch.i0(root * beta) / torch.i0(torch.full((), beta, **given))
    return window.narrow(0, 0, n) if periodic else window


# torch takes a number as a parameter there. One that varies is a factor of ones, or a tensor.


_OPEN = Number, torch.SymFloat


def _argument(place: int, name: str, args: Args, kwargs: Kwargs) -> Any:
    """An argument, whichever way it is given; None if it is not."""
    return args[place] if len(args) > place else kwargs.get(name)


def _with(value: Any, place: int, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with another value for that one."""
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


_ONE = {torch.bool: True, torch.complex64: 1 + 0j, torch.complex128: 1 + 0j}
_FILLS = {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2}


@composes(*_FILLS)
def _full(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """source   aten/src/ATen/native/TensorFactories.cpp"""
    given = _FILLS[function], "fill_value", args, kwargs
    value = _argument(*given)
    if type(value) in _OPEN and "out" not in kwargs:
        ones = calls.on_tensors(m, function, *_with(m.kind_of(value)(1), *given))
        if not ones.is_floating_point() or ones.requires_grad:
            return None  # by way of the value
        if type(value) is Number and value.origins and ones.dtype is not torch.float64:
            # that torch does not refuse one from outside as too large is a fact then
            most = torch.finfo(ones.dtype).max
            if not m.truth(m.call(operator.le, m.call(abs, value), most)):
                return None
        return m.call(Tensor.mul_, ones, value)
    if type(value) is FakeTensor and "out" not in kwargs and not kwargs.get("requires_grad"):
        one = _ONE.get(value.dtype, 1.0 if value.is_floating_point() else 1)
        made = calls.on_tensors(m, function, *_with(one, *given))
        if _is_number(value) and torch.promote_types(value.dtype, made.dtype) is made.dtype:
            return m.call(Tensor.fill_, made, value)
    return None


def _is_number(x: Any) -> bool:
    """Whether a tensor is one that torch reads where it takes a number."""
    if type(x) is not FakeTensor:
        return False
    with no_torch_function():
        return not x.dim() and not x.requires_grad


# Functions of lists that take one number for all, or a list of tensors: which argument that is,
# and which is a list anyway.
_OF_LISTS = {torch._foreach_lerp: (2, 0), torch._foreach_lerp_: (2, 0), torch._foreach_pow: (0, 1)}


@composes(*_OF_LISTS)
def _each(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    place, beside = _OF_LISTS[function]
    if kwargs or len(args) <= max(place, beside) or not _is_number(args[place]):
        return None
    every = [*m.items(args[beside])]
    if not all(type(x) is FakeTensor and x.dtype is args[place].dtype for x in every):
        return None
    # of lists, unlike of one tensor, no number of the CPU's meets a GPU's
    numbers = [m.call(Tensor.to, args[place], x.device) for x in every]
    return m.call(function, *args[:place], numbers, *args[place + 1 :])


_METHODS = {"fill_": 1, "masked_fill": 2, "masked_fill_": 2, "index_fill": 3, "index_fill_": 3}
_INTO = {getattr(Tensor, name): place for name, place in _METHODS.items()}
_INTO |= {torch.fill_: 1, torch.masked_fill: 2, torch.index_fill: 3}


@composes(*_INTO)
def _filled(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """source   aten/src/ATen/native/TensorAdvancedIndexing.cpp, which makes a tensor of it too"""
    given = _INTO[function], "value", args, kwargs
    value = _argument(*given)
    x: Any = args[0] if args else None
    if type(value) not in _OPEN or type(x) is not FakeTensor or not x.is_floating_point():
        return None
    if any(type(step) is int and step == 0 for step in x.stride()):
        return None  # of elements that share memory ATen takes numbers alone
    value = m.call(torch.full, (), value, dtype=x.dtype, device=x.device)
    return calls.on_tensors(m, function, *_with(value, *given))


# ---------------------------------------------------------------------------- making
# Tensors that a program makes by a class, `torch.LongTensor([1, 2])`, or of sizes.


_CLASSES = {
    getattr(torch, name): dtype
    for name, dtype in (
        ("Tensor", None), ("FloatTensor", torch.float32), ("DoubleTensor", torch.float64),
        ("HalfTensor", torch.float16), ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8), ("CharTensor", torch.int8), ("ShortTensor", torch.int16),
        ("IntTensor", torch.int32), ("LongTensor", torch.int64), ("BoolTensor", torch.bool),
    )
}  # fmt: skip


@stands_for_each(*_CLASSES)
def _by_class(kind: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """What the class makes: of a sequence, its elements; of sizes, what lies there."""
    first = type(args[0]) if len(args) == 1 else None
    given = {"dtype": _CLASSES[kind] or torch.get_default_dtype(), "device": "cpu"}
    if not kwargs and first is not None and _is_other_sequence(first):
        first, args = list, (_listed(m, args[0]),)
    with having(m, modes=[]):
        if not kwargs and first in (list, tuple):
            items = [x.item() if isinstance(x, NUMPY) else x for x in m.items(args[0])]
            return m.call(torch.tensor, items, **given)
        if not kwargs and (first is torch.Size or all(type(x) is int for x in args)):
            return m.call(torch.empty, *(args or (0,)), **given)
    raise GraphBreak(
        f"torch.{kind.__name__} makes a tensor of something else than numbers or sizes"
    )


def _is_other_sequence(kind: type) -> bool:
    """Whether torch takes the elements of such an object, which is no list or tuple, for data."""
    if issubclass(
        kind, (list, tuple, str, range, memoryview, bytes, bytearray, array.array, Array)
    ):
        return False
    is_sequence = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return is_sequence and not any(hasattr(kind, name) for name in _NO_ELEMENTS)


# Of what has one of these torch asks for other things than elements first: memory, keys, letters.
_NO_ELEMENTS = (
    "__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__", "__buffer__",
    "__torch_function__", "keys", "casefold",
)  # fmt: skip


def _listed(m: Capturing, data: Any, most: int = 16) -> Any:
    """Data of a tensor with lists for deques, for classes with `__getitem__` and the like."""
    is_list = type(data) in (list, tuple)
    if not (is_list and any(_is_other_sequence(type(x)) for x in data)):
        if is_list or not _is_other_sequence(type(data)):
            return data
    return [_listed(m, x, most - 1) for x in m.items(data)] if most else data


def _of_parts(m: Capturing, data: Any, given: Kwargs) -> Any:
    """torch.tensor of a number that varies, or of nested lists with such numbers, or with tensors
    of one number; None of anything else."""
    items, kinds = pytree.tree_leaves(data), {int: torch.int64, float: torch.get_default_dtype()}
    tensors = [x for x in items if type(x) is FakeTensor]
    if not tensors and (m.modes or not (symbols.holds_open(data) or holds_number(data))):
        return None
    dtypes: list[Any] = [
        x.dtype if type(x) is FakeTensor else torch.bool if type(x) is bool
        else kinds.get(m.kind_of(x)) for x in items
    ]  # fmt: skip
    shape, part = [], data
    while isinstance(part, (list, tuple)):
        shape.append(len(part))
        part = part[0] if part else None
    if None in dtypes or not _is_even(data, shape):
        if tensors:
            raise GraphBreak("torch.tensor of a list of more than numbers and tensors of one")
        return None
    dtype = given.get("dtype") or functools.reduce(torch.promote_types, dtypes)
    is_lossy = any(x.is_floating_point() and not dtype.is_floating_point for x in tensors)
    if m.modes or (tensors and m.world.seen) or is_lossy or any(x.dim() for x in tensors):
        raise GraphBreak("a tensor is made of arrays, an integer of a float, or modes hear of it")
    given = {"dtype": dtype, "device": given.get("device") or "cpu"}

    def of_one(x: Any) -> Any:
        if type(x) is FakeTensor:
            return m.call(Tensor.to, m.call(Tensor.detach, x), **given)
        return m.call(torch.full, (), x, **given)

    if not shape:
        return of_one(data)
    stacked = m.call(torch.stack, [*map(of_one, items)])
    return stacked if len(shape) == 1 else m.call(Tensor.reshape, stacked, shape)


def _is_even(data: Any, shape: list[int]) -> bool:
    """Whether a nested list has this shape."""
    if not shape:
        return pytree.tree_is_leaf(data)
    is_row = isinstance(data, (list, tuple)) and len(data) == shape[0]
    return is_row and all(_is_even(x, shape[1:]) for x in data)


_COPIES = {torch.from_numpy: False, torch.as_tensor: False, torch.tensor: True}


@stands_for_each(*_COPIES)
def _from_data(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """torch.tensor and the like."""
    if args and function is not torch.from_numpy:
        args = (_listed(m, args[0]), *args[1:])
    is_usual = len(args) == 1 and function is not torch.from_numpy
    if is_usual and not isinstance(args[0], Array) and {*kwargs} <= {"dtype", "device"}:
        data: Any = args[0]
        if isinstance(data, (list, tuple)):
            data = pytree.tree_map(lambda x: x.tensor if isinstance(x, Array) else x, m.deep(data))
        if type(data) is not FakeTensor and (made := _of_parts(m, data, kwargs)) is not None:
            return made
    if args and isinstance(args[0], NUMPY) and function is not torch.from_numpy and not m.modes:
        dtype = kwargs.get("dtype") or torch_dtype(args[0].dtype)
        if dtype is not None:
            args, kwargs = (args[0].item(), *args[1:]), {**kwargs, "dtype": dtype}
    if not args or not isinstance(args[0], Array):
        return calls.on_tensors(m, function, args, kwargs)
    x, *rest = args
    if rest or {*kwargs} - {"dtype", "device"} or not x.shadow.flags.writeable:  # a scalar's never
        raise GraphBreak(f"torch.{function.__name__} of this {x.kind.__name__}")
    if m.modes and function is not torch.from_numpy:
        raise GraphBreak(f"torch.{function.__name__} of an array within a torch function mode")
    copies = _COPIES[function]
    if not copies and torch.is_inference_mode_enabled():
        raise GraphBreak("a tensor of inference mode that shares an array's memory")
    with having(m, modes=[]):
        given = {"dtype": x.tensor.dtype, **kwargs, "copy": copies}
        plain = m.call(Tensor.detach, x.tensor)
        if not x.shadow.size:  # it has no memory, and NumPy's strides
            strides = [step // x.shadow.itemsize for step in x.shadow.strides]
            plain = m.call(plain.new_empty_strided, [*x.shadow.shape], strides)
        found = m.call(Tensor.to, plain, **given) if copies or kwargs else plain
    if not copies:  # torch may write there
        x.known.clear()
    if found is plain and x.shadow.size:
        m.world.of_arrays[id(found)] = found
    return found


# ------------------------------------------------------------------------------ scans
# associative_scan: one node, where its function goes element by element and nothing is
# differentiated; our backend makes a loop of it (fusee/loops/associative.py), and others trace the
# tree of calls that it runs. Else PyTorch's own tree is captured.

# The same function, which nothing stands for.
_TREE: Any = types.FunctionType(
    generic_scan.__code__, generic_scan.__globals__, argdefs=generic_scan.__defaults__
)


@stands_for(generic_scan)
def _associative_scan(
    m: Capturing, /, operator: Any, leaves: Any, dim: Any = 0, additional_inputs: Any = ()
) -> Any:
    xs, more = m.items(leaves), m.items(additional_inputs)
    combine = None if more or dim != 0 else _combine(m, operator, xs)
    if combine is None:
        return m.call(_TREE, operator, leaves, dim, additional_inputs)
    with torch._C.DisableTorchFunction(), m.world.mode:
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    m.recorder.write(associative_scan, "", (list(xs), combine), {}, results)
    return results


SPECIAL[operators.associative_scan] = lambda m, /, combine_fn, xs, additional_inputs: (
    _associative_scan(m, combine_fn, xs, 0, additional_inputs)
)


def _combine(m: Capturing, operator: Any, xs: Sequence[Any]) -> str | None:
    """The function of a scan as text, if it is one of elements."""
    if m.within or m.modes or m.policy.is_exporting:
        return None
    if not xs or any(type(x) is not FakeTensor for x in xs):
        return None
    with torch._C.DisableTorchFunction():
        first = xs[0]
        if torch.is_autocast_enabled(first.device.type) or not first.dim():
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
            return None
        if any(x.shape != first.shape or x.device != first.device for x in xs):
            return None
        if first.shape[0] < 2:  # they are given back as they are
            return None
    before = effects_of(m)
    try:
        body = run_body(m, "associative_scan", operator, (*xs, *xs), {}, None)
    except GraphBreak:
        if effects_of(m) != before:
            raise
        return None  # it is captured where it is called, or ends the graph there
    with torch._C.DisableTorchFunction():
        if body.outside or any(leaf is not None for leaf in body.leaves):
            return None
        dtypes, rank = [x.dtype for x in xs], first.dim()
    found = combine_of(body.module, dtypes, rank)
    return None if found is None else found.text


# ---------------------------------------------------------------------------- triton
# Kernels that users write in Triton, launched with a grid: one call in the graph.
#
# A launch becomes an operator of torch.library, made once for a kernel, the kinds of its arguments
# and its constants. Its schema says which tensors the kernel writes to; all else follows as for any
# operator of the user's. Triton is not imported: a program that launches its kernels has done so.
#
# Tested with Triton 3.6; used are JITFunction's `fn`, `signature`, `params` and `kernel[grid](..)`.


def written(kernel: Any) -> frozenset[str]:
    """Parameters that lead to what a kernel stores: by its source, all names that flow into one.

    What a function gets that is not Triton's own counts as stored, and so do all parameters of a
    kernel without a source.
    """
    parameters = frozenset(kernel.signature.parameters)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (OSError, SyntaxError):
        return parameters
    if any(isinstance(x, ast.Attribute) and x.attr == "pointer_type" for x in ast.walk(tree)):
        return parameters  # of an address in memory nobody knows whose it is
    nodes = list(ast.walk(tree))
    flows = {name: {name} for name in parameters}

    def leads(*parts: ast.AST | None) -> set[str]:
        names = {x for part in parts if part is not None for x in _names(part)}
        return {p for name in names for p in flows.get(name, ())}

    grown = True
    while grown:
        before = sum(map(len, flows.values()))
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                source = leads(node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                targets, source = [node.target], leads(node.iter)
            else:
                continue
            for target in targets:
                for name in _names(target):
                    flows.setdefault(name, set()).update(source)
        grown = sum(map(len, flows.values())) > before
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return frozenset().union(*[leads(*_stored(call, kernel.fn.__globals__)) for call in calls])


def _names(tree: ast.AST) -> Iterator[str]:
    """Names in an expression, without those that are only loaded from."""
    if isinstance(tree, ast.Name):
        yield tree.id
    elif not (isinstance(tree, ast.Call) and _called(tree).endswith("load")):
        for part in ast.iter_child_nodes(tree):
            yield from _names(part)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


_BUILTIN = frozenset("range min max len abs float int bool print isinstance".split())


def _stored(call: ast.Call, outside: dict[str, Any]) -> list[ast.AST]:
    """What a call may store to."""
    name = _called(call)
    given: list[ast.AST] = [*call.args, *(x.value for x in call.keywords)]
    root: ast.AST = call.func
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    base = outside.get(root.id) if isinstance(root, ast.Name) else None
    module = base.__name__ if inspect.ismodule(base) else getattr(base, "__module__", "") or ""
    is_tritons = module == "triton" or module.startswith("triton.language")
    if isinstance(call.func, ast.Name):
        name = getattr(base, "__name__", name)
    if any(word in name for word in ("store", "atomic", "asm", "extern")):
        return [call.func, *given]
    is_method = isinstance(call.func, ast.Attribute) and base is None
    is_known = is_tritons or is_method or (name in _BUILTIN and base is None)
    return [] if is_known else given


_library: Any = torch.library.Library("fusee_triton", "FRAGMENT")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
_KINDS = {bool: "bool", int: "SymInt", torch.SymInt: "SymInt", float: "float"}


@functools.cache
def _operator(kernel: Any, kinds: tuple[tuple[str, str], ...], fixed: frozenset[Any]) -> Any:
    """An operator that launches a kernel.

    kinds   name and type of each argument that differs from call to call
    fixed   (name, type, value) of the others, and of options
    """
    stores = written(kernel)
    takes = [
        f"Tensor(a{k}!) x{k}" if kind == "Tensor" and name in stores else f"{kind} x{k}"
        for k, (name, kind) in enumerate(kinds)
    ]
    constants = {name: value for name, _, value in fixed}

    def launch(*given: Any) -> None:
        *values, grid = given
        named = zip((name for name, _ in kinds), values, strict=True)
        kernel[tuple(grid)](**constants, **dict(named))

    name = f"{kernel.fn.__name__}_{next(_numbers)}"
    _library.define(f"{name}({', '.join([*takes, 'SymInt[] grid'])}) -> ()")
    _library.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusee_triton::{name}", lambda *given: None, lib=_library)
    return getattr(torch.ops.fusee_triton, name).default


@BY_NAME.rule(("triton.runtime.jit", "JITFunction.run"))
def _launch(
    function: Any, m: Capturing, kernel: Any, /, *args: Any, grid: Any, warmup: Any, **how: Any
) -> None:
    origin = m.world.origin(kernel)
    if warmup is not False or origin is None:
        raise GraphBreak("a Triton kernel is made on the way, or only compiled")
    m.world.fact(IdMatch, origin, kernel)
    names = kernel.signature.parameters
    given = kernel.signature.bind(*args, **{k: x for k, x in how.items() if k in names})
    given.apply_defaults()
    if callable(grid):
        grid = m.call(grid, dict(given.arguments))
    fixed = {name: concrete(x) for name, x in how.items() if name not in names}
    varying, constexprs = {}, {x.name for x in kernel.params if x.is_constexpr}
    for name, x in given.arguments.items():
        if type(x) is FakeTensor:
            if x.requires_grad and torch.is_grad_enabled():
                raise GraphBreak("a Triton kernel reads a tensor that requires grad")
            varying[name] = x, "Tensor"
        elif type(x) in _KINDS and name not in constexprs:
            varying[name] = x, _KINDS[type(x)]
        else:
            fixed[name] = concrete(x)
    try:
        kinds = tuple((name, kind) for name, (_, kind) in varying.items())
        op = _operator(kernel, kinds, frozenset((k, type(x), x) for k, x in fixed.items()))
    except TypeError:  # not hashable
        raise GraphBreak("a Triton kernel takes what is no tensor, number or constant") from None
    sizes = list(grid) if isinstance(grid, (tuple, list)) else [grid]
    m.recorder.call(op, *(x for x, _ in varying.values()), sizes)
