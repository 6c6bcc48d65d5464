"""Derived tensors follow their parameters, whatever changes them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusee.errors import FuseeWarning
from fusee.runtime.change_detection import Derivation, DerivedSet, why_not_derivable
from fusee.runtime.launch import layout


class Watched:
    """Three parameters among five inputs; what derives from each, and how often."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.randn(8, 12))
        self.bias = nn.Parameter(torch.randn(8))
        self.count = nn.Buffer(torch.tensor(3, dtype=torch.int64))
        self.calls: list[str] = []
        self.set = DerivedSet(
            [
                Derivation((1,), self.compute("weight")),
                Derivation((1, 3), self.compute("both")),
                Derivation((4,), self.compute("count")),
            ]
        )

    def compute(self, name: str) -> Callable[[list[Tensor]], list[Tensor]]:
        def compute(inputs: list[Tensor]) -> list[Tensor]:
            self.calls.append(name)
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            return [sum((one.sum() for one in inputs), torch.zeros(())), inputs[0] * 2]

        return compute

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.ones(2), self.weight, torch.ones(3), self.bias, self.count)

    def check(self, *names: str) -> None:
        """Values are right, just those named were computed, and a further call computes none."""
        snapshot = self.set.current(self.inputs())
        assert self.calls == list(names)
        self.calls.clear()
        assert self.set.current(self.inputs()) is snapshot
        assert not self.calls
        weight, bias = self.weight.detach(), self.bias.detach()
        torch.testing.assert_close(snapshot.tensors[0], weight.sum())
        assert torch.equal(snapshot.tensors[1], weight * 2)
        torch.testing.assert_close(snapshot.tensors[2], weight.sum() + bias.sum())
        assert torch.equal(snapshot.tensors[5], self.count * 2)


@pytest.fixture
def watched() -> Watched:
    found = Watched()
    found.check("weight", "both", "count")
    return found


def test_layout_is_known() -> None:
    assert layout() is not None


def test_version_counts(watched: Watched) -> None:
    assert watched.set.current(watched.inputs()).version == 1
    with torch.no_grad():
        watched.bias.add_(1)
    assert watched.set.current(watched.inputs()).version == 2


def test_in_place_update_of_one_element(watched: Watched) -> None:
    with torch.no_grad():
        watched.weight[3, 5] = 100
    watched.check("weight", "both")
    with torch.no_grad():
        watched.bias[2] = 7
    watched.check("both")
    watched.count.add_(1)
    watched.check("count")


def test_load_state_dict() -> None:
    linear = nn.Linear(4, 4)
    kept = DerivedSet([Derivation((0,), lambda ts: [ts[0].t().contiguous()])])
    assert torch.equal(kept.current((linear.weight,)).tensors[0], linear.weight.t())
    linear.load_state_dict(nn.Linear(4, 4).state_dict())
    assert torch.equal(kept.current((linear.weight,)).tensors[0], linear.weight.t())
    linear.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)
    assert torch.equal(kept.current((linear.weight,)).tensors[0], linear.weight.t())


