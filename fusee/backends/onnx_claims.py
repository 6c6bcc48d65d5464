"""What the ONNX exporter's functions, or ONNX Runtime, compute otherwise than ATen.

Found by tests/opinfo, `scripts/opinfo --backend onnxrt --dtypes float32,int64`. Whether there is a
function and a kernel at all is not the question here: the engine asks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusee.aten.tidy import refuses
from fusee.aten.torch_api import OpOverload
from fusee.backends.intervals import interval
from fusee.backends.openvino_claims import indexed

__all__ = ["REFUSED", "why_not"]

aten = torch.ops.aten


def why_not(node: fx.Node) -> str | None:
    """Why a call is not as eager's, or None if it is."""
    op: Any = node.target
    if op in _WRONG:
        return _WRONG[op]
    if op in _AT_TIMES:
        return _AT_TIMES[op](node)
    places = indexed(node)
    if not places and refuses(node):
        return "ONNX Runtime takes values that ATen refuses"
    for index, low, _ in places:
        if low == 0 and index.op != "placeholder" and (interval(index) or (-1, 0))[0] < 0:
            return "an index computed in the graph may be negative: ONNX counts from the end"
    return None


def _named(names: str) -> list[OpOverload]:
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(aten, packet), overload or "default"))
    return found


_ROWS = (
    ("as_strided", "its strides mean nothing to ONNX"),
    ("view.dtype", "ONNX reads no memory as another dtype"),
    ("atan2", "the exporter composes it of a division and an arc tangent"),
    (
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
        "the exporter composes it of a division and a product, which round",
    ),
    ("linspace linspace.Tensor_Tensor", "the exporter rounds its steps otherwise"),
    ("log1p expm1 logaddexp logaddexp2 logcumsumexp", "the exporter composes it, inexactly"),
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats "
        "_native_batch_norm_legit_functional",
        "the exporter takes other statistics of the batch",
    ),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", "ONNX filters it otherwise"),
    (
        "amax amin max min max.dim min.dim argmax argmin sign",
        "ONNX Runtime passes over what is not a number",
    ),
    ("scatter_reduce.two", "ONNX has no mean of what is scattered to one place"),
    (
        "special_erfcx special_log_ndtr",
        "the exporter composes it, and overflows where ATen does not",
    ),
    (
        "_embedding_bag _embedding_bag_forward_only embedding_bag embedding_bag.padding_idx",
        "onnxruntime 1.31 crashes on what the exporter makes of it",
    ),
    ("topk sort sort.stable argsort", "ONNX puts equal elements into another order"),
)
_WRONG: dict[OpOverload, str] = {op: why for names, why in _ROWS for op in _named(names)}
REFUSED = frozenset(_WRONG)


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _pool(node: fx.Node) -> str | None:
    if _argument(node, 4, "ceil_mode") or _argument(node, 6, "divisor_override") is not None:
        return "ONNX counts the elements of windows that reach beyond the edge otherwise"
    return None


def _resize(node: fx.Node) -> str | None:
    given = node.args[-1] if str(node.target).endswith(".vec") else node.args[2:]
    factors = [f for f in given if type(f) is float] if isinstance(given, (tuple, list)) else []
    source: Any = node.args[0]
    sizes = source.meta["val"].shape[2:]
    if all(isinstance(n, int) and float(n * f).is_integer() for n, f in zip(sizes, factors)):
        return None
    return "ONNX takes the factor from the sizes, not as it is given"


def _power(node: fx.Node) -> str | None:
    if node.meta["val"].dtype.is_floating_point:
        return None
    return "integers that overflow, or are divided, wrap otherwise"


def _norm(node: fx.Node) -> str | None:
    order = _argument(node, 1, "ord")
    if isinstance(order, float) and math.isinf(order):
        return "ONNX Runtime passes over what is not a number"
    return None


_AT_TIMES: dict[OpOverload, Callable[[fx.Node], str | None]] = {
    **dict.fromkeys(_named("avg_pool1d avg_pool2d avg_pool3d"), _pool),
    **dict.fromkeys(
        _named(
            "upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec "
            "upsample_trilinear3d.vec upsample_nearest1d.vec upsample_nearest2d.vec "
            "upsample_nearest3d.vec upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
            "upsample_trilinear3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
        ),
        _resize,
    ),
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(_named("pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar"), _power),
}
