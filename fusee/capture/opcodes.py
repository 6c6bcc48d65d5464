"""What each instruction does to a frame: one row per opcode, or a function named after it.

What an operation means for its operands is asked of `frame.machine`. Opcodes that jump, call or
raise are in control.py, those of `match` in matching.py. A name means the same in all versions of
Python, but for a few that look at the version.

source   https://docs.python.org/3.13/library/dis.html#python-bytecode-instructions and its versions
         for 3.11 and 3.12; CPython's Python/bytecodes.c
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from fusee.capture import control, matching
from fusee.capture.breaks import GraphBreak, Opaque
from fusee.capture.bytecode import Instruction, program
from fusee.capture.frame import NULL, OPCODES, UNBOUND, Frame, Opcode, op
from fusee.capture.semantics import called, checked

__all__ = ["REFUSED", "TABLES", "refused"]

TABLES = dict.fromkeys(((3, 11), (3, 12), (3, 13)), OPCODES)
FILLED_BY = (control, matching)  # importing them fills the table

# Matter to CPython's own loop only.
_IDLE = "NOP RESUME PRECALL COPY_FREE_VARS EXIT_INIT_CHECK"

# Coroutines and exception groups: the function runs eagerly, and says so.
REFUSED = (
    "ASYNC_GEN_WRAP BEFORE_ASYNC_WITH CALL_INTRINSIC_2 CHECK_EG_MATCH END_ASYNC_FOR GET_AITER"
    " GET_ANEXT GET_AWAITABLE IMPORT_STAR PREP_RERAISE_STAR"
    " PRINT_EXPR INTERPRETER_EXIT RESERVED ENTER_EXECUTOR"
).split()


def refused(code: types.CodeType) -> str:
    """Why Python itself must run all of a function; "" if it need not."""
    found = {i.name for i in program(code).instructions}.intersection(REFUSED)
    return f"it has the instruction {min(found)}, for except* or await" if found else ""


def _refused(f: Frame, i: Instruction) -> None:
    raise GraphBreak(f"the instruction {i.name} is not supported")


def _push(f: Frame, value: Any, is_called: int) -> None:
    if is_called:
        f.push_callable(value)
    else:
        f.push(value)


def _grow(f: Frame, i: Instruction, how: Callable[..., None], *more: Any) -> None:
    """Fill a display or a comprehension; a break may have come between."""
    how(f.machine.writable(f.stack[-i.arg]), *more)


def _hashed(f: Frame, keys: list[Any]) -> list[Any]:
    f.machine.hashed(keys)
    return keys


def _super(f: Frame, operands: list[Any], has_arguments: int) -> Any:
    """`super(cls, obj)`; without arguments the compiler has found them, and super() does too."""
    function, *given = operands
    return f.machine.call(function, tuple(given) if has_arguments else (), {})


_METHODS = sys.version_info >= (3, 12)  # in LOAD_ATTR's argument; before, in LOAD_METHOD
_CONVERSIONS = ("", "s", "r", "a")

_SIMPLE: dict[str, Opcode] = {
    **dict.fromkeys(_IDLE.split(), lambda f, i: None),
    **dict.fromkeys(REFUSED, _refused),
    # the stack
    "POP_TOP": lambda f, i: f.stack.__delitem__(-1),
    "PUSH_NULL": lambda f, i: f.push(NULL),
    "COPY": lambda f, i: f.push(f.stack[-i.arg]),
    "LOAD_CONST": lambda f, i: f.push(i.value),
    # operators
    "BINARY_OP": lambda f, i: f.push(f.machine.binary(i.arg, *f.take(2))),
    "UNARY_NOT": lambda f, i: f.push(not f.machine.truth(f.pop())),
    "TO_BOOL": lambda f, i: f.push(f.machine.decides(f, f.at + 1, f.pop())),
    "UNARY_NEGATIVE": lambda f, i: f.push(f.machine.unary("neg", f.pop())),
    "UNARY_POSITIVE": lambda f, i: f.push(f.machine.unary("pos", f.pop())),
    "UNARY_INVERT": lambda f, i: f.push(f.machine.unary("invert", f.pop())),
    "IS_OP": lambda f, i: f.push(f.machine.identical(*f.take(2)) ^ bool(i.arg)),
    "CONTAINS_OP": lambda f, i: f.push(f.machine.contains(f.pop(), f.pop()) ^ bool(i.arg)),
    "BINARY_SUBSCR": lambda f, i: f.push(f.machine.subscript(*f.take(2))),
    "BINARY_SLICE": lambda f, i: f.push(f.machine.subscript(f.stack.pop(-3), slice(*f.take(2)))),
    "STORE_SUBSCR": lambda f, i: f.machine.store_subscript(*f.take(2), f.pop()),
    "STORE_SLICE": lambda f, i: f.machine.store_subscript(
        f.stack.pop(-3), slice(*f.take(2)), f.pop()
    ),
    "DELETE_SUBSCR": lambda f, i: f.machine.delete_subscript(*f.take(2)),
    # attributes
    "LOAD_ATTR": lambda f, i: _push(f, f.machine.attribute(f.pop(), i.value), _METHODS & i.arg),
    "LOAD_METHOD": lambda f, i: f.stack.extend((NULL, f.machine.attribute(f.pop(), i.value))),
    "LOAD_SUPER_ATTR": lambda f, i: _push(
        f, f.machine.attribute(_super(f, f.take(3), i.arg & 2), i.value), i.arg & 1
    ),
    "STORE_ATTR": lambda f, i: f.machine.store_attribute(f.pop(), i.value, f.pop()),
    "DELETE_ATTR": lambda f, i: f.machine.delete_attribute(f.pop(), i.value),
    # building
    "BUILD_TUPLE": lambda f, i: f.push(tuple(f.take(i.arg))),
    "BUILD_LIST": lambda f, i: f.push(f.take(i.arg)),
    "BUILD_SET": lambda f, i: f.push(set(_hashed(f, f.take(i.arg)))),
    "BUILD_CONST_KEY_MAP": lambda f, i: f.push(dict(zip(f.pop(), f.take(i.arg)))),
    "BUILD_SLICE": lambda f, i: f.push(slice(*f.take(i.arg))),
    "BUILD_STRING": lambda f, i: f.push("".join(f.take(i.arg))),
    "LIST_TO_TUPLE": lambda f, i: f.push(tuple(f.machine.items(f.pop()))),
    "LIST_EXTEND": lambda f, i: _grow(f, i, list.extend, f.machine.items(checked(f.pop()))),
    "SET_UPDATE": lambda f, i: _grow(f, i, set.update, _hashed(f, f.machine.items(f.pop()))),
    "DICT_UPDATE": lambda f, i: _grow(f, i, dict.update, f.machine.mapping(f.pop())),
    "LIST_APPEND": lambda f, i: f.machine.append(f.stack[-i.arg - 1], f.pop()),
    "SET_ADD": lambda f, i: _grow(f, i, set.add, *_hashed(f, [f.pop()])),
    "MAP_ADD": lambda f, i: _grow(f, i, dict.__setitem__, *_hashed(f, f.take(2))),
    # text
    "FORMAT_WITH_SPEC": lambda f, i: f.push(f.machine.format(f.stack.pop(-2), "", f.pop())),
    "FORMAT_SIMPLE": lambda f, i: f.push(f.machine.format(f.pop(), "", "")),
    "CONVERT_VALUE": lambda f, i: f.push(f.machine.format(f.pop(), _CONVERSIONS[i.arg], None)),
    # names
    **dict.fromkeys(("LOAD_FAST", "LOAD_FAST_CHECK"), lambda f, i: f.push(_local(f, i.value))),
    "LOAD_FAST_LOAD_FAST": lambda f, i: f.stack.extend([_local(f, name) for name in i.value]),
    "LOAD_FAST_AND_CLEAR": lambda f, i: f.push(
        f.cells.pop(i.value) if i.value in f.cells else f.locals.pop(i.value, UNBOUND)
    ),
    **dict.fromkeys(
        ("STORE_FAST", "STORE_FAST_MAYBE_NULL"), lambda f, i: _store(f, i.value, f.pop())
    ),
    "STORE_FAST_STORE_FAST": lambda f, i: _store_all(f, i),
    "LOAD_GLOBAL": lambda f, i: _push(f, f.machine.load_global(f, i.value), i.arg & 1),
    "SETUP_ANNOTATIONS": lambda f, i: f.names.setdefault("__annotations__", {}) and None,
    "STORE_NAME": lambda f, i: f.names.__setitem__(i.value, f.pop()),
    "DELETE_NAME": lambda f, i: f.names.__delitem__(i.value),
    "STORE_GLOBAL": lambda f, i: f.machine.store_global(f, i.value, f.pop()),
    "DELETE_GLOBAL": lambda f, i: f.machine.delete_global(f, i.value),
    "LOAD_LOCALS": lambda f, i: f.push(f.locals if f.names is None else f.names),
    "LOAD_NAME": lambda f, i: _load_from(f, f.names or {}, i.value, f.machine.load_global),
    "LOAD_FROM_DICT_OR_GLOBALS": lambda f, i: _load_from(
        f, f.pop(), i.value, f.machine.load_global
    ),
    "LOAD_FROM_DICT_OR_DEREF": lambda f, i: _load_from(f, f.pop(), i.value, f.machine.load_cell),
    "LOAD_CLASSDEREF": lambda f, i: _load_from(f, f.names or {}, i.value, f.machine.load_cell),
    # closures
    "LOAD_CLOSURE": lambda f, i: f.push(f.cells[i.value]),
    "LOAD_DEREF": lambda f, i: f.push(f.machine.load_cell(f, i.value)),
    "STORE_DEREF": lambda f, i: f.machine.store_cell(f, i.value, f.pop()),
    "DELETE_DEREF": lambda f, i: f.machine.delete_cell(f, i.value),
}
OPCODES.update(_SIMPLE)


@op()
def SWAP(f: Frame, i: Instruction) -> None:
    f.stack[-i.arg], f.stack[-1] = f.stack[-1], f.stack[-i.arg]


# ------------------------------------------------------------------------------ operators


@op()
def COMPARE_OP(f: Frame, i: Instruction) -> None:
    right, left = f.pop(), f.pop()
    f.push(f.machine.compare(i.value, left, right))


# ------------------------------------------------------------------------------ building


@op()
def BUILD_MAP(f: Frame, i: Instruction) -> None:
    items = f.take(2 * i.arg)
    f.push(dict(zip(_hashed(f, items[::2]), items[1::2])))


@op()
def DICT_MERGE(f: Frame, i: Instruction) -> None:
    given = f.pop()
    # its NULL is above it from 3.13 on, and below it before
    function = f.stack[-i.arg - 2 - (sys.version_info >= (3, 13))]
    if not hasattr(type(given), "keys"):
        kind = type(given).__name__
        raise TypeError(f"{called(function)} argument after ** must be a mapping, not {kind}")
    more, into = f.machine.mapping(given), f.machine.writable(f.stack[-i.arg])
    twice = next((key for key in more if key in into), None)
    if twice is not None:
        raise TypeError(f"{called(function)} got multiple values for keyword argument {twice!r}")
    into.update(more)


def _unpacked(f: Frame) -> list[Any]:
    found = f.pop()
    kind: Any = type(found)
    if not hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__"):
        raise TypeError(f"cannot unpack non-iterable {kind.__name__} object")
    items: list[Any] = f.machine.items(found)
    return items


@op()
def UNPACK_SEQUENCE(f: Frame, i: Instruction) -> None:
    items = _unpacked(f)
    if len(items) < i.arg:
        raise ValueError(f"not enough values to unpack (expected {i.arg}, got {len(items)})")
    if len(items) > i.arg:
        raise ValueError(f"too many values to unpack (expected {i.arg})")
    f.stack += reversed(items)


@op()
def UNPACK_EX(f: Frame, i: Instruction) -> None:
    items = _unpacked(f)
    before, after = i.arg & 0xFF, i.arg >> 8
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    last = len(items) - after
    f.stack += reversed([*items[:before], items[before:last], *items[last:]])


@op()
def FORMAT_VALUE(f: Frame, i: Instruction) -> None:
    spec = f.pop() if i.arg & 4 else ""
    f.push(f.machine.format(f.pop(), _CONVERSIONS[i.arg & 3], spec))


# ------------------------------------------------------------------------------ names


def _store(f: Frame, name: str, value: Any) -> None:
    """To Python a local and a cell of one name are one slot: a comprehension puts back what was."""
    if type(value) is types.CellType and name in f.code.co_cellvars:
        f.locals.pop(name, None)
        f.cells[name] = value
        return
    f.cells.pop(name, None)
    f.locals[name] = value


def _store_all(f: Frame, i: Instruction) -> None:
    for name in i.value:
        _store(f, name, f.pop())


def _local(f: Frame, name: str) -> Any:
    if name in f.cells:  # from 3.13 on cells are loaded like locals
        return f.cells[name]
    value = f.locals.get(name, UNBOUND)
    if value is UNBOUND:
        raise UnboundLocalError(
            f"cannot access local variable {name!r} where it is not associated with a value"
        )
    if type(value) is Opaque:
        raise value.met()
    return value


def _load_from(f: Frame, names: Any, name: str, otherwise: Callable[[Frame, str], Any]) -> None:
    f.push(names[name] if name in names else otherwise(f, name))


@op()
def STORE_FAST_LOAD_FAST(f: Frame, i: Instruction) -> None:
    store, load = i.value
    _store(f, store, f.pop())
    f.push(_local(f, load))


@op()
def DELETE_FAST(f: Frame, i: Instruction) -> None:
    _local(f, i.value)
    del f.locals[i.value]


# ------------------------------------------------------------------------------ closures


@op()
def MAKE_CELL(f: Frame, i: Instruction) -> None:
    value = f.locals.pop(i.value, UNBOUND)
    f.cells[i.value] = types.CellType() if value is UNBOUND else types.CellType(value)


# By the bit of MAKE_FUNCTION's argument that says that it is on the stack.
_OF_FUNCTIONS = {4: "__annotations__", 2: "__kwdefaults__", 1: "__defaults__"}


@op()
def MAKE_FUNCTION(f: Frame, i: Instruction) -> None:
    code = f.pop()
    closure = f.pop() if i.arg & 8 else None
    if closure is None and code.co_freevars:  # from 3.13 on it comes with the next instruction
        closure = tuple(types.CellType() for _ in code.co_freevars)
    made = types.FunctionType(code, f.globals, code.co_name, None, closure)
    for bit in _OF_FUNCTIONS:
        if i.arg & bit:
            _set_in_function(made, bit, f.pop())
    f.machine.made_function(made)
    f.push(made)


@op()
def SET_FUNCTION_ATTRIBUTE(f: Frame, i: Instruction) -> None:
    made, value = f.pop(), f.pop()
    if i.arg == 8:
        before, made = made, types.FunctionType(made.__code__, made.__globals__, closure=value)
        for name in ("__name__", *_OF_FUNCTIONS.values()):
            setattr(made, name, getattr(before, name))
        f.machine.made_function(made)
    else:
        _set_in_function(made, i.arg, value)
    f.push(made)


def _set_in_function(made: types.FunctionType, bit: int, value: Any) -> None:
    if bit == 4:
        value = dict(zip(value[::2], value[1::2]))
    setattr(made, _OF_FUNCTIONS[bit], value)
