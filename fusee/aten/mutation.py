"""Operators that write to their arguments: the functional counterpart runs, then its results are
written to the tensors by Builder.write.

    add_.Tensor(x, y)           x <- add.Tensor(x, y), in x's dtype
    add.out(x, y, out=z)        z <- add.Tensor(x, y)
    uniform_(x, a, b)           x <- uniform(x, a, b)      random operators keep their order
    transpose_(x, i, j)         x becomes a view of what it was

join_parts      parts that a loop has written, `y[:, i] = ...`, become one tensor together
"""

from __future__ import annotations

import bisect
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten import bound, closure, draws, inverse, is_view, remove_dead
from fusee.aten.canonicalize import ALWAYS, convert
from fusee.aten.rewriter import new_call, val
from fusee.aten.torch_api import OpOverload, is_composite, is_explicit, library, mutated_arguments
from fusee.aten.tracer import Rule, TracedTensor, Tracer
from fusee.errors import MissingFake, TraceError
from fusee.fake import on_metas
from fusee.fake.layouts import extent, is_row_major, known, may_repeat, meet, same_ints
from fusee.fake.torch_python import is_pointwise, mode_of
from fusee.source import Args, overloads, tensors_in
from fusee.sym import Expr

# ---------------------------------------------------------------------------- custom
# Custom operators that write to their arguments, made functional.
#
# Their implementation is opaque: it may call other libraries, so it is never traced. A twin
# operator takes copies of what is written, runs the operator on them and returns what it returned,
# then the copies:
#
#     mylib::step_(Tensor(a!) x, Tensor y) -> Tensor
#     fusee::mylib__step__default(Tensor x, Tensor y) -> (Tensor, Tensor)

aten = torch.ops.aten

