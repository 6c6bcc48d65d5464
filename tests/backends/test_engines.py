"""What every engine must do with a program, whatever runs it: here OpenVINO and ONNX Runtime."""

from __future__ import annotations

import concurrent.futures
import gc
import importlib.util
import multiprocessing
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusee
from fusee.backends import lookup
from fusee.backends.regions import Pool
from fusee.backends.report import Report
from tests.backends.engine_calls import by, compiled, convolved, through, two_layers, ways
from tests.check import check
from tests.models import zoo

aten = torch.ops.aten

_NEEDS = {"openvino": "openvino", "openvino_ts": "openvino", "onnxrt": "onnxscript"}


def _each(*names: str) -> pytest.MarkDecorator:
    marks = [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(importlib.util.find_spec(_NEEDS[name]) is None, reason=name),
                pytest.mark.filterwarnings("ignore:the backend 'openvino_ts'"),
            ],
        )
        for name in names
    ]
    return pytest.mark.parametrize("backend", marks)


engines = _each("openvino", "onnxrt")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    torch._dynamo.reset()  # which takes sizes for open once it has seen others
    with torch.no_grad():
        yield


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval()


@_each("openvino", "openvino_ts", "onnxrt")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts(backend: str, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=layout)
    w = torch.randn(4, 3, 3, 3)
    check(convolved, x, w, backend=backend, capture="fx")
    check(convolved, x[:, :, ::2], w, backend=backend, capture="fx")


@engines
@pytest.mark.parametrize("name", ["resnet18", "vit", "bert", "llama"])
def test_models(backend: str, name: str) -> None:
    module, args, kwargs = zoo.load(name, "test")
    seen: list[Report] = []
    check(module, *args, kwargs=kwargs, backend=through(backend, seen))
    claimed = sum(sum(row.ops.values()) for report in seen for row in report.regions)
    left = sum(len(report.unclaimed) for report in seen)
    assert claimed >= 0.95 * (claimed + left), str(seen[0])
    assert all(row.failed is None and row.calls for report in seen for row in report.regions)


@engines
def test_sizes_are_open_with_dynamic(backend: str) -> None:
    def fn(x: Tensor, w: Tensor, deep: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).reshape(x.shape[0] * 2, -1)
        steps = torch.arange(x.shape[0], dtype=x.dtype)
        joined = torch.cat([x @ w, (x * steps[:, None]) @ w], 1)[1:]
        return torch.softmax(y, -1), joined, F.layer_norm(deep @ deep.mT, deep.shape[1:2])

    args = [(torch.randn(n, 8), torch.randn(8, 8), torch.randn(n, n + 1, 4)) for n in (5, 3, 17)]
    seen: list[Report] = []
    check(fn, *args[0], backend=through(backend, seen), dynamic=True, again=args[1:])
    (report,) = seen
    assert [row.failed for row in report.regions] == [None]


@engines
def test_a_model_with_open_sizes(backend: str) -> None:
    module, _, given = zoo.load("bert", "test")
    seen: list[Report] = []
    fast = torch.compile(module, backend=through(backend, seen), dynamic=True)
    for rows, length in ((2, 12), (3, 9), (4, 7)):
        inputs = {k: x.repeat(2, 1)[:rows, :length].clone() for k, x in given.items()}
        want, got = module(**inputs), fast(**inputs)
        torch.testing.assert_close(list(got.values()), list(want.values()), rtol=1e-4, atol=1e-5)
    (report,) = seen
    assert all(row.failed is None and row.calls == 3 for row in report.regions)
    assert report.regions and len(report.unclaimed) < 5, str(report)


