"""What graphs are compiled for. A target is one folder here and one row of TARGETS.

Everything that is true of one machine alone stands behind its `Target`: what loops and saved values
cost (numbers), which operators stay calls and how they are called, which passes prepare a graph for
them, and how a schedule of kernels becomes something that runs. What comes before knows none. What
all do alike, kernels, calls and memory of a schedule as one function, is here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee import log
from fusee.aten.rewriter import Pass
from fusee.autodiff.min_cut import Prices
from fusee.codegen import HostArguments, HostCode, Launch, emit_host
from fusee.codegen.llvm import KernelCode
from fusee.config import Options
from fusee.loops import Buffer, Kernel, Message, Profile, Value
from fusee.loops.lower import ExternSpec
from fusee.loops.memory import Plan
from fusee.loops.schedule import Given, form
from fusee.runtime.change_detection import DerivedSet, Fixed
from fusee.runtime.jit import Build, Function, defer, prepare
from fusee.runtime.launch import Frames, Program
from fusee.source import HostFunction, define

# Entered for each stage, with its name.
Timed = Callable[[str], AbstractContextManager[object]]
# The tensors that are kept between calls: those derived from parameters, then constants. Those of
# its `snapshot`, which follows parameters if the HostArguments say so.
Kept = DerivedSet | Fixed


class Emitted(NamedTuple):
    """What a schedule became: text and numbers, of which any process on the same kind of machine
    makes what runs.

    arguments  what the host function is called with
    messages   what is raised for the numbers that kernels report
    own        what else the target makes it of
    """

    host: HostCode
    arguments: HostArguments
    messages: Sequence[Message]
    own: Any = None


class Loaded(NamedTuple):
    """A graph that runs.

    run         from the graph's inputs, as the HostArguments say, to its results; writes are done
    replays     what there is to say of calls that are recorded and replayed
    uses        what a kernel of some name takes of the machine
    """

    run: Callable[..., Sequence[Any]]
    replays: Callable[[], str] | None = None
    uses: Callable[[str], str] | None = None


class Batches(Protocol):
    """What makes one launch of several."""

    def takes(self, batch: Sequence[Launch], launch: Launch) -> bool:
        """Whether a launch can be one with those before it; asked of each in order."""
        ...

    def join(self, batch: Sequence[Launch]) -> Launch: ...


class Target(Protocol):
    """One kind of machine: a class below this one, which has what most need say nothing of."""

    @property
    def profile(self) -> Profile:
        """What decides on loops: lowering, fusion and loop order ask nothing else."""
        ...

    @property
    def prices(self) -> Prices:
        """What decides between saving a value for the backward and computing it again."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors are that loops read and write."""
        ...

    def at(self, device: torch.device) -> Target:
        """The one machine of this kind where tensors of a device are."""
        return self

    def prepare(self) -> None:
        """Begin to load what takes time, before a graph is traced. raises MissingPackage"""
        prepare()

    def passes(self, options: Options) -> Sequence[Pass]:
        """What rewrites an ATen graph for the calls that there are."""
        ...

    def joint_passes(self, options: Options) -> Sequence[Pass]:
        """What rewrites a graph with its gradients, before it is known what is saved."""
        return ()

    def improves(self, node: fx.Node, static: Collection[fx.Node]) -> bool:
        """Whether a pass makes a faster call of this one, as eager cannot.

        static   nodes whose values stay the same from call to call
        """
        return False

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        """How to call an operator that has no loops; None: the overload itself is called."""
        ...

    def settings(self) -> Hashable:
        """Those of torch's that passes and calls are chosen by."""
        ...

    def build(self, options: Options) -> Build:
        """What makes machine code of kernels."""
        ...

    def code_of(
        self, messages: Sequence[Message], options: Options
    ) -> Callable[[Kernel], KernelCode]:
        """What writes a kernel of a graph with these messages."""
        ...

    def given(self, kernel: Kernel) -> Mapping[Value, Given]:
        """The constants of a kernel that are passed to it."""
        return {}

    def batches(self, plan: Plan) -> Batches | None:
        """What makes one launch of several, if anything does."""
        return None

    def own(self, plan: Plan, launches: Sequence[Launch], arguments: HostArguments) -> Any:
        """What a target keeps of a graph besides: `Emitted.own`."""
        return None

    def emit(
        self, plan: Plan, arguments: HostArguments, build: Build, options: Options, timed: Timed
    ) -> tuple[Emitted, Mapping[Kernel, str]]:
        """Kernels and calls of a schedule, with their memory; and the names of what kernels became:
        those that share a function have equal names.

        build  is given each kernel as soon as it is written
        """
        with timed("emit"):
            launches = self._launches(plan, build, options)
            placed, room = plan.with_room(code.shared for code, _ in launches)
            for k, (code, kernels) in enumerate(launches):
                if room is not None and code.shared != 0:
                    launches[k] = Launch(code._replace(buffers=(*code.buffers, room)), kernels)
        own, messages = self.own(plan, launches, arguments), plan.schedule.graph.messages
        with timed("host"):
            host = emit_host(placed, launches, arguments)
            log.publish("host", "", host.source)
        emitted = Emitted(host, arguments, messages, own)
        return emitted, {kernel: code.name for code, kernels in launches for kernel in kernels}

    def _launches(self, plan: Plan, build: Build, options: Options) -> list[Launch]:
        """In order; `build` is given the code of each once."""
        emit = self.code_of(plan.schedule.graph.messages, options)
        batches = self.batches(plan)
        named: dict[str, KernelCode] = {}
        forms: dict[Hashable, tuple[KernelCode, list[Buffer]]] = {}
        found: list[Launch] = []
        batch: list[Launch] = []  # of one kernel each

        def end() -> None:
            if batch:
                joined = batch[0] if batches is None or len(batch) == 1 else batches.join(batch)
                found.append(joined)
                batch.clear()
                code = found[-1].code
                if named.setdefault(code.name, code) is code:
                    build.add(code.module)

        for item in plan.schedule.items:
            if not isinstance(item, Kernel):
                end()
                continue
            numbers = self.given(item)
            key, buffers = form(item, numbers)
            if key not in forms:
                forms[key] = emit(item), buffers
            twin, theirs = forms[key]
            ours, params = dict(zip(theirs, buffers, strict=True)), [*twin.params]
            for place, number in zip(twin.given, numbers.values(), strict=True):
                params[place] = number.word
            code = twin._replace(buffers=tuple(ours[b] for b in twin.buffers), params=tuple(params))
            launch = Launch(code, (item,))
            if batches is None or not batches.takes(batch, launch):
                end()
            batch.append(launch)
        end()
        return found

    def load(self, emitted: Emitted, build: Build, kept: Kept, options: Options) -> Loaded:
        """What runs.

        build             has the kernels of `emitted.host`, in their order
        raises (when run) as eager does for an index outside of its dimension, a divisor of zero
        """
        ...


