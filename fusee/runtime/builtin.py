"""Python builtins from LLVM IR, and the sizes that they compute.

A builtin is machine code that Python calls like any C function: @kernel(ptr %self, ptr %args,
i64 %count), as METH_FASTCALL has it. Sizes that calls differ in are computed by steps, as
`fusee/sym/expr.py: steps` gives them; one function of machine code runs them all.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from fusee.runtime import jit
from fusee.runtime.llvm_text import Level, Writer

_METH_FASTCALL = 0x80

_C_API = (
    "PyLong_AsSsize_t",
    "PyLong_FromSsize_t",
    "PyErr_Occurred",
    "PyErr_Clear",
    "PyTuple_GetItem",
    "PyErr_SetString",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


# The parts of a builtin's text, in functions @kernel(ptr %self, ptr %args, i64 %count).


def argument(level: Level, k: object) -> str:
    """The argument number `k`, an object."""
    return level.load("ptr", "%args", k)


def number(level: Level, k: object) -> str:
    """The argument number `k`, an integer; the builtin raises what reading it raises."""
    value = level.call("i64", "PyLong_AsSsize_t", ("ptr", argument(level, k)))
    fine = level.op(f"icmp ne i64 {value}, -1")

    def has_failed() -> str:
        return level.op(f"icmp ne ptr {level.call('ptr', 'PyErr_Occurred')}, null")

    level.leave(level.unless(fine, has_failed, "i1", "false"), lambda: "ptr null")
    return value


def raised(level: Level, error: str, message: str) -> str:
    """What a builtin returns that raises one of Python's errors; `message` is a constant's name."""
    symbol = f"PyExc_{error}"
    level.writer.declares[symbol] = f"@{symbol} = external global ptr"
    kind = level.load("ptr", f"@{symbol}")
    level.call("void", "PyErr_SetString", ("ptr", kind), ("ptr", f"@{message}"))
    return "ptr null"


def differing(level: Level, row: str, first: int, values: Sequence[str]) -> str:
    """Whether the words of a row, from number `first` on, differ from values: one test for all."""
    pairs = [(value, level.load("i64", row, k)) for k, value in enumerate(values, first)]
    bits = level.either("i64", "or", *(level.op(f"xor i64 {x}, {y}") for x, y in pairs))
    return level.op(f"icmp ne i64 {bits}, 0")


def answered(level: Level, value: str) -> str:
    """What a builtin returns that gives an i64."""
    return f"ptr {level.call('ptr', 'PyLong_FromSsize_t', ('i64', value))}"


def answer(level: Level, value: str) -> str:
    """The unit of a builtin that is written, and gives an i64."""
    result = answered(level, value)
    return level.writer.module("define ptr @kernel(ptr %self, ptr %args, i64 %count)", result)


# What Python's C API needs to stay where it is: method definitions, and the code they point to.
_kept: list[tuple[_MethodDef, jit.Function]] = []


def builtin(name: str, text: str, imports: dict[str, int] | None = None) -> Any:
    """A Python builtin from IR text. It stays for the life of the process.

    text     a unit (see jit) whose @kernel(ptr self, ptr args, i64 n) is a METH_FASTCALL function
    imports  addresses of what it calls, besides the process's and Python's C API
    """
    known = {**_c_api(), **(imports or {})}
    function = jit.compile_one(text, known)
    definition = _MethodDef(name.encode(), function.address, _METH_FASTCALL, None)
    _kept.append((definition, function))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return make(ctypes.addressof(definition), None, None)


@functools.cache
def _c_api() -> dict[str, int]:
    """Addresses in this interpreter; the process may hold another one that is found by name."""
    found = {}
    for name in _C_API:
        found[name] = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0
    for name in ("PyExc_TypeError", "PyExc_IndexError", "PyLong_Type"):
        found[name] = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.pythonapi, name))
    return found


# ---------------------------------------------------------------------------- steps


# (operation, a, b, c): numbers 0, 1, .. are the inputs, those after them what the steps give. The
# number c itself, or of the numbers a and b: a + c*b, or what the operation says.
Step = tuple[str, int, int, int]

_OPERATIONS = ("number", "+", "*", "min", "max", "==", "!=", "<=", "&", "<<", "//", "%")
STEP_WORDS = 4


def step_words(steps: Iterable[Step]) -> list[int]:
    """Steps as they lie in memory."""
    return [word for op, a, b, c in steps for word in (_OPERATIONS.index(op), a, b, c)]


def evaluation() -> str:
    """@evaluate(ptr steps, i64 count, ptr numbers, ptr results): a unit's function.

    What is divided by is positive, or the step gives 0.
    """
    writer = Writer()

    def step(k: str, _: list[str]) -> list[str]:
        level = writer.top
        op, load = level.op, level.load
        at = level.at("%steps", k, f"[{STEP_WORDS} x i64]")
        kind, c = load("i64", at), load("i64", at, 3)
        x, y = (load("i64", "%numbers", load("i64", at, word)) for word in (1, 2))
        values = [c, op(f"add i64 {x}, {op(f'mul i64 {c}, {y}')}"), op(f"mul i64 {x}, {y}")]
        values += [level.call("i64", f"llvm.{m}.i64", ("i64", x), ("i64", y)) for m in _EXTREMES]
        values += [op(f"zext i1 {op(f'icmp {m} i64 {x}, {y}')} to i64") for m in _COMPARED]
        values += [op(f"and i64 {x}, {y}"), op(f"shl i64 {x}, {op(f'and i64 {y}, 63')}")]
        found = values[0]
        for number, value in enumerate(values[1:], 1):
            found = op(f"select i1 {op(f'icmp eq i64 {kind}, {number}')}, i64 {value}, i64 {found}")

        def divided() -> str:
            bad = op(f"icmp slt i64 {y}, 1")
            over = op(f"select i1 {bad}, i64 1, i64 {y}")
            rest = op(f"srem i64 {x}, {over}")
            less = op(f"icmp slt i64 {rest}, 0")
            rest = op(f"select i1 {less}, i64 {op(f'add i64 {rest}, {over}')}, i64 {rest}")
            quotient = op(f"sdiv i64 {op(f'sub i64 {x}, {rest}')}, {over}")
            is_rest = op(f"icmp eq i64 {kind}, {_OPERATIONS.index('%')}")
            either = op(f"select i1 {is_rest}, i64 {rest}, i64 {quotient}")
            return op(f"select i1 {bad}, i64 0, i64 {either}")

        is_other = op(f"icmp slt i64 {kind}, {len(values)}")
        level.store("i64", level.unless(is_other, divided, "i64", found), "%results", k)
        return []

    writer.loop("0", "%count", 1, [], step)
    head = "define internal void @evaluate(ptr %steps, i64 %count, ptr %numbers, ptr %results)"
    return writer.module(f"{head} nounwind", "void")


_EXTREMES = ("smin", "smax")
_COMPARED = ("eq", "ne", "sle")
