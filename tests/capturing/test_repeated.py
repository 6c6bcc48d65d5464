"""Calls that are like one before: their results are made at once, and are what torch would give."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusee.capture.effects import Repeated
from fusee.capture.frame import Frame
from tests.capturing.same import Traced, same

T = Any
X = torch.arange(24.0).reshape(2, 3, 4)


def like_before_but_for_a_number(x: T) -> T:
    return x.sum(0), x.sum(1), x.sum(1, keepdim=True), x * 2, x * True, x.int() * 2, x.int() * 2.0


def like_before_but_for_strides(x: T) -> T:
    return [(y.relu(), y.contiguous(), y.reshape(-1)) for y in (x, x.mT, x.mT.contiguous().mT)]


def in_place_and_views(x: T) -> T:
    made = []
    for _ in range(2):
        y = x * 2
        y.add_(1)
        y[0] = 3
        z = y.view(-1)
        z.mul_(2)
        made += [y, z, y.narrow(0, 0, 1), torch.relu_(y), F.dropout(y, 0.5, False) is y]
    return made


def with_gradients_and_without(x: T) -> T:
    weight = torch.ones(5, 4)
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append(F.linear(x, weight))
        found += [F.linear(x, weight), x * 2, (x * 2).detach() * 2]
    return found, [(y.requires_grad, y.is_leaf) for y in found]


def within_autocast(x: T) -> T:
    before = x[0] @ x[0].mT
    with torch.autocast("cpu"):
        inside = x[0] @ x[0].mT
    return before, inside, x[0] @ x[0].mT


def that_torch_refuses_to_write_to(x: T, y: T) -> T:
    """linear() gives a view; of one that was made without gradients autograd takes no write."""
    with torch.no_grad():
        made = [F.linear(x, torch.ones(5, 4), torch.ones(5)) for _ in range(2)]
    return [z.mul_(y) for z in made]


PROGRAMS = [
    like_before_but_for_a_number, like_before_but_for_strides, in_place_and_views,
    with_gradients_and_without, within_autocast,
]  # fmt: skip


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program: Callable[..., Any], has_gradients: bool) -> None:
    if has_gradients and program is in_place_and_views:
        program = torch.no_grad()(program)
    same(program, X.clone().requires_grad_(has_gradients))


def test_a_view_of_new_memory_is_one_again() -> None:
    y = torch.ones(5, requires_grad=True)
    assert same(that_torch_refuses_to_write_to, X, y).stops


def test_layers_that_are_alike_run_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = []
    note = Repeated.note
    monkeypatch.setattr(Repeated, "note", lambda *args: (noted.append(args[-1]), note(*args)))

    def count(layers: int) -> int:
        layer = [nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Conv1d(3, 3, 1), nn.Softmax(-1)]
        model = nn.Sequential(*layer * layers)
        noted.clear()
        with torch.no_grad():
            Traced(lambda x: model(x))(X)
        return len(noted)

    assert count(2) == count(7) == 5


# ---------------------------------------------------------------------------- attributes


class Config:
    """As configurations of models: other names for some, and a say about all."""

    other_names: ClassVar = {"width": "hidden_size"}
    asked: ClassVar = []

    def __init__(self) -> None:
        self.hidden_size, self.bias, self.extra = 4, None, {"scale": 2.0}

    def __getattribute__(self, name: str) -> Any:
        if name != "other_names" and name in super().__getattribute__("other_names"):
            name = super().__getattribute__("other_names")[name]
        return super().__getattribute__(name)

    @property
    def scale(self) -> float:
        return self.extra["scale"] * self.width

    @property
    def has_more(self) -> bool:
        return hasattr(self, "more")


class Asked(Config):
    def __getattribute__(self, name: str) -> Any:
        Config.asked.append(name)
        return super().__getattribute__(name)


def reads(x: T, config: Any) -> T:
    for _ in range(3):
        x = x * config.scale + config.width * config.has_more
    return x, config.width, config.bias


def writes_between(x: T, config: Any) -> T:
    before = config.width, config.scale, config.has_more
    config.hidden_size = 5
    middle = config.width, config.scale
    config.extra["scale"] = 3.0
    config.more = x + 1
    return x * config.scale, before, middle, config.has_more, config.more, config.width


def names_another(x: T, config: Any) -> T:
    before = config.width
    names = config.other_names
    names["width"] = "bias"
    try:
        return x * before, config.width
    finally:
        names["width"] = "hidden_size"


def gives_new_objects(x: T, config: Any) -> T:
    methods = config.__init__, config.__init__
    return x + 1, methods[0] is methods[1], config.extra is config.extra


@pytest.mark.parametrize("program", [reads, writes_between, names_another, gives_new_objects])
@pytest.mark.parametrize("kind", [Config, Asked])
def test_attributes_by_code_of_the_program(program: Callable[..., Any], kind: type) -> None:
    same(program, X, kind())


def test_a_method_that_only_reads_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, names = Frame.run, []

    def spy(f: Frame) -> Any:
        names.append(f.code.co_name)
        return run(f)

    monkeypatch.setattr(Frame, "run", spy)
    traced = Traced(lambda x, config: [x * config.width for _ in range(4)])
    torch.testing.assert_close(traced(X, Config())[3], X * 4)
    assert names.count("__getattribute__") == 1


def test_an_object_is_asked_as_often_as_in_eager() -> None:
    config = Asked()
    traced, seen = Traced(lambda x: x * config.width * config.width * config.scale), []
    for function in (lambda x: x * config.width * config.width * config.scale, traced, traced):
        Config.asked.clear()
        function(X)
        seen.append([*Config.asked])
    assert seen[0] == seen[1] == seen[2]
