"""Opcodes that move on: jumps, loops, generators, calls, exceptions, imports.

source   https://docs.python.org/3.13/library/dis.html#python-bytecode-instructions and its versions
         for 3.11 and 3.12; CPython's Python/bytecodes.c
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from typing import Any

from fusee.capture.breaks import GraphBreak
from fusee.capture.bytecode import Instruction
from fusee.capture.frame import NULL, OPCODES, Frame, Opcode, op
from fusee.capture.semantics import checked

# ------------------------------------------------------------------------------ jumps


def _jump(f: Frame, i: Instruction) -> None:
    f.next = i.target


def _jump_if(test: Callable[[Frame, Any], bool], is_kept: bool = False) -> Opcode:
    def handler(f: Frame, i: Instruction) -> None:
        # the operand stays until its truth is known: a graph may have to end here
        is_met = test(f, f.stack[-1])
        if is_met:
            f.next = i.target
        if not (is_met and is_kept):
            f.pop()

    return handler


_TESTS: dict[str, Callable[[Frame, Any], bool]] = {
    "TRUE": lambda f, x: f.machine.decides(f, f.at, x),
    "FALSE": lambda f, x: not f.machine.decides(f, f.at, x),
    "NONE": lambda f, x: x is None,
    "NOT_NONE": lambda f, x: x is not None,
}
for _name, _test in _TESTS.items():
    OPCODES[f"JUMP_IF_{_name}_OR_POP"] = _jump_if(_test, is_kept=True)
    for _kind in ("POP_JUMP_IF_", "POP_JUMP_FORWARD_IF_", "POP_JUMP_BACKWARD_IF_"):
        OPCODES[_kind + _name] = _jump_if(_test)


# ------------------------------------------------------------------------------ the simplest

_SIMPLE: dict[str, Opcode] = {
    **dict.fromkeys(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"), _jump),
    "GET_ITER": lambda f, i: f.push(f.machine.iterate(f.pop())),
    "GET_YIELD_FROM_ITER": lambda f, i: f.push(f.machine.iterate(f.pop())),
    # the machine makes the generator when it calls the function, and starts after this
    "RETURN_GENERATOR": lambda f, i: None,
    "END_SEND": lambda f, i: f.stack.__delitem__(-2),
    "END_FOR": lambda f, i: None,  # FOR_ITER goes past it
    "LOAD_BUILD_CLASS": lambda f, i: f.push(builtins.__build_class__),
    "LOAD_ASSERTION_ERROR": lambda f, i: f.push(AssertionError),
    "IMPORT_NAME": lambda f, i: f.push(f.machine.import_name(f, i.value, *f.take(2))),
    "IMPORT_FROM": lambda f, i: f.push(f.machine.import_from(f.stack[-1], i.value)),
    "GET_LEN": lambda f, i: f.push(f.machine.call(len, (f.stack[-1],), {})),
}
OPCODES.update(_SIMPLE)


# ------------------------------------------------------------------------------ loops

_PAST_LOOP = (0, 1, 2)[sys.version_info.minor - 11]  # END_FOR, and from 3.13 on POP_TOP


@op()
def FOR_ITER(f: Frame, i: Instruction) -> None:
    try:
        value = f.machine.next(f.stack[-1])
    except StopIteration:
        f.pop()
        f.next = i.target + _PAST_LOOP
    else:
        f.push(value)


@op()
def SEND(f: Frame, i: Instruction) -> None:
    """Resume the generator below; if it ends, END_SEND takes it away from 3.12 on."""
    value, receiver = f.pop(), f.stack[-1]
    try:
        if value is None:
            value = f.machine.next(receiver)
        else:
            value = f.machine.call(f.machine.attribute(receiver, "send"), (value,), {})
    except StopIteration as error:
        value = error.value
        f.next = i.target
        if sys.version_info < (3, 12):
            f.pop()
    f.push(value)


@op()
def CLEANUP_THROW(f: Frame, i: Instruction) -> None:
    if not isinstance(f.stack[-1], StopIteration):
        raise f.pop()
    f.stack[-3:] = None, f.stack[-1].value


# ------------------------------------------------------------------------------ calls


@op()
def KW_NAMES(f: Frame, i: Instruction) -> None:
    f.keywords = f.code.co_consts[i.arg]


@op("CALL_KW")
def CALL(f: Frame, i: Instruction) -> None:
    names, f.keywords = f.pop() if i.name == "CALL_KW" else f.keywords, ()
    args = f.take(i.arg)
    function, owner = f.take(2)
    # before 3.13 the stack holds (NULL, callable) or (method, self), after it (callable, self)
    if function is NULL:
        function, owner = owner, NULL
    if owner is not NULL:
        args = [owner, *args]
    count = len(args) - len(names)
    f.push(f.machine.call(function, tuple(args[:count]), dict(zip(names, args[count:]))))


@op()
def CALL_FUNCTION_EX(f: Frame, i: Instruction) -> None:
    kwargs, given = f.pop() if i.arg & 1 else {}, f.pop()
    function = next(x for x in f.take(2) if x is not NULL)
    args = tuple(f.machine.items(checked(given, function)))
    if not all(isinstance(key, str) for key in kwargs):
        raise TypeError("keywords must be strings")
    f.push(f.machine.call(function, args, f.machine.mapping(kwargs)))


@op("RETURN_CONST", "YIELD_VALUE")
def RETURN_VALUE(f: Frame, i: Instruction) -> bool:
    f.yielded = i.name == "YIELD_VALUE"
    f.result = i.value if i.name == "RETURN_CONST" else f.pop()
    return True


# ------------------------------------------------------------------------------ exceptions


@op()
def RAISE_VARARGS(f: Frame, i: Instruction) -> None:
    if i.arg == 0:
        if f.machine.handled is None:
            raise RuntimeError("No active exception to reraise")
        raise f.machine.handled
    error, *cause = [f.machine.call(x, (), {}) if isinstance(x, type) else x for x in f.take(i.arg)]
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause:
        (error.__cause__,) = cause
    f.push(error)
    del error, cause  # they would know this frame, and it them
    raise f.pop()


@op()
def PUSH_EXC_INFO(f: Frame, i: Instruction) -> None:
    error = f.pop()
    f.stack += (f.machine.handled, error)
    f.machine.handled = error


@op()
def POP_EXCEPT(f: Frame, i: Instruction) -> None:
    f.machine.handled = f.pop()


@op()
def CHECK_EXC_MATCH(f: Frame, i: Instruction) -> None:
    kind = f.pop()
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
        raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    f.push(isinstance(f.stack[-1], kind))


@op()
def RERAISE(f: Frame, i: Instruction) -> None:
    raise f.pop()


@op()
def BEFORE_WITH(f: Frame, i: Instruction) -> None:
    manager = f.pop()
    leave = f.machine.special(manager, "__exit__")
    enter = f.machine.special(manager, "__enter__")
    f.push(leave)
    f.push(f.machine.call(enter, (), {}))


@op()
def WITH_EXCEPT_START(f: Frame, i: Instruction) -> None:
    leave, *_, error = f.stack[-4:]
    f.push(f.machine.call(leave, (type(error), error, error.__traceback__), {}))


@op()
def CALL_INTRINSIC_1(f: Frame, i: Instruction) -> None:
    value = f.pop()
    if i.arg == 3:  # a StopIteration leaves a generator
        if isinstance(value, StopIteration):
            error = RuntimeError("generator raised StopIteration")
            error.__cause__ = value
            value = error
    elif i.arg == 5:
        value = f.machine.unary("pos", value)
    elif i.arg == 6:
        value = tuple(f.machine.items(value))
    else:
        raise GraphBreak(f"the instruction CALL_INTRINSIC_1 {i.arg} is not supported")
    f.push(value)
