"""Captures that outlive their process: used where nothing differs, and nowhere else."""

from __future__ import annotations

import importlib.util
import linecache
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fusee
from fusee.backends import lookup
from fusee.capture import entries
from fusee.capture.builtins import SPECIAL
from fusee.capture.dynamic import Varying
from fusee.capture.entries import CompiledFunction
from fusee.capture.guards import Fact
from fusee.capture.policy import Policy
from fusee.capture.sources import Part, Source
from fusee.config import settings
from fusee.persist import Keeper
from fusee.runtime.cache import ObjectCache

NAME = "kept_program"
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Processes:
    """Runs programs as new processes would: with new functions, classes and objects."""

    def __init__(self, folder: Path, captures: list[str]) -> None:
        self.cache = ObjectCache(folder, 2**24)
        self.captures = captures

    def start(self, source: str) -> types.ModuleType:
        program = types.ModuleType(NAME)
        file = f"<{NAME}>"
        sys.modules[NAME] = program
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), program.__dict__)
        return program

    def run(self, source: str, *args: Any, grad: bool = False) -> tuple[Any, bool]:
        """What `f` gives, compiled; and whether it was captured. It is what eager gives."""
        program = self.start(source)
        with torch.set_grad_enabled(grad):
            want = program.f(*args)
            self.captures.clear()
            fast = CompiledFunction(
                program.f, lambda gm, _: gm.forward, Policy(), keeper=Keeper(cache=self.cache)
            )
            for _ in range(2):
                torch.testing.assert_close(fast(*args), want, rtol=0, atol=0)
        return want, bool(self.captures)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    captures: list[str] = []
    whole = entries.capture

    def counted(place: Any, *args: Any) -> Any:
        captures.append(place.function.__qualname__)
        return whole(place, *args)

    monkeypatch.setattr(entries, "capture", counted)
    yield Processes(tmp_path, captures)
    for name in (NAME, f"{NAME}.lazy"):
        sys.modules.pop(name, None)


HEAD = """
import abc, collections, dataclasses, enum, functools, inspect, logging, math, os, sys, torch, types
from torch import nn
import torch.nn.functional as F
"""

