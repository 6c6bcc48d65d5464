"""One activation of a Python function, run instruction by instruction.

What an instruction means for values is the machine's (calls, attributes, truth); what it does to
the stack is in opcodes.py. A frame knows exceptions and suspension.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Generator
from typing import Any

from fusee.capture.breaks import GraphBreak
from fusee.capture.bytecode import Instruction, program
from fusee.capture.torch_api import note_lines

__all__ = ["NULL", "OPCODES", "UNBOUND", "Frame", "Marker", "Opcode", "op", "suspended"]


class Marker:
    """What stands on the stack or in a variable without being a value of the program."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


NULL = Marker("NULL")
UNBOUND = Marker("UNBOUND")

# What Python does to find out whether a handler takes an exception, and to raise it again.
_MATCHING = {
    "BUILD_TUPLE",
    "CALL_INTRINSIC_1",
    "CHECK_EXC_MATCH",
    "COPY",
    "LOAD_GLOBAL",
    "NOP",
    "POP_EXCEPT",
    "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_IF_FALSE",
    "PUSH_EXC_INFO",
    "RERAISE",
}

# An opcode returns True if the frame stops here: it returned or it yielded.
Opcode = Callable[["Frame", Instruction], Any]
OPCODES: dict[str, Opcode] = {}  # opcodes.py and what it imports fill it


def op(*more: str) -> Callable[[Opcode], Opcode]:
    """Register an opcode under its own name, and others."""

    def register(function: Opcode) -> Opcode:
        OPCODES.update(dict.fromkeys((function.__name__, *more), function))
        return function

    return register


_IN_YIELD_FROM = 2  # in RESUME's argument, where it follows the yield of a `yield from`


def _method(machine: Any, x: Any, name: str) -> Any:
    try:
        return machine.attribute(x, name)
    except AttributeError:
        return None


class Frame:
    """The state of one activation.

    machine  the Semantics (semantics.py) that says what instructions mean
    names    the namespace of a class body; None in a function
    next     the instruction that follows
    unwound  the exception that went to a handler last
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
        self.unwound: BaseException | None = None

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
                    if not self.yielded:  # as in Python, what nobody else has ends here
                        self.locals, self.cells = {}, {}
                    return self.result
                except GraphBreak as found:
                    found.where = found.where or machine.where()
                    raise
                except Exception as error:  # noqa: BLE001  # whatever the program raises
                    self._unwind(error)
                except GeneratorExit as error:
                    self._unwind(error)
        finally:
            self.unwound = None  # it knows this frame, by its traceback
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

    def throw(self, error: BaseException) -> bool:
        """Raise in the suspended generator of this. True if it yields: what it delegates to did.

        source   CPython's Objects/genobject.c, _gen_throw
        """
        machine, listed = self.machine, self.program.instructions
        if self.instruction.name == "RESUME" and self.instruction.arg & 3 == _IN_YIELD_FROM:
            ends = isinstance(error, GeneratorExit)
            try:
                method = _method(machine, self.stack[-1], "close" if ends else "throw")
                if method is not None:
                    self.result = machine.call(method, () if ends else (error,), {})
                    if not ends:
                        return True
            except StopIteration as returned:
                if ends:
                    error = returned
                else:
                    self._send_ended(listed[self.at - 2], returned.value)
                    return False
            except (Exception, GeneratorExit) as other:  # noqa: BLE001  # whatever it raises
                error = other
        self.push(None)  # in place of what would have been sent
        self.at -= 1  # the exception comes from the instruction that yielded
        try:
            self._unwind(error)
        finally:
            del error  # which knows this frame
        return False

    def _send_ended(self, send: Instruction, value: Any) -> None:
        """What a `yield from` gave goes on the stack: the generator below it has returned."""
        if sys.version_info < (3, 12):
            self.pop()
        self.push(value)
        self.at = send.target

    def _unwind(self, error: BaseException) -> None:
        """Go to the handler of `error`, or raise it if there is none."""
        instruction, handler, raised = self.instruction, self.program.handler(self.at), self.at
        if instruction.name == "RERAISE" and instruction.arg:
            raised = self.stack[-instruction.arg]  # where it was raised first
        if handler is None:
            self.at = raised
            self.machine.left_by(error)
            self.stack.clear()  # a generator that a loop was going through ends here
            try:
                raise error
            finally:
                del error  # which knows this frame
        self.machine.caught(error)
        self.unwound = error
        if error.__context__ is None and self.machine.handled is not error:
            error.__context__ = self.machine.handled
        del self.stack[handler.depth :]
        if handler.keeps_position:
            self.push(raised)
        self.push(error)
        self.at = handler.target


def suspended(f: Frame, is_on: bool = False) -> Generator[Any, Any, Any]:
    """A generator whose body is what a frame runs. One that `is_on` must be asked once first."""
    made: Any = _driven(f, is_on)
    made.__name__, made.__qualname__ = f.code.co_name, f.code.co_qualname
    return made  # type: ignore[no-any-return]


def _driven(f: Frame, is_on: bool) -> Generator[Any, Any, Any]:
    machine = f.machine
    value = result = error = own = None  # what it handles itself stays with it
    while True:
        if is_on:
            try:
                value, error = (yield result), None
            except BaseException as thrown:  # noqa: BLE001  # it is thrown in there
                if not vars(machine) or machine.is_over:  # and Python drops what is left of it
                    return None
                error = thrown
        is_on = True
        handled = machine.handled
        machine.handled = own or handled
        try:
            if error is None:
                f.push(value)
            elif f.throw(error):
                result = f.result
                continue
            result = f.run()
        except Exception:
            raise
        except BaseException as ended:
            if type(error) is not GeneratorExit or isinstance(ended, GeneratorExit):
                raise
            machine.pending = ended  # a generator that is dropped can raise nothing
            return None
        finally:
            own = None if machine.handled is handled else machine.handled
            machine.handled = handled
            f.unwound = error = None  # which know this frame, and all that the generator has
        if not f.yielded:
            return result
