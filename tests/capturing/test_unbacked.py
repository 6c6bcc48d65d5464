"""Sizes and integers that only data knows: one graph, right for all data."""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fusee
from fusee.backends import registry
from fusee.errors import GraphBreakError
from tests.compare import assert_same

Program = Callable[[Tensor], Any]


def data() -> list[Tensor]:
    """Some that are positive, none, one, all."""
    torch.manual_seed(1)
    x = torch.randn(6, 4)
    one = -x.abs()
    one[2, 0] = 1
    return [x, torch.randn(6, 4), -x.abs(), one, x.abs()]


def same(want: Any, got: Any) -> None:
    """Values, classes, dtypes and strides of axes with more than one element."""
    assert type(want) is type(got), (want, got)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, equal_nan=True)
        steps = ([s for s, n in zip(x.stride(), x.shape) if n > 1] for x in (want, got))
        assert operator.eq(*steps)
    elif isinstance(want, (tuple, list)):
        assert len(want) == len(got)
        for one, other in zip(want, got, strict=True):
            same(one, other)
    else:
        assert want == got


def outcome(run: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    try:
        return run(x.clone(), *rest)
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        return type(error).__name__, str(error)


def taken_and_put(x: Tensor) -> Any:
    mask, y = x > 0, x * 2
    z = torch.zeros(6, 4)
    z[mask] = y[mask]
    rows = torch.ones(6, 4)
    rows[mask[:, 0]] = x[mask[:, 0]]
    return z, rows


def put_after_writes(x: Tensor) -> Any:
    """What is put is not what was taken, or not where."""
    mask, y, z = x > 0, x * 2, torch.zeros(6, 4)
    taken = y[mask]
    taken += 1
    z[mask] = taken
    y[mask] = y[mask.flip(0)] if bool((mask == mask.flip(0)).all()) else y[mask]
    before = y[mask]
    y.mul_(3)
    w = y.t().clone().t()
    w[mask] = before
    z[mask] += y.double()[mask].float()
    mask = mask.clone()
    mask[0] = False
    return z, w, y[mask]


@pytest.mark.parametrize("is_training", [False, True])
def test_what_a_mask_takes_is_put_where_it_was(is_training: bool) -> None:
    for program in (taken_and_put, put_after_writes):
        compiled = fusee.compile(program)
        for x in data():
            found = []
            for run in (program, compiled):
                leaf = x.clone().requires_grad_(is_training)
                out = run(leaf)
                if is_training:
                    sum((k + 1) * y.sin().sum() for k, y in enumerate(out)).backward()
                found.append((*out, leaf.grad) if is_training else out)
            same(*found)
        if program is taken_and_put and not is_training:
            (report,) = fusee.report(compiled)
            assert not report.externs, str(report)


def graphs_of(program: Program, backend: str = "eager", **options: bool) -> int:
    """Runs a program over all data beside eager; how many graphs that takes."""
    graphs = []
    real = registry.lookup(backend)

    def compile_graph(gm: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(gm)
        return real(gm, examples)

    compile_graph.__dict__["takes_symbols"] = True
    compiled = fusee.compile(program, backend=compile_graph, options=options or None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusee.errors.FuseeWarning)
        for x in data():
            same(outcome(program, x), outcome(compiled, x))
    return len(graphs)


# ---------------------------------------------------------------------------- one graph


def places(x: Tensor) -> Any:
    i, j = torch.where(x > 0)
    return torch.nonzero(x > 0) * 2, i + j, torch.argwhere(x > 0).float().mean(0)


def places_again(x: Tensor) -> Any:
    mask = x > 0
    first = mask.nonzero()
    first += 1  # which the others do not see
    return x[mask.nonzero()[:, 0], torch.where(mask)[1]] * 2, first, mask.nonzero()


def sizes(x: Tensor) -> Any:
    i = torch.nonzero(x > 0)
    n = i.shape[0]
    return (
        i.shape,
        n,
        i.numel(),
        i.nbytes,
        len(i),
        [n * 2, max(n, 3)],
        f"{n} of {x.shape}",
        n / 2,
        n // 4,
    )


def chosen(x: Tensor) -> Any:
    rows, mask = x[:, 0] > 0, x > 0
    return x[rows] + (x * 2)[rows], x[mask].relu(), x[:, x[0] > 0] * 2, x.masked_select(mask)


def assigned(x: Tensor) -> Any:
    y, mask, rows = torch.zeros_like(x), x > 0, x[:, 0] > 0
    y[mask] = x[mask] * 2
    y[rows] += x[rows]
    y[~rows] -= 1
    places = torch.nonzero(rows)[:, 0]
    sums = torch.ones_like(x).index_add(0, places, x[: places.shape[0]])
    return y, y.index_fill(0, places, 2.0), sums


def groups(x: Tensor) -> Any:
    whole = (x * 2).int()
    values, counts = torch.unique(whole, return_counts=True)
    runs = torch.unique_consecutive(whole > 0, return_inverse=True, return_counts=True)
    return values * counts, runs, torch.unique(whole > 0, dim=0), torch.unique(whole, dim=1)


def counted(x: Tensor) -> Any:
    repeats = (x[:, 0] > 0).long() + 1
    classes = F.one_hot((x.abs() * 3).long()), F.one_hot(repeats).sum(0)
    counts = torch.bincount((x.abs() * 3).long().flatten(), minlength=2)
    return (
        classes,
        counts * 2,
        torch.repeat_interleave(repeats),
        torch.arange(3).repeat_interleave(torch.bincount(repeats, minlength=3)),
        x.repeat_interleave(repeats, 0) + 1,
    )


def numbers(x: Tensor) -> Any:
    n = int((x > 0).sum().item())
    return torch.arange(n) * 2, torch.zeros(n, 2), x * n, x[0].expand(n, 4) * 2, n * 2, float(n)


def slices(x: Tensor) -> Any:
    a, b = (x[:, 0] > 0).long()[:2].tolist()
    n = int((x[:, 0] > 0).sum())
    y = x.clone()
    y[:n] = 1
    flat = x[x > 0]
    ends = flat[:3], flat[-5:] * 2, flat[4:], flat[2:7], torch.nonzero(x > 0)[:-4]
    return ends, x[n:], x[:-n] + 1, x[a : a + b + 2] * 2, x[n - 1], y, x.narrow(0, 0, a)


def split(x: Tensor) -> Any:
    a, b = (x[:, 0] > 0).long()[:2].add(1).tolist()
    return [part * 2 for part in x.split([a, b, 6 - a - b])]


def computed(x: Tensor) -> Any:
    rows = x[x[:, 0] > 0]
    flat = x[x > 0]
    return (
        rows.softmax(-1), F.layer_norm(rows, (4,)), rows @ rows.T, F.pad(rows, (1, 1)),
        rows.view(rows.shape[0], 2, 2).transpose(1, 2).reshape(-1), flat[:, None] * flat,
        flat.sum(), flat.mean(), flat.cumsum(0), flat.sort().values, torch.stack([flat, flat]),
        torch.cat([rows, x[x[:, 0] <= 0]]), torch.where(flat > 1, flat, -flat),
    )  # fmt: skip


def changed(x: Tensor) -> Any:
    y = x[x > 0]
    y.add_(1)
    x[x > 0] = 0
    return y, x


def checked(x: Tensor) -> Any:
    n = (x > 0).sum().item()
    torch._check(n >= 0)
    if n > 24:  # as pytest leaves it: it rewrites asserts
        raise AssertionError(f"{n} are too many")
    return x * n, (5 if n <= 30 else 6)


def indexed(x: Tensor) -> Any:
    k = int(x[:, 0].argmin())
    a, b = divmod(k, 4)
    x[k // 2, :] = 5.0
    x[..., b] += 2
    turned = torch.complex(x, x).conj()
    return x[k % 3, 1:, None] * k, x[None, k], x[b, a], turned[b:] * 2, turned[b].resolve_conj()


@torch.library.custom_op("fusee_sizes::positive", mutates_args=())
def positive(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[x > 0], torch.nonzero(x > 0)


@positive.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    n = torch.library.get_ctx().new_dynamic_size(min=0, max=100)
    return x.new_empty(n), x.new_empty((n, x.dim()), dtype=torch.int64)


def _of_positive(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return torch.zeros_like(x).masked_scatter(x > 0, values)


positive.register_autograd(
    _of_positive, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("fusee_sizes::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x[x > 0].repeat(2)


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2 * torch.library.get_ctx().new_dynamic_size())


def of_users(x: Tensor) -> Any:
    values, places = positive(x)
    return values * 2, places.shape, x[places[:, 0]], torch.ones(len(values)), positive(x + 1)[0]


PROGRAMS = [
    of_users, indexed,
    places, places_again, sizes, chosen, assigned, groups, counted, numbers, slices, split,
    computed, changed, checked,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_graph_serves_all_data(program: Program, backend: str) -> None:
    assert graphs_of(program, backend) == 1
    fusee.compile(program, backend=backend, fullgraph=True)(data()[0])  # nor an end without graphs


def extreme(x: Tensor) -> Tensor:
    return x[x > 0].max()


def selected(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0][1]


def reshaped(x: Tensor) -> Tensor:
    rows = x[x[:, 0] > 0]
    return rows.view(rows.shape[0], -1)


def refused(x: Tensor) -> Tensor:
    n = int((x > 0).sum())
    torch._check(n > 3, lambda: "too few")
    return torch.ones(n)


def asserted(x: Tensor) -> Tensor:
    rows = torch.nonzero(x > 0)
    if rows.shape[0] <= 3:
        raise AssertionError("too few")
    return rows * 2


def counted_wrongly(x: Tensor) -> Tensor:
    return torch.arange(4).repeat_interleave(torch.bincount((x[0] > 0) * 2 + 1))


def laid_out(x: Tensor) -> Any:
    """Whether sizes that only data knows fit, as eager has it."""
    rows, few = x[x[:, 0] > 0], x[x[:, 1] > -9]
    table = torch.bincount((rows[0] > 0).long() * rows.shape[0], minlength=2).view(7, 1)
    return table * 2, torch.stack([rows, few]), rows.mT @ few, (rows[:, 0] * 2).split([2, 4])


def divided(x: Tensor) -> Tensor:
    return x * (1 / (x > 0).sum().item())


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize(
    "program", [extreme, selected, reshaped, refused, asserted, counted_wrongly, divided, laid_out]
)
def test_where_eager_raises_for_some_data(program: Program, backend: str) -> None:
    assert any(type(outcome(program, x)) is tuple for x in data())
    graphs_of(program, backend)
    whole = fusee.compile(program, backend=backend, fullgraph=True)
    same(program(data()[-1]), whole(data()[-1]))


# ---------------------------------------------------------------------------- more graphs


def branch(x: Tensor) -> Tensor:
    rows = torch.nonzero(x > 0)
    return x * 2 if rows.shape[0] > 5 else x


def loop(x: Tensor) -> Tensor:
    for _ in range(torch.nonzero(x > 0).shape[0]):
        x = x + 1
    return x


def two_masks(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0] + x[x[:, 1] > 0]


def squeezed(x: Tensor) -> Tensor:
    return torch.nonzero(x[:, 0] > 0).squeeze()


def test_a_size_that_no_result_shows() -> None:
    assert graphs_of(lambda x: twice(x) * 2, "fusee") > 1


def squeezed_in_place(x: Tensor) -> Tensor:
    return torch.nonzero(x[:, 0] > 0).squeeze_()


@pytest.mark.parametrize("program", [branch, loop, two_masks, squeezed, squeezed_in_place])
def test_what_needs_the_value_ends_the_graph(program: Program) -> None:
    graphs_of(program)
    line = program.__code__.co_firstlineno
    with pytest.raises(GraphBreakError, match=r"the data tells.*test_unbacked.py:\d+") as found:
        fusee.compile(program, fullgraph=True)(data()[0])
    assert any(f"test_unbacked.py:{line + k}" in str(found.value) for k in (1, 2, 3))


def test_a_check_answers() -> None:
    def program(x: Tensor) -> Tensor:
        rows, others = x[x[:, 0] > 9], x[x[:, 1] > 9]
        torch._check(rows.shape[0] == others.shape[0])
        return rows + others

    compiled = fusee.compile(program, fullgraph=True)
    for x in data():
        same(program(x), compiled(x))


def test_options() -> None:
    for program, option in (
        (places, "capture_dynamic_output_shape_ops"),
        (numbers, "capture_scalar_outputs"),
    ):
        whole = fusee.compile(program, fullgraph=True, options={option: False})
        with pytest.raises(GraphBreakError, match="needs the value"):
            whole(data()[0])
        assert graphs_of(program, "eager", **{option: False}) > 1


def test_writes_between_masks() -> None:
    def program(x: Tensor) -> Any:
        mask = x > 0
        first = x[mask]
        mask[0] = False
        return first, x[mask]

    assert graphs_of(program, "fusee") == 1
    with torch.inference_mode():
        assert graphs_of(program, "fusee") == 1


# ---------------------------------------------------------------------------- training


class Experts(nn.Module):
    """Each row goes to one of three."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        best, index = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mask = index == k
            if self.assigns:
                out[mask] = expert(x[mask]) * best[mask, None]
            else:
                rows = torch.where(mask)[0]
                out = out.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return out


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, rows, mask = x @ self.weight, x[:, 0] > 0, x > 0
        n = rows.sum().item()
        put = y.clone()
        put[mask] = put[mask] * 3
        parts = (
            F.gelu(y[rows]).sum(), y[:n].exp().sum(), y.masked_select(mask).sum(), put.relu().sum(),
            y.repeat_interleave(rows.long() + 1, 0).sin().sum(), y.sum() * n,
            positive(y)[0].cos().sum(),
        )  # fmt: skip
        return torch.stack(parts)


class Filled(nn.Module):
    """The gradient of a number at a mask is a sum over as many rows as only the data knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        y[x > 0] = self.weight.sum()
        y[x < -1] = y[0, 0] * 2
        return y.sin()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
@pytest.mark.parametrize("make", [lambda: Experts(False), lambda: Experts(True), Selected, Filled])
def test_gradients(make: Callable[[], nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    model = make()
    compiled = fusee.compile(model, backend=backend, fullgraph=True)

    exact = copy.deepcopy(model).double()

    def step(run: Any, of: nn.Module, x: Tensor) -> list[Tensor | None]:
        of.zero_grad()
        x = x.clone().requires_grad_()
        out = run(x)
        (out * out).sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in of.parameters())]

    for x in data():
        want, got = step(model, model, x), step(compiled, model, x)
        assert_same(got, want, functools.partial(step, exact, exact, x.double()))


def test_experts_are_two_stages() -> None:
    """All sizes are read before any expert runs."""
    from fusee.aten.trace import trace
    from fusee.backends.aot_autograd import levels

    model = Experts(assigns=False)
    found = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Any:
        found.append(levels(trace(gm, examples)))
        return gm.forward

    backend.__dict__["takes_symbols"] = True
    with torch.no_grad():
        fusee.compile(model, backend=backend, fullgraph=True)(data()[0])
    (stages,) = found
    assert [len(alone) for _, alone in stages] == [3, 0]


# ---------------------------------------------------------------------------- nothing is taken

W = torch.linspace(-1, 1, 24).view(6, 4)
# Of rows that a mask takes, which may be none.
OF_ROWS: list[Program] = [
    lambda x: x @ W.t() + 1, lambda x: F.linear(x, W, W[:, 0]).relu(), lambda x: x.t() @ x,
    lambda x: (x.mean(), x.mean(0), x.mean(1)),
    lambda x: (x.var(0, correction=0), x.square().sum(0)),
    lambda x: (x.softmax(0), x.log_softmax(1)), lambda x: x.logsumexp(0), lambda x: x.prod(0),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: F.batch_norm(torch.cat([x, W]), None, None, training=True),
    lambda x: F.group_norm(x, 1).cos(), lambda x: F.rms_norm(x, (4,)), lambda x: F.normalize(x),
    lambda x: F.cross_entropy(x, (x[:, 0] > 0).long()), lambda x: F.mse_loss(x, x * 2),
    lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
    lambda x: F.nll_loss(x, x[:, 0].long()), lambda x: x.max(), lambda x: x.max(1),
    lambda x: x.amin(0), lambda x: x.argmax(1), lambda x: x.sort(0), lambda x: x.topk(2),
    lambda x: x.topk(1, 0), lambda x: x.median(0), lambda x: x.median(), lambda x: x.kthvalue(1, 0),
    lambda x: x.cumprod(0), lambda x: x.cummax(0), lambda x: x.norm(), lambda x: x.norm(dim=1),
    lambda x: torch.linalg.vector_norm(x, torch.inf, 1), lambda x: torch.cat([x, x * 2], 1),
    lambda x: torch.stack([x, x]), lambda x: x.repeat(2, 3),
    lambda x: torch.einsum("ij,kj->ik", x, W), lambda x: torch.bmm(x[None], W.t()[None]),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: F.embedding(x[:, 0].long(), W), lambda x: W[x[:, 0].long()].sum(0),
    lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3)), lambda x: F.max_pool1d(x[:, None], 2),
    lambda x: F.conv2d(x.view(-1, 1, 2, 2), torch.ones(3, 1, 1, 1)), lambda x: F.pad(x, (1, 2)),
    lambda x: F.interpolate(x[:, None], scale_factor=2.0), lambda x: F.avg_pool1d(x[:, None], 2),
    lambda x: torch.cdist(x, W), lambda x: x.quantile(0.5, 0), lambda x: x.flip(0).roll(1, 1),
    lambda x: torch.zeros(9).scatter_add(0, x[:, 0].long().abs(), x[:, 1]),
    lambda x: torch.zeros(9, 4).index_add(0, x[:, 0].long().abs(), x),
    lambda x: x.unflatten(1, (2, 2)), lambda x: torch.bincount(x[:, 0].long().abs(), minlength=3),
    lambda x: x.view(-1, 2).sum(1), lambda x: x.reshape(-1), lambda x: x.chunk(2, 1),
    lambda x: x.outer(W[0]) if x.dim() < 2 else x,
    lambda x: (x.any(0), x.all(1), x.count_nonzero(0)), lambda x: x.gather(1, x.long().abs() % 4),
    lambda x: torch.where(x > 0.5, x, W[0]), lambda x: x.tril(), lambda x: x.diff(dim=0),
    lambda x: x.unsqueeze(0).expand(3, -1, -1) * 2, lambda x: F.one_hot(x[:, 0].long().abs(), 5),
    lambda x: F.gelu(x).bfloat16(), lambda x: torch.searchsorted(W[0], x), lambda x: x.histc(4),
    lambda x: F.glu(x), lambda x: F.pixel_shuffle(x[:, :, None, None], 2),
    lambda x: x.T.matmul(x).inverse(), lambda x: (y := x.view(2, -1)) * y.mean(1, keepdim=True),
    lambda x: torch.cat([x.view(-1, 2), x.view(2, -1).T]).mean(0),
]  # fmt: skip


@pytest.mark.parametrize("program", OF_ROWS)
@pytest.mark.parametrize("is_training", [False, True])
def test_none_may_be_taken(program: Program, is_training: bool) -> None:
    """What eager gives or raises of no rows, and its gradients."""

    def fn(x: Tensor) -> Any:
        return program((x * 1.5)[x[:, 0] > 0])

    compiled = fusee.compile(fn)
    for x in data():
        found = []
        for run in (fn, compiled):
            leaf = x.clone().requires_grad_(is_training)
            try:
                made = run(leaf)
                outs = made if isinstance(made, tuple) else (made,)
                grads = [y.sum() for y in outs if is_training and y.requires_grad]
                if grads:
                    sum(grads).backward()
                found.append((*(y.detach() for y in outs), leaf.grad))
            except Exception as error:  # noqa: BLE001  # the exception is what is compared
                found.append((type(error).__name__, str(error).partition("\n")[0]))
        same(*found)


def told_apart(x: Tensor, same: Tensor) -> Tensor:
    """A contrastive loss: in rows, as many of each kind as there are."""
    others = x[~same].view(len(x), -1)
    logits = torch.cat([x[same].view(len(x), -1), others], 1) / 0.5
    weight = others.exp() / others.exp().mean(-1, keepdim=True)
    return F.cross_entropy(logits, same.new_zeros(len(x)).long()) + (weight * others).sum()


@pytest.mark.filterwarnings("error")  # it would tell of a graph that runs eagerly
def test_rows_of_what_masks_take() -> None:
    compiled = fusee.compile(told_apart, fullgraph=True)
    for n in (4, 5, 6):
        eye, found = torch.eye(n, dtype=torch.bool), []
        for run in (told_apart, compiled):
            x = torch.arange(n * n).view(n, n).sin().requires_grad_()
            loss = run(x, eye | eye.roll(1, 0))
            found.append((loss.detach(), *torch.autograd.grad(loss, x)))
        same(*found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("joined", [lambda x: x.flatten(1), lambda x: x.reshape(len(x), -1)])
def test_a_part_of_a_reshape_that_copies(joined: Callable[[Tensor], Tensor]) -> None:
    """As julius resamples: autograd sees no view in such a reshape, but memory of a copy."""

    def fn(x: Tensor) -> Tensor:
        count = torch.as_tensor(0.6 * x.shape[-1]).long()
        turned = x.exp()[:, None].expand(2, 3, x.shape[1]).transpose(1, 2)
        return joined(turned)[..., :count]

    compiled = fusee.compile(fn, fullgraph=True)
    for n in (20, 30, 25):
        found = []
        for run in (fn, compiled):
            x = torch.arange(2.0 * n).view(2, n).sin().requires_grad_()
            part = run(x)
            found.append((part.detach(), *torch.autograd.grad(part.square().sum(), x)))
        same(*found)


def written_where(x: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    y = x.clone()
    y[mask(x)] = x.sum()
    return y[mask(x)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mask", [lambda x: x > 0, lambda x: (2 * x).sin() > 0])
def test_a_mask_that_is_computed_twice_counts_once_in_each_graph(mask: Any) -> None:
    """The backward of a write by a mask counts what it takes too."""
    compiled = fusee.compile(written_where, fullgraph=True)
    for x in data():
        found = []
        for run in (written_where, compiled):
            given = x.clone().requires_grad_()
            taken = run(given, mask)
            found.append((taken.detach(), *torch.autograd.grad(taken.square().sum(), given)))
        assert_same(found[1], found[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "put",
    [
        lambda out, at, x: out.scatter_reduce(0, at, x, "mean", include_self=False),
        lambda out, at, x: out.scatter_add(0, at, x.exp()),
        lambda out, at, x: out.scatter_add_(0, at, x.exp()),
        lambda out, at, x: out.scatter(0, at, x),
    ],
)
def test_gradients_of_what_is_put_at_places_that_data_counts(put: Any) -> None:
    """Neighbours of a graph's nodes, of which each has as many as the data says."""

    def fn(x: Tensor, counts: Tensor) -> Tensor:
        at = torch.repeat_interleave(torch.arange(len(counts)), counts)
        return put(torch.zeros(len(counts), 3), at[:, None].expand(-1, 3), x).square().sum()

    compiled = fusee.compile(fn, fullgraph=True)
    for counts in ([2, 1, 2], [0, 5, 0], [5, 0, 1], [1, 1]):
        found: list[Any] = []
        for run in (fn, compiled):
            x = torch.arange(3.0 * max(sum(counts), 5)).view(-1, 3).sin().requires_grad_()
            try:
                loss = run(x, torch.tensor(counts))
                found.append((loss.detach(), *torch.autograd.grad(loss, x)))
            except RuntimeError as error:  # fewer places than elements have no gradients
                found.append(str(error).partition(" - ")[0])
        same(*found)


# ---------------------------------------------------------------------------- random programs

# Each takes the tensors so far, of any sizes, and gives one more.
STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2 - 1,
    lambda x: x[x > 0],
    lambda x: x[x[:, 0] > 0] if x.dim() == 2 else x[x < 1],
    lambda x: x.flatten().sin(),
    lambda x: torch.nonzero(x > 0).float(),
    lambda x: x.masked_select(x < 0.5),
    lambda x: x.cumsum(0),
    lambda x: x.softmax(-1),
    lambda x: x.T.contiguous() if x.dim() == 2 else x[:, None],
    lambda x: x[: (x > 0).sum().item()],
    lambda x: x[(x > 9).sum().item() :],
    lambda x: torch.arange(int((x > 0).sum())).float(),
    lambda x: torch.unique((x * 2).int()).float(),
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x.masked_fill(x > 0, 0.5),
    lambda x: x.sum(0, keepdim=True),
    lambda x: torch.cat([x, x]),
    lambda x: x.index_select(0, torch.nonzero(x.reshape(x.shape[0], -1).sum(1) > 0)[:, 0]),
]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from(["eager", "aot_eager", "fusee"]),
)
def test_random_programs(steps: list[tuple[int, int]], backend: str) -> None:
    def program(x: Tensor) -> list[Tensor]:
        made = [x]
        for which, of in steps:
            made.append(STEPS[which](made[-1 - of % len(made)]))
        return made[1:]

    graphs_of(program, backend)


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize("write", [lambda x: x * 1, lambda x: x.add_(1)])
@pytest.mark.parametrize(
    "look", [lambda x, k: x[k], lambda x, k: x.select(0, k), lambda x, k: x[:, k]]
)
def test_a_place_that_only_data_knows_raises_if_nobody_uses_it(
    look: Callable[..., Any], write: Program, backend: str
) -> None:
    def fn(x: Tensor) -> Tensor:
        look(x, x.nonzero().shape[0])
        return write(x)

    compiled = fusee.compile(fn, backend=backend)
    for x in (torch.eye(4), torch.eye(4)[:1].expand(4, 4).clone(), torch.eye(5)[:3]):
        got, want = outcome(compiled, x), outcome(fn, x)
        same(want[:1], got[:1]) if isinstance(want, tuple) else same(want, got)


def _joined(x: Tensor, k: int) -> Tensor:
    return torch.stack([x[0], torch.ones(k)])


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize(
    ("look", "shape"),
    [
        (lambda x, k: x.view(k), 4), (lambda x, k: x.view(k, 2) * 2, 4),
        (lambda x, k: x.unflatten(0, (k, 2)), 4), (lambda x, k: x.add_(1).view(k, 2).T, 4),
        (lambda x, k: x[x > 0].view(k), 4), (lambda x, k: torch.stack([x, torch.ones(k)]), 4),
        (lambda x, k: x.copy_(torch.ones(k)), 4), (lambda x, k: x.view(k, -1), (4, 4)),
        (lambda x, k: x.view(4, k), (4, 4)), (lambda x, k: x.view(2, 2, k).view(k, 4), (4, 4)),
        (lambda x, k: x.add_(1).reshape(2, 2, k), (4, 4)), (lambda x, k: torch.ones(4).view(k), 4),
        (_joined, (4, 4)), (lambda x, k: torch.ones(2, k) @ x, (4, 4)),
        (lambda x, k: x.unflatten(0, (k, 2)), (4, 4)), (lambda x, k: x[0].expand(k, 4), (4, 4)),
        (lambda x, k: (x[:k].shape, x[-k:].numel()), 4), (lambda x, k: x[:, k:].shape, (4, 4)),
        (lambda x, k: x.split([k, 4 - k]), 4), (lambda x, k: x.add_(1).split([4 - k, k]), 4),
    ],
)  # fmt: skip
def test_a_size_that_only_data_knows_must_fit_where_it_is_used(
    look: Callable[..., Any], shape: Any, backend: str
) -> None:
    def unused(x: Tensor, at: Tensor) -> Tensor:
        k = int(at.sum(dtype=torch.int64).item())
        look(x, k)
        return x * k

    def used(x: Tensor, at: Tensor) -> Any:
        k = int(at[0])
        return look(x, k), torch.ones(k) * k

    def told(x: Tensor, at: Tensor) -> Any:  # as a size -1 stands for another number
        k = int(at.sum())
        return look(x, k), k, x * k

    def raising(x: Tensor, at: Tensor) -> None:
        look(x, at.tolist()[0])
        raise KeyError("after it")

    for program in (unused, used, told, raising):
        for first in (4, 2):
            compiled = fusee.compile(program, backend=backend)
            for k in (first, 4, 2, 0, 1, 3, -1, -2):
                x, at = torch.ones(shape), torch.tensor([k])
                same(outcome(program, x.clone(), at), outcome(compiled, x, at))


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize(
    "look",
    [
        lambda x, k: x[k], lambda x, k: x[1:, k], lambda x, k: x[..., k, 0],
        lambda x, k: x.__setitem__(k, 5.0), lambda x, k: x.__setitem__((slice(None), k), x[0] + 1),
    ],
)  # fmt: skip
def test_a_place_out_of_range_is_told_as_eager_does_after_a_write(
    look: Callable[..., Any], backend: str
) -> None:
    def fn(x: Tensor, places: Tensor) -> Tensor:
        x.put_(places, places + 1.0)  # it may raise, so that what follows comes after a write
        look(x, places.nonzero().shape[0])
        return x + 1

    for places in (torch.zeros(2).long(), torch.ones(1).long(), torch.ones(3).long()):
        given = torch.arange(9.0).view(3, 3), places
        same(outcome(fn, *given), outcome(fusee.compile(fn, backend=backend), *given))


def test_a_size_is_not_what_later_numbers_make_of_it() -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        made = torch.zeros(int(n * 2)).index_add(0, x.long(), x.cos())
        return made.clone().view(torch.stack([torch.tensor(2), n]).tolist())  # n * 2 == 2 * n

    def later(x: Tensor, n: Tensor) -> Tensor:
        twice = x + 1  # by a size that is known, before n is read
        return twice.view(-1, 2) + twice.view(n.tolist()) + twice.sum()

    for backend in ("eager", "fusee"):
        compiled = fusee.compile(fn, backend=backend)
        for k in (2, 3, 5):
            given = torch.tensor([1.0, 3.0]), torch.tensor(k)
            same(outcome(fn, *given), outcome(compiled, *given))
        compiled = fusee.compile(later, backend=backend, dynamic=True)
        for k in (2, 3, 5):
            given = torch.ones(2 * k), torch.tensor([k, 2])
            same(outcome(later, *given), outcome(compiled, *given))


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize(
    "put",
    [
        lambda x, at, y: x.put(at, y), lambda x, at, y: x.put_(torch.tensor([0, 1]), y),
        lambda x, at, y: x.put_(at, y), lambda x, at, y: x.index_put((at,), y),
        lambda x, at, y: x.index_put_((at,), y, accumulate=True),
        lambda x, at, y: x.__setitem__(at, y),
        lambda x, at, y: x.view(2, 2).index_put((at % 2, torch.tensor([0, 1])), y[at]),
        lambda x, at, y: x.view(2, 2).index_put((at % 2,), y[at]),
        lambda x, at, y: x.index_put((at.int(),), y),
        lambda x, at, y: x.index_put((torch.tensor([0, 1]).int(),), y[at]),
    ],
)  # fmt: skip
def test_as_many_values_as_places_that_only_data_knows(
    put: Callable[..., Any], backend: str
) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return put(x, torch.where(y > 0)[0], y), x + 1

    compiled = fusee.compile(program, backend=backend)
    for y in ([1.0, -2, 3, 1], [1.0, 2, 3, 4], [1.0, 0, 0, 2], [1.0, 0, 0, 0], [-1.0] * 4):
        given = torch.arange(4.0), torch.tensor(y)
        want = outcome(program, *(x.clone() for x in given))
        same(want, outcome(compiled, *given))


@pytest.mark.parametrize(
    "find",
    [
        lambda x: torch.unique(x % 3, return_inverse=True, return_counts=True),
        lambda x: torch.unique_consecutive(x // 2, return_inverse=True),
        lambda x: torch.unique(x[:, None] % 3, dim=0, return_inverse=True)[1].cos(),
        lambda x: (torch.unique(torch.ones(x.shape[0]), return_inverse=True), x + 1),
    ],
)
def test_a_size_that_a_call_gives_again_is_its_inputs(find: Program) -> None:
    def program(n: int) -> Any:
        return find(torch.arange(n) * 5)

    compiled = fusee.compile(program)
    for n in (5, 6, 7, 1, 0):
        same(program(n), compiled(n))


PARTS = [
    lambda x: x[:1].shape, lambda x: (x[:2].numel(), x[1:].numel()), lambda x: x[2:].shape,
    lambda x: (x[-1:].shape, x[:-1].shape), lambda x: "one" if len(x[:1]) else "none",
    lambda x: x[:2].new_ones(x[:2].shape), lambda x: torch.arange(x[:2].numel()),
    lambda x: x.view(1, -1).expand(3, -1)[:, :2].reshape(-1).shape, lambda x: x.diff().shape,
    lambda x: x.tensor_split(2)[0].shape, lambda x: x.outer(x).diagonal(1).shape,
    lambda x: {tuple(x[:1].shape): 2}, lambda x: f"{tuple(x[:2].shape)}",
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("look", PARTS)
def test_the_program_hears_how_long_a_part_is(
    look: Callable[[Tensor], Any], write: bool, backend: str
) -> None:
    def program(x: Tensor) -> Any:
        if write:
            x.mul_(2)
        taken = x[x > 0]
        return look(taken), taken.sum()

    for first in (x for x in (*data(), torch.tensor([-1.0, 1, 1]))):
        compiled = fusee.compile(program, backend=backend)
        for x in (first, *data()):
            same(outcome(program, x), outcome(compiled, x))
    assert write or graphs_of(program, backend) == 1


@pytest.mark.parametrize("first", [1, 2])
def test_sizes_that_are_others_in_each_call_are_told(first: int) -> None:
    """Rows of more than one element are taken for likely: the graph serves these alone."""

    def fn(x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        rows = torch.cat([x[mask].view(4, -1), x[~mask].view(4, -1)], 1)
        return (rows * w).sum()

    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    fast = fusee.compile(fn)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for count in (first, *[1] * 20):
            mask = (torch.arange(6) < count).expand(4, 6)
            found = [torch.autograd.grad(f(x, mask, w), (x, w)) for f in (fn, fast)]
            torch.testing.assert_close(found[0], found[1])
    told = [str(w.message) for w in heard if "sizes that only the data knows" in str(w.message)]
    assert len(told) == (first == 1)


@pytest.mark.parametrize("least", [min, max])
def test_the_least_of_a_size_and_a_number(least: Callable[..., int]) -> None:
    """A budget of places (`topk(min(2, n))`), which what follows is computed from."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        taken = F.pad(x[x > 0], (0, 2))[None]
        places = taken.topk(least(2, taken.shape[1] - 2), -1).indices
        return taken[torch.zeros(1, 1, dtype=torch.long), places], places.new_ones(places.shape)

    assert graphs_of(program) == 1


def test_a_step_of_layers_whose_loss_is_masked() -> None:
    """A weight that the graph writes to has been looked at turned, by two stages of it."""
    found = []
    for compiler in (lambda fn: fn, fusee.compile):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(
            x: Tensor, net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            loss = net(x)[x[:, 0] > 0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = compiler(step)
        losses = [run(torch.randn(n, 3, dtype=torch.float64)) for n in (16, 16, 20)]
        found.append((losses, [x.detach() for x in net.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("key", [lambda m: m, lambda m: (1, m), lambda m: (..., m)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_write_at_a_place_that_a_tensor_holds(key: Any, dtype: torch.dtype) -> None:
    """The number is the index: nothing is said, and a bad one raises before the write."""

    def fn(x: Tensor, places: Tensor) -> Tensor:
        y = x * 2
        y[key(places[0])] = 5.0
        return y

    compiled, x = fusee.compile(fn, fullgraph=True), torch.arange(9.0).view(3, 3)
    for place in (2, 0, -1, 3):
        given = x, torch.tensor([place], dtype=dtype)
        same(outcome(fn, *given), outcome(compiled, *given))
