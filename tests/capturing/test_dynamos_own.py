"""What TorchDynamo's own tests have shown when each ran compiled, as the smallest function.

source   https://github.com/pytorch/pytorch, test/dynamo: test_misc.py and its like
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
from fusee.errors import FuseeWarning

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor
    offsets: list[int] = dataclasses.field(default_factory=lambda: [5])
    scale: int = 3


@dataclasses.dataclass(frozen=True)
class Doubled:
    x: Tensor
    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    pair: Pair
    more: tuple[Any, ...]


class Derived(Pair):
    pass


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def of_pair(pair: Pair) -> Tensor:
    return pair.x + pair.y * pair.scale + pair.offsets[0]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def of_nested(nested: Nested, *, others: dict[str, Any]) -> Tensor:
    return of_pair(nested.pair) + nested.more[1].twice * others["a"].y


OUTER = Pair(torch.ones(2), torch.full((2,), 3.0), scale=4)


def in_a_loop(x: Tensor) -> Tensor:
    for k in range(3):
        x = of_pair(Pair(x, x.sin(), scale=k))
    return x


@BACKENDS
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: of_pair(Pair(x, x + 1)) * 2,
        lambda x: of_pair(Derived(x, x + 1, [3])),
        lambda x: of_pair(OUTER) + x,
        lambda x: of_nested(Nested(Pair(x, x), (1, Doubled(x))), others={"a": Pair(x, x.cos())}),
        in_a_loop,
    ],
)
def test_frozen_instances_in_a_graph(
    fn: Callable[[Tensor], Tensor], trains: bool, backend: str
) -> None:
    """fx has no text for them: nodes get their fields, and make the instances again."""
    x = torch.randn(2, requires_grad=trains)
    got, expected = fusee.compile(fn, backend=backend, fullgraph=True)(x), fn(x)
    torch.testing.assert_close(got, expected)
    if trains:
        (mine,), (other,) = (torch.autograd.grad(y.sum(), x) for y in (got, expected))
        torch.testing.assert_close(mine, other)


def test_fields_of_frozen_instances_are_facts() -> None:
    compiled = fusee.compile(lambda pair, x: of_pair(pair) * x, fullgraph=True)
    x = torch.randn(2)
    for pair in (OUTER, Pair(x, x, [1]), Pair(x, x, scale=7), Pair(x.sin(), x, scale=7)):
        torch.testing.assert_close(compiled(pair, x), of_pair(pair) * x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.to_sparse() * 2,
        lambda x: (x.to_sparse() * 2).to_dense() + 1,
        lambda x: x.to_sparse_csr() @ x,
        lambda x: torch.sparse_coo_tensor(
            torch.tensor([[0, 1], [1, 0]]), x[0, :2], (2, 2)
        ).to_dense(),
    ],
)
def test_sparse_results_with_aot_eager(fn: Callable[[Tensor], Tensor], trains: bool) -> None:
    """They have no functional form: it raised, where the default compiler tells and runs them."""
    x = torch.randn(3, 3, requires_grad=trains)
    with pytest.warns(FuseeWarning, match="runs eagerly"):
        got = fusee.compile(fn, backend="aot_eager")(x)
    expected = fn(x)
    assert got.layout is expected.layout and got.requires_grad is expected.requires_grad
    torch.testing.assert_close(got.to_dense(), expected.to_dense())
