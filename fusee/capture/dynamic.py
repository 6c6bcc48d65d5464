"""Which sizes and numbers from outside vary: those become inputs of a graph, the others constants.

By what `dynamic` says, by name, by a second value, and by what an earlier process of the same job
has seen. Of numbers among them a Number is what the program sees.
"""

from __future__ import annotations

import cmath
import enum
import math
import operator
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx

from fusee import log
from fusee.capture.bytecode import first_line
from fusee.capture.graph_break import GraphBreak
from fusee.capture.guards import EqualsMatch, TypeMatch
from fusee.capture.sources import (
    Computation,
    ComputedAt,
    Dict,
    Held,
    Item,
    Local,
    OfAxis,
    Operand,
    Origin,
    ResultOf,
    Several,
    SizeOf,
)
from fusee.capture.torch_api import (
    DTYPE_OF,
    Mark,
    OpOverload,
    compiler_setting,
    dynamo_switch,
    marks,
    no_torch_function,
)
from fusee.config import CaptureOptions
from fusee.fake.layouts import known
from fusee.fake.open_composites import is_place_open
from fusee.runtime.cache import Job, code_key, job_named
from fusee.source import Args, Function, Kwargs, Rules, leaves, tensors_in
from fusee.sym.ranges import COMPARISONS, FUNCTIONS, result_range

# ---------------------------------------------------------------------------- names

# Where modules keep what one writes as `self.layer`.
TABLES = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_ENTRY = re.compile(r"(.+):(\d+)")


class _Name(NamedTuple):
    """One entry of a list of sources. `axis` None: all of a tensor's."""

    text: str
    axis: int | None

    @classmethod
    def of(cls, entry: str) -> _Name:
        found = _ENTRY.fullmatch(entry)
        return cls(entry, None) if found is None else cls(found[1], int(found[2]))

    def fits(self, ours: str, torchs: str) -> bool:
        """Whether it names an object that we call `ours`, and TorchDynamo `torchs`.

        TorchDynamo's names end with brackets, so that a pattern need not match to their end.
        """
        if self.text in (ours, short := TABLES.sub(r".\1", ours), torchs):
            return True
        try:
            pattern = re.compile(self.text)
        except re.error:  # a name such as x[0](
            return False
        return bool(pattern.match(torchs) or pattern.fullmatch(ours) or pattern.fullmatch(short))


def torchs_name(origin: Origin) -> str:
    """What TorchDynamo calls an object: `L['self']._modules['a'].scale`."""
    root, *parts = origin.path()
    is_global = isinstance(getattr(root, "value", None), dict)  # of a module's variables
    text = "G" if is_global else str(root)
    for part in parts:
        text = part.words_after(text)
    text = re.sub(r"^\.s(?=\d)", "___stack", text).removeprefix(".c_")
    return text if is_global else re.sub(r"^\w+", lambda name: f"L[{name[0]!r}]", text)


class Named:
    """Sizes and numbers that options, or torch.compiler.config, name as varying.

    source   torch._dynamo.variables.builder.is_dynamic_source, is_dynamic_value
    """

    def __init__(self, options: CaptureOptions) -> None:
        def entries(name: str) -> list[str]:
            return compiler_setting(name).replace(" ", "").split(",")

        def names(given: Iterable[str], name: str) -> list[_Name]:
            return [*map(_Name.of, filter(None, (*given, *entries(name))))]

        self.unbacked = names(options.unbacked_sources, "unbacked_sources")
        self.names = [*names(options.dynamic_sources, "dynamic_sources"), *self.unbacked]
        self.values = {*map(int, filter(None, entries("dynamic_values")))}

    def __call__(self, origin: Origin, value: Any) -> bool:
        """Whether they name the number, or size, at an origin."""
        return (value in self.values and type(value) is int) or self.among(self.names, origin)

    def among(self, names: list[_Name], origin: Origin) -> bool:
        if not names:
            return False
        axis, of = (origin.axis, origin.of) if isinstance(origin, SizeOf) else (None, origin)
        ours, torchs = str(of), torchs_name(of)
        return any(
            ((axis is None or name.axis in (None, axis)) and name.fits(ours, torchs))
            or name.text == str(origin)
            for name in names
        )


