"""Where a tensor keeps its facts in memory, for machine code that must know them in nanoseconds.

Adapter to torch's private memory layout (tested with 2.13). No offset is written down here: each is
found by comparing the memory of tensors whose facts Python tells, and confirmed on others. Where
that finds no clear answer there is no Layout, and what relies on it is not done.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Layout", "layout"]

# Both objects are larger than this in every version supported.
_TENSOR_WORDS = 20
_STORAGE_WORDS = 6
_ODD_OFFSET = 12347


class Layout(NamedTuple):
    """Offsets in bytes. `version` is 4 bytes wide, all else 8."""

    impl: int  # Python object -> C++ tensor
    storage: int  # C++ tensor -> storage
    offset: int  # in the C++ tensor: storage offset in elements
    counter: int  # C++ tensor -> version counter; null in inference tensors
    data: int  # storage -> first byte
    version: int  # in the version counter: what Tensor._version reads


@functools.cache
def layout() -> Layout | None:
    """The layout of this process's torch, or None if it cannot be told for sure."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        found = _find()
        return found if found is not None and all(map(found_right(found), _samples())) else None


def _find() -> Layout | None:
    tensor = torch.zeros(_ODD_OFFSET + 1)
    storage = tensor.untyped_storage()
    moved = tensor.as_strided((1,), (1,), _ODD_OFFSET)
    detached, other = _words(tensor.detach()._cdata), _words(tensor.data._cdata)
    words = _words(tensor._cdata)
    size = torch.Tensor.__basicsize__ // 8
    impl = _only(range(size), lambda k: _words(id(tensor), size)[k] == tensor._cdata)
    place = _only(range(_TENSOR_WORDS), lambda k: words[k] == storage._cdata)
    offset = _only(range(_TENSOR_WORDS), lambda k: _words(moved._cdata)[k] == _ODD_OFFSET)
    # detach() shares the counter, .data has one of its own
    counter = _only(
        range(_TENSOR_WORDS), lambda k: words[k] == detached[k] != other[k] and words[k] % 8 == 0
    )
    if impl is None or place is None or offset is None or counter is None:
        return None
    data = _data_word()
    version = _version_offset(tensor, words[counter])
    if data is None or version is None:
        return None
    return Layout(8 * impl, 8 * place, 8 * offset, 8 * counter, 8 * data, version)


def _data_word() -> int | None:
    """The first word with the data's address, also where another object owns the memory."""
    found = []
    for tensor in (torch.zeros(3), torch.frombuffer(bytearray(8), dtype=torch.uint8)):
        storage = tensor.untyped_storage()
        words = _words(storage._cdata, _STORAGE_WORDS)
        found.append([k for k, word in enumerate(words) if word == storage.data_ptr()])
    common = sorted(set(found[0]) & set(found[1]))
    return common[0] if common else None


def _version_offset(tensor: Tensor, counter: int) -> int | None:
    candidates = [8, 12, 16, 20]
    for _ in range(3):
        tensor.zero_()
        candidates = [k for k in candidates if _word(counter + k, 4) == tensor._version]
    return candidates[0] if len(candidates) == 1 else None


def _samples() -> Iterable[Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    yield parameter
    yield torch.zeros(2, 3, 4).add_(1).transpose(0, 2)[1:]
    parameter.detach().mul_(2).add_(1)
    yield parameter
    parameter.data = torch.zeros(10, 4)[4:]
    yield parameter
    yield torch.zeros((), dtype=torch.int64)


def found_right(found: Layout) -> Callable[[Tensor], bool]:
    """A check that these offsets tell the truth about a tensor."""

    def check(tensor: Tensor) -> bool:
        impl = _word(id(tensor) + found.impl)
        storage = _word(impl + found.storage)
        return (
            impl == tensor._cdata
            and storage == tensor.untyped_storage()._cdata
            and _word(storage + found.data) == tensor.untyped_storage().data_ptr()
            and _word(impl + found.offset) == tensor.storage_offset()
            and _word(_word(impl + found.counter) + found.version, 4) == tensor._version
        )

    return check


def _only(places: Iterable[int], fits: Callable[[int], bool]) -> int | None:
    found = [k for k in places if fits(k)]
    return found[0] if len(found) == 1 else None


def _words(address: int, count: int = _TENSOR_WORDS) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _word(address: int, size: int = 8) -> int:
    kind = ctypes.c_uint64 if size == 8 else ctypes.c_uint32
    return int(kind.from_address(address).value)
