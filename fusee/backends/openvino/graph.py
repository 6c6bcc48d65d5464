"""A region as the fx graph that OpenVINO's decoder reads: weights as attributes, sizes as nodes."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from fusee.aten import AtenGraph, is_pure
from fusee.aten.mutation import place_of
from fusee.aten.rewriter import Sized, val
from fusee.aten.torch_api import OpOverload
from fusee.backends.openvino import bindings, element_of, last_line, wrap
from fusee.backends.regions import HEAD, fits, interval, lasting
from fusee.errors import BackendError
from fusee.sym import known_ge

# ---------------------------------------------------------------------------- openvino graph


aten = torch.ops.aten


def decodable(
    graph: AtenGraph,
    weights: Mapping[int, Tensor],
    results: Sequence[fx.Node],
    computed: Sequence[fx.Node] = (),
) -> fx.GraphModule:
    """The graph up to these results, with the inputs in `weights` as attributes.

    computed   calls whose values are inputs, after all others
    """
    write = _Decodable()
    attributes: dict[str, Any] = dict(graph.constants)
    for node, spec in zip(graph.placeholders, graph.inputs, strict=True):
        if spec.index in weights:
            name = f"weight{spec.index}"
            attributes[name] = weights[spec.index].detach()
            write.made[node] = write.graph.get_attr(name)
        else:
            write.placeholder(node)
    for node in computed:
        write.placeholder(node)
    write.rest(graph, results).eliminate_dead_code()
    for node in write.graph.nodes:
        node.meta.clear()  # the decoder finds out itself what a node gives
    return fx.GraphModule(attributes, write.graph, "Region")


class _Decodable(Sized):
    def __init__(self) -> None:
        super().__init__(_extreme(aten.minimum.default), _extreme(aten.maximum.default), _Numbers)

    def name_symbols(self, whole: AtenGraph) -> None:
        super().name_symbols(whole)
        self.whole = whole

    def copy(self, node: fx.Node) -> fx.Node:
        if is_joined(node):
            self.made[node] = self._join(node)
            return self.made[node]
        made = super().copy(node)
        if node.target is aten.convolution.default and self.whole.symbols:
            # where a weight is part of what is open, OpenVINO does not see that it is not
            weight: Any = node.args[1]
            sizes = [*val(weight).shape]
            given = self.call(aten.view.default, made.args[1], sizes, like=weight, val=val(weight))
            made.prepend(given)
            made.args = (made.args[0], given, *made.args[2:])
        if node.target is aten.view.default and not node.args[1]:
            # a product that it reshapes to a number ends the process
            axes = [*range(val(node.all_input_nodes[0]).dim())]
            made.target, made.args = aten.squeeze.dims, (made.args[0], axes)
        elif node.target in (aten.view.default, aten.expand.default):
            shape: Any = made.args[1]
            inferred = self._inferred(node)
            short = [-1 if k in inferred else size for k, size in enumerate(shape)]
            made.args = (made.args[0], short, *made.args[2:])
        return made

    def _join(self, node: fx.Node) -> fx.Node:
        """A tensor of which a part was written, joined of that and what is beside it."""
        base, part, *at = cast(Any, node.args)
        axis, begin, end = place_of(node, at)
        size, call = val(base).shape[axis], functools.partial(self.call, like=node, val=val(node))
        base, made = self.made[base], self.made[part]
        if node.target is aten.select_scatter.default:
            made = call(aten.unsqueeze.default, made, axis)
        before, after = ((0, begin),) * (begin > 0), ((end, size),) * (end < size)
        pieces = [call(aten.slice.Tensor, base, axis, *at, 1) for at in before]
        pieces += [made, *(call(aten.slice.Tensor, base, axis, *at, 1) for at in after)]
        return call(aten.cat.default, pieces, axis)

    def _inferred(self, node: fx.Node) -> list[int]:
        """Open sizes of a shape for which -1 says the same."""
        source, shape = cast(tuple[fx.Node, Sequence[Any]], node.args[:2])
        open_ = [k for k, n in enumerate(shape) if not isinstance(n, int)]
        if node.target is aten.view.default:
            return open_ if len(open_) == 1 and 0 not in shape else []
        old = [self.whole.to_size(n) for n in val(source).shape]
        more = len(shape) - len(old)
        return [k for k in open_ if k >= more and shape[k] == old[k - more]]


def is_joined(node: fx.Node) -> bool:
    """Whether what writes a part of a tensor can be a join: of two parts that are written one after
    the other, OpenVINO makes one write that it cannot run."""
    if not is_put(node):
        return False
    base, part, *at = cast(Any, node.args)
    axis, begin, end = place_of(node, at)
    is_part = axis >= 0 and 0 < end - begin < val(base).shape[axis]
    return is_part and val(base).dtype == val(part).dtype


def is_put(node: fx.Node) -> bool:
    """Whether it gives a tensor of which a part is another tensor's."""
    return node.target in (aten.slice_scatter.default, aten.select_scatter.default)


