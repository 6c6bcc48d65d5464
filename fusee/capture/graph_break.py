"""What ends a piece of a program that is captured as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusee.capture.torch_api import State
from fusee.errors import FuseeError, RegionError

# ---------------------------------------------------------------------------- breaks


class GraphBreak(BaseException):
    """Here the graph must end: no `except` of the program that is traced may catch it.

    reason   one sentence: what could not become part of the graph, and why
    remedy   what the user can do about it
    where    the user's line, `file.py:41 in step`, once it is known
    raises   whether Python is to raise an error of the program's there
    is_error what error_on_graph_break said there; None if nothing was said
    """

    def __init__(
        self, reason: str, remedy: str = "", where: str = "", *, raises: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.where = where
        self.raises = raises
        self.is_error: bool | None = None


class Forbidden(GraphBreak):
    """What a compiled function must not do at all: an error, not the end of a graph."""

    kind: Callable[..., FuseeError] = RegionError


class Unready(BaseException):
    """Python runs this call as a whole: what it does, the next one will not do again."""


class Anew(BaseException):
    """The capture begins anew, and knows better.

    how   "unchecked": a graph that checks what branches rely on changes its inputs, so it can't run
          again; "parted": one that changes its inputs may raise where the program handles it
    """

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Opaque:
    """Stands for a value from outside of a kind that no graph takes, until something needs it."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy

    def met(self) -> GraphBreak:
        return GraphBreak(self.reason, self.remedy)


# ---------------------------------------------------------------------------- failures
# Errors that a graph raises while it runs: an index out of range, say.
#
# The graph comes before all that its piece does in Python, so as long as it has changed nothing the
# piece can run again, by Python. There the error comes from the user's own line, reaches the
# handlers of the program, and finds done what the program does before it.


class GraphFailed(BaseException):
    """A graph raised as the program would, and everything is as it was before."""


class Runs(Protocol):
    def forward(self, *inputs: Any) -> Any: ...


States = Sequence[tuple[torch.Generator, torch.Tensor]]


def generator_states(is_on_gpu: bool) -> Callable[[], States]:
    """What notes how the random generators stand that a graph may use."""
    return _cuda_states if is_on_gpu else _cpu_state


def _cpu_state() -> States:
    return [(torch.default_generator, torch.default_generator.get_state())]


def _cuda_states() -> States:
    return [*_cpu_state(), *((one, one.get_state()) for one in torch.cuda.default_generators)]


@dataclass(frozen=True, eq=False)
class Failing:
    """What takes an error of a graph. It raises GraphFailed once all is as before the graph.

    eagerly   the graph, which torch can run; where it does not raise, the error is the backend's
              own. None for what follows the graph
    state     that of torch when the piece begins
    changes   whether the graph changes its inputs: then its own error is raised, with a note
    """

    eagerly: Runs | None
    state: State
    changes: bool

    def __call__(
        self, error: Exception, inputs: Sequence[Any] = (), generators: States = ()
    ) -> None:
        self._restore(generators)
        if isinstance(error, FuseeError):
            raise error
        if self.changes:
            error.add_note(
                "fusee: raised by a graph that changes its inputs. Handlers and effects of the"
                " compiled function around it were left out"
            )
            raise error
        if self.eagerly is None:
            raise GraphFailed from None
        try:
            self.eagerly.forward(*inputs)
        except Exception:  # noqa: BLE001  # whatever it is, Python will raise it
            raise GraphFailed from None
        finally:
            self._restore(generators)
        raise error

    def _restore(self, generators: States) -> None:
        for function, args, kwargs in State.now().switches(self.state):
            function(*args, **kwargs)
        for generator, before in generators:
            generator.set_state(before)
