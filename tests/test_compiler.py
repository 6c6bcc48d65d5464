"""fusee.compiler: marks on functions, stances, filters of guards."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusee import api, compiler, log
from fusee.capture.policy import POLICY, Stance
from fusee.errors import (
    FuseeWarning,
    GraphBreakError,
    OptionError,
    RecompileError,
    RegionError,
    UnknownBackend,
)
from tests.counting import Counting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    compiler.set_stance("default")
    compiler.set_default_backend(None)


x = torch.linspace(-1, 1, 4)


# ------------------------------------------------------------------------------ disable


def test_a_disabled_function_ends_the_graph(backend: Counting) -> None:
    seen = []

    @compiler.disable(reason="it talks")
    def talk(t: Tensor) -> Tensor:
        seen.append(compiler.is_compiling())
        return t * 2

    def step(t: Tensor) -> Tensor:
        return talk(t + 1) - 1

    fast = api.compile(step, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(fast(x), (x + 1) * 2 - 1)
    assert backend.targets == [[operator.add], [operator.sub]]
    assert seen == [False, False]
    with pytest.raises(GraphBreakError, match=r"talk is disabled: it talks") as error:
        api.compile(step, backend=backend, fullgraph=True)(x)
    assert "test_compiler.py" in str(error.value) and "return talk(t + 1)" in str(error.value)


@pytest.mark.parametrize("recursive", [True, False])
def test_what_a_disabled_function_calls(backend: Counting, recursive: bool) -> None:
    inner = api.compile(lambda t: t * 3, backend=backend)

    def callee(t: Tensor) -> Tensor:
        return t * 2

    @compiler.disable(recursive=recursive)
    def outer(t: Tensor) -> Tensor:
        return callee(t) + inner(t)

    fast = api.compile(lambda t: outer(t + 1), backend=backend)
    torch.testing.assert_close(fast(x), (x + 1) * 5)
    # t + 1; then callee and inner, if they are compiled
    assert len(backend.graphs) == (1 if recursive else 3)


def test_disable_on_methods_modules_and_classes(backend: Counting) -> None:
    class Net(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return t * 2

    net = Net()
    assert compiler.disable(net) is net
    with pytest.warns(FuseeWarning, match=r"Net runs eagerly: .*Net.forward is disabled"):
        torch.testing.assert_close(api.compile(net, backend=backend)(x), x * 2)
    with pytest.warns(FuseeWarning, match=r"Net.forward is disabled: it runs eagerly"):
        torch.testing.assert_close(api.compile(compiler.disable(Net().forward))(x), x * 2)
    assert compiler.disable(Net) is Net
    with pytest.warns(FuseeWarning, match=r"Net runs eagerly: .*Net.forward is disabled"):
        torch.testing.assert_close(api.compile(Net(), backend=backend)(x), x * 2)
    assert backend.graphs == []
    with pytest.raises(OptionError, match="not int"):
        compiler.disable(3)  # type: ignore[call-overload]


def test_torch_marks_are_honoured(backend: Counting) -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def talk(t: Tensor) -> Tensor:
        return t * 2

    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def whole(t: Tensor) -> Tensor:
        return (t + 1) * 2

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def settings() -> int:
        return len(Path(__file__).read_text()[:3])

    def step(t: Tensor) -> Tensor:
        return talk(whole(t) + settings())

    torch.testing.assert_close(api.compile(step, backend=backend)(x), ((x + 1) * 2 + 3) * 2)
    assert backend.targets == [[whole, operator.add]]


# ------------------------------------------------------------------------------ other marks


def test_allow_in_graph(backend: Counting) -> None:
    def whole(t: Tensor) -> Tensor:
        return torch.sin(t) + 1

    assert compiler.allow_in_graph([whole]) == [whole]
    fast = api.compile(lambda t: whole(t) * 2, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), (x.sin() + 1) * 2)
    assert backend.targets == [[whole, operator.mul]]


def test_index_of_polyfill(backend: Counting) -> None:
    def position(t: Tensor) -> Tensor:
        return t + operator.indexOf([1, 2, 3, 4, 5], 3)

    with pytest.raises(OptionError, match="signature"):
        compiler.substitute_in_graph(operator.indexOf)(lambda a: 1)

    @compiler.substitute_in_graph(operator.indexOf)
    def index_of(a: Any, b: Any, /) -> int:
        for k, item in enumerate(a):
            if item is b or item == b:
                return k
        raise ValueError("sequence.index(x): x not in sequence")

    fast = api.compile(position, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), x + 2)
    assert index_of([5], 5) == 0


def test_assume_constant_result(backend: Counting) -> None:
    calls = []

    @compiler.assume_constant_result
    def read() -> float:
        calls.append(threading.get_ident())
        return 2.0

    fast = api.compile(lambda t: t * read(), backend=backend, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(fast(x), x * 2)
    assert len(calls) == 1


def test_is_compiling(backend: Counting) -> None:
    def step(t: Tensor) -> Tensor:
        asked = (compiler.is_compiling(), torch.compiler.is_dynamo_compiling())
        return t + 1 if asked == (True, True) and not compiler.is_exporting() else t - 1

    assert not compiler.is_compiling()
    torch.testing.assert_close(api.compile(step, backend=backend)(x), x + 1)


def test_marks_that_change_nothing_yet(backend: Counting) -> None:
    @compiler.nested_compile_region
    def layer(t: Tensor) -> Tensor:
        return t.relu()

    compiler.mark_static(x, 0)
    compiler.cudagraph_mark_step_begin()
    fast = api.compile(lambda t: layer(layer(t)), backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), x.relu())
    with pytest.raises(OptionError, match="none at 3"):
        compiler.mark_static(x, 3)


def test_a_nested_region_is_compiled_once_for_all_its_calls() -> None:
    @compiler.nested_compile_region
    def layer(t: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm((t @ w).relu(), (8,)) + t

    def stacked(count: int) -> set[str]:
        def program(t: Tensor, w: Tensor) -> Tensor:
            for _ in range(count):
                t = layer(t, w)
            return t

        name = f"{count} calls of a region"
        given = torch.randn(4, 8), torch.randn(8, 8)
        fast = api.compile(program, name=name, fullgraph=True)
        torch.testing.assert_close(fast(*given), program(*given))
        (report,) = api.report(name)
        assert len(report.kernels) >= count
        return {row.function for row in report.kernels}

    assert len(stacked(12)) == len(stacked(3)) <= 3


# ------------------------------------------------------------------------------ stances


def grown(t: Tensor) -> Tensor:
    return t + 1


def test_force_eager(backend: Counting) -> None:
    fast = api.compile(grown, backend=backend)
    with compiler.set_stance("force_eager"):
        fast(x)
    assert not backend.graphs

    @compiler.set_stance("force_eager")
    def step() -> Tensor:
        return fast(x)

    torch.testing.assert_close(step(), x + 1)
    assert not backend.graphs
    fast(x)
    assert len(backend.graphs) == 1
    compiler.set_stance("force_eager")
    torch.testing.assert_close(fast(x), x + 1)
    compiler.set_stance("default")


def test_stances_about_compiling_again(backend: Counting) -> None:
    fast = api.compile(grown, backend=backend)
    fast(x)
    longer = torch.ones(7)
    with compiler.set_stance("eager_on_recompile"):
        torch.testing.assert_close(fast(longer), longer + 1)
        fast(x)
    with compiler.set_stance("fail_on_recompile"):
        fast(x)
        with pytest.raises(RecompileError, match=r"t was float32\[4\].*, is float32\[7\]"):
            fast(longer)
    assert len(backend.graphs) == 1
    other = api.compile(grown, backend=backend)
    with compiler.set_stance("eager_then_compile"):
        other(longer)
        assert len(backend.graphs) == 1
        other(x)
    assert len(backend.graphs) == 2


def test_stances_are_refused_at_once() -> None:
    with pytest.raises(OptionError, match="'force_eager'"):
        compiler.set_stance("force_eagr")
    with pytest.raises(OptionError, match="force_backend"):
        compiler.set_stance("force_eager", force_backend="eager")
    with pytest.raises(UnknownBackend, match="eagr"):
        compiler.set_stance("default", force_backend="eagr")
    assert POLICY.stance == Stance()


def test_a_forced_backend(backend: Counting) -> None:
    other = Counting()
    fast = api.compile(grown, backend=backend)
    fast(x)
    for _ in range(2):
        with compiler.set_stance("default", force_backend=other):
            torch.testing.assert_close(fast(x), x + 1)
            torch.testing.assert_close(fast(x), x + 1)
        fast(x)
    assert len(backend.graphs) == len(other.graphs) == 1


def test_versions_that_are_not_checked(backend: Counting) -> None:
    fast = api.compile(lambda t, by: t * by, backend=backend)
    fast(x, 2)
    with compiler.set_stance("default", skip_guard_eval_unsafe=True):
        torch.testing.assert_close(fast(x, 3), x * 2)  # unsafe, as it says
    torch.testing.assert_close(fast(x, 3), x * 3)
    with compiler.set_stance("default", skip_guard_eval_unsafe=True):
        torch.testing.assert_close(fast(x, 3), x * 3)  # of two versions, the right one
    assert len(backend.graphs) == 2


def test_stances_of_torch_are_honoured(backend: Counting) -> None:
    other = Counting()
    fast = api.compile(grown, backend=backend)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(fast(x), x + 1)
    assert not backend.graphs
    with torch.compiler.set_stance("default", force_backend=other):
        torch.testing.assert_close(fast(x), x + 1)
    assert not backend.graphs and len(other.graphs) == 1
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RecompileError):
        fast(x)
    fast(x)
    assert len(backend.graphs) == 1


def test_no_stance_inside_a_compiled_function(backend: Counting) -> None:
    def step(t: Tensor) -> Tensor:
        compiler.set_stance("force_eager")
        return t + 1

    with pytest.raises(RegionError, match="set_stance") as error:
        api.compile(step, backend=backend)(x)
    assert 'compiler.set_stance("force_eager")' in str(error.value)
    assert not backend.graphs


# ------------------------------------------------------------------------------ breaks as errors


def test_error_on_graph_break(backend: Counting) -> None:
    def breaks(t: Tensor) -> Tensor:
        return t + 1 if t.sum() > 0 else t - 1

    def strict(t: Tensor) -> Tensor:
        with compiler.error_on_graph_break(True):
            return breaks(t)

    def lenient(t: Tensor) -> Tensor:
        with compiler.error_on_graph_break(False):
            t = breaks(t)
        return t * 2

    with pytest.raises(GraphBreakError, match="bool"):
        api.compile(strict, backend=backend)(x)
    fast = api.compile(lenient, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x + 1), (x + 2) * 2)
    with pytest.raises(GraphBreakError):
        api.compile(compiler.error_on_graph_break(True)(breaks), backend=backend)(x)
    torch.testing.assert_close(api.compile(breaks, backend=backend)(x + 1), x + 2)


# ------------------------------------------------------------------------------ the rest


def test_backends() -> None:
    assert "fusee" in compiler.list_backends() and "inductor" in compiler.list_backends()
    assert "eager" not in compiler.list_backends()
    assert "eager" in compiler.list_backends(exclude_tags=None)
    seen = Counting()
    compiler.set_default_backend(seen)
    api.compile(grown)(x)
    assert len(seen.graphs) == 1
    assert compiler.get_default_backend() is seen
    with pytest.raises(UnknownBackend, match="'inductor'"):
        compiler.set_default_backend("inducter")


def test_reset(backend: Counting) -> None:
    fast = api.compile(grown, backend=backend)
    fast(x)
    compiler.reset()
    torch.testing.assert_close(fast(x), x + 1)
    assert len(backend.graphs) == 2


factor = 2.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.scale = 3.0

    def forward(self, t: Tensor) -> Tensor:
        return self.drop(self.inner(t)) * self.scale * factor


@pytest.mark.parametrize(
    ("chosen", "inner", "own", "global_", "shape"),
    [
        (None, True, True, True, True),
        (compiler.skip_guard_on_inbuilt_nn_modules_unsafe, False, True, True, True),
        (compiler.skip_guard_on_all_nn_modules_unsafe, False, False, True, True),
        (compiler.keep_tensor_guards_unsafe, False, False, False, True),
        (compiler.skip_guard_on_globals_unsafe, True, True, False, True),
        (compiler.skip_all_guards_unsafe, False, False, False, False),
    ],
)
def test_guard_filters(
    backend: Counting,
    monkeypatch: pytest.MonkeyPatch,
    chosen: Any,
    inner: bool,
    own: bool,
    global_: bool,
    shape: bool,
) -> None:
    """Each change of the program is noticed, or not if the filter leaves its guard out."""
    net = Scaled().eval()
    options = {"guard_filter_fn": chosen} if chosen else {}
    fast = api.compile(net, backend=backend, options=options)

    def compiled_again() -> bool:
        before = len(backend.graphs)
        with warnings.catch_warnings(), torch.no_grad():
            fast(x)
        return len(backend.graphs) > before

    assert compiled_again() and not compiled_again()
    net.drop.training = True
    assert compiled_again() == inner
    net.scale = 4.0
    assert compiled_again() == own
    monkeypatch.setitem(globals(), "factor", 5.0)
    assert compiled_again() == global_
    before = len(backend.graphs)
    with torch.no_grad():
        fast(torch.ones(2, 4))
    assert (len(backend.graphs) > before) == shape


def test_a_guard_filter_of_ones_own(backend: Counting) -> None:
    seen: list[compiler.Guard] = []

    def choose(guards: list[compiler.Guard]) -> list[bool]:
        seen.extend(guards)
        return [guard.name != "k" for guard in guards]

    def scaled(t: Tensor, k: int) -> Tensor:
        return t * k

    fast = api.compile(scaled, backend=backend, options={"guard_filter_fn": choose})
    torch.testing.assert_close(fast(x, 2), x * 2)
    torch.testing.assert_close(fast(x, 3), x * 2)  # unsafe, as asked
    found = {guard.name: guard for guard in seen}
    assert found["k"].value == 2 and found["t"].guard_type == "TENSOR_MATCH"
    wrong = api.compile(scaled, backend=backend, options={"guard_filter_fn": lambda guards: []})
    with pytest.raises(OptionError, match="0 answers"):
        wrong(x, 2)


# ------------------------------------------------------------------------------ wrong values


@pytest.mark.parametrize("mark", ["mark_dynamic", "maybe_mark_dynamic", "mark_unbacked"])
@pytest.mark.parametrize("index", ["0", 1.0, True, 2, (0, 5), [None]])
def test_an_axis_that_a_tensor_has_not_is_told(mark: str, index: Any) -> None:
    t = torch.ones(3, 4)
    with pytest.raises(OptionError, match=r"has none at [\s\S]*int from -2 to 1"):
        getattr(compiler, mark)(t, index)
    assert not t.__dict__


@pytest.mark.parametrize(("least", "most"), [(9, 2), ("2", None), (None, 4.0)])
def test_a_range_without_sizes_is_told(least: Any, most: Any) -> None:
    for mark in (compiler.mark_dynamic, compiler.mark_unbacked):
        t = torch.ones(3)
        with pytest.raises(OptionError, match="no size is from"):
            mark(t, 0, min=least, max=most)
        assert not t.__dict__


def test_a_tensor_of_another_dtype_is_told_with_the_functions_line() -> None:
    fast = api.compile(lambda t: t + 1, backend="eager")
    fast(x)
    told: list[log.Record] = []
    undo = log.subscribe(told.append, "recompiles")
    refused = pytest.raises(RecompileError, match=r"float64(.|\n)*test_compiler.py:\d+ in <lambda>")
    with compiler.set_stance("fail_on_recompile"), refused:
        fast(x.double())
    fast(x.double())
    undo()
    assert [
        record for record in told if "read at" in record.text and "test_compiler" in record.text
    ]


def test_settings_for_a_while() -> None:
    before = compiler.config.recompile_limit
    with compiler.config.patch(recompile_limit=3):
        assert compiler.config.recompile_limit == 3
    for wrong in ({"recompile_limit": "3"}, {"recompile_limits": 3}, {"cache_size_limit": 3}):
        with pytest.raises(OptionError, match="recompile_limit"), compiler.config.patch(**wrong):
            pass
    assert compiler.config.recompile_limit == before


def test_a_class_without_a_call_is_not_disabled() -> None:
    class Plain:
        pass

    with pytest.raises(OptionError, match=r"Plain has no __call__\(\)"):
        compiler.disable(Plain)
    assert "__call__" not in vars(Plain)
