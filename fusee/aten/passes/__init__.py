"""Passes over the functional ATen graph, for inference. Which of them run is the target's choice.

    fold_norm        batch norm into the layer before it
    fuse_attention   hand-written attention into one operator
    constants        what depends on parameters alone is computed once

Each pass changes the graph through an Editor, which keeps the metas and knows what is static. New
weights are written as ordinary nodes; only the last step moves them out of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusee.aten.graph import AtenGraph
from fusee.aten.passes.rewriter import Editor, Pass
from fusee.aten.passes.weights import Derived, constants
from fusee.config import Options

__all__ = ["Derived", "run_passes"]


def run_passes(
    aten: AtenGraph, options: Options, passes: Sequence[Pass]
) -> tuple[Derived | None, list[str]]:
    """Change `aten` in place: how to compute its derived inputs, and what each pass did.

    Derived inputs are appended to `aten.inputs`. None where options.derive_weights is off.
    """
    edit = Editor(aten, options)
    for step in passes:
        step(edit)
    derived = constants(edit) if options.derive_weights else None
    return derived, edit.notes
