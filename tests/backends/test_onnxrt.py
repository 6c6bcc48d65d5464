"""The backend onnxrt: results, partition, options, weights, threads, dynamic sizes, failures."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.backends import lookup
from fusee.backends.onnx import OnnxOptions
from fusee.backends.report import Report
from fusee.errors import FuseeWarning, MissingPackage, OptionError
from tests.backends.engine_calls import by, compiled, through, two_layers, ways
from tests.check import check

runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Mapping[str, Tensor]]]:
    """The sessions that regions get, each with the weights that are constants in it."""
    made: list[tuple[Any, Mapping[str, Tensor]]] = []
    make = OnnxOptions.session_of

    def noting(self: OnnxOptions, model: bytes, weights: Any, *, probe: bool = False) -> Any:
        session = make(self, model, weights, probe=probe)
        if not probe:
            made.append((session, weights))
        return session

    monkeypatch.setattr(OnnxOptions, "session_of", noting)
    return made


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval()


# ------------------------------------------------------------------------------ results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_that_the_runtime_lacks_stay_with_us(dtype: torch.dtype) -> None:
    x, w = torch.randn(6, 8).to(dtype), torch.randn(8, 8).to(dtype)
    seen: list[Report] = []
    check(two_layers, x, w, backend=through("onnxrt", seen))
    assert bool(seen[0].unclaimed) == (dtype == torch.bfloat16)
    assert all("implementation" in row.reason for row in seen[0].unclaimed if "mm" in row.op)


@pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")
def test_complex_tensors_and_axes_of_numbers_stay_with_us() -> None:
    def fn(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x @ x)
        return torch.complex(y, x), y.to(torch.complex64).real, n.any(0), n.all(0, keepdim=True)

    check(fn, torch.randn(4, 4), torch.tensor(2.0), backend="onnxrt", capture="fx")


def test_dtypes_are_promoted_as_torch_does() -> None:
    def fn(x: Tensor, n: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
        mixed = n * 0.5 + x, n > 1.5, x == n, torch.where(flag, n, x), n.sqrt()
        return *mixed, flag + n, flag.sum(0), flag.cumsum(1), torch.cat([n, x]), x / n, n // 2

    n = torch.arange(1, 7).view(2, 3)
    check(fn, torch.randn(2, 3), n, n > 3, backend="onnxrt", capture="fx")
    check(fn, torch.randn(2, 3), n.int(), n > 3, backend="onnxrt", capture="fx")


# ------------------------------------------------------------------------------ partition


def test_what_it_computes_differently_is_not_claimed() -> None:
    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        some = torch.rand_like(x), torch.atan2(x, x), torch.remainder(x, 0.3)
        return two_layers(x, x), *some, F.embedding_bag(i, x)

    report = compiled("onnxrt", fn, torch.randn(4, 4), torch.tensor([[1, 2]])).report()
    reasons = {row.op: row.reason for row in report.unclaimed}
    assert "random" in reasons["aten.rand_like.default"]
    assert "composes it" in reasons["aten.atan2.default"]
    assert "composes it" in reasons["aten.remainder.Scalar"]
    assert any("crashes" in why for op, why in reasons.items() if "embedding_bag" in op)
    assert [row.ops["aten.mm.default"] for row in report.regions] == [2]


def test_what_is_not_a_number_stays_so() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x) + torch.maximum(x, x * 2), torch.softmax(x @ x, -1), x.clamp(-1, 1)
        return *y, x.amax(-1), *x.min(-1), x.argmax(-1), x.sign(), x.sum(), F.hardswish(x)

    x = torch.randn(6, 6)
    x[1, 2] = x[4, 4] = float("nan")
    x[2, 3] = float("inf")
    check(fn, x, backend="onnxrt", capture="fx")


class Failing:
    """A session that cannot run."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        raise RuntimeError("no room for _softmax/3")


