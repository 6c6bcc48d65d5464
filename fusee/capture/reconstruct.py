"""Source that makes, from the results of a graph, what the program would have made.

A value of the capture becomes an expression: a tensor is an output of the graph, an object from
outside is found by its origin, one that the program made is made again, each once however
often it occurs. What cannot be made again raises Lost, and the graph ends before it was made.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import itertools
import operator
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from fusee.capture.attributes import Capturing
from fusee.capture.between import around, for_c, resumed
from fusee.capture.bytecode import call_from, passed, passing
from fusee.capture.dynamic import Number
from fusee.capture.frame import HELD_OWNERS, METHODS_IN_C, Marker, is_scalar
from fusee.capture.graph_break import Anew, Lost, is_spent, spent
from fusee.capture.inputs import DELETED, World
from fusee.capture.mirrors import (
    LAZY,
    OF_SETS,
    VIEWS,
    Begun,
    Called,
    Indexed,
    Mirror,
    Opened,
    Stepping,
    advance,
    beyond_items,
    consumed,
    contents,
    dict_class,
    gone_through,
    new_tuple,
    pairs_of,
    put_back,
    reduced,
)
from fusee.capture.policy import F, inlined
from fusee.capture.sources import IN_C, ON_HEAP, Source, dict_code, given_by, own_dict, writer
from fusee.capture.symbols import Text, holds_open, is_open, joined_text
from fusee.capture.torch_api import (
    FakeTensor,
    leaf_of_inference,
    no_torch_function,
    of_array,
    of_inference,
    of_subclass,
)
from fusee.runtime.cache import GRADIENTS
from fusee.source import Function

# ---------------------------------------------------------------------------- rebuild


def require_normal(world: World, fake: torch.Tensor) -> None:
    """Know that an input is none of inference mode, which only that mode may write to.

    raises  Lost: it is one, and eager raises
    """
    x, origin = world.inputs[id(fake)]
    with no_torch_function():
        is_one = x.is_inference()
    if is_one:
        raise Lost(f"{origin} is of inference mode, and is written to outside of it")
    world.gives(origin, torch.is_inference, "inference mode of ", False)


# Iterators that know when their dict or set has grown, and so must go on over that itself.
_OF_DICTS = {type(iter(getattr({}, name)())): name for name in ("keys", "values", "items")}


_CLASS = ON_HEAP | IN_C  # a class in C has not the first alone
# Nothing but a class, an import or a `def` makes these.
_FOUND = (
    type, types.ModuleType, types.CodeType, *METHODS_IN_C, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
    types.UnionType, types.GenericAlias, type(sys.version_info), type(sys.flags),
)  # fmt: skip
_ALIAS: Any = vars(typing)["_GenericAlias"]  # the class of Optional[C], say
_BASES = {object, dict, collections.OrderedDict, list, set}  # classes in C that can be refilled


# A maker at work: it gives away a part, is given the part's expression, and returns its own.
Making = Generator[Any, str, str]


def _each(parts: Iterable[Any]) -> Generator[Any, str, list[str]]:
    found = []
    for part in parts:
        found.append((yield part))  # no comprehension can give away
    return found


class Rebuild:
    """Writes one function's body.

    is_return whether the function ends there: Python runs generators that it gives away
    source    its first part: objects from outside, evaluated before anything changes
    lines     its second part, after the graph has run; `values`: those that only make a value;
              `late`: those that compute with numbers, and may raise
    outputs   the tensors that the graph must give
    """

    def __init__(self, machine: Capturing, source: Source, *, is_return: bool = False) -> None:
        self.is_return = is_return
        self.world = world = machine.world
        self.made_classes = machine.made_classes
        self.generators = machine.generators
        self.source = source
        self.lines: list[str] = []
        self.values: set[str] = set()
        self.late: set[str] = set()
        self.outputs: list[torch.Tensor] = []
        self._memo: dict[int, str] = {}
        self._lists: dict[int, str] = {}  # of tensors, whose elements the program has
        mirrors = world.mirrors.values()
        self._copies = {id(m.copy): m.origin for m in mirrors if m.copy is not None}
        self._places: list[str] = []
        self._empty_cells: list[tuple[str, Any]] = []
        self._open: set[int] = set()
        self._replayed: set[int] = set()
        self._keep: list[Any] = []
        self._count = 0

    # ---------------------------------------------------------------------- values

    def value(self, x: Any) -> str:
        """An expression for `x`."""
        text = self._value(x)
        while self._empty_cells and not self._open:
            name, contents = self._empty_cells.pop()
            self.lines.append(f"{name}.cell_contents = {self._value(contents)}")
        return text

    def _value(self, x: Any) -> str:
        """The same, but for the contents of cells. What is half made stands on a stack of its own:
        the program's objects may be nested deeper than Python's calls."""
        half_made: list[tuple[int, Making]] = []
        text = self._found(x)
        while True:
            if text is None:
                if id(x) in self._open:
                    raise Lost("a container that contains itself cannot be made again")
                self._open.add(id(x))
                half_made.append((id(x), self._made(x)))
            elif not half_made:
                return text
            try:
                x = half_made[-1][1].send(text)  # type: ignore[arg-type]  # None starts it
                text = self._found(x)
            except StopIteration as made:
                at, _ = half_made.pop()
                text = self._memo[at] = made.value
                self._open.discard(at)

    def _found(self, x: Any) -> str | None:
        """The expression for `x`; None if it must be made."""
        if (is_scalar(x) and not holds_open(x)) or issubclass(type(x), (Marker, re.Match)):
            return self.source.constant(x)
        found = self._memo.get(id(x))
        if found is not None:
            return found
        self._keep.append(x)
        origin = self.world.passed_from(x) or self._copies.get(id(x))
        if origin is not None:
            found = self._memo[id(x)] = self.source.variable(origin)
        return found

    def has(self, x: Any) -> bool:
        """Whether `x` is among what is made again."""
        return id(x) in self._memo

    def _tensor(self, x: torch.Tensor) -> Making:
        self.outputs.append(x)
        text = f"_out[{len(self.outputs) - 1}]"
        with no_torch_function():
            is_inference = self.world.recorder.is_mixed and x.is_inference()
        if is_inference:
            text = self._named(self.call(of_inference, text))
        elif id(x) in self.world.recorder.leaves:
            text = self._leaf(x, text)
        elif is_spent(x, self.world.passed or ()):
            self.outputs[-1] = self.world.recorder.call(torch.Tensor.detach, x)
            text = self._named(self.call(spent, text))
        elif id(x) in self.world.of_arrays:
            text = self._named(self.call(of_array, text))
        kind, mirror = self.world.seen.get(id(x)), self.world.put_on.get(id(x))
        if (grad := self.world.put_grads.get(id(x))) is not None:
            text = self._memo[id(x)] = self._named(text)
            self.lines.append(f"{text}.grad = {yield grad}")
        if kind is not None:
            with no_torch_function():
                grad = str(x.requires_grad)
            text = self.call(of_subclass, text, (yield kind), grad)
        if mirror is None:
            return text if kind is None else self._named(text)
        name = self._memo[id(x)] = self._named(text)
        if (own := self._memo.get(id(mirror.copy))) is not None:  # made before, as a dict
            self.lines.append(f"{name}.__dict__ = {own}")
            return name
        self._memo[id(mirror.copy)] = f"{name}.__dict__"
        for key, item in mirror.copy.items():
            self.lines.append(f"{name}.__dict__[{key!r}] = {yield item}")
        return name

    def handled(self, failed: str) -> Iterator[str]:
        """Its lines. `failed` takes what raises before any has had an effect."""
        has_begun = False
        for text in self.lines:
            has_begun |= text not in self.values
            if text in self.late and not has_begun:
                yield f"try: {text}"
                text = f"except Exception as _error: {failed}"
            yield text

    def _leaf(self, x: torch.Tensor, text: str) -> str:
        if not self.world.recorder.leaves[id(x)]:
            raise Lost("a view, made without gradients, of a tensor that requires grad")
        with no_torch_function():
            grad = str(x.requires_grad)
        is_param = getattr(x, "_is_param", False)
        if self.world.recorder.inference:
            return self._named(self.call(leaf_of_inference, text, grad, str(is_param)))
        if is_param:
            return self._named(self.call(torch.nn.Parameter, text, grad))
        return self._named(f"{text}.detach().requires_grad_({grad})")

    def call(self, function: Any, *args: str) -> str:
        """An expression that calls an object."""
        return f"{self.source.constant(function)}({', '.join(args)})"

    def do(self, function: Any, *args: str) -> None:
        """Write a statement that calls an object."""
        self.lines.append(self.call(function, *args))

    def _named(self, text: str, *, is_late: bool = False) -> str:
        name = f"_r{self._count}"
        self._count += 1
        self.lines.append(f"{name} = {text}")
        self.values.add(self.lines[-1])
        if is_late:
            self.late.add(self.lines[-1])
        return name

    def _made(self, x: Any) -> Making:
        """Makes `x`: gives away each of its parts, for the part's expression."""
        kind = type(x)
        if type(x) is FakeTensor:
            return (yield from self._tensor(x))
        if id(x) in self.world.made_by:
            function, args, kwargs = self.world.made_by[id(x)]
            parts = yield from _each([*args, kwargs])
            return self._named(self.call(function, *parts[:-1], f"**{parts[-1]}"))
        if kind is Number:
            function, *operands = x.made  # Python computes it from the same numbers
            return self._named(self.call(function, *(yield from _each(operands))), is_late=True)
        if kind is Text:
            return (yield from self._text(x))
        if is_open(x):
            symbols, read = self.world.symbols, {}
            for symbol in symbols.unbacked(x):
                shown, axis = symbols.shown[symbol]
                text = yield shown
                if axis is not None:
                    read[symbol] = f"{text}.size({axis})"
                    continue
                listed = self._lists.get(id(shown)) or self._named(f"{text}.tolist()")
                self._lists[id(shown)] = listed
                read[symbol] = f"{listed}[{symbols.places[symbol]}]"
            return self._named(symbols.source(x.node, self.source, read), is_late=bool(read))
        if id(x) in self.world.popped and x:
            raise Lost("a set is alive that knows which of its elements it gives next")
        maker = MAKERS.get(kind)
        if maker is not None:
            return self._named(maker.source(self, x, *(yield from _each(maker.parts(x)))))
        if issubclass(type(x), (types.BuiltinFunctionType, types.MethodWrapperType)):
            if isinstance(x.__self__, HELD_OWNERS):
                return self.source.constant(x)
            name, kind = x.__name__, type(x.__self__)
            if type(getattr(kind, name, None)) is not types.FunctionType:
                return self._named(f"({yield x.__self__}).{name}")
            # super() gave it: the object's own one is another
            held = (vars(c).get(name) for c in kind.__mro__)
            in_c = next(x for x in held if type(x) in METHODS_IN_C)
            return self._named(f"{self.source.constant(in_c)}.__get__({yield x.__self__})")
        if issubclass(type(x), LAZY):
            return (yield from self._iterator(x))
        if issubclass(kind, _ALIAS):
            function, args = x.__reduce__()
            return self._named(self.call(function, *(yield from _each(args))))
        if issubclass(type(x), _FOUND) or kind.__module__ == "typing":
            if isinstance(x, type) and x in self.made_classes:
                raise Lost(f"the class {x.__name__} is made anew at each call")
            return self.source.constant(x)
        if issubclass(type(x), tuple):
            return (yield from self._tuple(x))
        if kind is types.GeneratorType and x in self.generators:
            return (yield from self._generator(x))
        return (yield from self._instance(x))

    def _text(self, x: Text) -> Making:
        texts = []
        for part in x.parts:
            if not isinstance(part, str):
                function, args = part
                texts.append(self.call(function, *(yield from _each(args))))
            else:
                texts.append(repr(part))
        return self._named(self.call(joined_text, *texts))

    def _tuple(self, x: tuple[Any, ...]) -> Making:
        items = f"({''.join(f'{part}, ' for part in (yield from _each(tuple.__iter__(x))))})"
        if type(x) in (tuple, torch.Size):
            return self._named(items if type(x) is tuple else self.call(torch.Size, items))
        beyond = [self.source.constant(rest) for rest in [beyond_items(x)] if rest]
        name = self._named(self.call(new_tuple, (yield type(x)), items, *beyond))
        self._memo[id(x)] = name
        return (yield from self._attributes(x, name))

    def _iterator(self, x: Any) -> Making:
        try:
            made, args, *state = reduced(x)
        except RuntimeError as error:  # its dict or set has another size now
            raise Lost(f"an iterator is alive that goes no further: {error}") from None
        kinds = (dict,) if type(x) in _OF_DICTS else (set, frozenset) if type(x) is OF_SETS else ()
        owner = next((d for d in gc.get_referents(x) if isinstance(d, kinds)), None)
        if owner is not None:
            # one that has grown comes first: its iterators would not go on
            self._replay_all(m for m in list(self.world.mirrors.values()) if m.copy is owner)
            place = len(owner) - operator.length_hint(x)
            if type(x) is OF_SETS and args[0] != list(owner)[place:]:
                raise Lost("a set has changed while an iterator goes through it")
            text = yield owner
            if type(x) in _OF_DICTS:
                text = self.call(getattr(dict, _OF_DICTS[type(x)]), text)
            name = self._named(self.call(iter, text))
            self.do(advance, name, str(place))
            return name
        if type(x) is reversed and isinstance(args[0], Indexed):
            begun = self.call(Begun, (yield args[0]), str(state[0] + 1))
            return self._named(self.call(reversed, begun))
        name = self._named(self.call(made, *(yield from _each(args))))
        if made is itertools.islice is not type(x):
            raise Lost("an itertools.accumulate that has given None is alive")
        is_new = made is iter and state == [0]
        if state and state[0] is not None and not is_new:
            # once its list is what it should be: a place beyond the end is cut to the end
            self._places.append(self.call(put_back, name, (yield state[0])))
        return name

    def _generator(self, x: Any) -> Making:
        f, state = self.generators[x], inspect.getgeneratorstate(x)
        code, names = f.code, f.code.co_varnames[: f.code.co_argcount]
        is_plain = not (code.co_kwonlyargcount or code.co_flags & 12)
        if is_plain and state == inspect.GEN_CREATED:
            args = [f.cells[n].cell_contents if n in f.cells else f.locals[n] for n in names]
            function, *given = yield from _each([f.function, *args])
            if self.is_return:
                return self._named(f"{function}({', '.join(given)})")
            return self._named(self.call(around, "_nested", function, *given))
        parts = [self.source.constant(code), self.source.constant(f.globals), str(f.at)]
        parts += yield from _each([dict(f.locals), list(f.stack), dict(f.cells), f.own, state])
        return self._named(self.call(resumed, "_nested", *parts))

    def _instance(self, x: Any) -> Making:
        cls = type(x)
        in_c = [base for base in cls.__mro__ if base.__flags__ & _CLASS != ON_HEAP]
        maker = getattr(cls.__new__, "__self__", None)  # a class, if it is in C
        is_known = {*in_c} <= _BASES and (maker is None or maker in _BASES)
        if not is_known and not isinstance(x, BaseException):
            home = "" if cls.__module__.startswith("fusee.") else f"{cls.__module__}."
            raise Lost(f"a {home}{cls.__qualname__} cannot be made again")
        kind, home = (yield cls), self.source.constant(in_c[0])
        given = x.args if issubclass(type(x), BaseException) else ()
        if issubclass(type(x), BaseExceptionGroup):
            given = x.message, x.exceptions
        args = yield from _each(given)
        name = self._named(f"{home}.__new__({', '.join([kind, *args])})")
        self._memo[id(x)] = name  # its attributes may point back to it
        if issubclass(type(x), dict):
            parts = yield from _each(_pairs(x))
            # OrderedDict.update asks the class for its own
            for pair in zip(parts[::2], parts[1::2]):
                self.do(dict_class(x).__setitem__, name, *pair)
        elif issubclass(type(x), (list, set)):
            kind_in_c, fill = (list, list.extend) if isinstance(x, list) else (set, set.update)
            items = _listed(*(yield from _each(kind_in_c.__iter__(x))))
            self.do(fill, name, items)
        elif issubclass(type(x), BaseException):
            self.lines.append(f"{home}.__init__({', '.join([name, *args])})")
            yield from self._exception(x, name, in_c[0])
        yield from self._attributes(x, name)
        in_python = (base for base in cls.__mro__ if not base.__flags__ & IN_C)
        found = itertools.chain(*(vars(base).values() for base in in_python))
        for slot in (slot for slot in found if type(slot) is types.MemberDescriptorType):
            try:
                held, key = slot.__get__(x), slot.__name__
            except AttributeError:  # it is empty
                continue
            item = yield held
            if inspect.getattr_static(cls, key) is slot:
                setattr_ = f"{self.source.python('object')}.__setattr__"
                self.lines.append(f"{setattr_}({name}, {key!r}, {item})")
            else:  # a subclass has something else of that name
                self.do(slot.__set__, name, item)
        return name

    def _attributes(self, x: Any, name: str) -> Making:
        """Those in its `__dict__`, whatever its class makes of them."""
        place = dict_code(type(x), name, self.source)
        for key, item in (own_dict(x) if type(x).__dictoffset__ else {}).items():
            self.lines.append(f"{place}[{key!r}] = {yield item}")
        return name

    def _exception(self, x: BaseException, name: str, in_c: type) -> Generator[Any, str, None]:
        """What the class in C keeps, and how the exception came about."""
        named = {"name", "obj", "path"} & {*vars(in_c)}  # which no `args` hold
        if isinstance(x, BaseExceptionGroup):
            named.add("args")  # with a list that may hold other exceptions by now
        more = "__traceback__", "__cause__", "__context__", "__suppress_context__"
        for key in (*sorted(named), *more):
            is_first = x.__context__ is None or x.__context__ is sys.exception()
            if key == "__context__" and x.__traceback__ and is_first:  # but for what callers handle
                self.lines.append(f"{name}.{key} = {self.source.variable(given_by(sys.exception))}")
            elif getattr(x, key, None):  # the last one last: setting the cause sets it too
                self.lines.append(f"{name}.{key} = {yield getattr(x, key)}")

    # ---------------------------------------------------------------------- effects

    def effects(self) -> None:
        """Write what the program wrote to objects from outside."""
        for opened in dict.fromkeys(self.world.iterators.values()):
            self._advance(opened)
        self._replay_all(list(self.world.mirrors.values()))
        for (_, name), (x, origin, value) in list(self.world.slots.items()):
            target, is_gone = self.source.variable(origin), value is DELETED
            given = "None" if is_gone else self.value(value)
            is_slot = type(inspect.getattr_static(x, name, None)) is types.MemberDescriptorType
            if is_slot or not is_gone:  # to be deleted: nothing may be there
                self.do(writer(type(x), False), target, repr(name), given)
            if is_gone:
                self.do(writer(type(x), True), target, repr(name))
            if name == "data" and id(x) in (renewed := self.world.recorder.renewed):
                count = self.call(torch.autograd.graph.increment_version, target)
                with no_torch_function():
                    self.lines += [count] * (x._version - renewed[id(x)])
        for x, name, args, kwargs in self.world.recorder.turned:
            if not torch.is_inference_mode_enabled():
                require_normal(self.world, x)
            listed = [*map(self.value, args), *(f"{k}={self.value(v)}" for k, v in kwargs.items())]
            self.lines.append(f"{self.value(x)}.{name}({', '.join(listed)})")
        self.lines += self._places

    def released(self) -> list[str]:
        """What of that comes before the graph: nothing in the place of what it would keep alive."""
        rows = ((key[1], self.world.slots[key][1]) for key in self.world.released)
        setting = f"{self.source.python('object')}.__setattr__"
        return [f"{setting}({self.source.variable(at)}, {name!r}, None)" for name, at in rows]

    def marked(self, graph: fx.GraphModule) -> fx.GraphModule:
        """With a note of which outputs become gradients of leaves."""
        found = {id(x) for (_, name), (*_, x) in self.world.slots.items() if name == "grad"}
        if marks := [k for k, x in enumerate(self.outputs) if id(x) in found]:
            graph.graph.output_node().meta[GRADIENTS] = marks
        return graph

    def later(self) -> list[str]:
        """The calls that the program made and that come after its graph."""
        calls = []
        for function, args, kwargs, lines in self.world.later:
            given = [*map(self.source.constant, (lines, function, *args))]
            given += [f"{key}={self.source.constant(x)}" for key, x in kwargs.items()]
            calls.append(self.call(call_from, *given))
        for one in (self.world.lent or {}).values():
            if self.has(one.made) or [*map(id, contents(one.made) or ())] != [*map(id, one.has)]:
                raise Anew("lent")
        if any(map(self.has, self.world.addressed or ())):
            raise Anew("address")
        return calls

    def _advance(self, opened: Opened) -> None:
        for reader, container in gone_through(opened.iterator):
            mirror = self.world.mirrors.get(id(container))
            of_keys = _OF_DICTS.get(type(reader)) == "keys"
            if mirror is not None and (mirror.has_other_keys if of_keys else mirror.is_changed)():
                raise Lost("a container changes while an iterator goes through it")
        count = opened.asked + consumed(opened.stand_in, opened.size)
        if count:
            self.do(advance, self.value(opened.iterator), str(count))

    def _replay_all(self, mirrors: Iterable[Mirror]) -> None:
        for mirror in mirrors:
            if mirror.is_changed() and id(mirror) not in self._replayed:
                self._replayed.add(id(mirror))
                self._replay(mirror)

    def _replay(self, mirror: Mirror) -> None:
        # by its own origin: `x.__dict__` may be written although nothing is known of `x` else
        target = self.source.variable(mirror.origin)
        if isinstance(mirror.obj, dict):
            self._replay_dict(mirror, target)
            return
        if isinstance(mirror.obj, collections.deque) and not mirror.has_moved():
            write = collections.deque.__setitem__
            for k, (x, was) in enumerate(zip(mirror.now, mirror.before)):
                if x is not was:
                    self.do(write, target, str(k), self.value(x))
            return
        items = ", ".join(map(self.value, mirror.tail if mirror.copy is None else mirror.now))
        if mirror.copy is None:
            self.do(list.extend, target, f"[{items}]")
        elif isinstance(mirror.obj, set):
            for method, given in mirror.done:
                self.do(method, target, *map(self.value, given))
        elif isinstance(mirror.obj, list):
            every = self.call(slice, "None")
            self.do(list.__setitem__, target, every, f"[{items}]")
        else:
            self.do(collections.deque.clear, target)
            self.do(collections.deque.extend, target, f"[{items}]")

    def _replay_dict(self, mirror: Mirror, target: str) -> None:
        kind = self.source.constant(dict_class(mirror.obj))
        moved = mirror.moved if mirror.copy is None else set()
        if mirror.copy is None:
            changes = mirror.writes
        else:
            before, after = mirror.before, mirror.now
            changes = {key: DELETED for key in before if key not in after}
            kept = [key for key in before if key in after]
            if [*map(id, after)][: len(kept)] != [*map(id, kept)]:
                self.lines.append(f"{kind}.clear({target})")
                changes = dict(pairs_of(after))
            else:
                for key, value in pairs_of(after):
                    if key not in before or before[key] is not value:
                        changes[key] = value
        for key, value in changes.items():
            name = self.value(key)
            if value is DELETED or key in moved:
                self.lines.append(f"{kind}.pop({target}, {name}, None)")
            if value is not DELETED:
                self.lines.append(f"{kind}.__setitem__({target}, {name}, {self.value(value)})")


