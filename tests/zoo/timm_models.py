"""timm: the smallest model of each family (the module that registers it), on small images."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

from tests.models import torchvision_setup as torchvision_setup

__all__ = ["build", "names"]


@functools.cache
def names() -> list[str]:
    """One architecture of each module of timm that registers any: the shortest name among small."""
    timm = importlib.import_module("timm")
    found = []
    for module in timm.list_modules():
        some = timm.list_models(module=module)
        if some:
            found.append(min(some, key=_size))
    return sorted(found)


_SMALL = ("zepto", "atto", "femto", "pico", "nano", "xxs", "xxt", "_xs", "tiny", "_t", "_n",
          "small", "_s", "_b0", "_m0", "_0", "18", "mini", "test_")  # fmt: skip
_LARGE = ("large", "huge", "giant", "gigantic", "_l", "_xl", "_b", "_m", "base", "medium", "152")


def _size(name: str) -> tuple[int, int, str]:
    """What to choose by: the first word for a size, then the length."""
    sizes = [k for k, word in enumerate(_SMALL) if word in name]
    is_large = any(word in name for word in _LARGE)
    return (min(sizes, default=len(_SMALL)) + 50 * is_large, len(name), name)


def build(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    """raises   what the last way of building raised"""
    timm = importlib.import_module("timm")
    met = []
    for pixels, extra in ((64, {}), (64, {"img_size": 64}), (128, {}), (128, {"img_size": 128}),
                          (224, {})):  # fmt: skip
        torch.manual_seed(seed)
        try:
            module = timm.create_model(name, num_classes=10, **extra).eval()
            torch.manual_seed(seed + 1)
            image = torch.randn(2, module.default_cfg["input_size"][0], pixels, pixels)
            with torch.no_grad():
                module(image)
        except Exception as error:  # noqa: BLE001  any refusal makes the next way's turn
            met.append(f"{pixels}: {type(error).__name__}: {error}")
            continue
        count = sum(p.numel() for p in module.parameters())
        return module, (image,), {}, f"{count / 1e6:.2g} M parameters, {pixels} pixels"
    raise ValueError("; ".join(met))
