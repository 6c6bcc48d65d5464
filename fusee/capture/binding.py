"""Arguments of a call to the variables of a function, as CPython binds them.

source   https://docs.python.org/3/reference/expressions.html#calls
"""

from __future__ import annotations

import inspect
import types
from typing import Any

__all__ = ["bind", "refuse_missing"]


def bind(
    code: types.CodeType,
    name: str,
    defaults: tuple[Any, ...],
    keyword_defaults: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """The parameters' values.

    raises   TypeError as CPython does
    """
    positional = code.co_varnames[: code.co_argcount]
    keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    bound = dict(zip(positional, args))
    more = dict(kwargs)
    extra = args[len(positional) :]
    rest = code.co_argcount + code.co_kwonlyargcount
    for key in positional[code.co_posonlyargcount :]:
        if key in more:
            if key in bound:
                raise TypeError(f"{name}() got multiple values for argument {key!r}")
            bound[key] = more.pop(key)
    for key in keyword_only:
        if key in more:
            bound[key] = more.pop(key)
    if code.co_flags & inspect.CO_VARARGS:
        bound[code.co_varnames[rest]] = extra
        rest += 1
    elif extra:
        _refuse_extra(name, positional, defaults, args)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        bound[code.co_varnames[rest]] = more
    elif more:
        raise TypeError(f"{name}() got an unexpected keyword argument {next(iter(more))!r}")
    first_default = len(positional) - len(defaults)
    missing = []
    for k, key in enumerate(positional):
        if key not in bound:
            if k < first_default:
                missing.append(key)
            else:
                bound[key] = defaults[k - first_default]
    refuse_missing(name, "positional", missing)
    missing = []
    for key in keyword_only:
        if key not in bound:
            if key not in keyword_defaults:
                missing.append(key)
            else:
                bound[key] = keyword_defaults[key]
    refuse_missing(name, "keyword-only", missing)
    return bound


def _refuse_extra(
    name: str, positional: tuple[str, ...], defaults: tuple[Any, ...], args: tuple[Any, ...]
) -> None:
    count = len(positional)
    takes = f"from {count - len(defaults)} to {count}" if defaults else str(count)
    plural = "" if count == 1 and not defaults else "s"
    given = "was" if len(args) == 1 else "were"
    raise TypeError(
        f"{name}() takes {takes} positional argument{plural} but {len(args)} {given} given"
    )


def refuse_missing(name: str, kind: str, missing: list[str]) -> None:
    """Raise TypeError for these parameters, if there are any."""
    if not missing:
        return
    quoted = [repr(key) for key in missing]
    listed = quoted[0]
    if len(quoted) == 2:
        listed = " and ".join(quoted)
    elif len(quoted) > 2:
        listed = ", ".join(quoted[:-1]) + f", and {quoted[-1]}"
    plural = "" if len(missing) == 1 else "s"
    raise TypeError(f"{name}() missing {len(missing)} required {kind} argument{plural}: {listed}")
