"""torch.inference_mode within programs: one graph, whose results are inference tensors."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusee import api, explain
from fusee.capture import trace
from tests.capturing.same import Traced, same

T = Any
X = torch.arange(6.0).reshape(2, 3)


def within(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
        z = x.view(-1)
        inside = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    return y, z, inside, torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@torch.inference_mode()
def decorated(x: T) -> T:
    return (x * 2).sum(), x


def switched_off(x: T) -> T:
    with torch.inference_mode(), torch.inference_mode(False):
        return x * 2


def with_gradients_on(x: T) -> T:
    with torch.inference_mode(), torch.enable_grad():
        y = x * 2
    return y, torch.is_grad_enabled()


def with_gradients_on_and_autocast(x: T) -> T:
    with torch.autocast("cpu"), torch.inference_mode(), torch.enable_grad():
        return (x @ x.t()).sin()


def before_and_within(x: T) -> T:
    a = x + 1
    with torch.inference_mode():
        y = x * 2
    return a * 3, y


def breaks_within(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
        if y.sum() > 0:
            y = y + 1
    return y, x * 2


def ends_autocast(x: T) -> T:
    with torch.inference_mode(False):
        y = x.mm(x.t())
        torch.set_autocast_enabled("cpu", True)
    return y, x.mm(x.t()), torch.is_autocast_enabled("cpu")


def gradients_again(x: T) -> T:
    with torch.no_grad():
        with torch.inference_mode(False):
            y = x * 2
        z = x * 2
    return y, z, x * 2


def of_gradients_behind_a_break(x: T) -> T:
    y = x.cos()
    with torch.inference_mode():
        zlib.crc32(b"")
        has_gradients = y.requires_grad, y.is_leaf, x.requires_grad
        z = (y * 2).sin()
    return y, z, has_gradients


def parameters_of(x: T) -> T:
    with torch.inference_mode():
        made = nn.Parameter(torch.ones(3)), nn.Parameter(x * 2), torch.ones(2).requires_grad_()
        layer = nn.Linear(2, 2)
    return *made, layer.weight, made[0] * 2


def _kinds(found: T) -> list[tuple[bool, bool]]:
    tensors = [x for x in (found if isinstance(found, tuple) else (found,)) if torch.is_tensor(x)]
    return [(x.is_inference(), x.requires_grad) for x in tensors]


WHOLE = [
    within, decorated, switched_off, with_gradients_on, with_gradients_on_and_autocast,
    ends_autocast, gradients_again,
]  # fmt: skip


@pytest.mark.parametrize(
    "fn",
    [
        *WHOLE, before_and_within, breaks_within, of_gradients_behind_a_break, parameters_of,
    ],
)  # fmt: skip
def test_results_are_of_the_kind_that_eager_gives(fn: Callable[..., Any]) -> None:
    x = X.clone().requires_grad_()
    traced = same(fn, x, breaks=fn not in WHOLE)
    assert _kinds(traced(x)) == _kinds(fn(x))
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert fn not in WHOLE or len(traced.graphs) == 1


@pytest.mark.parametrize("fn", WHOLE)
def test_compiled_by_fusee_itself(fn: Callable[..., Any]) -> None:
    fast = api.compile(fn, fullgraph=True)
    for x in (X, X.clone().requires_grad_() * 1):
        torch.testing.assert_close(fast(x), fn(x))
        assert _kinds(fast(x)) == _kinds(fn(x))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x.add_(1),
        lambda x, y: torch.add(y, 1, out=x),
        lambda x, y: (y.mul_(2), x[1:].zero_()),
        lambda x, y: x.view(-1).copy_(y),
        lambda x, y: (y * 2, x.unsqueeze_(0)),
    ],
)
def test_writes_to_inference_tensors_are_refused(program: Any) -> None:
    """Outside of inference mode, by a version that was made for ordinary tensors too."""
    compiled = api.compile(program)
    for is_ordinary in (True, False, True):
        with torch.inference_mode(not is_ordinary):
            x = torch.ones(3)
        with contextlib.nullcontext() if is_ordinary else pytest.raises(RuntimeError, match="Inpl"):
            compiled(x, torch.ones(3))
        with torch.inference_mode():
            compiled(x, torch.ones(3))


def turns(x: T) -> T:
    with torch.inference_mode(False):
        x.unsqueeze_(0)


def turns_within(x: T) -> T:
    with torch.inference_mode():
        x.unsqueeze_(0)


def test_what_turns_a_tensor_in_place_may_be_of_inference_mode() -> None:
    """A call that raises leaves the modes as they were; one within the mode does not raise."""
    for fn, is_refused in ((turns, True), (turns_within, False)):
        for call in (fn, api.compile(fn)):
            with torch.inference_mode():
                x = torch.ones(3)
                with pytest.raises(RuntimeError) if is_refused else contextlib.nullcontext():
                    call(x)
                assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            assert torch.is_grad_enabled()
            assert x.shape == (1, 3)  # what is refused is refused late


def test_a_refused_write_takes_a_few_attempts_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the program before it is."""
    attempts, begin = [], trace._Attempt.__init__
    monkeypatch.setattr(
        trace._Attempt, "__init__", lambda *args: attempts.append(1) or begin(*args)
    )

    def program(x: T) -> T:
        y = x
        for _ in range(50):
            y = y + 1
        x.add_(1)
        return y

    with torch.inference_mode():
        x = torch.ones(3)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        Traced(program)(x)
    assert len(attempts) <= 6


VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x[:1], lambda x: x.view(-1), lambda x: x.t(), lambda x: x[0].expand(3, 2),
    lambda x: x.unbind()[0], lambda x: x.detach(), lambda x: x + 1, lambda x: x[:][0].view(-1),
)  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_views_of_what_has_gradients_have_some(view: Any, is_leaf: bool) -> None:
    """In inference mode, too, unlike in no_grad."""
    leaf = torch.rand(2, 2, requires_grad=True)
    x = leaf if is_leaf else leaf * 2

    def told(x: torch.Tensor) -> tuple[bool, ...]:
        y = view(x)
        return y.requires_grad, y.is_leaf, y.is_inference()

    compiled = api.compile(told)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert compiled(x) == told(x)


LAYER = nn.Linear(3, 3)
NORM = nn.BatchNorm1d(3)


def of_target(x: T) -> T:
    with torch.inference_mode():
        target = LAYER(x.view(-1, 3)) * LAYER.weight[0]
    return (LAYER(x) - target).pow(2).sum()


def whole_step(x: T) -> T:
    with torch.inference_mode():
        target = LAYER(x).relu()
        low, _ = target.chunk(2, 1)
    loss = (LAYER(x) - target).abs().sum()
    loss.backward()
    for p in LAYER.parameters():
        p.grad = None
    x.grad = None
    return loss.detach(), target, [low, target.sum(1)]


def writes_within(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
        y[0] += 1
        y.mul_(3)
    return x + y


def statistics_within(x: T) -> T:
    with torch.inference_mode():
        y = NORM(x)
    return x + y


def gradients_on_within(x: T) -> T:
    with torch.inference_mode(), torch.enable_grad():
        y = x * 2
    return x + y


def views_of_what_has_gradients(x: T) -> T:
    with torch.inference_mode():
        y = x.view(-1)
    return y * 2, x * 3


def views_given(x: T) -> T:
    z = x.sum()
    with torch.inference_mode():
        y = x.detach().view(-1)
    return z, y


def given_with_gradients(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
    return (x + y).sin(), y


def kept_in_the_module(x: T) -> T:
    with torch.inference_mode():
        LAYER.kept = x * 2
    return (x.detach() + LAYER.kept).sin()


def saved(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
    return x * y


def written_outside(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
    z = x.sin()
    y.add_(1)
    return z


def branches_within(x: T) -> T:
    def written(x: T) -> T:
        y = x.clone()
        y[0] += 1
        return y

    with torch.inference_mode():
        y = torch.cond(x.sum() > 0, written, lambda x: x.sin(), (x,))
    return x + y


def made_leaf(x: T) -> T:
    y = x.detach().sin()
    with torch.inference_mode():
        p = nn.Parameter(y * 2)
    return y, p


MIXED = [of_target, whole_step, writes_within, kept_in_the_module]
MIXED_IN_PIECES = [
    statistics_within, gradients_on_within, views_of_what_has_gradients, views_given,
    given_with_gradients, saved, written_outside, branches_within, made_leaf,
]  # fmt: skip


@pytest.mark.parametrize("fn", [*MIXED, *MIXED_IN_PIECES])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_part_of_a_graph_in_inference_mode(fn: Any, with_gradients: bool) -> None:
    """As in eager; in one graph where nothing shows that this part is of another kind."""
    x, versions = X.clone().requires_grad_(with_gradients), []
    compiled, outcomes = api.compile(fn, backend="eager"), []
    for call in (fn, compiled, compiled):
        NORM.reset_running_stats()
        before = NORM.running_mean._version
        try:
            found = call(x)
            outcomes.append((repr(found), _kinds(found), getattr(LAYER, "kept", x).is_inference()))
        except RuntimeError as error:
            outcomes.append(str(error))
        versions.append(NORM.running_mean._version - before)
    assert outcomes[1] == outcomes[2] == outcomes[0] and len({*versions}) == 1
    if fn in MIXED:
        assert explain(fn, backend="eager")(x).graph_count == 1
