"""torch.cond, while_loop, map, scan, flex_attention and out_dtype within one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fusee
from fusee.backends.report import live_reports
from fusee.capture.graph_break import associative_scan as associative_scan_of_elements
from fusee.errors import GraphBreakError
from tests.capturing.same import Traced

T = torch.Tensor
torch_map: Any = torch._higher_order_ops.map
WEIGHT = torch.linspace(-1, 1, 4)
X = torch.linspace(-2, 3, 12).reshape(3, 4)


def chosen(x: T) -> Any:
    y = x * 2
    z = torch.cond(y.sum() > 0, lambda x: x.sin() * WEIGHT, lambda x: x.cos() - 1, (y,))
    return z + 1


scan_by_points = torch.ops.higher_order.associative_scan


def chosen_twice(x: T) -> Any:
    def inner(x: T) -> T:
        return torch.cond(x.max() > 1, lambda x: x.exp(), lambda x: x * WEIGHT, (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x.neg(), (x,))


def structured(x: T) -> Any:
    one = lambda x, y: {"a": x + y, "b": (x * y,)}  # noqa: E731
    other = lambda x, y: {"a": x - y, "b": (y / 2,)}  # noqa: E731
    found = torch.cond(x.sum() > 0, one, other, (x, x + 1))
    return found["a"], found["b"]


def mapped(x: T) -> Any:
    return torch_map(lambda row, y: (row.sin() + y * WEIGHT, row.sum()), x * 2, x.sum())


def looped(x: T) -> Any:
    def step(i: T, x: T) -> Any:
        return i + 1, x * 0.9 + WEIGHT

    return while_loop(lambda i, x: i < 5, step, (torch.zeros((), dtype=torch.int64), x))


def scanned(x: T) -> Any:
    def step(carry: T, row: T) -> Any:
        return carry * 0.5 + row, (carry * row * WEIGHT).sum()

    return scan(step, torch.ones(4), x * 2)


def scanned_back(x: T) -> Any:
    return scan(lambda c, r: (c + r, c * r), torch.zeros(4), x, reverse=True)


def scanned_in_pairs(x: T) -> Any:
    return associative_scan(lambda a, b: a * b + b, x * 2, 0, combine_mode="generic")


def scanned_back_in_pairs(x: T) -> Any:
    def combine(a: Any, b: Any) -> Any:
        top = torch.maximum(a["top"], b["top"])
        sums = a["sum"] * (a["top"] - top).exp(), b["sum"] * (b["top"] - top).exp()
        return {"top": top, "sum": sums[0] + sums[1]}

    xs = {"top": x * 2, "sum": x.cos()}
    found: Any = associative_scan(combine, xs, -1, reverse=True, combine_mode="generic")
    return found["sum"]


def scanned_matrices(x: T) -> Any:
    y = x.sin().reshape(3, 2, 2)
    return associative_scan(lambda a, b: a @ b, y, 0, combine_mode="generic")


def scanned_by_points(x: T) -> Any:
    """What associative_scan calls with tensors of a GPU, as mamba does there."""

    def combine(a: T, b: T, c: T, d: T) -> Any:
        return a * c, c * b + d

    return scan_by_points(combine, [x * 0.5, x.sin()], additional_inputs=())


PROGRAMS = [
    chosen,
    chosen_twice,
    structured,
    mapped,
    looped,
    scanned,
    scanned_back,
    scanned_in_pairs,
    scanned_back_in_pairs,
    scanned_matrices,
    scanned_by_points,
]
IDS = [fn.__name__ for fn in PROGRAMS]


def _by_python(fn: Callable[..., Any], x: T) -> Any:
    """What PyTorch's own operators give, run as Python: they ask TorchDynamo otherwise."""
    names = {"cond": _cond, "while_loop": _while, "map": _map, "scan": _scan}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cond", names["cond"])
        patch.setitem(fn.__globals__, "while_loop", names["while_loop"])
        patch.setitem(fn.__globals__, "torch_map", names["map"])
        patch.setitem(fn.__globals__, "scan", names["scan"])
        patch.setitem(fn.__globals__, "scan_by_points", _by_points)  # eager's gradients are wrong
        return fn(x)


def _cond(pred: T, yes: Any, no: Any, operands: Any) -> Any:
    return (yes if pred else no)(*operands)


def _while(test: Any, body: Any, carried: Any) -> Any:
    while test(*carried):
        carried = body(*carried)
    return carried


