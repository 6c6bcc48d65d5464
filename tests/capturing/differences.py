"""Runs a program's source eager and compiled, and says where the two differ."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import itertools
import math
import random
import re
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _python_dispatch

import fusee
from fusee.capture.dynamic import Varying
from fusee.capture.entries import CompiledFunction
from fusee.capture.policy import Policy
from fusee.persist import Keeper
from tests.capturing.portrait import Line, Portrait, Unsound
from tests.seeds import forget_stacks

__all__ = ["Outcome", "backend", "difference", "shrunk"]

CALLS = 3
EAGER_S = 0.5  # what takes longer is left out
COMPILED_S = 20


# What is on each of torch's stacks of modes, and what takes one off.
_MODE_STACKS: list[tuple[Callable[[], list[Any]], Callable[[], Any]]] = [
    (torch.overrides._get_current_function_mode_stack, torch.overrides._pop_mode),
    (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode),
]


class Endless(BaseException):
    """A program does not come to an end: it appends to the list that it goes through, say."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Endless once so much processor time is over; again at the end, if that was lost."""
    is_over = False

    def stop(*_: Any) -> None:
        nonlocal is_over
        is_over = True
        raise Endless

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # it may be caught once
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        if is_over:
            raise Endless


class Told(Exception):
    """A graph that changes its inputs raised, and the error says that effects were left out."""


class Outcome:
    """What the calls of a program gave, and what they left behind.

    lines      the portrait of it all; up to the call that raised if that told of what it left out
    raised     the errors, by call, with their texts
    eager      why pieces ran eagerly; breaks   why graphs ended
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.raised: dict[int, tuple[str, str]] = {}
        self.is_told = False
        self.eager: list[str] = []
        self.breaks: list[str] = []


def backend(gm: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    """Runs graphs as they are."""
    gm.graph.lint()
    return gm.forward


class _Printed:
    """Standard output of a program: what it prints goes into its log, so order is seen."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def write(self, text: str) -> int:
        self.log.append(("printed", text))
        return len(text)

    def flush(self) -> None:
        """Everything is there already."""


@contextlib.contextmanager
def _settings(log: list[Any], lines: list[str]) -> Iterator[None]:
    """Puts back what programs set; what they print and warn of goes into their log."""

    def shown(message: Any, category: type, filename: str, lineno: int, *_: Any) -> None:
        # those of libraries name the place where their C code was called: a line of a graph's
        if filename == "<fuzzed>" and "warn" in lines[lineno - 1]:
            log.append(("warning", category.__name__, str(message), lineno))

    dtype = torch.get_default_dtype()
    with warnings.catch_warnings(), contextlib.redirect_stdout(_Printed(log)):
        warnings.simplefilter("always")
        warnings.showwarning = shown  # type: ignore[assignment]
        # what is not initialised is filled
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            _put_back(dtype)


def _put_back(dtype: torch.dtype) -> None:
    """Torch's modes as they were. torch.set_default_device within torch.device leaves one behind,
    whose device all later programs would have."""
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.autograd.set_detect_anomaly(False)
    torch.set_default_dtype(dtype)
    for current, pop in _MODE_STACKS:
        while current():
            pop()
    vars(torch._GLOBAL_DEVICE_CONTEXT).clear()
    torch.utils._device.CURRENT_DEVICE = None


def outcome(
    source: str, make: Callable[[Any], Any] | None = None, collects: bool = False
) -> Outcome:
    """Run the program's three calls in a world of its own, compiled by `make`; `collects` what
    went in circles after each: an error that its own frame has, with all else that this has."""
    _seed(0)
    torch.utils.hooks.RemovableHandle.next_id = 0  # keys of dicts
    module = sys.modules["fuzzed"] = types.ModuleType("fuzzed")  # where dataclasses look it up
    exec(compile(source, "<fuzzed>", "exec"), module.__dict__)
    fn = module.__dict__["fn"]
    made = fn if make is None else make(fn)
    found = Outcome()
    portrait = Portrait()
    # each call's inputs are alive to the end, so that a change that comes late is seen
    kept = []
    found.lines = portrait.lines
    for k in range(CALLS):
        try:
            with _settings(module.__dict__["log"], source.splitlines()):
                kept.append(_call(k, module, made, portrait, found, collects))
        except Told:
            found.is_told = True
            return found
        # what was told is told anew after the next call
        portrait._seen.clear()
        portrait._storages.clear()
    portrait.add("at the end", kept)
    for one in _functions(made) if isinstance(made, CompiledFunction) else ():
        for entry in one.entries:
            if entry.captured.eager:
                found.eager.append(entry.captured.eager)
            if entry.captured.stop is not None:
                found.breaks.append(entry.captured.stop.reason)
    return found


