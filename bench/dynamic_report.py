"""The table of sizes that vary: `python -m bench.dynamic_report RESULTS.json --page PAGE.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bench.columns import TITLES
from bench.report import Number, Row, geomean, ratio, update_page, written_again
from bench.training_report import figure

MARKS = ("<!-- dynamic:begin -->", "<!-- dynamic:end -->")

Shown = tuple[str, str, str, str]


def times(rows: Row, column: str, beside: str) -> list[float]:
    """How much longer `beside` takes than `column`, at each size."""
    both = [rows.get("turns", {}).get(c, {}).get("median_ms", {}) for c in (column, beside)]
    return [both[1][size] / ms for size, ms in both[0].items() if size in both[1]]


def text(value: Number, show: str = "{:.2f}x") -> str:
    return "-" if value is None else show.format(value)


def compilations(rows: Row) -> str:
    """Ours, then TorchInductor's."""
    found = [figure(rows, "all", column, "captures") for column in ("compile", "inductor")]
    return " / ".join(text(x, "{:.0f}") for x in found)


def faster(rows: Row) -> str:
    """Against eager, then TorchInductor."""
    found = [geomean(times(rows, "compile", column)) for column in ("eager", "inductor")]
    return " / ".join(map(text, found))


def table(data: Row) -> Iterator[Shown]:
    """Program, what is measured, asked (aimed at), measured."""
    models = data["models"]
    for name, words in (("bert", "BERT, 20 lengths"), ("bert in batches", "the same, batch 8")):
        if rows := models.get(name):
            yield words, "captures (TorchInductor's)", "2", compilations(rows)
            sides = [figure(rows, "all", c, "all_s") for c in ("inductor", "compile")]
            yield (
                "",
                "seconds of all calls: TorchInductor / fusee.compile",
                "20x (40x)",
                (f"{text(sides[0], '{:.1f}')} / {text(sides[1], '{:.1f}')}: {text(ratio(*sides))}"),
            )
    for name in ("llama generate", "t5 generate", "llama beams"):
        if rows := models.get(name):
            yield name, "compilations (TorchInductor's)", "3 (2)", compilations(rows)
            yield "", "tokens/s against eager, TorchInductor", "1.0x (1.3x)", faster(rows)
    for name in ("densenet121", "unet"):
        if rows := models.get(name):
            yield f"{name}, 6 image sizes", "captures (TorchInductor's)", "2", compilations(rows)
            beside = times(rows, "static", "compile")
            shown = f"{text(geomean(beside))}, {text(max(beside, default=None))}"
            yield (
                "",
                "time against a static version of each size: mean, worst",
                "1.05x (1.02x)",
                (shown),
            )
            yield "", "against eager, TorchInductor", "", faster(rows)
    if rows := models.get("gpt training"):
        yield "GPT training step, 10 lengths", "captures (TorchInductor's)", "2", compilations(rows)
        yield "", "against eager, TorchInductor", "1.15x (1.25x)", faster(rows)
        beside = times(rows, "static", "compile")
        yield "", "time against a static version of each size", "", text(geomean(beside))
        sides = [figure(rows, "memory", c, "step_bytes") for c in ("compile", "eager")]
        yield "", "peak memory against eager", "1.0x (0.9x)", text(ratio(*sides))
    yield from _tiny(models.get("ten kernels", {}))


def _tiny(rows: Row) -> Iterator[Shown]:
    def over(kind: str, column: str, name: str) -> str:
        sides = [figure(rows, kind, column, x) for x in (name, "static_us")]
        return "-" if None in sides else f"{sides[0] - sides[1]:.1f}"  # type: ignore[operator]

    for kind, name, what, asked in (
        ("calls", "seen_us", "a call at a size seen before, us over the static call", "1 (0.3)"),
        ("calls", "new_us", "a call at a new size, us over the static call", "30 (15)"),
        ("same", "seen_us", "sizes that never change, us over dynamic=False", "0"),
    ):
        if rows:
            shown = [over(kind, column, name) for column in ("compile", "inductor")]
            yield "ten tiny kernels", f"{what} (TorchInductor's)", asked, " / ".join(shown)


def as_markdown(data: Row) -> str:
    """The table, seconds at each size, and where it was measured."""
    parts = ["| program | measured | asked (aimed at) | |", "|---|---|---|---|"]
    parts += [f"| {' | '.join(row)} |" for row in table(data)]
    columns = [*TITLES, "static"]
    for title, name, show in _TABLES:
        shown = [c for c in columns if any(c in r.get("all", {}) for r in data["models"].values())]
        heads = [TITLES.get(c, "fusee.compile, static versions") for c in shown]
        parts += ["", title, "", "| program | " + " | ".join(heads) + " |"]
        parts.append("|---" * (len(shown) + 1) + "|")
        for program, rows in data["models"].items():
            values = [figure(rows, "all", c, name) for c in shown]
            if any(value is not None for value in values):
                cells = ["-" if value is None else show(value) for value in values]
                parts.append(f"| {program} | " + " | ".join(cells) + " |")
    about = data["machine"]
    loads = [
        row["load"] for rows in data["models"].values() for kind in rows.values()
        for row in kind.values()
    ]  # fmt: skip
    parts += [
        "",
        f"{about['cpu']} ({about['features']}), {about['threads']} threads, "
        f"torch {about['torch']}, Python {about['python']}, {about['date']};"
        f" load average {min(loads, default=0):.1f} to {max(loads, default=0):.1f}",
    ]
    return "\n".join(parts) + "\n"


_TABLES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("All calls in turn with empty caches, in seconds", "all_s", "{:.1f}".format),
    ("Graphs compiled", "captures", "{:.0f}".format),
)


def write(data: Row, path: Path, page: Path | None = None) -> None:
    """The table beside the results, and between the marks of a page."""
    made = as_markdown(data)
    path.with_suffix(".md").write_text(made)
    if page is not None:
        update_page(made, page, MARKS)


if __name__ == "__main__":
    written_again("bench.dynamic_report", __doc__, write, as_markdown)
