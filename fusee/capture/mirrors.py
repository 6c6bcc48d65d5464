"""What the program makes of containers, iterators and tensors from outside, before it is done to
them."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusee.capture.bytecode import Line, only_reads
from fusee.capture.frame import ABSENT, CONTAINERS, FIXED, is_scalar
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import DTYPES, Keys
from fusee.capture.sources import IN_C, Dict, Held, Origin, ResultOf, is_trusted
from fusee.capture.torch_api import FakeTensor, asks, no_torch_function
from fusee.source import Args, Kwargs


@dataclass(eq=False)
class Opened:
    """An iterator from outside that the program goes through.

    asked     how often it was asked for the next element alone
    stand_in  what gives all others, once they are needed; `size` is how many those were
    """

    iterator: Any
    asked: int = 0
    stand_in: Any = None
    size: int = 0


class Later(NamedTuple):
    """A call that comes after the graph, as if from these lines, the outermost first."""

    function: Any
    args: Args
    kwargs: Kwargs
    lines: list[Line]


@dataclass(slots=True, eq=False, repr=False)
class Mirror:
    """What becomes of one list, dict, set or deque from outside, or of an instance's attributes.

    writes   items of a dict that the program wrote before anybody looked at the whole
    moved    those of them that were deleted before, so that they come last
    tail     what was appended to a list before anybody looked at the whole
    copy     the whole, once somebody did; `before` is what it was then
    done     of a set: the calls that changed it, each a method and its arguments
    reader   of a deque's copy: an iterator, which knows whether that has moved elements
    """

    obj: Any
    origin: Origin
    writes: dict[Any, Any] = field(default_factory=dict)
    moved: set[Any] = field(default_factory=set)
    tail: list[Any] = field(default_factory=list)
    copy: Any = None
    before: Any = None
    done: list[tuple[Any, list[Any]]] = field(default_factory=list)
    reader: Any = field(default_factory=().__iter__)

    def is_changed(self) -> bool:
        if self.copy is None or isinstance(self.obj, set):
            return bool(self.writes or self.tail or self.done)
        if self.has_moved():
            return True
        now, before = self.now, self.before
        if isinstance(now, dict):
            # keys by identity: a tensor may be one, whose == is no answer
            if [*map(id, now)] != [*map(id, before)]:
                return True
            now, before = now.values(), before.values()
        return len(now) != len(before) or any(x is not y for x, y in zip(now, before))

    @property
    def now(self) -> Any:
        """What the copy holds, whatever its class shows of it."""
        return self.copy if type(self.copy) in CONTAINERS else snapshot(self.copy)

    def has_moved(self) -> bool:
        """Of a deque: whether who goes through it is to hear that it has changed."""
        try:
            next(self.reader, None)
        except RuntimeError:
            return True
        return False

    def gave_up(self, x: Any) -> bool:
        """Whether `x` was here, and it or something else was changed."""
        was = self.before if self.copy is not None else snapshot(self.obj)
        held = was.values() if isinstance(was, dict) else was
        return self.is_changed() and any(item is x for item in held)

    def has_other_keys(self) -> bool:
        """Of a dict: whether it has not the same keys in the same order any more."""
        if self.copy is None:
            return bool(self.moved) or any(
                value is ABSENT or not dict.__contains__(self.obj, key)
                for key, value in self.writes.items()
            )
        return [*map(id, self.now)] != [*map(id, self.before)]


class Itself:
    """An object that equals itself alone, whatever its class says."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.held is other.held


def in_order(world: Any, obj: Any) -> Any:
    """The copy of a set from outside that somebody goes through: its order is a fact, too.

    It hangs on all that was ever done to the set, so a copy that is changed has another.
    """
    copy, mirror = world.whole(obj), world.mirror(obj)
    if mirror.is_changed() or [*copy] != [*obj]:
        raise GraphBreak("the order of a set from outside, which a copy has not")
    world.gives(mirror.origin, tuple, "the order of ", tuple(obj))
    return copy


