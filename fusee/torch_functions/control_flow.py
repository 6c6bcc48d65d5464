"""torch.cond, while_loop, map and scan: their functions are graphs, and the call is one node.

As in TorchDynamo's graphs, a function takes the call's operands and then the tensors that it uses
from outside, which the call gets as operands too. How often a function runs is known only when the
graph runs, so it must do nothing but compute tensors, new ones: anything else ends the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.effects import BODY, effects, storages
from fusee.capture.numbers import Computed
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs
from fusee.capture.torch_api import FakeTensor, graph_module, pytree
from fusee.torch_functions.torch_api import higher_order
from fusee.torch_functions.transforms import Body, run_body

__all__: list[str] = []


class _Form(NamedTuple):
    """How a higher-order operator calls its functions.

    functions  their places among its arguments, and the names that TorchDynamo gives their graphs
    lifted     the place of the operands to which tensors from outside are added
    given      from the arguments: what the functions get
    stacked    from the arguments: how many of the last function's results are not stacked, and how
               many rows the others have
    """

    functions: dict[int, str]
    lifted: int
    given: Callable[[Any], tuple[Any, ...]]
    stacked: Callable[[Any], tuple[int | None, int]] = lambda args: (None, 0)


def _rows(xs: Any) -> tuple[Any, ...]:
    return tuple(x.select(0, 0) for x in xs)


_FORMS = {
    "cond": _Form({1: "cond_true", 2: "cond_false"}, 3, lambda args: tuple(args[3])),
    "while_loop": _Form({0: "cond_fn", 1: "body_fn"}, 3, lambda args: (*args[2], *args[3])),
    "map_impl": _Form(
        {0: "map_body"}, 2, lambda args: (*_rows(args[1]), *args[2]),
        lambda args: (0, args[1][0].shape[0]),
    ),
    "scan": _Form(
        {0: "scan_combine_fn"}, 3, lambda args: (*args[1], *_rows(args[2]), *args[3]),
        lambda args: (len(args[1]), args[2][0].shape[0] if args[2] else 0),
    ),
}  # fmt: skip


def _call(name: str, m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    form, given = _FORMS[name], list(m.deep((*args, *kwargs.values())))
    if name == "cond" and not isinstance(given[0], (FakeTensor, Computed)):
        return m.call(given[1 if m.truth(given[0]) else 2], tuple(given[3]), {})
    operands = [x for k, x in enumerate(given) if k not in form.functions]
    if not all(isinstance(x, FakeTensor) for x in pytree.tree_leaves(operands)):
        raise GraphBreak(f"{name} of operands that are no tensors")
    with torch._C.DisableTorchFunction(), m.world.mode:
        inner = form.given(given)
    bodies = {k: run_body(m, name, given[k], inner, {}, None) for k in form.functions}
    outside = {id(x): x for body in bodies.values() for x in body.outside}
    for body in bodies.values():
        _check(name, body, (*inner, *outside.values()))
    first, last = bodies[min(bodies)], bodies[max(bodies)]
    if name == "cond" and _described(first) != _described(last):
        raise GraphBreak(
            f"the functions of cond give {_described(first)[1]} and {_described(last)[1]}",
            "both must give results of the same structure, sizes, strides and dtypes",
        )
    for k, body in bodies.items():
        given[k] = _aligned(body, len(inner), list(outside.values()))
        given[k].meta[BODY] = body.calls
        given[k].meta["name"] = form.functions[k]
    given[form.lifted] = (*given[form.lifted], *outside.values())
    leaves = pytree.tree_leaves([x for k, x in enumerate(given) if k not in form.functions])
    results = _results(m, last, leaves, *form.stacked(given))
    m.world.recorder.write(getattr(higher_order, name), "", tuple(given), {}, results)
    return pytree.tree_unflatten(results, last.spec)


def _check(name: str, body: Body, operands: Sequence[torch.Tensor]) -> None:
    """raises GraphBreak for a function that does more than compute new tensors."""
    with torch._C.DisableTorchFunction():
        shared = {x.untyped_storage()._cdata for x in operands}
        placeholders = [n for n in body.module.graph.nodes if n.op == "placeholder"]
        shared |= storages(placeholders)
        results = storages(body.results)
        writes = [n for n in body.calls if "writes" in effects(n)]
        if any(shared & storages(n.all_input_nodes) for n in writes):
            raise GraphBreak(
                f"the function {body.name} under {name} writes to a tensor it is given"
            )
        if shared & results or len(results) < len(body.results):
            raise GraphBreak(
                f"the function {body.name} under {name} gives a tensor that it gets, or one twice",
                "return x.clone()",
            )
    if any("draws" in effects(n) for n in body.calls):
        raise GraphBreak(f"the function {body.name} under {name} draws random numbers")
    if not all(leaf is None for leaf in body.leaves):
        raise GraphBreak(f"the function {body.name} under {name} gives more than tensors")


def _described(body: Body) -> tuple[Any, list[str]]:
    found = [n.meta["example_value"] for n in body.results]
    with torch._C.DisableTorchFunction():
        rows = [f"{x.dtype} {tuple(x.shape)} of strides {x.stride()}" for x in found]
    return body.spec, rows


def _aligned(body: Body, count: int, outside: list[torch.Tensor]) -> fx.GraphModule:
    """The graph of a function that takes all tensors from outside, in one order for all."""
    old, made, env = body.module.graph, fx.Graph(), dict[fx.Node, fx.Node]()
    places = old.find_nodes(op="placeholder")
    own = {id(x): node for x, node in zip(body.outside, places[count:], strict=True)}
    for k, x in enumerate([*places[:count], *outside]):
        node = x if isinstance(x, fx.Node) else own.get(id(x))
        placeholder = made.placeholder(f"arg{k}")
        placeholder.meta["example_value"] = x if node is None else node.meta["example_value"]
        if node is not None:
            env[node] = placeholder
    made.output(made.graph_copy(old, env))
    return graph_module(made, body.module)


def _results(
    m: Capturing, body: Body, operands: list[Any], plain: int | None, rows: int
) -> tuple[torch.Tensor, ...]:
    """Stand-ins of what the call gives."""
    found = []
    with torch._C.DisableTorchFunction(), m.world.mode:
        wants = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        for k, node in enumerate(body.results):
            x = node.meta["example_value"].detach()
            if plain is not None and k >= plain:
                x = x.new_empty((rows, *x.shape))
            else:
                x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            is_float = x.is_floating_point() or x.is_complex()
            found.append(x.requires_grad_().clone() if wants and is_float else x)
    return tuple(found)


for _name in (name for name in _FORMS if hasattr(higher_order, name)):
    SPECIAL[getattr(higher_order, _name)] = functools.partial(_call, _name)
