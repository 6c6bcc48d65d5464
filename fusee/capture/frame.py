"""One activation of a Python function, run instruction by instruction.

What an instruction means for values is the machine's (calls, attributes, truth); what it does to
the stack is in opcodes.py. A frame knows exceptions and suspension.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import datetime
import enum
import inspect
import itertools
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from fusee.capture.bytecode import Instruction, kept_by, passed, program, without_ours
from fusee.capture.graph_break import GraphBreak
from fusee.capture.torch_api import IN_CPP, note_lines
from fusee.runtime import Setting
from fusee.source import Args, Kwargs
from fusee.sym.ranges import COMPARISONS

# ---------------------------------------------------------------------------- frame


class Marker:
    """What stands on the stack or in a variable without being a value of the program."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


NULL = Marker("NULL")
UNBOUND = Marker("UNBOUND")
ABSENT, OUTER = Marker("nothing"), Marker("outer")

# What Python does to find out whether a handler takes an exception, and to raise it again.
_MATCHING = frozenset(
    "BUILD_TUPLE CALL_INTRINSIC_1 CLEANUP_THROW CHECK_EXC_MATCH COPY LOAD_GLOBAL NOP"
    " POP_EXCEPT POP_JUMP_FORWARD_IF_FALSE POP_JUMP_IF_FALSE PUSH_EXC_INFO RERAISE".split()
)

# An opcode returns True if the frame stops here: it returned or it yielded; False if another
# exception is handled from here on; else None.
Opcode = Callable[["Frame", Instruction], Any]
OPCODES: dict[str, Opcode] = {}  # opcodes.py and what it imports fill it


def op(*more: str) -> Callable[[Opcode], Opcode]:
    """Register an opcode under its own name, and others."""

    def register(function: Opcode) -> Opcode:
        OPCODES.update(dict.fromkeys((function.__name__, *more), function))
        return function

    return register


class Room(Setting[int]):
    """Python's calls may go deeper than the program's, since ours are many for each."""

    @property
    def left(self) -> int:
        """How many calls deeper than here the program may go."""
        depth, frame = 0, inspect.currentframe()
        while frame is not None:
            depth, frame = depth + 1, frame.f_back
        return self.now - depth


# Frames of Python's for one of the program's: five where a function calls another.
_FRAMES = 8
room = Room(sys.getrecursionlimit, sys.setrecursionlimit, lambda own: own * _FRAMES)

_IN_YIELD_FROM = (2, 3)  # RESUME's arguments after the yield of a `yield from`, of an `await`


