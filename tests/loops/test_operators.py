"""An operator is added by one row: all that knows operators follows from it."""

from __future__ import annotations

import subprocess
import sys

# Run in a process of its own: the tables are read when they are imported.
PROGRAM = """
import torch
from fusee.loops import op, where
from fusee.loops.operators import exp, row

library = torch.library.Library("mine", "DEF")
library.define("bent(Tensor x, float slope=2.0) -> Tensor")
library.define("bent_backward(Tensor grad, Tensor x, float slope) -> Tensor")


def bent(x, slope=2.0):
    return torch.where(x > 0, x, slope * torch.exp(x) - slope)


def bent_backward(grad, x, slope):
    return torch.where(x > 0, grad, grad * slope * torch.exp(x))


library.impl("bent", bent, "CPU")
library.impl("bent_backward", bent_backward, "CPU")


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        with torch._C._AutoDispatchBelowAutograd():
            ctx.slope = slope
            ctx.save_for_backward(x)
            return torch.ops.mine.bent(x, slope)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.mine.bent_backward(grad, *ctx.saved_tensors, ctx.slope), None


library.impl("bent", lambda x, slope=2.0: Bent.apply(x, slope), "Autograd")

# ---------------------------------------------------------------------- what an engineer writes

row(
    "mine::bent",
    lambda x, slope: where(x > 0, x, slope * exp(x) - slope),
    gradient=lambda grad, x, slope: where(x > 0, grad, grad * slope * exp(x)),
    work=16,
    engines="openvino",
)

# ---------------------------------------------------------------------- what follows

import fusee
import fusee.log
from fusee.autodiff import min_cut
from fusee.backends.openvino.engine import OPERATORS
from fusee.fake.rules import results
from fusee.backends.native import supported

ops = torch.ops.mine.bent.default, torch.ops.mine.bent_backward.default
x = torch.randn(4, 6).t().requires_grad_()
assert set(ops) <= supported()
assert all(min_cut.kind_of(op) is min_cut.Kind.POINTWISE for op in ops)
assert ops[0] in OPERATORS and ops[1] not in OPERATORS
for op, args in zip(ops, ((x,), (x, x, 2.0))):
    found = results(op, args, {})
    assert (tuple(found.size), tuple(found.stride), found.dtype) == ((6, 4), (1, 6), torch.float32)

texts = []
fusee.log.subscribe(lambda record: texts.append(record.text), "loops")
compiled = fusee.compile(lambda x: torch.ops.mine.bent(x, 3.0) * 2)
want = torch.ops.mine.bent(x, 3.0) * 2
got = compiled(x)
grads = [torch.autograd.grad(y.sum(), x)[0] for y in (got, want)]
for mine, eager in ((got, want), grads):
    assert mine.stride() == eager.stride()
    torch.testing.assert_close(mine, eager)
assert len(texts) == 2 and all("exp(" in x and "= mine." not in x for x in texts), texts
"""


def test_an_operator_with_its_gradient_is_one_row() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
