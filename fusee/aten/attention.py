"""Attention: without masks that depend on no input, and as one operator.

A mask that hides nothing goes, one that hides what comes later becomes `is_causal`.
Libraries make such masks where they are traced (transformers does). ATen's kernels are faster
without, and on a GPU the fastest ones take no mask. A mask is followed at one place (q, k) that
stands for all, through what it was computed of, to a number or a relation of sizes and places: so
the answer holds for sizes that are open, too.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee.aten import arguments, memory_root
from fusee.aten.rewriter import Editor, only_user, val
from fusee.aten.torch_api import OpOverload
from fusee.fake import on_metas
from fusee.fake.layouts import is_written, like, same_ints
from fusee.source import HALVES, OpRules, overloads
from fusee.sym import Expr, Size, Symbol, known_ge, known_lt, substitute

aten = torch.ops.aten

_MASKED = (
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_MOST_STEPS = 1000  # of following one mask
_DROWNS = 1e30  # what is added to a number of float32 is the sum, from here on
FLOATS = (*HALVES, torch.float32)


class Either(NamedTuple):
    """`yes` where `rest` is at least 0, else `no`; both are numbers or bools."""

    rest: Size
    yes: Any
    no: Any


# What an element is: a Size, a number, a bool, an Either
Element = Any
Index = tuple[Size, ...]


class _NotFollowed(Exception):
    """An element that depends on an input, or on more than this module follows."""


def known_masks(edit: Editor) -> None:
    """Run the pass."""
    found: dict[fx.Node, bool | None] = {}  # by mask: what `is_causal` takes its place, if one does
    # without a mask results are laid out as queries are; as_strided would see that
    is_strided = any(edit.calls(aten.as_strided.default))
    for node in edit.calls(*_MASKED):
        named = arguments(node)
        mask = named["attn_mask"]
        if not isinstance(mask, fx.Node) or named["is_causal"]:
            continue
        if mask not in found:
            found[mask] = as_causal(mask, edit.sizes)
        if found[mask] is None:
            continue
        edit.notes.append(f"{node} needs no mask" + ", it is causal" * bool(found[mask]))
        edit.change(node, attn_mask=None, is_causal=found[mask])
        q, own = val(named["query"]), node.meta["val"]
        if is_strided or edit.aten.symbols or isinstance(own, tuple) or own.shape != q.shape:
            continue
        node.meta["val"] = own.new_empty_strided(own.shape, like(q).stride)
    if found:
        # nobody's `x[index]` goes, where all places are known to be in `x`: it cannot raise
        for node in reversed(list(edit.calls(aten.index.Tensor))):
            if not node.users and _Followed(edit.sizes).is_within(node):
                sources = node.all_input_nodes
                edit.graph.erase_node(node)
                edit.erase(*sources)


def as_causal(mask: fx.Node, sizes: Callable[[fx.Node], list[Size]]) -> bool | None:
    """False: the mask hides nothing; True: what comes later, alone; None: something else."""
    return _Followed(sizes).as_causal(mask)


class _Followed:
    """Elements of the values of a graph."""

    def __init__(self, sizes: Callable[[fx.Node], list[Size]]) -> None:
        self.shape, self.steps = sizes, 0

    def anywhere(self, shape: Sequence[Size]) -> Index:
        """A place that stands for all of a shape."""
        return tuple([0 if n == 1 else Symbol(f"i{k}", 0, n).expr for k, n in enumerate(shape)])

    def as_causal(self, mask: fx.Node) -> bool | None:
        shape = self.shape(mask)
        at = self.anywhere(shape)
        try:
            found = self.at(mask, at)
        except _NotFollowed:
            return None
        if not isinstance(found, Either):
            return False if self._is_open(found) else None
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return None
        if self._is_open(found.no):
            found = Either(-1 - found.rest, found.no, found.yes)
        hides = self._is_open(found.yes) and self._is_hidden(found.no, val(mask).dtype)
        return True if hides and found.rest == at[-2] - at[-1] else None

    def is_within(self, node: fx.Node) -> bool:
        """Whether all indices of an `index.Tensor` are places of the tensor."""
        x, given = node.args
        assert isinstance(x, fx.Node) and isinstance(given, (list, tuple))
        try:
            for n, index in zip(self.shape(x), given):
                if isinstance(index, fx.Node):
                    i = self.at(index, self.anywhere(self.shape(index)))
                    if not _is_size(i) or not (known_ge(i, 0) and known_lt(i, n)):
                        return False
        except _NotFollowed:
            return False
        return True

    @staticmethod
    def _is_open(x: Element) -> bool:
        return x is True or (type(x) in (int, float) and x == 0)

    @staticmethod
    def _is_hidden(x: Element, dtype: torch.dtype) -> bool:
        return x is False or (type(x) is float and x <= max(torch.finfo(dtype).min, -_DROWNS))

    # ------------------------------------------------------------------------------ elements

    def at(self, node: Any, index: Index) -> Element:
        """An element of a value, or a number among arguments. raises _NotFollowed"""
        if not isinstance(node, fx.Node):
            if isinstance(node, (bool, int, float, Expr)):
                return node
            raise _NotFollowed
        self.steps += 1
        rule = _RULES.get(node.target) if isinstance(node.target, OpOverload) else None
        if rule is None or self.steps > _MOST_STEPS or not isinstance(node.meta["val"], Tensor):
            raise _NotFollowed
        return rule(self, node, index)

    def operand(self, node: Any, index: Index) -> Element:
        """An element of what is broadcast."""
        if not isinstance(node, fx.Node):
            return self.at(node, ())
        shape = self.shape(node)
        own = index[len(index) - len(shape) :]
        return self.at(node, tuple([0 if n == 1 else i for n, i in zip(shape, own, strict=True)]))


def _is_size(x: Element) -> bool:
    return type(x) is int or isinstance(x, Expr)


def _chosen(rest: Size, yes: Element, no: Element) -> Element:
    if known_ge(rest, 0) or yes is no:
        return yes
    if known_ge(-1 - rest, 0):
        return no
    if isinstance(yes, (Either, Expr)) or isinstance(no, (Either, Expr)):
        raise _NotFollowed
    return Either(rest, yes, no)


def _mapped(function: Callable[..., Any], *given: Element) -> Element:
    """A function of numbers, of elements of which at most one is a choice."""
    choices = [x for x in given if isinstance(x, Either)]
    if not choices:
        return function(*given)
    if any(x.rest != choices[0].rest for x in choices):
        raise _NotFollowed
    sides = [
        function(*(getattr(x, side) if isinstance(x, Either) else x for x in given))
        for side in ("yes", "no")
    ]
    return _chosen(choices[0].rest, *sides)


def _compared(name: str, a: Element, b: Element) -> Element:
    if not (_is_size(a) and _is_size(b)):
        if isinstance(a, Expr) or isinstance(b, Expr):
            raise _NotFollowed
        return _mapped(getattr(operator, name), a, b)
    if name in ("eq", "ne"):
        if a == b:
            return name == "eq"
        if known_ge(a - b - 1, 0) or known_ge(b - a - 1, 0):
            return name == "ne"
        raise _NotFollowed
    rest = {"ge": a - b, "gt": a - b - 1, "le": b - a, "lt": b - a - 1}[name]
    return _chosen(rest, True, False)


def _both(a: Element, b: Element) -> Element:
    if a is False or b is False:
        return False
    if a is True or a == b:
        return b
    if b is True:
        return a
    raise _NotFollowed


def _calculated(function: Callable[..., Any], a: Element, b: Element) -> Element:
    if isinstance(a, Expr) or isinstance(b, Expr):
        if not (_is_size(a) and _is_size(b)):
            raise _NotFollowed
    return _mapped(function, a, b)


# ------------------------------------------------------------------------------ rules

_RULES: OpRules[Callable[[_Followed, fx.Node, Index], Element]] = OpRules()


def _overloads(*names: str) -> list[OpOverload]:
    return [
        getattr(getattr(aten, name), overload)
        for name in names
        for overload in getattr(aten, name).overloads()
        if overload in ("default", "Tensor", "Scalar", "self", "start", "start_step", "ScalarSelf")
    ]


def _rule_of_elements(names: Sequence[str], function: Callable[..., Element]) -> None:
    def rule(f: _Followed, node: fx.Node, index: Index) -> Element:
        if node.kwargs.get("alpha", 1) != 1:
            raise _NotFollowed
        return function(*(f.operand(x, index) for x in node.args))

    for op in _overloads(*names):
        _RULES[op] = rule


def _not(x: Element) -> Element:
    return _mapped(operator.not_, x)


for _name in ("add", "sub", "mul"):
    _rule_of_elements([_name], functools.partial(_calculated, getattr(operator, _name)))
_rule_of_elements(["rsub"], functools.partial(_calculated, lambda a, b: b - a))
for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    _rule_of_elements([_name], lambda a, b, name=_name: _compared(name, a, b))
_rule_of_elements(["__and__", "bitwise_and", "logical_and"], _both)
_rule_of_elements(
    ["__or__", "bitwise_or", "logical_or"], lambda a, b: _not(_both(_not(a), _not(b)))
)
_rule_of_elements(["logical_not", "bitwise_not"], _not)


def _where(condition: Element, yes: Element, no: Element) -> Element:
    if isinstance(condition, Either):
        return _chosen(condition.rest, *(yes if side else no for side in condition[1:]))
    return yes if condition else no


_rule_of_elements(["where"], _where)
_rule_of_elements(["masked_fill"], lambda x, mask, value: _where(mask, value, x))


@_RULES.rule(*_overloads("arange"))
def _arange(f: _Followed, node: fx.Node, index: Index) -> Element:
    named = arguments(node)
    start, step = named.get("start", 0), named.get("step", 1)
    if val(node).dtype.is_floating_point or not (_is_size(start) and _is_size(step)):
        raise _NotFollowed
    return start + index[0] * step


@_RULES.rule(*_overloads("full", "full_like"))
def _full(f: _Followed, node: fx.Node, index: Index) -> Element:
    found = f.at(arguments(node)["fill_value"], ())
    return found if isinstance(found, Expr) else _typed(val(node).dtype)(found)


def _typed(dtype: torch.dtype) -> Callable[[Any], Any]:
    return bool if dtype is torch.bool else float if dtype.is_floating_point else int


@_RULES.rule("_to_copy")
def _converted(f: _Followed, node: fx.Node, index: Index) -> Element:
    found, dtype = f.operand(node.args[0], index), val(node).dtype
    if isinstance(found, Expr):
        if dtype in (torch.int64, torch.int32):
            return found
        raise _NotFollowed
    return _mapped(_typed(dtype), found)


_RULES.rule("clone expand")(lambda f, node, index: f.operand(node.args[0], index))


@_RULES.rule("unsqueeze")
def _unsqueeze(f: _Followed, node: fx.Node, index: Index) -> Element:
    dim: Any = node.args[1]
    return f.at(node.args[0], index[:dim] + index[dim + 1 :])


@_RULES.rule("view squeeze.dims")
def _view(f: _Followed, node: fx.Node, index: Index) -> Element:
    """Of views that only make and drop axes of one element."""
    source: Any = node.args[0]
    before = f.shape(source)
    mine = [(n, i) for n, i in zip(f.shape(node), index, strict=True) if n != 1]
    if [n for n in before if n != 1] != [n for n, _ in mine]:
        raise _NotFollowed
    rest = iter([i for _, i in mine])
    return f.at(source, tuple([0 if n == 1 else next(rest) for n in before]))


@_RULES.rule("permute")
def _permute(f: _Followed, node: fx.Node, index: Index) -> Element:
    order: Any = node.args[1]
    places = dict(zip(order, index, strict=True))
    return f.at(node.args[0], tuple([places[k] for k in range(len(index))]))


@_RULES.rule("slice.Tensor")
def _slice(f: _Followed, node: fx.Node, index: Index) -> Element:
    source, dim, start, _, step = arguments(node).values()
    if not known_ge(start, 0):
        raise _NotFollowed
    return f.at(source, (*index[:dim], start + index[dim] * step, *index[dim + 1 :]))


@_RULES.rule("select.int")
def _select(f: _Followed, node: fx.Node, index: Index) -> Element:
    source, dim, place = arguments(node).values()
    if not known_ge(place, 0):
        raise _NotFollowed
    return f.at(source, (*index[:dim], place, *index[dim:]))


@_RULES.rule("cat")
def _cat(f: _Followed, node: fx.Node, index: Index) -> Element:
    """At a place that is known, or where the parts go on alike: one formula for all of them."""
    parts, dim = arguments(node)["tensors"], arguments(node)["dim"] % len(index)
    begin: Size = 0
    for part in parts:
        place, end = index[dim] - begin, begin + f.shape(part)[dim]
        if known_ge(place, 0) and known_lt(index[dim], end):
            return f.at(part, (*index[:dim], place, *index[dim + 1 :]))
        begin = end
    begin = 0
    k = Symbol(f"k{f.steps}", 0, f.shape(node)[dim])
    single: list[tuple[Size, Element]] = []
    found: Element = None
    for part in parts:
        n = f.shape(part)[dim]
        i = 0 if n == 1 else k.expr - begin
        element = f.at(part, (*index[:dim], i, *index[dim + 1 :]))
        if n == 1:
            single.append((begin, element))
        elif found is None or found == element:
            found = element
        else:
            raise _NotFollowed
        begin = begin + n
    if found is None or isinstance(found, Either):
        raise _NotFollowed

    def at(place: Size) -> Element:
        return substitute(found, {k: place}) if isinstance(found, Expr) else found

    if any(at(place) != element for place, element in single):
        raise _NotFollowed
    return at(index[dim])


@_RULES.rule("cumsum")
def _cumsum(f: _Followed, node: fx.Node, index: Index) -> Element:
    found = f.at(node.args[0], index)
    if isinstance(found, (Either, Expr)) or found != 0:
        raise _NotFollowed
    return 0


@_RULES.rule("index.Tensor")
def _index(f: _Followed, node: fx.Node, index: Index) -> Element:
    source, given = node.args
    assert isinstance(source, fx.Node) and isinstance(given, (list, tuple))
    if len(given) != len(f.shape(source)) or not all(isinstance(i, fx.Node) for i in given):
        raise _NotFollowed
    if any(val(i).dtype is torch.bool for i in given):  # type: ignore[arg-type]
        raise _NotFollowed
    places = tuple([f.operand(i, index) for i in given])
    if not all(map(_is_size, places)) or not all(known_ge(i, 0) for i in places):
        raise _NotFollowed
    return f.at(source, places)


@_RULES.rule("tril triu")
def _triangle(f: _Followed, node: fx.Node, index: Index) -> Element:
    named, found = arguments(node), f.at(node.args[0], index)
    rest = index[-2] - index[-1] + named["diagonal"]
    nothing = False if val(node).dtype is torch.bool else 0.0
    return _chosen(-rest if node.target is aten.triu.default else rest, found, nothing)


# ---------------------------------------------------------------------------- heads
# Attention of three axes, and keys that many heads or examples share: ATen's fused kernels take
# neither, so that eager multiplies, masks and normalises whole matrices of scores (two to six times
# slower on a CPU). With an axis of one head, and with keys expanded in place, they do.
# source: aten/src/ATen/native/transformers/sdp_utils_cpp.h, check_batch_size_and_num_heads_dense

Given = tuple[Any, Any, Any, Any]


def every_head(
    call: Callable[..., Any], shape_of: Callable[[Any], Sequence[Any]], operands: Given
) -> Given | None:
    """Query, key, value and mask with four axes and as many heads; None where they have, or where
    eager refuses them.

    call   makes what an operator gives for these
    """
    *three, mask = operands
    shapes = [list(shape_of(x)) for x in three]
    dims = {len(shape) for shape in shapes}
    if dims not in ({3}, {4}) or not all(same_ints(x[-1:], shapes[0][-1:]) for x in shapes):
        return None
    rows = shapes[0][-2:] if mask is None else list(shape_of(mask))
    lead = shapes[0][:-2]
    others = [k for k in (1, 2) if not same_ints(shapes[k][:-2], lead)]
    if not 2 <= len(rows) <= dims.pop() or (len(lead) == 2 and not others):
        return None
    pairs = [(m, n) for k in others for m, n in zip(shapes[k], lead)]
    if not all(is_written(m, n) or (type(m) is int and m == 1) for m, n in pairs):
        return None
    for k in others:
        three[k] = call(aten.expand.default, three[k], [*lead, *shapes[k][-2:]])
    if len(lead) == 1:
        three = [call(aten.unsqueeze.default, x, 1) for x in three]
        mask = call(aten.unsqueeze.default, mask, 1) if len(rows) == 3 else mask
    return (*three, mask)


def lacks_heads(node: fx.Node) -> bool:
    """Whether `with_every_head` makes another call of this one."""
    return _headed(node, lambda op, x, *args: x) is not None


def _headed(node: fx.Node, call: Callable[..., Any]) -> Given | None:
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    named = arguments(node)
    q = named["query"]
    if named["dropout_p"] or named["enable_gqa"] or val(q).dtype not in FLOATS:
        return None
    if val(q).dtype is not torch.float32 and same_ints(val(q).shape[-2:-1], (1,)):
        return None  # of one row the products are faster
    operands = q, named["key"], named["value"], named["attn_mask"]
    return every_head(call, lambda x: val(x).shape, operands)


def with_every_head(edit: Editor) -> None:
    """Run the pass."""
    for node in edit.calls(aten.scaled_dot_product_attention.default):
        with edit.before(node):
            found = _headed(node, edit.call)
            if found is None:
                continue
            named = arguments(node)
            op, given = aten.scaled_dot_product_attention.default, (0.0, named["is_causal"])
            is_flat = val(node).dim() == 3
            # of a GPU torch is asked how results lie, which makes constants of open sizes
            result = val(node) if edit.aten.symbols else None
            if result is not None and is_flat:
                result = on_metas(aten.unsqueeze.default, result, 1)
            made = edit.call(op, *found, *given, scale=named["scale"], val=result)
            if is_flat:
                made = edit.call(aten.squeeze.dims, made, [1])
        edit.notes.append(f"{node} has keys for every head")
        edit.become(node, aten.clone.default, made, memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------- products
# Attention written as matmul, softmax, matmul becomes one operator that needs no score matrix.
#
#     bmm(softmax(bmm(q, k^T) * scale + bias), v)
#         =>  scaled_dot_product_attention(q, k, v, bias, scale)
#
# Only where nothing else reads the scores. On a CPU only for many keys: below, two products with
# our softmax between them are as fast, because a block of scores stays in the cache (benchmarks.md,
# Externs). Of a row whose bias is -inf everywhere softmax makes NaN, the operator zeros: such a row
# gets a bias of NaN. One that is the lowest number everywhere has equal shares; kernels that count
# in powers of two would make -inf of it, so no other bias is below -1e30.


LEAST_SCORES = 512 * 512  # per head
_RESHAPES = tuple(overloads("view expand clone"))
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_SCALES = (*_PRODUCTS, aten.div.Tensor, aten.div.Scalar)
# A choice between scores and a number, by the places of the condition, the scores and the number.
_CHOICES = {
    aten.where.self: (0, 1, 2),
    aten.where.ScalarOther: (0, 1, 2),
    aten.masked_fill.Scalar: (1, 0, 2),
}


class _Bias(NamedTuple):
    """What is added to scores of `shape` before they are multiplied by `factor`; a condition where
    scores stay as they are (`hides`: where they don't) and elsewhere become `number`."""

    node: fx.Node
    shape: list[int]
    factor: float
    number: float | None = None
    hides: bool = False


class _Scores:
    """The operand of a softmax, as bmm(q, k) times `scale` plus `biases`; `product` is None where
    it is something else, or something else reads what is between."""

    def __init__(self, x: fx.Node, dtype: torch.dtype) -> None:
        self.scale, self.biases, self.dtype = 1.0, list[_Bias](), dtype
        self.product: fx.Node | None = None
        self.leads: dict[fx.Node, bool] = {}  # as `_leads_to_product` has found
        while only_user(x) is not None:
            if x.target is aten.bmm.default:
                self.product = x
                return
            source = self._before(x)
            if source is None or source.op != "call_function":
                return
            x = source

    def _before(self, x: fx.Node) -> fx.Node | None:
        args: Any = x.args
        if x.target in _RESHAPES or _is_cast(x):
            return args[0] if is_written(val(x).numel(), val(args[0]).numel()) else None
        if x.target in _SCALES:
            factor = _factor(x)
            self.scale *= factor or 0.0
            return args[0] if factor else None
        if x.target is aten.add.Tensor and not x.kwargs and len(args) == 2:
            found = [a for a in args if isinstance(a, fx.Node) and val(a).shape == val(x).shape]
            scores = next((a for a in found if self._leads_to_product(a)), None)
            other = next((a for a in args if a is not scores), None)
            if scores is None or not isinstance(other, fx.Node) or val(other).dtype != self.dtype:
                return None
            self.biases.append(_Bias(other, list(val(x).shape), self.scale))
            return scores
        if x.target in _CHOICES:
            condition, scores, number = (args[k] for k in _CHOICES[x.target])
            is_full = isinstance(number, fx.Node) and number.target is aten.full.default
            number = number.args[1] if is_full and number.args[0] == [] else number
            is_low = isinstance(number, (int, float)) and number < -_DROWNS
            if not is_low or self.scale != 1.0 or val(scores).shape != val(x).shape:
                return None
            hides = x.target is aten.masked_fill.Scalar
            self.biases.append(_Bias(condition, list(val(x).shape), 1.0, float(number), hides))
            return scores  # type: ignore[no-any-return]
        return None

    def _leads_to_product(self, x: fx.Node) -> bool:
        """Whether scores are the first operands from here up to a product."""
        passed: list[fx.Node] = []
        found = False
        while x.op == "call_function" and x not in self.leads:
            passed.append(x)
            found = x.target is aten.bmm.default
            place = _CHOICES[x.target][1] if x.target in _CHOICES else 0
            known = x.target in (*_RESHAPES, *_SCALES, *_CHOICES, aten.add.Tensor) or _is_cast(x)
            source: Any = x.args[place] if known and not found else None
            if not isinstance(source, fx.Node):
                break
            x = source
        self.leads.update(dict.fromkeys(passed, self.leads.get(x, found)))
        return self.leads.get(passed[0] if passed else x, False)


def _is_cast(x: fx.Node) -> bool:
    """Between floats of 16 and of 32 bits."""
    is_copy = x.target is aten._to_copy.default and set(x.kwargs) <= {"dtype"}
    return is_copy and val(x).dtype in FLOATS and val(x.all_input_nodes[0]).dtype in FLOATS


def _factor(x: fx.Node) -> float | None:
    """What a number multiplies by; None where that is no number, or zero."""
    number = x.args[1]
    if not isinstance(number, (int, float)) or not number:
        return None
    return float(number) if x.target in _PRODUCTS else 1.0 / number


def fuse_attention(
    edit: Editor, dtypes: Sequence[torch.dtype] = (torch.float32,), few: bool = False, row: int = 1
) -> None:
    """Run the pass for products in `dtypes`.

    few   for few scores, too
    row   elements that rows of what is added to scores are best multiples of
    """
    if edit.aten.symbols:
        return  # whether an expand only reshapes must be known
    for node in edit.calls(aten.bmm.default):
        weights, v = node.args
        assert isinstance(weights, fx.Node) and isinstance(v, fx.Node)
        softmax = _softmax_of(weights)
        if softmax is None or val(node).dtype not in dtypes:
            continue
        (x, axis), dims = softmax.args[:2], val(softmax).dim()
        assert isinstance(x, fx.Node)
        if dims not in (3, 4) or axis not in (-1, dims - 1):
            continue
        scores = _Scores(x, val(node).dtype)
        if scores.product is None or val(scores.product).dtype != val(node).dtype:
            continue
        *lead, queries, keys = edit.hints(softmax)
        out = [math.prod(lead), queries]
        is_long = queries > 1 if few else queries * keys >= LEAST_SCORES
        fits = edit.hints(scores.product) == [*out, keys] and edit.hints(node)[:2] == out
        if not (is_long and fits):
            continue
        edit.notes.append(f"{node} became attention")
        q, k = scores.product.args
        assert isinstance(q, fx.Node) and isinstance(k, fx.Node)
        lead = lead if len(lead) > 1 else [*lead, 1]
        with edit.before(node):
            q, factor = _heads_of(edit, q, lead, _SCALES)
            k, other = _heads_of(edit, k, lead, _SCALES, is_key=True)
            v, _ = _heads_of(edit, v, lead)
            bias, is_causal = _bias(edit, scores, [*lead, queries, keys], row)
            made = edit.call(
                aten.scaled_dot_product_attention.default, q, k, v, bias, 0.0, is_causal,
                scale=scores.scale * factor * other,
            )  # fmt: skip
        strided = [x.all_input_nodes[0] for x in edit.calls(aten.as_strided.default)]
        is_seen = node in map(memory_root, (*edit.aten.results, *strided))  # how it lies in memory
        edit.become(node, aten.view.default, made, list(val(node).shape))
        for user in list(node.users):  # as made: the way there and back would be a copy
            if user.target is aten.view.default and val(user).shape == val(made).shape:
                if not is_seen or val(user).stride() == val(made).stride():
                    edit.replace(user, made)


def _softmax_of(node: fx.Node) -> fx.Node | None:
    """The softmax that `node` is a reshape or a cast of, if no other node reads what is between."""
    while node.op == "call_function" and only_user(node) is not None:
        if node.target is aten._softmax.default:
            return node
        if node.target not in _RESHAPES and not _is_cast(node):
            return None
        source = node.all_input_nodes[0]
        if not is_written(val(node).numel(), val(source).numel()):
            return None
        node = source
    return None


def _heads_of(
    edit: Editor, x: fx.Node, lead: list[int], scales: Sequence[Any] = (), is_key: bool = False
) -> tuple[fx.Node, float]:
    """An operand of a product with its axes of examples and heads, and a number that it is to be
    multiplied by; of what it was copied from, where that has rows.

    scales   the products with numbers that may be left to the caller
    is_key   it is a transposed one
    """
    rows, columns = val(x).shape[1:]
    size, row = [*lead, rows, columns], -2 if is_key else -1
    factor, passed, found, source = 1.0, 1.0, None, x
    while source.op == "call_function":
        if list(val(source).shape) == size and val(source).stride(row) == 1:
            found, factor = source, passed
        if source.target in scales and (number := _factor(source)):
            passed *= number
        elif source.target not in _RESHAPES:
            break
        before: Any = source.args[0]
        if val(before).numel() != val(source).numel() or val(before).dtype != val(source).dtype:
            break
        source = before
    if found is not None:
        return (edit.call(aten.permute.default, found, [0, 1, 3, 2]) if is_key else found), factor
    if is_key:
        x = edit.call(aten.permute.default, x, [0, 2, 1])
    if not val(x).is_contiguous():
        x = edit.contiguous(x)
    return edit.call(aten.view.default, x, [*lead, *val(x).shape[1:]]), factor


def _bias(edit: Editor, scores: _Scores, size: list[int], row: int) -> tuple[fx.Node | None, bool]:
    """All of them in one, which broadcasts to `size`, computed once for what it is repeated for;
    or none, and whether what comes later is hidden, if nothing else is."""
    biases = scores.biases
    if not biases:
        return None, False
    call, total = edit.call, None
    axes = next((one.shape for one in biases if one.shape != size), size)
    for one in reversed(biases):  # as scores meet them: what is hidden is a number, whatever it was
        if one.number is not None:
            x = _with_axes(edit, one.node, one.shape, axes)
            before = edit.number(0.0, x, torch.float32) if total is None else total
            least = one.number if one.number == -math.inf else max(one.number, -_DROWNS)
            low = edit.number(least, x, torch.float32)
            total = call(aten.where.self, x, *((low, before) if one.hides else (before, low)))
            continue
        x = edit.cast(one.node, torch.float32)
        if one.factor != 1.0:
            x = call(aten.mul.Tensor, x, one.factor)
        x = _with_axes(edit, x, one.shape, axes)
        total = x if total is None else call(aten.add.Tensor, total, x)
    assert total is not None
    known = as_causal(total, edit.sizes) if total.target is aten.where.self else None
    if known is not None:
        edit.erase(total)
        return None, known
    if any(one.number in (None, -math.inf) for one in biases):
        most = call(aten.amax.default, total, [-1], True)
        shown = call(aten.ne.Scalar, most, -math.inf)
        low = call(aten.clamp_min.default, total, -_DROWNS)
        total = call(aten.where.self, call(aten.eq.Scalar, total, -math.inf), total, low)
        nan = edit.number(math.nan, total, torch.float32)
        total = call(aten.where.self, shown, total, nan)
    total, keys = edit.cast(total, scores.dtype), size[-1]
    if val(total).shape[-1] != keys:  # ATen's kernels repeat all axes but this one
        total = call(aten.expand.default, total, [*val(total).shape[:-1], keys])
    if axes == [size[0], *size[2:]]:  # without heads
        return call(aten.unsqueeze.default, total, 1), False
    if axes != size:
        longer = -keys % row
        total = call(aten.constant_pad_nd.default, total, [0, longer])
        expanded = call(aten.expand.default, total, [*axes[:-1], keys + longer])
        whole = call(aten.reshape.default, expanded, [*size[:-1], keys + longer])
        total.meta["stored"] = whole.meta["stored"] = True
        total = call(aten.slice.Tensor, whole, len(size) - 1, 0, keys)
    return total, False


def _with_axes(edit: Editor, x: fx.Node, shape: list[int], axes: list[int]) -> fx.Node:
    """What broadcasts to `shape`, as many elements as `axes` has, with an axis for each of `axes`,
    as what broadcasts to these."""
    pairs = zip(reversed(shape), reversed(axes))
    same = next((k for k, (m, n) in enumerate(pairs) if m != n), min(len(shape), len(axes)))
    own = list(val(x).shape)
    front, rest = own[: max(len(own) - same, 0)], own[max(len(own) - same, 0) :]
    if any(n != 1 for n in front):
        return edit.call(aten.reshape.default, edit.call(aten.expand.default, x, shape), axes)
    size = [*[1] * (len(axes) - len(rest)), *rest]
    return x if size == own else edit.call(aten.view.default, x, size)
