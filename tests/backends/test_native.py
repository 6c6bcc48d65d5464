"""Whole programs through the backend "fusee" against eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fusee
from fusee.autodiff.bill import price_of
from fusee.backends import lookup
from fusee.backends.native import compile_native
from fusee.backends.report import CompiledGraph
from fusee.capture.entries import live
from fusee.codegen.llvm import emit_kernel
from fusee.errors import RecompileError
from fusee.targets.cpu import CPU, prices_of, vendor
from tests.check import check


def compile_fx(fn: Callable[..., Any], *args: Tensor, **options: object) -> CompiledGraph:
    with torch.no_grad():
        return compile_native(fx.symbolic_trace(fn), list(args), options)


def softmax_of_sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x + y, -1)


def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias)) + x


def column_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.mean(0), x.var(0), x.amax(0)


def both_ways(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.tanh(x)
    return y.sum(0), y.sum(1), y.t().contiguous()


def running(x: Tensor) -> Tensor:
    return torch.cumsum(x * 2, 1) - x


def permuted(x: Tensor) -> Tensor:
    y = x.reshape(-1, 4, 3).permute(2, 0, 1)
    return (y * 2 + 1).reshape(3, -1) - y.flatten(1).flip(1)


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(torch.cat([x, y, x * y], 1)) * 2


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (softmax_of_sum, [(5, 33), (5, 33)]),
        (softmax_of_sum, [(2, 3, 257), (257,)]),
        (softmax_of_sum, [(0, 4), (0, 4)]),
        (softmax_of_sum, [(1, 1), (1, 1)]),
        (normalised, [(4, 7, 96), (96,), (96,)]),
        (column_statistics, [(77, 13)]),
        (column_statistics, [(2000, 3)]),
        (both_ways, [(40, 50)]),
        (running, [(6, 70)]),
        (permuted, [(10, 12)]),
        (joined, [(3, 9), (3, 9)]),
    ],
)
def test_programs_equal_eager(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    check(fn, *(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_equal_eager(dtype: torch.dtype) -> None:
    check(softmax_of_sum, torch.randn(7, 50).to(dtype), torch.randn(50).to(dtype))
    check(normalised, *(torch.randn(s).to(dtype) for s in [(3, 40), (40,), (40,)]))


def test_softmax_is_one_kernel() -> None:
    compiled = compile_fx(softmax_of_sum, torch.randn(64, 128), torch.randn(64, 128))
    assert len(compiled.report().kernels) == 1
    assert not compiled.report().externs


def test_equal_kernels_of_other_sizes_are_one_function() -> None:
    """Rows of a few vectors may have another."""

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), torch.softmax(y, -1)

    report = compile_fx(two, torch.randn(64, 256), torch.randn(50, 277)).report()
    assert len(report.kernels) == 2
    assert len({row.function for row in report.kernels}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kernels_that_differ_in_numbers_alone_are_one_function(dtype: torch.dtype) -> None:
    def layers(x: Tensor) -> list[Tensor]:
        return [torch.sin(x + k) / (0.9 - k / 64) for k in range(3, 9)]

    def means(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        return [each.mean(-1) for each in (x, y, z)]

    def halved(x: Tensor) -> list[Tensor]:
        return [torch.sin(x) / 2.0**k for k in (-140, -3, 3, 5, 7, 64, 140)]

    sizes = [(33, 300), (35, 384), (37, 512)]
    for fn, tensors, count in (
        (layers, [torch.randn(64)], 1),
        (means, [torch.randn(size).to(dtype) for size in sizes], 2),  # a power of two or not
        (halved, [torch.randn(64)], 3),
    ):
        inputs = [x.to(dtype) for x in tensors]
        compiled = compile_fx(fn, *inputs)
        assert len({row.function for row in compiled.report().kernels}) <= count
        check(fn, *inputs)


def test_kernels_that_differ_in_numbers_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: Tensor) -> list[Tensor]:
        return [torch.sin(x + k) / (0.9 - k / 64) * k for k in range(3, 9)]

    written = Mock(wraps=emit_kernel)
    monkeypatch.setattr("fusee.targets.cpu.emit_kernel", written)
    check(layers, torch.randn(64))
    assert written.call_count == 1


def test_dynamic_sizes_compile_once() -> None:
    def other(n: int, m: int) -> tuple[Tensor, ...]:
        return torch.randn(n, m), torch.randn(n, m)

    check(softmax_of_sum, *other(8, 40), dynamic=True, again=[other(3, 57), other(128, 16)])


def test_a_size_that_is_0_beside_open_ones() -> None:
    def fn(x: Tensor, k: int) -> Tensor:
        return torch.softmax(torch.tanh(x[:, k:]) * 2 + 1, 1)

    check(fn, torch.randn(2, 9, 4), 9, dynamic=True)  # was a ZeroDivisionError


def test_fusion_can_be_turned_off() -> None:
    args = torch.randn(4, 9), torch.randn(4, 9)
    check(softmax_of_sum, *args, options={"fuse": False})
    assert len(compile_fx(softmax_of_sum, *args, fuse=False).report().kernels) > 1


def test_an_index_out_of_range_is_eagers_error() -> None:
    table = torch.randn(10, 3)
    compiled = compile_fx(lambda i, t: t[i] * 2, torch.tensor([1, 2]), table)
    assert torch.equal(compiled(torch.tensor([-1, 9]), table), table[[-1, 9]] * 2)
    with pytest.raises(IndexError, match="out of"):
        compiled(torch.tensor([1, 10]), table)


class Counter(nn.Module):
    """Writes to its input and to a buffer, and returns views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(x.sum(0))
        x.mul_(2)
        x[1] = 7
        return x[:, 1:3], self.seen + 1


