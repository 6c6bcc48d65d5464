"""PTX to machine code of one GPU, in this process.

Adapter to nvJitLink and NVRTC, both of which torch's CUDA wheels bring (tested with CUDA 13.0, the
names are those of 12.3 and later). Neither holds Python's lock, and neither needs a GPU. Where
there is no nvJitLink, the driver links (device.py). What a kernel calls by a name that begins with
math.DEVICE is a function of CUDA's library: NVRTC gives it as PTX, once.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusee.codegen.llvm.math import DEVICE
from fusee.errors import CompileError, MissingPackage
from fusee.runtime.cache import ObjectCache, content_key

TRIPLE = "nvptx64-nvidia-cuda"
# Capabilities that LLVM knows, with the version of PTX that it writes for them. Others get the
# PTX of the nearest one below.
CAPABILITIES = {75: 63, 80: 78, 86: 78, 89: 78, 90: 80, 100: 86, 120: 87}
_PTX = 2  # what nvJitLinkAddData is given
_CALLED = re.compile(rf"\.extern \.func\s*\(.*?\)\s*{DEVICE}(\w+)")


class _SharedLibrary:
    """A shared library of CUDA's, found beside torch or by the system, and its functions."""

    def __init__(self, stem: str, prefix: str) -> None:
        self.prefix = prefix
        self.path, self.library = self._find(stem)

    @staticmethod
    def _find(stem: str) -> tuple[str, ctypes.CDLL]:
        major = (torch.version.cuda or "13").split(".")[0]
        wheels = Path(torch.__file__).parent.parent / "nvidia"
        places = [str(p) for p in sorted(wheels.glob(f"*/lib/{stem}.so.{major}*"))]
        problem = ""
        for place in [*places, f"{stem}.so.{major}"]:
            try:
                return place, ctypes.CDLL(place)
            except OSError as error:
                problem = str(error)
        raise MissingPackage(
            f"CUDA's {stem} cannot be loaded ({problem})",
            remedy="install torch's CUDA wheels, or CUDA's toolkit",
        )

    def call(self, name: str, *arguments: Any) -> int:
        """A function's status, 0 if all went well."""
        status: int = getattr(self.library, self.prefix + name)(*arguments)
        return status

    def text(self, what: str, of: ctypes.c_void_p) -> bytes:
        """What a pair of functions <what>Size and <what> gives."""
        size = ctypes.c_size_t()
        if self.call(f"{what}Size", of, ctypes.byref(size)):
            return b""
        found = ctypes.create_string_buffer(size.value)
        self.call(what, of, found)
        return found.raw


@functools.cache
def linker() -> _SharedLibrary:
    return _SharedLibrary("libnvJitLink", "nvJitLink")


@functools.cache
def version() -> str:
    """Of what assembles."""
    found = (ctypes.c_uint * 2)()
    linker().call("Version", ctypes.byref(found, 0), ctypes.byref(found, 4))
    return f"{found[0]}.{found[1]}"


def known(capability: int) -> int:
    """The capability that PTX is written for."""
    return max((sm for sm in CAPABILITIES if sm <= capability), default=min(CAPABILITIES))


def with_functions(ptx: bytes, capability: int, cache: ObjectCache | None = None) -> list[bytes]:
    """PTX for a GPU of a capability, such as 90, with that of what it calls of CUDA's library."""
    return [ptx, *(_function(name, capability, cache) for name in called(ptx))]


def called(ptx: bytes) -> list[str]:
    """Functions of CUDA's library that PTX calls."""
    return list(dict.fromkeys(_CALLED.findall(ptx.decode())))


def link(texts: Sequence[bytes], capability: int, *options: str) -> tuple[bytes, str]:
    """Machine code of PTX texts, and what there is to say of it.

    raises   CompileError in NVIDIA's words
    """
    tool, handle = linker(), ctypes.c_void_p()
    given = [f"-arch=sm_{capability}".encode(), *(option.encode() for option in options)]
    array = (ctypes.c_char_p * len(given))(*given)
    status = tool.call("Create", ctypes.byref(handle), len(given), array)
    try:
        for number, text in enumerate(texts):
            size = ctypes.c_size_t(len(text) + 1)
            name = f"part{number}".encode()
            status = status or tool.call("AddData", handle, _PTX, text + b"\0", size, name)
        status = status or tool.call("Complete", handle)
        if status:
            raise refused("nvJitLink", tool.text("GetErrorLog", handle), status)
        code = tool.text("GetLinkedCubin", handle)
        return code, tool.text("GetInfoLog", handle).rstrip(b"\0").decode()
    finally:
        if handle:
            tool.call("Destroy", ctypes.byref(handle))


# ---------------------------------------------------------------------------- CUDA's functions


@functools.cache
def _nvrtc() -> _SharedLibrary:
    return _SharedLibrary("libnvrtc", "nvrtc")


def _function(name: str, capability: int, cache: ObjectCache | None) -> bytes:
    """PTX of one of CUDA's functions under our name."""
    key = content_key("cuda function", name, str(capability), _nvrtc().path)
    code = None if cache is None else cache.get(key)
    if code is None:
        code = _compiled(name, capability)
        if cache is not None:
            cache.put(key, code)
    return code


_TWO = ("pow", "atan2", "hypot", "fmod", "nextafter")


def _compiled(name: str, capability: int) -> bytes:
    kind = "float" if name.endswith("f") and name != "erf" else "double"
    names = "xy" if name.removesuffix("f") in _TWO else "x"
    takes = ", ".join(f"{kind} {x}" for x in names)
    head = f'extern "C" __device__ {kind} {DEVICE}{name}({takes})'
    source = f"{head} {{ return {name}({', '.join(names)}); }}"
    tool, program = _nvrtc(), ctypes.c_void_p()
    options = [f"-arch=compute_{known(capability)}".encode(), b"-rdc=true"]
    array = (ctypes.c_char_p * len(options))(*options)
    given = (source.encode(), b"function.cu", 0, None, None)
    status = tool.call("CreateProgram", ctypes.byref(program), *given)
    status = status or tool.call("CompileProgram", program, len(options), array)
    try:
        if status:
            raise refused("NVRTC", tool.text("GetProgramLog", program), status)
        return tool.text("GetPTX", program).rstrip(b"\0")
    finally:
        tool.call("DestroyProgram", ctypes.byref(program))


def refused(who: str, words: bytes, status: int) -> CompileError:
    said = words.rstrip(b"\0").decode(errors="replace").strip()
    return CompileError(
        f"{who} refused generated code: {said or f'status {status}'}",
        did="stopped; nothing was run",
        remedy="report this as a bug of Fusee, with the output of FUSEE_LOG=llvm",
    )
