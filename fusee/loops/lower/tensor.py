"""Lazy tensors, and how they become buffers written by loops.

    stored    a strided window on a buffer
    view      another tensor behind an index map; stored once its base is, if strides can say it
    computed  a closure from an index to a scalar Value
    pieces    several tensors side by side along one dimension (cat, roll, slice_scatter)

Nothing is written before `Lowering.realise` is asked to. An index is one Size per dimension; in
dimensions of size 1 it is 0 and there is no axis.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, Union

import torch
from torch._ops import OpOverload

from fusee.loops import (
    Acc,
    Buffer,
    Extern,
    Loop,
    LoopGraph,
    Message,
    Profile,
    Role,
    Value,
    Values,
    View,
    cast,
    contiguous,
    joined,
    literal,
    walk,
)
from fusee.loops.operators import named
from fusee.source import Args, Kwargs
from fusee.sym import Expr, Size, Symbol, coefficient, hint, product

# ---------------------------------------------------------------------------- strides
# Strides of tensors, in elements: which order of dimensions they mean.

Shape = tuple[Size, ...]


def dense(shape: Sequence[Size], order: Sequence[int]) -> tuple[Size, ...]:
    """Strides without holes, dimension order[0] being the widest."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * (shape[dim] if shape[dim] != 0 else 1)
    return tuple(strides)


def same_strides(shape: Shape, a: Sequence[Size], b: Sequence[Size]) -> bool:
    """True if both place elements alike; strides of dimensions of size 1 say nothing."""
    return all(size == 1 or x == y for size, x, y in zip(shape, a, b, strict=True))


def copied(x: torch.Tensor, size: Sequence[int] = (), stride: Sequence[int] = ()) -> torch.Tensor:
    """A copy with that layout, conjugated and negated when it is read if `x` is."""
    is_conj, is_neg = x.is_conj(), x.is_neg()
    x = x.conj() if is_conj else x
    x = torch._neg_view(x) if is_neg else x
    made = x.new_empty_strided(size or x.shape, stride or x.stride()).copy_(x)
    made = torch._neg_view(made) if is_neg else made
    return made.conj() if is_conj else made


def stride_order(shape: Shape, strides: Sequence[Size]) -> list[int]:
    """Dimensions from the widest stride to the narrowest."""
    return sorted(range(len(shape)), key=lambda k: (-hint(strides[k]), k))


def dense_like(shape: Shape, strides: tuple[Size, ...]) -> tuple[Size, ...]:
    """`strides` if they have no holes and no overlap, else dense ones of the same order."""
    return strides if strides == contiguous(shape) else dense(shape, stride_order(shape, strides))


def axis_strides(index: Size, axes: dict[int, Symbol]) -> dict[int, int] | None:
    """Each axis's stride in a flat index, at its hint; None unless all of them move it linearly."""
    if isinstance(index, int):
        return None
    strides: dict[int, int] = {}
    for k, axis in axes.items():
        coef: Any = index.terms.get((axis,))
        if coef is None:
            parts = coefficient(index, axis)
            if parts is None or parts[0] == 0:
                return None
            coef = hint(parts[0])
        strides[k] = abs(coef)
    return strides


# ---------------------------------------------------------------------------- tensor


Index = tuple[Size, ...]

# Closures call each other: deeper chains are cut by realising. So are larger trees: what becomes
# one loop must stay as small as compiles well.
MAX_DEPTH, MAX_WEIGHT = 40, 128


class Strided(NamedTuple):
    """Where a tensor's elements lie: offset + sum(index * strides), in elements."""

    buffer: Buffer
    strides: tuple[Size, ...]
    offset: Size


class Meta(NamedTuple):
    """What eager would return: the truth about shape, dtype and strides."""

    shape: Shape
    dtype: torch.dtype
    strides: tuple[Size, ...]


class Pieces(NamedTuple):
    """Tensors side by side along `dim`; piece k begins at starts[k]."""

    dim: int
    starts: tuple[Size, ...]
    tensors: tuple[Tensor, ...]


