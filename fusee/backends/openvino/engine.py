"""The backends openvino and openvino_ts: regions in OpenVINO, the rest in our own compiler.

Parameters and buffers become constants of the compiled model, which share torch's memory. A region
whose parameters changed is compiled again; one whose parameters keep changing takes them as inputs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten import WHOLE, AtenGraph, arguments, python_source
from fusee.aten.canonicalize import Table, taken_apart
from fusee.aten.torch_api import OpOverload
from fusee.backends import openvino as api
from fusee.backends.openvino import (
    Executable,
    Models,
    OpenVINOOptions,
    RegionCall,
    RegionSpec,
    graph,
)
from fusee.backends.openvino.graph import (
    decodable,
    distinct,
    find_origins,
    gather,
    is_joined,
    is_put,
)
from fusee.backends.regions import (
    HEAD,
    LARGEST_SIZE,
    QUANTIZING,
    CompiledRegion,
    Engine,
    Region,
    bounds,
    fits,
    indexed,
    interval,
    relies,
)
from fusee.errors import BackendError, FuseeWarning, user_line, warn
from fusee.fake.layouts import has_zero, is_written, known
from fusee.loops.operators import claimed
from fusee.runtime.cache import content_key
from fusee.source import HALVES, Args, HostSource, Kwargs, OpRules, leaves, listed, overloads
from fusee.sym import Expr

# ---------------------------------------------------------------------------- claims
# Which calls OpenVINO runs exactly as eager does, and why not the others.
#
# Operators are those that the PyTorch frontend of openvino 2026.4 converts from fx graphs, less
# those that it or the CPU plugin computes differently. The plugin has no float64 (it computes in
# float32) and no 64-bit integers (it computes in 32 bits, and never wraps narrower ones): integers
# are claimed only where their `interval` is known to be small enough.


aten = torch.ops.aten

Rule = Callable[[fx.Node], str | None]

_FLOATS = frozenset({torch.float32, *HALVES})
# What OpenVINO rounds elsewhere, but would have parts of.
_WHOLE = aten.linspace, aten.logaddexp, aten.logsumexp, aten.softplus, aten.mish, aten.celu


def why_not(node: fx.Node) -> str | None:
    """Why OpenVINO does not run this call, or None if it does."""
    rule = _rule(node.target)
    if rule is None:
        return "OpenVINO has no such operator that computes what eager does"
    if is_folded(node):
        return "OpenVINO takes quantised weights from the operators that quantise them"
    skipped = {id(index) for index, _, _ in indexed(node)}
    for source in node.all_input_nodes:
        reason = None if id(source) in skipped else _cannot_hold(source)
        if reason is not None:
            return reason
    return rule(node) or _cannot_hold(node)


def is_known(op: OpOverload) -> bool:
    """Whether OpenVINO may run calls of this operator."""
    return _rule(op) is not None


def stays_whole(op: OpOverload) -> bool:
    """Whether an operator that OpenVINO lacks is not made of others that it rounds elsewhere."""
    return op.overloadpacket in _WHOLE


def _rule(op: object) -> Rule | None:
    if not isinstance(op, OpOverload):
        return None
    return OPERATORS.get(op) or (_always if str(op) in QUANTIZING else None)


def is_folded(node: fx.Node) -> bool:
    """Whether integers are made floating point that no operator of the graph has quantised."""
    if QUANTIZING.get(str(node.target), 0) is not None:
        return False
    return str(node.all_input_nodes[0].target) not in QUANTIZING


def _cannot_hold(node: fx.Node) -> str | None:
    """Why OpenVINO cannot hold the values of a node as torch does."""
    vals = node.meta.get("val")
    for val in leaves(vals):
        if not isinstance(val, Tensor):
            continue
        if isinstance(vals, Tensor) and has_zero(val.shape):  # of several, batch norms leave some
            return "OpenVINO may crash on a tensor without elements"
        if val.dtype in _FLOATS or val.dtype == torch.bool:
            continue
        dtype = str(val.dtype).removeprefix("torch.")
        if val.dtype.is_floating_point or val.dtype.is_complex:
            return f"{dtype} is not computed as such"
        if val.dtype not in api.TYPES:
            return f"OpenVINO has no {dtype} here"
        if isinstance(vals, Tensor) and not fits(node):
            return f"{dtype} values may not fit the 32 bits that OpenVINO computes in"
    return None


# ------------------------------------------------------------------------------ rules


_NO_COPY = "OpenVINO does not copy what comes in as it is"


OPERATORS: OpRules[Rule] = OpRules()


@OPERATORS.rule(
    "view permute squeeze.dims unsqueeze expand slice.Tensor select.int clone stack copy"
    " roll where.self masked_fill.Scalar"
    " masked_fill.Tensor tril triu full arange.start_step full_like"
    " eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar"
    " le.Tensor isfinite isinf isnan"
)
def _always(node: fx.Node) -> str | None:
    return None


@OPERATORS.rule(
    "pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d"
    " unfold col2im glu _softmax _log_softmax mean sum prod addmm baddbmm"
    " bmm mm dot linear rms_norm _adaptive_avg_pool2d _adaptive_avg_pool3d"
    " upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec"
)
def _floats(node: fx.Node) -> str | None:
    """Computes with floating point: integers only take part where torch converts them."""
    if not _val(node).dtype.is_floating_point:
        return "OpenVINO computes it for floating point only"
    return None


@OPERATORS.rule("slice_scatter select_scatter")
def _puts(node: fx.Node) -> str | None:
    base: Any = node.args[0]
    if is_joined(node) or not is_put(base) or is_joined(base):
        return None
    return "OpenVINO confuses parts that are written one after the other"


@OPERATORS.rule(
    "upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_linear1d.vec upsample_trilinear3d.vec"
)
def _resizes(node: fx.Node) -> str | None:
    sizes = zip(_val(node).shape[2:], _val(node.args[0]).shape[2:], strict=True)
    shrunk = [n for n, old in sizes if not is_written(n, old) and not is_written(old, 1)]
    if not arguments(node)["align_corners"] and not all(relies(node, n, ">=", 2) for n in shrunk):
        return "OpenVINO takes the first element where one is left"
    return _floats(node)


@OPERATORS.rule("mean.dim sum.dim_IntList prod.dim_int linalg_vector_norm")
def _reduced(node: fx.Node) -> str | None:
    is_norm = node.target is aten.linalg_vector_norm.default
    if is_norm and (len(node.args) < 3 or not node.args[2] or node.args[1] == 0):
        return "OpenVINO takes norms along axes that are named, and counts nothing"
    return _floats(node) if _val(node.args[0]).dim() else "OpenVINO finds no axis in a number"


@OPERATORS.rule("convolution")
def _convolution(node: fx.Node) -> str | None:
    if not known(_val(node.args[1]).shape):
        return "OpenVINO convolves with weights of known sizes"
    return _constants(node) or _floats(node)


def _constants(node: fx.Node) -> str | None:
    """Numbers that are attributes in OpenVINO's model, not tensors."""
    if any(isinstance(x, (torch.SymInt, Expr)) for x in leaves((node.args, node.kwargs))):
        return "OpenVINO takes these numbers as constants, and they vary here"
    return None