_ALIAS = re.compile(r"\([a-z]\w*!?\)")


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The twin of a custom operator; None if it writes to lists or to optional tensors."""
    written = [name for _, name in mutated_arguments(op)]
    types = {a.name: str(a.type) for a in op._schema.arguments}
    if any(types[name] != "Tensor" for name in written):
        return None
    if any(result.alias_info is not None for result in op._schema.returns):
        return None
    taken, _, returned = _ALIAS.sub("", str(op._schema)).partition("(")[2].rpartition(" -> ")
    plain = [part for part in returned.strip("()").split(", ") if part]
    name = re.sub(r"\W+", "__", f"{op._schema.name}__{op._overloadname or 'default'}")
    while name in dir(torch.ops.fusee):  # of another operator, or one that was registered anew
        name += "_"
    library.define(f"{name}({taken} -> ({', '.join([*plain, *['Tensor'] * len(written)])})")
    positions = {a.name: i for i, a in enumerate(op._schema.arguments)}

    def run(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        copies = []
        for target in written:
            place, key = (kwargs, target) if target in kwargs else (values, positions[target])
            copy = place[key].clone()  # type: ignore[index]
            place[key] = copy  # type: ignore[index]
            copies.append(copy)
        found: Any = None
        if plain or copies[0].device.type != "meta":  # what gives nothing needs no fake
            found = op(*values, **kwargs)
        first = list(found) if len(plain) > 1 else [found] * len(plain)
        results = [*first, *copies]
        return results[0] if len(results) == 1 else tuple(results)

    library.impl(name, run, "CompositeExplicitAutograd")
    twin: OpOverload = getattr(torch.ops.fusee, name).default
    return twin


# ---------------------------------------------------------------------------- overlap
# Whether a write reads what it has written: eager refuses it, or its order would show.
#
# The rules are those of ATen's TensorIterator. Elements of one tensor that they call "too hard" to
# tell apart pass, as there; a target that meets an operand does not, which ATen reads as it writes.


def refuse_overlap(
    t: Tracer, op: object, targets: Any, operands: Any, may_be_same: bool = True
) -> None:
    """
    may_be_same  whether a target may lie where an operand does, element by element
    raises       TraceError if elements of a target share memory, or it lies over an operand
    """
    others: dict[int, list[Tensor]] = {}  # by memory
    for other in map(t.value, tensors_in(operands)):
        others.setdefault(id(other.store), []).append(other.tensor)
    for written in map(t.value, tensors_in(targets)):
        x = _at_first(written.tensor)
        if may_repeat(x):
            raise _stop(t, op, "writes to elements that share memory")
        for y in map(_at_first, others.get(id(written.store), ())):
            if not (x.numel() and y.numel()):
                continue
            start, first = (z.storage_offset() * z.element_size() for z in (x, y))
            if start == first and (x.shape, x.stride()) == (y.shape, y.stride()):
                overlap = not may_be_same
            elif x.dtype == y.dtype:
                overlap = meet(x, y, int(y.storage_offset() - x.storage_offset()))
            else:
                end = start + x.element_size() * extent(x.shape, x.stride())
                last = first + y.element_size() * extent(y.shape, y.stride())
                overlap = bool(start < last and first < end)
            if overlap:
                raise _stop(t, op, "writes to memory that it reads as another tensor")


def _stop(t: Tracer, op: object, why: str) -> TraceError:
    error = t.b.unsupported(f"{op} {why}")
    error.__cause__ = RuntimeError("what eager may raise")
    return error


def _at_first(x: Tensor) -> Tensor:
    """A tensor with the sizes of the first call; without elements where only data tells them."""
    given = *x.shape, *x.stride(), x.storage_offset()
    if known(given):
        return x
    sizes = [n if type(n) is int else n.node.hint for n in given]
    if None in sizes:
        return torch.empty(0, device="meta")
    return torch.empty(0, dtype=x.dtype, device="meta").as_strided(
        sizes[: x.dim()], sizes[x.dim() : -1], sizes[-1]
    )


# ---------------------------------------------------------------------------- mutate

# Operators whose counterpart has another name or overload. Where both return something, the
# counterpart returns that first and the new contents after it.
_COUNTERPARTS = {
    aten.normal_.default: aten.normal_functional.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
}

# Namespaces whose operators may be taken apart.
_TORCHS = ("aten", "prims", "prim")

_FACTORY = ("dtype", "layout", "device", "pin_memory")


def write_rule(op: OpOverload) -> Rule | None:
    """The rule of an operator that writes to its arguments; None if it writes to none."""
    written = [name for _, name in mutated_arguments(op)]
    if not written:
        return None
    pure = _COUNTERPARTS.get(op) or _counterpart(op, written)
    if pure is not None:
        return _rewrite(op, pure, written)
    if is_composite(op):
        return Tracer.composite
    if op.namespace not in _TORCHS:
        twin = functional_twin(op)
        if twin is None:
            return _refuse
        rewritten = _rewrite(op, twin, written)

        def rule(t: Tracer, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
            # so that an operator without a fake implementation is refused by its own name
            try:
                t.run_meta(op, t.operands(args)[1], t.named_operands(kwargs)[1])
            except MissingFake:
                if op._schema.returns:
                    raise
            return rewritten(t, op, *args, **kwargs)

        return rule
    return Tracer.explicit if is_explicit(op) else _refuse


# ------------------------------------------------------------------------------ counterparts


def _counterpart(op: OpOverload, written: list[str]) -> OpOverload | None:
    """add_.Tensor -> add.Tensor; add.out -> the overload of add with the same other arguments."""
    namespace, _, name = op._schema.name.partition("::")
    packets = getattr(torch.ops, namespace)
    if name.endswith("_") and not name.startswith("__"):
        packet = getattr(packets, name[:-1], None)
        if packet is None or (op._overloadname or "default") not in packet.overloads():
            return None
        found: OpOverload = getattr(packet, op._overloadname)
        return found if _types(found) == _types(op) else None
    asked = _signature(op, written)
    for overload in getattr(packets, name).overloads():
        other: OpOverload = getattr(getattr(packets, name), overload)
        if asked in (_signature(other, _FACTORY), _signature(other, ())):
            if not mutated_arguments(other):
                return other
    return None


def _signature(op: OpOverload, without: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in without]


def _types(op: OpOverload) -> list[str]:
    return [str(a.type) for a in op._schema.arguments]


def _rewrite(op: OpOverload, pure: OpOverload, written: list[str]) -> Rule:
    positional = {a.name for a in op._schema.arguments if not a.kwarg_only}
    takes_dtype = "dtype" in {a.name for a in pure._schema.arguments} and "dtype" not in positional
    is_out = positional.isdisjoint(written)
    plain = sum(r.alias_info is None for r in op._schema.returns)
    returns_nothing = not op._schema.returns
    is_random, may_be_same = draws(op), is_pointwise(op)
    is_list = "_foreach_" in op._schema.name and is_explicit(op)

    def rule(t: Tracer, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        given = bound(op, args, kwargs)
        targets = [given.pop(name) for name in written]
        if is_out:
            kwargs = {name: x for name, x in kwargs.items() if name not in written}
            if takes_dtype:
                kwargs["dtype"] = kwargs.get("dtype") or targets[0].dtype
        if is_list:
            stores = {t.value(x).store for x in targets[0]}
            others = {t.value(x).store for x in tensors_in([*given.values()])}
            if len(stores) < len(targets[0]) or stores & others:  # eager writes one by one
                return t.explicit(op, *args, **kwargs)
        refuse_overlap(t, op, targets, [*given.values()], may_be_same)
        if is_random:
            _refuse_gaps(t, op, targets)
        found = t.call(pure, *args, **kwargs)
        results = list(found) if len(written) + plain > 1 else [found]
        for target, result in zip(targets, results[plain:], strict=True):
            kinds = {x.dtype for x in tensors_in((target, result))}
            if is_out and not may_be_same and len(kinds) > 1:
                raise _stop(t, op, "gives another dtype than out= has")
            store(t, target, result, may_resize=is_out)
        if returns_nothing:
            return None
        kept = results[:plain] + (targets[: len(op._schema.returns)] if plain == 0 else [])
        if op is aten.rrelu_with_noise.default:  # whose counterpart lays its result out otherwise
            kept = [t.call(aten.contiguous.default, x) for x in kept]
        return kept[0] if len(kept) == 1 else tuple(kept)

    return rule


def _refuse_gaps(t: Tracer, op: OpOverload, targets: list[Any]) -> None:
    """raises  TraceError for memory with gaps, which a generator fills in another order"""
    for x in (t.value(target).tensor for target in targets):
        copy = t.b.twins.run(aten.clone.default, (x,), {})
        if not same_ints(copy.stride(), x.stride()) and x.numel() > 1:
            raise t.b.unsupported(f"{op} fills a tensor whose elements lie apart")


def store(t: Tracer, target: Any, result: Any, may_resize: bool = False) -> None:
    """`target` now holds the elements of `result`, cast to its dtype. Lists go pairwise."""
    if isinstance(target, (list, tuple)):
        for x, y in zip(target, result, strict=True):
            store(t, x, y, may_resize)
        return
    value = t.value(target)
    if not same_ints(value.tensor.shape, result.shape):
        base = value.store.base
        if may_resize and value.store.origin is None and base.tensor.numel() == 0:
            _become(t, value, convert(t, result, value.tensor.dtype, None, always=True))
            return
        shapes = f"{list(result.shape)} into {list(value.tensor.shape)}"
        raise t.b.unsupported(f"an operator writes a tensor of shape {shapes}, which resizes it")
    t.b.write(value, t.node(convert(t, result, value.tensor.dtype, value.store.device)))


def _become(t: Tracer, value: TracedTensor, result: Tensor) -> None:
    """An empty tensor, resized by an operator's out=, takes over its result and storage."""
    tensor = value.tensor
    t.b.replace(value, tensor, on_metas(aten.alias.default, tensor))
    with torch.no_grad():
        tensor.set_(result)  # type: ignore[call-overload]  # torch's stub lacks this form
    t.b.alias(tensor, t.value(result), None)


