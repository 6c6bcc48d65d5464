"""The results on disk: one JSON file, written after each measurement, so that a run can resume.

    {"machine": {...},
     "overhead": {column: {"median_ms": .., "eager_ms": ..}},
     "models": {name: {kind: {column: {...}}}}}           kind: cold, warm, steady

A steady row carries the median of eager in the same process: columns that were measured in
different processes are compared through it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def machine() -> Row:
    """What the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "features": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "llvmlite": importlib.metadata.version("llvmlite"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.processor()


class Results:
    """The file's content. `put` writes at once."""

    def __init__(self, path: Path, baseline: Path | None = None) -> None:
        self.path = path
        self.data: Row = {"machine": {}, "overhead": {}, "models": {}}
        for source in (baseline, path):
            if source is not None and source.exists():
                self._merge(json.loads(source.read_text()))
        self.data["machine"] = self.data["machine"] or machine()

    def _merge(self, other: Row) -> None:
        self.data["machine"] = other["machine"]
        self.data["overhead"].update(other["overhead"])
        for model, kinds in other["models"].items():
            for kind, columns in kinds.items():
                self._rows(model, kind).update(columns)

    def _rows(self, model: str, kind: str) -> Row:
        rows: Row = self.data["models"].setdefault(model, {}).setdefault(kind, {})
        return rows

    def has(self, model: str, kind: str, column: str, busy: float | None = None) -> bool:
        """Whether that is measured already, did not fail, and began at a load of at most `busy`."""
        row = self.data["models"].get(model, {}).get(kind, {}).get(column)
        if row is None or "error" in row:
            return False
        return busy is None or row["load"] <= busy

    def put(self, model: str, kind: str, column: str, row: Row) -> None:
        self._rows(model, kind)[column] = row
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.path)
