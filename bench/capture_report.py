"""Tables and a plot of capture: `python -m bench.capture_report RESULTS.json [--page PAGE.md]`.

As bench.report does for the rest; the marks in the page are of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.report import Number, Row, geomean, ratio, update_page

MARKS = ("<!-- capture:begin -->", "<!-- capture:end -->")
NAMES = {"dynamo": "TorchDynamo", "compile": "fusee.compile"}
KINDS = {"cold": "new process, imports included", "warm": "imports and set-up done before"}


def seconds(rows: Row, kind: str, column: str) -> Number:
    return rows.get(kind, {}).get(column, {}).get("cpu_s")


def call_us(rows: Row, column: str) -> Number:
    """A later call: checks, and the way to the graph. The fastest turn: other work only adds."""
    row = rows.get("guards", {}).get(column)
    return None if row is None else row["fastest_ms"] * 1e3


def advantage(rows: Row, kind: str) -> Number:
    return ratio(seconds(rows, kind, "dynamo"), seconds(rows, kind, "compile"))


def as_markdown(data: Row) -> str:
    """The summary, and a table of first calls and one of later calls."""
    models: dict[str, Row] = data["models"]
    lines = ["| TorchDynamo / fusee.compile, geometric mean over models | |", "|---|---|"]
    for kind, title in KINDS.items():
        found = [times for rows in models.values() if (times := advantage(rows, kind)) is not None]
        lines.append(
            f"| capture and guards, {title} ({len(found)} models) | {_times(geomean(found))} |"
        )
    lines += [
        "",
        "Capture and guards of a first call, in seconds of processor time",
        "",
        "| model | " + " | ".join(f"{NAMES[c]}, {k}" for k in KINDS for c in NAMES) + " | graphs |",
        "|---" * 6 + "|",
    ]
    for model, rows in models.items():
        if "cold" in rows or "warm" in rows:
            figures = [_number(seconds(rows, kind, c)) for kind in KINDS for c in NAMES]
            counts = "/".join(
                str(rows.get("cold", {}).get(c, {}).get("graphs", "-")) for c in NAMES
            )
            lines.append(f"| {model} | {' | '.join(figures)} | {counts} |")
    lines += [
        "",
        "A later call whose graph does nothing, in microseconds (fastest of many turns)",
        "",
        "| program | parameters | TorchDynamo | fusee.compile | |",
        "|---|---|---|---|---|",
    ]
    for name, rows in models.items():
        one, other = call_us(rows, "dynamo"), call_us(rows, "compile")
        if one is not None and other is not None:
            count = rows["guards"]["compile"]["parameters"]
            lines.append(f"| {name} | {count} | {one:.1f} | {other:.1f} | {one / other:.1f}x |")
    imported = seconds(models.get("fusee", {}), "import", "compile")
    if imported is not None:
        lines += ["", f"`import fusee` and `fusee.compile` after `import torch`: {imported:.3f} s"]
    loads = [
        row["load"] for rows in models.values() for kind in rows.values() for row in kind.values()
    ]
    about = data["machine"]
    lines += [
        "",
        f"{about['cpu']} ({about['features']}), torch {about['torch']}, Python {about['python']}, "
        f"{about['date']}; load average while measuring {min(loads):.1f} to {max(loads):.1f}",
    ]
    return "\n".join(lines) + "\n"


def _times(value: Number) -> str:
    return "not measured" if value is None else f"{value:.1f}x"


def _number(value: Number) -> str:
    return "-" if value is None else f"{value:.2f}"


def plot(data: Row, path: Path) -> None:
    """Two panels: first calls in seconds, later calls in microseconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models: dict[str, Row] = data["models"]
    firsts = {name: rows for name, rows in models.items() if "cold" in rows}
    laters = {name: rows for name, rows in models.items() if "guards" in rows}
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.5 + 0.4 * max(3, len(firsts))), layout="constrained"
    )
    bars: list[tuple[Any, dict[str, Row], Any, str]] = [
        (left, firsts, lambda r, c: seconds(r, "cold", c), "capture and guards, new process (s)"),
        (right, laters, call_us, "a later call whose graph does nothing (us)"),
    ]
    for axes, rows, figure_of, title in bars:
        for offset, (column, colour) in enumerate(
            {"dynamo": "#b5b5b5", "compile": "#2f6db5"}.items()
        ):
            places = [i + (offset - 0.5) * 0.38 for i in range(len(rows))]
            values = [figure_of(r, column) or 0.0 for r in rows.values()]
            axes.barh(places, values, 0.36, color=colour, label=NAMES[column])
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(data: Row, path: Path) -> None:
    """Table and plot beside the JSON file."""
    path.with_suffix(".md").write_text(as_markdown(data))
    plot(data, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.capture_report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, help="a file to put the tables into, between marks")
    given = parser.parse_args()
    data = json.loads(given.results.read_text())
    write(data, given.results)
    if given.page:
        update_page(as_markdown(data), given.page, MARKS)


if __name__ == "__main__":
    main()
