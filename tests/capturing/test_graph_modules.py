"""Modules that are FX graphs: what torch.export, torch.fx and their passes give is one graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

import fusee
from fusee import api
from fusee.debug import explain
from fusee.errors import FuseeWarning
from tests.counting import Counting


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return found


class Printing(nn.Module):
    """No graph holds its second line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        print(end="")
        return torch.relu(y)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(3, 3), Printing(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.middle(self.before(x)))
        return found


class _WithLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Printing) or super().is_leaf_module(m, module_qualified_name)


def traced_around() -> fx.GraphModule:
    root = Around()
    return fx.GraphModule(root, _WithLeaves().trace(root))


def exported(module: nn.Module, *args: Any, **named: Any) -> Any:
    return torch.export.export(module, args, **named).module()


IMAGE, ROW = (2, 3, 6, 6), (2, 3)
BATCH = torch.export.Dim("batch", min=2, max=64)


def split() -> nn.Module:
    whole = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    return split_module(whole, None, lambda node: int(node.name == "_2"))  # type: ignore[arg-type]


class Doubling(fx.GraphModule):
    """A graph with a call of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


def doubling() -> nn.Module:
    root = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return Doubling(root, fx.symbolic_trace(root).graph)


MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # how it is made, the input's sizes, how many graphs a call of a compiled one runs
    "exported": (lambda: exported(Convolved().eval(), torch.ones(IMAGE)), IMAGE, 1),
    "with a size left open": (
        lambda: exported(Convolved().eval(), torch.ones(IMAGE), dynamic_shapes={"x": {0: BATCH}}),
        (7, *IMAGE[1:]),
        1,
    ),
    "exported for training": (lambda: exported(Convolved().train(), torch.ones(IMAGE)), IMAGE, 1),
    "exported in core operators": (
        lambda: (
            torch.export.export(Convolved().eval(), (torch.ones(IMAGE),))
            .run_decompositions()
            .module()
        ),
        IMAGE,
        1,
    ),
    "unflattened": (
        lambda: torch.export.unflatten(
            torch.export.export(Convolved().eval(), (torch.ones(IMAGE),))
        ),
        IMAGE,
        1,
    ),
    "symbolic trace": (lambda: fx.symbolic_trace(Convolved().eval()), IMAGE, 1),
    "make_fx": (lambda: make_fx(Convolved().eval())(torch.ones(IMAGE)), IMAGE, 1),
    "split in two": (split, ROW, 1),
    "call of its own": (doubling, ROW, 1),
    "break in a module that it calls": (traced_around, ROW, 4),
    "beside a break": (lambda: nn.Sequential(traced_around(), nn.Linear(2, 3), Printing()), ROW, 7),
}
SHARED = {"beside a break": 2}  # graphs of a module's second copy, which are the first one's


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # torch copies its own
def test_a_module_that_is_a_graph(name: str, backend: Counting) -> None:
    make, sizes, graphs = MADE[name]
    eager = make()
    torch.manual_seed(0)
    module, x = make(), torch.randn(sizes)
    ran: list[fx.GraphModule] = []

    def noting(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = backend(gm, inputs)

        def noted(*args: Any) -> Any:
            ran.append(gm)
            return run(*args)

        return noted

    compiled = api.compile(module, backend=noting)
    for _ in range(3):
        ran.clear()
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
        assert len(ran) == graphs
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    assert len(backend.graphs) == graphs - SHARED.get(name, 0)


def test_arguments_by_name_and_in_containers(backend: Counting) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, *, scale: Any, more: Any) -> Any:
            return {"a": x * scale["k"], "b": [more[0] + 1, more[1]]}

    args, named = (
        (torch.ones(3),),
        {"scale": {"k": torch.tensor(2.0)}, "more": (torch.ones(2),) * 2},
    )
    module = torch.export.export(Named(), args, named).module()
    compiled = api.compile(module, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*args, **named), module(*args, **named))
    with pytest.raises(Exception) as eagers:  # whatever torch raises
        module(torch.ones(3), scale=1)
    with pytest.raises(type(eagers.value)):
        api.compile(module, backend=backend)(torch.ones(3), scale=1)
    assert len(backend.graphs) == 1


def test_a_guard_of_an_exported_module_is_kept(backend: Counting) -> None:
    module = exported(nn.Linear(3, 2), torch.ones(ROW))
    compiled = api.compile(module, backend=backend)
    compiled(torch.ones(ROW))
    for call in (module, compiled):
        with pytest.raises(AssertionError, match=r"Guard failed: input\.size"):
            call(torch.ones(5, 3))


def test_a_graph_that_changes_is_compiled_anew(backend: Counting) -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    compiled, x = api.compile(module, backend=backend), torch.randn(ROW)
    torch.testing.assert_close(compiled(x), module(x))
    (call,) = (node for node in module.graph.nodes if node.target == "1")
    with module.graph.inserting_after(call):
        more = module.graph.call_function(torch.sin, (call,))
    call.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    module.recompile()
    torch.testing.assert_close(compiled(x), module(x))
    assert len(backend.graphs) == 2


def test_hooks_around_what_breaks(backend: Counting) -> None:
    """A module with hooks is compiled between graphs too, and what the hooks do stays in order."""
    said: list[str] = []
    module = traced_around()
    module.register_forward_pre_hook(lambda *_: said.append("before"))
    module.register_forward_hook(lambda m, args, out: said.append("after") or out * 2)  # type: ignore[func-returns-value]
    x = torch.randn(ROW)
    want = module(x)
    compiled = api.compile(lambda t: module(t) + 1, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), want + 1)
    assert said == ["before", "after"] * 3
    assert len(backend.graphs) >= 4


# ------------------------------------------------------------------------------ never silent


class Callable_:
    def __call__(self, x: Tensor) -> Tensor:
        print(end="")
        return x


def test_what_has_no_graph_says_so_once() -> None:
    def shown(x: Tensor) -> Tensor:
        print(end="")
        return x

    class Shown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return shown(x)

    in_place = Shown()
    fusee.install()
    try:
        in_place.compile()
        by_torch = torch.compile(shown)
    finally:
        fusee.uninstall()
    ways: dict[str, Any] = {
        "shown": api.compile(shown),
        "Shown": api.compile(Shown()),
        "forward": api.compile(Shown().forward),
        "Callable_": api.compile(Callable_()),
        "torch.compile": by_torch,
        "in place": in_place,
    }
    for way, compiled in ways.items():
        with pytest.warns(FuseeWarning, match="runs eagerly: nothing of it became a graph") as said:
            compiled(torch.ones(2))
        (warning,) = said
        assert "print() shows" in str(warning.message), way
        assert "test_graph_modules.py" in str(warning.message), way
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(torch.ones(2))
            compiled(torch.ones(3))


def test_nothing_to_compute_is_nothing_to_tell(backend: Counting) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert api.compile(lambda x: [x], backend=backend)(3) == [3]


# ------------------------------------------------------------------------------ words


def test_places_are_the_users_lines_or_modules() -> None:
    """Lines of generated code are named by the user's lines that they came from, or by modules."""
    shown = str(explain(traced_around(), backend="eager")(torch.randn(ROW)))
    assert "<graph of GraphModule>:6 in middle:   middle = self.middle(before)" in shown
    module = exported(Convolved().eval(), torch.ones(IMAGE))
    told = str(explain(module, backend="eager")(torch.ones(IMAGE)))
    assert "1x aten.conv2d.default" in told
    compiled = api.compile(module)
    compiled(torch.ones(IMAGE))
    begins = str(api.report(compiled)[0]).splitlines()[1]
    assert "test_graph_modules.py" in begins and "self.conv(x)" in begins
    for text in (shown, told, begins):
        assert "eval_with_key" not in text and "call_module" not in text


def test_a_break_in_an_exported_graph_names_the_users_line() -> None:
    class Valued(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x) * (x.data_ptr() > 0)

    found = explain(fx.symbolic_trace(Valued()), backend="eager")(torch.ones(3))
    assert [stop.file for stop in found.breaks] == ["<graph of Valued>"] * len(found.breaks)
    assert found.graph_count == 2 and ".data_ptr()" in found.breaks[0].text