# A function f of X in each, and what may be another in the next process: `old` becomes `new`.
PROGRAMS: dict[str, tuple[str, str, str]] = {
    "a line": ("def f(x): return x * 2", "* 2", "* 3"),
    "a function it calls": ("def g(x): return x.sin()\ndef f(x): return g(x) + 1", "sin", "cos"),
    "another function by that name": (
        "def g(x): return x.sin()\ndef h(x): return x.cos()\nk = g\ndef f(x): return k(x)",
        "k = g", "k = h",
    ),
    "an overload": ("k = torch.ops.aten.sin.default\ndef f(x): return k(x)", "sin", "cos"),
    "a default": ("def g(x, n=2): return x * n\ndef f(x): return g(x)", "n=2", "n=3"),
    "a keyword's default": ("def g(x, *, n=2): return x * n\ndef f(x): return g(x)", "n=2", "n=3"),
    "a global number": ("N = 2\ndef f(x): return x * N", "N = 2", "N = 3"),
    "a global float": ("N = 2.5\ndef f(x): return x * N", "2.5", "3.5"),
    "the sign of nothing": ("N = 0.0\ndef f(x): return x * N", "0.0", "-0.0"),
    "an element": ("N = [1, 2]\ndef f(x): return x * N[1]", "2]", "3]"),
    "which list it is": (
        "N = [1]\nM = N\ndef f(x): return x * (2 if M is N else 3), M", "M = N", "M = [1]",
    ),
    "a length": ("N = [1, 2]\ndef f(x): return x * len(N)", "2]", "2, 3]"),
    "a key": ("N = {'a': 1}\ndef f(x): return x * N.get('b', 2)", "'a'", "'b'"),
    "a closure": (
        "def make(n):\n  def g(x): return x * n\n  return g\ng = make(2)\ndef f(x): return g(x)",
        "make(2)", "make(3)",
    ),
    "a function in a closure": (
        "def make(h):\n  def g(x): return h(x)\n  return g\n"
        "def a(x): return x + 1\ndef b(x): return x + 2\ng = make(a)\ndef f(x): return g(x)",
        "make(a)", "make(b)",
    ),
    "a lambda": ("g = lambda x: x + 1\ndef f(x): return g(x)", "x + 1", "x + 2"),
    "a decorator": (
        "def twice(g):\n  @functools.wraps(g)\n  def h(x): return g(g(x))\n  return h\n"
        "def once(g): return g\n@twice\ndef g(x): return x + 1\ndef f(x): return g(x)",
        "@twice", "@once",
    ),
    "arguments of a partial": (
        "def g(n, x): return x * n\nh = functools.partial(g, 2)\ndef f(x): return h(x)",
        "(g, 2)", "(g, 3)",
    ),
    "a cached function": (
        "N = 2\n@functools.lru_cache\ndef g(): return N\ndef f(x): return x * g()",
        "N = 2", "N = 3",
    ),
    "an attribute of a class": (
        "class A:\n  n = 2\na = A()\ndef f(x): return x * a.n", "n = 2", "n = 3",
    ),
    "an attribute of an instance": (
        "class A:\n  def __init__(self): self.n = 2\na = A()\ndef f(x): return x * a.n",
        "n = 2", "n = 3",
    ),
    "what shadows it": (
        "class A:\n  n = 2\na = A()\n#\ndef f(x): return x * a.n", "#", "a.n = 3",
    ),
    "a method": (
        "class A:\n  def g(self, x): return x + 1\na = A()\ndef f(x): return a.g(x)", "+ 1", "+ 2",
    ),
    "a method that overrides": (
        "class A:\n  def g(self, x): return x + 1\nclass B(A): pass\n"
        "b = B()\ndef f(x): return b.g(x)",
        "pass", "\n  def g(self, x): return x + 2",
    ),
    "a class between": (
        "class A:\n  def g(self, x): return x + 1\nclass M:\n  def g(self, x): return x + 2\n"
        "class B(A): pass\nb = B()\ndef f(x): return b.g(x)",
        "B(A)", "B(M, A)",
    ),
    "a property": (
        "class A:\n  @property\n  def n(self): return 2\na = A()\ndef f(x): return x * a.n",
        "return 2", "return 3",
    ),
    "a static method": (
        "class A:\n  @staticmethod\n  def g(x): return x + 1\ndef f(x): return A.g(x)",
        "+ 1", "+ 2",
    ),
    "a class method": (
        "class A:\n  n = 1\n  @classmethod\n  def g(cls, x): return x + cls.n\n"
        "def f(x): return A.g(x)",
        "n = 1", "n = 2",
    ),
    "a slot": (
        "class A:\n  __slots__ = ('n',)\na = A()\na.n = 2\ndef f(x): return x * a.n",
        "a.n = 2", "a.n = 3",
    ),
    "a member of an enum": (
        "class E(enum.Enum):\n  A = 2\ndef f(x): return x * E.A.value", "A = 2", "A = 3",
    ),
    "a field": (
        "@dataclasses.dataclass(frozen=True)\nclass C:\n  n: int = 2\nc = C()\n"
        "def f(x): return x * c.n",
        "= 2", "= 3",
    ),
    "a tuple in a class": (
        "class A:\n  n = (1, 2)\na = A()\ndef f(x): return x * a.n[1]", "2)", "3)",
    ),
    "which function of torch": ("g = torch.sin\ndef f(x): return g(x)", "sin", "cos"),
    "a module's flag": (
        "m = nn.Dropout(0.0).eval()\ndef f(x): return m(x) * (2 if m.training else 1)",
        ".eval()", "",
    ),
    "a layer": ("m = nn.Sequential(nn.ReLU())\ndef f(x): return m(x)", "nn.ReLU()", "nn.Tanh()"),
    "one layer more": (
        "m = nn.Sequential(nn.Tanh())\ndef f(x): return m(x)", "h()", "h(), nn.Tanh()",
    ),
    "a hook": (
        "m = nn.Tanh()\n#\ndef f(x): return m(x)",
        "#", "m.register_forward_hook(lambda m, x, y: y + 1)",
    ),
    "a method of an instance": (
        "class M(nn.Module):\n  def forward(self, x): return x + 1\nm = M()\n#\n"
        "def f(x): return m(x)",
        "#", "m.forward = lambda x: x + 2",
    ),
    "an environment variable": (
        "os.environ['KEPT'] = 'a'\ndef f(x): return x * (2 if os.environ['KEPT'] == 'a' else 3)",
        "= 'a'\n", "= 'b'\n",
    ),
    "the library": (
        "math.tau = 6\ndef f(x): return x * math.tau", "math.tau = 6", "math.tau = 7",
    ),
    "the library's function": (
        "math.twice = lambda n: n * 2\ndef f(x): return x * math.twice(2)", "n * 2", "n * 3",
    ),
    "what a module looks up": (
        "m = sys.modules['kept_program.lazy'] = types.ModuleType('kept_program.lazy')\n"
        "def look(name):\n  if name == 'n': return N\n  raise AttributeError(name)\n"
        "m.__getattr__ = look\n"
        "N = 2\ndef f(x): return x * m.n",
        "N = 2", "N = 3",
    ),
    "what a constant function gives": (
        "@torch._dynamo.assume_constant_result\ndef g(): return N\nN = 2\ndef f(x): return x * g()",
        "N = 2", "N = 3",
    ),
    "a flag in a buffer": (
        "m = nn.Module()\nm.register_buffer('n', torch.tensor(True))\n"
        "def f(x): return x * (2 if m.n else 3)",
        "True", "False",
    ),
    "a line's number": (
        "def f(x):\n  #\n  return x * inspect.currentframe().f_lineno", "#", "#\n  #",
    ),
    "a default that nobody takes": (
        "def g(n=2): pass\ndef f(x): return x * inspect.signature(g).parameters['n'].default",
        "n=2", "n=3",
    ),
    "an annotation": (
        "def g(n: int): pass\ndef f(x): return x * (2 if g.__annotations__['n'] is int else 3)",
        "n: int", "n: float",
    ),
    "a method that only C asks for": (
        "class A:\n  n = 2\na = A()\ndef f(x): return x * (2 if callable(a) else 3)",
        "n = 2", "def __call__(self): pass",
    ),
    "what a list compares with": (
        "class A:\n  n = 2\na = A()\ndef f(x): return x * (2 if 5 in [a] else 3)",
        "n = 2", "__eq__ = lambda self, other: True",
    ),
    "a metaclass": (
        "class M(type):\n  n = 1\nclass A(metaclass=M): pass\n"
        "def f(x): return x * getattr(A, 'm', 2)",
        "n = 1", "__getattr__ = lambda cls, name: 3",
    ),
    "a method of an enum": (
        "class E(enum.Enum):\n  A = 2\n  def twice(self): return self.value * 2\n"
        "def f(x): return x * E.A.twice()",
        "* 2", "* 3",
    ),
    "what a property of a member reads": (
        "class E(enum.Enum):\n  A = 1\n  @property\n  def n(self): return N\nN = 2\n"
        "def f(x): return x * E.A.n",
        "N = 2", "N = 3",
    ),
    "a partial method": (
        "class A:\n  def g(self, n, x): return x * n\n  h = functools.partialmethod(g, 2)\n"
        "a = A()\ndef f(x): return a.h(x)",
        "(g, 2)", "(g, 3)",
    ),
    "what an abstract class is told of": (
        "class P(abc.ABC): pass\nclass A: pass\n#\na = A()\n"
        "def f(x): return x * (2 if isinstance(a, P) else 3)",
        "#", "P.register(A)",
    ),
    "what an abstract class is told of a base": (
        "class P(abc.ABC): pass\nclass A: pass\nclass B(A): pass\n#\n"
        "def f(x): return x * (2 if issubclass(B, P) else 3)",
        "#", "P.register(A)",
    ),
    "what an abstract class within a union is told of": (
        "class P(abc.ABC): pass\nclass A: pass\n#\na = A()\n"
        "def f(x): return x * (2 if isinstance(a, P | int) else 3)",
        "#", "P.register(A)",
    ),
    "fields": (
        "P = collections.namedtuple('P', 'a b')\np = P(2, 3)\ndef f(x): return P(x * p.a, x)",
        "'a b'", "'b a'",
    ),
    "an operator of a library": (
        "if known := getattr(torch.ops.kept_lib, 'known', None): known._destroy()\n"
        "torch.ops.kept_lib.__dict__.pop('cut', None)\n"
        "lib = torch.ops.kept_lib.known = torch.library.Library('kept_lib', 'DEF')\n"
        "lib.define('cut(Tensor x) -> Tensor')\n"
        "lib.impl('cut', lambda x: x[:N].clone(), 'CompositeImplicitAutograd')\nN = 2\n"
        "def f(x):\n  y = torch.ops.kept_lib.cut(x)\n  return y * y.shape[0]",
        "N = 2", "N = 3",
    ),
    "an operator's fake": (
        "@torch.library.custom_op('kept::op', mutates_args=())\n"
        "def op(x: torch.Tensor) -> torch.Tensor: return x[:N].clone()\n"
        "@op.register_fake\ndef _(x): return x.new_empty(N, *x.shape[1:])\n"
        "N = 2\ndef f(x):\n  y = op(x)\n  return y * y.shape[0]",
        "N = 2", "N = 3",
    ),
    "that it is disabled": (
        "def g(x): return x + 1\ng = g if len('a') == 1 else torch.compiler.disable(g)\n"
        "def f(x): return g(x) * 2",
        "'a'", "'ab'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_capture_is_used_again_unless_something_differs(what: str, processes: Processes) -> None:
    source, old, new = PROGRAMS[what]
    assert source.count(old) == 1 or what == "that it is disabled"
    _, captured = processes.run(HEAD + source, X)
    assert captured
    _, captured = processes.run(HEAD + source, X)
    assert not captured, "kept, and not used"
    before, captured = processes.run(HEAD + source.replace(old, new, 1), X)
    assert captured, f"used although it differs: {before}"


def test_torch_itself_may_differ(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HEAD + "m = nn.Sequential(nn.Linear(4, 4), nn.ReLU())\ndef f(x): return m(x)"
    torch.manual_seed(0)
    processes.run(source, X)
    torch.manual_seed(0)
    assert not processes.run(source, X)[1]
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "relu", lambda x, inplace=False: x.tanh())
        assert processes.run(source, X)[1]
    forward = torch.nn.Linear.forward
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x) * 2)
        assert processes.run(source, X)[1]