class Frame:
    """The state of one activation.

    machine  the Semantics that say what instructions mean
    names    the namespace of a class body; None in a function
    next     the instruction that follows
    count    how many instructions it has run
    calls    the same, before the last one that called a function
    own, outer   the exceptions that a generator, and what asks it, is handling
    unwound  the exception that went to a handler last
    raised_again  what an exception knew before it was raised once more: traceback and context
    turns    how often its loops have gone round
    """

    def __init__(self, machine: Any, code: types.CodeType, globals_: dict[str, Any]) -> None:
        self.machine = machine
        self.program = program(code)
        self.code = code
        self.globals = globals_
        self.locals: dict[str, Any] = {}
        self.cells: dict[str, types.CellType] = {}
        self.names: Any = None
        self.stack: list[Any] = []
        self.at = 0
        self.next = 0
        self.count = 0
        self.calls = -1
        self.result: Any = None
        self.yielded, self.turns, self.outer = False, 0, ABSENT
        self.keywords: tuple[str, ...] = ()
        self.function: Any = None
        self.own: BaseException | None = None
        self.unwound: BaseException | None = None
        self.raised_again: list[tuple[Any, Any]] = []

    @classmethod
    def of(cls, machine: Any, function: types.FunctionType) -> Frame:
        """One at the beginning of a function, without its arguments."""
        f = cls(machine, function.__code__, function.__globals__)
        f.function = function
        f.cells.update(zip(f.code.co_freevars, function.__closure__ or ()))
        return f

    def bind(self, defaults: Any, more: Any, args: Args, kwargs: Kwargs) -> Frame:
        """Give the parameters what a call does, as CPython does; `more` for those after a star."""
        taking = types.FunctionType(self.program.taking, {}, argdefs=defaults)
        taking.__kwdefaults__, taking.__qualname__ = more, self.function.__qualname__
        self.locals = taking(*args, **kwargs)
        return self

    def clear(self) -> None:
        """Let go of what its variables have, in CPython's order."""
        self.locals, self.cells = self.ordered(), {}
        self.locals, self.stack = {}, []

    def ordered(self) -> dict[str, Any]:
        """What its variables have, or their cells, in CPython's order."""
        names, held = (*self.code.co_varnames, *self.code.co_cellvars), self.cells | self.locals
        return {name: held[name] for name in names if name in held}

    @property
    def instruction(self) -> Instruction:
        listed = self.program.instructions
        return listed[min(self.at, len(listed) - 1)]

    def closes_in_silence(self) -> bool:
        """Whether no handler takes the GeneratorExit that ends the suspended generator of this."""
        twin, handled = copy.copy(self), self.machine.handled
        # as if the instruction that yielded raised
        twin.stack, twin.at = [*self.stack, None], self.at - 1
        error: BaseException = GeneratorExit()
        try:
            while True:
                twin._unwind(error)
                try:
                    while (instruction := twin.instruction).name in _MATCHING:
                        twin.next = twin.at + 1
                        OPCODES[instruction.name](twin, instruction)
                        twin.at = twin.next
                    return False
                except GeneratorExit as raised:
                    error = raised
        except GeneratorExit:
            return True
        finally:
            self.machine.handled = handled
            twin.stack, twin.unwound = [], None
            del error  # which knows this frame

    @property
    def where(self) -> str:
        """`file.py:41 in step`."""
        if self.code.co_filename.startswith("<eval_with_key>"):  # torch.fx made it
            note_lines(self.locals.get("self"))
        return f"{self.code.co_filename}:{self.instruction.line} in {self.code.co_name}"

    # ---------------------------------------------------------------------- the stack

    def push(self, x: Any) -> None:
        self.stack.append(x)

    def pop(self) -> Any:
        return self.stack.pop()

    def take(self, count: int) -> list[Any]:
        """The topmost values, in the order in which they were pushed."""
        if count == 0:
            return []
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    # ---------------------------------------------------------------------- running

    def run(self) -> Any:
        """Run until the frame returns or yields; the value that it gives."""
        machine, before = self.machine, self.count
        machine.enters += 1
        machine.frames.append(self)
        try:
            while True:
                try:
                    run = self._until_stop
                    if not (run() if machine.handled is None else self._handling(run)):
                        continue
                    if not self.yielded:  # as in Python, what nobody else has ends here
                        self.clear()
                    return self.result
                except GraphBreak as found:
                    found.where = found.where or machine.where()
                    raise
                except BaseException as error:  # noqa: BLE001  # whatever the program raises
                    self._unwind_own(error)
                    self.unwound = None  # it knows this frame, by its traceback
                    self.count += 1
        finally:
            machine.frames.pop()
            machine.ran += self.count - before

    def run_first(self) -> Any:
        """The same, before anything is in the graph.

        If nothing that it sees was made by its caller, what breaks within it does so as well when
        it is captured by itself.
        """
        caller, passed_from = self.machine.frames[-1], self.machine.world.passed_from
        is_first, caller.calls = caller.calls != caller.count, caller.count

        def is_outside(x: Any) -> bool:
            inner = x.values() if type(x) is dict else x if type(x) is tuple else None
            is_known = is_scalar(x) or passed_from(x) is not None
            return is_known or (inner is not None and all(map(is_outside, inner)))

        seen = (*self.locals.values(), *([self.function] if self.function.__closure__ else ()))
        is_alike = is_first and all(map(is_outside, seen))
        try:
            return self.run()
        except GraphBreak as found:
            found.within = ((self.code, self.count), *found.within) if is_alike else ()
            raise

    def step(self) -> bool:
        """Run one instruction, exceptions included. True if the frame stopped."""
        try:
            run = self._once
            return bool(run() if self.machine.handled is None else self._handling(run))
        except BaseException as error:  # noqa: BLE001  # whatever the program raises
            self._unwind_own(error)
            return False

    def _once(self) -> bool | None:
        instruction = self.program.instructions[self.at]
        self.next = self.at + 1
        stopped: bool | None = OPCODES[instruction.name](self, instruction)
        self.at = self.next
        return stopped

    def _until_stop(self) -> bool:
        """Run instructions up to one that does not just go on. What that returns."""
        instructions, opcodes = self.program.instructions, OPCODES
        while True:
            instruction = instructions[self.at]
            self.next = self.at + 1
            stopped: bool | None = opcodes[instruction.name](self, instruction)
            self.at = self.next
            self.count += 1
            if stopped is not None:
                return stopped

    def _handling(self, run: Callable[[], bool | None]) -> bool | None:
        """Run while Python itself handles what the machine does: for sys.exc_info(), contexts."""
        return _with_raised(self.machine.handled, None, run)

    def throw(self, error: BaseException) -> bool:
        """Raise in the suspended generator of this. True if it yields: what it delegates to did.

        source   CPython's Objects/genobject.c, _gen_throw
        """
        machine, listed = self.machine, self.program.instructions
        if self.instruction.name == "RESUME" and self.instruction.arg & 3 in _IN_YIELD_FROM:
            ends = isinstance(error, GeneratorExit)
            try:
                method = machine.call(getattr, self.stack[-1], "close" if ends else "throw", None)
                if method is not None:
                    self.result = machine.call(method, *(() if ends else (error,)))
                    if not ends:
                        return True
            except StopIteration as returned:
                if ends:
                    error = returned
                else:  # what the `yield from` gave goes on the stack
                    if sys.version_info < (3, 12):
                        self.pop()
                    self.push(returned.value)
                    self.at = listed[self.at - 2].target
                    return False
            except BaseException as other:  # whatever it raises
                if not self._is_programs(other):
                    raise
                error = other
        self.push(None)  # in place of what would have been sent
        self.at -= 1  # the exception comes from the instruction that yielded
        try:
            _with_raised(error, self.own, lambda: self._unwind(sys.exception()))
        finally:
            del error  # which knows this frame
        return False

    def _is_programs(self, error: BaseException) -> bool:
        """Whether what was raised is the program's: capture ends by exceptions too."""
        return self.machine.is_python or isinstance(error, (Exception, GeneratorExit))

    def _unwind_own(self, error: BaseException) -> None:
        try:
            if not self._is_programs(error):
                raise error
            self._unwind(error)
        finally:
            del error  # which knows this frame

    def _unwind(self, error: Any) -> None:
        """Go to the handler of `error`, or raise it if there is none."""
        for error.__traceback__, error.__context__ in self.raised_again:  # as if it had never left
            self.raised_again = []
        instruction, handler, raised = self.instruction, self.program.handler(self.at), self.at
        if instruction.name == "RERAISE":
            if instruction.arg:
                raised = int(self.stack[-instruction.arg])  # where it was raised first
        elif instruction.name != "RAISE_VARARGS" or instruction.arg:  # else it is raised again, too
            place = self.code, self.globals, instruction.offset, instruction.line
            self.machine.passes(error, *place)
        if handler is None:
            self.at, self.unwound = raised, None
            self.machine.left_by(self, error)
            self.stack.clear()  # a generator that a loop was going through ends here
            try:
                raise error
            finally:
                del error  # which knows this frame
        if self.program.instructions[handler.target].name != "SWAP":  # a comprehension's (3.12)
            self.machine.caught(error)
        self.unwound = error
        del self.stack[handler.depth :]
        if handler.keeps_position:
            self.push(raised)
        self.push(error)
        self.at = handler.target


