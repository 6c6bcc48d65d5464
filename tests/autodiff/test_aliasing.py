"""What is written and what shares memory, in functions that are differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
from tests.autodiff.steps import BACKENDS, compare, compiled

Case = tuple[Callable[..., Any], Callable[[], list[Any]]]


def rand(*size: int, grad: bool = True) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(sum(size))).requires_grad_(grad)


def nonleaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function on something computed from the first input, and returns that as well."""

    def around(f: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        inner = x * 1.5
        out = f(inner, *rest)
        return (*out, inner) if isinstance(out, tuple) else (out, inner)

    return around


def write_input(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(w)
    return x.sin() * w


def write_view(x: Tensor, w: Tensor) -> Tensor:
    x[1].add_(w[0])
    return x * w


def write_and_return(x: Tensor, w: Tensor) -> Tensor:
    x.add_(w)
    return x


def write_and_return_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(w)
    return x[0], x.t()


def write_without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        x.add_(1)
    return (x + 2) * w.sum()


def write_and_join(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y[0, 1] = 1.5  # whose gradient is a part of that of what is joined
    return torch.cat((w, y))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        write_input,
        write_view,
        write_and_return,
        write_and_return_view,
        write_without_grad,
        write_and_join,
    ],
)
def test_writes_to_what_was_computed(function: Any, backend: str) -> None:
    compare(function, rand(3, 3), rand(3, 3), backend=backend, around=nonleaf(function))


def write_plain(x: Tensor, w: Tensor) -> Tensor:
    x.add_(1)
    return x * w


def write_of_grad(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(w)  # from here on x requires grad
    return x + 1


def running(mean: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        mean.mul_(0.9).add_(w.sum(0), alpha=0.1)
    return w * w.mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [write_plain, write_of_grad])
def test_writes_to_an_input_without_grad(function: Any, backend: str) -> None:
    compare(function, rand(4, 4, grad=False), rand(4, 4), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_statistics(backend: str) -> None:
    compare(running, rand(4, grad=False), rand(5, 4), backend=backend)


def views_of_input(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x[1:], x.t(), x.view(-1)


def input_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


def views_of_one(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x * 2
    return y, y[0], y.t()


def views_alone(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y[0], y[1:]


def views_of_zeros(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.zeros(6, 3)  # which autograd gives detached from what the kernel made
    y[::2] = x
    return y[1:], y.view(-1)[:4]


def detached_view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.exp()
    return y.detach(), y, y.detach()[0]


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.cos()
    return y, y


def detached_input(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach(), x.sin()


def without_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = x * 3
    return y, x * y


def integers(x: Tensor) -> tuple[Tensor, Tensor, int]:
    return x.argmax(1), x.sum(1), x.shape[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        views_of_input,
        input_itself,
        views_of_one,
        views_alone,
        views_of_zeros,
        detached_view,
        twice,
        detached_input,
        without_grad,
        integers,
    ],
)
def test_outputs_that_share_memory(function: Any, backend: str) -> None:
    compare(function, rand(3, 3), backend=backend)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + 1,
        lambda x, y: x + y,
        lambda x, y: x.clone() - y.sin(),
        lambda x, y: torch.cat((x, y)),
        lambda x, y: torch.cat((x, y), 1),
        lambda x, y: torch.stack((x, y), -1),
        lambda x, y: x.sum(1) + y[0],
        lambda x, y: x.sum(),
        lambda x, y: x.permute(1, 0).contiguous() + y.exp(),
        lambda x, y: x.view(9) + 1,
    ],
)
def test_gradients_that_are_the_tangent_or_views_of_it(function: Any) -> None:
    found = []
    for call in (function, fusee.compile(function, fullgraph=True)):
        inputs = [rand(3, 3), rand(3, 3)]
        result = call(*inputs)
        tangent = torch.arange(result.numel()) + result.detach().flatten() * 0
        tangent = tangent.view(result.shape)
        place = tangent.untyped_storage().data_ptr()
        grads = torch.autograd.grad(result, inputs, tangent, allow_unused=True)
        there = [g for g in grads if g is not None]
        rows = [(g.stride(), g.untyped_storage().data_ptr() == place) for g in there]
        found.append((rows, there))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_a_gradient_that_is_the_tangent_is_kept_as_a_copy() -> None:
    x, y = rand(3, 3), rand(3, 3)
    fusee.compile(lambda x, y: x + y)(x, y).backward(tangent := torch.ones(3, 3))
    assert x.grad is not None and y.grad is not None
    x.grad.zero_()
    assert y.grad.eq(1).all() and tangent.eq(1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_twice(backend: str) -> None:
    x = rand(3, 3)
    compare(lambda a, b: a * b.sin(), x, x, backend=backend)


def test_outputs_keep_their_aliases() -> None:
    step = compiled(views_of_one)
    x = rand(3, 3)
    y, row, turned = step(x)
    with torch.no_grad():
        y.zero_()
    assert not row.any() and not turned.any()
    a, b = compiled(twice)(x)
    assert a is b
    assert compiled(input_itself)(x)[0] is x


def test_a_later_write_to_a_result_that_is_saved_is_refused_as_eager_does() -> None:
    step = compiled(torch.exp)
    x = rand(3)
    y = step(x)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_write_that_eager_refuses_raises_eagers_error() -> None:
    def bad(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)  # exp saved it
        return y * 2

    x = rand(3)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="runs eagerly"):
        y = torch.compile(bad, backend="fusee")(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_result_that_eager_refuses_later_raises_when_it_is_used() -> None:
    def part(x: Tensor) -> Tensor:
        y = x * 2
        first = y.unbind(0)[0]
        y.add_(1)
        return first

    with pytest.warns(UserWarning, match="runs eagerly"):
        found = fusee.compile(part)(rand(2, 3))
    with pytest.raises(RuntimeError, match="returns multiple views"):
        found.sum()


def write_to_detached_input(x: Tensor, w: Tensor) -> Tensor:
    return x.detach().add_(w)


def write_to_detached(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.detach().add_(w)[:1], y[1:]


def strided_part_of_input(x: Tensor, w: Tensor) -> Tensor:
    return x[1:].as_strided((2, 3), (1, 2), 0).T


def strided_part_of_written(x: Tensor, w: Tensor) -> Tensor:
    return x.diagonal().add_(w[0]).as_strided((2, 3), (1, 2), 0)


def strided_part_of_result(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * w).unfold(0, 2, 1)
    return y, y[1:].as_strided((2, 3), (1, 2), 0)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    "function",
    [
        write_to_detached_input,
        write_to_detached,
        strided_part_of_input,
        strided_part_of_written,
        strided_part_of_result,
    ],
)
def test_two_histories_of_one_memory(function: Callable[..., Any]) -> None:
    found = []
    for run in (function, fusee.compile(function)):
        x, w = rand(3, 3), rand(3, 3)
        y = torch.utils._pytree.tree_leaves(run(x * 1, w))
        loss = sum((k * part.sin().sum() for k, part in enumerate(y, 1)), torch.zeros(()))
        found.append([*y, *torch.autograd.grad(loss, (x, w), allow_unused=True)])
    torch.testing.assert_close(found[1], found[0])


def test_a_write_to_a_leaf_raises_eagers_error() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="leaf Variable"):
        torch.compile(lambda x: x.add_(1), backend="fusee")(rand(3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_is_saved_where_the_program_makes_one(backend: str) -> None:
    def scores(x: Tensor, queue: Tensor) -> Tensor:
        return x @ queue.clone().detach()

    grads: list[Tensor] = []
    for run in (scores, fusee.compile(scores, backend=backend)):
        x, queue = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
        out = run(x, queue)
        queue.zero_()
        grads += torch.autograd.grad(out.sum(), x)
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore:.*a view that was made while gradients were off")
def test_a_view_made_without_gradients_of_what_is_then_written_to() -> None:
    """Autograd refuses to say what it is part of."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ones(4, 3)
        with torch.no_grad():
            part = y[1:]
        y += x
        return y, part

    for call in (function, fusee.compile(function)):
        x = torch.ones(4, 3, requires_grad=True)
        y, part = call(x)
        y.sum().backward()
        assert part.tolist() == [[2.0] * 3] * 3 and x.grad is not None
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            part.sin()


@pytest.mark.filterwarnings("ignore:.*a view that was made while gradients were off")
@pytest.mark.parametrize("of_input", [False, True])
def test_a_view_made_without_gradients_is_a_leaf(of_input: bool) -> None:
    """Its gradient stays with it."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        with torch.no_grad():
            return y, (x if of_input else y)[1:]

    found = []
    for call in (function, fusee.compile(function)):
        x = torch.ones(4, 3, requires_grad=True)
        y, part = call(x)
        (y.sum() + (part * 2).sum()).backward()
        assert part.is_leaf and part._is_view()
        found.append(x.grad)
    torch.testing.assert_close(*found)
