"""What runs in Python: one instruction between two graphs, the lines of a whole function, or all of
one that Python takes less time for than its pieces do.

It means what Python says, on real values; but each function, method and module that it calls is
compiled by itself. TorchDynamo has this from CPython's hook for frames.
"""

from __future__ import annotations

import functools
import inspect
import operator
import time
import types
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fusee import log
from fusee.capture.bytecode import called_from
from fusee.capture.captured import Captured
from fusee.capture.dynamic import as_tensor
from fusee.capture.frame import BINARY, Frame, Semantics, begun, suspended, variables
from fusee.capture.guards import Facts, IdMatch, TypeMatch, Values
from fusee.capture.mirrors import CALLING, CALLING_NAMES
from fusee.capture.opcodes import waiting  # and the table that frames run by is full
from fusee.capture.policy import ORIGINAL, is_plain
from fusee.capture.sources import ComputedAt, Local, by_function, in_classes
from fusee.capture.torch_api import dynamo_switch, has_global_hooks
from fusee.source import Args, Kwargs

# `(function, its first argument)` to what is called in its place.
Nested = Callable[[types.FunctionType, Any], Callable[..., Any]]

_IN_PLACE = len(BINARY) // 2

# Python's own: nothing of the program's that they call is compiled.
_OTHERS = inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_SUSPENDING = inspect.CO_GENERATOR | inspect.CO_COROUTINE


# torch's own that decide step by step, in Python, and call what they are given.
_DECIDING = ("torch.optim.lbfgs",)


def around(nested: Nested, function: types.FunctionType, /, *args: Any, **kwargs: Any) -> Any:
    """Run a function's own lines in Python."""
    function = function.__dict__.get(ORIGINAL, function)
    flags = function.__code__.co_flags
    if flags & _OTHERS:
        return function(*args, **kwargs)
    f = Frame.of(Between(nested), function)
    f.bind(function.__defaults__, function.__kwdefaults__, args, kwargs)
    if not flags & _SUSPENDING:
        return f.run()
    body = begun(f)
    if flags & inspect.CO_GENERATOR:
        return body
    made: Any = waiting(_driving(body))
    made.__name__, made.__qualname__ = f.code.co_name, f.code.co_qualname
    return made


def suspending(nested: Nested, function: types.FunctionType) -> Callable[..., Any]:
    """A function of the same kind, be it a generator or a coroutine, whose lines `around` runs."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return around(nested, function, *args, **kwargs)

    @functools.wraps(function)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return (yield from around(nested, function, *args, **kwargs))

    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await around(nested, function, *args, **kwargs)

    flags = function.__code__.co_flags
    if flags & _OTHERS:
        return function
    if not flags & _SUSPENDING:
        return plain
    return generator if flags & inspect.CO_GENERATOR else coroutine


@types.coroutine
def _driving(body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from body)


def resumed(
    nested: Nested,
    code: types.CodeType,
    globals_: dict[str, Any],
    at: int,
    variables: dict[str, Any],
    stack: list[Any],
    cells: dict[str, types.CellType],
    own: BaseException | None,
    state: str,
) -> Generator[Any, Any, Any]:
    """A generator that goes on where one stood when a graph ended."""
    f = Frame(Between(nested), code, globals_)
    f.at, f.locals, f.stack, f.cells, f.own = at, variables, stack, cells, own
    made = suspended(f, state == inspect.GEN_SUSPENDED)
    if state == inspect.GEN_CLOSED:
        made.close()
    elif state == inspect.GEN_SUSPENDED:
        next(made)
    return made


def for_c(nested: Nested, function: Any) -> Any:
    """What C code is given to call in place of a function of the program's."""
    return Between(nested).compiled(function)


_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType


def beyond(frame: Frame, depth: int) -> bool:
    """Run a frame up to where what lies there on its stack has been used, and each text that was
    made of it: a text that is another one at each call, and is printed. Whether the frame ends."""
    while True:
        begins_loop = frame.instruction.name == "GET_ITER"
        if frame.step():
            return True
        frame.unwound = None  # it knows this frame, by its traceback
        if len(frame.stack) > depth and not begins_loop:
            continue
        if frame.stack and type(frame.stack[-1]) is str:
            depth = len(frame.stack) - 1
        elif not frame.keywords:  # no piece begins between these and their call
            return False


