"""What lies outside the program that is captured: read under guards, written only afterwards.

Every object from outside is known by identity to its origin. Scalars are facts (equal to this
value), modules, functions and classes too (this very object); instances and containers are facts of
their type, and of each attribute, length or element once it is looked at. A tensor from outside
becomes a FakeTensor.

Nothing outside changes while a program is captured. An attribute or an element that is written goes
into the object's Mirror, which later reads consult first, and which is replayed after the graph.
"""

from __future__ import annotations

import collections
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fusee.capture.bytecode import assigned_globals
from fusee.capture.captured import Relation, SizeRelation
from fusee.capture.dynamic import (
    VALUES,
    Computed,
    Number,
    Varying,
    exactly,
    fits_double,
    load_number,
    loaded,
)
from fusee.capture.effects import written
from fusee.capture.frame import (
    ABSENT,
    BOUND_IN_C,
    CONTAINERS,
    EXACT,
    FIXED,
    HELD_OWNERS,
    is_exact,
    is_named,
    is_scalar,
)
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import (
    Absent,
    Alias,
    Distinct,
    EqualsMatch,
    Fact,
    Facts,
    IdMatch,
    Keys,
    Length,
    NotAlias,
    TensorFact,
    TensorMatch,
    TypeMatch,
)
from fusee.capture.mirrors import (
    FEW,
    Itself,
    Later,
    Lent,
    Mirror,
    Mirrors,
    Opened,
    beyond_items,
    by_identity,
    coming,
    dict_class,
    empty_like,
    is_alone,
    is_key,
    items_of,
    keys_of,
    meet,
    new_tuple,
    remaining,
    snapshot,
)
from fusee.capture.recorder import Recorder
from fusee.capture.sources import (
    IN_C,
    Attr,
    Cell,
    ClassDict,
    Dict,
    Held,
    Item,
    Local,
    Origin,
    ResultOf,
    has,
    input_name,
    is_buffer,
    is_empty,
    is_remade,
    is_trusted,
    length,
    missing,
    own_dict,
)
from fusee.capture.symbols import Symbols, is_open
from fusee.capture.torch_api import (
    FakeTensor,
    fake_mode,
    fake_of,
    has_fixed_address,
    no_torch_function,
    oddity,
    own_classes,
    plain_tensor,
    was_leaf,
    why_unseen,
)
from fusee.source import Args, Kwargs

# ---------------------------------------------------------------------------- world


DELETED = ABSENT


_LIKE_OTHERS = (int, bool, float, complex, tuple)  # 1 is not True


