"""Verifies LoopGraph, kernels and memory plan: what the option `check` does after each stage.

One function per property. Each takes a kernel, or all steps in order, and yields what is wrong;
the first fault is raised as CheckError, with the stage, the kernel and the user's line. A Loop is
looked at as the kernel that it would be alone.

An index is proved to be inside its buffer by its bounds (`fusee.sym`); where they don't tell, it is
computed at some points, and only one that lies outside is a fault. Sizes that only the call knows
are as in the first call wherever numbers are needed.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusee.errors import CheckError
from fusee.loops import (
    REDUCTIONS,
    SCALAR_OPS,
    SPECIAL_OPS,
    Acc,
    Accumulate,
    Buffer,
    Extern,
    Kernel,
    Loop,
    LoopGraph,
    Schedule,
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
from fusee.loops.memory import ALIGNMENT, Plan, size_bytes
from fusee.loops.schedule import reads, stride, views, writes
from fusee.sym import Size, Symbol, count_points, hint, known_ge, product, substitute, symbols
from fusee.sym.shape_env import computed_from

Item = Kernel | Extern
Inside = Sequence[Sequence[Value]]  # the values of each phase of a kernel, operands first

# Memory that holds something before the first step.
GIVEN = frozenset({"input", "derived", "constant"})
# How many points of a kernel an index is computed at where its bounds don't tell.
POINTS = 64


def check_graph(graph: LoopGraph) -> None:
    """What lowering made.

    raises   CheckError, as all of these
    """
    _check("lower", graph, [s if isinstance(s, Extern) else kernel_of(s) for s in graph.steps])


def check_schedule(schedule: Schedule) -> None:
    """What fusion made of a graph."""
    _check("fuse", schedule.graph, schedule.items)
    for item, fault in changed_order(schedule.graph.steps, schedule.items):
        _refuse("fuse", item, fault)


def check_plan(plan: Plan) -> None:
    """Where the intermediates of a schedule lie."""
    for item, fault in (*dominance(plan.schedule.items), *places(plan)):
        _refuse("memory", item, fault)


def _check(stage: str, graph: LoopGraph, items: Sequence[Item]) -> None:
    checked: set[object] = set()
    loops = [step for step in graph.steps if isinstance(step, Loop) and step.scan]
    scans = {gathered.acc for loop in loops for gathered in loop.gathered}
    for item in items:
        faults: Iterable[str]
        if isinstance(item, Extern):
            faults = windows((item.args, item.kwargs))
        else:
            inside = [walk(phase.operands) for phase in item.phases]
            # in this order: the later ones rely on what the earlier ones have seen
            faults = itertools.chain(
                elsewhere(graph, item),
                scopes(item, inside),
                types(item, inside, checked),
                reductions(item, inside, scans),
                bounds(item, inside, checked),
                stored_once(item),
            )
        for fault in faults:
            _refuse(stage, item, fault)
    for row in (*dominance(items), *written_whole(items)):
        _refuse(stage, *row)
    for fault in (*windows(graph.outputs), *results(graph, items)):
        _refuse(stage, None, fault)


def _refuse(stage: str, item: Item | None, fault: str) -> None:
    who = "the graph's results"
    if isinstance(item, Extern):
        who = f"the call of {item.name}"
    elif item is not None:
        who = f"the kernel that stores {', '.join(b.name for b in writes(item)) or 'nothing'}"
    raise CheckError(
        f"after the stage {stage!r}, {who}: {fault}",
        where=None if item is None else item.origin or None,
        did="stopped before running it",
        remedy="please report it: this is a bug of Fusee",
    )


# ------------------------------------------------------------------------------ one kernel


def elsewhere(graph: LoopGraph, kernel: Kernel) -> Iterator[str]:
    """All memory is on the device where the loops run."""
    if graph.elsewhere:
        for buffer in {*reads(kernel), *writes(kernel)} & graph.elsewhere:
            yield f"{buffer.name} is on another device"


def scopes(kernel: Kernel, inside: Inside) -> Iterator[str]:
    """Axes run from 0 to an end, each once; an index names only axes of the loops around it."""
    if kernel.lanes is not None and kernel.lanes not in kernel.outer[-1:]:
        yield f"lanes run along {kernel.lanes}, which is not its last outer axis"
    for phase, values in zip(kernel.phases, inside, strict=True):
        axes = (*kernel.outer, *phase.inner)
        if len(set(axes)) != len(axes):
            yield f"an axis occurs twice among {axes}"
        for axis in axes:
            if axis.hi is None or axis.lo != 0:
                yield f"the axis {axis} has no range from 0 to an end"
        stores = phase.stores
        indices = [(f"the place of {store.buffer}", store.index) for store in stores]
        indices += [(f"a {v.op}", index_of(v)) for v in values if v.op in ("load", "index")]
        for where, index in indices:
            for symbol in symbols(index):
                own = symbol in axes or symbol.hi is None or isinstance(symbol.payload, Value)
                if not own:
                    yield f"{where} names {symbol}, which no loop around it runs along"


def types(kernel: Kernel, inside: Inside, checked: set[object]) -> Iterator[str]:
    """Each value has the dtype that its operation gives to its operands; stores take theirs."""
    for value in itertools.chain.from_iterable(inside):
        if value in checked:
            continue
        checked.add(value)
        given, row, fault = [arg.dtype for arg in value.args], SCALAR_OPS.get(value.op), ""
        if row is None and value.op not in SPECIAL_OPS:
            fault = "the vocabulary has no such operation"
        elif row is None:
            fault = "" if _SPECIAL[value.op](value, given) else f"its operands are {given}"
        elif len(given) != row.arity or len(set(given)) != 1 or _kind(given[0]) not in row.kinds:
            fault = f"its operands are {given}"
        else:
            wanted = given[0] if row.result == "same" else getattr(torch, row.result)
            fault = "" if value.dtype is wanted else f"its operation gives {wanted}"
        if fault:
            yield f"{value} of {value.dtype}: {fault}"
    for statement in kernel.statements():
        if isinstance(statement, Store) and statement.value.dtype is not statement.buffer.dtype:
            buffer = statement.buffer
            yield f"{statement.value.dtype} is stored into {buffer}, which is {buffer.dtype}"


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "b"
    if dtype.is_floating_point:
        return "f" if dtype.itemsize >= 4 else "half"
    return "i"


# What must be true of an operation whose operands are not of one dtype.
_SPECIAL: dict[str, Callable[[Value, list[torch.dtype]], bool]] = {
    "const": lambda v, d: not d and (type(v.attr) is bool) == (v.dtype is torch.bool),
    "index": lambda v, d: not d and v.dtype is torch.int64,
    "load": lambda v, d: v.dtype is v.attr[0].dtype and d in ([], [torch.bool, v.dtype]),
    "acc": lambda v, d: not d and v.dtype is v.attr.dtype,
    "carry": lambda v, d: not d and v.dtype is v.attr.dtype and v.attr.op == "fold",
    "cast": lambda v, d: len(d) == 1,
    "bitcast": lambda v, d: len(d) == 1 and d[0].itemsize == v.dtype.itemsize,
    "where": lambda v, d: d == [torch.bool, v.dtype, v.dtype],
    "check": lambda v, d: d == [torch.int64] and v.dtype is torch.int64,
}


def reductions(kernel: Kernel, inside: Inside, scans: Container[Acc | None]) -> Iterator[str]:
    """Each accumulator gathers values of its dtype in one phase; scans alone read it there."""
    began: dict[Acc, int] = {}
    for number, (phase, values) in enumerate(zip(kernel.phases, inside, strict=True)):
        for statement in phase.body:
            if isinstance(statement, Accumulate):
                acc, dtype = statement.acc, statement.value.dtype
                if acc.op not in (*REDUCTIONS, "fold"):
                    yield f"there is no reduction {acc.op!r}"
                elif acc.op in ("argmax", "argmin"):
                    which = statement.which
                    if which is None or {which.dtype, acc.dtype} != {torch.int64}:
                        yield f"{acc.name} has no int64 index to gather beside each value"
                    if any(axis.hi == 0 for axis in phase.inner):
                        yield f"{acc.name} looks for an element among none"
                elif dtype is not acc.dtype or _kind(dtype) == "half":
                    yield f"{acc.name} of {acc.dtype} gathers values of {dtype}"
                if acc in began:
                    yield f"the accumulator {acc.name} gathers twice"
                began[acc] = number
        for value in values:
            if value.op == "carry" and began.get(value.attr) != number:
                yield f"{value.attr.name} is carried by no loop around it"
            if value.op != "acc":
                continue
            if value.attr not in began:
                yield f"the accumulator {value.attr.name} is read before it gathers anything"
            elif began[value.attr] == number and phase.inner and value.attr not in scans:
                yield f"the accumulator {value.attr.name} is read while it gathers, and is no scan"


def bounds(kernel: Kernel, inside: Inside, checked: set[object]) -> Iterator[str]:
    """Whatever is read or stored lies inside its buffer."""
    for phase, values in zip(kernel.phases, inside, strict=True):
        if any(hint(axis.size) == 0 for axis in (*kernel.outer, *phase.inner)):
            continue  # it runs for no point
        for statement in phase.body:
            if isinstance(statement, Store):
                yield from _outside(statement.buffer, statement.index, None, "stores to", checked)
        for value in values:
            if value.op == "load":
                mask = value.args[0] if value.args else None
                buffer, index = value.attr
                yield from _outside(buffer, index, mask, "reads", checked)


def _outside(
    buffer: Buffer, index: Size, mask: Value | None, verb: str, checked: set[object]
) -> Iterator[str]:
    # ranges stand in the axes, so what was inside once is inside everywhere
    key = (buffer, index, mask)
    if key in checked or not buffer.bounded:
        return
    checked.add(key)
    end = buffer.offset + buffer.size
    if known_ge(index, 0) and known_ge(end - 1 - index, 0):
        return
    at = _Points([index] if mask is None else [index, *map(index_of, walk([mask]))])
    found = at.places(index, mask)
    if found is None:
        return
    outside = found[(found < 0) | (found >= hint(end))].tolist()
    if outside:
        masked = "" if mask is None else " where its mask is true"
        yield f"{verb} {buffer}[{index}]{masked}: {outside[0]} is outside of {hint(end)} elements"


def stored_once(kernel: Kernel) -> Iterator[str]:
    """No two points store to one place, but along axes that run in order."""
    for phase in kernel.phases:
        axes = [a for a in (*kernel.outer, *phase.inner) if a not in kernel.ordered]
        sizes = [hint(a.size) for a in axes]
        axes = [a for a, size in zip(axes, sizes, strict=True) if size != 1]
        if 0 in sizes:
            continue
        for store in phase.body:
            if isinstance(store, Store) and not payloads(store.index):
                for axis in axes:
                    if axis not in symbols(store.index):
                        yield f"all points along {axis} store to one place of {store.buffer}"
                # a place gets what lies as far in a buffer: windows that overlap store it twice
                value = store.value
                is_read = store.mode == "set" and value.op == "load" and not value.args
                is_copied = is_read and isinstance(store.index - value.attr[1], int)
                steps = [stride(store.index, axis) for axis in axes]
                known = [0 if n is None else hint(n) for n in steps]
                rows = sorted((abs(n), hint(axis.size)) for n, axis in zip(known, axes))
                reach = itertools.accumulate((n * (count - 1) for n, count in rows), initial=0)
                # each axis steps over all that the smaller steps reach: then no two points meet
                is_nested = all(n > far for (n, _), far in zip(rows, reach))
                if is_copied or (None not in steps and is_nested):
                    continue
                at = _Points([store.index], axes)
                found = at.places(store.index, None)
                if found is not None:
                    points = torch.stack([at.known[axis].expand(POINTS) for axis in axes], 1)
                    if len(set(map(tuple, points.tolist()))) > len(set(found.tolist())):
                        yield f"two points store to one place of {store.buffer}"


# ------------------------------------------------------------------------------ all of them


def windows(tree: object) -> Iterator[str]:
    """Views on our own memory lie inside it."""
    for view in views(tree):
        buffer = view.buffer
        if buffer.role in ("scratch", "result", "large") and 0 not in view.shape:
            shape = [hint(n) for n in view.shape]
            steps = [(n - 1) * hint(s) for n, s in zip(shape, view.strides, strict=True)]
            last = hint(view.offset) + sum(steps)
            if hint(view.offset) < 0 or (0 not in shape and last >= hint(buffer.size)):
                yield f"a view of {buffer} reaches element {last} of {hint(buffer.size)}"


def results(graph: LoopGraph, items: Sequence[Item]) -> Iterator[str]:
    """What is returned was written."""
    written = {buffer for item in items for buffer in writes(item)}
    for view in views(graph.outputs):
        if view.buffer.role not in GIVEN and view.buffer not in written and 0 not in view.shape:
            yield f"{view.buffer} is returned, and nothing is stored in it"


def dominance(items: Sequence[Item]) -> Iterator[tuple[Item, str]]:
    """What is read was written: before, or by the kernel itself for the same outer point."""
    written: set[Buffer] = set()
    for item in items:
        own = set(writes(item))
        for buffer in reads(item):
            is_there = buffer.role in GIVEN or buffer in written or buffer.size == 0
            if not is_there and not (isinstance(item, Kernel) and buffer in own):
                yield item, f"reads {buffer}, which nothing has written yet"
        if isinstance(item, Kernel) and own.intersection(reads(item)):
            yield from ((item, fault) for fault in _own_reads(item, written))
        written |= own


def _own_reads(kernel: Kernel, written: set[Buffer]) -> Iterator[str]:
    """How a kernel reads what it writes. One that runs in order does so as its loop says."""
    if kernel.ordered:
        return
    own = set(writes(kernel))
    before: list[tuple[int, Store]] = []
    for number, phase in enumerate(kernel.phases):
        for statement in phase.body:
            for load in walk(statement.operands):
                if load.op != "load" or load.attr[0] not in own:
                    continue
                buffer, index = load.attr
                mine = [(n, s.index) for n, s in before if s.buffer is buffer]
                same = any(place == index for n, place in mine if n == number)
                # stored before at this outer point, as far as steps tell
                steps = [stride(index, axis) for axis in kernel.outer]
                for n, place in mine:
                    stored = [stride(place, axis) for axis in kernel.outer]
                    pairs = zip(stored, steps, strict=True)
                    same |= n < number and all(None in pair or pair[0] == pair[1] for pair in pairs)
                if same:
                    continue
                later = [s.index for p in kernel.phases[number:] for s in p.body
                         if isinstance(s, Store) and s.buffer is buffer]  # fmt: skip
                if buffer.role not in GIVEN and buffer not in written:
                    yield f"reads {buffer}[{index}] before it is written"
                elif mine or any(place != index for place in later):
                    yield f"reads {buffer}[{index}], where another of its points may have written"
            if isinstance(statement, Store):
                before.append((number, statement))


def written_whole(items: Sequence[Item]) -> Iterator[tuple[Item, str]]:
    """The pieces of each intermediate make up the whole of it; later stores may change that."""
    missing: dict[Buffer, int] = {}
    last: dict[Buffer, Item] = {}
    for item in items:
        if isinstance(item, Extern):
            missing.update(dict.fromkeys(writes(item), 0))
            continue
        for phase in item.phases:
            count = hint(count_points((*item.outer, *phase.inner)))
            for store in phase.body:
                if not isinstance(store, Store) or store.buffer.role in GIVEN:
                    continue
                buffer, last[store.buffer] = store.buffer, item
                left = missing.setdefault(buffer, hint(product(buffer.shape)))
                if left and (store.mode != "set" or item.ordered):
                    yield item, f"changes {buffer}, of which {left} elements are not stored yet"
                elif left:
                    missing[buffer] = left - count
                if left and left < count:
                    yield item, f"stores {count} elements in {buffer}, which lacks {left}"
    for buffer, item in last.items():
        if missing[buffer]:
            yield item, f"{missing[buffer]} elements of {buffer} are never stored"


def changed_order(steps: Sequence[Any], items: Sequence[Item]) -> Iterator[tuple[Item, str]]:
    """Each read sees as many stores as one of the reads of its buffer did in program order."""
    wanted: dict[Buffer, tuple[int, int]] = {}
    for _, buffer, before, _ in _stores_seen(steps):
        low, high = wanted.get(buffer, (before, before))
        wanted[buffer] = min(low, before), max(high, before)
    for item, buffer, before, own in _stores_seen(items):
        low, high = wanted.get(buffer, (0, before))
        if before > high or before + own < low:
            yield item, f"reads {buffer} after {before} stores, in the program {low} to {high}"


def _stores_seen(items: Iterable[Any]) -> Iterator[tuple[Any, Buffer, int, int]]:
    """(who, buffer, stores of others before, own stores) for all that is read."""
    stores: Counter[Buffer] = Counter()
    for item in items:
        own = [s.buffer for s in item.stores] if isinstance(item, Kernel) else writes(item)
        for buffer in reads(item):
            yield item, buffer, stores[buffer], own.count(buffer)
        stores.update(own)


def places(plan: Plan) -> Iterator[tuple[Item, str]]:
    """Intermediates lie inside the arena, aligned, and apart from all that are alive with them."""
    graph, items = plan.schedule.graph, plan.schedule.items
    last: dict[Buffer, int] = {view.buffer: len(items) for view in views(graph.outputs)}
    for position, item in enumerate(items):
        for buffer in (*reads(item), *writes(item)):
            last[buffer] = max(position, last.get(buffer, 0))
    arena = hint(plan.total_bytes)
    alive: list[tuple[int, int, Buffer]] = []  # (begin, end), sorted
    lying: set[Buffer] = set()
    for position, item in enumerate(items):
        alive = [place for place in alive if last[place[2]] >= position]
        for buffer in (*reads(item), *writes(item)):
            if buffer.role != "scratch" or buffer in lying:
                continue
            lying.add(buffer)
            if buffer not in plan.offsets:
                yield item, f"{buffer} has no place in the arena"
                continue
            begin, size = hint(plan.offsets[buffer]), hint(size_bytes(buffer))
            if begin % ALIGNMENT or begin < 0 or begin + size > arena:
                yield item, f"{buffer} lies at {begin} to {begin + size} of {arena} bytes"
            at = bisect_left(alive, begin, key=lambda place: place[0])
            for other in alive[max(at - 1, 0) : at + 1]:
                if size and begin < other[1] and other[0] < begin + size:
                    yield item, f"{buffer} and {other[2]} are alive together and share bytes"
            if size:
                insort(alive, (begin, begin + size, buffer), key=lambda place: place[0])
    for position, item in enumerate(items):
        if isinstance(item, Extern) and item.call is item.in_place:
            for buffer in item.mutates:
                if last[buffer] > position:
                    yield item, f"overwrites {buffer}, which is read afterwards"


# ------------------------------------------------------------------------------ points


class _Points:
    """Some points of the axes that expressions name: their ends, and places between."""

    def __init__(self, sizes: Iterable[Size], axes: Iterable[Symbol] = ()) -> None:
        draw = random.Random(0)
        self.known: dict[Symbol, Tensor] = {}
        self.of_data = False  # some are data: any value in their range may occur, but not with all
        named = dict.fromkeys(axes)
        for size in sizes:
            named.update(symbols(size))
        for symbol in named:
            self.of_data |= symbol.payload is not None
            if symbol.hi is None:
                self.known[symbol] = torch.tensor([hint(symbol.expr)])
                continue
            most = max(hint(symbol.hi) - 1, 0)
            ends = [x for x in (0, 1, most - 1, most) if 0 <= x <= most]
            drawn = [
                draw.choice(ends) if draw.random() < 0.7 else draw.randint(0, most)
                for _ in range(POINTS)
            ]
            self.known[symbol] = torch.tensor(drawn)

    def places(self, index: Size, mask: Value | None) -> Tensor | None:
        """`index` at the points where `mask` is true; None if that depends on data."""
        if self.of_data:
            return None
        found = self._size(index).expand(POINTS)
        if mask is None:
            return found
        chosen = self._mask(mask)
        return None if chosen is None else found[chosen.expand(POINTS)]

    def _size(self, size: Size) -> Tensor:
        known = {symbol.name: x for symbol, x in self.known.items()}
        assert len(known) == len(self.known), f"two of {[*self.known]} have one name"
        return torch.as_tensor(computed_from(size, {**_EXTREMES, **known})).view(-1)

    def _mask(self, mask: Value) -> Tensor | None:
        done: dict[Value, Tensor] = {}
        for value in walk([mask]):
            if value.op == "const":
                done[value] = torch.tensor([value.attr])
            elif value.op == "index":
                done[value] = self._size(value.attr)
            elif value.op in _ON_VALUES:
                done[value] = _ON_VALUES[value.op](*(done[arg] for arg in value.args))
            else:
                return None
        return done[mask]


_EXTREMES: dict[str, Callable[..., Tensor]] = {
    name: lambda *sizes, run=run: run(*map(torch.as_tensor, sizes))
    for name, run in (("min", torch.minimum), ("max", torch.maximum))
}
# Of integers and truth values alone: what masks of indices are made of.
_ON_VALUES: dict[str, Callable[..., Tensor]] = {
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "not": torch.bitwise_not,
    **{name: getattr(torch, name) for name in "eq ne lt le gt ge add sub mul neg".split()},
}


# ---------------------------------------------------------------------------- text
# The loop IR as text, for people: loops, calls, and the values inside.
#
# A value that is used twice, or whose text would be long, has a line of its own before the
# statement that needs it. So the text grows with the values, not with the ways through them.


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
        lines += ["  " * inside + line for line in _Body(phase.body).lines]
    return "\n".join(lines)


def show_schedule(schedule: Schedule) -> str:
    """The kernels, and why loops stayed apart."""
    rows = [f"{x.name}(...)" if isinstance(x, Extern) else show_kernel(x) for x in schedule.items]
    return "\n\n".join([*rows, "# stayed apart", *(f"# {row}" for row in schedule.refusals)])


def _argument(argument: object) -> str:
    if isinstance(argument, View):
        return f"{argument.buffer}{list(argument.shape)}"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(map(_argument, argument)) + "]"
    return repr(argument)


class _Body:
    """`texts`: what stands for each value where it is used."""

    def __init__(self, body: Sequence[Statement]) -> None:
        self.lines: list[str] = []
        self.texts: dict[Value, str] = {}
        names = 0
        wanted = [statement.operands for statement in body]
        order = walk(value for values in wanted for value in values)
        uses = Counter(operand for value in order for operand in value.operands)
        uses.update(value for values in wanted for value in values)
        indices = [index_of(value) for value in order]
        indices += [statement.index for statement in body if isinstance(statement, Store)]
        hidden = {value for index in indices for value in payloads(index)}
        waiting = iter(order)
        for statement, values in zip(body, wanted, strict=True):
            while any(value not in self.texts for value in values):
                value = next(waiting)
                text, shared = self._text(value), uses[value] > 1 and value.operands
                if shared or value in hidden or len(text) > LONGEST:
                    self.lines.append(f"t{names} = {text}")
                    text, names = f"t{names}", names + 1
                self.texts[value] = text
            self.lines.append(self._statement(statement))

    def _text(self, value: Value) -> str:
        args = [self.texts[arg] for arg in value.args]
        if value.op == "const":
            return repr(value.attr)
        if value.op == "index":
            return f"({self._index(value.attr)})"
        if value.op == "load":
            buffer, index = value.attr
            masked = f" if {args[0]} else {args[1]}" if args else ""
            return f"{buffer}[{self._index(index)}]{masked}"
        if value.op in ("acc", "carry"):
            return f"{value.attr.name}{'' if value.op == 'acc' else '_before'}"
        if value.op == "cast":
            return f"{str(value.dtype).removeprefix('torch.')}({args[0]})"
        if value.op == "check":
            return f"check({args[0]}, {value.attr[0]})"
        return f"{value.op}({', '.join(args)})"

    def _index(self, index: Size) -> str:
        names: dict[Symbol, Size] = {
            symbol: Symbol(self.texts[symbol.payload]).expr
            for symbol in symbols(index)
            if isinstance(symbol.payload, Value)
        }
        return str(substitute(index, names) if names else index)

    def _statement(self, statement: Statement) -> str:
        text = self.texts[statement.value]
        if isinstance(statement, Store):
            equals = "=" if statement.mode == "set" else f"{statement.mode}="
            return f"{statement.buffer}[{self._index(statement.index)}] {equals} {text}"
        which = "" if statement.which is None else f" at {self.texts[statement.which]}"
        return f"{statement.acc.name} {statement.acc.op}= {text}{which}"
