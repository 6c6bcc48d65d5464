"""IR text to functions: sharing, caches, threads, errors."""

from __future__ import annotations

import builtins
import ctypes
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusee import log
from fusee.config import settings
from fusee.errors import CompileError, MissingPackage
from fusee.runtime import jit
from tests.runtime.kernels import DO_NOTHING, EXP8, SCALED_ADD, TRIPLED, WHO, numbered

KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


def call(function: jit.Function, *buffers: Any) -> None:
    pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    KERNEL(function.address)(ctypes.addressof(pointers), None, 0, 1, 0)


def test_equal_units_are_one_function() -> None:
    build = jit.Build()
    keys = [build.add(text) for text in (SCALED_ADD, WHO, SCALED_ADD)]
    first, second, third = build.finish()
    assert keys[0] == keys[2] != keys[1]
    assert first is third is not second
    again = jit.Build()
    again.add(WHO)
    assert again.finish() == [second]
    assert again.compiled == again.loaded == 0


def test_units_may_share_a_name() -> None:
    build = jit.Build()
    for number in range(5):
        build.add(numbered(DO_NOTHING.replace("@kernel", "@pointwise"), number), "pointwise")
    assert len({function.address for function in build.finish()}) == 5


def test_warm_start_compiles_nothing(cache_dir: Path) -> None:
    texts = [numbered(WHO, 100), numbered(SCALED_ADD, 100)]
    for compiled, loaded in ((2, 0), (0, 2)):
        build = jit.Build()
        for text in texts:
            build.add(text)
        functions = build.finish()
        assert (build.compiled, build.loaded) == (compiled, loaded)
        del functions, build
        gc.collect()
    assert len(list(cache_dir.glob("*.o"))) == 2


def test_without_disk(cache_dir: Path) -> None:
    build = jit.Build(use_disk=False)
    build.add(numbered(WHO, 101))
    assert build.finish()
    assert not cache_dir.exists()


def test_whoever_defers_waits(cache_dir: Path) -> None:
    with jit.deferred() as outer:
        with jit.deferred() as waiting:
            build = jit.Build()
            build.add(numbered(WHO, 106))
            jit.defer(build.finish)
        assert waiting == [build.finish] and build._pending
        assert not outer
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: build.finish(), range(8)))
    assert all(one == found[0] for one in found)
    build = jit.Build()
    build.add(numbered(WHO, 107))
    jit.defer(build.finish)
    assert not build._pending


def test_the_switch_interval_is_the_programs_again() -> None:
    usual = sys.getswitchinterval()
    with pytest.raises(KeyError), jit.deferred():
        with ThreadPoolExecutor(1) as threads, jit.deferred():
            assert threads.submit(sys.getswitchinterval).result() < usual
        assert sys.getswitchinterval() < usual
        raise KeyError
    assert sys.getswitchinterval() == usual


def test_what_a_compiling_thread_asks_for_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "count", lambda: 1)
    jit._pool.cache_clear()
    try:
        early = jit.Early(lambda: jit.compile_one(numbered(DO_NOTHING, 108)))
        later = jit.Early(lambda: (threading.current_thread().name, early()))
        name, function = later()
        assert name.startswith("fusee-compile") and function is early()
        jit.Early.known[-2:] = []
    finally:
        jit._pool.cache_clear()


def test_code_is_unloaded_with_its_last_function() -> None:
    function = jit.compile_one(numbered(DO_NOTHING, 102))
    key = function.key
    assert jit._functions[key] is function
    del function
    gc.collect()
    assert key not in jit._functions


def test_functions_and_constants_of_a_unit_are_found() -> None:
    x, y = (ctypes.c_float * 1)(14.0), (ctypes.c_float * 1)()
    call(jit.compile_one(TRIPLED), x, y)
    assert y[0] == 42.0


