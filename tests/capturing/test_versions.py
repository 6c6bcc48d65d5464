"""Integers that change are inputs, many versions are found at once, and what grows is noticed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import random
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.capture import watched
from fusee.capture.entries import live
from tests.capturing.same import Traced
from tests.counting import Counting


def _runs(fn: Callable[..., Any], calls: list[tuple[Any, ...]]) -> int:
    """The number of graphs after these calls, each of which gives eager's result."""
    traced, native = Traced(fn), fusee.compile(fn)
    for args in calls:
        want = fn(*args)
        assert str(traced(*args)) == str(want)
        torch.testing.assert_close(native(*args), want)
    return len(traced.graphs)


X = torch.tensor([0.5, -1.25, 3.0])


@pytest.mark.parametrize(("fn", "graphs"), [
    (lambda x, n: x * n + n / 2 - (n + 1), 2),
    (lambda x, n: x**n, 2),
    (lambda x, n: (x / (1 - 0.5**n), n + 1, -n), 2),
    (lambda x, n: x * n if isinstance(n, int) else x, 2),
    (lambda x, n: x.half() * n, 2),
    (lambda x, n: x.repeat(n) + n, 2),
    (lambda x, n: x.long() * n, 2),
    (lambda x, n: x + 1 if n % 2 else x - n, 3),  # the first, even ones, odd ones
    (lambda x, n: x + len(list(range(n))), 6),
])  # fmt: skip
def test_integers(fn: Callable[..., Any], graphs: int) -> None:
    # no neighbours, which would be something that grows
    assert _runs(fn, [(X, n) for n in (1, 4, 2, 7, 3, 9)]) == graphs


def test_integers_that_a_double_does_not_hold() -> None:
    calls = [(X, n) for n in (1, 5, 2**60, 2**60 + 1, 3)]
    assert _runs(lambda x, n: x + n, calls) == 4  # constants, beside a symbol


def test_a_count_of_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x / self.calls

    module, graphs = Counting(), []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = fusee.compile(module, backend=backend)
    for count in range(1, 8):
        torch.testing.assert_close(compiled(X), X / count)
        assert module.calls == count and type(module.calls) is int
    assert len(graphs) == 2


def test_many_versions_are_found_at_once() -> None:
    def fn(x: Tensor, n: int, unit: str) -> Tensor:
        return x.reshape(n, -1) + len(unit)

    compiled = fusee.compile(fn, backend="eager", recompile_limit=1000)
    calls = [(torch.zeros(2 * n), n, "m") for n in range(1, 300, 2)]
    for args in calls:
        assert compiled(*args).shape == (args[1], 2)

    def seconds(args: tuple[Any, ...]) -> float:
        begin = time.process_time()
        for _ in range(200):
            compiled(*args)
        return time.process_time() - begin

    first, last = (min(seconds(args) for _ in range(5)) for args in (calls[0], calls[-1]))
    assert last < 3 * first
    # what tells those apart is of another kind here
    assert float(compiled(torch.zeros(2), 1, "kg").sum()) == 4.0


