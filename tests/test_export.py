"""fusee.export with dynamic_shapes: the forms of torch.export, run at other sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import fusee
from fusee.errors import ConstantSizeError, GraphBreakError, OptionError, SizeError
from tests.compare import assert_same

BATCH = Dim("batch", min=2, max=64)


def joined(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return torch.cat([x, y]) * x.shape[0], x.shape[0] + y.shape[0]


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: BATCH}, "y": {0: Dim("other")}},
        {"x": {0: Dim.AUTO, 1: Dim.STATIC}, "y": (Dim.DYNAMIC, None)},
        ({0: BATCH}, [Dim.AUTO, 4]),
        [{0: Dim.DYNAMIC(min=2, max=64) if callable(Dim.DYNAMIC) else BATCH}, {0: Dim.AUTO}],
    ],
)
def test_the_forms_of_torch_export(shapes: Any) -> None:
    exported = fusee.export(joined, (torch.randn(6, 4), torch.randn(3, 4)), dynamic_shapes=shapes)
    for n, m in ((6, 3), (9, 2), (3, 30)):
        x, y = torch.randn(n, 4), torch.randn(m, 4)
        want, got = joined(x, y), exported(x, y)
        torch.testing.assert_close(got[0], want[0])
        assert got[1] == want[1]
    with pytest.raises(SizeError, match=r"y.size\(1\) == 4"):
        exported(torch.randn(6, 4), torch.randn(3, 5))


def test_containers_keywords_and_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, pair: list[Tensor], more: dict[str, Tensor], *, scale: Tensor) -> Any:
            x = torch.cat(pair, 1)
            return {"y": self.inner(x) + more["bias"], "z": scale * x.shape[0]}

    batch, model = Dim("batch"), Model().eval()

    def given(n: int) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        pair = [torch.randn(n, 1), torch.randn(n, 3)]
        return (pair, {"bias": torch.randn(n, 3)}), {"scale": torch.randn(2)}

    args, kwargs = given(5)
    shapes = {"pair": [{0: batch}, {0: batch}], "more": {"bias": {0: batch}}, "scale": None}
    exported = fusee.export(model, args, kwargs, dynamic_shapes=shapes)
    for n in (5, 7, 2):
        (pair, more), named = given(n)
        want, got = model(pair, more, **named), exported(*pair, more["bias"], named["scale"])
        torch.testing.assert_close(got, want)
    assert "pair[1].size(0) == pair[0].size(0)" in " ".join(exported.meta["relations"])
    with pytest.raises(SizeError):
        exported(torch.randn(5, 1), torch.randn(6, 3), torch.randn(5, 3), torch.randn(2))


def test_derived_dims() -> None:
    half = Dim("half", min=2, max=20)

    def folded(x: Tensor, y: Tensor) -> Tensor:
        return x.view(2, -1, 3).sum(0) + y

    args = torch.randn(8, 3), torch.randn(4, 3)
    exported = fusee.export(folded, args, dynamic_shapes={"x": {0: 2 * half}, "y": {0: half}})
    for n in (4, 7):
        x, y = torch.randn(2 * n, 3), torch.randn(n, 3)
        torch.testing.assert_close(exported(x, y), folded(x, y))
    with pytest.raises(SizeError, match="there are"):
        exported(torch.randn(8, 3), torch.randn(5, 3))
    with pytest.raises(SizeError):
        exported(torch.randn(44, 3), torch.randn(22, 3))
    alone = fusee.export(
        lambda x: x.view(2, -1), (torch.randn(9 - 1),), dynamic_shapes={"x": {0: 2 * half}}
    )
    assert alone(torch.randn(12)).shape == (2, 6)
    with pytest.raises(SizeError, match="% 2"):
        alone(torch.randn(13))
    with pytest.raises(OptionError, match="half"):
        fusee.export(
            folded, (args[0], torch.randn(5, 3)), dynamic_shapes=[{0: 2 * half}, {0: half}]
        )


def test_relations_are_listed_and_checked() -> None:
    def program(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[0] % 8)) if x.shape[0] > 4 else x

    exported = fusee.export(program, (torch.randn(6, 2),), dynamic_shapes={"x": {0: BATCH}})
    assert "x.size(0) >= 5" in exported.meta["relations"]
    assert "x.size(0) <= 64" in exported.meta["relations"]
    assert exported(torch.randn(11, 2)).shape == (16, 2)
    for n, failed in ((3, "x.size(0) >= 5"), (65, "x.size(0) <= 64"), (1, "x.size(0) >= 2")):
        with pytest.raises(SizeError) as error:
            exported(torch.randn(n, 2))
        assert failed in str(error.value) and f"x.size(0) = {n}" in str(error.value)


def test_a_dim_that_the_program_makes_constant_names_the_line() -> None:
    def looped(x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = x + 1
        return x

    with pytest.raises(ConstantSizeError, match=r"in range\(x.shape\[0\]\)"):
        fusee.export(looped, (torch.randn(3),), dynamic_shapes={"x": {0: BATCH}})
    exported = fusee.export(looped, (torch.randn(3),), dynamic_shapes={"x": {0: Dim.AUTO}})
    assert "x.size(0) == 3" in exported.meta["relations"]


def test_what_is_computed_of_sizes_is_a_result() -> None:
    def program(x: Tensor) -> Any:
        n = x.shape[0]
        texts = f"{n:>4} of {x.shape}", str(n), f"{[*x.shape]}"
        shapes = x.shape, torch.cat([x, x]).shape, torch.zeros(2, 3).shape, [*x.shape]
        floats = n / 3, math.sqrt(n), n**0.5
        whole = round(n / 4), int(math.sqrt(n + 3)), math.gcd(n, 12)
        return {"x": x[: whole[1]] * n, "texts": texts, "shapes": shapes, "more": (floats, whole)}

    exported = fusee.export(program, (torch.randn(6, 2),), dynamic_shapes={"x": {0: BATCH}})
    for n in (6, 9, 2):
        x = torch.randn(n, 2)
        want, got = program(x), exported(x)
        torch.testing.assert_close(got.pop("x"), want.pop("x"))
        assert got == want and [*map(type, got["shapes"])] == [*map(type, want["shapes"])]


def counted(x: Tensor) -> Any:
    rows = x[x[:, 0] > 0]
    mean = x.mean().item()
    return rows, rows.shape, f"{rows.shape[0]} rows", x[: len(rows)] + mean, mean


def found(x: Tensor) -> Any:
    values, counts = torch.unique((x * 2).long(), return_counts=True)
    first, second = (x[:2, 0].abs() * 2).long().tolist()
    return values, counts.shape, values.numel() / 2, [first, first + second]


def put(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k in range(3):
        rows = (x[:, 0].abs() * 2).long() == k
        out[rows] += x[rows] * k
    return out


@pytest.mark.parametrize("program", [counted, found, put])
def test_sizes_that_only_the_data_knows(program: Any) -> None:
    exported = fusee.export(program, (torch.randn(6, 3),), dynamic_shapes={"x": {0: Dim.AUTO}})
    for n in (6, 9, 2):
        x = torch.randn(n, 3)
        assert_same(exported(x), program(x))


def test_checks_of_sizes_that_only_the_data_knows() -> None:
    def program(x: Tensor) -> Tensor:
        rows = x.nonzero()
        torch._check(len(rows) > 3)
        x += 1
        return torch.ones(len(rows)) if len(rows) > 2 else x

    exported = fusee.export(program, (torch.ones(4),))
    assert exported(torch.ones(4)).shape == (4,)
    with pytest.raises(RuntimeError, match="u0 > 3"):
        exported(torch.eye(4)[0])
    with pytest.raises(GraphBreakError, match="u0 > 3"):
        fusee.export(lambda x: x.nonzero().size(0) > 3 and x, (torch.ones(4),))


def test_integers_that_vary() -> None:
    def scaled(x: Tensor, n: int) -> Tensor:
        return x[:n] * n

    for shapes in ({"x": None, "n": Dim.DYNAMIC}, (None, Dim.DYNAMIC)):
        exported = fusee.export(scaled, (torch.randn(9), 3), dynamic_shapes=shapes)
        for n in (3, 5):
            x = torch.randn(9)
            torch.testing.assert_close(exported(x, n), scaled(x, n))


@pytest.mark.parametrize(
    "shapes",
    [{"z": None}, {"x": {3: BATCH}}, {"x": (BATCH,)}, ({0: BATCH},), {"x": {0: 5}}, {"x": {0: "b"}},
     {"x": {0: Dim("large", min=7)}}],
)  # fmt: skip
def test_forms_that_do_not_fit(shapes: Any) -> None:
    with pytest.raises(OptionError, match="dynamic_shapes"):
        fusee.export(joined, (torch.randn(6, 4), torch.randn(3, 4)), dynamic_shapes=shapes)


def test_wrong_arguments_of_export_are_told() -> None:
    x = torch.ones(3)
    wrong: Any = x
    for given in ((wrong,), ((x,), wrong)):
        with pytest.raises(OptionError, match=r"as a (tuple|dict), not Tensor[\s\S]*fn, \(x,\)"):
            fusee.export(torch.sin, *given)
    for shapes, said in (
        ("auto", "'auto' says nothing of the arguments"),
        ([{3: BATCH}], "x has axes 0 to 0"),
        ({"z": None}, "no argument 'z'"),
    ):
        with pytest.raises(OptionError, match=rf"{said}[\s\S]*try    for each argument"):
            fusee.export(lambda x: x + 1, (x,), dynamic_shapes=shapes)