# ---------------------------------------------------------------------------- varying


def is_learning_rate(origin: Origin) -> bool:
    """Whether `optimizer.param_groups[k]["lr"]` is there, which schedulers change at each step."""
    group = origin.parent
    groups = group.parent if isinstance(group, Item) else None
    is_group = isinstance(groups, Item) and groups.key == "param_groups"
    return is_group and isinstance(origin, Item) and origin.key == "lr"


class Varying:
    """Which numbers and sizes from outside are inputs of the graphs of a function.

    dynamic       as compile() has it: None, from their second value on; True, at once; False, never
    with_symbols  whether the backend takes graphs with open sizes; else sizes are constants
    with_unbacked the same of sizes that only the data knows; else graphs end at them
    as_torch      whether it gets them as from TorchDynamo, which makes inputs of all symbols
    with_backward whether it takes graphs with backward passes in them
    tells_writes  whether an error of a graph shows if an input was written to before
    known         by the words of an origin: False for one whose value the program needs
    fixed         words of those that a relation made a constant of in one version
    begun         states of optimizers, and parameters that are in them since they were captured
    asks_compiling  whether code of the program's asks if it is compiled
    asks_gradients  whether its code may ask for those of what a graph gave; None: not looked at yet
    callers       the functions that call it between their graphs, each with its own Varying
    """

    asks_compiling = False
    asks_gradients: bool | None = None
    callers: tuple[tuple[types.FunctionType, Varying], ...] = ()

    def __init__(
        self,
        function: types.FunctionType | None = None,
        dynamic: bool | None = None,
        *,
        with_symbols: bool = True,
        with_unbacked: bool = True,
        as_torch: bool = False,
        with_backward: bool = False,
        tells_writes: bool = False,
        options: CaptureOptions | None = None,
    ) -> None:
        self.dynamic, self.with_symbols = dynamic, with_symbols
        self.with_unbacked, self.as_torch = with_unbacked, as_torch
        self.with_backward, self.tells_writes = with_backward, tells_writes
        self.options = options or CaptureOptions.parse()
        self.known: dict[str, bool] = {}
        self.fixed: set[str] = set()
        self.job: Job | None = None
        self.begin()
        if function is not None and (job := job_named(compiler_setting("job_id"))) is not None:
            self.job, self.at = job, first_line(function)
            self.key = f"{function.__qualname__} {code_key(function.__code__, placed=False)[:12]}"
            for words, seen in job.seen(self.key).items():
                if dynamic is not False or all(type(value) is float for value in seen):
                    self.known[words] = True
                    text = f"{words} is an input: it was {', '.join(map(str, seen))} in {job.name}"
                    log.publish("dynamic", function.__qualname__, text)

    def begin(self) -> None:
        """A capture begins: what torch.compiler.config says now, holds."""
        self.named = Named(self.options)
        self.begun: list[tuple[dict[Any, Any], torch.Tensor]] = []

    def marks(self, x: torch.Tensor) -> Mapping[int, Mark]:
        """What is said of a tensor's sizes, by axis."""
        return marks(x)

    def mark(self, origin: Origin, dynamic: bool = True) -> Mark:
        """That of a size or number which is not marked; by name it may be."""
        is_unbacked = self.with_symbols and self.named.among(self.named.unbacked, origin)
        return Mark(dynamic or is_unbacked, unbacked=is_unbacked)

    def __call__(self, origin: Origin, value: Any) -> bool:
        """Whether the number or size at an origin is an input; `value` is what it is now."""
        if is_learning_rate(origin):
            return self.known.get(str(origin), True)
        if not self.with_symbols and isinstance(origin, OfAxis):
            return False
        if isinstance(origin, Item) and isinstance(origin.of, Dict):
            owner = origin.of.of
            if isinstance(owner, Held) and hasattr(type(owner.value), "_dynamo_marked_static"):
                return False
        if self.known and (known := self.known.get(str(origin))) is not None:
            return known
        if self.dynamic is True and isinstance(origin, (OfAxis, Local)):
            return True
        return self.named(origin, value)

    def settings(self) -> Any:
        """All that decides what a capture leaves open."""
        inputs = sorted(words for words, is_input in self.known.items() if is_input)
        named = self.named.names, self.named.unbacked, sorted(self.named.values)
        return self.dynamic, inputs, named, self.reads_sizes, self.reads_numbers

    @property
    def reads_sizes(self) -> bool:
        """Whether graphs go on behind sizes that only data knows."""
        option = self.options.capture_dynamic_output_shape_ops
        return self._reads("capture_dynamic_output_shape_ops", option)

    @property
    def reads_numbers(self) -> bool:
        """Whether graphs go on behind numbers that tensors hold."""
        return self._reads("capture_scalar_outputs", self.options.capture_scalar_outputs)

    def _reads(self, name: str, option: bool) -> bool:
        # Who switches it on in torch._dynamo.config has a backend that takes such graphs.
        return (self.with_symbols and dynamo_switch(name)) or (self.with_unbacked and option)

    def is_any(self) -> bool:
        """Whether anything but a learning rate may be an input."""
        named = self.named.names or self.named.values
        return bool(self.dynamic is True or named or any(self.known.values()))

    def learn(self, changed: Iterable[tuple[str, bool, Any, Any]]) -> Iterator[str]:
        """Note what has other values in a call, as Fact.varying says; those that are inputs now."""
        seen: dict[str, list[Any]] = {}
        for words, is_input, was, now in changed:
            if not is_input and words not in self.fixed:
                self.fixed.add(words)  # once it may have been by chance
            elif not is_input:
                self.need(words)
            elif words not in self.known and (type(now) is float or self.dynamic is not False):
                self.known[words] = True
                seen[words] = [was, now]
                yield words
        if self.job is not None and seen:
            self.job.learn(self.key, self.at, seen)

    def retry(self, changed: Iterable[tuple[str, bool, Any, Any]]) -> bool:
        """Take for inputs, once more, what versions differ in. Whether that is anything new."""
        told = {words for words, is_input, was, now in changed if not is_input and was != now}
        if told := {words for words in told if words not in self.known}:
            self.known.update(dict.fromkeys(told, False))
            return True
        if self.dynamic is False or not self.with_symbols:
            return False
        new = {words for words, is_input, was, now in changed if is_input and was != now}
        new -= {words for words in new if self.known.get(words) and words not in self.fixed}
        self.known.update(dict.fromkeys(new, True))
        return bool(new)

    def need(self, words: str) -> None:
        """Note that the program needs the value of one: it is a constant of each version."""
        self.known[words] = False


