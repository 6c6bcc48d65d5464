"""How calls come in: functions with the signature of what is compiled, written as source."""

from __future__ import annotations

import inspect
import types
from typing import Any

from fusee.capture.failures import GraphFailed
from fusee.capture.trace import parameters

__all__ = ["entrances"]


def entrances(owner: Any) -> tuple[types.FunctionType, types.FunctionType]:
    """For a CompiledFunction: one with its signature; and one that calls the function by Python.

    Python itself binds the arguments, with the function's own defaults and messages.
    """
    function, start = owner.function, owner.start
    code = function.__code__
    names = parameters(code)
    listed = ", ".join(names)
    signature, passed = _signature(function)
    values = f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    text = (
        f"def call({signature}):\n"
        f"    if _policy.is_unusual:\n"
        f"        return _miss({values})\n"
        f"    for _e in _entries:\n"
        f"        if _e.check({listed}):\n"
        f"            if _e.run is None:\n"
        f"                return _function({passed})\n"
        f"            try:\n"
        f"                if _e.captured.stop is None:\n"
        f"                    return _e.run({listed})\n"
        f"                _r = _e.run({listed})\n"
        f"            except _failed:\n"
        f"                break\n"
        f"            return _finish(_e, _r)\n"
        f"    else:\n"
        f"        return _miss({values})\n"
        f"    return _function({passed})\n"
        f"def native({listed}):\n"
        f"    return _function({passed})\n"
    )
    space: dict[str, Any] = {
        "_entries": start.entries,
        "_failed": GraphFailed,
        "_finish": owner.finish,
        "_miss": owner.miss,
        "_policy": owner.policy,
        "_function": function,
    }
    exec(compile(text, f"<fusee entrance of {function.__qualname__}>", "exec"), space)
    call: types.FunctionType = space["call"]
    call.__name__, call.__qualname__ = function.__name__, function.__qualname__
    return call, space["native"]


def _signature(function: types.FunctionType) -> tuple[str, str]:
    """The parameters as in a `def`, and as a call passes them on. Defaults are set later."""
    code = function.__code__
    names = code.co_varnames
    defaults = len(function.__defaults__ or ())
    taken, passed = [], []
    for k in range(code.co_argcount):
        default = k - (code.co_argcount - defaults)
        taken.append(names[k] + ("=None" if default >= 0 else ""))
        passed.append(names[k])
        if k + 1 == code.co_posonlyargcount:
            taken.append("/")
    at = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & inspect.CO_VARARGS:
        taken.append(f"*{names[at]}")
        passed.append(f"*{names[at]}")
        at += 1
    elif code.co_kwonlyargcount:
        taken.append("*")
    for name in names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]:
        has_default = name in (function.__kwdefaults__ or {})
        taken.append(name + ("=None" if has_default else ""))
        passed.append(f"{name}={name}")
    if code.co_flags & inspect.CO_VARKEYWORDS:
        taken.append(f"**{names[at]}")
        passed.append(f"**{names[at]}")
    return ", ".join(taken), ", ".join(passed)
