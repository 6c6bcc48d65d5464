"""Facts: what a capture relied on, and the function that checks them at the next call.

Each fact is a condition on the object at an origin. All facts of an entry become one Python
function, origins in common evaluated once, in the order in which the capture met them: a fact about
an object comes after the fact that there is such an object.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import sys
import types
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from fusee.capture.frame import ABSENT, Marker
from fusee.capture.sources import (
    Attr,
    ComputedAt,
    Held,
    Item,
    Local,
    Origin,
    ReadOf,
    ResultOf,
    Several,
    SizeOf,
    Source,
    StrideOf,
    length,
    looking,
    raw_class,
)
from fusee.capture.torch_api import STATE_ASKED, no_torch_function
from fusee.capture.watched import Watched
from fusee.errors import GENERATED, OptionError
from fusee.source import Args, HostSource

# ---------------------------------------------------------------------------- facts


DTYPES = (sys.modules["numpy"].dtype,) if "numpy" in sys.modules else ()  # torch imports it
SHARED = Marker("one of them, or they are not distinct")
FOUND = Marker("found")

# What cannot be looked up any more fails the check rather than the call: RuntimeError is that of a
# nested tensor's shape, and of is_leaf.
GONE = (
    AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, ArithmeticError
)  # fmt: skip


class TensorFact(NamedTuple):
    """What a capture knows of a tensor from outside. Sizes and strides in elements; None: open."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    size: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool
    is_leaf: bool
    bits: tuple[bool, bool, bool]  # lazily conjugated, lazily negated, without memory

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorFact:
        size = tuple(x.size())
        bits = x.is_conj(), x.is_neg(), x._is_zerotensor() or torch._is_functional_tensor(x)
        return cls(type(x), x.dtype, x.device, size, x.stride(), x.requires_grad, x.is_leaf, bits)

    def holds(self, found: TensorFact) -> bool:
        """Whether a tensor is as this says."""
        sizes, strides = zip(self.size, found.size), zip(self.stride, found.stride)
        return (
            self.is_like(found)
            and all(bool(now and now > 0) if was is None else now == was for was, now in sizes)
            and all(was is None or was == now for was, now in strides)
        )

    def is_like(self, other: TensorFact) -> bool:
        """Whether another tensor differs in sizes and strides alone."""
        mine, its = (x._replace(size=(), stride=()) for x in (self, other))
        return mine == its and len(self.size) == len(other.size)

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(self.dtype).removeprefix("torch.")
        sizes, strides = (
            ", ".join("any" if n is None else str(n) for n in listed)
            for listed in (self.size, self.stride)
        )
        return f"{dtype}[{sizes}] of strides [{strides}] on {self.device}{grad}"


class Whence(NamedTuple):
    """Whose attributes lead to an object, as the filters of torch.compiler ask."""

    root: Any

    def is_unspecialized_nn_module(self) -> bool:
        return isinstance(self.root, torch.nn.Module)

    def is_unspecialized_builtin_nn_module(self) -> bool:
        home = type(self.root).__module__
        return self.is_unspecialized_nn_module() and home.startswith(("torch.nn.", "torch.ao."))

    def is_specialized_nn_module(self) -> bool:
        return False

    def is_fsdp_module(self) -> bool:
        return False

    def is_global(self) -> bool:
        return type(self.root) in (dict, types.MappingProxyType)

    def is_local(self) -> bool:
        return not self.is_global()


Look = Callable[[Origin], Any]
Values = dict[str, Any]  # of variables, by name

_OPEN = "dynamic=None or True, mark_dynamic, a backend that takes symbols (docs/compile.md)"


