"""Parameters, and other tensors at which autograd begins, that the program itself makes."""

# Programs under test: mistakes are meant.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable

import fusee
from tests.capturing.same import Traced

LINEAR = nn.Linear(3, 3)


def a_module(x):
    made = nn.Linear(3, 2)
    nn.init.ones_(made.weight)
    nn.init.zeros_(made.bias)
    return made(x * 2).sum(), made


def trained(x):
    p = nn.Parameter(x * 2)
    (p * x).sum().backward()
    return p.grad, p


def frozen(x):
    return nn.Parameter(x * 2, requires_grad=False), nn.Parameter(x), nn.Parameter()


def shares_memory(x):
    data = x * 2
    p = nn.Parameter(data)
    with torch.no_grad():
        p.add_(1)
    return data, p, p.requires_grad, p.is_leaf, isinstance(p, nn.Parameter), type(p)


def a_view(x):
    leaf = torch.zeros_like(x).requires_grad_()
    with torch.no_grad():
        view = leaf[:, :1]
    return view, view + 1


def a_view_that_is_used(x):
    leaf = torch.zeros_like(x).requires_grad_()
    with torch.no_grad():
        return leaf[:, :1].reshape(2) + 1


def of_integers(x):
    try:
        return nn.Parameter(torch.zeros(3, dtype=torch.int64))
    except RuntimeError as error:
        return str(error), x * 2


def asked_of_integers(x):
    y = x * 2
    try:
        return y.int().requires_grad_()
    except RuntimeError as error:
        return str(error), y


def on_and_off(x):
    y = (x * 2).detach().requires_grad_()
    y.requires_grad = False
    return y * 3


def an_input(x):
    x.requires_grad_()
    return x * 2


def several_times(x):
    p = nn.Parameter(x.clone())
    listed = [p, p]
    return listed, listed[0] is listed[1]


def registered(x):
    LINEAR.more = nn.Parameter(x.sum(0))
    return LINEAR.more * 1


def its_own_data(x):
    p = nn.Parameter(x * 2)
    p.data = p.data
    LINEAR.weight.data = LINEAR.weight.data
    return LINEAR.to(torch.float32)(x), p


def dtypes_of_grads(x):
    p = nn.Parameter(x * 2)
    before, p.grad_dtype = p.grad_dtype, torch.float16
    return before, p.grad_dtype


def asked_of_what_has_a_history(x):
    y = LINEAR.weight * 2
    made = torch.asarray(y, requires_grad=True)
    by_name = torch.asarray(obj=y * 3, requires_grad=True)
    return made, torch.asarray(x * 2, requires_grad=True), made * 2, by_name


def other_data(x):
    y = x * 2
    y.data = torch.zeros(2, 3)
    return y + 1


def old_variables(x):
    v, w = Variable(x * 2), Variable(data=torch.ones(3), requires_grad=False)
    v.add_(1)
    Variable(x.detach()).mul_(2)
    return v * w + Variable(x), isinstance(v, Variable), isinstance(x, Variable), Variable()


def an_old_variable_that_is_a_leaf(x):
    z = Variable(x * 2, requires_grad=True)
    (z * z).sum().backward()
    return z.grad, z


def of_no_tensor(x):
    y = x * 2
    try:
        return Variable([1, 2])
    except TypeError as error:
        return y + 1, str(error)


PROGRAMS = [
    old_variables, an_old_variable_that_is_a_leaf, of_no_tensor,
    a_module, trained, frozen, shares_memory, a_view, a_view_that_is_used, of_integers,
    asked_of_integers, on_and_off, an_input, several_times, registered, its_own_data, other_data,
    dtypes_of_grads, asked_of_what_has_a_history,
]  # fmt: skip
# Without gradients; with them the use of a leaf ends a graph, and the next one has it as an input.
BROKEN = {
    an_old_variable_that_is_a_leaf,
    of_no_tensor,
    trained,
    a_view,
    of_integers,
    an_input,
    other_data,
    dtypes_of_grads,
}


def shown(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        leads = x.requires_grad, x.is_leaf, x.grad_fn is None
        return type(x), x.detach().tolist(), leads
    if isinstance(x, nn.Module):
        return {name: shown(p) for name, p in x.named_parameters()}
    return [shown(item) for item in x] if isinstance(x, (tuple, list)) else x


def outcome(program: Callable[..., Any], is_grad: bool) -> Any:
    x = torch.arange(6.0).reshape(2, 3)
    try:
        with torch.set_grad_enabled(is_grad):
            return shown((program(x), x))
    except RuntimeError as error:
        return type(error), str(error)
    finally:
        LINEAR._parameters.pop("more", None)


@pytest.mark.parametrize("is_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program: Callable[..., Any], is_grad: bool) -> None:
    want, traced = outcome(program, is_grad), Traced(program)
    for compiled in (traced, fusee.compile(program)):
        for _ in range(2):
            assert outcome(compiled, is_grad) == want
    if not is_grad and program not in BROKEN:
        assert len(traced.graphs) == 1 and not traced.stops


def test_requires_grad_where_it_says_so_already() -> None:
    def set_it(x):
        x.requires_grad = True
        return x

    def set_a_view(x):
        return x.requires_grad_(True)

    for fn, made in ((set_it, lambda x: x.double()), (set_a_view, lambda x: x[:])):
        told = []
        for run in (fn, Traced(fn)):
            base = torch.ones(3, requires_grad=fn is set_it)
            x = made(base)
            base.requires_grad_()
            try:
                run(x).sum().backward()
            except RuntimeError as error:
                told.append(str(error))
            told.append(str(x.grad if x.is_leaf else base.grad))
        assert told[: len(told) // 2] == told[len(told) // 2 :]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_what_a_parameter_has_of_its_own() -> None:
    def told(x: torch.Tensor) -> Any:
        twin = x.__deepcopy__({})
        made, state = x.__reduce_ex__(2)
        return x.__repr__(), type(twin), twin.requires_grad, made.__name__, len(state)

    def of_one_that_is_made(x: torch.Tensor) -> Any:
        return told(nn.Parameter(x.detach() * 2))

    for x in (nn.Parameter(torch.ones(2)), torch.ones(2)):
        for fn in (told, of_one_that_is_made):
            assert fusee.compile(fn)(x) == fn(x)