@OPERATORS.rule("grid_sampler_2d")
def _singles(node: fx.Node) -> str | None:
    return None if _val(node).dtype == torch.float32 else "OpenVINO rounds halves more often"


@OPERATORS.rule("add.Scalar mul.Tensor mul.Scalar rsub.Scalar neg abs constant_pad_nd")
def _numbers(node: fx.Node) -> str | None:
    return "OpenVINO computes it for numbers only" if _val(node).dtype == torch.bool else None


@OPERATORS.rule("flip")
def _flips(node: fx.Node) -> str | None:
    return None if node.args[1] and _val(node).dim() else _NO_COPY


@OPERATORS.rule("addcmul")
def _of_one_dtype(node: fx.Node) -> str | None:
    if any(_val(x).dtype != _val(node).dtype for x in node.all_input_nodes):
        return "OpenVINO does not promote its operands"
    return _floats(node)


@OPERATORS.rule("repeat")
def _repeats(node: fx.Node) -> str | None:
    copies = all(n == 1 for n in node.args[1])  # type: ignore[union-attr]
    return _NO_COPY if copies else None


@OPERATORS.rule("cumsum")
def _cumulative(node: fx.Node) -> str | None:
    if _val(node).dtype in HALVES:
        return "OpenVINO rounds each sum to half precision"
    return _numbers(node)


