"""Every error that Fusee raises on purpose.

    FuseeError
    ├── OptionError          an option of one compiled function is unknown or has a wrong value
    ├── SettingError         a FUSEE_* environment variable is unknown or has a wrong value
    ├── BackendError         a backend cannot be had or failed
    │   ├── UnknownBackend   no backend has that name
    │   ├── MissingPackage   the backend needs a package that is not installed
    │   └── MissingDevice    the backend needs a device that is not there
    ├── GraphBreakError      a graph would end where fullgraph=True or export() wants one graph
    ├── RecompileError       something was to be compiled, and the stance is fail_on_recompile
    ├── RegionError          a compiled function calls what only its callers may call
    ├── TraceError           the captured graph has no form in ATen ops
    │   └── MissingFake      an operator does not say what shape its results have
    ├── InputError           a call does not fit what was compiled
    ├── LateError            an operator on a GPU refused a value, which is known after the call
    ├── DoubleBackwardError  how a gradient is to be differentiated is not known
    ├── CompileError         the code generator or LLVM refused what it was given
    └── CheckError           one of Fusee's own stages left a faulty result: a bug, please report it

    FuseeWarning
    └── CacheWarning         the cache on disk cannot be used; the call goes on without it

Each message has one layout; lines that have nothing to say are left out:

    the option 'treads' does not exist for backend='fusee'
      train.py:41 in main:   step = fusee.compile(step, options={"treads": 2})
      did    stopped before compiling
      try    'threads'; known options: ...
      more   docs/errors.md#option-error
"""

from __future__ import annotations

import difflib
import functools
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

_DOCS = "docs/errors.md"
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)'
)


class _Told(Exception):
    """What a user is told, in the layout shown above.

    what     one sentence: what is wrong, and why
    where    the user's line, as `user_line` writes it
    did      what Fusee did about it; `stopped` unless it is said
    remedy   what the user can try
    """

    stopped: str | None = None

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        did: str | None = None,
        remedy: str | None = None,
    ) -> None:
        Exception.__init__(self, what)  # some get another base: backends/dynamo.py
        self.what = what
        self.where = where
        self.did = did or self.stopped
        self.remedy = remedy

    def __str__(self) -> str:
        rows = [self.what, f"  {self.where}" if self.where else ""]
        rows.append(f"  did    {self.did}" if self.did else "")
        rows.append(f"  try    {self.remedy}" if self.remedy else "")
        return "\n".join([*filter(None, rows), f"  more   {_DOCS}#{anchor(type(self))}"])


class FuseeError(_Told):
    """Base of all errors of Fusee."""


_STOPPED = "stopped before compiling"


class OptionError(FuseeError, ValueError):
    """An option of one compiled function is unknown or has a wrong value."""

    stopped = _STOPPED


class SettingError(FuseeError, ValueError):
    """A FUSEE_* environment variable is unknown or has a wrong value."""

    stopped = _STOPPED


class BackendError(FuseeError, RuntimeError):
    """A backend cannot be had, or failed with the text it carries.

    Once torch._dynamo is imported it is a torch._dynamo.exc.BackendCompilerFailed too.
    """

    first_useful_frame = None  # TorchDynamo asks for it, and shortens no traceback then

    @property
    def inner_exception(self) -> BaseException | None:
        """BackendCompilerFailed's name for what the backend raised."""
        return self.__cause__


class UnknownBackend(BackendError, LookupError):
    """No backend of ours, of torch or of an entry point has that name."""

    stopped = _STOPPED


class MissingPackage(BackendError, ImportError):
    """The backend needs a package that is not installed."""

    stopped = _STOPPED


class MissingDevice(BackendError):
    """The backend needs a device that is not there."""

    stopped = _STOPPED


class GraphBreakError(FuseeError, RuntimeError):
    """A graph would end where one graph of the whole was asked for: `reason` says why.

    Once torch._dynamo is imported it is a torch._dynamo.exc.Unsupported too.
    """

    @property
    def reason(self) -> str:
        return self.what

    msg = reason  # Unsupported's name for it


class RecompileError(FuseeError, RuntimeError):
    """A call needs something compiled, and the stance is "fail_on_recompile".

    Once torch._dynamo is imported it is a torch._dynamo.exc.RecompileError too.
    """


class RegionError(FuseeError, RuntimeError):
    """A compiled function calls what only its callers may call, such as set_stance."""


class ConstantSizeError(FuseeError, RuntimeError):
    """A size that is marked as dynamic would be a constant of what is compiled.

    Once torch's symbolic_shapes is imported it is a ConstraintViolationError of theirs too.
    """

    stopped = "stopped before running anything"


class SizeError(FuseeError, RuntimeError):
    """An exported program is called with sizes that it does not hold for."""

    stopped = "stopped before running anything"


class TraceError(FuseeError):
    """The captured graph has no form in ATen ops.

    call   which of its calls has none, if that is known
    """

    call: Any = None
    stopped = "stopped tracing this graph; the caller may run it eagerly"


class MissingFake(TraceError):
    """An operator does not say what shape and dtype its results have (no meta or fake kernel)."""


class InputError(FuseeError):
    """A call's inputs do not fit what was compiled."""


