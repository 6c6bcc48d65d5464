"""Facts: what a capture relied on, and the function that checks them at the next call.

Each fact is a condition on the object at an origin. All facts of an entry become one Python
function, origins in common evaluated once, in the order in which the capture met them: a fact about
an object comes after the fact that there is such an object.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusee.capture.frame import Marker
from fusee.capture.relations import Related, Strided, size_source
from fusee.capture.sources import (
    Attr,
    Call,
    Dict,
    Held,
    Item,
    Origin,
    SizeOf,
    Source,
    looking,
    raw_class,
)
from fusee.errors import OptionError
from fusee.runtime import process
from fusee.runtime.change_detection import (
    Table,
    Watch,
    available,
    can_watch,
    changed,
    differs,
    pointer,
)
from fusee.source import define

# ---------------------------------------------------------------------------- facts


ABSENT = Marker("nothing")
SHARED = Marker("one of them, or they are not distinct")

# What cannot be looked up any more fails the check rather than the call: RuntimeError is that of a
# nested tensor's shape, and of is_leaf.
GONE = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True)
class At:
    """Stands for the object at another origin, as the value of an "is" or "not" fact."""

    origin: Origin

    def __repr__(self) -> str:
        return str(self.origin)


@dataclass(frozen=True)
class Distinct:
    """The value of a "distinct" fact: none of those that are written to is another one of these."""

    written: tuple[Origin, ...]
    others: tuple[Origin, ...]

    def __repr__(self) -> str:
        return f"distinct from {len(self.written) + len(self.others) - 1} others"


class TensorFact(NamedTuple):
    """What a capture knows of a tensor from outside. Sizes and strides in elements; None: open."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    size: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool
    is_leaf: bool
    bits: tuple[bool, bool]  # lazily conjugated, lazily negated

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorFact:
        size = tuple(x.size())
        bits = x.is_conj(), x.is_neg()
        return cls(type(x), x.dtype, x.device, size, x.stride(), x.requires_grad, x.is_leaf, bits)

    def holds(self, found: TensorFact) -> bool:
        """Whether a tensor is as this says."""
        pairs = (zip(a, b) for a, b in ((self.size, found.size), (self.stride, found.stride)))
        opened = (now for was, now in zip(self.size, found.size) if was is None)
        if not self.is_like(found) or not all(now is not None and now > 1 for now in opened):
            return False
        return all(was is None or was == now for was, now in itertools.chain(*pairs))

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


@dataclass(slots=True, eq=False)
class Fact:
    """One condition.

    kind     "is", "not", "distinct", "equals", "type", "length", "absent", "keys", "empty",
             "apart", "tensor"
    value    what the object is, equals, ...; for "absent" the key that is not there
    where    the user's line that relied on it, `file.py:41 in step`
    """

    kind: str
    origin: Origin
    value: Any
    where: str

    def conditions(self, source: Source) -> list[str]:
        """Python expressions that all hold as long as the fact does."""
        return _KINDS[self.kind].conditions(self, source.expression(self.origin), source)

    def now(self, look: Callable[[Origin], Any]) -> Any:
        """What `value` would be today. Raises one of `GONE` if there is no such object."""
        if self.kind == "related":
            return self.value.now(look)
        return _KINDS[self.kind].now(look(self.origin), self.value)

    @property
    def source(self) -> Whence:
        return Whence(self.origin.root.constant)

    def varying(self, found: Any) -> Iterator[tuple[str, bool, Any, Any]]:
        """Numbers and sizes of which this fact missed another value, by their words.

        Each with whether it is to be an input from now on, its value then, and now: none is an
        input whose value the program needs.
        """
        if self.kind == "related":
            if (symbol := self.value.fixes()) is not None:
                yield str(self.value.origins[symbol]), False, None, None
        if type(found) is not type(self.value):
            return
        if self.kind == "tensor" and self.value.is_like(found):
            sizes = enumerate(zip(self.value.size, found.size))
            for axis, (was, now) in sizes:
                if was is not None and was != now:
                    yield str(SizeOf(self.origin, axis)), True, was, now
        elif self.kind == "equals" and isinstance(self.origin, Call):  # of one of NumPy's
            if type(found) in (bytes, str):
                yield str(self.origin.of), True, 0.0, 0.0
        elif self.kind == "equals" and type(found) in (float, int):
            yield str(self.origin), True, self.value, found

    def __str__(self) -> str:
        if self.kind == "related":
            return str(self.value)
        return f"{self.origin} {_KINDS[self.kind].words} {_shown(self.kind, self.value)}"


