"""The programs of PyTorch's tutorial "Introduction to torch.compile", by each route.

source   https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import scipy.fft
import torch
from torch import Tensor, fx, nn

import fusee
from fusee.errors import GraphBreakError
from tests.models import torchvision_setup as torchvision_setup
from tests.reference.routes import Route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def waves(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) + torch.cos(y)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin(x))


def densenet() -> nn.Module:
    """A DenseNet of torchvision, small."""
    models: Any = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    made: nn.Module = models.DenseNet(4, (1, 1), 4, num_classes=10)
    return made.to(DEVICE)


def data(batch: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, 32, 32).to(torch.float32)
    return images.to(DEVICE), torch.randint(10, (batch,)).to(DEVICE)


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and seconds: by CUDA's events where there is a GPU."""
    if DEVICE == "cpu":
        begin = time.perf_counter()
        return fn(), time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = fn()
    end.record()
    torch.cuda.synchronize()
    return result, start.elapsed_time(end) / 1000


def flipped(x: Tensor, y: Tensor) -> Tensor:
    if x.sum() < 0:
        return -y
    return y


def added(x: Any, y: Any) -> Any:
    return x + y


def of_tensors(x: Tensor, y: Tensor) -> Tensor:
    """What TorchScript takes `added` without annotations for."""
    return x + y


def transformed(x: Any) -> Tensor:
    x = x * 2
    x = scipy.fft.dct(x.numpy())
    x = torch.from_numpy(x)
    return x * 3


def branching(a: Tensor, b: Tensor) -> Tensor:
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


def agree(one: Callable[..., Any], other: Callable[..., Any], *args: Any) -> bool:
    return torch.allclose(one(*args), other(*args))


# ------------------------------------------------------------------------------ basic usage


@pytest.mark.parametrize("as_decorator", [False, True])
def test_a_function(route: Route, as_decorator: bool) -> None:
    x, y = torch.randn(10, 10), torch.randn(10, 10)
    fast = route.compile()(waves) if as_decorator else route.compile(waves)
    for _ in range(2):
        torch.testing.assert_close(fast(x, y), waves(x, y))
    assert len(route.graphs) == 1


def test_a_module(route: Route) -> None:
    module, x = Layer(), torch.randn(10, 100)
    fast = route.compile(module)
    torch.testing.assert_close(fast(x), module(x))
    assert len(route.graphs) == 1


# ------------------------------------------------------------------------------ speedups


def test_inference(route: Route) -> None:
    """Many calls, timed: one graph, and nothing is compiled after the first call."""
    model = densenet()
    torch._dynamo.reset()
    fast = route.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            images = data(4)[0]
            want, eager_s = timed(functools.partial(model, images))
            got, fast_s = timed(functools.partial(fast, images))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert eager_s > 0 and fast_s > 0
            assert len(route.graphs) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo's, under stock
