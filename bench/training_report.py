"""Tables and a plot of training steps: `python -m bench.training_report RESULTS.json`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from bench.columns import TITLES
from bench.report import Number, Row, geomean, ratio, update_page

MARKS = ("<!-- training:begin -->", "<!-- training:end -->")


def figure(rows: Row, kind: str, column: str, name: str) -> Number:
    """A figure of one model, None where there is none."""
    value = rows.get(kind, {}).get(column, {}).get(name)
    return None if value is None else float(value)


def summary(data: Row) -> list[tuple[str, Number]]:
    """Geometric means over the models."""
    models = list(data["models"].values())

    def mean(kind: str, name: str, one: str, other: str) -> Number:
        return geomean(
            ratio(figure(r, kind, one, name), figure(r, kind, other, name)) for r in models
        )

    def step_bytes(rows: Row, column: str) -> Number:
        return figure(rows, "memory", column, "step_bytes")

    ours = [ratio(step_bytes(r, "compile"), step_bytes(r, "eager")) for r in models]
    return [
        (
            "cold first step: TorchInductor / Fusee",
            mean("cold", "first_step_s", "inductor", "fusee"),
        ),
        (
            "cold first step: TorchInductor / fusee.compile",
            mean("cold", "first_step_s", "inductor", "compile"),
        ),
        ("steady state: eager / fusee.compile", mean("steady", "median_ms", "eager", "compile")),
        (
            "steady state: TorchInductor / fusee.compile",
            mean("steady", "median_ms", "inductor", "compile"),
        ),
        (
            "peak memory of a step: TorchInductor / fusee.compile",
            mean("memory", "step_bytes", "inductor", "compile"),
        ),
        (
            "peak memory of a step, worst model: fusee.compile / eager",
            max((x for x in ours if x is not None), default=None),
        ),
    ]


def as_markdown(data: Row) -> str:
    """The summary and one table; a dash where nothing was measured."""
    parts = ["| geometric mean over models | |", "|---|---|"]
    parts += [
        f"| {name} | {'-' if value is None else f'{value:.2f}x'} |" for name, value in summary(data)
    ]
    for title, kind, name, show in _TABLES:
        columns = [c for c in TITLES if any(c in r.get(kind, {}) for r in data["models"].values())]
        parts += ["", title, "", "| model | " + " | ".join(TITLES[c] for c in columns) + " |"]
        parts.append("|---" * (len(columns) + 1) + "|")
        for model, rows in data["models"].items():
            values = [figure(rows, kind, c, name) for c in columns]
            cells = ["-" if value is None else show(value) for value in values]
            parts.append(f"| {model} | " + " | ".join(cells) + " |")
    about = data["machine"]
    parts += [
        "",
        f"{about['cpu']} ({about['features']}), {about['threads']} threads, "
        f"torch {about['torch']}, Python {about['python']}, {about['date']}",
    ]
    return "\n".join(parts) + "\n"


_TABLES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("First step with empty caches, in seconds", "cold", "first_step_s", "{:.2f}".format),
    ("A step, in milliseconds", "steady", "median_ms", "{:.1f}".format),
    (
        "Peak memory of a step, in MiB, parameters and inputs apart",
        "memory",
        "step_bytes",
        lambda value: f"{value / 2**20:.0f}",
    ),
    ("Gradients of the first step: relative distance from eager's", "cold", "gradients_off",
     "{:.1e}".format),
)  # fmt: skip


def plot(data: Row, path: Path) -> None:
    """Bars: how much faster than eager a step is, by model and column."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(data["models"])
    columns = [c for c in TITLES if c != "eager"]
    columns = [c for c in columns if any(c in r.get("steady", {}) for r in data["models"].values())]
    chart, axes = pyplot.subplots(figsize=(10, 4))
    for k, column in enumerate(columns):
        values = []
        for model in models:
            rows = data["models"][model]
            eager = figure(rows, "steady", "eager", "median_ms")
            values.append(ratio(eager, figure(rows, "steady", column, "median_ms")) or 0.0)
        places = [place + k * 0.8 / len(columns) for place in range(len(models))]
        axes.bar(places, values, 0.8 / len(columns), label=TITLES[column], align="edge")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks([place + 0.4 for place in range(len(models))], models, rotation=30)
    axes.set_ylabel("training steps, times as fast as eager")
    axes.legend()
    chart.tight_layout()
    chart.savefig(path, dpi=110)
    pyplot.close(chart)


def write(data: Row, path: Path) -> None:
    path.with_suffix(".md").write_text(as_markdown(data))
    plot(data, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.training_report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    data = json.loads(given.results.read_text())
    write(data, given.results)
    if given.page is not None:
        update_page(as_markdown(data), given.page, MARKS)
    print(as_markdown(data))


if __name__ == "__main__":
    main()
