"""What resumed graphs, and OpenVINO's extension without its package, once got wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
from tests.backends.test_resumed import Processes, processes  # noqa: F401  # a fixture

pytest.importorskip("openvino")

X = torch.linspace(-1, 1, 32).reshape(4, 8)

NORM = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        return {expression}
model = Model().eval()
"""


@pytest.mark.parametrize("first", ["replaced", "as it was"])
@pytest.mark.parametrize(
    ("expression", "owner", "name"),
    [
        ("F.layer_norm(self.first(x), (8,)).tanh() + 1", torch, "layer_norm"),
        ("torch.norm(self.first(x), dim=1).tanh() + 1", torch.linalg, "vector_norm"),
        ("torch.einsum('ij,jk->ik', x, self.first.weight).tanh() + 1", torch._VF, "einsum"),
    ],
)
def test_what_torchs_functions_call_is_replaced(
    expression: str,
    owner: Any,
    name: str,
    first: str,
    processes: Processes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = NORM.replace("{expression}", expression)
    was = getattr(owner, name)
    for state in (first, "as it was" if first == "replaced" else "replaced"):
        with monkeypatch.context() as patch:
            if state == "replaced":
                patch.setattr(owner, name, lambda *args, **keywords: was(*args, **keywords) + 5)
            processes.run(source, X)
            assert processes.traces == ["traced"]
    monkeypatch.undo()


def test_functions_in_python_resume(processes: Processes) -> None:  # noqa: F811
    source = NORM.replace("{expression}", "F.layer_norm(self.first(x), (8,)).norm(dim=1) + 1")
    processes.run(source, X)
    processes.run(source, X)
    assert processes.traces == []


BUFFER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("counts", torch.arange(8) * {step})
    def forward(self, x):
        counts = self.counts.flip(0) + 3
        return self.layer(x), (counts * 1 - 2).abs() * 3
torch.manual_seed(0)
model = Model().eval()
"""


def test_a_buffer_that_only_the_rest_reads(processes: Processes) -> None:  # noqa: F811
    """Its values decided what OpenVINO, with its 32 bits, may compute of what the rest made."""
    options = {"disabled_ops": [torch.ops.aten.flip.default]}
    program, _ = processes.run(BUFFER.replace("{step}", "1"), X, **options)
    with torch.no_grad():
        program.model.counts.fill_(2**40)
        torch.testing.assert_close(program.call(X), program.model(X))
    processes.run(BUFFER.replace("{step}", "2**40"), X, **options)


def test_a_buffer_that_the_graph_writes_to(processes: Processes) -> None:  # noqa: F811
    program = processes.start("""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.arange(4))
    def forward(self, x):
        self.count.add_(1)
        return torch.erf(torch.tanh(x).view(-1, 8)), self.count
model = Model()
""")
    call = processes.compiled(program.model)
    with torch.no_grad():
        call(X)
        program.model.count.fill_(2**33)
        assert call(X)[1].tolist() == [2**33 + 1] * 4


def test_tensors_of_the_first_call_do_not_live_on(processes: Processes) -> None:  # noqa: F811
    source = NORM.replace("{expression}", "self.first(x).tanh() + 1")
    for backend in ("fusee", "openvino", "openvino"):
        program, x = processes.start(source), X.clone()
        call = (
            fusee.compile(program.model)
            if backend == "fusee"
            else processes.compiled(program.model, backend)
        )
        with torch.no_grad():
            call(x)
            known = weakref.ref(x), weakref.ref(program.model.first.weight)
            program.model.first.weight = torch.nn.Parameter(torch.ones(8, 8))
            call(x)
        del x
        gc.collect()
        if backend == "fusee" or not processes.traces:
            assert [one() for one in known] == [None, None]
    assert processes.traces == []


GAPS = """
class Model(nn.Module):
    def forward(self, x):
        y = x.t().tanh() + 1
        return y[1:], y.exp()[:, ::2], y[:1].sin().expand(3, 4), y.cos().unfold(1, 3, 1)
model = Model()
"""


def test_results_with_gaps_have_eagers_strides(processes: Processes) -> None:  # noqa: F811
    for _ in range(2):
        program, _ = processes.run(GAPS, X)
        with torch.no_grad():
            got, want = program.call(X), program.model(X)
        assert [x.stride() for x in got] == [x.stride() for x in want]


Graph = Callable[[Tensor], Sequence[Tensor]]


@pytest.mark.parametrize(
    "copies",
    [
        lambda x: [x.clone()],
        lambda x: [x.clone(), x.clone().reshape(2, 16).reshape(4, 8)],
        lambda x: [x[:4].clone(), x.unsqueeze(0).squeeze(0).clone()],
        lambda x: [x.to(torch.float32, copy=True)],
        lambda x: [torch.empty_like(x).copy_(x), x.expand(4, 8).clone()],
    ],
)
@pytest.mark.parametrize("x", [X, X.reshape(8, 4).t()])
def test_copies_of_inputs_leave_these_alone(copies: Graph, x: Tensor) -> None:
    """OpenVINO wrote to the memory of an input that was copied beside other results."""

    def program(x: Tensor) -> list[Tensor]:
        return [*copies(x), torch.tanh(x) + 1, torch.exp(x).sin()]

    given = x.clone(memory_format=torch.preserve_format)
    with torch.no_grad():
        results = fusee.compile(program, backend="openvino")(given)
        torch.testing.assert_close(results, program(x))
    assert torch.equal(given, x)
    assert len({one.data_ptr() for one in (*results, given)}) == len(results) + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_vector_is_added_to_a_product_with_a_bias(dtype: torch.dtype) -> None:
    """OpenVINO forgot the bias."""
    layer = torch.nn.Linear(8, 8)
    half = torch.nn.Parameter(torch.linspace(-1, 1, 8).to(dtype))
    for program in (
        lambda x: (layer(x) + half).relu(),
        lambda x: (layer(x) - half.float().view(1, 8)).relu(),
    ):
        with torch.no_grad():
            got = fusee.compile(program, backend="openvino")(X)
            torch.testing.assert_close(got, program(X))


def script(source: str) -> None:
    folder = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", source], check=True, cwd=folder, timeout=120)


def test_another_thread_imports_the_package_meanwhile() -> None:
    script("""
import importlib.machinery, sys, threading
import torch
from fusee.backends.openvino import bindings

loader = importlib.machinery.ExtensionFileLoader
run, began = loader.exec_module, threading.Event()
problems = []

def other():
    began.wait()
    try:
        import openvino
        openvino.Core()
    except BaseException as error:
        problems.append(error)

thread = threading.Thread(target=other)

def slow(self, module):
    if module.__name__ == "openvino._pyopenvino" and not began.is_set():
        began.set()
        thread.join(1)
    run(self, module)

loader.exec_module = slow
thread.start()
found = bindings()
thread.join()
assert not problems, problems
import openvino
assert openvino._pyopenvino is found is sys.modules["openvino._pyopenvino"]
""")


def test_finders_of_others_are_asked_for_each_module() -> None:
    script("""
import importlib.util, sys, types
import torch
from fusee.backends.openvino import bindings

class Finder:
    asked = []
    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)

bindings()
sys.meta_path.insert(1, Finder())
sys.modules["openvino"] = types.ModuleType("openvino")
try:
    import no_such_module
except ImportError:
    pass
assert Finder.asked == ["no_such_module"], Finder.asked
""")
