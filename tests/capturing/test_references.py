"""Weak references that the program makes: they lead to what they do in eager, or nowhere."""

# Programs under test: mistakes are meant.
# mypy: ignore-errors

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import ExactWeakKeyDictionary

from tests.capturing.same import Traced


class Thing:
    pass


OUTSIDE, LINEAR = Thing(), nn.Linear(3, 3)


def to_its_own(x):
    thing = Thing()
    ref = weakref.ref(thing)
    same = ref() is thing, weakref.ref(thing) is ref
    del thing
    return x * 2, ref() is None, same


def in_a_list(x):
    things = [Thing()]
    ref = weakref.ref(things[0])
    before = ref() is things[0]
    things.clear()
    return x * 2, before, ref() is None


def to_what_is_outside(x):
    ref = weakref.ref(OUTSIDE)
    return x * 2, ref() is OUTSIDE, ref


def to_a_module(x):
    return weakref.ref(LINEAR)()(x)


def to_parents(x):
    parent, child = Thing(), Thing()
    child.parent, parent.child, parent.y = weakref.ref(parent), child, x * 2
    return parent.child.parent().y + 1, parent


def after_a_break(x):
    thing, gone = Thing(), Thing()
    ref, other = weakref.ref(thing), weakref.ref(gone)
    del gone
    y = x * 2
    sys.stdout.write("")
    return y + 1, ref() is thing, other() is None


def of_tensors(x):
    y = x * 2
    ref = weakref.ref(y)
    del y
    return ref() is None


def that_calls_back(x):
    said, thing = [], Thing()
    ref = weakref.ref(thing, lambda ref: said.append(1))
    del thing
    return x * 2, said, ref() is None


def to_what_is_taken_away(x):
    OUTSIDE.child = Thing()
    sys.stdout.write("")
    ref = weakref.ref(OUTSIDE.child)
    OUTSIDE.child = None
    return x * 2, ref() is None


WHOLE = [to_its_own, in_a_list, to_what_is_outside, to_a_module, to_parents]
BROKEN = [after_a_break, of_tensors, that_calls_back, to_what_is_taken_away]


def shown(x: Any) -> Any:
    if isinstance(x, weakref.ref):
        return x() is OUTSIDE
    if isinstance(x, Thing):
        return shown(x.child.parent().y)
    return x.tolist() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("program", WHOLE + BROKEN)
def test_as_in_eager(program: Callable[..., Any]) -> None:
    def outcome(call: Callable[..., Any]) -> Any:
        found = call(torch.ones(2, 3))
        return [shown(x) for x in (found if isinstance(found, tuple) else (found,))]

    traced = Traced(program)
    want = outcome(program)
    for _ in range(2):
        assert outcome(traced) == want
    assert bool(traced.stops) == (program in BROKEN)


def test_what_torch_watches_may_be_let_go_of() -> None:
    """TorchDynamo, once used, has a reference with a callback to each module: no program hears."""
    module, watched = torch.nn.Linear(3, 3), ExactWeakKeyDictionary()
    watched[module] = 1

    def fn(of: Any, x: Any) -> Any:
        m = of[0]
        sys.stdout.write("")
        y = m(x)
        del m
        return y

    traced = Traced(fn)
    traced([module], torch.ones(2, 3))
    assert len(traced.graphs) == 1 and not any("let go of" in stop for stop in traced.stops)
