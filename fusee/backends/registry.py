"""The table of backends: register, look up, list.

A backend is named by one of our own names, by a name that stock torch.compile knows ("inductor",
any entry point of the group `torch_dynamo_backends`), or is itself a function
`(gm, example_inputs) -> callable`. Ours take their options as a third argument, validated by the
backend before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import entry_points
from typing import Any, Union

import torch
from torch import fx

from fusee.aten.torch_api import OpOverload, OpOverloadPacket, overloads
from fusee.backends import dynamo
from fusee.config import Options, knobs, settings
from fusee.errors import MissingDevice, MissingPackage, OptionError, UnknownBackend, nearest
from fusee.runtime import collector

# ---------------------------------------------------------------------------- registry


CompiledFn = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[Any], Mapping[str, object]], CompiledFn]
ENTRY_POINTS = "torch_dynamo_backends"
# torch.compile's. Each backend makes of them what it can; ours have none.
MODES = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Backend:
    """One backend.

    needs     modules of other packages that it imports
    paired    whether their version must be torch's, as 2.14.1 for torch 2.14.0
    install   how to get them, and where they work; None: by the modules' names
    absent    says which device is missing, or None if all is there
    validate  refuses wrong options, before anything is compiled
    is_named  whether it takes the option `name`, what reports call it
    keeps     whether, with these options, what is captured for it outlives the process
    begin     called when a capture begins, so that files are read meanwhile
    resume    the compiled graph from what another process kept of it, beside the capture, or None:
              `(sidecar, example_inputs, anew, options)`; anew compiles the graph for given inputs
    """

    name: str
    compile: Compile
    help: str
    needs: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    validate: Callable[[Mapping[str, object]], object] | None = None
    paired: bool = False
    install: str | None = None
    absent: Callable[[], str | None] | None = None
    is_named: bool = False
    keeps: Callable[[Mapping[str, object]], bool] | None = None
    begin: Callable[[Mapping[str, object]], object] | None = None
    resume: Callable[..., CompiledFn | None] | None = None

    def missing(self) -> tuple[str, ...]:
        """The packages it needs that can't be found."""
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if self.paired:
            ours = _minor(torch.__version__)
            others = [name for name in self.needs if name not in lacking]
            lacking += [
                f"{name} {ours}" for name in others if _minor(metadata.version(name)) != ours
            ]
        return tuple(lacking)

    def state(self) -> str:
        """Whether it can be used here: "ready", "missing package: ...", "missing device: ..."."""
        missing = self.missing()
        if missing:
            return f"missing package: {', '.join(missing)}"
        device = self.absent() if self.absent is not None else None
        return "ready" if device is None else f"missing device: {device}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


class Listed(str):
    """The name of a backend, with what one wants to know of it. Prints with its state.

    state   "ready", "missing package: ...", "missing device: ..."; "" if it is not ours to know
    help    one line on what it does
    """

    state: str
    help: str

    def __new__(cls, name: str, state: str = "", help: str = "") -> Listed:
        made = super().__new__(cls, name)
        made.state, made.help = state, help
        return made

    def __repr__(self) -> str:
        return f"{str(self)!r} ({self.state})" if self.state else repr(str(self))


_backends: dict[str, Backend] = {}

BackendLike = Union[str, Callable[..., Any], Backend]


