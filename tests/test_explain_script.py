"""`python -m fusee explain`: the script runs as it would alone; its page holds what it compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusee
from fusee.__main__ import main

SCRIPT = """
import sys
import torch
import beside

print("args", sys.argv, __name__)

@torch.compile(backend="eager")
def first(x):
    y = x.sin()
    if y.sum() > 0:
        y = y * 2
    return y

def made_and_dropped():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()).eval()
    model.compile(backend="eager")
    return model(torch.ones(1, 3))

with torch.no_grad():
    first(torch.ones(3))
    made_and_dropped()
ENDING
"""


@pytest.fixture(autouse=True)
def _stock_torch_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    fusee.uninstall()
    sys.modules.pop("beside", None)


def script(ending: str = "") -> str:
    Path("beside.py").write_text("")
    Path("work.py").write_text(SCRIPT.replace("ENDING", ending))
    return "work.py"


def test_page_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    argv = sys.argv[:]
    assert main(["explain", script(), "--fast", "a", "-o", "page.html"]) == 0
    assert sys.argv == argv
    shown = capsys.readouterr()
    assert shown.out == "args ['work.py', '--fast', 'a'] __main__\n"
    assert "work.py: 3 graphs with" in shown.err and "1 break" in shown.err
    assert "if y.sum() > 0:" in shown.err and shown.err.endswith("page: page.html\n")
    page = Path("page.html").read_text()
    assert "fusee.explain: work.py" in page
    for part in ("x.sin()", "if y.sum() &gt; 0:", "relu", "x is float32[3]"):
        assert part in page, part
    assert "http" not in page and "<script" not in page


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no luck')", 1, "no luck"),
        ("def f(): raise ValueError('odd')\nf()", 1, "ValueError: odd"),
    ],
)
def test_exit_status(
    ending: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", script(ending)]) == status
    shown = capsys.readouterr().err
    assert said in shown and "3 graphs" in shown
    assert "runpy" not in shown and "fusee/debug" not in shown
    assert (f"ended with status {status}" in shown) == (status != 0)
    assert Path("work.explain.html").exists()


def test_arguments_of_the_script_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-o", "page.html", script(), "x", "-o", "theirs"]) == 0
    assert "'x', '-o', 'theirs'" in capsys.readouterr().out
    assert not Path("theirs").exists()


def test_nothing_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.py").write_text("print(1)")
    assert main(["explain", "plain.py"]) == 0
    assert "compiled nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "wrok.py"], "there is no file wrok.py; did you mean work.py?"),
        (["explain", "work.py", "-o", "no/such/page.html"], "cannot be written"),
        (["explain"], "which script?"),
        (["explain", "-o", "page.html"], "which script?"),
        (["explian", "work.py"], "explian"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script()
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out
    assert torch.compile.__module__ == "torch"


def test_a_page_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    text = "import shutil; shutil.rmtree('folder')"
    assert main(["explain", script(text), "-o", "folder/page.html"]) == 1
    assert "there is no page: folder/page.html: No such file" in capsys.readouterr().err


def test_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusee", "explain", script("sys.exit(5)")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.count("\n") < 12 and "\r" not in done.stderr
    assert "page: work.explain.html" in done.stderr
