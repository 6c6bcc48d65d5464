"""What operators cost as ATen's kernels and as loops of ours: `python -m bench.prices`.

Each program is one call, on inputs of several sizes, layouts and dtypes; eager and kernels take
turns (bench/ops.py). A row of the table is an operator with what its operands are like, as a graph
tells it to `fusee.autodiff.bill`: by how much either takes longer than the bytes that it
reads and writes, the median over its programs. Rows of a layout alone are the medians over all
operators, those with "once" what a call by itself takes. --write puts the table where the prices of
processors of this one's vendor are read from, and a plot beside it. --vendor h200 measures an
NVIDIA GPU, by what it takes alone, and writes the GPUs' prices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fusee
from bench.ops import turns
from bench.ops_cases import Case, Family
from fusee.aten import WHOLE
from fusee.aten.trace import trace
from fusee.autodiff.bill import Charge, bill
from fusee.autodiff.min_cut import Prices
from fusee.errors import FuseeError
from fusee.loops.lower import supported
from fusee.targets import cpu, cuda

RESULTS = Path(__file__).parent / "results"
Pair = tuple[float, float]  # of ATen's kernel, and of ours
UNITS = 1e5  # of Prices, in a microsecond
OFTEN = 4  # so many operators say what a word makes of others
LEAST_US = 12  # below, a call is most of it
CAPTURED_US = 0.13  # what a graph that runs as captured takes longer than eager

_ROWS = ("128x1000", "1000x1000", "1000x1000:t", "30000x7", "100000x3")
_IMAGES = ("8x64x28x28", "8x64x28x28:nhwc", "2x3x224x224", "2x3x224x224:nhwc")
_OPS = "torch.ops.aten"
_DTYPES = ("f32", "bf16")


def _two(rows: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{row}, {row}" for row in rows)


# fmt: off
FAMILIES = (
    Family("of one", _ROWS, (
        "x + 1", "x * 2", "x - 1", "1 - x", "x / 2", "x.add_(1)", "x.mul_(2)",
        "-x", "x.abs()", "F.relu(x)", "x.exp()", "x.sin()", "x.cos()", "x.tanh()",
        "x.sigmoid()", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.silu(x)", "x.erf()",
        "x.pow(2)", "x.pow(3)",
        "x.clamp(-1, 1)", "x.sign()", "x.floor()", "x.round()", "x.abs().sqrt()", "x.rsqrt()",
        "x.reciprocal()", "x.erfc()", "x.log1p()", "x.expm1()",
        "x.tan()", "x.atan()", "x.frac()", "x.asinh()", "x.sinh()", "x.exp2()", "x.log2()",
        "x > 0", "x.log()", "F.softplus(x)", "F.hardswish(x)", "F.elu(x)", "F.leaky_relu(x)",
        "x.to(torch.bfloat16 if x.dtype is torch.float32 else torch.float32)",
        "x.to(torch.float64)", "x.to(torch.uint8)", "x.to(torch.int64)",
        "x.clone()", "x.contiguous()",
        "x.clone(memory_format=torch.contiguous_format)", "x.t().contiguous()",
        "x.flip(0)", "x.flip(1)",
        "x.roll(3, 1)",
        "x.repeat(2, 2)", "x.tril()", "F.pad(x, (3, 3))", "F.pad(x[None], (3, 3), 'reflect')",
        "F.pad(x[None], (3, 3), 'replicate')", "F.pad(x[None], (3, 3), 'circular')",
        "x.diagonal() + 1", "F.glu(x[:, :6])", "F.glu(x[:, :x.shape[1] // 2 * 2])",
        "torch.cat((x, x), 1)", "torch.cat((x, x))", "torch.stack((x, x))",
        "torch.stack((x, x), 1)", "torch.stack((x, x), -1)",
        f"{_OPS}.slice_backward(x, (2 * x.shape[0], x.shape[1]), 0, 0, x.shape[0], 1)",
        f"{_OPS}.select_backward(x, (3, *x.shape), 0, 1)", "x.masked_fill(x > 0, 0.0)",
        "x.zero_()", "torch.zeros_like(x)", "x.new_zeros(x.shape)", "torch.rot90(x)",
        "x.clamp_(-1, 1)", "F.interpolate(x[None], scale_factor=2, mode='linear')",
    ), _DTYPES),
    Family("repeated", ("1000x1003", "300000x3", "4000x64"), (
        "x.repeat_interleave(3, 0)", "x.repeat_interleave(3, 1)", "x + x[:1].expand_as(x)",
        "x[:, None].expand(-1, 3, -1).clone()", "x[:, :, None].expand(-1, -1, 3).clone()",
    ), _DTYPES),
    Family("few", ("500x3x1000", "1000x8x128", "50000x4x4"), (
        "x.sum(1)", "x.mean(1)", "x.amax(1)", "x.sum((0, 2))",
    ), _DTYPES),
    Family("diagonals", ("100x1000",), ("torch.diag_embed(x)",), _DTYPES),
    Family("integers", ("1000x1000:i64<1000:pos, 1000x1000:i64<1000:pos",
        "1000x1000:i32<1000:pos, 1000x1000:i32<1000:pos",
        "1000x1000:u8:pos, 1000x1000:u8:pos"), (
        "x // y", "x % y", "x + y", "x * y", "x == y", "x & y", "torch.minimum(x, y)", "x + 1",
        "x // 7", "x % 7", "x.sum(1)", "x.float()", "x.bfloat16()", "x.to(torch.int16)",
    )),
    Family("sums", (*_ROWS, "17x50000", "1000x1003", "50000x17", "10000x100"), (
        "x.sum()", "x.sum(0)", "x.sum(1)", "x.mean(1)", "x.mean(0)", "x.amax(1)", "x.amax(0)",
        "x.argmax(1)",
        "x.argmax(0)", "x.argmin(1)", "x.argmin()", "x.var(1)", "x.prod(1)", "x.cumsum(1)",
        "x.cumsum(0)", "x.cumprod(1)",
        "x.cumprod(0)", "x.logsumexp(1)",
        "F.softmax(x, 1)", "F.log_softmax(x, 1)", "F.softmax(x, 0)", "F.log_softmax(x, 0)",
        "x.norm(dim=1)", "x.norm(dim=0)", "x.norm(1, 1)",
        "x.norm(1, 0)", "(x > 0).any(1)", "x.std(0)",
    ), _DTYPES),
    Family("of two", _two(_ROWS), (
        "x + y", "x * y", "x - y", "x / y", "torch.maximum(x, y)", "torch.where(x > 0, x, y)",
        "torch.atan2(x, y)", "torch.hypot(x, y)", "torch.fmod(x, y)",
        "torch.remainder(x, y)", "torch.floor_divide(x, y)", "F.mse_loss(x, y)", "x.copy_(y)",
        "x.add_(y)", "x.mul_(y)",
        f"{_OPS}.threshold_backward(x, y, 0)", f"{_OPS}.gelu_backward(x, y)",
        f"{_OPS}.silu_backward(x, y)", f"{_OPS}.sigmoid_backward(x, y)",
        f"{_OPS}.tanh_backward(x, y)", f"{_OPS}._softmax_backward_data(x, y, 1, x.dtype)",
        f"{_OPS}._log_softmax_backward_data(x, y, 1, x.dtype)",
        f"{_OPS}._softmax_backward_data(x, y, 0, x.dtype)",
        f"{_OPS}._log_softmax_backward_data(x, y, 0, x.dtype)",
        f"{_OPS}.gelu_backward(x, y, approximate='tanh')",
        f"{_OPS}.mse_loss_backward(x, x, y, 1)", f"{_OPS}.hardswish_backward(x, y)",
        "torch.copysign(x, y)", f"{_OPS}.glu_backward(x[:, :x.shape[1] // 2], x, 1)",
    ), _DTYPES),
    Family("broadcast", ("1000x1000, 1000", "30000x7, 7", "100000x3, 3", "8x64x28x28, 64x1x1",
        "8x64x28x28:nhwc, 64x1x1", "100x1000, 100x1", "1000x1000, 1000x1000:t"),
        ("x + y", "x * y", "x / y"), _DTYPES),
    Family("norms", ("512x256, 256, 256", "1024x64, 64, 64", "8x1024, 1024, 1024",
        "2048x512, 512, 512"), (
        "F.layer_norm(x, x.shape[1:], y, z)",
        "F.rms_norm(x, x.shape[1:], y)",
    ), _DTYPES),
    Family("norms", ("512x256, 256, 256, 512x1", "1024x64, 64, 64, 1024x1",
        "4096x256, 256, 256, 4096x1", "2048x768, 768, 768, 2048x1"), (
        f"{_OPS}.native_layer_norm_backward(x, x, x.shape[1:], u, u, y, z, (True, True, True))",
    ), _DTYPES),
    Family("norms", ("4x32x32x32, 4x8, 32", "4x32x32x32:nhwc, 4x8, 32", "8x64x28x28, 8x8, 64"), (
        f"{_OPS}.native_group_norm(x, z, z, *x.shape[:2], x[0, 0].numel(), 8, 1e-5)",
        f"{_OPS}.native_group_norm_backward(x, x, y, y, z, *x.shape[:2], x[0, 0].numel(), 8, "
        "(True, True, True))",
    ), _DTYPES),
    Family("images", _IMAGES, (
        "F.avg_pool2d(x, 2)", "F.avg_pool2d(x, 3, 1, 1)", "F.max_pool2d(x, 2)",
        f"{_OPS}.max_pool2d_with_indices(x, (2, 2), (2, 2))",
        f"{_OPS}.max_pool2d_with_indices(x, (3, 3), (2, 2), (1, 1))",
        f"{_OPS}.max_pool3d_with_indices(x, (2, 2, 2), (2, 2, 2))",
        "F.max_pool2d(x, 3, 2, 1)", "F.adaptive_avg_pool2d(x, 7)", "F.adaptive_avg_pool2d(x, 20)",
        "x.mean((2, 3))",
        "x.sum((0, 2, 3))",
        "F.interpolate(x, scale_factor=2)", "F.interpolate(x, scale_factor=2, mode='bilinear')",
        "F.interpolate(x, scale_factor=2, mode='nearest-exact')",
        "F.interpolate(x, size=(31, 45), mode='nearest-exact')",
        "F.interpolate(x, scale_factor=2, mode='bicubic')",
        "F.interpolate(x, size=(20, 20), mode='bicubic')",
        f"{_OPS}._upsample_nearest_exact2d_backward(x, x.shape[2:], "
        "(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2))",
        f"{_OPS}.upsample_nearest2d_backward(x, x.shape[2:], "
        "(*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2))",
        f"{_OPS}.avg_pool2d_backward(x[:, :, ::2, ::2].contiguous(), x, (2, 2), (2, 2), (0, 0), "
        "False, True, None)",
        f"{_OPS}._adaptive_avg_pool2d_backward(x[:, :, :7, :7], x)",
        f"{_OPS}._adaptive_avg_pool2d_backward(x[:, :, :20, :20], x)",
        f"{_OPS}.reflection_pad2d_backward(x, x[:, :, 2:-2, 2:-2], (2, 2, 2, 2))",
        f"{_OPS}.replication_pad2d_backward(x, x[:, :, 2:-2, 2:-2], (2, 2, 2, 2))",
        "F.pad(x, (1, 1, 1, 1))", "F.pad(x, (2, 2, 2, 2), 'reflect')",
        "F.pad(x, (2, 2, 2, 2), 'replicate')", "F.pad(x, (2, 2, 2, 2), 'circular')",
        "F.pixel_shuffle(x[:, :x.shape[1] // 4 * 4], 2)"
        " if x.shape[1] > 3 else F.pixel_unshuffle(x, 2)", "F.softmax(x, 1)",
        "x.permute(0, 2, 3, 1).contiguous()", "x.contiguous()", "torch.cat((x, x), 1)",
        "x.to(memory_format=torch.channels_last)", "F.group_norm(x, 1)", "F.relu(x)",
        "F.unfold(x, 3)", "F.unfold(x, 3, padding=1)", "F.unfold(x, 2, stride=2)",
        f"{_OPS}.col2im(x[:, :x.shape[1] // 3 * 3].flatten(2), x.shape[2:], (1, 3), (1, 1), "
        "(0, 1), (1, 1))", "x + 1", "x.cumsum(1)", "x.mean(1)", "x.amax(1)", "x.amax((2, 3))",
        f"{_OPS}.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)",
    ), _DTYPES),
    Family("heads", ("8x128x12x64", "32x64x10x20", "2x1024x3x64", "2x1024x12x4", "100x100x3x8"), (
        "x.transpose(1, 2).contiguous()", "x.permute(0, 2, 3, 1).contiguous()",
        "x.transpose(-1, -2).contiguous()", "x.transpose(1, 2).clone()", "F.softmax(x, -1)",
        "F.softmax(x, 2)", "F.log_softmax(x, 2)",
        f"{_OPS}._softmax_backward_data(x, x, 2, x.dtype)",
        "x.permute(3, 2, 1, 0).contiguous()",
        "F.log_softmax(x, -1)", "x.sum(-1)", "x.mean((0, 2))",
        "x.flatten(2).sum(1)", "x.flatten(2).mean(1)",
    ), _DTYPES),
    Family("indices", ("1000x1000, 1000:i64<1000",), (
        "x[y]", "x[:, y]", "x.index_select(0, y)", "x.index_select(1, y)",
        "x.gather(1, y[:, None])",
        "x.gather(1, y[None].expand(500, -1))", "x.index_add(0, y, x)", "x.index_add(1, y, x)",
        "x.take(y)", "x.put(y, x[0])", "x.index_copy(0, y, x)", "x.index_fill(0, y, 0.0)",
        "F.embedding(y, x)",
        f"{_OPS}.nll_loss_forward(x, y, None, 1, -100)", "x.scatter(1, y[:, None], 1.0)",
    ), _DTYPES),
    Family("indices", ("1000x1000, 1000x1000:i64<1000",), (
        "x.gather(1, y)", "x.gather(0, y)", "x.scatter(1, y, x)", "x.scatter_add(0, y, x)",
        "x.scatter_add(1, y, x)",
    ), _DTYPES),
)
# On a GPU, where 12 to 100 MB pass.
GPU_FAMILIES = (
    Family("gpu rows", ("64x100000", "4096x4096", "100000x64", "500000x8"), (
        "x.sum(-1)", "x.sum(0)", "x.sum()", "x.mean(-1)", "x.mean()", "x.amax(-1)", "x.amax(0)",
        "x.amax()", "x.var(-1)", "x.std(-1)", "torch.var_mean(x, 0)", "x.argmax(-1)", "x.max(-1)",
        "x.prod(-1)", "x.any(-1)", "x.softmax(-1)", "x.softmax(0)", "x.log_softmax(-1)",
        "x.logsumexp(-1)", "F.layer_norm(x, x.shape[-1:])", "F.rms_norm(x, x.shape[-1:])",
        "torch.linalg.vector_norm(x, dim=-1)", "x.cumsum(-1)", "F.gelu(x)", "F.silu(x)", "x + 1",
        "x.exp()", "x.tanh()", "x.erfinv()", "x.t().contiguous()", "torch.cat([x, x])",
        "torch.cat([x, x], -1)", "torch.stack([x, x], -1)", "x.flip(-1)", "x.roll(3, -1)",
        "F.pad(x, (1, 2))", "F.glu(x, -1)", "torch.where(x > 0, x, -1.0)", "x.float()",
    ), ("bf16",)),
    Family("gpu indices", (
        "64x100000, 64:i64<64", "4096x4096, 4096:i64<4096", "100000x64, 100000:i64<100000",
        "500000x8, 500000:i64<500000",
    ), (
        "x.index_select(0, y)", "x.gather(0, y[:, None].expand(-1, x.shape[1]))",
        "F.embedding(y, x)", "F.cross_entropy(x, y % x.shape[1])",
    ), ("bf16",)),
    Family("gpu images", ("32x64x56x56", "32x64x56x56:nhwc"), (
        "F.group_norm(x, 8)", "F.batch_norm(x, None, None, training=True)",
        "F.max_pool2d(x, 3, 2, 1)", "F.avg_pool2d(x, 2)", "F.interpolate(x, scale_factor=2)",
        "F.interpolate(x, scale_factor=2, mode='bilinear')", "F.adaptive_avg_pool2d(x, 1)",
        "x.mean((2, 3))", "F.pixel_shuffle(x, 2)", "x.to(memory_format=torch.channels_last)",
        "x.contiguous()",
    ), ("bf16",)),
)
# fmt: on

# For some inputs others of which a call by itself is all that there is.
SMALL = {
    "1000x1000": "8x8", "1000x1000, 1000x1000": "8x8, 8x8", "512x256, 256, 256": "8x8, 8, 8",
    "512x256, 256, 256, 512x1": "8x8, 8, 8, 8x1", "8x64x28x28": "2x4x8x8", "8x128x12x64": "2x3x4x5",
    "1000x1000, 1000:i64<1000": "8x8, 8:i64<8",
    "1000x1000, 1000x1000:i64<1000": "8x8, 8x8:i64<8",
}  # fmt: skip


def cases(families: Sequence[Family] = FAMILIES) -> Iterator[Case]:
    found = {}
    for family in families:
        for program in family.programs:
            small = [(SMALL[inputs], "f32") for inputs in family.inputs if inputs in SMALL]
            for inputs, dtype in (*itertools.product(family.inputs, family.dtypes), *small):
                case = Case(family.name, program, inputs, dtype, "run")
                found[case.name] = case
    yield from found.values()


def charges(case: Case, prices: Prices = cpu.CPU.prices) -> list[Charge]:
    """The calls of eager's that the case's graph is."""
    found: list[Charge] = []
    operators = supported()

    def priced(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graph = trace(gm, inputs, keep=(operators | WHOLE).__contains__)
        found.extend(bill(graph, [graph], operators, prices).calls)
        return gm.forward

    fusee.compile(case.function(), backend=priced)(*case.tensors())
    return [call for call in found if call.once]


def measured(case: Case, seconds: float) -> dict[str, Any] | None:
    """The operator with its layout, and both factors; None for what is no single call of loops."""
    function, given = case.function(), case.tensors()
    kernels = fusee.compile(function, options={"prices": False})
    kernels(*given)
    reports = [r for r in fusee.report(kernels) if not r.externs]
    if len(reports) != 1 or len(found := charges(case)) != 1:
        return None
    (call,) = found
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: function(*given),
        "compile": lambda: kernels(*given),
    }
    row = turns(calls, seconds)["compile"]
    us = round(row["eager_us"], 1)
    if _is_small(case):
        own, loop = (round(time * UNITS) for time in (row["eager_us"], row["us"] - CAPTURED_US))
        return {"kind": call.once, "own": own, "loop": loop, "us": us}
    if row["eager_us"] < LEAST_US:
        return None
    prices = cpu.CPU.prices
    own = (row["eager_us"] * UNITS - prices.call) / call.passed
    loop = (row["us"] * UNITS - prices.run) / call.passed
    return {"kind": call.kind, "own": round(own, 3), "loop": round(max(loop, 0.1), 3), "us": us}


def measured_on_gpu(case: Case, seconds: float) -> dict[str, Any] | None:
    """As `measured`, by what the GPU takes alone."""
    function, given = case.function(), [x.cuda() for x in case.tensors()]
    kernels = fusee.compile(function, options={"prices": False, "graphs": False})
    kernels(*given)
    prices = cuda.CUDA.prices
    if len(found := charges(case, prices)) != 1:
        return None
    (call,) = found
    us, loop_us = (_alone(partial(f, *given), seconds) for f in (function, kernels))
    own, loop = (round(x * prices.unit / call.passed, 3) for x in (us, loop_us))
    return {"kind": call.kind, "own": own, "loop": loop, "us": round(us, 1)}


def _alone(call: Callable[[], object], seconds: float) -> float:
    """Microseconds of a call that is recorded eight times."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    event: Any = torch.cuda.Event
    found, start = list[float](), time.perf_counter()
    while len(found) < 5 or time.perf_counter() - start < seconds:
        begin, end = (event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 8 * 1e3)
    return statistics.median(found)


