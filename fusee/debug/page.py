"""A report as one HTML page: no script, no font, no file besides it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from string import Template

__all__ = ["page"]

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
  pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; padding: .6rem .8rem;
        margin: .3rem 0; border: 1px solid #8886; border-radius: .4rem; }
  summary { cursor: pointer; } .title { color: #888; }
  .stop pre { border-color: #c60; }
</style>
<h1>$title</h1>
<p>$summary</p>
$pieces
</html>
""")  # noqa: E501  # CSS

Section = tuple[str, str]


def page(title: str, summary: str, pieces: Sequence[Sequence[Section]]) -> str:
    """The page. Of each piece the first section's title is its heading."""
    shown = []
    for number, ((heading, _), *sections) in enumerate(pieces, 1):
        shown.append(f"<h2>{number}. {html.escape(heading)}</h2>")
        shown += [_section(title, text) for title, text in sections]
    return _PAGE.substitute(
        title=html.escape(title), summary=html.escape(summary), pieces="\n".join(shown)
    )


def _section(title: str, text: str) -> str:
    """One line as it is; more in a box, which is open unless it is long."""
    name, body = html.escape(title), html.escape(text)
    kind = "stop" if title == "ends before" else "part"
    if "\n" not in text:
        return f'<div class="{kind}"><span class="title">{name}</span> {body}</div>'
    is_open = " open" if text.count("\n") < 25 else ""
    return (
        f'<details class="{kind}"{is_open}><summary class="title">{name}</summary>'
        f"<pre>{body}</pre></details>"
    )
