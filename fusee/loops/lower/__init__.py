"""A functional ATen fx graph becomes a LoopGraph.

Nodes are lowered in order; each result is lazy until something needs it in memory: an output, an
Extern, a reduction, or many uses of a costly value (tensor.py). What has no lowering is known from
the tables (tensor.py, and below) before any node is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

from fusee.loops import Buffer, Extern, LoopGraph, Profile, Role, View, contiguous, origin
from fusee.loops.lower import index, norm, pointwise, reduce, views, window
from fusee.loops.lower.pointwise import make_checks
from fusee.loops.lower.tensor import (
    DTYPES,
    HANDLERS,
    REASONS,
    Lowering,
    Meta,
    NotLowered,
    OpCall,
    Shape,
    Strided,
    Tensor,
    bound,
    calls,
    copied,
    dense,
    same_strides,
)
from fusee.loops.lower.views import growing, narrow
from fusee.loops.schedule import reads
from fusee.source import Args, Kwargs, leaves
from fusee.sym import Expr, Size, maximum, only_symbol

# ---------------------------------------------------------------------------- extern
# Calls that stay ATen's, and why.


class ExternSpec(NamedTuple):
    """How a target calls an operator on whole tensors, as cheaply as there is a way.

    call      takes the overload's arguments and returns its results
    out       the same with one more argument `out`, the tensor to fill
    in_place  the same writing over the argument number `operand`, which it takes first
    exact     the tensors that it takes must have eager's strides: a kernel may rely on the
              contiguous copy that the program made for it
    owns      what it returns shares memory with nothing
    any_size  what is called instead where the first operand has open sizes
    """

    call: Callable[..., Any]
    out: Callable[..., Any] | None = None
    in_place: Callable[..., Any] | None = None
    operand: int = 0
    exact: bool = False
    owns: bool = False
    any_size: ExternSpec | None = None


_OF_IMAGES = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
CHANNELS_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def channels_last(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return dense(shape, CHANNELS_LAST[len(shape)])


# ------------------------------------------------------------------------------ reasons

calls("matrix products are ATen's", "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear")
calls("convolutions are ATen's", "convolution convolution_backward")
calls(
    "attention is ATen's blocked kernel",
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu",
)
calls("recurrent layers are ATen's", "lstm.input gru.input rnn_tanh.input rnn_relu.input")
calls(
    "random numbers come from ATen's generator, so that the stream is eager's",
    "rand randn randperm rand_like randn_like bernoulli native_dropout multinomial"
    " normal_functional uniform exponential geometric cauchy log_normal randint"
    " randint.low randint_like randint_like.low_dtype rrelu_with_noise_functional",
)
calls("sorting is ATen's", "sort sort.stable topk kthvalue msort")
calls("sorting is ATen's", "mode mode.dim median median.dim nanmedian nanmedian.dim")
calls("Fourier transforms are ATen's", "_fft_c2c _fft_c2r _fft_r2c")
calls(
    "the size of the result depends on data",
    "nonzero masked_select masked_scatter _local_scalar_dense unique_dim"
    " unique_consecutive _unique2",
)
calls("sums over bags of data-dependent size", "_embedding_bag _embedding_bag_forward_only")
calls("distances are sums over all pairs: ATen's", "_cdist_forward _pdist_forward")
calls("scatters to places that are data, which ATen checks", "max_unpool2d max_unpool3d")
calls("interpolates at points that are data", "grid_sampler_2d grid_sampler_3d")
calls(
    "powers in double, by the C library's pow",
    "logspace logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor",
)
calls("a scan with logaddexp is not in the vocabulary", "logcumsumexp")
calls(
    "gradients that are scattered sums",
    "embedding_dense_backward adaptive_max_pool2d_backward"
    " adaptive_max_pool3d_backward _embedding_bag_backward _embedding_bag_dense_backward"
    " upsample_linear1d_backward upsample_bilinear2d_backward"
    " upsample_trilinear3d_backward upsample_bicubic2d_backward"
    " _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d_backward"
    " _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward"
    " _upsample_bicubic2d_aa_backward grid_sampler_2d_backward grid_sampler_3d_backward",
)
calls("attention is ATen's blocked kernel", "_scaled_dot_product_flash_attention_for_cpu_backward")
calls("distances are sums over all pairs: ATen's", "_cdist_backward _pdist_backward")


# ---------------------------------------------------------------------------- store
# What a graph leaves behind: fresh outputs with eager's strides, and inputs written in place.


# Some of them are on another device.
_BY_ATEN: Any = {"reason": "tensors that only ATen reads", "apart": True}


class Outputs:
    """Collects outputs in order; `finish` stores into inputs after everything else."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.owners: dict[Buffer, object] = {}  # buffers that are returned, and for whom
        self.memory: dict[Buffer | None, Buffer] = {}  # what a call gave a view of
        for step in lowering.graph.steps:
            if isinstance(step, Extern) and step.shares:
                (lent,) = reads(step)
                self.memory |= dict.fromkeys(step.results, self.memory.get(lent, lent))
        self.writes: list[tuple[Tensor, Tensor]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def plain(self, value: Any) -> None:
        self.lowering.graph.outputs.append(value)

    def fresh(
        self, tensor: Tensor, strides: tuple[Size, ...], owner: object, by_aten: bool
    ) -> None:
        """Memory that nobody else has, with exactly these strides. One owner may come again.

        by_aten   no loop may read the tensor
        """
        copy = self._copied if by_aten else self.lowering.copy
        storage = tensor.storage
        if storage is None:
            storage = self.lowering.realise(tensor, strides)
        elif not same_strides(tensor.shape, storage.strides, strides):
            storage = copy(tensor, strides)
        buffer = storage.buffer
        memory = self.memory.get(buffer, buffer)
        is_ours = memory.role in ("scratch", "extern", "result")
        if not is_ours or self.owners.setdefault(memory, owner) is not owner:
            storage = copy(tensor, strides)
            buffer = storage.buffer
            self.owners[buffer] = owner
        if buffer.role == "scratch":
            buffer.role = "result"
            shape = buffer.shape
            if shape == tensor.shape and same_strides(shape, buffer.strides, strides):
                buffer.strides = strides  # along axes of one element they may differ
        self.plain(View(buffer, tensor.shape, strides, storage.offset))

    def _copied(self, tensor: Tensor, strides: tuple[Size, ...]) -> Strided:
        """A new tensor, of ATen's, with the elements of one that only ATen reads."""
        buffer = self.lowering.buffer(tensor.shape, tensor.dtype, strides, "extern")
        given = self.lowering.window(tensor), tensor.shape, strides
        self.lowering.call("aten.copy_", copied, given, (buffer,), **_BY_ATEN)
        return Strided(buffer, strides, 0)

    # -------------------------------------------------------------------------- inputs

    def write(self, tensor: Tensor, target: Tensor, by_aten: bool) -> None:
        """In the end, `target` (an input) holds the values of `tensor`.

        by_aten   no loop may read or write these tensors
        """
        (self.copies if by_aten else self.writes).append((tensor, target))
        storage = _storage(target)
        self.plain(View(storage.buffer, target.shape, storage.strides, storage.offset))

    def finish(self) -> None:
        written = {_storage(target).buffer for _, target in (*self.writes, *self.copies)}
        copies = [(self._detached(x, written, self._copied), target) for x, target in self.copies]
        ready: list[tuple[Tensor, Tensor]] = []
        for tensor, target in self.writes:
            if not self._is_direct(tensor, target, written):
                tensor = self._detached(tensor, written, self.lowering.copy)
            ready.append((tensor, target))
        for tensor, target in ready:
            for part, place in self.lowering.parts(tensor, _storage(target)):
                there = part.storage
                if (
                    there is None
                    or (there.buffer, there.offset) != (place.buffer, place.offset)
                    or not same_strides(part.shape, there.strides, place.strides)
                ):
                    self.lowering.write_into(part, place)
        for tensor, target in copies:
            windows = self.lowering.window(target), self.lowering.window(tensor)
            how = {"mutates": (windows[0].buffer,), **_BY_ATEN}
            self.lowering.call("aten.copy_", torch.Tensor.copy_, windows, (), **how)

    def _is_direct(self, tensor: Tensor, target: Tensor, written: set[Buffer]) -> bool:
        """True if it reads no input that is written, but for the element that it replaces."""
        own = _storage(target)
        if not written.isdisjoint(tensor.reads() - {own.buffer}):
            return False
        for part, place in self.lowering.parts(tensor, own):
            if 0 in part.shape:
                continue
            index = self.lowering.axes(part.shape)
            here = self.lowering.offset(place, index)
            for load in self.lowering.loads(part.at(index)):
                if load.attr[0] is own.buffer and load.attr[1] != here:
                    return False
        return True

    def _detached(self, tensor: Tensor, written: set[Buffer], copy: Any) -> Tensor:
        """The same values in memory that no write changes."""
        storage = self.lowering.realise(tensor)
        if storage.buffer in written:
            storage = copy(tensor, tensor.eager_strides)
        return self.lowering.stored(storage, tensor.shape)


def _storage(target: Tensor) -> Strided:
    storage = target.storage
    assert storage is not None
    return storage


# ---------------------------------------------------------------------------- graph


# importing these modules fills the tables
RULES = (pointwise, reduce, index, norm, window, views)


def supported() -> frozenset[OpOverload]:
    """Every ATen overload that has a lowering; these should stay whole in the traced graph."""
    return frozenset(HANDLERS)


@dataclass
class GraphLowering:
    """Lowers a functional graph.

    inputs     one per tensor placeholder, in order
    profile    of the machine that the loops are for
    size_of    an int or SymInt of the graph as a Size
    extern_of  how to call an op that has no lowering; None: the overload itself is called
    must_run   whether a call must be made, its errors included, though nobody uses its results
    constants  what get_attr nodes name; those in use follow as inputs of role "constant"
    writes     output position -> placeholder position: the value is stored into that input after
               all else, and the output is a View of the input
    home       where the loops run; calls with tensors elsewhere are ATen's
    """

    graph: fx.Graph
    inputs: Sequence[Buffer]
    profile: Profile
    size_of: Callable[[Any], Size]
    extern_of: Callable[[OpOverload], ExternSpec | None]
    must_run: Callable[[fx.Node], bool]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    writes: Mapping[int, int] = field(default_factory=dict)
    home: torch.device = torch.device("cpu")  # noqa: RUF009

    def __post_init__(self) -> None:
        self.lowering = Lowering(self.profile)
        self.env: dict[fx.Node, Any] = {}
        self.readers: dict[Buffer, list[fx.Node]] = {}  # of inputs: what was computed from them
        self.given = iter(self.inputs)
        self.uses: dict[fx.Node, int] = {}
        self.placeholders: list[Tensor | None] = []
        self.opaque: set[int] = set()  # their positions among the placeholders

    def run(self) -> LoopGraph:
        nodes = list(self.graph.nodes)
        places = [(node, node.meta.get("device") or self.home) for node in nodes]
        self.away = {node: device for node, device in places if not is_home(device, self.home)}
        self.odd: dict[fx.Node, str] = {}
        for node in nodes:
            for val in leaves(node.meta.get("val")):
                if isinstance(val, torch.Tensor) and val.dtype not in DTYPES:
                    self.odd.setdefault(node, f"tensors of {str(val.dtype).removeprefix('torch.')}")
                elif isinstance(val, torch.Tensor) and val.is_neg():
                    self.odd.setdefault(node, "tensors that are negated when they are read")
        self.growing = {node: x for node, x in growing(nodes).items() if self._opaque(node) is None}
        # for each value that an input takes in the end: the input's placeholder
        placeholders = [node for node in nodes if node.op == "placeholder"]
        returned: Any = self.graph.output_node().args[0]
        self.replaced: dict[fx.Node, fx.Node] = {}
        for position, place in self.writes.items():
            if isinstance(value := returned[position], fx.Node):
                self.replaced.setdefault(value, placeholders[place])
        self._count_uses(nodes)
        for node in placeholders:
            if self._opaque(node) is not None:
                self.opaque.add(len(self.placeholders))
            self._placeholder(node)
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node)
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
        for value in map(self.env.get, self.away):
            self.lowering.graph.elsewhere.update(b for x in _tensors(value) for b in x.reads())
        make_checks(self.lowering)
        return self.lowering.graph

    # -------------------------------------------------------------------------- uses

    def _count_uses(self, nodes: list[fx.Node]) -> None:
        """How many times each value is computed if it stays lazy; views pass uses on."""
        for node in reversed(nodes):
            total = 0
            for user in node.users:
                if user.op == "output":
                    total += 1
                elif user.op == "call_function" and (
                    not isinstance(user.target, OpOverload)
                    or _gives_view(HANDLERS.get(user.target))
                ):
                    total += self.uses[user]  # to use a view is to use what it is a view of
                elif self.uses[user] or self.must_run(user):
                    total += 1
            self.uses[node] = total

    # -------------------------------------------------------------------------- inputs

    def _placeholder(self, node: fx.Node) -> None:
        value: Any = node.meta.get("val")
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor:
            value = self._input(next(self.given))
        elif isinstance(value, (torch.SymInt, int)):
            value = self.size_of(value)
            if (symbol := only_symbol(value)) is not None:
                self.lowering.graph.inputs.append(symbol)
        self.env[node] = value
        self.placeholders.append(value if is_tensor else None)

    def _input(self, buffer: Buffer) -> Tensor:
        self.lowering.graph.inputs.append(buffer)
        return self.lowering.whole(buffer)

    def _constant(self, node: fx.Node) -> None:
        value = self.constants[str(node.target)]
        if value.dim() == 0 and value.device.type == "cpu" and self._opaque(node) is None:
            number = self.lowering.values.const(value.item(), value.dtype)
            self.env[node] = self.lowering.computed((), value.dtype, lambda ix: number)
            return
        shape, strides = tuple(value.shape), tuple(value.stride())
        self.env[node] = self._input(
            Buffer(str(node.target), value.dtype, shape, strides, "constant")
        )

    # -------------------------------------------------------------------------- calls

    def _call(self, node: fx.Node) -> None:
        if not self.uses[node] and not self.must_run(node):
            return
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.env[node] = self.size_of(value)
            return
        args = tuple(self._argument(arg) for arg in node.args)
        kwargs = {key: self._argument(arg) for key, arg in node.kwargs.items()}
        op: Any = node.target
        if node in self.growing:
            growth, longest = self.growing[node]
            if growth.length == 0:
                growth.length = self.size_of(longest.meta["val"].shape[growth.dim])
            self.lowering.origin = origin(node)
            self.env[node] = growth.take(args[0])
        elif isinstance(op, OpOverload):
            self.lowering.origin = origin(node)
            self.lowering.graph.late = node.meta.get("late", self.lowering.graph.late)
            many = isinstance(value, (tuple, list))
            metas = [self._meta(v) for v in leaves(value)] if op._schema.returns else []
            results = self._lower(node, op, metas, args, kwargs)
            for k, meta in enumerate(metas):
                result = results[k]
                if result is not None and meta is not None:
                    results[k] = self._finish(result, meta, self.uses[node])
                    if "stored" in node.meta:
                        self.lowering.realise(result)
            self.env[node] = tuple(results) if many else results[0] if results else None
        else:
            self.env[node] = op(*args, **kwargs)  # getitem of several results, sums of sizes
        for tensor in _tensors(self.env[node]):
            for buffer in tensor.reads():
                if buffer.role == "input":
                    self.readers.setdefault(buffer, []).append(node)

    def _lower(
        self, node: fx.Node, op: OpOverload, metas: list[Meta | None], args: Args, kwargs: Kwargs
    ) -> list[Tensor | None]:
        opaque = self._opaque(node)
        reason, handler = opaque or node.meta.get("called"), HANDLERS.get(op)
        if reason is None and handler is not None:
            known = tuple(meta for meta in metas if meta is not None)
            used: tuple[bool, ...] = (True,)
            if len(metas) != 1:
                taken = {user.args[1] for user in node.users if self.uses[user]}
                used = tuple(k in taken for k in range(len(metas)))
            layout_of = partial(self._layout_of, node)
            overwrites = self._overwrites(node)
            call = OpCall(self.lowering, op, known, used, layout_of, self.extern_of, overwrites)
            if not _gives_view(handler):
                nothing = bool(known) and all(0 in meta.shape for meta in known)
                if nothing and not self.must_run(node):
                    return [
                        None if meta is None else self.lowering.filled(meta.shape, 0, meta.dtype)
                        for meta in metas
                    ]
                empty = nothing or any(0 in x.shape for x in args if isinstance(x, Tensor))
                if empty and self.must_run(node):
                    reason = "ATen may refuse operands without elements"
                if any(len(x.shape) > 64 for x in args if isinstance(x, Tensor)):
                    reason = "ATen refuses more than 64 axes"
            try:
                if reason is None:
                    result = bound(handler, call, args, kwargs)
                    return [result] if isinstance(result, Tensor) else list(result)
            except NotLowered as error:
                reason = str(error)
        elif reason is None:
            reason = REASONS.get(op, "no lowering")
        self.lowering.graph.notes.append(f"{op!s}: {reason}")
        return self._extern(node, op, metas, reason or "")

    def _extern(
        self, node: fx.Node, op: OpOverload, metas: list[Meta | None], reason: str
    ) -> list[Tensor | None]:
        """Append the call; its results as tensors."""
        lowering, returns = self.lowering, op._schema.returns
        spec = self.extern_of(op) or ExternSpec(op, exact=True)
        if spec.any_size is not None:
            sizes = self._argument(node.args[0]).shape
            spec = spec.any_size if any(isinstance(n, Expr) for n in sizes) else spec
        if self._opaque(node) is not None:
            spec = spec._replace(call=op, out=None, in_place=None)
        images = node.meta.get("layout") == "channels_last"
        laid = partial(self._laid, images=images, exact=spec.exact, is_of_images=op in _OF_IMAGES)
        given = tuple(map(laid, node.args))
        named_args = {key: laid(arg) for key, arg in node.kwargs.items()}
        out = spec.out if len(metas) == 1 and metas[0] is not None else None
        role: Role = "extern" if out is None else "scratch"
        buffers: list[Buffer | None] = []
        for meta in metas:
            if meta is not None and images and len(meta.shape) in CHANNELS_LAST:
                meta = meta._replace(strides=channels_last(meta.shape))
            buffers.append(meta and lowering.buffer(meta.shape, meta.dtype, meta.strides, role))
        plain = call = out or spec.call
        shares = any(r.alias_info is not None for r in returns)
        # inputs are written to in an order that knows nothing of views of them
        takes_inputs = any(isinstance(x, View) and x.buffer.role == "input" for x in given)
        if shares and self.writes and takes_inputs:
            call, shares = lambda *args, **kwargs: copied(plain(*args, **kwargs)), False
        lowering.call(
            str(op),
            call,
            given,
            tuple(buffers),
            reason,
            kwargs=named_args,
            out=out is not None,
            many=len(returns) > 1 or any(isinstance(r.type, torch.ListType) for r in returns),
            in_place=spec.in_place,
            operand=spec.operand,
            owns=spec.owns,
            shares=shares,
            apart=self._elsewhere(node) is not None,
            must_run=self.must_run(node),
        )
        return [None if buffer is None else lowering.whole(buffer) for buffer in buffers]

    def _opaque(self, node: fx.Node) -> str | None:
        """Why no loop may read or write the tensors of a call: only ATen can."""
        device = self._elsewhere(node)
        return _first(self.odd, node) if device is None else f"tensors on {device}"

    def _elsewhere(self, node: fx.Node) -> torch.device | None:
        """Another device than ours that tensors of a call are on."""
        return _first(self.away, node)

    def _finish(self, result: Tensor, meta: Meta, uses: int) -> Tensor:
        # a size that had a formula in the operands may have been found to be a number since
        for dim, (formula, size) in enumerate(zip(result.shape, meta.shape, strict=True)):
            if isinstance(size, int) and not isinstance(formula, int):
                result = narrow(result, dim, 0, size)
        result.origin = result.origin or self.lowering.origin
        if result.strides is None and result.storage is None and result.shape == meta.shape:
            result.strides = meta.strides
        self.lowering.settle(result, uses)
        return result

    def _overwrites(self, node: fx.Node) -> bool:
        """True if `node` makes the new value of the input that is its first argument.

        Storing into the input at once saves two copies of it, and is right if nothing later sees
        the old value. What was not computed yet but reads it is computed now.
        """
        source = self.replaced.get(node)
        if source is None or not isinstance(node.args[0], fx.Node) or node.args[0] is not source:
            return False
        buffer = self.env[source].storage.buffer
        operands: set[fx.Node] = set()
        fx.map_arg((node.args[1:], node.kwargs), operands.add)
        readers: list[Tensor] = []
        for other in (source, *self.readers.get(buffer, ())):
            for tensor in _tensors(self.env[other]):
                if buffer not in tensor.reads():
                    continue
                waiting = [user for user in other.users if user not in self.env]
                if other in operands or any(user is not node for user in waiting):
                    if tensor.storage is not None:
                        return False
                    readers.append(tensor)
        for tensor in readers:
            self.lowering.realise(tensor)
        return True

    def _layout_of(self, node: fx.Node, position: int) -> tuple[tuple[Size, ...], Size]:
        source = node.args[position]
        assert isinstance(source, fx.Node)
        value = source.meta["val"]
        return self._sizes(value.stride()), self.size_of(value.storage_offset())

    def _meta(self, value: Any) -> Meta | None:
        if not isinstance(value, torch.Tensor):
            return None
        strides = value.stride() if value.layout is torch.strided else ()
        return Meta(self._sizes(value.shape), value.dtype, self._sizes(strides))

    def _sizes(self, values: Iterable[Any]) -> tuple[Size, ...]:
        return tuple([n if type(n) is int else self.size_of(n) for n in values])

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self._argument(item) for item in arg]
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size_of(arg)  # refuses all but integers
        return arg

    def _laid(self, arg: Any, images: bool, exact: bool, is_of_images: bool) -> Any:
        """An argument of an Extern, with the strides in which ATen is to see a tensor."""
        if isinstance(arg, (list, tuple)):
            return [self._laid(item, images, exact, is_of_images) for item in arg]
        tensor, window = self._argument(arg), self.lowering.window
        if not isinstance(tensor, Tensor):
            return tensor
        if arg in self.odd:  # no loop may copy it
            return window(tensor)
        meta = self._meta(arg.meta["val"])
        assert meta is not None
        strides = meta.strides if len(meta.strides) == len(tensor.shape) else None  # it is opaque
        is_one = len(meta.shape) in CHANNELS_LAST and meta.shape[0] == 1
        if is_of_images and is_one and strides not in (None, contiguous(meta.shape)):
            # Where the stride of that axis does not tell that it lies by channels, ATen would make
            # rows of a single image at each call: its copies take ten times as long as a kernel's.
            # source: c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4
            (first, *others), (least, *by_channels) = strides, channels_last(meta.shape)
            is_short = isinstance(first, int) and isinstance(least, int) and first < least
            if is_short and others == by_channels:
                strides, exact = contiguous(meta.shape), True
        # weights come as their pass packed them
        kept = tensor.storage is not None and tensor.storage.buffer.role == "derived"
        if images and not kept and len(tensor.shape) in CHANNELS_LAST:
            return window(tensor, channels_last(tensor.shape))
        if not exact or kept or strides is None:
            view = window(tensor)
            if strides is None or kept or tensor.shape[:1] != (1,):
                return view
            # ATen takes one image for rows or for channels-last by the stride of this axis
            return replace(view, strides=(strides[0], *view.strides[1:]))
        repeats = any(s == 0 and n != 1 for s, n in zip(strides, tensor.shape, strict=True))
        if repeats:  # in memory as in eager, or each element as often as it is read
            at = tensor.storage
            as_eager = at is not None and same_strides(tensor.shape, at.strides, strides)
            is_ours = tensor.dtype in DTYPES and not as_eager
            return window(tensor, _repeated(tensor.shape, strides) if is_ours else None)
        return window(tensor, strides)

    def _output(self, node: fx.Node) -> None:
        returned = node.args[0]
        assert isinstance(returned, (tuple, list))
        self.lowering.origin = "output"
        outputs = Outputs(self.lowering)
        for position, arg in enumerate(returned):
            value = self._argument(arg)
            if position in self.writes:
                target = self.writes[position]
                written = self.placeholders[target]
                assert isinstance(written, Tensor)
                outputs.write(value, written, target in self.opaque or arg in self.odd)
            elif isinstance(value, Tensor):
                assert isinstance(arg, fx.Node)
                meta = self._meta(arg.meta["val"])
                assert meta is not None
                outputs.fresh(value, meta.strides, arg, self._opaque(arg) is not None)
            else:
                outputs.plain(value)
        outputs.finish()


