"""The cheap calls give what the overloads give, and fill the given memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusee
from fusee.targets.cpu import CPU, EXTERNS

aten = torch.ops.aten
M, V, B = torch.randn(6, 6), torch.randn(6), torch.randn(3, 6, 6)
ARGUMENTS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.mm.default: ((M, M), {}),
    aten.bmm.default: ((B, B), {}),
    aten.addmm.default: ((V, M, M), {"beta": 0.5, "alpha": 2}),
    aten.baddbmm.default: ((B, B, B), {"beta": 2}),
    aten.mv.default: ((M, V), {}),
    aten.addmv.default: ((V, M, V), {"alpha": 3}),
    aten.convolution.default: (
        (torch.randn(2, 4, 5, 5), torch.randn(6, 2, 3, 3), torch.randn(6), [1, 2], [1, 0], [1, 1],
         False, [0, 0], 2), {},
    ),
}  # fmt: skip


def test_recurrent_layers_give_what_backward_needs_without_grad_mode() -> None:
    op = aten.mkldnn_rnn_layer.default
    weights = torch.randn(16, 8), torch.randn(16, 4), torch.randn(16), torch.randn(16)
    state = torch.zeros(3, 4)
    shape: tuple[Any, ...] = (False, [], 2, 4, 1, True, False, False, True)
    args = (torch.randn(6, 3, 8), *weights, state, state, *shape)
    expected = op(*args)
    with torch.no_grad():
        got = EXTERNS[op].call(*args)
    assert not got[0].requires_grad
    assert all(torch.equal(x, y) for x, y in zip(got[:3], expected[:3], strict=True))
    assert got[3].shape == expected[3].shape


@pytest.mark.parametrize("op", ARGUMENTS, ids=str)
def test_cheap_call_equals_the_overload(op: Any) -> None:
    args, kwargs = ARGUMENTS[op]
    spec = EXTERNS[op]
    expected = op(*args, **kwargs)
    assert torch.equal(spec.call(*args, **kwargs), expected)
    if spec.out is not None:
        for padding in (0, 2):  # rows that lie further apart too
            room = torch.full((*expected.shape[:-1], expected.shape[-1] + padding), torch.nan)
            out = room[..., : expected.shape[-1]]
            spec.out(*args, **kwargs, out=out)
            torch.testing.assert_close(out, expected)
            assert room[..., expected.shape[-1] :].isnan().all()


def test_operators_without_a_row_are_called_by_their_overload() -> None:
    assert CPU().call_of(aten.sort.default) is None


def test_products_that_are_added_are_rows() -> None:
    x = torch.randn(4, 5, 5).transpose(1, 2)
    compiled = fusee.compile(_added, options={"prices": False})
    torch.testing.assert_close(compiled(x), _added(x), check_stride=True)


def _added(x: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(x, x, x.mT) + torch.baddbmm(x, x, x.mT, alpha=2, beta=3).sin()
