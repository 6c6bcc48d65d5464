"""What our compiler made of forward and backward, and of graphs with open sizes, runs in the next
process without the graph: where nothing differs. "Processes" are those of test_kept_native.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee import log
from fusee.backends import native
from fusee.backends.report import live_reports
from fusee.config import settings
from fusee.runtime.cache import Sidecar
from tests.backends.engine_calls import HEAD
from tests.backends.test_kept_native import KEPT, Processes, X, agree, told
from tests.backends.test_kept_native import processes as processes

# ---------------------------------------------------------------------------- training

Outcome = tuple[Any, ...]


def loss_of(out: Any) -> Tensor:
    """One that comes through all results with gradients."""
    flat = out if isinstance(out, (tuple, list)) else [out]
    found = [x.float().cos().sum() for x in flat if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack(found).sum()


def trained(call: Callable[..., Any], program: Any) -> Outcome:
    """All that can be seen of a step, whose changes to the program's modules are taken back."""
    modules = [x for x in vars(program).values() if isinstance(x, nn.Module)]
    params = [p for m in modules for p in m.parameters()]
    params += [x for x in vars(program).values() if isinstance(x, nn.Parameter)]
    state = [x for m in modules for x in m.buffers()]
    before = [x.clone() for x in state]
    for p in params:
        p.grad = None
    torch.manual_seed(1)
    leaf = X.clone().requires_grad_()
    given = leaf * 1 if "mul_" in program.text or "add_" in program.text else leaf
    out = call(given)
    loss = vars(program).get("loss", loss_of)(out)
    loss.backward()
    flat = out if isinstance(out, (tuple, list)) else [out]
    seen = [(x.detach().clone(), x.requires_grad, x.is_leaf, x.stride()) for x in flat]
    places = [x.untyped_storage().data_ptr() == given.untyped_storage().data_ptr() for x in flat]
    grads = [p.grad if p.grad is None or p.grad.is_sparse else p.grad.clone() for p in params]
    strides = [None if g is None or g.is_sparse else g.stride() for g in grads]
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    after = [x.clone() for x in state]
    for x, old in zip(state, before):
        x.copy_(old)
    return (
        seen,
        places,
        loss.detach(),
        leaf.grad,
        given.detach(),
        dense,
        strides,
        after,
        torch.rand(1),
    )


class Trainings(Processes):
    """Starts programs that train, each step of which does what eager's does."""

    def step(self, program: Any) -> Outcome:
        found = trained(program.call, program)
        torch.testing.assert_close(found, trained(program.f, program))
        return found

    def train(self, source: str, **options: Any) -> tuple[Any, Outcome]:
        """The program, and what its first step gave."""
        program = self.start(source)
        program.text = source
        program.call = fusee.compile(program.f, options={"prices": False, **options})
        first = self.step(program)
        self.step(program)
        return program, first


@pytest.fixture
def trainings(processes: Processes) -> Trainings:
    return Trainings(processes.traces)


