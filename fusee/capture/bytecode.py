"""Code objects as lists of instructions: jumps by index, exception tables as ranges of indices.

source   dis; the layout of exception tables is in CPython's Objects/exception_handling_notes.txt
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
    offset: int


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
    by_offset: dict[int, int]
    taking: types.CodeType

    def handler(self, index: int) -> Handler | None:
        """The innermost handler that covers an instruction."""
        for handler in self.handlers:
            if handler.start <= index < handler.end:
                return handler
        return None


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
    raw = [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
    by_offset: dict[int, int] = {}
    listed = {instruction.offset: k for k, instruction in enumerate(raw)}
    # a jump may go to the prefix of an instruction with a long argument
    following = len(raw)
    for offset in range(len(code.co_code), -2, -2):
        following = listed.get(offset, following)
        by_offset[offset] = following
    jumps = {*dis.hasjrel, *dis.hasjabs}
    line = code.co_firstlineno
    instructions = []
    positions = list(code.co_positions())
    for instruction in raw:
        line = positions[instruction.offset // 2][0] or line
        target = by_offset[instruction.argval] if instruction.opcode in jumps else -1
        instructions.append(
            Instruction(
                instruction.opname,
                instruction.arg or 0,
                instruction.argval,
                target,
                line,
                instruction.offset,
            )
        )
    handlers = [
        Handler(by_offset[start], by_offset[end], by_offset[target], depth, keeps)
        for start, end, target, depth, keeps in _exception_table(code.co_exceptiontable)
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
    return Program(instructions, handlers, by_offset, taking)


_TAKING = (lambda: locals()).__code__
_STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def parameters(code: types.CodeType) -> list[str]:
    """The names of all parameters, starred ones included."""
    count = code.co_argcount + code.co_kwonlyargcount
    return list(code.co_varnames[: count + (code.co_flags & _STARRED).bit_count()])


def _exception_table(table: bytes) -> list[tuple[int, int, int, int, bool]]:
    rows = []
    at = 0

    def number() -> int:
        nonlocal at
        byte = table[at]
        at += 1
        value = byte & 63
        while byte & 64:
            byte = table[at]
            at += 1
            value = value << 6 | byte & 63
        return value

    while at < len(table):
        start, length, target, depth = (number() * 2, number() * 2, number() * 2, number())
        rows.append((start, start + length, target, depth >> 1, bool(depth & 1)))
    return rows
