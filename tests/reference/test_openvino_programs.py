"""The programs of OpenVINO's page on torch.compile, by each route, with small random models.

source   https://docs.openvino.ai/torchcompile
"""

from __future__ import annotations

import importlib
import importlib.machinery
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
from fusee.backends.report import Report
from tests.models import torchvision_setup as torchvision_setup
from tests.reference.routes import ROUTES, Route

pytest.importorskip("openvino")
# of diffusers' own
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Way:
    """A route with our backend openvino, and the reports of what was compiled by it."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.names: list[str] = []

    def __call__(self, fn: Callable[..., Any], **options: object) -> Any:
        self.names.append(f"openvino {next(_numbers)}")
        given = {"name": self.names[-1], **options}
        return self.route.compile(fn, backend="openvino", options=given)

    def reports(self) -> list[list[Report]]:
        """For each compiled function those of its graphs."""
        return [fusee.report(name) for name in self.names]

    def check(self) -> None:
        """Each compiled function ran in OpenVINO, and no part of it failed there."""
        for reports in self.reports():
            rows = [row for report in reports for row in report.regions]
            assert rows and all(row.failed is None and row.calls for row in rows), str(reports)


_numbers = itertools.count()


@pytest.fixture
def compiled(route: Route) -> Way:
    return Way(route)


def executed(reports: list[Report]) -> str:
    return " ".join(
        kind for r in reports for row in r.regions if row.primitives for kind in row.primitives()
    )


def unet_of(diffusers: Any, **more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **more,
    ).eval()


def vae_of(diffusers: Any) -> Any:
    return diffusers.AutoencoderKL(
        latent_channels=4,
        shift_factor=0.0,
        force_upcast=False,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()


def test_stable_diffusion_piece_by_piece(compiled: Way) -> None:
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text_encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    ).eval()
    unet, vae = unet_of(diffusers), vae_of(diffusers)
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=None,
        unet=unet,
        scheduler=diffusers.DPMSolverMultistepScheduler.from_config(
            diffusers.DDIMScheduler(steps_offset=1, clip_sample=False).config
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    tokens = torch.randint(0, 100, (2, 16))

    def image() -> Tensor:
        embeds = pipe.text_encoder(tokens)[0]
        found: Tensor = pipe(
            prompt_embeds=embeds[:1],
            negative_prompt_embeds=embeds[1:],
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        return found

    want = image()
    pipe.text_encoder = compiled(pipe.text_encoder)
    pipe.unet = compiled(pipe.unet)
    pipe.vae.decode = compiled(pipe.vae.decode)
    torch.testing.assert_close(image(), want, rtol=1e-3, atol=1e-4)
    compiled.check()


def test_stable_diffusion_3_with_a_compiled_transformer(compiled: Way) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=8,
    ).eval()
    none = dict.fromkeys(
        ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2")
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae_of(diffusers),
        tokenizer_3=None,
        **none,
    )
    pipe.set_progress_bar_config(disable=True)
    words, pooled = torch.randn(2, 1, 6, 32), torch.randn(2, 1, 64)

    def image() -> Tensor:
        found: Tensor = pipe(
            prompt_embeds=words[0],
            negative_prompt_embeds=words[1],
            pooled_prompt_embeds=pooled[0],
            negative_pooled_prompt_embeds=pooled[1],
            height=16,
            width=16,
            num_inference_steps=2,
            guidance_scale=7.0,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        return found

    want = image()
    pipe.transformer = compiled(pipe.transformer)
    torch.testing.assert_close(image(), want, rtol=1e-3, atol=1e-4)
    compiled.check()


def test_latent_consistency_in_half_precision(compiled: Way) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = unet_of(
        diffusers,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 32,
        time_cond_proj_dim=32,
    )
    none = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = diffusers.StableDiffusionXLPipeline(
        unet=unet,
        vae=vae_of(diffusers),
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
        **none,
    ).to(torch.float16)
    pipe.scheduler = diffusers.LCMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    words, pooled = torch.randn(1, 6, 32).half(), torch.randn(1, 32).half()

    def image() -> Tensor:
        found: Tensor = pipe(
            prompt_embeds=words,
            pooled_prompt_embeds=pooled,
            num_inference_steps=2,
            guidance_scale=8.0,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        return found

    want = image()
    pipe.unet = compiled(pipe.unet)
    pipe.vae.decode = compiled(pipe.vae.decode)
    torch.testing.assert_close(image(), want, rtol=0.05, atol=0.02)
    compiled.check()


class FourBits(nn.Module):
    """A layer whose weight is unpacked on each call, as those of GPTQ are."""

    qweight: Tensor
    shifts: Tensor
    scales: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        packed = torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int64).int()
        self.register_buffer("qweight", packed)
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32))
        self.register_buffer("scales", torch.rand(outputs) * 0.02 + 0.001)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.qweight[:, None] >> self.shifts[None, :, None] & 15
        weight = self.scales * (whole.flatten(0, 1) - 8)
        return x @ weight


class Encoded(nn.Module):
    """Layers behind `model.transformer.encoder`, whose `forward` alone is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.encoder = nn.Sequential(FourBits(64, 64), nn.GELU(), FourBits(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.transformer.encoder(x)  # type: ignore[operator]
        return found.softmax(-1)


def test_packed_weights_below_a_compiled_forward(compiled: Way) -> None:
    model, x = Encoded().eval(), torch.randn(2, 64)
    encoder: Any = model.transformer.encoder
    want = model(x)
    encoder.forward = compiled(encoder.forward, aot_autograd=True)
    torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-5)
    compiled.check()
    assert "u4" in executed([one for reports in compiled.reports() for one in reports])


@pytest.mark.filterwarnings("ignore:.*grows at each call")  # the cache does
def test_text_generation_with_a_compiled_forward(compiled: Way) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{k}": k for k in range(60)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", eos_token="w1", pad_token="w1"
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=None,
            pad_token_id=1,
        )
    ).eval()

    def text() -> str:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        config = transformers.GenerationConfig(
            max_new_tokens=5, do_sample=False, pad_token_id=1, eos_token_id=None
        )
        found: str = pipe("w5 w7 w9 w11", generation_config=config)[0]["generated_text"]
        return found

    want = text()
    model.forward = compiled(model.forward, aot_autograd=True)
    assert text() == want
    compiled.check()


