"""Recurrent layers in inference are ATen's own calls, with what is around them compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import fusee

LAYERS: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "bias": False}),
    (nn.LSTM, {"dtype": torch.bfloat16, "batch_first": True}),
    (nn.GRU, {"batch_first": True}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"dtype": torch.float64}),
    (nn.RNN, {"batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu", "dtype": torch.bfloat16}),
]


class Model(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, 5, **options)

    def forward(self, x: Tensor, *states: Any) -> Any:
        out, last = self.layer(x.tanh() * 2, *states)
        return out.sigmoid() + 1, last


def calls(compiled: Any) -> list[str]:
    (report,) = fusee.report(compiled)
    return [row.op for row in report.externs]


def compare(model: nn.Module, *given: Any, **options: Any) -> Any:
    """`model`, compiled, once it has given what eager gives: results of the same kernels."""
    compiled = fusee.compile(model, fullgraph=True, **options)
    pairs = zip(pytree.tree_leaves(compiled(*given)), pytree.tree_leaves(model(*given)))
    for ours, eager in pairs:
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride()
    return compiled


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_one_call_whatever_its_options(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model(kind, **options).eval()
    x = torch.randn(4, 7, 6, dtype=options.get("dtype", torch.float32))
    with torch.no_grad():
        for given in (x[:1], x[0]):
            compare(model, given)
        for needs_grad in (True, False):
            model.requires_grad_(needs_grad)
            (op,) = calls(compare(model, x))
            assert op == f"aten.{kind.__name__.lower()}.input" or kind is nn.RNN


def test_states_that_are_given() -> None:
    model, x = Model(nn.LSTM, num_layers=2).eval(), torch.randn(4, 3, 6)
    states = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    with torch.no_grad():
        compare(model, x, states)
        compare(Model(nn.GRU, num_layers=2).eval(), x, states[0])


def test_weights_that_change_in_place_are_seen() -> None:
    model, x = Model(nn.LSTM).eval(), torch.randn(4, 3, 6)
    compiled = fusee.compile(model)
    with torch.no_grad():
        compiled(x)
        model.layer.weight_hh_l0.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))


def test_dropout_between_layers_draws_as_eager() -> None:
    model, x = Model(nn.GRU, num_layers=3, dropout=0.5), torch.randn(4, 3, 6)
    compiled = fusee.compile(model)
    with torch.no_grad():
        found = []
        for f in (compiled, model):
            torch.manual_seed(0)
            found.append((f(x), torch.rand(3)))
    torch.testing.assert_close(*found)


def test_sizes_that_change() -> None:
    model = Model(nn.LSTM, bidirectional=True, batch_first=True).eval()
    with torch.no_grad():
        for batch, steps in ((4, 7), (3, 9), (5, 4)):
            compare(model, torch.randn(batch, steps, 6), dynamic=True)


def test_autocast_casts_what_the_layer_is_made_of() -> None:
    model, x = Model(nn.GRU).eval(), torch.randn(4, 3, 6)
    compiled = fusee.compile(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, eager = compiled(x), model(x)
    assert ours[0].dtype is eager[0].dtype
    torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_are_packed_and_run_between_graphs(kind: Any) -> None:
    torch.manual_seed(0)
    layer, head = kind(6, 5, 2, bidirectional=True, batch_first=True).eval(), nn.Linear(10, 2)

    def f(x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x.tanh() * 2, lengths, True, enforce_sorted=False)
        out, last = layer(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return head(out).softmax(-1), last

    compiled, given = fusee.compile(f), (torch.randn(3, 7, 6), torch.tensor([2, 7, 4]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), f(*given))
    assert sum(len(report.kernels) for report in fusee.report(compiled)) >= 2