def _call(
    k: int,
    module: types.ModuleType,
    made: Callable[..., Any],
    portrait: Portrait,
    found: Outcome,
    collects: bool,
) -> Any:
    """One call, and all that is to be seen after it. Returns the arguments."""
    try:
        args = module.__dict__["inputs"](k)
    except Exception as error:  # noqa: BLE001  # a change between calls, of what fn made read-only
        portrait.add(f"call {k}: inputs", error)
        return None
    assert isinstance(args, list), "a program that shrank too far"
    around = module.__dict__.get("around", lambda k: contextlib.nullcontext())(k)
    _seed(k)
    dtype = torch.get_default_dtype()
    result: tuple[str, Any]
    try:
        with around:
            result = ("returned", made(*args))
    except MemoryError as error:
        raise Endless from error
    except Exception as error:  # the exception is what is compared
        # their frames hold generators that are to be closed with them: a graph has no such frames
        led = _led_to(error)
        for one in led:
            one.__traceback__ = None
        result = ("raised", error)
        found.raised[k] = type(error).__name__, str(error)
        notes = (note for one in led for note in getattr(one, "__notes__", ()))
        if any("changes its inputs" in note for note in notes):
            raise Told from error
    if collects:
        gc.collect()
    for name, value in _state().items():
        portrait.add(f"call {k}: {name}", value)
    _put_back(dtype)
    portrait.add(f"call {k}: result", result)
    portrait.add(f"call {k}: backward", _backward(result[1]))
    portrait.add(f"call {k}: args", args)
    portrait.add(f"call {k}: globals", _variables(module))
    portrait.add(f"call {k}: fn", module.__dict__["fn"])
    return args


def _led_to(error: BaseException) -> list[BaseException]:
    """An error, its causes, its contexts and, of a group, the members."""
    found = [error]
    for one in found:
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        others = one.__cause__, one.__context__, *members
        found += (x for x in others if x is not None and all(x is not y for y in found))
    return found


def _seed(k: int) -> None:
    torch.manual_seed(k)
    random.seed(k)
    np.random.seed(k)


def _state() -> dict[str, Any]:
    """Settings and generators of the process."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "modes": [type(mode).__name__ for current, _ in _MODE_STACKS for mode in current()],
        "generator": hash(torch.get_rng_state().numpy().tobytes()),
        "generators of GPUs": [
            hash(state.numpy().tobytes())
            for state in (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())
        ],
        "random": hash(random.getstate()),
        "numpy": hash(np.random.get_state(legacy=False)["state"]["key"].tobytes()),
    }


def _backward(result: Any) -> Any:
    """Goes backward from a result's tensors; gradients lie beside the leaves then."""
    parts = result if isinstance(result, tuple) else (result,)
    try:
        for x in parts:
            if isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point():
                x.sum().backward(retain_graph=True)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _functions(compiled: CompiledFunction) -> Iterator[CompiledFunction]:
    yield compiled
    for one in compiled.callees:
        yield from _functions(one)


def _variables(module: types.ModuleType) -> dict[str, Any]:
    left_out = (types.ModuleType, type, types.FunctionType)
    found = {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("__") and not isinstance(value, left_out)
    }
    for name, cls in module.__dict__.items():
        if isinstance(cls, type) and cls.__module__ == "fuzzed":
            own = {
                key: value for key, value in vars(cls).items() if type(value) in (int, str, list)
            }
            found[f"class {name}"] = {k: v for k, v in own.items() if not k.startswith("__")}
    return found


def interpreted(fn: Callable[..., Any], keeper: Keeper | None = None) -> CompiledFunction:
    """Captured, with graphs run as they are."""
    varying = functools.partial(Varying, with_backward=True, tells_writes=True)
    return CompiledFunction(fn, backend, Policy(), varying=varying, keeper=keeper)  # type: ignore[arg-type]


def native(fn: Callable[..., Any]) -> Any:
    """Compiled as users compile."""
    return fusee.compile(fn)