class Quantised(nn.Module):
    """What convert_pt2e(fold_quantize=False) makes of a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.linear = nn.Linear(16, 8)
        for name, weight in (("conv", self.conv.weight), ("linear", self.linear.weight)):
            scale = weight.detach().flatten(1).abs().amax(1) / 127
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_zero", torch.zeros(scale.shape, dtype=torch.int64))

    def weight(self, name: str) -> Tensor:
        ops = torch.ops.quantized_decomposed
        qparams = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero"), 0, -128, 127
        whole = ops.quantize_per_channel(getattr(self, name).weight, *qparams, torch.int8)
        found: Tensor = ops.dequantize_per_channel(whole, *qparams, torch.int8)
        return found

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.conv2d(_rounded(x, 0.03, 120), self.weight("conv"), self.conv.bias)
        y = _rounded(torch.relu(y), 0.02, 0).mean((2, 3))
        return nn.functional.linear(_rounded(y, 0.01, 3), self.weight("linear"), self.linear.bias)


def _rounded(x: Tensor, scale: float, zero: int) -> Tensor:
    ops = torch.ops.quantized_decomposed
    qparams = scale, zero, 0, 255, torch.uint8
    found: Tensor = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *qparams), *qparams)
    return found


def test_quantised_models_run_in_int8(compiled: Way) -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # defines the operators
    torch.manual_seed(0)
    module, x = Quantised().eval(), torch.randn(2, 3, 12, 12)
    want = module(x)
    ours = compiled.route.compile(module)
    torch.testing.assert_close(ours(x), want)
    got = compiled(module)(x)
    # where a sum lies between two steps of a quantiser, another order of adding takes the other
    assert (got - want).abs().max() < 0.02, "more than a step"
    assert (got - want).abs().mean() < 0.002
    (reports,) = compiled.reports()
    kinds = executed(reports)
    assert "I8" in kinds and "Convolution" in kinds, kinds
    assert not [row for r in reports for row in r.unclaimed]


def test_what_torchao_quantises_runs_in_int8() -> None:
    root = Path(__file__).parent.parent.parent
    # scripts/setup puts torchao where no other package sees it
    paths = [str(root), str(Path(sys.prefix, "torchao")), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if importlib.machinery.PathFinder.find_spec("torchao", paths) is None:
        pytest.skip("needs torchao, which scripts/setup installs")
    run = subprocess.run(
        [sys.executable, "-m", "tests.reference.pt2e"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    folded = found.pop("folded")
    (said,) = folded["said"]
    assert "convert_pt2e(model, fold_quantize=False)" in said and "pt2e.py" in said
    assert folded["error"] < 1e-3
    assert len(found) == 2 * len(ROUTES)
    for way, row in found.items():
        assert row["graphs"] == 1, way
        if "openvino" not in way:
            assert row["error"] < 1e-5, way  # rounded as eager does
            continue
        kinds = " ".join(row["primitives"])
        assert not row["unclaimed"], way
        assert re.search(r"Convolution \S*I8", kinds) and re.search(r"FullyConnected \S*I8", kinds)
        assert row["error"] < 0.02, way  # a step of a quantiser is 1/255 of its range
