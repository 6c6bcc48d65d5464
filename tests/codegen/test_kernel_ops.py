"""Every op and cast of the vocabulary, as vectors and tails, against what ATen computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusee.loops import Kernel, Phase, Store, Value, Values, cast, op, where
from fusee.runtime.llvm_text import Machine
from tests.codegen.kernel_run import axes, buffer, machines, run
from tests.loops.interpret import SCALAR

FLOATS = [torch.float32, torch.float64]
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
NARROW = [torch.bfloat16, torch.float16]
ALL = [*FLOATS, *NARROW, *INTS, torch.bool]
MACHINES = pytest.mark.parametrize("on", machines(), ids=lambda m: str(m.bits))


def samples(dtype: torch.dtype, count: int = 75) -> torch.Tensor:
    """Ordinary numbers with the odd ones among them; the count leaves a tail."""
    generator = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator, dtype=torch.bool)
    if dtype.is_floating_point:
        x = (torch.randn(count, generator=generator, dtype=torch.float64) * 5).to(dtype)
        inf, nan = float("inf"), float("nan")
        odd = [0.0, -0.0, inf, -inf, nan, 1e-40, 1.0, -1.0, 2.5, 3.5, 0.5]
        x[3 : 3 + len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)
        return x
    info = torch.iinfo(dtype)
    x = torch.randint(max(info.min, -50), 50, (count,), generator=generator, dtype=dtype)
    odd_ints = [info.min, info.max, 0, 1, info.min, info.max]
    x[5 : 5 + len(odd_ints)] = torch.tensor(odd_ints, dtype=dtype)
    return x


def pointwise(
    inputs: list[torch.Tensor], result: torch.dtype, make: object, on: Machine
) -> torch.Tensor:
    """One lanes axis over vectors; `make` builds the value from the loads."""
    values, n = Values(), inputs[0].numel()
    out = torch.empty(n, dtype=result)
    buffers = [buffer(f"x{k}", x) for k, x in enumerate(inputs)]
    target = buffer("out", out, "result")
    (i,) = axes("i", [n])
    value: Value = make(*[values.load(b, i.expr) for b in buffers])  # type: ignore[operator]
    kernel = Kernel((i,), [Phase((), [Store(target, i.expr, value)])], lanes=i)
    run(kernel, dict(zip(buffers, inputs, strict=True)) | {target: out}, on=on, parts=2)
    return out


def same(got: torch.Tensor, want: torch.Tensor, rtol: float = 0, atol: float = 0) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, equal_nan=True, rtol=rtol, atol=atol)


BINARY = ("add sub mul div minimum maximum eq ne lt le gt ge copysign fmod atan2 nextafter").split()
UNARY = (
    "neg abs floor ceil trunc round sqrt rsqrt isnan isinf signbit exp tanh erf sin log log1p"
).split()
# sqrt: MKL, which ATen calls for it, does not always round to nearest
EXACT = frozenset(UNARY) - {"sqrt", "exp", "tanh", "erf", "sin", "log", "log1p", "rsqrt"}


@MACHINES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_ops(dtype: torch.dtype, on: Machine) -> None:
    x = samples(dtype)
    y = x.roll(7)
    for name in BINARY:
        if name == "fmod":  # SLEEF, and so ATen, gives NaN for quotients beyond its range
            y = torch.where(y.abs() < 1e-30, torch.zeros_like(y), y)
        want = SCALAR[name](x, y)
        got = pointwise([x, y], want.dtype, lambda a, b, name=name: op(name, a, b), on)
        same(got, want, **({} if name != "atan2" else {"rtol": 1e-6, "atol": 1e-7}))
    for name in UNARY:
        want = SCALAR[name](x)
        got = pointwise([x], want.dtype, lambda a, name=name: op(name, a), on)
        same(got, want, **({} if name in EXACT else {"rtol": 2e-6, "atol": 1e-7}))
    got = pointwise([x, y], dtype, lambda a, b: op("fma", a, b, a), on)
    same(got, (x.double() * y.double() + x.double()).to(dtype), rtol=1e-6, atol=1e-45)


@MACHINES
def test_signs_of_zero(on: Machine) -> None:
    x = samples(torch.float32)
    got = pointwise([x], torch.float32, lambda a: op("neg", a), on)
    assert torch.equal(torch.signbit(got), torch.signbit(-x))
    got = pointwise([x], torch.float32, lambda a: op("round", a), on)
    assert torch.equal(torch.signbit(got), torch.signbit(torch.round(x)))


@MACHINES
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integer_ops(dtype: torch.dtype, on: Machine) -> None:
    x = samples(dtype)
    y = x.roll(3)
    safe = torch.where(y == 0, torch.ones_like(y), y)
    least = torch.iinfo(dtype).min
    # torch itself traps on the least number by -1
    safe = torch.where((x == least) & (safe == -1), torch.ones_like(y), safe) if least else safe
    binary: dict[str, Callable[..., torch.Tensor]] = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "minimum": torch.minimum,
        "maximum": torch.maximum,
        "eq": torch.eq,
        "lt": torch.lt,
        "ge": torch.ge,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
        "floordiv": torch.floor_divide,
        "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "remainder": torch.remainder,
        "fmod": torch.fmod,
    }
    for name, reference in binary.items():
        other = safe if name in ("floordiv", "truncdiv", "remainder", "fmod") else y
        want = reference(x, other)
        same(pointwise([x, other], want.dtype, lambda a, b, name=name: op(name, a, b), on), want)
    for name, reference in {"neg": torch.neg, "abs": torch.abs, "not": torch.bitwise_not}.items():
        same(pointwise([x], dtype, lambda a, name=name: op(name, a), on), reference(x))


@MACHINES
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_division_never_traps(dtype: torch.dtype, on: Machine) -> None:
    x = samples(dtype)
    for other in (torch.zeros_like(x), torch.full_like(x, -1 if dtype.is_signed else 255)):
        for name in ("floordiv", "truncdiv", "remainder", "fmod"):
            got = pointwise([x, other], dtype, lambda a, b, name=name: op(name, a, b), on)
            if other[0] and name == "truncdiv" and dtype.is_signed:
                same(got, -x)


@MACHINES
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_shifts(dtype: torch.dtype, on: Machine) -> None:
    x = samples(dtype)
    by = torch.arange(x.numel()).remainder(70).to(dtype)
    if dtype.is_signed:
        by[::9] = -1
    got = pointwise([x, by], dtype, lambda a, b: op("shl", a, b), on)
    same(got, torch.bitwise_left_shift(x, by))
    got = pointwise([x, by], dtype, lambda a, b: op("shr", a, b), on)
    same(got, torch.bitwise_right_shift(x, by))


@MACHINES
def test_bool_ops(on: Machine) -> None:
    x = samples(torch.bool)
    y = x.roll(1)
    for name, reference in {
        "and": torch.logical_and,
        "or": torch.logical_or,
        "xor": torch.logical_xor,
        "eq": torch.eq,
        "ne": torch.ne,
        "lt": torch.lt,
        "ge": torch.ge,
    }.items():
        same(
            pointwise([x, y], torch.bool, lambda a, b, name=name: op(name, a, b), on),
            reference(x, y),
        )
    same(pointwise([x], torch.bool, lambda a: op("not", a), on), ~x)


@MACHINES
@pytest.mark.parametrize("source", ALL, ids=str)
def test_casts(source: torch.dtype, on: Machine) -> None:
    x = samples(source)
    for result in ALL:
        given = x
        if source.is_floating_point and not (result.is_floating_point or result is torch.bool):
            # what lies outside is undefined in C++, and ATen's vectors and tails differ there
            given = torch.where(x.isfinite() & (x.double().abs() < 120), x, torch.zeros_like(x))
            given = given.abs() if result is torch.uint8 else given
        got = pointwise([given], result, lambda a, result=result: cast(a, result), on)
        same(got, given.to(result))


@MACHINES
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_round_to_even(dtype: torch.dtype, on: Machine) -> None:
    """All neighbours of all halves: exact, tie and one bit to either side of it."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    exact = bits.view(dtype)
    same(pointwise([exact], torch.float32, lambda a: cast(a, torch.float32), on), exact.float())
    wide = exact[exact.isfinite()].float().view(torch.int32)
    tie = 1 << (15 if dtype is torch.bfloat16 else 12)
    for offset in (tie, tie - 1, tie + 1):
        x = (wide + offset).view(torch.float32)
        same(pointwise([x], dtype, lambda a: cast(a, dtype), on), x.to(dtype))
    x = torch.tensor([65519.0, 65520.0, 1e38, 3.4e38, 1e-8, 6e-8, 2.9e-8, -1e-30])
    same(pointwise([x], dtype, lambda a: cast(a, dtype), on), x.to(dtype))


