"""What eager refuses for its values a compiled function refuses: the same exception, in time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fusee
from fusee.fake import may_raise, name_may_raise, torch_python
from tests.check import copy_tree
from tests.counting import Counting

Fn = Callable[..., Any]

ZEROS, NAN = torch.zeros(3, 3), torch.full((3, 3), float("nan"))
NINE, NEGATIVE, LABEL = tensor([9]), tensor([-9]), tensor([[9]])
NONE = torch.empty(0, 4)
ZERO = tensor([2, 0, 3])

# Programs, each with what it must not be given.
FACTORS: list[tuple[Fn, Tensor]] = [
    (lambda x: torch.linalg.inv(x) + 1, ZEROS),
    (lambda x: torch.inverse(x), ZEROS),
    (lambda x: torch.linalg.cholesky(x), -torch.eye(3)),
    (lambda x: torch.linalg.solve(x, x), ZEROS),
    (lambda x: torch.linalg.lu_factor(x)[0], ZEROS),
    (lambda x: torch.linalg.inv_ex(x, check_errors=True)[0], ZEROS),
    (lambda x: torch.linalg.ldl_factor(x)[0], ZEROS),
    (lambda x: torch.linalg.eigh(x)[0], NAN),
    (lambda x: torch.linalg.svdvals(x), NAN),
]
NOTHING: list[tuple[Fn, Tensor]] = [
    (lambda x: x.max(), NONE),
    (lambda x: x.min() + 1, NONE),
    (lambda x: x.argmax(), NONE),
    (lambda x: x.amax(), NONE),
    (lambda x: x.amin(0), NONE),
    (lambda x: x.max(0)[0], NONE),
    (lambda x: x.min(dim=0).indices, NONE),
    (lambda x: x.aminmax(), NONE),
    (lambda x: torch.linalg.vector_norm(x, float("inf")), NONE),
    (lambda x: x.mode(0)[0], NONE),
]
PLACES: list[tuple[Fn, Tensor]] = [
    (lambda i: torch.ones(4)[i], NINE),
    (lambda i: torch.arange(4)[i] * 2, NEGATIVE),
    (lambda i: torch.zeros(4).take(i), NINE),
    (lambda i: F.embedding(i, torch.ones(4, 2)), NINE),
    (lambda i: torch.ones(4).gather(0, i), NINE),
    (lambda i: torch.ones(4).index_select(0, i), NEGATIVE),
    (lambda i: torch.zeros(4).scatter(0, i, 1.0), NINE),
    (lambda i: torch.zeros(4).scatter_reduce(0, i, torch.ones(1), "sum"), NINE),
    (lambda i: torch.zeros(4).index_put((i,), torch.ones(1)), NEGATIVE),
    (lambda i: torch.zeros(4).index_add(0, i, torch.ones(1)), NEGATIVE),
    (lambda i: torch.zeros(4).index_copy(0, i, torch.ones(1)), NINE),
    (lambda i: torch.zeros(4).index_fill(0, i, 1.0), NINE),
    (lambda i: torch.zeros(4).put(i, torch.ones(1)), NINE),
    (lambda i: torch.zeros(4, 0).index_select(0, i), NINE),  # a result without elements
    (lambda i: torch.ones(4)[i[:, None]][:, :0], NINE),
    (lambda i: torch.ones(4, 2).index_copy(0, i, torch.ones(1, 2))[:0], NINE),
    (lambda i: F.one_hot(i, 3), NINE),
    (lambda i: F.cross_entropy(torch.ones(1, 3), i), NINE),
    (lambda i: F.cross_entropy(torch.ones(1, 3, 1), i), LABEL),
    (lambda i: F.nll_loss(torch.ones(1, 3), i, reduction="none"), NINE),
    (lambda i: F.multi_margin_loss(torch.ones(1, 3), i), NINE),
    (lambda i: F.embedding_bag(i, torch.ones(4, 2)), LABEL),
]
VALUES: list[tuple[Fn, Tensor]] = [
    (lambda x: x**-1, ZERO),
    (lambda x: x // 0, ZERO),
    (lambda x: 6 // x, ZERO),
    (lambda x: torch.remainder(x, x), ZERO),
    (lambda x: torch.fmod(x, x), ZERO),
    (lambda x: torch.div(x, x, rounding_mode="trunc"), ZERO),
    (lambda x: F.binary_cross_entropy(x, x), tensor([1.5])),
    (lambda x: F.binary_cross_entropy(x, x, x, reduction="none"), tensor([float("nan")])),
    (lambda x: F.binary_cross_entropy(x.sigmoid(), x), tensor([1.5])),
    (lambda x: F.binary_cross_entropy(x.sigmoid(), x, reduction="sum"), tensor([-0.5])),
    (lambda x: torch.bernoulli(x), tensor([2.0])),
    (lambda x: torch.multinomial(x, 1), tensor([-1.0, 2.0])),
    (lambda x: torch.normal(0.0, x), tensor([-1.0])),
    (lambda x: torch.poisson(x), tensor([-1.0])),
    (lambda x: (torch._assert_async((x > 0).all()), x + 1)[1], tensor([-1.0])),
    (lambda x: torch.zeros(3).masked_scatter(x > 0, x[:1]), tensor([1.0, 2.0, 3.0])),
    (lambda x: x.histc(4), tensor([float("nan")])),
]
# Only a part of what is refused is used.
PARTS: list[tuple[Fn, Tensor]] = [
    (lambda i: torch.ones(4)[i][:1], tensor([1, 9])),
    (lambda i: torch.rand(4, 2)[i][0].sum(), tensor([1, 9])),
    (lambda i: F.embedding(i, torch.rand(4, 2))[:, :1][1:], tensor([9, 1])),
    (lambda i: (torch.zeros(4).gather(0, i), i + 1)[1], tensor([1, 9])),
    (lambda i: (torch.zeros(4).index_add(0, i, i.float()), i + 1)[1], tensor([9, 1])),
    (lambda i: torch.where(i > 0, i, torch.arange(4)[i]), tensor([1, 9])),
    (lambda i: torch.ones_like(torch.arange(4)[i]), tensor([1, 9])),
    (lambda i: F.pad(torch.arange(4)[i], (-1, 2)), tensor([9, 1])),
    (lambda x: (6 // x)[:1], ZERO),
    (lambda x: (x % ZERO, x + 1)[1], ZERO),
    (lambda x: (torch.linalg.inv(x), x + 1)[1], ZEROS),
    (lambda x: (F.binary_cross_entropy(x, x), x + 1)[1], tensor([1.5])),
    (lambda x: (F.binary_cross_entropy(x.sigmoid(), x), x + 1)[1], tensor([1.5])),
    (lambda x: (x.max(), x + 1)[1], NONE),
    (lambda x: (x**-1, x + 1)[1], ZERO),
    (lambda x: (torch.matrix_power(x, -1), x + 1)[1], ZEROS),
    (lambda x: (x[[9, 0]], x + 1)[1], ZEROS),
    (lambda x: (x[0, [3]], x + 1)[1], ZEROS),
    (lambda x: (x.softmax(2), x + 1)[1], ZEROS),
    (lambda x: (x.cumsum(-3), x + 1)[1], ZEROS),
    (lambda x: (torch.cat([x, x], 2), x + 1)[1], ZEROS),
    (lambda x: (F.conv1d(x, torch.ones(1, 3, 4)), x + 1)[1], ZEROS),
    (lambda x: (F.conv1d(x, torch.ones(1, 3, 2), stride=0), x + 1)[1], ZEROS),
    (lambda x: (F.conv1d(x, torch.ones(1, 3, 2), padding=-1), x + 1)[1], ZEROS),
    (lambda x: (F.layer_norm(x, [3], x[0].double(), x[0].double()), x + 1)[1], ZEROS),
    (lambda x: (F.group_norm(x.double(), 3, x[0], x[0]), x + 1)[1], ZEROS),
    (lambda x: (F.batch_norm(x, x[0].double(), x[0].double()), x + 1)[1], ZEROS),
    (lambda x: (torch.linalg.cross(x, x.double()), x + 1)[1], ZEROS),
    (lambda x: (torch.cdist(x, x.double()), x.long().softmax(0), x + 1)[2], ZEROS),
    (lambda x: (x.long().std(), x + 1)[1], ZEROS),
    (lambda x: (torch.clamp(x.double(), min=1, out=x.clone()), x + 1)[1], ZEROS),
    (lambda x: (torch.bitwise_or(x, 1), x + 1)[1], ZEROS),
    (lambda x: (torch.gcd(x, x), x + 1)[1], ZEROS),
    (lambda x: (F.interpolate(x[None].long(), scale_factor=2), x + 1)[1], ZEROS),
    (lambda x: (x[:0].select_scatter(x[0], 0, 0), x + 1)[1], ZEROS),
    (lambda x: (x[:0].slice_scatter(x, 0), x + 1)[1], ZEROS),
    (lambda x: (x[:0].diagonal_scatter(x[0]), x + 1)[1], ZEROS),
]  # fmt: skip
# Arguments that shape functions accept and ATen does not.
ROW, SIX = torch.ones(1), torch.arange(6.0)
ARGUMENTS: list[tuple[Fn, Tensor]] = [
    (lambda x: (x * 2).expand(3).add_(1), ROW),
    (lambda x: x[1:].add_(x[:-1]), SIX),
    (lambda x: torch.take(x, tensor([0, 1]), out=x[:2]), SIX),
    (lambda x: x.index_add(0, tensor([0, 1]), torch.ones(3)), SIX),
    (lambda x: x.mean(dtype=torch.int64), SIX),
    (lambda x: F.softshrink(x, -1.0), SIX),
    (lambda x: F.gelu(x, approximate="often"), SIX),
    (lambda x: F.avg_pool2d(x.reshape(1, 2, 3), 2, divisor_override=0), SIX),
    (lambda x: F.adaptive_avg_pool2d(x[:, :, None, :], 2), torch.ones(1, 2, 0)),
    (lambda x: F.layer_norm(x, []), SIX),
    (lambda x: F.interpolate(x.long()[None, None], scale_factor=2), SIX),
    (lambda x: F.interpolate(x.long().view(1, 1, 2, 3), scale_factor=2), SIX),
]
ALL = [*ARGUMENTS, *FACTORS, *NOTHING, *PLACES, *VALUES, *PARTS]


def outcome(fn: Fn, *args: Any) -> Any:
    try:
        return fn(*copy_tree(args))
    except Exception as error:  # noqa: BLE001  which one is what is asked
        return type(error), str(error).splitlines()[0]


def same(fn: Fn, x: Tensor, backend: str) -> None:
    want = outcome(fn, x)
    assert isinstance(want, tuple), f"eager gives {want}"
    compiled = fusee.compile(fn, backend=backend)
    assert outcome(compiled, x) == want
    assert outcome(compiled, x) == want  # and again, from the compiled call


@pytest.mark.parametrize("backend", ["fusee", "aot_eager"])
@pytest.mark.parametrize("fn, x", ALL, ids=map(str, range(len(ALL))))
def test_the_same_exception(fn: Fn, x: Tensor, backend: str) -> None:
    same(fn, x, backend)


@pytest.mark.parametrize("fn, x", ALL, ids=map(str, range(len(ALL))))
def test_the_programs_own_handler_gets_it(fn: Fn, x: Tensor) -> None:
    def guarded(x: Tensor) -> Any:
        done: list[Any] = [x + 1]
        try:
            done.append(fn(x))
        except (RuntimeError, IndexError) as error:
            done.append(x + 2)
            done.append(type(error))
        return done

    want, got = guarded(x), fusee.compile(guarded)(x)
    assert len(want) == 3 and len(got) == 3 and want[2] is got[2]
    assert torch.equal(want[1].nan_to_num(), got[1].nan_to_num())


STOCK = [*NOTHING[:2], *PLACES[:5], *PLACES[6:13], *VALUES[:8], *PARTS[:11]]


@pytest.mark.parametrize("fn, x", STOCK, ids=map(str, range(len(STOCK))))
def test_the_same_type_through_stock(fn: Fn, x: Tensor) -> None:
    want = outcome(fn, x)
    torch._dynamo.reset()
    got = outcome(torch.compile(fn, backend="fusee"), x)
    assert isinstance(got, tuple) and got[0] is want[0]


TRAINING: list[tuple[Fn, Tensor]] = [
    (lambda w, i: w[i].sum(), NINE),
    (lambda w, i: (w * torch.ones(4)[i]).sum(), NINE),
    (lambda w, i: ((w + 1).gather(0, i), w.sum())[1], NINE),
    (lambda w, i: (torch.linalg.inv(w.detach() * ZEROS[0, 0] + ZEROS), w.sum())[1], NINE),
    (lambda w, i: F.binary_cross_entropy(w + i, w).sum(), NINE),
    (lambda w, i: F.binary_cross_entropy(w.sigmoid(), i.float()).sum(), NINE),
    (lambda w, i: (torch.inverse(w * 0 * ZEROS), w.sum())[1], NINE),
]


@pytest.mark.parametrize("number", range(len(TRAINING)))
@pytest.mark.parametrize("backend", ["fusee", "aot_eager"])
def test_with_gradients_in_the_forward(number: int, backend: str) -> None:
    """The forward raises, whichever half of the graph computes what it is about."""
    fn, i = TRAINING[number]
    w = torch.rand(3 if number in (3, 5) else 4 if number != 1 else 1, requires_grad=True)
    want = outcome(fn, w, i)
    assert isinstance(want, tuple)
    assert outcome(fusee.compile(fn, backend=backend), w, i) == want


@pytest.mark.parametrize("fn, x", ALL, ids=map(str, range(len(ALL))))
def test_beside_what_has_gradients(fn: Fn, x: Tensor) -> None:
    """In a joint trace torch's functions run on tensors that have no data."""

    def beside(x: Tensor, w: Tensor) -> Any:
        return fn(x), w.exp() * 2

    given = x, torch.ones(2, requires_grad=True)
    compiled = fusee.compile(beside, options={"prices": False})
    assert outcome(compiled, *given) == outcome(beside, *given)