def _map(f: Any, xs: T, *more: Any) -> Any:
    rows = [f(row, *more) for row in xs]
    return tuple(torch.stack(column) for column in zip(*rows))


def _scan(f: Any, carry: T, xs: T, dim: int = 0, reverse: bool = False) -> Any:
    rows = []
    for row in reversed(xs.unbind(dim)) if reverse else xs.unbind(dim):
        carry, out = f(carry, row)
        rows.append(out)
    return carry, torch.stack(rows[::-1] if reverse else rows, dim)


def _by_points(f: Any, xs: list[T], additional_inputs: Any) -> Any:
    rows = [tuple(x[0] for x in xs)]
    for row in list(zip(*xs))[1:]:
        rows.append(f(*rows[-1], *row))
    return tuple(torch.stack(column) for column in zip(*rows))


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=IDS)
def test_one_graph(fn: Callable[..., Any], backend: str) -> None:
    compiled = fusee.compile(fn, backend=backend, fullgraph=True)
    for x in (X, -X, X * 0.1):
        _close(compiled(x), _by_python(fn, x))


@pytest.mark.parametrize("fn", [f for f in PROGRAMS if f is not looped], ids=lambda fn: fn.__name__)
def test_gradients(fn: Callable[..., Any]) -> None:
    compiled = fusee.compile(fn, fullgraph=True)
    for x in (X, -X):
        found = []
        for run in (compiled, lambda x: _by_python(fn, x)):
            leaf, weight = x.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(globals(), "WEIGHT", weight)
                leaves = [y for y in torch.utils._pytree.tree_leaves(run(leaf)) if y.requires_grad]
            sum((y * y).sum() for y in leaves).backward()
            # as in PyTorch: zeros where the function that ran does not use an operand
            found.append(
                [torch.zeros_like(y) if y.grad is None else y.grad for y in (leaf, weight)]
            )
        _close(*found)


def test_the_graph_is_as_torch_compile_has_it() -> None:
    traced = Traced(chosen)
    _close(traced(X), _by_python(chosen, X))
    (graph,) = traced.graphs
    (call,) = [n for n in graph.graph.nodes if n.target is torch.ops.higher_order.cond]
    _, yes, no, operands = call.args
    assert (yes.op, no.op, len(operands)) == ("get_attr", "get_attr", 2)
    assert isinstance(getattr(graph, yes.target), torch.fx.GraphModule)
    _close(traced(-X), _by_python(chosen, -X))
    assert traced.entries == 1


@pytest.mark.parametrize("fn", [scanned_by_points, scanned_back_in_pairs, scanned_in_pairs])
def test_an_associative_scan_of_elements_is_one_node(fn: Any) -> None:
    traced = Traced(fn)
    _close(traced(X), _by_python(fn, X))
    (graph,) = traced.graphs
    calls = [n for n in graph.graph.nodes if n.target is associative_scan_of_elements]
    assert len(calls) == (fn is not scanned_in_pairs)  # its function is not associative


@pytest.mark.parametrize("sizes", [(1, 4), (2, 4), (9, 4)])
def test_an_associative_scan_of_open_length(sizes: tuple[int, ...]) -> None:
    compiled = fusee.compile(scanned_by_points, fullgraph=True, dynamic=True)
    back = fusee.compile(scanned_back_in_pairs, fullgraph=True, dynamic=True)
    for x in (X, torch.linspace(-1, 1, 24).reshape(6, 4), torch.ones(sizes)):
        _close(compiled(x), _by_points_of(x))
        _close(back(x.T), scanned_back_in_pairs(x.T))


def _by_points_of(x: T) -> Any:
    return _by_points(lambda a, b, c, d: (a * c, c * b + d), [x * 0.5, x.sin()], ())


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_associative_scan_of_what_takes_steps_of_its_own(dynamic: bool) -> None:
    places = torch.tensor([0, 2, 1, 0])

    def gated(x: T) -> Any:  # minGRU in logarithms
        def combine(a: Any, b: Any) -> Any:
            return a[0] + b[0], torch.logaddexp(a[1] + b[0], b[1])

        xs = torch.cat([x[:1], -torch.nn.functional.softplus(x)]), x[places]
        return associative_scan(combine, xs, 0, combine_mode="generic")[1].exp()

    compiled = fusee.compile(gated, fullgraph=True, dynamic=dynamic)
    for x in (X, X + 1):
        _close(compiled(x), gated(x))


