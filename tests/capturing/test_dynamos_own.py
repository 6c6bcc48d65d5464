"""What TorchDynamo's own tests have shown when each ran compiled, as the smallest function.

source   https://github.com/pytorch/pytorch, test/dynamo: test_misc.py and its like
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.experimental import control_flow  # type: ignore[import-untyped]
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop_op
from torch.fx.experimental.symbolic_shapes import sym_and
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusee
from fusee.errors import FuseeWarning

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor
    offsets: list[int] = dataclasses.field(default_factory=lambda: [5])
    scale: int = 3


@dataclasses.dataclass(frozen=True)
class Doubled:
    x: Tensor
    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    pair: Pair
    more: tuple[Any, ...]


class Derived(Pair):
    pass


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def of_pair(pair: Pair) -> Tensor:
    return pair.x + pair.y * pair.scale + pair.offsets[0]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def of_nested(nested: Nested, *, others: dict[str, Any]) -> Tensor:
    return of_pair(nested.pair) + nested.more[1].twice * others["a"].y


OUTER = Pair(torch.ones(2), torch.full((2,), 3.0), scale=4)


def in_a_loop(x: Tensor) -> Tensor:
    for k in range(3):
        x = of_pair(Pair(x, x.sin(), scale=k))
    return x


@BACKENDS
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: of_pair(Pair(x, x + 1)) * 2,
        lambda x: of_pair(Derived(x, x + 1, [3])),
        lambda x: of_pair(OUTER) + x,
        lambda x: of_nested(Nested(Pair(x, x), (1, Doubled(x))), others={"a": Pair(x, x.cos())}),
        in_a_loop,
    ],
)
def test_frozen_instances_in_a_graph(
    fn: Callable[[Tensor], Tensor], trains: bool, backend: str
) -> None:
    """fx has no text for them: nodes get their fields, and make the instances again."""
    x = torch.randn(2, requires_grad=trains)
    got, expected = fusee.compile(fn, backend=backend, fullgraph=True)(x), fn(x)
    torch.testing.assert_close(got, expected)
    if trains:
        (mine,), (other,) = (torch.autograd.grad(y.sum(), x) for y in (got, expected))
        torch.testing.assert_close(mine, other)


def test_fields_of_frozen_instances_are_facts() -> None:
    compiled = fusee.compile(lambda pair, x: of_pair(pair) * x, fullgraph=True)
    x = torch.randn(2)
    for pair in (OUTER, Pair(x, x, [1]), Pair(x, x, scale=7), Pair(x.sin(), x, scale=7)):
        torch.testing.assert_close(compiled(pair, x), of_pair(pair) * x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.to_sparse() * 2,
        lambda x: (x.to_sparse() * 2).to_dense() + 1,
        lambda x: x.to_sparse_csr() @ x,
        lambda x: torch.sparse_coo_tensor(
            torch.tensor([[0, 1], [1, 0]]), x[0, :2], (2, 2)
        ).to_dense(),
    ],
)
def test_sparse_results_with_aot_eager(fn: Callable[[Tensor], Tensor], trains: bool) -> None:
    """They have no functional form: it raised, where the default compiler runs them."""
    x = torch.randn(3, 3, requires_grad=trains)
    got = fusee.compile(fn, backend="aot_eager")(x)
    expected = fn(x)
    assert got.layout is expected.layout and got.requires_grad is expected.requires_grad
    torch.testing.assert_close(got.to_dense(), expected.to_dense())


def divided_in_turn(x: Tensor, t: Tensor) -> Tensor:
    for k in t.tolist():
        x = x + 12 // k
    return x


def made(fn: Callable[..., Any], *given: Tensor) -> Any:
    """What a call gives, or what it raises."""
    try:
        return fn(*given)
    except Exception as error:  # noqa: BLE001  # whatever eager raises
        return type(error), str(error)


@BACKENDS
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, t: x * (10 // t.sum().item()),
        lambda x, t: x * (10 % t[0].item()),
        lambda x, t: (x + 1, divmod(-7, t[1].item())),
        lambda x, t: x + 1 if (n := t[0].item() + 9) * n % n == 0 else x,
        divided_in_turn,
    ],
)
def test_divisors_that_only_data_knows(fn: Callable[..., Any], backend: str) -> None:
    """The graph checks that one is positive. Where it is not, Python runs the call, and raises."""
    compiled = fusee.compile(fn, backend=backend, fullgraph=True)
    for numbers in ([3, 4], [1, 7], [-3, 5], [2, -9], [0, 1], [1, 0]):
        given = torch.ones(2), torch.tensor(numbers)
        assert str(made(compiled, *given)) == str(made(fn, *given))


@BACKENDS
@pytest.mark.parametrize("joined", [sym_and, lambda *all: functools.reduce(operator.and_, all)])
def test_relations_that_hold_together(joined: Callable[..., Any], backend: str) -> None:
    def checked(x: Tensor, t: Tensor) -> Tensor:
        a, b = t.tolist()
        torch._check(joined(a >= 2, a <= 6, b >= 1))
        return torch.zeros(a, b) + x.sum() + (3 if a > 1 and b > 0 else 4)

    def asserted(x: Tensor, t: Tensor) -> Any:
        a, b = t.tolist()
        if not joined(a >= 2, b >= 1, x.shape[0] > 1):
            raise ValueError("too small")
        return x + a, b

    def given_back(x: Tensor, t: Tensor) -> Any:
        a, b = t.tolist()
        return x + 1, joined(a >= 2, b >= 1), joined(a >= 2, x.shape[0] > 1), not b >= 1

    for fn in (checked, asserted, given_back):
        compiled = fusee.compile(fn, backend=backend, fullgraph=True)
        for rows, numbers in ((1, [2, 3]), (1, [7, 1]), (1, [3, 0]), (3, [3, 1]), (4, [1, 1])):
            given = torch.ones(rows, 1), torch.tensor(numbers)
            expected = made(fn, *given)
            got = made(compiled, *given) if rows > 1 or fn is not asserted else expected
            assert str(got) == str(expected)


@BACKENDS
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_are_tensors_of_one_element(dynamic: bool | None, backend: str) -> None:
    def fn(t: Tensor, n: int) -> Tensor:
        x = torch.ones(t).repeat(n)  # type: ignore[call-overload]
        return torch.cat([x, x]) + t.item()

    compiled = fusee.compile(fn, dynamic=dynamic, fullgraph=True, backend=backend)
    for t, n in ((5, 5), (3, 5), (1, 7)):
        for given in (torch.tensor([t]), torch.tensor(t)):
            assert torch.equal(compiled(given, n), fn(given, n))


def in_turn(x: Tensor) -> list[Tensor]:
    made: list[Tensor] = []
    for k in range(3):
        made.append(x + k)
        made[-1].grad = made[-2] if k else x.sin()
    return made


def with_more(x: Tensor) -> Any:
    y: Any = x + 1
    y.grad, y.label = x * 2, "y"
    y.grad += 1
    print(end="")  # the next graph gets it
    z = y * y.grad
    z.grad = y
    y.grad = None
    return y, z, y.label


@BACKENDS
@pytest.mark.parametrize("fn", [in_turn, with_more])
def test_grads_of_what_the_graph_computes(fn: Callable[[Tensor], Any], backend: str) -> None:
    def shown(x: Any) -> Any:
        return (x.tolist(), shown(x.grad)) if isinstance(x, Tensor) else x

    x = torch.arange(3.0)
    compiled = fusee.compile(fn, backend=backend, fullgraph=fn is in_turn)
    assert list(map(shown, compiled(x))) == list(map(shown, fn(x)))


class Scaled(torch.autograd.Function):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale + 1, None

    def run(self, x: Tensor) -> Tensor:
        return self.apply(x, self.scale)


@BACKENDS
def test_instances_of_autograd_functions(backend: str) -> None:
    """`Function().apply(x)`, as older programs have it."""

    def fn(x: Tensor) -> Tensor:
        for k in range(2):
            x = Scaled(k + 0.5).run(x)
        return x.sin()

    (got, grad), (expected, other) = (
        (y := call(x := torch.ones(2, requires_grad=True)), torch.autograd.grad(y.sum(), x)[0])
        for call in (fusee.compile(fn, backend=backend, fullgraph=True), fn)
    )
    assert torch.equal(got, expected) and torch.equal(grad, other)


@BACKENDS
@pytest.mark.parametrize("op", [torch.add, torch.gt, torch.true_divide, torch.floor_divide])
def test_out_of_another_dtype(op: Callable[..., Tensor], backend: str) -> None:
    """Operators that go element by element cast to it, or refuse; ATen is asked."""
    x, y = torch.tensor([1, 5, -7]), torch.tensor([2, 5, 2])

    def fn(out: Tensor, *given: Tensor) -> Tensor:
        return op(*given, out=out) + 1

    for given in ((x, y), (x * 0.3, y), (x, y * 0.5)):
        for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64):
            expected = made(fn, torch.zeros(3, dtype=dtype), *given)
            whole = isinstance(expected, Tensor)
            compiled = fusee.compile(fn, backend=backend, fullgraph=whole)
            assert str(made(compiled, torch.zeros(3, dtype=dtype), *given)) == str(expected)


def test_integers_of_numpy_divide() -> None:
    """Those that vary are tensors in a graph, in which nothing divides by 0: divisors are facts."""

    def fn(x: Tensor, a: Any, b: Any) -> Any:
        return x * (a // b), a % b, a**b

    compiled, x = fusee.compile(fn, fullgraph=True), torch.ones(2)
    for a, b in ((9, 2), (7, 3), (-7, 2)):
        for given in ((x, a, np.int64(b)), (x, np.int64(a), np.int64(b))):
            assert str(compiled(*given)) == str(fn(*given))


def in_autocast(x: Tensor) -> Any:
    with torch.autocast("cpu"):
        y = x @ x
    return x + y, y.dtype


def by_plain_attention(x: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])


@pytest.mark.parametrize("fn", [in_autocast, by_plain_attention])
@pytest.mark.parametrize("trains", [False, True])
def test_switches_outlast_a_backends_passes(fn: Callable[..., Any], trains: bool) -> None:
    """fx takes calls away that nobody uses, but for what it knows to have effects."""
    lengths = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        lengths.append(len(gm.graph.nodes))
        gm.graph.eliminate_dead_code()
        gm.recompile()
        lengths.append(len(gm.graph.nodes))
        return gm.forward

    x = torch.randn(4, 4, requires_grad=trains)
    assert str(fusee.compile(fn, backend=backend)(x)) == str(fn(x))
    assert lengths[0] == lengths[1] > 4


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: a[b.size(0) - 1] + 1,
        lambda a, b: a[:, b.size(0) // 2] * a[..., a.size(1) - 2].sum(),
        lambda a, b: a[a.size(0) - 1, None, 1:, b.size(0) - 1, ...],
        lambda a, b: a[0, -b.size(0)] + b[-1],
    ],
)
def test_places_that_vary_for_other_backends(fn: Callable[..., Tensor], inner: str) -> None:
    """torch's own symbols became constants where C++ asks for the number of an index."""
    made, compile_inner = [], torch._dynamo.lookup_backend(inner)

    def backend(gm: torch.fx.GraphModule, given: Any) -> Any:
        made.append(gm)
        return compile_inner(gm, given)

    compiled = fusee.compile(fn, backend=backend, fullgraph=True)
    for n in range(3, 9):
        a, b = torch.randn(n, n + 1, n, requires_grad=True), torch.randn(n)
        torch.testing.assert_close(compiled(a, b), fn(a, b))
    assert len(made) == 2


