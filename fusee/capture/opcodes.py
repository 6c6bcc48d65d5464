"""What each instruction does to a frame: one row per opcode, or a function named after it.

What an operation means for its operands is asked of `frame.machine`. A name means the same in all
versions of Python, but for a few that look at the version.

source   https://docs.python.org/3.13/library/dis.html#python-bytecode-instructions and its versions
         for 3.11 and 3.12; CPython's Python/bytecodes.c
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from fusee.capture.bytecode import Instruction
from fusee.capture.frame import (
    ABSENT,
    NULL,
    OPCODES,
    OUTER,
    UNBOUND,
    Frame,
    Opcode,
    called,
    checked,
    is_iterable,
    op,
    stopped,
    unbound,
)
from fusee.capture.graph_break import Breaking, GraphBreak, Opaque

# ---------------------------------------------------------------------------- control
# Opcodes that move on: jumps, loops, generators, calls, exceptions, imports.

# ------------------------------------------------------------------------------ jumps


def _jump(f: Frame, i: Instruction) -> None:
    if i.target < f.at:
        f.machine.repeat(f)
    f.next = i.target


def _jump_if(test: Callable[[Frame, Any], bool], is_kept: bool = False) -> Opcode:
    def handler(f: Frame, i: Instruction) -> None:
        # the operand stays until its truth is known: a graph may have to end here
        is_met = test(f, f.stack[-1])
        if is_met:
            _jump(f, i)
        if not (is_met and is_kept):
            f.pop()

    return handler


_TESTS: dict[str, Callable[[Frame, Any], bool]] = {
    "TRUE": lambda f, x: f.machine.decides(f, f.at, x),
    "FALSE": lambda f, x: not f.machine.decides(f, f.at, x),
    "NONE": lambda f, x: x is None,
    "NOT_NONE": lambda f, x: x is not None,
}
for _name, _test in _TESTS.items():
    OPCODES[f"JUMP_IF_{_name}_OR_POP"] = _jump_if(_test, is_kept=True)
    for _kind in ("POP_JUMP_IF_", "POP_JUMP_FORWARD_IF_", "POP_JUMP_BACKWARD_IF_"):
        OPCODES[_kind + _name] = _jump_if(_test)


# ------------------------------------------------------------------------------ loops

_PAST_LOOP = (0, 1, 2)[sys.version_info.minor - 11]  # END_FOR, and from 3.13 on POP_TOP


@op()
def FOR_ITER(f: Frame, i: Instruction) -> None:
    try:
        value = f.machine.next(f.stack[-1])
    except StopIteration:
        f.pop()
        f.next = i.target + _PAST_LOOP
    else:
        f.push(value)


@op()
def SEND(f: Frame, i: Instruction) -> None:
    """Resume the generator below; if it ends, END_SEND takes it away from 3.12 on."""
    value, receiver = f.pop(), f.stack[-1]
    try:
        if value is None:
            value = f.machine.next(receiver)
        else:
            value = f.machine.call(f.machine.attribute(receiver, "send"), value)
    except StopIteration as error:
        value = error.value
        f.next = i.target
        if sys.version_info < (3, 12):
            f.pop()
    f.push(value)


@op()
def CLEANUP_THROW(f: Frame, i: Instruction) -> None:
    if not isinstance(f.stack[-1], StopIteration):
        raise f.pop()
    f.stack[-3:] = None, f.stack[-1].value


# ------------------------------------------------------------------------------ calls


@op()
def KW_NAMES(f: Frame, i: Instruction) -> None:
    f.keywords = f.code.co_consts[i.arg]


@op("CALL_KW")
def CALL(f: Frame, i: Instruction) -> None:
    names, f.keywords = f.pop() if i.name == "CALL_KW" else f.keywords, ()
    args = f.take(i.arg)
    function, owner = f.take(2)
    # before 3.13 the stack holds (NULL, callable) or (method, self), after it (callable, self)
    if function is NULL:
        function, owner = owner, NULL
    if owner is not NULL:
        args = [owner, *args]
    count = len(args) - len(names)
    kwargs = dict(zip(names, args[count:])) if names else {}
    f.push(f.machine.call(function, *args[:count], **kwargs))


@op()
def CALL_FUNCTION_EX(f: Frame, i: Instruction) -> None:
    kwargs, given = f.pop() if i.arg & 1 else {}, f.pop()
    function = next(x for x in f.take(2) if x is not NULL)
    if not all(isinstance(key, str) for key in kwargs):
        if isinstance(function, (types.FunctionType, types.MethodType)):
            raise TypeError("keywords must be strings")
        # C code may take others (str.format), and a class without arguments has its own refusal
        if not f.machine.is_python:
            raise GraphBreak("a keyword of a call is no string")
        f.push(function(*given, **kwargs))
        return
    args = f.machine.listed(checked(given, function))
    f.push(f.machine.call(function, *args, **f.machine.mapping(kwargs)))


@op("RETURN_CONST", "YIELD_VALUE")
def RETURN_VALUE(f: Frame, i: Instruction) -> bool:
    f.yielded = i.name == "YIELD_VALUE"
    f.result = i.value if i.name == "RETURN_CONST" else f.pop()
    return True


# ------------------------------------------------------------------------------ exceptions


@op()
def RAISE_VARARGS(f: Frame, i: Instruction) -> None:
    if i.arg == 0:
        if f.machine.handled is None:
            raise RuntimeError("No active exception to reraise")
        f.push(f.machine.handled)
        RERAISE(f, i)
    error, *cause = [f.machine.call(x) if isinstance(x, type) else x for x in f.take(i.arg)]
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if not all(isinstance(x, (BaseException, types.NoneType)) for x in cause):
        raise TypeError("exception causes must derive from BaseException")
    f.machine.raising(f, error, *cause)
    f.push(error)
    del error, cause  # they would know this frame, and it them
    _raise(f)


@op()
def PUSH_EXC_INFO(f: Frame, i: Instruction) -> bool:
    error, before = f.pop(), f.machine.handled
    # what is handled around a generator is another one whenever it is asked
    f.stack += (OUTER if before is f.outer else before, error)
    f.machine.handled = error
    return False


@op()
def POP_EXCEPT(f: Frame, i: Instruction) -> bool:
    before = f.pop()
    f.machine.handled = f.outer if before is OUTER else before
    return False


@op()
def CHECK_EXC_MATCH(f: Frame, i: Instruction) -> None:
    kind = f.pop()
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
        raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    f.push(isinstance(f.stack[-1], kind))


@op()
def RERAISE(f: Frame, i: Instruction) -> None:
    f.raised_again = [(f.stack[-1].__traceback__, f.stack[-1].__context__)]
    _raise(f)


def _raise(f: Frame) -> NoReturn:
    if not f.machine.is_python and not isinstance(f.stack[-1], (Exception, GeneratorExit)):
        raise GraphBreak(f"it raises {type(f.stack[-1]).__name__}, which is no Exception")
    raise f.pop()


@op()
def CHECK_EG_MATCH(f: Frame, i: Instruction) -> bool:
    """What an `except*` takes of an exception, and above it what is left.

    source   CPython's Python/ceval.c, exception_group_match
    """
    kind = f.stack[-1]
    CHECK_EXC_MATCH(f, i)
    if any(issubclass(k, BaseExceptionGroup) for k in (kind if type(kind) is tuple else (kind,))):
        raise TypeError("catching ExceptionGroup with except* is not allowed. Use except instead.")
    is_match, error = f.pop(), f.pop()
    is_group = isinstance(error, BaseExceptionGroup)
    match, rest = (error, None) if is_match else (None, error)
    if is_match and not is_group:
        match = BaseExceptionGroup("", [error])
    elif is_group and not is_match:
        match, rest = f.machine.call(f.machine.attribute(error, "split"), kind)
    f.stack += (rest, match)
    if match is not None:
        f.machine.handled = match
    return False


@op("CALL_INTRINSIC_2")
def PREP_RERAISE_STAR(f: Frame, i: Instruction) -> None:
    """What is raised after all `except*`: what they raised, beside what none of them took.

    source   CPython's Objects/exceptions.c, _PyExc_PrepReraiseStar
    """
    if i.name == "CALL_INTRINSIC_2" and i.arg != 1:
        raise GraphBreak(f"the instruction CALL_INTRINSIC_2 {i.arg} is not supported")
    first, errors = f.take(2)
    found = [error for error in f.machine.items(errors) if error is not None]
    if not isinstance(first, BaseExceptionGroup):  # it was wrapped, and at most one took it
        f.push(found[0] if found else None)
        return
    again = [error for error in found if _is_part(error, first)]
    found = [error for error in found if not _is_part(error, first)]
    if again:
        leaves = {id(leaf) for error in again for leaf in _leaves(error)}
        split = f.machine.attribute(first, "split")
        kept, _ = f.machine.call(split, lambda error: id(error) in leaves)
        found.append(kept)
    f.push(BaseExceptionGroup("", found) if len(found) > 1 else (*found, None)[0])


def _is_part(error: BaseException, whole: BaseException) -> bool:
    """Whether an exception is one that was split off, and has not been raised anew."""
    names = ("__notes__", "__traceback__", "__cause__", "__context__")
    return isinstance(error, BaseExceptionGroup) and all(
        getattr(error, name, None) is getattr(whole, name, None) for name in names
    )


def _leaves(error: BaseException) -> Iterable[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return (error,)
    return (leaf for part in error.exceptions for leaf in _leaves(part))


# ------------------------------------------------------------------------------ coroutines


async def waiting(x: Any) -> Any:
    """A coroutine that gives what another awaitable does."""
    return await x


class _Awaitable:
    """Something that is awaited by an iterator."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __await__(self) -> Any:
        return self.iterator


