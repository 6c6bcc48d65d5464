"""Graphs with tensors on a GPU, as they are before a kernel is made: traced from fakes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fusee.aten import WHOLE, AtenGraph, must_run
from fusee.aten.rewriter import Editor
from fusee.aten.trace import trace
from fusee.aten.weights import constants, run_passes
from fusee.backends import native
from fusee.backends.report import Report
from fusee.config import Options
from fusee.errors import CheckError
from fusee.fake import Twins, fake_mode
from fusee.fake.torch_python import refuse
from fusee.loops import Buffer, Extern, LoopGraph
from fusee.loops.checker import check_graph
from fusee.loops.fusion import fuse
from fusee.loops.lower import GraphLowering, supported
from fusee.loops.schedule import reads
from fusee.targets.cuda import CUDA, PROFILE
from fusee.targets.cuda.passes import biases_apart, even_rows, numbers_home, rows_as_sums

HOME = torch.device("cuda", 0)
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
Node = Callable[..., fx.Node]


def captured(build: Callable[..., Any], *devices: str) -> tuple[fx.GraphModule, list[Tensor]]:
    """`build` makes nodes from what makes one, and inputs: (4, 5) on a GPU, numbers elsewhere."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(devices))]
    found = build(lambda fn, *a, **how: graph.call_function(fn, a, how), *given)
    graph.output(found if isinstance(found, tuple) else (found,))
    with FakeTensorMode():
        inputs = [
            torch.empty(4, 5, device="cuda") if x == "cuda" else torch.empty((), device=x)
            for x in devices
        ]
    return fx.GraphModule({}, graph), inputs


def traced(build: Callable[..., Any], *devices: str) -> AtenGraph:
    return trace(*captured(build, *devices), keep=(supported() | WHOLE).__contains__)


def lowered(aten: AtenGraph) -> LoopGraph:
    edit = Editor(aten, Options())
    numbers_home(edit, HOME)
    inputs = [
        Buffer(spec.name, spec.dtype, spec.size, spec.stride, "input")
        for spec in aten.inputs
        if spec.dtype is not None
    ]
    return GraphLowering(
        aten.graph,
        inputs,
        profile=PROFILE,
        constants=aten.constants,
        size_of=int,
        extern_of=lambda op: None,
        must_run=must_run,
        home=HOME,
    ).run()


def externs(loops: LoopGraph) -> list[tuple[str, bool]]:
    return [(step.name, step.apart) for step in loops.steps if isinstance(step, Extern)]


# What asks torch's own shape functions for the device (fusee/fake/rules.py), and neighbours.
LAID_OUT = """
    fft.rfft2 fft.hfft2 fft.fft2 svd linalg.eig nonzero_static nn.functional.max_unpool2d
    nn.functional.layer_norm native_layer_norm native_batch_norm _native_batch_norm_legit
    nn.functional.batch_norm nn.functional.group_norm nn.functional.logsigmoid
    nn.functional.embedding_bag nn.functional.interpolate softmax sort add cat where matmul
    zeros_like full index_put cumsum max nn.functional.linear nn.functional.max_pool2d
    nn.functional.scaled_dot_product_attention
""".split()


