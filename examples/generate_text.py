"""Generate tokens with a language model of transformers and a static cache, eagerly and compiled.

The model is small and its weights are random: what counts is that the tokens are the same and that
only two versions are compiled, one for the prompt and one for every token after it.

python examples/generate_text.py     needs transformers: pip install 'fusee[bench]'
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusee

TOKENS = 40


def generate(model: Any, prompt: Tensor) -> tuple[Tensor, float]:
    """Tokens, drawn with a fixed seed, and seconds."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=TOKENS,
        min_new_tokens=TOKENS, cache_implementation="static", pad_token_id=0,
    )  # fmt: skip
    return found, time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.eval()
    prompt = torch.randint(3, 1000, (1, 12))
    generate(model, prompt)
    want, eager_s = generate(model, prompt)
    model.forward = fusee.compile(model.forward)
    first, first_s = generate(model, prompt)
    got, later_s = generate(model, prompt)
    same = torch.equal(first, want) and torch.equal(got, want)
    print(f"eager           {TOKENS / eager_s:.0f} tokens a second")
    print(f"fusee           {TOKENS / later_s:.0f} tokens a second, {first_s:.1f} s the first time")
    print(f"same tokens     {same}")


if __name__ == "__main__":
    main()
