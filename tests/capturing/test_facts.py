"""What a capture relies on: to change it makes a new entry, to change anything else does not."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta, timezone
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fusee
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from tests.capturing.same import Traced, shape_of


class Thing:
    """An instance with whatever attributes."""

    kind = 1

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Other(Thing):
    kind = 1


class Slots:
    __slots__ = ("size",)
    size: int


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Dropout(0.5)])
        self.scale = 2
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Any) -> Any:
        x = self.first(x) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return x


GLOBAL = {"size": 2}
FACTOR = 2


def with_global(x: Any) -> Any:
    return x * FACTOR


def with_item_of_global(x: Any) -> Any:
    return x * GLOBAL["size"]


def with_default(x: Any, by: int = 2) -> Any:
    return x * by


def calls_with_default(x: Any) -> Any:
    return with_default(x)


def with_cell(start: Any) -> Callable[..., Any]:
    size = start

    def fn(x: Any) -> Any:
        return x * size

    def change(new: Any) -> None:
        nonlocal size
        size = new

    fn.__dict__["change"] = change
    return fn


CLOSURE: Any = with_cell(2)
X = torch.ones(2, 3)


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 3))


def fill_weight(module: Any, x: Any) -> None:
    with torch.no_grad():
        module.first.weight.fill_(3)


def set_global(value: int) -> Callable[[], None]:
    def change() -> None:
        global FACTOR
        FACTOR = value

    return change


class Row(NamedTuple):
    """One pair: `change` is done between two calls with `arguments()`, or gives others."""

    name: str
    fn: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    change: Callable[..., Any]


HOUR = timedelta(hours=1)


def shown(x: Any, y: Any) -> Any:
    return x + 1, repr(y)


def scale(x: Any, by: Any) -> Any:
    return x * (by if isinstance(by, (int, float)) else 2), by


def of_thing(thing: Any, x: Any) -> Any:
    return x * thing.size


def apply(module: Any, x: Any) -> Any:
    return module(x)


def thing() -> tuple[Any, ...]:
    return Thing(size=2, unused=3), X


def network() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return Network().eval(), X


def add_hook(module: Any, x: Any) -> None:
    module.first.register_forward_hook(lambda m, args, out: out * 100)


def add_pre_hook(module: Any, x: Any) -> None:
    module.layers[0].register_forward_pre_hook(lambda m, args: (args[0] * 100,))


def first_of(items: Any, x: Any) -> Any:
    return x * items[0]


def count_of(items: Any, x: Any) -> Any:
    return x * len(items)


def total_of(items: Any, x: Any) -> Any:
    for item in items:
        x = x * item
    return x


def item_of(table: Any, x: Any) -> Any:
    return x * table["a"]


def has_item(table: Any, x: Any) -> Any:
    return x * 2 if "b" in table else x


def get_item(table: Any, x: Any) -> Any:
    return x * table.get("b", 5)


def keys_of(table: Any, x: Any) -> Any:
    return x, list(table)


def call_it(fn: Any, x: Any) -> Any:
    return fn(x)


def attribute(name: str, value: Any) -> Callable[..., Any]:
    def change(owner: Any, x: Any) -> None:
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)

    return change


def swap(name: str, make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda owner, x: attribute(name, make())(owner, x)


def item(key: Any, value: Any) -> Callable[..., Any]:
    return lambda items, x: items.__setitem__(key, value)


def same_function(x: Any) -> Any:
    return x + 1


def replaced(*args: Any) -> Callable[..., Any]:
    return lambda *old: args


def _slots(size: int) -> Slots:
    made = Slots()
    made.size = size
    return made


def _lambda(k: int) -> Any:
    return lambda x, k=k: x * k


def _set_default(value: int) -> None:
    with_default.__defaults__ = (value,)


def nested() -> tuple[Any, ...]:
    return Thing(config=Thing(size=2)), X


CHANGES = [
    Row("int", scale, lambda: (X, 2), replaced(X, 3)),
    Row("float", scale, lambda: (X, 2.0), replaced(X, 3.0)),
    Row("int and float", scale, lambda: (X, 2), replaced(X, 2.0)),
    Row("bool and int", scale, lambda: (X, True), replaced(X, 1)),
    Row("zero of the other sign", scale, lambda: (X, 0.0), replaced(X, -0.0)),
    Row("nan", scale, lambda: (X, math.nan), replaced(X, 1.0)),
    Row("string", scale, lambda: (X, "a"), replaced(X, "b")),
    Row("None", scale, lambda: (X, None), replaced(X, 0)),
    Row("dtype as argument", scale, lambda: (X, torch.int32), replaced(X, torch.int64)),
    Row("tuple", scale, lambda: (X, (1, 2)), replaced(X, (1, True))),
    Row("equal keys", shown, lambda: (X, {1: 2}), replaced(X, {True: 2})),
    Row("equal ranges", shown, lambda: (X, range(0, 3, 2)), replaced(X, range(0, 4, 2))),
    Row("equal zones", shown, lambda: (X, timezone(HOUR, "A")), replaced(X, timezone(HOUR, "B"))),
    Row("type of argument", of_thing, thing, lambda t, x: (Other(**t.__dict__), x)),
    Row("dtype", scale, lambda: (X, 2), replaced(X.double(), 2)),
    Row("shape", scale, lambda: (X, 2), replaced(torch.ones(4), 2)),
    Row("stride", scale, lambda: (X, 2), replaced(torch.ones(3, 2).T, 2)),
    Row("requires_grad", scale, lambda: (X, 2), replaced(torch.ones(2, 3, requires_grad=True), 2)),
    Row("device", scale, lambda: (X, 2), replaced(torch.ones(2, 3, device="meta"), 2)),
    Row("Parameter", scale, lambda: (X, 2), replaced(nn.Parameter(X, requires_grad=False), 2)),
    Row("attribute", of_thing, thing, attribute("size", 5)),
    Row("slot", of_thing, lambda: (_slots(2), X), attribute("size", 5)),
    Row("class attribute", lambda t, x: x * t.kind, thing, lambda t, x: setattr(t, "kind", 7)),
    Row("nested attribute", lambda t, x: x * t.config.size, nested, attribute("config.size", 5)),
    Row("list element", first_of, lambda: ([2, 3], X), item(0, 7)),
    Row("list length", count_of, lambda: ([2, 3], X), lambda items, x: items.append(3)),
    Row("list in a loop", total_of, lambda: ([2, 3], X), item(1, 7)),
    Row("dict item", item_of, lambda: ({"a": 2}, X), item("a", 7)),
    Row("missing key", has_item, lambda: ({"a": 2}, X), item("b", 7)),
    Row("missing key of get", get_item, lambda: ({"a": 2}, X), item("b", 7)),
    Row("keys", keys_of, lambda: ({"a": 2}, X), item("b", 7)),
    Row("order of keys", keys_of, lambda: ({"a": 1, "b": 2}, X), replaced({"b": 2, "a": 1}, X)),
    Row("deque", total_of, lambda: (collections.deque([2]), X), lambda d, x: d.append(3)),
    Row("set", lambda s, x: (x, 3 in s), lambda: ({1}, X), lambda s, x: s.add(3)),
    Row("global", with_global, lambda: (X,), lambda x: set_global(3)()),
    Row("item of a global", with_item_of_global, lambda: (X,), lambda x: GLOBAL.update(size=9)),
    Row("closure cell", lambda x: CLOSURE(x), lambda: (X,), lambda x: CLOSURE.change(9)),
    Row("default", calls_with_default, lambda: (X,), lambda x: _set_default(5)),
    Row("function", call_it, lambda: (torch.sin, X), replaced(torch.cos, X)),
    Row("function in Python", call_it, lambda: (same_function, X), replaced(with_default, X)),
    Row("cell of a lambda", call_it, lambda: (with_cell(2), X), replaced(with_cell(3), X)),
    Row("default of a lambda", call_it, lambda: (_lambda(2), X), replaced(_lambda(3), X)),
    Row("training flag", apply, network, lambda m, x: m.train() and None),
    Row("attribute of a module", apply, network, attribute("scale", 3)),
    Row("submodule", apply, network, swap("first", lambda: nn.Linear(3, 3, bias=False))),
    Row("layer", apply, network, lambda m, x: m.layers.append(nn.ReLU()) and None),
    Row("hook", apply, network, add_hook),
    Row("hook before", apply, network, add_pre_hook),
    Row("own forward", apply, network, attribute("first.forward", torch.sin)),
    Row("frozen", apply, network, lambda m, x: m.first.requires_grad_(False) and None),
    Row("dtype of parameters", apply, network, lambda m, x: (m.double(), x.double())),
    Row("identity of tensors", lambda a, b: (a is b, a + b), lambda: (X, X), replaced(X, X + 0)),
    Row("identity by chance", lambda a, b: (a is b, a + b), lambda: (X, X + 0), replaced(X, X)),
    Row("identity of lists", lambda a, b: (X, a is b), lambda: ([], []), lambda a, b: (a, a)),
]  # fmt: skip

KEPT = [
    Row("equal values", scale, lambda: (X, 2.0), replaced(torch.zeros(2, 3), 2.0)),
    Row("equal strings", scale, lambda: (X, "ab"), replaced(X, "".join(["a", "b"]))),
    Row("nan", scale, lambda: (X, math.nan), replaced(X, float("nan"))),
    Row("unused attribute", of_thing, thing, attribute("unused", 9)),
    Row("new attribute", of_thing, thing, attribute("more", 9)),
    Row("another instance", of_thing, thing, lambda t, x: (Thing(size=2), x)),
    Row("other element", first_of, lambda: ([2, 3], X), item(1, 9)),
    Row("appended", first_of, lambda: ([2, 3], X), lambda items, x: items.append(4)),
    Row("values where length counts", count_of, lambda: ([2, 3], X), item(1, 9)),
    Row("other item", item_of, lambda: ({"a": 2}, X), item("z", 9)),
    Row("parameter swapped", apply, network, swap("first.weight", new_weight)),
    Row("parameter changed", apply, network, fill_weight),
    Row("buffer swapped", apply, network, swap("shift", lambda: torch.zeros(3))),
    Row("attribute that nothing reads", apply, network, attribute("note", "x")),
    Row("another lambda", call_it, lambda: (_lambda(2), X), replaced(_lambda(2), X)),
    Row("another closure", call_it, lambda: (with_cell(2), X), replaced(with_cell(2), X)),
    Row("input of a view", scale, lambda: (X, 2), replaced(torch.ones(4, 3)[:2], 2)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back() -> Any:
    yield
    set_global(2)()
    GLOBAL["size"] = 2
    CLOSURE.change(2)
    with_default.__defaults__ = (2,)


def _entries_after(row: Row) -> list[int]:
    """Entries before the change, after it, and when the call is made once more."""
    traced = Traced(row.fn)
    args = row.arguments()
    counts = []
    for _ in range(2):
        for _again in range(2):
            torch.manual_seed(0)
            want = row.fn(*args)
            torch.manual_seed(0)
            assert _shape(traced(*args)) == _shape(want)
            if _again == 0:
                counts.append(traced.entries)
            assert traced.entries == counts[-1], "an equal call was captured again"
        args = row.change(*args) or args
    assert not traced.stops
    return counts


def _shape(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.is_meta:
        return x.shape
    return tuple(map(_shape, x)) if type(x) is tuple else shape_of(x)


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: row.name)
def test_a_changed_fact_makes_an_entry(row: Row) -> None:
    assert _entries_after(row) == [1, 2]


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row.name)
def test_what_is_no_fact_makes_none(row: Row) -> None:
    assert _entries_after(row) == [1, 1]


@dataclasses.dataclass
class Mode:
    name: str
    manager: Callable[[], Any]


MODES = [
    Mode("no_grad", torch.no_grad),
    Mode("inference_mode", torch.inference_mode),
    Mode("autocast", lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    Mode("default dtype", lambda: _DefaultDtype()),
]


class _DefaultDtype:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_modes_have_entries_of_their_own(mode: Mode) -> None:
    def fn(x: Any, w: Any) -> Any:
        return x @ w + torch.ones(3), torch.ones(2)

    traced = Traced(fn)
    args = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
    for _ in range(2):
        assert shape_of(traced(*args)) == shape_of(fn(*args))
        with mode.manager():
            assert shape_of(traced(*args)) == shape_of(fn(*args))
    assert traced.entries == 2
    assert not traced.stops


LENGTHS = [1, 2]
PAIR = (1, 2.5)


class _Last:
    zero = -0.0


def test_parameters_may_hide_builtins() -> None:
    def hiding(
        x: Any, len: Any, type: Any, repr: Any, map: Any, object: Any, slice: Any, set: Any,
        frozenset: Any, iter: Any, list: Any,
    ) -> Any:  # fmt: skip
        _Last.__dict__["zero"]
        LENGTHS.reverse()
        y = x * LENGTHS.__len__() + PAIR[1] + _Last.zero
        return y, builtins.slice(1, 2), builtins.frozenset([1]), builtins.set(), len, list

    fast = fusee.compile(hiding, backend="eager", fullgraph=True)
    for _ in range(3):
        got, want = (call(torch.ones(2), *range(10)) for call in (fast, hiding))
        assert [*map(repr, got)] == [*map(repr, want)]
        assert LENGTHS == [1, 2]


class _Silent(tuple):
    """As e3nn's Irrep: it has elements, but no length."""

    def __len__(self) -> int:
        raise NotImplementedError


