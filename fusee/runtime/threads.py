"""The OpenMP runtime that ATen runs on: the same threads, so that none fight for processors.

libtorch_cpu is linked against one OpenMP runtime, which its own name look-up finds even when the
process holds another one. Both libgomp and LLVM's libomp offer the functions used here.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from fusee.runtime import llvm

__all__ = ["Pool", "pool"]


class Pool(NamedTuple):
    """Addresses in the OpenMP runtime."""

    parallel: (
        int  # GOMP_parallel(void (*f)(void*), void* context, unsigned threads, unsigned flags)
    )
    thread: int  # int omp_get_thread_num(void)
    team: int  # int omp_get_num_threads(void)


@functools.cache
def pool() -> Pool | None:
    """ATen's OpenMP runtime; None if torch was built without one, and kernels use one thread."""
    library = ctypes.CDLL(str(llvm.torch_library()))
    found = []
    for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
        try:
            function = library[name]
        except AttributeError:
            return None
        found.append(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return Pool(*found)