class Compared(TorchDispatchMode):
    """Each operator called on torch's fakes beside what our twins say of it on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.differ: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, before = kwargs or {}, tree_map(_meta, (args, kwargs or {}))
        found = op(*args, **kwargs)
        is_new = not (op.is_view or op._schema.is_mutable or "empty" in str(op))
        if is_new and op.namespace == "aten":
            ours = self._ours(op, *before)
            self.count += 1
            if tree_map(_geometry, found) != tree_map(_geometry, ours):
                self.differ.append(f"{op}{before}: {found}, not {ours}")
        return found

    def _ours(self, op: Any, args: Any, kwargs: Any) -> Any:
        try:
            return Twins().run(op, args, kwargs, HOME)
        except RuntimeError as error:  # the caller expects such errors of torch's
            return error


def _meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _geometry(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else type(x)


def fakes(mode: FakeTensorMode, sample: SampleInput) -> Any:
    def fake(x: Any) -> Any:
        return FakeTensor(mode, _meta(x), HOME) if isinstance(x, Tensor) else x

    return tree_map(fake, ((sample.input, *sample.args), sample.kwargs))


@pytest.mark.parametrize("name", LAID_OUT)
def test_results_lie_as_on_a_gpu(name: str) -> None:
    """Of twins, which graphs are traced with, and of fakes, which programs are captured with."""
    infos = [info for info in op_db if info.name == name]
    compared = Compared()
    for info, dtype in product(infos, (torch.float32, torch.bfloat16, torch.complex64)):
        if dtype not in info.dtypesIfCUDA and dtype not in info.dtypes:
            continue
        for sample in islice(info.sample_inputs("cpu", dtype), 30):
            found: list[Any] = []
            for mode in (FakeTensorMode(allow_non_fake_inputs=True), fake_mode()):
                given, named = fakes(mode, sample)
                watching = nullcontext() if found else compared
                with mode, watching, suppress(RuntimeError):  # torch asks for a GPU's library
                    found.append(tree_map(_geometry, info.op(*given, **named)))
            assert len(found) < 2 or found[0] == found[1]
    assert compared.count and not compared.differ, compared.differ


# What an H200 gave with torch 2.11: dtype and weights, shape and strides, strides of the result.
# cuDNN has images in one of their layouts, ATen's own kernel keeps any order.
NORMS = [
    (torch.float32, None, (8, 4), (1, 8), (1, 8)),
    (torch.float32, torch.float32, (8, 4), (1, 8), (1, 8)),
    (torch.float32, None, (3, 4, 5), (20, 1, 4), (20, 1, 4)),
    (torch.float32, torch.float32, (3, 4, 5), (20, 1, 4), (20, 5, 1)),
    (torch.float16, torch.float16, (3, 4, 5), (20, 1, 4), (20, 1, 4)),
    (torch.float16, torch.float32, (3, 4, 5), (20, 1, 4), (20, 5, 1)),
    (torch.bfloat16, torch.float32, (3, 4, 5), (20, 1, 4), (20, 1, 4)),
    (torch.float64, torch.float64, (2, 4, 3, 5), (60, 15, 1, 3), (60, 15, 5, 1)),
    (torch.float64, torch.float64, (2, 4, 3, 5), (60, 1, 20, 4), (60, 1, 20, 4)),
    (torch.float32, None, (15, 16, 2), (16, 1, 16), (32, 1, 16)),  # unfolded
]


@pytest.mark.parametrize(("dtype", "weights", "shape", "stride", "want"), NORMS)
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_keeps_an_order(
    dtype: torch.dtype, weights: Any, shape: Any, stride: Any, want: Any, training: bool
) -> None:
    def row(of: torch.dtype) -> Tensor:
        return torch.empty(shape[1], dtype=of, device="meta")

    x = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    affine = [None, None] if weights is None else [row(weights), row(weights)]
    moments = [row(weights or dtype), row(weights or dtype)]
    given = (x, *affine, *moments, training, 0.1, 1e-5)
    found = Twins().run(torch.ops.aten.native_batch_norm.default, given, {}, HOME)
    assert found[0].stride() == want


def test_another_dtype_at_places_is_refused() -> None:
    """The CPU is asked, for a bad place would end a GPU's context."""
    kinds = torch.float32, torch.int64, torch.bfloat16
    x, places, y = (torch.empty(3, dtype=kind, device="meta") for kind in kinds)
    with pytest.raises(RuntimeError, match="source and destination dtypes match"):
        refuse(torch.ops.aten.index_put_.default, (x, [places], y), {}, HOME)


def test_a_product_of_vectors_has_no_rows() -> None:
    def build(call: Node, x: fx.Node) -> fx.Node:
        row = call(Tensor.half, call(torch.select, x, 0, 1))
        return call(F.linear, row, row)

    aten = traced(build, "cuda")
    even_rows(Editor(aten, Options()))


@contextmanager
def casting() -> Iterator[None]:
    """torch.autocast("cuda") itself asks for a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_dropout_is_one_call() -> None:
    """Eager draws its numbers so on a GPU."""
    aten = traced(lambda call, x: call(F.dropout, x, 0.3), "cuda")
    assert externs(lowered(aten)) == [("aten.native_dropout.default", False)]


def test_dropout_in_training_saves_its_mask() -> None:
    gm, (x,) = captured(lambda call, x: call(torch.sum, call(F.dropout, x, 0.3)), "cuda")
    x.requires_grad_()
    split = native.split_native(gm, [x], Options(), Report("dropout"), CUDA())
    assert "native_dropout" in str(split.forward)
    assert "native_dropout_backward" in str(split.backward)


NUMBERS: dict[str, Callable[..., Any]] = {
    "an input": lambda call, x, s: call(torch.mul, x, s),
    "computed": lambda call, x, s: call(torch.mul, x, call(torch.add, call(torch.exp, s), 1)),
    "made": lambda call, x, s: call(torch.add, call(torch.mul, x, s), call(torch.tensor, 2.0)),
    "a float": lambda call, x, s: call(torch.mul, x, call(Tensor.item, s)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_the_cpu_are_brought(name: str) -> None:
    aten = traced(NUMBERS[name], "cuda", "cpu")
    assert not externs(lowered(aten))
    assert ["brought" in x.meta for x in aten.placeholders] == [False, True]


@pytest.mark.parametrize("kind", ["literal", "parameter"])
def test_numbers_that_others_are_derived_from_are_brought(kind: str) -> None:
    """A kernel would read what is derived in the CPU's memory."""

    def build(call: Node, x: fx.Node, *s: fx.Node) -> fx.Node:
        for _ in range(2):  # the second literal is a constant of the graph
            x = call(torch.div, x, call(torch.sqrt, *(s or (call(torch.tensor, 16.0),))))
        return x

    aten = traced(build, "cuda", *["cpu"] * (kind == "parameter"))
    aten.inputs = tuple(replace(spec, is_static=spec.device != HOME) for spec in aten.inputs)
    edit = Editor(aten, Options())
    numbers_home(edit, HOME)
    (derived,) = constants(edit)
    copies = [s for s in derived.steps if s.target is torch.ops.aten._to_copy.default]
    assert [step.kwargs for step in copies] == [{"device": HOME}]


