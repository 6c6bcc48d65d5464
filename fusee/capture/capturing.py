"""What everything that takes part in a capture knows of it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from fusee.capture.breaks import GraphBreak
from fusee.capture.frame import Frame
from fusee.capture.numbers import VALUES, Computed, is_learning_rate
from fusee.capture.origin import Origin
from fusee.capture.policy import Policy
from fusee.capture.semantics import Semantics
from fusee.capture.torch_api import FakeTensor
from fusee.capture.world import CONTAINERS, DELETED, FIXED, World, is_scalar, is_trusted

__all__ = ["AS_NUMBERS", "AS_VALUES", "COMPARED", "SHOWN", "Capturing"]

# Methods by which C code compares objects, shows them, and takes them for numbers or more.
COMPARED = tuple(f"__{name}__" for name in "eq ne hash lt le gt ge".split())
SHOWN = ("__repr__", "__str__", "__format__")
AS_NUMBERS = tuple(f"__{name}__" for name in "index int float complex bool".split())
AS_VALUES = (
    *(f"__{name}__" for name in "bytes iter next len getitem add radd mul rmul abs round".split()),
    *(f"__{name}__" for name in "floor ceil trunc divmod pow".split()),
    *COMPARED, *SHOWN, *AS_NUMBERS,
)  # fmt: skip

_OURS = (FakeTensor, Computed)  # they raise by themselves
_KNOWN = (types.MethodType, types.CellType, slice, *FIXED, *VALUES)
_SHOW_ARGS = (BaseException.__str__, KeyError.__str__)
_FUNCTION = types.FunctionType
_IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def _is_users(f: Frame) -> bool:
    home: str = f.globals.get("__name__") or ""
    return not is_trusted(home) and home.partition(".")[0] != "fusee"


class Capturing(Semantics):
    """The state of one capture.

    policy         what users have said about functions
    world          what lies outside
    made_classes   classes that the program itself made
    in_classes     what was found in others, by name
    generators     those that it made and that are alive, each with the frame that is its body
    inference      torch.inference_mode objects that it is within, and what left them in C
    modes          torch function modes that it is within, the innermost last
    checks         what branches that raise rely on; None if they end the graph
    is_compiling   what torch.compiler.is_compiling() says; `asks_compiling`: whether it was asked
    """

    def __init__(self, policy: Policy, varies: Callable[[Origin], bool] = is_learning_rate) -> None:
        super().__init__()
        self.policy = policy
        self.world = World(self.where, varies)
        self.world.machine = self
        self.made_classes = self.world.made_classes
        self.in_classes: dict[tuple[type, str], tuple[Any]] = {}
        self.generators: weakref.WeakKeyDictionary[Generator[Any, Any, Any], Frame]
        self.generators = weakref.WeakKeyDictionary()  # dropped, one is closed at once
        self.inference: list[tuple[Any, Any]] = []
        self.modes: list[Any] = []
        self.is_compiling, self.asks_compiling = True, False
        self.checks: list[torch.Tensor] | None = []
        self.failed: tuple[int, str] = 0, ""  # the last error, by id, and its line
        self._said: tuple[Callable[[], Frame | None], int, str] = lambda: None, 0, ""

    def where(self) -> str:
        """The innermost line of the user's code."""
        if not self.frames:
            return ""
        top, (frame, at, text) = self.frames[-1], self._said
        if frame() is not top or at != top.at:
            users = (f for f in reversed(self.frames) if _is_users(f))
            text = next(users, top).where
            self._said = weakref.ref(top), top.at, text
        return text

    def left_by(self, error: BaseException) -> None:
        if self.failed[0] != id(error):  # the error itself would keep its frames
            self.failed = id(error), self.where()

    def is_generator(self, x: Any) -> bool:
        """Whether `x` is a generator whose body runs on the machine."""
        return type(x) is types.GeneratorType and x in self.generators

    def length(self, x: Any) -> int:
        """len() of a list, dict, set or deque; of one from outside it becomes a fact."""
        if not self.is_outside(x):
            return len(x)
        mirror = self.world.mirror(x)
        if mirror.copy is not None or mirror.writes or mirror.tail:
            return len(self.world.whole(x))
        self.world.fact("length", mirror.origin, len(x))
        return len(x)

    def tensor_operator(self, function: Callable[..., Any], *operands: Any) -> Any:
        """An operator with a tensor among its operands, in the graph as the operator."""
        operands = tuple(x.number() if isinstance(x, Computed) else self.plain(x) for x in operands)
        for x in operands:
            if hasattr(type(x), "__torch_function__") and not isinstance(x, torch.Tensor):
                raise GraphBreak(f"a {type(x).__qualname__} in an operator with a tensor")
            self.look((x.start, x.stop, x.step) if type(x) is slice else (x,), AS_NUMBERS)
        if self.world.seen or self.modes:  # torch finds which function these are asked about
            return function(*operands)
        return self.world.recorder.call(function, operands, {})

    def kind_of(self, x: Any) -> Any:
        """The class that the program sees."""
        if id(x) in self.world.seen:
            return self.world.seen[id(x)][0]
        if isinstance(x, Computed):
            return x.kind
        if isinstance(x, FakeTensor):
            return torch.nn.Parameter if getattr(x, "_is_param", False) else torch.Tensor
        return type(x)

    def set_in_dict(self, obj: Any, name: str, value: Any) -> None:
        """Write to the instance's own attributes."""
        mirror = self.world.attributes(obj)
        if mirror is not None:
            self.world.set(mirror, name, value)
        elif value is DELETED:
            del obj.__dict__[name]
        else:
            object.__setattr__(obj, name, value)

    # ---------------------------------------------------------------------- for C code

    def is_outside(self, x: Any) -> bool:
        """Whether an object came from outside and is not a fixed one."""
        return self.world.origin(x) is not None and not isinstance(x, _OURS)

    def plain(self, x: Any) -> Any:
        """What C code may see of `x`: a container from outside as its copy."""
        if isinstance(x, CONTAINERS) and self.is_outside(x):
            return self.world.whole(x)
        if type(x) is tuple and any(isinstance(item, CONTAINERS) for item in x):
            return tuple(self.plain(item) for item in x)
        return x

    def look(self, objects: Iterable[Any], methods: tuple[str, ...] = ()) -> None:
        """End the graph if C code would read of objects from outside what no guard knows.

        methods   those that C code calls, of what containers hold too: in Python they would run
                  out of the machine's sight. None: it reads the objects themselves alone
        """
        todo, seen = list(objects), set()
        is_hash = "__hash__" in methods
        while todo:
            x = todo.pop()
            cls = type(x)
            if is_hash and issubclass(cls, FakeTensor):
                self.world.hash((x,))
            if is_scalar(x) or id(x) in seen or issubclass(cls, _OURS):
                continue
            seen.add(id(x))
            if "__repr__" in methods and issubclass(cls, (set, frozenset)):
                self.world.passing.append("the order of a set")
            is_container = issubclass(cls, (*CONTAINERS, tuple))
            is_outside = self.is_outside(x)
            if methods and is_container:
                kind = next(kind for kind in (*CONTAINERS, tuple) if issubclass(cls, kind))
                if is_outside and kind is not tuple and self.world.differs(x):
                    raise GraphBreak("C code would look at a container before it is changed")
                todo += dict.values(x) if kind is dict else kind.__iter__(x)
            if not is_outside:
                continue
            is_known = is_container or issubclass(cls, _KNOWN)
            is_state = any(base.__flags__ & _IN_C for base in cls.__mro__[:-1]) and not is_known
            if is_state and issubclass(cls, BaseException) and cls.__str__ in _SHOW_ARGS:
                todo.append(self.world.slot(x, "args"))
                is_state = False
            # what tells its address is another text at the next call
            is_state |= "__repr__" in methods and getattr(cls, "__repr__", 0) is object.__repr__
            if is_state or any(type(getattr(cls, m, None)) is _FUNCTION for m in methods):
                raise GraphBreak(f"C code would look at a {cls.__qualname__} from outside")

    def hashed(self, keys: Iterable[Any]) -> None:
        self.world.hash(keys)

    def writable(self, x: Any) -> Any:
        return self.plain(x)

    def append(self, x: list[Any], value: Any) -> None:
        append = self.world.append if type(x) is list and self.is_outside(x) else list.append
        append(x, value)

    def deep(self, x: Any) -> Any:
        """What C code that looks into containers within containers may see of `x`."""
        if not isinstance(x, (*CONTAINERS, tuple)):
            return x
        shown = self.plain(x)
        if isinstance(shown, dict):
            if any(isinstance(item, (*CONTAINERS, tuple)) for item in dict.values(shown)):
                return type(shown)((key, self.deep(item)) for key, item in dict.items(shown))
        elif type(shown) in (list, tuple) and any(
            isinstance(item, (*CONTAINERS, tuple)) for item in shown
        ):
            return type(shown)(self.deep(item) for item in shown)
        return shown
