"""Backends that are not ours get open sizes as TorchDynamo gives them."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusee
from fusee.errors import ConstantSizeError, FuseeWarning

SIZES = (3, 5, 8, 1, 7, 2, 9, 16)


class Seeing:
    """A user's backend that runs graphs as they are; keeps them, and what came with them."""

    def __init__(self, look: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.examples: list[Sequence[Any]] = []
        self.look = look

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.examples.append(examples)
        given = None if self.look is None else self.look(gm, examples)
        return gm.forward if given is None else given

    def inputs(self, k: int = -1) -> list[fx.Node]:
        return self.graphs[k].graph.find_nodes(op="placeholder")


def value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def shape(node: fx.Node) -> str:
    return str(tuple(value(node).shape))


def test_symbols_come_before_the_tensors_that_have_them() -> None:
    seen = Seeing()

    def program(x: Tensor, y: Tensor, k: int) -> Tensor:
        return torch.cat([x, y]) * k + x.shape[0]

    compiled = fusee.compile(program, backend=seen, dynamic=True)
    for n, m, k in ((3, 4, 5), (5, 2, 7), (9, 6, 1)):
        x, y = torch.randn(n, 2), torch.randn(m, 2)
        torch.testing.assert_close(compiled(x, y, k), program(x, y, k))
    assert len(seen.graphs) == 1  # an integer may be 1, a size of torch's not
    inputs = seen.inputs(0)
    assert [type(value(node)) is torch.SymInt for node in inputs].count(True) == 4
    for k, node in enumerate(inputs):
        if type(value(node)) is torch.SymInt:
            assert node.type is torch.SymInt and node.name == str(value(node))
            assert type(seen.examples[0][k]) is torch.SymInt
            continue
        before = {before.name for before in inputs[:k]}
        assert {str(n) for n in value(node).shape} <= before
        assert type(seen.examples[0][k]) is Tensor
        assert type(value(node).shape[0].node.shape_env).__module__.startswith("torch.")
    assert isinstance(
        value(seen.graphs[0].graph.find_nodes(op="output")[0].all_input_nodes[0]), Tensor
    )


def test_no_symbol_is_an_input_that_nothing_has() -> None:
    seen = Seeing()
    compiled = fusee.compile(lambda x, y: (x.sin(), y.shape[0]), backend=seen)
    for n in (3, 5, 7):
        compiled(torch.ones(n), torch.ones(n + 1))
    assert len(seen.graphs) == 2
    assert [type(value(node)).__name__ for node in seen.inputs()] == ["SymInt", "FakeTensor"]


def test_sizes_of_torch_are_neither_0_nor_1() -> None:
    seen = Seeing()
    compiled = fusee.compile(lambda x: x * 2, backend=seen)
    for n in (*SIZES, 0, 1, 0, 12):
        x = torch.ones(n, 2)
        assert torch.equal(compiled(x), x * 2)
    assert [shape(seen.inputs(k)[-1]) for k in (0, 2, 3)] == ["(3, 2)", "(1, 2)", "(0, 2)"]
    assert len(seen.graphs) == 4


def test_what_a_backend_asks_is_a_guard() -> None:
    def ask(gm: fx.GraphModule, examples: Sequence[Any]) -> None:
        for node in gm.graph.find_nodes(op="placeholder"):
            if isinstance(value(node), Tensor):
                n = value(node).shape[0]
                assert bool(n % 8 == 0) in (True, False)
                assert bool(n / 3 > 5) in (True, False)  # no relation of integers

    seen = Seeing(ask)
    explained = fusee.explain(lambda x: x + 1, backend=seen)
    for n in (3, 5, 8, 7, 16, 33, 24, 9, 21, 13):
        shown = explained(torch.ones(n, 2))
        assert torch.equal(shown.result, torch.full((n, 2), 2.0))
    assert len(seen.graphs) == 5
    text = str(shown)
    assert (
        "x.size(0) % 8 == 0   (asked by the backend" in text
        and "in ask:   assert bool(n % 8" in text
    )
    assert "(x.size(0) / 3) > 5" in text


def test_a_marked_size_that_a_backend_fixes_is_an_error() -> None:
    def fix(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        return [int(x) for x in examples if type(x) is torch.SymInt] and None

    def fixing(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        fix(gm, examples)
        return gm.forward

    x = torch.ones(5, 2)
    fusee.compiler.mark_dynamic(x, 0)
    with pytest.raises(ConstantSizeError, match=r"x\.size\(0\) is marked.*'fixing' needs.*== 5"):
        fusee.compile(lambda x: x + 1, backend=fixing)(x)
    compiled = fusee.compile(lambda x: x + 1, backend=fixing)
    for n in (5, 6, 7):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 2.0))


def test_what_the_program_relied_on_is_asked_no_more() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[0]
        return x[: n // 2] + y if n % 2 == 0 and 4 <= n < 100 else x - y[0]

    def ask(gm: fx.GraphModule, examples: Sequence[Any]) -> None:
        (x,) = [value(n) for n in gm.graph.find_nodes(op="placeholder") if n.name == "x"]
        assert x.shape[0] % 2 == 0 and x.shape[0] >= 4
        assert statically(x.shape[0] < 100) and statically(x.shape[0] > 3)

    from torch.fx.experimental.symbolic_shapes import statically_known_true as statically

    x, y = torch.randn(8, 2), torch.randn(4, 2)
    seen = Seeing(ask)
    compiled = fusee.compile(program, backend=seen, dynamic=True)
    for n in (8, 12, 16):
        x, y = torch.randn(n, 2), torch.randn(n // 2, 2)
        torch.testing.assert_close(compiled(x, y), program(x, y))
    assert len(seen.graphs) == 1


# ---------------------------------------------------------------------------- compilers of torch's


def mlp(x: Tensor, model: nn.Module) -> Tensor:
    return F.gelu(model(x)) * x.shape[0]


def cut(x: Tensor, model: nn.Module) -> Tensor:
    n = x.shape[0]
    return (x[: n // 2] if n % 2 == 0 else x[1:]).sum(0) * n / 3


def padded(x: Tensor, model: nn.Module) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[0] % 8)).view(-1, 8, 4).mean(1)


def attended(x: Tensor, model: nn.Module) -> Tensor:
    q = x.view(1, x.shape[0], 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def boxed(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
    functorch = importlib.import_module("functorch.compile")

    assert any(type(x) is torch.SymInt for x in examples) or len(gm.graph.nodes) > 0
    return functorch.make_boxed_func(gm.forward)


def aot(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=boxed, bw_compiler=boxed)(gm, examples)


def min_cut(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
    functorch = importlib.import_module("functorch.compile")
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        partition_fn=functorch.min_cut_rematerialization_partition,
    )(gm, examples)


def make_fx(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
    from torch.fx.experimental import proxy_tensor

    with torch.no_grad():
        return proxy_tensor.make_fx(gm, tracing_mode="symbolic")(*examples).forward


def _agree(
    program: Any, compiled: Any, model: nn.Module, grads: bool, near: float | None = None
) -> None:
    """At all sizes, in results and gradients."""
    for n in SIZES:
        found = []
        x = torch.randn(n, 4)
        for run in (program, compiled):
            given = x.clone().requires_grad_(grads)
            with torch.set_grad_enabled(grads):
                result = run(given, model)
            if grads:
                result.sum().backward()
            found.append((result.detach(), given.grad))
        torch.testing.assert_close(found[1], found[0], rtol=near, atol=near)


@pytest.mark.parametrize("program", [mlp, cut, padded, attended])
@pytest.mark.parametrize("backend", [aot, min_cut, make_fx])
def test_torchs_tracers(backend: Any, program: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    seen: list[fx.GraphModule] = []

    def counted(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        seen.append(gm)
        return backend(gm, examples)

    compiled = fusee.compile(program, backend=counted)
    grads = backend is not make_fx
    _agree(program, compiled, model, grads)
    assert len(seen) <= 5


def test_two_symbols_that_have_become_equal() -> None:
    """An integer, and the size that it turned out to be: two inputs of one name."""

    def program(x: Tensor, n: int) -> Tensor:
        return x + torch.ones(n, 1) * n

    seen = Seeing()
    compiled = fusee.compile(program, backend=seen)
    for n in SIZES:
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x, n), program(x, n))
    assert len(seen.graphs) == 3


@pytest.mark.parametrize("program", [mlp, cut, padded, attended])
@pytest.mark.parametrize("grads", [False, True])
def test_our_tracer_for_a_users_compilers(program: Any, grads: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    seen: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        seen.append(gm)
        inputs = gm.graph.find_nodes(op="placeholder")
        assert [type(x) for x in examples] == [type(node.meta["val"]) for node in inputs]
        return gm.forward

    compiled = fusee.compile(program, backend=fusee.backends.aot(fw_compiler=compiler))
    _agree(program, compiled, model, grads, near=1e-4)
    # the first size, open ones, 1, and where a size is odd; as many backwards
    assert len(seen) <= (5 if program is cut else 4) * (2 if grads else 1)
    computed = [node for gm in seen for node in gm.graph.nodes if node.op == "call_function"]
    sizes = [x for node in computed if isinstance(x := node.meta["val"], torch.SymInt)]
    assert all(type(x.node).__module__.startswith("torch.") for x in sizes)
    assert sizes or program in (mlp, attended)


def test_inductor_and_floats() -> None:
    def program(x: Tensor, scale: float) -> Tensor:
        return torch.relu(x) * scale + x.sum(0)

    compiled = fusee.compile(program, backend="inductor")
    for n, scale in ((3, 1.0), (5, 2.0), (8, 2.5), (16, 3.0), (31, 4.0)):
        x = torch.randn(n, 2)
        torch.testing.assert_close(compiled(x, scale), program(x, scale))
    (piece,) = [one for one in fusee.capture.entries.live if one.call is compiled]
    assert len(piece.entries) == 2


def test_a_backend_that_cannot_have_symbols_gets_a_version_for_each_size() -> None:
    def run_them(gm: fx.GraphModule, examples: Sequence[Any]) -> None:
        gm(*examples)  # SymInts and real tensors do not go together, as under torch.compile

    def program(x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, 2).sum(1)

    seen = Seeing(run_them)
    compiled = fusee.compile(program, backend=seen)
    with pytest.warns(
        FuseeWarning, match="each set of sizes has a version: with open ones.*SymInt"
    ):
        for n in (3, 5, 8):
            x = torch.randn(n, 4)
            assert torch.equal(compiled(x), program(x))
    assert len(seen.graphs) == 4

    def wrong(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        raise ValueError("no")

    x = torch.ones(5)
    fusee.compiler.mark_dynamic(x, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fusee.errors.BackendError, match="no"):
            fusee.compile(lambda x: x + 1, backend=wrong)(x)


def counted_and_cut(x: Tensor, model: nn.Module) -> Any:
    n = int((x > 0).sum())
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    rows = (x > 0).nonzero()
    return model(x[:n, None] * torch.ones(4)).sum() * n, rows.sum(0) + rows.shape[0]


def scaled(x: Tensor, model: nn.Module) -> Any:
    return model(x[:, None].expand(-1, 4)) * x.max().item(), float(x[0]) + 1


@pytest.mark.parametrize("program", [counted_and_cut, scaled])
@pytest.mark.parametrize("backend", [None, aot])
def test_what_only_data_knows_if_torch_is_told_so(backend: Any, program: Any) -> None:
    model, seen = nn.Linear(4, 2), Seeing()
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    compiled = fusee.compile(program, backend=backend or seen, fullgraph=True)
    with torch._dynamo.config.patch(switches), warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        for n, k in ((3, 2), (3, 1), (5, 3), (8, 6)):
            x = torch.arange(float(n)) - n + k + 0.5
            torch.testing.assert_close(compiled(x, model), program(x, model))
    assert backend is not None or len(seen.graphs) == 2


def test_inputs_that_share_memory_have_constant_sizes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y + 1

    compiled = fusee.compile(program, backend=aot, dynamic=True)
    for n in (4, 6, 4):
        found = []
        for run in (program, compiled):
            x = torch.arange(float(n))
            found.append((run(x, x[1:]), x))
        torch.testing.assert_close(found[1], found[0])


def test_bodies_of_operators_have_torchs_values_too() -> None:
    seen = Seeing()

    def program(x: Tensor) -> Tensor:
        mapped: Any = torch._higher_order_ops.map
        return mapped(lambda row, z: row * z, x, x.sum())

    compiled = fusee.compile(program, backend=seen, dynamic=True)
    for n in (3, 5):
        x = torch.ones(n, 2)
        assert torch.equal(compiled(x), program(x))
    (gm,) = seen.graphs
    bodies = [x for x in gm.modules() if isinstance(x, fx.GraphModule) and x is not gm]
    assert bodies
    for body in bodies:
        for node in body.graph.find_nodes(op="placeholder"):
            for n in getattr(value(node), "shape", [value(node)]):
                assert type(n) is int or type(n.node).__module__.startswith("torch.")


def test_stances_know_which_sizes_a_backend_takes() -> None:
    seen = Seeing()
    compiled = fusee.compile(lambda x: x + 1)
    with fusee.compiler.set_stance("default", force_backend=seen):
        for n in (3, 5, 7):
            compiled(torch.ones(n))
    assert [type(x) is torch.SymInt for x in seen.examples[1]] == [True, False]
    assert type(value(seen.inputs()[0]).node).__module__.startswith("torch.")


def test_sympy_is_imported_for_such_backends_alone() -> None:
    program = """
import sys, torch, fusee
compiled = fusee.compile(lambda x: x * x.shape[0], backend={backend})
for n in (3, 5, 7):
    compiled(torch.ones(n, 2))
print("sympy" in sys.modules)
"""
    for backend, says in (
        ("'fusee'", "False"),
        ("'aot_eager'", "False"),
        ("lambda gm, _: gm.forward", "True"),
    ):
        text = program.format(backend=backend)
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == says
