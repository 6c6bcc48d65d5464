"""Tracebacks of programs that run in pieces: the user's lines, as if Python ran the frames."""

from __future__ import annotations

import ast
import contextlib
import functools
import opcode
import os
import sys
import types
import warnings
from typing import Any, NamedTuple

_OURS = os.path.dirname(__file__) + os.sep
_HIDDEN = ("<fusee ", "<entrance of ", _OURS)


class Line(NamedTuple):
    """Where a frame stands."""

    code: types.CodeType
    globals: dict[str, Any]
    number: int

    @classmethod
    def of(cls, f: Any) -> Line:
        return cls(f.code, f.globals, f.instruction.line)


def calling_from(line: Line) -> types.FunctionType:
    """A function `(call, *args, **kwargs)` that does this call, as if it stood at a line."""
    code = _calling(line.code.co_filename, line.number, line.code.co_qualname)
    return types.FunctionType(code, line.globals)


@functools.lru_cache(1000)
def _calling(file: str, number: int, name: str) -> types.CodeType:
    tree = ast.parse("lambda _call, *args, **kwargs: _call(*args, **kwargs)", mode="eval")
    return standing_at(tree, file, number, name)


def standing_at(tree: ast.Expression, file: str, line: int, name: str) -> types.CodeType:
    """The code of a `lambda`, as if a function of that name had it at that line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.arg)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    constants = compile(tree, file, "eval").co_consts
    (code,) = (x for x in constants if isinstance(x, types.CodeType))
    return code.replace(co_name=name.rpartition(".")[2], co_qualname=name)


def called_from(f: Any, function: Any, is_code: bool) -> Any:
    """What to call in place of a function that may name the line of its caller: that of a frame.

    is_code   the function runs code of the program's
    """
    if not is_code and getattr(function, "__module__", None) not in ("logging", "_warnings", "sys"):
        return function
    if function in _BY_DEPTH:
        function = _BY_DEPTH[function]
    return functools.partial(calling_from(Line.of(f)), function)


def _warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kw: Any) -> None:
    warnings.warn(message, category, 1 + _steps(stacklevel), *args, **kw)


def _getframe(depth: int = 0) -> Any:
    return sys._getframe(_steps(depth + 1))


# What counts frames, as if there were none of ours.
_BY_DEPTH: dict[Any, Any] = {warnings.warn: _warn, sys._getframe: _getframe}


def at_caller() -> types.FunctionType:
    """`calling_from` the line of the program that called who asks."""
    at = _getframe()
    return calling_from(Line(at.f_code, at.f_globals, at.f_lineno))


def _steps(count: int) -> int:
    """How many frames lie between who calls this and the program's frame number `count`."""
    at: Any = sys._getframe(1)
    steps = 0
    while at is not None and count > 0:
        steps, at = steps + 1, at.f_back
        name = _OURS if at is None else at.f_code.co_filename
        count -= not name.startswith(_HIDDEN)
    return steps


def passed(
    following: types.TracebackType | None,
    code: types.CodeType,
    globals_: dict[str, Any],
    offset: int,
    line: int,
) -> types.TracebackType:
    """A traceback's entry for a frame of the program, at one of its instructions."""
    longer = max(0, len(code.co_code) - len(_FRAME.co_code)) // 2
    places = _FRAME.replace(
        co_code=_FRAME.co_code + bytes((opcode.opmap["NOP"], 0)) * longer,
        co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno, co_linetable=code.co_linetable,
        co_consts=(*_FRAME.co_consts, code),
    )  # fmt: skip
    frame = types.FunctionType(places, globals_)().gi_frame  # which knows no caller
    return types.TracebackType(following, frame, offset, line)


# As long as the code whose lines it has: a tracer has CPython make room for as many.
_FRAME = (lambda: (yield)).__code__


def passing(entry: types.TracebackType) -> tuple[Any, ...]:
    """What `passed` makes an entry of, beside the one that follows."""
    frame, code = entry.tb_frame, entry.tb_frame.f_code
    if code.co_code.startswith(_FRAME.co_code) and type(code.co_consts[-1]) is types.CodeType:
        code = code.co_consts[-1]
    return code, frame.f_globals, entry.tb_lasti, entry.tb_lineno


def without_ours(found: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the entries of this package, whose frames hold nothing from here on:
    those of the program know them as their callers, and with the error they make a circle."""
    kept = []
    while found is not None:
        frame = found.tb_frame
        if frame.f_code.co_filename.startswith(_HIDDEN):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
        elif frame.f_code.co_varnames != _CALLING:
            kept.append(found)
        found = found.tb_next
    for one, following in zip(kept, [*kept[1:], None]):
        one.tb_next = following
    return kept[0] if kept else None


_CALLING = ("_call", "args", "kwargs")  # as code that stands at a line of the program
