"""Whatever a function reads may change between calls: the compiled one gives what eager gives."""

from __future__ import annotations

import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import fusee
from fusee.capture.entries import CompiledFunction
from fusee.capture.guards import NotAlias
from fusee.capture.policy import Policy, as_function
from tests.capturing.differences import backend
from tests.capturing.places import CHANGES, Place, places
from tests.capturing.portrait import Portrait

MODULE = "world_of_soundness"

# A method that calls itself through super() and has a default: without any compiler, CPython 3.13.0
# counts no recursion there and runs out of memory.
CRASHES = ("globals['Base'].prepared", "globals['Node'].__call__")

SOURCE = '''
import collections
import enum

import torch

FACTOR = 3
RATES = {"low": 0.5, "high": [1, 2, {"deep": 4}]}
BIAS = torch.tensor([1.0, 2.0])
SEEN = {1, 2, 3}


class Mode(enum.Enum):
    ADD = 1
    SUB = 2


class Leaf:
    __slots__ = ("gain", "shift")

    def __init__(self):
        self.gain = 2
        self.shift = torch.tensor([0.5, -0.5])


class Base:
    power = 2
    table = {"x": 1, "y": 2}

    def prepared(self, x):
        return x * self.power + self.table["y"]

    @property
    def size(self):
        return len(self.parts)


class Node(Base):
    depth = 1

    def __init__(self):
        self.leaf = Leaf()
        self.parts = [1, 2.5, torch.ones(2)]
        self.flags = {"on": True, "off": False}
        self.mode = Mode.ADD
        self.name = "node"
        self.pair = (1, [2, 3])
        self.queue = collections.deque([1, 2])
        self.hook = shifted
        self.other = None
        self.self = self

    def __call__(self, x, scale=2):
        y = super().prepared(x) * scale
        return y if self.mode is Mode.ADD else -y

    def __getattr__(self, name):
        if name == "computed":
            return 6
        raise AttributeError(name)


def shifted(x, by=1, *, twice=False):
    return x + by * (2 if twice else 1)


def read(x, node, loose):
    """One read of each kind, so that each matters for the result."""
    x = node(x) + node.leaf.gain + node.leaf.shift
    x = x + node.parts[0] + node.parts[1] * node.parts[-1]
    for part in node.parts[:2]:
        x = x + part
    x = x + node.size * FACTOR + RATES["low"] + RATES["high"][2]["deep"] + BIAS
    if node.flags["on"] and not node.flags.get("off"):
        x = x * 2
    x = node.hook(x) + shifted(x, twice=node.depth == 1)
    x = x + len(node.name) + node.pair[0] + sum(node.pair[1]) + len(node.queue) + node.computed
    if node.other is None and hasattr(node, "extra"):
        x = x + 100
    if node.self is node:
        x = x + 7
    for k, name in enumerate(sorted(loose)):
        x = x + (k + 1) * loose[name]
    if 2 in SEEN:
        x = x + len(SEEN)
    return x, [*loose], node.leaf, isinstance(node, Base), str(node.pair), "low" in RATES


def make():
    count, inner = 2, {"k": [1, 2]}

    def nested(x, more=[5]):
        return x * count + more[0]

    def fn(x, node, loose):
        x, *rest = read(x, node, loose)
        return nested(x) + inner["k"][1], rest

    return fn


fn = make()
'''


class Side:
    """One of two equal worlds: its objects, and the function called plainly or compiled."""

    def __init__(self, compiled: bool) -> None:
        module = sys.modules[MODULE] = types.ModuleType(MODULE)
        exec(compile(SOURCE, "<soundness>", "exec"), module.__dict__)
        names: Any = module.__dict__
        self.args = [torch.tensor([1.0, -2.0]), names["Node"](), {"b": 1, "a": 2.5}]
        self.fn = names["fn"]
        self.call: Any = self.fn
        if compiled:
            self.call = CompiledFunction(self.fn, backend, Policy(), recompile_limit=10**6)
        roots = {"args": self.args, "fn": self.fn, "globals": names}
        self.places = places(roots, MODULE)

    def told(self) -> list[str]:
        portrait = Portrait()
        try:
            result = self.call(*self.args)
        except Exception as error:  # noqa: BLE001  # the exception is what is compared
            # where the stack ends depends on how many frames there are
            result = RecursionError() if isinstance(error, RecursionError) else error
        portrait.add("result", result)
        portrait.add("args", self.args)
        return [str(line) for line in portrait.lines]


