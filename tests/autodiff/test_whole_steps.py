"""Whole training steps as one graph: forward, backward and the optimizer's update.

Each program is a step that runs five times, in eager and compiled: what it gives, and all that it
changes, is equal after each. `ONE` are steps that are one graph. In `PARTS` a pass is autograd's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusee
from fusee.autodiff.partition import differentiate
from fusee.backends.native import compile_native
from fusee.capture.dynamic import Varying
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from fusee.errors import FuseeWarning
from fusee.fake.gradients import history, saves
from fusee.torch_functions import training
from tests.capturing.same import Traced

STEPS = 5
CHANNELS_LAST: Any = {"memory_format": torch.channels_last}
randn = functools.partial(torch.randn, dtype=torch.float64)
Step = Callable[[Any, Any, Tensor, Tensor], Any]


class Whole(Traced):
    """A function compiled for the CPU, whose graphs may have backward passes in them."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.graphs = []
        varying = functools.partial(Varying, with_backward=True, tells_writes=True)
        self.compiled = CompiledFunction(fn, self._compiled, Policy(), varying=varying)  # type: ignore[arg-type]

    def _compiled(self, gm: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        gm.graph.lint()
        self.graphs.append(gm)
        return compile_native(gm, examples, {})


class AsCaptured(Whole):
    """The same, with graphs run as they are."""

    def _compiled(self, gm: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward


# ---------------------------------------------------------------------------- what is compared


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


class Program(NamedTuple):
    """A step of a model and its optimizer.

    before   called with both, and the number of the step, before each
    data     what the step is given
    """

    step: Step
    optimizer: str = "adam"
    model: Callable[[], nn.Module] = net
    before: Callable[[Any, Any, int], object] = lambda model, optimizer, k: None
    data: Callable[[int], tuple[Tensor, Tensor]] = lambda k: (randn(6, 4), randn(6, 3))


def ran(p: Program, compiler: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """What five steps give, and all that can be seen after each."""
    torch.manual_seed(0)
    model = p.model()
    optimizer = OPTIMIZERS[p.optimizer](model.parameters())
    run = compiler(lambda x, y: p.step(model, optimizer, x, y))
    seen = []
    for k in range(STEPS):
        p.before(model, optimizer, k)
        torch.manual_seed(100 + k)
        given, leaves = p.data(k), [*model.parameters()]
        versions, before = [x._version for x in leaves], [x.grad for x in leaves]
        try:
            out = run(*given)
        except Exception as error:  # noqa: BLE001  # whatever eager raises
            out = type(error), str(error).partition("\n")[0]
        listed = out if isinstance(out, tuple) else (out,)
        tensors = [x for x in listed if isinstance(x, Tensor)]
        grads = [x.grad for x in leaves if x.grad is not None and not x.grad.is_sparse]
        state = {
            "out": [x.detach().clone() if isinstance(x, Tensor) else x for x in listed],
            "history": [(x.requires_grad, x.is_leaf) for x in tensors],
            "given": [x.detach().clone() for x in given],
            "leaves": [x.detach().clone() for x in leaves],
            "written": [x._version > was for x, was in zip(leaves, versions)],
            "grads": [None if x.grad is None else x.grad.clone() for x in leaves],
            "layout": [x.stride() for x in grads],
            "same": [x.grad is was for x, was in zip(leaves, before)],
            "apart": len({x.data_ptr() for x in grads}) == len(grads),
            "traits": [(x.requires_grad, x.is_leaf) for x in grads],
            "buffers": [x.clone() for x in model.buffers()],
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "random": torch.get_rng_state(),
        }
        if "fused" in p.optimizer:  # torch's kernel does not count its writes
            del state["written"]
        seen.append((state, [x._is_view() for x in grads]))
    return seen, run


def equal(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), (where, a, b)
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            equal(a[key], b[key], f"{where} {key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), (where, a, b)
        for k, pair in enumerate(zip(a, b)):
            equal(*pair, f"{where} {k}")
    else:
        assert a == b, (where, a, b)


def both(p: Program, kind: type[Whole] = Whole) -> Whole:
    """Five steps, which must equal eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FuseeWarning)  # of what eager refuses, too
        theirs, _ = ran(p, lambda step: step)
        ours, step = ran(p, kind)
    for k, ((a, views), (b, theirs_are)) in enumerate(zip(ours, theirs, strict=True)):
        equal(a, b, f"step {k}:")
        assert not any(x and not y for x, y in zip(views, theirs_are, strict=True))
    assert isinstance(step, Whole)
    return step


ONE: dict[str, Program] = {}
PARTS: dict[str, Program] = {}


def one(**more: Any) -> Callable[[Step], Step]:
    """A step that is one graph."""
    return functools.partial(_listed, ONE, more)


def parts(**more: Any) -> Callable[[Step], Step]:
    """One in which a backward pass is autograd's own, or where something else ends the graph."""
    return functools.partial(_listed, PARTS, more)


def _listed(where: dict[str, Program], more: dict[str, Any], step: Step) -> Step:
    where[step.__name__] = Program(step, **more)
    return step


# ---------------------------------------------------------------------------- one graph


@one()
def plain(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    loss = F.mse_loss(m(x), y)
    loss.backward()
    o.step()
    return loss.detach()


for _name in OPTIMIZERS:
    ONE[f"plain {_name}"] = Program(plain, _name)


@one(data=lambda k: (randn(5 + k, 4), randn(5 + k, 3)))
def sizes_that_vary(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@one()
def zeros(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad(set_to_none=False)
    F.mse_loss(m(x), y).backward()
    o.step()


@one()
def let_go_of_in_the_middle(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    loss = F.mse_loss(m(x), y)
    m.zero_grad()
    loss.backward()
    o.step()


@one()
def let_go_of_at_the_end(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    F.mse_loss(m(x), y).backward()
    o.step()
    o.zero_grad()


@one()
def zeroed_at_the_end(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    F.mse_loss(m(x), y).backward()
    o.step()
    o.zero_grad(set_to_none=False)


@one()
def never_let_go_of(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    F.mse_loss(m(x), y).backward()
    o.step()


@one()
def results_whose_history_is_used_up(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    out = m(x)
    loss = F.mse_loss(out, y)
    loss.backward()
    o.step()
    return loss, out


@one()
def accumulated(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    for a, b in zip(x.chunk(2), y.chunk(2)):
        (F.mse_loss(m(a), b) / 2).backward()
    o.step()


@one()
def clipped(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m(x), y).backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    nn.utils.clip_grad_value_(m.parameters(), 0.01)
    o.step()
    return norm


@one()
def checked(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    loss = F.mse_loss(m(x), y)
    if not torch.isfinite(loss):
        raise ValueError("the loss is not finite")
    loss.backward()
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    if norm > 1e9:
        raise OverflowError("the gradients are not finite")
    o.step()
    return loss


@one(data=lambda k: (randn(6, 4), torch.randint(3, (6,))))
def let_go_of_after_what_may_fail(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(m(x), y)
    o.zero_grad()
    loss.backward()
    o.step()


@one()
def two_losses(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    a, b = F.mse_loss(m(x), y), F.l1_loss(m(x * 2), y)
    a.backward()
    b.backward()
    o.step()
    return a.detach(), b.detach()


@one()
def two_steps(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y), plain(m, o, x + 1, y)


@one()
def autocast(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    with torch.autocast("cpu"):
        loss = F.mse_loss(m(x), y)
        loss.backward()
    with torch.autocast("cpu"):
        other = F.mse_loss(m(x), y)
    other.backward()
    o.step()


@one(before=lambda m, o, k: m[0].weight.requires_grad_(k in (0, 3)))
def frozen_now_and_then(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@one()
def unused_parameters(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m[0](x), y.repeat(1, 2)[:, :5]).backward()
    o.step()


@one()
def a_parameter_used_twice(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    w = m[0].weight
    F.mse_loss(F.linear(torch.tanh(F.linear(x, w)), w.t()), x).backward()
    o.step()


@one()
def dropout(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m[2](F.dropout(m[:2](x), 0.3)), y).backward()
    o.step()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.norm(self.a(x)).relu())
        return found


@one(model=Normed)
def batch_norm(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@one(model=lambda: nn.Conv2d(3, 4, 3).double().to(**CHANNELS_LAST),
     data=lambda k: (randn(2, 3, 6, 5), randn(2, 4, 4, 3)))  # fmt: skip
def channels_last(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.w).abs()


@one(model=Complex, optimizer="sgd")
def complex_parameters(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@one()
def without_grad_mode(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        with torch.enable_grad():
            loss = F.mse_loss(m(x), y)
        o.zero_grad()
        loss.backward()
    o.step()
    return loss.detach()


@one()
def by_hand(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    F.mse_loss(m(x), y).backward()
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(p.grad, alpha=0.1)
            p.grad = None


@one()
def through_data(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m(x), y).backward()
    for p in m.parameters():
        p.data.add_(p.grad, alpha=-0.1)


@one()
def with_a_gradient_given(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    m(x).backward(y)
    (m[2].bias + 0).backward(torch.ones(3, dtype=torch.float64))
    torch.autograd.backward(F.mse_loss(m(x), y))
    o.step()


@one()
def a_closure(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    def closure() -> Tensor:
        o.zero_grad()
        loss = F.mse_loss(m(x), y)
        loss.backward()
        return loss

    return o.step(closure)


@one(data=lambda k: (randn(6, 4).requires_grad_(), randn(6, 3)))
def an_input_that_is_a_leaf(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    plain(m, o, x, y)
    return x.grad


@one()
def grads_that_are_looked_at(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m(x), y).backward()
    total = sum(p.grad.square().sum() for p in m.parameters())
    m[0].weight.grad, was = m[0].weight.grad * 2, m[0].weight.grad
    o.step()
    return total, was, m[0].weight.grad is was


@one()
def inputs_that_are_written_to(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    x.mul_(2)
    F.mse_loss(m(x), y).backward()
    x.add_(1)
    o.step()


@one()
def a_compiled_module_within(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(fusee.compile(m)(x), y).backward()
    o.step()


@one()
def two_optimizers(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    plain(m, o, x, y)
    m[2].zero_grad()
    F.l1_loss(m[2](m[:2](x).detach()), y).backward()
    with torch.no_grad():
        m[2].weight.sub_(m[2].weight.grad)


@one()
def gradients_that_are_one_number(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    sum(p.sum() for p in m.parameters()).backward()
    o.step()


def _load(m: Any, o: Any, k: int) -> None:
    if k == 1:
        m.kept = copy.deepcopy(o.state_dict())
    if k == 3:
        o.load_state_dict(m.kept)
        m[0].weight.data = randn(5, 4)
        for p in m.parameters():
            p.grad = torch.ones_like(p)


@one(before=_load)
def a_state_that_is_loaded(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


# ---------------------------------------------------------------------------- parts


@parts()
def losses_at_once(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    out = m(x)
    torch.autograd.backward([F.mse_loss(out, y), F.l1_loss(out, y)])
    o.step()


@parts()
def retained(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    out = m(x)
    F.mse_loss(out, y).backward(retain_graph=True)
    F.l1_loss(out, y).backward()
    o.step()


@parts()
def twice_through_the_same(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    loss = F.mse_loss(m(x), y)
    loss.backward()
    loss.backward()


@parts()
def twice_through_a_write_to_a_part(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    y[0] = m[2].bias
    try:
        y.sum().backward()
        y.sum().backward()
    finally:
        x.retain_grad()


@parts()
def a_result_with_a_history_of_its_own(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    other = (m[2].weight * 2).sum()
    F.mse_loss(m(x), y).backward()
    return other


@parts()
def checkpointed(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m[2](checkpoint(m[:2], x, use_reentrant=False)), y).backward()
    o.step()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x


@parts()
def a_function_of_the_users(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(Scaled.apply(m(x)), y).backward()
    o.step()


def _doubled(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def _hook(m: Any, o: Any, k: int) -> None:
    if k == 1:
        m.handle = m[0].weight.register_hook(lambda g: g * 2)
    if k == 3:
        m.handle.remove()
        m[2].bias.register_post_accumulate_grad_hook(_doubled)
        m[2].register_full_backward_hook(lambda module, before, after: None)


@parts(before=_hook, data=lambda k: (randn(1, 4), randn(1, 3)))
def hooks_that_come_and_go(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    m(x).sum().backward()
    o.step()


def _hold(m: Any, o: Any, k: int) -> None:
    if k == 0:
        m.node = m[0].weight.view_as(m[0].weight).grad_fn.next_functions[0][0]
        m.node.register_prehook(lambda grads: (grads[0] * 2,))


@parts(before=_hold)
def a_node_that_somebody_holds(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@parts(before=lambda m, o, k: m.requires_grad_(False))
def nothing_requires_grad(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@parts()
def gradients_as_results(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    params = [*m.parameters()]
    for p, grad in zip(params, torch.autograd.grad(F.mse_loss(m(x), y), params)):
        p.grad = grad
    o.step()


@parts()
def a_penalty(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    x = x.clone().requires_grad_()
    loss = F.mse_loss(m(x), y)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    o.step()


@parts()
def some_leaves_alone(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m(x), y).backward(inputs=[m[0].weight])
    o.step()


def _leaf(k: int) -> Tensor:
    base = randn(6, 8)  # a view's gradient may be its affair alone
    x = base[:, ::2] if k % 2 else base[:, :4].clone()
    (base if k == 3 else x).requires_grad_()
    return x


@parts(data=lambda k: (_leaf(k + 1), _leaf(k)))
def leaves_that_are_views(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    F.mse_loss(m(x), y[:, :3]).backward()
    return x.grad, y.grad


@parts(data=lambda k: (randn(6, 8)[:, ::2], randn(6, 3)))
def a_view_made_a_leaf(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    F.mse_loss(m(x.requires_grad_()), y).backward()
    return x.grad


@parts()
def retained_grads(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    h = m[:2](x)
    h.retain_grad()
    F.mse_loss(m[2](h), y).backward()
    o.step()
    return h.grad


@parts(data=lambda k: (randn(5 + k, 4), randn(5 + k, 3)))
def an_error_in_the_middle(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    F.mse_loss(m(x), y).backward()
    if x.shape[0] > 7:
        raise ValueError("too many")
    o.step()


@parts()
def no_scalar(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    m(x).backward()
    o.step()


@parts()
def what_was_saved_is_written_to(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    h = m[:2](x)
    out = m[2](h)
    h.add_(1)
    out.sum().backward()


@parts(data=lambda k: (randn(6, 4).requires_grad_() * 2 if k % 2 else randn(6, 4), randn(6, 3)))
def an_input_with_a_history(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


@parts()
def a_schedule(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    plain(m, o, x, y)
    torch.optim.lr_scheduler.ExponentialLR(o, 0.9).step()


SCALER = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


@parts(before=lambda m, o, k: SCALER.load_state_dict({**SCALER.state_dict(), "scale": 2.0**10}))
def a_scaler(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    SCALER.scale(F.mse_loss(m(x), y)).backward()
    SCALER.step(o)
    SCALER.update()


@parts()
def hooks_on_what_is_saved(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    o.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        F.mse_loss(m(x), y).backward()
    o.step()


@parts(model=lambda: nn.Embedding(10, 3, sparse=True).double(), optimizer="sgd",
       data=lambda k: (torch.randint(10, (6,)), randn(6, 3)))  # fmt: skip
def sparse_rows(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
    return plain(m, o, x, y)


# ---------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", ONE)
def test_a_step_is_one_graph(name: str) -> None:
    step = both(ONE[name])
    assert not step.stops, step.stops


@pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")
def test_a_loss_and_what_is_detached_from_it_are_compiled() -> None:
    def step(x: Tensor) -> Any:
        hidden = model(x).tanh()
        loss = hidden.square().mean()
        loss.backward()
        return loss, loss.detach(), hidden, hidden.detach()[1:]

    model, x = net(), randn(6, 4)
    equal(fusee.compile(step)(x), step(x))


@pytest.mark.parametrize("name", PARTS)
def test_a_pass_of_autograds_own(name: str) -> None:
    step = both(PARTS[name])
    assert step.stops


def test_large_gradients_are_not_held_beside_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_SMALL", 100)
    assert both(ONE["let_go_of_after_what_may_fail"]).stops
    assert not both(ONE["plain"]).stops


def test_gradients_stay_where_what_comes_before_they_are_let_go_of_fails() -> None:
    found = []
    for make in (lambda fn: fn, Whole, fusee.compile):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        listed = functools.partial(let_go_of_after_what_may_fail, model, optimizer)
        step = make(lambda x, y, listed=listed: listed(x, y))
        for labels in ([0, 1], [2, 1], [0, 7], [1, 1]):
            with pytest.raises(IndexError) if 7 in labels else contextlib.nullcontext():
                step(torch.arange(8.0).view(2, 4), torch.tensor(labels))
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
    for k, grad in enumerate(found):
        torch.testing.assert_close(grad, found[k % 4])


@pytest.mark.parametrize("name", ["plain", "accumulated", "clipped", "channels_last", "dropout"])
def test_graphs_run_as_they_are(name: str) -> None:
    """As does one whose inputs share memory."""
    assert not both(ONE[name], AsCaptured).stops


def test_what_autocast_keeps_may_end_at_an_older_node_of_a_leaf() -> None:
    def step(x: Tensor) -> Tensor:
        x.add_(1)  # or the graph's error would be eager's to raise
        loss = model(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()

    seen = []
    for run in (step, AsCaptured(step)):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3), torch.randn(6, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                model.zero_grad()
                model(x)
                model.double().float()
                seen.append([run(x), model.weight.grad, model.bias.grad])
    equal(seen[:3], seen[3:])


LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda p: p.exp().sum(),
    lambda p: (p + 1).sum(),
    lambda p: torch.zeros(2, 2).index_put_((torch.tensor(1),), p).sum(),
    lambda p: torch.stack([torch.zeros(2), p])[0].copy_(p).sum(),
    lambda p: torch._foreach_add([p, p], 1.0)[0].sum(),
    lambda p: Scaled.apply(p).sum(),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_pass_lets_go_of(loss: Callable[[Tensor], Tensor]) -> None:
    found = loss(torch.ones(2, requires_grad=True))
    is_once = any(saves(node) for node in history(found))
    found.backward()
    with pytest.raises(RuntimeError, match="second") if is_once else contextlib.nullcontext():
        found.backward()


def test_what_is_used_up_behind_a_break_where_gradients_are_off() -> None:
    def step(x: Tensor, flag: Tensor) -> Tensor:
        with torch.no_grad():
            if flag:
                pass
        y = x * 2
        y.backward(torch.ones(2))
        return y

    made = AsCaptured(step)(torch.ones(2).requires_grad_(), torch.ones(()))
    assert made.requires_grad and not made.is_leaf
    with pytest.raises(RuntimeError, match="second time"):
        made.backward(torch.ones(2))


def test_a_pass_that_goes_beside_the_one_in_the_graph() -> None:
    first, other = (torch.ones((), requires_grad=True) for _ in range(2))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = first * x
        y.backward()
        return other**3 * y, y * 2

    for run in (AsCaptured(step), step):  # whose results hold the leaves
        beside, spent = run(torch.ones(()))
        assert torch.autograd.grad(beside, other)[0] == 3
        for x in (beside, spent):
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(x, first, allow_unused=True)


def test_a_view_whose_history_autograd_refuses_to_tell() -> None:
    scale = torch.ones((), requires_grad=True)

    def step(x: Tensor) -> Tensor:
        (scale * 3).backward()
        x = x * 2
        first, _ = x.unbind()
        x.mul_(scale)
        return first

    with pytest.raises(RuntimeError, match="function that returns multiple views"):
        AsCaptured(step)(torch.ones(2)).add_(1)
    assert scale.grad == 3


def test_a_bad_index_leaves_all_as_it_was() -> None:
    def step(m: Any, o: Any, x: Tensor, y: Tensor) -> Any:
        o.zero_grad()
        F.cross_entropy(m(x), y).backward()
        o.step()

    data = lambda k: (randn(5, 4), torch.full((5,), 7 if k == 3 else 2))  # noqa: E731
    both(Program(step, data=data))


def test_later_steps_compile_nothing() -> None:
    """Gradients exist at the second step: another version, of the same graph."""
    graphs: list[int] = []
    step = both(Program(plain, before=lambda m, o, k: graphs.append(k)))
    assert len(step.compiled.entries) == 2
    assert len({id(e.compiled) for e in step.compiled.entries}) <= len(step.graphs) == 2
    assert str(step.graphs[0].code) == str(step.graphs[1].code)


def test_old_gradients_are_gone_before_the_graph_runs() -> None:
    """As in eager, where zero_grad() comes first: a step holds one set of gradients."""
    alive: list[bool] = []
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Watching(Whole):
        def _compiled(self, gm: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            call = super()._compiled(gm, examples)

            def watched(*inputs: Any) -> Any:
                alive.append(any(p.grad is not None for p in model.parameters()))
                return call(*inputs)

            return watched

    step = Watching(lambda x, y: plain(model, optimizer, x, y))
    for k in range(3):
        torch.manual_seed(k)
        step(randn(6, 4), randn(6, 3))
    assert alive == [False] * 3


def test_what_the_backward_reads_again_is_computed_again() -> None:
    """As between two graphs: of each gelu its operand alone is held for the backward."""
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 3)).double()
    found: list[Any] = []

    class Split(Whole):
        def _compiled(self, gm: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
            found.append(differentiate(gm, examples).forward)
            return super()._compiled(gm, examples)

    Split(lambda x: model(x).square().mean().backward())(randn(512, 64))
    gelu = torch.ops.aten.gelu.default
    nodes = found[0].graph.find_nodes(op="call_function", target=gelu)
    assert [node.meta.get("late", 0) for node in nodes] == 4 * [0] + 4 * [1]


def test_a_step_as_captured_costs_what_autograd_does() -> None:
    """Its operators alone cost less than kernels do."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = fusee.compile(step)
    for _ in range(2):
        compiled(torch.randn(16, 32), torch.randint(0, 10, (16,)))
    bill = fusee.report(compiled)[-1].bill
    assert "a pass of autograd" in [charge.kind for charge in bill.calls]
    assert not bill.is_captured


@pytest.mark.parametrize("make", [lambda fn: fn, Whole, AsCaptured, fusee.compile])
def test_a_check_that_fails_has_changed_nothing(make: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = make(lambda x, y: checked(model, optimizer, x, y))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for bad, kind in ((x * math.nan, ValueError), (x * 1e12, OverflowError)):
        step(x, y)
        before = [value.clone() for value in model.parameters()]
        with pytest.raises(kind, match="not finite"):
            step(bad, y)
        assert all(map(torch.equal, before, model.parameters()))
        assert (model.weight.grad is None) == (kind is ValueError)
        step(x, y)
        assert not torch.equal(before[0], model.weight)