def test_a_method_of_tensors_may_be_replaced(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HEAD + "def f(x): return x.sin()"
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sin", lambda x: x * 7)
        assert torch.equal(processes.run(source, X)[0], X * 7)
    assert torch.equal(processes.run(source, X)[0], X.sin())


# First calls that leave a state behind, and two objects that look alike.
STATES = {
    "a cache": "k = {}\ndef f(x):\n  if 'n' not in k: k['n'] = 2\n  return x * k['n']",
    "two models": (
        "class A(nn.Module):\n  def __init__(self, n):\n    super().__init__()\n    self.n = n\n"
        "  def forward(self, x): return x * self.n\nboth = A(2), A(3)\n"
    ),
}


@pytest.mark.parametrize("what", STATES)
def test_what_looks_alike_is_kept_side_by_side(what: str, processes: Processes) -> None:
    for count in (2, 0):
        program = processes.start(HEAD + STATES[what])
        processes.captures.clear()
        models = getattr(program, "both", ())
        for model in models or (None, None):
            function = program.f if model is None else type(model).forward
            fast = CompiledFunction(
                function, lambda gm, _: gm.forward, Policy(), keeper=Keeper(cache=processes.cache)
            )
            given = (X,) if model is None else (model, X)
            torch.testing.assert_close(fast(*given), X * getattr(model, "n", 2))
        assert len(processes.captures) == count


NEVER = {
    "an address": "def f(x): return x * (id(f) % 7)",
    "a parameter's": "w = nn.Parameter(torch.ones(4))\ndef f(x): return x * w * (w.data_ptr() % 7)",
    "a hash": "def f(x): return x * (hash('a') % 7)",
    "the order of a set": "S = {'a', 'b'}\ndef f(x): return x * sum(map(ord, list(S)))",
    "what is no member": (
        "class E(enum.Enum):\n  A = 2\n  @classmethod\n  def _missing_(cls, value): return cls.A\n"
        "def f(x): return x * E('c').value"
    ),
    "not one graph": "def f(x):\n  y = x + 1\n  sys.stderr.write('')\n  return y * 2",
}


@pytest.mark.parametrize("what", NEVER)
def test_what_differs_from_process_to_process_is_not_kept(what: str, processes: Processes) -> None:
    for _ in range(2):
        assert processes.run(HEAD + NEVER[what], X)[1]


def test_effects_errors_and_gradients_are_those_of_a_capture(processes: Processes) -> None:
    source = HEAD + (
        "class Box: pass\nbox = Box()\nw = nn.Parameter(torch.ones(4))\n"
        "def f(x, i):\n  box.last = i\n  y = (x * w)[i]\n  return {'y': y, 'i': i}\n"
    )
    for captures in (1, 0):
        program = processes.start(source)
        processes.captures.clear()
        fast = CompiledFunction(
            program.f, lambda gm, _: gm.forward, Policy(), keeper=Keeper(cache=processes.cache)
        )
        index = torch.tensor([2, 0])
        out = fast(X, index)
        out["y"].sum().backward()
        assert torch.equal(program.w.grad, X[2] + X[0]) and out["i"] is program.box.last is index
        wrong = torch.tensor([7, 7])
        with pytest.raises(IndexError):
            fast(X, wrong)
        assert program.box.last is wrong
        assert len(processes.captures) == captures


def test_other_modes_and_inputs_have_captures_of_their_own(processes: Processes) -> None:
    source = HEAD + "def f(x): return x.sin() if torch.is_grad_enabled() else x.cos()"
    for grad, x in ((True, X), (False, X), (True, X.double()), (True, X[:2])):
        assert processes.run(source, x, grad=grad)[1]
        assert not processes.run(source, x, grad=grad)[1]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert processes.run(source, X)[1]
    finally:
        torch.set_default_dtype(before)


def test_a_file_that_is_damaged_is_captured_anew(processes: Processes) -> None:
    source = HEAD + "def f(x): return x.sin()"
    processes.run(source, X)
    for file in processes.cache.folder.iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    assert processes.run(source, X)[1]
    assert not processes.run(source, X)[1]


def test_compile_keeps_where_it_is_asked_to(
    processes: Processes, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("FUSEE_CACHE_DIR", str(tmp_path))
    caching = {"model_caching": True, "cache_dir": tmp_path / "models"}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def captures(backend: str, options: dict[str, Any] | None = None) -> int:
        processes.captures.clear()
        fast = fusee.compile(model, backend=backend, options=options)
        for _ in range(2):
            torch.testing.assert_close(fast(X), model(X))
        return len(processes.captures)

    if importlib.util.find_spec("openvino") is not None:
        assert captures("openvino") == captures("openvino", caching) == 1
        assert captures("openvino", caching) == 0
    assert captures("fusee") == captures("fusee") == 1
    environment.setenv("FUSEE_KEEP_CAPTURES", "1")
    settings.cache_clear()
    captures("fusee")
    assert captures("fusee") == 0
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert captures("fusee") == 0


# What no sketch can be made of, and what a graph without its examples does not say.
UNLIKE = {
    "nested tensors": (
        "k = torch.nested.nested_tensor([torch.ones(2)])\ndef f(x): return x + k.unbind()[0].sum()"
    ),
    "sparse tensors": "k = torch.eye(3).to_sparse_csr()\ndef f(x): return x + k.to_dense().sum()",
    "a lazy module": "m = nn.LazyLinear(3)\nm(torch.ones(1, 4))\ndef f(x): return m(x)",
    "a traced function": "k = torch.jit.trace(torch.sin, torch.ones(2))\ndef f(x): return k(x) + 1",
    "digits": "k = 10 ** 5000\ndef f(x): return x + (k > 1)",
    "as many as the data says": "def f(x): return x[x[:, 0] > 0].sin()",
    "only if the data says so": (
        "def f(x):\n  at = torch.repeat_interleave(torch.arange(3), torch.tensor([1, 1, 1]))\n"
        "  return torch.zeros(3, 4).scatter_add(0, at[:, None].expand(-1, 4), x)"
    ),
    "a float of the data": "def f(x): return x * x.sum().item()",
    "put at a mask": (
        "def f(x):\n  x = x.clone()\n  x[:, torch.arange(4) > 1] = x[:, :2] * 2\n  return x"
    ),
    "on the meta device": "def f(x): return x + len(x.to('meta').mT)",
}


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore::DeprecationWarning"
)
def test_what_a_kept_graph_does_not_say(
    name: str, processes: Processes, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("FUSEE_KEEP_CAPTURES", "1")
    environment.setenv("FUSEE_CACHE_DIR", str(processes.cache.folder))
    settings.cache_clear()
    for _ in range(2):
        program = processes.start(HEAD + "torch.manual_seed(0)\n" + UNLIKE[name])
        x = X.clone().requires_grad_()
        got, want = fusee.compile(program.f)(x), program.f(x)
        torch.testing.assert_close(got, want)
        if want.requires_grad:
            grads = [torch.autograd.grad(y.sum(), x, allow_unused=True) for y in (got, want)]
            torch.testing.assert_close(*grads)


def test_nobody_is_asked_for_a_name(processes: Processes) -> None:
    source = HEAD + (
        "class Asked:\n  def __init__(self): self.n = 2\n"
        "  def __getattr__(self, name): raise RuntimeError(name)\n"
        "class M(nn.Module):\n  asked = Asked()\n  def forward(self, x): return x * self.asked.n\n"
        "m = M()\ndef f(x): return m(x)"
    )
    assert processes.run(source, X)[1]
    assert not processes.run(source, X)[1]


def test_a_class_of_tensors_hears_of_nothing(processes: Processes) -> None:
    program = """
class Heard(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        calls.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs)
calls = []
def f(x): return x * 2
"""
    for _ in range(2):
        made = processes.start(HEAD + program)
        keeper = Keeper(cache=processes.cache)
        fast = CompiledFunction(made.f, lambda gm, _: gm.forward, Policy(), keeper=keeper)
        fast(X.as_subclass(made.Heard))
        assert made.calls == ["mul"]


def test_whether_there_is_a_gpu_is_asked_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in ("mtia", "backends.mps"):
        other = HEAD + f"def f(x): return x + (2 if torch.{asked}.is_available() else 3)"
        assert processes.run(other, X)[1] and not processes.run(other, X)[1]
    source = HEAD + "def f(x): return x * (2 if torch.cuda.is_available() else 3)"
    assert processes.run(source, X)[1]
    assert not processes.run(source, X)[1]
    count = 0 if torch.cuda.is_available() else 1
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: count, raising=False)
    assert processes.run(source, X)[1]


# ---------------------------------------------------------------------------- new kinds
# A kind of guard is one class and a kind of source is one class, as somebody who needs one adds it.


@dataclass(frozen=True, eq=False)
class LengthOf(Part):
    """How many elements a container has."""

    WORDS = "the length of {parent}"

    def code(self, parent: str, source: Source) -> str:
        return f"{source.python('len')}({parent})"

    def find(self, of: Any) -> int:
        return len(of)


class AtMost(Fact):
    """A number that is no greater than this one."""

    WORDS, TORCH = "is at most", "SHAPE_ENV"

    def conditions(self, at: str, source: Source) -> list[str]:
        return [f"{at} <= {self.value}"]

    def fits(self, now: Any) -> bool:
        return bool(now <= self.value)


def few(items: Any) -> bool:
    return len(items) < 4


def _few(m: Any, items: set[int]) -> bool:
    if is_few := len(items) < 4:
        m.world.fact(AtMost, LengthOf(m.world.origin(items)), 3)
    else:
        m.length(items)
    return is_few


def test_a_kind_of_guard_and_one_of_source_are_a_class_each(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECIAL, few, _few)
    source = f"from {__name__} import few\ndef f(x, items): return x * 2 if few(items) else x"
    assert processes.run(source, X, {1})[1]
    assert not processes.run(source, X, {1, 2})[1]
    assert processes.run(source, X, {1, 2, 3, 4})[1]

    fast = CompiledFunction(processes.start(source).f, lambda gm, _: gm.forward, Policy())
    for items in ({1}, {1, 2, 3}, {1, 2, 3, 4}):
        torch.testing.assert_close(fast(X, items), X * 2 if len(items) < 4 else X)
    first, _ = fast.entries
    assert "_len(items) <= 3" in first.check_source()
    missed = first.captured.facts.first_miss({"x": X, "items": {1, 2, 3, 4}})
    assert missed is not None and str(missed[0]) == "the length of items is at most 3"
    assert missed[0].miss(missed[1]) == "the length of items was 3, is 4"


# ---------------------------------------------------------------------------- sizes that vary
# By what f does: the sizes of X of its calls, and captures in the first process and in the next.

SIZED = {
    "a size": ("def f(x): return x * x.shape[0], x.shape, x.numel() // 2", (3, 5, 7), 2, 0),
    "a relation": ("def f(x): return x * 2 if x.shape[0] > 4 else x", (6, 8, 3, 9), 3, 0),
    "a root": ("def f(x): return x * int(len(x) ** 0.5), math.isqrt(len(x))", (4, 9, 16), 2, 0),
    "floats": ("def f(x): return x / math.sqrt(x.shape[0]), math.log(x.shape[0])", (3, 5), 2, 0),
    "a comparison of floats": (
        "def f(x): return x * 2 if math.log(len(x)) < math.sqrt(len(x)) - 1 else x",
        (9, 5, 99), 3, 0,
    ),
    "a result's size": ("def f(x): return x[x[:, 0] > 0.2].sum(), x.nonzero().shape", (3, 5), 2, 0),
    "a module": (
        "m = nn.Sequential(nn.Linear(4, 3), nn.GELU())\ntorch.nn.init.ones_(m[0].weight)\n"
        "torch.nn.init.ones_(m[0].bias)\ndef f(x): return m(x).reshape(-1, 1)",
        (3, 5, 7), 2, 0,
    ),
    "it always fails": ("def f(x): return x + [*range(x.shape[0])][-1]", (3, 5, 7), 3, 0),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["as it is", "fusee"])
@pytest.mark.parametrize("what", SIZED)
def test_sizes_that_vary_are_kept(what: str, backend: str, processes: Processes) -> None:
    source, sizes, first, then = SIZED[what]
    for count in (first, then):
        program = processes.start(HEAD + source)
        processes.captures.clear()
        fast = CompiledFunction(
            program.f,
            lookup(backend) if backend == "fusee" else lambda gm, _: gm.forward,
            Policy(),
            keeper=Keeper(cache=processes.cache),
        )
        with torch.no_grad():
            for n in sizes:
                x = torch.linspace(-1, 1, 4 * n).reshape(n, 4)
                torch.testing.assert_close(fast(x), program.f(x))
        assert len(processes.captures) == count


def test_marks_make_versions_of_their_own(processes: Processes) -> None:
    source = "def f(x): return x * 2"
    for mark, count in ((False, 3), (True, 1)):
        for again in (False, True):
            program = processes.start(source)
            processes.captures.clear()
            fast = CompiledFunction(
                program.f,
                lambda gm, _: gm.forward,
                Policy(),
                varying=lambda f: Varying(f, None if mark else False),  # noqa: B023  called at once
                keeper=Keeper(cache=processes.cache),
            )
            for n in (3, 5, 7):
                x = torch.ones(n, 4)
                if mark:
                    fusee.compiler.mark_dynamic(x, 0)
                assert fast(x).shape == (n, 4)
            assert len(processes.captures) == (0 if again else count)


IN_ORDER = """
import os, sys, torch, fusee
from fusee.capture import entries
captures, whole = [], entries.capture
entries.capture = lambda *args: captures.append(args) or whole(*args)
@fusee.compile
def step(x, n, y):
    return torch.relu(x @ x.T).sum(-1) * n, x.shape, y.sin() + 1
for n in (3, 5, 7):
    x = torch.linspace(-1, 1, 4 * n).reshape(n, 4)
    y = torch.linspace(-1, 1, 6 * n).reshape(6, n)[:, :2]
    got, size, sine = step(x, n, y)
    assert torch.allclose(sine, y.sin() + 1)
    assert torch.allclose(got, torch.relu(x @ x.T).sum(-1) * n)
    assert size == x.shape
print(len(captures), *(name for name in ("sympy", "torch._dynamo") if name in sys.modules))
"""


def test_the_next_process_captures_no_size_again(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(IN_ORDER)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_COMPILE_JOB", "FUSEE"))}

    def told(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=True,
            env={**kept, "FUSEE_CACHE_DIR": str(tmp_path / "cache"), **variables},
        )  # fmt: skip
        return done.stdout.strip()

    keeps = {"FUSEE_KEEP_CAPTURES": "1", "FUSEE_JOB_ID": "sizes"}
    assert told(**keeps) == "2"
    assert told(**keeps) == "0"
    for path_of in (tmp_path / "cache").rglob("*"):
        if path_of.is_file() and "jobs" not in path_of.parts:
            path_of.write_bytes(path_of.read_bytes()[:-9])
    assert told(**keeps) == "1"