class Tensor:
    """A tensor that may not exist in memory. Made by Lowering's methods only."""

    __slots__ = (
        "_at",
        "_index",
        "_reads",
        "_storage",
        "_value",
        "base",
        "copies",
        "depth",
        "dtype",
        "index_map",
        "lowering",
        "operands",
        "origin",
        "pieces",
        "recipe",
        "shape",
        "strides",
        "weight",
    )

    def __init__(self, lowering: Lowering, shape: Shape, dtype: torch.dtype) -> None:
        self.lowering = lowering
        self.shape = shape
        self.dtype = dtype
        self.strides: tuple[Size, ...] | None = None  # eager's; None: contiguous
        self._storage: Strided | None = None
        self._at: Callable[[Index], Value] | None = None
        self.base: Tensor | None = None
        self.index_map: Callable[[Index], Index] | None = None
        self.recipe: Callable[[Strided], Strided | None] | None = None
        self.pieces: Pieces | None = None
        self.operands: tuple[Tensor, ...] = ()
        self.origin = ""
        self.depth = self.weight = 0  # of the tensors behind it: how long a chain, how many
        self.copies: dict[tuple[Size, ...], Strided] | None = None
        self._reads: frozenset[Buffer] | None = None
        self._index: Index | None = None
        self._value: Value | None = None

    @property
    def storage(self) -> Strided | None:
        """Where it lies in memory, if it does."""
        if self._storage is None and self.base is not None and self.recipe is not None:
            below = self.base.storage
            if below is not None:
                self._storage = self.recipe(below)
                if self._storage is None:
                    self.recipe = None
        return self._storage

    def at(self, index: Index) -> Value:
        """The element at `index`, of this tensor's dtype."""
        if self.base is not None:
            return self._read(index)  # not from before what it is a view of came to memory
        if self._value is not None and self._index == index:
            return self._value
        value = self._read(index)
        self._index, self._value = index, value
        return value

    def _read(self, index: Index) -> Value:
        storage = self.storage
        if storage is not None:
            return self.lowering.load(storage, index)
        if self.base is not None:
            assert self.index_map is not None
            return self.base.at(self.index_map(index))
        if self._at is not None:
            return self._at(index)
        return self.lowering.load(self.lowering.realise(self), index)

    def store(self, storage: Strided) -> None:
        """From now on the elements are read from `storage`."""
        self._storage = storage
        self._at = self.base = self.index_map = self.recipe = self.pieces = None
        self.operands = ()
        self.depth = self.weight = 0
        self._index = self._value = None

    def reads(self) -> frozenset[Buffer]:
        """The buffers that computing an element reads, at most."""
        storage = self.storage
        if storage is not None:
            return frozenset((storage.buffer,))
        if self.base is not None:
            return self.base.reads()
        if self._reads is None:
            self._reads = frozenset().union(*(tensor.reads() for tensor in self.operands))
        return self._reads

    def origins(self) -> str:
        """Where what is computed with it comes from: it and the lazy tensors that it reads."""
        found: list[str] = []
        seen: set[Tensor] = set()
        pending = [self]
        while pending:
            part = pending.pop()
            if part in seen or (part.storage is not None and part is not self):
                continue
            seen.add(part)
            found += [part.origin] if part.origin else []
            pending += (*part.operands, *([] if part.base is None else [part.base]))
        return joined(found[::-1])

    @property
    def eager_strides(self) -> tuple[Size, ...]:
        return contiguous(self.shape) if self.strides is None else self.strides


# What handlers get for an argument of the graph.
Number = Union[int, float, bool, Expr, Value]


