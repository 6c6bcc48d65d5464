"""The checker itself: it passes what is right and names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusee.backends
from tests.check import check
from tests.compare import Mismatch, assert_same, measured


def as_is(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def spoiled(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend whose results are right but for `change`."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: [change(x) for x in gm.forward(*args)]

    return backend


@pytest.mark.parametrize("capture", ["dynamo", "fx"])
def test_right_results_pass(capture: Any) -> None:
    def fn(x: Tensor, y: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": (x + y["a"]).sum(-1), "same": x, "view": x.t(), "pair": (x * 2, None)}

    x = torch.randn(4, 6).t()
    assert len(check(fn, x, {"a": x}, backend=as_is, capture=capture).graphs) == 1


def test_mutated_inputs_and_module_state() -> None:
    check(lambda x: x.add_(1).sum(), torch.randn(3), backend=as_is)
    check(nn.BatchNorm1d(3), torch.randn(4, 3), backend=as_is)


def test_eagers_exception_is_expected() -> None:
    check(lambda x: x.view(7), torch.randn(6), backend=as_is)


def test_random_numbers() -> None:
    check(
        lambda x: torch.rand_like(x) + nn.functional.dropout(x, 0.5), torch.ones(9), backend=as_is
    )


def test_dynamic_sizes() -> None:
    again = [(torch.randn(n, 3),) for n in (5, 7)]
    check(lambda x: x.exp().mean(0), torch.randn(4, 3), dynamic=True, again=again, backend=as_is)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * (1 + 1e-5), "eager is off by"),
        (lambda x: x.double(), "dtype"),
        (lambda x: x.t().contiguous().t(), "strides"),
        (lambda x: x[:-1], "shape"),
        (lambda x: torch.where(x == x.max(), torch.nan, x), "infinities or NaN"),
    ],
)
@pytest.mark.parametrize("capture", ["dynamo", "fx"])
def test_wrong_results_fail(change: Any, message: str, capture: Any) -> None:
    with pytest.raises(Mismatch, match=message):
        check(torch.exp, torch.randn(3, 4), backend=spoiled(change), capture=capture)


def test_one_ulp_passes_and_integers_are_exact() -> None:
    check(torch.exp, torch.randn(3, 4), backend=spoiled(lambda x: x * (1 + 2.0**-23)))
    with pytest.raises(Mismatch, match="elements differ"):
        check(torch.neg, torch.arange(5), backend=spoiled(lambda x: x + 1))


def test_shared_memory_is_compared() -> None:
    with pytest.raises(Mismatch, match="shared memory"):
        check(lambda x: (x.t(), x.exp()), torch.randn(3, 3), backend=spoiled(torch.clone))


def test_reused_memory_is_seen() -> None:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kept = [x.clone() for x in gm.forward(*inputs)]

        def call(*args: Any) -> Any:
            for buffer, value in zip(kept, gm.forward(*args)):
                buffer.copy_(value)
            return kept

        return call

    with pytest.raises(Mismatch, match="a later call changed"):
        check(torch.exp, torch.randn(3), again=[(torch.randn(3),)], backend=backend)


def test_bfloat16_is_judged_in_float64() -> None:
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    check(lambda x: torch.softmax(x, -1) @ x.t(), x, backend=as_is)
    with pytest.raises(Mismatch, match=r"off by|not close"):
        check(lambda x: x.float().exp(), x, backend=spoiled(lambda x: x.bfloat16().float()))


def test_compiling_again_is_seen() -> None:
    with pytest.raises(Mismatch, match="compiled again"):
        check(torch.exp, torch.randn(3), again=[(torch.randn(3, 3),)], backend=as_is)


def test_a_tree_of_other_structure_fails() -> None:
    with pytest.raises(Mismatch, match="structure"):
        assert_same((torch.ones(1),), [torch.ones(1)])


# ------------------------------------------------------------------------------ what is near enough


class Small(nn.Module):
    """Convolutions and a product, in sums of 288 and 1,152 terms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1152, 50),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x) * 1.7)


def edited(change: Callable[[fx.GraphModule, fx.Node], None]) -> Callable[..., Any]:
    """The backend 'fusee' on a graph in which `change` has edited the product with 1.7."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        (found,) = [n for n in gm.graph.nodes if 1.7 in n.args]
        change(gm, found)
        gm.recompile()
        return fusee.backends.lookup("fusee")(gm, inputs)

    return backend


def wrong_constant(gm: fx.GraphModule, node: fx.Node) -> None:
    node.args = (node.args[0], 1.7 * (1 + 1e-5))


def wrong_element(gm: fx.GraphModule, node: fx.Node) -> None:
    off = torch.zeros(4, 50)
    off[2, 7] = 1e-4
    gm.register_buffer("off", off)
    with gm.graph.inserting_before(node):
        added = gm.graph.call_function(torch.add, (node.args[0], gm.graph.get_attr("off")))
    node.args = (added, node.args[1])


def test_a_small_network_passes() -> None:
    check(Small().eval(), torch.randn(4, 3, 16, 16), capture="fx")


@pytest.mark.parametrize("change", [wrong_constant, wrong_element])
def test_kernels_that_are_wrong_by_little_fail(change: Any) -> None:
    with pytest.raises(Mismatch, match=r"off by|mean square"):
        check(Small().eval(), torch.randn(4, 3, 16, 16), backend=edited(change), capture="fx")


@pytest.mark.parametrize("terms", [512, 4096])
def test_another_order_of_summation_passes(terms: int) -> None:
    """One chain of float32 additions, as oneDNN sums on some processors."""
    x, w = torch.randn(8, terms), torch.randn(terms, 24)

    def chained(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def call(x: Tensor, w: Tensor) -> tuple[Tensor]:
            total = torch.zeros(8, 24)
            for k in range(terms):
                total += x[:, k, None] * w[k]
            return (total,)

        return call

    check(torch.mm, x, w, backend=chained, capture="fx")


def test_a_sum_without_its_last_term_fails() -> None:
    x = torch.rand(64, 4096)
    with pytest.raises(Mismatch):
        check(lambda x: x.sum(1), x, backend=lambda gm, _: lambda x: (x[:, :-1].sum(1),))


def test_the_length_of_sums_is_measured() -> None:
    x, layer, image = torch.ones(6, 40), nn.Conv2d(3, 8, 5), torch.ones(2, 3, 8, 8)
    programs = [
        (lambda: x * 2 + 1, 1), (lambda: x @ x.t(), 40), (lambda: x.sum(), 240),
        (lambda: x.softmax(1), 40), (lambda: layer(image), 75), (lambda: x.mean(0), 6),
    ]  # fmt: skip
    for program, terms in programs:
        assert measured(program).longest == terms
