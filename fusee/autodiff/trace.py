"""The joint trace: eager's own autograd, run on the tracer's twins.

The captured graph runs on twins as in fusee.aten.trace, but with autograd between the program and
the tracer: what the tracer sees are the operators that have a derivative, and what torch.autograd
.grad then runs on tangent twins are eager's backward formulas, recorded into the same graph. Grad
mode, detach, custom Functions and the errors of wrong in-place writes are therefore autograd's own.
Operators that torch composes of others are taken apart above the tracer (trace.py).
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fusee.aten import (
    OutputSpec,
    ViewOfInput,
    ViewOfOutput,
    closure,
    inverse,
    memory_root,
)
from fusee.aten.attention import as_causal, every_head
from fusee.aten.boundary import Inputs, Results
from fusee.aten.canonicalize import Table, group_norm, keep_core
from fusee.aten.mutation import TURNS
from fusee.aten.torch_api import (
    CASTS,
    OpOverload,
    active,
    current_node_number,
    gradients,
    is_transforming,
    next_node_number,
    switches_restored,
    unwrapped,
    uses_flash_attention,
    without_autocast,
    without_torch_functions,
)
from fusee.aten.trace import WithData, failed, inline, run_inner, run_nodes, start
from fusee.aten.tracer import TracedTensor, Tracer
from fusee.autodiff import Joint, sparse_embedding, why_not
from fusee.fake import FakeTensor, unseen_by_hooks
from fusee.fake.gradients import checked, leaf_gradients
from fusee.fake.layouts import has_zero, is_row_major, suggested_layout
from fusee.fake.open_composites import IN_OTHERS
from fusee.fake.torch_python import python_dispatcher
from fusee.source import Args, Rules
from fusee.sym import Size, hint

# ---------------------------------------------------------------------------- functions
# What must be decided above autograd in a joint trace: between the program and its operators.
#
# On the way from a function to operators torch asks tensors for their device. Plain twins are on
# the device "meta"; here they get the answers that eager's tensors give on a CPU. Symbolic sizes,
# autocast and recurrent layers ask for more: there the twins are FakeTensors, which say "cpu".

aten = torch.ops.aten


# A function runs itself where its form returns None.
_FUNCTIONS: Rules[Any, Callable[..., Any]] = Rules({torch.embedding: sparse_embedding})


class AboveAutograd(WithData):
    """Has other forms for some functions that the program, or a function of torch, calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        special = _FUNCTIONS.get(func)
        if special is None:
            return super().__torch_function__(func, types, args, kwargs)
        found = special(self.t, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "meta"


_ATTENTION = torch.nn.functional.scaled_dot_product_attention


@_FUNCTIONS.rule(_ATTENTION)
def _attention(
    t: Tracer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    if not (dropout_p or options.get("enable_gqa")):
        operands = query, key, value, attn_mask
        if whole := every_head(lambda op, *given: op(*given), lambda x: x.shape, operands):
            made = _attention(t, *whole, 0.0, is_causal, **options)
            t.node(unwrapped(made)).meta["improved"] = True
            return (made if query.dim() == 4 else made.squeeze(1)).contiguous()
    is_empty = has_zero(query.shape)
    if options.get("enable_gqa") and is_empty:  # ATen divides by the number of heads
        options["enable_gqa"] = False
    if not _is_plain(query):
        if attn_mask is not None and not is_causal and query.device.type != "cpu":
            known = as_causal(t.node(unwrapped(attn_mask)), t.b.sizes)
            if known is not None:  # torch chooses among more kernels then
                attn_mask, is_causal = None, known
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    on_cpu = t.value(unwrapped(query)).store.device.type == "cpu"
    named: dict[str, Any] = {"scale": None, "enable_gqa": False, **options}
    given = query, key, value, mask, dropout_p, is_causal
    if on_cpu and not is_empty and uses_flash_attention(*given, **named):
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        scale = named["scale"]
        return op(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    return aten._scaled_dot_product_attention_math.default(*given, **named)[0]


@_FUNCTIONS.rule(leaf_gradients)
def _backward(t: JointTracer, loss: Tensor, tangent: Tensor | None, *leaves: Tensor) -> Any:
    """A backward pass in the graph: eager's formulas, as after a graph that is differentiated."""
    for node in closure([t.node(loss)]):
        node.meta["ahead"] = True
    with t.backward():
        given = torch.ones_like(loss) if tangent is None else tangent
        with t.functions:
            found = checked(gradients([loss], leaves, [given]))
        kept: list[Tensor] = []
        for x, leaf in zip(found, leaves):
            value = _settled(t, t.value(x), leaf, t.b.to_size or (lambda size: size))
            x, device = value.tensor, value.store.device
            own = t.b.twins.empty(x.shape, x.stride(), x.dtype, device)
            t.adopt(own, t.node(x), None, device)  # a leaf's grad is no view
            kept.append(own)
    return kept


@_FUNCTIONS.rule(torch.group_norm)
def _group_norm(t: Tracer, input: Tensor, *given: Any, **named: Any) -> Tensor | None:
    is_row_major = suggested_layout(input) == torch.contiguous_format
    is_torchs = is_row_major or not _is_plain(input)
    return None if is_torchs else group_norm(t, input, *given, **named)


for _function in (torch.prod, Tensor.prod, torch.nn.functional.one_hot):
    _FUNCTIONS[_function] = lambda t, *args, other=IN_OTHERS[_function], **kwargs: (
        None if is_transforming() else other(*args, **kwargs)
    )


class _Mish(torch.autograd.Function):
    """Its gradient is one operator. Without a meta kernel for that dispatching takes it apart, into
    steps that round to 16 bits each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tracer) -> Any:
        ctx.t, ctx.x = t, x
        return aten.mish.default(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.t.call(aten.mish_backward.default, grads[0], ctx.x), None


@_FUNCTIONS.rule(torch.nn.functional.mish, torch._C._nn.mish)
def _mish(t: Tracer, input: Tensor, inplace: bool = False) -> Any:
    if inplace or is_transforming():
        return None
    return _Mish.apply(input, t)  # type: ignore[no-untyped-call]


@_FUNCTIONS.rule(torch.nn.functional.pad)
def _pad(
    t: Tracer, input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    axes = range(input.dim() - 1, 1, -1)
    pairs = [*zip(axes, pad[::2], pad[1::2])]
    is_determined = torch.are_deterministic_algorithms_enabled() and _is_plain(input)
    if mode == "replicate" and is_determined and t.value(input).store.device.type == "cuda":
        for k, before, after in pairs:  # as eager: ATen's own backward would be refused
            at = torch.arange(-before, input.shape[k] + after, device=input.device)
            index = [None] * k + [at.clamp(0, input.shape[k] - 1)]
            input = aten._unsafe_index.Tensor(input, index)
        return input.contiguous(memory_format=suggested_layout(input))
    if (
        mode != "circular"
        or 2 * len(axes) != len(pad)
        or not all(type(n) is int and 0 <= n <= input.shape[k] for k, *ends in pairs for n in ends)
    ):
        return None
    x = input
    for k, before, after in pairs:
        x = torch.cat((x.narrow(k, x.shape[k] - before, before), x, x.narrow(k, 0, after)), k)
    return x.contiguous()  # eager writes piece after piece into rows


class _Moved(torch.autograd.Function):
    """A copy on another device. The twins of both are on one, so that torch would leave the
    gradient where it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tracer, kwargs: dict[str, Any]) -> Any:
        ctx.t, ctx.home, ctx.dtype = t, t.value(x).store.device, x.dtype
        return t.call(aten._to_copy.default, x, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _to(ctx.t, grads[0], ctx.home, ctx.dtype), None, None


@_FUNCTIONS.rule(Tensor.to)
def _to(t: Tracer, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not _is_plain(x):
        return x.to(*args, **kwargs)
    home = t.value(unwrapped(x)).store.device
    if args and isinstance(args[0], Tensor):
        args = t.value(unwrapped(args[0])).store.device, args[0].dtype, *args[1:]
    kwargs = {name: y for name, y in kwargs.items() if name != "device" or not _is_home(y, home)}
    rest = [y for y in args if not _is_home(y, home)]
    named: dict[str, Any] = {"device": (str, torch.device), "dtype": torch.dtype}
    found = {name: y for name, kind in named.items() for y in rest if isinstance(y, kind)}
    if x.requires_grad and torch.is_grad_enabled() and "device" in {**found, **kwargs}:
        kept = {name: y for name, y in kwargs.items() if name not in ("copy", "non_blocking")}
        return _Moved.apply(x, t, {**found, **kept})  # type: ignore[no-untyped-call]
    return x.to(*rest, **kwargs) if rest or kwargs else x


_FUNCTIONS.rule(Tensor.type_as)(lambda t, x, other: _to(t, x, other) if _is_plain(x) else None)


@_FUNCTIONS.rule(torch.pow, Tensor.pow, Tensor.__pow__)
def _pow(t: Tracer, *given: Any) -> Any:
    """Gradients of powers compare a number, and an open one cannot be: it is a tensor.

    Of float64, as numbers are. Unlike a number it promotes tensors without axes.
    """
    is_open = [type(x) is torch.SymInt for x in given]
    dtype = next(x.dtype for x in given if isinstance(x, Tensor))
    if not any(is_open) or not (dtype.is_floating_point or dtype.is_complex):
        return None
    f64 = torch.float64
    made = [torch.scalar_tensor(x, dtype=f64) if o else x for x, o in zip(given, is_open)]
    found = torch.pow(*made).to(dtype)
    # a number to powers lies in rows, however they lie
    is_turned = is_open[0] and not is_row_major(found)
    return found.clone(memory_format=torch.contiguous_format) if is_turned else found


@_FUNCTIONS.rule(*(getattr(Tensor, op.overloadpacket.__name__) for op in TURNS))
def _turned(t: Tracer, x: Tensor, *_: Any, **__: Any) -> None:
    """Autograd takes views of FakeTensors by what made them, which no turn in place changes."""
    if x._is_view() and not _is_plain(x):
        raise t.b.unsupported("a view is turned in place")


_FUNCTIONS.rule(Tensor.__rpow__)(lambda t, x, base: _pow(t, base, x))


@_FUNCTIONS.rule(torch.nn.functional.dropout, torch.dropout)
def _dropout(
    t: Tracer, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Eager's way, where sizes are open too: there torch has one that no kernel of ours draws."""
    if inplace or not training or not 0 < p <= 1:
        return None
    if has_zero(input.shape):
        return input
    if p == 1:
        return input * 0
    where = t.value(unwrapped(input)).store.device if _is_plain(input) else input.device
    if where.type != "cpu":
        return torch.native_dropout(input, p, True)[0]
    return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)


@_FUNCTIONS.rule(Tensor.cuda)
def _cuda(t: Tracer, x: Tensor, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    where = "cuda" if device is None else f"cuda:{device}" if type(device) is int else device
    return _to(t, x, torch.device(where), *args, **kwargs)


_FUNCTIONS.rule(Tensor.cpu)(lambda t, x, **kwargs: _to(t, x, torch.device("cpu"), **kwargs))


def _is_home(x: object, home: torch.device) -> bool:
    """Whether an argument of `to` names the device where the tensor is."""
    if isinstance(x, str):
        x = torch.device(x)
    return isinstance(x, torch.device) and x.type == home.type and x.index in (None, home.index)


_ASKING: frozenset[Any] = frozenset(
    {
        *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        *(torch.set_autocast_enabled, torch.amp.autocast_mode._enter_autocast),
    }
)
# They have several kernels on GPUs, some of which draw other random numbers.
_CHOOSING = frozenset({_ATTENTION, torch.nn.functional.multi_head_attention_forward})


def needs_devices(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether operators of this graph are made of others in ways that ask for the device."""
    if any(map(torch.is_autocast_enabled, CASTS)):
        return True
    modules = list(gm.modules())
    graphs = [module.graph for module in modules if isinstance(module, fx.GraphModule)]
    is_on_cpu = all(x.device.type == "cpu" for x in example_inputs if isinstance(x, Tensor))
    asking = _ASKING if is_on_cpu else _ASKING | _CHOOSING
    return any(isinstance(module, torch.nn.RNNBase) for module in modules) or any(
        node.target in asking or getattr(node.target, "__name__", "") == "wrap_with_autocast"
        for graph in graphs
        for node in graph.nodes
    )


# ------------------------------------------------------------------------------ inner graphs


HIGHER_ORDER: Rules[str, Callable[..., Any]] = Rules()


@HIGHER_ORDER.rule("wrap_with_set_grad_enabled")
def _with_grad_mode(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    with torch.set_grad_enabled(args[0]):
        return run_inner(t, args[1], list(args[2:]), attribute)


_regions = itertools.count()


@HIGHER_ORDER.rule("tag_activation_checkpoint", "wrap_activation_checkpoint")
def _checkpoint(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    outer = t.b.marks.get("recompute")
    if outer is not None:  # the outermost region recomputes all
        return inline(t, op, args, kwargs, attribute)
    t.b.marks["recompute"] = next(_regions)
    try:
        return inline(t, op, args, kwargs, attribute)
    finally:
        del t.b.marks["recompute"]


@HIGHER_ORDER.rule("autograd_function_apply")
def _custom_function(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    """A torch.autograd.Function that capture has made two graphs of."""
    forward_graph, backward_graph, *inputs = args
    dirty = set(kwargs.get("dirty_idx", ()))
    plain = set(kwargs.get("non_differentiable_idx", ()))
    saved: list[Any] = []

    class Inlined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            out, kept = run_inner(t, forward_graph, list(given), attribute)
            saved[:] = kept
            flat = out if isinstance(out, (tuple, list)) else [out]
            ctx.mark_dirty(*(x for i, x in enumerate(flat) if i in dirty))
            ctx.mark_non_differentiable(*(x for i, x in enumerate(flat) if i in plain))
            return tuple(out) if isinstance(out, list) else out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = run_inner(t, backward_graph, [*grads, *saved], attribute)
            return tuple(found) if isinstance(found, list) else found

    return Inlined.apply(*inputs)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------- trace


def trace_joint(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    keep: Callable[[OpOverload], bool] = keep_core,
    decompositions: Table | None = None,
) -> Joint:
    """Forward and backward of `gm` called with inputs like these, with grad mode on.

    Inputs that are written to may overlap others: who calls looks at each call.

    keep, decompositions   as in fusee.aten.trace
    raises                 TraceError, MissingFake as fusee.aten.trace; TraceError where eager's
                           forward or backward would raise
    """
    leaves = _Leaves()
    with_devices = needs_devices(gm, example_inputs)
    tracer, inputs = start(
        gm,
        example_inputs,
        keep,
        decompositions,
        kind=JointTracer,
        prepare=leaves.prepare,
        with_devices=with_devices,
    )
    ambient = any(map(torch.is_autocast_enabled, CASTS))
    symbolic = python_dispatcher() if tracer.b.to_size is not None else contextlib.nullcontext()
    # which would look at the values of gradients
    unchecked = torch.autograd.set_detect_anomaly(False)
    with switches_restored(), torch.enable_grad(), symbolic, unseen_by_hooks(), unchecked:
        returned = run_nodes(tracer, gm, gm.graph, inputs.given, inputs.attribute)
        shown = *pytree.tree_leaves(gm.graph.output_node().args), *[None] * len(gm.graph.nodes)
        finish = _Finish(tracer, inputs, leaves, Results(inputs, returned), shown)
        with without_autocast():
            finish.backward()
    torch.clear_autocast_cache()  # twins that autocast has cast
    return finish.joint(ambient)


# Where the program calls, what, and on which device: a formula makes zeros there.
Line = tuple[str | None, fx.Node | None, torch.device]


class JointTracer(Tracer):  # type: ignore[no-untyped-call]  # torch's own hook
    """The tracer below autograd. It knows which line's backward runs.

    is_backward  backward formulas run now
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.functions = AboveAutograd(self)
        self.above = self.functions
        self.higher_order = HIGHER_ORDER
        self.is_backward = False
        self._first: list[int] = []
        self._lines: list[Line] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if self.is_backward:
            number, is_function = current_node_number()
            line: Line = None, None, self.here
            if number is not None:
                line = self._lines[bisect_right(self._first, number) - 1]
            self.b.stack_trace, self.b.call, self.here = line
            self.b.marks["function"] = number if is_function else None
        # what we ask twins for is no call of the program's: `functions` need not see it
        with without_torch_functions():
            return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, a backward pass is recorded."""
        marks, line, call = dict(self.b.marks), self.b.stack_trace, self.b.call
        self.is_backward = True
        self.b.marks["backward"] = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_backward, self.b.stack_trace, self.b.marks = False, line, marks
            self.b.call = call

    def begin(self) -> None:
        if not self.is_backward:
            self._first.append(next_node_number())
            self._lines.append((self.b.stack_trace, self.b.call, self.here))

    def brought(self, call: Any, args: Args) -> Args:
        """Numbers of the CPU that meet tensors of a GPU come there, and their gradients go back.

        The engine moves these where devices differ, and all twins are on one.
        source   torch/csrc/autograd/engine.cpp, validate_outputs
        """
        super().brought(call, args)
        if not self.is_backward and self._lines:
            self._lines[-1] = (*self._lines[-1][:2], self.here)
        if self.here.type == "cpu" or self.b.devices == {self.device}:
            return args

        def come(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() or not x.requires_grad or not _is_plain(x):
                return x
            return _to(self, x, self.here) if self.value(x).store.device.type == "cpu" else x

        name = getattr(call, "__name__", "")
        writes = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
        with active(self):
            found: Args = fx.node.map_aggregate(args[1:] if writes else args, come)
        return (args[0], *found) if writes else found

    def look_at_autocast(self) -> None:
        """Autocast is above autograd, and acts by itself on twins that say where they are."""
        if self.device.type not in CASTS and torch.is_autocast_enabled(self.device.type):
            raise self.b.unsupported(f"autocast on {self.device.type}")


class _Inner(torch.autograd.Function):
    """Makes a tensor one that something computed, in place."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("the gradient ends at the tensor, before what computed it")


class _Leaves:
    """The twins of inputs that require grad.

    edges    per input: what torch.autograd.grad takes for it
    origins  per input: its grad_fn before the program ran
    """

    def __init__(self) -> None:
        self.edges: dict[int, Any] = {}
        self.origins: dict[int, Any] = {}
        self._token = torch.empty((), device="meta", requires_grad=True)

    def prepare(self, index: int, twin: Tensor, example: Tensor) -> None:
        if not example.requires_grad:
            return
        if example.is_leaf:
            twin.requires_grad_()
            self.edges[index] = twin
        else:
            with torch.enable_grad():
                if isinstance(twin, FakeTensor):  # for which apply() would import sympy
                    with twin.fake_mode:
                        twin.mul_(torch.empty((), requires_grad=True))
                else:
                    _Inner.apply(self._token, twin)  # type: ignore[no-untyped-call]
            self.edges[index] = torch.autograd.graph.get_gradient_edge(twin)
        self.origins[index] = twin.grad_fn


class _Finish:
    """From the program's results on: the backward and the gradients."""

    def __init__(
        self,
        tracer: JointTracer,
        inputs: Inputs,
        leaves: _Leaves,
        results: Results,
        shown: Sequence[Any],
    ):
        self.tracer, self.b, self.inputs, self.leaves = tracer, tracer.b, inputs, leaves
        self.results, mutations = results, results.mutations
        # autograd knows of what was written there
        written = ((m, inputs.values[m.index]) for m in mutations)
        origins = leaves.origins
        self.rebinds = tuple(
            m for m, x in written if x is not None and x.tensor.grad_fn is not origins.get(m.index)
        )
        self.mutations = tuple(m for m in mutations if m not in self.rebinds)
        self.forward_results = len(self.results.nodes)
        self.detached = tuple(map(self._is_detached, results.leaves, results.outputs, shown))
        # not what only holds the memory of detached results: its history may be used up
        shown = [spec for spec, apart in zip(results.outputs, self.detached) if not apart]
        known = {getattr(spec, "position", None) for spec in (*shown, *self.rebinds)}
        known |= {spec.index for spec in shown if isinstance(spec, ViewOfOutput)}
        tensors = enumerate(results.tensors)
        self.tangents = tuple(at for at, x in tensors if x.requires_grad and at in known)
        self.gradients: list[int | None] = []

    def backward(self) -> None:
        """Record the backward of all results that require grad, and append the gradients.

        raises   TraceError where eager's backward raises
        """
        b, inputs = self.b, self.inputs
        ends = [self.results.tensors[position] for position in self.tangents]
        try:
            given = [inputs.add_tangent(b.values[id(x)]) for x in ends]
        except RuntimeError as error:  # of a view that may not be written to
            raise failed(self.tracer, "backward", error) from error
        # parts differ where no node of autograd is below both results
        part = list(range(len(ends)))
        first: dict[Any, int] = dict.fromkeys(set(self.leaves.origins.values()), -1)
        for number, end in enumerate(ends):
            row = [end.grad_fn]
            while row:
                node = row.pop()
                if node is None or not node.next_functions or node in first:
                    other = first.get(node, -1)
                    if other >= 0 and part[other] != part[number]:
                        part = [part[other] if x == part[number] else x for x in part]
                    continue
                first[node] = number
                row += [below for below, _ in node.next_functions]
        self.parts = tuple(part)
        edges = self.leaves.edges
        held = [x.store for x in inputs.values[: -len(given) or None] if x is not None]
        for store in (*held, *self.results.memory.values()):
            store.frozen = store.frozen or "a backward that writes to what was there before"
        with self.tracer.backward():
            try:
                with active(self.tracer), self.tracer.functions:
                    found = gradients(ends, list(edges.values()), given) if ends else ()
            except (RuntimeError, IndexError, ValueError) as error:
                raise failed(self.tracer, "backward", error) from error
            self._keep_gradients(dict(zip(edges, found)), given)

    def _keep_gradients(self, by_index: dict[int, Tensor | None], given: Sequence[Tensor]) -> None:
        b, inputs = self.b, self.inputs
        tangents = {b.node(self.tracer.value(x)) for x in given}
        places: dict[int, int] = {}
        for index in range(len(inputs.values) - len(given)):
            gradient = by_index.get(index)
            if gradient is None:
                self.gradients.append(None)
                continue
            if id(gradient) not in places:
                target = inputs.values[index]
                assert target
                value = self.tracer.value(gradient)
                # in eager, too, it is the tangent or a view of it, which who keeps it may copy
                is_tangent = memory_root(b.node(value)) in tangents
                if not is_tangent:
                    value = _settled(self.tracer, value, target.tensor, inputs.to_size)
                places[id(gradient)] = self.results.position(value, shares=is_tangent)
            self.gradients.append(places[id(gradient)])

    def joint(self, no_autocast: bool) -> Joint:
        graph = self.results.graph(self.mutations, no_autocast)
        if reason := why_not(graph.graph):
            raise self.b.unsupported(reason)
        return Joint(
            aten=graph,
            forward_results=self.forward_results,
            tangents=self.tangents,
            gradients=tuple(self.gradients),
            rebinds=tuple((m.index, m.position) for m in self.rebinds),
            detached=self.detached,
            parts=self.parts,
            unreached=tuple(
                index
                for index, gradient in enumerate(self.gradients)
                if gradient is None and self.leaves.origins.get(index) is not None
            ),
        )

    def _is_detached(self, x: Any, spec: OutputSpec, shown: Any) -> bool:
        """Whether an output shares the memory of another tensor, but not its place in autograd."""
        self.b.call = shown
        try:
            is_apart = isinstance(x, Tensor) and x._is_view() and x.requires_grad and x.is_leaf
        except RuntimeError:  # autograd refuses to say it: what it is a view of was written to
            is_apart = True
        if is_apart:
            raise self.b.unsupported("a view that was made while gradients were off")
        if not isinstance(spec, (ViewOfInput, ViewOfOutput)):
            return False
        owners = self.results.tensors if isinstance(spec, ViewOfOutput) else self.inputs.given
        of = owners[spec.index]
        root, base = (y if y._base is None else y._base for y in (x, of))
        if x.requires_grad and root is not base:
            raise self.b.unsupported("a result whose gradient is not that of whose memory it has")
        # the gradient of what as_strided takes of another view of `root` is lost where it reaches
        # beyond that view; as a view of all of `root` it would not be
        node = x.grad_fn if x.requires_grad else None
        while node is not None and node is not root.grad_fn and node.next_functions:
            below = node.next_functions[0][0]
            is_of_view = below is not None and below is not root.grad_fn and below.next_functions
            if node.name() == "AsStridedBackward0" and is_of_view:  # not of a leaf
                raise self.b.unsupported("a result that as_strided takes of a view")
            node = below
        return root is not base


def _settled(
    t: Tracer, gradient: TracedTensor, target: Tensor, to_size: Callable[[Any], Size]
) -> TracedTensor:
    """`gradient`, copied if it doesn't lie in memory as autograd keeps the gradient of `target`.

    source   torch/csrc/autograd/utils/grad_layout_contract.h: dense tensors give their strides
    """
    x = gradient.tensor
    steps = [hint(to_size(step)) for step in target.stride()]
    order = sorted(range(target.dim()), key=lambda axis: -steps[axis])
    if not _is_dense(target, order):
        order = list(range(target.dim()))
    if _is_dense(x, order):
        return gradient
    with active(t), torch.no_grad():
        copy = x.permute(order).clone(memory_format=torch.contiguous_format)
        return t.value(copy.permute(inverse(tuple(order))))


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    """Whether `x` fills its memory without gaps, its axes in this order from the outermost in."""
    step: Any = 1
    for axis in reversed(order):
        size = x.shape[axis]
        if type(size) is int and size == 1:
            continue
        if x.stride(axis) != step:
            return False
        step = step * size
    return True
