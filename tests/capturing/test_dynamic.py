"""What says that a size varies: names, a second value, an earlier process of the same job."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee import log
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from fusee.errors import CacheWarning, ConstantSizeError, OptionError
from fusee.runtime.cache import Job
from tests.capturing.same import Traced, shape_of


class Counted:
    """A function compiled for a backend that takes symbols and runs graphs as they are."""

    def __init__(self, fn: Callable[..., Any], **arguments: Any) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

        def backend(gm: torch.fx.GraphModule, examples: Any, **_: Any) -> Callable[..., Any]:
            self.graphs.append(gm)
            return gm.forward

        backend.__dict__["takes_symbols"] = True
        self.run = fusee.compile(fn, backend=backend, **arguments)
        self.fn = fn

    def __call__(self, *args: Any) -> None:
        torch.testing.assert_close(self.run(*args), self.fn(*args))


@pytest.fixture
def told() -> Iterator[list[str]]:
    seen: list[str] = []
    undo = log.subscribe(lambda record: seen.append(record.text), "dynamic", "recompiles")
    yield seen
    undo()


def scaled(x: Tensor, n: int) -> Tensor:
    return x * x.shape[0] * n


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize(
    ("names", "count"),
    [
        ("L['x']:0, n", 1), ("x, L['n']", 1), (["x.size(0)", "n"], 1), (r"L\['[xn]'\]", 1),
        (".*", 1), ("x:1, n", 3), ("L['x']", 3), ("xs, n", 3),
    ],
)  # fmt: skip
def test_names_of_sources(names: Any, count: int, dynamic: bool | None) -> None:
    counted = Counted(scaled, options={"dynamic_sources": names}, dynamic=dynamic)
    for n in (3, 4, 6):
        counted(torch.randn(n, 2), n)
    assert len(counted.graphs) == (count if dynamic is False else min(count, 2))


@pytest.mark.parametrize("name", ["self.inner.scale", "L['self']._modules['inner'].scale"])
def test_an_attribute_is_named_as_we_say_it_or_as_torch_does(name: str) -> None:
    class Inner(nn.Module):
        scale = 2

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.inner.scale = 2

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.inner(x))

    model = Outer()
    graphs: list[Any] = []
    run = fusee.compile(
        model,
        backend=lambda gm, _, **options: graphs.append(gm) or gm.forward,  # type: ignore[func-returns-value]
        options={"dynamic_sources": name},
    )
    for scale in (2, 7, 9):
        model.inner.scale = scale
        torch.testing.assert_close(run(torch.ones(3)), torch.sin(torch.full((3,), float(scale))))
    assert len(graphs) == 1


def test_names_of_torchs_configuration() -> None:
    for setting, value in (("dynamic_sources", "L['x']:0"), ("unbacked_sources", "L['x']:0")):
        with torch.compiler.config.patch({setting: value}):  # type: ignore[attr-defined]
            counted = Counted(lambda x: x * 2)
            for n in (3, 4):
                counted(torch.randn(n, 2))
        assert len(counted.graphs) == 1
    if hasattr(torch.compiler.config, "dynamic_values"):
        with torch.compiler.config.patch(dynamic_values="3"):  # type: ignore[attr-defined]
            counted = Counted(lambda x: x * 2)
            for n in (3, 4, 5):
                counted(torch.randn(n, 2))
        assert len(counted.graphs) == 1


def test_names_are_texts() -> None:
    with pytest.raises(OptionError, match="dynamic_sources"):
        fusee.compile(scaled, options={"dynamic_sources": [3]})


# ---------------------------------------------------------------------------- jobs

PROGRAM = """
import os, torch, fusee
graphs = []
def backend(gm, examples):
    graphs.append(gm)
    return gm.forward
backend.takes_symbols = True
@fusee.compile(backend=backend)
def step(x, n):
    return x * n{change}
for n in (3, 5, 7):
    step(torch.ones(n, 2), n)
print(len(graphs))
"""


def run(folder: Path, change: str = "", **variables: str) -> tuple[int, str]:
    """How many graphs a process compiles, and what it says."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_COMPILE_JOB", "FUSEE"))}
    path = folder / "program.py"
    path.write_text(PROGRAM.format(change=change))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=True,
        env={**kept, "FUSEE_CACHE_DIR": str(folder / "cache"), **variables},
    )  # fmt: skip
    return int(done.stdout), done.stderr


