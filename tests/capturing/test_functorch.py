"""torch.vmap and torch.func inside of compiled functions: one graph, and what eager gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
)

import fusee
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced, same

NETWORK = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
WEIGHT = torch.linspace(-1, 1, 16).reshape(4, 4)
DOT = torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None))
NONE_AND_0: Any = (None, 0)
SLOPE = grad(lambda a: (a @ WEIGHT).tanh().sum())


class Sums(NamedTuple):
    total: Tensor
    parts: list[Tensor]


def x(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def loss(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
    out = functional_call(NETWORK, parameters, (row[None],))
    return nn.functional.cross_entropy(out, label[None])


def per_sample(rows: Tensor, labels: Tensor) -> Any:
    parameters = {name: p.detach() for name, p in NETWORK.named_parameters()}
    return torch.vmap(grad(loss), in_dims=(None, 0, 0))(parameters, rows, labels)


def ensemble(parameters: Any, buffers: Any, rows: Tensor) -> Any:
    base = NETWORK

    def call(p: Any, b: Any, rows: Tensor) -> Any:
        return functional_call(base, (p, b), (rows,))

    return torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, rows)


def differ_in_axes(a: Tensor, b: Tensor) -> Any:
    def inner(a: Tensor, pair: Any, *, scale: float) -> Any:
        return a * pair[0] * scale, {"k": a + pair[1][:, 0], "row": pair[0].unbind()}

    axes: Any = (1, {"k": 0, "row": -1})
    mapped = torch.vmap(inner, in_dims=(1, (0, None)), out_dims=axes)
    return mapped(a, (b.T, b), scale=2.0)


def scan(a: Tensor, b: Tensor, reverse: bool = False) -> Any:
    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(combine, (a, b), 1, reverse=reverse, combine_mode="generic")


def pulled(a: Tensor) -> Any:
    transform: Any = vjp
    out, pull, aux = transform(lambda a: ((a.sin(), a * 2), a + 1), a, has_aux=True)
    return out, pull((out[0], a)), torch.vmap(pull)((a.expand(2, 3), a.expand(2, 3))), aux


def in_place(a: Tensor) -> Any:
    def inner(row: Tensor) -> Tensor:
        made = row.clone()
        made[0] = 1
        row.mul_(2)
        return made

    return torch.vmap(inner)(a)


def only_without_grad(a: Tensor) -> Any:
    with torch.no_grad():
        return grad(lambda a: (a * a.detach() + a).sum() if torch.is_grad_enabled() else a.sum())(a)


def no_grad_within(a: Tensor) -> Any:
    def inner(a: Tensor) -> Tensor:
        with torch.no_grad():
            scale = a.exp()
        return (a * scale).sum()

    return grad(inner)(a)


def noise(kind: str, chunk: int | None = None) -> Callable[[Tensor], Any]:
    return lambda a: torch.vmap(lambda row: row + torch.rand(4), randomness=kind, chunk_size=chunk)(
        a
    )


def of_sums(a: Tensor) -> Any:
    return torch.vmap(lambda s: Sums(s.total + s.parts[0], [s.parts[1]]))(Sums(a, [a, a * 2]))


def masked(a: Tensor) -> Any:
    with TransformGetItemToIndex():  # of its own: torch's code calls an autograd function
        return torch.vmap(lambda k: a[k])(torch.arange(3))


ROWS = [
    (masked, x(4)),
    (lambda a: torch.vmap(lambda row: row.sin() @ WEIGHT)(a), x(3, 4)),
    (lambda a, b: DOT(a, b), x(3, 4), x(5, 4)),
    (lambda a, b: torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None))(a, b), x(3, 4), x(5, 4)),
    (differ_in_axes, x(3, 4), x(3, 4)),
    (lambda a: torch.vmap(lambda row: (row.shape[0], row * 2), 0, NONE_AND_0)(a), x(3, 4)),
    (of_sums, x(3, 4)),
    (lambda a: torch.vmap(NETWORK)(a), x(3, 4)),
    (lambda a: torch.vmap(functools.partial(torch.add, alpha=2), (0, None))(a, a[0]), x(3, 4)),
    (lambda a: torch.vmap(lambda row: WEIGHT)(a), x(3, 4)),
    (lambda a: torch.vmap(torch.sin)(a[:0]), x(3, 4)),
    (lambda a: SLOPE(a), x(3, 4)),
    (lambda a: grad_and_value(lambda a, b: ((a * b).sum(), b), (0, 1), True)(a, a + 1), x(3)),
    (lambda a: torch.vmap(grad(grad(torch.sin)))(a), x(5)),
    (lambda a: jacrev(torch.sin)(a), x(3)),
    (lambda a: jacfwd(lambda a, b: a * b, argnums=1)(a, a + 1), x(3)),
    (lambda a: hessian(lambda a: (a.sin() * a * a).sum())(a), x(3)),
    # numbers of the backward of tanh, looked at within two transforms
    (lambda a: hessian(lambda a: (a @ WEIGHT).tanh().sum())(a[0]), x(3, 4)),
    (lambda a: jvp(lambda a, b: (a * b.cos(), b), (a, a + 1), (a, a)), x(3)),
    # torch's formulas have ZeroTensors for what has no tangent
    (lambda a, b: jvp(lambda a: torch.dot(a, b), (a,), (a,)), x(4), x(4)),
    (lambda a, b: jvp(lambda c: torch.baddbmm(c, a, b), (a @ b,), (a,)), x(2, 3, 3), x(2, 3, 3)),
    (grad(lambda a: torch.linalg.norm(a, "nuc")), x(3, 4)),
    (pulled, x(3)),
    (per_sample, x(3, 4), torch.tensor([0, 1, 1])),
    (in_place, x(3, 4)),
    (only_without_grad, x(3)),
    (no_grad_within, x(3)),
    (noise("same"), x(3, 4)),
    (noise("different"), x(3, 4)),
    (noise("different", 2), x(5, 4)),
    (lambda a: torch.vmap(grad(lambda r: r.sin().sum()), 1, 1, chunk_size=2)(a), x(3, 4)),
    (scan, x(2, 7, 3), x(2, 7, 3)),
    (functools.partial(scan, reverse=True), x(2, 8), x(2, 8)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_one_graph(row: Any) -> None:
    fn, *args = row
    traced = same(lambda *args: fn(*args), *args)
    assert len(traced.graphs) == 1


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_our_backend(row: Any) -> None:
    fn, *args = row

    def call(*args: Any) -> Any:
        return fn(*args)

    torch.manual_seed(0)
    want = call(*(a.clone() for a in args))
    torch.manual_seed(0)
    got = fusee.compile(call, fullgraph=True)(*(a.clone() for a in args))
    torch.testing.assert_close(got, want)


def test_chunks_that_draw_the_same_are_left_to_python() -> None:
    """Torch puts the generator back before each of them."""
    same(noise("same", 2), x(5, 4), breaks=True)


def test_modules_stacked() -> None:
    modules = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(3)]
    args = (*stack_module_state(modules), x(5, 4))
    traced = Traced(ensemble)
    torch.testing.assert_close(traced(*args), ensemble(*args))
    assert len(traced.graphs) == 1 and not traced.stops
    assert all(p.requires_grad for p in NETWORK.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
def test_gradients_through_transforms(backend: str) -> None:
    def step(a: Tensor, w: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row @ w).tanh() * grad(torch.sin)(row.sum()))(a)

    compiled = fusee.compile(step, fullgraph=True, backend=backend)
    results = []
    for fn in (step, compiled):
        a, w = x(3, 4).requires_grad_(), WEIGHT.clone().requires_grad_()
        out = fn(a, w)
        out.square().sum().backward()
        results.append((out, a.grad, w.grad))
    torch.testing.assert_close(*results)


BREAKS: list[tuple[str, Any]] = [
    ("requires_grad of a tensor may differ", lambda r: r * 2 if r.requires_grad else r),
    ("stride of a tensor may differ", lambda r: r * r.stride(0)),
    ("item() needs the value", lambda r: r * (r.sum().item() > 0)),
    ("does more than compute tensors", lambda r: _logged(r)),
    ("broadcast shape", lambda r: torch.zeros(4).add_(r)),
    ("raises ValueError('no')", lambda r: _refuse(r)),
    ("random operation", lambda r: torch.rand_like(r) * 0),
]
LOG: list[Any] = []


def _logged(row: Tensor) -> Tensor:
    LOG.append(row.shape)
    return row * 2


def _refuse(row: Tensor) -> Tensor:
    raise ValueError("no")


@pytest.mark.parametrize(("why", "inner"), BREAKS, ids=[b[0] for b in BREAKS])
def test_breaks(why: str, inner: Any) -> None:
    """What a stand-in may not tell, or functorch refuses, is left to Python."""
    LOG.clear()

    def call(a: Tensor) -> Any:
        try:
            return torch.vmap(inner)(a + 1) * 2
        except (RuntimeError, ValueError) as error:
            return str(error)

    want = call(x(3, 4))
    traced = Traced(call)
    got = traced(x(3, 4))
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want)
    else:
        assert got == want
    assert len(LOG) in (0, 2)
    assert why in "".join(traced.stops)


def test_a_tensor_that_got_out() -> None:
    def call(a: Tensor) -> Any:
        out: list[Tensor] = []

        def inner(row: Tensor) -> Tensor:
            out.append(row * 2)
            return row

        torch.vmap(inner)(a)
        return out[0].shape, len(out)

    traced = Traced(call)
    assert traced(x(3, 4)) == call(x(3, 4))
    assert "another capture" in traced.stops[0]


def test_compiled_functions_under_transforms() -> None:
    """They run as they are, and go on being compiled outside."""
    compiled: Any = fusee.compile(lambda a: a.sin() * 2)
    a = x(3, 4)
    with pytest.warns(FuseeWarning, match="within a transform"):
        torch.testing.assert_close(torch.vmap(compiled)(a), a.sin() * 2)
    torch.testing.assert_close(compiled(a), a.sin() * 2)
    torch.testing.assert_close(grad(lambda a: compiled(a).sum())(a), a.cos() * 2)
    torch.testing.assert_close(compiled(a + 1), (a + 1).sin() * 2)
    assert len(fusee.report(compiled)) == 1


@pytest.mark.parametrize(
    ("made", "a"),
    [
        (torch.vmap(lambda row: row.sin().sum()), x(3, 4)),
        (torch.vmap(grad(lambda row: row.sin().sum())), x(3, 4)),
        (grad(lambda a: a.sin().sum()), x(4)),
        (jacrev(torch.sin), x(4)),
        (hessian(lambda a: a.pow(3).sum()), x(4)),
    ],
)
def test_a_transform_is_compiled_itself(made: Any, a: Tensor) -> None:
    compiled = fusee.compile(made)
    for one in (a, a * 2):
        torch.testing.assert_close(compiled(one), made(one))
    assert compiled.__name__ == made.__name__
    assert len(fusee.report(compiled)) == 1


def test_what_functorch_refuses_within_several_transforms_breaks_nothing() -> None:
    def fn(a: Tensor) -> Any:
        return torch.vmap(hessian(lambda a: a.pow(2).sum()))(a)

    a, before = torch.rand(3, 4), torch._C._dispatch_tls_local_exclude_set().raw_repr()
    with pytest.warns(FuseeWarning):
        torch.testing.assert_close(fusee.compile(fn)(a), fn(a))
    assert torch._C._dispatch_tls_local_exclude_set().raw_repr() == before
    assert torch.is_grad_enabled()


def test_autocast_is_left_to_python() -> None:
    def call(a: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return torch.vmap(lambda row: row @ WEIGHT)(a)

    traced = Traced(call)
    torch.testing.assert_close(traced(x(3, 4)), call(x(3, 4)))
    assert "autocast" in "".join(traced.stops)


class Doubled(torch.autograd.Function):
    """Its gradient is no derivative of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, given: Any) -> Any:
        (result,) = ctx.saved_tensors
        return given * result * 2


