"""What we compiled, under torch's own tracers: they see the original."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fusee
from fusee.errors import FuseeWarning, GraphBreakError
from tests.counting import Counting

x, other = torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(2, 3, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def program(t: Tensor, by: int = 1) -> Tensor:
    return torch.sin(t) * 2 + by


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(3, 2)

    def forward(self, t: Tensor) -> Tensor:
        return self.last(self.layer(t).relu()) + 1


def layer() -> nn.Module:
    torch.manual_seed(0)
    # without gradients: torch.jit.trace takes none for what is no part of what it traces
    return nn.Sequential(nn.Linear(3, 3), nn.GELU()).eval().requires_grad_(False)


def compiled_program() -> Any:
    made = fusee.compile(program)
    made(x)
    return made


def compiled_layer() -> Any:
    """One with an entry for gradients, and one without."""
    made = fusee.compile(layer())
    made(x)
    with torch.no_grad():
        made(x)
    return made


def method() -> Callable[[Tensor], Tensor]:
    class Scaling:
        by = 3

        @fusee.compile
        def scaled(self, t: Tensor) -> Tensor:
            return t * self.by

    found = Scaling().scaled
    found(x)
    return found


def decorated() -> Callable[[Tensor], Tensor]:
    made = compiled_program()

    @functools.wraps(made)
    def around(t: Tensor) -> Tensor:
        return made(t) + 100

    return around


def with_compiled_forward() -> nn.Module:
    made = layer()
    made.forward = fusee.compile(made.forward)
    made(x)
    return made


def in_place() -> nn.Module:
    made = layer()
    fusee.install()
    made.compile()
    fusee.uninstall()
    made(x)
    made.register_forward_hook(lambda module, args, result: result * 2)
    return made


def calling(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda t: inner(t) + 1


# What is traced, and what does the same without us.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "function": (compiled_program, lambda: program),
    "module": (compiled_layer, layer),
    "called function": (lambda: calling(compiled_program()), lambda: calling(program)),
    "called module": (lambda: calling(compiled_layer()), lambda: calling(layer())),
    "method": (lambda: calling(method()), lambda: calling(lambda t: t * 3)),
    "decorated": (lambda: calling(decorated()), lambda: calling(lambda t: program(t) + 100)),
    "submodule": (
        lambda: Net(compiled_layer()).requires_grad_(False),
        lambda: Net(layer()).requires_grad_(False),
    ),
    "forward": (lambda: calling(with_compiled_forward()), lambda: calling(layer())),
    "in place": (lambda: calling(in_place()), lambda: calling(lambda t: layer()(t) * 2)),
}


def by_dynamo(target: Any) -> Any:
    seen = Counting()
    made = torch.compile(target, backend=seen, fullgraph=True)
    made(x)
    assert len(seen.graphs) == 1
    return made


def by_export(target: Any, strict: bool) -> Any:
    class Module(nn.Module):
        def forward(self, t: Tensor) -> Any:
            return target(t)

    module = target if isinstance(target, nn.Module) else Module()
    return torch.export.export(module, (x,), strict=strict).module()


TRACERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": by_dynamo,
    "export": lambda target: by_export(target, strict=False),
    "strict export": lambda target: by_export(target, strict=True),
    "jit.trace": lambda target: torch.jit.trace(target, (x,)),
    "make_fx": lambda target: make_fx(lambda t: target(t))(x),
    "fake make_fx": lambda target: make_fx(
        lambda t: target(t), tracing_mode="fake", _allow_non_fake_inputs=True
    )(x),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tracer", TRACERS)
def test_tracers_see_the_original(tracer: str, case: str) -> None:
    if tracer == "strict export" and case in ("called module", "forward", "in place"):
        pytest.skip("it does not take modules of closures")
    made, plain = CASES[case]
    target, wanted = made(), plain()
    if case == "submodule":
        wanted.last = target.last
    traced = TRACERS[tracer](target)
    torch.testing.assert_close(traced(other), wanted(other))  # nothing of `x` was made a constant
    torch.testing.assert_close(target(other), wanted(other))


@pytest.mark.parametrize("is_warm", [True, False])
def test_symbolic_tracing_sees_modules_by_their_names(is_warm: bool) -> None:
    inner = fusee.compile(nn.Linear(3, 3))
    if is_warm:
        inner(x)
    net = Net(inner)
    graph = fx.symbolic_trace(net)
    called = [n.target for n in graph.graph.find_nodes(op="call_module")]
    assert called == ["layer", "last"]
    longer = torch.randn(5, 3)
    torch.testing.assert_close(graph(longer), net(longer))
    function = compiled_program()
    graph = fx.symbolic_trace(lambda t: function(t, by=2))
    torch.testing.assert_close(graph(longer), program(longer, 2))


def test_fake_tensors_come_out_as_fakes() -> None:
    from torch._subclasses import FakeTensorMode

    function = compiled_program()
    with FakeTensorMode() as mode:
        assert type(function(mode.from_tensor(x))) is type(mode.from_tensor(x))
    assert type(function(x)) is Tensor


def test_what_torch_compiled_is_compiled_anew_by_us(backend: Counting) -> None:
    stocks = Counting()
    inner = torch.compile(program, backend=stocks)
    fast = fusee.compile(lambda t: inner(t) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), program(x) + 1)
    module = torch.compile(layer(), backend=stocks)
    torch.testing.assert_close(fusee.compile(module, backend=backend)(x), layer()(x))
    assert len(backend.graphs) == 2 and not stocks.graphs


def test_between_torchs_graphs_ours_runs(backend: Counting) -> None:
    stocks, inner = Counting(), fusee.compile(program, backend=backend)

    def breaks(t: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inner(t)

    fast = torch.compile(lambda t: breaks(t) + 1, backend=stocks)
    torch.testing.assert_close(fast(x), program(x) + 1)
    # nothing of what runs under an entry of ours is traced by TorchDynamo
    assert all("fusee" not in str(graph.code) for graph in stocks.graphs)


def test_what_is_disabled_here_is_left_alone_there() -> None:
    stocks = Counting()

    @fusee.compiler.disable
    def talk(t: Tensor, *, by: int) -> Tensor:
        return (t + by).sin()

    fast = torch.compile(lambda t: talk(t * 3, by=1) * 2, backend=stocks)
    torch.testing.assert_close(fast(x), (x * 3 + 1).sin() * 2)
    assert [len(targets) for targets in stocks.targets] == [1, 1]


@pytest.mark.parametrize("target", [compiled_program(), compiled_layer()])
def test_modes_of_dispatch_see_each_operator(target: Any) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    found: list[list[str]] = []
    for run in (target, target._torchdynamo_orig_callable):
        calls: list[str] = []
        with Seen():
            run(x)
        found.append(calls)
    assert found[0] == found[1] != []


def test_arguments_are_bound_as_python_binds_them() -> None:
    @fusee.compile
    def bound(a: Tensor, b: int = 2, *rest: int, c: int = 3, d: Any = None, **more: int) -> Any:
        return a * b + c + sum(rest) + (0 if d is None else d) + more.get("e", 0)

    def calls(t: Tensor) -> Tensor:
        return bound(t) + bound(t, 3) + bound(t, 3, 4, 5) + bound(t, c=1) + bound(t, d=t, e=4)

    bound(x)
    torch.testing.assert_close(by_dynamo(calls)(other), calls(other))


def test_torchscript_sees_the_original_module() -> None:
    torch.testing.assert_close(torch.jit.script(compiled_layer())(other), layer()(other))
    linear = torch.nn.Linear(3, 2)  # its `forward` names a module that is another name here: F
    torch.testing.assert_close(torch.jit.script(fusee.compile(linear))(other), linear(other))


@pytest.mark.filterwarnings("ignore:program runs eagerly")
def test_transforms_around_compiled_things() -> None:
    function, module = compiled_program(), compiled_layer()
    torch.testing.assert_close(torch.vmap(function)(x), program(x))
    wanted = torch.func.grad(lambda t: program(t).sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda t: function(t).sum())(x), wanted)
    doubled = {name: p * 2 for name, p in module.named_parameters()}
    wanted = torch.func.functional_call(layer(), doubled, (x,))
    torch.testing.assert_close(torch.func.functional_call(module, doubled, (x,)), wanted)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved, nn.DataParallel],
)
def test_copies_are_compiled_modules(copied: Callable[[nn.Module], nn.Module]) -> None:
    module = compiled_layer()
    again = copied(module)
    torch.testing.assert_close(again(other), layer()(other))
    names = [name.removeprefix("module.") for name in again.state_dict()]
    assert names == list(layer().state_dict())


def test_a_training_step_under_torch_compile_is_ours_alone() -> None:
    """Neither our frames, nor what we generate, are traced."""
    model = layer().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codes: list[str] = []

    def step(t: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(t).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    hook = torch._dynamo.convert_frame.register_bytecode_hook(
        lambda old, new: codes.append(old.co_filename)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", FuseeWarning)
            warnings.filterwarnings("error", "Dynamo does not know how to trace")
            losses = [float(torch.compile(step, backend="fusee")(x).detach()) for _ in range(3)]
    finally:
        hook.remove()
    assert losses[0] > losses[1] > losses[2]
    ours = os.path.dirname(fusee.__file__) + os.sep, "<fusee"
    assert codes and not [name for name in codes if name.startswith(ours)]


# ------------------------------------------------------------------------------ the error

ERRORS = """
import sys, torch, fusee
from fusee.errors import FuseeWarning, GraphBreakError

def breaks(t):
    return t + 1 if t.sum() > 0 else t

def raised():
    try:
        fusee.compile(breaks, fullgraph=True)(torch.ones(2))
    except GraphBreakError as error:
        return error

assert isinstance(raised(), RuntimeError)
assert "torch._dynamo" not in sys.modules
from torch._dynamo.exc import Unsupported
error = raised()
assert isinstance(error, Unsupported) and error.msg == error.reason
try:
    raise error
except Unsupported as caught:
    print("caught", "where" in dir(caught))
"""


def test_a_graph_break_is_what_torch_raises() -> None:
    ended = subprocess.run([sys.executable, "-c", ERRORS], capture_output=True, text=True)
    assert ended.stdout == "caught True\n", ended.stderr
    assert issubclass(GraphBreakError, RuntimeError)
