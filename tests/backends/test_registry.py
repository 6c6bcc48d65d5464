"""The table of backends, their options, and the entry point of stock torch.compile."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

import fusee
from fusee.backends import Backend, list_backends, lookup, register, registry
from fusee.backends.report import CompiledGraph
from fusee.errors import FuseeWarning, MissingDevice, MissingPackage, OptionError, UnknownBackend


def program(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1) + x.sum()


def run(backend: Callable[..., Any]) -> Any:
    """What a backend's callable gives for `program`, which must be eager's result."""
    x = torch.randn(3, 5)
    with torch.no_grad():
        compiled = backend(fx.symbolic_trace(program), [x])
        got = compiled(x)
    torch.testing.assert_close(got[0] if isinstance(got, (tuple, list)) else got, program(x))
    return compiled


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends that a test registers are gone after it."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    yield


@pytest.mark.parametrize("name", ["eager", "aot_eager", "fusee"])
def test_our_backends(name: str) -> None:
    run(lookup(name))
    assert name in list_backends(None)
    assert (name in list_backends()) == (name == "fusee")


@pytest.mark.parametrize("name", ["eager_noexcept", "pre_dispatch_eager"])
def test_stock_backends(name: str) -> None:
    run(lookup(name))


def test_inductor_is_found_and_its_options_are_checked_without_compiling() -> None:
    assert "inductor" in list_backends()
    assert callable(lookup("inductor"))
    bound: Any = lookup("inductor", {"max_autotune": True})
    assert bound.config == {"max_autotune": True}
    with pytest.raises(OptionError, match="'max_autotune'"):
        lookup("inductor", {"max_autotun": True})
    with pytest.raises(OptionError, match="should be bool"):
        lookup("inductor", {"max_autotune": "yes"})


def test_a_users_function_is_a_backend() -> None:
    given: list[Mapping[str, object] | None] = []

    def mine(
        gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object] | None = None
    ) -> Callable[..., Any]:
        given.append(options)
        return gm.forward

    run(lookup(mine))
    run(lookup(mine, {"speed": 3}))
    assert given == [None, {"speed": 3}]


def test_registered_backends_are_found_by_name(table: None) -> None:
    seen: list[Mapping[str, object]] = []

    def compile_it(
        gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object]
    ) -> Callable[..., Any]:
        seen.append(options)
        return gm.forward

    def validate(options: Mapping[str, object]) -> None:
        if options.keys() - {"level"}:
            raise OptionError("only level")

    mine = register(Backend("mine", compile_it, "a test's", tags=("debug",), validate=validate))
    assert register(mine) is mine
    assert "mine" in list_backends(None) and "mine" not in list_backends()
    run(lookup("mine", {"level": 1}))
    run(lookup(mine))
    assert seen == [{"level": 1}, {}]
    with pytest.raises(OptionError, match="only level"):
        lookup("mine", {"height": 1})
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register(Backend("mine", compile_it, "another"))


def test_a_missing_package_is_named_before_compiling(table: None) -> None:
    needy = Backend("needy", lookup("eager"), "never runs", needs=("no_such_package_here",))
    with pytest.raises(MissingPackage, match="pip install no_such_package_here"):
        lookup(register(needy).name)


def test_each_name_of_openvino_is_listed_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    find, names = importlib.util.find_spec, ("openvino", "openvino_ts", "fusee_openvino")

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "openvino" else find(name, package)

    def states() -> set[str]:
        return {one.state for one in list_backends() if one in names}

    found = "ready" if find("openvino") else "missing package: openvino"
    assert states() == {found} and set(names) < set(list_backends())
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert states() == {"missing package: openvino"}
    for name in names:
        with pytest.raises(
            MissingPackage, match=rf"'{name}' needs openvino[\s\S]*pip install 'fusee\[openvino\]'"
        ):
            lookup(name, {"device": "CPU"})
    point: Any = torch.compile(program, backend="fusee_openvino")
    with pytest.raises(Exception, match="needs openvino"), torch.no_grad():
        point(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:the backend 'openvino_ts'")
def test_engines_are_ready_or_say_in_one_error_what_is_missing() -> None:
    engines = "openvino openvino_ts fusee_openvino onnxrt tvm tensorrt ipex cudagraphs".split()
    listed = {str(one): one for one in list_backends()}
    for name in engines:
        state = listed[name].state
        assert listed[name].help
        if state == "ready":
            lookup(name)
            continue
        kind, _, what = state.partition(": ")
        error = {"missing package": MissingPackage, "missing device": MissingDevice}[kind]
        with pytest.raises(error) as caught:
            fusee.compile(program, backend=name)
        assert f"backend {name!r} needs {what}" in str(caught.value)
        assert caught.value.remedy, "what to install, and where it works"


@pytest.mark.parametrize(("wrong", "near"), [("fuse", "fusee"), ("inducter", "inductor")])
def test_an_unknown_name_names_the_nearest_and_all(wrong: str, near: str) -> None:
    with pytest.raises(UnknownBackend) as caught:
        lookup(wrong)
    text = str(caught.value)
    assert f"{near!r}; known names:" in text
    assert "aot_eager" in text and "cudagraphs" in text
    assert "TESTING" not in text and "minifier" not in text


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(UnknownBackend, match="not int"):
        lookup(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treads": 2}, "'threads'; known options: derive_weights"),
        ({"zzz": 2}, "known options: derive_weights"),
        ({"fuse": 1}, "takes bool, not 1 \\(int\\)"),
        ({"threads": -1}, "takes int from 0 to 1024, not -1"),
        ({"threads": True}, "not True \\(bool\\)"),
        ({"vector_bits": 100}, "one of 0, 128, 256, 512"),
        ({"name": None}, "takes str, not None"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        lookup("fusee", options)
    with pytest.raises(OptionError, match="takes no options"):
        lookup("eager", options)


def stock(**given: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend="fusee", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"treads": 2}}, "'threads'; known options"),
        ({"options": {"fuse": "no"}}, "takes bool, not 'no'"),
        ({"mode": "max-autotun"}, "no mode 'max-autotun'"),
    ],
)
def test_stock_torch_compile_passes_on_our_errors(given: dict[str, Any], message: str) -> None:
    x = torch.randn(2, 3)
    compiled = stock(**given)
    with torch.no_grad(), pytest.raises(Exception, match=message) as caught:
        compiled(x)
    inner = caught.value.inner_exception  # type: ignore[attr-defined]
    assert isinstance(inner, OptionError)
    with torch.no_grad():
        torch.testing.assert_close(stock()(x), program(x))


def test_each_compiled_function_has_its_own_options() -> None:
    torch._dynamo.reset()
    made: list[CompiledGraph] = []

    def counting(gm: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
        made.append(lookup("fusee", given["options"])(gm, inputs))
        return made[-1]

    def twin(x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1) + x.sum()

    x = torch.randn(4, 6)
    one = torch.compile(program, backend=counting, options={"name": "fused"})
    two = torch.compile(twin, backend=counting, options={"name": "apart", "fuse": False})
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(one(x), program(x))
            torch.testing.assert_close(two(x), program(x))
    fused, apart = (graph.report() for graph in made)
    assert (fused.name, apart.name) == ("fused", "apart")
    assert len(fused.kernels) < len(apart.kernels)


def test_stock_torch_compile_takes_our_options() -> None:
    x = torch.randn(2, 3)
    for options in (None, {"fuse": False, "threads": 1}):
        with torch.no_grad():
            torch.testing.assert_close(stock(options=options)(x), program(x))


def in_float64(x: Tensor) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(2) * 2, x + torch.zeros(3), torch.arange(3) / 2
    finally:
        torch.set_default_dtype(before)


def with_gradients_within(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x.sin() * y
    return y + z.cos()


def hooked(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y.cos()


def there_and_back(x: Tensor) -> Tensor:
    window = torch.hann_window(8)
    waves = torch.stft(x, 8, window=window, return_complex=True)
    return torch.istft(waves, 8, window=window) + 1


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    x.mul_(2)
    return torch.nonzero(y) * 2


# What has no functional form as TorchDynamo writes it down: how many rows in each call.
OTHERWISE: dict[Callable[..., Any], tuple[int, ...]] = {
    in_float64: (3,),
    with_gradients_within: (3,),
    hooked: (3,),
    there_and_back: (64, 64),
    in_place: (5, 7),
    lambda x: x[torch.tensor(0)] * 2 + x: (3,),
    lambda x: x[x > 0].exp() + 1: (8, 12),
    lambda x: torch.zeros(2 ** math.ceil(math.log2(len(x)))) + x.sum(): (5, 9, 12),
    lambda x: x[: int(np.ceil(len(x) / 4))] + 1: (5, 9, 13),
    lambda x: F.interpolate(x.view(1, 1, -1), scale_factor=0.5, mode="linear") + 1: (8, 12, 20),
    lambda x: torch.ones(x.abs().sum().long().item() + 1) * 2: (3, 9),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.11's own
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("fn", OTHERWISE, ids=lambda fn: fn.__name__)
def test_graphs_without_a_form_are_captured_by_us(fn: Callable[..., Any], with_grad: bool) -> None:
    torch._dynamo.reset()
    options: Any = {"name": "otherwise", "prices": False}
    fast = torch.compile(fn, backend="fusee", fullgraph=True, options=options)
    given = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(given), warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        for rows in OTHERWISE[fn]:
            torch.manual_seed(rows)
            x = torch.randn(rows)
            found: list[Any] = []
            for run in (fn, fast):
                leaf = x.clone().requires_grad_(with_grad and fn is not in_place)
                got = run(leaf)
                found.append([got, leaf.detach()])
                if isinstance(got, Tensor) and got.requires_grad:
                    found[-1] += torch.autograd.grad(got.sum(), leaf)
            torch.testing.assert_close(found[1], found[0])
    reports = fusee.report("otherwise")
    assert any(x.kernels for x in reports) and all(x.eager is None for x in reports)


@pytest.mark.parametrize("name", ["fusee", "aot_eager"])
def test_fake_tensors_are_no_arguments_for_machine_code(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    mode, real = FakeTensorMode(), torch.randn(3, 4)
    fake = mode.from_tensor(real)
    run = torch.compile(program, backend=lookup(name))
    for x in (fake, real, fake):
        got = run(x)
        assert isinstance(got, FakeTensor) == (x is fake) and got.shape == (3, 4)
    torch.testing.assert_close(run(real), program(real))
    compiled = lookup(name)(fx.symbolic_trace(program), [fake])
    assert isinstance(compiled(fake), FakeTensor)
    torch.testing.assert_close(compiled(real), program(real))
    with mode:
        layer = torch.nn.Linear(4, 2)
        torch.compile(layer, backend=lookup(name))(fake).sum().backward()
        assert isinstance(layer.weight.grad, FakeTensor)
