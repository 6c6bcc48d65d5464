"""All contact with LLVM, through llvmlite (tested with 0.50, LLVM 22).

llvmlite's Python functions hold one lock for the whole process, so that threads never compile at
the same time. LLVM itself asks only that no two threads share a context or a target machine.
Emitter gives each thread its own and calls llvmlite's C functions directly: two threads take half
the time of one. Of these calls only the long one lets go of Python's lock, since
having it back may take a whole switch interval (5 ms) while another thread is busy.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fusee.errors import CompileError, MissingPackage

__all__ = ["Emitter", "Library", "assembly", "host", "link", "symbol", "verify", "version"]

# LLVM's effort in instruction selection and register allocation. 2 and 3 add a tenth to the time
# and nothing to the speed of our kernels; 0 takes a quarter of the time, but keeps accumulators in
# memory, and kernels run 1.5 times as long.
_EFFORT = 1

_numbers = itertools.count()


@functools.cache
def binding() -> ModuleType:
    """llvmlite.binding with the host's code generator ready.

    raises   MissingPackage without llvmlite
    """
    try:
        import llvmlite.binding
    except ImportError as error:
        raise MissingPackage(
            f"Fusee generates machine code through llvmlite, which cannot be imported ({error})",
            did="stopped before compiling",
            remedy="pip install llvmlite",
        ) from error
    found: ModuleType = llvmlite.binding
    found.initialize_native_target()
    found.initialize_native_asmprinter()
    # Loop strength reduction is a third of the code generator's time; kernels count for themselves.
    found.set_option("fusee", "-disable-lsr")
    # SLEEF lives in this library; it is loaded already, but out of sight of a global search.
    found.load_library_permanently(str(torch_library()))
    return found


def torch_library() -> Path:
    """The path of libtorch_cpu, which holds SLEEF and is linked against torch's OpenMP runtime."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    stem = "torch_cpu" if sys.platform == "win32" else "libtorch_cpu"
    return Path(torch.__file__).parent / "lib" / f"{stem}.{suffix}"


@functools.cache
def version() -> str:
    """Versions of llvmlite and LLVM, as one word."""
    llvm = binding()
    package = sys.modules["llvmlite"].__version__
    return f"{package}-{'.'.join(map(str, llvm.llvm_version_info))}"


def host() -> tuple[str, str, Mapping[str, bool]]:
    """The host's target triple, processor name, and features with whether it has them."""
    llvm = binding()
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()


def symbol(name: str) -> int | None:
    """The address of a function of this process that machine code may call, or None."""
    address: int | None = binding().address_of_symbol(name)
    return address


def verify(text: str) -> None:
    """Check IR text by LLVM's own rules.

    raises   CompileError with LLVM's words
    """
    llvm = binding()
    try:
        with llvm.parse_assembly(text, llvm.create_context()) as module:
            module.verify()
    except RuntimeError as error:
        raise _refused(str(error), text) from error


def assembly(text: str, triple: str, cpu: str, flags: str) -> str:
    """What the processor will run, for people."""
    llvm = binding()
    machine = _machine(triple, cpu, flags)
    with llvm.parse_assembly(text, llvm.create_context()) as module:
        found: str = machine.emit_assembly(module)
        return found


class Emitter:
    """Turns IR text into object code for one processor. Belongs to one thread at a time."""

    def __init__(self, triple: str, cpu: str, flags: str) -> None:
        llvm = binding()
        self.machine = _machine(triple, cpu, flags)
        self.passes = llvm.create_new_module_pass_manager()
        self.passes.add_always_inliner_pass()
        options = llvm.create_pipeline_tuning_options()
        self.pass_builder = llvm.create_pass_builder(self.machine, options)
        self.calls = _Calls.get()

    def emit(self, text: str) -> bytes:
        """Object code of a module.

        Loops come as vectors, invariant code outside of them and common values once, so the only
        pass that pays is inlining what the text marks `alwaysinline` (0.3 ms). O1 takes longer
        than all the rest and changes nothing.

        raises   CompileError with LLVM's words
        """
        context = binding().create_context()
        try:
            return self._emit(_pointer(context), text)
        finally:
            context.close()

    def _emit(self, context: int, text: str) -> bytes:
        calls = self.calls
        problem = ctypes.c_char_p()
        module = calls.parse(context, text.encode(), ctypes.byref(problem))
        if problem.value:
            raise _refused(problem.value.decode(), text)
        try:
            if "alwaysinline" in text:
                calls.run(_pointer(self.passes), module, _pointer(self.pass_builder))
            buffer = calls.emit(_pointer(self.machine), module, 1, ctypes.byref(problem))
            if not buffer:
                raise _refused((problem.value or b"no reason given").decode(), text)
            code = ctypes.string_at(calls.start(buffer), calls.size(buffer))
            calls.dispose_buffer(buffer)
            return code
        finally:
            calls.dispose_module(module)


