"""Modes and settings of torch's, around a compiled function and within it: as in eager."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import fusee
from fusee.capture.builtins import SPECIAL
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced, shape_of


class Doubled(BaseTorchFunctionMode):
    """Every sine counts twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        return found * 2 if func is torch.sin else found


class Noting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in args if not isinstance(x, Tensor)], kwargs
        self.seen.append((getattr(func, "__name__", ""), tuple(types), *given))
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def by_default(set_it: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_it(value)
    try:
        yield
    finally:
        set_it(before)


@contextlib.contextmanager
def both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "device": lambda: torch.device("meta"),
    "default device": lambda: by_default(torch.set_default_device, "meta", None),
    "default dtype": lambda: by_default(torch.set_default_dtype, torch.float64, torch.float32),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast's dtype": lambda: by_default(
        functools.partial(torch.set_autocast_dtype, "cpu"), torch.float16, torch.bfloat16
    ),
    "autocast's cache": lambda: by_default(torch.set_autocast_cache_enabled, False, True),
    "deterministic": lambda: by_default(torch.use_deterministic_algorithms, True, False),
    "function mode": Doubled,
    "two": lambda: both(Doubled(), torch.device("meta")),
    "one in itself": lambda: both(Doubled(), Doubled()),
    "dispatch mode": Counting,
}


def made(x: Tensor) -> Any:
    y = torch.sin(x)
    made = torch.zeros(3), torch.arange(2.0), torch.tensor([1.0, 2.0]), torch.empty(1)
    with torch.autocast("cpu"):  # its dtype and its cache are as they are around
        product, cached = x[None] @ x[:, None], torch.is_autocast_cache_enabled()
    kinds = [(one.device, one.dtype) for one in made]
    return y, y @ y, kinds, torch.sin(x.new_ones(2)), product, cached


@pytest.mark.parametrize("name", AROUND)
def test_around_a_function(name: str) -> None:
    x, traced = torch.randn(3), Traced(made)
    traced(x)
    for _ in range(2):
        with AROUND[name]():
            want = made(x)
        with AROUND[name]():
            assert shape_of(traced(x)) == shape_of(want), traced.stops
        assert shape_of(traced(x)) == shape_of(made(x))
    # tensors made from Python data have data on the device meta too, under a FakeTensorMode
    assert bool(traced.stops) == (name in ("device", "default device", "two")), traced.stops
    assert not any(stop.startswith("eager") for stop in traced.stops)
    assert traced.entries == 1 or name not in ("nothing", "dispatch mode")


def entered(x: Tensor) -> Any:
    with Doubled():
        y = torch.sin(x)
    return y, torch.sin(x)


def entered_around_a_break(x: Tensor) -> Any:
    with Doubled(), torch.device("meta"):
        y = torch.sin(x)
        sys.stdout.write("")
        y, device = y + torch.sin(x), torch.zeros(2).device
        with torch.device("cpu"):
            y = y + torch.ones(3)
    return y, device, torch.zeros(2).device, torch.sin(x)


def noted(x: Tensor) -> Any:
    with Noting() as mode:
        y = torch.nn.functional.layer_norm(x, (3,)) + x.reshape(3, 1).T.sum() * x.shape[0]
        x.device  # noqa: B018  # the mode sees it
        y = y.clone().add_(1)
    return y, mode.seen


def raising(x: Tensor) -> Any:
    try:
        with Doubled():
            raise ValueError(torch.sin(x).shape)
    except ValueError as error:
        return torch.sin(x), str(error)


def dispatched(x: Tensor) -> Any:
    with Counting() as mode:
        y = torch.sin(x) + 1
    return y, mode.seen


def asked(x: Tensor) -> Any:
    with torch.device("meta"):
        device = torch.get_default_device().type
    return x + 1, device, torch.get_default_device()