# ------------------------------------------------------------------------------ makers


def _listed(*texts: str) -> str:
    return f"[{', '.join(texts)}]"


def _in_order(x: Any) -> list[Any]:
    """The elements of a set that has the same order if it is made of them."""
    items = list(x)
    if [*map(id, set(items))] != [*map(id, items)]:
        raise Lost("a set is alive that would be made again in another order")
    return items


def _pairs(x: Any) -> list[Any]:
    """The keys and values of a dict in turn."""
    try:
        return [part for pair in pairs_of(x) for part in pair]
    except KeyError:
        raise Lost("an OrderedDict that has lost a key to dict's own methods is alive") from None


def _braces(*texts: str) -> str:
    return "{" + ", ".join(f"{k}: {v}" for k, v in zip(texts[::2], texts[1::2])) + "}"


def _referent(x: weakref.ref[Any]) -> tuple[Any]:
    if (obj := x()) is None:
        raise Lost("a weak reference to what is gone is alive")
    return (obj,)


def _chain_links(x: itertools.chain[Any]) -> list[Any]:
    """The iterator that it goes through, if any, and that of its iterables."""
    _, iterables, *state = reduced(x)
    rest, *current = state[0] if state else (iter(iterables),)
    return [[*current], rest]


class Maker(NamedTuple):
    """How objects of a class are made again.

    source   their expression, given those of their parts
    parts    the objects that they are made of
    """

    source: Callable[..., str]
    parts: Callable[[Any], Iterable[Any]] = lambda x: ()


