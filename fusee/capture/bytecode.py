"""Code objects: as lists of instructions, and as the lines of a traceback.

Jumps and the ranges of exception tables are indices of instructions. Programs that run in pieces
show the user's lines, as if Python ran the frames.

source   dis
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dis
import enum
import functools
import inspect
import itertools
import opcode
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fusee import fake


class Instruction(NamedTuple):
    """`target` is the index that a jump goes to; `value` what a table has for the argument;
    `offset` counts bytes."""

    name: str
    arg: int
    value: Any
    target: int
    line: int
    offset: int


class Handler(NamedTuple):
    """What happens if an instruction in `start` <= index < `end` raises."""

    start: int
    end: int
    target: int
    depth: int
    keeps_position: bool


class Bytecode(NamedTuple):
    """A code object, decoded. It does not keep the code alive.

    taking   code with the same parameters, which gives them as a dict
    live     see `_live`; empty until somebody asks
    unread   what `overwritten` has given, by the instruction
    """

    instructions: list[Instruction]
    handlers: list[Handler]
    taking: types.CodeType
    live: list[int]
    unread: dict[int, frozenset[str]]

    def handler(self, index: int) -> Handler | None:
        """The innermost handler that covers an instruction."""
        return next((h for h in self.handlers if h.start <= index < h.end), None)


# By id of the code, while it is alive.
_programs: dict[int, tuple[weakref.ref[types.CodeType], Bytecode]] = {}

# Executed by nothing here: they prepare the specialising interpreter.
_CACHE, _LONGER = dis.opmap["CACHE"], dis.opmap["EXTENDED_ARG"]
_CACHES = bytes([_CACHE])
_COUNTED = bytes(op not in (_CACHE, _LONGER) for op in range(256))

# By opcode: which table of a code object its argument is an index of, and by how many bits.
_CONSTANTS, _NAMES, _VARIABLES, _SYMBOLS = range(4)
_PLACES: dict[int, tuple[int, int]] = {
    **dict.fromkeys(dis.hasconst, (_CONSTANTS, 0)),
    **dict.fromkeys(dis.hasname, (_NAMES, 0)),
    **dict.fromkeys((*dis.haslocal, *dis.hasfree), (_VARIABLES, 0)),
    **dict.fromkeys(dis.hascompare, (_SYMBOLS, (0, 4, 5)[sys.version_info.minor - 11])),
    dis.opmap["LOAD_GLOBAL"]: (_NAMES, 1),
}
if sys.version_info >= (3, 12):
    _PLACES |= {dis.opmap["LOAD_ATTR"]: (_NAMES, 1), dis.opmap["LOAD_SUPER_ATTR"]: (_NAMES, 2)}
_PAIRS = {op for name, op in dis.opmap.items() if name.count("_FAST") == 2}
_JUMPS = {op: -1 if "BACKWARD" in dis.opname[op] else 1 for op in (*dis.hasjrel, *dis.hasjabs)}


def program(code: types.CodeType) -> Bytecode:
    """The decoded form of a code object, made once."""
    key = id(code)  # comparing code compares all its instructions
    if (known := _programs.get(key)) is not None:
        return known[1]
    units = code.co_code
    opcodes, low = units[::2], units[1::2]
    # of each unit, the instruction there: a jump may go to the prefix of one with a long argument
    numbers = [0, *itertools.accumulate(opcodes.translate(_COUNTED))]
    cells = (name for name in code.co_cellvars if name not in code.co_varnames)
    variables = (*code.co_varnames, *cells, *code.co_freevars)
    tables: Any = code.co_consts, code.co_names, variables, dis.cmp_op
    line, arg, instructions = code.co_firstlineno, 0, []
    for k, (op, byte, position) in enumerate(zip(opcodes, low, code.co_positions())):
        if op == _CACHE:
            continue
        arg = arg << 8 | byte
        if op == _LONGER:
            continue
        line = position[0] or line
        value, target = None, -1
        if op in _PAIRS:
            value = variables[arg >> 4], variables[arg & 15]
        elif op in _PLACES:
            table, shift = _PLACES[op]
            value = tables[table][arg >> shift]
        elif op in _JUMPS:
            after = len(opcodes) - len(opcodes[k + 1 :].lstrip(_CACHES))
            target = numbers[after + _JUMPS[op] * arg]
        instructions.append(Instruction(dis.opname[op], arg, value, target, line, 2 * k))
        arg = 0
    decoded: Any = dis.Bytecode(code) if code.co_exceptiontable else None
    handlers = [
        Handler(numbers[start // 2], numbers[end // 2], numbers[target // 2], depth, keeps)
        for start, end, target, depth, keeps in (decoded.exception_entries if decoded else ())
    ]
    names = parameters(code)
    taking = _TAKING.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_flags=_TAKING.co_flags | code.co_flags & _STARRED,
        co_varnames=tuple(names),
        co_nlocals=len(names),
    )
    alive = weakref.ref(code, functools.partial(_programs.pop, key))
    _programs[key] = alive, Bytecode(instructions, handlers, taking, [], {})
    return _programs[key][1]


# Instructions of a function that gives a value made of its arguments and of what they hold.
_READING = (
    "BINARY_OP BUILD_CONST_KEY_MAP BUILD_LIST BUILD_SLICE BUILD_STRING BUILD_TUPLE COMPARE_OP"
    " CONTAINS_OP CONVERT_VALUE COPY FORMAT_SIMPLE FORMAT_VALUE FORMAT_WITH_SPEC IS_OP"
    " LIST_TO_TUPLE LOAD_CONST NOP POP_TOP PRECALL PUSH_NULL RESUME RETURN_CONST RETURN_VALUE SWAP"
    " TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT"
).split()
_READING_PARTS = ("CALL", "_FAST", "JUMP_FORWARD", "_IF_", "COPY_FREE_VARS")
_READERS_IN_C = frozenset(
    "NotImplemented abs bool float format hash id int isinstance len repr round str tuple"
    " type".split()
)


def is_reading(function: types.FunctionType) -> bool:
    """Whether a function only computes from its arguments: it may be called at any time."""
    for i in program(function.__code__).instructions:
        if i.name == "LOAD_ATTR":  # with that bit it is to be called
            is_known = sys.version_info < (3, 12) or not i.arg & 1
        elif i.name == "LOAD_GLOBAL":
            is_asked = not i.arg & 1 and isinstance(function.__globals__.get(i.value), type)
            is_known = i.value in _READERS_IN_C or is_asked
        elif i.name == "LOAD_DEREF":
            is_known = isinstance(inspect.getclosurevars(function).nonlocals.get(i.value), type)
        else:
            is_known = i.name in _READING or any(part in i.name for part in _READING_PARTS)
        if not is_known:
            return False
    return True


# What else a method may run that gives what objects hold, and calls others that do.
_LOOKING = {*_READING, "LOAD_METHOD", "LOAD_SUPER_ATTR", "BINARY_SUBSCR", "RAISE_VARARGS"} | {
    "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SMALL_INT",
}  # fmt: skip


def only_reads(code: types.CodeType) -> bool:
    """Whether a function writes to nothing but its own variables, in its own instructions."""
    names = {i.name for i in program(code).instructions} - _LOOKING
    is_own = all(any(part in name for part in _READING_PARTS) for name in names)
    return is_own and "BINARY_OP" not in names


# What reads variables without naming them.
_READERS = frozenset("super locals vars dir eval exec".split())


def overwritten(code: types.CodeType, known: Bytecode, at: int) -> frozenset[str]:
    """Variables that nothing reads from an instruction on before it has given them a value."""
    if (found := known.unread.get(at)) is None:
        if not known.live:
            known.live.extend(_live(code, known))
        names = enumerate(code.co_varnames)
        found = frozenset(name for k, name in names if not known.live[at] >> k & 1)
        known.unread[at] = found
    return found


def _live(code: types.CodeType, known: Bytecode) -> list[int]:
    """For each instruction the variables, a bit each, whose values may be read from there on."""
    bits = {name: 1 << k for k, name in enumerate(code.co_varnames)}
    count = len(known.instructions)
    if _READERS.intersection(code.co_names):
        return [-1] * count
    raising = {k: h.target for h in reversed(known.handlers) for k in range(h.start, h.end)}
    live, before = [0] * (count + 1), None
    while live != before:  # once more for each loop within a loop
        before = live.copy()
        for k in reversed(range(count)):
            name, _, value, target, _, _ = known.instructions[k]
            found = live[target] if target >= 0 else 0
            if name not in _LEAVE:
                found |= live[k + 1]
            if "_FAST" in name:
                names = value if type(value) is tuple else (value,)
                # from the last on: STORE_FAST_LOAD_FAST reads what it may have just stored
                is_store = [name.startswith("STORE_FAST"), name.endswith("STORE_FAST")]
                for one, stores in reversed([*zip(names, is_store)]):
                    found = found & ~bits.get(one, 0) if stores else found | bits.get(one, 0)
            live[k] = found | (live[raising[k]] if k in raising else 0)
    return live


_LEAVE = frozenset(
    "JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT RETURN_VALUE RETURN_CONST"
    " RAISE_VARARGS RERAISE".split()
)

_TAKING = (lambda: locals()).__code__
_STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def parameters(code: types.CodeType) -> list[str]:
    """The names of all parameters, starred ones included."""
    count = code.co_argcount + code.co_kwonlyargcount
    return list(code.co_varnames[: count + (code.co_flags & _STARRED).bit_count()])


def first_line(function: types.FunctionType) -> str:
    """Where a function begins, `file.py:41 in step`."""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


_OURS = os.path.dirname(__file__) + os.sep
_HIDDEN = ("<fusee ", "<entrance of ", _OURS, fake.__file__)  # `without_dynamo` is there


class Line(NamedTuple):
    """Where a frame stands.

    names   gives its variables
    """

    code: types.CodeType
    globals: dict[str, Any]
    number: int
    names: Callable[[], dict[str, Any]] = dict

    @classmethod
    def of(cls, f: Any, names: Callable[[], dict[str, Any]] = dict) -> Line:
        return cls(f.code, f.globals, f.instruction.line, names)


def call_from(lines: Sequence[Line], function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Does a call as if it stood at the last of some lines, each of which calls the next."""
    call = functools.partial(function, *args, **kwargs)
    for line in reversed(lines):  # no frame of ours lies between them, which are counted
        code = _calling(line.code.co_filename, line.number, line.code.co_qualname)
        # as code of a module or class, since its variables are any dict
        future = code.co_flags & ~_FUTURE | line.code.co_flags & _FUTURE
        code = code.replace(co_consts=(call,), co_flags=future)
        call = functools.partial(eval, code, line.globals, line.names())
    return call()


