"""From a graph to launches: host function, frames, arguments, streams, on a driver in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.backends import native
from fusee.targets.cuda import CUDA
from tests.targets.cuda.driver import FakeGpu, fake_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Everything that is compiled is launched on this one."""
    found = fake_gpu(monkeypatch)
    monkeypatch.setitem(native.TARGETS, "cpu", CUDA(found))
    return found


def aligned(*shape: int, offset: int = 0) -> Tensor:
    """Random numbers whose memory begins at a multiple of 16 bytes, and `offset` elements on."""
    whole = torch.empty(16 + offset + torch.Size(shape).numel())
    start = (-whole.data_ptr() % 16) // 4 + offset
    return whole[start : start + torch.Size(shape).numel()].view(shape).normal_()


def compiled(fn: Callable[..., Any], gpu: FakeGpu, **how: Any) -> Callable[..., Any]:
    found = fusee.compile(fn, options={"cache": False}, **how)

    def call(*args: Tensor) -> Any:
        gpu.known(*args)
        return found(*args)

    return call


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_call(gpu: FakeGpu) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x + y, -1), (x * y).sum(0)

    call = compiled(fn, gpu)
    for _ in range(2):
        x, y = aligned(6, 64), aligned(6, 64)
        close(call(x, y), fn(x, y))
    kernels = len(gpu.launches) // 2
    assert gpu.launches[:kernels] == gpu.launches[kernels:]
    assert {stream for *_, stream in gpu.launches} == {7} and gpu.depth == 0


def test_between_calls_of_aten(gpu: FakeGpu) -> None:
    w = aligned(64, 64)

    def fn(x: Tensor) -> Tensor:
        return F.layer_norm(torch.mm(F.gelu(x), w), (64,)).relu()

    gpu.known(w)
    x = aligned(8, 64)
    close(compiled(fn, gpu)(x), fn(x))
    assert len(gpu.launches) == 2 and gpu.arenas


def test_open_sizes(gpu: FakeGpu) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.gelu(x) / x.shape[0]

    call = compiled(fn, gpu, dynamic=True)
    for rows in (3, 8, 5):
        x = aligned(rows, 40)
        close(call(x), fn(x))
    assert len(gpu.texts) == 1


def test_pointers_that_are_no_multiples_of_an_access(gpu: FakeGpu) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x + y).relu(), y.sum(-1)

    call = compiled(fn, gpu)
    for offset in (0, 1, 3, 0):
        x, y = aligned(6, 64), aligned(6, 64, offset=offset)
        close(call(x, y), fn(x, y))


def test_streams_have_memory_of_their_own(gpu: FakeGpu) -> None:
    w = aligned(64, 64)
    gpu.known(w)

    def fn(x: Tensor) -> Tensor:
        return torch.mm(x * 2, w) + 1

    call, x = compiled(fn, gpu), aligned(4, 64)
    for stream in (7, 8, 7, 8):
        gpu.stream = stream
        close(call(x), fn(x))
    assert [stream for *_, stream in gpu.launches] == [7, 7, 8, 8, 7, 7, 8, 8]
    assert len(gpu.arenas) == 2


def test_blocks_count_each_other_anew(gpu: FakeGpu) -> None:
    """In each call, of each size, beside what else lies in the arena."""
    w = aligned(32, 32)
    gpu.known(w)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.mm(x * 2, w)
        return y.sum(0), (y * y).sum()

    call = compiled(fn, gpu, dynamic=True)
    for rows in (4000, 4000, 9000, 40, 9000):
        x = aligned(rows, 32)
        torch.testing.assert_close(call(x), fn(x), rtol=1e-3, atol=1e-2)


def test_nothing_is_launched_for_nothing(gpu: FakeGpu) -> None:
    x = torch.zeros(0, 4)
    assert compiled(lambda x: x + 1, gpu)(x).shape == (0, 4) and not gpu.launches


def test_writes_reach_the_caller(gpu: FakeGpu) -> None:
    x, y = aligned(5, 16), aligned(5, 16)
    want = (x + y) * 2
    compiled(lambda x, y: x.add_(y).mul_(2), gpu)(x, y)
    close(x, want)


def test_bad_indices_and_failed_launches(gpu: FakeGpu) -> None:
    weight, index = aligned(5, 8), torch.tensor([1, 7])
    call = compiled(F.embedding, gpu)
    call(index, weight)  # a GPU tells later
    assert gpu.status and gpu.words.tolist()[1] == 7
    with pytest.raises(IndexError, match="out of range"):
        call(index, weight)


def test_training(gpu: FakeGpu) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(aligned(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight).sum()

    net, x = Net(), aligned(4, 16)
    gpu.known(net.weight, x)
    gpu.unknown = 4096  # gradients are autograd's
    found = []
    for call in (fusee.compile(net, options={"cache": False}), net):
        net.zero_grad()
        call(x).backward()
        found.append(net.weight.grad)
    close(*found)
