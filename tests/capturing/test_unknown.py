"""Calls whose results nobody knows ahead: they alone run in Python, for a clear reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusee
from fusee.errors import FuseeWarning
from tests.compare import assert_same

seen = torch.ops.fusee_unknown

_library = torch.library.Library("fusee_unknown", "DEF")
_library.define("plain(Tensor x) -> Tensor")
_library.impl("plain", lambda x: x.clone() + 1, "CPU")
_library.define("pair(Tensor x, int n) -> (Tensor, Tensor)")
_library.impl("pair", lambda x, n: (x + n, x - n), "CPU")


@torch.library.custom_op("fusee_unknown::defined", mutates_args=())
def defined(x: Tensor) -> Tensor:
    return x.clone() * 2


@torch.library.custom_op("fusee_unknown::refuses", mutates_args=())
def refuses(x: Tensor) -> Tensor:
    return x.clone() * 3


@refuses.register_fake
def _(x: Tensor) -> Tensor:
    raise NotImplementedError("some day")


@torch.library.custom_op("fusee_unknown::looks", mutates_args=())
def looks(x: Tensor) -> Tensor:
    return x.clone() * 3


@looks.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(int(x.sum().item()))


def _operator(name: str) -> Any:
    found = torch.library.custom_op(
        f"fusee_unknown::{name}", lambda x, rows: x * 2, mutates_args=(),
        schema="(Tensor x, Tensor rows) -> Tensor",
    )  # fmt: skip
    found.register_fake(lambda x, rows: torch.empty_like(x))
    return found


without_backward, reads_in_backward, with_backward = map(_operator, "abc")


def _of_rows(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    found = torch.zeros_like(gradient)
    for row in context.rows.tolist():
        found[row] += 2 * gradient[row]
    return found, None


def _with_rows(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.rows = inputs[1]


reads_in_backward.register_autograd(_of_rows, setup_context=_with_rows)
with_backward.register_autograd(lambda context, gradient: (2 * gradient, None))

_library.define("through(Tensor x, Tensor rows) -> Tensor")
_library.impl("through", lambda x, rows: x * 2, "CPU")
_library.impl("through", lambda x, rows: torch.empty_like(x), "Meta")

X = torch.linspace(-1, 1, 32).reshape(4, 8)

WITHOUT_FAKE: dict[str, Callable[[Tensor], Any]] = {
    "fusee_unknown::plain": lambda x: seen.plain(x),
    "fusee_unknown::pair": lambda x: seen.pair(x, 2)[1],
    "fusee_unknown::defined": lambda x: defined(x),
    "fusee_unknown::refuses": lambda x: refuses(x),
}
NEEDING_VALUES: list[Callable[[Tensor], Any]] = [
    lambda x: looks(x),
    lambda x: x.nonzero().float(),
    lambda x: x.unique(),
    lambda x: torch.unique_consecutive(x.round()),
    lambda x: torch.masked_select(x, x > 0.5),
    lambda x: x[x > 0.5],
    lambda x: x[x[:, 0] > 0, 2:],
    lambda x: torch.where(x > 0.5)[0].float(),
    lambda x: torch.argwhere(x > 0.5).float(),
    lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 0, 1]), 0),
    lambda x: torch.bincount((x * 4).abs().long().flatten()),
    lambda x: F.one_hot((x * 4).abs().long()).float(),
    lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[0],
]


@pytest.fixture
def graphs() -> Iterator[list[list[str]]]:
    yield []


def compiled(fn: Callable[..., Any], graphs: list[list[str]]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.name for node in gm.graph.nodes if node.op.startswith("call")])
        return gm.forward

    return fusee.compile(fn, backend=backend)


def around(call: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def program(x: Tensor) -> Any:
        y = (x * 2).sin()
        z = call(y)
        return z.cos() + 1

    return program


@pytest.mark.parametrize("name", WITHOUT_FAKE)
def test_operators_without_a_fake_kernel(name: str, graphs: list[list[str]]) -> None:
    program = around(WITHOUT_FAKE[name])
    function = compiled(program, graphs)
    assert_same(function(X), program(X))
    assert_same(function(X), program(X))
    assert graphs == [["mul", "sin"], ["cos", "add"]]
    with pytest.raises(fusee.errors.GraphBreakError) as raised:
        fusee.compile(program, fullgraph=True)(X)
    assert f"{name} has no fake kernel" in str(raised.value)
    assert f"register_fake({name!r})" in str(raised.value)
    assert "test_unknown.py" in str(raised.value)


@pytest.mark.parametrize("number", range(len(NEEDING_VALUES)))
def test_results_whose_size_the_data_tells(number: int, graphs: list[list[str]]) -> None:
    program = around(NEEDING_VALUES[number])
    function = compiled(program, graphs)
    assert_same(function(X), program(X))
    assert_same(function(-X), program(-X))  # as many of other values
    assert len(graphs) >= 2
    assert graphs[0][:2] == ["mul", "sin"] and ["cos", "add"] in [ops[-2:] for ops in graphs[1:]]
    off = {"capture_dynamic_output_shape_ops": False, "capture_scalar_outputs": False}
    with pytest.raises(fusee.errors.GraphBreakError, match="needs the value of a tensor"):
        fusee.compile(program, fullgraph=True, options=off)(X)


def test_packed_layers_of_quantize_dynamic(graphs: list[list[str]]) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear}, dtype=torch.qint8)
    program = around(packed)
    with torch.no_grad():
        want = program(X)
        function = compiled(program, graphs)
        assert_same(function(X), want)
        assert_same(function(X), want)
        assert graphs[0] == ["mul", "sin"] and graphs[-1] == ["cos", "add"]
        with pytest.raises(fusee.errors.GraphBreakError, match="linear_dynamic has no fake kernel"):
            fusee.compile(program, fullgraph=True)(X)


def test_the_operators_own_error_reaches_the_programs_handler() -> None:
    @torch.library.custom_op("fusee_unknown::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        raise ValueError("as it is")

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            y = fails(y)
        except ValueError as error:
            y = y + len(str(error))
        return y.cos()

    torch.testing.assert_close(fusee.compile(program)(X), program(X))


def _nested(*sizes: int) -> Tensor:
    return torch.nested.nested_tensor([torch.arange(float(n)) for n in sizes])


@pytest.mark.parametrize("fn", [
    lambda x: x * 2 + 1,
    lambda x: x.size(0),
    lambda x: [part + 1 for part in x.unbind()],
    lambda x: F.relu(x - 1).to_padded_tensor(0.0) + 1 if x.is_nested else x,
    lambda x: torch.nested.nested_tensor([*x.unbind(), torch.ones(2)]).to_padded_tensor(0.0) * 2,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(fn: Callable[[Tensor], Any]) -> None:
    """Python moves on them; a version for plain tensors does not ask one for its shape."""
    compiled = fusee.compile(fn, backend="eager")
    plain = torch.arange(3.0)[:, None]
    for x in (_nested(3, 2), plain, _nested(1, 4), plain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert str(compiled(x)) == str(fn(x))


@pytest.mark.parametrize("fn", [
    lambda x: (torch.quantize_per_tensor(x, 0.1, 10, torch.quint8).dequantize(), x + 1),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).int_repr() + 1,
    lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize() * 2,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_is_quantized_is_no_tensor_of_floats(fn: Callable[[Tensor], Any]) -> None:
    """torch's fake kernels say so, and `dequantize()` of one would be the tensor itself."""
    compiled = fusee.compile(fn)
    for _ in range(2):
        assert_same(compiled(X), fn(X))


