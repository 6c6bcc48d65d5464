"""When Python's garbage collector rests: while a function is compiled, never while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

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