@dataclass(slots=True, eq=False)
class Fact:
    """A condition on the object at an origin; each kind is a class.

    value   what the object is, equals, ...
    where   the user's line that relied on it, `file.py:41 in step`

    CONDITION  Python that holds as long as the fact does: of `at`, the object's, of `value`, and of
            the names of those that it USES
    WORDS   what reports say between origin and value
    TORCH   what TorchDynamo calls such a guard
    REMEDY  what to give, so that it is missed no more
    BY_ID   whether the value is one object
    INDEX   what finds a version among many: of an object, and of the value of a fact about it
    """

    origin: Origin
    value: Any
    where: str = ""

    CONDITION: ClassVar[str]
    USES: ClassVar[Args] = ()
    WORDS: ClassVar[str] = "is"
    TORCH: ClassVar[str]
    REMEDY: ClassVar[str] = "it one value"
    BY_ID: ClassVar[bool] = False
    INDEX: ClassVar[tuple[Callable[[Any], Hashable], ...]] = ()

    @property
    def key(self) -> tuple[type[Fact], str]:
        """A kind, and whose fact it is."""
        return type(self), str(self.origin)

    def conditions(self, at: str, source: Source) -> list[str]:
        """CONDITION with its parts, or several; `at` is the object's source."""
        value, used = self.operand(source), map(source.constant, self.USES)
        return [self.CONDITION.format(*used, at=at, value=value)]

    def operand(self, source: Source) -> str:
        """Source of the value."""
        return source.constant(self.value)

    def holds(self, look: Look) -> bool:
        """Whether it is so now. Runs no code of the user's. Raises one of `GONE` as `look` does."""
        return self.fits(self.now(look(self.origin)))

    def found(self, look: Look) -> Any:
        """What is there in place of `value`."""
        return self.now(look(self.origin))

    def now(self, found: Any) -> Any:
        """What `value` would be for an object."""
        return found

    def fits(self, now: Any) -> bool:
        """Whether what `value` would be is what it is."""
        return bool(now == self.value)

    def watched(self, seen: Watched) -> bool:
        """Whether it holds as long as what is `seen` does not change; notes what that is."""
        return False

    def is_listed(self) -> bool:
        """Whether machine code can compare what is found, where that is new at each call."""
        return False

    def way(self) -> tuple[Any, ...] | None:
        """How another process gets at the value, as persist/references.py has it."""
        return None

    def moved(self, at: Callable[[Origin], Origin]) -> Any:
        """The value, with other origins in it."""
        return self.value

    def varying(self, found: Any) -> Iterable[tuple[str, bool, Any, Any]]:
        """Numbers and sizes of which this missed another value, by their words.

        Each with whether it is to be an input from now on, its value then, and now: none is an
        input whose value the program needs.
        """
        return ()

    def is_one_more(self, before: Any, now: Any) -> bool:
        """Whether an int, or one size of a tensor, is larger by one, or a text another one."""
        return False

    def shown_at(self) -> int | None:
        """Where on the stack of a break lies a text or float to be shown, or a list of such."""
        return None

    def shown(self, value: Any) -> str:
        """Words for a value."""
        if isinstance(value, (Origin, TensorFact)):
            return str(value)
        if isinstance(value, types.CodeType):
            title, _ = GENERATED.get(value.co_filename, (value.co_filename, {}))
            return f"the code at {title}:{value.co_firstlineno}"
        if isinstance(type(value).__repr__, types.FunctionType):  # code of the program's
            return object.__repr__(value)
        try:
            with no_torch_function():
                text = repr(value).splitlines()
        except ValueError:  # it has too many digits
            return object.__repr__(value)
        return text[0][:120] + ("..." if len(text) > 1 or len(text[0]) > 120 else "")

    def miss(self, found: Any) -> str:
        """One sentence about a miss; `found` is what the value would be."""
        return f"{self.origin} was {self.shown(self.value)}, is {self.shown(found)}"

    def remedy(self, found: Any) -> str:
        """What to do about misses like this one."""
        return f"give {self.REMEDY}, or raise recompile_limit"

    @property
    def source(self) -> Whence:
        return Whence(getattr(self.origin.root, "value", None))

    def __str__(self) -> str:
        return f"{self.origin} {self.WORDS} {self.shown(self.value)}"


