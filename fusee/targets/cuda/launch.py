"""Kernels on a GPU: PTX becomes machine code, and is launched: one by one, as one, or side by side.

Adapter to nvJitLink and NVRTC, both of which torch's CUDA wheels bring (tested with CUDA 13.0, the
names are those of 12.3 and later). Neither holds Python's lock, and neither needs a GPU. Where
there is no nvJitLink, the driver links (`Device`). What a kernel calls by a name that begins with
math.DEVICE is a function of CUDA's library: NVRTC gives it as PTX, once.

A frame is laid out as on the CPU (fusee/runtime/launch.py). What it says of a launch:

    total   blocks; units: threads of each; align: bytes of the kernel's arguments
    pointers, the status, params   follow each other, and are the arguments

`run` takes the address of a stream in the place of a number of threads. It gives 0, the negative
of the driver's status for the first launch that failed, or MISALIGNED: a launch, whose address is
the frame's `value`, has a pointer that its accesses are too wide for.

Equal kernels that follow each other are one launch: what an optimizer does with each parameter.

    define ptx_kernel void @k_<hash>(ptr byval([n x i64]) %rows)

The words are the pointers of all launches, the status, the first block of each launch, and the
sizes of all. A block finds the launch that it belongs to, and goes on as one of that. Others that
leave most of a GPU idle run beside each other, as branches of the graph that is recorded, if they
do not depend on each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusee.codegen import Launch
from fusee.codegen.llvm import KernelCode
from fusee.codegen.llvm.math import DEVICE
from fusee.errors import MissingPackage
from fusee.loops import Buffer, Extern, Message
from fusee.loops.memory import Plan, size_bytes
from fusee.loops.schedule import reads, writes
from fusee.runtime.cache import ObjectCache, content_key
from fusee.runtime.jit import (
    Build,
    Cpu,
    Early,
    Function,
    Library,
    add_emitter,
    builtin,
    count,
    emit,
    submit,
)
from fusee.runtime.launch import Launched, gather, run_unit
from fusee.runtime.llvm_text import Writer
from fusee.sym import Size
from fusee.targets.cuda.device import MOST, Device, refused

TRIPLE = "nvptx64-nvidia-cuda"
# Capabilities that LLVM knows, with the version of PTX that it writes for them. Others get the
# PTX of the nearest one below.
CAPABILITIES = {75: 63, 80: 78, 86: 78, 89: 78, 90: 80, 100: 86, 120: 87}
_LONG = frozenset({"AddData", "Complete", "CompileProgram"})
_PTX = 2  # what nvJitLinkAddData is given
_CALLED = re.compile(rf"\.extern \.func\s*\(.*?\)\s*{DEVICE}(\w+)")


class _SharedLibrary:
    """A shared library of CUDA's, found beside torch or by the system, and its functions."""

    def __init__(self, stem: str, prefix: str) -> None:
        major, self.prefix = (torch.version.cuda or "13").split(".")[0], prefix
        wheels = Path(torch.__file__).parent.parent / "nvidia"
        places = [str(p) for p in sorted(wheels.glob(f"*/lib/{stem}.so.{major}*"))]
        problem = ""
        for place in [*places, f"{stem}.so.{major}"]:
            try:
                self.path, self.releasing = place, ctypes.CDLL(place)
                self.holding = ctypes.PyDLL(place)
                return
            except OSError as error:
                problem = str(error)
        raise MissingPackage(
            f"CUDA's {stem} cannot be loaded ({problem})",
            remedy="install torch's CUDA wheels, or CUDA's toolkit",
        )

    def call(self, name: str, *arguments: Any) -> int:
        """A function's status, 0 if all went well. Only the long ones let go of Python's lock: a
        thread has it back after a switch interval, while another is busy."""
        library = self.releasing if name in _LONG else self.holding
        status: int = getattr(library, self.prefix + name)(*arguments)
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


def ptx_capability(capability: int) -> int:
    """The capability that PTX is written for."""
    return max((sm for sm in CAPABILITIES if sm <= capability), default=min(CAPABILITIES))


def with_functions(ptx: bytes, capability: int, cache: ObjectCache | None) -> list[bytes]:
    """PTX for a GPU of a capability, such as 90, with that of what it calls of CUDA's library."""
    found = [ptx]
    for name in called(ptx):
        key = content_key("cuda function", name, str(capability), _nvrtc().path)
        code = None if cache is None else cache.get(key)
        if code is None:
            code = _compiled(name, capability)
            if cache is not None:
                cache.put(key, code)
        found.append(code)
    return found


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


