"""What the zoo's rows say: tests/zoo/RESULTS.md, and the reasons by how many models they touch."""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tests.zoo.judge import STAGES

__all__ = ["markdown", "reasons"]

Row = dict[str, Any]
Rows = Mapping[tuple[str, str], Row]


def markdown(rows: Rows, backend: str) -> str:
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
        "| | models | right | wholly eager | one graph where torch.compile has one |"
        " as few graphs as torch.compile |",
        "|---|---|---|---|---|---|",
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
            eager = sum(row[stage].get("graphs") == 0 for row in some)
            lines.append(
                f"| {family}, {stage} | {len(some)} | {right} | {eager} | {alike} of {len(ones)} |"
                f" {fewer} of {len(pairs)} |"
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
        if found.get("right") is False and stock.get("right") is False:
            right = "no, nor is torch.compile"  # a library that asks whether it is compiled, say
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