class Lowering:
    """The LoopGraph in the making and the tables that make equal things identical."""

    def __init__(self, profile: Profile) -> None:
        self.values = Values(profile)
        self.graph = LoopGraph(self.values, [])
        self.origin = ""
        self._axes: dict[Shape, Index] = {}
        self._symbols: dict[tuple[str, Size], Symbol] = {}
        self._offsets: dict[tuple[Index, tuple[Size, ...], Size], Size] = {}
        self._loads: dict[Value, tuple[Value, ...]] = {}
        self.demands: list[tuple[int, Loop]] = []  # and before which step: pointwise.py
        self._count = 0

    # -------------------------------------------------------------------------- making tensors

    def stored(self, storage: Strided, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        tensor = Tensor(self, shape, dtype or storage.buffer.dtype)
        tensor._storage = storage
        return tensor

    def whole(self, buffer: Buffer) -> Tensor:
        return self.stored(Strided(buffer, buffer.strides, buffer.offset), buffer.shape)

    def computed(
        self,
        shape: Shape,
        dtype: torch.dtype,
        at: Callable[[Index], Value],
        operands: Sequence[Tensor] = (),
        strides: tuple[Size, ...] | None = None,
    ) -> Tensor:
        """`operands` are the tensors that `at` reads."""
        tensor = Tensor(self, shape, dtype)
        tensor._at, tensor.operands, tensor.strides = at, tuple(operands), strides
        return self._bounded(tensor, operands, sum(t.weight for t in operands))

    def filled(self, shape: Shape, number: Number, dtype: torch.dtype) -> Tensor:
        value = self.number(number, dtype)
        return self.computed(shape, dtype, lambda ix: value)

    def view(
        self,
        base: Tensor,
        shape: Shape,
        index_map: Callable[[Index], Index],
        recipe: Callable[[Strided], Strided | None] | None,
    ) -> Tensor:
        """`recipe` gives the view's place from the base's, or None where strides can't say it."""
        tensor = Tensor(self, shape, base.dtype)
        tensor.base, tensor.index_map, tensor.recipe = base, index_map, recipe
        return tensor if tensor.storage else self._bounded(tensor, (base,), base.weight)

    def beside(self, shape: Shape, dtype: torch.dtype, pieces: Pieces) -> Tensor:
        tensor = Tensor(self, shape, dtype)
        tensor.pieces, tensor.operands = pieces, pieces.tensors
        return self._bounded(tensor, pieces.tensors, max(t.weight for t in pieces.tensors))

    def _bounded(self, tensor: Tensor, operands: Sequence[Tensor], weight: int) -> Tensor:
        """The tensor with how much is behind it; realised if that is too much."""
        tensor.depth = 1 + max((t.depth for t in operands), default=0)
        tensor.weight = 1 + weight
        if tensor.depth > MAX_DEPTH or tensor.weight > MAX_WEIGHT:
            self.realise(tensor)
        return tensor

    # -------------------------------------------------------------------------- indices

    def axis(self, name: str, size: Size) -> Symbol:
        """The axis variable of that name and size; always the same object."""
        found = self._symbols.get((name, size))
        if found is None:
            expected = None if isinstance(size, int) else hint(size)
            found = self._symbols[name, size] = Symbol(name, 0, size, expected)
        return found

    def axes(self, shape: Shape) -> Index:
        """The index of the general element: axis variables i0, i1, ..."""
        found = self._axes.get(shape)
        if found is None:
            found = self._axes[shape] = tuple(
                0 if size == 1 else self.axis(f"i{k}", size).expr for k, size in enumerate(shape)
            )
        return found

    def axes_of(self, shape: Shape) -> dict[int, Symbol]:
        """The axis variable of each dimension that has one."""
        return {k: self.axis(f"i{k}", size) for k, size in enumerate(shape) if size != 1}

    def axis_symbols(self, shape: Shape) -> tuple[Symbol, ...]:
        return (*self.axes_of(shape).values(),)

    def load(self, storage: Strided, index: Index) -> Value:
        return self.values.load(storage.buffer, self.offset(storage, index))

    def offset(self, storage: Strided, index: Index) -> Size:
        """The flat position of an element."""
        key = (index, storage.strides, storage.offset)
        total = self._offsets.get(key)
        if total is None:
            total = storage.offset
            for i, stride in zip(index, storage.strides, strict=True):
                total = total + i * stride
            self._offsets[key] = total
        return total

    def message(self, kind: type[Exception], text: str, size: Size = 0) -> int:
        """The number under which `check` reports this exception."""
        origin = "" if self.values.profile.raises else self.origin
        message = Message(kind, text, origin, size)
        if message not in self.graph.messages:
            self.graph.messages.append(message)
        return self.graph.messages.index(message)

    # -------------------------------------------------------------------------- numbers

    def number(self, x: Number, dtype: torch.dtype) -> Value:
        """A scalar argument as a value."""
        if isinstance(x, Value):
            return cast(x, dtype)
        if isinstance(x, Expr):
            return self.values.index(x, dtype)
        return self.values.const(literal(x, dtype), dtype)

    # -------------------------------------------------------------------------- realising

    def buffer(
        self,
        shape: Shape,
        dtype: torch.dtype,
        strides: tuple[Size, ...] | None = None,
        role: Role = "scratch",
    ) -> Buffer:
        self._count += 1
        strides = contiguous(shape) if strides is None else strides
        return Buffer(f"b{self._count}", dtype, shape, strides, role)

    def emit(self, loop: Loop, origin: str = "") -> None:
        """Append a loop, unless a static size says that it has no points."""
        every = loop.all_axes
        assert len({*every}) == len(every), f"an axis twice in {loop}"
        if all(axis.hi != 0 for axis in loop.axes):
            loop.origin, loop.late = origin or self.origin, self.graph.late
            self.graph.steps.append(loop)

    def looped(
        self,
        value: Value,
        dtype: torch.dtype,
        shape: Shape,
        strides: tuple[Size, ...],
        reduced: Sequence[Symbol],
        *rest: Any,
    ) -> Tensor:
        """A tensor that one loop computes. `rest`: the Loop's fields from `acc` on."""
        buffer = self.buffer(shape, dtype, strides)
        index, axes = buffer.index(self.axes(shape)), self.axis_symbols(shape)
        self.emit(Loop(buffer, axes, index, value, tuple(reduced), *rest))
        return self.whole(buffer)

    def call(
        self,
        name: str,
        call: Callable[..., Any],
        args: Args,
        results: tuple[Buffer | None, ...],
        reason: str,
        **more: Any,
    ) -> None:
        """Append an Extern; `more` of its fields."""
        kwargs, origin = more.pop("kwargs", {}), self.origin
        step = Extern(name, call, args, kwargs, results, reason=reason, origin=origin, **more)
        self.graph.steps.append(step)

    def realise(self, tensor: Tensor, want: tuple[Size, ...] | None = None) -> Strided:
        """Make `tensor` exist in memory: with the strides `want`, if given."""
        storage = tensor.storage
        if storage is None:
            storage = self._write(tensor, want)
        if want is None or same_strides(tensor.shape, storage.strides, want):
            return storage
        if tensor.copies is None:
            tensor.copies = {}
        if want not in tensor.copies:
            tensor.copies[want] = self.copy(tensor, want)
        return tensor.copies[want]

    def copy(self, tensor: Tensor, strides: tuple[Size, ...]) -> Strided:
        """A new buffer with the elements of `tensor`."""
        buffer = self.buffer(tensor.shape, tensor.dtype, strides)
        self.write_into(tensor, Strided(buffer, strides, 0))
        return Strided(buffer, strides, 0)

    def _write(self, tensor: Tensor, want: tuple[Size, ...] | None) -> Strided:
        base = tensor.base
        if base is not None and base.storage is None and tensor.recipe is not None:
            # a mere rearrangement: the base in memory serves both
            if product(base.shape) == product(tensor.shape):
                if want is None:
                    self.realise(base)
                else:  # it may have these strides once its base is written with eager's
                    model = Buffer("", base.dtype, base.shape, base.eager_strides, "scratch")
                    found = tensor.recipe(Strided(model, base.eager_strides, 0))
                    if found is not None and same_strides(tensor.shape, found.strides, want):
                        self.realise(base, base.eager_strides)
                if tensor.storage is not None:
                    return tensor.storage
        strides = self.choose_strides(tensor) if want is None else want
        buffer = self.buffer(tensor.shape, tensor.dtype, strides)
        storage = Strided(buffer, strides, 0)
        self.write_into(tensor, storage)
        tensor.store(storage)
        return storage

    def write_into(self, tensor: Tensor, target: Strided) -> None:
        """Store every element of `tensor` at its place in `target`."""
        for part, place in self.parts(tensor, target):
            index = self.axes(part.shape)
            value, axes = part.at(index), self.axis_symbols(part.shape)
            self.emit(Loop(place.buffer, axes, self.offset(place, index), value), part.origins())

    def parts(self, tensor: Tensor, target: Strided) -> Iterator[tuple[Tensor, Strided]]:
        """What is stored by a loop each to put `tensor` into `target`, and where."""
        pieces = tensor.pieces
        if pieces is None or tensor.storage is not None:
            yield tensor, target
            return
        for start, piece in zip(pieces.starts, pieces.tensors, strict=True):
            offset = target.offset + start * target.strides[pieces.dim]
            yield from self.parts(piece, Strided(target.buffer, target.strides, offset))

    # -------------------------------------------------------------------------- layout and cost

    def choose_strides(self, tensor: Tensor) -> tuple[Size, ...]:
        """The order of dimensions in which most of what is read lies; else eager's."""
        shape = tensor.shape
        eager = tensor.eager_strides
        if sum(size != 1 for size in shape) < 2:
            return dense_like(shape, eager)
        part = tensor
        while part.storage is None and part.pieces is not None:
            part = part.pieces.tensors[0]
        return self.like_loads(part.at(self.axes(part.shape)), part.shape, eager, shape)

    def like_loads(
        self, value: Value, shape: Shape, eager: tuple[Size, ...], whole: Shape | None = None
    ) -> tuple[Size, ...]:
        """Strides in the order of what `value` loads; else in eager's.

        whole   the shape that they are for, if that of the value is one of its pieces
        """
        whole = shape if whole is None else whole
        votes: dict[tuple[int, ...], int] = {}
        axes = self.axes_of(shape)
        for load in self.loads(value):
            strides = axis_strides(load.attr[1], axes)
            if strides is not None:
                order = tuple(sorted(strides, key=lambda k: -strides[k]))
                votes[order] = votes.get(order, 0) + load.dtype.itemsize
        by_eager = stride_order(shape, eager)
        best = max(votes, key=lambda order: votes[order], default=())
        if not votes or [k for k in by_eager if k in axes] == list(best):
            return dense_like(whole, eager)
        rest = iter(best)
        return dense(whole, [next(rest) if k in axes else k for k in by_eager])

    def loads(self, value: Value) -> tuple[Value, ...]:
        """Every load below `value`."""
        found = self._loads.get(value)
        if found is None:
            found = tuple([v for v in walk([value]) if v.op == "load"])
            self._loads[value] = found
        return found

    def is_heavy(self, tensor: Tensor, by_loads: bool = True) -> bool:
        """True if computing an element twice costs more than storing and loading it.

        by_loads   also for what it loads, not only for the additions that it takes
        """
        if tensor.storage is not None or any(size == 0 for size in tensor.shape):
            return False
        if tensor.pieces is not None:
            return any(self.is_heavy(piece, by_loads) for piece in tensor.pieces.tensors)
        value = tensor.at(self.axes(tensor.shape))
        if value.cost > self.values.profile.heavy or not by_loads:
            return value.cost > self.values.profile.heavy
        axes = self.axes_of(tensor.shape)
        full = [v for v in self.loads(value) if axis_strides(v.attr[1], axes) is not None]
        return len(full) > 1 and bool(axes)

    def settle(self, tensor: Tensor, uses: int) -> None:
        """Realise a tensor that is costly to compute as often as it will be used."""
        if tensor.storage is not None or tensor.base is not None:
            return
        is_wide = tensor.pieces is None and len(tensor.operands) > 1
        is_wide = is_wide and len(tensor.reads()) > self.values.profile.reads
        if is_wide or (uses > 1 and self.is_heavy(tensor)):
            self.realise(tensor)

    # -------------------------------------------------------------------------- whole tensors

    def window(self, tensor: Tensor, want: tuple[Size, ...] | None = None) -> View:
        """The tensor as an argument of an Extern."""
        storage = self.realise(tensor, want)
        return View(storage.buffer, tensor.shape, storage.strides, storage.offset)

    def accumulator(self, op: str, dtype: torch.dtype) -> Acc:
        self._count += 1
        return Acc(f"a{self._count}", op, dtype)


# ---------------------------------------------------------------------------- table
# Which ATen ops are lowered, by what, and why the others are not.
#
#     @lowers("add.Tensor relu")    a function from the call's arguments to lazy tensors
#     calls(reason, "mm bmm")       known ops that stay calls to ATen
# Pointwise ops are rows of fusee/loops/operators.py.

# What the vocabulary computes with. Tensors of other dtypes go to ATen.
DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    }
)


