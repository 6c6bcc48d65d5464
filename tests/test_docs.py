"""Every fenced python block of the README and docs runs; every file that they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, source) of each fenced python block."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [(text[: m.start(1)].count("\n"), m.group(1)) for m in found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_snippets_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    # Blocks of a page build on one another. Lines keep their numbers, for tracebacks.
    names: dict[str, Any] = {"__name__": "snippet"}
    for line, source in blocks(page):
        exec(compile("\n" * line + source, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"`((?:fusee|tests|bench|docs|scripts)/[\w./]+)`", text)
    links = re.findall(r"\]\(([\w./-]+\.md)", text)
    missing = [name for name in paths if not (ROOT / name).exists()]
    missing += [name for name in links if not (page.parent / name).exists()]
    assert not missing


def test_readme_is_a_front_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decision_is_one_short_page(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 40
    parts = re.findall(r"^\*\*(What|Why|Price|Look again)\b", text, flags=re.MULTILINE)
    assert parts == ["What", "Why", "Price", "Look again"]
    assert f"(decisions/{page.name})" in (ROOT / "docs/decisions.md").read_text()


def test_the_walks_of_architecture_name_what_is_there() -> None:
    """Each `file.py: names` of the walks is in that file."""
    text = (ROOT / "docs/architecture.md").read_text()
    walks = re.findall(r"`(fusee/[\w/]+\.py): ([\w.]+)`((?:, `[\w.]+`)*)", text)
    assert len(walks) > 30
    for file, first, others in walks:
        source = (ROOT / file).read_text()
        for name in (first, *re.findall(r"`([\w.]+)`", others)):
            last = name.rpartition(".")[2]
            found = re.search(rf"^ *(?:def|class) {last}\b", source, flags=re.MULTILINE)
            assert found, f"{file}: {name}"