@OPERATORS.rule("add.Tensor sub.Tensor")
def _sums(node: fx.Node) -> str | None:
    """The plugin takes a half vector that is made float32 for the bias, and loses the other one."""
    for x in node.all_input_nodes if _val(node).dtype == torch.float32 else ():
        while x.op == "call_function" and x.target in _VIEWS:
            x = x.all_input_nodes[0]
        is_vector = sum(not is_written(n, 1) for n in _val(x).shape) <= 1
        if is_vector and _val(x).dtype in HALVES:
            return "OpenVINO loses the bias before a half vector that is added in single precision"
    if node.kwargs and (why := _constants(node)) is not None:
        return why
    return _numbers(node)


@OPERATORS.rule("gt.Scalar gt.Tensor ge.Scalar ge.Tensor maximum minimum")
def _integers(node: fx.Node) -> str | None:
    if any(_val(x).dtype in _FLOATS for x in node.all_input_nodes):
        return "OpenVINO takes NaN for a number here"
    return None


@OPERATORS.rule(
    "logical_and logical_or logical_xor logical_not bitwise_and.Tensor bitwise_or.Tensor"
    " bitwise_xor.Tensor bitwise_not any any.dim any.dims all"
)
def _logic(node: fx.Node) -> str | None:
    if any(_val(x).dtype != torch.bool for x in node.all_input_nodes):
        return "OpenVINO computes it for bool only"
    return None


@OPERATORS.rule("embedding index_select gather index.Tensor")
def _indexes(node: fx.Node) -> str | None:
    for index, wraps, size in indexed(node):
        found = interval(index)
        if index.op == "placeholder" or found is None:
            continue  # it comes from outside of the region, which checks it at each call
        low, high = (-size, size - 1) if wraps else (0, size - 1)
        if not relies(node, found[0], ">=", low) or not relies(node, found[1], "<=", high):
            return "an index computed in the graph may be out of range, and nothing would say so"
    return None


@OPERATORS.rule("native_layer_norm native_group_norm _native_batch_norm_legit_no_training")
def _first_only(node: fx.Node) -> str | None:
    """Of several results only the first may be used, and only floating point is computed."""
    if any(user.args[1] != 0 for user in node.users):
        return "OpenVINO computes its first result only"
    first = node.meta["val"][0]
    if node.target is aten.native_group_norm.default and type(first.shape[1]) is not int:
        return "OpenVINO groups channels of a known number"
    return None if first.dtype.is_floating_point else "OpenVINO computes it for floating point only"


@OPERATORS.rule("max_pool2d_with_indices max_pool3d_with_indices")
def _max_pool(node: fx.Node) -> str | None:
    return _constants(node) or _first_only(node)


@OPERATORS.rule("scaled_dot_product_attention")
def _attention(node: fx.Node) -> str | None:
    if node.kwargs.get("enable_gqa") or len(node.args) > 7:
        return "OpenVINO does not share keys and values between heads"
    if _val(node).dim() < 3:
        return "OpenVINO attends with three axes or more"
    return _singles(node)


@OPERATORS.rule("cat")
def _joins(node: fx.Node) -> str | None:
    ranks = {_val(x).dim() for x in node.all_input_nodes}
    return None if len(ranks) == 1 else "it joins an empty tensor of another rank"


@OPERATORS.rule("avg_pool2d avg_pool3d")
def _average(node: fx.Node) -> str | None:
    if len(node.args) > 4 and node.args[4]:
        return "with ceil_mode it divides by other counts"
    if len(node.args) > 6 and node.args[6] is not None:
        return "OpenVINO divides by no other number than the elements of a window"
    return _constants(node) or _floats(node)