def test_training(route: Route) -> None:
    """The whole step is compiled: zero_grad, the model, the loss, backward and Adam's step."""
    models = [densenet() for _ in range(2)]
    optimizers = [torch.optim.Adam(one.parameters()) for one in models]

    def train(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad(True)
        loss = nn.CrossEntropyLoss()(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = route.compile(train, mode="reduce-overhead")
    for _ in range(3):
        batch = data(4)
        got, _ = timed(functools.partial(fast, models[0], optimizers[0], batch))
        want, _ = timed(functools.partial(train, models[1], optimizers[1], batch))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    # Adam steps by its rate, 1e-3, wherever a gradient is hardly more than nothing
    mine, eagers = (nn.utils.parameters_to_vector(one.parameters()) for one in models)
    assert (mine - eagers).abs().max() < 4e-3 and (mine - eagers).abs().mean() < 2e-5
    # one for all; from TorchDynamo forward and backward, and the update
    assert len(route.graphs) >= 2 if route.name == "stock" else len(route.graphs) == 1


# ------------------------------------------------------------------------------ beside others


def test_a_branch_on_a_value(route: Route) -> None:
    x, y = torch.ones(5, 5), torch.randn(5, 5)
    fast = route.compile(flipped)
    for sign in (1, -1, 1, -1):
        assert agree(flipped, fast, sign * x, y)


def test_a_number_among_the_arguments(route: Route) -> None:
    fast = route.compile(added)
    assert agree(added, fast, torch.randn(5, 5), 3)
    assert len(route.graphs) == 1
    for number in (5, 7, -2):  # an input of the graph from the second on
        assert agree(added, fast, torch.randn(5, 5), number)
    assert len(route.graphs) == 2


@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")  # its own, under stock
def test_a_function_that_is_not_torchs(route: Route) -> None:
    fast = route.compile(transformed)
    for _ in range(2):
        assert agree(transformed, fast, torch.randn(5, 5))
    # before it and after it; TorchDynamo captures within scipy too
    assert len(route.graphs) == 2 or route.name == "stock"


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:Was not able"
)
def test_torchs_other_compilers_are_as_they_were(route: Route) -> None:
    """What the tutorial compares with: wrong results of a trace, and errors, stay theirs."""
    x, y = torch.ones(5, 5), torch.randn(5, 5)
    traced: Any = torch.jit.trace(flipped, (x, y))
    assert agree(flipped, traced, x, y) and not agree(flipped, traced, -x, y)
    with pytest.raises(fx.proxy.TraceError, match="control flow"):
        fx.symbolic_trace(flipped)
    fixed = fx.symbolic_trace(flipped, concrete_args={"x": x})
    assert agree(flipped, fixed, x, y) and not agree(flipped, fixed, -x, y)
    scripted: Any = torch.jit.script(of_tensors)
    with pytest.raises(RuntimeError, match="argument 'y'"):
        scripted(x, 3)
    assert not agree(transformed, torch.jit.trace(transformed, (x,)), torch.randn(5, 5))
    for compiler in (torch.jit.script, fx.symbolic_trace):
        with pytest.raises(Exception):  # noqa: B017  # each raises its own
            compiler(transformed)


# ------------------------------------------------------------------------------ graphs


class Printing:
    """The backend of the tutorial: it prints each graph that it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        print("custom backend called with FX graph:")
        gm.graph.print_tabular()
        self.graphs.append(gm)
        return gm.forward


def test_a_backend_of_ones_own(route: Route, capsys: pytest.CaptureFixture[str]) -> None:
    model, backend = densenet(), Printing()
    images = data(2)[0]
    torch.testing.assert_close(route.compile(model, backend=backend)(images), model(images))
    said = capsys.readouterr().out
    assert said.count("custom backend called") == len(backend.graphs) == 1
    assert "opcode" in said and "placeholder" in said and "conv2d" in said


def test_three_graphs_around_a_branch(route: Route, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Printing()
    fast = route.compile(branching, backend=backend)
    a, b = torch.randn(10), torch.ones(10)
    for sign in (1, -1, 1, -1):
        assert agree(branching, fast, a, sign * b)
    assert capsys.readouterr().out.count("custom backend called") == len(backend.graphs) == 3
    first, *rest = (
        [node.target for node in one.graph.nodes if node.op.startswith("call")]
        for one in backend.graphs
    )
    # the sum and its comparison are torch calls, and so part of the first graph
    assert first == [torch.abs, operator.add, operator.truediv, "sum", operator.lt]
    assert rest == [[operator.mul], [operator.mul, operator.mul]]


def test_explain(route: Route) -> None:
    """torch._dynamo.explain(f)(*args) is fusee.explain(f)(*args)."""
    a, b = torch.randn(10), torch.ones(10)
    seen = fusee.explain(branching)(a, b)
    assert (seen.graph_count, seen.graph_break_count) == (2, 1)
    assert "if b.sum() < 0:" in str(seen)
    if route.name == "stock":
        dynamos = torch._dynamo.explain(branching)(a, b)
        assert (dynamos.graph_count, dynamos.graph_break_count) == (2, 1)


def test_fullgraph_refuses_a_break(route: Route) -> None:
    kind: Any = torch._dynamo.exc.Unsupported if route.name == "stock" else GraphBreakError
    with pytest.raises(kind) as error:
        route.compile(branching, fullgraph=True)(torch.randn(10), torch.randn(10))
    assert "if b.sum() < 0" in str(error.value)


def test_fullgraph_of_a_model(route: Route) -> None:
    model, images = densenet().eval(), data(2)[0]
    with contextlib.nullcontext() if DEVICE == "cpu" else torch.no_grad():
        got, want = route.compile(model, fullgraph=True)(images), copy.deepcopy(model)(images)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(route.graphs) == 1


def test_export(route: Route) -> None:
    """One graph of the whole, which the tutorial ends with: torch.export's, and ours."""
    x = torch.randn(2, 100)
    module = Layer()
    graph = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(route.compile(graph, fullgraph=True)(x), module(x))
    torch.testing.assert_close(fusee.export(module, (x,))(x), module(x))
    with pytest.raises(GraphBreakError, match="not one graph"):
        fusee.export(branching, (x, x))
