"""From torch.compile's graphs to ATen graphs: operators, modules, autocast, symbolic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusee
from fusee.aten import AtenGraph, SymbolSource
from fusee.aten.torch_api import autocast_kind, below_autograd, ops_with_kernel
from fusee.aten.trace import trace
from fusee.errors import MissingFake, TraceError
from fusee.fake import Twins
from tests.aten.harness import (
    assert_same_call,
    assert_same_tensors,
    captured,
    compiled,
    operators,
    run,
    same,
    traced,
)

Fn = Callable[..., Any]


# ------------------------------------------------------------------------------ operators

CONVOLVED = torch.randn(2, 4, 9, 7)
WHOLE: list[tuple[Fn, list[torch.Tensor], list[str]]] = [
    (F.linear, [torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)], ["linear.default"]),
    (F.conv2d, [CONVOLVED, torch.randn(6, 4, 3, 3)], ["convolution.default"]),
    (F.conv_transpose2d, [CONVOLVED, torch.randn(4, 6, 3, 3)], ["convolution.default"]),
    (F.gelu, [torch.randn(3)], ["gelu.default"]),
    (F.silu, [torch.randn(3)], ["silu.default"]),
    (lambda x: F.softmax(x, -1), [torch.randn(3, 4)], ["_softmax.default"]),
    (lambda x: F.log_softmax(x, 0), [torch.randn(3, 4)], ["_log_softmax.default"]),
    (lambda x: F.layer_norm(x, (4,)), [torch.randn(3, 4)], ["native_layer_norm.default"]),
    (lambda x: F.group_norm(x, 2), [CONVOLVED], ["native_group_norm.default"]),
    (
        lambda x, i: F.embedding(i, x),
        [torch.randn(9, 2), torch.tensor([[1, 8]])],
        ["embedding.default"],
    ),
    (
        F.scaled_dot_product_attention,
        [torch.randn(2, 3, 5, 4)] * 3,
        ["scaled_dot_product_attention.default"],
    ),
    (
        lambda x, m, v: F.batch_norm(x, m, v),
        [CONVOLVED, torch.zeros(4), torch.ones(4)],
        ["_native_batch_norm_legit_no_training.default"],
    ),
    (
        lambda x: x.reshape(6, -1).t().unsqueeze(0),
        [torch.randn(2, 3, 4)],
        ["view", "permute", "unsqueeze"],
    ),
]


@pytest.mark.parametrize("name", ["eigvalsh", "svdvals"])
def test_values_alone_are_asked_for_by_the_algorithm_for_them(name: str) -> None:
    x = torch.randn(4, 4)
    graph = same(getattr(torch.linalg, name), x + x.t()).graph
    (call,) = [node for node in graph.nodes if "linalg" in str(node.target)]
    assert call.args[-1] is False


@pytest.mark.parametrize("fn, inputs, expected", WHOLE, ids=[row[2][0] for row in WHOLE])
def test_operators_stay_whole(fn: Fn, inputs: list[torch.Tensor], expected: list[str]) -> None:
    found = operators(same(fn, *inputs))
    names = [f"aten.{name}" + ("" if "." in name else ".default") for name in expected]
    if expected[0] != "view":
        assert found == names


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, [1, 3]] = x[:, [0, 2]]
    y[[0]] = 5.0
    return y.index_put((torch.tensor([0, 1]),), x[:2, 0, None], accumulate=True)


# Places that a program writes down, and whether these are a part of the tensor.
PLACES: dict[str, tuple[Fn, bool]] = {
    "one": (lambda x: x[:, [1]], True),
    "one from the end": (lambda x: x[[-2]], True),
    "even ones": (lambda x: x[:, [0, 2, 4]], True),
    "a tensor": (lambda x: x[torch.tensor([1, 2])], True),
    "of a turned tensor": (lambda x: x.t()[:, [1]], True),
    "written to": (_written, True),
    "backwards": (lambda x: x[:, [2, 1]], False),
    "twice": (lambda x: x[[1, 1]], False),
    "none": (lambda x: x[:, []], False),
    "pairs": (lambda x: x[[0, 1], [1, 2]], False),
    "bools": (lambda x: x[:, [True, False, True, False, True]], True),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_are_a_part(name: str) -> None:
    fn, is_part = PLACES[name]
    names = operators(same(fn, torch.randn(3, 5)))
    assert is_part == any("slice" in name for name in names)
    assert is_part != any("index" in name for name in names)


def test_places_beyond_a_tensor_raise() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        fusee.compile(lambda x: x[:, [5]] * 2)(torch.randn(3, 5))


def test_what_is_not_kept_is_decomposed() -> None:
    kept = {torch.ops.aten.mm.default, torch.ops.aten.add.Tensor}
    graph = traced(F.linear, torch.randn(3, 4), torch.randn(5, 4), keep=kept.__contains__)
    assert operators(graph) == ["aten.permute.default", "aten.mm.default"]


def test_own_decomposition_comes_first() -> None:
    aten = torch.ops.aten
    gm = fx.symbolic_trace(lambda x: F.gelu(x))
    table = {aten.gelu.default: lambda x, approximate="none": x * 2}
    graph = trace(gm, [torch.randn(3)], keep={aten.mul.Tensor}.__contains__, decompositions=table)
    assert operators(graph) == ["aten.mul.Tensor"]


@pytest.mark.parametrize("layout", ["row-major", "channels-last", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_convolutional_layouts_are_the_cpus(layout: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 9, 8).to(dtype)
    if layout == "channels-last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "sliced":
        x = torch.randn(2, 8, 9, 8).to(dtype)[:, ::2]
    weight, depthwise = torch.randn(6, 4, 3, 3).to(dtype), torch.randn(4, 1, 3, 3).to(dtype)
    statistics = torch.ones(4).to(dtype)

    def fn(x: torch.Tensor, w: torch.Tensor, d: torch.Tensor, m: torch.Tensor) -> Any:
        return (
            F.conv2d(x, w, padding=1),
            F.conv2d(x, d, groups=4),
            F.conv_transpose2d(x, w.transpose(0, 1)),
            F.batch_norm(x, m, m),
            F.group_norm(x, 2),
            F.relu(x),
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 3, 1),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_avg_pool2d(x, (2, 3)),
            torch.cat([x, x], 1),
            x * x.flip(1) + 1,
            x.mean((2, 3)),
            F.interpolate(x, scale_factor=2.0),
            x.contiguous().view(2, 4, -1).transpose(1, 2),
        )

    same(fn, x, weight, depthwise, statistics)


@pytest.mark.parametrize("mask", [None, "float", "bool"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_attention_layout_is_the_cpus(mask: str | None, is_transposed: bool) -> None:
    q = torch.randn(2, 5, 3, 4).transpose(1, 2) if is_transposed else torch.randn(2, 3, 5, 4)
    m = {None: None, "float": torch.randn(5, 5), "bool": torch.rand(5, 5) > 0.1}[mask]
    inputs = [q, q, q] if m is None else [q, q, q, m]
    same(F.scaled_dot_product_attention, *inputs)
    same(F.scaled_dot_product_attention, *[x[0] if x.dim() == 4 else x for x in inputs])
    same(lambda *a: F.scaled_dot_product_attention(*a).transpose(1, 2).reshape(2, 5, 12), *inputs)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.Module]) -> None:
    module = kind(4, 3, num_layers=2, batch_first=True).eval()
    gm = fx.symbolic_trace(nn.Sequential(module))
    x = torch.randn(2, 5, 4)
    graph = trace(gm, [x])
    with torch.no_grad():
        assert_same_tensors(run(graph, [x, *graph.attributes(gm)]), module(x))


def test_factories_and_devices() -> None:
    def fn(x: torch.Tensor) -> Any:
        return (
            torch.arange(x.shape[0], device=x.device) + torch.zeros(3, device="cpu"),
            torch.full((2,), 3.5),
            x.new_ones(2),
            x.new_tensor([1, 2]),
            torch.eye(3),
            torch.linspace(0, 1, 5),
            x.to("cpu").to(torch.int32),
            torch.ones_like(x, dtype=torch.bool),
            torch.tril(torch.ones(3, 3)),
        )

    graph = same(fn, torch.randn(3, 2))
    assert all(n.meta["device"].type == "cpu" for n in graph.graph.nodes if "device" in n.meta)


# ------------------------------------------------------------------------------ capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(x.mean((2, 3)))


def test_numbers_of_the_cpu_join_the_gpu() -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = x.sum()
        return n * s, s * n, n + 1, n * x, torch.where(x > 0, n, x), torch.maximum(n, s)

    with FakeTensorMode() as mode:
        x, n = torch.empty(4, 8, device="cuda"), torch.empty(())
        want = [y.device for y in fn(x, n)]
    graph = trace(fx.symbolic_trace(fn), [x, n]).graph
    results = pytree.tree_leaves(graph.output_node().args)
    assert [y.meta["device"] for y in results] == want
    for given in ((x, n), (n, x)):  # as with open sizes
        made = Twins(mode).run(torch.ops.aten.mul.Tensor, given, {}, torch.device("cuda"))
        assert made.device == x.device


@pytest.mark.parametrize("capture", ["dynamo", "fx"])
@pytest.mark.parametrize("is_training", [True, False])
def test_module_state(capture: str, is_training: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = Net().train(is_training), Net().train(is_training)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 6, 6)
    if capture == "fx":
        gm = fx.symbolic_trace(ours)
        graph = trace(gm, [x])
        assert [s.attribute is not None for s in graph.inputs][:2] == [False, True]
        assert all(s.is_static for s in graph.inputs[1:])

        def call(x: torch.Tensor) -> Any:
            return run(graph, [x, *graph.attributes(gm)])
    else:
        call = compiled(ours)
    with torch.no_grad():
        for _ in range(2):
            assert_same_tensors(call(x), theirs(x))
    assert_same_tensors(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_parameters_are_static_under_torch_compile() -> None:
    module = Net().eval()
    ((gm, inputs),) = captured(module, torch.randn(2, 3, 6, 6))
    graph = trace(gm, inputs)
    dynamic = [s.name for s in graph.inputs if not s.is_static]
    assert len(dynamic) == 1 and len(graph.inputs) > 5


def test_grad_mode_checkpoint_and_inference_mode_are_inlined() -> None:
    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
        y = torch.utils.checkpoint.checkpoint(lambda z: z.sin() + 1, y, use_reentrant=False)
        with torch.enable_grad():
            return y.cos()

    assert_same_call(compiled(fn), fn, [torch.randn(3)])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_autograd_function_is_inlined() -> None:
    x = torch.randn(3)

    def fn(x: torch.Tensor) -> Any:
        return Double.apply(x) + 1

    ((gm, inputs),) = captured(fn, x.clone().requires_grad_())
    graph = trace(gm, inputs)
    torch.testing.assert_close(run(graph, [x])[0], x * 2 + 1)


def test_cond_is_one_operator() -> None:
    def fn(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    ((gm, inputs),) = captured(fn, torch.ones(3))
    graph = trace(gm, inputs)
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(run(graph, [x])[0], fn(x))


def test_refusal_names_the_users_line() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x[torch.nonzero(x)]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ((gm, inputs),) = captured(fn, torch.randn(3))
    with pytest.raises(TraceError) as caught:
        trace(gm, inputs)
    assert "test_trace.py" in str(caught.value) and "nonzero" in str(caught.value)


@torch.library.custom_op("fusee_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("fusee_tests::quadruple", mutates_args=())
def quadruple(x: torch.Tensor) -> torch.Tensor:
    return x * 4


@thrice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_custom_operators() -> None:
    graph = same(lambda x: thrice(x) + 1, torch.randn(3))
    assert operators(graph)[0] == "fusee_tests.thrice.default"
    with pytest.raises(MissingFake, match="register_fake"):
        traced(lambda x: quadruple(x), torch.randn(3))


LIBRARY = torch.library.Library("fusee_devices", "DEF")


def by_device(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.is_cpu else x.cos()


def by_device_alone(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float64 if x.device.type == "cpu" else None)


def within_autocast(x: torch.Tensor) -> torch.Tensor:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return torch.ops.fusee_devices.cast(x.to(torch.float16)).to(torch.float64)


for _name, _key, _kernel in [
    ("composite", "CompositeImplicitAutograd", by_device),
    ("faked", "CPU", torch.Tensor.double),
    ("faked", "Meta", by_device_alone),
    ("cast", "CompositeImplicitAutograd", torch.exp),
    ("cast", "AutocastCPU", within_autocast),
]:
    if not hasattr(torch.ops.fusee_devices, _name):
        LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, _kernel, _key)


class ByDevice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_device(x)


STRANGERS: dict[str, Callable[[], Fn]] = {
    "composite": lambda: torch.ops.fusee_devices.composite,
    "composite.default": lambda: torch.ops.fusee_devices.composite.default,
    "faked": lambda: torch.ops.fusee_devices.faked.default,
    "cast": lambda: torch.ops.fusee_devices.cast.default,
    "function": lambda: by_device,
    "module": ByDevice,
}


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("name", STRANGERS)
def test_what_strangers_ask_of_their_operands(name: str, casts: bool) -> None:
    """Python of a library or the program is told eager's devices, and casts by its own kernel."""
    call, x = STRANGERS[name](), torch.linspace(-1, 1, 6)
    graph = fx.Graph()
    given = (graph.placeholder("x"),)
    is_module = isinstance(call, nn.Module)
    graph.output(graph.call_module("m", given) if is_module else graph.call_function(call, given))
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        found = trace(fx.GraphModule({"m": call} if is_module else {}, graph), [x])
        assert_same_call(lambda *args: run(found, args), call, [x])


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "quantized"),
    ],
    ids=["sparse", "nested", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_kinds_of_inputs_are_refused(make: Fn, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        traced(lambda x: x + 1, make())


def test_equal_calls_are_merged_and_dead_ones_dropped() -> None:
    def fn(x: torch.Tensor) -> Any:
        x.exp()
        return x.sin() * x.sin(), torch.rand(2) + torch.rand(2)

    names = operators(same(fn, torch.randn(3)))
    assert names.count("aten.sin.default") == 1 and names.count("aten.rand.default") == 2
    assert "aten.exp.default" not in names


def test_source_runs_with_torch_alone() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x[1:] + torch.tensor([1.0, float("inf")]), x.to(torch.float16)

    x = torch.randn(3, 2)
    ((gm, inputs),) = captured(fn, x)
    graph = trace(gm, inputs)
    namespace: dict[str, Any] = {}
    exec(graph.source(), namespace)
    assert_same_tensors(namespace["graph"](x), fn(x))
    assert "test_trace.py" in graph.source() and "return x[1:]" in graph.source()


# ------------------------------------------------------------------------------ autocast


def autocast_inside(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, w)
        z = torch.matmul(y, w) + x
        with torch.autocast("cpu", enabled=False):
            z = z @ w
        return y, z, F.softmax(y, -1), torch.cat([y, x], 0), F.mse_loss(y, x), torch.stack([y, y])


def attention_under_autocast(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = (x @ w)[None, None]
        y = F.scaled_dot_product_attention(q, q, q)
        return F.layer_norm(y, (4,)), torch.einsum("ij,jk->ik", x, w), F.gelu(x), torch.prod(y)


@pytest.mark.parametrize("fn", [autocast_inside, attention_under_autocast])
def test_autocast_inside_a_graph(fn: Fn) -> None:
    assert_same_call(compiled(fn), fn, [torch.randn(4, 4), torch.randn(4, 4)])
    assert not torch.is_autocast_enabled("cpu")


def test_ambient_autocast() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return F.linear(x, w), x + 1, F.conv1d(x[None], w[..., None])

    graphs: list[AtenGraph] = []
    call = compiled(fn, graphs=graphs)
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_call(call, fn, inputs)
    assert graphs[0].no_autocast
    assert_same_call(call, fn, inputs)


def test_failure_leaves_autocast_as_it_was() -> None:
    def fn(x: torch.Tensor) -> Any:
        with torch.autocast("cpu"):
            return torch.nonzero(x)

    with pytest.raises(TraceError):
        traced(fn, torch.randn(3))
    assert not torch.is_autocast_enabled("cpu")


# ------------------------------------------------------------------------------ symbolic sizes


def flatten_and_scale(x: torch.Tensor) -> Any:
    y = x.reshape(x.shape[0] * x.shape[1], -1)
    return y * x.shape[0], y[: x.shape[1] // 2], x.transpose(0, 1).contiguous(), x.shape[1]


def split_and_pad(x: torch.Tensor) -> Any:
    a, b = x.chunk(2, 1)
    return torch.cat([a, b, b]), F.pad(a, (0, 1)), a.sum(-1), torch.zeros(x.shape[0], 2), x[-1]


def attend(x: torch.Tensor) -> Any:
    n, length, _ = x.shape
    q = x.view(n, length, 2, -1).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    y = y.transpose(1, 2).reshape(n, length, -1)
    mask = torch.arange(length)[None] < torch.arange(length)[:, None]
    return F.layer_norm(y, y.shape[-1:]), F.softmax(y @ y.mT + mask, -1)


def write_symbolic(x: torch.Tensor) -> Any:
    x[1:, : x.shape[1] // 2] += 1
    return x[0], x.view(-1)


SYMBOLIC = [flatten_and_scale, split_and_pad, attend, write_symbolic]


@pytest.mark.parametrize("fn", SYMBOLIC, ids=lambda fn: fn.__name__)
def test_symbolic_sizes(fn: Fn) -> None:
    graphs: list[AtenGraph] = []
    call = compiled(fn, dynamic=True, graphs=graphs)
    for n, length in [(3, 8), (4, 6), (7, 10)]:
        assert_same_call(call, fn, [torch.randn(n, length, 4)])
    assert len(graphs) == 1 and len(graphs[0].symbols) >= 2
    for source in graphs[0].symbols.values():
        assert isinstance(source, SymbolSource)


def test_convolution_with_symbolic_sizes() -> None:
    module = Net().eval()
    graphs: list[AtenGraph] = []
    call = compiled(module, dynamic=True, graphs=graphs)
    with torch.no_grad():
        for n, size in [(2, 8), (3, 9), (5, 12)]:
            x = torch.randn(n, 3, size, size + 1)
            torch.testing.assert_close(call(x), module(x))
    assert len(graphs) == 1


# ------------------------------------------------------------------------------ tables


class Seen(TorchDispatchMode):
    """Stops at the first operator that autocast passes on, keeping its tensors' dtypes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype
        if func in (*casts, torch.ops.prim.device.default):
            return func(*args, **(kwargs or {}))
        leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        self.dtypes = {x.dtype for x in leaves if x.is_floating_point()}
        to_float = "softmax" in str(func) and args[2]
        self.asked = torch.float32 if to_float else (kwargs or {}).get("dtype")
        raise StopIteration


def _arguments(op: Any, dtype: torch.dtype, device: str) -> list[Any]:
    """Arguments that autocast accepts; the operator itself never runs."""
    x = torch.empty(4, 4, dtype=dtype, device=device)
    values = {"Tensor": x, "List[Tensor]": [x, x], "int": 1, "List[int]": [1, 1], "float": 1.0}
    values |= {"bool": False, "str": "mean", "number": 1}
    values["List[Optional[Tensor]]"] = [torch.zeros(4, dtype=torch.int64, device=device)]
    found = []
    for argument in op._schema.arguments:
        if argument.has_default_value():
            break
        found.append(values.get(str(argument.type)))
    return found


# Overloads with named dimensions are gone from newer torch, and take no placeholder for a name.
CASTING = [
    (device, name)
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
    for name in sorted(ops_with_kernel(key))
    if name.startswith("aten::")
    and "imname" not in name
    and "names" not in name
    and name != "aten::binary_cross_entropy"
]


@pytest.mark.parametrize(("device", "name"), CASTING)
def test_autocast_kinds_are_torchs(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    dtypes = []
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
            args, seen = _arguments(op, dtype, device), Seen()
            before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, torch.bfloat16)
            try:
                with pytest.raises(StopIteration), below_autograd(), seen:
                    op(*args)
            finally:
                torch.set_autocast_enabled(device, before[0])
                torch.set_autocast_dtype(device, before[1])
        dtypes.append(seen.dtypes | ({seen.asked} if seen.asked else set()))
    lower, single = {torch.bfloat16}, {torch.float32}
    both = {torch.float32, torch.bfloat16}
    kinds = {"lower": [lower, lower], "float32": [single, single], "promote": [single, lower]}
    kinds |= {"dtype": [single, both], "norm": [single, both]}
    kind = autocast_kind(op, device)
    assert kind is not None and dtypes == kinds[kind]


def test_a_custom_operator_that_is_registered_anew() -> None:
    """As by a cell of a notebook that is run again."""
    for k in (2, 3):

        @torch.library.custom_op("fusee_tests::add_times", mutates_args={"x"})
        def add_times(x: torch.Tensor, y: torch.Tensor, k: int = k) -> None:
            x.add_(y, alpha=k)

        def fn(x: torch.Tensor) -> torch.Tensor:
            total = x.clone()
            torch.ops.fusee_tests.add_times(total, x)
            return total * 2

        same(fn, torch.randn(3))