def test_numbers_that_both_use() -> None:
    aten = traced(lambda call, x, s: (call(torch.mul, x, s), call(torch.exp, s)), "cuda", "cpu")
    assert externs(lowered(aten)) == [("aten._to_copy.default", True), ("aten.exp.default", True)]
    assert "brought" not in aten.placeholders[1].meta


@pytest.mark.parametrize("name", ["select", "sum"])
def test_numbers_that_are_read_from_a_tensor_of_the_cpu(name: str) -> None:
    """A kernel would read the CPU's memory."""

    def build(call: Node, x: fx.Node) -> fx.Node:
        row = call(torch.arange, 3.0)
        number = call(torch.select, row, 0, 1) if name == "select" else call(torch.sum, row)
        return call(torch.mul, x, call(torch.exp, number))

    names = [name for name, _ in externs(lowered(traced(build, "cuda")))]
    kind = "aten.select.int" if name == "select" else "aten.sum.default"
    assert names == ["aten.arange.default", kind, "aten._to_copy.default"]


def test_numbers_that_are_counted_on_the_cpu() -> None:
    """An optimizer's count of steps: what is made of it is the GPU's, once it has come there."""

    def build(call: Node, x: fx.Node, s: fx.Node) -> fx.Node:
        call(Tensor.add_, s, 1)
        return call(torch.mul, x, call(torch.pow, 0.9, call(Tensor.double, s)))

    steps = lowered(traced(build, "cuda", "cpu")).steps
    counted, come, *loops = steps
    assert isinstance(counted, Extern) and counted.name == "aten.add.Tensor"
    assert isinstance(come, Extern) and come.kwargs["device"] == HOME
    assert come.results[0] in {b for loop in loops for b in reads(loop)}
    assert not any(isinstance(loop, Extern) for loop in loops)


def test_random_numbers_stay_where_they_are_drawn() -> None:
    aten = traced(lambda call, x: call(torch.mul, x, call(torch.rand, ())), "cuda")
    names = [name for name, _ in externs(lowered(aten))]
    assert names == ["aten.rand.default", "aten._to_copy.default"]


def test_what_is_elsewhere_is_atens() -> None:
    def build(call: Node, x: fx.Node) -> tuple[fx.Node, ...]:
        there = call(Tensor.cpu, call(torch.mul, x, 2))
        return call(torch.exp, there), call(torch.exp, x), call(torch.zeros_like, x, device="cpu")

    names = externs(lowered(traced(build, "cuda")))
    assert names == [
        ("aten._to_copy.default", True),
        ("aten.exp.default", True),
        ("aten.full.default", True),
    ]


def test_what_an_operator_is_made_of_lies_where_its_operand_does() -> None:
    def build(call: Node, x: fx.Node) -> tuple[fx.Node, ...]:
        return call(torch.vander, call(torch.arange, 3)), call(torch.mul, x, 2)

    aten = traced(build, "cuda")
    there = [node for node in aten.graph.nodes if node.target != torch.ops.aten.mul.Tensor]
    assert {node.meta["device"].type for node in there if node.op == "call_function"} == {"cpu"}


