"""The backend openvino: results, partition, options, weights, threads, dynamic sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusee
from fusee.backends import lookup
from fusee.backends import openvino as api
from fusee.backends.openvino import graph
from fusee.backends.report import Report
from fusee.errors import FuseeWarning, OptionError, SettingError
from tests.backends.engine_calls import by, compiled, through, two_layers, ways
from tests.check import check

pytest.importorskip("openvino")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    torch._dynamo.reset()  # which takes sizes for open once it has seen others
    with torch.no_grad():
        yield


def test_attention_of_one_token() -> None:
    """Its fused kernel ended the process."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, mask)
        return y @ y.mT

    check(fn, torch.randn(1, 17, 1, 1), torch.randn(1, 17, 1, 1), backend="openvino", capture="fx")


class Attention(nn.Module):
    """As vision transformers have it: queries, keys and values of one product."""

    def __init__(self, heads: int, is_plain: bool) -> None:
        super().__init__()
        self.heads, self.is_plain = heads, is_plain
        self.qkv = nn.Linear(heads * 16, heads * 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, 16)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.is_plain:
            y = (q @ k.transpose(-1, -2) / 4 + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4), (3, 4), (3, 5)])
def test_attention_of_as_many_heads_as_tokens(batch: int, tokens: int, is_plain: bool) -> None:
    net, mask = Attention(4, is_plain), torch.randn(1, 4, tokens, tokens)
    check(net, torch.randn(batch, tokens, 64), mask, backend="openvino", capture="fx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floating_point(dtype: torch.dtype) -> None:
    x, w = torch.randn(6, 8).to(dtype), torch.randn(8, 8).to(dtype)
    check(two_layers, x, w, backend="openvino", capture="fx")


def test_what_it_computes_differently_is_not_claimed() -> None:
    def fn(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return two_layers(x, x), x.double().sin(), n * n, torch.rand_like(x), x.argmax(1)

    report = compiled("openvino", fn, torch.randn(4, 4), torch.arange(3)).report()
    reasons = {row.op: row.reason for row in report.unclaimed}
    assert reasons["aten.sin.default"] == "float64 is not computed as such"
    assert "32 bits" in reasons["aten.mul.Tensor"]
    assert "random" in reasons["aten.rand_like.default"]
    assert "no such operator" in reasons["aten.argmax.default"]
    big = torch.tensor([2**33, -(2**40), 3])
    check(fn, torch.randn(4, 4), big, backend="openvino", capture="fx")


def test_integers_that_are_small_are_its_own() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(x.shape[0]).repeat(2, 1)
        steps = (places[:, 1:] - places[:, :-1] * 3).abs()
        return two_layers(x, x), steps, steps < 2, places.repeat(1, 1)

    x = torch.randn(16, 16)
    check(fn, x, backend="openvino", capture="fx")
    report = compiled("openvino", fn, x).report()
    assert [row.op for row in report.unclaimed] in ([], ["aten.repeat.default"])
    assert report.regions[0].ops["aten.abs.default"] == 1


@pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")
def test_reductions_and_windows_that_it_has_not_are_ours() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x @ x) * 2
        norms = torch.linalg.vector_norm(y), torch.linalg.vector_norm(y, 0, dim=1)
        pooled = F.avg_pool2d(y[None, None], 2, divisor_override=3)
        return *norms, pooled, y.sum().mean(0, keepdim=True), y.sum().prod(0)

    check(fn, torch.randn(4, 4), backend="openvino", capture="fx")


@pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")
def test_parts_that_are_written_one_after_the_other() -> None:
    """It made one write of two, which it could not run."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        y[1:] += 1
        y[0, 2:4] = x[1, :2]
        y[:, 0] = y[:, 5]
        stepped = x + 1
        stepped[::2] = y[1::2]
        stepped[1::2] = y[::2] * 3
        return y + 1, stepped, stepped.select_scatter(y[0].bfloat16(), 0, 3)

    check(fn, torch.randn(4, 6), backend="openvino", capture="fx")
    check(fn, torch.randn(4, 6).half(), backend="openvino", capture="fx")


def test_one_element_that_is_left_of_several() -> None:
    """OpenVINO takes the first one, eager what is in the middle."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        line, room = x[0], x.expand(1, 2, 7, 6).unsqueeze(2).expand(1, 2, 3, 7, 6)
        return (
            F.interpolate(x, (1, 3), mode="bilinear") + 1,
            F.interpolate(x, (3, 1), mode="bicubic") + 1,
            F.interpolate(x, (1, 3), mode="bilinear", align_corners=True) + 1,
            F.interpolate(line, 1, mode="linear") + 1,
            F.interpolate(room, (1, 3, 2), mode="trilinear") + 1,
        )

    check(fn, torch.randn(1, 2, 7, 6), backend="openvino", capture="fx")
    check(fn, torch.randn(1, 2, 1, 6).expand(1, 2, 7, 6), backend="openvino", capture="fx")


def test_tensors_without_elements_are_ours() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x + 1) * 2
        return torch.softmax(y, -1), y.mean(0), torch.log_softmax(y, 0)

    check(fn, torch.randn(5, 0, 0), backend="openvino", capture="fx")  # crashed the process
    check(fn, torch.randn(0, 4), backend="openvino", capture="fx")
    seen: list[Report] = []
    backend = through("openvino", seen)
    check(fn, torch.randn(3, 4), backend=backend, dynamic=True, again=[(torch.randn(7, 4),)])
    call = torch.compile(lambda x: torch.softmax(x + x.shape[0], 0), backend=backend, dynamic=True)
    call(torch.randn(3, 4))
    assert call(torch.randn(0, 4)).shape == (0, 4)


@pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")
def test_what_it_cannot_convert_is_ours() -> None:
    def fn(x: Tensor, n: int) -> tuple[Tensor, ...]:
        y = torch.tanh(x @ x.mT) * 2
        pooled = F.avg_pool2d(y[None], n), F.max_pool2d(y[None], n)
        convolved = F.conv2d(y[None, None], y[None, None, :3, :3], stride=n)
        attended = F.scaled_dot_product_attention(y, y, y)
        counted = (y > 0).to(torch.uint16).to(torch.float32)
        mixed = torch.addcmul(y, y, counted.half())
        return *pooled, convolved, attended, y.sum().flip(0), y.add(x, alpha=n), counted, mixed

    fast, x = fusee.compile(fn, backend="openvino"), torch.randn(8, 8)
    for n in (2, 3, 4):  # from the second one on a number that varies
        for got, want in zip(fast(x, n), fn(x, n), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "product",
    [
        lambda x: x @ x.mT,
        lambda x: F.linear(x, x, x[0, :1]),
        lambda x: torch.einsum("ij,jk,ki->", x, x.mT, x @ x.mT),
    ],
)
def test_a_product_that_becomes_a_number(product: Callable[[Tensor], Tensor]) -> None:
    """Reshaped to no axes it ended the process."""
    check(lambda x: product(x).view(()) * x, torch.randn(1, 5), backend="openvino", capture="fx")


def test_what_it_gives_other_infinities_for_is_ours() -> None:
    x = torch.tensor([[float("-inf"), 1.0, float("inf")], [float("-inf"), -1.0, float("nan")]])
    check(torch.logaddexp, x, x[:1], backend="openvino", capture="fx")
    check(torch.logsumexp, x, 1, backend="openvino", capture="fx")
    hidden = torch.full((2, 3), -torch.inf)
    check(lambda x: aten._safe_softmax(x * 1, 1), hidden, backend="openvino", capture="fx")


def test_what_it_rounds_elsewhere_is_not_claimed() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        steps = torch.linspace(4.3, -3, 50, dtype=torch.int64)
        return two_layers(x.float(), x.float()), steps, torch.cumsum(x, 0)

    check(fn, torch.randn(16, 16).bfloat16(), backend="openvino", capture="fx", oracle=False)


@pytest.mark.parametrize("fn", [F.softplus, F.mish, F.celu, torch.expm1, torch.log1p])
def test_what_loses_small_numbers_is_ours(fn: Callable[[Tensor], Tensor]) -> None:
    """It composes them of exp and log, where only digits of 1 are left."""
    check(fn, -torch.logspace(-7, -5, 64), backend="openvino", capture="fx")
    check(fn, torch.linspace(-16, -12, 64), backend="openvino", capture="fx")


# ------------------------------------------------------------------------------ partition options


def normalised(x: Tensor) -> Tensor:
    y = F.conv2d(x, torch.ones(3, 3, 2, 2))
    return F.hardswish(F.batch_norm(y, torch.ones(3), torch.full((3,), 2.0))) + 1


NORM = aten._native_batch_norm_legit_no_training
PROGRAMS: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.gelu: lambda x: F.gelu(x @ x),
    aten.native_layer_norm: lambda x: F.layer_norm(x @ x, x.shape[-1:]),
    aten.logsumexp: lambda x: torch.logsumexp(x @ x, -1).exp().tanh() @ x[0, 0],
    aten.scaled_dot_product_attention: lambda x: F.scaled_dot_product_attention(x, x, x).tanh(),
    NORM: normalised,
    aten.hardswish: normalised,
}


