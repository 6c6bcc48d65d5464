"""Kernels that users write in Triton: a launch with a grid is one call of the graph."""

from __future__ import annotations

import importlib
import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
from fusee.torch_functions import written

launched: list[tuple[type, Any]] = []
tl = types.ModuleType("triton.language")  # kernels below are read, not run


class JITFunction:
    """Stands for Triton's, whose launcher is Python: it reads addresses, and compiles."""

    def __init__(self, fn: Any, constexprs: tuple[str, ...] = ()) -> None:
        self.fn, self.signature = fn, inspect.signature(fn)
        names = self.signature.parameters
        self.params = [types.SimpleNamespace(name=x, is_constexpr=x in constexprs) for x in names]

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **named: Any) -> None:
        given = self.signature.bind(*args, **named).arguments
        x, out = given["x"], given["out"]
        assert x.data_ptr() and not warmup and num_warps in (2, 4)
        launched.append((type(x), grid(given) if callable(grid) else grid))
        out.copy_(x * given["scale"])


@pytest.fixture(autouse=True)
def _as_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction.run, "__module__", "triton.runtime.jit")
    launched.clear()


def _scaled(x: Any, out: Any, scale: Any) -> None:
    i = tl.arange(0, 8)
    tl.store(out + i, tl.load(x + i) * scale)


scaled, of_constant = JITFunction(_scaled), JITFunction(_scaled, ("scale",))


def agree(fn: Any, *args: Any, **how: Any) -> Any:
    """Compiled and eager give the same, leave the same in arguments, and launch as often."""
    compiled = fusee.compile(fn, fullgraph=True, **how)
    for _ in range(3):
        mine = [x.clone() if isinstance(x, Tensor) else x for x in args]
        torch.testing.assert_close([compiled(*mine), mine], [fn(*args), [*args]])
    assert {kind for kind, _ in launched} == {Tensor}
    return compiled


def test_a_launch_is_one_call() -> None:
    def fn(x: Tensor) -> Tensor:
        x = x.sin() + 1
        out = torch.empty_like(x)
        scaled[(4,)](x, out, scale=3, num_warps=2)
        return out.relu() * x

    agree(fn, torch.randn(8))
    assert "fusee_triton._scaled" in str(fusee.explain(fn)(torch.randn(8)))


def test_what_is_written_to_reaches_the_caller() -> None:
    def fn(x: Tensor, out: Tensor) -> Tensor:
        scaled[(4,)](x, out[1:], scale=2.5)
        scaled[(4,)](x * 2, out[0:8], scale=2)
        return out[1:] + x

    agree(fn, torch.randn(8), torch.randn(9))


def test_constants_and_grids() -> None:
    def fn(x: Tensor, n: int) -> Tensor:
        out = torch.zeros_like(x)
        of_constant[lambda given: (given["x"].numel() // 4, given["scale"])](x, out, scale=n)
        return out + 1

    compiled = fusee.compile(fn, fullgraph=True)
    for n, size in [(1, 8), (True, 8), (2, 16), (2, 24), (2, 32)]:
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x, n), fn(x, n))
        assert launched[-2][1] == launched[-1][1] == (size // 4, n)


def test_what_stays_between_graphs() -> None:
    weight = torch.randn(8, requires_grad=True)

    def trained(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scaled[(4,)](weight, out, scale=3)
        return out + x

    def made(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        JITFunction(_scaled)[(4,)](x, out, scale=3)
        return out

    for fn in (trained, made):
        x = torch.randn(8)
        torch.testing.assert_close(fusee.compile(fn)(x), fn(x))
    with torch.no_grad():
        agree(trained, torch.randn(8))


def _copied(p: Any, q: Any, r: Any, n: Any) -> None:
    a = p + 1
    b = q
    while n > 0:
        b = b + n
        n -= 1
    tl.store(b, tl.load(a), mask=n < tl.load(r))


def _atomic(p: Any, q: Any, i: Any) -> None:
    tl.atomic_add(pointer=q + tl.load(p + i), val=1.0)


def _by_block(p: Any, q: Any) -> None:
    block = tl.make_block_ptr(q, shape=(4,))
    tl.make_tensor_descriptor(p).load([0])
    block.store(1)


def _helped(p: Any, q: Any) -> None:
    tl.store(q, 1)
    helper(p)


def helper(p: Any) -> None: ...


@pytest.mark.parametrize(
    ("fn", "stored"),
    [(_scaled, "out"), (_copied, "q"), (_atomic, "q"), (_by_block, "q"), (_helped, "pq")],
)
def test_what_a_kernel_writes_to(fn: Any, stored: str) -> None:
    tensors = {"x", "out", "p", "q", "r"}
    found = written(JITFunction(fn)) & tensors
    assert found == ({stored} if stored == "out" else {*stored})


KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

def added(x, y):
    x, out = x * 2, torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    return out.relu() + 1
"""


def test_tritons_own_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    (tmp_path / "triton_kernel.py").write_text(KERNEL)  # Triton reads sources from files
    monkeypatch.syspath_prepend(tmp_path)
    triton_kernel = importlib.import_module("triton_kernel")

    def run(self: Any, x: Tensor, y: Tensor, out: Tensor, n: int, **how: Any) -> None:
        assert how == {"grid": (triton.cdiv(n, 256),), "warmup": False, "BLOCK": 256}
        out.copy_(x + y)

    run.__module__, run.__qualname__ = "triton.runtime.jit", "JITFunction.run"
    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    assert written(triton_kernel.add) & {"x", "y", "out"} == {"out"}
    x, y = torch.randn(1000), torch.randn(1000)
    for _ in range(2):
        got = fusee.compile(triton_kernel.added, fullgraph=True)(x, y)
        torch.testing.assert_close(got, triton_kernel.added(x, y))
