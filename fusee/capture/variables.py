"""Opcodes for names: local and global variables, cells, functions that close over them."""

from __future__ import annotations

import types
from typing import Any

from fusee.capture.bytecode import Instruction
from fusee.capture.frame import UNBOUND, Frame
from fusee.capture.opcode_table import V311, V312, V313, op

# ------------------------------------------------------------------------------ names


@op()
def LOAD_CONST(f: Frame, i: Instruction) -> None:
    f.push(i.value)


def _local(f: Frame, name: str) -> Any:
    value = f.locals.get(name, UNBOUND)
    if value is UNBOUND:
        raise UnboundLocalError(
            f"cannot access local variable {name!r} where it is not associated with a value"
        )
    return value


@op()
@op(name="LOAD_FAST_CHECK")
def LOAD_FAST(f: Frame, i: Instruction) -> None:
    if i.value in f.cells:  # from 3.13 on cells are loaded like locals
        f.push(f.cells[i.value])
    else:
        f.push(_local(f, i.value))


@op()
def LOAD_FAST_AND_CLEAR(f: Frame, i: Instruction) -> None:
    f.push(f.locals.pop(i.value, UNBOUND))


@op()
def STORE_FAST(f: Frame, i: Instruction) -> None:
    f.locals[i.value] = f.pop()


@op()
def STORE_FAST_MAYBE_NULL(f: Frame, i: Instruction) -> None:
    f.locals[i.value] = f.pop()


@op()
def DELETE_FAST(f: Frame, i: Instruction) -> None:
    _local(f, i.value)
    del f.locals[i.value]


@op()
def LOAD_GLOBAL(f: Frame, i: Instruction) -> None:
    value = f.machine.load_global(f, i.value)
    if not i.arg & 1:
        f.push(value)
    else:
        f.push_callable(value)


@op()
def STORE_GLOBAL(f: Frame, i: Instruction) -> None:
    f.machine.store_global(f, i.value, f.pop())


@op()
def DELETE_GLOBAL(f: Frame, i: Instruction) -> None:
    f.machine.delete_global(f, i.value)


@op()
def LOAD_NAME(f: Frame, i: Instruction) -> None:
    if f.names is not None and i.value in f.names:
        f.push(f.names[i.value])
    else:
        f.push(f.machine.load_global(f, i.value))


@op()
def STORE_NAME(f: Frame, i: Instruction) -> None:
    f.names[i.value] = f.pop()


@op()
def DELETE_NAME(f: Frame, i: Instruction) -> None:
    del f.names[i.value]


@op()
def LOAD_LOCALS(f: Frame, i: Instruction) -> None:
    f.push(f.names if f.names is not None else f.locals)


@op(V312, V313)
def LOAD_FROM_DICT_OR_GLOBALS(f: Frame, i: Instruction) -> None:
    names = f.pop()
    f.push(names[i.value] if i.value in names else f.machine.load_global(f, i.value))


@op(V312, V313)
def LOAD_FROM_DICT_OR_DEREF(f: Frame, i: Instruction) -> None:
    names = f.pop()
    f.push(names[i.value] if i.value in names else f.machine.load_cell(f, i.value))


@op(V311)
def LOAD_CLASSDEREF(f: Frame, i: Instruction) -> None:
    found = f.names is not None and i.value in f.names
    f.push(f.names[i.value] if found else f.machine.load_cell(f, i.value))


# ------------------------------------------------------------------------------ closures


@op()
def MAKE_CELL(f: Frame, i: Instruction) -> None:
    value = f.locals.pop(i.value, UNBOUND)
    f.cells[i.value] = types.CellType() if value is UNBOUND else types.CellType(value)


@op()
def LOAD_CLOSURE(f: Frame, i: Instruction) -> None:
    f.push(f.cells[i.value])


@op()
def LOAD_DEREF(f: Frame, i: Instruction) -> None:
    f.push(f.machine.load_cell(f, i.value))


@op()
def STORE_DEREF(f: Frame, i: Instruction) -> None:
    f.machine.store_cell(f, i.value, f.pop())


@op()
def DELETE_DEREF(f: Frame, i: Instruction) -> None:
    f.machine.delete_cell(f, i.value)


@op()
def MAKE_FUNCTION(f: Frame, i: Instruction) -> None:
    code = f.pop()
    closure = f.pop() if i.arg & 8 else None
    if closure is None and code.co_freevars:  # from 3.13 on it comes with the next instruction
        closure = tuple(types.CellType() for _ in code.co_freevars)
    annotations = f.pop() if i.arg & 4 else None
    keyword_defaults = f.pop() if i.arg & 2 else None
    defaults = f.pop() if i.arg & 1 else None
    made = types.FunctionType(code, f.globals, code.co_name, defaults, closure)
    made.__kwdefaults__ = keyword_defaults
    if annotations:
        pairs = iter(annotations)
        made.__annotations__ = dict(zip(pairs, pairs))
    f.machine.made_function(made)
    f.push(made)


@op(V313)
def SET_FUNCTION_ATTRIBUTE(f: Frame, i: Instruction) -> None:
    made, value = f.pop(), f.pop()
    if i.arg == 8:
        fresh = types.FunctionType(
            made.__code__, made.__globals__, made.__name__, made.__defaults__, value
        )
        fresh.__kwdefaults__, fresh.__annotations__ = made.__kwdefaults__, made.__annotations__
        made = fresh
        f.machine.made_function(made)
    elif i.arg == 4:
        pairs = iter(value)
        made.__annotations__ = dict(zip(pairs, pairs))
    elif i.arg == 2:
        made.__kwdefaults__ = value
    else:
        made.__defaults__ = value
    f.push(made)


@op(V313)
def LOAD_FAST_LOAD_FAST(f: Frame, i: Instruction) -> None:
    for name in i.value:
        f.push(f.cells[name] if name in f.cells else _local(f, name))


@op(V313)
def STORE_FAST_LOAD_FAST(f: Frame, i: Instruction) -> None:
    store, load = i.value
    f.locals[store] = f.pop()
    f.push(f.cells[load] if load in f.cells else _local(f, load))


@op(V313)
def STORE_FAST_STORE_FAST(f: Frame, i: Instruction) -> None:
    for name in i.value:
        f.locals[name] = f.pop()
