"""The machine that captures: Python's semantics on real objects, with tensors that hold no data.

It differs from Python in three ways. Objects from outside are read under guards and written to
mirrors (inputs.py). Torch calls are recorded, not run (recorder.py). What could show the program
anything that the graph does not know raises GraphBreak.
"""

from __future__ import annotations

import builtins
import collections
import gc
import importlib.util
import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.capture import attributes, containers, symbols, tensor_objects
from fusee.capture.attributes import (
    AS_NUMBERS,
    COMPARED,
    SHOWN,
    Capturing,
    ask,
    by_c,
    python_method,
    store,
)
from fusee.capture.builtins import handled
from fusee.capture.bytecode import Bytecode, passed, without_ours
from fusee.capture.calls import call
from fusee.capture.dynamic import (
    VALUES,
    Computed,
    Number,
    asked_by_c,
    before_graph,
    compute,
    is_array,
    may_be_open,
    takes_late,
)
from fusee.capture.effects import effects
from fusee.capture.frame import ABSENT, BINARY, CONTAINERS, UNARY, Frame, is_scalar, unbound
from fusee.capture.graph_break import Anew, GraphBreak, Opaque
from fusee.capture.guards import IdMatch
from fusee.capture.inputs import DELETED
from fusee.capture.mirrors import (
    OF_SETS,
    Indexed,
    Stepping,
    class_of,
    is_finite_iterator,
    pairs_of,
    read_order,
)
from fusee.capture.sources import IN_C, Held, Item, is_trusted
from fusee.capture.symbols import (
    Text,
    comparable,
    concrete,
    holds_open,
    is_fixed,
    is_open,
    operated,
    whole_text,
)
from fusee.capture.torch_api import DYNAMO, FakeTensor
from fusee.sym.ranges import COMPARISONS

_IN_PLACE = len(BINARY) // 2
_MANY = 2_000
_OURS = re.compile(
    "FakeTensor|'Array'|not Array|(: |not |')Number|Sym(Int|Float|Bool)|Text"
)  # Python's messages name classes

_NUMBERS = (int, float, str, bool, bytes, complex, tuple, type(None))
_HOLD_NUMBERS = (tuple, list, torch.Size, range, set, frozenset, dict)


