"""The host function: Python that allocates, launches and calls ATen, in program order.

It looks like this, one line per run of kernels or Extern:

    def call(*inputs):
        a0, a1, = inputs
        try: frame = take()
        except IndexError: frame = checkout(())
        try:
            n = threads()
            views = frame.views
            kept = weights.snapshot
            if same(kept.state, inputs, 0): kept = weights.refreshed(inputs)
            d2, = kept.tensors
            r0 = empty_strided((8, 128), (128, 1), float32)
            if status := run(frame.state, 0, 3, n, 0, a0.data_ptr(), 7, r0.data_ptr()):
                fail(status, frame)
            e1 = linear_pointwise(views[0], d2, None, 'none', (), '')
            return (r0, e1)
        finally:
            give(frame)

A later call enters no Python function of ours from here: what may be hot is C.

Names: a input, d derived from parameters, c constant, r result, e returned by an Extern, s a size.
All that depends on sizes only (kernel parameters, arena offsets, strided views for Externs) is in
the frame, built once per sizes; every buffer has one slot in the frame's table of pointers. Where
sizes are open the line is `frame = frames[s0, s1,]`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fusee.codegen.llvm import KernelCode
from fusee.loops import Buffer, Extern, Kernel, View
from fusee.loops.lower.tensor import Shape, copied, dense, same_strides, stride_order
from fusee.loops.memory import Plan
from fusee.loops.schedule import checks, first_write, reads, views, writes
from fusee.runtime.launch import FrameSpec, LaunchSpec, Number, StepResult, ViewSpec, empty_strided
from fusee.source import define
from fusee.sym import Expr, Size, Steps, product

# Roles of buffers that are there before a call, and stay for the next.
_KEPT = ("derived", "constant")


class Launch(NamedTuple):
    """What runs kernels that follow each other: one, or several that a target makes one."""

    code: KernelCode
    kernels: Sequence[Kernel]


@dataclass(eq=False)
class HostCode:
    """The host function's source, the names it needs, and how frames are laid out for sizes.

    functions  name -> module of each kernel, in the order that LaunchSpec.function counts in
    layout     what a frame is made of
    is_alone   whether it calls nothing of torch's that autograd or autocast would see
    """

    source: str
    names: dict[str, Any]
    functions: dict[str, str]
    layout: FrameSpec
    is_alone: bool


class HostArguments(NamedTuple):
    """What the host function is called with.

    buffers  per input: its buffer, or None for numbers and for tensors that no step reads
    sizes    symbol -> (input, axis) that it is read from; axis None: the input is the number
    saved    of a backward: the inputs that its forward made for it alone. All come in a list to be
             emptied: each lives until nothing reads it any more
    saves    of a forward: results from this one on are saved for a backward
    gradients results that become gradients of leaves, by number
    spread   they come as arguments, not in a list
    refuse   looks at them where grad mode is on, and may raise
    followed what is kept between calls derives from some of them, and is to follow them
    brought  numbers that come from the CPU, and that the target reads on its own device
    """

    buffers: Sequence[Buffer | None]
    sizes: Mapping[str, tuple[int, int | None]]
    saved: Sequence[int] | None = None
    saves: int | None = None
    gradients: Sequence[int] = ()
    spread: bool = False
    refuse: Callable[[Sequence[Any]], None] | None = None
    followed: bool = False
    brought: Sequence[int] = ()


def emit_host(plan: Plan, launches: Sequence[Launch], arguments: HostArguments) -> HostCode:
    """Write the host function of a schedule."""
    return _Writer(plan, launches, arguments).write()


class _Writer:
    def __init__(self, plan: Plan, launches: Sequence[Launch], arguments: HostArguments) -> None:
        self.plan, self.arguments = plan, arguments
        self.launch_at = {launch.kernels[0]: launch for launch in launches}
        self.schedule, self.graph = plan.schedule, plan.schedule.graph
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "empty_strided": empty_strided,
            "as_strided": torch.as_strided,
        }
        self.variables: dict[Buffer, str] = {}  # buffers that are tensors of the host
        self.slots: dict[Buffer, int] = {}
        self.bound: set[Buffer] = set()  # slots filled in this call
        self.launches: list[Launch] = []
        self.views: list[View] = []  # in the arena, made once
        self.sized: list[View] = []  # those that differ with the sizes
        self.view_keys: dict[tuple[object, ...], str] = {}
        uses: dict[Buffer, int] = {}
        for position, item in enumerate(self.schedule.items):
            for buffer in (*reads(item), *writes(item)):
                uses[buffer] = position
        for view in views(self.schedule.graph.outputs):
            uses[view.buffer] = len(self.schedule.items)
        self.last_use = uses
        self.forms = self._forms()
        roles = ("extern", "large", *(("input",) if arguments.saved is not None else ()))
        self.released_roles = frozenset(roles)
        # heaps of what is alive: (last use, in order of names, buffer), and last uses of large ones
        self.alive: list[tuple[int, int, Buffer]] = []
        self.large: list[int] = []
        self.callables: dict[tuple[str, int], str] = {}
        self.numbers: dict[str, int] = {}  # of callables that would have the same name

    def write(self) -> HostCode:
        head = self._head()
        items = self.schedule.items
        position, unchanged, raises = 0, 0, self.graph.values.profile.raises
        first = first_write(items)
        while position < len(items):
            item, end = items[position], position + 1
            if isinstance(item, Extern):
                self._extern(item, position)
            else:
                end = self._end_of_run(position)
                if raises and position < first and any(map(checks, items[first:end])):
                    end = first
                self._run([k for k in items[position:end] if isinstance(k, Kernel)])
            if position < first:
                unchanged = len(self.lines)
            position, gone = end, []
            while self.alive and self.alive[0][0] < position:  # nothing reads them any more
                gone.append(heapq.heappop(self.alive)[1:])
            if gone:
                self.lines.append(f"del {', '.join(self.variables[b] for _, b in sorted(gone))}")
        texts = [self._constant(output) for output in self.graph.outputs]
        if self.graph.late:  # the grad of a leaf is no view, and may be detached in place
            made = zip(texts, self.graph.outputs, strict=True)
            texts = [f"{x}.data" if isinstance(y, View) and x[-1] == ")" else x for x, y in made]
        results = f"({', '.join(texts)}{',' if texts else ''})"
        is_alone = all(isinstance(item, Kernel) for item in items) and "(" not in results[1:]
        is_alone &= not self.arguments.followed and not self.arguments.brought
        body = ["n = threads()"] if self.launches else []
        body += ["views = frame.views"] if self.views else []
        body += ["sized = frame.sized"] if self.sized else []
        body += self._pinned_lines()
        # whoever takes an error sees by its line whether a caller's tensor was written to before
        self.names["first_write"] = len(head) + len(body) + unchanged + 1
        body += self.lines
        body.append(f"return {results}")
        back = "frames" if self.arguments.sizes else "frame"
        tail = ["    finally:", f"        give({back})", ""]
        source = "\n".join([*head, *("        " + line for line in body), *tail])
        functions = {launch.code.name: launch.code.module for launch in self.launches}
        return HostCode(source, self.names, functions, self._layout([*functions]), is_alone)

    # -------------------------------------------------------------------- names

    def _head(self) -> list[str]:
        """Names for the inputs and sizes, and the frame."""
        for k, item in enumerate(self.arguments.buffers):
            if item is not None:
                self._name(item, f"a{k}")
        for k, kept in enumerate(b for b in self.graph.inputs if isinstance(b, Buffer)):
            if kept.role in _KEPT:
                self.variables[kept] = f"{kept.role[0]}{k}"
        given = self.arguments
        names = [f"a{k}" for k in range(len(given.buffers))]
        lines = []
        if given.refuse is not None:
            self.names.update(is_grad_enabled=torch.is_grad_enabled, refuse=given.refuse)
            lines.append("if is_grad_enabled(): refuse(inputs)")
        lines += [f"{', '.join(names)}, = inputs"] if names else []
        for name, (k, axis) in given.sizes.items():
            lines.append(f"{name} = a{k}" + ("" if axis is None else f".size({axis})"))
        if given.saved is not None:
            lines.append("inputs.clear()")
        lines += [f"a{k} = bring(a{k})" for k in given.brought]
        # another thread may be first
        taken = "frames" if given.sizes else "frame"
        lines += [f"try: {taken} = take()", f"except IndexError: {taken} = checkout(())", "try:"]
        if given.sizes:
            lines.append(f"    frame = frames[{', '.join(given.sizes)},]")
        start = f"def call({'*' * given.spread}inputs):"
        return [start, *(f"    {line}" for line in lines)]

    def _forms(self) -> dict[Buffer, tuple[Shape, Shape]]:
        """The sizes and strides of results that are returned in one other form than kernels have:
        they are made in that one, of which no view is taken then."""
        given = [output for output in self.graph.outputs if isinstance(output, View)]
        named = Counter(view.buffer for view in given)
        for item in self.schedule.items:
            named.update(() if isinstance(item, Kernel) else (*reads(item), *writes(item)))
        found: dict[Buffer, tuple[Shape, Shape]] = {}
        for view in given:
            buffer = view.buffer
            if buffer.role != "result" or named[buffer] != 1 or view.offset != buffer.offset:
                continue
            # it has all elements of the buffer, and neither has holes
            forms = (view.shape, view.strides), (buffer.shape, buffer.strides)
            if product(view.shape) == product(buffer.shape) and all(
                same_strides(shape, strides, dense(shape, stride_order(shape, strides)))
                for shape, strides in forms
            ):
                found[buffer] = forms[0]
        return found

    def _name(self, buffer: Buffer, name: str) -> None:
        """From here on the buffer is a tensor of that name, until its last use."""
        last = self.last_use.get(buffer, -1)
        if buffer.role in self.released_roles:
            heapq.heappush(self.alive, (last, len(self.variables), buffer))
        if buffer.role == "large":
            heapq.heappush(self.large, last)
        self.variables[buffer] = name

    def _pinned_lines(self) -> list[str]:
        """What is kept between calls; pointers to it are bound only when it has changed."""
        names = [name for b, name in self.variables.items() if b.role in _KEPT]
        if not names:
            return []
        lines = ["kept = weights.snapshot"]
        if self.arguments.followed:
            lines.append("if same(kept.state, inputs, 0): kept = weights.refreshed(inputs)")
        lines.append(f"{', '.join(names)}, = kept.tensors")
        pinned = [(slot, self.variables[b]) for b, slot in self.slots.items() if b.role in _KEPT]
        if pinned:
            pairs = ", ".join(f"({slot}, {name}.data_ptr())" for slot, name in pinned)
            lines.append(f"if frame.version != kept.version: frame.bind(kept.version, ({pairs},))")
        return lines

    def _constant(self, value: object) -> str:
        """Python source for a value; what has no exact literal becomes a name."""
        if value is None or isinstance(value, (bool, int, str, Expr)):
            return str(value) if isinstance(value, Expr) else repr(value)
        if isinstance(value, float) and value == value and abs(value) != float("inf"):
            return repr(value)
        if isinstance(value, tuple):
            return "(" + "".join(self._constant(v) + ", " for v in value) + ")"
        if isinstance(value, list):
            if value and all(type(v) is int for v in value):
                return self._constant(tuple(value))  # which is made once, and calls take it as well
            return "[" + ", ".join(map(self._constant, value)) + "]"
        if isinstance(value, View):
            return self._view(value)
        name = str(value).replace("torch.", "") if isinstance(value, torch.dtype) else ""
        if not name.isidentifier():
            name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def _view(self, view: View) -> str:
        """A tensor for a View: the whole tensor, a view made ahead, or one made now."""
        buffer = view.buffer
        form, steps = self.forms.get(buffer, (buffer.shape, buffer.strides))
        whole = (
            view.shape == form
            and view.offset == buffer.offset
            and same_strides(view.shape, view.strides, steps)
        )
        if buffer.role == "scratch":
            place = self._place(view)
            if place not in self.view_keys:
                sizes = (place[0], *view.shape, *view.strides)
                is_sized = any(isinstance(n, Expr) for n in sizes)
                listed = self.sized if is_sized else self.views
                self.view_keys[place] = f"{'sized' if is_sized else 'views'}[{len(listed)}]"
                listed.append(view)
            return self.view_keys[place]
        self._allocate(buffer)
        name = self.variables[buffer]
        if whole:
            return name
        offset = view.offset - buffer.offset
        turned = (view.shape[::-1], view.strides[::-1]) == (buffer.shape, buffer.strides)
        if turned and len(view.shape) == 2 and offset == 0:
            return f"{name}.t()"
        shape, strides = self._constant(view.shape), self._constant(view.strides)
        base = "" if buffer.role in ("result", "large") else f"{name}.storage_offset() + "
        return f"as_strided({name}, {shape}, {strides}, {base}{self._constant(offset)})"

    # -------------------------------------------------------------------- steps

    def _allocate(self, buffer: Buffer) -> None:
        """Results are allocated by the first step that writes them."""
        if buffer in self.variables:
            return
        name = f"{'e' if buffer.role == 'extern' else 'r'}{len(self.variables)}"
        self._name(buffer, name)
        if buffer.role in ("result", "large"):
            form = self.forms.get(buffer, (buffer.shape, buffer.strides))
            shape, strides, dtype = map(self._constant, (*form, buffer.dtype))
            self.lines.append(f"{name} = empty_strided({shape}, {strides}, {dtype})")

    def _end_of_run(self, position: int) -> int:
        """Up to where kernels run in one call: to an Extern, or to where memory can be given back.

        That pays where it is needed: before a kernel that writes a large buffer first.
        """
        items = self.schedule.items
        while self.large and self.large[0] < position:
            heapq.heappop(self.large)
        soonest: float = self.large[0] if self.large else math.inf  # when one can be given back
        met: set[Buffer] = set()
        for end in range(position, len(items)):
            item = items[end]
            if not isinstance(item, Kernel):
                return end
            new = {b for b in writes(item) if b.role == "large" and b not in self.variables} - met
            if new and end > position and soonest < end:
                return end
            met |= new
            soonest = min([soonest, *(self.last_use[b] for b in new)])
        return len(items)

    def _run(self, kernels: Sequence[Kernel]) -> None:
        first = len(self.launches)
        pointers: list[str] = []
        for launch in filter(None, map(self.launch_at.get, kernels)):
            self.launches.append(launch)
            for buffer in launch.code.buffers:
                slot = self.slots.setdefault(buffer, len(self.slots))
                if buffer.role in ("scratch", *_KEPT) or buffer in self.bound:
                    continue
                self._allocate(buffer)
                self.bound.add(buffer)
                pointers.append(f"{slot}, {self.variables[buffer]}.data_ptr()")
        arguments = ", ".join(["frame.state", str(first), str(len(self.launches)), "n", *pointers])
        self.lines.append(f"if status := run({arguments}):")
        self.lines.append("    fail(status, frame)")

    def _extern(self, step: Extern, position: int) -> None:
        base = "".join(c if c.isalnum() else "_" for c in step.name) or "extern"
        call = self.callables.get((base, id(step.call)))
        if call is None:
            call = base
            while call in self.names:
                self.numbers[base] = self.numbers.get(base, 1) + 1
                call = f"{base}_{self.numbers[base]}"
            self.callables[base, id(step.call)] = call
            self.names[call] = step.call
        arguments = [self._constant(argument) for argument in step.args]
        arguments += [f"{key}={self._constant(value)}" for key, value in step.kwargs.items()]
        if step.out:
            outs = [
                self._view(View(b, b.shape, b.strides, b.offset))
                for b in step.results
                if b is not None
            ]
            out = outs[0] if len(outs) == 1 else f"({', '.join(outs)})"
            arguments.append(f"out={out}")
            self.lines.append(f"{call}({', '.join(arguments)})")
            return
        targets = []
        for buffer in step.results:
            if buffer is None:
                targets.append("_")
                continue
            self._allocate(buffer)
            targets.append(self.variables[buffer])
        call_text = f"{call}({', '.join(arguments)})"
        if not targets:
            self.lines.append(call_text)
        elif len(targets) == 1 and not step.many:
            self.lines.append(f"{targets[0]} = {call_text}")
        else:
            self.lines.append(f"{', '.join(targets)}, = {call_text}")
        for buffer in step.results:
            # it must lie as its readers were compiled for; without any, ATen may give None
            if buffer is not None and self.last_use[buffer] > position:
                name, at = self.variables[buffer], self._constant(buffer.strides)
                self.names["laid_out"] = laid_out
                self.lines.append(f"if {name}.stride() != {at}: {name} = laid_out({name}, {at})")

    # -------------------------------------------------------------------- sizes

    def _layout(self, functions: list[str]) -> FrameSpec:
        """All that a frame is made of."""
        position = {name: k for k, name in enumerate(functions)}
        names = [*self.arguments.sizes]
        steps = Steps(names)
        for symbol, ends in self.plan.places:
            steps.greatest(symbol, ends)

        def number(size: Size) -> Number:
            return size if isinstance(size, int) else StepResult(steps.number(size))

        def spec(launch: Launch) -> LaunchSpec:
            code = launch.code
            return LaunchSpec(
                position[code.name],
                tuple(self.slots[b] for b in code.buffers),
                tuple(map(number, code.params)),
                number(code.total),
                number(code.units),
                code.align,
            )

        offsets = self.plan.offsets
        return FrameSpec(
            tuple(map(spec, self.launches)),
            len(self.slots),
            number(self.plan.total_bytes),
            tuple((self.slots[b], number(at)) for b, at in offsets.items() if b in self.slots),
            tuple(ViewSpec(*self._place(view)) for view in self.views),
            len(names),
            tuple(steps.rows),
            *([self._sized(names)] if self.sized else []),
        )

    def _place(self, view: View) -> tuple[Any, torch.dtype, Any, Any]:
        """Of a view of the arena, what a ViewSpec says."""
        buffer = view.buffer
        offset = self.plan.offsets[buffer] + view.offset * buffer.dtype.itemsize
        return offset, buffer.dtype, view.shape, view.strides

    def _sized(self, names: Sequence[str]) -> Callable[..., Any]:
        """A function of the sizes that gives the views which differ with them."""
        places = self.plan.places
        lines = [f"    {symbol} = max{self._constant(ends)}\n" for symbol, ends in places]
        found = self._constant(tuple(map(self._place, self.sized)))
        text = f"def sized({', '.join(names)}):\n{''.join(lines)}    return {found}\n"
        given = text, "sized", "views", dict(self.names)
        made: Any = define(*given)
        made.defined = given  # another process does that again
        return made  # type: ignore[no-any-return]


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy of `tensor` with these strides, unless they differ only where its size is 1 or 0."""
    if tensor.numel() == 0 or same_strides(tuple(tensor.shape), tensor.stride(), strides):
        return tensor
    return copied(tensor, tensor.shape, strides)
