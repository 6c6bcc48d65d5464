"""Options of TorchInductor's, given where our compiler compiles: what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusee.backends import dynamo
from fusee.config import Options, knobs
from fusee.errors import FuseeWarning, warn

__all__ = ["without"]

_OWN = {"fallback", "guard_filter_fn", *(row.name for row in knobs(Options))}

# What has a counterpart, and which.
_HERE = {
    "compile_threads": "nothing compiles in other processes",
    "coordinate_descent_tuning": "nothing is tuned",
    "cpp.simdlen": 'options={"vector_bits": ...}',
    "cpp.threads": 'options={"threads": ...}',
    "debug": "FUSEE_DUMP=folder",
    "emulate_precision_casts": "always so",
    "fallback_random": "always so: random numbers are eager's",
    "force_disable_caches": 'options={"cache": False}',
    "freezing": 'options={"derive_weights": True}, the default',
    "fx_graph_cache": 'options={"cache": True}, the default',
    "max_autotune": "nothing is tuned",
    "max_autotune_gemm": "matrix products are ATen's",
    "max_autotune_pointwise": "nothing is tuned",
    "trace.enabled": "FUSEE_DUMP=folder",
    "triton.cudagraphs": 'backend="cudagraphs"',
}
_said: set[str] = set()


def without(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without TorchInductor's, of which the user is told once. Others stay."""
    plain = {name: name.replace("-", "_") for name in options if name not in _OWN}
    known = set(_HERE)
    if not known.issuperset(plain.values()):
        known.update(dynamo.inductor_names())  # which takes a second to import
    theirs = [name for name in plain if plain[name] in known]
    if new := [plain[name] for name in theirs if plain[name] not in _said]:
        _said.update(new)
        listed = "; ".join(f"{name} (here: {_HERE.get(name, 'without effect')})" for name in new)
        warn(
            FuseeWarning,
            f"options of TorchInductor: {listed}",
            did="went on without them",
            remedy='docs/options.md has ours; backend="inductor" takes TorchInductor\'s',
        )
    return {name: value for name, value in options.items() if name not in theirs}
