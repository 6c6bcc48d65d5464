"""Training through fusee.compile: programs that run backward passes themselves, and what autograd
does around compiled functions. Each runs eagerly and compiled, from the same seed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusee
from fusee.errors import FuseeWarning
from tests.autodiff.steps import same

Compile = Callable[[Any], Any]


def param(*size: int) -> Tensor:
    return torch.randn(size).requires_grad_()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def grads(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def accumulated(c: Compile) -> Any:
    module = network()

    def step(module: nn.Module, x: Tensor) -> None:
        for k in range(3):
            (module(x[k]).square().mean() / 3).backward()

    run = c(step)
    for _ in range(2):
        run(module, torch.randn(3, 4, 6))
    return grads(module)


def autocast_inside(c: Compile) -> Any:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = c(step)
    losses = [run(torch.ones(4, 6)) for _ in range(2)]
    assert all(x.dtype is torch.bfloat16 for x in losses)
    return [x.float().round(decimals=2) for x in losses]


def hooks_that_come_later(c: Compile) -> Any:
    module = network()
    run = c(module)
    run(torch.randn(4, 6)).square().sum().backward()
    first = next(module.parameters())
    handle = first.register_hook(lambda grad: grad * 2)
    run(torch.randn(4, 6)).square().sum().backward()
    handle.remove()
    run(torch.randn(4, 6)).square().sum().backward()
    return grads(module)


def module_hooks(c: Compile) -> Any:
    module: Any = network()
    seen: list[Any] = []
    module[2].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    module[1].register_full_backward_pre_hook(lambda module, out: seen.append(out[0].clone()))
    x = param(4, 6)
    c(module)(x).square().sum().backward()
    return grads(module), seen, x.grad


def hook_inside(c: Compile) -> Any:
    def step(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 3)
        return y.cos().sum()

    x = param(4)
    c(step)(x).backward()
    return x.grad


def frozen_for_a_while(c: Compile) -> Any:
    module: Any = network()
    run = c(module)
    run(torch.randn(4, 6)).sum().backward()
    module[0].requires_grad_(False)
    module.zero_grad()
    run(torch.randn(4, 6)).sum().backward()
    kept = [None if g is None else g.clone() for g in grads(module)]
    module[0].requires_grad_(True)
    run(torch.randn(4, 6)).sum().backward()
    return kept, grads(module)


def a_view_of_a_plain_input_is_written_to(c: Compile) -> Any:
    x, w = torch.randn(3, 3), param(3, 3)
    view, product = c(lambda x, w: (x.t(), x + w.sin()))(x, w)
    view.mul_(w)  # x has a gradient from here on
    (x.sum() + product.sum()).backward()
    return x.requires_grad, w.grad


def dropout_in_layers(c: Compile) -> Any:
    module = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.3), nn.AlphaDropout(0.2))
    out = c(module)(torch.randn(4, 6))
    out.sum().backward()
    return out, grads(module), torch.rand(3)


def dropout_of_attention(c: Compile) -> Any:
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    x = param(2, 5, 8)
    out = c(lambda x: layer(x, x, x)[0])(x)
    out.square().sum().backward()
    return out, x.grad, torch.rand(2)


def gradient_of_what_it_computes(c: Compile) -> Any:
    def step(x: Tensor) -> Tensor:
        inner = x.sin()
        try:
            (found,) = torch.autograd.grad((inner * inner).sum(), inner)
        except Exception:  # noqa: BLE001  # the program's own, that must not see what capture does
            return x
        return found

    return c(step)(param(4))


def two_players(c: Compile) -> Any:
    """The first loss frees nothing of what made the samples: it took them detached."""
    maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (maker, judge)]

    def step(real: Tensor, noise: Tensor) -> Tensor:
        made = maker(noise)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        loss.backward()
        optimizers[1].step()
        other = F.softplus(-judge(made)).mean()
        other.backward()
        optimizers[0].step()
        return loss.detach() + other.detach()

    run = c(step)
    losses = [run(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    return losses, grads(maker), grads(judge)


def tangents(c: Compile) -> Any:
    run = c(lambda x: x.sin() * 2)
    run(torch.randn(4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(4), torch.randn(4))
        return forward_ad.unpack_dual(run(dual)).tangent


def checkpoints_around(c: Compile) -> Any:
    """Their second run ends by an error that a hook raises while the compiled graph saves."""
    found = []
    for norm, use_reentrant in itertools.product((nn.BatchNorm1d, nn.LayerNorm), (False, True)):
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), norm(4), nn.Tanh(), nn.Dropout(0.3))
        block = c(layers)
        for rows in (3, 3, 4):
            x = torch.randn(rows, 4, requires_grad=True)
            y = checkpoint(block, x, use_reentrant=use_reentrant)
            checkpoint(block, y, use_reentrant=use_reentrant).sum().backward()
        found.append((grads(layers), list(layers.buffers())))
    return found


def a_hook_on_saved_tensors_that_raises(c: Compile) -> Any:
    seen: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x.shape)
        raise ValueError("too much is saved")

    run, x = c(lambda x: x.sin()), torch.ones(3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ValueError), torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
            run(x)
    return seen


COMPILED = [
    checkpoints_around,
    a_hook_on_saved_tensors_that_raises,
    accumulated,
    autocast_inside,
    hooks_that_come_later,
    module_hooks,
    hook_inside,
    frozen_for_a_while,
    a_view_of_a_plain_input_is_written_to,
    dropout_in_layers,
    dropout_of_attention,
    two_players,
    gradient_of_what_it_computes,
]


def _both(program: Callable[[Compile], Any]) -> None:
    found = []
    for c in (fusee.compile, lambda function: function):
        torch.manual_seed(0)
        found.append(pytree.tree_leaves(program(c)))
    for k, (ours, theirs) in enumerate(zip(*found, strict=True)):
        same(f"item {k}", ours, theirs)


@pytest.mark.parametrize("program", COMPILED)
def test_as_eager(program: Any, recwarn: pytest.WarningsRecorder) -> None:
    _both(program)
    assert not [w for w in recwarn if issubclass(w.category, FuseeWarning)]


def test_runs_eagerly_and_says_so() -> None:
    with pytest.warns(FuseeWarning, match="forward-mode"):
        _both(tangents)


def test_parts_of_a_graph_are_freed_one_by_one() -> None:
    run = fusee.compile(lambda x, w: (x.exp().sum(), w.sin().sum(), (w * 2).sin().sum()))
    x, w = param(3), param(3)
    first, second, third = run(x, w)
    first.backward()
    (second + third).backward()
    same("w", w.grad, (w.cos() + 2 * (w * 2).cos()).detach())
    with pytest.raises(RuntimeError, match="second time"):
        first.backward()
    first, second, third = run(x, w)
    second.backward()
    with torch.no_grad():
        w.add_(1)  # the other part's
    first.backward()
    first, second, third = run(x, w)
    first.backward()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        second.backward()


def test_a_graph_that_waits_for_a_backward_is_freed_with_its_results() -> None:
    run = fusee.compile(lambda x, w: (x.exp(), w.exp()))
    x, w = param(3), param(3)
    first, second = run(x, w)
    first.sum().backward()
    node = weakref.ref(second.grad_fn)
    del first, second
    assert node() is None


def test_dropout_keeps_as_many_as_it_should() -> None:
    x = torch.ones(400, 500).requires_grad_()
    out = fusee.compile(lambda x: F.dropout(x, 0.3))(x)
    out.sum().backward()
    zeros = (out == 0).float().mean().item()
    assert abs(zeros - 0.3) < 0.006  # six standard deviations
    assert torch.equal(x.grad, out.detach())  # type: ignore[arg-type]  # there is one


def two_losses(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return (x * t).exp().sum(), (y * t).sin().sum(), x.detach() * 2, t + 1


def of_one_input(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return (x * t).exp().sum(), (x.sin() * y).sum()


def of_noise(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return (F.dropout(x, 0.5) * x).exp().sum(), (y.sin() * t).sum()


@pytest.mark.parametrize("fn", [two_losses, of_one_input, of_noise])
@pytest.mark.parametrize("order", ["sum", "01", "10", "00", "retain", "double"])
def test_losses_that_lead_to_histories_of_their_own(fn: Callable[..., Any], order: str) -> None:
    """The engine goes on to all that a node leads to, and what a pass has used up raises there."""
    compiled = fusee.compile(fn, options={"prices": False})
    found = []
    for run in (fn, compiled):
        torch.manual_seed(3)
        a, b = (torch.arange(1.0, 7).requires_grad_() for _ in range(2))
        results = run(a * 0.5, b.cos(), torch.ones(6))
        try:
            if order == "sum":
                (results[0] + results[1]).backward()
            elif order == "retain":
                results[0].backward(retain_graph=True)
                results[0].backward()
                results[1].backward()
            elif order == "double":
                (first,) = torch.autograd.grad(results[0], a, create_graph=True)
                (first.sum() + results[1]).backward()
            else:
                for k in map(int, order):
                    results[k].backward()
            told = ""
        except RuntimeError as error:
            told = str(error)
        found.append((a.grad, b.grad, told, [x.requires_grad for x in results]))
    (*want, told, needs), (*got, said, need) = found
    assert (
        said == told
        and needs == need
        and ("second time" in told)
        is (order == "00" or (fn is of_one_input and order in ("01", "10", "retain")))
    )
    for one, other in zip(got, want):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
