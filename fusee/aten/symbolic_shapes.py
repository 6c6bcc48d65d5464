"""Adapter to torch's ShapeEnv: graphs with open sizes, as TorchDynamo hands them to a backend.

    torch.fx.experimental.symbolic_shapes   symbols of sympy, their ranges, the guards on them
    torch.utils._sympy.printers             a guard as Python
    torch._guards                           the context in which TorchDynamo calls a backend
    torch._subclasses                       which FakeTensor stands for which tensor
    torch._dynamo.source                    what symbols are named after

Tested with torch 2.11 and 2.13. All of it imports sympy: it is loaded for such backends alone.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.utils._sympy.printers import PythonPrinter

from fusee.aten.rewriter import copied
from fusee.aten.torch_api import TorchSymbols, open_numbers, storage_id, switches_restored
from fusee.errors import TraceError
from fusee.fake import fake_of
from fusee.fake.layouts import known
from fusee.fake.open_composites import is_place_open, places_of
from fusee.source import define
from fusee.sym import Size, Symbol, hint, symbols
from fusee.sym.ranges import COMPARISONS, Predicate
from fusee.sym.shape_env import ShapeEnv, computed_from, known_size

_LARGEST = 2**62  # what torch writes for no end at all


def compile_as_torch(
    backend: Callable[..., Any], name: str, gm: fx.GraphModule, examples: Sequence[Any]
) -> Any:
    """What a backend makes of a graph whose sizes are SymInts of ours.

    It gets a copy over SymInts of a ShapeEnv of torch's. What that has relied on in the end is a
    relation of ours, as if the program had asked.
    """
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    env = next((n.node.env for n in open_numbers(gm.graph.nodes)), None)
    handed = _Handed(env or ShapeEnv(), name)
    # sizes of tensors that share memory become constants: they say how much of it
    places: dict[int, list[Tensor]] = {}
    for x, real in zip(inputs, examples, strict=True):
        if isinstance(x, Tensor):
            places.setdefault(storage_id(real), []).append(x)
    for together in places.values():
        for x in together if len(together) > 1 else ():
            for n in (*x.shape, *x.stride()):
                operator.index(n)
    module = handed.module(gm)
    given = handed.examples(inputs, examples)
    with tracing(TracingContext(handed.mode)):
        compiled = backend(module, given)
    handed.learn()
    return compiled


class _Handed:
    """One graph in torch's symbols.

    mode   in which the backend has FakeTensors for its inputs; those beside the graph's nodes are
           of another one, since running the graph may change what they are
    """

    def __init__(self, env: ShapeEnv, name: str) -> None:
        self.env, env.asker = env, f"the backend {name!r}"
        self.shape_env = symbolic_shapes.ShapeEnv(
            tracked_fakes=[], allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True
        )
        self.mode, self.own_mode = (FakeTensorMode(shape_env=self.shape_env) for _ in range(2))
        self.made: dict[Symbol, Any] = {}
        self.known: set[tuple[Size, str, Size]] = set()
        self._keep: list[Any] = []

    # ---------------------------------------------------------------------- from ours

    def symbol(self, symbol: Symbol) -> Any:
        """The SymInt for a symbol; a number if torch knows none for it."""
        found = self.made.get(symbol)
        if found is None:
            found = self.made[symbol] = self._new(symbol)
        return found

    def _new(self, symbol: Symbol) -> Any:
        number, source = hint(symbol.expr), LocalSource(symbol.name)
        dynamic = symbolic_shapes.DimDynamic.DYNAMIC
        asked = {s for x in self.env.relations for s in (*symbols(x.a), *symbols(x.b))}
        if symbol in self.env.data.marked - asked:  # else caches of graphs take two for one
            with self.shape_env.ignore_fresh_unbacked_symbols():
                unbacked = symbolic_shapes.DimDynamic.UNBACKED
                expr = self.shape_env.create_symbol(number, source, unbacked)
        elif symbol.lo < 0:  # an integer that the program was given
            expr = self.shape_env.create_unspecified_symbol(number, source, dynamic)
        elif number < 2:
            return self.env.value(symbol.expr)
        else:
            self.env.holds(symbol.expr, ">=", 2)  # torch's sizes are neither 0 nor 1
            expr = self.shape_env.create_symbol(number, source, dynamic)
        return self.shape_env.create_symintnode(expr, hint=number, source=source)

    def size(self, a: Size) -> Any:
        """A size over torch's symbols."""
        return computed_from(a, {s.name: self.symbol(s) for s in symbols(a)})

    def value(self, x: Any) -> Any:
        """A SymInt or FakeTensor with sizes of torch's in place of ours."""
        if isinstance(x, Tensor):
            return self.fake(x, self.own_mode)
        return self.size(known_size(x)) if type(x) is torch.SymInt else x

    def fake(self, x: Tensor, mode: FakeTensorMode) -> Any:
        """A FakeTensor with torch's sizes."""
        sizes, strides = ([*map(self.value, row)] for row in (x.shape, x.stride()))
        return fake_of(mode, x, sizes, strides)

    def examples(self, inputs: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
        """The inputs for a backend: tensors as they are, which the mode knows, and SymInts."""
        given = []
        for x, real in zip(inputs, examples, strict=True):
            given.append(real if isinstance(x, Tensor) else self.value(x))
            if isinstance(x, Tensor):
                fake = self.fake(x, self.mode)
                if known((*fake.shape, *fake.stride())):
                    fake = self.mode.from_tensor(real, static_shapes=True)
                self._keep.append(fake)
                self.mode.fake_tensor_converter.set_tensor_memo(real, fake)
        return given

    # ---------------------------------------------------------------------- the graph

    def module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A copy of a graph, and of those that it calls, with torch's values beside its nodes."""
        made = copied(gm, self.module)
        graph = made.graph
        inputs = graph.find_nodes(op="placeholder")
        given = [self.value(node.meta["example_value"]) for node in inputs]
        numbers: dict[fx.Node, Any] = {}
        for node, x in zip(inputs, given, strict=True):
            if type(x) is torch.SymInt:
                node._rename(str(x))  # another one than that, if two have become equal
                node.type, node.target = torch.SymInt, node.name
            elif type(x) is int:  # it has become one
                numbers[node] = x
        for node in graph.nodes if numbers else ():
            node.args, node.kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda y: numbers.get(y, y)
            )
        for node in graph.find_nodes(op="call_function", target=operator.getitem):
            _select(node)
        self._tell()
        grad = torch.set_grad_enabled(torch.is_grad_enabled())
        with (
            grad, switches_restored(), torch._C._EnablePythonDispatcher(), self.own_mode,
            self.shape_env.ignore_fresh_unbacked_symbols(),
        ):  # fmt: skip
            _Values(made, self.own_mode).run(*given)
        made.recompile()
        return made

    def _tell(self) -> None:
        """Let torch know what is known of the symbols, so that it asks no more."""
        for symbol in self.made:
            for op, end in zip((">=", "<="), self.env.limits(symbol.expr)):
                if end is not None and abs(end) < _LARGEST:
                    self._tell_of(symbol.expr, op, end)
        for a, op, b, _ in self.env.relations:
            a, b = self.env.simplified(a), self.env.simplified(b)
            if self.made.keys() >= {*symbols(a), *symbols(b)}:
                self._tell_of(a, op, b)

    def _tell_of(self, a: Size, op: str, b: Size) -> None:
        if (a, op, b) not in self.known:
            self.known.add((a, op, b))
            check: Any = torch._check
            check(COMPARISONS[op](self.size(a), self.size(b)))

    # ---------------------------------------------------------------------- to ours

    def learn(self) -> None:
        """Rely on what torch's ShapeEnv has relied on; what it would from now on, is too late."""
        self.shape_env.freeze()
        self.ours = TorchSymbols()
        self.names = {
            str(x.node._expr): symbol for symbol, x in self.made.items() if type(x) is torch.SymInt
        }
        self.ours.by_name.update(self.names)
        for guard in self.shape_env.guards:
            frame: Any = guard.sloc.framework_loc  # of who asked
            is_known = hasattr(frame, "lineno")
            where = f"{frame.filename}:{frame.lineno} in {frame.name}" if is_known else ""
            self._rely(guard.expr, where)
        for asserted in chain(*self.shape_env.deferred_runtime_asserts.values()):
            self._rely(asserted.expr, "")
        for x in self.made.values():  # what became of the symbols themselves
            expr = x.node._expr if type(x) is torch.SymInt else None
            if (instead := self.shape_env.replacements.get(expr)) is not None:
                self._rely(sympy.Eq(expr, instead), "")
            elif (bounds := self.shape_env.var_to_range.get(expr)) is not None:
                for compared, end in ((sympy.Ge, bounds.lower), (sympy.Le, bounds.upper)):
                    if isinstance(end, sympy.Integer) and abs(int(end)) < _LARGEST:
                        self._rely(compared(expr, end, evaluate=False), "")
        self.env.where = str

    def _rely(self, known: Any, where: str) -> None:
        if isinstance(known, sympy.And):
            for part in known.args:
                self._rely(part, where)
            return
        if known is sympy.true or not {*map(str, known.free_symbols)} <= self.names.keys():
            return  # what only the data knows is the graph's to check
        self.env.where = lambda: where
        relation = self._relation(known)
        if relation is not None:
            self.env.holds(*relation)
            return
        # no relation says it: as Python
        names = sorted(map(str, known.free_symbols))
        text = PythonPrinter().doprint(known)
        held = {"math": math, "torch": torch}
        source = f"def holds(sizes):\n    {', '.join(names)}, = sizes\n    return {text}"
        holds = define(source, "holds", "guard", held)
        shown = re.sub(r"\w+", lambda x: str(self.names.get(x[0], x[0])), text)
        own = tuple(self.names[name] for name in names)
        self.env.written.append(Predicate(holds, shown, own, True, where))

    def _relation(self, known: Any) -> tuple[Size, str, Size] | None:
        """A guard as a relation of ours; None if it is none, or says something else."""
        if not isinstance(known, sympy.core.relational.Relational):
            return None
        try:
            a, b = (self.ours.convert(x, self.shape_env) for x in (known.lhs, known.rhs))
        except TraceError:
            return None
        op = known.rel_op
        return (a, op, b) if COMPARISONS[op](hint(a), hint(b)) else None