def _shown(kind: str, value: Any) -> str:
    if kind == "type" and isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if kind in ("tensor", "absent", "stride", "related"):
        return str(value)
    if isinstance(type(value).__repr__, types.FunctionType):  # code of the program's
        return object.__repr__(value)
    with torch._C.DisableTorchFunction():
        text = repr(value).splitlines()
    return text[0][:120] + ("..." if len(text) > 1 or len(text[0]) > 120 else "")


# ------------------------------------------------------------------------------ conditions


class _Kind(NamedTuple):
    """A row for a kind of fact.

    torch_name   what TorchDynamo calls such a guard
    conditions   `(fact, source of the object, Source)` to the conditions' source
    now          what the fact's value would be for an object; the second argument is what it is
    """

    words: str
    torch_name: str
    conditions: Callable[[Fact, str, Source], list[str]]
    now: Callable[[Any, Any], Any] = lambda found, value: found


def _other(fact: Fact, source: Source) -> str:
    is_found = isinstance(fact.value, At)
    return source.expression(fact.value.origin) if is_found else source.constant(fact.value)


def _equals(fact: Fact, at: str, source: Source) -> list[str]:
    if fact.value is None or isinstance(fact.value, bool):
        return [f"{at} is {fact.value}"]
    at = source.once(at)
    same = f"{at} == {source.constant(fact.value)}"
    if isinstance(fact.value, tuple):  # (1, 2) == (True, 2.0)
        kinds = f"[*{source.python('map')}({source.python('type')}, {at})]"
        same = f"{kinds} == {source.constant([*map(type, fact.value)])} and {same}"
    if isinstance(fact.value, (float, complex)) and not _is_told_apart(fact.value):
        same = f"{source.python('repr')}({at}) == {repr(fact.value)!r}"
    # the class first: a tensor compared with a number gives a tensor
    return [f"{source.python('type')}({at}) is {source.constant(type(fact.value))} and {same}"]


def _is_told_apart(x: complex) -> bool:
    """Whether == knows a number from all others: 0.0 equals -0.0, and nan not even itself."""
    return isinstance(x, float) and bool(x) and x == x


def _length(fact: Fact, at: str, source: Source) -> list[str]:
    raw = source.raw(fact.origin)
    length = f"{raw}.__len__" if raw else source.python("len")
    return [f"{length}({source.once(at)}) == {fact.value}"]


def _absent(fact: Fact, at: str, source: Source) -> list[str]:
    raw, key = source.raw(fact.origin), source.constant(fact.value)
    at = source.once(at)
    return [f"not {raw}.__contains__({at}, {key})" if raw else f"{key} not in {at}"]


def _keys(fact: Fact, at: str, source: Source) -> list[str]:
    raw, at = source.raw(fact.origin), source.once(at)
    listed = f"{raw}.keys({at})" if raw else at
    return [f"[*{listed}] == {source.constant(list(fact.value))}"]


def _row(whole: str, one: str, known: tuple[int | None, ...]) -> list[str]:
    """Conditions on sizes or strides, of which some are open."""
    if None not in known:
        return [f"{whole} == {known!r}"]
    rest = [f"{one}({k}) == {n}" for k, n in enumerate(known) if n is not None]
    if one.endswith("size"):
        rest += [f"{one}({k}) > 1" for k, n in enumerate(known) if n is None]
        rest.insert(0, f"{one[:-4]}dim() == {len(known)}")
    return rest


