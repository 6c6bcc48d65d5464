"""What the documents show of torch.compiler, by each route: backends, guards, stances, marks.

source   https://docs.pytorch.org/docs/stable/torch.compiler.html
"""

from __future__ import annotations

import gc
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.backends import lookup
from fusee.errors import MissingDevice, MissingPackage, RegionError
from tests.reference.routes import Route

# What the documents list, and what it takes here.
NAMED = ("inductor", "cudagraphs", "ipex", "onnxrt", "tensorrt", "tvm", "openvino")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * SCALE


SCALE = 2.0


def compiler_of(route: Route) -> Any:
    """torch.compiler, as one writes it under a route."""
    return fusee.compiler if route.name == "fusee" else torch.compiler


# ------------------------------------------------------------------------------ backends


@pytest.mark.parametrize("name", NAMED)
def test_each_named_backend_is_known(name: str) -> None:
    """It is listed, and found, or says what it needs."""
    listed = {str(one): one for one in fusee.compiler.list_backends()}
    assert name in listed
    try:
        assert callable(lookup(name))
    except (MissingPackage, MissingDevice) as error:
        assert listed[name].state.startswith("missing")
        assert error.remedy
    else:
        assert listed[name].state in ("ready", "")


def test_stock_lists_ours() -> None:
    assert {"fusee", "fusee_openvino"} <= {*torch.compiler.list_backends()}


def test_a_backend_by_name(route: Route) -> None:
    """Any name that torch knows compiles what we capture, and ours what TorchDynamo does."""
    model, x = Net(), torch.randn(2, 4)
    for name in ("eager", "aot_eager"):
        torch.testing.assert_close(route.compile(model, backend=name)(x), model(x))


# ------------------------------------------------------------------------------ guards


def test_guards(route: Route) -> None:
    """A call with another dtype, type, number of axes or branch gets a version of its own."""
    count = 0

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return gm.forward

    def fn(x: Tensor, flag: bool) -> Tensor:
        return x * 2 if flag else x * 3

    fast, x = route.compile(fn, backend=counting), torch.ones(2, 3)
    calls = (x, True), (x.double(), True), (x[0], True), (x, False)
    for expected, args in enumerate(calls, 1):
        for _ in range(2):
            torch.testing.assert_close(fast(*args), fn(*args))
        assert count == expected
    for args in calls:
        torch.testing.assert_close(fast(*args), fn(*args))
    assert count == len(calls)


@pytest.mark.parametrize(
    "name",
    [
        "skip_guard_on_inbuilt_nn_modules_unsafe",
        "skip_guard_on_all_nn_modules_unsafe",
        "keep_tensor_guards_unsafe",
        "skip_guard_on_globals_unsafe",
        "skip_all_guards_unsafe",
    ],
)
def test_filters_of_guards(route: Route, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if route.name != "fusee" and not hasattr(torch.compiler, name):
        pytest.skip(f"this torch has no {name}")
    model, x = Net(), torch.randn(2, 4)
    options = {"guard_filter_fn": getattr(compiler_of(route), name)}
    backend = "eager" if route.name == "stock" else "fusee"
    fast = route.compile(model, backend=backend, options=options)
    want = model(x)
    torch.testing.assert_close(fast(x), want)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    looks = name.startswith("skip_guard_on_") and "globals" not in name
    torch.testing.assert_close(fast(x), model(x) if looks else want)


# ------------------------------------------------------------------------------ helpful APIs


def test_reset(route: Route) -> None:
    count = 0

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return gm.forward

    fast, x = route.compile(lambda t: t * 2, backend=counting), torch.ones(2)
    for expected in (1, 2):
        fast(x)
        fast(x)
        assert count == expected
        compiler_of(route).reset()
        if route.name == "installed":
            fusee.compiler.reset()


def test_what_a_program_may_ask(route: Route) -> None:
    def asked(x: Tensor) -> Any:
        compiler = torch.compiler
        said = compiler.is_compiling(), compiler.is_dynamo_compiling(), compiler.is_exporting()
        return x + 1, said

    x = torch.ones(2)
    assert asked(x)[1] == (False, False, False)
    # TorchDynamo of torch 2.11 answers the last with True
    is_exporting = route.name == "stock" and torch.__version__ < "2.12"
    assert route.compile(asked)(x)[1] == (True, True, is_exporting)


def test_stances(route: Route) -> None:
    """As a decorator, as a context, as a call; and not in a compiled region."""
    set_stance = compiler_of(route).set_stance

    def asked(x: Tensor) -> Any:
        return x + 1, torch.compiler.is_compiling()

    fast, x = route.compile(asked), torch.ones(2)

    @set_stance("force_eager")  # type: ignore[untyped-decorator]
    def within() -> Any:
        return fast(x)[1]

    assert not within()
    with set_stance("force_eager"):
        assert not fast(x)[1]
    set_stance("force_eager")
    assert not fast(x)[1]
    set_stance("default")
    assert fast(x)[1]

    def switching(x: Tensor) -> Tensor:
        set_stance("force_eager")
        return x + 1

    kind = AssertionError if route.name == "stock" else RegionError
    with pytest.raises(kind, match=r"forbidden callable|must not be called"):
        route.compile(switching)(x)
    set_stance("default")


def counted(x: Tensor) -> Tensor:
    """What no capture follows."""
    gc.get_count()
    return x * 2


def test_allow_in_graph(route: Route) -> None:
    compiler_of(route).allow_in_graph(counted)

    @route.compile(backend="eager", fullgraph=True)  # type: ignore[untyped-decorator]
    def fn(x: Tensor) -> Tensor:
        x = torch.add(x, 1)
        x = counted(x)
        return torch.add(x, 1)

    x = torch.randn(3)
    torch.testing.assert_close(fn(x), counted(x + 1) + 1)


def test_substitute_in_graph(route: Route) -> None:
    """A function in Python for one in C, which no graph could hold."""
    if route.name != "fusee":
        pytest.skip("torch refuses a second substitute, and one stays for good")
    values = [1, 2, 3, 4, 5]

    @fusee.compiler.substitute_in_graph(operator.indexOf)
    def index_of(a: Any, b: Any, /) -> int:
        for i, item in enumerate(a):
            if item is b or item == b:
                return i
        raise ValueError("sequence.index(x): x not in sequence")

    fast = fusee.compile(operator.indexOf, fullgraph=True)
    assert fast(values, 3) == operator.indexOf(values, 3) == 2
    with pytest.raises(ValueError, match="not in sequence"):
        fusee.compile(operator.indexOf)(values, 7)
