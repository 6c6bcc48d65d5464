"""Whether a compiled result is as good as eager's: float64 arbitrates where bits differ.

A result passes if it equals eager's bit for bit, or if its distance from the same computation in
float64 is at most twice eager's own in the root mean square, plus what an order of summation may
make of it. Processors and libraries sum in different orders; eager itself differs by more than two
from one batch size to the next. One chain of n terms is off by about sqrt(n / 24) units in the last
place of its result's scale: each rounding is half a unit of a partial sum at most. The worst
element is at most as far off as the worst of so many normal errors, or twice eager's worst. So no
single element decides, but for one that is wrong by far more than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Room beside twice eager's error, in units in the last place of the result's dtype.
WORST_ULP = 4.0
MEAN_ULP = 1.0
# Whoever sums more terms than this does it in blocks.
CHAIN = 4096
# By how many standard deviations the worst of N errors may exceed the expected worst.
SLACK = 2.0

# Where eager is further than this from float64, in units of the largest result, float64 computes
# something else (another random stream, a flipped comparison) and cannot arbitrate.
ORACLE_LIMIT = 0.05


class Mismatch(AssertionError):
    """A compiled result differs from eager's."""


class Exact(NamedTuple):
    """What a computation in float64 gives, and how many terms its longest sum has."""

    tree: Any
    longest: int


def measured(oracle: Callable[[], Any]) -> Exact:
    """What `oracle` gives, with the length of its sums; one that knows it gives an Exact."""
    with _Sums() as sums:
        found = oracle()
    return found if isinstance(found, Exact) else Exact(found, sums.longest)


class _Sums(TorchDispatchMode):
    """Notes the longest sum: a product's inner size, or how many elements become one."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x.numel() for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        operands = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.dim()]
        if not operands or not results or not min(results):
            return out
        name = func._schema.name.partition("::")[2]
        found = max(x.numel() for x in operands) // min(results)
        if "convolution" in name or "conv" in name:
            found = operands[1][0].numel()
        elif name.endswith(("mm", "mv", "dot", "linear", "attention_for_cpu")):
            found = max(n for x in operands for n in x.shape)
        elif "softmax" in name or name.startswith(("cum", "logcum")):
            found = max(operands[0].shape)
        self.longest = max(self.longest, found)
        return out


def assert_same(got: Any, want: Any, oracle: Callable[[], Any] | None = None) -> None:
    """Compare two trees of results: structure, types, dtype, shape, stride, values.

    `oracle` computes the float64 tree of the same structure; it runs only where bits differ.
    raises   Mismatch naming the leaf and what differs
    """
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    if got_spec != want_spec:
        raise Mismatch(f"structure: got {got_spec}, eager gives {want_spec}")
    leaves: list[Any] | None = None
    longest = 1
    for position, (one, other) in enumerate(zip(got_leaves, want_leaves)):
        where = f"output {position}"
        assert_same_kind(one, other, where)
        if not isinstance(other, Tensor) or _equal_bits(one, other):
            continue
        if leaves is None and oracle is not None:
            exact = measured(oracle)
            leaves, longest = pytree.tree_flatten(exact.tree)[0], exact.longest
        _assert_close(one, other, None if leaves is None else leaves[position], where, longest)


def assert_same_kind(got: Any, want: Any, where: str) -> None:
    """Everything but a tensor's values; for what is not a tensor, the value too."""
    if type(got) is not type(want):
        raise Mismatch(f"{where}: got a {type(got).__name__}, eager gives {type(want).__name__}")
    if not isinstance(want, Tensor):
        if got is not want and got != want and not (got != got and want != want):
            raise Mismatch(f"{where}: got {got!r}, eager gives {want!r}")
        return
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            raise Mismatch(
                f"{where}: {name} {getattr(got, name)}, eager gives {getattr(want, name)}"
            )
    if want.layout == torch.strided and _strides(got) != _strides(want):
        raise Mismatch(f"{where}: strides {got.stride()}, eager gives {want.stride()}")
    if got.is_conj() != want.is_conj() or got.is_neg() != want.is_neg():
        raise Mismatch(f"{where}: conjugate or negative bit differs")


