"""Whether any of many dicts has changed, at a nanosecond or two for each.

CPython 3.11 and 3.12 give each dict a version, unique in the process, at every change. Machine
code compares the versions of all dicts of a table with those noted before. From 3.13 on dicts have
no version: `available` is False there, and callers look at what the dicts hold.

source   PEP 509; CPython's Include/cpython/dictobject.h (ma_version_tag)
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fusee.runtime.runner import builtin

__all__ = ["Watch", "available", "changed"]

_VERSION_OFFSET = 24  # bytes, after the reference count, the type and the number of items

# changed(table) -> index of the first dict that changed, or -1. The table holds 64-bit words: the
# number of dicts, then an address and a version for each.
_CHANGED = """
define ptr @kernel(ptr %self, ptr %args, i64 %n) {
  %arg = load ptr, ptr %args
  %address = call i64 @PyLong_AsSsize_t(ptr %arg)
  %table = inttoptr i64 %address to ptr
  %count = load i64, ptr %table
  br label %loop
loop:
  %i = phi i64 [0, %0], [%next, %same]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %none
look:
  %twice = shl i64 %i, 1
  %at = add i64 %twice, 1
  %entry = getelementptr i64, ptr %table, i64 %at
  %dict = load ptr, ptr %entry
  %version.at = getelementptr i8, ptr %dict, i64 VERSION_OFFSET
  %version = load i64, ptr %version.at
  %noted.at = getelementptr i64, ptr %entry, i64 1
  %noted = load i64, ptr %noted.at
  %is.same = icmp eq i64 %version, %noted
  br i1 %is.same, label %same, label %found
same:
  %next = add i64 %i, 1
  br label %loop
none:
  br label %answer
found:
  br label %answer
answer:
  %result = phi i64 [-1, %none], [%i, %found]
  %object = call ptr @PyLong_FromSsize_t(i64 %result)
  ret ptr %object
}
declare i64 @PyLong_AsSsize_t(ptr)
declare ptr @PyLong_FromSsize_t(i64)
"""


class Watch:
    """Notes the versions of some dicts, which it keeps alive."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._words = (ctypes.c_int64 * (1 + 2 * len(self._dicts)))()
        self._words[0] = len(self._dicts)
        self.address = ctypes.addressof(self._words)
        self.note()

    def note(self) -> None:
        """What the dicts hold now is what they should hold."""
        for k, one in enumerate(self._dicts):
            self._words[1 + 2 * k] = id(one)
            self._words[2 + 2 * k] = _version(one)


def _version(x: dict[Any, Any]) -> int:
    return ctypes.c_int64.from_address(id(x) + _VERSION_OFFSET).value


@functools.cache
def changed() -> Callable[[int], int]:
    """The builtin `changed(watch.address)`."""
    text = _CHANGED.replace("VERSION_OFFSET", str(_VERSION_OFFSET))
    made: Callable[[int], int] = builtin("changed", text)
    return made


@functools.cache
def available() -> bool:
    """Whether this Python's dicts have versions: tried out, since a build may differ."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return False
    probe: dict[str, Any] = {"a": 1}
    first = _version(probe)
    if _version(probe) != first:
        return False
    probe["a"] = 2
    second = _version(probe)
    probe["b"] = 3
    third = _version(probe)
    del probe["b"]
    return len({first, second, third, _version(probe)}) == 4