_FROM = "'async with' received an object from {} that does not implement __await__: "


def _awaited(x: Any, manager: int | None = 0) -> Any:
    """An iterator for what stands after `await`, as CPython makes one.

    manager   1 for what an `__aenter__` gives, 2 for an `__aexit__`
    source    CPython's Objects/genobject.c, _PyCoro_GetAwaitableIter
    """
    kind: Any = type(x)
    if kind is types.GeneratorType and x.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:
        return waiting(x).__await__()
    if getattr(kind, "__await__", None) is None:
        if manager:
            raise TypeError(_FROM.format(("__aenter__", "__aexit__")[manager - 1]) + kind.__name__)
        raise TypeError(f"object {kind.__name__} can't be used in 'await' expression")
    if kind is types.CoroutineType:
        return waiting(x).__await__()
    found = kind.__await__(x)
    if inspect.iscoroutine(found):
        raise TypeError("__await__() returned a coroutine")
    if not hasattr(type(found), "__next__"):
        raise TypeError(f"__await__() returned non-iterator of type {type(found).__name__!r}")
    return waiting(_Awaitable(found)).__await__()


def _of_loop(f: Frame, x: Any, name: str, words: str) -> Any:
    """A special method of what an `async for` goes through."""
    if getattr(type(x), name, None) is None:
        raise TypeError(f"'async for' {words} {type(x).__name__}")
    return f.machine.special(x, name)


