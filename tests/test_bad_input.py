"""What cannot be compiled: an error of ours, or eager by stated plan; nothing is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.testing._internal.two_tensor import TwoTensor

import fusee
from fusee import backends, config, log
from fusee.backends import lookup
from fusee.backends.native import compile_native
from fusee.backends.report import CompiledGraph
from fusee.errors import (
    BackendError,
    CacheWarning,
    FuseeWarning,
    InputError,
    MissingFake,
    MissingPackage,
    OptionError,
    SettingError,
)
from tests.check import check

ROOT = Path(__file__).parent.parent


def program(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1)


def next_call_works() -> None:
    check(program, torch.randn(3, 5))


def compile_fx(fn: Callable[..., Any], *args: Any) -> CompiledGraph:
    with torch.no_grad():
        return compile_native(fx.symbolic_trace(fn), list(args), {})


# ------------------------------------------------------------------------------ eager by plan


def doubled(x: Tensor) -> Tensor:
    return x * 2


EAGER = {
    "meta": (lambda: torch.randn(3, 4, device="meta"), "is on meta"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "sparse"),
    "mkldnn": (lambda: torch.randn(3, 4).to_mkldnn(), "mkldnn"),
    "subclass": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "a subclass of torch.Tensor"),
}


@pytest.mark.parametrize("kind", EAGER)
def test_what_is_no_dense_tensor_on_the_cpu_runs_eagerly(kind: str) -> None:
    make, reason = EAGER[kind]
    x = make()
    with pytest.warns(FuseeWarning, match=f"runs eagerly: .*{reason}"):
        compiled = compile_fx(doubled, x)
    assert reason in str(compiled.report().eager)
    assert compiled.report() in fusee.report()
    got, want = compiled(x), doubled(x)
    assert type(got) is type(want) and got.device == want.device and got.layout == want.layout
    if kind != "meta":
        as_dense = [y.to_dense() if y.layout is not torch.strided else y for y in (got, want)]
        assert torch.equal(*as_dense)
    next_call_works()


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.quint8),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
    ],
)
def test_stock_torch_compile_leaves_out_what_dynamo_does_not_capture(
    make: Callable[[], Tensor],
) -> None:
    def dense(x: Tensor) -> Tensor:
        return (x.dequantize() if x.is_quantized else x.to_dense()) + 1

    x = make()
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FuseeWarning)
        assert torch.equal(torch.compile(dense, backend="fusee")(x), dense(x))
    next_call_works()


def test_what_no_capture_takes_runs_eagerly_with_one_warning_that_names_the_line() -> None:
    def program(x: Tensor) -> Tensor:
        return (x * 2).sin()

    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for x, reason in (
        (jagged, "depends on the values"),
        (TwoTensor(rows[0], rows[0] + 1), "is a TwoTensor"),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="fusee", fullgraph=True)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = [compiled(x), compiled(x)]
        (ours,) = (str(w.message) for w in caught if issubclass(w.category, FuseeWarning))
        assert reason in ours and "test_bad_input.py" in ours and "(x * 2).sin()" in ours
        for y in got:
            assert type(y) is type(x)
            parts = ("_values",) if x is jagged else ("a", "b")
            assert all(torch.equal(getattr(y, k), getattr(program(x), k)) for k in parts)
        next_call_works()


# ------------------------------------------------------------------------------ custom operators


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Operators of a user's library; what they compute goes through numpy, so no trace sees it."""

    @torch.library.custom_op("bad_input::plain", mutates_args=())
    def plain(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    @torch.library.custom_op("bad_input::two", mutates_args=())
    def two(xs: list[Tensor], by: float) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(xs[0].numpy() * by), torch.from_numpy(xs[1].numpy().sum(0))

    @two.register_fake
    def _(xs: list[Tensor], by: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(xs[0]), xs[1].new_empty(xs[1].shape[1:])

    @torch.library.custom_op("bad_input::add_to", mutates_args=("x",))
    def add_to(x: Tensor, y: Tensor) -> None:
        np.add(x.numpy(), y.numpy(), out=x.numpy())

    @torch.library.custom_op("bad_input::swap", mutates_args=("x", "y"))
    def swap(x: Tensor, y: Tensor, by: float = 1.0) -> Tensor:
        old = x.numpy().copy()
        x.numpy()[...] = y.numpy() * by
        y.numpy()[...] = old
        return torch.from_numpy(old + 1)

    @swap.register_fake
    def _(x: Tensor, y: Tensor, by: float = 1.0) -> Tensor:
        return torch.empty_like(x)

    @torch.library.custom_op("bad_input::mystery", mutates_args=("x",))
    def mystery(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() + 1)

    # as written before custom_op: nobody says that what gives nothing has no shape
    library = torch.library.Library("bad_input", "FRAGMENT")
    library.define("both_(Tensor(a!) x, Tensor[] ys, Tensor(b!) z) -> ()")

    @torch.library.impl(library, "both_", "CPU")
    def both(x: Tensor, ys: list[Tensor], z: Tensor) -> None:
        x.add_(ys[0])
        z.copy_(torch.from_numpy(np.sin(ys[1].numpy())))

    yield torch.ops.bad_input


def calling(op: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: op(x.add_(1)) * 2


def test_an_operator_without_fake_implementation_is_our_error(ops: Any) -> None:
    for op in (ops.plain, ops.mystery):
        x = torch.randn(3)
        before = x.clone()
        with pytest.raises(MissingFake, match=f"register_fake\\('{op.default._name[:15]}"):
            compile_fx(calling(op), x)
        assert torch.equal(x, before)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="no fake impl registered"):
        torch.compile(lambda x: ops.plain(x) * 2, backend="fusee", fullgraph=True)(x)
    next_call_works()


def test_custom_operators_are_calls(ops: Any) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ops.two([x + 1, x.t() * 2], 2.5)
        return a * 2, b - 1

    check(both, torch.randn(3, 4))
    (row,) = compile_fx(both, torch.randn(3, 4)).report().externs
    assert row.op == "bad_input.two.default"


def test_custom_operators_may_write_to_inputs_views_and_intermediates(ops: Any) -> None:
    def to_input(x: Tensor, y: Tensor) -> Tensor:
        ops.add_to(x, y * 2)
        return x * 3

    def to_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x * 2
        row = z[1]
        old = ops.swap(row, y, by=3.0)
        return z + 1, old

    def without_fake(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = y * 2
        ops.both_(x[0], [y, y + 1], z)
        return x * 3, z

    check(to_input, torch.randn(4), torch.randn(4))
    check(without_fake, torch.randn(3, 4), torch.randn(4))
    check(to_view, torch.randn(3, 4), torch.randn(4))
    check(to_view, torch.randn(3, 4), torch.randn(4), capture="fx")
    externs = compile_fx(to_input, torch.randn(4), torch.randn(4)).report().externs
    assert [row.op for row in externs] == ["fusee.bad_input__add_to__default.default"]


def test_what_is_no_compiler_of_graphs_is_told() -> None:
    wrong: Any = 3
    with pytest.raises(OptionError, match=r"functions \(gm, example_inputs\), not int"):
        backends.aot(fw_compiler=wrong)
    nothing: Any = backends.aot(fw_compiler=lambda gm, inputs: None)
    with pytest.raises(BackendError, match=r"returned NoneType, which[\s\S]*x \* 2"):
        fusee.compile(program, backend=nothing)(torch.ones(3))


# ------------------------------------------------------------------------------ packages, cache


def test_a_graph_compiled_without_gradients_refuses_an_input_that_requires_grad() -> None:
    compiled = compile_fx(doubled, torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(InputError, match=r"input 0 of graph_\d+ requires grad"):
        compiled(x)
    with torch.no_grad():
        assert compiled(x).tolist() == doubled(x).tolist()
    assert compile_native(fx.symbolic_trace(doubled), [x], {})(x).requires_grad


def test_a_missing_llvmlite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with pytest.raises(MissingPackage, match="pip install llvmlite"):
        lookup("fusee")


def test_without_llvmlite_stock_torch_compile_says_so(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["llvmlite"] = None
import torch
torch.compile(lambda x: x * 2, backend="fusee")(torch.ones(3))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert "MissingPackage" in ended.stderr and "pip install llvmlite" in ended.stderr


WITHOUT_NUMPY = """
import importlib.machinery, pathlib, re
finder = importlib.machinery.PathFinder
find = finder.find_spec
finder.find_spec = lambda name, *more: None if name == "numpy" else find(name, *more)
text = pathlib.Path("README.md").read_text()
exec("".join(re.findall(r"^```python\\n(.*?)^```", text, flags=re.S | re.M)))
assert fusee.report()
"""


def test_the_readmes_programs_need_no_numpy(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY],
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_dump_that_cannot_be_written_is_told(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    undo = log.subscribe(log.dump_to(occupied))
    try:
        with pytest.raises(SettingError, match=r"cannot be written to: [\s\S]*unset FUSEE_DUMP"):
            fusee.compile(program, name="dumped")(torch.randn(3, 5))
    finally:
        undo()


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    """Another kernel for each number: constants of products are parameters, limits are not."""
    return lambda x: torch.softmax(x.clamp(max=by), -1).cumsum(0)


def warns_once_and_works(reason: str, factors: tuple[float, float]) -> None:
    x = torch.randn(3, 5)
    with pytest.warns(CacheWarning, match=reason) as caught:
        for by in factors:  # never compiled before: what the process has needs no disk
            torch.testing.assert_close(compile_fx(scaled(by), x)(x), scaled(by)(x))
    assert len(caught) == 1


def test_no_access_to_the_cache_costs_one_warning(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    environment.setenv("FUSEE_CACHE_DIR", str(occupied / "cache"))
    config.settings.cache_clear()
    warns_once_and_works("cannot use .*Not a directory", (1.375, 2.5625))


def test_a_full_disk_costs_one_warning(cache_dir: Path, environment: pytest.MonkeyPatch) -> None:
    def full(**given: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    environment.setattr(tempfile, "mkstemp", full)
    warns_once_and_works("No space left on device", (1.4375, 2.625))
    assert not list(cache_dir.iterdir())