@OPERATORS.rule("_to_copy")
def _converts(node: fx.Node) -> str | None:
    source, dtype = _val(node.args[0]).dtype, _val(node).dtype
    if source == dtype:
        return _NO_COPY
    if source.is_floating_point and not dtype.is_floating_point:
        return f"{source} as {dtype} is rounded elsewhere"
    if "device" in node.kwargs:
        return "it moves a tensor to another device"
    return None


@OPERATORS.rule("native_batch_norm _native_batch_norm_legit")
def _batch_norm(node: fx.Node) -> str | None:
    if len(node.args) > 5 and node.args[5] is True and len(node.args) == 8:
        return "it computes statistics of the batch"
    return _first_only(node)


def _val(node: Any) -> Tensor:
    val = node.meta["val"]
    found: Tensor = val[0] if isinstance(val, (tuple, list)) else val
    return found


# Integers that `interval` follows may be computed too: `_numbers` and `_sums`.
for _op in claimed("openvino"):
    OPERATORS.setdefault(_op, _floats)
_VIEWS = overloads(
    "_to_copy view permute squeeze.dims unsqueeze expand slice.Tensor select.int clone"
)


# ---------------------------------------------------------------------------- openvino ts
# A region as TorchScript, by torch.jit.trace: the older way into OpenVINO.
#
# The TorchScript frontend knows the operators that programs call, not those they are made of: these
# are spelt as the former.


def scripted(graph: AtenGraph, weights: Mapping[int, Tensor], results: Sequence[fx.Node]) -> Any:
    """The graph up to these results as TorchScript, with the inputs in `weights` as its own.

    raises   BackendError if it has symbolic sizes, which tracing would fix
    """
    if graph.symbols:
        raise BackendError("tracing for TorchScript fixes all sizes, and this region has open ones")
    run = _Spelling(decodable(graph, weights, results))
    examples = [
        torch.zeros(spec.size, dtype=spec.dtype)  # type: ignore[arg-type]  # no symbols: ints
        for spec in graph.inputs
        if spec.index not in weights
    ]

    class Region(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return run.run(*given)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch says that TorchScript is deprecated; so do we
        trace: Callable[..., Any] = torch.jit.trace
        return trace(Region(), tuple(examples), check_trace=False)


class _Spelling(fx.Interpreter):
    def call_function(self, target: Any, args: Args, kwargs: Kwargs) -> Any:
        spelt = _SPELT.get(target)
        return spelt(*args, **kwargs) if spelt is not None else target(*args, **kwargs)


# Of several results only the first is used: the claims see to that.
_SPELT: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: lambda x, axis, half: torch.softmax(x, axis),
    aten._log_softmax.default: lambda x, axis, half: torch.log_softmax(x, axis),
    aten._to_copy.default: lambda x, *, dtype=None, **_: x.to(dtype or x.dtype, copy=True),
    aten.squeeze.dims: lambda x, axes: functools.reduce(
        torch.squeeze, sorted(axes, reverse=True), x
    ),
    aten.native_layer_norm.default: lambda *args: (torch.layer_norm(*args),),
    aten.native_group_norm.default: lambda x, w, b, n, c, hw, groups, eps: (
        torch.group_norm(x, groups, w, b, eps),
    ),
    aten._native_batch_norm_legit_no_training.default: lambda x, w, b, mean, var, momentum, eps: (
        torch.batch_norm(x, w, b, mean, var, False, momentum, eps, False),
    ),
}


# ---------------------------------------------------------------------------- openvino


# How often a region is compiled for new values of its parameters before they become inputs.
_MOST_COMPILES = 3