@pytest.mark.parametrize("dynamic", [None, False])
def test_what_grows_at_each_call(dynamic: bool | None) -> None:
    """A cache that grows by one: one version for all sizes; or, with none, two and one notice."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, x])
        return cache.mean(0), cache

    backend.__dict__["takes_symbols"] = True
    compiled = fusee.compile(step, backend=backend, dynamic=dynamic)
    cache = torch.zeros(1, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for count in range(2, 20):
            mean, cache = compiled(X[None], cache)
            torch.testing.assert_close(mean, X * (count - 1) / count)
    assert len(graphs) == 2
    told = [str(one.message) for one in said]
    assert len(told) == (dynamic is False)
    assert all("cache grows at each call" in one and "static" in one for one in told)


@pytest.mark.filterwarnings("error")
def test_two_that_are_one_more_in_turn_do_not_grow() -> None:
    compiled = fusee.compile(lambda x, n: x * 2 if n < 3 else x, backend="eager", dynamic=False)
    for size, count in ((2, 0), (2, 1), (3, 1)):
        assert compiled(torch.ones(size), count).tolist() == [2.0] * size


# ---------------------------------------------------------------------------- made anew
# Closures, lambdas and functions with defaults that are made at each call, between two graphs.


def _closing(x: Tensor) -> Any:
    scale = 2.0

    def inner(y: Tensor) -> Tensor:
        y = y * scale
        print(end="")
        return y + x

    print(end="")
    return inner(x.cos())


def _with_default(x: Tensor) -> Any:
    h = lambda z, k=x: z * k  # noqa: E731
    print(end="")
    return h(x + 1), list(map(h, [x, x + 1]))


def _wrapped(x: Tensor) -> Any:
    def decorated(f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def around(*args: Any, **kwargs: Any) -> Any:
            print(end="")
            return f(*args, **kwargs) + 1

        return around

    @decorated
    def times(y: Tensor, *, q: Tensor = x) -> Tensor:
        return y * q

    print(end="")
    return times(x)


def _counting(x: Tensor) -> Any:
    n = 0

    def step(y: Tensor) -> Tensor:
        nonlocal n
        n += 1
        print(end="")
        n += 1
        return y + n

    print(end="")
    return step(x), n


def _recursive(x: Tensor) -> Any:
    def down(y: Tensor, depth: int) -> Tensor:
        print(end="")
        return y if depth == 0 else down(y + 1, depth - 1)

    print(end="")
    return down(x, 3)


def _returned(x: Tensor) -> Any:
    def make(k: int, /, *rest: Tensor, **named: Any) -> Callable[..., Tensor]:
        return lambda y, *, by=k: y * by + sum(rest) + len(named)

    print(end="")
    first, second = make(3, x, x, a=1), make(3)
    print(end="")
    y = first(x)
    print(end="")
    return y + second(x, by=2)


@pytest.mark.parametrize(("fn", "graphs"), [
    (_closing, 3), (_with_default, 1), (_wrapped, 1), (_counting, 1), (_recursive, 3),
    (_returned, 2),
])  # fmt: skip
def test_closures_made_anew(fn: Callable[..., Any], graphs: int) -> None:
    assert _runs(fn, [(X + k,) for k in range(12)]) == graphs


def _times(k: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * k


KEPT = [_times(0), _times(0)]


def _made_within(x: Tensor, a: Any, b: Any) -> Any:
    first, second = _times(a), _times(b)
    print(end="")
    return first(x), second(x)


def _kept(x: Tensor, a: Any, b: Any) -> Any:
    return [one(x) for one in KEPT]


def _given(x: Tensor, a: Any, b: Any) -> Any:
    return (lambda first, second: (first(x), second(x)))(_times(a), _times(b))


def _asked(x: Tensor, a: Any, b: Any) -> Any:
    def one(y: Tensor, k: Any = a, *, j: Any = b) -> Tensor:
        return y * a

    print(end="")
    cells = [cell.cell_contents for cell in one.__closure__ or ()]
    return x * (one.__defaults__ or ())[0], one.__kwdefaults__, cells


@pytest.mark.parametrize("fn", [_made_within, _kept, _given, _asked])
@pytest.mark.parametrize("numbers", [(3, 3, 4, 5, 6, 7), (0.5, 0.5, 1.5, 2.5, 4.5, 3.5)])
def test_closures_of_one_code_have_numbers_of_their_own(
    fn: Callable[..., Any], numbers: tuple[float, ...]
) -> None:
    traced = Traced(fn)
    for pair in zip(numbers[::2], numbers[1::2]):
        for closure, k in zip(KEPT, pair):
            (cell,) = closure.__closure__ or ()
            cell.cell_contents = k
        assert str(traced(X, *pair)) == str(fn(X, *pair))


def test_a_closure_made_anew_is_let_go_of() -> None:
    made: list[weakref.ref[Any]] = []

    def fn(x: Tensor) -> Tensor:
        large = x * 2

        def inner(y: Tensor) -> Tensor:
            print(end="")
            return y + large

        print(end="")
        made.append(weakref.ref(inner))
        return inner(x)

    compiled = fusee.compile(fn, backend="eager")
    for _ in range(3):
        compiled(X)
    gc.collect()
    assert [ref() for ref in made] == [None] * 3


def test_compiled_functions_of_one_code() -> None:
    """torch.compile's and torch.compiler.disable's wrappers are closures of one code."""
    functions = [lambda x: x + 1, lambda x: x * 3]

    def fn(x: Tensor, g: Callable[..., Any]) -> Any:
        return g(x.sin())

    compiled = fusee.compile(fn, backend="eager")
    for wrap in (torch.compiler.disable, lambda f: torch.compile(f, backend="eager")):
        for f in functions:
            torch.testing.assert_close(compiled(X, wrap(f)), f(X.sin()))


# ---------------------------------------------------------------------------- copies
# A break within a module is captured and compiled once for all its copies.


class Layer(nn.Module):
    def __init__(self, act: nn.Module, shift: float = 0.0) -> None:
        super().__init__()
        self.linear, self.act, self.calls = nn.Linear(3, 3), act, 0
        self.register_buffer("shift", torch.full((3,), shift))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        print(end="")
        return self.act(y) + self.shift


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(nn.GELU(), 1.0), Layer(nn.ReLU(), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        print(end="")
        return _scaled(self.second(x))


def _scaled(x: Tensor) -> Tensor:
    y = x * 2
    print(end="")
    return y - 1


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_layers = nn.ModuleList(Layer(nn.GELU(), float(k)) for k in range(10))
        self.blocks = nn.ModuleList(Block() for _ in range(10))

    @property
    def layers(self) -> list[Any]:
        return [*self.of_layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.of_layers:
            x = layer(x)
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_copies_of_a_module_share_versions() -> None:
    net, counting = Stack(), Counting()
    eager = copy.deepcopy(net)
    compiled = fusee.compile(net, backend=counting)
    native = fusee.compile(copy.deepcopy(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that there are too many versions
        for k in range(3):
            want = eager(X + k)
            torch.testing.assert_close(compiled(X + k), want)
            torch.testing.assert_close(native(X + k), want)
    assert len(counting.graphs) == 6  # from the second call on `calls` is an input
    assert [layer.calls for layer in net.layers] == [3] * 10
    # each has its own from here on
    for stack in (net, eager):
        stack.layers[3].linear.weight.mul_(2)
        stack.layers[4].linear.weight = nn.Parameter(torch.ones(3, 3))
    torch.testing.assert_close(compiled(X), eager(X))
    assert len(counting.graphs) == 6
    for stack in (net, eager):
        stack.layers[5].act, stack.layers[6].shift = nn.Tanh(), torch.ones(())
    torch.testing.assert_close(compiled(X), eager(X))
    assert len(counting.graphs) == 8


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        self.calls += 1
        return x * 2 if self.calls < 5 else x * 3


class Counters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Counted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def test_what_is_known_of_a_number_is_of_the_copys_own() -> None:
    net, eager = Counters(), Counters()
    compiled = fusee.compile(net, backend="eager")
    for k in range(7):
        if k == 4:
            for one in (net, eager):
                one.layers[0].calls, one.layers[2].calls = 0, 2
        torch.testing.assert_close(compiled(X), eager(X))


def test_copies_of_a_module_have_gradients_of_their_own() -> None:
    net, counting = Stack(), Counting()
    eager = copy.deepcopy(net)
    compiled = fusee.compile(net, backend=counting)
    for _ in range(2):
        compiled(X).sum().backward()
        eager(X).sum().backward()
    for ours, theirs in zip(net.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(counting.graphs) == 8  # the first layer's input needs no gradient


class Sharing(nn.Module):
    """What is one module in a copy is two in another."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.parts = [first, second]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts
        first.count, second.count = 1, 2
        print(end="")
        y: Tensor = x * first.count + second.count
        return y


