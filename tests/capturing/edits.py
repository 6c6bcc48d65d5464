"""Programs that somebody edits between two processes that share a cache folder.

Captures outlive their process: what the first one captured must not be taken for what the second
one's program says. So a random program runs, runs again as it is, and then with one edit each.
"""

from __future__ import annotations

import ast
import random
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from fusee.persist import Keeper
from fusee.runtime.cache import ObjectCache
from tests.capturing.differences import difference

__all__ = ["difference_after_edits"]

EDITS = 3  # of a program

_NAMES = dict(
    sin="cos", cos="sin", relu="tanh", tanh="relu", exp="sin", add="sub", sub="add", mul="add",
    sum="mean", mean="sum", add_="sub_", mul_="add_", abs="neg", neg="abs", max="min", min="max",
    zeros="ones", ones="zeros", cat="stack", keys="values", values="keys", int="float",
    float="int", any="all", all="any", sorted="list", list="tuple", tuple="list", append="remove",
)  # fmt: skip
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Lt: ast.Gt,
    ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip

Edit = Callable[[random.Random], None]


def _edits(node: ast.AST) -> list[tuple[str, Edit]]:
    """What may be done to a node: kinds of edits, and what does them."""
    found: list[tuple[str, Edit]] = []
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float, str):
        value, more = node.value, {int: 1, float: 0.5, str: "x"}
        other = not value if type(value) is bool else value + more[type(value)]  # type: ignore
        found.append(("number", lambda _: setattr(node, "value", other)))
    if isinstance(node, ast.Attribute) and node.attr in _NAMES:
        found.append(("attribute", lambda _: setattr(node, "attr", _NAMES[node.attr])))
    if isinstance(node, ast.Name) and node.id in _NAMES:
        found.append(("name", lambda _: setattr(node, "id", _NAMES[node.id])))
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
        found.append(("operator", lambda _: setattr(node, "op", _OPERATORS[type(node.op)]())))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        found.append(("order", lambda _: node.ops.insert(0, _OPERATORS[type(node.ops.pop(0))]())))
    if isinstance(node, ast.Call) and len(node.args) > 1:
        found.append(("arguments", lambda _: node.args.reverse()))
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        found.append(("decorator", lambda _: node.decorator_list.clear()))
    if isinstance(node, ast.ClassDef) and node.bases:
        found.append(("base", lambda _: node.bases.clear()))
    body = getattr(node, "body", None)
    if isinstance(body, list) and len(body) > 1:
        found.append(("fewer lines", lambda draw: body.__delitem__(draw.randrange(len(body)))))
        found.append(("order of lines", lambda draw: draw.shuffle(body)))
    return found


def edited(source: str, draw: random.Random) -> str:
    """The program with one edit; each kind that there is has the same chance."""
    tree = ast.parse(source)
    rows = [row for node in ast.walk(tree) for row in _edits(node)]
    kind = draw.choice(sorted({kind for kind, _ in rows}))
    draw.choice([edit for its, edit in rows if its == kind])(draw)
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_program(text: str) -> bool:
    """Whether a module can still be made of it, with what the harness asks for."""
    made = types.ModuleType("fuzzed").__dict__
    try:
        exec(compile(text, "<fuzzed>", "exec"), made)
    except Exception:  # noqa: BLE001  # whatever an edit has broken
        return False
    return {"fn", "log"} <= made.keys()


def difference_after_edits(source: str, seed: int) -> str | None:
    """Where a program that finds what another process captured differs from eager, and from what
    it gives alone; with its text. None if it doesn't, or if nothing of the first is kept."""
    draw, source = random.Random(seed), ast.unparse(ast.parse(source))
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(cache=ObjectCache(Path(folder), 2**26))
        if difference(source, keeper=keeper) is not None or not any(Path(folder).iterdir()):
            return None
        texts = [edited(source, draw) for _ in range(EDITS)]
        for text in [source, *filter(_is_program, texts)]:
            found = difference(text, keeper=keeper)
            if found is not None and difference(text) != found:
                return f"in the second process: {found}\n{text}"
    return None