@pytest.mark.skipif(
    "avx2" not in jit.host_target().features, reason="SLEEF's eight lanes need AVX2"
)
def test_sleef_is_found_in_torch() -> None:
    x, y = (ctypes.c_float * 8)(*range(8)), (ctypes.c_float * 8)()
    call(jit.compile_one(EXP8), x, y)
    assert y[1] == pytest.approx(2.718281828)
    assert jit.symbol("Sleef_expf8_u10")
    assert jit.symbol("Sleef_of_no_such_name") is None


def test_unresolved_symbol_is_named() -> None:
    text = "define void @kernel() {\n call void @nobody()\n ret void\n}\ndeclare void @nobody()\n"
    with pytest.raises(CompileError, match="this process has no nobody"):
        jit.compile_one(text)


def test_imports_resolve_what_has_no_name() -> None:
    seen: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int64)(seen.append)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    text = (
        "define void @kernel() {\n call void @tell(i64 7)\n ret void\n}\ndeclare void @tell(i64)\n"
    )
    function = jit.compile_one(text, {"tell": address})
    ctypes.CFUNCTYPE(None)(function.address)()
    assert seen == [7]


def test_text_that_llvm_refuses() -> None:
    with pytest.raises(CompileError, match="expected type"):
        jit.compile_one("define nonsense @kernel() {}")
    unsound = "define i64 @kernel() {\n %x = add i64 %y, 1\n %y = add i64 %x, 1\n ret i64 %y\n}\n"
    with pytest.raises(CompileError, match="does not dominate"):
        jit.Build(check=True).add(unsound)


def test_artefacts() -> None:
    heard: list[log.Record] = []
    undo = log.subscribe(heard.append, "llvm", "asm")
    jit.compile_one(numbered(DO_NOTHING, 103))
    undo()
    assert [record.artefact for record in heard] == ["llvm", "asm"]
    assert "define void @kernel" in heard[0].text
    assert "ret" in heard[1].text


def test_missing_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llvmlite"):
            raise ModuleNotFoundError("No module named 'llvmlite'")
        return real(name, *args, **kwargs)

    jit.binding.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackage, match="pip install llvmlite"):
        jit.binding()
    monkeypatch.undo()
    assert jit.binding()


CONCURRENT = """
import sys
from fusee.runtime import jit
from tests.runtime.kernels import SCALED_ADD, numbered
build = jit.Build()
for number in range(12):
    build.add(numbered(SCALED_ADD, number))
assert len({function.address for function in build.finish()}) == 12
"""


def test_processes_share_one_cache(cache_dir: Path) -> None:
    environment = {**os.environ, "FUSEE_CACHE_DIR": str(cache_dir)}
    command = [sys.executable, "-W", "error", "-c", CONCURRENT]
    running = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    names = sorted(path.name for path in cache_dir.iterdir())
    assert len(names) == 12
    assert not any(name.startswith(".new-") for name in names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork in a process with threads
def test_a_forked_child_compiles() -> None:
    jit.compile_one(numbered(DO_NOTHING, 104))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            jit.compile_one(numbered(DO_NOTHING, 105))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


AT_EXIT = """
import atexit
import torch
import fusee
x, function = torch.ones(300), fusee.compile(lambda x: (x.sin() + 1).softmax(0))
atexit.register(lambda: print(function(x).sum().item()))
"""


def test_a_program_that_ends_begins_no_threads(cache_dir: Path) -> None:
    for _ in range(2):  # without kept code, and with it
        found = subprocess.run(
            [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True
        )
        assert abs(float(found.stdout) - 1) < 1e-5, found.stderr


AT_THE_END = """
import os
from fusee.runtime import jit

class Definition(jit._MethodDef):
    def __del__(self, say=os.write):
        say(1, b"freed")

jit._MethodDef = Definition
from fusee.runtime.launch import fitter, runner
run, fit = runner(), fitter()
"""


def test_a_program_that_ends_frees_no_definition_that_a_builtin_reads() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, check=True)
    assert ended.stdout == b"", ended.stderr


def test_a_process_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jit.prepare()
    asked: list[Any] = []
    monkeypatch.setattr(jit, "submit", asked.append)
    for _ in range(3):  # as each graph does
        jit.prepare()
    assert not asked
    assert settings().cpu == ""
