"""What ends a piece of a program that is captured as one graph: errors for it, and writes."""

from __future__ import annotations

import re
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from fusee.capture.torch_api import (
    OpOverload,
    OpOverloadPacket,
    State,
    history,
    is_of_hooks,
    no_torch_function,
)
from fusee.errors import FuseeError, RegionError
from fusee.fake import associative_scan as associative_scan
from fusee.fake import combine_of as combine_of
from fusee.fake.gradients import goes_beside
from fusee.fake.layouts import extent, is_dense
from fusee.fake.torch_python import NotDeterministic, is_pointwise, overloads_of
from fusee.source import Args, Kwargs, tensors_in

# ---------------------------------------------------------------------------- breaks

VALUE = "needs the value of a tensor, which is known only when the graph has run"
KEEP_ON_DEVICE = "compute on tensors (torch.where, masks) instead, or move the line out"


class GraphBreak(BaseException):
    """Here the graph must end: no `except` of the program that is traced may catch it.

    reason   one sentence: what could not become part of the graph, and why
    remedy   what the user can do about it
    where    the user's line, `file.py:41 in step`, once it is known
    raises   whether Python is to raise an error of the program's there
    once     whether the next call need not end there: Python has filled a cache
    is_error what error_on_graph_break said there; None if nothing was said
    memory   the node that made the memory which the call there sees, beyond its tensor's elements
    within   where captures of the functions that are called there by themselves will end; see Ends
    """

    def __init__(
        self,
        reason: str,
        remedy: str = "",
        where: str = "",
        *,
        raises: bool = False,
        once: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.where = where
        self.raises, self.once = raises, once
        self.is_error: bool | None = None
        self.memory = ""
        self.within: Ends = ()


# What breaks deep within functions is met when the outermost is captured. Those further in, which
# are captured by themselves in the instruction that Python runs then, would run up to there again.

# Functions within one another, outermost first, and the number of the instruction before which a
# piece that begins with each of them ends.
Ends = tuple[tuple[types.CodeType, int], ...]


class _Expected(threading.local):
    ends: Ends = ()
    stop: GraphBreak | None = None


_expected = _Expected()


def expecting(stop: GraphBreak | None, run: Callable[[], bool]) -> Callable[[], bool]:
    """The first time, captures that begin in `run` know from a break where they will end."""
    if stop is None or not stop.within:
        return run

    def informed() -> bool:
        _expected.ends, _expected.stop, stop.within = stop.within, stop, ()
        try:
            return run()
        finally:
            _expected.ends = ()

    return informed


def expected(code: types.CodeType | None) -> tuple[int, GraphBreak | None]:
    """Where a piece that begins with a function will end, and why; -1: nobody knows.

    It is not relied on: if a piece breaks earlier, or returns, so it does.
    """
    ends, stop, _expected.ends = _expected.ends, _expected.stop, ()
    while ends and ends[0][0] is not code:
        ends = ends[1:]
    if not ends or stop is None or stop.raises or stop.memory or stop.is_error is not None:
        return -1, None
    found = GraphBreak(stop.reason, stop.remedy, stop.where)
    found.within = ends[1:]
    return ends[0][1], found


class Forbidden(GraphBreak):
    """What a compiled function must not do at all: an error, not the end of a graph."""

    kind: Callable[..., FuseeError] = RegionError


class Lost(BaseException):
    """Here no graph can end, and `reason` says why: a value that is alive cannot be made again.
    No `except` of the program that is traced may catch it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unready(BaseException):
    """Python runs this call as a whole: what it does, the next one will not do again."""


class Anew(BaseException):
    """The capture begins anew, and knows better.

    how   "unchecked": a graph that checks what branches rely on changes its inputs, so it can't run
          again; "parted": one that changes its inputs may raise where the program handles it
          (both behind a change, if the backend tells which came first);
          "between": a backward pass in the graph has used up a part of what its results come from;
          "lent": the program can tell what it was given from what a function with a cache keeps;
          "mixed": what it does shows that only a part of its calls is in inference mode;
          "address": it can tell that what it has made before the graph is made again behind it
    """

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


@dataclass(frozen=True, eq=False)
class Breaking:
    """What ends the graph in place of a function."""

    reason: str
    remedy: str = ""

    def met(self) -> GraphBreak:
        return GraphBreak(self.reason, self.remedy)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.met()


class Opaque(Breaking):
    """Stands for a value from outside of a kind that no graph takes, until something needs it."""


# ---------------------------------------------------------------------------- failures
# Errors that a graph raises while it runs: an index out of range, say.
#
# The graph comes before all that its piece does in Python, so as long as it has changed nothing the
# piece can run again, by Python. There the error comes from the user's own line, reaches the
# handlers of the program, and finds done what the program does before it.


class GraphFailed(BaseException):
    """A graph raised as the program would, and everything is as it was before."""


States = Sequence[tuple[torch.Generator, torch.Tensor]]


# How the random generators stand that a graph may use. Kept captures name these.
def cpu_state() -> States:
    return [(torch.default_generator, torch.default_generator.get_state())]


def cuda_states() -> States:
    return [*cpu_state(), *((one, one.get_state()) for one in torch.cuda.default_generators)]


def is_spent(x: torch.Tensor, passed: Sequence[Any]) -> bool:
    """Whether a backward pass from `x` would meet what those in the graph have used up.

    raises   Anew if one could go on beside that: then the first is none of the graph's;
             Lost if autograd refuses to tell
    """
    if not passed:
        return False
    with no_torch_function():
        try:
            below = {*history(x)} if x.requires_grad and not x.is_leaf else set()
        except RuntimeError:
            raise Lost("a view, made without gradients, of what was written to with them") from None
        if not below:
            return False
        # a tensor is there in the place of nodes that save nothing
        used_up = {one for one in passed if not isinstance(one, Tensor)}
        try:
            goes_on = below.isdisjoint(used_up) or goes_beside(x, used_up)
        except RuntimeError:  # what is saved was written to, and a pass will say so
            goes_on = True
    if goes_on:
        raise Anew("between")
    return True


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


@dataclass(frozen=True, eq=False)
class Failing:
    """What takes an error of a graph. It raises GraphFailed once all is as before the graph.

    eagerly   the graph, which torch can run; where it does not raise, the error is the backend's
              own. None for what follows the graph
    state     that of torch when the piece begins, if it changes that
    changes   the names of its nodes that change its inputs: then its own error is raised, with a
              note, unless it shows that it has changed nothing yet
    draws     whether it draws random numbers; its inputs are unchanged, or the generators' states
              from before it are there
    """

    eagerly: fx.GraphModule | None
    state: State | None
    changes: tuple[str, ...] = ()
    draws: bool = False

    def __call__(
        self, error: Exception, inputs: Sequence[Any] = (), generators: States = ()
    ) -> None:
        self._restore(generators)
        if isinstance(error, FuseeError) or is_of_hooks(error):
            raise error
        if self.changes and (generators or not self.draws) and self._has_changed_nothing(error):
            raise GraphFailed from None
        if self.changes:
            error.add_note(
                "fusee: raised by a graph that changes its inputs. Handlers and effects of the"
                " compiled function around it were left out"
            )
            raise error
        if self.eagerly is None:
            raise GraphFailed from None
        try:
            self.eagerly.forward(*inputs)
        except Exception:  # noqa: BLE001  # whatever it is, Python will raise it
            raise GraphFailed from None
        finally:
            self._restore(generators)
        raise error

    def _has_changed_nothing(self, error: Any) -> bool:
        """Whether it was raised before the first write to an input."""
        if self.eagerly is None:
            return False
        forward: Any = self.eagerly.forward
        for frame, line in traceback.walk_tb(error.__traceback__):
            if "parts" in frame.f_locals:  # of a graph, one of which may have written
                return False
            if "first_write" in frame.f_globals:  # a host function of ours
                return bool(line < frame.f_globals["first_write"])
            if frame.f_code is forward.__code__:  # what has run has a variable
                names = [node.name for node in self.eagerly.graph.nodes]
                raised = next(k for k, name in enumerate(names) if name not in frame.f_locals)
                begun = raised if _OVERLAP in str(error) else raised + 1
                return names[raised] != "output" and not {*self.changes} & {*names[:begun]}
        return False

    def _restore(self, generators: States) -> None:
        for function, args, kwargs in State.now().switches(self.state) if self.state else ():
            function(*args, **kwargs)
        for generator, before in generators:
            generator.set_state(before)


# ---------------------------------------------------------------------------- unknown
# Torch calls whose results nobody knows before they have run: they end the graph.
#
# Adapter of what FakeTensors raise, torch._subclasses and its texts. Tested with torch 2.13.

# Whose operators are not the user's to complete.
_TORCHS = tuple("aten prim prims quantized mkldnn torchvision".split())


_OVERLAP = "memory location"  # ATen refuses such writes before they begin


def ended_by(error: Exception, function: Any, name: str) -> GraphBreak | None:
    """What a call on FakeTensors ends the graph with; None if eager may raise the same error."""
    text = str(error)  # of a kernel in C++ that looked for values; of the indices in a mask
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or re.search(
        "data is not allocated yet|Cannot access data p|data-independent impl", text
    ):
        return GraphBreak(f"{getattr(error, 'func', None) or name} {VALUE}", KEEP_ON_DEVICE)
    if isinstance(error, NotDeterministic):
        return GraphBreak(f"{error.func} has another algorithm, or none, that is deterministic")
    if isinstance(error, UnsupportedOperatorException):  # nobody knows results before it runs
        operator = op_of(error.func) or str(error.func)
    elif isinstance(error, NotImplementedError) or "no fake impl registered" in text:
        found = re.search(r"\w+::\w+", text)
        operator = found[0] if found else ""
    else:
        return None
    operator = op_of(function) or operator or name
    remedy = ""
    if "::" in operator and operator.partition("::")[0] not in _TORCHS:
        remedy = f"torch.library.register_fake({operator!r}) says what they look like"
    return GraphBreak(f"{operator} has no fake kernel that says what its results look like", remedy)


def op_of(function: Any) -> str | None:
    """`mylib::myop`, if a call is one of an operator."""
    if isinstance(function, OpOverload):
        return str(function._schema.name)
    return str(function._qualified_op_name) if isinstance(function, OpOverloadPacket) else None


# ---------------------------------------------------------------------------- writes
# Calls that write to tensors in a way that no graph has: the graph ends before them.
#
# They give a tensor another shape, other strides or more memory, or elements share memory.
#
# Compiled code writes to a tensor of the caller's as that was when the graph began. What eager
# resizes (`out=` of another size, `resize_`, `set_`) or turns (`t_`, `unsqueeze_`) runs in Python,
# with eager's warnings, unless the tensor is the graph's own and nothing can share its memory.


def is_in_place(name: str) -> bool:
    """Whether an operator with this name writes to its first operand."""
    return name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS


# Of the module `operator`: these write to their first operand.
CHANGING = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow ilshift irshift ixor iand ior".split()
)
# Functions of the module `operator` that would otherwise be words of Python.
_KEYWORDS = ("and_", "or_", "not_")

# These change the shape or the strides of a tensor, and not its memory.
TURN = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_".split())
# These change its memory, too.
_RESIZE = {"resize_", "resize_as_", "set_"}
# These see it beyond the tensor's elements.
_OF_MEMORY = {"resize_", "resize_as_", "untyped_storage", "storage"}


def refuse_new_geometry(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    is_input: Callable[[Tensor], bool],
    run: Callable[..., Any],
) -> None:
    """End the graph before a call on FakeTensors that changes more than the values of one.

    is_input  whether a tensor is there before the graph
    run       calls `func` on fakes, and writes nothing down
    raises    GraphBreak; what eager raises for these arguments
    """
    name = getattr(func, "__name__", "").partition(".")[0]
    is_operator = isinstance(func, (OpOverload, OpOverloadPacket))
    if is_operator and name in _RESIZE:
        raise GraphBreak(f"{name}() changes a tensor in a way no graph can express")
    if name in TURN and args and isinstance(args[0], Tensor) and is_input(args[0]):
        raise GraphBreak(
            f"{name}() changes the shape or strides of a tensor from outside the graph"
        )
    names = {"out"}
    if is_operator:
        every = (func,) if isinstance(func, OpOverload) else overloads_of(func)
        given = (x for overload in every for x in overload._schema.arguments)
        names = {x.name for x in given if x.kwarg_only and x.alias_info is not None}
    into = {key: x for key, x in kwargs.items() if key in names and x is not None}
    outs = tensors_in(into)
    with no_torch_function():
        kept = [x for x in outs if is_input(x) or x.untyped_storage().nbytes()]
        if not kept:
            return
        # meta kernels resize: so they get others to try
        likes = pytree.tree_map_only(
            Tensor,
            lambda x: x.new_empty_strided(x.shape, x.stride()).requires_grad_(x.requires_grad),
            into,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(func, args, {**kwargs, **likes})
        for x, like in zip(outs, pytree.tree_leaves(likes), strict=True):
            if like.shape != x.shape and any(x is one for one in kept):
                raise GraphBreak(
                    f"out= is resized from {list(x.shape)} to {list(like.shape)}",
                    "give it a tensor of the result's shape",
                )
            if like.requires_grad != x.requires_grad:  # a factory's result begins without
                raise GraphBreak(f"{name}(out=) ends that a tensor requires gradients")


def storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory behind the tensors that nodes give."""
    tensors = [node.meta.get("example_value") for node in nodes]
    return {at for x in tensors if isinstance(x, torch.Tensor) for at in memory_of(x)}


def memory_of(x: Tensor) -> set[int]:
    """Where the elements of a tensor lie; a sparse one has them in tensors of its own."""
    parts = [x]
    if x.layout is torch.sparse_coo:
        parts = [x._indices(), x._values()]
    elif x.layout is not torch.strided:
        parts = [x.values()]
    return {part.untyped_storage()._cdata for part in parts}


def seen_memory(graph: fx.Graph, name: str, fake: Tensor) -> str:
    """The node that made what a method sees of a tensor beyond its elements; empty if none did."""
    if name not in _OF_MEMORY:
        return ""
    with no_torch_function():
        made = next(node for node in graph.nodes if memory_of(fake) & storages([node]))
    return "" if made.op == "placeholder" else made.name


def is_write(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call writes to an operand."""
    is_operator = name.strip("_") in CHANGING
    return kwargs.get("out") is not None or bool(args and (is_operator or is_in_place(name)))


def settle_overlaps(name: str, args: Any, kwargs: Any) -> None:
    """Guard that a write goes over what it reads, or over itself, in later calls as in this one:
    FakeTensors do not look, and the graph is made for the sizes and strides of this call. Of an
    operand that is `out=` too they take over what a copy's strides would be: the graph ends."""
    targets = tensors_in(args[0] if kwargs.get("out") is None else kwargs["out"])
    if kwargs.get("out") is not None:
        read = set[int]().union(*map(memory_of, tensors_in(args)))
        written = set[int]().union(*map(memory_of, targets))
        packet = getattr(torch.ops.aten, name, None)
        if read & written and not any(map(is_pointwise, overloads_of(packet))):
            raise GraphBreak(f"{name} writes to what it reads, by out=", "clone() first")
    for x in (x for x in targets if x.layout is torch.strided):
        bool(x.numel() > extent(x.shape, x.stride()))
        for y in tensors_in((args, kwargs)):
            if y.layout is torch.strided and memory_of(y) == memory_of(x) and y is not x:
                begin, other = x.storage_offset(), y.storage_offset()
                if is_dense(x) and is_dense(y):
                    bool(begin < other + y.numel() and other < begin + x.numel())


def is_scale(tensors: Any, other: Any) -> bool:
    """Whether a tensor stands for a number that leaves tensors their dtypes, without a gradient."""
    if not isinstance(other, torch.Tensor) or not isinstance(tensors, (list, tuple)):
        return False
    if torch.is_grad_enabled() and other.requires_grad:
        return False
    with no_torch_function():
        return not other.dim() and all(
            x.is_floating_point() and torch.result_type(x, other) is x.dtype for x in tensors
        )
