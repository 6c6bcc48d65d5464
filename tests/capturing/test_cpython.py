"""CPython's own tests within compiled functions; and what they and their like have shown."""

from __future__ import annotations

import collections
import contextlib
import copy
import decimal
import functools
import io
import logging
import os
import re
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.capturing.same import Traced

# What differs by module, and why: `of` says it where it is one of few.
KNOWN: dict[str, set[str]] = {
    "test_abc": set(), "test_asyncgen": set(), "test_binop": set(), "test_bisect": set(),
    "test_call": set(),
    "test_compare": set(), "test_contains": set(), "test_contextlib": set(),
    "test_decorators": set(), "test_defaultdict": set(), "test_dictviews": set(),
    "test_except_star": set(), "test_fractions": set(), "test_fstring": set(),
    "test_keywordonlyarg": set(),
    "test_named_expressions": set(), "test_positional_only_arg": set(), "test_property": set(),
    "test_scope": set(), "test_string": set(), "test_super": set(), "test_with": set(),
    "test_augassign": set(),
    "test_class": set(),
    # a tuple that holds itself by a list is another one after a break
    "test_copy": {"TestCopy.test_deepcopy_reflexive_tuple"},
    # what has once been asked for `module.__annotations__` has some
    "test_grammar": {"GrammarTests.test_var_annot_in_module"},
    # a warning of C code's, which is not given again
    "test_index": {
        "BaseTestCase.test_index_returns_int_subclass", "BaseTestCase.test_int_subclass_with_index",
    },
    # sys.settrace hears nothing of what is captured
    "test_patma": {
        f"TestTracing.test_{name}" for name in (
            "default_capture", "default_wildcard", "no_default", "only_default_capture",
            "only_default_wildcard", "unreachable_code",
        )
    },
    # the code of a coroutine's body is ours
    "test_types": {"CoroutineTests.test_async_def"},
    # a frame of the caught error's traceback is another object than the frame that runs
    "test_raise": {"TestTracebackType.test_attrs"},
}  # fmt: skip


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the table is of Python 3.11")
def test_cpythons_own() -> None:
    pytest.importorskip("test.test_grammar", reason="Python came without its tests")
    command = [sys.executable, "-m", "tests.capturing.cpython", *KNOWN]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    lines = said.stdout.splitlines()
    assert sum(" of " in line for line in lines) == len(KNOWN)
    assert sum(int(line.split()[2]) for line in lines if " of " in line) > 900
    found = {line for line in lines if " of " not in line}
    assert found == {f"{module} {name}" for module, names in KNOWN.items() for name in names}


def end() -> None:
    """What ends a graph."""
    sys.stderr.flush()


class Key(list[int]):
    __slots__ = ("hashed",)

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self[:] = numbers
        self.hashed = hash(numbers)

    def __hash__(self) -> int:  # type: ignore[override]
        return self.hashed


def streams() -> Any:
    told, before = io.StringIO(), sys.stdout
    twice = contextlib.redirect_stdout(told)
    with twice:
        print("a")
    with twice:
        sys.stdout.write("b")
    return told.getvalue(), sys.stdout is before


def inherited() -> Any:
    class Base:
        size: int

    class Plain(Base):
        pass

    return Base.__annotations__, Plain.__annotations__


_WITHOUT_FUTURE: dict[str, Any] = {}
_SOURCE = """
def executed():
    space = {}
    exec("def f(x: int): pass", space)
    exec(compile("def g(x: int): pass", "file", "exec"), space)
    return space["f"].__annotations__, space["g"].__annotations__
"""
exec(compile(_SOURCE, __file__, "exec", dont_inherit=True), _WITHOUT_FUTURE)


def names() -> Any:
    def numbers() -> Iterator[int]:
        yield 1

    named: Any = numbers
    named.__name__ = named.__qualname__ = "others"
    return named().__name__, named().__qualname__


def messages() -> Any:
    class Left:
        def __enter__(self) -> None:
            pass

    class Plain:
        only = property()

    def leave() -> None:
        with Left():  # type: ignore[attr-defined]
            pass

    found = []
    for function in (
        leave, lambda: Plain().only, lambda: object.__init__(Plain(), 1),  # type: ignore[call-arg]
    ):  # fmt: skip
        try:
            function()
        except (AttributeError, TypeError) as error:
            found.append(str(error))
    return found


def proxies() -> Any:
    class Owner:
        pass

    owner = Owner()
    proxy = weakref.proxy(owner)
    del owner
    end()
    try:
        return proxy.size
    except ReferenceError as error:
        return str(error)


def keys() -> Any:
    known: dict[Any, int] = {}
    key, get = Key((1, 2)), known.get
    with threading.RLock():
        found = get(key)
    known[key] = 3
    return found, get(Key((1, 2)))


def rings() -> Any:
    ring: list[Any] = []
    ring[:] = [ring, ring]
    links = {1: [ring, 1]}
    ring[0] = links[1]
    return 1 in links, 2 in links


