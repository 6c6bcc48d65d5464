"""The backend "onnxrt": regions as ONNX models, run by ONNX Runtime.

    claim    the exporter has a function for the operator, and the runtime takes the model of this
             one call: asked by making a session of it, once for equal calls
    compile  one model for the region; parameters are initialisers in torch's own memory
    call     inputs and outputs are bound where they are: nothing is copied

Initialisers are constants to the runtime, which packs and folds them. A parameter that changes
means a session anew; if it keeps changing, as in training, parameters become inputs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.canonicalize import keep_core
from fusee.aten.graph import WHOLE, AtenGraph, Fresh, is_view, refuses
from fusee.aten.subgraph import explicit, single
from fusee.aten.torch_api import OpOverload
from fusee.backends.onnx.options import OnnxOptions, element_type, is_translated, model_of
from fusee.backends.regions import (
    CompiledRegion,
    Declined,
    Engine,
    Followed,
    Region,
    bounds,
    by_operator,
    has_no_elements,
    indexed,
    interval,
    named,
    relies,
)
from fusee.source import HostSource, Rules

# ---------------------------------------------------------------------------- onnx claims
# What the ONNX exporter's functions, or ONNX Runtime, compute otherwise than ATen.
#
# Found by tests/opinfo, `scripts/opinfo --backend onnxrt --dtypes float32,int64`. Whether there is
# a function and a kernel at all is not the question here: the engine asks them.

aten = torch.ops.aten


def why_not(node: fx.Node) -> str | None:
    """Why a call is not as eager's, or None if it is."""
    op: Any = node.target
    if op in _WRONG:
        return _WRONG[op]
    if op in _AT_TIMES:
        return _AT_TIMES[op](node)
    places = indexed(node)
    if not places and refuses(node):
        return "ONNX Runtime takes values that ATen refuses"
    for index, wraps, _ in places:
        if wraps or index.op == "placeholder":
            continue
        found = interval(index)
        if found is None or not relies(node, found[0], ">=", 0):
            return "an index computed in the graph may be negative: ONNX counts from the end"
    return None


