"""The backend "tvm": regions imported into Apache TVM's Relax, compiled by it for the CPU.

TVM's importer reads a torch.export.ExportedProgram, which is made here around the region's graph:
nothing is captured or decomposed once more. Parameters are inputs, in torch's own memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from fusee.aten import is_view
from fusee.aten.rewriter import explicit
from fusee.aten.torch_api import OpOverload
from fusee.backends.regions import CompiledRegion, Engine, Pool, Region
from fusee.backends.registry import EngineOptions
from fusee.config import knob
from fusee.loops.operators import claimed
from fusee.source import leaves, overloads

aten = torch.ops.aten
_import: Callable[[str], Any] = importlib.import_module

# What tests/backends/test_tvm.py compares with eager.
_OPERATORS = frozenset(claimed("tvm")).union(
    overloads(
        "convolution _native_batch_norm_legit_no_training native_layer_norm linear addmm mm bmm "
        "max_pool2d_with_indices _adaptive_avg_pool2d avg_pool2d mean.dim sum.dim_IntList "
        "bitwise_and.Tensor pow.Tensor_Scalar _softmax embedding where.self cat stack clone "
        "_to_copy eq.Scalar le.Tensor lt.Tensor lt.Scalar gt.Scalar ge.Scalar logical_and "
        "logical_or scaled_dot_product_attention"
    )
)


@dataclass(frozen=True)
class TvmOptions(EngineOptions):
    """Options of one compiled function: fusee.compile(m, backend="tvm", options={...})."""

    scheduler: str | None = knob(
        None,
        "TVM's own schedules, or tuned ones, which takes minutes; 'auto_scheduler' went with Relay",
        choices=(None, "default", "meta_schedule"),
    )
    trials: int = knob(20000, "how many schedules 'meta_schedule' tries", least=1)
    opt_level: int = knob(3, "TVM's", least=0, most=4)


class Tvm(Engine):
    """The engine of one compiled function."""

    name = "tvm"
    options: TvmOptions

    def __init__(self, options: TvmOptions) -> None:
        super().__init__(options)
        importer = _import("tvm.relax.frontend.torch.exported_program_translator")
        self.known = frozenset(importer.ExportedProgramImporter().convert_map)

    def keeps(self, op: OpOverload) -> bool:
        return op in _OPERATORS and op.__name__ in self.known

    def claim(self, node: fx.Node) -> str | None:
        op = node.target
        assert isinstance(op, OpOverload)
        if op.__name__ not in self.known:
            return "TVM's importer does not know it"
        if op not in _OPERATORS and not (is_view(op) and op is not aten.as_strided.default):
            return "TVM's results of it were not compared with eager's"
        for other in (node, *node.all_input_nodes):
            vals = other.meta["val"]
            for val in leaves(vals):
                if not isinstance(val, Tensor):
                    continue
                if val.dtype not in _DTYPES:
                    return f"{str(val.dtype).removeprefix('torch.')} was not compared with eager's"
                if not all(isinstance(size, int) for size in val.shape):
                    return "its sizes are open, and regions are compiled for one size"
        return None

    def compile(self, region: Region) -> CompiledRegion:
        return CompiledRegion(_Compiled(region, self.options))


_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


class _Compiled:
    """A region as it is called. A virtual machine is of one thread at a time."""

    def __init__(self, region: Region, options: TvmOptions) -> None:
        graph = region.graph
        tvm, relax = _import("tvm"), _import("tvm.relax")
        # as torch.export would give it, all inputs the user's
        apart = explicit(graph)
        inputs = [
            InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), str(node.target))
            for node in apart.find_nodes(op="placeholder")
        ]
        (output,) = apart.find_nodes(op="output")
        results: Any = output.args[0]
        outputs = [
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results
        ]
        program = ExportedProgram(
            fx.GraphModule({}, apart),
            apart,
            ExportGraphSignature(inputs, outputs),
            {},
            {},
            [ModuleCallEntry("", None)],
            constants={},
        )
        importer = _import("tvm.relax.frontend.torch")
        module = importer.from_exported_program(program, run_ep_decomposition=False)
        target = tvm.target.Target("llvm")
        with tvm.transform.PassContext(opt_level=options.opt_level):
            if options.scheduler == "meta_schedule":
                tune = relax.get_pipeline(
                    "static_shape_tuning", total_trials=options.trials, target=target
                )
                with target:
                    module = tune(module)
            built = tvm.compile(module, target=target)
        machines: Pool[Any] = Pool(lambda: relax.VirtualMachine(built, tvm.cpu())["main"])
        machines.give(machines.make())  # what fails does so before the first call
        self.machines = machines
        self.given = tvm.runtime.from_dlpack
        self.constants = [self.given(x.contiguous()) for x in graph.constants.values()]

    def __call__(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        main = self.machines.take()
        given = [self.given(x.detach().contiguous()) for x in inputs]
        results = main(*self.constants, *given)
        self.machines.give(main)
        return [torch.utils.dlpack.from_dlpack(x) for x in results]
