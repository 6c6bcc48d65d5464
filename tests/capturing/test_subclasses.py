"""Instances of subclasses of torch.Tensor: results, classes, attributes and order of effects."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fusee
from fusee.errors import FuseeWarning
from tests.capturing.same import Traced

LOG: list[Any] = []


class Plain(torch.Tensor):
    pass


class Deeper(Plain):
    scale = 3

    @property
    def twice(self) -> Any:
        return self * 2


class Other(torch.Tensor):
    pass


class Weight(torch.nn.Parameter):
    rate = 0.5


class Silent(torch.Tensor):
    __torch_function__: Any = torch._C._disabled_torch_function_impl


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [kind.__name__ for kind in types]
        shown = [type(x).__name__ for x in args], kwargs and [*kwargs]
        LOG.append((func.__name__, names, shown))
        result = super().__torch_function__(func, types, args, kwargs)
        LOG.append(type(result).__name__)
        return result


class LoggedMore(Logged):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append("more")
        return super().__torch_function__(func, types, args, kwargs)


class Measured(torch.Tensor):
    """A tensor with a unit."""

    unit: str

    @staticmethod
    def __new__(cls, data: Any, unit: str = "1") -> Any:
        return torch.Tensor._make_subclass(cls, data)

    def __init__(self, data: Any, unit: str = "1") -> None:
        super().__init__()
        self.unit = unit

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        units = [x.unit for x in args if isinstance(x, Measured)]
        if func is torch.add and len({*units}) > 1:
            raise ValueError(f"{units[0]} and {units[1]} cannot be added")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor:
            result = result.as_subclass(cls)
        if isinstance(result, Measured):
            result.unit = "*".join(units) if func is torch.mul else units[0]
        return result


class Scaled(torch.Tensor):
    """Made by super().__new__, and kept by as_subclass."""

    def __new__(cls, data: Any, *rest: Any) -> Any:
        return super().__new__(cls, data)

    def __init__(self, data: Any, scale: float) -> None:
        self.scale = scale


def told(x: Any, seen: dict[int, int]) -> Any:
    """Values, classes, attributes, and which objects and which memory are one."""
    if isinstance(x, (tuple, list)):
        return type(x).__name__, [told(item, seen) for item in x]
    if not isinstance(x, torch.Tensor):
        return x
    number = seen.setdefault(id(x), len(seen))
    with torch._C.DisableTorchFunctionSubclass():
        memory = seen.setdefault(-x.untyped_storage().data_ptr(), len(seen))
        about = type(x), x.dtype, x.shape, x.stride(), x.requires_grad, x.is_leaf
        name = type(x.grad_fn).__name__ if x.grad_fn is None else "some"
        values = x.detach().as_subclass(torch.Tensor).tolist()
    return number, memory, about, name, values, {**x.__dict__}


def alike(fn: Any, make: Callable[[], Any], *, graphs: int = 1, entries: int = 1) -> Traced:
    """Called twice, eager and compiled give, change and log the same for what `make` makes."""
    traced = Traced(fn)
    for _ in range(2):
        outcomes = []
        for run in (fn, traced):
            given = make()
            LOG.clear()
            result = run(*given)
            logged = [*LOG]
            outcomes.append((told([result, given], {}), logged))
        assert outcomes[0][1] == outcomes[1][1], traced.stops
        assert outcomes[0] == outcomes[1], traced.stops
    assert not traced.stops
    assert (len(traced.graphs), traced.entries) == (graphs, entries)
    return traced


def sample(kind: Any = Plain, **attributes: Any) -> Any:
    x = torch.arange(6.0).reshape(2, 3).as_subclass(kind)
    x.__dict__.update(attributes)
    return x


@pytest.mark.parametrize("kind", [Plain, Deeper, Silent, Logged, LoggedMore])
def test_results_are_of_the_class(kind: Any) -> None:
    def fn(x: Any, y: Any) -> Any:
        z = torch.sin(x) + 1 - y
        w = 2 - x.t() ** 2
        row, *_ = x
        top = x.max(dim=0)
        n = F.layer_norm(x, (3,), y[0]) if x.shape[0] == 2 else x.dtype
        c = torch.cat([y, x])
        flags = type(z) is type(x), isinstance(z, kind), isinstance(y, kind), len(x), x.device
        return z, w, row, top.values, n, c, x > 1, x[0, 1:], y.expand_as(x), flags

    alike(fn, lambda: (sample(kind), torch.ones(2, 3)))


NUMBER_READS: list[Any] = [
    lambda x, n: torch.add(x, x, alpha=n),
    lambda x, n: x.sub_(x, alpha=n),
    lambda x, n: torch.addcmul(x, x, x, value=n),
    lambda x, n: (torch.rsub(x, n), x.pow(n), torch.pow(n, x)),
    lambda x, n: x.clamp(min=n),
    lambda x, n: x.lerp(x + 1, n),
    lambda x, n: x.fill_(n),
    lambda x, n: x.__setitem__(0, n),
    lambda x, n: torch.where(n < x, n, x),
    lambda x, n: torch.stack([n, n * 2]),
    lambda x, n: (n == x, n == 3, x.__eq__(n), n != x, x.lt(n), 2**n),
]


@pytest.mark.parametrize("kind", [Plain, Logged])
def test_no_class_hears_of_what_is_read_as_a_number(kind: Any) -> None:
    """Torch tells of a tensor given for a tensor, not of one that it takes a number out of."""
    for program in NUMBER_READS:
        outcomes = []
        for run in (program, fusee.compile(program, backend="eager", fullgraph=True)):
            LOG.clear()
            x = torch.arange(9.0).reshape(3, 3)
            number = torch.tensor(3.0).as_subclass(kind)
            outcomes.append(told([run(x, number), x, list(LOG)], {}))
        assert outcomes[0] == outcomes[1], inspect.getsource(program)


def test_units_go_with_values() -> None:
    def fn(d: Any, t: Any) -> Any:
        rate = Measured(torch.full((2, 3), 2.0), "1/s")
        way: Any = torch.mul(d, rate)
        way.seen = [way.unit]
        d.read = t.unit
        try:
            torch.add(d, t)
        except ValueError as error:
            return way, rate, str(error), (d * 2).unit, d.T, hasattr(d, "unknown")

    def make() -> Any:
        return sample(Measured, unit="m"), sample(Measured, unit="s")

    alike(fn, make)


def test_made_inside() -> None:
    def fn(x: Any) -> Any:
        y = x * 2
        a, b, c = y.as_subclass(Plain), Deeper(y), torch.Tensor._make_subclass(Logged, y)
        s: Any = Scaled(y, 1.5)
        s.title = "s"
        a += 1
        flags = a.as_subclass(torch.Tensor), type(b), b.twice + b.scale, s.scale, a is b
        return a, y, b, c, s, s + 1, flags, torch.Tensor.as_subclass(b, Other)

    alike(fn, lambda: (torch.ones(3, requires_grad=True),))
    alike(lambda x: x.as_subclass(Plain), lambda: (torch.ones(3),))


@pytest.mark.parametrize("kinds", [(Logged, LoggedMore), (LoggedMore, Logged), (Plain, Deeper)])
def test_a_subclass_is_asked_first(kinds: Any) -> None:
    def fn(x: Any, y: Any) -> Any:
        return x + y, y - x, torch.stack([x, y]), F.linear(x, y), 1 + x

    alike(fn, lambda: tuple(map(sample, kinds)))


def test_what_no_class_answers() -> None:
    traced = Traced(lambda x, y: torch.add(x, y))
    with pytest.raises(TypeError, match="__torch_function__"):
        traced(sample(Plain), sample(Other))
    assert traced.stops


def test_writing_in_place() -> None:
    def fn(x: Any, y: Any) -> Any:
        x.add_(1)
        x[0] = 5
        y.mul_(x)
        x *= 2
        return x, x is y, x.view(-1)

    alike(fn, lambda: (sample(Plain), torch.ones(2, 3)))
    alike(fn, lambda: (sample(Logged), torch.ones(2, 3)))
    alike(fn, lambda: (sample(Silent), torch.ones(2, 3)))
    traced = Traced(lambda x: x.t_() + 1)
    assert traced(sample()).shape == (3, 2)
    assert "t_() turns a tensor from outside" in traced.stops[0]


@pytest.mark.parametrize("kind", [Plain, Logged, Weight, Silent, Measured])
def test_gradients(kind: Any) -> None:
    def fn(x: Any, y: Any) -> Any:
        return (torch.exp(x) * y).sum() + (x * x).mean()

    def outcome(run: Any) -> Any:
        LOG.clear()
        with torch._C.DisableTorchFunctionSubclass():
            leaf = sample(kind, unit="m").requires_grad_()
            middle = (torch.ones(2, 3, requires_grad=True) * 2).as_subclass(kind)
            middle.unit = "s"
        loss = run(leaf, middle)
        with torch._C.DisableTorchFunctionSubclass():
            loss.backward()
            return type(loss), leaf.grad.tolist(), type(leaf.grad), loss.tolist()

    traced = Traced(fn)
    want = outcome(fn)
    assert [outcome(traced), outcome(traced)] == [want, want]
    assert (len(traced.graphs), traced.entries, traced.stops) == (1, 1, [])

    with torch.no_grad():
        assert outcome_without(traced, kind) == outcome_without(fn, kind)


def outcome_without(run: Any, kind: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        x = sample(kind, unit="m").requires_grad_()
    return told([run(x, torch.ones(2, 3).as_subclass(Plain).as_subclass(torch.Tensor)), x], {})


def test_a_leaf_is_not_written() -> None:
    def fn(x: Any) -> Any:
        with torch.enable_grad():
            x.add_(1)
        return x

    traced = Traced(fn)
    for run in (fn, traced):
        with pytest.raises(RuntimeError, match="a leaf Variable"):
            run(sample().requires_grad_())
        assert told(run(sample().requires_grad_() * 1), {})[4] == [[1, 2, 3], [4, 5, 6]]


def test_what_an_entry_depends_on() -> None:
    def fn(x: Any) -> Any:
        return x * 2 if x.unit == "m" else x * 3

    traced = Traced(fn)
    steps = [
        (sample(Plain, unit="m"), 1),
        (sample(Plain, unit="m") + 0, 1),
        (sample(Plain, unit="s"), 2),
        (sample(Deeper, unit="m"), 3),
        (sample(Logged, unit="m"), 4),
        (sample(Plain, unit="m").double(), 5),
        (sample(Plain, unit="m"), 5),
    ]
    for x, entries in steps:
        x.unit = getattr(x, "unit", "m")
        assert told(traced(x), {}) == told(fn(x), {})
        assert traced.entries == entries


def test_a_class_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(lambda x: x * Deeper.scale)
    traced(sample(Deeper))
    kind: Any = Logged
    original = kind.__torch_function__.__func__

    def doubled(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return original(cls, func, types, args, kwargs) if func is not torch.sin else args

    logged = Traced(lambda x: torch.sin(x))
    assert type(logged(sample(Logged))) is Logged
    monkeypatch.setattr(Logged, "__torch_function__", classmethod(doubled))
    assert type(logged(sample(Logged))) is tuple
    monkeypatch.setattr(Deeper, "scale", 5)
    assert traced(sample(Deeper))[1, 2].item() == 25
    monkeypatch.setattr(Deeper, "__mul__", lambda x, y: "mine", raising=False)
    assert traced(sample(Deeper)) == "mine"


def test_guards_ask_no_class() -> None:
    traced = Traced(lambda x: x.as_subclass(torch.Tensor) + 1)
    x = sample(Logged)
    for _ in range(2):
        LOG.clear()
        traced(x)
        assert LOG == []


def test_alive_at_a_break() -> None:
    def fn(x: Any, y: Any) -> Any:
        z: Any = Measured(y + 1, "kg")
        z.note = "n"
        if float(y.sum()) > 0:
            z = z * x
        return z, z.unit, x

    traced = Traced(fn)
    for _ in range(2):
        x = sample(Measured, unit="m")
        assert told(traced(x, torch.ones(2, 3)), {}) == told(fn(x, torch.ones(2, 3)), {})
    assert traced.entries == 2


def test_parameters_of_a_class() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight(torch.eye(3))

        def forward(self, x: Any) -> Any:
            kinds = isinstance(self.weight, torch.nn.Parameter), type(self.weight) is Weight
            return F.linear(x, self.weight) * self.weight.rate, kinds

    layer = Layer()
    traced = Traced(lambda x: layer(x))
    for _ in range(2):
        result, kinds = traced(torch.ones(2, 3))
        assert kinds == (True, True)
        assert type(result) is torch.Tensor
        result.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0] * 3] * 3
    assert (traced.entries, traced.stops) == (1, [])


class Dispatched(torch.Tensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Adding(torch.Tensor):
    def __add__(self, other: Any) -> Any:
        return "added"


@pytest.mark.parametrize("kind", [Dispatched, Adding, torch.nn.UninitializedParameter])
def test_what_stays_eager(kind: Any) -> None:
    x = torch.ones(2).as_subclass(kind) if kind is not torch.nn.UninitializedParameter else kind()
    traced = Traced(lambda x: (type(x), isinstance(x + 1, str) if kind is Adding else 0))
    assert traced(x) == (kind, kind is Adding)
    assert traced.stops[0].startswith("a tensor of class ") and kind.__name__ in traced.stops[0]


@pytest.mark.parametrize(
    "off", [torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction]
)
def test_where_subclasses_hear_of_no_call(off: Any) -> None:
    def fn(x: Any) -> Any:
        return torch.add(x, 1.0), torch._C._is_torch_function_enabled()

    def broken(x: Any) -> Any:
        with off():
            y = fn(x)
            torch._dynamo.graph_break()
            y += fn(x)
        return y + fn(x)

    def first(run: Any, x: Any) -> list[Any]:
        def within() -> Any:
            with off():
                return run(x)

        return [within(), run(x), within(), run(x)]

    for program in (fn, broken):
        outcomes = []
        for run in (program, Traced(program)):
            LOG.clear()
            outcomes.append(told([first(run, sample(Logged)), list(LOG)], {}))
        assert outcomes[0] == outcomes[1]


class Sized(torch.Tensor):
    @property
    def shape(self) -> Any:  # type: ignore[override]
        return torch.Size((1,))

    def __add__(self, other: Any) -> Any:
        return super().__add__(other).sin()


class Deleting(Plain):
    def twice(self) -> Any:
        x = self
        del self
        return super().mul(x, x)  # type: ignore[call-arg]


def test_super_of_what_is_not_there_for_a_graph() -> None:
    """Of a tensor that no graph takes, and of an argument that the method deletes."""
    outcomes: list[Any] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*please report it.*", category=FuseeWarning)
        warnings.filterwarnings("ignore", message=".*runs eagerly.*", category=FuseeWarning)
        programs: list[tuple[Any, Any]] = [(Sized, lambda x: x + 1), (Deleting, Deleting.twice)]
        for kind, program in programs:
            for call in (program, fusee.compile(program)):
                try:
                    found = call(torch.ones(3).as_subclass(kind))
                    outcomes.append((type(found), found.as_subclass(torch.Tensor).tolist()))
                except RuntimeError as error:
                    outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] and outcomes[0][0] is Sized
    assert outcomes[2] == outcomes[3] == "super(): arg[0] deleted"
