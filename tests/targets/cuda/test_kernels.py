"""Kernels for GPUs: run by the SIMT machine through the whole compiler, and assembled.

Each program is one way in which loops lie: what a thread, a team of threads or a block does.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusee
from fusee.codegen import simt
from fusee.codegen.simt import teams as tile
from fusee.loops import Buffer, Values
from fusee.runtime import jit
from fusee.runtime.llvm_text import BITS, HELD
from fusee.sym import Symbol
from fusee.targets import TARGETS
from fusee.targets.cuda import PROFILE, launch
from fusee.targets.cuda.launch import target
from tests.targets.cuda import simulated
from tests.targets.cuda.machine import Fault, Machine
from tests.targets.cuda.simulated import Simulated

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-12}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """Everything that is compiled runs as it would on a GPU."""
    target = Simulated(PROFILE)
    monkeypatch.setitem(TARGETS, "cpu", target)
    return target


def agree(fn: Callable[..., Any], *args: Any, tolerance: float = 2e-5, **how: Any) -> None:
    """Compiled gives what eager gives, and leaves in its arguments what eager leaves."""
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    got, want = fusee.compile(fn, options={"cache": False}, **how)(*mine), fn(*theirs)
    close(got, want, tolerance)
    close(mine, theirs, tolerance)


def close(got: Any, want: Any, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


POINTWISE: dict[str, Callable[..., Any]] = {
    "gelu": lambda x: F.gelu(x) * 2 + 1,
    "tanh and its kin": lambda x: (x.tanh(), x.sigmoid(), F.silu(x), F.softplus(x)),
    "of two dtypes": lambda x: (x.float() + 1, x > 0, x.double() * 2),
    "exp and log": lambda x: (x.exp(), x.abs().log(), x.expm1(), x.abs().log1p(), x.exp2()),
    "of CUDA's library": lambda x: (x.tan(), x.atan(), x.sinh(), x.lgamma(), x.abs().pow(1.3)),
    "sines": lambda x: (x.sin(), (x * 1e6).cos()),
    "rounding": lambda x: (x.floor(), x.round(), x.trunc(), x.sign(), x.to(torch.int32)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("program", POINTWISE)
def test_pointwise(gpu: Simulated, program: str, dtype: torch.dtype) -> None:
    for shape in [(1003,), (8, 64)]:
        agree(POINTWISE[program], numbers(*shape, dtype=dtype), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers(gpu: Simulated, dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (5, 37)).to(dtype)
    agree(lambda x: (x // 3, x % 5, x << 1, x >> 2, x & 6, x > 4, x.float().sqrt(), -x), x)
    agree(lambda x: (x.sum(), x.amax(1), x.argmin(0), (x > 3).any(1), (x > 3).sum()), x)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x + 1, x.shape[-1:]),
    "sums of rows": lambda x: (x.sum(-1), x.amax(-1), x.mean(-1)),
    "sums of columns": lambda x: (x.sum(0), x.amin(0)),
    "softmax of columns": lambda x: torch.softmax(x, 0),
    "all": lambda x: (x.sum(), x.var(correction=0), x.amax()),
    "places": lambda x: (x.argmax(-1), x.argmax(0), x.argmin(), x.max(1)),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
}


# rows: part of a warp, a warp, a block that keeps them, one that reads them again; odd ones
ROWS = [(9, 5), (7, 96), (5, 257), (3, 2048), (2, 5001), (70, 24), (1, 1)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("program", REDUCTIONS)
def test_reductions(gpu: Simulated, program: str, shape: tuple[int, ...]) -> None:
    agree(REDUCTIONS[program], numbers(*shape))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_of_other_dtypes(gpu: Simulated, dtype: torch.dtype) -> None:
    for program in ("softmax", "layer norm", "sums of columns"):
        agree(REDUCTIONS[program], numbers(6, 160, dtype=dtype), tolerance=TOLERANCE[dtype])


def test_rows_that_do_not_fit_the_registers(gpu: Simulated) -> None:
    agree(lambda x: torch.softmax(x, -1), numbers(2, 40_000))
    agree(lambda x: F.layer_norm(x, x.shape[-1:]), numbers(2, 33_001))


def test_teams_without_a_row_read_no_other_teams(gpu: Simulated) -> None:
    """Which may not have stored yet what is read back: six rows for eight teams of a block."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.silu(F.layer_norm(x.sigmoid().tanh(), (40,)))
        return x, F.layer_norm(x, (40,))

    agree(fn, numbers(6, 40))
    assert len(gpu.codes) == 1


