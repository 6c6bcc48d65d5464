"""Graphs within DistributedDataParallel: cut where gradients fill a bucket of its reducer.

A compiled backward gives all of its gradients at its end. Of several graphs each one's gradients
are sent while the backward of the one before it runs.
source   torch/_dynamo/backends/distributed.py, DDPOptimizer; private names of
         torch.nn.parallel.distributed as in torch 2.11 to 2.13
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten.torch_api import storage_id

CompiledFn = Callable[..., Any]


@dataclass
class BucketGraph:
    """A graph that is a part of another.

    given      the places of what it takes, among the whole graph's inputs and all parts' results
    dead       those of them that nobody reads any more
    compiled   at its first call: what comes from other parts has no data before
    """

    graph: fx.GraphModule
    given: list[int]
    dead: list[int]
    compiled: CompiledFn | None = None


class Bucketed(functools.partial[Any]):
    """Graphs that run one after the other: takes and gives what the whole one does."""

    @property
    def compiled(self) -> list[CompiledFn]:
        parts: list[BucketGraph] = self.args[1]
        return [part.compiled for part in parts if part.compiled is not None]


def in_buckets(
    gm: fx.GraphModule, examples: Sequence[Any], compile_graph: CompiledFn
) -> Bucketed | None:
    """The graph in parts, each compiled by itself; None if it is to be one graph.

    So are graphs with open sizes, whose parts would not know them, and those that switch torch's
    state on their way.
    """
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    active = module and module.DistributedDataParallel._get_active_ddp_module()
    if active is None or not torch.is_grad_enabled() or active.process_group.size() == 1:
        return None
    most: int = active.bucket_bytes_cap
    first: int = module.dist._DEFAULT_FIRST_BUCKET_BYTES
    # the bytes of each bucket, that of the last layers first
    limits = itertools.chain((min(first, most),), itertools.repeat(most))
    *nodes, output = gm.graph.nodes
    calls = [node for node in nodes if node.op.startswith("call_")]
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True))
    values = [node.meta.get("example_value") for node in inputs]
    is_open = any(
        not isinstance(x, Tensor) or any(isinstance(n, torch.SymInt) for n in x.shape)
        for x in values
    )
    if is_open or not all("example_value" in node.meta for node in calls):
        return None
    starts = _starts(calls, output.all_input_nodes, inputs, limits)
    if not starts:
        return None
    places = {node: k for k, node in enumerate(inputs)}
    parts: list[BucketGraph] = []
    for begin, end in itertools.pairwise((0, *reversed(starts), len(calls))):
        part, given, results = _part(gm, calls[begin:end])
        rest = {output, *calls[end:]}
        dead = [places[node] for node in given if rest.isdisjoint(node.users)]
        parts.append(BucketGraph(part, [places[node] for node in given], dead))
        places.update((node, len(places) + k) for k, node in enumerate(results))
    return Bucketed(_run, compile_graph, parts, fx.map_arg(output.args[0], places.__getitem__))


def _run(
    compile_graph: CompiledFn, parts: Sequence[BucketGraph], results: Sequence[Any], *inputs: Any
) -> tuple[Any, ...]:
    values = [*inputs]
    for part in parts:
        given = [values[k] for k in part.given]
        if part.compiled is None:
            part.compiled = compile_graph(part.graph, given)
        for k in part.dead:
            values[k] = None
        values += part.compiled(*given)
    return tuple(values[k] for k in results)


def _starts(
    calls: Sequence[fx.Node],
    outputs: Iterable[fx.Node],
    inputs: dict[fx.Node, Any],
    limits: Iterator[int],
) -> list[int]:
    """Which calls begin a part, the last first: so that its parameters fill a bucket."""
    left = {
        node: x.nbytes
        for node, x in inputs.items()
        if isinstance(x, Tensor) and x.requires_grad and x.is_leaf
    }
    outer = [storage_id(x) for node in inputs for x in _tensors(node)]
    crossing = {node for node in outputs if node.op.startswith("call_")}
    starts, size, limit = list[int](), 0, next(limits)
    for k in range(len(calls) - 1, 0, -1):
        read = calls[k].all_input_nodes
        size += sum(left.pop(node, 0) for node in read)
        crossing.update(node for node in read if node.op.startswith("call_"))
        crossing.discard(calls[k])
        if size < limit or not left:
            continue
        # no two tensors that go from one part to another may share memory
        places = [storage_id(x) for node in crossing for x in _tensors(node)]
        is_single = all(isinstance(node.meta["example_value"], Tensor) for node in crossing)
        if is_single and len({*places}.difference(outer)) == len(places):
            starts.append(k)
            size, limit = 0, next(limits)
    return starts


def _tensors(node: fx.Node) -> list[Tensor]:
    found = pytree.tree_leaves(node.meta.get("example_value"))
    return [x for x in found if isinstance(x, Tensor)]


def _part(
    gm: fx.GraphModule, calls: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A graph of these calls, what it is given, and what others want of it."""
    graph, made, own = fx.Graph(), dict[fx.Node, fx.Node](), {*calls}
    read = dict.fromkeys(x for node in calls for x in node.all_input_nodes if x not in own)
    given = [node for node in read if node.op != "get_attr"]
    for node in given:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in (*(node for node in read if node.op == "get_attr"), *calls):
        made[node] = graph.node_copy(node, made.__getitem__)
    results = [node for node in calls if not own.issuperset(node.users)]
    graph.output(tuple(made[node] for node in results))
    return fx.GraphModule(gm, graph), given, results