def asked() -> Any:
    log = []

    class Left:
        def __eq__(self, other: object) -> Any:
            log.append("Left ==")
            return NotImplemented

    class Right:
        def __ne__(self, other: object) -> Any:
            log.append("Right !=")
            return NotImplemented

    return Left() != Right(), Right() != Left(), log


def classes() -> Any:
    class Base:
        @property
        def size(self) -> int:
            return 1

        @classmethod
        @classmethod
        def itself(cls) -> Any:
            return cls

    class Sub(Base):
        __class__ = 413  # type: ignore[assignment]

        @classmethod
        def of_base(cls) -> Any:
            return super().size

    return Base.itself() is Base, Sub.of_base() is Base.size, Sub().__class__


def handled_around() -> Any:
    def kinds() -> Iterator[Any]:
        try:
            raise ValueError
        except ValueError:
            yield sys.exc_info()[0]
        yield sys.exc_info()[0]

    found, each = [], kinds()
    try:
        raise IndexError
    except IndexError:
        found.append(next(each))
    return found, next(each)


def equal_to_nothing() -> Any:
    key: Any = functools.cmp_to_key(lambda a, b: (a > b) - (a < b))
    return key(3) == key(3), key(3) > key(1)


class Pair:
    __slots__ = ("__hidden", "first")

    def __init__(self, first: Any) -> None:
        self.first, self.__hidden = first, 1

    def hidden(self) -> Any:
        return self.__hidden


def copied_ring() -> bool:
    ring: Any = ([],)
    ring[0].append(ring)
    again = copy.deepcopy(ring)
    return again[0][0] is again


def copied() -> Any:
    """A memo keeps what it has copied: another object would have its id."""
    memo: dict[int, Any] = {}
    pairs = copy.deepcopy([Pair([k]) for k in range(9)], memo)
    ordered: Any = collections.OrderedDict(a=1)
    ordered.kept = [1]
    shallow, deep = copy.copy(ordered), copy.deepcopy(ordered)
    end()
    shared = shallow.kept is ordered.kept, deep.kept, deep.kept is ordered.kept
    return [pair.first for pair in pairs], len(memo), shared


def addresses() -> Any:
    one = Pair(1)
    told = hash(one), id(one), repr(one)
    end()
    return told == (hash(one), id(one), repr(one)), one.hidden()


def dispatched() -> Any:
    class Many:
        @functools.singledispatchmethod
        @classmethod
        def one(cls, x: int) -> int:
            return 1

        @functools.singledispatchmethod
        @classmethod
        def two(cls, x: int) -> int:
            return 2

    return Many.one(5), Many.two(5)


def fields() -> Any:
    names = {"first", "second"}
    end()
    names.add("third")
    kind: Any = collections.namedtuple("kind", names)  # type: ignore[misc]
    alias, either = kind[int], typing.Optional[kind]  # type: ignore[misc]  # noqa: UP045
    names.clear()
    end()
    space = {"x": 1}
    end()
    space["y"] = 2
    made: Any = type("made", (), space)
    return (
        len(kind(*range(3))),
        alias.__origin__ is kind,
        typing.get_args(either)[0] is kind,
        made.y,
    )


class Counted:
    """Called in place of a method, without an instance."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def __call__(self, *args: Any) -> int:
        self.log.append(args)
        return 3


def special_methods() -> Any:
    counted = Counted()

    class Own:
        __len__ = __getitem__ = __add__ = counted
        __call__ = staticmethod(lambda *args: args)
        __bool__ = property(lambda self: lambda: False)
        __iadd__ = __contains__ = None

        @functools.lru_cache  # noqa: B019
        def __index__(self) -> int:
            counted.log.append("index")
            return 2

        def __iter__(self) -> Iterator[int]:
            return iter((1,))

    def in_place(own: Any) -> None:
        own += 1

    own, found = typing.cast(Any, Own()), []
    for asked in (in_place, lambda own: 1 in own):
        try:
            asked(own)
        except TypeError as error:
            found.append(str(error))
    return len(own), own[1], own + 2, own(1), not own, [*range(own)], counted.log, found


class Named:
    number = 1


SHOWN = {"number": 1}
SHOWING = types.MappingProxyType(SHOWN)


def shown() -> Any:
    behind: dict[str, int] = {}
    proxy = types.MappingProxyType(behind)
    found = proxy.keys()
    end()
    behind["a"] = 1
    return list(found), dict(proxy), vars(Named)["number"], "other" in Named.__dict__


class Lazy:
    """A proxy, as those of a request, that stands for nothing as yet."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


LAZY = Lazy()


def lazy() -> Any:
    kept, made = LAZY, Lazy()
    end()
    listed: Any = [kept, {1: made}]
    return listed[0] is kept, listed[1][1] is made, kept == made


class Delegating:
    def __init__(self, to: Any) -> None:
        self.__to = to

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_Delegating__"):
            return object.__getattribute__(self, name)
        return getattr(self.__to, name)


@typing.runtime_checkable
class Protocol(typing.Protocol):
    number: int