def _calling(function: Any, parts: Callable[[Any], Iterable[Any]]) -> Maker:
    return Maker(lambda r, x, *texts: r.call(function, *texts), parts)


_REDUCED = Maker(lambda r, x, *t: r.call(x.__reduce__()[0], *t), lambda x: x.__reduce__()[1])
AS_IT_IS = Maker(lambda r, x: r.source.constant(x))
# `d.items()` and the like
_VIEW = Maker(lambda r, x, t: f"{t}.{type(x).__name__.rpartition('_')[2]}()", gc.get_referents)

MAKERS: dict[type, Maker] = {
    tuple: Maker(lambda r, x, *t: f"({', '.join(t)},)" if t else "()", tuple),
    list: Maker(lambda r, x, *t: _listed(*t), list),
    dict: Maker(lambda r, x, *t: _braces(*t), _pairs),
    set: Maker(lambda r, x, *t: f"{{{', '.join(t)}}}" if t else r.call(set), _in_order),
    frozenset: Maker(lambda r, x, *t: r.call(frozenset, _listed(*t)), _in_order),
    slice: _calling(slice, lambda x: (x.start, x.stop, x.step)),
    collections.deque: Maker(
        lambda r, x, *t: r.call(collections.deque, _listed(*t), str(x.maxlen)), list
    ),
    collections.defaultdict: Maker(
        lambda r, x, made, *t: r.call(collections.defaultdict, made, _braces(*t)),
        lambda x: (x.default_factory, *_pairs(x)),
    ),
    types.MappingProxyType: _calling(types.MappingProxyType, gc.get_referents),
    Called: Maker(
        lambda r, x, t: t if r.is_return else r.call(for_c, "_nested", t),
        lambda x: (x.function,),
    ),
    Stepping: Maker(lambda r, x, t: t, lambda x: (x.iterator,)),
    Indexed: Maker(lambda r, x, t: t, lambda x: (x.sequence,)),
    bytearray: Maker(lambda r, x: r.call(bytearray, repr(bytes(x)))),
    itertools.chain: Maker(
        lambda r, x, t, rest: r.call(
            itertools.chain.from_iterable, r.call(itertools.chain, t, rest)
        ),
        _chain_links,
    ),
    weakref.ref: _calling(weakref.ref, _referent),
    types.TracebackType: Maker(
        lambda r, x, t: r.call(passed, t, *map(r.source.constant, passing(x))),
        lambda x: (x.tb_next,),
    ),
    operator.itemgetter: _REDUCED,
    operator.attrgetter: _REDUCED,
    **dict.fromkeys(VIEWS, _VIEW),
    types.MethodDescriptorType: AS_IT_IS,
    types.GenericAlias: _calling(types.GenericAlias, lambda x: (x.__origin__, x.__args__)),
    types.UnionType: _calling(functools.reduce, lambda x: (operator.or_, x.__args__)),
    functools.partial: Maker(
        lambda r, x, f, a, k: r.call(functools.partial, f, f"*{a}", f"**{k}"),
        lambda x: (x.func, x.args, x.keywords),
    ),
    types.MethodType: _calling(types.MethodType, lambda x: (x.__func__, x.__self__)),
    types.SimpleNamespace: Maker(
        lambda r, x, *t: r.call(types.SimpleNamespace, f"**{_braces(*t)}"),
        lambda x: _pairs(vars(x)),
    ),
}


