"""Engines and sizes that vary: one model of a region serves all sizes, through fusee.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.backends.report import Report
from fusee.capture.captured import Entry
from tests.backends.test_engines import engines
from tests.compare import assert_same
from tests.models import zoo
from tests.models.test_sizes import exact, sizes

pytestmark = pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")

aten = torch.ops.aten
W = torch.linspace(-1, 1, 64).view(8, 8)
TABLE = torch.linspace(-1, 1, 24 * 8).view(24, 8)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def agrees(
    fn: Callable[..., Any], backend: str, calls: list[tuple[Any, ...]], **more: Any
) -> list[Report]:
    """The reports of a function that was called with these arguments, and gave what eager gives."""
    name = f"{fn.__qualname__} in {backend} {more}"
    fast = fusee.compile(fn, backend=backend, name=name, **more)
    for args in calls:
        got, want = fast(*args), fn(*args)
        assert_same(got, want)
    found = fusee.report(name)
    assert all(row.failed is None for report in found for row in report.regions)
    return found


def rows(*sizes: int) -> list[tuple[Tensor]]:
    return [(torch.randn(n, 8),) for n in sizes]


@engines
def test_one_model_serves_all_sizes_but_0(backend: str, entries: list[Entry]) -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

    def fn(x: Tensor) -> Any:
        return layers(x)

    first, rest = agrees(fn, backend, rows(3, 5, 17, 1, 2, 300))
    assert len(entries) == 2
    assert [row.open for row in first.regions] == [()]
    (row,) = rest.regions
    assert row.calls == 5 and row.open == ("x[s0, 8]",) and "; open: x[s0, 8]" in str(rest)
    *_, empty = agrees(fn, backend, rows(3, 5, 0, 7))
    assert not empty.regions


@engines
def test_dynamic_says_when(backend: str, entries: list[Entry]) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x @ W) @ W

    agrees(fn, backend, rows(3, 5, 9), dynamic=False)
    assert len(entries) == 3
    (report,) = agrees(fn, backend, rows(3, 5, 9), dynamic=True)
    assert len(entries) == 4 and report.regions[0].open


@engines
def test_sizes_as_operands(backend: str, entries: list[Entry]) -> None:
    """Shapes, ends, fills and scalars that are computed of sizes; layouts of results."""

    def fn(x: Tensor, n: int) -> tuple[Any, ...]:
        b, t = x.shape[0], x.shape[1]
        y = (x @ W).view(b, t, 2, 4).transpose(1, 2)
        flat = y.reshape(b * t * 2, -1)
        ramp = torch.arange(t, dtype=x.dtype) / t
        first = y[:, :, : t // 2 + 1]
        padded = F.pad(x @ W, (0, 0, 1, n))
        wide = (x[:, :1] @ W).expand(b, t + n, 8)
        full = torch.full((t, n), 0.5) * n
        shown = x.flatten(0, 1) @ W
        return y, flat, ramp, first, padded, wide, full, shown.T, (x * n) @ W, t * n + b, [t, n]

    sizes = [(2, 3, 4), (3, 5, 7), (4, 9, 2), (2, 2, 3), (6, 30, 11)]
    agrees(fn, backend, [(torch.randn(b, t, 8), n) for b, t, n in sizes])
    assert len(entries) == 2


@engines
def test_parts_and_windows_of_open_sizes(backend: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        n, y = x.shape[0], x @ W
        y[1:] += 1
        y[n // 2] = x[0]
        y[10 % n] = x[1]
        filtered = F.conv1d(x.flatten()[None, None], x.flatten()[:3][None, None])
        smaller = F.interpolate(x[None, None], (n // 3, 4), mode="bilinear")
        return y * 2, filtered, smaller + 1

    agrees(fn, backend, rows(9, 6, 5, 7, 3))


@engines
def test_places_computed_of_sizes(backend: str, entries: list[Entry]) -> None:
    """An engine looks up what is out of range, or raises no IndexError: each call is asked."""

    def fn(x: Tensor, past: int) -> Tensor:
        at = torch.arange(past, past + x.shape[0])
        return (x @ W + F.embedding(at, TABLE)) @ W

    calls = [(torch.randn(n, 8), past) for n, past in ((4, 3), (7, 5), (20, 4), (3, 21))]
    _, report = agrees(fn, backend, calls)
    assert len(entries) == 2
    taken = {op for row in report.regions for op in row.ops}
    assert "aten.embedding.default" in taken, str(report)
    fast = fusee.compile(fn, backend=backend)
    for args in calls[:2]:
        fast(*args)
    with pytest.raises(IndexError):
        fast(torch.randn(20, 8), 5)
    assert_same(fast(*calls[2]), fn(*calls[2]))


@engines
def test_integers_that_outgrow_32_bits_are_ours(backend: str) -> None:
    def fn(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ W) @ W, torch.arange(x.shape[0]) * n * n + 1

    agrees(fn, backend, [(torch.randn(k, 8), n) for k, n in ((4, 3), (5, 7), (6, 2**20))])

    def later(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The region knows its integers' bounds by a size that nothing else in it needs."""
        return torch.tanh(x @ W) @ W, torch.arange(n, n + 4) * 3 + 1

    calls = [(torch.randn(k, 8), n) for k, n in ((4, 3), (5, 7), (6, 2**30))]
    agrees(later, backend, calls, options={"disabled_ops": [aten.arange]})


