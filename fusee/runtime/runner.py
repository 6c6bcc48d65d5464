"""The builtin that runs launches: machine code that Python calls like any C function.

    run(state, first, last, threads, slot, pointer, slot, pointer, ...) -> int

stores the pointers in the table of the frame at address `state`, then runs its launches [first,
last) in order. Returns 0, or the code of the first kernel that reported one; launches after it are
not run. Wrong arguments raise before anything is run. A launch with two or more units of work runs
on a team of `threads`; when the launches have several units in all, Python's lock is released
meanwhile. The memory that it walks through is laid out by Frame in program.py:

    state   code, value, table, launches, number of launches, number of slots
    launch  function, slots, number of slots, pointers, params, total, units, align

all of them 64-bit words.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from fusee.runtime import jit, threads

__all__ = ["LAUNCH_WORDS", "STATE_WORDS", "builtin", "runner"]

STATE_WORDS = 6
LAUNCH_WORDS = 8

# Units of work above which other Python threads may run: giving up the lock costs less than 0.1 us,
# but having it back may take another thread's switch interval.
_UNITS_TO_RELEASE = 4

_METH_FASTCALL = 0x80

_C_API = (
    "PyLong_AsSsize_t",
    "PyLong_FromSsize_t",
    "PyErr_Occurred",
    "PyTuple_GetItem",
    "PyErr_SetString",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)

# One thread of a team: its share of the iterations is a whole number of `align`. All threads take
# part although some may find nothing to do: libgomp ends threads when a team is smaller than the
# one before.
_TEAM = """
define internal void @team(ptr %launch) nounwind {
  %thread32 = call i32 @omp_get_thread_num()
  %thread = sext i32 %thread32 to i64
  %team32 = call i32 @omp_get_num_threads()
  %team = sext i32 %team32 to i64
  %total.at = getelementptr i64, ptr %launch, i64 5
  %total = load i64, ptr %total.at
  %units.at = getelementptr i64, ptr %launch, i64 6
  %units = load i64, ptr %units.at
  %align.at = getelementptr i64, ptr %launch, i64 7
  %align = load i64, ptr %align.at
  %active = call i64 @llvm.smin.i64(i64 %team, i64 %units)
  %up = add i64 %total, %active
  %up1 = sub i64 %up, 1
  %share = udiv i64 %up1, %active
  %aligned = add i64 %share, %align
  %aligned1 = sub i64 %aligned, 1
  %blocks = udiv i64 %aligned1, %align
  %chunk = mul i64 %blocks, %align
  %begin = mul i64 %chunk, %thread
  %stop = add i64 %begin, %chunk
  %end = call i64 @llvm.smin.i64(i64 %stop, i64 %total)
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %work, label %done
work:
  %function = load ptr, ptr %launch
  %pointers.at = getelementptr i64, ptr %launch, i64 3
  %pointers = load ptr, ptr %pointers.at
  %params.at = getelementptr i64, ptr %launch, i64 4
  %params = load ptr, ptr %params.at
  call void %function(ptr %pointers, ptr %params, i64 %begin, i64 %end, i64 %thread)
  br label %done
done:
  ret void
}
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i64 @llvm.smin.i64(i64, i64)
"""

_ON_TEAM = """
  %parallel = and i1 %many.units, %many.threads
  br i1 %parallel, label %on.team, label %alone
on.team:
  call void @GOMP_parallel(ptr @team, ptr %launch, i32 %threads32, i32 0)
  br label %ran
"""

_RUN = """
define internal i1 @failed(i64 %value) nounwind {
  %odd = icmp eq i64 %value, -1
  br i1 %odd, label %ask, label %no
ask:
  %error = call ptr @PyErr_Occurred()
  %is = icmp ne ptr %error, null
  ret i1 %is
no:
  ret i1 false
}

