"""On a GPU: what the other tests say of kernels and launches, by its own driver.

python -m pytest tests/targets/cuda/test_device.py
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan

import fusee
from fusee.backends.report import live_reports
from fusee.codegen.simt import teams as tile
from fusee.errors import MissingPackage
from fusee.targets.cuda import launch
from tests.capturing import test_distributed
from tests.capturing.test_triton import KERNEL
from tests.targets.cuda.test_kernels import (
    CROSSED,
    EXTREMES,
    FLOATS,
    OTHERS,
    POINTWISE,
    REDUCTIONS,
    ROWS,
    SHARED,
    TOLERANCE,
    check_exponentials,
    exponents,
    numbers,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    """What a kernel did wrong belongs to the test that launched it."""
    yield
    torch.cuda.synchronize()


def moved(tree: Any) -> Any:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in tree)


def agree(
    fn: Callable[..., Any], *args: Any, tolerance: float = 2e-5, prices: bool = True, **how: Any
) -> None:
    """Compiled on the GPU gives what eager gives there, and says that it was compiled."""
    given = moved(args)
    mine, theirs = copy.deepcopy(given), copy.deepcopy(given)
    compiled = fusee.compile(fn, options={"cache": False, "prices": prices}, **how)
    for _ in range(2):
        got, want = compiled(*mine), fn(*theirs)
        close(got, want, tolerance)
        close(mine, theirs, tolerance)
    assert not live_reports()[-1].eager


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("program", POINTWISE)
def test_pointwise(program: str, dtype: torch.dtype) -> None:
    for shape in [(1003,), (8, 64), (1 << 20,)]:
        agree(POINTWISE[program], numbers(*shape, dtype=dtype), tolerance=TOLERANCE[dtype])


def test_exponentials() -> None:
    check_exponentials(fusee.compile(torch.exp)(exponents().cuda()).cpu())


def test_many_long_rows() -> None:
    x = numbers(600, 50_304, dtype=torch.bfloat16)
    agree(lambda x: torch.softmax(x, -1), x, tolerance=TOLERANCE[torch.bfloat16])
    agree(lambda x: F.log_softmax(x.float(), -1), x, tolerance=1e-4)


@pytest.mark.parametrize("shape", [*ROWS, (4, 50_304), (4096, 1024)], ids=str)
@pytest.mark.parametrize("program", REDUCTIONS)
def test_reductions(program: str, shape: tuple[int, ...]) -> None:
    agree(REDUCTIONS[program], numbers(*shape), tolerance=2e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_of_other_dtypes(dtype: torch.dtype) -> None:
    for program in ("softmax", "layer norm", "sums of columns"):
        agree(REDUCTIONS[program], numbers(64, 1024, dtype=dtype), tolerance=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("program", SHARED)
def test_reductions_that_blocks_share(program: str) -> None:
    fn, shape = SHARED[program]
    agree(fn, numbers(*shape), tolerance=1e-3)
    compiled, x = fusee.compile(fn), numbers(*shape).cuda()
    first = compiled(x)
    for _ in range(50):  # parts are merged in one order, whichever block comes last
        torch.testing.assert_close(compiled(x), first, rtol=0, atol=0)


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("shape", [(2, 40_000), (2, 300_000)], ids=str)
def test_one_pass_of_extreme_numbers(shape: tuple[int, int], value: float) -> None:
    x = numbers(*shape)
    x[0, 777], x[1] = value, value
    agree(lambda x: (torch.softmax(x, -1), x.logsumexp(-1)), x)


@pytest.mark.parametrize("program", OTHERS)
def test_other_loops(program: str) -> None:
    fn, *args = OTHERS[program]()
    agree(fn, *args)


@pytest.mark.parametrize("many", [1, 1 << 20], ids=["wide", "narrow"])
@pytest.mark.parametrize("program", CROSSED)
def test_tiles(program: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "LEAST", 1)
    monkeypatch.setattr(tile, "MANY", many)
    fn, *args = CROSSED[program]()
    agree(fn, *args, prices=False)


@pytest.mark.parametrize("program", [F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle])
def test_shuffled_channels_lie_in_rows(program: Callable[..., Tensor]) -> None:
    """ATen has kernels that keep the layout for CPUs alone."""
    x = numbers(2, 8, 6, 4).to(memory_format=torch.channels_last)
    agree(lambda x: program(x.sin(), 2), x)
    got, want = fusee.compile(lambda x: program(x.sin(), 2))(x.cuda()), program(x.cuda(), 2)
    assert got.stride() == want.stride()


@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.int8, torch.int16, torch.int64, torch.bool], ids=str
)
def test_large_tiles(dtype: torch.dtype) -> None:
    x, y = ((numbers(2049, 1030) * 50).to(dtype) for _ in "ab")
    agree(lambda x: x.t().contiguous(), x, prices=False)
    agree(lambda x, y: torch.stack([x, y], -1), x, y, prices=False)
    images = (numbers(8, 48, 60, 61) * 50).to(dtype)
    agree(lambda x: x.contiguous(memory_format=torch.channels_last), images, prices=False)
    agree(lambda x: x[:, :3].contiguous(memory_format=torch.channels_last), images, prices=False)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8], ids=str)
def test_scatters_by_atomics(dtype: torch.dtype) -> None:
    place, source = torch.randint(0, 8, (200, 64)), (numbers(200, 64) * 4).to(dtype)
    start, near = (numbers(8, 64) * 4).to(dtype), 50 * TOLERANCE.get(dtype, 0)
    agree(lambda x, i, s: x.scatter_add(0, i, s), start, place, source, tolerance=near)
    for how in ("amax", "amin"):
        agree(lambda x, i, s, how=how: x.scatter_reduce(0, i, s, how), start, place, source)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_rows_times_a_matrix(rows: int, dtype: torch.dtype) -> None:
    weights = numbers(1536, 512, dtype=dtype) / 16, numbers(512, 1536, dtype=dtype) / 16
    agree(
        lambda x, up, down: F.linear(F.silu(F.linear(x, up)), down) + x,
        numbers(rows, 1, 512, dtype=dtype), *weights,
        tolerance=1e-3 if dtype is torch.float32 else 3e-2,
    )  # fmt: skip
    assert not live_reports()[-1].externs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)
        self.heads = nn.Linear(256, 768)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], 4, 64).transpose(1, 2) for y in self.heads(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.down(F.gelu(self.up(self.norm(x + mixed))))


def test_a_block_of_a_transformer() -> None:
    net, x = Block().cuda().eval(), torch.randn(2, 32, 256, device="cuda")
    compiled = fusee.compile(net)
    earlier = []
    with torch.no_grad():
        for k in range(4):
            given = x + k
            earlier.append((compiled(given), net(given)))
        for got, want in earlier:
            close(got, want, 2e-3)
    assert not live_reports()[-1].eager


@pytest.mark.parametrize("mode", ["pointwise", "generic"])
def test_scans_by_functions_are_one_graph(mode: str) -> None:
    """As mamba's, whose eager mode has no scan by points."""

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def fn(x: Tensor, y: Tensor, chosen: str = "generic") -> Tensor:
        given = x.sigmoid()[:, :, :, None] * y[:, None], x[:, :, :, None] * y[:, None]
        states: Tensor = associative_scan(combine, given, 2, combine_mode=chosen)[1]
        return states.sum(-1)

    x, y = torch.randn(2, 40, 33, device="cuda"), torch.rand(2, 33, 16, device="cuda")
    with torch.no_grad():
        got = fusee.compile(fn, fullgraph=True)(x, y, mode)
        torch.testing.assert_close(got, fn(x, y), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("keys", [17, 160])
@pytest.mark.parametrize("number", [-torch.inf, torch.finfo(torch.bfloat16).min])
def test_attention_written_as_products(keys: int, number: float) -> None:
    """By the kernels that ATen chooses, rows that are hidden whole included."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = (q @ k.mT) * 0.25 + bias.masked_fill(bias < -3, number)
        return scores.softmax(-1) @ v

    q, k, v = (torch.randn(4, 3, keys, 16).bfloat16() for _ in range(3))
    bias = torch.randn(1, 3, keys, keys).bfloat16()
    bias[:, :, 2] = -4.0
    with torch.no_grad():
        agree(fn, q, k, v, bias, tolerance=3e-2)
    assert any("became attention" in note for note in live_reports()[-1].passes)


def test_the_driver_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no nvJitLink."""

    def missing() -> Any:
        raise MissingPackage("CUDA's libnvJitLink cannot be loaded")

    monkeypatch.setattr(launch, "version", missing)
    monkeypatch.setattr(launch, "link", missing)
    agree(lambda x: torch.softmax(x + 0.123, -1).sum(0), numbers(70, 300))


def test_the_report_says_what_kernels_take() -> None:
    fusee.compile(lambda x: torch.softmax(x, -1))(torch.randn(64, 1024, device="cuda"))
    (row,) = live_reports()[-1].kernels
    assert re.search(r"\([1-9]\d* registers, 0 bytes spilled\)", str(row)), str(row)


def test_replays() -> None:
    """Inputs at new addresses, results of earlier calls, modes, random numbers, streams."""
    net = nn.Sequential(*(Block() for _ in range(3))).cuda().eval()
    compiled, given = fusee.compile(net), [torch.randn(2, 32, 256, device="cuda") for _ in range(6)]
    with torch.no_grad():
        earlier = [compiled(x) for x in given]
        close(earlier, [net(x) for x in given], 2e-3)
        with torch.cuda.stream(torch.cuda.Stream()):
            close([compiled(x) for x in given], earlier)
        next(net.parameters()).add_(1.0)
        close(compiled(given[0]), net(given[0]), 5e-3)
        said = str(live_reports()[-1])
    with torch.inference_mode():
        for x in given:
            close(compiled(x), net(x), 5e-3)
    assert "2 CUDA graphs" in said and "any more" not in said, said
    assert "CUDA graphs" in str(live_reports()[-1])


def test_replays_of_random_numbers() -> None:
    weights = [torch.randn(64, 64, device="cuda") for _ in range(3)]

    def fn(x: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w) * torch.rand_like(x)
        return x

    compiled, x, found = fusee.compile(fn), torch.randn(8, 64, device="cuda"), []
    for call in (compiled, fn):
        torch.manual_seed(5)
        found.append([call(x) for _ in range(5)])
    close(found[0], found[1])
    assert "4 calls replayed" in str(live_reports()[-1])


def test_what_cannot_be_recorded_runs_directly() -> None:
    """Torch's generator goes on to give random numbers after a recording that failed."""
    weights = [torch.randn(64, 64, device="cuda") for _ in range(3)]

    def fn(x: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(torch.linalg.inv(w) @ x)  # the host looks whether it is singular
        return x

    compiled, x = fusee.compile(fn), torch.randn(64, 64, device="cuda")
    for _ in range(4):
        close(compiled(x), fn(x), 1e-2)
        torch.randn(4, device="cuda")
    assert "none any more" in str(live_reports()[-1])


def test_calls_within_a_graph_of_the_users() -> None:
    net, x = Block().cuda().eval(), torch.randn(2, 32, 256, device="cuda")
    compiled = fusee.compile(net)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = compiled(x)
        for k in range(3):
            compiled(x + k)
            x.copy_(torch.randn_like(x))
            graph.replay()
            close(got, net(x), 2e-3)


def test_training() -> None:
    net, x = Block().cuda(), torch.randn(2, 32, 256, device="cuda")
    found = []
    for call in (fusee.compile(net), net):
        net.zero_grad()
        call(x).square().mean().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    close(found[0], found[1], 2e-3)


def test_training_is_replayed() -> None:
    """Steps of AdamW, with two forwards before their backwards in between; what was given stays."""
    twins = [nn.Sequential(*(Block() for _ in range(3))).cuda() for _ in "ab"]
    twins[1].load_state_dict(twins[0].state_dict())
    calls = fusee.compile(twins[0]), twins[1]
    steps = [torch.optim.AdamW(net.parameters(), 1e-3) for net in twins]
    earlier: list[Any] = []
    for number in range(10):
        x, found = torch.randn(2, 32, 256, device="cuda"), []
        for call, net, step in zip(calls, twins, steps, strict=True):
            step.zero_grad()
            losses = [call(x).square().mean() for _ in range(2 if number == 5 else 1)]
            sum(losses).backward()
            found.append([losses[0].detach(), *(p.grad for p in net.parameters())])
            step.step()
        earlier.append((found, [y.clone() for y in found[0]]))
    for (got, want), at_once in earlier:
        close(got, want, 2e-2)
        close(got, at_once, 0)
    said = str(live_reports()[-1])
    assert said.count("calls replayed") == 2 and "any more" not in said, said


def test_forwards_and_backwards_of_several_sizes_share_memory() -> None:
    """Recordings of all of them, and values that are wanted while others run."""
    torch.manual_seed(0)
    layers = [(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256))] * 3
    net = nn.Sequential(*(copy.deepcopy(layer) for four in layers for layer in four)).cuda()
    compiled = fusee.compile(net, dynamic=True, options={"cache": False})

    def gradients(y: Tensor, keep: bool = False) -> list[Tensor]:
        found = torch.autograd.grad(y.square().mean(), [*net.parameters()], retain_graph=keep)
        return list(found)

    for k in range(40):
        x, z = (torch.randn((64, 96, 512)[k // 2 % 3], 256, device="cuda") for _ in "xz")
        kept = compiled(z) if k % 5 == 4 else None
        y = compiled(x)
        close(y, net(x), 1e-4)
        close(gradients(y, keep=k % 7 == 3), gradients(net(x)), 1e-4)
        if k % 7 == 3:
            close(gradients(y), gradients(net(x)), 1e-4)
        if kept is not None:
            close(gradients(kept), gradients(net(z)), 1e-4)
    report = str(live_reports()[-1])
    assert "calls replayed" in report and " 0 calls replayed" not in report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    net, x = Block().cuda(), torch.randn(2, 32, 256, device="cuda")
    compiled, found = fusee.compile(net), []
    for call in (compiled, net):
        net.zero_grad()
        with torch.autocast("cuda", dtype):
            y = call(x)
        y.float().square().mean().backward()
        with torch.no_grad(), torch.autocast("cuda", dtype):
            grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            found.append((y.detach(), call(x), grads))
    close(found[0], found[1], 3e-2)
    assert [y.dtype for y in found[0][:2]] == [y.dtype for y in found[1][:2]]
    assert not any(report.eager for report in live_reports()[-2:])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_training(dtype: torch.dtype, dropout: float) -> None:
    """Torch chooses the kernel, whose numbers are drawn as eager's."""
    found = []
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=dtype) for _ in range(3))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

    for call in (fusee.compile(fn), fn):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(1)
        y = call(*given)
        found.append((y.detach(), *torch.autograd.grad(y.float().sin().sum(), given)))
    close(found[0], found[1], 2e-2 if dtype is torch.bfloat16 else 1e-3)
    assert not live_reports()[-1].eager


@pytest.mark.parametrize("keys", [6, 17])
def test_masks_that_heads_share_in_training(keys: int) -> None:
    """ATen's kernel takes no rows that begin anywhere."""

    def fn(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, (mask > 0).float() * -9)

    q, k = (torch.randn(2, 4, n, 8, device="cuda") for n in (6, keys))
    mask, found = torch.randn(2, 1, 6, keys, device="cuda"), []
    for call in (fusee.compile(fn), fn):
        given = [x.clone().requires_grad_() for x in (q, k)]
        y = call(given[0], given[1], mask)
        found.append((y.detach(), *torch.autograd.grad(y.sin().sum(), given)))
    close(found[0], found[1], 1e-3)


def test_numbers_of_the_cpu_that_others_are_derived_from() -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))

    def fn(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x / torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float32) * 1) * scale.exp()
        return x.softmax(-1)

    compiled, x = fusee.compile(fn, options={"prices": False}), torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            close(compiled(x), fn(x))
            scale.mul_(0.5)