def read_order(world: Any, x: Any) -> None:
    """Note that the program sees the order of a set, or of the copy of one from outside."""
    world.passing.append("the order of a set")
    for mirror in [*world.mirrors.values()]:
        if x is mirror.copy or x is mirror.obj:
            in_order(world, mirror.obj)
    if id(x) in world.frozen:
        world.gives(world.frozen[id(x)], tuple, "the order of ", tuple(x))


def behind(x: Any) -> Any:
    """What a types.MappingProxyType shows, or `d.keys()` and the like."""
    return gc.get_referents(x)[0]


def class_of(world: Any, x: Any) -> Any:
    """The class whose `__dict__` this is, unless it is one that the program has made."""
    made = world.made_by.get(id(x)) if type(x) is types.MappingProxyType else None
    return None if made is None or made[1][0] in world.made_classes else made[1][0]


def shown_proxy(world: Any, x: Any) -> Any:
    """What C code may see of a mapping that nobody can write to: all of it is a fact then."""
    if (origin := world.origin(x)) is not None:
        place = ResultOf(origin, behind, "the mapping of ")
        shown = world.load(behind(x), world.one(place, "proxy", id(x)))
        if not isinstance(shown, dict):
            raise GraphBreak(f"a proxy of a {type(shown).__qualname__}")
        return types.MappingProxyType(world.whole(shown))
    if (cls := class_of(world, x)) is None:
        return x
    world.fact(Keys, world.class_place(cls), tuple(cls.__dict__))
    return types.MappingProxyType({name: world.class_item(cls, name) for name in cls.__dict__})


def show_address(world: Any, x: Any) -> None:
    """Note that the program sees where an object lies that it has made itself."""
    if world.addressed is None:
        raise GraphBreak("the address of an object that is made again after its graph")
    world.addressed.append(x)