def _with_raised(error: Any, own: Any, run: Callable[[], bool | None]) -> bool | None:
    """Run while Python handles an exception, which stays as it is but for its context.

    What Python handles already may have come in the course of this one. As this is raised, that
    loses its context: a chain of contexts may not end where it began.
    """
    before = error.__traceback__, own or error.__context__
    later, seen = sys.exception(), set[int]()
    while later is not None and later.__context__ is not error and id(later) not in seen:
        seen.add(id(later))
        later = later.__context__
    if later is not None and later.__context__ is not error:
        later = None
    try:
        raise error
    except BaseException:  # noqa: BLE001  # it was raised for this
        error.__traceback__, error.__context__ = before
        if later is not None:
            later.__context__ = error
        del error, own, before, later  # which know frames
        return run()


def begun(f: Frame) -> Generator[Any, Any, Any]:
    """The generator that a function gives, from its frame with the arguments."""
    while (instruction := f.instruction).name != "RETURN_GENERATOR":
        OPCODES[instruction.name](f, instruction)
        f.at += 1
    f.at += 1
    return suspended(f)


def suspended(f: Frame, is_on: bool = False) -> Generator[Any, Any, Any]:
    """A generator whose body is what a frame runs. One that `is_on` must be asked once first."""
    made: Any = _driven(f, is_on)
    made.__name__, made.__qualname__ = f.code.co_name, f.code.co_qualname
    if f.function is not None:  # which the program may have named anew
        made.__name__, made.__qualname__ = f.function.__name__, f.function.__qualname__
    return made  # type: ignore[no-any-return]


