"""Where a graph must end, wherever that is; and exceptions, which stay the user's own."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import fusee
from fusee.capture import recorder, trace
from tests.capturing.same import Traced, same, shape_of
from tests.capturing.test_classes import Base, Config, Pair, Positive
from tests.capturing.test_language import Manager, Odd

T = Any
X = torch.arange(6.0).reshape(2, 3) - 2


def branches(x: T) -> T:
    y = x * 2
    if y.sum() > 100:
        y = y + 1
    elif y.max() > 3:
        y = y - 1
    return y


def value_in_expressions(x: T) -> T:
    n = x.abs().max().item()
    rows = x.tolist()
    return x + n, rows, int(x[0, 0]), float(x.detach().sum()), bool(x.any()), n if x.any() else None


def prints(x: T) -> T:
    y = x + 1
    print("y is", y.shape)
    return y * 2


def numpy_between(x: T) -> T:
    y = (x * 2).detach().numpy()
    return torch.from_numpy(numpy.flip(y, 0).copy()) + 1


def in_try(x: T) -> T:
    log = []
    try:
        y = x * 2
        if y.sum() > 0:
            log.append("positive")
        y = y + 1
        raise Odd(int(y[0, 0]))
    except Odd as error:
        z = x - error.amount
        if z.sum() < 0:
            log.append("in except")
        log.append(error.args)
    else:
        log.append("never")
    finally:
        if x.sum() < 100:
            log.append("in finally")
    return z, log


def in_try_with_return(x: T) -> T:
    try:
        if x.sum() > -100:
            return x + 1
    finally:
        x = x * 2
    return x


def in_with(x: T) -> T:
    log = []
    with Manager(log) as manager:
        y = x * 2
        if y.sum() > 0:
            y = y + 1
        manager.log.append("inside")
    with contextlib.suppress(ValueError):
        y = y * 2
        if y.sum() < 1000:
            raise ValueError("gone")
    return y, log


@contextlib.contextmanager
def managed(log: list[str]) -> Iterator[int]:
    log.append("begin")
    try:
        yield 3
    finally:
        log.append("end")


def in_generator_manager(x: T) -> T:
    log = []
    with managed(log) as three:
        y = x * three
        if y.sum() > 0:
            y = y + 1
    return y, log


def in_no_grad(x: T) -> T:
    with torch.no_grad():
        y = x * 2
        if y.sum() > 0:
            y = y + 1
    z = x * 3
    return y, z, y.requires_grad, torch.is_grad_enabled()


def in_autocast(x: T) -> T:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        if y.sum() > 0:
            y = y @ y
    return y, x @ x.T, torch.is_autocast_enabled("cpu")


def in_inference_mode(x: T) -> T:
    with torch.inference_mode():
        y = x * 2
    return y.is_inference(), y.sum().item(), torch.is_inference_mode_enabled()


def in_loop(x: T) -> T:
    total, seen = x, []
    for k, row in enumerate(x):
        if row.sum() > 0:
            total = total + k
            continue
        seen.append(k)
    else:
        total = total * 2
    return total, seen


def in_while(x: T) -> T:
    count = 0
    while x.sum() < 50:
        x = x + 1
        count += 1
    return x, count


def in_comprehension(x: T) -> T:
    return [row * 2 for row in x if row.sum() > 0], {k: v.item() for k, v in zip("abc", x[0])}


def callee(y: T, log: list[T]) -> T:
    y = y + 1
    if y.sum() > 0:
        log.append("positive")
        y = y * 2
    return y - 1


def in_callee(x: T) -> T:
    log: list[T] = []
    a = callee(x, log)
    b = callee(a, log) + callee(-a, log)
    return b * 2, log


def in_method(x: T) -> T:
    class_of = Asking(2)
    return class_of(x) + class_of.apply(x, more=1)


class Asking:
    def __init__(self, by: int) -> None:
        self.by = by
        self.asked = []

    def apply(self, x: T, *, more: int = 0) -> T:
        if x.sum() > 0:
            self.asked.append(more)
        return x * self.by + len(self.asked)

    __call__ = apply


def in_call_with_pending_stack(x: T) -> T:
    return torch.add(x, *[x.sum().item()], alpha=int(x.max())) + (x * (3 if x.any() else 4))


def in_generator(x: T) -> T:
    def rows() -> Iterator[T]:
        for row in x:
            if row.sum() > 0:
                yield row

    return [row * 2 for row in rows()]


def halve(y: T, depth: int) -> T:
    if depth > 3 or y.sum() < 1:
        return y
    return halve(y / 2, depth + 1) + 1


def numbered(rows: T, log: list[T]) -> Iterator[T]:
    try:
        for k, row in enumerate(rows):
            got = yield k, row * 2
            log.append(got)
    finally:
        log.append("closed")


def in_loop_over_generator(x: T) -> T:
    log, total = [], 0
    for (k, row), more in zip(numbered(x, log), [1, 2, 3]):
        if row.sum() > -100:
            total = total + row * k + more
    made = numbered(x, log)
    next(made)
    if x.sum() < 100:
        made.send("sent")
    made.close()
    return total, log


def in_recursion(x: T) -> T:
    return halve(x.abs(), 0)


def in_lambda(x: T) -> T:
    choose = lambda y: y + 1 if y.sum() > 0 else y - 1  # noqa: E731
    return [choose(row) for row in x]


def values_alive(x: T) -> T:
    config, pair, d = Config(2), Pair(x), {"x": x, "list": [x * 2]}
    bound, half = Base(x).apply, functools.partial(torch.mul, x)
    counter = iter([1, 2, 3])
    next(counter)
    queue, found = collections.deque([1], maxlen=2), collections.defaultdict(list)

    def closure(y: T) -> T:
        nonlocal config
        config = Config(config.width + 1)
        return y + config.width

    if x.sum() < 100:
        queue.append(2)
        found["a"].append(x)
    return config, pair, d, bound(x), half(2), list(counter), queue, found, closure(x), config


def sorts_by_comparison(x: T) -> T:
    return x, sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a))


def sorts_by_value(x: T) -> T:
    return sorted(x.flatten(), key=lambda v: -v), max(x[0], key=lambda v: v.abs())


BROKEN = [
    branches, value_in_expressions, prints, in_try, in_try_with_return, in_with,
    in_generator_manager, in_no_grad, in_autocast, in_inference_mode, in_loop, in_while,
    in_comprehension, in_callee, in_method, in_call_with_pending_stack, in_recursion, in_lambda,
    values_alive, sorts_by_comparison, sorts_by_value, numpy_between, in_generator,
    in_loop_over_generator,
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("fn", BROKEN, ids=lambda f: f.__name__)
def test_broken(fn: Callable[..., Any], grad: bool, capsys: Any) -> None:
    same(fn, X.clone().requires_grad_(grad), breaks=True)
    if fn is prints:
        assert capsys.readouterr().out == "y is torch.Size([2, 3])\n" * 4


# ------------------------------------------------------------------------------ effects


COUNTS = {"calls": 0}
TOTAL = 0


def writes_globals(x: T) -> T:
    global TOTAL
    COUNTS["calls"] += 1
    TOTAL += COUNTS["calls"]
    return x + TOTAL


def writes_and_breaks(x: T) -> T:
    global TOTAL
    TOTAL += 1
    if x.sum() < 100:
        TOTAL += 10
    COUNTS["calls"] = TOTAL
    return x * TOTAL


@pytest.mark.parametrize("fn", [writes_globals, writes_and_breaks])
def test_globals_are_written(fn: Callable[..., Any]) -> None:
    def run(call: Callable[..., Any]) -> Any:
        global TOTAL
        TOTAL = COUNTS["calls"] = 0
        return [(shape_of(call(X)), TOTAL, dict(COUNTS)) for _ in range(3)]

    assert run(Traced(fn)) == run(fn)


def changes_arguments(items: T, table: T, box: T, x: T) -> T:
    items.append(x * 2)
    items[0] = table.pop("a")
    table["new"] = items
    table.setdefault("list", []).append(1)
    box.x = box.x + 1
    box.added = x
    del box.old
    box.inner.x = items
    x[0] = 5
    return items, box


def swaps(items: T, other: T) -> T:
    items[0], items[1] = items[1], items[0]
    items.sort(key=lambda v: -v)
    other.clear()
    other.extend(items)
    other += [9]
    return other


def changes_and_fails(items: T, x: T) -> T:
    items.append(1)
    x.add_(1)
    raise KeyError("after the change")


def one_object_twice(a: T, b: T) -> T:
    a.append(1)
    return len(b), a is b, a == b


def one_tensor_twice(a: T, b: T) -> T:
    a.add_(1)
    return a + b, b


def views_of_one(a: T, b: T) -> T:
    b.mul_(3)
    return a + 1


def keeps_state(module: T, x: T) -> T:
    return module(x), module(x + 1)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.last = None

    def forward(self, x: T) -> T:
        self.calls += 1
        self.seen += x.sum()
        self.last = x * 2
        return self.norm(x)


def hooked() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"a": nn.ReLU()})["a"])
    made[0].register_forward_hook(_double)
    made.register_forward_pre_hook(_negate)
    return made


def _double(module: T, args: T, out: T) -> T:
    module.hooked = getattr(module, "hooked", 0) + 1
    return out * 2


def _negate(module: T, args: T) -> T:
    return tuple(-x for x in args)


def box() -> Any:
    made = Base(1)
    made.old, made.inner = 3, Base(2)
    return made


LIST = [1]
MATRIX = torch.ones(4, 3)

CHANGED = [
    (changes_arguments, lambda: ([1, 2], {"a": X}, box(), X.clone())),
    (swaps, lambda: ([3, 1, 2], [X])),
    (changes_and_fails, lambda: ([], X.clone())),
    (one_object_twice, lambda: ([1], [1])),
    (one_object_twice, lambda: (LIST, LIST)),
    (one_tensor_twice, lambda: (X, X)),
    (one_tensor_twice, lambda: (X.clone(), X.clone())),
    (views_of_one, lambda: (MATRIX[:2], MATRIX[1:])),
    (keeps_state, lambda: (Stateful(), X)),
    (keeps_state, lambda: (hooked(), X)),
]


@pytest.mark.parametrize(
    "fn, arguments", CHANGED, ids=[f"{fn.__name__}-{k}" for k, (fn, _) in enumerate(CHANGED)]
)
def test_arguments_are_changed(fn: Callable[..., Any], arguments: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    same(fn, *arguments())


# ------------------------------------------------------------------------------ exceptions


def fails_deep(x: T) -> T:
    y = x + 1
    return fails(y)


def fails(y: T) -> T:
    raise Odd(y.shape[0])  # the line


def fails_after_a_break(x: T) -> T:
    if x.sum() < 100:
        x = x + 1
    return {}["nothing"], x  # the line


def fails_in_torch(x: T) -> T:
    return (x + 1) @ x  # the line


def fails_on_a_descriptor(x: T) -> T:
    Described().size = -3
    return x


class Described:
    size = Positive()


def fails_from_another(x: T) -> T:
    try:
        [][1]
    except IndexError as error:
        raise RuntimeError("no rows") from error  # the line


FAILING = [
    fails_deep, fails_after_a_break, fails_in_torch, fails_on_a_descriptor, fails_from_another,
]  # fmt: skip


@pytest.mark.parametrize("fn", FAILING, ids=lambda f: f.__name__)
def test_exceptions_are_the_users(fn: Callable[..., Any]) -> None:
    same(fn, X, breaks=fn is fails_after_a_break)
    traced = Traced(fn)
    for _ in range(2):
        with pytest.raises(Exception) as eager:  # whatever it is
            fn(X)
        with pytest.raises(type(eager.value)) as compiled:
            traced(X)
        assert _users_lines(compiled.value) == _users_lines(eager.value)


def _users_lines(error: BaseException) -> list[tuple[str, int | None]]:
    here = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
    return [(f.name, f.lineno) for f in here if f.name != "test_exceptions_are_the_users"][-2:]


def test_a_long_loop_is_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(x: T) -> T:
        for k in range(120):
            x = x + k
        return x

    monkeypatch.setattr(recorder, "_MOST_CALLS", 50)
    assert len(same(summed, X, breaks=True).graphs) == 3


@pytest.mark.parametrize("name", ["exp", "norm", "add_"])
def test_methods_that_the_program_replaces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own ones look their names up in the class, and would be taken for the new ones."""
    old = getattr(torch.Tensor, name)
    monkeypatch.setattr(torch.Tensor, name, lambda self, *a, **k: old(self, *a, **k) * 2)

    def fn(x: T) -> T:
        y = torch.exp(x) + 1
        return getattr(y, name)(*[1] * (name == "add_")) + y

    traced = Traced(fn)
    for _ in range(2):
        torch.testing.assert_close(traced(X), fn(X))
    assert "a method of torch.Tensor is replaced by" in traced.stops[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fusee"])
def test_gradients_after_a_break_without_them(backend: str) -> None:
    weight = nn.Parameter(torch.ones(3))

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
            sys.stdout.write("")
            weight.mul_(y.mean())
        return (x * x).sum()

    compiled = fusee.compile(fn, backend=backend)
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        compiled(x).backward()
        assert x.grad is not None and x.grad.tolist() == [2.0] * 3
        assert torch.is_grad_enabled()


def caller() -> tuple[str, list[str]]:
    f = sys._getframe(1)
    return f.f_code.co_name, sorted(f.f_locals)


def test_a_frame_shows_the_programs_variables() -> None:
    def fn(x: torch.Tensor) -> Any:
        k, y = 5, x + 1
        own = inspect.currentframe()
        assert own is not None
        return caller(), own.f_locals["k"], own.f_locals["y"] * k + y

    want, got = fn(torch.ones(2)), fusee.compile(fn)(torch.ones(2))
    assert got[:2] == want[:2] and torch.equal(got[2], want[2])


def test_what_a_tuple_in_c_has_beside_its_items() -> None:
    """Nine items of a time.struct_time are listed, and it has a zone."""
    when = [time.struct_time((*range(1, 10),), {"tm_zone": z, "tm_gmtoff": len(z)}) for z in "AAB"]

    def fn(x: torch.Tensor, t: time.struct_time) -> Any:
        sys.stdout.write("")
        return x + t.tm_gmtoff, t.tm_zone, t, t.tm_zone == "A" and x

    compiled = fusee.compile(fn)
    for t in when:
        want, got = fn(torch.ones(2), t), compiled(torch.ones(2), t)
        assert got[1:3] == want[1:3] and got[2].tm_zone == t.tm_zone
        assert torch.equal(got[0], want[0]) and (got[3] is False) == (want[3] is False)


def test_tuples_that_there_is_one_of() -> None:
    def fn(x: torch.Tensor) -> Any:
        version, flags = sys.version_info, sys.flags
        sys.stdout.write("")
        return x + version.major, version is sys.version_info, flags is sys.flags

    same(fn, torch.ones(2), breaks=True)


def pairs(x: torch.Tensor) -> Any:
    whole = iter([x, x + 1, x + 2, x + 3, x + 4])
    next(whole)
    both = zip(whole, whole)
    sys.stdout.write("")
    return next(both), list(whole)


def each_second(x: torch.Tensor) -> Any:
    whole = iter(range(6))
    return [(sys.stdout.write(""), k, next(whole, None)) for k in enumerate(whole)], x


def as_long(x: torch.Tensor) -> Any:
    both = zip([x, x], [1], strict=True)
    sys.stdout.write("")
    return list(both)


@pytest.mark.parametrize("fn", [pairs, each_second, as_long], ids=lambda fn: fn.__name__)
def test_iterators_that_go_through_one(fn: Callable[..., Any]) -> None:
    same(fn, torch.ones(2), breaks=True)


# ------------------------------------------------------------------- breaks deep within functions


def long_before_it_breaks(x: T, times: int = 1) -> T:
    for _ in range(50):
        x = x + 1
    if times:
        print("deep", x.sum())
    return x * 2


def wrapped(function: T) -> T:
    @functools.wraps(function)
    def around(*args: T, **kwargs: T) -> T:
        return function(*args, **kwargs)

    return around


five_times_wrapped = functools.reduce(lambda f, _: wrapped(f), range(5), long_before_it_breaks)


def test_what_breaks_deep_within_is_met_once(monkeypatch: T) -> None:
    calls = []
    call = recorder.Recorder.run
    monkeypatch.setattr(recorder.Recorder, "run", lambda *a, **k: calls.append(0) or call(*a, **k))
    same(five_times_wrapped, X, breaks=True)
    assert len(calls) < 3 * 52  # when it is met, and when it is captured; each wrapper ran it too


# ------------------------------------------------------------------- where the piece ends at once


def asks_for_a_number(x: T) -> T:
    y = x.exp()
    return y * 2 if y.sum().item() > 1e9 else y * 3


def asks_for_truth(x: T) -> T:
    y = x.exp()
    if y.sum() > 1e9:
        return y
    while y.sum() < 0:
        y = y + 1
    return y + 1


def shows_a_tensor(x: T) -> T:
    y = x + 1
    return f"{y}: {y:}", y * 2


def selects_rows(x: T) -> T:
    y = x + 1
    return y[y > 0].exp(), torch.nonzero(y, as_tuple=True), x in y


@fusee.compiler.disable
def kept_out(x: T, *more: T, **named: T) -> T:
    return x + len(more) + len(named)


def calls_with_names(x: T) -> T:
    y = x + 1
    return kept_out(y, 1, (2, y), key=y.sum()) * 2


def within_handlers(x: T) -> T:
    log = []
    for k in range(3):
        try:
            log.append(x + k)
            print(end="", flush=k > 1)
            x = x * 2
        finally:
            log.append(k)
    return x, log


@pytest.mark.parametrize(
    "program",
    [
        prints, asks_for_a_number, asks_for_truth, shows_a_tensor, selects_rows, calls_with_names,
        within_handlers,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_an_instruction_that_has_done_nothing_ends_a_piece_at_once(
    program: T, monkeypatch: T
) -> None:
    pieces, attempts = _counted(program, monkeypatch)
    assert attempts == pieces > 1


def _counted(program: T, monkeypatch: T) -> tuple[int, int]:
    """How many captures of a program there are, and how many attempts at these."""
    pieces, attempts, begin, capture = [], [], trace._Attempt.__init__, trace.capture
    monkeypatch.setattr(
        trace._Attempt, "__init__", lambda *given: attempts.append(given) or begin(*given)
    )
    monkeypatch.setattr(trace, "capture", lambda *given: pieces.append(given) or capture(*given))
    same(program, X, breaks=True)
    return len(pieces), len(attempts)


def sorts_by_values(x: T) -> T:
    rows = [*(x + 1)]
    rows.sort(key=torch.Tensor.numpy)
    return rows


def goes_on_with_an_iterator(x: T) -> T:
    numbers, log = iter([1, 2, 3]), []
    log.extend(map(print, numbers, ["a", "b"]))
    return x + len(log), [*numbers]


def prints_behind(log: T, x: T) -> T:
    log.append(x)
    print(end="")
    return len(log)


def notes_before_it_breaks(x: T) -> T:
    log = []
    return x + prints_behind(log, x * 2), log


def turns_what_it_is_given(x: T) -> T:
    y = x + 1
    with torch.no_grad():
        z = y.resize_(1, 2)
    return y, z * 2


@pytest.mark.parametrize(
    "program",
    [
        sorts_by_values, goes_on_with_an_iterator, notes_before_it_breaks, turns_what_it_is_given,
    ],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_an_instruction_that_may_have_done_something_is_gone_back_before(
    program: T, monkeypatch: T
) -> None:
    pieces, attempts = _counted(program, monkeypatch)
    assert attempts > pieces


# ------------------------------------------------------------------- breaks deep within functions


def breaks_at_the_second_call(x: T) -> T:
    return sum(map(long_before_it_breaks, [x, x], [0, 1]))


def breaks_within_itself(x: T, depth: int = 3) -> T:
    if not depth:
        return long_before_it_breaks(x)
    return breaks_within_itself(x, depth - 1)


def breaks_by_what_the_caller_made(x: T) -> T:
    made = [0]

    def inner(x: T) -> T:
        made[0] += 1
        return long_before_it_breaks(x, made[0])

    return inner(x)


def breaks_within_a_block(x: T) -> T:
    with torch.no_grad():
        return five_times_wrapped(x)


@pytest.mark.parametrize(
    ("program", "graphs", "stops"),
    [
        (breaks_at_the_second_call, 3, 2),
        (breaks_within_itself, 2, 5),
        (breaks_by_what_the_caller_made, 2, 3),
        (breaks_within_a_block, 2, 7),
    ],
)
def test_breaks_within_functions(program: T, graphs: int, stops: int) -> None:
    found = same(program, X, breaks=True)
    assert (len(found.graphs), len(found.stops)) == (graphs, stops)
    compiled = fusee.compile(program)
    for x in (X, X + 1, X.double()):
        assert torch.equal(compiled(x), program(x))
