"""Copies of inputs in another layout or dtype, which may be made together: weights of convolutions
whose images lie by channels, weights under autocast.

Each is a kernel before the call that takes it. Behind each other they are one launch, if their text
is one (targets/cuda/launch.py: Joined).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from fusee.loops import Extern, Kernel, Store, index_of, payloads, walk
from fusee.loops.schedule import first_write, writes
from fusee.sym import coefficient, hint


def gathered(items: Sequence[Kernel | Extern], most: int) -> list[Kernel | Extern]:
    """The items, with copies of inputs behind the first of them, those like each other together.

    What comes after `most` bytes of them begins anew, not to lie there for long.
    """
    end = first_write(items)  # by then an input may have changed
    writers = Counter(buffer for item in items for buffer in writes(item))
    found: list[Sequence[Kernel | Extern]] = []
    copies: list[Kernel] = []
    room = 0
    for item in items[:end]:
        store = None if isinstance(item, Extern) else _copy(item)
        if isinstance(item, Extern) or store is None or writers[store.buffer] > 1:
            found.append([item])
            continue
        size = hint(store.buffer.size) * store.buffer.dtype.itemsize
        if size > room:
            copies, room = [], most
            found.append(copies)
        copies.append(item)
        copies.sort(key=_likeness)
        room -= size
    return [*(item for row in found for item in row), *items[end:]]


def _copy(kernel: Kernel) -> Store | None:
    """The only store of a kernel that copies what was there before the call."""
    store, *others = kernel.statements()
    if others or not isinstance(store, Store) or store.mode != "set":
        return None
    value = store.value
    while value.op == "cast":
        (value,) = value.args
    is_load = value.op == "load" and not value.operands and not payloads(store.index)
    given = is_load and value.attr[0].role in ("input", "derived", "constant")
    return store if given and store.buffer.role == "scratch" else None


def _likeness(kernel: Kernel) -> list[int]:
    """Equal for copies that may have one text: they differ in sizes alone."""
    indices = [s.index for s in kernel.statements() if isinstance(s, Store)]
    indices += [index_of(value) for value in walk(kernel.operands) if value.op == "load"]
    sizes = [(coefficient(index, axis) or (0, 0))[0] for index in indices for axis in kernel.outer]
    sizes += [axis.hi or 0 for axis in kernel.outer[-1:]]
    return [len(kernel.outer), *(math.gcd(n, 16) if isinstance(n, int) else 0 for n in sizes)]
