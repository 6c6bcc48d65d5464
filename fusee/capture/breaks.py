"""What ends a piece of a program that is captured as one graph."""

from __future__ import annotations

__all__ = ["Forbidden", "GraphBreak", "Opaque", "Unchecked", "Unready"]


class GraphBreak(BaseException):
    """Here the graph must end: no `except` of the program that is traced may catch it.

    reason   one sentence: what could not become part of the graph, and why
    remedy   what the user can do about it
    where    the user's line, `file.py:41 in step`, once it is known
    raises   whether Python is to raise an error of the program's there
    is_error what error_on_graph_break said there; None if nothing was said
    """

    def __init__(
        self, reason: str, remedy: str = "", where: str = "", *, raises: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.where = where
        self.raises = raises
        self.is_error: bool | None = None


class Forbidden(GraphBreak):
    """What a compiled function must not do at all: an error, not the end of a graph."""


class Unready(BaseException):
    """Python runs this call as a whole: what it does, the next one will not do again."""


class Unchecked(BaseException):
    """A graph that checks what branches rely on changes its inputs, so it can't run again."""


class Opaque:
    """Stands for a value from outside of a kind that no graph takes, until something needs it."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy

    def met(self) -> GraphBreak:
        return GraphBreak(self.reason, self.remedy)
