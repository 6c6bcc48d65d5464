"""The functions that users call. They hold no algorithm: they join capture to backends."""

from __future__ import annotations

import copy
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn

from fusee.backends import registry
from fusee.backends.registry import BackendLike
from fusee.backends.report import CompiledGraph, GuardedBackend, Report, graphs_of, live_reports
from fusee.capture.between import suspending
from fusee.capture.builtins import stands_for
from fusee.capture.bytecode import first_line
from fusee.capture.dynamic import Varying
from fusee.capture.entries import CompiledFunction, live, machinery
from fusee.capture.policy import (
    ORIGINAL,
    POLICY,
    WRAPPER,
    innermost,
    is_skipped,
    is_suspending,
    plain_forward,
    target_of,
    whole_call,
)
from fusee.capture.torch_api import (
    DYNAMO,
    call_impl,
    has_global_hooks,
    is_parallel,
    set_compiled_call,
)
from fusee.config import CaptureOptions, Knob, Options, knobs, taken
from fusee.errors import (
    FuseeWarning,
    GraphBreakError,
    OptionError,
    choices,
    nearest,
    source_line,
    telling,
    warn,
)

__all__ = ["Compiler", "compile", "compile_in_place", "report"]

# Options that are not the backend's.
_OWN_OPTIONS = tuple(row.name for row in knobs(CaptureOptions))

F = TypeVar("F", bound=Callable[..., Any])


class _Default(str):
    """The name of the backend that is used unless one is given; tells that none was given."""


_DEFAULT = _Default("fusee")


_ROWS = (
    *(
        Knob(name, bool, False, help, takes="True or False")
        for name, help in (
            ("fullgraph", "one graph, or an error"),
            ("disable", "give the model back as it is"),
            ("isolate_recompiles", "versions belong to what compile() gives"),
        )
    ),
    Knob("dynamic", bool, None, "symbols from second values on", takes="None, True or False"),
    Knob("name", str, None, "what reports call it", takes="a text"),
    Knob("options", Mapping, None, "the backend's, and ours"),
    Knob("recompile_limit", int, None, "8 versions of each piece", least=1),
    Knob("mode", str, None, "a name that torch.compile knows", convert=registry.check_mode),
    Knob("backend", object, None, "a name, or a function", convert=lambda backend: backend),
)
_OPTIONAL = [row.name for row in _ROWS if row.default is None]


class Arguments(TypedDict, total=False):
    """compile()'s keyword arguments."""

    fullgraph: bool
    dynamic: bool | None
    backend: BackendLike | None
    mode: str | None
    options: Mapping[str, Any] | None
    name: str | None
    disable: bool
    recompile_limit: int | None
    isolate_recompiles: bool


@overload
def compile(model: F, **arguments: Unpack[Arguments]) -> F: ...
@overload
def compile(model: None = None, **arguments: Unpack[Arguments]) -> Callable[[F], F]: ...
@telling
def compile(
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: BackendLike | None = _DEFAULT,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    **unknown: Any,
) -> Any:
    """Compile a function, method or module; or, without one, make a decorator. As torch.compile.

        fast = fusee.compile(model)
        @fusee.compile(fullgraph=True)
        model.decode = fusee.compile(model.decode)

    Nothing is compiled before the first call. A module becomes one that shares all that the module
    holds; any other callable becomes a function.

    fullgraph        raise GraphBreakError where the program cannot be one graph
    dynamic          None: a size, or an integer, that is seen with a second value is a symbol from
                     then on, and one version serves all; True: at once, but for sizes of
                     0 and 1; False: each set of sizes gets a version of its own
    backend          a name (fusee.compiler.list_backends()), or `(gm, example_inputs) -> callable`
    mode             a name that torch.compile knows (docs/gpus.md)
    options          the backend's and ours (docs/options.md): `guard_filter_fn`, which says what
                     is checked before a version is used again, `fallback="eager"`, which runs
                     graphs eagerly that the backend cannot compile, `dynamic_sources`
    name             what reports call it: fusee.report(name)
    disable          give `model` back as it is
    recompile_limit  versions of each piece that are kept; other calls run eagerly. 8 unless said
    isolate_recompiles  accepted: versions belong to what compile() gives, never to the function
    raises           OptionError, UnknownBackend, MissingPackage, at once
    source           torch.compile
    """
    given = {**locals(), **unknown}
    for key in ("model", "unknown", *(name for name in _OPTIONAL if given[name] is None)):
        del given[key]
    taken(given, _ROWS, "argument")
    if backend is None or isinstance(backend, _Default):
        backend = registry.default_backend()
    if mode is not None and options:
        raise OptionError(
            "mode and options were both given",
            remedy="a mode is a set of options: give one of the two",
        )
    limit = POLICY.recompile_limit if recompile_limit is None else recompile_limit
    compiler = Compiler(backend, fullgraph, mode, dict(options or {}), name, limit, dynamic)
    if disable or any(os.environ.get(name) == "1" for name in _SWITCHES):
        return (lambda model: model) if model is None else model
    return compiler if model is None else compiler(model)


