"""Floats that a graph computes: a learning rate that a scheduler changes, a step count in a tensor.

A Number is a float whose value no capture knows. Arithmetic with one becomes a node of the graph,
on Python floats, as the program has it; so does a torch call that takes one. Whatever else needs
its value (a branch, a call into C, text) makes the floats that it was computed from constants.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx

from fusee.capture.breaks import GraphBreak
from fusee.capture.origin import Call, Item, Origin

__all__ = [
    "NUMPY", "TAKE_NUMBERS", "VALUES", "Number", "Specialise", "argument", "as_tensor", "compute",
    "exactly", "holds_number", "is_learning_rate", "load", "need_values", "shown",
]  # fmt: skip

NUMPY = (sys.modules["numpy"].generic,) if "numpy" in sys.modules else ()  # torch imports it

# Known by what they are as one of these, whatever else their classes hold.
VALUES = (int, float, complex, str, bytes, *NUMPY)


class Specialise(BaseException):
    """Capture again, with the floats at these origins as constants: no `except` may catch it."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__(f"the program needs the value of {', '.join(origins)}")
        self.origins = origins


class Number:
    """A float that a node of the graph gives.

    origins   the floats from outside that it was computed from, in words
    """

    __slots__ = ("node", "origins")

    def __init__(self, node: fx.Node, origins: frozenset[str]) -> None:
        self.node = node
        self.origins = origins

    def need(self, *_: Any) -> NoReturn:
        """Something needs the value itself."""
        if self.origins:
            raise Specialise(self.origins)
        raise GraphBreak("a branch or a call needs a float that the graph computes")

    def __format__(self, spec: str) -> str:
        self.need()

    def __repr__(self) -> str:
        self.need()

    __float__ = __int__ = __index__ = __bool__ = __complex__ = __round__ = __trunc__ = need
    __hash__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = need
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = need
    __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = need


# What a Number and another float, int or Number may go through in the graph.
_NAMES = "add sub mul truediv pow".split()
_PLAIN = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _NAMES}
_ARITHMETIC = {*_PLAIN, *_PLAIN.values(), operator.neg}
# Torch calls that a graph may give one to, as backends know to compile them.
TAKE_NUMBERS = {
    *_NAMES, *(f"i{name}" for name in _NAMES),
    *"multiply div divide true_divide addcmul addcdiv lerp".split(),
}  # fmt: skip


def compute(graph: fx.Graph, function: Callable[..., Any], operands: tuple[Any, ...]) -> Number:
    """The operator as a node of the graph."""
    numbers = [x for x in operands if type(x) is Number]
    if function not in _ARITHMETIC or not all(type(x) in (int, float, Number) for x in operands):
        numbers[0].need()
    nodes = tuple(argument(x, "", graph) for x in operands)
    node = graph.call_function(_PLAIN.get(function, function), nodes)
    return Number(node, frozenset().union(*(x.origins for x in numbers)))


def _numbers(x: Any) -> Iterator[Number]:
    if type(x) is Number:
        yield x
    elif type(x) in (tuple, list, dict):
        for item in x.values() if type(x) is dict else x:
            yield from _numbers(item)


def holds_number(x: Any) -> bool:
    """Whether a Number is among arguments."""
    return next(_numbers(x), None) is not None


def need_values(*arguments: Any) -> NoReturn:
    """A call needs the values of the Numbers among its arguments."""
    next(_numbers(arguments)).need()


def argument(x: Any, name: str, graph: fx.Graph) -> Any:
    """How the call of `name` in a graph has an argument that is no tensor."""
    if type(x) is Number and x.node.graph is not graph:
        x.need()  # it is computed outside of a transform's function, or within
    if isinstance(x, NUMPY):
        if name.strip("_") not in TAKE_NUMBERS:
            raise GraphBreak(f"numpy's numbers have a dtype, at which {name}() may look")
        return x.item()
    return x.node if type(x) is Number else x


def shown(x: Any) -> Any:
    """Arguments with some float in place of each Number: what a call gives does not say which."""
    if type(x) is Number:
        return 1.0
    if type(x) is dict:
        return {key: shown(item) for key, item in x.items()}
    return type(x)(map(shown, x)) if type(x) in (tuple, list) else x


def exactly(x: Any) -> Any:
    """What tells a number, a text or a set of them from all that differ from it."""
    if isinstance(x, frozenset):
        return tuple(sorted(map(repr, x)))
    kind = next((kind for kind in VALUES[:5] if isinstance(x, kind)), None)
    return x.tobytes() if kind is None else kind.__repr__(x)


def load(world: Any, value: float, origin: Origin) -> Number:
    """The Number for a float from outside: an input of the graph, a fact is its type alone."""
    words = str(origin)
    known: Number | None = world.numbers.get(words)
    if known is not None:
        return known
    world.fact("type", origin, float)
    with torch._C.DisableTorchFunction():
        fake = world.input(as_tensor(value), Call(origin, as_tensor, ""), origin)
    number: Number = world.recorder.item(fake, frozenset({words}))
    world.numbers[words] = number
    world.know(number, origin)
    return number


def as_tensor(value: float) -> torch.Tensor:
    """How a float from outside is given to a graph."""
    return torch.tensor(value, dtype=torch.float64)


def is_learning_rate(origin: Origin) -> bool:
    """Whether `optimizer.param_groups[k]["lr"]` is there, which schedulers change at each step."""
    group = origin.parent
    groups = group.parent if isinstance(group, Item) else None
    is_group = isinstance(groups, Item) and groups.key == "param_groups"
    return is_group and isinstance(origin, Item) and origin.key == "lr"
