"""The graph that a capture writes: each torch call on FakeTensors becomes an fx node.

The recorder is a torch function mode, so that it sees the calls of torch's C code and of functions
that are not interpreted as well. A torch function in Python that offers itself to modes
(layer_norm, multi_head_attention_forward) arrives whole, as backends of torch.compile expect.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from fusee.capture.dynamic import (
    Number,
    argument,
    holds_number,
    meets_integers,
    need_values,
    of_new,
    printable,
    read,
    run_with_numbers,
    shown,
    takes_numbers,
)
from fusee.capture.effects import (
    BODY,
    Repeated,
    decided,
    effects,
    has_effect,
    is_mutable,
    written_by,
)
from fusee.capture.graph_break import (
    KEEP_ON_DEVICE,
    TURN,
    VALUE,
    Anew,
    GraphBreak,
    Lost,
    ended_by,
    is_scale,
    is_write,
    memory_of,
    refuse_new_geometry,
    seen_memory,
    settle_overlaps,
    storages,
)
from fusee.capture.mirrors import Later
from fusee.capture.sources import StrideOf
from fusee.capture.symbols import is_open, sizes_in
from fusee.capture.torch_api import (
    STATE_SWITCHES,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    State,
    graph_module,
    holds_tensor,
    is_method,
    is_the_programs,
    no_torch_function,
    set_grad_enabled,
)
from fusee.errors import stack_trace
from fusee.fake import is_symbolic, is_there
from fusee.fake.open_composites import LONGER, SHORTER, of_place
from fusee.fake.torch_python import moved, python_dispatcher
from fusee.source import Args, Kwargs, NodeGraph, tensors_in
from fusee.sym.shape_env import wrapped

# ---------------------------------------------------------------------------- record


# Methods of tensors that leave the world of tensors.
_VALUES = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__"
    " __contains__ is_nonzero equal allclose __dlpack__ data_ptr const_data_ptr"
    " untyped_storage storage storage_type is_set_to _is_view __repr__ __format__"
    " __reduce_ex__ apply_ map_ map2_ is_shared is_pinned".split()
)
# Of them, those that raise for any number of elements but one.
_OF_ONE = frozenset("item __bool__ __int__ __float__ __index__ __complex__ is_nonzero".split())

# Methods that change what a tensor is, or what happens in a backward pass.
_STATEFUL = frozenset(
    "register_hook register_post_accumulate_grad_hook retain_grad set_ resize_ resize_as_"
    " share_memory_ detach_ _set_data rename_ as_subclass __deepcopy__"
    " swap_tensors".split()
)

# These end the graph wherever they are called: why, and what to do.
_ENDING = {
    "is_inference": ("whether a tensor is one of inference mode shows only after the graph",),
    "pin_memory": ("a tensor in memory that is pinned for GPUs",),
    "backward": ("backward() runs autograd, between two graphs", ""),
}

# Their weights are parts of one buffer of cuDNN's where gradients are asked for.
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())

# A model of 100 layers has about 5,000.
_MOST_CALLS = 50_000

# What tells of the elements that a sparse tensor holds: stand-ins hold none.
_OF_ELEMENTS = frozenset(
    "_nnz indices values _indices _values is_coalesced coalesce crow_indices col_indices"
    " ccol_indices row_indices".split()
)

# Attributes that stand-ins have otherwise.
_LEFT_TO_EAGER = {
    "grad": "a tensor's grad is the result of a backward pass",
    "retains_grad": "whether a tensor keeps its grad is said outside of graphs",
    "grad_dtype": "the dtype of a tensor's grad is said outside of graphs",
    "_base": "of what a tensor is a view shows only outside the graph",
    "_backward_hooks": "a tensor's hooks are Python's",
    "_cdata": "the address of a tensor",
    "_version": "how often a tensor was written to shows only outside the graph",
}

# Attributes that are tensors themselves.
_TENSOR_ATTRIBUTES = frozenset("T mT H mH real imag data".split())

# How a method of tensors is written as an operator.
_OPERATORS: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in (
        "getitem setitem add sub mul truediv floordiv mod pow matmul neg pos abs invert lshift"
        " rshift xor and or eq ne lt le gt ge iadd isub imul itruediv ifloordiv imod ilshift"
        " irshift ixor iand ior"
    ).split()
}


def _makes_leaf(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether what requires grad begins at a call; asarray() keeps a history that there is."""
    given = kwargs.get("obj", *args) if func is torch.asarray else None
    return not getattr(given, "requires_grad", False)


