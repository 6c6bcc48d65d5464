"""Errors that graphs raise while they run: they reach the program as if Python had run it."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusee
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from fusee.fake import fake_mode
from tests.capturing.same import Traced, same

T = Any
WEIGHT = torch.arange(12.0).reshape(4, 3)
INSIDE, OUTSIDE = torch.tensor([1, 2]), torch.tensor([1, 9])


def caught(index: T, log: T) -> T:
    log.append("before")
    try:
        y = F.embedding(index, WEIGHT)
        log.append("found")
    except IndexError as error:
        log.append(str(error))
        y = WEIGHT[:2]
    finally:
        log.append("after")
    return y * 2, log


def not_caught(index: T, log: T) -> T:
    log.append("before")
    y = F.embedding(index, WEIGHT)  # the line
    log.append("after")
    return y, log


def caught_after_a_break(index: T, log: T) -> T:
    try:
        if index.sum() > 0:
            log.append("positive")
        log.append(F.embedding(index, WEIGHT).sum())
    except IndexError:
        log.append("caught")
        if index.max() > 8:
            log.append("large")
    return WEIGHT + 1, log


def random_before(index: T, log: T) -> T:
    noise = torch.rand(2) + F.dropout(WEIGHT)[0, 0]
    try:
        y = F.embedding(index, WEIGHT)
    except IndexError:
        y = WEIGHT[:2]
    return noise, torch.rand(2), y


def in_no_grad(index: T, log: T) -> T:
    try:
        with torch.no_grad():
            y = F.embedding(index, WEIGHT)
    except IndexError:
        y = WEIGHT[:2]
    return y, torch.is_grad_enabled()


def of_no_use(index: T, log: T) -> T:
    WEIGHT[index]
    torch.gather(WEIGHT, 0, index[:, None])
    return index + 1


@pytest.mark.parametrize("index", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize("fn", [of_no_use, caught, not_caught, random_before, in_no_grad])
def test_an_error_of_a_graph_is_the_programs(fn: Callable[..., Any], index: T) -> None:
    same(fn, index, [])


@pytest.mark.parametrize("index", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_an_error_of_a_graph_after_a_break(index: T) -> None:
    same(caught_after_a_break, index, [], breaks=True)


def test_the_traceback_shows_the_line() -> None:
    traced = Traced(not_caught)
    traced(INSIDE, [])
    with pytest.raises(IndexError) as raised:
        traced(OUTSIDE, [])
    assert "# the line" in traceback.extract_tb(raised.tb)[-2].line
    assert raised.value.__context__ is None and len(traced.graphs) == 1


ERRORS = (RuntimeError, ValueError)


def traced_lines() -> list[str]:
    return [x for x in traceback.format_exc().splitlines() if not x.startswith("  File <")]


def raising(x: T, k: int) -> T:
    if k:
        raise ValueError("k")  # a place
    return x.view(7)


def in_turn(x: T, k: int) -> T:
    try:
        yield x
    except KeyError:
        yield traced_lines()
    yield raising(x, k)


def handled(x: T, k: int) -> T:
    try:
        raising(x + 1, k)
    except ERRORS:
        return x * 2, traced_lines()


def handled_later(x: T, k: int) -> T:
    try:
        raising(x, k)
    except ERRORS as error:
        kept = error
    return x * 2, traceback.format_exception(kept)


def returned(x: T, k: int) -> T:
    try:
        raising(x, k)
    except ERRORS as error:
        return error


def from_another(x: T, k: int) -> T:
    try:
        try:
            raising(x, k)
        except ERRORS as error:
            raise RuntimeError("second") from error
    except RuntimeError:
        return x, traced_lines()


def raised_once_more(x: T, k: int) -> T:
    try:
        try:
            raising(x, k)
        except ERRORS as error:
            x.tolist()
            raise error  # again
    except ERRORS:
        return x + 1, traced_lines()


class Telling:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> bool:
        self.told = traceback.format_tb(error[2])
        return True


def left_by_it(x: T, k: int) -> T:
    with Telling() as it:
        raising(x, k)
    return x + 1, it.told


def thrown(x: T, k: int) -> T:
    it = in_turn(x, k)
    next(it)
    return x + 1, it.throw(KeyError("thrown"))


def entries_of_one(x: T, k: int) -> T:
    try:
        [*in_turn(x, k)]
    except ERRORS as error:
        names, at = [], error.__traceback__
        while at is not None:
            names.append((at.tb_frame.f_code.co_name, at.tb_lineno))
            at = at.tb_next
        return x + 1, names


def within_finally(x: T, k: int) -> T:
    try:
        raising(x, k)
    finally:
        x.tolist()


_TRACED = [
    handled, handled_later, from_another, raised_once_more, left_by_it, thrown, entries_of_one,
]  # fmt: skip


@pytest.mark.parametrize("fn", [*_TRACED, returned, within_finally])
@pytest.mark.parametrize("k", [0, 1])
def test_tracebacks_are_eagers(fn: Callable[..., Any], k: int) -> None:
    traced = Traced(fn)

    def of(run: Callable[..., Any]) -> Any:
        try:
            found = run(torch.ones(3), k)
        except ERRORS as raised:
            found = raised
        if not isinstance(found, Exception):
            return found[1]
        listed = traceback.extract_tb(found.__traceback__)[1:]
        return [(x.name, x.lineno, x.colno) for x in listed if x.filename == __file__]

    for _ in range(2):
        assert of(traced) == of(fn) != []


def test_what_is_done_before_a_tensor_without_values_is_read() -> None:
    def fn(x: T, log: T) -> T:
        log.append("before")
        return x.item()

    traced, log = Traced(fn), []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="meta"):
            traced(torch.ones(1, device="meta"), log)
    assert log == ["before"] * 2


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(2), lambda x: x[0].mul_(2), torch.no_grad()(lambda x: x.neg_())]
)
def test_a_view_of_a_leaf_is_one_after_a_break(write: Any) -> None:
    def fn(leaf: T) -> T:
        view = leaf.view(2, 2)
        print(end="")
        try:
            write(view)
        except RuntimeError as error:
            return str(error)
        return view + 1

    found = [run(torch.ones(4, requires_grad=True)) for run in (fn, Traced(fn))]
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize(
    "move",
    [lambda x: x.cpu(), lambda x: x.to(torch.ones(1)), lambda x: x.to("cpu", torch.float64) * 2],
)
def test_what_has_no_values_is_not_moved(move: Any) -> None:
    def fn(x: T) -> T:
        try:
            move(x)
        except NotImplementedError as error:
            return str(error)

    x = torch.ones(3, device="meta")
    assert Traced(fn)(x) == fn(x) is not None


def raises_what_it_is_given(x: T, error: T) -> T:
    def inner() -> None:
        raise error

    try:
        inner()
    except ValueError as found:
        return x + 1, found


def test_an_error_from_outside_gets_its_entries_once() -> None:
    traced, lengths = Traced(raises_what_it_is_given), []
    for run in (raises_what_it_is_given, traced):
        error = ValueError()
        for _ in range(3):
            run(torch.ones(3), error)
            lengths.append(len(traceback.extract_tb(error.__traceback__)))
    assert lengths == [2, 4, 6] * 2 and len(traced.graphs) == 2  # with and without a traceback


def test_what_is_written_before_and_after_an_error() -> None:
    """The graph writes when all that may raise is over, so that Python can run it again."""

    def counts(before: T, after: T, index: T) -> T:
        twice, half = before * 2 + 1, after // (before * 2 + 1)
        before.add_(1)
        found = WEIGHT[index]
        after.add_(half)
        return found * twice

    for index in (INSIDE, OUTSIDE):
        found = []
        for call in (Traced(counts), counts):
            numbers = torch.tensor(3), torch.tensor(10)
            with pytest.raises(IndexError) if index is OUTSIDE else contextlib.nullcontext():
                call(*numbers, index)
            found.append(numbers)
        assert found[0] == found[1]


def selects(x: T, index: T, log: T) -> T:
    log.append("before")
    x[index.nonzero().shape[0]] = 1
    log.append("after")


def inverts(x: T, index: T, log: T) -> T:
    log.append("before")
    x += 1
    found = torch.linalg.inv(index.new_zeros(2, 2, dtype=x.dtype))
    log.append("after")
    return found


def inverts_an_array(x: T, index: T, log: T) -> T:
    log.append("before")
    found = np.linalg.inv(np.diag(x.numpy()) * 0)
    x += 1
    log.append("after")
    return found


@pytest.mark.parametrize("make", [Traced, fusee.compile], ids=["as captured", "compiled"])
@pytest.mark.parametrize("fn", [selects, inverts, inverts_an_array])
def test_an_error_before_the_first_write_is_the_programs(
    fn: Callable[..., Any], make: Callable[..., Any]
) -> None:
    found = []
    for call in (fn, make(fn)):
        x, log = torch.ones(2), []
        with pytest.raises(Exception, match=r".") as raised:
            call(x, INSIDE, log)
        error = raised.value
        found.append((type(error), str(error), getattr(error, "__notes__", None), x.tolist(), log))
    eager, compiled = found
    if fn is inverts and make is Traced:  # operator by operator: written to before it raises
        assert "changes its inputs" in compiled[2][0]
    else:
        assert eager == compiled


def fills(x: T, y: T, at: T) -> None:
    x[0] = 7
    y.index_fill_(0, at, 3.0)


def reads(x: T, y: T, at: T) -> T:
    x[0] = 7
    return x[(y * 0 + at).sort().values.long()] + y[at[:2]]


def asks(x: T, y: T, at: T) -> T:
    y.index_fill_(0, at[:1] * 0, 1.5)
    return F.binary_cross_entropy(y, y)


STORES: list[Callable[..., Any]] = [
    fills, reads, asks, lambda x, y, at: x.add_(y[at]), lambda x, y, at: at.floor_divide_(at - 1)
]  # fmt: skip


@pytest.mark.parametrize("fn", STORES)
def test_kernels_check_before_they_write(fn: Callable[..., Any]) -> None:
    """What eager has written up to an error is there, and a bad place has written nowhere else."""
    found = []
    for call in (fn, fusee.compile(fn, options={"prices": False})):
        given = torch.zeros(4), torch.full((4,), 0.5), torch.tensor([2, -9, 1, 9])
        with pytest.raises(Exception, match=r".") as raised:
            call(*given)
        found.append((str(raised.value), [x.tolist() for x in given]))
    assert found[0] == found[1]


def test_a_graph_that_changes_inputs_says_so() -> None:
    def counts(seen: T, index: T) -> T:
        seen.view(-1)[index] = 0
        return F.embedding(index, WEIGHT)

    def scratch(index: T) -> T:
        return F.embedding(index, torch.zeros(4, 3).add_(1).relu_()), F.relu(WEIGHT * 2, True)

    with pytest.raises(IndexError) as raised:
        Traced(counts)(torch.zeros(2), OUTSIDE)
    assert "changes its inputs" in raised.value.__notes__[0]
    with pytest.raises(IndexError) as raised:
        Traced(scratch)(OUTSIDE)
    assert not hasattr(raised.value, "__notes__")


def test_a_finally_that_raises_as_well_is_heard() -> None:
    def fn(seen: T, index: T, log: T) -> T:
        seen.add_(1)
        try:
            seen = seen + F.embedding(index, WEIGHT)[0, 0]
        finally:
            log.append(index.to("there"))
        return seen

    def plain(seen: T, index: T) -> T:
        before, found = seen, None
        try:
            found = F.embedding(index, WEIGHT) + seen.add_(1).sum()
        finally:
            before = found
        return before

    def nested(seen: T, index: T, log: T) -> T:
        seen.add_(1)
        try:
            seen = seen + F.embedding(index, WEIGHT)[0, 0]
        finally:
            try:
                log.append(1)
            except KeyError:
                log.append(2)
            log.append(index.to("there"))
        return seen

    for index in (INSIDE, OUTSIDE):
        for run in (fn, nested):
            with pytest.raises(RuntimeError, match="there"):
                Traced(run)(torch.zeros(2), index, [])
    assert not same(plain, torch.zeros(2), INSIDE).stops


def after_a_write(index: T, seen: T, log: T) -> T:
    seen.add_(1)
    try:
        y = F.embedding(index, WEIGHT)
    except IndexError:
        log.append("caught")
        y = WEIGHT[:2]
    return y, seen


def before_a_write(index: T, seen: T, log: T) -> T:
    try:
        y = F.embedding(index, WEIGHT)
        seen.add_(1)
    except IndexError:
        log.append("after")
        raise
    return y, seen


def within_a_manager(index: T, seen: T, log: T) -> T:
    with torch.no_grad(), contextlib.suppress(IndexError):
        seen.add_(1)
        log.append(F.embedding(index, WEIGHT).sum())
    return seen


def by_a_write(index: T, seen: T, log: T) -> T:
    try:
        seen[index[0] - 2] = 1.0
    except IndexError:
        log.append("caught")
    return seen


def another_in_the_end(index: T, seen: T, log: T) -> T:
    try:
        seen.add_(1)
        log.append(F.embedding(index, WEIGHT))
    finally:
        log.append("over")
        if len(log) == 1:
            raise KeyError(index)
    return seen


@pytest.mark.parametrize("index", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize(
    "fn", [after_a_write, before_a_write, within_a_manager, by_a_write, another_in_the_end]
)
def test_an_error_that_is_handled_beside_a_write_to_an_input(
    fn: Callable[..., Any], index: T
) -> None:
    same(fn, index, torch.zeros(2), [], breaks=True)


def counted(index: T, seen: T, log: T) -> T:
    try:
        log.append(index.sum())
        counts = torch.bincount(index, minlength=4)[:2]
        seen.mul_(2).add_(counts)
    except RuntimeError as error:
        log.append(str(error))
    return seen + 1


def drawn(index: T, seen: T, log: T) -> T:
    y, z = F.dropout(torch.ones(8)), seen * 2
    with Told(log):
        a = torch.linalg.inv(torch.eye(2) * index.sum())
        seen.add_(z).add_(a[0])
    return y, seen, torch.rand(2)


def looked_up(index: T, seen: T, log: T) -> T:
    try:
        part = WEIGHT[index].sum(1)
    except IndexError:
        log.append("caught")
        part = torch.ones(2)
    finally:
        log.append("over")
    seen[:2] += part[:2]
    return seen.sum()


class Told:
    def __init__(self, log: T) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("entered")

    def __exit__(self, kind: T, *_: T) -> bool:
        self.log.append(kind and kind.__name__)
        return True


@pytest.mark.parametrize("backend", ["fusee", "eager"])
@pytest.mark.parametrize("fn", [counted, drawn, looked_up])
def test_what_may_raise_before_all_writes_to_inputs_is_in_their_graph(
    fn: Callable[..., Any], backend: str
) -> None:
    """Where it raises, all of it runs again in Python: nothing has been written to."""
    compiled = fusee.compile(fn, backend=backend, fullgraph=True)
    for index in ([0, 1], [0, 0], [-1, 0], [1, 1]):
        found = []
        for call in (fn, compiled):
            torch.manual_seed(0)
            seen, log = torch.ones(2), []
            found.append((call(torch.tensor(index), seen, log), seen, str(log)))
        torch.testing.assert_close(*(row[:2] for row in found))
        assert found[0][2] == found[1][2]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: x.as_strided((n,), (1,)),
        lambda x, n: torch.slice_scatter(x, x[:3], 0, 0, n),
        lambda x, n: torch.select_scatter(x, x[0], 0, n),
        lambda x, n: x.masked_select(x > 5)[0],
        lambda x, n: x.masked_select(x > n).narrow(0, 1, 1),
        lambda x, n: x.masked_select(x > n).max(),
        lambda x, n: F.conv1d(x[:n].view(1, 1, n), torch.ones(1, 1, 3)),
        lambda x, n: int(x[n], 10),
    ],
)
def test_an_error_of_what_nobody_uses_for_a_size_that_is_open(call: Callable[..., Any]) -> None:
    def fn(x: T, n: int) -> T:
        call(x, n)
        return x + 1

    traced = Traced(fn)
    for n in (3, 2, 4, 9, 1):
        assert told(lambda n=n: traced(torch.arange(4.0), n)) == told(
            lambda n=n: fn(torch.arange(4.0), n)
        )


def told(refused: Callable[[], Any]) -> Any:
    """What a handler sees of an error, and of the one that was handled when it was raised."""
    try:
        try:
            raise KeyError(1)
        finally:
            refused()
    except Exception as error:  # noqa: BLE001
        return repr(error), repr(error.__context__)


def test_an_attribute_of_open_sizes_is_asked_of_the_tensor_itself() -> None:
    def fn(x: T) -> T:
        try:
            told = x.nbytes
        finally:
            hash(repr(os.getpid()))
        return told

    traced = Traced(fn)
    for n in (3, 2, 4):
        assert traced(torch.ones(n, 2)) == 8 * n


REFUSED: list[Callable[[T], Any]] = [
    lambda x: x.nothing,
    lambda x: x + "a",
    lambda x: x * None,
    lambda x: torch.add(x),
    lambda x: x.requires_grad_(x > 0),
    lambda x: (x.sum().item() + 1).__setitem__(0, 1),
]


@pytest.mark.parametrize("refused", REFUSED)
def test_no_message_names_a_stand_in(refused: Callable[[T], Any]) -> None:
    def program(x: T) -> Any:
        return told(lambda: refused(x))

    assert Traced(program)(torch.ones(3)) == program(torch.ones(3))


def test_an_error_of_the_backend_alone_is_not_hidden() -> None:
    def backend(gm: Any, examples: Any) -> Any:
        def run(*inputs: Any) -> Any:
            raise RuntimeError("the backend is broken")

        return run

    calls = []
    fast = CompiledFunction(lambda x: calls.append(1) or x + 1, backend, Policy())
    with pytest.raises(RuntimeError, match="the backend is broken"):
        fast(WEIGHT)
    assert calls == []


def unused_norm(norm: T, x: T) -> T:
    norm(x)
    return x + 1


@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_are_kept_though_nobody_uses_the_result(make: Any) -> None:
    norm = make(3, track_running_stats=True)
    same(unused_norm, norm, torch.arange(24.0).reshape(2, 3, 4))
    same(unused_norm, nn.Embedding(4, 3, max_norm=1.0), INSIDE)


@pytest.mark.parametrize("is_trained", [False, True])
def test_an_interrupt_while_a_mode_is_entered(
    monkeypatch: pytest.MonkeyPatch, is_trained: bool
) -> None:
    """All that torch computed after it would be FakeTensors."""
    mode, enter = type(fake_mode()), type(fake_mode()).__enter__
    x = torch.ones(3, requires_grad=is_trained)
    compiled = fusee.compile(lambda x: x.sin() * 2)

    def interrupted(self: Any) -> Any:
        enter(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mode, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
    assert type(torch.ones(2)) is torch.Tensor
    assert torch.equal(compiled(x), x.sin() * 2)


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """What its handler raises comes when that is over, and at once when it comes again: a timeout
    would be lost or another error, and C++ ends the process."""
    mode, enter = type(fake_mode()), type(fake_mode()).__enter__
    seen, due = [], [signal.SIGUSR1] * count
    compiled = fusee.compile(lambda x: x.sin() * 2)

    def timed_out(number: int, frame: Any) -> None:
        seen.append(signal.getsignal(number) is timed_out)  # whether that is over
        raise TimeoutError

    def interrupted(self: Any) -> Any:
        while due:
            os.kill(os.getpid(), due.pop())
        return enter(self)

    before = signal.signal(signal.SIGUSR1, timed_out)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(mode, "__enter__", interrupted)
            with pytest.raises(TimeoutError):
                compiled(torch.ones(3))
        assert seen == [False, True][-count:]
        assert signal.getsignal(signal.SIGUSR1) is timed_out
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() * 2)


def test_an_error_leaves_what_is_around_a_later_call() -> None:
    """Autocast that is off counts how deep it is, and no version asks for that."""
    compiled = fusee.compile(lambda x, i: x[i] * 2)
    compiled(torch.ones(3), torch.tensor(1))
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", enabled=False):
        with pytest.raises(IndexError):
            compiled(torch.ones(3), torch.tensor(7))
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
    assert depth == 3
