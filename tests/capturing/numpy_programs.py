"""Runs programs with NumPy eager and compiled and holds all that NumPy shows of results."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fusee.capture.torch_api import counterparts
from tests.capturing.same import Traced

__all__ = ["DTYPES", "agree", "calls", "data", "functions"]

DTYPES = ("f8", "f4", "f2", "i8", "i4", "i1", "u1", "?", "c16", "c8")
_CLOSE = {2: 2e-3, 4: 2e-6, 8: 1e-13}


def agree(
    fn: Callable[..., Any], *args: Any, calls: int = 2, traced: Traced | None = None
) -> list[str]:
    """Eager and compiled give equal results, exceptions and arguments; why graphs ended."""
    traced = traced or Traced(fn)
    for _ in range(calls):
        (want, given), (got, taken) = (_outcome(f, args) for f in (fn, traced))
        for path, a, b in _pairs("result", want, got):
            _hold(path, a, b)
        for path, a, b in _pairs("argument", given, taken):
            _hold(path, a, b)
        assert _shared((want, given)) == _shared((got, taken)), "what shares memory"
    return traced.stops


def _outcome(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    given = copy.deepcopy(args)
    try:
        with np.errstate(all="ignore"):
            return fn(*given), given
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        return (type(error), str(error)), given


def _pairs(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if type(a) is type(b) and isinstance(a, (list, tuple)) and len(a) == len(b):
        for k, (x, y) in enumerate(zip(a, b)):
            yield from _pairs(f"{path}[{k}]", x, y)
    elif type(a) is type(b) is dict:
        yield from _pairs(path, [*a.items()], [*b.items()])
    else:
        yield path, a, b


def _hold(path: str, a: Any, b: Any) -> None:
    array: tuple[Any, ...] = (np.ndarray, np.generic)
    assert type(a) is type(b), (path, a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride()), path
        torch.testing.assert_close(a, b, equal_nan=True)
    elif isinstance(a, array):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (path, a, b)
        steps = zip(a.shape, a.strides, b.strides)
        assert not a.size or all(n == 1 or s == t for n, s, t in steps), (path, a.strides)
        assert a.flags.writeable == b.flags.writeable, path
        if a.dtype.kind not in "fc":
            np.testing.assert_array_equal(b, a, err_msg=path)
            return
        near, size = _CLOSE[a.real.dtype.itemsize], np.abs(a[np.isfinite(a)]).max(initial=0)
        np.testing.assert_allclose(b, a, near, near * float(size), err_msg=path)
    else:
        assert a == b or a != a, (path, a, b)


def _shared(found: Any) -> list[tuple[int, int]]:
    leaves = (x for _, x, _ in _pairs("", found, found))
    arrays = [x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in leaves]
    arrays = [x for x in arrays if isinstance(x, np.ndarray) and x.size]
    pairs = itertools.combinations(range(len(arrays)), 2)
    return [(i, j) for i, j in pairs if np.shares_memory(arrays[i], arrays[j])]


# ------------------------------------------------------------------------------ all functions


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """All that torch._numpy has a counterpart of, methods of arrays too, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for function in counterparts():
        home = getattr(function, "__objclass__", None)
        if not isinstance(function, type) and home in (None, np.ndarray):
            place = "array" if home else str(getattr(function, "__module__", None) or "numpy")
            found[f"{place}.{function.__name__}"] = function
    return dict(sorted(found.items()))


def data(dtype: str, shape: tuple[int, ...], seed: int = 0, odd: bool = False) -> Any:
    """An array of random numbers; an odd one has infinities and the like."""
    r = np.random.RandomState(seed)
    kind = np.dtype(dtype).kind
    if kind in "?b":
        return r.rand(*shape) > 0.5
    if kind in "iu":
        return r.randint(0 if kind == "u" else -5, 7, shape).astype(dtype)
    x = r.randn(*shape) * 2 + (1j * r.randn(*shape) if kind == "c" else 0)
    if odd:
        x.reshape(-1)[:6] = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0]
    return x.astype(dtype)


def calls(dtype: str, odd: bool = False) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that functions of NumPy may take; most take few of them."""
    a, b, s, v, n = (
        data(dtype, shape, seed, odd)
        for seed, shape in enumerate([(3, 4), (3, 4), (3, 3), (6,), (2, 3, 4)])
    )
    i = np.array([0, 2, 1])
    for args in (
        (a,), (a, b), (s,), (v,), (s, s), (v, v), (a, 0), (a, 1), (a, 2), (a, -1), ((a, b),),
        ((a, b), 0), (a, (1, 0)), (a, (4, 3)), (a, (12,)), (a, i), (a, i, 0), (2, a), (a, 1.5),
        (a, -1, 0), (a, 0, 1), (a > 0, a, b), (a, 1, 2), (a, [1, 2], 0), (n,), (n, 0, 2),
        (n, (0, 1)), ("ij,jk->ik", s, a), (a, a.T), (v[3], v[5]), (a.T,),
        (np.asfortranarray(a),), (a[:, ::2],), (3, 4), ((3, 4),), (0, 3, 7), (5,),
    ):  # fmt: skip
        yield args, {}
    for kwargs in (
        {"axis": 0}, {"axis": -1}, {"axis": None}, {"keepdims": True}, {"axis": (0, 1)},
        {"ddof": 1}, {"dtype": "f4"}, {"dtype": np.float64}, {"k": 1},
        {"axis": 1, "keepdims": True}, {"order": "F"}, {"copy": False},
    ):  # fmt: skip
        yield (a,), kwargs
        yield (a, b), kwargs
