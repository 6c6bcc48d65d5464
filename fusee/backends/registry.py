"""The table of backends: register, look up, list.

A backend is named by one of our own names, by a name that stock torch.compile knows ("inductor",
any entry point of the group `torch_dynamo_backends`), or is itself a function
`(gm, example_inputs) -> callable`. Ours take their options as a third argument, validated by the
backend before anything is compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.metadata import entry_points
from typing import Any, Union

import torch
from torch import Tensor, fx

from fusee.aten.torch_api import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    open_numbers,
    overloads,
    without_torch_functions,
)
from fusee.backends import dynamo
from fusee.config import Options, Table, knob, knobs, settings
from fusee.errors import (
    MissingDevice,
    MissingPackage,
    OptionError,
    UnknownBackend,
    choices,
    nearest,
)
from fusee.runtime import gc_paused
from fusee.runtime.cache import Sidecar, Unread

CompiledFn = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[Any], Any], CompiledFn]
ENTRY_POINTS = "torch_dynamo_backends"
# torch.compile's, and what they are to our compiler: it records CUDA graphs wherever that is safe,
# and waits for no tuning, so that one differs. Backends of others make of them what they can.
MODES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "lite": {},
    "reduce-overhead": {},
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {"graphs": False},
}


@dataclass(frozen=True)
class Backend:
    """One backend.

    needs     modules of other packages that it imports
    paired    whether their version must be torch's, as 2.14.1 for torch 2.14.0
    install   how to get them, and where they work; None: by the modules' names
    absent    says which device is missing, or None if all is there
    validate  refuses wrong options before anything is compiled; what it returns, unless that is
              None, are the options that all others get
    is_named  whether it takes the option `name`, what reports call it
    is_open   whether it takes graphs with open sizes, those too that only the data knows:
              placeholders for them, and each size as an expression over these; None: as
              TorchDynamo gives them, with SymInts and FakeTensors of a ShapeEnv of torch's
    has_backward whether it takes graphs with backward passes in them
    tells_writes whether an error of a graph shows if an input was written to before
    keeps     of how many nodes on, with these options, graphs outlive the process; None: none does
    begin     called with the options when a capture begins, for what threads can do meanwhile
    resume    the compiled graph from what another process kept of it, beside the capture, or None:
              `(options, sidecar, example_inputs, graph)`
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
    is_open: bool | None = None
    has_backward: bool = False
    tells_writes: bool = False
    keeps: Callable[[Any], int | None] | None = None
    begin: Callable[[Any], object] | None = None
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

    def checked(self, given: Mapping[str, object]) -> Any:
        """The options that a user gave, for a backend that can be used here.

        raises   MissingPackage, MissingDevice, OptionError
        """
        if missing := self.missing():
            raise MissingPackage(
                f"backend {self.name!r} needs {', '.join(missing)}, which is not installed",
                remedy=self.install or f"pip install {' '.join(missing)}",
            )
        if self.absent is not None and (device := self.absent()) is not None:
            raise MissingDevice(f"backend {self.name!r} needs {device}", remedy=self.install)
        if self.validate is None and given:
            raise OptionError(
                f"backend {self.name!r} takes no options, but got {', '.join(sorted(given))}",
                remedy="leave options out",
            )
        found = None if self.validate is None else self.validate(given)
        return given if found is None else found


class BoundBackend:
    """A backend of ours with its options: a GraphCompiler (fusee/runtime/cache.py)."""

    serves_copies = False

    def __init__(self, backend: Backend, given: Mapping[str, object]) -> None:
        self.backend, self.__name__ = backend, backend.name
        self.options = backend.checked(given)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        if _are_fake((*gm.parameters(), *gm.buffers())):
            return gm.forward
        if _are_fake(example_inputs):
            return self._once_real(gm)
        with gc_paused():
            return self.backend.compile(gm, example_inputs, self.options)

    def _once_real(self, gm: fx.GraphModule) -> CompiledFn:
        """Runs the graph itself for FakeTensors, which have no data; compiles it for others."""
        compiled: CompiledFn | None = None

        def call(*given: Any) -> Any:
            nonlocal compiled
            if _are_fake(given):
                return gm.forward(*given)
            compiled = compiled or self(gm, given)
            return compiled(*given)

        return call

    @property
    def keeps(self) -> int | None:
        """As `Backend.keeps`."""
        return None if self.backend.keeps is None else self.backend.keeps(self.options)

    def begin(self) -> None:
        """A capture begins."""
        if self.backend.begin is not None:
            self.backend.begin(self.options)

    def resume(self, sidecar: Sidecar, examples: Sequence[Any], graph: Unread) -> CompiledFn | None:
        """What another process kept beside a capture, as `Backend.resume`."""
        if self.backend.resume is None:
            return None
        return self.backend.resume(self.options, sidecar, examples, graph)


def _are_fake(inputs: Iterable[Any]) -> bool:
    return any(isinstance(x, FakeTensor) for x in inputs)


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
        with gc_paused(), without_torch_functions():  # an import calls torch
            found = operator.attrgetter(function)(importlib.import_module(module))
        return found(*args, **keywords)

    return call


