"""LLVM IR as text: loops and branches of one function, and the lines that its module needs.

A Level is the body of one open loop. While an inner loop is being written into its own Level,
code that does not depend on the inner loop can still be appended to the outer one: the inner
loop's text follows only when it closes. That is how invariant code ends up outside without a
later pass.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

MANGLED = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}


@functools.cache
def vector(kind: str, lanes: int) -> str:
    """The type of `lanes` elements; of one lane the scalar type."""
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


@functools.cache
def mangled(kind: str, lanes: int) -> str:
    """The type as intrinsics' names write it: f32, v8i64."""
    name = MANGLED.get(kind, kind)
    return name if lanes == 1 else f"v{lanes}{name}"


def splat(kind: str, number: object, lanes: int) -> str:
    """A literal in all lanes."""
    return str(number) if lanes == 1 else f"splat ({kind} {number})"


@functools.cache
def numbered(kind: str, numbers: Sequence[int]) -> str:
    """A vector of these numbers."""
    return f"<{', '.join(f'{kind} {number}' for number in numbers)}>"


class Level:
    """The lines of one loop body so far, and what has been computed in it."""

    __slots__ = ("counters", "known", "label", "lines", "writer")

    def __init__(self, writer: Writer, label: str) -> None:
        self.writer = writer
        self.lines: list[str] = []
        self.label = label  # of the basic block that the next line goes to
        self.known: dict[Hashable, str | list[str]] = {}
        self.counters: dict[str, str] = {}  # factor -> the register that holds i times it

    def times(self, factor: str) -> str:
        """The loop's variable times a factor known outside, by one addition per round."""
        found = self.counters.get(factor)
        if found is None:
            self.writer.count += 1
            found = self.counters[factor] = f"%v{self.writer.count}"
        return found

    def once(self, key: Hashable, make: Callable[[], str]) -> str:
        """What `make` gives, made once in this level."""
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = make()
        assert isinstance(found, str)
        return found

    def op(self, text: str) -> str:
        """Append an instruction; its result's name."""
        self.writer.count += 1
        name = f"%v{self.writer.count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Append an instruction without result."""
        self.lines.append("  " + text)

    def call(
        self, result: str, symbol: str, *operands: tuple[str, str], attributes: str = ""
    ) -> str:
        """Call a function from outside with (type, name) operands; its result, "" of void."""
        types = ", ".join(kind for kind, _ in operands)
        declared = f"declare {result} @{symbol}({types}) {attributes}".rstrip()
        self.writer.declares.setdefault(symbol, declared)
        text = f"call {result} @{symbol}({', '.join(f'{k} {name}' for k, name in operands)})"
        if result != "void":
            return self.op(text)
        self.do(text)
        return ""

    def extreme(self, which: str, x: str, y: str) -> str:
        """Of two i64, `smin` or `smax`."""
        return self.call("i64", f"llvm.{which}.i64", ("i64", x), ("i64", y))

    def at(self, base: str, offset: object, kind: str = "i8") -> str:
        """An address `offset` elements further."""
        return self.op(f"getelementptr {kind}, ptr {base}, i64 {offset}")

    def load(self, kind: str, base: str, offset: object = 0, of: str = "i64") -> str:
        """What lies `offset` elements of the kind `of` beyond an address."""
        return self.op(f"load {kind}, ptr {self.at(base, offset, of)}, align 1")

    def store(self, kind: str, value: str, base: str, offset: object = 0, of: str = "i64") -> None:
        self.do(f"store {kind} {value}, ptr {self.at(base, offset, of)}, align 1")

    def splat(self, kind: str, value: str, lanes: int) -> str:
        """A scalar in all lanes of a vector."""
        full = vector(kind, lanes)
        one = self.op(f"insertelement {full} poison, {kind} {value}, i64 0")
        return self.op(
            f"shufflevector {full} {one}, {full} poison, <{lanes} x i32> zeroinitializer"
        )

    def shuffle(self, kind: str, a: str, b: str, picks: Iterable[int]) -> str:
        """Elements of two vectors of a kind, numbered through."""
        listed = tuple(picks)
        mask = f"<{len(listed)} x i32> {numbered('i32', listed)}"
        return self.op(f"shufflevector {kind} {a}, {kind} {b}, {mask}")

    def either(self, kind: str, ops: str, *values: str) -> str:
        """All values of a kind as one, pair by pair: their `or`, or what else `ops` says."""
        total, *rest = values
        for value in rest:
            total = self.op(f"{ops} {kind} {total}, {value}")
        return total

    def _open(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    @contextlib.contextmanager
    def unless(self, condition: str | None) -> Iterator[None]:
        """What is written inside of the `with` runs where this does not hold; None: always."""
        if condition is None:
            yield
            return
        number = self.writer.label()
        self.do(f"br i1 {condition}, label %done{number}, label %else{number}")
        self._open(f"else{number}")
        yield
        self.do(f"br label %done{number}")
        self._open(f"done{number}")

    def chosen(self, condition: str, usual: str, body: Callable[[], str], kind: str) -> str:
        """`usual` where the condition holds; elsewhere what `body` gives, which runs there."""
        (found,) = self.each_chosen(condition, [usual], lambda: [body()], kind)
        return found

    def each_chosen(
        self, condition: str, usual: Sequence[str], body: Callable[[], Sequence[str]], kind: str
    ) -> list[str]:
        """The same for several of a kind."""
        before = self.label
        with self.unless(condition):
            others, end = body(), self.label
        pairs = zip(usual, others, strict=True)
        return [self.op(f"phi {kind} [ {x}, %{before} ], [ {y}, %{end} ]") for x, y in pairs]

    def leave(self, condition: str, result: Callable[[], str]) -> None:
        """Return from the function where the condition holds."""
        number = self.writer.label()
        self.do(f"br i1 {condition}, label %leave{number}, label %go{number}")
        self._open(f"leave{number}")
        self.do(f"ret {result()}")
        self._open(f"go{number}")


class Writer:
    """One function being written: the stack of open levels, innermost last.

    outlined  (op, dtype) of elementary functions that are called: so many calls would be too long
    """

    def __init__(self) -> None:
        self.count = 0
        self.labels = 0
        self.outlined: frozenset[Hashable] = frozenset()
        self.declares: dict[str, str] = {}  # by symbol: LLVM refuses a second declaration
        self.levels = [Level(self, "start")]

    def label(self) -> int:
        """A number for labels."""
        self.labels += 1
        return self.labels

    def define(self, head: str, result: str) -> str:
        """The function's text: what was written, and what it returns."""
        top = self.levels[0]
        start = [] if top.label == "start" else ["start:"]
        return "\n".join([f"{head} {{", *start, *top.lines, f"  ret {result}", "}", ""])

    def module(self, head: str, result: str) -> str:
        """The function with all that it needs."""
        text = self.define(head, result)
        return "\n".join([*self.declares.values(), text])

    @property
    def top(self) -> Level:
        return self.levels[-1]

    @contextlib.contextmanager
    def loop(
        self, start: str, stop: str, step: int, carried: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        """for i in range(start, stop, step), with (type, initial value) carried round.

        Inside of the `with` one writes the body, into the new top level. It gets i, the carried
        names, and a list to which it adds the next ones; afterwards that holds the final ones. The
        test stands at the end, so code hoisted out of the body runs even if the loop does not.
        """
        number = self.label()
        outer, inner = self.top, Level(self, f"body{number}")
        i = f"%i{number}"
        phis = [f"%c{number}_{k}" for k in range(len(carried))]
        after: list[str] = []
        self.levels.append(inner)
        yield i, phis, after
        counters = []
        for factor, name in inner.counters.items():
            first = outer.op(f"mul i64 {start}, {factor}") if start != "0" else "0"
            by = outer.op(f"mul i64 {factor}, {step}") if step != 1 else factor
            counters.append((name, first, inner.op(f"add i64 {name}, {by}")))
        following = inner.op(f"add nsw i64 {i}, {step}")
        again = inner.op(f"icmp slt i64 {following}, {stop}")
        inner.do(f"br i1 {again}, label %body{number}, label %exit{number}")
        self.levels.pop()
        before = outer.label
        enter = outer.op(f"icmp slt i64 {start}, {stop}")
        outer.do(f"br i1 {enter}, label %body{number}, label %exit{number}")
        outer.lines.append(f"body{number}:")
        outer.do(f"{i} = phi i64 [ {start}, %{before} ], [ {following}, %{inner.label} ]")
        for (kind, first), phi, last in zip(carried, phis, after, strict=True):
            outer.do(f"{phi} = phi {kind} [ {first}, %{before} ], [ {last}, %{inner.label} ]")
        for name, first, last in counters:
            outer.do(f"{name} = phi i64 [ {first}, %{before} ], [ {last}, %{inner.label} ]")
        outer.lines += inner.lines
        outer._open(f"exit{number}")
        after[:] = [
            outer.op(f"phi {kind} [ {first}, %{before} ], [ {last}, %{inner.label} ]")
            for (kind, first), last in zip(carried, after, strict=True)
        ]

    @contextlib.contextmanager
    def each(self, start: str, stop: str, step: int = 1) -> Iterator[str]:
        """The same with nothing carried: `with writer.each("0", count) as i`."""
        with self.loop(start, stop, step, ()) as (i, _, _):
            yield i


# ---------------------------------------------------------------------------- types
# How values of each dtype are held in registers and in memory, and their literals.
#
# bfloat16 and float16 are held as float32 that are exactly representable in the narrow type; a bool
# is an i1. Memory holds a bool as a byte of 0 or 1, bfloat16 and float16 as LLVM's types, or as
# their bits where the processor has no conversions.


HELD = {
    torch.bool: "i1",
    torch.uint8: "i8",
    torch.int8: "i8",
    torch.uint16: "i16",
    torch.int16: "i16",
    torch.uint32: "i32",
    torch.int32: "i32",
    torch.uint64: "i64",
    torch.int64: "i64",
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.float32: "float",
    torch.float64: "double",
}

SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})

