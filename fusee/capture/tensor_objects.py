"""Instances of subclasses of torch.Tensor, and what their `__torch_function__` makes of calls.

To the graph such an instance is a plain tensor on the same memory; the world knows its class and
its attributes (`World.seen`). A torch function that gets one goes to `__torch_function__` of the
class that torch would ask, and that runs on the machine. What torch's own one does, which is to
compute without asking again and to give results the class, is `_by_default`.

source   https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-python-api
"""

from __future__ import annotations

import functools
from types import FunctionType, MethodWrapperType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

from fusee.capture.attributes import Capturing, flat
from fusee.capture.builtins import SPECIAL, leave_region, stands_for, stands_for_each
from fusee.capture.dynamic import read
from fusee.capture.frame import having
from fusee.capture.graph_break import Breaking, GraphBreak, Opaque
from fusee.capture.guards import EqualsMatch
from fusee.capture.sources import given_by
from fusee.capture.torch_api import (
    MODE_STACK,
    DeviceContext,
    FakeTensor,
    asks,
    function_modes,
    no_torch_function,
    without_modes,
)
from fusee.source import Args, Kwargs

# ---------------------------------------------------------------------------- modes
# Torch function modes of the program's: `with torch.device(...)`, `torch.set_default_device`.
#
# The recorder is such a mode itself, and the only one that is really on while a program is
# captured. A torch call goes to the innermost of `Capturing.modes` first: its `__torch_function__`
# runs on the machine, without it, and what that calls goes to the next one. So a graph has what the
# modes made of the program's calls, and runs without them. What a piece enters or leaves is done to
# torch's own stack at its end.
#
# source https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-
# modes

PLACE = given_by(function_modes, "the torch function modes")
_device: Any = torch.device


_IS_ON = given_by(torch._C._is_torch_function_enabled, "whether classes of tensors hear of calls")


def load(m: Capturing, modes: list[Any]) -> None:
    """Guard the modes that a piece begins within; their number is one of its conditions.

    Whether it begins where subclasses hear of no call is guarded where that is asked: `_is_off`.
    """
    m.modes = [m.world.load(mode, m.world.item(PLACE, k)) for k, mode in enumerate(modes)]
    if modes:
        m.world.passing.append("a torch function mode")
    else:
        m.recorder.off = int(not torch._C._is_torch_function_enabled())
        m.recorder.begins_off = bool(m.recorder.off)


def _is_off(m: Capturing) -> bool:
    """Whether the classes of tensors hear of no call."""
    recorder = m.recorder
    if recorder.begins_off is not None:
        m.world.fact(EqualsMatch, _IS_ON, not recorder.begins_off)
    return recorder.off > 0


@stands_for(_device.__enter__)
def _enter_device(m: Capturing, device: Any) -> Any:
    m.modes.append(m.call(m.world.hold(DeviceContext, "torch.device"), device))
    return device


@stands_for(TorchFunctionMode.__enter__, MODE_STACK.push)
def _push(m: Capturing, mode: Any) -> Any:
    m.modes.append(mode)
    return mode


@stands_for(_device.__exit__, TorchFunctionMode.__exit__)
def _leave(m: Capturing, mode: Any, *error: Any) -> None:
    m.modes.pop()


SPECIAL[MODE_STACK.pop] = lambda m: m.modes.pop()
SPECIAL[MODE_STACK.length] = lambda m: len(m.modes)
SPECIAL[MODE_STACK.all] = lambda m: list(m.modes)
SPECIAL[torch.set_default_device] = Breaking("the default device is set for all that follows")


# ---------------------------------------------------------------------------- subclasses


_default: Any = torch.Tensor.__torch_function__


def dispatch(m: Capturing, func: Any, kinds: Any, args: Args, kwargs: Kwargs | None) -> Any:
    """What a call of torch's gives that modes and subclasses may decide about.

    kinds   the classes that torch names for the stand-ins
    """
    recorder = m.recorder
    named, asked = functools.partial(_named, m, func, FakeTensor in kinds), []
    if getattr(func, "__name__", "").lstrip("_").startswith("sym_"):  # of numbers, told to nobody
        with no_torch_function():
            return func(*args, **(kwargs or {}))
    # as torch calls it: without kwargs where its code in C was given none
    given = args, *(() if kwargs is None else (kwargs,))
    if m.modes:
        innermost = m.modes.pop()
        try:
            return _ask(m, [innermost], func, named(args, kwargs or {}), *given)
        finally:
            m.modes.append(innermost)
    if m.world.seen and not _is_off(m):
        asked = _asked(named(args, kwargs or {}))
        if asked and func is torch.Tensor.__eq__ and not asks(m.kind_of(args[0])):
            func = torch.Tensor.eq  # the other name is told to modes, and to the class of the first
    return (
        _ask(m, asked, func, asked, *given)
        if asked
        else recorder.call(func, *args, **(kwargs or {}))
    )


