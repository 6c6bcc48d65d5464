"""What emission knows at a point of a kernel: open loops, names of sizes and buffers, the lanes.

Rank: the loops of a kernel in nesting order; 0 is the function's entry, 1 one point of the parallel
axes, then ordered axes, the outer lanes axis if there is one, inner axes. Everything is emitted at
the rank of the deepest axis it depends on, so nothing is computed more often than it changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusee.codegen.llvm.ops import Target
from fusee.codegen.llvm.text import Level, Writer
from fusee.codegen.llvm.types import Machine, vector
from fusee.loops.ir import Acc, Buffer, Kernel, Store, Value, index_of
from fusee.sym.expr import Atom, Call, Size, Symbol

# An index as terms: (atoms that change inside the kernel, their coefficient made of sizes).
Group = tuple[tuple[Atom, ...], Size]
Fact = tuple[int, bool]  # rank, and whether it differs between lanes

# Loops of at most this many points keep their size in the text: LLVM may unroll them.
STATIC_SIZE = 16


class Context:
    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel = kernel
        self.machine = machine
        self.writer = Writer()
        self.ranked: list[Level] = [self.writer.top]
        self.axis_number: dict[Symbol, int] = {}
        for axis in (*kernel.outer, *(a for phase in kernel.phases for a in phase.inner)):
            self.axis_number.setdefault(axis, len(self.axis_number))
        self.axis_rank: dict[Symbol, int] = {}
        self.axis_name: dict[Symbol, str] = {}
        self.loop_axes: set[Symbol] = set()  # axes whose variable is that of an open loop
        # of the deepest outer axis: what one phase stores there, the next may load
        self.base_rank = 1
        self.params: dict[tuple[object, Size], str] = {}
        self.buffers: dict[Buffer, str] = {}
        self.stored = {s.buffer for s in kernel.statements() if isinstance(s, Store)}
        self.payloads: dict[int, int] = {}
        self.groups: dict[Size, list[Group]] = {}
        self.facts: dict[int, Fact] = {}
        self.acc_facts: dict[Acc, Fact] = {}
        self.acc_names: dict[Acc, str | list[str]] = {}
        self.uses_spare = False
        self.arrays: list[str] = []  # instructions that make room for accumulators
        self.uses_status = False
        # the vectors of the loop being written; lane is None where everything is scalar
        self.lane: Symbol | None = None
        self.lanes = 1
        self.copies = 1
        self.mask: str | None = None
        self.copy_axis: Symbol | None = None  # along which copies run, if not along the lanes

    # -------------------------------------------------------------------------- places

    def target(self, rank: int, lanes: int) -> Target:
        return Target(self.ranked[rank], self.machine, lanes)

    def open_axis(self, axis: Symbol, name: str, rank: int) -> None:
        """The top level becomes the body of `axis`."""
        del self.ranked[rank:]
        self.ranked.append(self.writer.top)
        self.axis_rank[axis] = rank
        self.axis_name[axis] = name
        self.loop_axes.add(axis)

    # -------------------------------------------------------------------------- names

    def param(self, role: object, size: Size) -> str:
        """The register of a size that the host passes. Equal sizes in one role share it.

        The role keeps sizes apart that are equal by chance, so that a kernel's text does not depend
        on them.
        """
        name = self.params.get((role, size))
        if name is None:
            number = len(self.params)
            name = self.params[role, size] = f"%p{number}"
            entry = self.ranked[0]
            address = entry.op(f"getelementptr i64, ptr %params, i64 {number}")
            entry.do(f"{name} = load i64, ptr {address}")
        return name

    def size_of(self, axis: Symbol) -> str:
        """The trip count of an axis, as a literal if it is a short inner one."""
        assert axis.hi is not None
        if isinstance(axis.hi, int) and axis.hi <= STATIC_SIZE and axis not in self.kernel.outer:
            return str(axis.hi)
        return self.param(("size", self.axis_number[axis]), axis.hi)

    def buffer(self, buffer: Buffer) -> str:
        name = self.buffers.get(buffer)
        if name is None:
            number = len(self.buffers)
            name = self.buffers[buffer] = f"%b{number}"
            entry = self.ranked[0]
            address = entry.op(f"getelementptr ptr, ptr %bufs, i64 {number}")
            entry.do(f"{name} = load ptr, ptr {address}")
        return name

    def status(self) -> str:
        """The address of the status word."""
        self.uses_status = True
        return "%status"

    def spare(self) -> str:
        """Memory that lanes excluded by a mask may read and write."""
        self.uses_spare = True
        return "%spare"

    def array(self, size: int) -> str:
        """That many bytes of memory of this thread."""
        name = f"%array{len(self.arrays)}"
        self.arrays.append(f"{name} = alloca [{size} x i8], align 64")
        return name

    # -------------------------------------------------------------------------- facts

    def learn(self, order: Iterable[Value]) -> None:
        """Find rank and variation of values, operands first."""
        facts = self.facts
        for value in order:
            if value.op == "acc":
                facts[id(value)] = self.acc_facts[value.attr]
                continue
            rank, varies = 0, False
            for arg in value.args:
                arg_rank, arg_varies = facts[id(arg)]
                rank, varies = max(rank, arg_rank), varies or arg_varies
            index = index_of(value)
            if not isinstance(index, int):
                index_rank, index_varies = self.size_fact(index)
                rank, varies = max(rank, index_rank), varies or index_varies
            if value.op == "load" and value.attr[0] in self.stored:
                rank = max(rank, self.base_rank)
            facts[id(value)] = rank, varies

    def size_fact(self, size: Size) -> Fact:
        rank, varies = 0, False
        if isinstance(size, int):
            return rank, varies
        for mono in size.terms:
            for atom in mono:
                atom_rank, atom_varies = self.atom_fact(atom)
                rank, varies = max(rank, atom_rank), varies or atom_varies
        return rank, varies

    def atom_fact(self, atom: Atom) -> Fact:
        if isinstance(atom, Symbol):
            if atom in self.axis_rank:
                return self.axis_rank[atom], atom in (self.lane, self.copy_axis)
            if atom.payload is not None:
                return self.facts[id(atom.payload)]
            return 0, False
        assert isinstance(atom, Call)
        a, b = self.size_fact(atom.a), self.size_fact(atom.b)
        return max(a[0], b[0]), a[1] or b[1]

    # -------------------------------------------------------------------------- values

    def scalar(self, value: Value) -> str:
        """The register or literal of a value that does not differ between lanes."""
        found = self.ranked[self.facts[id(value)][0]].known[id(value)]
        assert isinstance(found, str)
        return found

    def vectors(self, value: Value) -> list[str]:
        """The registers of a value for every copy; splat if it is the same in all lanes."""
        rank, varies = self.facts[id(value)]
        found = self.ranked[rank].known[id(value)]
        if varies:
            assert isinstance(found, list)
            return found
        assert isinstance(found, str)
        return [self.splat(found, self.held(value), rank)] * self.copies

    def held(self, value: Value) -> str:
        return Target(self.writer.top, self.machine, 1).kind(value.dtype)

    def splat(self, name: str, kind: str, rank: int) -> str:
        """A scalar in all lanes."""
        if not name.startswith("%"):
            return f"splat ({kind} {name})"
        level = self.ranked[rank]
        key = ("splat", name, self.lanes)
        found = level.known.get(key)
        if found is None:
            full = vector(kind, self.lanes)
            one = level.op(f"insertelement {full} poison, {kind} {name}, i64 0")
            found = level.known[key] = level.op(
                f"shufflevector {full} {one}, {full} poison, <{self.lanes} x i32> zeroinitializer"
            )
        assert isinstance(found, str)
        return found
