"""What stands in for functions of Python's library: re, copy.deepcopy, warnings, logging.

Warnings and records of a log come after the graph, from the program's own lines, as long as no code
of the program's gets them: a handler, a filter or a stream of its own ends the graph.
"""

from __future__ import annotations

import collections
import copy
import functools
import logging
import operator
import re
import sys
import types
import warnings
from typing import Any

import torch

from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.mirror import Later, empty_like
from fusee.capture.origin import Call, Held
from fusee.capture.stand_ins import SPECIAL, Args, Kwargs, Stand, stands_for
from fusee.capture.torch_api import FakeTensor
from fusee.capture.tracebacks import Line
from fusee.capture.world import is_scalar

__all__ = ["say_later"]

# ------------------------------------------------------------------------------ re


def _on_text(function: Any) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
        if not all(map(is_scalar, (*args, *kwargs.values()))):
            raise GraphBreak(f"re.{function.__name__}() of more than texts and patterns")
        return function(*args, **kwargs)

    return stand


for _function in (
    re.match, re.search, re.fullmatch, re.sub, re.subn, re.split, re.findall, re.finditer,
    re.compile, re.escape,
):  # fmt: skip
    SPECIAL[_function] = _on_text(_function)

# ------------------------------------------------------------------------------ copy


@stands_for(copy.deepcopy)
def _deepcopy(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    """Containers and tensors within one another, each copied once."""
    made: dict[int, Any] = {}
    storages: set[int] = set()

    def copied(x: Any) -> Any:
        if is_scalar(x) or isinstance(x, (type, *_FUNCTIONS)):
            return x
        if id(x) not in made:
            made[id(x)] = of_tensor(x) if isinstance(x, FakeTensor) else of_container(x)
        return made[id(x)]

    def of_tensor(x: Any) -> Any:
        with torch._C.DisableTorchFunction():
            storage = x.untyped_storage()._cdata
            is_plain = not x.requires_grad and not getattr(x, "_is_param", False)
            strides = torch.empty_like(x, device="meta").stride()
            if not is_plain or storage in storages or x.stride() != strides:
                raise GraphBreak("a deep copy of a tensor that needs gradients, or is a view")
        storages.add(storage)
        return m.call(torch.clone, (x,), {})

    def of_container(x: Any) -> Any:
        kind = type(x)
        if kind is tuple:
            items = tuple(map(copied, x))
            return x if all(map(operator.is_, items, x)) else items
        if kind not in (list, dict, set, collections.OrderedDict, collections.deque):
            raise GraphBreak(f"a deep copy of a {kind.__qualname__}")
        shown = m.plain(x)
        empty = made[id(x)] = made[id(shown)] = empty_like(shown)
        if isinstance(shown, dict):
            empty.update((copied(key), copied(item)) for key, item in shown.items())
        else:
            (empty.update if kind is set else empty.extend)(map(copied, shown))
        return empty

    return copied(*args)


_FUNCTIONS = (type(len), type(lambda: None))

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
    if m.world.said_to(_sink(), _SINK):
        raise GraphBreak(_SEEN)
    say_later(m, warnings.warn, args, kwargs)


def _logs(function: Any, level: int | None, is_method: bool) -> Stand:
    def stand(m: Capturing, args: Args, kwargs: Kwargs) -> None:
        logger, *said = args if is_method else (m.world.hold(logging.root, "root logger"), *args)
        at = said[0] if level is None else level
        origin = m.world.origin(logger)
        if origin is None or type(at) is not int or {"exc_info", "stack_info"} & {*kwargs}:
            raise GraphBreak("logging with what is known only as the program runs")
        asked = Call(origin, functools.partial(_who_sees, at), "what is logged by ")
        seen_by = m.world.load(_who_sees(at, logger), asked)
        if seen_by == "the program":
            raise GraphBreak(_SEEN)
        if seen_by:
            say_later(m, function, args, kwargs)

    return stand


_FILES = ("FileHandler", "RotatingFileHandler", "TimedRotatingFileHandler")


def _who_sees(level: int, logger: logging.Logger) -> str:
    """Who gets to know of a record: nobody (""), "others", or "the program"."""
    if not logger.isEnabledFor(level):
        return ""
    at: logging.Logger | None = logger
    handlers = list[Any]()
    while at is not None:
        handlers += at.handlers
        at = at.parent if at.propagate else None
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
