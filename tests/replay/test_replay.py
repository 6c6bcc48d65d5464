"""Process replay notices a change in each stage and nothing else; and today nothing has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusee import targets
from fusee.aten.weights import run_passes
from fusee.backends import native
from fusee.codegen import emit_host
from fusee.codegen.llvm import emit_kernel
from fusee.loops.fusion import fuse
from fusee.targets import cpu
from tests.aten.harness import one_node
from tests.replay import main
from tests.replay.texts import STAGES, Recorder, cases, fixed, versions

# What CI replays; the others are for whoever changes the compiler.
SAMPLE = ("zoo/bert", "train/bert", "zoo/resnet18", "train/vgg11")
OPERATORS = 12


def _program(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) @ x.t()


def _hashes() -> main.Hashes:
    recorder = Recorder()
    x = torch.randn(5, 7)
    with fixed(), recorder.listening():
        recorder(one_node(_program, [x]), [x])
    assert all(recorder.texts().values())
    return main.hashes(recorder.texts())


def _one_more_call(aten: Any, options: Any, passes: Any) -> Any:
    (node,) = aten.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    with aten.graph.inserting_after(node):
        negated = aten.graph.call_function(torch.ops.aten.neg.default, (node,))
    negated.meta = dict(node.meta)
    node.replace_all_uses_with(negated, delete_user_cb=lambda user: user is not negated)
    return run_passes(aten, options, passes)


def _not_merged(graph: Any, merge: bool) -> Any:
    return fuse(graph, merge=False)


def _with_comment(kernel: Any, machine: Any) -> Any:
    code = emit_kernel(kernel, machine)
    return code._replace(text=code.text + "; a comment\n")


def _with_line(*given: Any) -> Any:
    host = emit_host(*given)
    return dataclasses.replace(host, source=host.source + "# a comment\n")


# stage -> (module and name of what changes, how, whether later stages show it too)
CHANGES: dict[str, tuple[ModuleType, str, Callable[..., Any], bool]] = {
    "aten": (native, "run_passes", _one_more_call, True),
    "loops": (native, "fuse", _not_merged, True),
    "llvm": (cpu, "emit_kernel", _with_comment, False),
    "host": (targets, "emit_host", _with_line, False),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_change_is_noticed_in_its_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _hashes()
    assert main.differing(before, _hashes()) == []
    where, name, change, goes_on = CHANGES[stage]
    monkeypatch.setattr(where, name, change)
    differing = main.differing(before, _hashes())
    assert differing[0] == stage
    assert goes_on == (len(differing) > 1)


def test_what_depends_on_the_machine_is_fixed(environment: pytest.MonkeyPatch) -> None:
    before = _hashes()
    environment.setenv("FUSEE_CPU", "sse")
    environment.setenv("FUSEE_CHECK", "0")
    torch.set_num_threads(1)
    try:
        assert _hashes() == before
    finally:
        torch.set_num_threads(2)


def test_hashes_are_read_as_they_are_written() -> None:
    rows = {"zoo/a": ("1", "2", "3", "4"), "op/b": ("5", "6", "7", "8")}
    text = main.write("python 3.11, torch 2.13", rows)
    assert main.read(text) == ("python 3.11, torch 2.13", rows)
    assert "\nzoo/a 1 2 3 4\nop/b 5 6 7 8\n" in text


def test_cases_are_chosen_by_name_or_pattern() -> None:
    names = ["zoo/bert", "zoo/t5", "train/bert"]
    assert main.selected(["zoo/*"], names) == ["zoo/bert", "zoo/t5"]
    assert main.selected([], names) == names
    with pytest.raises(SystemExit, match="no case is named zoo/berd; near it: zoo/bert"):
        main.selected(["zoo/berd"], names)


def test_what_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {stage: stage for stage in STAGES}
    monkeypatch.setattr(main, "texts", lambda name: now)
    monkeypatch.setattr(main, "cases", lambda: ["zoo/a", "zoo/b"])
    monkeypatch.setattr(main, "HASHES", tmp_path / "HASHES.txt")
    assert main.main(["--write"]) == 0
    assert main.main([]) == 0
    now["llvm"] = "other"
    assert main.main(["zoo/b"]) == 1
    assert "zoo/b: llvm\nreplay: 1 of 1 cases differ" in capsys.readouterr().out
    assert main.main(["--write", "zoo/b"]) == 0  # the other case's hashes stay
    assert main.main(["zoo/b"]) == 0 and main.main(["zoo/a"]) == 1
    monkeypatch.setattr(main, "versions", lambda: "python 4.0")
    assert main.main([]) == 0
    assert "replay: skipped; hashes are of " in capsys.readouterr().out


def test_texts_of_a_revision_are_shown_beside_todays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "OUT", main.ROOT / "out" / tmp_path.name)
    monkeypatch.setattr(targets, "emit_host", _with_line)
    case = next(case for case in cases() if case.startswith("op/"))
    shown = main.show(case, "HEAD")
    assert "+# a comment" in shown
    assert "--- HEAD/host\n+++ now/host" in shown


@pytest.mark.filterwarnings("ignore")  # what is captured warns
def test_nothing_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    valid, known = main.read(main.HASHES.read_text())
    if valid != versions():
        pytest.skip(f"hashes are of {valid}")
    assert list(known) == cases(), "run scripts/replay --write"
    operators = [case for case in cases() if case.startswith("op/")][:OPERATORS]
    _, differ = main.compare([*SAMPLE, *operators], known)
    assert not differ, capsys.readouterr().out
