"""Sizes that vary: what the program has for one is a torch.SymInt over a size of ours.

A size of a tensor from outside, or an integer, that has been seen with another value is a symbol of
the graph. Python computes with it (`fusee/sym/shape_env.py`); a branch on it is a relation that
later calls must meet; what needs the number itself (a loop over `range`, C code, a key, text)
makes it that number. A size that is 0 or 1 when it is seen is a constant, since broadcasting tells
it apart; a symbol may be 1 in later calls if nothing asked.

A size that only the data knows, or an integer that a tensor holds, is an unbacked symbol: the
graph reads it where it is needed, and so does what follows it. What needs its value ends the graph.

source   torch.fx.experimental.symbolic_shapes, for what programs expect of it
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import fx

from fusee.capture.captured import Relation
from fusee.capture.dynamic import Varying, fits_double
from fusee.capture.graph_break import Forbidden, GraphBreak
from fusee.capture.guards import TensorFact
from fusee.capture.sources import (
    ComputedAt,
    Origin,
    Several,
    SizeOf,
    Source,
    StrideOf,
    WrittenSteps,
    in_words,
    own_dict,
    size_source,
)
from fusee.capture.torch_api import Mark, without_function_modes
from fusee.errors import ConstantSizeError, OptionError, source_line
from fusee.fake import fake_of
from fusee.source import Args, Kwargs, leaves, tensors_in
from fusee.sym import Size, Symbol, only_symbol, symbols
from fusee.sym.ranges import COMPARISONS, FUNCTIONS, Predicate, fits, refuse
from fusee.sym.shape_env import (
    AllNode,
    BoolNode,
    FloatNode,
    Node,
    ShapeEnv,
    SizeNode,
    computed_from,
    known_size,
    size_of,
    wrapped,
)
from fusee.sym.shape_env import is_unbacked as is_unbacked


class Text:
    """A text with open numbers in it, such as a message with a shape.

    parts   texts, and what gives one of open numbers: a function in C, and its arguments
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: str | tuple[Any, tuple[Any, ...]]) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return repr(self.text())

    def __eq__(self, other: object) -> bool:
        return bool(self.text() == whole_text(other))

    def __hash__(self) -> int:
        return hash(self.text())

    @classmethod
    def joined(cls, parts: list[Any]) -> Any:
        """The texts one after the other."""
        if not any(type(x) is Text for x in parts):
            return "".join(parts)
        return cls(*(p for x in parts for p in (x.parts if type(x) is Text else (x,))))

    @classmethod
    def of(cls, function: Any, *args: Any) -> Any:
        """What a function makes of numbers that cannot change; else what it makes of these now."""
        if not all(map(is_fixed, args)) or any(isinstance(x, str) and "c" in x for x in args):
            return function(*concrete(args))  # c: of which some numbers raise
        function(*concrete(args, is_fixed=False))  # it raises now, or never
        return cls((function, args))

    def text(self) -> str:
        """The text itself, from here on the same in all calls."""
        return "".join(p if isinstance(p, str) else p[0](*concrete(p[1])) for p in self.parts)


def list_text(*items: Any) -> str:
    """A list as text."""
    return str([*items])


def joined_text(*parts: str) -> str:
    return "".join(parts)


def is_fixed(x: Any) -> bool:
    """Whether nothing can change a value with open numbers."""
    if type(x) in (tuple, torch.Size):
        return all(map(is_fixed, x))
    return type(x) in (int, float, str, bool, torch.SymInt, torch.SymFloat)


OPEN = (torch.SymInt, torch.SymFloat, torch.SymBool, Text)
_KINDS: dict[type, type] = {
    torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool, Text: str,
}  # fmt: skip


def is_open(x: Any) -> bool:
    """Whether `x` stands for a number that varies."""
    return type(x) in _KINDS


def kind_of(x: Any) -> type:
    """What the program sees an open number as."""
    return _KINDS[type(x)]