# By these environment variables torch.compile is switched off.
_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def compiles(function: F) -> F:
    """In what is compiled, calls of what `function` gives are calls of what it was given."""

    @stands_for(function)
    def within(m: Any, model: Any = None, /, **arguments: Any) -> Any:
        if model is None:
            return functools.partial(function, **arguments)
        return m.world.made(function, model, **arguments)

    return function


compiles(compile)
compiles(torch.compile)


POLICY.lookup = lambda backend: (
    GuardedBackend(registry.for_capture(backend), registry.backend_name(backend)),
    registry.sizes_of(backend),
)
machinery.append("fusee.torch_functions")  # its stand-ins


@dataclass
class Compiler:
    """Arguments of compile(), ready to be applied to functions and modules."""

    backend: BackendLike
    fullgraph: bool
    mode: str | None
    options: dict[str, Any]
    name: str | None
    recompile_limit: int
    dynamic: bool | None = None
    said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        given = dict(self.options)
        own = {name: given.pop(name) for name in _OWN_OPTIONS if name in given}
        self.chosen = CaptureOptions.parse(own)
        known = registry.known_options(self.backend)
        for option in given:
            is_all = "threads" in known  # an engine's own options wait for its import
            if known and option not in known and (is_all or nearest(option, _OWN_OPTIONS)):
                raise OptionError(
                    f"the option {option!r} does not exist"
                    + (" for backend='fusee'" if is_all else ""),
                    remedy=choices(option, (*known, *_OWN_OPTIONS), "known options"),
                )
        chosen = {"prices": given["prices"]} if "prices" in given else {}
        self.is_tried = self.backend == "fusee" and Options.parse(chosen).prices
        if self.name and "name" in known:
            given.setdefault("name", self.name)
        backend = registry.for_capture(self.backend, given, self.mode)
        self.compile_graph = GuardedBackend(
            backend,
            registry.backend_name(self.backend),
            self.notice,
            fall_back=self.chosen.fallback is not None,
        )
        self.compile_graph.serves_copies = callable(self.backend) or self.backend in (
            "eager",
            "aot_eager",
        )
        least = registry.keeps_captures(backend)
        keeper = registry.later("fusee.persist", "Keeper")
        self.keeper = None if least is None else keeper(least)

    def __getstate__(self) -> dict[str, Any]:
        """Only what was given: the rest is made again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def arguments(self) -> dict[str, Any]:
        """What compile() is to be given for the same again."""
        names = ("backend", "fullgraph", "mode", "name", "recompile_limit", "dynamic")
        return {name: getattr(self, name) for name in names} | {"options": self.options or None}

    def notice(self, text: str, where: str) -> None:
        """Tell the user once."""
        if text not in self.said:
            self.said.add(text)
            warn(FuseeWarning, text, where=source_line(where) if where else None)

    def __call__(self, model: Any) -> Any:
        """`model`, compiled."""
        if issubclass(type(model), (classmethod, staticmethod)):
            return type(model)(self(model.__func__))
        model = innermost(model)
        if isinstance(model, torch.jit.ScriptModule):
            self._refuse(f"{type(model).__name__} is TorchScript, and has no Python to capture", "")
            return model
        if issubclass(type(model), nn.Module):
            return _wrapped(model, self)
        if issubclass(type(model), type):
            return self._class(model)
        function, before = target_of(model)
        skips = is_skipped(function)
        if "_torchdynamo_disable" in function.__dict__ and not skips:
            name = function.__qualname__
            self.notice(f"{name} is disabled: it runs eagerly", first_line(function))
            return model
        if skips or is_suspending(function):
            what = f"{function.__qualname__} is asynchronous or a generator"
            if not skips:
                self._refuse(f"{what}, and no graph holds its own lines", first_line(function))
            compiled = suspending(self.function(function).nested, function)
        else:
            compiled = self.function(function).call
        return types.MethodType(compiled, *before) if before else compiled

    def function(self, function: types.FunctionType) -> CompiledFunction:
        sizes = registry.sizes_of(self.backend)
        sizes["with_symbols"] |= self.dynamic is True
        return CompiledFunction(
            function,
            self.compile_graph,
            POLICY,
            self.recompile_limit,
            fullgraph=self.fullgraph,
            varying=functools.partial(Varying, dynamic=self.dynamic, options=self.chosen, **sizes),
            guard_filter=self.chosen.guard_filter_fn,
            notice=self.notice,
            keeper=self.keeper,
            is_tried=self.is_tried,
        )

    def _class(self, cls: type) -> type:
        """A class whose instances are compiled."""
        name = "forward" if issubclass(cls, nn.Module) else "__call__"
        method = getattr(cls, name, None)
        if isinstance(method, types.FunctionType):
            setattr(cls, name, self(method))
            return cls
        raise OptionError(
            f"the class {cls.__qualname__} has no method {name}() to compile",
            remedy="compile a function that makes and uses instances",
        )

    def _refuse(self, text: str, where: str) -> None:
        """Say that something runs as it is; under fullgraph that is an error."""
        if self.fullgraph:
            raise GraphBreakError(
                text,
                where=source_line(where) if where else None,
                did="stopped before compiling",
                remedy="compile the functions that it calls",
            )
        self.notice(f"{text}: it runs eagerly", where)


# ------------------------------------------------------------------------------ modules


class _SeenClass:
    """`__class__` of a compiled module: isinstance finds torch's OptimizedModule in it too.

    isinstance asks for it if the type itself does not say yes. No property: see _FOR_TORCH.
    """

    def __get__(self, module: Any, cls: type) -> type:
        if module is None:
            return type(cls)
        torchs = getattr(sys.modules.get(DYNAMO), "OptimizedModule", None)
        # torch.distributed.checkpoint looks for a prefix then in names, which are ours without one
        is_plain = torchs is None or sys._getframe(1).f_code.co_name == "_get_fqns"
        return cls if is_plain else _as_torchs(cls, torchs)

    def __set__(self, module: Any, cls: type) -> None:
        object.__dict__["__class__"].__set__(module, cls)


@functools.lru_cache(maxsize=1024)
def _as_torchs(cls: type, torchs: type) -> type:
    """A class of which nothing is made, below that of a compiled module and torch's."""
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()}
    return types.new_class(cls.__name__, (cls, torchs), exec_body=lambda space: space.update(named))


