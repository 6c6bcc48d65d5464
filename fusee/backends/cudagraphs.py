"""The backend "cudagraphs": regions of CUDA tensors as CUDA graphs of eager's own kernels.

A graph is recorded once per sizes and per place of the parameters, and replayed by one call to the
driver, which saves what eager spends on launching kernels. It works on memory of its own: inputs
are copied in, results are copied out, so that no later call changes what an earlier one returned.
Parameters and buffers are read where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fusee.aten import WHOLE, executable_anywhere
from fusee.aten.torch_api import OpOverload, is_composite
from fusee.backends.regions import CompiledRegion, Engine, Region

# Recordings of one region that are kept; the one unused for longest makes room.
_MOST_GRAPHS = 16
# Libraries get their workspaces and choose kernels in the first runs, which cannot be recorded.
_WARM_UPS = 2


class CudaGraphs(Engine):
    """The engine of one compiled function; what is not on CUDA runs through our own compiler."""

    name = "cudagraphs"
    device = "CUDA"
    device_type = "cuda"
    runs_aten = True

    def keeps(self, op: OpOverload) -> bool:
        return op in WHOLE or not is_composite(op)

    def claim(self, node: fx.Node) -> str | None:
        return None

    def compile(self, region: Region) -> CompiledRegion:
        return CompiledRegion(_Replayed(region))


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


class _Recording(NamedTuple):
    """A recorded graph and the memory that it works on."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]

    def replay(self, given: Sequence[Tensor]) -> list[Tensor]:
        for mine, x in zip(self.inputs, given, strict=True):
            mine.copy_(x)
        self.graph.replay()
        return [x.clone() for x in self.results]