def concrete(x: Any, *, is_fixed: bool = True) -> Any:
    """The number itself, from here on the same in all calls; anything else as it is.

    is_fixed   False: what it is in this call, and nothing is relied on
    """
    if is_open(x):
        if type(x) is Text:
            return x.text()
        return x.node.guarded() if is_fixed else x.node.hint
    if not holds_open(x):
        return x
    kind: Any = type(x)
    if kind is dict:
        return {key: concrete(item, is_fixed=is_fixed) for key, item in x.items()}
    home = list if issubclass(kind, list) else tuple
    items = (concrete(item, is_fixed=is_fixed) for item in home.__iter__(x))
    if home is tuple:
        return kind(items) if kind in (tuple, torch.Size) else tuple.__new__(kind, items)
    made = kind.__new__(kind)  # for C code, which looks at its elements
    list.extend(made, items)
    return made


def settle(x: Any) -> None:
    """Let an object hold values in place of open numbers: C code calls a method that reads them."""
    bases = (vars(base).items() for base in type(x).__mro__)
    names = {k: 0 for row in bases for k, v in row if type(v) is types.MemberDescriptorType}
    for name in (*names, *(own_dict(x) if type(x).__dictoffset__ else ())):
        with contextlib.suppress(AttributeError):  # a slot in which is nothing
            if holds_open(held := object.__getattribute__(x, name)):
                object.__setattr__(x, name, concrete(held))


def whole_text(x: Any) -> Any:
    """A text with open numbers as the text itself; anything else as it is."""
    return x.text() if type(x) is Text else x


def is_in(x: Any, items: Any) -> bool:
    """Whether an open number, or a tuple with some, is in a container of numbers."""
    if type(items) is range and type(x) is torch.SymInt:
        ordered = items if items.step > 0 else items[::-1]
        between = bool(x >= ordered.start) and bool(x < ordered.stop)
        return between and bool((x - ordered.start) % ordered.step == 0)
    if type(items) not in (tuple, list, torch.Size) and len(items) > _FEW:
        return concrete(x) in items
    kinds = (tuple,) if isinstance(x, tuple) else (int, float, *OPEN)
    return any(bool(x == item) for item in items if isinstance(item, kinds))


_FEW = 16  # elements of a set that are asked for each


def method(owner: Any, name: str, args: Args) -> Any:
    """What a method of a text or shape gives, with open numbers; NotImplemented for others."""
    if name == "numel" and isinstance(owner, torch.Size):  # in C it takes known sizes alone
        return math.prod(owner)
    is_text = name == "format" and type(owner) is str and any(map(is_open, args))
    if is_text and all(type(x) is Text or is_fixed(x) for x in args):
        return Text.of(str.format, owner, *args)
    if name == "join" and type(owner) is str and any(type(x) is Text for x in args[0]):
        return Text.joined([part for item in args[0] for part in (owner, item)][1:])
    if name in ("count", "index") and isinstance(owner, (list, tuple)):
        known, *others = comparable(owner, *args)
        if known is not owner:
            return getattr(list if isinstance(owner, list) else tuple, name)(known, *others)
    return NotImplemented


def attribute(x: Any, name: str) -> Any:
    """An attribute of an open number, which the program sees as an int, float or text."""
    kind = kind_of(x)
    if name == "__class__":
        return kind
    if kind in (int, float) and hasattr(kind, name):
        if name in ("real", "numerator"):
            return x
        if name in ("imag", "denominator"):
            return getattr(kind(1), name)
        if name in _BY_NAME:
            return types.MethodType(_BY_NAME[name], x)
    return getattr(concrete(x), name)


_OPERATORS = "add sub mul mod floordiv truediv neg abs pos".split()
_BY_NAME: dict[str, Any] = {f"__{x}__": getattr(operator, x) for x in _OPERATORS}
_BY_NAME.update(__pow__=pow, conjugate=operator.pos, bit_length=int.bit_length)


def holds_open(x: Any) -> bool:
    """Whether an open number is in a tuple, list or dict."""
    if type(x) is dict:
        return any(map(holds_open, x.values()))
    if issubclass(type(x), list):
        return any(map(holds_open, list.__iter__(x)))
    if type(x) in (tuple, torch.Size) or (isinstance(x, tuple) and hasattr(x, "_fields")):
        return any(map(holds_open, x))
    return is_open(x)


def comparable(*several: Any) -> tuple[Any, ...]:
    """What is to be compared, with values for open numbers if these would not know the others.

    A SymInt equals no number of a class that derives from int, and no complex one.
    """
    if not any(map(holds_open, several)):
        return several
    others = (x for x in leaves(several) if type(x) not in (int, float, bool))
    is_known = not any(isinstance(x, (int, float, complex)) for x in others)
    return several if is_known else tuple(map(concrete, several))


