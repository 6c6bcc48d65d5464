"""What each instruction does to a frame: one function per opcode, named after it.

`TABLES` has one table per Python version. What an operation means for its operands is asked of
`frame.machine`. Opcodes that jump, call or raise are in control.py, those for names and closures in
variables.py, those of `match` in matching.py.

source   https://docs.python.org/3.13/library/dis.html#python-bytecode-instructions and its versions
         for 3.11 and 3.12; CPython's Python/bytecodes.c
"""

from __future__ import annotations

import sys
import types
from typing import Any

from fusee.capture import control, matching, variables
from fusee.capture.bytecode import Instruction, program
from fusee.capture.frame import NULL, Frame
from fusee.capture.opcode_table import COMMON, V311, V312, V313, Handler, op

__all__ = ["REFUSED", "TABLES", "refused", "table"]

FILLED_BY = (control, matching, variables)  # importing them fills the tables


def _nothing(f: Frame, i: Instruction) -> None:
    """Instructions that matter to CPython's own loop only."""


for _name in "NOP RESUME PRECALL COPY_FREE_VARS SETUP_ANNOTATIONS EXIT_INIT_CHECK".split():
    COMMON[_name] = _nothing


# ------------------------------------------------------------------------------ the stack


@op()
def POP_TOP(f: Frame, i: Instruction) -> None:
    f.pop()


@op()
def PUSH_NULL(f: Frame, i: Instruction) -> None:
    f.push(NULL)


@op()
def COPY(f: Frame, i: Instruction) -> None:
    f.push(f.stack[-i.arg])


@op()
def SWAP(f: Frame, i: Instruction) -> None:
    f.stack[-i.arg], f.stack[-1] = f.stack[-1], f.stack[-i.arg]


# ------------------------------------------------------------------------------ operators


@op()
def BINARY_OP(f: Frame, i: Instruction) -> None:
    right, left = f.pop(), f.pop()
    f.push(f.machine.binary(i.arg, left, right))


@op()
def UNARY_NOT(f: Frame, i: Instruction) -> None:
    f.push(not f.machine.truth(f.pop()))


@op()
def TO_BOOL(f: Frame, i: Instruction) -> None:
    f.push(f.machine.truth(f.pop()))


@op()
def UNARY_NEGATIVE(f: Frame, i: Instruction) -> None:
    f.push(f.machine.unary("neg", f.pop()))


@op()
def UNARY_POSITIVE(f: Frame, i: Instruction) -> None:
    f.push(f.machine.unary("pos", f.pop()))


@op()
def UNARY_INVERT(f: Frame, i: Instruction) -> None:
    f.push(f.machine.unary("invert", f.pop()))


@op()
def COMPARE_OP(f: Frame, i: Instruction) -> None:
    right, left = f.pop(), f.pop()
    # dis says `bool(<)` from 3.13 on where the result is tested at once
    symbol = i.value.removeprefix("bool(").removesuffix(")")
    result = f.machine.compare(symbol, left, right)
    f.push(f.machine.truth(result) if symbol != i.value else result)


@op()
def IS_OP(f: Frame, i: Instruction) -> None:
    right, left = f.pop(), f.pop()
    f.push(f.machine.identical(left, right) ^ bool(i.arg))


@op()
def CONTAINS_OP(f: Frame, i: Instruction) -> None:
    container, item = f.pop(), f.pop()
    f.push(f.machine.contains(container, item) ^ bool(i.arg))


@op()
def BINARY_SUBSCR(f: Frame, i: Instruction) -> None:
    key, container = f.pop(), f.pop()
    f.push(f.machine.subscript(container, key))


@op()
def STORE_SUBSCR(f: Frame, i: Instruction) -> None:
    key, container, value = f.pop(), f.pop(), f.pop()
    f.machine.store_subscript(container, key, value)


@op()
def DELETE_SUBSCR(f: Frame, i: Instruction) -> None:
    key, container = f.pop(), f.pop()
    f.machine.delete_subscript(container, key)


@op(V312, V313)
def BINARY_SLICE(f: Frame, i: Instruction) -> None:
    container, start, stop = f.take(3)
    f.push(f.machine.subscript(container, slice(start, stop)))


@op(V312, V313)
def STORE_SLICE(f: Frame, i: Instruction) -> None:
    value, container, start, stop = f.take(4)
    f.machine.store_subscript(container, slice(start, stop), value)


# ------------------------------------------------------------------------------ attributes


@op()
def LOAD_ATTR(f: Frame, i: Instruction) -> None:
    value = f.machine.attribute(f.pop(), i.value)
    if sys.version_info < (3, 12) or not i.arg & 1:
        f.push(value)
    else:
        f.push_callable(value)


@op(V311)
def LOAD_METHOD(f: Frame, i: Instruction) -> None:
    f.stack += (NULL, f.machine.attribute(f.pop(), i.value))


@op(V312, V313)
def LOAD_SUPER_ATTR(f: Frame, i: Instruction) -> None:
    function, kind, obj = f.take(3)
    # with two arguments or with the class and the object that the compiler found for super()
    value = f.machine.attribute(f.machine.call(function, (kind, obj), {}), i.value)
    if not i.arg & 1:
        f.push(value)
    else:
        f.push_callable(value)


@op()
def STORE_ATTR(f: Frame, i: Instruction) -> None:
    obj, value = f.pop(), f.pop()
    f.machine.store_attribute(obj, i.value, value)


@op()
def DELETE_ATTR(f: Frame, i: Instruction) -> None:
    f.machine.delete_attribute(f.pop(), i.value)


