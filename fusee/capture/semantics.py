"""What instructions mean for values: here as Python does it, on real values.

A frame run with these semantics does what CPython would do. Capture overrides them (machine.py).
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

from fusee.capture.frame import UNBOUND, Frame

__all__ = [
    "BINARY",
    "COMPARE",
    "UNARY",
    "Semantics",
    "called",
    "checked",
    "own_super",
    "unbound",
    "variables",
]

_BINARY_NAMES = "add and_ floordiv lshift matmul mul mod or_ pow rshift sub truediv xor".split()
_IN_PLACE_NAMES = (
    "iadd iand ifloordiv ilshift imatmul imul imod ior ipow irshift isub itruediv ixor".split()
)

# By the argument of BINARY_OP. source   CPython's Include/opcode.h, NB_ADD and so on
BINARY: list[Callable[[Any, Any], Any]] = [
    getattr(operator, name) for name in (*_BINARY_NAMES, *_IN_PLACE_NAMES)
]

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    symbol: getattr(operator, name)
    for symbol, name in zip("< <= == != > >=".split(), "lt le eq ne gt ge".split())
}
UNARY = {name: getattr(operator, name) for name in ("neg", "pos", "invert")}

_CONVERSIONS: dict[str, Callable[[Any], str]] = {"s": str, "r": repr, "a": ascii}


class Semantics:
    """Python's own.

    frames    the activations, innermost last
    handled   the exception that is being handled
    pending   what ended a capture while a generator was closed
    is_over   whether nothing may run any more
    """

    pending: BaseException | None = None
    is_over = False

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.handled: BaseException | None = None

    def where(self) -> str:
        """The line that runs, `file.py:41 in step`."""
        return self.frames[-1].where if self.frames else ""

    # ---------------------------------------------------------------------- names

    def load_global(self, f: Frame, name: str) -> Any:
        if name in f.globals:
            return f.globals[name]
        space = f.globals.get("__builtins__", builtins)
        space = space.__dict__ if isinstance(space, types.ModuleType) else space
        if name not in space:
            raise NameError(f"name {name!r} is not defined", name=name)
        return space[name]

    def store_global(self, f: Frame, name: str, value: Any) -> None:
        f.globals[name] = value

    def delete_global(self, f: Frame, name: str) -> None:
        if name not in f.globals:
            raise NameError(f"name {name!r} is not defined", name=name)
        del f.globals[name]

    def load_cell(self, f: Frame, name: str) -> Any:
        try:
            return f.cells[name].cell_contents
        except ValueError:
            pass
        raise unbound(f, name)  # not above: it would have the other one as its context

    def store_cell(self, f: Frame, name: str, value: Any) -> None:
        f.cells[name].cell_contents = value

    def delete_cell(self, f: Frame, name: str) -> None:
        self.load_cell(f, name)  # raises if there is nothing to delete
        del f.cells[name].cell_contents

    def caught(self, error: BaseException) -> None:
        """An exception is about to reach a handler, a `finally` or the end of a `with`."""

    def left_by(self, error: BaseException) -> None:
        """An exception leaves the innermost frame."""

    def made_function(self, function: types.FunctionType) -> None:
        """A function was made in a frame."""

    def import_name(self, f: Frame, name: str, level: int, names: Any) -> Any:
        return builtins.__import__(name, f.globals, f.names or f.locals, names or (), level)

    def import_from(self, module: Any, name: str) -> Any:
        try:
            return getattr(module, name)
        except AttributeError:
            raise ImportError(f"cannot import name {name!r} from {module.__name__!r}") from None

    # ---------------------------------------------------------------------- operators

    def binary(self, kind: int, left: Any, right: Any) -> Any:
        return BINARY[kind](left, right)

    def unary(self, kind: str, x: Any) -> Any:
        return UNARY[kind](x)

    def compare(self, symbol: str, left: Any, right: Any) -> Any:
        return COMPARE[symbol](left, right)

    identical = staticmethod(operator.is_)
    contains = staticmethod(operator.contains)
    truth = staticmethod(operator.truth)

    def decides(self, f: Any, at: int, x: Any) -> bool:
        """The truth of what the jump at an index of a frame depends on."""
        return self.truth(x)

    store_subscript = staticmethod(operator.setitem)
    delete_subscript = staticmethod(operator.delitem)

    def subscript(self, container: Any, key: Any) -> Any:
        return container[key]

    def format(self, x: Any, conversion: str, spec: str | None) -> str:
        """`spec` None: convert only, as CONVERT_VALUE does."""
        if conversion:
            x = _CONVERSIONS[conversion](x)
        return x if spec is None else format(x, spec)

    # ---------------------------------------------------------------------- attributes

    attribute = staticmethod(getattr)
    store_attribute = staticmethod(setattr)
    delete_attribute = staticmethod(delattr)

    def special(self, obj: Any, name: str) -> Any:
        """A special method, which Python looks up on the class."""
        found = getattr(type(obj), name, None)
        if found is None:
            kind = "the context manager protocol" if "e" in name else name
            raise TypeError(f"{type(obj).__name__!r} object does not support {kind}")
        return types.MethodType(found, obj)

    # ---------------------------------------------------------------------- iteration, calls

    iterate = staticmethod(iter)
    next = staticmethod(next)

    def items(self, x: Any) -> list[Any]:
        """All elements of an iterable."""
        return list(x)

    def hashed(self, keys: Iterable[Any]) -> None:
        """These become elements of a set, or keys of a dict."""

    def writable(self, x: Any) -> Any:
        """The list, set or dict that a display fills."""
        return x

    append = staticmethod(list.append)

    def mapping(self, x: Any) -> dict[Any, Any]:
        return dict(x)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        about_caller = not kwargs and type(function) in (types.BuiltinFunctionType, type)
        if about_caller and (stand := _ABOUT_CALLER.get((function, len(args)))) is not None:
            return stand(self, *args)
        if self.handled is None:
            return function(*args, **kwargs)
        return _handling(self.handled, function, args, kwargs)


def _handling(error: BaseException, function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Call a function while Python itself handles an exception, as sys.exc_info shows it."""
    before = error.__traceback__, error.__context__
    try:
        raise error
    except BaseException:  # noqa: BLE001  # it was raised for this
        error.__traceback__, error.__context__ = before
        return function(*args, **kwargs)