@dataclass
class OpCall:
    """One node of the graph, as its lowering sees it."""

    lowering: Lowering
    op: OpOverload
    metas: tuple[Meta, ...]  # of its results
    used: tuple[bool, ...]  # which results anyone uses
    # eager's strides and storage offset of the tensor that is the argument of a position
    layout_of: Callable[[int], tuple[tuple[Size, ...], Size]]
    call_of: Callable[[OpOverload], Any]  # how to call an op on whole tensors: an ExternSpec
    overwrites: bool = False  # argument 0 is an input, which the result replaces: store in place

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    def computed(self, at: Callable[[Index], Value], *operands: Tensor) -> Tensor:
        """The first result, element by element, in eager's layout; `operands` are what is read."""
        meta = self.metas[0]
        return self.lowering.computed(meta.shape, meta.dtype, at, operands, meta.strides)


class NotLowered(Exception):
    """Why a call is ATen's though its op has a lowering, which raises this before all else."""


Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)

HANDLERS: dict[OpOverload, Handler] = {}
REASONS: dict[OpOverload, str] = {}


def lowers(names: str | Iterable[OpOverload]) -> Callable[[H], H]:
    """Register `handler(call, *args, **kwargs)` for overloads."""

    def register(handler: H) -> H:
        HANDLERS.update(dict.fromkeys(named(names) if isinstance(names, str) else names, handler))
        return handler

    return register


