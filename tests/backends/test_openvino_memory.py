"""Where OpenVINO's tensors lie: inputs, results and weights in torch's memory, without copies."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.backends import openvino as api
from tests.backends.engine_calls import compiled, convolved, two_layers

pytest.importorskip("openvino")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass
class Border:
    """Addresses: what the last infer request read and wrote, and the last model's constants."""

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)


@pytest.fixture
def border(monkeypatch: pytest.MonkeyPatch) -> Border:
    found = Border()
    run, compile_model = api.Executable.__call__, api.compile_model

    def noting(self: Any, inputs: Any, outputs: Any) -> None:
        run(self, inputs, outputs)
        request = self.requests.free[-1]
        ports = range(len(self.compiled.inputs)), range(len(self.compiled.outputs))
        found.inputs = [address(request.get_input_tensor(k)) for k in ports[0]]
        found.outputs = [address(request.get_output_tensor(k)) for k in ports[1]]

    def keeping(model: Any, *more: Any) -> Any:
        ops = [op for op in model.get_ordered_ops() if op.get_type_name() == "Constant"]
        found.constants = {address(op) for op in ops}
        return compile_model(model, *more)

    monkeypatch.setattr(api.Executable, "__call__", noting)
    monkeypatch.setattr(api, "compile_model", keeping)
    return found


def address(held: Any) -> int:
    return int(held.data.ctypes.data)


def plain(x: Tensor) -> Tensor:
    return x


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def turned(x: Tensor) -> Tensor:
    return x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [plain, channels_last, turned])
def test_inputs_and_results_are_not_copied(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor], border: Border
) -> None:
    x, w = layout(torch.randn(2, 3, 8, 6)).to(dtype), layout(torch.randn(4, 3, 3, 3)).to(dtype)
    call = compiled("openvino", convolved, x, w)
    for _ in range(2):
        got = call(x, w)
        torch.testing.assert_close(got, convolved(x, w), rtol=0.05, atol=0.05)
        assert border.inputs == [x.data_ptr(), w.data_ptr()]
        assert border.outputs == [got.data_ptr()]


@pytest.mark.parametrize("layout", [plain, channels_last])
def test_results_lie_as_eagers_without_copies(
    layout: Callable[[Tensor], Tensor], border: Border
) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3), nn.GELU()).eval()
    x = layout(torch.randn(2, 3, 8, 6))
    fast = fusee.compile(module, backend="openvino")
    got, want = fast(x), module(x)
    assert got.stride() == want.stride()
    assert border.inputs == [x.data_ptr()] and border.outputs == [got.data_ptr()]


def test_integers_and_bool_are_not_copied(border: Border) -> None:
    def fn(x: Tensor, index: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(flag, torch.nn.functional.embedding(index, x), 0) @ x, ~flag

    args = torch.randn(8, 8), torch.tensor([1, 7, 0]), torch.rand(3, 8) > 0.5
    got = compiled("openvino", fn, *args)(*args)
    torch.testing.assert_close(tuple(got), fn(*args))
    assert set(border.inputs) == {x.data_ptr() for x in args}
    assert border.outputs == [x.data_ptr() for x in got]


def test_calls_at_the_same_time_have_requests_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 8)
    call = compiled("openvino", two_layers, x, x)
    together = threading.Barrier(4)
    executables: list[Any] = []
    wrap, local = api.wrap, threading.local()

    def waiting(x: Tensor) -> Any:
        if not getattr(local, "is_here", False):
            local.is_here = True
            together.wait(60)  # each of four calls has a request now
        return wrap(x)

    run = api.Executable.__call__

    def noting(self: Any, inputs: Any, outputs: Any) -> None:
        executables.append(self)
        run(self, inputs, outputs)

    monkeypatch.setattr(api, "wrap", waiting)
    monkeypatch.setattr(api.Executable, "__call__", noting)
    given = [torch.randn(8, 8) for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [*pool.map(call, given, [x] * 4)]
    for got, one in zip(found, given, strict=True):
        torch.testing.assert_close(got, two_layers(one, x))
    assert len({id(one) for one in executables}) == 1 and len(executables[0].requests.free) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_not_copied(dtype: torch.dtype, border: Border) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype).eval()
    x = torch.randn(3, 8).to(dtype)
    for backend in ("fusee_openvino", "openvino"):
        border.constants = set()
        made = torch.compile if backend.startswith("fusee") else fusee.compile
        made(module, backend=backend)(x)
        assert border.constants >= {w.data_ptr() for w in module.parameters()}


def test_what_it_ran_with_can_be_resized() -> None:
    x = torch.randn(4, 4)
    with torch.no_grad():
        y = fusee.compile(two_layers, backend="openvino")(x, x)
    assert x.resize_(9, 9).shape == y.resize_(9, 9).shape
