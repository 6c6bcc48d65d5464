"""A call that cannot be compiled costs itself: what is before and behind it is compiled."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.backends import lookup
from fusee.backends.report import in_parts, live_reports
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from fusee.errors import FuseeWarning
from fusee.persist import Keeper
from fusee.runtime.cache import ObjectCache

WRITTEN = torch.zeros(16)


@torch.library.custom_op("fusee_apart::writes_in_backward", mutates_args=())
def writes_in_backward(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("fusee_apart::adds", mutates_args=("to",))
def adds(to: list[Tensor], x: Tensor | None) -> Tensor:
    for one in to:
        one.add_(1 if x is None else x)
    return to[0] * 2


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    WRITTEN.add_(1)
    return gradient * 2


writes_in_backward.register_fake(torch.empty_like)
writes_in_backward.register_autograd(_backward)
adds.register_fake(lambda to, x: torch.empty_like(to[0]))


def imaginary(h: Tensor) -> Tensor:
    z = torch.fft.fft(h)
    z.imag.mul_(0.5)
    z.real[0] = 1
    return z.abs()


def to_a_list(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    return h + made * adds([made], h.detach()) * adds([made], None)


def written_behind(h: Tensor) -> Tensor:
    kept = h * h
    made = writes_in_backward(h)
    h.add_(made)
    return h * kept.detach()


def dropped(h: Tensor) -> Tensor:
    return F.dropout(writes_in_backward(F.dropout(h, 0.3)), 0.3)


def items(h: Tensor) -> Tensor:
    first, second = h.chunk(2, 1)
    best, _ = h.topk(3, 1)
    return torch.cat([first * writes_in_backward(second), second], 1) + best.sum()


def shared(h: Tensor) -> Tensor:
    whole, made = h * 2, torch.zeros_like(h)
    first = whole[0]
    adds([made], None)
    first.mul_(3)  # a graph behind would be given both
    return whole + made


def to_one_pixel(h: Tensor) -> Tensor:
    return h + F.affine_grid(h.float()[:, :6].reshape(-1, 2, 3), [len(h), 1, 1, 1], False).sum()


MIDDLES = [
    writes_in_backward, imaginary, to_a_list, written_behind, dropped, items, shared, to_one_pixel,
]  # fmt: skip


def ends(middle: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layers = [nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 16)]
    m = nn.ModuleList([nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers))])

    def loss(x: Tensor) -> Tensor:
        return m[1](middle(m[0](x))).pow(2).mean()

    return m, loss


def several(m: nn.Module, loss: Callable[[Tensor], Tensor]) -> dict[str, Callable[..., Any]]:
    optimizer = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(x)
        found.backward()
        optimizer.step()
        return found.detach()

    def rounded(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(x)

    return {"loss": loss, "step": step, "rounded": rounded, "inference": torch.no_grad()(loss)}


@pytest.mark.parametrize(("how", "middle"), [
    *(("loss", middle) for middle in MIDDLES),
    *((how, middle) for how in ("step", "rounded") for middle in (writes_in_backward, to_a_list)),
    *(("inference", middle) for middle in (to_a_list, shared, to_one_pixel)),
])  # fmt: skip
def test_the_rest_is_compiled(how: str, middle: Callable[[Tensor], Tensor]) -> None:
    gc.collect()
    before, outcomes = len(live_reports()), []
    for compile_ in (lambda f: f, lambda f: fusee.compile(f, options={"prices": False})):
        torch.manual_seed(0)
        WRITTEN.zero_()
        m, loss = ends(middle)
        run = compile_(several(m, loss)[how])
        with warnings.catch_warnings():
            warnings.simplefilter("error", FuseeWarning)
            results = [run(torch.randn(6, 16)) for _ in range(3)]
        for x in results:
            if x.requires_grad:
                x.backward()
        outcomes.append((results, [(p, p.grad) for p in m.parameters()], WRITTEN.clone()))
    looseness = {"rtol": 0.05, "atol": 2e-3} if how == "rounded" else {}
    torch.testing.assert_close(outcomes[1], outcomes[0], **looseness)
    parts = sum(not one.eager and bool(one.kernels) for one in live_reports()[before:])
    assert parts >= 2


def powers(x: Tensor, n: int) -> Tensor:
    y = x * 1.5
    torch._foreach_pow_([z := x * 2], n)
    return y.pow_(n).sin() + z


def literal(x: Tensor, n: int) -> Tensor:
    return torch.tensor([1.0, 2.0]).add_(1)


@pytest.mark.parametrize("program", [powers, literal])
def test_numbers_that_vary_and_literals(program: Callable[[Tensor, int], Tensor]) -> None:
    run = fusee.compile(program)
    for n in (2, 3, 4, 5):
        found = []
        for call in (program, run):
            x = torch.linspace(-1, 1, 5).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("error", FuseeWarning)
                y = call(x, n)
            if y.requires_grad:
                y.sum().backward()
            found.append((y, x, x.grad))
        torch.testing.assert_close(found[1], found[0])


def views(x: Tensor, m: nn.Module) -> Any:
    h = m[0](x)
    with torch.no_grad():
        parts = h[1:], h[:2], x[1:], h.view(-1)
    return m[1](h).sum(), *parts


def views_of_what_is_used_up(x: Tensor, m: nn.Module) -> Any:
    h = m[0](x)
    m[1](h).sum().backward()
    with torch.no_grad():
        return h[1:], h[:2]


@pytest.mark.parametrize("program", [views, views_of_what_is_used_up])
def test_views_made_while_gradients_are_off(program: Callable[..., Any]) -> None:
    outcomes = []
    for run in (program, fusee.compile(program)):
        torch.manual_seed(0)
        m, _ = ends(torch.sin)
        x = torch.randn(6, 16, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FuseeWarning)
            results = run(x, m)
        if results[0].dim() == 0:
            results[0].backward()
        known = [(y.requires_grad, y.is_leaf, y.grad_fn is None, y._is_view()) for y in results]
        with torch.no_grad():
            results[1].mul_(2)  # the others share its memory
        outcomes.append(([y.detach() for y in results], known, [p.grad for p in m.parameters()]))
    assert outcomes[0][1] == outcomes[1][1]
    torch.testing.assert_close(outcomes[1][::2], outcomes[0][::2])


def test_an_error_behind_a_part_that_has_written() -> None:
    """Python does not run again what is done."""
    buffer = torch.zeros(16)

    def program(x: Tensor, at: Tensor) -> Tensor:
        buffer.add_(1)
        return writes_in_backward(x.sin())[at].cos()

    x, run = torch.randn(6, 16, requires_grad=True), fusee.compile(program)
    run(x, torch.tensor([1]))
    with pytest.raises(IndexError):
        run(x, torch.tensor([99]))
    assert buffer.equal(torch.full((16,), 2.0))


@pytest.mark.parametrize(("program", "is_kept"), [(literal, False), (torch.add, True)])
def test_in_another_process_it_is_captured_again(
    program: Callable[..., Tensor], is_kept: bool, tmp_path: Path
) -> None:
    """What is read there says too little of sizes and writes."""
    cache = ObjectCache(tmp_path, 2**24)
    keeper = Keeper(cache=cache)
    run = CompiledFunction(lambda x: program(x, 2).sin(), lookup("fusee"), Policy(), keeper=keeper)
    run(torch.ones(3))
    assert any(tmp_path.rglob("*")) == is_kept


def test_a_number_of_the_data_is_read_once_more_in_a_later_part() -> None:
    def f(x: Tensor, sizes: Tensor) -> Tensor:
        n = sizes[0].item()
        return (x * n + 1) * n

    gm = torch.fx.symbolic_trace(f)
    for node in gm.graph.nodes:
        node.meta["example_value"] = 2 if node.target == "item" else torch.ones(2)
    gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
    gm.recompile()
    parts = in_parts(gm, [3], lambda part, _: part.forward, [])
    x, sizes = torch.randn(4), torch.tensor([3, 5])
    assert torch.equal(parts(x, sizes)[0], f(x, sizes))


def is_written(x: Tensor, sizes: Tensor) -> Tensor:
    n = sizes[0].item()
    made, y = torch.zeros_like(x), x * (n + 1)
    sizes.add_(3)
    return (y + made * adds([made], None)).sin() * (n * 2)


def is_drawn(x: Tensor, sizes: Tensor) -> Tensor:
    n = int((torch.rand(4) * 100)[1])
    made, y = torch.zeros_like(x), x * (n + 1)
    return (y + made * adds([made], None)).sin() * (n * 2) + (sizes[1].item() + 2)


@pytest.mark.parametrize("program", [is_written, is_drawn])
def test_numbers_of_the_data_are_those_that_were_read(program: Callable[..., Tensor]) -> None:
    compiled = fusee.compile(program)
    for seed in range(3):
        x, found = torch.randn(4), list[Any]()
        for run in (compiled, program):
            sizes = torch.tensor([3, 5])
            torch.manual_seed(seed)
            found.append((run(x, sizes), sizes))
        torch.testing.assert_close(*found)


def behind_what_runs_as_captured(p: Tensor, q: Tensor) -> Tensor:
    q.unsqueeze(0).squeeze(-1).t_().add_(1)
    return torch.fft.rfft(p).abs()


def between_results(p: Tensor, q: Tensor) -> Tensor:
    y = p * q
    found = torch.fft.rfft(y).abs()
    return found + torch.autograd.grad(found.sum(), y, create_graph=True)[0].sum()


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("f", [behind_what_runs_as_captured, between_results])
def test_what_parts_ask_of_open_sizes_is_guarded(f: Callable[..., Tensor]) -> None:
    """The gradient of a transform is padded, unless its half is all of it."""
    compiled = fusee.compile(f, dynamic=True, options={"prices": False})
    for n in (2, 4, 5):
        p, q = torch.randn(n, requires_grad=True), torch.randn(n)
        want = torch.autograd.grad(f(p, q.clone()).sum(), p)
        torch.testing.assert_close(torch.autograd.grad(compiled(p, q).sum(), p), want)


class Scaled(nn.Module):
    """Reads statistics before the call and writes them behind it, as quantised training does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = writes_in_backward(x * (self.weight / (self.mean + 1e-3).sqrt()))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


def test_statistics_that_the_part_before_computes_with() -> None:
    model, x = Scaled(), torch.rand(3, 4)
    eager = copy.deepcopy(model)
    compiled = fusee.compile(model, options={"prices": False})
    for _ in range(2):
        for one in (eager, compiled):
            one(x).sin().sum().backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    torch.testing.assert_close(model.mean, eager.mean)
