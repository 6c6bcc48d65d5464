"""One table of models with random weights and small configurations, shared by tests and bench.

    module, args, kwargs = load("densenet121", "test")

Each row has two sizes: `test` is as small as the model's structure allows, `bench` takes eager some
ten to some hundred milliseconds on two cores. Libraries load when a row is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tests.models import torchvision_setup as torchvision_setup

Size = Literal["test", "bench"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Model(NamedTuple):
    """One row. `build` and `inputs` take the row's settings for one size as keywords."""

    family: str
    build: Callable[..., nn.Module]
    inputs: Callable[..., Inputs]
    test: dict[str, Any]
    bench: dict[str, Any]


def load(name: str, size: Size) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in evaluation mode and one call's arguments; the same on every call."""
    row = MODELS[name]
    settings = row.test if size == "test" else row.bench
    torch.manual_seed(0)
    module = row.build(**settings).eval()
    for x in module.parameters():
        if x.dim() > 1 and not x.any():  # some begin with a head that gives zeros for anything
            nn.init.normal_(x, std=0.02)
    torch.manual_seed(1)
    args, kwargs = row.inputs(**settings)
    return module, args, kwargs


def names(*families: str) -> list[str]:
    """Names of all models, or of those of the given families, in the table's order."""
    return [name for name, row in MODELS.items() if not families or row.family in families]


def _torchvision(arch: str, **_: Any) -> nn.Module:
    return importlib.import_module("torchvision.models").get_model(arch, num_classes=100)


def _torchvision_vit(pixels: int, layers: int, hidden: int, **_: Any) -> nn.Module:
    vit = importlib.import_module("torchvision.models.vision_transformer").VisionTransformer
    return vit(
        image_size=pixels,
        patch_size=16,
        num_layers=layers,
        num_heads=hidden // 64,
        hidden_dim=hidden,
        mlp_dim=4 * hidden,
        num_classes=100,
    )


def _timm(arch: str, pixels: int, sized: bool = False, **_: Any) -> nn.Module:
    extra = {"img_size": pixels} if sized else {}
    return importlib.import_module("timm").create_model(arch, num_classes=100, **extra)


def _images(batch: int, pixels: int, **_: Any) -> Inputs:
    return (torch.randn(batch, 3, pixels, pixels),), {}


def _hugging_face(config: str, model: str, **values: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**values))


def _bert(layers: int, hidden: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "BertConfig",
        "BertModel",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        vocab_size=1000,
    )


def _gpt2(layers: int, hidden: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "GPT2Config",
        "GPT2LMHeadModel",
        n_layer=layers,
        n_embd=hidden,
        n_head=hidden // 64,
        vocab_size=1000,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )


def _llama(layers: int, hidden: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "LlamaConfig",
        "LlamaForCausalLM",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        intermediate_size=(8 * hidden // 3 + 31) // 32 * 32,
        vocab_size=1000,
        use_cache=False,
    )


def _falcon(layers: int, hidden: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "FalconConfig",
        "FalconForCausalLM",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        vocab_size=1000,
        use_cache=False,
    )


def _mamba(layers: int, hidden: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "MambaConfig",
        "MambaForCausalLM",
        num_hidden_layers=layers,
        hidden_size=hidden,
        state_size=16,
        vocab_size=1000,
        use_cache=False,
    )


def _t5(layers: int, hidden: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "T5Config",
        "T5ForConditionalGeneration",
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=hidden,
        d_kv=64,
        num_heads=hidden // 64,
        d_ff=4 * hidden,
        vocab_size=1000,
        use_cache=False,
    )


def _vit(layers: int, hidden: int, pixels: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "ViTConfig",
        "ViTForImageClassification",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        image_size=pixels,
    )


def _whisper(layers: int, hidden: int, frames: int, **_: Any) -> nn.Module:
    return _hugging_face(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=hidden,
        encoder_attention_heads=hidden // 64,
        decoder_attention_heads=hidden // 64,
        encoder_ffn_dim=4 * hidden,
        decoder_ffn_dim=4 * hidden,
        max_source_positions=frames // 2,
        vocab_size=1000,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )


def _ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, 1000, (batch, tokens))


def _tokens(batch: int, tokens: int, **_: Any) -> Inputs:
    return (), {"input_ids": _ids(batch, tokens)}


