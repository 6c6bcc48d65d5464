"""What is known of a call of a graph without running it: what it does besides computing, what it
gives if numbers alone decide it, what it gave before, and who asks for gradients of that."""

from __future__ import annotations

import functools
import operator
import types
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Set
from typing import Any

import torch
from torch import fx

from fusee.capture.bytecode import codes
from fusee.capture.frame import FUNCTIONS, is_scalar
from fusee.capture.graph_break import CHANGING, is_in_place, memory_of, storages
from fusee.capture.guards import EqualsMatch
from fusee.capture.sources import Dict, Item, Origin, ReadOf, is_buffer, is_trusted
from fusee.capture.symbols import was_unbacked
from fusee.capture.torch_api import (
    STATE_SWITCHES,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    State,
    fake_again,
    graph_module,
    leaf_gradients,
    no_torch_function,
    pytree,
    state_restored,
    without_modes,
)
from fusee.fake import is_symbolic, name_may_raise, raises
from fusee.fake.layouts import extent
from fusee.fake.torch_python import overloads_of
from fusee.runtime.cache import CUTS
from fusee.source import Args, Kwargs, NodeGraph, tensors_in

# The attribute of a target that has the calls of a function under a transform: higher_order.py.
BODY = "_fusee_body"
HOOKS = "_fusee_hooks"
# Of a node's meta: its effects, once it is known what it gives.
EFFECTS = "_fusee_effects"


def effects(node: fx.Node) -> Set[str]:
    """What a call may do besides computing.

    writes     to its operands
    anywhere   to what nobody knows
    draws      it moves a random generator
    raises     for values that the graph computes, such as an index
    hooks      it registers what runs in the backward pass
    """
    found: Set[str] | None = node.meta.get(EFFECTS)
    if found is None:
        found = _effects(node)
        if "example_value" in node.meta:
            node.meta[EFFECTS] = found
    return found


def is_check(node: fx.Node) -> bool:
    """Whether it only looks whether something holds, and raises where it does not."""
    return getattr(node.target, "__name__", "").startswith("_assert")


def _effects(node: fx.Node) -> set[str]:
    target: Any = node.target
    if node.op not in ("call_function", "call_method") or target in STATE_SWITCHES:
        return set()
    bodies = [x.meta[BODY] for x in node.all_input_nodes if BODY in x.meta]
    if hasattr(target, BODY) or bodies:
        calls = [n for body in (getattr(target, BODY, ()), *bodies) for n in body]
        found = set[str]().union(getattr(target, HOOKS, ()), *map(effects, calls))
        return found | {"anywhere"} if "writes" in found else found
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or "torch"
    is_torchs = target is getattr or module.split(".")[0] in ("torch", "_operator")
    place, key, default = _WRITE_IF.get(name, (0, "inplace", None))
    written = node.args[place] if 0 < place < len(node.args) else node.kwargs.get(key, default)
    found = {*_effects_of_name(name)}
    is_asked = (written is not None and written is not False) or node.kwargs.get("out") is not None
    if is_asked or target in _IN_PLACE:
        found.add("writes")
    is_operator = isinstance(target, (OpOverload, OpOverloadPacket))
    is_unknown = is_mutable(target) if is_operator else "generator" in node.kwargs or not is_torchs
    # without a result it was called for something else
    is_silent = is_check(node) or target is operator.setitem
    if node.meta.get("example_value", node) is None and not is_silent:
        is_unknown = True
    if is_unknown:
        found |= {"writes", "anywhere"}
    if not is_torchs:
        found.add("draws")
    at = node.args[1:2] if target in (operator.getitem, operator.setitem) else ()
    at = at[0] if at and type(at[0]) is tuple else at
    indexes = any(isinstance(x, (fx.Node, list)) for x in at)
    with no_torch_function():  # the recorder may be on
        refuses = raises(node, name.partition(".")[0], "example_value")
        operands = (x.meta.get("example_value") for x in node.all_input_nodes)
        opens = (x for x in operands if not isinstance(x, (list, tuple)) and is_symbolic(x))
        sizes = (n for x in opens for n in (x.shape if isinstance(x, torch.Tensor) else (x,)))
        refuses = refuses or any(map(was_unbacked, sizes))
    if indexes or refuses or node.kwargs.get("out") is not None:
        found.add("raises")
    return found