def makes(
    kind: type, parts: Callable[[Any], Iterable[Any]] = lambda x: ()
) -> Callable[[Function], Function]:
    """Enter the decorated function as the source of a Maker."""

    def enter(source: Function) -> Function:
        MAKERS[kind] = Maker(source, parts)
        return source

    return enter


_OF_FUNCTIONS = ("__qualname__", "__module__", "__doc__", "__kwdefaults__", "__annotations__")


def _own(x: types.FunctionType) -> list[str]:
    """The attributes of a function that `def` alone would not give it."""
    plain = types.FunctionType(x.__code__, x.__globals__, closure=x.__closure__)
    return [key for key in _OF_FUNCTIONS if getattr(x, key) != getattr(plain, key)]


@makes(
    types.FunctionType,
    lambda x: [
        x.__defaults__ or None,
        *(x.__closure__ or ()),
        *(getattr(x, key) for key in _own(x)),
        *_pairs(x.__dict__),
    ],
)
def _function(r: Rebuild, x: types.FunctionType, defaults: str, *rest: str) -> str:
    parts = [r.source.constant(x.__code__), r.source.constant(x.__globals__), repr(x.__name__)]
    count, own = len(x.__closure__ or ()), _own(x)
    cells, values, attributes = rest[:count], rest[count:][: len(own)], rest[count + len(own) :]
    parts += [defaults, f"({', '.join(cells)},)" if cells else "None"]
    text = r.call(types.FunctionType, *parts)
    if not own and not x.__dict__:
        return text
    name = r._named(text)
    r.lines += [f"{name}.{key} = {value}" for key, value in zip(own, values)]
    if x.__dict__:
        r.lines.append(f"{name}.__dict__.update({_braces(*attributes)})")
    return name


