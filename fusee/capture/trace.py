"""One capture: from where a function stands to its return or to what no graph can hold.

If something breaks the graph in the function itself or in anything that it calls, the graph ends
before the instruction of its own that led there: between two instructions of one function, with the
stack that is alive there. If that instruction had done something by then, the function is run on
the machine again, up to it.
"""

from __future__ import annotations

import inspect
import itertools
import types
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fusee.capture import tensor_objects
from fusee.capture.builtins import left, special
from fusee.capture.bytecode import Line, overwritten, parameters, program, without_ours
from fusee.capture.captured import Captured, Place, tells_of_its_end
from fusee.capture.dynamic import Number, Specialise, Varying
from fusee.capture.effects import (
    BODY,
    Repeated,
    around,
    asks_for_gradients,
    cuts,
    effects,
    is_asked,
    is_check,
    written_by,
)
from fusee.capture.frame import FIXED, FUNCTIONS, OPCODES, Frame, is_scalar
from fusee.capture.graph_break import (
    Anew,
    Breaking,
    Failing,
    Forbidden,
    GraphBreak,
    Lost,
    Opaque,
    cpu_state,
    cuda_states,
    expected,
    is_in_place,
    storages,
)
from fusee.capture.guards import GONE, Facts, IdMatch, NoOverlap, Values, overlap
from fusee.capture.interpreter import Interpreter
from fusee.capture.mirrors import Later
from fusee.capture.policy import Policy
from fusee.capture.reconstruct import Rebuild, is_error, require_normal
from fusee.capture.sources import Held, Local, Origin, Several, Source, is_buffer, looking
from fusee.capture.symbols import concrete, is_open
from fusee.capture.torch_api import (
    STATE_SWITCHES,
    FakeTensor,
    State,
    no_torch_function,
    plain_tensor,
    set_grad_enabled,
    state_conditions,
    state_restored,
    within_transform,
    without_function_modes,
)
from fusee.errors import source_line
from fusee.fake.torch_python import heard
from fusee.runtime import gc_paused
from fusee.runtime.cache import APART, MOST_CUTS

_INSTRUCTIONS = 12  # for each node, at most, of what Python runs as quickly as the captured program
_ENTERING = 8  # instructions take as long as entering a function
_PROBES = 64  # places that are tried for a piece that must end earlier, and more ever further on


_TRANSFORMED = "it is called within a transform of torch.func or forward-mode autograd"


def capture(
    place: Place, values: Values, policy: Policy, varies: Varying | None = None
) -> Captured:
    """Capture what follows `place` with `values` for its parameters.

    varies   which numbers and sizes from outside are inputs of the graph
    """
    limit, stop = expected(place.function.__code__ if place.at < 0 else None)
    first, why, raising = stop, "", Facts()
    is_compiling, anew, conditions, results = True, set[str](), state_conditions(), Repeated()
    if within_transform():
        return Captured(place, Facts(), conditions, eager=_TRANSFORMED)
    (varies := varies or Varying()).begin()
    while True:
        attempt = _Attempt(place, values, policy, conditions, varies)
        attempt.machine.is_compiling = is_compiling
        attempt.machine.checks = None if "unchecked" in anew else []
        attempt.recorder.begins(anew, results)
        attempt.world.begins(anew)
        try:
            with (
                gc_paused(), without_function_modes() as attempt.modes, state_restored(),
                left(attempt.machine), attempt.recorder, heard(attempt.hear),
            ):  # fmt: skip
                returned = attempt.run(limit, is_probed=bool(why))
                if (found := attempt.stop) is not None:
                    limit, stop, first = attempt.entered, found, first or found
                if not why:
                    attempt.captured.breaks += [first] if first not in (None, stop) else []
                    attempt.captured.facts.include(raising)
                    return attempt.finish(returned, stop)
            limit, stop, why = attempt.whole, GraphBreak(why, where=attempt.whole_where), ""
        except Specialise as needed:
            for words in needed.origins:
                varies.need(words)
        except Anew as found:
            anew, limit, stop, first = anew | {found.how}, -1, None, None
        except Forbidden as found:
            where = source_line(attempt.where)
            raise found.kind(found.reason, where=where, remedy=found.remedy) from None
        except GraphBreak as found:
            attempt.told(found)
            if found.raises and is_compiling and attempt.machine.asks_compiling:
                is_compiling, limit, stop, first = False, -1, None, None  # as in eager, then
            elif attempt.is_over or 0 <= limit <= attempt.entered:
                why = found.reason
            else:
                limit, stop = attempt.entered, found
                first = first or stop
                if found.raises:  # a call for which those hold raises too
                    raising = attempt.captured.facts
        except Lost as lost:
            why = lost.reason
            attempt.captured.is_around = not attempt.is_over  # no shorter piece would do
        finally:
            attempt.release()
        attempt.captured.take_back()  # a piece that ends before a step leaves its state to Python
        if why and (limit == 0 or policy.is_exporting or attempt.captured.is_around):
            attempt.captured.eager = why
            return attempt.captured


