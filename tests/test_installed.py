"""fusee.install(): what torch's names do then, and that uninstall() undoes it."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee import compiler
from fusee.api import Compiler
from fusee.backends import dynamo
from fusee.capture.policy import POLICY
from fusee.errors import FuseeWarning, GraphBreakError, OptionError
from tests.counting import Counting

x = torch.linspace(-1, 1, 4)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    torch._dynamo.reset()
    fusee.install()
    yield
    fusee.uninstall()
    compiler.set_default_backend(None)


def grown(t: Tensor) -> Tensor:
    return t + 1


def breaks(t: Tensor) -> Tensor:
    t = t.sin()
    if t.sum() > 0:
        t = t * 2
    return t.cos()


def names() -> dict[str, Any]:
    """All that install() might have changed."""
    owners: list[Any] = [torch, torch.compiler, torch._dynamo, torch._logging, nn.Module]
    return {f"{o.__name__}.{name}": value for o in owners for name, value in vars(o).items()}


def test_uninstall_undoes_all() -> None:
    replaced = names()
    fusee.uninstall()
    stock = names()
    assert (
        torch.compile.__module__ == "torch"
        and nn.Module.compile.__module__ == "torch.nn.modules.module"
    )
    changed = {name for name in stock if replaced[name] is not stock[name]}
    assert {
        "torch.compile",
        "torch.compiler.reset",
        "torch._dynamo.reset",
        "Module.compile",
    } < changed
    for name in changed:
        assert "fusee" not in str(getattr(stock[name], "__module__", "")), name
    fusee.install()
    fusee.install()
    fusee.uninstall()
    again = names()
    assert all(again[name] is stock[name] for name in stock)


LAZY = """
import sys, fusee
fusee.install()
import torch
assert "torch._dynamo" not in sys.modules
torch.compiler.reset()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert "reset_both" in torch._dynamo.reset.__code__.co_name, torch._dynamo.reset
fusee.uninstall()
assert torch._dynamo.reset.__code__.co_name == "reset"
fusee.install()
fusee.uninstall()
assert torch._dynamo.reset.__code__.co_name == "reset" and torch._dynamo.__spec__.loader
print("ok")
"""


def test_what_is_imported_later_is_replaced_then() -> None:
    ended = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert ended.stdout == "ok\n", ended.stderr


# ------------------------------------------------------------------------------ torch.compiler


@pytest.mark.parametrize("reset", ["torch.compiler.reset", "torch._dynamo.reset"])
def test_resets_reset_both(backend: Counting, reset: str) -> None:
    stocks = Counting()
    fast: Any = torch.compile(grown, backend=backend)
    fusee.uninstall()
    stock = torch.compile(breaks, backend=stocks)
    fusee.install()
    fast(x), stock(x)
    before = len(stocks.graphs)
    owner, _, name = reset.removeprefix("torch.").partition(".")
    getattr(getattr(torch, owner), name)()
    fast(x), stock(x)
    assert len(backend.graphs) == 2 and len(stocks.graphs) == 2 * before


def test_stances_of_torch_rule_both(backend: Counting) -> None:
    fast: Any = torch.compile(grown, backend=backend)
    with torch.compiler.set_stance("force_eager"):
        fast(x)
    assert not backend.graphs
    fast(x)
    assert len(backend.graphs) == 1


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"), reason="this torch has none"
)
def test_default_backend(backend: Any) -> None:
    torch.compiler.set_default_backend(backend)
    torch.compile(grown)(x)
    now: Any = torch.compiler.get_default_backend()
    assert len(backend.graphs) == 1 and now is backend


def test_registered_names(backend: Any) -> None:
    torch._dynamo.register_backend(backend, name="counting_once")
    try:
        assert "counting_once" in torch.compiler.list_backends()
        assert "counting_once" in compiler.list_backends()
        torch.compile(breaks, backend="counting_once")(x)
        assert len(backend.graphs) > 1
    finally:
        registry = torch._dynamo.backends.registry
        del registry._COMPILER_FNS["counting_once"], registry._BACKENDS["counting_once"]


FILTERS = [name for name in torch.compiler.__all__ if name.endswith("_unsafe")]


@pytest.mark.parametrize("name", FILTERS)
def test_guard_filters_of_torch_choose_as_ours(name: str) -> None:
    torchs, ours, answers = getattr(torch.compiler, name), getattr(compiler, name), []

    def both(guards: Any) -> Any:
        answers.append((list(torchs(guards)), list(ours(guards))))
        return answers[-1][0]

    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()
    fast = torch.compile(net, options={"guard_filter_fn": both})
    with torch.no_grad():
        fast(x)
    (found,) = answers
    assert found[0] == found[1] and (name == "skip_all_guards_unsafe") == (not any(found[0]))
    torch.compile(net, options={"guard_filter_fn": torchs})(x)


def test_explain_of_torch_tells_of_our_capture() -> None:
    for target in (breaks, torch.compile(breaks)):
        found = torch._dynamo.explain(target)(x.abs())
        assert (found.graph_count, found.graph_break_count) == (2, 1)
        assert found.op_count == sum(map(len, found.ops_per_graph)) == 5
        assert "t.sum() > 0" in str(found.break_reasons[0].user_stack[0].line)
        assert "Graph Count: 2" in str(found) and found.break_reasons[0].reason in str(found)
        assert isinstance(found.graphs[0], torch.fx.GraphModule)


def test_marks_of_torch_reach_both(backend: Counting) -> None:
    import operator

    @torch.compiler.substitute_in_graph(operator.length_hint, skip_signature_check=True)
    def length_hint(a: Any, default: int = 0, /) -> int:
        return 3

    compile: Any = torch.compile
    fast = compile(lambda t: t + operator.length_hint([]), backend=backend)
    torch.testing.assert_close(fast(x), x + 3)
    del POLICY.substitutes[operator.length_hint]


def test_regions_of_torch_hold_for_us(backend: Counting) -> None:
    def strict(t: Tensor) -> Tensor:
        with torch._dynamo.error_on_graph_break(True):
            return breaks(t)

    with pytest.raises(GraphBreakError):
        torch.compile(strict, backend=backend)(x)

    def regions(t: Tensor) -> Tensor:
        for mark in (torch.compiler, compiler):
            t = mark.nested_compile_region(grown)(t)
        return t

    torch.testing.assert_close(torch.compile(regions, backend=backend, fullgraph=True)(x), x + 2)


# ------------------------------------------------------------------------------ options, modes


def test_options_of_inductor_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_said", set())
    options: Any = {
        "max_autotune": True,
        "triton.cudagraphs": True,
        "epilogue_fusion": False,
        "threads": 1,
    }
    with pytest.warns(FuseeWarning) as told:
        fast: Any = torch.compile(grown, options=options)
    (one,) = told
    assert one.filename == __file__
    for part in (
        "max_autotune (here: nothing is tuned)",
        'backend="cudagraphs"',
        "epilogue_fusion (here: without",
    ):
        assert part in str(one.message)
    torch.testing.assert_close(fast(x), x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(grown, options=options)
        nn.Linear(4, 4).compile(options={"max_autotune": True})
    with pytest.raises(OptionError, match="'max_autotun'"):
        torch.compile(grown, options={"max_autotun": True})
    fusee.uninstall()
    with pytest.raises(OptionError, match="'max_autotune'"):
        fusee.compile(grown, options={"max_autotune": True})


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@pytest.mark.parametrize("route", ["fusee", "installed", "stock"])
def test_modes_are_taken_by_every_route(route: str) -> None:
    if route != "installed":
        fusee.uninstall()
    compile: Any = fusee.compile if route == "fusee" else torch.compile
    for mode in MODES:
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(compile(grown, backend="fusee", mode=mode)(x), x + 1)
    with pytest.raises(Exception, match=r"no mode .max-autotun"):
        compile(grown, backend="fusee", mode="max-autotun")(x)


# ------------------------------------------------------------------------------ logs


def test_logs_of_torch_show_what_we_compile() -> None:
    taken: list[str] = []

    class Taking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            taken.append(f"{record.name.rpartition('.')[2]}: {record.getMessage()}")

    handler, logger = Taking(logging.DEBUG), logging.getLogger("torch._dynamo")
    sizes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    logs: Any = torch._logging
    logs.set_logs(
        graph_breaks=True, recompiles=True, guards=True, output_code=True, dynamic=logging.INFO
    )
    for one in (logger, sizes):
        one.addHandler(handler)
    try:
        fast: Any = torch.compile(breaks)
        fast(x)
        compile: Any = torch.compile
        scaled = compile(lambda t, by: t * by)
        with torch.no_grad():
            for by in (2.0, 3.0):
                scaled(x, by)
    finally:
        logs.set_logs()
        for one in (logger, sizes):
            one.removeHandler(handler)
    for start, part in (
        ("__graph_breaks", "if t.sum() > 0"),
        ("__recompiles", "by was 2.0, is 3.0"),
        ("__guards", "def check("),
        ("__output_code", "def call("),
        ("symbolic_shapes", "by"),
    ):
        assert any(text.startswith(start) and part in text for text in taken), start
    taken.clear()
    torch.compile(breaks)(x + 1)
    assert not taken


# ------------------------------------------------------------------------------ fusee.compiler


# torch.compiler.__all__ of the versions that we support.
OTHERS = [
    "PrecompileError", "cudagraph_mark_warmup_incomplete", "get_default_backend", "nonstrict_trace",
    "precompile", "set_default_backend",
]  # fmt: skip


def test_it_has_every_name_of_torchs() -> None:
    assert not [name for name in (*torch.compiler.__all__, *OTHERS) if not hasattr(compiler, name)]
    assert not [
        name
        for name in compiler.__all__
        if not getattr(compiler, name).__doc__ and name != "config"
    ]


def test_what_cannot_be_says_what_to_use() -> None:
    for call in (
        lambda: compiler.load_compiled_function(io.BytesIO()),
        lambda: compiler.precompile.capture(grown),
        lambda: compiler.precompile.load("file"),
        lambda: compiler.set_enable_guard_collectives(True),
        lambda: compiler.config.verbose,
        lambda: setattr(compiler.config, "recompil_limit", 3),
        lambda: setattr(compiler.config, "recompile_limit", 0),
    ):
        with pytest.raises(OptionError) as error:
            call()
        assert error.value.did and (error.value.remedy or "int > 0" in error.value.what)
    assert compiler.set_enable_guard_collectives(False) is False
    assert not hasattr(compiler.config, "verbose")
    assert issubclass(OptionError, compiler.PrecompileError)


def test_config_sets_the_limit_of_versions(backend: Counting) -> None:
    compiler.config.recompile_limit = 2
    try:
        fast: Any = compiler.compile(lambda t, text: t * len(text), backend=backend)
        with pytest.warns(FuseeWarning, match="has 2 compiled versions"):
            for text in ("a", "of", "the"):
                torch.testing.assert_close(fast(x, text), x * len(text))
        assert len(backend.graphs) == 2
    finally:
        compiler.config.recompile_limit = 8
    with pytest.raises(OptionError, match=r"(?s)no setting 'recompile_limits'.*#option-error"):
        compiler.config.recompile_limits = 4
    assert isinstance(compiler.compile(backend=backend), Compiler)


def test_wrap_numpy_takes_and_gives_tensors() -> None:
    import numpy as np

    @compiler.wrap_numpy
    def shifted(pair: tuple[Any, Any], by: float) -> dict[str, Any]:
        assert type(pair[0]) is np.ndarray
        return {"sum": pair[0] + pair[1] * by, "by": by}

    for function in (shifted, fusee.compile(shifted)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = function((x, x), by=2.0)
        torch.testing.assert_close(found["sum"], x * 3)
        assert found["by"] == 2.0


def test_nonstrict_trace_is_one_node(backend: Counting) -> None:
    @compiler.nonstrict_trace
    def whole(t: Tensor) -> Tensor:
        return t.sin() + 1

    fast: Any = fusee.compile(lambda t: whole(t) * 2, backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), (x.sin() + 1) * 2)
    assert backend.targets[0][0] is whole


# ------------------------------------------------------------------------------ artifacts

PROGRAM = """
import sys, torch, fusee
from pathlib import Path
from fusee import compiler, log