def _ask(m: Capturing, owners: list[Any], func: Any, kinds: list[type], *given: Any) -> Any:
    """What the first of these makes of a call that does not leave it to others."""
    with without_modes(), m.recorder:
        for owner in owners:
            if owner is not torch.Tensor:
                asked = m.attribute(owner, "__torch_function__")
                result = m.call(asked, func, tuple(kinds), *given)
                if result is not NotImplemented:
                    return result
    kind = owners[0] if isinstance(owners[0], type) else type(owners[0])
    raise GraphBreak(f"{kind.__qualname__}.__torch_function__ leaves a call to others")


def _asked(kinds: list[type]) -> list[type]:
    """The classes that are asked; none if all tensors are plain."""
    return kinds if any(map(asks, kinds)) else []


def _named(m: Capturing, func: Any, is_owner: bool, args: Args, kwargs: Kwargs) -> list[type]:
    """The classes that torch names in a call, a subclass before its base.

    is_owner   whether it names that of the first argument, whatever it is
    """
    found: list[type] = []
    for x in flat(*args, *kwargs.values()):
        if type(x) is not FakeTensor:
            continue
        kind = m.kind_of(x)
        if func and asks(kind) and not _is_off(m) and _is_read(func, x, args, kwargs):
            continue
        # functions in Python name plain tensors among the classes
        is_named = kind is torch.Tensor and type(func) is FunctionType
        is_named |= is_owner and x is args[0]
        if kind not in found and (is_named or asks(kind)):
            later = [k for k, known in enumerate(found) if issubclass(kind, known)]
            found.insert(later[0] if later else len(found), kind)
    return found


class _Probe(torch.Tensor):
    """What has no dimension, in place of a stand-in that torch may read as a number."""


class _Hearing(TorchFunctionMode):
    """Hears of which classes torch tells at a call, which it does not run."""

    kinds: Any = (_Probe,)

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        self.kinds = types


