"""Custom operators that write to their arguments, made functional.

Their implementation is opaque: it may call other libraries, so it is never traced. A twin operator
takes copies of what is written, runs the operator on them and returns what it returned, then the
copies:

    mylib::step_(Tensor(a!) x, Tensor y) -> Tensor
    fusee::mylib__step__default(Tensor x, Tensor y) -> (Tensor, Tensor)
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from fusee.aten.torch_api import OpOverload, mutated_arguments

__all__ = ["functional_twin"]

_ALIAS = re.compile(r"\([a-z]\w*!?\)")
_make: Any = torch.library.Library  # torch does not annotate it
_library = _make("fusee", "FRAGMENT")  # operators live as long as it does


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The twin of a custom operator; None if it writes to lists or to optional tensors."""
    written = [name for _, name in mutated_arguments(op)]
    types = {a.name: str(a.type) for a in op._schema.arguments}
    if any(types[name] != "Tensor" for name in written):
        return None
    if any(result.alias_info is not None for result in op._schema.returns):
        return None
    taken, _, returned = _ALIAS.sub("", str(op._schema)).partition("(")[2].rpartition(" -> ")
    plain = [part for part in returned.strip("()").split(", ") if part]
    name = re.sub(r"\W+", "__", f"{op._schema.name}__{op._overloadname or 'default'}")
    _library.define(f"{name}({taken} -> ({', '.join([*plain, *['Tensor'] * len(written)])})")
    positions = {a.name: i for i, a in enumerate(op._schema.arguments)}

    def run(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        copies = []
        for target in written:
            place, key = (kwargs, target) if target in kwargs else (values, positions[target])
            copy = place[key].clone()  # type: ignore[index]
            place[key] = copy  # type: ignore[index]
            copies.append(copy)
        found = op(*values, **kwargs)
        first = list(found) if len(plain) > 1 else [found] * len(plain)
        results = [*first, *copies]
        return results[0] if len(results) == 1 else tuple(results)

    _library.impl(name, run, "CompositeExplicitAutograd")
    twin: OpOverload = getattr(torch.ops.fusee, name).default
    return twin