_TWO = ("pow", "atan2", "hypot", "fmod", "nextafter")


def _compiled(name: str, capability: int) -> bytes:
    """PTX of one of CUDA's functions under our name."""
    kind = "float" if name.endswith("f") and name != "erf" else "double"
    names = "xy" if name.removesuffix("f") in _TWO else "x"
    takes = ", ".join(f"{kind} {x}" for x in names)
    head = f'extern "C" __device__ {kind} {DEVICE}{name}({takes})'
    source = f"{head} {{ return {name}({', '.join(names)}); }}"
    tool, program = _nvrtc(), ctypes.c_void_p()
    options = [f"-arch=compute_{ptx_capability(capability)}".encode(), b"-rdc=true"]
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


def first_code(messages: Sequence[Message]) -> int:
    """The number of the first of a graph's messages: the same in every process, so that kernels
    are; those of other graphs are far away."""
    return int(content_key(repr(messages))[:11], 16) << 16


# cuLaunchKernel takes arguments packed: (1, their address, 2, the address of their size, 0)
_POINTER, _SIZE = 1, 2
MISALIGNED = 1


def _on_stream(writer: Writer, stream: str) -> Launched:
    """See fusee.runtime.launch.Launching."""
    top = writer.top
    for name in ("fusee_context", "fusee_page"):
        writer.declares[name] = f"@{name} = external global i8"
    extra, size = top.op("alloca [5 x ptr]"), top.op("alloca i64")
    for k, value in ((0, _POINTER), (2, _SIZE), (4, 0)):
        top.store("i64", str(value), extra, k)
    top.store("ptr", size, extra, 3)
    top.call("i32", "cuCtxPushCurrent_v2", ("ptr", "@fusee_context"))
    handle = top.op(f"inttoptr i64 {stream} to ptr")

    def write(one: str, state: str, table: str) -> None:
        level = writer.top
        function, total = level.load("ptr", one), level.load("i64", one, 5)
        pointers = gather(writer, one, table, "@fusee_page")
        level.store("ptr", pointers, extra, 1)
        align = level.load("i64", one, 7)
        level.store("i64", level.op(f"and i64 {align}, {(1 << 32) - 1}"), size)
        count = level.load("i64", one, 2)
        with writer.loop("0", count, 1, [("i64", "0")]) as (k, (so_far,), bits):
            inner = writer.top
            bits.append(inner.op(f"or i64 {so_far}, {inner.load('i64', pointers, k)}"))
        wrong = level.op(f"and i64 {bits[0]}, {level.op(f'lshr i64 {align}, 32')}")
        blocks, threads = (
            level.op(f"trunc i64 {x} to i32") for x in (total, level.load("i64", one, 6))
        )
        aligned = level.op(f"icmp eq i64 {wrong}, 0")
        with level.unless(aligned):
            level.store("ptr", one, state, 1)
            level.store("i64", str(MISALIGNED), state)
        idle = level.op(f"icmp eq i64 {total}, 0")
        with level.unless(level.either("i1", "or", idle, level.op(f"xor i1 {aligned}, true"))):
            shape = [("i32", x) for x in (blocks, "1", "1", threads, "1", "1", "0")]
            rest = ("ptr", handle), ("ptr", "null"), ("ptr", extra)
            status = level.call("i32", "cuLaunchKernel", ("ptr", function), *shape, *rest)
            failed = level.op(f"sub i64 0, {level.op(f'zext i32 {status} to i64')}")
            level.store("i64", failed, state)

    def end() -> None:
        top.call("i32", "cuCtxPopCurrent_v2", ("ptr", size))

    return write, end


_runners: dict[int, Early[Callable[..., int]]] = {}


def runner(device: Device) -> Early[Callable[..., int]]:
    """`run` for one GPU, once it is called."""

    def make() -> Callable[..., int]:
        # addresses are no part of a text, so texts for two GPUs must differ otherwise
        text = f"; device {device.index}\n{run_unit(_on_stream)}"
        return builtin("run", text, device.imports)

    return _runners.get(device.index) or _runners.setdefault(device.index, Early(make))


def prepare(device: Device) -> None:
    """Let threads load what makes and runs machine code."""
    runner(device).begin()
    _prepare(device.capability)


@functools.cache
def _prepare(capability: int) -> None:
    submit(version)
    for _ in range(count()):
        submit(add_emitter, target(capability))


