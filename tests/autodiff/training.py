"""Whole training steps, compiled and eager, from the same start; float64 arbitrates.

A step is zero_grad, forward, loss, backward and the optimizer, compiled as one function by
fusee.compile. Distances are of all tensors of a kind together, relative to float64's: a bias before
batch norm has a gradient of zero, of which any float32 result is rounding alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import fusee
from fusee.errors import FuseeWarning
from tests.compare import assert_same_kind

SGD = lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # noqa: E731
ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)  # noqa: E731
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"sgd": SGD, "adamw": ADAMW}

# Room beside twice eager's distance from float64, relative to float64's norm: a few roundings.
FLOOR = 1e-6

Named = dict[str, Tensor]
Loss = Callable[..., Tensor]


class Run(NamedTuple):
    """What some steps gave.

    streams  the generator's state after each step
    tensors  kind -> name -> tensor: losses, gradients of the first and last step, parameters, ...
    """

    streams: list[Tensor]
    tensors: dict[str, Named]


class Distance(NamedTuple):
    """How far ours and eager's are from float64, relative to its norm."""

    ours: float
    eager: float

    @property
    def is_fair(self) -> bool:
        return self.ours <= 2 * self.eager + FLOOR


def check_training(
    module: nn.Module,
    loss: Loss,
    batches: Sequence[Sequence[Any]],
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> dict[str, Distance]:
    """Some steps compiled, eagerly and in float64: the distances of each kind of tensor.

    loss     (module, *batch) -> the loss
    raises   AssertionError where ours is unlike eager's: streams, names, dtypes, strides, values
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        ours = train(copy.deepcopy(module), loss, batches, optimizer, fusee.compile)
    eager = train(copy.deepcopy(module), loss, batches, optimizer)
    for number, (a, b) in enumerate(zip(ours.streams, eager.streams, strict=True)):
        assert torch.equal(a, b), f"step {number} drew other random numbers than eager"
    with Wide():
        wide = pytree.tree_map(widened, list(batches))
        exact = train(module.double(), loss, wide, optimizer)
    found = {}
    for kind, tensors in eager.tensors.items():
        _same_kind(kind, ours.tensors[kind], tensors)
        found[kind] = distance(ours.tensors[kind], tensors, exact.tensors[kind])
    unfair = [kind for kind, off in found.items() if not off.is_fair]
    assert not unfair, (unfair, found)
    kind = "first gradients"
    _no_odd_one(ours.tensors[kind], eager.tensors[kind], exact.tensors[kind])
    return found


def train(
    module: nn.Module,
    loss: Loss,
    batches: Sequence[Sequence[Any]],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    compiled: Callable[[Any], Any] = lambda step: step,
) -> Run:
    """One step per batch, each from its number as seed."""

    def step(module: nn.Module, chosen: torch.optim.Optimizer, *batch: Any) -> Tensor:
        chosen.zero_grad()
        found = loss(module, *batch)
        found.backward()
        chosen.step()
        return found.detach()

    chosen, run = optimizer(module.parameters()), compiled(step)
    streams: list[Tensor] = []
    kinds: dict[str, Named] = {"losses": {}}
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        kinds["losses"][str(number)] = run(module, chosen, *batch)
        streams.append(torch.get_rng_state())
        if number == 0:
            kinds["first gradients"] = {n: g.clone() for n, g in gradients(module).items()}
    kinds["last gradients"] = gradients(module)
    kinds["parameters"] = {n: x.detach() for n, x in module.named_parameters()}
    kinds["buffers"] = dict(module.named_buffers())
    names = [n for n, _ in module.named_parameters()]
    kinds["optimizer"] = {
        f"{names[k]} {n}": x
        for k, state in chosen.state_dict()["state"].items()
        for n, x in state.items()
        if isinstance(x, Tensor) and n != "step"
    }
    return Run(streams, kinds)


def gradients(module: nn.Module) -> Named:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _same_kind(kind: str, ours: Named, eager: Named) -> None:
    assert ours.keys() == eager.keys(), (kind, ours.keys() ^ eager.keys())
    for name, x in ours.items():
        assert_same_kind(x, eager[name], f"{kind}, {name}")
        assert x.is_floating_point() or torch.equal(x, eager[name]), (kind, name)


def _no_odd_one(ours: Named, eager: Named, exact: Named) -> None:
    """No tensor alone is wrong, however small it is: a wider limit, as there are hundreds."""
    total = sum(float(z.square().sum()) for z in exact.values()) ** 0.5
    for name, z in exact.items():
        mine, theirs = (float((x[name].double() - z).norm()) for x in (ours, eager))
        limit = 10 * theirs + 1e-5 * float(z.norm()) + 1e-7 * total
        assert mine <= limit, (name, mine, theirs, float(z.norm()))


def distance(ours: Named, eager: Named, exact: Named) -> Distance:
    """Of all floating tensors together."""
    off = [0.0, 0.0]
    total = 0.0
    for name, z in exact.items():
        if z.is_floating_point():
            total += float(z.square().sum())
            for k, x in enumerate((ours[name], eager[name])):
                off[k] += float((x.double() - z).square().sum())
    size = total**0.5 or 1.0
    return Distance(off[0] ** 0.5 / size, off[1] ** 0.5 / size)


def widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


class Wide(TorchFunctionMode):
    """float64 wherever a model names float32: many compute norms in it whatever they are given."""

    def __enter__(self) -> Wide:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._before)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        args, kwargs = pytree.tree_map(wide, (args, kwargs or {}))
        return func(*args, **kwargs)
