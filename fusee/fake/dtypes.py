"""Operands that kernels refuse for their dtypes, and torch's own metas do not.

Without this a call whose result nobody uses would leave no error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusee.fake.rules import RULES, Found, overload

__all__ = ["check_dtypes"]


_Refuses = Callable[[list[Any]], bool]
_PRODUCTS: tuple[str, _Refuses] = (
    "mm addmm bmm baddbmm mv",
    lambda dtypes: len({*dtypes}) > 1 or dtypes[0] is torch.bool,
)
_DIFFERENCES: tuple[str, _Refuses] = (
    "sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor",
    lambda dtypes: torch.bool in dtypes[:2],
)


def check_dtypes() -> None:
    """Puts the checks before the rules."""
    for names, refuses in (_PRODUCTS, _DIFFERENCES):
        for op in map(overload, names.split()):
            RULES[op] = _after(RULES.get(op, lambda *args, **kwargs: None), refuses)


def _after(rule: Callable[..., Found], refuses: _Refuses) -> Any:
    def checked(*args: Any, **kwargs: Any) -> Found:
        dtypes = [torch.bool if type(x) is bool else getattr(x, "dtype", None) for x in args]
        if refuses(dtypes):
            raise RuntimeError(f"operands of {dtypes}")
        return rule(*args, **kwargs)

    return checked