PARTS = "torch.manual_seed(0)\nm = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))\n"
# A function f of X, which requires grad, or of what was computed of it if f writes to it.
TRAINED = {
    "a layer": PARTS + "def f(x): return m(x)",
    "a list": PARTS + "def f(x): return [m(x), x.t() * 2]",
    "several results": PARTS + "def f(x): return m(x), x.sin(), m[0](x).sum(0)",
    "a loss of one": (
        PARTS + "def f(x): return m(x), x.sin(), x + 1\ndef loss(out): return out[1].sum()"
    ),
    "views": PARTS + "def f(x): return x.t(), m(x)[1:], x.exp().view(-1)",
    "an input itself": PARTS + "def f(x): return x, m(x)",
    "an output twice": PARTS + "def f(x):\n  y = m(x)\n  return y, y, y[0]",
    "a result without gradients": PARTS + "def f(x): return m(x), x.argmax(-1), x.detach() * 2",
    "a write": PARTS + "def f(x): return m(x.mul_(2)).sin()",
    "a write to a view": PARTS + "def f(x):\n  x[1].add_(1)\n  return m(x) * 2",
    "random numbers": PARTS + "def f(x): return F.dropout(m(x), 0.5) + torch.rand(6)",
    "a constant": PARTS + "def f(x): return m(x) * torch.tensor([1., 2, 3, 4, 5, 6])",
    "batch norm": PARTS + "m.append(nn.BatchNorm1d(6))\ndef f(x): return m(x)",
    "a frozen part": PARTS + "m[0].requires_grad_(False)\ndef f(x): return m(x)",
    "a sparse table": (
        "torch.manual_seed(0)\nm = nn.Embedding(4, 6, sparse=True)\n"
        "i = torch.tensor([0, 1, 1, 3])\n"
        "def f(x): return m(i) * x"
    ),
    "a convolution": (
        "torch.manual_seed(0)\nm = nn.Sequential(nn.Conv1d(1, 8, 3), nn.GELU())\n"
        "def f(x): return m(x[:, None])"
    ),
    "attention": (
        "torch.manual_seed(0)\nm = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)\n"
        "def f(x): return m(x[None]) * 2"
    ),
    "autocast": (
        PARTS + "def f(x):\n  with torch.autocast('cpu', torch.bfloat16): return m(x).sin()"
    ),
    "a checkpoint": (
        PARTS + "from torch.utils.checkpoint import checkpoint\n"
        "def f(x): return checkpoint(m, x, use_reentrant=False).sin()"
    ),
    "an operator of ATen's": PARTS + "def f(x): return torch.linalg.svdvals(m(x))",
    "complex numbers": PARTS + "def f(x): return torch.fft.rfft(m(x)).abs()",
    "a parameter alone": "w = nn.Parameter(torch.ones(6))\ndef f(x): return x * w + 1",
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_kept(name: str, trainings: Trainings) -> None:
    _, first = trainings.train(TRAINED[name])
    assert trainings.traces == ["traced"]
    program, second = trainings.train(TRAINED[name])
    assert not trainings.traces
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    trainings.step(program)
    assert not trainings.traces


SEVERAL = PARTS + "def f(x): return m(x), m[0](x), (x * 2).sin()\nWHICH = 0\n"
SEVERAL += "def loss(out): return out[WHICH].square().sum()"
ANOTHER = SEVERAL.replace("WHICH = 0", "WHICH = 1")


def test_a_backward_is_kept_when_it_is_compiled(trainings: Trainings) -> None:
    trainings.train(SEVERAL)
    trainings.train(SEVERAL)
    assert not trainings.traces
    program = trainings.start(ANOTHER)
    program.text = ANOTHER
    program.call = fusee.compile(program.f, options={"prices": False})
    trainings.step(program)  # of which there is none: eager differentiates the graph
    assert not trainings.traces
    trainings.step(program)  # and the next call has it compiled
    assert trainings.traces == ["traced"]
    trainings.step(program)
    assert trainings.traces == ["traced"]
    for source in (ANOTHER, SEVERAL):
        trainings.train(source)
        assert not trainings.traces


def test_a_forward_alone_is_kept(trainings: Trainings) -> None:
    program = trainings.start(SEVERAL)
    program.call = fusee.compile(program.f, options={"prices": False})
    program.call(X)
    program = trainings.start(SEVERAL)
    program.call = fusee.compile(program.f, options={"prices": False})
    torch.testing.assert_close(program.call(X), program.f(X))
    assert not trainings.traces
    trainings.train(SEVERAL)
    assert trainings.traces == ["traced"]
    trainings.train(SEVERAL)
    assert not trainings.traces


def test_without_the_entry_of_its_backward_a_graph_is_compiled(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TRAINED["a layer"]
    with monkeypatch.context() as patch:
        whole = Sidecar.put

        def put(self: Sidecar, name: str, data: bytes) -> None:
            if " [] " not in name[-12:]:
                whole(self, name, data)

        patch.setattr(Sidecar, "put", put)
        trainings.train(source)
    for traces in (["traced"], []):
        trainings.train(source)
        assert trainings.traces == traces


def test_a_backward_of_another_forward_is_not_used(
    trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first processes at once: each may have chosen other values to save."""
    trainings.train(SEVERAL)
    with monkeypatch.context() as patch:
        patch.setattr(native, "describe", lambda split: "other values are saved")
        stop = log.subscribe(lambda record: None, "aten")
        program = trainings.start(SEVERAL)
        program.call = fusee.compile(program.f, options={"prices": False})
        program.call(X.clone().requires_grad_())  # and is killed before its backward
        stop()
    assert trainings.traces == ["traced"]
    trainings.train(SEVERAL)
    assert trainings.traces == ["traced"]


def twice(call: Any, m: Any) -> Any:
    out = call(X)
    out.sum().backward(retain_graph=True)
    out.cos().sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def outstanding(call: Any, m: Any) -> Any:
    one, other = call(X), call(X * 2)
    other.sum().backward()
    one.sin().sum().backward()
    return one, other


def hooked(call: Any, m: Any) -> Any:
    seen: dict[str, Tensor] = {}
    hooks = [m[0].weight.register_hook(lambda g: seen.update(first=g.clone()))]
    then = m[2].weight.register_post_accumulate_grad_hook
    hooks.append(then(lambda p: seen.update(last=p.grad.clone())))
    out = call(X)
    out.register_hook(lambda g: g * 2)
    out.sin().sum().backward()
    for hook in hooks:
        hook.remove()
    return seen


def packed(call: Any, m: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(), torch.from_numpy):
        out = call(X)
    out.sin().sum().backward()
    return out


def differentiated_twice(call: Any, m: Any) -> Any:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), [x, m[0].weight])


def of_some(call: Any, m: Any) -> Any:
    return torch.autograd.grad(call(X).sin().sum(), m[2].weight)


def accumulated(call: Any, m: Any) -> Any:
    for k in range(3):
        call(X * k).sin().sum().backward()


def written_meanwhile(call: Any, m: Any) -> Any:
    x = X.clone()
    out = call(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()
    m.zero_grad()


def within_no_grad(call: Any, m: Any) -> Any:
    with torch.no_grad():
        return call(X)


STEPS = [
    twice, outstanding, hooked, packed, differentiated_twice, of_some, accumulated,
    written_meanwhile, within_no_grad,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_programs_do_with_one_that_was_kept(step: Any, trainings: Trainings) -> None:
    for _ in range(2):
        program, _ = trainings.train(TRAINED["a layer"])
        found = []
        for call in (program.call, program.f):
            program.m.zero_grad()
            result = step(call, program.m)
            found.append((result, [p.grad for p in program.m.parameters()]))
        torch.testing.assert_close(*found)
    assert not trainings.traces


DOUBLE = "m.double()\ndef f(x): return m(x.double())"
BEFORE = TRAINED["a layer"]
EDITS = {
    "other code": BEFORE.replace("return m(x)", "return m(x) * 2"),
    "another layer": BEFORE.replace("nn.Tanh", "nn.Sigmoid"),
    "a frozen part": BEFORE.replace("def f", "m[0].requires_grad_(False)\ndef f"),
    "another width": BEFORE.replace("8", "9"),
    "another dtype": BEFORE.replace(
        "def f(x): return m(x)", "m.double()\ndef f(x): return m(x.double())"
    ),
    "no gradients of x": BEFORE.replace("m(x)", "m(x.detach())"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_differs_is_compiled_for(name: str, trainings: Trainings) -> None:
    trainings.train(BEFORE)
    trainings.train(EDITS[name])
    assert trainings.traces == ["traced"]


@pytest.mark.parametrize("other", ["options", "no oneDNN", "a processor", "autocast"])
def test_other_settings_are_compiled_for(
    other: str, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings.train(BEFORE)
    if other == "options":
        trainings.train(BEFORE, memory_budget=0.5)
    elif other == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            trainings.train(BEFORE)
    elif other == "a processor":
        monkeypatch.setenv("FUSEE_CPU", "sse")
        settings.cache_clear()
        trainings.train(BEFORE)
    else:
        torch._C._set_mkldnn_enabled(False)
        try:
            trainings.train(BEFORE)
        finally:
            torch._C._set_mkldnn_enabled(True)
    assert trainings.traces == ["traced"]


def test_other_weights_are_taken(trainings: Trainings) -> None:
    trainings.train(BEFORE)
    trainings.train(BEFORE.replace("manual_seed(0)", "manual_seed(2)"))
    assert not trainings.traces


def test_who_asks_for_the_graph_has_it_compiled(trainings: Trainings) -> None:
    trainings.train(BEFORE)
    stop = log.subscribe(lambda record: None, "aten")
    trainings.train(BEFORE)
    stop()
    assert trainings.traces == ["traced"]


def test_the_report_says_what_the_first_did(trainings: Trainings) -> None:
    reports = []
    for _ in range(2):
        before = live_reports()
        keep = trainings.train(BEFORE)
        (report,) = (x for x in live_reports() if x not in before)
        reports.append((report, report.backward, keep))
    for first, second in list(zip(*reports))[:2]:
        assert list(second.stages_ms) == ["resume"]
        assert [row.function for row in first.kernels] == [row.function for row in second.kernels]
        assert str(first.bill) == str(second.bill)
        for name in ("where", "externs", "passes", "arena_bytes", "eager"):
            assert getattr(first, name) == getattr(second, name)
        assert [*first.notes, "another process compiled it: it was not traced"] == second.notes


def test_a_backward_within_the_graph_is_kept(trainings: Trainings) -> None:
    source = (
        PARTS + "def f(x):\n  loss = m(x).square().sum()\n  loss.backward()\n  return loss.detach()"
    )
    for _ in range(2):
        program = trainings.start(source)
        call = fusee.compile(program.f, options={"prices": False})
        params = [*program.m.parameters()]
        found = []
        for one in (call, program.f):
            for k in range(3):
                program.m.zero_grad()
                loss = one(X * k)
                found.append((loss, *[p.grad.clone() for p in params]))
        torch.testing.assert_close(found[:3], found[3:])
        assert len({p.grad.data_ptr() for p in params}) == len(params)
    assert not trainings.traces


# ---------------------------------------------------------------------------- open sizes


def open_run(processes: Processes, source: str, *sizes: int) -> Any:
    """A program that gave what eager does at these numbers of rows."""
    program = processes.start(source)
    program.call = fusee.compile(program.f, dynamic=True, options={"prices": False})
    with torch.no_grad():
        for n in sizes:
            agree(program, torch.linspace(-1, 1, 6 * n).reshape(n, 6))
    return program


@pytest.mark.parametrize("name", [name for name in KEPT if name != "a convolution"])
def test_what_is_kept_of_open_sizes(name: str, processes: Processes) -> None:
    open_run(processes, KEPT[name], 4, 7, 9)
    first = len(processes.traces)
    open_run(processes, KEPT[name], 4, 7, 9)
    assert first and not processes.traces
    open_run(processes, KEPT[name], 5, 4, 12)  # what it is compiled for are all sizes
    assert not processes.traces


def grown(processes: Processes, source: str, *sizes: int) -> Any:
    """The same of a training step."""
    program = processes.start(source)
    program.call = fusee.compile(program.f, dynamic=True, options={"prices": False})
    for n in sizes:
        x = torch.linspace(-1, 1, 6 * n).reshape(n, 6)
        found = []
        for call in (program.call, program.f):
            program.m.zero_grad()
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            loss_of(out).backward()
            found.append((out, leaf.grad, [p.grad for p in program.m.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    return program


@pytest.mark.parametrize("name", ["a layer", "several results", "views", "attention"])
def test_open_sizes_in_training(name: str, processes: Processes) -> None:
    grown(processes, TRAINED[name].replace("2, 8, b", "2, 8, 0.0, b"), 4, 7, 9)
    assert processes.traces
    for sizes in ((4, 7, 9), (8, 5, 12)):
        grown(processes, TRAINED[name].replace("2, 8, b", "2, 8, 0.0, b"), *sizes)
        assert not processes.traces


GUARDED = (
    "def f(x):\n  y = x.reshape(-1, 12)\n  return (y * 2 if x.shape[0] > 5 else y.cos()).sum(-1)"
)


def test_what_open_sizes_must_be_is_looked_at(processes: Processes) -> None:
    open_run(processes, GUARDED, 8, 12)
    open_run(processes, GUARDED, 14, 8, 16)
    assert not processes.traces
    open_run(processes, GUARDED, 4, 2)  # another branch
    assert processes.traces == ["traced"]
    open_run(processes, GUARDED, 2, 4, 8, 12)
    assert not processes.traces


def test_sizes_that_only_data_tells_are_compiled_for(processes: Processes) -> None:
    source = "def f(x): return x[x > 0].sin() * 2"
    for _ in range(2):
        open_run(processes, source, 4, 7)
        assert processes.traces


GROWING = """
def f(x, cache):
    cache = torch.cat([cache, x])
    return cache, (cache * 2).softmax(0).sum(-1)
"""


def test_a_cache_that_grows(processes: Processes) -> None:
    for traces in (2, 0):  # for the first length, and for all
        program = processes.start(GROWING)
        program.call = fusee.compile(program.f, options={"prices": False})
        caches = [X, X]
        with torch.no_grad():
            for _ in range(5):
                one, other = program.call(X[:1], caches[0]), program.f(X[:1], caches[1])
                torch.testing.assert_close(one, other)
                caches = [one[0], other[0]]
        assert len(processes.traces) == traces


# ---------------------------------------------------------------------------- real processes

WHOLE = f"""
{HEAD}
import fusee
from fusee.backends.report import live_reports
{PARTS}
def f(x): return m(x)
call = fusee.compile(f, dynamic=True, options={{"prices": False}})
for n in (3, 5):
    found = []
    for one in (call, f):
        m.zero_grad()
        x = torch.linspace(-1, 1, 6 * n).reshape(n, 6).requires_grad_()
        one(x).sin().sum().backward()
        found.append([x.grad, *(p.grad for p in m.parameters())])
    torch.testing.assert_close(*found)
last = live_reports()[-1]
print(*last.stages_ms, *last.backward.stages_ms)
"""


def test_real_processes(tmp_path: Path) -> None:
    assert "trace" in told(tmp_path, WHOLE)
    assert told(tmp_path, WHOLE) == "resume resume"