class _Long(list):
    def __len__(self) -> int:
        return 7


class _LongDict(dict):
    def __len__(self) -> int:
        return 7


_OF_OWN_LENGTH = _Silent((1, 2)), _Long([1, 2]), _LongDict(a=1)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_length_is_of_the_elements_whatever_a_class_says(is_whole: bool) -> None:
    def fn(x: Any, held: Any) -> Any:
        silent, listed, table = held
        a, b = silent
        y = x * a + listed[1]
        if not is_whole:
            print(end="")
        lengths = list.__len__(listed), dict.__len__(table), tuple.__len__(silent)
        return y * b + silent[0] + sum(listed), len(listed), len(table), lengths, silent

    fast = fusee.compile(fn)
    for size in (2, 4, 3):
        got, want = (call(torch.ones(size), _OF_OWN_LENGTH) for call in (fast, fn))
        assert repr(got) == repr(want)


# ------------------------------------------------------------------------------ many facts


def _captured(function: Any) -> CompiledFunction:
    return CompiledFunction(function, lambda graph, inputs: graph, Policy())


class Counters:
    """Many containers that are written to, and one that is read."""

    def __init__(self, count: int) -> None:
        self.seen = [{"steps": 0} for _ in range(count)]
        self.other = {"steps": 7}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        for counter in self.seen:
            counter["steps"] = counter["steps"] + 1
        return x * self.other["steps"]