def test_the_next_process_compiles_the_dynamic_version_at_once(tmp_path: Path) -> None:
    assert run(tmp_path, FUSEE_JOB_ID="train")[0] == 2
    assert run(tmp_path, TORCH_COMPILE_JOB_ID="train", RANK="3")[0] == 1
    assert run(tmp_path, " + 1", FUSEE_JOB_ID="train")[0] == 2  # another function
    (path,) = (tmp_path / "cache/jobs/train").iterdir()
    rows = json.loads(path.read_text())["functions"]
    assert len(rows) == 2 and all(name.startswith("step ") for name in rows)
    first = next(iter(rows.values()))
    assert first["varies"] == {"n": [3, 5], "x.size(0)": [3, 5]}
    assert first["at"].endswith("program.py:8 in step")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "fusee job 0", "functions": {}}'])
def test_a_damaged_file_is_ignored_with_a_notice(tmp_path: Path, text: str) -> None:
    good = Job(tmp_path, "j")
    good.learn("f", "", {"a": [1, 2]})
    (good.folder / "0000.json").write_text(text)
    with pytest.warns(CacheWarning, match="damaged or of another version"):
        assert {*Job(tmp_path, "j").seen("f")} == {"a"}
    with pytest.warns(CacheWarning):
        Job(tmp_path, "j").learn("f", "", {"b": [1, 2]})
    assert (good.folder / "0000.json").exists()  # another version may know what to do with it


def test_ranks_unite_what_they_learn(tmp_path: Path) -> None:
    ranks = [Job(tmp_path, "a/b") for _ in range(4)]
    for k, rank in enumerate(ranks):  # none has seen what the others wrote
        rank.learn("f 1", "f.py:1", {f"x.size({k})": [k, 9]})
    after = Job(tmp_path, "a/b").seen("f 1")
    assert after == {f"x.size({k})": [k, 9] for k in range(4)}
    assert len(list(ranks[0].folder.iterdir())) == 1


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    one, other = Job(tmp_path, "j"), Job(tmp_path, "j")
    write = other._read
    reads = iter([lambda: one.learn("f", "", {"a": [1, 2]}), lambda: None])

    def between() -> list[Path]:  # the other writes after this one has read
        found = write()
        next(reads)()
        return found

    other._read = between  # type: ignore[method-assign]
    other.learn("f", "", {"b": [1, 2]})
    assert len(list(one.folder.iterdir())) == 2
    assert {*Job(tmp_path, "j").seen("f")} == {"a", "b"}


def test_a_folder_that_cannot_be_written_to_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("")
    job = Job(tmp_path / "jobs", "j")
    with pytest.warns(CacheWarning, match="cannot be written to"):
        job.learn("f", "", {"a": [1, 2]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.learn("f", "", {"b": [1, 2]})


# ---------------------------------------------------------------------------- misses and limits


def test_a_miss_says_which_relation_failed(told: list[str]) -> None:
    def program(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 8 == 0 else x - 1

    counted = Counted(program, dynamic=True)
    counted(torch.randn(16))
    counted(torch.randn(9))
    relation = "x.size(0) % 8 == 0 held with x.size(0) = 16, and does not with x.size(0) = 9"
    assert any(relation in text for text in told), told


def test_a_miss_says_which_comparison_of_floats_failed(told: list[str]) -> None:
    def program(x: Tensor) -> Tensor:
        return x * 2 if math.log(x.shape[0]) < math.sqrt(x.shape[0]) - 1 else x - 1

    counted = Counted(program, dynamic=True)
    for n in (9, 10, 30):
        counted(torch.randn(n))
    assert len(counted.graphs) == 2
    compared = "log(float(x.size(0))) < (sqrt(float(x.size(0))) - 1.0)"
    assert any(text.startswith(f"{compared} was False, is True") for text in told), told


def limited(fn: Any, **more: Any) -> tuple[CompiledFunction, list[str]]:
    said: list[str] = []
    backend: Any = lambda gm, _: gm.forward  # noqa: E731
    return CompiledFunction(
        fn, backend, Policy(), 3, notice=lambda text, where: said.append(text), **more
    ), said


def test_the_limit_says_once_which_guard_failed_and_what_to_do() -> None:
    def looped(x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = x + 1
        return x

    compiled, said = limited(looped)
    for n in (3, 5, 4, 9, 7, 12, 11, 13):
        torch.testing.assert_close(compiled(torch.zeros(n)), torch.full((n,), float(n)))
    (text,) = said
    assert "looped has 4 compiled versions" in text
    assert "x was" in text or "x.size(0)" in text
    assert "To do:" in text

    def keyed(x: Tensor, key: str) -> Tensor:
        return x + len(key)

    compiled, said = limited(keyed)
    for key in "abcdefg":
        compiled(torch.zeros(2), key)
    (text,) = said
    assert "3 of them could not be used: key was 'c', is 'd'. To do: give it one value" in text


@pytest.mark.parametrize(
    "turns",
    [
        (lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4, dtype=torch.float64)),
        (lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4, requires_grad=True)),
        (lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 3, 4)),
        (lambda n: torch.randn(n, 4), lambda n: torch.randn(4, n).t()),
        (lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 1, 4), lambda n: torch.randn(n)),
    ],
    ids=["dtype", "gradients", "rank", "order", "ranks"],
)
def test_a_size_varies_whatever_else_the_calls_differ_in(turns: Any) -> None:
    counted = Counted(lambda x: (x * 2).sum(-1))
    for n in range(5, 15):
        for make in turns:
            counted(make(n))
    assert len(counted.graphs) <= 2 * len(turns)


