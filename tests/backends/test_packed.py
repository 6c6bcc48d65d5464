"""Weights of four bits, unpacked on each call as GPTQ and AWQ do: packed in OpenVINO, ours right.

How they are spelt follows auto-gptq's layers of two generations, and AutoAWQ's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fusee.backends import lookup
from fusee.backends.report import Report
from tests.check import check

pytest.importorskip("openvino")

aten = torch.ops.aten
INPUTS, OUTPUTS = 256, 64


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Packed(nn.Module):
    """Eight rows of four bits in each integer of `qweight`, eight columns in those of `qzeros`."""

    shifts: Tensor
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    groups: Tensor

    def __init__(self, size: int = -1, bits: int = 4) -> None:
        super().__init__()
        self.bits, self.size = bits, INPUTS if size == -1 else size
        many, count = 32 // bits, INPUTS // self.size
        self.register_buffer("shifts", torch.arange(0, 32, bits, dtype=torch.int32))
        self.register_buffer("qweight", self.random(INPUTS // many, OUTPUTS))
        self.register_buffer("qzeros", self.random(count, OUTPUTS // many))
        self.register_buffer("scales", torch.rand(count, OUTPUTS) * 0.1 + 0.01)
        self.register_buffer("groups", (torch.arange(INPUTS) // self.size).int())
        self.bias = nn.Parameter(torch.randn(OUTPUTS))

    @staticmethod
    def random(*size: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, size, dtype=torch.int64).int()

    def unpacked(self, x: Tensor, axis: int) -> Tensor:
        sizes = [-1, -1, -1]
        sizes[axis] = len(self.shifts)
        shape = [1, 1, 1]
        shape[axis] = len(self.shifts)
        wide = torch.bitwise_right_shift(x.unsqueeze(axis).expand(sizes), self.shifts.view(shape))
        return torch.bitwise_and(wide.to(torch.int16 if self.bits == 8 else torch.int8), self.mask)

    @property
    def mask(self) -> int:
        return int(2**self.bits - 1)

    def weight(self) -> Tensor:
        """Group by group, as the first generation does."""
        zeros = (self.unpacked(self.qzeros, 2) + 1).reshape(-1, 1, OUTPUTS)
        q = self.unpacked(self.qweight, 1).reshape(-1, self.size, OUTPUTS)
        return (self.scales.reshape(-1, 1, OUTPUTS) * (q - zeros)).reshape(-1, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.matmul(x.reshape(-1, INPUTS), self.weight().to(x.dtype))
        return rows.reshape(*x.shape[:-1], OUTPUTS) + self.bias


class ByIndex(Packed):
    """Each row with an index of its group, as the second generation does."""

    def weight(self) -> Tensor:
        zeros = (self.unpacked(self.qzeros, 2) + 1).reshape(self.scales.shape)
        q = self.unpacked(self.qweight, 1).reshape(-1, OUTPUTS)
        rows = self.groups.long()
        return self.scales[rows] * (q - zeros[rows])


class Repeated(Packed):
    """Scales and zeros repeated, columns in another order, as AutoAWQ does."""

    def weight(self) -> Tensor:
        order = torch.arange(OUTPUTS).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].view(-1)
        q = self.unpacked(self.qweight, 1).reshape(-1, OUTPUTS)[:, order]
        zeros = self.unpacked(self.qzeros, 2).reshape(-1, OUTPUTS)[:, order]
        zeros, scales = (x.repeat_interleave(self.size, 0) for x in (zeros, self.scales))
        return (q - zeros) * scales


class Symmetric(Packed):
    """One zero for all, arithmetic in floating point, and a weight that lies as nn.Linear's."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.unpacked(self.qweight, 1).reshape(-1, self.size, OUTPUTS).float()
        weight = ((q - 8.0) * self.scales[:, None]).reshape(-1, OUTPUTS)
        return F.linear(x, weight.t(), self.bias)