@pytest.mark.parametrize("engine", ["openvino", "onnxrt"])
def test_engines_refuse_the_same(engine: str) -> None:
    pytest.importorskip("openvino" if engine == "openvino" else "onnxruntime")
    last = tensor([-1])  # which engines take for the last one
    cases = [*PLACES, *VALUES, *PARTS, *((fn, last) for fn, _ in PLACES)]
    for number, (fn, x) in enumerate(cases):
        want, got = outcome(fn, x), outcome(fusee.compile(fn, backend=engine), x)
        if isinstance(want, tuple):
            assert got == want, number


def test_the_first_of_several_bad_indices_is_told() -> None:
    def program(x: Tensor, i: Tensor) -> Tensor:
        x[i] = 2.0  # so that no other run of it could tell
        return x

    for places in ([1, 5, 7, 9], [1] * 300 + [-9] + [8] * 50):
        i = tensor(places)
        assert outcome(fusee.compile(program), SIX[:4], i) == outcome(program, SIX[:4], i)


def test_the_first_bad_element_of_two_operands_is_told() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        loss = F.binary_cross_entropy(x, y) + x
        x.copy_(y)
        return loss

    for bad, worse in (([0.5, 2.0], [-1.0, 2.0]), ([2.0, 0.5], [-1.0, 2.0]), ([0.5, 1], [1, -1])):
        x, y = tensor(bad), tensor(worse)
        assert outcome(fusee.compile(program), x, y) == outcome(program, x, y)


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("name", ["tolist", "item", "numpy", "__bool__"])
def test_values_of_meta_tensors(name: str) -> None:
    def program(x: Tensor) -> Any:
        return getattr(torch.ones(1, device=x.device) + 1, name)()

    x = torch.ones(1, device="meta")
    assert outcome(fusee.compile(program), x) == outcome(program, x)