_WRONG: dict[OpOverload, str] = by_operator(
    ("its strides mean nothing to ONNX", "as_strided"),
    ("ONNX reads no memory as another dtype", "view.dtype"),
    ("the exporter composes it of a division and an arc tangent", "atan2"),
    (
        "the exporter composes it of a division and a product, which round",
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
    ),
    ("the exporter rounds its steps otherwise", "linspace linspace.Tensor_Tensor"),
    ("the exporter composes it, inexactly", "log1p expm1 logaddexp logaddexp2 logcumsumexp"),
    (
        "the exporter takes other statistics of the batch",
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_functional""",
    ),
    ("ONNX filters it otherwise", "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    (
        "ONNX Runtime passes over what is not a number",
        "amax amin max min max.dim min.dim argmax argmin sign",
    ),
    ("ONNX has no mean of what is scattered to one place", "scatter_reduce.two"),
    (
        "the exporter composes it, and overflows where ATen does not",
        "special_erfcx special_log_ndtr",
    ),
    (
        "onnxruntime 1.31 crashes on what the exporter makes of it",
        "_embedding_bag _embedding_bag_forward_only embedding_bag embedding_bag.padding_idx",
    ),
    ("ONNX puts equal elements into another order", "topk sort sort.stable argsort"),
)


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


_AT_TIMES: Rules[OpOverload, Callable[[fx.Node], str | None]] = Rules()


@_AT_TIMES.rule(*named("avg_pool1d avg_pool2d avg_pool3d"))
def _pool(node: fx.Node) -> str | None:
    if _argument(node, 4, "ceil_mode") or _argument(node, 6, "divisor_override") is not None:
        return "ONNX counts the elements of windows that reach beyond the edge otherwise"
    return None


@_AT_TIMES.rule(
    *named(
        """upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec
        upsample_trilinear3d.vec upsample_nearest1d.vec upsample_nearest2d.vec
        upsample_nearest3d.vec upsample_linear1d upsample_bilinear2d upsample_bicubic2d
        upsample_trilinear3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"""
    )
)
def _resize(node: fx.Node) -> str | None:
    given = node.args[-1] if str(node.target).endswith(".vec") else node.args[2:]
    factors = [f for f in given if type(f) is float] if isinstance(given, (tuple, list)) else []
    source: Any = node.args[0]
    sizes = source.meta["val"].shape[2:]
    if all(isinstance(n, int) and float(n * f).is_integer() for n, f in zip(sizes, factors)):
        return None
    return "ONNX takes the factor from the sizes, not as it is given"


@_AT_TIMES.rule(*named("any.dim any.dims all.dim all.dims"))
def _of_number(node: fx.Node) -> str | None:
    source: Any = node.args[0]
    return None if source.meta["val"].dim() else "ONNX Runtime finds no axis in a number"


@_AT_TIMES.rule(*named("pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar"))
def _power(node: fx.Node) -> str | None:
    if node.meta["val"].dtype.is_floating_point:
        return None
    return "integers that overflow, or are divided, wrap otherwise"


@_AT_TIMES.rule(*named("linalg_vector_norm"))
def _norm(node: fx.Node) -> str | None:
    if _argument(node, 2, "dim") is not None and (why := _of_number(node)) is not None:
        return why
    order = _argument(node, 1, "ord")
    if isinstance(order, float) and math.isinf(order):
        return "ONNX Runtime passes over what is not a number"
    return None


# ---------------------------------------------------------------------------- onnxrt


# How often a region's session is made for new values of its parameters before they are inputs.
_SESSIONS = 2


class OnnxRuntime(Engine):
    """The engine, with one compiled function's options."""

    name = "onnxrt"
    options: OnnxOptions

    def __init__(self, options: OnnxOptions) -> None:
        super().__init__(options)
        self.device = ", ".join(name for name, _ in options.providers)
        self.probed: dict[Any, str | None] = {}

    def keeps(self, op: OpOverload) -> bool:
        # taken apart, what is refused would come back in pieces
        return op in WHOLE or op in _WRONG or (keep_core(op) and is_translated(op))

    def claim(self, node: fx.Node) -> str | None:
        op = node.target
        assert isinstance(op, OpOverload)
        if op is not aten.squeeze.dims and not is_translated(op):
            return "the exporter has no ONNX function for it"
        reason = why_not(node)
        if reason is not None:
            return reason
        # What a call takes and gives, less the results that nobody uses
        used = [user for user in node.users if user.target is operator.getitem] or [node]
        vals = [other.meta["val"] for other in (*node.all_input_nodes, *used)]
        for val in [val for val in vals if isinstance(val, Tensor)]:
            if has_no_elements(val):
                return "a tensor without elements has no memory to bind"
            if val.is_complex():
                return "a complex tensor cannot be bound"
        key = (op, _form(node.args, is_view(op)), _form(node.kwargs, False))
        if key not in self.probed:
            self.probed[key] = self._probe(node)
        return self.probed[key]

    def _probe(self, node: fx.Node) -> str | None:
        """What the exporter and the runtime say of this call alone."""
        try:
            self.options.session_of(model_of(single(node), {}, {}), {}, probe=True)
        except Exception as error:  # noqa: BLE001  # any failure is the answer
            lines = str(error.__cause__ or error).strip().splitlines()
            return lines[0] if lines else type(error).__name__
        return None

    def compile(self, region: Region) -> CompiledRegion:
        return CompiledRegion(_RegionCall(region, self.options))


def _form(arg: Any, is_shape: bool) -> Any:
    """Equal for arguments that the exporter and the runtime treat alike."""
    if isinstance(arg, fx.Node):
        val = arg.meta["val"]
        if not isinstance(val, Tensor):
            return type(val)
        return val.dtype, val.dim(), any(type(n) is not int for n in val.shape)
    if isinstance(arg, (tuple, list)):
        return tuple(_form(one, is_shape) for one in arg)
    if isinstance(arg, Mapping):
        return tuple((name, _form(one, is_shape)) for name, one in arg.items())
    return type(arg) if is_shape else repr(arg)


class _Session:
    """A session and its bindings, one per call at a time."""

    def __init__(
        self, model: bytes, weights: Mapping[str, Tensor], region: AtenGraph, options: OnnxOptions
    ) -> None:
        self.session = options.session_of(model, weights)
        self.free: list[Any] = []
        self.inputs = [
            (spec.index, spec.name, None if spec.dtype is None else element_type(spec.dtype))
            for spec in region.inputs
            if spec.name not in weights
        ]
        self.inputs = [row for row in self.inputs if row[1] in _names(self.session.get_inputs())]
        dtypes = [node.meta["val"].dtype for node in region.results]
        self.outputs = [
            (name, dtype, element_type(dtype))
            for name, dtype in zip(_names(self.session.get_outputs()), dtypes, strict=True)
        ]

    def run(self, inputs: tuple[Any, ...], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        binding = self.free.pop() if self.free else self.session.io_binding()
        kept = []  # what must live until the session has run
        for index, name, kind in self.inputs:
            x = inputs[index]
            if kind is None:
                x, kind = torch.tensor(x), _INT64
            x = x if x.is_contiguous() else x.contiguous()
            kept.append(x)
            binding.bind_input(name, "cpu", 0, kind, x.shape, x.data_ptr())
        results = []
        for (name, dtype, kind), size in zip(self.outputs, sizes, strict=True):
            x = torch.empty(size, dtype=dtype)
            binding.bind_output(name, "cpu", 0, kind, size, x.data_ptr())
            results.append(x)
        self.session.run_with_iobinding(binding)
        self.free.append(binding)
        return results


_INT64 = 7  # onnx.TensorProto.INT64


def _names(arguments: Sequence[Any]) -> list[str]:
    return [argument.name for argument in arguments]


class _RegionCall:
    """One region as it is called."""

    def __init__(self, region: Region, options: OnnxOptions) -> None:
        graph = region.graph
        self.sizes = _sizes_of(region)
        position = {node: k for k, node in enumerate(graph.placeholders)}
        found = [row for node in region.calls() for row in indexed(node)]
        # ONNX counts negative indices from the end, ATen refuses those of most operators
        self.indices = sorted({position[x] for x, wraps, _ in found if not wraps and x in position})

        def session(given: Mapping[int, Tensor]) -> _Session:
            weights = {graph.inputs[k].name: x for k, x in given.items()}
            model = model_of(explicit(graph), weights, graph.constants)
            return _Session(model, weights, graph, options)

        computed = any(not wraps and x not in position for x, wraps, _ in found)
        taken_for = bounds(region) if computed else []
        self.made = Followed(region.fixed(), taken_for, region.examples, session, _SESSIONS)

    def __call__(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        for k in self.indices:
            if inputs[k].numel() and int(inputs[k].min()) < 0:
                raise Declined
        made = self.made.current(inputs)
        try:
            return made.executable.run(inputs, self.sizes(inputs))
        except Exception as error:  # the runtime's own classes, which it makes no names for
            if "out of data bounds" in str(error):
                raise Declined from error  # an index: our compiler raises what eager does
            raise


def _sizes_of(region: Region) -> Callable[[tuple[Any, ...]], Sequence[Sequence[int]]]:
    """A function of the inputs: the sizes of the results, once none is known to be 0."""
    graph = region.graph
    sizes: Any = [spec.size for spec in graph.outputs if isinstance(spec, Fresh)]
    if not graph.symbols:
        return lambda inputs: sizes
    write = HostSource("sizes", "inputs")
    write.read_symbols(graph.symbols)
    write.hold("Declined", Declined)
    write.add(*(f"if not {one}: raise Declined" for one in region.conditions()))
    write.add(f"return {[list(size) for size in sizes]!r}")
    return write.function("sizes")
