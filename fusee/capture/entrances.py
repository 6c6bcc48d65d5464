"""How calls come in: functions with the signature of what is compiled, written as source."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.capture.bytecode import parameters, program
from fusee.capture.failures import GraphFailed
from fusee.capture.frame import UNBOUND
from fusee.capture.policy import ORIGINAL, WRAPPER
from fusee.capture.torch_api import DYNAMO, dynamo_stance, skip_frame, without_dynamo

__all__ = ["entrances"]


def entrances(owner: Any) -> tuple[types.FunctionType, types.FunctionType]:
    """For a CompiledFunction: one with its signature; and one that calls the function by Python.

    Python itself binds the arguments, with the function's own defaults and messages.
    """
    function, code = owner.function, owner.function.__code__
    names = parameters(code)
    text = _source(function, names)
    held: dict[str, Any] = {
        "code": code,
        "dynamo": DYNAMO,
        "entries": owner.start.entries,
        "site": owner.start,
        "failed": GraphFailed,
        "finish": without_dynamo(owner.finish),
        "is_dynamo": torch.compiler.is_dynamo_compiling,
        "is_other_stance": dynamo_stance,
        "miss": without_dynamo(owner.miss),
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
        compile(text.replace("§", mark), f"<entrance of {function.__qualname__}>", "exec"),
        space,
    )
    call: types.FunctionType = space["call"]
    functools.update_wrapper(call, function)
    skip_frame(call.__code__)
    call.__dict__.update({ORIGINAL: function, WRAPPER: id(call)})
    return call, space["native"]


def _source(function: types.FunctionType, names: Sequence[str]) -> str:
    """Both functions, with § before names of ours."""
    listed = ", ".join(names)
    signature, passed = _signature(function)
    values = f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    fill = _fill(function)
    filled = _filled(fill, values)
    return (
        f"def call({signature}):\n"
        f"    if §is_dynamo():\n"  # for TorchDynamo, which inlines this, it is True
        f"{fill}"
        f"        return §function({passed})\n"
        f"    if §function.__code__ is not §code:\n"
        f"        return §call_given(§renew(), {values})\n"
        f"{filled}"
        f"    if §policy.is_unusual or §dynamo in §modules and §is_other_stance():\n"
        f"        return §miss({values})\n"
        f"    for §e in §entries if §site.index is None else §site.index.candidates({listed}):\n"
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


def _fill(function: types.FunctionType) -> str:
    """Source: parameters that are not given get the default that the function has now."""
    count, named = function.__code__.co_argcount, function.__kwdefaults__ or {}
    optional = function.__code__.co_varnames[count - len(function.__defaults__ or ()) : count]
    if not optional and not named:
        return ""
    places = [(name, f"§d[{k - len(optional)}]") for k, name in enumerate(optional)]
    places += [(name, f"§w[{name!r}]") for name in named]
    lines = [f"if {name} is §unset: {name} = {place}" for name, place in places]
    lines.insert(0, "§d, §w = §function.__defaults__, §function.__kwdefaults__")
    return "".join(f"        {line}\n" for line in lines)


def _filled(fill: str, values: str) -> str:
    """Source: the same, and Python's own error if the function has lost a default."""
    if not fill:
        return ""
    return (
        f"    try:\n{fill}"
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
