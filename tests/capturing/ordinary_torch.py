"""Ordinary programs, tensors and modules: each is a function of one tensor.

Written as models and libraries write them; what they do is compared with eager in test_ordinary.py.
"""

# mypy: ignore-errors
# ruff: noqa

import copy, collections, functools, math, sys, typing, types, itertools
import torch
from torch import nn, Tensor
import torch.nn.functional as F


class Lin(nn.Module):
    def __init__(s, n=3):
        super().__init__()
        s.l = nn.Linear(n, n)
        s.register_buffer("b", torch.ones(n))
        s.cfg = {"a": 1}

    def forward(s, x):
        return s.l(x) + s.b


class Many(nn.Module):
    def __init__(s):
        super().__init__()
        s.ls = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        s.ps = nn.ParameterList([torch.ones(3), torch.ones(3)])
        s.d = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ReLU()})
        s.pd = nn.ParameterDict({"w": torch.ones(3)})
        s.seq = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(s, x):
        for l in s.ls:
            x = l(x)
        for p in s.ps:
            x = x + p
        for k, m in s.d.items():
            x = m(x)
        x = x * s.pd["w"]
        return s.seq(x) + len(s.ls) + len(s.ps)


LIN = Lin()
MANY = Many()
LINH = Lin()
HK = []
LINH.register_forward_hook(lambda m, a, o: o * 2)
LINH.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
CONVV = nn.Conv2d(3, 4, 3, padding="valid").eval()
SCR = torch.jit.script(nn.ReLU())


@torch.jit.script
def scr(x: Tensor) -> Tensor:
    return x * 2


@torch.jit.script_if_tracing
def sit(x):
    return x + 1


LSTM = nn.LSTM(3, 4, batch_first=True).eval()
GRU = nn.GRU(3, 4, batch_first=True).eval()


def lin(x):
    return LIN(x)


def many(x):
    return MANY(x)


def hooks(x):
    return LINH(x)


def hook_inside(x):
    h = LIN.register_forward_hook(lambda m, a, o: o * 3)
    y = LIN(x)
    h.remove()
    return y + LIN(x)


def reg_buffer(x):
    m = Lin.__new__(Lin)
    nn.Module.__init__(m)
    m.register_buffer("q", x * 2)
    return m.q + 1


def make_module(x):
    m = nn.ReLU()
    return m(x)


def make_linear(x):
    torch.manual_seed(0)
    m = nn.Linear(3, 2)
    return m(x)


def buffer_write(x):
    LIN.b = LIN.b * 1
    return LIN(x)


def buffer_inplace(x):
    LIN.b.mul_(1)
    return LIN.b + x


def children(x):
    return (
        x,
        [n for n, _ in MANY.named_children()],
        sum(p.numel() for p in MANY.parameters()),
        len(list(MANY.modules())),
        next(MANY.parameters()).dtype,
        [n for n, p in LIN.named_parameters()],
        LIN.training,
    )


def first_param(x):
    return x.to(next(LIN.parameters()).dtype)


def apply_fn(x):
    c = []
    MANY.apply(lambda m: c.append(type(m).__name__))
    return x, len(c)


def state_dict(x):
    return x, list(LIN.state_dict())


def get_sub(x):
    return MANY.get_submodule("seq.0")(x), MANY.get_parameter("ls.0.weight").shape


def train_eval(x):
    LIN.eval()
    y = LIN(x)
    LIN.train()
    return y, LIN.training


def mod_repr(x):
    return x, repr(nn.ReLU()), str(LIN.l)


def seq_slice(x):
    return MANY.seq[:1](x), MANY.seq[-1](x), len(MANY.seq), MANY.ls[0](x), "a" in MANY.d


def conv_valid(x):
    return CONVV(torch.ones(1, 3, 8, 8) * x.sum())


def conv_list1(x):
    return (
        torch.conv2d(torch.ones(1, 3, 8, 8) * x.sum(), torch.ones(4, 3, 3, 3), None, [1], [0], [1]),
        F.avg_pool2d(torch.ones(1, 1, 4, 4) * x.sum(), [2]),
        F.max_pool2d(torch.ones(1, 1, 4, 4) * x.sum(), [2], (2,)),
    )


