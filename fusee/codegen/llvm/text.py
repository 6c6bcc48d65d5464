"""LLVM IR text: one growing basic block per loop level, and the module-level lines it needs.

A Level is the body of one open loop. While an inner loop is being written into its own Level, code
that does not depend on the inner loop can still be appended to the outer one: the inner loop's text
follows only when it closes. That is how invariant code ends up outside without a later pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence


class Level:
    """The lines of one loop body so far, and what has been computed in it."""

    __slots__ = ("counters", "known", "label", "lines", "writer")

    def __init__(self, writer: Writer, label: str) -> None:
        self.writer = writer
        self.lines: list[str] = []
        self.label = label  # of the basic block that the next line goes to
        self.known: dict[Hashable, str | list[str]] = {}
        self.counters: dict[str, str] = {}  # factor -> the register that holds i times it

    def times(self, factor: str) -> str:
        """The loop's variable times a factor known outside, by one addition per round."""
        found = self.counters.get(factor)
        if found is None:
            self.writer.count += 1
            found = self.counters[factor] = f"%v{self.writer.count}"
        return found

    def op(self, text: str) -> str:
        """Append an instruction; its result's name."""
        self.writer.count += 1
        name = f"%v{self.writer.count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Append an instruction without result."""
        self.lines.append("  " + text)

    def call(self, result: str, symbol: str, *operands: tuple[str, str]) -> str:
        """Call an intrinsic with (type, name) operands; its result's name, "" of void."""
        types = ", ".join(kind for kind, _ in operands)
        self.writer.declares[symbol] = f"declare {result} @{symbol}({types})"
        text = f"call {result} @{symbol}({', '.join(f'{k} {name}' for k, name in operands)})"
        if result != "void":
            return self.op(text)
        self.do(text)
        return ""


class Writer:
    """One function being written: the stack of open levels, innermost last.

    outlined  (op, dtype) of elementary functions that are called: so many calls would be too long
    """

    def __init__(self) -> None:
        self.count = 0
        self.labels = 0
        self.outlined: frozenset[Hashable] = frozenset()
        self.declares: dict[str, str] = {}  # by symbol: LLVM refuses a second declaration
        self.levels = [Level(self, "start")]

    @property
    def top(self) -> Level:
        return self.levels[-1]

    def loop(
        self,
        start: str,
        stop: str,
        step: int,
        carried: Sequence[tuple[str, str]],
        body: Callable[[str, list[str]], list[str]],
    ) -> list[str]:
        """for i in range(start, stop, step), with (type, initial value) carried round.

        `body` gets i and the carried names, writes into the new top level and returns the next
        carried names. Returns their final names. The test stands at the end, so code hoisted
        out of the body runs even if the loop does not.
        """
        self.labels += 1
        number = self.labels
        outer, inner = self.top, Level(self, f"body{number}")
        i = f"%i{number}"
        phis = [f"%c{number}_{k}" for k in range(len(carried))]
        self.levels.append(inner)
        after = body(i, phis)
        counters = []
        for factor, name in inner.counters.items():
            first = outer.op(f"mul i64 {start}, {factor}") if start != "0" else "0"
            by = outer.op(f"mul i64 {factor}, {step}") if step != 1 else factor
            counters.append((name, first, inner.op(f"add i64 {name}, {by}")))
        following = inner.op(f"add nsw i64 {i}, {step}")
        again = inner.op(f"icmp slt i64 {following}, {stop}")
        inner.do(f"br i1 {again}, label %body{number}, label %exit{number}")
        self.levels.pop()
        before = outer.label
        enter = outer.op(f"icmp slt i64 {start}, {stop}")
        outer.do(f"br i1 {enter}, label %body{number}, label %exit{number}")
        outer.lines.append(f"body{number}:")
        outer.do(f"{i} = phi i64 [ {start}, %{before} ], [ {following}, %{inner.label} ]")
        for (kind, first), phi, last in zip(carried, phis, after, strict=True):
            outer.do(f"{phi} = phi {kind} [ {first}, %{before} ], [ {last}, %{inner.label} ]")
        for name, first, last in counters:
            outer.do(f"{name} = phi i64 [ {first}, %{before} ], [ {last}, %{inner.label} ]")
        outer.lines += inner.lines
        outer.lines.append(f"exit{number}:")
        outer.label = f"exit{number}"
        return [
            outer.op(f"phi {kind} [ {first}, %{before} ], [ {last}, %{inner.label} ]")
            for (kind, first), last in zip(carried, after, strict=True)
        ]
