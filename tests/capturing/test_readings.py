"""Numbers taken out of tensors: they come after the graph, as what they were when read."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import gc
import math
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo

import fusee
from fusee.backends.report import live_reports
from fusee.errors import GraphBreakError
from tests.capturing.same import same, shape_of
from tests.counting import Counting

T = Any
INTS = torch.tensor([[3, -1], [2**62, 5]])
FLOATS = torch.tensor([0.1, -2.5, 3e38])


def moved(x: T) -> T:
    taken = []
    for row in x.tolist():
        taken += [row, (row, "again")]
    return taken, {"last": taken[-1]}


def before_a_write(x: T) -> T:
    was = x.tolist()
    x.add_(1)
    return was, x


def computed(x: T) -> T:
    a, b, *_ = x.flatten().tolist()
    return a * 4 - b * b, -a + 0.5, b / 3


def given_back(x: T) -> T:
    a, b, _ = x.tolist()
    return x * a + b


def compared(x: T) -> T:
    y = x + 1
    return [n for n in x.flatten().tolist() if n > 0], y


def divided(x: T) -> T:
    return 1 / x.sum().tolist()


@pytest.mark.parametrize("program", [moved, before_a_write, computed])
@pytest.mark.parametrize("x", [INTS, INTS.int(), FLOATS, FLOATS.half(), FLOATS.double()])
def test_a_list_of_numbers_is_in_one_graph(program: T, x: T) -> None:
    assert not same(program, x).stops


def test_lists_of_other_forms() -> None:
    for x in (torch.tensor(3), torch.zeros(0, 3), torch.ones(2, 2, requires_grad=True)):
        assert not same(lambda x: x.tolist(), x).stops
    assert not same(lambda x: (x + 1).tolist(), numpy.arange(5)).stops


def truths(x: T) -> T:
    y = x + 1
    return bool((y > 0).all()), bool(y.sum()), (y > 1).any().item(), int(y.sum() > 0), y


def truths_of_numbers(x: T) -> T:
    return bool(x.sum().item()), float((x.sum() > 3).item()), x + 1


def decided(x: T) -> T:
    is_any = bool((x > 0).any())
    return x + 1 if is_any else x * 3


def directly(x: T) -> T:
    return x + 1 if (x > 0).any() and not (x < -9).all() else x * 3


@pytest.mark.parametrize("x", [INTS, FLOATS, torch.zeros(2), torch.tensor(2.0), INTS > 0])
def test_truths_that_are_given_away(x: T) -> None:
    options = {"capture_scalar_outputs": True}
    for program in (truths, truths_of_numbers):
        graphs = Counting()
        graphs.takes_symbols = True
        compiled = fusee.compile(program, backend=graphs, fullgraph=True, options=options)
        for given in (x, x.clone().zero_()):
            assert shape_of(compiled(given)) == shape_of(program(given))
        assert len(graphs.graphs) == 1
    for program in (decided, directly):
        compiled = fusee.compile(program, options=options)
        for given in (x, x.clone().zero_()):
            assert shape_of(compiled(given)) == shape_of(program(given))
    assert same(lambda x: (x > 0).tolist(), x).stops == []


def test_numbers_go_back_into_the_graph() -> None:
    assert not same(given_back, FLOATS).stops
    assert not same(given_back, torch.tensor([3, 4, 2**60])).stops


def in_place_of_numbers(x: T) -> T:
    mask = torch.arange(x.max())[None] < x[:, None]
    sized = torch.zeros((x[0], 2)), x.new_zeros(x[1], 3), torch.arange(60).view(x[1], -1)
    powers = torch._foreach_pow(x.max(), [x, x * 2])
    return (
        mask,
        sized,
        x.repeat(x[2]),
        x.roll(x[0]),
        torch.full((2,), x.max()),
        powers,
        torch.eye(x[1]),
    )


def test_tensors_in_place_of_numbers_stay_in_the_graph() -> None:
    fast = fusee.compile(in_place_of_numbers, fullgraph=True)
    for x in ([1, 2, 3], [2, 4, 1], [3, 1, 5]):
        x = torch.tensor(x)
        assert shape_of(fast(x)) == shape_of(in_place_of_numbers(x))
    with pytest.raises(RuntimeError, match="negative"):
        fusee.compile(lambda x: torch.zeros(x[0] - 9))(torch.tensor([3]))
    same(lambda x: torch.full((2,), x.max()), FLOATS)
    same(lambda x: torch.full((2,), x.max()), FLOATS.double(), breaks=True)


def put(x: T, key: T, value: T) -> None:
    x[key] = value


def put_by_method(x: T, key: T, value: T) -> None:
    torch.Tensor.__setitem__(x, key, value)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "key",
    [
        lambda i, x: i,
        lambda i, x: (slice(None), i),
        lambda i, x: (i, i),
        lambda i, x: (..., i),
        lambda i, x: (i, slice(1, 3)),
    ],
)
def test_a_place_in_a_tensor_may_be_a_tensor(key: T, dynamic: T) -> None:
    def program(w: T, i: T) -> T:
        x, y = w.detach().clone(), w.clone()
        put(x, key(i, w), 9.0)
        put_by_method(y, key(i, w), w.sum())
        return x, y, y[key(i, w)]

    fast = fusee.compile(program, fullgraph=True, dynamic=dynamic)
    for place in (1, 3, -2):
        results = []
        for run in (program, fast):
            w = torch.arange(16.0).reshape(4, 4).requires_grad_()
            x, y, part = run(w, torch.tensor(place))
            (y * 2).sum().backward()
            results.append(shape_of((x, y, part, w.grad)))
        assert results[0] == results[1]
    for run in (program, fast):
        with pytest.raises(IndexError, match="out of"):
            run(torch.zeros(4, 4, requires_grad=True), torch.tensor(4))


def places_move(x: T, i: T) -> T:
    x[i] += 1
    i.view(1).add_(1)
    x[i] *= 2
    i.data.sub_(2)
    return x[i] + x[i.item()], i


def places_of_a_list_move(x: T, i: T) -> T:
    places = [i, i.clone()]
    first = x[i].clone()
    torch._foreach_add_(places, 1)
    return first + x[i] - x[places[1]], i.tolist()


def place_is_another_tensors(x: T, i: T) -> T:
    first = x[i].clone()
    i.data = i + 1
    return first + x[i]


def place_moves_in_inference_mode(x: T, i: T) -> T:
    with torch.inference_mode():
        first = x[i].clone()
        i.add_(1)
        return first + x[i]


@pytest.mark.parametrize(
    "program",
    [
        places_move, places_of_a_list_move, place_is_another_tensors,
        place_moves_in_inference_mode,
    ],
)  # fmt: skip
def test_a_place_is_read_once_until_it_is_written_to(program: T) -> None:
    """Then `x[i] += y` writes where it has read."""
    fast = fusee.compile(program, fullgraph=True)
    for place in (1, 0, 1):
        found = []
        for run in (program, fast):
            given = torch.arange(12.0).reshape(3, 4), torch.tensor(place)
            found.append(shape_of((run(*given), given)))
        assert found[0] == found[1]


def test_a_number_beside_tensors_is_looked_up_in_python() -> None:
    def program(x: T, i: T) -> T:
        x[i, torch.arange(4)] = 3.0
        return x[i, x[i] > 1]

    same(program, torch.arange(16.0).reshape(4, 4), torch.tensor(2), breaks=True)


def test_a_value_that_is_needed_ends_the_graph() -> None:
    for x in (INTS, FLOATS, torch.zeros(3)):
        same(compared, x, breaks=True)
    for x in (FLOATS, torch.zeros(3)):
        same(divided, x, breaks=True)
    assert not same(divided, INTS).stops
    with pytest.raises(ZeroDivisionError):
        fusee.compile(divided)(torch.zeros(3, dtype=torch.int64))


def roots(x: T) -> T:
    """As scripts compute the norm of all gradients, and clip by it."""
    total = 0.0
    for part in x:
        total += part.norm(2).item() ** 2
    norm = total ** (1.0 / 2)
    scale = min(5.0 / (norm + 1e-6), 1.0)
    rest = round(norm, 3), abs(x[0].item() - norm), math.sqrt(total), norm > 5.0, total != total
    return x * scale, x * max(norm, 0.5), max(x[0].item(), norm, 2.0), rest


def overflowing(x: T) -> T:
    return x + 1, x[0].item() ** 2 + 1.0


def complex_root(x: T) -> T:
    return x + 1, (x[0].item() - x[1].item() ** 2) ** 0.5


def infinite_root(x: T) -> T:
    """A root of float32 is far from 1e40, but may be infinite."""
    return x + 1, math.sqrt(1e40 - math.sqrt(x[0].item() ** 2))


def power_of_zero(x: T) -> T:
    return x + 1, x[0].item() ** -1, 1 / (x[0].item() ** 2 + 0.0)


MANY = (FLOATS, FLOATS * 0, -FLOATS, FLOATS / 0, FLOATS.log(), FLOATS.half())


@pytest.mark.parametrize("x", [*MANY, FLOATS.double() * 1e280], ids=str)
def test_what_cannot_raise_is_computed_after_the_graph(x: T) -> None:
    for program in (roots, overflowing):
        same(program, x, breaks=x.dtype is torch.float64)
    for program in (complex_root, infinite_root, power_of_zero):
        same(program, x, breaks=True)


def test_new_values_are_no_new_version() -> None:
    backend = Counting()
    fast = fusee.compile(computed, backend=backend, fullgraph=True)
    for x in (FLOATS, FLOATS + 1, -FLOATS):
        assert fast(x) == computed(x)
    assert len(backend.graphs) == 1


def shown_of_a_sum(x: T) -> T:
    total = x.sum()
    text = f"{total:.2f} {total}"
    total.add_(1)
    return x * total, text, f"{total}"


def shown_of_a_count(x: T) -> T:
    return x.sin(), f"{(x > 0).sum():3d} of {len(x)}, all {(x > 0).all()}"


def shown_of_a_number(x: T) -> T:
    text = str(x.sum().item())
    return x.cos(), text, f"{x.max().item():.3f}"


@pytest.mark.parametrize("program", [shown_of_a_sum, shown_of_a_count, shown_of_a_number])
def test_what_a_text_shows_is_no_version(program: T) -> None:
    fast = fusee.compile(program, backend="eager", fullgraph=True)
    fast(FLOATS)
    with fusee.compiler.set_stance("fail_on_recompile"):
        for x in (FLOATS, FLOATS + 1, -FLOATS, FLOATS / 0):
            assert shape_of(fast(x)) == shape_of(program(x))


def test_texts_of_other_tensors_end_the_graph() -> None:
    for shown in (lambda x: x[:2], lambda x: torch.nn.Parameter(x[0]), lambda x: x[0] + 1j):
        same(lambda x, shown=shown: (x + 1, f"{shown(x)}"), FLOATS, breaks=True)
    same(lambda x: x + 1 if f"{x[0]}" == "1.0" else x - 1, FLOATS, breaks=True)


CHECKS: dict[str, T] = {
    "tensor": lambda x: torch._check_tensor_all(x > 0),
    "with a class": lambda x: torch._check_tensor_all_with(KeyError, x > 0, lambda: f"{x.sum()}"),
    "number": lambda x: torch._check_value((x > 0).all().item(), lambda: "not all"),
    "comparison": lambda x: torch._check_index(x.min().item() > 0),
    "text before": lambda x: (lambda s: torch._check(bool((x > 0).all()), lambda: s))(f"{x[0]}"),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_of_what_only_data_knows_is_in_the_graph(check: T) -> None:
    def program(x: T) -> T:
        y = x.sin()
        check(x)
        return y.cos()

    fast = fusee.compile(program, fullgraph=True)
    x = FLOATS.abs()
    assert torch.allclose(fast(x), program(x))
    with pytest.raises(Exception) as refused:
        program(-x)
    with pytest.raises(refused.type) as found:
        fast(-x)
    assert str(found.value) == str(refused.value)


@pytest.mark.parametrize("condition", [lambda x: x.all(), lambda x: x.shape[0]])
def test_a_check_of_no_truth_is_refused(condition: T) -> None:
    with pytest.raises(TypeError, match="cond must be a bool"):
        fusee.compile(lambda x: (torch._check(condition(x)), x + 1), dynamic=True)(FLOATS)


def test_scalars_are_captured_if_torch_is_told_so() -> None:
    def program(x: T) -> T:
        n = x.max().item()
        x.zero_()
        return n, float(x.sum()), n * 2, float(n)

    def compiled() -> T:
        options = {"capture_scalar_outputs": False}
        return fusee.compile(program, fullgraph=True, backend="eager", options=options)

    with pytest.raises(GraphBreakError, match="needs the value"):
        compiled()(FLOATS.clone())
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for x in (FLOATS, INTS, torch.ones(1, dtype=torch.uint8)):
            assert compiled()(x.clone()) == program(x.clone())
        for wrong in (lambda x: (x + 1).item(), lambda x: float(x + 1)):
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                wrong(FLOATS)
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                fusee.compile(wrong)(FLOATS)
        whole = fusee.compile(lambda x: int(x + 1))
        assert whole(torch.tensor(2.5)) == 3
        with pytest.raises(OverflowError):
            whole(torch.tensor(torch.inf))


def shape_arithmetic(x: T) -> T:
    """As transformers' Longformer and Tapas compute sizes: by tensors, of numbers alone."""
    chunks = torch.div(x.shape[1], 4, rounding_mode="trunc")
    flat = torch.cat([torch.as_tensor([-1]), torch.as_tensor(x.shape[2:])])
    steps = torch.arange(torch.prod(torch.tensor(x.shape[:2])))
    if chunks > 1 and torch.tensor(x.shape).float().mean() > 2:
        x = x.reshape(flat.tolist()) + x.new_zeros((chunks + 1, 1, x.shape[-1]))
    return x + steps[: x.shape[-1]], x.view(int(chunks), -1), chunks