@pytest.mark.parametrize("size", [(1,), (3,), (1000, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_changes_through_data(size: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
    kept = DerivedSet([Derivation((0,), lambda ts: [ts[0] + 1])])
    assert kept.current((parameter,)).tensors[0].flatten()[0] == 2
    changes: list[Callable[[], object]] = [
        lambda: parameter.data.mul_(3),
        lambda: parameter.data.copy_(torch.full(size, 5)),
        lambda: setattr(parameter, "data", torch.full(size, 7, dtype=dtype)),
        lambda: torch.empty(0, dtype=dtype).set_(parameter.untyped_storage()).fill_(9),
    ]
    for change in changes:
        change()
        assert torch.equal(kept.current((parameter,)).tensors[0], parameter + 1)


def test_data_set_to_equal_content_elsewhere(watched: Watched) -> None:
    old = watched.weight.data
    watched.weight.data = old.clone()
    watched.check("weight", "both")
    watched.weight.data = torch.cat([old, old])[8:]
    watched.check("weight", "both")


def test_swapped_parameter(watched: Watched) -> None:
    watched.weight = nn.Parameter(torch.randn(8, 12))
    watched.check("weight", "both")
    watched.weight = nn.Parameter(watched.weight.detach())  # the same memory in another object
    watched.check("weight", "both")
    torch.utils.swap_tensors(watched.weight, nn.Parameter(torch.randn(8, 12)))
    watched.check("weight", "both")


def test_another_tensor_at_a_dead_ones_address(watched: Watched) -> None:
    for _ in range(20):
        address = id(watched.bias)
        content = watched.bias.detach().clone()
        watched.bias = nn.Parameter(torch.zeros(1))
        gc.collect()
        watched.bias = nn.Parameter(content)
        if id(watched.bias) == address:
            break
    watched.check("both")


def test_requires_grad_changes_nothing(watched: Watched) -> None:
    watched.weight.requires_grad_(False)
    watched.check()
    watched.weight.requires_grad_(True)
    watched.check()
    (watched.weight.sum() * 2).backward()
    watched.check()


def test_dtype_change(watched: Watched) -> None:
    watched.weight.data = watched.weight.data.double()
    snapshot = watched.set.current(watched.inputs())
    assert snapshot.tensors[1].dtype is torch.float64


def test_called_in_inference_mode(watched: Watched) -> None:
    with torch.inference_mode():
        watched.check()
        watched.weight.data.add_(1)
        watched.check("weight", "both")
    assert not watched.set.current(watched.inputs()).tensors[1].is_inference()


def test_nothing_outlives_the_model() -> None:
    weight = nn.Parameter(torch.randn(4))
    kept = DerivedSet([Derivation((0,), lambda ts: [ts[0] * 2])])
    kept.current((weight,))
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None
    other = nn.Parameter(torch.randn(4))
    assert torch.equal(kept.current((other,)).tensors[0], other * 2)


def test_non_contiguous_and_empty() -> None:
    base = torch.randn(10, 10)
    inputs = (base.t()[2:, ::3], torch.empty(0, 4), base[0].expand(5, 10))
    kept = DerivedSet([Derivation((k,), lambda ts: [ts[0] + 1]) for k in range(3)])
    for _ in range(3):
        base.add_(1)
        snapshot = kept.current(inputs)
        for found, tensor in zip(snapshot.tensors, inputs, strict=True):
            assert torch.equal(found, tensor + 1)


def test_why_not() -> None:
    assert why_not_derivable(nn.Parameter(torch.ones(3))) is None
    assert why_not_derivable(torch.ones(3)) is None
    with torch.inference_mode():
        assert "inference" in (why_not_derivable(torch.ones(3)) or "")
    assert "meta" in (why_not_derivable(torch.ones(3, device="meta")) or "")
    assert "sparse" in (why_not_derivable(torch.ones(3).to_sparse()) or "")

    class Own(Tensor):
        pass

    assert "Own" in (why_not_derivable(torch.ones(3).as_subclass(Own)) or "")


def test_parameters_replaced_by_inference_tensors(watched: Watched) -> None:
    good = watched.bias
    with torch.inference_mode():
        watched.bias = torch.randn(8)  # type: ignore[assignment]
    with pytest.warns(FuseeWarning, match="inference tensor"):
        watched.set.current(watched.inputs())
    for value in (2.0, 3.0):
        with torch.inference_mode():
            watched.bias.fill_(value)
        total = watched.weight.detach().sum() + 8 * value
        torch.testing.assert_close(watched.set.current(watched.inputs()).tensors[2], total)
    watched.bias = good
    watched.calls.clear()
    watched.check("weight", "both", "count")


def test_a_failing_computation_is_tried_again() -> None:
    weight = nn.Parameter(torch.ones(2))
    fail = [True]

    def compute(inputs: list[Tensor]) -> list[Tensor]:
        if fail[0]:
            raise RuntimeError("no")
        return [inputs[0] * 2]

    kept = DerivedSet([Derivation((0,), compute)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            kept.current((weight,))
    fail[0] = False
    assert kept.current((weight,)).tensors[0].tolist() == [2, 2]


def test_wrong_inputs() -> None:
    weight = nn.Parameter(torch.ones(2))
    kept = DerivedSet([Derivation((1,), lambda ts: [ts[0] * 2])])
    kept.current((weight, weight))
    with pytest.raises(IndexError):
        kept.current((weight,))


def test_concurrent_calls_and_changes() -> None:
    weights = tuple(nn.Parameter(torch.full((64,), 1.0)) for _ in range(4))
    kept = DerivedSet([Derivation((k,), lambda ts: [ts[0].clone()]) for k in range(4)])
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for k in range(100):
                with torch.no_grad():
                    weights[number].fill_(k)
                # nobody else changes this one, so this call must see it
                assert kept.current(weights).tensors[number].tolist() == [k] * 64
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