# ---------------------------------------------------------------------------- numbers
# Numbers that a graph computes: a learning rate that a scheduler changes, a count of steps.
#
# A Number is a float or an int whose value no capture knows. Arithmetic with one becomes a node of
# the graph, on Python's numbers, as the program has it; so does a torch call that takes one.
# Whatever else needs its value (a branch, a size, a call into C, text) makes constants of the
# numbers that it was computed from. An int is a double in the graph, so it must be one that a
# double holds, and may meet only floating tensors there: of integers it would decide the bits.

NUMPY = (sys.modules["numpy"].generic,) if "numpy" in sys.modules else ()  # torch imports it

# Known by what they are as one of these, whatever else their classes hold.
VALUES = (int, float, complex, str, bytes, re.Match, *NUMPY)


class Specialise(BaseException):
    """Capture again, with the numbers at these origins as constants: no `except` may catch it."""

    def __init__(self, origins: frozenset[str]) -> None:
        super().__init__(f"the program needs the value of {', '.join(origins)}")
        self.origins = origins


# What the program sees of objects of a class, `(world, object, origin)`; None: as of any other.
LOADERS: Rules[type, Function] = Rules()


@LOADERS.rule(*weakref.ProxyTypes)
def _load_proxy(*_: Any) -> NoReturn:
    raise GraphBreak("a weak proxy, which says that it is what it stands for")


