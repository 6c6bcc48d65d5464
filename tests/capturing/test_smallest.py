"""What can't be captured costs its line alone: all around it and below it is compiled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced
from tests.counting import Counting


def _break() -> None:
    print(end="")


class Broken(nn.Module):
    """Two operations, and a break between them."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        _break()
        return y.cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.broken = Broken()

    def forward(self, x: Tensor) -> Tensor:
        return self.broken(x.exp()).tanh()


SEQUENTIAL = nn.Sequential(nn.ReLU(), Broken(), nn.Tanh())
BLOCKS = nn.ModuleList([Block(), Block()])
HOOKED = Block()
HOOKED.register_forward_hook(lambda module, args, out: out * 2)


def _decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


@_decorated
def helper(x: Tensor) -> Tensor:
    y = x.sin()
    _break()
    return y.cos()


@torch.no_grad()
def without_gradients(x: Tensor) -> Tensor:
    y = x.sin()
    _break()
    return y.cos()


@contextlib.contextmanager
def managed() -> Iterator[None]:
    _break()
    yield


class Thing:
    """Its methods break, as operators call them."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        _break()
        self.y = x.sin()

    def __add__(self, other: Tensor) -> Tensor:
        _break()
        return self.y.cos() + other

    @property
    def seen(self) -> Tensor:
        _break()
        return self.y.exp()

    def __getitem__(self, key: int) -> Tensor:
        _break()
        return self.y.tanh() + key

    def __call__(self, key: int) -> Tensor:
        _break()
        return self.y.sigmoid() + key

    def __iter__(self) -> Iterator[Tensor]:
        yield self.y.neg()
        _break()
        yield self.x.abs()

    def __enter__(self) -> Tensor:
        _break()
        return self.y.exp()

    def __exit__(self, *error: object) -> None:
        _break()


def sequential(x: Tensor) -> Any:
    return SEQUENTIAL(x) + 1


def listed(x: Tensor) -> Any:
    for block in BLOCKS:
        x = block(x)
    return x


def hooked(x: Tensor) -> Any:
    return HOOKED(x) + 1


def no_grad(x: Tensor) -> Any:
    return without_gradients(x) + 1


def in_comprehension(x: Tensor) -> Any:
    return [block(x) for block in BLOCKS]


def in_generator(x: Tensor) -> Any:
    return sum(block(x) for block in BLOCKS)


def in_partial(x: Tensor) -> Any:
    return functools.partial(helper)(x) + 1


def in_map(x: Tensor) -> Any:
    return sum(map(BLOCKS[0], [x, x + 1]))


def in_reduce(x: Tensor) -> Any:
    return functools.reduce(lambda a, b: helper(a) + b, [x, x, x])


def in_sorted(x: Tensor) -> Any:
    return sorted([x, x + 1], key=lambda y: helper(y).sum().item())


def in_lambda(x: Tensor) -> Any:
    twice = lambda y: helper(y) * 2  # noqa: E731
    return twice(x) + twice(x + 1)


def in_context(x: Tensor) -> Any:
    with managed():
        y = x.sin()
    return y.cos()


def methods(x: Tensor) -> Any:
    thing = Thing(x)
    found = (thing + x) + thing.seen + thing[2] + thing(3)
    for part in thing:
        found = found + part
    with thing as entered:
        return found + entered


def lost_map(x: Tensor) -> Any:
    rows = map(lambda y: y + 1, [x * 2, x * 3])  # noqa: C417
    _break()
    return [row.sin() for row in rows]


def given_away(x: Tensor) -> Any:
    y = x.sin().cos()
    return list(filter(None, [1, 2])), zip([y], [y.exp()])


def made_class(x: Tensor) -> Any:
    class Pair:
        def __init__(self, one: Tensor) -> None:
            self.one = one

    pair = Pair(x.sin())
    _break()
    return pair.one.cos()


def sparse_among(x: Tensor) -> Any:
    y = x.sin()
    return (torch.sparse.mm(SPARSE, y) + 1).cos()


SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize(("fn", "calls"), [
    (sequential, 5), (listed, 8), (hooked, 6), (no_grad, 3), (in_comprehension, 8),
    (in_generator, 8), (in_partial, 3), (in_map, 9), (in_reduce, 6), (in_sorted, 7),
    (in_lambda, 8), (in_context, 2), (methods, 16), (lost_map, 4), (given_away, 3),
    (made_class, 2), (sparse_among, 3),
])  # fmt: skip
def test_only_the_line_runs_in_python(fn: Callable[..., Any], calls: int) -> None:
    """At least so many calls run in graphs, whoever shares them, each time that it is called:
    all that lies around the breaks, and in what is called."""
    ran: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(sum(node.op.startswith("call") for node in gm.graph.nodes))
            return gm.forward(*args)

        return run

    x = torch.randn(3, 3)
    compiled = fusee.compile(fn, backend=backend)
    for _ in range(3):
        ran.clear()
        want, got = fn(x), compiled(x)
        assert sum(ran) >= calls, ran
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (want, got))):
            if isinstance(one, zip):
                one, other = [*one], [*other]
            assert str(one) == str(other)


def test_an_argument_that_no_graph_takes() -> None:
    def fn(x: Tensor, table: Tensor) -> Tensor:
        y = x.sin() + 1
        return torch.sparse.mm(table, y).cos() + 1

    x, traced = torch.randn(3, 3), Traced(fn)
    for _ in range(2):
        torch.testing.assert_close(traced(x, SPARSE), fn(x, SPARSE))
    assert len(traced.graphs) == 2
    assert any("sparse" in stop for stop in traced.stops)


def test_an_error_leaves_what_came_before_it_compiled() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().cos()
        with contextlib.suppress(KeyError), torch.no_grad():
            raise ValueError("the user's")
        return y

    traced = Traced(fn)
    with pytest.raises(ValueError, match="the user's") as caught:
        traced(torch.ones(2))
    last = caught.traceback[-1]
    assert str(last.statement).strip() == 'raise ValueError("the user\'s")'


# ------------------------------------------------------------------------------ asynchronous


X = torch.arange(4.0)


class _Manager:
    async def __aenter__(self) -> int:
        await asyncio.sleep(0)
        return 2

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return kind is KeyError


class _Counting:
    def __init__(self) -> None:
        self.count = 0

    def __aiter__(self) -> _Counting:
        return self

    async def __anext__(self) -> int:
        self.count += 1
        if self.count > 2:
            raise StopAsyncIteration
        return self.count


async def _slept(x: Tensor, done: list[str]) -> Tensor:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        done.append("cancelled")
        raise
    finally:
        done.append("left")
    return x


async def _half(x: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return helper(x) / 2


async def asynchronous(x: Tensor) -> tuple[Tensor, list[str]]:
    done: list[str] = []
    y = await _half(x)
    async with _Manager() as factor:
        y = y * factor
        raise KeyError
    async for count in _Counting():
        y = SEQUENTIAL(y) + count
    one, other = await asyncio.gather(_half(y), asyncio.create_task(_half(x)))
    try:
        await asyncio.wait_for(_slept(x, done), 0.01)
    except TimeoutError:
        done.append("too late")
    try:
        await 3  # type: ignore[misc]
    except TypeError as error:
        done.append(str(error))
    return one + other + sum([n async for n in _Counting()]), done


def test_what_a_coroutine_calls_is_compiled() -> None:
    want = asyncio.run(asynchronous(X))
    backend = Counting()
    with pytest.warns(FuseeWarning, match="no graph holds its own lines"):
        fast = fusee.compile(asynchronous, backend=backend)
    assert asyncio.iscoroutinefunction(fast)
    for _ in range(2):
        got = asyncio.run(fast(X))
        assert torch.equal(got[0], want[0]) and got[1] == want[1]
        assert len(backend.graphs) == 6  # of helper and SEQUENTIAL, which break
    within = Traced(lambda x: asyncio.run(asynchronous(x)))
    assert torch.equal(within(X)[0], want[0]) and len(within.graphs) == 6


def test_what_a_generator_calls_is_compiled() -> None:
    def numbers(x: Tensor) -> Iterator[Tensor]:
        got = yield helper(x)
        yield helper(got)

    backend = Counting()
    with pytest.warns(FuseeWarning):
        made: Any = fusee.compile(numbers, backend=backend)
    running = made(X)
    assert torch.equal(next(running), helper(X))
    assert torch.equal(running.send(X + 1), helper(X + 1))
    assert len(backend.graphs) == 2


# ------------------------------------------------------------------------------ held against eager

LOCKS = threading.Lock(), threading.RLock(), threading.Condition()
HELD = {"k": 1}


def under_locks(x: Tensor) -> Any:
    lock, again, condition = LOCKS
    y = x * 2
    with lock:
        y = y + HELD["k"]
        HELD["k"] += 1
        is_held = lock.locked()
    with again, again, condition:
        y = y * 3
    lock.acquire()
    try:
        y = y.sin()
    finally:
        lock.release()
    return y, is_held, lock.locked()


def drawn(x: Tensor) -> Any:
    numbers = [1, 2, 3]
    first, second = random.random(), random.gauss(0, 1)
    random.shuffle(numbers)
    own = random.Random(4)
    return x * first + second + own.random(), numbers, random.choice(numbers), random.gauss(1, 2)


PARAMETER = nn.Parameter(torch.ones(4))
GRU = nn.GRU(4, 5, bidirectional=True)


def other_data(x: Tensor) -> Any:
    y = x.sin()
    PARAMETER.data = x.detach() + 1
    y.data = x.data * 2
    return y, PARAMETER * 2


def nested(x: Tensor) -> Any:
    parts = torch.nested.nested_tensor([x.sin(), x[:2].cos()])
    return parts.to_padded_tensor(0.0) * 2


def packed(x: Tensor) -> Any:
    several = [x.sin().expand(3, 4), x.expand(2, 4) * 2]
    given = nn.utils.rnn.pack_sequence(several)
    out, last = GRU(given)
    padded, sizes = nn.utils.rnn.pad_packed_sequence(out)
    return padded.tanh(), last * 2, sizes


def with_hooks(x: Tensor) -> Any:
    y, told = x * 2, list[Any]()
    if x.requires_grad:
        y.register_hook(lambda grad: grad * 3)
        x.register_hook(lambda grad: told.append("input"))
        x.register_post_accumulate_grad_hook(lambda leaf: told.append(leaf.grad.mul_(2)))
        y.retain_grad()
        handle = y.register_hook(lambda grad: grad * 5)
        z = y.cos()
        handle.remove()
        z.sum().backward(retain_graph=True)
        return z, y.grad, told
    return y


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("program", [under_locks, drawn, other_data, nested, packed, with_hooks])
def test_what_breaks_is_eagers(program: Callable[[Tensor], Any], is_training: bool) -> None:
    outcomes = []
    traced = Traced(program)
    for call in (program, traced):
        random.seed(3)
        HELD["k"], PARAMETER.data, seen = 1, torch.ones(4), []
        GRU.zero_grad()
        for _ in range(4):
            x = torch.arange(4.0).requires_grad_(is_training)
            result = call(x)
            if is_training and result[0].requires_grad:
                result[0].sum().backward()
            seen.append(str((result, x.grad, PARAMETER, GRU.weight_hh_l0.grad)))
        outcomes.append((seen, random.getstate(), HELD["k"]))
    assert outcomes[0] == outcomes[1], traced.stops
    assert traced.graphs and not any(stop.startswith("eager") for stop in traced.stops)


def test_what_a_lock_guards_is_read_when_it_is_taken() -> None:
    lock, is_taken, may_end = LOCKS[0], threading.Event(), threading.Event()

    def program(x: Tensor) -> Tensor:
        y = x * 1
        may_end.set()
        with lock:
            return y + HELD["k"]

    def other() -> None:
        with lock:
            is_taken.set()
            may_end.wait(30)
            HELD["k"] = 60

    traced, HELD["k"] = Traced(program), 1
    assert torch.equal(traced(X), X + 1)
    for event in (is_taken, may_end):
        event.clear()
    thread = threading.Thread(target=other)
    thread.start()
    assert is_taken.wait(30)
    assert torch.equal(traced(X), X + 60)
    thread.join()
