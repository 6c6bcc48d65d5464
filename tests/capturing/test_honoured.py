"""What programs and users say to torch.compile, and what autograd is owed between two graphs."""

# Programs under test: mistakes are meant.
# mypy: ignore-errors

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fusee
from tests.capturing.same import same

X = torch.arange(6.0).reshape(2, 3)
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "fusee"])


# ------------------------------------------------------------------------------ what is said


def asks_for_a_break(x):
    with torch.no_grad():
        y = x.cos()
        torch._dynamo.graph_break()
        return y.sin()


def test_graph_break() -> None:
    traced = same(asks_for_a_break, X, breaks=True)
    assert len(traced.graphs) == 2
    with pytest.raises(fusee.errors.GraphBreakError, match="ends graphs"):
        fusee.compile(asks_for_a_break, fullgraph=True)(X)


def test_disallow_in_graph() -> None:
    def f(x):
        return torch.expm1(torch.sinc(x) + 1)

    torch._dynamo.disallow_in_graph(torch.sinc)
    try:
        assert len(same(f, X, breaks=True).graphs) == 1
    finally:
        torch._dynamo.allow_in_graph(torch.sinc)


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_switched_off(name, monkeypatch) -> None:
    monkeypatch.setenv(name, "1")
    assert fusee.compile(asks_for_a_break) is asks_for_a_break
    monkeypatch.setenv(name, "0")
    assert fusee.compile(asks_for_a_break) is not asks_for_a_break


