"""The CPU: loops as LLVM IR with explicit vectors, layers as calls of oneDNN and ATen, random
numbers as torch's generator draws them.

The overload `torch.ops.aten.mm.out` costs 3 to 5 us a call, the builtin `torch.mm` 1 to 2 us with
the same arguments (benchmarks.md, Externs). With `out` the result goes straight into the arena:
nothing is allocated, and no fresh page is touched. Operators without a row are called by their
overload. `out` needs grad mode off where a parameter is among the arguments.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten.attention import fuse_attention
from fusee.aten.rewriter import Pass
from fusee.aten.torch_api import recurrent_layer
from fusee.aten.weights import fold_norm
from fusee.autodiff import REDRAWN
from fusee.autodiff.min_cut import Prices
from fusee.codegen.llvm import KernelCode, emit_kernel
from fusee.codegen.llvm.ops import given_numbers
from fusee.config import Options
from fusee.fake.rules import LAYERS
from fusee.loops import Kernel, Message, Profile, Value
from fusee.loops.lower import ExternSpec
from fusee.loops.schedule import Given
from fusee.runtime import jit
from fusee.runtime.jit import Build, compile_one
from fusee.runtime.launch import LaunchFrame, runner
from fusee.runtime.llvm_text import Level, Machine, Writer, splat, vector
from fusee.sym import substitute, symbols
from fusee.targets import PRODUCTS, Emitted, Kept, Loaded, Target, load_graph
from fusee.targets.cpu.onednn import (
    channels_last,
    for_any_size,
    improves,
    packed,
    postops,
    prepack,
    upcast,
)

aten = torch.ops.aten

PASSES: tuple[Pass, ...] = (fold_norm, upcast, fuse_attention, channels_last, prepack, postops)

# By vendor; bench/prices.py writes it.
PRICES = Path(__file__).with_name("prices_by_vendor.json")

# What keeps results derived from parameters; without it only what helps by itself runs.
_NEEDS_DERIVED: frozenset[Pass] = frozenset({fold_norm, prepack, postops})


def vendor() -> str:
    """Whose prices are the nearest: "intel", or "amd". MKL has kernels for Intel's alone."""
    try:
        with open("/proc/cpuinfo") as lines:
            return "intel" if "GenuineIntel" in lines.read(1 << 12) else "amd"
    except OSError:
        return "amd"


def prices_of(whose: str) -> Prices:
    """Measured by bench/prices.py on a processor of that vendor.

    What a usual loop takes is memory for the most part: `near` is a share of it.
    """
    own = json.loads(PRICES.read_text())[whose]
    return Prices(own=own, near=0.6 * own[""][1])


class CPU(Target):
    """See fusee.targets.Target."""

    # 16: points that give work to the threads of a processor; float32 elements of its widest
    # vector. What LLVM compiles takes longer the larger it is, and processors overlap the next
    # vector's work with this one's only in short bodies. Gathers are made lane by lane.
    profile = Profile(parallel=16, lanes=8, wide=16, gather=12)
    prices = prices_of(vendor())
    device = torch.device("cpu")

    def passes(self, options: Options) -> Sequence[Pass]:
        return [p for p in PASSES if options.derive_weights or p not in _NEEDS_DERIVED]

    def improves(self, node: fx.Node, static: Collection[fx.Node]) -> bool:
        return improves(node, static)

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        if op.namespace == "mkldnn":
            return _packed_rows().get(op) or ExternSpec(op, owns=True)
        return ExternSpec(op) if op.namespace == "mkl" else EXTERNS.get(op)

    def settings(self) -> Hashable:
        return bool(torch.backends.mkldnn.enabled)

    def build(self, options: Options) -> Build:
        return Build(use_disk=options.cache, check=options.check)

    def code_of(
        self, messages: Sequence[Message], options: Options
    ) -> Callable[[Kernel], KernelCode]:
        machine = Machine(jit.host_target().features, options.vector_bits)
        return functools.partial(emit_kernel, machine=machine)

    def given(self, kernel: Kernel) -> Mapping[Value, Given]:
        return given_numbers(kernel)

    def load(self, emitted: Emitted, build: Build, kept: Kept, options: Options) -> Loaded:
        sizes = tuple(emitted.arguments.sizes)

        def fail(status: int, frame: LaunchFrame) -> None:
            kind, text, _, size = emitted.messages[status - 1]
            known = dict(zip(sizes, frame.sizes, strict=True))
            values = {s: known[s.name] for s in symbols(size) if s.name in known}
            raise kind(text.format(frame.value, size=substitute(size, values)))

        threads = options.threads
        names = {
            "run": runner(),
            "threads": itertools.repeat(threads).__next__ if threads else torch.get_num_threads,
            "fail": fail,
        }
        run, uses = load_graph(emitted.host, build, kept, names)
        return Loaded(run, uses=uses)