@makes(types.CellType)
def _cell(r: Rebuild, x: types.CellType) -> str:
    made = r.call(types.CellType)
    try:
        contents = x.cell_contents
    except ValueError:
        return made
    # its contents come later: a function may close over itself
    name = r._named(made)
    r._empty_cells.append((name, contents))
    return name


# ---------------------------------------------------------------------------- regions
# Regions of a program in which a graph break is an error, or is none.
#
# Plain Python that is captured like the user's own: what is in force is an attribute of an object
# from outside, so that it holds in the graphs, between them, and in functions that are called
# there.


_state = types.SimpleNamespace(is_error=None)  # as fullgraph says


class error_on_graph_break:
    """Within it a graph break raises GraphBreakError (True) or splits the function (False).

    As a decorator or a context manager, inside a compiled function or around its parts. It goes
    before `fullgraph`.

    source   torch._dynamo.error_on_graph_break
    """

    @inlined
    def __init__(self, error_on_graph_break: bool) -> None:
        self.is_error = error_on_graph_break
        self.before: bool | None = None

    @inlined
    def __enter__(self) -> None:
        self.before = _state.is_error
        _state.is_error = self.is_error

    @inlined
    def __exit__(self, *error: object) -> None:
        _state.is_error = self.before

    def __call__(self, function: F) -> F:
        wanted = self.is_error

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with error_on_graph_break(wanted):
                return function(*args, **kwargs)

        return inlined(within)  # type: ignore[return-value]


def is_error(world: World) -> bool | None:
    """What error_on_graph_break says where a capture stands; None if nothing."""
    mirror = world.mirrors.get(id(_state.__dict__))
    written = {} if mirror is None else mirror.writes if mirror.copy is None else mirror.copy
    found: bool | None = written.get("is_error", _state.is_error)
    return found