def _tensor(fact: Fact, at: str, source: Source) -> list[str]:
    at = source.once(at)
    known: TensorFact = fact.value
    found = [
        f"{at}.__class__ is {source.constant(known.kind)}",
        f"{at}.dtype is {source.constant(known.dtype)}",
        *_row(f"{at}.shape", f"{at}.size", known.size),
        *_row(f"{at}.stride()", f"{at}.stride", known.stride),
        f"{at}.requires_grad is {known.requires_grad}",
        f"{at}.device == {source.constant(known.device)}",
    ]
    if not issubclass(known.kind, torch.nn.Parameter):
        found.append(f"{at}.is_neg() is {known.bits[1]}")
    if known.dtype.is_complex:
        found.append(f"{at}.is_conj() is {known.bits[0]}")
    if known.requires_grad and not issubclass(known.kind, torch.nn.Parameter):
        found.append(f"{at}.is_leaf is {known.is_leaf}")  # writing to one in place is refused
    return found


def _distinct(fact: Fact, at: str, source: Source) -> list[str]:
    def ids(origins: Sequence[Origin]) -> str:
        found = ", ".join(map(source.expression, origins))
        return f"{source.python('map')}({source.python('id')}, [{found}])"

    written = source.once(f"{source.python('set')}({ids(fact.value.written)})")
    count = f"{source.python('len')}({written}) == {len(fact.value.written)}"
    return [f"{count} and {written}.isdisjoint({ids(fact.value.others)})"]


_KINDS: dict[str, _Kind] = {
    "is": _Kind("is", "ID_MATCH", lambda fact, at, source: [f"{at} is {_other(fact, source)}"]),
    "not": _Kind(
        "is not", "DUPLICATE_INPUT",
        lambda fact, at, source: [f"{at} is not {_other(fact, source)}"],
    ),
    "distinct": _Kind("is", "DUPLICATE_INPUT", _distinct, lambda found, value: SHARED),
    "equals": _Kind("equals", "EQUALS_MATCH", _equals),
    "type": _Kind(
        "is of type", "TYPE_MATCH",
        lambda fact, at, source: [
            f"{source.python('type')}({source.once(at)}) is {source.constant(fact.value)}"
        ],
        lambda found, value: type(found),
    ),
    "length": _Kind("has length", "SEQUENCE_LENGTH", _length, lambda found, value: len(found)),
    "absent": _Kind(
        "has no", "DICT_NOT_CONTAINS", _absent,
        lambda found, value: "found" if value in found else value,
    ),
    "keys": _Kind("has the keys", "DICT_KEYS_MATCH", _keys, lambda found, value: tuple(found)),
    "empty": _Kind("is empty:", "EMPTY_NN_MODULE_HOOKS_DICT", lambda fact, at, s: [f"not {at}"]),
    "apart": _Kind(
        "shares no memory with", "NO_TENSOR_ALIASING",
        lambda fact, at, source: [
            f"not {source.constant(overlap)}({source.once(at)}, {_other(fact, source)})"
        ],
    ),
    "related": _Kind(
        "is such that", "SHAPE_ENV", lambda fact, at, source: [fact.value.source(source)]
    ),
    "stride": _Kind(
        "is", "TENSOR_MATCH",
        lambda fact, at, source: [
            f"{source.once(at)}.stride({fact.value.axis}) =="
            f" {size_source(fact.value.size, fact.value.origins, source)}"
        ],
        lambda found, value: Strided(value.axis, found.stride(value.axis), {}),
    ),
    "tensor": _Kind("is", "TENSOR_MATCH", _tensor, lambda found, value: TensorFact.of(found)),
}  # fmt: skip


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    begins = [x.data_ptr() for x in (a, b)]
    ends = [
        begin + (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()
        for begin, x in zip(begins, (a, b))
    ]
    return bool(a.numel() and b.numel() and begins[0] < ends[1] and begins[1] < ends[0])


# ------------------------------------------------------------------------------ looked at


def holds(fact: Fact, look: Callable[[Origin], Any]) -> bool:
    """Whether a fact holds for what is there now. Runs no code of the user's."""
    try:
        found, value = look(fact.origin), fact.value
        if isinstance(value, Distinct):
            written = {id(look(origin)) for origin in value.written}
            others = {id(look(origin)) for origin in value.others}
            return len(written) == len(value.written) and written.isdisjoint(others)
        if isinstance(value, (Related, Strided)):
            return value.holds(found, look)
        return _HOLDS[fact.kind](found, look(value.origin) if type(value) is At else value)
    except GONE:
        return False


def _equal(found: Any, value: Any) -> bool:
    if type(found) is not type(value):
        return False
    if isinstance(value, (tuple, list)):
        return len(found) == len(value) and all(map(_equal, found, value))
    return repr(found) == repr(value) if isinstance(value, (float, complex)) else found == value


def _keys_of(found: Any) -> tuple[Any, ...]:
    return tuple(dict.keys(found) if isinstance(found, dict) else found)


def _lacks(found: Any, key: Any) -> bool:
    raw = raw_class(found)
    return key not in found if raw is None else not raw.__contains__(found, key)


_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "is": operator.is_,
    "not": operator.is_not,
    "equals": _equal,
    "type": lambda found, value: type(found) is value,
    "length": lambda found, value: len(found) == value,
    "absent": _lacks,
    "keys": lambda found, value: _keys_of(found) == value,
    "empty": lambda found, value: not found,
    "apart": lambda found, other: not overlap(found, other),
    "tensor": lambda found, value: value.holds(TensorFact.of(found)),
}


