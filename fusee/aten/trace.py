"""An fx graph of torch calls becomes a functional graph of ATen operators.

The graph's nodes run on meta tensors under a dispatch mode that sits below autograd, where every
operator arrives whole: linear as linear, not as transpose and matmul. The first line that applies
decides what becomes of it:

    always.py      operators whose result may or may not be a view: decided here and now
    mutate.py      operators that write: their functional counterpart, then Builder.write
    keep           what the caller wants to see is recorded; so is what may raise for values, since
                   decompositions lose the error
    canonical.py   spellings of one thing: softmax.int -> _softmax, conv2d -> convolution
    composite      operators that torch composes of others are taken apart by torch
    decompose.py   the tables
    record         anything else

What has no functional ATen form raises TraceError with the reason and the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from fusee.aten.always import ALWAYS
from fusee.aten.canonical import CANONICAL
from fusee.aten.decompose import Table, decomposition, keep_core
from fusee.aten.foreach import FOREACH
from fusee.aten.functional import Builder
from fusee.aten.graph import AtenGraph
from fusee.aten.mutate import write_rule
from fusee.aten.nodes import run_nodes
from fusee.aten.outputs import Results, flatten
from fusee.aten.sources import Inputs, Prepare
from fusee.aten.tidy import merge_equal, remove_dead
from fusee.aten.torch_api import (
    OpOverload,
    active,
    autocast_restored,
    below_autograd,
    is_composite,
    is_explicit,
    op_name,
    symbolic_mode,
)
from fusee.aten.tracer import Args, Kwargs, Rule, Tracer
from fusee.aten.twins import FakeTwins, MetaTwins
from fusee.sym.fakes import fake_mode
from fusee.sym.from_torch import Symbols
from fusee.sym.raising import may_raise

__all__ = ["start", "trace"]

_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def trace(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    keep: Callable[[OpOverload], bool] = keep_core,
    decompositions: Table | None = None,
    overlapping: bool = False,
) -> AtenGraph:
    """The functional ATen graph of `gm` called with inputs like these.

    keep             operators that must stay as they are; views never do
    decompositions   come before torch's own
    overlapping      inputs that are written to may overlap others: who calls looks at each call
    raises           TraceError if there is no such graph; MissingFake for a custom operator
                     that doesn't say what it returns
    """
    tracer, inputs = start(gm, example_inputs, keep, decompositions, kind=Tracer)
    b, to_size = tracer.b, inputs.to_size
    ambient = torch.is_autocast_enabled(inputs.device.type)
    with below_autograd(), autocast_restored(), torch.no_grad():
        returned = run_nodes(tracer, gm, gm.graph, inputs.given, inputs.attribute)
        leaves: list[Any] = []
        structure = flatten(returned, leaves)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                tracer.value(leaf)
        results = Results(b, inputs.values, to_size)
        mutations = results.mutations()
        if not overlapping:
            inputs.check_aliases(mutations)
        outputs = results.outputs(leaves)
    b.graph.output(tuple(results.nodes))
    remove_dead(b.graph)
    merge_equal(b.graph, results.memory)
    return AtenGraph(
        graph=b.graph,
        constants=b.constants,
        inputs=inputs.specs(),
        outputs=outputs,
        mutations=mutations,
        structure=structure,
        symbols=inputs.symbols(),
        to_size=to_size,
        no_autocast=ambient,
        from_start=frozenset(b.from_start),
    )


T = TypeVar("T", bound=Tracer)


def start(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    keep: Callable[[OpOverload], bool],
    decompositions: Table | None,
    *,
    kind: type[T],
    prepare: Prepare | None = None,
    with_devices: bool = False,
) -> tuple[T, Inputs]:
    """A tracer with an empty graph, and the inputs to run `gm` with.

    kind          the class of the tracer
    with_devices  the twins must say on which device they are
    """
    mode = symbolic_mode(_examples(gm, example_inputs))
    to_size = Symbols()
    if mode is not None:
        b = Builder(FakeTwins(mode), to_size)
    else:
        b = Builder(FakeTwins(fake_mode()) if with_devices else MetaTwins(), None)
    inputs = Inputs(b, gm, example_inputs, to_size, prepare)
    tracer = kind(b, _policy(keep, decompositions), opaque_rule, inputs.lift, inputs.device)
    return tracer, inputs


def _examples(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs, and what torch.compile noted for their placeholders: sizes may be symbolic."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [*inputs, *(node.meta.get("example_value") for node in placeholders)]


def _whatever_it_holds(op: OpOverload) -> Rule | None:
    """The rule of an operator that is the same for all dtypes; None if it has no such rule."""
    if op in ALWAYS or op in FOREACH:
        return ALWAYS.get(op) or FOREACH[op]
    writes = write_rule(op)
    if writes is not None:
        return writes
    return None if _NEEDS_VALUES.isdisjoint(op.tags) else _refuse_values


def _policy(
    keep: Callable[[OpOverload], bool], table: Table | None
) -> Callable[[OpOverload], Rule]:
    def policy(op: OpOverload) -> Rule:
        if (rule := _whatever_it_holds(op)) is not None:
            return rule
        shares = any(r.alias_info is not None for r in op._schema.returns)
        if (keep(op) or (may_raise(op) and not is_composite(op))) and not shares:
            return Tracer.record
        if op in CANONICAL:
            return CANONICAL[op]
        if table is not None and op in table:
            return _decompose(table[op])
        if is_composite(op):
            return Tracer.composite
        if op_name(op).startswith("aten::_foreach_") and is_explicit(op):
            return Tracer.explicit
        function = decomposition(op)
        if function is None and shares:
            return _refuse_view
        return Tracer.record if function is None else _decompose(function)

    return policy


@functools.cache
def opaque_rule(op: OpOverload) -> Rule:
    """What becomes of an operator on complex tensors, or on real ones that are negated lazily.

    It stays whole, for ATen: what is above the tracer resolves such tensors where eager does.
    """
    if (rule := _whatever_it_holds(op)) is not None:
        return rule
    if op in CANONICAL or is_composite(op):
        return CANONICAL.get(op) or Tracer.composite
    if any(r.alias_info is not None for r in op._schema.returns):
        return _refuse_view
    return Tracer.record


def _refuse_values(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    raise t.b.unsupported(f"what {op} returns depends on the values of tensors")


def _refuse_view(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    raise t.b.unsupported(f"{op} gives a view of a kind that tracing does not know")


def _decompose(function: Callable[..., Any]) -> Rule:
    def rule(t: Tracer, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        with active(t):
            return function(*args, **kwargs)

    return rule