def calls(reason: str, names: str) -> None:
    """These ops stay calls to ATen, for that reason."""
    REASONS.update(dict.fromkeys(named(names), reason))


@functools.cache
def _declared(
    function: Handler, op: OpOverload
) -> tuple[list[tuple[str, Any]], list[tuple[str, int, Any]]]:
    """The arguments of an op that a function takes: (name, default) of those by position, and
    (name, position, default) of those by name."""
    arguments = op._schema.arguments
    defaults = [x.default_value if x.has_default_value() else None for x in arguments]
    names = [x.name for x in arguments]
    count = sum(not x.kwarg_only for x in arguments)
    code = function.__code__
    last = count if code.co_flags & inspect.CO_VARARGS else min(count, code.co_argcount - 1)
    by_name = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        by_name = tuple(names[count:])
    places = [names.index(name) for name in by_name if name in names]
    return (
        list(zip(names[:last], defaults)),
        [(names[k], k if k < count else len(names), defaults[k]) for k in places],
    )


def bound(function: Handler, call: OpCall, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """function(call, ...) with what it declares of the call's arguments, defaults filled in.

    Its positional parameters are the first ones of the schema, whatever they are called; those
    behind `*` go by the schema's names.
    """
    by_place, by_name = _declared(function, call.op)
    given = list(args[: len(by_place)])
    given += [kwargs.get(name, default) for name, default in by_place[len(given) :]]
    named = {
        name: args[place] if place < len(args) else kwargs.get(name, default)
        for name, place, default in by_name
    }
    return function(call, *given, **named)
