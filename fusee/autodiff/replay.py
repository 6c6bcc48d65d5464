"""Random numbers in regions of torch.utils.checkpoint: drawn again in the backward, not saved.

    mask = bernoulli(x, p)   =>   state = generator_state(x); drawn = bernoulli(x, p)
                                  mask = redrawn_bernoulli(state, sizes, p), as the dtype of drawn

The forward takes `drawn` for `mask` (node.meta["drawn"]), the backward draws once more from the
state, which is 5 KB, and leaves the stream alone. Eager does so from the state of a region's begin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.geometry import is_row_major
from fusee.autodiff.joint import Joint

__all__ = ["REDRAWN", "drawn_for", "replay"]

aten = torch.ops.aten

_make: Any = torch.library.Library  # torch does not annotate it
_library = _make("fusee", "FRAGMENT")  # operators live as long as it does
_library.define("generator_state(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("redrawn_bernoulli(Tensor state, SymInt[] size, float p) -> Tensor")


def _state(x: Tensor) -> Tensor:
    return torch.default_generator.get_state()


def _redrawn(state: Tensor, size: Sequence[int], p: float) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    return torch.empty(size, dtype=torch.bool).bernoulli_(p, generator=generator)


_library.impl("generator_state", _state, "CompositeExplicitAutograd")
_library.impl("redrawn_bernoulli", _redrawn, "CompositeExplicitAutograd")
REDRAWN = torch.ops.fusee.redrawn_bernoulli.default
_STATE = torch.ops.fusee.generator_state.default


def replay(joint: Joint, node: fx.Node) -> bool:
    """Whether `node` is one for this, and is now drawn again. It changes the graph."""
    if node.target is not aten.bernoulli.p or type(node.meta.get("recompute")) is not int:
        return False
    x, p = node.args[0], node.args[1] if len(node.args) > 1 else 0.5
    val, like = node.meta["val"], _state(torch.empty(0))
    sizes: list[Any] = [joint.aten.to_size(n) for n in val.shape]
    known = all(type(n) is int for n in sizes)
    if not (is_row_major(val) and isinstance(p, float)) or node.kwargs.get("generator") is not None:
        return False
    if node.meta.get("backward") or (known and math.prod(sizes) <= like.numel()):
        return False
    graph, row = joint.aten.graph, joint.aten.graph.call_function
    with graph.inserting_before(node):
        state = row(_STATE, (x,))
    state.meta = {**node.meta, "val": like.to("meta")}
    with graph.inserting_after(node):
        mask = row(REDRAWN, (state,))
    mask.args = (state, sizes, p)
    mask.meta = {**node.meta, "val": torch.empty_like(val, dtype=torch.bool)}
    with graph.inserting_after(mask):
        wide = row(aten._to_copy.default, (mask,), {"dtype": val.dtype})
    wide.meta = {**node.meta, "val": torch.empty_like(val), "drawn": node}
    node.replace_all_uses_with(wide)
    return True


def drawn_for(node: fx.Node) -> fx.Node | None:
    """What the forward has drawn where the backward computes `node`."""
    found: fx.Node | None = node.meta.get("drawn")
    return found