def pairs() -> Iterator[tuple[Side, Side, Place, Place]]:
    eager, compiled = Side(False), Side(True)
    assert [p.path for p in eager.places] == [p.path for p in compiled.places]
    assert compiled.told() == eager.told()
    for mine, theirs in zip(eager.places, compiled.places):
        yield eager, compiled, mine, theirs


def changed(x: Any, name: str) -> Any:
    try:
        return CHANGES[name](x)
    except (RuntimeError, TypeError, IndexError, ValueError):  # does not apply to this one
        return x


@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str) -> None:
    """Each place changed in turn, and put back: every call gives what eager gives."""
    count = 0
    for eager, compiled, mine, theirs in pairs():
        new = changed(mine.value, name)
        if new is mine.value:
            continue
        count += 1
        undo = mine.undo(), theirs.undo()
        mine.put(new)
        theirs.put(changed(theirs.value, name))
        assert compiled.told() == eager.told(), f"{mine.path} {name}"
        for one in undo:
            one()
        assert compiled.told() == eager.told(), f"{mine.path} put back"
    assert count or name not in ("deleted", "none", "more")


def test_aliases() -> None:
    """Each place is given the value of each other one of the same class."""
    for eager, compiled, mine, theirs in pairs():
        for a, b in zip(eager.places, compiled.places):
            if type(a.value) is not type(mine.value) or a.value is mine.value:
                continue
            if (str(mine.path), str(a.path)) == CRASHES and sys.version_info >= (3, 13):
                continue
            undo = mine.undo(), theirs.undo()
            mine.put(a.value)
            theirs.put(b.value)
            assert compiled.told() == eager.told(), f"{mine.path} is {a.path}"
            for one in undo:
                one()


def test_nothing_changed() -> None:
    """What the function does not read may change without a new entry."""
    side = Side(True)
    side.told()
    before = len(side.call.entries)
    side.args[0] = torch.randn(2)
    side.args[1].unrelated = 3
    sys.modules[MODULE].__dict__["UNRELATED"] = 4
    side.told()
    assert len(side.call.entries) == before