@op()
def GET_AITER(f: Frame, i: Instruction) -> None:
    words = "requires an object with __aiter__ method, got"
    found = f.machine.call(_of_loop(f, f.pop(), "__aiter__", words))
    words = "received an object from __aiter__ that does not implement __anext__:"
    _of_loop(f, found, "__anext__", words)
    f.push(found)


@op()
def GET_ANEXT(f: Frame, i: Instruction) -> None:
    words = "requires an iterator with __anext__ method, got"
    found = f.machine.call(_of_loop(f, f.stack[-1], "__anext__", words))
    try:
        f.push(_awaited(found))
    except Exception as error:
        kind = type(found).__name__
        text = f"'async for' received an invalid object from __anext__: {kind}"
        raise TypeError(text) from error


@op()
def GET_YIELD_FROM_ITER(f: Frame, i: Instruction) -> None:
    x = f.pop()
    if type(x) is types.CoroutineType:
        if not f.code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE):
            raise TypeError("cannot 'yield from' a coroutine object in a non-coroutine generator")
        x = waiting(x).__await__()
    f.push(f.machine.iterate(x))


@op()
def END_ASYNC_FOR(f: Frame, i: Instruction) -> None:
    _, error = f.take(2)
    if not isinstance(error, StopAsyncIteration):
        raise error


