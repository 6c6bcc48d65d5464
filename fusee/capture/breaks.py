"""What ends a piece of a program that is captured as one graph."""

from __future__ import annotations

__all__ = ["Forbidden", "GraphBreak"]


class GraphBreak(BaseException):
    """Here the graph must end: no `except` of the program that is traced may catch it.

    reason   one sentence: what could not become part of the graph, and why
    remedy   what the user can do about it
    where    the user's line, `file.py:41 in step`, once it is known
    is_error what error_on_graph_break said there; None if nothing was said
    """

    def __init__(self, reason: str, remedy: str = "", where: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.where = where
        self.is_error: bool | None = None


class Forbidden(GraphBreak):
    """What a compiled function must not do at all: an error, not the end of a graph."""