def test_a_graph_that_is_tried_first_draws_no_numbers() -> None:
    """Whether eager refuses tensors without elements is asked by running the graph."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x * 2, 0.3), torch.cat((x[:, :0], x), 1).exp()

    found = []
    for call in (fusee.compile(fn), fn):
        torch.manual_seed(3)
        found.append((*call(torch.ones(64, 33, device="cuda")), torch.cuda.get_rng_state()))
    close(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_that_is_recorded_in_one_direction_alone(dtype: torch.dtype) -> None:
    """A forward that is replayed leaves its seed elsewhere than one that is launched."""

    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.sin(), x, x.cos(), dropout_p=0.2)

    compiled, kept = fusee.compile(fn), []
    for k in range(8):
        found = []
        x = torch.randn(2, 4, 64, 64, device="cuda", dtype=dtype)
        for call in (compiled, fn):
            given = x.clone().requires_grad_()
            torch.manual_seed(k)
            y = call(given)
            kept.append(y if k % 3 == 1 else given)  # so that addresses vary, and what is saved
            found.append((y.detach(), *torch.autograd.grad(y.float().sin().sum(), given)))
        close(found[0], found[1], 2e-2 if dtype is torch.bfloat16 else 1e-3)


def test_open_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.softmax(F.gelu(x), -1) / x.shape[0]

    compiled = fusee.compile(fn, dynamic=True)
    for shape in [(5, 33), (8, 64), (3, 700), (64, 1024)]:
        x = torch.randn(shape, device="cuda")
        close(compiled(x), fn(x))


def test_odd_pointers() -> None:
    compiled, whole = fusee.compile(lambda x, y: (x + y).relu()), torch.randn(5000, device="cuda")
    x = torch.randn(4096, device="cuda")
    for start in (0, 1, 2, 3, 4, 0):
        y = whole[start : start + 4096]
        close(compiled(x, y), (x + y).relu())


def test_streams_and_threads() -> None:
    w = torch.randn(512, 512, device="cuda")

    def fn(x: Tensor) -> Tensor:
        return torch.mm(F.gelu(x), w).relu().sum(-1)

    compiled, finished = fusee.compile(fn), []
    compiled(torch.randn(512, 512, device="cuda"))
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for k in range(20):
                x = torch.full((512, 512), 0.01 * (number + k), device="cuda")
                close(compiled(x), fn(x), 1e-2)
        finished.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == 4


def test_numbers_that_vary() -> None:
    weights = [torch.randn(64, 64, device="cuda") for _ in range(3)]

    def fn(x: Tensor, scale: float, shift: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w) * scale + shift * torch.tensor(0.5)
        return x

    compiled, x = fusee.compile(fn), torch.randn(8, 64, device="cuda")
    for k in range(8):
        close(compiled(x, 0.1 * k, torch.tensor(1.0 + k)), fn(x, 0.1 * k, torch.tensor(1.0 + k)))
    assert "calls replayed" in str(live_reports()[-1])


@pytest.mark.parametrize("moved", [Tensor.to, Tensor.type_as])
def test_what_moves_to_where_another_tensor_is(moved: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A mask made on the CPU, as xlnet does."""

    def fn(x: Tensor) -> Tensor:
        hidden = moved(-torch.eye(len(x)), x)
        return (x + hidden[:, :, None]).gt(0).to(x, copy=True) * x

    compiled = fusee.compile(fn)
    for size in (8, 8, 12):
        x = torch.randn(size, size, 16, device="cuda", requires_grad=True)
        with torch.no_grad():
            close(compiled(x), fn(x))
        got, want = (torch.autograd.grad(f(x).sum(), x) for f in (compiled, fn))
        close(got[0], want[0])


