"""Opcodes that move on: jumps, loops, generators, calls, exceptions, imports.

source   https://docs.python.org/3.13/library/dis.html#python-bytecode-instructions and its versions
         for 3.11 and 3.12; CPython's Python/bytecodes.c
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from typing import Any

from fusee.capture.bytecode import Instruction
from fusee.capture.frame import NULL, Frame
from fusee.capture.opcode_table import COMMON, V311, V312, V313, Handler, op

# ------------------------------------------------------------------------------ jumps


def _jump(f: Frame, i: Instruction) -> None:
    f.next = i.target


for _name in "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT".split():
    COMMON[_name] = _jump


def _jump_if(test: Callable[[Frame, Any], bool]) -> Handler:
    def handler(f: Frame, i: Instruction) -> None:
        # the operand stays until its truth is known: a graph may have to end here
        if test(f, f.stack[-1]):
            f.next = i.target
        f.pop()

    return handler


_TESTS: dict[str, Callable[[Frame, Any], bool]] = {
    "TRUE": lambda f, x: f.machine.truth(x),
    "FALSE": lambda f, x: not f.machine.truth(x),
    "NONE": lambda f, x: x is None,
    "NOT_NONE": lambda f, x: x is not None,
}
for _name, _test in _TESTS.items():
    _handler = _jump_if(_test)
    for _kind in ("POP_JUMP_IF_", "POP_JUMP_FORWARD_IF_", "POP_JUMP_BACKWARD_IF_"):
        COMMON[_kind + _name] = _handler


@op(V311)
def JUMP_IF_TRUE_OR_POP(f: Frame, i: Instruction) -> None:
    if f.machine.truth(f.stack[-1]):
        f.next = i.target
    else:
        f.pop()


@op(V311)
def JUMP_IF_FALSE_OR_POP(f: Frame, i: Instruction) -> None:
    if f.machine.truth(f.stack[-1]):
        f.pop()
    else:
        f.next = i.target


# ------------------------------------------------------------------------------ loops


@op()
def GET_ITER(f: Frame, i: Instruction) -> None:
    f.push(f.machine.iterate(f.pop()))


@op(V311)
def FOR_ITER(f: Frame, i: Instruction) -> None:
    try:
        value = f.machine.next(f.stack[-1])
    except StopIteration:
        f.pop()
        f.next = i.target
    else:
        f.push(value)


@op(V312, V313, name="FOR_ITER")
def _for_iter(f: Frame, i: Instruction) -> None:
    try:
        value = f.machine.next(f.stack[-1])
    except StopIteration:
        # END_FOR, and from 3.13 on POP_TOP, would only clean up
        f.pop()
        f.next = i.target + (2 if sys.version_info >= (3, 13) else 1)
    else:
        f.push(value)


@op(V312)
def END_FOR(f: Frame, i: Instruction) -> None:
    f.take(2)


@op(V313, name="END_FOR")
def _end_for(f: Frame, i: Instruction) -> None:
    f.pop()


@op()
def GET_YIELD_FROM_ITER(f: Frame, i: Instruction) -> None:
    f.push(f.machine.iterate(f.pop()))


@op()
def RETURN_GENERATOR(f: Frame, i: Instruction) -> None:
    """The machine makes the generator when it calls the function, and starts after this."""


@op()
def YIELD_VALUE(f: Frame, i: Instruction) -> bool:
    f.result = f.pop()
    f.yielded = True
    return True


def _send(f: Frame, value: Any) -> tuple[bool, Any]:
    """Resume the generator below; whether it goes on, and what it gives."""
    receiver = f.stack[-1]
    try:
        if value is None:
            return True, f.machine.next(receiver)
        return True, receiver.send(value)
    except StopIteration as error:
        return False, error.value


@op(V311)
def SEND(f: Frame, i: Instruction) -> None:
    goes_on, value = _send(f, f.pop())
    if not goes_on:
        f.pop()
        f.next = i.target
    f.push(value)


@op(V312, V313, name="SEND")
def _send_312(f: Frame, i: Instruction) -> None:
    goes_on, value = _send(f, f.pop())
    if not goes_on:
        f.next = i.target
    f.push(value)


@op(V312, V313)
def END_SEND(f: Frame, i: Instruction) -> None:
    _, value = f.take(2)
    f.push(value)


@op(V312, V313)
def CLEANUP_THROW(f: Frame, i: Instruction) -> None:
    _, _, error = f.take(3)
    if not isinstance(error, StopIteration):
        raise error
    f.stack += (None, error.value)


# ------------------------------------------------------------------------------ calls


@op(V311, V312)
def KW_NAMES(f: Frame, i: Instruction) -> None:
    f.keywords = f.code.co_consts[i.arg]


def _call(f: Frame, first: Any, second: Any, args: list[Any], names: tuple[str, ...]) -> None:
    """Before 3.13 the stack holds (NULL, callable) or (method, self), after it (callable, self)."""
    if sys.version_info >= (3, 13):
        function, owner = first, second
    else:
        function, owner = (second, NULL) if first is NULL else (first, second)
    if owner is not NULL:
        args = [owner, *args]
    count = len(args) - len(names)
    f.push(f.machine.call(function, tuple(args[:count]), dict(zip(names, args[count:]))))


@op()
def CALL(f: Frame, i: Instruction) -> None:
    names, f.keywords = f.keywords, ()
    args = f.take(i.arg)
    first, second = f.take(2)
    _call(f, first, second, args, names)


@op(V313)
def CALL_KW(f: Frame, i: Instruction) -> None:
    names = f.pop()
    args = f.take(i.arg)
    first, second = f.take(2)
    _call(f, first, second, args, names)


@op()
def CALL_FUNCTION_EX(f: Frame, i: Instruction) -> None:
    kwargs = f.machine.mapping(f.pop()) if i.arg & 1 else {}
    args = f.machine.items(f.pop())
    if sys.version_info >= (3, 13):
        f.pop()
        function = f.pop()
    else:
        function = f.pop()
        f.pop()
    f.push(f.machine.call(function, tuple(args), dict(kwargs)))


@op()
def RETURN_VALUE(f: Frame, i: Instruction) -> bool:
    f.result = f.pop()
    return True


@op(V312, V313)
def RETURN_CONST(f: Frame, i: Instruction) -> bool:
    f.result = i.value
    return True


@op()
def LOAD_BUILD_CLASS(f: Frame, i: Instruction) -> None:
    f.push(builtins.__build_class__)


# ------------------------------------------------------------------------------ exceptions


@op()
def LOAD_ASSERTION_ERROR(f: Frame, i: Instruction) -> None:
    f.push(AssertionError)


@op()
def RAISE_VARARGS(f: Frame, i: Instruction) -> None:
    if i.arg == 0:
        if f.machine.handled is None:
            raise RuntimeError("No active exception to reraise")
        raise f.machine.handled
    cause = f.pop() if i.arg == 2 else NULL
    error = f.pop()
    if isinstance(error, type):
        error = f.machine.call(error, (), {})
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not NULL:
        reason: Any = f.machine.call(cause, (), {}) if isinstance(cause, type) else cause
        error.__cause__ = reason
    raise error


@op()
def PUSH_EXC_INFO(f: Frame, i: Instruction) -> None:
    error = f.pop()
    f.stack += (f.machine.handled, error)
    f.machine.handled = error


@op()
def POP_EXCEPT(f: Frame, i: Instruction) -> None:
    previous: BaseException | None = f.pop()
    f.machine.handled = previous


@op()
def CHECK_EXC_MATCH(f: Frame, i: Instruction) -> None:
    kind = f.pop()
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
        raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    f.push(isinstance(f.stack[-1], kind))


@op()
def RERAISE(f: Frame, i: Instruction) -> None:
    error = f.pop()
    raise error


@op()
def BEFORE_WITH(f: Frame, i: Instruction) -> None:
    manager = f.pop()
    leave = f.machine.special(manager, "__exit__")
    enter = f.machine.special(manager, "__enter__")
    f.push(leave)
    f.push(f.machine.call(enter, (), {}))


@op()
def WITH_EXCEPT_START(f: Frame, i: Instruction) -> None:
    error = f.stack[-1]
    leave = f.stack[-4]
    f.push(f.machine.call(leave, (type(error), error, error.__traceback__), {}))


# ------------------------------------------------------------------------------ the rest


@op()
def IMPORT_NAME(f: Frame, i: Instruction) -> None:
    level, names = f.take(2)
    f.push(f.machine.import_name(f, i.value, level, names))


@op()
def IMPORT_FROM(f: Frame, i: Instruction) -> None:
    f.push(f.machine.import_from(f.stack[-1], i.value))


@op()
def GET_LEN(f: Frame, i: Instruction) -> None:
    f.push(f.machine.call(len, (f.stack[-1],), {}))


@op(V312, V313)
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
        raise f.machine.unsupported(f"the instruction CALL_INTRINSIC_1 {i.arg}")
    f.push(value)