class OpenVINO(Engine):
    """The engine of one compiled function."""

    options: OpenVINOOptions

    def __init__(self, options: OpenVINOOptions) -> None:
        super().__init__(options)
        self.name, self.device = options.backend, options.device
        self.models = Models(options)

    def keeps(self, op: OpOverload) -> bool:
        whole = is_known(op) or stays_whole(op) or op in WHOLE
        return whole and op not in self.options.decompositions

    def decompositions(self) -> Table:
        found = {op: taken_apart(op) for op in self.options.decompositions}
        return {op: function for op, function in found.items() if function is not None}

    def claim(self, node: fx.Node) -> str | None:
        return None if HEAD in node.meta else why_not(node)

    @property
    def trains(self) -> bool:
        return self.options.aot_autograd

    def kept_for(self) -> Sequence[str]:
        return self.models.kept_for

    def prepare(self, graph: AtenGraph, examples: Sequence[Any]) -> None:
        """Weights that are unpacked on each call stay packed."""
        folded = next((node for node in graph.graph.nodes if is_folded(node)), None)
        if folded is not None:
            warn(
                FuseeWarning,
                "this model is quantised, and its weights were folded into integers already",
                where=user_line(folded.meta.get("stack_trace")),
                did="gives OpenVINO floating point: no layer with such a weight runs as int8",
                remedy="convert_pt2e(model, fold_quantize=False)",
            )
        if self.name == "openvino":
            gather(graph, examples, self.options.disabled_ops.__contains__)

    def compile(self, region: Region) -> CompiledRegion:
        # is_kept   whether its model is
        graph = region.graph
        results, places = distinct(graph)
        parts: list[str | Tensor] = [
            python_source(graph),
            str(graph.inputs),
            *graph.constants.values(),
        ]
        spec = RegionSpec(
            graph=content_key(*parts, str(places)) if self.options.model_caching else "",
            fixed=region.fixed(),
            bounds=tuple(bounds(region)),
            outputs=tuple((node.meta["val"].dtype, node.meta["val"].dim()) for node in results),
            places=tuple(places) if places != list(range(len(results))) else None,
            prepare=_prepare(region),
            times=None if find_origins(graph) else _MOST_COMPILES,
        )

        def make(weights: Mapping[int, Tensor]) -> Executable:
            key = self.models.key(spec, weights)
            found = self.models.find(key, spec)
            if found is None:
                model = self._convert(region, weights)
                config = self.options.properties
                found = api.compile_model(model, self.device, config, spec.outputs)
                self.models.keep(key, found)
            return found

        call = RegionCall(spec, region.examples, make)
        return CompiledRegion(call, spec, call.primitives)

    def _convert(self, region: Region, weights: Mapping[int, Tensor]) -> Any:
        results, _ = distinct(region.graph)
        inputs = [
            # without an upper bound: memory for the product of three would overflow, an error
            (spec.dtype or torch.int64, [n if isinstance(n, int) else (1, -1) for n in spec.size])
            for spec in region.graph.inputs
            if spec.index not in weights
        ]
        if self.name == "openvino_ts":
            return graph.convert_traced(scripted(region.graph, weights, results), inputs)
        origins = find_origins(region.graph)
        computed = [origin.weight for origin in origins]
        vals = [node.meta["val"] for node in computed]
        inputs += [(val.dtype, list(val.shape)) for val in vals]
        model = graph.convert_fx(decodable(region.graph, weights, results, computed), inputs)
        values = region.values(weights)
        graph.fill(model, [origin.packed(values) for origin in origins])
        return model


def _prepare(region: Region) -> str:
    """Source of `RegionSpec.prepare`.

    OpenVINO doesn't look whether an index is in range, and may crash on what has no elements;
    claims took sizes for less than a bound.
    """
    graph = region.graph
    write = HostSource("prepare", "inputs")
    write.read_symbols(graph.symbols)
    for name, place in graph.symbols.items():
        least = -LARGEST_SIZE if place.axis is None else 1
        write.add(f"if not {least} <= {name} <= {LARGEST_SIZE}: raise Declined")
    write.add(*(f"if not {one}: raise Declined" for one in region.conditions()))
    position = {node: k for k, node in enumerate(graph.placeholders)}
    checks = dict.fromkeys(
        (position[index], wraps, graph.to_size(size))
        for node in region.calls()
        for index, wraps, size in indexed(node)
        if index in position
    )
    write.add(*(f"check({write.input(k)}, {-n * wraps}, {n})" for k, wraps, n in checks))
    vals = [node.meta["val"] for node in distinct(graph)[0]]
    made = [f"empty({listed(map(graph.to_size, x.shape))}, dtype={x.dtype})" for x in vals]
    write.add(f"return [{', '.join(made)}]")
    return str(write)
