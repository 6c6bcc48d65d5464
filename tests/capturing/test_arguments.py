"""Arguments of all kinds: the text of a captured graph is Python that gives them again."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fusee
from tests.compare import assert_same


class Axis(enum.IntEnum):
    ROWS = 0
    COLUMNS = 1


class Kind(enum.StrEnum):
    MEAN = "mean"


class Whole(int):
    pass


class Real(float):
    pass


class Text(str):
    pass


class Row(tuple[int, ...]):
    pass


Pair = collections.namedtuple("Pair", "a b")
X = torch.rand(2, 3, 4, 4) + 0.1
NAN, INFINITY = float("nan"), float("inf")
FORMAT = torch.channels_last

NUMBERS = [3, -2, 0.5, -0.0, True, 2**40, NAN, INFINITY, -INFINITY, Whole(2), Real(0.25)]
COMPLEX = [1j, complex(1, 2), complex(NAN, 0), complex(0, INFINITY), complex(-0.0, 1)]
TYPES: list[Any] = [int, float, bool, torch.float16, torch.int32, torch.bool]
AXES: list[Any] = [0, -1, True, Axis.COLUMNS, Whole(1), (0, 2), [1, 3], Row((1, 2)), Pair(0, 1)]
SHAPES: list[Any] = [(6, 16), [4, -1], torch.Size([2, 48]), Row((2, -1)), Pair(2, -1)]
PLACES: list[Any] = [
    0, ..., None, True, slice(1, 2), (..., 1), (None, 0, slice(None, None, 2)), [0, 1], Whole(1),
    Pair(0, 1), Axis.COLUMNS, (slice(torch.tensor(0), torch.tensor(1)), ...),
]  # fmt: skip

PROGRAMS: dict[str, tuple[Callable[[Tensor, Any], Any], list[Any]]] = {
    "mul": (lambda x, a: x * a, NUMBERS),
    "complex": (lambda x, a: (x * a).real, COMPLEX),
    "masked_fill": (lambda x, a: x.masked_fill(x > 0.5, a), NUMBERS),
    "clamp": (lambda x, a: torch.clamp(x, max=a), NUMBERS),
    "full": (lambda x, a: torch.full((2,), a) + x.sum(), NUMBERS),
    "zeros": (lambda x, a: torch.zeros(3, dtype=a).bool() | (x.sum() > 0), [*TYPES, complex]),
    "to": (lambda x, a: (x.to(a), x.to(dtype=a), x.sum(dtype=a)), TYPES),
    "like": (lambda x, a: (torch.ones_like(x, dtype=a), x.new_zeros(3, dtype=a)), TYPES),
    "tensor": (lambda x, a: torch.tensor([1, 2], dtype=a) + x[0, 0, 0, :2], TYPES),
    "softmax": (lambda x, a: F.softmax(x, -1, dtype=a), [float, torch.float64]),
    "type": (lambda x, a: x.type(a), [torch.DoubleTensor, "torch.LongTensor", torch.int8]),
    "format": (lambda x, a: x.contiguous(memory_format=a), [FORMAT, torch.contiguous_format]),
    "device": (lambda x, a: torch.ones(3, device=a) * x[0, 0, 0, :3], ["cpu", X.device]),
    "layout": (lambda x, a: torch.ones(3, layout=a) * x[0, 0, 0, :3], [torch.strided]),
    "sum": (lambda x, a: x.sum(a), AXES),
    "reshape": (lambda x, a: x.reshape(a), SHAPES),
    "index": (lambda x, a: x[a], PLACES),
    "permute": (lambda x, a: x.permute(a), [(3, 2, 1, 0), range(3, -1, -1)]),
    "loss": (lambda x, a: F.mse_loss(x, x * 2, reduction=a), ["sum", Kind.MEAN, Text("mean")]),
    "eye": (lambda x, a: torch.eye(a) + x[0, 0, 0, 0], [2, Axis.COLUMNS, Whole(3)]),
    "stack": (lambda x, a: torch.stack(a(x)), [lambda x: [x, x], lambda x: Pair(x, x)]),
}
CASES = [(name, k) for name, (_, values) in PROGRAMS.items() for k in range(len(values))]


def printed(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend: the graph's text, run as a file of its own."""
    made = gm.graph.python_code("self")
    names = dict(made.globals)
    exec(compile(made.src, "<printed>", "exec"), names)
    return lambda *given: names["forward"](gm, *given)


@pytest.mark.filterwarnings("ignore:.*nothing of it became a graph")  # slices from outside
@pytest.mark.parametrize("name, k", CASES, ids=lambda x: str(x))
def test_a_graphs_text_gives_its_arguments_again(name: str, k: int) -> None:
    function, values = PROGRAMS[name]

    def program(x: Tensor) -> Any:
        return function(x, values[k])

    want = _outcome(program)
    for backend in (printed, "eager"):
        got = _outcome(fusee.compile(program, backend=backend))
        if isinstance(want, type):
            assert got is want
        else:
            assert_same(got, want)
            if backend is printed:
                _assert_signs(got, want)


def _outcome(program: Callable[[Tensor], Any]) -> Any:
    try:
        return program(X.clone())
    except (RuntimeError, TypeError, IndexError) as error:
        return type(error)


def _assert_signs(got: Any, want: Any) -> None:
    if isinstance(want, Tensor) and want.is_floating_point():
        assert torch.equal(got.signbit(), want.signbit())


def test_what_has_no_text_ends_the_graph() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.exp(x)
        return torch.nn.functional.triplet_margin_with_distance_loss(
            y, y + 1, y - 1, distance_function=SHAPELY
        )

    got = fusee.compile(program, backend=printed)(X)
    torch.testing.assert_close(got, program(X))


def SHAPELY(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1)


def test_a_missing_argument_is_given_a_default_later() -> None:
    """That a function has no default is what its error relied on."""

    def shifted(x: Tensor, *, twice: bool = True) -> Tensor:
        return x * 2 if twice else x

    def program(x: Tensor) -> Any:
        try:
            return shifted(x)
        except TypeError as error:
            return x - 1, str(error)

    compiled = fusee.compile(program)
    for defaults in (None, {"twice": False}, {}, {"twice": True}, None):
        shifted.__kwdefaults__ = defaults
        x = torch.randn(3)
        assert_same(compiled(x), program(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.detach(),
        lambda x: (x.detach().view(1, 3), x.view(3, 1)),
        lambda x: (x.data[1:], x * 2),
        lambda x: (x[1:].detach().mT, x.detach() + 1),
    ],
)  # fmt: skip
def test_what_is_detached_needs_no_gradient(program: Callable[[Tensor], Any], mode: Any) -> None:
    x = torch.ones(3, 1, requires_grad=True)
    with mode():
        want, got = (
            torch.utils._pytree.tree_leaves(f(x)) for f in (program, fusee.compile(program))
        )
    told = [[(y.requires_grad, y.is_leaf, y.is_inference()) for y in ys] for ys in (want, got)]
    assert told[0] == told[1]