def difference(
    source: str,
    into: Outcome | None = None,
    compiled: bool = False,
    collects: bool = False,
    keeper: Keeper | None = None,
) -> str | None:
    """The first line in which eager and captured (or compiled) differ; None if there is none.

    keeper   of captures that outlive their process
    """
    _prepare()
    # kernels cast weights anew, where eager's autocast keeps casts of what a step has changed since
    torch.set_autocast_cache_enabled(not compiled)
    try:
        with limited(EAGER_S):
            want = outcome(source, collects=collects)
    except (Endless, Unsound):
        return None
    try:
        with limited(COMPILED_S):
            by = native if compiled else functools.partial(interpreted, keeper=keeper)
            got = outcome(source, by, collects)
    except Endless:
        return "compiled does not come to an end"
    except Exception as error:  # noqa: BLE001  # a fault of ours in place of a result
        return f"fusee failed: {type(error).__name__}: {error}"
    if into is not None:
        into.eager, into.breaks = got.eager, got.breaks
    failing = _failing_backward(want.lines)
    # NumPy's functions are computed by torch's within graphs, and kernels are ours
    may_round = compiled or "import numpy" in source
    judge: Outcome | None = None
    for k, (a, b) in enumerate(zip(want.lines, got.lines)):
        if a.words == b.words and _is_same(a.numbers, b.numbers):
            continue
        is_told_alike = a.words == b.words or (compiled and _is_moved(want.lines, k, b))
        if is_told_alike and may_round:
            judge = judge or _in_double(source) or want
            line = judge.lines[k] if k < len(judge.lines) else a
            if line.path != a.path:  # it went another way
                line = a
            if _is_near(a.numbers, b.numbers, line.numbers):
                continue
        if failing <= _call_of(a) and (".grad" in a.path or failing != _call_of(a)):
            return None
        if _is_asked(source, k, b):
            return None
        if not collects:
            return difference(source, into, compiled, collects=True)
        return f"eager:    {a}\ncompiled: {b}"
    if got.is_told:
        last = max(got.raised)
        if got.raised[last] == want.raised.get(last):
            return None
        return f"eager:    {want.raised.get(last)}\ncompiled: {got.raised[last]}"
    if len(want.lines) != len(got.lines):
        return f"eager tells {len(want.lines)} lines, compiled {len(got.lines)}"
    return None


def _failing_backward(lines: list[Line]) -> int:
    """The call in which the engine fails amid a backward. Which gradients it has added by then
    depends on the order of its nodes, which nobody promises: a graph has other ones than eager."""
    words = "backward through the graph a second time"
    return next((_call_of(line) for line in lines if words in line.words), CALLS + 1)


def _call_of(line: Line) -> int:
    found = re.match(r"call (\d+)", line.path)
    return int(found[1]) if found else CALLS