def _strides(tensor: Tensor) -> tuple[int | None, ...]:
    """Strides of axes that have one: none are told apart for size 1, or in an empty tensor."""
    if tensor.numel() == 0:
        return ()
    return tuple(s if n > 1 else None for n, s in zip(tensor.shape, tensor.stride()))


def _equal_bits(got: Tensor, want: Tensor) -> bool:
    if want.layout != torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if want.dtype == torch.complex32:  # torch.equal does not take it
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if want.is_quantized:
        got, want = got.int_repr(), want.int_repr()
    return bool(torch.equal(got, want)) or bool(_same(got, want).all())


def _same(got: Tensor, want: Tensor) -> Tensor:
    """Where two tensors agree, NaN with NaN."""
    if not want.is_floating_point() and not want.is_complex():
        return got == want
    return (got == want) | (got.isnan() & want.isnan())


def _assert_close(
    got: Tensor, want: Tensor, exact: Tensor | None, where: str, longest: int
) -> None:
    if want.is_complex():
        halves = None if exact is None else torch.view_as_real(exact.resolve_conj())
        got = torch.view_as_real(got.resolve_conj())
        want = torch.view_as_real(want.resolve_conj())
        return _assert_close(got, want, halves, where, longest)
    if not want.is_floating_point():
        raise Mismatch(f"{where}: {_first_difference(got, want)}")
    if want.dtype == torch.float64 or not _is_oracle(exact, want):
        if _is_nearly(got, want, exact):
            return None
        try:
            torch.testing.assert_close(got, want, equal_nan=True)
        except AssertionError as error:
            raise Mismatch(f"{where}: without an oracle: {error}") from error
        return None
    assert exact is not None
    info = torch.finfo(want.dtype)
    assert_as_near(got.double(), want.double(), exact.double(), info, where, longest)
    return None


def _is_oracle(exact: Tensor | None, want: Tensor) -> bool:
    # Of the same dtype: the program computes from integers, or names the dtype itself.
    if exact is None or exact.shape != want.shape or exact.dtype == want.dtype:
        return False
    finite = want.isfinite() & exact.isfinite()
    if not finite.any():
        return True
    distance = (want.double() - exact.double())[finite].abs().max()
    return bool(distance <= ORACLE_LIMIT * exact[finite].abs().max().double() + 1e-30)


def _is_nearly(got: Tensor, want: Tensor, exact: Tensor | None) -> bool:
    """Whether a result is right to the last places, or to eager's, however far off eager is."""
    if exact is None or exact.shape != got.shape or exact.dtype == got.dtype:
        return False
    eps = torch.finfo(got.dtype).eps
    room = WORST_ULP * eps * exact.abs() + eps * want.double().abs().nan_to_num(0.0, 0.0)
    near = (got.double() - exact).abs() <= room
    return bool((near | _same(got.double(), exact)).all())


def assert_as_near(
    got: Tensor, want: Tensor, exact: Tensor, info: torch.finfo, where: str, longest: int = 1
) -> None:
    """Float64 tensors: ours and eager's of the dtype that `info` is about, and what is right.

    longest   how many terms the longest sum has that they come from
    """
    finite = want.isfinite()
    if not bool(_same(got, want)[~finite].all()) or not bool(got[finite].isfinite().all()):
        raise Mismatch(f"{where}: infinities or NaN: {_first_difference(got, want)}")
    finite &= exact.isfinite()
    got, want, exact = got[finite], want[finite], exact[finite]
    count = exact.numel()
    if not count:
        return
    ours, eagers = (got - exact).abs(), (want - exact).abs()
    mean, eager_mean = ours.square().mean().sqrt(), eagers.square().mean().sqrt()
    scale = exact.square().mean().sqrt()
    # few elements have no average
    ulps = max(MEAN_ULP, WORST_ULP / math.sqrt(count), math.sqrt(min(longest, CHAIN) / 24))
    limit = 2 * eager_mean + ulps * info.eps * scale + info.tiny
    floor = WORST_ULP * info.eps * exact.abs() + info.smallest_normal * info.eps
    expected = math.sqrt(2 * math.log(2 * count)) + SLACK
    most = max(2 * eagers.max(), expected * limit)
    worst = int((ours - floor).argmax())
    if bool(ours[worst] > most + floor[worst]):
        raise Mismatch(
            f"{where}: got {got[worst]:.9g}, eager {want[worst]:.9g}, float64 {exact[worst]:.17g}; "
            f"eager is off by {eager_mean:.3g} in the mean and {eagers.max():.3g} at most, we are"
            f" off by {ours[worst]:.3g} here"
        )
    if bool(mean > limit):
        raise Mismatch(f"{where}: root mean square error {mean:.3g}, eager's is {eager_mean:.3g}")


