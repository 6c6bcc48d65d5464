"""What the fuzzer found, each fault as the smallest function that showed it."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import heapq
import logging
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar, cast, get_args

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import fusee
from tests.capturing.same import Traced, same, shape_of

LOG: list[Any] = []
WEIGHT = torch.tensor([0.5, -1.0])
Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def _empty_log() -> None:
    LOG.clear()


def opaque(k: int) -> int:
    return zlib.crc32(str(k).encode()) % 5


def alike(fn: Callable[..., Any], *args: Any) -> Traced:
    """Eager and compiled tell the same and log the same; breaks and eager runs are allowed."""
    traced = Traced(fn)
    told = []
    for run in (fn, traced):
        LOG.clear()
        WEIGHT.copy_(torch.tensor([0.5, -1.0]))
        for _ in range(2):
            try:
                result = run(*args)
            except Exception as error:  # noqa: BLE001  # the exception is what is compared
                result = type(error), str(error), type(error.__context__)
            LOG.append(("result", result))
        told.append(shape_of([LOG, WEIGHT]))
    assert told[0] == told[1], traced.stops
    return traced


def test_a_method_that_is_alive_at_a_break_is_not_called_while_capturing() -> None:
    def fn() -> Any:
        LOG.append(opaque(3))
        return missing  # type: ignore[name-defined]  # noqa: F821

    alike(fn)


def test_a_partial_that_is_alive_at_a_break() -> None:
    def fn(x: torch.Tensor) -> Any:
        add = functools.partial(torch.add, alpha=2)
        k = opaque(1)
        return add(x, k)

    same(fn, torch.ones(2), breaks=True)


def test_a_generator_that_is_dropped_is_closed() -> None:
    def steps() -> Iterator[int]:
        try:
            yield 1
        finally:
            LOG.append("closed")

    def fn(x: torch.Tensor) -> Any:
        first = next(steps())
        LOG.append("after")
        return x + first

    def broken(x: torch.Tensor) -> Any:
        running = steps()
        first = next(running)
        return x + first + x.sum().item()

    alike(fn, torch.ones(2))
    alike(broken, torch.ones(2))


def test_an_iterator_that_two_names_share_across_a_break() -> None:
    def fn(items: list[int]) -> Any:
        iterator = iter(items)
        for item in iterator:
            if opaque(item) < 9:
                break
        return list(iterator), items

    same(fn, [1, 2, 3], breaks=True)


def test_an_iterator_over_a_display_that_was_filled_across_a_break() -> None:
    def fn() -> None:
        for item in [*[opaque(k) for k in (0, 2, 4)]]:
            LOG.append(item)
            WEIGHT.mul_(WEIGHT.sum().item())

    alike(fn)


def test_an_iterator_of_a_list_that_changes_later() -> None:
    def fn(items: list[int]) -> Any:
        iterator = iter(items)
        items.insert(0, 7)
        return iterator, items

    def drained(items: list[int]) -> Any:
        iterator, items = traced(items)
        return list(iterator), items

    traced = Traced(fn)
    assert drained([1, 2]) == ([7, 1, 2], [7, 1, 2])


def test_order_of_attributes_that_come_back() -> None:
    class Box:
        def __init__(self) -> None:
            self.a, self.b = 1, 2

    def fn(box: Any) -> Any:
        del box.a
        box.a = 3
        return box

    assert list(vars(Traced(fn)(Box()))) == ["b", "a"]


def test_a_slice_is_assigned_from_the_list_itself() -> None:
    def fn(items: list[int]) -> Any:
        items.append(3)
        items[:] = items
        return items

    same(fn, [1, 2])


def test_deleting_what_only_getattr_finds() -> None:
    class Box:
        def __getattr__(self, name: str) -> int:
            return len(name)

    def fn(box: Any) -> None:
        del box.extra

    alike(fn, Box())


def test_a_tensor_that_is_no_leaf_may_be_written_to() -> None:
    def fn(x: torch.Tensor) -> Any:
        with contextlib.suppress(RuntimeError):
            x[0] = 2.0
        return x.detach()

    leaf = torch.ones(2, requires_grad=True)
    traced = Traced(fn)
    for k in (1, 2, 1):
        x = leaf * k if k == 2 else leaf
        assert traced(x).tolist() == ([2.0, 2.0] if k == 2 else [1.0, 1.0])


def test_a_cached_function_with_effects_runs_once() -> None:
    def noted(k: int) -> int:
        LOG.append(k)
        return k + 1

    def fn(x: torch.Tensor) -> Any:
        cached = functools.lru_cache(noted)
        return x + cached(2) + cached(2)

    alike(fn, torch.ones(2))


def test_named_tuples_stay_in_the_graph() -> None:
    same(lambda x: Pair(x + 1, [2]), torch.ones(2))


def test_a_wrapped_function_keeps_its_names() -> None:
    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(x: Any) -> Any:
            return function(function(x))

        return wrapper

    got = Traced(lambda: twice(opaque))()
    assert (got.__name__, got.__qualname__) == ("opaque", "opaque")
    assert got(3) == opaque(opaque(3))


def test_a_variable_of_a_cell_is_deleted_twice() -> None:
    def fn(x: torch.Tensor) -> Any:
        shared = 1

        def inner() -> int:
            return shared  # noqa: F821  # it is deleted below

        for _ in range(2):
            del shared
        return x + inner()

    alike(fn, torch.ones(2))


def test_the_frame_that_locals_and_super_see_at_a_break() -> None:
    class Base:
        def add(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Child(Base):
        def add(self, x: torch.Tensor) -> Any:
            k = x.sum().item()
            y = super().add(x)
            return y + k, sorted(locals()), dir()

    alike(Child.add, Child(), torch.ones(2))


def test_the_context_of_an_exception_that_is_alive_at_a_break() -> None:
    def fn(x: torch.Tensor) -> Any:
        try:
            raise ValueError("first")
        except ValueError:
            LOG.append(x.sum().item())
            raise KeyError("second")  # noqa: B904  # the context is what is tested

    alike(fn, torch.ones(2))


def test_defaults_that_change_between_calls() -> None:
    def inner(x: torch.Tensor, k: int = 1, *, more: int = 2) -> Any:
        return x.sum().item() + k * more

    def fn(x: torch.Tensor) -> Any:
        return inner(x), opaque(1)

    traced = Traced(fn)
    assert traced(torch.ones(2)) == fn(torch.ones(2))
    assert inner.__kwdefaults__ is not None
    inner.__kwdefaults__["more"] = 5
    assert traced(torch.ones(2)) == fn(torch.ones(2))
    inner.__defaults__ = (7,)
    assert traced(torch.ones(2)) == fn(torch.ones(2))


def test_what_a_call_was_given_is_freed_with_it() -> None:
    class Noted:
        def __del__(self) -> None:
            LOG.append("freed")

    def fn(x: torch.Tensor, noted: Any) -> Any:
        return x + x.sum().item()

    traced = Traced(fn)
    traced(torch.ones(2), Noted())
    assert LOG == ["freed"]


def test_a_draw_that_nobody_uses() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.bernoulli()
        return x + torch.rand(2)

    traced, x = Traced(fn), torch.full((2,), 0.5)
    torch.manual_seed(0)
    want = fn(x)
    torch.manual_seed(0)
    assert torch.equal(traced(x), want)


class _Scaled:
    """A sequence in Python, which reversed() asks by number."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 2 + self.scale // 4

    def __getitem__(self, k: int) -> int:
        return k * self.scale


