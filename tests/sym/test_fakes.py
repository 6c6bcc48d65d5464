"""Tensors without data: what programs see of their results is what eager gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fusee.fake import FakeTensor, fake_mode, fake_of

PROGRAMS: list[Callable[[Tensor], Any]] = [
    lambda x: F.linear(x, torch.ones(3, x.shape[-1]), torch.ones(3)),
    lambda x: x @ x.mT,
    lambda x: x.transpose(0, 1).reshape(-1),
    lambda x: x[:, 1:].select(0, 1).unsqueeze(-1).expand(-1, -1, -1, 2),
    lambda x: x.split(2, 1),
    lambda x: x.unsafe_chunk(2, -1),
    lambda x: torch.stack([x.contiguous(), x.contiguous()], -2),
    lambda x: torch.stack([x, x], 1),
    lambda x: x[..., ::2].clone(),
    lambda x: x[:1].expand(3, *x.shape[1:]).clone(),
    lambda x: x.unbind(0),
    lambda x: x.chunk(2, -1)[1].squeeze(),
    lambda x: x.relu_(),
    lambda x: x.clone().mul_(2).add_(x),
    lambda x: F.conv2d(x, torch.ones(6, 4, 3, 3), padding=1),
    lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4)),
    lambda x: F.max_pool2d(x, 2, stride=2, ceil_mode=True),
    lambda x: F.adaptive_avg_pool2d(x, (1, 1)).flatten(1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: x.softmax(-1).mean((1, 2), keepdim=True),
    lambda x: x.double() + torch.arange(x.shape[-1]),
    lambda x: torch.full((2, 3), 1.0) * torch.zeros(3, dtype=torch.int64),
    lambda x: x.masked_fill_(x > 0, -1.0),
    lambda x: (x.sum(), x.amax((0, 1)), x.argmax(-1), x.std()),
    lambda x: x.to(torch.float16).flip(0).roll(1),
    lambda x: torch.empty_strided((2, 3), (1, 2)).zero_(),
    lambda x: x.view(torch.int32) + 1,
    lambda x: (x > 0).any(),
    lambda x: (x.new_ones(2, 3), torch.full_like(x, 2.0), torch.zeros_like(x, dtype=torch.int32)),
    lambda x: (x.to("cpu", torch.float64), torch.ones_like(x, device="cpu")),
    lambda x: x[torch.tensor([[1], [2]]), torch.tensor([0, 3])],
    lambda x: torch._foreach_sqrt([x, x.int(), x.mT]) + torch._foreach_mul([x, x.half()], 2.0),
    lambda x: [torch.lerp(y, y.mT.mT, 0.5) for y in (x, x.double())],
    lambda x: torch.cat([torch.tensor([]), x, torch.tensor([[]]).view(0)], -2),
    lambda x: torch.cat([x, torch.tensor([1, 2]).double()[:0]], 1),
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True),
    lambda x: (2**x, 1 / x, torch.mvlgamma(x + 9, 2), torch.remainder(2, x), 2.5**x),
]
INPUTS = {
    "rows": lambda: torch.randn(4, 4, 6, 6),
    "channels last": lambda: torch.randn(4, 4, 6, 6).to(memory_format=torch.channels_last),
    "slice": lambda: torch.randn(4, 4, 6, 12)[..., ::2],
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_same_as_eager(number: int, kind: str) -> None:
    program, x = PROGRAMS[number], INPUTS[kind]()
    mode = fake_mode()
    fake = fake_of(mode, x)
    with torch.no_grad():
        try:
            want: Any = program(x)
        except RuntimeError:
            with pytest.raises(RuntimeError), mode:
                program(fake)
            return
        with mode:
            got = program(fake)
    for w, g in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
        assert isinstance(g, FakeTensor)
        assert (g.shape, g.stride(), g.dtype) == (w.shape, w.stride(), w.dtype)
        assert g.storage_offset() == w.storage_offset()
        assert g.device == w.device
        shares = g.untyped_storage()._cdata == fake.untyped_storage()._cdata
        assert shares == (w.untyped_storage()._cdata == x.untyped_storage()._cdata)


def test_a_dtype_follows_the_default() -> None:
    mode, before = fake_mode(), torch.get_default_dtype()
    x = fake_of(mode, torch.ones(3, dtype=torch.int32))
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with mode:
                assert torch.pow(2.5, x).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_gradients_are_seen() -> None:
    mode = fake_mode()
    weight = fake_of(mode, torch.nn.Parameter(torch.randn(3, 6)))
    x = fake_of(mode, torch.randn(2, 6))
    with mode:
        y = F.gelu(F.linear(x, weight))
    assert y.requires_grad
    assert y.grad_fn is not None
    assert not y.detach().requires_grad


def test_values_of_constants_are_known() -> None:
    mode = fake_mode()
    with mode:
        number = torch.tensor(3)
        assert number.item() == 3
        assert (number + 1).item() == 4
        number.add_(fake_of(mode, torch.tensor(1)))
        with pytest.raises(Exception, match=r"item|scalar"):
            number.item()


def test_devices_do_not_mix() -> None:
    mode = fake_mode()
    x = fake_of(mode, torch.randn(3))
    with mode, pytest.raises(RuntimeError):
        x + torch.empty(3, device="cuda")


COLD = """
import sys, torch, fusee
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.linear, self.last = nn.Linear(4, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu_(self.norm(self.conv(x))), 2)
        x = self.last(nn.functional.gelu(self.linear(x.mean((2, 3)))))
        q = x.view(2, 1, 2, 4).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).softmax(-1)