@LOADERS.rule(OpOverload, torch._ops.OpOverloadPacket, torch.jit.ScriptFunction, ContextVar)
def load_fixed(world: Any, x: Any, origin: Origin) -> Any:
    """A function in C, say, that its class does not tell from others."""
    return world.fix(x, origin, world.origin(x))


def loaded(world: Any, x: Any, origin: Origin) -> Any:
    """What LOADERS say; None if nothing."""
    loader = LOADERS.get(type(x))
    return None if loader is None else loader(world, x, origin)


class Computed:
    """What the program has for a value that the graph computes, and that is no tensor to it.

    kind       the class that the program sees
    attribute  what it gets for an attribute, given the machine and a name
    number     what a torch call, or a tensor's index, gets for it
    """

    __slots__ = ()
    kind: Any
    attribute: Function
    number: Function


class Number(Computed):
    """A number that a tensor holds, or that is computed from such numbers.

    write     makes its node in the graph, once a torch call takes it; None: none can
    origins   the numbers from outside that it was computed from, in words
    kind      float, int or bool: what it is to the program; a bool is only given away
    made      the function and operands that give it after the graph; empty if it comes from outside
    is_late   whether it is read from what the graph gives
    now       what it is in the call that is captured, if it comes from outside
    range     between which numbers a float lies that is read; None: any
    """

    __slots__ = ("_node", "is_late", "kind", "made", "now", "origins", "range", "write")

    def __init__(
        self,
        write: Callable[[], fx.Node] | None,
        origins: frozenset[str],
        kind: type = float,
        made: Args = (),
        *,
        is_late: bool = False,
    ) -> None:
        self.write, self.made = write, made
        self.origins = origins
        self.kind, self.is_late = kind, is_late
        self.now: float | None = None
        self.range = result_range(made[0], made[1:]) if is_late else None
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:
        if self._node is None:
            self._node = self.need() if self.write is None else self.write()
        return self._node

    def need(self, *_: Any) -> NoReturn:
        """Something needs the value itself."""
        if self.origins:
            raise Specialise(self.origins)
        raise GraphBreak("a branch or a call needs a number that the graph computes")

    def attribute(self, m: Any, name: str) -> Any:
        if not hasattr(self.kind, name):  # torch asks each argument whether it is like a tensor
            raise AttributeError(f"{self.kind.__name__!r} object has no attribute {name!r}")
        self.need()

    def number(self, is_place: bool = False) -> Number:
        return self


def is_array(x: Any) -> bool:
    """Whether it is a value of the graph that is one of NumPy's to the program."""
    return issubclass(type(x), Computed) and type(x) is not Number


_NEED = """format repr float int index bool complex round trunc hash eq lt le gt ge add radd sub
    rsub mul rmul truediv rtruediv pow rpow neg abs"""
for _name in _NEED.split():
    setattr(Number, f"__{_name}__", Number.need)


# What a Number and another float, int or Number may go through in the graph.
_NAMES = "add sub mul truediv pow".split()
_ARITHMETIC = {*(getattr(operator, name) for name in _NAMES), operator.neg}
_EXACT = {operator.add, operator.sub, operator.neg}  # of integers
_RAISE = {operator.truediv, operator.pow}  # for some numbers, but after the graph is too late
# What Python makes of numbers that are read, and most of it no graph.
_LATE = {abs, math.fabs, math.sqrt, round, min, max}
_IN_GRAPH: dict[Any, Any] = {min: torch.sym_min, max: torch.sym_max}  # of two
_ANSWERS = {*COMPARISONS.values(), math.isnan, math.isinf, math.isfinite}
# Torch calls that a graph may give one to, as backends know to compile them.
_TAKE_NUMBERS = {
    *_NAMES, *(f"i{name}" for name in _NAMES),
    *"multiply div divide true_divide addcmul addcdiv lerp clamp clip where linspace".split(),
}  # fmt: skip
_NOT_IN_PLACE = frozenset(
    "gt ge lt le eq ne mod remainder fmod floordiv floor_divide clamp_min clamp_max setitem".split()
)


# For these a number of NumPy's is an array.
_LOOK_AT_DTYPES = frozenset("tensor as_tensor asarray new_tensor".split())


