"""Meta results are those of the CPU kernels: sizes, strides, dtypes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fusee.fake import Twins
from fusee.fake.layouts import Spec, broadcast
from fusee.fake.rules import goes_by_elements, results
from fusee.loops.operators import ROWS, is_pointwise
from fusee.source import overload, overloads

Args = tuple[Any, ...]


def images(*size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One in rows, one in channels-last, one that is a slice of a larger one."""
    x = torch.randn(size).to(dtype)
    wide = torch.randn(*size[:-1], 2 * size[-1]).to(dtype)
    return [x, x.to(memory_format=torch.channels_last), wide[..., : size[-1]]]


def _channels_last(size: tuple[int, ...]) -> Tensor:
    layout = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    return torch.randn(size).to(memory_format=layout)


def rows(x: Tensor) -> list[Tensor]:
    return [x, x.mT.contiguous().mT, x[:, :1].expand_as(x)]


CASES: list[tuple[str, Callable[[], list[Args]]]] = [
    ("mm", lambda: [(x, torch.randn(6, 3)) for x in rows(torch.randn(5, 6))]),
    ("bmm", lambda: [(torch.randn(2, 5, 6).mT, torch.randn(2, 5, 3))]),
    (
        "addmm",
        lambda: [
            (c, torch.randn(5, 6), torch.randn(6, 3)) for c in (torch.randn(3), torch.ones(5, 1))
        ],
    ),
    ("baddbmm", lambda: [(torch.randn(3), torch.randn(2, 5, 6), torch.randn(2, 6, 3))]),
    ("select_scatter", lambda: [
        (x, torch.zeros(6), 0, 1) for y in rows(torch.randn(4, 6))
        for x in (y, y[:1].expand(4, 6), y.mT.contiguous().mT)
    ]),
    ("gather", lambda: [(torch.randn(4, 5), 1, torch.tensor([[0, 1], [2, 3]]).t())]),
    ("embedding", lambda: [(torch.randn(7, 3), torch.tensor([[1, 2], [3, 4]]).t())]),
    ("index.Tensor", lambda: [
        (x, list(index))
        for x in [torch.randn(4, 5, 6), torch.randn(6, 5, 4).permute(2, 1, 0)]
        for k in [torch.tensor([[1], [2], [0]])]
        for index in ((k,), (k, k.view(1, 3)), (k, k.t().contiguous(), k), (k.t(), k), (None, k))
    ]),
    ("native_dropout_backward", lambda: [
        (x, mask, 2.0)
        for x in rows(torch.randn(4, 5))[:2] for mask in rows(torch.ones(4, 5).bool())
    ]),
    ("nll_loss_forward", lambda: [
        (x, torch.arange(4), None, reduction, -100)
        for x in rows(torch.randn(4, 5)) for reduction in (0, 1, 2)
    ]),
    ("nll_loss2d_forward", lambda: [
        (x, torch.ones(2, 6, 6).long(), torch.ones(4), reduction, -100)
        for x in images(2, 4, 6, 6) for reduction in (0, 1, 2)
    ]),
    ("nll_loss_backward", lambda: [
        (torch.tensor(1.0), x, torch.arange(4), None, 1, -100, torch.tensor(4.0))
        for x in rows(torch.randn(4, 5))
    ]),
    ("nll_loss2d_backward", lambda: [
        (torch.tensor(1.0), x, torch.ones(2, 6, 6).long(), None, 1, -100, torch.tensor(4.0))
        for x in images(2, 4, 6, 6)[:1]
    ]),
    ("zeros_like", lambda: [(x,) for x in images(2, 4, 6, 6)]),
    ("full_like", lambda: [(x, 3) for x in images(2, 4, 6, 6)]),
    ("new_full", lambda: [(x, [2, 3], 1) for x in images(2, 4, 6, 6)]),
    *[
        (f"{kind}_pad{len(size) - 2}d", lambda size=size: [
            (x, [1, 2] * (len(size) - 2)) for x in (torch.randn(size), _channels_last(size))
        ])
        for kind in ("reflection", "replication")
        for size in ((2, 4, 6, 6), (2, 4, 5, 6, 6))
    ],
    ("roll", lambda: [
        (x, shifts, axes)
        for x in images(2, 4, 6, 6)
        for shifts, axes in (([2], [1]), ([1, -1], [2, 3]), ([0, 1], [2, 3]), ([6], [2]), ([5], []))
    ]),
    ("cumsum", lambda: [(x, 1) for x in [*rows(torch.randn(4, 5)), torch.ones(3, 4).int()]]),
    ("sum", lambda: [(x,) for x in [*rows(torch.randn(4, 5)), torch.ones(3).bool()]]),
    ("mean", lambda: [(x,) for x in rows(torch.randn(4, 5))]),
    *[
        (
            op,
            lambda: [
                (x, axes, keep)
                for x in images(2, 4, 6, 6)
                for axes in ([1], [-1, -2], [0, 1, 2, 3])
                for keep in (False, True)
            ],
        )
        for op in ("sum.dim_IntList", "mean.dim", "amax", "amin")
    ],
    *[
        (
            op,
            lambda: [
                (x, axis, keep)
                for x in images(2, 4, 6, 6)
                for axis, keep in ((1, True), (None, False))
            ],
        )
        for op in ("argmax", "argmin")
    ],
    (
        "max_pool2d_with_indices",
        lambda: [
            (x, [3, 2], [2], [1], [1], ceil)
            for x in [*images(2, 4, 7, 8), torch.randn(4, 7, 8)]
            for ceil in (False, True)
        ],
    ),
    (
        "avg_pool2d",
        lambda: [(x, [3], [], [1], ceil) for x in images(2, 4, 7, 8) for ceil in (False, True)],
    ),
    ("_adaptive_avg_pool2d", lambda: [(x, [3, 2]) for x in images(2, 4, 7, 8)]),
    ("clone", lambda: [(x,) for x in [*images(2, 4, 6, 6), *rows(torch.randn(4, 5))]]),
    ("native_batch_norm", lambda: [
        (x, torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(4), training, 0.1, 1e-5)
        for x in images(2, 4, 6, 6)
        for training in (False, True)
    ]),
    (
        "native_layer_norm",
        lambda: [(x, [6], torch.ones(6), torch.ones(6), 1e-5) for x in images(2, 4, 6, 6)],
    ),
    (
        "convolution",
        lambda: [
            (x, torch.randn(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            for x in images(2, 4, 6, 6)
        ],
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda: [
            (q, q, q)
            for q in (torch.randn(2, 3, 6, 8), torch.randn(2, 6, 3, 8).transpose(1, 2))
        ],
    ),
    ("cat", lambda: [([x, x], 1) for x in images(2, 4, 6, 6)]),
    ("where.self", lambda: [(x > 0, x, x.new_ones(())) for x in images(2, 4, 6, 6)]),
    ("logical_not", lambda: [(x,) for x in images(2, 4, 6, 6)]),
    ("bitwise_not", lambda: [(x > 0,) for x in images(2, 4, 6, 6)]),
    *[(op, lambda: [(x.abs(),) for x in images(2, 4, 6, 6)]) for op in ("relu", "sqrt", "gelu")],
    *[
        (op, lambda: [(x, y) for x in images(2, 4, 6, 6) for y in (x, torch.randn(6))])
        for op in ("add.Tensor", "div.Tensor", "lt.Tensor")
    ],
]  # fmt: skip


def _layers(name: str) -> list[Args]:
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(name.partition(".")[0], torch.nn.RNN)
    weights = list(kind(4, 5, bidirectional=True).parameters())
    x, state = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    states = [state, state] if kind is torch.nn.LSTM else state
    return [(x, states, weights, True, 1, 0.0, False, True, False)]


RECURRENT = [
    (name, functools.partial(_layers, name))
    for name in ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
]


@pytest.mark.parametrize(("name", "make"), CASES, ids=[name for name, _ in CASES])
def test_results_are_the_kernels(name: str, make: Callable[[], list[Args]]) -> None:
    op = overload(name)
    for args in make():
        want = op(*args)
        twins = pytree.tree_map(lambda x: _meta(x) if isinstance(x, Tensor) else x, args)
        got = Twins().run(op, twins, {})
        for w, g in zip(pytree.tree_leaves(want), pytree.tree_leaves(got)):
            if isinstance(w, Tensor):
                assert g.is_meta
                assert (g.shape, g.stride(), g.dtype) == (w.shape, w.stride(), w.dtype), args


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@pytest.mark.parametrize(
    ("name", "make"), [*CASES, *RECURRENT], ids=[name for name, _ in [*CASES, *RECURRENT]]
)
def test_open_sizes_have_the_same_rules(name: str, make: Callable[[], list[Args]]) -> None:
    """And leave no guard, but where strides ask for another layout than rows."""
    op = overload(name)
    for args in make():
        env = ShapeEnv()
        given = _with_open_sizes(args, FakeTensorMode(shape_env=env))
        got = results(op, given, {})
        for w, g in zip(pytree.tree_leaves(op(*args)), got if type(got) is tuple else [got]):
            if isinstance(g, Spec):
                size, step = ([_hint(n) for n in row] for row in (g.size, g.stride))
                assert (size, g.dtype) == (list(w.shape), w.dtype), args
                assert step == list(w.stride()) or w.numel() == 0, args
        # layer_norm's sizes are given once more, as numbers; a kernel has to fit into its image
        is_asked = name in ("native_layer_norm", "convolution")
        if not is_asked and all(
            x.is_contiguous() for x in pytree.tree_leaves(args) if isinstance(x, Tensor)
        ):
            assert not env.guards, args


@pytest.mark.parametrize("name", ["mm", "cat", "convolution", "embedding", "add.Tensor"])
def test_torch_is_not_asked_for_open_sizes(name: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    (first, *_) = dict(CASES)[name]()
    given = _with_open_sizes(first, mode)
    assert results(overload(name), given, {}) is not None


def _with_open_sizes(args: Args, mode: FakeTensorMode) -> Any:
    return pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args)


def _hint(n: Any) -> int:
    return n.node.hint if isinstance(n, torch.SymInt) else n


def test_conversion() -> None:
    op = overload("_to_copy")
    for x in images(2, 4, 6, 6):
        want, got = (
            op(x, dtype=torch.float64),
            Twins().run(op, (_meta(x),), {"dtype": torch.float64}),
        )
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def test_wrong_operands_are_torchs_to_refuse() -> None:
    x = torch.randn(4, 5).to("meta")
    wrong: list[tuple[str, Args]] = [
        ("mm", (x, x)),
        ("addmm", (torch.ones(2).to("meta"), x, x.mT)),
        ("sum.dim_IntList", (x, [2])),
        ("mean.dim", (x.int(), [0])),
        ("avg_pool2d", (x[None], [9])),
    ]
    for name, args in wrong:
        with pytest.raises((RuntimeError, IndexError)):
            Twins().run(overload(name), args, {})


def test_broadcast() -> None:
    assert list(broadcast((3, 1), (4,), ())) == [3, 4]
    assert list(broadcast((0,), (1,))) == [0]
    with pytest.raises(RuntimeError):
        broadcast((2,), (3,))


def operands(op: Any, dtype: torch.dtype) -> list[Args]:
    """Arguments of a pointwise operator: in all layouts, broadcast, and numbers for the rest."""
    kinds = [str(x.type) for x in op._schema.arguments if not x.kwarg_only]
    layouts = images(2, 4, 6, 6, dtype=dtype)
    number = 0.5 if dtype.is_floating_point else 1
    found = []
    for row in (*([x] for x in layouts), layouts, layouts[::-1], [layouts[0][0], layouts[0]]):
        tensors = itertools.cycle(row)
        found.append(tuple(next(tensors) if kind == "Tensor" else number for kind in kinds))
    return found


# Of these `operands` makes no arguments.
UNASKED = overloads("div.Tensor_mode div.Scalar_mode clamp.Tensor")
ASKED = [op for row in ROWS for op in row.overloads if goes_by_elements(op) and op not in UNASKED]


@pytest.mark.parametrize("op", ASKED, ids=str)
def test_a_row_gives_the_shape_of_its_operator(op: Any) -> None:
    compared = 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for args in operands(op, dtype):
            kwargs = {"decimals": 1} if op is torch.ops.aten.round.decimals else {}
            try:
                want = op(*args, **kwargs)
            except (RuntimeError, NotImplementedError):
                continue
            got = results(op, args, kwargs)
            compared += got is not None
            if got is not None:
                found = tuple(got.size), tuple(got.stride), got.dtype
                assert found == (tuple(want.shape), want.stride(), want.dtype), args
    assert compared


LAYOUTS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.randn(4, 6), lambda: torch.randn(6, 4).t(), lambda: torch.randn(4, 12)[:, ::2],
    lambda: torch.randn(1, 6).expand(4, 6),
)  # fmt: skip


@pytest.mark.parametrize("op", [op for row in ROWS for op in row.overloads], ids=str)
def test_a_row_that_torch_does_not_tag_is_laid_out_as_by_aten(op: Any) -> None:
    assert is_pointwise(op)
    if torch.Tag.pointwise in op.tags or not goes_by_elements(op):
        return
    kinds = [str(x.type) for x in op._schema.arguments if not x.has_default_value()]
    dtype = torch.int64 if "__" in op._schema.name else torch.float32
    for makers in itertools.product(LAYOUTS, repeat=kinds.count("Tensor")):
        tensors = iter([make().to(dtype) for make in makers])
        args = tuple(next(tensors) if kind == "Tensor" else kind != "bool" for kind in kinds)
        want, found = op(*args), results(op, args, {})
        assert (tuple(found.size), tuple(found.stride)) == (want.shape, want.stride())
