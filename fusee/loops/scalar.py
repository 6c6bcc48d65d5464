"""The scalar vocabulary: every element-wise operation that a target must be able to emit.

A row says how many operands an op takes, on which kinds of dtype it works and what it returns.
Kinds: f float32/float64, i signed and unsigned integers, b bool. There are no float16 or bfloat16
operations: lowering computes in float32 and rounds with `cast`, as ATen's CPU kernels do.
`heavy` is the rough cost in units of one addition; fusion weighs recomputation with it.

The vocabulary lives with the loops and not with code generation, since lowering writes it, fusion
weighs it and every target reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScalarOp:
    """One row of the vocabulary. `result`: "same" as the operands, or a dtype's name."""

    name: str
    arity: int
    kinds: str
    result: str = "same"
    heavy: int = 1


def _rows(
    names: str, arity: int, kinds: str, result: str = "same", heavy: int = 1
) -> list[ScalarOp]:
    return [ScalarOp(name, arity, kinds, result, heavy) for name in names.split()]


SCALAR_OPS: dict[str, ScalarOp] = {
    row.name: row
    for row in [
        # IEEE arithmetic; integers wrap. minimum and maximum return NaN if either operand is.
        *_rows("add sub mul minimum maximum", 2, "fi"),
        *_rows("div", 2, "f", heavy=4),
        # Integer division: "floordiv" and "remainder" round to minus infinity, "truncdiv" to zero.
        # By zero: any value for integers (lowering never emits it unguarded), IEEE for floats.
        *_rows("floordiv truncdiv remainder", 2, "i", heavy=12),
        *_rows("fmod", 2, "fi", heavy=12),
        *_rows("neg abs", 1, "fi"),
        *_rows("eq ne lt le gt ge", 2, "fib", result="bool"),
        *_rows("and or xor", 2, "ib"),
        *_rows("not", 1, "ib"),
        *_rows("shl shr", 2, "i"),  # shr is arithmetic for signed, logical for unsigned
        *_rows("isnan isinf signbit", 1, "f", result="bool"),
        *_rows("floor ceil trunc round", 1, "f"),  # round: half to even
        *_rows("copysign", 2, "f"),
        *_rows("sqrt", 1, "f", heavy=4),
        *_rows("rsqrt", 1, "f", heavy=6),  # 1/sqrt(x), correctly rounded twice
        *_rows("fma", 3, "f"),
        *_rows("exp exp2 expm1 log log2 log10 log1p", 1, "f", heavy=12),
        *_rows("sin cos tan asin acos atan", 1, "f", heavy=16),
        *_rows("sinh cosh tanh asinh acosh atanh", 1, "f", heavy=16),
        *_rows("erf erfc lgamma", 1, "f", heavy=20),
        *_rows("pow atan2 hypot nextafter", 2, "f", heavy=24),
    ]
}

# Ops with a payload or operands of different dtypes; the emitters treat each by name.
#   const   attr: the Python number                     no operands
#   index   attr: a Size over axis variables            no operands; dtype int64
#   load    attr: (Buffer, flat element index: Size)    operands: () or (mask, other)
#   acc     attr: Acc                                   no operands
#   cast    operand x -> dtype. Float to integer truncates; out of range as the CPU; bool: x != 0;
#           to bfloat16/float16: round to nearest even
#   bitcast operand x -> dtype of equal width
#   where   operands (bool, x, y)
#   check   attr: (size, message index, wraps)   operand int64 x: reports what is outside of
#           [0, size), or where it wraps negatives of [-size, size)
SPECIAL_OPS = frozenset({"const", "index", "load", "acc", "cast", "bitcast", "where", "check"})

# Reductions: what an accumulator may do. The identity is derived from the accumulator's dtype.
#   argmax/argmin accumulate a value beside its index (Accumulate.index) and yield the int64 index:
#   the first one among equals; NaN wins over all.
REDUCTIONS: dict[str, str] = {
    "sum": "add",
    "prod": "mul",
    "max": "maximum",
    "min": "minimum",
    "any": "or",
    "all": "and",
    "xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
}


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing when accumulated with `op` in `dtype`."""
    if op in ("sum", "any", "xor"):
        return False if dtype is torch.bool else 0
    if op in ("prod", "all"):
        return True if dtype is torch.bool else 1
    lowest = op in ("max", "argmax")
    if dtype is torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return float("-inf") if lowest else float("inf")
    info = torch.iinfo(dtype)
    return int(info.min if lowest else info.max)
