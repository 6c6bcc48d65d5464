"""The backends of this package."""

from __future__ import annotations

from fusee.backends.registry import Backend, later, register
from fusee.config import Options

__all__: list[str] = []

register(
    Backend(
        "fusee",
        later("fusee.backends.native", "compile_native"),
        "our compiler: loops, LLVM, no C++ compiler",
        needs=("llvmlite",),
        validate=Options.parse,
    )
)
register(
    Backend(
        "eager",
        later("fusee.backends.eager", "run_captured"),
        "the captured graph, run as it is",
        tags=("debug",),
    )
)
register(
    Backend(
        "aot_eager",
        later("fusee.backends.eager", "run_aten"),
        "the functional ATen graph on eager kernels",
        tags=("debug",),
    )
)
