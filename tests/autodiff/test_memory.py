"""What real models save for the backward: never more than eager, and what that takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fusee.aten import WHOLE
from fusee.autodiff import Joint
from fusee.autodiff.partition import partition
from fusee.autodiff.trace import trace_joint
from fusee.loops.lower import supported
from tests.autodiff.joints import operators, run_split
from tests.autodiff.steps import BACKENDS, compiled
from tests.models.zoo import load

MODELS = ["resnet18", "bert", "llama"]


def joints(step: Callable[..., Any], *args: Any, dynamic: bool = False) -> list[tuple[Joint, Any]]:
    """The joint graphs of a call, as the native backend traces them, and their inputs."""
    found = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        joint = trace_joint(gm, inputs, keep=(supported() | WHOLE).__contains__)
        if joint is not None:
            found.append((joint, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(step, backend=backend, dynamic=dynamic)(*args)
    return found


def eager_bytes(step: Callable[..., Any], args: Any, others: list[Any]) -> int:
    """Bytes of the storages that eager keeps for the backward, arguments and `others` aside."""
    given = pytree.tree_leaves([args, others])
    there = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in there:
            kept[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        step(*args)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_models_save_at_most_three_quarters_of_what_eager_saves(name: str) -> None:
    module, args, kwargs = load(name, "test")
    module.train()

    def step(*args: Any) -> Tensor:
        out = pytree.tree_leaves(module(*args, **kwargs))
        first: Tensor = next(x for x in out if isinstance(x, Tensor))
        return torch.logsumexp(first, -1).mean()

    total = 0
    others = [list(module.parameters()), list(module.buffers()), kwargs]
    for joint, _ in joints(step, *args):
        split = partition(joint)
        values = [node.meta["val"] for node in split.backward.placeholders]
        total += sum(x.nbytes for x, kept in zip(values, split.saved) if kept.kind == "result")
    assert 0 < total <= 0.75 * eager_bytes(step, args, others)


def peak(step: Callable[[], Any]) -> int:
    """The most bytes of tensors that are alive at once in two calls, what was there apart."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        step()
        step()
    events: Any = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(count for _, count in changes))


def test_large_intermediates_are_in_memory_while_they_are_needed() -> None:
    """The widest ones of a backward come last, when most that was saved is gone."""
    layers: list[nn.Module] = []
    for size in (4, 8, 16, 32):
        layers += [nn.Conv2d(size, 2 * size, 3, padding=1), nn.BatchNorm2d(2 * size), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    module = nn.Sequential(*layers)
    x = torch.randn(4, 4, 64, 64, requires_grad=True)
    theirs = peak(lambda: module(x).sum().backward())
    step = compiled(module)
    assert peak(lambda: step(x).sum().backward()) <= theirs


def dropped(x: Tensor, w: Tensor) -> Tensor:
    """Two masks in a checkpointed region, and one after it."""

    def region(x: Tensor) -> Tensor:
        h = F.dropout(torch.relu(x @ w), 0.3) @ w
        return F.dropout(h, 0.6)

    inner: Any = checkpoint(region, x, use_reentrant=False)
    return F.dropout(inner.sin(), 0.2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_in_a_checkpointed_region_are_drawn_again(backend: str) -> None:
    """Gradients and the stream after the backward are eager's; the region keeps no mask."""
    found: list[list[Any]] = []
    for step in (dropped, compiled(dropped, backend)):
        x, w = (torch.linspace(-2, 2, 128 * 128).view(128, 128).clone() for _ in range(2))
        x.requires_grad_()
        w.requires_grad_()
        torch.manual_seed(3)
        out = step(x, w)
        drawn = torch.rand(5)
        (out * torch.linspace(0, 1, 128)).sum().backward()
        found.append([out.detach(), drawn, torch.rand(5), x.grad, w.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert found[0][0].eq(0).equal(found[1][0].eq(0))


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_a_checkpointed_region_saves_the_generator_s_state(budget: float) -> None:
    x, w = (torch.randn(128, 128, requires_grad=True) for _ in range(2))
    ((joint, _),) = joints(dropped, x, w)
    split = partition(joint, budget=budget)
    values = [node.meta["val"] for node in split.backward.placeholders]
    kept = [v for v, saved in zip(values, split.saved) if saved.kind == "result"]
    masks = [v for v in kept if v.dtype is torch.bool]
    states = [v for v in kept if v.dtype is torch.uint8]
    assert (len(masks), len(states)) == (1, 2)  # the mask after the region is no part of it


def test_attention_is_the_kernel_that_eager_takes() -> None:
    """The other one keeps the weights of all pairs."""
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    ((joint, _),) = joints(F.scaled_dot_product_attention, q, k, v)
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in operators(joint.aten)


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_symbolic_sizes(budget: float) -> None:
    """Sizes that no saved tensor shows come as integers."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        h = (x.flatten(0, 1) @ w).view(x.shape[0], x.shape[1], -1)
        return F.gelu(h).transpose(1, 2).reshape(-1, x.shape[1] * 5).sum(0)

    w = torch.randn(8, 5, requires_grad=True)
    ((joint, examples),) = joints(step, torch.randn(3, 4, 8), w, dynamic=True)
    split = partition(joint, budget=budget)
    assert split.forward.symbols and split.backward.symbols
    x, sizes = torch.randn(6, 7, 8), {3: 6, 4: 7}
    given: list[Any] = []
    for example in examples:
        if isinstance(example, Tensor):
            given.append(x if example.dim() == 3 else w.detach())
        else:
            given.append(sizes.get(int(example), int(example)))
    tangent = torch.randn(35)
    results, gradients = run_split(split, given, [tangent])
    torch.testing.assert_close(results[0], step(x, w).detach())
    (expected,) = torch.autograd.grad(step(x, w), w, tangent)
    torch.testing.assert_close([g for g in gradients if g is not None], [expected])