class Between(Semantics):
    """Python's own semantics, with `nested` in place of each Python function that is called."""

    def __init__(self, nested: Nested) -> None:
        super().__init__()
        self.nested = nested

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(function) is types.MethodType:
            args, function = (function.__self__, *args), function.__func__
        if type(function) is functools.partial:
            return self.call(
                function.func, *function.args, *args, **{**function.keywords, **kwargs}
            )
        if type(function) in _FUNCTIONS:
            pass  # most are, and are called as they are
        elif issubclass(type(function), nn.Module):  # a proxy says that it is what it stands for
            if type(function.__dict__) is dict and not has_global_hooks():
                kind: Any = type(function)
                method: Any = _python_method(function, "forward") if is_plain(function) else None
                method = method or kind.__call__  # a scripted module's class has no `forward`
                args, function = (function, *args), method
        elif issubclass(type(function), type):
            is_plain_call = type(function).__call__ is type.__call__
            if is_plain_call and type(in_classes(function, "__init__")) is types.FunctionType:
                return self._make(function, args, kwargs)
        elif (found := _python_method(function, "__call__")) is not None:
            args, function = (function, *args), found
        is_code = type(function) is types.FunctionType
        if is_code:
            own, function = function, self.nested(function, args[0] if args else None)
            if own is function and own.__module__ in _DECIDING:
                args = (*map(self.compiled, args),)
                kwargs = {name: self.compiled(x) for name, x in kwargs.items()}
        elif (place := by_function(CALLING, function)) is not None:
            args = (*(self.compiled(x) if k == place else x for k, x in enumerate(args)),)
            kwargs = {k: self.compiled(x) if k in CALLING_NAMES else x for k, x in kwargs.items()}
        if self.frames:  # what C calls back later has no caller here
            names = functools.partial(variables, self)
            function = called_from(self.frames[-1], names, function, is_code)
        return super().call(function, *args, **kwargs)

    def _make(self, cls: Any, args: Args, kwargs: Kwargs) -> Any:
        """What type.__call__ does."""
        if cls.__new__ is object.__new__:
            obj = object.__new__(cls)
        else:
            obj = self.call(cls.__new__, cls, *args, **kwargs)
        if cls in type(obj).__mro__:  # whatever its class says it is
            result = self.call(type(obj).__init__, obj, *args, **kwargs)
            if result is not None:
                raise TypeError(f"__init__() should return None, not {type(result).__name__!r}")
        return obj

    def compiled(self, function: Any) -> Any:
        kinds = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
        if not isinstance(function, kinds):
            return function
        return functools.partial(self.call, function)

    # ---------------------------------------------------------------------- methods of operators

    def binary(self, kind: int, left: Any, right: Any) -> Any:
        name = BINARY[kind].__name__.strip("_")
        own, other = type(left), type(right)
        if own is other or not issubclass(other, own):  # else its method would be asked first
            names = (name, name[1:]) if kind >= _IN_PLACE else (name,)
            for each in names:
                if hasattr(own, f"__{each}__"):
                    method = _python_method(left, f"__{each}__")
                    # what it does not know Python asks others, and would ask it twice
                    if method is not None and "NotImplemented" not in method.__code__.co_names:
                        if (found := self.call(method, left, right)) is not NotImplemented:
                            return found
                    break
        return super().binary(kind, left, right)

    def _ask(self, name: str, in_c: Any, x: Any, *args: Any) -> Any:
        """What a method in Python gives; if the class has none, a function in C."""
        method = _python_method(x, name)
        return in_c(x, *args) if method is None else self.call(method, x, *args)

    subscript = functools.partialmethod(_ask, "__getitem__", operator.getitem)
    next = functools.partialmethod(_ask, "__next__", next)

    def iterate(self, x: Any) -> Any:
        return iter(self._ask("__iter__", lambda x: x, x))

    def attribute(self, obj: Any, name: str) -> Any:
        found = in_classes(type(obj), name)
        if type(found) is not property or type(found.fget) is not types.FunctionType:
            return getattr(obj, name)
        cls: Any = type(obj)
        if cls.__getattribute__ is not object.__getattribute__:
            return getattr(obj, name)
        try:
            return self.call(found.fget, obj)
        except AttributeError:
            if not hasattr(cls, "__getattr__"):
                raise
        return cls.__getattr__(obj, name)


def _python_method(x: Any, name: str) -> types.FunctionType | None:
    found = in_classes(type(x), name)
    return found if type(found) is types.FunctionType else None


# ---------------------------------------------------------------------------- trial
# Whether Python takes less time for a function than its pieces do.
#
# What a graph spares is known by prices; what lies between two graphs is Python's, compiled or not,
# and takes whatever it takes, and numbers are made tensors before a graph. So both are measured, by
# calls that the program makes anyway.

