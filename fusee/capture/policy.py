"""What users have said about functions and about compiling: one Policy for the process.

Functions carry the marks that torch.compiler gives them; those are honoured here.
"""

from __future__ import annotations

import abc
import ast
import copy
import dataclasses
import functools
import inspect
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import fx, nn

from fusee.capture.bytecode import standing_at
from fusee.capture.frame import ABSENT, FUNCTIONS
from fusee.capture.graph_break import Forbidden, GraphBreak
from fusee.capture.sources import Held, in_classes, is_trusted
from fusee.capture.torch_api import (
    DYNAMO,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    dynamo_stance,
    has_global_hooks,
    is_allowed_by_torch,
    is_parallel,
    is_traced,
    pytree,
    run_for_real,
)
from fusee.errors import OptionError
from fusee.source import Function

# ---------------------------------------------------------------------------- policy


STANCES = (
    "default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile",
)  # fmt: skip


class Stance(NamedTuple):
    """What compiled functions do.

    name       one of STANCES
    unchecked  whether a place with one version uses it without looking at what it relies on
    backend    what compiles in place of a function's own backend; or None
    """

    name: str = "default"
    unchecked: bool = False
    backend: Any = None


# Set by torch.compile and by fusee.compile on what they return: what was compiled.
ORIGINAL = "_torchdynamo_orig_callable"
# The id of what ORIGINAL was set on, since functools.wraps gives that to others.
WRAPPER = "_torchdynamo_wrapper_id"


F = TypeVar("F", bound=Function)


_TABLED = (*FUNCTIONS, type)  # which hash by themselves


class _Here(threading.local):
    depth = 0


class Policy:
    """Tables by function, and the stance.

    in_graph     functions that become one node, unlooked-at
    constant     functions that run once; their result is baked in
    substitutes  functions in C and what is traced in their place
    stance       what fusee.compiler.set_stance set
    lookup       the function that compiles graphs, for a backend that a stance names
    is_unusual   whether a call must look at the stance, and at whether it is in an eager region
    usual        TorchDynamo's stance, as an object that says no more than that it is the usual one
    recompile_limit  versions of a place, where compile() is not told
    is_exporting what torch.compiler.is_exporting() says to a program that is captured
    """

    def __init__(self) -> None:
        self.in_graph: set[Any] = set()
        self.constant: set[Any] = set()
        self.substitutes: dict[Any, Any] = {}
        self.stance = Stance()
        self.lookup: Callable[[Any], tuple[Function, dict[str, bool]]] | None = None
        self.recompile_limit = 8
        self.is_unusual = False
        self.usual: Any = None
        self.is_exporting = False
        self._here = _Here()
        self._eager_regions = 0
        self._lock = threading.Lock()

    # ---------------------------------------------------------------------- when to run eagerly

    def set_stance(self, stance: Stance) -> None:
        with self._lock:
            self.stance = stance
            self._note()

    def now(self) -> Stance:
        """The stance: torch.compiler.set_stance's goes before that of fusee.compiler."""
        if getattr(sys.modules.get(DYNAMO), "_stance", None) is self.usual:
            return self.stance
        torchs = dynamo_stance()
        if torchs is None:
            return self.stance
        name, unchecked, backend = torchs
        return Stance(name.removeprefix("aot_"), unchecked, backend)

    def is_eager(self) -> bool:
        """Whether calls on this thread run as plain Python."""
        return self._here.depth > 0 or self.now().name == "force_eager" or is_traced()

    def nest_eager(self, step: int) -> None:
        """From here on this thread runs eagerly within one more call (1), or one less (-1)."""
        self._here.depth += step
        with self._lock:
            self._eager_regions += step
            self._note()

    def for_export(self) -> Policy:
        """The same tables, for a program that is exported."""
        other = copy.copy(self)
        other.is_exporting = True
        return other

    def note_usual(self) -> None:
        """Let calls know TorchDynamo's stance by its identity, if there is nothing to it."""
        if dynamo_stance() is None:
            self.usual = getattr(sys.modules.get(DYNAMO), "_stance", None)

    def _note(self) -> None:
        self.is_unusual = self._eager_regions > 0 or self.stance != Stance()

    # ---------------------------------------------------------------------- functions

    def is_in_graph(self, function: Any) -> bool:
        """Whether allow_in_graph, of torch or ours, was called for it."""
        return function in self.in_graph or bool(is_allowed_by_torch(function))

    def replacement(self, function: Any) -> Function | None:
        """What stands in for a function, as in builtins.py; or None."""
        if not issubclass(type(function), _TABLED):
            return None  # an instance may have a hash of its own, in Python
        if self.is_in_graph(function):
            return functools.partial(_whole, function)
        if is_allowed_by_torch(function) is False:
            raise GraphBreak(
                f"{function.__qualname__}() ends graphs, since torch._dynamo is told so",
                "take the call away; torch._dynamo.allow_in_graph undoes disallow_in_graph",
            )
        marks: dict[str, Any] = getattr(function, "__dict__", {})
        if function in self.constant or "_dynamo_marked_constant" in marks:
            return functools.partial(_constant, function)
        if function in self.substitutes:
            return _instead(self.substitutes[function])
        if "_torchdynamo_disable" in marks and str(marks["_torchdynamo_disable_msg"]).endswith(
            ("_init_group not supported", "don't trace into fused optimizer")
        ):
            # once TorchDynamo is used it disables for itself what optimizers do, which we can trace
            return _instead(enabled(function))
        return None

    def refusal(self, function: types.FunctionType) -> GraphBreak | None:
        """Why a Python function is not inlined; or None."""
        marks = function.__dict__
        name = function.__qualname__
        if function in _OF_LENGTHS:
            return GraphBreak(f"{name} makes tensors whose sizes depend on the lengths it is given")
        if "_torchdynamo_disable" in marks:
            given = marks.get("_torchdynamo_disable_msg")
            return GraphBreak(
                f"{name} is disabled{f': {given}' if given else ''}",
                "take fusee.compiler.disable away, or call it outside",
            )
        if "_dynamo_forbidden" in marks:
            return Forbidden(
                f"{name}() must not be called in a compiled function",
                "call it before the compiled function, or disable the function that calls it",
            )
        module = function.__module__ or ""
        if module.startswith("triton.runtime.") and name.endswith(".run"):
            return GraphBreak(f"{name} launches a Triton kernel, which runs between graphs")
        if module == "torch.library":
            return GraphBreak(f"{name} registers an operator", "register it outside")
        if module.startswith("torch.jit._") and name != "_unwrap_optional":
            return GraphBreak(f"{name} is of TorchScript, which reads source, frames and weights")
        if module.startswith("fusee.") and "_fusee_inlined" not in marks:
            return GraphBreak(f"{name} is a part of Fusee", "call it outside")
        if module.partition(".")[0] in _APART:
            return GraphBreak(
                f"{name} is of a package that Python runs by itself: {module}",
                "call it before or after the compiled function",
            )
        if is_parallel(function):
            return GraphBreak(f"{name}() waits for other processes", "compile the module within")
        return None


