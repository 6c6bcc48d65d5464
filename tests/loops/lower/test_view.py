"""Views are index maps: no copies but where an output needs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from fusee.loops import Buffer, Loop, Profile
from fusee.loops.checker import show_step
from fusee.loops.lower.pointwise import pointwise
from fusee.loops.lower.tensor import Lowering, Pieces, Strided
from fusee.loops.lower.views import reshape
from fusee.sym import Symbol
from tests.loops.lower.against_eager import check, check_op

VIEWS: dict[str, Callable[[Tensor], object]] = {
    "permute": lambda x: x.permute(2, 0, 1) + 1,
    "reshape": lambda x: x.reshape(24, 2, 4) + 1,
    "reshape across": lambda x: (x * 2).reshape(3, 64) + 1,
    "transpose then reshape": lambda x: x.transpose(0, 1).reshape(6, 32) * 2,
    "slice": lambda x: x[:, 1:5:2, -3:] + x[:, 2:6:2, :3],
    "slice beyond": lambda x: x[2:100, -50:3] + 1,
    "select": lambda x: x[1] + x[-1] + x[0, :, :1],
    "expand": lambda x: x[:, :1].expand(4, 6, 8) * x,
    "squeeze": lambda x: x[:, :1].squeeze(1) + x.unsqueeze(1).squeeze()[0, 0],
    "flip": lambda x: x.flip(0, 2) + x,
    "diagonal": lambda x: (x.diagonal(1, 1, 2) * 2, x.diagonal(-2, 0, 1) * 2),
    "unfold": lambda x: x.unfold(1, 3, 2) * 2,
    "as_strided": lambda x: x.as_strided((3, 5), (7, 2), 4) + 1,
    "as_strided of a result": lambda x: (x + 1).as_strided((3, 5), (7, 2), 4) * 2,
    "split": lambda x: sum(x.split(3, 1)) * 2,
    "chunk": lambda x: [part + 1 for part in x.chunk(3, 2)],
    "unbind": lambda x: x.unbind(1)[2] + x.unbind(1)[5],
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "roll": lambda x: (x.roll((1, -2), (0, 1)), x.roll(3, 2) * 2),
    "tile and movedim": lambda x: x.movedim(0, 2).tile(2, 1, 1),
    "pad": lambda x: (
        F.pad(x, (1, 2, 0, 1)),
        F.pad(x.sin(), (-1, 2)) * 2,
        F.pad(x, (2, 0), value=3),
    ),
    "pad of pad": lambda x: F.pad(F.pad(x, (1, 1)) + 1, (0, 0, 2, 2)),
    "reflect": lambda x: F.pad(x, (3, 2), mode="reflect") * 2,
    "replicate": lambda x: F.pad(x, (3, 0), mode="replicate") * 2,
    "clone": lambda x: x.transpose(0, 1).clone() + x.transpose(0, 1).contiguous(),
    "view dtype": lambda x: x.view(torch.int32) + 1,
    "tril": lambda x: (x.tril(), x.triu(1), x.tril(-2)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("order", ["contiguous", "permuted", "lazy"])
def test_view(name: str, order: str) -> None:
    fn = VIEWS[name]
    x = torch.randn(4, 6, 8)
    if order == "permuted":
        x = torch.randn(8, 4, 6).permute(1, 2, 0)
        if "as_strided" in name:
            pytest.skip("the storage of the same elements has another order")
    if order == "lazy":
        check(lambda x: fn(x * 2 + 1), x)
    else:
        check(fn, x)


def test_two_dimensional_pads() -> None:
    x = torch.randn(2, 3, 5, 6)
    check(lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"), x)
    check(lambda x: F.pad(x, (1, -1, 2, 0), mode="replicate") + 1, x)
    check_op(torch.ops.aten._pad_circular.default, x, [1, 6, 5, 0])
    check_op(torch.ops.aten._pad_circular.default, x, [1, -1, 2, 0], allow=["_pad_circular"])


def test_surviving_dimensions_are_not_divided() -> None:
    graph = check(
        lambda x: x.view(4, 6, 2, 4).transpose(1, 2).reshape(8, 6, 4) * 2, torch.randn(4, 6, 8)
    )
    (loop,) = graph.steps
    assert isinstance(loop, Loop)
    text = show_step(loop)
    assert "i1" in text and "(i1)//" not in text


def test_reshape_of_unknown_sizes_keeps_storage() -> None:
    lowering = Lowering(Profile())
    n = Symbol("s0", 2).expr
    from_layout = Buffer("x", torch.float32, (n, 6), (6, 1), "input")
    buffer = lowering.buffer(from_layout.shape, from_layout.dtype, from_layout.strides)
    x = lowering.stored(Strided(buffer, buffer.strides, 0), from_layout.shape)
    storage = reshape(x, (n, 2, 3)).storage
    assert storage is not None and storage.strides == (6, 3, 1)
    flat = reshape(x, (n * 6,)).storage
    assert flat is not None and flat.strides == (1,)


def test_pieces_whose_lengths_are_equal_though_nobody_can_tell() -> None:
    """A reshape has n rows where what it is written into has m: the rest is empty."""
    lowering = Lowering(Profile())
    n, m = Symbol("s0", 2).expr, Symbol("s1", 2).expr
    rows, rest = (
        lowering.stored(Strided(lowering.buffer(shape, torch.float32, (4, 1)), (4, 1), 0), shape)
        for shape in ((n, 4), (m - n, 4))
    )
    x = lowering.beside((n, 4), torch.float32, Pieces(0, (0, n), (rows, rest)))
    doubled = pointwise(lowering, [x, rows], lambda a, b: a + b, (n, 4), torch.float32)
    assert doubled.pieces is not None and doubled.pieces.tensors[0].shape == (n, 4)


def test_a_square_that_is_returned_turned() -> None:
    """Its strides are not those of the buffer that it is a view of, whose shape it has."""
    square = torch.randn(3, 3), torch.randn(3, 3)
    compiled = fusee.compile(lambda x, y: (x @ y).t(), options={"prices": False})
    torch.testing.assert_close(compiled(*square), (square[0] @ square[1]).t())


def test_views_of_a_result_are_views_of_its_buffer() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.softmax(x, -1).transpose(0, 1) @ x.transpose(0, 1).transpose(1, 2)

    graph = check(fn, torch.randn(4, 6, 8), allow=["bmm", "expand"])
    # maximum, sum and quotient; torch 2.11 copies an operand of bmm besides
    assert sum(isinstance(step, Loop) for step in graph.steps) in (3, 4)