_WARM = 16  # calls before it, which compile
_TURNS = "pccppccppcpccpcp"  # Python's and the pieces': no program alternates like this
_MOST_S = 0.05  # of longer calls what lies between graphs is no large part
_SPARED = 0.9  # Python's time over the pieces', from which on it is not worth a change


class Trial:
    """Of one entry of a function's beginning, which it gives to Python or lets be."""

    __slots__ = ("begin", "calls", "check_s", "entry", "least", "name", "site", "turn")

    def __init__(self, entry: Any, site: Any, name: str, values: Values) -> None:
        self.entry, self.site, self.name = entry, site, name
        self.calls, self.begin, self.turn = -_WARM, 0.0, "c"
        self.least = {"p": float("inf"), "c": float("inf")}
        self.check_s = float("inf")  # nearly all of which Python's calls go without
        for _ in range(3):
            begin = time.perf_counter()
            entry.check(*values.values())
            self.check_s = min(self.check_s, time.perf_counter() - begin)

    def is_pythons(self) -> bool:
        """A call begins: whether Python is to run it."""
        at = self.calls
        self.calls, self.turn = at + 1, _TURNS[at % len(_TURNS)] if at >= 0 else "c"
        self.begin = time.perf_counter()
        return self.turn == "p"

    def note(self, result: Any) -> Any:
        """The call has come to its end, with this result."""
        took = time.perf_counter() - self.begin
        if self.calls <= -_WARM // 2:
            return result
        is_sure = not torch.are_deterministic_algorithms_enabled()
        is_sure &= not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if took > _MOST_S or not is_sure:
            self.entry.trial = None
            return result
        if self.calls > 0:
            self.least[self.turn] = min(took, self.least[self.turn])
        if self.calls >= len(_TURNS):
            self.entry.trial = None
            python, pieces = self.least["p"] * 1e6, (self.least["c"] + self.check_s) * 1e6
            told = f"{python:.1f} us by Python, {pieces:.1f} in pieces"
            if python < _SPARED * pieces:
                _leave(self.entry, self.site)
                told += ": Python runs such calls"
            log.publish("guards", self.name, told)
        return result


def _leave(entry: Any, site: Any) -> None:
    """Let Python run an entry, whatever code it comes to and whatever numbers decide on branches.

    What else tells versions apart stays: others may take less time in pieces.
    """
    captured = entry.captured
    rows = [
        fact
        for fact in captured.facts.rows
        if isinstance(fact.origin, Local)
        or (not isinstance(fact, (IdMatch, TypeMatch)) and not isinstance(fact.origin, ComputedAt))
    ]
    told = "its calls are short, and Python takes less time for them than its pieces did"
    facts = Facts(rows, captured.facts.kinds)
    entry.captured = left = replace(captured, facts=facts, stop=None, eager=told)
    left.leave_to_python()

    def check(*given: Any) -> bool:  # made by the arguments of the next call that it is good for
        values = dict(zip(left.place.parameters, given))
        if left.facts.first_miss(values) is not None:
            return False
        entry.check, entry.check_source = left.check(values)
        if entry is site.entries[0]:
            site.quick, site.run = left.quick(values), None
        return bool(entry.check(*given))

    entry.run, entry.check = None, check


def begin_trial(owner: Any, site: Any, entry: Any, values: Values) -> None:
    """Measure both for a new entry, where Python does the same as its pieces."""
    if owner.varies.asks_compiling:
        owner.is_tried = False
        for one in owner.start.entries:
            one.trial = None
    elif owner.is_tried and site is owner.start and entry.run and entry.quick is None:
        captured = entry.captured
        if type(captured) is Captured:  # of one from another process nobody knows what it asks
            makes = any(getattr(x, "function", None) is as_tensor for x in captured.inputs)
            if captured.stop or makes:  # a tensor of each number, at each call
                entry.trial = Trial(entry, site, owner.name, values)


def is_left(owner: Any, values: Values) -> bool:
    """Whether a call that all checks have refused is Python's, as those before it were."""
    first = next(iter(values.values()), None)
    is_others = issubclass(type(first), torch.nn.Module) and first is not owner.owner()
    if is_others or not owner.start.is_full or dynamo_switch("error_on_recompile"):
        return False
    found = (entry.captured for entry in owner.start.entries)
    return all(len(one.replaced) == one.settled for one in found)