def reports(module: nn.Module, *args: Tensor, backend: str = "openvino", **options: Any) -> Report:
    """What a backend says of a module that it computes right."""
    seen: list[Report] = []

    def watched(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        call = lookup(backend, options)(gm, inputs)
        seen.append(call.report())
        return call

    check(module, *args, backend=watched)
    (report,) = seen
    return report


def packed(report: Report, element: str = "u4") -> int:
    """How many products OpenVINO runs with such weights."""
    rows = [row for row in report.regions if row.failed is None and row.primitives is not None]
    kinds = [item for row in rows if row.primitives for item in row.primitives().items()]
    constants = {kind.split()[-1] for kind, _ in kinds if kind.startswith("Const")}
    assert element in constants or not any("u4" in kind for kind, _ in kinds)
    return sum(n for kind, n in kinds if kind.startswith("Fully") and kind.endswith(element))


@pytest.mark.parametrize("kind", [Packed, ByIndex, Repeated, Symmetric])
@pytest.mark.parametrize("size", [128, -1])
def test_weights_stay_packed(kind: type[Packed], size: int) -> None:
    report = reports(kind(size), torch.randn(2, 3, INPUTS))
    assert packed(report) == 1 and not report.unclaimed, str(report)


@pytest.mark.parametrize("kind", [Packed, ByIndex, Repeated, Symmetric])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_our_own_compiler_has_them_right(kind: type[Packed], bits: int) -> None:
    check(kind(128, bits), torch.randn(2, 3, INPUTS))


@pytest.mark.parametrize(("bits", "element"), [(2, "u4"), (8, "u8")])
def test_other_numbers_of_bits(bits: int, element: str) -> None:
    assert packed(reports(Packed(128, bits), torch.randn(3, INPUTS)), element) == 1


def test_rows_in_any_order_are_right_but_not_packed() -> None:
    module = ByIndex(64)
    module.groups = module.groups[torch.randperm(INPUTS)]
    report = reports(module, torch.randn(3, INPUTS))
    assert not packed(report) and [row.failed for row in report.regions] == [None]


def test_layers_that_run_apart_and_one_weight_used_twice() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Packed(128), Packed(32)
            self.second.shifts = self.first.shifts

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = torch.sort(self.first(x), -1).values.repeat(1, 4)
            weight = self.first.weight()
            return self.second(y) + y @ weight, x @ weight

    report = reports(Two(), torch.randn(3, INPUTS))
    assert len(report.regions) == 2 and packed(report) == 4, str(report)


def test_a_weight_that_is_a_result() -> None:
    class Shown(Packed):
        def forward(self, x: Tensor) -> Any:
            weight = self.weight()
            return x @ weight, weight

    assert packed(reports(Shown(128), torch.randn(3, INPUTS))) == 1


@pytest.mark.parametrize("op", [aten.mm, aten.bitwise_right_shift])
def test_disabled_ops(op: Any) -> None:
    report = reports(Packed(128), torch.randn(3, INPUTS), disabled_ops=[op])
    assert not packed(report)
    assert op in {getattr(aten, row.op.split(".")[1]) for row in report.unclaimed}


def test_a_weight_that_changes_stays_packed() -> None:
    module = Packed(128)
    fast = torch.compile(module, backend="fusee_openvino")
    x = torch.randn(3, INPUTS)
    for _ in range(5):
        torch.testing.assert_close(fast(x), module(x))
        module.qweight.bitwise_xor_(0x12345678)
        module.scales.mul_(1.5)
        torch.testing.assert_close(fast(x), module(x))


def test_sizes_left_open() -> None:
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(lookup("openvino")(gm, inputs))
        return seen[-1]

    x = [torch.randn(n, INPUTS) for n in (3, 5, 17)]
    check(Packed(128), x[0], backend=backend, dynamic=True, again=[(one,) for one in x[1:]])
    assert len(seen) == 1 and packed(seen[0].report()) == 1


def test_the_older_path_has_them_right() -> None:
    with pytest.warns(match="TorchScript"):
        reports(Packed(128), torch.randn(3, INPUTS), backend="openvino_ts")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_floating_point(dtype: torch.dtype) -> None:
    report = reports(Packed(128).to(dtype), torch.randn(3, INPUTS).to(dtype))
    assert [row.failed for row in report.regions] == [None]