def of_other_sources(x: T) -> T:
    """Not of numbers alone."""
    t = torch.tensor([2, 3])
    t[:1] = x.shape[0] + 2
    drawn, unset = torch.randperm(4), torch.empty(3)
    return t[0].item(), sum(drawn.tolist()), len(unset.tolist())


def test_numbers_that_numbers_decide_are_known_at_once() -> None:
    for x in (torch.ones(2, 8, 3), torch.ones(2, 12, 3)):
        fast = fusee.compile(shape_arithmetic, fullgraph=True, dynamic=False)
        assert shape_of(fast(x)) == shape_of(shape_arithmetic(x))
    same(shape_arithmetic, torch.ones(2, 4, 3))
    assert not same(of_other_sources, torch.ones(2, 3)).stops
    none = lambda x: x + torch.div(1, 0, rounding_mode="floor").item()  # noqa: E731
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fusee.compile(none)(FLOATS)
    compiled = fusee.compile(lambda x: x.view(torch.div(x.shape[0], 2, rounding_mode="floor"), 2))
    assert compiled(torch.ones(4)).shape == (2, 2)


def test_draws_of_numbers_are_drawn_at_each_call() -> None:
    def drawn(x: T) -> T:
        rate = torch.tensor([10.0])
        some = torch.binomial(rate, rate / 20), torch._standard_gamma(rate), torch.poisson(rate)
        return [n.item() for n in (*some, torch.ops.aten.exponential(rate))], x

    fast = fusee.compile(drawn, fullgraph=True)
    outcomes = []
    for call in (drawn, fast, fast):
        torch.manual_seed(0)
        outcomes.append([call(FLOATS)[0] for _ in range(3)])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0] != outcomes[0][1]


