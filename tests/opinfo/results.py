"""The summary of a full sweep as Markdown: tests/opinfo/RESULTS.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from tests.opinfo.errors import ERROR_DTYPES, KNOWN, UNSTEADY
from tests.opinfo.exclusions import EXCLUDED
from tests.opinfo.gradients import GRADIENT_DTYPES
from tests.opinfo.reasons import REASONS, WHAT_REASONS_ARE, reason
from tests.opinfo.sweep import DTYPES

Row = dict[str, Any]


def markdown(rows: Iterable[Row], backend: str) -> str:
    """Counts per dtype, what failed, what was left to eager and why, what is excluded and why."""
    found = _in_order(rows)
    lines = [
        f"# Torch's op database through the backend {backend!r}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, CPU, one thread. Written by",
        "`scripts/opinfo --write tests/opinfo/RESULTS.md`.",
        "",
        "An op passes with a dtype if every sample that eager accepts does, in-place variants"
        " included: values",
        "(float64 arbitrates), dtype, shape, strides, changed inputs, which tensors share memory.",
        "",
        "| dtype | ops | ops passed | samples passed | samples failed | compiled | left to eager |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += _by_dtype(DTYPES, found)
    lines += _failures_and_reasons(found)
    lines += ["", "## Excluded", "", "| op | reason |", "|---|---|"]
    lines += [f"| {op} | {reason} |" for op, reason in EXCLUDED.items()]
    return "\n".join([*lines, ""])


def gradients_markdown(rows: Iterable[Row], backend: str) -> str:
    """The same of a sweep over gradients: tests/opinfo/GRADIENTS.md."""
    found = _in_order(rows)
    lines = [
        f"# Gradients of torch's op database through the backend {backend!r}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, CPU, one thread. Written by",
        "`scripts/opinfo --gradients --write tests/opinfo/GRADIENTS.md`.",
        "",
        "An op passes with a dtype if every sample that eager differentiates does: the results that"
        " require",
        "grad and what `backward` with fixed random tangents leaves in `grad` of each input"
        " (float64",
        "arbitrates), dtypes, shapes and strides. RESULTS.md says what is excluded.",
        "",
        "| dtype | ops | ops passed | samples passed | samples failed | compiled | left to eager |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += _by_dtype(GRADIENT_DTYPES, found)
    return "\n".join([*lines, *_failures_and_reasons(found), ""])


def sizes_markdown(rows: Iterable[Row], backend: str, learns: bool = False) -> str:
    """The same of a sweep over groups of samples: tests/opinfo/SIZES.md.

    learns   with gradients: tests/opinfo/SIZES_GRADIENTS.md
    """
    found = _in_order(rows)
    of, option, name = (", gradients", " --gradients", "_GRADIENTS") if learns else ("", "", "")
    lines = [
        f"# One version for all sizes{of}: the op database through fusee.compile, {backend!r}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, CPU, one thread. Written by",
        f"`scripts/opinfo --sizes{option} --write tests/opinfo/SIZES{name}.md`.",
        "",
        "A group is samples that differ in the lengths of their axes alone, and the same with axes"
        " twice as long. One",
        "function is compiled for it with `dynamic=True`. An op passes if each call gives what"
        " eager gives: results,",
        "strides, changed inputs, shared memory, or an exception of the same class.",
        "",
        "| dtype | ops | ops passed | groups passed | failed | one version | more, or a break |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [*_by_dtype(DTYPES, found), *_failures(found)]
    lines += ["", "## More than one version, or a graph that ends", "", *WHAT_REASONS_ARE, ""]
    lines.append("| groups | ops | what is told | reason |")
    lines.append("|---|---|---|---|")
    ops: dict[tuple[str, str], set[str]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    for row in found:
        for text, count in row.get("eager", {}).items():
            for told in dict.fromkeys(map(_general, text.split(" / "))):
                key = told, reason(row["op"], told).name
                reasons[key] += count
                ops.setdefault(key, set()).add(row["op"])
    for key, count in sorted(reasons.items(), key=lambda x: -x[1]):
        named = sorted(ops[key])
        shown = ", ".join(named[:12]) + f", {len(named) - 12} more" * (len(named) > 12)
        lines.append(f"| {count} | {shown} | {' | '.join(key)} |")
    lines += ["", "| reason | | stock torch.compile, dynamic=True |", "|---|---|---|"]
    lines += [f"| {x.name} | {x.why} | {x.stock} |" for x in REASONS]
    return "\n".join([*lines, ""])


def _general(reason: str) -> str:
    """Why a group has another version, in a line without the numbers of this one."""
    first = reason.partition(" held with ")[0].partition("\n")[0].partition("; u")[0]
    return re.sub(r"\d+", "N", first)


def _by_dtype(dtypes: Iterable[str], found: list[Row]) -> list[str]:
    rows = {dtype: [row for row in found if row["dtype"] == dtype] for dtype in dtypes}
    return [_counts(dtype, some) for dtype, some in rows.items() if some]


def errors_markdown(rows: Iterable[Row], backend: str) -> str:
    """The same of a sweep over what eager refuses: tests/opinfo/ERRORS.md."""
    found = _in_order(rows)
    lines = [
        f"# Errors, empty and single elements: the op database through fusee.compile, {backend!r}",
        "",
        f"torch {torch.__version__.partition('+')[0]}, CPU, one thread. Written by",
        "`scripts/opinfo --errors --write tests/opinfo/ERRORS.md`.",
        "",
        "An op passes if each of its inputs that must raise, and its first two samples cut down to"
        " no element",
        "along the first axis, along the last, and to one element, give what eager gives: an"
        " exception of the",
        "same class, or equal results and changed inputs, in two calls. RESULTS.md says what is"
        " excluded.",
        "",
        "| dtype | ops | ops passed | inputs alike | unlike | of them results | exceptions |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += _by_dtype(ERROR_DTYPES, found)
    lines += ["", "## Differences", ""]
    failed = [row for row in found if row["failures"]]
    lines += [
        f"- {r['op']} {r['dtype']}, {len(r['failures'])} inputs: {_short(r['failures'][0])}"
        for r in failed
    ] or ["None."]
    lines += ["", *(f"Why {name} differs: {why}." for name, why in KNOWN.items())]
    lines += ["", "## Left out", "", "| op | reason |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in UNSTEADY.items()]
    lines += ["", "## Exceptions, by class", "", "| inputs | class |", "|---|---|"]
    classes: Counter[str] = Counter()
    for row in found:
        classes.update(row.get("eager", {}))
    lines += [f"| {count} | {name} |" for name, count in classes.most_common()]
    return "\n".join([*lines, ""])


def _in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["op"], row["dtype"]))


def _failures(found: list[Row]) -> list[str]:
    failed = [row for row in found if row["failures"]]
    rows = [f"- {r['op']} {r['dtype']}: {_short(r['failures'][0])}" for r in failed]
    return ["", "## Failures", "", *(rows or ["None."])]


def _failures_and_reasons(found: list[Row]) -> list[str]:
    lines = _failures(found)
    lines += ["", "## Left to eager, by reason", "", "| samples | reason |", "|---|---|"]
    reasons: Counter[str] = Counter()
    for row in found:
        reasons.update(row.get("eager", {}))
    lines += [f"| {count} | {reason} |" for reason, count in reasons.most_common()]
    return lines


def _counts(dtype: str, rows: list[Row]) -> str:
    passed = sum(row["passed"] for row in rows)
    eager = sum(sum(row.get("eager", {}).values()) for row in rows)
    good = sum(not row["failures"] for row in rows)
    failed = sum(len(row["failures"]) for row in rows)
    return f"| {dtype} | {len(rows)} | {good} | {passed} | {failed} | {passed - eager} | {eager} |"


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:200]
