"""Random chains of tensor operators, eager beside kernels; float64 arbitrates.

The op database tries each operator alone. What a kernel makes of several shows in chains: an index
behind a pad, a row that is picked of what is resampled, a write through a view of a view.
`python -m tests.loops.chains --seconds 60 [--first SEED] [--gradients] [--dynamic] [--gpu]` runs as
many as there is time for, and shrinks what differs. A chain is called three times, with other
numbers and, if `--dynamic`, with other sizes. `--gpu` runs kernels for GPUs on the SIMT machine,
which tells also that several threads store one number of a result that overlaps itself (`unfold`);
`--device cuda` runs them on a real one.
Exit status 1 if any differs.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from tests.check import in_float64, sharing
from tests.compare import Mismatch, assert_same, is_within, may_be_chance, neighbour

__all__ = ["Call", "chain", "difference"]

LARGEST = 4000  # elements

# Each row has all that it may be: x, y are float tensors, z is complex, i, j are integers (i of 64
# bits), m a mask; d an axis of x with n elements; a, b, c small numbers; k an integer and s a float
# of Python's that each call has its own of.
POINTWISE = """
x.sin() | x.relu() | x.tanh() | x*0.5 | x+y | x*y | x-y | torch.maximum(x,y) | x.sigmoid()
x.abs().sqrt() | F.gelu(x) | x/(y.abs()+1) | torch.where(x>0,x,y) | x.lerp(y,0.3) | x*s | x+k | j+k
x.masked_fill(x>1,0.0) | x>0 | x>y | x.clone() | x.contiguous() | i+a | i*2 | i//2 | j%3 | x**2
i%3 | ~m | torch.where(m,x,y) | m&(x>0) | i.clamp(0,b) | x.clamp(-s,s) | x>s | x*j | x+m | i<<1
torch.where(m,x,s) | torch.where(m,j,k) | x.addcmul(x,y,value=0.5) | -j | x.remainder(1.5)
F.silu(x) | F.softplus(x) | torch.atan2(x,y) | x.exp().log1p() | j//2 | j*j | i-j | z.real | z.imag
z*z | z.abs() | z+x | z.conj() | torch.complex(x,x*0.5) | z*s | j.bitwise_and(5) | x.nan_to_num()
x.round() | x.sign() | x.log() | torch.copysign(x,y) | x.reciprocal() | torch.fmin(x,y) | x/k
"""
CASTS = """
x.long() | x.half() | x.bfloat16() | x.float() | x.double() | j.float() | m.float() | m.long()
(x*3).int() | x.abs().to(torch.uint8) | j.int() | j.to(torch.uint8) | j.bool() | x.to(y.dtype)
x.float().sum() | x.type_as(y) | j.double()
"""
REDUCTIONS = """
x.sum(d) | x.mean(d,keepdim=True) | x.amax(d) | x.softmax(d) | x.cumsum(d) | x.log_softmax(d) | x@y
x.logsumexp(d,keepdim=True) | x.std(d,keepdim=True,correction=0) | x.norm(dim=d) | x.prod(d)
x.cummax(d)[0] | x.argmax(d) | x.argsort(d,stable=True) | x.sort(d)[0] | F.normalize(x,dim=d)
x.topk(min(n,2),d)[0] | m.any(0) | m.sum(0) | i.sum(0) | i.cumsum(0) | x@y.mT | j.amax(0)
j.prod(0) | torch.einsum('...i,...i->...',x,y) | x.sum() | x.mean((0,-1)) | x.var(d)
x.median(d)[0] | x.aminmax()[0] | x.sum(d,dtype=torch.float64) | j.float().mean() | m.all()
x.cumprod(d) | torch.cdist(x,y) | z.sum(0) | x.max(d)[1] | x.min() | x.std()
F.cosine_similarity(x,y,d) | F.mse_loss(x,y) | x.logcumsumexp(d) | x.diff(dim=d)
torch.trapezoid(x,dim=d) | x.kthvalue(1,d)[0] | F.l1_loss(x,y,reduction='none')
"""
VIEWS = """
x.flip(d) | x.roll(a-1,d) | x.transpose(d,0) | x.unsqueeze(0) | x.unsqueeze(-1) | x.flatten() | x.mT
x.select(d,a%n) | x.narrow(d,a%n,1) | x[...,a:] | x[...,::c] | x[...,:-1] | x.expand(2,*x.shape)
x.tile(1,c) | x.repeat_interleave(2,d) | x.diagonal() | x.tril(a-1) | torch.diag_embed(x) | x[k:]
torch.cat((x,y),d) | torch.cat((x,x.flip(d)),d) | torch.stack((x,y),-1) | torch.stack((x,x*2))
x.unfold(d,2,1) | F.pad(x,(a,b)) | F.pad(x,(a-1,b),value=1.5) | F.pad(x,(a,b,c,0)) | F.pad(i,(1,2))
F.pad(x[None],(a%2,1),mode='reflect')[0] | F.pad(x[None],(1,a%2),mode='replicate')[0] | x.roll(k,d)
F.pad(x[None],(1,1),mode='circular')[0] | x.squeeze() | x.unbind(d)[-1] | x.chunk(2,d)[-1]
x[...,0] | x.split(2,d)[0] | x.movedim(d,0) | x.view(-1) | x.reshape(n,-1) | x.swapaxes(0,-1)
x.detach() | x[:1].expand(c,*x.shape[1:]) | x.as_strided((2,2),(1,1)) | torch.cat((x,y.to(x.dtype)))
x.rot90() | x.new_zeros(n,2) | x.T | torch.meshgrid(x,y,indexing='ij')[0]
torch.broadcast_tensors(x,y)[0]
"""
INDICES = """
torch.arange(n) | torch.arange(n).flip(0) | torch.arange(n)//2 | x[torch.arange(x.shape[0])] | x[m]
x.index_select(d,torch.arange(n).roll(1)) | x.gather(d,x.argsort(d,stable=True)) | x.nonzero()
x[i.clamp(0,x.shape[0]-1)] | F.embedding(i.clamp(0,x.shape[0]-1),x) | x.take(i.clamp(0,x.numel()-1))
torch.zeros_like(x).scatter_add(d,x.argsort(d,stable=True),x) | x.index_fill(d,torch.arange(1),0.5)
torch.zeros_like(x).index_add(d,torch.arange(n)//2,x) | F.one_hot(torch.arange(n)%3,3).float()
i.bincount(minlength=3)
x.scatter_reduce(d,x.argsort(d,stable=True)//2,x,'amax',include_self=False)
x.scatter_reduce(d,x.argsort(d,stable=True)//2,x,'mean') | x.index_copy(d,torch.arange(n).flip(0),x)
x.index_put((torch.arange(x.shape[0])//2,),x,accumulate=True) | x[...,i.clamp(0,x.shape[-1]-1)]
x.masked_scatter(m,y) | x[:,None,i%x.shape[-1]] | x.scatter(d,x.argsort(d,stable=True),s)
x.take_along_dim(x.argsort(d,stable=True),d) | torch.searchsorted(x.sort(-1)[0],x)
x[i%x.shape[0],0] | torch.bucketize(x,torch.arange(3.)) | torch.where(x>0)[0]
x.index_reduce(d,torch.arange(n)//2,x,'amax')
"""
LAYERS = """
F.layer_norm(x,x.shape[-1:]) | F.layer_norm(x,x.shape[-1:],y.flatten()[:x.shape[-1]],None,1e-3)
F.rms_norm(x,x.shape[-1:]) | F.batch_norm(x,None,None,training=True) | F.group_norm(x[None],1)[0]
F.instance_norm(x[None])[0] | F.batch_norm(x,x.new_zeros(x.shape[1]),x.new_ones(x.shape[1]))
F.conv1d(x.flatten()[None,None],y.flatten()[:3][None,None],stride=c,padding=a)[0]
F.conv2d(x[None],y.flatten()[:4*x.shape[0]].view(1,-1,2,2),padding=a,dilation=c)[0]
F.conv2d(x[None],y.flatten()[:4*x.shape[0]].view(-1,1,2,2),stride=c,groups=x.shape[0])[0]
F.conv_transpose1d(x.flatten()[None,None],y.flatten()[:3][None,None],stride=c)[0] | F.glu(x,d)
F.max_pool1d(x,2,1,a%2) | F.avg_pool1d(x,3,c,1) | F.max_pool2d(x[None],2,c,a%2,ceil_mode=True)[0]
F.avg_pool2d(x[None],2,c,a%2,ceil_mode=True,count_include_pad=False)[0]
F.adaptive_avg_pool1d(x,b+1) | F.adaptive_avg_pool2d(x,(a+1,c)) | F.adaptive_max_pool1d(x,c)
F.lp_pool1d(x,2,2) | F.interpolate(x.flatten()[None,None],scale_factor=1.5,mode='nearest')[0,0]
F.interpolate(x.flatten()[None,None],scale_factor=0.5,mode='linear')[0,0]
F.interpolate(x[None],scale_factor=2,mode='bilinear',align_corners=True)[0]
F.interpolate(x[None],size=(a+1,b+2),mode='bicubic')[0]
F.interpolate(x[None],size=(c,b+1),mode='area')[0]
F.interpolate(x[None],size=(b+2,c),mode='bilinear')[0]
F.interpolate(x[None],c+1,mode='nearest-exact')[0]
F.interpolate(x[None],scale_factor=0.7,mode='bilinear',antialias=True)[0]
F.scaled_dot_product_attention(x,x,x,is_causal=True) | F.scaled_dot_product_attention(x,y,y)
F.scaled_dot_product_attention(x[None],x[None],x[None],attn_mask=m)[0]
F.scaled_dot_product_attention(torch.cat((x,x))[None],x[None],x[None],enable_gqa=True)[0]
F.cross_entropy(x,i.clamp(0,x.shape[1]-1)) | F.linear(x,y)
F.pixel_shuffle(x.expand(4,*x.shape[1:]),2) | F.unfold(x[None],2,padding=1)[0]
F.prelu(x,y.flatten()[:1]) | F.bilinear(x,x,y) | F.hardswish(x)
F.grid_sample(x[None],x.tanh()[:1,:,:2,None].transpose(2,3),align_corners=False)[0]
"""
WRITES = """
x.mul_(0.5) | x.add_(y) | x[1:].mul_(2) | x[...,::2].add_(1) | x.select(d,0).copy_(y) | x.relu_()
x.mul_(s) | x.index_fill_(d,torch.arange(1),0.5) | x.masked_fill_(x>1,0.0) | x.zero_() | x.fill_(s)
x.T.tanh_() | x[...,a:] = 0.5 | x[x>0] = 0.1 | x[i.clamp(0,x.shape[0]-1)] = y | x[0] = x[-1]
torch.add(x,y,out=x) | torch.sin(x,out=y) | x.copy_(y) | x.clamp_(-1,1) | x.t_() | x.unsqueeze_(0)
x += y | x.scatter_add_(d,x.argsort(d,stable=True),y)
x.index_put_((i%x.shape[0],),y,accumulate=True) | i.add_(k)
x.index_copy_(d,torch.arange(n).flip(0),y) | x.diagonal().add_(1) | x.view(-1)[a] = s | x[k:] = y
j *= 2 | x.masked_scatter_(m,y) | x.cumsum_(d) | x.flatten().mul_(2)
x.expand(2,*x.shape)[0].add_(1) | m.logical_not_() | x[m] = y | x[m] += 1 | x.where(x>0,y).mul_(2)
x.squeeze_() | x.transpose_(0,-1) | x.addcmul_(x,y) | z.mul_(2) | z.real.mul_(2)
x.swapaxes(0,-1)[0].fill_(1) | x.set_(y)
"""
ROWS = [
    [row.strip() for line in kind.strip().splitlines() for row in line.split(" | ")]
    for kind in (POINTWISE, CASTS, REDUCTIONS, VIEWS, INDICES, LAYERS, POINTWISE, VIEWS, WRITES)
]

# How the arguments p and q lie in memory that the caller owns.
FIRST = "u | u | u | u.mT | u[...,::2] | u[1:] | u.expand(2,*u.shape)"
SECOND = "w | w | w | w | u | u[1:] | u[:-1] | u.flatten()[::2] | w.permute(*range(w.dim())[::-1])"
SECOND += " | w.unfold(0,2,1) | w.sum() | u.mT"
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 16, 17]

DTYPES = {
    "x": [torch.float32, torch.float64, torch.float16, torch.bfloat16],
    "i": [torch.int64],
    "j": [torch.int64, torch.int32, torch.uint8],
    "m": [torch.bool],
    "z": [torch.complex64],
}
# In which order threads write to one place is nobody's promise.
BY_ANY_THREAD = re.compile(r"\.clamp\(0,\w+\.shape\[0\]-1\)\] = ")
# What autograd refuses after a write, which graphs do not refuse alike (docs/open.md).
MODIFIED = re.compile("modified inplace|modified by an inplace")
KNOWN = [*dict.fromkeys(dtype for kinds in DTYPES.values() for dtype in kinds)]


class Call(NamedTuple):
    """Memory that the arguments are views of, and the numbers."""

    memory: tuple[Tensor, ...]
    k: int
    s: float


def _filled(draw: random.Random, row: str, values: dict[str, Tensor]) -> str | None:
    """A row with names and numbers in it; None if no value is of such a kind."""
    given = {
        kind: draw.choice(names)
        for kind, dtypes in DTYPES.items()
        if (names := [name for name, value in values.items() if value.dtype in dtypes])
    }
    floats = [name for name, value in values.items() if value.dtype in DTYPES["x"]]
    if "x" in given:
        x, given["y"] = given["x"], draw.choice(floats)
        d = draw.randrange(max(values[x].dim(), 1))
        given |= {"d": str(d), "n": f"{x}.shape[{d}]"}
    given |= {name: str(draw.randrange(4)) for name in "ab"} | {"c": str(draw.choice([1, 2, 3]))}
    words = [word for word in re.split(r"((?<![\w.'])[a-z](?![\w=']))", row) if word]
    if any(word in "xydnijmz" and word not in given for word in words):
        return None
    return "".join(given.get(word, word) for word in words)


def _memory(draw: random.Random, dynamic: bool) -> list[Call]:
    """What three calls are given: of the same ranks and dtypes."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    names = [[draw.choice("rst") for _ in range(draw.choice([1, 2, 2, 3]))] for _ in range(2)]
    names[1] = names[0] if draw.random() < 0.6 else names[1]
    usual = draw.choice([torch.float32] * 6 + [*DTYPES["x"], torch.complex64])
    other = usual if draw.random() < 0.8 else draw.choice([*KNOWN])
    sizes = {name: draw.choice(SIZES[draw.random() < 0.97 :]) for name in "rst"}
    calls = []
    for _ in range(3):
        memory = tuple(
            (torch.randn([sizes[x] for x in axes], generator=generator) * 2).to(dtype)
            for axes, dtype in zip(names, (usual, other), strict=True)
        )
        calls.append(Call(memory, draw.choice([0, 1, 2, 3, 5]), draw.choice([0.0, 0.5, 1.5])))
        if dynamic:
            sizes |= {x: draw.choice(SIZES) for x in "rst" if draw.random() < 0.6}
    return calls


def chain(seed: int, dynamic: bool = False, device: str = "cpu") -> tuple[str, list[Call]]:
    """The source of a function `f` and of one that gives its arguments; what both are called on."""
    draw = random.Random(seed)
    calls, lines, wanted = _memory(draw, dynamic), list[str](), draw.choice([2, 3, 5, 8, 12])
    wild = draw.random() < 0.2  # infinities, NaN, no elements
    space: dict[str, Any] = {"torch": torch, "F": F}
    views = ", ".join(draw.choice(kinds.split(" | ")) for kinds in (FIRST, SECOND))
    try:
        u, w = (x.clone() for x in calls[0].memory)
        p, q = eval(views, dict(space), {"u": u, "w": w})
    except (RuntimeError, IndexError):
        views, (p, q) = "u, w", (u, w)
    space |= {"k": calls[0].k, "s": calls[0].s, "p": p, "q": q}
    values = {"p": p, "q": q}
    for _ in range(200):
        kind = draw.choice(ROWS)
        if kind is ROWS[-1] and any(map(_repeats, values.values())):
            continue  # in which order is nobody's promise
        text = _filled(draw, draw.choice(kind), values)
        name = f"v{len(lines)}"
        memory = [x for call in calls for x in call.memory]
        if "enable_gqa" in (text or "") and not all(x.numel() for x in (*memory, *values.values())):
            continue  # attention of no heads ends the process in torch 2.11
        text = text if text is None or re.search(r" [+*]?= ", text) else f"{name} = {text}"
        try:
            exec(text or "raise ValueError", space)
        except Exception:  # noqa: BLE001, S112  # sizes that do not fit
            continue
        value = space.get(name, p)
        is_kind = value.dtype in KNOWN and value.numel() <= LARGEST and value.dim() <= 4
        if not is_kind or not (wild or (value.numel() and _is_tame(value))):
            space.pop(name, None)
            continue
        values |= {name: value} if name in space else {}
        lines.append(f"    {text}\n")
        if len(lines) == wanted:
            break
    shown = [x for x in values if x == [*values][-1] or draw.random() < 0.3]
    source = f"def given(u, w):\n    return {views}\ndef f(p, q, k, s):\n{''.join(lines)}"
    source = f"{source}    return ({', '.join(shown)},)\n"
    if device != "cpu":
        source = re.sub(
            r"torch\.arange\(([^()]*)\)", rf"torch.arange(\1,device='{device}')", source
        )
        calls = [call._replace(memory=tuple(x.to(device) for x in call.memory)) for call in calls]
    return source, calls


def _repeats(x: Tensor) -> bool:
    """Whether elements share memory."""
    places = torch.arange(x.untyped_storage().nbytes()).as_strided(x.shape, x.stride())
    return places.unique().numel() < x.numel()


def _is_tame(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(x.isfinite().all() and x.abs().max() < 1e4)


def _functions(source: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, "<chain>", "exec"), names)
    return names["given"], names["f"]


def _run(given: Callable[..., Any], f: Callable[..., Any], call: Call, gradients: bool) -> Any:
    """Results, gradients, what was given afterwards, and who shares memory; or what was raised.

    No gradient is one of zeros (docs/open.md).
    """
    may = [x.is_floating_point() or x.is_complex() for x in call.memory]
    leaves = [
        x.clone().requires_grad_(gradients and own) for x, own in zip(call.memory, may, strict=True)
    ]
    memory = [x * 1 if x.requires_grad else x for x in leaves]
    try:
        args = given(*memory)
        found = f(*args, call.k, call.s)
        real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]
        sums = [
            (x.double() * torch.arange(x.numel(), device=x.device).cos().double().view_as(x)).sum()
            for x in real
            if x.requires_grad
        ]
        if sums:
            torch.stack(sums).sum().backward()
    except Exception as error:  # noqa: BLE001  # eager's and ours are compared
        return error
    again = [x is y for x in found for y in args]
    plain = [x.detach() for x in (*found, *memory)]
    return [
        *plain,
        *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves),
        [x.requires_grad for x in found],
        again,
        sharing([*args], [*found]),
    ]


def difference(
    source: str, calls: Sequence[Call], gradients: bool = False, **how: Any
) -> str | None:
    """Where kernels differ from eager; None if they don't."""
    given, eager = _functions(source)
    exact = re.sub(r"\.(float|half|bfloat16)\(\)", ".double()", source)
    compiled = fusee.compile(eager, **how)
    for number, call in enumerate(calls):
        with torch.set_grad_enabled(gradients):
            want = _run(given, eager, call, gradients)
            got = _run(given, compiled, call, gradients)
        if isinstance(want, Exception) or isinstance(got, Exception):
            told = [
                f"{type(x).__name__}: {x}" if isinstance(x, Exception) else "none"
                for x in (got, want)
            ]
            if type(want) in (type(got), NameError) or any(map(MODIFIED.search, told)):
                continue
            return f"call {number} raises {told[0]}\n  eager {told[1]}"

        def truth(call: Call = call, want: Any = want) -> Any:
            wide = call._replace(memory=in_float64(call.memory))
            found = _run(*_functions(exact), wide, gradients)
            return want if isinstance(found, Exception) else found

        try:
            assert_same(got, want, truth)
        except Mismatch as error:
            near = partial(_run, given, eager, gradients=gradients)
            least = torch.float32 if "float()" in source else None
            least = torch.bfloat16 if re.search("half|bfloat16", source) else least
            if not (may_be_chance(error) and _is_chance(got, want, truth(), near, call, least)):
                return f"call {number}: {error}"
    return None


def _is_chance(
    got: Any, want: Any, exact: Any, run: Callable[..., Any], call: Call, least: torch.dtype | None
) -> bool:
    """Whether eager is as far off on inputs that differ in the last place of `least`."""
    generator, others = torch.Generator().manual_seed(0), []

    def last_place(dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps

    for _ in range(8):
        near = [
            neighbour(x.to("cpu", max(least or x.dtype, x.dtype, key=last_place)), generator).to(x)
            if x.is_floating_point()
            else x
            for x in call.memory
        ]
        found = run(call=call._replace(memory=tuple(near)))
        others += [found] if isinstance(found, list) else []
    return all(
        torch.equal(got[k], x) or is_within(got[k], x, exact[k], [other[k] for other in others])
        for k, x in enumerate(want)
        if isinstance(x, Tensor)
    )


def _shrunk(lines: list[str], what: str, differs: Callable[[list[str]], str | None]) -> str:
    """What differs, and where, with as few lines and results as show it."""
    for name in re.findall(r"\w+(?=,)", lines[-1]):
        fewer = [*lines[:-1], re.sub(rf"\b{name}, ?", "", lines[-1])]
        if (still := differs(fewer)) is not None:
            lines, what = fewer, still
    for k in reversed(range(3, len(lines) - 1)):
        fewer = [*lines[:k], *lines[k + 1 :]]
        if (still := differs(fewer)) is not None:
            lines, what = fewer, still
    return "\n".join([what, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--dynamic", action="store_true", help="with open sizes")
    parser.add_argument("--gpu", action="store_true", help="kernels for GPUs, simulated")
    parser.add_argument("--device", default="cpu", help="where the arguments are")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.gpu:
        from fusee.targets import TARGETS
        from fusee.targets.cuda import PROFILE
        from tests.targets.cuda.simulated import Simulated

        TARGETS["cpu"] = Simulated(PROFILE)
    on_gpu = args.gpu or args.device != "cpu"
    how: Any = {"options": {"prices": False, "cache": not args.gpu}}
    how["dynamic"] = args.dynamic or None
    ends, seed, failed = time.monotonic() + args.seconds, args.first, 0
    while time.monotonic() < ends:
        source, calls = chain(seed, args.dynamic, args.device)
        if on_gpu and BY_ANY_THREAD.search(source):
            seed += 1
            continue

        def differs(lines: list[str], calls: list[Call] = calls) -> str | None:
            return difference("\n".join(lines) + "\n", calls, args.gradients, **how)

        what = differs(source.splitlines())
        if what is not None:
            failed += 1
            shapes = [[[*x.shape] for x in call.memory] for call in calls]
            kinds = [x.dtype for x in calls[0].memory]
            shrunk = _shrunk(source.splitlines(), what, differs)
            print(f"---- seed {seed}, {kinds} {shapes}\n{shrunk}", flush=True)
        seed += 1
    print(f"{seed - args.first} chains, {failed or 'none'} differ{'' if failed else 's'}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