# Packages that draw, log, tabulate, read data and compute on arrays: their code is large, and none
# of it computes on tensors.
_APART = frozenset(
    """
    IPython PIL altair bokeh cvxpy dask datasets executing icecream joblib librosa loguru
    matplotlib mlflow mpl_toolkits networkx numba pandas plotly polars pyarrow rich scipy
    seaborn skimage sklearn statsmodels structlog sympy tensorboard wandb xarray
    """.split()
)
# Python runs these as a whole: hardly a line of theirs computes on tensors.
_OF_LENGTHS = (nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence)


POLICY = Policy()


def inlined(function: F) -> F:
    """Let a function of ours be captured as the program's are."""
    function.__dict__["_fusee_inlined"] = True
    return function


def is_skipped(function: Any) -> bool:
    """Whether a function's own lines alone are disabled: what it calls is compiled."""
    marks = function.__dict__
    return "_torchdynamo_disable" in marks and not marks.get("_torchdynamo_disable_recursive")


def enabled(function: Any) -> Any:
    """What TorchDynamo's disable was put around, once or several times."""
    while "_torchdynamo_disable" in function.__dict__:
        function = function.__dict__["_torchdynamo_orig_callable"]
    return function


def original(x: Any) -> Any:
    """What was compiled to give `x`; None if it is no compiled function or module."""
    if type(x) is types.FunctionType:
        found = x.__dict__.get(ORIGINAL)
        # functools.wraps gives the marks of a compiled function to what is around it
        inner = getattr(x.__dict__.get("__wrapped__"), "__dict__", {}).get(ORIGINAL)
        is_around = found is None or inner is found or "_torchdynamo_disable" in x.__dict__
        return None if is_around else found
    if issubclass(type(x), nn.Module):
        ours, torchs = type(x).__dict__, x.__dict__.get("_modules", ())
        return x._orig_mod if "_orig_mod" in ours or "_orig_mod" in torchs else None
    return None