def test_mutations_and_views_are_replayed() -> None:
    check(Counter(), torch.randn(3, 4))


def test_a_graph_of_modules_is_differentiated() -> None:
    layer = nn.Linear(3, 3)
    compiled = compile_native(fx.symbolic_trace(layer), [torch.randn(2, 3, requires_grad=True)], {})
    report = compiled.report()
    assert report.eager is None and report.backward is not None
    assert "saved for the backward" in str(report) and ".backward: " in str(report)
    x = torch.randn(2, 3, requires_grad=True)
    y = layer(x)
    expected = torch.autograd.grad(y.sum(), [x, layer.weight, layer.bias])
    out = compiled(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    for parameter, grad in zip((x, layer.weight, layer.bias), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.conv.weight.mul_(2),
        lambda m: m.norm.running_mean.add_(1),
        lambda m: m.head.load_state_dict({k: v + 1 for k, v in m.head.state_dict().items()}),
        lambda m: m.head.weight.data.mul_(3),
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(5, 8))),
    ],
)
def test_derived_weights_follow_their_parameters(change: Callable[[Small], object]) -> None:
    torch._dynamo.reset()
    model = Small().eval()
    seen: list[fx.GraphModule] = []
    backend = lookup("fusee")

    def counting(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append(gm)
        return backend(gm, inputs)

    compiled = torch.compile(model, backend=counting)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        change(model)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(seen) == 1


UNARY: list[Callable[..., Tensor]] = [
    torch.exp,
    torch.tanh,
    torch.neg,
    torch.abs,
    torch.sigmoid,
    torch.relu,
    torch.square,
]
BINARY: list[Callable[..., Tensor]] = [torch.add, torch.mul, torch.sub, torch.maximum]
REDUCE: list[Callable[..., Tensor]] = [torch.sum, torch.mean, torch.amax, torch.amin]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Callable[[Tensor, Tensor], Any], tuple[int, int]]:
    """A straight-line program of pointwise ops, reductions and views on two matrices."""
    shape = draw(st.sampled_from([(1, 1), (3, 5), (8, 16), (17, 33), (64, 9), (2, 300)]))
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)),
            min_size=1,
            max_size=9,
        )
    )

    def program(x: Tensor, y: Tensor) -> Any:
        live = [x, y]
        for kind, a, b in steps:
            p, q = live[a % len(live)], live[b % len(live)]
            if kind == 0:
                live.append(UNARY[b % len(UNARY)](p * 0.1))
            elif kind == 1:
                live.append(BINARY[(a + b) % len(BINARY)](p, q))
            elif kind == 2:
                live.append(p - REDUCE[b % len(REDUCE)](p, dim=b % 2, keepdim=True))
            elif kind == 3:
                live.append(p.t().reshape(p.shape) * 0.5)
            elif kind == 4:
                live.append(torch.where(p > q, p.flip(0), q))
            else:
                live.append(torch.cat([p[:, : p.shape[1] // 2], q[:, p.shape[1] // 2 :]], 1))
        return tuple(live[2:])

    return program, shape


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(0, 1000))
def test_random_programs_equal_eager(
    made: tuple[Callable[[Tensor, Tensor], Any], tuple[int, int]], seed: int
) -> None:
    program, shape = made
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(shape, generator=generator) for _ in range(2))
    check(program, x, y, capture="fx")


class Residual(nn.Module):
    """Sums that may be written over a convolution's result, and one that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        z = torch.relu(self.second(y) + y)
        kept = self.first(z)
        return torch.relu(self.second(kept) + kept), kept


def test_sums_are_written_over_operands_that_nobody_reads_again() -> None:
    check(Residual().eval(), torch.randn(2, 4, 8, 8))


def test_batch_norms_fold_into_captured_convolutions_and_follow_their_buffers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    fast = fusee.compile(model, name="folded norms")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        (report,) = fusee.report("folded norms")
        assert any(note.startswith("folded") for note in report.passes), report.passes
        torch._foreach_mul_([x for x in model.buffers() if x.is_floating_point()], 4)
        torch.testing.assert_close(fast(x), model(x))


@pytest.fixture(autouse=True)
def _same_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever processor this is."""
    monkeypatch.setattr(CPU, "prices", prices_of("amd"))


def test_prices_are_of_processors_of_this_vendor() -> None:
    assert vendor() in ("amd", "intel")
    found = {whose: prices_of(whose) for whose in ("amd", "intel")}
    assert found["intel"].own["tanh"] != found["amd"].own["tanh"]
    assert all(one.near < one.own[""][1] < one.own[""][0] for one in found.values())


def runs_as_captured(
    fn: Any, *given: torch.Tensor, dynamic: bool | None = None, **more: Any
) -> bool:
    compiled = fusee.compile(fn, dynamic=dynamic, options={"prices": True, **more})
    torch.testing.assert_close(compiled(*given), fn(*given))
    (report,) = fusee.report(compiled)
    assert report.eager is None
    is_captured = "runs as captured" in str(report)
    assert is_captured == (not report.kernels)
    if report.bill is not None:
        assert f"kernels {report.bill.kernels / 1e5:.1f}" in str(report)
        assert is_captured <= report.bill.is_captured
    return is_captured


def test_graphs_run_as_captured_where_that_costs_less() -> None:
    x, large = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 1000)
    with torch.enable_grad():
        assert runs_as_captured(lambda x: torch.cat((x, x)), x)
        assert runs_as_captured(lambda x: torch.relu(x @ x.t()), x)
        assert not runs_as_captured(lambda x: (x.exp() * x + 1).tanh(), large.requires_grad_())
    with torch.no_grad():
        assert runs_as_captured(lambda x: x @ x, large)
        assert runs_as_captured(lambda x: x[1:].t(), large)
        # all of it is ATen's calls either way
        assert runs_as_captured(
            lambda x: (x * x + x.conj()).abs(), torch.randn(64, 3, dtype=torch.cfloat)
        )
        assert not runs_as_captured(lambda x: (x.exp() * x + 1).tanh(), large)
        assert not runs_as_captured(torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 32, 32))