SPARSE: dict[str, T] = {
    "_nnz": lambda x: x.to_sparse()._nnz(),
    "of a sum": lambda x: (x.to_sparse() + x.to_sparse())._nnz(),
    "indices": lambda x: x.to_sparse().indices().shape,
    "values": lambda x: x.to_sparse(1).values().shape,
    "of rows": lambda x: x.to_sparse_csr().crow_indices() * 2,
    "of columns": lambda x: x.to_sparse_csc().values().shape,
    "coalesced": lambda x: torch.sparse_coo_tensor(INTS * 0, x[0, :2], (2, 3)).coalesce().values(),
    "branch": lambda x: x + 1 if x.to_sparse()._nnz() > 2 else x - 1,
    "turned": lambda x: x.to_sparse().transpose(0, 1).coalesce().indices(),
    "changed": lambda x: (s := x.to_sparse().coalesce()).neg_() is s and s.to_dense(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # in beta state
@pytest.mark.parametrize("name", SPARSE)
def test_how_many_elements_a_sparse_tensor_holds(name: str) -> None:
    """Stand-ins hold none."""
    assert same(SPARSE[name], torch.tensor([[1.0, 0, 2], [0, 0, 3]]), breaks=True).stops


@pytest.mark.filterwarnings("ignore:[Ss]parse:UserWarning")
def test_sparse_tensors_of_blocks() -> None:
    def fn(x: T) -> T:
        rows = x.to_sparse_csr()
        return rows.to_sparse_bsr((2, 1)).to_dense(), rows.to_sparse_bsc((1, 2)).to_dense() * 2

    assert not same(fn, torch.eye(4)).stops


@pytest.mark.filterwarnings("ignore:[Ss]parse:UserWarning", "ignore:.*runs eagerly")
def test_writes_to_sparse_tensors() -> None:
    """Their elements may be those of an input, or of what the graph gives."""

    def fn(x: T) -> T:
        places, values = INTS[:, :2] * 0, x * 1
        own = torch.sparse_coo_tensor(places, values, (2, 3), is_coalesced=True).mul_(3)
        torch.sparse_coo_tensor(places, x, (2, 3), is_coalesced=True).mul_(2)
        return own.to_dense(), values + 0, x.to_sparse_coo().zero_().to_dense()

    compiled = fusee.compile(fn)
    for call in (compiled, compiled):
        ours, theirs = torch.arange(1.0, 3), torch.arange(1.0, 3)
        torch.testing.assert_close(call(ours), fn(theirs))
        torch.testing.assert_close(ours, theirs)


class Quantizer(torch.nn.Module):
    """Codes that begin as the first data, as vector quantizers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begun", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(3, 4))

    def forward(self, x: T) -> T:
        if not self.begun:
            self.codes.data.copy_(x[:3])
            self.begun.data.copy_(torch.tensor([True]))
        self.codes.lerp_(x[:3], 0.1)
        return x - self.codes[torch.cdist(x, self.codes).argmin(-1)]


class Asking(torch.nn.Module):
    """A program that asks for numbers in its buffers, of which one is a part of another."""

    def __init__(self, program: T) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("count", torch.tensor(2))
        self.register_buffer("pair", torch.tensor([1.0, -2.0]))
        self.register_buffer("part", self.pair[1])

    def forward(self, x: T) -> T:
        return self.program(self, x)


def counts(m: T, x: T) -> T:
    before = m.count.item()
    m.count += 1
    return x * before, before, m.count > 3 and x


def turns(m: T, x: T) -> T:
    m.flag.logical_not_()
    return x + 1 if m.flag else x - 1


def writes_to_the_whole(m: T, x: T) -> T:
    m.pair.neg_()
    return x + 1 if m.part > 0 else x - 1


def pads(m: T, x: T) -> T:
    missing = torch.ceil(x.shape[-1] / m.count).to(torch.int64) * m.count - x.shape[-1]
    return torch.nn.functional.pad(x, (0, int(missing))) * 2


def asks_after_another_write(m: T, x: T) -> T:
    m.pair.mul_(0.5)
    return (x + 1 if m.flag else x - 1), m.flag


def of_signs(m: T, x: T) -> T:
    return x / float(m.part) if m.part == m.part else x + 1


def test_a_float_that_an_object_keeps_is_read_by_the_graph() -> None:
    """Whatever it is: a rate that changes makes no versions."""
    module = Asking(lambda m, x: x * m.part.item())
    fast = fusee.compile(module, options={"prices": False})
    gc.collect()
    before = len(live_reports())
    for k in range(4):
        module.part.fill_(0.5 + k)
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 0.5 + k))
    assert len(live_reports()) == before + 1


# What may happen to the buffers before a call, by its number.
CHANGES: dict[str, T] = {
    "none": lambda m, k: None,
    "flag": lambda m, k: m.flag.fill_(k % 2),
    "count": lambda m, k: m.count.fill_(1 + k % 4),
    "part": lambda m, k: m.part.fill_([0.0, -0.0, math.nan, 1.0][k % 4]),
    "one for two": lambda m, k: k == 2 and m.register_buffer("flag", m.count),
}


@pytest.mark.filterwarnings("ignore:.*share memory")
@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize(
    ("program", "graphs"),
    [
        (pads, 1), (asks_after_another_write, 1), (of_signs, 1), (counts, 1),
        (turns, 2), (writes_to_the_whole, 2),  # asked after they are written to
    ],
)  # fmt: skip
def test_numbers_that_objects_keep_are_facts(program: T, graphs: int, backend: str) -> None:
    for what, change in CHANGES.items():
        mine, theirs = Asking(program), Asking(program)
        counting = Counting()
        fast = fusee.compile(mine, backend=counting if backend == "eager" else backend)
        for k in range(10):
            change(mine, k)
            change(theirs, k)
            x = torch.randn(3, 5)
            assert shape_of(fast(x)) == shape_of(theirs(x)), (what, k)
            assert repr(mine.state_dict()) == repr(theirs.state_dict())
            if backend == "eager" and not k:
                assert len(counting.graphs) == graphs
        assert len(counting.graphs) < 10


def test_layers_that_begin_with_data_have_two_versions() -> None:
    mine, theirs = (torch.nn.Sequential(*(Quantizer() for _ in range(4))) for _ in range(2))
    counting = Counting()
    fast = fusee.compile(mine, backend=counting)
    for k in range(12):
        x = torch.randn(6, 4)
        for i in range(4):  # first both versions, then as many as there are sums of flags
            if k > 3:
                for m in (mine, theirs):
                    m[i].begun.fill_(k >> i & 1)
        assert torch.equal(fast(x), theirs(x))
        assert k > 3 or len(counting.graphs) == min(k + 1, 2)
        assert len(counting.graphs) < 20


def test_addresses_of_parameters_are_facts() -> None:
    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]

    def by_address(x: T) -> T:
        found = {w.data_ptr(): x * w for w in weights}
        return found[weights[1].data_ptr()] + len(found)

    counting, before, graphs = Counting(), [], []
    fast, x = fusee.compile(by_address, backend=counting), torch.randn(3)
    for k in range(5):
        if k > 1:
            before.append(weights[1].data)  # whose memory nobody else gets
            weights[1].data = torch.randn(3)
        assert torch.equal(fast(x), by_address(x))
        graphs.append(len(counting.graphs))
    assert graphs[:3] == [1, 1, 2]
    assert graphs[-1] > 3  # since the second other address the graph ends there
