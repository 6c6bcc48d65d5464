"""An object's whole `__dict__` may be replaced between calls: what counts is the one it has now."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusee
from fusee.capture import entries, guards
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from fusee.persist import Keeper
from fusee.runtime.cache import ObjectCache
from fusee.runtime.change_detection import available
from tests.capturing.differences import backend


class Settings:
    def __init__(self) -> None:
        self.gain = 2.0


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 3.0
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = 1.0
        return x * self.weight * self.gain


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 5.0
        self.child = Child()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.child(x) * self.gain * self.settings.gain * SETTINGS.gain
        SETTINGS.last = 2.0  # type: ignore[attr-defined]
        self.settings.last = 3.0  # type: ignore[attr-defined]
        self.last = 4.0
        return x, self.child.last, SETTINGS.last, self.settings.last  # type: ignore[attr-defined]


class Asked:
    """Whoever asks it for an attribute is counted."""

    def __init__(self) -> None:
        self.gain = 2.0

    def __getattribute__(self, name: str) -> Any:
        ASKED.append(name)
        return object.__getattribute__(self, name)


class Loud(dict[str, Any]):
    """No attribute is looked up by way of these."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)

    def __contains__(self, key: object) -> bool:
        raise LookupError(key)


PARENT, SETTINGS = Parent(), Settings()
ASKED: list[str] = []
A = Asked()
X = torch.tensor([1.0, -2.0])


def of_module(x: torch.Tensor) -> Any:
    return PARENT(x)


def of_child(x: torch.Tensor) -> Any:
    PARENT.child.last = 6.0
    return x * PARENT.child.gain


def of_settings(x: torch.Tensor) -> Any:
    SETTINGS.last = 6.0  # type: ignore[attr-defined]
    return x * SETTINGS.gain


def of_asked(x: torch.Tensor) -> Any:
    return x * A.gain


def of_function(x: torch.Tensor) -> Any:
    of_function.last = 7.0  # type: ignore[attr-defined]
    return x * of_function.gain  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PARENT", Parent())
    monkeypatch.setitem(globals(), "SETTINGS", Settings())
    of_function.__dict__ = {"gain": 2.0}
    ASKED.clear()


OWNERS: dict[str, Callable[[], Any]] = {
    "global": lambda: SETTINGS,
    "attribute": lambda: PARENT.settings,
    "module": lambda: PARENT,
    "child": lambda: dict.__getitem__(PARENT.__dict__, "_modules")["child"],
    "function": lambda: of_function,
}

NEW: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "equal": dict,
    "another value": lambda d: {**d, "gain": 7.0},
    "one lacks": lambda d: {key: x for key, x in d.items() if key != "gain"},
    "of a subclass": lambda d: Loud({**d, "gain": 7.0}),
}


