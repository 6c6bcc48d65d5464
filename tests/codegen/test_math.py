"""Elementary functions against references in higher precision: bounds, special values, widths."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from fusee.codegen.llvm import math as table
from fusee.codegen.llvm.math import FORMULAS
from fusee.runtime import jit
from fusee.runtime.llvm_text import Machine
from tests.codegen.math_run import Compiled, module

F32, F64 = torch.float32, torch.float64
HOST = Machine(jit.host_target().features)
UNARY = [name for name, row in table._LIBRARY.items() if row[1] == 1]
BINARY = [name for name, row in table._LIBRARY.items() if row[1] == 2]
INSTRUCTIONS = ["sqrt", "rsqrt", "floor", "ceil", "trunc", "round"]
LANES = [1, 2, 4, 8, 16]

# Largest error of our own functions in units in the last place: with fused multiply-add, and
# without. Measured on ten million operands each and rounded up.
BOUNDS: dict[str, tuple[float, float]] = {
    "exp": (1.05, 1.05), "exp2": (0.9, 1.15), "expm1": (1.1, 1.15), "log": (0.95, 0.95),
    "log1p": (0.95, 0.95), "sin": (1.05, 1.0), "cos": (1.05, 1.0), "tanh": (1.0, 1.15),
    "erf": (1.0, 1.3),
}  # fmt: skip  # without, sin and cos are SLEEF's

# Where each function is interesting, beyond the sweep over all exponents.
SPANS = {
    "exp": (-104, 89), "exp2": (-150, 128), "expm1": (-20, 89), "log": (0, 4), "log2": (0, 4),
    "log10": (0, 4), "log1p": (-1, 4), "sin": (-2e5, 2e5), "cos": (-2e5, 2e5), "tan": (-2e5, 2e5),
    "asin": (-1, 1), "acos": (-1, 1), "atan": (-4, 4), "sinh": (-90, 90), "cosh": (-90, 90),
    "tanh": (-10, 10), "asinh": (-4, 4), "acosh": (1, 4), "atanh": (-1, 1), "erf": (-4.2, 4.2),
    "erfc": (-4, 10.2), "lgamma": (-4, 40),
}  # fmt: skip
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e-45, -1e-45, 1e-40, 1.17549435e-38,
    3.4028235e38, -3.4028235e38, 1e30, -1e30, 1e19, 88.72, 88.73, 89.0, 89.4, -87.4, -103.9, -104.1,
    127.999, 128.0, -149.0, -149.6, -150.1, 1e5, 1e10, math.pi, math.pi / 2, 16777216.0, math.inf,
    -math.inf, math.nan,
]  # fmt: skip

Reference = Callable[..., np.ndarray]


def _each(function: Callable[[float], float]) -> Reference:
    ufunc = np.frompyfunc(function, 1, 1)
    return lambda x: np.asarray(ufunc(x), dtype=np.float64)


def _lgamma(x: float) -> float:
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.inf
    return math.lgamma(x)


REFERENCES: dict[str, Reference] = {
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "pow": np.power, "atan2": np.arctan2,
    "erf": _each(math.erf), "erfc": _each(math.erfc), "lgamma": _each(_lgamma),
    "round": np.rint, "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
}  # fmt: skip


def reference(name: str, *inputs: torch.Tensor) -> np.ndarray:
    """In float64, whatever the inputs' dtype."""
    found = REFERENCES.get(name) or getattr(np, name)
    with np.errstate(all="ignore"):
        result: np.ndarray = found(*[x.double().numpy() for x in inputs])
    return result


def ulps(got: torch.Tensor, want: np.ndarray) -> np.ndarray:
    """Distances in float32 units in the last place of `want`; inf where one is NaN and not both.

    Beyond the largest float32 the exponent range is thought to go on; what is rounded to infinity
    there is not wrong.
    """
    out = got.double().numpy()
    with np.errstate(all="ignore"):
        size = np.abs(want)
        exponent = np.maximum(np.frexp(size)[1] - 1, -126)
        error = np.abs(out - want) / np.ldexp(1.0, exponent - 23)
        overflown = (np.abs(want) > 3.4028235677973366e38) & (out == np.sign(want) * np.inf)
    error = np.where(overflown | (out == want), 0.0, error)
    error = np.where(np.isnan(want) & np.isnan(out), 0.0, error)
    return np.where(np.isnan(error), np.inf, error)