class LateError(FuseeError, IndexError, RuntimeError):
    """An operator on a GPU refused a value, such as an index: it is known after the call.

    Like a failed assertion of CUDA's, which it tells of, it ends all use of the GPU by the process.
    """

    stopped = "stopped the kernel; CUDA works no more in this process"


class DoubleBackwardError(FuseeError, RuntimeError):
    """A gradient of a compiled graph is differentiated, and the graph does not say how."""

    stopped = "stopped this backward; parameters keep the gradients they have"


class CompileError(FuseeError):
    """The code generator or LLVM refused what it was given."""


class CheckError(FuseeError):
    """One of Fusee's own stages left a faulty result. Always a bug of Fusee."""


class FuseeWarning(_Told, UserWarning):
    """Base of all warnings of Fusee."""


class CacheWarning(FuseeWarning):
    """The cache on disk cannot be used; the call goes on without it."""


F = TypeVar("F", bound=Callable[..., Any])

# Packages and generated code whose frames are never the user's, and what they are decorated with.
_INNER = ("fusee", "torch", "contextlib", "functools")
_GENERATED = ("<fusee ", "<entrance of ", _PACKAGE)  # ours may have the globals of others


def _is_inner(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in _INNER or frame.f_code.co_filename.startswith(_GENERATED)


def _program() -> tuple[FrameType, int]:
    """The program's frame that called torch or Fusee, and how far up it is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_inner(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def warn(kind: type[FuseeWarning], what: str, **more: str | None) -> None:
    """Warn at the program's line that called torch or Fusee; `more` as FuseeWarning takes it."""
    warnings.warn(kind(what, **more), stacklevel=_program()[1])


def shown(error: FuseeError) -> FuseeError:
    """`error` as the program gets it: with the program's line, and without our frames below that.

    A fault of ours keeps them: a report needs them.
    """
    if isinstance(error, (TraceError, CompileError, CheckError)):
        return error
    program, tb = None, error.__traceback__
    while tb is not None:
        program, tb = program if _is_inner(tb.tb_frame) else tb, tb.tb_next
    if program is not None:  # a function of the program raised it, or was called on the way
        program.tb_next = None
    elif not error.where:
        frame = _program()[0]
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        error.where = source_line(place)
    return error if program is not None else error.with_traceback(None)


def telling(function: F) -> F:
    """`function`, with its errors as the program gets them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FuseeError as error:
            raise shown(error)  # noqa: B904  # it is the same one

    return call  # type: ignore[return-value]


def anchor(kind: type[BaseException]) -> str:
    """The section of docs/errors.md about `kind`, or its first public base: option-error."""
    name = next(cls.__name__ for cls in kind.__mro__ if not cls.__name__.startswith("_"))
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, or None if none looks like it."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def choices(name: object, known: Iterable[str], title: str) -> str:
    """A remedy for an unknown name: `'threads'; known options: fuse, threads`."""
    names = list(known)
    close = nearest(str(name), names)
    return (f"{close!r}; " if close else "") + f"{title}: {', '.join(names)}"


# Of code that was generated, by its file: what to call it, and where its lines come from.
GENERATED: dict[str, tuple[str, dict[int, str]]] = {}


def source_line(where: str) -> str:
    """`file.py:41 in step:   code` from `file.py:41 in step`, as far as the file can be read.

    A line of generated code is the user's line that it was made from, if that is known; "" is one
    of ours, which calls a function in C for instance.
    """
    place, _, function = where.rpartition(" in ")
    file, _, line = place.rpartition(":")
    if file.startswith(_PACKAGE):
        return ""
    number = int(line) if line.isdecimal() else 0
    title, origins = GENERATED.get(file, (file, {}))
    if number in origins:
        origin = source_line(origins[number])
        if ":   " in origin:
            return origin
        where = origin
    elif title != file:
        where = f"{title}:{line} in {function}"
    code = linecache.getline(file, number).strip()
    return f"{where}:   {code}" if code else where


@functools.lru_cache(maxsize=4096)
def stack_trace(where: str) -> str:
    """`file.py:41 in step` as Python's tracebacks have it, which is how fx and backends read it."""
    place, code = source_line(where).partition(":   ")[::2]
    if not place:
        return ""
    place, _, function = place.rpartition(" in ")
    file, _, line = place.rpartition(":")
    return f'  File "{file}", line {line}, in {function}\n    {code}\n'


def user_line(stack_trace: str | None) -> str | None:
    """`file.py:41 in step:   code` from the stack trace that an fx node carries, or None.

    The innermost frame outside torch is the user's, since a module's `forward` calls into torch.nn.
    """
    frame = user_frame(stack_trace)
    if frame is None:
        return None
    return f"{frame['file']}:{frame['line']} in {frame['function']}:   {frame['code'].strip()}"


def user_frame(stack_trace: str | None) -> re.Match[str] | None:
    """The user's frame of a stack trace, with groups `file`, `line`, `function` and `code`."""
    frames = list(_FRAME.finditer(stack_trace or ""))
    if not frames:
        return None
    own = [frame for frame in frames if "/torch/" not in frame["file"].replace("\\", "/")]
    return (own or frames)[-1]
