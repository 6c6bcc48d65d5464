"""An fx graph of torch calls becomes a functional graph of ATen operators.

The graph's nodes run on meta tensors under a dispatch mode that sits below autograd, where every
operator arrives whole: linear as linear, not as transpose and matmul. The first line that applies
decides what becomes of it:

    canonicalize.py   operators whose result may or may not be a view: decided here and now
    mutation.py       operators that write: their functional counterpart, then Builder.write
    keep              what the caller wants to see is recorded; so is what may raise for values,
                      since decompositions lose the error
    canonicalize.py   spellings of one thing: softmax.int -> _softmax, conv2d -> convolution
    composite         operators that torch composes of others are taken apart by torch
    canonicalize.py   the tables
    record            anything else

What has no functional ATen form raises TraceError with the reason and the user's line.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from fusee.aten import AtenGraph, is_pure, key_of
from fusee.aten.boundary import Inputs, Prepare, Results
from fusee.aten.canonicalize import (
    ALWAYS,
    CANONICAL,
    Table,
    decomposition,
    in_torchs_words,
    keep_core,
)
from fusee.aten.control_flow import RUNS, as_tensor, is_inexact
from fusee.aten.control_flow import operator as control_flow
from fusee.aten.mutation import write_rule
from fusee.aten.scalars import (
    Scalar,
    holds_scalar,
    is_read,
    of_sizes,
    on_tensors,
    passed,
    read,
    returned,
)
from fusee.aten.torch_api import (
    CASTS,
    HigherOrderOperator,
    OpOverload,
    TorchSymbols,
    active,
    below_autograd,
    bits_of,
    data_of,
    is_composite,
    is_explicit,
    is_skipped,
    lists_are_tuples,
    op_name,
    open_numbers,
    switches_restored,
    symbolic_mode,
    takes_gradients,
    unresolved,
    unwrapped,
)
from fusee.aten.tracer import Builder, Rule, Tracer
from fusee.errors import TraceError
from fusee.fake import (
    SCAN,
    Twins,
    associative_scan,
    combine_of,
    fake_mode,
    is_there,
    may_raise,
)
from fusee.fake.open_composites import COMPOSITES, IN_OTHERS, WITHOUT_VALUES, of_place
from fusee.fake.open_sizes import UNBACKED
from fusee.fake.torch_python import Space, heard, moved
from fusee.source import Kwargs, Rules, tensors_in
from fusee.sym.shape_env import Node, ShapeEnv, SizeNode

# ---------------------------------------------------------------------------- nodes
# Runs the fx graph of torch calls, node by node, on meta tensors.
#
# What isn't an operator is dealt with here: grad mode switches are dropped, graphs inside higher-
# order operators run inline, and whatever needs a tensor's value is refused.


@heard(lambda warning: None)  # the graph's own calls tell, or whoever captured it has told
def run_nodes(
    t: Tracer,
    gm: torch.nn.Module,
    graph: fx.Graph,
    inputs: list[Any],
    attribute: Callable[[torch.nn.Module, str], Any],
) -> Any:
    """Run `graph`, a part of module `gm`, on these inputs; what its output node returns.

    attribute   gives the value of a get_attr node
    raises      TraceError with the user's line
    """
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    load = env.__getitem__
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
            continue
        if node.op == "output":
            return fx.node.map_aggregate(fx.map_arg(node.args[0], load), returned)
        if node.op == "get_attr":
            env[node] = attribute(gm, node.target)
            continue
        outer, call = t.b.stack_trace, t.b.call
        t.b.stack_trace, t.b.call = node.stack_trace or outer, call or node
        t.begin()
        args = fx.map_arg(node.args, load)
        kwargs = fx.map_arg(node.kwargs, load)
        if kwargs.get("generator", t) is None:  # it chose an overload that then lacks it
            kwargs = {key: x for key, x in kwargs.items() if key != "generator"}
        region = node.meta.get("ac_graph_id")  # of torch.utils.checkpoint
        if region is not None:
            t.b.marks["recompute"] = region
            t.b.saves = node.meta.get("ac_policy")
        try:
            env[node] = _run(t, gm, node, args, kwargs, attribute)
        except TraceError as error:
            error.call = t.b.call
            raise
        if region is not None:
            del t.b.marks["recompute"]
            t.b.saves = None
        if type(env[node]) is Scalar:
            env[node].known = node.meta.get("example_value", env[node].known)
        if type(env[node]) is torch.SymBool and not isinstance(env[node].node, Node):
            try:  # what a comparison of torch's own symbols says now: TorchDynamo guards it
                env[node] = bool(env[node])
            except RuntimeError as error:
                raise TraceError(f"{env[node]} is not known") from error
        t.b.stack_trace, t.b.call = outer, call
    raise TraceError("the captured graph has no output node")


def _run(
    t: Tracer,
    gm: torch.nn.Module,
    node: fx.Node,
    args: Any,
    kwargs: Any,
    attribute: Callable[[torch.nn.Module, str], Any],
) -> Any:
    target: Any = node.target
    if node.op == "call_function":
        if isinstance(target, HigherOrderOperator):
            name: str = target.name()  # type: ignore[no-untyped-call]
            inner: Callable[..., Any] = t.higher_order.get(name, inline)
            return inner(t, target, args, kwargs, attribute)
        if target is operator.getitem and not isinstance(args[0], Tensor):
            return args[0][args[1]]
        if is_skipped(target, with_grad=t.above is not None):
            return None
        call = of_place(target, args) or target
    elif node.op == "call_method":
        call = getattr(Tensor if isinstance(args[0], Tensor) else type(returned(args[0])), target)
    else:
        call = module = gm.get_submodule(target)
        if t.above is not None:  # with autograd on it must work on twins, as all does
            own = [*module.named_parameters(), *module.named_buffers()]
            twins = {inner: attribute(gm, f"{target}.{inner}") for inner, _ in own}
            call = lambda *given, **named: torch.func.functional_call(module, twins, given, named)  # noqa: E731
    if is_read(call, args):
        call = read
    elif call is Tensor.item and t.b.twins.env is not None and not is_inexact(args[0]):
        call = call if args[0].dtype is torch.bool else t.number
    elif call is torch.ops.aten._assert_scalar.default and isinstance(args[0], torch.SymBool):
        holds = args[0].node
        if holds.is_pending():
            return holds.env.data.require(holds.a, holds.op, holds.b)
        args = (holds.guarded(), *args[1:])
    elif any(isinstance(x, torch.SymInt) for x in args) and not holds_scalar(args):
        if not any(isinstance(x, Tensor) for x in args):
            call = of_sizes(call) or call
    elif holds_scalar((*args, *kwargs.values())):
        form = on_tensors(call)
        if form is None:
            args, kwargs = fx.node.map_aggregate((args, kwargs), passed)
        call = form or call
    return _called(t, target, call, args, kwargs)


def _called(t: Tracer, target: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """What a call of torch's gives; `target` is what the graph has for it."""
    try:
        args = t.brought(call, args)
        t.look_at_autocast()
        above: contextlib.AbstractContextManager[Any] = t.above or _NOTHING
        if (composite := composite_of(t, call)) is not None:
            call, above = composite, _NOTHING
        elif t.above is None and (
            t.b.to_size is not None or call in _DATA or target in _DATA or isinstance(call, _PYTHON)
        ):
            above = WithData(t)
        name = getattr(call, "__name__", "")
        lazy = (
            unresolved() if name in _OF_VIEWS and any(map(bits_of, tensors_in(args))) else _NOTHING
        )
        with active(t), above, lazy:
            found = call(*args, **kwargs)
        if call is data_of or (call is getattr and args[1] == "data"):
            t.value(found).apart = "data"
        return found
    except (TraceError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        name = target if isinstance(target, str) else target.__name__
        raise failed(t, name, error) from error


# Composed of views. Below autograd ATen resolves their operands first, which makes copies.
_OF_VIEWS = frozenset(
    "broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d einsum swapaxes_ swapdims_".split()
)


def composite_of(t: Tracer, call: Any) -> Callable[..., Any] | None:
    """The form of a function in Python, where it needs one; of one that is an operator of ours,
    that one, unless autograd is to see what it is made of; None: it has none."""
    if call is associative_scan and t.above is None:
        return SCAN  # type: ignore[no-any-return]
    if t.b.to_size is None:
        return WITHOUT_VALUES.get(call)
    return (IN_OTHERS if t.above is None else COMPOSITES).get(call)


def failed(t: Tracer, name: str, error: Exception) -> TraceError:
    """The error for something that raised while it was traced."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return t.b.unsupported(f"{name} cannot run on meta tensors: {first}")


# ------------------------------------------------------------------------------ literals

# Functions of torch put tensors that they make from Python data on the device of another tensor.
# For a meta twin that loses the data, so the data is made into a real tensor first.

Literal = Callable[[Tracer, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
_DATA: Rules[Any, Literal] = Rules()


@_DATA.rule(torch.tensor, torch.as_tensor, torch.asarray)
def _tensor(t: Tracer, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        kwargs["device"] = t.here
    return args, kwargs


@_DATA.rule(Tensor.new_tensor)
def _new_tensor(t: Tracer, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
    x, *data = args
    kwargs = {"dtype": x.dtype, "device": t.value(unwrapped(x)).store.device, **kwargs}
    kwargs.pop("requires_grad", None)
    return data, kwargs


@_DATA.rule(Tensor.to)
def _to(t: Tracer, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
    """Torch asks `other`, a twin, for its device."""
    x, *rest = args
    rest = [kwargs.pop("other"), *rest] if "other" in kwargs else rest
    if rest and isinstance(rest[0], Tensor):
        other, *rest = rest
        rest = [t.value(unwrapped(other)).store.device, other.dtype, *rest]
    return (x, *rest), kwargs


@_DATA.rule(operator.getitem, Tensor.__getitem__)
@_DATA.rule(operator.setitem, Tensor.__setitem__)
def _index(t: Tracer, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
    x, index, *rest = args
    if not isinstance(x, Tensor):
        return args, kwargs
    is_short = isinstance(index, list) and len(index) <= _MOST_IN_LIST
    # as `treatSequenceAsTuple` of torch/csrc/autograd/python_variable_indexing.cpp
    if is_short and any(isinstance(item, _SEVERAL) for item in index) and lists_are_tuples():
        index = tuple(index)
    items = index if isinstance(index, tuple) else (index,)
    plain, axis = list[Any](), 0
    for item in items:
        if _is_index_list(item):  # which indexing makes a tensor of
            if all(isinstance(i, bool) for i in item):
                item = [i for i, is_chosen in enumerate(item) if is_chosen]
            item = torch.tensor(item, dtype=torch.int64)
        plain.append(item)
    used = sum(map(_axes_used, plain))
    for k, item in enumerate(plain):  # plain tensors take no symbolic integers there
        if isinstance(item, torch.SymInt):
            start = item if item >= 0 else item + x.shape[axis]
            x, plain[k] = torch.ops.aten.slice.Tensor(x, axis, start, start + 1), 0
        elif isinstance(item, slice):
            ends = start, stop, step = item.start, item.stop, item.step
            if any(isinstance(at, torch.SymInt) for at in ends):
                x = torch.ops.aten.slice.Tensor(x, axis, start, stop, 1 if step is None else step)
                plain[k] = slice(None)
        axis += x.dim() - used if item is Ellipsis else _axes_used(item)
    return (x, tuple(plain) if isinstance(index, tuple) else plain[0], *rest), kwargs


_SEVERAL = (Tensor, list, tuple, range, slice, type(None), type(Ellipsis))
_MOST_IN_LIST = 31  # of more items a list is always indices


def _axes_used(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


def _is_index_list(index: Any) -> bool:
    if not isinstance(index, (list, tuple, range)):
        return False
    return all(isinstance(i, (int, bool)) or _is_index_list(i) for i in index)


class WithData(torch.overrides.TorchFunctionMode):
    """Does the same for what Python functions of torch call, and sees them switch autocast."""

    def __init__(self, t: Tracer) -> None:
        super().__init__()
        self.t = t

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.t.look_at_autocast()
        special = _DATA.get(func)
        if special is not None:
            args, kwargs = special(self.t, args, kwargs)
        if func is Tensor.new_tensor:
            return torch.tensor(*args, **kwargs)
        if (composite := composite_of(self.t, func)) is not None:
            return composite(*args, **kwargs)
        opened = _opened(func)
        if opened is not None:
            with self:
                return opened(*args, **kwargs)
        return func(*args, **kwargs)


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


# Of a function that is one of two others, which an argument chooses: F.max_pool2d. Such functions
# elsewhere, torch.unique for one, hand themselves over by the same name once more.
_CHOICE = torch.nn.functional.max_pool2d.__code__


@functools.cache
def _opened(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch without its first step: to hand itself over whole to a mode."""
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch."):
        return None
    if hasattr(Tensor.__base__, func.__name__) and getattr(Tensor, func.__name__, None) is func:
        return None  # the method in C that it ends with would come here by the same name
    names = getattr(func.__globals__, "home", func.__globals__)  # of a Space, what it is of
    found = {
        name: lambda *_: False
        for name in _CHECKS
        if name in func.__code__.co_names and name in names
    }
    cells = func.__closure__ or ()
    is_choice = func.__code__ is _CHOICE and func.__module__ == torch.nn.functional.__name__
    if not found and is_choice:
        cells = tuple(types.CellType(_opened(x) or x) for x in (y.cell_contents for y in cells))
    elif not found:
        return None
    space = Space({**names, **found})
    copy = types.FunctionType(func.__code__, space, func.__name__, func.__defaults__, cells)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_NOTHING = contextlib.nullcontext()
# What runs Python code when it is called: only that may look at a tensor's device.
_PYTHON = (types.FunctionType, torch.nn.Module)


# ------------------------------------------------------------------------------ inner graphs

# Position of the inner graph and of its first argument, per higher-order operator.
_INLINE = {
    "wrap": (0, 1),
    "tag_activation_checkpoint": (0, 1),
    "wrap_activation_checkpoint": (0, 1),
    "wrap_with_set_grad_enabled": (1, 2),
    "invoke_subgraph": (0, 2),
    "autograd_function_apply": (0, 2),
}


def inline(t: Tracer, op: Any, args: Any, kwargs: Any, attribute: Any) -> Any:
    name = op.name()
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache, inner, *rest = args
        with torch.autocast(device, dtype, enabled, cache):
            return run_inner(t, inner, rest, attribute)
    if name in ("strict_mode", "hints_wrapper"):
        return run_inner(t, args[0], list(args[1]), attribute)
    if name == "associative_scan":
        function, xs, more = args
        shows = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
        combine = None
        if not more and not shows and isinstance(function, fx.GraphModule):
            combine = combine_of(function.forward, [x.dtype for x in xs], xs[0].dim())
        if combine is None:
            raise t.b.unsupported("an associative_scan that is differentiated, or not of elements")
        return t.call(SCAN, [*xs], combine.text)  # whose argument is the function, as text
    if name in RUNS:
        if t.b.twins.env is not None:
            raise t.b.unsupported(f"{name} with sizes that only data knows")
        made, given = control_flow(t, op, args, _shapes)
        with active(t):
            return tuple(made([*map(as_tensor, given)]))
    if name == "flex_attention":
        run, kind = sys.modules[type(op).__module__].sdpa_dense, t.device.type
        lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        def flex_attention(*given: Any) -> Any:
            """What eager runs: autocast has operands cast, and nothing within."""
            if lower is not None:
                qkv = (x if x.dtype == torch.float64 else x.to(lower) for x in given[:3])
                given = *qkv, *given[3:]
            with torch.autocast(kind, enabled=False):
                t.look_at_autocast()
                return run(*given)

        return _called(t, flex_attention, flex_attention, args, kwargs)
    if name not in _INLINE:
        raise t.b.unsupported(f"the higher-order operator {name} has no form in ATen operators")
    at, first = _INLINE[name]
    out = run_inner(t, args[at], list(args[first:]), attribute)
    return out[0] if name == "autograd_function_apply" else out


def _shapes(gm: fx.GraphModule, *given: Any) -> list[Tensor]:
    """What a graph gives for operands like these, which are fakes: tensors without data."""
    tracer, inputs = start(gm, given, keep_core, None, kind=Tracer)
    with_grad = takes_gradients(gm.graph)
    with below_autograd(), switches_restored(), torch.set_grad_enabled(with_grad):
        return [*run_nodes(tracer, gm, gm.graph, inputs.given, inputs.attribute)]


def run_inner(t: Tracer, inner: Any, inputs: list[Any], attribute: Any) -> Any:
    if not isinstance(inner, fx.GraphModule):
        raise t.b.unsupported("a higher-order operator on something that is not a graph")
    return run_nodes(t, inner, inner.graph, inputs, attribute)


# ---------------------------------------------------------------------------- trace


_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def trace(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    keep: Callable[[OpOverload], bool] = keep_core,
    decompositions: Table | None = None,
) -> AtenGraph:
    """The functional ATen graph of `gm` called with inputs like these.

    Inputs that are written to may overlap others: who calls looks at each call.

    keep             operators that must stay as they are; views never do
    decompositions   come before torch's own
    raises           TraceError if there is no such graph; MissingFake for a custom operator
                     that doesn't say what it returns
    """
    tracer, inputs = start(gm, example_inputs, keep, decompositions, kind=Tracer)
    ambient = any(map(torch.is_autocast_enabled, CASTS))
    with_grad = takes_gradients(gm.graph)
    with below_autograd(), switches_restored(), torch.set_grad_enabled(with_grad):
        returned = run_nodes(tracer, gm, gm.graph, inputs.given, inputs.attribute)
        results = Results(inputs, returned)
    return results.graph(results.mutations, ambient)


T = TypeVar("T", bound=Tracer)


def _takes_at_a_mask(node: fx.Node) -> bool:
    """Whether the gradient of a call is what is found where a mask is true."""
    name = str(getattr(node.target, "__name__", node.target))
    if name.partition(".")[0].strip("_") not in ("setitem", "index_put"):
        return False
    vals = [x.meta.get("example_value") for x in node.all_input_nodes]
    masks = any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in vals[1:])
    return masks and isinstance(vals[-1], Tensor) and vals[-1].requires_grad