# ------------------------------------------------------------------------------ building


@op()
def BUILD_TUPLE(f: Frame, i: Instruction) -> None:
    f.push(tuple(f.take(i.arg)))


@op()
def BUILD_LIST(f: Frame, i: Instruction) -> None:
    f.push(f.take(i.arg))


@op()
def BUILD_SET(f: Frame, i: Instruction) -> None:
    f.push(set(f.take(i.arg)))


@op()
def BUILD_MAP(f: Frame, i: Instruction) -> None:
    items = iter(f.take(2 * i.arg))
    f.push(dict(zip(items, items)))


@op(V311, V312, V313)
def BUILD_CONST_KEY_MAP(f: Frame, i: Instruction) -> None:
    keys = f.pop()
    f.push(dict(zip(keys, f.take(i.arg))))


@op()
def BUILD_SLICE(f: Frame, i: Instruction) -> None:
    f.push(slice(*f.take(i.arg)))


@op()
def BUILD_STRING(f: Frame, i: Instruction) -> None:
    f.push("".join(f.take(i.arg)))


@op(V311)
def LIST_TO_TUPLE(f: Frame, i: Instruction) -> None:
    f.push(tuple(f.machine.items(f.pop())))


def _growing(f: Frame, i: Instruction) -> Any:
    """The container that a display or a comprehension fills; a break may have come between."""
    return f.machine.writable(f.stack[-i.arg])


@op()
def LIST_EXTEND(f: Frame, i: Instruction) -> None:
    more = f.pop()
    _growing(f, i).extend(f.machine.items(more))


@op()
def SET_UPDATE(f: Frame, i: Instruction) -> None:
    more = f.pop()
    _growing(f, i).update(f.machine.items(more))


@op()
def DICT_UPDATE(f: Frame, i: Instruction) -> None:
    more = f.pop()
    _growing(f, i).update(f.machine.mapping(more))


@op()
def DICT_MERGE(f: Frame, i: Instruction) -> None:
    more = f.machine.mapping(f.pop())
    into = _growing(f, i)
    twice = next((key for key in more if key in into), None)
    if twice is not None:
        name = getattr(f.stack[-i.arg - 2], "__qualname__", "function")
        raise TypeError(f"{name}() got multiple values for keyword argument {twice!r}")
    into.update(more)


@op()
def LIST_APPEND(f: Frame, i: Instruction) -> None:
    item = f.pop()
    _growing(f, i).append(item)


@op()
def SET_ADD(f: Frame, i: Instruction) -> None:
    item = f.pop()
    _growing(f, i).add(item)


@op()
def MAP_ADD(f: Frame, i: Instruction) -> None:
    key, value = f.take(2)
    _growing(f, i)[key] = value


@op()
def UNPACK_SEQUENCE(f: Frame, i: Instruction) -> None:
    items = f.machine.items(f.pop())
    if len(items) != i.arg:
        few = len(items) < i.arg
        raise ValueError(
            f"not enough values to unpack (expected {i.arg}, got {len(items)})"
            if few
            else f"too many values to unpack (expected {i.arg})"
        )
    f.stack += reversed(items)


@op()
def UNPACK_EX(f: Frame, i: Instruction) -> None:
    items = f.machine.items(f.pop())
    before, after = i.arg & 0xFF, i.arg >> 8
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    last = len(items) - after
    f.stack += reversed([*items[:before], items[before:last], *items[last:]])


@op(V311, V312)
def FORMAT_VALUE(f: Frame, i: Instruction) -> None:
    spec = f.pop() if i.arg & 4 else ""
    f.push(f.machine.format(f.pop(), ("", "s", "r", "a")[i.arg & 3], spec))


@op(V313)
def FORMAT_SIMPLE(f: Frame, i: Instruction) -> None:
    f.push(f.machine.format(f.pop(), "", ""))


@op(V313)
def FORMAT_WITH_SPEC(f: Frame, i: Instruction) -> None:
    value, spec = f.take(2)
    f.push(f.machine.format(value, "", spec))


@op(V313)
def CONVERT_VALUE(f: Frame, i: Instruction) -> None:
    f.push(f.machine.format(f.pop(), ("", "s", "r", "a")[i.arg], None))


def _refused(f: Frame, i: Instruction) -> None:
    raise f.machine.unsupported(f"the instruction {i.name}")


# Coroutines and exception groups: the function runs eagerly, and says so.
REFUSED = (
    "ASYNC_GEN_WRAP BEFORE_ASYNC_WITH CALL_INTRINSIC_2 CHECK_EG_MATCH END_ASYNC_FOR GET_AITER"
    " GET_ANEXT GET_AWAITABLE IMPORT_STAR PREP_RERAISE_STAR"
    " PRINT_EXPR INTERPRETER_EXIT RESERVED ENTER_EXECUTOR"
).split()
for _name in REFUSED:
    COMMON[_name] = _refused


def refused(code: types.CodeType) -> str:
    """Why Python itself must run all of a function; "" if it need not."""
    found = {i.name for i in program(code).instructions}.intersection(REFUSED)
    return f"it has the instruction {min(found)}, for except* or await" if found else ""


TABLES: dict[tuple[int, int], dict[str, Handler]] = {
    (3, 11): {**COMMON, **V311},
    (3, 12): {**COMMON, **V312},
    (3, 13): {**COMMON, **V313},
}


def table() -> dict[str, Handler]:
    """The opcodes of the Python that runs."""
    return TABLES[sys.version_info[:2]]
