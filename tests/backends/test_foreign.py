"""Backends of packages that cannot be installed here: what is said, and what they are given."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fusee
from fusee.backends import lookup, registry
from fusee.errors import BackendError, MissingDevice, MissingPackage


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes packages that can be imported, of a version, and may register with TorchDynamo."""
    find, version = importlib.util.find_spec, metadata.version
    made: dict[str, str] = {}

    def spec(name: str, package: str | None = None) -> Any:
        return object() if name in made else find(name, package)

    def make(name: str, of: str) -> None:
        made[name] = of
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    monkeypatch.setattr(metadata, "version", lambda name: made.get(name) or version(name))
    yield make


def states() -> dict[str, str]:
    return {str(name): name.state for name in fusee.compiler.list_backends()}


def test_what_is_missing_is_said() -> None:
    for name, package, says in (
        ("tensorrt", "torch_tensorrt", r"of torch's version; Linux and Windows, NVIDIA GPUs"),
        ("ipex", "intel_extension_for_pytorch", r"works with torch 2\.8 alone"),
    ):
        assert states()[name] == f"missing package: {package}"
        with pytest.raises(MissingPackage, match=rf"needs {package}[\s\S]*{says}"):
            lookup(name)


def test_a_package_for_another_torch_is_not_imported(package: Callable[..., None]) -> None:
    package("intel_extension_for_pytorch", "2.8.0")
    ours_is = ".".join(torch.__version__.split(".")[:2])
    assert states()["ipex"] == f"missing package: intel_extension_for_pytorch {ours_is}"
    with pytest.raises(MissingPackage, match=r"torch 2\.8 alone"):
        lookup("ipex")


def test_a_package_without_its_device(package: Callable[..., None]) -> None:
    package("torch_tensorrt", torch.__version__)
    if torch.cuda.is_available():
        assert states()["tensorrt"] == "ready"
        return
    assert states()["tensorrt"].startswith("missing device: an NVIDIA GPU")
    with pytest.raises(MissingDevice, match="needs an NVIDIA GPU"):
        lookup("tensorrt")


def test_whole_graphs_and_options_are_handed_over(
    package: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    package("torch_tensorrt", torch.__version__)
    found = importlib.import_module("torch._dynamo.backends.registry")
    found.list_backends()  # registers torch's own, once and for all
    ready = dataclasses.replace(registry._backends["tensorrt"], absent=None)
    monkeypatch.setitem(registry._backends, "tensorrt", ready)
    seen: list[Any] = []

    def theirs(gm: fx.GraphModule, inputs: list[Tensor], *, options: Any) -> Callable[..., Any]:
        seen.append((len(inputs), options))
        return gm.forward

    fast = fusee.compile(torch.relu, backend="tensorrt", options={"min_block_size": 1})
    with pytest.raises(BackendError, match="registered no backend named 'torch_tensorrt'"):
        fast(torch.ones(3))
    found.register_backend(theirs, name="torch_tensorrt")
    try:
        assert fast(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    finally:
        del found._BACKENDS["torch_tensorrt"]
        found._COMPILER_FNS.pop("torch_tensorrt", None)
    assert seen == [(1, {"min_block_size": 1})]