@BACKENDS
@pytest.mark.parametrize("trains", [False, True])
def test_numbers_among_the_operands_of_map_and_loops(trains: bool, backend: str) -> None:
    def mapped(x: Tensor, y: Tensor) -> Any:
        return control_flow.map(lambda x, n, y: torch.sin(x * n + y), x, x.size(0), y)

    def looped(x: Tensor, y: Tensor) -> Any:
        given: Any = torch.tensor(0), x.detach()
        return while_loop_op(
            lambda i, x, n: i < n, lambda i, x, n: (i + 1, x * n + y), given, (3,)
        )[1]

    for fn in (mapped, looped):
        compiled = fusee.compile(fn, backend=backend, fullgraph=True)
        x, y = torch.randn(4, 2, requires_grad=trains), torch.randn(2)
        got, expected = compiled(x, y), fn(x, y)
        torch.testing.assert_close(got, expected)
        if trains and fn is mapped:
            for one in (grads := [torch.autograd.grad(z.sum(), x)[0] for z in (got, expected)]):
                torch.testing.assert_close(one, grads[0])


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (0,)])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: float(x),
        lambda x: [x.item()],
        lambda x: x + 1 if x else x,
        lambda x: [1, 2, 3][x.int()],
        lambda x: range(x.int()),
        lambda x: complex(x),
        lambda x: torch._check(x.shape[0] > 3, lambda: f"{x.shape[0]} are too few"),
        lambda x: torch._check_value(x.dim() > 3) or x,
    ],
)
def test_what_no_value_could_do_raises_in_one_graph_too(
    fn: Callable[[Tensor], Any], shape: tuple[int, ...], fullgraph: bool
) -> None:
    """They ended the graph, which within fullgraph was told in place of eager's error."""
    compiled, x = fusee.compile(fn, backend="eager", fullgraph=fullgraph), torch.ones(shape)
    assert made(compiled, x) == made(fn, x) and isinstance(made(fn, x)[0], type)