# ------------------------------------------------------------------------------ for filters


@dataclass(frozen=True)
class Guard:
    """A fact as the functions for `guard_filter_fn` see it; fields as torch.compiler has them."""

    name: str
    has_value: bool
    value: object
    guard_type: str
    derived_guard_types: tuple[str, ...]
    is_global: bool
    orig_guard: Fact

    @classmethod
    def of(cls, fact: Fact, values: dict[str, Any]) -> Guard:
        try:
            value, has_value = looking(values)(fact.origin), True
        except GONE:
            value, has_value = None, False
        kind, is_global = _KINDS[fact.kind].torch_name, fact.source.is_global()
        return cls(str(fact.origin), has_value, value, kind, (), is_global, fact)


# ------------------------------------------------------------------------------ all facts


@dataclass
class Facts:
    """The facts of one entry, each once, in the order of discovery.

    listed   origins whose objects the check holds against `_table`
    """

    rows: list[Fact] = field(default_factory=list)
    kinds: dict[Origin, type] = field(default_factory=dict)
    listed: list[Origin] = field(default_factory=list)
    _known: set[tuple[Any, ...]] = field(default_factory=set)
    _keep: list[Any] = field(default_factory=list)

    def add(self, kind: str, origin: Origin, value: Any, where: Callable[[], str]) -> None:
        """Note a condition, unless it is known. `where` says the user's line."""
        by_identity = kind in ("is", "type") and type(value) is not At
        key = (kind, origin, id(value) if by_identity else _hashable(value))
        if key not in self._known:
            self._known.add(key)
            self._keep.append(value)
            if kind == "type":
                self.kinds[origin] = value
            self.rows.append(Fact(kind, origin, value, where()))

    def include(self, more: Facts) -> None:
        """Add what another capture of the same place relied on."""
        self.rows += more.rows
        self.kinds.update(more.kinds)
        self._keep += more._keep

    def keep(self, chosen: Callable[[list[Guard]], Sequence[bool]], values: dict[str, Any]) -> None:
        """Leave out the facts that `chosen` says False of."""
        rows = [fact for fact in self.rows if not isinstance(fact.origin, Held)]
        flags = list(chosen([Guard.of(fact, values) for fact in rows]))
        if len(flags) != len(rows):
            raise OptionError(
                f"guard_filter_fn gave {len(flags)} answers for {len(rows)} guards",
                remedy="return a list with one bool for each guard that it is given",
            )
        dropped = {id(fact) for fact, flag in zip(rows, flags) if not flag}
        self.rows = [fact for fact in self.rows if id(fact) not in dropped]

    def compile(
        self, parameters: list[str], also: dict[str, Any], conditions: list[str]
    ) -> tuple[Callable[..., bool], str]:
        """The check, a function of the locals, and its source."""
        source = Source(self.kinds)
        source.lines += [f"if not ({condition}): return False" for condition in conditions]
        for fact in self.rows:
            for condition in fact.conditions(source):
                source.lines.append(f"if not ({condition}): return False")
        if self.listed:
            listed = ", ".join(map(source.expression, self.listed))
            source.lines.append(f"if _differs(_table.address, [{listed}]) >= 0: return False")
        body = "\n".join(f"        {line}" for line in [*source.lines, "return True"])
        head = f"def check({', '.join(parameters)}):\n    try:\n{body}\n"
        text = f"{head}    except _gone:\n        return False\n"  # what is not there any more
        names = {**also, **source.names, "_gone": GONE}
        return define(text, "check", "guards", names), text

    def unlike(self, look: Callable[[Origin], Any]) -> Fact | None:
        """The first fact that does not hold."""
        return next((fact for fact in self.rows if not holds(fact, look)), None)

    def first_miss(self, values: dict[str, Any]) -> tuple[Fact, Any] | None:
        """The first fact that does not hold for these locals, and what is there instead."""
        with torch._C.DisableTorchFunction():  # modes of the program's would see it
            fact = self.unlike(looking(values))
            return None if fact is None else (fact, self.found(fact, values))

    def changed(
        self, values: dict[str, Any], missed: tuple[Fact, Any] | None = None
    ) -> list[tuple[str, bool, Any, Any]]:
        """As Fact.varying, of the fact that was missed and of all tensors and numbers."""
        found = [] if missed is None else [*missed[0].varying(missed[1])]
        with torch._C.DisableTorchFunction():  # modes of the program's would see it
            look = looking(values)
            for fact in self.rows:
                is_asked = missed is None or fact is not missed[0]
                if is_asked and fact.kind in ("tensor", "equals") and not holds(fact, look):
                    found += fact.varying(self.found(fact, values))
        return found

    def found(self, fact: Fact, values: dict[str, Any]) -> Any:
        """What is there for a fact with these locals; ABSENT if nothing is."""
        try:
            return fact.now(looking(values))
        except GONE:
            return ABSENT


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), repr(value) if isinstance(value, float) else value)