# C code that works on numbers by their own methods, and gives what those give.
TAKE = {
    max, min, sum, abs, pow, round, math.floor, math.ceil, math.trunc, math.prod, slice,
    tuple, list, torch.Size, zip, enumerate, reversed, all, any, torch.sym_max, torch.sym_min,
    *(x for x in vars(operator).values() if callable(x)),
}  # fmt: skip


def called(function: Any, args: Args, kwargs: Kwargs) -> Any:
    """What C code gives for open numbers; what does not work on them gets their values."""
    is_of_numbers = not any(isinstance(x, torch.Tensor) for x in args)  # which have no divmod()
    if function is divmod and is_of_numbers:  # a SymInt has no such method
        return operated(operator.floordiv, *args), operated(operator.mod, *args)
    are_integers = {*map(type, args)} <= {int, torch.SymInt} and not kwargs
    if function is pow and len(args) == 3 and are_integers and 0 <= args[1] < 64 and args[2]:
        return operated(operator.mod, operated(operator.pow, *args[:2]), args[2])
    if function is round and type(args[0]) is torch.SymInt and (args[1:] or kwargs):
        return function(*concrete(args), **concrete(kwargs))  # which does not look at the places
    if function in TAKE:
        return operated(function, *args, **kwargs)
    opens = [x for x in args if is_open(x)]
    if not kwargs and all(type(x) is torch.SymInt and size_of(x) is not None for x in opens):
        if function in (math.comb, math.perm) and args[0] is opens[0] and args[0] >= 0:
            if len(args) == 2 and args[1] in range(5):
                ways: Any = math.prod(args[0] - k for k in range(args[1]))
                return ways if function is math.perm else ways // math.factorial(args[1])
        if function in _COUNTS and all(type(x) in (int, torch.SymInt) for x in args):
            nodes = tuple(x.node if is_open(x) else x for x in args)
            if (found := opens[0].node.env.computed(function, nodes)) is not None:
                return torch.SymInt(found)  # type: ignore[no-untyped-call]
    if function is math.log and len(args) == 2:
        return called(function, args[:1], {}) / called(function, args[1:], {})
    if function in FUNCTIONS and len(args) == 1 and type(args[0]) in (torch.SymInt, torch.SymFloat):
        return torch.SymFloat(converted(args[0], float).node.of(function))  # type: ignore[no-untyped-call]
    return function(*concrete(args), **concrete(kwargs))


# What gives integers.
_COUNTS = {math.isqrt, math.gcd, math.lcm, math.comb, math.perm, math.factorial, int.bit_length}


def converted(x: Any, kind: type) -> Any:
    """int() or float() of an open number."""
    if kind_of(x) is kind:
        return x
    if kind is float and type(x) is torch.SymInt:
        return torch.sym_float(x)  # type: ignore[no-untyped-call]
    if kind is int and type(x) is torch.SymFloat:
        return math.trunc(x)
    return kind(concrete(x))


def operated(function: Callable[..., Any], *operands: Any, **named: Any) -> Any:
    """What an operator of Python gives for numbers or texts, some of them open."""
    kinds = {*map(type, operands)}
    if function in (operator.add, operator.iadd) and kinds <= {str, Text}:
        return Text.joined([*operands])
    if function in (operator.mod, operator.imod) and type(operands[0]) is str:
        return Text.of(operator.mod, *operands)
    if function in (operator.invert, operator.inv) and kinds == {torch.SymInt}:
        return -operands[0] - 1
    if function in _POWERS and kinds <= _REAL and _is_refused(*operands):
        return function(*map(concrete, operands))
    if function is operator.not_ and kinds == {torch.SymBool}:
        return torch.sym_not(operands[0])  # type: ignore[no-untyped-call]
    if function in _EXTREMES and are_unbacked(operands) and not named:
        return functools.reduce(_EXTREMES[function], operands)
    with contextlib.suppress(TypeError):  # what a SymInt does not know, such as ~: an int may
        found = function(*operands, **named)
        if type(found) is torch.SymBool and not found.node.is_pending():
            return found.node.guarded()
        size = size_of(found) if type(found) is torch.SymInt else None
        if size is None or fits(found.node.env, size):
            return found
    return function(*map(concrete, operands), **concrete(named))