define ptr @kernel(ptr %self, ptr %args, i64 %count) nounwind {
entry:
  %odd.count = and i64 %count, 1
  %even = icmp eq i64 %odd.count, 0
  %enough = icmp sge i64 %count, 4
  %right = and i1 %even, %enough
  br i1 %right, label %read, label %wrong.arguments
read:
  %arg0 = load ptr, ptr %args
  %arg1.at = getelementptr ptr, ptr %args, i64 1
  %arg1 = load ptr, ptr %arg1.at
  %arg2.at = getelementptr ptr, ptr %args, i64 2
  %arg2 = load ptr, ptr %arg2.at
  %arg3.at = getelementptr ptr, ptr %args, i64 3
  %arg3 = load ptr, ptr %arg3.at
  %state.word = call i64 @PyLong_AsSsize_t(ptr %arg0)
  %state = inttoptr i64 %state.word to ptr
  %state.failed = call i1 @failed(i64 %state.word)
  br i1 %state.failed, label %raised, label %read.first
read.first:
  %null = icmp eq ptr %state, null
  br i1 %null, label %wrong.arguments, label %read.numbers
read.numbers:
  %first = call i64 @PyLong_AsSsize_t(ptr %arg1)
  %first.failed = call i1 @failed(i64 %first)
  br i1 %first.failed, label %raised, label %read.last
read.last:
  %last = call i64 @PyLong_AsSsize_t(ptr %arg2)
  %last.failed = call i1 @failed(i64 %last)
  br i1 %last.failed, label %raised, label %read.threads
read.threads:
  %threads = call i64 @PyLong_AsSsize_t(ptr %arg3)
  %threads.failed = call i1 @failed(i64 %threads)
  br i1 %threads.failed, label %raised, label %check
check:
  %threads32 = trunc i64 %threads to i32
  %many.threads = icmp sgt i64 %threads, 1
  %table.at = getelementptr i64, ptr %state, i64 2
  %table = load ptr, ptr %table.at
  %launches.at = getelementptr i64, ptr %state, i64 3
  %launches = load ptr, ptr %launches.at
  %number.at = getelementptr i64, ptr %state, i64 4
  %number = load i64, ptr %number.at
  %slots.at = getelementptr i64, ptr %state, i64 5
  %slots = load i64, ptr %slots.at
  %from.zero = icmp sge i64 %first, 0
  %ordered = icmp sle i64 %first, %last
  %inside = icmp sle i64 %last, %number
  %fine0 = and i1 %from.zero, %ordered
  %fine = and i1 %fine0, %inside
  br i1 %fine, label %pairs, label %wrong.launches

pairs:
  %k = phi i64 [ 4, %check ], [ %k.next, %set ]
  %more.pairs = icmp slt i64 %k, %count
  br i1 %more.pairs, label %pair, label %weigh
pair:
  %slot.at = getelementptr ptr, ptr %args, i64 %k
  %slot.object = load ptr, ptr %slot.at
  %slot = call i64 @PyLong_AsSsize_t(ptr %slot.object)
  %slot.failed = call i1 @failed(i64 %slot)
  br i1 %slot.failed, label %raised, label %pair.slot
pair.slot:
  %known = icmp ult i64 %slot, %slots
  br i1 %known, label %pair.pointer, label %wrong.slot
pair.pointer:
  %k1 = add i64 %k, 1
  %pointer.at = getelementptr ptr, ptr %args, i64 %k1
  %pointer.object = load ptr, ptr %pointer.at
  %pointer = call i64 @PyLong_AsSsize_t(ptr %pointer.object)
  %pointer.failed = call i1 @failed(i64 %pointer)
  br i1 %pointer.failed, label %raised, label %set
set:
  %place = getelementptr ptr, ptr %table, i64 %slot
  store i64 %pointer, ptr %place
  %k.next = add i64 %k, 2
  br label %pairs

weigh:
  %w = phi i64 [ %first, %pairs ], [ %w.next, %weigh.one ]
  %work = phi i64 [ 0, %pairs ], [ %work.next, %weigh.one ]
  %more.weights = icmp slt i64 %w, %last
  br i1 %more.weights, label %weigh.one, label %start
weigh.one:
  %w.word = mul i64 %w, 8
  %w.units.word = add i64 %w.word, 6
  %w.units.at = getelementptr i64, ptr %launches, i64 %w.units.word
  %w.units = load i64, ptr %w.units.at
  %work.next = add i64 %work, %w.units
  %w.next = add i64 %w, 1
  br label %weigh
start:
  store i64 0, ptr %state
  %heavy = icmp sge i64 %work, UNITS_TO_RELEASE
  br i1 %heavy, label %release, label %launch.loop
release:
  %thread.state = call ptr @PyEval_SaveThread()
  br label %launch.loop

launch.loop:
  %held = phi ptr [ null, %start ], [ %thread.state, %release ], [ %held, %next ]
  %l = phi i64 [ %first, %start ], [ %first, %release ], [ %l.next, %next ]
  %more = icmp slt i64 %l, %last
  br i1 %more, label %launch.one, label %finish
launch.one:
  %l.word = mul i64 %l, 8
  %launch = getelementptr i64, ptr %launches, i64 %l.word
  %function = load ptr, ptr %launch
  %l.slots.at = getelementptr i64, ptr %launch, i64 1
  %l.slots = load ptr, ptr %l.slots.at
  %l.count.at = getelementptr i64, ptr %launch, i64 2
  %l.count = load i64, ptr %l.count.at
  %pointers.at = getelementptr i64, ptr %launch, i64 3
  %pointers = load ptr, ptr %pointers.at
  %params.at = getelementptr i64, ptr %launch, i64 4
  %params = load ptr, ptr %params.at
  %total.at = getelementptr i64, ptr %launch, i64 5
  %total = load i64, ptr %total.at
  %units.at = getelementptr i64, ptr %launch, i64 6
  %units = load i64, ptr %units.at
  br label %gather
gather:
  %g = phi i64 [ 0, %launch.one ], [ %g.next, %gather.one ]
  %more.slots = icmp slt i64 %g, %l.count
  br i1 %more.slots, label %gather.one, label %gathered
gather.one:
  %g.slot.at = getelementptr i64, ptr %l.slots, i64 %g
  %g.slot = load i64, ptr %g.slot.at
  %g.from = getelementptr ptr, ptr %table, i64 %g.slot
  %g.pointer = load ptr, ptr %g.from
  %g.to = getelementptr ptr, ptr %pointers, i64 %g
  store ptr %g.pointer, ptr %g.to
  %g.next = add i64 %g, 1
  br label %gather
gathered:
  %status.to = getelementptr ptr, ptr %pointers, i64 %l.count
  store ptr %state, ptr %status.to
  %many.units = icmp sgt i64 %units, 1
  ON_TEAM
alone:
  call void %function(ptr %pointers, ptr %params, i64 0, i64 %total, i64 0)
  br label %ran
ran:
  %code = load i64, ptr %state
  %good = icmp eq i64 %code, 0
  br i1 %good, label %next, label %finish
next:
  %l.next = add i64 %l, 1
  br label %launch.loop

finish:
  %released = icmp ne ptr %held, null
  br i1 %released, label %acquire, label %answer
acquire:
  call void @PyEval_RestoreThread(ptr %held)
  br label %answer
answer:
  %result = load i64, ptr %state
  %object = call ptr @PyLong_FromSsize_t(i64 %result)
  ret ptr %object

wrong.arguments:
  %type.error.at = load ptr, ptr @PyExc_TypeError
  call void @PyErr_SetString(ptr %type.error.at, ptr @ArgumentError)
  ret ptr null
wrong.slot:
  %index.error = load ptr, ptr @PyExc_IndexError
  call void @PyErr_SetString(ptr %index.error, ptr @SlotError)
  ret ptr null
wrong.launches:
  %index.error.too = load ptr, ptr @PyExc_IndexError
  call void @PyErr_SetString(ptr %index.error.too, ptr @LaunchError)
  ret ptr null
raised:
  ret ptr null
}
@PyExc_TypeError = external global ptr
@PyExc_IndexError = external global ptr
declare i64 @PyLong_AsSsize_t(ptr)
declare ptr @PyLong_FromSsize_t(i64)
declare ptr @PyErr_Occurred()
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
"""


_MESSAGES = {
    "ArgumentError": "run takes (state, first, last, threads) and pairs (slot, pointer)",
    "SlotError": "run: the frame has no such slot",
    "LaunchError": "run: the frame has no such launches",
}


class _MethodDef(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@functools.cache
def runner() -> Callable[..., int]:
    """The process's `run`, as described above."""
    pool = threads.pool()
    imports = {}
    if pool is not None:
        imports["GOMP_parallel"] = pool.parallel
        imports["omp_get_thread_num"] = pool.thread
        imports["omp_get_num_threads"] = pool.team
    text = _RUN.replace("UNITS_TO_RELEASE", str(_UNITS_TO_RELEASE))
    for symbol, words in _MESSAGES.items():
        text += f'@{symbol} = internal constant [{len(words) + 1} x i8] c"{words}\\00"\n'
    if pool is not None:
        text = text.replace("ON_TEAM", _ON_TEAM) + _TEAM
    else:
        text = text.replace("ON_TEAM", "br label %alone")
    found: Callable[..., int] = builtin("run", text, imports)
    return found


# What Python's C API needs to stay where it is: method definitions, and the code they point to.
_kept: list[tuple[_MethodDef, jit.Function]] = []


def builtin(name: str, text: str, imports: dict[str, int] | None = None) -> Any:
    """A Python builtin from IR text. It stays for the life of the process.

    text     a unit (see jit) whose @kernel(ptr self, ptr args, i64 n) is a METH_FASTCALL function
    imports  addresses of what it calls, besides the process's and Python's C API
    """
    known = {**_c_api(), **(imports or {})}
    function = jit.compile_one(text, known)
    definition = _MethodDef(name.encode(), function.address, _METH_FASTCALL, None)
    _kept.append((definition, function))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return make(ctypes.addressof(definition), None, None)


@functools.cache
def _c_api() -> dict[str, int]:
    """Addresses in this interpreter; the process may hold another one that is found by name."""
    found = {}
    for name in _C_API:
        found[name] = ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value or 0
    for name in ("PyExc_TypeError", "PyExc_IndexError"):
        found[name] = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.pythonapi, name))
    return found
