"""compile(): what it takes, what it gives back, what goes wrong."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import io
import os
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusee
from fusee import api
from fusee.backends import registry
from fusee.errors import (
    BackendError,
    CompileError,
    FuseeError,
    FuseeWarning,
    GraphBreakError,
    OptionError,
    UnknownBackend,
    anchor,
)
from fusee.runtime import jit
from tests.counting import Counting

ROOT = Path(__file__).parent.parent
x = torch.linspace(-1, 1, 4)
pytestmark = pytest.mark.usefixtures("without_grad")


def step(t: Tensor, scale: float = 2.0, *, shift: int = 1) -> Tensor:
    """Scaled and shifted."""
    return t * scale + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, t: Tensor) -> Tensor:
        return self.drop(self.layer(t)).relu() * self.scale

    def decode(self, t: Tensor) -> Tensor:
        return t - self.layer.bias

    def describe(self) -> str:
        return f"scaled by {self.scale}"


# ------------------------------------------------------------------------------ functions


def test_functions_and_decorators(backend: Counting) -> None:
    @api.compile
    def plain(t: Tensor) -> Tensor:
        return t + 1

    @api.compile(backend=backend, fullgraph=True)
    def with_arguments(t: Tensor) -> Tensor:
        return t + 1

    for fast in (plain, with_arguments, api.compile(lambda t: t + 1)):
        torch.testing.assert_close(fast(x), x + 1)
        torch.testing.assert_close(fast(t=x), x + 1)
    assert len(backend.graphs) == 1


def test_a_compiled_function_looks_like_the_function(backend: Counting) -> None:
    fast: Any = api.compile(step, backend=backend)
    assert fast.__name__ == "step" and fast.__doc__ == step.__doc__
    assert inspect.signature(fast) == inspect.signature(step)
    torch.testing.assert_close(fast(x, shift=3), x * 2 + 3)
    wrong: list[tuple[Any, Any]] = [((), {}), ((x, 1, 2), {}), ((x,), {"shfit": 1})]
    for args, kwargs in wrong:
        with pytest.raises(TypeError) as ours:
            fast(*args, **kwargs)
        with pytest.raises(TypeError) as pythons:
            step(*args, **kwargs)
        assert str(ours.value) == str(pythons.value)
    again: Any = api.compile(fast, backend=backend)
    assert again._torchdynamo_orig_callable is step


def test_all_kinds_of_callables(backend: Counting) -> None:
    class Callable:
        def __call__(self, t: Tensor) -> Tensor:
            return t + 2

    class Decorated(Callable):
        pass

    for model, want in (
        (torch.sin, x.sin()),
        (functools.partial(step, scale=3.0), x * 3 + 1),
        (Callable(), x + 2),
        (api.compile(Decorated, backend=backend)(), x + 2),
        (nn.Sequential(nn.ReLU()).forward, x.relu()),
    ):
        before = len(backend.graphs)
        torch.testing.assert_close(api.compile(model, backend=backend)(x), want)
        assert len(backend.graphs) == before + 1
    assert api.compile(step, disable=True) is step
    assert api.compile(disable=True)(step) is step


def test_compiled_functions_inside_compiled_functions(backend: Counting) -> None:
    inner = api.compile(step, backend="eager")
    net = api.compile(Net().eval(), backend="eager")
    fast = api.compile(lambda t: net(inner(t)), backend=backend, fullgraph=True)
    torch.testing.assert_close(fast(x), net(step(x)))
    assert len(backend.graphs) == 1


def test_a_decorator_around_a_compiled_function(backend: Counting) -> None:
    inner: Any = api.compile(lambda x: x.sin(), backend=backend)

    @functools.wraps(inner)
    def twice(x: torch.Tensor) -> Any:
        return 2 * inner(x)

    x = torch.ones(3)
    for fn in (twice, api.compile(twice), api.compile(lambda x: twice(x))):
        torch.testing.assert_close(fn(x), 2 * x.sin())


def test_a_training_step(backend: Counting) -> None:
    net = Net()
    net.drop.p = 0.0
    twin = copy.deepcopy(net)

    def train(model: Net, t: Tensor) -> Tensor:
        loss = model(t).sum()
        loss.backward()
        with torch.no_grad():
            for p in list(model.parameters()):
                p.sub_(torch.as_tensor(p.grad), alpha=0.1)
        return loss.detach()

    fast = api.compile(train, backend=backend)
    with torch.enable_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(net, x), train(twin, x))
    for ours, eagers in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(ours, eagers)
    assert backend.graphs


def test_suspending_functions() -> None:
    def numbers(t: Tensor) -> Iterator[Tensor]:
        yield t + 1

    async def later(t: Tensor) -> Tensor:
        return t + 1

    for function in (numbers, later):
        with pytest.warns(FuseeWarning, match=f"{function.__name__}.* it runs eagerly") as said:
            fast: Any = api.compile(function)
        assert len(said) == 1
        with pytest.raises(GraphBreakError, match="asynchronous or a generator"):
            api.compile(function, fullgraph=True)
        got = next(fast(x)) if function is numbers else asyncio.run(fast(x))
        torch.testing.assert_close(got, x + 1)


# ------------------------------------------------------------------------------ modules


def test_a_compiled_module_is_the_module(backend: Counting) -> None:
    net = Net().eval()
    fast = api.compile(net, backend=backend)
    torch.testing.assert_close(fast(x), net(x))
    assert isinstance(fast, Net) and fast._orig_mod is net
    assert list(fast.state_dict()) == list(net.state_dict())
    assert list(fast.named_parameters()) and fast.layer is net.layer
    assert fast.describe() == "scaled by 2.0"
    fast.scale = 5.0
    assert net.scale == 5.0
    torch.testing.assert_close(fast(x), net(x))
    assert fast.train() is fast
    assert net.training
    assert fast.eval() is fast
    assert list(map(bool, [net.training, net.layer.training])) == [False, False]
    fast.double()
    assert net.layer.weight.dtype == torch.float64
    torch.testing.assert_close(fast(x.double()), net(x.double()))
    fast.load_state_dict(Net().state_dict())
    fast.extra = nn.Linear(1, 1)
    assert "extra.weight" in net.state_dict()
    del fast.extra
    assert "Net(" in repr(fast) and len(list(fast.modules())) == len(list(net.modules()))


def test_modules_are_copied_and_pickled(backend: Counting) -> None:
    fast = api.compile(Net().eval(), backend="eager", recompile_limit=3)
    twin = copy.deepcopy(fast)
    assert isinstance(twin, Net) and twin._orig_mod is not fast._orig_mod
    torch.testing.assert_close(twin(x), fast(x))
    twin.scale = 7.0
    assert fast.scale == 2.0
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    Net().load_state_dict(torch.load(file))
    again = pickle.loads(pickle.dumps(fast))
    torch.testing.assert_close(again(x), fast(x))
    assert copy.copy(fast)._orig_mod is fast._orig_mod


def test_hooks(backend: Counting) -> None:
    net = Net().eval()
    fast = api.compile(net, backend=backend)
    plain = fast(x)
    handle = fast.register_forward_hook(lambda module, args, out: out + 1)
    torch.testing.assert_close(fast(x), plain + 1)
    handle.remove()
    with net.layer.register_forward_pre_hook(lambda module, args: (args[0] * 0,)):
        torch.testing.assert_close(fast(x), net(x))
    torch.testing.assert_close(fast(x), plain)
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 2)
    with pytest.warns(FuseeWarning, match="hooks for all modules"):
        torch.testing.assert_close(fast(x), net(x))
    everywhere.remove()
    torch.testing.assert_close(fast(x), plain)
    net.forward = lambda t: t * 0  # type: ignore[method-assign]
    torch.testing.assert_close(fast(x), x * 0)


def test_bound_methods(backend: Counting) -> None:
    net = Net().eval()
    want = net(x)
    net.forward = api.compile(net.forward, backend=backend)  # type: ignore[method-assign]
    net.decode = api.compile(net.decode, backend=backend)  # type: ignore[method-assign]
    torch.testing.assert_close(net(x), want)
    torch.testing.assert_close(net.decode(x), x - net.layer.bias)
    assert len(backend.graphs) == 2
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.layer.bias.zero_()
    torch.testing.assert_close(twin.decode(x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_unusual_classes(backend: Counting) -> None:
    class Tagged(nn.Module):
        tag: str

        def __init_subclass__(cls, *, tag: str) -> None:
            cls.tag = tag

    class Named(Tagged, tag="named"):
        __slots__ = ("extra",)

        def __new__(cls, scale: float) -> Named:
            made = super().__new__(cls)
            made.__dict__["scale"] = scale
            return made

        def __init__(self, scale: float) -> None:
            super().__init__()

        def forward(self, t: Tensor) -> Tensor:
            return t * float(self.__dict__["scale"])

    class Called(nn.Sequential):
        def __call__(self, t: Tensor) -> Tensor:
            return torch.as_tensor(super().__call__(t)) + 1

        def forward(self, t: Tensor) -> Tensor:
            return t * 2

    named = api.compile(Named(3.0), backend=backend)
    torch.testing.assert_close(named(x), x * 3)
    assert named.tag == "named"
    empty = api.compile(Called(), backend=backend)
    torch.testing.assert_close(empty(x), x * 2 + 1)
    assert len(empty) == 0 and api.compile(empty)._orig_mod is empty._orig_mod
    scripted = torch.jit.script(nn.ReLU())
    with pytest.warns(FuseeWarning, match="TorchScript"):
        assert api.compile(scripted) is scripted
    parts: Any = api.compile(nn.Sequential(nn.ReLU(), nn.Tanh()), backend=backend)
    assert type(parts[:1]) is nn.Sequential and parts[:1][0] is parts[0]
    torch.testing.assert_close(parts[1:](x), x.tanh())
    outer = nn.Sequential(api.compile(nn.Linear(4, 4), backend=backend))
    assert list(outer.state_dict()) == ["0.weight", "0.bias"]


def test_install() -> None:
    stock = torch.compile, nn.Module.compile
    fusee.install()
    try:
        fusee.install()
        seen = Counting()
        net = Net().eval()
        net.compile(backend=seen)
        torch.testing.assert_close(net(x), net.forward(x))
        with net.register_forward_hook(lambda module, args, out: out + 1):
            torch.testing.assert_close(net(x), net.forward(x) + 1)
        assert len(seen.graphs) == 2
        copy.deepcopy(net)
        torch.testing.assert_close(torch.compile(step, backend=seen)(x), step(x))
        assert len(seen.graphs) == 3
    finally:
        fusee.uninstall()
    assert (torch.compile, nn.Module.compile) == stock
    fusee.uninstall()


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fullgrah": True}, "'fullgraph'"),
        ({"fullgraph": 1}, "True or False"),
        ({"dynamic": "yes"}, "None, True or False"),
        ({"mode": "max-autotun"}, "'max-autotune'"),
        ({"mode": "default", "options": {"fuse": True}}, "both"),
        ({"options": {"treads": 2}}, "'threads'"),
        ({"options": {"guard_filter": len}}, "'guard_filter_fn'"),
        ({"options": {"guard_filter_fn": 3}}, "a function"),
        ({"options": {"fallback": "yes"}}, "'eager'"),
        ({"options": ["fuse"]}, "a dict"),
        ({"recompile_limit": 0}, "int >= 1"),
        ({"isolate_recompiles": 1}, "True or False"),
        ({"backnd": "eager"}, "'backend'"),
        ({"name": 3}, "a text"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as error:
        api.compile(step, **arguments)
    assert says in str(error.value)
    with pytest.raises(OptionError):
        api.compile(**arguments)


def test_more_bad_arguments() -> None:
    others: list[tuple[Any, str]] = [
        (3, "not int"),
        (property(step), r"not property[\s\S]* @property above"),
    ]
    for model, said in others:
        for give in (api.compile, api.compile(), fusee.explain, fusee.export):
            with pytest.raises(OptionError, match=f"can be compiled, {said}"):
                give(model)
    for backend in ("fuse", "Fusee", "FUSEE"):
        with pytest.raises(UnknownBackend, match="'fusee'; known names"):
            api.compile(step, backend=backend)
    mode: Any = ["default"]
    with pytest.raises(OptionError, match="no mode"):
        api.compile(step, mode=mode)
    for mode in registry.MODES:
        for dynamic in (None, True, False):
            fast = api.compile(step, mode=mode, dynamic=dynamic)
            torch.testing.assert_close(fast(x), step(x))
    graphs = {}
    for mode in registry.MODES:
        found: Any = registry.lookup("fusee", mode=mode)
        graphs[mode] = found.options.graphs
    assert [mode for mode in graphs if not graphs[mode]] == ["max-autotune-no-cudagraphs"]
    asked: Any = registry.lookup("fusee", {"graphs": True}, "max-autotune-no-cudagraphs")
    assert asked.options.graphs


def branches(t: Tensor) -> Tensor:
    return t + 1 if t.sum() > 3 else t


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: api.compile(step, options={"treads": 1}), "'threads'; known .* fallback"),
        (lambda: api.compile(step, options={"threads": "1"}), "takes int from 0"),
        (lambda: api.compile(step, backend="nope"), "there is no backend named 'nope'"),
        (lambda: fusee.explain(step, backend="nope"), "there is no backend named 'nope'"),
        (lambda: fusee.export(branches, (x,)), r"bool\(\) needs the value"),
        (lambda: api.compile(branches, fullgraph=True)(x), r"bool\(\) needs the value"),
        (
            lambda: api.compile(step, options={"guard_filter_fn": lambda guards: None})(x),
            "gave NoneType, and no answers",
        ),
    ],
)
def test_an_error_has_the_programs_line_and_few_frames_of_ours(wrong: Any, said: str) -> None:
    with pytest.raises(FuseeError, match=said) as caught:
        wrong()
    assert "test_compile.py" in str(caught.value.where)
    frames = traceback.extract_tb(caught.value.__traceback__)
    ours = os.path.dirname(fusee.__file__)
    assert len([one for one in frames if one.filename.startswith(ours)]) <= 2


def test_an_error_that_the_program_raises_keeps_its_frames() -> None:
    def raising(t: Tensor) -> Tensor:
        raise FuseeError("the program's own")

    with pytest.raises(FuseeError, match="own") as caught:
        api.compile(raising)(x)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "raising"
    assert caught.value.where is None


def test_class_methods_and_static_methods_below_compile(backend: Counting) -> None:
    class Scales:
        scale = 3

        @api.compile(backend=backend)
        @classmethod
        def by_class(cls, t: Tensor) -> Tensor:
            return t * cls.scale

        @api.compile(backend=backend)
        @staticmethod
        def doubled(t: Tensor) -> Tensor:
            return t * 2

    for owner in (Scales, Scales()):
        torch.testing.assert_close(owner.by_class(x), x * 3)
        torch.testing.assert_close(owner.doubled(x), x * 2)
    assert len(backend.graphs) == 2


@pytest.mark.parametrize("op", [torch.ops.aten.sin, torch.ops.aten.sin.default])
def test_an_operator_is_one_node(op: Any, backend: Counting) -> None:
    torch.testing.assert_close(api.compile(op, backend=backend, fullgraph=True)(x), x.sin())
    assert len(backend.graphs) == 1


def test_what_is_said_of_a_function_in_c_names_no_line_of_ours() -> None:
    with pytest.warns(FuseeWarning, match="print runs eagerly.* To do: remove the print") as said:
        api.compile(print)("", end="")
    assert "/fusee/" not in str(said[0].message)


def broken(gm: fx.GraphModule, example_inputs: Any) -> Any:
    raise RuntimeError("out of order")


@pytest.mark.parametrize("problem", ["raised RuntimeError: out of order", "returned NoneType"])
def test_backends_that_fail(problem: str, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("FUSEE_DUMP", str(tmp_path))
    backend = broken if "raised" in problem else lambda gm, example_inputs: None
    with pytest.raises(BackendError) as error:
        api.compile(step, backend=backend)(x)
    text = str(error.value)
    assert problem in text and f"#{anchor(BackendError)}" in text
    assert f"backend {backend.__name__!r} " in text
    assert "test_compile.py" in text and "return t * scale + shift" in text
    (saved,) = tmp_path.iterdir()
    assert str(saved) in text
    names: dict[str, Any] = {}
    exec(saved.read_text(), names)
    torch.testing.assert_close(names["graph"](x)[0], step(x))

    told = pytest.warns(FuseeWarning, match=f"runs eagerly: backend .* {problem}")
    with torch._dynamo.config.patch(suppress_errors=True), told:
        torch.testing.assert_close(api.compile(step, backend=backend)(x), step(x))
    fast = api.compile(step, backend=backend, options={"fallback": "eager"})
    with pytest.warns(FuseeWarning, match=f"runs eagerly: backend .* {problem}") as said:
        torch.testing.assert_close(fast(x), step(x))
        torch.testing.assert_close(fast(x, 3.0), step(x, 3.0))
    assert len(said) == 1


def test_code_that_llvm_refuses_runs_eagerly_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also though threads are still busy with it when the backend is done."""
    real = jit.Build.add

    def add(build: jit.Build, text: str, name: str = "kernel") -> str:
        return real(build, text.replace("fmul", "fmull") + f"; {id(build)}", name)

    monkeypatch.setattr(jit.Build, "add", add)
    options = {"cache": False, "check": False}
    with pytest.raises(CompileError, match="fmull"):
        api.compile(step, options=options)(x)
    fast = api.compile(step, options={**options, "fallback": "eager"})
    with pytest.warns(FuseeWarning, match="runs eagerly: backend .* LLVM") as said:
        for _ in range(2):
            torch.testing.assert_close(fast(x), step(x))
    assert len(said) == 1


def test_fullgraph(backend: Counting) -> None:
    def branch(t: Tensor) -> Tensor:
        if t.sum() > 0:
            return t + 1
        return t - 1

    with pytest.raises(GraphBreakError) as error:
        api.compile(branch, backend=backend, fullgraph=True)(x)
    assert error.value.reason and error.value.remedy
    assert "in branch:   if t.sum() > 0:" in str(error.value.where)
    assert not backend.graphs

    def wrong(t: Tensor) -> Tensor:
        raise ValueError("the user's own")

    for _ in range(2):
        with pytest.raises(ValueError, match="the user's own"):
            api.compile(wrong, backend=backend, fullgraph=True)(x)


def test_the_limit_of_versions_is_told_once(backend: Counting) -> None:
    fast = api.compile(step, backend=backend, recompile_limit=2, dynamic=False)
    with pytest.warns(FuseeWarning, match=r"step has 2 compiled versions.* t was") as said:
        for size in range(1, 7):
            torch.testing.assert_close(fast(x[:1].expand(size)), step(x[:1].expand(size)))
    assert len(said) == 1 and len(backend.graphs) == 2