def test_what_a_reversed_sequence_reads_is_checked() -> None:
    steps = _Scaled(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        for k in reversed(steps):
            x = 2 * x + k
        return x

    traced = Traced(fn)
    for scale in (3, 5, 5):
        steps.scale = scale
        assert traced(torch.ones(2)).tolist() == fn(torch.ones(2)).tolist()
    assert len(traced.graphs) == 2


def test_a_reversed_sequence_across_a_break_and_out_of_a_function() -> None:
    steps = _Scaled(9)

    def fn(x: torch.Tensor) -> Any:
        running = reversed(steps)
        first = next(running)
        y = x + first
        y = y + opaque(1)
        return y, next(running), list(running)

    def away(x: torch.Tensor) -> Any:
        running = reversed(steps)
        return x + next(running), running

    alike(fn, torch.ones(2))
    for run in (away, Traced(away)):
        y, running = run(torch.ones(2))
        assert type(running) is reversed and y[0] == 28.0 and list(running) == [18, 9, 0]


def test_a_convolution_of_signals_makes_rows() -> None:
    """at::_convolution makes a transposed signal contiguous: its result lies in rows."""
    for size in (1, 3):
        layer = torch.nn.Conv1d(16, 32, size)

        def fn(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return layer(x.transpose(1, 2)).transpose(1, 2)

        x = torch.randn(2, 13, 16)
        with torch.no_grad():
            assert fusee.compile(fn)(x).stride() == fn(x).stride()
        assert fusee.compile(fn)(x).stride() == fn(x).stride()


class Registered:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        LOG.append(("registered", cls.__name__))


class Noticed:
    def __set_name__(self, owner: Any, name: str) -> None:
        LOG.append(("named", name))


class Meta(type):
    def __new__(meta, name: str, *args: Any) -> Any:
        LOG.append(("made", name))
        return super().__new__(meta, name, *args)


@pytest.mark.parametrize("bases", [(Registered,), (), (Meta("Made", (), {}),)])
def test_making_a_class_runs_code_of_the_program_once(bases: tuple[type, ...]) -> None:
    def stated(x: torch.Tensor) -> Any:
        class Made(*bases):  # type: ignore[misc]
            part = Noticed() if not bases else 1

        return x + len(Made.__name__) + x.sum().item()

    def called(x: torch.Tensor) -> Any:
        made = type("Made", bases, {"part": Noticed()})
        return x + len(made.__name__) + x.sum().item()

    alike(stated, torch.ones(2))
    alike(called, torch.ones(2))


class Heard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def inferring(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _without_grad(x: torch.Tensor) -> None:
    x.grad = None


def _changed(x: torch.Tensor) -> torch.Tensor:
    WEIGHT.requires_grad_(not WEIGHT.requires_grad)
    return x * WEIGHT.detach()


@pytest.mark.parametrize("fn", [_without_grad, inferring, _changed])
def test_a_mode_is_told_of_the_calls_of_the_program_alone(fn: Callable[..., Any]) -> None:
    def within(x: torch.Tensor) -> Any:
        with Heard():
            return run(x)

    run: Any = fn
    want: list[Any] = []
    got: list[Any] = []
    for seen in (want, got):
        for _ in range(3):
            LOG.clear()
            within(torch.ones(2))
            seen.append(list(LOG))
        WEIGHT.requires_grad_(False)
        run = Traced(fn)
    assert got == want


def test_an_error_knows_the_name_that_is_missing() -> None:
    def fn(x: torch.Tensor) -> Any:
        try:
            return x + missing  # type: ignore[name-defined]
        except NameError as error:
            return error.name

    same(fn, torch.ones(2))


def warning_of(k: int) -> int:
    warnings.warn(f"about {k}", RuntimeWarning, stacklevel=2)
    return k


def test_a_warning_that_code_of_the_program_takes_names_the_callers_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(x: torch.Tensor) -> Any:
        warning_of(3)
        return x + len(LOG)

    def take(message: Any, category: Any, file: str, line: int, *rest: Any) -> None:
        LOG.append((str(message), file, line))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", take)
        alike(fn, torch.ones(2))


class Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage())


def test_what_is_said_goes_where_the_program_has_just_put_it() -> None:
    logger = logging.getLogger("tests.capturing.test_found")
    logger.propagate = False

    def warned(x: torch.Tensor) -> Any:
        before = warnings.showwarning
        warnings.showwarning = lambda message, *rest, **named: LOG.append(str(message))
        warnings.warn("to the program", stacklevel=1)
        warnings.showwarning = before
        return x + len(LOG)

    def handled(x: torch.Tensor) -> Any:
        logger.handlers.append(Kept())
        logger.error("to the program")
        logger.handlers.clear()
        return x + len(LOG)

    def switched(x: torch.Tensor) -> Any:
        logger.disabled = not logger.disabled
        logger.error("never")
        logger.disabled = False
        return x + len(LOG)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for fn in (warned, handled, switched):
            alike(fn, torch.ones(2))


def _in_one_comprehension(items: list[int]) -> Any:
    return [(lambda: i)() for i in items], [i + 1 for i in items]


def _outside_as_well(items: list[int]) -> Any:
    i = opaque(3)
    get = lambda: i  # noqa: E731
    return [(lambda: i)() for i in items], get(), i


def _across_breaks(items: list[int]) -> Any:
    i = opaque(3)
    get = lambda: i  # noqa: E731
    return [(lambda: i + opaque(i))() for i in items], get(), i


@pytest.mark.parametrize("fn", [_in_one_comprehension, _outside_as_well, _across_breaks])
@pytest.mark.parametrize("items", [[], [7, 8]])
def test_a_name_that_is_a_cell_in_one_comprehension_alone(fn: Any, items: list[int]) -> None:
    alike(fn, items)


def _leaves_a_switch(x: torch.Tensor) -> Any:
    y = torch.tensor([1.0, 2.0]) + x
    torch.set_grad_enabled(opaque(3) > 9)
    return y * x


def _of_arrays(x: torch.Tensor) -> Any:
    array = np.sin(np.arange(2.0))
    whole = [int(item) for item in array], array.tolist()
    return (
        x.numpy().sum(),
        np.asarray(x) + 1,
        torch.from_numpy(array) * 2,
        torch.tensor(array),
        whole,
    )


def _of_old_classes(x: torch.Tensor) -> Any:
    return torch.FloatTensor([1, 2]) + x, torch.LongTensor(2).shape, copy.deepcopy(x)


def _of_data(x: torch.Tensor) -> Any:
    return torch.nn.Linear(2, 2).double().bias.dtype


@pytest.mark.parametrize("fn", [_leaves_a_switch, _of_arrays, _of_old_classes, _of_data])
def test_a_mode_hears_what_it_hears_in_eager(fn: Callable[..., Any]) -> None:
    def within(x: torch.Tensor) -> Any:
        with Heard():
            return fn(x)

    x, heard = torch.ones(2), []
    try:
        alike(within, x)
        for run in (fn, traced := Traced(fn), traced):
            torch.set_grad_enabled(True)
            LOG.clear()
            with Heard():
                run(x)
            heard.append([*LOG])
    finally:
        torch.set_grad_enabled(True)
    assert heard[0] == heard[1] == heard[2], traced.stops


def _numbered(k: int) -> Iterator[int]:
    yield k


def _ended_within_a_generator() -> Any:
    def inner(given: Iterator[int]) -> Iterator[int]:
        yield next(given)

    try:
        list(inner(iter(())))
    except RuntimeError as error:
        return type(error.__cause__), type(error.__context__)


def _without_an_attribute() -> Any:
    try:
        return WEIGHT.nothing  # type: ignore[attr-defined]
    except AttributeError as error:
        found = error
    opaque(3)
    return repr(found.__context__), found.name, found.obj is WEIGHT


def _in_a_group() -> Any:
    found = ExceptionGroup("g", [ValueError(1)])
    opaque(3)
    raise found


def _thrown_into_one_that_is_over() -> Any:
    given = _numbered(opaque(3))
    try:
        given.throw(KeyError("first"))  # type: ignore[attr-defined]
    finally:
        given.throw(KeyError("second"))  # type: ignore[attr-defined]


def _not_importable() -> Any:
    try:
        from os import nothing  # type: ignore[attr-defined]
    except ImportError as error:
        return str(error), error.name, repr(error.__context__), nothing


def _not_iterable() -> Any:
    try:
        max(*3)  # type: ignore[misc]
    except TypeError as error:
        return str(error), repr(error.__context__)


@pytest.mark.parametrize(
    "fn",
    [
        _ended_within_a_generator, _without_an_attribute, _thrown_into_one_that_is_over,
        _in_a_group, _not_importable, _not_iterable,
    ],
)  # fmt: skip
def test_where_an_exception_comes_from(fn: Callable[..., Any]) -> None:
    alike(fn)


class Odd(ValueError):
    def __init__(self, amount: Any) -> None:
        super().__init__(f"odd {amount}")
        self.amount = amount


class Noted(list[Any]):
    def append(self, item: Any) -> None:
        LOG.append("append")
        super().append(f"{item}")


def test_a_method_of_a_class_in_c_that_super_gave() -> None:
    def fn(x: torch.Tensor) -> Any:
        noted = Noted()
        noted.append(x)
        return str(Odd(x.sum())), noted

    alike(fn, torch.ones(2))


def test_what_changes_an_exception_is_done_at_each_call() -> None:
    def fn(x: torch.Tensor) -> Any:
        try:
            raise Odd(x)
        except Odd as error:
            opaque(3)
            error.add_note("once")
            opaque(3)
            return str(error), error.__notes__

    alike(fn, torch.ones(2))


def test_a_view_of_which_autograd_has_lost_track() -> None:
    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x.view(2, 2)
        opaque(3)
        x.mul_(2)
        opaque(4)
        return x.sum(), y.shape

    def made() -> torch.Tensor:
        return torch.ones(4, requires_grad=True) * 1

    for _ in range(2):
        traced = Traced(fn)
        assert shape_of(traced(made())) == shape_of(fn(made())), traced.stops


def warned_about(k: int) -> int:
    warnings.warn(f"about {k}", RuntimeWarning, stacklevel=2)
    return k


def test_a_warning_names_its_caller_where_no_version_is_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(message: Any, category: Any, file: str, line: int, *_: Any) -> None:
        LOG.append((str(message), file, line))

    def fn(x: torch.Tensor) -> Any:
        for k in range(5):
            warned_about(k)
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", take)
        alike(fn, torch.ones(2))


WHOLE, MASK = torch.arange(4), torch.ones(4, 4) > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x @ x.double(), lambda x: x @ x[0].long(), lambda x: x[0] @ x.double(),
        lambda x: torch.nn.functional.linear(x, x.double()), lambda x: MASK @ MASK,
        lambda x: torch.addmm(x.double(), x, x), lambda x: torch.mv(x, WHOLE),
        lambda x: torch.baddbmm(x, x[None], x[None].double()), lambda x: MASK - x,
        lambda x: x - MASK, lambda x: False - x, lambda x: torch.sub(x, MASK),
    ],
)  # fmt: skip
def test_dtypes_that_do_not_fit_though_nobody_uses_the_result(call: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> Any:
        return call(x).dim()

    alike(fn, torch.ones(4, 4))


def _stepping(k: int) -> Iterator[int]:
    try:
        yield from range(k)
    finally:
        LOG.append("closed")


def _delegating(k: int) -> Iterator[int]:
    yield from _stepping(k)


def test_a_break_keeps_nothing_of_what_is_alive_there() -> None:
    def fn(x: torch.Tensor) -> Any:
        given = _delegating(3)
        next(given)
        opaque(3)
        return x.nonzero().sum() + x

    gc.disable()
    try:
        alike(fn, torch.ones(2))
    finally:
        gc.enable()


def calls_alike(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Eager and compiled give the same call after call, with arguments that change."""
    compiled = Traced(fn)
    for args in calls:
        found = []
        for run in (fn, compiled):
            try:
                found.append(shape_of(run(*args)))
            except Exception as error:  # noqa: BLE001  # the exception is what is compared
                found.append((type(error), str(error)))
        assert found[0] == found[1], compiled.stops


def test_a_variable_of_an_inner_function_that_has_no_value_in_one_call() -> None:
    def fn(n: int) -> Any:
        def inner() -> int:
            return item

        item = n
        if n > 2:
            del item
        k = opaque(n)
        return k, inner()

    calls_alike(fn, (1,), (3,), (1,), (5,), (2,))


def test_methods_of_numbers_that_vary() -> None:
    def fn(n: int) -> Any:
        return (
            hash(n),
            n.__hash__(),
            {n: n},
            n + True,
            True * n,
            n - (n > 4),
            n % True,
            max(n, True),
        )

    calls_alike(fn, (3,), (4,), (7,), (1,), (5,))


def test_attributes_of_numbers_that_vary() -> None:
    def fn(n: Any) -> Any:
        n.extra = 1
        return n

    calls_alike(fn, (3,), (4,), (7,))


def test_no_mode_hears_of_arithmetic_with_a_number_that_varies() -> None:
    class Heard(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(func.__name__)
            return func(*args, **(kwargs or {}))

    heard: list[str] = []

    def fn(x: torch.Tensor, n: int) -> Any:
        with Heard():
            return x * (n + 0.5), max(n / 2, n), float(n)

    calls_alike(fn, *((torch.ones(2), n) for n in (3, 4, 7, 5)))
    assert heard == ["mul"] * 8


def test_arrays_of_a_piece_that_begins_in_inference_mode() -> None:
    def fn(array: Any) -> Any:
        with torch.inference_mode():
            k = opaque(2)
            return array[0], array * k

    calls_alike(fn, (np.arange(3.0),), (np.arange(3.0) + 1,))


@pytest.mark.parametrize("of_base", [True, False])
def test_gradients_that_a_write_gives_to_who_shares_the_memory(of_base: bool) -> None:
    scale = torch.tensor(2.0, requires_grad=True)

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x += scale
        return y.requires_grad, x.requires_grad, y * 2

    for shares in (True, False, True):
        told = []
        for run in (fn, fusee.compile(fn, backend="eager")):
            base = torch.ones(3)
            other = base[:2] if shares else torch.ones(2)
            told.append(shape_of(run(base, other) if of_base else run(other, base)))
        assert told[0] == told[1]


@pytest.mark.parametrize("how", ["scatter_", "index_copy_", "clamp_"])
def test_a_write_to_what_the_graph_made_of_inputs_lets_python_raise(how: str) -> None:
    def fn(k: int) -> Any:
        WEIGHT.masked_select(WEIGHT > 9)[k]
        made = 2 - WEIGHT
        index = torch.tensor([7])
        if how == "clamp_":
            made.clamp_(WEIGHT).gather(0, index)
        else:
            getattr(made, how)(0, index, WEIGHT[:1])
        return made

    for backend in ("eager", "fusee"):
        with pytest.raises(
            IndexError, match="index 1 is out of bounds for dimension 0 with size 0"
        ):
            fusee.compile(fn, backend=backend)(1)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_order_of_a_dict_from_outside(kind: type) -> None:
    found = kind(a=1, b=2, c=3)
    asked: list[Callable[[], Any]] = [
        lambda: list(found.values()), lambda: dict(found), lambda: next(reversed(found)),
        lambda: [(k, v) for k, v in found.items()],
    ]  # fmt: skip
    for ask in asked:
        compiled = fusee.compile(ask, backend="eager")
        for key in "abca":
            assert str(compiled()) == str(ask())
            if kind is dict:
                found[key] = found.pop(key)
            else:
                found.move_to_end(key)


def test_integers_of_more_digits_than_python_writes() -> None:
    large = 7**20000

    def fn(x: torch.Tensor, n: int) -> Any:
        y = x + n % 10
        print(end="")
        return y, n == large, n, large, [-n, {n: 1}]

    compiled = fusee.compile(fn, backend="eager")
    for n in (large, large + 1, 3, large):
        got, want = compiled(WEIGHT, n), fn(WEIGHT, n)
        assert torch.equal(got[0], want[0]) and got[1:] == want[1:]
    with pytest.raises(OverflowError, match="cannot fit 'int'"):
        fusee.compile(lambda n: [1] * 2**62**n, backend="eager")(4)


LINEAR = torch.nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:.*is on meta:UserWarning")
@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to("meta"),
        lambda x: x.to(torch.zeros(1, dtype=torch.float64, device="meta")),
        lambda x: torch.as_tensor(x, device="meta").sin(),
        lambda x: copy.deepcopy(LINEAR).to("meta").weight,
        lambda x: torch.nn.Linear(2, 3).to("meta").bias,
        lambda x: LINEAR(x).to("meta", torch.bfloat16, copy=True),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "fusee"])
def test_what_moves_to_the_meta_device_is_there(move: Callable[..., Any], backend: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        made = move(x)
        return made, made.device, made.is_meta

    got, want = fusee.compile(fn, backend=backend)(WEIGHT), fn(WEIGHT)
    told = [(x.device, x.dtype, x.stride(), x.requires_grad) for x, *_ in (got, want)]
    assert told[0] == told[1] and got[1:] == want[1:]


def test_displays_and_comprehensions_of_sets_go_on_behind_a_break() -> None:
    def fn(xs: list[torch.Tensor]) -> Any:
        display = {*map(int, [1, 2]), xs[0].sum().item(), 7, *xs[1].tolist(), *[9, 8]}
        return {int(x.sum().item()) for x in xs}, display, xs[0] + len(display)

    same(fn, [torch.ones(2) * k for k in range(5)], breaks=True)


def test_an_empty_heap() -> None:
    def fn(items: list[int]) -> Any:
        heap = [*items]
        try:
            while True:
                LOG.append(heapq.heappop(heap))
        finally:
            LOG.append("over")

    def replaced(items: list[int]) -> Any:
        heap = [*items]
        return heapq.heapreplace(heap, 1), heapq.heappushpop(heap, 2)

    alike(fn, [1, 2])
    alike(replaced, [])
    alike(replaced, [5])


async def _sending(running: Iterator[Any]) -> Any:
    return next(running)


def test_what_a_stop_iteration_becomes_in_a_coroutine_behind_a_break() -> None:
    def fn(k: int) -> Any:
        _sending(iter([opaque(k)])).send(None)

    def ended(k: int) -> Any:
        opaque(k)
        _sending(iter([])).send(None)

    alike(fn, 1)
    alike(ended, 1)


@pytest.mark.parametrize("write", [None, lambda y: y.add_(1), lambda y: y.as_strided_((4,), (1,))])
@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize("first", ["plain", "parameter", "computed"])
def test_a_view_whose_base_requires_gradients_later(
    write: Callable[..., Any] | None, backend: str, first: str
) -> None:
    def program(y: torch.Tensor) -> torch.Tensor:
        LOG.append("before")
        if write is not None:
            write(y)
        LOG.append("behind")
        return y * 2

    compiled = fusee.compile(program, backend=backend)
    for kind in (first, "late", first, "late"):
        told = []
        for run in (program, compiled):
            LOG.clear()
            x = torch.ones(4, requires_grad=kind in ("parameter", "computed"))
            y = x if kind == "parameter" else x * 1 if kind == "computed" else x[:]
            x.requires_grad_(kind != "plain")
            result = None
            try:
                result = run(y)
                if result.requires_grad:
                    result.sum().backward()
            except RuntimeError as error:
                LOG.append(str(error).partition("\n")[0])
            told.append(repr((result, LOG, y, y.grad if y.is_leaf else None, x.grad)))
        assert told[0] == told[1]


@pytest.mark.parametrize(
    "show",
    [
        lambda n, t: repr(([n], t, {1, 2})),
        lambda n, t: f"{[n, t]} {(n, [t])}",
        lambda n, t: f"{n!a:>4} {[t]!a} {'é'!a}",
        lambda n, t: "{} {!r}".format(n, t),  # noqa: UP032
        lambda n, t: "%r %d" % (t, n),  # noqa: UP031
        lambda n, t: str(ValueError(n, t)),
        lambda n, t: f"{KeyError([t])}",
        lambda n, t: repr(functools.partial(print, n, t)),
        lambda n, t: repr(types.SimpleNamespace(n=n, t=t)),
        lambda n, t: repr(slice(n, t)),
    ],
)
def test_texts_of_what_holds_a_number_that_varies_and_a_dict_from_outside(
    show: Callable[..., str],
) -> None:
    def fn(x: torch.Tensor, table: dict[str, Any], adds: bool) -> Any:
        if adds:
            table["d"] = 5
        text = show(x.shape[0], table)
        table["e"] = 6
        return text

    traced = Traced(fn)
    for adds in (True, False):
        for n in (3, 4, 5, 7):
            tables: list[dict[str, Any]] = [{"b": n}, {"b": n}]
            told = fn(torch.ones(n), tables[0], adds), traced(torch.ones(n), tables[1], adds)
            assert told[0] == told[1] and tables[0] == tables[1]


class _Sequence:
    def __getitem__(self, k: int) -> int:
        return k


def _closing() -> Generator[int, None, None]:
    try:
        while True:
            yield 1
    finally:
        LOG.append("closed")


@pytest.mark.parametrize("make", [_Sequence, _closing])
def test_what_an_error_came_in_the_course_of_outlives_a_generator_that_is_closed(
    make: Callable[[], Any],
) -> None:
    def fn(k: int) -> Any:
        try:
            raise KeyError(k)
        except KeyError:
            for _ in make():
                missing  # type: ignore[name-defined]  # noqa: B018, F821
        finally:
            opaque(k)

    def thrown(k: int) -> Any:
        steps = _closing()
        next(steps)
        error = KeyError(k)
        try:
            raise error
        except KeyError:
            try:
                raise IndexError
            except IndexError:
                try:
                    steps.throw(error)
                finally:
                    opaque(k)

    alike(fn, 1)
    alike(thrown, 1)


def test_a_comprehensions_variable_beside_a_free_one_of_its_name() -> None:
    def fn(k: int) -> Any:
        y = torch.ones(2) * k

        def inner(breaks: bool) -> Any:
            before = [y * 2 for y in range(k)], {y: z * 2 for y, z in enumerate("ab")}
            total = y + 1
            if breaks:
                broken = [opaque(y) + len([y * 2 for y in "abc"]) for y in range(k)]
                return before, total, broken, y * 2
            return before, total, y * 2

        return inner(False), inner(True), y

    alike(fn, 2)


@pytest.mark.parametrize("pad", range(38, 42))
def test_a_call_behind_a_break_keeps_its_keywords(pad: int) -> None:
    lines = ["def fn(x, array):", "    y, k = array * 2, 1", *["    k = -k"] * pad]
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join([*lines, "    torch.mul(x, 1, out=x)", "    return y, k"]), names)
    x = torch.ones(4)
    alike(names["fn"], x, x.numpy())


STORES: list[Callable[[Any, Any], None]] = [
    lambda array, value: array.fill(value),
    lambda array, value: array.__setitem__(0, value),
    lambda array, value: array[1:][::-1].__setitem__(..., value),
]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("divisor", [0.0, 2.0])
@pytest.mark.parametrize("kind", [np.int8, np.int64, np.float32, np.bool_])
def test_a_number_that_an_array_takes_has_to_fit(store: Any, divisor: float, kind: Any) -> None:
    def by_mean(x: torch.Tensor, divisor: float) -> Any:
        array, found = np.zeros(3, kind), (x / divisor).numpy()
        store(array, found.mean())
        return array * 2

    def by_item(x: torch.Tensor, divisor: float) -> Any:
        array = np.zeros(3, kind)
        store(array, (x / divisor).sum().item())
        return array * 2

    def by_array(x: torch.Tensor, divisor: float) -> Any:
        array = np.zeros(3, kind)
        store(array, (x / (divisor + 1)).mean().numpy())
        return array * 2

    for fn in (by_mean, by_item, by_array):
        alike(fn, torch.ones(4), divisor)


@pytest.mark.parametrize("switch", [sys.settrace, sys.setprofile])
def test_a_debugger_or_profiler_sees_the_capture(switch: Callable[[Any], None]) -> None:
    """What is told of lines that raised has as many lines as the program's code."""

    def divided(x: torch.Tensor, n: int) -> Any:
        try:
            return x / [1, 2][n]
        except IndexError as error:
            raised: Any = error.__traceback__
            line = raised.tb_lineno - divided.__code__.co_firstlineno
            return x.sum(), line, [x * k for k in range(n)], (k for k in "ab")

    def tracer(*event: Any) -> Any:
        return tracer

    before = sys.gettrace(), sys.getprofile()
    switch(tracer)
    try:
        for n in (0, 4, 1):
            alike(lambda x, n: [*map(str, divided(x, n)[:3])], torch.ones(3), n)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])


