"""Losses of a wide product, a chunk of its rows at a time: the logits of a language model.

    logits = mm(x, weight)                     for rows a:b of x, one chunk after the other:
    loss = reduction of f(logits)       =>         logits = mm(x[a:b], weight)
    gradients of x and weight                      loss += reduction of f(logits), as parts
                                               and once more for the gradients, which are summed up

f is what works on rows by themselves: elements, sums and the like along the last axis, elements
picked there. Each such value is known by the rows of the product that its rows are computed of, so
views and a shift of the rows are nothing to compute: a chunk has rows as the product has them.

node.meta["recompute"] of a chunk's forward makes the backward compute it again.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fusee.aten import arguments, closure, dependents, is_pure, must_run
from fusee.aten.rewriter import new_call, val
from fusee.autodiff import Joint
from fusee.autodiff.min_cut import name_of
from fusee.fake.torch_python import opmath
from fusee.loops.operators import is_pointwise
from fusee.source import HALVES, overloads

aten = torch.ops.aten

_MOST = 64  # chunks: each is compiled
_LEAST = 16  # rows of a chunk

_ALONG = frozenset(
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data amax amin argmax"
    " gather logsumexp mean scatter scatter_add sum".split()
)
_PUT = (aten.slice_scatter.default, aten.select_scatter.default)
_SIZED = overloads("view expand")
_MOVES = _SIZED + overloads("slice.Tensor select.int squeeze.dims unsqueeze permute")
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_LOSS, _LOSS_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
_NONE, _MEAN, _SUM = range(3)  # reductions of a loss


def chunk_losses(joint: Joint) -> None:
    """Run the pass. What it does joins joint.notes."""
    if joint.aten.symbols:
        return
    behind = joint.backward_nodes()
    for node in list(joint.aten.graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default) and node not in behind:
            x, weight = node.args[-2:]
            if _bytes(node) > _bytes(x) + _bytes(weight):
                _RowLoss(joint, node, behind).run()


def _bytes(node: Any) -> int:
    found: int = val(node).nbytes
    return found


def _is_distinct(rows: Tensor) -> bool:
    return len(set(rows.flatten().tolist())) == rows.numel()


class _RowLoss:
    """A product and what is computed of it.

    rows    values with rows of the product's: which ones, by position, with an axis of one at the
            end. A value without columns has an axis less
    turned  transposed ones
    """

    def __init__(self, joint: Joint, product: fx.Node, behind: set[fx.Node]) -> None:
        self.joint, self.graph, self.product, self.behind = joint, joint.aten.graph, product, behind
        self.order = {node: k for k, node in enumerate(self.graph.nodes)}
        self.count, self.columns = val(product).shape
        self.all = torch.arange(self.count).view(-1, 1)
        self.rows: dict[fx.Node, Tensor] = {product: self.all}
        self.absorbed: set[fx.Node] = set()
        self.turned: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        for node in self.order:
            if any(x in self.rows for x in node.all_input_nodes) and node not in self.rows:
                x: Any = node.args[0]
                is_turn = node.target is aten.permute.default
                if is_turn and self._is_wide(x) and val(x).dim() == 2:
                    self.turned[node] = x
                elif (found := self._follow(node)) is not None:
                    self.rows[node] = found
        if not self._choose():
            return
        size = max(_bytes(node) for node in self.kept if self._is_wide(node))
        x, weight = self.product.args[-2:]
        share = size / (_bytes(x) + _bytes(weight))
        number = min(2 ** math.ceil(math.log2(share)), _MOST, self.count // _LEAST)
        if number > 1:
            step = -(-self.count // number)
            _ChunkWriter(self, [(a, min(a + step, self.count)) for a in range(0, self.count, step)])

    # -------------------------------------------------------------------------- rows

    def has_columns(self, node: fx.Node) -> bool:
        return bool(self.rows[node].dim() == val(node).dim())

    def _is_wide(self, node: Any) -> bool:
        if node not in self.rows or not isinstance(node.meta["val"], Tensor):
            return False
        return self.has_columns(node) and val(node).shape[-1] == self.columns

    def _follow(self, node: fx.Node) -> Tensor | None:
        """The rows of what is computed of others; None: it mixes them, or might."""
        op, val = node.target, node.meta.get("val")
        first = next(x for x in node.all_input_nodes if x in self.rows)
        rows = self.rows[first]
        if op is operator.getitem:
            return rows if isinstance(val, Tensor) and val.dim() and node.args[1] == 0 else None
        if op is _LOSS:
            return rows if node.args[0] is first and self._is_wide(first) else None
        if not is_pure(node) or not isinstance(val, Tensor):
            return None
        if op is aten.clone.default:
            return rows
        if op in _PUT:
            return self._put(node)
        if op in _MOVES:
            return self._moved(node, first)
        if op is aten.mm.default:
            return rows if node.args[0] is first and node.args[1] not in self.rows else None
        if is_pointwise(op):
            columns = self.has_columns(first)
            is_even = rows.shape == (*val.shape[: val.dim() - columns], 1)
        else:
            columns = is_even = op is _LOSS_BACKWARD or self._is_along(node)
        return rows if is_even and self._fits(node, rows, columns) else None

    def _is_along(self, node: fx.Node) -> bool:
        """Whether a call works along the last axis."""
        if not isinstance(node.target, OpOverload) or name_of(node.target) not in _ALONG:
            return False
        rank, dims = val(node.all_input_nodes[0]).dim(), arguments(node).get("dim")
        return dims in (rank - 1, -1, [rank - 1], [-1])

    def _moved(self, node: fx.Node, source: fx.Node) -> Tensor | None:
        """The rows of a view: what the call makes of their numbers."""
        val, rows, given = node.meta["val"], self.rows[source], list(node.args)
        has, width = self.has_columns(source), source.meta["val"].shape[-1]
        given[0] = rows if has else rows.squeeze(-1)
        is_expanded = node.target is aten.expand.default
        if has and node.target in _SIZED and (width > 1 or is_expanded):
            sizes: Any = given[1]
            if sizes[-1] != val.shape[-1]:
                return None
            given[1] = [*sizes[:-1], 1]
        try:
            found: Tensor = node.target(*given).contiguous()  # type: ignore[operator]
        except (RuntimeError, IndexError):
            return None  # it moves columns
        is_kept = val.shape[-1:] == (width,) or (width == 1 and is_expanded)
        if has and is_kept and found.shape == (*val.shape[:-1], 1):
            return found if _is_distinct(found) else None
        if (has and width > 1) or found.shape != val.shape or not val.dim():
            return None
        found = found if val.dim() > 1 and val.shape[-1] == 1 else found.unsqueeze(-1)
        return found if _is_distinct(found) else None

    def _put(self, node: fx.Node) -> Tensor | None:
        """The rows of a gradient of some of them, with zeros for the others."""
        val = node.meta["val"]
        zeros, source, *place = list[Any](node.args)
        is_put = source in self.rows and self.has_columns(source)
        is_zero = zeros.target is aten.full.default and zeros.args[1] == 0
        if not (is_put and is_zero) or source.meta["val"].shape[-1] != val.shape[-1]:
            return None
        none = torch.full((*val.shape[:-1], 1), -1)
        found: Tensor = node.target(none, self.rows[source], *place)  # type: ignore[operator]
        flat = found.reshape(-1, 1)
        is_own = len(flat) == self.count and bool(((flat == self.all) | (flat < 0)).all())
        return self.all.view(found.shape) if is_own else None

    def _fits(self, node: fx.Node, rows: Tensor, columns: bool) -> bool:
        """Whether all operands of a call have these rows, or are the graph's for any."""
        for x in node.all_input_nodes:
            shape = val(x).shape
            if x in self.rows:
                if not self.rows[x].equal(rows):
                    return False
                if self.has_columns(x) is not columns and node.target is not _LOSS_BACKWARD:
                    return False
            elif columns and shape == (*rows.shape[:-1], self.columns):
                if not self._absorb(x, rows):
                    return False
            elif shape[:-1] != rows.shape[:-1] and self._is_along(node):
                return False
        return True

    def _absorb(self, node: fx.Node, rows: Tensor) -> bool:
        """Whether a value as large as the product can be made for a chunk's rows alone."""
        op = node.target
        if node.op != "call_function" or not is_pure(node):
            return False
        if op is aten.expand.default:
            is_made = val(node.all_input_nodes[0]).dim() in (0, rows.dim())
        else:
            is_made = op is aten.full.default or is_pointwise(op) or self._is_along(node)
            is_made = is_made and self._fits(node, rows, True)
        if is_made:
            self.rows[node] = rows
            self.absorbed.add(node)
        return is_made

    # -------------------------------------------------------------------------- choice

    def _choose(self) -> bool:
        """What becomes chunks, and what leaves them. False: something needs the whole product."""
        self.kept: set[fx.Node] = set()
        for node in reversed(self.order):
            if node in self.rows and (self._is_wide(node) or not self.kept.isdisjoint(node.users)):
                self.kept.add(node)
        self.exits: set[fx.Node] = set()  # values of rows that others read
        self.ends: set[fx.Node] = set()  # sums over rows
        for node in self.order:
            if self.turned.get(node, node) not in self.kept:
                continue
            for user in node.users:
                if user in self.kept or user in self.turned:
                    continue
                if node.target is _LOSS:
                    (self.kept if user in self.rows else self.ends).add(user)
                elif self._is_end(user, node):
                    self.ends.add(user)
                elif self._is_wide(node) and user in self.rows:
                    self.kept.add(user)
                elif not self._is_wide(node) and node not in self.turned:
                    self.exits.add(node)
                elif node not in self.absorbed:
                    return False
        left = {x for x in self.exits | self.ends if x not in self.behind}
        if not left or any(self.width(x) > 1 for x in left & self.exits):
            return False  # no loss: a layer within
        if any(type(x.meta.get("recompute")) is int for x in self.kept):
            return False
        return self._is_closed(late=False) and self._is_closed(late=True)

    def width(self, node: fx.Node) -> int:
        return val(node).shape[-1] if self.has_columns(node) else 1

    def _is_end(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a call sums something of all rows."""
        if source in self.turned or (node.target is aten.mm.default and node.args[1] is source):
            others = [x for x in node.all_input_nodes if x is not source]
            is_mm = (
                node.target is aten.mm.default and node.args[source not in self.turned] is source
            )
            return is_mm and len(others) == 1 and others[0] not in self.rows
        if node.target not in _SUMS or not self._is_wide(source):
            return False
        return {*range(val(source).dim() - 1)} <= _summed(node, source)

    def stage(self, late: bool) -> tuple[list[fx.Node], set[fx.Node], set[fx.Node]]:
        """Of forward or backward: what is computed, what leaves it, and what it reads."""
        leaving = {x for x in (*self.exits, *self.ends) if (x in self.behind) is late}
        inside = {x for x in self.kept | self.ends if (x in self.behind) is late}
        given = {
            arg
            for node in inside
            for x in node.all_input_nodes
            for arg in [self.turned.get(x, x)]
            if arg not in self.kept
        }
        return [x for x in self.order if x in inside], leaving, given

    def _is_closed(self, late: bool) -> bool:
        """Whether nothing that a chunk reads needs what all chunks give, or has to come later."""
        _, leaving, given = self.stage(late)
        if not leaving:
            return True
        if not given.isdisjoint(dependents(self.graph, leaving)):
            return False
        start = min(map(self.order.__getitem__, leaving))
        needed = [x for x in closure(given) if self.order[x] > start]
        return not any(must_run(x) or x in self.kept for x in needed)


class _ChunkWriter:
    """Writes the chunks in place of what was there.

    like    what a chunk is made of now: calls take over its device and lines
    marks   what else is in their meta
    """

    like: fx.Node

    def __init__(self, loss: _RowLoss, bounds: list[tuple[int, int]]) -> None:
        self.loss, self.graph, self.constants = loss, loss.graph, loss.joint.aten.constants
        self.bounds = bounds
        self.made: list[dict[fx.Node, fx.Node]] = [{} for _ in bounds]
        self.taken: dict[Any, fx.Node] = {}
        self.counted: dict[Any, int] = {}  # the last chunk that is in such a sum
        self.whole: dict[fx.Node, fx.Node] = {}  # what takes the place of sums over rows
        used = (x.meta.get("recompute") for x in self.graph.nodes)
        self.region = 1 + max((x for x in used if type(x) is int), default=0)
        for late in (False, True):
            self._stage(late)
        for node in reversed(loss.order):
            is_old = node in loss.rows or node in loss.ends or node in loss.turned
            if is_old and not node.users:
                self.graph.erase_node(node)
        size = f"{loss.count} by {loss.columns}"
        loss.joint.notes.append(f"the loss of {loss.product}, {size}, in {len(bounds)} chunks")

    def _stage(self, late: bool) -> None:
        loss = self.loss
        inside, leaving, given = loss.stage(late)
        if not leaving:
            return
        start = min(leaving, key=loss.order.__getitem__)
        before = {x for x in closure(given) if x in loss.order}
        for node in [x for x in loss.order if x in before and loss.order[x] > loss.order[start]]:
            start.prepend(node)
        parts: dict[fx.Node, list[fx.Node]] = {x: [] for x in leaving}
        totals: dict[Any, fx.Node] = {}
        inner = loss.kept | loss.ends | loss.turned.keys()
        with self.graph.inserting_before(start):
            for k, made in enumerate(self.made):
                self.k = k
                for node in inside:
                    self.like = node
                    self.marks = {} if late else {"recompute": self.region + k}
                    if node not in loss.ends:
                        made[node] = self._chunk(node)
                        if node in loss.exits:
                            made[node].meta["stored"] = True
                            parts[node].append(made[node])
                        continue
                    for place, part in self._end(node):
                        self.marks = {}
                        part = self._wide(part)
                        if place in totals:
                            part = self._call(aten.add.Tensor, totals[place], part)
                        # a loop that sums up all parts at the end would hold them until then
                        part.meta["stored"] = True
                        totals[place], self.counted[place] = part, self.k
            self.marks = {}
            for node in [x for x in inside if x in leaving]:
                self.like = node
                if node in loss.exits:
                    whole = self._call(aten.cat.default, parts[node])
                    rows = loss.rows[node].flatten()
                    if not rows.equal(loss.all.flatten()):  # they had another order
                        at = self._constant(rows, node)
                        whole = self._call(aten.index_select.default, whole, 0, at)
                elif node.target is operator.getitem:
                    source: Any = node.args[0]
                    whole = totals[source, node.args[1]]
                    if arguments(source)["reduction"] == _MEAN and node.args[1] == 0:
                        whole = self._call(aten.div.Tensor, whole, totals[source, 1])
                else:
                    whole = totals[node]
                self.whole[node] = whole = self._as(whole)
                node.replace_all_uses_with(whole, lambda user: user not in inner)

    # -------------------------------------------------------------------------- calls

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        meta = {k: x for k, x in self.like.meta.items() if k != "recompute"} | self.marks
        return new_call(self.graph, op, args, kwargs, meta)

    def _constant(self, x: Tensor, like: fx.Node) -> fx.Node:
        key = x.dtype, tuple(x.flatten().view(torch.uint8).tolist())
        if key not in self.taken:
            device = like.meta.get("device") or torch.device("cpu")
            name = f"_constant{len(self.constants)}"
            self.constants[name] = x.to(device)
            first = next(x for x in self.graph.nodes if x.op != "placeholder")
            with self.graph.inserting_before(first):
                self.taken[key] = made = self.graph.create_node("get_attr", name)
            made.meta = {"val": x.to("meta"), "device": device}
        return self.taken[key]

    def _wide(self, x: fx.Node) -> fx.Node:
        """`x`, to be summed up: of 16 bits in float32."""
        if val(x).dtype not in HALVES:
            return x
        return self._call(aten._to_copy.default, x, dtype=torch.float32)

    def _as(self, x: fx.Node) -> fx.Node:
        """`x` with the shape and dtype of what there was."""
        val = self.like.meta["val"]
        if x.meta["val"].dtype is not val.dtype:
            x = self._call(aten._to_copy.default, x, dtype=val.dtype)
        if x.meta["val"].shape != val.shape:
            x = self._call(aten.view.default, x, list(val.shape))
        return x

    def _part(self, x: fx.Node, rows: Tensor, has_columns: bool) -> fx.Node:
        """What the graph has for such rows, at those of the chunk."""
        key = x, has_columns, rows.shape, tuple(rows.flatten().tolist())
        marks, self.marks = self.marks, {}
        if key not in self.taken:
            y = x
            if not has_columns:
                y = self._call(aten.unsqueeze.default, y, -1)
            shape = [*rows.shape[:-1], val(y).shape[-1]]
            if list(val(y).shape) != shape:
                y = self._call(aten.expand.default, y, shape)
            if not val(y).is_contiguous():
                form = torch.contiguous_format
                y = self._call(aten.clone.default, y, memory_format=form)
            if len(shape) != 2:
                y = self._call(aten.view.default, y, [rows.numel(), shape[-1]])
            at = torch.zeros(self.loss.count, dtype=torch.int64)
            at[rows.flatten()] = torch.arange(rows.numel())
            if not at.equal(self.loss.all.flatten()):
                y = self._call(aten.index_select.default, y, 0, self._constant(at, x))
            self.taken[key] = y
        found = self.taken.get((*key, self.k))
        if found is None:
            found = self._call(aten.slice.Tensor, self.taken[key], 0, *self.bounds[self.k])
            self.taken[(*key, self.k)] = found
        self.marks = marks
        return found

    def _filled(self, x: fx.Node, rows: Tensor, value: float) -> fx.Node:
        """`x` with a value at rows that are none of these."""
        if rows.numel() == self.loss.count:
            return x
        absent = torch.ones(self.loss.count, 1, dtype=torch.bool)
        absent[rows.flatten()] = False
        mask = self._part(self._constant(absent, self.like), self.loss.all, True)
        return self._call(aten.masked_fill.Scalar, x, mask, value)

    # -------------------------------------------------------------------------- nodes

    def _operand(self, x: Any, rows: Tensor, has_columns: bool) -> Any:
        """An operand of a call, for the chunk."""
        if not isinstance(x, fx.Node):
            return x
        if x in self.made[self.k]:
            return self.made[self.k][x]
        x = self.whole.get(x, x)
        shape = val(x).shape
        leading = shape[:-1] if has_columns else shape
        if all(n == 1 for n in leading):
            wide = [1, shape[-1]] if len(shape) > 2 else None
            return x if wide is None else self._call(aten.view.default, x, wide)
        return self._part(x, rows, has_columns)

    def _column(self, x: fx.Node) -> fx.Node:
        return self._call(aten.squeeze.dims, x, [1])

    def _chunk(self, node: fx.Node) -> fx.Node:
        """A chunk of what `node` computes: rows, and columns or one."""
        loss, op, made = self.loss, node.target, self.made[self.k]
        rows, (start, stop) = loss.rows[node], self.bounds[self.k]
        if node is loss.product:
            x = self._part(node.args[-2], loss.all, True)  # type: ignore[arg-type]
            return self._call(op, *node.args[:-2], x, node.args[-1], **node.kwargs)
        if op is aten.full.default:
            sizes = [stop - start, loss.columns]
            return self._call(op, sizes, *node.args[1:], **node.kwargs)
        if op is operator.getitem:
            row = self._call(op, made[node.args[0]], 0)  # type: ignore[index]
            return self._call(aten.unsqueeze.default, row, 1)
        if op in _PUT:
            source: Any = node.args[1]
            return self._filled(made[source], loss.rows[source], 0)
        if op is aten.clone.default or op in _MOVES:
            moved: fx.Node = self._operand(node.args[0], rows, True)
            shape = [stop - start, loss.width(node)]
            if list(val(moved).shape) == shape:
                return moved
            return self._call(aten.expand.default, moved, shape)
        if op is aten.mm.default:
            return self._call(op, made[node.args[0]], node.args[1])  # type: ignore[index]
        given = arguments(node)
        if op in (_LOSS, _LOSS_BACKWARD):
            return self._loss(node, given)
        along = not is_pointwise(op)
        has_columns = along or loss.has_columns(node)
        given = {k: self._operand(x, rows, has_columns) for k, x in given.items()}
        if along:
            given["dim"] = [1] if isinstance(given["dim"], (list, tuple)) else 1
            if "keepdim" in given:
                given["keepdim"] = True
        given.pop("memory_format", None)
        return self._named(node, given)

    def _named(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        """A call like `node`'s, with operands by name."""
        schema: Any = node.target
        args = [given[a.name] for a in schema._schema.arguments if not a.kwarg_only]
        named = [a for a in schema._schema.arguments if a.kwarg_only and a.name in given]
        kwargs = {a.name: given[a.name] for a in named if given[a.name] != a.default_value}
        return self._call(schema, *args, **kwargs)

    def _loss(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        """A loss and its gradient: labels of rows that have none are ignored."""
        rows, made = self.loss.rows[node], self.made[self.k]
        target = self._part(given["target"], rows, False)
        target = self._filled(target, rows, given["ignore_index"])
        given["self"] = made[given["self"]]
        for name in given.keys() & {"grad_output", "total_weight"}:
            given[name] = self.whole.get(given[name], given[name])
        if node.target is _LOSS_BACKWARD and given["reduction"] != _MEAN:  # no weights are read
            like = given["total_weight"].meta
            options = {"dtype": like["val"].dtype, "device": like["device"]}
            given["total_weight"] = self._call(aten.full.default, [], 0, **options)
        given["target"] = self._column(target)
        if node.target is _LOSS:
            if given["reduction"] != _NONE:
                given["reduction"] = _SUM  # of all chunks, then divided once
                for name in ("self", "weight"):
                    if given[name] is not None:
                        given[name] = self._wide(given[name])
        elif given["reduction"] == _NONE:
            grad = arguments(node)["grad_output"]
            grad = made[grad] if grad in made else self._part(grad, rows, False)
            given["grad_output"] = self._column(grad)
        return self._named(node, given)

    def _end(self, node: fx.Node) -> list[tuple[Any, fx.Node]]:
        """A chunk's parts of a sum over rows, and of what divides it, with names for them."""
        if node.target is not operator.getitem:
            return [(node, self._sum(node))]
        source: Any = node.args[0]
        loss, is_mean = self.made[self.k][source], arguments(source)["reduction"] == _MEAN
        places = [node.args[1], 1] if is_mean and node.args[1] == 0 else [node.args[1]]
        return [
            ((source, k), self._call(operator.getitem, loss, k))
            for k in places
            if self.counted.get((source, k)) != self.k  # a mean's two results share the weights
        ]

    def _sum(self, node: fx.Node) -> fx.Node:
        loss, made = self.loss, self.made[self.k]
        if node.target in _SUMS:
            source: Any = node.args[0]
            x = self._filled(made[source], loss.rows[source], 0)
            over = [0, 1] if len(_summed(node, source)) == val(source).dim() else [0]
            return self._call(aten.sum.dim_IntList, x, over, dtype=opmath(val(node).dtype))
        left, right = list[Any](node.args)
        source = loss.turned.get(left, right)
        rows = loss.rows[source]
        x = self._filled(made[source], rows, 0)
        if left in loss.turned:
            other = self._part(right, rows, True)
            return self._call(node.target, self._turned(x), other)
        key = "turned", left
        if key not in self.taken:
            self.taken[key] = self._turned(left)
        other = self._turned(self._part(self.taken[key], rows, True))
        return self._call(node.target, other, x)

    def _turned(self, x: fx.Node) -> fx.Node:
        return self._call(aten.permute.default, x, [1, 0])


def _summed(node: fx.Node, source: fx.Node) -> set[int]:
    """The axes that a sum is along."""
    rank = val(source).dim()
    return {d % rank for d in arguments(node).get("dim") or range(rank)}
