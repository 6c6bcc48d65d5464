"""What stands in for copy.copy and copy.deepcopy.

Containers and tensors are copied here; of an instance the machine runs what its class says, or
what Python's copy module makes of `__reduce_ex__`.

source   https://docs.python.org/3/library/copy.html
"""

from __future__ import annotations

import collections
import copy
import copyreg
import operator
import types
from typing import Any

import torch

from fusee.capture.attributes import of_instance, python_method
from fusee.capture.breaks import GraphBreak
from fusee.capture.capturing import Capturing
from fusee.capture.facts import ABSENT
from fusee.capture.mirror import empty_like
from fusee.capture.stand_ins import Args, Kwargs, stands_for
from fusee.capture.torch_api import FakeTensor
from fusee.capture.world import is_scalar

__all__: list[str] = []

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_KINDS = (list, set, collections.deque, *_DICTS)
_ATOMS = (type, types.FunctionType, types.BuiltinFunctionType, property)
# Classes in C whose instances hold what `__reduce_ex__` says, and no more.
_REFILLED = {object, list, dict, collections.OrderedDict}
_IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_copy_module: Any = copy


@stands_for(copy.copy)
def _copy(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    (x,) = args
    if type(x) in _KINDS:
        return m.plain(x).copy()
    if is_scalar(x) or isinstance(x, _ATOMS) or type(x) in (tuple, frozenset):
        return x
    return _instance(m, x, "__copy__", (), None)


@stands_for(copy.deepcopy)
def _deepcopy(m: Capturing, args: Args, kwargs: Kwargs) -> Any:
    """Containers, tensors and instances within one another, each copied once."""
    x, memo, *_ = (*args, kwargs.get("memo"))
    made: dict[int, Any] = {} if memo is None else m.plain(memo)

    def copied(x: Any) -> Any:
        if is_scalar(x) or isinstance(x, _ATOMS):
            return x
        if id(x) not in made:
            if isinstance(x, FakeTensor):
                made[id(x)] = _tensor(m, x, made)
            elif type(x) is tuple or type(x) in _KINDS:
                made[id(x)] = of_container(x)
            else:
                made[id(x)] = _instance(m, x, "__deepcopy__", (made,), made)
        return made[id(x)]

    def of_container(x: Any) -> Any:
        if type(x) is tuple:
            items = tuple(map(copied, x))
            return x if all(map(operator.is_, items, x)) else items
        shown = m.plain(x)
        empty = made[id(x)] = made[id(shown)] = empty_like(shown)
        if isinstance(shown, dict):
            empty.update((copied(key), copied(item)) for key, item in shown.items())
        else:
            (empty.update if type(x) is set else empty.extend)(map(copied, shown))
        return empty

    return copied(x)


def _tensor(m: Capturing, x: Any, made: dict[int, Any]) -> Any:
    with torch._C.DisableTorchFunction():
        storages = [y.untyped_storage()._cdata for y in made.get(_TENSORS, [])]
        is_plain = not x.requires_grad and not getattr(x, "_is_param", False)
        strides = torch.empty_like(x, device="meta").stride()
        if not is_plain or x.untyped_storage()._cdata in storages or x.stride() != strides:
            raise GraphBreak("a deep copy of a tensor that needs gradients, or is a view")
    made.setdefault(_TENSORS, []).append(x)
    return m.call(torch.clone, (x,), {})


_TENSORS = -1  # no id: in a memo, the tensors that were copied


def _instance(m: Capturing, x: Any, method: str, args: Args, memo: Any) -> Any:
    if isinstance(x, (FakeTensor, types.ModuleType)):
        raise GraphBreak(f"copying a {type(x).__qualname__}")
    custom = python_method(m, x, method)
    if custom is not None:
        return m.call(custom, (x, *args), {})
    reduce = python_method(m, x, "__reduce_ex__")
    found = _reduced(m, x) if reduce is None else m.call(reduce, (x, 4), {})
    if isinstance(found, str):
        return x
    rebuild = m.world.hold(_copy_module._reconstruct, "copy._reconstruct")
    return m.call(rebuild, (x, memo, *found), {})


def _reduced(m: Capturing, x: Any) -> Any:
    """What object.__reduce_ex__ gives."""
    kind = type(x)
    custom = python_method(m, x, "__reduce__")
    if custom is not None:
        return m.call(custom, (x,), {})
    in_c = {base for base in kind.__mro__ if base.__flags__ & _IN_C}
    if not in_c <= _REFILLED or python_method(m, x, "__getnewargs_ex__") is not None:
        raise GraphBreak(f"copying a {kind.__qualname__}")
    new = python_method(m, x, "__getnewargs__")
    given = () if new is None else m.items(m.call(new, (x,), {}))
    state = python_method(m, x, "__getstate__")
    held = _state(m, x) if state is None else m.call(state, (x,), {})
    items = m.iterate(x) if isinstance(x, list) else None
    pairs = iter(m.mapping(x).items()) if isinstance(x, dict) else None
    function: Any = copyreg.__newobj__  # type: ignore[attr-defined]
    return m.world.hold(function, "copyreg.__newobj__"), (kind, *given), held, items, pairs


def _state(m: Capturing, x: Any) -> Any:
    """What object.__getstate__ gives."""
    names = copyreg._slotnames(type(x))  # type: ignore[attr-defined]
    own = of_instance(m, x, "__dict__") if hasattr(x, "__dict__") else None
    slots = {}
    for name in names:
        try:
            slots[name] = m.attribute(x, name)
        except AttributeError:
            slots[name] = ABSENT
    slots = {name: value for name, value in slots.items() if value is not ABSENT}
    return (own, slots) if slots else own
