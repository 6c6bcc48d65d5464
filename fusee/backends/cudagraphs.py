"""The backend "cudagraphs": regions of CUDA tensors as CUDA graphs of eager's own kernels.

A graph is recorded once per sizes and per place of the parameters, and replayed by one call to the
driver, which saves what eager spends on launching kernels. It works on memory of its own: inputs
are copied in, results are copied out, so that no later call changes what an earlier one returned.
Parameters and buffers are read where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.graph import executable_anywhere
from fusee.aten.operators import WHOLE
from fusee.aten.torch_api import OpOverload, is_composite
from fusee.backends.regions import Region, RegionCall
from fusee.backends.registry import check_names, label, operators
from fusee.backends.report import CompiledGraph
from fusee.backends.split_run import compile_with
from fusee.config import Options

__all__ = ["CudaGraphs", "check", "compile_cudagraphs"]

# Recordings of one region that are kept; the one unused for longest makes room.
_MOST_GRAPHS = 16
# Libraries get their workspaces and choose kernels in the first runs, which cannot be recorded.
_WARM_UPS = 2


def check(given: Mapping[str, object]) -> frozenset[OpOverload]:
    """The operators of the option `disabled_ops`. raises OptionError"""
    check_names("an option", given, ("disabled_ops", "name"))
    label(given)
    return operators("disabled_ops", given.get("disabled_ops", ()))


def compile_cudagraphs(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, object]
) -> CompiledGraph:
    """Compile a captured graph; what is not on CUDA runs through our own compiler.

    raises   OptionError; MissingFake for an operator that doesn't say what it returns
    """
    engine = CudaGraphs(check(options))
    return compile_with(engine, gm, example_inputs, Options(name=label(options)))


class CudaGraphs:
    """The engine of one compiled function."""

    name = "cudagraphs"
    device = "CUDA"

    def __init__(self, disabled: frozenset[OpOverload] = frozenset()) -> None:
        self.disabled = disabled

    def keeps(self, op: OpOverload) -> bool:
        return op in WHOLE or not is_composite(op)

    def claim(self, node: fx.Node) -> str | None:
        if node.target in self.disabled:
            return "the option disabled_ops names it"
        for other in (node, *node.all_input_nodes):
            device = torch.device(other.meta.get("device") or "cpu")
            if device.type != "cuda":
                return f"{other} is on {device}"
        return None

    def compile(self, region: Region) -> RegionCall:
        return _Replayed(region)


class _Replayed:
    """A region as it is called: recorded when sizes are new, replayed when they are not."""

    def __init__(self, region: Region) -> None:
        devices = {torch.device(node.meta["device"]) for node in region.calls()}
        if len(devices) != 1:
            raise ValueError(f"a CUDA graph is of one device, not of {sorted(map(str, devices))}")
        (self.device,) = devices
        specs = region.graph.inputs
        self.given = [s.index for s in specs if s.dtype is not None and not s.is_static]
        self.static = [s.index for s in specs if s.dtype is not None and s.is_static]
        self.numbers = [s.index for s in specs if s.dtype is None]
        self.body = executable_anywhere(region.graph)
        self.lock = threading.Lock()
        self.graphs: dict[Any, _Recording] = {}
        self.pool: Any = None
        self.busy: torch.cuda.Event | None = None

    def __call__(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        key = (
            tuple([inputs[k].shape for k in self.given]),
            tuple([inputs[k].data_ptr() for k in self.static]),
            tuple([inputs[k] for k in self.numbers]),
        )
        with self.lock, torch.cuda.device(self.device), torch.no_grad():
            stream = torch.cuda.current_stream()
            if self.busy is not None:
                stream.wait_event(self.busy)  # another stream may still read the results
            found = self.graphs.pop(key, None) or self._record(inputs)
            self.graphs[key] = found
            results = found.replay([inputs[k] for k in self.given])
            self.busy = stream.record_event(self.busy)
            return results

    def _record(self, inputs: tuple[Any, ...]) -> _Recording:
        if len(self.graphs) >= _MOST_GRAPHS:
            torch.cuda.synchronize()
            del self.graphs[next(iter(self.graphs))]
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        mine = list(inputs)
        for k in self.given:
            mine[k] = torch.empty_like(inputs[k]).copy_(inputs[k])
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self.body(*mine)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side):
            results = self.body(*mine)
        return _Recording(graph, [mine[k] for k in self.given], results)


class _Recording:
    """A recorded graph and the memory that it works on."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        self.graph, self.inputs, self.results = graph, inputs, results

    def replay(self, given: Sequence[Tensor]) -> list[Tensor]:
        for mine, x in zip(self.inputs, given, strict=True):
            mine.copy_(x)
        self.graph.replay()
        return [x.clone() for x in self.results]