def test_inputs_that_share_memory_and_lists_of_operands() -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        try:
            x.add_(y[1])
        except RuntimeError as error:
            return str(error)

    def joins(x: Tensor, y: Tensor) -> Any:
        try:
            torch.cat([y[:2], x[1:3]], out=x)
        except RuntimeError as error:
            return str(error)

    for fn in (program, joins):
        found = [run(x, x[:]) for run in (fn, fusee.compile(fn)) for x in [torch.ones(4)]]
        assert found[0] == found[1] and "single memory location" in found[0]


def _set(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning", "ignore:Use of index_put_")
@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: _set(y, slice(2), 1.0),
        lambda x, y: _set(y, (..., slice(1)), x[0]),
        lambda x, y: _set(y, 0, 1.0),
        lambda x, y: _set(y, y > 2, 1.0),
        lambda x, y: _set(x, slice(1, None), x[:-1]),
        lambda x, y: operator.iadd(y, 1),
        lambda x, y: operator.ipow(y, 2),
        lambda x, y: operator.iadd(x, x),
        lambda x, y: operator.iadd(x[1:], x[:-1]),
    ],
)
def test_a_handler_hears_of_writes_to_shared_elements(write: Fn) -> None:
    def program(x: Tensor) -> Any:
        try:
            write(x, x[:2].expand(3, 2))
        except RuntimeError as error:
            return str(error), x + 1
        return x + 1

    x = torch.arange(4.0)
    assert str(outcome(fusee.compile(program), x)) == str(outcome(program, x))


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize(
    "write",
    [
        lambda x, out: torch.where(x[4] > 0, x[4], x[:4] * 1, out=out),
        lambda x, out: torch.add(x[3:7], 1, out=out),
        lambda x, out: out.copy_(x[3:7]),
        lambda x, out: _set(out, slice(3), x[3:6]),
    ],
)
def test_a_handler_hears_of_outputs_that_a_later_call_shares(write: Fn) -> None:
    def program(x: Tensor, out: Tensor) -> Any:
        try:
            write(x, out)
        except RuntimeError as error:
            return str(error), x + 1
        return x + 1

    compiled = fusee.compile(program)
    for first in (None, 2, None, 4):
        found = []
        for run in (program, compiled):
            x = torch.arange(8.0)
            out = torch.ones(4) if first is None else x[first : first + 4]
            found.append(str((run(x, out), x, out)))
        assert found[0] == found[1]


