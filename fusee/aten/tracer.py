"""The dispatch mode that records: from an operator on meta tensors to nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusee.aten.autocast import cast_arguments, kind_of
from fusee.aten.functional import Builder, Value
from fusee.aten.torch_api import (
    OpOverload,
    TorchDispatchMode,
    active,
    composite,
    composite_in_python,
    explicit,
    is_missing_fake,
    op_name,
)
from fusee.aten.twins import holds_opaque, is_opaque
from fusee.errors import MissingFake, user_line

__all__ = ["Args", "Kwargs", "Rule", "Tracer"]

# What happens to one operator: (tracer, operator, arguments, keyword arguments) -> its result.
Rule = Callable[["Tracer", OpOverload, tuple[Any, ...], dict[str, Any]], Any]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Records what runs while it is active. Inside a rule it is not: rules call meta kernels.

    policy      the rule of an operator that comes up for the first time
    opaque_rule the same for operators on complex tensors and lazily negated ones
    lift        makes the Value of a tensor that the program did not compute
    device      where factory functions put their results unless told
    above       sees the functions that the program calls, while autograd is between them and this
    higher_order   what runs a higher-order operator, by name, where it isn't run inline
    """

    def __init__(
        self,
        builder: Builder,
        policy: Callable[[OpOverload], Rule],
        opaque_rule: Callable[[OpOverload], Rule],
        lift: Callable[[torch.Tensor], Value],
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.b = builder
        self.policy = policy
        self.opaque_rule = opaque_rule
        self.lift = lift
        self.device = device
        self.rules: dict[OpOverload, Rule] = {}
        self.autocast = False
        self.above: torch.overrides.TorchFunctionMode | None = None
        self.higher_order: Mapping[str, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True costs 10 us per operator, and nobody compiles the tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.b.has_opaque and (holds_opaque(args) or holds_opaque(kwargs.values())):
            return self.opaque_rule(func)(self, func, args, kwargs)
        if self.autocast:
            kind = kind_of(func)
            if kind is not None:
                self.autocast = False
                try:
                    args, kwargs = cast_arguments(kind, args, kwargs, self.cast)
                    return self.rule(func)(self, func, args, kwargs)
                finally:
                    self.autocast = True
        return self.rule(func)(self, func, args, kwargs)

    # -------------------------------------------------------------------------- for rules

    def rule(self, op: OpOverload) -> Rule:
        found = self.rules.get(op)
        if found is None:
            found = self.rules[op] = self.policy(op)
        return found

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Run `op` as if the program had called it."""
        if self.b.has_opaque and holds_opaque(args):
            return self.opaque_rule(op)(self, op, args, kwargs)
        return self.rule(op)(self, op, args, kwargs)

    def composite(self, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the operators that torch composes `op` of."""
        run = composite if self.b.to_size is None else composite_in_python
        with active(self):
            return run(op, args, kwargs)

    def explicit(self, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run the operators that the device-independent kernel of `op` calls."""
        with active(self):
            return explicit(op, args, kwargs)

    def cast(self, x: torch.Tensor, dtype: torch.dtype) -> Any:
        return self.call(torch.ops.aten.to.dtype, x, dtype)

    def look_at_autocast(self) -> None:
        """Take over whether autocast is on. In __torch_dispatch__ torch always says that it isn't.

        raises   TraceError if it is on for another device than the CPU
        """
        self.autocast = torch.is_autocast_enabled(self.device.type)
        if self.autocast and self.device.type != "cpu":
            raise self.b.unsupported(f"autocast on {self.device.type}")

    def value(self, x: torch.Tensor) -> Value:
        found = self.b.values.get(id(x))
        return self.lift(x) if found is None else found

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node that holds the present contents of `x`."""
        return self.b.node(self.value(x))

    def device_of(self, args: Sequence[Any]) -> torch.device:
        """Where eager puts the result of an operator on these arguments."""
        found = None
        for x in _tensors(args):
            value = self.value(x)
            if value.tensor.dim() > 0 and value.store.device.type != "cpu":
                return value.store.device
            found = found or value.store.device
        return found or self.device

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append `op` to the graph; its results are new tensors."""
        nodes, metas = self.operands(args)
        named, named_metas = self.named_operands(kwargs)
        device = self._place(named, args)
        if "device" in named:
            named_metas["device"] = device
        out = self.run_meta(op, metas, named_metas)
        node = self.b.emit(op, nodes, named, out, device)
        if isinstance(out, torch.Tensor):
            self.adopt(out, node, None, device)
        elif isinstance(out, (tuple, list)):
            for i, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.adopt(item, node, i, device)
        return out

    def adopt(
        self, out: torch.Tensor, node: fx.Node, pick: int | None, device: torch.device
    ) -> None:
        """Register `out`, the result of `node` or of its item `pick`."""
        if out.layout is not torch.strided:
            raise self.b.unsupported(f"{node.target} gives a {out.dtype} {out.layout} tensor")
        value = self.b.fresh(out, None if pick is not None else node, device)
        if pick is not None:
            value.pick = (node, pick)

    def run_meta(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.b.twins.run(op, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not is_missing_fake(error):
                raise
            if op.namespace == "aten":
                raise self.b.unsupported(f"torch has no meta kernel for {op}") from error
            raise MissingFake(
                f"{op} does not say what its results look like: it has no fake implementation",
                where=user_line(self.b.stack_trace),
                remedy=f"register a fake kernel: torch.library.register_fake({op_name(op)!r})",
            ) from error

    def literal(self, x: torch.Tensor) -> Any:
        """A new tensor with the elements of a real one that the program wrote down."""
        if id(x) in self.b.values:
            return self.same(x)
        if x.dim() == 0 and not is_opaque(x):
            fill = self.call(
                torch.ops.aten.full.default, [], x.item(), dtype=x.dtype, device=x.device
            )
            return fill
        node = self.b.constant(x)
        twin = self.b.twins.empty(x.shape, x.stride(), x.dtype, x.device)
        self.b.fresh(twin, node, x.device)
        return twin

    def view(self, op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result of a view operator: another tensor on the storage of `x`."""
        parent = self.value(x)
        out = self.b.twins.view(op, parent.tensor, *args, **kwargs)
        self.b.alias(out, parent, (op, args, kwargs))
        return out

    def same(self, x: torch.Tensor) -> torch.Tensor:
        """Another tensor that is all of `x`, as `detach` gives."""
        parent = self.value(x)
        out: torch.Tensor = torch.ops.aten.alias.default(parent.tensor)
        self.b.alias(out, parent, None)
        return out

    # -------------------------------------------------------------------------- arguments

    def operands(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments twice: tensors replaced by nodes, and by their meta twins."""
        nodes: list[Any] = []
        metas: list[Any] = []
        for x in args:
            node, meta = self._operand(x)
            nodes.append(node)
            metas.append(meta)
        return tuple(nodes), tuple(metas)

    def named_operands(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        nodes: dict[str, Any] = {}
        metas: dict[str, Any] = {}
        for name, x in kwargs.items():
            if x is None or (name == "pin_memory" and not x) or name == "layout":
                if x is not None and x is not torch.strided and name == "layout":
                    raise self.b.unsupported(f"a tensor of layout {x}")
                continue
            nodes[name], metas[name] = self._operand(x)
        return nodes, metas

    def _operand(self, x: Any) -> tuple[Any, Any]:
        if isinstance(x, torch.Tensor):
            value = self.value(x)
            return self.b.node(value), value.tensor
        if isinstance(x, (list, tuple)):
            nodes, metas = self.operands(x)
            return list(nodes), list(metas)
        return x, x

    def _place(self, named: dict[str, Any], args: Sequence[Any]) -> torch.device:
        """The device of the result: the one that is asked for, or else that of the operands."""
        if "device" not in named:
            return self.device_of(args)
        device = torch.device(named["device"])
        if device.type == "meta":  # code that asked a twin for its device
            device = named["device"] = self.device
        return device


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += _tensors(x)
    return found
