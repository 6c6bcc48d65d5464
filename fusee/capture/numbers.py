"""Numbers that a graph computes: a learning rate that a scheduler changes, a count of steps.

A Number is a float or an int whose value no capture knows. Arithmetic with one becomes a node of
the graph, on Python's numbers, as the program has it; so does a torch call that takes one. Whatever
else needs its value (a branch, a size, a call into C, text) makes constants of the numbers that it
was computed from. An int is a double in the graph, so it must be one that a double holds, and may
meet only floating tensors there: of integers it would decide the bits.
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
    "LOADERS", "NUMPY", "TAKE_NUMBERS", "VALUES", "Computed", "Number", "Specialise", "argument",
    "as_tensor", "compute",
    "exactly", "holds_number", "is_held", "is_learning_rate", "load", "loaded", "meets_integers",
    "need_values", "shown",
]  # fmt: skip

NUMPY = (sys.modules["numpy"].generic,) if "numpy" in sys.modules else ()  # torch imports it

# Known by what they are as one of these, whatever else their classes hold.
VALUES = (int, float, complex, str, bytes, *NUMPY)


class Specialise(BaseException):
    """Capture again, with the numbers at these origins as constants: no `except` may catch it."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__(f"the program needs the value of {', '.join(origins)}")
        self.origins = origins


# What the program sees of objects of a class, `(world, object, origin)`; None: as of any other.
LOADERS: dict[type, Callable[..., Any]] = {}


def loaded(world: Any, x: Any, origin: Origin) -> Any:
    """What LOADERS say; None if nothing."""
    loader = LOADERS.get(type(x))
    return None if loader is None else loader(world, x, origin)


class Computed:
    """What the program has for a value that the graph computes, and that is no tensor to it."""

    __slots__ = ()
    kind: Any  # the class that the program sees

    def attribute(self, m: Any, name: str) -> Any:
        """What the program gets for an attribute."""
        raise NotImplementedError

    def number(self) -> Number:
        """What a torch call gets for it."""
        raise NotImplementedError


class Number(Computed):
    """A number that a node of the graph gives.

    origins   the numbers from outside that it was computed from, in words
    kind      float or int: what it is to the program
    made      the operator and operands that give it; empty for one that a tensor holds
    """

    __slots__ = ("kind", "made", "node", "origins")

    def __init__(
        self,
        node: fx.Node,
        origins: frozenset[str],
        kind: type = float,
        made: tuple[Any, ...] = (),
    ) -> None:
        self.node = node
        self.origins = origins
        self.kind = kind
        self.made = made

    def need(self, *_: Any) -> NoReturn:
        """Something needs the value itself."""
        if self.origins:
            raise Specialise(self.origins)
        raise GraphBreak("a branch or a call needs a float that the graph computes")

    def attribute(self, m: Any, name: str) -> Any:
        self.need()

    def number(self) -> Number:
        return self

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
_EXACT = {getattr(operator, name) for name in ("add", "iadd", "sub", "isub", "neg")}  # of integers
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
    kinds = {x.kind if type(x) is Number else type(x) for x in operands}
    is_int = kinds == {int} and _PLAIN.get(function) is not operator.truediv
    if is_int and function not in (*_EXACT, operator.truediv):
        numbers[0].need()  # a product may be more than a double holds
    nodes = tuple(argument(x, "", graph) for x in operands)
    node = graph.call_function(_PLAIN.get(function, function), nodes)
    kind = int if is_int and function in _EXACT else float
    made = (_PLAIN.get(function, function), *operands)
    return Number(node, frozenset().union(*(x.origins for x in numbers)), kind, made)


def _among(x: Any, kind: Any) -> Iterator[Any]:
    if isinstance(x, kind):
        yield x
    elif type(x) in (tuple, list, dict):
        for item in x.values() if type(x) is dict else x:
            yield from _among(item, kind)


def holds_number(x: Any) -> bool:
    """Whether a Number is among arguments."""
    return next(_among(x, Number), None) is not None


def need_values(*arguments: Any) -> NoReturn:
    """A call needs the values of the Numbers among its arguments."""
    number: Number = next(_among(arguments, Number))
    number.need()


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
    """Arguments with some number in place of each Number: what a call gives does not say which."""
    if type(x) is Number:
        return x.kind(1)
    if type(x) is dict:
        return {key: shown(item) for key, item in x.items()}
    return type(x)(map(shown, x)) if type(x) in (tuple, list) else x


def exactly(x: Any) -> Any:
    """What tells a number, a text or a set of them from all that differ from it."""
    if isinstance(x, frozenset):
        return tuple(sorted(map(repr, x)))
    kind = next((kind for kind in VALUES[:5] if isinstance(x, kind)), None)
    return x.tobytes() if kind is None else kind.__repr__(x)


def meets_integers(*arguments: Any) -> bool:
    """Whether an int that the graph computes is in a call with tensors that are no floats."""
    is_int = any(x.kind is int for x in _among(arguments, Number))
    return is_int and any(not x.is_floating_point() for x in _among(arguments, torch.Tensor))


def is_held(value: float) -> bool:
    """Whether a double holds a number, and what is added to it a few times."""
    return type(value) is float or -(2**48) < value < 2**48


def load(world: Any, value: float, origin: Origin) -> Number:
    """The Number for one from outside: an input of the graph, a fact is its type alone."""
    words = str(origin)
    known: Number | None = world.numbers.get(words)
    if known is not None:
        return known
    world.fact("type", origin, type(value))
    if type(value) is int:
        world.fact("equals", Call(origin, is_held, "is_held of "), True)
    with torch._C.DisableTorchFunction():
        fake = world.input(as_tensor(value), Call(origin, as_tensor, ""), origin)
    number: Number = world.recorder.item(fake, frozenset({words}), type(value))
    world.numbers[words] = number
    world.know(number, origin)
    return number


def as_tensor(value: float) -> torch.Tensor:
    """How a number from outside is given to a graph."""
    return torch.tensor(value, dtype=torch.float64)


def is_learning_rate(origin: Origin) -> bool:
    """Whether `optimizer.param_groups[k]["lr"]` is there, which schedulers change at each step."""
    group = origin.parent
    groups = group.parent if isinstance(group, Item) else None
    is_group = isinstance(groups, Item) and groups.key == "param_groups"
    return is_group and isinstance(origin, Item) and origin.key == "lr"
