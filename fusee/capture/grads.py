"""What belongs to tensors: gradients, data, and attributes that programs put on them; and gradients
of a graph's results that are asked for one by one.

The `grad` of one is a part of it like an attribute: None or a tensor, by a fact. What is written
to it is replayed after the graph. Between two such reads only a backward pass could change it,
and that is never inside of a graph.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fusee.capture.bytecode import codes
from fusee.capture.effects import written_by
from fusee.capture.graph_break import GraphBreak, storages
from fusee.capture.mirrors import Mirror
from fusee.capture.sources import Dict, Held, is_trusted
from fusee.capture.torch_api import FakeTensor, asks, leaf_gradients, no_torch_function
from fusee.fake.layouts import known
from fusee.runtime.cache import CUTS


def read(m: Any, fake: torch.Tensor) -> Any:
    """`tensor.grad`."""
    world = m.world
    if m.modes or (id(fake) in world.seen and asks(m.kind_of(fake))):
        raise GraphBreak("the grad of a tensor whose class, or a mode, is asked about it")
    written = world.slots.get((id(fake), "grad"))
    if written is not None:
        return written[2]
    real, origin = world.inputs.get(id(fake), (None, None))
    if real is None or origin is None:
        if id(fake) in world.put_grads:
            return world.put_grads[id(fake)]
        if fake.requires_grad:
            raise GraphBreak("the grad of a tensor of the graph is the result of a backward pass")
        return None
    with no_torch_function(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that most such tensors have none
        grad = real.grad
    return world.load(grad, world.place(fake, "grad"))


def write(m: Any, fake: torch.Tensor, value: Any) -> None:
    """`tensor.grad = value`."""
    if m.modes:
        raise GraphBreak("setting the grad of a tensor where a mode is asked about it")
    is_input = id(fake) in m.world.inputs
    with no_torch_function():  # autograd knows nothing of a plain one
        is_plain = not (fake.requires_grad or fake.is_inference())
    if id(fake) in m.world.seen or not (is_input or (is_plain and m.recorder.is_main)):
        raise GraphBreak("setting the grad of a tensor that the graph computes")
    if isinstance(value, FakeTensor):
        same = [(x.shape, x.dtype, x.device) for x in (fake, value)]
        if same[0] != same[1] or value.requires_grad or value is fake:
            raise GraphBreak("a grad unlike its tensor", "give it the tensor's size and dtype")
    elif value is not None:
        raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value)}")
    if is_input:
        m.world.set_slot(fake, "grad", value)
    else:
        m.world.put_grads[id(fake)] = value


def put_on(m: Any, fake: torch.Tensor) -> Mirror:
    """The Mirror of what programs put on a tensor, from outside or computed by the graph."""
    real, origin = m.world.inputs.get(id(fake), (None, None))
    if origin is not None:
        known: Mirror | None = m.world.mirrors.get(id(real.__dict__))
        return known or m.world.mirror(real.__dict__, Dict(origin))
    if id(fake) not in m.world.put_on:
        m.world.put_on[id(fake)] = made = Mirror({}, Held(fake, "attributes"))
        made.copy = {}
    found: Mirror = m.world.put_on[id(fake)]
    return found


def store_grad(m: Any, fake: torch.Tensor, name: str, value: Any) -> bool:
    """`tensor.requires_grad = value`, or `tensor.data = value` of what is its data; else False."""
    if id(fake) in m.world.seen or m.modes:
        return False
    with no_torch_function():
        is_leaf = fake.is_leaf
    if name == "requires_grad" and isinstance(value, bool) and is_leaf:
        m.recorder.call(torch.Tensor.requires_grad_, fake, value)
        return True
    if name != "data" or not isinstance(value, FakeTensor) or id(value) in m.world.seen:
        return False
    if _is_data(fake, value):
        return True
    # to the program it is the same tensor, with the other one's memory
    recorder, is_input = m.recorder, id(fake) in m.world.inputs
    with no_torch_function():
        is_like = (fake.dtype, fake.device) == (value.dtype, value.device)
        if not is_like or not recorder.is_main or (fake.requires_grad and not is_input):
            raise GraphBreak("a tensor gets data unlike its own, or loses track of gradients")
        before = fake.detach().requires_grad_(fake.requires_grad)
    data = recorder.call(torch.Tensor.detach, value)
    if any(x is fake for x, *_ in recorder.turned):
        raise GraphBreak("a tensor that was turned in place gets the data of another")
    recorder.rebind(fake, before, data)
    if fake.requires_grad:  # and the graph would not give it any gradient
        recorder.leaves[id(fake)] = recorder.leaves[id(data)] = True
    if is_input:
        m.world.set_slot(fake, "data", data)
    with no_torch_function():
        fake.data = data
    return True


def _is_data(fake: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a tensor is the memory of another one, seen as it is."""

    def seen(x: torch.Tensor) -> tuple[Any, ...]:
        memory = x.untyped_storage()._cdata
        return memory, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

    with no_torch_function():
        return value is fake or seen(value) == seen(fake)


