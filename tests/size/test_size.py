"""The gate on sizes: what is counted, and that what is over its ceiling is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.size import main
from tests.size.measure import Figures, folders, of_text
from tests.size.walk import Steps, steps, walk

MODULE = '''\
"""A docstring."""

import math  # a comment


def _used_once(x):
    """Another
    one."""
    return f"{x:>{math.floor(x)}} and {x}"


def _used_twice(x):
    return _used_once(x)


@property
def _registered(x):
    return _used_twice(_used_twice(x))


class A:
    def _method(self):
        return 1
'''


def test_figures_of_a_module() -> None:
    # Figures are equal on all versions of Python: the f-string is one token.
    tokens = (
        "import math "
        "def _used_once ( x ) : return f'' "
        "def _used_twice ( x ) : return _used_once ( x ) "
        "@ property def _registered ( x ) : return _used_twice ( _used_twice ( x ) ) "
        "class A : def _method ( self ) : return 1"
    ).split()
    assert of_text(MODULE) == Figures(1, len(MODULE.splitlines()), len(tokens), 4, 1)


def test_neither_blank_lines_nor_comments_are_tokens() -> None:
    dense, loose = "x = [1, 2]\n", "# why\n\nx = [\n    1,\n\n    2\n]  # end\n"
    assert of_text(dense).tokens == of_text(loose).tokens == 7
    assert (of_text(dense).lines, of_text(loose).lines) == (1, 7)


def test_folders_count_themselves_and_the_whole(tmp_path: Path) -> None:
    inner = tmp_path / "p" / "q"
    (inner / "__pycache__").mkdir(parents=True)
    (tmp_path / "p" / "a.py").write_text("x = 1\n")
    (inner / "b.py").write_text("y = 1\nz = 2\n")
    (inner / "c.ll").write_text("one\ntwo\nthree\n")
    (inner / "__pycache__" / "b.pyc").write_bytes(b"\n\n\n\n")
    found = folders(tmp_path / "p")
    assert found["p"] == Figures(1, 1, 3)
    assert found["p/q"] == Figures(2, 5, 6)
    assert found["p/**"] == Figures(3, 6, 9)
    assert folders(tmp_path / "p", ".py")["p/**"] == Figures(2, 3, 9)


def test_what_is_over_its_ceiling_is_told() -> None:
    found = {"a": Figures(2, 120, 900, 12, 3), "b": Figures(1, 10, 20, 1, 0)}
    ceilings = main.read(main.write(found))
    assert ceilings["a"] == Figures(2, 150, 1000, 20, 5)
    assert main.problems(found, ceilings) == []
    grown = {**found, "a": Figures(2, 151, 1000, 20, 6)}
    assert main.problems(grown, ceilings) == ["a: 151 lines, at most 150", "a: 6 once, at most 5"]
    assert main.problems({"a": found["a"]}, ceilings) == ["b has a ceiling and is not there"]
    assert main.problems({**found, "c": Figures()}, ceilings) == ["c has no ceiling"]


def test_status_and_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = tmp_path / "tests" / "ceilings.toml"
    (tmp_path / "fusee").mkdir()
    ceilings.parent.mkdir()
    (tmp_path / "fusee" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(main, "ROOT", tmp_path)
    monkeypatch.setattr(main, "CEILINGS", ceilings)
    assert main.main(["--write"]) == 0
    (tmp_path / "fusee" / "a.py").write_text("x = 1\n" * 51)
    assert main.main([]) == 1
    told = capsys.readouterr().out
    assert "size: fusee: 51 lines, at most 50" in told
    assert "raise its ceiling in tests/ceilings.toml" in told


# A graph that is trained is three: the joint one, forward and backward, which go down one by one.
MOST = {False: Steps(climbs=6, returns=12, names=50), True: Steps(climbs=14, returns=35, names=50)}


@pytest.mark.parametrize("training", MOST)
def test_a_graph_seldom_goes_back(training: bool) -> None:
    stays = walk(training=training)
    found = steps(stays)
    assert all(a <= b for a, b in zip(found, MOST[training])), (found, stays)