def _is_small(case: Case) -> bool:
    return case.inputs in SMALL.values()


def renamed(rows: dict[str, Any], families: Sequence[Family], prices: Prices) -> None:
    """Let rows that were measured say what their operands are like in the words of now."""
    for case in cases(families):
        row = rows.get(case.name)
        if row and "kind" in row and len(found := charges(case, prices)) == 1:
            row["kind"] = found[0].once if _is_small(case) else found[0].kind


def table(rows: dict[str, dict[str, Any] | None]) -> dict[str, Pair]:
    """By operator and layout; what a word of a layout makes of an operator without it."""
    found: dict[str, list[Pair]] = {}
    for row in rows.values():
        if row is not None and row.get("kind", "")[:1].strip():  # it is a call of eager's
            found.setdefault(row["kind"], []).append((row["own"], row["loop"]))
    made = {kind: _middle(pairs) for kind, pairs in sorted(found.items())}
    words: dict[str, list[Pair]] = {}
    operators: dict[str, set[str]] = {}
    for kind, (own, loop) in made.items():
        name, *layout = kind.split(" ")
        if not layout:
            words.setdefault("", []).append((own, loop))
            operators.setdefault("", {""}).add(name)
        for word in layout:
            without = made.get(" ".join((name, *(x for x in layout if x != word))))
            if without is not None and "once" not in layout:
                words.setdefault(f" {word}", []).append((own / without[0], loop / without[1]))
                operators.setdefault(f" {word}", {""}).add(name)
    often = {word: words[word] for word in sorted(words) if len(operators[word]) > OFTEN}
    return {**{word: _middle(pairs) for word, pairs in often.items()}, **made}