def test_numbers_of_the_cpu_come_first() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        scale, total = torch.tensor(0.5), x.sum()
        return scale * total, scale * x, torch.maximum(scale, total)

    for dynamic in (False, True):
        compiled = fusee.compile(fn, dynamic=dynamic)
        for size in (8, 8, 12):
            x = torch.randn(size, 16, device="cuda", requires_grad=True)
            got, want = compiled(x), fn(x)
            close(got, want)
            assert [y.device for y in got] == [y.device for y in want]
            close(torch.autograd.grad(got[0], x), torch.autograd.grad(want[0], x))


def test_parts_on_the_cpu() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        index = torch.arange(4).flip(0)
        return x[index] * 2, x.softmax(-1).cpu(), index + 1, torch.zeros_like(x, device="cpu")

    x = torch.randn(8, 64, device="cuda")
    compiled = fusee.compile(fn)
    for _ in range(3):
        got, want = compiled(x), fn(x)
        close(got, want)
        assert [y.device for y in got] == [y.device for y in want]
    assert not live_reports()[-1].eager


@pytest.mark.parametrize("casts", [False, True], ids=["as it is", "autocast"])
def test_dropout_draws_what_eager_draws(casts: bool) -> None:
    for dtype in FLOATS:
        x = torch.randn(64, 333, device="cuda", dtype=dtype, requires_grad=True)
        fn, found = (lambda x: F.dropout(x * 2, 0.3) + F.dropout(x, 0.5)), []
        for call in (fusee.compile(fn), fn):
            torch.manual_seed(3)
            with torch.autocast("cuda", torch.bfloat16, enabled=casts):
                y = call(x)
            found.append((y.detach(), *torch.autograd.grad(y.float().sum(), x)))
        close(found[0], found[1], TOLERANCE[dtype])


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[1:], y[0]),
    "group norm": lambda x, y: F.group_norm(x, 2, y[0], y[0]),
    "a mask": lambda x, y: x.clone().__setitem__(x > 0, y.sum()),
    "indices": lambda x, y: x.clone().__setitem__(torch.arange(6, device="cuda"), y),
    "a loss": lambda x, y: F.mse_loss(x.detach().requires_grad_(), y).backward(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_eager_refuses(name: str) -> None:
    x, y = torch.randn(6, 4, device="cuda"), torch.randn(6, 4, device="cuda").bfloat16()
    for a, b in ((x, y), (y, x)):
        told = []
        for run in (REFUSED[name], fusee.compile(REFUSED[name])):
            try:
                run(a, b)
            except RuntimeError as error:
                told.append(str(error).partition("\n")[0])
        assert len(told) in (0, 2) and len({*told}) < 2, told


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus() -> None:
    compiled = fusee.compile(lambda x: torch.softmax(x, -1) * 2)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(8, 256, device=device)
        got = compiled(x)
        assert got.device == x.device
        close(got, torch.softmax(x, -1) * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_processes_that_train_one_model() -> None:
    test_distributed.run("cuda")


def test_memory_does_not_grow() -> None:
    net, x = Block().cuda().eval(), torch.randn(2, 32, 256, device="cuda")
    compiled, reserved = fusee.compile(net), []
    with torch.no_grad():
        for _ in range(100):
            compiled(x)
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[10]


def test_memory_of_many_sizes_has_a_bound() -> None:
    """Fifty lengths, seen again and again: as much memory as when they were first recorded."""
    net = Block().cuda().eval()
    compiled, reserved = fusee.compile(net, dynamic=True), []
    lengths = [*range(16, 16 + 50 * 8, 8)]
    with torch.no_grad():
        for turn in range(8):  # two of direct calls, then a recording of each length, both ways
            for length in lengths if turn % 2 else lengths[::-1]:
                compiled(torch.randn(2, length, 256, device="cuda"))
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
        for length in lengths:  # eager takes memory of its own
            x = torch.randn(2, length, 256, device="cuda")
            close(compiled(x), net(x))
    segment = 2 * 2**20  # of small tensors, one more or less as results of two turns overlap
    assert max(reserved[4:]) <= max(reserved[2:4]) + segment


TRITON = f"""
{KERNEL}

import fusee
call = fusee.compile(added, fullgraph=True)
for _ in range(3):
    x, y = (torch.randn(1000, device="cuda") for _ in "xy")
    torch.testing.assert_close(call(x, y), added(x, y))
print("agrees")
"""

ALONE = """
import os, subprocess, sys
os.environ["PATH"] = ""
sys.modules["triton"] = None
subprocess.Popen = None
import torch, fusee
net = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda().eval()
with torch.no_grad():
    x = torch.randn(2, 8, 64, device="cuda")
    torch.testing.assert_close(fusee.compile(net)(x), net(x), rtol=1e-3, atol=1e-3)
print("agrees")
"""

# torch has chosen no kernel yet, and so has not put them in order
ATTENTION = """
import torch, fusee
def call(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)
x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
found = []
for fn in (fusee.compile(call), call):
    torch.manual_seed(1)
    found.append(fn(x))
torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
print("agrees")
"""


@pytest.mark.parametrize(
    "program",
    [TRITON, ALONE, ATTENTION],
    ids=["a Triton kernel", "no compiler", "the first attention"],
)
def test_in_a_process_of_its_own(program: str, tmp_path: Path) -> None:
    """Triton reads sources from files."""
    script = tmp_path / "program.py"
    script.write_text(program)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "agrees" in found.stdout, found.stdout + found.stderr


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, pad_token_id=0, eos_token_id=96,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).cuda().eval()
    given = torch.randint(1, 90, (2, 7), device="cuda")
    how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    how["disable_compile"] = True  # else it compiles a static cache's steps itself, by torch's
    want = net.generate(given, **how)
    plain = net.forward
    net.forward = fusee.compile(plain)
    for _ in range(2):
        assert torch.equal(net.generate(given, **how), want)


BAD_INDEX = """
import torch, fusee
import torch.nn.functional as F
call = fusee.compile(lambda i, w: F.embedding(i, w).sin().cos().exp())
weight, good, bad = torch.randn(5, 64).cuda(), *(torch.tensor([1, k]).cuda() for k in (2, 7))
call(bad, weight)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("told", type(error).__name__, str(error).splitlines()[0])
try:
    call(good, weight)
except Exception as error:
    print("again", type(error).__name__, error)
"""


@pytest.mark.parametrize("keeps", ["0", "1"])
def test_bad_indices(keeps: str, tmp_path: Path) -> None:
    """In a process of its own: a GPU that has met one is of no use to it any more."""
    script = tmp_path / "program.py"
    script.write_text(BAD_INDEX)
    own = {"FUSEE_KEEP_CAPTURES": keeps, "FUSEE_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=False,
            env={**os.environ, **own},
        )  # fmt: skip
        said = found.stdout + found.stderr
        assert "told" in found.stdout and "again LateError index out of range" in found.stdout, said
        assert "fusee: index out of range" in found.stderr and "in embedding" in said, said


KEPT = """
import fusee, torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(100, 64), nn.Linear(64, 64)
        self.norm, self.state = nn.LayerNorm(64), nn.Buffer(torch.zeros(4, 64))
    def forward(self, ids):
        x = self.norm(F.gelu(self.layer(self.table(ids))))
        x = x * torch.linspace(0, 1, 64, device="cuda")
        self.state.add_(x.sum(1))
        for _ in range(4):
            x = (x @ self.layer.weight).softmax(-1)
        return x, x.mT

torch.manual_seed(0)
net = Model().cuda().eval()
call, ids = fusee.compile(net), torch.arange(64, device="cuda").view(4, 16)
with torch.no_grad():
    for n in range(6):
        net.state.zero_()
        got, state = call(ids + n), net.state.clone()
        net.state.zero_()
        torch.testing.assert_close((*got, state), (*net(ids + n), net.state), rtol=1e-4, atol=1e-4)
(report,) = fusee.report(call)
print(*report.stages_ms, report.replays())
"""


def test_what_another_process_compiled(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(KEPT)
    own = {"FUSEE_KEEP_CAPTURES": "1", "FUSEE_CACHE_DIR": str(tmp_path)}

    def told() -> str:
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=False,
            env={**os.environ, **own},
        )  # fmt: skip
        assert not done.returncode, done.stderr
        return done.stdout

    first, second = told(), told()
    assert "trace" in first and second.startswith("resume ")
    assert first.split(" host ")[1] == second.removeprefix("resume ") != "0 CUDA graphs"
