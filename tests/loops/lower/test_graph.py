"""Whole graphs: outputs, written inputs, layouts, symbolic sizes, Externs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusee.loops import Extern, Loop, View
from tests.loops.interpret import interpret
from tests.loops.lower.against_eager import (
    aten_graph,
    check,
    check_symbolic,
    copied,
    externs,
    lower_module,
    lowered,
)

aten = torch.ops.aten


# ------------------------------------------------------------------------------ outputs


def test_outputs_have_memory_of_their_own() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [x.clone(), y, y.clone(), y.t().clone(), x.clone()]

    graph = check(fn, torch.randn(3, 4))
    buffers = [view.buffer for view in graph.outputs if isinstance(view, View)]
    assert len(set(buffers)) == 5
    assert {buffer.role for buffer in buffers} == {"result"}


def test_an_output_in_memory_is_not_copied() -> None:
    graph = check(lambda x: F.softmax(x, -1).transpose(0, 1), torch.randn(4, 8))
    assert len(graph.steps) == 3
    graph = check(
        lambda x, w: (x @ w).view(2, 2, 3), torch.randn(4, 5), torch.randn(5, 3), allow=["mm"]
    )
    assert len(graph.steps) == 1
    (output,) = graph.outputs
    assert output.buffer.role == "extern"


def test_numbers_and_none_pass_through() -> None:
    module = aten_graph(lambda x: x + 1, [torch.randn(3)])
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], None, 7),)
    graph = lower_module(module, [torch.randn(3)])
    assert graph.outputs[1:] == [None, 7]


# ------------------------------------------------------------------------------ written inputs


def run_writes(
    fn: Any, args: list[Tensor], writes: dict[int, int]
) -> tuple[list[Any], list[Tensor], Any]:
    mine = [copied(x) for x in args]
    graph = lowered(fn, *args, writes=writes)
    return interpret(graph, mine), mine, graph


def test_an_input_is_updated_in_place_without_scratch() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    _, after, graph = run_writes(lambda x, y: (x * 2 + y, y - 1), [x, y], {0: 0})
    torch.testing.assert_close(after[0], x * 2 + y)
    assert len(graph.steps) == 2
    assert graph.steps[-1].buffer.role == "input"


def test_inputs_that_depend_on_each_other() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    _, after, _ = run_writes(lambda x, y: (y.clone(), x + y), [x, y], {0: 0, 1: 1})
    torch.testing.assert_close(after[0], y)
    torch.testing.assert_close(after[1], x + y)


def test_an_input_read_at_other_places() -> None:
    x = torch.randn(3, 4)
    got, after, _ = run_writes(lambda x: (x.flip(0), x.sum(0)), [x], {0: 0})
    torch.testing.assert_close(after[0], x.flip(0))
    torch.testing.assert_close(got[1], x.sum(0))


def test_only_the_changed_part_of_an_input_is_stored() -> None:
    cache, new = torch.randn(2, 8, 4), torch.randn(2, 1, 4)

    def fn(cache: Tensor, new: Tensor) -> Tensor:
        return torch.slice_scatter(cache, new, 1, 3, 4)

    _, after, graph = run_writes(fn, [cache, new], {0: 0})
    torch.testing.assert_close(after[0], fn(cache, new))
    (loop,) = graph.steps
    assert isinstance(loop, Loop) and len(loop.axes) == 2


def test_scatters_into_a_written_input_happen_in_place() -> None:
    cache, new, at = torch.randn(2, 8, 4), torch.randn(2, 1, 4), torch.tensor([5])

    def fn(cache: Tensor, new: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = cache.sum(1) * 2
        cache = torch.index_copy(cache, 1, at, new)
        return cache, cache.softmax(1), before

    got, after, graph = run_writes(fn, [cache, new, at], {0: 0})
    wanted = fn(cache, new, at)
    torch.testing.assert_close(after[0], wanted[0])
    torch.testing.assert_close(got[1:], list(wanted[1:]))
    stores = [s for s in graph.steps if isinstance(s, Loop) and s.buffer.role == "input"]
    assert len(stores) == 1 and len(graph.steps) == 7  # one checks the index


def test_scatters_are_not_in_place_while_the_old_value_is_needed() -> None:
    x, at = torch.randn(8, 4), torch.tensor([5, 2])

    def late(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return torch.index_fill(x, 0, at, 3.0), x.flip(0)

    def itself(x: Tensor, at: Tensor) -> Tensor:
        return torch.index_copy(x, 0, at, x[:2] + 0)

    def sliced(x: Tensor, at: Tensor) -> Tensor:
        return torch.slice_scatter(x, x[1:3] * 2, 0, 2, 4)

    for fn in (late, itself, sliced):
        got, after, _ = run_writes(fn, [x, at], {0: 0})
        wanted = fn(x, at)
        torch.testing.assert_close(after[0], wanted[0] if fn is late else wanted)
        if fn is late:
            torch.testing.assert_close(got[1], wanted[1])


# ------------------------------------------------------------------------------ realising


def test_cheap_values_are_computed_again_and_costly_ones_once() -> None:
    cheap = lowered(lambda x: ((x + 1).sum(0), (x + 1).sum(1)), torch.randn(4, 5))
    assert len(cheap.steps) == 2

    def costly(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp().sin()
        return y.sum(0), y.sum(1)

    assert len(lowered(costly, torch.randn(4, 5)).steps) == 3


def test_many_operands_are_summed_in_parts() -> None:
    xs = [torch.randn(5) for _ in range(20)]
    graph = check(lambda *xs: sum(xs), *xs)
    assert len(graph.steps) > 1


def test_deep_chains() -> None:
    def fn(x: Tensor) -> Tensor:
        for k in range(300):
            x = x * 1.01 + k
        return x

    check(fn, torch.randn(5, dtype=torch.float64))


def test_intermediates_follow_channels_last() -> None:
    module = aten_graph(
        lambda x, w: F.relu(F.conv2d(x, w)) * 2, [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 1, 1)]
    )
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        node.meta["layout"] = "channels_last"
    args = [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 1, 1)]
    graph = lower_module(module, args)
    copy, conv, last = graph.steps
    assert isinstance(copy, Loop) and copy.buffer.strides == (75, 1, 15, 3)
    assert isinstance(conv, Extern) and conv.results[0] is not None
    assert conv.results[0].strides == (100, 1, 20, 4)
    assert isinstance(last, Loop) and last.buffer.strides == (100, 25, 5, 1)
    x, w = args
    torch.testing.assert_close(interpret(graph, args)[0], F.relu(F.conv2d(x, w)) * 2)


@pytest.mark.parametrize(
    ("count", "first", "strides"),
    [(1, 3, (75, 25, 5, 1)), (1, 75, (75, 1, 15, 3)), (2, 75, (75, 1, 15, 3))],
)
def test_an_image_of_tokens_lies_as_aten_takes_it(
    count: int, first: int, strides: tuple[int, ...]
) -> None:
    """A single one by its first stride: as rows, or as channels-last."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d((x * 2).as_strided((count, 3, 5, 5), (first, 1, 15, 3)), w)

    args = [torch.randn(count, 25, 3), torch.randn(4, 3, 1, 1)]
    graph = lower_module(aten_graph(fn, args), args)
    (conv,) = (step for step in graph.steps if isinstance(step, Extern))
    (image, *_) = (x for x in conv.args if isinstance(x, View) and x.shape == (count, 3, 5, 5))
    assert image.strides == strides
    found, want = interpret(graph, args)[0], fn(*args)
    torch.testing.assert_close(found, want)
    assert found.stride() == want.stride()


