"""Hand-written attention over many keys becomes one operator; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fusee
from fusee.aten import attention
from fusee.backends.report import live_reports
from tests.aten.passes.graphs import Build, through_passes

aten = torch.ops.aten
SDPA = "aten.scaled_dot_product_attention.default"


def attend(
    build: Build, queries: int, keys: int, scale: float | None, mask: torch.Tensor | None
) -> tuple[fx.Node, fx.Node]:
    """The attention and its weights, as matmul of 4-d tensors is traced."""
    b, h, d = 2, 3, 8
    q = build.call(aten.view.default, build.input(torch.randn(b, h, queries, d)), [b * h, -1, d])
    k = build.input(torch.randn(b, h, keys, d))
    k = build.call(aten.transpose.int, build.call(aten.view.default, k, [b * h, -1, d]), 1, 2)
    v = build.call(aten.view.default, build.input(torch.randn(b, h, keys, d)), [b * h, -1, d])
    scores = build.call(
        aten.view.default, build.call(aten.bmm.default, q, k), [b, h, queries, keys]
    )
    if scale is not None:
        scores = build.call(aten.div.Tensor, scores, scale)
    if mask is not None:
        scores = build.call(aten.add.Tensor, scores, build.input(mask))
    weights = build.call(aten._softmax.default, scores, -1, False)
    flat = build.call(aten.view.default, weights, [b * h, queries, keys])
    return build.call(aten.bmm.default, flat, v), weights


@pytest.mark.parametrize("scale", [None, 2.0])
def test_attention_is_recognised(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_SCORES", 0)
    build = Build()
    passed = through_passes(build, attend(build, 30, 40, scale, None)[0])
    passed.check()
    assert SDPA in passed.targets and "aten.bmm.default" not in passed.targets


def test_few_keys_stay_as_they_are() -> None:
    build = Build()
    passed = through_passes(build, attend(build, 30, 40, 2.0, None)[0])
    assert SDPA not in passed.targets


def test_masked_rows_stay_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_SCORES", 0)
    build = Build()
    mask = torch.randn(30, 40)
    mask[3:5] = -torch.inf
    passed = through_passes(build, attend(build, 30, 40, 2.0, mask)[0])
    passed.check()
    found = passed.after[0].unflatten(0, (2, 3))
    assert SDPA in passed.targets and found[:, :, 3:5].isnan().all()
    assert not found[:, :, 5:].isnan().any()


def test_weights_that_are_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_SCORES", 0)
    build = Build()
    passed = through_passes(build, *attend(build, 30, 40, 2.0, None))
    passed.check()
    assert SDPA not in passed.targets


LEAST = torch.finfo(torch.float32).min
ROWS = torch.arange(12)[:, None]
LATER, PADDING = ROWS < ROWS.T, ROWS.T < 2
# What is done to scores of (2, 3, 12, 12), and to (2, 3, 12, 8) that are made of them.
WRITTEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], Any]]] = {
    "a number learnt": (lambda x: x + x.new_full((), 0.5), lambda y: y),
    "a number for each key": (lambda x: x + torch.arange(12.0), lambda y: y),
    "a condition without axes": (lambda x: x.masked_fill(x.new_ones(()) > 0, LEAST), lambda y: y),
    "two masks of least numbers": (
        lambda x: x.masked_fill(LATER, LEAST).masked_fill(PADDING, LEAST),
        lambda y: y,
    ),
    "least numbers where -inf was": (
        lambda x: x.masked_fill(ROWS % 3 == 0, -torch.inf).masked_fill(PADDING, LEAST),
        lambda y: y,
    ),
    "-inf where least numbers were": (
        lambda x: x.masked_fill(PADDING, LEAST).masked_fill(ROWS % 3 == 0, -torch.inf),
        lambda y: y,
    ),
    "a mask after a bias": (
        lambda x: (x + torch.where(PADDING, LEAST, 0.0)).masked_fill(LATER, LEAST),
        lambda y: y,
    ),
    "a bias after a mask": (lambda x: x.masked_fill(LATER, LEAST) + ROWS.T.float(), lambda y: y),
    "views of the result": (lambda x: x, lambda y: (y, y.view(-1), y[0], y.transpose(1, 2))),
    "places of the result": (lambda x: x, lambda y: y.as_strided((3, 4), (1, 2), 5)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_attention_is_as_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_SCORES", 0)
    change, read = WRITTEN[name]

    def fn(*given: torch.Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in given)
        return read(change(q @ k.mT / 3).softmax(-1) @ v)

    given = torch.randn(3, 2, 12, 3, 8).unbind()
    found, expected = fusee.compile(fn)(*given), fn(*given)
    assert any("became attention" in line for line in live_reports()[-1].passes)
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=True)


# ---------------------------------------------------------------------------- masks


def _places(n: int) -> torch.Tensor:
    """As transformers finds sequences packed into one: by jumps of positions."""
    positions = (torch.arange(n) + 0).unsqueeze(0)
    before = torch.cat([positions[:, :1] - 1, positions], -1)
    return (before[:, 1:] - before[:, :-1] != 1).cumsum(-1)


def _packed(n: int) -> torch.Tensor:
    row, rows = _places(n), torch.arange(n)
    same = row[torch.zeros(1, dtype=torch.int64), rows][:, None] == row[0][None]
    return (same & (rows[None] <= rows[:, None]))[None, None]


MASKS: dict[str, tuple[Callable[[int], torch.Tensor], str | None]] = {
    "nothing": (lambda n: (torch.arange(n) >= 0)[None, None, :, None].expand(2, 1, n, n), ""),
    "zeros": (lambda n: torch.zeros(n, n), ""),
    "later": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), ", it is causal"),
    "later, added": (lambda n: torch.full((n, n), -torch.inf).triu(1), ", it is causal"),
    "least numbers": (
        lambda n: torch.full((n, n), torch.finfo(torch.float32).min).triu(1),
        ", it is causal",
    ),
    "packed": (_packed, ", it is causal"),
    "a window": (
        lambda n: torch.ones(n, n, dtype=torch.bool).tril() & (torch.ones(n, n).triu(-3) > 0),
        None,
    ),
    "numbers": (lambda n: torch.full((n, n), -1.0).triu(1), None),
    "earlier": (lambda n: torch.ones(n, n, dtype=torch.bool).triu(), None),
    "random": (lambda n: torch.rand(n, n) > -1, None),
}


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_known(name: str, is_trained: bool) -> None:
    make, said = MASKS[name]

    def fn(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * factor for factor in (1, 2, 3))
        q, k, v = (y.view(2, 12, 3, 8).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=make(12))
        return attended.transpose(1, 2).reshape(2, 12, 24)

    compiled, found = fusee.compile(fn), []
    x = torch.randn(2, 12, 24, requires_grad=is_trained)
    for call in (compiled, fn):
        y = call(x)
        grads = torch.autograd.grad(y.sin().sum(), x) if is_trained else ()
        found.append((y.detach(), *grads))
        assert y.stride() == (288, 24, 1)
    torch.testing.assert_close(*found)
    report = live_reports()[-1]
    notes = [line for line in report.passes if "needs no mask" in line]
    assert notes == ([] if said is None else [notes[0]])
    assert said is None or notes[0].endswith(f"needs no mask{said}")


# Query and key, for each of which eager multiplies whole matrices of scores.
WITHOUT_HEADS = {
    "three axes": ((2, 5, 8), (2, 7, 8)),
    "one key for all heads": ((2, 3, 5, 8), (2, 1, 7, 8)),
    "one example's keys for all": ((2, 3, 5, 8), (1, 3, 7, 8)),
    "one key for all": ((2, 3, 5, 8), (1, 1, 7, 8)),
}
MASKS_OF_HEADS = {
    "no mask": lambda shape: None,
    "a mask": lambda shape: torch.randn(shape[-2:]),
    "a mask for each": lambda shape: torch.randn(shape),
    "bools": lambda shape: torch.rand(shape[-2:]) > 0.3,
}
SMALL_MASKS = {"a number": (), "a row": (7,), "one element": (1,)}


@pytest.mark.parametrize("mask", MASKS_OF_HEADS)
@pytest.mark.parametrize("name", WITHOUT_HEADS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_attention_gets_all_its_heads(name: str, mask: str, training: bool) -> None:
    query, key = WITHOUT_HEADS[name]
    q, k, v = (torch.randn(n, requires_grad=training) for n in (query, key, key))
    given = MASKS_OF_HEADS[mask]((*query[:-1], key[-2]))

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given)

    def run(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        made = function(q, k, v)
        return [made, *(torch.autograd.grad(made.sin().sum(), (q, k, v)) if training else ())]

    compiled = fusee.compile(fn)
    found, expected = run(compiled), run(fn)
    torch.testing.assert_close(found, expected)
    assert found[0].stride() == expected[0].stride()
    calls = str(fusee.report(compiled)[0])
    assert ("flash_attention" if training else "keys for every head") in calls


@pytest.mark.parametrize(
    "shapes",
    [((5, 8), (7, 8)), ((2, 1, 5, 8), (2, 3, 7, 8)), ((2, 2, 3, 5, 8), (2, 2, 1, 7, 8))],
    ids=["a matrix", "one query for all heads", "five axes"],
)
def test_attention_that_stays(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (torch.randn(n) for n in (*shapes, shapes[1]))
    compiled = fusee.compile(F.scaled_dot_product_attention)
    torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert "keys for every head" not in str(fusee.report(compiled)[0])


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "open"])
@pytest.mark.parametrize("mask", SMALL_MASKS)
@pytest.mark.parametrize("name", WITHOUT_HEADS)
def test_masks_of_fewer_axes_than_scores(name: str, mask: str, dynamic: bool | None) -> None:
    q, k, v = (torch.randn(n) for n in (WITHOUT_HEADS[name][0], *WITHOUT_HEADS[name][1:] * 2))
    given = torch.randn(SMALL_MASKS[mask])

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given)

    torch.testing.assert_close(fusee.compile(fn, dynamic=dynamic)(q, k, v), fn(q, k, v))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
def test_attention_under_vmap_trains(heads: tuple[int, ...]) -> None:
    """The graph ran eagerly: which kernel eager takes was asked with tensors of the transform."""
    given = [torch.randn(2, 4, *heads, n, 8, requires_grad=True) for n in (5, 7, 7)]

    def fn(*given: torch.Tensor) -> torch.Tensor:
        attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
        return torch.vmap(attend)(*given)

    compiled = fusee.compile(fn)
    found, expected = (function(*given) for function in (compiled, fn))
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(y.sin().sum(), given) for y in (found, expected))
    torch.testing.assert_close(*pairs)
    assert not any(report.eager for report in fusee.report(compiled))


def test_heads_of_open_sizes() -> None:
    compiled = fusee.compile(F.scaled_dot_product_attention, dynamic=True)
    for n in (5, 9, 7):
        q, k = torch.randn(2, 3, n, 8), torch.randn(2, 1, n + 1, 8)
        want = F.scaled_dot_product_attention(q, k, k)
        torch.testing.assert_close(compiled(q, k, k), want)
    assert len(fusee.report(compiled)) == 1


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_open_sizes(name: str) -> None:
    make, said = MASKS[name]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=make(x.shape[-2]))

    compiled = fusee.compile(fn, dynamic=True)
    for n in (5, 9, 7):
        x = torch.randn(2, 2, n, 8)
        torch.testing.assert_close(compiled(x), fn(x))
    notes = [line for line in live_reports()[-1].passes if "needs no mask" in line]
    assert len(notes) == (said is not None)


def test_one_query_sees_all_that_came_before() -> None:
    """A step of decoding: keys of a cache that grows, and the query's place behind them."""

    def fn(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n = k.shape[-2]
        mask = torch.arange(n)[None] <= torch.arange(n - 1, n)[:, None]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    compiled = fusee.compile(fn, dynamic=True)
    for n in (5, 9, 7):
        q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, n, 8)
        torch.testing.assert_close(compiled(q, k), fn(q, k))
    assert any("needs no mask" in line for line in live_reports()[-1].passes)


def test_masks_of_inputs_stay() -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        given = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        shifted = torch.arange(x.shape[-2]) + n >= 0
        return given + F.scaled_dot_product_attention(x, x, x, attn_mask=shifted[:, None])

    compiled = fusee.compile(fn)
    x, mask = torch.randn(1, 2, 5, 8), torch.rand(5, 5) > 0.3
    for n in (0, -2):
        args = x, mask, torch.tensor(n)
        torch.testing.assert_close(compiled(*args), fn(*args), equal_nan=True)
    assert not any("needs no mask" in line for line in live_reports()[-1].passes)


def test_an_index_that_is_out_of_range_still_raises() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        far = torch.zeros(4, dtype=torch.bool)[torch.arange(5)]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=(far | True)[None])

    for call in (fusee.compile(fn), fn):
        with pytest.raises(IndexError, match="out of bounds"):
            call(torch.randn(1, 2, 5, 8))
