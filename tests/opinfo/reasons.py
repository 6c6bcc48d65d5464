"""Why a group of samples has more versions than one, or a graph that ends: a row for each cause.

`reason` finds the row by the operator and by what was told; a cause without a row is an error.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["REASONS", "WHAT_REASONS_ARE", "Reason", "reason"]


class Reason(NamedTuple):
    """
    ops    a pattern of their names
    told   a pattern of what is told
    stock  what stock torch.compile(backend="eager", dynamic=True) has for a group of them
    """

    name: str
    ops: str
    told: str
    why: str
    stock: str


WHAT_REASONS_ARE = """
Each cause has a row below, with what stock torch.compile(backend="eager", dynamic=True) has for a
group of it ("more": as many versions). It has no gradients in its graph.
""".strip().splitlines()

_NEW = "another version"
_ENDS = "the graph ends"

# The first one that fits is it.
REASONS = (
    Reason(
        "a value of Python", "equal|allclose|item|is_.*", _ENDS,
        "the result is a bool or a number, which only the data tells",
        "no graph, or one up to the question",
    ),
    Reason(
        "values decide", "cov|corrcoef|linalg.lstsq.*|nn.functional.ctc_loss", _ENDS,
        "whether it warns or raises, or which kernel runs, depends on what tensors hold",
        "no graph",
    ),
    Reason(
        "memory that changes", "resize_|resize_as_|as_strided.*", "",
        "elements come and go within a storage, or a constant size is larger than what is there",
        "no graph; as_strided more",
    ),
    Reason(
        "no element", "linalg.norm.*", "it raises RuntimeError",
        "eager raises for this group", "one, which raises",
    ),
    Reason(
        "indices are a tensor", "narrow|tensor_split", _ENDS,
        "where a part begins, or how many parts there are, only the data tells",
        "narrow one, tensor_split no graph",
    ),
    Reason(
        "numbers as arguments", "nn.functional.embedding_bag", _NEW,
        "a padding_idx from the end on is an int of ATen's (`int padding_idx`)", "more",
    ),
    Reason(
        "cuts or pads", "fft.*|diff|_chunk_cat|constant_pad_nd|nn.functional.pad.*", "",
        "an axis is longer or shorter than asked: a copy more or less, or as many steps", "more",
    ),
    Reason(
        "padded unevenly", "nn.functional.conv.*", _NEW,
        "padding='same' of an even window pads by a copy, of an odd one does not", "more",
    ),
    Reason(
        "high or wide",
        "lu.*|linalg.(lu|qr|svd|pinv|lstsq).*|qr|svd|pca_lowrank|svd_lowrank|trace|diag.*", _NEW,
        "which axis is longer decides on the factors, or on their gradients",
        "more; lu one, without gradients",
    ),
    Reason(
        "as many steps", "ormqr|linalg.householder_product", _NEW,
        "torch's gradient is a loop over the reflectors", "more",
    ),
    Reason(
        "one window", "nn.functional.(unfold|.*pool.*)|gradient", _NEW,
        "a result with one element along an axis broadcasts, and lies otherwise", "more",
    ),
)  # fmt: skip


def reason(op: str, told: str) -> Reason:
    """raises KeyError: a cause without a row"""
    for row in REASONS:
        if re.fullmatch(row.ops, op) and re.search(row.told, told):
            return row
    raise KeyError(f"{op}: {told}: no row of REASONS says why")
