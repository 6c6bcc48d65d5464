"""The cheap calls give what the overloads give, and fill the given memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusee.aten.externs import EXTERNS, extern_of

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


@pytest.mark.parametrize("op", EXTERNS, ids=str)
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
    assert extern_of(aten.sort.default) is None