TARGET = CPU()


# ---------------------------------------------------------------------------- random numbers
# Bernoulli numbers of torch's CPU generator, several times faster than its own kernel draws them.
#
# ATen steps its Mersenne Twister one number at a time, in one thread: 7 ns per element of a dropout
# mask. Vectors take the same steps in 1 ns. The generator's state goes in and out through get_state
# and set_state, so the stream is eager's, before, within and after. Where a trial shows another
# stream (a build of torch that draws otherwise) ATen draws.
#
# source   aten/src/ATen/core/MT19937RNGEngine.h, DistributionsHelper.h, CPUGeneratorImpl.cpp
#          Tested with torch 2.13; `_drawer` tries out any other

# Bytes of a state, and where it holds: words left before the next round (32 bits), which word comes
# next and the words themselves (64 bits each).
_BYTES, _LEFT, _NEXT, _STATE = 5056, 8, 16, 24

_WORDS, _HALF = 624, 397
_LANES = 8
# The buffer of finished words starts after room for one that was left over.
_FIRST = 16
_END = _FIRST + _WORDS
_MASK = (1 << 53) - 1

_TRIALS = (1, 2, 311, 313, 700)


def bernoulli(*given: float, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill `out`, which is dense, with what `out.bernoulli_(p)` draws, in memory's order.

    given    p, last
    raises   RuntimeError as torch does if p is no probability
    """
    *_, p = given
    draw, generator = _drawer(), generator or torch.default_generator
    if draw is None or not 0 <= p <= 1 or out.dtype is not torch.bool:
        return out.bernoulli_(p, generator=generator)
    state = generator.get_state()
    # Python's lock is held: nobody else draws from this state in the meantime
    draw(state.data_ptr(), out.data_ptr(), out.numel(), math.ceil(p * 2.0**53))
    generator.set_state(state)
    return out


def redrawn(state: Tensor, size: Sequence[int], p: float) -> Tensor:
    """What `bernoulli` has drawn from this state of the generator, which stays as it is."""
    generator = torch.Generator()
    generator.set_state(state)
    return bernoulli(p, out=torch.empty(size, dtype=torch.bool), generator=generator)


@functools.cache
def _drawer() -> Callable[[int, int, int, int], None] | None:
    """draw(state, out, count, threshold); None if its stream is not that of this torch."""
    function = compile_one(_draw())
    draw = ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 4)(function.address)
    draw.keep = function  # type: ignore[attr-defined]
    generator = torch.default_generator
    before = generator.get_state()
    if before.numel() != _BYTES:
        return None
    try:
        for seed, count in enumerate(_TRIALS):
            for offset in (0, 1, 5):
                generator.manual_seed(seed)
                torch.rand(offset)  # from the second word on, pairs straddle rounds
                state = generator.get_state()
                want = torch.empty(count, dtype=torch.bool).bernoulli_(0.7)
                after = generator.get_state()
                got = torch.empty(count, dtype=torch.bool)
                draw(state.data_ptr(), got.data_ptr(), count, math.ceil(0.7 * 2.0**53))
                if not torch.equal(got, want) or not torch.equal(state, after):
                    return None
        return draw
    finally:
        generator.set_state(before)


# ------------------------------------------------------------------------------ machine code


class _Lanes:
    """Arithmetic on `lanes` integers of a kind; numbers are the same in all lanes."""

    def __init__(self, level: Level, kind: str, lanes: int) -> None:
        self.level, self.kind, self.lanes = level, kind, lanes
        self.type = vector(kind, lanes)

    def __call__(self, op: str, x: str, y: str | int) -> str:
        other = splat(self.kind, str(y), self.lanes) if isinstance(y, int) else y
        return self.level.op(f"{op} {self.type} {x}, {other}")

    def load(self, base: str, offset: str) -> str:
        at = self.level.at(base, offset, "i32")
        return self.level.op(f"load {self.type}, ptr {at}, align 4")

    def store(self, value: str, base: str, offset: str) -> None:
        at = self.level.at(base, offset, "i32")
        self.level.do(f"store {self.type} {value}, ptr {at}, align 4")


def _draw() -> str:
    """draw(state, out, count, threshold) as a unit."""
    writer = Writer()
    top = writer.top
    op = top.op
    state = op(f"alloca [{_WORDS + 16} x i32], align 64")
    ready = op(f"alloca [{_END + 16} x i32], align 64")  # finished words
    top.leave(op("icmp sle i64 %count, 0"), lambda: "void")
    kept = top.at("%state", _STATE)
    left = op(f"sub i32 {top.load('i32', '%state', _LEFT, 'i8')}, 1")
    there = op(f"zext i32 {left} to i64")
    limits = op(f"insertelement <{_LANES} x i64> poison, i64 %threshold, i64 0")
    limits = top.shuffle(f"<{_LANES} x i64>", limits, "poison", [0] * _LANES)
    with writer.each("0", str(_WORDS)) as k:
        word = writer.top.op(f"trunc i64 {writer.top.load('i64', kept, k)} to i32")
        writer.top.store("i32", word, state, k, "i32")
    _temper(writer, state, ready)
    # so many rounds more as give the words that are missing, and one for those that are there
    missing = op(f"sub i64 {op('shl i64 %count, 1')}, {there}")
    rounds = op(f"add i64 {missing}, {2 * _WORDS - 1}")
    rounds = top.extreme("smax", rounds, str(_WORDS))
    rounds = op(f"udiv i64 {rounds}, {_WORDS}")
    begin = [("i64", op(f"sub i64 {_END}, {there}")), ("ptr", "%out"), ("i64", "%count")]
    with writer.loop("0", rounds, 1, begin) as (number, (at, to, todo), after):
        level = writer.top
        first = level.op(f"icmp eq i64 {number}, 0")
        at = level.chosen(first, at, functools.partial(_refill, writer, state, ready, at), "i64")
        pairs = level.op(f"lshr i64 {level.op(f'sub i64 {_END}, {at}')}, 1")
        now = level.extreme("smin", pairs, todo)
        whole = level.op(f"and i64 {now}, {-_LANES}")
        words = level.at(ready, at, "i32")
        parts = ("0", whole, _LANES, limits), (whole, now, 1, "%threshold")
        for start, stop, lanes, limit in parts:
            with writer.each(start, stop, lanes) as k:
                # two words each, the first one high, as a number of 53 bits: below it or not
                level, on = writer.top, _Lanes(writer.top, "i64", lanes)
                pair = on.load(words, level.op(f"shl i64 {k}, 1"))
                turned = on("or", on("shl", pair, 32), on("lshr", pair, 32))
                below = on("icmp slt", on("and", turned, _MASK), limit)
                drawn = level.op(f"zext {vector('i1', lanes)} {below} to {vector('i8', lanes)}")
                level.store(vector("i8", lanes), drawn, to, k, "i8")
        level = writer.top
        after.append(level.op(f"add i64 {at}, {level.op(f'shl i64 {now}, 1')}"))
        after += [level.at(to, now), level.op(f"sub i64 {todo}, {now}")]
    with writer.each("0", str(_WORDS)) as k:
        word = writer.top.op(f"zext i32 {writer.top.load('i32', state, k, 'i32')} to i64")
        writer.top.store("i64", word, kept, k)
    used = op(f"sub i64 {after[0]}, {_FIRST}")
    top.store("i64", used, "%state", _NEXT, "i8")
    used = op(f"trunc i64 {used} to i32")
    top.store("i32", op(f"sub i32 {_WORDS + 1}, {used}"), "%state", _LEFT, "i8")
    parameters = "ptr %state, ptr %out, i64 %count, i64 %threshold"
    return writer.module(f"define void @kernel({parameters})", "void")


def _temper(writer: Writer, state: str, ready: str) -> None:
    """Finished words from those of the state."""
    with writer.each("0", str(_WORDS), _LANES) as k:
        on = _Lanes(writer.top, "i32", _LANES)
        x = on.load(state, k)
        x = on("xor", x, on("lshr", x, 11))
        x = on("xor", x, on("and", on("shl", x, 7), 0x9D2C5680 - (1 << 32)))
        x = on("xor", x, on("and", on("shl", x, 15), 0xEFC60000 - (1 << 32)))
        on.store(on("xor", x, on("lshr", x, 18)), ready, writer.top.op(f"add i64 {k}, {_FIRST}"))


def _refill(writer: Writer, state: str, ready: str, at: str) -> str:
    """The next round of the twister, and where its words begin.

    A word that was left over stays before them.
    """
    level = writer.top
    last = level.load("i32", ready, _END - 1, "i32")
    level.store("i32", last, ready, _FIRST - 1, "i32")
    middle = _WORDS - _HALF
    first = middle // _LANES * _LANES
    second = middle + (_WORDS - 1 - middle) // _LANES * _LANES
    _twist(writer, state, (0, first), _HALF, _LANES)
    _twist(writer, state, (first, middle), _HALF, 1)
    _twist(writer, state, (middle, second), _HALF - _WORDS, _LANES)
    # the word after the last one is the first
    level.store("i32", level.load("i32", state), state, _WORDS, "i32")
    _twist(writer, state, (second, _WORDS), _HALF - _WORDS, 1)
    _temper(writer, state, ready)
    return level.op(f"add i64 {level.op(f'sub i64 {at}, {_END}')}, {_FIRST}")


def _twist(writer: Writer, state: str, part: tuple[int, int], ahead: int, lanes: int) -> None:
    """s[i] = s[i + ahead] ^ mix(s[i], s[i + 1]) for a part of the words, in their order."""
    with writer.each(str(part[0]), str(part[1]), lanes) as k:
        level = writer.top
        on = _Lanes(level, "i32", lanes)
        x, following, far = (
            on.load(state, level.op(f"add i64 {k}, {step}")) for step in (0, 1, ahead)
        )
        both = on("or", on("and", x, -(1 << 31)), on("and", following, (1 << 31) - 1))
        sign = level.op(f"sub {on.type} {splat('i32', '0', lanes)}, {on('and', following, 1)}")
        mixed = on("xor", on("lshr", both, 1), on("and", sign, 0x9908B0DF - (1 << 32)))
        on.store(on("xor", far, mixed), state, k)


# ---------------------------------------------------------------------------- externs


EXTERNS: dict[OpOverload, ExternSpec] = {
    **PRODUCTS,
    aten.linear.default: ExternSpec(aten.linear.default, owns=True),
    aten.scaled_dot_product_attention.default: ExternSpec(
        aten.scaled_dot_product_attention.default
    ),
    aten.mkldnn_rnn_layer.default: ExternSpec(recurrent_layer, exact=True),
    # `torch.lstm` of aten.lstm.input
    **{
        op: ExternSpec(getattr(torch, op._schema.name.partition("::")[2]), exact=True)
        for op in LAYERS
    },
    # machine code of ours
    aten.bernoulli.p: ExternSpec(torch.bernoulli, bernoulli),
    REDRAWN: ExternSpec(redrawn),
}


@functools.cache
def _packed_rows() -> dict[OpOverload, ExternSpec]:
    ops = packed()
    if ops is None:
        return {}
    alone, summed = ExternSpec(ops.conv, owns=True), ExternSpec(ops.conv_binary, owns=True)
    alone = alone._replace(any_size=alone._replace(call=for_any_size(ops.conv)))
    summed = summed._replace(in_place=ops.conv_binary_inplace, operand=1)
    calls = for_any_size(ops.conv_binary), for_any_size(ops.conv_binary_inplace)
    summed = summed._replace(any_size=summed._replace(call=calls[0], in_place=calls[1]))
    return {ops.conv: alone, ops.conv_binary: summed}
