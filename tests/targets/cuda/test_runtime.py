"""From a graph to launches: host function, frames, arguments, streams, on a driver in Python."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusee
from fusee.aten import WHOLE
from fusee.aten.trace import trace
from fusee.autodiff.bill import bill
from fusee.backends.report import live_reports
from fusee.errors import CompileError, LateError, MissingPackage
from fusee.loops.lower import supported
from fusee.targets import TARGETS
from fusee.targets.cuda import CUDA, device, launch, recording
from fusee.targets.cuda.launch import Beside
from fusee.targets.cuda.recording import Replayer
from fusee.torch_functions import training
from tests.targets.cuda.driver import FakeGpu, fake_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Everything that is compiled is launched on this one."""
    found = fake_gpu(monkeypatch)
    monkeypatch.setitem(TARGETS, "cpu", CUDA(found))
    KEPT.clear()
    return found


KEPT: list[Tensor] = []  # of a test: each batch lies where no other did


def aligned(*shape: int, offset: int = 0) -> Tensor:
    """Random numbers whose memory begins at a multiple of 16 bytes, and `offset` elements on."""
    whole = torch.empty(16 + offset + torch.Size(shape).numel())
    KEPT.append(whole)
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


def test_as_many_groups_as_channels_of_an_open_number(gpu: FakeGpu) -> None:
    def fn(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x[None], w, bias, groups=x.shape[0]).sin()

    gpu.unknown = 1 << 16  # the convolution is ATen's
    call = compiled(fn, gpu, dynamic=True)
    for n in (3, 5, 8):
        given = aligned(n, 6, 6), aligned(n, 1, 2, 2), aligned(n)
        close(call(*given), fn(*given))


