"""The checker of the loop IR: each property, broken by hand, is told with stage and line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusee.backends import lookup, native
from fusee.errors import CheckError
from fusee.loops import (
    Acc,
    Accumulate,
    Buffer,
    Extern,
    Kernel,
    Loop,
    LoopGraph,
    Phase,
    Role,
    Schedule,
    Step,
    Store,
    Values,
    View,
    op,
)
from fusee.loops.checker import check_graph, check_plan, check_schedule
from fusee.loops.fusion import fuse
from fusee.loops.memory import Plan, plan_memory
from fusee.sym import Symbol
from tests.aten.harness import one_node
from tests.loops.lower.against_eager import lowered

F32 = torch.float32
ROW, COL, SUM = Symbol("i0", 0, 8), Symbol("i1", 0, 4), Symbol("r0", 0, 4)
ACC = Acc("a", "sum", F32)
WIDE = Symbol("i1", 0, 3)  # three of the four columns


def _buffer(name: str, *shape: int, role: Role = "scratch", dtype: torch.dtype = F32) -> Buffer:
    strides = [1] * len(shape)
    for k in range(len(shape) - 1, 0, -1):
        strides[k - 1] = strides[k] * shape[k]
    return Buffer(name, dtype, shape, tuple(strides), role)


class Made:
    """x (8, 4) and y (8) come in, t (8, 4) and s (8) lie between, out (8, 4) is returned."""

    def __init__(self) -> None:
        self.values = Values()
        self.x, self.y = _buffer("x", 8, 4, role="input"), _buffer("y", 8, role="input")
        self.t, self.s = _buffer("t", 8, 4), _buffer("s", 8)
        self.out = _buffer("out", 8, 4, role="result")
        self.at = 4 * ROW.expr + COL.expr

    def loop(self, buffer: Buffer, source: Buffer, **given: Any) -> Loop:
        """buffer[at] = source[at], or what `given` says otherwise."""
        fields = {"axes": (ROW, COL), "index": self.at, "origin": "neg model.py:12", **given}
        value = fields.pop("value", None) or self.values.load(source, fields["index"])
        return Loop(buffer, value=value, **fields)

    def graph(self, *steps: Step) -> LoopGraph:
        whole = View(self.out, self.out.shape, self.out.strides, 0)
        return LoopGraph(self.values, [self.x, self.y], list(steps), [whole])

    def call(self, source: Buffer, *results: Buffer, **given: Any) -> Extern:
        view = View(source, source.shape, source.strides, 0)
        return Extern("aten.some", torch.neg, (view,), {}, results, out=True, **given)


def _refused(check: Callable[..., None], *given: Any) -> CheckError:
    with pytest.raises(CheckError) as caught:
        check(*given)
    return caught.value


def _of_graph(steps: Callable[[Made], Sequence[Step]]) -> CheckError:
    made = Made()
    return _refused(check_graph, made.graph(*steps(made)))


def _of_phases(phases: Callable[[Made], list[Phase]], **given: Any) -> CheckError:
    made = Made()
    kernel = Kernel((ROW,), phases(made), origin="sum model.py:7", **given)
    graph = made.graph(made.loop(made.out, made.x))
    return _refused(check_schedule, Schedule(graph, [kernel], []))


# ------------------------------------------------------------------------------ loops


def test_a_right_graph_passes_all_stages() -> None:
    made = Made()
    total = _sum(made, Acc("a", "sum", F32))
    scaled = op("mul", made.values.load(made.x, made.at), made.values.load(made.s, ROW.expr))
    graph = made.graph(total, made.loop(made.t, made.x, value=scaled), made.call(made.t, made.out))
    check_graph(graph)
    schedule = fuse(graph)
    check_schedule(schedule)
    check_plan(plan_memory(schedule))


LOOPS: dict[str, tuple[Callable[[Made], Sequence[Step]], str]] = {
    "a read above the end": (
        lambda m: [m.loop(m.out, m.x, value=m.values.load(m.x, m.at + 1))],
        "reads x[4*i0 + i1 + 1]: 32 is outside of 32 elements",
    ),
    "a read below the beginning": (
        lambda m: [m.loop(m.out, m.x, value=m.values.load(m.x, m.at - 1))],
        "-1 is outside of 32",
    ),
    "a read of rows as columns": (
        lambda m: [m.loop(m.out, m.x, value=m.values.load(m.x, ROW.expr * 4 + COL.expr // 2 * 5))],
        "is outside of 32",
    ),
    "a masked read where the mask lets too much through": (
        lambda m: [m.loop(m.out, m.x, value=_padded(m, 2))],
        "where its mask is true: -",
    ),
    "a store outside": (lambda m: [m.loop(m.out, m.x, index=m.at + 4)], "stores to out[4*i0"),
    "an axis of another loop": (
        lambda m: [m.loop(m.out, m.x, value=m.values.load(m.x, 4 * ROW.expr + SUM.expr))],
        "a load names r0, which no loop around it runs along",
    ),
    "a read of what is written later": (
        lambda m: [m.loop(m.out, m.t), m.loop(m.t, m.x)],
        "reads t, which nothing has written yet",
    ),
    "a call that reads what nothing wrote": (
        lambda m: [m.call(m.t, m.out)],
        "the call of aten.some: reads t, which nothing has written yet",
    ),
    "a result that nothing wrote": (
        lambda m: [m.loop(m.t, m.x)],
        "the graph's results: out is returned, and nothing is stored in it",
    ),
    "a result written in part": (
        lambda m: [
            m.loop(m.out, m.x, axes=(ROW,), index=4 * ROW.expr, value=m.values.load(m.x, ROW.expr))
        ],
        "24 elements of out are never stored",
    ),
    "pieces that overlap": (
        lambda m: [
            m.loop(m.out, m.x, axes=(ROW, WIDE), index=4 * ROW.expr + WIDE.expr),
            m.loop(m.out, m.x, axes=(ROW, WIDE), index=4 * ROW.expr + WIDE.expr + 1),
        ],
        "stores 24 elements in out, which lacks 8",
    ),
    "a sum into memory that nothing wrote": (
        lambda m: [m.loop(m.out, m.x, mode="add")],
        "changes out, of which 32 elements are not stored yet",
    ),
    "points that store to one place": (
        lambda m: [m.loop(m.out, m.x, index=COL.expr)],
        "all points along i0 store to one place of out",
    ),
    "points whose places overlap": (
        lambda m: [
            m.loop(m.out, m.x, index=2 * ROW.expr + COL.expr, value=m.values.load(m.x, m.at))
        ],
        "two points store to one place of out",
    ),
    "operands of two dtypes": (
        lambda m: [m.loop(m.out, m.x, value=_raw(m, "add", F32, m.values.const(1, torch.int64)))],
        "its operands are [torch.float32, torch.int64]",
    ),
    "a comparison that is no bool": (
        lambda m: [m.loop(m.out, m.x, value=_raw(m, "lt", F32, m.values.const(1.0, F32)))],
        "its operation gives torch.bool",
    ),
    "floats that are shifted": (
        lambda m: [m.loop(m.out, m.x, value=_raw(m, "shl", F32, m.values.const(1.0, F32)))],
        "shl(load, const) of torch.float32: its operands are",
    ),
    "an unknown operation": (
        lambda m: [m.loop(m.out, m.x, value=_raw(m, "softplus", F32))],
        "the vocabulary has no such operation",
    ),
    "a load of another dtype than its buffer's": (
        lambda m: [m.loop(m.out, m.x, value=m.values.make("load", (), torch.int32, (m.x, m.at)))],
        "load() of torch.int32",
    ),
    "a sum in another dtype than its values'": (
        lambda m: [_sum(m, Acc("a", "sum", torch.float64))],
        "a of torch.float64 gathers values of torch.float32",
    ),
    "a reduction that does not exist": (
        lambda m: [_sum(m, Acc("a", "mean", F32))],
        "there is no reduction 'mean'",
    ),
    "the place of a maximum without places": (
        lambda m: [_sum(m, Acc("a", "argmax", torch.int64))],
        "a has no int64 index to gather beside each value",
    ),
    "a sum whose result reads along the sum": (
        lambda m: [
            _sum(m, Acc("a", "sum", F32), result=m.values.load(m.x, 4 * ROW.expr + SUM.expr))
        ],
        "a load names r0, which no loop around it runs along",
    ),
    "a view that is longer than its buffer": (
        lambda m: [m.loop(m.t, m.x), _longer(m.call(m.t, m.out))],
        "a view of t reaches element 35 of 32",
    ),
}


def _raw(m: Made, name: str, dtype: torch.dtype, *more: Any) -> Any:
    return m.values.make(name, (m.values.load(m.x, m.at), *more), dtype)


def _sum(m: Made, acc: Acc, **given: Any) -> Loop:
    value = m.values.load(m.x, 4 * ROW.expr + SUM.expr)
    return Loop(m.s, (ROW,), ROW.expr, value, (SUM,), acc, **given)


def _padded(m: Made, width: int) -> Any:
    """x moved down by three places, zeros before it; `width` is how many zeros the mask knows."""
    index = m.at - 3
    inside = op("ge", m.values.index(m.at), m.values.const(width, torch.int64))
    return m.values.load(m.x, index, inside, m.values.const(0.0, F32))


def _longer(call: Extern) -> Extern:
    view = dataclasses.replace(call.args[0], offset=4)
    return dataclasses.replace(call, args=(view,))


@pytest.mark.parametrize("name", LOOPS)
def test_a_broken_loop_is_told(name: str) -> None:
    steps, text = LOOPS[name]
    error = _of_graph(steps)
    assert text in error.what
    assert error.what.startswith("after the stage 'lower', ")


def test_the_mask_of_a_padded_read_is_understood() -> None:
    made = Made()
    check_graph(made.graph(made.loop(made.out, made.x, value=_padded(made, 3))))


def test_the_error_names_kernel_line_and_what_to_do() -> None:
    error = _of_graph(lambda m: [m.loop(m.out, m.x, index=m.at + 4)])
    assert "the kernel that stores out: stores to out[" in error.what
    assert error.where == "neg model.py:12"
    assert "report" in str(error)


# ------------------------------------------------------------------------------ kernels


def _store(m: Made, buffer: Buffer, value: Any) -> Store:
    return Store(buffer, m.at, value)


KERNELS: dict[str, tuple[Callable[[Made], list[Phase]], str]] = {
    "an intermediate read before its store": (
        lambda m: [
            Phase((COL,), [_store(m, m.out, m.values.load(m.t, m.at))]),
            Phase((COL,), [_store(m, m.t, m.values.load(m.x, m.at))]),
        ],
        "reads t[4*i0 + i1] before it is written",
    ),
    "a neighbour's intermediate, of the same pass": (
        lambda m: [
            Phase((COL,), [
                _store(m, m.t, m.values.load(m.x, m.at)),
                _store(m, m.out, m.values.load(m.t, 31 - m.at)),
            ]),
        ],
        "before it is written",
    ),
    "the intermediate of another outer point": (
        lambda m: [
            Phase((COL,), [_store(m, m.t, m.values.load(m.x, m.at))]),
            Phase((COL,), [_store(m, m.out, m.values.load(m.t, ROW.expr + 8 * COL.expr))]),
        ],
        "reads t[i0 + 8*i1] before it is written",
    ),
    "an input that other points have overwritten": (
        lambda m: [Phase((COL,), [_store(m, m.x, m.values.load(m.x, 31 - m.at))])],
        "where another of its points may have written",
    ),
    "an accumulator read too early": (
        lambda m: [
            Phase((COL,), [_store(m, m.out, m.values.acc(ACC))]),
            Phase((SUM,), [Accumulate(ACC, m.values.load(m.x, 4 * ROW.expr + SUM.expr))]),
        ],
        "the accumulator a is read before it gathers anything",
    ),
    "an accumulator read while it gathers": (
        lambda m: [
            Phase((COL,), [
                Accumulate(ACC, m.values.load(m.x, m.at)),
                _store(m, m.out, m.values.acc(ACC)),
            ]),
        ],
        "the accumulator a is read while it gathers, and is no scan",
    ),
    "an accumulator that gathers in two phases": (
        lambda m: [
            Phase((SUM,), [Accumulate(ACC, m.values.load(m.x, 4 * ROW.expr + SUM.expr))]),
            Phase((COL,), [Accumulate(ACC, m.values.load(m.x, m.at))]),
        ],
        "the accumulator a gathers twice",
    ),
    "a store of another dtype": (
        lambda m: [Phase((COL,), [_store(m, m.out, m.values.const(1, torch.int64))])],
        "torch.int64 is stored into out, which is torch.float32",
    ),
    "one axis twice": (
        lambda m: [Phase((ROW,), [_store(m, m.out, m.values.load(m.x, ROW.expr))])],
        "an axis occurs twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_broken_kernel_is_told(name: str) -> None:
    phases, text = KERNELS[name]
    error = _of_phases(phases)
    assert text in error.what
    assert error.what.startswith("after the stage 'fuse', ")
    assert error.where == "sum model.py:7"


def test_lanes_must_be_the_last_outer_axis() -> None:
    def copy(m: Made) -> list[Phase]:
        return [Phase((COL,), [_store(m, m.out, m.values.load(m.x, m.at))])]

    assert "lanes run along i1" in _of_phases(copy, lanes=COL).what


def test_kernels_in_another_order_than_the_program() -> None:
    """y is negated in place, and what read the old values of it now comes after that."""
    made = Made()
    y, at = made.y, ROW.expr
    first = Loop(made.s, (ROW,), at, made.values.load(y, at))
    second = Loop(y, (ROW,), at, op("neg", made.values.load(y, at)))
    out = made.loop(made.out, made.x)
    graph = made.graph(first, second, out)
    check_graph(graph)
    schedule = fuse(graph, merge=False)
    kept = {item.phases[0].body[0].buffer: item for item in schedule.items}  # type: ignore[union-attr]
    check_schedule(schedule)
    assert first.buffer not in kept  # nobody reads it
    stored = Kernel((ROW,), [Phase((), [Store(made.s, at, made.values.load(y, at))])])
    right = Schedule(graph, [stored, kept[y], kept[made.out]], [])
    wrong = Schedule(graph, [kept[y], stored, kept[made.out]], [])
    check_schedule(right)
    refused = _refused(check_schedule, wrong)
    assert "reads y after 1 stores, in the program 0 to 0" in refused.what


# ------------------------------------------------------------------------------ the plan


def _planned() -> tuple[Made, Schedule]:
    """t is read by the kernel that writes `other`: both are alive then."""
    made = Made()
    other = _buffer("other", 8, 4)
    graph = made.graph(
        made.loop(made.t, made.x), made.loop(other, made.t), made.call(other, made.out)
    )
    return made, fuse(graph, merge=False)


def test_a_broken_plan_is_told() -> None:
    made, schedule = _planned()
    good = plan_memory(schedule)
    check_plan(good)
    t, other = good.offsets

    def told(**offsets: int | None) -> str:
        new = dict(good.offsets)
        for buffer in (t, other):
            if buffer.name in offsets:
                place = offsets[buffer.name]
                new = {b: o for b, o in new.items() if b is not buffer}
                if place is not None:
                    new[buffer] = place
        return _refused(check_plan, dataclasses.replace(good, offsets=new)).what

    assert t is made.t and good.total_bytes == 256
    assert "other and t are alive together and share bytes" in told(t=64, other=64)
    assert "other and t are alive together and share bytes" in told(t=0, other=64)
    assert "other lies at 192 to 320 of 256 bytes" in told(t=0, other=192)
    assert "other lies at 130 to 258 of 256 bytes" in told(t=0, other=130)
    assert "t has no place in the arena" in told(t=None)
    assert told(t=64, other=64).startswith("after the stage 'memory', the kernel that stores other")


def test_a_call_must_not_overwrite_what_is_read_later() -> None:
    made = Made()
    before = _buffer("before", 8, 4, role="extern")
    after = _buffer("after", 8, 4, role="extern")
    call = made.call(before, after, in_place=torch.neg_, mutates=(before,))
    call.call = torch.neg_  # as reuse_operands does where nobody reads the operand any more
    last = made.loop(made.out, before)
    graph = made.graph(made.call(made.x, before), call, last)
    schedule = fuse(graph)
    error = _refused(check_plan, plan_memory(schedule))
    assert "overwrites before, which is read afterwards" in error.what


# ------------------------------------------------------------------------------ in the pipeline


def _break_after(
    monkeypatch: pytest.MonkeyPatch, stage: str, broken: Callable[[Any], None]
) -> None:
    """The pipeline with one more thing done in one stage, before its result is verified."""

    name = {"lower": "_lower", "fuse": "fuse", "memory": "plan_memory"}[stage]
    take = getattr(native, name)

    def changed(*given: Any, **named: Any) -> Any:
        form = take(*given, **named)
        broken(form)
        return form

    monkeypatch.setattr(native, name, changed)


def _two_sums(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) @ x.cumsum(0).t()


def _shift_loads(loops: LoopGraph) -> None:
    loop = next(step for step in loops.steps if isinstance(step, Loop))
    loop.index = loop.index + 1


def _reverse(schedule: Schedule) -> None:
    schedule.items.reverse()


def _pile_up(plan: Plan) -> None:
    plan.offsets.update(dict.fromkeys(plan.offsets, 0))


BREAKS: dict[str, Callable[[Any], None]] = {
    "lower": _shift_loads,
    "fuse": _reverse,
    "memory": _pile_up,
}


@pytest.mark.parametrize("stage", BREAKS)
def test_every_stage_is_verified_if_asked(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_after(monkeypatch, stage, BREAKS[stage])
    x = torch.randn(5, 7)
    gm = one_node(_two_sums, [x])
    with pytest.raises(CheckError, match=f"after the stage '{stage}'"):
        lookup("fusee", {"check": True})(gm, [x])
    compiled: Any = lookup("fusee", {"check": False})(gm, [x])
    assert "check" not in compiled.report().stages_ms


def test_time_of_checking_is_told_apart() -> None:
    x = torch.randn(5, 7)
    compiled: Any = lookup("fusee", {"check": True})(one_node(_two_sums, [x]), [x])
    assert compiled.report().stages_ms["check"] > 0
    check_graph(lowered(_two_sums, x))