@functools.cache
def sweep(name: str) -> torch.Tensor:
    """All exponents and signs, a dense sample where it matters, and the special values."""
    bits = np.arange(0, 2**32, 30011, dtype=np.uint64).astype(np.uint32)
    random = np.random.default_rng(1)
    low, high = SPANS.get(name, (-4, 4))
    dense = random.uniform(low, high, 200_000)
    normal = random.standard_normal(50_000)
    parts = [bits.view(np.float32), dense, normal, np.array(SPECIAL)]
    if name in ("sin", "cos", "tan"):
        multiples = np.arange(1, 64_000) * (math.pi / 2)
        parts += [multiples, np.nextafter(multiples.astype(np.float32), np.float32(0))]
    x = np.concatenate([np.asarray(part, dtype=np.float32) for part in parts])
    return torch.from_numpy(x[len(x) % 256 :])


def bound(name: str, fused: bool = True) -> float:
    if name in BOUNDS:
        return BOUNDS[name][0 if fused else 1]
    precision = table._LIBRARY[name][0]
    return int(precision[2:]) / 10 if precision else 0.0


def check(name: str, on: Machine, x: torch.Tensor, lanes: int, most: float) -> None:
    got = Compiled(name, 1, F32, lanes, on)(x)
    want = reference(name, x)
    errors = ulps(got, want)
    if name == "lgamma":  # SLEEF's bound near the zeros is absolute
        errors = np.where(np.isclose(got.numpy(), want, rtol=0, atol=1e-6), 0.0, errors)
    worst = int(errors.argmax())
    assert errors[worst] <= most, (name, x[worst].item(), got[worst].item(), want[worst])
    # SLEEF's asinh loses the sign of the very least denormals
    wrong = (np.signbit(got.numpy()) != np.signbit(want)) & ~(
        (name == "asinh") & (np.abs(want) == 2.0**-149)
    )
    assert not np.any(wrong & ~np.isnan(want)), (name, x.numpy()[wrong])


@pytest.mark.parametrize("name", UNARY)
def test_float32_stays_within_its_bound(name: str) -> None:
    check(name, HOST, sweep(name), 8, bound(name) * 1.001)


@pytest.mark.parametrize("name", [*UNARY, *INSTRUCTIONS])
def test_every_width_gives_the_same_bits(name: str) -> None:
    for dtype in (F32, F64):
        x = sweep(name)[-16 * 512 :].to(dtype)
        results = [Compiled(name, 1, dtype, lanes, HOST)(x).nan_to_num(7.5) for lanes in LANES]
        for lanes, result in zip(LANES, results, strict=True):
            assert torch.equal(result, results[0]), (name, dtype, lanes)


@pytest.mark.parametrize("name", sorted({*FORMULAS} & {*UNARY}))
@pytest.mark.skipif("fma" not in HOST.features, reason="the host never fuses")
def test_our_code_without_fused_multiply_add(name: str) -> None:
    less = Machine(HOST.features - {"fma", "avx2", "avx512f"})
    check(name, less, sweep(name), 4, bound(name, fused=False) * 1.001)


