"""Runs a program's source eager and compiled, and says where the two differ."""

from __future__ import annotations

import ast
import contextlib
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusee.capture.dispatch import CompiledFunction
from fusee.capture.policy import Policy
from tests.capturing.portrait import Portrait

__all__ = ["Outcome", "backend", "difference", "shrunk"]

CALLS = 3
LONGEST_S = 5


class Endless(BaseException):
    """A program does not come to an end: it appends to the list that it goes through, say."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raises Endless inside once the time is over."""

    def stop(*_: Any) -> None:
        raise Endless

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S, 1)  # it may be caught once
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Told(Exception):
    """A graph that changes its inputs raised, and the error says what was left out."""


class Outcome:
    """What the calls of a program gave, and what they left behind.

    lines      the portrait of it all
    eager      why pieces ran eagerly; breaks   why graphs ended
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.eager: list[str] = []
        self.breaks: list[str] = []


def backend(gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    """Runs graphs as they are."""
    gm.graph.lint()
    return gm.forward


def outcome(source: str, compiled: bool) -> Outcome:
    """Run the program's three calls in a world of its own."""
    torch.manual_seed(0)
    module = sys.modules["fuzzed"] = types.ModuleType("fuzzed")  # where dataclasses look it up
    exec(compile(source, "<fuzzed>", "exec"), module.__dict__)
    fn = made = module.__dict__["fn"]
    if compiled:
        made = CompiledFunction(fn, backend, Policy())
    found = Outcome()
    portrait = Portrait()
    # each call's inputs are alive to the end, so that a change that comes late is seen
    kept = []
    for k in range(CALLS):
        # as many calls with known inputs again: entries must be found, and be right
        args = module.__dict__["inputs"](k)
        assert isinstance(args, list), "a program that shrank too far"
        kept.append(args)
        torch.manual_seed(k)
        try:
            result = ("returned", made(*args))
        except Exception as error:  # the exception is what is compared
            result = ("raised", error)
            if any("changes its inputs" in note for note in getattr(error, "__notes__", ())):
                raise Told from error
        portrait.add(f"call {k}: grad mode", torch.is_grad_enabled())
        torch.set_grad_enabled(True)
        portrait.add(f"call {k}: result", result)
        portrait.add(f"call {k}: args", args)
        portrait.add(f"call {k}: globals", _variables(module))
        portrait.add(f"call {k}: fn", fn)
        # what was told is told anew after the next call
        portrait._seen.clear()
        portrait._storages.clear()
    portrait.add("at the end", kept)
    found.lines = portrait.lines
    if compiled:
        for one in _functions(made):
            for entry in one.entries:
                if entry.captured.eager:
                    found.eager.append(entry.captured.eager)
                if entry.captured.stop is not None:
                    found.breaks.append(entry.captured.stop.reason)
    return found


def _functions(compiled: CompiledFunction) -> Iterator[CompiledFunction]:
    yield compiled
    for one in compiled.callees:
        yield from _functions(one)


def _variables(module: types.ModuleType) -> dict[str, Any]:
    left_out = (types.ModuleType, type, types.FunctionType)
    return {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("__") and not isinstance(value, left_out)
    }


def difference(source: str, into: Outcome | None = None) -> str | None:
    """The first line in which eager and compiled differ; None if there is none."""
    try:
        with limited():
            want = outcome(source, compiled=False)
    except Endless:
        return None
    try:
        with limited():
            got = outcome(source, compiled=True)
    except Endless:
        return "compiled does not come to an end"
    except Told:
        return None
    except Exception as error:  # noqa: BLE001  # a fault of ours in place of a result
        return f"fusee failed: {type(error).__name__}: {error}"
    if into is not None:
        into.eager, into.breaks = got.eager, got.breaks
    for a, b in zip(want.lines, got.lines):
        if a != b:
            return f"eager:    {a}\ncompiled: {b}"
    if len(want.lines) != len(got.lines):
        return f"eager tells {len(want.lines)} lines, compiled {len(got.lines)}"
    return None


# ------------------------------------------------------------------------------ shrinking


def shrunk(source: str, fails: Callable[[str], bool], tries: int = 500) -> str:
    """A smaller program that still fails: statements dropped, blocks in place of their owner."""
    best = ast.unparse(ast.parse(source))
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in _smaller(best):
            tries -= 1
            if tries <= 0:
                break
            if _is_failing(candidate, fails):
                best, progress = candidate, True
                break
    return best


def _is_failing(source: str, fails: Callable[[str], bool]) -> bool:
    try:
        compile(source, "<candidate>", "exec")
        return fails(source)
    except Exception:  # noqa: BLE001  # a candidate that doesn't run at all is no smaller failure
        return False


def _smaller(source: str) -> Iterator[str]:
    sizes = [len(body) for body in _bodies(ast.parse(source))]
    for which, size in enumerate(sizes):
        spans = [(k, k + w) for w in (8, 4, 2, 1) if w <= size for k in range(0, size, w)]
        for start, end in spans:
            tree = ast.parse(source)
            body = list(_bodies(tree))[which]
            if len(body) == 1 and isinstance(body[0], ast.Pass):
                continue
            body[start:end] = [] if len(body) > end - start else [ast.Pass()]
            yield ast.unparse(tree)
        for k in range(size):
            tree = ast.parse(source)
            body = list(_bodies(tree))[which]
            inner = [*_own_bodies(body[k])]
            if inner and not isinstance(body[k], (ast.FunctionDef, ast.ClassDef)):
                body[k : k + 1] = inner[0]
                yield ast.unparse(tree)


def _own_bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list) and found:
            yield found
    for handler in getattr(node, "handlers", []):
        yield handler.body


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements within functions, innermost last."""
    for child in ast.walk(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.Module)):
            yield from _own_bodies(child) if not isinstance(child, ast.Try) else _all(child)


def _all(node: ast.Try) -> Iterator[list[ast.stmt]]:
    yield from (found for found in (node.body, node.orelse, node.finalbody) if found)
