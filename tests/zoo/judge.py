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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fusee
from fusee.capture.captured import Entry
from fusee.capture.entries import listeners
from tests.check import in_float64
from tests.compare import Mismatch, assert_same, is_cancelled, is_within, may_be_chance, neighbour

__all__ = ["STAGES", "Part", "judge"]

Part = dict[str, Any]
Build = Callable[[int], tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]]
STAGES = ("inference", "training", "stock inference", "stock training")

# A ReLU that rounding decides otherwise changes gradients, in eager against float64 as often as in
# ours: what is wrong, and not decided otherwise by chance, is wrong from each of these starts.
SEEDS = 3

# How often eager runs on neighbouring inputs, where it must be known how far rounding may lead.
NEIGHBOURS = 4


def judge(
    build: Build,
    stages: tuple[str, ...],
    again: bool = True,
    backend: str = "fusee",
    device: str = "cpu",
) -> Iterator[tuple[str, Part]]:
    """(stage, part of the row); the first is "built".

    stages   some of STAGES; "dynamic inference" and "dynamic training" are ours with all sizes open
    again    whether a numerical difference is looked for from other starts too
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = time.perf_counter()

    def built(seed: int) -> tuple[nn.Module, Any, Any, str]:
        model, args, kwargs, about = build(seed)
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
        return model.to(device), args, kwargs, about

    model, args, kwargs, about = built(0)
    yield "built", {"about": about, "seconds": _seconds(begin)}
    for stage in stages:
        is_stock, is_training = stage.startswith("stock"), stage.endswith("training")
        ours = functools.partial(_ours, backend, stage.startswith("dynamic") or None)
        run = _stock if is_stock else ours
        part: Part = {}
        for seed in range(SEEDS if again and not is_stock else 1):
            if seed:
                model, args, kwargs, _ = built(seed)
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

    def moved(self, draw: int) -> _Call:
        """The same, but every other element of inputs and parameters is a neighbouring number."""
        generator = torch.Generator().manual_seed(draw)
        found = _Call(self.model, *self.given, self.is_training)
        with torch.no_grad():
            for x in (*found.model.parameters(), *pytree.tree_leaves(found.given)):
                if isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided:
                    x.copy_(neighbour(x, generator))
        return found

    def in_channels_last(self) -> _Call:
        """The same, but convolutions sum in the order of channels that lie last."""
        found = _Call(self.model, *self.given, self.is_training)

        def turned(x: Any) -> Any:
            return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

        for parameter in found.model.parameters():
            parameter.data = turned(parameter.data)
        found.given = pytree.tree_map_only(Tensor, turned, found.given)
        return found

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
    if type(x) is not tuple:  # equal tuples may be one or two: nothing can be written to them
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


class _Eager:
    """What eager gives, what is right, and how far eager's own results lie apart.

    exact  by name: the same in float64, as far as the model runs in it
    moved  eager's results on neighbouring inputs (`_Call.moved`) and with channels that lie last,
           made where they are needed
    """

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.want = self._again().run()
        self.near = 0  # how many results only the neighbours' distance has let pass

    def _again(self) -> _Call:
        return _Call(self.call.model, *self.call.given, self.call.is_training)

    @functools.cached_property
    def exact(self) -> dict[str, Any]:
        try:
            return (
                _Call(self.call.model, *self.call.given, self.call.is_training).in_float64().run()
            )
        except Exception:  # noqa: BLE001  not every model runs in float64; then torch.testing judges
            return {}

    @functools.cached_property
    def moved(self) -> list[dict[str, Any]]:
        found = [call.run() for call in map(self.call.moved, range(NEIGHBOURS))]
        with suppress(RuntimeError):  # not every model takes views of channels that lie last
            found.append(self.call.in_channels_last().run())
        return found

    def scale(self, name: str) -> float:
        """The largest root mean square of the gradients, or of the buffers, if it is one."""
        kind = name.partition(" ")[0]
        if kind not in ("grad", "buffer"):
            return 0.0
        alike = (x for n, x in self.want.items() if n.startswith(kind) and isinstance(x, Tensor))
        return max(float(x.double().square().mean().sqrt()) for x in alike if x.numel())

    def _right(self, name: str) -> Any:
        return self.exact.get(name, self.want[name])

    def compare(self, got: dict[str, Any]) -> None:
        """raises   Mismatch"""
        want = self.want
        if list(got) != list(want):
            one = next((a, b) for a, b in zip([*got, ""], [*want, ""]) if a != b)
            raise Mismatch(f"structure: got {one[0]}, eager gives {one[1]}")
        for name in want:
            oracle = functools.partial(self._right, name)
            try:
                assert_same(got[name], want[name], oracle)
            except Mismatch as error:
                others = [x[name] for x in self.moved if name in x] if may_be_chance(error) else []
                exact = self.exact.get(name)
                if not is_within(got[name], want[name], exact, others) and not (
                    may_be_chance(error) and is_cancelled(got[name], exact, self.scale(name))
                ):
                    kind = type(error)
                    raise kind(f"{name}: {error}") from None
                self.near += 1


def _differs(error: BaseException) -> Part:
    text = " ".join(str(error).split())[:400]
    kind = type(error).__name__
    is_numerical = isinstance(error, Mismatch) and may_be_chance(error)
    return {"right": False, "error": f"{kind}: {text}", "is_numerical": is_numerical}


def _against_eager(call: _Call, compiled: Callable[..., Any], first: Callable[[], None]) -> Part:
    """Two calls of a compiled model beside eager's; `first` is called after the first."""
    twin = _Call(call.model, *call.given, call.is_training)
    part: Part = {}
    try:
        eager = _Eager(twin)
    except Exception as error:  # noqa: BLE001  the model cannot be asked this
        return {"right": None, "error": f"eager: {type(error).__name__}: {str(error)[:200]}"}
    begin = time.perf_counter()
    try:
        got = call.run(compiled)
        part["first_s"] = _seconds(begin)
        first()
        eager.compare(got)
        got = call.run(compiled)
        if not any(name.startswith("buffer") for name in got):
            eager.compare(got)
    except Exception as error:  # noqa: BLE001  every failure is a row
        part.setdefault("first_s", _seconds(begin))
        return {**part, **_differs(error)}
    return {**part, "right": True, "near": eager.near}


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