def stopped(f: Frame) -> RuntimeError:
    """The error in place of a StopIteration that leaves a generator's frame."""
    kind = "coroutine" if f.code.co_flags & inspect.CO_COROUTINE else "generator"
    return RuntimeError(f"{kind} raised StopIteration")


def _driven(f: Frame, is_on: bool) -> Generator[Any, Any, Any]:
    machine = f.machine
    value = result = error = None
    while True:
        if is_on:
            try:
                value, error = (yield result), None
            except BaseException as thrown:  # noqa: BLE001  # it is thrown in there
                if not vars(machine) or machine.is_over:  # and Python drops what is left of it
                    return None
                error = thrown
        is_on = True
        handled = f.outer = machine.handled
        machine.handled = f.own or handled
        try:
            if error is None:
                f.push(value)
            elif f.throw(error):
                result = f.result
                continue
            result = f.run()
        except StopIteration as ended:  # up to 3.11 Python's own generators say it
            raise stopped(f) from ended
        except Exception:
            raise
        except BaseException as ended:
            if type(error) is not GeneratorExit or isinstance(ended, GeneratorExit):
                raise
            machine.pending = ended  # a generator that is dropped can raise nothing
            return None
        finally:
            f.own = None if machine.handled is handled else machine.handled
            machine.handled = handled
            f.unwound = error = None  # which know this frame, and all that the generator has
        if not f.yielded:
            return result


# ---------------------------------------------------------------------------- semantics
# What instructions mean for values: here as Python does it, on real values.
#
# A frame run with these semantics does what CPython would do. Capture overrides them
# (interpreter.py).

_BINARY_NAMES = "add and_ floordiv lshift matmul mul mod or_ pow rshift sub truediv xor".split()
# By the argument of BINARY_OP. source   CPython's Include/opcode.h, NB_ADD and so on
BINARY: list[Callable[[Any, Any], Any]] = [
    *(getattr(operator, name) for name in _BINARY_NAMES),
    *(getattr(operator, f"i{name.strip('_')}") for name in _BINARY_NAMES),
]
UNARY = {name: getattr(operator, name) for name in ("neg", "pos", "invert")}

_CONVERSIONS: dict[str, Callable[[Any], str]] = {"s": str, "r": repr, "a": ascii}