@op("BEFORE_ASYNC_WITH")
def BEFORE_WITH(f: Frame, i: Instruction) -> None:
    manager, kind = f.pop(), "a" if i.name == "BEFORE_ASYNC_WITH" else ""
    enter = f.machine.special(manager, f"__{kind}enter__")
    f.push(f.machine.special(manager, f"__{kind}exit__"))
    f.push(f.machine.call(enter))


@op()
def WITH_EXCEPT_START(f: Frame, i: Instruction) -> None:
    leave, *_, error = f.stack[-4:]
    f.push(f.machine.call(leave, type(error), error, error.__traceback__))


@op()
def CALL_INTRINSIC_1(f: Frame, i: Instruction) -> None:
    value = f.pop()
    if i.arg == 3:  # a StopIteration leaves a generator
        if isinstance(value, StopIteration):
            error = stopped(f)
            error.__cause__ = error.__context__ = value
            value = error
    elif i.arg == 5:
        value = f.machine.unary("pos", value)
    elif i.arg == 6:
        value = tuple(f.machine.items(value))
    else:
        raise GraphBreak(f"the instruction CALL_INTRINSIC_1 {i.arg} is not supported")
    f.push(value)


# ---------------------------------------------------------------------------- matching
# Opcodes of the statement `match`.
#
# source   https://docs.python.org/3.13/library/dis.html#opcode-MATCH_CLASS; CPython's
#          Python/ceval.c, match_class and match_keys

# Py_TPFLAGS_SEQUENCE and so on
_SEQUENCE, _MAPPING, _MATCHES_ITSELF = 1 << 5, 1 << 6, 1 << 22
_NOTHING = object()


def _is_flagged(x: Any, flag: int) -> bool:
    return bool(type(x).__flags__ & flag)


@op()
def MATCH_KEYS(f: Frame, i: Instruction) -> None:
    """The values of these keys, or None if one is not there."""
    subject, keys = f.stack[-2:]
    get = f.machine.attribute(subject, "get") if keys else None
    found: list[Any] = []
    for k, key in enumerate(keys):
        if key in keys[:k]:
            raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
        found.append(f.machine.call(get, key, _NOTHING))
        if found[-1] is _NOTHING:
            f.push(None)
            return
    f.push(tuple(found))


@op()
def MATCH_CLASS(f: Frame, i: Instruction) -> None:
    """The attributes that a class pattern asks for, or None if it does not match."""
    subject, cls, names = f.take(3)
    if not isinstance(cls, type):
        match None:
            case cls():  # the TypeError
                pass
    if not f.machine.call(isinstance, subject, cls):
        f.push(None)
        return
    found: list[Any] = []
    by_position: Any = ()
    if i.arg:  # so many patterns have no name; one may be about the object itself
        try:
            by_position = f.machine.attribute(cls, "__match_args__")
        except AttributeError:
            found += [subject] * bool(cls.__flags__ & _MATCHES_ITSELF)
        if not isinstance(by_position, tuple):
            kind = type(by_position).__name__
            raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {kind})")
        allowed = len(found or by_position)
        if allowed < i.arg:
            plural = "" if allowed == 1 else "s"
            raise TypeError(
                f"{cls.__name__}() accepts {allowed} positional sub-pattern{plural} ({i.arg} given)"
            )
    seen: list[str] = []
    for name in (*by_position[: i.arg], *names):
        if not isinstance(name, str):
            kind = type(name).__name__
            raise TypeError(f"__match_args__ elements must be strings (got {kind})")
        if name in seen:
            raise TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}")
        seen.append(name)
        try:
            found.append(f.machine.attribute(subject, name))
        except AttributeError:
            f.push(None)
            return
    f.push(tuple(found))