@engines
def test_what_has_no_elements_for_some_sizes_is_then_ours(backend: str) -> None:
    """OpenVINO's softmax over no elements ends the process."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x[:, 5:]
        return torch.softmax(torch.tanh(y) + 1, 1), torch.log_softmax(y * 2, 1), y.exp().mean(1)

    seen: list[tuple[Any, tuple[Any, ...]]] = []

    def noting(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        call = lookup(backend)(gm, inputs)

        def run(*args: Any) -> Any:
            seen.append((call, args))
            return call(*args)

        return run

    fast = torch.compile(fn, backend=noting, dynamic=True)
    for n in (9, 7, 5, 3):
        x = torch.randn(2, n, 4)
        torch.testing.assert_close(fast(x), fn(x), equal_nan=True)
    (call, first), (same, _), *_ = seen
    assert same is call
    x = torch.randn(2, 5, 4)  # and where nobody looked at the sizes
    args = [x if isinstance(one, Tensor) else 5 if one == 9 else one for one in first]
    torch.testing.assert_close(tuple(call(*args)), fn(x), equal_nan=True)
    torch.testing.assert_close(tuple(call(*first)), fn(next(filter(torch.is_tensor, first))))
    (row,) = call.report().regions
    assert row.failed is None and row.calls == 3


@engines
def test_indices_out_of_range_are_eagers_error(backend: str) -> None:
    table = torch.randn(10, 6)

    def fn(i: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(F.embedding(i, t)) @ t.t()

    call = compiled(backend, fn, torch.tensor([1]), table)
    for wrong in (10, -1):
        with pytest.raises(IndexError):
            call(torch.tensor([wrong]), table)
    good = torch.tensor([9])
    torch.testing.assert_close(call(good, table), fn(good, table))
    (row,) = call.report().regions
    assert row.failed is None and row.calls == 1


@_each("openvino", "openvino_ts", "onnxrt")
@pytest.mark.parametrize(
    ("given", "named"),
    [(aten.tanh.default, "tanh.default"), (aten.tanh, "tanh.default"), (aten.add, "add.Tensor")],
)
def test_disabled_ops_are_left_to_us(backend: str, given: object, named: str) -> None:
    x = torch.randn(4, 4)
    call = compiled(backend, two_layers, x, x, disabled_ops=[given])
    torch.testing.assert_close(call(x, x), two_layers(x, x))
    report = call.report()
    assert [row.op for row in report.unclaimed] == [f"aten.{named}"]
    assert report.unclaimed[0].reason == "the option disabled_ops names it"
    assert len(report.regions) == 2 and not report.kernels
    assert [row.op for row in report.externs] == [f"aten.{named}"]


@engines
@ways
def test_the_rest_needs_no_other_program(
    backend: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.Popen.__init__", refused)
    x, name = torch.randn(4, 4), f"no compiler for {backend} by {way}"
    call = by(way, backend, two_layers, name=name, disabled_ops=[aten.tanh, aten.add])
    torch.testing.assert_close(call(x, x), two_layers(x, x))
    (report,) = fusee.report(name)
    assert report.kernels and len(report.regions) == 2


@engines
def test_disabled_ops_of_a_cnn_and_of_attention(backend: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(F.conv2d(x, w, padding=1)) + 1
        return F.scaled_dot_product_attention(y, y * 2, y) @ w[0, 0]

    x, w = torch.randn(2, 3, 3, 3), torch.randn(3, 3, 3, 3)
    names = "aten.convolution.default", "aten.scaled_dot_product_attention.default"
    conv, attention = aten.convolution.default, aten.scaled_dot_product_attention
    for given, left in (
        ([], set()),
        ([aten.relu], set()),
        ([conv], {names[0]}),
        ([attention, conv], {*names}),
    ):
        call = compiled(backend, fn, x, w, disabled_ops=given)
        torch.testing.assert_close(call(x, w), fn(x, w))
        report = call.report()
        assert {r.op for r in report.unclaimed if "disabled_ops" in r.reason} == left
        ours = {row.op for row in report.externs} | {row.op for row in report.unclaimed}
        assert {op for row in report.regions for op in row.ops} >= {*names} - left
        assert ours >= left and not ours & ({*names} - left)


@engines
def test_reports_are_found_by_name(backend: str) -> None:
    fast = fusee.compile(two_layers, backend=backend, name=f"two layers in {backend}")
    fast(torch.randn(4, 8), torch.randn(8, 8))
    (report,) = fusee.report(f"two layers in {backend}")
    assert [row.engine for row in report.regions] == [backend]


@engines
@ways
def test_two_functions_have_their_own_options(backend: str, way: str) -> None:
    x, named = torch.randn(4, 4), f"{backend} by {way}"
    apart = by(way, backend, two_layers, name=f"apart, {named}", disabled_ops=[aten.tanh])
    whole = by(way, backend, two_layers, name=f"whole, {named}")
    for _ in range(2):
        torch.testing.assert_close(apart(x, x), two_layers(x, x))
        torch.testing.assert_close(whole(x, x), two_layers(x, x))
    (one,), (other,) = fusee.report(f"apart, {named}"), fusee.report(f"whole, {named}")
    assert [row.op for row in one.unclaimed] == ["aten.tanh.default"] and not other.unclaimed
    assert [row.calls for row in (*one.regions, *other.regions)] == [2, 2, 2]
    shown = rf"region_1  {backend} on CPU.*; 3 calls: 1 aten\.add\.Tensor, .*, [\d.]+ ms a call\n"
    assert re.search(shown, str(one)), str(one)
    assert "1x aten.tanh.default  the option disabled_ops names it\n" in str(one)


@_each("openvino", "openvino_ts", "onnxrt")
@ways
def test_weights_that_change_are_seen(backend: str, way: str) -> None:
    module, x = small(), torch.randn(3, 8)
    module[3].weight = nn.Parameter(torch.randn(16, 4).t())  # column-major
    call = by(way, backend, module, name=f"changing, {backend} by {way}")
    for step in range(6):  # the first changes compile anew, later ones find weights as inputs
        torch.testing.assert_close(call(x), module(x))
        module.get_parameter("0.weight").mul_(1.5)
        module.get_parameter("3.bias").add_(step)
        torch.testing.assert_close(call(x), module(x))
    (report,) = fusee.report(f"changing, {backend} by {way}")
    assert [(row.failed, row.calls) for row in report.regions] == [(None, 12)]


class Counted(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([3, 4]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return two_layers(x, x), self.count * self.count * 3


@engines
@pytest.mark.parametrize("changes", [1, 5])
def test_integers_that_grow_are_right(backend: str, changes: int) -> None:
    """OpenVINO computes integers in 32 bits, and was asked when they were small."""
    module, x = Counted(), torch.randn(8, 8)
    call = torch.compile(module, backend=through(backend, []))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(changes):
            torch.testing.assert_close(call(x), module(x))
            module.get_buffer("count").sub_(1)
        module.get_buffer("count").mul_(2**20)
        for _ in range(2):
            torch.testing.assert_close(call(x), module(x))
    assert len(told) == (backend == "openvino")


@engines
def test_integers_whose_changes_leave_no_trace_are_taken_for_any(backend: str) -> None:
    with torch.inference_mode():
        module, x = Counted(), torch.randn(8, 8)
        call = torch.compile(module, backend=through(backend, []))
        for factor in (1, 2**20):
            module.count.mul_(factor)
            torch.testing.assert_close(call(x), module(x))


@engines
def test_weights_are_not_kept_alive(backend: str) -> None:
    module = nn.Linear(64, 64).eval()
    call = torch.compile(module, backend=through(backend, []))
    call(torch.randn(2, 64))
    gone = weakref.ref(module.weight.untyped_storage())
    del module, call
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@engines
@ways
def test_threads_share_a_compiled_function(backend: str, way: str) -> None:
    module, (x,), _ = zoo.load("resnet18", "test")
    call = by(way, backend, module)
    call(x)
    inputs = [torch.randn_like(x) for _ in range(8)]
    want = [module(x) for x in inputs]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return [call(x) for _ in range(4)][-1]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got, expected in zip(pool.map(run, inputs), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_pool_whose_last_thing_another_thread_takes_makes_one_more() -> None:
    class Emptied(list[object]):
        def __len__(self) -> int:  # as whoever asked first would have heard
            return 1

    pool = Pool(object)
    pool.free = Emptied()
    first, second = pool.take(), pool.take()
    assert first is not second
    pool = Pool(object)
    pool.give(first)
    assert pool.take() is first and pool.take() is not first


def _attended(q: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * 2, q, q, mask) + 1


@engines
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_to_nothing_is_zero(backend: str, dtype: torch.dtype) -> None:
    """Where a mask hides all keys of a row ATen gives 0, engines NaN or the mean."""
    seen = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    mask = seen if dtype is torch.bool else torch.zeros(4, 4).masked_fill(~seen, -torch.inf)
    check(_attended, torch.randn(1, 2, 4, 8), mask, backend=backend, capture="fx")


@engines
def test_what_is_negated_when_it_is_read(backend: str) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return two_layers(x, w), two_layers(torch._neg_view(w), w)

    x = torch._neg_view(torch.randn(4, 4))
    check(fn, x, torch.randn(4, 4), backend=backend, capture="fx")


@engines
def test_a_result_that_nobody_needs(backend: str) -> None:
    """Its region had no results, or did not look whether the index is in range."""

    def fn(x: Tensor, at: Tensor) -> Tensor:
        x.index_select(0, at)
        return torch.tanh(x @ x.mT)

    fast, x = fusee.compile(fn, backend=backend), torch.randn(4, 4)
    torch.testing.assert_close(fast(x, torch.tensor([0, 3])), torch.tanh(x @ x.mT))
    with pytest.raises(IndexError):
        fast(x, torch.tensor([0, 4]))


@engines
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_process_goes_on(backend: str) -> None:
    """An engine's threads are not in it: it waited for them for ever."""
    net, x = small(), torch.randn(3, 8)
    fast = fusee.compile(net, backend=backend)
    want = fast(x)

    def child() -> None:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not in the child either
        warnings.simplefilter("ignore")  # one says that OpenVINO's regions are ours there
        with torch.no_grad():
            torch.testing.assert_close(fast(x), want)
            net.get_parameter("0.weight").mul_(2)
            torch.testing.assert_close(fast(x), net(x))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
    torch.testing.assert_close(fast(x), want)
