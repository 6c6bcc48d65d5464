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
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from tests.check import in_float64, sharing
from tests.compare import Mismatch, assert_same, is_within, may_be_chance, neighbour

__all__ = ["Call", "chain", "difference"]

LARGEST, MOST = 4000, 300_000  # elements, also where sizes are large


class Cubed(torch.autograd.Function):
    """Whose gradient is written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * x * 3


NAMES: dict[str, Any] = {"torch": torch, "F": F, "np": np, "Cubed": Cubed}

# Each row has all that it may be: x, y are float tensors, z is complex, i, j are integers (i of 64
# bits), m a mask; d an axis of x with n elements, o their order; a, b, c small numbers; k an
# integer and s a float of Python's that each call has its own of.
POINTWISE = """
x.sin() | x.relu() | x.tanh() | x*0.5 | x+y | x*y | x-y | torch.maximum(x,y) | torch.where(x>0,x,y)
x.sigmoid() | x*s | x.abs().sqrt() | F.gelu(x) | x/(y.abs()+1) | x.addcmul(x,y,value=0.5) | z.conj()
x.lerp(y,0.3) | x+k | j+k | x>0 | x.masked_fill(x>1,0.0) | torch.complex(x,x*0.5) | x.remainder(1.5)
x>y | x.clone() | x.contiguous() | i+a | i*2 | i//2 | j%3 | torch.div(x,y,rounding_mode='floor')
torch.copysign(x,y) | torch.where(m,x,y) | x**2 | i%3 | ~m | x+torch.tensor(2.0,dtype=torch.float64)
m&(x>0) | i.clamp(0,b) | x.clamp(-s,s) | torch.where(m,x,s) | torch.div(x,y,rounding_mode='trunc')
torch.where(m,j,k) | x>s | x*j | x+m | i<<1 | -j | j//2 | F.silu(x) | torch.polar(x.abs(),x) | x**k
F.softplus(x) | torch.where(m,x,j) | x.nan_to_num() | torch.atan2(x,y) | torch.logaddexp(x,y) | z*1j
x.exp().log1p() | j*j | i-j | z.real | z.imag | z.abs() | z*z | torch.div(j,3,rounding_mode='trunc')
z+x | z*s | j.bitwise_and(5) | x.round() | x/k | x.sign() | torch._foreach_lerp((x,),(y,),s)[0]
x.log() | x.reciprocal() | torch.fmin(x,y) | x.clamp(y,y+1) | torch._foreach_mul((x,y),2)[1] | j%-3
x.clamp(max=y) | torch.where(m,s,k) | x.where(m,0) | x+True | torch._foreach_norm((x,y))[0] | x//0.3
x*np.float32(1.5) | x+np.float64(0.3) | m+1 | x*(k>1) | j//3.0 | torch.addcdiv(x,y,y.abs()+1) | j**2
x**i.clamp(-2,3) | 2**x.clamp(-3,3) | x.abs()**0.5 | x.frexp()[0] | torch.heaviside(x,y) | m^(x>0)
torch.nextafter(x,y) | torch.gcd(j,i) | x/0 | x*1e-39 | x*1e30 | torch._neg_view(x) | z.conj().imag
F.elu(x,0.7) | z.conj()*z | z.imag.neg() | x.lerp(y,x)
i<<j%9 | j>>k | i//-3 | j*300 | i*2**40 | torch.fmod(j,-3) | i.pow(j.clamp(0,4)) | x.fmax(y) | m*j
torch.where(m,1,2.5) | x+torch.tensor(2) | torch.tensor(3.5)*j | x.pow(torch.tensor(2))
k**x.tanh()
z**2 | z.exp() | z.sgn() | x.hypot(y) | x.xlogy(y) | x.ldexp(j.clamp(-3,3)) | torch.full_like(x,s)
torch.special.entr(x.abs()) | torch.special.i0e(x) | torch.special.erfcx(x) | torch.sinc(x)
x.erfinv() | torch.special.xlog1py(x,y.abs()) | x.digamma() | x.logit(0.1)
torch.special.log_ndtr(x) | x.deg2rad() | torch.add(x,y,alpha=2) | torch.sub(x,j,alpha=k)
torch.rsub(x,s) | torch.clip(x,min=y) | x.signbit() | torch.float_power(x.abs(),2) | j.bitwise_not()
torch.true_divide(j,3) | x.isclose(y) | z.angle() | F.mish(x) | F.softsign(x) | F.hardsigmoid(x)
F.threshold(x,0.5,s) | F.rrelu(x) | F.tanhshrink(x) | torch.where(x>y,x,torch.tensor(k))
x.nan_to_num(nan=s,posinf=1.0) | torch.lcm(j,i) | x.cosh().acosh() | torch.rsqrt(x.abs()+1)
x.expm1() | x.frac() | x.trunc() | x.mvlgamma(1) | z.isfinite() | z*z.conj()
j//j.clamp(1,3) | (j>k)+(j<k) | m|(j>0) | m.logical_xor(x>0) | j.to(torch.uint8)-1
torch.maximum(j,i) | j.to(torch.uint8)*j | torch.where(x>0,s,x) | torch.where(x.isnan(),0,x)
x.where(m[...,:1],y[:1])
j.bitwise_left_shift(1) | j.to(torch.uint8)>>1 | m.to(torch.uint8)-m.to(torch.int8) | z/(z.abs()+1)
"""
CASTS = """
x.long() | x.half() | x.bfloat16() | x.float() | x.double() | x.to(torch.float8_e4m3fn).to(x.dtype)
j.float() | m.float() | m.long() | (x*3).int() | x.abs().to(torch.uint8) | z.to(torch.complex128)
j.int() | j.to(torch.uint8) | j.bool() | x.to(y.dtype) | x.float().sum() | (x*3).to(torch.int16)
x.type_as(y) | j.double() | j.to(torch.uint16) | x.to(torch.float8_e5m2).float() | x.to(torch.int8)
x.to(torch.complex64)
(x*1e10).int() | (i*1000).to(torch.int16) | j.sum(0,dtype=torch.int8) | x.isfinite()
x.round().view(torch.int16)
"""
REDUCTIONS = """
x.sum(d) | x.mean(d,keepdim=True) | x.amax(d) | x.softmax(d) | x.std(d,keepdim=True,correction=0)
x.cumsum(d) | x.log_softmax(d) | x@y | x.logsumexp(d,keepdim=True) | F.l1_loss(x,y,reduction='none')
x.norm(dim=d) | x.prod(d) | x.cummax(d)[0] | x.argmax(d) | torch.einsum('...i,...i->...',x,y) | o
x.sort(d)[0] | F.normalize(x,dim=d) | x.topk(min(n,2),d)[0] | torch.linalg.vector_norm(x,a,d)
m.any(0) | m.sum(0) | i.sum(0) | i.cumsum(0) | x@y.mT | j.amax(0) | x.sum(d,dtype=torch.float64)
x.sum() | j.prod(0) | x.mean((0,-1)) | x.var(d) | x.median(d)[0] | j.sort(0,descending=True)[1]
x.aminmax()[0] | j.float().mean() | m.all() | x.cumprod(d) | F.cosine_similarity(x,y,d) | z.prod(0)
z.sum(0) | torch.cdist(x,y) | x.max(d)[1] | x.min() | x.std() | torch.trapezoid(x,dim=d)
F.mse_loss(x,y) | x.logcumsumexp(d) | x.diff(dim=d) | x.kthvalue(1,d)[0] | torch.histc(x,4,-2,2)
x.cummin(d)[0] | j.cumsum(d) | x.nansum(d) | x.quantile(0.3,d) | x.renorm(2,d,1.0) | x.mode(d)[0]
x.flatten().quantile(torch.tensor([0.1,0.7],dtype=x.dtype))
F.binary_cross_entropy_with_logits(x,y.sigmoid())
F.nll_loss(x,i.clamp(0,x.shape[1]-1),ignore_index=1)
x.flip(d).cumsum(d) | x.topk(min(n,3),d,largest=False)[1] | j.cummax(0)[1] | z.cumsum(0) | z@z.mT
torch.var_mean(x,d)[1] | x.softmax(d,dtype=torch.float64) | x.diff(n=2,dim=d) | x.count_nonzero(d)
torch.std_mean(x,d)[0] | x.argmin(d,keepdim=True) | x.nanmedian(d)[0] | x.dist(y)
x.nanquantile(0.5,d) | x.msort() | torch.linalg.norm(x) | x.logsumexp((0,-1))
x.mean(d,dtype=torch.float64) | torch.cov(x) | torch.corrcoef(x) | x.sum((),keepdim=True) | x.all(d)
F.softmin(x,d) | x.isin(y.flatten()) | torch.linalg.matrix_norm(x) | x.trace()
torch.tensordot(x,y,1) | torch.inner(x,y) | torch.kron(x,y)
F.kl_div(x,y.softmax(-1),reduction='batchmean') | F.smooth_l1_loss(x,y,beta=0.5) | F.pdist(x)
x.vdot(y) | F.triplet_margin_loss(x,y,x*2) | F.gaussian_nll_loss(x,y,y.abs())
F.cosine_embedding_loss(x,y,x[:,0].sign()) | F.multi_margin_loss(x,i.clamp(0,x.shape[1]-1))
F.soft_margin_loss(x,y.sign()) | torch.cumulative_trapezoid(x,dim=d)
F.smooth_l1_loss(x,y,reduction='sum') | F.margin_ranking_loss(x,y,x.sign(),0.3,reduction='none')
F.kl_div(x.log_softmax(-1),y.log_softmax(-1),reduction='none',log_target=True) | sum(x.unbind(d))
F.nll_loss(x,i.clamp(0,x.shape[1]-1),reduction='none') | F.hinge_embedding_loss(x,y.sign())
F.cross_entropy(x,y.softmax(1),label_smoothing=0.1,reduction='sum') | j.to(torch.uint8).sum(0)
x.unique(return_inverse=True)[1] | torch.linalg.matrix_norm(x,'nuc') | x.sort(d,stable=True)[1]
F.multilabel_soft_margin_loss(x,y.sigmoid(),reduction='none')
"""
VIEWS = """
x.flip(d) | x.roll(a-1,d) | x.transpose(d,0) | x.unsqueeze(0) | torch.meshgrid(x,y,indexing='ij')[0]
x[:1].expand(c,*x.shape[1:]) | x[k:] | x.unsqueeze(-1) | x.flatten() | torch.cat((x,y.to(x.dtype)))
x.mT | x.select(d,a%n) | x.narrow(d,a%n,1) | torch.stack((x,y),-1) | torch.broadcast_tensors(x,y)[0]
x[...,a:] | x[...,::c] | x[...,:-1] | x.expand(2,*x.shape) | F.pad(x[None],(1,1),mode='circular')[0]
x.tile(1,c) | x.repeat_interleave(2,d) | x.diagonal() | x.tril(a-1) | torch.cat((x,y,x),-1)[...,1:]
torch.diag_embed(x) | torch.cat((x,y),d) | torch.cat((x,x.flip(d)),d) | x.slice_scatter(x[1:]*2,0,1)
torch.stack((x,x*2)) | x.T | x.unfold(d,2,1) | F.pad(x,(a,b)) | x.diagonal_scatter(x.diagonal()*2)
F.pad(x,(a-1,b),value=1.5) | F.pad(x,(a,b,c,0)) | F.pad(i,(1,2)) | x.permute(*range(x.dim())[::-1])
F.pad(x[None],(a%2,1),mode='reflect')[0] | F.pad(x[None],(1,a%2),mode='replicate')[0] | x.roll(k,d)
x.squeeze() | x.unbind(d)[-1] | x.chunk(2,d)[-1] | x[...,0] | x.as_strided((2,3),(1,2),a)
x.split(2,d)[0] | x.movedim(d,0) | x.view(-1) | x.reshape(n,-1) | torch.stack((x,y.double()))
x.swapaxes(0,-1) | x.detach() | x.as_strided((2,2),(1,1)) | x.to(memory_format=torch.channels_last)
x.rot90() | x.new_zeros(n,2) | x.unfold(d,3,2) | z.mT.conj() | x.unflatten(d,(-1,2))
x.contiguous(memory_format=torch.channels_last_3d) | x[::2].flip(0) | torch.view_as_real(z)
x.flip(0).flip(-1) | torch.view_as_complex(torch.stack((x,x),-1)) | torch.cat((x,j))
x.select_scatter(x.select(d,0)*2,d,a%n)
x.hsplit(2)[0] | x.tensor_split(2,d)[1] | torch.atleast_3d(x) | torch.hstack((x,y))
torch.vstack((x,y)) | torch.block_diag(x,y) | x.triu(k) | x.fliplr() | torch.column_stack((x,y))
x.view_as(y) | x.ravel() | x.movedim((0,1),(1,0)) | x.moveaxis(d,-1) | x.adjoint()
x.narrow_copy(d,0,1) | x.expand_as(y) | x.repeat(2,1,1) | x.diagonal(1,0,-1)
x.unfold(0,2,1)[...,0] | torch.dstack((x,y)) | x[None,...,None] | x.select(-1,-1)
x.view(torch.int32).view(torch.float32) | x[...,None].squeeze(-1).T | x.unsafe_chunk(2,d)[0]
x.unbind()[0]
torch.stack(x.unbind(0)[::-1]) | torch.cat([t*2 for t in x.split(2,d)],d) | torch.combinations(x)
torch.stack([t.sum() for t in x]) | F.pad(x,(1,1,1,1),mode='constant',value=s) | x.view(x.shape)
"""
INDICES = """
torch.arange(n) | torch.arange(n).flip(0) | torch.arange(n)//2 | x.index_fill(d,torch.arange(1),0.5)
x[torch.arange(x.shape[0])] | x[m] | x.index_select(d,torch.arange(n).roll(1)) | torch.where(x>0)[0]
x.gather(d,o) | x.nonzero() | x[i.clamp(0,x.shape[0]-1)] | x.index_copy(d,torch.arange(n).flip(0),x)
F.embedding(i.clamp(0,x.shape[0]-1),x) | x.take(i.clamp(0,x.numel()-1)) | i.bincount(minlength=3)
torch.zeros_like(x).scatter_add(d,o,x) | torch.zeros_like(x).index_add(d,torch.arange(n)//2,x)
F.one_hot(torch.arange(n)%3,3).float() | x[m,...] | x[i%x.shape[0],0] | x[:,None,i%x.shape[-1]]
x.scatter_reduce(d,o//2,x,'amax',include_self=False) | x.scatter_reduce(d,o//2,x,'mean') | x[i<2]
x[...,i.clamp(0,x.shape[-1]-1)] | x.index_put((torch.arange(x.shape[0])//2,),x,accumulate=True)
x.masked_scatter(m,y) | x.scatter(d,o,s) | x.take_along_dim(o,d) | x.scatter_reduce(d,o//2,x,'prod')
torch.searchsorted(x.sort(-1)[0],x) | torch.bucketize(x,torch.arange(3.)) | x[torch.arange(n)%2==0]
x.index_reduce(d,torch.arange(n)//2,x,'amax') | x.scatter(d,o//2,y,reduce='add') | x[:,i%x.shape[1]]
torch.searchsorted(x,x,sorter=x.argsort(dim=-1,stable=True),side='right') | j.unique_consecutive()
x[torch.tensor(0)] | torch.bucketize(x,y.flatten().sort()[0],right=True,out_int32=True) | x.unique()
i.bincount(x.flatten()[:i.numel()],3) | x[i%x.shape[0],:,i%x.shape[-1]] | x[x.argmax(0)%n]
x.put(i%x.numel(),x.flatten()[:i.numel()]) | x.index_add(d,torch.arange(n).flip(0),y,alpha=2)
x[-1,...,[0,0]] | F.embedding_bag((i%x.shape[0]).flatten()[None],x,mode='mean') | o.argsort(d)
x.unique(dim=d)[:1] | j.unique(return_counts=True)[1] | x[m.nonzero(as_tuple=True)] | x[:,m[0]]
x.index_reduce(d,torch.arange(n)//2,x,'mean') | x.scatter_reduce(d,o//2,x,'amin') | x[None,m]
"""
LAYERS = """
F.layer_norm(x,x.shape[-1:]) | F.layer_norm(x,x.shape[-1:],y.flatten()[:x.shape[-1]],None,1e-3)
F.rms_norm(x,x.shape[-1:]) | F.batch_norm(x,None,None,training=True) | F.adaptive_avg_pool1d(x,b+1)
F.group_norm(x[None],1)[0] | F.instance_norm(x[None])[0] | F.scaled_dot_product_attention(x,y,y)
F.batch_norm(x,x.new_zeros(x.shape[1]),x.new_ones(x.shape[1])) | F.adaptive_avg_pool2d(x,(a+1,c))
F.conv1d(x.flatten()[None,None],y.flatten()[:3][None,None],stride=c,padding=a)[0] | F.hardswish(x)
F.glu(x,d) | F.conv2d(x[None],y.flatten()[:4*x.shape[0]].view(1,-1,2,2),padding=a,dilation=c)[0]
F.linear(x,y) | F.conv_transpose1d(x.flatten()[None,None],y.flatten()[:3][None,None],stride=c)[0]
F.conv2d(x[None],y.flatten()[:4*x.shape[0]].view(-1,1,2,2),stride=c,groups=x.shape[0])[0]
F.max_pool1d(x,2,1,a%2) | F.avg_pool1d(x,3,c,1) | F.max_pool2d(x[None],2,c,a%2,ceil_mode=True)[0]
F.avg_pool2d(x[None],2,c,a%2,ceil_mode=True,count_include_pad=False)[0] | F.adaptive_max_pool1d(x,c)
F.lp_pool1d(x,2,2) | F.interpolate(x.flatten()[None,None],scale_factor=1.5,mode='nearest')[0,0]
F.bilinear(x,x,y) | F.interpolate(x.flatten()[None,None],scale_factor=0.5,mode='linear')[0,0]
F.interpolate(x[None],scale_factor=2,mode='bilinear',align_corners=True)[0] | F.avg_pool3d(x,2,c)
F.interpolate(x[None],size=(a+1,b+2),mode='bicubic')[0] | F.cross_entropy(x,i.clamp(0,x.shape[1]-1))
F.interpolate(x[None],size=(c,b+1),mode='area')[0] | F.pixel_shuffle(x.expand(4,*x.shape[1:]),2)
F.interpolate(x[None],size=(b+2,c),mode='bilinear')[0] | F.unfold(x[None],2,padding=1)[0]
F.interpolate(x[None],c+1,mode='nearest-exact')[0] | F.max_pool3d(x,2,c,a%2)
F.interpolate(x[None],scale_factor=0.7,mode='bilinear',antialias=True)[0] | F.max_pool2d(x,2,c,a%2)
F.scaled_dot_product_attention(x,x,x,is_causal=True) | F.prelu(x,y.flatten()[:1])
F.scaled_dot_product_attention(x[None],x[None],x[None],attn_mask=m)[0]
F.conv2d(x,y.flatten()[:3*x.shape[1]].view(3,-1,1,1),x.flatten()[:3])
F.scaled_dot_product_attention(torch.cat((x,x))[None],x[None],x[None],enable_gqa=True)[0]
F.grid_sample(x[None],x.tanh()[:1,:,:2,None].transpose(2,3),align_corners=False)[0]
F.conv2d(x[None],y.flatten()[:9*x.shape[0]].view(1,-1,3,3),padding='same')[0]
F.conv3d(x[None],y.flatten()[:8*x.shape[0]].view(1,-1,2,2,2))[0]
F.conv_transpose2d(x,y.flatten()[:4*x.shape[1]].view(-1,1,2,2),stride=c)
F.fold(F.unfold(x[None],2),x.shape[-2:],2)[0] | F.max_pool2d(x,2,return_indices=True)[1]
torch.gru_cell(x,x,(x.mT@x).tile(3,1),(x.mT@x).tile(3,1))
torch.lstm_cell(x,(x,x),(x.mT@x).tile(4,1),(x.mT@x).tile(4,1))[1]
F.interpolate(x,size=c+1,mode='trilinear') | F.interpolate(x,c+2,mode='bicubic',align_corners=True)
F.grid_sample(x,x.tanh().movedim(1,-1)[:,:2,:,:2],'nearest','border')
F.scaled_dot_product_attention(x,y,x,attn_mask=y@y.mT)
F.max_unpool1d(*F.max_pool1d(x,2,return_indices=True),2)
F.max_pool2d(x.contiguous(memory_format=torch.channels_last),2,2) | F.huber_loss(x,y)
F.celu(x,0.5)
F.group_norm(x.contiguous(memory_format=torch.channels_last),1) | F.conv1d(x,x[:2,:,:2])
F.pad(x,(1,-1))
(lambda l: l(x.T).T+l.running_mean.sum())(torch.nn.BatchNorm1d(x.shape[0],dtype=x.dtype))
F.local_response_norm(x[None],2)[0]
F.channel_shuffle(x[None],1)[0] | F.max_pool1d(x.mT,2) | F.lp_pool2d(x[None],2,2)[0]
F.adaptive_max_pool2d(x,(1,c)) | F.feature_alpha_dropout(x,0.0)
F.affine_grid(x.flatten()[:6].view(1,2,3),(1,1,2,3),align_corners=True)
F.conv1d(x,x[:2,:,:1],dilation=c)
F.conv_transpose2d(x[None],y.flatten()[:4*x.shape[0]].view(-1,1,2,2),padding=1,output_padding=0)[0]
F.multilabel_margin_loss(x,i[:1].expand(x.shape)%1) | F.poisson_nll_loss(x,y.abs())
"""
WRITES = """
x.mul_(0.5) | x.add_(y) | x[1:].mul_(2) | x[...,::2].add_(1) | torch.cat((x,y),d,out=x.new_empty(0))
x.index_fill_(d,torch.arange(1),0.5) | x.select(d,0).copy_(y) | torch.mul(x,y,out=x.new_empty(0))
x.relu_() | x.mul_(s) | x.masked_fill_(x>1,0.0) | x.masked_scatter_(m,y) | x.where(x>0,y).mul_(2)
x.zero_() | x.fill_(s) | x.T.tanh_() | x[...,a:] = 0.5 | x[x>0] = 0.1 | x.swapaxes(0,-1)[0].fill_(1)
x[i.clamp(0,x.shape[0]-1)] = y | x[0] = x[-1] | torch.add(x,y,out=x) | x.copy_(torch.randn(x.shape))
torch.clamp(x,-1,s,out=y[:]) | torch.sin(x,out=y) | x.copy_(y) | torch.sum(x,d,out=x.new_empty(0))
x.clamp_(-1,1) | x.t_() | torch.matmul(x,x.mT,out=x.new_empty(0)) | torch._foreach_mul_((x,y),(y,y))
x.unsqueeze_(0) | x += y | x.scatter_add_(d,o,y) | i.add_(k) | x.scatter_reduce_(d,o//2,x*2,'prod')
x.diagonal().add_(1) | x.index_put_((i%x.shape[0],),y,accumulate=True) | torch.where(x>0,x,y,out=x)
x.index_copy_(d,torch.arange(n).flip(0),y) | x.view(-1)[a] = s | x.expand(2,*x.shape)[0].add_(1)
x[k:] = y | j *= 2 | x.cumsum_(d) | x.flatten().mul_(2) | x[m] = y | torch._foreach_copy_((x,),(y,))
m.logical_not_() | x[m] += 1 | x.squeeze_() | x.transpose_(0,-1) | F.dropout(x,0.4,inplace=True)
x.addcmul_(x,y) | z.mul_(2) | z.real.mul_(2) | x.set_(y) | x[...,0],x[...,-1] = x[...,-1],x[...,0]
x[1:][...,1:].add_(1) | x.mT[0].mul_(2) | x[::2][1:].copy_(y) | torch._foreach_add_((x,y),s)
x.unfold(d,2,2).mul_(2) | j.add_(j) | torch.cumsum(x,d,out=x) | x -= x
x.swapaxes_(0,-1).mul_(2) | torch.exp(x,out=y.mT) | x.T.copy_(y*2) | x[i%x.shape[0],:1] -= 1
torch.max(x,d,out=(x.new_empty(0),torch.empty(0,dtype=torch.long)))[0] | x.bernoulli_(0.4)
torch.index_select(x,d,torch.arange(n),out=x.new_empty(0)) | x.unsqueeze(0).squeeze(-1).t_().add_(1)
F.batch_norm(x.clone(),*y.detach().flatten()[:2*x.shape[1]].chunk(2),training=True) | x.data.mul_(2)
x.lerp_(y,s) | z.imag.copy_(x) | x.put_(i%x.numel(),x.flatten()[:i.numel()]*2) | x[m],y[m] = s,0
x.index_reduce_(d,torch.arange(n),y,'amin') | x.resize_(1,n)
torch.sort(x,dim=d,out=(x,torch.empty(0,dtype=torch.long)))
x[1:] = x[:-1].clone() | x[1:] += x[:-1] | x.copy_(x.flip(d)) | x.flip(0).masked_fill_(m,s)
j <<= 1
x[...,::2].masked_fill_(m[...,::2],k) | x[:,0] = y[:,0] | x[~m] *= 2 | m ^= x>0 | j -= m | x **= 2
torch.view_as_real(z)[...,0].zero_() | x.view(-1)[1:].copy_(x.view(-1)[:-1].clone()) | j //= -2
z += x
torch.where(m,x,y,out=y) | torch._foreach_lerp_((x,),(y,),s) | x.add_(y,alpha=k)
x.fill_diagonal_(s)
x.view(-1)[::2].view(-1).mul_(2) | x.T[1:].T.add_(s) | x.unbind(0)[0].mul_(2)
x.chunk(2,d)[0].zero_() | torch.add(x,y,alpha=2,out=x.new_empty(y.shape)) | x.squeeze(0).add_(1)
x.sub_(y,alpha=2) | x.atan2_(y) | x.select(d,0).unsqueeze(0).exp_() | x.mT.diagonal().fill_(s)
x.clamp_(min=y) | x.tril_() | x.triu_(1)
x.swapdims(0,-1)[...,::2].copy_(x.swapdims(0,-1)[...,::2]*2)
x.index_add_(d,torch.arange(n),y,alpha=s) | torch.sub(x,y,out=x[:])
torch.mm(x,x.mT,out=x.new_empty(0)) | x.hypot_(y) | x.floor_divide_(2) | x.xlogy_(y)
x.addcdiv_(x,y.abs()+1,value=s) | x.sinh_() | x.masked_fill_(m,torch.tensor(k)) | j.bitwise_xor_(3)
x.nan_to_num_() | torch.stack((x,y),out=x.new_empty(0)) | x.scatter_(d,o,y)
x.scatter_(d,o,k,reduce='multiply') | x.div_(k+1,rounding_mode='floor')
torch.topk(x,1,d,out=(x.new_empty(0),torch.empty(0,dtype=torch.long)))[0]
x.masked_fill_(m[...,:1],s) | x[...,0] -= y[...,0] | x[:,None].squeeze(1).mul_(2) | j &= 3 | j |= 1
x.view(-1)[i%x.numel()] = s | x.index_fill_(d,i.flatten()[:1]%n,s) | x.mT.select(0,0).fill_(s)
x.select(d,-1).add_(x.select(d,0)) | z.real[...,0].fill_(s) | j %= 3 | x.split(2,d)[-1].neg_()
x.index_put_((i%x.shape[0],),x.new_full((),s)) | x.scatter_(d,o[:1],s)
[t.mul_(s) for t in x.unbind()]
"""
PRODUCTS = """
torch.einsum('...ij,...kj,...kl->...il',x,y,y) | torch.einsum('ij,jk,ki->',x,x.mT,x@x.mT) | j@j.mT
x@x[...,0,:] | torch.linalg.inv(x@x.mT+torch.eye(x.shape[-2])) | torch.baddbmm(x,x,x.mT,alpha=2)
torch.linalg.qr(x)[1].abs() | torch.linalg.solve(x@x.mT+torch.eye(x.shape[-2]),x)
torch.linalg.cholesky(x@x.mT+torch.eye(x.shape[-2])) | torch.linalg.eigvalsh(x@x.mT)
torch.linalg.slogdet(x)[1] | torch.fft.fft(x,dim=d) | torch.addmm(y,x,x.mT,beta=s)
torch.linalg.solve_triangular(x.triu()+torch.eye(n),x,upper=True) | torch.fft.irfft(z)
(lambda e: (e[1]*e[0][...,None,:])@e[1].mT)(torch.linalg.eigh(x@x.mT)) | torch.fft.rfft(x)
torch.fft.rfft(x,n=k+2,norm='ortho') | torch.fft.hfft(z)
torch.baddbmm(x.mT,x,x,beta=s) | torch.addbmm(x[0],x,x.mT) | torch.linalg.multi_dot((x,x.mT,x))
x.matrix_power(2) | torch.addmv(x[...,0],x,y[0],alpha=2) | torch.addr(x,x[:,0],x[0])
torch.linalg.pinv(x@x.mT) | torch.bmm(x,y.mT) | torch.linalg.det(x@x.mT) | torch.fft.fft2(x).real
torch.fft.fftshift(x,d) | torch.fft.ihfft(x) | torch.chain_matmul(x,x.mT,x)
torch.linalg.cross(x[...,:3],y[...,:3]) | torch.fft.irfft(torch.fft.rfft(x),n=x.shape[-1])
torch.linalg.matrix_exp(x*0.1) | torch.linalg.vander(x[:2]) | torch.linalg.svdvals(x)
torch.einsum('ij->ji',x) | torch.einsum('...ii->...i',x)
torch.einsum('i...,i...,j...->j...',x,y,x)
torch.linalg.lu_factor(x@x.mT+torch.eye(x.shape[-2]))[0]
"""
CONTEXTS = """
with torch.autocast('cpu',dtype=torch.bfloat16): x@y.mT | with torch.no_grad(): x*2
with torch.autocast('cpu',dtype=torch.bfloat16): F.linear(x,y,y[...,0])+x | torch.randint(0,3,(n,))
torch.func.grad(lambda t: (t*t*y).sum())(x) | F.dropout1d(x,0.4) | torch.vmap(lambda t, r: t@r)(x,y)
F.dropout(x,0.3) | with torch.autocast('cpu',dtype=torch.float16): (x@x.mT).softmax(-1)@x
torch.rand_like(x,dtype=torch.float32).to(x.dtype) | torch.func.jvp(torch.tanh,(x,),(y,))[1]
with torch.autocast('cpu',dtype=torch.bfloat16): F.scaled_dot_product_attention(x,x,x)
with torch.autocast('cpu',dtype=torch.bfloat16): F.layer_norm(F.linear(x,x),x.shape[-2:-1])
with torch.enable_grad(): torch.autograd.grad(((t := x.detach().requires_grad_())**3*x).sum(),t)[0]
torch.vmap(lambda t: (t*y).sum())(x) | torch.randn(n,2) | torch.func.vjp(torch.sin,x)[1](y)[0]
torch.randperm(n) | F.alpha_dropout(x,0.3,True) | torch.bernoulli(x.to(torch.float32).sigmoid())
torch.func.grad(lambda t: torch.func.grad(lambda r: (r*r*t.sin()).sum())(x).sum())(x)
torch.multinomial(x.to(torch.float32).abs()+0.1,1)
F.scaled_dot_product_attention(x,x,x,dropout_p=0.3)
F.dropout(x,1.0) | torch.vmap(lambda t: t.cumsum(0).flip(0))(x)
torch.vmap(torch.sort,in_dims=d)(x)[0]
torch.vmap(lambda t: t.clone().add_(1).mul_(t),out_dims=-1)(x)
torch.func.jacrev(lambda t: t.sum(0))(x)
torch.vmap(torch.func.grad(lambda t: t.prod()))(x) | torch.vmap(lambda t: t.masked_fill(t>0,s))(x)
with torch.autocast('cpu',dtype=torch.bfloat16): x.cumsum(d)@y.mT | with torch.no_grad(): x.mul_(s)
with torch.autocast('cpu',dtype=torch.bfloat16): torch.cat((x@x.mT,(x@x.mT).float()))
torch.utils.checkpoint.checkpoint(lambda t: (t*y).sin()*t,x,use_reentrant=False) | Cubed.apply(x)
(lambda t: t.add_(1)+t.detach())(x*1)
(lambda l: l(x)+l(y))(torch.nn.PReLU(device=x.device,dtype=x.dtype))
torch.vmap(lambda t: t.index_select(0,torch.arange(1)))(x) | Cubed.apply(x.detach()*y).mT
with torch.no_grad(): x[...,0]*y[...,0] | torch.vmap(lambda t, r: torch.where(t>0,t,r))(x,y)
torch.utils.checkpoint.checkpoint(lambda t: t.softmax(-1)@t.mT,x*2,use_reentrant=False)
torch.nn.LayerNorm(x.shape[-1],dtype=x.dtype)(x)
torch.func.hessian(lambda t: t.pow(3).sum())(x[0])
"""
AGAIN = POINTWISE, VIEWS, WRITES, WRITES  # these are drawn more often
ROWS = [
    [row.strip() for line in kind.strip().splitlines() for row in line.split(" | ")]
    for kind in (POINTWISE, CASTS, REDUCTIONS, VIEWS, INDICES, LAYERS, PRODUCTS, CONTEXTS, *AGAIN)
]

# How the arguments p and q lie in memory that the caller owns.
FIRST = "u | u | u | u.mT | u[...,::2] | u[1:] | u.expand(2,*u.shape)"
SECOND = "w | w | w | w | u | u[1:] | u[:-1] | u.flatten()[::2] | w.permute(*range(w.dim())[::-1])"
SECOND += " | w.unfold(0,2,1) | w.sum() | u.mT | u.detach() | w.detach() | w[...,0].conj()"
OTHERS = (
    " | u if k%2 else u.mT.contiguous().mT | torch._neg_view(u) | u[k%2:] | u.conj() | u.flip(0)"
)
OTHERS += " | u.flip(0) | u.movedim(1,-1).contiguous().movedim(-1,1) | u.real | u.imag"
FIRST, SECOND = FIRST + OTHERS, SECOND + re.sub(r"\bu\b", "w", OTHERS)
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 16, 17]
LARGE = [1, 2, 3, 16, 31, 64, 100, 129, 257, 512, 1000, 4097]

DTYPES = {
    "x": [torch.float32, torch.float64, torch.float16, torch.bfloat16],
    "i": [torch.int64],
    "j": [torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16, torch.uint16],
    "m": [torch.bool],
    "z": [torch.complex64, torch.complex128],
}
# On GPUs: in which order threads write to one place is nobody's promise, nor what an integer is of
# a float beyond it, or what memory holds that grows; a GPU of ATen's refuses most of uint16.
BY_ANY_THREAD = re.compile(
    r"\.clamp\(0,\w+\.shape\[0\]-1\)\] = |include_self=False|\.put_?\(|\*1e10\)\.int\("
    r"|_foreach_\w+_\(\(|\[1:\] \+= |, ?out=\w+\.mT\)|\.resize_\(|uint16"
)
# What autograd refuses after a write, which graphs do not refuse alike (docs/open.md); what eager
# alone cannot do.
MODIFIED = re.compile(
    "modified inplace|modified by an inplace|returned an invalid gradient|MKL FFT"
    "|_foreach_copy_ is not implemented"
)
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
        given["o"] = f"{x}.argsort(dim={d},stable=True)"
    given |= {name: str(draw.randrange(4)) for name in "ab"} | {"c": str(draw.choice([1, 2, 3]))}
    words = [word for word in re.split(r"((?<![\w.'])[a-z](?![\w=']))", row) if word]
    if any(word in "xydnoijmz" and word not in given for word in words):
        return None
    return "".join(given.get(word, word) for word in words)


def _memory(draw: random.Random, dynamic: bool, large: bool) -> list[Call]:
    """What three calls are given: of the same ranks and dtypes."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    names = [
        [draw.choice("rst") for _ in range(draw.choice([0, *[1, 2, 2, 3] * 4, 4, 4, 5]))]
        for _ in range(2)
    ]
    names[1] = names[0] if draw.random() < 0.6 else names[1]
    usual = draw.choice([torch.float32] * 6 + [*DTYPES["x"], torch.complex64])
    other = usual if draw.random() < 0.8 else draw.choice([*KNOWN])
    few = {name: draw.choice(SIZES[draw.random() < 0.97 :]) for name in "rst"}
    sizes = {name: draw.choice(LARGE) for name in "rst"} if large else few
    calls = []
    for _ in range(3):
        while max(math.prod(sizes[x] for x in axes) for axes in names) > MOST:
            sizes[max(sizes, key=sizes.__getitem__)] //= 2
        memory = tuple(
            (torch.randn([sizes[x] for x in axes], generator=generator) * 2).to(dtype)
            for axes, dtype in zip(names, (usual, other), strict=True)
        )
        calls.append(Call(memory, draw.choice([0, 1, 2, 3, 5]), draw.choice([0.0, 0.5, 1.5])))
        if dynamic:
            others = LARGE if large else SIZES
            sizes |= {x: draw.choice(others) for x in "rst" if draw.random() < 0.6}
    return calls


def chain(
    seed: int, dynamic: bool = False, device: str = "cpu", large: bool = False
) -> tuple[str, list[Call]]:
    """The source of a function `f` and of one that gives its arguments; what both are called on."""
    draw = random.Random(seed)
    calls, lines, wanted = _memory(draw, dynamic, large), list[str](), draw.choice([2, 3, 5, 8, 12])
    wild = draw.random() < 0.2  # infinities, NaN, no elements
    space = dict(NAMES)
    views = ", ".join(draw.choice(kinds.split(" | ")) for kinds in (FIRST, SECOND))
    try:
        u, w = (x.clone() for x in calls[0].memory)
        p, q = eval(views, dict(space), {"u": u, "w": w, "k": calls[0].k})
        if any(x.is_neg() and x.dtype in (torch.bool, torch.uint16) for x in (p, q)):
            raise TypeError("which torch cannot read")
    except (RuntimeError, IndexError, TypeError):
        views, (p, q) = "u, w", (u, w)
    space |= {"k": calls[0].k, "s": calls[0].s, "p": p, "q": q}
    values = {"p": p, "q": q}
    for _ in range(200):
        kind = draw.choice(ROWS)
        if kind == ROWS[-1] and any(map(_repeats, values.values())):
            continue  # in which order is nobody's promise
        text = _filled(draw, draw.choice(kind), values)
        name = f"v{len(lines)}"
        memory = [x for call in calls for x in call.memory]
        if "enable_gqa" in (text or "") and not all(x.numel() for x in (*memory, *values.values())):
            continue  # attention of no heads ends the process in torch 2.11
        if "median" in (text or "") and any(map(_repeats, values.values())):
            continue  # eager's own reads beyond the memory of what repeats
        if text and not re.search(r" [-+*/<^]*= ", text):
            text = re.sub("^(with [^:]*: )?", rf"\1{name} = ", text)
        try:
            exec(text or "raise ValueError", space)
        except Exception:  # noqa: BLE001, S112  # sizes that do not fit
            continue
        if not isinstance(space.get(name), Tensor):
            space.pop(name, None)
        value = space.get(name, p)
        most = MOST if large else LARGEST
        is_kind = value.dtype in KNOWN and value.numel() <= most and value.dim() <= 5
        if not is_kind or not (wild or (value.numel() and _is_tame(value))):
            space.pop(name, None)
            continue
        values |= {name: value} if name in space else {}
        lines.append(f"    {text}\n")
        if len(lines) == wanted:
            break
    shown = [x for x in values if x == [*values][-1] or draw.random() < 0.3]
    source = f"def given(u, w, k):\n    return {views}\ndef f(p, q, k, s):\n{''.join(lines)}"
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
    names = dict(NAMES)
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
    torch.manual_seed(0)
    try:
        args = given(*memory, call.k)
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
    plain = [x.detach() for x in (*found, *memory, torch.rand(3))]
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
    exact = exact.replace("to(torch.complex64)", "to(torch.complex128)")
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
    parser.add_argument("--large", action="store_true", help="kernels of many blocks and threads")
    parser.add_argument("--gpu", action="store_true", help="kernels for GPUs, simulated")
    parser.add_argument("--device", default="cpu", help="where the arguments are")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.gpu:
        from fusee.targets import TARGETS
        from fusee.targets.cuda import PROFILE
        from tests.targets.cuda.simulated import Simulated

        TARGETS["cpu"] = Simulated(PROFILE)
    torch.backends.cudnn.allow_tf32 = False  # whose sums hang on the layout
    on_gpu = args.gpu or args.device != "cpu"
    how: Any = {"options": {"prices": False, "cache": not args.gpu}}
    how["dynamic"] = args.dynamic or None
    ends, seed, failed = time.monotonic() + args.seconds, args.first, 0
    while time.monotonic() < ends:
        source, calls = chain(seed, args.dynamic, args.device, args.large)
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