@pytest.mark.parametrize("fn", [
    lambda a: torch.vmap(lambda row: Doubled.apply(row).sum())(a),
    lambda a: grad(lambda a: Doubled.apply(a).sum())(a),
    lambda a: torch.vmap(grad(lambda row: Doubled.apply(row).sum()))(a),
    lambda a: torch.func.jacrev(Doubled.apply)(a[0]),
    lambda a: torch.func.vjp(Doubled.apply, a)[1](torch.ones_like(a))[0],
])  # fmt: skip
@pytest.mark.parametrize("backend", ["fusee", "eager"])
@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
def test_gradients_of_autograd_functions_within_transforms(fn: Any, backend: str) -> None:
    rows = torch.linspace(-1, 1, 6).view(3, 2)
    told = []
    for run in (fn, fusee.compile(fn, backend=backend)):
        leaf = rows.clone().requires_grad_()
        result = run(leaf)
        result.sum().backward()
        told.append((result.detach(), leaf.grad, run(rows)))
    torch.testing.assert_close(told[1], told[0])


def test_an_autograd_function_that_nothing_goes_back_through_stays_in_a_mapped_graph() -> None:
    traced = Traced(lambda a: torch.vmap(lambda row: Doubled.apply(row).sum())(a))
    traced(torch.ones(3, 2))
    assert len(traced.graphs) == 1 and not traced.stops