def _is_refused(base: Any, exponent: Any) -> bool:
    """Whether torch refuses a power (but for natural exponents none below 0), or no size has it."""
    if isinstance(exponent, (float, torch.SymFloat)) or exponent < 0:
        return bool(base < 0)
    return type(base) is torch.SymInt and bool(exponent > 63)


_POWERS = (operator.pow, operator.ipow)
_REAL = {int, float, bool, torch.SymInt, torch.SymFloat}
_EXTREMES: dict[Any, Any] = {max: torch.sym_max, min: torch.sym_min}


def was_unbacked(x: Any) -> bool:
    """Whether only data knew `x` before a call told: which raises where that does not hold."""
    node = x.node if type(x) is torch.SymInt else None
    return type(node) is SizeNode and bool(node.env.data.of(node.size))


def sizes_in(x: Any) -> dict[int, Size]:
    """By id, what the open integers among arguments are, as far as is known now."""
    found = ((id(n), size_of(n)) for n in leaves(x) if type(n) is torch.SymInt)
    return {key: size for key, size in found if size is not None}


def are_unbacked(numbers: Iterable[Any]) -> bool:
    """Whether these are integers, of which only data knows one."""
    open_ones = [x for x in numbers if type(x) is not int]
    return all(type(x) is torch.SymInt for x in open_ones) and any(map(is_unbacked, open_ones))