def is_one_more(kind: str, before: Any, now: Any) -> bool:
    """Whether an int, or one size of a tensor, is larger by one."""
    if kind == "equals":
        return type(before) is type(now) is int and now == before + 1
    if kind != "tensor" or not type(before) is type(now) is TensorFact:
        return False
    if len(now.size) != len(before.size):
        return False
    pairs = zip(before.size, now.size)
    steps = [b - a for a, b in pairs if a is not None and b is not None and a != b]
    return steps == [1] and now.dtype == before.dtype


def describe(fact: Fact, found: Any) -> str:
    """One sentence about a miss."""
    if fact.kind == "related":
        return f"{fact.value} held with {fact.value.then()}, and does not with {found}"
    return f"{fact.origin} was {_shown(fact.kind, fact.value)}, is {_shown(fact.kind, found)}"


# ---------------------------------------------------------------------------- check
# The check of one entry: facts about what dicts hold are watched, the others are looked at.
#
# Most facts of a model are about the attributes and parameters of its modules. Where dicts have
# versions (runtime/change_detection.py) all of these together are one call, as long as nothing
# changed. Of a dict that changed the items that facts lead through are looked at; if one of them
# is another object, all facts are, and noted anew. Facts about tensors that are new at each call
# are one call too.

_FEW = 8  # facts that are looked at as quickly as they are watched
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_UNCHANGING = (*_DICTS, list, tuple, set, frozenset)  # classes that an instance cannot leave
_PLAIN = (int, bool, str, float)
_A_FLOAT = object()  # stands for any float