# Device -> what graphs are compiled for there, or the module that has it as TARGET: it is imported
# when a tensor is on such a device.
TARGETS: dict[str, Target | str] = {"cpu": "fusee.targets.cpu", "cuda": "fusee.targets.cuda"}


def target_at(device: torch.device) -> Target:
    """The machine where tensors of a device are, of a kind in TARGETS."""
    target = TARGETS[device.type]
    if isinstance(target, str):
        target = TARGETS[device.type] = importlib.import_module(target).TARGET
    return target.at(device)


aten = torch.ops.aten

# `out` only where the kernel writes into the given memory itself, of any row stride, and where what
# it writes does not depend on the strides of the result.
PRODUCTS: dict[OpOverload, ExternSpec] = {
    aten.mm.default: ExternSpec(torch.mm, torch.mm),
    aten.bmm.default: ExternSpec(torch.bmm, torch.bmm),
    aten.addmm.default: ExternSpec(torch.addmm, torch.addmm),
    aten.baddbmm.default: ExternSpec(torch.baddbmm, torch.baddbmm),
    aten.mv.default: ExternSpec(torch.mv, torch.mv),
    aten.addmv.default: ExternSpec(torch.addmv, torch.addmv),
    aten.convolution.default: ExternSpec(torch.convolution, owns=True),
    aten.convolution_backward.default: ExternSpec(aten.convolution_backward.default, owns=True),
}


def load_graph(
    host: HostCode,
    build: Build,
    kept: Kept,
    names: Mapping[str, Any],
    arena: Callable[[int], Tensor] | None = None,
) -> tuple[HostFunction, Callable[[str], str]]:
    """The host function with what it calls, and `Loaded.uses`. See Target.load.

    names   what the host function calls: `run`, `threads`, `fail`, and what differs from the CPU
    arena   gives memory for what lies between kernels
    """

    def functions() -> Mapping[str, Function]:
        return dict(zip(host.functions, build.finish(), strict=True))

    def program() -> Program:
        return Program([*functions().values()], host.layout, arena=arena)

    run = bind_host(host, program, kept, names)
    defer(build.finish)
    return run, lambda name: build.uses(functions()[name])


def bind_host(
    host: HostCode, program: Callable[[], Program], kept: Kept, names: Mapping[str, Any]
) -> HostFunction:
    """The host function, bound to what it runs with: its kernels and the tensors that are kept.

    program   gives the kernels; the first call asks for them
    """
    program = functools.cache(program)
    waiting: list[Any] = []  # what no call uses; its pop and append are atomic

    def checkout(sizes: tuple[int, ...]) -> Any:
        frames = Frames(program())
        return frames if host.layout.inputs else frames[sizes]

    call: Any = define(
        host.source,
        "call",
        "host",
        {
            **host.names,
            "take": waiting.pop,
            "give": waiting.append,
            "checkout": checkout,
            "weights": kept,
            "same": kept.same if isinstance(kept, DerivedSet) else None,
            **names,
        },
    )
    made: HostFunction = call
    made.is_alone = host.is_alone
    return made