def conv_t1(x):
    return torch.conv_transpose2d(
        torch.ones(1, 3, 8, 8) * x.sum(), torch.ones(3, 4, 3, 3), None, [2], [0], [0]
    )


def conv_1d_valid(x):
    return (
        F.conv1d(torch.ones(1, 2, 8) * x.sum(), torch.ones(2, 2, 3), padding="valid"),
        F.conv3d(
            torch.ones(1, 1, 4, 4, 4) * x.sum(), torch.ones(1, 1, 2, 2, 2), padding="same", stride=1
        ),
        F.conv1d(torch.ones(1, 2, 8) * x.sum(), torch.ones(2, 2, 3), stride=(2,), padding=[1]),
    )


def pool_1(x):
    t = torch.ones(1, 1, 4, 4) * x.sum()
    return (
        F.avg_pool2d(t, (2,), (1,), (1,)),
        F.max_pool2d(t, (2,), padding=(1,)),
        F.lp_pool2d(t, 2, 2),
        F.adaptive_avg_pool2d(t, (2,)) if False else F.adaptive_avg_pool2d(t, 2),
        F.avg_pool3d(t[None], (2,)) if False else t,
    )


def unfold1(x):
    t = torch.ones(1, 1, 4, 4) * x.sum()
    return F.unfold(t, [2]), F.unfold(t, (2, 2), padding=(1,))


def script_fn(x):
    return scr(x) + 1


def script_mod(x):
    return SCR(x) + 1


def script_if(x):
    return sit(x) + 1


def nonzero_mid(x):
    y = (x > 0).nonzero()
    return y.shape[1], x * 2, torch.unique(x).numel()


def boolmask(x):
    y = x[x > 0]
    return y.sum() + x.sum()


def boolmask_set(x):
    y = x.clone()
    y[y > 0] = 0
    return y


def unique_it(x):
    u, i = torch.unique(torch.tensor([1, 2, 1]), return_inverse=True)
    return u, i, x * 2


def item_it(x):
    n = x.sum().item()
    return x * n


def item_branch(x):
    if x.sum() > 100:
        return x
    return x + 1


def tolist(x):
    return x.shape, [v * 2 for v in x[0].tolist()], x + 1


def data_set(x):
    y = x.clone()
    y.data = x * 3
    return y + 1


def data_read(x):
    return x.data + 1, x.detach() * 2


def data_mul(x):
    y = x.clone()
    y.data.mul_(2)
    return y


def req_grad(x):
    y = x.clone()
    y.requires_grad_()
    z = (y * 2).sum()
    return z.requires_grad


def req_grad2(x):
    y = (x * 2).requires_grad_(True)
    return y * 3


def req_grad3(x):
    y = x.detach().requires_grad_()
    return (y * y).sum()


def req_attr(x):
    y = x.clone()
    y.requires_grad = True
    return y * 2


def grad_read(x):
    return x.grad is None, x * 2


def gradfn(x):
    y = x * 2
    return y.grad_fn is None, x + 1, y.is_leaf


PAR = nn.Parameter(torch.ones(3))


def gradfn_p(x):
    y = PAR * x
    return y.grad_fn is not None, y.is_leaf, y


def gradfn_name(x):
    y = PAR * x
    return type(y.grad_fn).__name__, y


def hook_t(x):
    y = PAR * 2
    y.register_hook(lambda g: g * 2)
    return (y * x).sum()


def retain(x):
    y = PAR * x
    y.retain_grad()
    return y.sum()


def unsq(x):
    y = x.clone()
    y.unsqueeze_(0)
    return y + 1


def tr_(x):
    y = x.clone()
    y.t_()
    return y * 2


def squeeze_(x):
    y = x.clone()[None]
    y.squeeze_(0)
    return y


def resize_(x):
    y = torch.empty(0)
    y.resize_(2, 3).fill_(1)
    return y + x.sum()


def transpose_(x):
    y = x.clone()
    y.transpose_(0, 1)
    return y.contiguous(), y.stride()


