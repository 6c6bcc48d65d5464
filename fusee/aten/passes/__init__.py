"""Passes over the functional ATen graph, for inference.

    fold_norm        batch norm into the layer before it
    upcast           bfloat16 and float16 products in float32 where the processor has no better
    fuse_attention   hand-written attention into one operator, where that is faster
    channels_last    convolutions in channels-last layout
    prepack          linear layers and convolutions as the fastest call there is for them
    postops          relu, sums, ... inside the packed operators
    constants        what depends on parameters alone is computed once

Each pass changes the graph through an Editor, which keeps the metas and knows what is static. New
weights are written as ordinary nodes; only the last step moves them out of the graph.
"""

from __future__ import annotations

from fusee.aten.graph import AtenGraph
from fusee.aten.passes.attention import fuse_attention
from fusee.aten.passes.onednn import channels_last, postops, prepack, upcast
from fusee.aten.passes.rewriter import Editor, Pass
from fusee.aten.passes.weights import Derived, constants, fold_norm
from fusee.config import Options

__all__ = ["PASSES", "Derived", "run_passes"]

PASSES: tuple[Pass, ...] = (fold_norm, upcast, fuse_attention, channels_last, prepack, postops)

# What keeps results derived from parameters; without it only what helps by itself runs.
_NEEDS_DERIVED: frozenset[Pass] = frozenset({fold_norm, prepack, postops})


def run_passes(aten: AtenGraph, options: Options) -> tuple[Derived | None, list[str]]:
    """Change `aten` in place: how to compute its derived inputs, and what each pass did.

    Derived inputs are appended to `aten.inputs`. None where options.derive_weights is off.
    """
    edit = Editor(aten, options)
    for step in PASSES:
        if options.derive_weights or step not in _NEEDS_DERIVED:
            step(edit)
    derived = constants(edit) if options.derive_weights else None
    return derived, edit.notes
