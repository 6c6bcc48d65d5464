"""Functions: their arguments, those written as Python source, tables that they enter; and dtypes of
16 bits."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

Args = tuple[Any, ...]  # of a call
Kwargs = dict[str, Any]
Function = Callable[..., Any]

HALVES = (torch.bfloat16, torch.float16)


class SymbolPlace(Protocol):
    """Where a symbol is read: input `index`, or the size of one of its axes."""

    @property
    def index(self) -> int: ...
    @property
    def axis(self) -> int | None: ...
    @property
    def unbacked(self) -> Any: ...


class NodeGraph(fx.Graph):
    """fx's, whose nodes take two thirds of the time: fx looks for open sizes in what it is given at
    once, and makes a name of each target anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names: dict[Any, str] = {}

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:  # fmt: skip
        if name is None and type(target) is str and target.islower() and target[0] != "_":
            name = target  # a placeholder's, most often, which no other node has
        elif name is None and (name := self._names.get(target)) is None:
            name = self._names[target] = self._target_to_str(target)
        node = super().create_node(op, target, None, None, name, type_expr)
        give(node, args or (), kwargs or {})
        return node


def give(node: fx.Node, args: Args, kwargs: Kwargs) -> None:
    """Arguments for a node. fx's own assignment takes a node out of its index and in again, which
    knows nodes by what they call."""
    if args:
        object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)


class HostFunction(Protocol):
    """What runs a compiled graph.

    is_alone   whether it calls nothing of torch's that autograd or autocast would see
    """

    is_alone: bool

    def __call__(self, *inputs: Any) -> Sequence[Any]: ...


def define(source: str, function: str, title: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a text.

    title   what tracebacks call the text; its lines are never the user's (errors.GENERATED)
    names   its globals
    """
    space = dict(names)
    exec(compile(source, f"<fusee {title}>", "exec"), space)
    found: Callable[..., Any] = space[function]
    return found


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The same function, some of whose globals are others."""
    made: Any = function
    return types.FunctionType(made.__code__, {**made.__globals__, **names}, made.__name__)


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from a sequence to what it has at these places, without a frame of Python's."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first, *_ = places or (0,)
    return operator.itemgetter(slice(first, first + len(places) if first >= 0 else None))


def leaves(x: Any) -> list[Any]:
    """What tuples, lists and dicts within one another hold, in order; `x` itself if it is none."""
    if not isinstance(x, _NESTED):
        return [x]
    found: list[Any] = []
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, _NESTED):
            found += leaves(item)
        else:
            found.append(item)
    return found


_NESTED = (tuple, list, dict)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors among these."""
    return [x] if type(x) is Tensor else [y for y in leaves(x) if isinstance(y, Tensor)]


def mapped(x: Any, part: Callable[[Any], Any]) -> Any:
    """Tuples, lists, dicts and slices with what `part` gives for all that they hold.

    A tuple of a class of its own is what others hold.
    """
    if isinstance(x, list):
        return [mapped(item, part) for item in x]
    if type(x) in (tuple, torch.Size):
        return tuple([mapped(item, part) for item in x])
    if isinstance(x, dict):
        return {key: mapped(item, part) for key, item in x.items()}
    if isinstance(x, slice):
        return slice(*(mapped(end, part) for end in (x.start, x.stop, x.step)))
    return part(x)


def listed(items: Iterable[object]) -> str:
    """A tuple as text, of one too: `(a, b, )`."""
    return "(" + "".join(f"{item}, " for item in items) + ")"


class HostSource:
    """One function, line by line, and the objects that it names."""

    def __init__(
        self,
        name: str,
        parameters: str,
        input: Callable[[int], str] = "inputs[{}]".format,
        **names: Any,
    ) -> None:
        """input   what an input is called, by its number; names   the function's globals"""
        self.name, self.input = name, input
        self.lines = [f"def {name}({parameters}):"]
        self.names = names

    def add(self, *lines: str) -> None:
        """Lines of the body; one level of indentation is added."""
        self.lines += [f"    {line}" for line in lines]

    def read_symbols(
        self, symbols: Mapping[str, SymbolPlace], result: Callable[[int], str] | None = None
    ) -> None:
        """The value of each symbol in this call, by its name.

        result   what a result is called, by its number; None: results are not there yet
        """
        for name, place in symbols.items():
            of, itself = (self.input, "") if place.unbacked is None else (result, ".item()")
            if of is not None:
                axis = itself if place.axis is None else f".size({place.axis})"
                self.add(f"{name} = {of(place.index)}{axis}")

    def hold(self, name: str, value: Any) -> str:
        """The name that an object gets."""
        self.names[name] = value
        return name

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"

    def function(self, title: str) -> Callable[..., Any]:
        """The function that this is."""
        return define(str(self), self.name, title, self.names)


# ---------------------------------------------------------------------------- rules
# Tables of functions that are entered where they are defined: one place for each.


K = TypeVar("K")
F = TypeVar("F", bound=Callable[..., Any])


class Rules(dict[K, F]):
    """A function for each key."""

    def rule(self, *keys: K, **given: Any) -> Callable[[F], F]:
        """Enter the decorated function under these keys; `given`: with these arguments."""

        def enter(function: F) -> F:
            entered: Any = functools.partial(function, **given) if given else function
            self.update(dict.fromkeys(self.meant(*keys), entered))
            return function

        return enter

    def rule_of_each(self, *keys: K) -> Callable[[F], F]:
        """The same, of a function that takes the key before all else."""

        def enter(function: F) -> F:
            made: Any = functools.partial
            self.update((key, made(function, key)) for key in self.meant(*keys))
            return function

        return enter

    def meant(self, *keys: K) -> Iterable[K]:
        """The keys that these stand for."""
        return keys


def overload(name: str) -> Any:
    """`add.Tensor` -> aten.add.Tensor, `relu` -> aten.relu.default; others' are `space::op`."""
    space, _, own = name.rpartition("::")
    packet, _, kind = own.partition(".")
    return getattr(getattr(getattr(torch.ops, space or "aten"), packet), kind or "default")


def overloads(names: str) -> list[Any]:
    return [overload(name) for name in names.split()]


class OpRules(Rules[Any, F]):
    """A function for each overload of an operator; several may be named in one text."""

    def meant(self, *keys: Any) -> list[Any]:
        return [op for x in keys for op in (overloads(x) if type(x) is str else [x])]
