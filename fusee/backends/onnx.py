"""The backend "onnxrt": regions as ONNX models, run by ONNX Runtime.

    claim    the exporter has a function for the operator, and the runtime takes the model of this
             one call: asked by making a session of it, once for equal calls
    compile  one model for the region; parameters are initialisers in torch's own memory
    call     inputs and outputs are bound where they are: nothing is copied

Initialisers are constants to the runtime, which packs and folds them. A parameter that changes
means a session anew; if it keeps changing, as in training, parameters become inputs.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten import WHOLE, AtenGraph, Fresh, arguments, is_view, refuses
from fusee.aten.canonicalize import keep_core
from fusee.aten.rewriter import explicit, single
from fusee.aten.torch_api import OpOverload, op_name
from fusee.backends.regions import (
    CompiledRegion,
    Declined,
    Engine,
    Followed,
    Pool,
    Region,
    bounds,
    by_operator,
    indexed,
    interval,
    relies,
)
from fusee.backends.registry import EngineOptions
from fusee.config import Knob, knob, taken
from fusee.errors import OptionError, choices
from fusee.fake.layouts import has_zero, known
from fusee.source import HostSource, OpRules

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


_AT_TIMES: OpRules[Callable[[fx.Node], str | None]] = OpRules()


@_AT_TIMES.rule("avg_pool1d avg_pool2d avg_pool3d")
def _pool(node: fx.Node) -> str | None:
    named = arguments(node)
    if named["ceil_mode"] or named.get("divisor_override") is not None:
        return "ONNX counts the elements of windows that reach beyond the edge otherwise"
    return None


@_AT_TIMES.rule(
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec"
    " upsample_trilinear3d.vec upsample_nearest1d.vec upsample_nearest2d.vec"
    " upsample_nearest3d.vec upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
    " upsample_trilinear3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
)
def _resize(node: fx.Node) -> str | None:
    given = node.args[-1] if str(node.target).endswith(".vec") else node.args[2:]
    factors = [f for f in given if type(f) is float] if isinstance(given, (tuple, list)) else []
    source: Any = node.args[0]
    sizes = source.meta["val"].shape[2:]
    if all(isinstance(n, int) and float(n * f).is_integer() for n, f in zip(sizes, factors)):
        return None
    return "ONNX takes the factor from the sizes, not as it is given"


@_AT_TIMES.rule("any.dim any.dims all.dim all.dims")
def _of_number(node: fx.Node) -> str | None:
    source: Any = node.args[0]
    return None if source.meta["val"].dim() else "ONNX Runtime finds no axis in a number"


@_AT_TIMES.rule("pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar")
def _power(node: fx.Node) -> str | None:
    if node.meta["val"].dtype.is_floating_point:
        return None
    return "integers that overflow, or are divided, wrap otherwise"


@_AT_TIMES.rule("linalg_vector_norm")
def _norm(node: fx.Node) -> str | None:
    named = arguments(node)
    if named["dim"] is not None and (why := _of_number(node)) is not None:
        return why
    order = named["ord"]
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
            if has_zero(val.shape):  # where sizes are open, each call looks at them
                return "a tensor without elements has no memory to bind"
            if val.is_complex():
                return "a complex tensor cannot be bound"
            if val.is_floating_point() and val.dtype.itemsize == 1:
                return "ONNX Runtime reorders no floating point of 8 bits"
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
        return val.dtype, val.dim(), known(val.shape)
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
        self.bindings: Pool[Any] = Pool(self.session.io_binding)
        asked = {*_names(self.session.get_inputs())}.difference(weights)
        self.inputs = [
            (spec.index, spec.name, None if spec.dtype is None else element_type(spec.dtype))
            for spec in region.inputs
            if spec.name in asked
        ]
        dtypes = [node.meta["val"].dtype for node in region.results]
        self.outputs = [
            (name, dtype, element_type(dtype))
            for name, dtype in zip(_names(self.session.get_outputs()), dtypes, strict=True)
        ]

    def run(self, inputs: tuple[Any, ...], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        binding = self.bindings.take()
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
        self.bindings.give(binding)
        return results


_INT64 = 7  # onnx.TensorProto.INT64


def _names(arguments: Sequence[Any]) -> list[str]:
    return [argument.name for argument in arguments]


class _RegionCall:
    """One region as it is called."""

    def __init__(self, region: Region, options: OnnxOptions) -> None:
        graph = region.graph
        write = HostSource("sizes", "inputs")  # of the results, once none is known to be 0
        write.read_symbols(graph.symbols)
        write.hold("Declined", Declined)
        write.add(*(f"if not {one}: raise Declined" for one in region.conditions()))
        sizes: Any = [list(spec.size) for spec in graph.outputs if isinstance(spec, Fresh)]
        write.add(f"return {sizes!r}")
        self.sizes: Callable[[tuple[Any, ...]], Sequence[Sequence[int]]] = write.function("sizes")
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


# ---------------------------------------------------------------------------- onnx api
# Adapter to torch's ONNX exporter: an fx graph of ATen calls as an ONNX model.
#
# torch.onnx.export takes a program, which it captures and decomposes once more, in seconds. What is
# used here is the exporter's own translation of a graph that is decomposed already, and its
# registry of ONNX functions by ATen operator. Tested with torch 2.11 and 2.13, onnxscript 0.7;
# private are
#   torch.onnx._internal.exporter    _core._translate_fx_graph, _registration.ONNXRegistry,
#                                    _registration.OnnxDecompMeta, _ir_passes.add_opset_imports,
#                                    _torchlib._torchlib_registry.get_torchlib_ops
#   onnxscript._framework_apis       get_torchlib_ops, made for the exporter
#
# All of it is imported when the first graph is translated: that takes a second.

_EXPORTER = "torch.onnx._internal.exporter."
# The file that a weight would be in; sessions are given the weights themselves.
_FILE = "weights"


def is_translated(op: OpOverload) -> bool:
    """Whether the exporter has an ONNX function for this operator."""
    return _registry().has(op)


def element_type(dtype: torch.dtype) -> int:
    """ONNX's number for a dtype.

    raises   KeyError if ONNX has none
    """
    return int(_import("_core").torch_dtype_to_onnx_dtype(dtype))


def model_of(
    graph: fx.Graph, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor]
) -> bytes:
    """The ONNX model of a graph, serialised. Its outputs are named `output_0`, `output_1`, ...

    graph      placeholders, calls of ATen operators whose node.meta has `val`, and an output
    weights    placeholders that are given to the session as initialisers, by this name
    constants  placeholders whose values are written into the model
    raises     the exporter's errors, as they are
    """
    core, ir = _import("_core"), importlib.import_module("onnx_ir")
    registry = _registry()
    for node in graph.nodes:
        node.meta["nn_module_stack"] = {}  # the exporter logs a line for each node without
        if node.op == "call_function":
            registry.has(node.target)
    model = ir.Model(ir.Graph([], [], nodes=[], name="region"), ir_version=10)
    core._translate_fx_graph(
        graph,
        model,
        graph_like=model.graph,
        owned_graphs={},
        lower="at_conversion",
        registry=registry.found,
    )
    own = model.graph
    taken: set[int] = set()
    for k, value in enumerate(list(own.outputs)):  # which are called by their number
        if id(value) in taken or value.producer() is None:
            copy = ir.node("Identity", [value])
            own.append(copy)
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            own.outputs[k] = value = copy.outputs[0]
        taken.add(id(value))
        value.name = f"output_{k}"
    for k, node in enumerate(own):  # after the fx node that they come from
        source = node.meta.get("node")
        node.name = f"{source.name if source is not None else 'identity'}/{k}"
        node.metadata_props.clear()
    for value in list(own.inputs):
        if value.name in weights:
            weight = weights[value.name]
            shape = ir.Shape(tuple(weight.shape))
            value.const_value = ir.ExternalTensor(
                _FILE, 0, weight.nbytes, value.dtype, shape=shape, name=value.name
            )
        elif value.name in constants:
            value.const_value = core.TorchTensor(constants[value.name], name=value.name)
        else:
            continue
        own.inputs.remove(value)
        own.initializers[value.name] = value
    _import("_ir_passes").add_opset_imports(model)
    serialised: bytes = ir.to_proto(model).SerializeToString()
    return serialised


class _Registry:
    """The exporter's registry with the functions that were asked for.

    Its own constructor reads the signatures of all 500, which takes half a second.
    """

    def __init__(self) -> None:
        registration = _import("_registration")
        self.entry = registration.OnnxDecompMeta
        self.found = registration.ONNXRegistry()
        for entry in _import("_torchlib._torchlib_registry").get_torchlib_ops():
            self.found._register(entry.fx_target, entry)
        self.found._cleanup_registry_based_on_opset_version()
        self.more: dict[str, list[Any]] = {}
        apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        for function in apis.get_torchlib_ops():
            self.more.setdefault(function.qualified_name, []).append(function)

    def has(self, op: Any) -> bool:
        """Whether there is a function for an operator, or for a function of numbers."""
        name = op_name(op) if isinstance(op, OpOverload) else f"_operator::{op.__name__}"
        for function in self.more.pop(name, ()):
            self.found._register(
                op,
                self.entry(
                    onnx_function=function.function,
                    fx_target=op,
                    signature=None,
                    is_complex=function.is_complex,
                ),
            )
        return bool(self.found.is_registered(op))


@functools.cache
def _registry() -> _Registry:
    return _Registry()


def _import(name: str) -> Any:
    return importlib.import_module(_EXPORTER + name)


# ---------------------------------------------------------------------------- options
# Options of the backend "onnxrt", under ONNX Runtime's own names, and sessions made with them.

_CPU = "CPUExecutionProvider"
_ENTRIES = "session_config_entries"
# Threads of a session that wait for work would take the cores from those of torch.
_SPIN = "session.intra_op.allow_spinning"

Provider = tuple[str, Mapping[str, Any]]


def _providers(value: Any) -> tuple[Provider, ...]:
    """Names and options, from either of the forms that onnxruntime takes. raises ValueError"""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError
    rows: list[Provider] = []
    for row in value:
        match (row, {}) if isinstance(row, str) else row:
            case (str() as name, Mapping() as own):
                rows.append((name, own))
            case _:
                raise ValueError
    return tuple(rows)


def _dicts(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, Sequence) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError
    return tuple(value)


def _texts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or {*map(type, [*value, *value.values()])} - {str}:
        raise ValueError
    return value


def _session(value: Any) -> dict[str, Any]:
    """Options of a session, checked by those that onnxruntime has.

    raises   ValueError for no dict; OptionError
    """
    if not isinstance(value, Mapping):
        raise ValueError
    defaults = _runtime().SessionOptions()
    rows = [Knob(_ENTRIES, Mapping, {}, "", takes="a dict of texts", convert=_texts)]
    for name in dir(defaults):
        default = getattr(defaults, name)
        if name[0] != "_" and not callable(default):
            members = getattr(type(default), "__members__", {})
            names = (*members, *members.values())
            rows.append(Knob(name, type(default), default, "onnxruntime's", choices=names))
    return taken(value, rows, "session option")


@dataclass(frozen=True)
class OnnxOptions(EngineOptions):
    """Options of one compiled function: fusee.compile(m, backend="onnxrt", options={...})."""

    providers: tuple[Provider, ...] = knob(
        ((_CPU, {}),),
        "execution providers in the order of preference",
        takes=f"a list of providers, such as [{_CPU!r}], each a name, or a name and its options",
        convert=_providers,
    )
    provider_options: tuple[Mapping[str, Any], ...] = knob(
        (), "more options of each", takes="a list of a dict for each provider", convert=_dicts
    )
    session_options: Mapping[str, Any] = knob(
        dict,
        "attributes of onnxruntime.SessionOptions, and `session_config_entries`",
        convert=_session,
    )

    def __post_init__(self) -> None:
        """raises   OptionError for a provider that this build of onnxruntime has not"""
        available = _runtime().get_available_providers()
        for name, _ in self.providers:
            if name not in available:
                raise OptionError(
                    f"onnxruntime has no provider {name!r} here",
                    remedy=choices(name, available, "available") + "; other builds have others",
                )
        if len(self.provider_options) not in (0, len(self.providers)):
            raise OptionError(
                f"option 'provider_options' has {len(self.provider_options)} dicts, and must have"
                f" one for each of providers: {len(self.providers)}",
                remedy='an option for one: providers=[("CPUExecutionProvider", {...})]',
            )

    def session_of(
        self, model: bytes, weights: Mapping[str, Tensor], *, probe: bool = False
    ) -> Any:
        """An InferenceSession. `weights` are shared with it, not copied.

        probe    only find out whether there can be one: nothing is optimised
        raises   onnxruntime's errors, as they are
        """
        runtime = _runtime()
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # errors are raised anyway
        options.intra_op_num_threads = torch.get_num_threads()
        for name, value in self.session_options.items():
            if name != _ENTRIES:
                members = getattr(type(getattr(options, name)), "__members__", {})
                setattr(options, name, members.get(value, value))
        for key, entry in {_SPIN: "0", **self.session_options.get(_ENTRIES, {})}.items():
            options.add_session_config_entry(key, entry)
        if probe:
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.optimized_model_filepath = ""
            options.enable_profiling = False
        if weights:
            make, shared = runtime.OrtValue, list[Any]()
            for x in weights.values():  # values in their memory, which these do not keep alive
                if x.dtype is torch.bfloat16:
                    words, element = x.view(torch.uint16).numpy(), element_type(x.dtype)
                    shared.append(make.ortvalue_from_numpy_with_onnx_type(words, element))
                else:
                    shared.append(make.ortvalue_from_numpy(x.numpy()))
            options.add_external_initializers(list(weights), shared)
        beside = self.provider_options or ({},) * len(self.providers)
        return runtime.InferenceSession(
            model,
            options,
            providers=[name for name, _ in self.providers],
            provider_options=[{**own, **more} for (_, own), more in zip(self.providers, beside)],
        )


def _runtime() -> Any:
    return importlib.import_module("onnxruntime")