class _Values(fx.Interpreter):
    """Runs a graph, and puts beside each node what it gave."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.op == "get_attr" and type(found) in (Tensor, torch.nn.Parameter):
            found = self.mode.from_tensor(found, static_shapes=True)
        if n.op != "output":
            n.meta["example_value"] = found
        return found


def _select(node: fx.Node) -> None:
    """Write `x[i]` of integers that vary as select(): C++ would ask for their numbers."""
    x, key = node.args
    if not is_place_open(fx.node.map_arg(key, lambda n: n.meta.get("example_value"))):
        return
    assert isinstance(x, fx.Node)

    def is_open(part: Any) -> bool:
        number = part.meta["example_value"] if isinstance(part, fx.Node) else None
        return type(number) is torch.SymInt and not number.node.env.data.of(known_size(number))

    whole, places = places_of(key, x.meta["example_value"].dim(), is_open)
    calls: list[tuple[Any, tuple[Any, ...]]] = [(torch.select, place) for place in places]
    if whole and calls:
        calls.insert(0, (operator.getitem, (whole,)))
    for function, given in calls[:-1]:
        with node.graph.inserting_before(node):
            x = node.graph.call_function(function, (x, *given))
        x.meta = {**node.meta}
    if calls:
        node.target, node.args = calls[-1][0], (x, *calls[-1][1])