@MACHINES
def test_out_of_range_casts_are_those_of_the_processor(on: Machine) -> None:
    x = torch.tensor([3e9, -3e9, 1e20, float("nan"), float("inf"), 300.0, -5.0, 70000.0] * 4)
    same(pointwise([x], torch.int32, lambda a: cast(a, torch.int32), on), x.to(torch.int32))
    same(pointwise([x], torch.int64, lambda a: cast(a, torch.int64), on), x.to(torch.int64))


@MACHINES
def test_where_and_bitcast(on: Machine) -> None:
    x, y = samples(torch.float32), samples(torch.float32).roll(5)
    condition = samples(torch.bool)
    got = pointwise([condition, x, y], torch.float32, where, on)
    same(got, torch.where(condition, x, y))

    def bits(a: Value) -> Value:
        return a.table.make("bitcast", (a,), torch.int32)

    same(pointwise([x], torch.int32, bits, on), x.view(torch.int32))

    def half_bits(a: Value) -> Value:
        return a.table.make("bitcast", (a,), torch.int16)

    z = samples(torch.bfloat16)
    same(pointwise([z], torch.int16, half_bits, on), z.view(torch.int16))


@MACHINES
def test_literals(on: Machine) -> None:
    x = samples(torch.float32)
    for number in (0.1, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.4e38, 1e300):
        got = pointwise([x], torch.float32, lambda a, c=number: a.table.const(c, a.dtype), on)
        same(got, torch.full_like(x, float("inf") if number > 1e39 else number))
