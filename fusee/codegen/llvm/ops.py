"""The scalar vocabulary as LLVM instructions on one vector (or one scalar: a vector of one lane).

No fast-math flags: results are those of ATen's own kernels, NaN, infinities and signed zeros
included. Nothing traps, whatever the lanes hold that a mask excludes.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fusee.codegen.llvm.math import math_function
from fusee.loops import Acc, Buffer, Kernel, Value, index_of, walk
from fusee.loops.schedule import Given
from fusee.runtime.llvm_text import (
    BITS,
    HELD,
    SIGNED,
    InsertPoint,
    Level,
    Machine,
    Writer,
    is_float,
    literal,
    memory_type,
    number,
    splat,
    vector,
)
from fusee.source import Rules
from fusee.sym import Atom, Expr, Size, Symbol

_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_PLAIN = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
# Numbers 0 and 1: a sum of them is an or.
_OF_BOOLS = {"add": "or", "mul": "and"}
_FLOAT_COMPARE = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}


def emit(t: InsertPoint, op: str, dtype: torch.dtype, args: list[str]) -> str:
    """Op `op` of the vocabulary on operands of `dtype`; sums and products of bools, too."""
    op = _OF_BOOLS.get(op, op) if dtype is torch.bool else op
    rule = _RULES.get(op)
    if rule is not None:
        return rule(t, dtype, *args)
    kind = t.kind(dtype)
    if is_float(dtype) and op in _FLOAT:
        return t.op(f"{_FLOAT[op]} {kind} {args[0]}, {args[1]}")
    if op in _PLAIN and not is_float(dtype):
        return t.op(f"{_PLAIN[op]} {kind} {args[0]}, {args[1]}")
    if op in _FLOAT_COMPARE:
        return compare(t, op, dtype, *args)
    return math_function(t, op, dtype, args)


def compare(t: InsertPoint, op: str, dtype: torch.dtype, x: str, y: str) -> str:
    kind = t.kind(dtype)
    if is_float(dtype):
        return t.op(f"fcmp {_FLOAT_COMPARE[op]} {kind} {x}, {y}")
    if op in ("lt", "le", "gt", "ge"):
        op = ("s" if dtype in SIGNED else "u") + op
    return t.op(f"icmp {op} {kind} {x}, {y}")


# ------------------------------------------------------------------------------ rules


def _extreme(which: str, t: InsertPoint, dtype: torch.dtype, x: str, y: str) -> str:
    """x if it is better or NaN, else y: which is y as well where only y is NaN.

    Put what is known first in `x`: the test for NaN then stays off an accumulator's chain.

    which   "max" or "min"
    """
    kind, is_max = HELD[dtype], which == "max"
    if kind == "i1":
        return t.op(f"{'or' if is_max else 'and'} {t.kind(dtype)} {x}, {y}")
    if not is_float(dtype):
        return t.intrinsic(f"{'s' if dtype in SIGNED else 'u'}{which}", kind, x, y)
    if t.machine.is_simt and kind == "float":  # one instruction from sm_80 on
        return t.intrinsic(f"{which}imum", kind, x, y)
    winner = t.select(compare(t, "gt" if is_max else "lt", dtype, x, y), kind, x, y)
    return t.select(_isnan(t, dtype, x), kind, x, winner)


_RULES: Rules[str, Callable[..., str]] = Rules()


@_RULES.rule("neg")
def _neg(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    if is_float(dtype):
        return t.op(f"fneg {t.kind(dtype)} {x}")
    return t.op(f"sub {t.kind(dtype)} {literal(0, dtype, t.lanes)}, {x}")


@_RULES.rule("abs")
def _abs(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    if is_float(dtype):
        return t.intrinsic("fabs", HELD[dtype], x)
    if dtype not in SIGNED:
        return x
    return t.intrinsic("abs", HELD[dtype], x, flag="false")


@_RULES.rule("not")
def _not(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    ones = "true" if dtype is torch.bool else "-1"
    return t.op(f"xor {t.kind(dtype)} {x}, {splat(HELD[dtype], ones, t.lanes)}")


def _divide(t: InsertPoint, dtype: torch.dtype, x: str, y: str) -> tuple[str, str, str]:
    """Quotient and remainder to zero, and the divisor used.

    That is y, or 1 where dividing would trap: by 0, and the least x by -1, whose quotient is x.
    """
    is_known = y.lstrip("-").isdigit() or y.startswith("splat")
    if not is_known or int(y.split()[-1].rstrip(")")) in (0, -1):
        trap = compare(t, "eq", dtype, y, literal(0, dtype, t.lanes))
        if dtype in SIGNED:
            least = literal(torch.iinfo(dtype).min, dtype, t.lanes)
            mask = vector("i1", t.lanes)
            first = compare(t, "eq", dtype, x, least)
            second = compare(t, "eq", dtype, y, literal(-1, dtype, t.lanes))
            both = t.op(f"and {mask} {first}, {second}")
            trap = t.op(f"or {mask} {trap}, {both}")
        y = t.select(trap, HELD[dtype], literal(1, dtype, t.lanes), y)
    kind = t.kind(dtype)
    sign = "s" if dtype in SIGNED else "u"
    quotient = t.op(f"{sign}div {kind} {x}, {y}")
    product = t.op(f"mul {kind} {quotient}, {y}")
    return quotient, t.op(f"sub {kind} {x}, {product}"), y


def _crosses(t: InsertPoint, dtype: torch.dtype, rest: str, y: str) -> str:
    """True where the remainder to zero has another sign than the divisor."""
    mask = vector("i1", t.lanes)
    zero = literal(0, dtype, t.lanes)
    nonzero = compare(t, "ne", dtype, rest, zero)
    signs = t.op(f"xor {t.kind(dtype)} {rest}, {y}")
    return t.op(f"and {mask} {nonzero}, {compare(t, 'lt', dtype, signs, zero)}")


@_RULES.rule("floordiv")
def _floordiv(t: InsertPoint, dtype: torch.dtype, x: str, y: str) -> str:
    quotient, rest, y = _divide(t, dtype, x, y)
    if dtype not in SIGNED:
        return quotient
    kind = t.kind(dtype)
    down = t.convert("sext", _crosses(t, dtype, rest, y), "i1", HELD[dtype])
    return t.op(f"add {kind} {quotient}, {down}")


@_RULES.rule("remainder")
def _remainder(t: InsertPoint, dtype: torch.dtype, x: str, y: str) -> str:
    _, rest, y = _divide(t, dtype, x, y)
    if dtype not in SIGNED:
        return rest
    moved = t.op(f"add {t.kind(dtype)} {rest}, {y}")
    return t.select(_crosses(t, dtype, rest, y), HELD[dtype], moved, rest)


@_RULES.rule("fmod")
def _fmod(t: InsertPoint, dtype: torch.dtype, x: str, y: str) -> str:
    if is_float(dtype):
        return math_function(t, "fmod", dtype, [x, y])
    return _divide(t, dtype, x, y)[1]


def _shift(op: str, t: InsertPoint, dtype: torch.dtype, x: str, y: str) -> str:
    """Shifting out everything, or by less than nothing, leaves 0: to the right, the sign."""
    kind, bits = t.kind(dtype), BITS[HELD[dtype]]
    inside = t.op(f"icmp ult {kind} {y}, {literal(bits, dtype, t.lanes)}")
    if op == "shr" and dtype in SIGNED:
        by = t.select(inside, HELD[dtype], y, literal(bits - 1, dtype, t.lanes))
        return t.op(f"ashr {kind} {x}, {by}")
    shifted = t.op(f"{'lshr' if op == 'shr' else op} {kind} {x}, {y}")
    return t.select(inside, HELD[dtype], shifted, literal(0, dtype, t.lanes))


@_RULES.rule("isnan")
def _isnan(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    return t.op(f"fcmp uno {t.kind(dtype)} {x}, {x}")


@_RULES.rule("isinf")
def _isinf(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    size = t.intrinsic("fabs", HELD[dtype], x)
    return compare(t, "eq", dtype, size, literal(float("inf"), dtype, t.lanes))


@_RULES.rule("signbit")
def _signbit(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    kind = "i64" if dtype is torch.float64 else "i32"
    bits = t.convert("bitcast", x, HELD[dtype], kind)
    return t.op(f"icmp slt {vector(kind, t.lanes)} {bits}, {splat(kind, '0', t.lanes)}")


_RULES.update(
    {
        "maximum": functools.partial(_extreme, "max"),
        "minimum": functools.partial(_extreme, "min"),
        "truncdiv": lambda *given: _divide(*given)[0],
        "shl": functools.partial(_shift, "shl"),
        "shr": functools.partial(_shift, "shr"),
    }
)


# ------------------------------------------------------------------------------ conversions


def emit_cast(t: InsertPoint, source: torch.dtype, result: torch.dtype, x: str) -> str:
    """Convert as torch does on this processor."""
    if source is result:
        return x
    held, kind = HELD[source], HELD[result]
    if result is torch.bool:
        return compare(t, "ne", source, x, literal(0, source, t.lanes))
    if is_float(source):
        if kind == "double":
            return x if held == "double" else t.convert("fpext", x, "float", "double")
        if kind == "float":
            if held == "double":
                x = t.convert("fptrunc", x, "double", "float")
            return round_to(t, result, x)
        # By way of int32 for narrow integers and int64 for the rest, like the compiled C++ of ATen
        kind = HELD[result]
        through = "i64" if kind == "i64" or result is torch.uint32 else "i32"
        x = t.convert("fptosi", x, HELD[source], through)
        # out of range LLVM promises nothing; frozen, it is what the instruction gives
        x = t.op(f"freeze {vector(through, t.lanes)} {x}")
        return resize(t, x, through, kind, signed=True)
    if is_float(result):
        signed = source in SIGNED
        x = t.convert("sitofp" if signed else "uitofp", x, held, kind)
        return x if source is torch.bool else round_to(t, result, x)
    return resize(t, x, held, kind, signed=source in SIGNED)


def resize(t: InsertPoint, x: str, held: str, kind: str, signed: bool) -> str:
    """An integer in another width."""
    if BITS[held] == BITS[kind]:
        return x
    if BITS[held] > BITS[kind]:
        return t.convert("trunc", x, held, kind)
    return t.convert("sext" if signed else "zext", x, held, kind)


def round_to(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    """A float32 rounded to what `dtype` can hold, to nearest even; still held as float32."""
    kind = memory_type(dtype, t.machine)
    if kind in ("half", "bfloat"):
        return t.convert("fpext", t.convert("fptrunc", x, "float", kind), kind, "float")
    if dtype is torch.bfloat16:
        kind = vector("i32", t.lanes)
        op, word = t.op, t.word
        bits = t.convert("bitcast", x, "float", "i32")
        odd = op(f"and {kind} {op(f'lshr {kind} {bits}, {word(16)}')}, {word(1)}")
        up = op(f"add {kind} {odd}, {word(0x7FFF)}")
        rounded = op(f"and {kind} {op(f'add {kind} {bits}, {up}')}, {word(-65536)}")
        is_nan = _isnan(t, torch.float32, x)
        rounded = t.select(is_nan, "i32", word(0x7FC00000), rounded)
        return t.convert("bitcast", rounded, "i32", "float")
    if dtype is torch.float16:
        return _decode_half(t, _encode_half(t, x))
    return x


def _encode_half(t: InsertPoint, x: str) -> str:
    """float16 bits of a float32 in 32 bits, without conversion instructions.

    Adding a power of two just above the value makes the adder round at float16's last bit.
    """
    kind, real = vector("i32", t.lanes), vector("float", t.lanes)
    op, word = t.op, t.word

    def scale(power: int) -> str:
        return literal(2.0**power, torch.float32, t.lanes)

    size = t.intrinsic("fabs", "float", x)
    grown = op(f"fmul {real} {op(f'fmul {real} {size}, {scale(112)}')}, {scale(-110)}")
    bits = t.convert("bitcast", x, "float", "i32")
    double = op(f"shl {kind} {bits}, {word(1)}")
    exponent = op(f"and {kind} {double}, {word(-(1 << 24))}")
    exponent = t.intrinsic("umax", "i32", exponent, word(0x71000000))
    bias = op(f"add {kind} {op(f'lshr {kind} {exponent}, {word(1)}')}, {word(0x07800000)}")
    summed = op(f"fadd {real} {t.convert('bitcast', bias, 'i32', 'float')}, {grown}")
    raw = t.convert("bitcast", summed, "float", "i32")
    high = op(f"and {kind} {op(f'lshr {kind} {raw}, {word(13)}')}, {word(0x7C00)}")
    low = op(f"and {kind} {raw}, {word(0xFFF)}")
    positive = op(f"add {kind} {high}, {low}")
    positive = t.select(_isnan(t, torch.float32, x), "i32", word(0x7E00), positive)
    sign = op(f"and {kind} {op(f'lshr {kind} {bits}, {word(16)}')}, {word(0x8000)}")
    return op(f"or {kind} {sign}, {positive}")


def _decode_half(t: InsertPoint, bits: str) -> str:
    """The float32 of float16 bits in 32 bits, without conversion instructions."""
    kind, real = vector("i32", t.lanes), vector("float", t.lanes)
    op, word = t.op, t.word

    word32 = op(f"shl {kind} {bits}, {word(16)}")
    sign = op(f"and {kind} {word32}, {word(-(1 << 31))}")
    double = op(f"shl {kind} {word32}, {word(1)}")
    shifted = op(f"add {kind} {op(f'lshr {kind} {double}, {word(4)}')}, {word(0xE0 << 23)}")
    tiny = literal(2.0**-112, torch.float32, t.lanes)
    normal = op(f"fmul {real} {t.convert('bitcast', shifted, 'i32', 'float')}, {tiny}")
    magic = op(f"or {kind} {op(f'lshr {kind} {double}, {word(17)}')}, {word(126 << 23)}")
    half = literal(0.5, torch.float32, t.lanes)
    small = op(f"fsub {real} {t.convert('bitcast', magic, 'i32', 'float')}, {half}")
    is_small = op(f"icmp ult {kind} {double}, {word(1 << 27)}")
    chosen = t.convert("bitcast", t.select(is_small, "float", small, normal), "float", "i32")
    return t.convert("bitcast", op(f"or {kind} {chosen}, {sign}"), "i32", "float")


def to_memory(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    """A held value as the type that memory has."""
    kind = memory_type(dtype, t.machine)
    if dtype is torch.bool:
        return t.convert("zext", x, "i1", "i8")
    if kind in ("half", "bfloat"):
        return t.convert("fptrunc", x, "float", kind)
    if dtype is torch.bfloat16:
        bits = t.convert("bitcast", x, "float", "i32")
        high = t.op(f"lshr {vector('i32', t.lanes)} {bits}, {splat('i32', '16', t.lanes)}")
        return t.convert("trunc", high, "i32", "i16")
    if dtype is torch.float16:
        return t.convert("trunc", _encode_half(t, x), "i32", "i16")
    return x


def from_memory(t: InsertPoint, dtype: torch.dtype, x: str) -> str:
    """What memory has as a held value."""
    kind = memory_type(dtype, t.machine)
    if dtype is torch.bool:
        zero = splat("i8", "0", t.lanes)
        return t.op(f"icmp ne {vector('i8', t.lanes)} {x}, {zero}")
    if kind in ("half", "bfloat"):
        return t.convert("fpext", x, kind, "float")
    if dtype is torch.bfloat16:
        wide = t.convert("zext", x, "i16", "i32")
        high = t.op(f"shl {vector('i32', t.lanes)} {wide}, {splat('i32', '16', t.lanes)}")
        return t.convert("bitcast", high, "i32", "float")
    if dtype is torch.float16:
        return _decode_half(t, t.convert("zext", x, "i16", "i32"))
    return x


def emit_bitcast(t: InsertPoint, source: torch.dtype, result: torch.dtype, x: str) -> str:
    """The bits of memory reinterpreted; dtypes of equal width."""
    raw = to_memory(t, source, x)
    kind, wanted = memory_type(source, t.machine), memory_type(result, t.machine)
    if kind != wanted:
        raw = t.convert("bitcast", raw, kind, wanted)
    return from_memory(t, result, raw)


# ------------------------------------------------------------------------------ shuffles


# Vectors that are turned by picking, which takes as many shuffles as their number's square.
PICKED = 5


def turned(t: InsertPoint, kind: str, vectors: Sequence[str], columns: int) -> list[str]:
    """A matrix with its axes exchanged; it lies in the vectors, one row after the other.

    In a square, for each power of two, blocks of that size are exchanged across the diagonals of
    blocks twice the size. Else what is more than a few vectors is halved and the halves zipped, or
    the other way around, once for each power of two in the axis that is as long as a vector.
    """
    full, lanes, found = vector(kind, t.lanes), t.lanes, list(vectors)
    if columns < lanes or len(found) < lanes:
        steps, total = 1, len(found) * lanes
        if min(columns, len(found)) > PICKED:
            steps, columns = lanes.bit_length() - 1, 2 if columns == lanes else total // 2
        places = [divmod(i, lanes) for c in range(columns) for i in range(c, total, columns)]
        starts = range(0, total, lanes)
        for _ in range(steps):
            found = [picked(t, kind, found, places[start : start + lanes]) for start in starts]
        return found
    distance = lanes // 2
    while distance:
        low = [i if not i & distance else i - distance + lanes for i in range(lanes)]
        high = [i + distance if not i & distance else i + lanes for i in range(lanes)]
        for first in range(lanes):
            second = first + distance
            if first & distance:
                continue
            pair = found[first], found[second]
            found[first], found[second] = (t.level.shuffle(full, *pair, x) for x in (low, high))
        distance //= 2
    return found


def picked(
    t: InsertPoint, kind: str, vectors: Sequence[str], places: Sequence[tuple[int, int]]
) -> str:
    """The vector of the elements at `places`: the number of a vector, and a lane of it."""
    full, lanes = vector(kind, t.lanes), t.lanes
    first, *others = sorted({source for source, _ in places})
    found, kept = vectors[first], [at for _, at in places]
    for source in others or [first]:
        both = zip(kept, places, strict=True)
        picks = [lanes + at if one == source else i for i, (one, at) in both]
        found, kept = t.level.shuffle(full, found, vectors[source], picks), list(range(lanes))
    return found


# ---------------------------------------------------------------------------- context
# What emission knows at a point of a kernel: open loops, names of sizes and buffers, the lanes.
#
# Rank: the loops of a kernel in nesting order; 0 is the function's entry, 1 one point of the
# parallel axes, then ordered axes, the outer lanes axis if there is one, inner axes. Everything is
# emitted at the rank of the deepest axis it depends on, so nothing is computed more often than it
# changes.

# An index as terms: (atoms that change inside the kernel, their coefficient made of sizes).
Group = tuple[tuple[Atom, ...], Size]
Fact = tuple[int, bool]  # rank, and whether it differs between lanes

# Loops of at most this many points keep their size in the text: LLVM may unroll them.
STATIC_SIZE = 16


class Context:
    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel = kernel
        self.machine = machine
        self.writer = Writer()
        self.ranked: list[Level] = [self.writer.top]
        self.axis_number: dict[Symbol, int] = {}
        for axis in (*kernel.outer, *(a for phase in kernel.phases for a in phase.inner)):
            self.axis_number.setdefault(axis, len(self.axis_number))
        self.axis_rank: dict[Symbol, int] = {}
        self.axis_name: dict[Symbol, str] = {}
        self.loop_axes: set[Symbol] = set()  # axes whose variable is that of an open loop
        # of the deepest outer axis: what one phase stores there, the next may load
        self.base_rank = 1
        self.params: dict[tuple[object, Size], str] = {}
        self.numbers: Mapping[Value, Given] = {}  # see given_numbers
        self.buffers: dict[Buffer, str] = {}
        self.stored = {s.buffer for s in kernel.stores}
        self.payloads: dict[object, int] = {}
        self.groups: dict[Size, list[Group]] = {}
        self.facts: dict[Value, Fact] = {}
        self.acc_facts: dict[Acc, Fact] = {}
        self.acc_names: dict[Acc, str | list[str]] = {}
        self.carried: dict[Acc, str | list[str]] = {}  # by folds, from the element before
        self.begins_anywhere = False  # whether vectors of 16 bytes that are loaded do
        self.rough: set[Value] = set()  # what is rounded to 16 bits later
        self.uses_spare = False
        self.arrays: list[str] = []  # instructions that make room for accumulators
        self.uses_status = False
        # the vectors of the loop being written; lane is None where everything is scalar
        self.lane: Symbol | None = None
        self.lanes = 1
        self.copies = 1
        self.mask: str | None = None
        self.copy_axis: Symbol | None = None  # along which copies run, if not along the lanes
        self.tail: str | None = None  # the copies that there are of these, as the lanes of a mask

    # -------------------------------------------------------------------------- places

    def target(self, rank: int, lanes: int) -> InsertPoint:
        return InsertPoint(self.ranked[rank], self.machine, lanes)

    def top(self, lanes: int) -> InsertPoint:
        """Where the innermost open loop is written."""
        return InsertPoint(self.writer.top, self.machine, lanes)

    def open_axis(self, axis: Symbol, name: str, rank: int) -> None:
        """The top level becomes the body of `axis`."""
        self.ranked[rank:] = [self.writer.top]
        self.know_axes([axis], [name], rank)
        self.loop_axes.add(axis)

    def know_axes(self, axes: Iterable[Symbol], names: Iterable[str], rank: int) -> None:
        """Coordinates have these names, from a rank on."""
        for axis, name in zip(axes, names, strict=False):
            self.axis_rank[axis], self.axis_name[axis] = rank, name

    # -------------------------------------------------------------------------- names

    def param(self, role: object, size: Size) -> str:
        """The register of a size that the host passes. Equal sizes in one role share it.

        The role keeps sizes apart that are equal by chance, so that a kernel's text does not depend
        on them.
        """
        name = self.params.get((role, size))
        if name is None:
            name = self.params[role, size] = self._given("i64", "%params", len(self.params))
        return name

    def size_of(self, axis: Symbol) -> str:
        """The trip count of an axis, as a literal if it is a short inner one."""
        if isinstance(axis.hi, int) and axis.hi <= STATIC_SIZE and axis not in self.kernel.outer:
            return str(axis.hi)
        return self.param(("size", self.axis_number[axis]), axis.size)

    def number(self, value: Value) -> str:
        """A constant: a literal, or the register of a number that the host passes."""
        given = self.numbers.get(value)
        if given is None:
            return number(value.attr, value.dtype)
        key = ("number", value), given.word
        if key not in self.params:
            kind = HELD[value.dtype]
            self.params[key] = self._given("i64", "%params", len(self.params), kind)
        return self.params[key]

    def given(self) -> tuple[int, ...]:
        """The places among the parameters of the numbers that are passed."""
        places = {role: place for place, (role, _) in enumerate(self.params)}
        return tuple(places["number", key] for key in self.numbers)

    def buffer(self, buffer: Buffer) -> str:
        name = self.buffers.get(buffer)
        if name is None:
            name = self.buffers[buffer] = self._given("ptr", "%bufs", len(self.buffers))
        return name

    def _given(self, kind: str, row: str, number: int, loaded: str = "") -> str:
        """The register of a word that the host passes in a row, or of a smaller kind in it."""
        name, entry = f"{row[:2]}{number}", self.ranked[0]
        address = entry.op(f"getelementptr {kind}, ptr {row}, i64 {number}")
        entry.do(f"{name} = load {loaded or kind}, ptr {address}")
        return name

    def spare(self) -> str:
        """Memory that lanes excluded by a mask may read and write."""
        self.uses_spare = True
        return "%spare"

    def report(self, level: Level, is_bad: str, refused: str, message: int) -> None:
        """Where `is_bad`, tell the status what was refused and the number of the message."""
        self.uses_status, spare = True, self.spare()
        told = level.op("load i64, ptr %status, align 8")
        is_bad = level.op(f"and i1 {is_bad}, {level.op(f'icmp eq i64 {told}, 0')}")
        # the index before the code, which says that there is one
        place = level.op(f"select i1 {is_bad}, ptr %found, ptr {spare}")
        level.do(f"store i64 {refused}, ptr {place}, align 8")
        place = level.op(f"select i1 {is_bad}, ptr %status, ptr {spare}")
        code = self.param("message", message + 1)  # no part of the text, which many calls share
        level.do(f"store i64 {code}, ptr {place}, align 8")

    def array(self, size: int) -> str:
        """That many bytes of memory of this thread."""
        name = f"%array{len(self.arrays)}"
        self.arrays.append(f"{name} = alloca [{size} x i8], align 64")
        return name

    # -------------------------------------------------------------------------- facts

    def learn(self, order: Iterable[Value]) -> None:
        """Find rank and variation of values, operands first."""
        facts = self.facts
        for value in order:
            if value.op in ("acc", "carry"):
                facts[value] = self.acc_facts[value.attr]
                continue
            rank, varies = 0, False
            for arg in value.args:
                arg_rank, arg_varies = facts[arg]
                rank, varies = max(rank, arg_rank), varies or arg_varies
            index = index_of(value)
            if not isinstance(index, int):
                index_rank, index_varies = self.size_fact(index)
                rank, varies = max(rank, index_rank), varies or index_varies
            if value.op == "load" and value.attr[0] in self.stored:
                rank = max(rank, self.base_rank)
            facts[value] = rank, varies

    def size_fact(self, size: Size) -> Fact:
        rank, varies = 0, False
        if isinstance(size, int):
            return rank, varies
        for mono in size.terms:
            for atom in mono:
                atom_rank, atom_varies = self.atom_fact(atom)
                rank, varies = max(rank, atom_rank), varies or atom_varies
        return rank, varies

    def atom_fact(self, atom: Atom) -> Fact:
        if isinstance(atom, Symbol):
            if atom in self.axis_rank:
                return self.axis_rank[atom], atom in (self.lane, self.copy_axis)
            if isinstance(atom.payload, Value):
                return self.facts[atom.payload]
            return 0, False
        a, b = self.size_fact(atom.a), self.size_fact(atom.b)
        return max(a[0], b[0]), a[1] or b[1]

    # -------------------------------------------------------------------------- values

    def scalar(self, value: Value) -> str:
        """The register or literal of a value that does not differ between lanes."""
        found = self.ranked[self.facts[value][0]].known[value]
        assert isinstance(found, str)
        return found

    def vectors(self, value: Value) -> list[str]:
        """The registers of a value for every copy; splat if it is the same in all lanes."""
        rank, varies = self.facts[value]
        found = self.ranked[rank].known[value]
        if varies:
            assert isinstance(found, list)
            return found
        assert isinstance(found, str)
        return [self.splat(found, self.held(value), rank)] * self.copies

    def held(self, value: Value) -> str:
        return HELD[value.dtype]

    def splat(self, name: str, kind: str, rank: int) -> str:
        """A scalar in all lanes."""
        if not name.startswith("%"):
            return f"splat ({kind} {name})"
        level, key = self.ranked[rank], ("splat", name, self.lanes)
        return level.once(key, functools.partial(level.splat, kind, name, self.lanes))


# ---------------------------------------------------------------------------- terms
# Index expressions as sums of terms, each part of which changes at a rank of its own.


def changes(ctx: Context, atom: Atom) -> bool:
    """False for sizes, which a call of the kernel does not change."""
    if isinstance(atom, Symbol):
        return atom in ctx.axis_number or atom.payload is not None
    return any(
        changes(ctx, inner)
        for side in (atom.a, atom.b)
        if not isinstance(side, int)
        for mono in side.terms
        for inner in mono
    )


def groups(ctx: Context, size: Size) -> list[Group]:
    """The expression as a sum of coefficient times atoms, in an order free of names."""
    if isinstance(size, int):
        return [((), size)] if size else []
    known = ctx.groups.get(size)
    if known is not None:
        return known
    found: dict[tuple[Atom, ...], Size] = {}
    for mono, coef in size.terms.items():
        moving = tuple(atom for atom in mono if changes(ctx, atom))
        fixed = tuple(atom for atom in mono if not changes(ctx, atom))
        part: Size = Expr({fixed: coef}) if fixed else coef
        found[moving] = found.get(moving, 0) + part
    result = [(mono, coef) for mono, coef in found.items() if coef != 0]
    if len(result) > 1:
        result.sort(key=lambda group: mono_key(ctx, group[0]))
    ctx.groups[size] = result
    return result


def mono_key(ctx: Context, mono: tuple[Atom, ...]) -> tuple[Any, ...]:
    """Equal for products that differ in names alone, so that texts do not depend on these."""
    keys: list[tuple[Any, ...]] = []
    for atom in mono:
        if not isinstance(atom, Symbol):
            sides = (groups(ctx, side) for side in (atom.a, atom.b))
            keys.append((2, atom.op, *(tuple(mono_key(ctx, x) for x, _ in s) for s in sides)))
        elif atom in ctx.axis_number:
            keys.append((0, ctx.axis_number[atom]))
        else:
            keys.append((1, ctx.payloads.setdefault(atom.payload, len(ctx.payloads))))
    return tuple(sorted(keys))


def mono_rank(ctx: Context, mono: Iterable[Atom]) -> int:
    return max((ctx.atom_fact(atom)[0] for atom in mono), default=0)


def mono_varies(ctx: Context, mono: Iterable[Atom]) -> bool:
    return any(ctx.atom_fact(atom)[1] for atom in mono)


# ---------------------------------------------------------------------------- numbers
# Constants that the host passes beside the sizes, so that kernels which differ in them alone are
# one function: LLVM takes some 10 ms for each. A mean divides by a size, so a network has one for
# each of its widths; a drop path divides by another number in each layer.

# Numbers that are no size and not one layer's own.
_USUAL = frozenset({0.0, 0.5, 1.0, 2.0})
# More do not fit the registers, and each launch would put them into memory first.
MOST_GIVEN = 8


def given_numbers(kernel: Kernel) -> dict[Value, Given]:
    """What the host passes of a kernel's constants.

    Of a divisor that is a power of two that is the inverse: LLVM makes such literals products, too.
    """
    order = walk(v for phase in kernel.phases for v in phase.operands)
    constants = [v for v in order if v.op == "const" and is_float(v.dtype)]
    numbers = [v for v in constants if abs(v.attr) < _LARGE and abs(v.attr) not in _USUAL]
    if not numbers:
        return {}
    uses: dict[Value, set[str]] = {v: {"result"} for s in kernel.statements() for v in s.operands}
    for value in order:
        for place, arg in enumerate(value.args):
            if arg.op == "const":
                use = "divisor" if place and value.op == "div" else value.op
                uses.setdefault(arg, set()).add(use)
    found = {}
    for value in numbers:
        number = value.attr
        if not uses[value] <= {*_FLOAT, "divisor"}:
            continue
        # quotients and products by it are the same in all bits
        has_inverse = abs(math.frexp(number)[0]) == 0.5 and abs(number) > 1 / _LARGE
        is_inverse = has_inverse and uses[value] == {"divisor"}
        if has_inverse and "divisor" in uses[value] and not is_inverse:
            continue
        layout = "<f" if HELD[value.dtype] == "float" else "<d"
        word = struct.pack(layout, 1 / number if is_inverse else number)
        found[value] = Given(int.from_bytes(word, "little", signed=True), is_inverse)
    return found if len(found) <= MOST_GIVEN else {}


_LARGE = 2.0**127  # beyond it a number may be none of float32; nor is infinity or NaN below it