def _refuse(t: Tracer, op: OpOverload, /, *_: Any, **__: Any) -> Any:
    raise t.b.unsupported(f"{op} writes to its arguments and has no functional counterpart")


# ------------------------------------------------------------------------------ contents


@ALWAYS.rule("_fused_moving_avg_obs_fq_helper")
def _observe(t: Tracer, op: OpOverload, *args: Any) -> Any:
    if not args[3].numel():
        raise t.b.unsupported(f"{op} gives what it writes to the size of the first weights")
    written = [name for _, name in mutated_arguments(op)]
    pure = aten._fused_moving_avg_obs_fq_helper_functional.default
    return _rewrite(op, pure, written)(t, op, *args)


@ALWAYS.rule("copy_")
def _copy(t: Tracer, op: OpOverload, target: Tensor, source: Any, *_: Any) -> Any:
    if not isinstance(source, Tensor):
        return _fill(t, op, target, source)
    refuse_overlap(t, op, [target], source)
    x = t.value(target)
    if not same_ints(x.tensor.shape, source.shape):
        source = t.call(aten.expand.default, source, list(x.tensor.shape))
    store(t, target, source)
    return target


@ALWAYS.rule("fill_.Scalar zero_")
def _fill(t: Tracer, op: OpOverload, target: Tensor, fill: Any = 0) -> Any:
    x = t.value(target)
    given = {"dtype": x.tensor.dtype, "device": x.store.device}
    store(t, target, t.call(aten.full.default, list(x.tensor.shape), fill, **given))
    return target


