"""Tables and a plot of small programs: `python -m bench.ops_report RESULTS.json --page PAGE.md`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.columns import TITLES
from bench.ops_cases import cases
from bench.report import Row, geomean, update_page, written_again

MARKS = ("<!-- ops:begin -->", "<!-- ops:end -->")
SLOWER = (0.97, 0.90, 0.70)  # of eager's speed: slower by 3, 10, 30 %
LOSERS = 60  # listed


def ratio_of(row: Row) -> float:
    """Eager's time by the column's: the median of what was measured."""
    return statistics.median(row["ratios"])


def ratios(data: Row, kind: str, column: str) -> dict[str, float]:
    """By case, those that failed left out."""
    rows = {name: kinds.get(kind, {}).get(column, {}) for name, kinds in data["models"].items()}
    return {name: ratio_of(row) for name, row in rows.items() if "ratios" in row}


def measured(data: Row) -> Iterator[tuple[str, str]]:
    """(kind, column) of what is there."""
    kinds = sorted(
        {k for row in data["models"].values() for k in row}, key=lambda k: int(k.split()[0])
    )
    for kind in kinds:
        for column in TITLES:
            if ratios(data, kind, column):
                yield kind, column


def _share(found: list[float], bound: float) -> str:
    slow = sum(r < bound for r in found)
    return f"{100 * slow / max(len(found), 1):.1f} % ({slow})"


def as_markdown(data: Row) -> str:
    """Shares slower than eager, families, and the losers."""
    parts = [
        "| | cases | slower by 3 % | 10 % | 30 % | geometric mean over eager |",
        "|---" * 6 + "|",
    ]
    kinds = list(measured(data))
    for kind, column in kinds:
        found = list(ratios(data, kind, column).values())
        shares = " | ".join(_share(found, bound) for bound in SLOWER)
        parts.append(
            f"| {TITLES[column]}, {kind} | {len(found)} | {shares} | {geomean(found):.2f}x |"
        )
    for kind in dict.fromkeys(kind for kind, _ in kinds):
        both = [ratios(data, kind, column) for column in ("compile", "inductor")]
        shared = [both[0][name] / both[1][name] for name in both[0] if name in both[1]]
        if shared:
            behind = sum(r < 0.9 for r in shared)
            parts += ["", f"Against TorchInductor, {kind}: {geomean(shared):.2f}x over "
                      f"{len(shared)} cases, {behind} more than 10 % behind it"]  # fmt: skip
    family_of = {case.name: case.family for case in cases()}
    ours = [kind for kind, column in kinds if column == "compile"]
    for kind in ours:
        parts += [
            "",
            f"By family, {kind}",
            "",
            "| family | cases | slower by 3 % | 10 % | 30 % | mean |",
        ]
        parts.append("|---" * 6 + "|")
        families: dict[str, list[float]] = {}
        for name, ratio in ratios(data, kind, "compile").items():
            families.setdefault(family_of.get(name, "no longer a case"), []).append(ratio)
        for family, found in families.items():
            counts = " | ".join(str(sum(r < bound for r in found)) for bound in SLOWER)
            parts.append(f"| {family} | {len(found)} | {counts} | {geomean(found):.2f}x |")
    for kind in ours:
        parts += ["", *_losers(data, kind)]
    failed = [
        f"- {name}, {TITLES[column]}: {row.get('error') or row['agrees']}"
        for name, kinds_ in data["models"].items() for rows in kinds_.values()
        for column, row in rows.items() if "error" in row or row.get("agrees") != "yes"
    ]  # fmt: skip
    if failed:
        parts += [
            "",
            "Failed, or further from eager than a thousandth:",
            "",
            *dict.fromkeys(failed),
        ]
    about = data["machine"]
    parts += ["", f"{about['cpu']} ({about['features']}), torch {about['torch']}, "
              f"Python {about['python']}, {about['date']}"]  # fmt: skip
    return "\n".join(parts) + "\n"


def _losers(data: Row, kind: str) -> Iterator[str]:
    found = {name: r for name, r in ratios(data, kind, "compile").items() if r < SLOWER[0]}
    worst = sorted(found, key=found.__getitem__)
    yield f"Slower than eager, {kind}: {len(worst)}" + (
        f", the first {LOSERS}" if len(worst) > LOSERS else ""
    )
    yield from ("", "| case | eager, us | Fusee, us | |", "|---|---|---|---|")
    for name in worst[:LOSERS]:
        row = data["models"][name][kind]["compile"]
        shown = name.replace("|", "\\|")
        yield f"| `{shown}` | {row['eager_us']:.0f} | {row['us']:.0f} | {found[name]:.2f} |"


def plot(data: Row, path: Path) -> None:
    """Each column's ratios in rising order, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(9, 4))
    for kind, column in measured(data):
        found = sorted(ratios(data, kind, column).values())
        places = [100 * k / len(found) for k in range(len(found))]
        axes.plot(places, [math.log2(r) for r in found], label=f"{TITLES[column]}, {kind}")
    axes.axhline(0.0, color="grey", linewidth=0.8)
    ticks = range(-4, 6)
    axes.set_yticks(list(ticks), [f"{2.0**t:g}x" for t in ticks])
    axes.set_ylim(-3, 5)
    axes.set_xlabel("share of the cases, %")
    axes.set_ylabel("times as fast as eager")
    axes.legend()
    chart.tight_layout()
    chart.savefig(path, dpi=110)
    pyplot.close(chart)


def write(data: Row, path: Path, page: Path | None = None) -> None:
    """Tables and plot beside the results, and the tables between the marks of a page."""
    made = as_markdown(data)
    path.with_suffix(".md").write_text(made)
    plot(data, path.with_suffix(".png"))
    if page is not None:
        update_page(made, page, MARKS)


if __name__ == "__main__":
    written_again("bench.ops_report", __doc__, write, as_markdown)
