"""The vocabulary is complete: every row, for every dtype it admits, does what torch does.

What IEEE arithmetic or the integers define must be equal, to the sign of a zero. Of the elementary
functions the error against float64 may be twice what eager's is.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from fusee.loops import SCALAR_OPS, SPECIAL_OPS, Kernel, Phase, Store, Value, Values, op
from fusee.runtime.llvm_text import Machine
from tests.codegen.kernel_run import axes, buffer, machines, run
from tests.loops.interpret import SCALAR

FLOATS = [torch.float32, torch.float64]
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
# torch stores these and computes next to nothing with them: Python's integers are the reference
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
KINDS = {"f": FLOATS, "i": [*INTS, *UNSIGNED], "b": [torch.bool]}

Operation = Callable[..., torch.Tensor]

NEAR: dict[str, Operation] = {
    name: SCALAR[name]
    for name in (
        "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
        "asinh acosh atanh erf erfc lgamma pow atan2 hypot"
    ).split()
}
EXACT: dict[str, Operation] = {
    **{name: function for name, function in SCALAR.items() if name not in {*NEAR, "fma"}},
    "floordiv": torch.floor_divide,
}
UNBOUNDED: dict[str, Callable[..., int]] = {
    "minimum": min,
    "maximum": max,
    "floordiv": operator.floordiv,
    "truncdiv": operator.floordiv,  # of what is not negative
    "remainder": operator.mod,
    "fmod": operator.mod,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "shl": operator.lshift,
    "shr": operator.rshift,
}
ROWS = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, row in SCALAR_OPS.items()
    for kind in row.kinds
    for dtype in KINDS[kind]
]
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 2.0, -3.0, 1e-40, -1e-40, 1e-45, 1.2e-38, 3.4e38, -3.4e38,
    1e30, 88.6, -88.0, 1e5, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip


def test_every_row_has_a_reference() -> None:
    assert set(SCALAR_OPS) == {*EXACT, *NEAR, "fma"}
    assert not SPECIAL_OPS & set(SCALAR_OPS)


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """All combinations of special values, then ordinary ones; the count leaves a tail."""
    arity = SCALAR_OPS[name].arity
    special: list[float]
    generator = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        special = [False, True]
        random = torch.randint(0, 2, (arity, 40), generator=generator, dtype=torch.bool)
    elif dtype.is_floating_point:
        special = SPECIAL[:: arity if arity > 2 else 1]
        random = (torch.randn(arity, 333, generator=generator, dtype=torch.float64) * 3).to(dtype)
    else:
        info = torch.iinfo(dtype)
        special = [info.min, info.min + 1, 0, 1, 2, 7, info.max - 1, info.max]
        low, high = max(info.min, -1000), min(info.max, 1000)
        random = torch.randint(low, high, (arity, 333), generator=generator).to(dtype)
    grid = torch.tensor(list(itertools.product(special, repeat=arity)), dtype=dtype)
    found = [torch.cat([grid[:, k], random[k]]) for k in range(arity)]
    return _defined(name, dtype, found)


def _defined(name: str, dtype: torch.dtype, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Without what has no one right result: integer division by zero, shifts by too many."""
    if dtype.is_floating_point or dtype is torch.bool:
        return given
    info = torch.iinfo(dtype)
    rows = list(zip(*[x.tolist() for x in given], strict=True))
    if name in ("floordiv", "truncdiv", "remainder", "fmod"):
        # torch itself traps on the least number by -1
        rows = [(x, y) for x, y in rows if y != 0 and (x != info.min or y != -1)]
    if name in ("shl", "shr"):
        rows = [(x, y % info.bits) for x, y in rows]
    return [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]