def register(backend: Backend) -> Backend:
    """Make a backend known by its name.

    raises   ValueError if another backend has that name
    """
    if _backends.get(backend.name, backend) is not backend:
        raise ValueError(f"a backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend
    return backend


def later(module: str, function: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called.

    So nobody waits for the import of what is not used.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        with collector.paused():
            found = getattr(importlib.import_module(module), function)
        return found(*args, **keywords)

    return call


def list_backends(
    exclude_tags: Sequence[str] | None = ("debug", "experimental"),
) -> list[Listed]:
    """Names that `lookup` knows: ours with their state, those of all entry points, and "inductor".

    No package is imported to find out the state. What was registered with TorchDynamo is listed
    once torch._dynamo is imported, and can be looked up at any time.

    source   torch.compiler.list_backends
    """
    excluded = set(exclude_tags or ())
    others = *entry_points(group=ENTRY_POINTS).names, *dynamo.registered(excluded), "inductor"
    found = {name: Listed(name) for name in others}
    for b in _backends.values():
        if not excluded.intersection(b.tags):
            found[b.name] = Listed(b.name, b.state(), b.help)
    return [found[name] for name in sorted(found)]


_default: list[BackendLike] = ["fusee"]


def default_backend() -> BackendLike:
    """What compiles if no backend is named."""
    return _default[0]


def set_default_backend(backend: BackendLike | None) -> None:
    """Name what compiles if no backend is named; None: "fusee" again.

    raises   UnknownBackend
    """
    if backend is not None:
        lookup(backend)
    _default[0] = "fusee" if backend is None else backend


def check_mode(mode: str | None) -> None:
    """Refuse what is no mode of torch.compile's. raises OptionError"""
    if mode is not None and mode not in MODES:
        close = nearest(str(mode), MODES)
        raise OptionError(
            f"there is no mode {mode!r}",
            did="stopped before compiling",
            remedy=(f"{close!r}; " if close else "") + f"modes: {', '.join(MODES)}",
        )


def name_of(backend: BackendLike) -> str:
    """How messages call a backend."""
    if isinstance(backend, Backend):
        return backend.name
    return backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend))


def known_options(backend: BackendLike) -> tuple[str, ...]:
    """Options of a backend of ours that compile() must know of: all of "fusee", or `name`."""
    found = _backends.get(backend) if isinstance(backend, str) else backend
    if not isinstance(found, Backend) or not found.is_named:
        return ()
    return tuple(row.name for row in knobs(Options)) if found.name == "fusee" else ("name",)


def keeps_captures(backend: BackendLike, options: Mapping[str, object]) -> bool:
    """Whether another process shall find what is captured for a backend."""
    found = _backends.get(backend) if isinstance(backend, str) else backend
    asked = isinstance(found, Backend) and found.keeps is not None and found.keeps(options)
    return asked or settings().keep_captures


