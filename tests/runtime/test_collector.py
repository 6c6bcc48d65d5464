"""When Python's garbage collector rests: while a function is compiled, never while it runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, fx

import fusee
from fusee.backends import Backend


def test_it_rests_while_a_function_is_made_and_not_while_it_runs() -> None:
    seen: list[tuple[str, bool]] = []

    def validate(options: Mapping[str, object]) -> None:
        seen.append(("validate", gc.isenabled()))

    def build(
        gm: fx.GraphModule, inputs: Sequence[object], options: Mapping[str, object]
    ) -> Callable[..., object]:
        seen.append(("compile", gc.isenabled()))

        def run(*inputs: object) -> object:
            seen.append(("run", gc.isenabled()))
            return gm.forward(*inputs)

        return run

    def users(x: Tensor) -> Tensor:
        seen.append(("users", gc.isenabled()))
        return x

    between = torch.compiler.disable(users)
    fn = fusee.compile(
        lambda x: between(x + 1) * 2, backend=Backend("watched", build, "", validate=validate)
    )
    assert fn(torch.ones(3)).sum() == 12
    assert seen == [
        ("validate", False),
        ("compile", False),
        ("run", True),
        ("users", True),
        ("compile", False),
        ("run", True),
    ]
    assert gc.isenabled()


def many(x: Tensor) -> Tensor:
    for _ in range(300):
        x = torch.relu(x * 2) + 1
    return x


def old() -> int:
    return len(gc.get_objects(generation=2))


@pytest.mark.parametrize("has_frozen", [False, True])
def test_what_compiling_makes_is_old(has_frozen: bool) -> None:
    """So that no collection goes through it; what the program has frozen stays so."""
    gc.unfreeze()
    gc.collect()
    if has_frozen:
        gc.freeze()
    before = old()
    passes: list[int] = []
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
    try:
        compiled = fusee.compile(many)
        compiled(torch.ones(4))
        assert (gc.get_freeze_count() > 5_000) == has_frozen  # Python 3.12 has some of its own
        assert (old() - before > 5_000) == (not has_frozen)
        assert has_frozen or 2 not in passes
    finally:
        gc.callbacks.pop()
        gc.freeze()  # as it is in all tests


def test_few_frozen_objects_are_the_interpreters_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with some 400; programs freeze all that they have."""
    gc.unfreeze()
    gc.collect()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 400)
    before = old()
    try:
        fusee.compile(many)(torch.ones(4))
        assert old() - before > 5_000
    finally:
        gc.freeze()  # as it is in all tests


def test_a_capture_leaves_no_cycle_that_keeps_a_result() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x).relu()
            return found

    compiled = fusee.compile(Net())
    gc.collect()
    gc.disable()
    try:
        ended = weakref.ref(compiled(torch.ones(2, 4)).grad_fn)
        assert ended() is None
    finally:
        gc.enable()
