"""One activation of a Python function, run instruction by instruction.

What an instruction means for values is the machine's (calls, attributes, truth); what it does to
the stack is in opcodes.py. A frame knows exceptions and suspension.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from fusee.capture.breaks import GraphBreak
from fusee.capture.bytecode import Instruction, program

__all__ = ["NULL", "OPCODES", "UNBOUND", "Frame", "Marker", "Opcode", "Suspended", "op"]


class Marker:
    """What stands on the stack or in a variable without being a value of the program."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


NULL = Marker("NULL")
UNBOUND = Marker("UNBOUND")

# An opcode returns True if the frame stops here: it returned or it yielded.
Opcode = Callable[["Frame", Instruction], Any]
OPCODES: dict[str, Opcode] = {}  # opcodes.py and what it imports fill it


def op(*more: str) -> Callable[[Opcode], Opcode]:
    """Register an opcode under its own name, and others."""

    def register(function: Opcode) -> Opcode:
        OPCODES.update(dict.fromkeys((function.__name__, *more), function))
        return function

    return register


class Frame:
    """The state of one activation.

    machine  the Semantics (semantics.py) that says what instructions mean
    names    the namespace of a class body; None in a function
    next     the instruction that follows
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
        self.result: Any = None
        self.yielded = False
        self.keywords: tuple[str, ...] = ()
        self.function: Any = None

    @classmethod
    def of(cls, machine: Any, function: types.FunctionType) -> Frame:
        """One at the beginning of a function, without its arguments."""
        f = cls(machine, function.__code__, function.__globals__)
        f.function = function
        f.cells.update(zip(f.code.co_freevars, function.__closure__ or ()))
        return f

    def bind(
        self, defaults: Any, more: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame:
        """Give the parameters what a call does, as CPython does; `more` for those after a star."""
        taking = types.FunctionType(self.program.taking, {}, argdefs=defaults)
        taking.__kwdefaults__, taking.__qualname__ = more, self.function.__qualname__
        self.locals = taking(*args, **kwargs)
        return self

    @property
    def instruction(self) -> Instruction:
        listed = self.program.instructions
        return listed[min(self.at, len(listed) - 1)]

    @property
    def where(self) -> str:
        """`file.py:41 in step`."""
        return f"{self.code.co_filename}:{self.instruction.line} in {self.code.co_name}"

    # ---------------------------------------------------------------------- the stack

    def push(self, x: Any) -> None:
        self.stack.append(x)

    def push_callable(self, x: Any) -> None:
        """A value that is about to be called, with the NULL that says that it brings no `self`."""
        self.stack += (x, NULL) if sys.version_info >= (3, 13) else (NULL, x)

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
        machine = self.machine
        machine.frames.append(self)
        try:
            while True:
                try:
                    self._until_stop()
                    return self.result
                except GraphBreak as found:
                    found.where = found.where or machine.where()
                    raise
                except Exception as error:  # noqa: BLE001  # whatever the program raises
                    self._unwind(error)
                except GeneratorExit as error:
                    self._unwind(error)
        finally:
            machine.frames.pop()

    def step(self) -> bool:
        """Run one instruction, exceptions included. True if the frame stopped."""
        instruction = self.program.instructions[self.at]
        self.next = self.at + 1
        try:
            stopped = OPCODES[instruction.name](self, instruction)
        except Exception as error:  # noqa: BLE001  # whatever the program raises
            self._unwind(error)
            return False
        self.at = self.next
        return bool(stopped)

    def _until_stop(self) -> None:
        instructions, opcodes = self.program.instructions, OPCODES
        while True:
            instruction = instructions[self.at]
            self.next = self.at + 1
            stopped = opcodes[instruction.name](self, instruction)
            self.at = self.next
            if stopped:
                return

    def _unwind(self, error: BaseException) -> None:
        """Go to the handler of `error`, or raise it if there is none."""
        handler = self.program.handler(self.at)
        if handler is None:
            self.stack.clear()  # a generator that a loop was going through ends here
            raise error
        if error.__context__ is None and self.machine.handled is not error:
            error.__context__ = self.machine.handled
        del self.stack[handler.depth :]
        if handler.keeps_position:
            self.push(self.at)
        self.push(error)
        self.at = handler.target


class Suspended:
    """A generator whose body runs on the machine. C code may drive it like any other."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.started = False
        self.finished = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    @property
    def would_clean_up(self) -> bool:
        """Whether it has begun, is not done, and might do something if it were closed."""
        targets = {handler.target for handler in self.frame.program.handlers}
        always = sys.version_info >= (3, 12)  # one that turns StopIteration into RuntimeError
        return self.started and not self.finished and len(targets) > always

    def send(self, value: Any) -> Any:
        """Resume with `value` as what `yield` gives."""
        if self.finished:
            raise StopIteration
        if not self.started and value is not None:
            raise TypeError("can't send non-None value to a just-started generator")
        self.started = True
        self.frame.push(value)
        return self._resume()

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        """Resume by raising `error` where the generator stands."""
        if isinstance(error, type):
            error = error() if value is None else value
        if self.finished or not self.started:
            self.finished = True
            raise error
        # the exception comes from the instruction that yielded
        self.frame.at -= 1
        try:
            self.frame._unwind(error)
        except BaseException:
            self.finished = True
            raise
        return self._resume()

    def close(self) -> None:
        """Raise GeneratorExit inside."""
        if self.finished or not self.started:
            self.finished = True
            return
        try:
            self.throw(GeneratorExit())
        except (GeneratorExit, StopIteration):
            return
        raise RuntimeError("generator ignored GeneratorExit")

    def _resume(self) -> Any:
        frame = self.frame
        frame.yielded = False
        handled, frame.machine.handled = frame.machine.handled, None
        try:
            value = frame.run()
        except StopIteration as error:
            self.finished = True
            raise RuntimeError("generator raised StopIteration") from error
        except BaseException:
            self.finished = True
            raise
        finally:
            frame.machine.handled = handled
        if frame.yielded:
            return value
        self.finished = True
        raise StopIteration(value)
