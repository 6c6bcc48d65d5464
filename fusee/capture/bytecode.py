"""Code objects as lists of instructions: jumps by index, exception tables as ranges of indices.

source   dis
"""

from __future__ import annotations

import dis
import inspect
import types
import weakref
from typing import Any, NamedTuple

__all__ = ["Handler", "Instruction", "Program", "parameters", "program"]


class Instruction(NamedTuple):
    """`target` is the index that a jump goes to; `value` what dis resolves the argument to."""

    name: str
    arg: int
    value: Any
    target: int
    line: int


class Handler(NamedTuple):
    """What happens if an instruction in `start` <= index < `end` raises."""

    start: int
    end: int
    target: int
    depth: int
    keeps_position: bool


class Program(NamedTuple):
    """A code object, decoded. It does not keep the code alive.

    taking   code with the same parameters, which gives them as a dict
    """

    instructions: list[Instruction]
    handlers: list[Handler]
    taking: types.CodeType

    def handler(self, index: int) -> Handler | None:
        """The innermost handler that covers an instruction."""
        return next((h for h in self.handlers if h.start <= index < h.end), None)


_programs: weakref.WeakKeyDictionary[types.CodeType, Program] = weakref.WeakKeyDictionary()

# Executed by nothing here: they prepare the specialising interpreter.
_SKIPPED = {"CACHE", "EXTENDED_ARG"}


def program(code: types.CodeType) -> Program:
    """The decoded form of a code object, made once."""
    found = _programs.get(code)
    if found is None:
        found = _programs[code] = _decode(code)
    return found


def _decode(code: types.CodeType) -> Program:
    decoded: Any = dis.Bytecode(code)  # its `exception_entries` are in no stub
    raw = [i for i in decoded if i.opname not in _SKIPPED]
    listed = {instruction.offset: k for k, instruction in enumerate(raw)}
    # a jump may go to the prefix of an instruction with a long argument
    by_offset: dict[int, int] = {}
    following = len(raw)
    for offset in range(len(code.co_code), -2, -2):
        following = by_offset[offset] = listed.get(offset, following)
    jumps = {*dis.hasjrel, *dis.hasjabs}
    line = code.co_firstlineno
    instructions = []
    for i in raw:
        line = i.positions.lineno or line
        target = by_offset[i.argval] if i.opcode in jumps else -1
        instructions.append(Instruction(i.opname, i.arg or 0, i.argval, target, line))
    handlers = [
        Handler(by_offset[start], by_offset[end], by_offset[target], depth, keeps)
        for start, end, target, depth, keeps in decoded.exception_entries
    ]
    names = parameters(code)
    taking = _TAKING.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_flags=_TAKING.co_flags | code.co_flags & _STARRED,
        co_varnames=tuple(names),
        co_nlocals=len(names),
    )
    return Program(instructions, handlers, taking)


_TAKING = (lambda: locals()).__code__
_STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def parameters(code: types.CodeType) -> list[str]:
    """The names of all parameters, starred ones included."""
    count = code.co_argcount + code.co_kwonlyargcount
    return list(code.co_varnames[: count + (code.co_flags & _STARRED).bit_count()])
