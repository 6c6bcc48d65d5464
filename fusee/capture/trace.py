"""One capture: from where a function stands to its return or to what no graph can hold.

If something breaks the graph in the function itself or in anything that it calls, the function is
run on the machine again, up to the instruction of its own that led there. So a graph ends between
two instructions of one function, and the stack that is alive there is that function's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from fusee.capture import modes
from fusee.capture.breaks import Forbidden, GraphBreak
from fusee.capture.bytecode import parameters
from fusee.capture.captured import Captured, Place
from fusee.capture.facts import Facts, Source
from fusee.capture.failures import Failing, generator_states
from fusee.capture.frame import UNBOUND, Frame
from fusee.capture.machine import Machine
from fusee.capture.numbers import Specialise, is_learning_rate
from fusee.capture.opcodes import refused
from fusee.capture.origin import Local, Origin, is_buffer
from fusee.capture.policy import Policy
from fusee.capture.rebuild import Lost, Rebuild
from fusee.capture.record import effects
from fusee.capture.regions import is_error
from fusee.capture.stand_ins import left
from fusee.capture.torch_api import (
    State,
    is_transforming,
    plain_tensor,
    set_grad_enabled,
    state_conditions,
    state_restored,
    without_function_modes,
)
from fusee.errors import RegionError, source_line
from fusee.runtime import collector

__all__ = ["capture"]


def capture(
    place: Place, values: Mapping[str, Any], policy: Policy, varying: Collection[str] = ()
) -> Captured:
    """Capture what follows `place` with `values` for its parameters.

    varying   floats from outside that are inputs of the graph, by the words of their origins
    """
    limit, stop = -1, None
    conditions = state_conditions()
    why = refused(place.function.__code__)
    if is_transforming():
        why = "it is called within a transform of torch.func or forward-mode autograd"
    if why:
        return Captured(place, Facts(), conditions, eager=why)
    constant: set[str] = set()

    def varies(origin: Origin) -> bool:
        may = (bool(varying) and str(origin) in varying) or is_learning_rate(origin)
        return may and str(origin) not in constant

    while True:
        attempt = _Attempt(place, values, policy, conditions, varies)
        try:
            with (
                collector.paused(), state_restored(), left(attempt.machine),
                without_function_modes() as attempt.modes, attempt.recorder,
            ):  # fmt: skip
                try:
                    returned = attempt.run(limit)
                except Exception as error:  # noqa: BLE001  # whatever the program raises
                    # run again by Python, the program raises with its own traceback
                    attempt.captured.eager = f"it raises {type(error).__name__}: {error}"
                    attempt.captured.raises = True
                    return attempt.captured
                return attempt.finish(returned, stop)
        except Specialise as needed:
            constant |= needed.origins
        except Forbidden as found:
            where = source_line(attempt.where)
            raise RegionError(found.reason, where=where, remedy=found.remedy) from None
        except GraphBreak as found:
            found.is_error = is_error(attempt.world)
            if stop is not None:
                attempt.captured.eager = f"it broke in two places: {found.reason}"
                return attempt.captured
            found.where = found.where or attempt.where
            # not with the frames that it went through, and what they hold
            limit, stop = attempt.entered, found.with_traceback(None)
        except Lost as lost:
            attempt.captured.eager = lost.reason
            if stop is not None:
                attempt.captured.breaks.append(stop)
            return attempt.captured
        finally:
            attempt.release()


class _Attempt:
    """One run of the machine."""

    def __init__(
        self,
        place: Place,
        values: Mapping[str, Any],
        policy: Policy,
        conditions: tuple[list[str], dict[str, Any]],
        varies: Callable[[Origin], bool],
    ) -> None:
        self.place = place
        self.machine = Machine(policy, varies)
        self.world = self.machine.world
        self.captured = Captured(place, self.world.facts, conditions)
        self.recorder = self.world.recorder
        self.count = 0
        self.entered = 0
        self.where = ""
        self.values = values
        self.state = State.now()
        self.modes: list[Any] = []

    def release(self) -> None:
        """Let go of all objects at once: Python would find such circles much later."""
        self.values = {}
        for part in (self.world.recorder, self.world, self.machine):
            vars(part).clear()

    def run(self, limit: int) -> bool:
        """Run to the return, or to the instruction number `limit`. Whether it returned."""
        self.frame = self._start()
        frame, machine = self.frame, self.machine
        modes.load(machine, self.modes)
        machine.frames.append(frame)
        while self.count != limit:
            if not machine.inference:  # else a break ends the graph before the mode begins
                self.entered = self.count
            try:
                stopped = frame.step()
            except GraphBreak:
                self.where = machine.where() or frame.where
                raise
            self.count += 1
            if stopped:
                return True
        return False

    def _start(self) -> Frame:
        place, world = self.place, self.world
        function = world.hold(place.function, place.function.__qualname__)
        world.know_cells(function)
        f = Frame.of(self.machine, function)
        loaded = {n: world.load(self.values[n], Local(n)) for n in place.parameters}
        if place.at < 0:
            f.locals = loaded
            return f
        f.at = place.at
        f.locals = {name: loaded[name] for name in place.names}
        f.stack = [loaded[f".s{k}"] for k in range(place.depth)]
        f.cells.update({name: loaded[f".c_{name}"] for name in place.cells})
        self.machine.handled = loaded.get(".h")
        return f

    # ---------------------------------------------------------------------- the end

    def finish(self, returned: bool, stop: GraphBreak | None) -> Captured:
        """Write the source of what runs, and close the graph."""
        found, f = self.captured, self.frame
        source = Source(self.world.facts.kinds, {modes.PLACE: "_modes"})
        if self.world.seen and self.machine.policy.is_exporting:
            raise Lost("an exported graph takes and gives plain tensors alone, no subclasses")
        rebuild = Rebuild(self.machine, source)
        if returned:
            result = rebuild.value(f.result)
        else:
            found.stop, found.at, found.keywords = stop, f.at, f.keywords
            result = self._state(rebuild)
        rebuild.effects()
        for made, inner in self.machine.generators.values():
            is_alive = inspect.getgeneratorstate(made) == inspect.GEN_SUSPENDED
            if is_alive and inner.cleans_up and not rebuild.has(made):
                raise Lost("a generator within try or with is dropped, and closed by Python then")
        code = self.place.function.__code__
        takes_named = self.place.at < 0 and code.co_flags & inspect.CO_VARKEYWORDS
        self.world.separate(self.values[parameters(code)[-1]] if takes_named else None)
        # whether or not a compiled graph switches global state, a piece does so after it
        for function, args in self.state.switches(State.now()):
            listed = ", ".join(map(source.constant, args))
            rebuild.lines.append(f"{source.constant(function)}({listed})")
        has_modes = self.modes or self.machine.modes
        if has_modes:
            rebuild.lines.append(f"_modes[:] = {rebuild.value(self.machine.modes)}")
        self.world.recorder.leave(self.state)
        graph = self.world.recorder.finish(rebuild.outputs)
        is_other = self.recorder.inference not in (None, torch.is_inference_mode_enabled())
        found.inference = self.recorder.inference if is_other else None
        found.grad = ambient = self.state.grad if not is_other else not found.inference
        if not self.machine.policy.is_exporting:
            found.grad = self.world.recorder.without_switches(graph.graph, ambient)
        inputs = self._inputs(graph, source)
        lines = list(source.lines)
        if self.world.recorder.is_needed(graph):
            found.graph = graph
            before, call, failed = self._guarded(graph, inputs, source)
            if found.grad != ambient:
                switch = source.constant(set_grad_enabled)
                call = [f"{switch}({found.grad})", *call, f"{switch}({ambient})"]
            if is_other:
                mode = source.constant(torch.inference_mode)
                call = [f"with {mode}({found.inference}):", *(f"    {line}" for line in call)]
            lines += [*before, *call]
        else:
            failed = f"{source.constant(Failing(None, self.state, False))}(_error)"
        for text in rebuild.later():
            lines += [f"try: {text}", f"except Exception as _error: {failed}"]
        lines += [*rebuild.lines, f"return {result}"]
        if has_modes:
            without = source.constant(without_function_modes)
            lines = [f"with {without}() as _modes:", *(f"    {line}" for line in lines)]
        body = "\n".join(f"    {line}" for line in lines)
        found.source = f"def run({', '.join(self.place.variables)}):\n{body}\n"
        found.names = source.names
        found.taken, found.answers = self.world.taken, self.recorder.answers
        found.passing = ", ".join(dict.fromkeys(self.world.passing))
        return found

    def _guarded(
        self, graph: fx.GraphModule, inputs: list[str], source: Source
    ) -> tuple[list[str], list[str], str]:
        """What comes before the call of a graph, the call, and what takes later errors."""
        nodes, before, more = list(graph.graph.nodes), [], ""
        changes = self.recorder.changes_inputs(nodes)
        if not changes and any("draws" in effects(n) for n in nodes):
            with torch._C.DisableTorchFunction():
                is_on_gpu = any(x.is_cuda for x in self.captured.examples)
            states = generator_states(is_on_gpu)
            before = [f"_before = {source.constant(states)}()"]
            more = ", _before"
        given = "".join(f"{name}, " for name in inputs)
        failed, after = (
            source.constant(Failing(eagerly, self.state, changes)) for eagerly in (graph, None)
        )
        call = [
            f"try: _out = _graph({given})",
            f"except Exception as _error: {failed}(_error, ({given}){more})",
        ]
        return before, call, f"{after}(_error, (){more})"

    def _inputs(self, graph: fx.GraphModule, source: Source) -> list[str]:
        """Sources of the graph's inputs."""
        inputs = []
        for node in graph.graph.find_nodes(op="placeholder"):
            real, origin = self.world.inputs[id(node.meta["example_value"])]
            inputs.append(source.variable(origin))
            self.captured.inputs.append(origin)
            fake = node.meta["example_value"]
            if id(fake) in self.world.seen:
                real = plain_tensor(real)
                with torch._C.DisableTorchFunction():
                    if (fake.shape, fake.stride()) != (real.shape, real.stride()):
                        raise Lost("the layout of a subclass' instance changes in place")
            self.captured.examples.append(real)
            node.meta["is_buffer"] = is_buffer(origin)
        return inputs

    def _state(self, rebuild: Rebuild) -> str:
        """What is alive before the next instruction: variables, stack, cells, exception."""
        f = self.frame
        names = [(n, v) for n, v in f.locals.items() if v is not UNBOUND]
        variables = ", ".join(f"{name!r}: {rebuild.value(value)}" for name, value in names)
        stack = "".join(f"{rebuild.value(x)}, " for x in f.stack)
        own = {n: c for n, c in f.cells.items() if n not in f.code.co_freevars}
        cells = ", ".join(f"{name!r}: {rebuild.value(cell)}" for name, cell in own.items())
        handled = rebuild.value(self.machine.handled)
        return f"{{{variables}}}, [{stack}], {{{cells}}}, {handled}"
