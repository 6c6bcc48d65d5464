"""CUDA graphs: recorded once, replayed; needs an NVIDIA GPU, but for what is said without one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusee
from fusee.aten import executable_anywhere
from fusee.aten.trace import trace
from fusee.backends import cudagraphs
from fusee.backends.regions import CompiledRegion, Region
from fusee.backends.registry import EngineOptions
from fusee.backends.split_run import compile_with
from fusee.errors import FuseeWarning, MissingDevice, OptionError

CUDA = torch.cuda.is_available()
gpu = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per graph that was recorded."""
    made: list[int] = []
    record = cudagraphs._Replayed._record

    def counting(self: Any, inputs: tuple[Any, ...]) -> Any:
        made.append(len(self.graphs))
        return record(self, inputs)

    monkeypatch.setattr(cudagraphs._Replayed, "_record", counting)
    return made


def compiled(fn: Callable[..., Any], **more: Any) -> Any:
    return fusee.compile(fn, backend="cudagraphs", **more)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    tail = [nn.Flatten(), nn.Linear(128, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *tail).eval().cuda()


@pytest.mark.skipif(CUDA, reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    listed = {str(name): name.state for name in fusee.compiler.list_backends()}
    assert listed["cudagraphs"].startswith("missing device: an NVIDIA GPU")
    with pytest.raises(MissingDevice, match="needs an NVIDIA GPU"):
        compiled(torch.relu)


def test_options_are_checked() -> None:
    relu = torch.ops.aten.relu.default
    assert EngineOptions.parse({"disabled_ops": [torch.ops.aten.relu]}).disabled_ops >= {relu}
    with pytest.raises(OptionError, match="'disabled_ops'"):
        EngineOptions.parse({"disabled_op": []})
    with pytest.raises(OptionError, match="takes a list of operators"):
        EngineOptions.parse({"disabled_ops": "relu"})


@gpu
@torch.no_grad()
def test_a_module_is_eagers_and_is_recorded_once(records: list[int]) -> None:
    module = block()
    fast = compiled(module)
    earlier: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        x = torch.randn(5, 3, 16, 16, device="cuda")
        got, want = fast(x), module(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()
        earlier.append((got, want))
    assert len(records) == 1
    for got, want in earlier:
        torch.testing.assert_close(got, want, rtol=0, atol=0)  # no replay wrote over it
    (report,) = [r for r in fusee.report() if r.regions and r.regions[-1].engine == "cudagraphs"]
    assert report.regions[0].calls == 4 and not report.unclaimed, str(report)


@gpu
@torch.no_grad()
def test_sizes_and_weights_that_change(records: list[int]) -> None:
    module = block()
    fast = compiled(module)
    for batch in (1, 7, 3, 7, 1):
        x = torch.randn(batch, 3, 16, 16, device="cuda")
        torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)
    assert len(records) == 3
    linear = module.get_submodule("5")
    linear.get_parameter("weight").mul_(-2)
    torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)
    assert len(records) == 3
    linear.weight = nn.Parameter(torch.randn(64, 128, device="cuda"))
    torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)
    assert len(records) == 4


@gpu
@torch.no_grad()
def test_open_sizes_are_recorded_one_by_one(records: list[int]) -> None:
    module = block()
    fast = compiled(module, dynamic=True)
    for batch in (2, 7, 3, 7, 2):
        x = torch.randn(batch, 3, 16, 16, device="cuda")
        torch.testing.assert_close(fast(x), module(x), rtol=0, atol=0)
    assert len(records) == 3


@gpu
@torch.no_grad()
def test_inputs_that_are_written_and_results_that_share_memory() -> None:
    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state.mul_(0.5).add_(x)
        y = torch.tanh(state)
        return y, y[1:], state

    fast = compiled(step)
    ours, eagers = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4, device="cuda")
    for _ in range(3):
        x = torch.randn(4, 4, device="cuda")
        got, want = fast(x, ours), step(x, eagers)
        torch.testing.assert_close((got, ours), (want, eagers), rtol=0, atol=0)
        assert got[2] is ours
        assert got[1].data_ptr() == got[0][1:].data_ptr()


