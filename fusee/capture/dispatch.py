"""Compiled functions: their entries, and how a call goes from piece to piece.

A function has a Site for its beginning and one for each place at which a graph ended. A Site has
entries, each good for calls that pass its check. Between two pieces the one instruction that no
graph could hold runs in Python, on real values; functions of the user's that it calls are
compiled too.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusee import log
from fusee.capture.facts import describe
from fusee.capture.frame import UNBOUND, Frame
from fusee.capture.opcodes import table
from fusee.capture.policy import Policy
from fusee.capture.semantics import Semantics
from fusee.capture.trace import Captured, Place, capture, parameters
from fusee.capture.world import is_trusted

__all__ = ["CompiledFunction", "Entry", "Site"]

Compile = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]

RECOMPILE_LIMIT = 8


@dataclass
class Entry:
    """One way to run from a place on. `run` is None if Python runs it."""

    captured: Captured
    check: Callable[..., bool]
    check_source: str
    run: Callable[..., Any] | None


@dataclass
class Site:
    """All entries of one place."""

    place: Place
    entries: list[Entry] = field(default_factory=list)
    is_full: bool = False

    def find(self, values: dict[str, Any]) -> Entry | None:
        for entry in self.entries:
            if entry.check(**values):
                return entry
        return None


class CompiledFunction:
    """A Python function that runs as graphs.

    compile_graph   the backend: `(gm, example_inputs) -> callable`
    """

    def __init__(
        self,
        function: types.FunctionType,
        compile_graph: Compile,
        policy: Policy,
        recompile_limit: int = RECOMPILE_LIMIT,
    ) -> None:
        self.function = function
        self.compile_graph = compile_graph
        self.policy = policy
        self.recompile_limit = recompile_limit
        self.start = Site(Place(function))
        self.sites: dict[tuple[Any, ...], Site] = {}
        self.lock = threading.RLock()
        self._nested: weakref.WeakKeyDictionary[Any, CompiledFunction] = weakref.WeakKeyDictionary()
        self._nested_codes: dict[types.CodeType, int] = {}
        self._call, self._native = _entrances(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def entries(self) -> list[Entry]:
        """All entries, the beginning's first."""
        return [e for site in (self.start, *self.sites.values()) for e in site.entries]

    # ---------------------------------------------------------------------- pieces

    def miss(self, values: dict[str, Any]) -> Any:
        """A call that no entry of the beginning is good for."""
        entry = self._entry(self.start, values)
        if entry is None or entry.run is None:
            return self._native(**values)
        return self.finish(entry, entry.run(*values.values()))

    def finish(self, entry: Entry, result: Any) -> Any:
        """Go on after a piece: its result if the function returned, else the next pieces'."""
        captured = entry.captured
        if captured.stop is None:
            return result
        between = _Between(self)
        f = Frame(between, self.function.__code__, self.function.__globals__, table())
        f.function = self.function
        closure = dict(zip(f.code.co_freevars, self.function.__closure__ or ()))
        while True:
            variables, f.stack, cells, between.handled = result
            f.locals = variables
            f.cells = {**closure, **cells}
            f.at, f.keywords = captured.at, captured.keywords
            # a call takes its keywords with it, so the pair is one step
            between.frames = [f]
            if f.step():
                return f.result
            entry_or_none, values = self._next(f, between)
            if entry_or_none is None or entry_or_none.run is None:
                between.frames = []
                return f.run()
            captured = entry_or_none.captured
            result = entry_or_none.run(*values.values())
            if captured.stop is None:
                return result

    def _next(self, f: Frame, between: _Between) -> tuple[Entry | None, dict[str, Any]]:
        """The entry that goes on from where a frame stands."""
        names = tuple(name for name, value in f.locals.items() if value is not UNBOUND)
        own = tuple(name for name in f.cells if name not in f.code.co_freevars)
        handled = between.handled is not None
        key = (f.at, len(f.stack), names, own, handled)
        site = self.sites.get(key)
        if site is None:
            place = Place(self.function, f.at, len(f.stack), names, own, handled)
            site = self.sites.setdefault(key, Site(place))
        values = {name: f.locals[name] for name in names}
        values.update({f"_s{k}": x for k, x in enumerate(f.stack)})
        values.update({f"_c_{name}": f.cells[name] for name in own})
        if handled:
            values["_h"] = between.handled
        if any(type(x).__name__ == "_Marker" for x in f.stack) or f.keywords:
            return None, values
        return site.find(values) or self._entry(site, values), values

    def _entry(self, site: Site, values: dict[str, Any]) -> Entry | None:
        """Capture and compile for these values; None past the limit."""
        with self.lock:
            found = site.find(values)
            if found is not None:
                return found
            if len(site.entries) >= self.recompile_limit:
                if not site.is_full:
                    site.is_full = True
                    log.publish(
                        "guards",
                        self.function.__qualname__,
                        f"{self.recompile_limit} entries are kept; other calls run eagerly",
                    )
                return None
            if site.entries:
                self._explain_miss(site.entries[-1], values)
            captured = capture(site.place, values, self.policy)
            check, check_source = captured.check()
            run = None
            if not captured.eager:
                compiled = None
                if captured.graph is not None:
                    compiled = self.compile_graph(captured.graph, captured.examples)
                run = captured.run(compiled)
            entry = Entry(captured, check, check_source, run)
            site.entries.append(entry)
            log.publish("guards", self.function.__qualname__, check_source)
            return entry

    def _explain_miss(self, entry: Entry, values: dict[str, Any]) -> None:
        missed = entry.captured.facts.first_miss(values)
        if missed is not None:
            fact, found = missed
            text = f"compiling again: {describe(fact, found)}\n  read at {fact.where}"
            log.publish("guards", self.function.__qualname__, text)

    # ---------------------------------------------------------------------- callees

    def nested(self, function: types.FunctionType) -> Callable[..., Any]:
        """A function that is called between two pieces, compiled unless there is no point."""
        found = self._nested.get(function)
        if found is not None:
            return found
        code = function.__code__
        flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        is_comprehension = code.co_varnames[:1] == (".0",)
        if code.co_flags & flags or is_comprehension or is_trusted(function.__module__):
            return function
        if self.policy.refusal(function) is not None:
            return function
        count = self._nested_codes.get(code, 0)
        if count >= self.recompile_limit:  # made anew at each call
            return function
        self._nested_codes[code] = count + 1
        made = CompiledFunction(function, self.compile_graph, self.policy, self.recompile_limit)
        self._nested[function] = made
        return made