class _Calls:
    """llvmlite's C functions, without its lock."""

    def __init__(self, path: str) -> None:
        word, text = ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)
        holding, releasing = ctypes.PyDLL(path), ctypes.CDLL(path)

        def bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
            function = library[f"LLVMPY_{name}"]
            function.restype, function.argtypes = result, arguments
            return function

        number = ctypes.c_int
        self.parse = bind(holding, "ParseAssembly", word, word, ctypes.c_char_p, text)
        self.emit = bind(releasing, "TargetMachineEmitToMemory", word, word, word, number, text)
        self.run = bind(releasing, "RunNewModulePassManager", None, word, word, word)
        self.start = bind(holding, "GetBufferStart", word, word)
        self.size = bind(holding, "GetBufferSize", ctypes.c_size_t, word)
        self.dispose_buffer = bind(holding, "DisposeMemoryBuffer", None, word)
        self.dispose_module = bind(holding, "DisposeModule", None, word)

    @staticmethod
    @functools.cache
    def get() -> _Calls:
        return _Calls(binding().ffi.lib._name)


class Library:
    """Linked code: addresses by function name. The code is unloaded when this object goes."""

    __slots__ = ("__weakref__", "addresses", "tracker")

    def __init__(self, tracker: Any, addresses: dict[str, int]) -> None:
        self.tracker = tracker
        self.addresses = addresses


def link(
    objects: Sequence[bytes],
    exports: Iterable[str],
    imports: Mapping[str, int] | None = None,
    declared: Iterable[str] = (),
) -> Library:
    """Load object code into this process.

    exports  names of the functions whose addresses are wanted
    imports  addresses of functions that cannot be found by name in the process
    declared names that the code uses, for the error's message
    raises   CompileError naming what could not be resolved
    """
    llvm = binding()
    builder = llvm.JITLibraryBuilder()
    for code in objects:
        builder.add_object_img(code)
    builder.add_current_process()
    names = list(exports)
    for name in names:
        builder.export_symbol(name)
    for name, address in (imports or {}).items():
        builder.import_symbol(name, address)
    try:
        tracker = builder.link(linker(), f"fusee{next(_numbers)}")
    except RuntimeError as error:
        missing = [
            name
            for name in dict.fromkeys(declared)
            if not name.startswith("llvm.") and name not in (imports or {}) and symbol(name) is None
        ]
        raise CompileError(
            f"LLVM could not load the generated code: {str(error).strip()}",
            did="stopped; nothing was run",
            remedy=f"this process has no {', '.join(missing)}" if missing else None,
        ) from error
    return Library(tracker, {name: tracker[name] for name in names})


@functools.cache
def linker() -> Any:
    """The process's linker. JITLink maps an object as one block, so relative jumps always reach."""
    triple, cpu, _ = host()
    machine = _machine(triple, cpu, "")
    return binding().create_lljit_compiler(machine, use_jit_link=True, suppress_errors=True)


def _machine(triple: str, cpu: str, flags: str) -> Any:
    llvm = binding()
    if triple.split("-")[0] != host()[0].split("-")[0]:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    # position-independent: cached objects are loaded at other addresses by other processes
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=flags, opt=_EFFORT, reloc="pic", codemodel="default"
    )


def _pointer(reference: Any) -> int:
    address = ctypes.cast(reference._ptr, ctypes.c_void_p).value
    assert address is not None
    return address


def _refused(words: str, text: str) -> CompileError:
    return CompileError(
        f"LLVM refused generated code: {words.strip()}",
        did="stopped; nothing was run",
        remedy="report this as a bug of Fusee, with the output of FUSEE_LOG=llvm",
    )
