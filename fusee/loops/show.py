"""The loop IR as text, for people: loops, calls, and the values inside.

A value that is used twice, or whose text would be long, has a line of its own before the statement
that needs it. So the text grows with the values, not with the ways through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusee.loops.ir import (
    Extern,
    Kernel,
    Statement,
    Step,
    Store,
    Value,
    View,
    index_of,
    kernel_of,
    payloads,
    walk,
)
from fusee.sym.expr import Size, Symbol, substitute, symbols

# A longer expression gets a name.
LONGEST = 80


def show_step(step: Step) -> str:
    """One step of a LoopGraph: its loop nest, or its call."""
    if isinstance(step, Extern):
        results = ", ".join("_" if b is None else b.name for b in step.results)
        arguments = [_argument(a) for a in step.args]
        arguments += [f"{k}={_argument(a)}" for k, a in step.kwargs.items()]
        return f"{results} = {step.name}({', '.join(arguments)})"
    return show_kernel(kernel_of(step))


def show_kernel(kernel: Kernel) -> str:
    """The kernel as a loop nest."""
    lines = [f"# {kernel.origin}"] if kernel.origin else []
    depth = 0
    for axis in kernel.outer:
        mark = "  # lanes" if axis is kernel.lanes else ""
        lines.append(f"{'  ' * depth}for {axis.name} in range({axis.hi}):{mark}")
        depth += 1
    for phase in kernel.phases:
        inside = depth
        for axis in phase.inner:
            lines.append(f"{'  ' * inside}for {axis.name} in range({axis.hi}):")
            inside += 1
        lines += ["  " * inside + line for line in show_body(phase.body)]
    return "\n".join(lines)


def show_body(body: Sequence[Statement]) -> list[str]:
    """The lines of a phase's statements."""
    return _Body(body).lines


def _argument(argument: object) -> str:
    if isinstance(argument, View):
        return f"{argument.buffer}{list(argument.shape)}"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(map(_argument, argument)) + "]"
    return repr(argument)


class _Body:
    """`texts`: what stands for each value where it is used, by its id."""

    def __init__(self, body: Sequence[Statement]) -> None:
        self.lines: list[str] = []
        self.texts: dict[int, str] = {}
        self.names = 0
        wanted = [_needed(statement) for statement in body]
        order = walk(value for values in wanted for value in values)
        self.uses = Counter(id(operand) for value in order for operand in value.operands)
        self.uses.update(id(value) for values in wanted for value in values)
        indices = [index_of(value) for value in order]
        indices += [statement.index for statement in body if isinstance(statement, Store)]
        self.hidden = {id(value) for index in indices for value in payloads(index)}
        waiting = iter(order)
        for statement, values in zip(body, wanted, strict=True):
            while any(id(value) not in self.texts for value in values):
                self._add(next(waiting))
            self.lines.append(self._statement(statement))

    def _add(self, value: Value) -> None:
        text = self._text(value)
        shared = self.uses[id(value)] > 1 and value.operands
        if shared or id(value) in self.hidden or len(text) > LONGEST:
            name = f"t{self.names}"
            self.names += 1
            self.lines.append(f"{name} = {text}")
            text = name
        self.texts[id(value)] = text

    def _text(self, value: Value) -> str:
        args = [self.texts[id(arg)] for arg in value.args]
        if value.op == "const":
            return repr(value.attr)
        if value.op == "index":
            return f"({self._index(value.attr)})"
        if value.op == "load":
            buffer, index = value.attr
            masked = f" if {args[0]} else {args[1]}" if args else ""
            return f"{buffer}[{self._index(index)}]{masked}"
        if value.op == "acc":
            return str(value.attr.name)
        if value.op == "cast":
            return f"{str(value.dtype).removeprefix('torch.')}({args[0]})"
        if value.op == "check":
            return f"check({args[0]}, {value.attr[0]})"
        return f"{value.op}({', '.join(args)})"

    def _index(self, index: Size) -> str:
        names: dict[Symbol, Size] = {
            symbol: Symbol(self.texts[id(symbol.payload)]).expr
            for symbol in symbols(index)
            if isinstance(symbol.payload, Value)
        }
        return str(substitute(index, names) if names else index)

    def _statement(self, statement: Statement) -> str:
        text = self.texts[id(statement.value)]
        if isinstance(statement, Store):
            equals = "=" if statement.mode == "set" else f"{statement.mode}="
            return f"{statement.buffer}[{self._index(statement.index)}] {equals} {text}"
        which = "" if statement.which is None else f" at {self.texts[id(statement.which)]}"
        return f"{statement.acc.name} {statement.acc.op}= {text}{which}"


def _needed(statement: Statement) -> list[Value]:
    """The values that a statement names, those inside its index too."""
    if isinstance(statement, Store):
        return [*payloads(statement.index), statement.value]
    return [value for value in (statement.value, statement.which) if value is not None]
