"""`dataclass`, in a fifth of the time: dataclasses compiles up to seven methods for each class.

These were 40 ms of the first call's imports. Here only __init__ is compiled; the other methods are
closures over the fields' names. That nobody writes to a frozen class is for the type checker.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, eq=True, frozen=False, **more):
        """dataclasses.dataclass. source: PEP 557"""
        if cls is None:
            return functools.partial(dataclass, eq=eq, frozen=frozen, **more)
        made = dataclasses.dataclass(eq=False, repr=False, **more)(cls)
        fields = dataclasses.fields(made)
        own = vars(made)
        shown = [field.name for field in fields if field.repr]
        compared = [field.name for field in fields if field.compare]
        if len(compared) == 1:
            compared *= 2  # of a single name attrgetter makes no tuple
        values = operator.attrgetter(*compared) if compared else lambda self: ()

        def __repr__(self):
            listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
            return f"{type(self).__qualname__}({listed})"

        def __eq__(self, other):
            return values(self) == values(other) if type(other) is type(self) else NotImplemented

        def __hash__(self):
            return hash(values(self))

        if "__repr__" not in own:
            made.__repr__ = __repr__
        if eq:
            if own.get("__hash__") is None:
                made.__hash__ = __hash__ if frozen else None
            if "__eq__" not in own:
                made.__eq__ = __eq__
        return made