# few results of many elements: blocks share them, and the last one goes on
SHARED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "a sum": (lambda x: (x * x).sum(), (300_000,)),
    "columns": (lambda x: (x.sum(0), x.abs().amax(0)), (9_000, 24)),
    "odd columns": (lambda x: x.mean(0), (20_011, 13)),
    "rows": (lambda x: (x.sum(-1), x.argmax(-1)), (3, 100_000)),
    "moments": (lambda x: (x + 3).var((0, 2), correction=0), (9, 3, 12_000)),
    "moments of columns": (lambda x: torch.var_mean(x - 2, 0), (9_000, 24)),
    "logsumexp": (lambda x: x.logsumexp(-1), (2, 150_000)),
    "logsumexp of columns": (lambda x: x.logsumexp(0), (9_000, 24)),
    "truth": (lambda x: ((x > 9).any(0), (x < 9).all(0)), (9_000, 32)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 3, 180, 180)),
}


@pytest.mark.parametrize("program", SHARED)
def test_reductions_that_blocks_share(gpu: Simulated, program: str) -> None:
    fn, shape = SHARED[program]
    agree(fn, numbers(*shape), tolerance=1e-4)
    kernels = [code for code in gpu.codes if code.shared != 0]
    assert len(kernels) == 1 and len(gpu.codes) <= 2


def test_shared_reductions_of_open_sizes(gpu: Simulated) -> None:
    compiled = fusee.compile(lambda x: (x.sum(0), x.var(0)), dynamic=True, options={"cache": False})
    for shape in [(9_000, 24), (700, 40), (3, 2000)]:
        x = numbers(*shape)
        close(compiled(x), (x.sum(0), x.var(0)), 1e-3)
    assert len(gpu.codes) == 1


# Images whose channels lie last: how many kernels norm their groups, and whether blocks share what
# a group's threads reduce. A group's pieces are 8 to 48 bytes here, which teams read by turns.
NORMS: dict[str, tuple[tuple[int, ...], int, list[bool]]] = {
    "kept in registers": ((2, 24, 30, 31), 3, [False]),
    "pieces of 8 bytes": ((3, 32, 16, 16), 8, [False]),
    "channels of their own": ((2, 4, 33, 33), 4, [False, False]),
    "shared by blocks": ((1, 20, 64, 64), 2, [True, False]),
    "of four": ((1, 8, 128, 72), 2, [True, False]),
    "shared by odd blocks": ((3, 36, 61, 61), 3, [True, False]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("program", NORMS)
def test_norms_of_groups_of_channels(gpu: Simulated, program: str, dtype: torch.dtype) -> None:
    shape, groups, kernels = NORMS[program]
    x, w, b = numbers(*shape, dtype=dtype), *(numbers(shape[1], dtype=dtype) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last)

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x, groups, w, b))

    got = fusee.compile(fn, options={"cache": False})(x, w, b)
    exact = fn(x.double(), w.double(), b.double())
    assert rms(got - exact) < 1.2 * rms(fn(x, w, b) - exact)
    assert [code.shared != 0 for code in gpu.codes] == kernels
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("program", ["kept in registers", "shared by blocks"])
def test_norms_beside_a_large_mean(gpu: Simulated, program: str) -> None:
    """No digits are lost but those of the mean: squares of what is away from it are added up."""
    shape, groups, _ = NORMS[program]
    x = (numbers(*shape) + 1000).contiguous(memory_format=torch.channels_last)
    got = fusee.compile(F.group_norm, options={"cache": False})(x, groups)
    exact = F.group_norm(x.double(), groups)
    in_rows = F.group_norm(x.contiguous(), groups)  # eager's of channels-last is 0.2 away
    assert rms(got - exact) < 2 * rms(in_rows - exact)


def test_norms_of_groups_of_open_sizes(gpu: Simulated) -> None:
    """Blocks of a warp for small images, which more pixels share by and by."""
    compiled = fusee.compile(F.group_norm, dynamic=True, options={"cache": False})
    for n, height, width in [(3, 7, 20), (2, 64, 64), (1, 5, 7), (30, 8, 8)]:
        x = numbers(n, 32, height, width).contiguous(memory_format=torch.channels_last)
        close(compiled(x, 4), F.group_norm(x.contiguous(), 4), 1e-5)
    assert len(gpu.codes) <= 4


