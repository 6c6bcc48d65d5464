"""Dropout masks: torch's stream, bit by bit, before, within and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusee
from fusee.backends import lookup
from fusee.targets import cpu as random
from tests.aten.harness import one_node

F = torch.nn.functional


@pytest.mark.parametrize("count", [0, 1, 8, 311, 312, 313, 624, 5000])
@pytest.mark.parametrize("drawn_before", [0, 1, 2, 623, 624])
def test_stream(drawn_before: int, count: int) -> None:
    for p in (0.0, 0.3, 0.9999, 1.0):
        found = []
        for draw in (lambda x, p=p: x.bernoulli_(p), lambda x, p=p: random.bernoulli(p, out=x)):
            torch.manual_seed(count)
            torch.rand(drawn_before)
            mask = draw(torch.empty(count, dtype=torch.bool))
            found.append((mask, torch.rand(3), torch.randn(20), torch.get_rng_state()))
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_it_is_in_use() -> None:
    """On the builds of torch that are tested; elsewhere ATen draws."""
    assert random._drawer() is not None


def test_a_generator_and_no_elements() -> None:
    def drawn(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.bernoulli(x, 0.3, generator=generator), x.clone().bernoulli_(0.4)

    compiled = fusee.compile(drawn, dynamic=True)
    for size in ((3, 4), (5, 2), (0, 2)):
        told = []
        for call in (compiled, drawn):
            torch.manual_seed(0)
            told.append(call(torch.ones(size), torch.Generator().manual_seed(1)))
        torch.testing.assert_close(*told)


def test_no_probability() -> None:
    with pytest.raises(RuntimeError, match="p to be in"):
        random.bernoulli(1.5, out=torch.empty(3, dtype=torch.bool))


def test_another_stream_is_atens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_drawer", lambda: None)
    torch.manual_seed(0)
    want = torch.empty(9, dtype=torch.bool).bernoulli_(0.5)
    torch.manual_seed(0)
    assert torch.equal(random.bernoulli(0.5, out=torch.empty(9, dtype=torch.bool)), want)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_dropout(layout: torch.memory_format) -> None:
    def drop(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.dropout(x, 0.3), torch.rand(2), F.dropout(x * 2, 0.1)

    x = torch.randn(2, 3, 5, 7).to(memory_format=layout)
    compiled = lookup("fusee")(one_node(drop, [x]), [x])
    for seed in (0, 1):
        torch.manual_seed(seed)
        want = drop(x)
        torch.manual_seed(seed)
        for got, expected in zip(compiled(x), want, strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.parametrize(
    "make",
    [
        lambda **g: torch.rand(3, **g),
        lambda **g: torch.randn(3, dtype=torch.float64, **g),
        lambda **g: torch.randint(2, 9, (3,), **g),
        lambda **g: torch.randperm(3, **g),
        lambda **g: torch.empty(3).uniform_(**g),
    ],
)
def test_no_generator_is_torchs(make: Callable[..., Tensor]) -> None:
    def program(x: Tensor) -> Tensor:
        return x + make(generator=None)

    torch.manual_seed(0)
    want = program(torch.ones(3))
    torch.manual_seed(0)
    assert torch.equal(fusee.compile(program)(torch.ones(3)), want)
