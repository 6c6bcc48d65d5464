"""The functions that users call. They hold no algorithm: they join capture to backends."""

from __future__ import annotations

from fusee.backends.native import CompiledGraph
from fusee.backends.report import Report, live_reports

__all__ = ["report"]


def report(of: str | CompiledGraph | None = None) -> list[Report]:
    """What compiled graphs are made of: kernels, calls to ATen, what was left out, time per stage.

    of   a compiled graph; or the option `name` of a compiled function, which may have several
         graphs; None: all graphs that are alive, oldest first

    To read one, print it:

        fast = torch.compile(model, backend="fusee", options={"name": "model"})
        fast(x)
        print(*fusee.report("model"))
    """
    if isinstance(of, CompiledGraph):
        return [of.report()]
    if of is None or isinstance(of, str):
        return [one for one in live_reports() if of is None or one.name == of]
    raise TypeError(
        f"report() takes a compiled graph or a name, not {type(of).__name__}; the graphs of a"
        ' function under torch.compile are found by its option "name"'
    )
