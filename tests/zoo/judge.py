"""One model, compiled by us and by torch.compile, beside eager; float64 arbitrates.

`judge` gives a row in parts as they become known, so that a crash costs only what comes after it.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

import fusee
from fusee.capture.dispatch import Entry, listeners
from tests.check import in_float64
from tests.compare import Mismatch, assert_same

__all__ = ["STAGES", "Part", "judge"]

Part = dict[str, Any]
Build = Callable[[int], tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]]
STAGES = ("inference", "training", "stock inference", "stock training")

# A ReLU that rounding decides otherwise changes gradients, in eager against float64 as often as in
# ours: what is wrong, and not decided otherwise by chance, is wrong from each of these starts.
SEEDS = 3


def judge(
    build: Build, stages: tuple[str, ...], again: bool = True, backend: str = "fusee"
) -> Iterator[tuple[str, Part]]:
    """(stage, part of the row); the first is "built".

    again    whether a numerical difference is looked for from other starts too
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    model, args, kwargs, about = build(0)
    yield "built", {"about": about, "seconds": _seconds(begin)}
    for stage in stages:
        is_stock, is_training = stage.startswith("stock"), stage.endswith("training")
        run = _stock if is_stock else functools.partial(_ours, backend)
        part: Part = {}
        for seed in range(SEEDS if again and not is_stock else 1):
            if seed:
                model, args, kwargs, _ = build(seed)
            part = run(model, args, kwargs, is_training)
            if part["right"] or not part.get("is_numerical"):
                break
        yield stage, part
        gc.collect()


# ---------------------------------------------------------------------------- one call


class _Call:
    """A model's call on inputs of its own, and all that can be seen of it."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any, is_training: bool) -> None:
        self.model = copy.deepcopy(model).train(is_training)
        self.given = copy.deepcopy((args, kwargs))
        self.is_training = is_training

    def in_float64(self) -> _Call:
        in_float64(self.model)
        self.given = in_float64(self.given)
        return self

    def run(self, call: Callable[..., Any] | None = None) -> dict[str, Any]:
        """Results by their way in the result; gradients and buffers by name."""
        call = self.model if call is None else call
        self.model.zero_grad()
        _seed()
        args, kwargs = copy.deepcopy(self.given)
        mode: AbstractContextManager[Any] = nullcontext() if self.is_training else torch.no_grad()
        with mode:
            out = call(*args, **kwargs)
        found = dict(_leaves(out, "out", {}))
        found.update(_leaves((args, kwargs), "given", {}))
        if self.is_training:
            loss = _loss(x for x in found.values() if isinstance(x, Tensor))
            loss.backward()
            found = {name: _detached(x) for name, x in found.items()}
            found["loss"] = loss.detach()
            for name, parameter in self.model.named_parameters():
                found[f"grad of {name}"] = parameter.grad
        found.update({f"buffer {n}": x.clone() for n, x in self.model.named_buffers()})
        return found


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    importlib.import_module("numpy").random.seed(0)


def _loss(tensors: Iterator[Tensor]) -> Tensor:
    """A number that depends on every floating result, whatever its size."""
    parts = [x.float().tanh().mean() for x in tensors if x.requires_grad and x.numel()]
    if not parts:
        raise NoGradient("no result has a gradient")
    return torch.stack(parts).sum()


class NoGradient(Exception):
    """Nothing that the model gives can be trained on."""


_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, torch.device)


def _leaves(x: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of a result, by the way that leads to them."""
    if x is None or isinstance(x, (Tensor, *_PLAIN)):
        yield path, x
        return
    if id(x) in seen:
        return
    seen[id(x)] = x
    yield f"{path} is", type(x).__qualname__
    if isinstance(x, dict):
        for key, value in x.items():
            yield from _leaves(value, f"{path}[{key!r}]", seen)
    elif isinstance(x, (list, tuple)):
        for number, value in enumerate(x):
            yield from _leaves(value, f"{path}[{number}]", seen)
    elif not isinstance(x, (nn.Module, type)) and hasattr(x, "__dict__") and not callable(x):
        for key, value in vars(x).items():
            if key != "config" and not key.endswith("_config"):
                yield from _leaves(value, f"{path}.{key}", seen)