def _is_read(func: Any, x: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether torch takes a number out of this argument, and then tells nobody of its class.

    A mode hears of that, but for `==`, where it hears of no class at all.
    """
    if func is torch.Tensor.__eq__:
        return False
    with no_torch_function(), without_modes():
        if x.dim() or x.requires_grad:
            return False
        number = torch.zeros((), dtype=x.dtype).as_subclass(_Probe)
    given = [number if y is x else y for y in args]
    named = {name: number if y is x else y for name, y in kwargs.items()}
    if not any(y is number for y in (*given, *named.values())):
        return False  # in a list, whose items are tensors
    with without_modes(), _Hearing() as told:
        func(*given, **named)
    return _Probe not in told.kinds


@stands_for(_default.__func__)
def _by_default(
    m: Capturing, cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """torch.Tensor.__torch_function__."""
    if not all(issubclass(cls, kind) for kind in m.items(types)):
        return NotImplemented
    given = [*map(m.deep, m.items(args))]
    named = {key: m.deep(x) for key, x in m.mapping(kwargs or {}).items()}
    with having(m.recorder, off=m.recorder.off + 1):
        result = m.recorder.call(func, *given, **named)
    if func in get_default_nowrap_functions():
        return result
    is_new = all(x is not result for x in (*given, *named.values()))
    is_new &= id(result) not in m.world.seen
    if type(result) is FakeTensor and is_new and not isinstance(func, MethodWrapperType):
        return _seen(m, result, cls)  # nobody could tell it from another one on its memory
    return _converted(m, result, cls)


def _converted(m: Capturing, x: Any, cls: type) -> Any:
    if type(x) is FakeTensor and not issubclass(m.kind_of(x), cls):
        return _made(m, x, cls)
    if isinstance(x, (tuple, list)):
        return type(x)(_converted(m, item, cls) for item in x)
    return x


# ------------------------------------------------------------------------------ making them


def _made(m: Capturing, x: Any, kind: Any, by: Any = torch.ops.aten.alias.default) -> Any:
    """Another tensor of this class on the same memory."""
    if type(x) is not FakeTensor or not isinstance(kind, type):
        raise GraphBreak("a subclass of torch.Tensor is made of something else than a tensor")
    return _seen(m, m.recorder.call(by, x), kind)


def _seen(m: Capturing, x: Any, kind: type) -> Any:
    """A tensor that the program sees as one of this class."""
    if kind is not torch.Tensor:
        m.world.allow(kind)
        m.world.seen[id(x)] = kind
    return x


SPECIAL[torch.Tensor.__new__] = lambda m, cls, x, /: _made(m, x, cls)


@stands_for(torch.Tensor._make_subclass)
def _make_subclass(m: Capturing, cls: Any, data: Any, require_grad: Any = False, /) -> Any:
    if m.truth(require_grad):
        raise GraphBreak("making a tensor of a subclass that requires grad")
    return _made(m, data, cls, torch.Tensor.detach)


# ------------------------------------------------------------------------------ torch's state


_OFF: Any = (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction)


stands_for_each(*_OFF)(lambda cls, m: cls())


@stands_for(*(cls.__enter__ for cls in _OFF))
def _enter(m: Capturing, manager: Any) -> None:
    if m.modes:
        raise GraphBreak("torch functions are switched off within a torch function mode")
    context = having(m.recorder, off=m.recorder.off + 1)  # torch's own state is as it was
    context.__enter__()
    m.regions.append((manager, context))


stands_for(*(cls.__exit__ for cls in _OFF))(leave_region)


@stands_for(
    torch._C._has_torch_function,
    torch._C._has_torch_function_unary,
    torch._C._has_torch_function_variadic,
)
def _has(m: Capturing, *args: Any) -> bool:
    if m.modes:
        return True
    if _is_off(m):
        return False
    others = [type(x) for x in flat(*args) if not isinstance(x, torch.Tensor)]
    asked = (asks(kind) for kind in others if hasattr(kind, "__torch_function__"))
    return any(asked) or bool(m.world.seen and _asked(_named(m, None, False, args, {})))


SPECIAL[torch.Tensor.as_subclass] = lambda m, x, cls: _made(m, x, cls)
SPECIAL[torch._C._is_torch_function_mode_enabled] = lambda m: bool(m.modes)
SPECIAL[torch._C._is_torch_function_enabled] = lambda m: not _is_off(m)
SPECIAL[torch._C._is_torch_function_all_disabled] = Breaking(
    "which of the two ways to switch torch functions off is on"
)


# ---------------------------------------------------------------------------- leaves
# Tensors that the program makes and at which autograd begins: Parameters, `requires_grad_()`.
#
# In the graph one is what it was made of, detached; to the program it requires grad. What is
# computed from it with gradients would be lost, so the graph ends there: the real one is made, and
# the next graph takes it as it takes any leaf from outside.


def _plain(m: Capturing, data: Any) -> Any:
    """What a leaf is made of."""
    data = m.call(torch.empty, 0) if data is None else data
    if type(data) is not FakeTensor or id(data) in m.world.seen or m.modes:
        raise GraphBreak("a leaf of no tensor, or of one whose class, or a mode, is asked about it")
    return data


@stands_for(_has_fast_path := torch.backends.mha.get_fastpath_enabled)
def _takes_fast_path(m: Capturing) -> bool:
    """No: nn.MultiheadAttention then is one call of nn.functional, as backends know it. It asks
    whether make_fx traces it, too, and lays out its result as its fast path does if so."""
    if _holds_opaque(m):
        raise GraphBreak("attention of tensors that no graph takes, nested ones")
    if m.frames[-1].code is not nn.MultiheadAttention.forward.__code__:
        return False
    return bool(m.world.load(_has_fast_path(), given_by(_has_fast_path, "mha's fast path")))


def _holds_opaque(m: Capturing) -> bool:
    return any(isinstance(x, Opaque) for x in m.frames[-1].locals.values())


@stands_for(activation._is_make_fx_tracing)
def _is_traced(m: Capturing) -> bool:
    """Where eager would take the fast path now: which is there only with a bias. A part of the
    function that runs on after a break has the fast path alone for nested tensors."""
    return (
        m.frames[-1].code is nn.MultiheadAttention.forward.__code__
        and not _holds_opaque(m)
        and m.attribute(m.frames[-1].locals["self"], "in_proj_bias") is not None
    )


@stands_for(torch._utils._get_obj_state)
def _state(m: Capturing, x: Any) -> Any:
    """What pickle is told of it, and a stand-in has more."""
    raise GraphBreak("the state of a tensor that is taken apart")


@stands_for(nn.Parameter)
def _parameter(m: Capturing, data: Any = None, requires_grad: Any = True) -> torch.Tensor:
    data, recorder = _plain(m, data), m.recorder
    if requires_grad is not False and not (data.is_floating_point() or data.is_complex()):
        raise GraphBreak("a Parameter of integers that requires grad, which is an error")
    if not recorder.is_main:
        raise GraphBreak("a Parameter that is made within a transform")
    fake = recorder.call(torch.Tensor.detach, data)
    fake._is_param = True
    recorder.leaves[id(fake)] = True
    recorder.begin_at(fake, m.truth(requires_grad))
    return fake  # type: ignore[no-any-return]


@stands_for(torch.autograd.Variable)
def _variable(m: Capturing, data: Any = None, requires_grad: Any = False) -> Any:
    """source   torch/csrc/autograd/python_legacy_variable.cpp"""
    detached = m.call(torch.Tensor.detach, _plain(m, data))
    return m.call(torch.Tensor.requires_grad_, detached) if m.truth(requires_grad) else detached


# ---------------------------------------------------------------------------- their values


def shown_number(m: Capturing, x: FakeTensor) -> Any:
    """What a format shows of a tensor: of one without axes it is the number in it."""
    if x.dim() or m.modes or m.kind_of(x) is not torch.Tensor:
        return x
    with no_torch_function():
        found = read(m.recorder, "item", (x,))
    return x if found is None else found


def condition(x: FakeTensor, wanted: bool) -> torch.Tensor | None:
    """What holds where the truth of `x` is as wanted; None if nothing may check it in a graph.

    A failed check ends a GPU's context.
    """
    if x.device.type != "cpu" or x.numel() != 1:
        return None
    if not wanted:
        return torch.logical_not(x)
    return x if x.dtype is torch.bool else torch.ne(x, 0)
