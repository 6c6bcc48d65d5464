"""transformers: each model type from a small configuration of its own class."""

from __future__ import annotations

import copy
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.models import torchvision_setup as torchvision_setup
from tests.zoo.inputs import NoInputs, inputs_for
from tests.zoo.small import SCALES, small

__all__ = ["build", "names"]

MOST_PARAMETERS = 40_000_000

# What the defaults of some types leave to a checkpoint.
_RESNET = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
}
_SERIES = {"prediction_length": 8, "num_time_features": 1}
GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "bamba": {"attn_layer_indices": [1]},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deformable_detr": _RESNET,
    "detr": _RESNET,
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
    "align": {
        "vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 80}
    },
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "gemma3n": {"text_config": {"intermediate_size": 128}},
    "gemma3n_text": {"intermediate_size": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "informer": _SERIES,
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_vl": {"vision_config": {"embed_dim": 64}},
    "reformer": {"axial_pos_shape": [3, 4]},
    "sam": {
        "vision_config": {"output_channels": 256, "window_size": 2, "global_attn_indexes": [1]},
        "prompt_encoder_config": {"image_size": 64, "image_embedding_size": 4, "hidden_size": 256},
        "mask_decoder_config": {"hidden_size": 256},
    },
    "sam2": {
        "vision_config": {
            "backbone_config": {"image_size": [128, 128]},
            "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        },
        "prompt_encoder_config": {"image_size": 128},
    },
    "slanext": {
        "max_text_length": 6,
        "post_conv_in_channels": 256,
        "vision_config": {"output_channels": 256, "window_size": 2, "global_attn_indexes": [1]},
    },
    "table-transformer": _RESNET,
    "time_series_transformer": _SERIES,
}

# The class that the documentation of a type calls first: the one with a head, if it has one.
_HEADS = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ",
    "MASKED_LM", "CAUSAL_LM", "ZERO_SHOT_OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION",
    "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "TIME_SERIES_PREDICTION",
)  # fmt: skip


@functools.cache
def _classes() -> dict[str, list[str]]:
    """Names of model classes by model type, the one to build first."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, list[str]] = {}
    order = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _HEADS]
    others = [
        n
        for n in dir(auto)
        if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES") and n not in order
    ]
    for mapping in [*order, "MODEL_MAPPING_NAMES", *others]:
        for kind, name in getattr(auto, mapping, {}).items():
            some = [name] if isinstance(name, str) else list(name)
            found.setdefault(kind, []).extend(x for x in some if x not in found.get(kind, []))
    return found


@functools.cache
def names() -> list[str]:
    """Model types, without those that are a part of another and those that are another's alias."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    found: dict[str, str] = {}
    kinds = [x for x in auto.CONFIG_MAPPING_NAMES if x in _classes()]

    def is_alias(kind: str) -> bool:
        return not _classes()[kind][0].lower().startswith(re.sub(r"[^a-z0-9]", "", kind))

    for kind in sorted(kinds, key=is_alias):
        if auto.CONFIG_MAPPING[kind].base_config_key:
            continue
        found.setdefault(_classes()[kind][0], kind)
    return sorted(found.values())


def build(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    """A model in evaluation mode, one call's arguments, and what was built, in words.

    raises   NoInputs, or what the last scale's building raised
    """
    met: list[str] = []
    for model_class, scale in _ways(name):
        torch.manual_seed(seed)
        try:
            module = _make(name, model_class, scale)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  any refusal makes the next scale's turn
            met.append(f"{model_class} {scale.name}: {type(error).__name__}: {_line(error)}")
            continue
        count = sum(p.numel() for p in module.parameters())
        if count > MOST_PARAMETERS:
            met.append(f"{model_class} {scale.name}: {count / 1e6:.0f} million parameters")
            continue
        try:
            kind, inputs = inputs_for(
                module, lambda given, module=module: _call(module, given), seed
            )
        except NoInputs as error:
            met.append(f"{model_class} {scale.name}: {error}")
            continue
        about = f"{model_class}, {scale.name}, {count / 1e6:.2g} M parameters, {kind}"
        return module, (), inputs, about
    raise NoInputs("\n".join(met))


def _ways(name: str) -> Iterator[tuple[str, Any]]:
    first, *others = _classes()[name]
    yield from ((first, scale) for scale in SCALES)
    yield from ((other, SCALES[0]) for other in others[:3])


def _make(name: str, model_class: str, scale: Any) -> nn.Module:
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    transformers = importlib.import_module("transformers")
    config = small(auto.CONFIG_MAPPING[name], scale, GIVEN.get(name, {}))
    cls = getattr(transformers, model_class)
    if not scale.width:
        with torch.device("meta"):
            count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
        if count > MOST_PARAMETERS:
            raise NoInputs(f"{count / 1e6:.0f} million parameters")
    found = cls(config).eval()
    assert isinstance(found, nn.Module)
    return found


def _call(module: nn.Module, inputs: dict[str, Any]) -> None:
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with torch.no_grad():
        copy.deepcopy(module)(**given)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