@pytest.mark.parametrize(
    ("given", "claimed", "unclaimed"),
    [
        (aten.gelu.default, "erf", ""),
        (aten.gelu, "erf", ""),
        (aten.hardswish.default, "clamp", ""),
        (NORM, "reciprocal", ""),
        (aten.scaled_dot_product_attention, "bmm", ""),
        (aten.native_layer_norm, "rsqrt", "var_mean"),  # of what OpenVINO has not, too
        (aten.logsumexp, "log", "amax"),  # which OpenVINO does not claim whole
    ],
)
def test_decompositions_take_operators_apart(given: Any, claimed: str, unclaimed: str) -> None:
    packet = getattr(given, "overloadpacket", given)
    fn, x = PROGRAMS[packet], torch.randn(2, 3, 4, 4)

    def names(*rows: Any) -> set[str]:
        """Operators without "aten." and their overloads."""
        return {op.split(".")[1] for row in rows for op in row}

    plain = compiled("openvino", fn, x).report()
    call = compiled("openvino", fn, x, decompositions=[given])
    torch.testing.assert_close(call(x), fn(x), rtol=1e-4, atol=1e-5)
    apart = call.report()
    assert [row.failed for row in apart.regions] == [None] * len(apart.regions)
    left = [{row.op for row in found.unclaimed} for found in (plain, apart)]
    before, after = (names(*(row.ops for row in found.regions)) for found in (plain, apart))
    assert packet.__name__ in before | names(left[0])
    assert packet.__name__ not in after | names(left[1])
    assert claimed not in before and claimed in after
    assert names(left[1]) - names(left[0]) == ({unclaimed} if unclaimed else set())


def test_operators_of_which_torchscript_has_more_overloads() -> None:
    x, packets = torch.randn(4, 4), [aten.cos, aten.add, aten.einsum]
    for option in ("decompositions", "disabled_ops"):
        call = compiled("openvino", two_layers, x, x, **{option: packets})
        torch.testing.assert_close(call(x, x), two_layers(x, x))
        assert {row.op.split(".")[1] for row in call.report().unclaimed} == {"add"}


def test_decompositions_in_training() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    seen = []
    with torch.enable_grad():
        for ops in ([], [aten.gelu]):
            call = compiled(
                "openvino", lambda x: F.gelu(x @ x), x, aot_autograd=True, decompositions=ops
            )
            (grad,) = torch.autograd.grad(call(x).sum(), x)
            (want,) = torch.autograd.grad(F.gelu(x @ x).sum(), x)
            torch.testing.assert_close(grad, want)
            seen.append({op for row in call.report().regions for op in row.ops})
    assert "aten.gelu.default" in seen[0]
    assert "aten.gelu.default" not in seen[1] and "aten.erf.default" in seen[1]


def test_two_functions_have_their_own_options() -> None:
    x = torch.randn(256, 256)
    exact = compiled("openvino", two_layers, x, x)
    rough = compiled("openvino", two_layers, x, x, config={"INFERENCE_PRECISION_HINT": "bf16"})
    again = compiled("openvino", two_layers, x, x)
    want = two_layers(x.double(), x.double())

    def error(call: Callable[..., Tensor]) -> float:
        return (call(x, x).double() - want).abs().max().item()

    assert error(exact) < 1e-4 and error(again) < 1e-4
    assert error(rough) > 1e-3


