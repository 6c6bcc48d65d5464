"""transformers' generate() with a static cache: eager's tokens, and nothing compiled per token."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fusee
import tests.models.torchvision_setup as torchvision_setup
from fusee import api
from fusee.capture.captured import Entry

assert torchvision_setup  # transformers imports torchvision
transformers: Any = importlib.import_module("transformers")

SHARED = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 99}


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **SHARED,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SHARED)
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(model: Any, prompt: Tensor, *, sample: bool, **more: Any) -> Tensor:
    torch.manual_seed(3)
    found: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=sample, max_new_tokens=8,
        cache_implementation="static", **more,
    )  # fmt: skip
    return found


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    fusee.uninstall()


def check_whole(entries: list[Entry], count: int) -> None:
    assert len(entries) == count
    for entry in entries:
        assert entry.captured.graph is not None and entry.captured.stop is None
        assert not entry.captured.eager


@pytest.mark.parametrize("make", [llama, gpt2])
def test_forward(make: Any, entries: list[Entry]) -> None:
    """The prompt is one version, all later tokens another, greedy or sampled."""
    model, prompt = make(), torch.randint(2, 99, (2, 5))
    want = [tokens(model, prompt, sample=sample) for sample in (False, True)]
    assert not torch.equal(*want)
    model.forward = api.compile(model.forward)
    assert torch.equal(tokens(model, prompt, sample=False), want[0])
    check_whole(entries, 2)
    assert torch.equal(tokens(model, prompt, sample=True), want[1])
    assert torch.equal(tokens(model, prompt, sample=False), want[0])
    check_whole(entries, 2)


def test_as_generate_compiles_by_itself(entries: list[Entry]) -> None:
    """generate() compiles what it calls for each token after the first, through torch.compile."""
    model = llama()
    prompts = [torch.randint(2, 99, (2, size)) for size in (5, 7)]
    want = [tokens(model, prompt, sample=sample) for prompt in prompts for sample in (False, True)]
    settings = transformers.CompileConfig(backend="fusee")
    settings._compile_all_devices = True  # by default it compiles on GPUs only
    fusee.install()
    got = [
        tokens(model, prompt, sample=sample, compile_config=settings)
        for prompt in prompts
        for sample in (False, True)
    ]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    # the cache is as large as the longest prompt made it
    check_whole(entries, 1)