def _middle(pairs: list[Pair]) -> Pair:
    """The median of what loops take, and of how much longer ATen takes."""
    loop = statistics.median(loop for _, loop in pairs)
    by = statistics.median(math.log(max(own, 0.01) / loop) for own, loop in pairs)
    return round(loop * math.exp(by), 2), round(loop, 2)


def plot(made: dict[str, Pair], path: Path) -> None:
    """Each row: loops along, ATen's kernels up; above the line loops take less."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 7))
    made = {kind: pair for kind, pair in made.items() if not kind.endswith("once")}
    words = {kind.partition(" ")[2] or "plain" for kind in made}
    for word in sorted(words):
        pairs = [made[kind] for kind in made if (kind.partition(" ")[2] or "plain") == word]
        axes.scatter([loop for _, loop in pairs], [own for own, _ in pairs], s=12, label=word)
    axes.axline((1, 1), slope=1, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="loops, by bytes", ylabel="ATen's kernel, by bytes")
    axes.legend(fontsize=7)
    chart.tight_layout()
    chart.savefig(path, dpi=110)
    pyplot.close(chart)


def _lines(rows: dict[str, Any], lead: Callable[[str], str] = lambda key: key) -> str:
    """JSON with a line for all that have the same lead."""
    lines: dict[str, list[str]] = {}
    for key, row in rows.items():
        lines.setdefault(lead(key), []).append(f"{json.dumps(key)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(map(", ".join, lines.values())) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.prices", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.02, help="per program")
    parser.add_argument("--only", default="", help="a part of programs' names")
    parser.add_argument("--words", action="store_true", help="say anew what operands are like")
    parser.add_argument("--vendor", default=cpu.vendor(), help="whose rows; measured on its own")
    parser.add_argument("--write", action="store_true", help="the table that the CPU reads")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    is_gpu = given.vendor not in ("amd", "intel")
    is_here = torch.cuda.is_available() if is_gpu else given.vendor == cpu.vendor()
    results = RESULTS / f"prices_{given.vendor}.json"
    rows = json.loads(results.read_text()) if results.exists() else {}
    measure = measured_on_gpu if is_gpu else measured
    families, target = (GPU_FAMILIES, cuda) if is_gpu else (FAMILIES, cpu)
    prices = cuda.CUDA.prices if is_gpu else cpu.CPU.prices
    with torch.no_grad():
        if given.words:
            renamed(rows, families, prices)
            results.write_text(_lines(rows))
        for case in cases(families):
            if case.name in rows or given.only not in case.name or not is_here:
                continue
            try:
                rows[case.name] = measure(case, given.seconds)
            except (FuseeError, RuntimeError) as error:
                rows[case.name] = {"error": str(error)[:100]}
            print(case.name, rows[case.name], flush=True)
            results.write_text(_lines(rows))
    made = table(rows)
    for kind, (own, loop) in made.items():
        print(f"{kind or 'plain':40s} {own:7.2f} {loop:7.2f}", file=sys.stdout)
    if given.write:
        path = target.PRICES
        tables = json.loads(path.read_text()) | {given.vendor: made}
        texts = (_lines(rows, lambda kind: kind.partition(" ")[0]) for rows in tables.values())
        inner = (f'"{vendor}": {text.rstrip()}' for vendor, text in zip(tables, texts))
        path.write_text("{\n" + ",\n".join(inner) + "\n}\n")
        plot(made, results.with_suffix(".png"))


if __name__ == "__main__":
    main()
