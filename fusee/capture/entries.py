"""Compiled functions: their entries, and how a call goes from piece to piece.

A function has a Site for its beginning and one for each place at which a graph ended. A Site has
entries, each good for calls that pass its check. Between two pieces the one instruction that no
graph could hold runs in Python, on real values; functions of the user's that it calls are
compiled too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch

from fusee import log
from fusee.capture.between import Between, around, begin_trial, beyond, is_left
from fusee.capture.bytecode import (
    at_caller,
    codes,
    first_line,
    overwritten,
    parameters,
    program,
    without_ours,
)
from fusee.capture.captured import Captured, Entry, Place, Site, tells_of_its_end
from fusee.capture.dynamic import Varying
from fusee.capture.frame import UNBOUND, Frame, room
from fusee.capture.graph_break import GraphFailed, Unready, expecting
from fusee.capture.guards import EqualsMatch, Guard, Values
from fusee.capture.policy import (
    ORIGINAL,
    WRAPPER,
    CaptureKeeper,
    MadeAnew,
    Policy,
    bare,
    is_like,
    is_skipped,
    is_suspending,
    original,
)
from fusee.capture.sources import CALLING, is_made_anew, is_python
from fusee.capture.torch_api import (
    AROUND_FORWARD,
    DYNAMO,
    USUAL_STANCE,
    dynamo_switch,
    is_parallel,
    run_parallel,
    skip_frame,
    stance_fields,
    without_dynamo,
)
from fusee.errors import BackendError, CompileError, GraphBreakError, RecompileError, source_line
from fusee.fake import unseen_by_hooks
from fusee.runtime import in_child, signals_held
from fusee.runtime.cache import GraphCompiler
from fusee.runtime.jit import deferred
from fusee.source import Function

# ---------------------------------------------------------------------------- entrances
# How calls come in: functions with the signature of what is compiled, written as source.


def entrances(owner: Any) -> tuple[types.FunctionType, types.FunctionType]:
    """For a CompiledFunction: one with its signature; and one that calls the function by Python.

    Python itself binds the arguments, with the function's own defaults and messages. For all
    functions of a code the first gives one for each, and the second takes it before all else.
    """
    function, code = owner.function, owner.function.__code__
    names = parameters(code)
    text = _source(function, names, ["§function"] * owner.of_code)
    held: dict[str, Any] = {
        "at_caller": at_caller,
        "code": code,
        "dynamo": DYNAMO,
        "entries": owner.start.entries,
        "site": owner.start,
        "failed": GraphFailed,
        "finish": without_dynamo(owner.finish),
        "is_dynamo": torch.compiler.is_dynamo_compiling,
        "getattr": getattr,
        "stance": stance_fields,
        "usual": USUAL_STANCE,
        "fields": stance_fields(USUAL_STANCE),
        "miss": without_dynamo(owner.miss),
        "modules": sys.modules,
        "policy": owner.policy,
        "call_given": functools.partial(_call_given, code),
        "renew": owner.renew,
        "unset": UNBOUND,
        "function": function,
    }
    # names of ours have more underscores than any of the program's
    mark = "_" * (1 + max((len(n) - len(n.lstrip("_")) for n in names), default=0))
    space = {mark + name: x for name, x in held.items()}
    exec(compile(text.replace("§", mark), f"<entrance of {function.__qualname__}>", "exec"), space)
    call: types.FunctionType = space["call"]
    if not owner.of_code:
        functools.update_wrapper(call, function)
        call.__dict__.update({ORIGINAL: function, WRAPPER: id(call)})
    for code in codes(call.__code__):
        skip_frame(code)
    return call, space["native"]


def _source(function: types.FunctionType, names: Sequence[str], first: list[str]) -> str:
    """Both functions, with § before names of ours; `first` comes before the parameters."""
    listed = ", ".join([*first, *names])
    pairs = [f"'.f': {name}" for name in first] + [f"{name!r}: {name}" for name in names]
    values = f"{{{', '.join(pairs)}}}"
    signature, passed, fill, filled = _parameters(function, values)
    current = "True" if first else "§function.__code__ is §code"
    names_caller = any({"warn", "_getframe"} & {*c.co_names} for c in codes(function.__code__))
    by_python = f"{'§at_caller()(§function, ' if names_caller else '§function('}{passed})"
    call = (
        f"def call({signature}):\n"
        f"    if §dynamo not in §modules:\n"
        f"        §quick = §site.quick\n"
        f"    elif §is_dynamo():\n"  # it inlines this, and it is True
        f"{fill}"
        f"        return §function({passed})\n"
        f"    else:\n"
        f"        try: §is_usual = §modules[§dynamo]._stance is §policy.usual\n"
        f"        except AttributeError: §is_usual = False\n"  # it is being imported
        f"        §quick = §site.quick if §is_usual else None\n"
        f"    if §quick is not None and not §policy.is_unusual and §quick({listed}) < 0:\n"
        f"        if (§run := §site.run) is not None:\n"
        f"            try: return §run({listed})\n"
        f"            except §failed: pass\n"
        f"        return {by_python}\n"
        f"    if not ({current}):\n"
        f"        return §call_given(§renew(), {values})\n"
        f"{filled}"
        f"    if §policy.is_unusual or §dynamo in §modules and (\n"
        f"        §stance(§getattr(§modules[§dynamo], '_stance', §usual)) != §fields\n"
        f"    ):\n"
        f"        return §miss({values})\n"
        f"    for §e in §entries if §site.index is None else §site.index.candidates({listed}):\n"
        f"        if §e.check({listed}):\n"
        f"            if §quick is not §site.quick: §policy.note_usual()\n"
        f"            if §e.run is None:\n"
        f"                return {by_python}\n"
        f"            if (§t := §e.trial) is not None and §t.is_pythons():\n"
        f"                return §t.note({by_python})\n"
        f"            try:\n"
        f"                if §t is None and §e.captured.stop is None:\n"
        f"                    return §e.run({listed})\n"
        f"                §r = §e.run({listed})\n"
        f"            except §failed:\n"
        f"                break\n"
        f"            §r = §finish(§e, §r, §function)\n"
        f"            return §r if §t is None else §t.note(§r)\n"
        f"    else:\n"
        f"        return §miss({values}, True)\n"
        f"    return {by_python}\n"
    )
    if first:
        name = "    call.__qualname__ = §function.__qualname__\n    return call\n"
        call = f"def call({first[0]}):\n{textwrap.indent(call, '    ')}{name}"
    return f"{call}def native({listed}):\n    return {by_python}\n"


def _call_given(code: types.CodeType, function: Function, values: Values) -> Any:
    """Call a function with what the parameters of `code` were given."""
    taken = inspect.signature(types.FunctionType(program(code).taking, {}))
    given: dict[str, Any] = {}
    for name, p in taken.parameters.items():
        # nothing is behind a star where a parameter before it has no value
        if values[name] is not UNBOUND and (p.kind is not p.VAR_POSITIONAL or values[name]):
            given[name] = values[name]
    bound = inspect.BoundArguments(taken, given)
    return function(*bound.args, **bound.kwargs)


_PASSED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _parameters(function: types.FunctionType, values: str) -> tuple[str, str, str, str]:
    """Source: the parameters as in a `def`, and as a call passes them on; what gives those that are
    not given the default that the function has now; the same, with Python's own error if the
    function has lost a default."""
    code, named = function.__code__, function.__kwdefaults__ or {}
    bare = types.FunctionType(program(code).taking, {}, argdefs=function.__defaults__)
    bare.__kwdefaults__ = function.__kwdefaults__
    found = inspect.signature(bare)
    listed = found.parameters.values()
    taken = [p if p.default is p.empty else p.replace(default=UNBOUND) for p in listed]
    passed = ", ".join(_PASSED.get(p.kind, "{0}").format(p.name) for p in listed)
    text = str(found.replace(parameters=taken)).replace(f"={UNBOUND}", "=§unset")[1:-1]
    optional = [p.name for p in taken if p.default is UNBOUND and p.name not in named]
    if not optional and not named:
        return text, passed, "", ""
    lines = ["§d, §w = §function.__defaults__, §function.__kwdefaults__"]
    places = [(name, f"§d[{k - len(optional)}]") for k, name in enumerate(optional)]
    places += [(name, f"§w[{name!r}]") for name in named]
    lines += [f"if {name} is §unset: {name} = {place}" for name, place in places]
    fill = "".join(f"        {line}\n" for line in lines)
    return (
        text,
        passed,
        fill,
        (
            f"    try:\n{fill}"
            f"    except (TypeError, LookupError):\n"
            f"        §d = §unset\n"
            f"    if §d is §unset:\n"
            f"        return §call_given(§function, {values})\n"  # which raises: there are too few
        ),
    )


# ---------------------------------------------------------------------------- dispatch


Compile = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Function]

# Takes one sentence that the user should read, and the line that it is about.
Notice = Callable[[str, str], None]
GuardFilter = Callable[[list[Guard]], Sequence[bool]]

RECOMPILE_LIMIT = 8

_AGAIN = object()


def _ran(entry: Entry | None, values: Values) -> Any:
    """What a piece gives; _AGAIN if Python is to run it."""
    if entry is None or entry.run is None:
        return _AGAIN
    try:
        found, entry.captured.begun = entry.run(*values.values()), []
    except BaseException as error:
        entry.captured.take_back()
        if not isinstance(error, GraphFailed):
            raise
        return _AGAIN
    return found


@dataclass(eq=False, repr=False)
class CompiledFunction:
    """A Python function that runs as graphs.

    compile_graph   the backend: `(gm, example_inputs) -> callable`, or a GraphCompiler
    fullgraph       whether a graph break is an error
    varying         makes the rule which sizes and numbers are inputs of graphs
    guard_filter    says which facts are checked: one bool for each Guard
    notice          takes what the user should know
    keeper          where captures outlive the process; None: nowhere
    of_code         whether for all functions of its code: `call` gives what to call for one
    is_tried        whether Python runs what it takes less time for, as between.py measures
    """

    function: types.FunctionType
    compile_graph: Compile
    policy: Policy
    recompile_limit: int = RECOMPILE_LIMIT
    _: KW_ONLY
    fullgraph: bool = False
    varying: Callable[[types.FunctionType], Varying] = Varying
    guard_filter: GuardFilter | None = None
    notice: Notice | None = None
    keeper: CaptureKeeper | None = None
    of_code: bool = False
    is_tried: bool = False

    def __post_init__(self) -> None:
        self.name = self.function.__qualname__
        self.start = Site(Place(self.function, of_code=self.of_code))
        self.sites: dict[tuple[Any, ...], Site] = {}
        self.varies = self.varying(self.function)
        self.lock = threading.RLock()
        # by the id of a module or function, while it is alive
        self._nested: dict[int, tuple[weakref.ref[Any], dict[Any, CompiledFunction]]] = {}
        # by code, those compiled between pieces of all that belongs together
        self.family: dict[types.CodeType, weakref.WeakSet[CompiledFunction]] = {}
        self._nested_codes: dict[types.CodeType, MadeAnew] = {}
        self.turn = 0  # how often it went on after a piece
        self.made_at, self.is_met = 0, False  # its caller's turn; whether it was called at another
        self.call, self._native = entrances(self)
        self.is_forced = False
        self._forced: dict[Any, CompiledFunction] = {}  # by the backend that a stance names
        self.owner: Callable[[], Any] = lambda: None
        self.is_told = False  # that there is no graph; of callees nobody is
        live.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def entries(self) -> list[Entry]:
        """All entries, the beginning's first."""
        return [e for site in (self.start, *self.sites.values()) for e in site.entries]

    @property
    def callees(self) -> list[CompiledFunction]:
        """Functions that are called between pieces and are compiled as well."""
        return [one for _, some in [*self._nested.values()] for one in some.values()]

    def has_graph(self) -> bool:
        """Whether there is a graph, here or in what it calls."""
        mine = any(e.compiled is not None for e in self.entries)
        return mine or any(one.has_graph() for one in self.callees)

    def reset(self) -> None:
        """Forget all that was compiled."""
        with self.lock:
            for site in (self.start, *self.sites.values()):
                site.clear()
            self.sites.clear()
            self._nested.clear()
            self._nested_codes.clear()

    def renew(self) -> Function:
        """Compile anew, since the function's code is another one. Gives `call`."""
        with self.lock:
            self.reset()
            made, self._native = entrances(self)
            self.call.__globals__.update(made.__globals__)
            for name in ("__defaults__", "__kwdefaults__", "__code__"):
                setattr(self.call, name, getattr(made, name))
        return self.call

    def tell(self, text: str, where: str) -> None:
        """Tell the user."""
        if self.notice is None:
            log.publish("guards", self.name, f"{text}\n  {where}")
        else:
            self.notice(text, where)

    # ---------------------------------------------------------------------- pieces

    def miss(self, values: Values, is_tried: bool = False) -> Any:
        """A call that no entry of the beginning is good for; or not for sure, if not `is_tried`."""
        if (is_tried and is_left(self, values)) or self.policy.is_eager():
            return self._native(*values.values())
        other = self._stand_in(values)
        if other is not self:
            return other.miss(values)
        entry = self._entry(self.start, values, is_tried)
        if entry is not None and (result := _ran(entry, values)) is not _AGAIN:
            result = self.finish(entry, result, values.get(".f", self.function))
            self._tell_of_no_graph()
            return result
        result = self._native(*values.values())
        if entry is not None and entry.captured.raises:
            self._tell_of_error(entry.captured)
        return result

    def _stand_in(self, values: Values) -> CompiledFunction:
        """What runs a call in place of this: with the stance's backend, or a copy's own."""
        backend = self.policy.now().backend
        if backend is not None and not self.is_forced and self.policy.lookup is not None:
            if backend not in self._forced:
                graphs, sizes = self.policy.lookup(backend)
                varying = functools.partial(self.varying, **sizes)
                made = replace(self, compile_graph=graphs, varying=varying)
                made.is_forced = True
                self._forced[backend] = made
            return self._forced[backend]
        owner = next(iter(values.values()), None)
        if not issubclass(type(owner), torch.nn.Module) or owner is self.owner():
            return self
        if self.owner() is None:
            self.owner = weakref.ref(owner)
            return self
        for name, method in list(owner.__dict__.items()):
            if type(method) is types.MethodType and method.__func__ is self.call:
                made = replace(self, of_code=False)
                owner.__dict__[name] = types.MethodType(made.call, owner)
                return made
        return self

    def _around(self, *given: Any) -> Any:
        """The function's own lines in Python; what it calls is compiled."""
        values = dict(zip(self.start.place.parameters, given))
        f = Frame.of(Between(self.nested), values.pop(".f", self.function))
        f.locals = values
        return self._ends(f, f.run)

    def finish(self, entry: Entry, result: Any, function: types.FunctionType) -> Any:
        """Go on after a piece: its result if the function returned, else the next pieces'."""
        captured = entry.captured
        if captured.stop is None:
            return result
        between = Between(self.nested)
        f = Frame.of(between, function)
        self.turn += 1
        # an exception that was caught knows its frames, and these both: what they hold would
        # live too long
        try:
            return self._go_on(f, between, captured, result)
        finally:
            f.clear()
            vars(f).clear()
            between.handled = None

    def _go_on(self, f: Frame, between: Between, captured: Captured, result: Any) -> Any:
        closure = {n: c for n, c in f.cells.items() if n in f.code.co_freevars}
        while True:
            variables, stack, cells = result
            between.handled = variables.pop(".h", None)
            # what no piece was given lives on until it has another value
            unread = overwritten(f.code, f.program, f.at)
            f.locals = {name: x for name, x in f.locals.items() if name in unread} | variables
            f.stack, f.cells = list(stack), {**closure, **cells}
            for part in (variables, stack, cells):  # callers' frames know them for longer
                part.clear()
            f.at, f.keywords = captured.at, captured.keywords
            between.frames, f.unwound = [f], None
            ends = self._ends(f, expecting(captured.stop, f.step))
            while f.keywords:  # no piece begins between these and their call
                ends = self._ends(f, f.step)
            if ends:
                return f.result
            if captured.raises and f.unwound is None:
                self._tell_of_error(captured)
            f.unwound = None  # it knows this frame, by its traceback
            site, entry, values = self._next(f, between)
            while entry is None and isinstance(at := site.growing and site.growing.shown_at(), int):
                if self._ends(f, functools.partial(beyond, f, at)):
                    return f.result
                site, entry, values = self._next(f, between)
            result = _ran(entry, values)
            values.clear()  # an exception shows this frame, and keeps what it holds
            if entry is None or result is _AGAIN:
                between.frames = []
                return self._ends(f, f.run)
            captured = entry.captured
            if captured.stop is None:
                return result

    def _ends(self, f: Frame, run: Callable[[], Any]) -> Any:
        """Whether a frame ends with what it does now; an exception shows the user's line."""
        try:
            return run()
        except Exception as error:
            error.__traceback__ = without_ours(error.__traceback__)
            raise

    def _next(self, f: Frame, between: Between) -> tuple[Site, Entry | None, Values]:
        """The entry that goes on from where a frame stands."""
        # an import that compiling does may keep this frame: what lives is named in `values` alone
        code, unread = f.code, overwritten(f.code, f.program, f.at)
        bound = [x for x in code.co_varnames if f.locals.get(x, UNBOUND) is not UNBOUND]
        names = (*[x for x in bound if x not in unread or tells_of_its_end(f.locals[x])],)
        own = (*[name for name in f.cells if name not in code.co_freevars],)
        handled = between.handled is not None
        key = (f.at, len(f.stack), names, own, handled)
        site = self.sites.get(key)
        if site is None:
            place = Place(self.function, f.at, len(f.stack), names, own, handled, self.of_code)
            site = self.sites.setdefault(key, Site(place))
        function, cells = [f.function] * self.of_code, [*map(f.cells.get, own), between.handled]
        values = dict(zip(site.alive, (*function, *[f.locals[x] for x in names], *f.stack, *cells)))
        return site, self._entry(site, values), values

    def _entry(self, site: Site, values: Values, is_tried: bool = False) -> Entry | None:
        """Capture and compile for these values; None if Python is to run this call."""
        if (known := site.find(values, self.turn, is_tried)) is not None:
            return known
        if len(site.entries) == 1 and self.policy.now().unchecked:
            return site.entries[0]
        with self.lock:  # another thread may have compiled it meanwhile
            if not site.is_full and (known := site.find(values, self.turn)) is not None:
                return known
            if self._is_refused(site, values):
                return None
            if site.entries:
                self._explain_miss(site.entries, values)
            entry = None
            try:
                with signals_held(), unseen_by_hooks(), room:
                    with contextlib.suppress(CompileError), deferred() as waiting:
                        made = self._made(site.place, values)  # threads are still busy with it
                        for function in waiting:
                            function()
                        entry = made
                    # once more, waiting at once: by the backend's rules it may run eagerly
                    entry = entry or self._made(site.place, values)
                    entry.made_at = self.turn
            except Unready:
                return None
            # what raised may not raise the next time: under fullgraph it is tried again
            if not (self.fullgraph and entry.captured.raises):
                site.add(entry)
                begin_trial(self, site, entry, values)
            log.publish("guards", self.name, entry.check_source)
            for listener in listeners:
                listener(entry)
            return entry

    def _made(self, place: Place, values: Values) -> Entry:
        begin = time.perf_counter()
        is_alone = place.of_code or place.at >= 0 or self.guard_filter
        keeper = None if is_alone else self.keeper
        if isinstance(self.compile_graph, GraphCompiler):
            self.compile_graph.begin()
        known = keeper.find(place, values, self.policy, self.varies) if keeper else None
        captured, twin = known, None
        if known is None and self.guard_filter is None:
            captured, twin = self._of_copy(place, values)
        captured = captured or capture(place, values, self.policy, self.varies)
        is_kept = keeper is not None and known is None and keeper.takes(captured)
        times = {"capture": _milliseconds(begin)}
        try:
            self._refuse_break(captured)
        except GraphBreakError as error:
            return self._without_symbols(captured, place, values, error)
        run = compiled = None
        # under fullgraph Python runs all of a function that raises: it has no pieces
        if not captured.eager and not (self.fullgraph and captured.raises):
            begin = time.perf_counter()
            try:
                compiled = twin or captured.compiled(self.compile_graph)
            except BackendError as error:
                if not self.varies.as_torch:  # ours do no better with constants
                    raise
                return self._without_symbols(captured, place, values, error)
            if compiled is not None:
                times["backend"] = _milliseconds(begin)
            if captured.is_plain and getattr(compiled, "is_captured", False):
                captured.leave_to_python()
            else:
                run = captured.run(compiled, self.nested)
        elif captured.is_around and place.at < 0:
            run = self._around
        begin = time.perf_counter()  # after the backend, which may ask about sizes too
        if self.guard_filter is not None:
            captured.facts.keep(self.guard_filter, values)
        check, check_source = captured.check(values)
        if keeper is not None and is_kept:
            keeper.keep(captured, compiled, values, self.policy, self.varies)
        if (found := captured.symbols) is not None:
            log.publish("dynamic", self.name, lambda: "\n".join(found.told()))
        captured.examples = []  # the tensors of a call would live as long as its entry
        quick = None if captured.eager else captured.quick(values)
        times["guards"] = _milliseconds(begin)
        return Entry(captured, check, check_source, run, compiled, quick, times)

    def _without_symbols(
        self,
        captured: Captured,
        place: Place,
        values: Values,
        error: BackendError | GraphBreakError,
    ) -> Entry:
        """An entry for sizes that are constants, where open ones are in the way.

        raises   the error, if constants are as well, or if a size is marked
        """
        symbols = captured.symbols
        if not self.varies.with_symbols or not symbols or symbols.strict:
            raise error
        self.varies.with_symbols = False
        with contextlib.suppress(type(error)):
            entry = self._made(place, values)
            self.tell(f"each set of sizes has a version: with open ones {error.what}", "")
            return entry
        self.varies.with_symbols = True
        raise error

    def _of_copy(self, place: Place, values: Values) -> tuple[Captured | None, Any]:
        """What was captured for a copy of a module, and the compiled graph if it serves both."""
        copies = {self, *self.family.get(place.function.__code__, ())}
        for entry in [entry for one in copies for entry in one.entries]:
            if (found := _trace().moved(entry.captured, place, values)) is not None:
                compiler = self.compile_graph
                is_shared = isinstance(compiler, GraphCompiler) and compiler.serves_copies
                return found, entry.compiled if is_shared else None
        return None, None

    def _refuse_break(self, captured: Captured) -> None:
        """Raise for a break where the user wants none; tell of a function that runs eagerly."""
        stop = captured.breaks[0] if captured.breaks else captured.stop
        is_error = self.fullgraph if stop is None or stop.is_error is None else stop.is_error
        if captured.eager:
            if is_error:
                raise self._broken(captured.eager, stop.where if stop else "", "")
            self.tell(f"{self.name} runs eagerly: {captured.eager}", "")
        elif stop is not None and is_error and not captured.raises:
            raise self._broken(stop.reason, stop.where, stop.remedy)

    def _tell_of_error(self, captured: Captured) -> None:
        """Python has run what raises under capture, and nothing was raised."""
        stop = captured.stop
        assert stop is not None
        if self.fullgraph:
            raise self._broken(stop.reason, stop.where, "")
        stop.raises = False  # say it once
        if captured.symbols is not None:
            return  # for another number than this one
        self.tell(
            f"a line of {self.name} runs in Python: under capture {stop.reason},"
            " and run by Python it does not; please report it",
            stop.where,
        )

    def _tell_of_no_graph(self) -> None:
        """Python has run all of a call, piece by piece, and none of them was a graph."""
        if self.is_told or self.has_graph():
            return
        if stop := next((e.captured.stop for e in self.entries if e.captured.stop), None):
            self.is_told = True
            text = f"nothing of it became a graph; the first of its breaks: {stop.reason}"
            remedy = f". To do: {stop.remedy}" if stop.remedy else ""
            self.tell(f"{self.name} runs eagerly: {text}{remedy}", stop.where)

    def _broken(self, reason: str, where: str, remedy: str) -> GraphBreakError:
        return GraphBreakError(
            reason,
            where=source_line(where or first_line(self.function)),
            did="stopped before running anything of it",
            remedy=remedy or "leave fullgraph out: the function is split there and goes on",
        )

    def _is_refused(self, site: Site, values: Values) -> bool:
        """Whether nothing may be compiled for a place now."""
        stance = self.policy.now().name
        if stance == "eager_on_recompile" or self.policy.is_eager():
            return True
        if stance == "fail_on_recompile":
            raise self._recompile_error(site, values, f'the stance is "{stance}"')
        if site.entries and dynamo_switch("error_on_recompile"):
            raise self._recompile_error(site, values, "torch's error_on_recompile is on")
        if stance == "eager_then_compile" and not site.is_met:
            site.is_met = True
            return True
        if site.count(values, self.recompile_limit, self.turn) < self.recompile_limit:
            return bool(site.entries) and self._grows(site, values)
        if not site.is_last:
            site.is_last = True
            changed = [x for e in site.entries for x in e.captured.facts.changed(values)]
            if self.varies.retry(changed):
                return False
        is_told, site.is_full = site.is_full or not self.has_graph(), True
        if not is_told:
            why, where = site.why_full(values)
            text = f"{len(site.entries)} compiled versions, and other calls run eagerly{why}"
            self.tell(f"{self.name} has {text}", where)
        return True

    def _grows(self, site: Site, values: Values) -> bool:
        """Whether the same number is one more at each call; the first time it is told."""
        was, is_growing = site.growing, site.grows(values)
        fact = site.growing
        if fact is None or fact is was:
            return is_growing
        # a count that decides something, or a text: nobody can give it one size
        if isinstance(fact, EqualsMatch):
            log.publish("recompiles", self.name, f"{fact.origin} is another at each call")
        else:
            found = site.entries[-1].captured.facts.found(fact, values)
            self.tell(
                f"{self.name} runs eagerly while {fact.origin} grows at each call:"
                f" {fact.miss(found)}. Give it one size for all calls (transformers'"
                ' generate() does so with cache_implementation="static")',
                fact.where,
            )
        return True

    def _recompile_error(self, site: Site, values: Values, since: str) -> RecompileError:
        missed = site.entries[-1].captured.facts.first_miss(values) if site.entries else None
        why = missed[0].miss(missed[1]) if missed else "nothing is compiled for it yet"
        return RecompileError(
            f"a call of {self.name} needs a new version: {why}",
            where=source_line((missed and missed[0].where) or first_line(self.function)),
            did=f"nothing was compiled, since {since}",
            remedy="undo that, or call with what was compiled",
        )

    def _explain_miss(self, entries: Sequence[Entry], values: Values) -> None:
        last = entries[-1].captured.facts
        if (missed := last.first_miss(values)) is not None:
            fact, found = missed
            places = [*self.varies.learn(last.changed(values, missed))]
            # the last one may differ in all, as ranks that alternate; a few: there may be thousands
            for entry in entries[-2:-10:-1]:
                changed = () if places else entry.captured.facts.changed(values)
                places += self.varies.learn(row for row in changed if row[1])
            for place in places:
                log.publish("dynamic", self.name, f"{place} is an input now")
            where = fact.where or first_line(self.function)
            log.publish("recompiles", self.name, f"{fact.miss(found)}\n  read at {where}")

    # ---------------------------------------------------------------------- callees

    def nested(self, function: types.FunctionType, owner: Any) -> Function:
        """A function that is called between two pieces, compiled unless there is no point.

        Each module has entries of its own, once it is made: a hundred layers don't fight for eight.
        """
        of_module = isinstance(owner, torch.nn.Module) and function.__name__ != "__init__"
        same: Any = function
        given = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        has_own = bool(given or function.__dict__)
        of_code = has_own and is_made_anew(function)
        if of_code or not has_own:
            same = function.__code__  # made anew, it does the same
        owner = owner if of_module else same
        _, mine = self._nested.get(id(owner), (None, {}))
        known = mine.get(same)
        if known is not None and is_like(known.function, function):
            known.is_met |= known.made_at != self.turn
            return known.call(function) if of_code else known.call
        code = function.__code__
        is_around = is_skipped(function) or code in AROUND_FORWARD
        is_around |= function.__module__ == CALLING
        if is_python(function.__module__ or "") and not is_around:
            return function
        is_comprehension = code.co_varnames[:1] == (".0",)
        if is_around or is_comprehension or is_suspending(function):
            return functools.partial(around, self.nested, function)
        if is_parallel(function):
            return functools.partial(run_parallel, Between(self.nested).call, function)
        if self.policy.refusal(function) is not None or original(function) is not None:
            return function
        anew = type(owner) if of_module else None  # whose methods are made with it
        others = self._nested_codes.setdefault(code, MadeAnew(self.recompile_limit))
        if anew is None or (of_code and function in vars(anew).values()):
            if not others.grows(anew):
                return function
        elif not others.are_met(self.turn):
            return function
        made = replace(self, function=bare(function) if of_code else function, of_code=of_code)
        made.is_told, made.made_at, made.family = True, self.turn, self.family
        others.modules.add(made)
        made.varies.callers = *self.varies.callers, (self.function, self.varies)
        self.family.setdefault(code, weakref.WeakSet()).add(made)
        if (key := id(owner)) not in self._nested:
            self._nested[key] = weakref.ref(owner, lambda _: self._nested.pop(key, None)), {}
        self._nested[key][1][same] = made
        return made.call(function) if of_code else made.call


# Called with each entry that is made, in the thread that made it.
listeners: list[Callable[[Entry], None]] = []

# All that are alive: to reset them, and to renew their locks in a forked process.
live: weakref.WeakSet[CompiledFunction] = weakref.WeakSet()


@in_child
def _renew_locks() -> None:
    for one in live:
        one.lock = threading.RLock()


# What is imported before the first capture, and by no process that finds all captures kept.
machinery = ["fusee.capture.trace"]


def _trace() -> Any:
    *_, trace = [importlib.import_module(name) for name in reversed(machinery)]
    return trace


def capture(*given: Any) -> Captured:
    """As in trace.py."""
    return _trace().capture(*given)  # type: ignore[no-any-return]


def _milliseconds(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e3
