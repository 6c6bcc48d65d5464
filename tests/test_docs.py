"""Every fenced python block of the README and docs runs; every file that they name exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fusee import config

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
    for name, section in re.findall(r"\]\(([\w./-]*?)#([\w-]+)\)", text):
        if (page.parent / name).suffix == ".md" or not name:
            missing += [section] * (section not in sections(page.parent / name if name else page))
    assert not missing


def sections(page: Path) -> set[str]:
    """What links to a page may name: its headings, as GitHub spells them, and its anchors."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    spelled = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    return spelled | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_functions_and_variables_exist(page: Path) -> None:
    text, missing = page.read_text(), []
    for name in set(re.findall(r"`(fusee(?:\.[A-Za-z_]\w*)+)\b(?!\.py)", text)):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    known = {row.env for table in config.TABLES for row in config.knobs(table)}
    used = set(re.findall(r"\bFUSEE_[A-Z_]+\b", text))
    assert not missing + sorted(used - known - set(config.SCRIPT_VARIABLES))


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