def takes_numbers(name: str) -> bool:
    """Whether a graph may give a Number to a torch call of this name."""
    base = name.strip("_")
    writes = name.endswith("_") and not name.endswith("__")
    return base in _TAKE_NUMBERS or (base in _NOT_IN_PLACE and not writes)


def compute(graph: fx.Graph, function: Function, operands: Args) -> Number:
    """What an operator makes of numbers: a node of the graph, if a torch call takes it."""
    numbers = [x for x in operands if type(x) is Number]
    kinds = {x.kind if type(x) is Number else type(x) for x in operands}
    origins = frozenset().union(*(x.origins for x in numbers))
    is_late = any(x.is_late for x in numbers)
    if is_late and function in _ANSWERS and kinds <= {int, float}:
        return Number(None, origins, bool, (function, *operands), is_late=True)
    is_known = function in _ARITHMETIC or (is_late and function in _LATE)
    if not is_known or not kinds <= {int, float}:
        numbers[0].need()
    by = operands[1] if function is operator.truediv else None
    is_sure = type(by) is Number and by.made[:1] == (operator.pos,)  # an open one, which was asked
    if is_late and not is_sure and function in _RAISE | _LATE:
        if result_range(function, operands) is None:
            numbers[0].need()
    is_int = kinds == {int} and function is not operator.truediv
    is_held = not is_int or function in _EXACT  # else it may be more than a double holds
    is_held &= function not in _LATE or (function in _IN_GRAPH and len(operands) == 2)
    if not is_held and not is_late:
        numbers[0].need()

    def write() -> fx.Node:
        given = tuple(argument(x, "", graph) for x in operands)
        return graph.call_function(_IN_GRAPH.get(function, function), given)

    kind, made = int if is_int else float, (function, *operands)
    return Number(write if is_held else None, origins, kind, made, is_late=is_late)


def takes_late(function: Function, operands: Args) -> bool:
    """Whether Python computes it after the graph, of numbers that are read there."""
    is_late = any(type(x) is Number and x.is_late for x in operands)
    kinds = (x.kind if type(x) is Number else type(x) for x in operands)
    return is_late and function in _LATE | _ANSWERS and {*kinds} <= {int, float}


def converted(x: Number, kind: type) -> Number:
    """What int(), float() or bool() makes of a number."""
    if x.kind is kind:
        return x
    is_sure = bool in (kind, x.kind) or (kind is float and x.made[0] not in _ARITHMETIC)
    if not x.is_late or not is_sure:
        x.need()  # it may raise: of nan, or of what has been multiplied often
    return Number(None, x.origins, kind, (kind, x), is_late=True)


def _numbers(x: Any) -> Iterator[Number]:
    return (leaf for leaf in leaves(x) if type(leaf) is Number)


def holds_number(x: Any) -> bool:
    """Whether a Number is among arguments."""
    return next(_numbers(x), None) is not None


def need_values(*arguments: Any) -> NoReturn:
    """A call needs the values of the Numbers among its arguments."""
    next(_numbers(arguments)).need()


def argument(x: Any, name: str, graph: fx.Graph) -> Any:
    """How the call of `name` in a graph has an argument that is no tensor."""
    if type(x) is Number and x.node.graph is not graph:
        x.need()  # it is computed outside of a transform's function, or within
    if isinstance(x, NUMPY):
        # what is one of Python's, or has its `__index__`, is that number to all that ask no dtype
        is_pythons = isinstance(x, (float, complex)) or hasattr(x, "__index__")
        if not takes_numbers(name) and (name in _LOOK_AT_DTYPES or not is_pythons):
            raise GraphBreak(f"numpy's numbers have a dtype, at which {name}() may look")
        return x.item()
    return x.node if type(x) is Number else x


def shown(x: Any) -> Any:
    """Arguments with some number in place of each Number: what a call gives does not say which."""
    if type(x) is Number:
        return x.kind(1)
    if type(x) is dict:
        return {key: shown(item) for key, item in x.items()}
    return type(x)(map(shown, x)) if type(x) in (tuple, list) else x


