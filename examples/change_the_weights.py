"""Folded and packed weights follow the parameters: no second compilation, no stale result.

python examples/change_the_weights.py
"""

from __future__ import annotations

import torch
from torch import nn

import fusee


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    other = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    fast = torch.compile(model, backend="fusee", options={"name": "block"})
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        next(model.parameters()).mul_(2)  # in place
        torch.testing.assert_close(fast(x), model(x))
        model.load_state_dict(other.state_dict())  # all of them
        torch.testing.assert_close(fast(x), other(x))
    print(f"{len(fusee.report('block'))} graph was compiled for three sets of weights")


if __name__ == "__main__":
    main()
