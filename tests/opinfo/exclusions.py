"""Ops of the database that are left out of the sweep, each with its reason.

The reason is about the op, not about us: what we get wrong is fixed or shows as a failure.
"""

from __future__ import annotations

import fnmatch

_MEMORY = "returns uninitialised memory: no two calls agree"
_OBJECT = "takes a Python object that no graph can hold; Dynamo inlines the function instead"
_SEEDS = "gives seeds that are uninitialised memory where nothing is dropped"
_RAGGED = "works on jagged or sparse layouts, which have no strided memory"

# pattern of the op's name -> reason. A name with a dtype ("op:bool") excludes that dtype alone.
EXCLUDED: dict[str, str] = {
    "empty": _MEMORY,
    "empty_like": _MEMORY,
    "empty_permuted": _MEMORY,
    "empty_strided": _MEMORY,
    "new_empty": _MEMORY,
    "new_empty_strided": _MEMORY,
    "nn.functional.linear_cross_entropy.chunked": _OBJECT,
    "nn.functional.linear_cross_entropy.chunked_none": _OBJECT,
    "nn.functional.triplet_margin_with_distance_loss": _OBJECT,
    "sparse.*": _RAGGED,
    "to_sparse": _RAGGED,
    "torch.ops.aten._efficient_attention_forward": _SEEDS,
    "torch.ops.aten._flash_attention_forward": _SEEDS,
}


def excluded(name: str, dtype: str) -> str | None:
    """Why an op with a dtype is left out, or None."""
    for pattern, reason in EXCLUDED.items():
        op, _, only = pattern.partition(":")
        if fnmatch.fnmatchcase(name, op) and only in ("", dtype):
            return reason
    return None
