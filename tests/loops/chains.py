"""Random chains of tensor operators, eager beside kernels; float64 arbitrates.

The op database tries each operator alone. What a kernel makes of several shows in chains: an index
behind a pad, a row that is picked of what is resampled. `python -m tests.loops.chains --seconds 60
[--first SEED] [--gradients] [--dynamic] [--gpu]` runs as many as there is time for; `--gpu` runs
kernels for GPUs on the SIMT machine, which tells also that several threads store one number of a
result that overlaps itself (`unfold`). Exit status 1 if any differs.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusee

__all__ = ["chain", "difference"]

LARGEST = 4000  # elements

# Each row has all that it may be: x, y are float tensors, i integers, m a mask; d an axis of x with
# n elements; a, b, c small numbers.
POINTWISE = """
x.sin() | x.relu() | x.tanh() | x*0.5 | x+y | x*y | x-y | torch.maximum(x,y) | x.sigmoid()
x.abs().sqrt() | F.gelu(x) | x/(y.abs()+1) | torch.where(x>0,x,y) | x.lerp(y,0.3)
x.masked_fill(x>1,0.0) | x>0 | x>y | (x*3).long() | x.clone() | x.contiguous() | i+a | i*2 | i//2
i%3 | i.float() | ~m | m.float() | m.long() | torch.where(m,x,y) | m&(x>0) | i.clamp(0,b)
"""
REDUCTIONS = """
x.sum(d) | x.mean(d,keepdim=True) | x.amax(d) | x.softmax(d) | x.cumsum(d) | x.log_softmax(d)
x.logsumexp(d,keepdim=True) | x.std(d,keepdim=True,correction=0) | x.norm(dim=d) | x.prod(d)
x.cummax(d)[0] | x.argmax(d) | x.argsort(d,stable=True) | x.sort(d)[0]
F.layer_norm(x,x.shape[-1:]) | F.normalize(x,dim=d) | x.topk(min(n,2),d)[0] | m.any(0)
m.sum(0) | i.sum(0) | i.cumsum(0) | x@y | x@y.mT | torch.einsum('...i,...i->...',x,y)
"""
VIEWS = """
x.flip(d) | x.roll(a-1,d) | x.transpose(d,0) | x.unsqueeze(0) | x.unsqueeze(-1) | x.flatten()
x.select(d,a%n) | x.narrow(d,a%n,1) | x[...,a:] | x[...,::c] | x[...,:-1] | x.expand(2,*x.shape)
x.tile(1,c) | x.repeat_interleave(2,d) | x.diagonal() | x.tril(a-1) | torch.diag_embed(x)
torch.cat((x,y),d) | torch.cat((x,x.flip(d)),d) | torch.stack((x,y),-1) | torch.stack((x,x*2))
x.unfold(d,2,1) | F.pad(x,(a,b)) | F.pad(x,(a-1,b),value=1.5) | F.pad(x,(a,b,c,0)) | F.pad(i,(1,2))
F.pad(x[None],(a%2,1),mode='reflect')[0] | F.pad(x[None],(1,a%2),mode='replicate')[0]
F.pad(x[None],(1,1),mode='circular')[0] | F.max_pool1d(x,2,1,a%2) | F.avg_pool1d(x,3,c,1)
F.interpolate(x.flatten()[None,None],scale_factor=1.5,mode='nearest')[0,0]
F.interpolate(x.flatten()[None,None],scale_factor=0.5,mode='linear')[0,0]
"""
INDICES = """
torch.arange(n) | torch.arange(n).flip(0) | torch.arange(n)//2 | x[torch.arange(x.shape[0])]
x.index_select(d,torch.arange(n).roll(1)) | x.gather(d,x.argsort(d,stable=True))
x[i.clamp(0,x.shape[0]-1)] | F.embedding(i.clamp(0,x.shape[0]-1),x) | x.take(i.clamp(0,x.numel()-1))
torch.zeros_like(x).scatter_add(d,x.argsort(d,stable=True),x) | x.index_fill(d,torch.arange(1),0.5)
torch.zeros_like(x).index_add(d,torch.arange(n)//2,x) | F.one_hot(torch.arange(n)%3,3).float()
i.bincount(minlength=3)
"""
ROWS = [
    [row.strip() for line in kind.strip().splitlines() for row in line.split("|")]
    for kind in (POINTWISE, REDUCTIONS, VIEWS, INDICES)
]


def _filled(draw: random.Random, row: str, values: dict[str, Tensor]) -> str | None:
    """A row with names and numbers in it; None if no value is of such a kind."""
    kinds: dict[str, list[str]] = {"x": [], "i": [], "m": []}
    for name, value in values.items():
        kind = "x" if value.is_floating_point() else "i" if value.dtype is torch.int64 else "m"
        kinds[kind].append(name)
    x = draw.choice(kinds["x"])
    d = draw.randrange(max(values[x].dim(), 1))
    given = {"x": x, "y": draw.choice(kinds["x"]), "d": str(d), "n": f"{x}.shape[{d}]"}
    given |= {name: str(draw.randrange(4)) for name in "ab"} | {"c": str(draw.choice([1, 2, 3]))}
    given |= {name: draw.choice(kinds[name]) for name in "im" if kinds[name]}
    words = _words(row)
    if any(word in "im" and word not in given for word in words):
        return None
    return "".join(given.get(word, word) for word in words)


def _words(row: str) -> list[str]:
    """Its identifiers, and what is between them; attributes and keywords with their dots."""
    return [word for word in re.split(r"((?<![\w.'])[a-z](?![\w=']))", row) if word]


def chain(seed: int) -> tuple[str, tuple[Tensor, Tensor]]:
    """The source of a function of two tensors, and these."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def made() -> Tensor:
        size = [
            draw.choice([1, 2, 3, 4, 5, 7, 8, 16, 17]) for _ in range(draw.choice([1, 2, 2, 3]))
        ]
        return torch.randn(size, generator=generator)

    one, other = made(), made()
    if draw.random() < 0.6:
        other = torch.randn(one.shape, generator=generator)
    values, lines, wanted = {"p": one, "q": other}, list[str](), draw.choice([3, 5, 8, 12])
    for _ in range(200):
        text = _filled(draw, draw.choice(draw.choice(ROWS)), values)
        try:
            value = eval(text or "", {"torch": torch, "F": F}, dict(values))
        except Exception:  # noqa: BLE001, S112  # sizes that do not fit
            continue
        is_kind = value.dtype in (torch.float32, torch.int64, torch.bool)
        if is_kind and 0 < value.numel() <= LARGEST and value.dim() <= 4 and _is_tame(value):
            name = f"v{len(lines)}"
            values[name] = value
            lines.append(f"    {name} = {text}\n")
        if len(lines) == wanted:
            break
    last = len(lines) - 1
    shown = [f"v{k}" for k in range(len(lines)) if k == last or draw.random() < 0.3]
    return f"def f(p, q):\n{''.join(lines)}    return ({', '.join(shown)},)\n", (one, other)


def _is_tame(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(x.isfinite().all() and x.abs().max() < 1e4)


def _function(source: str) -> Callable[..., tuple[Tensor, ...]]:
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, "<chain>", "exec"), names)
    found: Callable[..., tuple[Tensor, ...]] = names["f"]
    return found