def test_copies_and_rows_of_open_sizes(gpu: FakeGpu) -> None:
    """Copies in another dtype before products, and rows that are stored whole."""

    def fn(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        rows = torch.stack((z.sum(1), z.prod(1)), -1)
        return torch.mm(x.double(), y.double()), x.softmax(0) + x.mean(0), rows.repeat(1, 1, 9)

    call = compiled(fn, gpu, dynamic=True)
    for rows in (6, 8, 12):
        x, y, z = aligned(40, rows), aligned(rows, 40), aligned(rows, 3, rows * 2)
        close(call(x, y, z), fn(x, y, z))


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


@pytest.mark.parametrize("step", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_updates_of_an_optimizer_are_few_launches(gpu: FakeGpu, step: Any) -> None:
    """One for parameters of all sizes, of nothing too, as far as their pointers fit a launch."""
    sizes = [(16, 8), (5,), (0, 4), *[(4, n) for n in range(1, 61)]]
    gpu.unknown = 1 << 16
    found = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        parameters = [aligned(*size).requires_grad_() for size in sizes]
        optimizer = step(parameters, lr=0.1)
        run = fusee.compile(optimizer.step, options={"cache": False}) if is_ours else optimizer.step
        for _ in range(4):
            for x in parameters:
                x.grad = aligned(*x.shape).copy_(x.detach().cos())
            before = len(gpu.launches)
            run()
            assert not is_ours or 0 < len(gpu.launches) - before <= 12
        found.append(parameters)
    for x, y in zip(*found, strict=True):
        close(x, y)


@pytest.mark.parametrize("into", [True, False])
def test_copies_of_all_sizes_and_places(gpu: FakeGpu, into: bool) -> None:
    """Those that begin where wide accesses must not are torch's."""
    sizes = [*range(1, 70), 4096, 4097]
    for dtype, offset in (
        (torch.float32, 0),
        (torch.bfloat16, 0),
        (torch.int8, 0),
        (torch.float32, 1),
    ):
        stay = [torch.randn(n + 1).to(dtype)[:n] for n in sizes]
        others = [torch.randn(n + 1).to(dtype)[offset:][:n] for n in sizes]
        gpu.known(*stay, *others)
        want = [x.clone() for x in (others if into else stay)]
        recording.Copies(gpu, stay, into, gpu.host_names()["threads"])(others)
        for x, y in zip(stay if into else others, want, strict=True):
            assert torch.equal(x, y)


def test_equal_kernels_that_depend_on_each_other_are_launched_apart(gpu: FakeGpu) -> None:
    weights = [aligned(32, 32) for _ in range(6)]
    gpu.unknown = 1 << 16

    def apart(x: Tensor) -> list[Tensor]:
        return [torch.mm(w, w).sum(0) + 1 for w in weights]

    def chained(x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.softmax(x, -1)[:, torch.arange(31, -1, -1)]
        return x

    for fn in (apart, chained):
        x = aligned(32, 32)
        torch.testing.assert_close(compiled(fn, gpu)(x), fn(x), rtol=1e-3, atol=1e-3)


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
    other, x = compiled(lambda x: torch.softmax(x, -1), gpu), aligned(4, 16)
    other(x)
    call(index, weight)  # a GPU tells later
    assert gpu.status and gpu.words.tolist()[1] == 7
    words = r"index out of range in self\n  in embedding"
    with pytest.raises(LateError, match=words):
        call(index, weight)
    with pytest.raises(IndexError, match=words):  # whatever runs next: the message has its graph
        other(x)


def test_the_report_says_what_kernels_take(gpu: FakeGpu) -> None:
    x = aligned(4, 16)
    compiled(lambda x: torch.softmax(x, -1), gpu)(x)
    (row,) = live_reports()[-1].kernels
    assert str(row).endswith("(function 1)") and str(row) in str(live_reports()[-1])
    said = [str(live_reports()[-1])]
    for options in ({"graphs": False}, {}):
        fusee.compile(torch.exp, options={"cache": False, **options})(x)
        said.append(str(live_reports()[-1]))
    reasons = ["cost less than a replay", "'graphs': False", "cost less than a replay"]
    assert all(reason in text for reason, text in zip(reasons, said, strict=True))


class Driver:
    """libcuda's linker: joins texts, and refuses those that say so."""

    def __init__(self) -> None:
        self.linked, self.depth, self.states = b"", 0, 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, place: Any) -> int:
        self.depth -= 1
        return 0

    def cuLinkCreate_v2(self, count: int, options: Any, values: Any, state: Any) -> int:
        assert [*options] == [5, 6] and values[1] == 1 << 13 and self.depth == 1
        self.states += 1
        self.log, self.linked = values[0], b""
        return 0

    def cuLinkAddData_v2(self, state: Any, kind: int, text: bytes, size: Any, *rest: Any) -> int:
        assert kind == 1 and size.value == len(text) and text.endswith(b"\0") and len(rest) == 4
        if b"bad" in text:
            ctypes.memmove(self.log, b"a bad line\0", 11)
            return 218
        self.linked += text[:-1]
        return 0

    def cuLinkComplete(self, state: Any, code: Any, size: Any) -> int:
        self.code = ctypes.create_string_buffer(self.linked)
        code._obj.value, size._obj.value = ctypes.addressof(self.code), len(self.linked)
        return 0

    def cuLinkDestroy(self, state: Any) -> int:
        self.states -= 1
        return 0


def test_the_driver_links_where_nvjitlink_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingPackage("CUDA's libnvJitLink cannot be loaded")

    driver, gpu = Driver(), device.Device.__new__(device.Device)
    gpu._context = ctypes.c_void_p()
    monkeypatch.setattr(device, "_driver", lambda: driver)
    monkeypatch.setattr(launch, "linker", missing)
    monkeypatch.setattr(launch, "version", missing)
    monkeypatch.setattr(gpu, "linker", lambda: "driver 13000", raising=False)
    name, link = launch.linking(gpu)
    assert name == "driver 13000" and link([b"a kernel", b", a function"], 90)[0] == driver.linked
    with pytest.raises(CompileError, match="driver refused generated code: a bad line"):
        link([b"bad"], 90)
    assert driver.linked == b"" and not driver.depth and not driver.states


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


# ---------------------------------------------------------------------------- recordings


class Products:
    """Three products with loops between them: more than a replay costs."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.weights = [aligned(16, 16) / 4 for _ in range(3)]
        gpu.known(*self.weights)
        gpu.unknown = 1 << 16  # what recordings copy inputs to

    def __call__(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = torch.tanh(torch.mm(x, w)) + 0.5
        return x


def test_calls_that_repeat_are_replayed(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call, earlier, given = compiled(fn, gpu), [], [aligned(4, 16) for _ in range(5)]
    for x in given:  # each from elsewhere, so that they are copied in
        earlier.append(call(x))
    assert gpu.recorded == 1 and gpu.replayed == 4 and gpu.copied == [1, 1] * 4
    for x, got in zip(given, earlier, strict=True):
        close(got, fn(x))
    assert "1 CUDA graphs, 4 calls replayed" in str(live_reports()[-1])


def test_kernels_that_do_not_depend_on_each_other_are_branches(gpu: FakeGpu) -> None:
    weights = [aligned(n, 16) / 4 for n in (16, 16, 8)]  # sums of equal axes would be one kernel
    gpu.known(*weights)
    gpu.unknown = 1 << 16

    def fn(x: Tensor) -> Tensor:
        for _ in range(3):
            q, k, v = (F.linear(x, w) for w in weights)
            x = torch.softmax(q * k, -1) * v.sum() + x
        return x

    call, given = compiled(fn, gpu), [aligned(1, 16) for _ in range(4)]
    for x in given:
        close(call(x), fn(x))
    assert gpu.recorded == 1 and gpu.replayed == 3
    assert gpu.beside == [2, 2, 2] * 4  # q and v, when it is recorded, and when that is replayed


@given(st.integers(0, 12), st.sets(st.integers(1, 11)), st.sets(st.integers(0, 12)))
def test_branches_end_where_a_run_of_launches_ends(
    count: int, splits: set[int], ends: set[int]
) -> None:
    """What a later run works on has no memory yet."""
    bounds, ran = sorted({0, count, *(k for k in splits if k < count)}), list[int]()
    rows = [range(a, b) for a, b in pairwise(sorted({k for k in ends if k <= count}))]

    def run(state: int, first: int, last: int, stream: int, *pointers: int) -> int:
        ran.extend(range(first, last))
        return 0

    beside = Beside(run, rows, lambda calls: max(call(0) for call in calls))
    for first, last in pairwise(bounds):
        assert beside(0, first, last, 0, 0, 0) == 0
        assert ran == [*range(last)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_read_a_matrix_once(gpu: FakeGpu, rows: int, dtype: torch.dtype) -> None:
    """One kernel for a product of all rows, with what follows it."""
    up, down, bias = (aligned(*n).to(dtype) / 4 for n in ((24, 32), (32, 24), (24,)))
    gpu.unknown = 1 << 16

    def fn(x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, up, bias)), down) + x

    x = aligned(rows, 1, 32).to(dtype)
    got = fusee.compile(fn, options={"cache": False, "prices": False})(x)
    near = 2e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got, fn(x), rtol=near, atol=near)
    assert len(gpu.launches) == 2


def test_inputs_that_stay_are_read_where_they_are(gpu: FakeGpu) -> None:
    fn, x = Products(gpu), aligned(4, 16)
    call = compiled(fn, gpu)
    for _ in range(4):
        close(call(x), fn(x))
        x.mul_(0.5)
    assert gpu.recorded == 1 and gpu.copied == [1] * 3  # results alone


def test_large_inputs_that_move_again_and_again_are_copied_in(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tangent of a loss: its place is another one whenever something else ran between."""
    monkeypatch.setattr(recording, "_LARGE_BYTES", 64)
    fn = Products(gpu)
    call = compiled(fn, gpu)
    places = [aligned(4, 16) for _ in range(8)]
    for x in places:
        for _ in range(3):
            close(call(x), fn(x))
    # of the first three places each has a recording; the fourth ends these, and is copied in
    assert gpu.recorded == recording._PLACES + 1
    assert gpu.replayed == 2 * recording._PLACES + 3 * (len(places) - recording._PLACES)


def test_writes_of_a_recording_reach_the_caller(gpu: FakeGpu) -> None:
    fn = Products(gpu)

    def step(x: Tensor, cache: Tensor, k: Tensor) -> Tensor:
        y = fn(x)
        cache.index_copy_(0, k, y)
        return fn(cache).sum(0)

    call, caches = compiled(step, gpu), [aligned(8, 16), aligned(8, 16)]
    twins = [cache.clone() for cache in caches]
    for number in (0, 0, 0, 1, 1, 0, 1):
        x, k = aligned(2, 16), torch.randperm(8)[:2]
        close(call(x, caches[number], k), step(x, twins[number], k))
        close(caches[number], twins[number])
    assert gpu.replayed >= 3


def test_results_share_memory_as_they_do_in_a_direct_call(gpu: FakeGpu) -> None:
    fn = Products(gpu)

    def several(x: Tensor) -> tuple[Tensor, ...]:
        y = fn(x)
        return y, y[1:].t(), x[0], y.unbind(1)[2], x.expand(3, *x.shape)

    call = compiled(several, gpu)
    for _ in range(3):
        x = aligned(4, 16)
        got, want = call(x), several(x)
        close(got, want)
        assert [y.stride() for y in got] == [y.stride() for y in want]
        x.add_(1)
        got[0].mul_(2)
        close(got, (want[0] * 2, want[1] * 2, want[2], want[3] * 2, want[4]))
    assert gpu.replayed == 2


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "a result is conjugated": lambda q: (q * 2.0).conj(),
    "a result is negated": lambda q: (q * 2.0).conj().imag,
    "an operand alone": lambda q: q * 2.0 * 3.0,
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("lazily", [False, True])
def test_what_is_conjugated_when_it_is_read(gpu: FakeGpu, name: str, lazily: bool) -> None:
    """A recording copies memory, in which nothing says so."""
    fn = LAZY[name]
    call = fusee.compile(fn, options={"cache": False, "prices": False})
    for _ in range(4):
        q = torch.randn(8, dtype=torch.complex64)
        KEPT.append(q)
        gpu.known(q)
        q = q.conj() if lazily else q
        got, want = call(q), fn(q)
        assert (got.is_conj(), got.is_neg()) == (want.is_conj(), want.is_neg())
        close(got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg())


def test_results_without_elements_are_replayed(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call, x = compiled(lambda x: (fn(x), (fn(x) * 2)[:0], fn(x)[:, 3:3]), gpu), aligned(4, 16)
    found = [call(x) for _ in range(4)]
    assert gpu.recorded == 1 and gpu.replayed == 3
    for got in found:
        close(got, (fn(x), x[:0], x[:, 3:3]))
        assert [y.stride() for y in got] == [y.stride() for y in found[0]]


def test_what_cannot_be_recorded_runs_directly(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call, gpu.refuses = compiled(fn, gpu), "operation not permitted\nmore"
    for _ in range(4):
        x = aligned(4, 16)
        close(call(x), fn(x))
    assert not gpu.replayed and "none any more: operation not permitted" in str(live_reports()[-1])


def test_while_the_user_records(gpu: FakeGpu) -> None:
    """Calls run directly, and nothing else may use what they worked in."""
    fn = Products(gpu)
    call, x = compiled(fn, gpu), aligned(4, 16)
    gpu.is_capturing = True
    for _ in range(3):
        close(call(x), fn(x))
    assert not gpu.recorded and len(gpu.arenas) == 3
    gpu.is_capturing = False
    for _ in range(3):
        close(call(x), fn(x))
    assert gpu.replayed == 2 and len(gpu.arenas) == 4


def test_calls_that_take_the_gpu_longer_become_kernels(gpu: FakeGpu) -> None:
    """By what both were measured to take; what a few elements need is the host's time."""
    cases: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...], bool]] = [
        (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), (64, 100000), False),
        (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), (4, 64), True),
        (lambda x: nn.functional.layer_norm(x, x.shape[-1:]), (4096, 4096), False),
        (lambda x: x.softmax(0), (2048, 2048), False),
        (lambda x: nn.functional.pixel_shuffle(x, 2), (32, 64, 56, 56), True),
    ]
    bills = []

    def priced(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = trace(gm, inputs, keep=(supported() | WHOLE).__contains__)
        bills.append(bill(graph, [graph], supported(), CUDA.prices))
        return gm.forward

    for fn, shape, is_captured in cases:
        fusee.compile(fn, backend=priced)(torch.empty(shape, dtype=torch.bfloat16))
        assert bills.pop().is_captured == is_captured


def test_small_graphs_are_launched(gpu: FakeGpu) -> None:
    call, x = compiled(lambda x: torch.tanh(x) + 1, gpu), aligned(4, 16)
    for _ in range(3):
        close(call(x), torch.tanh(x) + 1)
    assert not gpu.recorded


class Learning(Products):
    """Its weights have gradients, which are compared with eager's in each step."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu)
        gpu.unknown = 1 << 16
        for w in self.weights:
            w.requires_grad_()
        self.call = compiled(self.__call__, gpu)

    def gradients(self, y: Tensor, keep: bool = False) -> list[Tensor]:
        KEPT.append(2 * y.detach())
        return list(torch.autograd.grad(y, self.weights, KEPT[-1], retain_graph=keep))

    def step(self) -> tuple[Any, Any]:
        x = aligned(4, 16)
        y, want = self.call(x), self(x)
        return (y, *self.gradients(y)), (want, *self.gradients(want))


def test_training_is_replayed(gpu: FakeGpu) -> None:
    """Forward and backward by themselves; what they gave stays, and nothing saved is copied."""
    learning = Learning(gpu)
    steps = [learning.step() for _ in range(7)]
    for got, want in steps:
        close(got, want)
    # both anew, since the first gradients that were handed out are wanted
    assert gpu.recorded == 4 and gpu.replayed == 6 + 6 and gpu.own
    # the batch and the result; batch and tangent, which came from elsewhere; gradients
    assert set(gpu.copied) == {1, 2, len(learning.weights)}
    report = live_reports()[-1]
    assert "6 calls replayed" in str(report) and "6 calls replayed" in str(report.backward)


def test_gradients_are_handed_out_where_they_are_written(gpu: FakeGpu) -> None:
    learning = Learning(gpu)
    learning.step()
    places = set()
    for _ in range(4):
        got, want = learning.step()
        close(got, want)
        places.add(tuple(x.data_ptr() for x in got[1:]))
        del got
    assert len(places) == 1 and gpu.recorded == 2 and len(learning.weights) not in gpu.copied


@pytest.mark.parametrize("for_good", [False, True])
def test_gradients_that_somebody_has_stay(gpu: FakeGpu, for_good: bool) -> None:
    """Or has until the next backward, as programs that set them to None before it."""
    learning = Learning(gpu)
    for _ in range(4):
        learning.step()
    (_, *grads), _ = learning.step()
    kept, copies = [x[1:] for x in grads], [x[1:].clone() for x in grads]
    x = aligned(4, 16)
    y, want = learning.call(x), learning(x)
    assert all(map(torch.equal, kept, copies))
    del grads
    if not for_good:
        kept.clear()
    close(learning.gradients(y), learning.gradients(want))
    # what may write to them is made anew; gradients are copied from then on
    assert gpu.recorded == 4 and gpu.copied[-1] == len(learning.weights)
    before, wants = gpu.replayed, []
    for _ in range(3):
        got, want = learning.step()
        close(got, want)
        wants.append((got, want))
    for got, want in wants:
        close(got, want)
    assert all(map(torch.equal, kept, copies))
    assert gpu.recorded == 4 and gpu.replayed == before + 6


def test_gradients_outlive_what_made_them(gpu: FakeGpu) -> None:
    learning = Learning(gpu)
    for _ in range(4):
        learning.step()
    (_, *grads), (_, *wants) = learning.step()
    del learning.call
    gpu.held.clear()
    gpu.own.clear()
    gc.collect()
    close(grads, wants)


def test_gradients_may_be_resized(gpu: FakeGpu) -> None:
    learning = Learning(gpu)
    for _ in range(4):
        learning.step()
    (_, *grads), _ = learning.step()
    grads[0].resize_(1 << 16)
    del grads
    for _ in range(3):
        close(*learning.step())


def test_a_forward_whose_values_are_wanted_runs_directly(gpu: FakeGpu) -> None:
    learning = Learning(gpu)
    for _ in range(4):
        learning.step()
    before, x = gpu.replayed, aligned(4, 16)
    first, second = learning.call(x), learning.call(x + 1)
    assert gpu.replayed == before + 1
    close(learning.gradients(second), learning.gradients(learning(x + 1)))
    close(learning.gradients(first, keep=True), learning.gradients(learning(x)))
    third = learning.call(x + 2)  # the graph of the first is kept
    close(learning.gradients(first), learning.gradients(learning(x)))
    close(learning.gradients(third), learning.gradients(learning(x + 2)))
    del first, second, third
    before = gpu.replayed
    abandoned = learning.call(x)  # without a backward
    del abandoned
    close(*learning.step())
    assert gpu.replayed == before + 3


def test_a_forward_and_its_backward_share_memory(gpu: FakeGpu) -> None:
    """A backward made before the forward that lends now may have taken the same memory: it is made
    anew, and since it takes over what is lent, the forward as well."""
    learning = Learning(gpu)
    for _ in range(4):
        learning.step()
    assert gpu.recorded == 2 and len(gpu.pools) == 1
    replayers = [x for x in gc.get_objects() if isinstance(x, Replayer) and x.gpu is gpu]
    (backward,) = (x for x in replayers if x.saved is not None)
    ((_, one),) = backward.streams.items()
    for key, found in one.recordings.items():
        one.recordings[key] = found._replace(number=-1)
    for _ in range(3):
        close(*learning.step())
    assert gpu.recorded == 4 and len(gpu.pools) == 1


def test_a_backward_leaves_what_others_want(gpu: FakeGpu) -> None:
    """It uses the memory of saved values again where nobody else has them."""
    learning = Learning(gpu)
    for _ in range(4):
        learning.step()
    assert gpu.own and gpu.recorded == 2
    x, kept = aligned(4, 16), []
    want = learning.gradients(learning(x))

    def keep_it(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    y, before = learning.call(x), gpu.replayed
    for keep in (True, True, False):
        close(learning.gradients(y, keep), want)
    assert gpu.replayed == before + 1
    with torch.autograd.graph.saved_tensors_hooks(keep_it, lambda x: x):
        y = learning.call(x)
    copies = [x.clone() for x in kept]
    close(learning.gradients(y), want)
    assert all(map(torch.equal, kept, copies))
    kept.clear()
    y, tangent = learning.call(x), torch.ones(4, 16, requires_grad=True)
    twice = torch.autograd.grad(y, learning.weights[0], tangent, create_graph=True)[0]
    eager = torch.autograd.grad(learning(x), learning.weights[0], tangent, create_graph=True)[0]
    found, other = (torch.autograd.grad(g.square().sum(), tangent)[0] for g in (twice, eager))
    close(found, other)
    del y, twice, eager
    for _ in range(3):
        close(*learning.step())
    assert gpu.recorded == 2


def test_backwards_that_take_turns_leave_saved_values(gpu: FakeGpu) -> None:
    """One of several results may lead to the loss: each backward is another graph."""
    learning = Learning(gpu)
    call = compiled(lambda x: (learning(x), learning(x).tanh()), gpu)
    for n in range(14):
        x = aligned(4, 16)
        y, want = call(x)[n % 2], (learning(x), learning(x).tanh())[n % 2]
        close(learning.gradients(y), learning.gradients(want))
        del y
    before = gpu.recorded, gpu.replayed
    for n in range(4):
        x = aligned(4, 16)
        y, want = call(x)[n % 2], (learning(x), learning(x).tanh())[n % 2]
        close(learning.gradients(y), learning.gradients(want))
        del y
    assert (gpu.recorded, gpu.replayed) == (before[0], before[1] + 8)


def test_a_backward_that_cannot_be_recorded_has_what_was_saved(gpu: FakeGpu) -> None:
    learning = Learning(gpu)
    learning.step()
    x = aligned(4, 16)
    y = learning.call(x)
    gpu.refuses = "not while it is recorded"
    close(learning.gradients(y), learning.gradients(learning(x)))
    gpu.refuses = ""
    for _ in range(3):
        close(*learning.step())
    assert gpu.recorded == 2  # the forward, and anew: its memory had been taken


def test_saved_values_that_hooks_have_taken_stay(gpu: FakeGpu) -> None:
    learning, taken = Learning(gpu), []
    for _ in range(4):
        learning.step()

    def pack(x: Tensor) -> int:
        taken.append((x, x.clone()))
        return len(taken) - 1

    x = aligned(4, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: taken[k][0]):
        y = learning.call(x)
    for _ in range(3):
        close(*learning.step())
    assert len(taken) > 3 and all(torch.equal(x, twin) for x, twin in taken)
    close(learning.gradients(y), learning.gradients(learning(x)))


def test_sizes_that_repeat_are_recorded(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call = compiled(fn, gpu, dynamic=True)
    for rows in (3, 5, 3, 7, 3, 3, 5):  # the third call with some sizes is the first recorded one
        x = aligned(rows, 16)
        close(call(x), fn(x))
    assert gpu.recorded == 1 and gpu.replayed == 2


def test_recordings_are_bounded(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call = compiled(fn, gpu, dynamic=True)
    for rows in range(2, 14):
        x = aligned(rows, 16)
        for _ in range(4):
            close(call(x), fn(x))
    assert gpu.recorded == 12 and "8 CUDA graphs" in str(live_reports()[-1])


def test_streams_have_recordings_of_their_own(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call = compiled(fn, gpu)
    given = [aligned(4, 16) for _ in range(6)]  # each lies elsewhere
    for stream, x in zip((7, 8, 7, 8, 8, 7), given, strict=True):
        gpu.stream = stream
        close(call(x), fn(x))
    assert gpu.recorded == 2 and gpu.replayed == 4


def test_a_bad_index_of_a_recording(gpu: FakeGpu) -> None:
    fn = Products(gpu)
    call = compiled(lambda x, i: fn(x)[i], gpu)
    x, index = aligned(4, 16), torch.tensor([1, 3])
    for _ in range(3):
        close(call(x, index), fn(x)[index])
    index.fill_(9)
    with pytest.raises(IndexError, match="out of"):
        for _ in range(2):
            call(x, index)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_an_optimizer_counts_its_steps_on_the_gpu(
    kind: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that all of a step is recorded."""
    monkeypatch.setattr(training, "_GPUS", {"cpu"})
    gpu.unknown, losses = 1 << 20, []
    nets = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))]
    nets.append(copy.deepcopy(nets[0]))
    x, made = torch.randn(4, 8), [kind(net.parameters(), lr=1e-2) for net in nets]

    def step(k: int) -> Tensor:
        made[k].zero_grad()
        loss: Tensor = nets[k](x).square().mean()
        loss.backward()
        made[k].step()
        return loss.detach()

    call = fusee.compile(step, options={"cache": False})
    for _ in range(5):
        losses.append((call(0), step(1)))
    for got, want in (*losses, *zip(nets[0].parameters(), nets[1].parameters(), strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    called = {row.op for row in live_reports()[-1].externs}
    assert called == {"aten.addmm.default", "aten.mm.default"} and gpu.replayed == 4
    assert [one.param_groups[0]["capturable"] for one in made] == [True, False]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 1, bias=False), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.max_pool2d(torch.relu(self.norm(self.first(x))), 3, 2, 1)
        z = torch.relu(self.second(y) + y)
        return self.last(z.flatten(1)), z


@pytest.mark.parametrize("is_wanted", [True, False])
def test_images_in_training_lie_channels_last(gpu: FakeGpu, is_wanted: bool) -> None:
    """Values and what is saved; results and gradients lie as eager's."""
    gpu.unknown = 1 << 20
    found: list[list[Tensor]] = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        module = Images().bfloat16()
        x = torch.randn(2, 3, 8, 8).bfloat16().requires_grad_()
        options = {"cache": False, "prices": False, "channels_last": is_wanted}
        y, z = (fusee.compile(module, options=options) if is_ours else module)(x)
        (y.float().square().sum() + z.float().cos().sum()).backward()
        found.append([y, z, *(p.grad for p in (x, *module.parameters()) if p.grad is not None)])
    for ours, eagers in zip(*found, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=6e-2, atol=6e-2 * eagers.abs().max().item())
        keeps = [n > 1 for n in ours.shape]
        pairs = zip(ours.stride(), eagers.stride(), keeps, strict=True)
        assert all(a == b for a, b, kept in pairs if kept)
    says = "convolutions and gradients in channels-last layout"
    assert (says in str(live_reports()[-1])) == is_wanted


@pytest.mark.parametrize("is_held", [False, True])
def test_a_step_hands_out_gradients_where_they_are_written(gpu: FakeGpu, is_held: bool) -> None:
    """Unless somebody has the last ones; the memory of its first call is given back."""
    gpu.unknown, held, places = 1 << 20, [], set()
    nets = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))]
    nets.append(copy.deepcopy(nets[0]))
    x = torch.randn(4, 8)

    def step(k: int) -> Tensor:
        nets[k].zero_grad()
        loss: Tensor = nets[k](x).square().mean()
        loss.backward()
        return loss.detach()

    call = fusee.compile(step, options={"cache": False})
    for _ in range(6):
        close(call(0), step(1))
        grads = [[p.grad for p in net.parameters()] for net in nets]
        close(*grads)
        places.add(tuple(g.data_ptr() for g in grads[0] if g is not None))
        if is_held:
            held.append((*grads, [g.clone() for g in grads[1] if g is not None]))
        del grads
    for mine, _, then in held:
        close(mine, then)
    assert gpu.given_back == gpu.recorded + 2  # before the first call, and behind it
    assert gpu.copied[-1] == (19 if is_held else 1)
    assert len(places) == (6 if is_held else 2)  # of the direct call, of the recording