with torch.no_grad():
    fusee.compile(Model().eval(), backend=lambda gm, inputs: gm.forward, fullgraph=True)(
        torch.randn(2, 3, 8, 8)
    )
print(*[name for name in NAMES if name in sys.modules])
"""


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.clone().add_(torch.ones(5, 2, 3)),
        lambda x: torch.linalg.inv(x),
        lambda x: x.clone().fill_(torch.ones(3)),
    ],
)
def test_errors_are_raised_and_not_logged(
    wrong: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    mode = fake_mode()
    with mode, pytest.raises(RuntimeError):
        wrong(fake_of(mode, torch.ones(2, 3)))
    with pytest.raises(RuntimeError):
        wrong(torch.ones(2, 3))
    assert not caplog.records


def test_capture_imports_neither_sympy_nor_a_backend() -> None:
    # fusee.loops.operators is there: the rows that shape rules follow from
    compilers = ["fusee.backends.native", "fusee.loops.fusion", "fusee.loops.lower"]
    names = ["sympy", "torch._dynamo", "torch._inductor", *compilers]
    done = subprocess.run(
        [sys.executable, "-c", COLD.replace("NAMES", repr(names))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


OPEN = """
import sys
sys.modules["sympy"] = None  # whoever imports it gets an ImportError
import torch, fusee
import torch.nn.functional as F

def forward(x, k, q):
    y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    z = torch.where(x > 0, x, 2.0), k.abs(), k.cumprod(0), x.median(1), x.sort(0), x.unfold(1, 2, 1)
    z = z, torch.cdist(x, x), torch.diag_embed(x), F.pad(q, (1, 1, 1, 1), mode="reflect"), x.flip(0)
    z = z, F.interpolate(q, scale_factor=2.0), torch.linalg.cholesky(k * torch.eye(len(k)) + 1)
    z = z, torch.broadcast_tensors(x, x[:1]), torch.addcmul(x, x, x), x.cumsum(1).logsumexp(0)
    z = z, torch.rand_like(x), x.clone().exponential_(), x.count_nonzero(), k.clone().abs_()
    z = z, torch.fft.hfft(x + 0j), torch.fft.hfft2(x + 0j), k.take(torch.tensor([0, 1]))
    y = y.sum() + x.take(torch.tensor([0, 1])).sum() + torch.quantile(x, 0.5, dim=0).sum()
    y = y + torch.stft(x, 4, window=torch.ones(4), return_complex=True).abs().sum()
    y = y + x.clone().t_().unsqueeze_(1).sum()
    y = y + F.conv1d(q[0], q[0]).sum() + F.conv_transpose1d(q[0], q[0].transpose(0, 1)).sum()
    y = y + F.conv3d(q[None], q[None]).sum() + F.conv_transpose3d(q[None], q[:, :, None]).sum()
    y = y + torch.as_strided_scatter(x, k.float(), (len(k),), (1,)).sum()
    z = z, k.float().polygamma_(1), x[:, 1:].clone().addr_(x[:, 0], x[:, 0])
    z = z, torch.tril_indices(len(k), 3), torch.triu_indices(len(k), 3) // (k[0] * 0 + 2)
    z = z, torch.signal.windows.kaiser(len(k)), torch.unravel_index(k, (3, 3)), torch.fft.ihfft(x)
    z = z, F.max_unpool2d(*F.max_pool2d(q, 2, return_indices=True), 2, output_size=q.shape)
    triangle = torch.linalg.solve_triangular(x[:, 1:] + 9 * torch.eye(len(k)), x, upper=True)
    return y + triangle.sum() + x.exp().sum(), z

compiled = fusee.compile(forward, fullgraph=True)
for n in (4, 6, 7):
    x, k = torch.randn(n, n + 1, requires_grad=True), torch.arange(n)
    compiled(x, k, torch.randn(2, 3, n, 4, requires_grad=True))[0].backward()
"""
# What passes make of FakeTensors after the trace; C++ kernels that call kernels in Python.
AFTERWARDS = """
import sys
sys.modules["sympy"] = None
import torch, fusee
from torch import nn

layers = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 4)
convolutions = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)

def forward(x, image, rows, images):
    part = x[: x.int().abs().sum().item()]
    values = torch.linalg.svd(x)[1], part, x[x > 0], torch.nonzero(x), x.unique()
    return rows(x[None]).sum() + images(image).transpose(-1, -2).square().sum(), values

rows, images = nn.Sequential(*layers), nn.Sequential(*convolutions)
for grad in (False, True):
    compiled = fusee.compile(forward)
    with torch.set_grad_enabled(grad):
        for n in (6, 7, 9):
            y = compiled(torch.randn(n, 8), torch.randn(2, 4, 2 * n, 12), rows, images)[0]
            if grad:
                y.backward()
"""


@pytest.mark.parametrize("program", [OPEN, AFTERWARDS])
def test_open_sizes_need_no_sympy(program: str) -> None:
    run = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