def spent(x: torch.Tensor) -> torch.Tensor:
    """What a graph gives in the place of a tensor whose history a backward pass has used up."""
    with torch.inference_mode(False):  # gradients are on, whatever is on where the piece began
        return _Spent.apply(torch.empty(0, requires_grad=True), [x])  # type: ignore[no-untyped-call, no-any-return]


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors"
            " after they have already been freed). Saved intermediate values of the graph are freed"
            " when you call .backward() or autograd.grad(). Specify retain_graph=True if you need"
            " to backward through the graph a second time or if you need to access saved tensors"
            " after calling backward."
        )


def is_held(leaf: torch.Tensor) -> bool:
    """Whether somebody has the node of autograd at which the gradients of a leaf end: it may have
    hooks, which nothing tells of."""
    with torch.enable_grad():
        ((node, _),) = leaf.view_as(leaf).grad_fn.next_functions  # type: ignore[union-attr]
    return sys.getrefcount(node) > 2


def is_watched() -> bool:
    """Whether backward passes look for NaN, or may meet hooks of torch.distributed."""
    if torch.is_anomaly_enabled():
        return True
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and bool(module.is_initialized())


# ---------------------------------------------------------------------------- of results
# A compiled graph is one node of autograd: no way leads from one of its results to another. Where a
# function may ask for gradients of what a graph gave (`torch.autograd.grad(loss, features)`,
# `features.retain_grad()`, hooks of tensors), its graphs are cut behind such results, so that what
# comes after one has it in its history, as in eager mode. One that cannot be cut runs as captured.

_ASKING = frozenset("retain_grad register_hook register_multi_grad_hook get_gradient_edge".split())
_MOST = 400  # functions, then it is taken to ask


def asks_for_gradients(functions: Iterable[Any], values: Iterable[Any]) -> bool:
    """Whether functions, or what they call by name, may ask for gradients of what is no leaf.

    functions  or their code
    values     objects that the functions have in their variables
    """
    left, seen, held = [*functions], dict[int, Any](), [*values]
    first = len(left)
    while left:
        function = left.pop()
        is_code = isinstance(function, types.CodeType)
        code = function if is_code else function.__code__
        if id(code) in seen:
            continue
        seen[id(code)] = code
        names = {name for one in codes(code) for name in one.co_names}
        space: dict[str, Any] = {} if is_code else function.__globals__
        known = [space[name] for name in names if name in space]
        is_near = any(x is torch.autograd for x in known) or any("autograd" in x for x in names)
        keywords = {x for one in codes(code) for c in one.co_consts if type(c) is tuple for x in c}
        if (
            len(seen) > _MOST
            or not _ASKING.isdisjoint(names)
            or (is_near and "grad" in names)
            or any(x is torch.autograd.grad for x in known)
            or ("backward" in names and "inputs" in keywords)
        ):
            return True
        if not is_code:
            filled = (x for x in function.__closure__ or () if x != types.CellType())
            known += [x.cell_contents for x in filled]
        if len(seen) <= first:
            known += held
        left += (found for x in known for found in _called(x, names))
    return False