def test_a_version_with_symbols_comes_before_eager() -> None:
    def program(x: Tensor, each: bool) -> Tensor:
        if each:
            return torch.stack([x[k] for k in range(x.shape[0])])
        return x * 2

    compiled, said = limited(program)
    for n in (3, 5, 4):  # the loop needs the number: static versions up to the limit
        compiled(torch.zeros(n), True)
    for n in (6, 8, 7, 9, 11):
        torch.testing.assert_close(compiled(torch.ones(n), False), torch.full((n,), 2.0))
    assert len(compiled.entries) == 4 and not said


# ---------------------------------------------------------------------------- marks


class Held:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Sub(Tensor):
    """A subclass without code of its own."""


SIZES = (3, 9, 5, 12)


@pytest.mark.parametrize("of", ["fusee", "torch"])
@pytest.mark.parametrize(
    "place",
    [
        lambda x: x, lambda x: [x], lambda x: {"a": (x,)}, Held, lambda x: x.as_subclass(Sub),
    ],
)  # fmt: skip
def test_marks_wherever_a_tensor_is(place: Callable[[Tensor], Any], of: str) -> None:
    marks = fusee.compiler if of == "fusee" else torch._dynamo

    def program(given: Any) -> Tensor:
        while not isinstance(given, Tensor):
            if isinstance(given, Held):
                given = given.x
            else:
                given = given["a"] if isinstance(given, dict) else given[0]
        return given * 2

    for mark, count in (("mark_dynamic", 1), ("maybe_mark_dynamic", 1), ("mark_static", 4)):
        traced = Traced(program)
        for n in SIZES:
            given = place(torch.randn(n, 2))
            x = given
            while not isinstance(x, Tensor):
                x = (
                    x.x
                    if isinstance(x, Held)
                    else next(iter(x.values() if isinstance(x, dict) else x))
                )
            getattr(marks, mark)(x, [0])
            torch.testing.assert_close(traced(given), program(given))
        assert len(traced.graphs) == count, mark


def test_other_marks_at_a_later_call_count_for_the_next_version() -> None:
    traced = Traced(lambda x: x * 2)
    for shape, axis in (((3, 4), 0), ((5, 4), 1), ((7, 6), 1), ((8, 9), 0)):
        x = torch.randn(shape)
        fusee.compiler.mark_dynamic(x, axis)
        traced(x)
    assert len(traced.graphs) == 2


def test_ranges_of_several_calls_all_hold() -> None:
    traced = Traced(lambda x: x * 2)
    for n in (6, 9, 7, 30):
        x = torch.randn(n, 2)
        fusee.compiler.mark_dynamic(x, 0, max=20, hint_override=8)
        fusee.compiler.mark_dynamic(x, 0, min=4)
        if n == 30:
            with pytest.raises(ConstantSizeError, match="max"):
                traced(x)
        else:
            traced(x)
    assert len(traced.graphs) == 1