class Table(torch.nn.Module):
    """It writes to one container, and reads others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}
        self.other = {"k": 2.0}
        for k in range(20):
            setattr(self, f"scale{k}", 1.0 + k)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["k"] = self.seen["k"] = 5.0
        for k in range(20):
            x = x * getattr(self, f"scale{k}")
        return x * self.other["k"], dict(kwargs)


def test_containers_that_become_one() -> None:
    table, x = Table(), torch.ones(2)
    call = CompiledFunction(Table.__dict__["forward"], backend, Policy())
    call(table, x, a=1)
    (entry,) = call.entries
    facts = entry.captured.facts.rows
    assert any(isinstance(fact, NotAlias) for fact in facts)
    # what a call gave by name is no object that anybody had before
    assert not any(isinstance(fact, NotAlias) and "kwargs" in str(fact) for fact in facts)
    before = table.other
    for other in ({"k": 2.0}, table.seen, before):
        table.other = other
        want = Table.forward(table, x, a=1)
        got = call(table, x, a=1)
        assert torch.equal(got[0], want[0]) and got[1] == want[1]
    assert len(call.entries) == 2


class Plain:
    def method(self) -> None: ...


class Delegating:
    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


def _giving(k: int) -> Callable[[], int]:
    return lambda: k


def _tagged(k: int) -> Any:
    function: Any = lambda x=k: x  # noqa: E731
    function.tag = k
    return function


class Tagged(Plain):
    def __init__(self, tag: int) -> None:
        self.tag = tag

    def __repr__(self) -> str:
        return f"Tagged({self.tag})"


TWO: dict[str, tuple[Any, Any]] = {
    "objects": (Plain(), Plain()),
    "methods": (Plain().method, Plain().method),
    "methods in C": ([1].append, [1].append),
    "functions": (_giving(1), _giving(2)),
    "modules": (torch.nn.ReLU(), torch.nn.ReLU()),
    "of a class that delegates": (Delegating(), Delegating()),
}
ASKED: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a.__eq__(b) is True,
    lambda a, b: object.__eq__(a, b) is True,
    lambda a, b: [a] == [b],
    lambda a, b: a in [b],
    lambda a, b: types.SimpleNamespace(of=a) == types.SimpleNamespace(of=b),
    lambda a, b: {a: 1}.get(b),
    lambda a, b: len({a, b}) == 1,
    lambda a, b: hash(a) == hash(b),
    lambda a, b: object.__hash__(a) == object.__hash__(b),
    lambda a, b: id(a) == id(b),
]


@pytest.mark.parametrize("kind", TWO)
def test_objects_that_become_one(kind: str) -> None:
    """What tells objects apart by identity relies on it, however it is asked."""
    first, second = TWO[kind]
    for asked in ASKED:

        def program(x: torch.Tensor, a: Any, b: Any, asked: Any = asked) -> torch.Tensor:
            return x + 1 if asked(a, b) else x - 1

        call = CompiledFunction(as_function(program), backend, Policy())
        for given in ((first, second), (first, first), (second, first), (second, second)):
            assert torch.equal(call(torch.ones(2), *given), program(torch.ones(2), *given))


SCALE = 2.0


@pytest.mark.parametrize(
    "function", ["tree_map", "tree_map_only", "tree_map_with_path", "tree_all"]
)
def test_functions_that_pytree_calls_are_captured(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(*given: Any) -> Any:
        return given[-1].dim() < SCALE if function == "tree_all" else given[-1] * SCALE

    def program(tree: Any) -> Any:
        return getattr(pytree, function)(*before, scaled, tree)

    before = (torch.Tensor,) if function == "tree_map_only" else ()
    tree = {"a": torch.ones(2), "b": [torch.ones(3)]}
    call = CompiledFunction(as_function(program), backend, Policy())
    for scale in (2.0, 3.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        torch.testing.assert_close(call(tree), program(tree))


class Pair:
    def __init__(self, first: Any, k: int) -> None:
        self.first, self.k = first, k


pytree.register_pytree_node(
    Pair, lambda x: ([x.first], x.k), lambda parts, k: Pair(next(iter(parts)), k)
)
twice = torch.library.custom_op(
    "soundness::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
)
thrice = torch.library.custom_op(
    "soundness::thrice", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor"
)
for op in (twice, thrice):
    op.register_fake(torch.empty_like)
ALIKE = {
    "functions of NumPy": ((np.mean, np.var, np.linalg.norm), lambda f, x: f(x.numpy()) + x),
    "ufuncs": ((np.sin, np.cos), lambda f, x: f(x.numpy()) * f.nin),
    "operators": ((torch.ops.aten.sin, torch.ops.aten.relu), lambda f, x: f(x) + x),
    "overloads": (
        (torch.ops.aten.sin.default, torch.ops.aten.relu.default),
        lambda f, x: (f(x) + x, f.name()),
    ),
    "custom operators": ((twice, thrice), lambda f, x: f(x) + x),
    "TorchScript": (
        (torch.jit.trace(torch.sin, torch.ones(2)), torch.jit.trace(torch.cos, torch.ones(2))),
        lambda f, x: f(x) + x,
    ),
    "variables of a context": (
        (ContextVar("first", default=1), ContextVar("second", default=2)),
        lambda v, x: x + v.get(),
    ),
    "structures": (
        [pytree.tree_structure(tree) for tree in ([1, 2], (1, 2), {"a": 1, "b": 2}, [1, [2]])],
        lambda spec, x: pytree.tree_unflatten([x, x + 1], spec),
    ),
    "closures": (
        [_tagged(1), _tagged(2)],
        lambda f, x: (x + 1, vars(f), f.__dict__["tag"], str(inspect.signature(f))),
    ),
    "methods": ([Tagged(1).method, Tagged(2).method], lambda f, x: (x + 1, f"{f}", repr([f]))),
    "deques": ([deque([1], 2), deque([1], 3)], lambda row, x: x * row.maxlen),
    "nodes": (
        [Pair(1.0, 1), Pair(2.0, 1), Pair(1.0, 2)],
        lambda pair, x: (
            [x + leaf for leaf in pytree.tree_leaves([[pair]])],
            str(pytree.tree_structure([pair])),
        ),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_objects_that_their_class_does_not_tell_apart(name: str) -> None:
    objects, function = ALIKE[name]

    def program(x: torch.Tensor, given: Any) -> Any:
        return function(given, x)

    compiled = fusee.compile(program)
    for _ in range(2):
        for given in objects:
            want, got = program(torch.ones(2) * 3, given), compiled(torch.ones(2) * 3, given)
            assert repr(got) == repr(want)
