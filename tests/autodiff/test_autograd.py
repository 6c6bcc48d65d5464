"""What autograd offers, on compiled graphs: hooks, graphs that are retained, modes, Functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusee
from fusee.aten.trace import trace
from fusee.backends.native import compile_aten
from fusee.backends.report import Report
from fusee.config import Options
from fusee.errors import InputError
from tests.autodiff.steps import BACKENDS, compare, compiled, same


def rand(*size: int, grad: bool = True) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(sum(size))).requires_grad_(grad)


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w).sum(-1)


# ------------------------------------------------------------------------------ programs


def some_need_none(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w).tanh()


def unused(x: Tensor, w: Tensor) -> Tensor:
    return x.sin()


def through_detach(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * (x @ w).detach().softmax(-1)


def partly_without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * w).amax()
    return x * w / scale


def in_place_inside(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros(3, 3)
    y[0] = x[0] * w[1]
    y[1:].add_(w[1:]).mul_(2)
    return F.relu_(y - 1) + x


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).view(2, 4, 3, 4).permute(2, 0, 1, 3).unbind(0)
    q, k, v = (t.view(2, 4, 2, 2).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 4, 4)


def masked_attention(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x.sin(), attn_mask=mask > 0.3)


def losses(x: Tensor, w: Tensor) -> Tensor:
    target = torch.tensor([0, 2, 1])
    return F.cross_entropy(x @ w, target) + F.mse_loss(x, w) + F.smooth_l1_loss(x, w.detach())


def normalised(x: Tensor, w: Tensor) -> Tensor:
    # the default eps would make much of the rounding of rows whose three elements lie close
    return F.layer_norm(x, (3,), w[0], w[1], 0.1) + F.softmax(x, -1) * F.log_softmax(w, 0)


def indexed(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.tensor([2, 0, 0])
    return x[rows] * w.gather(0, rows.view(1, 3)) + F.embedding(rows, w)


def with_zeros() -> Tensor:
    """Rows without a zero, with one and with two, and with each of two signs."""
    x = rand(4, 5, grad=False) - 0.5
    x[1, 2] = x[2, 1] = x[2, 4] = x[3, 0] = 0
    return x.requires_grad_()


def products(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = torch.prod(w > 0, dtype=torch.int32)
    last = x.prod(-1, dtype=torch.float64)
    return x.prod(1) * 3, torch.prod(x, 0, keepdim=True), w.prod(), last, whole


def gradient_of_a_products_gradient(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda y: y.prod())(x) * 2 + w.sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (some_need_none, (rand(3, 4, grad=False), rand(4, 3), rand(3))),
        (unused, (rand(3, 3), rand(3))),
        (through_detach, (rand(3, 3), rand(3, 3))),
        (partly_without_grad, (rand(3, 3), rand(3, 3))),
        (in_place_inside, (rand(3, 3), rand(3, 3))),
        (attention, (rand(2, 4, 4), rand(4, 12))),
        (masked_attention, (rand(2, 2, 5, 4), rand(5, 5, grad=False))),
        (masked_attention, (rand(1, 2, 5, 4), rand(5, 5))),
        (losses, (rand(3, 3), rand(3, 3))),
        (normalised, (rand(3, 3), rand(3, 3))),
        (indexed, (rand(3, 3), rand(3, 3))),
        (products, (with_zeros(), rand(2, 3))),
        (products, (rand(3, 4), with_zeros())),
        (gradient_of_a_products_gradient, (with_zeros(), rand(3))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_program(function: Any, inputs: tuple[Tensor, ...], backend: str) -> None:
    compare(function, *inputs, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_draws_the_numbers_that_eager_draws(backend: str) -> None:
    def step(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.4) * 2, 0.1) + F.dropout1d(x, 0.5)

    compare(step, rand(6, 8), backend=backend)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0.2, 0.8)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 0.5 * (x < 0.9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_custom_function(backend: str) -> None:
    compare(lambda x, w: Clamp.apply(x * w).sin(), rand(4, 4), rand(4, 4), backend=backend)


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.seen.mul_(0.9).add_(grads[0].abs().mean())
        return grads[0] / ctx.seen, None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchDynamo makes an instance
def test_a_backward_that_writes_to_an_input() -> None:
    found = []
    for make in (lambda fn: fn, functools.partial(torch.compile, backend="fusee")):
        seen, x = torch.ones(()), torch.ones(3, requires_grad=True)
        step = make(lambda x, seen: Watched.apply(x, seen).square().sum())
        step(x, seen).backward()
        found.append((seen, x.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint(backend: str) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(layer, x, w, use_reentrant=False)
        assert isinstance(inner, Tensor)
        return inner.sin()

    compare(step, rand(4, 4), rand(4, 4), backend=backend)


# ------------------------------------------------------------------------------ uses of a result


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_results_are_not_used(backend: str) -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, w), (x * w).t()

    inputs = rand(3, 3), rand(3, 3)
    compare(step, *inputs, backend=backend, loss=lambda out: out[0].sum())
    compare(step, *inputs, backend=backend, loss=lambda out: out[1][0].sum())
    compare(step, *inputs, backend=backend, loss=lambda out: out[1].expand(2, 3, 3).sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_result_requires_grad(backend: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x.detach(), w.detach().t())

    x, w = rand(3, 4), rand(5, 4)
    got = compiled(fn, backend)(x, w)
    assert not got.requires_grad
    torch.testing.assert_close(got, fn(x, w))


def test_a_graph_is_retained() -> None:
    step = compiled(layer)
    x, w = rand(4, 4), rand(4, 4)
    loss = step(x, w).sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    loss.backward()
    same("accumulated", x.grad, first * 2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_grad_of_some_inputs() -> None:
    step = compiled(layer)
    x, w = rand(4, 4), rand(4, 4)
    (found,) = torch.autograd.grad(step(x, w).sum(), [w])
    (expected,) = torch.autograd.grad(layer(x, w).sum(), [w])
    same("w", found, expected)
    assert x.grad is None and w.grad is None


def test_gradients_reach_what_was_computed_before() -> None:
    step = compiled(layer)
    x, w = rand(4, 4), rand(4, 4)
    inner = x.exp()
    inner.retain_grad()
    step(inner, w).sum().backward()
    other = x.detach().clone().requires_grad_()
    before = other.exp()
    before.retain_grad()
    layer(before, w).sum().backward()
    same("inner", inner.grad, before.grad)
    same("x", x.grad, other.grad)


def test_hooks_on_tensors_and_parameters() -> None:
    seen: list[str] = []
    module = nn.Linear(4, 4)
    step = compiled(module)

    def double(grad: Tensor) -> Tensor:
        seen.append("weight")
        return grad * 2

    module.weight.register_hook(double)
    module.bias.register_post_accumulate_grad_hook(lambda p: seen.append("bias"))
    x = rand(3, 4)
    y = step(x)
    y.register_hook(lambda g: seen.append("result"))
    y.sum().backward()
    assert sorted(seen) == ["bias", "result", "weight"]
    assert module.weight.grad is not None
    same("weight", module.weight.grad, 2 * x.detach().sum(0).expand(4, 4).contiguous())


def test_hooks_on_saved_tensors_see_all_that_is_saved() -> None:
    packed: list[torch.Size] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x.clone()

    step = compiled(layer)
    x, w = rand(4, 4), rand(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.t().clone().t()):
        y = step(x, w)
    assert packed
    y.sum().backward()
    other = x.detach().clone().requires_grad_()
    layer(other, w).sum().backward()
    same("x", x.grad, other.grad)


def test_a_hook_that_gives_back_something_else_is_refused() -> None:
    step = compiled(layer)
    x, w = rand(4, 4), rand(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.double()):
        y = step(x, w)
    with pytest.raises(InputError, match="hook on saved tensors"):
        y.sum().backward()


def test_saved_tensors_are_freed() -> None:
    step = compiled(layer)
    x, w = rand(64, 64), rand(64, 64)
    y = step(x, w)
    node = y.grad_fn
    assert node is not None
    y.sum().backward()
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = node.saved_tensors


def test_no_grad_and_inference_at_the_call() -> None:
    step = compiled(layer)
    x, w = rand(4, 4), rand(4, 4)
    with torch.no_grad():
        same("no_grad", step(x, w), layer(x, w))
    with torch.inference_mode():
        same("inference", step(x, w), layer(x, w))
    assert step(x, w).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend: str) -> None:
    def inside(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = (x @ w).softmax(-1)
            return torch.einsum("ij,kj->ik", y, w) * F.linear(x, w)

    def around(f: Callable[..., Any], *args: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return f(*args)

    x, w = rand(4, 4), rand(4, 4)
    for function, call in ((inside, None), (layer, around)):
        step = compiled(function, backend)
        ours, theirs = ((call or (lambda f, *a: f(*a)))(f, x, w) for f in (step, function))
        assert ours.dtype is theirs.dtype
        grads = [torch.autograd.grad(y.float().sum(), [x, w]) for y in (ours, theirs)]
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        for a, b in zip(*grads, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_forwards_of_a_batch_norm(backend: str) -> None:
    """The second writes to running statistics, which no backward in training reads."""
    given, found = [torch.randn(5, 4, 3) for _ in "ab"], []
    for is_compiled in (False, True):
        norm = nn.BatchNorm1d(4)
        call = compiled(norm, backend) if is_compiled else norm
        for _ in range(2):
            first, second = map(call, given)
            (first.sin() * second).sum().backward()
        found.append([*(p.grad for p in norm.parameters()), norm.running_mean, norm.running_var])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_weights(backend: str) -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    index = torch.tensor([[1, 2], [6, 0]])

    def step(i: Tensor) -> Tensor:
        return F.cross_entropy(head(table(i)).flatten(0, 1), i.flatten())

    step(index).backward()
    assert table.weight.grad is not None
    expected = table.weight.grad.clone()
    table.weight.grad = None
    compiled(step, backend)(index).backward()
    same("tied", table.weight.grad, expected)


def test_other_sizes_with_symbols() -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x @ w, (4,))
        return F.gelu(y).mean(), y[:, 0]

    call = compiled(step, dynamic=True)
    for rows in (3, 5, 8):
        x, w = rand(rows, 4), rand(4, 4)
        other, twin = (t.detach().clone().requires_grad_() for t in (x, w))
        for f, a, b in ((call, x, w), (step, other, twin)):
            loss, first = f(a, b)
            (loss + first.sin().sum()).backward()
        same("x", x.grad, other.grad)
        same("w", w.grad, twin.grad)


def test_a_size_that_is_found_where_saved_values_are_chosen() -> None:
    def step(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(torch.stack([x @ w, x], -1).mean(-1))
        part = torch.stack([h @ w, h], -1).mean(-1)[:, :16]
        return torch.stack([part, part * 2], -1) * scale, part

    call = fusee.compile(step)
    for n in (24, 16, 20, 16):  # of 16 the part is all there is, and dense
        given = rand(3, n, 8), rand(8, 8), rand(3, 16, 8, 2)
        found = [
            torch.autograd.grad([y.sin().sum() for y in f(*given)], given) for f in (call, step)
        ]
        for name, one, other in zip("xws", *found, strict=True):
            same(name, one, other)


def test_the_backward_empties_the_list_that_it_takes() -> None:
    x, w = torch.rand(3, 4), torch.rand(4, 5)
    graph = trace(fx.symbolic_trace(lambda x, w: (torch.mm(x, w).sin(), w.t())), [x, w])
    call = compile_aten(graph, (), Options(), Report("half"), saved=())
    given = [x, w]
    product, turned = call(given)
    assert not given
    same("product", product, torch.mm(x, w).sin())
    assert turned.data_ptr() == w.data_ptr()