def test_whether_make_fx_traces_outside_of_attention() -> None:
    def fn(x: Tensor) -> Any:
        return x + 1, torch.nn.modules.activation._is_make_fx_tracing()

    assert str(fusee.compile(fn, fullgraph=True)(torch.ones(2))) == str(fn(torch.ones(2)))


def test_what_a_program_disables_is_no_news() -> None:
    """disable() notes its backend, which the first call's version saw as a change."""

    def fn(x: Tensor) -> Tensor:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def inner(x: Tensor) -> Tensor:
            return x + 10

        return inner(x.sin()) + 1

    noted: Any = torch._dynamo.eval_frame.cached_backends
    before = dict(noted)
    noted.clear()
    compiled, x = fusee.compile(fn, backend="eager"), torch.ones(2)
    torch.testing.assert_close(compiled(x), fn(x))
    with fusee.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), fn(x))
    noted.update(before)


@BACKENDS
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, a: (x * a + 1) * (a + 2) - a,
        lambda x, a: (a - x) / (np.abs(x) + a * a + 1),
        lambda x, a: np.where(x < a, a, -x),
        lambda x, a: np.clip(np.maximum(x, a), 0, a) >= a,
    ],
)
def test_numbers_beside_arrays_of_floats(fn: Callable[..., Any], backend: str) -> None:
    """Each was a constant of its version: of eight, and then all ran eagerly."""
    for dtype in (np.float64, np.float32):
        x = np.linspace(-2, 3, 7).astype(dtype)
        for numbers in ((0.5, 1.5, 2.25, -3.5, 0.125), (2, 3, 4, -5, 7)):
            compiled = fusee.compile(fn, backend=backend, fullgraph=True)
            for k, number in enumerate(numbers):
                with fusee.compiler.set_stance("fail_on_recompile" if k > 1 else "default"):
                    got, expected = compiled(x, number), fn(x, number)
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(got, expected, rtol=1e-6)


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def of_factories(x: Tensor) -> Any:
    with by_default(torch.float64):
        made = torch.ones(3) + torch.eye(3) + torch.full((3,), 2.5) + torch.rand(3)
        given = torch.tensor([3.0, 3.0 + 5j]), x.new_tensor([1.0])
    return made * x, given, torch.zeros(2)