def _compare(
    got: dict[str, Any], want: dict[str, Any], exact: Callable[[], dict[str, Any]]
) -> None:
    """raises   Mismatch"""
    if list(got) != list(want):
        one = next((a, b) for a, b in zip([*got, ""], [*want, ""]) if a != b)
        raise Mismatch(f"structure: got {one[0]}, eager gives {one[1]}")
    known: list[dict[str, Any]] = []

    def oracle(name: str) -> Callable[[], Any]:
        def compute() -> Any:
            if not known:
                known.append(exact())
            return known[0].get(name, want[name])

        return compute

    for name in want:
        try:
            assert_same(got[name], want[name], oracle(name))
        except Mismatch as error:
            kind = type(error)
            raise kind(f"{name}: {error}") from None


def _differs(error: BaseException) -> Part:
    text = " ".join(str(error).split())[:400]
    kind = type(error).__name__
    words = ("float64", "mean square", "without an oracle")
    numerical = isinstance(error, Mismatch) and any(word in text for word in words)
    return {"right": False, "error": f"{kind}: {text}", "is_numerical": numerical}


def _against_eager(call: _Call, compiled: Callable[..., Any], first: Callable[[], None]) -> Part:
    """Two calls of a compiled model beside eager's; `first` is called after the first."""
    twin = copy.deepcopy(call.model)
    eager = _Call(twin, *call.given, call.is_training)
    exact = _Call(twin, *call.given, call.is_training)
    part: Part = {}
    try:
        want = eager.run()
    except Exception as error:  # noqa: BLE001  the model cannot be asked this
        return {"right": None, "error": f"eager: {type(error).__name__}: {str(error)[:200]}"}

    def in_float64() -> dict[str, Any]:
        try:
            return exact.in_float64().run()
        except Exception:  # noqa: BLE001  not every model runs in float64; then torch.testing judges
            return {}

    begin = time.perf_counter()
    try:
        got = call.run(compiled)
        part["first_s"] = _seconds(begin)
        first()
        _compare(got, want, in_float64)
        want = eager.run()
        got = call.run(compiled)
        exact = _Call(twin, *call.given, call.is_training)
        if not any(name.startswith("buffer") for name in want):
            _compare(got, want, in_float64)
    except Exception as error:  # noqa: BLE001  every failure is a row
        part.setdefault("first_s", _seconds(begin))
        return {**part, **_differs(error)}
    return {**part, "right": True}


def _seconds(begin: float) -> float:
    return round(time.perf_counter() - begin, 2)


# ---------------------------------------------------------------------------- ours


@contextmanager
def _entries() -> Iterator[list[Entry]]:
    """What is captured within."""
    found: list[Entry] = []
    listeners.append(found.append)
    try:
        yield found
    finally:
        listeners.remove(found.append)


def _ours(backend: str, model: nn.Module, args: Any, kwargs: Any, is_training: bool) -> Part:
    call = _Call(model, args, kwargs, is_training)
    at_first: list[Entry] = []
    with _entries() as entries:
        compiled = fusee.compile(call.model, backend=backend)
        part = _against_eager(call, compiled, lambda: at_first.extend(entries))
    at_first = at_first or entries
    part["graphs"] = sum(e.captured.graph is not None for e in at_first)
    part["breaks"] = _counted(
        f"{e.captured.stop.reason} ({_place(e.captured.stop.where)})"
        for e in at_first
        if e.captured.stop is not None
    )
    part["eager"] = _counted(
        f"{_first(e.captured.eager)} (in {e.captured.place.function.__qualname__})"
        for e in at_first
        if e.captured.eager
    )
    part["again"] = len(entries) - len(at_first)
    return part


def _counted(texts: Iterator[str]) -> dict[str, int]:
    return dict(Counter(texts).most_common())


def _first(text: str) -> str:
    return " ".join(text.split())[:300]


def _place(where: str) -> str:
    """The user's line, from its package on."""
    return where.rpartition("site-packages/")[2]


# ---------------------------------------------------------------------------- stock


def _stock(model: nn.Module, args: Any, kwargs: Any, is_training: bool) -> Part:
    counters = importlib.import_module("torch._dynamo.utils").counters
    torch.compiler.reset()
    counters.clear()
    graphs: list[fx.GraphModule] = []
    at_first: list[int] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    call = _Call(model, args, kwargs, is_training)
    compiled = torch.compile(call.model, backend=backend)
    part = _against_eager(call, compiled, lambda: at_first.append(len(graphs)))
    part["graphs"] = at_first[0] if at_first else len(graphs)
    part["breaks"] = {_first(text): count for text, count in counters["graph_break"].items()}
    return part