def test_zeros_without_memory_are_no_input_of_a_graph() -> None:
    traced = Traced(lambda x: (x * 2 + 1, x))
    zeros = torch._efficientzerotensor(4)
    for given in (torch.ones(4), zeros, torch.zeros(4), zeros):
        made, itself = traced(given)
        assert itself is given and torch.equal(made, given * 2 + 1)
    assert "without memory" in str(traced.stops)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_gradients_that_are_asked_for_in_batches() -> None:
    """`is_grads_batched` has tensors of torch's older vmap, which hooks are given."""
    x, told = torch.ones(3, requires_grad=True), []
    for hook in (torch.cos, fusee.compile(lambda g: g.cos())):
        y = x * 2
        y.register_hook(hook)
        told.append(torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)[0])
    assert torch.equal(*told)


@pytest.mark.parametrize(
    "of_row",
    [
        torch.prod,
        lambda row: row.cumprod(0).sum(),
        lambda row: torch.nn.functional.avg_pool1d(row[None], row.shape[0] // 2 + 1).square().sum(),
    ],
)
def test_forms_for_open_sizes_are_transformed(of_row: Any) -> None:
    """Autograd functions of ours stand for these outside."""

    def program(x: Any) -> Any:
        one, other = x.sum(0), x.mean(0)  # no views, whose places forward mode asks for
        tilted = torch.func.jvp(grad(of_row), (one,), (other,))[1]
        return torch.vmap(grad(of_row))(x), tilted, hessian(of_row)(one)

    compiled = fusee.compile(program, fullgraph=True)
    for n in (3, 4, 5, 7):
        given = torch.randn(2, n)
        torch.testing.assert_close(compiled(given), program(given))