@pytest.mark.parametrize("at", ["convert", "run"])
@ways
def test_a_failing_region_is_compiled_by_us(
    at: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, name = torch.randn(4, 4), f"OpenVINO fails to {at} by {way}"

    def fn(x: Tensor) -> Tensor:
        return torch.cumsum(torch.erfinv(torch.tanh(x @ x)), 0) @ x

    convert, run = graph.convert_fx, api.Executable.__call__
    broken: list[Any] = []

    def breaking(gm: fx.GraphModule, inputs: Any) -> Any:
        if any(node.target is aten.cumsum.default for node in gm.graph.nodes):
            if at == "convert":
                raise RuntimeError("No conversion rule found for operations: aten.cumsum.default")
            model = convert(gm, inputs)
            broken.append(len(model.get_ordered_ops()))
            return model
        return convert(gm, inputs)

    def failing(self: Any, inputs: Any, outputs: Any) -> None:
        names = " ".join(
            op.get_friendly_name() for op in self.compiled.get_runtime_model().get_ops()
        )
        if broken and "cumsum" in names.lower():
            raise RuntimeError("aten.cumsum.default went wrong")
        run(self, inputs, outputs)

    monkeypatch.setattr(graph, "convert_fx", breaking)
    monkeypatch.setattr(api.Executable, "__call__", failing)
    with pytest.warns(FuseeWarning, match=r"at aten\.cumsum\.default") as told:
        call = by(way, "openvino", fn, name=name, disabled_ops=[aten.erfinv.default])
        for _ in range(3):
            torch.testing.assert_close(call(x), fn(x))
    assert len(told) == 1
    (report,) = fusee.report(name)
    first, second = report.regions
    assert first.failed is None and first.calls == 3
    assert second.failed is not None


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devise": "CPU"}, r"'devise' does not exist(.|\n)*'device'"),
        ({"device": "GPU.7"}, r"'GPU.7' is not there(.|\n)*devices here: CPU"),
        ({"device": "MULTI:CPU,NPU"}, "'NPU' is not there"),
        ({"device": "MULTI:"}, r"'MULTI:' names no devices(.|\n)*'MULTI:CPU"),
        ({"device": "HETERO"}, "names no devices"),
        ({"device": 3}, "takes a device name"),
        ({"device": "AUTO:-CPU"}, r"refuses the device 'AUTO:-CPU'(.|\n)*devices here: CPU"),
        ({"name": 3}, "takes str"),
        ({"aot_autograd": 1}, "takes bool"),
        ({"cache_dir": 3}, "takes a path"),
        ({"disabled_ops": aten.add.Tensor}, "takes a list of operators"),
        ({"disabled_ops": ["add"]}, "takes a list of operators"),
        ({"decompositions": [aten.mm.default]}, "torch has none for aten.mm.default"),
        ({"decompositions": [aten.relu, aten.convolution]}, "none for aten.convolution.default"),
        ({"decompositions": aten.relu}, "takes a list of operators"),
        ({"config": {"PERFORMANCE_HIT": "LATENCY"}}, "Unsupported property PERFORMANCE_HIT"),
        ({"config": {"INFERENCE_PRECISION_HINT": "f31"}}, "Wrong value f31"),
        ({"config": "LATENCY"}, "takes a dict of OpenVINO properties"),
    ],
)
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
def test_wrong_options(options: dict[str, object], text: str, backend: str) -> None:
    with pytest.raises(OptionError, match=text):
        lookup(backend, options)


def test_a_hint_on_precision_is_not_overruled() -> None:
    hint = "INFERENCE_PRECISION_HINT"
    given: list[dict[str, str]] = [{}, {hint: "bf16"}, {"EXECUTION_MODE_HINT": "PERFORMANCE"}]
    found = [api.OpenVINOOptions.parse({"config": config}).properties for config in given]
    assert [one.get(hint) for one in found] == ["f32", "bf16", None]


def test_a_folder_may_be_in_the_users_home() -> None:
    found = api.OpenVINOOptions.parse({"cache_dir": "~/models"}).cache_dir
    assert found == Path.home() / "models"


@pytest.mark.parametrize("options", [{"devise": "CPU"}, {"device": "GPU.7"}])
def test_wrong_options_are_the_users_error(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="stopped before compiling"):
        fusee.compile(two_layers, backend="openvino", options=options)
    stock = torch.compile(two_layers, backend="fusee_openvino", options=options)
    with pytest.raises(Exception, match="stopped before compiling") as caught:
        stock(torch.ones(4, 4), torch.ones(4, 4))
    assert isinstance(caught.value.inner_exception, OptionError)  # type: ignore[attr-defined]


def test_documented_options_are_taken() -> None:
    x = torch.randn(4, 4)
    for options in (
        {"device": "CPU", "config": {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}},
        {"device": "AUTO"},
        {"device": "AUTO:-GPU"},
        {"device": "MULTI:CPU"},
        {"device": "HETERO:CPU", "aot_autograd": False},
    ):
        call = compiled("openvino", two_layers, x, x, **options)
        torch.testing.assert_close(call(x, x), two_layers(x, x))
        assert call.report().regions[0].device == options["device"]


def test_the_default_device_is_found_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "devices", lambda: pytest.fail("all plugins were loaded"))
    lookup("openvino", {"device": "CPU"})


