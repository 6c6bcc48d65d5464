"""The check of a function that takes tensors alone, as one builtin."""

from __future__ import annotations

import ctypes
import functools
import itertools
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusee.runtime.change_detection import CheckTable, compare
from fusee.runtime.jit import answer, answered, bound, builtin, evaluation, symbol
from fusee.runtime.launch import word
from fusee.runtime.llvm_text import Level, Writer

_MOST, _BYTE, _AT, _NO = (1 << 64) - 1, 0xFF, 0, -1
_KEYS: Any = torch._C.DispatchKey
_FRONT = int(_KEYS.FuncTorchDynamicLayerFrontMode)
# Of torch's state on a thread: functions of C++, each with its argument and the bits that it gives;
# or the word at the address that it gives, or the opposite of its answer. Adapter to these names of
# libc10 and libtorch, tested with torch 2.11 and 2.13; without one of them there is no quick check.
_STATE = {
    "grad": [("_ZN3c108GradMode10is_enabledEv", 0, _BYTE)],
    "inference": [("_ZN3c1013InferenceMode10is_enabledEv", 0, _BYTE)],
    "default": [("_ZN3c1031get_default_dtype_as_scalartypeEv", 0, _BYTE)],
    "transforms": [
        (
            "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
            _FRONT,
            _BYTE,
        )
    ],
    "traced": [("_ZN5torch3jit6tracer15getTracingStateEv", 0, _AT)],
    "dispatching": [("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", 0, _MOST)],
    "modes": [("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", 0, _MOST)],
    "autocast": [  # its keys are excluded where it is off
        ("_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE", int(key), _NO)
        for key in (_KEYS.AutocastCPU, _KEYS.AutocastCUDA)
    ],
}
_DICT_SIZE = 16  # bytes, after the reference count and the type


def quick_check(
    state: Mapping[str, int | None],
    found: Sequence[tuple[dict[str, Any], str, Any]],
    empty: Sequence[dict[Any, Any]],
    code: tuple[types.FunctionType, types.CodeType],
    table: CheckTable,
) -> Callable[..., int] | None:
    """`differs` of the arguments, which are the table's elements, as a builtin; it gives -1 if also

    state   these of _STATE are as they should be; None: as they are now
    found   each dict holds this at its key
    empty   these hold nothing
    code    the function has this code

    It keeps none of them alive. None where not all of that is where it is looked for.
    """
    at = _code_offset()
    rows = [(name, row) for name in state for row in _STATE[name]]
    calls = tuple(row for _, row in rows)
    if at is None or not all(symbol(function) for function, *_ in calls):
        return None
    wanted = [_now(*row) if (x := state[name]) is None else x for name, row in rows]
    words = [*wanted, 1 + len(empty), id(code[0]) + at, id(code[1])]
    words += itertools.chain(*((id(x) + _DICT_SIZE, 0) for x in empty))
    words += [len(found), *(id(x) for row in found for x in row), *table.words]
    made: Callable[..., int] = bound(_quick(calls), array("Q", words).tobytes())
    return made


def _now(function: str, given: int, bits: int) -> int:
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)
    result: int = kind(symbol(function) or 0)(given)
    return (result & _BYTE) ^ 1 if bits == _NO else result & bits


@functools.cache
def _code_offset() -> int | None:
    """Where a function has its code."""
    places = range(8, types.FunctionType.__basicsize__, 8)
    code = id(quick_check.__code__)
    return next((k for k in places if word(id(quick_check) + k) == code), None)


@functools.cache
def _quick(calls: Sequence[tuple[str, int, int]]) -> Any:
    """Of what `quick_check` gives; `self` are its words, as bytes.

    Its calls are written out: as a loop over addresses they take three times as long.
    """
    writer = Writer()
    top = writer.top
    table = top.at("%self", bytes.__basicsize__ - 1)

    for k, (function, given, bits) in enumerate(calls):
        result = top.call("i64", function, ("i64", str(given)))
        if bits == _AT:
            result = top.load("i64", top.op(f"inttoptr i64 {result} to ptr"))
        elif bits != _MOST:
            result = top.op(f"and i64 {result}, {_BYTE}")
        if bits == _NO:
            result = top.op(f"xor i64 {result}, 1")
        is_other = top.op(f"icmp ne i64 {result}, {top.load('i64', table, k)}")
        top.leave(is_other, lambda: answered(top, "0"))

    def each(at: str, width: int, differs: Callable[[Level, str], str]) -> str:
        """Leaves if one of the rows of words at `at` differs; where what follows them begins."""
        kind, count, first = f"[{width} x i64]", top.load("i64", at), top.at(at, 8)

        def row(k: str, _: list[str]) -> list[str]:
            level = writer.top
            is_other = differs(level, level.at(first, k, kind))
            level.leave(is_other, lambda: answered(level, "0"))
            return []

        writer.loop("0", count, 1, [], row)
        return top.at(first, count, kind)

    def word_at(level: Level, at: str) -> str:
        here = level.load("i64", level.load("ptr", at))
        return level.op(f"icmp ne i64 {here}, {level.load('i64', at, 1)}")

    def found(level: Level, at: str) -> str:
        names, key, wanted = (level.load("ptr", at, n) for n in range(3))
        here = level.call("ptr", "PyDict_GetItemWithError", ("ptr", names), ("ptr", key))
        return level.op(f"icmp ne ptr {here}, {wanted}")

    rest = each(each(top.at(table, len(calls), "i64"), 2, word_at), 3, found)
    compare(writer, rest, "%args")
    return builtin("quick", evaluation() + answer(top, "-1"))
