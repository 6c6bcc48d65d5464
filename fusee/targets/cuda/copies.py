"""Copies of many tensors in few launches: what comes into a recording, and what leaves it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch import Tensor

from fusee.codegen.llvm.kernel import KernelCode
from fusee.codegen.simt.batch import batched
from fusee.codegen.simt.kernel import emit_kernel
from fusee.loops.ir import Buffer, Kernel, Phase, Store, Values
from fusee.runtime.launch import Frames, FrameSpec, LaunchSpec, Program
from fusee.sym.expr import Size, Symbol, substitute
from fusee.targets.cuda.launch import KernelBuild, Launches, runner

# One launch makes at most so many; fewer are filled up to a power of two with copies of nothing, so
# that there are few kernels.
_MOST = 64
# The types of what is copied, by its bytes: the first that these are a multiple of.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


class Copies:
    """Into or out of tensors that stay where they are.

    stay     dense ones; into: whether they are written to
    stream   the present one
    """

    def __init__(
        self, gpu: Launches, stay: Sequence[Tensor], into: bool, stream: Callable[[], int]
    ) -> None:
        self.stay, self.into, self.stream, self.run = stay, into, stream, runner(gpu)
        build = KernelBuild(gpu, use_disk=True, check=False)
        launches: list[LaunchSpec] = []
        for dtype in _WORDS:
            own = [k for k, x in enumerate(stay) if _words(x)[0] is dtype]
            for first in range(0, len(own), _MOST):
                launches.append(self._launch(build, len(launches), dtype, own[first:][:_MOST]))
        self.count = len(launches)
        spec = FrameSpec(tuple(launches), 2 * len(stay) + 2)
        self.frame = Frames(Program(build.finish(), spec))[()]
        self.frame.bind(1, ((2 * k, x.data_ptr()) for k, x in enumerate(stay)))

    def _launch(
        self, build: KernelBuild, function: int, dtype: torch.dtype, numbers: Sequence[int]
    ) -> LaunchSpec:
        code, source, target = _kernel(dtype)
        here, there = (target, source) if self.into else (source, target)
        sizes = [_words(self.stay[k])[1] for k in numbers]
        sizes += repeat(0, (1 << (len(numbers) - 1).bit_length()) - len(numbers))
        codes = []
        for size in sizes:
            params = tuple(substitute(n, {_COUNT: size}) for n in code.params)
            total = substitute(code.total, {_COUNT: size})
            codes.append(replace(code, params=params, total=total))
        joined = batched(codes)
        build.add(joined.module)
        slots = []
        for k in chain(numbers, repeat(len(self.stay), len(sizes) - len(numbers))):
            place = {here: 2 * k, there: 2 * k + 1}
            slots += [place[buffer] for buffer in code.buffers]
        total, threads, *words = map(_known, (joined.total, joined.units, *joined.params))
        return LaunchSpec(function, tuple(slots), tuple(words), total, threads, joined.align)

    def __call__(self, others: Sequence[Tensor]) -> None:
        """Values of `others` come in, or go there: as many, of the same layouts."""
        odd = range(1, 2 * len(others), 2)
        pointers = chain.from_iterable(zip(odd, map(Tensor.data_ptr, others), strict=True))
        if self.run(self.frame.state, 0, self.count, self.stream(), *pointers):
            # some of them begin where accesses of 16 bytes must not
            given, taken = (others, self.stay) if self.into else (self.stay, others)
            with torch.no_grad():
                torch._foreach_copy_(list(taken), list(given))


_COUNT = Symbol("n")


def _words(x: Tensor) -> tuple[torch.dtype, int]:
    """What a tensor is copied as."""
    dtype = next(d for d in _WORDS if x.nbytes % d.itemsize == 0)
    return dtype, x.nbytes // dtype.itemsize


def _known(n: Size) -> int:
    assert isinstance(n, int)
    return n


@functools.cache
def _kernel(dtype: torch.dtype) -> tuple[KernelCode, Buffer, Buffer]:
    """A copy of _COUNT words, from the one buffer to the other."""
    shape = (_COUNT.expr,)
    source, target = (Buffer(name, dtype, shape, (1,), "extern") for name in ("x", "y"))
    at = Symbol("i", hi=_COUNT.expr)
    store = Store(target, at.expr, Values().load(source, at.expr))
    return emit_kernel(Kernel((at,), [Phase((), [store])], at)), source, target
