"""Libraries that keep closed lists of backends.

Each is adapted when it is imported, by whoever imports it; what is done can be undone.

    accelerate          DynamoBackend, an enum: TorchDynamoPlugin, transformers' TrainingArguments
    TorchServe          PT2Backend, an enum: `pt2: {compile: {backend: fusee}}` of its model-config
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import EnumMeta
from types import ModuleType
from typing import Any

from fusee.backends.registry import list_backends
from fusee.runtime.imports import cancel, when_imported

__all__ = ["adapt"]

Undo = Callable[[], None]


def adapt() -> Undo:
    """Adapt them all, now or when they are imported. Returns the undo."""
    done: list[Undo] = []
    for name, adapter in _LIBRARIES.items():
        action = functools.partial(_adapt, adapter, done)
        when_imported(name, action)
        done.append(functools.partial(cancel, name, action))

    def undo() -> None:
        while done:
            done.pop()()

    return undo


def _adapt(adapter: Callable[[ModuleType], Undo], done: list[Undo], module: ModuleType) -> None:
    done.append(adapter(module))


def _accelerate(module: Any) -> Undo:
    return _extend(module.DynamoBackend, [name.upper() for name in list_backends()])


def _torchserve(module: Any) -> Undo:
    return _extend(module.PT2Backend, list_backends())


def _extend(enum: EnumMeta, values: Sequence[str]) -> Undo:
    """Give an enum of texts more members, named as they are in capitals."""
    members: Any = enum
    before = [set(members._value2member_map_), set(members._member_map_)]
    new = [v for v in map(str, values) if v not in before[0] and v.upper() not in before[1]]
    for value in new:
        member = str.__new__(members, value)
        member._name_, member._value_ = value.upper(), value
        type.__setattr__(enum, value.upper(), member)
        members._value2member_map_[value] = members._member_map_[value.upper()] = member
        members._member_names_.append(value.upper())

    def undo() -> None:
        for value in new:
            del members._value2member_map_[value], members._member_map_[value.upper()]
            members._member_names_.remove(value.upper())
            type.__delattr__(enum, value.upper())

    return undo


_LIBRARIES: dict[str, Callable[[ModuleType], Undo]] = {
    "accelerate.utils.dataclasses": _accelerate,
    "ts.utils.util": _torchserve,
}