class World:
    """All that one capture knows of the outside.

    machine  whose world it is; where: gives the user's present line
    varies   whether a float from outside is an input of the graph, not a constant
    """

    def __init__(self, machine: Any, varies: Varying) -> None:
        self.machine, self.where = machine, machine.where
        self.varies = varies
        self.facts = Facts()
        self.mode = fake_mode()
        self.inputs: dict[int, tuple[torch.Tensor, Origin]] = {}  # by id of the fake
        self.symbols = Symbols(self.where, self.mode)
        self.recorder = Recorder(self)
        self.mirrors = Mirrors()
        self.slots: dict[tuple[int, str], tuple[Any, Origin, Any]] = {}
        self.slots_read = 0  # how often one of these was asked for
        # what backward passes in the graph have used up of autograd's; None: there may be none
        self.passed: list[Any] | None = None
        # of `slots`, those that are None before the graph, so that what was there is let go of
        self.released: list[tuple[int, str]] = []
        self.later: list[Later] = []
        self.sinks: dict[int, Origin] = {}  # lists that warnings are appended to
        self.hashed: dict[int, Origin] = {}  # tensors, by id of the fake
        self.of_arrays: dict[int, torch.Tensor] = {}  # those whose memory is an array's
        self.frozen: dict[int, Origin] = {}  # frozensets that are known by value
        self.iterators: dict[int, Opened] = {}  # by id of the real one and of its stand-in
        self.numbers: dict[Origin, Number] = {}
        self.computed: dict[Any, Origin] = {}  # what is made of such numbers before the graph
        self._open: dict[Origin, Any] = {}  # integers that vary
        self.arrays: dict[int, tuple[Any, Origin, Origin, Any]] = {}  # by id of the real one
        self.seen: dict[int, type] = self.recorder.seen  # subclass, by id of the fake
        self.put_on: dict[int, Mirror] = {}  # attributes of such as the graph computes, likewise
        self.put_grads: dict[int, Any] = {}  # by id of such a tensor
        self._origins: dict[int, Origin] = {}
        self._passing: dict[int, Origin] = {}  # modules that nothing was asked of yet, likewise
        self._fakes: dict[int, torch.Tensor] = {}  # by id of the real one
        self._dicts: dict[int, Origin] = {}
        self._twins: dict[int, Any] = {}  # tuples with attributes, by id of what is made of them
        self._parts: dict[Any, Origin] = {}
        self.made_classes: set[type] = set()
        self.popped: dict[int, set[Any]] = {}  # sets that the program made, by id
        self.made_by: dict[int, tuple[Any, Args, Kwargs]] = {}  # by id: the call that gives it
        self._class_items: dict[tuple[type, str], tuple[Any]] = {}
        self.lent: dict[int, Lent] | None = {}  # by id; None: nothing may be
        self.taken: dict[tuple[str, str], Any] = {}  # without a guard, by module and name
        self.passing: list[str] = []  # what the capture saw that is another in each process
        self._keep: list[Any] = []

    def begins(self, anew: set[str]) -> None:
        """See to it that what earlier attempts failed of is not done; see `Anew`."""
        self.passed = None if "between" in anew else []
        self.lent = None if "lent" in anew else {}
        self.addressed: list[Any] | None = None if "address" in anew else []  # show_address()

    # ---------------------------------------------------------------------- reading

    def fact(self, kind: type[Fact], origin: Origin, value: Any) -> None:
        if value is not origin:
            self.facts.add(kind, origin, value, self.where)

    def gives(self, origin: Origin, function: Any, words: str, value: Any) -> None:
        """Know what a function gives for an object."""
        self.fact(EqualsMatch, ResultOf(origin, function, words), value)

    def origin(self, obj: Any) -> Origin | None:
        """Where an object came from; None for one that the program made, and for scalars."""
        key = id(obj)
        if key in self._passing:
            self.fix(obj, self._passing.pop(key), None)
        return self._origins.get(key)

    def passed_from(self, obj: Any) -> Origin | None:
        """The same, for what is only passed on: then a module may be another one."""
        return self._passing.get(id(obj)) or self._origins.get(id(obj))

    def fix(self, obj: Any, origin: Origin, known: Origin | None) -> Any:
        """Make sure that it is this very object."""
        # one fact per path: two paths to one object may part later
        self.fact(IdMatch, origin, obj)
        known = known or Held(obj, str(origin))
        if isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
            self.fact(TypeMatch, known, type(obj))  # `__class__` can be written to
        return self.know(obj, known)

    def load(self, obj: Any, origin: Origin) -> Any:
        """What the program sees in place of an object from outside, guarded."""
        if is_scalar(obj):
            if type(obj) in (float, int) and fits_double(obj) and self.varies(origin, obj):
                if type(obj) is float or not self.varies.with_symbols:
                    return load_number(self, obj, origin)
                return self._load_int(obj, origin)
            how = IdMatch if isinstance(obj, enum.Enum) else EqualsMatch
            self.fact(how, origin, obj)
            return obj
        if (found := loaded(self, obj, origin)) is not None:
            return found
        kind: Any = type(obj)  # isinstance() asks objects for their class, by code of the program
        if issubclass(kind, torch.Tensor):
            with no_torch_function():
                return self._load_tensor(obj, origin)
        known = self.origin(obj)
        if issubclass(kind, types.FunctionType) and is_remade(obj, known, origin):
            if known is not None:
                self.fact(Alias, origin, known)
                return obj
            self.fact(TypeMatch, origin, types.FunctionType)
            self.know(obj, origin)
            self.fact(IdMatch, self.place(obj, "__code__"), obj.__code__)
            return obj
        is_bound = issubclass(kind, BOUND_IN_C) and not isinstance(obj.__self__, HELD_OWNERS)
        if is_bound and known is None:
            return self._load_bound(obj, origin)
        if issubclass(kind, FIXED) and not is_bound:
            if known or not issubclass(kind, torch.nn.Module) or not isinstance(origin.root, Local):
                return self.fix(obj, origin, known)
            self.fact(TypeMatch, origin, type(obj))
            self._keep.append(obj)
            self._passing[id(obj)] = origin
            return obj
        if issubclass(kind, tuple):
            return self._load_tuple(obj, origin)
        if type(obj) is slice:
            return self._load_slice(obj, origin)
        if type(obj) is frozenset and self._load_frozen(obj, origin):
            return obj
        if known is not None:
            self.fact(Alias, origin, known)
            return obj
        if issubclass(kind, types.MethodType):
            self.fact(TypeMatch, origin, types.MethodType)
            owner = self.load(obj.__self__, Attr(origin, "__self__"))
            function = self.load(obj.__func__, Attr(origin, "__func__"))
            if owner is obj.__self__ and function is obj.__func__:
                return self.know(obj, origin)
            return types.MethodType(function, owner)
        self.fact(TypeMatch, origin, type(obj))
        if issubclass(kind, VALUES):
            self._exactly(obj, origin)
        return self.know(obj, origin)

    def _load_int(self, number: int, origin: Origin) -> Any:
        """An integer that varies: a symbol."""
        known = self._open.get(origin)
        if known is None:
            self.fact(TypeMatch, origin, int)
            ends = 1 - 2**48, 2**48 - 1, self.varies.mark(origin)
            known = self._open[origin] = self.symbols.load(number, origin, *ends)
        return known

    def _exactly(self, obj: Any, origin: Origin) -> None:
        self.gives(origin, exactly, "the value of ", exactly(obj))

    def _load_bound(self, obj: Any, origin: Origin) -> Any:
        """A method in C of an object from outside: `log.append`, say, alive at a break."""
        self.fact(TypeMatch, origin, type(obj))
        self.load(obj.__name__, Attr(origin, "__name__"))
        owner = self.load(obj.__self__, Attr(origin, "__self__"))
        if is_open(owner) or isinstance(owner, Computed):  # whose methods are others
            return types.MethodType(getattr(type(obj.__self__), obj.__name__), owner)
        return self.know(obj, origin) if owner is obj.__self__ else getattr(owner, obj.__name__)

    def know(self, obj: Any, origin: Origin) -> Any:
        self._origins[id(obj)] = origin
        self._keep.append(obj)
        return obj

    def made(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call gives that only makes an object: where it escapes, it is made again."""
        obj = function(*args, **kwargs)
        self._keep.append(obj)
        self.made_by[id(obj)] = function, args, kwargs
        return obj

    def hold(self, obj: Any, words: str) -> Any:
        """Know an object that the capture may rely on without a guard."""
        if self.origin(obj) is None:
            self.know(obj, Held(obj, words))
            if isinstance(obj, types.MethodType) and not isinstance(obj.__self__, type):
                self.hold(obj.__self__, f"{words}.__self__")  # random.gauss: its state is none
        return obj

    def opened(self, iterator: Any) -> Any:
        """What stands for an iterator of C from outside, such as a loop's when a graph ended."""
        opened = self._opened(iterator)
        if opened.stand_in is None:
            origin = self._origins[id(iterator)]
            rest = ResultOf(origin, remaining, "the rest of ")
            items = remaining(iterator)
            self.fact(Length, rest, len(items))
            listed = list(enumerate(items))[opened.asked :]
            loaded = iter([self.load(item, Item(rest, k)) for k, item in listed])
            opened.stand_in, opened.size = self.know(loaded, origin), len(listed)
            self.iterators[id(loaded)] = opened
        return opened.stand_in

    def _opened(self, iterator: Any) -> Opened:
        if id(iterator) not in self.iterators:
            try:
                remaining(iterator)
            except RuntimeError as error:
                raise GraphBreak(f"an iterator from outside goes no further: {error}") from None
            if meet(iterator, self.iterators.values()):
                raise GraphBreak("two iterators from outside go through the same")
            self.iterators[id(iterator)] = Opened(iterator)
        return self.iterators[id(iterator)]

    def next_of(self, iterator: Any) -> Any:
        """The next element; how many more there are is no fact, so that turns of a loop share it.

        raises   StopIteration
        """
        opened = self._opened(iterator)
        if opened.stand_in is not None or opened.asked == FEW:
            return next(self.opened(iterator))
        coming_of = ResultOf(self._origins[id(iterator)], coming, "what comes of ")
        place, k = self.one(coming_of, "coming", id(iterator)), opened.asked
        opened.asked += 1
        items = coming(iterator)
        if k < len(items):
            return self.load(items[k], self.item(place, k))
        self.fact(Length, place, len(items))
        raise StopIteration

    def hold_from_trusted(self, obj: Any, module: str, name: str) -> Any:
        """What a module of torch or of Python holds: constant, unless it assigns that itself, or
        holds a function of the program's."""
        is_programs = type(obj) is types.FunctionType and not is_trusted(obj.__module__)
        if is_programs or name in assigned_globals(module):
            return self.get(self.mirror_of_globals(sys.modules[module].__dict__, module), name)
        self.taken[module, name] = obj
        is_value = is_exact(obj) or type(obj) is frozenset or is_scalar(obj)
        return obj if is_value else self.hold(obj, f"{module}.{name}")

    def one(self, place: Origin, *key: Any) -> Origin:
        """The origin known by a key: one object, so that facts about it are found again."""
        return self._parts.setdefault(key, place)

    def referent(self, ref: weakref.ref[Any]) -> Any:
        """What a weak reference leads to."""
        origin, obj = self._origins.get(id(ref)), ref()
        is_made = type(obj) is FakeTensor and id(obj) not in self.inputs  # and kept alive
        if is_made or self._is_let_go(self._fakes.get(id(obj), obj)):
            raise GraphBreak("a weak reference to what the program lets go of may lead nowhere")
        if origin is None:
            return obj
        place = ResultOf(origin, operator.call, "the object of ")
        return self.load(obj, self.one(place, "referent", id(ref)))

    def _is_let_go(self, x: Any) -> bool:
        """Whether an object from outside is not in the variable, or the place, where it was."""
        origin = self._origins.get(id(x))
        if isinstance(origin, Local):
            held = (y for f in self.machine.frames for y in (*f.locals.values(), *f.stack))
            return not any(y is x for y in held)
        return origin is not None and any(m.gave_up(x) for m in self.mirrors.values())

    def is_changed_inside(self, *objects: Any) -> bool:
        """Whether the program has written to one of some objects from outside since it began."""
        known = (self.mirrors.get(id(y)) for x in objects for y in (x, getattr(x, "__dict__", x)))
        return any(mirror is not None and mirror.is_changed() for mirror in known)

    def said_to(self, sink: Any, origin: Origin) -> bool:
        """Whether what is said, to a list or to others (True), can be seen by the program."""
        if self.load(sink, origin) is sink and type(sink) is list:
            self.sinks[id(sink)] = origin
            return id(sink) in self.mirrors
        return bool(sink)

    def mirror_of_globals(self, names: dict[str, Any], module: str) -> Mirror:
        """The Mirror of a module's variables."""
        return self.mirrors.get(id(names)) or self.mirror(names, Held(names, module))

    def _load_tensor(self, x: torch.Tensor, origin: Origin) -> torch.Tensor:
        if (there := self._fakes.get(id(x))) is not None:
            first = self._origins[id(there)]
            if first is not origin:
                self.fact(Alias, origin, first)
            return there
        place, plain, made = origin, x, None
        if type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            self.fact(TypeMatch, origin, type(x))
            self.allow(type(x))
            place = ResultOf(origin, plain_tensor, "the tensor of ")
            plain = plain_tensor(x)
            self.gives(origin, was_leaf, "is_leaf of ", x.is_leaf)
        if kind := oddity(x):
            raise GraphBreak(f"a tensor {kind} is not captured")
        is_state = isinstance(x, (torch.nn.Parameter, torch.nn.Buffer)) or is_buffer(origin)
        strided: list[tuple[Origin, Relation]] = []
        try:
            known = TensorFact.of(plain)
        except RuntimeError:  # of is_leaf
            raise GraphBreak("a view whose base was written to where autograd lost track") from None
        if not is_state:
            made, known, strided = self.symbols.fake(plain, known, place, self.varies, x)
        if has_fixed_address(x):
            self.passing.append("an address")
            self.gives(origin, torch.Tensor.data_ptr, "the address of ", x.data_ptr())
        self.fact(TensorMatch, place, known)
        for one in strided:
            self.fact(SizeRelation, *one)
        fake = self._fakes[id(x)] = self.input(x, place, origin, made)
        self._origins[id(fake)] = origin
        if plain is not x:
            self.mirror(x.__dict__, self._dicts.setdefault(id(x), Dict(origin)))
            self.seen[id(fake)] = type(x)
        return fake

    def allow(self, kind: type) -> None:
        """Make sure of a subclass of torch.Tensor; GraphBreak if its instances are not captured."""
        if why := why_unseen(kind):
            raise GraphBreak(f"a tensor of class {kind.__qualname__} is not captured: {why}")
        for cls in own_classes(kind):
            self.fact(Keys, self.class_place(cls), tuple(cls.__dict__))

    def input(
        self, x: torch.Tensor, origin: Origin, named: Origin, fake: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The stand-in for an input of the graph, found at `origin`, named after `named`."""
        fake = fake_of(self.mode, x) if fake is None else fake
        if x.is_inference() and not torch.is_inference_mode_enabled():
            self.recorder.unsaved = "autograd would save a tensor of inference mode"
        self._keep += [x, fake]
        self.inputs[id(fake)] = (x, origin)
        self.recorder.add_input(fake, input_name(named))
        return fake

    def _load_tuple(self, obj: tuple[Any, ...], origin: Origin) -> Any:
        places = [self.item(origin, k) for k in range(length(obj))] if self.varies.is_any() else []
        if is_exact(obj) and not any(map(self.varies, places, obj)):
            self.fact(EqualsMatch, origin, obj)
            return obj
        # tuples may be nested deeper than Python's calls
        half_loaded: list[tuple[tuple[Any, ...], Origin, list[Any]]] = [(obj, origin, [])]
        while True:
            whole, place, items = half_loaded[-1]
            if not items:
                self.fact(TypeMatch, place, type(whole))
                self.fact(Length, place, tuple.__len__(whole))
                if beyond := beyond_items(whole):
                    self.gives(place, beyond_items, "more of ", beyond)
            if len(items) == tuple.__len__(whole):
                half_loaded.pop()
                loaded, has_own = whole, hasattr(whole, "__dict__")
                if has_own or not all(a is b for a, b in zip(items, tuple.__iter__(whole))):
                    loaded = new_tuple(type(whole), items, beyond_items(whole))
                if has_own:
                    self._twins[id(self.know(loaded, place))] = whole
                if not half_loaded:
                    return loaded
                half_loaded[-1][2].append(loaded)
                continue
            item, part = tuple.__getitem__(whole, len(items)), self.item(place, len(items))
            if type(item) is tuple and not is_exact(item):
                half_loaded.append((item, part, []))
            else:
                items.append(self.load(item, part))

    def _load_frozen(self, obj: frozenset[Any], origin: Origin) -> bool:
        """Make a fact of a set, if all that it holds is known by value or by name."""
        if all(type(item) in EXACT or is_exact(item) for item in obj):
            self._exactly(obj, origin)
        elif all(map(is_named, obj)):
            self.fact(EqualsMatch, origin, obj)
            self._hold_items(obj, origin)
        else:
            return False
        self.frozen[id(obj)] = origin
        return True

    def _hold_items(self, obj: Any, origin: Origin) -> None:
        """Know the functions and classes in a set that is a fact."""
        for item in obj:
            if not is_scalar(item) and type(item) is not tuple:
                self.hold(item, f"an element of {origin}")

    def _load_slice(self, obj: Any, origin: Origin) -> Any:
        self.fact(TypeMatch, origin, slice)
        ends = [(getattr(obj, name), Attr(origin, name)) for name in ("start", "stop", "step")]
        loaded = [self.load(end, place) for end, place in ends]
        is_same = all(a is b for a, (b, _) in zip(loaded, ends))
        return self.know(obj if is_same else slice(*loaded), origin)

    def begins_at(self, fake: torch.Tensor) -> int:
        """Where an input begins in its memory, as a fact."""
        real, origin = self.inputs[id(fake)]
        begin = int(real.storage_offset())
        self.gives(origin, torch.Tensor.storage_offset, "the offset of ", begin)
        return begin

    def stray(self, x: torch.Tensor) -> torch.Tensor:
        """A real tensor among the arguments of a torch function."""
        known = self._fakes.get(id(x))
        if known is not None:
            return known
        if type(x) is FakeTensor:
            raise GraphBreak("a tensor of another capture came in")
        raise GraphBreak("a tensor came in by a way that capture did not see")

    # ---------------------------------------------------------------------- attributes

    def attributes(self, obj: Any) -> Mirror | None:
        """The Mirror of an outside instance's `__dict__`; None if it has none or is not outside."""
        origin = self.origin(obj)
        if origin is None:
            return None
        try:
            found = own_dict(self._twins.get(id(obj), obj))
        except AttributeError:
            return None
        if not isinstance(found, dict):
            return None
        place = self._dicts.get(id(obj)) or self._dicts.setdefault(id(obj), Dict(origin))
        return self.mirror(found, place)

    def mirror(self, obj: Any, origin: Origin | None = None) -> Mirror:
        found = self.mirrors.get(id(obj))
        if found is None and id(obj) in self.sinks:
            raise GraphBreak("the list is read that warnings are appended to")
        if found is None:
            origin = origin or self._origins[id(obj)]
            found = self.mirrors[id(obj)] = Mirror(obj, origin)
            self._keep.append(obj)
            if isinstance(origin, Dict):
                self.fact(TypeMatch, origin, type(obj))
        elif (origin := origin or self._origins.get(id(obj), found.origin)) is not found.origin:
            self.fact(Alias, origin, found.origin)  # two objects with one `__dict__`
        return found

    def get(self, mirror: Mirror, key: Any) -> Any:
        """An item of an outside dict, or ABSENT; either is a fact."""
        if mirror.copy is not None:
            return dict.get(mirror.copy, key, ABSENT)
        if key in mirror.writes:
            return mirror.writes[key]
        if dict.__contains__(mirror.obj, key):
            return self.load(dict.__getitem__(mirror.obj, key), self.part(mirror, key))
        self.fact(Absent, mirror.origin, key)
        return ABSENT

    def part(self, mirror: Mirror, key: Any) -> Origin:
        """The origin of an item."""
        slot = ("item", id(mirror.obj), type(key), key)
        return self._parts.get(slot) or self._parts.setdefault(slot, Item(mirror.origin, key))

    def item(self, origin: Origin, k: int) -> Origin:
        """The origin of an element of what is at `origin`."""
        return self.one(Item(origin, k), "element", origin, k)

    def set(self, mirror: Mirror, key: Any, value: Any) -> None:
        is_moved = key in mirror.moved or mirror.writes.get(key) is DELETED
        if type(value) is FakeTensor and mirror.copy is None and not is_moved:
            there = ("item", id(mirror.obj), type(key), key) in self._parts
            if there and self._fakes.get(id(dict.get(mirror.obj, key))) is value:
                mirror.writes.pop(key, None)  # what was there is back
                return
        if mirror.copy is not None:
            kind = dict_class(mirror.copy)  # not what a subclass makes of it
            if value is DELETED:
                kind.pop(mirror.copy, key, None)
            else:
                kind.__setitem__(mirror.copy, key, value)
            return
        if mirror.writes.get(key) is DELETED and value is not DELETED:
            del mirror.writes[key]  # it comes back behind all others
            mirror.moved.add(key)
        mirror.writes[key] = value

    def class_item(self, cls: type, name: str) -> Any:
        """What a class itself holds under a name, before any descriptor acts; or ABSENT."""
        if cls.__flags__ & IN_C or cls in self.made_classes:
            return cls.__dict__.get(name, ABSENT)
        known = self._class_items.get((cls, name))
        if known is None:
            known = self._class_items[cls, name] = (self._class_item(cls, name),)
        return known[0]

    def _class_item(self, cls: type, name: str) -> Any:
        place = self.class_place(cls)
        if name not in cls.__dict__:
            self.fact(Absent, place, name)
            return ABSENT
        value = cls.__dict__[name]
        part = self.one(Item(place, name), id(cls), name)
        if is_scalar(value) or isinstance(value, (torch.Tensor, tuple, *CONTAINERS)):
            return self.load(value, part)
        if value.__class__ is not type(value):
            raise GraphBreak(f"{cls.__qualname__}.{name} says that it is of another class")
        self.fact(IdMatch, part, value)
        return self.hold(value, f"{cls.__qualname__}.{name}")

    def class_place(self, cls: type) -> Origin:
        """The origin of what a class itself holds."""
        self._keep.append(cls)
        return self._dicts.setdefault(id(cls), ClassDict(cls.__dict__, cls.__qualname__, cls))

    # ---------------------------------------------------------------------- containers

    def whole(self, obj: Any) -> Any:
        """A copy of an outside container that stands for it: all its elements are facts now."""
        mirror = self.mirror(obj)
        if mirror.copy is not None:
            return mirror.copy
        if isinstance(obj, dict):
            mirror.copy = self._whole_dict(mirror)
        elif isinstance(obj, (list, collections.deque)):
            self.fact(Length, mirror.origin, len(held := snapshot(obj)))
            items = [self.load(item, self.part(mirror, k)) for k, item in enumerate(held)]
            mirror.copy = empty_like(obj)
            (list if isinstance(obj, list) else collections.deque).extend(mirror.copy, items)
            if isinstance(obj, collections.deque):
                self.fact(EqualsMatch, self.place(obj, "maxlen"), obj.maxlen)
                mirror.reader = collections.deque.__iter__(mirror.copy)
        else:
            if not isinstance(obj, set):
                raise GraphBreak(f"a {type(obj).__name__} from outside is written to")
            known = set(obj)
            if not all(is_scalar(item) or is_named(item) or is_exact(item) for item in known):
                raise GraphBreak("a set from outside holds more than numbers, texts and functions")
            self.fact(EqualsMatch, mirror.origin, known)
            if any(type(item) in _LIKE_OTHERS for item in known):
                self._exactly(known, mirror.origin)
            self._hold_items(known, mirror.origin)
            mirror.copy = empty_like(obj)
            set.update(mirror.copy, known)
        mirror.before = mirror.copy.copy() if type(obj) in CONTAINERS else snapshot(mirror.copy)
        for key, value in mirror.writes.items():
            if key in mirror.moved:
                self.set(mirror, key, DELETED)
            self.set(mirror, key, value)
        if mirror.tail:
            list.extend(mirror.copy, mirror.tail)
        return mirror.copy

    def append(self, obj: list[Any], value: Any) -> None:
        """`obj.append(value)` of a list from outside: what it has already is no fact."""
        mirror = self.mirror(obj)
        list.append(mirror.tail if mirror.copy is None else mirror.copy, value)

    def _whole_dict(self, mirror: Mirror) -> Any:
        obj = mirror.obj
        keys = keys_of(obj)
        fixed = [*map(is_key, keys)]
        if not all(found or is_alone(key) for found, key in zip(fixed, keys)):
            raise GraphBreak("a dict from outside has keys that a user's `__eq__` compares")
        shown = keys
        if not all(fixed):
            shown = self.load(keys, ResultOf(mirror.origin, keys_of, "the keys of "))
            self.hash(shown)
        else:
            self.fact(Keys, mirror.origin, keys)
        copy, places = empty_like(obj), ResultOf(mirror.origin, items_of, "the items of ")
        for k, (key, name) in enumerate(zip(keys, shown)):
            place = self.part(mirror, key) if fixed[k] else self.item(places, k)
            dict_class(obj).__setitem__(copy, name, self.load(dict.__getitem__(obj, key), place))
        return copy

    def distinct(self, a: Origin, b: Origin) -> None:
        """Two objects from outside must not become one."""
        if not (isinstance(a, Held) and isinstance(b, Held)):
            self.fact(NotAlias, a, b)

    def changes(self) -> Any:
        """What has been written so far."""
        written: list[Any] = [(name, Itself(x)) for name, (_, _, x) in self.slots.items()]
        for k, mirror in self.mirrors.items():
            if mirror.is_changed():
                items = mirror.writes if mirror.copy is None else mirror.now
                values = (*items, *items.values()) if isinstance(items, dict) else items
                written.append((k, [*map(Itself, (*values, *mirror.tail, *mirror.done))]))
        return self.recorder.calls, written, len(self.later)

    # ---------------------------------------------------------------------- slots and cells

    def slot(self, obj: Any, name: str) -> Any:
        """An attribute that lies outside of `__dict__`, such as a cell's contents."""
        written = self.slots.get((id(obj), name))
        if written is not None:
            self.slots_read += 1
            if written[2] is DELETED:
                raise missing(type(obj), name, name=name, obj=obj)
            return written[2]
        origin = self.origin(obj)
        try:
            value = object.__getattribute__(obj, name)  # not what a `__getattr__` says instead
        except AttributeError:
            if origin is not None:
                asked = functools.partial(has, name)
                self.gives(origin, asked, f"whether {name} is in ", False)
            raise
        return value if origin is None else self.load(value, self.place(obj, name))

    def place(self, obj: Any, name: str) -> Origin:
        """The origin of an attribute that lies outside of `__dict__`."""
        return self.one(Attr(self._origins[id(obj)], name), "slot", id(obj), name)

    def has_read(self, name: str) -> bool:
        """Whether the program has asked for such an attribute of something from outside."""
        return any(key[0] == "slot" and key[2] == name for key in self._parts)

    def set_slot(self, obj: Any, name: str, value: Any) -> None:
        origin = self.origin(obj)
        if origin is not None:
            self.slots.pop((id(obj), name), None)  # in the order of the last writes
            self.slots[id(obj), name] = (obj, origin, value)
        elif value is DELETED:
            object.__delattr__(obj, name)
        else:
            object.__setattr__(obj, name, value)

    def cell(self, cell: types.CellType, name: str) -> Any:
        """The contents of a cell; ValueError or AttributeError if there are none."""
        if id(cell) in self._origins:
            place = Cell(self._origins[id(cell)], name)
            self.one(place, "slot", id(cell), "cell_contents")
            if is_empty(cell) and (id(cell), "cell_contents") not in self.slots:
                self.gives(self._origins[id(cell)], is_empty, "whether nothing is in ", True)
        return self.slot(cell, "cell_contents")

    def separate(self, new: Any) -> None:
        """What was written must not be, under another name, what was read, but for what is new."""
        read = [part.of for part in self._parts.values() if isinstance(part, Cell)]
        self._separate([x[1] for x in self.slots.values() if type(x[0]) is types.CellType], read)
        kinds: dict[type, tuple[list[Origin], list[Origin]]] = {}
        for mirror in self.mirrors.values():
            if mirror.obj is not new:
                changed, others = kinds.setdefault(type(mirror.obj), ([], []))
                (changed if mirror.is_changed() else others).append(mirror.origin)
        for changed, others in kinds.values():
            self._separate(changed, others)
        self._separate(list(self.hashed.values()), [])
        lists = [m.origin for m in self.mirrors.values() if type(m.obj) is list]
        self._separate(list(self.sinks.values()), lists)
        tensors = [origin for _, origin in self.inputs.values()]
        self._separate([self.inputs[id(x)][1] for x, *_ in self.recorder.turned], tensors)
        if self.recorder.told:
            self._separate([place for _, place in written(self.recorder)], self.recorder.told)

    def hash(self, keys: Iterable[Any]) -> None:
        """Objects from outside that are told apart by identity, in sets and as keys of dicts."""
        for x in (part for key in keys for part in by_identity(key)):
            if (origin := self.origin(x)) is not None:
                self.hashed[id(x)] = origin

    def _separate(self, written: list[Origin], others: list[Origin]) -> None:
        """No object that is written to may be another one of these."""
        first = tuple(dict.fromkeys(written))
        known = set(first)
        rest = tuple(x for x in dict.fromkeys(others) if x not in known)
        if len(first) == 1:
            for other in rest:
                self.distinct(first[0], other)
        elif first and not all(isinstance(x, Held) for x in (*first, *rest)):
            self.fact(Distinct, first[0], (first, rest))

    def know_cells(self, function: types.FunctionType) -> None:
        """The code and cells of a function from outside. If it is fixed, so are its cells."""
        owner, code = self._origins.get(id(function)), function.__code__
        if owner and not is_trusted(function.__module__):  # a reload may give it other code
            self.fact(IdMatch, self.place(function, "__code__"), code)
        for k, cell in enumerate((owner and function.__closure__) or ()):
            if isinstance(owner, Held):
                self.hold(cell, code.co_freevars[k])
            else:
                self.load(cell, self.item(self.place(function, "__closure__"), k))