def written_by(node: fx.Node) -> Iterable[fx.Node]:
    """What a call may write to: all that it is given, if its name does not say more."""
    found, name = effects(node), str(getattr(node.target, "__name__", node.target))
    says = node.args and (node.target in _IN_PLACE or is_in_place(name))
    if isinstance(node.target, OpOverload) and "writes" in found:  # its schema says it
        rows = node.target._schema.arguments
        given = {**dict(zip((row.name for row in rows), node.args)), **node.kwargs}
        written = (given.get(x.name) for x in rows if x.alias_info and x.alias_info.is_write)
        return [x for x in pytree.tree_leaves([*written]) if isinstance(x, fx.Node)]
    if "anywhere" not in found and (out := node.kwargs.get("out")) is not None:
        return [x for x in pytree.tree_leaves(out) if isinstance(x, fx.Node)]
    if name in ("batch_norm", "instance_norm") and len(node.args) > 2:
        return [x for x in node.args[1:3] if isinstance(x, fx.Node)] if "writes" in found else ()
    if "anywhere" in found or not says:
        return node.all_input_nodes if "writes" in found else ()
    first: Any = node.args[0] if "writes" in found else ()
    return (first,) if isinstance(first, fx.Node) else first  # _foreach_* take lists


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay even if nobody uses its result."""
    is_bound = node.op in ("placeholder", "output") or node.target in STATE_SWITCHES
    return is_bound or bool(effects(node))


@functools.lru_cache(maxsize=4096)
def _effects_of_name(name: str) -> frozenset[str]:
    """What whatever has a name like this does besides computing, see `effects`."""
    may_raise = name.startswith("_assert") or name_may_raise(name.partition(".")[0])
    draws = name in _RANDOM or any(word in name for word in _RANDOM_WORDS)
    known = {"writes": is_in_place(name), "draws": draws, "raises": may_raise}
    return frozenset(effect for effect, holds in known.items() if holds)


_RANDOM = frozenset("multinomial poisson rrelu gumbel_softmax scaled_dot_product_attention".split())
_RANDOM_WORDS = tuple(
    "rand drop bernoulli normal binomial standard_gamma dirichlet exponential geometric"
    " cauchy uniform".split()
)

# Which argument, by place or name, says that these write to an operand; what it is by default.
_WRITE_IF: dict[str, tuple[int, str, Any]] = {
    **dict.fromkeys(("batch_norm", "native_batch_norm"), (5, "training", False)),
    "instance_norm": (5, "use_input_stats", True),
    **dict.fromkeys(("embedding", "embedding_bag"), (3, "max_norm", None)),
}

_IN_PLACE = {getattr(operator, name) for name in CHANGING}


def is_mutable(func: Any) -> bool:
    """Whether an operator's schema says that it writes to its operands."""
    several = [func] if isinstance(func, OpOverload) else overloads_of(func)
    return any(op._schema.is_mutable for op in several)


# Calls, and elements of each, that are computed to know what numbers of the program's decide.
_MOST_COMPUTED = 64
# Methods that give what is known then.
_READING = frozenset("item tolist __bool__ __int__ __float__ __index__ is_nonzero data_ptr".split())
# Those by which a float becomes one of Python's.
_AS_FLOATS = ("item", "tolist", "__float__")


def decided(recorder: Any, name: str, fake: torch.Tensor) -> Any:
    """What a method reads of a tensor that numbers of the program's decide, or numbers in tensors
    that its objects keep, or the address of such a one; None for others. These are facts then."""
    node, kept = recorder.nodes.get(id(fake)), list[tuple[ReadOf, Any]]()
    if node is None or name not in _READING:
        return None
    world, given = recorder.world, None
    with no_torch_function(), without_modes():
        if name != "data_ptr":
            # floats that objects keep are read by the graph, whatever they are
            is_read = fake.is_floating_point() and name in _AS_FLOATS
            given = _computed(node, recorder, None if is_read else kept)
            recorder.told += [place.of for place, _ in kept]
        elif (found := _kept(recorder, node, name)) is not None:
            world.passing.append("an address")
            given, place = found
            kept.append((place, given.data_ptr()))
        if given is None or not (name in ("tolist", "data_ptr") or given.numel() == 1):
            return None
        for place, value in kept:
            world.fact(EqualsMatch, place, value)
        return getattr(given, name)()