class Interpreter(Capturing):
    """What instructions mean while a program is captured."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        if not self.policy.is_exporting:  # then Python runs nothing that the graph refuses
            self.world.symbols.env.data.expects = self._expects

    def is_heard(self) -> bool:
        """Whether the program hears of it if a torch call raises here."""
        return is_heard(self.frames, True)

    def is_told(self) -> bool:
        """Whether the program hears of warnings of torch's."""
        return any(getattr(x, "said", None) for _, x in self.regions)

    # ---------------------------------------------------------------------- names

    def load_global(self, f: Frame, name: str) -> Any:
        module = f.globals.get("__name__", "")
        if is_trusted(module):
            if (module, name) == (DYNAMO, "cached_backends"):
                return {}  # disable() puts None there
            mirror = self.world.mirrors.get(id(f.globals))
            if mirror is not None and mirror.writes.get(name, DELETED) is not DELETED:
                return mirror.writes[name]
            return self.world.hold_from_trusted(super().load_global(f, name), module, name)
        found = self.world.get(self.world.mirror_of_globals(f.globals, module), name)
        if found is not ABSENT:
            return found
        value = getattr(builtins, name, ABSENT)
        if value is ABSENT:
            raise NameError(f"name {name!r} is not defined", name=name)
        return self.world.hold_from_trusted(value, "builtins", name)

    def store_global(self, f: Frame, name: str, value: Any) -> None:
        names = self.world.mirror_of_globals(f.globals, f.globals.get("__name__", ""))
        if value is DELETED and self.world.get(names, name) is ABSENT:
            raise NameError(f"name {name!r} is not defined", name=name)
        self.world.set(names, name, value)

    def load_cell(self, f: Frame, name: str) -> Any:
        try:
            found = self.world.cell(f.cells[name], name)
        except (ValueError, AttributeError):
            found = ABSENT
        if type(found) is Opaque:
            raise found.met()
        if found is ABSENT:
            raise unbound(f, name)  # not above: it would have the other one as its context
        return found

    def store_cell(self, f: Frame, name: str, value: Any) -> None:
        if value is DELETED:
            self.load_cell(f, name)  # raises if there is nothing to delete
        self.world.set_slot(f.cells[name], "cell_contents", value)

    def import_name(self, f: Frame, name: str, level: int, names: Any) -> Any:
        full = importlib.util.resolve_name("." * level + name, f.globals.get("__package__") or "")
        if full not in sys.modules:
            raise GraphBreak(f"importing {full} runs its code", "import it at the top of the file")
        found = super().import_name(f, name, level, names)
        key = full if names else full.partition(".")[0]
        if not is_trusted(key):  # a program may put another in its place
            self.world.fact(IdMatch, Item(Held(sys.modules, "sys.modules"), key), found)
        return self.world.hold(found, full)

    def import_from(self, module: Any, name: str) -> Any:
        found = self.call(getattr, module, name, ABSENT)
        return super().import_from(module, name) if found is ABSENT else found

    def caught(self, error: BaseException) -> None:
        told = " ".join(x for x in error.args if type(x) is str)
        if error is self.recorder.raised or _OURS.search(told):
            what = f"{type(error).__name__}: {error}"
            raise GraphBreak(f"a torch call raises {what.splitlines()[0]}")  # or so: eager knows

    def raising(self, f: Frame, error: BaseException, *cause: Any) -> None:
        if not self.is_outside(error):
            super().raising(f, error, *cause)
            return
        f.raised_again = [(error.__traceback__, error.__context__)]  # Python would write to it
        for each in cause:
            self.world.set_slot(error, "__cause__", each)
            self.world.set_slot(error, "__suppress_context__", True)
        known = handled(self)
        if known is not None and known is not error:
            self.world.set_slot(error, "__context__", known)
            while known is not None:
                known = known.__context__
                if known is error:
                    raise GraphBreak("an exception is raised again in the course of what it led to")

    def passes(self, error: BaseException, *place: Any) -> None:
        if not self.is_outside(error):
            super().passes(error, *place)
            return
        error.__traceback__ = without_ours(error.__traceback__)
        known = passed(self.world.slot(error, "__traceback__"), *place)
        self.world.set_slot(error, "__traceback__", known)

    def repeat(self, f: Frame) -> None:
        """Where a call raises for its values, Python never comes to a loop that has no end."""
        f.turns += 1
        nodes = self.recorder.graph.nodes
        if f.turns % _MANY == 0 and any("raises" in effects(node) for node in nodes):
            raise GraphBreak(f"a loop goes round {f.turns} times behind what may raise")

    # ---------------------------------------------------------------------- operators

    def binary(self, kind: int, left: Any, right: Any) -> Any:
        in_place = kind >= _IN_PLACE
        function = BINARY[kind]
        is_written = in_place and type(left) is FakeTensor  # numbers never are
        made_by = function if is_written or not in_place else BINARY[kind - _IN_PLACE]
        if _is_of_tensors(left, right):
            return self.tensor_operator(made_by, left, right)
        if type(left) is str and holds_open(right):
            if type(right) is Text or is_fixed(right):
                return operated(function, left, right)
            right = concrete(self.deep(right))
        if type(left) in _NUMBERS and type(right) in _NUMBERS:
            if type(right) is not tuple or type(left) is tuple:  # else `%` shows what it holds
                return function(left, right)
        has_array = is_array(left) or is_array(right)  # which makes elements of numbers
        if not has_array and (type(left) is Number or type(right) is Number):
            if may_be_open(made_by, right) or self._divides(made_by, right):
                left, right = self._number(left), self._number(right)
            left, right = concrete(left), concrete(right)
            if (found := before_graph(self.world, made_by, left, right)) is not None:
                return found
            return compute(self.recorder.graph, made_by, (left, right))
        if _are_numbers(left, right):
            return operated(function, left, right)
        name = function.__name__.strip("_")
        plain = name[1:] if in_place else name
        if has_array and type(left) is Number:
            return getattr(right, f"__r{plain}__")(left)
        if is_array(left):
            self._refuse_element(right, f"r{plain}")
        tries = [(left, name, right)] if in_place else []
        tries += self._in_turn((left, plain, right), (right, f"r{plain}", left))
        # of a number that a class derives from int or float torch takes the value
        is_taken = type(left) is FakeTensor and issubclass(type(right), int | float)
        is_done = is_taken or type(left) is type(right)
        custom = self._by_method(*(tries[:-1] if is_done else tries))
        if custom is not NotImplemented:
            return custom
        if type(left) is FakeTensor or type(right) is FakeTensor:
            return self.tensor_operator(made_by, left, right)
        self._refuse_asked(function, left, right, name, plain, f"r{plain}")
        if name == "iadd" and isinstance(left, (list, collections.deque)):
            right = self.listed(right) if isinstance(left, list) else self.items(right)
        if name == "ior" and isinstance(left, dict):
            right = containers.pairs(self, right)
        self.look((left, right), AS_NUMBERS if name in ("mul", "imul") else ())
        if isinstance(left, (str, bytes, set, frozenset)):
            self.look((right,), SHOWN + COMPARED)
        if in_place and isinstance(left, set) and self.is_outside(left):
            if (found := self.call(getattr(set, f"__{name}__"), left, right)) is not NotImplemented:
                return found
        plain_left, plain_right = self.in_order(left), self.in_order(right)
        if not has_array and (is_open(left) or is_open(right)):
            plain_left, plain_right = concrete(plain_left), concrete(plain_right)
        result = asked_by_c(self.recorder, function, plain_left, plain_right)
        return left if result is plain_left and in_place else result

    def _divides(self, function: Callable[..., Any], by: Any) -> bool:
        """Whether a quotient by an open integer never raises: that is a fact then."""
        is_quotient = function is operator.truediv and type(by) is torch.SymInt
        return is_quotient and self.truth(operated(operator.ne, by, 0))

    def _number(self, x: Any) -> Any:
        """An operand beside a Number: an open number, which has a value, is one without."""
        if type(x) not in (torch.SymInt, torch.SymFloat):
            return x
        recorder, symbols = self.recorder, self.world.symbols
        kind = int if type(x) is torch.SymInt else float
        made = operator.pos, x
        return Number(lambda: symbols.node(x, recorder), symbols.words(x), kind, made)

    def _in_turn(self, first: Any, second: Any) -> list[Any]:
        """Which operand is asked first: the right one if its class derives from the left one's."""
        (left, _, right), (_, name, _) = first, second
        if type(left) is type(right) or type(left) not in type(right).__mro__:  # whatever abc says
            return [first, second]
        own, other = (python_method(self, x, f"__{name}__") for x in (left, right))
        return [first, second] if own is other and name[0] == "r" else [second, first]

    def _refuse_asked(self, function: Any, left: Any, right: Any, *names: str) -> None:
        """Raise if methods in Python were asked and do not know: C code would ask them again."""
        shown, is_known = [], True
        for x in (left, right):
            found = (python_method(self, x, f"__{name}__") for name in names)
            is_asked = any(method is not None for method in found)
            in_c = [base for base in type(x).__mro__[:-1] if base.__flags__ & IN_C]
            is_known &= not in_c or (type(x).__module__ == "builtins" and not is_asked)
            # the number of times that a sequence is repeated
            is_known &= python_method(self, x, "__index__") is None
            shown.append(type(type(x).__name__, (), {})() if is_asked else x)
        if any(x is not y for x, y in zip(shown, (left, right))):
            if not is_known:
                raise GraphBreak("C code would ask a method in Python again, which does not know")
            function(*shown)  # the TypeError

    def _refuse_element(self, x: Any, name: str) -> None:
        """Raise if NumPy gives each element of an array an object of the program's as operand.

        source   numpy/_core/src/common/binop_override.h
        """
        if python_method(self, x, f"__{name}__") is None:
            return
        priority = getattr(type(x), "__array_priority__", 0)
        goes_first = isinstance(priority, (int, float)) and priority > 0
        if getattr(type(x), "__array_ufunc__", ABSENT) is not None and not goes_first:
            raise GraphBreak(f"each element of an array asks {type(x).__name__}.__{name}__")

    def _by_method(self, *tries: tuple[Any, str, Any]) -> Any:
        """What methods in Python make of an operator; NotImplemented if there are none."""
        for owner, name, other in tries:
            if type(owner) is FakeTensor:
                continue  # torch does it, which knows when to leave it to the other one
            result = ask(self, owner, f"__{name}__", other)
            if result is not ABSENT and result is not NotImplemented:
                return result
        return NotImplemented

    def unary(self, kind: str, x: Any) -> Any:
        if type(x) is FakeTensor:
            return self.tensor_operator(UNARY[kind], x)
        if type(x) is Number:
            return x if kind == "pos" else compute(self.recorder.graph, UNARY[kind], (x,))
        if is_open(x):
            return operated(UNARY[kind], x)
        if (found := ask(self, x, f"__{kind}__")) is not ABSENT:
            return found
        self.look((x,))
        return UNARY[kind](x)

    def compare(self, symbol: str, left: Any, right: Any) -> Any:
        function = COMPARISONS[symbol]
        if _is_of_tensors(left, right):
            return self.tensor_operator(function, left, right)
        if type(left) in _NUMBERS and type(right) in _NUMBERS and not isinstance(left, tuple):
            return function(left, right)
        if type(left) is Number or type(right) is Number:
            if (answer := before_graph(self.world, function, left, right)) is not None:
                return answer
            if takes_late(function, (left, right)):
                return compute(self.recorder.graph, function, (left, right))
        if _are_numbers(left, right):
            return operated(function, left, right)
        name = function.__name__
        swapped = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(name, name)
        if is_array(left):
            self._refuse_element(right, swapped)
        for x, asked, other in self._in_turn((left, name, right), (right, swapped, left)):
            is_not = asked == "ne" and _derives(x)
            custom = self._by_method((x, "eq" if is_not else asked, other))
            if custom is not NotImplemented:
                return not self.truth(custom) if is_not else custom
        if type(left) is FakeTensor or type(right) is FakeTensor:
            return self.tensor_operator(function, left, right)
        left, right = comparable(left, right)
        if symbol not in ("==", "!="):
            self._refuse_asked(function, left, right, name, swapped)
        elif type(left).__eq__ is type(right).__eq__ and containers.asks_within(self, left, right):
            return containers.same_items(self, left, right) is (symbol == "==")
        elif all(_answered(symbol, *pair) for pair in ((left, right), (right, left))):
            return self.identical(left, right) is (symbol == "==")
        left, right = self.deep(left), self.deep(right)
        self.look((left, right), COMPARED)
        return function(left, right)

    def identical(self, left: Any, right: Any) -> bool:
        one, other = self.world.origin(left), self.world.origin(right)
        if left is not right and one is not None and other is not None:
            self.world.distinct(one, other)
        if left is not right and _are_numbers(left, right) and left is not None is not right:
            left, right = concrete(left), concrete(right)  # CPython keeps small ones
            return left is right and type(left) in (int, bool) and left in range(-5, 257)
        if left is not right and None is not left and None is not right:
            if not {id(left), id(right)}.isdisjoint(self.world.lent or ()):
                raise Anew("lent")
        return left is right

    def contains(self, container: Any, item: Any) -> bool:
        if type(container) is FakeTensor:
            return bool(container.__contains__(item))
        if (answer := ask(self, container, "__contains__", item)) is not ABSENT:
            return self.truth(answer)
        if getattr(type(container), "__contains__", ABSENT) is None:
            return item in container  # the TypeError
        is_gone_through = hasattr(container, "__iter__") or hasattr(container, "__getitem__")
        is_gone_through &= not hasattr(container, "__contains__")
        if is_gone_through or containers.asks_within(self, container, item):
            coming = Stepping(self, self.iterate(container))
            return any(x is item or self.truth(self.compare("==", x, item)) for x in coming)
        if self.is_outside(container) and isinstance(container, dict) and is_scalar(item):
            return self.world.get(self.world.mirror(container), item) is not ABSENT
        if type(item) is str and (owner := class_of(self.world, container)) is not None:
            return self.world.class_item(owner, item) is not ABSENT
        is_dict = isinstance(container, dict)  # of which C looks at keys alone
        shown = dict.fromkeys(dict.keys(self.plain(container))) if is_dict else self.deep(container)
        item, container = comparable(*map(whole_text, (self.deep(item), shown)))
        is_plain = is_open(item) or type(item) in (tuple, torch.Size)
        if is_plain and holds_open(item) and type(container) in _HOLD_NUMBERS:
            if all(type(x) in _NUMBERS or is_open(x) for x in container):
                return symbols.is_in(item, container)
        item = concrete(item)
        looked = dict.keys(container) if isinstance(container, dict) else (container,)
        self.look((item, *looked), COMPARED)
        return item in container

    def truth(self, x: Any) -> bool:
        if type(x) in _NUMBERS or is_open(x):
            return bool(x.text() if type(x) is Text else x)
        if type(x) is Number and (answer := before_graph(self.world, bool, x)) is not None:
            return bool(answer)
        for name in ("__bool__", "__len__"):
            if (found := ask(self, x, name)) is not ABSENT:
                return found if type(found) is bool else by_c(bool, name, found)
        if self.is_outside(x) and isinstance(x, CONTAINERS):
            return self.length(x) > 0
        self.look((x,))
        return bool(x)

    def negated(self, x: Any) -> Any:
        is_pending = type(x) is torch.SymBool and x.node.is_pending()
        return operated(operator.not_, x) if is_pending else not self.truth(x)

    def decides(self, f: Frame, at: int, x: Any) -> bool:
        if type(x) in (torch.SymBool, FakeTensor, Number):
            raising = raising_truth(f.program, at)
            if raising is not None and self.asserts(x, not raising):
                return not raising
        return self.truth(x)

    def asserts(self, x: Any, wanted: bool) -> bool:
        """Let the graph check the truth of what only data knows; False: it may not."""
        if type(x) is torch.SymBool:
            is_pending = x.node.is_pending()
            return is_pending and self.expects(x if wanted else operated(operator.not_, x))
        others = self.modes or self.world.seen or self.policy.is_exporting  # hear what is asked
        if others or self.checks is None or is_heard(self.frames):
            return False
        answer = in_graph(x) if type(x) is Number else x
        holds = None if answer is None else tensor_objects.condition(answer, wanted)
        if holds is not None:
            self.checks.append(holds)
            torch._assert_async(holds)
        return holds is not None

    def expects(self, x: Any) -> bool:
        """Let the graph check what only data knows; False: it may not, or nobody needs it."""
        return all(self._expects(part) for part in x.node.parts)

    def _expects(self, node: Any) -> bool:
        if node.env.data.are_marked(node.a, node.b):
            return bool(node.env.data.require(node.a, node.op, node.b))
        if self.checks is None or is_heard(self.frames):
            return False
        self.checks.append(node)
        self.recorder.check(node)
        if node.is_pending():
            node.env.note(node.a, node.op, node.b)
        return True

    def subscript(self, container: Any, key: Any) -> Any:
        container = whole_text(container)
        if type(container) is FakeTensor:
            return self.tensor_operator(operator.getitem, container, self.plain(key))
        if is_array(container) and is_open(key):
            return container[key]
        key = concrete(key)
        if type(container).__module__ == "typing":
            return container[key]  # Optional[int]
        if (found := ask(self, container, "__getitem__", key)) is not ABSENT:
            return found
        if isinstance(container, (type, types.GenericAlias)):
            generic: Any = container
            return generic[key]  # list[int], list[T][int]
        if isinstance(container, dict):
            return containers.item(self, container, key)
        key = self._place(key)
        if self.is_outside(container):
            return self.outside_item(container, key)
        if type(key) is str and (owner := class_of(self.world, container)) is not None:
            found = self.world.class_item(owner, key)
            return owner.__dict__[key] if found is ABSENT else found  # the KeyError
        self.look((container,))
        ends = (key.start, key.stop, key.step) if type(key) is slice else (key,)
        self.look(ends, COMPARED + AS_NUMBERS)
        return container[self.plain(key)]

    def _place(self, key: Any) -> Any:
        """A place in a sequence: objects are asked for their `__index__`."""
        if type(key) is slice:
            return slice(*map(self._place, (key.start, key.stop, key.step)))
        if type(key) is FakeTensor:  # C code of sequences takes no open number
            return concrete(self.call(torch.Tensor.__index__, key))
        is_int = is_scalar(key) or issubclass(type(key), int)  # C takes its value
        found = ABSENT if is_int else ask(self, key, "__index__")
        if found is ABSENT:
            return key
        return by_c(operator.index, "__index__", concrete(found))

    def outside_item(self, container: Any, key: Any) -> Any:
        """An element of a container from outside, guarded alone if possible."""
        world = self.world
        if isinstance(container, CONTAINERS):
            mirror = world.mirror(container)
            is_element = type(key) is int and 0 <= key < len(container)
            if mirror.copy is None and is_element and isinstance(container, list):
                return world.load(container[key], world.part(mirror, key))
            return world.whole(container)[key]
        if isinstance(container, re.Match):
            return container[key]
        raise GraphBreak(f"an element of a {type(container).__qualname__}")

    def store_subscript(self, container: Any, key: Any, value: Any) -> None:
        key = key if type(container) is FakeTensor else concrete(key)
        if type(container) is FakeTensor:
            self.tensor_operator(operator.setitem, container, self.plain(key), value)
        elif ask(self, container, "__setitem__", key, value) is not ABSENT:
            return
        elif isinstance(container, dict) and is_scalar(key) and self.is_outside(container):
            self.world.set(self.world.mirror(container), key, value)
        else:
            if isinstance(key, slice) and not isinstance(container, Computed):
                value = self.listed(self.iterate(value))
            key = key if isinstance(container, dict) else self._place(key)
            self._own(container, key)[key] = value

    def delete_subscript(self, container: Any, key: Any) -> None:
        key = concrete(key)
        if ask(self, container, "__delitem__", key) is ABSENT:
            key = key if isinstance(container, dict) else self._place(key)
            del self._own(container, key)[key]

    def _own(self, container: Any, *keys: Any) -> Any:
        """What C code may write to, at these keys."""
        self.look(keys, COMPARED + AS_NUMBERS)
        return self.world.whole(container) if self.is_outside(container) else container

    def format(self, x: Any, conversion: str, spec: str | None) -> Any:
        if conversion == "a":
            x, conversion = self.call(ascii, x), ""
        if type(x) is Text and conversion in ("", "s") and not spec:
            return x
        if type(x) is FakeTensor and not conversion and spec is not None:
            x = tensor_objects.shown_number(self, x)
        parts = x if type(x) is list else (x,)
        if holds_open(x) and type(x) is not Text and conversion in ("", "r", "s"):
            if spec and not conversion and type(x) is not list:
                return Text.of(format, x, spec)
            if not spec and all(map(is_fixed, parts)):
                return Text.of(symbols.list_text if parts is x else str, *parts)
        is_plain = not (conversion and spec) and type(spec or "") is str
        if type(x) is Number and (x.origins or x.is_late) and is_plain:
            format(x.kind(1), spec or "")  # what it refuses it refuses of all of a class
            return Text((format, (x, spec or "")))
        x = concrete(x)
        if type(x) is FakeTensor:
            raise GraphBreak("printing a tensor needs its values")
        names = ("__repr__",) if conversion == "r" else ("__str__", "__repr__")
        if not conversion and spec is not None:
            names = ("__format__", *names)
        for name in names:
            given = (spec,) if name == "__format__" else ()
            if (text := ask(self, x, name, *given)) is not ABSENT:
                if not isinstance(text, (str, Text)):
                    by_c(_SHOWING[name], name, text)  # the TypeError
                if given or spec is None or (type(text) is Text and not spec):
                    return text
                return format(concrete(text), spec)
            if getattr(type(x), name, None) is not getattr(object, name):
                break  # a class in C has its own
        x = concrete(self.deep(x))
        self.look((x,), SHOWN)
        return super().format(x, conversion, spec)

    def joined(self, texts: list[Any]) -> Any:
        return Text.joined(texts)

    # ---------------------------------------------------------------------- attributes

    attribute = attributes.lookup
    store_attribute = store

    def delete_attribute(self, obj: Any, name: str) -> None:
        store(self, obj, name, DELETED)

    def special(self, obj: Any, name: str) -> Any:
        method = python_method(self, obj, name)
        return super().special(obj, name) if method is None else types.MethodType(method, obj)

    # ---------------------------------------------------------------------- iteration, calls

    def iterate(self, x: Any) -> Any:
        x = whole_text(x)
        if (found := ask(self, x, "__iter__")) is not ABSENT:
            if not hasattr(type(found), "__next__"):
                raise TypeError(f"iter() returned non-iterator of type {type(found).__name__!r}")
            return found
        by_place = python_method(self, x, "__getitem__")
        if by_place is not None and not hasattr(type(x), "__iter__"):
            return iter(Indexed(self, x))
        if self.is_outside(x):
            if isinstance(x, CONTAINERS):
                return self.iterate(self.in_order(x))
            if is_finite_iterator(x):
                return x
            if isinstance(x, (str, bytes)):  # its value is a fact
                return iter(x)
            raise GraphBreak(f"iterating over a {type(x).__qualname__} from outside")
        if isinstance(x, (set, frozenset)):
            read_order(self.world, x)
        return iter(self.plain(x) if type(x) is types.MappingProxyType else x)

    def next(self, iterator: Any) -> Any:
        if (found := ask(self, iterator, "__next__")) is not ABSENT:
            return found
        if self.is_outside(iterator):
            if is_finite_iterator(iterator):
                return self.world.next_of(iterator)
            raise GraphBreak(f"advancing a {type(iterator).__qualname__} from outside")
        if type(iterator) is OF_SETS:
            copies = gc.get_referents(iterator)
            if any(
                m.done and any(m.copy is x for x in copies) for m in self.world.mirrors.values()
            ):
                raise GraphBreak("a set from outside changes while an iterator goes through it")
        return next(iterator)

    def items(self, x: Any) -> list[Any]:
        if type(x) in (list, tuple) and not self.is_outside(x):
            return list(x)
        return self.coming(self.iterate(x))

    def coming(self, iterator: Any, *most: int) -> list[Any]:
        return list(map(self.next, itertools.repeat(iterator, *most)))

    def listed(self, x: Any) -> list[Any]:
        iterator = self.iterate(x)
        self.ask_length(x)
        return self.coming(iterator)

    def ask_length(self, x: Any) -> None:
        if not type(x).__flags__ & IN_C:
            length = self.call(operator.length_hint, x, 0)
            if concrete(length, is_fixed=False) > _MOST_ITEMS:
                raise GraphBreak("memory for as many items as an iterator hints at")

    def fill(self, how: Callable[..., None], x: Any, *more: Any) -> None:
        if type(x) is set and self.is_outside(x):
            containers.change_set(self, how, x, *more)
        else:
            how(self.writable(x), *more)

    def mapping(self, x: Any) -> dict[Any, Any]:
        if isinstance(x, dict) and python_method(self, x, "keys") is None:
            return dict(pairs_of(self.plain(x)))
        if not hasattr(type(x), "keys"):
            return {**x}  # the TypeError
        keys = self.items(self.call(self.attribute(x, "keys")))
        return {key: self.subscript(x, key) for key in keys}

    call = call
    dispatch = tensor_objects.dispatch


