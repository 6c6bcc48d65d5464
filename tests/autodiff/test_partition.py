"""Splits of joint graphs written by hand: both halves give what the whole gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusee.autodiff import Joint
from fusee.autodiff.min_cut import Costs, JointFacts, choose
from fusee.autodiff.partition import partition, saved_bytes
from tests.autodiff.joints import check, joint, operators, saved_names

Tensor = torch.Tensor
aten = torch.ops.aten


def gelu_mlp(x: Tensor, w: Tensor, v: Tensor, t: Tensor) -> tuple[Any, ...]:
    """linear, gelu, linear."""
    h = x @ w
    a = F.gelu(h)
    y = a @ v
    grad_a = t @ v.t()
    grad_h = aten.gelu_backward(grad_a, h)
    return y, grad_h @ w.t(), x.t() @ grad_h, a.t() @ t


GELU = [torch.randn(40, 16), torch.randn(16, 64), torch.randn(64, 8)]
GELU_TANGENT = [torch.randn(40, 8)]


def test_pointwise_is_repeated_and_products_are_not() -> None:
    split = check(joint(gelu_mlp, GELU, GELU_TANGENT), GELU, GELU_TANGENT)
    assert "gelu" in operators(split.forward) and "gelu" in operators(split.backward)
    assert operators(split.forward).count("mm") == 2
    results = [at for sort, at in split.saved if sort == "result"]
    assert len(results) == 1, "only what gelu was given"


def test_inputs_pass_through() -> None:
    split = check(joint(gelu_mlp, GELU, GELU_TANGENT), GELU, GELU_TANGENT)
    assert {at for sort, at in split.saved if sort == "input"} == {0, 1, 2}


def test_masks_take_a_byte() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        h = x @ w
        chosen = h > 0.5
        y = torch.where(chosen, h, 0.0).sin() * 2  # sin hides h from cheap tricks
        z = y @ w.t()
        grad = torch.where(chosen, t @ w, 0.0)
        return z, grad @ w.t(), x.t() @ grad

    given = [torch.randn(30, 8), torch.randn(8, 50)]
    tangents = [torch.randn(30, 8)]
    split = check(joint(step, given, tangents), given, tangents)
    kept = [spec for spec in split.backward.inputs if spec.dtype is torch.bool]
    assert len(kept) == 1 and len(split.saved) == 3


def test_dropout_masks_are_packed_and_drawn_once() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        h = x @ w
        keep = torch.bernoulli(torch.full_like(h, 0.9)) / 0.9
        return (h * keep) @ w.t(), ((t @ w) * keep) @ w.t(), x.t() @ ((t @ w) * keep)

    given = [torch.randn(30, 8), torch.randn(8, 50)]
    tangents = [torch.randn(30, 8)]
    split = check(joint(step, given, tangents), given, tangents)
    assert [s.dtype for s in split.backward.inputs].count(torch.bool) == 1
    assert "bernoulli" not in operators(split.backward)


def test_random_numbers_stay_in_order() -> None:
    def step(x: Tensor, t: Tensor) -> tuple[Any, ...]:
        first = torch.rand(5, 5)
        unused = torch.rand(3)
        second = torch.rand_like(x)
        return x * first + second * x * unused.sum() * 0, t * first + second * t

    given, tangents = [torch.randn(5, 5)], [torch.randn(5, 5)]
    split = check(joint(step, given, tangents), given, tangents)
    assert not any("rand" in name for name in operators(split.backward))


def test_an_input_that_is_written_is_saved_as_it_was() -> None:
    def step(x: Tensor, s: Tensor, t: Tensor) -> tuple[Any, ...]:
        y = x * s
        grad_x, grad_s = t * s, t * x
        s.add_(y)
        return y, grad_x, grad_s

    given, tangents = [torch.randn(6, 4), torch.randn(6, 4)], [torch.randn(6, 4)]
    split = check(joint(step, given, tangents, forward=1), given, tangents)
    assert ("input", 1) not in split.saved and ("input", 0) in split.saved


def test_views_of_what_is_written_are_saved_as_they_were() -> None:
    def step(x: Tensor, s: Tensor, t: Tensor) -> tuple[Any, ...]:
        y = x * s[:, 0]
        grads = t * s[:, 0], torch.stack([t * x, t * 0], 1)
        s.zero_()
        return y, *grads

    given, tangents = [torch.randn(6), torch.randn(6, 2)], [torch.randn(6)]
    split = check(joint(step, given, tangents), given, tangents)
    kept = [s.size for s in split.backward.inputs[: len(split.saved)]]
    assert kept == [(6,), (6,)], "x, and the column that was read"


def test_views_are_rebuilt_from_what_they_are_of() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        h = x @ w
        left, right = h.t()[:8], h.t()[8:]
        y = left.exp() * right.sin()
        grad_left, grad_right = t * left.exp() * right.sin(), t * left.exp() * right.cos()
        grad = torch.cat([grad_left, grad_right]).t()
        return y, grad @ w.t(), x.t() @ grad

    given = [torch.randn(10, 6), torch.randn(6, 16)]
    tangents = [torch.randn(8, 10)]
    split = check(joint(step, given, tangents), given, tangents)
    assert [sort for sort, _ in split.saved].count("result") == 1
    (kept,) = [s for s in split.backward.inputs if s.name == "mm"]
    assert kept.size == (10, 16)


def test_a_small_part_is_saved_rather_than_the_whole() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        part = (x @ w)[:, 3]
        return part.sin(), ((t * part.cos())[:, None] * w[:, 3]), None

    given = [torch.randn(10, 6), torch.randn(6, 50)]
    tangents = [torch.randn(10)]
    split = check(joint(step, given, tangents), given, tangents)
    assert (10,) in [s.size for s in split.backward.inputs[: len(split.saved)]]
    assert (10, 50) not in [s.size for s in split.backward.inputs]


def test_outputs_that_eager_saves_are_shared() -> None:
    def step(x: Tensor, t: Tensor) -> tuple[Any, ...]:
        y = (x @ x).exp()
        grad = t * y
        return y, grad @ x.t() + x.t() @ grad

    given, tangents = [torch.randn(4, 4)], [torch.randn(4, 4)]
    split = check(joint(step, given, tangents), given, tangents)
    assert ("result", 0) in split.saved
    assert len(split.forward.results) == 1


def test_outputs_that_eager_does_not_save_are_copied() -> None:
    """The caller may write to them, which in eager is no error."""

    def step(x: Tensor, t: Tensor) -> tuple[Any, ...]:
        y = x @ x
        z = (y + 1).sin()
        grad = t * (y + 1).cos()
        return y, z, grad @ x.t() + x.t() @ grad

    given, tangents = [torch.randn(4, 4)], [torch.randn(4, 4)]
    case = joint(step, given, tangents, forward=2)
    for node in case.aten.graph.nodes:  # eager has y + 1 at hand
        if str(node.target) == "aten.add.Tensor" and "backward" in node.meta:
            del node.meta["backward"]
    split = check(case, given, tangents)
    assert ("result", 0) not in split.saved


def test_gradients_that_are_no_new_tensors() -> None:
    def step(x: Tensor, y: Tensor, z: Tensor, t: Tensor) -> tuple[Any, ...]:
        return x + y * z.sum() * 0 + z.sum(), t, t.expand(2, 3, 4), t.sum().expand(3, 4)

    given = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)]
    tangents = [torch.randn(3, 4)]
    check(joint(step, given, tangents), given, tangents)


def test_a_gradient_of_the_forward_alone() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        return x * w, w, w.t()

    given, tangents = [torch.randn(3, 4), torch.randn(3, 4)], [torch.randn(3, 4)]
    split = check(joint(step, given, tangents), given, tangents)
    assert all(spec.dtype for spec in split.backward.inputs)


def test_constants_go_where_they_are_read() -> None:
    table = torch.randn(4, 4)

    def step(x: Tensor, t: Tensor) -> tuple[Any, ...]:
        return x * table, t * table

    given, tangents = [torch.randn(4, 4)], [torch.randn(4, 4)]
    split = check(joint(step, given, tangents), given, tangents)
    assert len(split.forward.constants) == len(split.backward.constants) == 1
    assert not split.saved


def test_fills_save_nothing() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        h = x @ w
        return h.sum(), torch.zeros_like(h) @ w.t() + t, torch.full_like(w, 2.0) * t

    given, tangents = [torch.randn(30, 4), torch.randn(4, 50)], [torch.randn(())]
    split = check(joint(step, given, tangents), given, tangents)
    assert "mm" not in saved_names(split)


# ------------------------------------------------------------------------------ long lives


def residual(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
    """Six blocks x += w2 @ tanh(x), with the residual stream alive all along."""
    states = []
    for _ in range(6):
        states.append(x)
        x = x + torch.tanh(x) @ w
    grad, grad_w = t, torch.zeros_like(w)
    for state in reversed(states):
        a = torch.tanh(state)
        grad_w = grad_w + a.t() @ grad
        grad = grad + (grad @ w.t()) * (1 - a * a)
    return x, grad, grad_w


STREAM = [torch.randn(20, 8), torch.randn(8, 8) / 3]


def test_what_lives_on_is_not_rebuilt_from_afar() -> None:
    """Else the first step of the backward would compute the whole stream, and hold it."""
    split = check(joint(residual, STREAM, [torch.randn(20, 8)]), STREAM, [torch.randn(20, 8)])
    saved = [s for s in split.backward.inputs[: len(split.saved)] if s.size == (20, 8)]
    assert len(saved) <= 6
    first = operators(split.backward)
    assert first.index("mm") <= 4, first


# ------------------------------------------------------------------------------ budgets


def bytes_at(case: Joint, budget: float) -> int:
    """Bytes of what is saved and no input."""
    split = partition(case, budget=budget)
    values = [node.meta["val"] for node in split.backward.placeholders]
    return sum(x.nbytes for x, (sort, _) in zip(values, split.saved) if sort == "result")


@pytest.mark.parametrize("step", [gelu_mlp, residual])
def test_budgets_save_less_and_less(step: Any) -> None:
    given = GELU if step is gelu_mlp else STREAM
    tangents = GELU_TANGENT if step is gelu_mlp else [torch.randn(20, 8)]
    found = [bytes_at(joint(step, given, tangents), b) for b in (1.0, 0.75, 0.5, 0.25, 0.0)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0 < found[0]
    for budget, there in zip((0.75, 0.5, 0.25), found[1:]):
        assert there <= budget * found[0]
    for budget in (0.5, 0.0):
        check(joint(step, given, tangents), given, tangents, budget)


def test_the_residual_stream_can_be_halved() -> None:
    tangents = [torch.randn(20, 8)]
    full = bytes_at(joint(residual, STREAM, tangents), 1.0)
    half = bytes_at(joint(residual, STREAM, tangents), 0.5)
    assert 0 < half <= full / 2, "equal layers don't all go at once"


def test_random_numbers_are_never_repeated() -> None:
    def step(x: Tensor, t: Tensor) -> tuple[Any, ...]:
        noise = torch.randn(8, 8)
        h = x @ noise
        return h.sin(), (t * h.cos()) @ noise.t()

    given, tangents = [torch.randn(8, 8)], [torch.randn(8, 8)]
    split = check(joint(step, given, tangents), given, tangents, budget=0.0)
    assert "randn" not in operators(split.backward) and "mm" in operators(split.backward)


# ------------------------------------------------------------------------------ regions


def in_regions(case: Joint, of: dict[str, Any]) -> Joint:
    """Nodes of the forward by name, with their marks."""
    for node in case.aten.graph.nodes:
        if node.name in of:
            node.meta["recompute"] = of[node.name]
    return case


def blocks(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
    a = (x @ w).sin() @ w
    b = (a @ w).sin() @ w
    grad = t
    grads_w = []
    for state in (a, x):
        h = state @ w
        s = h.sin()
        grads_w.append(s.t() @ grad)
        inner = (grad @ w.t()) * h.cos()
        grads_w.append(state.t() @ inner)
        grad = inner @ w.t()
    return b, grad, grads_w[0] + grads_w[1] + grads_w[2] + grads_w[3]


def test_regions_save_only_what_enters_and_leaves() -> None:
    given, tangents = [torch.randn(9, 5), torch.randn(5, 5)], [torch.randn(9, 5)]
    case = joint(blocks, given, tangents)
    marks = {"mm": 1, "sin": 1, "mm_1": 1, "mm_2": 2, "sin_1": 2, "mm_3": 2}
    torch.manual_seed(0)
    plain = partition(joint(blocks, given, tangents))
    split = partition(in_regions(case, marks))
    assert operators(plain.backward).count("mm") + 2 == operators(split.backward).count("mm")
    assert [at for sort, at in split.saved if sort == "input"] == [0, 1]
    assert saved_names(split).count("mm_1") == 1 and len(split.saved) == 3
    position = operators(split.backward)
    names = [n.name for n in split.backward.graph.nodes]
    assert names.index("mm_2") < names.index("mm") and position[0] == "mm"
    check(in_regions(joint(blocks, given, tangents), marks), given, tangents, budget=0.99999)


def test_regions_draw_their_random_numbers_once() -> None:
    def step(x: Tensor, w: Tensor, t: Tensor) -> tuple[Any, ...]:
        h = x @ w
        keep = torch.bernoulli(torch.full((9, 5), 0.5))
        y = (h * keep).sin()
        grad = t * (h * keep).cos() * keep
        return y, grad @ w.t(), x.t() @ grad

    given, tangents = [torch.randn(9, 5), torch.randn(5, 5)], [torch.randn(9, 5)]
    marks = {"mm": 1, "full": 1, "bernoulli": 1, "mul": 1, "sin": 1}
    split = check(in_regions(joint(step, given, tangents), marks), given, tangents, budget=0.99999)
    assert "mm" in operators(split.backward) and "bernoulli" not in operators(split.backward)
    assert len(split.saved) == 3


def test_a_mark_to_save_is_kept() -> None:
    case = in_regions(joint(gelu_mlp, GELU, GELU_TANGENT), {"gelu": "save"})
    split = check(case, GELU, GELU_TANGENT)
    assert "gelu" in saved_names(split) and "gelu" not in operators(split.backward)


# ------------------------------------------------------------------------------ the whole


def test_no_more_is_saved_than_by_saving_all_that_is_read() -> None:
    for step, given, tangents in (
        (gelu_mlp, GELU, GELU_TANGENT),
        (residual, STREAM, [torch.randn(20, 8)]),
    ):
        case = joint(step, given, tangents)
        costs = Costs(case.aten)
        facts = JointFacts(case, costs)
        choice = choose(facts, None)
        all_read = sum(costs.bytes(n) for n in facts.wanted if n.op == "call_function")
        assert 0 < saved_bytes(facts, choice) <= all_read