def evaluate(
    name: str, inputs: list[torch.Tensor], result: torch.dtype, on: Machine
) -> torch.Tensor:
    """The op as one pointwise kernel, in two parts."""
    values, n = Values(), inputs[0].numel()
    out = torch.empty(n, dtype=result)
    buffers = [buffer(f"x{k}", x) for k, x in enumerate(inputs)]
    target = buffer("out", out, "result")
    (i,) = axes("i", [n])
    value: Value = op(name, *[values.load(b, i.expr) for b in buffers])
    assert value.dtype is result
    kernel = Kernel((i,), [Phase((), [Store(target, i.expr, value)])], lanes=i)
    run(kernel, dict(zip(buffers, inputs, strict=True)) | {target: out}, on=on, parts=2)
    return out


def eager(name: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    dtype = inputs[0].dtype
    if name == "fmod" and dtype is torch.float32:
        # exact either way, and SLEEF's in float32 is NaN for a large ratio
        return torch.fmod(*[x.double() for x in inputs]).float()
    if dtype not in UNSIGNED:
        return (EXACT.get(name) or NEAR[name])(*inputs)
    function = UNBOUNDED.get(name) or getattr(operator, name)
    rows = zip(*[x.tolist() for x in inputs], strict=True)
    if SCALAR_OPS[name].result == "bool":
        return torch.tensor([function(*row) for row in rows])
    modulus = 2 ** torch.iinfo(dtype).bits
    return torch.tensor([function(*row) % modulus for row in rows], dtype=dtype)


def equal(got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Bit by bit, but for the bits of a NaN."""
    assert got.dtype is want.dtype
    agree = got == want
    if got.is_floating_point():
        agree &= torch.signbit(got) == torch.signbit(want)
        agree |= got.isnan() & want.isnan()
    wrong = (~agree).nonzero().flatten().tolist()
    shown = [([x[k].item() for x in inputs], got[k].item(), want[k].item()) for k in wrong[:5]]
    assert not wrong, shown


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distances from float64 in units of float32; overflow is right beyond the largest number."""
    exponent = torch.frexp(exact)[1].clamp(min=-125) - 24
    error = (got.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent)
    right = (got == exact.float()) | (got.isnan() & exact.isnan())
    return torch.where(right, 0.0, error.nan_to_num(torch.inf, torch.inf))


def near(name: str, got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    if got.dtype is torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-300, equal_nan=True)
        return
    exact = NEAR[name](*[x.double() for x in inputs])
    ours, theirs = ulps(got, exact), ulps(want, exact)
    # where eager itself is right, one unit is what ATen's functions promise
    wrong = (ours > (2 * theirs).clamp(min=1.1)).nonzero().flatten().tolist()
    shown = [([x[k].item() for x in inputs], got[k].item(), exact[k].item()) for k in wrong[:5]]
    assert not wrong, shown


def rounded(x: float, y: float, z: float) -> float:
    """x y + z, rounded once to float64."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y + z
    if not math.isfinite(z):
        return z
    total = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(total) if total else x * y + z  # a zero of the right sign
    except OverflowError:
        return math.copysign(math.inf, total)


@pytest.mark.parametrize("on", machines(), ids=lambda m: str(m.bits))
@pytest.mark.parametrize("name, dtype", ROWS)
def test_row(name: str, dtype: torch.dtype, on: Machine) -> None:
    inputs = operands(name, dtype)
    result = torch.bool if SCALAR_OPS[name].result == "bool" else dtype
    got = evaluate(name, inputs, result, on)
    if name == "fma":
        rows = zip(*[x.tolist() for x in inputs], strict=True)
        want = torch.tensor([rounded(*row) for row in rows], dtype=torch.float64)
        # float32 is rounded twice here
        rtol, atol = (0.0, 0.0) if dtype is torch.float64 else (1.2e-7, 1.5e-45)
        torch.testing.assert_close(got, want.to(dtype), rtol=rtol, atol=atol, equal_nan=True)
    elif name in EXACT:
        equal(got, eager(name, inputs), inputs)
    else:
        near(name, got, eager(name, inputs), inputs)
