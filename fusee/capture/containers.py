"""What stands in for C functions that iterate, collect, sort and copy: each step is the machine's.

C code that went through an iterable on its own would read what is outside without guards, and run
Python code of the program out of the machine's sight.
"""

from __future__ import annotations

import bisect
import builtins
import collections
import contextvars
import copy
import copyreg
import functools
import gc
import heapq
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fusee.capture import symbols
from fusee.capture.attributes import (
    AS_NUMBERS,
    COMPARED,
    Capturing,
    ask,
    by_c,
    of_instance,
    python_method,
)
from fusee.capture.builtins import BY_CODE, BY_TYPE, SPECIAL, say_later, stands_for, stands_for_each
from fusee.capture.dynamic import LOADERS, Computed, Number, compute, takes_late
from fusee.capture.effects import effects, written_by
from fusee.capture.frame import ABSENT, CONTAINERS, is_iterable, is_named, is_scalar
from fusee.capture.graph_break import GraphBreak, storages
from fusee.capture.guards import IdMatch, TypeMatch
from fusee.capture.mirrors import (
    CALLING,
    CALLING_NAMES,
    VIEWS,
    Called,
    Indexed,
    Lent,
    Stepping,
    behind,
    contents,
    dict_class,
    is_alone,
    is_finite_iterator,
    is_key,
    show_address,
)
from fusee.capture.sources import (
    IN_C,
    FoundBy,
    Held,
    KeyedItem,
    Origin,
    ResultOf,
    Several,
    SizeOf,
    at_key,
)
from fusee.capture.symbols import concrete, is_open
from fusee.capture.torch_api import STATE_SWITCHES, FakeTensor, no_torch_function, run_for_real
from fusee.source import Args

# ---------------------------------------------------------------------------- iteration


@stands_for(len)
def _len(m: Capturing, x: Any, /) -> Any:
    if (found := ask(m, x, "__len__")) is not ABSENT:
        return by_c(len, "__len__", concrete(found))
    if isinstance(x, CONTAINERS):
        return m.length(x)
    if type(x) is FakeTensor:
        if m.modes or id(x) in m.world.seen:  # which hear of it
            found = m.call(torch.Tensor.__len__, x)
            return by_c(len, "__len__", concrete(found))
        if x.dim():
            return x.shape[0]
    m.look((x,))
    return len(symbols.whole_text(x))


SPECIAL[iter] = lambda m, x, /, *end: iter(x, *end) if end else m.iterate(x)


@stands_for(next)
def _next(m: Capturing, iterator: Any, /, *default: Any) -> Any:
    try:
        return m.next(iterator)
    except StopIteration:
        if not default:
            raise
        return default[0]


def _iterable(m: Capturing, x: Any) -> Any:
    """An iterable that C code may go through."""
    if type(x) is FakeTensor or m.is_generator(x):
        return x
    iterator = m.iterate(x)
    if m.is_outside(iterator) and is_finite_iterator(iterator):
        return m.world.opened(iterator)
    is_python = python_method(m, iterator, "__next__") is not None
    return Stepping(m, iterator) if is_python else iterator


def in_turn(m: Capturing, x: Any) -> Stepping:
    """The elements of an iterable, each asked for when it is needed."""
    return Stepping(m, m.iterate(x))


