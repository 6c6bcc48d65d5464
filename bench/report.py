"""Tables and a plot from results: `python -m bench.report RESULTS.json [--page PAGE.md]`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.columns import COLUMNS, TITLES

Row = dict[str, Any]
Number = float | None
MARKS = ("<!-- bench:begin -->", "<!-- bench:end -->")

# A measurement that begins at a higher load average shares its cores with something else. The
# benchmark's own earlier measurements keep the average near the number of cores.
BUSY = 3.0


def geomean(values: Iterable[Number]) -> Number:
    logs = [math.log(value) for value in values if value is not None and value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def cold(rows: Row, column: str, name: str) -> Number:
    """A figure of a model's cold measurement, None where there is none."""
    value = rows.get("cold", {}).get(column, {}).get(name)
    return None if value is None else float(value)


def steady(rows: Row, column: str) -> Number:
    """Eager's time over the column's, both of one process."""
    row = rows.get("steady", {}).get(column)
    return None if row is None or "error" in row else row["eager_ms"] / row["median_ms"]


def over_eager(rows: Row, column: str) -> Number:
    """Bytes that compiling took at its peak over what eager had taken."""
    peak, eager = cold(rows, column, "peak_bytes"), cold(rows, column, "eager_bytes")
    return None if peak is None or eager is None else max(1.0, peak - eager)


def ratio(one: Number, other: Number) -> Number:
    return None if one is None or not other else one / other


def summary(data: Row) -> list[tuple[str, Number]]:
    """The figures that the project promises, as geometric means over all measured models."""
    models = list(data["models"].values())

    def mean(figure: Callable[[Row], Number]) -> Number:
        return geomean(map(figure, models))

    eager = [value for value in (steady(rows, "fusee") for rows in models) if value is not None]
    return [
        (
            "first call, backend's part: TorchInductor / Fusee",
            mean(lambda r: ratio(cold(r, "inductor", "backend_s"), cold(r, "fusee", "backend_s"))),
        ),
        (
            "first call, whole: TorchInductor / Fusee",
            mean(
                lambda r: ratio(
                    cold(r, "inductor", "first_call_s"), cold(r, "fusee", "first_call_s")
                )
            ),
        ),
        (
            "first call, whole: TorchInductor / fusee.compile",
            mean(
                lambda r: ratio(
                    cold(r, "inductor", "first_call_s"), cold(r, "compile", "first_call_s")
                )
            ),
        ),
        (
            "steady state: TorchInductor / Fusee",
            mean(lambda r: ratio(steady(r, "fusee"), steady(r, "inductor"))),
        ),
        (
            "steady state: TorchInductor with freezing / Fusee",
            mean(lambda r: ratio(steady(r, "fusee"), steady(r, "freezing"))),
        ),
        ("steady state: eager / Fusee", geomean(eager)),
        ("steady state, worst model: eager / Fusee", min(eager, default=None)),
        (
            "peak memory while compiling, over eager: TorchInductor / Fusee",
            mean(lambda r: ratio(over_eager(r, "inductor"), over_eager(r, "fusee"))),
        ),
    ]


def as_markdown(data: Row) -> str:
    """The summary and one table per kind of measurement; a dash where nothing was measured."""
    parts = ["| geometric mean over models | |", "|---|---|"]
    parts += [f"| {name} | {_times(value)} |" for name, value in summary(data)]
    parts += ["", "First call with empty caches, in seconds (of it the backend's part)", ""]
    parts += _table(data, _cold_cell)
    parts += ["", "Steady state: times as fast as eager (milliseconds per call)", ""]
    parts += _table(data, _steady_cell)
    parts += ["", "Peak memory while compiling, over eager, in MiB", ""]
    parts += _table(data, _memory_cell)
    if data["overhead"]:
        cells = [f"{TITLES[c]} {r['median_ms'] * 1e3:.0f}" for c, r in data["overhead"].items()]
        parts += ["", f"A call of ten tiny kernels, in microseconds: {', '.join(cells)}"]
    wrong = [
        f"{model}, {TITLES[column]}: {row['agrees']}"
        for model, rows in data["models"].items()
        for column, row in rows.get("cold", {}).items()
        if row.get("agrees", "yes") != "yes"
    ]
    if wrong:
        parts += ["", "Results that differ from eager's:", "", *(f"- {line}" for line in wrong)]
    loads = [row.get("load", 0.0) for row in _rows_of(data)]
    if max(loads, default=0.0) > BUSY:
        busy = sum(load > BUSY for load in loads)
        parts += ["", f"**Not to be quoted**: {busy} of {len(loads)} measurements began on a busy"]
        parts[-1] += f" machine (load up to {max(loads):.1f}); `--busy {BUSY}` repeats them."
    about = data["machine"]
    parts += [
        "",
        f"{about['cpu']} ({about['features']}), {about['threads']} threads, "
        f"torch {about['torch']}, Python {about['python']}, {about['date']}",
    ]
    return "\n".join(parts) + "\n"