def test_containers_that_are_written_to_are_apart() -> None:
    """Facts about which containers are different ones grow with the containers."""
    counters = Counters(40)
    compiled = _captured(Counters.step)
    assert compiled(counters, torch.ones(1)).item() == 7
    assert len(compiled.entries[0].captured.facts.rows) < 40 * 8
    for alias in (counters.seen[5], counters.other):
        mine, theirs = Counters(40), Counters(40)
        for one in (mine, theirs):
            one.seen[3] = one.other if alias is counters.other else one.seen[5]
        assert torch.equal(compiled(mine, torch.ones(1)), theirs.step(torch.ones(1)))
        assert mine.seen == theirs.seen and mine.other == theirs.other


def test_first_miss_of_many_facts() -> None:
    """What does not hold is found by one function, made of all facts."""
    names = [f"scale{k}" for k in range(300)]

    class Scales:
        def __init__(self) -> None:
            self.__dict__.update(dict.fromkeys(names, 1.0))

    def run(x: torch.Tensor, scales: Any) -> torch.Tensor:
        for name in names:
            if getattr(scales, name) != 1.0:
                x = x + 1
        return x

    call, scales = _captured(run), Scales()
    call(torch.ones(1), scales)
    facts = call.entries[0].captured.facts
    assert facts.first_miss({"x": torch.ones(1), "scales": scales}) is None
    scales.__dict__["scale200"] = "none"
    missed = facts.first_miss({"x": torch.ones(1), "scales": scales})
    assert missed is not None and "scale200" in str(missed[0])
    del scales.__dict__["scale200"]
    gone = facts.first_miss({"x": torch.ones(1), "scales": scales})
    assert gone is not None and "scale200" in str(gone[0])


class _Slotted:
    __slots__ = ("k",)


class _Answering(_Slotted):
    def __getattr__(self, name: str) -> int:
        return 7


@pytest.mark.parametrize("kind", [_Slotted, _Answering])
@pytest.mark.parametrize(
    "fn", [lambda x, o: (x, hasattr(o, "k")), lambda x, o: x * getattr(o, "k", 3)]
)
def test_an_empty_slot_is_a_fact(fn: Callable[..., Any], kind: Any) -> None:
    traced, x = Traced(fn), torch.ones(2)
    for k in (None, 1, 2, None):
        o = kind()
        if k is not None:
            o.k = k
        assert str(traced(x, o)) == str(fn(x, o))
