"""Tracebacks of programs that run in pieces: the user's lines, as if Python ran the frames."""

from __future__ import annotations

import ast
import os
import types
from typing import NoReturn

from fusee.capture.frame import Frame

__all__ = ["raise_at"]

_OURS = os.path.dirname(__file__) + os.sep


def raise_at(f: Frame, error: BaseException) -> NoReturn:
    """Raise `error` from the line at which a frame stands."""
    line = f.instruction.line
    take = ast.Call(ast.Name("_take", ast.Load()), [], [])
    tree = ast.Module([ast.Raise(take)], [])
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    code = compile(tree, f.code.co_filename, "exec")
    code = code.replace(co_name=f.code.co_name, co_qualname=f.code.co_qualname)
    # the frame must not keep the error, which keeps the frame
    exec(code, {"_take": [error.with_traceback(_without_ours(error.__traceback__))].pop})
    raise AssertionError("unreachable")


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