@functools.lru_cache(1000)
def _calling(file: str, number: int, name: str) -> types.CodeType:
    return _CALLING.replace(
        co_filename=file, co_firstlineno=number, co_name=name.rpartition(".")[2], co_qualname=name
    )


# What exec, eval and compile take from the code that calls them.
_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_CALLING = compile("_call()", "", "eval")
_NAME, _CONSTANT = (bytes((opcode.opmap[name], 0)) for name in ("LOAD_NAME", "LOAD_CONST"))
_CALLING = _CALLING.replace(co_code=_CALLING.co_code.replace(_NAME, _CONSTANT))


def standing_at(tree: ast.Expression, file: str, line: int, name: str) -> types.CodeType:
    """The code of a `lambda`, as if a function of that name had it at that line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.arg)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    constants = compile(tree, file, "eval").co_consts
    (code,) = (x for x in constants if isinstance(x, types.CodeType))
    return code.replace(co_name=name.rpartition(".")[2], co_qualname=name)


def called_from(f: Any, names: Any, function: Any, is_code: bool) -> Any:
    """What to call in place of a function that may name the line of its caller: that of a frame.

    names     gives the frame's variables
    is_code   the function runs code of the program's
    """
    module = getattr(function, "__module__", None)
    asks = id(function) in _ASKING or issubclass(type(function), enum.EnumMeta)
    if not (is_code or asks or module in ("logging", "_warnings", "sys")):
        return function
    if function in _BY_DEPTH:
        function = _BY_DEPTH[function]
    return functools.partial(call_from, [Line.of(f, names)], function)


def _warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kw: Any) -> None:
    warnings.warn(message, category, 1 + _steps(stacklevel), *args, **kw)


def _getframe(depth: int = 0) -> Any:
    return sys._getframe(_steps(depth + 1))


# What asks for its caller's variables or module, by address: what is called may have an own `==`.
_ASKING = frozenset(map(id, (exec, eval, compile, type)))

# What counts frames, as if there were none of ours.
_BY_DEPTH: dict[Any, Any] = {warnings.warn: _warn, sys._getframe: _getframe}


def at_caller() -> functools.partial[Any]:
    """`call_from` the line of the program that called who asks."""
    at = _getframe()
    line = Line(at.f_code, at.f_globals, at.f_lineno, lambda: at.f_locals)
    return functools.partial(call_from, [line])


def _steps(count: int) -> int:
    """How many frames lie between who calls this and the program's frame number `count`."""
    at: Any = sys._getframe(1)
    steps = 0
    while at is not None and count > 0:
        steps, at = steps + 1, at.f_back
        name = _OURS if at is None else at.f_code.co_filename
        count -= not name.startswith(_HIDDEN)
    return steps


