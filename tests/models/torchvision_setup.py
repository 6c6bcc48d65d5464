"""Lets torchvision be imported beside a build of torch that its compiled ops do not load into.

torchvision registers fake kernels for its ops on import, which fails if the ops do not exist. timm
and transformers import torchvision too, so whoever builds a model imports this module first.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _compiled_ops_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0])
    for library in folder.glob("_C*"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True
    return False


# The library object must live as long as the process, or the schemas go with it.
LIBRARY = None
if not _compiled_ops_load():
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    LIBRARY.define(f"nms{_SCHEMA}")
    LIBRARY.define(f"qnms{_SCHEMA}")