def of_integers(x: Tensor) -> Any:
    k = torch.arange(3)
    with by_default(torch.float64):
        return x + k / 2, torch.sqrt(k), k * 2.5, k**0.5, k.float().mean(), x * 2.5


def over_a_break(x: Tensor) -> Any:
    with by_default(torch.float64):
        y = torch.ones(3) * x
        print(end="")
        y = y + torch.ones(3)
    return y, torch.ones(3)


def refused(x: Tensor) -> Any:
    try:
        torch.set_default_dtype(torch.int32)
    except TypeError:
        x = x + 1
    return x + torch.ones(3)


@BACKENDS
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("fn", [of_factories, of_integers, over_a_break, refused])
def test_a_default_dtype_of_the_programs(
    fn: Callable[[Tensor], Any], trains: bool, backend: str
) -> None:
    """A switch in the graph; compiled code says each dtype, for it runs under the caller's."""
    x = torch.arange(3.0, requires_grad=trains)
    compiled = fusee.compile(fn, backend=backend, fullgraph=fn is not over_a_break)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        for _ in range(2):
            torch.manual_seed(0)
            got = compiled(x)
            torch.manual_seed(0)
            torch.testing.assert_close(got, fn(x))
            assert torch.get_default_dtype() is torch.float32


@BACKENDS
def test_a_default_dtype_that_stays(backend: str) -> None:
    def fn(x: Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        return x.sin() * torch.ones(3)

    try:
        got = fusee.compile(fn, backend=backend)(torch.arange(3.0))
        assert torch.get_default_dtype() is torch.float64
        assert got.dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def with_lists(x: Tensor, t: Any) -> Any:
    written = [x + 1, x.sin()]
    torch._foreach_lerp_(written, (x * 2, x), 1 - t)
    return written, torch._foreach_lerp([x, x], [x * 2, x], t), torch._foreach_pow(t, [x, x + 1])


def with_fills(x: Tensor, t: Any) -> Any:
    made = torch.full((2,), t), torch.full_like(x, t), x.new_full((2, 1), t + 1)
    whole = torch.full((), t.int()), torch.full((2,), t, dtype=t.dtype)
    return made, whole, torch.full((2,), t > 1)


@BACKENDS
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("fn", [with_lists, with_fills])
def test_tensors_where_numbers_are_taken(
    fn: Callable[..., Any], trains: bool, backend: str
) -> None:
    """torch reads them; the graph has a form that takes tensors."""
    compiled = fusee.compile(fn, backend=backend, fullgraph=True)
    x = torch.arange(4.0, requires_grad=trains)
    for number in (0.5, 2.5, -1.0):
        given = x, torch.tensor(number)
        torch.testing.assert_close(compiled(*given), fn(*given))


def test_a_number_with_gradients_is_refused() -> None:
    compiled = fusee.compile(lambda x, t: torch.full((2,), t) + x, backend="eager")
    with pytest.raises(TypeError, match="must be Number"):
        compiled(torch.ones(2), torch.nn.Parameter(torch.ones(())))


def on_any_device(x: Tensor) -> Tensor:
    if torch.backends.mps.is_available() or torch.mps.is_available():
        return x + 1
    if torch.mtia.is_available() or torch.xpu.is_available() or torch.accelerator.is_available():
        return x + 2
    return torch.jit._unwrap_optional(x).sin()  # type: ignore[attr-defined]


@BACKENDS
def test_which_devices_there_are(backend: str) -> None:
    torch.backends.mps.is_available.cache_clear()
    x = torch.arange(3.0)
    got = fusee.compile(on_any_device, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, on_any_device(x))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: Tensor, x: Tensor) -> Tensor:
        ctx.count = count
        return x.sin() * x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.count.mul_(2)
        return None, grad + ctx.count