@contextlib.contextmanager
def having(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of an object have these values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


class Semantics:
    """Python's own.

    frames    the activations, innermost last; enters: how often one was entered within another;
              ran: how many instructions such ones had; is_replaced: whether Python has others
    handled   the exception that is being handled
    pending   what ended a capture while a generator was closed
    is_over   whether nothing may run any more
    is_python  whether Python itself runs what is called
    """

    pending: BaseException | None = None
    is_over, is_replaced, enters, ran = False, False, 0, 0
    is_python = True

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.handled: BaseException | None = None

    def repeat(self, f: Frame) -> None:
        """A loop goes round once more."""

    # ---------------------------------------------------------------------- names

    def load_global(self, f: Frame, name: str) -> Any:
        if name in f.globals:
            return f.globals[name]
        space = f.globals.get("__builtins__", builtins)
        space = space.__dict__ if isinstance(space, types.ModuleType) else space
        if name not in space:
            raise NameError(f"name {name!r} is not defined", name=name)
        return space[name]

    def store_global(self, f: Frame, name: str, value: Any) -> None:
        """ABSENT, here and below: it is deleted."""
        if value is not ABSENT:
            f.globals[name] = value
        elif name in f.globals:
            del f.globals[name]
        else:
            raise NameError(f"name {name!r} is not defined", name=name)

    def load_cell(self, f: Frame, name: str) -> Any:
        try:
            return f.cells[name].cell_contents
        except ValueError:
            pass
        raise unbound(f, name)  # not above: it would have the other one as its context

    def store_cell(self, f: Frame, name: str, value: Any) -> None:
        if value is not ABSENT:
            f.cells[name].cell_contents = value
        else:
            self.load_cell(f, name)  # raises if there is nothing to delete
            del f.cells[name].cell_contents

    def raising(self, f: Frame, error: BaseException, *cause: Any) -> None:
        """A statement of a frame is about to raise an exception."""
        if cause:
            (error.__cause__,) = cause

    def caught(self, error: BaseException) -> None:
        """An exception is about to reach a handler, a `finally` or the end of a `with`."""

    def left_by(self, f: Frame, error: BaseException) -> None:
        """An exception leaves a frame: its traceback keeps the variables."""
        next((kept for code, kept in kept_by(error) if code is f.code), []).append(f.ordered())

    def passes(self, error: BaseException, *place: Any) -> None:
        """An exception comes to a frame, at an instruction that raises it."""
        error.__traceback__ = passed(without_ours(error.__traceback__), *place)

    def import_name(self, f: Frame, name: str, level: int, names: Any) -> Any:
        return builtins.__import__(name, f.globals, f.names or f.locals, names or (), level)

    def import_from(self, module: Any, name: str) -> Any:
        found: dict[str, Any] = {}
        given = {"__builtins__": {"__import__": lambda *_: module}}
        exec(f"from _ import {name}", given, found)  # its error is Python's own
        return found[name]

    # ---------------------------------------------------------------------- operators

    def binary(self, kind: int, left: Any, right: Any) -> Any:
        return BINARY[kind](left, right)

    def unary(self, kind: str, x: Any) -> Any:
        return UNARY[kind](x)

    def compare(self, symbol: str, left: Any, right: Any) -> Any:
        return COMPARISONS[symbol](left, right)

    identical = staticmethod(operator.is_)
    contains = staticmethod(operator.contains)
    truth = staticmethod(operator.truth)
    negated = staticmethod(operator.not_)

    def decides(self, f: Any, at: int, x: Any) -> bool:
        """The truth of what the jump at an index of a frame depends on."""
        return self.truth(x)

    store_subscript = staticmethod(operator.setitem)
    delete_subscript = staticmethod(operator.delitem)

    def subscript(self, container: Any, key: Any) -> Any:
        return container[key]

    def format(self, x: Any, conversion: str, spec: str | None) -> Any:
        """`spec` None: convert only, as CONVERT_VALUE does."""
        if conversion:
            x = _CONVERSIONS[conversion](x)
        return x if spec is None else format(x, spec)

    def joined(self, texts: list[Any]) -> Any:
        """The parts of an f-string as one text."""
        return "".join(texts)

    # ---------------------------------------------------------------------- attributes

    attribute = staticmethod(getattr)
    store_attribute = staticmethod(setattr)
    delete_attribute = staticmethod(delattr)

    def special(self, obj: Any, name: str) -> Any:
        """A special method, which Python looks up on the class."""
        found = getattr(type(obj), name, None)
        if found is None:
            words = "asynchronous " * (name[2] == "a") + "context manager protocol"
            words += f" (missed {name} method)" * name.endswith("exit__")
            raise TypeError(f"{type(obj).__name__!r} object does not support the {words}")
        return types.MethodType(found, obj)

    # ---------------------------------------------------------------------- iteration, calls

    iterate = staticmethod(iter)
    next = staticmethod(next)

    def items(self, x: Any) -> list[Any]:
        """All elements of an iterable."""
        return self.coming(self.iterate(x))

    def coming(self, iterator: Any, *most: int) -> list[Any]:
        """What an iterator still gives, or the first of it."""
        return list(itertools.islice(iterator, *(most or (None,))))

    def listed(self, x: Any) -> list[Any]:
        """All elements, as list() collects them: it asks how many there will be."""
        return list(x)

    def hashed(self, keys: Sequence[Any]) -> list[Any]:
        """These, as what become elements of a set, or keys of a dict."""
        return list(keys)

    def writable(self, x: Any) -> Any:
        """The list, set or dict that a display fills."""
        return x

    def fill(self, how: Callable[..., None], x: Any, *more: Any) -> None:
        """Do what a display does to its list, set or dict."""
        how(x, *more)

    append = staticmethod(list.append)

    def mapping(self, x: Any) -> dict[Any, Any]:
        return {**x}

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        about_caller = not kwargs and type(function) in (types.BuiltinFunctionType, type)
        if about_caller and (stand := _ABOUT_CALLER.get((function, len(args)))) is not None:
            return stand(self, *args)
        return function(*args, **kwargs) if kwargs else function(*args)  # modes hear of {}


def variables(m: Semantics) -> dict[str, Any]:
    """What locals() gives in the innermost frame."""
    f = m.frames[-1]
    if f.names is not None:
        return f.names  # type: ignore[no-any-return]
    found = {}
    for name in (*f.code.co_varnames, *f.code.co_cellvars, *f.code.co_freevars):
        if f.locals.get(name, UNBOUND) is not UNBOUND:
            found[name] = f.locals[name]
        elif name in f.cells:
            with contextlib.suppress(ValueError):  # an empty one
                found[name] = f.cells[name].cell_contents
    return found


def own_super(m: Semantics) -> tuple[Any, Any]:
    """What super() without arguments takes, in the innermost frame."""
    f = m.frames[-1]
    if not f.code.co_argcount:
        raise RuntimeError("super(): no arguments")
    first = f.code.co_varnames[0]
    owner = m.load_cell(f, first) if first in f.cells else f.locals[first]
    if owner is UNBOUND:
        raise RuntimeError("super(): arg[0] deleted")
    if "__class__" not in f.cells:
        raise RuntimeError("super(): __class__ cell not found")
    cls: Any = UNBOUND
    with contextlib.suppress(NameError):
        cls = m.load_cell(f, "__class__")
    if cls is UNBOUND:
        raise RuntimeError("super(): empty __class__ cell")
    if not isinstance(cls, type):
        raise RuntimeError(f"super(): __class__ is not a type ({type(cls).__name__})")
    return cls, owner


# Functions in C that look at the frame that calls them, by how many arguments they have then.
_ABOUT_CALLER: dict[tuple[Any, int], Callable[..., Any]] = {
    (super, 0): lambda m: super(*own_super(m)),
    (locals, 0): variables,
    (vars, 0): variables,
    (dir, 0): lambda m: sorted(variables(m)),
    (globals, 0): lambda m: m.frames[-1].globals,
    (eval, 1): lambda m, code: eval(code, m.frames[-1].globals, variables(m)),
    (exec, 1): lambda m, code: exec(code, m.frames[-1].globals, variables(m)),
}


def unbound(f: Frame, name: str) -> NameError:
    """The error of a cell without contents."""
    if name in f.code.co_freevars:
        return NameError(
            f"cannot access free variable {name!r} where it is not associated with a value in"
            " enclosing scope",
            name=name,
        )
    return UnboundLocalError(
        f"cannot access local variable {name!r} where it is not associated with a value"
    )


def called(function: Any) -> str:
    """How messages about a call name the function."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None:
        return str(function)
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


def is_iterable(x: Any) -> bool:
    return any(name in vars(c) for c in type(x).__mro__ for name in ("__iter__", "__getitem__"))


def checked(x: Any, function: Any = None) -> Any:
    """What stands after `*`, in a display or in a call of `function`: TypeError unless iterable."""
    if is_iterable(x):
        return x
    try:
        return [*x]  # raises
    except TypeError as error:
        text = str(error)
    raise TypeError(text if function is None else f"{called(function)} argument{text[5:]}")


# ---------------------------------------------------------------------------- kinds
# Kinds of objects, by how a capture guards them: by value, by identity, or part by part.

# Guarded by value. Their instances hold nothing else.
SCALARS: frozenset[Any] = frozenset((
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, re.Pattern,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
))  # fmt: skip
EXACT = (int, bool, str, bytes, type(None))  # == and the class tell all of them apart


def is_exact(x: Any) -> bool:
    """Whether `x` is a tuple of which one comparison says all."""
    return type(x) is tuple and all(type(item) in EXACT for item in x)


METHODS_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
CALLED_IN_C = (
    types.BuiltinFunctionType, *METHODS_IN_C, types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, *METHODS_IN_C)

# Guarded by identity.
FIXED = (
    *FUNCTIONS, types.ModuleType, type, torch.nn.Module, types.CodeType,
    types.GetSetDescriptorType, types.MemberDescriptorType, property, classmethod, staticmethod,
    Marker, torch.optim.Optimizer, types.UnionType, types.GenericAlias, type(typing.ClassVar),
)  # fmt: skip

# Those of modules and classes are fixed themselves.
BOUND_IN_C = (types.BuiltinFunctionType, types.MethodWrapperType)
HELD_OWNERS = (types.ModuleType, type, type(None), IN_CPP)

CONTAINERS = (list, dict, set, collections.deque)


_NAMED = (types.FunctionType, *METHODS_IN_C, types.ModuleType, type)


def is_named(x: Any) -> bool:
    """Whether `x` is a function, class or module, which == tells from all else."""
    if isinstance(x, types.BuiltinFunctionType):
        return isinstance(x.__self__, HELD_OWNERS)
    return isinstance(x, _NAMED) and type(x).__eq__ is object.__eq__


def is_scalar(x: Any) -> bool:
    """Whether `x` is guarded by its value and needs no origin."""
    kind = type(x)
    return kind in SCALARS or issubclass(kind, (enum.Enum, torch.Size))