def set_(x):
    y = torch.zeros(3)
    y.set_(x.clone())
    return y + 1


def swapax(x):
    y = x.clone()
    y.swapaxes_(0, 1)
    return y


def packed(x):
    p = nn.utils.rnn.pack_padded_sequence(
        x[None].repeat(2, 1, 1), torch.tensor([2, 1]), batch_first=True, enforce_sorted=False
    )
    o, h = LSTM(p)
    return nn.utils.rnn.pad_packed_sequence(o, batch_first=True)[0]


def pad_seq(x):
    return nn.utils.rnn.pad_sequence([x[0], x[0, :2]], batch_first=True)


def pack_seq(x):
    return nn.utils.rnn.pack_sequence([x[0], x[0, :2]]).data


def lstm(x):
    return LSTM(x[None])[0]


def gru(x):
    return GRU(x[None])[0]


def type_as(x):
    return (
        x.type_as(torch.ones(1, dtype=torch.float64)),
        x.type(torch.float16),
        x.type(),
        x.dtype.is_floating_point,
        torch.finfo(x.dtype).min,
    )


def to_all(x):
    return x.to("cpu", torch.float64), x.double().float(), x.to(x), x.cpu(), x.half().dtype


def dims(x):
    return (
        x.size(),
        x.shape[-1],
        x.numel(),
        x.dim(),
        len(x),
        x.stride(),
        x.is_contiguous(),
        x.storage_offset(),
        x.element_size(),
        x.shape == torch.Size([2, 3]),
        tuple(x.shape),
    )


def split_it(x):
    a, b = x.split([1, 2], dim=1)
    c, *d = x.chunk(3, 1)
    return a, b, c, d, x.unbind(0), torch.stack([*x])


def iter_t(x):
    s = 0
    for r in x:
        s = s + r
    return s, [r.sum() for r in x], len([*x])


def einsum(x):
    return torch.einsum("ij,kj->ik", x, x), torch.einsum("ij->j", [x])


def functional(x):
    return (
        F.softmax(x, -1),
        F.gelu(x),
        F.layer_norm(x, (3,)),
        F.pad(x, (1, 1)),
        F.interpolate(x[None, None], scale_factor=2),
        F.one_hot(torch.tensor([0, 1]), 3),
        F.cosine_similarity(x, x),
        F.normalize(x),
    )


def new_t(x):
    return (
        x.new_zeros(2),
        torch.full((2,), 3.0),
        torch.arange(3),
        torch.eye(2),
        torch.linspace(0, 1, 3),
        torch.tensor([1, 2]),
        torch.as_tensor([1.0]),
        torch.zeros_like(x),
        torch.tensor(x.shape),
    )


def mask(x):
    return (
        x.masked_fill(x > 0, 0.0),
        torch.where(x > 0, x, -x),
        torch.tril(x),
        x.clamp(min=0),
        x.gt(0).any(),
        x.isnan().sum(),
    )


