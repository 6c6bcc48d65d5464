"""What became of a function: its kernels, its calls to ATen, and what was not fused, with reasons.

python examples/see_what_was_made.py
FUSEE_LOG=loops,fusion python examples/see_what_was_made.py     every stage as it happens
FUSEE_DUMP=out/dump python examples/see_what_was_made.py        every stage as a file
"""

from __future__ import annotations

import torch
from torch import Tensor

import fusee


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, written out."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(scores, -1) @ v


def main() -> None:
    fast = torch.compile(attention, backend="fusee", options={"name": "attention"})
    with torch.no_grad():
        fast(*(torch.randn(2, 4, 32, 16) for _ in range(3)))
    print(*fusee.report("attention"))


if __name__ == "__main__":
    main()