_MOST_ITEMS = 2**32  # for which Python asks memory at once
_SHOWING: dict[str, Any] = {"__str__": str, "__repr__": repr, "__format__": format}


def _is_of_tensors(left: Any, right: Any) -> bool:
    """Whether torch is asked for an operator: no class of the program's has a say."""
    if type(left) is FakeTensor:
        left, right = right, left
    kind: Any = type(left)
    is_in_c = bool(kind.__flags__ & IN_C) or hasattr(kind, "__torch_function__")
    is_number = kind is Number or is_open(left)
    return type(right) is FakeTensor and (is_in_c or is_number)


def _are_numbers(left: Any, right: Any) -> bool:
    """Whether both are numbers, and one of them is open."""
    opens = is_open(left), is_open(right)
    return any(opens) and all(o or type(x) in _NUMBERS for o, x in zip(opens, (left, right)))


def _derives(x: Any) -> bool:
    """Whether `!=` of an object is what its `==` is not."""
    kind: Any = type(x)
    return kind.__ne__ is object.__ne__


def _answered(symbol: str, x: Any, other: Any) -> bool:
    """Whether nothing is left to ask `x` once methods in Python have not known if it is `other`."""
    if issubclass(type(x), Computed):
        return False
    if type(x) in _NUMBERS and type(x) is not tuple:
        return not issubclass(type(other), VALUES)
    if type(x) in (*CONTAINERS, tuple):
        return type(other) in _NUMBERS and type(other) is not tuple
    method: Any = getattr(type(x), "__eq__" if symbol == "==" or _derives(x) else "__ne__")
    return method is object.__eq__ or isinstance(method, types.FunctionType)


