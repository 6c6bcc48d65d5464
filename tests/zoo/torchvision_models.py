"""torchvision: classification, segmentation, detection, video and optical flow."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import torch
from torch import nn

from tests.models import torchvision_setup
from tests.zoo import torchvision_ops

__all__ = ["build", "names"]


_LARGE = ("vit_h_14", "vit_l_16", "efficientnet_v2_m")  # vit_b_16 and efficientnet_v2_s, wider


@functools.cache
def names() -> list[str]:
    """The smallest of each kind: densenet121, not densenet201."""
    models = importlib.import_module("torchvision.models")
    found: dict[str, str] = {}
    for name in models.list_models():
        if name.startswith("quantized_") or name in _LARGE:
            continue
        kind = re.sub(r"[\d_.]+(mf|gf|x\d+d)*|_?(small|large|tiny|base|[stblh])$|bn$", "", name)
        if kind not in found or _size(name) < _size(found[kind]):
            found[kind] = name
    return sorted(found.values())


def _size(name: str) -> tuple[Any, ...]:
    number = [int(x) for x in re.findall(r"\d+", name)]
    return (not name.endswith(("_t", "_s", "small", "_b0")), number, name)


_DETECTION = ("rcnn", "retinanet", "fcos", "ssd")
# Random weights find as many boxes as there may be: the heads of 200 of them take eager a minute.
_FEW_BOXES = {
    "rpn_post_nms_top_n_test": 40,
    "rpn_post_nms_top_n_train": 40,
    "box_detections_per_img": 4,
    "box_batch_size_per_image": 16,
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    if torchvision_setup.LIBRARY is not None:
        torchvision_ops.define()
    models = importlib.import_module("torchvision.models")
    is_detection = any(word in name for word in _DETECTION)
    extra: dict[str, Any] = {} if name.startswith("raft") else {"num_classes": 10}
    if is_detection:
        extra["weights_backbone"] = None
        extra |= {} if name.startswith("ssd") else {"min_size": 96, "max_size": 128}
        extra |= _FEW_BOXES if "rcnn" in name else {}
    elif name.startswith(("deeplab", "fcn", "lraspp")):
        extra["weights_backbone"] = None
    elif name in ("googlenet", "inception_v3"):
        extra["init_weights"] = False
    torch.manual_seed(seed)
    module = models.get_model(name, weights=None, **extra).eval()
    torch.manual_seed(seed + 1)
    args = _inputs(name, is_detection)
    if is_detection and module.training is False:
        module = _Detecting(module)
    with torch.no_grad():
        module(*args)
    count = sum(p.numel() for p in module.parameters())
    return module, args, {}, f"{count / 1e6:.2g} M parameters"


def _inputs(name: str, is_detection: bool) -> tuple[Any, ...]:
    if is_detection:
        images = [torch.rand(3, 96, 120), torch.rand(3, 100, 96)]
        keypoints = torch.cat([torch.rand(2, 17, 2) * 60, torch.ones(2, 17, 1)], dim=-1)
        targets = [
            {
                "boxes": torch.tensor([[4.0, 8.0, 60.0, 70.0], [10.0, 5.0, 50.0, 40.0]]),
                "labels": torch.tensor([1, 1]),
                "masks": torch.ones(2, *image.shape[1:], dtype=torch.uint8),
                "keypoints": keypoints,
            }
            for image in images
        ]
        return images, targets
    if name.startswith("raft"):
        return torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)
    if name.startswith(("mvit", "swin3d")):
        return (torch.rand(1, 3, 16, 224, 224),)
    if name.startswith(("r3d", "mc3", "r2plus1d", "s3d")):
        return (torch.rand(1, 3, 16, 64, 64),)
    pixels = {"inception_v3": 128, "maxvit_t": 224}.get(name, 224 if name.startswith("vit") else 64)
    return (torch.rand(2, 3, pixels, pixels),)


class _Detecting(nn.Module):
    """A detector, which takes its targets in training alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Any, targets: Any) -> Any:
        return self.inner(images, targets if self.training else None)