@collector.paused()
def lookup(
    backend: BackendLike,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> CompiledFn:
    """The function `(gm, example_inputs) -> callable` for a backend, its options bound.

    mode     torch's names; ours have no modes and leave it unread

    raises   UnknownBackend, naming the nearest name and all; MissingPackage; MissingDevice;
             OptionError
    source   torch/_dynamo/backends/registry.py
    """
    given = dict(options or {})
    if isinstance(backend, str):
        if backend in _backends:
            return _bind(_backends[backend], given)
        if backend == "inductor" and (given or mode is not None):
            return dynamo.inductor(given, mode)
        return _bind_options(_foreign(backend), backend, given, mode)
    if isinstance(backend, Backend):
        return _bind(backend, given)
    if callable(backend):
        return _bind_options(backend, name_of(backend), given, mode)
    raise UnknownBackend(
        f"a backend is a name or a function (gm, example_inputs), not {type(backend).__name__}",
        remedy=f"known names: {_known_names()}",
    )


def _bind(backend: Backend, options: dict[str, object]) -> CompiledFn:
    missing = backend.missing()
    if missing:
        raise MissingPackage(
            f"backend {backend.name!r} needs {', '.join(missing)}, which is not installed",
            did="stopped before compiling",
            remedy=backend.install or f"pip install {' '.join(missing)}",
        )
    device = backend.absent() if backend.absent is not None else None
    if device is not None:
        raise MissingDevice(
            f"backend {backend.name!r} needs {device}",
            did="stopped before compiling",
            remedy=backend.install,
        )
    if backend.validate is not None:
        backend.validate(options)
    elif options:
        raise OptionError(
            f"backend {backend.name!r} takes no options, but got {', '.join(sorted(options))}",
            did="stopped before compiling",
            remedy="leave options out",
        )

    def bound(gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> CompiledFn:
        with collector.paused():
            return backend.compile(gm, example_inputs, options)

    bound.__name__ = backend.name
    if backend.begin is not None:
        vars(bound)["begin"] = functools.partial(backend.begin, options)
    if backend.resume is not None:
        vars(bound)["resume"] = functools.partial(backend.resume, options=options)
    return bound


def _foreign(name: str) -> CompiledFn:
    """A backend of stock torch or of another package."""
    for point in entry_points(group=ENTRY_POINTS, name=name):
        loaded: CompiledFn = point.load()
        return loaded
    found = dynamo.lookup_backend(name)
    if found is None:
        close = nearest(name, {*list_backends(None), *dynamo.list_backends()})
        raise UnknownBackend(
            f"there is no backend named {name!r}",
            did="stopped before compiling",
            remedy=(f"{str(close)!r}; " if close else "") + f"known names: {_known_names()}",
        )
    return found


def _known_names() -> str:
    """What messages list: not those of torch that are for its own debugging and tests."""
    return ", ".join(sorted({*_backends, *list_backends()}))


def _bind_options(
    function: CompiledFn, name: str, options: dict[str, object], mode: str | None
) -> CompiledFn:
    """Stock backends take options and mode as keywords, and only if there are any."""
    keywords: dict[str, object] = {}
    if options:
        keywords["options"] = options
    if mode not in (None, "default"):
        keywords["mode"] = mode
    if not keywords:
        return function

    def bound(gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> CompiledFn:
        compiled: CompiledFn = function(gm, example_inputs, **keywords)
        return compiled

    bound.__name__ = name
    return bound


# ---------------------------------------------------------------------------- ours
# The backends of this package.


def anything(options: Mapping[str, object]) -> None:
    """The check of a backend that checks its options itself."""


def no_cuda() -> str | None:
    """What is missing to run on an NVIDIA GPU, or None."""
    return None if torch.cuda.is_available() else "an NVIDIA GPU, and a build of torch with CUDA"


register(
    Backend(
        "fusee",
        later("fusee.backends.native", "compile_native"),
        "our compiler: loops, LLVM, no C++ compiler",
        needs=("llvmlite",),
        validate=Options.parse,
        is_named=True,
    )
)
_onnxrt = register(
    Backend(
        "onnxrt",
        later("fusee.backends.onnx.engine", "compile_onnxrt"),
        "regions run by ONNX Runtime",
        needs=("onnxruntime", "onnxscript"),
        validate=later("fusee.backends.onnx.options", "check"),
        install="pip install 'fusee[onnx]', or onnxruntime and onnxscript; Linux, macOS, Windows",
        is_named=True,
    )
)
_openvino = register(
    Backend(
        "openvino",
        later("fusee.backends.openvino.engine", "compile_openvino"),
        "regions run by OpenVINO, on Intel's processors, GPUs and NPUs",
        needs=("openvino", "llvmlite"),
        validate=later("fusee.backends.openvino.options", "check"),
        install="pip install 'fusee[openvino]'; Linux, macOS, Windows",
        is_named=True,
        keeps=later("fusee.backends.openvino.options", "is_caching"),
        begin=later("fusee.backends.openvino.region", "begin"),
        resume=later("fusee.backends.openvino.region", "resume"),
    )
)
_openvino_ts = register(
    Backend(
        "openvino_ts",
        later("fusee.backends.openvino.engine", "compile_openvino_ts"),
        "OpenVINO by way of TorchScript, deprecated",
        needs=("openvino", "llvmlite"),
        validate=later("fusee.backends.openvino.options", "check_ts"),
        install="pip install 'fusee[openvino]'; Linux, macOS, Windows",
        is_named=True,
        keeps=later("fusee.backends.openvino.options", "is_caching"),
        begin=later("fusee.backends.openvino.region", "begin"),
        resume=later("fusee.backends.openvino.region", "resume_ts"),
    )
)
register(
    Backend(
        "cudagraphs",
        later("fusee.backends.cudagraphs", "compile_cudagraphs"),
        "eager's CUDA kernels, recorded and replayed",
        validate=later("fusee.backends.cudagraphs", "check"),
        install="a build of torch with CUDA, from pytorch.org; Linux and Windows, NVIDIA GPUs",
        absent=no_cuda,
        is_named=True,
    )
)
register(
    Backend(
        "tvm",
        later("fusee.backends.tvm", "compile_tvm"),
        "regions compiled by Apache TVM's Relax",
        needs=("tvm", "llvmlite"),
        validate=later("fusee.backends.tvm", "check"),
        install="pip install apache-tvm; Linux, macOS, Windows",
        is_named=True,
    )
)
register(
    Backend(
        "tensorrt",
        later("fusee.backends.dynamo", "compile_tensorrt"),
        "torch_tensorrt's own backend",
        needs=("torch_tensorrt",),
        paired=True,
        validate=anything,
        install="pip install torch_tensorrt, of torch's version; Linux and Windows, NVIDIA GPUs",
        absent=no_cuda,
    )
)
register(
    Backend(
        "ipex",
        later("fusee.backends.dynamo", "compile_ipex"),
        "the Intel extension's own backend",
        needs=("intel_extension_for_pytorch",),
        paired=True,
        install="the backends 'fusee' and 'openvino' on Intel's processors: the extension's last "
        "version, 2.8, works with torch 2.8 alone",
    )
)
register(
    Backend(
        "eager",
        later("fusee.backends.aot_autograd", "run_captured"),
        "the captured graph, run as it is",
        tags=("debug",),
    )
)
register(
    Backend(
        "aot_eager",
        later("fusee.backends.aot_autograd", "run_aten"),
        "the functional ATen graph on eager kernels",
        tags=("debug",),
    )
)
for _backend in (_onnxrt, _openvino, _openvino_ts):
    _help = f"{_backend.name}, by its name in stock torch.compile"
    register(dataclasses.replace(_backend, name=f"fusee_{_backend.name}", help=_help))


# ---------------------------------------------------------------------------- engine options
# Reading of options that several engines have. Each raises OptionError.


def check_names(what: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse a name that is not known."""
    for name in given:
        if name not in known:
            close = nearest(str(name), known)
            raise OptionError(
                f"{what} named {name!r} does not exist",
                did="stopped before compiling",
                remedy=(f"{close!r}; " if close else "") + f"known: {', '.join(known)}",
            )


def label(given: Mapping[str, object]) -> str:
    """The option `name`: what reports call a compiled function."""
    name = given.get("name", "")
    if not isinstance(name, str):
        raise wrong("name", name, "a text")
    return name


def operators(name: str, value: object, remedy: str | None = None) -> frozenset[OpOverload]:
    """Operators that an option names, of a packet all overloads."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        wanted = "a list of operators such as [torch.ops.aten.add.Tensor]"
        raise wrong(name, value, wanted, remedy)
    found: set[OpOverload] = set()
    for item in value:
        if isinstance(item, OpOverload):
            found.add(item)
        elif isinstance(item, OpOverloadPacket):
            found.update(overloads(item))
        else:
            raise wrong(name, item, "operators such as torch.ops.aten.add.Tensor", remedy)
    return frozenset(found)


def wrong(name: str, value: object, wanted: str, remedy: str | None = None) -> OptionError:
    """The error about a value that an option does not take."""
    return OptionError(
        f"option {name!r} takes {wanted}, not {value!r} ({type(value).__name__})",
        did="stopped before compiling",
        remedy=remedy,
    )