@pytest.mark.parametrize("program", ["kept in registers", "shared by blocks"])
def test_what_is_normed_is_stored_by_the_same_kernel(gpu: Simulated, program: str) -> None:
    """A residual: its axis of channels is two of the norm's. So are pixels that are one axis."""
    gpu.profile = PROFILE._replace(small=1 << 16)
    shape, groups, kernels = NORMS[program]
    x, y = (numbers(*shape).contiguous(memory_format=torch.channels_last) for _ in range(2))

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + y
        return x, F.group_norm(x.flatten(2), groups)

    agree(fn, x, y)
    assert len(gpu.codes) == len(kernels)


@pytest.mark.parametrize("program", NORMS)
def test_gradients_of_norms_of_groups(gpu: Simulated, program: str) -> None:
    shape, groups, _ = NORMS[program]
    x = numbers(*shape).contiguous(memory_format=torch.channels_last)

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        x, w, b = given
        F.group_norm(x, groups, w, b).square().sum().backward()
        return [t.grad for t in given]

    agree(fn, x, numbers(shape[1]), numbers(shape[1]), tolerance=2e-3)


def test_few_rows_that_stay_in_registers_are_one_kernel(gpu: Simulated) -> None:
    """As many as processors, about: another launch would take longer than what stands idle."""
    agree(lambda x: torch.softmax(x, -1), numbers(96, 4096))
    assert len(gpu.codes) == 1


EXTREMES = [float("inf"), float("-inf"), float("nan"), 3e30, -3e30, 0.0]


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("shape", [(2, 40_000), (2, 300_000)], ids=str)
def test_one_pass_of_extreme_numbers(gpu: Simulated, shape: tuple[int, int], value: float) -> None:
    """Maximum and sum, mean and squares: as if they had been computed one after the other."""
    x = numbers(*shape)
    x[0, 777], x[1] = value, value
    agree(lambda x: torch.softmax(x, -1), x)
    agree(lambda x: x.logsumexp(-1), x)
    agree(lambda x: (x.double().var(-1), x.double().sum(-1)), x, tolerance=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_rows_of_other_dtypes(gpu: Simulated, dtype: torch.dtype) -> None:
    x = numbers(2, 40_000, dtype=dtype)
    for fn in (
        lambda x: torch.softmax(x, -1),
        lambda x: F.log_softmax(x, -1),
        lambda x: F.layer_norm(x, x.shape[-1:]),
    ):
        agree(fn, x, tolerance=TOLERANCE[dtype])


def test_long_rows_are_read_twice(gpu: Simulated) -> None:
    """Once for what is reduced, once for the result: some points at a time, then the rest."""
    for program in ("softmax", "layer norm"):
        agree(REDUCTIONS[program], numbers(2, 40_000))
    loops = [code.text.count(" = phi i64 [ %v") for code in gpu.codes]
    assert loops == [4, 4], loops


def test_sums_of_equal_axes_that_read_one_row_are_one_kernel(gpu: Simulated) -> None:
    """As of two layers whose results are multiplied; of matrices of other sizes they are not."""
    row, gate, up, other = numbers(96), numbers(600, 96), numbers(600, 96), numbers(200, 96)

    def both(row: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu((gate * row).sum(1)) * (up * row).sum(1)

    agree(both, row, gate, up)
    assert len(gpu.codes) == 1
    agree(lambda row, x, y: ((x * row).sum(1), (y * row).sum(1)), row, gate, other)
    assert len(gpu.codes) == 3
    agree(lambda x, y: (x.sum(1), y.sum(1)), gate, up)
    assert len(gpu.codes) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16], ids=str)
