"""The entry points of stock torch.compile: torch.compile(m, backend="fusee", options={...}).

Modes are torch.compile's (registry.MODES).

torch._C   the switch of gradients, as TorchDynamo calls it
source     docs "Custom Backends" of PyTorch: the group torch_dynamo_backends
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version

from fusee.aten.torch_api import data_of
from fusee.backends.registry import check_mode, lookup
from fusee.errors import FuseeWarning, warn
from fusee.runtime import signals_held


def _named(name: str, variable: str) -> Callable[..., Callable[..., Any]]:
    """A backend of ours for stock torch, which gives each use its own options.

    variable   where it stands below: pickles of compiled modules name it by that
    """

    def compile_named(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        check_mode(mode)
        found = lookup(name, options, mode)
        if any(isinstance(x, list) for x in example_inputs) or _is_autograds(gm):
            what = "compiled autograd's graphs run eagerly: they write to .grad and give it away"
            warn(FuseeWarning, what, did="nothing was compiled")
            return gm.forward
        _open_regions(gm)
        given = give_data(gm, example_inputs)
        with signals_held():
            made: Callable[..., Any] = found(gm, example_inputs)
        return giving(made, given)

    compile_named.__name__ = f"fusee_{name}"
    compile_named.__qualname__ = variable
    return compile_named


def _open_regions(gm: fx.GraphModule) -> None:
    """Call nested_compile_region's regions as modules: eager has no gradient of its operator."""
    for inner in [x for x in gm.modules() if isinstance(x, fx.GraphModule)]:
        if "invoke_subgraph(" in inner.code:
            for x in inner.graph.nodes:
                if getattr(x.target, "_name", "") == "invoke_subgraph":
                    x.op, x.target, x.args = "call_module", x.args[0].target, x.args[2:]
            inner.recompile()


def _is_autograds(gm: fx.GraphModule) -> bool:
    """Whether it has a backward's calls, which compiled autograd gave TorchDynamo."""
    modules = {getattr(node.target, "__module__", "") for node in gm.graph.nodes}
    calls = {getattr(node.target, "__name__", "") for node in gm.graph.nodes}
    return "torch._dynamo.compiled_autograd.ops" in modules or "call_accumulate_grad" in calls


compile_fx = _named("fusee", "compile_fx")
compile_openvino = _named("openvino", "compile_openvino")
compile_openvino_ts = _named("openvino_ts", "compile_openvino_ts")
compile_onnxrt = _named("onnxrt", "compile_onnxrt")


# ---------------------------------------------------------------------------- new data
# `p.data = other` in graphs of TorchDynamo, where it is `set_`, which no functional graph has.
#
# From there on the graph takes `other` for p, and gives it as one more result, which p gets as its
# data behind the graph. What p has besides, its gradient and its version, stays.

_IN_PLACE: Any = operator.iadd, operator.isub, operator.imul, operator.itruediv


def give_data(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[tuple[int, bool]]:
    """Change a graph that replaces the data of inputs: which ones get its last results as theirs,
    and whether it also writes to them.

    Nothing changes if gradients go to an input from where it has other data.
    """
    graph = gm.graph
    if not any(map(_is_given, graph.nodes)) or (found := _replaced(graph, example_inputs)) is None:
        return []
    calls, uses, now, written = found
    data = dict[Any, fx.Node]()
    for call, other, at in calls:
        if other is None:
            continue
        with graph.inserting_before(call):
            data[call] = graph.call_function(data_of, (data.get(at, other),))
        data[call].meta = {**other.meta}
    for node, target, call in uses:
        node.replace_input_with(target, data[call])
    for call, *_ in calls:
        for user in (*call.users, call):
            graph.erase_node(user)
    output: Any = graph.output_node()
    output.args = ((*output.args[0], *(data[call] for call in now.values())),)
    gm.recompile()
    inputs = graph.find_nodes(op="placeholder")
    return [(inputs.index(target), target in written) for target in now]


def giving(run: Callable[..., Any], given: Sequence[tuple[int, bool]]) -> Callable[..., Any]:
    """What calls a graph that `give_data` has changed."""

    def call(*args: Any) -> Any:
        results = run(*args)
        for (k, is_written), data in zip(given, results[-len(given) :], strict=True):
            args[k].data = data
            if is_written:
                increment_version(args[k])
        return results[: -len(given)]

    return call if given else run


def _is_given(node: fx.Node) -> bool:
    """Whether it is `p.data = other`: set_, which is no write to p, so its version is put back."""
    behind: list[Any] = [(getattr(x.target, "__name__", ""), len(x.users)) for x in node.users]
    return node.target is torch.Tensor.set_ and behind == [("_lower_version_count_by_1", 0)]


def _is_write(node: fx.Node) -> bool:
    name = str(node.target)
    is_method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    return is_method or node.target in (*_IN_PLACE, operator.setitem)


def _replaced(graph: fx.Graph, example_inputs: Sequence[Any]) -> tuple[Any, Any, Any, Any] | None:
    """What becomes of the data of inputs.

    calls  of set_: (call, what it puts there, or None, the call that put there what this is)
    uses   (node, input, call): the node takes for the input what the call has put there
    now    input -> the last call; `written`: inputs that are written to where they have other data
    """
    given = dict(zip(graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    calls, uses, now, written = list[Any](), list[Any](), dict[Any, fx.Node](), set[fx.Node]()
    own = dict[Any, Any]()  # value -> the input of which it is the data that it came with
    is_on: Any = torch.is_grad_enabled()
    for node in graph.nodes:
        first: Any = node.args[0] if node.args else None
        if node.target is torch._C._set_grad_enabled:
            is_on = first
        if _is_given(node) and first in given:
            other: Any = node.args[1]
            if own.get(other) is first:
                if now.pop(first, None) is not None:  # it has its own again
                    calls.append((node, None, None))
                continue  # else it is `p.data -= step`
            kinds = [(x.dtype, x.device) for x in (y.meta["example_value"] for y in (first, other))]
            if kinds[0] != kinds[1]:
                return None
            calls.append((node, other, now.get(other)))
            now[first] = node
            continue
        if node.target is data_of and first in given and first not in now:
            own[node] = first
        elif node.target in _IN_PLACE and first in own:
            own[node] = own[first]
        for x in node.all_input_nodes if node.op != "output" else ():
            if x in now:
                leads = getattr(node.meta.get("example_value"), "requires_grad", False)
                if given[x].requires_grad and node.target is not data_of and (is_on or leads):
                    return None  # without gradients on, a view of a leaf
                uses.append((node, x, now[x]))
                written |= {x} if x is first and _is_write(node) else set()
    return calls, uses, now, written