class _Attempt:
    """One run of the machine.

    stop   the break that ended it where it could end at once
    """

    def __init__(
        self,
        place: Place,
        values: Values,
        policy: Policy,
        conditions: dict[str, Any],
        varies: Varying,
    ) -> None:
        self.place = place
        self.machine = Interpreter(policy, varies)
        self.world = self.machine.world
        self.captured = Captured(place, self.world.facts, conditions, begun=varies.begun)
        self.recorder = self.machine.recorder
        self.recorder.tells_writes = varies.tells_writes
        self.entered = 0
        self.where = ""
        self.whole = 0
        self.whole_where = ""
        self.opaque: list[Opaque] = []
        self.raised: dict[int, tuple[BaseException, int]] = {}  # by id: when it was raised first
        self.values = values
        self.state = State.now()
        self.modes: list[Any] = []
        self.kept: list[int] = []  # by id, what its variables hold as the function returns
        self.is_over = False
        self.stop: GraphBreak | None = None

    def told(self, found: GraphBreak) -> GraphBreak:
        """A break of this, and what is to be said of it."""
        found.is_error = is_error(self.world)
        found.with_traceback(None).__context__ = None  # whose frames know all that is alive
        found.where = found.where or self.where
        return found

    def release(self) -> None:
        """Let go of all objects at once: Python would find such circles much later."""
        self.values = {}
        self.raised.clear()
        for part in (*self.machine.frames, self.recorder, self.world, self.machine):
            vars(part).clear()

    def run(self, limit: int, *, is_probed: bool = False) -> bool:
        """Run to the return, or to the instruction number `limit`. Whether it returned.

        is_probed   whether to find the last place before that at which a piece can end
        """
        self.frame = self._start()
        frame, machine = self.frame, self.machine
        tensor_objects.load(machine, self.modes)
        machine.frames.append(frame)
        while frame.count != limit:
            if not machine.regions:  # else a break ends the graph before they begin
                self.entered = frame.count
                step = frame.count // _PROBES + 1
                if is_probed and frame.count % step == 0 and self._can_end():
                    self.whole, self.whole_where = frame.count, frame.where
            raises, begun = None, None
            if not is_probed and frame.count == self.entered:
                begun = self._begun()
            try:
                for x in self.opaque:  # only Python moves on what no capture can look at
                    if any(x is y for y in self.frame.stack):
                        raise x.met()
                stopped, begun = frame.step(), None
                if stopped and machine.regions:
                    raise GraphBreak("a region that is entered goes on after the function")
                if stopped:  # and what nobody else has ends
                    held = frame.locals.values()
                    if not any(map(machine.is_closed, held)):  # else in the order of variables
                        self.kept = [*map(id, held)]
                    del held
                    frame.clear()
                if machine.pending is not None:
                    raise machine.pending
            except GraphBreak as found:
                self.where = machine.where() or frame.where
                if machine.regions or not machine.is_compiling:
                    found.within = ()
                if begun is None or begun[2] != self._reached() or isinstance(found, Forbidden):
                    raise
                (frame.stack, frame.keywords, _), self.stop = begun, self.told(found)
                return False
            except (Exception, GeneratorExit) as error:  # noqa: BLE001  # whatever it raises
                raises = self._raises(error)
            if raises is not None:  # not above: the break would keep the error as its context
                raise raises
            if frame.unwound is not None:
                self.raised.setdefault(id(frame.unwound), (frame.unwound, self.entered))
                frame.unwound = None
            frame.count += 1
            if stopped:
                return True
        return False

    def _begun(self) -> tuple[list[Any], tuple[str, ...], Any] | None:
        """Stack and keywords before the next instruction, and what changes with what it does.

        None if one that ends the graph may have done something that does not show there.
        """
        f, name = self.frame, self.frame.instruction.name
        count = _OPERANDS.get(name, 0) + (f.instruction.arg if name in ("CALL", "CALL_KW") else 0)
        keywords = f.stack[-1] if name == "CALL_KW" else f.keywords
        if not count or "out" in keywords or not all(map(_is_inert, f.stack[-count:])):
            return None
        return [*f.stack], f.keywords, self._reached()

    def _reached(self) -> tuple[Any, ...]:
        """What is another one after an instruction that has run or recorded anything."""
        m, world, recorder = self.machine, self.world, self.recorder
        return (
            m.enters, len(m.checks or ()), len(recorder.graph.nodes), recorder.inference,
            len(recorder.answers), len(recorder.heard), len(world.facts.rows), len(world.mirrors),
            len(world.passing), len(world.symbols.env.data.made),
        )  # fmt: skip

    def _raises(self, error: BaseException) -> GraphBreak:
        """An error that leaves the function: Python runs the instruction that raised it first."""
        failed, where = self.machine.failed
        self.where = where if failed == id(error) else self.frame.where
        error.__traceback__ = without_ours(error.__traceback__)
        _, self.entered = self.raised.get(id(error), (error, self.entered))
        call = f", in {self.recorder.raised_by}" if error is self.recorder.raised else ""
        return GraphBreak(f"it raises {type(error).__name__}: {error}{call}", raises=True)

    def _can_end(self) -> bool:
        """Whether all that is alive now, and all that was written, can be made again."""
        rebuild = Rebuild(self.machine, Source(self.world.facts.kinds))
        try:
            self._state(rebuild)
            self._write_effects(rebuild)
            self._guard_writes(list(self.recorder.graph.nodes))
        except (Lost, GraphBreak):
            return False
        return True

    def _guard_writes(self, nodes: list[fx.Node]) -> tuple[str, ...]:
        """The names of the calls that change inputs; Lost where these are none to be changed.

        Where there are some, what others must not share is guarded to be apart from all else that
        the graph is given. Tensors of arrays would not know of a write; who shares memory with what
        has gradients since a write has some too; and ATen may refuse a write to what it reads,
        which the program handles.
        """
        changes = tuple(node.name for node in self.recorder.writers(nodes))
        if not changes:
            return ()
        world, behind = self.world, dict[int, list[Origin]]()
        inputs = {origin: x for x, origin in world.inputs.values()}
        alone = [array for _, _, array, _ in world.arrays.values()]
        with no_torch_function():
            written = storages(x for n in nodes for x in written_by(n))
            for node in nodes:
                fake = node.meta.get("example_value")
                if node.op != "placeholder" or not isinstance(fake, torch.Tensor):
                    continue
                x, origin = world.inputs[id(fake)]
                alone += [origin] if fake.requires_grad and not x.requires_grad else []
                behind.setdefault(fake.untyped_storage()._cdata, []).append(origin)
                if not self.recorder.inference and storages([node]) & written:
                    require_normal(world, fake)
            pairs = [
                (one, other)
                for one in alone
                for other, x in inputs.items()
                if other is not one and not isinstance(x, torch.nn.Parameter)
            ]
            for given in world.recorder.heard:  # of lists of tensors none is asked for
                memory = [x.untyped_storage()._cdata for x in given if isinstance(x, torch.Tensor)]
                met = dict.fromkeys(origin for one in memory for origin in behind.get(one, ()))
                pairs += itertools.combinations(met, 2)
            for one, other in pairs:
                if overlap(inputs[one], inputs[other]):
                    raise Lost(f"{one} and {other} share memory, and it is written to")
                world.fact(NoOverlap, one, other)
        return changes

    def _start(self) -> Frame:
        place, world = self.place, self.world
        code = place.function.__code__
        unread = overwritten(code, program(code), 0) - {*code.co_cellvars} if place.at < 0 else ()
        loaded = {n: self._load(n, n in unread) for n in place.parameters}
        function = loaded.pop(".f", None) or world.hold(place.function, place.function.__qualname__)
        world.know_cells(function)
        f = Frame.of(self.machine, function)
        if place.at < 0:
            f.locals = loaded
            return f
        f.at = place.at
        f.locals = {name: loaded[name] for name in place.names}
        f.stack = [loaded[f".s{k}"] for k in range(place.depth)]
        f.cells.update({name: loaded[f".c_{name}"] for name in place.cells})
        self.machine.handled = loaded.get(".h")
        return f

    def _load(self, name: str, is_unread: bool) -> Any:
        """What stands for a variable. One of a kind that no graph takes ends it where it is met."""
        if is_unread and is_scalar(self.values[name]):  # whose value is no fact
            return self.world.know(Opaque(f"{name}, which nothing reads"), Local(name))
        try:
            return self.world.load(self.values[name], Local(name))
        except GraphBreak as found:
            opaque = Opaque(found.reason, found.remedy)
            self.opaque.append(opaque)
            return self.world.know(opaque, Local(name))

    # ---------------------------------------------------------------------- the end

    def _is_brief(self, graph: fx.GraphModule) -> bool:
        """Whether Python runs all of it as quickly as the captured program does."""
        found, machine = self.captured, self.machine
        is_whole = found.stop is None and self.place.at < 0 and found.inference is None
        is_other = machine.is_replaced or machine.asks_compiling or self.modes or machine.modes
        count = self.frame.count + machine.ran + _ENTERING * machine.enters
        few = count <= _INSTRUCTIONS * len(graph.graph.nodes)
        return few and is_whole and not is_other

    def hear(self, message: warnings.WarningMessage) -> None:
        """A warning of torch's own code: of the line of the program's that it runs for."""
        lines = [Line.of(f) for f in self.machine.frames]
        self.captured.said = self.recorder.said
        self.recorder.said.append(Later(warnings.warn, (message.message, None, 1), {}, lines))

    def finish(self, returned: bool, stop: GraphBreak | None) -> Captured:
        """Write the source of what runs, and close the graph."""
        self.is_over = True
        found, f = self.captured, self.frame
        source = Source(self.world.facts.kinds, {tensor_objects.PLACE: "_modes"})
        if self.world.seen and self.machine.policy.is_exporting:
            raise Lost("an exported graph takes and gives plain tensors alone, no subclasses")
        rebuild = Rebuild(self.machine, source, is_return=returned)
        if returned:
            result = rebuild.value(f.result)
        else:
            found.stop, found.at, found.keywords = stop, f.at, f.keywords
            result = self._state(rebuild, stop)
        self._write_effects(rebuild)
        code = self.place.function.__code__
        takes_named = self.place.at < 0 and code.co_flags & inspect.CO_VARKEYWORDS
        self.world.separate(self.values[parameters(code)[-1]] if takes_named else None)
        # whether or not a compiled graph switches global state, a piece does so after it
        for function, args, kwargs in self.state.switches(State.now()):
            named = [f"{key}={source.constant(x)}" for key, x in kwargs.items()]
            listed = ", ".join([*map(source.constant, args), *named])
            rebuild.lines.append(f"{source.constant(function)}({listed})")
        if has_modes := self.modes or self.machine.modes:
            rebuild.lines.append(f"_modes[:] = {rebuild.value(self.machine.modes)}")
        self.recorder.switch(State.now(), self.state)
        graph = self.recorder.finish(rebuild.outputs, binds=self.world.varies.as_torch)
        is_other = self.recorder.inference not in (None, torch.is_inference_mode_enabled())
        found.inference = self.recorder.inference if is_other else None
        found.grad = ambient = self.state.grad if not is_other else not found.inference
        if not self.machine.policy.is_exporting:
            found.grad = self.recorder.without_switches(graph.graph, ambient)
        inputs = self._inputs(graph, source)
        lines = list(source.lines)
        if self.recorder.is_needed(graph):
            found.graph = self._cut(rebuild.marked(graph), returned)
            before, call, failed = self._guarded(graph, inputs, source)
            if found.grad != ambient:
                switch = source.constant(set_grad_enabled)
                call = [f"{switch}({found.grad})", *call, f"{switch}({ambient})"]
            if is_other:
                mode = source.constant(torch.inference_mode)
                call = [f"with {mode}({found.inference}):", *(f"    {line}" for line in call)]
            lines += [*rebuild.released(), *before, *call]
        else:
            failed = f"{source.constant(Failing(None, self._switched(graph)))}(_error)"
        later = rebuild.later()
        found.effects = [line for line in (*later, *rebuild.lines) if line not in rebuild.values]
        for text in later:
            lines += [f"try: {text}", f"except Exception as _error: {failed}"]
        lines += [*rebuild.handled(failed), f"return {result}"]
        if has_modes:
            without = source.constant(without_function_modes)
            lines = [f"with {without}() as _modes:", *(f"    {line}" for line in lines)]
        body = "\n".join(f"    {line}" for line in lines)
        found.source = f"def run({', '.join(self.place.variables)}):\n{body}\n"
        found.names, found.is_plain = source.names, self._is_brief(graph)
        found.taken, found.answers = self.world.taken, self.recorder.answers
        passing = ", ".join(dict.fromkeys(self.world.passing))
        found.passing, found.symbols = passing, self.world.symbols.closed()
        return found

    def _cut(self, graph: fx.GraphModule, returned: bool) -> fx.GraphModule:
        """Note where it is cut, if code behind it may ask for gradients of its results."""
        graph.meta[APART] = around, MOST_CUTS
        if not self.captured.grad:
            return graph
        varies, within = self.world.varies, self.stop.within if self.stop is not None else ()
        if not returned and varies.asks_gradients is None:
            functions = self.place.function, *(code for code, _ in within)
            varies.asks_gradients = asks_for_gradients(functions, self.values.values())
        # nobody knows who else gets what a function returns
        if (varies.asks_gradients and not returned) or is_asked(varies.callers):
            with no_torch_function():
                graph.meta.update(cuts(graph.graph))
        return graph

    def _write_effects(self, rebuild: Rebuild) -> None:
        rebuild.effects()
        for made in list(self.machine.generators):
            if not rebuild.has(made) and self.machine.is_closed(made):
                raise Lost("a generator within try or with is dropped, and closed by Python then")
        for x in self.values.values() if self.place.at >= 0 else ():
            if tells_of_its_end(x) and not rebuild.has(x) and id(x) not in self.kept:
                raise Lost("what is let go of tells the program so: it may do something then")

    def _guarded(
        self, graph: fx.GraphModule, inputs: list[str], source: Source
    ) -> tuple[list[str], list[str], str]:
        """What comes before the call of a graph, the call, and what takes later errors."""
        nodes, before, more = list(graph.graph.nodes), [], ""
        changes = self._guard_writes(nodes)
        names = [n.name for n in nodes]
        since = names.index(changes[0]) if changes and self.recorder.tells_writes else 0
        if changes and self.machine.checks and not self.machine.policy.is_exporting:
            if any(is_check(n) for n in nodes[since:]):
                raise Anew("unchecked")
        is_one = not (self.recorder.is_parted or self.machine.policy.is_exporting)
        if changes and is_one and any("heard" in n.meta for n in nodes[since:]):
            raise Anew("parted")
        draws = any("draws" in effects(n) for n in nodes)
        runs_again = self.recorder.is_handled or any(map(is_check, nodes))  # unless it has written
        if draws and (runs_again or not changes):
            with no_torch_function():
                is_on_gpu = any(getattr(x, "is_cuda", False) for x in self.captured.examples)
            states = source.constant(cuda_states if is_on_gpu else cpu_state)
            before = [f"_before = {states}()"]
            more = ", _before"
        given = "".join(f"{name}, " for name in inputs)
        failed, after = (
            source.constant(Failing(eagerly, self._switched(graph), changes, draws))
            for eagerly in (graph, None)
        )
        call = [
            f"try: _out = _graph({given})",
            f"except Exception as _error: {failed}(_error, ({given}){more})",
        ]
        return before, call, f"{after}(_error, (){more})"

    def _switched(self, graph: fx.GraphModule) -> State | None:
        """The state before, if this piece changes it; a later call may begin in another one."""
        is_switched = self.captured.grad != self.state.grad or any(
            node.target in STATE_SWITCHES for node in graph.graph.nodes
        )
        return self.state if is_switched or any(self.state.switches(State.now())) else None

    def _inputs(self, graph: fx.GraphModule, source: Source) -> list[str]:
        """Sources of the graph's inputs."""
        mirrors = self.world.mirrors.values()
        buffers = (m for m in mirrors if getattr(m.origin, "key", None) == "_buffers")
        inputs, replaced = [], {f"{m.origin}[{key!r}]" for m in buffers for key in m.writes}
        for node in graph.graph.find_nodes(op="placeholder"):
            if is_open(fake := node.meta["example_value"]):
                self.captured.inputs.append(origin := self.world.symbols.origin(fake))
                inputs.append(source.variable(origin))
                self.captured.examples.append(fake.node.hint)
                continue
            real, origin = self.world.inputs[id(fake)]
            inputs.append(source.variable(origin))
            self.captured.inputs.append(origin)
            if id(fake) in self.world.seen:
                real = plain_tensor(real)
                with no_torch_function():
                    lies = tuple(fake.shape), fake.stride()
                    if concrete(lies, is_fixed=False) != (tuple(real.shape), real.stride()):
                        raise Lost("the layout of a subclass' instance changes in place")
            self.captured.examples.append(real)
            # from one that is another tensor in each call nothing is derived
            node.meta["is_buffer"] = is_buffer(origin) and str(origin) not in replaced
        return inputs

    def _state(self, rebuild: Rebuild, stop: GraphBreak | None = None) -> str:
        """What is alive before the next instruction: variables, stack, cells, exception; beside
        these the graph gives the memory that the call there sees."""
        f = self.frame
        seen = "" if stop is None else stop.memory
        made = [node for node in self.recorder.graph.nodes if node.name == seen]
        rebuild.outputs += (node.meta["example_value"] for node in made)
        names = [*f.locals.items()]
        if self.machine.handled is not None:
            names.append((".h", self.machine.handled))
        unread = overwritten(f.code, f.program, f.at) - {*f.code.co_cellvars}
        texts = {name: rebuild.value(value) for name, value in names if name not in unread}
        stack = "".join(f"{rebuild.value(x)}, " for x in f.stack)
        own = {n: c for n, c in f.cells.items() if n not in f.code.co_freevars}
        cells = ", ".join(f"{name!r}: {rebuild.value(cell)}" for name, cell in own.items())
        for name, x in names:
            if name in unread:  # who looks at frames finds it
                texts[name] = rebuild.value(self._without_history(x, rebuild))
        variables = ", ".join(f"{name!r}: {texts[name]}" for name, _ in names)
        return f"{{{variables}}}, [{stack}], {{{cells}}}"

    def _without_history(self, x: Any, rebuild: Rebuild) -> Any:
        """What a variable holds that nothing reads; a tensor of which nobody else knows can have no
        gradient, for which the program may have written to what that depends on."""
        if type(x) is not FakeTensor or self.world.origin(x) is not None or rebuild.has(x):
            return x
        with no_torch_function():
            try:
                has_history = x.requires_grad and id(x) not in self.world.seen and not x.is_leaf
            except RuntimeError:  # a view, made without gradients, of what was written to
                has_history = False
        if not has_history or not self.recorder.writers(self.recorder.graph.nodes):
            return x
        return self.recorder.call(torch.Tensor.detach, x)


