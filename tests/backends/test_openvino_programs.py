"""The programs of OpenVINO's documentation, with small random models: pipelines, quantisation."""

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

pytest.importorskip("openvino")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Way:
    """One of the two ways to compile, and the reports of what was compiled by it."""

    def __init__(self, made: Callable[..., Any], backend: str) -> None:
        self.made, self.backend = made, backend
        self.names: list[str] = []

    def __call__(self, fn: Callable[..., Any], **options: object) -> Any:
        self.names.append(f"{self.backend} {next(_numbers)}")
        given = {"name": self.names[-1], **options}
        return self.made(fn, backend=self.backend, options=given)

    def reports(self) -> list[list[Report]]:
        """For each compiled function those of its graphs."""
        return [fusee.report(name) for name in self.names]


_numbers = itertools.count()


@pytest.fixture(params=["fusee", "stock"])
def compiled(request: pytest.FixtureRequest) -> Way:
    if request.param == "fusee":
        return Way(fusee.compile, "openvino")
    return Way(torch.compile, "fusee_openvino")


def executed(reports: list[Report]) -> str:
    return " ".join(
        kind for r in reports for row in r.regions if row.primitives for kind in row.primitives()
    )


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
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    ).eval()
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=None,
        unet=unet,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
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
    for reports in compiled.reports():
        rows = [row for report in reports for row in report.regions]
        assert rows and all(row.failed is None and row.calls for row in rows), str(reports)


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
    (reports,) = compiled.reports()
    rows = [row for report in reports for row in report.regions]
    assert rows and all(row.failed is None and row.calls for row in rows), str(reports)


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
    ours = compiled.made(module, backend="fusee")
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
    paths = [str(root), str(root / ".venv" / "torchao"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if importlib.machinery.PathFinder.find_spec("torchao", paths) is None:
        pytest.skip("needs torchao, which scripts/setup installs")
    run = subprocess.run(
        [sys.executable, "-m", "tests.backends.pt2e"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    kinds = " ".join(found["primitives"])
    assert not found["unclaimed"]
    assert re.search(r"Convolution \S*I8", kinds) and re.search(r"FullyConnected \S*I8", kinds)
    # a step of a quantiser is 1/255 of its range; ours rounds as eager does
    assert found["errors"]["openvino"] < 0.02 and found["errors"]["fusee"] < 1e-5