def exactly(x: Any) -> Any:
    """What tells a number, a text, a match or a set of them from all that differ from it."""
    if isinstance(x, (set, frozenset)):
        return tuple(sorted(map(repr, x)))
    if isinstance(x, re.Match):
        return x.re, x.string, x.pos, x.endpos, x.regs
    kind = next((kind for kind in VALUES[:5] if isinstance(x, kind)), None)
    return x.tobytes() if kind is None else kind.__repr__(x)


def meets_integers(*arguments: Any) -> bool:
    """Whether an int that the graph computes is in a call with tensors that are no floats."""
    is_int = any(x.kind is int for x in _numbers(arguments))
    return is_int and any(not x.is_floating_point() for x in tensors_in(arguments))


def fits_double(value: float) -> bool:
    """Whether a double holds a number, and what is added to it a few times."""
    return type(value) is float or -(2**48) < value < 2**48


def load_number(world: Any, value: float, origin: Origin) -> Number:
    """The Number for one from outside: an input of the graph, a fact is its type alone."""
    known: Number | None = world.numbers.get(origin)
    if known is not None:
        return known
    world.fact(TypeMatch, origin, type(value))
    if type(value) is int:
        world.gives(origin, fits_double, "whether a double holds ", True)
    with no_torch_function():
        fake = world.input(as_tensor(value), ResultOf(origin, as_tensor, ""), origin)
    number: Number = world.recorder.item(fake, frozenset({str(origin)}), type(value))
    number.now, world.numbers[origin] = value, number
    world.know(number, origin)
    return number


# What these make of numbers from outside is computed before the graph: a number from outside, too,
# or a fact. Nodes of a graph would raise too late, or lose what is no float.
_BEFORE: dict[Any, bool] = {  # and whether it never raises, and gives one class
    **dict.fromkeys(COMPARISONS.values(), True), **dict.fromkeys((bool, abs), True),
    **dict.fromkeys((math.isnan, math.isinf, math.isfinite, math.atan, math.tanh, math.erf), True),
    **dict.fromkeys((int, round, math.floor, math.ceil, math.trunc, *FUNCTIONS), False),
    **dict.fromkeys((operator.truediv, operator.floordiv, operator.mod, operator.pow), False),
}  # fmt: skip
_MOST_STEPS = 64


def before_graph(world: Any, function: Function, *operands: Any) -> Any:
    """What a function makes of numbers from outside; None: only their values say it.

    There are as many versions as answers of comparisons, not as values.
    """
    by = operands[-1]
    is_in_graph = function is operator.truediv and type(by) in (int, float) and by != 0
    if function not in _BEFORE or is_in_graph:
        return None
    found = _computation(function, operands)
    if found is None:
        return None
    how, given = found
    of = Several(tuple(map(world.origin, given)))
    now: Any = tuple(x.now for x in given)
    words = how.words([*map(str, of.parts)])
    try:
        value = how(now)
    except (ArithmeticError, ValueError):
        need_values(*operands)
    if (kind := type(value)) not in (bool, int, float):  # it is complex
        need_values(*operands)
    if (key := (*map(id, given), words)) not in world.computed:
        world.computed[key] = ComputedAt(of, how, words)
        if not _BEFORE[function]:
            sure = ComputedAt(of, how._replace(kind=kind), f"whether {words} is {kind.__name__}")
            world.fact(EqualsMatch, sure, True)
    if kind is not float:
        return world.load(value, world.computed[key])
    made = load_number(world, value, world.computed[key])
    made.origins = frozenset().union(*(x.origins for x in given))  # what to make a constant of
    return made


def may_be_open(function: Function, by: Any) -> bool:
    """Whether an operator beside a Number takes an open number as it is: one that never raises, or
    a quotient by what the graph computes."""
    if function is operator.truediv and type(by) is Number:
        return _computation(operator.pos, (by,)) is None
    return function not in _BEFORE


