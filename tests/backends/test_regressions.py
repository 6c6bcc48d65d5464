"""Small programs that once went wrong, each for a cause of its own."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusee
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced
from tests.check import check


def test_kernel_of_which_nothing_is_used() -> None:
    check(lambda x: torch.diff(x, 6), torch.randn(3, 3, 3), capture="fx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_one_element_beside_what_is_padded(dtype: torch.dtype) -> None:
    """All lanes read one element, of which each has a mask of its own."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.expand(7, 100), (3, 5)) * 2

    check(padded, torch.randn(7, 1).gt(0).to(dtype), capture="fx")


def test_integer_range_truncates_before_it_steps() -> None:
    def ranges(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(2.1, -2.9, -1.0, dtype=torch.int64)

    check(ranges, torch.ones(4, dtype=torch.int64), capture="fx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_linspace_rounds_as_eager_does(dtype: torch.dtype) -> None:
    def spaces(x: torch.Tensor) -> list[torch.Tensor]:
        ends = torch.tensor(4.3), torch.tensor(-3)
        return [torch.linspace(4.3, -3, 50, dtype=dtype), torch.linspace(*ends, 50, dtype=dtype)]

    check(spaces, torch.ones(1), capture="fx", oracle=False)


def test_a_scan_over_rows_that_are_shorter_than_vectors() -> None:
    """Its loops carry as many lanes as a row has."""

    def scan(x: torch.Tensor) -> torch.Tensor:
        return x[:, :4].reshape(-1).sin().cumsum(0) * x[:, :3].t().reshape(-1).cumprod(0).sum()

    check(scan, torch.rand(3, 5), capture="fx")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_a_jump_depends_on_are_rounded_as_eager_does(dtype: torch.dtype) -> None:
    def rests(x: torch.Tensor) -> list[torch.Tensor]:
        number = torch.tensor(0.1)
        rests = [torch.remainder(x, 0.7), torch.remainder(0.7, x), torch.fmod(x, number)]
        return [*rests, torch.floor_divide(x, 0.7)]

    x = torch.randn(1000).to(dtype)
    for got, want in zip(fusee.compile(rests, options={"prices": False})(x), rests(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("error::fusee.errors.FuseeWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.geqrf(x * 2)[1].sin(),
        lambda x: torch.histogram(x.sin(), 3).hist + 1,
        lambda x: torch.histogramdd(x, [2, 3, 2]).hist.cos(),
        lambda x: torch.binomial((x * 9).round(), x).sqrt(),
        lambda x: x.sin().repeat_interleave((x[0] > 0).long(), 0, output_size=3) + 1,
        lambda x: torch.unravel_index((x * 9).long(), (4, 4))[1] + 1,  # makes data, on x's device
    ],
)
def test_an_operator_that_metas_do_not_know_costs_no_graph(call: Callable[..., Any]) -> None:
    check(call, torch.rand(3, 3), capture="fx")


def test_geometry_changed_in_place_after_a_write() -> None:
    def squeezed(x: torch.Tensor) -> torch.Tensor:
        y = x.gather(0, torch.zeros(1, dtype=torch.int64))
        y.mul_(2)
        return y.squeeze_(0) + y

    check(squeezed, torch.randn(3), capture="fx")
    check(torch.quantile, torch.tensor(-4.3), 0.5, capture="fx")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_statistics(dtype: torch.dtype, training: bool) -> None:
    def norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_batch_norm(x, None, None, mean, var, training, 0.1, 1e-5)

    mean, var = torch.rand(3, dtype=dtype), torch.rand(3, dtype=dtype)
    check(norm, torch.randn(4, 3).to(dtype), mean, var, capture="fx")


def test_every_spelling_of_a_view_shares_memory() -> None:
    def views(x: torch.Tensor) -> list[torch.Tensor]:
        split = [*x.hsplit(2), *x.tensor_split(3), *x.split([1, 3])]
        return [x.T, x.ravel(), x.view_as(x), x.narrow(0, 1, 2), x.unflatten(0, (2, 2)), *split]

    check(views, torch.randn(4, 4), capture="fx")


def test_calls_get_the_layout_that_the_program_made_for_them() -> None:
    def bags(table: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3])
        return torch.nn.functional.embedding_bag(
            index, table, offsets, mode="sum", per_sample_weights=weights
        )

    index = torch.randint(10, (10,))[1::2]
    check(bags, torch.randn(10, 5), index, torch.randn(5), capture="fx")


def test_singular_values_by_the_same_algorithm_and_layout() -> None:
    check(torch.linalg.svdvals, torch.randn(5, 5), capture="fx")
    check(lambda x: torch.linalg.svd(x, full_matrices=False), torch.randn(3, 2), capture="fx")


def test_empty_tensors_with_strides() -> None:
    x = torch.empty(7).as_strided((0, 0), (2, 2), 1)
    check(lambda x: (x + 1, torch.linalg.cholesky(x)), x, capture="fx")


def test_random_numbers_into_memory_with_gaps() -> None:
    with pytest.warns(FuseeWarning, match="lie apart"):
        check(lambda x: x.normal_(), torch.randn(8, 8)[:, 1::2], capture="fx", oracle=False)
    check(lambda x: x.normal_(), torch.randn(8, 8).t(), capture="fx", oracle=False)


def test_as_strided_outside_of_the_elements_seen() -> None:
    def scatter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, y, (2,), (1,), 0)

    with pytest.warns(FuseeWarning, match="larger storage"):
        check(scatter, torch.randn(8)[3::2], torch.randn(2), capture="fx")
    with pytest.warns(FuseeWarning, match="beyond"):
        check(lambda x: x.as_strided((5,), (1,), 0) + 1, torch.randn(8)[:3], capture="fx")
    check(scatter, torch.randn(4), torch.randn(2), capture="fx")


def test_running_statistics_that_the_program_computed() -> None:
    def norm(x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, ...]:
        running, var = mean * 2, torch.ones(3)
        y = torch.nn.functional.batch_norm(x, running, var, training=True)
        return y, running, var

    check(norm, torch.randn(4, 3), torch.randn(6)[::2], capture="fx")
    state = torch.randn(6)[1::2], torch.rand(6)[1::2]
    check(
        lambda x, m, v: torch.nn.functional.batch_norm(x, m, v, training=True),
        torch.randn(4, 3),
        *state,
        capture="fx",
    )


def test_gather_of_nothing_takes_an_index_of_another_rank() -> None:
    check(torch.gather, torch.randn(5), 0, torch.empty(2, 0, dtype=torch.int64), capture="fx")


def test_unpooling_keeps_channels_last() -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    pooled, index = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    check(lambda x, i: torch.nn.functional.max_unpool2d(x, i, 2), pooled, index, capture="fx")  # type: ignore[arg-type]


def test_places_of_a_fixed_number_are_row_major() -> None:
    check(lambda x: torch.nonzero_static(x, size=3), torch.randn(5, 5), capture="fx")


def test_fake_quantization_of_a_whole_tensor() -> None:
    x = torch.randn(3, 4).t()
    scale, zero = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255), x, capture="fx")
    check(
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, 0, 255),
        *(x, scale, zero),
        capture="fx",
    )
    traced = Traced(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255).sin())
    grads: list[Any] = []
    for fn in (traced, traced.compiled.function):
        leaf = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        fn(leaf).sum().backward()
        grads.append(leaf.grad)
    assert not traced.stops and torch.equal(*grads)


