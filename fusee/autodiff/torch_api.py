"""The private API of torch that ahead-of-time autograd stands on. Tested with torch 2.13.

Everything here exists from 2.11 to 2.15; the names used are
    torch._C._current_autograd_node   the node whose backward formula runs
    torch._C._autograd                numbers of the nodes that autograd makes, in order; whether
                                      the backward that runs frees what was saved
    torch.autograd.graph              the engine, without the checks that import sympy
    torch.utils._python_dispatch      the stack of dispatch modes
    torch._C.DisableTorchFunction     hides modes that see functions
    torch._fused_sdp_choice           which attention kernel eager takes
    ctx.maybe_clear_saved_tensors     frees what a Function saved, unless retain_graph keeps it
    torch._C._autograd._unsafe_set_version_counter  how often autograd saw tensors written to
    torch._C._has_storage             tensors that vmap has wrapped have none
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_flash: Any = torch.nn.attention.SDPBackend.FLASH_ATTENTION
_choose: Any = torch._fused_sdp_choice


def next_node_number() -> int:
    """The number that the next node of autograd gets. They grow in the order of the forward."""
    found: int = torch._C._autograd._get_sequence_nr()
    return found


def current_node_number() -> tuple[int | None, bool]:
    """The node whose backward runs: its number, and whether it is a torch.autograd.Function's.

    (None, False) outside of backward.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None, False
    return node._sequence_nr(), isinstance(node, torch.autograd.function.BackwardCFunction)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Any], tangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad with allow_unused; `inputs` may be gradient edges."""
    run: Any = torch.autograd.graph._engine_run_backward
    found: tuple[Tensor | None, ...] = run(
        tuple(outputs),
        tuple(tangents),
        False,  # keep_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def uses_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether eager's attention on the CPU is its flash kernel for tensors of these geometries."""
    with _disable_current_modes():  # else the tracer makes twins of what is to be on the CPU
        with torch.no_grad():
            given = [None if x is None else _on_cpu(x) for x in (q, k, v, mask)]
        choice = _choose(*given, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    return int(choice) == int(_flash)


def _on_cpu(x: Tensor) -> Tensor:
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return empty.requires_grad_(x.requires_grad)


def clear_saved(ctx: Any) -> None:
    """Let go of what `ctx` saved, unless this backward retains the graph."""
    ctx.maybe_clear_saved_tensors()


@contextlib.contextmanager
def as_if_not_written(tensors: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
    """Inside, these have the numbers of writes that stand beside them."""
    written = [(x, before, x._version) for x, before in tensors if x._version != before]
    count: Any = torch._C._autograd._unsafe_set_version_counter
    found, before, now = zip(*written) if written else ((), (), ())
    count(found, before)
    try:
        yield
    finally:
        count(found, now)


def has_saved_tensor_hooks() -> bool:
    """Whether torch.autograd.graph.saved_tensors_hooks is on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_storage(x: Tensor) -> bool:
    """Whether `x` has memory of its own or of its base: not so within vmap."""
    return torch._C._has_storage(x)


def keeps_graph() -> bool:
    """Whether the backward that runs was asked to retain the graph."""
    found: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return found


def without_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Inside, no mode sees the functions of torch that are called."""
    guard: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def modified() -> RuntimeError:
    """Autograd's error for a write to what the backward needs."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace"
        " operation"
    )
