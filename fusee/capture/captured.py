"""What a capture gives: the piece of a function that runs as a graph, and what it relies on."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from fusee.capture.bytecode import parameters
from fusee.capture.check import compile_check
from fusee.capture.dynamic import Varying
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import Facts, Values
from fusee.capture.policy import Policy
from fusee.capture.relations import Relation, SizeCondition, SizeRelation
from fusee.capture.sources import Origin, variable
from fusee.capture.torch_api import MODE_STACK, without_function_modes
from fusee.source import define

# ---------------------------------------------------------------------------- captured


@dataclass(frozen=True)
class Place:
    """Where a capture starts: a function's beginning, or between two of its instructions.

    of_code   the function is any of its code, and comes with each call as ".f"
    at        index of the instruction; -1 for the beginning
    depth     values on the stack
    names     local variables that are bound
    cells     variables of its own that inner functions share
    handled   whether an exception is being handled
    """

    function: types.FunctionType
    at: int = -1
    depth: int = 0
    names: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    handled: bool = False
    of_code: bool = False

    @property
    def parameters(self) -> list[str]:
        """What is alive here, in the order in which check and run take it."""
        first = [".f"] * self.of_code
        if self.at < 0:
            return first + parameters(self.function.__code__)
        own = [*(f".s{k}" for k in range(self.depth)), *(f".c_{n}" for n in self.cells)]
        return [*first, *self.names, *own, *[".h"] * self.handled]

    @property
    def variables(self) -> list[str]:
        """As `parameters`, by the names that generated code has for them."""
        return [variable(name) for name in self.parameters]


def tells_of_its_end(x: Any) -> bool:
    """Whether code of the program's may run when nobody has `x` any more."""
    if type(x) is types.GeneratorType:
        return x.gi_frame is not None and bool(x.gi_code.co_exceptiontable)
    is_asked = hasattr(type(x), "__del__")
    return is_asked or any(_calls_back(ref, x) for ref in weakref.getweakrefs(x))


def _calls_back(ref: Any, x: Any) -> bool:
    """Whether a weak reference or proxy of `x` has a callback."""
    if type(ref) in weakref.ProxyTypes:
        # its attributes are those of `x`; all proxies without a callback are one
        return weakref.proxy(x) is not ref
    return ref.__callback__ is not None


@dataclass
class Captured:
    """What a capture found.

    graph      the fx graph of torch calls; None if there are none
    examples   the real tensors that it was captured with, in the order of its placeholders
    inputs     where they came from
    run        given the compiled graph, makes the function that runs this piece
    stop       why and before which instruction it ends; None if the function returned
    eager      why Python runs all of it instead; "" if it doesn't
    is_around  whether what the function calls is compiled nevertheless
    grad       whether the graph runs with gradients
    inference  whether it runs in inference mode; None if that is as it was
    taken      what was read without a guard, by module and name
    answers    what functions gave that are said to be constant: `(function, args, kwargs, result)`
    effects    lines of its source that change objects besides tensors
    symbols    the sizes that vary, and what the graph relies on about them
    passing    what it has seen that another process would see differently; "" if nothing
    """

    place: Place
    facts: Facts
    conditions: tuple[list[str], dict[str, Any]]
    graph: fx.GraphModule | None = None
    examples: list[torch.Tensor] = field(default_factory=list)
    inputs: list[Origin] = field(default_factory=list)
    source: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    stop: GraphBreak | None = None
    at: int = -1
    keywords: tuple[str, ...] = ()
    eager: str = ""
    is_around: bool = False
    grad: bool = True
    inference: bool | None = None
    breaks: list[GraphBreak] = field(default_factory=list)
    taken: dict[tuple[str, str], Any] = field(default_factory=dict)
    answers: list[tuple[Any, ...]] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    passing: str = ""
    symbols: Any = None

    def check(self, values: Values) -> tuple[Callable[..., bool], Callable[[], str]]:
        """The function that says whether a call may use this, and its source.

        values   the locals that it was captured with
        """
        conditions, names = self.conditions
        for origin, value, where in self.symbols.facts() if self.symbols else ():
            kind = SizeRelation if isinstance(value, Relation) else SizeCondition
            self.facts.add(kind, origin, value, functools.partial(str, where))
        with torch._C.DisableTorchFunction():
            found = compile_check(self.facts, self.place.variables, names, conditions, values)
        if not MODE_STACK.length():
            return found
        check, source = found

        def unseen(*values: Any) -> bool:  # by the modes that are on
            with torch._C.DisableTorchFunction():
                return check(*values)

        return unseen, source

    @property
    def raises(self) -> bool:
        """Whether it ends where the program raises."""
        return self.stop is not None and self.stop.raises

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of torch in which the graph runs, for a backend that asks for them."""
        found = self.inference
        inference = torch.is_inference_mode_enabled() if found is None else found
        with (  # without modes first: they are told of gradients that are switched
            without_function_modes(), torch.inference_mode(inference),
            torch.set_grad_enabled(self.grad),
        ):  # fmt: skip
            yield

    def compiled(self, compile_graph: Callable[..., Any]) -> Callable[..., Any] | None:
        """What a backend makes of the graph; None if there is none."""
        if self.graph is None:
            return None
        with self.modes():
            found: Callable[..., Any] = compile_graph(self.graph, self.examples)
            return found

    def run(self, graph: Callable[..., Any] | None, nested: Any = None) -> Callable[..., Any]:
        """The function that runs this piece with `graph` as its compiled graph.

        nested   as Between has it
        """
        names = {**self.names, "_graph": graph, "_nested": nested}
        return define(self.source, "run", "segment", names)


class Keeper(Protocol):
    """Keeps captures for other processes: fusee/persist."""

    def find(
        self, place: Place, values: Values, policy: Policy, varies: Varying
    ) -> Captured | None: ...
    def keep(
        self, captured: Captured, compiled: Any, values: Values, policy: Policy, varies: Varying
    ) -> None: ...
