"""torchvision's own operators, nms and roi_align, as Python over tensors.

For where torchvision's library does not load beside this torch: written from their papers'
definitions, for tests alone.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["define"]

_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor"
)


@functools.cache
def define() -> Any:
    """Register both. The library must live as long as the process."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(_ALIGN)
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    extension: Any = importlib.import_module("torchvision.extension")
    extension._has_ops = lambda: True  # whether the library has loaded
    return library


def nms(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """Indices of boxes kept, best first: none overlaps a better one by more than `limit`."""
    order = scores.argsort(descending=True, stable=True).tolist()
    corner, end = boxes[:, :2], boxes[:, 2:]
    areas = (end - corner).prod(dim=1)
    kept: list[int] = []
    for k in order:
        if kept:
            others = torch.tensor(kept)
            sides = torch.minimum(end[k], end[others]) - torch.maximum(corner[k], corner[others])
            common = sides.clamp(min=0).prod(dim=1)
            if bool((common > limit * (areas[k] + areas[others] - common)).any()):
                continue
        kept.append(k)
    return torch.tensor(kept, dtype=torch.int64)


def roi_align(
    x: Tensor, rois: Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> Tensor:
    """The mean of bilinear samples in each of height * width bins of each region.

    rois    rows of (image, x1, y1, x2, y2), in pixels of the original image
    ratio   samples along each axis of a bin; 2 where none is given
    """
    count = ratio if ratio > 0 else 2
    shift = 0.5 if aligned else 0.0
    image = rois[:, 0].long()
    x1, y1, x2, y2 = (rois[:, k] * scale - shift for k in range(1, 5))
    wide, high = x2 - x1, y2 - y1
    if not aligned:
        wide, high = wide.clamp(min=1.0), high.clamp(min=1.0)

    def places(start: Tensor, size: Tensor, bins: int) -> Tensor:
        steps = (torch.arange(bins * count, device=x.device, dtype=x.dtype) + 0.5) / count
        return start[:, None] + steps * (size / bins)[:, None]

    rows, columns = places(y1, high, height), places(x1, wide, width)
    found = _bilinear(x, image, rows, columns)
    found = found.reshape(len(rois), x.shape[1], height, count, width, count)
    return found.mean(dim=(3, 5))


def _bilinear(x: Tensor, image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Values of `x[image]` at each row and column, zero further than 1 outside."""

    def corners(at: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        is_inside = (at >= -1.0) & (at <= size)
        at = at.clamp(min=0.0)
        low = at.long().clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        part = torch.where(low >= size - 1, torch.zeros_like(at), at - low)
        return low, high, part, is_inside

    top, bottom, down, rows_inside = corners(rows, x.shape[2])
    left, right, along, columns_inside = corners(columns, x.shape[3])

    def values(r: Tensor, c: Tensor) -> Tensor:
        return x[image[:, None, None], :, r[:, :, None], c[:, None, :]]

    down, along = down[:, :, None, None], along[:, None, :, None]
    upper = values(top, left) * (1 - along) + values(top, right) * along
    lower = values(bottom, left) * (1 - along) + values(bottom, right) * along
    found = upper * (1 - down) + lower * down
    inside = rows_inside[:, :, None] & columns_inside[:, None, :]
    return (found * inside[..., None]).permute(0, 3, 1, 2)