def step(x, w):
    return torch.softmax(x * w, -1).sum(0)

bundle = Path(sys.argv[1])
if bundle.exists():
    print(len(compiler.load_cache_artifacts(bundle.read_bytes()).keys) > 0)
seen = []
log.subscribe(lambda record: seen.append(record.text), "cache")
with torch.no_grad():
    fusee.compile(step)(torch.ones(4, 8), torch.ones(8))
if not bundle.exists():
    data, info = compiler.save_cache_artifacts()
    assert info.keys and info.size
    bundle.write_bytes(data)
print(any("was kept as" in text for text in seen))
"""


def test_artifacts_carry_code_and_captures(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "launch.py"
    script.write_text(PROGRAM)
    monkeypatch.setenv("FUSEE_KEEP_CAPTURES", "1")
    found = []
    for folder in ("one", "another"):
        monkeypatch.setenv("FUSEE_CACHE_DIR", str(tmp_path / folder))
        command = [sys.executable, str(script), str(tmp_path / "bundle")]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert not ended.returncode, ended.stderr
        found.append(ended.stdout.split())
    assert found == [["False"], ["True", "True"]]
    one, another = ({p.name for p in (tmp_path / f).iterdir()} for f in ("one", "another"))
    assert one <= another


def test_wrong_artifacts_are_refused() -> None:
    with torch.no_grad():
        fusee.compile(lambda t: t.sin() * 3 + 1)(x)
    saved = compiler.save_cache_artifacts()
    assert saved is not None
    for wrong in (b"", b"something", saved[0][:-1], saved[0][:50] + b"?" + saved[0][51:], "text"):
        with pytest.raises(OptionError, match="no artifacts"):
            compiler.load_cache_artifacts(wrong)  # type: ignore[arg-type]
    again = compiler.load_cache_artifacts(saved[0])
    assert (
        again is not None and set(again.keys) == set(saved[1].keys) and again.size == saved[1].size
    )


def test_artifacts_of_other_versions_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusee.errors import CacheWarning
    from fusee.runtime import cache as artifacts

    with torch.no_grad():
        fusee.compile(lambda t: t.sin() * 3 + 2)(x)
    saved = compiler.save_cache_artifacts()
    assert saved is not None
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert "torch 2.10.0" in artifacts._versions()
    with pytest.warns(CacheWarning, match=r"torch 2\.1\d.*, here torch 2\.10\.0"):
        assert compiler.load_cache_artifacts(saved[0]) is None


def test_a_compiled_module_is_torchs_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    made: Any = torch.compile(model)
    stock = torch._dynamo.OptimizedModule
    for one in (
        made,
        copy.deepcopy(made),
        made.to(torch.float64),
        pickle.loads(pickle.dumps(made)),
    ):
        assert isinstance(one, stock) and isinstance(one, nn.Sequential)
        assert not isinstance(one, nn.Linear) and one.__class__.__name__ == "Sequential"
    assert not isinstance(model, stock) and isinstance(type(made), type)
    made._orig_mod = model  # as accelerate does, which unwraps models
    assert [*model._modules] == ["0", "1"] and made(x.double()).dtype == torch.float64
    assert type(made.__class__(nn.ReLU())) is nn.Sequential


def test_errors_are_torchs_too() -> None:
    def refuses(gm: Any, examples: Any) -> Any:
        raise ValueError("no such luck")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such luck") as caught:
        torch.compile(grown, backend=refuses)(x)
    assert type(caught.value.inner_exception) is ValueError
    fast = torch.compile(grown, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        fast(x)
        with pytest.raises(torch._dynamo.exc.RecompileError, match="error_on_recompile is on"):
            fast(x[:2])
    torch.testing.assert_close(fast(x[:2]), x[:2] + 1)


def test_counters_of_torchdynamo_count() -> None:
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    torch.compile(breaks, backend="eager")(x)
    assert counters["frames"] == {"total": 2, "ok": 2}
    assert counters["stats"] == {"unique_graphs": 2, "calls_captured": 4}
    ((reason, count),) = counters["graph_break"].items()
    assert count == 1 and "bool()" in reason
    fusee.uninstall()
    fusee.compile(breaks, backend="eager")(x)
    assert counters["stats"]["unique_graphs"] == 2