def test_an_axis_that_runs_backwards_is_not_split() -> None:
    check(lambda x: (x * 2).roll(1, 0).flip(0), torch.randn(4, 4), capture="fx")
    check(lambda x: x.roll(3, 1).flip(1).reshape(6, 4), torch.randn(3, 8), capture="fx")


# What counts an offset from the beginning of a memory, and not from that of its tensor.
OFFSETS: dict[str, Callable[..., Any]] = {
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 1) * 2,
    "of a view": lambda x: x[2:].detach().as_strided((2, 2), (1, 2), 1) * 2,
    "scatter": lambda x: torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 1) * 2,
    "write": lambda x: x.as_strided((2,), (1,), 0).add_(1) * 2,
    "storage_offset": lambda x: x * 2 + x.storage_offset(),
    "of a result": lambda x: (x + 1).as_strided((2, 2), (1, 2), 1) * 2,
    "no offset": lambda x: x.as_strided((2, 2), (1, 2)) * 2,
}


@pytest.mark.filterwarnings("ignore:a call of ")
@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("way", ["fusee", "stock", "openvino"])
def test_offsets_into_the_memory_of_an_input(name: str, way: str) -> None:
    """The same function, called with an input that begins its memory and with one that does not."""
    if way == "openvino":
        pytest.importorskip("openvino")
    torch._dynamo.reset()
    fn = OFFSETS[name]
    fast = torch.compile(fn, backend="fusee") if way == "stock" else fusee.compile(fn, backend=way)
    with torch.no_grad():
        for begin in (0, 3, 0, 1):
            memories = [torch.arange(12.0) for _ in range(2)]
            want, got = (run(m[begin : begin + 9]) for run, m in zip((fn, fast), memories))
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            torch.testing.assert_close(memories[1], memories[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:a call of ")
def test_offsets_into_the_memory_of_an_input_that_needs_gradients() -> None:
    weight, fn = torch.randn(12, requires_grad=True), OFFSETS["as_strided"]
    for begin in (0, 3):
        want, got = (run(weight[begin : begin + 9]) for run in (fn, fusee.compile(fn)))
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (got, want)]
        torch.testing.assert_close(*grads)


# Under stock torch.compile a number that changes is a symbolic integer beside fixed sizes.
NUMBERS: dict[str, Callable[..., Any]] = {
    "added": lambda x, n: x * 2 + n,
    "compared": lambda x, n: torch.where(x > n, x, x * n),
    "divided": lambda x, n: x / n + x // n,
    "a size": lambda x, n: x.sum() * torch.ones(n, 2) + n,
    "a place": lambda x, n: x[n:].exp() - x[n],
    "a fold": lambda x, n: x.reshape(-1, 2) * n + torch.arange(n).sum(),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("backend", ["fusee", "fusee_openvino"])
def test_numbers_that_change_beside_fixed_sizes(name: str, backend: str) -> None:
    if backend == "fusee_openvino":
        pytest.importorskip("openvino")
    torch._dynamo.reset()
    fn = NUMBERS[name]
    fast = torch.compile(fn, backend=backend)
    with torch.no_grad():
        for n in (3, 5, 7, 2):
            x = torch.randn(12)
            torch.testing.assert_close(fast(x, n), fn(x, n))


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[:, (0, 1), (1, 2)], lambda x: x[:, range(2)], lambda x: x[:, ((0, 1), (1, 0))],
    ],
)  # fmt: skip
def test_rows_of_places(fn: Callable[..., Any], with_grad: bool) -> None:
    check(fn, torch.randn(2, 3, 3, requires_grad=with_grad))


