"""The check of a function that Python runs, as one builtin."""

from __future__ import annotations

import functools
import itertools
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusee.runtime.change_detection import CheckTable, compare
from fusee.runtime.jit import answer, answered, bound, builtin, evaluation, symbol
from fusee.runtime.launch import word
from fusee.runtime.llvm_text import Level, Writer

# Of torch's state on a thread: functions of C++, each with its argument and the bits that it gives.
_STATE = {
    "grad": [("_ZN3c108GradMode10is_enabledEv", 0, 0xFF)],
    "modes": [("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", 0, (1 << 64) - 1)],
    "autocast": [  # of the CPU, and of GPUs
        ("_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", device, 0xFF)
        for device in (0, 1)
    ],
}


def quick_check(
    state: Mapping[str, int],
    found: Sequence[tuple[dict[str, Any], str, Any]],
    code: tuple[types.FunctionType, types.CodeType],
    table: CheckTable,
) -> Callable[..., int] | None:
    """`differs` of the arguments, which are the table's elements, as a builtin; it gives -1 if also

    state   these of _STATE are as they should be
    found   each dict holds this at its key
    code    the function has this code

    It keeps none of them alive. None where not all of that is where it is looked for.
    """
    at = _code_offset()
    calls = [
        (symbol(function) or 0, given, bits, value)
        for name, value in state.items()
        for function, given, bits in _STATE[name]
    ]
    if at is None or not all(address for address, *_ in calls):
        return None
    words = [id(code[0]) + at, id(code[1]), len(calls), *itertools.chain(*calls)]
    words += [len(found), *(id(x) for row in found for x in row), *table.words]
    made: Callable[..., int] = bound(_quick(), array("Q", words).tobytes())
    return made


@functools.cache
def _code_offset() -> int | None:
    """Where a function has its code."""
    places = range(8, types.FunctionType.__basicsize__, 8)
    code = id(quick_check.__code__)
    return next((k for k in places if word(id(quick_check) + k) == code), None)


@functools.cache
def _quick() -> Any:
    """Of what `quick_check` gives; `self` are its words, as bytes."""
    writer = Writer()
    top = writer.top
    table = top.at("%self", bytes.__basicsize__ - 1)

    def leave_if(level: Level, differs: str) -> None:
        level.leave(differs, lambda: answered(level, "0"))

    here = top.load("i64", top.load("ptr", table))
    leave_if(top, top.op(f"icmp ne i64 {here}, {top.load('i64', table, 1)}"))

    def call(k: str, _: list[str]) -> list[str]:
        level = writer.top
        at = level.at(level.at(table, 24), k, "[4 x i64]")
        given, bits, wanted = (level.load("i64", at, n) for n in range(1, 4))
        result = level.op(f"call i64 {level.load('ptr', at)}(i64 {given})")
        leave_if(level, level.op(f"icmp ne i64 {level.op(f'and i64 {result}, {bits}')}, {wanted}"))
        return []

    calls = top.load("i64", table, 2)
    writer.loop("0", calls, 1, [], call)
    dicts = top.at(top.at(table, 24), calls, "[4 x i64]")

    def found(k: str, _: list[str]) -> list[str]:
        level = writer.top
        at = level.at(level.at(dicts, 8), k, "[3 x i64]")
        names, key, wanted = (level.load("ptr", at, n) for n in range(3))
        here = level.call("ptr", "PyDict_GetItemWithError", ("ptr", names), ("ptr", key))
        leave_if(level, level.op(f"icmp ne ptr {here}, {wanted}"))
        return []

    count = top.load("i64", dicts)
    writer.loop("0", count, 1, [], found)
    compare(writer, top.at(top.at(dicts, 8), count, "[3 x i64]"), "%args")
    return builtin("quick", evaluation() + answer(top, "-1"))
