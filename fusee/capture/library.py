"""What stands in for functions of Python's library: re, warnings, logging, frames, weakref,
and what changes a class.

Warnings and records of a log come after the graph, from the program's own lines, as long as no code
of the program's gets them: a handler, a filter or a stream of its own ends the graph.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
import operator
import re
import sys
import types
import typing
import warnings
import weakref
from typing import Any

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.iterators import Called
from fusee.capture.mirror import Later
from fusee.capture.numbers import Computed
from fusee.capture.origin import Call, Held
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs, Stand, stands_for
from fusee.capture.torch_api import FakeTensor
from fusee.capture.tracebacks import Line
from fusee.capture.world import is_scalar

__all__ = ["say_later"]

# ------------------------------------------------------------------------------ re


def _on_text(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        if len(args) > 1 and isinstance(args[1], types.FunctionType):
            args = (args[0], Called(m, args[1]), *args[2:])  # what to put there
        if not all(is_scalar(x) or type(x) is Called for x in (*args, *kwargs.values())):
            raise GraphBreak(f"re.{function.__name__}() of more than texts and patterns")
        return function(*args, **kwargs)

    return stand


_function: Any
for _function in (
    re.match, re.search, re.fullmatch, re.sub, re.subn, re.split, re.findall, re.finditer,
    re.compile, re.escape,
):  # fmt: skip
    SPECIAL[_function] = _on_text(_function)

# ------------------------------------------------------------------------------ classes


def _of_made_class(function: Any) -> Stand:
    """What only changes a class: one that the program made is real, others are not changed."""

    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        if not args or args[0] not in m.made_classes:
            raise GraphBreak(f"{function.__qualname__}() of a class from outside")
        made = function(*args, **kwargs)
        m.made_classes.add(made)
        return made

    return stand


_process_class: Any = vars(dataclasses)["_process_class"]
for _function in (_process_class, functools.total_ordering, typing.runtime_checkable, enum.unique):
    SPECIAL[_function] = _of_made_class(_function)


@stands_for(collections.namedtuple)
def _namedtuple(m: Capturing, args: Args, kwargs: Kwargs) -> type:
    kwargs.setdefault("module", m.frames[-1].globals.get("__name__"))
    make: Any = collections.namedtuple
    made: type = make(*args, **kwargs)
    m.made_classes.add(made)
    return made


# ------------------------------------------------------------------------------ weakref


@stands_for(weakref.ref)
def _reference(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    """A weak reference is real: on the machine objects live as long as they do in Python."""
    obj, *callback = args
    if any(x is not None for x in callback):
        raise GraphBreak("a weak reference that tells the program when its object is gone")
    if isinstance(obj, (FakeTensor, Computed)) or type(obj) is types.GeneratorType:
        raise GraphBreak(f"a weak reference to a {m.kind_of(obj).__name__} of the graph")
    return weakref.ref(obj, **kwargs)


# ------------------------------------------------------------------------------ frames


class _Unknown:
    """An attribute of a frame that only Python knows."""

    def __get__(self, frame: Any, kind: Any = None) -> Any:
        raise GraphBreak("the variables of a frame, or who called the compiled function")


class _Standing(types.SimpleNamespace):
    """What sys._getframe gives: of a frame on the machine what a program asks it for."""

    f_back = f_locals = f_lasti = f_trace = f_builtins = _Unknown()


@stands_for(sys._getframe)
def _getframe(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    (depth,) = args or (0,)
    if depth >= len(m.frames):
        raise GraphBreak("the frame of whoever called the compiled function")
    f = m.frames[-1 - depth]
    names, module = f.globals, f.globals.get("__name__", "")
    m.world.mirror_of_globals(names, module)
    found = _Standing(f_code=f.code, f_lineno=f.instruction.line)
    found.f_globals = m.world.hold(names, module)
    if depth + 1 < len(m.frames):
        found.__dict__["f_back"] = _getframe(m, (depth + 1,), {})
    return found


_module_name: Any = getattr(sys, "_getframemodulename", _getframe)  # from 3.12 on
SPECIAL[_module_name] = lambda m, args, kwargs: _getframe(m, args, kwargs).f_globals["__name__"]

# ------------------------------------------------------------------------------ what is said


def say_later(m: Capturing, function: Any, args: Args, kwargs: Kwargs) -> None:
    """Call a function after the graph, from the lines that the program is at."""
    for x in (*args, *kwargs.values()):
        origin = m.world.origin(x)
        if isinstance(x, logging.Logger) and origin is not None:
            m.world.fact("is", origin, x)
        elif not is_scalar(x) and not isinstance(x, type):
            raise GraphBreak("what is said of an object may be another thing after the graph")
    m.world.later.append(Later(function, args, kwargs, [Line.of(f) for f in m.frames]))


_warnings: Any = warnings
_SEEN = "code of the program's takes what is said, and may tell others"


def _sink() -> Any:
    """The list that warnings are appended to; else whether code of the program's gets them."""
    show = _warnings._showwarnmsg_impl
    if warnings.showwarning is not _warnings._showwarning_orig:
        return True
    if isinstance(show, types.BuiltinFunctionType):
        return show.__self__ if type(show.__self__) is list else True
    return show.__module__ != "warnings" or not _is_in_c(sys.stderr)


