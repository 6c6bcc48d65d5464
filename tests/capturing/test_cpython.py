"""CPython's own tests within compiled functions; and what they and their like have shown."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.capturing.same import Traced

# What differs by module, and why: `of` says it where it is one of few.
KNOWN: dict[str, set[str]] = {
    "test_abc": set(), "test_binop": set(), "test_bisect": set(), "test_call": set(),
    "test_compare": set(), "test_contains": set(), "test_contextlib": set(),
    "test_decorators": set(), "test_defaultdict": set(), "test_dictviews": set(),
    "test_except_star": set(), "test_fstring": set(), "test_keywordonlyarg": set(),
    "test_named_expressions": set(), "test_positional_only_arg": set(), "test_property": set(),
    "test_scope": set(), "test_string": set(), "test_super": set(), "test_with": set(),
    # `__iadd__ = None`
    "test_augassign": {"AugAssignTest.testCustomMethods1"},
    # the words for a class attribute that `__slots__` make read-only
    "test_class": {"ClassTests.testObjectAttributeAccessErrorMessages"},
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


@pytest.mark.parametrize(
    "program",
    [
        streams, inherited, _WITHOUT_FUTURE["executed"], names, messages, proxies, keys, rings,
        asked, classes, handled_around, equal_to_nothing,
    ],
)  # fmt: skip
def test_as_python(program: Callable[[], Any]) -> None:
    traced, stream = Traced(program), sys.stdout
    want = program()
    try:
        assert [traced(), traced()] == [want, want], traced.stops
    finally:
        sys.stdout = stream