@gpu
@torch.no_grad()
def test_attention_in_half_precision_and_strided_inputs(records: list[int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = [x.unflatten(-1, (4, 16)).transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    fast = compiled(attend)
    for _ in range(2):
        x = torch.randn(3, 2, 64, 9, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
        torch.testing.assert_close(fast(*x), attend(*x))
    assert len(records) == 1


@gpu
@torch.no_grad()
def test_what_is_random_or_on_the_cpu_stays_outside() -> None:
    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy = torch.relu(x @ x) + torch.rand_like(x)
        return torch.softmax(noisy @ x, -1) * x, torch.tanh(y @ y + 1)

    fast = compiled(mixed)
    x, y = torch.randn(8, 8, device="cuda"), torch.randn(6, 6)
    for _ in range(2):
        torch.manual_seed(0)
        got = fast(x, y)
        torch.manual_seed(0)
        torch.testing.assert_close(got, mixed(x, y))
    report = fusee.report()[-1]
    reasons = " ".join(row.reason for row in report.unclaimed)
    assert "random" in reasons and "is on cpu" in reasons, str(report)
    assert report.regions, str(report)


@gpu
@torch.no_grad()
def test_what_cannot_be_recorded_runs_eagerly_with_one_warning() -> None:
    def inverted(x: Tensor) -> Tensor:
        return torch.tanh(torch.linalg.svdvals(x @ x) + 1).relu()

    fast = compiled(inverted)
    x = torch.randn(8, 8, device="cuda")
    with pytest.warns(FuseeWarning, match="failed in cudagraphs") as caught:
        torch.testing.assert_close(fast(x), inverted(x))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(x), inverted(x))
        good = compiled(lambda x: torch.relu(x @ x) + 1)  # recording still works
        torch.testing.assert_close(good(x), torch.relu(x @ x) + 1)


@gpu
def test_threads_on_their_own_streams() -> None:
    module = block()
    fast = compiled(module)
    with torch.no_grad():
        fast(torch.randn(2, 3, 16, 16, device="cuda"))
    torch.cuda.synchronize()
    wrong: list[float] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                x = torch.randn(2, 3, 16, 16, device="cuda", generator=generator)
                wrong.append(float((fast(x) - module(x)).abs().max()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 400 and max(wrong) == 0


def test_regions_have_open_sizes_and_are_recorded_by_them() -> None:
    regions: list[Region] = []
    keys: set[Any] = set()

    class OnCPU(cudagraphs.CudaGraphs):
        device, device_type = "CPU", "cpu"

        def compile(self, region: Region) -> CompiledRegion:
            regions.append(region)
            run, specs = executable_anywhere(region.graph), region.graph.inputs

            def call(inputs: tuple[Any, ...]) -> Any:
                keys.add(tuple(x if s.dtype is None else x.shape for s, x in zip(specs, inputs)))
                return run(*inputs)

            return CompiledRegion(call)

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        return compile_with(OnCPU(EngineOptions()), gm, examples)

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        y = torch.cat([x, x.flip(0)])[:n] @ w
        rows = F.pad(y, (0, 0, 0, -y.shape[0] % 8)).view(-1, 8, y.shape[1]).mean(1)
        return rows * n, y.t().contiguous().t(), x.new_zeros(n, 2) + torch.arange(n)[:, None]

    backend.__dict__["takes_symbols"] = True
    compiled = fusee.compile(program, backend=backend)
    w = torch.randn(4, 6)
    with torch.no_grad():
        for n in (3, 5, 8, 7, 16, 1, 9, 5):
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x, w), program(x, w))
    # the last is of one row
    assert [bool(region.graph.symbols) for region in regions] == [False, True, False]
    assert len(keys) == 7


def test_graphs_run_on_kernels_that_choose_other_strides() -> None:
    def viewed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        return y.view(2, 12) * 2, y.as_strided((3, 2), (2, 1), 1) + 1

    traced = trace(fx.symbolic_trace(viewed), [torch.randn(6, 4)])
    want = viewed(x := torch.randn(6, 4))
    run = executable_anywhere(traced)
    for given in (x, x.t().contiguous().t()):
        got = run(given)
        torch.testing.assert_close(got, want)
        assert [y.stride() for y in got] == [y.stride() for y in want]