class Symbols:
    """The symbols of one capture.

    env      answers questions about them
    origins  where each comes from
    dims     the sizes that torch.export's Dims stand for, by name
    shown    where each unbacked one is read: a tensor, and its axis; None: in a list of integers
             that is the tensor, at the place `places` says
    """

    def __init__(self, where: Callable[[], str], mode: Any) -> None:
        self.env = ShapeEnv(where)
        self.env.data.is_asked, self.env.data.refuse = True, self._refuse
        self.env.computed, self._computed = self._compute, dict[Any, Any]()
        self.mode, self._found = mode, dict[Any, ComputedAt]()
        self.dims: dict[str, Any] = {}
        self.groups: dict[str, tuple[Any, Origin]] = {}  # of sizes that are equal, the first
        self.origins: dict[Symbol, Origin] = {}
        self.shown: dict[Symbol, tuple[torch.Tensor, int | None]] = {}
        self.places: dict[Symbol, int] = {}
        self.elements: dict[tuple[int, int], Any] = {}  # by id of what holds them, and place
        self.ends: dict[Symbol, int | None] = {}  # the greatest value, where there is one
        self.strict: set[Symbol] = set()  # marked: the program may not make constants of them
        self._programs: set[int] = set()  # relations that it relied on, by id

    def closed(self) -> Symbols | None:
        """These, once the capture is over; None if there are none."""
        self.env.where, self.env.is_over = str, True  # a backend's questions have no line
        self._programs = {*map(id, self.env.relations)}
        self.env.data.is_asked, self.env.data.refuse = False, refuse
        return self if self.origins or self.env.data.made else None

    def _refuse(self, asked: Any) -> NoReturn:
        made, unknown = self.env.data.made, self.env.data.of(asked.a, asked.b)
        if marked := [str(self.origins[s]) for s in unknown if s not in made]:
            needed = in_words(asked.a, self.origins)
            if asked.op:
                needed = f"whether {needed} {asked.op} {in_words(asked.b, self.origins)}"
            found = Forbidden(
                f"{', '.join(marked)} is marked as unbacked, and the program needs {needed}",
                "torch._check() before, of what always holds there, or mark_dynamic",
            )
            found.kind = ConstantSizeError
            raise found
        lines = {s: source_line(made[s]) for s in unknown if made[s]}
        raise GraphBreak(
            f"the program needs to know {asked.asked}, which only the data tells"
            + "".join(f"; {s} is a size, or a number, of {line}" for s, line in lines.items()),
            "compute on tensors (torch.where)"
            + f", or torch._check({asked}) before, if that always holds" * bool(asked.op),
        )

    @contextlib.contextmanager
    def within_torch(self) -> Iterator[None]:
        """Inside, torch asks about sizes, not the program."""
        self.env.data.is_asked, before = False, self.env.data.is_asked
        try:
            yield
        finally:
            self.env.data.is_asked = before

    def look(self, out: Any, first: int) -> None:
        """Note where the unbacked symbols from number `first` on show in the result of a call."""
        new = {s for k, s in enumerate(self.env.data.made) if k >= first}
        for x in tensors_in(out) if new else ():
            sizes: Iterable[Any] = x.shape
            for axis, n in enumerate(sizes):
                symbol = only_symbol(size_of(n)) if type(n) is torch.SymInt else None
                if symbol is not None and symbol in new:
                    self.shown.setdefault(symbol, (x, axis))

    def check_sizes(self, expects: Callable[[Any], bool]) -> None:
        """Let the graph check what torch's code has guessed of sizes and numbers in a call."""
        found = self.env.data.as_sizes
        while found:
            holds: Any = torch.SymBool(BoolNode(self.env, *found.pop()))  # type: ignore[no-untyped-call]
            if not expects(holds):
                raise GraphBreak(
                    f"whether {holds.node} shows only in the data, and sizes hang on it",
                    "torch._check() it before, in a graph that writes to none of its inputs",
                )

    def element(self, values: torch.Tensor, place: int) -> Any:
        """The integer at a place of a list, which the graph gives."""
        if (key := (id(values), place)) not in self.elements:
            info = torch.iinfo(values.dtype)
            self.mode.cache_enabled = False
            self.elements[key] = size = self.env.data.new(info.min, info.max)
            (symbol,) = symbols(size)
            self.shown[symbol], self.places[symbol] = (values, None), place
        return wrapped(self.env, self.elements[key])

    @staticmethod
    def of(x: Any) -> list[Symbol]:
        """The symbols in an open number, or in the sizes and strides of a tensor."""
        numbers = (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else (x,)
        sizes = (size_of(n) for n in numbers if type(n) is torch.SymInt)
        return [*dict.fromkeys(s for a in sizes if a is not None for s in symbols(a))]

    @staticmethod
    def told_by(x: Any) -> list[Symbol]:
        """The symbol that an open number is, or those that sizes of a tensor are."""
        numbers = x.shape if isinstance(x, torch.Tensor) else (x,)
        found = (only_symbol(size_of(n)) for n in numbers if type(n) is torch.SymInt)
        return [symbol for symbol in found if symbol is not None]

    def _sizes(self, x: Any) -> list[Size]:
        """What an open number is computed from."""
        left, sizes = [x.node], list[Size]()
        while left:
            node = left.pop()
            if isinstance(node, FloatNode):
                left += [y for y in node.operands if isinstance(y, Node)]
            elif isinstance(node, AllNode):
                left += node.parts
            elif isinstance(node, BoolNode):
                sizes += [node.a, node.b] if node.op else []
            else:
                sizes.append(self.env.simplified(node.size))
        return sizes

    def unbacked(self, x: Any) -> list[Symbol]:
        """The symbols that are to be read for an open number after the graph."""
        made = self.env.data.made
        return [s for s in dict.fromkeys(self.env.data.of(*self._sizes(x))) if s in made]

    def written(self) -> tuple[Any, ...]:
        """What is left of a capture that is over, as values; `read` makes these again."""
        return self.origins, self.ends, self.strict, self.env.state()

    @classmethod
    def read(cls, origins: Any, ends: Any, strict: Any, env: Any) -> Symbols:
        made = cls(str, None)
        made.origins, made.ends, made.strict = origins, ends, strict
        made.env.be(*env)
        made.closed()
        return made

    def moved(self, at: Callable[[Origin], Origin]) -> Symbols:
        """The same, from other origins."""
        made = copy.copy(self)
        made._found = {}
        made.origins = {symbol: at(origin) for symbol, origin in self.origins.items()}
        return made

    def place(self, x: Any) -> Origin | None:
        """Where an open number is from; None for one that was computed."""
        symbol = only_symbol(size_of(x)) if type(x) is torch.SymInt else None
        return None if symbol is None else self.origins.get(symbol)

    def words(self, x: Any) -> frozenset[str]:
        """The numbers from outside that an open number is computed from, in words."""
        found = (self.origins.get(s) for a in self._sizes(x) for s in symbols(a))
        return frozenset(map(str, filter(None, found)))

    def origin(self, x: Any) -> Origin:
        """Where the symbol comes from that an open number is."""
        (symbol,) = symbols(x.node.size)
        return self.origins[symbol]

    def load(self, number: int, origin: Origin, lo: int, hi: int | None, mark: Mark) -> Any:
        """The open number for one from outside, which is `lo` to `hi` in all calls."""
        self.mode.cache_enabled = False  # whose keys know torch's own symbols alone
        name = self.env.data.next_name() if mark.unbacked else f"s{len(self.origins)}"
        found = self.env.symbol(name, number, lo, hi)
        (symbol,) = symbols(found.node.size)
        if mark.is_strict:
            self.strict.add(symbol)
        if mark.unbacked:
            self.env.data.marked.add(symbol)
        self.origins[symbol] = origin
        self.ends[symbol] = hi
        return found

    def fake(
        self,
        x: torch.Tensor,
        fact: TensorFact,
        origin: Origin,
        varies: Varying,
        whole: torch.Tensor,
    ) -> tuple[torch.Tensor, TensorFact, list[tuple[Origin, Relation]]]:
        """The stand-in for a tensor some of whose sizes vary, and the facts about it.

        `fact` is what is known if none does; `whole` the tensor that is marked: of a subclass `x`
        is the plain one.

        Strides that are products of inner sizes stay such products; others may vary by themselves.
        """
        sizes: list[Any] = [*x.shape]
        marked = varies.marks(whole)
        for axis, n in enumerate(x.shape):
            place = SizeOf(origin, axis)
            mark = marked.get(axis) or varies.mark(place, n > 1 and varies(place, n))
            if mark.is_strict and n < 2 and axis not in marked:
                raise ConstantSizeError(
                    f"{place} is declared as dynamic, and is {n} in the example: a constant",
                    remedy="export with a larger one",
                )
            if n > (not mark.unbacked) and mark.dynamic:
                is_derived = hasattr(mark.dim, "root")  # whose ends these are
                low, high = (None, None) if is_derived else (mark.min, mark.max)
                if n < (low or 0) or (high is not None and n > high):
                    raise ConstantSizeError(
                        f"{place} is {n}, and marked as dynamic with min={low}, max={high}",
                        remedy="mark it with a range that has all of its sizes",
                    )
                sizes[axis] = self.load(n, place, max(1, low or 0), high, mark)
                if mark.dim is not None:
                    self._declare(mark, sizes[axis], place)
                if mark.group is not None:
                    self._unite(mark.group, sizes[axis], place)

        def own(axis: int) -> Any:
            step, place = x.stride(axis), StrideOf(origin, axis)
            is_fixed = axis in marked and not marked[axis].dynamic
            is_symbol = step > 1 and not is_fixed and varies(place, step)
            return self.load(step, place, 2, None, Mark(True)) if is_symbol else step

        strides = self._strides(x, sizes, own)
        if not any(map(is_open, (*sizes, *strides))):
            return fake_of(self.mode, x), fact, []
        strided: list[tuple[Origin, Relation]] = []
        for axis, step in enumerate(strides):
            if is_open(step) and not isinstance(self.place(step), StrideOf):
                found = StrideOf(origin, axis)
                stride = Symbol(f"stride {axis}", hint=x.stride(axis))
                origins = {**self.origins, stride: found}
                strided.append((found, Relation(stride.expr, "==", step.node.size, origins)))
        known = fact._replace(
            size=tuple(None if is_open(n) else n for n in sizes),
            stride=tuple(None if is_open(n) else n for n in strides),
        )
        return fake_of(self.mode, x, sizes, strides), known, strided

    def _declare(self, mark: Mark, size: Any, place: Origin) -> None:
        """Let a size be what its torch.export.Dim says: that of a name, or linear in that."""
        root = getattr(mark.dim, "root", mark.dim)
        of_root = getattr(mark.dim, "fn", operator.pos)
        step, least = of_root(1) - of_root(0), of_root(0)
        is_so = bool((size - least) % step == 0)
        value = self.dims.setdefault(root.__name__, (size - least) // step)
        if root is not mark.dim:
            is_so = is_so and (mark.min is None or bool(value >= mark.min))
            is_so = is_so and (mark.max is None or bool(value <= mark.max))
        if not (is_so and bool(size == of_root(value))):
            raise OptionError(
                f"{place} is {size.node.hint}, and not what {mark.dim!r} says: {root.__name__} is"
                f" {value.node.hint}",
                did="stopped before running anything",
                remedy="give examples whose sizes are so, or another Dim",
            )

    def _unite(self, group: str, size: Any, place: Origin) -> None:
        """Let a size be that of the others that are marked with the same `shape_id`."""
        first = self.groups.setdefault(group, (size, place))
        if not self.env.data.require(known_size(size), "==", known_size(first[0])):
            raise OptionError(
                f"{place} is {size.node.hint}, and {first[1]} of the same shape_id {group!r} is"
                f" {first[0].node.hint}",
                did="stopped before running anything",
                remedy="mark sizes with one shape_id that are always equal",
            )

    def _strides(self, x: torch.Tensor, sizes: list[Any], own: Callable[[int], Any]) -> list[Any]:
        """The strides; one that is as long as what lies inside of it is that product, another is
        what `own` says of its axis."""
        steps: list[Any] = [*x.stride()]
        inside: dict[int, Any] = {}  # the product by its value in this call
        for k in sorted(range(x.dim()), key=lambda k: (x.shape[k] == 1, steps[k], x.shape[k])):
            step = steps[k]
            if step not in inside:
                inside[step] = own(k)
            steps[k] = inside[step]
            inside[step * x.shape[k]] = steps[k] * sizes[k]
        return steps

    def _compute(self, function: Callable[..., int], operands: Args) -> SizeNode | bool | None:
        """What Python makes of sizes before the graph, where no size says it: a symbol, or an
        answer, on which the graph relies.

        None for numbers that torch asks for, which a backend asks again, and what only data knows.
        """
        written = WrittenSteps(self.env.simplified)
        written.step(function, operands)
        given = (*written.places,)
        if not given or written.left < 0 or self.env.data.of(*(s.expr for s in given)):
            return None
        how: Any = written.computation()
        if (key := (how, *given)) not in self._computed:
            try:
                number = how(tuple(symbol.hint or 0 for symbol in given))
            except (ArithmeticError, ValueError):
                return None
            text, is_asked = how.words([*map(str, given)]), self.env.data.is_asked
            if type(number) is bool:
                self.env.written.append(Predicate(how, text, given, number, self.env.where()))
            elif is_asked and fits_double(number):
                ends = (0 if number >= 0 else 1 - 2**48), 2**48 - 1
                number = self.load(number, self._at(how, given, text), *ends, Mark(True)).node
            else:
                return None
            self._computed[key] = number
        is_given = type(self._computed[key]) is bool or self.env.data.is_asked
        return self._computed[key] if is_given else None

    def _at(self, how: Any, given: tuple[Symbol, ...], text: str) -> ComputedAt:
        """Where it is found what a function gives for symbols; `text` says it by their names."""
        if (key := (how, given)) not in self._found:
            of = Several(tuple(self.origins[symbol] for symbol in given))
            names = dict(zip(map(str, given), map(str, of.parts)))
            words = re.sub(r"\w+", lambda name: names.get(name[0], name[0]), text)
            self._found[key] = ComputedAt(of, how, words)
        return self._found[key]

    # ---------------------------------------------------------------------- in a graph

    def node(self, x: Any, recorder: Any) -> Any:
        """What a graph has for an open number: nodes that compute it from the symbols'."""
        if type(x) is torch.SymBool:
            return self.comparison(x.node, recorder) if x.node.is_pending() else x.node.guarded()
        if type(x) is torch.SymFloat:
            return self._float(x.node, recorder)
        return self.size_node(size_of(x), recorder)

    def comparison(self, node: Any, recorder: Any) -> fx.Node:
        """What compares two sizes, even if what is known by now answers it."""
        call = recorder.graph.call_function
        if isinstance(node, AllNode):
            parts = (self.comparison(part, recorder) for part in node.parts)
            return functools.reduce(lambda a, b: call(operator.and_, (a, b)), parts)
        sizes = tuple(self.size_node(n, recorder) for n in (node.a, node.b))
        return call(COMPARISONS[node.op], sizes)  # type: ignore[no-any-return]

    def _float(self, node: Any, recorder: Any) -> Any:
        if not isinstance(node, FloatNode):
            return self.size_node(self.env.simplified(node.size), recorder)
        if node.function is float and not isinstance(node.operands[0], Node):
            return node.value
        operands = tuple(self._float(x, recorder) for x in node.operands)
        made = recorder.graph.call_function(_FLOATS.get(node.function, node.function), operands)
        made.meta["example_value"] = torch.SymFloat(node)  # type: ignore[no-untyped-call]
        return made

    def size_node(self, a: Size | None, recorder: Any) -> Any:
        assert a is not None
        if isinstance(a, int):
            return a
        found = {s.name: recorder.symbol_node(s, wrapped(self.env, s.expr)) for s in symbols(a)}
        nodes, tracer = recorder.graph.nodes, fx.proxy.GraphAppendingTracer(recorder.graph)
        last = next(iter(reversed(nodes)))
        known = {name: fx.Proxy(node, tracer) for name, node in found.items()}
        with without_function_modes():  # the recorder's would be asked for min and max
            made: fx.Node = computed_from(a, known).node
        new = itertools.takewhile(lambda node: node is not last, reversed(nodes))
        for node in [*new][::-1]:
            shown = fx.map_arg(node.args, lambda x: x.meta["example_value"])
            node.meta["example_value"] = node.target(*shown)
        return made

    # ---------------------------------------------------------------------- after the graph

    def source(self, node: Any, source: Source, read: Mapping[Symbol, str]) -> str:
        """Python that gives an open number after the graph; `read`: of its unbacked symbols."""

        def text(a: Size) -> str:
            return size_source(self.env.simplified(a), self.origins, source, read)

        if node.kind is bool and not node.is_pending():
            return repr(node.guarded())
        if isinstance(node, AllNode):
            return " and ".join(self.source(x, source, read) for x in node.parts)
        if node.kind is bool:
            return f"{text(node.a)} {node.op} {text(node.b)}"
        if not isinstance(node, FloatNode):
            return text(node.size)
        if not isinstance(node.operands[0], Node):
            return source.constant(node.value)
        operands = ", ".join(self.source(x, source, read) for x in node.operands)
        return f"{source.constant(node.function)}({operands})"

    def facts(self) -> Iterable[tuple[Origin, Relation | bool, str]]:
        """What was relied on, as facts about one of the symbols each.

        raises   ConstantSizeError where that makes a constant of a marked size
        """
        for symbol, origin in self.origins.items():
            if symbol.lo > 1 or not isinstance(origin, SizeOf):  # else the tensor's fact says so
                yield origin, Relation(symbol.expr, ">=", symbol.lo, self.origins), ""
            if (most := self.ends[symbol]) is not None:
                yield origin, Relation(symbol.expr, "<=", most, self.origins), ""
        for asked in self.env.relations:
            related = Relation(asked.a, asked.op, asked.b, self.origins)
            if (fixed := related.fixes()) is not None and fixed in self.strict:
                who = self._asker(asked)
                raise ConstantSizeError(
                    f"{self.origins[fixed]} is marked as dynamic, and {who} needs {related}",
                    where=source_line(asked.where) if asked.where else None,
                    remedy="do not ask for its value there, or use maybe_mark_dynamic",
                )
            yield self.origins[related.symbols[0]], related, asked.where
        for one in self.env.written:
            yield self._at(one.holds, one.symbols, one.text), one.answer, one.where

    def _asker(self, asked: Any) -> str:
        return "the program" if id(asked) in self._programs else self.env.asker

    def told(self) -> Iterable[str]:
        """Each symbol with its range, and what was relied on with the user's line."""
        for symbol, origin in self.origins.items():
            low, high = symbol.lo, self.ends[symbol]
            known = f"{low} <= {symbol}" if high is None else f"{low} <= {symbol} <= {high}"
            yield f"{symbol} = {origin}: {symbol.hint} in this call, {known}"
        for asked in self.env.relations:
            related = Relation(asked.a, asked.op, asked.b, self.origins)
            fixed = related.fixes()
            what = f"{related}" if fixed is None else f"{fixed} is made a constant: {related}"
            yield f"{what}   ({self._told_by(self._asker(asked), asked.where)})"
        for one in self.env.written:
            what = f"{'' if one.answer else 'not '}{self._at(one.holds, one.symbols, one.text)}"
            yield f"{what}   ({self._told_by(self.env.asker, one.where)})"

    def _told_by(self, who: str, where: str) -> str:
        asked = "" if who == "the program" else f"asked by {who}"
        return ": ".join(filter(None, (asked, source_line(where))))


_FLOATS = {float: torch.sym_float, math.sqrt: torch._sym_sqrt}  # type: ignore[attr-defined]
