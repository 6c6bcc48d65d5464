"""Rewriting an AtenGraph: new nodes with their metas, sizes as numbers, and what is static.

A node is static if it depends on nothing but parameters, buffers and constants that the graph does
not write to. Passes compute new weights with ordinary nodes; `constants` moves the static ones out.

node.meta of inputs may hold
    brought   the caller's is a number on the CPU, and this one is on the graph's own device
of others
    stored    it is computed once, though what reads it could compute it
and of static nodes
    packed    an opaque oneDNN weight: its `val` is the plain weight's
    derive    False: compute it at each call, keeping it would cost more memory than time is gained
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten import AtenGraph, is_deterministic
from fusee.aten.boundary import DERIVATIONS
from fusee.aten.subgraph import new_call
from fusee.config import Options
from fusee.fake import on_metas
from fusee.fake.layouts import same_ints
from fusee.source import Args, Kwargs, overloads
from fusee.sym import Expr, Size, hint


class Editor:
    """One AtenGraph while passes change it in place. `notes` says what they did, in order.

    parameters   whether they are static, as constants are
    """

    def __init__(self, aten: AtenGraph, options: Options, parameters: bool = True) -> None:
        self.aten = aten
        self.graph = aten.graph
        self.options = options
        self.notes: list[str] = []
        written = {mutation.index for mutation in aten.mutations}
        self._static: set[fx.Node] = {
            node
            for node, spec in zip(aten.placeholders, aten.inputs, strict=True)
            if parameters and spec.is_static and spec.index not in written
        }
        for node in self.graph.nodes:
            self._mark(node)

    # -------------------------------------------------------------------- questions

    def calls(self, *targets: Callable[..., Any]) -> Iterator[fx.Node]:
        """The nodes, in order, that call one of `targets`. The graph may change meanwhile."""
        for target in targets:
            yield from list(self.graph.find_nodes(op="call_function", target=target))

    def is_static(self, node: object) -> bool:
        """Whether an argument depends on parameters and constants alone. True for no argument."""
        return node is None or node in self._static

    def hint(self, size: int | torch.SymInt) -> int:
        """A size as a number: for a symbolic one what it is in the first call."""
        return size if isinstance(size, int) else hint(self.aten.to_size(size))

    def sizes(self, node: fx.Node) -> list[Size]:
        """The shape of a node's result."""
        return [n if type(n) is int else self.aten.to_size(n) for n in val(node).shape]

    def hints(self, node: fx.Node) -> list[int]:
        """The shape of a node's result as numbers."""
        return [self.hint(size) for size in val(node).shape]

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a node's result."""
        return math.prod(self.hints(node)) * val(node).itemsize

    def _mark(self, node: fx.Node) -> None:
        """Extend what is static by one node whose arguments are settled."""
        if node.op == "get_attr":
            self._static.add(node)
        if node.op != "call_function" or not is_droppable(node):
            return
        if not all(arg in self._static for arg in node.all_input_nodes):
            return
        leaves: list[Any] = []
        if self.aten.symbols:
            fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
        if not any(isinstance(leaf, Expr) for leaf in leaves):
            self._static.add(node)

    # -------------------------------------------------------------------- changes

    def _with_sizes(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """SymInts among arguments as the sizes that nodes hold."""
        if not self.aten.symbols:
            return args, kwargs
        to_size: Any = self.aten.to_size
        found: Any = fx.node.map_aggregate(
            (args, kwargs), lambda x: to_size(x) if isinstance(x, torch.SymInt) else x
        )
        return tuple(found[0]), dict(found[1])

    @contextlib.contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Inside, new nodes come before `node`."""
        with self.graph.inserting_before(node):
            yield

    def call(
        self, target: Callable[..., Any], *args: Any, like: fx.Node, val: Any = None, **kwargs: Any
    ) -> fx.Node:
        """A new node. Its meta is `val`, or else what `target` returns for its arguments' metas.

        like    whose device and lines of the user it takes over
        """
        meta: dict[str, Any] = {"device": like.meta.get("device")}
        if "stack_trace" in like.meta:
            meta["stack_trace"] = like.meta["stack_trace"]
        node = new_call(self.graph, target, args, kwargs, meta, val)
        node.args, node.kwargs = self._with_sizes(args, kwargs)
        self._mark(node)
        return node

    def contiguous(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A copy of `node` that lies row by row."""
        layout = torch.contiguous_format
        return self.call(torch.ops.aten.clone.default, node, like=like, memory_format=layout)

    def mark_channels_last(self, nodes: Collection[fx.Node], what: str = "convolutions") -> None:
        """Give calls on images that layout."""
        for node in nodes:
            node.meta["layout"] = "channels_last"
        if nodes:
            self.notes.append(f"{len(nodes)} {what} in channels-last layout")

    def become(
        self, node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Make `node` another call with the same result. Cheaper than a new node in its place."""
        old = node.all_input_nodes
        node.target = target
        node.args, node.kwargs = self._with_sizes(args, kwargs)
        self.erase(*[arg for arg in old if not arg.users])
        return node

    def adopt(self, node: fx.Node) -> None:
        """Take a new placeholder as static."""
        self._static.add(node)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """All that used `old` uses `new`; `old` goes, and what only it used goes with it."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, *nodes: fx.Node) -> None:
        """Drop nodes without users, then the arguments that lost their last user by it."""
        pending = dict.fromkeys(nodes)
        gone = set()
        while pending:
            node, _ = pending.popitem()
            if node.users or node in gone or not is_droppable(node):
                continue
            gone.add(node)
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            self._static.discard(node)
            pending.update(dict.fromkeys(inputs))

    def cast(
        self, node: fx.Node, dtype: torch.dtype, like: fx.Node, derive: bool = True
    ) -> fx.Node:
        """`node` converted to `dtype`; itself if it has that dtype."""
        if val(node).dtype is dtype:
            return node
        made = self.call(torch.ops.aten._to_copy.default, node, dtype=dtype, like=like)
        made.meta["derive"] = derive
        return made


Pass = Callable[[Editor], None]


def edited(aten: AtenGraph, options: Options, passes: Sequence[Pass], notes: list[str]) -> None:
    """Change `aten` in place; what was done joins `notes`."""
    edit = Editor(aten, options)
    for step in passes:
        step(edit)
    notes += edit.notes


def val(node: fx.Node) -> Tensor:
    """A node's one result on the meta device, with eager's shape, strides and dtype."""
    found: Tensor = node.meta["val"]
    return found


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two results have one shape for all values of open sizes."""
    return same_ints(val(a).shape, val(b).shape)


def is_droppable(node: fx.Node) -> bool:
    """Whether a node without users may go."""
    if node.op != "call_function":
        return node.op == "get_attr"
    return (
        is_deterministic(node.target)
        or node.target is operator.getitem
        or node.target in DERIVATIONS
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that uses `node`, once."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user


# ---------------------------------------------------------------------------- attention
# Attention written as matmul, softmax, matmul becomes one operator that needs no score matrix.
#
#     bmm(softmax(bmm(q, k^T) * scale), v)  =>  scaled_dot_product_attention(q, k, v, scale)
#
# Only for many keys: below, two products with our softmax between them are as fast, because a block
# of scores stays in the cache (benchmarks.md, Externs). Only where nothing else reads the scores,
# and without a mask: of a row that is masked whole softmax makes NaN, the operator zeros.


aten = torch.ops.aten

LEAST_SCORES = 512 * 512  # per head

_RESHAPES = tuple(overloads("view expand clone"))


def fuse_attention(edit: Editor) -> None:
    """Run the pass."""
    if edit.aten.symbols:
        return  # whether an expand only reshapes must be known
    for node in edit.calls(aten.bmm.default):
        weights, v = node.args
        assert isinstance(weights, fx.Node) and isinstance(v, fx.Node)
        softmax = _through(weights, aten._softmax.default)
        if softmax is None or val(node).dtype is not torch.float32:
            continue
        x, axis = softmax.args[:2]  # x = product * scale, with product = bmm(q, k)
        assert isinstance(x, fx.Node)
        if val(softmax).dim() != 4 or axis not in (-1, 3):
            continue
        scale = 1.0
        if x.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            factor = x.args[1]
            if not isinstance(factor, (int, float)) or only_user(x) is None or factor == 0:
                continue
            is_product = x.target in (aten.mul.Tensor, aten.mul.Scalar)
            scale = float(factor) if is_product else 1.0 / factor
            assert isinstance(x.args[0], fx.Node)
            x = x.args[0]
        product = _through(x, aten.bmm.default)
        if product is None:
            continue
        batch, heads, queries, keys = edit.hints(softmax)
        out, is_long = [batch * heads, queries], queries * keys >= LEAST_SCORES
        if is_long and edit.hints(product) == [*out, keys] and edit.hints(node)[:2] == out:
            edit.notes.append(f"{node} became attention")
            _rewrite(edit, node, softmax, product, scale, v)


def _through(node: fx.Node, target: Any) -> fx.Node | None:
    """The call of `target` that `node` is a reshape of, if no other node reads what is between."""
    while node.op == "call_function" and only_user(node) is not None:
        if node.target is target:
            return node
        if node.target not in _RESHAPES:
            return None
        source = node.all_input_nodes[0]
        if not same_ints((val(node).numel(),), (val(source).numel(),)):
            return None
        node = source
    return None


def _rewrite(
    edit: Editor, node: fx.Node, softmax: fx.Node, product: fx.Node, scale: float, v: fx.Node
) -> None:
    q, k = product.args
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node)
    batch, heads, queries, keys = val(softmax).shape

    def images(x: fx.Node, rows: Any) -> fx.Node:
        size = [batch, heads, rows, val(x).shape[-1]]
        if not val(x).is_contiguous():
            x = edit.contiguous(x, node)
        return edit.call(aten.view.default, x, size, like=node)

    with edit.before(node):
        keys_first = edit.call(aten.permute.default, k, [0, 2, 1], like=node)
        q, k, v = images(q, queries), images(keys_first, keys), images(v, keys)
        out = on_metas(Tensor.new_empty, val(q), (batch, heads, queries, val(v).shape[-1]))
        made = edit.call(
            aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, False,
            like=node, val=out, scale=scale,
        )  # fmt: skip
    edit.become(node, aten.view.default, made, list(val(node).shape))