def test_an_associative_scan_with_effects_has_them_as_often_as_in_eager() -> None:
    seen: list[int] = []

    def counting(x: T) -> Any:
        def combine(a: T, b: T) -> T:
            seen.append(1)
            return a + b

        return associative_scan(combine, x, 0, combine_mode="generic") * 2

    want = counting(X)
    count, seen[:] = len(seen), []
    _close(fusee.compile(counting)(X), want)
    assert len(seen) == count


def test_a_known_predicate_chooses_while_capturing() -> None:
    def known(x: T) -> Any:
        return torch.cond(x.shape[0] > 2, lambda x: x + 1, lambda x: x - 1, (x,))

    traced = Traced(known)
    _close(traced(X), X + 1)
    _close(traced(X[:2]), X[:2] - 1)
    assert not any(n.op == "get_attr" for graph in traced.graphs for n in graph.graph.nodes)


def test_what_both_functions_read_is_guarded() -> None:
    scale = {"yes": 2.0, "no": 3.0}

    def scaled(x: T) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x * scale["yes"], lambda x: x * scale["no"], (x,))

    compiled = fusee.compile(scaled, backend="eager", fullgraph=True)
    _close(compiled(X), X * 2)
    scale["no"] = 5.0
    _close(compiled(-X), -X * 5)


def _writes(x: T) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.add_(1), lambda x: x + 1, (x,))


def _gives_its_operand(x: T) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x, lambda x: x + 1, (x,))


def _other_sizes(x: T) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x[:1] * 2, lambda x: x + 1, (x,))


