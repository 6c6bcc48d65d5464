"""What each model's process begins with: imported once, by the server that they are forked from."""

from __future__ import annotations

import importlib
import importlib.util

from fusee.backends import native as native
from tests.models import torchvision_setup as torchvision_setup
from tests.zoo import judge as judge

for _name in (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "timm",
    "torchvision.models",
    "diffusers",
):
    if importlib.util.find_spec(_name.partition(".")[0]) is not None:
        importlib.import_module(_name)
