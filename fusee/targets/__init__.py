"""What graphs are compiled for. A target is one folder here and one row of TARGETS in native.py.

Everything that is true of one machine alone stands behind its `Target`: what loops and saved values
cost (numbers), which operators stay calls and how they are called, which passes prepare a graph for
them, and how a schedule of kernels becomes something that runs. What comes before knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx
from torch._ops import OpOverload

from fusee.aten.rewriter import Pass
from fusee.autodiff.min_cut import Prices
from fusee.codegen.host import HostArguments
from fusee.config import Options
from fusee.loops.ir import Kernel, Profile
from fusee.loops.lower.graph import ExternSpec
from fusee.loops.memory import Plan
from fusee.runtime.change_detection import DerivedSet, Fixed

# The tensors that are kept between calls: those derived from parameters, then constants. Those of
# its `snapshot`, which follows parameters if the HostArguments say so.
Kept = DerivedSet | Fixed


class Built(NamedTuple):
    """A graph that runs.

    run         from the graph's inputs, as the HostArguments say, to its results; writes are done
    functions   names of what kernels became: those that share one have equal names
    replays     what there is to say of calls that are recorded and replayed
    uses        what a kernel of some name takes of the machine
    """

    run: Callable[..., Sequence[Any]]
    functions: Mapping[Kernel, str]
    replays: Callable[[], str] | None = None
    uses: Callable[[str], str] | None = None


class Target(Protocol):
    """One kind of machine."""

    @property
    def profile(self) -> Profile:
        """What decides on loops: lowering, fusion and loop order ask nothing else."""
        ...

    @property
    def prices(self) -> Prices:
        """What decides between saving a value for the backward and computing it again."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors are that loops read and write."""
        ...

    def at(self, device: torch.device) -> Target:
        """The one machine of this kind where tensors of a device are."""
        ...

    def prepare(self) -> None:
        """Begin to load what takes time, before a graph is traced. raises MissingPackage"""
        ...

    def passes(self, options: Options) -> Sequence[Pass]:
        """What rewrites an ATen graph for the calls that there are."""
        ...

    def joint_passes(self, options: Options) -> Sequence[Pass]:
        """What rewrites a graph with its gradients, before it is known what is saved."""
        ...

    def improves(self, node: fx.Node, static: Collection[fx.Node]) -> bool:
        """Whether a pass makes a faster call of this one, as eager cannot.

        static   nodes whose values stay the same from call to call
        """
        ...

    def call_of(self, op: OpOverload) -> ExternSpec | None:
        """How to call an operator that has no loops; None: the overload itself is called."""
        ...

    def build(
        self,
        plan: Plan,
        arguments: HostArguments,
        kept: Kept,
        options: Options,
        timed: Callable[[str], AbstractContextManager[object]],
    ) -> Built:
        """Kernels and calls of a schedule, with their memory, as one function.

        timed             is entered for each stage, with its name
        raises (when run) as eager does for an index outside of its dimension, a divisor of zero
        """
        ...