def picked(x: Tensor, mask: Tensor) -> tuple[Any, ...]:
    """A region on either side of a size that only the data knows."""
    y = (torch.tanh(x @ W) @ W)[mask]
    return torch.softmax(torch.tanh(y @ W) @ W, -1), y.shape[0] + 1


def cut_short(x: Tensor, mask: Tensor) -> tuple[Any, ...]:
    n = int(mask.sum())
    return torch.relu(x[:n] @ W) @ W, n


@engines
@pytest.mark.parametrize("fn", [picked, cut_short])
def test_sizes_that_only_the_data_knows(
    fn: Callable[..., Any], backend: str, entries: list[Entry]
) -> None:
    def calls(n: int) -> list[tuple[Any, ...]]:
        places = torch.arange(n)
        return [(torch.randn(n, 8), mask) for mask in (places % 2 == 0, places > 1, places < 0)]

    found = agrees(fn, backend, [*calls(6), *calls(9), *calls(12)])
    assert len(entries) == 2
    assert all(entry.captured.stop is None for entry in entries)
    assert any("u1" in text for row in found[-1].regions for text in row.open), str(found[-1])


@engines
def test_what_is_made_of_sizes_for_ours_is_ours(backend: str) -> None:
    """One part before the region, where an engine's, one of ours and the region were."""

    def fn(x: Tensor) -> Tensor:
        near = torch.erfinv(torch.arange(x.shape[0]).float() / 1000).long()
        return torch.tanh(x @ W + F.embedding(near, TABLE)) @ W

    options = {"disabled_ops": [aten.erfinv, aten.erfinv_]}
    _, report = agrees(fn, backend, rows(3, 5, 8), options=options)
    (row,) = report.regions
    assert "aten.arange.start_step" not in row.ops and row.ops["aten.mm.default"] == 2


@engines
def test_operators_that_are_disabled(backend: str, entries: list[Entry]) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x @ W) + x.shape[0], -1) @ W

    options = {"disabled_ops": [aten.tanh]}
    _, report = agrees(fn, backend, rows(3, 5, 8, 1), options=options)
    assert len(entries) == 2 and len(report.regions) == 2
    assert [row.op for row in report.unclaimed] == ["aten.tanh.default"]