@pytest.mark.parametrize("mark", [fusee.compiler.mark_static, torch._dynamo.mark_static])
def test_mark_static_in_what_is_compiled(mark: Any) -> None:
    def program(x: Tensor) -> Tensor:
        mark(x, 0)
        return x * 2

    traced = Traced(program)
    for n in (3, 9, 5):
        traced(torch.randn(n, 2))
    assert len(traced.graphs) == 3 and not traced.stops


def test_a_class_of_modules_is_marked() -> None:
    class Scaled(nn.Module):
        scale = 3

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    assert fusee.compiler.mark_static(Scaled) is Scaled
    graphs, model = [], Scaled()
    run = fusee.compile(model, backend=lambda gm, _: graphs.append(gm) or gm.forward)  # type: ignore[func-returns-value]
    for scale in (3, 8, 5):
        model.scale = scale
        assert run(torch.ones(1)).item() == scale
    assert len(graphs) == 3


def test_an_address_that_is_marked() -> None:
    traced, tensors = Traced(lambda x: x * 2), [torch.ones(3), torch.ones(3)]
    for guard, count in ((False, 1), (True, 3)):
        for x in tensors:
            fusee.compiler.mark_static_address(x, guard=guard)
            traced.compiled.reset()
        for x in tensors:
            traced(x)
        assert len(traced.graphs) == count


def test_open_places_from_the_end_are_written_and_go_backward() -> None:
    """`p[:, -n:]`, whose gradient is put at the place that the program gave."""

    def fn(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        p = p * 2
        p[:, -n:] = x
        p[:, -n] += 1
        return p[:, -n:] * 3 + p[:, -n].unsqueeze(1)

    compiled = fusee.compile(fn)
    for n, more in ((3, 0), (4, 0), (5, 2), (7, 1)):
        found = []
        for run in (fn, compiled):
            torch.manual_seed(0)
            p = torch.randn(2, n + more, 3, requires_grad=True)
            x = torch.randn(2, n, 3, requires_grad=True)
            out = run(p, x)
            (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
            found.append((out.detach(), p.grad, x.grad))
        torch.testing.assert_close(found[1], found[0])


def test_divmod_of_a_float_that_varies() -> None:
    def fn(x: torch.Tensor, seconds: float) -> Any:
        minutes, left = divmod(seconds, 60)
        return x * left + minutes, divmod(7, seconds)[0]

    traced, x = Traced(fn), torch.ones(2)
    for seconds in (100.5, 200.25, -3000.25, 0.5):
        assert shape_of(traced(x, seconds)) == shape_of(fn(x, seconds))
    assert traced.entries == 2 and not traced.stops
    with pytest.raises(ZeroDivisionError):
        traced(x, 0.0)


def put(x: Tensor, at: Any, value: float) -> Tensor:
    y = x.clone()
    y[at] = value
    return y


TAKE_FLOATS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "%": lambda x, p: x % p,
    "p %": lambda x, p: p % x,
    "remainder": lambda x, p: torch.remainder(x, p),
    "fmod": lambda x, p: x.fmod(p),
    "//": lambda x, p: x // p,
    "p //": lambda x, p: p // x,
    "floor_divide": lambda x, p: torch.floor_divide(x, p),
    "clamp_min": lambda x, p: x.clamp_min(p),
    "clamp_max": lambda x, p: torch.clamp_max(x, max=p),
    "an element": lambda x, p: put(x, 0, p),
    "a list": lambda x, p: put(x, [0, 1], p),
    "an index": lambda x, p: put(x, torch.tensor([0, 2]), p),
    "a mask": lambda x, p: put(x, x > 2, p),
    "parts": lambda x, p: put(x, (None, slice(0, 3, 2)), p),
    "where": lambda x, p: torch.where(x > 2, x, p),
    "where of a number": lambda x, p: torch.where(x[2] > 2, x[2], p),
    "where of numbers": lambda x, p: torch.where(x > 2, p, p * 2),
    "addcmul": lambda x, p: x.addcmul(x, x, value=p),
    "addcmul of floats": lambda x, p: x.addcmul(x.double(), x, value=p),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str
)
@pytest.mark.parametrize("name", TAKE_FLOATS)
def test_calls_that_take_floats_that_vary(name: str, dtype: torch.dtype) -> None:
    fn, x = TAKE_FLOATS[name], (torch.arange(6) * 1.37 + 0.3).to(dtype)
    traced, compiled = Traced(fn), fusee.compile(fn)
    for p in (1.7, -2.3, 0.1, 3.0, 2.9999):
        want = fn(x, p)
        for got in (traced(x, p), compiled(x, p)):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want, equal_nan=True)
    if dtype.is_floating_point:
        assert traced.entries == 2  # else a number that does not fit is refused


