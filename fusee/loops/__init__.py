"""The loop IR.

    LoopGraph ::= inputs, steps, outputs          what lowering makes of one ATen graph
    Step      ::= Loop | Extern
    Loop      ::= for axes: for reduce_axes: buffer[index] op= value
    Extern    ::= results = op(arguments)         an ATen call on whole tensors

    Kernel    ::= for outer: Phase...             what fusion makes of one or more Loops
    Phase     ::= for inner: Statement...
    Statement ::= Store(buffer, index, value, mode) | Accumulate(acc, value)

    Value     ::= op(Value...) of the vocabulary below, hash-consed in one Values table

A Kernel's outer axes are free of dependences and may run in parallel, in any order. For one point
of them its phases run one after another; accumulators start at their identity when their phase
starts and hold their result afterwards: a later phase reads it as Value `acc`. A phase that reads
an accumulator of its own body is a scan: its innermost axis runs in order, and `acc` is the running
value including the present element, `carry` the one before it. All indices are flat element
offsets into a buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Union

import torch
from torch import fx

from fusee.errors import user_frame
from fusee.source import Args, Kwargs
from fusee.sym import Expr, Size, Symbol, substitute, symbols

# ---------------------------------------------------------------------------- scalar
# The scalar vocabulary: every element-wise operation that a target must be able to emit.
#
# A row says how many operands an op takes, on which kinds of dtype it works and what it returns.
# Kinds: f float32/float64, i signed and unsigned integers, b bool. There are no float16 or bfloat16
# operations: lowering computes in float32 and rounds with `cast`, as ATen's CPU kernels do. `heavy`
# is the rough cost in units of one addition; fusion weighs recomputation with it.
#
# The vocabulary lives with the loops and not with code generation, since lowering writes it, fusion
# weighs it and every target reads it.


class ScalarOp(NamedTuple):
    """One row of the vocabulary. `result`: "same" as the operands, or a dtype's name."""

    name: str
    arity: int
    kinds: str
    result: str = "same"
    heavy: int = 1


def _rows(
    names: str, arity: int, kinds: str, result: str = "same", heavy: int = 1
) -> list[ScalarOp]:
    return [ScalarOp(name, arity, kinds, result, heavy) for name in names.split()]


SCALAR_OPS: dict[str, ScalarOp] = {
    row.name: row
    for row in [
        # IEEE arithmetic; integers wrap. minimum and maximum return NaN if either operand is.
        *_rows("add sub mul minimum maximum", 2, "fi"),
        *_rows("div", 2, "f", heavy=4),
        # Integer division: "floordiv" and "remainder" round to minus infinity, "truncdiv" to zero.
        # By zero: any value for integers (lowering never emits it unguarded), IEEE for floats.
        *_rows("floordiv truncdiv remainder", 2, "i", heavy=12),
        *_rows("fmod", 2, "fi", heavy=12),
        *_rows("neg abs", 1, "fi"),
        *_rows("eq ne lt le gt ge", 2, "fib", result="bool"),
        *_rows("and or xor", 2, "ib"),
        *_rows("not", 1, "ib"),
        *_rows("shl shr", 2, "i"),  # shr is arithmetic for signed, logical for unsigned
        *_rows("isnan isinf signbit", 1, "f", result="bool"),
        *_rows("floor ceil trunc round", 1, "f"),  # round: half to even
        *_rows("copysign", 2, "f"),
        *_rows("sqrt", 1, "f", heavy=4),
        *_rows("rsqrt", 1, "f", heavy=6),  # 1/sqrt(x), correctly rounded twice
        *_rows("fma", 3, "f"),
        *_rows("exp exp2 expm1 log log2 log10 log1p", 1, "f", heavy=12),
        *_rows("sin cos tan asin acos atan", 1, "f", heavy=16),
        *_rows("sinh cosh tanh asinh acosh atanh", 1, "f", heavy=16),
        *_rows("erf erfc lgamma", 1, "f", heavy=20),
        *_rows("pow atan2 hypot nextafter", 2, "f", heavy=24),
    ]
}

