"""torch's symbolic integers (sympy expressions in a SymInt) as sizes of ours.

sympy is never imported here: a SymInt exists only where torch has imported it already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fusee.errors import TraceError
from fusee.sym import Expr, Size, Symbol, floordiv, maximum, minimum, mod, product, symbols
from fusee.sym.shape_env import ShapeEnv, size_of


def same_ints(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two rows of sizes are equal as written. Unlike `==`, leaves no guard behind."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b):
        if type(x) is int and type(y) is int:
            if x != y:
                return False
        elif x is not y and _expression(x) != _expression(y):
            return False
    return True


def _expression(x: Any) -> Any:
    """The sympy expression of a SymInt; anything else as it is."""
    return x.node.expr if isinstance(x, torch.SymInt) else x


def open_numbers(nodes: Iterable[fx.Node]) -> Iterator[torch.SymInt]:
    """The open integers that nodes of a captured graph give, and the open sizes of tensors."""
    for node in nodes:
        value = node.meta.get("example_value")
        for x in value if isinstance(value, (tuple, list)) else (value,):
            numbers: Iterable[Any] = x.shape if isinstance(x, torch.Tensor) else (x,)
            yield from (n for n in numbers if type(n) is torch.SymInt)


class TorchSymbols:
    """The symbols of one graph. Call it with an int, SymInt or Size to get the Size.

    env      ours, if the symbols are: it may find out more about a size
    raises   TraceError for an expression that has no Size: unbacked symbols, non-integers
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Symbol] = {}
        self._sizes: dict[Any, Size] = {}
        self.env: ShapeEnv | None = None

    def __call__(self, x: Any) -> Size:
        if isinstance(x, int):
            return int(x)
        if isinstance(x, Expr):
            return x if self.env is None else self.env.simplified(x)
        if not isinstance(x, torch.SymInt):
            raise TraceError(f"{x} is a {type(x).__name__}: only integers are computed from sizes")
        constant = x.node.maybe_as_int()
        if constant is not None:
            return int(constant)
        if (size := size_of(x)) is not None:
            self.env = x.node.env
            self.by_name.update({s.name: s for s in symbols(size)})
            return size
        expr = x.node.expr
        found = self._sizes.get(expr)
        if found is None:
            found = self._sizes[expr] = self.convert(expr, x.node.shape_env)
        return found

    def convert(self, expr: Any, env: Any) -> Size:
        """A size of sympy's, of symbols of this ShapeEnv of torch's."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(expr, env).expr
        operands = [self.convert(item, env) for item in expr.args]
        if expr.is_Pow:
            base, exponent = operands
            if not isinstance(exponent, int) or exponent < 0:
                raise TraceError(f"the size ({base})**({exponent}) has no form")
            return product([base] * exponent)
        combine = _OPERATORS.get(type(expr).__name__)
        if combine is None:
            raise TraceError(f"the size {expr} has no form: {type(expr).__name__} is not supported")
        total = operands[0]
        for item in operands[1:]:
            total = combine(total, item)
        return total

    def _symbol(self, expr: Any, env: Any) -> Symbol:
        name = str(expr)
        found = self.by_name.get(name)
        if found is None:
            hint = (
                env.backed_var_to_val.get(expr)
                if hasattr(env, "backed_var_to_val")
                else (env.var_to_val.get(expr))
            )
            if hint is None:
                raise TraceError(f"the size {name} depends on the values of tensors")
            bounds = env.var_to_range.get(expr)
            low = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
            found = self.by_name[name] = Symbol(name, max(low, 0), hint=int(hint))
        return found


_OPERATORS: dict[str, Callable[[Size, Size], Size]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": floordiv,
    "CleanDiv": floordiv,
    "Mod": mod,
    "PythonMod": mod,
    "Min": minimum,
    "Max": maximum,
}
