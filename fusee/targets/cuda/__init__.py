"""NVIDIA's GPUs: loops as LLVM IR for many threads, layers as calls of ATen.

Half built: nothing compiles for it yet but tests.
"""

from __future__ import annotations

from fusee.loops.ir import Profile

# 512: blocks that keep a GPU of 132 processors busy. Registers and arithmetic cost little beside
# memory, so that values are computed again rather than loaded, and loops read many buffers.
PROFILE = Profile(
    parallel=512,
    small=1 << 18,
    lanes=8,
    wide=32,
    reads=32,
    heavy=60,
    again=60,
    reloaded=60,
    many=1 << 17,
    chunk=1 << 13,
    strip=1 << 7,
    rows=32,
)