def _computation(function: Any, operands: Args) -> tuple[Computation, list[Number]] | None:
    """The steps from numbers from outside to a function of what was made of them."""
    row, order = [Number(None, frozenset(), made=(function, *operands))], []
    while row:  # no recursion over what the program computes
        order.append(x := row.pop())
        row += [y for y in x.made[1:] if type(y) is Number]
        if len(order) > _MOST_STEPS:
            return None
    given = list({id(x): x for x in order if not x.made}.values())
    places = {id(x): Operand(k) for k, x in enumerate(given)}
    steps: list[tuple[Function, Args]] = []
    for x in reversed(order):
        if id(x) not in places:
            by, *taken = x.made
            if not all(type(y) in (Number, int, float, bool) for y in taken):
                return None
            places[id(x)] = Operand(len(given) + len(steps))
            steps.append((by, tuple(places[id(y)] if type(y) is Number else y for y in taken)))
    return (Computation(tuple(steps)), given) if all(x.now is not None for x in given) else None


def as_tensor(value: float) -> torch.Tensor:
    """How a number from outside is given to a graph."""
    return torch.tensor(value, dtype=torch.float64)


# ---------------------------------------------------------------------------- arguments
# What a call in a graph may have for an argument: what fx prints as Python that gives it again.

_PRINTED = (
    types.NoneType, types.EllipsisType, bool, bytes, range, enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool, fx.Node,
    OpOverload, Number, *NUMPY,
)  # fmt: skip
# Of the user's classes of numbers and texts torch sees what they hold.
_HELD: dict[type, Any] = {int: int.__index__, float: float.__float__, str: str.__str__}


def printable(x: Any) -> Any:
    """The argument, or what torch takes for it.

    raises   GraphBreak for what has no text
    """
    if type(x) in (int, float, str) or isinstance(x, NUMPY):
        return x
    for kind, held in _HELD.items():
        if isinstance(x, kind) and type(x) is not bool:
            return held(x)
    if isinstance(x, complex):
        zeros = [part for part in (x.real, x.imag) if part == 0]
        if not cmath.isfinite(x) or any(math.copysign(1, zero) < 0 for zero in zeros):
            raise GraphBreak(f"the number {x} has no text in Python that gives it again")
    if isinstance(x, (complex, *_PRINTED)):
        return x
    if isinstance(x, type) and x in DTYPE_OF:  # fx prints them as `<class 'int'>`
        return DTYPE_OF[x]
    if type(x) is type(torch.FloatTensor):  # x.type(torch.DoubleTensor)
        return f"{x.__module__}.{x.__name__}"
    raise GraphBreak(
        f"an argument of class {type(x).__qualname__} has no text in a graph",
        "give numbers, texts, dtypes, devices and tensors to torch's functions",
    )


def of_new(x: torch.Tensor, *given: Any) -> tuple[Function, Args]:
    """`x.new(...)`, to which a torch.Size, which no graph knows from a tuple, is no data."""
    if len(given) != 1 or isinstance(given[0], (int, torch.SymInt, torch.Size)):
        size = given[0] if given and isinstance(given[0], torch.Size) else given or (0,)
        return torch.Tensor.new_empty, (x, size)
    if isinstance(given[0], (list, tuple)):
        return torch.Tensor.new_tensor, (x, given[0])
    return torch.Tensor.new, (x, *given)


# ---------------------------------------------------------------------------- readings
# Numbers that a program takes out of tensors: `x.tolist()`, `x.item()`.
#
# They are read after the graph, from what it gives: the program can move them, return them and do
# arithmetic with them. Integers are unbacked symbols: a graph that needs one reads it as well.
# Where the program needs the value of one, the graph ends.

# Each is a line of what runs after the graph.
_MOST_READINGS = 256