def list_backends(exclude_tags: Sequence[str] | None = ("debug", "experimental")) -> list[Listed]:
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
    if mode is not None and not (isinstance(mode, str) and mode in MODES):
        raise OptionError(f"there is no mode {mode!r}", remedy=choices(mode, MODES, "modes"))


def backend_name(backend: BackendLike) -> str:
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


def sizes_of(backend: BackendLike) -> dict[str, Any]:
    """Which open sizes a backend takes, as Varying has it; functions say so by `takes_symbols`."""
    found: Any = _backends.get(backend) if isinstance(backend, str) else backend
    found = found.backend if isinstance(found, BoundBackend) else found
    is_open = found.is_open if isinstance(found, Backend) else getattr(found, "takes_symbols", None)
    return {
        "with_symbols": is_open is not False, "with_unbacked": is_open is True,
        "as_torch": is_open is None,
        "with_backward": isinstance(found, Backend) and found.has_backward,
        "tells_writes": isinstance(found, Backend) and found.tells_writes,
    }  # fmt: skip


def keeps_captures(found: CompiledFn) -> int | None:
    """`Backend.keeps` of what `lookup` gave, where no setting says otherwise."""
    if settings().keep_captures == "1":
        return 0
    return found.keeps if isinstance(found, BoundBackend) else None


@gc_paused()
def lookup(
    backend: BackendLike, options: Mapping[str, object] | None = None, mode: str | None = None
) -> CompiledFn:
    """The function `(gm, example_inputs) -> callable` for a backend, its options bound.

    mode     a row of MODES; what `options` say has the last word

    raises   UnknownBackend, naming the nearest name and all; MissingPackage; MissingDevice;
             OptionError
    source   torch/_dynamo/backends/registry.py
    """
    given = dict(options or {})
    if isinstance(backend, str):
        if backend in _backends:
            meant = MODES[mode] if mode is not None and backend == "fusee" else {}
            return BoundBackend(_backends[backend], {**meant, **given})
        if backend == "inductor" and (given or mode is not None):
            return dynamo.inductor(given, mode)
        for point in entry_points(group=ENTRY_POINTS, name=backend):
            return _bind_options(point.load(), backend, given, mode)
        if (found := dynamo.lookup_backend(backend)) is not None:
            return _bind_options(found, backend, given, mode)
        close = nearest(backend, {*list_backends(None), *dynamo.list_backends()})
        raise UnknownBackend(
            f"there is no backend named {backend!r}",
            remedy=(f"{str(close)!r}; " if close else "") + f"known names: {_known_names()}",
        )
    if isinstance(backend, Backend):
        return BoundBackend(backend, given)
    if callable(backend):
        return _bind_options(backend, backend_name(backend), given, mode)
    raise UnknownBackend(
        f"a backend is a name or a function (gm, example_inputs), not {type(backend).__name__}",
        remedy=f"known names: {_known_names()}",
    )


def for_capture(
    backend: BackendLike, options: Mapping[str, object] | None = None, mode: str | None = None
) -> CompiledFn:
    """As `lookup`, for graphs of our capture: with open sizes as the backend takes them."""
    found = lookup(backend, options, mode)
    if not sizes_of(backend)["as_torch"]:
        return found
    compile_as_torch = later("fusee.aten.symbolic_shapes", "compile_as_torch")

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledFn:
        is_read = any(node.target == "item" for node in gm.graph.nodes)
        if is_read or next(open_numbers(gm.graph.nodes), None) is not None:
            made: CompiledFn = compile_as_torch(found, backend_name(backend), gm, example_inputs)
        else:
            made = found(gm, example_inputs)
        return made

    return compile_graph


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

    def bound(gm: fx.GraphModule, example_inputs: Sequence[Tensor]) -> CompiledFn:
        compiled: CompiledFn = function(gm, example_inputs, **keywords)
        return compiled

    bound.__name__ = name
    return bound


# ---------------------------------------------------------------------------- engine options


def operators(help: str, more: Callable[[frozenset[OpOverload]], object] = frozenset) -> Any:
    """The row of an option that names operators; `more` is made of them."""

    def convert(value: Any) -> object:
        """Of a packet all overloads. raises ValueError"""
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise ValueError
        found: set[OpOverload] = set()
        for item in value:
            if not isinstance(item, (OpOverload, OpOverloadPacket)):
                raise ValueError
            found.update((item,) if isinstance(item, OpOverload) else overloads(item))
        return more(frozenset(found))

    takes = "a list of operators such as [torch.ops.aten.add.Tensor]"
    return knob(frozenset(), help, takes=takes, convert=convert)


@dataclass(frozen=True)
class EngineOptions(Table):
    """What all engines take; each adds rows of its own."""

    disabled_ops: frozenset[OpOverload] = operators("operators left to PyTorch and to our compiler")
    name: str = knob("", "what reports call the compiled function")