def test_writes_beside_one_another_stay_in_the_graph() -> None:
    """Two parts of one tensor, or a tensor and itself: no memory is shared, or all of it."""

    def program(x: Tensor) -> Tensor:
        y = x * 2
        y[:3].add_(y[3:])
        return y.mul_(y)

    got = fusee.compile(program, fullgraph=True)(SIX)
    torch.testing.assert_close(got, program(SIX))


def test_right_values_still_pass() -> None:
    """The same programs, with what they may be given: nothing is refused that eager takes."""
    good = [(fn, tensor([1, 3])) for fn, _ in [*PLACES[:5], *PLACES[13:14], *PARTS[:8]]]
    good += [(fn, tensor([1, 2, -3])) for fn, _ in [*VALUES[2:6], *PARTS[8:9]]]
    good += [(fn, torch.rand(3)) for fn, _ in VALUES[6:8]]
    for fn, x in good:
        torch.manual_seed(0)
        want = fn(x)
        torch.manual_seed(0)
        torch.testing.assert_close(fusee.compile(fn)(x), want)


def test_a_check_is_made_once() -> None:
    """Where the result is used whole, its own loop checks; no second pass over the indices."""
    weight, i = torch.rand(8, 4), torch.randint(0, 8, (3, 5))
    programs: list[Fn] = [
        lambda i, w: F.embedding(i, w) * 2,
        lambda i, w: w[i].sum(-1),
        lambda i, w: w.index_select(0, i[0]).t() + 1,
        lambda i, w: w.gather(0, i[:, :4]).exp(),
        lambda i, w: 7 // (i + 1),
    ]
    for fn in programs:
        compiled = fusee.compile(fn)
        compiled(i, weight)
        (report,) = fusee.report(compiled)
        assert len(report.kernels) == 1, str(report)