def asked_by_c(recorder: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call C code, in which asking for a tensor's number ends the graph: it would refuse ours."""
    before, recorder.reads_numbers = recorder.reads_numbers, False
    try:
        return function(*args, **kwargs) if kwargs else function(*args)  # a mode hears of names
    finally:
        recorder.reads_numbers = before


_SCALARS = {"item": None, "__float__": float, "__int__": int, "__index__": int}


def read(recorder: Any, name: str, args: Args) -> Any:
    """What a method gives that shows values of a tensor; None if the graph ends there."""
    x = args[0]
    if len(args) == 1 and (told := recorder.known(name, x)) is not None:
        return told
    kind = float if x.is_floating_point() else bool if x.dtype is torch.bool else int
    is_number = kind is not int or x.dtype in (*_INTEGERS, torch.uint8)
    is_main = recorder.is_main and not recorder.seen and x.layout is torch.strided
    is_main = is_main and x.device.type != "meta"  # which has no values
    if len(args) > 1 or not is_number or not is_main or not known(x.shape):
        return None
    if name == "tolist" and x.numel() <= _MOST_READINGS:
        values = _values(recorder, x)
        listed = Number(None, frozenset(), list, (torch.Tensor.tolist, values))
        taken = (
            _number(recorder, values, k, (operator.getitem, listed, k)) for k in range(x.numel())
        )
        return _nested(taken, tuple(x.shape))
    if name not in _SCALARS or x.numel() != 1 or not recorder.reads_numbers:
        return None
    values = _values(recorder, x)
    found = _number(recorder, values, 0, (torch.Tensor.item, values))
    wanted = _SCALARS[name] or kind
    if kind is not int:
        return converted(found, wanted)
    return found if wanted is int else torch.sym_float(found)  # type: ignore[no-untyped-call]


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)  # of uint8 it is a mask


def run_with_numbers(recorder: Any, func: Any, args: Args, kwargs: Kwargs, name: str) -> Any:
    """A call's arguments and result, with numbers for tensors of integers that it wants as such."""
    try:
        return _run(recorder, func, args, kwargs, name)
    except GraphBreak as stop:
        first = stop
    given, found, numbers = (args, kwargs), list[Any](), dict[int, Any]()
    before = recorder.raised, recorder.raised_by
    fx.node.map_aggregate(given, found.append)
    integers = (x for x in found if isinstance(x, torch.Tensor) and x.dtype in _INTEGERS)
    counts = [x for x in integers if all(type(n) is int and n == 1 for n in x.shape)]
    for x in reversed(counts) if _wants_number(first) else ():  # tensors come before numbers
        if (number := read(recorder, "item", (x,))) is None:
            break
        numbers[id(x)] = number
        args, kwargs = fx.node.map_aggregate(given, lambda x: numbers.get(id(x), x))
        try:
            return _run(recorder, func, args, kwargs, name)
        except GraphBreak as stop:
            if not _wants_number(stop):
                break
        except (TypeError, RuntimeError, IndexError):  # this one is to be a tensor
            recorder.raised, recorder.raised_by = before
            del numbers[id(x)]
    raise first


def _run(recorder: Any, func: Any, args: Args, kwargs: Any, name: str) -> Any:
    if name.strip("_") == "setitem" and is_place_open(args[1]):  # what may raise comes first
        args = recorder.call(operator.getitem, *args[:2]), (), *args[2:]
    return args, kwargs, recorder.run(func, args, kwargs, name)


def _wants_number(stop: GraphBreak) -> bool:
    return getattr(stop.__context__, "func", None) is torch.ops.aten._local_scalar_dense.default


def _values(recorder: Any, x: torch.Tensor) -> Any:
    """What a tensor holds now, in a tensor that nothing writes to: the same until `x` changes."""
    if id(x) not in recorder.read:
        flat = recorder.call(torch.Tensor.reshape, recorder.call(torch.detach, x), (-1,))
        recorder.read[id(x)] = x, recorder.call(torch.clone, flat)
    return recorder.read[id(x)][1]


def _number(recorder: Any, values: Any, k: int, made: Args) -> Any:
    """One of `values`."""
    if not values.is_floating_point() and values.dtype is not torch.bool:
        return recorder.symbols.element(values, k)
    recorder.has_numbers = True
    if values.dtype is torch.bool:
        return Number(None, frozenset(), bool, made, is_late=True)

    def write() -> Any:
        return recorder.item(recorder.call(operator.getitem, values, k)).node

    return Number(write, frozenset(), float, made, is_late=True)


def _nested(items: Any, shape: tuple[int, ...]) -> Any:
    return next(items) if not shape else [_nested(items, shape[1:]) for _ in range(shape[0])]