def test_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    monkeypatch.setenv("OPENVINO_TORCH_BACKEND_DEVICE", "AUTO")
    assert compiled("openvino", two_layers, x, x).report().regions[0].device == "AUTO"
    assert compiled("openvino", two_layers, x, x, device="CPU").report().regions[0].device == "CPU"
    monkeypatch.delenv("OPENVINO_TORCH_BACKEND_DEVICE")
    monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", str(tmp_path / "blobs"))
    monkeypatch.setenv("OPENVINO_TORCH_MODEL_CACHING", "True")
    compiled("openvino", two_layers, x, x)
    assert len(list((tmp_path / "blobs").glob("[0-9a-f]*.blob"))) == 1
    options: dict[str, object] = {"cache_dir": str(tmp_path / "mine")}
    compiled("openvino", two_layers, x, x, **options)
    compiled("openvino", two_layers, x, x @ x, model_caching=False)
    counts = [len([*(tmp_path / name).glob("[!i]*")]) for name in ("blobs", "mine")]
    assert counts == [1, 1]  # options are above variables
    monkeypatch.setenv("OPENVINO_TORCH_BACKEND_DEVICE", "GPU.7")
    with pytest.raises(OptionError, match=r"'GPU\.7' is not there"):
        compiled("openvino", two_layers, x, x)
    compiled("openvino", two_layers, x, x, device="CPU")
    monkeypatch.setenv("OPENVINO_TORCH_MODEL_CACHING", "maybe")
    with pytest.raises(SettingError, match="takes 1 or 0"):
        compiled("openvino", two_layers, x, x)


def test_the_older_name_says_so() -> None:
    with pytest.warns(FuseeWarning, match="TorchScript"):
        found = lookup("openvino_ts", {})
    x = torch.randn(4, 4)
    call = found(fx.symbolic_trace(two_layers), [x, x])
    torch.testing.assert_close(call(x, x), two_layers(x, x))
    (row,) = call.report().regions
    assert row.engine == "openvino_ts" and row.failed is None


@pytest.mark.filterwarnings("ignore:the backend 'openvino_ts'")
def test_the_older_path_leaves_open_sizes_to_us() -> None:
    seen: list[Report] = []
    fast = torch.compile(two_layers, backend=through("openvino_ts", seen), dynamic=True)
    with pytest.warns(FuseeWarning, match="this region has open ones") as told:
        for n in (3, 5):
            x, w = torch.randn(n, 8), torch.randn(8, 8)
            torch.testing.assert_close(fast(x, w), two_layers(x, w))
    assert len(told) == len(seen) == 1 and "our compiler" in str(seen[0].regions[0])


# ------------------------------------------------------------------------------ training


@ways
def test_training_with_aot_autograd(way: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    twin = copy.deepcopy(module)
    call = by(way, "openvino", module, aot_autograd=True, name=f"training by {way}")
    ours = torch.optim.SGD(module.parameters(), lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    with torch.enable_grad():
        for _ in range(5):
            x = torch.randn(2, 3, 8, 8)
            for model, optimizer in ((call, ours), (twin, theirs)):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            torch.testing.assert_close(list(module.parameters()), list(twin.parameters()))
    (report,) = fusee.report(f"training by {way}")
    assert report.backward is not None and report.backward.kernels
    assert report.regions and all(row.failed is None for row in report.regions)
    assert sum(row.calls for row in report.regions) == 5 * len(report.regions)


@pytest.mark.parametrize("order", [None, torch.inf])
def test_a_maximum_is_found_again_in_the_backward(order: float | None) -> None:
    """What was computed again was rounded otherwise, equal to no maximum, and its gradient NaN."""

    def fn(x: Tensor) -> Tensor:
        y = x * x.sin() * x.cos() + x * x.exp()
        return y.amax(-1) if order is None else y.norm(order, -1)

    found = []
    with torch.enable_grad():
        for function in (fn, by("fusee.compile", "openvino", fn, aot_autograd=True)):
            x = torch.linspace(-3, 2, 1024).view(16, 64).requires_grad_()
            function(x).sum().backward()
            found.append(x.grad)
    torch.testing.assert_close(*found)


def test_without_it_training_is_ours() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.enable_grad():
        call = compiled("openvino", two_layers, x, x)
        call(x, x).sum().backward()
    assert not call.report().regions and x.grad is not None
    assert "nothing of it runs in openvino: it needs gradients" in str(call.report())


def test_nan_is_no_number() -> None:
    x = torch.tensor([[float("nan"), 1.0, -2.0]] * 3)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ torch.ones(3, 3)
        return torch.maximum(x, y), torch.where(x > 0, x, y), x.amax(1), torch.sign(x), x.minimum(y)

    torch.testing.assert_close(compiled("openvino", fn, x)(x), fn(x), equal_nan=True)