class Copying(Doubling):
    @staticmethod
    def forward(ctx: Any, count: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return x.sin() * x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.add(grad, 1, out=ctx.saved_tensors[0])
        return None, grad * 2


class Scratch(Doubling):
    @staticmethod
    def forward(ctx: Any, count: Tensor, x: Tensor) -> Tensor:
        ctx.made = count + 1
        return x.sin() * x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.made.mul_(grad)
        return None, grad.clone().add_(ctx.made)


@BACKENDS
@pytest.mark.parametrize("kind", [Doubling, Copying, Scratch])
def test_backwards_that_write_to_tensors_from_outside(kind: Any, backend: str) -> None:
    """The graph has run by then: what the backward wrote was lost. It may write to its own."""

    def fn(count: Tensor, x: Tensor) -> Tensor:
        return kind.apply(count, x.cos() * x).sin() * 2

    found = []
    for call in (fusee.compile(fn, backend=backend, fullgraph=kind is Scratch), fn):
        count, x = torch.ones(4), torch.linspace(0, 1, 4).requires_grad_()
        for _ in range(2):
            call(count, x).sum().backward()
        found.append((count, x.grad))
    torch.testing.assert_close(*found)


@pytest.mark.skipif(
    "fast_path_blocked_by_tracing" not in torch.nn.MultiheadAttention.forward.__code__.co_varnames,
    reason="torch lays it out otherwise when it is traced",
)
@BACKENDS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trains", [False, True])
def test_attention_is_laid_out_as_by_its_fast_path(trains: bool, bias: bool, backend: str) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True, bias=bias).eval()
    compiled = fusee.compile(lambda x: attention(x, x, x)[0], backend=backend, fullgraph=True)
    x = torch.randn(2, 3, 8)
    with torch.set_grad_enabled(trains):
        for is_on in (True, False):
            torch.backends.mha.set_fastpath_enabled(is_on)
            try:
                got, expected = compiled(x), attention(x, x, x)[0]
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()