IMAGE = torch.randn(2, 64, 7, 7).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("call", "x", "kind"),
    [
        (lambda x: x.softmax(0), torch.randn(64, 300), "softmax down"),
        (lambda x: x.softmax(1), torch.randn(64, 300), "softmax"),
        (lambda x: x.softmax(1), torch.randn(300, 17), "softmax scant"),
        (lambda x: x.sum(1), torch.randn(64, 3, 300), "sum down few"),
        (lambda x: x.sum(), torch.randn(300, 3), "sum"),  # which lie behind one another
        (lambda x: x.sum((1, 2)), torch.randn(300, 40, 3), "sum brief"),
        (lambda x: x.sum((0, 2)), torch.randn(30, 40, 3), "sum tiny"),
        (lambda x: x.sum(1, keepdim=True), torch.randn(300, 640).t(), "sum down"),
        (lambda x: x.mean(1), IMAGE, "mean brief"),  # its lanes are there
        (lambda x: x.mean((2, 3)), IMAGE, "mean brief down"),
        (lambda x: x[:, None].expand(-1, 3, -1).clone(), torch.randn(64, 300), "clone repeated"),
        (lambda x: x.t().reshape(-1), torch.randn(64, 300), "clone across brief"),
        (lambda x: x.t().contiguous(), torch.randn(2000, 1500), "clone across far"),
        (lambda x: x.permute(1, 2, 0).contiguous(), torch.randn(3, 64, 64), "clone across tiny"),
        (lambda x: F.gelu(x, approximate="tanh"), torch.randn(64, 300), "gelu tanh"),
        (lambda x: x + x, torch.randn(300, 3), "add tiny"),
        (lambda x: x.gather(0, x.long()), torch.zeros(64, 300), "gather down"),
        (lambda x: x.gather(1, x.long()), torch.zeros(64, 300), "gather"),
    ],
)
def test_a_bill_says_what_decides_on_lanes(call: Any, x: torch.Tensor, kind: str) -> None:
    compiled = fusee.compile(call)
    with torch.no_grad():
        compiled(x)
    (report,) = fusee.report(compiled)
    assert kind in [charge.kind for charge in report.bill.calls], report.bill


