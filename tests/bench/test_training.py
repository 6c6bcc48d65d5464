"""The benchmark of training steps: what it measures, and the tables made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import demo_training, training, training_report


def test_a_step_has_gradients_and_takes_memory() -> None:
    step = training.Step("bert", "test", "eager")
    assert step().isfinite()
    found = training.gradients(step.module)
    assert found.norm() > 0 and found.numel() == sum(p.numel() for p in step.module.parameters())
    held = sum(p.grad.nbytes for p in step.module.parameters() if p.grad is not None)
    assert training.memory("bert", "eager", "test")["step_bytes"] > held


def test_eager_is_at_no_distance_from_itself() -> None:
    row = training.cold("resnet18", "eager", "test")
    assert row["loss_off"] == row["gradients_off"] == 0.0


def test_loss_of_logits_is_cross_entropy() -> None:
    logits = torch.zeros(3, 100)
    assert torch.allclose(training.loss_of((logits,)), torch.tensor(100.0).log())
    assert training.loss_of({"hidden": torch.full((2, 3, 64), 2.0)}) == 4.0


def test_tables_and_plot(tmp_path: Path) -> None:
    times = {"eager": 30.0, "inductor": 20.0, "compile": 10.0}
    steady = {column: {"median_ms": value} for column, value in times.items()}
    machine = dict.fromkeys(("cpu", "features", "threads", "torch", "python", "date"), "")
    data = {"machine": machine, "models": {"bert": {"steady": steady}}}
    figures = dict(training_report.summary(data))
    assert figures["steady state: eager / fusee.compile"] == pytest.approx(3.0)
    assert figures["steady state: TorchInductor / fusee.compile"] == pytest.approx(2.0)
    training_report.write(data, tmp_path / "training.json")
    assert "| bert | 30.0 | 20.0 | 10.0 |" in (tmp_path / "training.md").read_text()
    assert (tmp_path / "training.png").stat().st_size > 1000


def test_the_example_of_the_demo_trains() -> None:
    row = demo_training.measured("test")
    eager, ours = row["losses"]
    # batch norm over two values amplifies rounding: later losses differ from float64's in eager too
    assert ours[0] == pytest.approx(eager[0], rel=0.05)
    assert ours[-1] < 0.5 * ours[0]