BITS = {"i1": 1, "i8": 8, "i16": 16, "half": 16, "bfloat": 16, "i32": 32, "float": 32}
BITS |= {"i64": 64, "double": 64}


class Machine(NamedTuple):
    """What code is generated for: LLVM's feature names, and the width of a vector register.

    `vector_bits` 0 takes the widest that the features offer. With `is_simt` the machine runs many
    threads, and the lanes of a vector are elements of one thread: accesses that lie in one piece
    are wide, all else LLVM takes apart.
    """

    features: frozenset[str]
    vector_bits: int = 0
    is_simt: bool = False

    @property
    def bits(self) -> int:
        if self.vector_bits:
            return self.vector_bits
        if "avx512f" in self.features:
            return 512
        return 256 if "avx2" in self.features else 128

    @property
    def has_fused(self) -> bool:
        """True if products and sums are one instruction, with one rounding."""
        return self.is_simt or not {"fma", "neon"}.isdisjoint(self.features)

    @property
    def is_x86(self) -> bool:
        return "neon" not in self.features

    @property
    def has_half(self) -> bool:
        return self.is_simt or "f16c" in self.features or not self.is_x86

    @property
    def has_gather(self) -> bool:
        """True if gathers and scatters are instructions worth using.

        Before AVX-512 scalar accesses are as fast; AMD's processors, which alone have SSE4a, make
        microcode of them (1.1 to 2.8 times as long, Zen 4).
        """
        return "avx512f" in self.features and "sse4a" not in self.features

    @property
    def fetches_masked(self) -> bool:
        """True if lines are fetched ahead of masked loads: AMD's processors don't (a stream takes
        1.6 to 2 times as long, Zen 5)."""
        return "avx512f" not in self.features or "sse4a" not in self.features

    def alignment(self, bits: int, lanes: int) -> int:
        """Bytes to which an access of so many elements in one piece is aligned."""
        own = max(bits // 8, 1)
        return min(own * lanes, 16) if self.is_simt else own

    def can_mask(self, bits: int) -> bool:
        """True if masked loads and stores of such elements are single instructions."""
        return "avx2" in self.features if bits >= 32 else "avx512bw" in self.features


def memory_type(dtype: torch.dtype, machine: Machine) -> str:
    if dtype is torch.bool:
        return "i8"
    if dtype is torch.bfloat16:
        return "bfloat" if machine.is_simt else "i16"
    if dtype is torch.float16:
        return "half" if machine.has_half else "i16"
    return HELD[dtype]


def number(value: float | int | bool, dtype: torch.dtype) -> str:
    """A scalar literal. Floats as the bits of a double, which LLVM wants exact."""
    kind = HELD[dtype]
    if kind == "i1":
        return "true" if value else "false"
    if kind == "double":
        return _hexadecimal(float(value))
    if kind == "float":
        try:  # through float32, for literals that lowering gave in full precision
            return _hexadecimal(*struct.unpack("<f", struct.pack("<f", float(value))))
        except OverflowError:
            return _hexadecimal(math.copysign(math.inf, value))
    return str(int(value))


def _hexadecimal(value: float) -> str:
    if value != value:
        return "0x7FF8000000000000"
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def literal(value: float | int | bool, dtype: torch.dtype, lanes: int) -> str:
    """A literal of `dtype` in all lanes."""
    return splat(HELD[dtype], number(value, dtype), lanes)


def is_float(dtype: torch.dtype) -> bool:
    return HELD[dtype] in ("float", "double")


# ---------------------------------------------------------------------------- target


class InsertPoint:
    """Where instructions go: a level, for a machine, `lanes` at a time."""

    __slots__ = ("level", "machine", "lanes", "op")

    def __init__(self, level: Level, machine: Machine, lanes: int) -> None:
        self.level, self.machine, self.lanes, self.op = level, machine, lanes, level.op

    def of(self, lanes: int) -> InsertPoint:
        """The same place, so many lanes at a time."""
        return InsertPoint(self.level, self.machine, lanes)

    def kind(self, dtype: torch.dtype) -> str:
        return vector(HELD[dtype], self.lanes)

    def word(self, value: int) -> str:
        """An i32 in all lanes."""
        return splat("i32", value, self.lanes)

    def intrinsic(self, name: str, kind: str, *operands: str, flag: str = "") -> str:
        """Call llvm.<name> on operands of scalar type `kind`; `flag` is a last i1 operand."""
        full = vector(kind, self.lanes)
        given = [(full, operand) for operand in operands]
        if flag:
            given.append(("i1", flag))
        return self.level.call(full, f"llvm.{name}.{mangled(kind, self.lanes)}", *given)

    def convert(self, op: str, x: str, source: str, result: str) -> str:
        """A conversion instruction between scalar types `source` and `result`."""
        return self.op(f"{op} {vector(source, self.lanes)} {x} to {vector(result, self.lanes)}")

    def apart(self, kind: str, x: str) -> str:
        """What was loaded, so that LLVM makes no masked load of a select and the load before it,
        where such are slow."""
        bits = BITS[kind] * self.lanes
        if self.machine.fetches_masked or bits not in (128, 256, 512):
            return x
        floats, full = f"<{bits // 32} x float>", vector(kind, self.lanes)
        x = self.op(f"bitcast {full} {x} to {floats}")
        name = f"llvm.arithmetic.fence.v{bits // 32}f32"
        return self.op(f"bitcast {floats} {self.level.call(floats, name, (floats, x))} to {full}")

    def select(self, condition: str, kind: str, x: str, y: str) -> str:
        full = vector(kind, self.lanes)
        mask = vector("i1", self.lanes)
        return self.op(f"select {mask} {condition}, {full} {x}, {full} {y}")


# ---------------------------------------------------------------------------- steps
# Sizes that calls differ in are computed by steps, as `fusee/sym/__init__.py: steps` gives them;
# one function of machine code runs them all.

# (operation, a, b, c): numbers 0, 1, .. are the inputs, those after them what the steps give. The
# number c itself, or of the numbers a and b: a + c*b, or what the operation says.
Step = tuple[str, int, int, int]

_OPERATIONS = tuple("number + * min max == != <= & << // %".split())
STEP_WORDS = 4


def step_words(steps: Iterable[Step]) -> list[int]:
    """Steps as they lie in memory."""
    return [word for op, a, b, c in steps for word in (_OPERATIONS.index(op), a, b, c)]


def evaluation() -> str:
    """@evaluate(ptr steps, i64 count, ptr numbers, ptr results): a unit's function.

    What is divided by is positive, or the step gives 0.
    """
    writer = Writer()
    with writer.each("0", "%count") as k:
        level = writer.top
        op, load = level.op, level.load
        at = level.at("%steps", k, f"[{STEP_WORDS} x i64]")
        kind, c = load("i64", at), load("i64", at, 3)
        x, y = (load("i64", "%numbers", load("i64", at, word)) for word in (1, 2))
        values = [c, op(f"add i64 {x}, {op(f'mul i64 {c}, {y}')}"), op(f"mul i64 {x}, {y}")]
        values += [level.extreme(m, x, y) for m in _EXTREMES]
        values += [op(f"zext i1 {op(f'icmp {m} i64 {x}, {y}')} to i64") for m in _COMPARED]
        values += [op(f"and i64 {x}, {y}"), op(f"shl i64 {x}, {op(f'and i64 {y}, 63')}")]
        found = values[0]
        for number, value in enumerate(values[1:], 1):
            found = op(f"select i1 {op(f'icmp eq i64 {kind}, {number}')}, i64 {value}, i64 {found}")

        def divided() -> str:
            bad = op(f"icmp slt i64 {y}, 1")
            over = op(f"select i1 {bad}, i64 1, i64 {y}")
            rest = op(f"srem i64 {x}, {over}")
            less = op(f"icmp slt i64 {rest}, 0")
            rest = op(f"select i1 {less}, i64 {op(f'add i64 {rest}, {over}')}, i64 {rest}")
            quotient = op(f"sdiv i64 {op(f'sub i64 {x}, {rest}')}, {over}")
            is_rest = op(f"icmp eq i64 {kind}, {_OPERATIONS.index('%')}")
            either = op(f"select i1 {is_rest}, i64 {rest}, i64 {quotient}")
            return op(f"select i1 {bad}, i64 0, i64 {either}")

        is_other = op(f"icmp slt i64 {kind}, {len(values)}")
        level.store("i64", level.chosen(is_other, found, divided, "i64"), "%results", k)
    head = "define internal void @evaluate(ptr %steps, i64 %count, ptr %numbers, ptr %results)"
    return writer.module(f"{head} nounwind", "void")


_EXTREMES = ("smin", "smax")
_COMPARED = ("eq", "ne", "sle")
