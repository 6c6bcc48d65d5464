"""A slow, exact interpreter of LoopGraphs: what every emitter must agree with.

Each Loop is evaluated at once over the whole grid of its axes with torch operators; it is meant for
tests, up to about a hundred thousand points per loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusee.loops import Acc, Buffer, Extern, Loop, LoopGraph, Value, View, identity, walk
from fusee.sym import Atom, Call, Size, Symbol, substitute

Grid = torch.Tensor
Env = dict[Symbol, Grid]


class IndexOutOfRange(IndexError):
    """A data-dependent index was outside of its dimension."""


def interpret(
    graph: LoopGraph,
    inputs: Sequence[torch.Tensor | int],
    constants: Mapping[str, torch.Tensor] | None = None,
    sizes: Mapping[Symbol, int] | None = None,
) -> list[Any]:
    """Run the graph's steps in order on one tensor or int per input; returns the outputs.

    Inputs that the graph writes are changed in place. Constants are looked up by name, and may be
    left out of `inputs`; so may symbols that are in `sizes`.
    """
    return _Interpreter(graph, inputs, constants or {}, sizes or {}).run()


class _Interpreter:
    def __init__(
        self,
        graph: LoopGraph,
        inputs: Sequence[torch.Tensor | int],
        constants: Mapping[str, torch.Tensor],
        sizes: Mapping[Symbol, int],
    ) -> None:
        self.graph = graph
        self.sizes: dict[Symbol, Size] = dict(sizes)
        self.memory: dict[Buffer, torch.Tensor] = {}  # one-dimensional, from offset 0
        self.tensors: dict[Buffer, torch.Tensor] = {}  # opaque ones too
        given = iter(inputs)
        for item in graph.inputs:
            if isinstance(item, Symbol):
                if item not in self.sizes:
                    value = next(given)
                    assert isinstance(value, int)
                    self.sizes[item] = value
            else:
                tensor = constants[item.name] if item.name in constants else next(given)
                assert isinstance(tensor, torch.Tensor)
                self._hold(item, tensor)

    def _hold(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        self.tensors[buffer] = tensor
        if tensor.layout is torch.strided:
            # to the end of the storage: as_strided may look beyond the tensor
            size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            self.memory[buffer] = tensor.as_strided((size - tensor.storage_offset(),), (1,))

    def run(self) -> list[Any]:
        for step in self.graph.steps:
            if isinstance(step, Extern):
                self._extern(step)
            else:
                self._loop(step)
        return [self._whole(output) for output in self.graph.outputs]

    def _size(self, size: Size) -> int:
        value = substitute(size, self.sizes)
        assert isinstance(value, int), f"{size} is not known"
        return value

    def _allocated(self, buffer: Buffer) -> torch.Tensor:
        found = self.memory.get(buffer)
        if found is None:
            empty = any(self._size(n) == 0 for n in buffer.shape)
            size = 0 if empty else self._size(buffer.size)
            found = torch.zeros(size, dtype=buffer.dtype)
            if buffer.dtype.is_floating_point:
                found.fill_(float("nan"))
            self.memory[buffer] = found
        return found

    # -------------------------------------------------------------------------- externs

    def _extern(self, step: Extern) -> None:
        args = [self._whole(arg) for arg in step.args]
        kwargs = {key: self._whole(arg) for key, arg in step.kwargs.items()}
        if step.out:
            outs = [self._whole(_view(b)) for b in step.results if b is not None]
            step.call(*args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))
            return
        returned = step.call(*args, **kwargs)
        if not step.results:
            return
        results = returned if step.many else (returned,)
        for buffer, result in zip(step.results, results, strict=True):
            if buffer is not None:
                strides = [self._size(n) for n in buffer.strides]
                exact = torch.empty_strided(result.shape, strides, dtype=result.dtype)
                self._hold(buffer, exact.copy_(result))

    def _whole(self, item: Any) -> Any:
        """Views as tensors and sizes as ints, anywhere inside."""
        if isinstance(item, View):
            if item.buffer in self.tensors and item.buffer not in self.memory:
                return self.tensors[item.buffer]
            shape = [self._size(n) for n in item.shape]
            strides = [self._size(n) for n in item.strides]
            return self._allocated(item.buffer).as_strided(
                shape, strides, self._size(item.offset) + self.memory[item.buffer].storage_offset()
            )
        if isinstance(item, (list, tuple)):
            return type(item)(self._whole(part) for part in item)
        return self._size(item) if hasattr(item, "terms") else item

    # -------------------------------------------------------------------------- loops

    def _loop(self, loop: Loop) -> None:
        axes = [*loop.axes, *loop.reduce_axes]
        env: Env = {}
        for k, axis in enumerate(axes):
            assert axis.hi is not None
            span = torch.arange(self._size(axis.hi))
            env[axis] = span.reshape([-1 if j == k else 1 for j in range(len(axes))])
        shape = [env[axis].numel() for axis in axes]
        space = shape[: len(loop.axes)]
        values = _Evaluator(self, env, len(axes))
        if loop.acc is None:
            self._store(loop, values.index(loop.index), values(loop.value), shape)
            return
        if loop.is_fold:
            self._fold(loop, env)
            return
        elements = values(loop.value).expand(shape)
        which = None if loop.which is None else values(loop.which).expand(shape)
        if loop.scan:
            running = _scan(loop.acc, elements, len(shape) - 1)
        else:
            running = _reduce(loop.acc, elements, which, len(space))
            env = {axis: env[axis].reshape(env[axis].shape[: len(space)]) for axis in loop.axes}
            shape = space
        values = _Evaluator(self, env, len(shape))
        values.accs[loop.acc] = running
        stored = running if loop.result is None else values(loop.result)
        self._store(loop, values.index(loop.index), stored, shape)

    def _fold(self, loop: Loop, env: Env) -> None:
        (axis,) = loop.reduce_axes
        carried: dict[Acc, Grid] = {}
        for place in env[axis].flatten():
            env[axis] = place.reshape([1] * env[axis].dim())
            values = _Evaluator(self, env, env[axis].dim())
            values.carried = carried
            carried = {s.acc: values(s.value) for s in loop.gathered}
            assert loop.acc is not None
            shape = [env[other].numel() for other in (*loop.axes, axis)]
            self._store(loop, values.index(loop.index), carried[loop.acc], shape)

    def _store(self, loop: Loop, index: Grid, value: Grid, shape: Sequence[int]) -> None:
        target = self._allocated(loop.buffer)
        places = index.expand(shape).reshape(-1)
        numbers = value.to(loop.buffer.dtype).expand(shape).reshape(-1)
        if places.numel() == 0:
            return
        assert int(places.min()) >= 0 and int(places.max()) < target.numel(), "store out of bounds"
        if loop.mode == "set":
            if loop.ordered:
                for place, number in zip(places.tolist(), numbers, strict=True):
                    target[place] = number
                return
            target[places] = numbers
            same = torch.allclose(target[places].double(), numbers.double(), 0, 0, equal_nan=True)
            assert same, f"{loop.buffer} is stored twice at one place"
            return
        combine = COMBINE[loop.mode]
        for place, number in zip(places.tolist(), numbers, strict=True):
            target[place] = combine(target[place], number)


COMBINE: dict[str, Callable[[Grid, Grid], Grid]] = {
    "add": lambda a, b: a | b if a.dtype is torch.bool else a + b,
    "mul": lambda a, b: a & b if a.dtype is torch.bool else a * b,
    "min": lambda a, b: a & b if a.dtype is torch.bool else torch.minimum(a, b),
    "max": lambda a, b: a | b if a.dtype is torch.bool else torch.maximum(a, b),
}


def _view(buffer: Buffer) -> View:
    return View(buffer, buffer.shape, buffer.strides, buffer.offset)


def _reduce(acc: Acc, elements: Grid, which: Grid | None, keep: int) -> Grid:
    flat = elements.flatten(keep)
    if acc.op in ("argmax", "argmin"):
        assert which is not None
        if flat.dtype is torch.float16 or flat.dtype is torch.bfloat16:
            raise AssertionError("accumulated values are float32")
        best = flat.argmax(-1) if acc.op == "argmax" else flat.argmin(-1)
        return which.reshape(flat.shape).gather(-1, best.unsqueeze(-1)).squeeze(-1)
    if flat.shape[-1] == 0:
        return torch.full(flat.shape[:-1], identity(acc.op, acc.dtype), dtype=acc.dtype)
    simple: dict[str, Callable[[Grid], Grid]] = {
        "sum": lambda x: x.sum(-1, dtype=x.dtype),
        "prod": lambda x: x.prod(-1, dtype=x.dtype),
        "max": lambda x: x.amax(-1),
        "min": lambda x: x.amin(-1),
        "any": lambda x: x.any(-1),
        "all": lambda x: x.all(-1),
    }
    assert flat.dtype is acc.dtype
    return simple[acc.op](flat)


def _scan(acc: Acc, elements: Grid, dim: int) -> Grid:
    running: dict[str, Callable[[Grid], Grid]] = {
        "sum": lambda x: x.cumsum(dim, dtype=x.dtype),
        "prod": lambda x: x.cumprod(dim, dtype=x.dtype),
        "max": lambda x: x.cummax(dim).values,
        "min": lambda x: x.cummin(dim).values,
    }
    return running[acc.op](elements)


# ------------------------------------------------------------------------------ values


class _Evaluator:
    """Values and sizes over a grid: every tensor broadcasts against the axes."""

    def __init__(self, run: _Interpreter, env: Env, rank: int) -> None:
        self.run, self.env, self.rank = run, env, rank
        self.done: dict[int, Grid] = {}
        self.accs: dict[Acc, Grid] = {}
        self.carried: dict[Acc, Grid] = {}

    def __call__(self, value: Value) -> Grid:
        for each in walk([value]):
            if id(each) not in self.done:
                result = self._value(each, [self.done[id(arg)] for arg in each.args])
                assert result.dtype is each.dtype, (
                    f"{each.op} gave {result.dtype}, not {each.dtype}"
                )
                self.done[id(each)] = result
        return self.done[id(value)]

    def index(self, size: Size) -> Grid:
        if isinstance(size, int):
            return torch.full([1] * self.rank, size)
        total: Grid = torch.zeros([1] * self.rank, dtype=torch.int64)
        for mono, coef in size.terms.items():
            term: Grid = torch.full([1] * self.rank, coef)
            for atom in mono:
                term = term * self._atom(atom)
            total = total + term
        return total

    def _atom(self, atom: Atom) -> Grid:
        if isinstance(atom, Symbol):
            if atom in self.env:
                return self.env[atom]
            if isinstance(atom.payload, Value):
                return self(atom.payload)
            return torch.full([1] * self.rank, self.run._size(atom.expr))
        assert isinstance(atom, Call)
        a, b = self.index(atom.a), self.index(atom.b)
        return INTEGER[atom.op](a, b)

    def _value(self, value: Value, args: list[Grid]) -> Grid:
        if value.op == "const":
            return torch.full([1] * self.rank, value.attr, dtype=value.dtype)
        if value.op == "index":
            return self.index(value.attr)
        if value.op == "acc":
            return self.accs[value.attr]
        if value.op == "carry":
            first = torch.full([1] * self.rank, identity("fold", value.dtype), dtype=value.dtype)
            return self.carried.get(value.attr, first)
        if value.op == "load":
            return self._load(value, args)
        if value.op == "cast":
            return args[0].to(value.dtype)
        if value.op == "bitcast":
            return args[0].contiguous().view(value.dtype)
        if value.op == "where":
            condition, x, y = args
            return torch.where(condition, x, y)
        if value.op == "check":
            return self._check(value, args[0])
        for arg in args:
            half = arg.dtype in (torch.bfloat16, torch.float16)
            assert not half, f"{value.op} of {arg.dtype}: lowering computes halves in float32"
        return SCALAR[value.op](*args)

    def _check(self, value: Value, x: Grid) -> Grid:
        size, message, wraps = value.attr
        count = self.run._size(size)
        if bool(((x < (-count if wraps else 0)) | (x >= count)).any()):
            raise IndexOutOfRange(self.run.graph.messages[message][1])
        return torch.where(x < 0, x + count, x)

    def _load(self, value: Value, args: list[Grid]) -> Grid:
        buffer, index = value.attr
        memory = self.run._allocated(buffer)
        places = self.index(index)
        if not args:
            if places.numel() == 0:
                return torch.zeros(places.shape, dtype=buffer.dtype)
            inside = int(places.min()) >= 0 and int(places.max()) < memory.numel()
            assert inside, f"load outside of {buffer}"
            return memory[places]
        mask, other = args
        places, mask = places + torch.zeros_like(mask, dtype=torch.int64), mask | (places < places)
        inside = bool(((places >= 0) & (places < memory.numel()) | ~mask).all())
        assert inside, f"masked load outside of {buffer}"
        safe = torch.where(mask, places, 0)
        if memory.numel() == 0:
            return other.expand(safe.shape)
        return torch.where(mask, memory[safe], other)


INTEGER: dict[str, Callable[[Grid, Grid], Grid]] = {
    "//": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "%": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
}

SCALAR: dict[str, Callable[..., Grid]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "div": torch.div,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "neg": torch.neg,
    "abs": torch.abs,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "signbit": torch.signbit,
    "round": torch.round,
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype),
    **{
        name: getattr(torch, name)
        for name in (
            "floor ceil trunc copysign sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan "
            "asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma pow atan2 hypot "
            "nextafter"
        ).split()
    },
}
