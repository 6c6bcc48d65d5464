"""How calls come in: functions with the signature of what is compiled, written as source."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from fusee.capture.bytecode import parameters, program
from fusee.capture.failures import GraphFailed
from fusee.capture.frame import UNBOUND
from fusee.capture.policy import ORIGINAL
from fusee.capture.torch_api import DYNAMO, dynamo_stance

__all__ = ["entrances"]


def entrances(owner: Any) -> tuple[types.FunctionType, types.FunctionType]:
    """For a CompiledFunction: one with its signature; and one that calls the function by Python.

    Python itself binds the arguments, with the function's own defaults and messages.
    """
    function, code = owner.function, owner.function.__code__
    listed = ", ".join(names := parameters(code))
    signature, passed = _signature(function)
    values = f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    filled = _filled(function, values)
    text = (
        f"def call({signature}):\n"
        f"    if §function.__code__ is not §code:\n"
        f"        return §call_given(§renew(), {values})\n"
        f"{filled}"
        f"    if §policy.is_unusual or §dynamo in §modules and §is_other_stance():\n"
        f"        return §miss({values})\n"
        f"    for §e in §entries:\n"
        f"        if §e.check({listed}):\n"
        f"            if §e.run is None:\n"
        f"                return §function({passed})\n"
        f"            try:\n"
        f"                if §e.captured.stop is None:\n"
        f"                    return §e.run({listed})\n"
        f"                §r = §e.run({listed})\n"
        f"            except §failed:\n"
        f"                break\n"
        f"            return §finish(§e, §r)\n"
        f"    else:\n"
        f"        return §miss({values})\n"
        f"    return §function({passed})\n"
        f"def native({listed}):\n"
        f"    return §function({passed})\n"
    )
    held: dict[str, Any] = {
        "code": code,
        "dynamo": DYNAMO,
        "entries": owner.start.entries,
        "failed": GraphFailed,
        "finish": owner.finish,
        "is_other_stance": dynamo_stance,
        "miss": owner.miss,
        "modules": sys.modules,
        "policy": owner.policy,
        "call_given": functools.partial(_call_given, code),
        "renew": owner.renew,
        "unset": UNBOUND,
        "function": function,
    }
    # names of ours have more underscores than any of the program's
    mark = "_" * (1 + max((len(n) - len(n.lstrip("_")) for n in names), default=0))
    space = {mark + name: x for name, x in held.items()}
    exec(
        compile(text.replace("§", mark), f"<fusee entrance of {function.__qualname__}>", "exec"),
        space,
    )
    call: types.FunctionType = space["call"]
    functools.update_wrapper(call, function)
    call.__dict__[ORIGINAL] = function
    return call, space["native"]


def _call_given(code: types.CodeType, function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call a function with what the parameters of `code` were given."""
    args = []
    for name in code.co_varnames[: code.co_argcount]:
        if values[name] is UNBOUND:
            break
        args.append(values.pop(name))
    rest = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & inspect.CO_VARARGS:
        args += values.pop(code.co_varnames[rest])
        rest += 1
    more = values.pop(code.co_varnames[rest]) if code.co_flags & inspect.CO_VARKEYWORDS else {}
    given = {name: value for name, value in values.items() if value is not UNBOUND}
    return function(*args, **given, **more)


def _filled(function: types.FunctionType, values: str) -> str:
    """Source: parameters that are not given get the default that the function has now."""
    count, named = function.__code__.co_argcount, function.__kwdefaults__ or {}
    optional = function.__code__.co_varnames[count - len(function.__defaults__ or ()) : count]
    if not optional and not named:
        return ""
    places = [(name, f"§d[{k - len(optional)}]") for k, name in enumerate(optional)]
    places += [(name, f"§w[{name!r}]") for name in named]
    lines = "".join(f"        if {name} is §unset: {name} = {place}\n" for name, place in places)
    return (
        f"    §d, §w = §function.__defaults__, §function.__kwdefaults__\n"
        f"    try:\n{lines}"
        f"    except (TypeError, LookupError):\n"
        f"        §d = §unset\n"
        f"    if §d is §unset:\n"
        f"        return §call_given(§function, {values})\n"  # which raises: there are too few
    )


_PASSED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _signature(function: types.FunctionType) -> tuple[str, str]:
    """The parameters as in a `def`, and as a call passes them on."""
    bare = types.FunctionType(program(function.__code__).taking, {}, argdefs=function.__defaults__)
    bare.__kwdefaults__ = function.__kwdefaults__
    found = inspect.signature(bare)
    listed = found.parameters.values()
    taken = [p if p.default is p.empty else p.replace(default=UNBOUND) for p in listed]
    passed = [_PASSED.get(p.kind, "{0}").format(p.name) for p in listed]
    text = str(found.replace(parameters=taken)).replace(f"={UNBOUND}", "=§unset")
    return text[1:-1], ", ".join(passed)
