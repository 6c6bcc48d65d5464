"""What a compiled object costs and leaves behind: threads, memory, fork, imports, overhead."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import timeit
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusee import api, compiler
from fusee.capture.torch_api import DYNAMO
from fusee.errors import FuseeWarning
from fusee.runtime.launch import runner
from tests.counting import Counting
from tests.test_compile import Net, step

ROOT = Path(__file__).parent.parent
x = torch.linspace(-1, 1, 4)
pytestmark = pytest.mark.usefixtures("without_grad")


def test_sixteen_threads_on_a_first_call(backend: Counting) -> None:
    net = Net().eval()
    fast, want = api.compile(net, backend=backend), net(x)
    results: list[Tensor] = []
    barrier = threading.Barrier(16)

    def call() -> None:
        barrier.wait()
        with torch.no_grad():
            results.append(fast(x))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16 and len(backend.graphs) == 1
    for got in results:
        torch.testing.assert_close(got, want)


def test_compiled_objects_are_freed() -> None:
    def once() -> list[weakref.ref[Any]]:
        net = Net().eval()
        method = Net().eval()
        method.forward = api.compile(method.forward, backend="eager")  # type: ignore[method-assign]
        fast = api.compile(net, backend="eager")
        function = api.compile(lambda t: net(t) if t.sum() > 9 else t + 1, backend="eager")
        for call in (fast, method, function):
            call(x)
        return [weakref.ref(one) for one in (net, method, fast, function, net.layer.weight)]

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    once()
    before = objects()
    refs = [ref for _ in range(100) for ref in once()]
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]
    del refs
    assert objects() - before < 300


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize("given", [lambda module: module, lambda module: module.forward])
def test_a_class_made_in_a_function_goes_with_its_module(
    given: Callable[[Any], Any], backend: str
) -> None:
    """Its methods know the class, and here a layer: one collection frees all."""

    def once() -> list[weakref.ref[Any]]:
        layer = torch.nn.Linear(3, 3)

        class Local(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x) + len(super().extra_repr())

        module = Local()
        api.compile(given(module), backend=backend)(torch.randn(2, 3))
        return [weakref.ref(one) for one in (layer, Local, module)]

    refs = once()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_fork() -> None:
    fast = api.compile(step)
    fast(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        same = torch.equal(fast(x), step(x)) and torch.equal(fast(x[:2]), step(x[:2]))
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0


IMPORTS = """
import sys
import torch
import fusee
from fusee import api, compiler

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        y = torch.nn.functional.gelu(self.layer(x)).softmax(-1)
        return y if y.sum() > 100 else y * x + 1

with torch.no_grad():
    net, x = Net(), torch.randn(3, 4)
    torch.testing.assert_close(api.compile(net)(x), net(x))
    torch.testing.assert_close(api.compile(lambda x: x + 1)(x), x + 1)
others = "torch._dynamo", "torch._inductor", "fusee.targets.cuda"
print([name for name in others if name in sys.modules])
"""


def test_neither_dynamo_nor_inductor_nor_another_target_is_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.stdout == "[]\n", ended.stderr


def test_overhead_of_a_warm_call() -> None:
    """What a call of a one-op function costs over eager, its graph run as it is; printed."""

    def one(t: Tensor) -> Tensor:
        return t + 1

    fast = api.compile(one, backend=lambda gm, example_inputs: lambda t: (t + 1,))
    fast(x)
    assert fast(x).shape == (4,)

    def least(call: Any) -> float:
        return min(timeit.repeat(lambda: call(x), number=2000, repeat=9)) / 2000 * 1e6

    overhead = least(fast) - least(one)
    print(f"\noverhead of a warm one-op call: {overhead:.2f} us")
    assert overhead < 30  # a shared machine; bench/ measures


def frames_before_kernels(call: Callable[..., Any], *given: Any) -> list[str]:
    """Functions of Python that a call enters before machine code of ours runs kernels."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)
        elif event == "c_call" and what is runner():
            sys.setprofile(None)

    sys.setprofile(note)
    try:
        call(*given)
    finally:
        sys.setprofile(None)
    return entered


