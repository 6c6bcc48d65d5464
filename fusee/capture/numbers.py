"""Numbers that a graph computes: a learning rate that a scheduler changes, a count of steps.

A Number is a float or an int whose value no capture knows. Arithmetic with one becomes a node of
the graph, on Python's numbers, as the program has it; so does a torch call that takes one. Whatever
else needs its value (a branch, a size, a call into C, text) makes constants of the numbers that it
was computed from. An int is a double in the graph, so it must be one that a double holds, and may
meet only floating tensors there: of integers it would decide the bits.
"""

from __future__ import annotations

import cmath
import enum
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx

from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import EqualsMatch, TypeMatch
from fusee.capture.sources import Origin, ResultOf
from fusee.capture.torch_api import OpOverload
from fusee.source import Args

# ---------------------------------------------------------------------------- numbers


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
    """A number that a tensor holds, or that is computed from such numbers.

    write     makes its node in the graph, once a torch call takes it; None: none can
    origins   the numbers from outside that it was computed from, in words
    kind      float or int: what it is to the program
    made      the function and operands that give it after the graph; empty if it comes from outside
    is_late   whether it is read from what the graph gives
    """

    __slots__ = ("_node", "is_late", "kind", "made", "origins", "write")

    def __init__(
        self,
        write: Callable[[], fx.Node] | None,
        origins: frozenset[str],
        kind: type = float,
        made: Args = (),
        *,
        is_late: bool = False,
    ) -> None:
        self.write = write
        self.origins = origins
        self.kind = kind
        self.made = made
        self.is_late = is_late
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:
        if self._node is None:
            self._node = self.need() if self.write is None else self.write()
        return self._node

    def need(self, *_: Any) -> NoReturn:
        """Something needs the value itself."""
        if self.origins:
            raise Specialise(self.origins)
        raise GraphBreak("a branch or a call needs a number that the graph computes")

    def attribute(self, m: Any, name: str) -> Any:
        self.need()

    def number(self) -> Number:
        return self


_NEED = """format repr float int index bool complex round trunc hash eq lt le gt ge add radd sub
    rsub mul rmul truediv rtruediv pow rpow neg abs"""
for _name in _NEED.split():
    setattr(Number, f"__{_name}__", Number.need)


# What a Number and another float, int or Number may go through in the graph.
_NAMES = "add sub mul truediv pow".split()
_PLAIN = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _NAMES}
_ARITHMETIC = {*_PLAIN, *_PLAIN.values(), operator.neg}
_EXACT = {operator.add, operator.sub, operator.neg}  # of integers
_RAISE = {operator.truediv, operator.pow}  # for some numbers, but after the graph is too late
# Torch calls that a graph may give one to, as backends know to compile them.
TAKE_NUMBERS = {
    *_NAMES, *(f"i{name}" for name in _NAMES),
    *"multiply div divide true_divide addcmul addcdiv lerp".split(),
}  # fmt: skip


def compute(graph: fx.Graph, function: Callable[..., Any], operands: Args) -> Number:
    """What an operator makes of numbers: a node of the graph, if a torch call takes it."""
    numbers = [x for x in operands if type(x) is Number]
    if function not in _ARITHMETIC or not all(type(x) in (int, float, Number) for x in operands):
        numbers[0].need()
    function = _PLAIN.get(function, function)
    origins = frozenset().union(*(x.origins for x in numbers))
    is_late = any(x.is_late for x in numbers)
    by = operands[1] if function is operator.truediv else None
    if is_late and function in _RAISE and not (type(by) in (int, float) and by != 0):
        numbers[0].need()
    kinds = {x.kind if type(x) is Number else type(x) for x in operands}
    is_int = kinds == {int} and function is not operator.truediv
    is_held = not is_int or function in _EXACT  # else it may be more than a double holds
    if not is_held and not is_late:
        numbers[0].need()

    def write() -> fx.Node:
        return graph.call_function(function, tuple(argument(x, "", graph) for x in operands))

    kind, made = int if is_int else float, (function, *operands)
    return Number(write if is_held else None, origins, kind, made, is_late=is_late)


def converted(x: Number, kind: type) -> Number:
    """What int() or float() makes of a number."""
    if x.kind is kind:
        return x
    if not x.is_late or kind is int or x.made[0] in _ARITHMETIC:
        x.need()  # it may raise: of nan, or of what has been multiplied often
    return Number(None, x.origins, float, (float, x), is_late=True)


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
    if isinstance(x, (set, frozenset)):
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
    world.fact(TypeMatch, origin, type(value))
    if type(value) is int:
        world.fact(EqualsMatch, ResultOf(origin, is_held, "is_held of "), True)
    with torch._C.DisableTorchFunction():
        fake = world.input(as_tensor(value), ResultOf(origin, as_tensor, ""), origin)
    number: Number = world.recorder.item(fake, frozenset({words}), type(value))
    world.numbers[words] = number
    world.know(number, origin)
    return number