@pytest.mark.parametrize("name", UNARY)
def test_without_sleef(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our code where there is any, else the C library in float64, rounded once more."""
    monkeypatch.setattr(table, "exported_by_torch", lambda symbol: False)
    for lanes in (1, 4):
        most = bound(name) * 1.001 if name in FORMULAS else 0.51
        check(name, HOST, sweep(name)[::16], lanes, most)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_are_exact(name: str) -> None:
    for dtype in (F32, F64):
        x = sweep(name).to(dtype)
        got = Compiled(name, 1, dtype, 8, HOST)(x).numpy()
        with np.errstate(all="ignore"):
            # not torch: its square roots, of MKL, are not always the nearest numbers
            want = (REFERENCES.get(name) or getattr(np, name))(x.numpy())
        np.testing.assert_array_equal(got, want)
        assert np.all((np.signbit(got) == np.signbit(want)) | np.isnan(want))


def pairs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of special values, and ordinary ones where the result is neither 0 nor inf."""
    special = list(itertools.product(SPECIAL, SPECIAL))
    random = np.random.default_rng(2)
    x, y = random.standard_normal((2, 100_000)) * 3
    x = np.abs(x) if name == "pow" else x
    x = np.concatenate([x, [a for a, _ in special]]).astype(np.float32)
    y = np.concatenate([y, [b for _, b in special]]).astype(np.float32)
    count = len(x) // 16 * 16
    return torch.from_numpy(x[-count:]), torch.from_numpy(y[-count:])


@pytest.mark.parametrize("sleef", [True, False])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_operands(name: str, sleef: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pairs(name)
    if not sleef:
        monkeypatch.setattr(table, "exported_by_torch", lambda symbol: False)
    for lanes in (1, 4, 8, 16) if sleef else (1, 4):
        got = Compiled(name, 2, F32, lanes, HOST)(x, y)
        if name == "nextafter":
            with np.errstate(all="ignore"):
                want = np.nextafter(x.numpy(), y.numpy()).astype(np.float64)
        else:
            want = reference(name, x, y)
        errors = ulps(got, want)
        worst = int(errors.argmax())
        shown = (name, lanes, x[worst].item(), y[worst].item(), got[worst].item(), want[worst])
        assert errors[worst] <= max(bound(name), 0.51) * 1.001, shown


def test_what_a_division_leaves_is_exact() -> None:
    random = np.random.default_rng(4)
    y = random.standard_normal(1 << 14).astype(np.float32)
    near = y * random.integers(1, 1 << 24, len(y)).astype(np.float32)
    others = random.integers(0, 1 << 32, (2, len(y)), dtype=np.uint32).view(np.float32)
    for x, by in [(near, y), (others[0], others[1]), (others[0], y), (y, others[1])]:
        with np.errstate(all="ignore"):
            want = np.fmod(x, by)
        for lanes in (1, 4, 16):
            got = Compiled("fmod", 2, F32, lanes, HOST)(*map(torch.from_numpy, (x, by))).numpy()
            np.testing.assert_array_equal(got, want)
            assert np.all((np.signbit(got) == np.signbit(want)) | np.isnan(want))


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_float64_stays_within_its_bound(name: str) -> None:
    random = np.random.default_rng(3)
    low, high = SPANS.get(name, (-4, 4))
    x = torch.from_numpy(random.uniform(low, high, 256))
    y = torch.from_numpy(random.uniform(-4, 4, 256))
    x = x.abs() if name == "pow" else x
    inputs = [x, y][: 1 if name in UNARY else 2]
    exact = {
        "asin": mpmath.asin,
        "acos": mpmath.acos,
        "lgamma": mpmath.loggamma,
        "pow": mpmath.power,
    }
    exact |= {"exp2": lambda v: mpmath.mpf(2) ** v, "log2": lambda v: mpmath.log(v, 2)}
    exact |= {"fmod": lambda a, b: a - b * int(a / b)}
    function = exact.get(name) or getattr(mpmath, name, None)
    for lanes in (1, 4, 8):
        got = Compiled(name, len(inputs), F64, lanes, HOST)(*inputs)
        if function is None:
            assert torch.equal(got, torch.nextafter(x, y))
            continue
        with mpmath.workdps(40):
            for value, *operands in zip(got.tolist(), *[i.tolist() for i in inputs], strict=True):
                want = function(*map(mpmath.mpf, operands))
                error = abs(mpmath.mpf(value) - mpmath.re(want)) / math.ulp(float(mpmath.re(want)))
                assert error <= max(bound(name), 1.0) * 1.001 or abs(want) < 1e-2, (operands, value)


@pytest.mark.parametrize("name", [*UNARY, *INSTRUCTIONS])
def test_float64_special_values(name: str) -> None:
    x = torch.tensor([*SPECIAL, 1e300, 709.5, 710.3, 711.0, -745.0, -746.0, 1e-310, 1e200, 8.0])
    x = torch.cat([x.double(), torch.zeros(-len(x) % 8).double()])
    want = reference(name, x)
    for lanes in (1, 4, 8):
        got = Compiled(name, 1, F64, lanes, HOST)(x).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-15, atol=5e-324, equal_nan=True)
        assert np.all((np.signbit(got) == np.signbit(want)) | np.isnan(want))


@pytest.mark.parametrize("target", ["sse", "avx2", "avx512", "neon"])
def test_every_function_compiles_for_every_processor(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "exported_by_torch", lambda symbol: True)
    processor = jit.named(target)
    machine = Machine(processor.features)
    for dtype in (F32, F64):
        lanes = machine.bits // (32 if dtype is F32 else 64)
        for name in [*UNARY, *BINARY, *INSTRUCTIONS, "copysign"]:
            operands = 2 if name in (*BINARY, "copysign") else 1
            text = module(name, operands, dtype, lanes, machine)
            assembly = jit.assembly(text, processor.triple, processor.name, processor.flags)
            if name == "log2" and target != "sse":
                assert f"Sleef_log2{'f' if dtype is F32 else 'd'}{lanes}_u10" in assembly
            if name == "sqrt":
                wide = {"sse": "xmm", "avx2": "ymm", "avx512": "zmm", "neon": ".4s"}[target]
                assert wide in assembly or dtype is F64, assembly


def test_unknown_names_are_key_errors() -> None:
    with pytest.raises(KeyError):
        Compiled("gamma", 1, F32, 8, HOST)