def is_within(got: Any, want: Any, exact: Any, others: Sequence[Any]) -> bool:
    """Whether a result is as near as eager's own are, on inputs that differ in the last place.

    A comparison that rounding decides (a ReLU at zero, equal scores) or a variance of two values
    makes of one unit in the last place more than any sum does, in eager as in ours. The distance
    from float64, or from eager where float64 does not arbitrate, is at most twice the largest
    that eager has, in the mean and at most; that it has none is no room.
    others   eager's results on neighbouring inputs
    """
    if not isinstance(want, Tensor) or not others or want.is_complex():
        return False
    if any(x.shape != want.shape or x.dtype != want.dtype for x in (got, *others)):
        return False
    if not want.is_floating_point():
        return _far(got, want)[0] <= 2 * max(_far(x, want)[0] for x in others)
    known = [*others]
    if _is_oracle(exact, want):
        known, want = [want, *others], exact
    room = [_far(x, want) for x in known]
    return all(far <= 2 * max(each) for far, each in zip(_far(got, want), zip(*room)))


def may_be_chance(error: Mismatch) -> bool:
    """Whether rounding may be what differs."""
    words = ("float64", "mean square", "without an oracle", "elements differ")
    return any(word in str(error) for word in words)


def neighbour(x: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of which every other element is the number beside it."""
    up = torch.rand(x.shape, generator=generator).to(x.device) < 0.5
    far = torch.where(up, torch.inf, -torch.inf).to(x.dtype)
    stays = (torch.rand(x.shape, generator=generator).to(x.device) < 0.5) | (x == 0)
    return torch.where(stays, x, torch.nextafter(x, far))


def is_cancelled(got: Any, exact: Any, scale: float) -> bool:
    """Whether a result is off by less than the last place of what was summed up beside it.

    A gradient of a bias before a normalisation is the sum of what cancels: eager may get 0 where we
    get the rounding of one summand. It is of the right size all the same: off by a thousandth at
    most, or as small as that rounding.
    scale   root mean square of the largest result of its kind: of all gradients, say
    """
    if not isinstance(exact, Tensor) or got.shape != exact.shape or not got.is_floating_point():
        return False
    room = torch.finfo(got.dtype).eps * scale
    far, size = _far(got, exact)[0], _far(exact, torch.zeros_like(exact))[0]
    return far <= room and (far <= size / 1000 or size <= room)


def _far(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Root mean square and largest of the differences; infinite where one alone is finite."""
    if not y.numel():
        return 0.0, 0.0
    off = (x.double() - y.double()).abs()
    off = torch.where(_same(x.double(), y.double()), 0.0, off).nan_to_num(torch.inf, torch.inf)
    return float(off.square().mean().sqrt()), float(off.max())


def _first_difference(got: Tensor, want: Tensor) -> str:
    differs = ~_same(got, want)
    index = tuple(differs.nonzero()[0].tolist())
    count = int(differs.sum())
    return (
        f"{count} of {want.numel()} elements differ, first at {index}: "
        f"got {got[index].item()!r}, eager gives {want[index].item()!r}"
    )