def _repeated(shape: Shape, strides: Sequence[Size]) -> tuple[Size, ...]:
    """In memory where each element is as often as eager reads it: rows, behind each other unless
    they lie apart in eager, too, as a kernel may want them (attention its masks)."""
    own = [(n, s) for n, s in zip(shape, strides, strict=True) if s != 0 and n != 1]
    sizes, apart = tuple(n for n, _ in own), tuple(s for _, s in own)
    if same_strides(sizes, contiguous(sizes), apart):
        return contiguous(shape)
    step: Size = 1
    for n, s in own:
        step = maximum(step, n * s)
    found = list(strides)
    for k in reversed(range(len(shape))):
        if strides[k] == 0:
            found[k], step = step, step * shape[k]
    return tuple(found)


def _gives_view(handler: Any) -> bool:
    return handler is not None and handler.__module__ == views.__name__


def is_home(device: torch.device, home: torch.device) -> bool:
    """Whether a device as a program names it is one with a number."""
    return device.type == home.type and device.index in (None, home.index)


_T = TypeVar("_T")


def _first(known: Mapping[fx.Node, _T], node: fx.Node) -> _T | None:
    """What is known of the first of a node and its operands."""
    if not known:
        return None
    return next((known[x] for x in (node, *node.all_input_nodes) if x in known), None)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in leaves(value) if isinstance(x, Tensor)]