# ---------------------------------------------------------------------------- opcodes


# Matter to CPython's own loop only.
_IDLE = "NOP RESUME PRECALL COPY_FREE_VARS EXIT_INIT_CHECK"

# In no function's code, but for the first: asynchronous generators are Python's own.
REFUSED = ("ASYNC_GEN_WRAP IMPORT_STAR PRINT_EXPR INTERPRETER_EXIT RESERVED ENTER_EXECUTOR").split()


def _push(f: Frame, value: Any, is_called: int) -> None:
    """With a value that is about to be called comes the NULL that says that it brings no `self`."""
    if is_called:
        f.stack += (value, NULL) if sys.version_info >= (3, 13) else (NULL, value)
    else:
        f.push(value)


def _grow(f: Frame, i: Instruction, how: Callable[..., None], *more: Any) -> None:
    """Fill a display or a comprehension; a break may have come between."""
    f.machine.fill(how, f.stack[-i.arg], *more)


_METHODS = sys.version_info >= (3, 12)  # in LOAD_ATTR's argument; before, in LOAD_METHOD
_CONVERSION_CODES = ("", "s", "r", "a")

_STEPS: dict[str, Opcode] = {
    **dict.fromkeys(_IDLE.split(), lambda f, i: None),
    **{name: Breaking(f"the instruction {name} is not supported") for name in REFUSED},
    # control
    **dict.fromkeys(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"), _jump),
    "GET_ITER": lambda f, i: f.push(f.machine.iterate(f.pop())),
    # the machine makes the generator when it calls the function, and starts after this
    "RETURN_GENERATOR": lambda f, i: None,
    "END_SEND": lambda f, i: f.stack.__delitem__(-2),
    "GET_AWAITABLE": lambda f, i: f.push(_awaited(f.pop(), i.arg)),
    "END_FOR": lambda f, i: None,  # FOR_ITER goes past it
    "LOAD_BUILD_CLASS": lambda f, i: f.push(builtins.__build_class__),
    "LOAD_ASSERTION_ERROR": lambda f, i: f.push(AssertionError),
    "IMPORT_NAME": lambda f, i: f.push(f.machine.import_name(f, i.value, *f.take(2))),
    "IMPORT_FROM": lambda f, i: f.push(f.machine.import_from(f.stack[-1], i.value)),
    # matching
    "GET_LEN": lambda f, i: f.push(f.machine.call(len, f.stack[-1])),
    "MATCH_SEQUENCE": lambda f, i: f.push(_is_flagged(f.stack[-1], _SEQUENCE)),
    "MATCH_MAPPING": lambda f, i: f.push(_is_flagged(f.stack[-1], _MAPPING)),
    # the stack
    "POP_TOP": lambda f, i: f.stack.__delitem__(-1),
    "PUSH_NULL": lambda f, i: f.push(NULL),
    "COPY": lambda f, i: f.push(f.stack[-i.arg]),
    "LOAD_CONST": lambda f, i: f.push(i.value),
    # operators
    "BINARY_OP": lambda f, i: f.push(f.machine.binary(i.arg, *f.take(2))),
    "UNARY_NOT": lambda f, i: f.push(f.machine.negated(f.pop())),
    "TO_BOOL": lambda f, i: f.push(f.machine.decides(f, f.at + 1, f.pop())),
    "UNARY_NEGATIVE": lambda f, i: f.push(f.machine.unary("neg", f.pop())),
    "UNARY_POSITIVE": lambda f, i: f.push(f.machine.unary("pos", f.pop())),
    "UNARY_INVERT": lambda f, i: f.push(f.machine.unary("invert", f.pop())),
    "IS_OP": lambda f, i: f.push(f.machine.identical(*f.take(2)) ^ bool(i.arg)),
    "COMPARE_OP": lambda f, i: f.push(f.machine.compare(i.value, *f.take(2))),
    "CONTAINS_OP": lambda f, i: f.push(f.machine.contains(f.pop(), f.pop()) ^ bool(i.arg)),
    "BINARY_SUBSCR": lambda f, i: f.push(f.machine.subscript(*f.take(2))),
    "BINARY_SLICE": lambda f, i: f.push(f.machine.subscript(f.stack.pop(-3), slice(*f.take(2)))),
    "STORE_SUBSCR": lambda f, i: f.machine.store_subscript(*f.take(2), f.pop()),
    "STORE_SLICE": lambda f, i: f.machine.store_subscript(
        f.stack.pop(-3), slice(*f.take(2)), f.pop()
    ),
    "DELETE_SUBSCR": lambda f, i: f.machine.delete_subscript(*f.take(2)),
    # attributes
    "LOAD_ATTR": lambda f, i: _push(f, f.machine.attribute(f.pop(), i.value), _METHODS & i.arg),
    "LOAD_METHOD": lambda f, i: f.stack.extend((NULL, f.machine.attribute(f.pop(), i.value))),
    "STORE_ATTR": lambda f, i: f.machine.store_attribute(f.pop(), i.value, f.pop()),
    "DELETE_ATTR": lambda f, i: f.machine.delete_attribute(f.pop(), i.value),
    # building
    "BUILD_TUPLE": lambda f, i: f.push(tuple(f.take(i.arg))),
    "BUILD_LIST": lambda f, i: f.push(f.take(i.arg)),
    "BUILD_SET": lambda f, i: f.push(set(f.machine.hashed(f.take(i.arg)))),
    "BUILD_CONST_KEY_MAP": lambda f, i: f.push(dict(zip(f.pop(), f.take(i.arg)))),
    "BUILD_SLICE": lambda f, i: f.push(slice(*f.take(i.arg))),
    "BUILD_STRING": lambda f, i: f.push(f.machine.joined(f.take(i.arg))),
    "LIST_TO_TUPLE": lambda f, i: f.push(tuple(f.machine.items(f.pop()))),
    "LIST_EXTEND": lambda f, i: _grow(f, i, list.extend, f.machine.listed(checked(f.pop()))),
    "SET_UPDATE": lambda f, i: _grow(f, i, set.update, f.machine.hashed(f.machine.items(f.pop()))),
    "DICT_UPDATE": lambda f, i: _grow(f, i, dict.update, f.machine.mapping(f.pop())),
    "LIST_APPEND": lambda f, i: f.machine.append(f.stack[-i.arg - 1], f.pop()),
    "SET_ADD": lambda f, i: _grow(f, i, set.add, *f.machine.hashed([f.pop()])),
    # text
    "FORMAT_WITH_SPEC": lambda f, i: f.push(f.machine.format(f.stack.pop(-2), "", f.pop())),
    "FORMAT_SIMPLE": lambda f, i: f.push(f.machine.format(f.pop(), "", "")),
    "CONVERT_VALUE": lambda f, i: f.push(f.machine.format(f.pop(), _CONVERSION_CODES[i.arg], None)),
    # names
    **dict.fromkeys(("LOAD_FAST", "LOAD_FAST_CHECK"), lambda f, i: f.push(_local(f, i.value))),
    "LOAD_FAST_LOAD_FAST": lambda f, i: f.stack.extend([_local(f, name) for name in i.value]),
    "LOAD_FAST_AND_CLEAR": lambda f, i: f.push(
        (f.cells if _is_own_cell(f, i.value) else f.locals).pop(i.value, UNBOUND)
    ),
    **dict.fromkeys(
        ("STORE_FAST", "STORE_FAST_MAYBE_NULL"), lambda f, i: _store(f, i.value, f.pop())
    ),
    "LOAD_GLOBAL": lambda f, i: _push(f, f.machine.load_global(f, i.value), i.arg & 1),
    "SETUP_ANNOTATIONS": lambda f, i: f.names.setdefault("__annotations__", {}) and None,
    "STORE_NAME": lambda f, i: f.names.__setitem__(i.value, f.pop()),
    "DELETE_NAME": lambda f, i: f.names.__delitem__(i.value),
    "STORE_GLOBAL": lambda f, i: f.machine.store_global(f, i.value, f.pop()),
    "DELETE_GLOBAL": lambda f, i: f.machine.store_global(f, i.value, ABSENT),
    "LOAD_LOCALS": lambda f, i: f.push(f.locals if f.names is None else f.names),
    "LOAD_NAME": lambda f, i: _load_from(f, f.names or {}, i.value, f.machine.load_global),
    "LOAD_FROM_DICT_OR_GLOBALS": lambda f, i: _load_from(
        f, f.pop(), i.value, f.machine.load_global
    ),
    "LOAD_FROM_DICT_OR_DEREF": lambda f, i: _load_from(f, f.pop(), i.value, f.machine.load_cell),
    "LOAD_CLASSDEREF": lambda f, i: _load_from(f, f.names or {}, i.value, f.machine.load_cell),
    # closures
    "LOAD_CLOSURE": lambda f, i: f.push(f.cells[i.value]),
    "LOAD_DEREF": lambda f, i: f.push(f.machine.load_cell(f, i.value)),
    "STORE_DEREF": lambda f, i: f.machine.store_cell(f, i.value, f.pop()),
    "DELETE_DEREF": lambda f, i: f.machine.store_cell(f, i.value, ABSENT),
}
OPCODES.update(_STEPS)


@op()
def SWAP(f: Frame, i: Instruction) -> None:
    f.stack[-i.arg], f.stack[-1] = f.stack[-1], f.stack[-i.arg]


@op()
def LOAD_SUPER_ATTR(f: Frame, i: Instruction) -> None:
    """`super(cls, obj)`; without arguments the compiler has found them, and super() does too."""
    function, *given = f.take(3)
    owner = f.machine.call(function, *(given if i.arg & 2 else ()))
    _push(f, f.machine.attribute(owner, i.value), i.arg & 1)


# ------------------------------------------------------------------------------ building


@op()
def MAP_ADD(f: Frame, i: Instruction) -> None:
    key, value = f.take(2)
    _grow(f, i, dict.__setitem__, *f.machine.hashed([key]), value)


@op()
def BUILD_MAP(f: Frame, i: Instruction) -> None:
    items = f.take(2 * i.arg)
    f.push(dict(zip(f.machine.hashed(items[::2]), items[1::2])))


@op()
def DICT_MERGE(f: Frame, i: Instruction) -> None:
    given = f.pop()
    # its NULL is above it from 3.13 on, and below it before
    function = f.stack[-i.arg - 2 - (sys.version_info >= (3, 13))]
    if not hasattr(type(given), "keys"):
        kind = type(given).__name__
        raise TypeError(f"{called(function)} argument after ** must be a mapping, not {kind}")
    more, into = f.machine.mapping(given), f.machine.writable(f.stack[-i.arg])
    for key in more:
        if key in into:
            name = called(function)
            raise TypeError(f"{name} got multiple values for keyword argument '{key!s}'")
    into.update(more)


def _unpacked(f: Frame, most: int) -> tuple[list[Any], Any]:
    """The first elements of what is unpacked, and its iterator."""
    found = f.pop()
    if not is_iterable(found):
        raise TypeError(f"cannot unpack non-iterable {type(found).__name__} object")
    iterator = f.machine.iterate(found)
    return f.machine.coming(iterator, most), iterator


@op()
def UNPACK_SEQUENCE(f: Frame, i: Instruction) -> None:
    items, _ = _unpacked(f, i.arg + 1)
    if len(items) < i.arg:
        raise ValueError(f"not enough values to unpack (expected {i.arg}, got {len(items)})")
    if len(items) > i.arg:
        raise ValueError(f"too many values to unpack (expected {i.arg})")
    f.stack += reversed(items)


@op()
def UNPACK_EX(f: Frame, i: Instruction) -> None:
    before, after = i.arg & 0xFF, i.arg >> 8
    items, iterator = _unpacked(f, before)
    if len(items) == before:
        items += f.machine.listed(iterator)
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    last = len(items) - after
    f.stack += reversed([*items[:before], items[before:last], *items[last:]])


@op()
def FORMAT_VALUE(f: Frame, i: Instruction) -> None:
    spec = f.pop() if i.arg & 4 else ""
    f.push(f.machine.format(f.pop(), _CONVERSION_CODES[i.arg & 3], spec))


# ------------------------------------------------------------------------------ names


def _store(f: Frame, name: str, value: Any) -> None:
    """To Python a local and an own cell of one name are one slot: a comprehension puts back what
    was. A free variable has a slot beside that of a comprehension's variable of its name."""
    if type(value) is types.CellType and name in f.code.co_cellvars:
        f.locals.pop(name, None)
        f.cells[name] = value
        return
    if _is_own_cell(f, name):
        del f.cells[name]
    f.locals[name] = value


def _is_own_cell(f: Frame, name: str) -> bool:
    return name in f.cells and name not in f.code.co_freevars


@op()
def STORE_FAST_STORE_FAST(f: Frame, i: Instruction) -> None:
    for name in i.value:
        _store(f, name, f.pop())


def _local(f: Frame, name: str) -> Any:
    value = f.locals.get(name, UNBOUND)
    if value is UNBOUND and name in f.cells:  # from 3.13 on cells are loaded like locals
        return f.cells[name]
    if value is UNBOUND:
        raise unbound(f, name)
    if type(value) is Opaque:
        raise value.met()
    return value


def _load_from(f: Frame, names: Any, name: str, otherwise: Callable[[Frame, str], Any]) -> None:
    f.push(names[name] if name in names else otherwise(f, name))


@op()
def STORE_FAST_LOAD_FAST(f: Frame, i: Instruction) -> None:
    store, load = i.value
    _store(f, store, f.pop())
    f.push(_local(f, load))


@op()
def DELETE_FAST(f: Frame, i: Instruction) -> None:
    _local(f, i.value)
    f.locals[i.value] = UNBOUND


# ------------------------------------------------------------------------------ closures


@op()
def MAKE_CELL(f: Frame, i: Instruction) -> None:
    value = f.locals.pop(i.value, UNBOUND)
    f.cells[i.value] = types.CellType() if value is UNBOUND else types.CellType(value)


# By the bit of MAKE_FUNCTION's argument that says that it is on the stack.
_OF_FUNCTIONS = {4: "__annotations__", 2: "__kwdefaults__", 1: "__defaults__"}


@op()
def MAKE_FUNCTION(f: Frame, i: Instruction) -> None:
    code = f.pop()
    closure = f.pop() if i.arg & 8 else None
    if closure is None and code.co_freevars:  # from 3.13 on it comes with the next instruction
        closure = tuple(types.CellType() for _ in code.co_freevars)
    made = types.FunctionType(code, f.globals, code.co_name, None, closure)
    for bit in _OF_FUNCTIONS:
        if i.arg & bit:
            _set_in_function(made, bit, f.pop())
    f.push(made)


@op()
def SET_FUNCTION_ATTRIBUTE(f: Frame, i: Instruction) -> None:
    made, value = f.pop(), f.pop()
    if i.arg == 8:
        before, made = made, types.FunctionType(made.__code__, made.__globals__, closure=value)
        for name in ("__name__", *_OF_FUNCTIONS.values()):
            setattr(made, name, getattr(before, name))
    else:
        _set_in_function(made, i.arg, value)
    f.push(made)


def _set_in_function(made: types.FunctionType, bit: int, value: Any) -> None:
    if bit == 4:
        value = dict(zip(value[::2], value[1::2]))
    setattr(made, _OF_FUNCTIONS[bit], value)
