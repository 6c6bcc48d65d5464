"""Reading of options that several engines have. Each raises OptionError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusee.aten.torch_api import OpOverload, OpOverloadPacket, overloads
from fusee.errors import OptionError, nearest

__all__ = ["check_names", "label", "operators", "wrong"]


def check_names(what: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse a name that is not known."""
    for name in given:
        if name not in known:
            close = nearest(str(name), known)
            raise OptionError(
                f"{what} named {name!r} does not exist",
                did="stopped before compiling",
                remedy=(f"{close!r}; " if close else "") + f"known: {', '.join(known)}",
            )


def label(given: Mapping[str, object]) -> str:
    """The option `name`: what reports call a compiled function."""
    name = given.get("name", "")
    if not isinstance(name, str):
        raise wrong("name", name, "a text")
    return name


def operators(name: str, value: object, remedy: str | None = None) -> frozenset[OpOverload]:
    """Operators that an option names, of a packet all overloads."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        wanted = "a list of operators such as [torch.ops.aten.add.Tensor]"
        raise wrong(name, value, wanted, remedy)
    found: set[OpOverload] = set()
    for item in value:
        if isinstance(item, OpOverload):
            found.add(item)
        elif isinstance(item, OpOverloadPacket):
            found.update(overloads(item))
        else:
            raise wrong(name, item, "operators such as torch.ops.aten.add.Tensor", remedy)
    return frozenset(found)


def wrong(name: str, value: object, wanted: str, remedy: str | None = None) -> OptionError:
    """The error about a value that an option does not take."""
    return OptionError(
        f"option {name!r} takes {wanted}, not {value!r} ({type(value).__name__})",
        did="stopped before compiling",
        remedy=remedy,
    )