ALWAYS.rule("fill_.Tensor")(lambda t, op, x, value: t.call(aten.copy_.default, x, value))


@ALWAYS.rule("bernoulli_.float")
def _bernoulli(
    t: Tracer, op: OpOverload, target: Tensor, probability: float = 0.5, **kwargs: Any
) -> Any:
    _refuse_gaps(t, op, [target])
    x = t.value(target).tensor
    if is_row_major(x):
        store(t, target, t.call(aten.bernoulli.p, target, probability, **kwargs))
        return target
    # bernoulli_ goes along the memory, bernoulli along the rows: so make the memory's order rows
    order = sorted(range(x.dim()), key=lambda axis: -x.stride()[axis])
    rows = t.call(aten.permute.default, target, order)
    found = t.call(aten.bernoulli.p, rows, probability, **kwargs)
    store(t, target, t.call(aten.permute.default, found, list(inverse(order))))
    return target


# native_batch_norm's schema does not say that it writes the running statistics
@ALWAYS.rule("_native_batch_norm_legit native_batch_norm")
def _batch_norm(
    t: Tracer, op: OpOverload, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
    *rest: Any,
) -> Any:  # fmt: skip
    if mean is None or var is None:
        op = aten._native_batch_norm_legit.no_stats
        return t.call(op, x, weight, bias, True, *rest)
    if not training:
        op = aten._native_batch_norm_legit_no_training.default
        return t.call(op, x, weight, bias, mean, var, *rest)
    refuse_overlap(t, op, (mean, var), (x, weight, bias, mean, var))
    op = aten._native_batch_norm_legit_functional.default
    found = t.call(op, x, weight, bias, mean, var, training, *rest)
    store(t, mean, found[3])
    store(t, var, found[4])
    return tuple(found[:3])


# ------------------------------------------------------------------------------ geometry


_TURNS = overloads("t_ squeeze_ squeeze_.dim squeeze_.dims unsqueeze_ as_strided_")
TURNS: dict[Any, Any] = {op: _counterpart(op, []) for op in _TURNS}
TURNS |= dict.fromkeys(overloads("transpose_ swapaxes_ swapdims_"), aten.transpose.int)


@ALWAYS.rule(*TURNS)
def _reshape(t: Tracer, op: OpOverload, target: Tensor, *args: Any) -> Any:
    return _turn(t, op, target, args, lambda x: t.call(TURNS[op], x, *args))


def _turn(
    t: Tracer, op: OpOverload, target: Tensor, args: Args, view: Callable[[Tensor], Tensor]
) -> Any:
    """What a tensor is becomes a view of what it was."""
    value, old = _own(t, op, target), on_metas(aten.alias.default, target)
    t.b.replace(value, target, old)
    made = view(old)
    with mode_of((target,)):
        op(target, *args)
    t.b.alias(target, t.value(made), None)
    return target


@ALWAYS.rule("resize_")
def _resize(t: Tracer, op: OpOverload, target: Tensor, shape: Sequence[Any], **kwargs: Any) -> Any:
    if same_ints(shape, t.value(target).tensor.shape) and not kwargs:
        return target
    value = _own(t, op, target)
    x = value.tensor
    count = math.prod(shape)
    if count > x.numel() or not x.is_contiguous() or kwargs:
        if x.numel() != 0:
            raise t.b.unsupported("resize_ to more elements than the tensor has")
        home = value.store.device
        made = t.call(aten.empty.memory_format, list(shape), dtype=x.dtype, device=home)
        _become(t, value, made)
        return target
    view, take = (functools.partial(t.call, op) for op in (aten.view.default, aten.slice.Tensor))
    return _turn(
        t, op, target, (shape,), lambda x: view(take(view(x, [-1]), 0, 0, count), list(shape))
    )


@ALWAYS.rule("set_.source_Tensor")
def _set(t: Tracer, op: OpOverload, target: Tensor, other: Tensor) -> Any:
    is_one = t.value(target).store is t.value(other).store and target.dtype == other.dtype
    places = [(*x.shape, *x.stride(), x.storage_offset()) for x in (target, other)]
    if not (is_one and same_ints(*places)):  # else it is that: `p.data -= step`
        _become(t, _own(t, op, target), other)
    return target


