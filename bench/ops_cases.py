"""The programs of `bench.ops`, as tables: families of programs x inputs x dtypes x modes.

A program is an expression over its inputs x, y, z, u, v, torch, F and the functions below. An input
is a shape and, after colons, words for its layout and its values (`made`):

    64x1000             normal numbers of the case's dtype
    64x1000:t           the transpose of a 1000x64 one; nhwc: channels last
    64x1000:step        every second element of a row; part: rows that end before memory's rows do
    64x1000:i64<50      integers below 50, of that dtype; u8, bool: all of theirs
    64x1000:pos         positive; fixed: needs no gradient
    64x1000:f32         of this dtype whatever the case's is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "u8": torch.uint8,
    "bool": torch.bool, "c64": torch.complex64,
}  # fmt: skip
RUN, TRAIN = ("run",), ("run", "train")


class Family(NamedTuple):
    """Each program with each of the inputs, in each dtype and mode ("run" or "train")."""

    name: str
    inputs: tuple[str, ...]
    programs: tuple[str, ...]
    dtypes: tuple[str, ...] = ("f32",)
    modes: tuple[str, ...] = RUN


class Case(NamedTuple):
    """One program with one list of inputs."""

    family: str
    program: str
    inputs: str
    dtype: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.program} [{self.inputs}] {self.dtype} {self.mode}"

    def function(self) -> Callable[..., Any]:
        names = ", ".join("xyzuv"[: len(self.inputs.split(", "))])
        found: Callable[..., Any] = eval(f"lambda {names}: {self.program}", globals())
        return found

    def tensors(self) -> list[Tensor]:
        """New inputs, always the same numbers."""
        torch.manual_seed(0)
        found = [made(text, DTYPES[self.dtype]) for text in self.inputs.split(", ")]
        if self.mode == "train":
            for x, text in zip(found, self.inputs.split(", "), strict=True):
                x.requires_grad_(x.is_floating_point() and "fixed" not in text.split(":"))
        return found


def made(text: str, dtype: torch.dtype) -> Tensor:
    """The tensor that a text describes."""
    sizes, *words = text.split(":")
    shape = [int(n) for n in sizes.split("x")]
    layouts = {"t", "nhwc", "step", "part"}
    most = 0
    for word in (w for w in words if w not in layouts | {"pos", "fixed"}):
        name, _, bound = word.partition("<")
        dtype, most = DTYPES[name], int(bound or 0)
    if "t" in words:
        shape[-2:] = shape[:-3:-1]
    if "step" in words:
        shape[-1] *= 2
    if "part" in words:
        shape[-1] += 5
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32)
        x = (x.abs() + 0.1 if "pos" in words else x).to(dtype)
    else:
        least = int("pos" in words)
        x = torch.randint(least, most or (2 if dtype is torch.bool else 100), shape, dtype=dtype)
    if "nhwc" in words:
        order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.to(memory_format=order)
    if "t" in words:
        return x.transpose(-1, -2)
    if "step" in words:
        return x[..., ::2]
    return x[..., :-5] if "part" in words else x


def cases() -> Iterator[Case]:
    for family in FAMILIES:
        for program in family.programs:
            for inputs in family.inputs:
                for dtype in family.dtypes:
                    for mode in family.modes:
                        yield Case(family.name, program, inputs, dtype, mode)


# ------------------------------------------------------------------------------ functions


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions, pairs lying beside one another."""
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rope_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def quaternions(p: Tensor, q: Tensor) -> Tensor:
    a, b, c, d = p.unbind(-1)
    e, f, g, h = q.unbind(-1)
    return torch.stack(
        (a * e - b * f - c * g - d * h, a * f + b * e + c * h - d * g,
         a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e), -1,
    )  # fmt: skip


def patchify(x: Tensor, n: int) -> Tensor:
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // n, n, w // n, n).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(b, h * w // (n * n), n * n * c)


