"""Layers and functions over sizes at the edge: 0, 1, a kernel's own, equal ones. Beside eager."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.capture.captured import Entry

Program = tuple[Callable[..., Any], Callable[[int, int], tuple[Tensor, ...]]]

SIZES = (0, 1, 2, 3, 4, 5, 8, 17)


def r(*size: int) -> Tensor:
    return torch.randn(*size)


def images(a: int, b: int) -> tuple[Tensor, ...]:
    return (r(2, 4, a, b),)


def rows(a: int, b: int) -> tuple[Tensor, ...]:
    return (r(a, b),)


def two(a: int, b: int) -> tuple[Tensor, ...]:
    return r(a, b), r(a, b)


def tokens(a: int, b: int) -> tuple[Tensor, ...]:
    return (r(a, b, 4),)


def mean_of_some(x: Tensor) -> Tensor:
    some = x[x.sum(1) > 0]
    return some.sum(0) / max(some.shape[0], 1)


def part_of_some(x: Tensor) -> Tensor:
    begin = int((x[:, :1] > 0).sum())
    part = x[begin : begin + 1]
    return part[part > 0] * 2


def shifted(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:] = x[:-1]
    y[0] = 3
    return y


PROGRAMS: dict[str, Program] = {
    "convolution": (nn.Conv2d(4, 3, 3), images),
    "stride": (nn.Conv2d(4, 3, 3, 2, 1), images),
    "dilation": (nn.Conv1d(4, 3, 3, dilation=2), lambda a, b: (r(b, 4, a),)),
    "circular": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), images),
    "transposed": (nn.ConvTranspose2d(4, 3, 3, 2, 1, 1), images),
    "pool": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), images),
    "average": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), images),
    "adaptive": (nn.AdaptiveAvgPool2d(3), images),
    "norm of batches": (nn.BatchNorm1d(4), lambda a, b: (r(a, 4, b),)),
    "norm of instances": (nn.InstanceNorm2d(4), images),
    "norm of layers": (nn.LayerNorm(4), tokens),
    "recurrent": (nn.GRU(4, 3, batch_first=True), tokens),
    "transformer": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), tokens),
    "resized": (nn.Upsample(scale_factor=1.5), images),
    "reflected": (nn.ReflectionPad2d(2), images),
    "unfolded": (nn.Unfold(2), images),
    "shuffled": (lambda x: F.channel_shuffle(x, x.shape[1] // 2), lambda a, b: (r(2, 2 * a, b),)),
    "loss": (nn.CrossEntropyLoss(), lambda a, b: (r(a, 5, b), torch.randint(0, 5, (a, b)))),
    "product": (torch.matmul, lambda a, b: (r(a, b), r(b, a))),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), lambda a, b: (r(a, b), r(3, b))),
    "outer": (torch.outer, lambda a, b: (r(a), r(b))),
    "broadcast": (lambda x, y: x * y + x, lambda a, b: (r(a, 1), r(b))),
    "sum so far": (lambda x: x.cumsum(0), rows),
    "sorted": (lambda x: x.sort(0)[0], rows),
    "largest": (lambda x: x.topk(2)[0], rows),
    "maximum": (lambda x: x.max(1)[0], rows),
    "deviation": (lambda x: x.std(0), rows),
    "variance": (lambda x: (x - x.mean(0)) / (x.var(0, correction=2) + 1), rows),
    "product of all": (lambda x: x.prod(0), rows),
    "logsumexp": (lambda x: x.logsumexp(1), rows),
    "gathered": (lambda x: x[x.argmin(0)], rows),
    "diagonal": (lambda x: torch.diagonal(x) + x.tril(1).sum(), rows),
    "turned": (lambda x: x.roll(1, 0).flip(1).t().reshape(-1) * 2, rows),
    "split": (lambda x: torch.cat(x.split(2)[::-1]), rows),
    "chunks": (lambda x: x.chunk(2)[0] * 2, rows),
    "slices": (lambda x: x[1:-1, ::2] + 1, rows),
    "ends": (lambda x: x[-2:] + x[:2], rows),
    "padded": (lambda x: F.pad(x, (1, -1, 0, 2)), rows),
    "written": (shifted, rows),
    "stacked": (lambda x, y: torch.stack([x, y], 1).repeat(2, 1, 1), two),
    "chosen": (lambda x, y: torch.where(x > 0, x, y), lambda a, b: (r(a, b), r(a, 1))),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda a, b: (r(1, 2, a, 4),),
    ),
    "bicubic": (lambda x: F.interpolate(x, size=(5, 4), mode="bicubic"), images),
    "mean of some": (mean_of_some, rows),
    "kept": (lambda x, y: x[y > 0] * 2, two),
    "kept of a part": (part_of_some, rows),
    "distances": (torch.cdist, lambda a, b: (r(a, 3), r(b, 3))),
}


def told(call: Callable[..., Any], parameters: list[Tensor], given: tuple[Tensor, ...]) -> Any:
    """The result and the gradients of all that has some; an exception as its type."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    try:
        found = call(*inputs)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        weights = torch.arange(out.numel()).view(out.shape).cos()
        of = [x for x in (*inputs, *parameters) if x.requires_grad]
        return out, *torch.autograd.grad((out * weights).sum(), of, allow_unused=True)
    except Exception as error:  # noqa: BLE001  # which one is compared
        return type(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_at_the_edges_of_sizes(name: str, dynamic: bool | None) -> None:
    program, make = PROGRAMS[name]
    is_module = isinstance(program, nn.Module)
    eager = copy.deepcopy(program) if is_module else program
    draw = random.Random(f"{name} {dynamic}")
    compiled = fusee.compile(program, dynamic=dynamic)
    for _ in range(6):
        given = make(draw.choice(SIZES), draw.choice(SIZES))
        want, got = (
            told(call, list(of.parameters()) if isinstance(of, nn.Module) else [], given)
            for call, of in ((eager, eager), (compiled, program))
        )
        if isinstance(want, type) or isinstance(got, type):
            assert want is got, (name, [x.shape for x in given])
            continue
        torch.testing.assert_close(got, want, atol=3e-4, rtol=3e-4, equal_nan=True)


# ---------------------------------------------------------------------------- one open version
# What takes numbers made of sizes: two versions serve all, a static one and an open one.

Call = Callable[[int, int], tuple[Any, ...]]


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-5) + x.var(1, keepdim=True)