class Recorder(TorchFunctionMode):
    """Writes the graph of one capture.

    world    what lies outside of the capture, and its machine
    mode     the FakeTensorMode of the capture; symbols: its sizes that vary
    given    by id, what is known of stand-ins for tensors from outside
    """

    def __init__(self, world: Any) -> None:
        super().__init__()
        self.world, self.mode, self.symbols = world, world.mode, world.symbols
        self.given: dict[int, Any] = world.inputs
        self.graph = NodeGraph()
        self.results = Repeated()
        self.nodes: dict[int, fx.Node] = {}
        self.bodies = torch.nn.Module()  # of functions that nodes call
        self._keep: list[Any] = []
        self._parts = 0
        self._inputs: dict[int, fx.Node] = {}
        self._of_memory: dict[int, torch.Tensor] = {}  # by storage, the first input in it
        self._input_names: dict[str, int] = {}  # and the last number behind each
        self._main, self._last_inputs = self.graph, dict[fx.Graph, fx.Node]()
        self.calls = 0
        self.inference: bool | None = None  # whether its calls are in inference mode
        self.mixes = not torch.is_inference_mode_enabled()  # whether only some of them may be
        self.is_mixed = self.shows_mode = False  # whether some are; and show it, see `_is_odd`
        self.odd: set[int] = set()  # views of ordinary tensors that those have made
        self.has_numbers = False
        self.reads_numbers = False  # whether integers that tensors hold may be in the graph
        self.sizes: dict[Any, Any] = {}  # by symbol, what stands for it
        self.asked: dict[int, Any] = {}  # by id: sizes, as far as they were known before the call
        self.read: dict[int, tuple[torch.Tensor, Any]] = {}  # by id: tensors, what they hold now
        self.answers: list[tuple[Any, ...]] = []  # of functions that got no tensor and gave none
        self.raised: BaseException | None = None  # by a call, in the words of FakeTensors
        self.raised_by = ""
        self.by_index = False  # whether `x[i]` with numbers in tensors is a lookup, no view
        self.off = 0  # how often subclasses are told to let calls pass
        self.begins_off: bool | None = None  # whether once from the start; None: modes hear them
        self.seen: dict[int, Any] = {}  # their instances, by id
        # by id, tensors of the program's where autograd begins; False: views without gradients
        self.leaves: dict[int, bool] = {}
        # a call that raises where the program hears it, and one that writes to inputs
        self.is_handled = self.is_changing = False
        self.tells_writes = False  # whether such a call may come before one that writes to inputs
        self.heard: list[Any] = []  # what calls were given that the program hears of, and write
        self.said: list[Later] = []  # warnings of torch's own code
        self.is_parted = False  # whether the graph may not have both so
        self.turned: list[tuple[Any, ...]] = []  # inputs given another shape, and how
        self.renewed: dict[int, int] = {}  # of inputs given other data, by id, the version then
        self.told: list[Any] = []  # where inputs lie whose numbers the program has asked for
        self.unsaved = ""  # why autograd must not save some input
        self.replaced = {x for x in vars(torch.Tensor).values() if is_the_programs(x)}

    def begins(self, anew: set[str], results: Repeated) -> None:
        """See to it that what earlier attempts failed of is not done, nor computed once more."""
        self.is_parted, self.results = "parted" in anew, results
        self.mixes &= "mixed" not in anew

    # ---------------------------------------------------------------------- inputs

    def add_input(self, fake: torch.Tensor, words: str) -> None:
        """A placeholder for a tensor from outside, named after where it came from."""
        stem = name = re.sub(r"\W+", "_", words).strip("_") or "x"
        count = self._input_names.get(stem, 0)
        if isinstance(fake, torch.Tensor) and re.fullmatch(r"[su]\d+", stem):
            stem = name = f"x_{stem}"  # sizes have such names
        while name in self._input_names or name[0].isdigit():
            count += 1
            name = f"{'x' if stem[0].isdigit() else ''}{stem}_{count}"
        self._input_names[stem] = count
        self._input_names.setdefault(name, 0)
        self._placeholder(self._main, name, fake)
        self._inputs[id(fake)] = self.nodes[id(fake)]
        if isinstance(fake, torch.Tensor):
            with no_torch_function():
                self._of_memory.setdefault(fake.untyped_storage()._cdata, fake)

    def _placeholder(self, graph: fx.Graph, name: str, fake: torch.Tensor) -> None:
        last = self._last_inputs.get(graph)
        with graph.inserting_before() if last is None else graph.inserting_after(last):
            node = self._last_inputs[graph] = graph.placeholder(name)
        node.meta["example_value"] = fake
        self.adopt(fake, node)

    def adopt(self, fake: torch.Tensor, node: fx.Node) -> None:
        device = getattr(fake, "fake_device", None)  # a size has none
        if device is not None and not is_there(device):
            raise GraphBreak(f"torch is built without {device.type}")
        self.nodes[id(fake)] = node
        self._keep.append(fake)

    def rebind(self, fake: torch.Tensor, before: torch.Tensor, data: torch.Tensor) -> None:
        """A tensor has the memory of `data` from here on; what it was until now is `before`."""
        self.read.pop(id(fake), None)
        node = self.nodes[id(fake)]
        node.meta["example_value"] = before
        self.adopt(before, node)
        if self._inputs.pop(id(fake), None) is not None:
            self._inputs[id(before)] = node
            self.given[id(before)] = self.given[id(fake)]
        self.nodes[id(fake)] = self.nodes[id(data)]

    def item(
        self, fake: torch.Tensor, origins: frozenset[str] = frozenset(), kind: type = float
    ) -> Number:
        """The number in a tensor, which the graph reads."""
        self.has_numbers = True
        node = self.graph.call_method("item", (self.node(fake),))
        return Number(lambda: node, origins, kind)

    @property
    def is_main(self) -> bool:
        """Whether calls go into the graph itself, not into the body of one of its nodes."""
        return self.graph is self._main

    # ---------------------------------------------------------------------- calls

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.new and not kwargs:
            func, args = of_new(*args)
        return self.world.machine.dispatch(func, types, args, kwargs)

    def call(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run `func` on fakes and write it down."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return self._attribute(func, name, args)
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            name = ""
        if self.replaced and isinstance(func, types.FunctionType) and func in self.replaced:
            raise GraphBreak(f"a method of torch.Tensor is replaced by {func.__qualname__}")
        if name in _VALUES:
            if (found := read(self, name, args)) is not None:
                return found
            raise self.ending(name, args[0], f"{name.strip('_')}() {VALUE}", KEEP_ON_DEVICE)
        if name in _OF_ELEMENTS and args and args[0].layout is not torch.strided:
            raise self.ending(name, args[0], f"{name}() {VALUE}", "call to_dense()")
        is_known = takes_numbers(name.replace("_foreach_", ""))
        for key in {"value", "alpha"} & {*kwargs} if is_known and kwargs else ():
            if isinstance(scale := kwargs[key], FakeTensor):  # torch takes a number out of it
                kind = float if scale.is_floating_point() else int
                kwargs = {**kwargs, key: self.item(self._lifted(scale), kind=kind)}
        if self.has_numbers and holds_number((*args, *kwargs.values())):
            # ATen refuses a number that does not fit into integers
            is_put = name == "setitem" and not args[0].is_floating_point()
            if not is_known or is_put or meets_integers(*args, *kwargs.values()):
                need_values(*args, *kwargs.values())
        if why := _ENDING.get("pin_memory" if kwargs.get("pin_memory") else name):
            raise GraphBreak(*why)
        if name == "storage_offset":
            return self.offset(args[0])
        if name == "requires_grad_":
            return self.begin_at(*args, **kwargs)
        if kwargs.get("requires_grad") is True and _makes_leaf(func, args, kwargs):
            return self.begin_at(self.call(func, *args, **{**kwargs, "requires_grad": False}))
        if name in _STATEFUL:
            raise self.ending(name, args[0], f"{name}() changes a tensor as no graph can express")
        args, kwargs = self._lifted(args), self._lifted(kwargs)
        if self.by_index and func is operator.getitem and holds_tensor(args[1:]):
            index = args[1] if isinstance(args[1], tuple) else args[1:]
            func, args = torch.ops.aten.index.Tensor, (args[0], list(index))
        if name in TURN and args and id(args[0]) in self.given and self.is_main:
            return self._turn(func, name, *args, **kwargs)
        if kwargs or name.endswith("_") or not name:
            refuse_new_geometry(func, args, kwargs, lambda x: id(x) in self._inputs, self.run)
        args, kwargs, out = run_with_numbers(self, func, args, kwargs, name)
        if name == "as_strided":
            self._refuse_beyond(args[0], out)
        if name in _RECURRENT and torch.is_grad_enabled():
            with no_torch_function():
                if any(x.is_cuda and x.requires_grad for x in tensors_in((args, kwargs))):
                    raise GraphBreak(f"{name}() on a GPU in training: cuDNN has its weights as one")
        if out is not None and not holds_tensor(out):
            if is_mutable(func):
                raise GraphBreak("an operator that writes to its operands and gives no tensor")
            if not holds_tensor((*args, *kwargs.values())):
                self.answers.append((func, args, kwargs, out))
            return out
        self.write(func, name, args, kwargs, out)
        if type(out) is FakeTensor:
            out.constant = None  # whose value torch would take for a size: the graph is to have it
        return out

    known = decided

    def _turn(self, func: Any, name: str, fake: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`x.unsqueeze_(0)` of an input: a view of it in the graph, after which it is turned."""
        if fake.requires_grad or self.seen:
            raise GraphBreak(f"{name}() turns a tensor from outside that autograd knows")
        with no_torch_function():
            before = fake.detach().requires_grad_(fake.requires_grad)
        self.adopt(before, self.nodes[id(fake)])
        view = self.call(getattr(torch.Tensor, name[:-1]), before, *args, **kwargs)
        self.run(func, (fake, *args), kwargs, name)
        self.rebind(fake, before, view)
        self.turned.append((fake, name, args, kwargs))
        self.unsaved = "autograd would save a tensor that is turned afterwards"
        return fake

    def run(self, func: Any, args: Any, kwargs: Any, name: str = "") -> Any:
        first = len(self.symbols.env.data.made)
        is_open = bool(self.symbols.origins or first) and is_symbolic((args, kwargs))
        is_foreach = name.startswith("_foreach_") and name.endswith("_")
        if is_foreach and not is_open and not torch.is_grad_enabled():
            # values change, and nothing else of hundreds of tensors
            return args[0] if args else kwargs["self"]
        if name.startswith("_foreach_") and len(args) > 1 and is_scale(*args[:2]):
            # to know the results' shapes; torch asks for its value
            args = (args[0], 1.0, *args[2:])
        try:
            self.asked = sizes_in((args, kwargs)) if first else {}
            kernels: Any = python_dispatcher() if is_open else contextlib.nullcontext()
            with no_torch_function():
                key = None if is_open or first else self.results.key(self.mode, func, args, kwargs)
                if key is not None and (known := self.results.again(self.mode, key)) is not None:
                    return known
            forms = LONGER if is_open else SHORTER
            form = (of_place(func, args) if is_open else None) or forms.get(func, func)
            func = moved(form)
            with (
                no_torch_function(), kernels, self.mode, self.symbols.within_torch(),
            ):  # fmt: skip
                if is_write(name, args, kwargs):
                    settle_overlaps(name, args, kwargs)
                    if self.world.machine.is_heard():
                        self.heard.append((*args, *kwargs.values()))
                given = [(x, x.shape, x.stride()) for x in tensors_in(kwargs.get("out"))]
                out = func(*shown(args), **shown(kwargs))
                for x, size, stride in given:  # which ATen keeps, and some meta kernels don't
                    if x.shape == size and x.stride() != stride:
                        x.as_strided_(size, stride, x.storage_offset())
                self.symbols.look(out, first)
            if key is not None and not (
                self.said or self.world.machine.is_told()
            ):  # a call that warns is run
                with no_torch_function():
                    self.results.note(self.mode, key, (args, *kwargs.values()), out)
        except GraphBreak:
            raise
        except Exception as error:
            unknown = ended_by(error, func, name)
            if unknown is not None:
                raise unknown from None
            self.raised, self.raised_by = error, name or str(func)
            raise
        if isinstance(out, torch.Tensor) and type(out) is not FakeTensor:
            raise GraphBreak(f"{name} makes a tensor that has data, or none anywhere")
        return out

    def _refuse_beyond(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """End the graph at a view of memory that may not be there, which FakeTensors let pass."""
        with no_torch_function(), self.symbols.within_torch():
            rows = zip(part.shape, part.stride())
            last = part.storage_offset() + sum((n - 1) * step for n, step in rows)
            if part.numel() and (last + 1) * x.element_size() > x.untyped_storage().nbytes():
                raise GraphBreak("as_strided() reaches beyond the memory that the graph knows of")

    def ending(
        self, name: str, fake: torch.Tensor, why: str, remedy: str = ""
    ) -> GraphBreak | Lost:
        """What it ends with: hooks of Python's miss what it has computed from a tensor."""
        node = self.nodes.get(id(fake)) if name in ("retain_grad", "register_hook") else None
        if node is not None and node.users and id(fake) not in self.given:
            return Lost(why)
        has_one = name not in _OF_ONE or is_symbolic(fake) or fake.numel() == 1
        found = GraphBreak(why, remedy, raises=not has_one)
        found.memory = seen_memory(self.graph, name, fake)
        return found

    def has_gradients(self, fake: torch.Tensor) -> bool:
        """Whether a tensor with this memory requires grad."""
        with no_torch_function():
            memory = memory_of(fake)
            known = (x for x in self._keep if isinstance(x, torch.Tensor) and x.requires_grad)
            return any(memory & memory_of(x) for x in known)

    def offset(self, fake: torch.Tensor) -> int | torch.SymInt:
        """Where a tensor begins in its memory, in elements: stand-ins of inputs begin at 0."""
        with no_torch_function():
            below = self._of_memory.get(fake.untyped_storage()._cdata)
            more = 0 if below is None else self.world.begins_at(below)
            return fake.storage_offset() + more

    def _attribute(self, func: Any, access: str, args: Args) -> Any:
        name = func.__self__.__name__
        if access != "__get__":
            raise GraphBreak(
                f"setting the attribute {name} of a tensor changes more than its values"
            )
        if name in _LEFT_TO_EAGER:
            raise GraphBreak(_LEFT_TO_EAGER[name])
        args = self._lifted(args)
        if name == "grad_fn" and (real := self.given.get(id(args[0]), (None,))[0]) is not None:
            with no_torch_function():
                if real._is_view():  # and eager gives it the one that a write to its base has left
                    raise GraphBreak("asking a view for its grad_fn makes it anew")
        if name == "nbytes":  # in C it takes known sizes alone
            return args[0].numel() * args[0].element_size()
        with no_torch_function(), self.mode:  # else torch imports torch.distributed
            try:
                out = args[0].device if name == "device" else func(*args)
            except RuntimeError as error:
                self.raised, self.raised_by = error, name
                raise
        if type(out) is FakeTensor and name in _TENSOR_ATTRIBUTES:
            self._finish(self.graph.call_function(getattr, (self.node(args[0]), name)), out)
        return out

    def begin_at(self, fake: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        """`requires_grad_()`: of a tensor that the program made, or as it is already."""
        with no_torch_function():
            real, _ = self.given.get(id(fake), (None, None))
            is_odd = real is not None and (real._is_view() or not real.is_leaf)
            if is_odd or fake.requires_grad != requires_grad:
                if not self.is_main or real is not None:
                    raise GraphBreak("requires_grad_() changes a tensor from outside")
                fake.requires_grad_(requires_grad)
                self.leaves[id(fake)] = True
        return fake

    def write(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if self.world.machine.is_told():
            raise GraphBreak("a torch call warns where the program records it")
        inference = torch.is_inference_mode_enabled()
        if self.inference is None:
            self.inference = inference
        elif self.inference is not inference:
            if not (self.mixes and self.is_main):
                raise GraphBreak("a graph is in inference mode as a whole, or not at all")
            self.inference, self.is_mixed = False, True
        given = functools.partial(self._argument, name, self.asked)
        self.symbols.check_sizes(self.world.machine.expects)
        nodes, named = fx.node.map_aggregate((args, kwargs), given)
        if "from" in named:  # a keyword of Python's, and the first argument after the tensor
            named = {**named}
            nodes = (*(nodes or (named.pop("self"),)), named.pop("from"))
        if isinstance(func, str) or not is_method(func):
            node = self.graph.call_function(func, nodes, named)
        elif name in _OPERATORS and not kwargs:
            node = self.graph.call_function(_OPERATORS[name], nodes)
        else:
            node = self.graph.call_method(name, nodes, named)
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise GraphBreak(
                f"the graph has grown to {_MOST_CALLS} calls: a loop is written out in it",
                "compile the body of the loop instead of the loop",
            )
        self._finish(node, out)
        if inference or self.odd:
            self.shows_mode |= self._is_odd(node, out, inference)
        if self.is_mixed and self.shows_mode:
            raise Anew("mixed")
        known = effects(node)
        if "writes" in known and self.read:
            self._forget_read(node)
        if known & {"raises", "writes"} and self.world.machine.is_heard():
            if "raises" in known or self._may_be_refused(node):
                node.meta["heard"] = self.is_handled = True
        if self.is_parted:
            self.is_changing |= bool(self.writers([node]))
            is_torn = "heard" in node.meta if self.tells_writes else self.is_handled
            if is_torn and self.is_changing:
                raise GraphBreak(
                    "a graph that changes its inputs would raise where the program handles it"
                )

    def _forget_read(self, node: fx.Node) -> None:
        """Forget what tensors held that a call may write to: all, where that is not plain."""
        is_plain = "anywhere" not in effects(node) and isinstance((*node.args, 0)[0], fx.Node)
        with no_torch_function():
            gone = storages(written_by(node))
            kept = [k for k, (x, _) in self.read.items() if is_plain and not memory_of(x) & gone]
        self.read = {k: self.read[k] for k in kept}

    def _is_odd(self, node: fx.Node, out: Any, inference: bool) -> bool:
        """Whether a call in inference mode does what one without gradients does not: it computes
        with gradients on, or writes to an ordinary tensor; or a call elsewhere takes a view with
        gradients that such a one has made."""
        with no_torch_function():
            if not inference:
                given = tensors_in([x.meta.get("example_value") for x in node.all_input_nodes])
                return any(id(x) in self.odd and x.requires_grad for x in given)
            views = [x for x in tensors_in(out) if not x.is_inference()]
            self.odd |= {id(x) for x in views if self.nodes[id(x)] in (node, *node.users)}
            written = [x.meta.get("example_value") for x in written_by(node)]
            is_ordinary = not all(x.is_inference() for x in tensors_in(written))
            return torch.is_grad_enabled() or is_ordinary or bool(self.writers([node]))

    def needs_mode(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether results show that calls were in inference mode, so that no other graph may give
        them. What a backward pass reads is counted; so none is of inference mode."""
        with no_torch_function():
            own = [x for x in outputs if x.is_inference() or id(x) in self.odd]
            kinds = {*self.leaves, *self.seen, *self.odd}
            plain = all(not (id(x) in kinds or x.is_conj() or x.is_neg()) for x in own)
            return bool(own) and not (plain and not any(x.requires_grad for x in outputs))

    def _may_be_refused(self, node: fx.Node) -> bool:
        """Whether autograd may refuse what it writes to and comes from outside: one of several
        views, or what an autograd function gave."""
        if not torch.is_grad_enabled():
            return False
        with no_torch_function():
            computed = [
                self.nodes[key]
                for key, (x, _) in self.given.items()
                if key in self.nodes and x.requires_grad and not x.is_leaf
            ]
            return bool(computed and storages(written_by(node)) & storages(computed))

    def _finish(self, node: fx.Node, out: Any) -> None:
        node.meta["example_value"] = out
        if self.leaves or self.unsaved:
            self._refuse_gradients(node, out)
        where = self.world.where()
        if where:
            node.meta["stack_trace"] = stack_trace(where)
        self._adopt_all(node, out)

    def _refuse_gradients(self, node: fx.Node, out: Any) -> None:
        """End the graph before what a leaf of its own, or what is unsaved, has a part in."""
        inputs = [id(x.meta.get("example_value")) for x in node.all_input_nodes]
        if not (self.unsaved or any(x in self.leaves for x in inputs)):
            return
        results = out if isinstance(out, (tuple, list)) else (out,)
        written = [x.meta.get("example_value") for x in written_by(node)]
        with no_torch_function():
            for x in (*results, *written):
                if isinstance(x, torch.Tensor) and x.requires_grad and id(x) not in self.leaves:
                    if torch.is_grad_enabled():
                        what = "a tensor that requires grad is made and used"
                        raise GraphBreak(self.unsaved or what)
                    self.leaves[id(x)] = False

    def _adopt_all(self, node: fx.Node, out: Any) -> None:
        """Results inside tuples and lists become getitem nodes."""
        if isinstance(out, torch.Tensor):
            if id(out) not in self.nodes:  # an operator in place gives its operand back
                self.adopt(out, node)
            return
        pairs = enumerate(out) if isinstance(out, (tuple, list)) else dict(out or ()).items()
        for key, item in pairs:
            if holds_tensor(item) and id(item) not in self.nodes:
                part = self.graph.call_function(operator.getitem, (node, key))
                part.meta = {**node.meta, "example_value": item}
                self._adopt_all(part, item)

    # ---------------------------------------------------------------------- parts

    @contextlib.contextmanager
    def apart(self, *inputs: torch.Tensor) -> Iterator[fx.Graph]:
        """What is recorded inside goes into this graph.

        Its placeholders are these inputs, and then the tensors from outside that it uses.
        """
        outer, nodes = self.graph, self.nodes
        self.graph, self.nodes = NodeGraph(), dict(nodes)
        for fake in inputs:
            self._placeholder(self.graph, f"x{len(self.graph.nodes)}", fake)
        try:
            yield self.graph
        finally:
            # what is made inside is of no graph any more; inputs of the capture remain
            self.graph, self.nodes = outer, {**self._inputs, **nodes}

    @contextlib.contextmanager
    def recomputed(self, policy: Any = None) -> Iterator[list[fx.Node]]:
        """Lists the nodes that are recorded inside, marked as torch's own partitioners read it.

        meta["ac_graph_id"] numbers what is computed again at once; "ac_policy" says what is saved.
        """
        before, number = set(self.graph.nodes), self._parts
        self._parts += 1
        made: list[fx.Node] = []
        yield made
        made += [n for n in self.graph.nodes if n not in before and n.op != "placeholder"]
        for node in made:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = number  # the outermost's, if they are nested
            node.meta["ac_policy"] = policy

    # ---------------------------------------------------------------------- arguments

    def node(self, x: torch.Tensor) -> fx.Node:
        if id(x) not in self.nodes:
            x = self.world.stray(x)
        if self.nodes[id(x)].graph is not self.graph:
            self._placeholder(self.graph, f"x{len(self.graph.nodes)}", x)
        return self.nodes[id(x)]

    def _argument(self, name: str, asked: dict[int, Any], x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.node(x)
        if isinstance(x, fx.GraphModule):
            count = len(self.bodies._modules)
            self.bodies.add_module(f"{x.meta['name']}_{count}", x)
            node = self.graph.get_attr(f"{x.meta['name']}_{count}")
            node.meta[BODY] = x.meta[BODY]
            return node
        if is_open(x):
            if id(x) in asked:  # what the call tells of it the graph is to hear from the call
                return self.symbols.size_node(asked[id(x)], self)
            return self.symbols.node(x, self)
        return argument(printable(x), name, self.graph)

    def check(self, holds: Any) -> None:
        """Let the graph raise where a relation of sizes that only data knows does not hold."""
        node = self.symbols.comparison(holds, self)
        op = torch.ops.aten._assert_scalar.default
        self._finish(self.graph.call_function(op, (node, f"not {holds}")), None)

    def symbol_node(self, symbol: Any, x: Any) -> fx.Node:
        """What gives a size that varies: a placeholder, or a call that reads it."""
        if symbol in self.symbols.env.data.made:
            x = self.sizes.setdefault(symbol, x)
            if id(x) not in self.nodes:
                self.adopt(x, self._reading(symbol))
                self.nodes[id(x)].meta["example_value"] = x
        elif symbol not in self.sizes:
            self.sizes[symbol] = x
            self.add_input(x, str(symbol))
        return self.node(self.sizes[symbol])

    def _reading(self, symbol: Any) -> fx.Node:
        if symbol not in self.symbols.shown:
            raise GraphBreak(f"no tensor has the size {symbol}, which only the data knows")
        shown, axis = self.symbols.shown[symbol]
        if axis is not None:
            return self.graph.call_method("size", (self.node(shown), axis))
        if not self.reads_numbers:
            raise GraphBreak("a torch call takes a number that a tensor holds")
        one = self.call(operator.getitem, shown, self.symbols.places[symbol])
        return self.graph.call_method("item", (self.node(one),))

    def _lifted(self, x: Any) -> Any:
        """Arguments with FakeTensors in place of tensors from outside."""
        if isinstance(x, torch.Tensor):
            return x if id(x) in self.nodes else self.world.stray(x)
        if type(x) is dict:
            return {key: self._lifted(item) for key, item in x.items()}
        if type(x) in (tuple, list):
            return type(x)([self._lifted(item) for item in x])
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*(self._lifted(item) for item in x))
        return x

    # ---------------------------------------------------------------------- the end

    def switch(self, now: State, then: State) -> None:
        """Lead the graph from a state of torch to another."""
        for function, args, kwargs in now.switches(then):
            self.graph.call_function(function, args, kwargs)

    def without_switches(self, graph: fx.Graph, ambient: bool) -> bool:
        """Whether a graph is to begin with gradients, where the program does so or not: if any of
        its calls has some. It then switches only where it must. In inference mode none has."""
        mode, calls = ambient and not self.inference, []
        for node in list(graph.nodes):
            if node.target is set_grad_enabled:
                mode = bool(node.args[0]) and not self.inference
                graph.erase_node(node)
            elif node.op not in ("placeholder", "output") and node.target not in STATE_SWITCHES:
                calls.append((node, mode))
        begin = now = any(wanted for _, wanted in calls) if calls else ambient
        for node, wanted in (*calls, (next(iter(reversed(graph.nodes))), begin)):
            if wanted is not now:
                with graph.inserting_before(node):
                    graph.call_function(set_grad_enabled, (wanted,))
            now = wanted
        return begin

    def finish(self, outputs: Sequence[torch.Tensor], *, binds: bool = False) -> fx.GraphModule:
        """The module, its outputs a tuple in this order; without what nobody needs.

        binds   whether all symbols that an input's sizes have are inputs, before it; those of its
                strides are, and those that no input has for a size
        """
        if self.is_mixed and self.needs_mode(outputs):
            raise Anew("mixed")
        self.graph.output(tuple(self.node(x) for x in outputs))
        self.graph.eliminate_dead_code(has_effect)
        bound: set[fx.Node] = set()
        origins = self.symbols.origins
        of_strides = {symbol for symbol, at in origins.items() if isinstance(at, StrideOf)}
        given = [x for x in self.graph.find_nodes(op="placeholder") if x.users] if origins else []
        values = [] if binds else [x.meta["example_value"] for x in given]
        told = {symbol for x in values for symbol in self.symbols.told_by(x)} - of_strides
        for node in given:
            for symbol in self.symbols.of(node.meta["example_value"]):
                if symbol in told:
                    continue
                size = self.symbol_node(symbol, wrapped(self.symbols.env, symbol.expr))
                if size is not node and size not in bound:
                    node.prepend(size)
                bound.add(size)
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users and node not in bound:
                self.graph.erase_node(node)
        return graph_module(self.graph, self.bodies)

    def is_needed(self, graph: fx.GraphModule) -> bool:
        """Whether running the graph gives or changes anything."""
        last = next(iter(reversed(graph.graph.nodes)))
        return bool(last.args[0]) or any(
            node.op not in ("placeholder", "output") and node.target not in STATE_SWITCHES
            for node in graph.graph.nodes
        )

    def writers(self, nodes: Iterable[fx.Node], *, known: bool = False) -> list[fx.Node]:
        """Those that write to memory that is there before the graph, as far as can be told.

        known   those left out that may write to more than they are given
        """
        with no_torch_function():
            nodes = [n for n in nodes if effects(n)]
            seen = storages(self.graph.find_nodes(op="placeholder")) if nodes else set()
            return [
                n for n in nodes
                if (not known and "anywhere" in effects(n)) or seen & storages(written_by(n))
            ]  # fmt: skip

    def call_whole(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function as one node, whatever it does."""
        if self.seen:
            raise GraphBreak("a function in the graph as a whole, beside subclasses of Tensor")
        args, kwargs = self._lifted(args), self._lifted(kwargs)
        with no_torch_function():
            out = self.run(func, args, kwargs, "")
        self.write(func, "", args, kwargs, out)
        return out