@process.paused()
def compile_check(
    facts: Facts,
    parameters: list[str],
    names: dict[str, Any],
    conditions: list[str],
    values: Mapping[str, Any],
) -> tuple[Callable[..., bool], Callable[[], str]]:
    """The check as a function of the locals, and what gives its source.

    conditions   about global state, with `names` for what they use
    values       the locals, for which all facts hold now
    """
    if not available():
        check, text = facts.compile(parameters, names, conditions)
        return check, lambda: text
    watched, others = _Watched(facts.kinds), Facts(kinds=facts.kinds)
    for fact in facts.rows:
        (watched.facts if watched.takes(fact) else others).rows.append(fact)
    if len(watched.facts.rows) < _FEW:
        watched, others = _Watched(facts.kinds), Facts(facts.rows, facts.kinds)
    fresh = _fresh(others, values)
    if watched.facts.rows:
        watched.start()
        names = {**names, "_changed": changed(), "_watched": watched}
        conditions = [*conditions, "_changed(_watched.address) < 0 or _watched.look()"]
    if fresh is not None:
        others.listed = [fact.origin for fact in fresh[0]]
        names = {**names, "_differs": differs(), "_table": fresh[1]}
    check, text = others.compile(parameters, names, conditions)

    def source() -> str:
        if fresh is None and not watched.facts.rows:
            return text
        seen = [] if fresh is None else [f"# _table: {fact}" for fact in fresh[0]]
        looked = watched.compiled[1] if watched.facts.rows else ""
        return "\n".join([text, *seen, "# _watched.look():", looked])

    return check, source


def _fresh(others: Facts, values: Mapping[str, Any]) -> tuple[list[Fact], Table] | None:
    """Takes facts about tensors out of `others` that one call of machine code looks at.

    None if they are few.
    """
    look = looking(values)
    taken: list[Fact] = []
    found: list[torch.Tensor | None] = []
    for fact in others.rows:
        known, is_grad = fact.value, isinstance(fact.origin, Attr) and fact.origin.name == "grad"
        if fact.kind == "tensor" and isinstance(known, TensorFact) and None not in known.size:
            if known.requires_grad and not issubclass(known.kind, torch.nn.Parameter):
                continue  # whether it is a leaf matters too
            tensor = look(fact.origin)
            if can_watch(tensor):
                taken.append(fact)
                found.append(tensor)
        elif fact.kind == "equals" and known is None and is_grad:
            taken.append(fact)
            found.append(None)
    if len(taken) < _FEW:
        return None
    gone = set(map(id, taken))
    others.rows = [fact for fact in others.rows if id(fact) not in gone]
    return taken, Table(found)