def test_copies_that_share_parts() -> None:
    pairs = [Sharing(nn.Identity(), nn.Identity()), Sharing(*[nn.Identity()] * 2)]

    def fn(x: Tensor) -> list[Tensor]:
        print(end="")
        return [pair(x) for pair in pairs]

    for _ in range(2):
        assert _runs(fn, [(X,), (X + 1,)]) == 2
        pairs.reverse()


def test_modules_that_are_only_passed_on() -> None:
    chosen = [nn.Tanh(), nn.Tanh(), nn.ReLU()]

    def fn(x: Tensor, module: nn.Module) -> Any:
        y = x + 1
        print(end="")
        return [module], y * 2, module

    def told(x: Tensor, module: nn.Module) -> Any:
        y = x + 1
        print(end="")
        return y * (2 if module is chosen[0] else 3), {module: 1}[chosen[0]] if y is x else 0

    counting = Counting()
    compiled = fusee.compile(fn, backend=counting)
    for module in chosen * 2:
        listed, y, same = compiled(X, module)
        assert listed[0] is module is same
        torch.testing.assert_close(y, X * 2 + 2)
    assert len(counting.graphs) == 4  # one more for the other class
    compiled = fusee.compile(told, backend=counting)
    for module in chosen:
        assert str(compiled(X, module)) == str(told(X, module))


