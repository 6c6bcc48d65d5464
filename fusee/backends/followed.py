"""What an engine makes of a region with parameters as constants, made anew when they change.

Constants are packed and folded by engines, so they are faster than inputs: by a third to a half.
Parameters that keep changing, as in training, become inputs, and nothing is made anew after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusee.errors import BackendError
from fusee.runtime.weights import Derived, DerivedSet, Snapshot

__all__ = ["Bound", "Declined", "Followed", "Made"]

# Row-major parameters by their position among the region's inputs.
Weights = Mapping[int, Tensor]
T = TypeVar("T")


class Declined(Exception):
    """A region's call cannot serve these inputs; our compiler runs the region, for this call."""


class Bound(NamedTuple):
    """Between which integers a buffer lies: the region was made for these.

    position   among the region's inputs
    """

    position: int
    name: str
    low: int
    high: int

    def holds(self, x: Tensor) -> bool:
        """Whether this buffer lies there."""
        if not x.numel():
            return True
        low, high = torch.aminmax(x.detach())
        return bool(self.low <= low and high <= self.high)


class Made(NamedTuple, Generic[T]):
    """What was made, and of which weights: keep both while it runs, they may share memory."""

    snapshot: Snapshot | None
    executable: T
    weights: Weights


class Followed(Generic[T]):
    """Serves calls from any thread.

    fixed     positions of the inputs that are constants
    bounds    what else must hold of them
    examples  inputs of the first call
    make      from the region's constant weights to what runs it
    times     how often it is made before parameters become inputs; None: they never do
    """

    def __init__(
        self,
        fixed: Sequence[int],
        bounds: Sequence[Bound],
        examples: tuple[Any, ...],
        make: Callable[[Weights], T],
        times: int | None,
    ) -> None:
        self._make, self._times = make, times
        self._fixed, self._bounds = tuple(fixed), bounds
        self._known = DerivedSet([Derived(self._fixed, lambda tensors: ())])
        self._lock = threading.Lock()
        self._count = 0
        self.latest: Made[T]
        self._refresh(examples)

    def current(self, inputs: tuple[Any, ...]) -> Made[T]:
        """What serves a call with these inputs.

        raises   BackendError if integers are not those that the region was claimed for; whatever
                 `make` raises
        """
        made = self.latest
        if made.snapshot is None:
            self._check(inputs)
        elif self._known.current(inputs) is not made.snapshot:
            made = self._refresh(inputs)
        return made

    def _refresh(self, inputs: tuple[Any, ...]) -> Made[T]:
        with self._lock:
            is_constant = self._times is None or self._count < self._times
            fixed = self._fixed if is_constant else ()
            snapshot = self._known.current(inputs) if fixed else None
            if self._count and snapshot is self.latest.snapshot:
                return self.latest  # another thread was here
            self._check(inputs)
            weights = {k: inputs[k].detach().contiguous() for k in fixed}
            self.latest = Made(snapshot, self._make(weights), weights)
            self._count += 1
            return self.latest

    def _check(self, inputs: tuple[Any, ...]) -> None:
        for bound in self._bounds:
            if not bound.holds(inputs[bound.position]):
                raise BackendError(f"{bound.name} holds greater integers than it did")
