"""Bernoulli numbers of torch's CPU generator, several times faster than its own kernel draws them.

ATen steps its Mersenne Twister one number at a time, in one thread: 7 ns per element of a dropout
mask. Vectors take the same steps in 1 ns. The generator's state goes in and out through get_state
and set_state, so the stream is eager's, before, within and after. Where a trial shows another
stream (a build of torch that draws otherwise) ATen draws.

source   aten/src/ATen/core/MT19937RNGEngine.h, DistributionsHelper.h, CPUGeneratorImpl.cpp
         Tested with torch 2.13; `_drawer` tries out any other
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusee.runtime.jit import compile_one

__all__ = ["bernoulli", "redrawn"]

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


def bernoulli(p: float, *, out: Tensor) -> Tensor:
    """Fill `out`, dense and of dtype bool, with what `out.bernoulli_(p)` draws, in memory's order.

    raises   RuntimeError as torch does if p is no probability
    """
    draw = _drawer()
    if draw is None or not 0 <= p <= 1:
        return out.bernoulli_(p)
    generator = torch.default_generator
    state = generator.get_state()
    # Python's lock is held: nobody else draws from this state in the meantime
    draw(state.data_ptr(), out.data_ptr(), out.numel(), math.ceil(p * 2.0**53))
    generator.set_state(state)
    return out


def redrawn(state: Tensor, size: Sequence[int], p: float) -> Tensor:
    """What `bernoulli` has drawn from this state of the generator, which stays as it is."""
    out = torch.empty(size, dtype=torch.bool)
    draw = _drawer()
    if draw is None or not 0 <= p <= 1:
        generator = torch.Generator()
        generator.set_state(state)
        return out.bernoulli_(p, generator=generator)
    copy = state.clone()
    draw(copy.data_ptr(), out.data_ptr(), out.numel(), math.ceil(p * 2.0**53))
    return out


@functools.cache
def _drawer() -> Callable[[int, int, int, int], None] | None:
    """draw(state, out, count, threshold); None if its stream is not that of this torch."""
    function = compile_one(_text())
    draw = ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 4)(function.address)
    draw.keep = function  # type: ignore[attr-defined]
    generator = torch.default_generator
    before = generator.get_state()
    try:
        return draw if before.numel() == _BYTES and _is_same_stream(draw, generator) else None
    finally:
        generator.set_state(before)


def _is_same_stream(draw: Callable[[int, int, int, int], None], generator: torch.Generator) -> bool:
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
                return False
    return True


# ------------------------------------------------------------------------------ machine code


def _vector(kind: str, lanes: int) -> str:
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def _all(number: int, lanes: int, kind: str = "i32") -> str:
    return str(number) if lanes == 1 else f"splat ({kind} {number})"


def _loop(name: str, start: int, stop: int, step: int, body: str, before: str, after: str) -> str:
    """for %NAME in range(start, stop, step): body. Comes from block `before`, goes to `after`."""
    return f"""
{name}.loop:
  %{name} = phi i64 [{start}, %{before}], [%{name}.next, %{name}.loop]
{body}
  %{name}.next = add i64 %{name}, {step}
  %{name}.more = icmp slt i64 %{name}.next, {stop}
  br i1 %{name}.more, label %{name}.loop, label %{after}"""


def _twisted(name: str, ahead: int, lanes: int) -> str:
    """s[i] = s[i + ahead] ^ mix(s[i], s[i + 1]), for as many i as there are lanes."""
    v, x = _vector("i32", lanes), f"%{name}"
    return f"""
  {x}.p = getelementptr i32, ptr %s, i64 {x}
  {x}.q = getelementptr i32, ptr {x}.p, i64 1
  {x}.r = getelementptr i32, ptr {x}.p, i64 {ahead}
  {x}.u = load {v}, ptr {x}.p, align 4
  {x}.v = load {v}, ptr {x}.q, align 4
  {x}.w = load {v}, ptr {x}.r, align 4
  {x}.high = and {v} {x}.u, {_all(-(1 << 31), lanes)}
  {x}.low = and {v} {x}.v, {_all((1 << 31) - 1, lanes)}
  {x}.both = or {v} {x}.high, {x}.low
  {x}.half = lshr {v} {x}.both, {_all(1, lanes)}
  {x}.odd = and {v} {x}.v, {_all(1, lanes)}
  {x}.sign = sub {v} {_all(0, lanes)}, {x}.odd
  {x}.a = and {v} {x}.sign, {_all(0x9908B0DF - (1 << 32), lanes)}
  {x}.b = xor {v} {x}.half, {x}.a
  {x}.c = xor {v} {x}.w, {x}.b
  store {v} {x}.c, ptr {x}.p, align 4"""


def _tempered(name: str, lanes: int) -> str:
    """Finished words from those of the state."""
    v, x = _vector("i32", lanes), f"%{name}"
    return f"""
  {x}.p = getelementptr i32, ptr %s, i64 {x}
  {x}.0 = load {v}, ptr {x}.p, align 4
  {x}.1 = lshr {v} {x}.0, {_all(11, lanes)}
  {x}.2 = xor {v} {x}.0, {x}.1
  {x}.3 = shl {v} {x}.2, {_all(7, lanes)}
  {x}.4 = and {v} {x}.3, {_all(0x9D2C5680 - (1 << 32), lanes)}
  {x}.5 = xor {v} {x}.2, {x}.4
  {x}.6 = shl {v} {x}.5, {_all(15, lanes)}
  {x}.7 = and {v} {x}.6, {_all(0xEFC60000 - (1 << 32), lanes)}
  {x}.8 = xor {v} {x}.5, {x}.7
  {x}.9 = lshr {v} {x}.8, {_all(18, lanes)}
  {x}.10 = xor {v} {x}.8, {x}.9
  {x}.q = getelementptr i32, ptr %w, i64 {x}
  {x}.r = getelementptr i32, ptr {x}.q, i64 {_FIRST}
  store {v} {x}.10, ptr {x}.r, align 4"""


def _compared(name: str, lanes: int) -> str:
    """Two words each, the first one high, as a number of 53 bits: below the threshold or not."""
    v, b, x = _vector("i64", lanes), _vector("i8", lanes), f"%{name}"
    bits = _vector("i1", lanes)
    half, mask = (_all(n, lanes, "i64") for n in (32, _MASK))
    limit = "%threshold" if lanes == 1 else "%limits"
    return f"""
  {x}.twice = shl i64 {x}, 1
  {x}.at = add i64 {x}.twice, %pos
  {x}.p = getelementptr i32, ptr %w, i64 {x}.at
  {x}.0 = load {v}, ptr {x}.p, align 4
  {x}.1 = shl {v} {x}.0, {half}
  {x}.2 = lshr {v} {x}.0, {half}
  {x}.3 = or {v} {x}.1, {x}.2
  {x}.4 = and {v} {x}.3, {mask}
  {x}.5 = icmp slt {v} {x}.4, {limit}
  {x}.6 = zext {bits} {x}.5 to {b}
  {x}.q = getelementptr i8, ptr %to, i64 {x}
  store {b} {x}.6, ptr {x}.q, align 1"""


def _text() -> str:
    n, v = _WORDS, _vector("i64", _LANES)
    parts = (_drawing(), _refilling(), _putting_back())
    return f"""
