"""Launches of kernels on a GPU: the twin of the CPU's `run`, and units that become kernels.

A frame is laid out as on the CPU (fusee/runtime/launch.py). What it says of a launch:

    total   blocks; units: threads of each; align: bytes of the kernel's arguments
    pointers, the status, params   follow each other, and are the arguments

`run` takes the address of a stream in the place of a number of threads. It gives 0, the negative
of the driver's status for the first launch that failed, or MISALIGNED: a launch, whose address is
the frame's `value`, has a pointer that its accesses are too wide for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fusee.errors import LateError, MissingPackage
from fusee.loops.ir import Message
from fusee.runtime.cache import ObjectCache
from fusee.runtime.jit import Build, Cpu, Function, Library, builtin, emitter
from fusee.runtime.launch import gather, run_unit
from fusee.runtime.llvm_text import Writer
from fusee.targets.cuda import assemble


class Launches(Protocol):
    """What launches need of a device."""

    index: int
    capability: int
    imports: dict[str, int]

    def load(self, code: bytes, name: str) -> int: ...

    def uses(self, function: int) -> str: ...

    def linker(self) -> str: ...

    def link(self, texts: Sequence[bytes], capability: int) -> tuple[bytes, str]: ...


def late_error(words: Tensor, messages: Mapping[int, Message]) -> LateError | None:
    """What kernels have left for the host, if one has refused a value."""
    code, value = words.tolist()
    if code not in messages:
        return None
    _, text, origin = messages[code]
    return LateError(text.format(value), where=f"in {origin}")


# cuLaunchKernel takes arguments packed: (1, their address, 2, the address of their size, 0)
_POINTER, _SIZE = 1, 2
MISALIGNED = 1


def _on_stream(
    writer: Writer, stream: str
) -> tuple[Callable[[str, str, str], None], Callable[[], None]]:
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

        def bits(k: str, carried: list[str]) -> list[str]:
            inner = writer.top
            return [inner.op(f"or i64 {carried[0]}, {inner.load('i64', pointers, k)}")]

        (all_bits,) = writer.loop("0", level.load("i64", one, 2), 1, [("i64", "0")], bits)
        wrong = level.op(f"and i64 {all_bits}, {level.op(f'lshr i64 {align}, 32')}")

        def refuse() -> None:
            level.store("ptr", one, state, 1)
            level.store("i64", str(MISALIGNED), state)

        blocks, threads = (
            level.op(f"trunc i64 {x} to i32") for x in (total, level.load("i64", one, 6))
        )

        def launch() -> None:
            shape = [("i32", x) for x in (blocks, "1", "1", threads, "1", "1", "0")]
            rest = ("ptr", handle), ("ptr", "null"), ("ptr", extra)
            status = level.call("i32", "cuLaunchKernel", ("ptr", function), *shape, *rest)
            failed = level.op(f"sub i64 0, {level.op(f'zext i32 {status} to i64')}")
            level.store("i64", failed, state)

        aligned = level.op(f"icmp eq i64 {wrong}, 0")
        level.unless(aligned, refuse)
        idle = level.op(f"icmp eq i64 {total}, 0")
        level.unless(level.either("i1", "or", idle, level.op(f"xor i1 {aligned}, true")), launch)

    def end() -> None:
        top.call("i32", "cuCtxPopCurrent_v2", ("ptr", size))

    return write, end


_runners: dict[int, Callable[..., int]] = {}


def runner(device: Launches) -> Callable[..., int]:
    """`run` for one GPU."""
    found = _runners.get(device.index)
    if found is None:
        # addresses are no part of a text, so texts for two GPUs must differ otherwise
        text = f"; device {device.index}\n{run_unit(_on_stream)}"
        found = _runners[device.index] = builtin("run", text, device.imports)
    return found


class KernelBuild(Build):
    """Units that become kernels of one GPU."""

    def __init__(self, device: Launches, *, use_disk: bool, check: bool) -> None:
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
    sm = assemble.known(capability)
    flags = f"+ptx{assemble.CAPABILITIES[sm]}"
    return Cpu(assemble.TRIPLE, f"sm_{sm}", frozenset(), flags)


Link = Callable[[Sequence[bytes], int], tuple[bytes, str]]


def linking(device: Launches) -> tuple[str, Link]:
    """What makes machine code of PTX, and which version of it: nvJitLink, else the driver."""
    try:
        return assemble.version(), assemble.link
    except MissingPackage:
        return device.linker(), device.link


def to_code(text: str, capability: int, link: Link, cache: ObjectCache | None = None) -> bytes:
    """Machine code of a unit. Called in a compiling thread."""
    ptx = emitter(target(capability)).emit(text)
    return link(assemble.with_functions(ptx, capability, cache), capability)[0]