class _Number(fx.Proxy):
    """An integer of the graph: arithmetic with it adds nodes, of what the decoder knows."""

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other

    def __rmod__(self, other: Any) -> Any:
        return other - other // self * self

    def __pow__(self, other: int) -> Any:
        return math.prod([self] * (other - 1), start=self)


class _Numbers(fx.proxy.GraphAppendingTracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Number(node, self)


def _extreme(target: OpOverload) -> Callable[[Any, Any], Any]:
    """`min` or `max` of two numbers, as an operator of tensors."""
    return lambda a, b: (a if isinstance(a, _Number) else b).tracer.create_proxy(
        "call_function", target, (a, b), {}
    )


def distinct(graph: AtenGraph) -> tuple[list[fx.Node], list[int]]:
    """Results without copies, and for each result which of these it is; ~k: a copy of input k.

    OpenVINO takes a copy for the same tensor, and refuses to give that out twice. If it is an
    input, and not all that there is, OpenVINO writes to that.
    """

    def sizes(x: fx.Node) -> list[object]:
        return [graph.to_size(n) for n in val(x).shape]

    inputs = {node: k for k, node in enumerate(graph.placeholders)}
    found: dict[fx.Node, int] = {}
    places = []
    for node in graph.results:
        source = node
        while source.target is aten.clone.default and isinstance(source.args[0], fx.Node):
            if source.args[0].op != "call_function":
                break
            source = source.args[0]
        # the first node whose elements it has, in the same places of the same sizes
        first = here = node
        while here.target in _IN_ORDER or here.target in _IF_ALL:
            given: Any = here.args[here.target is aten.copy.default]
            if not isinstance(given, fx.Node) or val(given).dtype != val(node).dtype:
                break
            if here.target in _IF_ALL and _without_ones(sizes(given)) != _without_ones(sizes(here)):
                break
            here = given
            if sizes(here) == sizes(node):
                first = here
        copied = inputs.get(first)
        places.append(found.setdefault(source, len(found)) if copied is None else ~copied)
    return list(found), places


def _without_ones(sizes: Sequence[object]) -> list[object]:
    return [n for n in sizes if n != 1]


# What keeps the order of elements; what does if it keeps their number.
_IN_ORDER = {aten.clone.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims}
_IF_ALL = {aten.copy.default, aten.expand.default, aten.slice.Tensor, aten.select.int}


# ---------------------------------------------------------------------------- packed
# Weights that a program unpacks from a few bits on each call, as GPTQ and AWQ do.
#
#     q = bitwise_and(bitwise_right_shift(qweight.expand(...), shifts), 15)
#     y = x @ ((q - zeros) * scales).view(inputs, outputs)
#
# A matrix product is taken together with all that makes its weight out of parameters, its origin.
# An engine that has compressed weights is given q, zeros and scales, as `GroupedWeight`, and never
# sees how they were unpacked: that is computed once, by torch. How it is spelt does not matter, as
# long as an integer of at most eight bits is shifted and scaled last.

# More calls than any spelling needs.
_MOST = 64

# Which argument of a product is its weight, and along which axis of it sums run.
_WEIGHTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (1, 0),
    aten.addmm.default: (2, 0),
    aten.linear.default: (1, 1),
}
_SHIFTS = (
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
_SAME_VALUES = (aten.view.default, aten.permute.default, aten.clone.default, aten._to_copy.default)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight (q - zero) * scale, in groups along the axis that a product sums over.

    q      uint8, (outputs, groups, size of a group)
    zero   uint8 or as `scale`, (outputs, groups, 1); None: nothing is subtracted
    scale  of the weight's dtype, (outputs, groups, 1)
    axis   of the weight, that the product sums over
    """

    q: Tensor
    zero: Tensor | None
    scale: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class WeightCalls:
    """The calls that make one product's weight, in order; the last one gives it."""

    head: fx.Node
    calls: tuple[fx.Node, ...]

    @property
    def weight(self) -> fx.Node:
        return self.calls[-1]

    def packed(self, values: Mapping[fx.Node, Tensor]) -> GroupedWeight | Tensor:
        """The weight from the values of placeholders and constants.

        A Tensor, the weight itself, if neighbours along the axis share no scale.
        """
        found = dict(values)
        with torch.no_grad():
            for node in self.calls:
                target: Any = node.target
                found[node] = target(*fx.map_arg(node.args, found.__getitem__), **node.kwargs)
            tail = _tail(self.weight)
            assert tail is not None
            return _grouped(*tail, found, _WEIGHTS[self.head.target][1]) or found[self.weight]


def gather(aten_graph: AtenGraph, examples: Sequence[Any], refuses: Callable[[Any], bool]) -> None:
    """Mark what makes weights of products, so that it runs with them; each gets calls of its own.

    examples   per input, as for `note_values`
    refuses    operators that must not be among these calls
    """
    good = lasting(aten_graph, examples)
    graph, copies = aten_graph.graph, dict[fx.Node, fx.Node]()
    for origin in list(_origins(graph, set(good))):
        if any(refuses(node.target) for node in (*origin.calls, origin.head)):
            continue
        with graph.inserting_before(origin.head):
            for node in origin.calls:  # each after those that it needs
                copies[node] = graph.node_copy(node, lambda x: copies.get(x, x))
                copies[node].meta[HEAD] = origin.head
        origin.head.replace_input_with(origin.weight, copies[origin.weight])
        for node in reversed(origin.calls):
            if not node.users:
                graph.erase_node(node)


def find_origins(graph: AtenGraph) -> list[WeightCalls]:
    """The origins that `gather` marked, in a part of its graph."""
    marked = {node for node in graph.graph.nodes if HEAD in node.meta}
    return [] if not marked else list(_origins(graph.graph, set(graph.placeholders), marked))


def _origins(
    graph: fx.Graph, inputs: set[fx.Node], among: set[fx.Node] | None = None
) -> Iterator[WeightCalls]:
    """Products whose weight is unpacked from `inputs` and constants alone."""
    for head in graph.nodes:
        if head.op != "call_function" or head.target not in _WEIGHTS:
            continue
        weight = head.args[_WEIGHTS[head.target][0]]
        if head.args.count(weight) != 1 or weight.op != "call_function":
            continue
        calls = _above(weight, inputs)
        if calls is None or (among is not None and not among.issuperset(calls)):
            continue
        if _is_unpacked(weight) and _tail(weight) is not None:
            yield WeightCalls(head, tuple(calls))


def _above(weight: fx.Node, inputs: set[fx.Node]) -> list[fx.Node] | None:
    """All calls that a value depends on, in order; None if they need more than `inputs`."""
    found: set[fx.Node] = set()
    waiting = [weight]
    while waiting:
        node = waiting.pop()
        if node in found or node in inputs or node.op == "get_attr":
            continue
        val = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or not isinstance(val, Tensor):
            return None
        is_open = any(not isinstance(n, int) for n in val.shape)
        if is_open or not is_pure(node) or len(found) == _MOST:
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return [node for node in weight.graph.nodes if node in found]


# ------------------------------------------------------------------------------ values


def _tail(weight: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The last calls of an origin: q, and the nodes through which it becomes the weight."""
    steps: list[fx.Node] = []
    node: Any = weight
    wanted = [aten.sub.Tensor, aten.mul.Tensor]
    while isinstance(node, fx.Node) and node.op == "call_function":
        bounds = None if val(node).is_floating_point() else interval(node)
        is_scaled = aten.mul.Tensor not in wanted
        is_small = bounds is not None and known_ge(bounds[0], 0) and known_ge(255, bounds[1])
        if is_scaled and is_small and fits(node):
            return node, steps[::-1]
        if node.target in wanted and (is_scaled or node.target is aten.mul.Tensor):
            del wanted[wanted.index(node.target) :]
        elif node.target not in _SAME_VALUES:
            return None
        steps.append(node)
        node = _source(node)
    return None


def _source(step: fx.Node) -> Any:
    """The operand by which q comes in: of two factors, the one that is unpacked."""
    first = step.args[0]
    return step.args[1] if step.target is aten.mul.Tensor and not _is_unpacked(first) else first


def _is_unpacked(x: Any) -> bool:
    return isinstance(x, fx.Node) and (x.target in _SHIFTS or any(map(_is_unpacked, x.args)))


def _grouped(
    origin: fx.Node, steps: Sequence[fx.Node], values: Mapping[fx.Node, Tensor], axis: int
) -> GroupedWeight | None:
    """The weight in the largest groups that share a scale; None if there are none."""
    tables: list[Tensor] = [values[origin]]  # q, scale, zero
    for step in steps:
        if step.target in (aten.mul.Tensor, aten.sub.Tensor):
            (other,) = (x for x in step.args[:2] if x is not _source(step))
            table = values[other] if isinstance(other, fx.Node) else torch.tensor(other)
            at = len(tables) if step.target is aten.sub.Tensor else 1
            tables.insert(at, table)
            shape: Any = val(step).shape
            tables = [x.expand(shape) for x in tables]
        elif step.target is aten.view.default:
            shape = step.args[1]
            tables = [x.reshape(shape) for x in tables]
        elif step.target is aten.permute.default:
            order: Any = step.args[1]
            tables = [x.permute(order) for x in tables]
    moved = [x.movedim(axis, 1) for x in tables[1:]]
    size = moved[0].shape[1]  # how many neighbours have the same row in all tables
    for rows in moved:
        changes = (rows[:, 1:] != rows[:, :-1]).any(0).nonzero().flatten() + 1
        size = math.gcd(size, *changes.tolist())
    weight = values[steps[-1]]
    *groups, wanted = (
        x.movedim(axis, 1).reshape(weight.shape[1 - axis], -1, size) for x in (*tables, weight)
    )
    q, scale, *zeros = groups
    zero = zeros[0][..., :1] if zeros else torch.zeros(1, dtype=torch.uint8)
    if zero.is_floating_point() or int(zero.min()) < 0 or int(zero.max()) > 255:
        zero = zero.to(weight.dtype)
    else:
        zero = zero.to(torch.uint8)
    q, scale = q.to(torch.uint8), scale[..., :1].to(weight.dtype)
    again = (q.to(weight.dtype) - zero.to(weight.dtype)) * scale
    if size == 1 or not torch.allclose(again, wanted, rtol=1e-3, atol=0):
        return None
    return GroupedWeight(q, zero if zeros else None, scale, axis)


# ---------------------------------------------------------------------------- openvino convert
# Adapter to OpenVINO's PyTorch frontend: graphs become models. Tested with openvino 2026.4.1.
#
# Not public there: `openvino.frontend.pytorch.fx_decoder` and `ts_decoder` (since 2023.2).

# A fixed size, or the bounds of one that calls may choose.
Size = int | tuple[int, int]


@functools.cache
def _frontend() -> Any:
    manager = importlib.import_module("openvino.frontend").FrontEndManager()
    return manager.load_by_framework("pytorch")


def convert_fx(gm: fx.GraphModule, inputs: Sequence[tuple[torch.dtype, Sequence[Size]]]) -> Any:
    """The model of an fx graph of ATen operators. Attributes become constants, without copies.

    raises   BackendError with what the frontend says
    """
    decoder = importlib.import_module("openvino.frontend.pytorch.fx_decoder")
    shapes = [_shape(sizes) for _, sizes in inputs]
    types = [dtype for dtype, _ in inputs]
    model = _convert(decoder.TorchFXPythonDecoder(gm, input_shapes=shapes, input_types=types))
    left = {one.get_friendly_name(): one for one in model.get_parameters()}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    if len(left) == len(names):
        return model
    # Inputs of which nothing depends on the values are gone: calls give all
    ov = bindings()
    given = zip(names, types, shapes, strict=True)
    all_ = [left.get(name) or ov.op.Parameter(element_of(t), shape) for name, t, shape in given]
    return ov.Model([port.get_node().input_value(0) for port in model.outputs], all_, "region")


def convert_traced(script: Any, inputs: Sequence[tuple[torch.dtype, Sequence[Size]]]) -> Any:
    """The model of a TorchScript module that torch.jit.trace made."""
    decoder = importlib.import_module("openvino.frontend.pytorch.ts_decoder")
    model = _convert(decoder.TorchScriptPythonDecoder(script, skip_freeze=True))
    for port, (dtype, sizes) in zip(model.inputs, inputs, strict=True):
        port.get_node().set_element_type(element_of(dtype))
        port.get_node().set_partial_shape(_shape(sizes))
    model.validate_nodes_and_infer_types()
    return model


def fill(model: Any, weights: Sequence[GroupedWeight | Tensor]) -> None:
    """Constants in place of a model's last inputs; packed ones as its plugins keep them packed."""
    ops = importlib.import_module("openvino.opset13")
    for parameter, weight in zip(model.get_parameters()[-len(weights) :], weights):
        if isinstance(weight, Tensor):
            value = _constant(weight)
        else:
            element = element_of(weight.scale.dtype)
            value = ops.convert(_constant(weight.q), element)
            if weight.zero is not None:
                value = ops.subtract(value, ops.convert(_constant(weight.zero), element))
            value = ops.multiply(value, _constant(weight.scale))
            rows = ops.constant([weight.q.shape[0], -1], element_of(torch.int64))
            value = ops.reshape(value, rows, special_zero=False)
            if weight.axis == 0:
                value = ops.transpose(value, ops.constant([1, 0], element_of(torch.int64)))
        parameter.output(0).replace(value.output(0))
        model.remove_parameter(parameter)


def _constant(x: Tensor) -> Any:
    """A constant of its own memory; bytes of four bits as such."""
    ops = importlib.import_module("openvino.opset13")
    x = x.detach().contiguous()
    if x.dtype == torch.uint8 and x.numel() % 2 == 0 and int(x.max()) < 16:
        pairs = x.view(-1, 2)
        halves = (pairs[:, 0] | pairs[:, 1] << 4).numpy()
        ov = bindings()
        return ops.constant(ov.Tensor(halves, list(x.shape), ov.Type.u4), shared_memory=False)
    return ops.constant(wrap(x), shared_memory=False)


def _convert(decoder: Any) -> Any:
    try:
        frontend = _frontend()
        return frontend.convert(frontend.load(decoder))
    except Exception as error:
        raise BackendError(f"it cannot be converted: {last_line(error)}\n{error}") from error


def _shape(sizes: Sequence[Size]) -> Any:
    ov = bindings()
    return ov.PartialShape([n if isinstance(n, int) else ov.Dimension(*n) for n in sizes])
