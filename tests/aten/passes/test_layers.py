"""Folding, casting, packing and post-ops keep the results and do what they promise."""

from __future__ import annotations

import importlib
import operator
from typing import Any

import pytest
import torch
from torch import fx

from fusee.targets.cpu import onednn
from fusee.targets.cpu.onednn import is_native, packed
from tests.aten.passes.graphs import Build, through_passes

aten = torch.ops.aten
needs_onednn = pytest.mark.skipif(packed() is None, reason="this build has no oneDNN")
prepack_module = importlib.import_module("fusee.targets.cpu.onednn")
HALF = (torch.bfloat16, torch.float16)


def norm_of(build: Build, x: fx.Node, channels: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    weight, bias = build.weight(channels, dtype=dtype), build.weight(channels, dtype=dtype)
    mean = build.weight(channels, dtype=dtype)
    var = build.input((torch.rand(channels) + 0.1).to(dtype), is_static=True)
    op = aten._native_batch_norm_legit_no_training.default
    found = build.call(op, x, weight, bias, mean, var, 0.1, 1e-5)
    item = build.graph.call_function(operator.getitem, (found, 0))
    item.meta = {"val": found.meta["val"][0], "device": found.meta["device"]}
    return item


def conv(
    build: Build,
    x: fx.Node,
    cin: int,
    cout: int,
    k: int,
    *,
    groups: int = 1,
    stride: int = 1,
    bias: bool = True,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> fx.Node:
    dtype = dtype or torch.float32
    shape = (cin, cout // groups, k, k) if transposed else (cout, cin // groups, k, k)
    w = build.weight(*shape, dtype=dtype, scale=(cin // groups * k * k) ** -0.5)
    b = build.weight(cout, dtype=dtype) if bias else None
    pad = [k // 2] * 2
    return build.call(
        aten.convolution.default, x, w, b, [stride] * 2, pad, [1, 1], transposed, [0, 0], groups
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "bias"), [(1, True), (2, False)])
def test_norm_folds_into_convolution(
    dtype: torch.dtype, transposed: bool, groups: int, bias: bool
) -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 7).to(dtype))
    y = conv(build, x, 8, 12, 3, groups=groups, bias=bias, dtype=dtype, transposed=transposed)
    passed = through_passes(build, norm_of(build, y, 12, dtype))
    passed.check()
    assert not any("batch_norm" in t for t in passed.targets)
    assert not any("mul" in t for t in passed.targets)


def test_norm_of_a_convolution_with_two_users_is_left_beside_it() -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 7))
    y = conv(build, x, 8, 12, 3)
    passed = through_passes(build, norm_of(build, y, 12), build.call(aten.relu.default, y))
    passed.check()
    assert "aten.mul.Tensor" in passed.targets


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_norm_alone_is_one_factor_and_one_addend(dtype: torch.dtype) -> None:
    build = Build()
    x = build.input(torch.randn(2, 12, 5, 5).to(dtype))
    passed = through_passes(build, norm_of(build, x, 12, dtype))
    passed.check()
    assert not any("norm" in t for t in passed.targets)


def test_norm_folds_into_linear() -> None:
    build = Build()
    x = build.input(torch.randn(16, 32))
    y = build.call(aten.linear.default, x, build.weight(24, 32), build.weight(24))
    passed = through_passes(build, norm_of(build, y, 24))
    passed.check()
    assert passed.targets == ["aten.permute.default", "aten.addmm.default"]


@pytest.mark.parametrize("shape", [(1, 33), (1, 1, 33), (2, 33)])
@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_one_row_is_dot_products(
    shape: tuple[int, ...], is_dense: bool, bias: bool
) -> None:
    build = Build()
    weight = torch.randn(24, 33) if is_dense else torch.randn(33, 24).t()
    given = build.input(torch.randn(shape)), build.input(weight, is_static=True)
    passed = through_passes(
        build, build.call(aten.linear.default, *given, build.weight(24) if bias else None)
    )
    passed.check()
    is_product = {"aten.mm.default", "aten.addmm.default"}.intersection(passed.targets)
    assert bool(is_product) == (shape[0] == 2 or not is_dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("shape", [(16, 32), (2, 9, 32), (1, 32), (32,), (0, 32), (2, 3, 5, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    build = Build()
    x = build.input(torch.randn(*shape).to(dtype))
    w = build.weight(24, 32, dtype=dtype, scale=0.2)
    b = build.weight(24, dtype=dtype) if bias else None
    passed = through_passes(build, build.call(aten.linear.default, x, w, b))
    if passed.before[0].numel():
        passed.check()
    assert passed.after[0].stride() == passed.before[0].stride()
    if len(shape) > 1:
        assert "aten.linear.default" not in passed.targets


def test_linear_of_a_transposed_input() -> None:
    build = Build()
    x = build.input(torch.randn(2, 32, 9))
    y = build.call(aten.transpose.int, x, 1, 2)
    passed = through_passes(build, build.call(aten.linear.default, y, build.weight(24, 32), None))
    passed.check()


@needs_onednn
@pytest.mark.parametrize("leading", [(8,), (2, 4)])
def test_packed_linear(leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack_module, "packs_linear", lambda dtype: True)
    build = Build()
    x = build.input(torch.randn(*leading, 64))
    w, b = build.weight(96, 64, scale=0.1), build.weight(96)
    y = build.call(aten.relu.default, build.call(aten.linear.default, x, w, b))
    passed = through_passes(build, y)
    passed.check()
    assert passed.targets == ["mkldnn._linear_pointwise.default"]
    assert any("1 packed" in note for note in passed.notes)
    # another number of rows runs with the same packed weight
    values = [torch.randn(3, 64), *build.values[1:]]
    expected = torch.relu(values[0] @ values[1].t() + values[2])
    torch.testing.assert_close(passed.run(values)[0], expected)


@needs_onednn
@pytest.mark.parametrize("op", [aten.addmm.default, aten.mm.default])
def test_packed_product(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack_module, "packs_linear", lambda dtype: True)
    build = Build()
    x, w, b = build.input(torch.randn(8, 64)), build.weight(64, 96, scale=0.1), build.weight(96)
    y = build.call(op, b, x, w) if op is aten.addmm.default else build.call(op, x, w)
    other = build.call(aten.relu.default, build.call(aten.mm.default, x, w))
    passed = through_passes(build, build.call(aten.add.Tensor, y, other), other)
    passed.check()
    assert set(passed.targets) == {
        "mkldnn._linear_pointwise.default", "mkldnn._linear_pointwise.binary"
    }  # fmt: skip


@pytest.mark.skipif(is_native(torch.bfloat16), reason="bfloat16 is native here")
@pytest.mark.parametrize("dtype", HALF)
def test_half_products_run_in_float32(dtype: torch.dtype) -> None:
    build = Build()
    a = build.input(torch.randn(2, 16, 32).to(dtype))
    b = build.input(torch.randn(2, 32, 9).to(dtype))
    passed = through_passes(build, build.call(aten.bmm.default, a, b))
    passed.check()
    assert passed.targets.count("aten._to_copy.default") == 3


@needs_onednn
@pytest.mark.parametrize(
    ("cin", "cout", "k", "groups", "stride", "size"),
    [(3, 16, 7, 1, 2, 32), (16, 16, 3, 16, 1, 9), (16, 24, 1, 1, 1, 8), (16, 24, 1, 1, 2, 7),
     (16, 24, 3, 4, 1, 8), (16, 8, 1, 1, 1, 1), (1, 4, 3, 1, 1, 5)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_convolution_is_packed(
    cin: int, cout: int, k: int, groups: int, stride: int, size: int, dtype: torch.dtype
) -> None:
    build = Build()
    x = build.input(torch.randn(2, cin, size, size).to(dtype))
    y = conv(build, x, cin, cout, k, groups=groups, stride=stride, dtype=dtype)
    passed = through_passes(build, y)
    passed.check()
    wanted = "aten.addmm.default" if size == 1 else "mkldnn._convolution_pointwise.default"
    assert wanted in passed.targets
    values = [torch.randn(5, *build.values[0].shape[1:]).to(dtype), *build.values[1:]]
    if size > 1:
        assert passed.run(values)[0].shape[0] == 5


POSTOPS = [
    (aten.relu.default, ()), (aten.hardswish.default, ()), (aten.leaky_relu.default, (0.2,)),
    (aten.leaky_relu.default, ()), (aten.hardtanh.default, (0.0, 6.0)), (aten.hardtanh.default, ()),
    (aten.clamp.default, (-0.5, 0.5)),
]  # fmt: skip


@needs_onednn
@pytest.mark.parametrize(("op", "args"), POSTOPS, ids=lambda x: str(x))
def test_unary_inside_convolution(op: Any, args: Any) -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 9))
    y = build.call(op, conv(build, x, 8, 16, 3), *args)
    passed = through_passes(build, y)
    passed.check()
    assert passed.targets == ["mkldnn._convolution_pointwise.default"]


@needs_onednn
@pytest.mark.parametrize("op", [aten.gelu.default, aten.silu.default, aten.tanh.default])
def test_slow_postops_stay_outside(op: Any) -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 9))
    passed = through_passes(build, build.call(op, conv(build, x, 8, 16, 3)))
    passed.check()
    assert str(op) in passed.targets


@needs_onednn
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_residual_sum_inside_convolution(swapped: bool, relu: bool) -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 9))
    first = build.call(aten.relu.default, conv(build, x, 8, 16, 3))
    second = conv(build, first, 16, 16, 3)
    y = build.call(aten.add.Tensor, *((first, second) if swapped else (second, first)))
    if relu:
        y = build.call(aten.relu.default, y)
    passed = through_passes(build, y)
    passed.check()
    assert passed.targets == [
        "mkldnn._convolution_pointwise.default", "mkldnn._convolution_pointwise.binary"
    ]  # fmt: skip


@needs_onednn
@pytest.mark.parametrize("size", [1, 2])
def test_a_residual_sum_of_one_pixel_may_stay_outside(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_ADDS_TO_ONE", 0)
    build = Build()
    x = build.input(torch.randn(2, 8, 1, size))
    first = build.call(aten.relu.default, conv(build, x, 8, 8, 3))
    passed = through_passes(build, build.call(aten.add.Tensor, conv(build, first, 8, 8, 3), first))
    passed.check()
    assert ("mkldnn._convolution_pointwise.binary" in passed.targets) is (size > 1)


@needs_onednn
def test_sum_with_alpha_or_broadcast_or_lone_expression_stays_outside() -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 9))
    a = build.call(aten.add.Tensor, conv(build, x, 8, 8, 3), x, alpha=2)
    b = build.call(aten.add.Tensor, conv(build, x, 8, 8, 3), build.weight(8, 1, 1))
    c = build.call(aten.add.Tensor, conv(build, x, 8, 8, 3), build.call(aten.sin.default, x))
    passed = through_passes(build, a, b, c)
    passed.check()
    assert "mkldnn._convolution_pointwise.binary" not in passed.targets


@needs_onednn
def test_result_that_is_read_twice_keeps_its_postop_outside() -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 9))
    y = conv(build, x, 8, 16, 3)
    passed = through_passes(build, y, build.call(aten.relu.default, y))
    passed.check()
    assert "aten.relu.default" in passed.targets


@needs_onednn
def test_user_with_several_results() -> None:
    build = Build()
    x = build.input(torch.randn(2, 8, 9, 9))
    found = build.call(aten.max.dim, conv(build, x, 8, 16, 3), 1)
    item = build.graph.call_function(operator.getitem, (found, 0))
    item.meta = {"val": found.meta["val"][0], "device": found.meta["device"]}
    passed = through_passes(build, item)
    passed.check()
