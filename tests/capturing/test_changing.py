"""What programs read through functions in C is read anew at each call, as eager reads it."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusee
from fusee.api import compile_in_place
from tests.capturing.same import Traced, shape_of

LIMIT = 2
LOCAL = threading.local()
T = Any


class Copied:
    def __copy__(self):
        return LIMIT


class Plain:
    def __init__(self):
        self.a = LIMIT
        self.items = [1] * LIMIT
        self.me = self


class Shown:
    def __format__(self, spec):
        return str(LIMIT)


class Counting:
    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        if self.n > LIMIT:
            raise StopIteration
        return self.n


COPIED, PLAIN, SHOWN = Copied(), Plain(), Shown()


def takes(x: T) -> T:
    return [*itertools.takewhile(lambda a: a < LIMIT, [0, 1, 2, 3])], x + 1


def accumulates(x: T) -> T:
    return [*itertools.accumulate([1, 2], lambda a, b: a * LIMIT + b)], x + 1


def filters(x: T) -> T:
    kept = [*filter(lambda a: a > LIMIT, [1, 2, 3])]
    return kept, [*itertools.filterfalse(lambda a: a > LIMIT, [1, 2, 3])], x + 1


def groups(x: T) -> T:
    return [[*g] for _, g in itertools.groupby([1, 2, 3], key=lambda a: a > LIMIT)], x + 1


def stops_early(x: T) -> T:
    seen = []
    found = any(seen.append(a) or a > LIMIT for a in [1, 2, 3, 4])
    return found, all(seen.append(a) or a < LIMIT for a in [1, 2]), seen, x + 1


def iterates(x: T) -> T:
    return [*map(str, Counting())], [*zip(Counting(), Counting())], x + 1


def escapes(x: T) -> T:
    made = map(lambda a: a * LIMIT, [x, x + 1])  # noqa: C417
    next(made)
    sys.stdout.write("")
    return next(made), [*itertools.chain([LIMIT], Counting())]


def copies(x: T) -> T:
    deep = copy.deepcopy(PLAIN)
    shallow = copy.copy(PLAIN)
    same = deep.me is deep, shallow.items is PLAIN.items, copy.deepcopy(SHOWN.__format__)("")
    filled = copy.copy(collections.defaultdict(list, {"a": [LIMIT]}))
    filled["missing"]
    return copy.copy(COPIED), deep.items, shallow.a, same, filled, x + 1


def texts(x: T) -> T:
    return f"{SHOWN}", re.sub("a", lambda m: str(LIMIT), "aba"), x + 1


def names(x: T) -> T:
    of_frame = sys._getframe().f_globals["LIMIT"]
    return of_frame, globals()["LIMIT"], sorted(locals()), x + 1


def per_thread(x: T) -> T:
    LOCAL.written = LOCAL.value + 1
    return x * LOCAL.value, LOCAL.written


def makes_a_class(x: T) -> T:
    @dataclasses.dataclass
    class Made:
        a: int = LIMIT
        b: T = dataclasses.field(default_factory=list)

    made = collections.namedtuple("Pair", "one other")(LIMIT, 2)
    return Made().a, Made(3).b, dataclasses.asdict(Made()), made.one, x + 1


def tells_of_an_error(x: T) -> T:
    try:
        raise ValueError(LIMIT)
    except ValueError:
        sys.stdout.write("")
        return x + 1, traceback.format_exc().splitlines()[-1], sys.exc_info()[0]


@pytest.mark.parametrize(
    "program",
    [
        takes, accumulates, filters, groups, stops_early, iterates, escapes, copies, texts, names,
        per_thread, makes_a_class, tells_of_an_error,
    ],
)  # fmt: skip
def test_what_changes_between_calls(
    program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, x = Traced(program), torch.ones(2)
    for value in (2, 3, 2, 1):
        monkeypatch.setitem(globals(), "LIMIT", value)
        LOCAL.value = value
        PLAIN.__init__()
        assert shape_of(traced(x)) == shape_of(program(x)), traced.stops
    assert not any(stop.startswith("eager") for stop in traced.stops)


def test_each_thread_has_its_own() -> None:
    traced, x, found = Traced(per_thread), torch.ones(2), []
    LOCAL.value = 1
    traced(x)

    def other() -> None:
        LOCAL.value = 7
        found.append(traced(x))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert shape_of(found[0]) == shape_of((x * 7, 8))
    assert shape_of(traced(x)) == shape_of((x, 2))


def test_whoever_calls_may_handle_an_exception() -> None:
    def handled(x: T) -> T:
        return x * (1 if sys.exc_info()[0] is None else 2)

    traced, x = Traced(handled), torch.ones(2)
    for _ in range(2):
        assert traced(x).tolist() == [1, 1]
        try:
            raise KeyError
        except KeyError:
            assert traced(x).tolist() == [2, 2]


def test_what_fails_only_while_it_compiles_is_captured_as_eager_runs_it() -> None:
    def asks(x: T) -> T:
        x = x + 1
        if torch.compiler.is_compiling():
            raise NotImplementedError("not under torch.compile")
        return x * 2

    traced = Traced(asks)
    assert traced(torch.ones(2)).tolist() == [4, 4]
    assert not traced.stops and len(traced.graphs) == 1
    told = Traced(lambda x: x * (2 if torch.compiler.is_compiling() else 1))
    assert told(torch.ones(2)).tolist() == [2, 2]


class _Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class _LessOne(_Doubling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - 1


class _Around(_Doubling):
    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) + 5


@pytest.mark.parametrize("kind", [_LessOne, _Around])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_that_gets_another_class(kind: Any, hook: bool, in_place: bool) -> None:
    module, x = _Doubling(), torch.ones(2)
    if hook:
        module.register_forward_hook(lambda module, args, out: out + 100)
    compiled = module
    if in_place:
        compile_in_place(module)
    else:
        compiled = fusee.compile(module)
    eager = _Doubling()
    eager.__dict__["_forward_hooks"] = module._forward_hooks
    for cls in (_Doubling, kind, _Doubling, kind):
        module.__class__ = eager.__class__ = cls
        if not (in_place and cls is _Around):  # torch's own __call__ is what is compiled
            assert compiled(x).equal(eager(x))


def test_modules_that_are_imported_within_and_replaced() -> None:
    def fn(x: T) -> T:
        import fusee_none.part
        from fusee_none.part import scale

        return x * scale + fusee_none.shift

    traced = Traced(fn)
    try:
        for scale in (2, 2, 3):
            package, part = (types.ModuleType(name) for name in ("fusee_none", "fusee_none.part"))
            package.part, package.shift, part.scale = part, 10 * scale, scale
            sys.modules |= {"fusee_none": package, "fusee_none.part": part}
            for _ in range(2):
                assert traced(torch.ones(2)).equal(fn(torch.ones(2)))
        assert not traced.stops
    finally:
        del sys.modules["fusee_none"], sys.modules["fusee_none.part"]
    with pytest.raises(ModuleNotFoundError, match="No module named 'fusee_none'"):
        traced(torch.ones(2))