def test_rows_that_begin_anywhere(gpu: Simulated, dtype: torch.dtype) -> None:
    """Of 16 bits: eight elements are loaded and stored at once, and shifted in between."""
    x, y = (numbers(130, 4105).mul(9).to(dtype) for _ in range(2))
    row = numbers(130, 1).to(dtype)
    agree(lambda x: x[:, 3:4100] + 0, x)
    agree(lambda x, y, row: x[:, :4101] * 2 + y[:, 4:] + row, x, y, row, tolerance=0.02)
    agree(lambda x: torch.cat((x, x[:, :5]), 1), x)
    shifted = [code for code in gpu.codes if "fshr" in code.text]
    assert len(shifted) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    "shape", [(3, 17), (2, 2, 64), (5, 33), (2, 640), (1, 1100), (9, 8)], ids=str
)
def test_teams_scan_rows(gpu: Simulated, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Alone, backwards, of a sum, beside another, and read again by what follows."""
    x = numbers(*shape).mul(3).to(dtype)
    functions: tuple[Callable[..., Any], ...] = (
        lambda x: x.cumsum(-1),
        lambda x: (x + 1).flip(-1).cumsum(-1).flip(-1),
        lambda x: (x - x.amax(-1, keepdim=True)).cumsum(-1) * 2,
        lambda x: (x.cumsum(-1), (x * x).cumsum(-1), x.sum(-1)),
        lambda x: x.cummax(-1),
        lambda x: (x > 0).cumsum(-1),
    )
    for fn in functions:
        gpu.codes.clear()
        agree(fn, x, tolerance=0.1 if dtype is torch.bfloat16 else 1e-4)
        assert shape == (9, 8) or any("llvm.nvvm.shfl" in code.text for code in gpu.codes)


def test_scans_along_two_axes(gpu: Simulated) -> None:
    """Of rows that are cut into two: a thread takes all of one."""
    agree(lambda x: F.unfold(x[None, :2], 2, padding=1)[0].cumsum(0), numbers(4, 3))


def test_many_long_rows_run_beside_each_other(
    gpu: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks fit a processor; what is rounded to 16 bits is divided without a branch."""
    monkeypatch.setattr(simulated, "launch", lambda *given: (0, 0))
    for dtype, rows, width in [
        (torch.bfloat16, 2048, 50_304), (torch.bfloat16, 8, 50_304), (torch.bfloat16, 2048, 65_536),
        (torch.float32, 2048, 1024),
    ]:  # fmt: skip
        x = torch.empty(rows, width, dtype=dtype)
        fusee.compile(lambda x: torch.softmax(x, -1), options={"cache": False})(x)
    few_rows = 256, 256  # which blocks share, and then points
    assert [code.units for code in gpu.codes] == [512, *few_rows, 1024, 256]
    divides = ["div.full" in code.text for code in gpu.codes]
    assert divides == [True, False, True, True, False]


def gelu_as_written(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def test_what_is_rounded_at_the_end_is_not_rounded_between(gpu: Simulated) -> None:
    """Of bfloat16, where what comes between is smooth: results are nearer to float64."""
    x = torch.linspace(-6, 6, 4096).bfloat16()
    got = fusee.compile(gelu_as_written, options={"cache": False})(x)
    text = gpu.codes[-1].text
    assert text.count("fptrunc") <= 2 and "rcp.approx" in text  # in the value and as it is stored
    exact, eager = gelu_as_written(x.double()), gelu_as_written(x)
    assert rms(got - exact) < rms(eager - exact)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


# What is compared, or asked for, or stored, or has more digits than a smooth function keeps.
ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "compared": lambda x: torch.where(x * 0.1 == 0.30078125, x, x * 2),
    "the larger of a row": lambda x: (x * 0.1 == (x * 0.1).amax()).to(x.dtype),
    "asked for": lambda x: (x.float() * 0.1 - (x.float() * 0.1).bfloat16().float()).bfloat16(),
    "rounded": lambda x: (x * 0.1 * 99).floor(),
    "turned": lambda x: (x * 1e6).cos(),
    "stored as float32": lambda x: (x * 0.1).float() * 3,
    "less another kernel's maximum": lambda x: (x * x * 9).view(17, 59).log_softmax(0),
}  # fmt: skip


@pytest.mark.parametrize("program", ROUNDED)
def test_what_is_not_smooth_is_rounded_as_in_eager_mode(gpu: Simulated, program: str) -> None:
    x = torch.linspace(-4, 4, 1003).bfloat16()
    agree(ROUNDED[program], x, tolerance=1e-6 if program != "turned" else 0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tanh_that_is_rounded_to_16_bits(gpu: Simulated, dtype: torch.dtype) -> None:
    ends = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-7, -9e-3])
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.logspace(-8, 1, 500), ends]).to(dtype)
    got = fusee.compile(lambda x: x.tanh(), options={"cache": False})(x)
    want, exact = x.tanh(), x.double().tanh()
    signs = (y.nan_to_num().signbit() for y in (got, want))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(*signs)
    assert rms((got - exact).nan_to_num()) <= 1.01 * rms((want - exact).nan_to_num())
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)