def autocast_asked(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        if torch.is_autocast_cpu_enabled() and torch.get_autocast_cpu_dtype() is torch.bfloat16:
            y = y + 1
    return y, torch.is_autocast_cpu_enabled()


def test_autocast_is_asked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(autocast_asked, X)


class Silent(warnings.catch_warnings):
    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
        assert self._entered
        return self


def silent(x):
    with Silent() as caught:
        y = x * 2
        warnings.warn("nobody hears it", stacklevel=1)
    return y, caught._entered


def entered_twice(x):
    caught = warnings.catch_warnings()
    caught.__enter__()
    try:
        caught.__enter__()
    except RuntimeError as error:
        return x + 1, str(error)
    finally:
        caught.__exit__(None, None, None)


@pytest.mark.parametrize(("function", "breaks"), [(silent, False), (entered_twice, True)])
def test_what_catches_warnings_knows_that_it_is_entered(function, breaks) -> None:
    same(function, X, breaks=breaks)


def entered_for_good(x):
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("ignore")
    return x + 1, caught


def test_what_catches_warnings_goes_on_after_the_function() -> None:
    with warnings.catch_warnings():
        before = warnings.filters[:]
        _, caught = fusee.compile(entered_for_good, backend="eager")(X)
        assert warnings.filters != before
        caught.__exit__(None, None, None)
        assert warnings.filters == before


class Answers:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return 1


def answers(x):
    asked = torch.overrides
    return asked.has_torch_function_unary(x), asked.has_torch_function((1, x))


@pytest.mark.parametrize("x", [Answers(), 4, X], ids=["class", "number", "tensor"])
def test_has_torch_function(x) -> None:
    assert fusee.compile(answers, backend="eager")(x) == answers(x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, scale: float = 2.0):
        return self.linear(x) * scale


def test_forward_of_a_compiled_module() -> None:
    model = Scaled()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    fast = fusee.compile(model, fullgraph=True)
    torch.testing.assert_close(fast.forward(X, scale=3.0), model.forward(X, 3.0))
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    assert len(fusee.report(fast)) == 1 and not calls
    fast(X)
    assert calls


# ------------------------------------------------------------------------------ autograd


def two_losses(a, b):
    e = a @ torch.ones(3, 3)
    first = (e - 1).abs().mean()
    first.backward()
    second = (b @ e.detach().T).mean()
    second.backward()
    return first, second


@BACKENDS
def test_a_backward_goes_no_further_than_in_eager(backend) -> None:
    """The second one must not come to what made `e`, and was freed by the first."""
    given = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    expected = two_losses(*given)
    grads = [x.grad for x in given]
    for x in given:
        x.grad = None
    found = fusee.compile(two_losses, backend=backend)(*given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([x.grad for x in given], grads)


def a_leaf(x):
    leaf = torch.ones(3, requires_grad=True)
    return leaf, (leaf * 2 + x).sum()


def masked(x, mask, y):
    x = x.clone()
    x[:, mask] = y
    return (x * 2).sin()


@BACKENDS
def test_leaves_and_what_is_put_at_a_mask(backend) -> None:
    leaf, out = fusee.compile(a_leaf, backend=backend)(X)
    out.backward()
    assert leaf.is_leaf and torch.equal(leaf.grad, torch.full((3,), 4.0))
    x, y = X.clone().requires_grad_(), torch.randn(2, requires_grad=True)
    mask = torch.tensor([True, False, True])
    expected = torch.autograd.grad(masked(x, mask, y).sum(), (x, y))
    found = torch.autograd.grad(fusee.compile(masked, backend=backend)(x, mask, y).sum(), (x, y))
    torch.testing.assert_close(found, expected)


@BACKENDS
def test_hooks_on_saved_tensors_see_no_stand_ins(backend) -> None:
    seen = []
    x = X.clone().requires_grad_()
    fast = fusee.compile(lambda x: (x.sin() @ x.T).cos(), backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        fast(x)
    assert seen and all(type(t) is torch.Tensor and t.device.type == "cpu" for t in seen)


# ------------------------------------------------------------------------------ checkpoint


def reentrant(x):
    return checkpoint(lambda a: torch.dropout(a.sin(), 0.5, True), x, use_reentrant=True).cos()


def by_default(x):
    return checkpoint(torch.sin, x)


def of_a_constant(x):
    return checkpoint(torch.sin, x.detach(), use_reentrant=True) + x


def of_a_detached_part(x):
    return checkpoint(lambda a: (a * 2, a.detach()), x, use_reentrant=True)[0]


@BACKENDS
@pytest.mark.parametrize("fn", [reentrant, by_default, of_a_constant, of_a_detached_part])
def test_reentrant(fn, backend) -> None:
    fast = fusee.compile(fn, backend=backend, fullgraph=fn in (reentrant, by_default))
    outcomes = []
    for run in (fn, fast):
        x = X.clone().requires_grad_()
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            out = run(x)
        out.sum().backward()
        outcomes.append((out.detach(), x.grad, [str(one.message) for one in told]))
    torch.testing.assert_close(outcomes[1][:2], outcomes[0][:2])
    assert [text for text in outcomes[1][2] if "runs eagerly" not in text] == outcomes[0][2]


def long(x):
    for _ in range(6):
        x = x.sin() @ x.T.cos() @ x
    return x


@BACKENDS
def test_what_is_checkpointed_is_not_saved(backend) -> None:
    sizes = []

    def pack(x):
        sizes[-1] += x.numel()
        return x

    whole = lambda x: checkpoint(long, x, use_reentrant=False)  # noqa: E731
    for fn in (long, whole):
        sizes.append(0)
        x = torch.eye(3).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            fusee.compile(fn, backend=backend)(x).sum().backward()
    assert sizes[1] == 9 < sizes[0]


def test_torchs_partitioner_computes_it_again() -> None:
    from torch._dynamo.backends.common import aot_autograd

    found = {}

    def counting(name):
        def compile_graph(gm, args):
            found[name] = sum(n.target is torch.ops.aten.sin.default for n in gm.graph.nodes)
            return gm.forward

        return compile_graph

    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    x = X.clone().requires_grad_()
    whole = lambda x: checkpoint(lambda a: a.sin().sin(), x, use_reentrant=False)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fusee.compile(whole, backend=backend)(x).sum().backward()
    torch.testing.assert_close(x.grad, X.cos() * X.sin().cos())
    assert found["forward"] == 2 and found["backward"] >= 1


ATEN = torch.ops.aten


def of_operators(ctx, op, *args, **kwargs):
    wanted = op is ATEN.mm.default and args[0].shape == (6, 6) and not ctx.is_recompute
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def every_second_product():
    counts = collections.Counter()

    def policy(ctx, op, *args, **kwargs):
        counts[op] += 1
        return op is ATEN.mm.default and counts[op] % 2 == 0

    return create_selective_checkpoint_contexts(policy)


SELECTIVE = {
    "none": (lambda: create_selective_checkpoint_contexts([]), 0),
    "list": (lambda: create_selective_checkpoint_contexts([ATEN.mm.default]), 3),
    "policy": (functools.partial(create_selective_checkpoint_contexts, of_operators), 3),
    "counting": (every_second_product, 1),
}


@pytest.mark.parametrize(("contexts", "count"), SELECTIVE.values(), ids=SELECTIVE.keys())
def test_a_policy_says_what_a_checkpoint_saves(contexts, count) -> None:
    def part(x):
        for _ in range(2):
            x = (x @ x.sin()).cos() @ x
        return x

    def fn(x):
        return checkpoint(part, x, use_reentrant=False, context_fn=contexts).sum()

    found, saved = [], []
    for run in (fn, fusee.compile(fn, fullgraph=True)):
        x = torch.linspace(-1, 1, 36).reshape(6, 6).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = run(x)
            if run is fn:
                saved.clear()
        loss.backward()
        found += [loss, x.grad]
    torch.testing.assert_close(found[2:], found[:2])
    assert len(saved) == 1 + count, [t.shape for t in saved]


def test_effects_under_a_checkpoint_come_again_in_the_backward_pass() -> None:
    """Though what is written under it was written before it, too."""
    counts = {"n": 0}

    def part(x):
        counts["n"] += 1
        return x.sin()

    def whole(x):
        return checkpoint(part, part(x), use_reentrant=False).sum()

    for run in (whole, fusee.compile(whole)):
        counts["n"] = 0
        run(torch.ones(3, requires_grad=True)).backward()
        assert counts == {"n": 3}


def test_other_contexts_of_a_checkpoint_end_the_graph() -> None:
    watched = weakref.ref(torch.sin, print)  # as TorchDynamo does

    def fn(x):
        contexts = lambda: (contextlib.nullcontext(), contextlib.nullcontext())  # noqa: E731
        return checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts).sum()

    x = X.clone().requires_grad_()
    fusee.compile(fn)(x).backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert watched() is torch.sin


# ------------------------------------------------------------------------------ hooks of tensors


def scaled(y, by=0.5):
    y.register_hook(lambda grad: torch.clamp(grad * by, -1, 1))
    return y


def with_a_hook(x):
    y = x * 2
    z = y.sin()
    y.register_hook(lambda grad: grad * 3)
    return (y * y).sum() + z.sum()


def with_hooks(x):
    y = x.sin()
    y.register_hook(lambda grad: None)
    y.register_hook(lambda grad: grad + 1)
    y.mul_(2)
    return scaled(y.exp(), by=2.0).sum()


HEARD = []


def heard(x):
    y = x.sin()
    z = y.exp()
    y.register_hook(lambda grad: HEARD.append(grad.sum().item()))
    return (y * z).sum()


def removed(x):
    y = x.sin()
    z = y.exp()
    handle = y.register_hook(lambda grad: grad * 2)
    handle.remove()
    return (y * z).sum()


def bound_later(x):
    factor, y = 2, x.sin()
    z = y.exp()
    y.register_hook(lambda grad: grad * factor)
    factor = 5
    return (y * z).sum()


def kept(x):
    y = x.sin()
    z = y.exp()
    y.retain_grad()
    HEARD.append(y)
    return (y * z).sum()


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("backend", ["aot_eager", "eager", "fusee"])
@pytest.mark.parametrize("program", [with_a_hook, with_hooks, heard, removed, bound_later, kept])
def test_hooks_see_the_whole_gradient(program, backend) -> None:
    told = []
    for run in (program, fusee.compile(program, backend=backend)):
        HEARD.clear()
        x = torch.linspace(-1, 1, 5).requires_grad_()
        for _ in range(2):
            run(x).backward()
        told.append([x.grad, *(h.grad if isinstance(h, torch.Tensor) else h for h in HEARD)])
    torch.testing.assert_close(told[1], told[0])


def test_hooks_that_only_compute_are_in_the_graph() -> None:
    x = torch.linspace(-1, 1, 5).requires_grad_()
    for program in (with_a_hook, with_hooks):
        fusee.compile(program, fullgraph=True)(x).backward()
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        fusee.compile(with_a_hook)(x.detach())


# ------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("kind", [int, np.int64], ids=["int", "numpy"])
def test_a_class_reads_a_list_under_guards(kind) -> None:
    """Other numbers in a list from outside are another tensor."""
    fast = fusee.compile(lambda x, numbers: x + torch.LongTensor(numbers), backend="eager")
    for first in range(4):
        numbers = [kind(first), kind(2), kind(3)]
        assert fast(X, numbers).tolist() == (X + torch.tensor([first, 2, 3])).tolist()


@pytest.mark.parametrize(
    "allow", [torch.compiler.allow_in_graph, fusee.compiler.allow_in_graph], ids=["torch", "ours"]
)
def test_an_autograd_function_that_is_allowed_in_the_graph(allow: Any) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            torch._dynamo.graph_break()
            ctx.n = x.size(0)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * ctx.n

    allow(Doubled)
    fast = fusee.compile(lambda x: Doubled.apply(x.sin()).cos(), fullgraph=True)
    for requires_grad in (True, False):
        x = torch.ones(3, requires_grad=requires_grad)
        y = fast(x)
        torch.testing.assert_close(y, (x.sin() * 2).cos())
    y = fast(x.requires_grad_())
    y.sum().backward()
    torch.testing.assert_close(x.grad, -(x.sin() * 2).sin() * 3 * x.cos())