class IdMatch(Fact):
    """It is this very object."""

    CONDITION, TORCH, BY_ID, INDEX = "{at} is {value}", "ID_MATCH", True, (id, id)
    REMEDY = "the same object at each call"

    def fits(self, now: Any) -> bool:
        return now is self.value

    def watched(self, seen: Watched) -> bool:
        return seen.reaches(self.origin)

    def way(self) -> tuple[Any, ...]:
        return "at", self.origin


class Alias(Fact):
    """It is what lies at another origin, the value."""

    CONDITION, TORCH = IdMatch.CONDITION, "DUPLICATE_INPUT"
    REMEDY = IdMatch.REMEDY

    def operand(self, source: Source) -> str:
        return source.expression(self.value)

    def holds(self, look: Look) -> bool:
        return look(self.origin) is look(self.value)

    def moved(self, at: Callable[[Origin], Origin]) -> Origin:
        return at(self.value)


class NotAlias(Alias):
    """It is not what lies at another origin."""

    CONDITION, WORDS = "{at} is not {value}", "is not"

    def holds(self, look: Look) -> bool:
        return look(self.origin) is not look(self.value)

    def watched(self, seen: Watched) -> bool:
        return seen.reaches(self.origin, self.value)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    begins = [x.data_ptr() for x in (a, b)]
    ends = [
        begin + (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()
        for begin, x in zip(begins, (a, b))
    ]
    return bool(a.numel() and b.numel() and begins[0] < ends[1] and begins[1] < ends[0])


class NoOverlap(Alias):
    """A tensor that shares no memory with the one at another origin."""

    CONDITION, USES = "not {0}({at}, {value})", (overlap,)
    WORDS, TORCH = "shares no memory with", "NO_TENSOR_ALIASING"

    def holds(self, look: Look) -> bool:
        return not overlap(look(self.origin), look(self.value))


class Distinct(Fact):
    """None of those that are written to is another one of these: `(written, others)`, origins."""

    TORCH = "DUPLICATE_INPUT"

    def conditions(self, at: str, source: Source) -> list[str]:
        def ids(origins: Sequence[Origin]) -> str:
            found = ", ".join(map(source.expression, origins))
            return f"{source.python('map')}({source.python('id')}, [{found}])"

        written = source.once(f"{source.python('set')}({ids(self.value[0])})")
        count = f"{source.python('len')}({written}) == {len(self.value[0])}"
        return [f"{count} and {written}.isdisjoint({ids(self.value[1])})"]

    def holds(self, look: Look) -> bool:
        written, others = ({id(look(origin)) for origin in some} for some in self.value)
        return len(written) == len(self.value[0]) and written.isdisjoint(others)

    def now(self, found: Any) -> Any:
        return SHARED

    def watched(self, seen: Watched) -> bool:
        return seen.reaches(*itertools.chain(*self.value))

    def moved(self, at: Callable[[Origin], Origin]) -> Any:
        return tuple(tuple(map(at, some)) for some in self.value)

    def shown(self, value: Any) -> str:
        return str(value) if value is SHARED else f"distinct from {sum(map(len, value)) - 1} others"


_BY_TEXT = (complex, datetime.datetime, datetime.time, datetime.timezone, range)


def _exactly(x: Any) -> Hashable:
    """By what a value is told from those that equal it."""
    return type(x), repr(x) if isinstance(x, (float, complex)) else x


def _equal(found: Any, value: Any) -> bool:
    if type(found) is not type(value):
        return False
    if isinstance(value, (tuple, list)):
        return len(found) == len(value) and all(map(_equal, found, value))
    return repr(found) == repr(value) if isinstance(value, (float, *_BY_TEXT)) else found == value


class EqualsMatch(Fact):
    """A number, a text, or a container of such, by class and value."""

    WORDS, TORCH, INDEX = "equals", "EQUALS_MATCH", (_exactly, _exactly)

    def conditions(self, at: str, source: Source) -> list[str]:
        known = self.value
        if known is None or isinstance(known, bool):
            return [f"{at} is {known}"]
        at = source.once(at)
        same = f"{at} == {source.constant(known)}"
        if isinstance(known, tuple):  # (1, 2) == (True, 2.0)
            kinds = f"[*{source.python('map')}({source.python('type')}, {at})]"
            same = f"{kinds} == {source.constant([*map(type, known)])} and {same}"
        # 0.0 equals -0.0, nan not even itself, a time that of another zone, range(0) range(1, 1)
        if isinstance(known, _BY_TEXT) or (
            isinstance(known, float) and (not known or known != known)
        ):
            same = f"{source.python('repr')}({at}) == {repr(known)!r}"
        # the class first: a tensor compared with a number gives a tensor
        return [f"{source.python('type')}({at}) is {source.constant(type(known))} and {same}"]

    def fits(self, now: Any) -> bool:
        return _equal(now, self.value)

    def watched(self, seen: Watched) -> bool:
        return not isinstance(self.value, set) and seen.reaches(self.origin)

    def is_listed(self) -> bool:
        is_grad = isinstance(self.origin, Attr) and self.origin.name == "grad"
        return self.value is None and is_grad

    def varying(self, found: Any) -> Iterable[tuple[str, bool, Any, Any]]:
        if type(found) is type(self.value):
            is_computed = isinstance(self.origin, ComputedAt)
            if isinstance(self.origin, ReadOf):
                yield str(self.origin), False, self.value, found
            elif isinstance(self.origin, ResultOf) and not is_computed:  # of one of NumPy's
                if type(found) in (bytes, str):
                    yield str(self.origin.of), True, 0.0, 0.0
            elif type(found) in (float, int):
                yield str(self.origin), True, self.value, found
            elif type(found) is tuple and len(found) == len(self.value):
                for k, (was, now) in enumerate(zip(self.value, found)):
                    if type(was) is type(now) and type(now) in (float, int) and was != now:
                        yield str(Item(self.origin, k)), True, was, now

    def is_one_more(self, before: Any, now: Any) -> bool:
        if self.shown_at() is not None:
            return type(before) is type(now)
        return type(before) is type(now) is int and now == before + 1

    def shown_at(self) -> int | None:
        root = next(iter(self.origin.path()))
        if type(self.value) not in (float, str) or not isinstance(root, Local):
            return None
        return int(root.name[2:]) if root.name.startswith(".s") else None

    def remedy(self, found: Any) -> str:
        return _OPEN if type(found) in (int, float) else Fact.remedy(self, found)


def follows(fact: Fact, tensors: Container[Origin]) -> bool:
    """Whether it is of these tensors' dispatch keys, which machine code compares."""
    x = fact.origin
    return isinstance(x, ResultOf) and x.function is torch.is_inference and x.of in tensors


class TypeMatch(Fact):
    """An instance of this very class."""

    CONDITION, USES = "{0}({at}) is {value}", (type,)
    WORDS, TORCH, BY_ID = "is of type", "TYPE_MATCH", True
    INDEX, REMEDY = (type, lambda known: known), "objects of one class"

    def now(self, found: Any) -> Any:
        return type(found)

    fits = IdMatch.fits

    def watched(self, seen: Watched) -> bool:
        if isinstance(self.origin, Item) and self.value is float:
            return seen.any_float(self.origin)
        return seen.stays(self.origin)

    def shown(self, value: Any) -> str:
        is_class = isinstance(value, type)
        return f"{value.__module__}.{value.__qualname__}" if is_class else Fact.shown(self, value)


class Length(Fact):
    """A container of so many elements."""

    WORDS, TORCH, INDEX = "has length", "SEQUENCE_LENGTH", (length, lambda known: known)
    REMEDY = "containers of one length"

    def conditions(self, at: str, source: Source) -> list[str]:
        raw = source.raw(self.origin)
        asked = f"{raw}.__len__" if raw else source.python("len")
        return [f"{asked}({source.once(at)}) == {self.value}"]

    def now(self, found: Any) -> Any:
        return length(found)

    def watched(self, seen: Watched) -> bool:
        return seen.whole(self.origin) is not None


class Absent(Fact):
    """A dict without this key."""

    WORDS, TORCH = "has no", "DICT_NOT_CONTAINS"

    def conditions(self, at: str, source: Source) -> list[str]:
        raw, key = source.raw(self.origin), source.constant(self.value)
        at = source.once(at)
        return [f"not {raw}.__contains__({at}, {key})" if raw else f"{key} not in {at}"]

    def now(self, found: Any) -> Any:
        raw: Any = raw_class(type(found))
        is_in = self.value in found if raw is None else raw.__contains__(found, self.value)
        return FOUND if is_in else self.value

    def fits(self, now: Any) -> bool:
        return now is not FOUND

    def watched(self, seen: Watched) -> bool:
        return seen.without(self.origin, self.value)

    def shown(self, value: Any) -> str:
        return str(value)


def _keys(found: Any) -> tuple[Any, ...]:
    raw: Any = raw_class(type(found))
    return tuple(found if raw is None else raw.keys(found))


class Keys(Fact):
    """A dict with these keys, in this order."""

    CONDITION, USES = "{0}({1}({at}), {value})", (_equal, _keys)
    WORDS, TORCH, INDEX = "has the keys", "DICT_KEYS_MATCH", (_keys, lambda known: known)

    fits = EqualsMatch.fits

    def now(self, found: Any) -> Any:
        return _keys(found)

    def watched(self, seen: Watched) -> bool:
        whole = seen.whole(self.origin)
        # what moves to the end of an OrderedDict stays what it was to a dict
        return isinstance(whole, dict) and type(whole) is not collections.OrderedDict


class Empty(Fact):
    """A container without elements."""

    CONDITION, WORDS, TORCH = "not {at}", "is empty:", "EMPTY_NN_MODULE_HOOKS_DICT"

    def fits(self, now: Any) -> bool:
        return not now

    def watched(self, seen: Watched) -> bool:
        return isinstance(seen.whole(self.origin), dict)


class TensorMatch(Fact):
    """A tensor as a TensorFact says; machine code looks at most of them (`is_listed`)."""

    CONDITION, USES, TORCH = "{value}.holds({0}({at}))", (TensorFact.of,), "TENSOR_MATCH"
    INDEX = (
        lambda x: tuple(torch.Tensor.size(x)),
        lambda known: ABSENT if None in known.size else known.size,
    )
    REMEDY = "tensors of one dtype, device and number of axes"

    def now(self, found: Any) -> Any:
        with no_torch_function():
            return TensorFact.of(found) if issubclass(type(found), torch.Tensor) else found

    def fits(self, now: Any) -> bool:
        return type(now) is TensorFact and bool(self.value.holds(now))

    def watched(self, seen: Watched) -> bool:
        return seen.tensor(self.origin)

    def is_listed(self) -> bool:
        is_closed = None not in (*self.value.size, *self.value.stride)
        return is_closed or 0 not in self.value.size

    def varying(self, found: Any) -> Iterable[tuple[str, bool, Any, Any]]:
        # of another dtype, or with gradients, too: a size varies, whatever else does
        if type(found) is TensorFact and len(self.value.size) == len(found.size):
            for axis, (was, now) in enumerate(zip(self.value.size, found.size)):
                if was != now:  # one that was open stays so
                    yield str(SizeOf(self.origin, axis)), True, now if was is None else was, now
            # the others are products of sizes
            own = _own_strides(self.value) & _own_strides(found)
            for axis in sorted(own):
                was, now = self.value.stride[axis], found.stride[axis]
                if was != now:
                    yield str(StrideOf(self.origin, axis)), True, now if was is None else was, now

    def is_one_more(self, before: Any, now: Any) -> bool:
        if not type(before) is type(now) is TensorFact or len(now.size) != len(before.size):
            return False
        pairs = zip(before.size, now.size)
        steps = [b - a for a, b in pairs if a is not None and b is not None and a != b]
        return steps == [1] and now.dtype == before.dtype

    def remedy(self, found: Any) -> str:
        is_size = isinstance(found, TensorFact) and found.is_like(self.value)
        return _OPEN if is_size else Fact.remedy(self, found)


def _own_strides(known: TensorFact) -> set[int]:
    """Axes whose stride is none of the products of inner sizes; an open one may be."""
    rows = [(n == 1, s, n or 0, k) for k, (s, n) in enumerate(zip(known.stride, known.size)) if s]
    own, spans = {k for k, step in enumerate(known.stride) if step is None}, {1}
    for _, step, n, k in sorted(rows):
        own |= set() if step in spans else {k}
        spans.add(step * n)
    return own


_VARYING = EqualsMatch, TensorMatch


def fails(fact: Fact, look: Look) -> bool:
    """Whether a fact does not hold for what is there now."""
    try:
        return not fact.holds(look)
    except GONE:
        return True


# ------------------------------------------------------------------------------ for filters


class Guard(NamedTuple):
    """A fact as the functions for `guard_filter_fn` see it; fields as torch.compiler has them."""

    name: str
    has_value: bool
    value: object
    guard_type: str
    derived_guard_types: tuple[str, ...]
    is_global: bool
    orig_guard: Fact

    @classmethod
    def of(cls, fact: Fact, values: Values) -> Guard:
        try:
            value, has_value = looking(values)(fact.origin), True
        except GONE:
            value, has_value = None, False
        is_global = fact.source.is_global()
        return cls(str(fact.origin), has_value, value, fact.TORCH, (), is_global, fact)


# ------------------------------------------------------------------------------ all facts


@dataclass
class Facts:
    """The facts of one entry, each once, in the order of discovery.

    listed   origins whose objects the check holds against `_table`
    missed   one that did not hold the last time
    """

    rows: list[Fact] = field(default_factory=list)
    kinds: dict[Origin, type] = field(default_factory=dict)
    listed: list[Origin] = field(default_factory=list)
    missed: Fact | None = None
    _known: set[tuple[Any, ...]] = field(default_factory=set)
    _keep: list[Any] = field(default_factory=list)

    def add(self, kind: type[Fact], origin: Origin, value: Any, where: Callable[[], str]) -> None:
        """Note a condition, unless it is known. `where` says the user's line."""
        known_by = id(value) if kind.BY_ID else _exactly(value)
        try:
            hash(known_by)
        except TypeError:
            known_by = id(value)
        key = kind, origin, known_by
        if key not in self._known:
            self._known.add(key)
            self._keep.append(value)
            if kind in (TypeMatch, TensorMatch):
                self.kinds[origin] = value if kind is TypeMatch else value.kind
            self.rows.append(kind(origin, value, where()))

    def include(self, more: Facts) -> None:
        """Add what another capture of the same place relied on."""
        self.rows += more.rows
        self.kinds.update(more.kinds)
        self._keep += more._keep

    def keep(self, chosen: Callable[[list[Guard]], Sequence[bool]], values: Values) -> None:
        """Leave out the facts that `chosen` says False of."""
        rows = [fact for fact in self.rows if not isinstance(fact.origin, Held)]
        given: Any = chosen([Guard.of(fact, values) for fact in rows])
        flags = [*given] if isinstance(given, Iterable) else None
        if flags is None or len(flags) != len(rows):
            count = f"{type(given).__name__}, and no" if flags is None else len(flags)
            raise OptionError(
                f"guard_filter_fn gave {count} answers for {len(rows)} guards",
                did="ran nothing of the function",
                remedy="return a list with one bool for each guard that it is given",
            )
        dropped = {id(fact) for fact, flag in zip(rows, flags) if not flag}
        self.rows = [fact for fact in self.rows if id(fact) not in dropped]

    def compile(
        self,
        parameters: list[str],
        state: Mapping[str, Any],
        also: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> tuple[Callable[..., bool], str]:
        """The check, a function of the locals, and its source.

        state   torch's, as `state_conditions` has it
        also    what is watched and listed, by the names that the check has for it
        """
        source = Source(self.kinds)
        for name, x in state.items():
            source.names[f"_{name}"] = STATE_ASKED[name]
            text = f"{source.constant(x)} {'!=' if type(x) is int else 'is not'} _{name}()"
            source.lines.append(f"if {text}: return False")
        if "_watched" in also:
            text = "_changed(_watched.address) >= 0 and not _watched.look()"
            source.lines.append(f"if {text}: return False")
        later = {origin for origin in self.listed if origin in self.kinds}
        for fact in self.rows:
            self._ask_first(fact.origin, later, source)
            for condition in fact.conditions(source.expression(fact.origin), source):
                source.lines.append(f"if not ({condition}): return False")
        for origin in self.listed:
            self._ask_first(origin, later, source)
        if self.listed:
            listed = ", ".join(map(source.expression, self.listed))
            source.lines.append(f"if _differs(_table.address, [{listed}]) >= 0: return False")
        made = HostSource("check", ", ".join(parameters), **also, **source.names, _gone=GONE)
        made.add("try:", *(f"    {line}" for line in [*source.lines, "return True"]))
        made.add("except _gone:", "    return False")  # what is not there any more
        return made.function("guards"), str(made)

    def _ask_first(self, origin: Origin, later: set[Origin], source: Source) -> None:
        """Look at the class of what is to be compared later, before it is asked for a part."""
        for part in origin.path():
            for whole in part.parts if isinstance(part, Several) else ():
                self._ask_first(whole, later, source)
            if part is not origin and part in later:
                later.discard(part)
                other = f"type({source.variable(part)}) is not {source.constant(self.kinds[part])}"
                source.lines.append(f"if {other}: return False")

    def unlike(self, look: Look) -> Fact | None:
        """The first fact that does not hold."""
        return next((fact for fact in self.rows if fails(fact, look)), None)

    def first_miss(self, values: Values) -> tuple[Fact, Any] | None:
        """The first fact that does not hold for these locals, and what is there instead."""
        with no_torch_function():  # modes of the program's would see it
            fact = self.unlike(looking(values))
            return None if fact is None else (fact, self.found(fact, values))

    def misses(self, values: Values) -> bool:
        """Whether some fact does not hold: most often the one of the last time."""
        with no_torch_function():
            if self.missed is None or not fails(self.missed, self.looking(values)):
                self.missed = self.unlike(looking(values))
        return self.missed is not None

    def changed(
        self, values: Values, missed: tuple[Fact, Any] | None = None
    ) -> list[tuple[str, bool, Any, Any]]:
        """As Fact.varying, of the fact that was missed and of all tensors and numbers."""
        found = [] if missed is None else [*missed[0].varying(missed[1])]
        with no_torch_function():  # modes of the program's would see it
            look = self.looking(values)
            for fact in self.rows:
                is_asked = missed is None or fact is not missed[0]
                if is_asked and isinstance(fact, _VARYING) and fails(fact, look):
                    found += fact.varying(self.found(fact, values))
        return found

    def found(self, fact: Fact, values: Values) -> Any:
        """What is there for a fact with these locals; ABSENT if nothing is."""
        try:
            return fact.found(self.looking(values))
        except GONE:
            return ABSENT

    def looking(self, values: Values) -> Look:
        """As `looking`, also where a fact before does not hold."""
        return looking(values, self.kinds)