def passed(
    following: types.TracebackType | None,
    code: types.CodeType,
    globals_: dict[str, Any],
    offset: int,
    line: int,
) -> types.TracebackType:
    """A traceback's entry for a frame of the program, at one of its instructions."""
    # as long as the code whose lines it has: a tracer has CPython make room for as many
    longer = max(0, len(code.co_code) - len(_FRAME.co_code)) // 2
    places = _FRAME.replace(
        co_code=_FRAME.co_code + bytes((opcode.opmap["NOP"], 0)) * longer,
        co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno, co_linetable=code.co_linetable,
        co_consts=(*_FRAME.co_consts, code),
    )  # fmt: skip
    frame = types.FunctionType(places, globals_)([]).gi_frame  # which knows no caller
    return types.TracebackType(following, frame, offset, line)


_FRAME = (lambda kept: (yield)).__code__


def _stands_for(code: types.CodeType) -> types.CodeType | None:
    """The function's code that the code of an entry of `passed` has the lines of."""
    is_one = code.co_code.startswith(_FRAME.co_code)
    return code.co_consts[-1] if is_one and type(code.co_consts[-1]) is types.CodeType else None


def kept_by(error: BaseException) -> Iterator[tuple[types.CodeType, list[Any]]]:
    """What the entries that `passed` made keep alive, with the code of their functions."""
    found = error.__traceback__
    while found is not None:
        if (code := _stands_for(found.tb_frame.f_code)) is not None:
            yield code, found.tb_frame.f_locals.get("kept", [])
        found = found.tb_next


