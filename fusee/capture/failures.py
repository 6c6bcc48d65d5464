"""Errors that a graph raises while it runs: an index out of range, say.

The graph comes before all that its piece does in Python, so as long as it has changed nothing the
piece can run again, by Python. There the error comes from the user's own line, reaches the handlers
of the program, and finds done what the program does before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusee.capture.torch_api import State
from fusee.errors import FuseeError

__all__ = ["GraphFailed", "failing", "generator_states"]


class GraphFailed(BaseException):
    """A graph raised as the program would, and everything is as it was before."""


States = Sequence[tuple[torch.Generator, torch.Tensor]]


def generator_states(inputs: Sequence[torch.Tensor]) -> Callable[[], States]:
    """What notes how the random generators stand that a graph with these inputs may use."""
    generators = [torch.default_generator]
    with torch._C.DisableTorchFunction():
        is_on_gpu = any(x.is_cuda for x in inputs)
    if is_on_gpu:
        generators += torch.cuda.default_generators
    return lambda: [(generator, generator.get_state()) for generator in generators]


def failing(eagerly: Callable[..., Any] | None, state: State, changes: bool) -> Callable[..., None]:
    """What takes an error of a graph. It raises GraphFailed once all is as before the graph.

    eagerly   the graph, run by torch; where it does not raise, the error is the backend's own. None
              for what follows the graph
    state     that of torch when the piece begins
    changes   whether the graph changes its inputs: then its own error is raised, with a note
    """

    def restore(generators: States) -> None:
        for function, args in State.now().switches(state):
            function(*args)
        for generator, before in generators:
            generator.set_state(before)

    def failed(error: Exception, inputs: Sequence[Any] = (), generators: States = ()) -> None:
        restore(generators)
        if isinstance(error, FuseeError):
            raise error
        if changes:
            error.add_note(
                "fusee: raised by a graph that changes its inputs. Handlers and effects of the"
                " compiled function around it were left out"
            )
            raise error
        if eagerly is None:
            raise GraphFailed from None
        try:
            eagerly(*inputs)
        except Exception:  # noqa: BLE001  # whatever it is, Python will raise it
            raise GraphFailed from None
        finally:
            restore(generators)
        raise error

    return failed
