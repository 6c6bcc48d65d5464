"""Convolutional networks run in channels-last layout.

Marks convolutions of images with meta["layout"] = "channels_last": lowering gives them their input
in that layout and takes their result in it; `val` keeps eager's strides, which the outputs of the
graph still have. Measured faster for every shape but a first convolution of three channels, and
there by less than the change of layout after it would cost (docs/decisions.md, Externs).
"""

from __future__ import annotations

import torch

from fusee.aten.onednn import packed
from fusee.aten.passes.edit import Editor, on_cpu, val

__all__ = ["channels_last"]

aten = torch.ops.aten

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # oneDNN's; others keep ATen's layout


def channels_last(edit: Editor) -> None:
    """Run the pass."""
    if not edit.options.channels_last or packed() is None:
        return
    marked = 0
    for node in edit.calls(aten.convolution.default):
        out = val(node)
        transposed = node.args[6]
        if out.dim() == 4 and out.dtype in _DTYPES and not transposed and on_cpu(node):
            node.meta["layout"] = "channels_last"
            marked += 1
    if marked:
        edit.notes.append(f"{marked} convolutions in channels-last layout")