def _computed(node: fx.Node, recorder: Any, kept: list[Any] | None) -> torch.Tensor | None:
    """What a call gives that has numbers alone, and results of such calls; None for other calls.

    kept   what is found in tensors that objects keep, and where, goes there; None: in none
    """
    left, needed, values = [node], dict[fx.Node, None](), dict[fx.Node, torch.Tensor]()
    while left:
        one = left.pop()
        if len(needed) > _MOST_COMPUTED:
            return None
        if kept is not None and (found := _kept(recorder, one, "item")) is not None:
            values[one], place = found
            kept.append((place, values[one].item()))
            continue
        if not _is_of_numbers(one):
            return None
        left += [x for x in one.all_input_nodes if x not in needed]
        needed[one] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph's own call tells
        for one in sorted(needed):
            args, kwargs = fx.node.map_arg((one.args, one.kwargs), values.__getitem__)
            target: Any = one.target
            call = getattr(torch.Tensor, target) if type(target) is str else target
            try:
                values[one] = made = call(*args, **kwargs)
            except (RuntimeError, IndexError):  # the graph raises it
                return None
            fake = one.meta["example_value"]
            if (made.dtype, made.shape) != (fake.dtype, fake.shape):  # a state of its own
                return None
    return values[node]


def _kept(recorder: Any, node: fx.Node, method: str) -> tuple[torch.Tensor, ReadOf] | None:
    """An input that an object keeps, such as a flag or a parameter, and what says so; None for
    others, and where the method has given something else at several calls. What gives a number
    has to be one, to which no call has written yet."""
    real, origin = recorder.given.get(id(node.meta.get("example_value")), (None, None))
    if real is None or node.op != "placeholder" or not recorder.is_main:
        return None
    is_attribute = isinstance(origin, Item) and isinstance(origin.of, Dict)
    if not (is_attribute or isinstance(real, torch.nn.Parameter) or is_buffer(origin)):
        return None
    world, place = recorder.world, ReadOf(origin, method)
    if world.seen or world.machine.modes or world.machine.policy.is_exporting:
        return None
    if str(place) in world.varies.known:
        return None
    if method == "item":
        is_plain = real.layout is torch.strided and real.device.type == "cpu"
        if not is_plain or real.requires_grad or real.numel() != 1:
            return None
        if any("anywhere" in effects(x) for x in recorder.graph.nodes):
            return None
        if any(memory_of(real) & memory_of(x) for x, _ in written(recorder)):
            return None
    return real, place


