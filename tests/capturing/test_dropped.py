"""Generators that are dropped while they are suspended are closed at once, as CPython does it."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fusee
from tests.capturing.same import Traced, shape_of


def g(log, n=3, name="g"):
    try:
        for i in range(n):
            yield i
    finally:
        log.append(f"close {name}")


def brk():
    sys.stdout.write("")


def leaves_a_loop(x, log):
    for v in g(log):
        if v == 1:
            break
    log.append("after")
    return x * v


def returns_from_a_loop(x, log):
    def first():
        for v in g(log):
            return v

    r = first()
    log.append("after")
    return x * r


def asks_once(x, log):
    v = next(g(log))
    log.append("after")
    return x + v


def rebinds(x, log):
    it = g(log)
    next(it)
    log.append("mid")
    it = None
    log.append("after")
    return x


def deletes(x, log):
    it = g(log)
    next(it)
    log.append("mid")
    del it
    log.append("after")
    return x


def returns(x, log):
    it = g(log)
    next(it)
    return x  # dropped at the return


def clears(x, log):
    l = [g(log, name="a"), g(log, name="b")]
    [next(i) for i in l]
    l.clear()
    log.append("after")
    return x


def zips(x, log):
    r = list(zip([1, 2], g(log)))
    log.append("after")
    return x, r


def asks_any(x, log):
    r = any(v == 1 for v in g(log))
    log.append("after")
    return x, r


def delegates(x, log):
    def outer():
        try:
            yield from g(log)
        finally:
            log.append("outer")

    for v in outer():
        break
    log.append("after")
    return x


def raises(x, log):
    try:
        for v in g(log):
            raise ValueError
    except ValueError:
        log.append("caught")
    log.append("after")
    return x


def breaks_while_closing(x, log):
    def h():
        try:
            yield 1
        finally:
            brk()
            log.append("closed")

    for v in h():
        break
    log.append("after")
    return x * v


def drops_a_manager(x, log):
    @contextlib.contextmanager
    def cm():
        log.append("in")
        try:
            yield
        finally:
            log.append("out")

    with cm():
        x = x + 1
    c = cm()
    c.__enter__()
    del c
    log.append("after")
    return x


def drops_after_a_break(x, log):
    it = g(log)
    next(it)
    y = x + 1
    brk()
    it = None
    log.append("after")
    return y * 2


def raises_while_closing(x, log):
    def h():
        try:
            yield 1
        finally:
            try:
                raise KeyError
            except KeyError:
                log.append("inner")

    for v in h():
        break
    return x, list(log)


def overwrites(x, log):
    class C:
        def __init__(s):
            s.it = g(log)
            next(s.it)

    c = C()
    c.it = None
    log.append("after")
    d = C()
    return x


def hands_on(x, log):
    def use(it):
        next(it)
        log.append("in use")

    use(g(log))
    log.append("after")
    return x


def sees_the_exit(x, log):
    def h():
        try:
            y = yield 1
        except GeneratorExit:
            log.append("exit")
            raise
        else:
            log.append("else")

    i = h()
    next(i)
    i.close()
    log.append("closed")
    j = h()
    next(j)
    return x


def changes_a_global(x, log):
    def h():
        global SEEN
        try:
            yield 1
        finally:
            SEEN = SEEN + 1

    for v in h():
        break
    return x * SEEN


SEEN = 0


def drops_lazy_ones(x, log):
    e = enumerate(g(log))
    next(e)
    e = map(str, g(log, name="m"))
    next(e)
    log.append("x")
    e = None
    return x


def suppresses(x, log):
    def h():
        with contextlib.suppress(ValueError):
            yield 1
        log.append("end")

    for v in h():
        break
    for v in h():
        pass
    return x


def gives_away(x, log):
    it = g(log)
    next(it)
    return x, (i for i in it)


def nests(x, log):
    try:
        for v in g(log):
            for w in g(log, name="inner"):
                return x * v
    finally:
        log.append("fin")


def loops(x, log):
    out = []
    while True:
        for v in g(log):
            out.append(v)
            if len(out) % 2:
                break
        if len(out) > 4:
            break
    return x, out


def throws_into_what_it_delegates_to(x, log):
    def inner():
        try:
            yield 1
        except ValueError:
            yield 2
        except KeyError:
            return 3

    def outer():
        for _ in range(2):
            log.append((yield from inner()))
        yield from [4, 5]

    first, second = outer(), outer()
    log += [next(first), first.throw(ValueError("a")), list(first)]
    log += [next(second), second.throw(KeyError), next(second), next(second)]
    with contextlib.suppress(ValueError):
        second.throw(ValueError("b"))
    return x


def closes_what_it_delegates_to(x, log):
    class Once:
        def __iter__(self):
            return self

        def __next__(self):
            return 1

        def close(self):
            log.append("closed")
            raise KeyError("while closing")

    def outer(inner):
        try:
            yield from inner
        except KeyError as error:
            log.append(repr(error))
        finally:
            log.append("outer")

    for inner in (g(log), Once()):
        it = outer(inner)
        next(it)
        it.close()
    return x


def handles_while_suspended(x, log):
    def h():
        try:
            raise KeyError("own")
        except KeyError:
            yield 1
            try:
                raise
            except KeyError as error:
                log.append(repr(error))
            yield 2
        try:
            raise
        except RuntimeError as error:
            log.append(str(error))

    log.append(list(h()))
    return x


def drained(x: Any) -> Any:
    """With lists in place of iterators."""
    if isinstance(x, (tuple, list)) or hasattr(x, "__next__"):
        return [drained(item) for item in x]
    return x


def outcome(program: Callable[..., Any]) -> Any:
    global SEEN
    SEEN, log = 1, []
    result = drained(program(torch.ones(2), log))
    gc.collect()
    return shape_of((result, log))


PROGRAMS = [
    x for x in vars().values() if getattr(x, "__code__", g.__code__).co_varnames[:2] == ("x", "log")
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_closed_when_dropped(program: Callable[..., Any]) -> None:
    traced = Traced(program)
    want = outcome(program)
    for _ in range(2):
        assert outcome(traced) == want, traced.stops
    breaks = program in (breaks_while_closing, drops_after_a_break)
    assert bool(traced.stops) == breaks and len(traced.graphs) <= 1 + breaks
    assert not any(stop.startswith("eager") for stop in traced.stops)


# ---------------------------------------------------------------------------- ends that are told
# What tells the program that nobody has it any more does so where eager does.


class _Object:
    pass


class _Telling:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.append("gone")


def _callback(x: Any, log: list[str]) -> Any:
    a = _Object()
    ref = weakref.ref(a, lambda r: log.append("gone"))
    y = x * 2
    del a
    return y + len(log), ref() is None


def _finalized(x: Any, log: list[str]) -> Any:
    a = _Object()
    weakref.finalize(a, log.append, "gone")
    y = x * 2
    a = None
    return y + len(log), a


def _deleted(x: Any, log: list[str]) -> Any:
    a = _Telling(log)
    brk()
    y = x * 2
    del a
    return y + len(log)


def _overwritten(x: Any, log: list[str]) -> Any:
    a = _Telling(log)
    brk()
    y = x * 2
    a = y
    return a + len(log)


def _within_iterators(x: Any, log: list[str]) -> Any:
    try:
        for k, _ in enumerate(zip(g(log), itertools.count())):
            brk()
            {}[k]
    except KeyError:
        log.append("caught")
    return x + len(log)


def _held_by_a_generator(x: Any, log: list[str]) -> Any:
    held = (k for k in g(log))
    next(held)
    brk()
    y = x * 2
    held = None
    return y + len(log)


def _in_the_order_of_variables(x: Any, log: list[str]) -> Any:
    a = g(log, name="a")
    next(a)
    brk()
    b = g(log, name="b")
    next(b)
    return x + 1


def _in_the_order_of_their_names(x: Any, log: list[str]) -> Any:
    if len(log) > 5:
        a = None
    b = g(log, name="b")
    next(b)
    a = g(log, name="a")
    next(a)
    return x + 1


def _kept_by_an_error(x: Any, log: list[str]) -> Any:
    def raises(breaks):
        first, second = g(log, name="first"), Told(log)
        next(first)
        if breaks:
            brk()
        try:
            raise ValueError
        except ValueError as error:
            own = error  # which has this frame
            raise
        finally:
            log.append("leaves")
            own = None

    for breaks in (False, True):
        try:
            raises(breaks)
        except ValueError:
            log.append("caught")
        log.append("after")
        try:
            raises(breaks)
        except ValueError as error:
            kept = error
        log.append("kept")
        kept = None
        log.append("let go")
    return x + 1


class Told:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.append("ends")


@pytest.mark.parametrize(
    "fn",
    [
        _callback, _finalized, _deleted, _overwritten, _within_iterators, _held_by_a_generator,
        _in_the_order_of_variables, _in_the_order_of_their_names, _kept_by_an_error,
    ],
)  # fmt: skip
def test_ends_that_are_told(fn: Any) -> None:
    compiled = fusee.compile(fn, backend="eager")
    for _ in range(2):
        ours: list[str] = []
        theirs: list[str] = []
        x = torch.ones(2)
        assert str((compiled(x, ours), ours)) == str((fn(x, theirs), theirs))


def _caught_from_c(x: Any, log: list[str], outer: Any) -> Any:
    running = g(log)
    next(running)
    try:
        outer.throw(ValueError())
    except ValueError:
        pass
    return x + 1


def _caught_beside_a_break(x: Any, log: list[str], outer: Any) -> Any:
    running = g(log)
    next(running)
    try:
        brk()
        [][len(log)]
    except IndexError as error:
        log.append(repr(error))
        brk()
    return x + 1


def _caught_and_raised(x: Any, log: list[str], outer: Any) -> Any:
    running = g(log)
    next(running)
    try:
        try:
            outer.throw(ValueError())
        finally:
            brk()
    except ValueError:
        log.append("caught")
    return x + 1


def _named_at_a_break(x: Any, log: list[str], outer: Any) -> Any:
    running = g(log)
    next(running)
    try:
        outer(1)
    except TypeError as error:
        log.append(repr(error))
        zip(outer)
    return x + 1


@pytest.mark.parametrize(
    "fn", [_caught_from_c, _caught_beside_a_break, _caught_and_raised, _named_at_a_break]
)
def test_no_exception_that_is_over_keeps_what_frames_held(fn: Any) -> None:
    compiled = Traced(fn)
    gc.disable()
    try:
        for _ in range(3):
            found: list[Any] = []
            for run in (fn, compiled):
                log: list[str] = []
                run(torch.ones(2), log, g([]))
                found.append([*log])
            assert found[0] == found[1]
    finally:
        gc.enable()


def _not_caught(x: Any, log: list[str]) -> Any:
    kept = g(log)
    next(kept)
    x()
    return kept


def test_an_exception_that_leaves_keeps_the_variables_and_no_longer() -> None:
    compiled = Traced(_not_caught)
    gc.disable()
    try:
        for _ in range(3):
            found: list[Any] = []
            for run in (_not_caught, compiled):
                log: list[str] = []
                with contextlib.suppress(TypeError):
                    try:
                        run(torch.ones(2), log)
                    finally:
                        log.append("left")
                found.append([*log])
            assert found[0] == found[1]
    finally:
        gc.enable()


def _raises_in_zip(x, log, given):
    def summed(a):
        return sum(a)

    return [*zip(g(log), map(summed, [1, 2]))]


def test_an_error_from_c_does_not_keep_what_its_call_was_given() -> None:
    found = []
    for function in (_raises_in_zip, fusee.compile(_raises_in_zip, backend="eager")):
        log: list[Any] = []
        try:
            function(torch.ones(2), log, iter(range(2)))
        except TypeError as error:
            log.append(str(error))
        log.append("end")
        found.append(log)
    assert found[0] == found[1]


def test_what_no_version_fits_is_not_kept() -> None:
    def fn(x: Any, given: Any) -> Any:
        return x if given is None else x + 1

    compiled, given = Traced(fn), {1, 2}
    compiled(torch.ones(2), None)
    compiled(torch.ones(2), given)
    seen = weakref.ref(given)
    del given
    assert seen() is None


class _Whole(int):
    pass


def test_a_class_that_was_asked_for_as_an_abstract_ones_is_let_go_of() -> None:
    assert not isinstance(_Whole(), Sequence)  # from now on a weak reference of abc's watches it
    traced = Traced(lambda x: _Whole(brk() or 3) * x)
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 3.0))
    assert not any("let go" in stop for stop in traced.stops), traced.stops


def test_a_frame_that_compiling_left_keeps_nothing_of_the_program() -> None:
    frames = []

    def backend(gm: Any, examples: Any) -> Any:
        frames.append(sys._getframe())  # as an error does that an import keeps
        return gm.forward

    def fn(x: Any, log: list[str]) -> Any:
        kept = g(log)
        next(kept)
        brk()
        y = x + 1
        brk()
        del kept
        log.append("after")
        return y

    compiled, found = fusee.compile(fn, backend=backend), []
    for run in (fn, compiled, compiled):
        log: list[str] = []
        run(torch.ones(2), log)
        found.append(log)
    assert found[0] == found[1] == found[2] and frames