def variables(m: Semantics) -> dict[str, Any]:
    """What locals() gives in the innermost frame."""
    f = m.frames[-1]
    if f.names is not None:
        return f.names  # type: ignore[no-any-return]
    found = {}
    for name in (*f.code.co_varnames, *f.code.co_cellvars, *f.code.co_freevars):
        if f.locals.get(name, UNBOUND) is not UNBOUND:
            found[name] = f.locals[name]
        elif name in f.cells:
            with contextlib.suppress(ValueError):  # an empty one
                found[name] = f.cells[name].cell_contents
    return found


def own_super(m: Semantics) -> Any:
    """super() without arguments, in the innermost frame."""
    f = m.frames[-1]
    first = f.code.co_varnames[0]
    owner = m.load_cell(f, first) if first in f.cells else f.locals[first]
    if "__class__" not in f.cells:
        raise RuntimeError("super(): __class__ cell not found")
    try:
        cls = m.load_cell(f, "__class__")
    except NameError:
        cls = UNBOUND
    if cls is UNBOUND:
        raise RuntimeError("super(): empty __class__ cell")
    if not isinstance(cls, type):
        raise RuntimeError(f"super(): __class__ is not a type ({type(cls).__name__})")
    return m.call(super, (cls, owner), {})


# Functions in C that look at the frame that calls them, by how many arguments they have then.
_ABOUT_CALLER: dict[tuple[Any, int], Callable[..., Any]] = {
    (super, 0): own_super,
    (locals, 0): variables,
    (vars, 0): variables,
    (dir, 0): lambda m: sorted(variables(m)),
    (globals, 0): lambda m: m.frames[-1].globals,
    (eval, 1): lambda m, code: eval(code, m.frames[-1].globals, variables(m)),
    (exec, 1): lambda m, code: exec(code, m.frames[-1].globals, variables(m)),
}


def unbound(f: Frame, name: str) -> NameError:
    """The error of a cell without contents."""
    if name in f.code.co_freevars:
        return NameError(
            f"cannot access free variable {name!r} where it is not associated with a value in"
            " enclosing scope",
            name=name,
        )
    return UnboundLocalError(
        f"cannot access local variable {name!r} where it is not associated with a value"
    )


def called(function: Any) -> str:
    """How messages about a call name the function."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if name is None:
        return str(function)
    return f"{name}()" if module in (None, "builtins") else f"{module}.{name}()"


def checked(x: Any, function: Any = None) -> Any:
    """What stands after `*`, in a display or in a call of `function`: TypeError unless iterable."""
    if hasattr(type(x), "__iter__") or hasattr(type(x), "__getitem__"):
        return x
    try:
        return [*x]  # raises
    except TypeError as error:
        text = str(error) if function is None else f"{called(function)} argument{str(error)[5:]}"
        raise TypeError(text) from None