def passing(entry: types.TracebackType) -> tuple[Any, ...]:
    """What `passed` makes an entry of, beside the one that follows."""
    frame = entry.tb_frame
    return (
        _stands_for(frame.f_code) or frame.f_code,
        frame.f_globals,
        entry.tb_lasti,
        entry.tb_lineno,
    )


def without_ours(found: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the entries of this package, whose frames hold nothing from here on:
    those of the program know them as their callers, and with the error they make a circle.
    What follows an entry that `passed` made went through here before."""
    kept: list[types.TracebackType] = []
    while found is not None and not (kept and _stands_for(kept[-1].tb_frame.f_code)):
        frame = found.tb_frame
        if frame.f_code.co_filename.startswith(_HIDDEN):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
        elif frame.f_code.co_code != _CALLING.co_code:
            kept.append(found)
        found = found.tb_next
    for one, following in zip(kept, [*kept[1:], found]):
        one.tb_next = following
    return kept[0] if kept else None


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


_ASSIGNS = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL")}


@functools.lru_cache(maxsize=256)
def assigned_globals(module: str) -> frozenset[str]:
    """The variables of a module that a function or a method of it assigns (`global _enabled`).

    Of `sys` those that programs assign.
    """
    if module == "sys":
        return frozenset("stdin stdout stderr argv path excepthook displayhook".split())
    found = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    # isinstance would ask an object for its __class__: torch.distributed.reduce_op warns then
    for cls in [x for x in found if issubclass(type(x), type) and x.__module__ == module]:
        own = vars(cls).values()
        found += (x.__func__ if type(x) in (classmethod, staticmethod) else x for x in own)
    assigned = set()
    for x in found:
        while type(x) is types.FunctionType:
            if x.__module__ == module:
                for code in codes(x.__code__):
                    if not _ASSIGNS.isdisjoint(code.co_code[::2]):
                        steps = dis.get_instructions(code)
                        assigned |= {i.argval for i in steps if i.opcode in _ASSIGNS}
            x = getattr(x, "__wrapped__", None)
    return frozenset(assigned)