SHOWS: list[Any] = [repr, "{}".format, lambda x: f"{[x]}", lambda x: [*x], lambda x: [*x | {17}]]


@pytest.mark.parametrize("show", SHOWS)
@pytest.mark.parametrize("kind", [set, frozenset])
def test_the_order_of_a_set(kind: Any, show: Any) -> None:
    """It hangs on what was ever done to the set, and a copy has another."""

    def fn(pool: Any) -> Any:
        for k in [1, 9] if kind is set else []:
            pool.discard(k)
            pool.update([1, 9])
        return show(pool)

    def told(run: Callable[..., Any]) -> Any:
        pools = [kind([1, 9]), kind([9, 1]), kind([1, 9, 17])]
        return [run(pool) for pool in pools for _ in range(2)]

    assert told(Traced(fn)) == told(fn)


@pytest.mark.parametrize("first", [0, 1])
def test_an_error_that_is_kept_has_the_context_that_its_caller_handles(first: int) -> None:
    def fn() -> Any:
        found: list[Exception] = []
        for _ in range(2):
            try:
                raise ValueError(*found)
            except ValueError as error:
                found.append(error)
        return found

    traced = Traced(fn)
    outer = [None, KeyError(), TypeError()]
    for handled in (*outer[first:], *outer[:first]):
        try:
            if handled is not None:
                raise handled
            found = traced()
        except (KeyError, TypeError):
            found = traced()
        assert [error.__context__ for error in found] == [handled, handled]
    assert traced.entries == 1