def innermost(x: Any) -> Any:
    """What was compiled to give `x`, at last; `x` if it is no compiled function or module."""
    while (inner := original(x)) is not None:
        x = inner
    return x


def _instead(other: Any) -> Function:
    return lambda m, /, *args, **kw: m.call(m.world.hold(other, other.__name__), *args, **kw)


def _constant(function: Any, m: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function that is said to give always the same."""
    if any(type(x) is FakeTensor for x in (*args, *kwargs.values())):
        raise GraphBreak(f"{function.__qualname__} is said to be constant, and gets a tensor")
    result = run_for_real(function, *args, **kwargs)
    m.recorder.answers.append((function, args, kwargs, result))
    return m.world.load(result, Held(result, f"{function.__qualname__}()"))


def protocol_names(kind: Any) -> list[str] | None:
    """The attributes that a protocol asks for; None if it is none."""
    if not issubclass(type(kind), abc.ABCMeta) or not vars(kind).get("_is_protocol"):
        return None
    return sorted(typing._get_protocol_attrs(kind))  # type: ignore[attr-defined]


def asked_again(m: Any, cls: Any, kind: Any, obj: Any = None) -> None:
    """What decides whether a class, or its instance, is an abstract one's.

    Another process asks again, since anybody registers classes. A protocol asks for attributes.
    """
    if not issubclass(type(kind), abc.ABCMeta) or not issubclass(type(cls), type):
        return
    if (names := protocol_names(kind)) is not None:
        mirror = None if isinstance(obj, FakeTensor | None) else m.world.attributes(obj)
        for name in names:
            found = [base for base in cls.__mro__ if m.world.class_item(base, name) is not ABSENT]
            if not found and mirror is not None:
                m.world.get(mirror, name)
    elif not is_trusted(cls.__module__):
        m.recorder.answers.append((issubclass, (cls, kind), {}, issubclass(cls, kind)))


# ---------------------------------------------------------------------------- targets
# What there is to compile in a function, a bound method, a module or any other callable.

HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_SUSPENDING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def target_of(x: Any) -> tuple[types.FunctionType, tuple[Any, ...]]:
    """The Python function that a call of `x` runs, and what it gets before the arguments.

    raises   OptionError if `x` cannot be called
    """
    if not callable(x):
        is_property = isinstance(x, (property, functools.cached_property))
        raise OptionError(
            f"a function, a method or a module can be compiled, not {type(x).__name__}",
            remedy="put @property above @fusee.compile"
            if is_property
            else "give something that can be called; for None compile() gives a decorator",
        )
    x = innermost(x)
    if type(x) is types.FunctionType:  # a proxy says that it is what it stands for
        # what stands in for a transform of torch.func does so where it is called
        is_transform = str(x.__globals__.get("__name__")).startswith("torch._functorch.")
        return (calling(x) if is_transform else x), ()
    if type(x) is types.MethodType and type(x.__func__) is types.FunctionType:
        return innermost(x.__func__), (x.__self__,)
    if issubclass(type(x), nn.Module):
        forward = inspect.getattr_static(type(x), "forward", None)
        is_code = type(forward) is types.FunctionType and not is_parallel(forward)
        if is_code and is_plain(x):
            return innermost(forward), (x,)
        return whole_call(type(x)), (x,)
    method = inspect.getattr_static(type(x), "__call__", None)
    is_operator = isinstance(x, (OpOverload, OpOverloadPacket))  # a node whole
    if type(method) is types.FunctionType and not is_operator:
        return innermost(method), (x,)
    return calling(x), ()


def is_plain(module: nn.Module) -> bool:
    """Whether calling a module is calling its class's `forward`, which is a function."""
    return (
        plain_forward(type(module)) is not None
        and type(module).__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
        and not any(getattr(module, name) for name in HOOKS)
        and not has_global_hooks()
    )


def plain_forward(cls: type[nn.Module]) -> types.FunctionType | None:
    """The `forward` of a class if it is a function, so no static method or other descriptor."""
    found = in_classes(cls, "forward")
    return found if type(found) is types.FunctionType else None


def is_suspending(function: types.FunctionType) -> bool:
    """Whether a function is asynchronous or a generator: it does not run to its end when called."""
    return bool(function.__code__.co_flags & _SUSPENDING)


def whole_call(cls: type[nn.Module], method: str = "__call__") -> types.FunctionType:
    """A function `(module, *args, **kwargs)` that does all that surrounds a module's `forward` too.

    It has the name of the class, and stands at the line at which `forward` begins, so that whatever
    speaks of it speaks of the user's module.
    """
    text = "module" if method == "__call__" else f"module.{method}"
    tree = ast.parse(f"lambda module, /, *args, **kwargs: {text}(*args, **kwargs)", mode="eval")
    # TorchScript's raises where a class is asked
    forward = innermost(inspect.getattr_static(cls, "forward", None))
    code_of: Any = getattr(forward, "__code__", whole_call.__code__)
    name = cls.__name__ if issubclass(cls, fx.GraphModule) else cls.__qualname__
    code = standing_at(tree, code_of.co_filename, code_of.co_firstlineno, name)
    return types.FunctionType(code, {"__name__": cls.__module__})


def calling(target: Function) -> types.FunctionType:
    """A Python function that calls what is none."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    call.__name__ = getattr(target, "__name__", type(target).__name__)
    call.__qualname__ = getattr(target, "__qualname__", call.__name__)
    return as_function(call)


def _whole(function: Any, m: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A call as one node, which gets the fields of frozen dataclasses and makes instances again."""
    given: list[Any] = []
    holds_instances = False

    def taken_apart(x: Any) -> Callable[[Any], Any]:
        nonlocal holds_instances
        leaves, spec = pytree.tree_flatten(m.deep(x))
        parts: list[Callable[[Any], Any]] = [next] * len(leaves)
        for k, leaf in enumerate(leaves):
            params = getattr(type(leaf), "__dataclass_params__", None)
            if params is None or not params.frozen:
                given.append(leaf)
                continue
            holds_instances = True
            names = [one.name for one in dataclasses.fields(leaf)]
            if {*getattr(leaf, "__dict__", {})} - {*names}:
                raise GraphBreak(f"a {type(leaf).__qualname__} holds more than its fields")
            fields = taken_apart({name: m.attribute(leaf, name) for name in names})
            parts[k] = functools.partial(_instance, type(leaf), fields)
        return lambda found: pytree.tree_unflatten([part(found) for part in parts], spec)

    make = taken_apart((args, kwargs))
    if not holds_instances:
        return m.recorder.call_whole(function, *args, **kwargs)

    @functools.wraps(function)
    def call(*found: Any) -> Any:
        positional, named = make(iter(found))
        return function(*positional, **named)

    return m.recorder.call_whole(call, *given)


def _instance(cls: type, fields: Callable[[Any], dict[str, Any]], found: Any) -> Any:
    made: Any = object.__new__(cls)
    for name, value in fields(found).items():
        object.__setattr__(made, name, value)
    return made


def as_function(x: Any) -> types.FunctionType:
    """What `def` makes, called by its type."""
    return x  # type: ignore[no-any-return]


class MadeAnew:
    """What has one code: functions, or the classes that have it as a method."""

    def __init__(self, limit: int) -> None:
        self.count, self.limit = 0, limit
        self.classes = weakref.WeakSet[type]()
        self.modules = weakref.WeakSet[Any]()  # what was compiled for them

    def grows(self, cls: type | None) -> bool:
        """Take in one more, unless one is made at each call, to be compiled for that."""
        if cls in self.classes:
            return True
        if self.count >= self.limit:
            return False
        self.count += 1
        if cls is not None:
            self.classes.add(cls)
        return True

    def are_met(self, turn: int) -> bool:
        """Whether one more module is to be compiled: those of earlier turns were called since.

        A few were not if modules are made at each call: nobody calls them again.
        """
        self.modules = weakref.WeakSet(one for one in self.modules if not one.is_met)
        return len([one for one in self.modules if one.made_at != turn]) < self.limit


def is_like(a: types.FunctionType, b: types.FunctionType) -> bool:
    """Whether functions of one code have the same globals, and defaults for the same parameters."""
    same = a.__globals__ is b.__globals__ and len(a.__defaults__ or ()) == len(b.__defaults__ or ())
    return same and (a.__kwdefaults__ or {}).keys() == (b.__kwdefaults__ or {}).keys()


def bare(function: types.FunctionType) -> types.FunctionType:
    """One of the same code that holds nothing of what the function does."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__,
        (None,) * len(function.__defaults__ or ()), cells or None,
    )  # fmt: skip
    made.__kwdefaults__ = dict.fromkeys(function.__kwdefaults__ or {})
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


class CaptureKeeper(Protocol):
    """Keeps captures for other processes: fusee/persist."""

    def find(self, place: Any, values: dict[str, Any], policy: Policy, varies: Any) -> Any: ...
    def takes(self, captured: Any) -> bool: ...
    def keep(
        self, captured: Any, compiled: Any, values: dict[str, Any], policy: Policy, varies: Any
    ) -> None: ...