@pytest.mark.parametrize("sizes", [(), (3,)])
def test_masks_that_are_sparse(sizes: tuple[int, ...]) -> None:
    """A graph takes them as they are: they have no memory of one piece that a form could tell."""

    def fn(given: dict[str, Any]) -> Any:
        return torch.masked.sum(**given), given["mask"].layout

    compiled = fusee.compile(fn)
    for _ in range(2):
        for mask in (torch.ones(sizes) > 0, (torch.ones(sizes) > 0).to_sparse()):
            given = {"input": torch.ones(sizes), "mask": mask}
            assert str(compiled(given)) == str(fn(given))


def _registered(name: str, run: Callable[[Tensor], Tensor]) -> torch.library.Library:
    library = torch.library.Library("fusee_again", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, run, "CPU")
    torch.library.register_fake(f"fusee_again::{name}", torch.empty_like, lib=library)
    return library


@pytest.mark.parametrize("fn", [
    lambda x: torch.ops.fusee_again.one(x) + 1,
    lambda x: torch.ops.fusee_again.one.default(x) + 1,
    lambda x: getattr(torch.ops.fusee_again, "one")(x) + 1,  # noqa: B009
])  # fmt: skip
def test_operators_that_are_registered_again(fn: Callable[[Tensor], Any]) -> None:
    """As a notebook does, whose cell runs again: the first one is gone, and its memory with it."""
    compiled = fusee.compile(fn, backend="eager")
    for run in (torch.sin, torch.cos, torch.exp):
        library = _registered("one", run)
        for _ in range(2):
            assert_same(compiled(X), fn(X))
        del library


def _once(x: Tensor) -> Tensor:
    library = _registered("two", torch.sin)
    result: Tensor = torch.ops.fusee_again.two(x) + 1
    del library
    return result


def _scoped(x: Tensor) -> Any:
    with torch.library._scoped_library("fusee_again", "FRAGMENT") as library:
        library.define("three(Tensor x) -> Tensor")
        library.impl("three", torch.cos, "CPU")
        return torch.ops.fusee_again.three(x) * 2, hasattr(torch.ops.fusee_again, "four")


@pytest.mark.parametrize("fn", [_once, _scoped])
def test_registering_operators_is_no_part_of_a_graph(fn: Callable[[Tensor], Any]) -> None:
    compiled = fusee.compile(fn)
    for _ in range(3):
        assert_same(compiled(X), fn(X))


@pytest.mark.filterwarnings("ignore:fusee_unknown..through. an autograd kernel was not registered")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "operator",
    [with_backward, reads_in_backward, without_backward, torch.ops.fusee_unknown.through],
)
def test_a_backward_that_no_graph_can_have_costs_its_operator_alone(
    operator: Any, dynamic: bool | None
) -> None:
    """As of transformers' `grouped_mm_fallback`, which every mixture of experts calls."""
    linear = nn.Linear(8, 8)

    def program(x: Tensor) -> Tensor:
        return operator(linear(x).sin(), torch.arange(len(x))).cos()

    for rows in (4, 3):
        x, outcomes = X[:rows], []
        for call in (program, fusee.compile(program, dynamic=dynamic, fullgraph=True)):
            linear.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error", FuseeWarning)
                y = call(x)
            if operator is not without_backward:
                y.sum().backward()
            outcomes.append((y.detach(), linear.weight.grad))
        torch.testing.assert_close(outcomes[1], outcomes[0])