def resized(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:]) * F.interpolate(x, like.shape[2:], mode="area")


def nucleus(x: Tensor, p: float) -> Tensor:
    values, order = x.softmax(-1).sort(descending=True)
    left = values.masked_fill((values.cumsum(-1) - values > p) | (p > 2 * values + 1), 0)
    return torch.zeros_like(x).scatter(-1, order, left)


def per_segment(x: Tensor, places: Tensor, n: int) -> Tensor:
    total = x.new_zeros(n, x.shape[1]).index_add(0, places, x)
    return total / torch.bincount(places, minlength=n)[:n].clamp(min=1)[:, None]


def windows(x: Tensor) -> Tensor:
    a, b = x.shape
    y = x * torch.hann_window(b) + torch.hamming_window(b, False) * torch.bartlett_window(b)
    y = y * torch.kaiser_window(b) + torch.kaiser_window(b, False, 4.0)
    return y + torch.blackman_window(a)[:, None] * torch.signal.windows.exponential(b)


def triangles(x: Tensor, y: Tensor) -> Tensor:
    i, j = torch.tril_indices(*x.shape)
    k = torch.triu_indices(len(y), len(y), 1)
    return torch.cat([x[i, j], y[k[0], k[1]]])


def norms(x: Tensor) -> Tensor:
    of = torch.linalg
    tall = [of.matrix_norm(x.expand(2, *x.shape), p, (0, 2), keepdim=True) for p in (1, -math.inf)]
    high = x[:, :3]  # which side is longer decides on gradients
    return of.norm(high, 2) + of.matrix_norm(high, "nuc") * of.norm(x, -1) + torch.cat(tall).sum()


def slopes(x: Tensor) -> Tensor:
    steep = torch.gradient(x, spacing=[2.0, 0.5], edge_order=2)
    return steep[0] * steep[1] + torch.gradient(x, dim=-1)[0]