# Ops with a payload or operands of different dtypes; the emitters treat each by name.
#   const   attr: the Python number                     no operands
#   index   attr: a Size over axis variables            no operands; dtype int64
#   load    attr: (Buffer, flat element index: Size)    operands: () or (mask, other)
#   acc     attr: Acc                                   no operands
#   carry   attr: Acc, a fold: what it was before the present element, at the first one anything
#   cast    operand x -> dtype. Float to integer truncates; out of range as the CPU; bool: x != 0;
#           to bfloat16/float16: round to nearest even
#   bitcast operand x -> dtype of equal width
#   where   operands (bool, x, y)
#   check   attr: (size, message index, wraps)   operand int64 x: reports what is outside of
#           [0, size), or where it wraps negatives of [-size, size)
SPECIAL_OPS = frozenset("const index load acc carry cast bitcast where check".split())

# Reductions: what an accumulator may do. The identity is derived from the accumulator's dtype.
#   argmax/argmin accumulate a value beside its index (Accumulate.index) and yield the int64 index:
#   the first one among equals; NaN wins over all.
# Of scans there is one more, "fold": it becomes the value, which is made of what is carried.
REDUCTIONS: dict[str, str] = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
    "min": "minimum",
    "any": "or",
    "all": "and",
    "xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
}


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing when accumulated with `op` in `dtype`."""
    if op in ("sum", "any", "xor", "fold"):
        return False if dtype is torch.bool else 0
    if op in ("prod", "all"):
        return True if dtype is torch.bool else 1
    lowest = op in ("max", "argmax")
    if dtype is torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return float("-inf") if lowest else float("inf")
    info = torch.iinfo(dtype)
    return int(info.min if lowest else info.max)


# ---------------------------------------------------------------------------- profile


class Profile(NamedTuple):
    """What a machine is good at, as far as loops are concerned. PLAIN: one thread, no vectors.

    Costs are in additions, sizes in elements.

    parallel   points of outer axes that keep all threads busy; less work than `small` is left alone
    lanes      about how much faster vectors are than one element at a time
    wide       elements of the widest vector; shorter axes fill it badly
    members    loops, and
    values     values in a body, beyond which a kernel is not faster and takes long to compile
    reads      buffers that one loop may read: pointers and streams are finite
    heavy      a value that is used again and again, and costs more, is computed once
    costly     a value that costs more had better be computed as vectors
    again      what is computed again in a later phase rather than loaded from the nearest cache
    reloaded   the same where the value is stored anyway: one load replaces it
    gather     a load at an address that is itself data
    run        elements in one piece from which it does not matter where the next piece lies
    many       more elements than these are reduced to few results in chunks of about `chunk`
    strip      sums down columns read rows in pieces of at most so many elements; where that leaves
    rows       few pieces, rows are summed up in at least so many chunks first
    shares     threads by the thousand share what one point reduces: chunks are not needed, and one
               pass over its elements is all that a kernel of few points may take
    kept       a row of at most so many elements stays in registers from one pass to the next
    gathers    copies of inputs, such as weights in another layout, of so many bytes together
    pairs      sums that have equal axes and read one row are one kernel: a launch takes as long
    raises     ATen raises for an integer divided by zero, and calls for bad indices; else the one's
               result is undefined, and the other is known later
    """

    parallel: int = 1
    small: int = 1 << 15
    lanes: int = 1
    wide: int = 1
    members: int = 48
    values: int = 256
    reads: int = 8
    heavy: int = 10
    costly: int = 10
    again: int = 8
    reloaded: int = 2
    gather: int = 1
    run: int = 32
    many: int = 1 << 16
    chunk: int = 1 << 12
    strip: int = 1 << 10
    rows: int = 8
    shares: bool = False
    kept: int = 0
    gathers: int = 0
    pairs: bool = False
    raises: bool = True


PLAIN = Profile()


# ------------------------------------------------------------------------------ buffers

# input: the caller's. derived: computed from parameters and kept. constant: the graph's.
# scratch: lives in the arena. result: freshly allocated, returned to the caller.
# large: freshly allocated, given back after its last reader.
# extern: allocated by the Extern step that returns it.
Role = Literal["input", "derived", "constant", "scratch", "large", "result", "extern"]


def contiguous(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Row-major strides. Dimensions of size 0 count as 1, as in torch."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if size != 0 else 1)
    return tuple(reversed(strides))


@dataclass(eq=False)
class Buffer:
    """Memory with a strided layout. `size` counts elements from the first to past the last."""

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    role: Role
    offset: Size = 0  # of element (0, .., 0); nonzero only for inputs that are views
    bounded: bool = True  # False: as_strided looks at the caller's memory around it

    def index(self, at: Sequence[Size]) -> Size:
        """The flat offset of the element at `at`."""
        total: Size = self.offset
        for i, stride in zip(at, self.strides, strict=True):
            total = total + i * stride
        return total

    @property
    def size(self) -> Size:
        if 0 in self.shape:
            return 0  # whatever the strides are
        total: Size = 1
        for n, stride in zip(self.shape, self.strides, strict=True):
            total = total + (n - 1) * stride
        return total

    def __repr__(self) -> str:
        return self.name


# ------------------------------------------------------------------------------ values


Infix = Callable[["Value", Any], "Value"]


def _infix(name: str) -> tuple[Infix, Infix]:
    """An operator of Python and its reflected form."""
    return lambda x, y: op(name, x, y), lambda x, y: op(name, y, x)


class Value:
    """One scalar per point of the axes. Made only by a Values table: equal means identical."""

    __slots__ = ("args", "attr", "cost", "dtype", "op", "operands", "order", "table")
    table: Values
    op: str
    args: tuple[Value, ...]
    dtype: torch.dtype
    attr: Any
    cost: int  # additions that computing it takes, shared parts counted each time
    operands: tuple[Value, ...]  # args, and the values inside its index expressions
    order: tuple[Value, ...]  # of `walk`, once that was asked for; until then empty

    # Python's operators are those of the vocabulary; a number is a literal of the other's dtype.
    # Equality stays identity.
    __add__, __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub")
    __mul__, __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div")
    __and__, _ = _infix("and")
    __or__, _ = _infix("or")
    __lt__, _ = _infix("lt")
    __le__, _ = _infix("le")
    __gt__, _ = _infix("gt")
    __ge__, _ = _infix("ge")

    def __neg__(self) -> Value:
        return op("neg", self)

    def __invert__(self) -> Value:
        return op("not", self)

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(arg.op for arg in self.args)})"


# Shared parts count each time, so a cost may double with each operation; no decision needs more.
MOST = 1 << 30


class Values:
    """The table that makes equal values identical. One per LoopGraph."""

    def __init__(self, profile: Profile = PLAIN) -> None:
        self.profile = profile
        self._known: dict[tuple[object, ...], Value] = {}
        self.forms: dict[Hashable, tuple[Kernel, tuple[Any, ...]]] = {}  # see `ordered_once`

    def make(
        self, op: str, args: tuple[Value, ...], dtype: torch.dtype, attr: object = None
    ) -> Value:
        # repr tells -0.0 from 0.0 and makes NaN equal to itself
        mark = (repr(attr), type(attr)) if op == "const" else attr
        key = (op, dtype, mark, *args)
        found = self._known.get(key)
        if found is None:
            found = Value()
            found.table, found.op, found.args = self, op, args
            found.dtype, found.attr = dtype, attr
            row = SCALAR_OPS.get(op)
            own = row.heavy if row else int(op not in ("const", "index", "acc", "carry"))
            found.cost = min(own + sum(arg.cost for arg in args), MOST)
            found.operands, found.order = args, ()
            if op in ("load", "index"):
                hidden = payloads(index_of(found))
                found.operands += tuple(hidden)
                found.cost += self.profile.gather * len(hidden)
            self._known[key] = found
        return found

    def const(self, number: complex | float | int | bool, dtype: torch.dtype) -> Value:
        """A literal. Of bfloat16 or float16: rounded to it."""
        if dtype is torch.bool:
            number = bool(number)
        elif dtype.is_floating_point:
            number = float(number)  # type: ignore[arg-type]
        else:
            number = int(number)  # type: ignore[arg-type]
        return self.make("const", (), dtype, number)

    def index(self, size: Size, dtype: torch.dtype = torch.int64) -> Value:
        """An index expression as a number."""
        if isinstance(size, int):
            return self.const(size, dtype)
        value = self.make("index", (), torch.int64, size)
        return value if dtype is torch.int64 else cast(value, dtype)

    def load(
        self, buffer: Buffer, index: Size, mask: Value | None = None, other: Value | None = None
    ) -> Value:
        """buffer[index]; where `mask` is false nothing is read and the value is `other`."""
        args = () if mask is None or other is None else (mask, other)
        return self.make("load", args, buffer.dtype, (buffer, index))

    def acc(self, acc: Acc) -> Value:
        return self.make("acc", (), acc.dtype, acc)

    def carry(self, acc: Acc) -> Value:
        return self.make("carry", (), acc.dtype, acc)

    def indirect(self, value: Value, size: Size) -> Size:
        """An int64 value used as an index: known to be in [0, size)."""
        if value.op == "const":
            return int(value.attr)
        if value.op == "index":
            found: Size = value.attr
            return found
        # the value's id is unique in the table, which keeps it alive
        return Symbol(f"v{id(value)}", 0, size, payload=value).expr


def literal(x: float | int | bool, dtype: torch.dtype) -> float | int | bool:
    """A number as `dtype` holds it."""
    if dtype is torch.float64:
        return float(x)
    if dtype is torch.float32:
        return c_float(x).value
    if dtype is torch.bool:
        return bool(x)
    if dtype.is_floating_point:
        return torch.tensor(x, dtype=torch.float64).to(dtype).item()
    bits = dtype.itemsize * 8
    whole = int(x) & ((1 << bits) - 1)
    return whole - (1 << bits) if dtype.is_signed and whole >> (bits - 1) else whole


def const(like: Value, number: float | int | bool | Expr) -> Value:
    """A literal of the dtype of `like`, or an open number."""
    if isinstance(number, Expr):
        return like.table.index(number, like.dtype)
    return like.table.const(literal(number, like.dtype), like.dtype)


Operand = Union["Value", float, int, bool, Expr]


def _values(operands: tuple[Operand, ...]) -> tuple[Value, ...]:
    """Numbers become literals of the dtype of the values beside them."""
    like = next(x for x in operands if isinstance(x, Value))
    return tuple([x if isinstance(x, Value) else const(like, x) for x in operands])


def op(name: str, *operands: Operand) -> Value:
    """Apply an op of the vocabulary to operands of one dtype."""
    args = _values(operands)
    dtype = torch.bool if SCALAR_OPS[name].result == "bool" else args[0].dtype
    return args[0].table.make(name, args, dtype)


def where(condition: Value, a: Operand, b: Operand) -> Value:
    x, y = _values((a, b))
    if condition.op == "const":
        return x if condition.attr else y
    if x is y:
        return x
    return x.table.make("where", (condition, x, y), x.dtype)


def cast(x: Value, dtype: torch.dtype, asked: bool = False) -> Value:
    """Convert; literals are converted here, exactly as torch would.

    asked   by the program; else what is computed in float32 is rounded to the result's dtype
    """
    if x.dtype is dtype:
        return x
    if x.op == "const":
        return x.table.const(torch.tensor(x.attr, dtype=x.dtype).to(dtype).item(), dtype)
    # a cast there and back is exact if the dtype between holds every value
    if x.op == "cast" and x.args[0].dtype is dtype:
        is_like = dtype.is_floating_point == x.dtype.is_floating_point or dtype is torch.bool
        if is_like and torch.promote_types(dtype, x.dtype) is x.dtype:
            return x.args[0]
    return x.table.make("cast", (x,), dtype, "asked" if asked else None)


def check(x: Value, size: Size, message: int, wraps: bool = True) -> Value:
    """`x` (int64) as an index into `size` elements; outside is reported. Negatives may wrap."""
    return x.table.make("check", (x,), torch.int64, (size, message, wraps))


def payloads(index: Size) -> list[Value]:
    """The values that stand inside an index expression: its data-dependent parts."""
    return [s.payload for s in symbols(index) if isinstance(s.payload, Value)]


def index_of(value: Value) -> Size:
    """The index expression that a load, index or check holds; 0 for all else."""
    if value.op == "load":
        index: Size = value.attr[1]
        return index
    if value.op == "index":
        size: Size = value.attr
        return size
    return 0


def walk(roots: Iterable[Value]) -> Sequence[Value]:
    """Every value below `roots`, operands before users, each once.

    A root keeps its order: values do not change.
    """
    orders = []
    for root in roots:
        done: dict[Value, None] = {}
        stack = [] if root.order else [root]
        while stack:
            left = [arg for arg in stack[-1].operands if arg not in done]
            if left:
                stack += left
            else:
                value = stack.pop()
                done[value] = None
        root.order = root.order or tuple(done)
        orders.append(root.order)
    if len(orders) == 1:
        return orders[0]
    return list(dict.fromkeys(itertools.chain.from_iterable(orders)))


def rewrite(
    roots: Iterable[Value],
    axes: dict[Symbol, Size] | None,
    replace: Callable[[Value], Value | None] | None = None,
) -> dict[Value, Value]:
    """Values with axis variables substituted and single ones replaced: by each old one.

    `replace` sees each value after its operands were rewritten; None keeps it.
    """
    done: dict[Value, Value] = {}
    for value in walk(roots):
        args, attr = tuple(done[arg] for arg in value.args), value.attr
        if value.op == "load":
            index = rewrite_index(attr[1], axes, done)
            attr = attr if index is attr[1] else (attr[0], index)
        elif value.op == "index":
            attr = rewrite_index(attr, axes, done)
        is_same = attr is value.attr and args == value.args
        new = value if is_same else value.table.make(value.op, args, value.dtype, attr)
        if replace is not None:
            new = replace(new) or new
        done[value] = new
    return done


def rewrite_index(index: Size, axes: dict[Symbol, Size] | None, done: dict[Value, Value]) -> Size:
    """`index` with axes substituted and its data-dependent parts replaced by rewritten ones."""
    if isinstance(index, int):
        return index
    values: dict[Symbol, Size] = dict(axes or {})
    for symbol in symbols(index):
        payload = symbol.payload
        if isinstance(payload, Value) and done[payload] is not payload:
            new = done[payload]
            values[symbol] = new.table.indirect(new, symbol.size)
    return substitute(index, values) if values else index


# ------------------------------------------------------------------------------ loops and externs


@dataclass(eq=False)
class Acc:
    """An accumulator: one scalar per point of the outer axes."""

    name: str
    op: str  # a key of REDUCTIONS, or "fold"
    dtype: torch.dtype  # of the result: int64 for argmax and argmin


# set: plain store. The others combine with what is there; axes that may collide run in order.
Mode = Literal["set", "add", "mul", "min", "max"]


@dataclass(eq=False)
class Loop:
    """One realised computation: for axes (and reduce_axes): buffer[index] = value.

    With `acc`, `value` is what is accumulated over reduce_axes, `index` mentions `axes` only, and
    `result` (default: the accumulator cast to the buffer's dtype) is what is stored: a value over
    `axes` that reads the accumulator. With `scan`, reduce_axes is the one scanned axis and `index`
    and `result` mention it too: the running accumulator is stored at each of its points. `folds`:
    further accumulators whose carried values `value` is made of, and what they become.
    Several loops may write disjoint parts of one buffer (cat), or the same part in order (scatter).
    """

    buffer: Buffer
    axes: tuple[Symbol, ...]
    index: Size
    value: Value
    reduce_axes: tuple[Symbol, ...] = ()
    acc: Acc | None = None
    result: Value | None = None
    which: Value | None = None  # argmax, argmin: the int64 index of the element
    scan: bool = False
    folds: tuple[tuple[Acc, Value], ...] = ()
    mode: Mode = "set"
    ordered: tuple[Symbol, ...] = ()  # axes whose points may store to the same place
    stays: bool = False  # it runs for its checks, though nobody reads what it stores
    origin: str = ""  # aten ops and user line it comes from, for people
    late: int = 0  # how many backward passes of the graph began before it
    reads_memo: list[Buffer] | None = None  # what schedule.reads found
    size_memo: int = 0  # how many values that looked at

    @property
    def all_axes(self) -> tuple[Symbol, ...]:
        return (*self.axes, *self.reduce_axes)

    @property
    def operands(self) -> list[Value]:
        """What it computes, as `Store.operands`."""
        values = (self.value, self.result, self.which, *(value for _, value in self.folds))
        return [v for v in values if v is not None] + payloads(self.index)

    @property
    def is_fold(self) -> bool:
        """Whether it is a scan whose step is a function of the program's."""
        return self.acc is not None and self.acc.op == "fold"

    @property
    def gathered(self) -> list[Accumulate]:
        """What it does to its accumulators."""
        own = [] if self.acc is None else [Accumulate(self.acc, self.value, self.which)]
        return [*(Accumulate(acc, value) for acc, value in self.folds), *own]


@dataclass(eq=False)
class View:
    """A strided window on a buffer, as an Extern argument or a graph output."""

    buffer: Buffer
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size


@dataclass(eq=False)
class Extern:
    """A call on whole tensors. `args` and `kwargs` may hold View and Size anywhere inside.

    `results` are the buffers for the tensors it returns, in order (None: ignored). With `out`, the
    callable is an out= variant that fills them; otherwise it returns them (role "extern").
    """

    name: str
    call: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    results: tuple[Buffer | None, ...]
    out: bool = False
    many: bool = False  # it returns a tuple or list, even if only of one tensor
    mutates: tuple[Buffer, ...] = ()  # buffers that the call writes in place
    # the same call writing over argument number `operand`, which it takes first and nobody needs
    in_place: Callable[..., Any] | None = None
    operand: int = 0
    owns: bool = False  # what it returns shares memory with nothing
    shares: bool = False  # what it returns is memory of its arguments
    apart: bool = False  # it has tensors on another device than loops have
    must_run: bool = False  # it may raise for what its operands hold, or does more than to compute
    reason: str = ""  # why it is not a loop
    origin: str = ""


Step = Union[Loop, Extern]


class Message(NamedTuple):
    """What is raised for a value that an operator refuses.

    text    around the value, and around the size
    origin  the operator and the user's line, where the error comes later than the call
    """

    kind: type[Exception]
    text: str
    origin: str = ""
    size: Size = 0


@dataclass(eq=False)
class LoopGraph:
    """One lowered graph: steps in program order; outputs are Views, Sizes or plain constants."""

    values: Values
    inputs: list[Buffer | Symbol]
    steps: list[Step] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # what `check` reports, by index
    notes: list[str] = field(default_factory=list)  # what was not lowered, and why
    late: int = 0  # how many backward passes have begun
    elsewhere: set[Buffer] = field(default_factory=set)  # on another device than the loops


# ------------------------------------------------------------------------------ kernels


@dataclass(eq=False)
class Store:
    buffer: Buffer
    index: Size
    value: Value
    mode: Mode = "set"

    @property
    def operands(self) -> list[Value]:
        """What it computes: those inside the index too."""
        return [*payloads(self.index), self.value]


@dataclass(eq=False)
class Accumulate:
    acc: Acc
    value: Value
    which: Value | None = None

    @property
    def operands(self) -> list[Value]:
        return [self.value] if self.which is None else [self.value, self.which]


Statement = Union[Store, Accumulate]


@dataclass(eq=False)
class Phase:
    inner: tuple[Symbol, ...]
    body: list[Statement]

    @property
    def operands(self) -> list[Value]:
        """What its statements compute."""
        return [v for statement in self.body for v in statement.operands]

    @property
    def stores(self) -> list[Store]:
        return [s for s in self.body if isinstance(s, Store)]

    @property
    def accumulates(self) -> list[Accumulate]:
        return [s for s in self.body if isinstance(s, Accumulate)]


@dataclass(eq=False)
class Kernel:
    """See the grammar above. `lanes` is the axis along which vectors run.

    It is the last outer axis (all phases then work on whole vectors of it), or None: then each
    phase runs its vectors along its own last inner axis, and phases without inner axes are scalar.
    `ordered` axes must run sequentially, in one thread and without vectors.
    """

    outer: tuple[Symbol, ...]
    phases: list[Phase]
    lanes: Symbol | None = None
    ordered: tuple[Symbol, ...] = ()
    origin: str = ""
    reads_memo: list[Buffer] | None = None  # what schedule.reads found

    @property
    def operands(self) -> list[Value]:
        """What its statements compute."""
        return [v for phase in self.phases for v in phase.operands]

    def statements(self) -> Iterator[Statement]:
        for phase in self.phases:
            yield from phase.body

    @property
    def stores(self) -> list[Store]:
        return [s for phase in self.phases for s in phase.stores]

    @property
    def accumulates(self) -> list[Accumulate]:
        return [s for phase in self.phases for s in phase.accumulates]


def kernel_of(loop: Loop) -> Kernel:
    """The kernel that a loop is by itself."""
    table = loop.value.table
    if loop.acc is None:
        stored: Statement = Store(
            loop.buffer, loop.index, cast(loop.value, loop.buffer.dtype), loop.mode
        )
        return Kernel(loop.axes, [Phase((), [stored])], None, loop.ordered, loop.origin)
    result = cast(loop.result or table.acc(loop.acc), loop.buffer.dtype)
    stored = Store(loop.buffer, loop.index, result, loop.mode)
    phases = [Phase(loop.reduce_axes, [*loop.gathered, stored])]
    if not loop.scan:
        phases = [Phase(loop.reduce_axes, [*loop.gathered]), Phase((), [stored])]
    return Kernel(loop.axes, phases, None, loop.ordered, loop.origin)


# ---------------------------------------------------------------------------- origin
# Where loops come from: ATen ops and the user's lines, for people.


def origin(node: fx.Node) -> str:
    """`softmax model.py:12`, or the op alone where the line is not known."""
    name = _name(node.target)
    place = _place(node.meta.get("stack_trace"))
    return f"{name} {place}" if place else name


@lru_cache(maxsize=1024)
def _name(target: Any) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default")


@lru_cache(maxsize=1024)
def _place(stack_trace: Any) -> str:
    frame = user_frame(stack_trace)
    return "" if frame is None else f"{PurePath(frame['file']).name}:{frame['line']}"


def joined(origins: Iterable[str]) -> str:
    """Several origins as one text: `mul, add model.py:12 + relu model.py:13`."""
    places: dict[str, list[str]] = {}
    for one in origins:
        names, _, place = one.rpartition(" ")
        if not names:
            names, place = place, ""
        places.setdefault(place, []).append(names)
    rows = (f"{', '.join(dict.fromkeys(n))} {place}".strip() for place, n in places.items())
    return " + ".join(rows)


@dataclass
class Schedule:
    """What runs of a graph, in order, and why loops stayed apart."""

    graph: LoopGraph
    items: list[Kernel | Extern]
    refusals: list[str]