class _Asking(torch.overrides.TorchFunctionMode):
    """Asks tensors for what computed them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, torch.Tensor):
                x.grad_fn  # noqa: B018  # it is found, and noted, when it is asked for
        return func(*args, **(kwargs or {}))


def _is_asked(source: str, k: int, b: Line) -> bool:
    """Whether eager itself tells the compiled line once somebody asks tensors for their history.

    A view whose base was written to is a leaf to torch until then, so that a further write raises.
    What a break asks of tensors can't be undone.
    """

    def asking(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _Asking():
                return fn(*args)

        return run

    try:
        with limited(EAGER_S):
            lines = outcome(source, asking).lines
    except (Endless, Unsound):
        return False
    return k < len(lines) and lines[k].words == b.words and _is_same(lines[k].numbers, b.numbers)


def _is_moved(lines: list[Line], k: int, b: Line) -> bool:
    """Whether a compiled line is another in no more than where a tensor begins in its memory,
    which no other has a part of: of what a graph makes and nobody sees only a view is left."""
    memory = re.search(r" in storage \d+\+", lines[k].words)
    moved = re.sub(r"( in storage \d+\+)\d+", r"\g<1>0", lines[k].words)
    if memory is None or b.words != moved:
        return False
    call = lines[k].path.partition(":")[0]
    same = [line for line in lines if line.path.startswith(call) and memory[0] in line.words]
    return len(same) == 1


@functools.cache
def _prepare() -> None:
    """Imports what torch imports late: no program may be stopped within that."""
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
    forget_stacks()


def _in_double(source: str) -> Outcome | None:
    """The program with float64 wherever it does not say another type; None if it has no end."""
    for name in ("torch.float32", "np.float32"):
        source = source.replace(name, name.replace("32", "64"))
    source = source.replace(".float()", ".double()")
    try:
        with limited(EAGER_S):
            return outcome("import torch\ntorch.set_default_dtype(torch.float64)\n" + source)
    except (Endless, Unsound):
        return None
    finally:
        torch.set_default_dtype(torch.float32)


def _is_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x == y or _are_nan(x, y) for x, y in zip(a, b))


def _are_nan(x: Any, y: Any) -> bool:
    return isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y)


def _is_near(a: list[Any], b: list[Any], judge: list[Any]) -> bool:
    """Whether `b` is as near to what float64 gives as `a` is: the factor two, or some roundings."""
    if not (len(a) == len(b) == len(judge)):
        return False
    for x, y, z in zip(a, b, judge):
        if x == y or _are_nan(x, y):
            continue
        if not isinstance(x, float) or not math.isfinite(x + y + z):
            return False
        largest = max((abs(v) for v in judge if math.isfinite(v)), default=0.0)
        if abs(y - z) > 2 * abs(x - z) + 4e-6 * max(largest, 1e-3):
            return False
    return True


# ------------------------------------------------------------------------------ shrinking


def shrunk(source: str, fails: Callable[[str], bool], tries: int = 800) -> str:
    """A smaller program that still fails: statements dropped, blocks and expressions in place of
    their owner."""
    best, left = ast.unparse(ast.parse(source)), iter(range(tries))
    for smaller in (_smaller, _plainer):
        start = 0
        while True:
            for k, candidate in enumerate(smaller(best)):
                if k >= start and next(left, None) is not None and _is_failing(candidate, fails):
                    best, start = candidate, k  # what comes before was tried
                    break
            else:
                if start == 0:
                    break
                start = 0
    return best


def _is_failing(source: str, fails: Callable[[str], bool]) -> bool:
    try:
        compile(source, "<candidate>", "exec")
        return fails(source)
    except Exception:  # noqa: BLE001  # a candidate that doesn't run at all is no smaller failure
        return False


def _smaller(source: str) -> Iterator[str]:
    sizes = [len(body) for body in _bodies(ast.parse(source))]
    for which, size in enumerate(sizes):
        spans = [(k, k + w) for w in (8, 4, 2, 1) if w <= size for k in range(0, size, w)]
        for start, end in spans:
            tree = ast.parse(source)
            body = list(_bodies(tree))[which]
            if len(body) == 1 and isinstance(body[0], ast.Pass):
                continue
            body[start:end] = [] if len(body) > end - start else [ast.Pass()]
            yield ast.unparse(tree)
        for k in range(size):
            tree = ast.parse(source)
            body = list(_bodies(tree))[which]
            inner = [*_own_bodies(body[k])]
            if inner and not isinstance(body[k], (ast.FunctionDef, ast.ClassDef)):
                body[k : k + 1] = inner[0]
                yield ast.unparse(tree)


def _plainer(source: str) -> Iterator[str]:
    """The program with one expression as a part of it, or as None."""
    count = sum(isinstance(node, ast.expr) for node in ast.walk(ast.parse(source)))
    for which in range(count):
        for part in itertools.count():
            replacing = _Replacing(which, part)
            tree = replacing.visit(ast.parse(source))
            if replacing.is_over:
                break
            yield ast.unparse(tree)


class _Replacing(ast.NodeTransformer):
    """Puts, in place of the expression number `which`, its part number `part`."""

    def __init__(self, which: int, part: int) -> None:
        self.which, self.part = which, part
        self.is_over = True

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            self.which -= 1
            if self.which == -1:
                parts = [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
                if self.part < len(parts):
                    self.is_over = False
                    return parts[self.part]
        return super().generic_visit(node)


def _own_bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list) and found:
            yield found
    for handler in getattr(node, "handlers", []):
        yield handler.body


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements within functions, innermost last."""
    for child in ast.walk(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.Module)):
            yield from _own_bodies(child) if not isinstance(child, ast.Try) else _all(child)


def _all(node: ast.Try) -> Iterator[list[ast.stmt]]:
    yield from (found for found in (node.body, node.orelse, node.finalbody) if found)
