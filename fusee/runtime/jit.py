"""IR text to callable functions: in memory, from disk, or compiled now by several threads.

A unit is the text of a module that defines one external function. Units with the same text are one
function, in every graph of the process and, through the cache, in every process. Hand each unit
over as soon as its text is there: threads compile while the caller writes the next one.

    prepare()                        # early: loads LLVM while the caller is busy with the graph
    build = Build()
    for text in texts:
        build.add(text)
    functions = build.finish()       # Function objects, in the order of `add`

The last part makes Python builtins of such units.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.thread import _global_shutdown_lock
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from fusee.config import settings
from fusee.errors import CompileError, MissingPackage, SettingError
from fusee.log import publish
from fusee.runtime import Setting, in_child
from fusee.runtime.cache import content_key, object_cache
from fusee.runtime.llvm_text import Level

# ---------------------------------------------------------------------------- llvm
# All contact with LLVM, through llvmlite (tested with 0.50, LLVM 22).
#
# llvmlite's Python functions hold one lock for the whole process, so that threads never compile at
# the same time. LLVM itself asks only that no two threads share a context or a target machine.
# Emitter gives each thread its own and calls llvmlite's C functions directly: two threads take half
# the time of one. Of these calls only the long one lets go of Python's lock, since having it back
# may take a whole switch interval (5 ms) while another thread is busy.

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
def libtorch() -> ctypes.CDLL:
    """That library, to ask for names."""
    return ctypes.CDLL(str(torch_library()))


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

    def __init__(self, target: Cpu) -> None:
        self.machine = _machine(target.triple, target.name, target.flags)
        self.calls = _Calls.get()
        self.kind = 0 if target.triple.startswith("nvptx") else 1  # assembly, or object code

    def emit(self, text: str) -> bytes:
        """Object code of a module; for NVIDIA's GPUs the text of their assembler.

        Loops come as vectors, invariant code outside of them, common values once and functions
        inlined, so no pass pays: O1 takes longer than all the rest and changes nothing.

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
            buffer = calls.emit(_pointer(self.machine), module, self.kind, ctypes.byref(problem))
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
    builder = binding().JITLibraryBuilder()
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


def linker() -> Any:
    """The process's linker. JITLink maps an object as one block, so relative jumps always reach."""
    with _linking:
        return _linker()


_linking = threading.Lock()


@functools.cache
def _linker() -> Any:
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


# ---------------------------------------------------------------------------- cpu
# What processor code is generated for.