class CompiledModule:
    """What compiling a module gives: one of a class below the module's own, with the same state.

    It has no attributes of its own besides the slots: parameters, hooks, the mode of training
    and whatever else is read or set are those of `_orig_mod`, in one dict that both have.
    """

    __slots__ = ()
    __class__ = _SeenClass()
    _orig_mod: nn.Module
    _run: _ModuleCalls
    _forward: CompiledFunction
    _compiler: Compiler

    def __init_subclass__(cls) -> None:
        """Classes made here are nobody's subclass to register."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """What `type(compiled)(...)` makes, as a slice of a Sequential does: one as it is."""
        original = cls.__mro__[cls.__mro__.index(CompiledModule) + 1]
        return original(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # what the slots hold is no submodule: the original shares the dict of those
        if name in _SLOTS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = _wrapped(copy.deepcopy(self._orig_mod, memo), self._compiler)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _wrapped, (self._orig_mod, self._compiler)


# By these torch.compile finds what to compile in place of what is compiled already, and Lightning
# what compiles more of a module, or it again. No properties: torch.jit.script would compile those.
_FOR_TORCH = (ORIGINAL, WRAPPER, "dynamo_ctx", "_compile_kwargs")
_SLOTS = ("_compiler", "_forward", "_orig_mod", "_run", *_FOR_TORCH)


class _ModuleCalls:
    """What runs when a module is called: its `forward`, compiled, as long as a call is no more.

    eagerly     calls the module, or what is given first, as if nothing had been compiled
    around      by class: the whole call with its hooks
    functions   what was compiled: of `forward`, and of the whole call with its hooks
    """

    def __init__(
        self,
        module: nn.Module,
        compiler: Compiler,
        eagerly: Callable[..., Any],
        around: Callable[[type[nn.Module]], types.FunctionType],
    ) -> None:
        cls: Any = type(module)
        forward = self.forward = plain_forward(cls)
        self.is_plain = (
            forward is not None
            and cls.__call__ is nn.Module.__call__
            and target_of(forward)[0] is forward
            and not is_suspending(forward)
            and not is_parallel(forward)
            and "_torchdynamo_disable" not in forward.__dict__
        )
        self.module, self.cls, self.state = module, cls, module.__dict__
        self.compiler, self.eagerly, self.around = compiler, eagerly, around
        self.plain_call, self.with_hooks = nn.Module.__call__, around(cls)
        called = forward if forward is not None and self.is_plain else self.with_hooks
        self.functions = [compiler.function(called)]
        self.run = self.functions[0].call

    def seldom(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """A call that has hooks, that a tracer of modules waits for, or of another class by now."""
        if type(self.module) is not self.cls:
            owner._run = _ModuleCalls(self.module, self.compiler, self.eagerly, self.around)
            return _called(owner, *args, **kwargs)
        if nn.Module.__call__ is self.plain_call and not has_global_hooks():
            if len(self.functions) == 1:
                self.functions.append(self.compiler.function(self.with_hooks))
            return self.functions[1].call(self.module, *args, **kwargs)
        if nn.Module.__call__ is self.plain_call:
            name = self.cls.__qualname__
            self.compiler.notice(f"{name} runs eagerly: it has hooks for all modules", "")
        return self.eagerly(owner, *args, **kwargs)


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    calls: _ModuleCalls = self._run
    state = calls.state
    if (
        type(calls.module) is not calls.cls
        or nn.Module.__call__ is not calls.plain_call
        or has_global_hooks()
        or (
            calls.is_plain
            and (
                calls.cls.forward is not calls.forward
                or "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
            )
        )
    ):
        return calls.seldom(self, *args, **kwargs)
    return calls.run(calls.module, *args, **kwargs)


def _call_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """`__call__` of a compiled module. TorchDynamo inlines the original's in its place."""
    made = types.FunctionType(_called.__code__.replace(co_name="__call__"), _called.__globals__)
    made.__dict__["_torchdynamo_inline"] = cls.__call__
    return made