class KernelBuild(Build):
    """Units that become kernels of one GPU."""

    def __init__(self, device: Device, *, use_disk: bool, check: bool) -> None:
        super().__init__(use_disk=use_disk, check=check)
        self.device, self.target = device, target(device.capability)
        self.place = f"cuda:{device.index} "
        self.linker, self.link = linking(device)

    def salt(self) -> str:
        return f"{super().salt()} {self.device.capability} {self.linker}"

    def uses(self, function: Function) -> str:
        return self.device.uses(function.address)

    def make(self, text: str) -> bytes:
        return to_code(text, self.device.capability, self.link, self.cache)

    def load(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[Library]:
        pairs = zip(names, objects, strict=True)
        return [Library(None, {name: self.device.load(code, name)}) for name, code in pairs]


@functools.cache
def target(capability: int) -> Cpu:
    """What LLVM writes PTX for."""
    sm = ptx_capability(capability)
    return Cpu(TRIPLE, f"sm_{sm}", frozenset(), f"+ptx{CAPABILITIES[sm]}")


Link = Callable[[Sequence[bytes], int], tuple[bytes, str]]


def linking(device: Device) -> tuple[str, Link]:
    """What makes machine code of PTX, and which version of it: nvJitLink, else the driver."""
    try:
        return version(), link
    except MissingPackage:
        return device.linker(), device.link


def to_code(text: str, capability: int, link: Link, cache: ObjectCache | None) -> bytes:
    """Machine code of a unit. Called in a compiling thread."""
    ptx = emit(target(capability), text)
    return link(with_functions(ptx, capability, cache), capability)[0]


# A launch takes arguments of so many bytes on all GPUs.
_MOST_BYTES = 4096
_HEAD = re.compile(r"define ptx_kernel void @\w+\((.*)\) (.*) \{\nstart:\n")
_BLOCK = "call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()"


def most_launches(code: KernelCode) -> int:
    """How many launches of a kernel can be one; blocks that count each other are told apart by
    nobody."""
    if code.shared != 0:
        return 1
    return (_MOST_BYTES // 8 - 1) // (len(code.buffers) + len(code.params) + 1)


def batched(codes: Sequence[KernelCode]) -> KernelCode:
    """One kernel for launches of equal ones, at most `most_launches`."""
    first, count = codes[0], len(codes)
    head = _HEAD.match(first.text)
    assert head is not None and all(code.name == first.name for code in codes)
    names = [argument.split()[-1] for argument in head[1].split(", ")]
    at = names.index("%status")
    pointers, sizes = names[:at], names[at + 1 :]
    starts = count * at + 1
    words = starts + count * (1 + len(sizes))
    lines: list[str] = []

    def load(kind: str, name: str, row: str, first: int) -> None:
        """A word, `first` behind that of number `row`."""
        lines.append(f"{name}.in = add i64 {row}, {first}")
        lines.append(f"{name}.at = getelementptr i64, ptr %rows, i64 {name}.in")
        lines.append(f"{name} = load {kind}, ptr {name}.at, align 8")

    lines += [f"%ctaid = {_BLOCK}", "%grid = zext i32 %ctaid to i64"]
    found = "0"
    for k in reversed(range((count - 1).bit_length())):
        lines += [
            f"%next{k} = add i64 {found}, {1 << k}",
            f"%there{k} = icmp ult i64 %next{k}, {count}",
            f"%try{k} = select i1 %there{k}, i64 %next{k}, i64 {found}",
        ]
        load("i64", f"%start{k}", f"%try{k}", starts)
        lines += [
            f"%begun{k} = icmp ule i64 %start{k}, %grid",
            f"%found{k} = select i1 %begun{k}, i64 %try{k}, i64 {found}",
        ]
        found = f"%found{k}"
    load("i64", "%begin", found, starts)
    lines += ["%within = sub i64 %grid, %begin", "%block = trunc i64 %within to i32"]
    for kind, ours, begin in (("ptr", pointers, 0), ("i64", sizes, starts + count)):
        if ours:
            lines.append(f"%row.{kind} = mul i64 {found}, {len(ours)}")
        for k, name in enumerate(ours):
            load(kind, f"{name}.any" if kind == "ptr" else name, f"%row.{kind}", begin + k)
    load("ptr", "%status.any", "0", count * at)
    for name in (*pointers, "%status"):  # they are the GPU's own memory
        lines.append(f"{name}.own = addrspacecast ptr {name}.any to ptr addrspace(1)")
        lines.append(f"{name} = addrspacecast ptr addrspace(1) {name}.own to ptr")
    body = first.text[head.end() :].replace(_BLOCK, "add i32 %block, 0")
    text = "\n".join(["first:", *lines, "br label %start", "start:", body])
    given = f"(ptr byval([{words} x i64]) align 8 %rows) {head[2]}"
    name = f"k_{hashlib.sha256(f'{given}{text}'.encode()).hexdigest()[:20]}"
    begins: list[Size] = [0]
    for code in codes:
        begins.append(begins[-1] + code.total)
    return first._replace(
        name=name,
        text=f"define ptx_kernel void @{name}{given} {{\n{text}",
        buffers=tuple(b for code in codes for b in code.buffers),
        params=(*begins[:-1], *(n for code in codes for n in code.params)),
        total=begins[-1],
        align=8 * words | first.align >> 32 << 32,
    )


Run = Callable[..., int]
# By memory, None for the arena: from where to where, and whether it is written.
Touched = dict["Buffer | None", list[tuple[float, float, bool]]]


class Joined:
    """See fusee.targets.Batches."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._before: Touched | None = None  # by all of the batch

    def takes(self, batch: Sequence[Launch], launch: Launch) -> bool:
        own, before = _touched(self.plan, launch), self._before
        if (
            0 < len(batch) < most_launches(launch.code)
            and batch[0].code.name == launch.code.name
            and not (own is None or before is None or _depend(own, before))
        ):
            for memory, places in own.items():
                before.setdefault(memory, []).extend(places)
            return True
        self._before = own
        return False

    def join(self, batch: Sequence[Launch]) -> Launch:
        kernels = [kernel for launch in batch for kernel in launch.kernels]
        return Launch(batched([launch.code for launch in batch]), kernels)


def rows_of(plan: Plan, launches: Sequence[Launch]) -> list[range]:
    """Launches that follow each other and that none of them depends on, two to MOST in each range.

    launches   in order
    """
    found: list[range] = []
    row: list[Touched] = []
    rest = iter(launches)
    number, waiting = 0, next(rest, None)

    def end() -> None:
        if len(row) > 1:
            found.append(range(number - len(row), number))
        row.clear()

    for item in plan.schedule.items:
        if isinstance(item, Extern):
            end()
        elif waiting is not None and item is waiting.kernels[0]:
            own = _touched(plan, waiting)
            if any(buffer.role == "input" for k in waiting.kernels for buffer in writes(k)):
                own = None  # its memory may be that of another input
            if own is None or len(row) == MOST or any(_depend(own, other) for other in row):
                end()
            if own is not None:
                row.append(own)
            number, waiting = number + 1, next(rest, None)
    end()
    return found


def _touched(plan: Plan, launch: Launch) -> Touched | None:
    """What is written and read; None if it must run alone: it shares a room with others."""
    if launch.code.shared != 0:
        return None
    found: Touched = {}
    touched = ((which, b) for k in launch.kernels for which in (writes, reads) for b in which(k))
    for which, buffer in touched:
        if buffer.role != "scratch":
            found.setdefault(buffer, []).append((0, math.inf, which is writes))
            continue
        start, size = plan.offsets[buffer], size_bytes(buffer)
        if not isinstance(start, int) or not isinstance(size, int):
            return None
        found.setdefault(None, []).append((start, start + size, which is writes))
    return found


def _depend(a: Touched, b: Touched) -> bool:
    return any(
        (is_written or writes_it) and start < last and first < end
        for memory in a.keys() & b.keys()
        for start, end, is_written in a[memory]
        for first, last, writes_it in b[memory]
    )


class Beside:
    """`run`, whose rows of launches run beside each other.

    together   calls each with a stream of its own, and goes on after all; gives the first status
               that is not 0
    """

    def __init__(
        self, run: Run, rows: Sequence[range], together: Callable[[Sequence[Run]], int]
    ) -> None:
        self.run, self.together = run, together
        self.rows = {row.start: row for row in rows}

    def __call__(self, state: int, first: int, last: int, stream: int, *pointers: Any) -> int:
        status, at = self.run(state, first, first, stream, *pointers), first
        while not status and at < last:
            row = self.rows.get(at)
            if row is None:
                end = min((start for start in self.rows if at < start < last), default=last)
                status, at = self.run(state, at, end, stream), end
            else:
                # the rest has no pointers yet: what it works on is made after this run
                row = range(at, min(row.stop, last))
                status = self.together([partial(self.run, state, k, k + 1) for k in row])
                at = row.stop
        return status