def test_what_raises_before_many_loops_with_an_end() -> None:
    def digits(k: int) -> list[int]:
        return [k * n % 10 for n in range(200)]

    def program(i: Tensor) -> Tensor:
        y = torch.ones(4)[i]
        return y + sum(sum(digits(k)) for k in range(60))

    count = Counting()
    assert torch.equal(fusee.compile(program, backend=count)(tensor([1])), program(tensor([1])))
    assert len(count.graphs) == 1


def test_what_raises_before_a_loop_without_end() -> None:
    def program(i: Tensor) -> Tensor:
        y = torch.ones(4)[i]
        k = 1
        while k > 0:
            k = max(k, 1)
        return y

    assert outcome(fusee.compile(program), NINE) == outcome(program, NINE)


# What meta kernels take of dtypes and ATen does not.
DTYPES: list[tuple[Fn, Tensor]] = [
    (lambda i: torch.ones(4).index_copy(0, i, torch.ones(4)), torch.arange(4, dtype=torch.int32)),
    (lambda i: torch.ones(4).index_add(0, i, torch.ones(4)), torch.arange(4, dtype=torch.int16)),
    (lambda i: torch.ones(4).index_fill(0, i, 2.0), torch.arange(4, dtype=torch.uint8)),
    (lambda i: torch.ones(4).index_select(0, i), torch.arange(4.0)),
    (lambda i: torch.ones(4).index_put((i,), torch.ones(4)), torch.arange(4.0)),
    (lambda i: torch.ones(4).index_put_((i,), tensor(2.0)), torch.arange(4, dtype=torch.int8)),
    (lambda i: F.embedding(i, torch.ones(4, 2)), torch.arange(4, dtype=torch.int16)),
    (lambda i: F.nll_loss(torch.ones(4, 4), i), torch.arange(4, dtype=torch.int32)),
    (lambda y: torch.ones(4).index_copy(0, torch.arange(4), y), torch.ones(4).double()),
    (lambda y: torch.ones(2, 4).mv(y), torch.ones(4).double()),
    (lambda c: torch.where(c, 1.0, torch.ones(4)), torch.ones(4)),
    (lambda i: i.clone().mul_(2.5), tensor([1, 2])),
    (lambda i: i.clone().sigmoid_(), tensor([1, 2])),
    (lambda i: i - i, tensor([True])),
    (lambda i: F.relu(i), tensor([True])),
    (lambda i: F.gelu(i), tensor([1, 2])),
    (lambda i: i.floor(), tensor([True])),
    (lambda i: i.frac(), tensor([1, 2])),
    (lambda y: torch.sort(y, out=(torch.ones(4), torch.arange(4)))[0] * 2, torch.ones(4).double()),
    (lambda y: torch.softmax(y, 0, out=torch.ones(4)) * 2, torch.ones(4).double()),
    (lambda y: torch.isin(y, y, out=torch.empty(0)), torch.ones(4)),
    (lambda i: F.mse_loss(i, i > 1, reduction="none"), tensor([1, 2])),
    (lambda i: F.smooth_l1_loss(i, i > 1), tensor([1, 2])),
    (lambda i: F.multilabel_soft_margin_loss(i, i * 1.0), tensor([1, 2])),
    (lambda i: F.binary_cross_entropy_with_logits(i * 1.0, i, reduction="none"), tensor([1, 2])),
    (lambda y: F.huber_loss(y.detach().float().requires_grad_(), y).backward(), ZEROS.double()),
    (lambda i: 3 - i, tensor([True])),
    (lambda i: i.argmax(), tensor([True])),
    (lambda i: i.softmax(0), tensor([1, 2])),
    (lambda i: i.var(), tensor([1, 2])),
    (lambda i: F.cross_entropy(i, i[:, 0]), tensor([[1, 2], [3, 4]])),
    (lambda i: F.max_pool1d(i, 2), tensor([[True, False]])),
    (lambda i: F.adaptive_avg_pool1d(i, 1), tensor([[1, 2]])),
]
LOSSES: list[Fn] = [
    lambda x: F.huber_loss(x, x.double()),
    lambda x: F.soft_margin_loss(x, x.double()),
    lambda x: F.multi_margin_loss(x, tensor(2), reduction="none"),
    lambda x: F.multilabel_margin_loss(x, x.long(), reduction="none"),
]


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("number", range(len(DTYPES)))
@pytest.mark.parametrize("is_caught", [False, True])
def test_dtypes_that_aten_refuses(number: int, is_caught: bool) -> None:
    fn, x = DTYPES[number]

    def caught(x: Tensor) -> Any:
        try:
            return fn(x)
        except (RuntimeError, IndexError) as error:
            return str(error)

    run = caught if is_caught else fn
    want = outcome(run, x)
    assert isinstance(want, str if is_caught else tuple)
    assert outcome(fusee.compile(run), x) == want