def dict_class(obj: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class in C that keeps the items of a dict."""
    return collections.OrderedDict if isinstance(obj, collections.OrderedDict) else dict


def is_alone(x: Any) -> bool:
    """Whether `x` is the same as itself alone, for dicts and sets."""
    methods: Any = type(x).__eq__, type(x).__hash__
    return issubclass(type(x), torch.Tensor) or methods == (object.__eq__, object.__hash__)


def by_identity(x: Any) -> tuple[Any, ...]:
    """The objects that must be the same for what is told apart from `x` by its hash to be `x`."""
    if type(x) in (types.MethodType, types.BuiltinFunctionType):
        return x.__self__, getattr(x, "__func__", None)
    return (x,) * (is_alone(x) or getattr(type(x), "__hash__", None) is object.__hash__)


def is_key(x: Any) -> bool:
    """Whether == tells `x` from other keys of a dict, and nothing in it changes."""
    if type(x) in (tuple, frozenset):
        return all(map(is_key, x))
    return is_scalar(x) or isinstance(x, (*FIXED, *DTYPES))


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
    return next(base for base in kind.__mro__ if base.__flags__ & IN_C).__new__(kind)


def snapshot(x: Any) -> Any:
    """The elements of a container as they are now."""
    if isinstance(x, dict):
        return dict(pairs_of(x))
    if isinstance(x, set):  # set() looks at no method of its class
        return set(x)
    return [*(list if isinstance(x, list) else collections.deque).__iter__(x)]


class Lent(NamedTuple):
    """What stands for a part of what a function with a cache keeps, with its contents so far."""

    made: Any
    real: Any
    has: list[Any]


def contents(x: Any) -> list[Any] | None:
    """What a tuple, list, dict or instance of an ordinary class holds; None for all else."""
    if type(x) in (tuple, list):
        return [*x]
    cls = type(x)
    is_ordinary = type(cls) is type and cls.__base__ is object and "__dict__" in cls.__dict__
    if is_ordinary and is_alone(x) and not hasattr(cls, "__del__"):
        x = object.__getattribute__(x, "__dict__")
    return [*x, *x.values()] if type(x) is dict else None


# ---------------------------------------------------------------------------- tensors
# Gradients, data, and attributes that programs put on tensors.
#
# The `grad` of one is a part of it like an attribute: None or a tensor, by a fact. What is written
# to it is replayed after the graph. Between two such reads only a backward pass could change it,
# and that is never inside of a graph.


def read_grad(m: Any, fake: torch.Tensor) -> Any:
    """`tensor.grad`."""
    world = m.world
    if m.modes or (id(fake) in world.seen and asks(m.kind_of(fake))):
        raise GraphBreak("the grad of a tensor whose class, or a mode, is asked about it")
    written = world.slots.get((id(fake), "grad"))
    if written is not None:
        return written[2]
    real, origin = world.inputs.get(id(fake), (None, None))
    if real is None or origin is None:
        if id(fake) in world.put_grads:
            return world.put_grads[id(fake)]
        if fake.requires_grad:
            raise GraphBreak("the grad of a tensor of the graph is the result of a backward pass")
        return None
    with no_torch_function(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that most such tensors have none
        grad = real.grad
    return world.load(grad, world.place(fake, "grad"))


def write_grad(m: Any, fake: torch.Tensor, value: Any) -> None:
    """`tensor.grad = value`."""
    if m.modes:
        raise GraphBreak("setting the grad of a tensor where a mode is asked about it")
    is_input = id(fake) in m.world.inputs
    with no_torch_function():  # autograd knows nothing of a plain one
        is_plain = not (fake.requires_grad or fake.is_inference())
    if id(fake) in m.world.seen or not (is_input or (is_plain and m.recorder.is_main)):
        raise GraphBreak("setting the grad of a tensor that the graph computes")
    if type(value) is FakeTensor:
        same = [(x.shape, x.dtype, x.device) for x in (fake, value)]
        if same[0] != same[1] or value.requires_grad or value is fake:
            raise GraphBreak("a grad unlike its tensor", "give it the tensor's size and dtype")
    elif value is not None:
        raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value)}")
    if is_input:
        m.world.set_slot(fake, "grad", value)
    else:
        m.world.put_grads[id(fake)] = value


def put_on(m: Any, fake: torch.Tensor) -> Mirror:
    """The Mirror of what programs put on a tensor, from outside or computed by the graph."""
    real, origin = m.world.inputs.get(id(fake), (None, None))
    if origin is not None:
        known: Mirror | None = m.world.mirrors.get(id(real.__dict__))
        return known or m.world.mirror(real.__dict__, Dict(origin))
    if id(fake) not in m.world.put_on:
        m.world.put_on[id(fake)] = made = Mirror({}, Held(fake, "attributes"))
        made.copy = {}
    found: Mirror = m.world.put_on[id(fake)]
    return found


def store_grad(m: Any, fake: torch.Tensor, name: str, value: Any) -> bool:
    """`tensor.requires_grad = value`, or `tensor.data = value` of what is its data; else False."""

    def lies(x: torch.Tensor) -> tuple[Any, ...]:
        memory = x.untyped_storage()._cdata
        return memory, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

    if id(fake) in m.world.seen or m.modes:
        return False
    with no_torch_function():
        is_leaf = fake.is_leaf
    if name == "requires_grad" and isinstance(value, bool) and is_leaf:
        m.recorder.call(torch.Tensor.requires_grad_, fake, value)
        return True
    if name != "data" or type(value) is not FakeTensor or id(value) in m.world.seen:
        return False
    # to the program it is the same tensor, with the other one's memory
    recorder, is_input = m.recorder, id(fake) in m.world.inputs
    with no_torch_function():
        if value is fake or lies(value) == lies(fake):
            return True
        is_odd = fake.device != value.device or (fake.requires_grad and not is_input)
        if is_odd or not recorder.is_main:
            raise GraphBreak("a tensor gets data unlike its own, or loses track of gradients")
        before = fake.detach().requires_grad_(fake.requires_grad)
    data = recorder.call(torch.Tensor.detach, value)
    if any(x is fake for x, *_ in recorder.turned):
        raise GraphBreak("a tensor that was turned in place gets the data of another")
    recorder.rebind(fake, before, data)
    if fake.requires_grad:  # and the graph would not give it any gradient
        recorder.leaves[id(fake)] = recorder.leaves[id(data)] = True
    if is_input:
        m.world.set_slot(fake, "data", data)
    with no_torch_function():
        fake.data = data
        recorder.renewed.setdefault(id(fake), fake._version)
    return True


# ---------------------------------------------------------------------------- iterators
# Iterators of C from outside: what they still have to give, and how they are moved on.
#
# A program that goes through one is given a stand-in over the elements that are left. Afterwards
# the real one is advanced by as many. Only what is copied without being moved is read like this.

_EMPTY: tuple[Any, ...] = ([], (), range(0), {}, {}.items(), {}.values(), set(), "", b"")
OF_SETS: type = type(iter(set()))
_DICTS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
# The classes of `d.items()` and the like.
VIEWS = tuple(type(view) for x in _DICTS for view in (x.keys(), x.values(), x.items()))
_PLAIN = (*(type(iter(x)) for x in _EMPTY), type(reversed([])))
# Those that are not made again: they know of what dict they are, and do not say it. A deque's are
# not read either: they do not say that it has changed.
_BACKWARDS: tuple[Any, ...] = ({}, {}.items(), {}.values())
_ONCE = type(iter(collections.OrderedDict())), *(type(reversed(x)) for x in _BACKWARDS)
_READ = (*_PLAIN, *_ONCE)

_OTHERS: tuple[Any, ...] = (enumerate, zip, map, filter, reversed)
ITERATORS: tuple[Any, ...] = (*_READ, *_OTHERS)


@dataclass(slots=True, eq=False, repr=False)
class Called:
    """A function of the program's for an iterator of C, which calls it on the machine.

    is_test   whether C code asks for the truth of what it gives; the function may be None then
    """

    m: Any
    function: Any
    is_test: bool = False

    def __call__(self, *row: Any) -> Any:
        found = self.m.call(self.function, *row) if self.function is not None else row[0]
        return self.m.truth(found) if self.is_test else found


@dataclass(slots=True, eq=False, repr=False)
class Stepping:
    """An iterator in Python for one of C, which asks the machine for each element."""

    m: Any
    iterator: Any

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.m.next(self.iterator)


@dataclass(slots=True, eq=False, repr=False)
class Indexed:
    """A sequence in Python for one of C's iterators, which asks the machine by number.

    end   its length, if the machine could not say that there is nothing more
    """

    m: Any
    sequence: Any
    end: int | None = None

    def __len__(self) -> int:
        return int(self.m.call(len, self.sequence))

    def __getitem__(self, k: int) -> Any:
        if k == self.end:
            raise IndexError
        return self.m.subscript(self.sequence, k)


@dataclass(slots=True, eq=False, repr=False)
class Begun:
    """A sequence for `reversed`, which asks it for its length at once: the program's own is asked
    for nothing until the iterator goes on, since what it is of may not be there before."""

    sequence: Any
    end: int

    def __len__(self) -> int:
        end, self.end = self.end, -1
        return len(self.sequence) if end < 0 else end

    def __getitem__(self, k: int) -> Any:
        return self.sequence[k]


# What says by `__reduce__` where it stands, up to Python 3.13.
LAZY: tuple[Any, ...] = (
    *_PLAIN, *_OTHERS, type(iter(Indexed(None, ()))), itertools.accumulate, itertools.starmap,
    itertools.takewhile, itertools.dropwhile,
    itertools.filterfalse, itertools.compress, itertools.islice, itertools.count, itertools.repeat,
    itertools.cycle, itertools.product, itertools.permutations, itertools.combinations,
    itertools.combinations_with_replacement, itertools.zip_longest,
)  # fmt: skip


# C functions that call what they are given, by its place among their arguments; -1: by name alone.
CALLING: dict[Any, int] = {
    map: 0, filter: 0, functools.reduce: 0, itertools.starmap: 0, itertools.takewhile: 0,
    itertools.dropwhile: 0, itertools.filterfalse: 0, itertools.accumulate: 1, itertools.groupby: 1,
    **dict.fromkeys((sorted, min, max, list.sort), -1),
}  # fmt: skip
CALLING_NAMES = ("func", "key")


def reduced(x: Any) -> tuple[Any, ...]:
    """What `__reduce__` gives; from 3.12 on it is deprecated to ask itertools."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(x.__reduce__())


def put_back(iterator: Any, state: Any) -> None:
    """Have an iterator stand where `reduced` said another of its kind stands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        iterator.__setstate__(state)


def is_finite_iterator(x: Any) -> bool:
    """Whether `x` is an iterator of C that can be copied and that ends."""
    if type(x) in (enumerate, zip):
        _, parts, *strict = reduced(x)
        is_read = all(map(is_finite_iterator, parts[:1] if type(x) is enumerate else parts))
        return is_read and not strict
    return type(x) in _READ


def remaining(iterator: Any) -> list[Any]:
    """The elements that an iterator still has; it stays where it is."""
    return list(_copied(iterator))


FEW = 4  # elements that a piece takes one by one: a loop that is parted goes round about once


def coming(iterator: Any) -> list[Any]:
    """The next elements, at most one more than FEW of them; it stays where it is."""
    return list(itertools.islice(_copied(iterator), FEW + 1))


def _copied(x: Any) -> Any:
    """A copy whose parts are copies, each once: zip(a, a) takes two in turn."""
    if type(x) in _READ:  # it has no parts, and is what most loops go through at each turn
        return copy.copy(x)
    copies: dict[int, Any] = {}
    for part in [*iterators_in(x)][::-1]:
        if id(part) not in copies:
            made, args = (copy.copy, (part,)) if type(part) in _READ else reduced(part)
            copies[id(part)] = made(*(copies.get(id(arg), arg) for arg in args))
    return copies[id(x)]


def meet(x: Any, others: Iterable[Opened]) -> bool:
    """Whether an iterator advances, or is, one that another one advances or is."""
    parts = {*map(id, iterators_in(x))}
    return any(id(part) in parts for one in others for part in iterators_in(one.iterator))


def iterators_in(x: Any) -> Iterator[Any]:
    """An iterator, and those that it advances, each behind the ones that advance it."""
    yield x
    if type(x) in (enumerate, zip):
        for part in reduced(x)[1]:
            if isinstance(part, ITERATORS):
                yield from iterators_in(part)


def gone_through(iterator: Any) -> list[tuple[Any, Any]]:
    """The containers that an iterator, or one of its parts, reads from, each with its reader."""
    found: list[tuple[Any, Any]] = []
    has_parts = type(iterator) in _OTHERS  # a zip refers to a tuple of them
    for part in reduced(iterator)[1] if has_parts else gc.get_referents(iterator):
        found += gone_through(part) if isinstance(part, ITERATORS) else [(iterator, part)]
    return found


def consumed(stand_in: Any, count: int) -> int:
    """How often a list's iterator that had `count` elements was asked; one more if it ended."""
    if stand_in is None:
        return 0
    _, _, *state = reduced(stand_in)
    return state[0] if state else count + 1


def advance(iterator: Any, count: int) -> None:
    """Ask an iterator `count` times."""
    for _ in range(count):
        next(iterator, None)


def _is_in_c(kind: Any) -> bool:
    """Whether it is a tuple's class as torch.return_types are, or time.struct_time."""
    return getattr(kind.__new__, "__self__", tuple) is not tuple


def new_tuple(kind: Any, items: Iterable[Any], beyond: dict[str, Any] | None = None) -> Any:
    """A tuple of a class, whatever that does when it is called."""
    if not _is_in_c(kind):
        return tuple.__new__(kind, items)
    return kind(items, beyond) if beyond else kind(items)


def beyond_items(x: tuple[Any, ...]) -> dict[str, Any]:
    """What it has that is none of its items, as time.localtime() has a zone."""
    kind: Any = type(x)
    if not _is_in_c(kind) or getattr(kind, "n_fields", 0) == getattr(kind, "n_sequence_fields", 0):
        return {}
    made: Any = x.__reduce__()
    found: dict[str, Any] = made[1][1]
    return found


# What the text of an exception tells is its arguments.
SHOW_ARGS = (BaseException.__str__, KeyError.__str__)


def shown_in(x: Any) -> tuple[Any, ...]:
    """The objects that the text of an object in C tells of, but for containers."""
    if isinstance(x, BaseException):
        return x.args if type(x).__str__ in SHOW_ARGS else ()
    if isinstance(x, functools.partial):
        return *x.args, *x.keywords.values()
    if isinstance(x, slice):
        return x.start, x.stop, x.step
    return tuple(vars(x).values()) if isinstance(x, types.SimpleNamespace) else ()


# ---------------------------------------------------------------------------- read once
# To run a `__getattribute__` again for each layer that reads `config.hidden_size` would give the
# same, under the same guards, as long as it only reads and nothing that it read was written to.

_IN_C = {super, isinstance, getattr, hasattr, vars(object)["__getattribute__"]}
_CALLABLE = type, types.BuiltinFunctionType, types.WrapperDescriptorType


class Mirrors(dict[int, Mirror]):
    """The mirrors of a world, by id of what they are of.

    read        those that what runs has asked for; None: nobody listens
    only_reads  whether the method that runs does no more
    given       by method, object and name: what it gave, and the mirrors that it had asked for
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Mirror] | None = None
        self.only_reads = False
        self.given: dict[tuple[Any, int, str], tuple[Any, list[Mirror]]] = {}

    def get(self, key: int, default: Any = None) -> Mirror | None:  # type: ignore[override]
        found: Mirror | None = super().get(key, default)
        if self.read is not None and found is not None:
            self.read.append(found)
        return found

    def __setitem__(self, key: int, mirror: Mirror) -> None:
        super().__setitem__(key, mirror)
        if self.read is not None:
            self.read.append(mirror)

    def called(self, function: Any, stand: Any) -> None:
        """A method that runs calls this; `stand` stands in for it."""
        if type(function) is types.FunctionType:
            is_known = stand is None and not is_trusted(function.__module__)
            is_known = is_known and only_reads(function.__code__)
        elif type(function) in _CALLABLE:
            is_get = type(getattr(function, "__self__", None)) is dict
            is_known = function in _IN_C or (is_get and function.__name__ == "get")
        else:
            is_known = type(function) is types.MethodType
        if not is_known:
            self.only_reads = False


def got(m: Any, method: Callable[..., Any], obj: Any, name: str) -> Any:
    """`method(obj, name)`, a method that is called `__getattribute__`."""
    mirrors: Mirrors = m.world.mirrors
    key, outer, outer_reads = (method, id(obj), name), mirrors.read, mirrors.only_reads
    value, known = mirrors.given.get(key, (None, None))
    try:
        if known is None or not _hold(m, known):
            mirrors.read = known = []
            mirrors.only_reads = True
            value = m.call(method, obj, name)
            is_outside = m.world.passed_from(obj) is not None
            if mirrors.only_reads and is_outside and is_scalar(value) and _hold(m, known):
                mirrors.given[key] = value, known
        return value
    finally:  # what an outer one reads
        mirrors.read, mirrors.only_reads = outer, mirrors.only_reads and outer_reads
        if outer is not None:
            outer += known or []


def _hold(m: Any, known: list[Mirror]) -> bool:
    """Whether nothing was written to what these show."""
    is_changed = any(x.copy is not None or x.writes or x.tail or x.done for x in known)
    return not is_changed and not m.world.slots