# Modules whose functions are torch's, ours, or no Python: those of a library's operators are none.
_KNOWN = re.compile(r"(torch(?!\._ops)|torch\._ops\.(aten|prims?)|fusee|builtins|_operator|None)\b")


def may_ask(module: torch.nn.Module) -> bool:
    """Whether it runs Python of a library or of the program, which may ask for a device."""
    calls: list[Any] = [type(module)]
    if isinstance(module, fx.GraphModule):
        calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return not all(_KNOWN.match(str(getattr(call, "__module__", None))) for call in calls)


def start(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    keep: Callable[[OpOverload], bool],
    decompositions: Table | None,
    *,
    kind: type[T],
    prepare: Prepare | None = None,
    with_devices: bool = False,
) -> tuple[T, Inputs]:
    """A tracer with an empty graph, and the inputs to run `gm` with.

    kind          the class of the tracer
    with_devices  the twins must say on which device they are
    """
    # The inputs, and what torch.compile noted for their placeholders: sizes may be symbolic
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = symbolic_mode(
        [*example_inputs, *(node.meta.get("example_value") for node in placeholders)]
    )
    to_size = TorchSymbols()
    # that of sizes which only data knows
    found, is_needed = ShapeEnv(), any(map(_takes_at_a_mask, gm.graph.nodes))
    found.is_over = True
    for n in open_numbers(gm.graph.nodes):
        if isinstance(n.node, SizeNode):
            found = n.node.env
            is_needed = is_needed or bool(found.data.of(n.node.size))
    env = found if is_needed else None
    if env is not None:
        mode = mode or fake_mode()
        mode.cache_enabled = False  # whose keys know torch's own symbols alone
    devices = {x.device for x in example_inputs if isinstance(x, Tensor)}
    asking = with_devices or (any(map(may_ask, gm.modules())) and all(map(is_there, devices)))
    twins = Twins(mode or (fake_mode() if asking else None), env)
    b = Builder(twins, None if mode is None else to_size)
    inputs = Inputs(b, gm, example_inputs, to_size, prepare)
    tracer = kind(
        b, functools.partial(_policy, keep, decompositions), opaque_rule, inputs.lift, inputs.device
    )
    return tracer, inputs