def followed(net: torch.nn.Module, t: Tensor) -> Tensor:
    return net(t).relu() + 1


def written(t: Tensor, u: Tensor) -> Tensor:
    return t.add_(u).relu()


@pytest.mark.parametrize("is_dynamo_there", [False, True])
def test_a_later_call_enters_few_functions(
    is_dynamo_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six at most, each for a reason: what is called, what comes in, whether it is as it was, the
    captured program, the compiled graph. With TorchDynamo in the process: whether it is at work."""
    import torch._dynamo  # the hop that it costs

    if not is_dynamo_there:
        monkeypatch.delitem(sys.modules, DYNAMO)
    asked = ["is_dynamo_compiling"] if is_dynamo_there else []
    rows = torch.randn(3, 4)
    net = torch.nn.Linear(4, 2).requires_grad_(False)
    module = torch.nn.Sequential(net, torch.nn.ReLU())
    for model, given, first, last in (
        (module, (rows,), ["__call__"], ["check", "run", "call"]),
        (followed, (net, rows), [], ["check", "run", "call"]),
        (written, (rows, rows + 1), [], ["run", "checked", "call", "call"]),  # by the builtin
    ):
        fast = api.compile(model, options={"prices": False})
        for _ in range(3):
            fast(*given)
        entered = frames_before_kernels(fast, *given)
        assert entered == [*first, "call", *asked, *last]
        assert len(entered) <= 6


def test_an_error_that_only_capture_raises_is_told() -> None:
    def original(t: Tensor) -> Tensor:
        return t + 1

    @compiler.substitute_in_graph(original)
    def wrong(t: Tensor) -> Tensor:
        raise TypeError("a fault of the substitute")

    fast = api.compile(lambda t: original(t) * 2)
    with pytest.warns(FuseeWarning, match="under capture it raises TypeError: a fault of the sub"):
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 4.0))
    failing = api.compile(lambda t: [t][1])
    with warnings.catch_warnings(), pytest.raises(IndexError):
        warnings.simplefilter("error")
        failing(torch.ones(2))


def test_a_graphs_code_is_made_when_it_is_asked_for() -> None:
    graphs = []

    def keep(gm: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(gm)
        return lambda *inputs: torch.fx.Interpreter(gm).run(*inputs)

    x, made = torch.ones(2), torch.fx.graph_module._loader.eval_cache
    before = len(made)
    compiled = api.compile(lambda x: x.sin() + 1, backend=keep)
    assert torch.equal(compiled(x), x.sin() + 1)
    assert len(made) == before
    (gm,) = graphs
    assert "sin" in gm.code and len(made) == before + 1
    for one in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert all(torch.equal(call(x)[0], x.sin() + 1) for call in (one, one.forward))
    gm.graph.find_nodes(op="call_method")[0].target = "cos"
    gm.recompile()
    assert torch.equal(gm.forward(x)[0], x.cos() + 1)


@pytest.mark.parametrize("call", ["vmap(f)(torch.ones(2, 3))", "grad(f)(torch.ones(3))"])
def test_the_first_call_of_a_process_within_a_transform(call: str) -> None:
    """Where things lie in torch's objects is tried out then, on tensors that are none of it."""
    text = (
        "import torch, fusee; from torch.func import grad, vmap; f = fusee.compile(lambda x:"
        f" x.sin().sum()); {call}; print(f(torch.ones(3, requires_grad=True)).requires_grad)"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True)
    assert found.stdout == b"True\n", found.stderr.decode()


def test_modules_of_one_class_stay_of_one_class() -> None:
    models = [api.compile(torch.nn.Linear(2, 2)) for _ in range(2)]
    params, _ = torch.func.stack_module_state(models)
    assert params["weight"].shape == (2, 2, 2)
    assert len({type(model) for model in (*models, api.compile(torch.nn.ReLU()))}) == 2