@stands_for_each(
    list, tuple, set, frozenset, collections.deque, dict.fromkeys,
    collections.OrderedDict.fromkeys, collections.defaultdict.fromkeys,
)  # fmt: skip
def _collecting(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    if not args:
        return function(**kwargs)
    if type(args[0]) is function and function in (tuple, frozenset):
        return args[0]
    items = m.listed(args[0]) if function in (list, tuple) else m.items(args[0])
    if function is collections.deque:  # its length is C's
        args, kwargs = concrete(args), concrete(kwargs)
    elif function not in (list, tuple):
        items = m.hashed(items)
    return function(items, *args[1:], **kwargs)


def asks_within(m: Capturing, container: Any, item: Any) -> bool:
    """Whether C code that compares what a list or tuple holds would call methods in Python."""
    if type(container).__eq__ not in _BY_ITEMS:
        return False
    todo, seen = [container, item], set[int]()
    while todo:
        x = todo.pop()
        if type(x).__eq__ in _BY_ITEMS:
            todo += () if id(x) in seen else m.plain(x)
            seen.add(id(x))
        elif python_method(m, x, "__eq__") is not None:
            return True
    return False


_BY_ITEMS: Any = list.__eq__, tuple.__eq__


def same_items(m: Capturing, left: Any, right: Any) -> bool:
    """`left == right` of two lists or two tuples, in the order of C's code."""
    left, right = m.plain(left), m.plain(right)
    if isinstance(left, list) and len(left) != len(right):
        return False
    pairs = zip(left, right, strict=False)
    is_same = all(x is y or m.truth(m.compare("==", x, y)) for x, y in pairs)
    return is_same and len(left) == len(right)


@stands_for_each(any, all)
def _asked_in_turn(function: Any, m: Capturing, x: Any, /) -> bool:
    found: bool = function(m.truth(item) for item in _iterable(m, x))  # no further than needed
    return found


@stands_for(sum)
def _sum(m: Capturing, x: Any, /, start: Any = 0) -> Any:
    return functools.reduce(functools.partial(m.binary, 0), in_turn(m, x), start)


@stands_for(list.__new__, set.__new__, dict.__new__)
def _new_container(m: Capturing, cls: Any, /, *_: Any, **__: Any) -> Any:
    return next(base for base in cls.__mro__ if base.__flags__ & IN_C).__new__(cls)


@stands_for(tuple.__new__)
def _new_tuple(m: Capturing, cls: Any, items: Any = (), /) -> Any:
    return tuple.__new__(cls, m.items(items))


@stands_for_each(
    zip, map, filter, itertools.chain, itertools.product, itertools.accumulate, itertools.groupby,
    itertools.takewhile, itertools.dropwhile, itertools.filterfalse, itertools.starmap,
    itertools.compress, itertools.cycle, itertools.pairwise, itertools.zip_longest,
    itertools.permutations, itertools.combinations, itertools.combinations_with_replacement,
)  # fmt: skip
def _lazily(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    is_test = function in (filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile)

    def given(place: int | str, x: Any) -> Any:
        x = concrete(x) if is_open(x) else x
        if place == CALLING.get(function) or place in CALLING_NAMES:
            return Called(m, x, is_test) if is_test or x is not None else x
        is_number = is_scalar(x) and not isinstance(x, (str, bytes, range))
        return x if is_number or place in ("strict", "initial", "fillvalue") else _iterable(m, x)

    if function is itertools.accumulate and "func" not in kwargs and len(args) == 1:
        args = (*args, operator.add)
    kwargs = {name: given(name, x) for name, x in kwargs.items()}
    return function(*itertools.starmap(given, enumerate(args)), **kwargs)


SPECIAL[itertools.chain.from_iterable] = lambda m, x, /: itertools.chain.from_iterable(
    _iterable(m, part) for part in in_turn(m, x)
)


@stands_for(enumerate)
def _enumerate(m: Capturing, iterable: Any, start: Any = 0) -> Any:
    m.look((start,), AS_NUMBERS)
    return enumerate(_iterable(m, iterable), start)


@stands_for(itertools.islice)
def _islice(m: Capturing, x: Any, /, *ends: Any) -> Any:
    m.look(ends, AS_NUMBERS)
    ends = tuple(m.call(operator.index, x) if isinstance(x, Computed) else x for x in ends)
    return itertools.islice(_iterable(m, x), *map(concrete, ends))


@stands_for(functools.reduce)
def _reduce(m: Capturing, function: Any, x: Any, /, *start: Any) -> Any:
    if not is_iterable(x) or (type(x) is FakeTensor and not x.dim()):
        return functools.reduce(function, 0)  # type: ignore[call-overload]  # the TypeError
    return functools.reduce(functools.partial(m.call, function), in_turn(m, x), *start)


@stands_for(reversed)
def _reversed(m: Capturing, x: Any, /) -> Any:
    if (found := ask(m, x, "__reversed__")) is not ABSENT:
        return found
    is_python = python_method(m, x, "__getitem__") is not None
    if is_python and not hasattr(type(x), "__reversed__"):
        return reversed(Indexed(m, x))
    m.look((x,))
    return reversed(m.plain(x))


@dataclass(slots=True, eq=False, repr=False)
class _Key:
    """A value that C code sorts by comparing on the machine."""

    m: Capturing
    value: Any

    def __lt__(self, other: _Key) -> bool:
        return self.m.truth(self.m.compare("<", self.value, other.value))

    def __gt__(self, other: _Key) -> bool:
        return self.m.truth(self.m.compare(">", self.value, other.value))


def sort_key(m: Capturing, key: Any) -> Callable[[Any], Any]:
    """A key by which C code sorts as the program would."""
    return lambda x: _Key(m, x if key is None else m.call(key, x))


@stands_for(sorted)
def _sorted(m: Capturing, x: Any, /, *, key: Any = None, reverse: Any = False) -> list[Any]:
    return sorted(m.listed(x), key=sort_key(m, key), reverse=m.truth(reverse))


@stands_for_each(min, max)
def _extreme(function: Any, m: Capturing, *args: Any, key: Any = None, **default: Any) -> Any:
    if not args:
        return function()  # the TypeError
    items: Any = args if len(args) > 1 else in_turn(m, *args)
    if key is None and (len(args) > 1 or type(args[0]) in (list, tuple)):  # asked without effects
        items = [*items]
        if len(items) > 1 and symbols.are_unbacked(items):
            return symbols.operated(function, *items)
        if takes_late(function, items):
            return compute(m.recorder.graph, function, items)
    return function(items, key=sort_key(m, key), **default)


def pairs(m: Capturing, x: Any) -> Any:
    """What a dict is made of, or grows by: a mapping, or an iterable of pairs."""
    if hasattr(type(x), "keys"):
        found = m.mapping(x)
        m.hashed([*found])
        return found
    rows = (m.items(row) if is_iterable(row) else row for row in in_turn(m, x))
    return ([*m.hashed(x[:1]), *x[1:]] if type(x) is list else x for x in rows)


@stands_for_each(dict, collections.OrderedDict)
def _mapping(kind: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    return kind(*(pairs(m, x) for x in args), **kwargs)


@stands_for(collections.defaultdict)
def _defaultdict(m: Capturing, factory: Any = None, x: Any = (), /, **kwargs: Any) -> Any:
    return collections.defaultdict(factory, pairs(m, x), **kwargs)


# ---------------------------------------------------------------------------- sets
# What changes a set from outside is done to its copy, and to the set itself after the graph: the
# order of its elements hangs on all that was ever done to it.

ASK_SETS = {"__contains__", "__len__", "isdisjoint", "issubset", "issuperset"}
ASK_SETS |= {f"__{name}__" for name in ("eq", "ne", "le", "lt", "ge", "gt")}
_OF_ONE = {"add", "discard", "remove"}
CHANGE_SETS = _OF_ONE | frozenset(
    "clear pop update intersection_update difference_update __init__"
    " symmetric_difference_update __ior__ __iand__ __isub__ __ixor__".split()
)


def change_set(m: Capturing, function: Any, owner: Any, /, *args: Any) -> Any:
    """A method that changes a set from outside."""
    if function.__name__ == "pop":
        raise GraphBreak("what a set from outside gives first hangs on what it gave before")
    copy, is_of_one = m.world.whole(owner), function.__name__ in _OF_ONE
    size = set.__len__(copy)
    # given itself, it does other things than with an equal set, which leave another order
    given = m.hashed(args) if is_of_one else [x if x is owner else _now(m, x) for x in args]
    m.hashed([*set.__iter__(copy)])
    try:
        found = function(copy, *(copy if x is owner else x for x in given))
    except TypeError:
        if set.__len__(copy) != size:
            raise GraphBreak("a set from outside takes some elements, and no others") from None
        raise
    if found is not NotImplemented and not (is_of_one and set.__len__(copy) == size):
        m.world.mirror(owner).done.append((function, given))
    return owner if found is copy else found


def _now(m: Capturing, x: Any) -> Any:
    """An iterable as it is now, of a class that lets a set have the order that `x` would."""
    if isinstance(x, (set, frozenset)):
        items = m.hashed([*m.in_order(x)])
        if [*set(items)] != items:
            raise GraphBreak("the order of a set, which a copy has not")
        return set(items)
    if isinstance(x, dict):
        return dict.fromkeys(m.hashed([*m.plain(x)]))
    return m.hashed(m.items(x))


# ---------------------------------------------------------------------------- dicts
# What dicts give: items, and what `__missing__` makes of keys that are not there.
#
# C code would run the `__missing__` of a class, or the factory of a defaultdict, out of the
# machine's sight.


def item(m: Capturing, container: dict[Any, Any], key: Any) -> Any:
    """What `dict.__getitem__` does."""
    if not m.is_outside(container):
        m.look((key,), COMPARED + AS_NUMBERS)
        found = dict.get(container, m.plain(key), ABSENT)
    else:
        mirror = m.world.mirror(container)
        is_tensor = type(key) is FakeTensor and mirror.copy is None and not mirror.writes
        real, origin = m.world.inputs.get(id(key) if is_tensor else 0, (None, None))
        if real is not None and real in mirror.obj:
            if origin is None or mirror.is_changed():
                raise GraphBreak("a dict from outside is asked for a tensor that it does not have")
            if isinstance(origin.root, Held):
                m.world.fact(IdMatch, origin, real)
                place: Origin = KeyedItem(mirror.origin, real, str(origin))
            else:  # another tensor at each call, or in each turn of a loop
                place = FoundBy(Several((mirror.origin, origin)), at_key, "")
            place = m.world.one(place, "entry", id(mirror.obj), id(real))
            return m.world.load(dict.__getitem__(mirror.obj, real), place)
        if not is_key(key) and mirror.copy is None:
            m.world.whole(container)
        if isinstance(key, torch.nn.Module):
            m.world.origin(key)  # which module it is is a fact now
        found = m.world.get(mirror, key)
    if found is ABSENT:
        found = ask(m, container, "__missing__", key)
    if found is ABSENT and isinstance(container, collections.defaultdict):
        return _made(m, container, key)
    if found is ABSENT:
        raise KeyError(key)
    return found


def _made(m: Capturing, container: Any, key: Any) -> Any:
    """What `defaultdict.__missing__` does."""
    factory = m.world.slot(container, "default_factory")
    if factory is None:
        raise KeyError(key)
    value = m.call(factory)
    m.store_subscript(container, key, value)
    return value


@LOADERS.rule(*VIEWS)
def _load_view(world: Any, view: Any, origin: Origin) -> Any:
    world.fact(TypeMatch, origin, type(view))
    owner = world.load(behind(view), ResultOf(origin, behind, "the dict of "))
    shown = world.whole(owner)
    return getattr(dict_class(shown), type(view).__name__.rpartition("_")[2])(shown)


# Methods in C that are these.
METHODS = {"__getitem__": item, "__missing__": _made}


# ---------------------------------------------------------------------------- library
# Functions in C that Python's library has in Python, too.


@functools.cache
def _in_python(module: Any) -> dict[str, Any]:
    """A module as it is without its part in C."""

    def importing(name: str, *args: Any) -> Any:
        if name == f"_{module.__name__}":
            raise ImportError
        return builtins.__import__(name, *args)

    given = {**vars(builtins), "__import__": importing}
    names: dict[str, Any] = {"__name__": module.__name__, "__builtins__": given}
    exec(compile(inspect.getsource(module), module.__file__, "exec"), names)
    return names


@stands_for_each(
    *(x for x in vars(heapq).values() if type(x) is types.BuiltinFunctionType),
    bisect.insort_left,
    bisect.insort_right,
    operator.length_hint,
    collections._count_elements,  # type: ignore[attr-defined]
)
def _by_python(function: Any, m: Capturing, /, *args: Any, **named: Any) -> Any:
    name, module = function.__name__, sys.modules[function.__module__[1:]]
    takes = "heappop" in name or "heapreplace" in name
    if takes and name != "heappushpop" and type(args[0]) is list and not m.length(args[0]):
        raise IndexError("index out of range")  # in C's words
    stands = m.world.hold(_in_python(module)[name], f"{module.__name__}.{name}")
    return m.call(stands, *args, **named)


@BY_TYPE.rule(operator.itemgetter, operator.attrgetter, operator.methodcaller)
def _by_twin(function: Any, m: Capturing, obj: Any, /) -> Any:
    """What one made in Python of the same gives; what it is made of is a fact."""
    kind, origin = type(function), m.world.origin(function)
    made, given = function.__reduce__()
    if origin is not None:
        place = ResultOf(origin, kind.__reduce__, "what makes ")
        made, given = m.world.load((made, given), place)
    named = {}
    if type(made) is functools.partial:  # there are keywords
        given = (*m.world.slot(made, "args"), *given)
        named = m.plain(m.world.slot(made, "keywords"))
    twin = _in_python(operator)[kind.__name__](*given, **named)
    return m.call(m.attribute(twin, "__call__"), obj)


# ---------------------------------------------------------------------------- lru_cache
# Functions that keep what they gave.


@BY_TYPE.rule(functools._lru_cache_wrapper)
def _call_cached(function: Any, m: Capturing, /, *args: Any, **kwargs: Any) -> Any:
    """A function with a cache: called again while nobody could tell, else asked what it keeps."""
    before, said = m.world.changes(), len(m.world.later)
    graph, given = m.recorder.graph, (*args, *kwargs.values())
    known = {*graph.nodes}
    if function in _ENDING and not kwargs and _has_kept(function, args):
        found = [_before(m, x) for x in args]
        if (origin := m.world.origin(function)) is not None and all(found):
            return _kept(m, function, origin, args, (), found)
    mirrors, slots_read = m.world.mirrors, m.world.slots_read
    outer, mirrors.read = mirrors.read, []
    try:
        result = m.call(m.world.slot(function, "__wrapped__"), *args, **kwargs)
        is_stale = m.world.slots_read > slots_read
        is_stale |= any(mirror.is_changed() for mirror in mirrors.read)
    except GraphBreak as ending:
        _ENDING.add(function)
        ending.once = True  # the next call may find what Python's call keeps
        raise
    finally:
        mirrors.read = None if outer is None else outer + mirrors.read
    if is_stale:
        why = "a function under lru_cache uses what the program has written to"
        raise GraphBreak(why, once=True)
    is_found = is_named(result) and m.world.origin(result) is not None  # and not made anew
    is_number = is_scalar(result) or is_open(result)
    if m.world.changes() == before and (is_number or is_found):
        return result
    if m.world.changes() == before and _is_lent(m, function, given, tuple(kwargs), result):
        return result
    is_pure = m.world.changes()[1:] == before[1:]
    del m.world.later[said:]
    if result is None and m.world.changes() == before:
        say_later(m, function, args, kwargs)  # it warns, once
        return None
    origin = m.world.origin(function)
    made = [node for node in graph.nodes if node not in known]
    is_pure &= not any(effects(node) - {"writes"} for node in made)
    with no_torch_function():
        wrote = storages(x for node in made for x in written_by(node))
        is_pure &= not (m.recorder.writers(made) or wrote & storages(known))
    found = [_before(m, x) for x in given] if is_pure and origin is not None else [None]
    is_changed = any(node.target in STATE_SWITCHES for node in known)
    is_changed |= bool(m.recorder.writers(known))
    if not all(found) or (is_changed and not all(map(is_scalar, given))):
        why = "a function under lru_cache is given what no call before the graph can be"
        raise GraphBreak(why, once=True)
    written: dict[Any, None] = {}  # nodes that wrote into memory of its own, or read that
    for node in made:
        if effects(node) or not written.keys().isdisjoint(node.all_input_nodes):
            written[node] = None
    for node in reversed(written):
        graph.erase_node(node)
    return _kept(m, function, origin, given, tuple(kwargs), found)


# Functions with a cache whose own code ends graphs: what they keep is asked for first.
_ENDING: weakref.WeakSet[Any] = weakref.WeakSet()


def _has_kept(function: Any, args: Args) -> bool:
    """Whether a function with a cache keeps what it gave for these; its code is not run.

    source   Modules/_functoolsmodule.c (lru_cache_make_key)
    """
    by_identity: Any = object.__hash__
    if not all(is_scalar(x) or type(x).__hash__ is by_identity for x in args):
        return False
    found = (x for x in gc.get_referents(function) if type(x) is dict and x is not vars(function))
    key = args[0] if len(args) == 1 and type(args[0]) in (int, str) else args
    return key in next(found, ())


def _kept(
    m: Capturing, function: Any, origin: Any, given: Args, names: tuple[str, ...], found: Any
) -> Any:
    """What a function with a cache keeps for arguments, which are `found` before the graph."""
    m.world.passing.append("what a function keeps")
    objects, places = zip((function, origin), *found)
    key = ((x if is_scalar(x) else id(x), type(x)) for x in given)
    asked = _Asked(names)
    keyed = ResultOf(Several(places), asked, "what is kept: ")
    place = m.world.one(keyed, "kept", id(function), names, *key)
    kept = run_for_real(asked.call, objects)
    open_sizes = {x.node.hint for x in given if is_open(x)}
    for k, part in enumerate(kept if type(kept) is tuple else (kept,)):
        origin = m.world.item(place, k) if type(kept) is tuple else place
        is_tensor = open_sizes and isinstance(part, torch.Tensor)
        for axis, size in enumerate(run_for_real(getattr, part, "shape") if is_tensor else ()):
            if size in open_sizes:  # a table of so many rows
                m.world.varies.known.setdefault(str(SizeOf(origin, axis)), True)
    return m.world.load(kept, place)


@BY_CODE.rule(id(functools.singledispatch(len).dispatch.__code__))
def _dispatched(dispatch: Any, m: Capturing, cls: Any, /) -> Any:
    """What functools.singledispatch has for a class: a fact, whatever else it keeps of that."""
    cells = dict(zip(dispatch.__code__.co_freevars, dispatch.__closure__))
    registry = run_for_real(getattr, cells["registry"], "cell_contents")
    if m.world.is_changed_inside(registry) or cls in m.made_classes:
        raise GraphBreak("what singledispatch has for a class changes before the graph has run")
    found = run_for_real(dispatch, cls)
    if (origin := m.world.origin(dispatch)) is None:  # the program has made it
        return found
    asked = operator.methodcaller("__call__", cls)
    return m.world.load(found, ResultOf(origin, asked, f"what is for {cls.__name__} in "))


def context_value(m: Capturing, variable: contextvars.ContextVar[Any], *default: Any) -> Any:
    """What a variable of the context holds: a fact."""
    origin = m.world.origin(variable)
    found = _in_context(variable)
    if origin is not None:
        found = m.world.load(found, ResultOf(origin, _in_context, "the value of "))
    if found is not ABSENT:
        return found
    return default[0] if default else m.world.hold(variable.get(), variable.name)


def _in_context(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(ABSENT)


def _is_lent(m: Capturing, function: Any, given: Args, names: tuple[str, ...], result: Any) -> bool:
    """Whether the capture made, of numbers, what a function with a cache keeps for numbers.

    That stands for what is kept, until the program changes it, gives it away or asks for its
    identity: then the capture begins anew.
    """
    if (lent := m.world.lent) is None:
        return False
    real = [lent[id(x)].real if id(x) in lent else _number(x) for x in given]
    if any(x is ABSENT for x in real):
        return False
    found = dict[int, Lent]()
    row = [(result, run_for_real(_Asked(names), (function, *real)))]
    while row:
        x, kept = row.pop()
        if (shown := _number(x)) is not ABSENT:
            if type(shown) is not type(kept) or shown != kept:
                return False
        elif (one := lent.get(id(x)) or found.get(id(x))) is not None:
            if one.real is not kept:
                return False
        else:
            has, kept_has = contents(x), contents(kept)
            if has is None or kept_has is None or m.world.origin(x) is not None:
                return False
            if type(x) is not type(kept) or len(has) != len(kept_has):
                return False
            found[id(x)] = Lent(x, kept, has)
            row += zip(has, kept_has)
    lent.update(found)
    return True


def _number(x: Any) -> Any:
    """A number, a text or a tuple of these, as it is in this call; ABSENT for all else."""
    is_tuple = type(x) is tuple and all(_number(item) is not ABSENT for item in x)
    is_number = is_tuple or is_scalar(x) or is_open(x)
    return concrete(x, is_fixed=False) if is_number else ABSENT


def _before(m: Capturing, x: Any) -> tuple[Any, Origin] | None:
    """An argument as it is before the graph, and where it is found; None if it is not so."""
    if is_open(x):
        if (place := m.world.symbols.place(x)) is not None:
            return x.node.hint, place
        x = concrete(x)
    if is_scalar(x):
        return x, Held(x, repr(x))
    real, origin = m.world.inputs.get(id(x), (x, m.world.origin(x)))
    is_whole = is_alone(x) and id(x) not in m.world.seen and not m.world.is_changed_inside(x)
    return (real, origin) if is_whole and origin is not None and not m.modes else None


class _Asked(NamedTuple):
    """Calls the first of some objects with the others."""

    names: tuple[str, ...]

    def call(self, given: Args) -> Any:
        function, *args = given
        first = len(args) - len(self.names)
        return function(*args[:first], **dict(zip(self.names, args[first:])))

    def __call__(self, given: Args) -> Any:
        try:
            return self.call(given)
        except Exception:  # noqa: BLE001  # the program's: Python is to raise it where it stands
            return ABSENT


# ---------------------------------------------------------------------------- copying
# Python's copy module runs on the machine, but for what is its own copy, tensors, and what
# object.__reduce_ex__ gives.
#
# source https://docs.python.org/3/library/copy.html

_ATOMS = (type, types.FunctionType, types.BuiltinFunctionType, property, Number)
# Classes in C whose instances hold what `__reduce_ex__` says, and no more.
_REFILLED = {object, list, dict, collections.OrderedDict}
# The functions themselves, which nothing stands for.
_COPYING: dict[Any, Any] = {
    function: types.FunctionType(function.__code__, vars(copy), argdefs=defaults)
    for function, defaults in ((copy.copy, None), (copy.deepcopy, (None, ABSENT)))
}


@stands_for_each(*_COPYING)
def _copy(function: Any, m: Capturing, /, x: Any, *memo: Any, **named: Any) -> Any:
    if is_scalar(x) or is_open(x) or issubclass(type(x), _ATOMS):
        return x
    if m.frames[-1].globals is not vars(copy):
        for given in (*memo, *named.values()):  # whose keys are addresses
            if given is not None and m.world.origin(given) is None:
                show_address(m.world, given)
    return m.call(_COPYING[function], x, *memo, **named)


@stands_for(torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__)
def _tensor(m: Capturing, x: Any, memo: Any) -> Any:
    made = m.plain(memo)
    with no_torch_function():
        storages = [y.untyped_storage()._cdata for y in made.get(_TENSORS, [])]
        is_plain = not (x.requires_grad or m.modes or getattr(x, "_is_param", False))
        strides = torch.empty_like(x, device="meta").stride()
        is_known = x.untyped_storage()._cdata in storages
        # all of its memory is copied, and it begins there where it did
        if not is_plain or is_known or x.stride() != strides or m.recorder.offset(x):
            raise GraphBreak(
                "a deep copy of a tensor that has gradients or a base, or that modes hear of"
            )
    if m.call(getattr, x, "grad") is not None or m.length(m.call(getattr, x, "__dict__")):
        raise GraphBreak("a deep copy of a tensor that has a grad, or attributes put on it")
    made.setdefault(_TENSORS, []).append(x)
    return m.call(torch.clone, x)


_TENSORS = -1  # no id: in a memo, the tensors that were copied


def reduced(m: Capturing, x: Any) -> Any:
    """What object.__reduce_ex__ gives."""
    kind = type(x)
    if kind is set:
        return set, ([*m.plain(x)],)
    if kind is collections.deque:
        return kind, ((), x.maxlen), None, iter(m.plain(x))
    if kind is collections.defaultdict:
        factory = m.world.slot(x, "default_factory")
        return kind, (factory,), None, None, iter(m.mapping(x).items())
    if (found := ask(m, x, "__reduce__")) is not ABSENT:
        return found
    in_c = {base for base in kind.__mro__ if base.__flags__ & IN_C}
    if not in_c <= _REFILLED or python_method(m, x, "__getnewargs_ex__") is not None:
        raise GraphBreak(f"copying a {kind.__qualname__}")
    given = () if (new := ask(m, x, "__getnewargs__")) is ABSENT else m.items(new)
    if (held := ask(m, x, "__getstate__")) is ABSENT:  # as object.__getstate__
        names = copyreg._slotnames(kind)  # type: ignore[attr-defined]
        held = of_instance(m, x, "__dict__") if hasattr(x, "__dict__") else None
        slots = {name: m.call(getattr, x, name, ABSENT) for name in names}
        slots = {name: value for name, value in slots.items() if value is not ABSENT}
        held = (held, slots) if slots else held
    items = m.iterate(x) if issubclass(type(x), list) else None
    pairs = iter(m.mapping(x).items()) if issubclass(type(x), dict) else None
    function: Any = copyreg.__newobj__  # type: ignore[attr-defined]
    return m.world.hold(function, "copyreg.__newobj__"), (kind, *given), held, items, pairs
