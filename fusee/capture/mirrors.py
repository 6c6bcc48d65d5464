"""What the program makes of containers and iterators from outside, before it is done to them."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import torch

from fusee.capture.frame import ABSENT, Line
from fusee.capture.sources import Origin


class Opened:
    """An iterator from outside that the program goes through.

    asked     how often it was asked for the next element alone
    stand_in  what gives all others, once they are needed; `size` is how many those were
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.asked = 0
        self.stand_in: Any = None
        self.size = 0


class Later(NamedTuple):
    """A call that comes after the graph, as if from these lines, the outermost first."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lines: list[Line]


class Mirror:
    """What becomes of one list, dict, set or deque from outside, or of an instance's attributes.

    writes   items of a dict that the program wrote before anybody looked at the whole
    moved    those of them that were deleted before, so that they come last
    tail     what was appended to a list before anybody looked at the whole
    copy     the whole, once somebody did; `before` is what it was then
    reader   of a deque's copy: an iterator, which knows whether that has moved elements
    """

    __slots__ = ("before", "copy", "moved", "obj", "origin", "reader", "tail", "writes")

    def __init__(self, obj: Any, origin: Origin) -> None:
        self.obj = obj
        self.origin = origin
        self.writes: dict[Any, Any] = {}
        self.moved: set[Any] = set()
        self.tail: list[Any] = []
        self.copy: Any = None
        self.before: Any = None
        self.reader: Any = iter(())

    def is_changed(self) -> bool:
        if self.copy is None:
            return bool(self.writes or self.tail)
        return self.has_moved() or not _same_items(self.copy, self.before)

    def has_moved(self) -> bool:
        """Of a deque: whether who goes through it is to hear that it has changed."""
        try:
            next(self.reader, None)
        except RuntimeError:
            return True
        return False

    def gave_up(self, x: Any) -> bool:
        """Whether `x` was here, and it or something else was changed."""
        was = self.before if self.copy is not None else self.obj
        held = was.values() if isinstance(was, dict) else was
        return self.is_changed() and any(item is x for item in held)

    def has_other_keys(self) -> bool:
        """Of a dict: whether it has not the same keys in the same order any more."""
        if self.copy is None:
            return bool(self.moved) or any(
                value is ABSENT or not dict.__contains__(self.obj, key)
                for key, value in self.writes.items()
            )
        return [*map(id, self.copy)] != [*map(id, self.before)]


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        # keys by identity: a tensor may be one, whose == is no answer
        return [*map(id, a)] == [*map(id, b)] and all(
            x is y for x, y in zip(a.values(), b.values())
        )
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def dict_class(obj: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class in C that keeps the items of a dict."""
    ordered = isinstance(obj, collections.OrderedDict)
    return collections.OrderedDict if ordered else dict


def is_alone(x: Any) -> bool:
    """Whether `x` is the same as itself alone, for dicts and sets."""
    methods: Any = type(x).__eq__, type(x).__hash__
    return isinstance(x, torch.Tensor) or methods == (object.__eq__, object.__hash__)


def keys_of(obj: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(dict_class(obj).keys(obj))


def pairs_of(obj: dict[Any, Any]) -> Any:
    """Keys with their values, in the order in which the dict has them."""
    return dict_class(obj).items(obj)


def items_of(obj: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(dict_class(obj).values(obj))


def empty_like(obj: Any) -> Any:
    """An empty container of the same class; what its constructor would do is left out."""
    kind: Any = type(obj)
    if kind is collections.defaultdict:
        return collections.defaultdict(obj.default_factory)
    if kind is collections.deque:
        return collections.deque(maxlen=obj.maxlen)
    return kind.__new__(kind)


def snapshot(x: Any) -> Any:
    """The elements of a container as they are now."""
    if isinstance(x, dict):
        return dict(pairs_of(x))
    return set(x) if isinstance(x, set) else list(x)
