"""Complex tensors are ATen's calls in a graph whose other operators are compiled, in inference and
in training: values, gradients, views, writes, lazily conjugated and negated tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import fusee
from fusee.errors import FuseeWarning

Program = Callable[..., Any]

WAYS: dict[str, Callable[[Program], Program]] = {
    "fusee": fusee.compile,
    "aot_eager": lambda f: fusee.compile(f, backend="aot_eager"),
    "stock": lambda f: torch.compile(f, backend="fusee"),
}


def real(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def cplx(*size: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.view_as_complex(real(*size, 2)).to(dtype)


# ------------------------------------------------------------------------------ programs


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    factors = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex((x * 2).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors[:, None]).flatten(3) + 1


def convolved(x: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(x * 2) * torch.fft.fft(x.cos())).real.sin()


def real_transform(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x * 2, dim=1) * 2j, dim=1) + 1


def spectrogram(x: Tensor) -> Tensor:
    window = torch.hann_window(16)
    return torch.stft(x.tanh() * 2, 16, 4, window=window, return_complex=True).abs().log1p()


def lazily(z: Tensor) -> Any:
    return z.conj(), z.conj().imag * 2, z.imag, z.real, torch.view_as_real(z)


def constants(z: Tensor) -> Any:
    """Of what a graph holds it gives copies."""
    c = torch.tensor([[1 + 2j, 3j], [4 - 1j, 5j]])
    return z * c, c.conj(), c.mH, c.conj().imag, c.conj()[:1].imag


def lazily_fresh(z: Tensor) -> Any:
    return (z * 2).conj(), (z * 2).conj().imag, (z * 3).mH, (z * 4).imag.neg()


def products(z: Tensor) -> Any:
    return (z @ z.mH).abs() + 1, torch.linalg.inv(z) @ z.conj(), torch.linalg.det(z), F.linear(z, z)


def pointwise(z: Tensor) -> Any:
    return z.abs() * 2, z.angle(), torch.sgn(z), z.exp().real.relu(), z.mean() + z.sum(0)


def rearranged(z: Tensor) -> Any:
    chosen = torch.cat([z, z * 2, z.conj()]).reshape(4, -1).t()[1:].real.contiguous() + 1
    return chosen, torch.where(z.real > 0, z, -z.conj()), z[torch.tensor([0, 2])][:, 1:] + z[0, 0]


def from_reals(a: Tensor, b: Tensor) -> Any:
    return torch.complex(a.sin(), b.cos()).prod(-1), a * 1j + 2, (a + 1).to(torch.complex64)


def filtered(z: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(z, w).abs()


PROGRAMS: list[tuple[Program, Sequence[Tensor]]] = [
    (rotary, (real(2, 6, 4, 8), real(6, 4))),
    (convolved, (real(3, 8),)),
    (real_transform, (real(2, 6, 4),)),
    (spectrogram, (real(2, 64),)),
    (lazily, (cplx(3, 4),)),
    (lazily_fresh, (cplx(3, 4),)),
    (constants, (cplx(2, 2),)),
    (products, (cplx(4, 4, dtype=torch.complex128),)),
    (pointwise, (cplx(3, 4),)),
    (rearranged, (cplx(4, 4),)),
    (from_reals, (real(3, 4), real(3, 4))),
    (filtered, (cplx(1, 2, 6, 6), cplx(3, 2, 3, 3))),
]


def written_halves(z: Tensor) -> Tensor:
    z.real.mul_(2)
    z.imag.add_(1)
    return z * 2


def written_inputs(z: Tensor, x: Tensor) -> Tensor:
    z.mul_(1j)
    x.add_(1)
    view = torch.view_as_real(z)
    view[..., 0] = 3
    return view.sum() + x


def written_views(x: Tensor) -> Any:
    y = x * 2
    z = torch.view_as_complex(y)
    z.conj_physical_()
    w = y.sin()
    z.copy_(z.conj() * 2)
    return y, w, z


def written_below_a_view(x: Tensor) -> Any:
    z = torch.view_as_complex(x)
    before = z * 1
    x.mul_(2)
    return before, z * 1, z


WRITES: list[tuple[Program, Sequence[Tensor]]] = [
    (written_halves, (cplx(3, 4),)),
    (written_inputs, (cplx(3, 4), real(3))),
    (written_views, (real(3, 2),)),
    (written_below_a_view, (real(3, 2),)),
]


# ------------------------------------------------------------------------------ tests


def outcome(f: Program, inputs: Sequence[Tensor], with_grad: bool) -> list[Any]:
    given = [x.clone().requires_grad_(with_grad) for x in inputs]
    with torch.set_grad_enabled(with_grad):
        results = pytree.tree_leaves(f(*given))
        loss = torch.zeros(())
        for k, x in enumerate(results if with_grad else ()):
            weights = torch.linspace(0.5, 1.5, x.numel()).view_as(x)
            loss = loss + (x * weights).abs().square().sum() / (k + 1)
    if with_grad:
        loss.backward()
    return [*results, *(x.grad if with_grad else x for x in given)]


def same(ours: Sequence[Any], eager: Sequence[Any]) -> None:
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        assert x.stride() == y.stride()
        assert (x.is_conj(), x.is_neg()) == (y.is_conj(), y.is_neg())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("f", "inputs"), PROGRAMS)
def test_as_eager(f: Program, inputs: Sequence[Tensor], way: str) -> None:
    if way == "stock" and f not in (rotary, lazily, products):
        pytest.skip("another capture of the same graphs")
    torch._dynamo.reset()
    compiled = WAYS[way](f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FuseeWarning)
        for with_grad in (False, True):
            for _ in range(2):
                ours = outcome(compiled, inputs, with_grad)
            same(ours, outcome(f, inputs, with_grad))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("f", "inputs"), WRITES)
def test_writes(f: Program, inputs: Sequence[Tensor], way: str) -> None:
    torch._dynamo.reset()
    compiled = WAYS[way](f)
    for _ in range(2):
        ours = outcome(compiled, inputs, with_grad=False)
    same(ours, outcome(f, inputs, with_grad=False))


@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_are_lazily_conjugated_or_negated(way: str) -> None:
    def f(z: Tensor, y: Tensor) -> Any:
        return z * 2, y + 1, z, y.sin(), z.conj(), y * z

    torch._dynamo.reset()
    compiled, z = WAYS[way](f), cplx(3, 4)
    with torch.no_grad():
        for given in ((z, z.real), (z.conj(), z.real), (z, z.imag), (z.conj(), z.conj().imag)):
            same(compiled(*given), f(*given))


def test_writes_that_read_what_others_write() -> None:
    def copied(a: Tensor, b: Tensor) -> None:
        b.mul_(0.5)
        a.copy_(b.sin())

    def swapped(a: Tensor, b: Tensor) -> None:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    def turned_back(a: Tensor, b: Tensor) -> None:
        part = torch._neg_view(b)
        part.fill_(0.5)
        b.copy_(part)

    for f in (copied, swapped, turned_back):
        for bits in (lambda x: x, torch._neg_view):
            ours, eager = ([real(3, 4), real(4, 3).t()] for _ in range(2))
            for memory, call in ((ours, fusee.compile(f)), (eager, f)):
                call(torch._neg_view(memory[0]), bits(memory[1]))
            torch.testing.assert_close(ours, eager)


def test_memory_of_what_is_lazily_conjugated_or_negated() -> None:
    """`as_strided` counts from where the memory begins, and is read as its tensor is."""

    def f(z: Tensor, y: Tensor) -> Any:
        given = torch._neg_view(y), torch._neg_view(y * 1), (z * 1).conj(), y * 1
        return [x.as_strided((2, 2), (1, 1)) for x in given]

    for bits in (lambda x: x, torch._neg_view):
        for how in (None, True):
            given = cplx(3, 4), bits(real(3, 4))
            with torch.no_grad():
                same(fusee.compile(f, dynamic=how)(*given), f(*given))


def filled_then_halves(z: Tensor, y: Tensor) -> Any:
    z.fill_(2 + 1j)
    z.imag.add_(3)
    z[0] = 1
    return z.real * 1, z.conj().imag + 1


def written_then_negated(z: Tensor, y: Tensor) -> Any:
    z.imag.mul_(2)
    y.mul_(2)
    return torch._neg_view(y) + 1, torch._neg_view(z.conj().imag)


def written_through_conj(z: Tensor, y: Tensor) -> Any:
    z.conj().imag.mul_(2)
    z.real[1:] = 0.5
    return (y + 1,)


def copied_of_lazy(z: Tensor, y: Tensor) -> Any:
    x, part = z * 1, y * 1
    x.copy_(z.conj())
    x[1:].copy_(z.conj()[:-1])
    part.copy_(z.conj().imag)
    return torch.view_as_real(x), torch.view_as_real(x[1:]), part[1:] + 1, torch._neg_view(part)


@pytest.mark.parametrize(
    "f", [filled_then_halves, written_then_negated, written_through_conj, copied_of_lazy]
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_written_is_read_as_its_target(f: Program, dynamic: bool | None) -> None:
    for turned in (lambda x: x, torch.t, lambda x: x[:, :1].expand(3, 1)):
        compiled = fusee.compile(f, dynamic=dynamic)  # a version for each kind of z
        for bits in (lambda x: x, torch.conj, torch._neg_view, lambda x: torch._neg_view(x.conj())):
            told = []
            for call in (compiled, f):
                given = [turned(bits(cplx(3, 3))), turned(bits(cplx(3, 3)).imag)]
                told.append([*call(*given), *given])
            same(*told)


def test_what_goes_from_stage_to_stage_is_negated_as_it_was() -> None:
    def f(x: Tensor) -> Any:
        y = torch._neg_view(x.unique(dim=0)[:1])
        return y, torch._neg_view(y[:, : y.unique().numel()]) + 1

    x = real(3, 3)
    found = fusee.compile(f, dynamic=True)(x)
    same(found, f(x))
    assert found[0].is_neg()


OF_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "broadcast_tensors": lambda z: torch.broadcast_tensors(z, z.new_ones(3, 3))[0].mul_(2),
    "meshgrid": lambda z: torch.meshgrid(z[0], z[0], indexing="ij")[0][:, 1],
    "atleast_3d": lambda z: torch.atleast_3d(z).mul_(3),
    "einsum": lambda z: torch.einsum("...ii->...i", z).sinh_(),
    "a product by einsum": lambda z: torch.einsum("ij,jk->ik", z, z),
    "swapaxes_": lambda z: z.expand_as(z).swapaxes_(0, -1).mul_(2),
}


@pytest.mark.parametrize("name", OF_VIEWS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_composed_of_views_makes_no_copy(name: str, dynamic: bool | None) -> None:
    compiled = fusee.compile(OF_VIEWS[name], dynamic=dynamic, options={"prices": False})
    for bits in (lambda x: x, torch.conj, torch._neg_view, lambda x: torch._neg_view(x.conj())):
        told = []
        for call in (compiled, OF_VIEWS[name]):
            memory = cplx(3, 3)
            found = call(bits(memory))
            shared = found.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
            told.append((found, memory, shared))
        same(told[0][:2], told[1][:2])
        assert told[0][2] == told[1][2]


@pytest.mark.parametrize("bits", [torch.conj, torch._neg_view])
def test_open_sizes_of_a_written_input_that_is_lazily_flipped(bits: Callable[..., Tensor]) -> None:
    def f(x: Tensor) -> Tensor:
        x[0].mul_(2)
        return x * 2

    compiled = fusee.compile(f, dynamic=True)
    for n in (3, 5):
        told = []
        for call in (compiled, f):
            leaf = cplx(n, n) if bits is torch.conj else real(n, n)
            found = call(bits(leaf.requires_grad_() * 1))
            found.abs().sum().backward()
            told.append((found, leaf.grad))
        torch.testing.assert_close(*told)


def test_a_tangent_that_is_lazily_negated() -> None:
    f, x, z = fusee.compile(lambda x: x.sin() * 2), real(3, 4).requires_grad_(), cplx(3, 4)
    (ours,) = torch.autograd.grad(f(x), x, z.conj().imag)
    (eager,) = torch.autograd.grad(x.sin() * 2, x, z.conj().imag)
    torch.testing.assert_close(ours, eager)


def test_reals_behind_a_result_that_is_lazily_conjugated() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).to(torch.complex64).conj()

    x = real(3, 4).requires_grad_()
    ours, eager = (torch.autograd.grad(call(x).abs().sum(), x) for call in (fusee.compile(f), f))
    torch.testing.assert_close(ours, eager)


class _Rotated(torch.nn.Module):
    """The factors depend on buffers alone: made once, and kept by the forward for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", real(4, 6))

    def forward(self, x: Tensor) -> Any:
        factors = torch.polar(torch.ones(6, 4), self.get_buffer("angles").t()) * 1.0
        return torch.view_as_real(torch.view_as_complex(x * 2) * factors) + 1, factors


def test_what_depends_on_buffers_alone() -> None:
    module, x = _Rotated(), real(3, 6, 4, 2)
    for with_grad in (False, True):
        ours = outcome(fusee.compile(module), (x,), with_grad)
        same(ours, outcome(module, (x,), with_grad))


def test_what_is_around_them_is_compiled() -> None:
    compiled = fusee.compile(rotary, fullgraph=True)
    with torch.no_grad():
        compiled(real(2, 6, 4, 8), real(6, 4))
    (report,) = fusee.report(compiled)
    assert {row.reason for row in report.externs} == {"tensors of complex64"}
    assert len(report.kernels) == 3
