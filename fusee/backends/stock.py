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
        if any(isinstance(x, list) for x in example_inputs) or _is_autograds(gm):
            what = "compiled autograd's graphs run eagerly: they write to .grad and give it away"
            warn(FuseeWarning, what, did="nothing was compiled")
            return _unheard(gm.forward)
        _open_regions(gm)
        if all(why_not_dense(x) is None for x in example_inputs if isinstance(x, Tensor)):
            gm.meta[REFUSES] = True
        if not _open_data(gm):
            with contextlib.suppress(TraceError), signals_held():
                return _unheard(found(gm, example_inputs))
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


def _open_regions(gm: fx.GraphModule) -> None:
    """Call nested_compile_region's regions as modules: eager has no gradient of its operator."""
    for inner in [x for x in gm.modules() if isinstance(x, fx.GraphModule)]:
        if "invoke_subgraph(" in inner.code:
            for x in inner.graph.nodes:
                if getattr(x.target, "_name", "") == "invoke_subgraph":
                    x.op, x.target, x.args = "call_module", x.args[0].target, x.args[2:]
            inner.recompile()


def _is_autograds(gm: fx.GraphModule) -> bool:
    """Whether it has a backward's calls, which compiled autograd gave TorchDynamo."""
    modules = {getattr(node.target, "__module__", "") for node in gm.graph.nodes}
    calls = {getattr(node.target, "__name__", "") for node in gm.graph.nodes}
    return "torch._dynamo.compiled_autograd.ops" in modules or "call_accumulate_grad" in calls


compile_fx = _named("fusee", "compile_fx")
compile_openvino = _named("openvino", "compile_openvino")
compile_openvino_ts = _named("openvino_ts", "compile_openvino_ts")
compile_onnxrt = _named("onnxrt", "compile_onnxrt")


def _open_data(gm: fx.GraphModule) -> bool:
    """Write `p.data = other`, which TorchDynamo does by set_, as the program had it.

    Returns whether there is any: to our capture alone it is no write to p.
    """
    found = [x for x in gm.graph.nodes if x.target is torch.Tensor.set_]
    found = [x for x in found if [getattr(y.target, "__name__", "") for y in x.users] == _LOWERED]
    for node in found:
        (lowered,) = node.users
        gm.graph.erase_node(lowered)
        node.target, node.args = setattr, (node.args[0], "data", node.args[1])
    for node in [x for x in gm.graph.nodes if found and x.target is data_of]:
        node.target, node.args = getattr, (*node.args, "data")
    return bool(found)


_LOWERED = ["_lower_version_count_by_1"]
