"""How large a folder is: lines, tokens, files, functions, and helpers that have one caller."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

# What a tokenizer gives beside names, operators and literals.
LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
# From Python 3.12 on an f-string is several tokens; here it is one, as before.
F_STRING = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
# Nested: a whole tree, and not the folder of that name alone.
ALL = "/**"


@dataclass(frozen=True)
class Figures:
    """Sizes of one file or of several.

    lines      of all text, blank ones too
    tokens     of Python: names, operators and literals; no comments, no docstrings
    once       private functions of a module that it names in one place: text that stands elsewhere
    """

    files: int = 0
    lines: int = 0
    tokens: int = 0
    functions: int = 0
    once: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other))))


NAMES = tuple(field.name for field in fields(Figures))


def of_text(text: str) -> Figures:
    """Figures of one Python module."""
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Figures(1, len(text.splitlines()), _tokens(text, tree), len(functions), _once(tree))


def of_file(path: Path) -> Figures:
    """Figures of one file; of what is no Python only the lines."""
    if path.suffix == ".py":
        return of_text(path.read_text())
    return Figures(1, len(path.read_bytes().splitlines()))


def folders(root: Path, suffix: str = "") -> dict[str, Figures]:
    """Figures of each folder under `root` without those inside it, and of all as `root/**`.

    suffix   only files whose names end so; by default all: they are shipped, whatever they are
    """
    found: dict[str, Figures] = {}
    for path in _files(root, suffix):
        figures = of_file(path)
        for name in (path.parent.relative_to(root.parent).as_posix(), root.name + ALL):
            found[name] = found.get(name, Figures()) + figures
    return found


def _files(root: Path, suffix: str) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name.endswith(suffix) and path.parent.name != "__pycache__":
            yield path


def _tokens(text: str, tree: ast.Module) -> int:
    docstrings = set(_docstrings(tree))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth -= token.type == F_STRING[1]
        if not depth and token.type not in LAYOUT and token.start not in docstrings:
            count += token.type != F_STRING[1]
        depth += token.type == F_STRING[0]
    return count


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].col_offset


def _once(tree: ast.Module) -> int:
    read = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )
    return sum(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("_")
        and not node.name.startswith("__")
        and not node.decorator_list  # a table calls it
        and read[node.name] == 1
        for node in tree.body
    )