define void @kernel(ptr %state, ptr %out, i64 %count, i64 %threshold) {{
entry:
  %s = alloca [{n + 16} x i32], align 64
  %w = alloca [{_END + 16} x i32], align 64
  %one = insertelement {v} poison, i64 %threshold, i64 0
  %limits = shufflevector {v} %one, {v} poison, <{_LANES} x i32> zeroinitializer
  %left.at = getelementptr i8, ptr %state, i64 {_LEFT}
  %next.at = getelementptr i8, ptr %state, i64 {_NEXT}
  %words = getelementptr i8, ptr %state, i64 {_STATE}
  %left = load i32, ptr %left.at
  %there = sub i32 %left, 1
  %there.wide = zext i32 %there to i64
  %start = sub i64 {_END}, %there.wide
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %get.loop, label %exit
{_loop("get", 0, n, 1, _GET, "entry", "old.loop")}
{_loop("old", 0, n, _LANES, _tempered("old", _LANES), "get.loop", "round")}
{"".join(parts)}
exit:
  ret void
}}
"""


_GET = """
  %get.p = getelementptr i64, ptr %words, i64 %get
  %get.0 = load i64, ptr %get.p, align 1
  %get.1 = trunc i64 %get.0 to i32
  %get.q = getelementptr i32, ptr %s, i64 %get
  store i32 %get.1, ptr %get.q"""
_PUT = """
  %put.p = getelementptr i32, ptr %s, i64 %put
  %put.0 = load i32, ptr %put.p
  %put.1 = zext i32 %put.0 to i64
  %put.q = getelementptr i64, ptr %words, i64 %put
  store i64 %put.1, ptr %put.q, align 1"""


def _drawing() -> str:
    """Results from the finished words from %pos on, as many as there are or are wanted."""
    return f"""