CALLED: list[Any] = ["{a}".format, collections.OrderedDict, type("P", (), {}), ValueError, dict]


@pytest.mark.parametrize("key", [1, None, "it's"])
def test_keywords_that_are_no_strings(key: Any) -> None:
    """C code may take them, and a class without arguments refuses them in its own words."""

    def fn(given: dict[Any, int], x: torch.Tensor) -> Any:
        told: list[Any] = []
        for function in [*CALLED, lambda **given: given]:
            try:
                told.append(function(**given))
                function(**given, **given)
            except TypeError as error:
                told.append(str(error))
        return told, x + 1

    alike(fn, {key: 1, "a": 2}, torch.ones(1))


class _Hinting:
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 1

    def __length_hint__(self) -> int:
        return 2**45


def test_iterators_that_hint_at_more_than_memory_has() -> None:
    def fn(x: torch.Tensor, make: Callable[..., Any]) -> Any:
        return x + len(make(_Hinting()))

    for make in (list, tuple, lambda items: [*items]):
        with pytest.raises(MemoryError):
            fusee.compile(fn)(torch.ones(2), make)


_T = TypeVar("_T")
_ROWS = list[_T]


def test_an_alias_of_a_class_is_given_arguments() -> None:
    same(lambda x: (cast(_ROWS[float], [x + 1]), get_args(_ROWS[int])), torch.ones(1))