# ---------------------------------------------------------------------------- ours
# The backends of this package. Modules that others are imported from wait for the first use.


def no_cuda() -> str | None:
    """What is missing to run on an NVIDIA GPU, or None."""
    return None if torch.cuda.is_available() else "an NVIDIA GPU, and a build of torch with CUDA"


def _engine(names: Iterable[str], module: str, kind: str, help: str, **more: Any) -> None:
    """Register an engine, a class of a module that waits for the first use.

    names   of the backend; the later ones for who asks stock torch for it
    more    fields of Backend; `validate` gives the EngineOptions that the class is made with
    """
    make = later(module, kind)
    compile_with = later("fusee.backends.split_run", "compile_with")

    def compile(gm: fx.GraphModule, inputs: Sequence[Any], options: EngineOptions) -> CompiledFn:
        compiled: CompiledFn = compile_with(make(options), gm, inputs)
        return compiled

    more.setdefault("is_open", False)
    for name in names:
        by = ", by its name in stock torch.compile" if name.startswith("fusee_") else ""
        register(Backend(name, compile, help + by, is_named=True, **more))


# Nodes of a graph: fewer are captured and compiled in less time than would be noticed.
_LARGE = 50

register(
    Backend(
        "fusee",
        later("fusee.backends.native", "compile_native"),
        "our compiler: loops, LLVM, no C++ compiler",
        needs=("llvmlite",),
        validate=Options.parse,
        is_named=True,
        is_open=True,
        has_backward=True,
        tells_writes=True,
        keeps=lambda options: _LARGE if options.cache and settings().keep_captures != "0" else None,
        begin=later("fusee.backends.kept", "begin"),
        resume=later("fusee.backends.kept", "resume"),
    )
)
_engine(
    ("onnxrt", "fusee_onnxrt"),
    "fusee.backends.onnx",
    "OnnxRuntime",
    "regions run by ONNX Runtime",
    validate=later("fusee.backends.onnx", "OnnxOptions.parse"),
    needs=("onnxruntime", "onnxscript"),
    install="pip install 'fusee[onnx]', or onnxruntime and onnxscript; Linux, macOS, Windows",
    is_open=True,
)
for _name, _table, _help in (
    (
        "openvino",
        "OpenVINOOptions",
        "regions run by OpenVINO, on Intel's processors, GPUs and NPUs",
    ),
    ("openvino_ts", "TorchScriptOptions", "OpenVINO by way of TorchScript, deprecated"),
):
    _engine(
        (_name, f"fusee_{_name}"),
        "fusee.backends.openvino.engine",
        "OpenVINO",
        _help,
        validate=later("fusee.backends.openvino", f"{_table}.parse"),
        needs=("openvino", "llvmlite"),
        install="pip install 'fusee[openvino]'; Linux, macOS, Windows",
        keeps=lambda options: 0 if options.model_caching else None,
        begin=later("fusee.backends.openvino", "read_ahead"),
        resume=later("fusee.backends.openvino", "resume"),
        is_open=_name == "openvino",  # tracing for TorchScript fixes all sizes
    )
_engine(
    ("cudagraphs",),
    "fusee.backends.cudagraphs",
    "CudaGraphs",
    "eager's CUDA kernels, recorded and replayed",
    validate=EngineOptions.parse,
    install="a build of torch with CUDA, from pytorch.org; Linux and Windows, NVIDIA GPUs",
    absent=no_cuda,
    is_open=True,
)
_engine(
    ("tvm",),
    "fusee.backends.tvm",
    "Tvm",
    "regions compiled by Apache TVM's Relax",
    validate=later("fusee.backends.tvm", "TvmOptions.parse"),
    needs=("tvm", "llvmlite"),
    install="pip install apache-tvm; Linux, macOS, Windows",
)
register(
    Backend(
        "tensorrt",
        partial(dynamo.compile_registered, "torch_tensorrt", "torch_tensorrt"),
        "torch_tensorrt's own backend",
        needs=("torch_tensorrt",),
        paired=True,
        validate=dict,  # it checks its options itself
        install="pip install torch_tensorrt, of torch's version; Linux and Windows, NVIDIA GPUs",
        absent=no_cuda,
    )
)
register(
    Backend(
        "ipex",
        partial(dynamo.compile_registered, "intel_extension_for_pytorch", "ipex"),
        "the Intel extension's own backend",
        needs=("intel_extension_for_pytorch",),
        paired=True,
        install="the backends 'fusee' and 'openvino' on Intel's processors: the extension's last "
        "version, 2.8, works with torch 2.8 alone",
    )
)
for _name, _run, _help, _tells in (
    ("eager", "run_captured", "the captured graph, run as it is", True),
    ("aot_eager", "run_aten", "the functional ATen graph on eager kernels", False),
):
    register(
        Backend(
            _name,
            later("fusee.backends.aot_autograd", _run),
            _help,
            tags=("debug",),
            is_open=True,
            has_backward=True,
            tells_writes=_tells,
        )
    )
