"""Every example runs, in a process of its own as a user would run it, and prints something."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def needed(path: Path) -> set[str]:
    """The packages that an example imports, torch and ours apart."""
    tree = ast.parse(path.read_text())
    imported = [x.module or "" for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
    imported += [y.name for x in ast.walk(tree) if isinstance(x, ast.Import) for y in x.names]
    packages = {name.partition(".")[0] for name in imported} - {"torch", "fusee", "__future__"}
    return packages - sys.stdlib_module_names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    for package in needed(path):
        pytest.importorskip(package)
    command = [str(path)]
    if "transformers" in path.read_text():  # it imports torchvision
        start = "import runpy, tests.models.torchvision_setup"
        command = ["-c", f"{start}; runpy.run_path({str(path)!r}, run_name='__main__')"]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_it_needs(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    said = docstring.partition("needs ")[2]
    assert all(name in said for name in needed(path))
    assert bool(needed(path)) == ("pip install 'fusee[" in said)


def test_there_are_examples() -> None:
    assert EXAMPLES
