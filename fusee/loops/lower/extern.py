"""Calls that stay ATen's, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from fusee.loops.ir import Buffer, Extern, Role, View
from fusee.loops.lower.tensor import Lowering, Meta, Tensor, calls, dense
from fusee.loops.operators import named
from fusee.sym.expr import Size


@dataclass(frozen=True, slots=True)
class ExternSpec:
    """How a target calls an operator on whole tensors, as cheaply as there is a way.

    call      takes the overload's arguments and returns its results
    out       the same with one more argument `out`, the tensor to fill
    in_place  the same writing over the argument number `operand`, which it takes first
    exact     the tensors that it takes must have eager's strides
    """

    call: Callable[..., Any]
    out: Callable[..., Any] | None = None
    in_place: Callable[..., Any] | None = None
    operand: int = 0
    exact: bool = False


ANY_LAYOUT = frozenset(named("linear scaled_dot_product_attention"))
CHANNELS_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


def channels_last(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return dense(shape, CHANNELS_LAST[len(shape)])


def extern(
    lowering: Lowering,
    op: OpOverload,
    metas: tuple[Meta | None, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: ExternSpec | None,
    layout: str | None,
    reason: str,
    writes_inputs: bool = False,
) -> list[Tensor | None]:
    """Append the call; its results as tensors. Tensors among its arguments are `Laid`.

    writes_inputs   the graph writes to inputs, in an order that knows nothing of views of them

    Arguments come in whatever layout they have to kernels known to take any, else in eager's: a
    kernel may rely on the contiguous copy that the program made for it.
    """
    images = layout == "channels_last"
    if spec is not None:
        exact = spec.exact
    else:
        exact = op.namespace not in ("mkl", "mkldnn") and op not in ANY_LAYOUT
    given = tuple(_argument(lowering, arg, images, exact) for arg in args)
    named_args = {key: _argument(lowering, arg, images, exact) for key, arg in kwargs.items()}
    out = spec.out if spec is not None and len(metas) == 1 and metas[0] is not None else None
    role: Role = "extern" if out is None else "scratch"
    buffers = [_buffer(lowering, meta, images, role) for meta in metas]
    call: Callable[..., Any] = out or (op if spec is None else spec.call)
    shares = any(r.alias_info is not None for r in op._schema.returns)
    if shares and writes_inputs and _is_of_input(given):
        call, shares = _copying(call), False
    step = Extern(
        str(op),
        call,
        given,
        named_args,
        tuple(buffers),
        out=out is not None,
        many=_returns_tuple(op),
        in_place=None if spec is None else spec.in_place,
        operand=0 if spec is None else spec.operand,
        owns=op.namespace == "mkldnn",
        shares=shares,
        reason=reason,
        origin=lowering.origin,
    )
    lowering.graph.steps.append(step)
    return [None if buffer is None else lowering.whole(buffer) for buffer in buffers]


def _buffer(lowering: Lowering, meta: Meta | None, images: bool, role: Role) -> Buffer | None:
    if meta is None:
        return None
    strides = meta.strides
    if images and len(meta.shape) in CHANNELS_LAST:
        strides = channels_last(meta.shape)
    return lowering.buffer(meta.shape, meta.dtype, strides, role)


def _is_of_input(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, View) and arg.buffer.role == "input" for arg in args)


def _copying(view: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: view(*args, **kwargs).clone()


def _returns_tuple(op: OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) > 1 or any(isinstance(r.type, torch.ListType) for r in returns)


@dataclass(frozen=True)
class Laid:
    """A tensor argument and the strides that eager has it in; None if it is opaque."""

    tensor: Tensor
    strides: tuple[Size, ...] | None


def _argument(lowering: Lowering, arg: Any, images: bool, exact: bool) -> Any:
    if isinstance(arg, Laid):
        tensor, strides = arg.tensor, arg.strides
        # weights come as their pass packed them
        kept = tensor.storage is not None and tensor.storage.buffer.role == "derived"
        if images and not kept and len(tensor.shape) in CHANNELS_LAST:
            return lowering.window(tensor, channels_last(tensor.shape))
        if not exact or kept or strides is None:
            return lowering.window(tensor)
        repeats = any(s == 0 and n != 1 for s, n in zip(strides, tensor.shape, strict=True))
        return lowering.window(tensor, None if repeats else strides)
    if isinstance(arg, (list, tuple)):
        return [_argument(lowering, item, images, exact) for item in arg]
    return arg


# ------------------------------------------------------------------------------ reasons

calls(
    "matrix products are ATen's: oneDNN, MKL",
    *named("mm bmm addmm baddbmm addbmm mv addmv dot vdot linear"),
)
calls("convolutions are ATen's: oneDNN", *named("convolution convolution_backward"))
calls(
    "attention is ATen's blocked kernel",
    *named("scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu"),
)
calls("recurrent layers are ATen's", *named("lstm gru rnn_tanh rnn_relu", "input"))
calls(
    "random numbers come from ATen's generator, so that the stream is eager's",
    *named("rand randn randperm rand_like randn_like bernoulli native_dropout multinomial"),
    *named("normal_functional uniform exponential geometric cauchy log_normal"),
    *named("randint", "default", "low"),
    *named("randint_like", "default", "low_dtype"),
    *named("rrelu_with_noise_functional"),
)
calls("sorting is ATen's", *named("sort", "default", "stable"), *named("topk kthvalue msort"))
calls("sorting is ATen's", *named("mode median nanmedian", "default", "dim"))
calls("Fourier transforms are ATen's: MKL", *named("_fft_c2c _fft_c2r _fft_r2c"))
calls(
    "the size of the result depends on data",
    *named("nonzero masked_select masked_scatter _local_scalar_dense"),
    *named("unique_dim unique_consecutive _unique2"),
)
calls("sums over bags of data-dependent size", *named("_embedding_bag _embedding_bag_forward_only"))
calls("distances are sums over all pairs: ATen's", *named("_cdist_forward _pdist_forward"))
calls("a fold adds overlapping blocks", *named("col2im"))
calls("scatters to places that are data, which ATen checks", *named("max_unpool2d max_unpool3d"))
calls("interpolates at points that are data", *named("grid_sampler_2d grid_sampler_3d"))
calls(
    "powers in double, by the C library's pow",
    *named("logspace", "default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"),
)
calls("a scan with logaddexp is not in the vocabulary", *named("logcumsumexp"))
calls(
    "gradients that are scattered sums",
    *named("embedding_dense_backward max_pool2d_with_indices_backward unfold_backward"),
    *named("max_pool3d_with_indices_backward adaptive_max_pool2d_backward"),
    *named("adaptive_max_pool3d_backward _embedding_bag_backward _embedding_bag_dense_backward"),
    *named("upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward"),
    *named("upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward"),
    *named("_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward"),
    *named("_upsample_nearest_exact3d_backward _upsample_bicubic2d_aa_backward"),
    *named("grid_sampler_2d_backward grid_sampler_3d_backward"),
)
calls(
    "attention is ATen's blocked kernel",
    *named("_scaled_dot_product_flash_attention_for_cpu_backward"),
)
calls("distances are sums over all pairs: ATen's", *named("_cdist_backward _pdist_backward"))