def typed() -> Any:
    class Own(Protocol, typing.Protocol):
        pass

    kinds: Any = {"own": Own, "later": typing.Optional["Own"]}
    end()
    return [*kinds], isinstance(Named(), Protocol), str(kinds["later"])


def delegated() -> Any:
    class Base:
        def name(self) -> str:
            return "Base"

    class Sub(Base):
        def name(self) -> str:
            return super(Sub, self).name() + " Sub"  # noqa: UP008

    made: Any = Delegating(Sub())
    end()
    return vars(Sub)["name"](made)


MODULE: Any = types.ModuleType("module")


class OfModule(types.ModuleType):
    number = 1


def modules() -> Any:
    MODULE.__class__ = OfModule
    found: list[Any] = [MODULE.__class__ is OfModule, hasattr(MODULE, "number")]
    MODULE.__class__ = types.ModuleType
    try:
        MODULE.__dict__ = {}
    except AttributeError as error:
        found.append(str(error))
    try:
        LAZY.__class__.fget = 1
    except RuntimeError as error:
        found.append(str(error))
    return found


def by_place() -> Any:
    class Numbers:
        def __getitem__(self, k: int) -> int:
            if k == 4:
                raise IndexError
            return k

    each: Any = iter(Numbers())
    first = next(each)
    each.__setstate__(2)
    return first, list(each), type(each).__name__


def made_by_others() -> Any:
    class Other:
        def __new__(cls, number: int) -> Any:
            return object.__new__(Sub)

    class Sub(Other):
        def __init__(self, number: int) -> None:
            self.number = number

    first: Any = (1, [2])
    return typing.cast(Any, Other(1)).number, tuple(first) is first


PROPERTY = property(len)


def refused() -> Any:
    calls: Any = (
        (set.add,), (list.append,), (re.search, "x*", type), (setattr, PROPERTY, "fget", 1),
    )  # fmt: skip
    found: list[Any] = []
    for call, *given in calls:
        try:
            call(*given)
        except (TypeError, AttributeError) as error:
            found.append(str(error))
    try:
        object.__getattribute__(PROPERTY, "other")
    except AttributeError as error:
        found.append((error.name, error.obj is PROPERTY))
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        re.compile("ab?", re.DEBUG)
    return found, told.getvalue()


def known_to_c() -> Any:
    context: Any = decimal.Context(prec=5)
    end()
    view: Any = memoryview(bytearray(b"abc"))
    kept = weakref.ref(view)
    end()
    return context.flags[decimal.Inexact], context.prec, kept() is view


def set_up() -> Any:
    logging.debug("nobody hears of this, but logging is set up by it")
    found = len(logging.root.handlers)
    logging.root.handlers.clear()
    return found


def awaited() -> Any:
    class Without:
        def __aiter__(self) -> Any:
            return self

    class Wrong(Without):
        def __anext__(self) -> Any:
            return ()

        def __aenter__(self) -> Any:
            return 1

        async def __aexit__(self, *error: Any) -> None:
            pass

    async def through(x: Any) -> None:
        async for _ in x:
            pass

    async def within(x: Any) -> None:
        async with x:
            pass

    def from_coroutine(x: Any) -> Iterator[Any]:
        yield from x

    found: list[Any] = []
    for one in (through(()), through(Without()), through(Wrong()), within(Wrong())):
        try:
            one.send(None)
        except TypeError as error:
            found.append((str(error), type(error.__cause__)))
    unused = within(1)
    try:
        list(from_coroutine(unused))
    except TypeError as error:
        found.append(str(error))
    unused.close()
    return found


@pytest.mark.parametrize(
    "program",
    [
        streams, inherited, _WITHOUT_FUTURE["executed"], names, messages, proxies, keys, rings,
        asked, classes, handled_around, equal_to_nothing, copied_ring, copied, addresses,
        dispatched, fields,
        special_methods, shown, lazy, delegated, modules, by_place, made_by_others, typed, refused,
        awaited, known_to_c,
    ],
)  # fmt: skip
def test_as_python(program: Callable[[], Any]) -> None:
    traced, stream = Traced(program), sys.stdout
    want = program()
    try:
        assert [traced(), traced()] == [want, want], traced.stops
    finally:
        sys.stdout = stream


def test_what_a_class_or_a_proxy_shows_is_read_under_guards() -> None:
    def read() -> Any:
        return vars(Named)["number"], "other" in Named.__dict__, {**SHOWING}, SHOWING.get("other")

    def either(kind: Any) -> Any:
        return kind | None

    traced, optional = Traced(read), Traced(either)
    assert traced() == read()
    Named.number, Named.other = 2, 1  # type: ignore[attr-defined]
    SHOWN.update(number=2, other=3)
    assert traced() == read()
    del Named.other  # type: ignore[attr-defined]
    for kind in (list[int], typing.List[int], typing.List[str]):  # noqa: UP006
        assert optional(kind) == either(kind)


def test_logging_is_set_up_by_its_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    traced = Traced(set_up)
    assert [traced(), traced()] == [set_up(), set_up()] == [1, 1]
