"""Results that were there before: layers that are alike ask for the same again.

Of torch calls on stand-ins, and of a `__getattribute__` in Python of an object from outside. They
are noted for one capture, by all that they depend on.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from fusee.capture.bytecode import only_reads
from fusee.capture.frame import is_scalar
from fusee.capture.mirrors import Mirror
from fusee.capture.sources import is_trusted
from fusee.capture.torch_api import FakeTensor, fake_again
from fusee.fake.layouts import extent
from fusee.source import Args, Kwargs

# ---------------------------------------------------------------------------- torch calls
# What a function of torch's gives for stand-ins depends on how they lie, on the other arguments and
# on a few switches. Running it costs up to a millisecond, for one operator or for tens of them. So
# what it gave is noted by these, as long as it is new memory and has no gradient, and is made at
# once the next time.

_KINDS = (
    types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType,
)  # fmt: skip
_HOMES = "torch", "_operator"
_IN_PYTHON = frozenset(("torch.nn.functional", "torch.functional", "torch._tensor"))
_OF_NOW = frozenset(("cuda", torch.device("cuda")))  # the present device: another one later
_BITS = (torch.Tensor.is_conj, torch.Tensor.is_neg)


class _Made(NamedTuple):
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Repeated:
    """What calls of one capture gave, in all its attempts.

    _views   which of these are views of new memory, such as those of linear() for three axes
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, _Made] = {}
        self._views: set[Hashable] = set()

    def key(self, mode: Any, func: Any, args: Args, kwargs: Kwargs) -> Hashable:
        """By what the result of a call is known; None: it has to run."""
        kind, home = type(func), getattr(func, "__module__", None) or "torch"
        if kind is types.FunctionType and home not in _IN_PYTHON:
            return None
        if kind is types.BuiltinFunctionType and home.partition(".")[0] not in _HOMES:
            return None  # of a package of the program's
        if kind not in _KINDS or func is torch.Tensor.cuda:
            return None
        if isinstance(getattr(func, "__self__", None), torch.Tensor):
            return None
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return None
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        parts: list[Any] = [func, *kwargs, len(kwargs), *state]
        is_known = all(_add(parts, mode, x) for x in (*args, *kwargs.values()))
        return tuple(parts) if is_known else None

    def again(self, mode: Any, key: Hashable) -> torch.Tensor | None:
        """The result of a call, if one like it was noted."""
        if (known := self._made.get(key)) is None:
            return None
        made: torch.Tensor = fake_again(mode, *known)
        if key in self._views:  # where gradients are off autograd refuses writes to these later
            with mode:
                made = torch.ops.aten.alias.default(made)
        return made

    def note(self, mode: Any, key: Hashable, operands: Args, out: Any) -> None:
        """Keep what a call gave for tensors among its arguments, if it is a new one."""
        if type(out) is not FakeTensor or out.fake_mode is not mode or out.requires_grad:
            return
        if out.layout is not torch.strided or out.is_quantized or out.constant is not None:
            return
        if out._has_symbolic_sizes_strides or any(bit(out) for bit in _BITS):
            return
        memory = out.untyped_storage()
        given = [x for x in _flat(operands) if isinstance(x, torch.Tensor)]
        if not given or any(x.untyped_storage()._cdata == memory._cdata for x in given):
            return
        made = _Made(out.fake_device, tuple(out.shape), out.stride(), out.dtype)
        least = extent(made.size, made.stride) * out.element_size()
        if out.storage_offset() == 0 and memory.nbytes() == least:
            self._made[key] = made
            self._views |= {key} if out._is_view() else set()


def _add(parts: list[Any], mode: Any, x: Any) -> bool:
    """Note what of an argument decides; False: nobody knows."""
    kind = type(x)
    if kind is FakeTensor:
        has_gradients = x.requires_grad and torch.is_grad_enabled()
        if x.fake_mode is not mode or has_gradients or x.layout is not torch.strided:
            return False
        if x.constant is not None or x._has_symbolic_sizes_strides or x.is_quantized:
            return False
        parts += x.shape, x.stride(), x.dtype, x.fake_device, x.is_conj(), x.is_neg()
        return True
    if kind is tuple or kind is list:
        parts += kind, len(x)
        return all(_add(parts, mode, item) for item in x)
    if kind is slice:
        parts.append(kind)
        return all(_add(parts, mode, end) for end in (x.start, x.stop, x.step))
    parts += kind, x
    return is_scalar(x) and x not in _OF_NOW


def _flat(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [one for item in x for one in _flat(item)]
    return [x]


# ---------------------------------------------------------------------------- attributes
# To run a `__getattribute__` again for each layer that reads `config.hidden_size` would give the
# same, under the same guards, as long as it only reads and nothing that it read was written to.

_IN_C = {super, isinstance, getattr, hasattr, vars(object)["__getattribute__"]}
_CALLABLE = type, types.BuiltinFunctionType, types.WrapperDescriptorType


class Mirrors(dict[int, Mirror]):
    """The mirrors of a world, by id of what they are of.

    read     those that the method which runs has asked for; None: none runs, or it does more
    given    by method, object and name: what it gave, and the mirrors that it had asked for
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Mirror] | None = None
        self.given: dict[tuple[Any, int, str], tuple[Any, list[Mirror]]] = {}

    def get(self, key: int, default: Any = None) -> Mirror | None:  # type: ignore[override]
        found: Mirror | None = super().get(key, default)
        if self.read is not None and found is not None:
            self.read.append(found)
        return found

    def __setitem__(self, key: int, mirror: Mirror) -> None:
        super().__setitem__(key, mirror)
        if self.read is not None:
            self.read.append(mirror)

    def called(self, function: Any, stand: Any) -> None:
        """A method that runs calls this; `stand` stands in for it."""
        if type(function) is types.FunctionType:
            is_known = stand is None and not is_trusted(function.__module__)
            is_known = is_known and only_reads(function.__code__)
        elif type(function) in _CALLABLE:
            is_get = type(getattr(function, "__self__", None)) is dict
            is_known = function in _IN_C or (is_get and function.__name__ == "get")
        else:
            is_known = type(function) is types.MethodType
        if not is_known:
            self.read = None


def got(m: Any, method: Callable[..., Any], obj: Any, name: str) -> Any:
    """`method(obj, name)`, a method that is called `__getattribute__`."""
    mirrors: Mirrors = m.world.mirrors
    key, outer = (method, id(obj), name), mirrors.read
    value, known = mirrors.given.get(key, (None, None))
    try:
        if known is None or not _hold(m, known):
            mirrors.read = []
            value = m.call(method, obj, name)
            known = mirrors.read
            is_outside = m.world.passed_from(obj) is not None
            if known is not None and is_outside and is_scalar(value) and _hold(m, known):
                mirrors.given[key] = value, known
        else:
            mirrors.read = known
        return value
    finally:  # what an outer one reads
        known, mirrors.read = mirrors.read, None
        if outer is not None and known is not None:
            mirrors.read = outer + known


def _hold(m: Any, known: list[Mirror]) -> bool:
    """Whether nothing was written to what these show."""
    is_changed = any(x.copy is not None or x.writes or x.tail or x.done for x in known)
    return not is_changed and not m.world.slots