def unpatchify(x: Tensor, n: int, c: int) -> Tensor:
    b, p, _ = x.shape
    side = math.isqrt(p)
    x = x.reshape(b, side, side, n, n, c).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(b, c, side * n, side * n)


def padded(x: Tensor, mode: str) -> Tensor:
    """Three elements more on each side of the last axes."""
    return F.pad(x, (3, 3) * (x.dim() - 2), mode=mode)


def rbf(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-((x[:, None] - y[None]) ** 2).sum(-1))


def gumbel(x: Tensor) -> Tensor:
    return F.softmax(x - torch.log(-torch.log(torch.rand_like(x))), -1)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def image(x: Tensor) -> Tensor:
    """Bytes with channels last to normalised floats with channels first."""
    x = x.permute(0, 3, 1, 2).float() / 255
    return ((x - 0.45) / 0.22).contiguous()


def euler(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = x + 0.01 * torch.sin(x)
    return x


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2).contiguous()


def linears(x: Tensor, w: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = torch.relu(F.linear(x, w))
    return x


def written(x: Tensor, y: Tensor, at: int) -> Tensor:
    x[:, at] = y
    return x


def broken(x: Tensor) -> Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def masked_mean(x: Tensor, keep: Tensor) -> Tensor:
    weights = keep.to(x.dtype).unsqueeze(-1)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    return p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def channel_attention(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    s = F.silu(F.conv2d(x.mean((2, 3), keepdim=True), a))
    return x * torch.sigmoid(F.conv2d(s, b))


def rotated(x: Tensor, q: Tensor) -> Tensor:
    """Points turned by unit quaternions."""
    t = 2 * torch.linalg.cross(q[..., 1:], x)
    return x + q[..., :1] * t + torch.linalg.cross(q[..., 1:], t)


# ------------------------------------------------------------------------------ families

_SQUARE = ("1000x1000",)
_IMAGE = ("8x64x56x56", "8x64x56x56:nhwc")

# fmt: off
FAMILIES = (
    Family("small calls", ("8",), (
        "x + 1", "x.view(2, 4)", "x[2:6]", "x.sum()", "x.sum().item()", "x * 2 + 1", "x.exp()",
        "x.unsqueeze(0)", "torch.cat((x, x))", "x.clone()", "broken(x)", "F.softmax(x, 0)",
        "x.add_(0)", "(x, x + 1)",
    )),
    Family("small calls", ("8x8",), (
        "x.t()", "x.transpose(0, 1) + x", "x @ x", "x.chunk(2)", "F.layer_norm(x, (8,))",
        "x.reshape(4, 16)", "x[1]", "x[:, 0]", "x.flatten()",
    ), modes=TRAIN),
    Family("small calls", ("1x64, 64x64",), ("x @ y", "F.linear(x, y)", "torch.mm(x, y).relu()")),
    Family("small calls", ("2x16x64, 2x64",), ("written(x, y, 3)", "x + y[:, None]")),
    Family("small calls", ("4, 4x4, 4",), ("F.linear(x, y, z)",), modes=TRAIN),
    Family("small calls", ("4x4, 4x4, 4",), ("F.linear(x, y, z)",
        "F.mse_loss(F.linear(x, y, z), x)",
        "F.linear(torch.tanh(F.linear(x, y, z)), y, z)"), modes=TRAIN),
    Family("elementwise", _SQUARE, (
        "x + 1", "x.relu()", "x.sigmoid()", "x.tanh()", "F.gelu(x)",
        "F.gelu(x, approximate='tanh')",
        "F.silu(x)", "x.exp()", "x.sin() * x.cos()", "x.erf()", "x.erfc()", "F.softplus(x)",
        "F.mish(x)", "F.hardswish(x)", "F.elu(x)", "x.abs().sqrt()", "torch.rsqrt(x * x + 1)",
        "x ** 3", "x.abs() ** 0.7", "x.abs().log1p()", "x.clamp(-1, 1)", "F.leaky_relu(x, 0.1)",
        "x.expm1()", "x.atan()", "F.logsigmoid(x)", "x * x.sigmoid() + x",
    ), ("f32", "bf16"), TRAIN),
    Family("elementwise", ("64x1000",), (
        "x + 1", "x.exp()", "F.gelu(x)", "x.tanh()", "x * 2 + x", "x.round()", "x.floor()",
        "x.sign()", "x.reciprocal()", "x.tan()", "x.asinh()", "x.lgamma()", "x.digamma()",
        "x.sinh()", "x.exp2()", "x.frac()", "x.erfinv()", "x.log2()",
    ), ("f32", "f64", "f16")),
    Family("elementwise", ("1000x1000, 1000x1000", "1000x1000, 1000", "1000x1000:t, 1000x1000",
        "1000x1000:step, 1000x1000", "1000x1000, 1000x1", "1000x1000:part, 1000x1000:part"), (
        "x + y", "torch.where(x > y, x, y * 2)", "(x - y) ** 2", "torch.atan2(x, y)",
        "torch.lerp(x, y, 0.3)",
    )),
    Family("elementwise", ("1000x1000, 1000x1000:pos",), (
        "x / y", "torch.pow(y, x)", "torch.remainder(x, y)", "torch.fmod(x, y)",
        "torch.hypot(x, y)",
        "torch.remainder(x, 0.7)", "torch.maximum(x, y)", "torch.floor_divide(x, y)",
        "torch.addcmul(x, x, y)", "torch.copysign(x, y)", "torch.xlogy(x, y)",
        "torch.logaddexp(x, y)",
    ), ("f32", "bf16")),
    Family("converted", ("1000x1000",), (
        "x.to(torch.float32)", "x.to(torch.bfloat16)", "x.to(torch.float16)", "x.to(torch.int64)",
        "x.to(torch.float64)", "x > 0", "x.to(torch.uint8)",
    ), ("f32", "bf16", "i64")),
    Family("integers", ("1000x1000:i64<1000, 1000x1000:i64<1000",
        "1000x1000:i32<1000, 1000x1000:i32<1000",
        "1000x1000:u8, 1000x1000:u8"), (
        "x // (y + 1)", "x % (y + 1)", "x // 7", "x * y + x", "x & y", "x == y", "x << 2",
        "torch.minimum(x, y)", "(x > y).sum()", "x.sum(1)",
    ), ("i64",)),
    Family("reductions", ("100x10007", "1000x1000", "10007x100", "100000x17", "17x100000",
        "1000x1000:t"), (
        "x.sum(0)", "x.sum(1)", "x.sum()", "x.mean(0)", "x.amax(1)", "x.amax(0)", "x.argmax(1)",
        "x.argmax(0)", "x.var(1)", "x.var(0)", "x.logsumexp(1)", "x.norm(dim=1)",
    )),
    Family("reductions", ("1000x1000",), (
        "x.sum(0)", "x.sum(1)", "x.sum()", "x.mean(1)", "x.amax(1)", "x.std(0)", "x.prod(1)",
        "x.norm(p=3)", "x.norm(p=1, dim=0)", "x.max(1)", "x.max()", "x.argmin()",
        "x.aminmax(dim=1)",
        "(x > 0).any(1)", "(x > 0).sum(0)", "x.softmax(0)", "(x * x).sum()",
    ), ("f32", "bf16"), TRAIN),
    Family("reductions", ("64x100x128", "16x512x64", "8x12x128x128"), (
        "x.sum(1)", "x.mean((0, 2))", "x.amax(1)", "x.sum(-1)", "x.sum((0, 1))", "x.std(1)",
    ), modes=TRAIN),
    Family("reductions", _IMAGE, (
        "x.mean((2, 3))", "x.sum((0, 2, 3))", "x.amax((2, 3))", "x.mean(1)", "x.var((0, 2, 3))",
    ), ("f32", "bf16"), TRAIN),
    Family("softmax", ("64x1000", "1000x1000", "8x12x128x128", "4x50257", "1000x17", "4096x64"), (
        "F.softmax(x, -1)", "F.log_softmax(x, -1)",
    ), ("f32", "bf16"), TRAIN),
    Family("softmax", ("8x12x128x128, 128x128:bool",), (
        "F.softmax(x.masked_fill(y, -1e9), -1)", "F.softmax(x / 8, -1)", "F.softmax(x, 2)",
    ), modes=TRAIN),
    Family("norms", ("8x128x768, 768, 768", "512x64, 64, 64", "4096x256, 256, 256"), (
        "F.layer_norm(x, x.shape[-1:], y, z)", "rms_norm(x, y)",
        "F.layer_norm(x + z, x.shape[-1:], y, z)",
        "F.rms_norm(x, x.shape[-1:], y)",
    ), ("f32", "bf16"), TRAIN),
    Family("norms", ("8x64x56x56, 64, 64", "8x64x56x56:nhwc, 64, 64", "4x32x32x32, 32, 32"), (
        "F.group_norm(x, 8, y, z)", "F.instance_norm(x)", "F.batch_norm(x, None, None, y, z, True)",
        "F.relu(F.group_norm(x, 32, y, z))", "F.group_norm(x, 1, y, z)",
    ), ("f32", "bf16"), TRAIN),
    Family("norms", ("8x64x56x56, 64:fixed, 64:pos:fixed, 64, 64",
        "8x64x56x56:nhwc, 64:fixed, 64:pos:fixed, 64, 64"), (
        "F.batch_norm(x, y, z, u, v)", "F.relu(F.batch_norm(x, y, z, u, v))",
    ), modes=TRAIN),
    Family("norms", ("1000x256", "8x64x56x56"), (
        "F.normalize(x, dim=1)", "x / x.norm(dim=1, keepdim=True)",
        "(x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)",
    ), modes=TRAIN),
    Family("scans", ("100000x7", "1000x1000", "64x4096", "16x100x128"), (
        "x.cumsum(0)", "x.cumsum(1)", "x.cumsum(-1)", "x.abs().cumsum(1) / 2",
    ), ("f32", "bf16"), TRAIN),
    Family("scans", ("1000x1000", "1000x1000:t"), (
        "x.cumprod(1)", "x.cummax(1)[0]", "x.logcumsumexp(1)", "x.cumsum(0)", "x.cumsum(1)",
        "x.diff(dim=1)",
    )),
    Family("scans", ("1000x1000:i64<10", "1000x1000:bool"), ("x.cumsum(0)", "x.cumsum(1)"),
        ("i64",)),
    Family("transposes", ("1000x1000", "3210x100", "64x64", "17x5000"), (
        "x.t().contiguous()", "x.t() + 1", "x + 1", "torch.cat((x, x), 1)", "x.flip(1)",
        "x.flip(0)",
        "x.roll(3, 1)",
    ), ("f32", "bf16")),
    Family("transposes", ("3x2x1000x107", "8x12x128x64", "32x64x10x20"), (
        "x.permute(3, 2, 1, 0).contiguous()", "x.permute(0, 2, 1, 3).contiguous()",
        "x.transpose(-1, -2).contiguous()", "x.permute(1, 0, 3, 2).contiguous()",
        "x.permute(2, 3, 0, 1) * 2",
    ), ("f32", "bf16"), TRAIN),
    Family("transposes", ("8x3x224x224", "8x64x56x56", "8x64x56x56:nhwc", "2x256x14x14"), (
        "x.to(memory_format=torch.channels_last)", "x.contiguous()",
        "x.permute(0, 2, 3, 1).contiguous()",
        "x.flatten(2).transpose(1, 2).contiguous()", "x.relu().permute(0, 2, 3, 1).contiguous()",
    ), ("f32", "bf16")),
    Family("transposes", ("8x224x224x3:u8", "2x64x64x4:u8"), (
        "image(x)", "x.permute(0, 3, 1, 2).float()", "x.float() / 255",
        "x.permute(0, 3, 1, 2).contiguous()",
    ), ("u8",)),
    Family("transposes", ("8x3x224x224",), (
        "(x * 255).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()",
        "patchify(x, 16)", "patchify(x, 4)", "x.unfold(2, 16, 16).unfold(3, 16, 16).contiguous()",
        "F.pixel_unshuffle(x, 4)", "F.unfold(x, 4, stride=4)",
    ), ("f32", "bf16"), TRAIN),
    Family("transposes", ("8x196x768", "2x1024x48"), (
        "unpatchify(x, 4, x.shape[-1] // 16)", "x.transpose(1, 2).contiguous()", "heads(x, 12)",
        "F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (-1, 14)), 4) if x.shape[1] == 196 else x",
    ), ("f32", "bf16"), TRAIN),
    Family("transposes", ("1000x1000, 1000x1000", "8x128x64, 8x128x64"), (
        "torch.stack((x, y), -1)", "torch.stack((x, y))", "torch.cat((x, y), -1)",
        "torch.cat((x, y), 0)",
        "torch.stack((x + 1, y * 2), -1)", "torch.stack((x, y, x + y), -1)",
        "torch.stack((x, y, x - y, x + y), -1)", "torch.cat((x, y), -1).relu()",
        "torch.stack((x, y), 1)",
    ), ("f32", "bf16"), TRAIN),
    Family("positions", ("4x8x128x64, 128x32", "2x16x512x128, 512x64"), ("rope(x, y)",),
        ("f32", "bf16"), TRAIN),
    Family("positions", ("4x8x128x64, 128x64, 128x64", "2x16x512x128, 512x128, 512x128"),
        ("rope_halves(x, y, z)",), ("f32", "bf16"), TRAIN),
    Family("short axes", ("100000x3, 100000x3",), (
        "torch.linalg.cross(x, y)", "(x * y).sum(-1)", "(x - y).norm(dim=-1)",
        "F.normalize(x, dim=-1) + y",
        "torch.cat((x, y), -1)", "x + y", "x[:, 0] * y[:, 1]", "torch.cat((x, x[:, :1]), -1)",
        "F.cosine_similarity(x, y)",
    ), ("f32", "f64"), TRAIN),
    Family("short axes", ("300000x3, 3", "100000x7, 7", "100000x2, 2", "50000x5, 5"), (
        "x + y", "x * y", "(x * y).sum(-1)", "F.softmax(x + y, -1)", "x.amax(-1)", "x.argmax(-1)",
        "x.sum(0)",
    )),
    Family("short axes", ("50000x4, 50000x4",), ("quaternions(x, y)",
        "x / x.norm(dim=-1, keepdim=True)",
        "torch.stack((x, y), 1)"), ("f32",), TRAIN),
    Family("short axes", ("50000x3, 50000x4",), ("rotated(x, y)",), ("f32",), TRAIN),
    Family("padding", ("8x64x56x56", "8x64x56x56:nhwc", "64x1000x30", "2x3x224x224"), (
        "padded(x, 'circular')", "padded(x, 'reflect')", "padded(x, 'replicate')",
        "F.pad(x, (3, 3))", "F.pad(x, (1, 2), value=1.0) * 2", "F.pad(x, (0, 0, 1, 1))",
    ), ("f32", "bf16"), TRAIN),
    Family("resizing", ("8x32x28x28", "8x32x28x28:nhwc", "2x3x112x112"), (
        "F.interpolate(x, scale_factor=2)", "F.interpolate(x, scale_factor=2, mode='bilinear')",
        "F.interpolate(x, size=(40, 33), mode='bilinear')", "F.interpolate(x, scale_factor=0.5)",
        "F.interpolate(x, size=(20, 20), mode='area')",
        "F.interpolate(x, size=(40, 40), mode='bicubic')",
        "F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=True)",
        "F.interpolate(x, size=(31, 45), mode='nearest-exact')",
    ), modes=TRAIN),
    Family("pooling", ("8x64x56x56", "8x64x56x56:nhwc", "2x16x112x112"), (
        "F.max_pool2d(x, 2)", "F.max_pool2d(x, 3, 2, 1)", "F.avg_pool2d(x, 2)",
        "F.avg_pool2d(x, 3, 1, 1)",
        "F.adaptive_avg_pool2d(x, 7)", "F.adaptive_avg_pool2d(x, 1)", "F.adaptive_max_pool2d(x, 7)",
        "F.relu(F.max_pool2d(x, 2))",
    ), ("f32", "bf16"), TRAIN),
    Family("pooling", ("4x16x16x32x32",), ("F.avg_pool3d(x, 2)", "F.max_pool3d(x, 2)",
        "F.adaptive_avg_pool3d(x, 4)"),
        modes=TRAIN),
    Family("pooling", ("16x64x1000",), ("F.max_pool1d(x, 2)", "F.max_pool1d(x, 3, 1, 1)",
        "F.avg_pool1d(x, 4)",
        "F.lp_pool1d(x.abs(), 2, 3)", "F.adaptive_max_pool1d(x, 10)"), modes=TRAIN),
    Family("indexing", ("1000x1000, 1000:i64<1000",), (
        "x[y]", "x[:, y]", "x.index_select(0, y)", "x.index_select(1, y)",
        "x.gather(1, y[None].expand(100, -1))",
        "x.gather(1, y[:, None])", "x.index_add(0, y, x)", "x.index_add(1, y, x)", "x[y, y]",
        "x.index_copy(0, y, x)", "x.scatter(1, y[:, None], 1.0)",
        "x.scatter_add(1, y[None].expand(1000, -1), x)",
        "x.scatter_reduce(0, y[None].expand(1000, -1), x, 'amax')",
        "torch.take_along_dim(x, y[:, None], 1)",
        "x.index_fill(0, y[:10], 0)", "x.take(y)",
    ), modes=TRAIN),
    Family("indexing", ("1000x1000, 1000x1000:i64<1000",), (
        "x.gather(1, y)", "x.gather(0, y)", "x.scatter(1, y, x)", "torch.take_along_dim(x, y, 1)",
        "x.scatter_add(0, y, x)",
    ), ("f32", "bf16"), TRAIN),
    Family("indexing", ("64x128:i64<30000, 30000x256", "16:i64<1000, 1000x64"),
        ("F.embedding(x, y)", "F.embedding(x, y) * 16",
        "F.embedding(x, y).mean(1)", "F.embedding(x, y).sum(0)"), ("f32", "bf16"), TRAIN),
    Family("indexing", ("1000x1000",), (
        "x.repeat_interleave(3, 0)", "x.repeat_interleave(3, 1)", "x.repeat(2, 2)", "x.tile(3)",
        "x[::3]",
        "x[:, ::3].contiguous()", "x.tril()", "x.triu(1) * 2", "x.diagonal() + 1",
        "torch.diag_embed(x[:100])",
        "x[10:500, 20:700] + 1", "x.masked_fill(x > 0, 0)", "torch.where(x > 0, x, 0.0)",
        "x[:, 1:] - x[:, :-1]",
        "x.unfold(1, 5, 2).mean(-1)", "x.movedim(0, 1).contiguous()", "torch.rot90(x)",
        "x.expand(4, -1, -1).contiguous()",
    ), ("f32", "bf16"), TRAIN),
    Family("indexing", ("1000x1000, 1000x1000:bool",), (
        "x[y]", "x.masked_fill(y, 0)", "torch.where(y, x, -x)", "(x * y).sum(1)",
        "x.masked_select(y).sum()",
        "x.nonzero()",
    )),
    Family("indexing", ("4096:i64<100",), ("F.one_hot(x, 100)", "F.one_hot(x, 100).float()",
        "x.bincount()",
        "torch.bucketize(x, torch.arange(0, 100, 10))", "(x[:, None] == x[None, :500]).float()"),
        ("i64",)),
    Family("sorting", ("1000x1000", "64x5000"), ("x.sort(1)[0]", "x.topk(5)[0]", "x.argsort(0)",
        "x.kthvalue(10, 1)[0]",
        "x.median(1)[0]"), modes=TRAIN),
    Family("convolutions", ("8x32x56x56, 32x1x3x3", "8x32x56x56:nhwc, 32x1x3x3",
        "4x96x28x28, 96x1x5x5"), (
        "F.conv2d(x, y, padding=1, groups=x.shape[1])",
        "F.relu(F.conv2d(x, y, padding=1, groups=x.shape[1]))",
        "F.conv2d(x, y, padding=1, stride=2, groups=x.shape[1])",
    ), ("f32", "bf16"), TRAIN),
    Family("convolutions", ("8x64x28x28, 64x8x3x3", "8x32x56x56, 64x4x1x1"), (
        "F.conv2d(x, y, groups=8)", "F.conv2d(F.relu(x), y, groups=8)",
        "F.gelu(F.conv2d(x, y, groups=8))",
    ), modes=TRAIN),
    Family("convolutions", ("4x3x112x112, 16x3x3x3", "4x8x64x64, 8x8x3x3",
        "4x64x28x28, 64x64x3x3", "2x1x128x128, 4x1x5x5",
        "8x64x28x28:nhwc, 64x64x1x1", "8x128x14x14, 256x128x1x1"), (
        "F.conv2d(x, y)", "F.relu(F.conv2d(x, y))", "F.conv2d(x, y, stride=2)",
        "F.conv2d(x, y, padding=1) * 2 + 1",
    ), ("f32", "bf16"), TRAIN),
    Family("convolutions", ("8x64x500, 64x64x3", "8x32x1000, 32x1x5", "4x16x200, 32x16x7"), (
        "F.conv1d(x, y, groups=x.shape[1] // y.shape[1])",
        "F.relu(F.conv1d(x, y, groups=x.shape[1] // y.shape[1]))",
    ), modes=TRAIN),
    Family("convolutions", ("4x32x28x28, 32x16x2x2", "2x8x16x16, 8x8x4x4"),
        ("F.conv_transpose2d(x, y, stride=2)",
        "F.relu(F.conv_transpose2d(x, y, stride=2))"), modes=TRAIN),
    Family("convolutions", ("2x8x8x32x32, 16x8x3x3x3",), ("F.conv3d(x, y)",
        "F.relu(F.conv3d(x, y))"), modes=TRAIN),
    Family("convolutions", ("8x64x28x28, 16x64x1x1, 64x16x1x1",),
        ("channel_attention(x, y, z)",), modes=TRAIN),
    Family("products", ("64x8, 8x8", "128x64, 64x64", "512x512, 512x512", "8x128x256, 256x256",
        "1x1024, 1024x1024"), (
        "F.linear(x, y)", "F.relu(F.linear(x, y))", "F.gelu(x @ y)", "F.linear(x, y) + x",
        "linears(x, y, 5)",
        "F.softmax(F.linear(x, y), -1)",
    ), ("f32", "bf16"), TRAIN),
    Family("products", ("64x8, 8x8",), ("linears(x, y, 25)",), ("f32", "bf16"), TRAIN),
    Family("products", ("1000x4x4, 1000x4x4", "64x32x32, 64x32x32", "8x128x64, 8x64x128"), (
        "x @ y", "torch.bmm(x, y).relu()", "(x @ y).sum(-1)",
        "x.transpose(1, 2) @ y if x.shape[1] == y.shape[1] else x @ y",
    ), ("f32", "bf16"), TRAIN),
    Family("products", ("32x128x256, 128x256",), ("torch.einsum('bnd,nd->bn', x, y)",
        "torch.einsum('bnd,nd->bd', x, y)",
        "torch.einsum('bnd,nd->nd', x, y)", "torch.einsum('bnd,md->bnm', x, y)"), modes=TRAIN),
    Family("products", ("1000, 1000", "1000000, 1000000"), ("torch.dot(x, y)", "(x * y).sum()",
        "(x[:100, None] * y[None, :1000]).sum()"),
        modes=TRAIN),
    Family("products", ("512x512, 512",), ("torch.mv(x, y)", "x @ y + y",
        "torch.outer(y, y) + x"), modes=TRAIN),
    Family("attention", ("2x4x64x32, 2x4x64x32, 2x4x64x32", "1x8x512x64, 1x8x512x64, 1x8x512x64"), (
        "attention(x, y, z)", "F.scaled_dot_product_attention(x, y, z)",
        "F.scaled_dot_product_attention(x, y, z, is_causal=True).transpose(1, 2).flatten(2)",
    ), ("f32", "bf16"), TRAIN),
    Family("losses", ("64x1000, 64:i64<1000", "256x50257, 256:i64<50000", "4096x10, 4096:i64<10"), (
        "F.cross_entropy(x, y)", "F.cross_entropy(x, y, label_smoothing=0.1)", "F.nll_loss(x, y)",
        "F.multi_margin_loss(x, y)",
    ), modes=TRAIN),
    Family("losses", ("1000x1000, 1000x1000:fixed",), (
        "F.mse_loss(x, y)", "F.l1_loss(x, y)", "F.smooth_l1_loss(x, y)", "F.huber_loss(x, y)",
        "F.binary_cross_entropy_with_logits(x, y.sigmoid())",
        "F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1))",
        "F.cosine_similarity(x, y).mean()", "F.soft_margin_loss(x, y)", "F.poisson_nll_loss(x, y)",
    ), ("f32", "bf16"), TRAIN),
    Family("distances", ("500x16, 400x16", "1000x3, 1000x3"), (
        "rbf(x, y)", "torch.cdist(x, y)", "(x[:, None] - y[None]).abs().sum(-1)",
        "torch.cdist(x, y).argmin(1)", "F.pairwise_distance(x[:400], y[:400])",
    ), modes=TRAIN),
    Family("random", ("1000x1000",), ("F.dropout(x, 0.1)", "gumbel(x)", "x + torch.randn_like(x)",
        "torch.bernoulli(x.sigmoid())",
        "F.dropout(F.relu(x), 0.5) + x"), modes=TRAIN),
    Family("recurrences", ("64x64", "4x16"), ("euler(x, 5)", "euler(x, 30)",
        "euler(x, 100)"), modes=TRAIN),
    Family("updates", ("1000x1000, 1000x1000, 1000x1000, 1000x1000:pos",
        "8x8, 8x8, 8x8, 8x8:pos"), ("adam(x, y, z, u)",)),
    Family("updates", ("1000x1000, 1000x1000",), ("x.add_(y, alpha=-0.01)", "x.mul_(0.9).add_(y)",
        "x.copy_(y)", "x.zero_()",
        "x.clamp_(-1, 1)", "torch._foreach_add_([x, y], 1)"), ("f32", "bf16")),
    Family("gated", ("64x2048", "8x128x512"), ("F.glu(x)",
        "F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]",
        "F.gelu(x[..., ::2]) * x[..., 1::2]",
        "masked_mean(x, x[..., 0] > 0) if x.dim() == 3 else x.mean(0)"), ("f32", "bf16"), TRAIN),
    Family("left to ATen", ("256x256:c64, 256x256:c64",), ("x * y", "x @ y", "x.abs()",
        "x.real + y.imag"), ("c64",)),
    Family("left to ATen", ("256x256",), ("torch.fft.rfft(x)",
        "torch.fft.irfft(torch.fft.rfft(x) * 2)",
        "torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)", "torch.linalg.inv(x)",
        "torch.linalg.qr(x)[1]",
        "x.unique()", "x.histc(20)", "torch.cov(x)", "torch.linalg.norm(x)"), modes=RUN),
)
# fmt: on
