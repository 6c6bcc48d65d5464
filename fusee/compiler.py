"""What torch.compiler is to torch.compile: marks for functions, stances, filters of guards.

It has each name of torch.compiler; what cannot be here raises an error that says what to use.

torch's own marks (torch.compiler.disable, allow_in_graph, assume_constant_result, is_compiling) are
honoured as well, and these set the same ones where torch has an attribute for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from fusee.api import compile
from fusee.backends.registry import default_backend as get_default_backend
from fusee.backends.registry import list_backends, lookup, set_default_backend
from fusee.capture.entries import live
from fusee.capture.guards import Guard
from fusee.capture.policy import ORIGINAL, POLICY, STANCES, Stance, inlined, innermost
from fusee.capture.reconstruct import error_on_graph_break
from fusee.capture.torch_api import pytree, without_dynamo
from fusee.errors import FuseeError, OptionError, choices, nearest
from fusee.runtime import cache
from fusee.runtime.cache import CacheInfo

# ---------------------------------------------------------------------------- absent
# Names of torch.compiler for what cannot be here: each says in one error what to use instead.

# What `precompile` raises.
PrecompileError = FuseeError

_NEXT_PROCESS = (
    "fusee.compiler.save_cache_artifacts(), with FUSEE_KEEP_CAPTURES=1 for small graphs, too: a"
    " process that loads them neither captures nor compiles"
)


def load_compiled_function(file: Any, *, f_globals: Any = None, external_data: Any = None) -> Any:
    """torch.compiler's reads what torch.compile(...).aot_compile() wrote. raises OptionError"""
    _refuse("load_compiled_function() reads what nothing here writes", _NEXT_PROCESS)


class _Precompile:
    """torch.compiler.precompile writes a program that TorchInductor has compiled."""

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        """raises OptionError"""
        _refuse("precompile is TorchInductor's", _NEXT_PROCESS)

    load = capture


precompile = _Precompile()


def set_enable_guard_collectives(enabled: bool) -> bool:
    """Whether ranks agree before one compiles: they never do. True raises OptionError."""
    if enabled:
        _refuse(
            "ranks cannot agree here before one of them compiles: nothing is exchanged meanwhile",
            "leave it out; where one rank may compile for longer than the others' time-out,"
            " torch.distributed.barrier() after the first step",
        )
    return False


class _NoSetting(OptionError, AttributeError):
    """So that hasattr() and getattr() with a default work."""


class Config:
    """torch.compiler.config, as far as it is settings of ours.

    recompile_limit   versions of each piece that are kept where compile() is not told; 8
    """

    __slots__ = ()

    @contextlib.contextmanager
    def patch(self, **settings: Any) -> Iterator[None]:
        """For a `with`, or as a decorator: other settings meanwhile. As torch's config.patch."""
        before = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @property
    def recompile_limit(self) -> int:
        return POLICY.recompile_limit

    @recompile_limit.setter
    def recompile_limit(self, value: int) -> None:
        if type(value) is not int or value < 1:
            _refuse(f"recompile_limit={value!r} is not an int > 0", "8, the default")
        POLICY.recompile_limit = value

    def __getattr__(self, name: str) -> NoReturn:
        close = nearest(name, ["recompile_limit", *_INSTEAD])
        hint = f"{close!r}; " if close and close != name else ""
        instead = _INSTEAD.get(name, f"{hint}its settings: recompile_limit; docs/options.md")
        _refuse(f"fusee.compiler.config has no setting {name!r}", instead, _NoSetting)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "recompile_limit":
            object.__setattr__(self, name, value)
        else:
            self.__getattr__(name)


# What one uses here for settings of torch.compiler.config.
_INSTEAD = {
    "cache_size_limit": "recompile_limit",
    "cache_key_tag": "FUSEE_CACHE_DIR=folder: one for each tag",
    "fail_on_recompile_limit_hit": 'fusee.compiler.set_stance("fail_on_recompile")',
    "force_disable_caches": 'FUSEE_CACHE_SIZE=0, or options={"cache": False}',
    "job_id": "FUSEE_KEEP_CAPTURES=1",
    "log_file_name": "FUSEE_DUMP=folder",
    "verbose": "FUSEE_LOG=all",
}

config = Config()


def _refuse(what: str, instead: str = "", kind: type[OptionError] = OptionError) -> NoReturn:
    raise kind(what, did="changed nothing", remedy=instead)