class _Asked:
    """No tensor: torch asks it what becomes of calls with it, in lists too."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __bool__(self) -> bool:
        raise ValueError("neither")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Asked(func([one.x for one in args[0]], **(kwargs or {})))


def test_objects_in_a_list_that_answer_for_torch() -> None:
    stack: Any = torch.stack
    same(lambda x: stack([_Asked(x), _Asked(x + 1)]).x, torch.ones(2))


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_methods_of_the_views_of_dicts(kind: Any) -> None:
    outside = kind(a=1, b=2)

    def fn(x: torch.Tensor) -> Any:
        made = kind(a=x, b=x + 1)
        told = [made.keys().__contains__(key) for key in ("a", "c", 1, ())]
        told += [outside.keys().__contains__("b"), outside.values().__len__()]
        told += [outside.keys().isdisjoint(iter("xyz")), list(made.items().__iter__())]
        return x * 2, told, [*outside.items().__reversed__()]

    same(fn, torch.ones(2))


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("turned", [iter, reversed])
def test_a_loop_through_an_ordered_dict_around_a_break(turned: Any, is_written: bool) -> None:
    held: Any = collections.OrderedDict(a=1, b=2, c=3)

    def fn(x: torch.Tensor) -> Any:
        mine, told = held.copy(), []
        try:
            for key in turned(mine):
                x = x + mine[key] * opaque(2)
                if is_written:
                    mine["z"] = 4
        except RuntimeError as error:
            told.append(str(error))
        return x, told

    traced = alike(fn, torch.ones(2))
    assert not any("advancing" in stop for stop in traced.stops), traced.stops


def test_modules_of_classes_that_are_made_at_each_call_run_eagerly_in_the_end() -> None:
    def patched(scale: float) -> torch.nn.Module:
        class Patched(torch.nn.Linear):
            pass

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight) * scale

        Patched.__qualname__ = "Patched"
        Patched.forward = forward  # type: ignore[assignment, method-assign]
        return Patched(2, 2)

    def fn(x: torch.Tensor, layers: int) -> torch.Tensor:
        made = [patched(k + 1.0) for k in range(layers)]
        opaque(layers)
        for layer in made:
            x = layer(x).detach()
            opaque(layers)
        return x

    traced = Traced(fn)
    count = []
    for _ in range(18):
        torch.manual_seed(0)
        want = fn(torch.ones(1, 2), 2)
        torch.manual_seed(0)
        torch.testing.assert_close(traced(torch.ones(1, 2), 2), want)
        count.append(len(traced.graphs))
    assert count[0] and count[-1] == count[-4], count


@pytest.mark.parametrize("backend", ["fusee", "eager"])
def test_an_autograd_function_that_asks_whether_it_is_compiled_keeps_no_stand_in(
    backend: str,
) -> None:
    def build(n: int) -> torch.Tensor:
        return torch.arange(float(n))

    table = functools.lru_cache(build)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * (build(3) if torch.compiler.is_compiling() else table(3))

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * (build(3) if torch.compiler.is_compiling() else table(3))

    compiled = fusee.compile(lambda x: Scaled.apply(x * 2).sin(), backend=backend)
    x = torch.ones(3, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    assert type(table(3)) is torch.Tensor and torch.equal(table(3), build(3))
    assert torch.equal(y, (build(3) * 2).sin()) and x.grad is not None
    assert torch.equal(x.grad, (build(3) * 2).cos() * build(3) * 2)


def test_what_a_module_answers_is_asked_anew_each_time() -> None:
    def answer(name: str) -> Any:
        LOG.append(name)
        if name == "kept":
            lazy.kept = torch.ones(2)
            return lazy.kept
        if name == "lost":
            raise AttributeError(f"no {name} here")
        return len(LOG)

    def fn(x: torch.Tensor) -> Any:
        y = x * lazy.count + lazy.kept
        try:
            return lazy.lost
        except AttributeError as error:
            return y, str(error), getattr(lazy, "lost", 5)

    told = []
    for run in (fn, Traced(fn)):
        lazy: Any = types.ModuleType("lazy")
        lazy.__getattr__ = answer
        LOG.clear()
        told.append(shape_of([[run(torch.ones(2)) for _ in range(3)], LOG, type(lazy.kept)]))
    assert told[0] == told[1]


def test_properties_of_a_module_are_asked_once() -> None:
    class Counting(types.ModuleType):
        @property
        def count(self) -> int:
            self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
            return cast(int, self.__dict__["asked"])

        def __getattr__(self, name: str) -> Any:
            return self.count * 10

    module = Counting("counting")
    traced = Traced(lambda x: (x * module.count, x * module.more))
    found = [shape_of(traced(torch.ones(1))) for _ in range(3)]
    assert found == [shape_of((torch.ones(1) * k, torch.ones(1) * (k + 1) * 10)) for k in (1, 3, 5)]


@pytest.mark.parametrize("exponent, modulus", [(-1, 7), (2, 5), (2, 0), (2.0, 5), (70, 11)])
def test_powers_with_a_modulus_of_numbers_that_vary(exponent: Any, modulus: Any) -> None:
    def fn(x: torch.Tensor, n: int) -> Any:
        try:
            return x * n, pow(n, exponent, modulus), n.__pow__(exponent, modulus)
        except (TypeError, ValueError) as error:
            return str(error)

    traced = Traced(fn)
    for n in (1, 2, 3, 5):
        assert shape_of(traced(torch.ones(2), n)) == shape_of(fn(torch.ones(2), n))


def test_a_slot_that_was_empty_is_empty_again() -> None:
    class Slotted:
        __slots__ = ("a",)

    def fn(x: torch.Tensor, slotted: Any) -> Any:
        slotted.a = x
        y = slotted.a + 1
        del slotted.a
        try:
            return slotted.a
        except AttributeError as error:
            return y, str(error), error.name, error.obj is slotted

    same(fn, torch.ones(2), Slotted())


class _OneOrThree(type):
    def __instancecheck__(cls, obj: Any) -> bool:
        LOG.append(obj)
        return bool(obj in (1, 3))


class _Known(metaclass=_OneOrThree):
    pass


def test_a_class_is_asked_for_numbers_that_vary() -> None:
    def fn(x: torch.Tensor, n: int, y: float) -> Any:
        return x * n * y, isinstance(n, _Known), isinstance(y, (str, _Known)), isinstance(n, int)

    traced = Traced(fn)
    for n in (1, 2, 3, 5):
        LOG.clear()
        want = shape_of([fn(torch.ones(2), n, n / 2), LOG])
        LOG.clear()
        assert shape_of([traced(torch.ones(2), n, n / 2), LOG]) == want


def test_what_has_items_alone_is_searched_by_them() -> None:
    class Numbered:
        def __getitem__(self, k: int) -> int:
            LOG.append(k)
            return [5, 6, 7][k]

    numbered: Any = Numbered()
    alike(lambda x: (x + len(LOG), 6 in numbered, 9 in numbered, 3 in x), torch.ones(2))


def test_bases_that_an_object_stands_for_are_asked_once() -> None:
    class Standing:
        def __mro_entries__(self, bases: Any) -> Any:
            LOG.append(len(bases))
            return (dict,)

    def fn(x: torch.Tensor) -> Any:
        class Made(Standing()):  # type: ignore[misc]
            pass

        return x + 1, Made(a=1)["a"], Made.__bases__

    alike(fn, torch.ones(2))