def compiled(which: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What is called eagerly, and the same compiled."""
    if which == "module":
        return PARENT, fusee.compile(PARENT)
    fn = globals()[which]
    return fn, CompiledFunction(fn, backend, Policy())


def told(call: Callable[..., Any]) -> tuple[Any, ...]:
    """What a call gives, and what it wrote where; what it wrote is taken back."""
    try:
        result = call(X)
    except (AttributeError, LookupError) as error:
        result = repr(error)
    shown = repr(result)
    written = []
    for name, find in OWNERS.items():
        names = find().__dict__
        written.append((name, [*dict.keys(names)], dict.pop(names, "last", None)))
    return shown, written


def replace(owner: Any, names: dict[str, Any]) -> dict[str, Any]:
    before: dict[str, Any] = owner.__dict__
    object.__setattr__(owner, "__dict__", names)
    assert owner.__dict__ is names
    return before


ROWS = [
    *[(which, of) for which in ("module", "of_module") for of in [*OWNERS][:4]],
    ("of_child", "child"),
    ("of_settings", "global"),
    ("of_function", "function"),
]


@pytest.mark.parametrize(
    ("which", "of", "new"),
    # nn.Module.__getattr__ asks its dict by the methods of the dict's class
    [(*row, new) for row in ROWS for new in NEW if (row[1], new) != ("module", "of a subclass")],
)
def test_replaced(which: str, of: str, new: str) -> None:
    eager, call = compiled(which)
    for _ in range(3):
        assert told(call) == told(eager)
    count = None if which == "module" else len(call.entries)  # type: ignore[attr-defined]
    owner = OWNERS[of]()
    before = replace(owner, NEW[new](owner.__dict__))
    was = dict(before)
    for _ in range(3):
        assert told(call) == told(eager), "after it was replaced"
    assert before == was, "what was replaced is left alone"
    if count is not None and new == "equal":
        assert len(call.entries) == count, "what is the same needs no capture"  # type: ignore[attr-defined]
    for change in (lambda d: d.update(gain=9.0), lambda d: d.pop("gain")):
        change(owner.__dict__)
        assert told(call) == told(eager), "the new one is watched too"
    replace(owner, before)
    assert told(call) == told(eager), "put back"
    if count is not None and new == "equal":
        assert len(call.entries) == count + 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("one", "other"), [("child", "module"), ("global", "attribute")])
@pytest.mark.parametrize("first", [False, True], ids=["shared later", "shared at first"])
def test_shared(one: str, other: str, first: bool) -> None:
    """Two objects with one `__dict__`: what is written to either is read of both."""
    eager, call = compiled("of_module")
    owner, names = OWNERS[one](), OWNERS[other]().__dict__
    own = owner.__dict__
    for k in range(4):
        replace(owner, names if (k % 2 == 0) == first else {**own, "gain": 4.0})
        assert told(call) == told(eager), k
        assert told(call) == told(eager), k
    assert len(call.entries) == 2  # type: ignore[attr-defined]


def test_a_copy_of_what_is_shared() -> None:
    """Objects that shared a `__dict__` of the same content, and no longer do."""
    eager, call = compiled("of_module")
    replace(SETTINGS, PARENT.settings.__dict__)
    assert told(call) == told(eager)
    replace(SETTINGS, dict(PARENT.settings.__dict__))
    assert told(call) == told(eager)
    replace(SETTINGS, {**PARENT.settings.__dict__, "gain": 8.0})
    assert told(call) == told(eager)


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize(("which", "of"), [("of_module", "child"), ("of_settings", "global")])
def test_kept(
    which: str, of: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that was read from disk looks at the dict that is there now."""
    fn, whole = globals()[which], entries.capture
    captures: list[Any] = []

    def counted(*args: Any) -> Any:
        captures.append(args)
        return whole(*args)

    monkeypatch.setattr(entries, "capture", counted)
    for replaced_after in range(3):
        keeper = Keeper(cache=ObjectCache(tmp_path / str(replaced_after), 2**24))
        assert told(CompiledFunction(fn, backend, Policy(), keeper=keeper)) == told(fn)
        captures.clear()
        owner, call = OWNERS[of](), CompiledFunction(fn, backend, Policy(), keeper=keeper)
        for _ in range(replaced_after):
            assert told(call) == told(fn)
        assert not captures
        before = replace(owner, NEW[new](owner.__dict__))
        for _ in range(3):
            assert told(call) == told(fn), replaced_after
        assert (new == "equal") == (not captures)
        replace(owner, before)


def test_nobody_is_asked() -> None:
    """A check runs no code of the user's."""
    _, call = compiled("of_asked")
    call(X)
    ASKED.clear()
    replace(A, {"gain": 3.0})
    ASKED.clear()
    assert call(X).equal(X * 3)
    ASKED.clear()
    call(X)
    assert len(ASKED) == 1  # by the program, as in eager


@pytest.mark.parametrize("of_child", [False, True])
def test_a_class_that_is_replaced_is_seen(of_child: bool) -> None:
    class Other(nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    model: Any = nn.Sequential(nn.ReLU()) if of_child else nn.ReLU()
    fast = fusee.compile(lambda x: model(x), backend="eager")
    x = torch.ones(2)
    assert torch.equal(fast(x), x)
    (model[0] if of_child else model).__class__ = Other
    assert torch.equal(fast(x), x * 3)


@pytest.mark.skipif(not available(), reason="nothing is watched")
def test_a_check_is_as_long_for_many_modules_as_for_few() -> None:
    def lines(depth: int) -> int:
        model = nn.Sequential(*(nn.ReLU() for _ in range(depth)))
        traced = CompiledFunction(lambda x: model(x), backend, Policy())  # type: ignore[arg-type]
        traced(torch.ones(2))
        (entry,) = traced.entries
        return entry.check_source().partition("# _watched")[0].count("\n")

    assert lines(20) == lines(10)


def test_checks_do_not_ask_for_what_is_missing() -> None:
    asked: list[str] = []

    class Missing(dict[str, int]):
        def __missing__(self, key: str) -> int:
            asked.append(key)
            return 5

    def fn(x: torch.Tensor, d: dict[str, int]) -> Any:
        return x * d["a"] if "a" in d else x

    traced, x = CompiledFunction(fn, backend, Policy()), torch.ones(2)  # type: ignore[arg-type]
    makers: Any = (
        Missing,
        functools.partial(collections.defaultdict, lambda: asked.append("made")),
    )
    for make in makers:
        made = make({"a": 2})
        assert traced(x, made).tolist() == [2.0, 2.0]
        made.pop("a")
        assert traced(x, made) is x
        assert (asked, len(made)) == ([], 0)


class Averaging(nn.Module):
    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: torch.Tensor, places: dict[int, float], at: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.center = self.center * 0.9 + x.mean(0)
        return x * places[at]


@torch.no_grad()
def test_what_is_replaced_beside_a_number_that_fits_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All facts are looked at again only once the one is there that was missed the last time."""
    model, places = Averaging(), {k: 0.5 * k for k in range(40)}
    compiled = fusee.compile(model, backend="eager")
    x, asked = torch.randn(2, 3), 0
    for at in range(16):
        compiled(x, places, at)
    unlike = guards.Facts.unlike

    def counting(self: guards.Facts, look: Any) -> Any:
        nonlocal asked
        asked += 1
        return unlike(self, look)

    monkeypatch.setattr(guards.Facts, "unlike", counting)
    for at in range(16, 40):
        before = model.center.clone()
        got = compiled(x, places, at)
        model.center = before
        assert torch.equal(got, model(x, places, at))
    assert asked == 0
    assert torch.equal(compiled(x, places, 1), model(x, places, 1))