def _is_in_c(stream: Any) -> bool:
    return stream is None or isinstance(stream.write, types.BuiltinFunctionType)


_SINK = Call(Held(_sink, "what warnings go to"), operator.call, "")


@stands_for(warnings.warn)
def _warn(m: Capturing, args: Args, kwargs: Kwargs) -> None:
    level = args[2] if len(args) > 2 else kwargs.get("stacklevel", 1)
    if type(level) is not int or level > len(m.frames) or kwargs.get("skip_file_prefixes"):
        raise GraphBreak("a warning that names the line of whoever called the compiled function")
    if m.world.is_changed_inside(warnings) or m.world.said_to(_sink(), _SINK):
        raise GraphBreak(_SEEN)
    say_later(m, warnings.warn, args, kwargs)


def _logs(function: Any, level: int | None, is_method: bool) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> None:
        logger, *said = args if is_method else (m.world.hold(logging.root, "root logger"), *args)
        at = said[0] if level is None else level
        origin = m.world.origin(logger)
        if origin is None or type(at) is not int or {"exc_info", "stack_info"} & {*kwargs}:
            raise GraphBreak("logging with what is known only as the program runs")
        if m.world.is_changed_inside(*_asked(logger)):
            raise GraphBreak("logging, of which the program has changed something before")
        asked = Call(origin, functools.partial(_who_sees, at), "what is logged by ")
        seen_by = m.world.load(_who_sees(at, logger), asked)
        if seen_by == "the program":
            raise GraphBreak(_SEEN)
        if seen_by:
            say_later(m, function, args, kwargs)

    return stand


def _asked(logger: logging.Logger) -> list[Any]:
    """The loggers, their lists and the handlers that decide about a record."""
    found: list[Any] = [logger.manager]
    at: logging.Logger | None = logger
    while at is not None:
        found += [at, at.handlers, *at.handlers]
        at = at.parent if at.propagate else None
    return found


_FILES = ("FileHandler", "RotatingFileHandler", "TimedRotatingFileHandler")


def _who_sees(level: int, logger: logging.Logger) -> str:
    """Who gets to know of a record: nobody (""), "others", or "the program"."""
    if not logger.isEnabledFor(level):
        return ""
    handlers = [x for x in _asked(logger) if isinstance(x, logging.Handler)]
    is_plain = type(logger) in (logging.Logger, logging.RootLogger) and not logger.filters
    is_plain &= logging.getLogRecordFactory() is logging.LogRecord
    return "others" if is_plain and all(map(_is_stock, handlers)) else "the program"


def _is_stock(handler: Any) -> bool:
    """Whether a handler only writes text to a stream in C."""
    kind = type(handler)
    is_known = kind in (logging.NullHandler, logging.StreamHandler) or (
        kind.__module__ in ("logging", "logging.handlers") and kind.__name__ in _FILES
    )
    formats = type(handler.formatter) in (type(None), logging.Formatter)
    is_own = handler.filters or vars(handler).keys() & {"emit", "handle", "format"}
    return is_known and formats and not is_own and _is_in_c(getattr(handler, "stream", None))


for _name, _level in (
    ("debug", 10), ("info", 20), ("warning", 30), ("warn", 30), ("error", 40), ("critical", 50),
    ("log", None),
):  # fmt: skip
    SPECIAL[getattr(logging.Logger, _name)] = _logs(getattr(logging.Logger, _name), _level, True)
    SPECIAL[getattr(logging, _name)] = _logs(getattr(logging, _name), _level, False)
