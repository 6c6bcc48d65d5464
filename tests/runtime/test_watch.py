"""Dicts under watch: every kind of change is seen, and nothing else is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusee.runtime import change_detection
from fusee.runtime.change_detection import (
    CheckTable,
    Open,
    Read,
    Watch,
    available,
    can_watch,
    changed,
    differs,
    pointer,
)
from fusee.runtime.llvm_text import Step

pytestmark = pytest.mark.skipif(not available(), reason="dicts have no version in this Python")


class Holder:
    def __init__(self) -> None:
        self.kept = 1


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another value": lambda d: d.__setitem__("kept", 2),
    "an equal value": lambda d: d.__setitem__("kept", True),
    "one more": lambda d: d.__setitem__("more", 1),
    "one less": lambda d: d.__delitem__("kept"),
    "update": lambda d: d.update(kept=3),
    "setdefault": lambda d: d.setdefault("more", 1),
    "pop": lambda d: d.pop("kept"),
    "clear": lambda d: d.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("of", ["instance", "dict", "module"])
def test_changes_are_seen(name: str, of: str) -> None:
    holders: dict[str, Any] = {"instance": Holder(), "module": types.ModuleType("one")}
    names: dict[str, Any] = holders[of].__dict__ if of in holders else {}
    names["kept"] = 1
    watch = Watch([{}, names, {}])
    assert changed()(watch.address) == -1
    CHANGES[name](names)
    assert changed()(watch.address) == 1
    watch.note(1)
    assert changed()(watch.address) == -1


def test_attributes_that_are_set_are_seen() -> None:
    holder = Holder()
    watch = Watch([holder.__dict__])
    for _ in range(100):  # the interpreter specialises the store meanwhile
        assert changed()(watch.address) == -1
        holder.kept += 1
        assert changed()(watch.address) == 0
        watch.note(0)


def test_reading_is_no_change() -> None:
    holder = Holder()
    watch = Watch([holder.__dict__])
    assert (holder.kept, list(holder.__dict__), len(vars(holder))) == (1, ["kept"], 1)
    assert changed()(watch.address) == -1


class Number(int):
    """Its `__dict__` lies behind the digits."""


def test_a_dict_that_is_replaced_is_seen() -> None:
    def function() -> None:
        """It keeps its attributes, if any, where its class says."""

    for owner in (Holder(), function, torch.nn.Linear(2, 2), ValueError(1), torch.ones(2)):
        names = owner.__dict__
        watch = Watch([{}], owners=[(owner, names)])
        for new in (dict(names), {}):
            assert changed()(watch.address) == -1
            owner.__dict__ = new
            assert changed()(watch.address) == 1
            owner.__dict__ = names
    assert pointer(Number(3)) is None or sys.version_info >= (3, 12)


TENSOR_CHANGES: dict[str, tuple[bool, Callable[[torch.Tensor], object]]] = {
    "values": (False, lambda x: x.data.add_(1)),
    "gradient": (False, lambda x: (x * 2).sum().backward()),
    "other memory": (False, lambda x: setattr(x, "data", torch.randn(4, 6))),
    "size": (True, lambda x: setattr(x, "data", torch.randn(4, 5))),
    "dimensions": (True, lambda x: setattr(x, "data", torch.randn(4, 6, 1))),
    "strides": (True, lambda x: setattr(x, "data", torch.randn(6, 4).t())),
    "dtype": (True, lambda x: setattr(x, "data", torch.randn(4, 6).double())),
    "requires_grad": (True, lambda x: x.requires_grad_(False)),
}


@pytest.mark.parametrize("name", TENSOR_CHANGES)
def test_tensors(name: str) -> None:
    seen, change = TENSOR_CHANGES[name]
    tensors = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    assert all(map(can_watch, tensors))
    watch = Watch([{}], tensors)
    change(tensors[1])
    assert changed()(watch.address) == (2 if seen else -1)
    table = CheckTable([None, *tensors])
    assert differs()(table.address, [None, *tensors]) == -1
    others = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    assert differs()(table.address, [None, *others]) == (2 if seen else -1)
    assert differs()(table.address, [None, *tensors[:2], tensors[2].data]) == 3


def test_tables_see_classes_and_nothing_of_where_a_tensor_comes_from() -> None:
    x = torch.randn(4, 6)
    table = CheckTable([x])
    same = [
        x.clone(),
        x.detach(),
        x.data,
        torch.randn(6, 4).t().contiguous(),
        torch.ones(9, 4, 6)[3],
    ]
    grown = torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        (grown * 2).sum().backward()
        assert grown.grad is not None
        same.append(grown.grad)
    assert [differs()(table.address, [y]) for y in same] == [-1] * len(same)
    others = [None, 1, torch.nn.Parameter(x), x.t(), x.double(), x.clone().requires_grad_()]
    others += [grown * 2, grown.t().t(), grown.view(4, 6)]
    assert [differs()(table.address, [y]) for y in others] == [0] * len(others)
    assert differs()(CheckTable([None]).address, [x]) == 0


def test_a_view_requires_what_its_base_does() -> None:
    base = torch.randn(4, 6)
    views = [base[:], base.view(4, 6)[:, :], torch.no_grad()(lambda: base[:])()]
    table, opened = CheckTable([base.clone()]), CheckTable([], [Open(base, (None, 6), (6, 1))])
    watch = Watch([], views)
    tables = [CheckTable([torch.randn(4, 6).requires_grad_()]), table, opened]
    assert [differs()(one.address, [y]) for y in views for one in tables] == [0, -1, -1] * 3
    base.requires_grad_()
    assert [differs()(one.address, [y]) for y in views for one in tables] == [-1, 0, 0] * 3
    assert changed()(watch.address) == 0
    base.requires_grad_(False)
    assert [differs()(one.address, [y]) for y in views for one in tables] == [0, -1, -1] * 3
    assert changed()(watch.address) == -1
    base.mul_(torch.ones(1, requires_grad=True))
    assert [differs()(one.address, [y]) for y in views for one in tables] == [0] * 9


def test_tables_of_open_sizes() -> None:
    x = torch.randn(4, 6)
    table = CheckTable([], [Open(x, (None, 6), (6, 1))])
    same = [x, torch.ones(1, 6), torch.ones(9, 6)[2:5], torch.ones(1000, 6)]
    assert [differs()(table.address, [y]) for y in same] == [-1] * len(same)
    others = [
        None, 1, torch.ones(0, 6), torch.ones(4, 5), torch.ones(4), torch.ones(4, 6, 1),
        torch.ones(6, 4).t(), x.double(), x.clone().requires_grad_(), torch.nn.Parameter(x),
        torch.ones(4, 12)[:, ::2], torch.ones(4, 6, device="meta"),
    ]  # fmt: skip
    assert [differs()(table.address, [y]) for y in others] == [0] * len(others)
    strided = CheckTable([None], [Open(x, (None, 6), (None, 1))])
    assert differs()(strided.address, [None, torch.ones(4, 12)[:, :6]]) == -1
    assert differs()(strided.address, [x, x]) == 0
    assert differs()(strided.address, [None, x.t()]) == 1


def test_what_holds_between_sizes() -> None:
    x, y = torch.randn(4, 6), torch.randn(8, 6)
    # x.size(0) * 2 == y.size(0), a number that is read of a third; and x.stride(0) == 6
    read = [Read(0, "size"), Read(1, "size"), Read(0, "stride"), Read(2, "int")]
    steps: list[Step] = [
        ("number", 0, 0, 0), ("+", 4, 0, 2), ("==", 5, 1, 0), ("number", 0, 0, 6), ("==", 2, 7, 0),
        ("%", 3, 7, 0), ("==", 9, 4, 0),
    ]  # fmt: skip
    opened = [Open(one, (None, 6), (None, 1)) for one in (x, y)]
    table = CheckTable([], opened, read, steps, [6, 8, 10])

    def found(a: int, b: int, *rest: Any, wide: int = 6) -> int:
        given = torch.ones(a, wide)[:, :6], torch.ones(b, 6)
        return differs()(table.address, [*given, *rest])

    assert found(4, 8, 12) == found(1, 2, -6) == found(500, 1000, 0) == -1
    assert found(4, 9, 12) == found(4, 8, 13) == found(4, 8, 12, wide=7) == 2
    for other in (True, 12.0, "12", None, 6 * 2**70, -6 * 2**70):
        assert found(4, 8, other) == 2
    assert found(4, 8, 6 * 2**59) == -1


LIST_CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "another element": lambda x: x.__setitem__(1, "other"),
    "more": lambda x: x.append(1),
    "fewer": lambda x: x.pop(),
    "order": lambda x: x.reverse(),
    "none": lambda x: x.clear(),
}


@pytest.mark.parametrize("name", LIST_CHANGES)
def test_lists(name: str) -> None:
    lists: list[list[Any]] = [[], [object(), 2, "three"], [4]]
    watch = Watch([{}], [torch.randn(3)], lists)
    assert changed()(watch.address) == -1
    lists[2].append(lists[2].pop())
    assert changed()(watch.address) == -1
    LIST_CHANGES[name](lists[1])
    assert changed()(watch.address) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_where_things_lie_is_found_whatever_a_program_has_as_its_default(
    dtype: torch.dtype,
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert change_detection._places.__wrapped__() is not None
    finally:
        torch.set_default_dtype(before)
