"""The backends of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from fusee.backends.registry import Backend, later, register
from fusee.config import Options

__all__: list[str] = []


def anything(options: Mapping[str, object]) -> None:
    """The check of a backend that checks its options itself."""


def no_cuda() -> str | None:
    """What is missing to run on an NVIDIA GPU, or None."""
    return None if torch.cuda.is_available() else "an NVIDIA GPU, and a build of torch with CUDA"


register(
    Backend(
        "fusee",
        later("fusee.backends.native", "compile_native"),
        "our compiler: loops, LLVM, no C++ compiler",
        needs=("llvmlite",),
        validate=Options.parse,
        is_named=True,
    )
)
_onnxrt = register(
    Backend(
        "onnxrt",
        later("fusee.backends.onnxrt", "compile_onnxrt"),
        "regions run by ONNX Runtime",
        needs=("onnxruntime", "onnxscript"),
        validate=later("fusee.backends.onnx_options", "check"),
        install="pip install 'fusee[onnx]', or onnxruntime and onnxscript; Linux, macOS, Windows",
        is_named=True,
    )
)
_openvino = register(
    Backend(
        "openvino",
        later("fusee.backends.openvino", "compile_openvino"),
        "regions run by OpenVINO, on Intel's processors, GPUs and NPUs",
        needs=("openvino", "llvmlite"),
        validate=later("fusee.backends.openvino_options", "check"),
        install="pip install 'fusee[openvino]'; Linux, macOS, Windows",
        is_named=True,
        keeps=later("fusee.backends.openvino_options", "is_caching"),
        begin=later("fusee.backends.openvino_region", "begin"),
        resume=later("fusee.backends.openvino_region", "resume"),
    )
)
_openvino_ts = register(
    Backend(
        "openvino_ts",
        later("fusee.backends.openvino", "compile_openvino_ts"),
        "OpenVINO by way of TorchScript, deprecated",
        needs=("openvino", "llvmlite"),
        validate=later("fusee.backends.openvino_options", "check_ts"),
        install="pip install 'fusee[openvino]'; Linux, macOS, Windows",
        is_named=True,
        keeps=later("fusee.backends.openvino_options", "is_caching"),
        begin=later("fusee.backends.openvino_region", "begin"),
        resume=later("fusee.backends.openvino_region", "resume_ts"),
    )
)
register(
    Backend(
        "cudagraphs",
        later("fusee.backends.cudagraphs", "compile_cudagraphs"),
        "eager's CUDA kernels, recorded and replayed",
        validate=later("fusee.backends.cudagraphs", "check"),
        install="a build of torch with CUDA, from pytorch.org; Linux and Windows, NVIDIA GPUs",
        absent=no_cuda,
        is_named=True,
    )
)
register(
    Backend(
        "tvm",
        later("fusee.backends.tvm", "compile_tvm"),
        "regions compiled by Apache TVM's Relax",
        needs=("tvm", "llvmlite"),
        validate=later("fusee.backends.tvm", "check"),
        install="pip install apache-tvm; Linux, macOS, Windows",
        is_named=True,
    )
)
register(
    Backend(
        "tensorrt",
        later("fusee.backends.foreign", "compile_tensorrt"),
        "torch_tensorrt's own backend",
        needs=("torch_tensorrt",),
        paired=True,
        validate=anything,
        install="pip install torch_tensorrt, of torch's version; Linux and Windows, NVIDIA GPUs",
        absent=no_cuda,
    )
)
register(
    Backend(
        "ipex",
        later("fusee.backends.foreign", "compile_ipex"),
        "the Intel extension's own backend",
        needs=("intel_extension_for_pytorch",),
        paired=True,
        install="the backends 'fusee' and 'openvino' on Intel's processors: the extension's last "
        "version, 2.8, works with torch 2.8 alone",
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
for _backend in (_onnxrt, _openvino, _openvino_ts):
    _help = f"{_backend.name}, by its name in stock torch.compile"
    register(dataclasses.replace(_backend, name=f"fusee_{_backend.name}", help=_help))