def _run(f: Callable[..., Any], given: tuple[Tensor, ...], gradients: bool) -> list[Any]:
    given = tuple(x.clone().requires_grad_(gradients) for x in given)
    found = f(*given)
    sums = [
        (x * torch.arange(x.numel(), dtype=x.dtype).cos().view(x.shape)).sum()
        for x in found
        if x.requires_grad
    ]
    total = torch.stack(sums).sum() if sums else None
    more = [] if total is None else torch.autograd.grad(total, given, allow_unused=True)
    return [*(x.detach() for x in found), *more]


def difference(
    source: str, given: tuple[Tensor, ...], gradients: bool = False, **how: Any
) -> str | None:
    """Where kernels differ from eager; None if they don't."""
    eager = _function(source)
    exact = _function(source.replace(".float()", ".double()"))
    try:
        want = _run(eager, given, gradients)
        right = _run(exact, tuple(x.double() for x in given), gradients)
    except RuntimeError:  # what has no gradient, or meets another dtype
        return None
    compiled = fusee.compile(eager, **how)
    with torch.set_grad_enabled(gradients):
        try:
            got = _run(compiled, given, gradients)
        except Exception as error:  # noqa: BLE001  # whatever it is, eager does not raise it
            return f"{type(error).__name__}: {error}"
    for k, (ours, eagers, truth) in enumerate(zip(got, want, right, strict=True)):
        if (ours is None) != (eagers is None):
            return f"gradient {k} is there in one"
        if ours is not None and (why := _apart(ours, eagers, truth)):
            return f"result {k}: {why}"
    return None


def _apart(got: Tensor, want: Tensor, exact: Tensor) -> str | None:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} of {[*got.shape]} for {want.dtype} of {[*want.shape]}"
    if not got.is_floating_point():
        return None if torch.equal(got, want) else "other numbers"
    if not (want.isfinite().all() and exact.isfinite().all()):
        return None
    ours, eagers = ((x.double() - exact.double()).abs().max() for x in (got, want))
    allowed = max(4 * eagers, 1e-5 * exact.abs().max(), torch.tensor(1e-6))
    return None if ours <= allowed else f"{ours:.3g} from float64, eager {eagers:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--dynamic", action="store_true", help="with open sizes")
    parser.add_argument("--gpu", action="store_true", help="kernels for GPUs, simulated")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.gpu:
        from fusee.targets import TARGETS
        from fusee.targets.cuda import PROFILE
        from tests.targets.cuda.simulated import Simulated

        TARGETS["cpu"] = Simulated(PROFILE)
    how: Any = {"options": {"prices": False, "cache": not args.gpu}}
    how["dynamic"] = args.dynamic or None
    ends, seed, failed = time.monotonic() + args.seconds, args.first, 0
    while time.monotonic() < ends:
        source, given = chain(seed)
        what = difference(source, given, args.gradients, **how)
        if what is not None:
            failed += 1
            print(f"---- seed {seed}, {[[*x.shape] for x in given]}\n{what}\n{source}", flush=True)
        seed += 1
    print(f"{seed - args.first} chains, {failed or 'none'} differ{'' if failed else 's'}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