def switched(x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    y = torch.ones(3)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("meta")
    device = torch.ones(3).device
    torch.set_default_device(None)
    return x + y, device, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "program, graphs",
    [
        (entered, 1), (entered_around_a_break, 2), (noted, 1), (raising, 1), (dispatched, 0),
        (asked, 1), (switched, 2),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_within_a_function(program: Callable[..., Any], graphs: int) -> None:
    x, traced = torch.randn(3), Traced(program)
    for _ in range(2):
        assert shape_of(traced(x)) == shape_of(program(x)), traced.stops
    assert len(traced.graphs) == graphs, traced.stops
    assert not torch._C._len_torch_function_stack()


@pytest.mark.parametrize("compiled", [Traced, fusee.compile])
def test_guards_are_not_seen_by_a_mode(compiled: Callable[..., Any]) -> None:
    """Nor what a capture is looked for by that another process may have kept."""
    x, traced = torch.randn(3), compiled(made)
    for _ in range(2):
        one, other = Noting(), Noting()
        with one:
            made(x)
        with other:
            traced(x)
        assert one.seen == other.seen


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # TorchDynamo asks for it
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        lambda x, k: torch.sin(x) * 2,
        lambda x, k: torch.sin(x).softmax(-1).exp() @ x.cos().tanh(),
        lambda x, k: torch.sin(x[x > 0]),
        lambda x, k: torch.sin(x).pow_(k).cos(),
    ],
    ids=["as captured", "kernels", "sizes of the data", "captured once more"],
)
def test_stock_graphs_do_not_do_again_what_a_mode_does(
    program: Callable[..., Tensor], trains: bool
) -> None:
    """TorchDynamo has written that into its graph, whose calls run while the mode is on."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fusee")
    x = torch.linspace(-1, 1, 4).requires_grad_(trains)
    for k in (2, 3, 4):
        with Doubled():
            torch.testing.assert_close(compiled(x, k), program(x, k))


PARAMETER = torch.nn.Parameter(torch.ones(3))


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.cos(ctx.saved_tensors[0]) * grads[0]


def _asserted(x: Tensor) -> Tensor:
    assert x
    return x * 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: len(x) * n,
        lambda x, n: [*x[:n]],
        lambda x, n: (abs(x), x.exp(), x.dim(), x.new_tensor([1.0]), x.is_floating_point()),
        lambda x, n: (PARAMETER.shape, PARAMETER.dim(), PARAMETER.detach()),
        lambda x, n: (torch.tensor(n), torch.tensor([n, 1.0]), torch.as_tensor(n)),
        lambda x, n: (int(x[n]), float(x[0]), torch.equal(x, x), x.tolist()),
        lambda x, n: torch.get_default_device(),
        lambda x, n: (x.add_(n), x**2, 2**x),
        lambda x, n: _asserted(x.max() >= n),
        lambda x, n: Sine.apply(x),
    ],
)
def test_a_mode_hears_what_it_hears_in_eager(call: Callable[..., Any]) -> None:
    """Of numbers that vary, too: they are constants there."""
    traced = Traced(call)
    for n in (1, 2, 1):
        one, other = Noting(), Noting()
        x, y = torch.arange(3.0), torch.arange(3.0)
        with one:
            want = call(x, n)
        with other:
            got = traced(y, n)
        assert other.seen == one.seen and shape_of(got) == shape_of(want), traced.stops


def test_a_mode_changes_what_an_autograd_function_computes() -> None:
    def fn(x: Tensor) -> Any:
        with Doubled():
            return Sine.apply(x)

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(Traced(fn)(x), fn(x))


class Listening(Tensor):
    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


TAKEN = [op for op in op_db if op.op in SPECIAL and torch.float32 in op.supported_dtypes("cpu")]


@pytest.mark.parametrize("op", TAKEN, ids=lambda op: f"{op.name}{op.variant_test_name}")
def test_nothing_hears_a_function_that_capture_goes_by_instead(op: Any) -> None:
    def mode(x: Any, args: Any, kwargs: Any) -> Any:
        with Noting() as heard:
            op.op(x, *args, **kwargs)
        return [name for name, *_ in heard.seen]

    def subclass(x: Any, args: Any, kwargs: Any) -> Any:
        op.op(x, *args, **kwargs)
        return [*Listening.names]

    def listening(x: Any) -> Any:
        return x.as_subclass(Listening) if isinstance(x, Tensor) else x

    sample = next(iter(op.sample_inputs("cpu", torch.float32)))
    given = sample.input, sample.args, sample.kwargs
    assert Traced(mode)(*given) == mode(*given)
    given = tree_map(listening, sample.input), sample.args, sample.kwargs
    Listening.names.clear()
    want = subclass(*given)
    Listening.names.clear()
    assert Traced(subclass)(*given) == want


def test_looking_for_one_of_many_versions_is_not_seen_by_a_mode() -> None:
    def fn(x: Tensor, k: int) -> Tensor:
        return x.relu_() if k else x

    traced = Traced(fn)
    for size in range(1, 8):
        for k in (0, 1):
            traced(torch.ones((1,) * size), k)
    x = torch.ones(1)
    with Noting() as heard:
        traced(x, 1)
    assert len(heard.seen) == 1


def test_on_another_device_by_our_own_backend() -> None:
    compiled = fusee.compile(lambda: torch.ones(2))
    assert compiled().device.type == "cpu"
    with torch.device("meta"), pytest.warns(FuseeWarning, match="a tensor is on meta"):
        assert compiled().device.type == "meta"
    assert compiled().device.type == "cpu"


def test_backends_may_compile_for_deterministic_algorithms() -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Any:
        is_on = torch.are_deterministic_algorithms_enabled()

        def run(*args: Any) -> Any:
            seen.append(is_on)
            return gm(*args)

        return run

    compiled = fusee.compile(lambda x: x.index_add(0, torch.tensor([0, 0]), x), backend=backend)
    states = (False, True, True, False, False)
    for is_on in states:
        with by_default(torch.use_deterministic_algorithms, is_on, False):
            compiled(torch.ones(2))
    assert seen == [*states]


@pytest.mark.parametrize("within", [False, True])
def test_what_is_refused_where_only_deterministic_algorithms_may_run(within: bool) -> None:
    def fn(x: Tensor, at: Tensor) -> Any:
        with by_default(torch.use_deterministic_algorithms, within, False):
            y = x * 2
            try:
                y.clone().put_(at, x)
            except RuntimeError as error:
                return y, str(error)
        return y, "put"

    given = torch.ones(2), torch.tensor([0, 0])
    for is_on in (True, False, True):
        with by_default(torch.use_deterministic_algorithms, is_on, False):
            (want, told), (got, found) = fn(*given), fusee.compile(fn)(*given)
        assert torch.equal(got, want) and found == told
        assert ("put_ does not have" in told) is within


def test_a_function_asks_whether_algorithms_are_deterministic() -> None:
    def asks(x: Tensor) -> Tensor:
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x

    traced = Traced(asks)
    for is_on in (False, True, False, True):
        with by_default(torch.use_deterministic_algorithms, is_on, False):
            assert traced(torch.ones(1)).item() == 1 + is_on
    assert traced.entries == 2 and not traced.stops