_X86_64 = "x86_64-unknown-linux-gnu"
_SSE = ("sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
_AVX2 = (*_SSE, "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class Cpu(NamedTuple):
    """A processor as LLVM names it. `features` are those it has, such as "avx2" or "neon"."""

    triple: str
    name: str
    features: frozenset[str]
    flags: str  # features as a target machine takes them: "+avx2,-avx512f,..."


# What FUSEE_CPU may ask for; "" is the host.
_NAMED = {
    "sse": (_X86_64, "x86-64-v2", _SSE),
    "avx2": (_X86_64, "x86-64-v3", _AVX2),
    "avx512": (_X86_64, "x86-64-v4", _AVX512),
    "neon": ("aarch64-unknown-linux-gnu", "generic", ("neon", "fp-armv8")),
}


def host_target() -> Cpu:
    """The processor to generate code for: the host's, or the one that FUSEE_CPU names.

    raises   MissingPackage without llvmlite
    """
    return named(settings().cpu)


def named(name: str) -> Cpu:
    """One of the processors that FUSEE_CPU may name; "" is the host's."""
    if not name:
        return _host()
    triple, cpu, features = _NAMED[name]
    return Cpu(triple, cpu, frozenset(features), ",".join(f"+{feature}" for feature in features))


@functools.cache
def _host() -> Cpu:
    triple, cpu, found = host()
    features = frozenset(name for name, present in found.items() if present)
    flags = ",".join(f"{'+' if found[name] else '-'}{name}" for name in sorted(found))
    return Cpu(triple, cpu, features, flags)


# ---------------------------------------------------------------------------- workers
# Threads that compile.
#
# A fork waits until they are at rest: a child has none of its parent's threads, and would wait for
# ever for a lock of LLVM's that one of them held, or llvmlite's that any thread may hold.

P = ParamSpec("P")
T = TypeVar("T")

# More of them are in each other's way, and in that of the thread that traces: the first call of ViT
# on 16 processors takes 0.45 s with two threads, and 0.7 with eight.
_MOST = 4
# What LLVM needs is more than a program of many threads may have chosen for them.
_STACK_BYTES = 1 << 23


class _Rest:
    """How many jobs run now, and a way to wait until there are none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self.linked: Any = None  # what llvmlite locks, which a thread of the program may hold

    def run(self, job: Callable[[], T]) -> T:
        with self.changed:
            self.running += 1
        try:
            return job()
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    def begin(self) -> None:
        """Wait until nothing runs, and let nothing begin."""
        self.changed.acquire()
        while self.running:
            self.changed.wait()
        if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
            self.linked = ffi.lib._lock
            self.linked.__enter__()

    def end(self) -> None:
        if self.linked is not None:
            self.linked.__exit__()
        self.changed.release()


_rest = _Rest()


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a function in one of the threads. RuntimeError if the program ends, or may have none."""
    # who has the lock of all executors may wait for TorchDynamo's, and that for what compiles here
    if not _global_shutdown_lock.acquire(timeout=0.1):
        raise RuntimeError("another executor is adding a job")
    _global_shutdown_lock.release()
    with _rest.changed:
        before = threading.stack_size(_STACK_BYTES)
        try:
            return _pool().submit(_rest.run, functools.partial(function, *args, **kwargs))
        finally:
            threading.stack_size(before)


def submit(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a function in one of the threads; here where none can begin, or in one that compiles,
    which would wait for itself."""
    try:
        if getattr(_of_thread, "compiles", False):
            raise RuntimeError("a job of its own")
        return in_thread(function, *args, **kwargs)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # whoever asks for the result gets it
            done.set_exception(error)
        return done


def count() -> int:
    """How many threads there are."""
    return min(os.cpu_count() or 1, _MOST)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    def begin() -> None:
        _of_thread.compiles = True

    return ThreadPoolExecutor(count(), "fusee-compile", begin)


@in_child
def _renew() -> None:
    _rest.end()
    _rest.changed, _rest.running = threading.Condition(), 0
    _pool.cache_clear()
    for one in Early.known:
        one.made = one.made if one.made is not None and one.made.done() else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest.begin, after_in_parent=_rest.end)


# ---------------------------------------------------------------------------- jit


# Part of every key. Raise it when equal text would give other object code.
_VERSION = "2"
_DECLARED = re.compile(r"^declare [^@]*@([\w.$]+)\(", re.MULTILINE)


class Function:
    """Machine code. It is unloaded when neither this object nor another of its library is left."""

    __slots__ = ("__weakref__", "address", "key", "library")

    def __init__(self, key: str, library: Library) -> None:
        self.key = key
        self.library = library
        self.address = library.addresses[_name(key)]


class Build:
    """One set of units that become functions together.

    use_disk  read and write the cache on disk
    check     let LLVM verify each text first; raises CompileError from `add`
    imports   addresses of functions that the units call and that cannot be found by name
    """

    def __init__(
        self,
        *,
        use_disk: bool = True,
        check: bool = False,
        imports: Mapping[str, int] | None = None,
    ) -> None:
        self.target = host_target()
        self.cache = object_cache() if use_disk else None
        self.check = check
        self.imports = dict(imports or {})
        self.compiled = self.loaded = 0  # units compiled now, and taken from disk
        self._keys: list[str] = []
        self._ready: dict[str, Function] = {}
        self._pending: dict[str, Future[bytes] | bytes] = {}
        self._texts: list[str] = []  # of what is pending
        self._finishing = threading.Lock()

    def add(self, text: str, name: str = "kernel") -> str:
        """Take one unit.

        text     a module that defines one external function, @name, and calls it nowhere
        returns  the key of the function; equal texts give equal keys
        raises   CompileError if `check` is set and LLVM finds the text at fault
        """
        key = content_key(self.salt(), text)
        self._keys.append(key)
        if key in self._ready or key in self._pending:
            return key
        known = _functions.get(self.place + key)
        if known is not None:
            self._ready[key] = known
            return key
        if self.check:
            verify(text)
        self._texts.append(text)
        publish("llvm", name, text)
        target = self.target
        publish("asm", name, lambda: assembly(text, target.triple, target.name, target.flags))
        # several units may go by one name; what is linked needs unique ones
        named = text.replace(f"@{name}(", f"@{_name(key)}(", 1)
        code = self.cache.get(key) if self.cache is not None else None
        if code is not None:
            self.loaded += 1
            self._pending[key] = code
        else:
            self.compiled += 1
            self._pending[key] = submit(self._kept, key, named)
        return key

    def finish(self) -> list[Function]:
        """The functions of all units, in the order of `add`. Any thread may ask, again and again.

        raises   CompileError if LLVM refuses a unit or cannot resolve what it calls
        """
        with self._finishing:
            if self._pending:
                self._load(list(self._pending))
            return [self._ready[key] for key in self._keys]

    def _load(self, keys: Sequence[str]) -> None:
        units = self._pending.values()
        objects = [one if isinstance(one, bytes) else one.result() for one in units]
        for key, library in zip(keys, self.load(list(map(_name, keys)), objects), strict=True):
            self._ready[key] = _functions[self.place + key] = Function(key, library)
        self._pending.clear()
        self._texts.clear()
        if self.cache is not None:
            self.cache.report()

    # What differs where the code is not this processor's.

    place = ""  # apart from which equal texts are functions of their own

    def salt(self) -> str:
        """All that code depends on besides its text."""
        target = self.target
        return "\n".join((_VERSION, version(), target.triple, target.name, target.flags))

    def uses(self, function: Function) -> str:
        """What there is to say of a function's use of the machine."""
        return ""

    def make(self, text: str) -> bytes:
        """Code of a unit; called in a compiling thread."""
        return emit(self.target, text)

    def load(self, names: Sequence[str], objects: Sequence[bytes]) -> Sequence[Library]:
        """For each unit the library that has its function. raises SettingError"""
        features = host()[2] if settings().cpu else dict.fromkeys(self.target.features, True)
        if lacking := [name for name in self.target.features if not features.get(name)]:
            raise SettingError(
                f"FUSEE_CPU={settings().cpu} is another processor than this one, which lacks"
                f" {', '.join(sorted(lacking))}",
                did="generated code, and did not run it",
                remedy="unset it: code is generated for this processor",
            )
        declared = itertools.chain.from_iterable(map(_DECLARED.findall, self._texts))
        return [link(objects, names, self.imports, declared)] * len(names)

    def _kept(self, key: str, text: str) -> bytes:
        code = self.make(text)
        if self.cache is not None:
            self.cache.put(key, code)
        return code


def compile_one(text: str, imports: Mapping[str, int] | None = None) -> Function:
    """The function of a single unit that names it @kernel. See Build."""
    build = Build(imports=imports)
    build.add(text)
    return build.finish()[0]


@contextlib.contextmanager
def deferred() -> Iterator[list[Callable[[], object]]]:
    """What `defer` is given inside, by this thread. Whoever asks calls it, in order: threads may be
    busy with the machine code of a graph when it has been compiled, at the latest its first call
    waits for them.

    Each function of C's that lets go of Python's lock has it back after a switch interval, usually
    5 ms, as long as this thread is busy; inside it is 0.5 ms.
    """
    before: list[Callable[[], object]] | None = getattr(_of_thread, "deferred", None)
    _of_thread.deferred = []
    try:
        with _switching:
            yield _of_thread.deferred
    finally:
        _of_thread.deferred = before


def defer(function: Callable[[], object]) -> None:
    """Call it, now or where somebody has `deferred` that."""
    waiting: list[Callable[[], object]] | None = getattr(_of_thread, "deferred", None)
    if waiting is None:
        function()
    else:
        waiting.append(function)


_switching = Setting(sys.getswitchinterval, sys.setswitchinterval, lambda own: min(own, 0.0005))


class Early(Generic[T]):
    """A function without arguments, called once: by a compiling thread as soon as any graph is
    compiled, for what every program needs."""

    known: ClassVar[list[Early[Any]]] = []

    def __init__(self, make: Callable[[], T]) -> None:
        functools.update_wrapper(self, make)
        self.make = make
        self.made: Future[T] | None = None
        self.known.append(self)

    def begin(self, run: Callable[[Callable[[], T]], Future[T]] = submit) -> Future[T]:
        if self.made is None:
            self.made = run(self.make)
        return self.made

    def __call__(self) -> T:
        return self.begin().result()


def prepare() -> None:
    """Load LLVM now, and make it ready in the compiling threads without waiting for them.

    raises   MissingPackage without llvmlite
    """
    host_target()  # not in a thread: an import there would wait for Python's lock at every file
    with contextlib.suppress(RuntimeError):  # no thread can begin where the program ends
        for one in Early.known:
            one.begin(in_thread)


# Functions live as long as some Program uses them, so that nothing outlives its model.
_functions: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
_of_thread = threading.local()


def _name(key: str) -> str:
    return f"fusee_{key}"


_idle: defaultdict[Cpu, list[Emitter]] = defaultdict(list)  # taking and leaving one is atomic


def emit(target: Cpu, text: str) -> bytes:
    """As Emitter has it. Called in a compiling thread."""
    try:
        emitter = _idle[target].pop()
    except IndexError:
        emitter = Emitter(target)
    try:
        return emitter.emit(text)
    finally:
        _idle[target].append(emitter)


def add_emitter(target: Cpu) -> None:
    """One more, before it is needed: while Python is busy a thread takes long to make one."""
    _idle[target].append(Emitter(target))


# ---------------------------------------------------------------------------- builtins
# Python builtins from LLVM IR: machine code that Python calls like any C function.
#
# @kernel(ptr %self, ptr %args, i64 %count), as METH_FASTCALL has it.

_METH_FASTCALL = 0x80

_C_API = tuple(
    "PyLong_AsSsize_t PyLong_FromSsize_t PyErr_Occurred PyErr_Clear PyTuple_GetItem"
    " PyErr_SetString PyEval_SaveThread PyEval_RestoreThread PyDict_GetItemWithError".split()
)


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


# The parts of a builtin's text, in functions @kernel(ptr %self, ptr %args, i64 %count).


def argument(level: Level, k: object) -> str:
    """The argument number `k`, an object."""
    return level.load("ptr", "%args", k)


def number(level: Level, k: object) -> str:
    """The argument number `k`, an integer; the builtin raises what reading it raises."""
    value = level.call("i64", "PyLong_AsSsize_t", ("ptr", argument(level, k)))
    fine = level.op(f"icmp ne i64 {value}, -1")

    def has_failed() -> str:
        return level.op(f"icmp ne ptr {level.call('ptr', 'PyErr_Occurred')}, null")

    level.leave(level.chosen(fine, "false", has_failed, "i1"), lambda: "ptr null")
    return value


def raised(level: Level, error: str, words: str) -> str:
    """What a builtin returns that raises one of Python's errors, with these words."""
    symbol, text = f"PyExc_{error}", f'"{words}"'
    declares = level.writer.declares
    declares[symbol] = f"@{symbol} = external global ptr"
    declares[text] = f'@{text} = internal constant [{len(words) + 1} x i8] c"{words}\\00"'
    kind = level.load("ptr", f"@{symbol}")
    level.call("void", "PyErr_SetString", ("ptr", kind), ("ptr", f"@{text}"))
    return "ptr null"


def differing(level: Level, row: str, first: int, values: Sequence[str]) -> str:
    """Whether the words of a row, from number `first` on, differ from values: one test for all."""
    pairs = [(value, level.load("i64", row, k)) for k, value in enumerate(values, first)]
    bits = level.either("i64", "or", *(level.op(f"xor i64 {x}, {y}") for x, y in pairs))
    return level.op(f"icmp ne i64 {bits}, 0")


def answered(level: Level, value: str) -> str:
    """What a builtin returns that gives an i64."""
    return f"ptr {level.call('ptr', 'PyLong_FromSsize_t', ('i64', value))}"


def answer(level: Level, value: str) -> str:
    """The unit of a builtin that is written, and gives an i64."""
    result = answered(level, value)
    return level.writer.module("define ptr @kernel(ptr %self, ptr %args, i64 %count)", result)


def builtin(name: str, text: str, imports: dict[str, int] | None = None) -> Callable[..., int]:
    """A Python builtin from IR text. It stays for the life of the process.

    text     a unit (see jit) whose @kernel(ptr self, ptr args, i64 n) is a METH_FASTCALL function
    imports  addresses of what it calls, besides the process's and Python's C API
    """
    function = compile_one(text, {**_c_api(), **(imports or {})})
    definition = _MethodDef(name.encode(), function.address, _METH_FASTCALL, None)
    # never freed: the builtin reads its definition when it goes, and a program that ends frees both
    # in any order
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((definition, function)))
    made: Callable[..., int] = _made(ctypes.addressof(definition), None)
    return made


def bound(function: Any, to: Any) -> Any:
    """A builtin as `builtin` gives it, with a `self`."""
    return _made(ctypes.c_void_p.from_address(id(function) + 16).value or 0, to)


def _made(definition: int, itself: Any) -> Any:
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return make(definition, itself, None)


@functools.cache
def _c_api() -> dict[str, int]:
    """Addresses in this interpreter; the process may hold another one that is found by name."""
    found = {}
    for name in _C_API:
        found[name] = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0
    for name in ("PyExc_TypeError", "PyExc_IndexError", "PyLong_Type"):
        found[name] = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.pythonapi, name))
    return found