class _Between(Semantics):
    """Python's own semantics, except that Python functions are compiled before they are called."""

    def __init__(self, owner: CompiledFunction) -> None:
        super().__init__()
        self.owner = owner

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(function) is types.MethodType:
            args, function = (function.__self__, *args), function.__func__
        if isinstance(function, torch.nn.Module) and _is_plain(function):
            args, function = (function, *args), type(function).forward
        if type(function) is types.FunctionType:
            function = self.owner.nested(function)
        return function(*args, **kwargs)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether calling a module is calling its class's `forward`."""
    hooks = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    return (
        type(module).__call__ is torch.nn.Module.__call__
        and "forward" not in module.__dict__
        and not any(getattr(module, name) for name in hooks)
    )


# ------------------------------------------------------------------------------ entrances


def _entrances(owner: CompiledFunction) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two functions: with the signature of the compiled one; and one that calls it by Python.

    Python itself binds the arguments, with the function's own defaults and messages.
    """
    function, start = owner.function, owner.start
    code = function.__code__
    names = parameters(code)
    listed = ", ".join(names)
    signature, passed = _signature(function)
    text = (
        f"def call({signature}):\n"
        f"    for _e in _entries:\n"
        f"        if _e.check({listed}):\n"
        f"            if _e.run is None:\n"
        f"                return _function({passed})\n"
        f"            if _e.captured.stop is None:\n"
        f"                return _e.run({listed})\n"
        f"            return _finish(_e, _e.run({listed}))\n"
        f"    return _miss({{{', '.join(f'{name!r}: {name}' for name in names)}}})\n"
        f"def native({listed}):\n"
        f"    return _function({passed})\n"
    )
    space: dict[str, Any] = {
        "_entries": start.entries,
        "_finish": owner.finish,
        "_miss": owner.miss,
        "_function": function,
    }
    defaults = function.__defaults__ or ()
    space.update({f"_d{k}": value for k, value in enumerate(defaults)})
    space.update({f"_d_{k}": value for k, value in (function.__kwdefaults__ or {}).items()})
    exec(compile(text, f"<fusee entrance of {function.__qualname__}>", "exec"), space)
    call: types.FunctionType = space["call"]
    call.__name__, call.__qualname__ = function.__name__, function.__qualname__
    return call, space["native"]


def _signature(function: types.FunctionType) -> tuple[str, str]:
    """The parameters as in a `def`, and as a call passes them on."""
    code = function.__code__
    names = code.co_varnames
    defaults = len(function.__defaults__ or ())
    taken, passed = [], []
    for k in range(code.co_argcount):
        default = k - (code.co_argcount - defaults)
        taken.append(names[k] + (f"=_d{default}" if default >= 0 else ""))
        passed.append(names[k])
        if k + 1 == code.co_posonlyargcount:
            taken.append("/")
    at = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & inspect.CO_VARARGS:
        taken.append(f"*{names[at]}")
        passed.append(f"*{names[at]}")
        at += 1
    elif code.co_kwonlyargcount:
        taken.append("*")
    for name in names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]:
        has_default = name in (function.__kwdefaults__ or {})
        taken.append(name + (f"=_d_{name}" if has_default else ""))
        passed.append(f"{name}={name}")
    if code.co_flags & inspect.CO_VARKEYWORDS:
        taken.append(f"**{names[at]}")
        passed.append(f"**{names[at]}")
    return ", ".join(taken), ", ".join(passed)
