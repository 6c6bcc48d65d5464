"""OpenVINO's extension module, imported without the Python package around it.

Whoever runs a model needs no more. The package itself imports all operator sets, a converter and
telemetry, for several times as long: it is left to whoever converts a model.

Tested with openvino 2026.4.1, whose extension is `openvino._pyopenvino` (since 2023.2). Where the
extension cannot be had like this, the package is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

__all__ = ["bindings"]

_PACKAGE = "openvino"
_EXTENSION = "openvino._pyopenvino"
_lock = threading.Lock()


@functools.cache
def bindings() -> Any:
    """The extension module. raises ImportError if there is none"""
    with _lock:
        found = None if _PACKAGE in sys.modules else _alone()
    return importlib.import_module(_EXTENSION) if found is None else found


def _alone() -> Any:
    if _EXTENSION in sys.modules:
        return sys.modules[_EXTENSION]
    package = importlib.util.find_spec(_PACKAGE)
    if os.name == "nt" or package is None or package.submodule_search_locations is None:
        return None  # on Windows the package says where its libraries are
    spec = PathFinder.find_spec(_EXTENSION, list(package.submodule_search_locations))
    if spec is None or spec.loader is None or _load is None:
        return None
    sys.meta_path.insert(0, _Attach())
    try:
        return _load(spec)
    except ImportError:
        return None


# As an import does, with the lock of that name: another thread may import the package meanwhile.
# Not public: tested with Python 3.11 to 3.13; where it is gone, the package is imported.
_load: Callable[[ModuleSpec], Any] | None
_load = getattr(importlib.import_module("importlib._bootstrap"), "_load", None)


class _Attach:
    """Makes the extension an attribute of its package once that is imported, as Python does.

    It stays: whoever takes a finder out while others look through the list makes them miss one.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing. The package's own imports come here while it is made."""
        package, extension = sys.modules.get(_PACKAGE), sys.modules.get(_EXTENSION)
        if package is not None and extension is not None:
            vars(package).setdefault("_pyopenvino", extension)
