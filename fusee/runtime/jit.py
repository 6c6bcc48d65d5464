"""IR text to callable functions: in memory, from disk, or compiled now by several threads.

A unit is the text of a module that defines one external function. Units with the same text are one
function, in every graph of the process and, through the cache, in every process. Hand each unit
over as soon as its text is there: threads compile while the caller writes the next one.

    prepare()                        # early: loads LLVM while the caller is busy with the graph
    build = Build()
    for text in texts:
        build.add(text)
    functions = build.finish()       # Function objects, in the order of `add`
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future

from fusee.log import publish
from fusee.runtime import cpu, llvm, workers
from fusee.runtime.cache import ObjectCache, content_key, object_cache

__all__ = ["Build", "Function", "compile_one", "prepare"]

# Part of every key. Raise it when equal text would give other object code.
_VERSION = "2"
_DECLARED = re.compile(r"^declare [^@]*@([\w.$]+)\(", re.MULTILINE)
# Sums the roots of a range: a loop over vectors as kernels have them.
_EXAMPLE = """
define void @kernel(ptr %bufs, i64 %begin, i64 %end) {
entry:
  %from = load ptr, ptr %bufs
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %body, label %exit
body:
  %i = phi i64 [ %begin, %entry ], [ %next, %body ]
  %sum = phi <4 x float> [ zeroinitializer, %entry ], [ %sum.next, %body ]
  %at = getelementptr float, ptr %from, i64 %i
  %x = load <4 x float>, ptr %at, align 4
  %y = call <4 x float> @llvm.sqrt.v4f32(<4 x float> %x)
  %sum.next = fadd <4 x float> %sum, %y
  %next = add nsw i64 %i, 4
  %again = icmp slt i64 %next, %end
  br i1 %again, label %body, label %exit
exit:
  %all = phi <4 x float> [ zeroinitializer, %entry ], [ %sum.next, %body ]
  %total = call float @llvm.vector.reduce.fadd.v4f32(float 0.0, <4 x float> %all)
  store float %total, ptr %from
  ret void
}
declare <4 x float> @llvm.sqrt.v4f32(<4 x float>)
declare float @llvm.vector.reduce.fadd.v4f32(float, <4 x float>)
"""


class Function:
    """Machine code. It is unloaded when neither this object nor another of its library is left."""

    __slots__ = ("__weakref__", "address", "key", "library")

    def __init__(self, key: str, library: llvm.Library) -> None:
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
        self.target = cpu.target()
        self.cache = object_cache() if use_disk else None
        self.check = check
        self.imports = dict(imports or {})
        self.compiled = self.loaded = 0  # units compiled now, and taken from disk
        self._keys: list[str] = []
        self._ready: dict[str, Function] = {}
        self._pending: dict[str, Future[bytes] | bytes] = {}
        self._texts: list[str] = []  # of what is pending

    def add(self, text: str, name: str = "kernel") -> str:
        """Take one unit.

        text     a module that defines one external function, @name, and calls it nowhere
        returns  the key of the function; equal texts give equal keys
        raises   CompileError if `check` is set and LLVM finds the text at fault
        """
        key = content_key(_salt(self.target), text)
        self._keys.append(key)
        if key in self._ready or key in self._pending:
            return key
        known = _functions.get(key)
        if known is not None:
            self._ready[key] = known
            return key
        if self.check:
            llvm.verify(text)
        self._texts.append(text)
        publish("llvm", name, text)
        self._publish_assembly(name, text)
        # several units may go by one name; what is linked needs unique ones
        named = text.replace(f"@{name}(", f"@{_name(key)}(", 1)
        code = self.cache.get(key) if self.cache is not None else None
        if code is not None:
            self.loaded += 1
            self._pending[key] = code
        else:
            self.compiled += 1
            self._pending[key] = workers.submit(_emit, self.target, key, named, self.cache)
        return key

    def finish(self) -> list[Function]:
        """The functions of all units, in the order of `add`.

        raises   CompileError if LLVM refuses a unit or cannot resolve what it calls
        """
        if self._pending:
            keys = list(self._pending)
            objects = [
                one if isinstance(one, bytes) else one.result() for one in self._pending.values()
            ]
            declared = itertools.chain.from_iterable(map(_DECLARED.findall, self._texts))
            library = llvm.link(objects, map(_name, keys), self.imports, declared)
            for key in keys:
                self._ready[key] = _functions[key] = Function(key, library)
            self._pending.clear()
            self._texts.clear()
        if self.cache is not None:
            self.cache.report()
        return [self._ready[key] for key in self._keys]

    def _publish_assembly(self, name: str, text: str) -> None:
        target = self.target
        publish("asm", name, lambda: llvm.assembly(text, target.triple, target.name, target.flags))


def compile_one(text: str, imports: Mapping[str, int] | None = None) -> Function:
    """The function of a single unit that names it @kernel. See Build."""
    build = Build(imports=imports)
    build.add(text)
    return build.finish()[0]


def prepare() -> None:
    """Load LLVM now, and make it ready in the compiling threads without waiting for them.

    raises   MissingPackage without llvmlite
    """
    # not in a thread: an import there would wait for Python's lock at every file
    target = cpu.target()
    workers.submit(llvm.linker)
    for _ in range(workers.count()):
        workers.submit(_warm_up, target)


# Functions live as long as some Program uses them, so that nothing outlives its model.
_functions: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
_of_thread = threading.local()


def _name(key: str) -> str:
    return f"fusee_{key}"


@functools.cache
def _salt(target: cpu.Cpu) -> str:
    return "\n".join((_VERSION, llvm.version(), target.triple, target.name, target.flags))


def _warm_up(target: cpu.Cpu) -> None:
    """The first module costs a thread several times what later ones do."""
    _emitter(target).emit(_EXAMPLE)


def _emitter(target: cpu.Cpu) -> llvm.Emitter:
    """This thread's emitter for `target`."""
    emitters: dict[cpu.Cpu, llvm.Emitter] = getattr(_of_thread, "emitters", None) or {}
    if target not in emitters:
        emitters[target] = llvm.Emitter(target.triple, target.name, target.flags)
        _of_thread.emitters = emitters
    return emitters[target]


def _emit(target: cpu.Cpu, key: str, text: str, cache: ObjectCache | None) -> bytes:
    code = _emitter(target).emit(text)
    if cache is not None:
        cache.put(key, code)
    return code