@pytest.mark.parametrize("at", ["make", "run"])
@ways
def test_a_region_that_fails_is_ours_with_one_warning(
    at: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = OnnxOptions.session_of

    def failing(self: OnnxOptions, model: bytes, weights: Any, *, probe: bool = False) -> Any:
        is_bad = b"Softmax" in model and not probe
        if is_bad and at == "make":
            raise RuntimeError("no room for _softmax/3")
        session = make(self, model, weights, probe=probe)
        return Failing(session) if is_bad else session

    monkeypatch.setattr(OnnxOptions, "session_of", failing)
    x, w, name = torch.randn(4, 8), torch.randn(8, 8), f"ONNX Runtime fails to {at} by {way}"

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = torch.softmax(x @ w, -1) @ w
        return torch.tanh(torch.rand_like(y) * 0 + y) @ w

    with pytest.warns(FuseeWarning, match=r"at aten\._softmax\.default") as caught:
        call = by(way, "onnxrt", fn, name=name)
        torch.testing.assert_close(call(x, w), fn(x, w))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(call(x, w), fn(x, w))
    (report,) = fusee.report(name)
    failed, good = report.regions
    assert "no room" in str(failed.failed) and good.failed is None and good.calls == 2


# ------------------------------------------------------------------------------ weights


def test_weights_are_followed(sessions: list[Any]) -> None:
    module, x = small(), torch.randn(3, 8)
    fast = fusee.compile(module, backend="onnxrt")
    constants = []
    for _ in range(5):
        torch.testing.assert_close(fast(x), module(x))
        torch.testing.assert_close(fast(x), module(x))
        constants.append(len(sessions[-1][1]))
        module.get_parameter("0.weight").add_(0.5)
    # folded twice; what keeps changing is an input from then on
    assert constants == [6, 6, 0, 0, 0] and len(sessions) == 3
    module[3].weight = nn.Parameter(torch.randn(4, 16))
    torch.testing.assert_close(fast(x), module(x))
    assert len(sessions) == 3


def test_weights_share_the_modules_memory(sessions: list[Any]) -> None:
    module = small()
    fusee.compile(module, backend="onnxrt")(torch.randn(3, 8))
    (_, weights), *_ = sessions
    theirs = {x.data_ptr() for x in module.parameters()}
    assert {x.data_ptr() for x in weights.values()} == theirs


# ------------------------------------------------------------------------------ options


def test_options_are_each_functions_own(sessions: list[Any]) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    entries = {"session.intra_op.allow_spinning": "1"}
    options = {"intra_op_num_threads": 1, "graph_optimization_level": "ORT_DISABLE_ALL"}
    one = compiled(
        "onnxrt", two_layers, x, w, session_options={**options, "session_config_entries": entries}
    )
    other = compiled("onnxrt", two_layers, x, w, name="other")
    for call in (one, other):
        torch.testing.assert_close(call(x, w), two_layers(x, w))
    ours, default = (session.get_session_options() for session, _ in sessions)
    level = runtime.GraphOptimizationLevel
    assert ours.intra_op_num_threads == 1 != default.intra_op_num_threads or (
        torch.get_num_threads() == 1
    )
    assert ours.graph_optimization_level == level.ORT_DISABLE_ALL
    assert default.graph_optimization_level == level.ORT_ENABLE_ALL
    for found, spins in ((ours, "1"), (default, "0")):
        assert found.get_session_config_entry("session.intra_op.allow_spinning") == spins


def test_providers_in_both_of_the_runtimes_forms(sessions: list[Any]) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    cpu, arena = "CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"}
    compiled("onnxrt", two_layers, x, w, providers=[cpu])
    compiled("onnxrt", two_layers, x, w, providers=[(cpu, {})], provider_options=[{}])
    assert [session.get_providers() for session, _ in sessions] == [[cpu], [cpu]]
    parsed = OnnxOptions.parse({"providers": [(cpu, arena)]})
    assert parsed.providers == ((cpu, arena),)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"provider": []}, "'providers'"),
        ({"providers": ["TensorFlow"]}, "available: .*CPUExecutionProvider"),
        ({"providers": "CPUExecutionProvider"}, "a list of providers"),
        ({"providers": [3]}, "a name, or a name and its options"),
        ({"provider_options": [{}, {}]}, "one for each of providers"),
        ({"provider_options": [1]}, "a dict"),
        ({"session_options": []}, "a dict"),
        ({"session_options": {"intra_op_threads": 1}}, "'intra_op_num_threads'"),
        ({"session_options": {"intra_op_num_threads": "1"}}, "takes int"),
        ({"session_options": {"execution_mode": "parallel"}}, "ORT_PARALLEL"),
        ({"session_options": {"session_config_entries": {"a": 1}}}, "a dict of texts"),
        ({"disabled_ops": ["aten.relu"]}, "torch.ops.aten"),
        ({"name": 3}, "takes str"),
    ],
)
def test_wrong_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        lookup("onnxrt", options)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "onnxscript" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(MissingPackage, match=r"needs onnxscript[\s\S]*pip install 'fusee\[onnx\]'"):
        lookup("onnxrt")
    states = {str(name): name.state for name in fusee.compiler.list_backends()}
    assert states["onnxrt"] == "missing package: onnxscript" and states["fusee"] == "ready"