def test_copies_that_are_made_within() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def fn(x: Tensor) -> Tensor:
        own = copy.deepcopy(net)
        print(end="")
        y = own(x)
        print(end="")
        return own(y) * 2

    assert _runs(fn, [(X + k,) for k in range(3)]) <= 6
    counting = Counting()
    compiled = fusee.compile(fn, backend=counting)
    for k in range(7):
        torch.testing.assert_close(compiled(X + k), fn(X + k))
    assert len(counting.graphs) == 2


def test_open_sizes_are_found_among_many_versions() -> None:
    def program(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x + [k for k in (4, 8, 16, 32, 64, 128) if n > k][-1] if n > 4 else x

    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    backend.__dict__["takes_symbols"] = True
    compiled = fusee.compile(program, backend=backend)
    sizes = [k + more for k in (3, 5, 9, 17, 33, 65) for more in (0, 2, 1)]
    for n in (*sizes, *sizes[::-1]):
        x = torch.zeros(n)
        assert torch.equal(compiled(x), program(x))
    (piece,) = [one for one in live if one.call is compiled]
    assert len(piece.entries) == 7 and len(graphs) == 5  # two give `x` itself


def test_a_version_without_gradients_is_none_for_what_was_computed_with_some() -> None:
    compiled = fusee.compile(lambda x: x * 2)
    for of in (lambda w: w.detach(), lambda w: w * 3, lambda w: w.detach(), lambda w: w[:]):
        w = torch.ones(3, requires_grad=True)
        x = of(w)
        assert compiled(x).requires_grad == x.requires_grad


class Stateful(nn.Module):
    """Replaces what it keeps at each call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(9))
        self.mean, self.states = torch.zeros(3), [torch.zeros(3)]
        self.kept: dict[str, Any] = {"last": None}
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.mean = self.mean * 0.5 + x.detach()
        self.states[0] = self.states[0] + self.mean
        self.kept["last"] = self.mean
        self.seen = self.seen + 1
        return x + self.states[0] * self.seen


def test_what_a_program_replaces_at_each_call_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Facts about it are looked at in each call, and all others as quickly as before."""
    of = Stateful(), Stateful()
    of[1].load_state_dict(of[0].state_dict())
    compiled = fusee.compile(of[1], recompile_limit=100)
    starts: list[int] = []
    start = watched.Watched.start

    def counted(*args: Any) -> None:
        starts.append(1)
        start(*args)

    monkeypatch.setattr(watched.Watched, "start", counted)
    x = torch.randn(3)
    counts: list[int] = []

    def same() -> None:
        torch.testing.assert_close(compiled(x), of[0](x))
        counts.append(len(starts))

    for _ in range(8):
        same()
    assert counts[-1] == counts[-4]
    for change in (
        lambda m: setattr(m, "mean", torch.zeros(3, dtype=torch.float64)),
        lambda m: m.states.__setitem__(0, torch.ones(2, 3)),
        lambda m: m.seen.resize_(1).fill_(2),
        lambda m: m.kept.update(last=3),
        lambda m: m.kept.update(first=3),
        lambda m: m.layers[3].weight.requires_grad_(False),
        lambda m: m.layers.__setitem__(1, nn.Identity()),
        lambda m: m.states.insert(0, torch.ones(3)),
        lambda m: setattr(m, "layers", m.layers[:4]),
    ):
        for module in of:
            change(module)
        for _ in range(3):
            same()


def _with_break(x: Tensor, keys: list[Any], of: dict[Any, dict[str, Tensor]]) -> Tensor:
    for key in keys:
        if x.sum() < 0:
            x = x + 1
        x = x * of[key]["a"]
    return x


@pytest.mark.parametrize("make", [lambda: torch.zeros(2), lambda: nn.Linear(2, 2)])
@pytest.mark.parametrize("fn", [
    lambda x, key, of: x.relu() * of[key]["a"],
    lambda x, key, of: x.relu() + (key in of),
    lambda x, key, of: x.relu() + len(of.get(key, ())),
    lambda x, key, of: _with_break(x, [key, *of], of),
])  # fmt: skip
def test_a_dict_is_asked_for_the_key_of_this_call(
    fn: Callable[..., Any], make: Callable[[], Any]
) -> None:
    """Optimizers keep their state so, and a loop over parameters that breaks asks by turns."""
    keys = [make() for _ in range(3)]
    of = {key: {"a": torch.full((2,), k + 2.0)} for k, key in enumerate(keys[:2])}
    traced, native = Traced(lambda x, key: fn(x, key, of)), fusee.compile(fn)
    x = torch.tensor([1.0, 2.0])
    for key in (*keys[:2], keys[0], keys[2], keys[1]):
        try:
            want = fn(x, key, of)
        except KeyError:
            with pytest.raises(KeyError):
                traced(x, key)
            with pytest.raises(KeyError):
                native(x, key, of)
            continue
        assert torch.equal(traced(x, key), want)
        assert torch.equal(native(x, key, of), want)


class _Ending(nn.Module):
    """A loop over more modules than a place has versions; each turn ends a graph.

    kind   whether turns end after a module, before it, or by a number that decides
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(12))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.kind == "before":
                print(end="")
            if self.kind == "number" and random.random() < 0.3:
                continue
            x = layer(x).tanh() + x
            if self.kind == "after":
                print(end="")
        return x


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["after", "before", "number"])
def test_each_module_of_a_loop_has_versions_of_its_own(kind: str) -> None:
    module = _Ending(kind).eval()
    traced, made = Traced(_Ending.forward), []
    with torch.no_grad():
        for k in range(40):
            random.seed(k)
            want = module(X)
            random.seed(k)
            torch.testing.assert_close(traced(module, X), want)
            made.append(len(traced.compiled.entries))
    assert made[-1] >= 13 and (kind == "number" or made[0] == made[-1])
    assert not any(stop.startswith("eager") for stop in traced.stops)


def test_other_objects_of_a_loop_have_as_many_versions_as_a_place_has() -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

    scales = [Scale(k / 7) for k in range(20)]

    def fn(x: Tensor) -> Tensor:
        for scale in scales:
            x = x * scale.by
            print(end="")
        return x

    traced = Traced(fn)
    assert torch.equal(traced(X), fn(X)) and traced.entries <= 12


def _deletes(x: Tensor, of: Any) -> Tensor:
    del of
    return x * 2


def _writes_over(x: Tensor, of: Any, scale: float = 2.0) -> Tensor:
    of = scale = 3.0
    return x * of * scale


def _closes_over(x: Tensor, of: Any) -> Any:
    return x * (lambda: len(of))()


def _shows(x: Tensor, of: Any) -> Any:
    return x * 2, sorted(locals())


def _ends(x: Tensor, of: Any) -> Any:
    y = x * 2
    print(end="")
    return y + 1


@pytest.mark.parametrize(("fn", "is_read"), [
    (lambda x, of: x * 2, False), (_writes_over, False), (_ends, False),
    (_deletes, True), (_closes_over, True), (_shows, True),
])  # fmt: skip
def test_an_argument_that_nothing_reads_is_no_fact(fn: Callable[..., Any], is_read: bool) -> None:
    traced = Traced(fn)
    for of in ("a", "bc", "d", "", "efg", "h"):
        assert str(traced(X, of)) == str(fn(X, of))
    assert (traced.entries > 2) is is_read


@functools.lru_cache
def _is_there(path: str) -> bool:
    return os.path.exists(path)


def test_a_cache_that_python_has_filled_ends_no_graph() -> None:
    """The piece that ends there is none for later calls, even of the same values."""

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        return y * 2 if _is_there(__file__) else y

    compiled = fusee.compile(program)
    for _ in range(3):
        assert torch.equal(compiled(X), X.sin() * 2)
    (one,) = [one for one in live if one.call is compiled]
    assert [entry.captured.stop for entry in one.start.entries] == [None]


def test_a_cache_that_stays_empty_ends_graphs() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.sin()
        _is_there.cache_clear()
        return y * 2 if _is_there(__file__) else y

    compiled = fusee.compile(program)
    for _ in range(4):
        assert torch.equal(compiled(X), X.sin() * 2)
    (one,) = [one for one in live if one.call is compiled]
    assert len(one.start.entries) == 1


def by_keys(given: dict[str, Tensor], log: list[Tensor]) -> dict[str, Tensor]:
    return {k: v * 2 for k, v in given.items()}


def by_length(given: dict[str, Tensor], log: list[Tensor]) -> Tensor:
    return torch.stack(log).sum() if log and len(log) % 2 else given["a"]


@pytest.mark.parametrize(("fn", "kind"), [(by_keys, "Keys"), (by_length, "Length")])
def test_a_call_that_no_version_is_good_for_asks_next_to_none(fn: Any, kind: str) -> None:
    keys = [*map("".join, itertools.permutations("abcd", 3))]
    calls = [(dict.fromkeys(each, X), [X] * n) for n, each in enumerate(keys)]
    if fn is by_length:
        calls = [({"a": X}, log) for _, log in calls]
    random.Random(1).shuffle(calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = Traced(fn)
        for given, log in calls:
            assert str(traced(given, log)) == str(fn(given, log))
    (compiled,) = (f for f in live if f.function is fn)
    site = compiled.start
    assert site.is_full and site.index is not None and site.index.key is not None
    assert site.index.key[0].__name__ == kind
    asked: list[Any] = []

    def counted(check: Callable[..., bool], *given: Any) -> bool:
        asked.append(check)
        return check(*given)

    for entry in site.entries:
        entry.check = functools.partial(counted, entry.check)
    for given, log in calls:
        asked.clear()
        traced(given, log)
        assert len(asked) <= 1


@pytest.mark.parametrize(("fn", "graphs"), [
    (lambda x, t: torch.full((x.shape[0], 1), t) + x, 2),
    (lambda x, t: torch.full((3,), fill_value=t * 2, dtype=torch.float64), 2),
    (lambda x, t: torch.full((3,), t, dtype=torch.int64), 5),  # whole numbers: by the value
    (lambda x, t: x.new_full((3,), t) + torch.full_like(x, t), 2),
    (lambda x, t: torch.tensor(t) * x + torch.tensor([t, 1.0, 2]), 2),
    (lambda x, t: torch.as_tensor(t, dtype=torch.float64), 2),
    (lambda x, t: x.clone().fill_(t), 2),
    (lambda x, t: (x.masked_fill(x > 0, t), x.clone().masked_fill_(x > 0, value=t)), 2),
    (lambda x, t: x.index_fill(0, torch.tensor([1, 2]), t), 2),
    (lambda x, t: x.masked_fill(x > 0, x.max().item()) * t, 2),
])  # fmt: skip
def test_floats_that_torch_takes_as_parameters(fn: Callable[..., Any], graphs: int) -> None:
    assert _runs(fn, [(X, t) for t in (0.5, 1.7, -2.5, 0.1, 3.3)]) == graphs
    assert _runs(lambda x, n: fn(x, float(n)), [(X, n) for n in (2, 5, 3, 9, 7)]) == 2


def test_a_float_too_large_for_a_tensor_is_refused() -> None:
    def fn(t: float) -> Tensor:
        return torch.full((2,), t, dtype=torch.float16)

    for call in (fn, Traced(fn), fusee.compile(fn)):
        for t in (0.5, 1.5, 2.5, float("inf")):
            assert call(t).tolist() == [t, t]
        with pytest.raises(RuntimeError, match="without overflow"):
            call(1e6)


class Meter:
    """The mean of what was seen, as training scripts keep it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.total += value * n
        self.count += n

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


def test_a_mean_that_is_kept_in_numbers() -> None:
    def step(meter: Meter, x: Tensor) -> float:
        meter.update(x.sum().item(), x.shape[0])
        return meter.mean

    def quotient(meter: Meter, x: Tensor) -> Any:
        meter.count -= 1
        return x.sum().item() / (meter.count + 3)

    for make in (Traced, fusee.compile):
        compiled, meters = make(step), [Meter(), Meter()]
        for k in range(12):
            found = [call(one, X + k) for call, one in zip((step, compiled), meters)]
            assert found[0] == pytest.approx(found[1], rel=1e-5)
        assert meters[0].count == meters[1].count == 36
    sites = [f.start for f in live if f.function is step]
    assert [len(site.entries) for site in sites] == [2] * len(sites)
    pairs: list[tuple[Any, Meter]] = [(quotient, Meter()), (Traced(quotient), Meter())]
    for _ in range(5):
        for call, one in pairs:
            with pytest.raises(ZeroDivisionError) if one.count == -2 else contextlib.nullcontext():
                call(one, X)


def _layer_within(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Linear(2, 2)(x)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(_LAYERS)(x)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    with torch.device("meta"):
        made = torch.nn.Linear(2, 2)
    return x + made.weight.dim()


_LAYERS = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))


@pytest.mark.parametrize("fn", [_layer_within, _copied, _on_meta])
def test_modules_that_are_made_at_each_call_are_compiled_for_a_few_calls(fn: Any) -> None:
    traced = Traced(fn)
    count = []
    for k in range(24):
        torch.manual_seed(k)
        want = fn(torch.ones(1, 2))
        torch.manual_seed(k)
        torch.testing.assert_close(traced(torch.ones(1, 2)), want)
        count.append(traced.entries)
    assert count[-1] == count[-6] < 60, count


def test_modules_that_are_called_again_are_compiled_however_many() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(20)])
    made = [copy.deepcopy(layers) for _ in range(3)]

    def fn(x: torch.Tensor, which: int) -> torch.Tensor:
        for layer in made[which]:
            x = layer(x)
            time.sleep(0)
        return x

    traced = Traced(fn)
    for which in (0, 1, 2) * 3:
        torch.testing.assert_close(traced(torch.ones(1, 2), which), fn(torch.ones(1, 2), which))
    before = traced.entries
    for which in (0, 1, 2):
        traced(torch.ones(1, 2), which)
    assert traced.entries == before and "compiled versions" not in str(traced.stops)