@pytest.mark.filterwarnings("ignore:.*huber_loss:fusee.errors.FuseeWarning")  # of the backward
@pytest.mark.parametrize("number", range(len(DTYPES)))
def test_dtypes_that_stock_refuses(number: int) -> None:
    fn, x = DTYPES[number]
    torch._dynamo.reset()
    got = outcome(torch.compile(fn, backend="fusee"), x)
    assert isinstance(got, tuple)
    assert got[0] in (outcome(fn, x)[0], torch._dynamo.exc.TorchRuntimeError)


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_what_aten_makes_of_them(loss: Fn) -> None:
    """Where torch's formulas for tensors without data have another dtype, or an axis more."""
    x = tensor([0.5, -1, 2])
    torch.testing.assert_close(fusee.compile(loss, options={"prices": False})(x), loss(x))


# Numbers that elements of the dtype cannot be; those that nobody uses, too.
FILLS: list[Callable[..., Any]] = [
    lambda x, k: x.clamp(max=k),
    lambda x, k: F.pad(x, (1, 1), value=k),
    lambda x, k: torch.where(x > 0, x, k),
    lambda x, k: x.masked_fill(x > 0, k),
    lambda x, k: torch.full_like(x, k),
    lambda x, k: F.hardtanh(x, 0, k),
    lambda x, k: x + torch.scalar_tensor(k, dtype=x.dtype),
    lambda x, k: (torch.full((4,), k * 2, dtype=x.dtype), x)[1],
]


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("fn", FILLS)
def test_numbers_beyond_a_dtype(fn: Callable[..., Any], dynamic: bool | None) -> None:
    for dtype in (torch.float32, torch.float16, torch.int8, torch.uint8):
        x = tensor([1, 0, 2]).to(dtype)
        compiled = fusee.compile(fn, backend="eager", dynamic=dynamic)
        for k in (1.5, 2.5, 70000.0, 1e60, float("inf"), -1.5, 3, 300, -3, 2**40):
            want, found = (outcome(functools.partial(run, k=k), x) for run in (fn, compiled))
            assert str(found) == str(want)


