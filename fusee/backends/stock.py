"""The entry points of stock torch.compile: torch.compile(m, backend="fusee", options={...}).

Modes are torch.compile's (registry.MODES).

torch._C   the switch of gradients, as TorchDynamo calls it; how many function modes there are
torch.overrides._pop_mode_temporarily   leaves the innermost of them
source     docs "Custom Backends" of PyTorch: the group torch_dynamo_backends
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusee.aten.torch_api import data_of, why_not_dense
from fusee.backends.registry import check_mode, later, lookup
from fusee.backends.report import REFUSES
from fusee.errors import FuseeWarning, TraceError, warn
from fusee.runtime import signals_held

_capture = later("fusee.api", "compile")
_without_last_mode: Any = torch.overrides._pop_mode_temporarily
_AUTOGRADS = "torch._dynamo.compiled_autograd.ops"
_LOWERED = ["_lower_version_count_by_1"]


def _named(name: str, variable: str) -> Callable[..., Callable[..., Any]]:
    """A backend of ours for stock torch, which gives each use its own options.

    variable   where it stands below: pickles of compiled modules name it by that
    """

    def compile_named(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, object] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        check_mode(mode)
        found = lookup(name, options, mode)
        targets = [node.target for node in gm.graph.nodes]
        # a backward's calls, which compiled autograd gave TorchDynamo
        is_autograds = any(isinstance(x, list) for x in example_inputs)
        is_autograds |= "call_accumulate_grad" in (getattr(x, "__name__", "") for x in targets)
        if is_autograds or _AUTOGRADS in (getattr(x, "__module__", "") for x in targets):
            what = "compiled autograd's graphs run eagerly: they write to .grad and give it away"
            warn(FuseeWarning, what, did="nothing was compiled")
            return _unheard(gm.forward)
        for inner in [x for x in gm.modules() if isinstance(x, fx.GraphModule)]:
            if "invoke_subgraph(" in inner.code:  # nested_compile_region's
                for x in inner.graph.nodes:
                    if getattr(x.target, "_name", "") == "invoke_subgraph":
                        # as modules: eager has no gradient of that operator
                        x.op, x.target, x.args = "call_module", x.args[0].target, x.args[2:]
                inner.recompile()
        if all(why_not_dense(x) is None for x in example_inputs if isinstance(x, Tensor)):
            gm.meta[REFUSES] = True
        sets = [x for x in gm.graph.nodes if x.target is torch.Tensor.set_]
        sets = [x for x in sets if [getattr(y.target, "__name__", "") for y in x.users] == _LOWERED]
        if not sets:
            with contextlib.suppress(TraceError), signals_held():
                return _unheard(found(gm, example_inputs))
        # `p.data = other` as the program had it: to our capture alone it is no write to p
        for x in list(gm.graph.nodes) if sets else ():
            if x in sets:
                (lowered,) = x.users
                gm.graph.erase_node(lowered)
                x.target, x.args = setattr, (x.args[0], "data", x.args[1])
            elif x.target is data_of:
                x.target, x.args = getattr, (*x.args, "data")
        gm.recompile()
        gm.code  # noqa: B018  # which compiles what `forward` is
        return _unheard(_capture(gm.forward, backend=name, options=options, mode=mode))

    compile_named.__name__ = f"fusee_{name}"
    compile_named.__qualname__ = variable
    return compile_named


def _unheard(made: Callable[..., Any]) -> Callable[..., Any]:
    """`made`, unheard by function modes: TorchDynamo has written into the graph what they do."""
    if not getattr(made, "is_captured", True):
        return made

    def run(*inputs: Any) -> Any:
        with contextlib.ExitStack() as left:
            for _ in range(torch._C._len_torch_function_stack()):
                left.enter_context(_without_last_mode())
            return made(*inputs)

    return run


compile_fx = _named("fusee", "compile_fx")
compile_openvino = _named("openvino", "compile_openvino")
compile_openvino_ts = _named("openvino_ts", "compile_openvino_ts")
compile_onnxrt = _named("onnxrt", "compile_onnxrt")
