"""Operators whose results lie otherwise on NVIDIA's GPUs than on a CPU.

source   torch/_meta_registrations.py and torch/_decomp/decompositions.py, where they ask for the
         device; tests/targets/cuda/test_traced.py compares with torch's fakes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusee.fake.layouts import Spec, rows
from fusee.fake.rules import Found, Op, results
from fusee.source import OpRules, overloads

# What torch's own fakes are asked, which takes them half a millisecond.
ASKING = frozenset(
    overloads(
        """
        _fft_r2c _fft_c2r _fft_c2c _linalg_svd linalg_eig nonzero_static max_unpool2d
        _embedding_bag _embedding_bag_forward_only upsample_nearest2d _upsample_nearest_exact2d
        upsample_bilinear2d
        """
    )
)

# (what a rule gives, operands) -> what it is there
_ELSEWHERE: OpRules[Callable[..., Found]] = OpRules()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Statistics are kept as they are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def results_there(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """As rules.results."""
    found = None if op in ASKING else results(op, args, kwargs)
    lies = _ELSEWHERE.get(op)
    return found if found is None or lies is None else lies(found, *args)


@_ELSEWHERE.rule("native_layer_norm")
def _layer_norm(found: tuple[Spec, ...], x: Tensor, *_: Any) -> Found:
    statistics = found[1]._replace(dtype=_wide(x.dtype))
    return found[0], statistics, statistics


@_ELSEWHERE.rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats"
    " _native_batch_norm_legit_no_training _native_batch_norm_legit_functional"
)
def _batch_norm(found: tuple[Spec, ...], x: Tensor, *_: Any) -> Found:
    statistics = rows((x.shape[1],), _wide(x.dtype))
    return found[0], statistics, statistics, *found[3:]


@_ELSEWHERE.rule("log_sigmoid_forward")
def _log_sigmoid(found: tuple[Spec, ...], x: Tensor) -> Found:
    return found[0], rows((0,), x.dtype)