def amp(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
    return y.dtype, y


def nograd(x):
    with torch.no_grad():
        y = x * 2
    with torch.enable_grad():
        z = y * PAR
    return z.requires_grad, z


@torch.no_grad()
def deco_nograd(x):
    return x * 2


def rand_seed(x):
    torch.manual_seed(3)
    return x + torch.rand(3), torch.randn_like(x), F.dropout(x, 0.5)


def gen_t(x):
    g = torch.Generator().manual_seed(1)
    return x + torch.rand(3, generator=g)


def autograd_in(x):
    y = PAR * x
    (g,) = torch.autograd.grad(y.sum(), PAR)
    return g


def ckpt(x):
    return torch.utils.checkpoint.checkpoint(lambda a: a.sin(), x, use_reentrant=False)


def vmap_it(x):
    return torch.vmap(lambda a: a * 2)(x)


def sdp(x):
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def mha(x):
    return nn.functional.multi_head_attention_forward if False else x


def index_put(x):
    y = x.clone()
    y[0] = 1
    y[:, 1] += 2
    y[[0, 1], [0, 1]] = 5
    y[..., -1] *= 2
    return y


def out_arg(x):
    o = torch.empty(2, 3)
    torch.add(x, 1, out=o)
    return o


def overlap(x):
    y = x.expand(4, 2, 3) if x.ndim == 2 else x
    return y.sum(0)


def inplace(x):
    y = x + 0
    y.add_(1).mul_(2)
    y += 1
    y[0].zero_()
    return y


def complex_it(x):
    c = torch.complex(x, x)
    return c.abs(), torch.view_as_real(c)


def fft(x):
    return torch.fft.rfft(x).abs()


def stft(x):
    return torch.stft(
        torch.ones(64) * x.sum(), 16, return_complex=True, window=torch.ones(16)
    ).abs()


def linalg(x):
    return torch.linalg.norm(x), torch.linalg.inv(x @ x.T + torch.eye(2))


def topk(x):
    v, i = x.topk(2)
    r = x.sort(descending=True)
    m = x.max(dim=1)
    return v, i, r.values, m.indices, m, torch.return_types.max


def cat_list(x):
    l = []
    [l.append(x * i) for i in range(3)]
    return torch.cat(l, 0), torch.stack(tuple(l))


def bool_t(x):
    if (x > 0).all():
        return x
    elif x.shape[0] == 2:
        return x - 1


def cache_attr(x):
    if not hasattr(LIN, "_c"):
        LIN._c = torch.zeros(3)
    return x + LIN._c


def dict_out(x):
    return {"loss": x.sum(), "logits": x, "meta": {"n": 2, "t": (x, [x + 1])}}


def size_math(x):
    b, n = x.shape
    return (
        x.view(b * n),
        x.reshape(b, -1),
        x.view(b, n // 1, 1).expand(-1, -1, 2),
        math.ceil(n / 2),
        x.new_ones(b, n + 1),
    )


def float_arg(x, s=0.5):
    return x * s**2 + float(x.shape[0]) / 3


def tensor_str(x):
    return x, str(x.shape), f"{tuple(x.shape)}"


def tensor_print(x):
    return f"{x}", x + 1


def cmp_t(x):
    return x == x, (x != 1).sum(), x is x, x in [x] if False else 1


def tensor_dict_key(x):
    d = {x: 1}
    return d[x], x + 1


def tensor_set(x):
    return len({id(x), id(x)}), x


def deepcopy_mod(x):
    m = copy.deepcopy(LIN)
    return m(x)


def deepcopy_t(x):
    return copy.deepcopy(x) + 1, copy.copy(x) * 2


def no_args():
    return torch.ones(2)


def param_make(x):
    p = nn.Parameter(x * 2)
    return p + 1


def init_it(x):
    y = torch.empty(2, 3)
    nn.init.ones_(y)
    nn.init.constant_(y, 2.0)
    return y + x


def is_comp(x):
    return x if torch.compiler.is_compiling() or True else x * 2


def finfo(x):
    return x.masked_fill(x < 0, torch.finfo(x.dtype).min), torch.iinfo(torch.int32).max


def dev(x):
    return (
        x.device.type,
        x.is_cuda,
        torch.device("cpu") == x.device,
        torch.zeros(2, device=x.device),
    )


def fn_attr(x):
    lin.calls = getattr(lin, "calls", 0)
    return x * lin.calls


def bf16(x):
    return x.bfloat16().float(), x.to(torch.float16) @ x.T.half()


def cumsum(x):
    return (
        x.cumsum(-1),
        x.flip(0),
        x.roll(1, 0),
        torch.tril_indices(2, 2),
        x.repeat_interleave(2, 0),
        x.gather(1, torch.zeros(2, 1, dtype=torch.long)),
    )


def meshgrid(x):
    a, b = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
    return (
        a + b,
        torch.cartesian_prod(torch.arange(2), torch.arange(2)),
        torch.broadcast_tensors(x, x[0]),
    )


def foreach(x):
    return torch._foreach_add([x, x], 1), torch.block_diag(x, x)


def builtin_dtypes(x):
    return (
        x.sum(dtype=float),
        torch.full_like(x, 2, dtype=int),
        torch.zeros(2, dtype=bool),
        x.to(float),
    )
