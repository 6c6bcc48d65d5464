"""Fusee compiles PyTorch programs: what torch.compile is, written anew, with no wait."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusee import errors
from fusee import log as log  # a misspelt FUSEE_* variable must not wait for the first compile
from fusee.runtime import gc_paused

if TYPE_CHECKING:
    from fusee import backends, compiler
    from fusee.api import compile, report
    from fusee.debug import explain, export
    from fusee.installed import install, uninstall

__version__ = "0.1.0.dev0"

__all__ = [
    "backends",
    "compile",
    "compiler",
    "errors",
    "explain",
    "export",
    "install",
    "report",
    "uninstall",
]

# Imported when first used, so that `import fusee` takes no time.
_LAZY = {
    "backends": "fusee.backends",
    "compile": "fusee.api",
    "compiler": "fusee.compiler",
    "explain": "fusee.debug",
    "export": "fusee.debug",
    "install": "fusee.installed",
    "report": "fusee.api",
    "uninstall": "fusee.installed",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fusee' has no attribute {name!r}")
    with gc_paused():
        module = importlib.import_module(_LAZY[name])
    value = module if module.__name__ == f"fusee.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