def _own(t: Tracer, op: OpOverload, target: Tensor) -> TracedTensor:
    """The TracedTensor of a tensor whose geometry may change: one that the caller doesn't hold."""
    value = t.value(target)
    if value.store.origin is not None and value.parent is None:
        raise t.b.unsupported(f"{op} changes the shape or strides of an input")
    return value


# ---------------------------------------------------------------------------- parts
# What a loop writes, `y[:, i] = ...`, and the gradients of what it reads, `x[:, i]`, is put into
# tensors part by part. One after the other, each would copy the parts before it once more.


class _Parts:
    """What was put into `base` along one axis.

    at      begin -> (end, part). None overlap
    begins  in order
    reads   what reads a place of it -> the same of what was put there, or of the base
    """

    def __init__(self, base: fx.Node, axis: int) -> None:
        self.base, self.axis = base, axis
        self.at: dict[int, tuple[int, fx.Node]] = {}
        self.begins: list[int] = []
        self.reads: dict[fx.Node, tuple[Any, Args]] = {}

    def put(self, begin: int, end: int, part: fx.Node) -> None:
        if begin not in self.at:
            bisect.insort(self.begins, begin)
        self.at[begin] = end, part

    def around(self, place: int) -> tuple[int, int, fx.Node]:
        """(begin, end, part) of the last one that does not begin after a place; or of nothing."""
        k = bisect.bisect_right(self.begins, place)
        return (begin := self.begins[k - 1], *self.at[begin]) if k else (0, 0, self.base)

    def is_free(self, begin: int, end: int) -> bool:
        return begin < end and self.around(end - 1)[1] <= begin

    def is_of(self, node: fx.Node, by: fx.Node) -> bool:
        """Whether nobody else needs `node`, which has these parts."""
        return all(user is by or user in self.reads for user in node.users)


def join_parts(graph: fx.Graph) -> None:
    """One `stack` or `cat` of what was put into a fill part by part, or takes all of a tensor.

    What is read of it between is read where it was made. Gradients of several parts of a tensor, of
    q, k and v say, are joined in place of being added. Nodes that nobody uses are erased.
    """
    remove_dead(graph)
    known: dict[fx.Node, _Parts] = {}
    for node in graph.nodes:
        if node.target in _READS and node.args[0] in known:
            _read(node, known[node.args[0]])
        found = _added(node, known) if node.target is aten.add.Tensor else _put(node, known)
        if found is not None:
            known[node] = found
    joined = {node: x for node, x in known.items() if len(x.at) > 1 and _join(graph, node, x)}
    moved = set[fx.Node]()
    for parts in joined.values():
        for node, (node.target, node.args) in parts.reads.items():
            moved.add(node)
    for node in graph.nodes if moved else ():  # views lie as what they are taken of
        if node in moved or (is_view(node.target) and node.args[0] in moved):
            args, kwargs = fx.map_arg((node.args, node.kwargs), val)
            node.meta["val"] = on_metas(node.target, *args, **kwargs)
            moved.add(node)
    again = []  # what writes where its base was just written to, as `x[1:] += 1` does
    for node in graph.nodes:
        if node.target in _PUTS and (base := node.args[0]).target is node.target:
            if base.args[2:] == node.args[2:]:
                again.append(node)
    for node in again:
        node.update_arg(0, node.args[0].args[0])
    if joined or again:
        remove_dead(graph)


def place_of(node: fx.Node, at: Sequence[Any]) -> tuple[int, int, int]:
    """(axis, begin, end) that a call names, of the axis -1 if they are not known or have steps."""
    source: Any = node.args[0]
    val = source.meta["val"]
    axis, *rest = at or (0,)
    size = val.shape[axis]
    if node.kwargs or not known((size, *rest)) or rest[2:] not in ([], [1]):
        return -1, 0, 0
    if node.target in (aten.select.int, aten.select_scatter.default):
        begin, end = rest[0] % size, rest[0] % size + 1
    else:
        start, stop, *_ = [*rest, size] if rest else [0, size]  # what is left out is all
        begin, end, _ = slice(start, stop).indices(size)
    return axis % val.dim(), begin, end