# ---------------------------------------------------------------------------- handlers
# Who hears of an error: handlers of the program's, and branches that do nothing but raise.

# Branches on a tensor's value of which one side raises: `assert mask.any()`, `if bad: raise ...`.
#
# The graph checks the value, and what follows is the other side. Where the check fails the piece
# has changed nothing (graph_break.py): Python runs it again, and raises what the program raises.

# After these it is not sure that the instructions that follow run, or what becomes of an error.
_LEAVING = tuple("JUMP FOR_ITER SEND YIELD RETURN RERAISE BEFORE_WITH".split())


def raising_truth(program: Bytecode, at: int) -> bool | None:
    """The truth for which the jump at an index leads to nothing but an error; None: neither."""
    jump = program.instructions[at]
    if jump.target < 0 or not jump.name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    sides = {jump.name.endswith("IF_TRUE"): jump.target, jump.name.endswith("IF_FALSE"): at + 1}
    found = []
    for truth, index in sides.items():
        name = ""
        for one in program.instructions[index:]:
            is_raise = one.name == "RAISE_VARARGS" or (name, one.value) == ("sys", "exit")
            name = one.value if one.name == "LOAD_GLOBAL" else ""
            # StopIteration is not an error to whoever asks for more
            if is_raise or one.value == "StopIteration" or any(x in one.name for x in _LEAVING):
                found += [truth] if is_raise else []
                break
    return found[0] if len(found) == 1 else None