# ------------------------------------------------------------------------------ externs


def test_externs_take_views_and_tell_why() -> None:
    graph = check(
        lambda x: x.transpose(1, 2) @ x[:, :3].transpose(1, 2).mT,
        torch.randn(2, 3, 4),
        allow=["bmm"],
    )
    assert externs(graph) == ["bmm"]
    assert "matrix products" in graph.notes[0]


def test_random_calls_run_even_if_unused() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.rand_like(x)
        return x + 1

    assert externs(lowered(fn, torch.randn(3))) == ["rand_like"]


def test_complex_numbers_are_atens() -> None:
    graph = check(
        lambda x: torch.fft.fft(x).abs(),
        torch.randn(8),
        allow=["_to_copy", "_fft_r2c", "_fft_c2c", "abs"],
    )
    assert any("complex64" in note for note in graph.notes)


def test_constants() -> None:
    check(lambda x: x * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0]), torch.randn(3))


# ------------------------------------------------------------------------------ symbolic sizes


def test_symbolic_pointwise_and_reductions() -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        z = (x + y).softmax(-1)
        return [z, z.sum(0), F.layer_norm(x, x.shape[-1:]), x.mean(), x.argmax(1)]

    check_symbolic(
        fn, [torch.randn(5, 7), torch.randn(5, 7)], [torch.randn(3, 11), torch.randn(3, 11)]
    )


def test_symbolic_views() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        b, s, h = x.shape
        heads = x.view(b, s, 2, h // 2).transpose(1, 2)
        return [
            heads.exp().transpose(1, 2).reshape(b, s, h), x.flatten(1) + 1, x[:, -1] * 2,
            x[:, :-1] + x[:, 1:],
            torch.cat([x, x * 2], 1), x.unsqueeze(1).expand(b, 3, s, h) + 1, F.pad(x, (1, 2)),
            torch.arange(s) * 2, torch.full((s, s), -1.0).triu(1), x.roll(1, 1),
        ]  # fmt: skip

    check_symbolic(fn, [torch.randn(3, 5, 8)], [torch.randn(2, 9, 8)], [torch.randn(4, 2, 6)])


def test_symbolic_gathers_and_windows() -> None:
    def fn(w: Tensor, i: Tensor, x: Tensor) -> list[Tensor]:
        return [
            F.embedding(i, w), w[i], F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 1),
        ]  # fmt: skip

    def args(n: int, k: int, h: int) -> list[Tensor]:
        return [torch.randn(n, 4), torch.randint(0, n, (k,)), torch.randn(2, 3, h, h + 3)]

    check_symbolic(fn, args(10, 5, 8), args(7, 3, 13))


def test_large_symbolic_reductions() -> None:
    check_symbolic(
        lambda x: (x.sum(), x.amax()), [torch.randn(70000)], [torch.randn(4096)], [torch.randn(81)]
    )