IN_PLACE = "clamp_ clamp_min_ clamp_max_ remainder_ fmod_ floor_divide_ add_ mul_ pow_ gt_".split()


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_writes_of_floats_that_integers_make(name: str, dtype: torch.dtype) -> None:
    def fn(x: Tensor, k: int) -> Any:
        y = x * 1
        return getattr(y, name)(k / 3 + 0.1) + 1, y

    compiled = fusee.compile(fn)
    for k in (1, 2, 4):
        found: list[Any] = []
        for run in (fn, compiled):
            try:
                found.append(run(torch.linspace(-3, 3, 24).to(dtype), k))
            except RuntimeError as error:  # an integer takes no float
                found.append(str(error))
        if isinstance(found[0], str):
            assert found[1] == found[0]
        else:
            torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2, equal_nan=True)


def test_a_limit_that_varies_is_rounded_before_it_is_compared() -> None:
    compiled = fusee.compile(lambda x, k: x.clamp(-k / 3, k / 3) * 2)
    x = torch.tensor([0.66796875, 0.5, 1.3359375, 2.0], dtype=torch.bfloat16)
    for k in (1, 2, 4):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(leaf, k).sum().backward()
        (other.clamp(-k / 3, k / 3) * 2).sum().backward()
        assert [*map(str, (leaf.grad,))] == [*map(str, (other.grad,))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("power", [lambda x, k: x**k, lambda x, k: k**x, lambda x, k: x.sum() ** k])
def test_gradients_of_powers_of_integers_that_vary(power: Any, dtype: torch.dtype) -> None:
    def fn(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return power(x, k), x.real.sum().long() ** k * x

    compiled = fusee.compile(fn)
    for k in (1, 2, 3, 5):
        found = []
        for run in (fn, compiled):
            x = torch.linspace(0.5, 1.5, 3).to(dtype).requires_grad_()
            out = run(x, k)
            torch.stack([y.real.sum() for y in out]).sum().backward()
            found.append((*out, x.grad))
        torch.testing.assert_close(found[1], found[0])


def test_distributions_of_floats_that_vary() -> None:
    """They ask whether their arguments are like tensors."""

    def fn(x: Tensor, scale: float) -> Tensor:
        return torch.distributions.Normal(x, scale).log_prob(x + 1)

    traced, x = Traced(fn), torch.ones(3)
    for scale in (0.5, 0.7, 1.3, 2.0):
        torch.testing.assert_close(traced(x, scale), fn(x, scale))
    assert traced.entries == 2


DISTRIBUTIONS: list[Callable[[Tensor], Any]] = [
    lambda x: torch.distributions.Beta(x, x + 1).rsample((2,)) * x,
    lambda x: torch.distributions.Dirichlet(x).rsample().log(),
    lambda x: torch.distributions.Binomial(5, logits=x, validate_args=False).sample() * x,
    lambda x: torch.distributions.kl_divergence(
        *[
            torch.distributions.MultivariateNormal(
                x * k, scale_tril=torch.diag_embed(x + k), validate_args=False
            )
            for k in (1, 2)
        ]
    ),
]


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("fn", DISTRIBUTIONS)
def test_distributions_of_sizes_that_vary(fn: Callable[[Tensor], Any], learns: bool) -> None:
    compiled = fusee.compile(fn, fullgraph=True)
    for n in (3, 4, 6):
        found = []
        given = torch.rand(n, 3) + 0.5
        for run in (fn, compiled):
            x = given.clone().requires_grad_(learns)
            torch.manual_seed(0)
            y = run(x)
            if learns:
                y.square().sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