# By class, its forward and its call: modules of one class stay of one class when they are compiled.
_classes: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def _class_of(cls: type[nn.Module]) -> Any:
    """The class of what compiling a module of this class gives."""
    plain: Any = plain_forward(cls)
    key: Any = cls, plain, cls.__call__  # closures of these may know the class
    key = tuple(weakref.ref(x) if isinstance(x, type | types.FunctionType) else x for x in key)
    if (known := _classes.get(key)) is not None:
        return known

    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_forward"):
            self._forward = self._compiler.function(plain)
        return self._forward.call(self._orig_mod, *args, **kwargs)

    namespace = {
        "__call__": _call_of(cls),
        "__slots__": _SLOTS,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    if plain is not None and not is_suspending(plain):
        # torch.jit.script reads the source of `forward`, and looks up its names here
        forward = types.FunctionType(call.__code__, plain.__globals__, closure=call.__closure__)
        functools.update_wrapper(forward, plain).__dict__["_torchdynamo_inline"] = plain
        namespace["forward"] = forward
    made = _classes[key] = types.new_class(
        cls.__name__, (CompiledModule, cls), exec_body=lambda space: space.update(namespace)
    )
    return made


def _wrapped(module: nn.Module, compiler: Compiler) -> nn.Module:
    """A compiled module that shares all with `module`."""
    cls = type(module)
    made: nn.Module = object.__new__(_class_of(cls))
    made.__dict__ = module.__dict__

    def eagerly(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if type(module) is not cls:
            return module(*args, **kwargs)
        return cls.__call__(owner, *args, **kwargs)  # which a tracer may have replaced by now

    calls = _ModuleCalls(module, compiler, eagerly, whole_call)
    for_torch = (module, id(made), compiler, compiler.arguments())
    own = {"_compiler": compiler, "_orig_mod": module, "_run": calls}
    for name, value in (*own.items(), *zip(_FOR_TORCH, for_torch)):
        setattr(made, name, value)
    return made


def compile_in_place(module: nn.Module, **arguments: Any) -> None:
    """Compile what calling a module does, as nn.Module.compile. Takes compile()'s arguments."""
    compiler = compile(**arguments)
    if isinstance(compiler, Compiler):
        around = functools.partial(whole_call, method="_call_impl")
        original = types.MethodType(call_impl, module)
        calls = _ModuleCalls(
            module, compiler, lambda _, *args, **kwargs: original(*args, **kwargs), around
        )
        run, owner = _call_of(type(module)), types.SimpleNamespace(_run=calls)

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(owner, *args, **kwargs)

        call.__dict__.update(_torchdynamo_inline=original, functions=calls.functions)
        set_compiled_call(module, call)


# ------------------------------------------------------------------------------ reports


def report(of: Any = None) -> list[Report]:
    """What compiled graphs are made of: kernels, calls to ATen, what was left out, time per stage.

    of   what compile() gave, or the name that it was given; a compiled graph; None: all graphs
         that are alive, oldest first

    To read one, print it:

        fast = fusee.compile(model)
        fast(x)
        print(*fusee.report(fast))
    """
    if isinstance(of, CompiledGraph):
        return [of.report()]
    if of is None or isinstance(of, str):
        return [one for one in live_reports() if of is None or one.name == of]
    found: list[CompiledFunction]
    if isinstance(of, CompiledModule):
        found = [*of._run.functions, *([of._forward] if hasattr(of, "_forward") else [])]
    elif isinstance(of, nn.Module) and of._compiled_call_impl is not None:  # nn.Module.compile's
        found = list(getattr(of._compiled_call_impl, "functions", ()))
    else:
        call = of.__func__ if isinstance(of, types.MethodType) else of
        found = [one for one in list(live) if one.call is call]
    if not found and not isinstance(of, CompiledModule):
        raise TypeError(
            f"report() takes what fusee.compile gave, a compiled graph or a name, not"
            f" {type(of).__name__}; the graphs of a function under torch.compile are found by its"
            ' option "name"'
        )
    graphs: dict[CompiledGraph, None] = {}
    while found:
        one = found.pop(0)
        found += one.callees
        for entry in one.entries:
            graphs.update(dict.fromkeys(graphs_of(entry.compiled)))
    return [graph.report() for graph in graphs]
