"""What a compiled function does when the function, or the model that it is of, becomes another."""

# mypy: ignore-errors

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fusee
from fusee import api, log
from tests.capturing.same import Traced
from tests.counting import Counting

T = Any
X = torch.arange(3.0)


def test_defaults_and_code_that_are_assigned() -> None:
    def step(x: T, scale: T = 2.0, *, shift: T = 1) -> T:
        return x * scale + shift

    def other(x: T, *rest: T, sign: T = -1) -> T:
        return x * sign * len(rest)

    traced = Traced(step)
    torch.testing.assert_close(traced(X), X * 2 + 1)
    step.__defaults__, step.__kwdefaults__ = (3.0,), {"shift": X}
    torch.testing.assert_close(traced(X), X * 3 + X)
    torch.testing.assert_close(traced(X, 2.0, shift=1), X * 2 + 1)
    step.__defaults__ = None
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'scale'"):
        traced(X)
    step.__code__, step.__kwdefaults__ = other.__code__, {"sign": -1}
    torch.testing.assert_close(traced(X, 1), X * -1)  # a call that the old code takes too
    torch.testing.assert_close(traced(X, 1, 2), X * -2)
    torch.testing.assert_close(traced(X, 1, sign=4), X * 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift'"):
        traced(X, shift=1)


class Scaled:
    def scaled(self, x: T) -> T:
        return x * 2

    @staticmethod
    def shifted(x: T) -> T:
        return x + 1


def _helper(x: T) -> T:
    return x - 5


@pytest.mark.parametrize("between", ["", "print(end='')"])
def test_code_of_functions_within_that_is_assigned(between: str, request: Any) -> None:
    """As IPython's autoreload does."""
    names = {"helper": _helper, "made": Scaled(), "kind": Scaled}
    exec(f"def fn(x):\n y = helper(x)\n {between}\n return kind.shifted(made.scaled(y))", names)
    fn, traced = names["fn"], Traced(names["fn"])
    for function, code in (
        (_helper, lambda x: x - 7),
        (Scaled.scaled, lambda self, x: x * 3),
        (Scaled.shifted, lambda x: x + 9),
    ):
        request.addfinalizer(partial(setattr, function, "__code__", function.__code__))
        for _ in range(2):
            assert torch.equal(traced(X), fn(X))
        function.__code__ = code.__code__
        entries = traced.entries
        for _ in range(2):
            assert torch.equal(traced(X), fn(X))
        assert traced.entries == entries + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: T) -> T:
        return self.layer(x)


def test_copies_of_a_model_have_versions_of_their_own() -> None:
    backend = Counting()
    net = Net()
    net.forward = api.compile(net.forward, backend=backend, fullgraph=True)
    net(X)
    copies = [copy.deepcopy(net) for _ in range(10)]
    for one in copies:
        with torch.no_grad():
            one.layer.bias += 1
        torch.testing.assert_close(one(X), Net.forward(one, X))
        one(X)
    assert len(backend.graphs) == 11
    net(X)
    assert len(backend.graphs) == 11  # not pushed out by its copies
    refs = [weakref.ref(one) for one in copies]
    del copies, one
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]


N = [3]


def hides_results(_out: Any, x: Any) -> Any:
    return _out * 2 + x * N[0]


def hides_constants(_k0: Any, _graph: Any = 1, *, _v0: Any = 2) -> Any:
    return (_k0 * 2).relu(), _graph + 1, N, _v0


def hides_errors(_error: Any, _f: Any = 2, *_r: Any, **_w: Any) -> Any:
    return (_error * _f).sum(), N, _r, _w


def hides_a_stack(_s0: Any, _c_x: Any, _h: Any) -> Any:
    kept = lambda: _c_x  # noqa: E731
    y = _s0 + (_c_x if float(_s0.sum()) > 0 else -_c_x) * kept() + _h
    return y, p_s0(_s0), kept()


def p_s0(_before: Any) -> Any:
    return torch.dropout(_before, 0.5, True)


def hides_entries(_e: Any, __e: Any, p_e: Any) -> Any:
    return _e - __e * p_e


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "fn", [hides_results, hides_constants, hides_errors, hides_a_stack, p_s0, hides_entries]
)
def test_parameters_may_have_the_names_of_generated_code(fn: Any, grad: bool) -> None:
    count = fn.__code__.co_argcount - len(fn.__defaults__ or ())
    args = [torch.tensor([1.0, 2.0, k]) for k in range(count)]
    compiled = fusee.compile(fn)
    with torch.set_grad_enabled(grad):
        for x in (1, 2, 1):
            torch.manual_seed(0)
            want = fn(args[0] * x, *args[1:])
            torch.manual_seed(0)
            torch.testing.assert_close(compiled(args[0] * x, *args[1:]), want)
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: '_?_?\w+'"):
            compiled(*args[1:])


def test_a_miss_names_the_programs_variables() -> None:
    compiled = fusee.compile(lambda _k0, _n: _k0 * _n)
    seen: list[str] = []
    undo = log.subscribe(lambda record: seen.append(record.text), "recompiles")
    try:
        compiled(torch.ones(2), 1)
        compiled(torch.ones(2), 2)
    finally:
        undo()
    assert any("_n was 1, is 2" in text for text in seen), seen