def _read(node: fx.Node, parts: _Parts) -> None:
    axis, begin, end = place_of(node, node.args[1:])
    first, last, part = parts.around(begin)
    is_part = first <= begin < end <= last
    if axis != parts.axis or any(user.op == "output" for user in node.users):
        return
    source = part if is_part else parts.base
    val = source.meta["val"]
    steps = val.stride()
    is_in_order = [*steps] == sorted(steps)[::-1] if known(steps) else is_row_major(val)
    if not (is_part or parts.is_free(begin, end)) or not is_in_order:
        return  # what is computed of other strides would lie in another order
    target: Any = node.target
    args: Args = (source, *node.args[1:])
    rank, rank_there = node.meta["val"].dim(), val.dim()
    if is_part and rank_there == parts.base.meta["val"].dim():
        at = (begin - first,) if target is aten.select.int else (begin - first, end - first, 1)
        args = source, axis, *at
    elif is_part and rank_there < rank:
        target, args = aten.unsqueeze.default, (source, axis)
    elif is_part:
        target, args = aten.permute.default, (source, [*range(rank)])
    parts.reads[node] = target, args


def _put(node: fx.Node, known: dict[fx.Node, _Parts]) -> _Parts | None:
    """The parts that a tensor has with one more, or with another in a place that has one."""
    if node.target not in _PUTS:
        return None
    base: Any
    part: Any
    base, part, *at = node.args
    axis, begin, end = place_of(node, at)
    val = node.meta["val"]
    if axis < 0 or begin >= end or part.meta["val"].dtype != val.dtype or not is_row_major(val):
        return None
    parts = known.get(base)
    if parts is None or parts.axis != axis or not parts.is_of(base, node):
        parts = _Parts(base, axis)
    elif parts.is_free(begin, end) or parts.around(begin)[:2] == (begin, end):
        del known[base]
    else:
        parts = _Parts(base, axis)
    parts.put(begin, end, part)
    return parts


def _added(node: fx.Node, known: dict[fx.Node, _Parts]) -> _Parts | None:
    """The parts of a sum whose summands have theirs in different places."""
    summands: Any = node.args
    a, b = (known.get(x) if isinstance(x, fx.Node) else None for x in summands)
    if not node.meta.get("backward") or node.kwargs or a is None or b is None or a is b:
        return None  # in the program's own sum a part of -0.0 becomes 0.0
    fills = aten.full.default, aten.full_like.default
    bases = [known[x].base for x in summands]
    is_sum = all(known[x].is_of(x, node) for x in summands)
    is_sum &= all(x.target in fills and x.args[1] in (0,) for x in bases)
    a, b = sorted((a, b), key=lambda parts: -len(parts.at))
    if not is_sum or a.axis != b.axis or not all(a.is_free(k, b.at[k][0]) for k in b.begins):
        return None
    for begin in b.begins:
        a.put(begin, *b.at[begin])
    a.reads |= b.reads
    for x in summands:
        del known[x]
    return a


def _join(graph: fx.Graph, node: fx.Node, parts: _Parts) -> bool:
    """Write a tensor anew as all its parts together, where that can be; whether it was."""
    axis, made = parts.axis, list[fx.Node]()
    rank, rows = val(node).dim(), val(node).shape[axis]
    is_whole = sum(end - begin for begin, (end, _) in parts.at.items()) == rows
    if parts.base.op == "placeholder" or not (is_whole or parts.base.target in _FILLS):
        return False
    # a view that is taken by a size stays: nodes have no SymInts to give to the operator again
    found = closure(parts.reads, lambda x: [user for user in x.users if is_view(user.target)])
    if any(isinstance(x, Expr) for x in pytree.tree_leaves([x.args for x in found])):
        return False
    if is_whole and all(val(part).dim() < rank for _, part in parts.at.values()):
        node.target, node.args = aten.stack.default, ([parts.at[k][1] for k in parts.begins], axis)
        return True
    done = 0
    with graph.inserting_before(node):
        for begin in [*parts.begins, rows]:
            if done < begin:
                args = parts.base, axis, done, begin, 1
                made.append(new_call(graph, aten.slice.Tensor, args, {}, node.meta))
            if begin < rows:
                done, part = parts.at[begin]
                if val(part).dim() < rank:
                    part = new_call(graph, aten.unsqueeze.default, (part, axis), {}, node.meta)
                made.append(part)
    node.target, node.args = aten.cat.default, (made, axis)
    return True


_READS, _PUTS = overloads("select.int slice.Tensor"), overloads("select_scatter slice_scatter")
_FILLS = overloads("full full_like empty.memory_format empty_like new_empty")