@pytest.mark.parametrize("backend", ["eager", "fusee"])
def test_new_takes_a_size_for_a_size(backend: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        rows = x.new([1, 2, 3]) + x, x.new((1, 2, 3)) + x, x.new(x) + 1
        return *rows, x.new(x.size()).fill_(1), x.new(2, 3).fill_(2), x.new(torch.Size([3])).zero_()

    x = torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fusee.compile(fn, backend=backend)(x), fn(x))


def test_a_formula_in_python_within_transforms() -> None:
    def step(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        grad = torch.func.grad(lambda w: torch.nn.functional.mse_loss(x @ w, y))(w)
        return torch.nn.functional.mse_loss(x @ (w - 0.1 * grad), y)

    def fn(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(step, (None, 0, 0))(w, x, y).mean()

    for with_grad in (False, True):
        w = torch.randn(4, 2, requires_grad=with_grad)
        check(fn, w, torch.randn(3, 5, 4), torch.randn(3, 5, 2))


def test_gradients_that_begin_within_a_graph() -> None:
    def inner(w: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            return torch.autograd.grad(w.sin().sum(), w)[0]

    w = torch.randn(3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.compile(inner, backend="fusee")(w), w.cos())


@pytest.mark.parametrize("with_grad", [False, True])
def test_calls_get_repeated_rows_with_the_last_axis_dense(with_grad: bool) -> None:
    """One head of keys and values for all heads of queries."""

    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = (k * 2).expand(2, 4, 5, 8)
        return torch.nn.functional.scaled_dot_product_attention(q, k, k)

    q, k = (torch.randn(2, n, 5, 8, requires_grad=with_grad) for n in (4, 1))
    check(attention, q, k, capture="fx")


# ------------------------------------------------------------------- under stock torch.compile


def test_a_stride_that_tracing_finds_a_value_for() -> None:
    """The backward takes a saved input by its stride, which is a symbol that no size shows."""
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(1), x.mean((2, 3), keepdim=True), x.amax(0), x.std(1)]

    fast = torch.compile(fn, backend="fusee")
    for order in ((0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 0, 1)):
        size = [0] * 4
        for axis, n in zip(order, (2, 4, 6, 6)):
            size[axis] = n
        x = torch.randn(*size).permute(order).requires_grad_()
        want, got = (torch.autograd.grad([y.sum() for y in run(x)], x)[0] for run in (fn, fast))
        torch.testing.assert_close(got, want)


def test_a_compiled_module_is_pickled() -> None:
    model, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    again = pickle.loads(pickle.dumps(torch.compile(model, backend="fusee")))
    torch.testing.assert_close(again(x), model(x))


def test_numbers_that_are_kept_in_tensors() -> None:
    """What logging does with the time, which torch computes again in other digits."""

    def fn(x: torch.Tensor, t: float) -> Any:
        part = (t - int(t)) * 1000
        return x * 2, int(part) + 0.0, (t - 1795919944.59) * 1000, round(t, 2), t * 2

    torch._dynamo.reset()
    x, fast = torch.ones(2), torch.compile(fn, backend="fusee")
    for k in range(4):
        t = 1795919947.73887 + k * 0.7123456
        torch.testing.assert_close(fast(x, t), fn(x, t), rtol=0, atol=0)


def test_a_number_kept_in_a_tensor_has_one_version() -> None:
    counted = []

    def counting(gm: Any, inputs: Any) -> Any:
        counted.append(gm)
        return torch._dynamo.lookup_backend("fusee")(gm, inputs)

    torch._dynamo.reset()
    x, fast = torch.ones(2), torch.compile(lambda x, t: (x + 1, t * 1.1), backend=counting)
    for k in range(5):
        torch.testing.assert_close(fast(x, 2.3 + k)[1], (2.3 + k) * 1.1, rtol=0, atol=0)
    assert len(counted) == 2  # the second takes any number


def test_comparisons_of_numbers_are_pythons() -> None:
    def fn(x: torch.Tensor, n: int, t: float) -> Any:
        torch._check(n != 3)
        scaled = x * t * float(t > 1) + float(n > 5)
        return scaled, t > 1, t == t, n > 5, n != 7, x.shape[0] >= 4

    torch._dynamo.reset()
    fast = torch.compile(fn, backend="fusee")
    for n, t in ((1, 1.0), (4, 2.5), (5, 0.5), (6, math.inf), (7, math.nan), (8, 3.0)):
        want, got = (run(torch.ones(n), n, t) for run in (fn, fast))
        assert [*map(type, got)] == [*map(type, want)] and got[1:] == want[1:]
        torch.testing.assert_close(got[0], want[0], equal_nan=True)


def _moved_average(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> Any:
    with torch.no_grad():
        q.data = q.data * 0.5 + p.data * 0.25
        target = x @ q
    p.data -= 0.5 * x.mean()
    return (x @ p - target).square().sum()


def _lent_and_given_back(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> Any:
    own = p.data
    p.data = r
    with torch.no_grad():
        y = x @ p
    p.data = own
    return y, own, (x @ p).sum()


def _shared(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> Any:
    before = r.view(-1)
    r.data = q.data
    r.mul_(2)
    q.data = x.t() @ x
    return before + 1, r + 1, r.view(-1), (x @ p + q.detach()[0]).sum()


def _learned_after_it(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> Any:
    p.data = p.data + 1
    return (x @ p).sum()


@pytest.mark.parametrize(
    "program", [_moved_average, _lent_and_given_back, _shared, _learned_after_it]
)
def test_data_of_inputs_is_replaced(program: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    told, values = list[Any](), list[Any]()
    for run in (program, torch.compile(program, backend="fusee", fullgraph=True)):
        torch.manual_seed(0)
        p, q, r = torch.randn(4, 4).requires_grad_(), torch.randn(4, 4), torch.randn(4, 4)
        for n in (3, 3, 5):
            before = [x.data_ptr() for x in (p, q, r)]
            with warnings.catch_warnings():
                warnings.simplefilter("error", FuseeWarning)
                found = run(torch.linspace(-1, 1, 4 * n).view(n, 4), p, q, r)
            given = found if isinstance(found, tuple) else (found,)
            given[-1].backward()
            values.append([x.detach().clone() for x in (*given, p, q, r) if x is not None])
            own = before + [x.data_ptr() for x in (p, q, r)]
            shared = [[x.data_ptr() == at for at in own] for x in (p, q, r, *given)]
            told.append((shared, [x._version for x in (p, q, r)], p.grad is None))
    torch.testing.assert_close(values[:3], values[3:])
    assert told[:3] == told[3:]


def test_an_average_of_weights_that_is_used_at_once() -> None:
    """TorchDynamo watches parameters by finalizers, which are no reason to run eagerly."""

    def trained(compiles: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model, average = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @compiles
        def step(x: torch.Tensor) -> torch.Tensor:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for a, b in zip(average.parameters(), model.parameters()):
                a.data = a.data * 0.9 + b.data * 0.1
            return average(x)

        made = [step(torch.ones(2, 4) * k) for k in range(3)]
        return [*made, *average.parameters(), *model.parameters()]

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        found = trained(torch.compile(backend="fusee"))
    torch.testing.assert_close(found, trained(lambda f: f))


@pytest.mark.parametrize(
    "call",
    [torch.nn.functional.leaky_relu, torch.nn.functional.elu, torch.fill, torch.clamp, torch.mul],
)
def test_floats_that_sympy_orders_anew(call: Callable[..., Any]) -> None:
    """A guard computes `0.9 * v + 0.1 * x` in another order, and rounds otherwise."""

    def step(x: torch.Tensor, v: float, now: float, beta: float, n: int) -> torch.Tensor:
        return call(x, (beta * v + (1 - beta) * now) / (1 - beta**n))

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="fusee", dynamic=True)
    for n in range(1, 5):
        given = torch.arange(-2.0, 3.0), 0.3 * n, 1.3 + 0.37 * n, 0.9, n
        torch.testing.assert_close(compiled(*given), step(*given))