def _ours(
    backend: str,
    dynamic: bool | None,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    is_training: bool,
) -> Part:
    call = _Call(model, args, kwargs, is_training)
    at_first: list[Entry] = []
    with _entries() as entries, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled = fusee.compile(call.model, backend=backend, dynamic=dynamic)
        part = _against_eager(call, compiled, lambda: at_first.extend(entries))
    if part["right"] is False:
        part["asks"] = _is_told(backend, model, args, kwargs, is_training)
    part["warned"] = _counted(
        _first(str(one.message)) for one in told if "runs eagerly" in str(one.message)
    )
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


def _is_told(backend: str, model: nn.Module, args: Any, kwargs: Any, is_training: bool) -> bool:
    """Whether eager, told that it is compiled, does what the compiled model does."""
    call = _Call(model, args, kwargs, is_training)
    compiled = fusee.compile(call.model, backend=backend)
    error: Exception | None = None
    try:
        got = call.run(compiled)
    except Exception as raised:  # noqa: BLE001  eager may raise the same
        error = raised
    plain = _Eager(_Call(model, args, kwargs, is_training))
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        try:
            told = _Eager(_Call(model, args, kwargs, is_training))
            if error is None:
                told.compare(got)
        except Exception as raised:  # noqa: BLE001  whatever it is
            return type(raised) is type(error)
    try:
        plain.compare(told.want)  # what it is told must be what differs
    except Mismatch:
        return error is None
    return False


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