def exponents() -> torch.Tensor:
    """Operands of exp: its whole range, past its ends, what is no number."""
    ends = [float("inf"), float("-inf"), float("nan"), 0.0, 88.72, 88.73, -103.97, -104.5, 1e38]
    return torch.cat(
        [torch.linspace(-104, 89, 3000), torch.linspace(-1, 1, 999), torch.tensor(ends)]
    )


def check_exponentials(got: torch.Tensor) -> None:
    exact = exponents().double().exp()
    want = exact.float()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    unit = torch.nextafter(want, torch.full_like(want, float("inf"))) - want
    error = ((got.double() - exact).abs() / unit.double())[finite]
    assert error.max() < 2, error.max()


def test_exponentials(gpu: Simulated) -> None:
    check_exponentials(fusee.compile(torch.exp, options={"cache": False})(exponents()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("length", [8, 16, 24, 48])
def test_short_rows_are_read_in_one_piece(gpu: Simulated, length: int, dtype: torch.dtype) -> None:
    """Not element by element, by threads that have several rows each."""
    x = torch.randn(300, length).mul(9).to(dtype)
    programs: list[Callable[..., Any]] = [
        lambda x: x.sum(-1),
        lambda x: x.argmax(-1),
        lambda x: (x + 1).amax(-1),
    ]
    if dtype.is_floating_point:
        programs += [lambda x: x.softmax(-1), lambda x: x.logsumexp(-1), lambda x: x.var(-1)]
    for program in programs:
        agree(program, x, tolerance=TOLERANCE.get(dtype, 0.0))
        lanes = 16 // dtype.itemsize
        kind = {2: "bfloat", 4: "float", 8: "i64"}[dtype.itemsize]
        loads = re.findall(r"= load (.*?), ptr %v", gpu.codes[-1].module)
        assert set(loads) == {f"<{lanes} x {kind}>"}, loads


def test_rows_of_a_sector_are_stored_by_teams(gpu: Simulated) -> None:
    def rows(x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.softplus(x)[..., None] * y[:, None], F.softplus(x)

    x, y = numbers(24, 48, 32), numbers(24, 32, 16)
    agree(rows, x, y)
    (code,) = gpu.codes
    assert code.total * code.units == 4 * x.numel()  # a thread for each access of 16 bytes


OTHERS: dict[str, Callable[[], Any]] = {
    "batch norm": lambda: (
        lambda x: F.batch_norm(x, None, None, training=True), numbers(4, 6, 8, 8)),
    "group norm": lambda: (lambda x: F.group_norm(x, 3), numbers(4, 6, 8, 8)),
    "transposes": lambda: (lambda x: x.t().contiguous() + x.t(), numbers(33, 70)),
    "scans": lambda: (lambda x: (x.cumsum(-1), x.cumsum(0), x.cummax(1)), numbers(7, 33)),
    "embedding": lambda: (
        lambda i, w: F.embedding(i, w) * 2, torch.randint(0, 50, (5, 6)), numbers(50, 32)),
    "gather": lambda: (
        lambda x, i: x.gather(1, i), numbers(9, 64), torch.randint(0, 64, (9, 40))),
    "padding": lambda: (lambda x: F.pad(x, (1, 2, 3, 1)) * 2, numbers(8, 16)),
    "cat": lambda: (lambda x, y: torch.cat([x, y], 1).relu(), numbers(8, 16), numbers(8, 17)),
    "long rows of odd lengths": lambda: (lambda x: x[1:, 1:].mul(2), numbers(4, 2052)),
    "rows with a bias": lambda: (
        lambda x, w, b: (x * w.exp() + b).relu(), numbers(3, 7, 16), numbers(16), numbers(16)),
    "batch norm of channels-last": lambda: (
        lambda x, m, v: F.relu(F.batch_norm(x, m, v)) + x,
        numbers(2, 8, 5, 6).contiguous(memory_format=torch.channels_last), numbers(8),
        numbers(8).abs()),
    "flip and slices": lambda: (lambda x: x.flip(1)[:, 1:] + x[:, :-1], numbers(8, 33)),
    "broadcast": lambda: (lambda x, y: x[:, None] * y + 1, numbers(6, 16), numbers(5, 1)),
    "writes": lambda: (lambda x: x.add_(1).mul_(2).sum(), numbers(16, 64)),
    "pooling": lambda: (lambda x: F.max_pool2d(x, 3, 2), numbers(2, 3, 17, 16)),
    "sums in one place": lambda: (
        lambda x, i, y: x.index_add(-1, i, y), numbers(5, 5), torch.randint(0, 5, (5,)),
        numbers(5, 5)),
    "products of nothing": lambda: (lambda x: torch.linalg.matrix_power(x, 3), numbers(0, 2, 2)),
    "of nothing": lambda: (lambda x: (x + 1, x.sum(0), x.sum(1)), numbers(0, 5)),
}  # fmt: skip


@pytest.mark.parametrize("program", OTHERS)
def test_other_loops(gpu: Simulated, program: str) -> None:
    fn, *args = OTHERS[program]()
    agree(fn, *args)


@pytest.mark.parametrize("program", OTHERS)
def test_threads_that_take_several_points(
    gpu: Simulated, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do where there are enough."""
    monkeypatch.setattr(simt, "ENOUGH", 1)
    fn, *args = OTHERS[program]()
    agree(fn, *args)
    if program in ("rows with a bias", "batch norm of channels-last"):
        assert all("smin" in code.module for code in gpu.codes)


# programs that load along one axis and store along another; how many kernels cross something
CROSSED: dict[str, Callable[[], Any]] = {
    "whole tiles": lambda: (lambda x: x.t().contiguous(), numbers(128, 64)),
    "edges": lambda: (lambda x, y: x + y.t().exp(), numbers(70, 130), numbers(130, 70)),
    "several": lambda: (lambda *x: sum(a.t() for a in x).contiguous(),
                        *(numbers(65, 33) for _ in range(4))),
    "three axes": lambda: (lambda x: x.permute(2, 1, 0).contiguous(), numbers(33, 5, 47)),
    "few channels last": lambda: (
        lambda x: x.contiguous(memory_format=torch.channels_last), numbers(2, 3, 40, 41)),
    "few channels first": lambda: (
        lambda x: (x * 2).contiguous(),
        numbers(2, 3, 40, 41).contiguous(memory_format=torch.channels_last)),
    "channels": lambda: (
        lambda x: x.contiguous(memory_format=torch.channels_last).relu(), numbers(2, 24, 20, 21)),
    "masked": lambda: (lambda x: F.pad(x.t(), (1, 2)) + 1, numbers(33, 47)),
    "truth": lambda: (lambda x: (~(x > 0)).t().contiguous(), numbers(33, 47)),
    "indices": lambda: (
        lambda x, i: x[i.t().contiguous()], numbers(99), torch.randint(0, 99, (70, 37))),
    "in place": lambda: (
        lambda x, y: x.add_(y.t()).mul(2), numbers(70, 130), numbers(130, 70)),
    "both": lambda: (
        lambda x, y: (x + y.t(), (x * y.t()).t().contiguous()), numbers(65, 40), numbers(40, 65)),
}  # fmt: skip


@pytest.mark.parametrize("many", [1, 1 << 20], ids=["wide", "narrow"])
@pytest.mark.parametrize("program", CROSSED)
def test_tiles(gpu: Simulated, program: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "LEAST", 1)
    monkeypatch.setattr(tile, "MANY", many)
    fn, *args = CROSSED[program]()
    agree(fn, *args)
    assert any("@shared" in code.module for code in gpu.codes)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_axes_that_are_short_make_no_tile(gpu: Simulated, layout: torch.memory_format) -> None:
    """Pixels that lie between each other: a block would have 32 or 112 points for 256 threads."""
    x = numbers(2, 16, 30, 80, dtype=torch.bfloat16).to(memory_format=layout)
    agree(lambda x: F.pixel_shuffle(x, 2), x)
    (code,) = gpu.codes
    assert "@shared" not in code.module


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int16, torch.int64], ids=str)
def test_tiles_of_other_dtypes(
    gpu: Simulated, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile, "LEAST", 1)
    for many in (1, 1 << 20):
        monkeypatch.setattr(tile, "MANY", many)
        agree(lambda x: x.t().contiguous() + 1, (numbers(70, 66) * 50).to(dtype))
    assert all("@shared" in code.module for code in gpu.codes)


def test_tiles_of_open_sizes(gpu: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "LEAST", 1)
    compiled = fusee.compile(lambda x: x.t() + 1.0, dynamic=True, options={"cache": False})
    copied = fusee.compile(lambda x: x.t().contiguous(), dynamic=True, options={"cache": False})
    for shape in [(33, 70), (128, 64), (5, 300)]:
        x = numbers(*shape)
        close(compiled(x), x.t() + 1.0, 0)
        close(copied(x), x.t().contiguous(), 0)
    assert ["@shared" in code.module for code in gpu.codes] == [False, True]


def test_rows_in_shared_memory_use_all_banks() -> None:
    """Threads of a warp that go down a column meet no bank twice; of wide elements, half of one."""
    i, j = (Symbol(name, 0, 1000) for name in "ij")
    for dtype in (torch.int8, torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.int64):
        values = Values()
        load = values.load(Buffer("x", dtype, (1000, 1000), (1000, 1), "input"), i.expr)
        for side in (3, 24, 32, 64):
            one = tile.SharedTile(i, j, {i: side, j: 64}, (load,))
            wide = max(BITS[HELD[dtype]] // 8, 1)
            threads = 32 * 4 // max(wide, 4)
            banks = {one.pitch(load) * wide * k // 4 % 32 for k in range(threads)}
            assert len(banks) == threads, (dtype, side)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_elements_that_lie_between_each_other(gpu: Simulated, dtype: torch.dtype) -> None:
    """One kernel stores vectors of what several loops fill by turns."""
    given = [numbers(64, 64, dtype=dtype) for _ in range(3)]
    near = TOLERANCE[dtype]
    agree(lambda x, y, z: torch.stack([x, y, z], -1), *given)
    agree(lambda x, y, _: torch.stack([x.exp(), y], -1), *given, tolerance=near)
    agree(lambda x, y, _: torch.stack([x.flip(-1), y + 1], -1).flatten(1), *given, tolerance=near)
    assert len(gpu.codes) == 3
    for code in gpu.codes:
        stores = [line for line in code.text.splitlines() if " store " in line]
        assert stores and all(" x " in line and "align 16" in line for line in stores)
    agree(lambda x, *y: torch.stack([x.t().exp(), y[0].exp().t()], -1), *given, tolerance=near)
    assert len(gpu.codes) == 4
    # rows that follow each other are no such elements, nor are places out of step
    agree(lambda x, y, _: torch.stack([x, y], 1), *given)
    agree(lambda x, y, _: torch.cat([x[0, :3], torch.stack([x, y], -1).flatten()]), *given)


def test_axes_that_are_one_are_so_before_lanes_are_chosen(gpu: Simulated) -> None:
    """Short rows behind each other: lanes along rows would leave their elements apart."""
    agree(lambda x: torch.stack([x, x * 2], -1), numbers(700, 8, dtype=torch.bfloat16))
    (code,) = gpu.codes
    assert re.findall("(?:load|store) (<8 x bfloat>|bfloat)", code.module) == 3 * ["<8 x bfloat>"]


def test_elements_between_each_other_of_open_sizes(gpu: Simulated) -> None:
    compiled = fusee.compile(
        lambda x, y: torch.stack([x, y.exp()], -1), dynamic=True, options={"cache": False}
    )
    for shape in [(33, 70), (128, 64), (5, 300)]:
        x, y = numbers(*shape), numbers(*shape)
        close(compiled(x, y), torch.stack([x, y.exp()], -1), 2e-5)
    assert len(gpu.codes) == 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8], ids=str)
def test_scatters_by_atomics(gpu: Simulated, dtype: torch.dtype) -> None:
    place, source = torch.randint(0, 8, (20, 32)), (numbers(20, 32) * 4).to(dtype)
    start, near = (numbers(8, 32) * 4).to(dtype), 20 * TOLERANCE.get(dtype, 0)
    agree(lambda x, i, s: x.scatter_add(0, i, s), start, place, source, tolerance=near)
    agree(lambda x, i, s: x.index_add(0, i[:, 0], s), start, place, source, tolerance=near)
    for how in ("amax", "amin", "prod"):
        agree(
            lambda x, i, s, how=how: x.scatter_reduce(0, i, s, how), start, place, source,
            tolerance=5 * near,
        )  # fmt: skip


def test_open_sizes(gpu: Simulated) -> None:
    for program in (POINTWISE["gelu"], REDUCTIONS["softmax"], REDUCTIONS["sums of columns"]):
        compiled = fusee.compile(program, dynamic=True, options={"cache": False})
        for shape in [(5, 33), (8, 64), (3, 700)]:
            x = numbers(*shape)
            torch.testing.assert_close(compiled(x), program(x), rtol=2e-5, atol=2e-5)


def test_bad_indices_are_told(gpu: Simulated) -> None:
    compiled = fusee.compile(F.embedding, options={"cache": False})
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([1, 7, 2]), numbers(5, 8))


def test_the_machine_knows_what_blocks_are_told(gpu: Simulated) -> None:
    """Without a fence, the last block may read what was there before."""
    agree(lambda x: x.sum(), numbers(300_000), tolerance=1e-4)
    (code,) = gpu.codes
    fence = "  call void @llvm.nvvm.membar.gl()\n"
    assert code.module.count(fence) == 2
    x, out, page = (torch.zeros(n) for n in (300_000, 1, 512))
    sizes = [int(n) for n in code.params if isinstance(n, int)]
    for text, fails in [(code.module, False), (code.module.replace(fence, "", 1), True)]:
        shared = torch.zeros(int(code.shared), dtype=torch.uint8)  # type: ignore[arg-type]
        machine = Machine(text, int(code.total), int(code.units))  # type: ignore[arg-type]
        given: list[Any] = [*(t.numpy() for t in (x, out, shared, page)), *sizes]
        if fails:
            with pytest.raises(Fault, match="before it is known"):
                machine.run(given)
        else:
            machine.run(given)


def test_the_machine_finds_faults() -> None:
    text = """define ptx_kernel void @k(ptr %b0, ptr %status) {{
start:
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %i = zext i32 %t to i64
  %a = getelementptr float, ptr {place}, i64 {index}
  store float 1.0, ptr %a, align {align}
  ret void
}}
"""
    memory, status = torch.zeros(32).numpy(), torch.zeros(2).numpy()
    for given, words in [
        (("%i", 4), None),
        (("%i", 8), "misaligned"),
        (("0", 4), "two threads"),
        (("32", 4), "argument 0: byte 128"),
    ]:
        machine = Machine(text.format(place="%b0", index=given[0], align=given[1]), 1, 32)
        if words is None:
            machine.run([memory, status])
            assert memory.all()
        else:
            with pytest.raises(Fault, match=words):
                machine.run([memory, status])


# ------------------------------------------------------------------------------ assembled


@pytest.fixture
def texts(gpu: Simulated) -> list[str]:
    """Kernels of all kinds."""
    for program in (*POINTWISE.values(), *REDUCTIONS.values()):
        for dtype in (torch.float32, torch.bfloat16):
            fusee.compile(program, options={"cache": False})(numbers(5, 256, dtype=dtype))
    for make in OTHERS.values():
        fn, *args = make()
        fusee.compile(fn, options={"cache": False})(*args)
    return list(dict.fromkeys(code.module for code in gpu.codes))


@pytest.mark.parametrize("capability", [75, 80, 90, 100, 120])
def test_kernels_assemble(texts: list[str], capability: int) -> None:
    launch.linker()
    emit = functools.partial(jit.emit, target(capability))
    for text in texts:
        parts = launch.with_functions(emit(text), capability, None)
        _, told = launch.link(parts, capability, "-verbose")
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", told)))
        assert len(parts) > 1 or not spills, f"{told}\n{text}"


def test_accesses_are_wide_and_of_global_memory(texts: list[str]) -> None:
    """A row of 256 in registers: read once, 16 bytes at a time, written once."""
    emit = functools.partial(jit.emit, target(90))
    rows = [text for text in texts if "rsqrt" not in text and "shfl" in text]
    ptx = [emit(text).decode() for text in rows]
    assert any(x.count("ld.global.nc.v4") == x.count("ld.") - x.count("ld.param") for x in ptx)
    assert not any(".local" in x for x in ptx)
