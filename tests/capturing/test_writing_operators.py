"""Operators that write to their operands stay in the graph, whatever they give back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)

import fusee
from fusee.backends import lookup

LIBRARY = torch.library.Library("fusee_writing", "DEF")
GIVES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "nothing": ("()", lambda x: None),
    "a_tensor": ("Tensor", lambda x: x.clone()),
    "a_number": ("int", lambda x: 3),
}


def _implementation(result: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def write(x: Tensor) -> Any:
        x.add_(1)
        return result(x)

    return write


for _name, (_kind, _result) in GIVES.items():
    LIBRARY.define(f"{_name}(Tensor(a!) x) -> {_kind}")
    LIBRARY.impl(_name, _implementation(_result), "CompositeExplicitAutograd")


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize("name", GIVES)
def test_a_custom_operator(name: str, backend: str) -> None:
    packet = getattr(torch.ops.fusee_writing, name)
    for operator in (packet, packet.default):

        def program(x: Tensor, operator: Any = operator) -> Tensor:
            y = x * 2
            operator(x)
            operator(y)
            return x + y

        given = torch.zeros(3), torch.zeros(3)
        got = fusee.compile(program, backend=lookup(backend))(given[0])
        assert torch.equal(got, program(given[1])) and torch.equal(*given)


def test_a_fused_optimizer_kernel() -> None:
    def program(p: list[Tensor], g: list[Tensor], buffer: list[Tensor]) -> None:
        options: Any = dict(weight_decay=0.1, momentum=0.9, lr=0.1, dampening=0.0)
        torch._fused_sgd_(
            p, g, buffer, **options, nesterov=False, maximize=False, is_first_step=True
        )

    made = []
    for run in (program, fusee.compile(program, backend="eager", fullgraph=True)):
        lists = [[torch.ones(3)] for _ in range(3)]
        run(*lists)
        made.append([x for one in lists for x in one])
    assert all(torch.equal(x, y) for x, y in zip(*made, strict=True))
    assert not torch.equal(made[0][0], torch.ones(3))


@pytest.mark.parametrize("rows", [False, True])
def test_fake_quantization_that_observes(rows: bool) -> None:
    """As in quantization-aware training: the first call gives what it writes to its size."""
    found: list[Any] = []
    for is_compiled in (False, True):
        kind = torch.per_channel_symmetric if rows else torch.per_tensor_affine
        quantize: Any = FusedMovingAvgObsFakeQuantize(
            (MovingAveragePerChannelMinMaxObserver if rows else MovingAverageMinMaxObserver),
            *(-128, 127), dtype=torch.qint8, qscheme=kind,
        )  # fmt: skip

        def program(x: Tensor, quantize: Any = quantize) -> Tensor:
            return quantize(x.sin()).cos()

        call = fusee.compile(program, options={"prices": False}) if is_compiled else program
        for turn in range(4):
            x = torch.linspace(-1, 2 + turn, 12).view(3, 4).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("error" if turn else "ignore")
                y = call(x)
            y.sum().backward()
            found += [y.detach(), x.grad, *(b.clone() for b in quantize.buffers())]
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half])


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_operators_in_place(name: str, backend: str) -> None:
    change = getattr(import_module("operator"), f"i{name}")
    compiled = fusee.compile(lambda x, y: change(x, y), backend=backend, fullgraph=True)
    for y in (torch.tensor([2.0, 0.5, 3.0]), 2):
        given = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
        assert compiled(given[0], y) is given[0]
        change(given[1], y)
        torch.testing.assert_close(*given)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, i: x.index_copy_(0, i, x),
        lambda x, i: x.scatter_(0, i, x),
        lambda x, i: x.put_(i, x),
        lambda x, i: x.index_add_(0, i, x),
        lambda x, i: x.index_put_((i,), x),
        lambda x, i: x.masked_scatter_(x > 0, x),
        lambda x, i: (x.add_(x), x.copy_(x), x.pow_(x), x.mul_(x[:]), x.cumsum_(0)),
    ],
)
def test_an_operand_that_is_written_to(write: Callable[[Tensor, Tensor], Any]) -> None:
    """ATen refuses it where elements do not stay at their places."""

    def outcome(run: Any) -> Any:
        x = torch.tensor([1.0, 2.0, 0.5])
        try:
            run(x, torch.tensor([2, 1, 0]))
        except RuntimeError as error:
            return str(error)
        return x.tolist()

    assert outcome(fusee.compile(write)) == outcome(write)


@pytest.mark.parametrize("backend", ["eager", "fusee"])
def test_names_like_those_that_write(backend: str) -> None:
    """operator.and_ and operator.or_ end in an underscore as words of Python do."""

    def call(x: Tensor) -> Tensor:
        rows = x > 0
        return (rows.view(3, 1) & rows.view(1, 3)) | (rows & rows)

    compiled = fusee.compile(call, backend=backend, fullgraph=True)
    for x in (torch.tensor([1.0, -1.0, 2.0]), torch.zeros(3)):
        assert torch.equal(compiled(x), call(x))