# ---------------------------------------------------------------------------- operands
# An instruction that ends a graph has done nothing so far if it only takes operands off the stack,
# has entered no frame and recorded nothing, and if C code had nothing among the operands to change.

# How many operands instructions take that do no more than to push what comes of these.
_OPERANDS = {
    **dict.fromkeys((name for name in OPCODES if "JUMP" in name and "_IF_" in name), 1),
    **dict.fromkeys(
        "LOAD_ATTR LOAD_METHOD UNARY_NOT TO_BOOL FORMAT_SIMPLE CONVERT_VALUE".split(), 1
    ),
    **dict.fromkeys(
        "BINARY_SUBSCR COMPARE_OP CONTAINS_OP FORMAT_VALUE FORMAT_WITH_SPEC".split(), 2
    ),
    "CALL": 2,  # and arguments
    "CALL_KW": 3,
}


def _is_inert(x: Any, depth: int = 3) -> bool:
    """Whether nothing is behind an operand that could change and not show.

    A list that C code has sorted halfway is another one, and an iterator that it has asked; so is a
    tensor that was turned. What a stand-in does is its own.

    depth   how far to look into what is nested
    """
    kind: Any = type(x)
    if kind is tuple:
        return depth > 0 and all(_is_inert(item, depth - 1) for item in x)
    if kind is FakeTensor:
        with no_torch_function():
            return not x._has_symbolic_sizes_strides  # of which much may be asked
    if kind is types.MethodType:
        parts = x.__func__, x.__self__
        return depth > 0 and all(_is_inert(part, depth - 1) for part in parts)
    if issubclass(kind, FUNCTIONS):
        owner = None if kind is types.FunctionType else getattr(x, "__self__", None)
        method = getattr(torch.Tensor, x.__name__, None) if type(owner) is FakeTensor else None
        stands = special(x), special(method)
        is_quiet = all(one is None or isinstance(one, Breaking) for one in stands)
        return is_quiet and not is_in_place(x.__name__) and _is_inert(owner, 0)
    if issubclass(kind, type):
        return special(x) is None
    return is_scalar(x) or issubclass(kind, (*FIXED, Number))


