"""Gradients of gradients of compiled graphs, as eager's: each program three ways."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusee
from fusee.errors import DoubleBackwardError
from tests.autodiff.steps import same

pytestmark = [  # TorchDynamo's own
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

WAYS: dict[str, Compile] = {
    "fusee": fusee.compile,
    "aot_eager": lambda f: fusee.compile(f, backend="aot_eager"),
    "stock": lambda f: torch.compile(f, backend="fusee"),
}


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def critic(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 1))


def penalty(c: Compile, module: nn.Module) -> Any:
    x = leaf(3, 4)
    (grad,) = torch.autograd.grad(c(module)(x).sum(), x, create_graph=True)
    (grad.norm() - 1).square().backward()
    grads = [p.grad for p in module.parameters()]
    return grad.detach(), x.grad, grads, list(module.buffers()), torch.rand(2)


def plain(c: Compile) -> Any:
    return penalty(c, critic())


def the_same_mask_is_drawn(c: Compile) -> Any:
    return penalty(c, critic(nn.Dropout(0.5)))


def statistics_move_once(c: Compile) -> Any:
    return penalty(c, critic(nn.BatchNorm1d(8)))


def state_that_the_result_depends_on(c: Compile) -> Any:
    module = critic()
    nn.utils.parametrizations.spectral_norm(module[0])  # type: ignore[index]
    return penalty(c, module)


def autocast_around_the_call(c: Compile) -> Any:
    module, x = critic(), leaf(3, 4)
    f = c(module)
    with torch.autocast("cpu", torch.bfloat16):
        y = f(x)
    (grad,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None
    return x.grad.round(decimals=2)


def higher_orders(c: Compile) -> Any:
    f, x = c(lambda x: (x.sin() * x.exp()).sum()), leaf(4)
    found = [f(x)]
    for _ in range(4):
        found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
    return [y.detach() for y in found]


def functional(c: Compile) -> Any:
    f, x = c(lambda x: (x.sin() * x.exp()).sum()), torch.randn(4)
    made = torch.autograd.functional
    return (
        made.hessian(f, x),
        made.hessian(f, x, vectorize=True),
        made.jvp(f, x, x),
        made.hvp(f, x, x),
    )


def in_batches(c: Compile) -> Any:
    x = leaf(3)
    y = c(lambda x: x.sin() * x.sum())(x)
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


def written_to(c: Compile) -> Any:
    def f(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(w)
        return x.sin()

    w, a = leaf(4), leaf(4)
    x = a * 2
    y = c(f)(x, w)
    grads = torch.autograd.grad(y.sum() + x.square().sum(), [a, w], create_graph=True)
    torch.stack(grads).square().sum().backward()
    return a.grad, w.grad


def written_to_later(c: Compile) -> Any:
    """Only the first gradient is asked for, and that one needs nothing of what is written."""
    f = c(lambda x, b: (x + b).tanh())
    x, b = leaf(4), leaf(4)
    y = f(x, b)
    with torch.no_grad():
        b.add_(1)
    return [g.detach() for g in torch.autograd.grad(y.sum(), x, create_graph=True)]


def parts_one_after_the_other(c: Compile) -> Any:
    f = c(lambda x, w: (x.exp() * 2, w.sin() * w))
    x, w = leaf(4), leaf(4)
    u, v = f(x, w)
    u.sum().backward()
    (grad,) = torch.autograd.grad(v.sum(), w, create_graph=True)
    grad.square().sum().backward()
    return x.grad, w.grad


def views_of_results(c: Compile) -> Any:
    f = c(lambda x: (x.sin().view(2, 2)[0], x.cos()[1:3], x.detach() * x))
    x = leaf(4)
    loss = sum(y.square().sum() for y in f(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def from_what_others_computed(c: Compile) -> Any:
    """One input comes from the other: neither gets the other's gradient too."""
    f, x = c(lambda a, b: a * b + b.exp()), leaf(4)
    (grad,) = torch.autograd.grad(f(x, x * x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


def inside(c: Compile) -> Any:
    module, x = critic(), leaf(3, 4)

    def step(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        loss = (grad.norm() - 1).square()
        loss.backward()
        return loss.detach()

    return c(step)(x), [p.grad for p in module.parameters()]


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.square()


def function_of_the_users(c: Compile) -> Any:
    x = leaf(4)
    (grad,) = torch.autograd.grad(c(lambda x: Odd.apply(x) * 2)(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return x.grad


PROGRAMS = [
    plain,
    the_same_mask_is_drawn,
    statistics_move_once,
    state_that_the_result_depends_on,
    autocast_around_the_call,
    higher_orders,
    functional,
    in_batches,
    written_to,
    written_to_later,
    parts_one_after_the_other,
    views_of_results,
    from_what_others_computed,
]


def outcome(program: Callable[[Compile], Any], c: Compile) -> list[Any]:
    torch.manual_seed(0)
    return pytree.tree_leaves(program(c))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_eager(program: Callable[[Compile], Any], way: str) -> None:
    torch._dynamo.reset()
    ours, eager = outcome(program, WAYS[way]), outcome(program, lambda f: f)
    for k, (x, y) in enumerate(zip(ours, eager, strict=True)):
        same(f"item {k}", x, y)


@pytest.mark.parametrize("program", [inside, function_of_the_users])
def test_as_eager_where_capture_is_ours(program: Callable[[Compile], Any]) -> None:
    for way in ("fusee", "aot_eager"):
        ours, eager = outcome(program, WAYS[way]), outcome(program, lambda f: f)
        for k, (x, y) in enumerate(zip(ours, eager, strict=True)):
            same(f"item {k}", x, y)


def test_a_backward_that_dynamo_captured_without_gradients_is_refused() -> None:
    with pytest.raises(DoubleBackwardError, match=r"torch\.autograd\.Function"):
        function_of_the_users(WAYS["stock"])


def test_what_eager_cannot_do_is_eagers_error() -> None:
    x = leaf(2, 2, 4, 8)
    y = fusee.compile(F.scaled_dot_product_attention)(x, x, x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize("size", [(1, 0, 7, 4), (0, 2, 7, 4), (1, 2, 0, 4)], ids=str)
def test_attention_of_nothing(size: tuple[int, ...]) -> None:
    """ATen's kernels divide by the number of heads, and are not called."""
    x = leaf(*size)
    y = fusee.compile(lambda x: F.scaled_dot_product_attention(x * 1, x, x, enable_gqa=True))(x)
    y.sum().backward()
    assert x.grad is not None and y.shape == x.shape == x.grad.shape


def test_an_input_written_to_before_it_is_needed_again() -> None:
    x, b = leaf(4), leaf(4)
    y = fusee.compile(lambda x, b: (x + b).sin())(x, b)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        grad.sum().backward()


def test_it_is_in_the_report_once_it_was_needed() -> None:
    f, x = fusee.compile(lambda x: x.exp().sum()), leaf(4)
    (grad,) = torch.autograd.grad(f(x), x, create_graph=True)
    assert "double backward" not in str(*fusee.report(f))
    for _ in range(2):
        grad.sum().backward(retain_graph=True)
    assert str(*fusee.report(f)).count("double backward") == 1


@pytest.mark.parametrize("backward", [True, False])
def test_inputs_are_kept_no_longer_than_the_graph(backward: bool) -> None:
    f = fusee.compile(lambda x: (x + 1).sum())
    a = leaf(4)
    x = a * 2
    y = f(x)
    storage = weakref.ref(x.untyped_storage())
    x.add_(y)  # from here on autograd leads from x to what holds its memory
    if backward:
        y.backward()
    else:
        del y
    del x
    gc.collect()
    assert storage() is None or backward


@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_anomaly_detection_looks_at_no_trace(is_compiled_first: bool) -> None:
    """It would ask stand-ins for values, and tell of errors that the program never sees."""

    def loss(x: Tensor) -> Tensor:
        return (x.sqrt() * x).sum()

    compiled = fusee.compile(loss, options={"prices": False})
    if is_compiled_first:
        compiled(torch.ones(3, requires_grad=True)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.set_detect_anomaly(True):
            x = torch.ones(3, requires_grad=True)
            compiled(x).backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 1.5))
    assert not any(report.eager for report in fusee.report(compiled))


_OF_TWO: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "conv": lambda x, w, b: F.conv1d(x[None], w[:, :, None], b)[0].T,
    "norm": lambda x, w, b: F.layer_norm(x, (4,), b, b) @ w,
    "softmax": lambda x, w, b: (x @ w + b).softmax(-1),
    "tanh": lambda x, w, b: torch.tanh(x @ w) * b,
    "picked": lambda x, w, b: x[:, :2] @ w[:2] + b,
    "summed": lambda x, w, b: (x + b).sum(0) * w,
    "loss": lambda x, w, b: F.cross_entropy(x @ w, b.argmax().expand(4), reduction="none") + b,
}


@pytest.mark.parametrize("name", _OF_TWO)
@pytest.mark.parametrize("of", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_gradients_of_gradients_for_what_they_came_from(name: str, of: tuple[int, ...]) -> None:
    """Of a product the gradient of a weight depends on the tangent, and on no weight."""
    fn = _OF_TWO[name]

    def derived(call: Callable[..., Tensor]) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        sizes = (4, 4), (4, 4), (4,)
        inputs = [torch.randn(*n, generator=generator, dtype=torch.float64) for n in sizes]
        y = call(*[x.requires_grad_() for x in inputs])
        tangent = torch.randn(y.shape, generator=generator, dtype=y.dtype).requires_grad_()
        firsts = torch.autograd.grad(y, [inputs[k] for k in of], tangent, create_graph=True)
        ends = [tangent, *inputs]
        loss = sum((x.square() * (k + 1)).sum() for k, x in enumerate(firsts))
        seconds = torch.autograd.grad(loss, ends, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
        again = [x.square().sum() for x in seconds if x is not None and x.requires_grad]
        thirds = torch.autograd.grad(sum(again), ends, allow_unused=True)  # type: ignore[arg-type]
        return [*firsts, *seconds, *thirds]

    got = derived(fusee.compile(fn, options={"prices": False}))
    for one, other in zip(got, derived(fn), strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_what_no_gradient_reaches_has_none() -> None:
    """The picked places depend on `y`, and no gradient does."""
    layer, x = torch.nn.Linear(4, 3), leaf(2, 4)
    pick = fusee.compile(
        lambda y: y.gather(1, y.argmax(1)[:, None]).sum(), options={"prices": False}
    )
    (grad,) = torch.autograd.grad(pick(layer(x.tanh())), x, create_graph=True)
    grad.square().sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is None


def test_torchdynamo_does_not_trace_what_a_backward_runs() -> None:
    """Gradients that are asked for within what stock torch.compile compiled: its hook is on."""

    def fn(x: Tensor) -> Any:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return first, second

    def counting(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return torch._dynamo.lookup_backend("fusee")(gm, inputs)

    torch._dynamo.reset()
    graphs: list[Any] = []
    fast = torch.compile(fn, backend=counting)
    for n in (3, 4):
        x = leaf(n)
        torch.testing.assert_close(fast(x), fn(x))
    assert len(graphs) == 2 * 2
