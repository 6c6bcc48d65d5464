"""Train a small GPT on a text, letter by letter: eagerly and compiled, with the same losses.

python examples/train_a_gpt.py     needs matplotlib and rich: pip install 'fusee[bench]'
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import fusee

TEXT = (Path(__file__).parent / "the_lighthouse.txt").read_text()
LETTERS = sorted(set(TEXT))
DATA = torch.tensor([LETTERS.index(c) for c in TEXT])
BATCH, CONTEXT, WIDTH, STEPS = 16, 64, 96, 120


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        shape = (WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, 1e-5, True, True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(*shape) for _ in range(2))
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.letters(x) + self.places.weight
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(h)
        return logits


def losses(title: str, wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    fast, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), 3e-3)
    found = []
    for _ in track(range(STEPS), title):
        starts = torch.randint(len(DATA) - CONTEXT - 1, (BATCH, 1)) + torch.arange(CONTEXT)
        loss = F.cross_entropy(fast(DATA[starts]).flatten(0, 1), DATA[starts + 1].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    curves, seconds = {}, {}
    for title, wrap in (("eager", nn.Module.train), ("fusee", fusee.compile)):
        start = time.perf_counter()
        curves[title] = losses(title, wrap)
        seconds[title] = time.perf_counter() - start
        curve, took = curves[title], seconds[title]
        print(f"{title}: loss {curve[0]:.3f} to {curve[-1]:.3f}, {took:.1f} s")
    torch.testing.assert_close(curves["fusee"], curves["eager"], rtol=2e-3, atol=0)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for title, curve in curves.items():
        pyplot.plot(curve, label=title, linestyle="-" if title == "eager" else "--")
    pyplot.xlabel("step")
    pyplot.ylabel("cross entropy")
    pyplot.legend()
    pyplot.savefig("train_a_gpt.png")
    print("the curves lie on one another: train_a_gpt.png")


if __name__ == "__main__":
    main()