def _refuse_kind(what: str, given: object) -> NoReturn:
    _refuse(f"{what}, not {type(given).__name__}")


def _check_callable(name: str, given: object) -> None:
    if not callable(given):
        _refuse_kind(f"{name}() takes a function", given)


# ---------------------------------------------------------------------------- compiler


__all__ = [
    "CacheInfo", "Guard", "PrecompileError", "allow_in_graph", "assume_constant_result", "compile",
    "config", "cudagraph_mark_step_begin", "cudagraph_mark_warmup_incomplete", "disable",
    "error_on_graph_break", "get_default_backend", "is_compiling", "is_dynamo_compiling",
    "is_exporting", "keep_portable_guards_unsafe", "keep_tensor_guards_unsafe", "list_backends",
    "load_cache_artifacts", "load_compiled_function", "mark_dynamic", "mark_static",
    "mark_static_address", "mark_unbacked", "maybe_mark_dynamic", "nested_compile_region",
    "nonstrict_trace", "precompile", "reset", "save_cache_artifacts", "set_default_backend",
    "set_enable_guard_collectives", "set_stance", "skip_all_guards_unsafe",
    "skip_guard_on_all_nn_modules_unsafe", "skip_guard_on_globals_unsafe",
    "skip_guard_on_inbuilt_nn_modules_unsafe", "substitute_in_graph", "wrap_numpy",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
Filter = Callable[..., list[bool]]

# torch's own, so that programs that ask either of them get one answer.
is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_exporting = torch.compiler.is_exporting


def reset() -> None:
    """Forget all that was compiled: the next calls compile anew. Marks and the stance stay."""
    for compiled in list(live):
        compiled.reset()


_torchs_save = torch.compiler.save_cache_artifacts
_torchs_load = torch.compiler.load_cache_artifacts


def save_cache_artifacts() -> tuple[bytes, CacheInfo] | None:
    """What this process took from the cache or wrote there: machine code and kept captures.

    As bytes for load_cache_artifacts(); None if there is nothing. TorchInductor's are with them,
    if it was used.

    source   torch.compiler.save_cache_artifacts
    """
    torchs = _torchs_save() if "torch._inductor" in sys.modules else None
    return cache.save(None if torchs is None else torchs[0])


def load_cache_artifacts(serialized_artifacts: bytes) -> CacheInfo | None:
    """Put what save_cache_artifacts() gave into this machine's cache.

    They are code, and are run: load only what you trust. Of other versions nothing is loaded, with
    a warning and None.

    raises   OptionError for other bytes
    source   torch.compiler.load_cache_artifacts
    """
    info, torchs = cache.load(serialized_artifacts)
    if torchs is not None:
        _torchs_load(torchs)
    return info


# ------------------------------------------------------------------------------ marks


@overload
def disable(fn: F, recursive: bool = True, *, reason: str | None = None) -> F: ...
@overload
def disable(
    fn: None = None, recursive: bool = True, *, reason: str | None = None
) -> Callable[[F], F]: ...
def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Run a function as plain Python wherever it is called; the graph ends there.

    fn          a function, method or module; a class, for the calls of its instances; None: the
                result is a decorator
    recursive   whether what it calls runs eagerly too. Otherwise its own lines run eagerly, and
                functions that they call are compiled
    reason      is told where the graph ends
    source      torch.compiler.disable
    """
    if fn is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    fn = innermost(fn)
    if isinstance(fn, type):
        name = "forward" if issubclass(fn, nn.Module) else "__call__"
        if not any(name in vars(one) for one in fn.__mro__):
            _refuse(
                f"the class {fn.__qualname__} has no {name}() to disable", "disable its methods"
            )
        setattr(fn, name, disable(getattr(fn, name), recursive, reason=reason))
        return fn
    if isinstance(fn, nn.Module):
        fn.forward = disable(fn.forward, recursive, reason=reason)
        return fn
    if not callable(fn):
        _refuse_kind("disable() takes a function or a module", fn)
    if isinstance(fn, types.MethodType):
        return types.MethodType(disable(fn.__func__, recursive, reason=reason), fn.__self__)
    alone = without_dynamo(fn)

    @functools.wraps(fn)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        if not recursive:
            return fn(*args, **kwargs)
        POLICY.nest_eager(1)
        try:
            return alone(*args, **kwargs)
        finally:
            POLICY.nest_eager(-1)

    marks = {"": True, "_msg": reason, "_recursive": recursive}
    disabled.__dict__.update({f"_torchdynamo_disable{key}": x for key, x in marks.items()})
    disabled.__dict__[ORIGINAL] = fn
    return disabled


def allow_in_graph(fn: Any) -> Any:
    """Put calls of a function into the graph as one node, whatever it does inside.

    It must do nothing but compute tensors from its arguments. A list or tuple: each of them.

    source   torch.compiler.allow_in_graph
    """
    if isinstance(fn, (list, tuple)):
        return [allow_in_graph(one) for one in fn]
    _check_callable("allow_in_graph", fn)
    POLICY.in_graph.add(fn)
    return fn


def nonstrict_trace(traceable_fn: F) -> F:
    """As allow_in_graph, for one function: operators are traced within it, not its Python.

    source   torch.compiler.nonstrict_trace
    """
    _check_callable("nonstrict_trace", traceable_fn)
    allow_in_graph(traceable_fn)
    return traceable_fn


def wrap_numpy(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays, as one that takes and gives tensors, in containers too.

    source   torch.compiler.wrap_numpy
    """
    _check_callable("wrap_numpy", fn)

    array = importlib.import_module("numpy").ndarray

    @inlined
    def as_array(x: Any) -> Any:
        return x.numpy() if isinstance(x, Tensor) else x

    @inlined
    def as_tensor(x: Any) -> Any:
        return torch.as_tensor(x) if isinstance(x, array) else x

    @inlined
    @functools.wraps(fn)
    def of_tensors(*args: Any, **kwargs: Any) -> Any:
        given, named = pytree.tree_map(as_array, (args, kwargs))
        return pytree.tree_map(as_tensor, fn(*given, **named))

    return of_tensors


def assume_constant_result(fn: F) -> F:
    """Call a function once, while compiling, and take its result for constant from then on.

    source   torch.compiler.assume_constant_result
    """
    _check_callable("assume_constant_result", fn)
    POLICY.constant.add(fn)
    return fn


def substitute_in_graph(
    original_fn: Any,
    *,
    can_constant_fold_through: bool = False,
    skip_signature_check: bool = False,
    is_embedded_type: bool = False,
) -> Callable[[F], F]:
    """A decorator: compile the function below it in place of `original_fn`, a function in C.

        @fusee.compiler.substitute_in_graph(operator.indexOf)
        def index_of(a, b, /): ...

    The other arguments are torch's and change nothing here: what a program computes from constants
    is computed while it is compiled, whichever function does it.

    raises   OptionError if the signatures differ, unless `skip_signature_check`
    source   torch.compiler.substitute_in_graph
    """
    _check_callable("substitute_in_graph", original_fn)

    def register(traceable: F) -> F:
        if not isinstance(traceable, types.FunctionType):
            _refuse_kind("what is compiled instead must be a Python function", traceable)
        try:
            wanted = None if skip_signature_check else inspect.signature(original_fn)
        except ValueError:  # a C function that does not tell
            wanted = None
        given = inspect.signature(traceable)
        asked, there = (
            [(p.name, p.kind, p.default) for p in (s or given).parameters.values()]
            for s in (wanted, given)
        )
        if asked != there:
            _refuse(
                f"the signature of {traceable.__qualname__}{given} is not that of"
                f" {original_fn.__qualname__}{wanted}",
                "give it the same parameters, or skip_signature_check=True",
            )
        POLICY.substitutes[original_fn] = traceable
        return traceable

    return register


@overload
def nested_compile_region(fn: F, **options: Any) -> F: ...
@overload
def nested_compile_region(fn: None = None, **options: Any) -> Callable[[F], F]: ...
@inlined
def nested_compile_region(fn: Any = None, **options: Any) -> Any:
    """Mark a function that is called many times, such as a model's layer.

    The mark changes nothing here: each call is captured and compiled as if it were not there, which
    takes longer with each. Kernels that are equal in several calls are generated once.

    source   torch.compiler.nested_compile_region
    """
    if fn is None:
        return functools.partial(nested_compile_region, **options)
    if not callable(fn):  # within a function that is captured, where a check of ours is no part
        _refuse_kind("nested_compile_region() takes a function", fn)
    return fn


class _DimRange(NamedTuple):
    """As in torch._dynamo.decorators."""

    dim: int
    min: int | None
    max: int | None


def mark_dynamic(
    x: Tensor,
    index: int | Sequence[int],
    *,
    hint_override: int | None = None,
    min: int | None = None,
    max: int | None = None,
    specialize_on: Sequence[Any] | None = None,
) -> None:
    """Say that sizes of a tensor vary, from `min` to `max` (inclusive), from its first call on.

    It is an error, ConstantSizeError, if the program makes a constant of one. Of several calls all
    ranges hold.

    hint_override, specialize_on   TorchInductor's; noted for it

    raises   OptionError
    source   torch._dynamo.mark_dynamic
    """
    _check_range("mark_dynamic", min, max)
    for one in _axes("mark_dynamic", x, index):
        x.__dict__.setdefault("_dynamo_dynamic_indices", set()).add(one)
        x.__dict__.setdefault("_dynamo_dynamic_range", set()).add(_DimRange(one, min, max))
        x.__dict__.setdefault("_specialize_on", {})[one] = [*(specialize_on or ())]
        hints = x.__dict__.setdefault("_dynamo_hint_overrides", {})
        if hint_override:
            hints[one] = hint_override


def maybe_mark_dynamic(x: Tensor, index: int | Sequence[int]) -> None:
    """Say that sizes of a tensor may vary: a symbol, unless the program makes a constant of it.

    raises   OptionError
    source   torch._dynamo.maybe_mark_dynamic
    """
    for one in _axes("maybe_mark_dynamic", x, index):
        x.__dict__.setdefault("_dynamo_weak_dynamic_indices", set()).add(one)


def mark_unbacked(
    x: Tensor,
    index: int | Sequence[int],
    hint_override: int | None = None,
    strict: bool = False,
    specialize_on: Sequence[Any] | None = None,
    shape_id: str | None = None,
    min: int | None = None,
    max: int | None = None,
) -> None:
    """Say that one version is good for all sizes there, from `min` to `max`, that of 1 as well.

    A branch of the program on one is a ConstantSizeError; what torch._check says of it holds.

    strict         also if an operator makes a constant of it
    shape_id       all sizes that are marked with one are equal
    hint_override, specialize_on   TorchInductor's; noted for it

    raises   OptionError
    source   torch._dynamo.decorators.mark_unbacked
    """
    _check_range("mark_unbacked", min, max)
    for one in _axes("mark_unbacked", x, index):
        name = "_dynamo_strict_unbacked_indices" if strict else "_dynamo_unbacked_indices"
        x.__dict__.setdefault(name, set()).add(one)
        for name, value in (
            ("_specialize_on", [*(specialize_on or ())]),
            ("_dynamo_hint_overrides", hint_override or None),
            ("_dynamo_shape_ids", shape_id),
            ("_dynamo_unbacked_bounds", None if min is None is max else (min, max)),
        ):
            noted = x.__dict__.setdefault(name, {})
            if value is not None:
                noted[one] = value


def mark_static(x: Any, index: int | Sequence[int] | None = None) -> Any:
    """Keep sizes of a tensor constant, all unless `index` says which; also in what is compiled.

    Of a class of modules: keep integers that are attributes of its modules constant.

    raises   OptionError
    source   torch._dynamo.mark_static
    """
    if isinstance(x, type) and issubclass(x, nn.Module):
        x._dynamo_marked_static = True  # type: ignore[attr-defined]
        return x
    for one in _axes("mark_static", x, index):
        x.__dict__.setdefault("_dynamo_static_indices", set()).add(one)
    return None


def mark_static_address(x: Tensor, guard: bool = False) -> None:
    """Say that a tensor stays where it is; `guard`: one elsewhere gets a version of its own.

    raises   OptionError
    source   torch._dynamo.mark_static_address
    """
    _axes("mark_static_address", x, ())
    x.__dict__["_dynamo_static_input_type"] = "guarded" if guard else "unguarded"


def _check_range(name: str, low: int | None, high: int | None) -> None:
    ends = [one for one in (low, high) if one is not None]
    if not all(type(one) is int for one in ends) or ends != sorted(ends):
        _refuse(f"{name}(): no size is from {low!r} to {high!r}", "min and max as ints, or None")


def _axes(name: str, x: Tensor, index: int | Sequence[int] | None) -> Sequence[int]:
    if not isinstance(x, Tensor):
        _refuse_kind(f"{name}() takes a tensor", x)
    chosen: Any = range(x.dim()) if index is None else index
    chosen = chosen if isinstance(chosen, (range, list, tuple, set)) else [chosen]
    for one in chosen:
        if type(one) is not int or not -x.dim() <= one < x.dim():
            _refuse(
                f"{name}(): a tensor of {x.dim()} dimensions has none at {one!r}",
                f"an int from {-x.dim()} to {x.dim() - 1}, or several in a list",
            )
    if chosen:
        x.__dict__["_has_dynamo_dim_marking"] = True
    return [one % x.dim() for one in chosen]


def cudagraph_mark_step_begin() -> None:
    """Say that a new step begins: results of the last one may be overwritten by CUDA graphs.

    Ours copy their results out, so nothing is overwritten; stock torch's, as a backend, are told.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.mark_step_begin()


def cudagraph_mark_warmup_incomplete() -> None:
    """Ask CUDA graphs for one more warm-up: stock torch's, as a backend. Ours warm up once."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None and hasattr(trees, "mark_warmup_incomplete"):
        trees.mark_warmup_incomplete()


# ------------------------------------------------------------------------------ stances


class _Stance:
    """What set_stance gives: the stance is set already; leaving `with` restores the one before."""

    def __init__(self, stance: Stance) -> None:
        self.stance = stance
        self.before = POLICY.stance
        POLICY.set_stance(stance)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        POLICY.set_stance(self.before)

    def __call__(self, fn: F) -> F:
        """As a decorator: only calls of `fn` run under the stance."""
        POLICY.set_stance(self.before)
        stance = self.stance

        @functools.wraps(fn)
        def under(*args: Any, **kwargs: Any) -> Any:
            with _Stance(stance):
                return fn(*args, **kwargs)

        return under  # type: ignore[return-value]


def set_stance(
    stance: str = "default", *, skip_guard_eval_unsafe: bool = False, force_backend: Any = None
) -> _Stance:
    """Say what compiled functions do. A call, a decorator, or a context manager.

        default              compile what a call needs
        force_eager          run everything as plain Python
        eager_on_recompile   use what is compiled; run other calls eagerly
        fail_on_recompile    use what is compiled; raise RecompileError for other calls
        eager_then_compile   run each place eagerly at first, compile it the second time

    skip_guard_eval_unsafe   where one version is compiled, use it without checking that it fits:
                             for programs that are warm, and that never need another version
    force_backend            what compiles in place of each function's own backend; versions that
                             the own one made come back afterwards. With the stance "default" only

    What torch.compiler.set_stance sets is honoured too, and goes before this.

    raises   OptionError for another name; UnknownBackend; RegionError in a compiled function
    source   torch.compiler.set_stance
    """
    if stance not in STANCES:
        _refuse(f"there is no stance {stance!r}", choices(stance, STANCES, "stances"))
    if force_backend is not None:
        if stance != "default":
            _refuse(
                f"force_backend does not go with the stance {stance!r}",
                'leave one of the two out: a backend is forced in the stance "default"',
            )
        lookup(force_backend)
    return _Stance(Stance(stance, skip_guard_eval_unsafe, force_backend))


set_stance.__dict__["_dynamo_forbidden"] = True


# ------------------------------------------------------------------------------ guard filters


def keep_portable_guards_unsafe(guards: Sequence[Guard]) -> list[bool]:
    """For options={"guard_filter_fn": ...}: check nothing but tensors that are no global's."""
    return [guard.guard_type == "TENSOR_MATCH" and not guard.is_global for guard in guards]


# torch's own: they ask a Guard what it has of one of TorchDynamo's.
keep_tensor_guards_unsafe: Filter = torch.compiler.keep_tensor_guards_unsafe
skip_all_guards_unsafe: Filter = torch.compiler.skip_all_guards_unsafe
skip_guard_on_all_nn_modules_unsafe: Filter = torch.compiler.skip_guard_on_all_nn_modules_unsafe
skip_guard_on_globals_unsafe: Filter = torch.compiler.skip_guard_on_globals_unsafe
skip_guard_on_inbuilt_nn_modules_unsafe: Filter = (
    torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe
)
