"""DOCUMENTS.md lists each snippet of the reference documents: its rows name tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "DOCUMENTS.md").read_text()
ROWS = re.findall(r"^\| (?!heading)(.+?) \| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)
NO_CODE = "no code of ours: "


def functions_in(path: Path) -> set[str]:
    functions = (x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef))
    return {x.name for x in functions if x.name.startswith("test_")}


def shown() -> set[tuple[str, str]]:
    """(file, test) of each row that names one."""
    named = [found for *_, found in ROWS if not found.startswith(NO_CODE)]
    pairs = [re.fullmatch(r"`([\w/]+\.py)::(\w+)`", one) for one in named]
    assert all(pairs), named
    return {(pair[1], pair[2]) for pair in pairs if pair is not None}


def test_each_row_names_a_test_that_exists() -> None:
    assert len(ROWS) > 60
    for file, name in shown():
        path = HERE / file if (HERE / file).exists() else HERE.parent / file
        assert name in functions_in(path), f"{file}::{name}"


def test_each_test_of_a_document_is_in_a_row() -> None:
    for path in HERE.glob("test_*.py"):
        if path != Path(__file__):
            assert not {(path.name, name) for name in functions_in(path)} - shown()