round:
  %pos = phi i64 [%start, %old.loop], [%again, %new.loop]
  %to = phi ptr [%out, %old.loop], [%to.next, %new.loop]
  %todo = phi i64 [%count, %old.loop], [%todo.next, %new.loop]
  %words.there = sub i64 {_END}, %pos
  %pairs = lshr i64 %words.there, 1
  %is.enough = icmp sge i64 %pairs, %todo
  %now = select i1 %is.enough, i64 %todo, i64 %pairs
  %whole = and i64 %now, {-_LANES}
  %any.whole = icmp sgt i64 %whole, 0
  br i1 %any.whole, label %many.loop, label %singles
many.loop:
  %many = phi i64 [0, %round], [%many.next, %many.loop]
{_compared("many", _LANES)}
  %many.next = add i64 %many, {_LANES}
  %many.more = icmp slt i64 %many.next, %whole
  br i1 %many.more, label %many.loop, label %singles
singles:
  %any.single = icmp slt i64 %whole, %now
  br i1 %any.single, label %single.loop, label %taken
single.loop:
  %single = phi i64 [%whole, %singles], [%single.next, %single.loop]
{_compared("single", 1)}
  %single.next = add i64 %single, 1
  %single.more = icmp slt i64 %single.next, %now
  br i1 %single.more, label %single.loop, label %taken
taken:
  %twice = shl i64 %now, 1
  %after = add i64 %pos, %twice
  %to.next = getelementptr i8, ptr %to, i64 %now
  %todo.next = sub i64 %todo, %now
  %done = icmp eq i64 %todo.next, 0
  br i1 %done, label %put.loop, label %refill
"""


def _refilling() -> str:
    """The next round of the twister; a word that was left over stays before its words."""
    n, ahead, back = _WORDS, _HALF, _HALF - _WORDS
    middle = n - _HALF
    first = middle // _LANES * _LANES
    second = middle + (n - 1 - middle) // _LANES * _LANES
    return f"""
refill:
  %last.at = getelementptr i32, ptr %w, i64 {_END - 1}
  %last = load i32, ptr %last.at
  %carry.at = getelementptr i32, ptr %w, i64 {_FIRST - 1}
  store i32 %last, ptr %carry.at
  %over = sub i64 {_END}, %after
  %again = sub i64 {_FIRST}, %over
  br label %a.loop
{_loop("a", 0, first, _LANES, _twisted("a", ahead, _LANES), "refill", "b.loop")}
{_loop("b", first, middle, 1, _twisted("b", ahead, 1), "a.loop", "c.loop")}
{_loop("c", middle, second, _LANES, _twisted("c", back, _LANES), "b.loop", "d.start")}
d.start:
  ; the word after the last one is the first
  %first.word = load i32, ptr %s
  %beyond = getelementptr i32, ptr %s, i64 {n}
  store i32 %first.word, ptr %beyond
  br label %d.loop
{_loop("d", second, n, 1, _twisted("d", back, 1), "d.start", "new.loop")}
{_loop("new", 0, n, _LANES, _tempered("new", _LANES), "d.loop", "round")}
"""


def _putting_back() -> str:
    return f"""
{_loop("put", 0, _WORDS, 1, _PUT, "taken", "finish")}
finish:
  %used = sub i64 %after, {_FIRST}
  store i64 %used, ptr %next.at
  %used.short = trunc i64 %used to i32
  %left.new = sub i32 {_WORDS + 1}, %used.short
  store i32 %left.new, ptr %left.at
  br label %exit
"""