def as_tensor(value: float) -> torch.Tensor:
    """How a number from outside is given to a graph."""
    return torch.tensor(value, dtype=torch.float64)


# ---------------------------------------------------------------------------- arguments
# What a call in a graph may have for an argument: what fx prints as Python that gives it again.

# torch takes these classes for dtypes; fx prints them as `<class 'int'>`.
_DTYPES = {
    bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128,
}  # fmt: skip
_PRINTED = (
    types.NoneType, types.EllipsisType, bool, bytes, range, enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool, fx.Node,
    OpOverload, Number, *NUMPY,
)  # fmt: skip
# Of the user's classes of numbers and texts torch sees what they hold.
_HELD: dict[type, Any] = {int: int.__index__, float: float.__float__, str: str.__str__}


def printable(x: Any) -> Any:
    """The argument, or what torch takes for it.

    raises   GraphBreak for what has no text
    """
    if type(x) in (int, float, str) or isinstance(x, NUMPY):
        return x
    for kind, held in _HELD.items():
        if isinstance(x, kind) and type(x) is not bool:
            return held(x)
    if isinstance(x, complex) and not _has_text(x):
        raise GraphBreak(f"the number {x} has no text in Python that gives it again")
    if isinstance(x, (complex, *_PRINTED)):
        return x
    if isinstance(x, type) and x in _DTYPES:
        return _DTYPES[x]
    if type(x) is type(torch.FloatTensor):  # x.type(torch.DoubleTensor)
        return f"{x.__module__}.{x.__name__}"
    raise GraphBreak(
        f"an argument of class {type(x).__qualname__} has no text in a graph",
        "give numbers, texts, dtypes, devices and tensors to torch's functions",
    )


def _has_text(x: complex) -> bool:
    zeros = [part for part in (x.real, x.imag) if part == 0]
    return cmath.isfinite(x) and all(math.copysign(1, zero) > 0 for zero in zeros)


# ---------------------------------------------------------------------------- readings
# Numbers that a program takes out of tensors: `x.tolist()`, `x.item()`.
#
# They are read after the graph, from what it gives: the program can move them, return them and do
# arithmetic with them. Integers are unbacked symbols: a graph that needs one reads it as well.
# Where the program needs the value of one, the graph ends.

# Each is a line of what runs after the graph.
_MOST = 256

_SCALARS = {"item": None, "__float__": float, "__int__": int, "__index__": int}


def read(recorder: Any, name: str, args: Args) -> Any:
    """What a method gives that shows values of a tensor; None if the graph ends there."""
    x = args[0]
    kind = float if x.is_floating_point() else int
    is_number = kind is float or x.dtype in _INTEGERS
    is_main = recorder.is_main and not recorder.seen and x.layout is torch.strided
    if len(args) > 1 or not is_number or not is_main or not all(type(n) is int for n in x.shape):
        return None
    if name == "tolist" and x.numel() <= _MOST:
        values = _values(recorder, x)
        listed = Number(None, frozenset(), list, (torch.Tensor.tolist, values))
        taken = (
            _number(recorder, values, k, (operator.getitem, listed, k)) for k in range(x.numel())
        )
        return _nested(taken, tuple(x.shape))
    if name not in _SCALARS or x.numel() != 1 or not recorder.reads_numbers:
        return None
    values = _values(recorder, x)
    found = _number(recorder, values, 0, (torch.Tensor.item, values))
    wanted = _SCALARS[name] or kind
    if kind is float:
        return converted(found, wanted)
    return found if wanted is int else torch.sym_float(found)  # type: ignore[no-untyped-call]


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _values(recorder: Any, x: torch.Tensor) -> Any:
    """What a tensor holds now, in a tensor that nothing writes to."""
    flat = recorder.call(torch.Tensor.reshape, recorder.call(torch.detach, x), (-1,))
    return recorder.call(torch.clone, flat)


def _number(recorder: Any, values: Any, k: int, made: Args) -> Any:
    """One of `values`."""
    if not values.is_floating_point():
        return recorder.symbols.element(values, k)
    recorder.has_numbers = True

    def write() -> Any:
        one = recorder.call(operator.getitem, values, k)
        return recorder.item(one).node

    return Number(write, frozenset(), float, made, is_late=True)


def _nested(items: Any, shape: tuple[int, ...]) -> Any:
    if not shape:
        return next(items)
    return [_nested(items, shape[1:]) for _ in range(shape[0])]