def test_what_the_table_says() -> None:
    aten = torch.ops.aten
    for op in (aten.index.Tensor, aten.index_put.default, aten.gather.default, aten.take.default):
        assert may_raise(op)
    for op in (aten._linalg_check_errors.default, aten._assert_async.msg):
        assert may_raise(op)
    for op in (
        aten.add.Tensor,
        aten.mm.default,
        aten.view.default,
        aten.linalg_vector_norm.default,
    ):
        assert not may_raise(op)
    assert all(map(name_may_raise, ("index_add_", "one_hot", "linalg_inv", "embedding", "take")))
    assert not any(map(name_may_raise, ("add", "matmul", "reshape", "softmax", "my_function")))


@pytest.mark.parametrize("number", [2, 2.0, True])
def test_a_scalar_tensor_has_the_default_dtype(number: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.scalar_tensor(number) * x

    x = torch.arange(3)
    assert torch.equal(fusee.compile(fn)(x), fn(x)) and fusee.compile(fn)(x).dtype == fn(x).dtype


def test_a_generator_exit_that_no_generator_takes() -> None:
    """What a `finally` on its way did was lost."""

    def inner(x: Tensor) -> None:
        x.mul_(2)
        raise GeneratorExit("done")

    def steps(x: Tensor) -> Generator[Tensor, None, None]:
        try:
            yield x * 2
        finally:
            x.sub_(3)

    def raised(x: Tensor) -> None:
        try:
            inner(x)
        finally:
            x.add_(1)

    def thrown(x: Tensor) -> None:
        running = steps(x)
        next(running)
        running.throw(GeneratorExit("done"))

    for fn in (raised, thrown):
        compiled = fusee.compile(fn)
        x, y = torch.ones(2), torch.ones(2)
        for _ in range(3):
            with pytest.raises(GeneratorExit, match="done" if fn is raised else None):
                fn(x)
            with pytest.raises(GeneratorExit):
                compiled(y)
            assert x.equal(y)


def test_what_is_known_of_dtypes_does_not_hang_on_whose_sizes_are_open() -> None:
    """It is a key: torch's open numbers and ours are never compared."""
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    with FakeTensorMode(shape_env=env):
        x = torch.empty(size, 3)
    assert torch_python._kind([x, size])[0] == (torch.float32, 2, False)
    assert torch_python._kind([NONE])[0] == (torch.float32, 2, True)


def test_what_must_not_be_compiled_runs_where_nobody_says_that_it_is() -> None:
    """A call that raises is captured anew as eager would run it; there this is allowed."""

    def program(x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = torch.zeros_like(x)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(y)
        if fails:
            raise ValueError("too far")
        return x + y

    compiled = fusee.compile(program)
    with pytest.raises(ValueError, match="too far"):
        compiled(torch.ones(3), True)
    assert compiled(torch.ones(3), False).equal(torch.ones(3))


class Checked(torch.nn.Module):
    def forward(self, x: Tensor, k: int) -> Tensor:
        y = x.sin()
        if k:
            raise ValueError("refused")
        return y


def handled(model: torch.nn.Module, x: Tensor, k: int) -> Tensor:
    try:
        return model(x * 2, k=k)
    except ValueError:
        return x


@pytest.mark.parametrize("is_model", [False, True])
def test_hooks_that_are_always_called_hear_of_an_error(is_model: bool) -> None:
    """Though torch asks whether it is compiled, and would leave them out."""

    def told(compiled: Callable[[Any], Any]) -> list[Any]:
        model, log = Checked(), list[Any]()

        def hear(_: Any, given: Any, keywords: Any, result: Any) -> None:
            log.append((len(given), [*keywords], result is None))

        handle = model.register_forward_hook(hear, always_call=True, with_kwargs=True)
        model.register_forward_hook(lambda *_: log.append("usual"))
        made = compiled(model if is_model else handled)
        run = functools.partial(handled, made) if is_model else functools.partial(made, model)
        for k in (0, 1, 0, 1):
            log.append(run(torch.ones(2), k).tolist())
        handle.remove()
        return [*log, run(torch.ones(2), 0).tolist(), log[-1]]

    assert told(functools.partial(fusee.compile, backend="eager")) == told(lambda f: f)