def written(recorder: Any) -> list[tuple[torch.Tensor, Origin]]:
    """Tensors from outside that calls of the graph write to."""
    with no_torch_function():
        changed = storages(x for n in recorder.graph.nodes for x in written_by(n))
        given = [n for n in recorder.graph.find_nodes(op="placeholder") if changed & storages([n])]
    found = (recorder.given.get(id(n.meta["example_value"])) for n in given)
    return [x for x in found if x is not None]


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a call gives a small tensor that nothing has written to, and does nothing else."""
    fake = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or not isinstance(fake, torch.Tensor):
        return False
    name = node.target if type(node.target) is str else getattr(node.target, "__name__", "")
    is_plain = fake.layout is torch.strided and fake.device.type == "cpu"
    is_fresh = is_plain and not (fake.requires_grad or fake.is_inference() or fake._version)
    is_small = is_fresh and not is_symbolic(fake) and fake.numel() <= _MOST_COMPUTED
    is_known = is_small and "empty" not in name and name != "new"
    if not is_known or not effects(node) <= {"raises"}:
        return False
    views = [node]  # not all results count versions
    for one in views:
        for user in one.users:
            if one in written_by(user):
                return False
            if getattr(user.meta.get("example_value"), "_base", None) is not None:
                views.append(user)
    return True


# ---------------------------------------------------------------------------- repeated
# Layers that are alike ask for the same again. What a function of torch's gives for stand-ins
# depends on how they lie, on the other arguments and on a few switches. Running it costs up to a
# millisecond, for one operator or for tens of them. So what it gave is noted by these, for one
# capture, as long as it is new memory and has no gradient, and is made at once the next time.

_HOMES = "torch", "_operator"
_IN_PYTHON = frozenset(("torch.nn.functional", "torch.functional", "torch._tensor"))
_OF_NOW = frozenset(("cuda", torch.device("cuda")))  # the present device: another one later
# What these give is a view, mostly, or the operand: as quick to make as to find.
_NAMES = "view transpose permute unsqueeze squeeze expand reshape contiguous cuda".split()
_RUN = {operator.getitem, *(getattr(torch.Tensor, name) for name in _NAMES)}


class Repeated:
    """What calls of one capture gave, in all its attempts: device, sizes, strides and dtype; and if
    that is a view of new memory, such as linear() gives for three axes."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Args, bool]] = {}

    def key(self, mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Hashable:
        """By what the result of a call is known; None: it has to run."""
        kind, home = type(func), getattr(func, "__module__", None) or "torch"
        if kind not in FUNCTIONS or func in _RUN:
            return None
        if kind is types.FunctionType and home not in _IN_PYTHON:
            return None
        if kind is types.BuiltinFunctionType and home.partition(".")[0] not in _HOMES:
            return None  # of a package of the program's
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return None
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        parts: list[Any] = [func, *kwargs, len(kwargs), *state]
        is_known = all(_add(parts, mode, x) for x in (*args, *kwargs.values()))
        return tuple(parts) if is_known else None

    def again(self, mode: Any, key: Hashable) -> torch.Tensor | None:
        """The result of a call, if one like it was noted."""
        if (known := self._made.get(key)) is None:
            return None
        spec, is_view = known
        made: torch.Tensor = fake_again(mode, *spec)
        if is_view:  # where gradients are off autograd refuses writes to these later
            with mode:
                made = torch.ops.aten.alias.default(made)
        return made

    def note(self, mode: Any, key: Hashable, operands: Args, out: Any) -> None:
        """Keep what a call gave for tensors among its arguments, if it is a new one."""
        if type(out) is not FakeTensor or out.requires_grad or not _add([], mode, out):
            return
        if out.is_conj() or out.is_neg():
            return
        memory = out.untyped_storage()
        given = tensors_in(operands)
        if not given or any(x.untyped_storage()._cdata == memory._cdata for x in given):
            return
        least = extent(out.shape, out.stride()) * out.element_size()
        if out.storage_offset() == 0 and memory.nbytes() == least:
            spec = out.fake_device, tuple(out.shape), out.stride(), out.dtype
            self._made[key] = spec, out._is_view()


def _add(parts: list[Any], mode: Any, x: Any) -> bool:
    """Note what of an argument decides; False: nobody knows."""
    kind = type(x)
    if kind is FakeTensor:
        has_gradients = x.requires_grad and torch.is_grad_enabled()
        if x.fake_mode is not mode or has_gradients or x.layout is not torch.strided:
            return False
        if x.constant is not None or x._has_symbolic_sizes_strides or x.is_quantized:
            return False
        parts += x.shape, x.stride(), x.dtype, x.fake_device, x.is_conj(), x.is_neg()
        return True
    if kind is tuple or kind is list:
        parts += kind, len(x)
        return all(_add(parts, mode, item) for item in x)
    if kind is slice:
        parts.append(kind)
        return all(_add(parts, mode, end) for end in (x.start, x.stop, x.step))
    parts += kind, x
    return is_scalar(x) and x not in _OF_NOW


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
    any; None if it cannot be cut there.

    Two graphs may stand in place of one that pass whole tensors, which share no memory and are not
    written to. Torch's state is the same in both.
    """
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
    if not found:
        return {}
    bound = storages(node for node in nodes if node.op == "placeholder")
    bound |= storages(x for node in calls for x in written_by(node))
    is_free = all("example_value" in n.meta and n.target is not leaf_gradients for n in calls)
    for k in found if is_free else ():
        crossing = [node for node in calls[:k] if not {*calls[:k]}.issuperset(node.users)]
        memory = storages(crossing)
        is_free &= all(map(_may_cross, crossing)) and memory.isdisjoint(bound)
        is_free &= len(memory) == len(crossing)
    return {CUTS: found if is_free else None}


# ---------------------------------------------------------------------------- around a call
# A call that a backend cannot compile runs as it was captured. What is before and behind it is
# compiled by itself, as long as no part before may save for its backward what a later one writes
# to: else all from where that begins runs so too.

_NUMBERS = torch.SymInt, torch.SymFloat, torch.SymBool


def around(gm: fx.GraphModule, at: fx.Node) -> tuple[fx.GraphModule, dict[int, bool]] | None:
    """A graph in which a call can stand by itself, and its parts: how many calls stand before each,
    and whether it runs as it was captured; None if it cannot be cut there.

    Torch's state is the same at all cuts. A backward pass behind a cut is autograd's own.
    """
    graph, copies = NodeGraph(), dict[fx.Node, fx.Node]()
    output = graph.output(graph.graph_copy(gm.graph, copies))
    for node in [*graph.nodes]:  # items come with what has them
        for user in [*node.users] if not _may_cross(node) else ():
            if user.target is operator.getitem and type(user.args[1]) is int:
                node.append(user)
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    if at not in copies or copies[at] not in calls:
        return None
    places = {node: k for k, node in enumerate([*calls, output])}
    spans = {x: (k, max(map(places.__getitem__, x.users), default=k)) for x, k in places.items()}
    passes = [k for k, node in enumerate(calls) if node.target is leaf_gradients]
    inputs = [x for x in graph.nodes if x.op in ("placeholder", "get_attr")]
    with no_torch_function():
        kept = storages(inputs) - storages(x for node in calls for x in written_by(node))
        # what no part can give to another
        bound = [x for x in calls if not (_may_cross(x) or _is_number(x))]
        whole = [(places[x], max(map(places.__getitem__, _users(x, kept)))) for x in bound]
    (begin, _), end, before = spans[copies[at]], places[copies[at]] + 1, (-1, -1)
    while before != (begin, end):
        before = begin, end
        stop = next((k for k in passes if k >= end), len(calls))
        with no_torch_function():  # before what saves for its backward what is written to
            wrote = storages(x for node in calls[begin:stop] for x in written_by(node))
            reads = _computed_of(wrote, calls[:begin] if torch.is_grad_enabled() else [])
            begin = next((places[x] for x in reads if _requires_grad(x)), begin)
            end = _behind_writes(calls[:stop], begin, end)
        begin = min([begin, *(k for k, last in whole if k < begin <= last)])
        end = max([end, *(last + 1 for k, last in whole if k < end <= last)])
    is_lent = any(_requires_grad(x) and spans[x][1] >= begin for x in calls[:begin])
    passes = [k for k in passes if k >= end or (k < begin and is_lent)]
    captured = [(begin, end), *((k, spans[calls[k]][1] + 1) for k in passes)]
    cuts = sorted({0, len(calls), *(k for pair in captured for k in pair)})
    if any(k < cut <= last for cut in cuts for k, last in whole):
        return None
    starts = _in_one_state([*calls, output], cuts)
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    found = {calls.index(starts[k]): any(a <= k < b for a, b in captured) for k in cuts[:-1]}
    return (graph_module(graph, gm), found) if len(found) > 1 else None


def _may_cross(node: fx.Node) -> bool:
    """Whether parts can give it to each other: a dense tensor of sizes that no data tells."""
    x = node.meta.get("example_value")
    is_dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
    return is_dense and not any(map(was_unbacked, x.shape))  # type: ignore[union-attr]


def _is_number(node: fx.Node) -> bool:
    """Whether it computes a number of others, which each part can do."""
    numbers = [node, *node.all_input_nodes]
    return all(isinstance(x.meta.get("example_value"), _NUMBERS) for x in numbers)


def _users(node: fx.Node, kept: set[int]) -> list[fx.Node]:
    """A node, and who uses it; with numbers that are computed of it, unless it reads memory that
    nobody writes to: there each part can read it again."""
    read = [*node.all_input_nodes]
    for x in read:
        is_tensor = isinstance(x.meta.get("example_value"), torch.Tensor)
        read += () if is_tensor else x.all_input_nodes
    is_kept, found = storages(read) <= kept, {node: None, **node.users}
    row = [] if is_kept else [*node.users]
    while row:
        if _is_number(x := row.pop()):
            row += x.users.keys() - found.keys()
            found.update(x.users)
    return [*found]


def _requires_grad(node: fx.Node) -> bool:
    found = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in found)


def _computed_of(memory: set[int], calls: list[fx.Node]) -> list[fx.Node]:
    """Those that read this memory, or what is computed of it: a backward may compute it again."""
    found = dict[fx.Node, None]()
    for node in calls:
        given = node.all_input_nodes
        if storages((node, *given)) & memory or any(x in found for x in given):
            found[node] = None
    return [*found]


def _behind_writes(calls: list[fx.Node], begin: int, end: int) -> int:
    """`end`, or behind the last write to what autograd may save in between, which eager may refuse,
    or to memory that comes to the part behind as several tensors, which no graph takes."""
    saving = [node for node in calls[begin:end] if _requires_grad(node)]
    memory = storages(x for node in saving for x in (node, *node.all_input_nodes))
    given = {x for node in calls[end:] for x in node.all_input_nodes}.difference(calls[end:])
    shared = Counter(place for x in given for place in storages([x]))
    memory |= {place for place, count in shared.items() if count > 1}
    late = (k for k, node in enumerate(calls) if k >= end and memory & storages(written_by(node)))
    return max(late, default=end - 1) + 1


def _in_one_state(nodes: list[fx.Node], cuts: list[int]) -> dict[int, fx.Node]:
    """By cut, the node that follows; torch's state is there what it is where the graph begins."""
    graph, initial, found = nodes[0].graph, State.now(), dict[int, fx.Node]()
    with state_restored():
        for k, node in enumerate(nodes):
            if k in cuts:
                now = State.now()
                with graph.inserting_before(node):
                    for call in now.switches(initial):
                        graph.call_function(*call)
                    again = [graph.call_function(*x) for x in initial.switches(now)]
                found[k] = again[0] if again else node
            if node.target in STATE_SWITCHES:
                node.target(*node.args, **node.kwargs)  # type: ignore[operator]
    return found