def is_heard(frames: Sequence[Frame], on_its_way: bool = False) -> bool:
    """Whether an error that is raised where these stand may end there, in code of the program's.

    on_its_way  whether a `with` of the program's counts, and a `finally` around the call itself:
                they may raise another. Those further out put back what they have switched
    """
    for f in frames:
        handler = f.program.handler(f.at) if f.program.handlers else None
        while handler is not None:
            first, second, *_ = f.program.instructions[handler.target :]
            if first.name == "PUSH_EXC_INFO" and second.name == "WITH_EXCEPT_START":
                leave = f.stack[handler.depth - 1]
                home = type(getattr(leave, "__self__", None)).__module__
                if on_its_way and (home == "contextlib" or not is_trusted(home)):
                    return True
            elif first.name == "PUSH_EXC_INFO" and _takes(
                f, handler.target, on_its_way and f is frames[-1]
            ):
                return True
            handler = f.program.handler(handler.target)
    return False


_ENDS = frozenset("CHECK_EXC_MATCH CHECK_EG_MATCH POP_EXCEPT RERAISE RAISE_VARARGS".split())
_BY_VALUES = (IndexError, ValueError, RuntimeError, AssertionError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


def _takes(f: Frame, first: int, on_its_way: bool) -> bool:
    """Whether the handler that begins here may take what a call raises for its values."""
    taken, at = f.program.instructions, first
    while True:
        begin = at
        at = next(k for k in range(begin, len(taken)) if taken[k].name in _ENDS)
        if any(one.name == "PUSH_EXC_INFO" for one in taken[begin + 1 : at]):
            return True  # a `finally` with a `try` in it
        if taken[at].name == "RERAISE":
            is_matched = any(one.name == "CHECK_EXC_MATCH" for one in taken[first:at])
            # a `finally` that does nothing which might raise, or would be left out
            cleanup = taken[first + 1 : at]
            is_quiet = all(x.name.startswith("LOAD_") or x.name == "STORE_FAST" for x in cleanup)
            return on_its_way and not is_matched and not is_quiet
        if taken[at].name != "CHECK_EXC_MATCH":
            return True
        asked = taken[at - 1]
        name = str(asked.value) if asked.name == "LOAD_GLOBAL" else ""
        kind = f.globals.get(name, vars(builtins).get(name))
        if not isinstance(kind, type) or any(issubclass(one, kind) for one in _BY_VALUES):
            return True
        at = taken[at + 1].target


def in_graph(x: Number) -> Any:
    """What the graph computes in place of a bool that Python would after it; None if nothing.

    In float64, as Python compares. Not of what more was computed: that need not be the same bits.
    """
    function, *operands = x.made
    if function is torch.Tensor.item:
        return operands[0]
    given = []
    for one in operands:
        if type(one) is Number:
            if one.made[:1] != (torch.Tensor.item,):
                return None
            one = one.made[1].double()
        given.append(one)
    function = torch.Tensor.bool if function is bool else getattr(torch, function.__name__)
    return function(*given) if isinstance(given[0], torch.Tensor) else None