def _draws(x: T) -> Any:
    return torch_map(lambda row: torch.rand_like(row), x)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (_writes, "writes to a tensor it is given"),
        (_gives_its_operand, "gives a tensor that it gets"),
        (_other_sizes, "sizes"), (_draws, "random"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_functions_that_do_more_are_an_error_with_their_line(fn: Any, words: str) -> None:
    with pytest.raises(GraphBreakError) as error:
        fusee.compile(fn, fullgraph=True)(X.clone())
    assert words in str(error.value) and f"in {fn.__name__}" in str(error.value)


def by_length(x: T) -> Any:
    """The length is an operand of a function, and of one within it."""

    def long(y: T) -> T:
        return torch.cond(y.max() > 1, lambda z: z * z.shape[0], lambda z: z.cos(), (y,))

    return torch.cond(x.sum() > 0, long, lambda y: y + torch.ones(x.shape[0], 1), (x,)) + 1


@torch.compiler.nested_compile_region
def region(x: T, y: T) -> Any:
    return x.sin() + y, x * y


def regions(x: T) -> Any:
    """So small that it runs as it was captured."""
    return region(*region(x, x.cos()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", ["own", "stock"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    "fn", [by_length, chosen_twice, structured, mapped, looped, scanned, scanned_back, regions]
)
def test_sizes_that_vary(fn: Callable[..., Any], learns: bool, way: str) -> None:
    """A graph that ran eagerly would warn."""
    if learns and (fn is looped or (fn in (scanned, scanned_back) and way == "stock")):
        pytest.skip("no gradients in eager; torch's scan differentiates by itself there")
    if learns and fn in (scanned, scanned_back) and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's own gradients of a scan are wrong, ours are those of a loop")
    torch._dynamo.reset()
    compiled = fusee.compile(fn) if way == "own" else torch.compile(fn, backend="fusee")
    for n in (3, 5, 4, 2, 7):
        told = []
        for run in (fn, compiled):
            x = torch.linspace(-2, 2.5 if n % 2 else 1, 4 * n).reshape(n, 4).requires_grad_(learns)
            leaves = torch.utils._pytree.tree_leaves(run(x))
            if learns:
                sum(y.square().sum() for y in leaves).backward()
            told.append((*(y.detach() for y in leaves), x.grad))
        _close(told[1], told[0])


def halves(x: T) -> Any:
    """Both give what has a size that is computed."""
    k = x.shape[0] // 2
    return torch.cond(x.sum() > 0, lambda y: y[:k] * k, lambda y: y[k : 2 * k].cos(), (x,))


VARYING = [by_length, halves, chosen_twice, structured, mapped, looped, scanned, scanned_back]


@pytest.mark.parametrize("fn", VARYING)
def test_one_version_serves_all_sizes(fn: Callable[..., Any]) -> None:
    explained = fusee.explain(fn, backend="eager")
    for n in (3, 4, 5, 7, 3):
        found = explained(torch.ones(n, 4))
    assert found.graph_count == 2 and not any(piece.stop for piece in found.pieces)


@pytest.mark.parametrize("fn", VARYING)
def test_exported_with_open_sizes(fn: Callable[..., Any]) -> None:
    exported = fusee.export(fn, (torch.ones(4, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    for n in (4, 5, 7):
        for sign in (1, -1):
            x = sign * torch.linspace(-1, 2, 4 * n).reshape(n, 4)
            _close(exported(x), fn(x))


# ------------------------------------------------------------------------------ flex_attention

BIAS = torch.linspace(-1, 1, 32).reshape(2, 16)


def _score(score: T, b: T, h: T, m: T, n: T) -> T:
    return score + (m - n) * 0.1 + BIAS[h, n]


def _causal(b: T, h: T, m: T, n: T) -> T:
    return m >= n


def _attention(q: T, k: T, v: T, score: Any, mask: Any) -> T:
    """The formula, over broadcast positions."""
    scores = (q @ k.repeat_interleave(2 // k.size(1), 1).transpose(-2, -1)) / q.size(-1) ** 0.5
    places = [torch.arange(n) for n in scores.shape]
    grid = torch.meshgrid(*places, indexing="ij")
    scores = scores if score is None else score(scores, *grid)
    scores = scores if mask is None else scores.masked_fill(~mask(*grid), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(2 // v.size(1), 1)


@pytest.mark.parametrize("backend", ["eager", "fusee", "stock"])
@pytest.mark.parametrize("score", [None, _score])
@pytest.mark.parametrize("mask", [None, _causal])
def test_flex_attention(score: Any, mask: Any, backend: str) -> None:
    blocks = None
    if mask is not None:
        blocks = create_block_mask(mask, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=8)

    def attend(q: T, k: T, v: T) -> Any:
        gqa = q.size(1) != k.size(1)
        return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=gqa) * 2

    if backend == "stock":
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend="fusee", fullgraph=True)
    else:
        compiled = fusee.compile(attend, backend=backend, fullgraph=True)
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    _close(compiled(q, k, v), _attention(q, k, v, score, mask) * 2)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    got = compiled(turned, k[:, :1], v[:, :1])
    _close(got, _attention(q, k[:, :1], v[:, :1], score, mask) * 2)
    assert got.stride() == turned.stride()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_under_autocast_and_stock() -> None:
    def attend(q: T) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, q, q, score_mod=_score)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="fusee")
    for n in (8, 8, 12, 16):
        q = torch.randn(1, 2, n, 8)
        assert torch.equal(compiled(q), attend(q))


def test_out_dtype() -> None:
    a = torch.randint(-100, 100, (4, 8), dtype=torch.int8)

    def product(a: T) -> Any:
        return out_dtype(torch.ops.aten.mm.default, torch.int32, a, a.t()) + 1

    for backend in ("eager", "fusee"):
        got = fusee.compile(product, backend=backend, fullgraph=True)(a)
        assert got.dtype == torch.int32 and torch.equal(got, (a.int() @ a.int().t()) + 1)


def test_whole_numbers_times_a_float_under_vmap() -> None:
    scaled = fusee.compile(lambda m: torch.vmap(lambda m: m * 0.5)(m), fullgraph=True)
    assert torch.equal(scaled(torch.arange(4)), torch.arange(4) * 0.5)


def test_wrap_is_the_call() -> None:
    def fn(x: T, y: T) -> T:
        return torch.ops.higher_order.wrap(lambda a, b=1: (a + b).sin() * y, x, b=2)

    x, y = torch.ones(2), torch.ones(2)
    assert torch.equal(fusee.compile(fn, fullgraph=True, backend="eager")(x, y), fn(x, y))


@pytest.mark.parametrize("backend", ["eager", "fusee"])
def test_cond_of_operands_within_containers(backend: str) -> None:
    def fn(p: T, a: T, b: T, c: T) -> Any:
        return torch.cond(
            p,
            lambda x: {"r": [x["t"][0] * c, x["t"][1]["b"].sin()]},
            lambda x: {"r": [x["t"][1]["b"] / c, x["t"][0].cos()]},
            ({"t": [a, {"b": b}]},),
        )

    fast = fusee.compile(fn, backend=backend, fullgraph=True)
    for p in (True, False):
        a, b, c = (torch.rand(3, requires_grad=True) for _ in range(3))
        made = fast(torch.tensor(p), a, b, c)["r"]
        want = [a * c, b.sin()] if p else [b / c, a.cos()]
        torch.testing.assert_close(made, want)
        grads = (torch.autograd.grad(xs[0].sum() + xs[1].sum(), (a, b)) for xs in (made, want))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("compiler", [fusee.compile, torch.compile], ids=["ours", "torchs"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
def test_the_test_of_a_loop_is_in_no_tuple(compiler: Any, backend: str) -> None:
    def fn(x: T, w: T) -> T:
        y, _ = while_loop(
            lambda y, n: n.clone().add_(1) < 5, lambda y, n: (y * w, n + 1), (x.sin(), n0)
        )
        return y.cos()

    x, w, n0 = torch.ones(3), torch.full((3,), 0.5), torch.tensor(0)
    made = compiler(fn, backend=backend, fullgraph=True)(x, w)
    torch.testing.assert_close(made, (x.sin() * w**4).cos())


def counted(x: T, turn: Callable[[T], T]) -> T:
    zero = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, turn(y)), (zero, x))[1]


NESTED: dict[str, Callable[[T, Callable[[T], T]], T]] = {
    "cond": lambda x, f: torch.cond(x.sum() > 0, lambda y: f(y) + 1, lambda y: f(y) - 1, (x,)),
    "while_loop": counted,
    "map": lambda x, f: torch_map(f, torch.stack([x, x + 1])).sum(0),
    "scan": lambda x, f: scan(lambda c, r: (f(c + r), c * r), x * 0, torch.stack([x, x]))[0],
    "vmap": lambda x, f: torch.vmap(f)(torch.stack([x, x + 1])).sum(0),
    "grad": lambda x, f: torch.func.grad(lambda y: (f(y) * y).sum())(x),
}


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:The .grad attribute")
@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("outer", ["cond", "while_loop", "map", "scan"])
def test_one_within_another(outer: str, inner: str) -> None:
    """The shapes of what an inner one gives are found without data."""

    def fn(x: T) -> T:
        return NESTED[outer](x, lambda y: NESTED[inner](y, torch.sin))

    outcomes = []
    compiled = fusee.compile(fn)
    # torch itself has zeros for a grad within a function that autograd hears of, and raises
    is_trained = inner != "grad" and (outer, inner) != ("scan", "while_loop")
    for call in (fn, compiled, compiled):
        x = X[1].clone().requires_grad_(is_trained)
        y = call(x)
        outcomes.append((y, *(torch.autograd.grad(y.sum(), x) if is_trained else ())))
    torch.testing.assert_close(outcomes[1], outcomes[0])
    torch.testing.assert_close(outcomes[2], outcomes[0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: scan(lambda c, r: ((c + r).long(), r * 2), x[0] * 1, x),
        lambda x: scan(lambda c, r: ((c + r)[:1], r * 2), x[0] * 1, x),
        lambda x: while_loop(
            lambda k, y: k < 3, lambda k, y: (k + 1, y.long()), (torch.tensor(0), x)
        ),
        lambda x: while_loop(
            lambda k, y: y.sum(), lambda k, y: (k + 1, y * 0), (torch.tensor(0), x)
        ),
    ],
)  # fmt: skip
def test_what_is_carried_is_of_one_kind(fn: Callable[[T], Any]) -> None:
    """torch refuses others, and tests that are no bools."""
    with pytest.raises(GraphBreakError, match=r"gives other tensors|no bool"):
        fusee.compile(fn, fullgraph=True)(X.clone())


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: T) -> T:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x).relu()
        return y.float() + x


class Hinted(torch.nn.Module):
    def forward(self, x: T) -> T:
        hinted = hints_wrapper(lambda x, y: torch.relu(x) + y, (x + 1, x), {}, hints={"a": True})
        return torch.sin(hinted)


@pytest.mark.filterwarnings("error:.*runs eagerly")
@pytest.mark.parametrize("kind", [Mixed, Hinted])
@pytest.mark.parametrize("compiler", [fusee.compile, torch.compile], ids=["ours", "torchs"])
def test_bodies_of_exported_programs_are_compiled(
    compiler: Any, kind: type[torch.nn.Module]
) -> None:
    module = kind()
    exported = torch.export.export(module, (X,), strict=kind is Hinted).module()
    options = {"prices": False, "cache": False}
    torch.testing.assert_close(
        compiler(exported, backend="fusee", options=options)(X), module(X), rtol=1e-2, atol=1e-2
    )
    assert live_reports()[-1].kernels
