"""Tracebacks of programs that run in pieces: the user's lines, as if Python ran the frames."""

from __future__ import annotations

import ast
import functools
import os
import sys
import types
import warnings
from typing import Any, NamedTuple, NoReturn

from fusee.capture.frame import Frame

__all__ = ["Line", "called_from", "calling_from", "raise_at", "standing_at"]

_OURS = os.path.dirname(__file__) + os.sep


class Line(NamedTuple):
    """Where a frame stands."""

    code: types.CodeType
    globals: dict[str, Any]
    number: int

    @classmethod
    def of(cls, f: Frame) -> Line:
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
    (code,) = (x for x in _compiled(tree, file, line).co_consts if isinstance(x, types.CodeType))
    return code.replace(co_name=name.rpartition(".")[2], co_qualname=name)


def called_from(f: Frame, function: Any, is_code: bool) -> Any:
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


def _steps(count: int) -> int:
    """How many frames lie between who calls this and the program's frame number `count`."""
    at: Any = sys._getframe(1)
    steps = 0
    while at is not None and count > 0:
        steps, at = steps + 1, at.f_back
        name = _OURS if at is None else at.f_code.co_filename
        count -= not name.startswith(("<fusee ", "<entrance of ", _OURS))
    return steps


def raise_at(f: Frame, error: BaseException) -> NoReturn:
    """Raise `error` from the line at which a frame stands."""
    take = ast.Call(ast.Name("_take", ast.Load()), [], [])
    code = _compiled(ast.Module([ast.Raise(take)], []), f.code.co_filename, f.instruction.line)
    code = code.replace(co_name=f.code.co_name, co_qualname=f.code.co_qualname)
    # the frame must not keep the error, which keeps the frame
    exec(code, {"_take": [error.with_traceback(_without_ours(error.__traceback__))].pop})
    raise AssertionError("unreachable")


def _compiled(tree: ast.Module | ast.Expression, file: str, line: int) -> types.CodeType:
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr, ast.arg)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    kind = "exec" if isinstance(tree, ast.Module) else "eval"
    made: types.CodeType = compile(tree, file, kind)
    return made


def _without_ours(found: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the entries of this package."""
    kept = []
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(found)
        found = found.tb_next
    for one, following in zip(kept, [*kept[1:], None]):
        one.tb_next = following
    return kept[0] if kept else None