def _rows_of(data: Row) -> list[Row]:
    kinds = [rows[kind] for rows in data["models"].values() for kind in rows]
    return [row for columns in kinds for row in columns.values()]


def _table(data: Row, cell: Callable[[Row, str], str]) -> list[str]:
    columns = [
        column
        for column in COLUMNS
        if any(column in rows.get("cold", {}) for rows in data["models"].values())
        or any(column in rows.get("steady", {}) for rows in data["models"].values())
    ]
    lines = ["| model | " + " | ".join(TITLES[c] for c in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for model, rows in data["models"].items():
        lines.append(f"| {model} | " + " | ".join(cell(rows, c) for c in columns) + " |")
    return lines


def _cold_cell(rows: Row, column: str) -> str:
    error = rows.get("cold", {}).get(column, {}).get("error")
    if error:
        return "failed"
    whole, part = cold(rows, column, "first_call_s"), cold(rows, column, "backend_s")
    if whole is None:
        return "-"
    return f"{whole:.2f}" if column == "eager" else f"{whole:.1f} ({part:.2f})"


def _steady_cell(rows: Row, column: str) -> str:
    speed = steady(rows, column)
    if speed is None:
        return "-"
    return f"{speed:.2f} ({rows['steady'][column]['median_ms']:.1f})"


def _memory_cell(rows: Row, column: str) -> str:
    over = over_eager(rows, column)
    return "-" if over is None or column == "eager" else f"{over / 2**20:.0f}"


def _times(value: Number) -> str:
    return "not measured" if value is None else f"{value:.2f}x"


COLOURS = {"inductor": "#d98c3f", "freezing": "#b5b5b5", "fusee": "#8fb4dd", "compile": "#2f6db5"}


def plot(data: Row, path: Path) -> None:
    """Two panels: first call in seconds, steady state over eager."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = data["models"]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1 + 0.42 * max(3, len(models))), layout="constrained"
    )
    panels: list[tuple[Any, str, Callable[[Row, str], Number]]] = [
        (left, "first call, empty caches (s)", lambda r, c: cold(r, c, "first_call_s")),
        (right, "steady state, times as fast as eager", steady),
    ]
    shown = [c for c in COLOURS if any(c in rows.get("cold", {}) for rows in models.values())]
    for axes, title, figure_of in panels:
        for offset, column in enumerate(shown):
            values = [figure_of(rows, column) or 0.0 for rows in models.values()]
            places = [i + ((len(shown) - 1) / 2 - offset) * 0.21 for i in range(len(models))]
            axes.barh(places, values, 0.2, color=COLOURS[column], label=TITLES[column])
        axes.set_yticks(range(len(models)), list(models))
        axes.invert_yaxis()
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_xscale("log")
    left.set_xlim(left=0.1)
    right.axvline(1.0, color="black", linewidth=0.8)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(data: Row, path: Path) -> None:
    """Table and plot beside the JSON file."""
    path.with_suffix(".md").write_text(as_markdown(data))
    plot(data, path.with_suffix(".png"))


def update_page(tables: str, page: Path, marks: tuple[str, str] = MARKS) -> None:
    """Put the tables between two marks of a page."""
    text = page.read_text()
    begin, end = (text.index(mark) for mark in marks)
    page.write_text(f"{text[:begin]}{marks[0]}\n{tables}{text[end:]}")


def written_again(
    name: str,
    says: str | None,
    write: Callable[[Row, Path, Path | None], None],
    as_markdown: Callable[[Row], str],
) -> None:
    """The command `name`: tables and plots of results that are there, without measuring."""
    parser = argparse.ArgumentParser(prog=name, description=says)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    data = json.loads(given.results.read_text())
    write(data, given.results, given.page)
    print(as_markdown(data))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.report", description=(__doc__ or "").strip())
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, help="a file to put the tables into, between marks")
    given = parser.parse_args()
    data = json.loads(given.results.read_text())
    write(data, given.results)
    if given.page:
        update_page(as_markdown(data), given.page)


if __name__ == "__main__":
    main()