MOVES: dict[str, Callable[[Node, fx.Node, fx.Node], fx.Node]] = {
    "type_as": lambda call, x, w: call(Tensor.type_as, w, x),
    "to another": lambda call, x, w: call(Tensor.to, w, x),
    "to a device": lambda call, x, w: call(Tensor.to, w, "cuda:0", torch.float32),
    "cuda": lambda call, x, w: call(Tensor.cuda, w),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_gradient_comes_back_to_where_its_tensor_is(name: str) -> None:
    def build(call: Node, x: fx.Node, w: fx.Node) -> fx.Node:
        there = MOVES[name](call, x, call(torch.mul, call(torch.exp, w), 2))
        return call(torch.sum, call(torch.mul, x, there))

    gm, (x, w) = captured(build, "cuda", "cpu")
    split = native.split_native(gm, [x, w.requires_grad_()], Options(), Report("moves"), CUDA())
    for half, home in ((split.forward, "cuda"), (split.backward, "cpu")):
        (copy,) = half.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
        assert torch.device(copy.kwargs["device"]).type == home
        node = half.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[-1]
        assert node.meta["device"].type == home


def test_a_gradient_of_a_number_comes_back_to_the_cpu() -> None:
    def build(call: Node, x: fx.Node, w: fx.Node) -> fx.Node:
        number = call(torch.sum, call(torch.exp, call(Tensor.expand, w, 3)))
        return call(torch.sum, call(torch.mul, x, number))

    gm, (x, w) = captured(build, "cuda", "cpu")
    split = native.split_native(gm, [x, w.requires_grad_()], Options(), Report("number"), CUDA())
    for half in (split.forward, split.backward):
        for node in half.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            whole = [y for y in node.all_input_nodes if y.meta["val"].dim()]
            assert len({torch.device(y.meta["device"]).type for y in whole}) == 1
        check_graph(lowered(half))
    assert "device=torch.device('cpu')" in str(split.backward)


def test_zeros_of_a_formula_are_where_its_call_was() -> None:
    def build(call: Node, x: fx.Node) -> Any:
        largest = call(operator.getitem, call(torch.cummax, x, 1), 0)
        return largest, call(torch.mul, call(torch.randperm, 4), 1000)

    gm, (x,) = captured(build, "cuda")
    split = native.split_native(gm, [x.requires_grad_()], Options(), Report("zeros"), CUDA())
    assert "device=torch.device('cuda:0')" in str(split.backward)
    assert "device=torch.device('cpu')" not in str(split.backward)


def test_a_kernel_that_would_read_elsewhere_is_told() -> None:
    def build(call: Node, x: fx.Node) -> fx.Node:
        return call(torch.mul, x, call(torch.sum, call(torch.arange, 3.0)))

    aten = traced(build, "cuda")
    loops = lowered(aten)
    check_graph(loops)
    loops.elsewhere.update(buffer for step in loops.steps for buffer in reads(step))
    with pytest.raises(CheckError, match="is on another device"):
        check_graph(loops)


@pytest.fixture
def determined() -> Iterator[None]:
    """Only deterministic algorithms may run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("determined")
def test_gradients_that_are_added_in_one_order() -> None:
    def build(call: Node, x: fx.Node) -> fx.Node:
        return call(
            torch.sum, call(torch.exp, call(torch.index_select, x, 1, call(torch.argmax, x, 1)))
        )

    gm, (x,) = captured(build, "cuda")
    split = native.split_native(gm, [x.requires_grad_()], Options(), Report("gather"), CUDA())
    run_passes(split.backward, Options(), CUDA().passes(Options()))
    assert ("aten.index_add.default", False) in externs(lowered(split.backward))


@pytest.mark.usefixtures("determined")
def test_replicated_edges_whose_gradient_is_determined() -> None:
    def build(call: Node, x: fx.Node) -> fx.Node:
        images = call(Tensor.view, x, 1, 1, 4, 5)
        return call(torch.sum, call(F.pad, images, [1, 2, 1, 0], mode="replicate"))

    gm, (x,) = captured(build, "cuda")
    split = native.split_native(gm, [x.requires_grad_()], Options(), Report("pad"), CUDA())
    assert "replication_pad" not in str(split.backward)


def passed(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[AtenGraph, list[str]]:
    """The graph of a function of 16-bit tensors on a GPU after the passes, and what those did."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(shapes))]
    graph.output((graph.call_function(fn, tuple(given)),))
    with FakeTensorMode():
        inputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    aten = trace(fx.GraphModule({}, graph), inputs, keep=(supported() | WHOLE).__contains__)
    with torch.no_grad():
        return aten, run_passes(aten, Options(), CUDA().passes(Options()))[1]


def agrees(aten: AtenGraph, fn: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    (got,) = fx.Interpreter(fx.GraphModule({}, aten.graph)).run(*given)
    torch.testing.assert_close(got, fn(*given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_patches_become_a_product(dims: int) -> None:
    conv = getattr(F, f"conv{dims}d")
    shapes = (2, 3, *(8, 12, 4)[:dims]), (5, 3, *(2, 4, 2)[:dims]), (5,)

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return conv(x, w, b, stride=(2, 4, 2)[:dims])

    aten, notes = passed(fn, *shapes)
    assert any("patches" in note for note in notes) and "aten.convolution" not in str(aten.graph)
    agrees(aten, fn, *shapes)


@pytest.mark.parametrize("how", [{"padding": 1}, {"stride": 1}, {"groups": 2}, {"dilation": 2}])
def test_convolutions_that_stay(how: dict[str, int]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        options: Any = {"stride": 2, **how}
        return F.conv2d(x, w, **options)

    shapes = (2, 4, 8, 8), (6, 4 // how.get("groups", 1), 2, 2)
    aten, notes = passed(fn, *shapes)
    assert "convolution" in str(aten.graph)
    assert any("channels-last" in note for note in notes) == ("groups" not in how)


def test_a_convolution_keeps_its_layout_beside_its_bias() -> None:
    """That of a joint graph, whose halves are compiled without the pass that gives layouts."""
    aten, _ = passed(F.conv2d, (2, 4, 8, 8), (6, 4, 3, 3))
    edit = Editor(aten, Options())
    (node,) = edit.calls(torch.ops.aten.convolution.default)
    with edit.before(node):
        bias = edit.call(torch.ops.aten.zeros.default, [6], dtype=torch.bfloat16, device=HOME)
    node.args = (*node.args[:2], bias, *node.args[3:])
    assert node.meta["layout"] == "channels_last"
    biases_apart(edit)
    assert "layout" not in node.meta and node.target is torch.ops.aten.add.Tensor
    (plain,) = edit.calls(torch.ops.aten.convolution.default)
    assert plain.meta["layout"] == "channels_last" and plain.args[2] is None


def test_layout_is_for_all_convolutions_together() -> None:
    """Those in groups are slower in channels-last, and others win more, as in regnet."""

    def fn(x: Tensor, first: Tensor, grouped: Tensor, last: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(F.conv2d(x, first), grouped, padding=1, groups=4), last)

    shapes = (2, 16, 8, 8), (16, 16, 1, 1), (16, 4, 3, 3), (64, 16, 1, 1)
    aten, notes = passed(fn, *shapes)
    assert any("3 convolutions in channels-last" in note for note in notes)
    agrees(aten, fn, *shapes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_biases_are_added_where_results_are_read(transposed: bool, groups: int) -> None:
    conv: Callable[..., Tensor] = F.conv_transpose2d if transposed else F.conv2d

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return conv(x, w, b, padding=1, groups=groups).relu()

    aten, _ = passed(fn, (2, 4, 9, 7), (4, 4 // groups, 3, 3), (4,))
    (node,) = (x for x in aten.graph.nodes if "aten.convolution" in str(x.target))
    assert node.args[2] is None
    agrees(aten, fn, (2, 4, 9, 7), (4, 4 // groups, 3, 3), (4,))
    assert [name for name, _ in externs(lowered(aten))] == ["aten.convolution.default"]


@pytest.mark.parametrize("groups", [2, 4])
def test_heads_of_a_group_share_keys(groups: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (
            x[:, :, None].expand(2, 4 // groups, groups, 7, 16).reshape(2, 4, 7, 16) for x in (k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    shapes = (2, 4, 7, 16), (2, 4 // groups, 7, 16), (2, 4 // groups, 7, 16)
    aten, notes = passed(fn, *shapes)
    assert any("groups of heads" in note for note in notes) and "expand" not in str(aten.graph)
    agrees(aten, fn, *shapes)


@pytest.mark.parametrize("places", [[2, 0, 1], "made"], ids=str)
def test_places_that_a_program_writes_down(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on the GPU before a call: a copy from the CPU is in no recording."""
    monkeypatch.setattr(CUDA, "device", HOME)

    def fn(x: Tensor) -> Tensor:
        found = torch.arange(3).flip(0) if places == "made" else places
        return x[:, found] + x[:, [1]]

    aten, notes = passed(fn, (4, 5))
    assert any("1 tensors derived from 0 parameters" in note for note in notes)
    assert aten.placeholders[1].meta["device"] == HOME and "slice" in str(aten.graph)
    assert not externs(lowered(aten))


def _scored(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * 0.25


def _triangle(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[-2:], dtype=torch.bool).tril()


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda scores, bias: scores.softmax(-1),
    "bias": lambda scores, bias: (scores + bias[:, :1]).softmax(-1),
    "bias of rows": lambda scores, bias: (scores + bias[:, :, :, :1]).softmax(-1),
    "bias of all": lambda scores, bias: (bias[0, 0, 0, 0] + scores).softmax(-1),
    "bias of examples": lambda scores, bias: (
        (scores.view(12, 17, 17) + bias.view(12, 17, 17)[:, :1]).view(4, 3, 17, 17).softmax(-1)
    ),
    "bias first": lambda scores, bias: (bias[0, :1] + scores).div(2.0).softmax(-1),
    "float32": lambda scores, bias: (scores + bias).softmax(-1, dtype=torch.float32).to(bias.dtype),
    "nanoGPT": lambda scores, bias: scores.masked_fill(~_triangle(scores), -math.inf).softmax(-1),
    "GPT-2": lambda scores, bias: torch.where(
        _triangle(scores), scores, torch.finfo(scores.dtype).min
    ).softmax(-1),
    "windows": lambda scores, bias: (
        (scores.view(2, 2, 3, 17, 17) + bias[:2, :1].unsqueeze(0)).view(4, 3, 17, 17) + bias[:1]
    ).softmax(-1),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_written_as_products(name: str, packed: bool) -> None:
    """One operator, which reads queries, keys and values where a layer put them."""

    def fn(qkv: Tensor, bias: Tensor) -> Tensor:
        q, k, v = qkv.view(3, 4, 3, 17, 8)
        if packed:
            q, k, v = qkv.view(4, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
        found = WRITTEN[name](_scored(q, k), bias) @ v
        return found.transpose(1, 2).reshape(4, 17, 24)

    shapes = (4, 17, 72), (4, 3, 17, 17)
    aten, notes = passed(fn, *shapes)
    assert any("became attention" in note for note in notes) and "bmm" not in str(aten.graph)
    agrees(aten, fn, *shapes)
    assert [name for name, _ in externs(lowered(aten))] == [str(ATTENTION)]
    (node,) = aten.graph.find_nodes(op="call_function", target=ATTENTION)
    assert node.args[5] == (name in ("nanoGPT", "GPT-2"))  # causal


def test_attention_without_heads_written_as_products() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.bmm((torch.bmm(q * 0.3, k.mT) + bias).softmax(2), v)

    shapes = (4, 9, 16), (4, 24, 16), (4, 24, 8), (4, 9, 24)
    aten, _ = passed(fn, *shapes)
    assert [name for name, _ in externs(lowered(aten))] == [str(ATTENTION)]
    agrees(aten, fn, *shapes)


@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("how", ["added", "chosen"])
def test_rows_that_are_hidden_whole(number: float, how: str) -> None:
    """Softmax makes NaN of -inf, where ATen's attention would make zeros; of the lowest number it
    makes equal shares, where some kernels would make NaN."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if how == "added":
            return (_scored(q, k) + bias.masked_fill(bias < 0, number)).softmax(-1) @ v
        return _scored(q, k).masked_fill(bias < 0, number).softmax(-1) @ v

    shapes = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (5, 7)
    aten, notes = passed(fn, *shapes)
    assert any("became attention" in note for note in notes)
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    given[-1][2] = -1.0
    given[-1][3] = 1.0
    (got,) = fx.Interpreter(fx.GraphModule({}, aten.graph)).run(*given)
    want = fn(*given)
    assert want[:, :, 2].isnan().all() == (number == -math.inf) and not want[:, :, 3].isnan().any()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert "clamp_min" in str(aten.graph) or "-1e+30" in str(aten.graph)


NOT_ATTENTION: dict[str, Callable[..., Any]] = {
    "scores are read": lambda s, v, bias: (s.softmax(-1) @ v, s),
    "shares are read": lambda s, v, bias: ((p := s.softmax(-1)) @ v, p),
    "a mask of small numbers": lambda s, v, bias: s.masked_fill(bias < 0, -1e4).softmax(-1) @ v,
    "a wider bias": lambda s, v, bias: (s + bias.float()).softmax(-1).to(v.dtype) @ v,
    "scores of another type": lambda s, v, bias: (
        (s.float() @ s.float().mT).softmax(-1).to(v.dtype) @ v
    ),
    "one row": lambda s, v, bias: s[:, :, :1].softmax(-1) @ v,
    "another axis": lambda s, v, bias: s.softmax(-2) @ v,
    "another function": lambda s, v, bias: (s + bias).tanh().softmax(-1) @ v,
    "scores that are their own bias": lambda s, v, bias: (s + s).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_products_that_stay(name: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        found = NOT_ATTENTION[name](_scored(q, k), v, bias)
        return found if isinstance(found, Tensor) else found[0] + found[1].sum()

    shapes = (2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8), (6, 6)
    aten, _ = passed(fn, *shapes)
    assert "scaled_dot_product_attention" not in str(aten.graph)
    agrees(aten, fn, *shapes)


def test_masks_are_made_numbers_once() -> None:
    """Of bools ATen would make them at each call."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        mask = y > 0
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, mask)
        return x

    shapes = (2, 3, 32, 8), (2, 1, 32, 32)
    aten, _ = passed(fn, *shapes)
    assert str(aten.graph).count("aten.where.self") == 1
    agrees(aten, fn, *shapes)


@pytest.mark.parametrize("keys", [32, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_masks_have_rows_that_fused_kernels_read(keys: int, dtype: torch.dtype) -> None:
    """T5's biases lie head by head, which ATen takes for no mask of its kernels."""

    def fn(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        mask = bias.permute(2, 0, 1)
        return F.scaled_dot_product_attention(
            q, k, k, mask if dtype.is_floating_point else mask > 0
        )

    shapes = (2, 3, 12, 8), (2, 3, keys, 8), (12, keys, 3)
    aten, _ = passed(fn, *shapes)
    agrees(aten, fn, *shapes)
    loops = lowered(aten)
    (step,) = (step for step in loops.steps if isinstance(step, Extern))
    mask = step.args[3]
    assert mask.strides[-1] == 1 and not any(n % 16 for n in mask.strides[:-1])


def test_masks_that_heads_share_have_such_rows() -> None:
    """In training autograd takes the kernel, for which ATen has padded the mask."""

    def fn(q: Tensor, k: Tensor, bias: Tensor) -> Any:
        mask = F.pad(bias * 2, (0, 10))[..., :6].expand(2, 3, -1, -1)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
        return kernel(q, k, k, mask, True)[0]

    aten, _ = passed(fn, (2, 3, 6, 8), (2, 3, 6, 8), (2, 1, 6, 6))
    (step,) = (step for step in lowered(aten).steps if isinstance(step, Extern))
    mask = step.args[3]
    assert mask.shape == (2, 3, 6, 6) and mask.strides == (96, 192, 16, 1)


def test_patches_of_images_by_channels_are_copied_in_pieces() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x.permute(0, 3, 1, 2), w, b, stride=2)

    shapes = (2, 8, 6, 16), (5, 16, 2, 2), (5,)
    aten, _ = passed(fn, *shapes)
    agrees(aten, fn, *shapes)
    assert "[0, 2, 4, 3, 5, 1]" in str(aten.graph)


def test_heads_that_share_one_key() -> None:
    """As falcon has them: flash attention knows groups, and reads the key as it is."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    shapes = (2, 4, 7, 16), (2, 1, 7, 16), (2, 1, 7, 16)
    aten, notes = passed(fn, *shapes)
    assert any("groups of heads" in note for note in notes) and "expand" not in str(aten.graph)
    agrees(aten, fn, *shapes)


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_to_one_key_is_its_value(queries: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    shapes = (2, 4, queries, 16), (2, 2, 1, 16), (2, 2, 1, 24)
    aten, _ = passed(fn, *shapes)
    agrees(aten, fn, *shapes)
    assert not externs(lowered(aten))


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (2, 1), (4,), (5,)], ids=str)
def test_few_rows_times_a_matrix_are_sums(rows: tuple[int, ...]) -> None:
    def fn(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, up, bias)), down) + x

    shapes = (*rows, 8), (24, 8), (24,), (8, 24)
    aten, _ = passed(fn, *shapes)
    agrees(aten, fn, *shapes)
    calls = [name for name, _ in externs(lowered(aten))]
    assert calls == ["aten.linear.default"] * (2 if rows == (5,) else 0)


def test_weights_in_another_layout_are_copied_together() -> None:
    """Before the first call, those of one text beside each other, so that they are one launch."""

    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        for weight in (a, b, c, a):
            x = F.conv2d(x, weight, padding=1).relu()
        return x

    shapes = (2, 8, 9, 9), (8, 8, 3, 3), (6, 8, 3, 3), (8, 6, 3, 3)
    aten, _ = passed(fn, *shapes)
    agrees(aten, fn, *shapes)
    items = fuse(lowered(aten)).items
    assert "".join("kc"[isinstance(item, Extern)] for item in items) == "kkkkckckckck"
    names = [str(buffer) for item in items[:4] for buffer in reads(item)]
    assert sorted(names) == ["x0", "x1", "x2", "x3"]
    assert abs(names.index("x1") - names.index("x2")) == 1


# What becomes of the operand of layers, and how many copies of it there are.
ROWS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "pixels": (lambda x: x.flatten(2).transpose(1, 2), 1),
    "every other column": (lambda x: x[..., ::2], 1),
    "heads": (lambda x: x.flatten(2).transpose(0, 1), 1),
    "rows": (lambda x: x.flatten(2), 0),
    "of one image": (lambda x: x[:1, 0].transpose(0, 1), 0),
    "parts of rows": (lambda x: x[..., :4], 0),
    "a matrix by columns": (lambda x: x[0, 0].t(), 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_layers_take_rows(name: str) -> None:
    """One copy, which a kernel of ours may write, for all layers that take it."""
    view, copies = ROWS[name]
    shape = 6, 8, 8, 8

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x, n = view(x), view(x).shape[-1]
        return F.linear(x, w[:, :n].contiguous(), b) * F.linear(x, w[:, :n].contiguous())

    shapes = shape, (5, 64), (5,)
    aten, notes = passed(fn, *shapes)
    agrees(aten, fn, *shapes)
    assert notes == [f"{copies} operands of layers lie row by row"] * copies


ODD: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "a layer": (F.linear, ((4, 1024, 768), (5003, 768))),
    "with a bias": (F.linear, ((4096, 768), (5003, 768), (5003,))),
    "gradients": (torch.mm, ((4096, 5003), (5003, 768))),
    "of weights": (lambda x, y: torch.mm(x.t(), y), ((4096, 5003), (4096, 768))),
    "and a bias": (lambda x, y, b: torch.addmm(b, x.t(), y), ((4095, 5000), (4095, 767), (767,))),
    "even": (F.linear, ((4096, 768), (5008, 768))),
    "few": (F.linear, ((64, 64), (503, 64))),
    "of a vector": (F.linear, ((4096, 767), (767,))),
}


@pytest.mark.parametrize("name", ODD)
def test_large_products_of_odd_rows_get_longer_ones(name: str) -> None:
    fn, shapes = ODD[name]
    aten, notes = passed(fn, *shapes)
    assert any("16 bytes" in note for note in notes) == (name not in ("even", "few", "of a vector"))
    products = [n for n in aten.graph.nodes if str(n.target)[5:].split(".")[0] in ("mm", "addmm")]
    for node in products:
        for x in (node, *node.args[-2:]):
            assert all(k == 1 or k % 8 == 0 for k in x.meta["val"].stride())
    lowered(aten)
    scale = [x[-1] ** -0.5 for x in shapes]
    given = [torch.randn(x).mul(k).bfloat16() for x, k in zip(shapes, scale, strict=True)]
    (got,) = fx.Interpreter(fx.GraphModule({}, aten.graph)).run(*given)
    want = fn(*given)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert got.stride() == want.stride()


def test_products_share_a_matrix_of_longer_rows() -> None:
    def fn(gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return torch.mm(gradient.t(), x).sum() + torch.mm(gradient, weight).sum()

    loops = lowered(passed(fn, (4096, 5003), (5003, 768), (4096, 768))[0])
    products = [step for step in loops.steps if isinstance(step, Extern)]
    assert len(products) == 2 and len({step.args[0].buffer for step in products}) == 1


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.cummax])
@pytest.mark.parametrize("shape", [(3, 256), (1000,), (1, 1 << 17), (3, 255)], ids=str)
def test_scans_along_long_rows_are_atens(scan: Any, shape: tuple[int, ...]) -> None:
    """Of products, and of one row that is very long."""

    def fn(x: Tensor) -> Tensor:
        found: Tensor = scan(x.float() * 2, len(shape) - 1)
        return found if isinstance(found, Tensor) else found[0]

    is_atens = shape[0] == 1 or (scan is torch.cumprod and shape[-1] > 255)
    assert len(externs(lowered(passed(fn, shape)[0]))) == is_atens


@pytest.mark.parametrize("shape, dim", [((256, 3), 0), ((2, 300, 5), -2)], ids=str)
@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
def test_long_scans_go_in_pieces(scan: Any, shape: tuple[int, ...], dim: int) -> None:
    aten, notes = passed(lambda x: scan(x.float(), dim), shape)
    assert any("pieces" in note for note in notes)
    lowered(aten)
    x = torch.rand(shape).mul(0.1).add(0.95).bfloat16()
    (got,) = fx.Interpreter(fx.GraphModule({}, aten.graph)).run(x)
    want = scan(x.float(), dim)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_row_is_stored_before_all_sums_read_it() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.silu(x) * 2, w)

    schedule = fuse(lowered(passed(fn, (1, 8), (24, 8))[0]))
    assert len(schedule.items) == 2


def test_results_on_the_cpu_are_copied_there() -> None:
    """Tables that depend on no input are computed once; who is given one gets a copy."""

    def build(call: Node, x: fx.Node) -> tuple[fx.Node, ...]:
        index = call(torch.flip, call(torch.arange, 4), (0,))
        return call(torch.mul, x, 2), call(torch.add, index, 1)

    aten = traced(build, "cuda")
    run_passes(aten, Options(), ())
    assert externs(lowered(aten)) == [("aten.copy_", True)]


@pytest.mark.parametrize("shape", [(5,), (4, 5), ()], ids=str)
def test_log_sigmoid_keeps_nothing_there(shape: tuple[int, ...]) -> None:
    aten, _ = passed(F.logsigmoid, shape)
    assert not externs(lowered(aten))


def test_autocast_casts_as_on_a_gpu() -> None:
    def build(call: Node, x: fx.Node) -> fx.Node:
        y = call(torch.mm, x, call(torch.t, x))
        return call(torch.sum, call(torch.softmax, call(torch.cat, [y, y]), -1))

    with casting():
        aten = traced(build, "cuda")
    found = {
        str(x.target).split(".")[1]: x.meta["val"].dtype
        for x in aten.graph.nodes
        if "aten" in str(x.target)
    }
    assert found["mm"] is found["cat"] is torch.bfloat16
    assert found["_softmax"] is found["sum"] is torch.float32


def test_autocast_of_the_cpu_beside_a_gpu() -> None:
    """What is on the CPU is cast as its own autocast says."""

    def build(call: Node, x: fx.Node, y: fx.Node) -> tuple[fx.Node, ...]:
        row = call(torch.reshape, y, (1, 1))
        return call(torch.mm, row, row), call(torch.mm, x, call(torch.t, x))

    with torch.autocast("cpu", torch.float16):
        aten = traced(build, "cuda", "cpu")
    calls = aten.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    found = [x.meta["val"].dtype for x in calls]
    assert found == [torch.float16, torch.float32]


def test_few_rows_that_lie_in_one_place() -> None:
    def build(call: Node, x: fx.Node) -> fx.Node:
        row = call(torch.select, x, 0, 1)
        rows = call(Tensor.expand, row, (2, 2, 5))
        return call(F.linear, rows, x)

    edit = Editor(traced(build, "cuda"), Options())
    rows_as_sums(edit)
    assert not list(edit.calls(torch.ops.aten.linear.default))