def test_each_copy_into_memory_that_is_there_is_a_call() -> None:
    compiled = fusee.compile(lambda x, y, z: (x.copy_(z), y.copy_(z))[0])
    with torch.no_grad():
        compiled(torch.zeros(3), torch.zeros(3), torch.ones(3))
    (report,) = fusee.report(compiled)
    assert [charge.once for charge in report.bill.calls] == ["copy_ once"] * 2


def test_what_is_not_listed_is_priced_by_its_nearest() -> None:
    own = {"": (2.0, 1.0), " down": (3.0, 1.0), "sum": (5.0, 4.0), "amax narrow down": (9.0, 2.0)}
    assert price_of(own, "sum down") == (15, 4)
    assert price_of(own, "amax narrow") == (3, 2)
    assert price_of(own, "erf down") == (4.5, 1)
    assert price_of(own, "_sum") == own["sum"]


@pytest.fixture
def cheap_cat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever processor the prices are of, a few elements are joined as captured."""
    own = {**CPU.prices.own, "cat once": (1.0, 1e6)}
    monkeypatch.setattr(CPU, "prices", CPU.prices._replace(own=own))


def test_python_runs_functions_whose_graphs_run_as_captured(cheap_cat: None) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x))

    def asking(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x)) if torch.compiler.is_compiling() else x

    compiled_inner = fusee.compile(inner)
    leaf = torch.randn(4, 4, requires_grad=True)
    with torch.enable_grad():
        inputs = [leaf.detach(), leaf, leaf * 2]
    for program, is_pythons in (
        (inner, True), (lambda x: inner(x), True), (asking, False),
        (lambda x: compiled_inner(x), False),
    ):  # fmt: skip
        compiled = fusee.compile(program, options={"prices": True})
        (piece,) = (one for one in live if one.call is compiled)
        for x in inputs * 2:
            for is_on in (True, False):
                with torch.set_grad_enabled(is_on):
                    got, want = compiled(x), inner(x)
                assert torch.equal(got, want) and got.requires_grad == want.requires_grad
                assert type(got.grad_fn) is type(want.grad_fn)
        assert len(piece.entries) == 6 and piece.has_graph()
        assert all((entry.run is None) == is_pythons for entry in piece.entries)


_joined = torch.cat


def _in_forward_mode() -> Any:
    return torch.autograd.forward_ad.dual_level()


@contextlib.contextmanager
def _with_global_hooks() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class _Heard(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prices", [True, False])
def test_one_builtin_asks_what_the_check_of_a_function_of_tensors_asks(
    prices: bool, cheap_cat: None
) -> None:
    def first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _joined((x, y))

    compiled = fusee.compile(first, options={"prices": prices})
    (piece,) = (one for one in live if one.call is compiled)
    x, y = torch.randn(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        compiled(x, y)
    (entry,) = piece.entries
    assert entry.quick is not None and (entry.run is None) == prices
    contexts: list[Callable[[], Any]] = [
        torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu"),
        torch.overrides.BaseTorchFunctionMode, _Heard, _in_forward_mode, _with_global_hooks,
        _in_float64,
    ]  # fmt: skip
    said = []
    for context in contexts:
        with torch.no_grad(), context():
            for given in ((x, y), (y, x), (x.double(), y), (x.t(), y), (x.requires_grad_(), y)):
                assert (entry.quick(*given) < 0) == entry.check(*given)
                x.requires_grad_(False)
            said.append(entry.quick(x, y) < 0)
    assert said == [True, False, prices, False, False, *[prices] * 4]
    torch.vmap(lambda z: (said.append(_agree(entry, x, y)), z)[1])(x)  # type: ignore[func-returns-value]
    assert said[-1] == prices
    with torch.no_grad():
        assert entry.quick(x, y) < 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "_joined", torch.vstack)
            assert not entry.quick(x, y) < 0 and not entry.check(x, y)
            assert torch.equal(compiled(x, y), torch.cat((x, y)))
            assert piece.start.quick is entry.quick and len(piece.entries) == 2
        with fusee.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x, y), torch.cat((x, y)))
            with pytest.raises(RecompileError):
                compiled(y, x)
        first.__code__ = (lambda x, y: torch.cat((y, x))).__code__
        assert not entry.quick(x, y) < 0
        assert torch.equal(compiled(x, y), torch.cat((y, x)))


@pytest.mark.parametrize("prices", [True, False])
def test_one_builtin_asks_whether_what_is_written_to_is_of_inference_mode(prices: bool) -> None:
    compiled = fusee.compile(lambda x, y: x.mul_(y), options={"prices": prices})
    (piece,) = (one for one in live if one.call is compiled)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.inference_mode():
        other = torch.randn(4, 4)
    with torch.no_grad():
        want = x * y
        assert compiled(x, y) is x and torch.equal(x, want)
        (entry,) = piece.entries
        assert entry.quick is not None and (entry.run is None) == prices
        for given, holds in ((x, True), (other, False), (x[:2], False)):
            assert (entry.quick(given, y) < 0) == entry.check(given, y) == holds
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            compiled(other, y)


def _agree(entry: Any, x: Tensor, y: Tensor) -> bool:
    with torch.no_grad():
        found: bool = entry.check(x, y)
        assert (entry.quick(x, y) < 0) == found
        return found


def test_what_costs_less_at_one_size_alone_becomes_kernels() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:  # by loops but for what a call costs
        return x.tanh()

    with torch.no_grad():
        assert runs_as_captured(lambda x: x.view(-1), torch.randn(4, 8), dynamic=True)
        assert not runs_as_captured(fn, torch.randn(300, 8), dynamic=True)
        assert not runs_as_captured(fn, torch.randn(3, 8), dynamic=True)


def test_what_must_not_be_saved_does_not_run_as_captured() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.cat((x, x)).relu(), x, use_reentrant=False)

    with torch.enable_grad():
        x = torch.randn(64, 8, requires_grad=True)
        assert runs_as_captured(lambda x: torch.cat((x, x)).relu(), x)
        assert not runs_as_captured(lambda x: torch.cat((x, x)).relu(), x, memory_budget=0.5)
        assert not runs_as_captured(fn, x)


@pytest.mark.parametrize("trains", [False, True])
def test_single_calls_among_loops_are_atens_where_they_cost_less(trains: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.tanh().erfc().relu() * 2

    x = torch.randn(30000, 7, requires_grad=trains)
    with torch.set_grad_enabled(trains):
        for prices in (False, True):
            compiled = fusee.compile(fn, options={"prices": prices})
            torch.testing.assert_close(compiled(x), fn(x))
            (report,) = fusee.report(compiled)
            called = [row for row in report.externs if " as a call, " in row.reason]
            assert report.kernels and len(called) == prices, str(report)
            if trains:
                given = [torch.autograd.grad(f(x).sum(), x) for f in (compiled, fn)]
                torch.testing.assert_close(*given)