def is_asked(callers: Iterable[tuple[types.FunctionType, Any]]) -> bool:
    """Whether any of these may ask for gradients of what a function gives them."""
    for function, varies in callers:
        if varies.asks_gradients is None:
            varies.asks_gradients = asks_for_gradients((function,), ())
    return any(varies.asks_gradients for _, varies in callers)


def _function(x: Any) -> Any:
    """What Python runs of the program's where this is called; None if that is not plain to see."""
    kind = type(x)
    if kind in (types.MethodType, classmethod, staticmethod):
        x = x.__func__
    elif kind is property:
        x = x.fget
    elif kind is functools.partial:
        x = x.func
    return x if type(x) is types.FunctionType and _is_programs(x.__module__) else None


def _is_programs(module: Any) -> bool:
    return type(module) is str and not is_trusted(module)


def _called(x: Any, names: Iterable[str]) -> Iterator[types.FunctionType]:
    """The program's functions that an object is, or has under these names. It hears nothing."""
    if (found := _function(x)) is not None:
        yield found
        return
    if isinstance(x, types.ModuleType):
        spaces = [object.__getattribute__(x, "__dict__")]
        spaces = [space for space in spaces if _is_programs(space.get("__name__"))]
    else:
        bases = type.__getattribute__(x if isinstance(x, type) else type(x), "__mro__")
        spaces = [type.__getattribute__(base, "__dict__") for base in bases]
        spaces = [space for space in spaces if _is_programs(space.get("__module__"))]
    for space in spaces:
        for name in (*names, "__init__", "forward", "__call__"):
            if (found := _function(space.get(name))) is not None:
                yield found


def cuts(graph: fx.Graph) -> dict[str, Any]:
    """What is noted at a graph: how many calls stand before each cut between results, if there are
    any; None if it cannot be cut there."""
    *nodes, output = graph.nodes
    calls = [node for node in nodes if node.op.startswith("call_")]
    asked = {x for x in output.all_input_nodes if x in {*calls}}
    results = {x for x in asked if getattr(x.meta.get("example_value"), "requires_grad", False)}
    leads, memory = set(results), storages(results)  # to one of these, also by a write
    for node in reversed(calls):
        if not leads.isdisjoint(node.users) or memory & storages(written_by(node)):
            leads.add(node)
            memory |= storages([node])
    found, given = list[int](), set[int]()  # where the elements of results since the last cut lie
    for k, node in enumerate(calls):
        if node in leads and given and not given.isdisjoint(storages(node.all_input_nodes)):
            found.append(k)
            given.clear()
        if node in results:
            given |= storages([node])
    is_free = all(_is_free(nodes, calls, k) for k in found)
    return {CUTS: found if is_free else None} if found else {}


def _is_free(nodes: list[fx.Node], calls: list[fx.Node], k: int) -> bool:
    """Whether two graphs may stand in place of one: they pass whole tensors of known sizes, which
    share no memory and are not written to, and torch's state is the same in both."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in inputs:
        x = node.meta.get("example_value")
        if not isinstance(x, torch.Tensor) or not known(x.shape):
            return False
    if any("example_value" not in n.meta or n.target is leaf_gradients for n in calls):
        return False
    crossing = [node for node in calls[:k] if not {*calls[:k]}.issuperset(node.users)]
    if not all(isinstance(node.meta["example_value"], torch.Tensor) for node in crossing):
        return False
    memory = storages(crossing)
    written = storages(x for node in calls for x in written_by(node))
    return len(memory) == len(crossing) and memory.isdisjoint(written | storages(inputs))