def _policy(keep: Callable[[OpOverload], bool] | None, table: Table | None, op: OpOverload) -> Rule:
    """
    keep   None: an operator on complex tensors, or on real ones that are negated lazily. It stays
           whole, for ATen: what is above the tracer resolves such tensors where eager does
    """
    if (rule := ALWAYS.get(op) or write_rule(op)) is not None:
        return rule
    if not _NEEDS_VALUES.isdisjoint(op.tags):
        return _read_sizes
    shares = any(r.alias_info is not None for r in op._schema.returns)
    if keep and (keep(op) or (may_raise(op) and not is_composite(op))) and not shares:
        return Tracer.record
    if op in CANONICAL:
        return CANONICAL[op]
    if table is not None and op in table:
        return _decompose(table[op])
    if is_composite(op):
        return Tracer.composite
    if keep and op_name(op).startswith("aten::_foreach_") and is_explicit(op):
        return Tracer.explicit
    function = decomposition(op) if keep else None
    if function is None and shares:
        return _refuse_view
    return Tracer.record if function is None else _decompose(function)


opaque_rule = functools.cache(functools.partial(_policy, None, None))


def _read_sizes(t: Tracer, op: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("output_size") is not None:  # of repeat_interleave: the program says it
        return t.record(op, *args, **kwargs)
    if t.b.twins.env is None or not (op in UNBACKED or is_composite(op)):
        raise t.b.unsupported(f"what {op} returns depends on the values of tensors")
    if op is not torch.ops.aten.nonzero.default:
        return (t.record if op in UNBACKED else t.composite)(op, *args, **kwargs)
    # once for all that ask it of a tensor: nobody would know that its sizes are equal
    x = t.node(args[0])
    key = key_of((x.target, x.args, x.kwargs)) if is_pure(x) else x
    if (known := t.b.places_in.get(key)) is None:
        found = t.record(op, *args)
        t.b.places_in[key] = t.node(found)
        return found
    found = t.run_meta(torch.ops.aten.clone.default, (known.meta["val"],), {})
    t.adopt(found, known, None, t.device_of(args))
    return found


def _refuse_view(t: Tracer, op: OpOverload, /, *_: Any, **__: Any) -> Any:
    raise t.b.unsupported(f"{op} gives a view of a kind that tracing does not know")


def _decompose(function: Callable[..., Any]) -> Rule:
    function = moved(function)
    return in_torchs_words(lambda t, *args, **kwargs: function(*args, **kwargs))
