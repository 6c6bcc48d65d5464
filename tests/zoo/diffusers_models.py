"""diffusers: the networks of its pipelines, small."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.models import torchvision_setup as torchvision_setup

__all__ = ["build", "names"]

Inputs = dict[str, Any]


class _Row(NamedTuple):
    settings: dict[str, Any]
    inputs: Callable[[], Inputs]


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _denoising(channels: int, width: int, side: int = 16) -> Callable[[], Inputs]:
    return lambda: {
        "sample": _noise(2, channels, side, side),
        "timestep": torch.tensor([10, 20]),
        "encoder_hidden_states": _noise(2, 8, width),
    }


def _transformer(channels: int, width: int, **more: Callable[[], Any]) -> Callable[[], Inputs]:
    return lambda: {
        "hidden_states": _noise(2, channels, 16, 16),
        "timestep": torch.tensor([10, 20]),
        "encoder_hidden_states": _noise(2, 8, width),
        **{name: make() for name, make in more.items()},
    }


_BLOCKS = dict(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8)
_CROSS = dict(
    **_BLOCKS, attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D")
)
_UP = dict(up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16)
_HEADS = dict(num_attention_heads=2, attention_head_dim=16, num_layers=2)


def _flux() -> Inputs:
    return {
        "hidden_states": _noise(1, 16, 16),
        "encoder_hidden_states": _noise(1, 8, 32),
        "pooled_projections": _noise(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def _control() -> Inputs:
    return {**_denoising(4, 16)(), "controlnet_cond": _noise(2, 3, 128, 128)}


def _image(channels: int = 3, side: int = 32) -> Callable[[], Inputs]:
    return lambda: {"sample": _noise(1, channels, side, side)}


def _clip() -> Inputs:
    return {"sample": _noise(1, 3, 5, 32, 32)}


def _video(channels: int, width: int) -> Callable[[], Inputs]:
    return lambda: {
        "hidden_states": _noise(1, channels, 4, 16, 16),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": _noise(1, 8, width),
    }


# fmt: off
MODELS: dict[str, _Row] = {
    "UNet2DModel": _Row(
        dict(**_BLOCKS, sample_size=16, attention_head_dim=8,
             down_block_types=("DownBlock2D", "AttnDownBlock2D"),
             up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        lambda: {"sample": _noise(2, 3, 16, 16), "timestep": torch.tensor([10, 20])}),
    "UNet2DConditionModel": _Row(dict(**_CROSS, **_UP, sample_size=16), _denoising(4, 16)),
    "UNet3DConditionModel": _Row(
        dict(block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
             attention_head_dim=8, cross_attention_dim=16,
             down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
             up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
        lambda: {"sample": _noise(1, 4, 4, 16, 16), "timestep": torch.tensor([10]),
                 "encoder_hidden_states": _noise(1, 8, 16)}),
    "UNetMotionModel": _Row(
        dict(block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
             cross_attention_dim=16, num_attention_heads=2, motion_num_attention_heads=2,
             down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
             up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion")),
        lambda: {"sample": _noise(1, 4, 4, 16, 16), "timestep": torch.tensor([10]),
                 "encoder_hidden_states": _noise(4, 8, 16)}),
    "ControlNetModel": _Row(
        dict(**_CROSS, cross_attention_dim=16,
             conditioning_embedding_out_channels=(16, 32, 32, 32)),
        _control),
    "PriorTransformer": _Row(
        dict(num_attention_heads=2, attention_head_dim=16, num_layers=2, embedding_dim=16,
             num_embeddings=7, additional_embeddings=4),
        lambda: {"hidden_states": _noise(2, 16), "timestep": torch.tensor(5),
                 "proj_embedding": _noise(2, 16), "encoder_hidden_states": _noise(2, 7, 16)}),
    "DiTTransformer2DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=8, sample_size=16, num_embeds_ada_norm=10),
        lambda: {"hidden_states": _noise(2, 4, 16, 16), "timestep": torch.tensor([3, 4]),
                 "class_labels": torch.tensor([1, 2])}),
    "PixArtTransformer2DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=8, sample_size=16, cross_attention_dim=32,
             caption_channels=24),
        _transformer(4, 24, added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None})),
    "SD3Transformer2DModel": _Row(
        dict(**_HEADS, sample_size=16, in_channels=4, out_channels=4, joint_attention_dim=32,
             caption_projection_dim=32, pooled_projection_dim=24),
        _transformer(4, 32, pooled_projections=lambda: _noise(2, 24))),
    "AuraFlowTransformer2DModel": _Row(
        dict(sample_size=16, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
             attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24,
             caption_projection_dim=32, out_channels=4),
        lambda: {"hidden_states": _noise(2, 4, 16, 16), "timestep": torch.rand(2),
                 "encoder_hidden_states": _noise(2, 8, 24)}),
    "FluxTransformer2DModel": _Row(
        dict(patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
             num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
             axes_dims_rope=(4, 4, 8)),
        _flux),
    "SanaTransformer2DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=4, num_cross_attention_heads=2,
             cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=24,
             sample_size=16),
        _transformer(4, 24)),
    "CogVideoXTransformer3DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=24,
             sample_width=16, sample_height=16, sample_frames=9, max_text_seq_length=8),
        lambda: {"hidden_states": _noise(1, 3, 4, 16, 16), "timestep": torch.tensor([10]),
                 "encoder_hidden_states": _noise(1, 8, 24)}),
    "LatteTransformer3DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=8, sample_size=16, caption_channels=24,
             cross_attention_dim=32, video_length=4, patch_size=2),
        lambda: {**_video(4, 24)(), "enable_temporal_attentions": True}),
    "WanTransformer3DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=4, text_dim=24, freq_dim=16, ffn_dim=48,
             cross_attn_norm=True, rope_max_seq_len=32),
        _video(4, 24)),
    "LTXVideoTransformer3DModel": _Row(
        dict(**_HEADS, in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=24),
        lambda: {"hidden_states": _noise(1, 32, 8), "timestep": torch.tensor([10]),
                 "encoder_hidden_states": _noise(1, 8, 24),
                 "encoder_attention_mask": torch.ones(1, 8), "num_frames": 2, "height": 4,
                 "width": 4}),
    "MochiTransformer3DModel": _Row(
        dict(**_HEADS, pooled_projection_dim=16, in_channels=4, text_embed_dim=24,
             time_embed_dim=8, max_sequence_length=8),
        lambda: {**_video(4, 24)(), "encoder_attention_mask": torch.ones(1, 8).bool()}),
    "HunyuanVideoTransformer3DModel": _Row(
        dict(**_HEADS, in_channels=4, out_channels=4, num_single_layers=1, num_refiner_layers=1,
             text_embed_dim=24, pooled_projection_dim=16, rope_axes_dim=(4, 6, 6)),
        lambda: {**_video(4, 24)(), "encoder_attention_mask": torch.ones(1, 8),
                 "pooled_projections": _noise(1, 16), "guidance": torch.tensor([6.0])}),
    "QwenImageTransformer2DModel": _Row(
        dict(patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
             num_attention_heads=2, joint_attention_dim=24, axes_dims_rope=(4, 6, 6)),
        lambda: {"hidden_states": _noise(1, 16, 16), "timestep": torch.tensor([0.5]),
                 "encoder_hidden_states": _noise(1, 8, 24),
                 "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.int64),
                 "img_shapes": [(1, 4, 4)]}),
    "Lumina2Transformer2DModel": _Row(
        dict(sample_size=16, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1,
             num_attention_heads=2, num_kv_heads=1, cap_feat_dim=24, axes_dim_rope=(4, 6, 6),
             axes_lens=(300, 64, 64)),
        lambda: {"hidden_states": _noise(2, 4, 16, 16), "timestep": torch.rand(2),
                 "encoder_hidden_states": _noise(2, 8, 24),
                 "encoder_attention_mask": torch.ones(2, 8, dtype=torch.bool)}),
    "AutoencoderKL": _Row(
        dict(**_BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
             up_block_types=("UpDecoderBlock2D",) * 2, sample_size=32), _image()),
    "AutoencoderTiny": _Row(
        dict(encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
             num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)), _image()),
    "AsymmetricAutoencoderKL": _Row(
        dict(down_block_types=("DownEncoderBlock2D",), down_block_out_channels=(16,),
             up_block_types=("UpDecoderBlock2D",), up_block_out_channels=(16,),
             norm_num_groups=8, sample_size=32), _image()),
    "VQModel": _Row(
        dict(**_BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
             up_block_types=("UpDecoderBlock2D",) * 2, sample_size=32, num_vq_embeddings=32),
        _image()),
    "AutoencoderDC": _Row(
        dict(latent_channels=4, encoder_block_out_channels=(16, 32),
             decoder_block_out_channels=(16, 32), encoder_layers_per_block=(1, 1),
             decoder_layers_per_block=(1, 1), encoder_block_types="ResBlock",
             decoder_block_types="ResBlock", encoder_qkv_multiscales=((), ()),
             decoder_qkv_multiscales=((), ()), downsample_block_type="Conv"), _image()),
    "AutoencoderKLTemporalDecoder": _Row(
        dict(block_out_channels=(32, 64), layers_per_block=1,
             down_block_types=("DownEncoderBlock2D",) * 2, sample_size=32),
        lambda: {"sample": _noise(2, 3, 32, 32), "num_frames": 2}),
    "AutoencoderKLCogVideoX": _Row(
        dict(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2,
             latent_channels=4, sample_height=32, sample_width=32), _clip),
    "AutoencoderKLWan": _Row(
        dict(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1), _clip),
    "AutoencoderKLLTXVideo": _Row(
        dict(block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
             layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
             latent_channels=8), lambda: {"sample": _noise(1, 3, 9, 32, 32)}),
    "AutoencoderOobleck": _Row(
        dict(encoder_hidden_size=8, downsampling_ratios=[2, 4], decoder_channels=8,
             decoder_input_channels=4, channel_multiples=[1, 2], audio_channels=2),
        lambda: {"sample": _noise(1, 2, 64)}),
    "StableCascadeUNet": _Row(
        dict(block_out_channels=(32, 64), conditioning_dim=32, num_attention_heads=(0, 2),
             down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1),
             down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1),
             block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                                    ("SDCascadeResBlock", "SDCascadeTimestepBlock",
                                     "SDCascadeAttnBlock")),
             clip_text_in_channels=32, clip_text_pooled_in_channels=32, clip_image_in_channels=32,
             in_channels=4, out_channels=4, clip_seq=2, switch_level=(False,)),
        lambda: {"sample": _noise(2, 4, 16, 16), "timestep_ratio": torch.rand(2),
                 "clip_text_pooled": _noise(2, 1, 32), "clip_text": _noise(2, 8, 32),
                 "clip_img": _noise(2, 1, 32)}),
}
# fmt: on


def names() -> list[str]:
    """Those that the installed diffusers has."""
    diffusers = importlib.import_module("diffusers")
    return [name for name in MODELS if hasattr(diffusers, name)]


def build(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    row = MODELS[name]
    torch.manual_seed(seed)
    module = getattr(importlib.import_module("diffusers"), name)(**row.settings).eval()
    torch.manual_seed(seed + 1)
    inputs = row.inputs()
    with torch.no_grad():
        module(**inputs)
    count = sum(p.numel() for p in module.parameters())
    return module, (), inputs, f"{count / 1e6:.2g} M parameters"