@engines
def test_a_cache_that_grows(backend: str, entries: list[Entry]) -> None:
    def fn(x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([keys, x @ W], 1), torch.cat([values, x.tanh() @ W], 1)
        return F.scaled_dot_product_attention(x @ W, keys, values) @ W, keys, values

    fast = fusee.compile(fn, backend=backend)
    keys = values = torch.randn(2, 4, 8)
    for step in range(10):
        x = torch.randn(2, 5 if step == 0 else 1, 8)
        got, want = fast(x, keys, values), fn(x, keys, values)
        assert_same(got, want)
        _, keys, values = want
    assert len(entries) <= 3


def test_training_with_openvino(entries: list[Entry]) -> None:
    pytest.importorskip("openvino")
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    fast = fusee.compile(
        layers, backend="openvino", options={"aot_autograd": True}, name="training, open"
    )
    with torch.enable_grad():
        for n in (3, 5, 9, 2):
            x = torch.randn(n, 8)
            grads = []
            for model in (fast, layers):
                layers.zero_grad()
                model(x).square().mean().backward()
                grads.append([p.grad.clone() for p in layers.parameters() if p.grad is not None])
            torch.testing.assert_close(*grads)
    assert len(entries) == 2
    _, report = fusee.report("training, open")
    assert [(row.failed, row.calls) for row in report.regions] == [(None, 3)]


def test_models_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    graph = pytest.importorskip("fusee.backends.openvino.graph")

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x @ W) @ W

    made: list[Any] = []
    convert = graph.convert_fx

    def counted(*args: Any) -> Any:
        made.append(args)
        return convert(*args)

    monkeypatch.setattr(graph, "convert_fx", counted)
    options = {"model_caching": True, "cache_dir": tmp_path}
    agrees(fn, "openvino", rows(3, 5, 9), options=options)
    assert len(made) == 2
    agrees(fn, "openvino", rows(4, 6, 11), options=options)
    assert len(made) == 3  # the model with open sizes was there


def test_what_openvino_cannot_take_open_is_ours_and_said() -> None:
    pytest.importorskip("openvino")

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(torch.tanh(x), w)

    def grouped(x: Tensor) -> Tensor:
        return F.group_norm(torch.tanh(x * 2), 2)

    args = [(torch.randn(2, k, 9), torch.randn(4, k, 3)) for k in (2, 3, 5)]
    _, report = agrees(convolved, "openvino", args)
    wanted = "aten.convolution.default", "OpenVINO convolves with weights of known sizes"
    assert wanted in [(row.op, row.reason) for row in report.unclaimed]
    _, report = agrees(grouped, "openvino", [(torch.randn(2, k, 9),) for k in (2, 4, 6)])
    wanted = "aten.native_group_norm.default", "OpenVINO groups channels of a known number"
    assert wanted in [(row.op, row.reason) for row in report.unclaimed]
    kept = torch.randn(4, 3, 3)
    *_, report = agrees(
        lambda x: convolved(x, kept), "openvino", [(torch.randn(n, 3, 5 + n),) for n in (2, 4, 3)]
    )
    assert not report.unclaimed


def test_an_input_whose_values_nothing_needs() -> None:
    """OpenVINO's frontend leaves it out of the model, which had one input fewer than the call."""
    pytest.importorskip("openvino")

    def fn(shape: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ W) @ W + shape.new_full((8,), 2.0)

    agrees(fn, "openvino", [(torch.randn(3), torch.randn(n, 8)) for n in (4, 5, 6)])


@pytest.mark.slow
@engines
@pytest.mark.parametrize("name", ["bert", "t5", "resnet18"])
def test_two_versions_serve_a_model(name: str, backend: str, entries: list[Entry]) -> None:
    module, _, _ = zoo.load(name, "test")
    fast = fusee.compile(module, backend=backend, name=f"{name} in {backend}")

    def run(function: Any, settings: dict[str, Any]) -> Any:
        torch.manual_seed(2)
        args, kwargs = zoo.MODELS[name].inputs(**settings)
        return function(*args, **kwargs)

    for settings in itertools.islice(sizes(name), 4):
        got, want = run(fast, settings), run(module, settings)
        assert_same(got, want, partial(exact, run, module, settings))
    assert len(entries) == 2
    _, report = fusee.report(f"{name} in {backend}")
    assert all(row.failed is None and row.calls == 3 for row in report.regions)
    assert len(report.regions) <= 2 and any(row.open for row in report.regions)


@pytest.mark.slow
@engines
def test_generation_with_a_growing_cache(backend: str, entries: list[Entry]) -> None:
    loaded, _, kwargs = zoo.load("llama", "test")
    module: Any = loaded
    module.config.use_cache = module.generation_config.use_cache = True
    module.generation_config.eos_token_id, module.generation_config.pad_token_id = None, 0
    ids = kwargs["input_ids"]

    def generated() -> Any:
        mask = torch.ones_like(ids)
        return module.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)

    want = generated()
    module.forward = fusee.compile(module.forward, backend=backend)
    assert torch.equal(generated(), want)
    assert len(entries) <= 3  # the prompt, the first token, all others