class _Watched:
    """Facts that hold as long as some dicts, lists and tensors do not change.

    _through   by dict: what it holds where facts lead through it, ABSENT included
    _wholly    by dict: its keys, where they are a fact
    """

    def __init__(self, kinds: dict[Origin, type]) -> None:
        self.facts = Facts(kinds=kinds)
        self.address = 0
        self._forget()

    def _forget(self) -> None:
        self._dicts: dict[int, dict[Any, Any]] = {}
        self._lists: dict[int, list[Any]] = {}
        self._owners: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._tensors: list[torch.Tensor] = []
        self._through: dict[int, dict[Any, Any]] = {}
        self._wholly: dict[int, tuple[Any, ...]] = {}
        self._objects: dict[Origin, Any] = {}

    def takes(self, fact: Fact) -> bool:
        """Whether the fact follows from what is watched; notes what that is."""
        if fact.kind in ("absent", "keys", "length"):
            return self._takes_whole(fact)
        if fact.kind == "not" and isinstance(fact.value, At):
            found = self._object(fact.origin), self._object(fact.value.origin)
            return found[0] is not ABSENT and found[1] is not ABSENT
        if isinstance(fact.value, Distinct):
            parts = [self._object(x) for x in (*fact.value.written, *fact.value.others)]
            return all(part is not ABSENT for part in parts)
        if not isinstance(fact.origin, (Item, Dict)) or isinstance(fact.value, (At, set)):
            return False
        if isinstance(fact.origin, Item) and fact.kind == "type" and fact.value is float:
            of = self._container(fact.origin.of)
            if isinstance(of, dict):
                self._through[id(of)].setdefault(fact.origin.key, _A_FLOAT)
            return isinstance(of, dict)
        found = self._object(fact.origin)
        if found is ABSENT:
            return False
        if fact.kind == "tensor":
            if can_watch(found):
                self._tensors.append(found)
            return can_watch(found)
        if fact.kind not in ("is", "equals", "type", "empty"):
            return False
        if fact.kind == "type":
            return fact.value in _UNCHANGING
        return fact.kind != "empty" or self._takes_whole(fact)

    def _takes_whole(self, fact: Fact) -> bool:
        whole = self._container(fact.origin)
        if isinstance(whole, dict):
            if fact.kind == "absent":
                self._through[id(whole)][fact.value] = ABSENT
            else:
                self._wholly[id(whole)] = tuple(whole)
        return whole is not None and (fact.kind == "length" or isinstance(whole, dict))

    def start(self) -> None:
        """Begin to watch. The facts hold now."""
        self._objects = {}
        dicts, lists, owners = (
            [*some.values()] for some in (self._dicts, self._lists, self._owners)
        )
        self._watch = Watch(dicts, self._tensors, lists, owners)
        self.address = self._watch.address

    def look(self) -> bool:
        """Whether the facts hold, since something that is watched has changed."""
        while (k := changed()(self.address)) >= 0:
            if k >= len(self._watch.dicts) or not self._is_as_it_was(self._watch.dicts[k]):
                return self._look_at_all()
            self._watch.note(k)
        return True

    def _is_as_it_was(self, names: dict[Any, Any]) -> bool:
        """Whether facts lead to the same objects through a dict as before."""
        for key, was in self._through[id(names)].items():
            now = dict.get(names, key, ABSENT)
            if now is was or (was is _A_FLOAT and type(now) is float):
                continue
            if type(now) is not type(was) or type(now) not in _PLAIN or repr(now) != repr(was):
                return False
        keys = self._wholly.get(id(names))
        return keys is None or keys == tuple(names)

    def _look_at_all(self) -> bool:
        if not self.compiled[0]():
            return False
        self._forget()
        for fact in self.facts.rows:
            self.takes(fact)
        self.start()
        return True

    @functools.cached_property
    def compiled(self) -> tuple[Callable[..., bool], str]:
        """All facts as a function, made when first needed: most dicts never change."""
        return self.facts.compile([], {}, [])

    # ---------------------------------------------------------------------- containers

    def _container(self, origin: Origin) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
        """The container at an origin that only held objects and what is watched lead to."""
        found = self._object(origin)
        if isinstance(found, types.MappingProxyType) and isinstance(origin, Held):
            found = next((x for x in gc.get_referents(found) if type(x) is dict), None)
        if type(found) in _DICTS:
            self._dicts[id(found)] = found
            self._through.setdefault(id(found), {})
        elif type(found) is list:
            self._lists[id(found)] = found
        elif type(found) is not tuple:
            return None
        return found  # type: ignore[no-any-return]

    def _object(self, origin: Origin) -> Any:
        """What is there; ABSENT if nothing is, or nothing that is watched leads there."""
        for part in origin.beyond(self._objects):  # what is a part of the next comes first
            self._objects[part] = self._part(part)
        return self._objects[origin]

    def _part(self, origin: Origin) -> Any:
        if isinstance(origin, Held):
            return origin.value
        if isinstance(origin, Dict):
            return self._dict_of(self._object(origin.of))
        of = self._container(origin.of) if isinstance(origin, Item) else None
        if of is None or not isinstance(origin, Item):
            return ABSENT
        if isinstance(of, dict):
            found = self._through[id(of)][origin.key] = dict.get(of, origin.key, ABSENT)
            return found
        return of[origin.key] if origin.key in range(len(of)) else ABSENT

    def _dict_of(self, owner: Any) -> Any:
        """The `__dict__` that an object has now; ABSENT if another could not be noticed."""
        if id(owner) not in self._owners:
            if owner is ABSENT or pointer(owner) is None:
                return ABSENT
            self._owners[id(owner)] = owner, object.__getattribute__(owner, "__dict__")
        return self._owners[id(owner)][1]
