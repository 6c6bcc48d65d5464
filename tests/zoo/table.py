"""What the zoo's rows say: tests/zoo/RESULTS.md, and the reasons by how many models they touch."""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.zoo.judge import STAGES

__all__ = ["markdown", "reasons"]

Row = dict[str, Any]
Rows = Mapping[tuple[str, str], Row]


REASONS = Path(__file__).parent / "REASONS"
_OURS = ("built", "inference", "training")


def _known_reasons() -> dict[tuple[str, str], str]:
    """Why a model is not right or not built, as far as somebody has looked: lines of REASONS."""
    found = {}
    for line in REASONS.read_text().splitlines():
        models, _, why = line.partition(": ")
        family, *names = models.split()
        found.update({(family, name): why for name in names})
    return found


def markdown(rows: Rows, backend: str) -> str:
    known = _known_reasons()
    lines = [
        "# Models of other libraries, compiled beside eager and torch.compile",
        "",
        f"torch {torch.__version__.partition('+')[0]}{_versions()}, CPU, one thread. Written by",
        f"`scripts/zoo --backend {backend} --write tests/zoo/RESULTS.md`.",
        "",
        "Each model type from a small configuration of random weights, called as its documentation"
        " calls it.",
        "Right: two calls give eager's results, gradients and buffers (float64 arbitrates, see"
        " tests/compare.py).",
        "~: some results are as near only as eager's own are with channels that lie last,"
        " or on inputs that differ in the last place (`is_within` there): a ReLU or a variance"
        " of two values makes more of rounding.",
        "as told: the library asks `is_compiling()`; eager that is told yes gives our results.",
        'Graphs: of the first call, ours / those of `torch.compile(backend="eager")`. First call:'
        " seconds, one core.",
        "",
        *_totals(rows),
        "",
        "| family | model | built | right | graphs | first call | training right | graphs |"
        " first call |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(*key, row) for key, row in sorted(rows.items())]
    lines += ["", "## What is not right, not one graph, or not built", ""]
    for key, row in sorted(rows.items()):
        lines += [f"- {key[0]} {key[1]}: {text}" for text in _exceptions(row)]
        if key in known and any("error" in row.get(stage, {}) for stage in _OURS):
            lines.append(f"- {key[0]} {key[1]}: **why**: {known[key]}")
    return "\n".join([*lines, ""])


def _versions() -> str:
    found = []
    for name in ("transformers", "timm", "torchvision", "diffusers"):
        try:
            found.append(f", {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "".join(found)


def _totals(rows: Rows) -> list[str]:
    lines = [
        "| | models | right | of these ~ | as told | wholly eager |"
        " one graph where torch.compile has one | as few graphs as torch.compile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage in ("inference", "training"):
        for family in dict.fromkeys(family for family, _ in rows):
            some = [row for (f, _), row in rows.items() if f == family and _ran(row, stage)]
            if not some:
                continue
            pairs = [(r[stage], r[f"stock {stage}"]) for r in some if f"stock {stage}" in r]
            ones = [(a, b) for a, b in pairs if b.get("graphs") == 1]
            alike = sum(a.get("graphs") == 1 for a, _ in ones)
            fewer = sum(1 <= a.get("graphs", 0) <= b.get("graphs", 0) for a, b in pairs)
            right = sum(row[stage]["right"] is True for row in some)
            near = sum(row[stage].get("near", 0) > 0 for row in some)
            told = sum(row[stage].get("asks", False) for row in some)
            eager = sum(row[stage].get("graphs") == 0 for row in some)
            lines.append(
                f"| {family}, {stage} | {len(some)} | {right} | {near} | {told} | {eager} |"
                f" {alike} of {len(ones)} | {fewer} of {len(pairs)} |"
            )
    return lines


def _ran(row: Row, stage: str) -> bool:
    """Whether eager ran it, so that something can be said."""
    return stage in row and row[stage]["right"] is not None


def _line(family: str, name: str, row: Row) -> str:
    built = row.get("built", {})
    text = "no" if "error" in built else _cell(built.get("about", ""))
    cells = []
    for stage in ("inference", "training"):
        found, stock = row.get(stage, {}), row.get(f"stock {stage}", {})
        right = {True: "yes", False: "**no**", None: "-"}[found.get("right")]
        if found.get("near"):
            right = "yes ~"
        elif found.get("asks"):
            right = "as told"
        elif found.get("right") is False and stock.get("right") is False:
            right = "no, nor is torch.compile"
        both = f"{found.get('graphs', '-')} / {stock.get('graphs', '-')}"
        cells += [right, both, str(found.get("first_s", "-"))]
    return f"| {family} | {name} | {text} | {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _exceptions(row: Row) -> Iterable[str]:
    for stage in ("built", *STAGES):
        found = row.get(stage, {})
        if "error" in found:
            yield f"{stage}: {_cell(found['error'])[:300]}"
    for stage in ("inference", "training"):
        found = row.get(stage, {})
        for text, count in {**found.get("eager", {}), **found.get("breaks", {})}.items():
            kind = "runs eagerly" if text in found.get("eager", {}) else "ends"
            yield f"{stage}: {kind} {count}x: {_cell(text)[:300]}"


def reasons(rows: Rows) -> str:
    """Why functions ran eagerly and graphs ended: how many models, where, and which."""
    lines = []
    for stage in ("inference", "training"):
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (_, name), row in rows.items():
            part = row.get(stage, {})
            stock = row.get(f"stock {stage}", {})
            label = f"{name}[{part.get('graphs')}/{stock.get('graphs', '?')}]"
            for kind in ("eager", "breaks"):
                for text in {_general(text): 0 for text in part.get(kind, {})}:
                    found[kind, text].append(label)
            if part.get("error") and part["right"] is False:
                found["WRONG", _general(part["error"])[:160]].append(label)
        lines += [f"==== {stage}: {len(rows)} models", ""]
        for (kind, text), models in sorted(found.items(), key=lambda x: (-len(x[1]), x[0])):
            lines += [f"{len(models):4} {kind:6} {text}", f"            {' '.join(models[:12])}"]
        lines.append("")
    return "\n".join(lines)


def _general(text: str) -> str:
    """A reason without what differs between models."""
    text = re.sub(r" \(in [^()]*\)$", "", text)
    text = re.sub(r" \((?:transformers|timm|torch|torchvision|diffusers)/[^()]*\)$", "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)