def _padded_tokens(batch: int, tokens: int, **_: Any) -> Inputs:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[-1, tokens // 2 :] = 0
    return (), {"input_ids": _ids(batch, tokens), "attention_mask": mask}


def _tokens_to_tokens(batch: int, tokens: int, **_: Any) -> Inputs:
    return (), {"input_ids": _ids(batch, tokens), "decoder_input_ids": _ids(batch, tokens // 2)}


def _sound_to_tokens(batch: int, tokens: int, frames: int, **_: Any) -> Inputs:
    features = torch.randn(batch, 80, frames)
    return (), {"input_features": features, "decoder_input_ids": _ids(batch, tokens)}


def _unet(channels: int, context: int, **_: Any) -> nn.Module:
    return importlib.import_module("diffusers").UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(channels, 2 * channels),
        layers_per_block=1,
        cross_attention_dim=context,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def _latents_and_text(batch: int, pixels: int, context: int, **_: Any) -> Inputs:
    text = torch.randn(batch, 16, context)
    latents = torch.randn(batch, 4, pixels, pixels)
    return (latents, torch.tensor(10)), {"encoder_hidden_states": text}


def _autoencoder(channels: int, **_: Any) -> nn.Module:
    return importlib.import_module("diffusers").AutoencoderKL(
        block_out_channels=(channels, 2 * channels),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )


def _vision(arch: str, test: dict[str, Any], bench: dict[str, Any]) -> Model:
    return Model(
        "torchvision", _torchvision, _images, {"arch": arch, **test}, {"arch": arch, **bench}
    )


def _timm_row(arch: str, test: dict[str, Any], bench: dict[str, Any], **extra: Any) -> Model:
    extra["arch"] = arch
    return Model("timm", _timm, _images, {**test, **extra}, {**bench, **extra})


def _text(
    build: Callable[..., nn.Module],
    test: dict[str, Any],
    bench: dict[str, Any],
    inputs: Callable[..., Inputs] = _tokens,
) -> Model:
    return Model("transformers", build, inputs, test, bench)


# fmt: off
MODELS: dict[str, Model] = {
    # name: what it is, its size for tests, its size for bench
    "densenet121": _vision("densenet121",
        dict(batch=2, pixels=32), dict(batch=4, pixels=128)),
    "resnet18": _vision("resnet18",
        dict(batch=2, pixels=32), dict(batch=4, pixels=224)),
    "resnet50": _vision("resnet50",
        dict(batch=2, pixels=32), dict(batch=4, pixels=128)),
    "mobilenet_v3_small": _vision("mobilenet_v3_small",
        dict(batch=2, pixels=32), dict(batch=16, pixels=224)),
    "vgg11": _vision("vgg11",
        dict(batch=1, pixels=32), dict(batch=4, pixels=128)),
    "regnet_y_400mf": _vision("regnet_y_400mf",
        dict(batch=2, pixels=32), dict(batch=8, pixels=224)),
    "swin_t": _vision("swin_t",
        dict(batch=1, pixels=64), dict(batch=4, pixels=128)),
    "vit_b_16": Model("torchvision", _torchvision_vit, _images,
        dict(batch=2, pixels=32, layers=2, hidden=128),
        dict(batch=4, pixels=224, layers=4, hidden=384)),
    "convnext_atto": _timm_row("convnext_atto",
        dict(batch=2, pixels=32), dict(batch=8, pixels=224)),
    "efficientnet_b0": _timm_row("efficientnet_b0",
        dict(batch=2, pixels=32), dict(batch=4, pixels=224)),
    "mixer_s32": _timm_row("mixer_s32_224",
        dict(batch=2, pixels=64), dict(batch=8, pixels=224), sized=True),
    "bert": _text(_bert,
        dict(batch=2, tokens=12, layers=2, hidden=64),
        dict(batch=8, tokens=128, layers=4, hidden=256), _padded_tokens),
    "gpt2": _text(_gpt2,
        dict(batch=2, tokens=12, layers=2, hidden=64),
        dict(batch=4, tokens=128, layers=4, hidden=384)),
    "llama": _text(_llama,
        dict(batch=2, tokens=12, layers=2, hidden=128),
        dict(batch=4, tokens=128, layers=4, hidden=512)),
    "falcon": _text(_falcon,
        dict(batch=2, tokens=12, layers=2, hidden=128),
        dict(batch=4, tokens=128, layers=4, hidden=384)),
    "mamba": _text(_mamba,
        dict(batch=2, tokens=4, layers=2, hidden=64),
        dict(batch=4, tokens=32, layers=4, hidden=384)),
    "t5": _text(_t5,
        dict(batch=2, tokens=12, layers=2, hidden=64),
        dict(batch=4, tokens=128, layers=4, hidden=256), _tokens_to_tokens),
    "vit": _text(_vit,
        dict(batch=2, pixels=32, layers=2, hidden=64),
        dict(batch=4, pixels=224, layers=4, hidden=384), _images),
    "whisper": _text(_whisper,
        dict(batch=2, tokens=6, frames=20, layers=2, hidden=64),
        dict(batch=2, tokens=64, frames=600, layers=4, hidden=256), _sound_to_tokens),
    "unet2d_condition": Model("diffusers", _unet, _latents_and_text,
        dict(batch=1, pixels=8, channels=16, context=16),
        dict(batch=2, pixels=32, channels=64, context=128)),
    "autoencoder_kl": Model("diffusers", _autoencoder, _images,
        dict(batch=1, pixels=16, channels=16), dict(batch=2, pixels=64, channels=32)),
}
# fmt: on
