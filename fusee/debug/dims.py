"""What `dynamic_shapes` says, in the forms of torch.export: which sizes of which arguments vary.

    {"x": {0: Dim("batch", max=64)}, "y": (Dim.AUTO, None)}     by parameter
    ({0: batch}, [{1: 2 * batch}])     by place; containers have the form of the argument

source   torch.export.dynamic_shapes, whose objects are known here by their attributes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fusee.capture.dynamic import Varying
from fusee.capture.torch_api import Mark
from fusee.errors import OptionError
from fusee.source import Args


class Declared(Varying):
    """Sizes vary where `dynamic_shapes` says so, and nowhere else."""

    def __init__(self, sizes: dict[int, dict[int, Mark]], numbers: set[str]) -> None:
        super().__init__()
        self.sizes, self.numbers = sizes, numbers

    def marks(self, x: Tensor) -> Mapping[int, Mark]:
        return {**super().marks(x), **self.sizes.get(id(x), {})}

    def __call__(self, origin: Any, value: Any) -> bool:
        return str(origin) in self.numbers or super().__call__(origin, value)


def declared(
    fn: Callable[..., Any],
    args: Args,
    kwargs: Mapping[str, Any],
    named: Mapping[str, Any],
    shapes: Any,
) -> Declared:
    """What varies.

    named    the arguments by their parameters
    raises   OptionError for a form that does not fit them
    """
    if hasattr(shapes, "dynamic_shapes"):  # a ShapesCollection, AdditionalInputs
        shapes = shapes.dynamic_shapes(fn, args, kwargs)
    found = Declared({}, set())
    if isinstance(shapes, Mapping):
        more = next(
            (x for x in named.values() if isinstance(x, dict) and not {*shapes} <= {*named}), {}
        )
        _walk("", {**named, **more}, shapes, found)
    else:
        _walk("", (*args, *kwargs.values()), shapes, found)
    return found


def _walk(name: str, x: Any, shapes: Any, found: Declared) -> None:
    if shapes is None:
        return
    if isinstance(x, Tensor):
        axes = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes)
        given = dict(axes)
        if any(type(k) is not int or not 0 <= k < x.dim() for k in given) or (
            not isinstance(shapes, Mapping) and len(given) != x.dim()
        ):
            raise _wrong(f"{name} has {x.dim()} axes, not those of {shapes!r}")
        marked = {k: _mark(f"{name}.size({k})", x.shape[k], dim) for k, dim in given.items()}
        found.sizes.setdefault(id(x), {}).update(marked)
    elif isinstance(x, Mapping) and isinstance(shapes, Mapping):
        if unknown := [key for key in shapes if key not in x]:
            raise _wrong(f"there is no {name or 'argument'} {unknown[0]!r}")
        for key, of in shapes.items():
            _walk(f"{name}[{key!r}]" if name else str(key), x[key], of, found)
    elif isinstance(x, (tuple, list)) and isinstance(shapes, (tuple, list)):
        if len(x) != len(shapes):
            raise _wrong(f"{name or 'the call'} has {len(x)} elements, not {len(shapes)}")
        for k, (item, of) in enumerate(zip(x, shapes)):
            _walk(f"{name}[{k}]" if name else f"argument {k}", item, of, found)
    elif type(x) is int and _kind(shapes) is not None:
        if _kind(shapes) != "STATIC":
            found.numbers.add(name)
    else:
        raise _wrong(f"{shapes!r} is nothing to say of {name}, a {type(x).__name__}")


def _kind(dim: Any) -> str | None:
    """AUTO, DYNAMIC or STATIC; None of what is no such hint."""
    return getattr(getattr(dim, "type", None), "name", None)


def _mark(name: str, size: int, dim: Any) -> Mark:
    """What is said of one size."""
    kind = _kind(dim)
    fixed = dim if type(dim) is int else getattr(dim, "value", None)
    if dim is None or kind == "STATIC" or fixed is not None:
        if fixed not in (None, size):
            raise _wrong(f"{name} is {size}, not {fixed}")
        return Mark(False)
    if kind is None and not hasattr(dim, "min"):
        raise _wrong(f"{dim!r} is nothing to say of {name}: give a Dim, Dim.AUTO, a number or None")
    of = dim if kind else getattr(dim, "root", dim)
    low, high = (end if type(end) is int else None for end in (of.min, of.max))
    value = size if of is dim else None
    if value is not None and (value < (low or 0) or (high is not None and value > high)):
        raise _wrong(f"{name} is {value}, which {dim!r} leaves out")
    return Mark(True, kind != "AUTO", low, high, None if kind else dim)


def _wrong(what: str) -> OptionError:
    return OptionError(f"dynamic_shapes: {what}", did="exported nothing")