# ---------------------------------------------------------------------------- copies
# What was captured for one module is good for another of its class, of which the same facts hold:
# a hundred layers that break are captured once. Its modules stand in place of the other's.


def moved(captured: Captured, place: Place, values: Values) -> Captured | None:
    """The same capture for values with other modules; None if a fact does not hold of them."""
    function = place.function if place.of_code else captured.place.function
    is_plain = type(captured) is Captured and not (captured.eager or captured.passing)
    if not is_plain or replace(captured.place, function=function) != place:
        return None
    # functions made for a graph may know of its module
    nodes = () if captured.graph is None else captured.graph.graph.nodes
    is_all_calls = not any(n.op == "get_attr" or hasattr(n.target, BODY) for n in nodes)
    if captured.conditions != state_conditions() or not is_all_calls:
        return None
    instead: dict[int, torch.nn.Module] = {}  # by id of the other's
    origins: dict[Origin, Origin] = {}
    look = looking(values)

    def at(origin: Origin) -> Origin:
        for part in origin.beyond(origins):
            if isinstance(part, Held):
                held = instead.get(id(part.value), part.value)
                origins[part] = part if held is part.value else Held(held, part.words)
            elif isinstance(part, Several):
                parts = tuple(map(at, part.parts))
                origins[part] = part if parts == part.parts else Several(parts)
            elif part.parent is None or origins[part.parent] is part.parent:
                origins[part] = part
            else:
                origins[part] = replace(part, of=origins[part.parent])  # type: ignore[call-arg]
        return origins[origin]

    facts = Facts()
    for fact in captured.facts.rows:
        origin, value = at(fact.origin), fact.moved(at)
        try:
            if isinstance(fact, IdMatch) and isinstance(value, torch.nn.Module):
                value = instead.setdefault(id(value), look(origin))
            row = type(fact)(origin, value, fact.where)
            if not row.holds(look):
                return None
        except GONE:
            return None
        facts.rows.append(row)
    facts.kinds = {at(origin): kind for origin, kind in captured.facts.kinds.items()}
    if len({*map(id, instead.values())}) < len(instead):  # two modules would be one
        return None
    others = {k for k, module in instead.items() if id(module) != k}
    for fact in captured.facts.rows:
        keys = [getattr(part, "key", None) for part in fact.origin.path()]
        if not isinstance(fact, IdMatch):
            keys += fact.value if type(fact.value) in (tuple, set, frozenset) else (fact.value,)
        if not others.isdisjoint(map(id, keys)):
            return None  # the other's are there under other keys, or not at all
    inputs = [at(origin) for origin in captured.inputs]
    names = {name: instead.get(id(x), x) for name, x in captured.names.items()}
    with no_torch_function():
        examples = [look(origin) for origin in inputs]
    symbols = captured.symbols and captured.symbols.moved(at)
    return replace(
        captured, place=place, facts=facts, names=names, inputs=inputs, examples=examples,
        symbols=symbols,
    )  # fmt: skip