def whole_windows(x: Tensor) -> Tensor:
    n, m = x.shape[2:]
    y = F.max_pool2d(x, (n, m)) * F.avg_pool2d(x, x.shape[2:])
    z, at = F.max_pool2d(x, (n // 2, 2), (1, 2), (1, 0), return_indices=True)
    deep = F.avg_pool3d(x, (1, n // 2, m), (1, 1, 2)) + F.max_pool3d(x, (1, n // 2, m), (1, 1, 2))
    line = F.max_pool1d(x[0], m) * F.avg_pool1d(x[1], m) + F.avg_pool1d(x[0], 3)
    return y.mean() * z * (1 + at % 2) + deep.mean() + line.mean()


def adaptive(x: Tensor) -> Tensor:
    n, m = x.shape[2:]
    size: Any = n // 2, None
    y, at = F.adaptive_max_pool2d(x, size, return_indices=True)
    z = F.adaptive_max_pool1d(x[0], m // 2) * F.adaptive_avg_pool1d(x[0], m // 2)
    deep = F.adaptive_max_pool3d(x, (2, n // 3, m))[0]
    return (y * at.sqrt()).sum() + z + deep.mean(1, keepdim=True)[..., : m // 2].sum(0)


def fractions(x: Tensor, draws: Tensor) -> Tensor:
    n, m = x.shape[2] - 2, x.shape[3] // 3
    drawn: Any = {"_random_samples": draws.detach()[..., :2]}
    y = F.fractional_max_pool2d(x, 2, (n, m), **drawn)
    z = F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5), **drawn)
    deep: Any = {"output_ratio": (0.4, 0.5, 0.5), "_random_samples": draws.detach()[:1, :2]}
    return y.sum(2) * z.sum((2, 3))[..., None] + F.fractional_max_pool3d(x, 2, **deep).sum()


def slopes_between(x: Tensor) -> Tensor:
    places = [torch.arange(n) + torch.arange(n).sin() / 4 for n in x.shape]
    first, last = torch.gradient(x, spacing=places, edge_order=2)
    return first + last + torch.gradient(x, spacing=places[1:], dim=-1)[0]


def picked(x: Tensor, y: Tensor) -> Tensor:
    at = x.argsort(1)[:1]
    return torch.take_along_dim(x.sgn() + y, at, 1) + torch.masked_select(x, y > 0).sum()


def soft_targets(x: Tensor, weight: Tensor) -> Tensor:
    t = x.detach().flip(0).softmax(1)
    loss = [
        F.cross_entropy(x, t, weight, reduction=how, label_smoothing=0.1 * k)
        for k, how in enumerate(("mean", "sum", "none"))
    ]
    return loss[0] * loss[2] + loss[1]


def running(x: Tensor) -> Tensor:
    x = x.masked_fill(x.abs() < 0.4, 0)  # no zero, one, and several of a row
    of_rows = x.prod(1, keepdim=True) + x.prod(0) + x[:2, :5].prod()
    return x.cumprod(1) + torch.linalg.vander(x)[..., -1] + x.cumprod(0) + of_rows


def grid(x: Tensor, turn: Tensor) -> Tensor:
    flat = F.affine_grid(turn[:, :2, :3], [*x.shape], align_corners=False)
    deep = F.affine_grid(turn, [2, 1, *x.shape[1:]], align_corners=True)
    return F.grid_sample(x, flat, align_corners=False) * deep.square().mean()


def quantiles(x: Tensor) -> Tensor:
    y = x.masked_fill(x > 1, math.nan)
    made = x.quantile(0.3, 1) * y.nanquantile(0.6, 1, interpolation="midpoint") + x.quantile(0.5)
    return made + y.quantile(0.2, 0, True, interpolation="nearest").nansum()


def filled_up(x: Tensor) -> Tensor:
    n, m = x.shape[-2:]
    more = 0, math.ceil(m / 4) * 4 - m, 0, -n % 4
    y = F.pad(x, more, mode="reflect")[..., :n, :m] * F.pad(x, more, "replicate").mean()
    return y + F.pad(x, (m // 4, 0), "reflect").mean()


ONE_VERSION: dict[str, tuple[Callable[..., Any], Call]] = {
    "deviation": (standardized, rows),
    "size of another": (resized, lambda a, b: (r(2, 3, a, b), r(1, 1, 2 * a + 1, b + 3))),
    "times 1.7": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), images),
    "times 0.3": (
        lambda x: F.interpolate(x, scale_factor=0.3, recompute_scale_factor=True),
        images,
    ),
    "over 1.7": (lambda x: x[: math.ceil(x.shape[0] / 1.7), int(x.shape[1] * 0.9) :], rows),
    "pool of rows": (nn.MaxPool1d(3, 2, 1, ceil_mode=True), lambda a, b: (r(2, a, b),)),
    "kronecker": (lambda x, y: torch.kron(x, y), lambda a, b: (r(a, 2), r(3, 2, b))),
    "a float that is compared": (nucleus, lambda a, b: (r(2, a), 1 / b)),
    "steps": (lambda x: torch.linspace(-1, 1, x.shape[1]) * x, rows),
    "members": (lambda x, y: torch.isin((x * 9).round(), (y * 9).round()), two),
    "ragged": (
        lambda *xs: nn.utils.rnn.pad_sequence([*xs], batch_first=True, padding_value=2.0).tanh(),
        lambda a, b: (r(a, 3), r(b, 3), r(abs(a - b) + 2, 3)),
    ),
    "windows": (windows, rows),
    "windows over all": (whole_windows, lambda a, b: (r(2, 3, a, b),)),
    "pools of open sizes": (adaptive, lambda a, b: (r(2, 3, a, b),)),
    "pools of a fraction": (fractions, lambda a, b: (r(2, 3, a, b), torch.rand(2, 3, 3))),
    "slopes between places": (slopes_between, rows),
    "picked": (picked, two),
    "blocks": (lambda x, y: torch.block_diag(x, y[0], y[0, 0], y.double()), two),
    "soft targets": (soft_targets, lambda a, b: (r(a, b), r(b).abs())),
    "bags": (
        lambda i, x: F.embedding_bag(i, x, mode="mean", padding_idx=1),
        lambda a, b: (torch.randint(0, a, (3, b)), r(a, 3)),
    ),
    "running products": (running, rows),
    "thinned": (
        lambda x: F.interpolate(x, scale_factor=0.6, mode="bicubic", antialias=True),
        images,
    ),
    "filled up": (filled_up, lambda a, b: (r(2, a, b),)),
    "grid": (grid, lambda a, b: (r(2, 3, a, b), r(2, 3, 4))),
    "quantiles": (quantiles, rows),
    "covariance": (lambda x: torch.cov(x) - torch.corrcoef(x) * torch.cov(x, correction=0), rows),
    "norms of matrices": (norms, rows),
    "slopes": (slopes, rows),
    "product of several": (
        lambda x, y: torch.linalg.multi_dot(
            [x, x.mT, x, y.mT[: x.shape[1]], y[0, :1].expand(1, 3)]
        ),
        lambda a, b: (r(3, b), r(1, b)),
    ),
    "histogram": (
        lambda x: torch.histogram(x.detach(), x.detach()[0].sort()[0])[0] + x[:, 1:],
        rows,
    ),
    "bilinear": (
        lambda x, y, w: F.bilinear(x, y, w),
        lambda a, b: (r(3, a), r(3, b), r(4, a, b)),
    ),
    "triangles": (triangles, lambda a, b: (r(a, b), r(b, b))),
    "classes": (
        lambda i, x: F.one_hot(i, x.shape[0]).to(x) @ x,
        lambda a, b: (torch.randint(0, a, (b,)), r(a, 3)),
    ),
    "counts": (per_segment, lambda a, b: (r(b, 2), torch.randint(0, a, (b,)), a)),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", ONE_VERSION)
def test_numbers_made_of_sizes_stay_open(name: str, learns: bool, entries: list[Entry]) -> None:
    if name == "quantiles" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 compares values there")
    program, inputs = ONE_VERSION[name]
    compiled = fusee.compile(program, fullgraph=True)
    for a, b in ((7, 12), (9, 15), (20, 31), (13, 8), (33, 40), (11, 50)):
        found = []
        torch.manual_seed(a)
        given = inputs(a, b)
        for run in (program, compiled):
            xs = [
                x.clone().requires_grad_(learns and x.is_floating_point())
                if isinstance(x, Tensor)
                else x
                for x in given
            ]
            with torch.set_grad_enabled(learns):
                y = run(*xs)
            if learns and y.requires_grad:
                y.square().sum().backward()
            found.append((y.detach(), [x.grad for x in xs if isinstance(x, Tensor)]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert len(entries) == 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_classes_of_a_turned_tensor_lie_in_rows(dynamic: bool | None) -> None:
    def program(i: Tensor, x: Tensor) -> Any:
        return F.one_hot(i.T, 3) * 2, x.cos()

    compiled = fusee.compile(program, dynamic=dynamic, options={"prices": False})
    for a in (3, 5):
        given = torch.randint(0, 3, (a, 2)), torch.ones(a, requires_grad=True)
        want, got = program(*given)[0], compiled(*given)[0]
        assert got.equal(want) and got.stride() == want.stride()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.combinations(x[0], 2, True) * torch.combinations(x[:, 0]).sum(),
    ],
)
def test_what_ends_a_static_graph_is_in_the_open_one(
    program: Callable[[Tensor], Tensor], entries: list[Entry]
) -> None:
    compiled = fusee.compile(program, fullgraph=True, dynamic=True)
    for a, b in ((5, 4), (7, 3)):
        x = torch.randn(a, b)
        torch.testing.assert_close(compiled(x), program(x))
    assert len(entries) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.cov(x[0]) * x.flatten().corrcoef() + x,
        lambda x: x.cov() * x.corrcoef(),
        lambda x: torch.complex(x, x.sin()).corrcoef() * torch.complex(x, x.cos()).cov(),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_covariances_ask_for_no_values(
    program: Callable[[Tensor], Tensor], dynamic: bool, entries: list[Entry]
) -> None:
    compiled = fusee.compile(program, fullgraph=True, dynamic=dynamic)
    for a, b in ((5, 4), (7, 3)):
        x = torch.randn(a, b)
        torch.testing.assert_close(compiled(x), program(x))
    assert len(entries) == (1 if dynamic else 2)


def test_pieces_of_unproven_sizes_are_cut_where_others_are() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.linalg.qr(x)[1].tanh()  # its gradient adds to zeros beside a triangle

    compiled = fusee.compile(program, dynamic=True)
    for rows, columns in ((2, 5), (3, 6), (4, 9)):
        x = torch.randn(rows, columns)
        given = [x.clone().requires_grad_() for _ in range(2)]
        for run, one in zip((program, compiled), given, strict=True):
            run(one).sum().backward()
        torch.testing.assert_close(given[1].grad, given[0].grad, rtol=1e-4, atol=1e-4)


def _lcg(seed: int, x: Tensor) -> tuple[int, Tensor]:
    seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
    return seed, x + seed % 100


BEYOND_64_BITS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "products": (lambda n, x: (x.mul_(2), torch.tensor(n * n * n)), (2, 3, 2**20, 2**21, 2**22)),
    "sums": (lambda n, x: functools.reduce(lambda t, _: t + t, range(36), n) + x, (5, 7, 2**40)),
    "powers": (lambda n, x: x + n**4, (3, 5, 2**15, 2**17, 9)),
    "shifts": (lambda n, x: (x + (n << 40), n << 70), (2, 3, 2**22, 2**24)),
    "sizes": (lambda n, x: x + n * x.shape[0] * 2**20, (2, 3, 2**41, 2**42)),
    "remainders": (_lcg, (2, 3, 5, 2**47)),
    "modular powers": (lambda n, x: x + pow(n, 65537, 1000007), (2, 3, 5, 2**31)),
}


@pytest.mark.parametrize("name", BEYOND_64_BITS)
def test_integers_of_the_programs_never_wrap(name: str) -> None:
    fn, numbers = BEYOND_64_BITS[name]
    compiled = fusee.compile(fn)
    for number in numbers:
        outcomes: list[Any] = []
        for each in (fn, compiled):
            x = torch.ones(4)
            try:
                outcomes.append(each(number, x))
            except (OverflowError, ValueError, RuntimeError) as error:
                outcomes.append((type(error), str(error)))
            outcomes[-1] = str((outcomes[-1], x))
        assert outcomes[0] == outcomes[1], number


def test_products_of_integers_have_one_version_while_64_bits_hold_them(
    entries: list[Entry],
) -> None:
    compiled: Any = fusee.compile(lambda a, b, x: x + a * b + a)
    for a in range(2, 12):
        assert torch.equal(compiled(a, 3 * a, torch.ones(3)), torch.ones(3) + 3 * a * a + a)
    assert len(entries) <= 3


@pytest.mark.parametrize("batch", [0, 2])
def test_convolutions_of_no_channels(batch: int) -> None:
    """ATen gives none then, whatever the weight has."""

    def fn(x: Tensor, weight: Tensor) -> Any:
        print(end="")
        made = F.conv2d(x, weight, stride=2)
        made.backward(torch.ones(made.shape))
        return made.shape, x.grad, weight.grad

    def given() -> list[Tensor]:
        return [torch.ones(n, requires_grad=True) for n in ((batch, 0, 6, 7), (4, 0, 2, 2))]

    assert str(fusee.compile(fn)(*given())) == str(fn(*given()))


@pytest.mark.parametrize("backend", ["fusee", "aot_eager", "eager"])
@pytest.mark.parametrize(("width", "center"), [(16, True), (12, True), (16, False)])
def test_a_window_that_covers_nothing_is_refused(width: int, center: bool, backend: str) -> None:
    """Once with sizes that are known, then with open ones: a graph each, with gradients."""

    def fn(x: Tensor, window: Tensor) -> Tensor:
        return torch.istft(x, 16, 4, width, window, center=center) * 2

    options: Any = {"prices": False} if backend == "fusee" else None
    compiled = fusee.compile(fn, fullgraph=True, backend=backend, options=options)
    window = torch.hann_window(width) + 0.1
    for n, samples in ((2, 64), (3, 64), (4, 80), (5, 96)):
        y = torch.stft(torch.randn(n, samples), 16, 4, width, window, True, return_complex=True)
        y.requires_grad_()
        made, expected = compiled(y, window), fn(y, window)
        torch.testing.assert_close(made, expected)
        grads = [torch.autograd.grad(z.sin().sum(), y)[0] for z in (made, expected)]
        torch.testing.assert_close(*grads)
        for run in (fn, compiled):
            with pytest.raises(RuntimeError, match="window overlap add min"):
                run(y, torch.zeros(width))


def test_computed_sizes_of_one_are_broadcast() -> None:
    """(n + 2) // 3 is 1 for some n, and more for others."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        part = x[..., ::3]
        return torch.zeros_like(part).index_add(1, torch.arange(part.shape[1]) // 2, part) + y

    compiled = fusee.compile(fn, dynamic=True, options={"prices": False})
    for n, m in [(2, 10), (3, 7), (2, 5), (7, 3), (9, 3), (4, 2)]:
        x, y = torch.randn(5, n), torch.randn(m)
        torch.testing.assert_close(compiled(x, y), fn(x, y))


def test_indices_whose_computed_size_is_one_are_broadcast() -> None:
    def fn(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        rows = i[..., ::3] * 1
        return x[rows, j] + 1, x.index_put((rows, j), x[0, 0], accumulate=True)

    compiled = fusee.compile(fn, dynamic=True, options={"prices": False})
    x = torch.randn(4, 6)
    for n, m in [(2, 5), (3, 6), (6, 2), (2, 3)]:
        given = x, torch.randint(0, 4, (3, n)), torch.randperm(6)[:m]
        torch.testing.assert_close(compiled(*given), fn(*given))


def test_what_lies_in_pieces_along_an_axis_of_one_element() -> None:
    """The gradient of a row at a place of the data: of none before, it and none after it."""

    def fn(x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        part = x[1:]
        return part.relu()[i] * part.relu().sum() + (part[i] * y).sum()

    compiled = fusee.compile(fn, options={"prices": False})
    x, y = torch.randn(2, requires_grad=True), torch.randn(5)
    for run in (fn, compiled):
        run(x, torch.tensor(0), y).backward()
    assert x.grad is not None
    found, x.grad = x.grad, None
    for run in (fn, fn):
        run(x, torch.tensor(0), y).backward()
    torch.testing.assert_close(found, x.grad)


def test_rows_of_one_element_lie_as_they_do() -> None:
    compiled = fusee.compile(lambda x: x * 2, dynamic=True, options={"prices": False})
    for columns in (2, 1, 3):
        x = torch.randn(8, columns)[:, ::2]
        assert torch.equal(compiled(x), x * 2)
