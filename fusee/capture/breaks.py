"""What ends a piece of a program that is captured as one graph."""

from __future__ import annotations

__all__ = ["GraphBreak"]


class GraphBreak(BaseException):
    """Here the graph must end: no `except` of the program that is traced may catch it.

    reason   one sentence: what could not become part of the graph, and why
    remedy   what the user can do about it
    where    the user's line, `file.py:41 in step`, once it is known
    """

    def __init__(self, reason: str, remedy: str = "", where: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.where = where
