"""What PyTorch's own tests have shown when each ran compiled, as the smallest function.

source   https://github.com/pytorch/pytorch, test: test_nn.py, test_torch.py and their like
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import io
import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fusee
from tests.capturing.test_found import alike


class Skew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tril(-1) - x.tril(-1).T


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def right_inverse(self, x: Tensor) -> Tensor:
        if not torch.allclose(x, torch.ones_like(x)):
            raise ValueError("not ones")
        return x / 2


def test_parametrized_modules() -> None:
    """Their class is made by `type`, by the name of the module that asks."""

    def parts() -> Any:
        module = nn.Linear(3, 3)
        parametrize.register_parametrization(module, "weight", Skew())
        names = [name for name, _ in module.named_parameters()]
        return names, [*module._modules], type(module).__module__

    alike(parts)


def test_classes_know_who_made_them() -> None:
    def made() -> Any:
        kinds: list[Any] = [type("P", (nn.Linear,), {"a": 1}), enum.Enum("E", "A B")]
        print(end="")
        kinds += [type("Q", (), {}), enum.Enum("G", names="A B"), collections.namedtuple("R", "a")]
        return [kind.__module__ for kind in kinds]

    alike(made)


class Rows:
    """A sequence that is gone through backwards while it is made."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        for row in reversed(self):
            if torch.ones(2).sum() > row:
                print(end="")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> Any:
        return self.rows[k]


def test_backwards_through_what_is_not_yet_made() -> None:
    alike(lambda: Rows([1, 2, 3]).rows)

    def refused() -> None:
        module = nn.Linear(2, 2)
        parametrize.register_parametrization(module, "weight", Checked())

    alike(refused)

    def hint() -> Any:
        found: Any = reversed(Rows([1, 2, 3]))
        next(found)
        print(end="")
        return found.__length_hint__(), [*found], found.__length_hint__()

    alike(hint)


def test_attributes_of_ordered_dicts() -> None:
    """A module's state has its versions as one, through copies and breaks."""

    def copied(state: Any) -> Any:
        others = copy.deepcopy(state), copy.copy(state), state.copy()
        others[0]["more"] = 1
        return [(list(x), vars(x).keys(), vars(x).get("a") is state.a) for x in others]

    state: Any = collections.OrderedDict(k=torch.ones(2))
    state.a = [1]
    alike(copied, state)

    def broken() -> Any:
        state: Any = copy.deepcopy(nn.Linear(2, 2).state_dict())
        print(end="")
        state["more"] = torch.ones(1)
        return [*state], [*state._metadata]

    alike(broken)


def test_places_by_sizes_in_what_was_put_together() -> None:
    """What of a tensor is written part by part is read by a size that is open."""

    def fn(groups: int, sizes: tuple[int, ...]) -> Any:
        x = torch.zeros(sizes)
        nn.init.dirac_(x, groups)
        return torch.nonzero(x).size(0), x.sum()

    compiled = fusee.compile(fn)
    for groups, sizes in ((1, (4, 5, 3)), (2, (4, 5, 2)), (2, (6, 2, 1)), (2, (6, 2, 5))):
        assert compiled(groups, sizes) == fn(groups, sizes)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("kind", ["function", "views", "hook"])
def test_refused_writes_are_handled(kind: str) -> None:
    """Autograd refuses them for where a tensor comes from, which a graph is not told."""

    def fn(x: Tensor) -> Any:
        module = nn.Identity()
        module.register_full_backward_hook(lambda *_: None)
        made: dict[str, Any] = {"function": Through.apply, "hook": module}
        made["views"] = lambda x: x.unbind(0)[0]
        y = made[kind](x * 2)
        print(end="")
        try:
            y.add_(1)
        except RuntimeError as error:
            return str(error)
        return y.detach()

    alike(fn, torch.ones(2, 3, requires_grad=True))


class Patched:
    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before, count = F.gelu, self.count
        F.gelu = lambda x: x + count  # type: ignore[assignment,misc]

    def __exit__(self, *_: object) -> None:
        F.gelu = self.before


def _by_attribute(x: Tensor, n: int) -> Any:
    module: Any = torch
    before, module.relu = torch.relu, lambda x: x + n
    try:
        return torch.relu(x)
    finally:
        module.relu = before


def _by_mock(x: Tensor, n: int) -> Any:
    with mock.patch.object(F, "relu", lambda x: x + n):
        y = F.relu(x)
        print(end="")
        return F.relu(x) + y


def _by_context(x: Tensor, n: int) -> Any:
    with Patched(n):
        y = F.gelu(x)
        print(end="")
        return F.gelu(x) * y


def _of_python(x: Tensor, n: int) -> Any:
    with mock.patch.object(math, "sqrt", lambda _: n):
        return x * math.sqrt(4)


def _called(x: Tensor, n: int) -> Any:
    with mock.patch("torch.relu", new=mock.MagicMock(return_value=x * n)) as found:
        return torch.relu(x), found.called


def test_properties_of_modules() -> None:
    """torch.utils.deterministic is a module with a class of its own."""

    def fn(x: Tensor) -> Any:
        found = [module.fill_uninitialized_memory]
        module.fill_uninitialized_memory = not found[0]
        found.append(module.fill_uninitialized_memory)
        return x * 2, found

    module: Any = torch.utils.deterministic
    before = module.fill_uninitialized_memory
    compiled, x = fusee.compile(fn), torch.ones(2)
    try:
        for _ in range(4):
            assert compiled(x)[1] == fn(x)[1][::-1]
            fn(x)
    finally:
        module.fill_uninitialized_memory = before


def test_typed_storages_and_orders_of_axes() -> None:
    def storage() -> Any:
        found = torch.IntStorage([1, 2])
        return found.dtype, found.tolist()

    def order(x: Tensor) -> Any:
        return x.dim_order(ambiguity_check=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alike(storage)
    alike(order, torch.ones(2, 2, 1, 2))
    alike(order, torch.ones(2, 3, 4))


def test_buffers_made_in_a_function() -> None:
    class Kept(nn.Module):
        def __init__(self, x: Tensor) -> None:
            super().__init__()
            self.kept = nn.Buffer(x)
            self.other = nn.Buffer(torch.ones(2), persistent=False)

    def fn(x: Tensor) -> Any:
        module, one = Kept(x), nn.Buffer(x)
        return [*module._buffers], [*module.state_dict()], isinstance(one, nn.Buffer), module.kept

    alike(fn, torch.ones(2))


def test_gradients_of_what_has_no_elements() -> None:
    def fn() -> Any:
        x = torch.randn(0, 10, 10, requires_grad=True)
        y, indices = F.max_pool1d(x, 2, return_indices=True)
        F.max_unpool1d(y.requires_grad_(), indices, [2]).sum().backward()
        return x.grad

    assert fusee.compile(fn)().shape == (0, 10, 10)


class Mapped(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x * 2 + info.batch_size, 0


class Unmapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("kind", [Mapped, Unmapped])
def test_functions_that_are_mapped_by_a_rule_of_their_own(kind: Any) -> None:
    alike(lambda x: torch.vmap(kind.apply)(x), torch.ones(3))


def test_warnings_of_torch_are_of_the_programs_line() -> None:
    """Each once where it is heard, and never of a line of ours."""

    def heard(x: Tensor, y: Tensor) -> Any:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss = F.mse_loss(x, y)
        return loss, [(str(one.message), one.filename) for one in found]

    def large(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y).exp() + F.mse_loss(x * 2, y).sin()

    x, y = torch.ones(10, 1), torch.ones(10)
    assert fusee.compile(heard)(x, y) == heard(x, y)  # and not again, if kernels compute it
    x, y = torch.ones(1000, 1), torch.ones(1000)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fusee.compile(large)(x, y)
    assert [one.filename for one in found] == [__file__] * 2


@pytest.mark.parametrize("fn", [_by_attribute, _by_mock, _by_context, _of_python, _called])
def test_functions_of_torch_that_are_replaced(fn: Callable[..., Any]) -> None:
    compiled, x = fusee.compile(fn), torch.tensor([-1.0, 1.0])
    for n in (1, 2, 3):
        torch.testing.assert_close(compiled(x, n), fn(x, n))
    torch.testing.assert_close(F.gelu(x), torch.ops.aten.gelu(x))


def test_gradients_of_mish_round_once() -> None:
    x = torch.linspace(-8, 8, 4096, dtype=torch.bfloat16, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    fusee.compile(F.mish)(x).sum().backward()
    F.mish(exact).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, exact.grad, rtol=2**-8, atol=1e-30, check_dtype=False)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_what_a_transform_leaves_behind() -> None:
    """A tensor that escapes from `grad` has no memory that can be asked for."""

    def fn(x: Tensor) -> Any:
        escaped: list[Tensor] = []

        def inner(x: Tensor) -> Tensor:
            escaped.append(x.sin())
            return escaped[-1]

        torch.func.grad(inner)(x)
        return escaped[0].sum()

    assert fusee.compile(fn)(torch.ones(())) == torch.ones(()).sin()


def test_hooks_unpack_what_a_node_of_autograd_shows() -> None:
    """Nothing of the program's is called where a capture looks at such a node."""

    def fn() -> Any:
        kept: list[Tensor] = []

        def pack(x: Tensor) -> int:
            kept.append(x)
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: kept[k] * 2):
            y = torch.ones(3, requires_grad=True).exp()
            return y.grad_fn._saved_result, len(kept)  # type: ignore[union-attr]

    alike(fn)


def _put_list(x: Tensor, i: Tensor) -> Any:
    x[0] = -1
    return x[[0]]


def _put_by_tensor(x: Tensor, i: Tensor) -> Any:
    x[i] = -1
    return x[0] * 1, x[0:1].clone()


def _read_by_tensor(x: Tensor, i: Tensor) -> Any:
    x[0] = -1
    return x[i], x.index_select(0, i)


@pytest.mark.parametrize("fn", [_put_list, _put_by_tensor, _read_by_tensor])
def test_one_element_is_written_and_read_by_an_index(fn: Callable[..., Any]) -> None:
    """Two loops of one point each are one kernel only if one reads what the other writes there."""
    i = torch.tensor([0])
    torch.testing.assert_close(fusee.compile(fn)(torch.ones(4), i), fn(torch.ones(4), i))


def test_a_byte_without_axes_is_a_mask() -> None:
    for value in (0, 1):
        alike(lambda x, b: x[b], torch.ones(2, 3), torch.tensor(value, dtype=torch.uint8))


def _put(w: Tensor) -> Tensor:
    z = torch.ones(3, 4)
    z[:, 0] = w
    return z


def _add_to_several(w: Tensor) -> Tensor:
    several = [torch.ones(3, 4), torch.ones(2)]
    torch._foreach_add_(several, w.sum())
    return several[0].sum() + several[1].sum()


@pytest.mark.parametrize("fn", [_put, _add_to_several])
def test_leaves_that_are_made_and_written_into_others(fn: Callable[..., Any]) -> None:
    def whole() -> Any:
        w = torch.ones(1, requires_grad=True)
        fn(w).sum().backward()
        return w.grad

    alike(whole)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "index",
    [
        [[0, 4], [2, 2]], [[0, 1]], [[[0, 1]]], [slice(None), [1, 3]], [None, 0], [...],
        [[True, False, True, False, True]], [torch.tensor([0, 1]), 1], [0, 1], [[0] * 3] * 2,
    ],
    ids=str,
)  # fmt: skip
def test_lists_that_indexing_takes_for_tuples(index: Any) -> None:
    def put(x: Tensor) -> Tensor:
        x = x * 1
        x[index] = 7
        return x

    x = torch.arange(125.0).view(5, 5, 5)
    torch.testing.assert_close(fusee.compile(lambda x: x[index] * 1)(x), x[index] * 1)
    torch.testing.assert_close(fusee.compile(put)(x), put(x))


def test_keywords_without_a_default_may_be_none() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    sort = fusee.compile(lambda x: x.sort(stable=None).values * 2)
    div = fusee.compile(lambda x: torch.div(x, 2, rounding_mode=None))
    assert sort(x).tolist() == [2.0, 4.0, 6.0]
    assert div(x).tolist() == [1.5, 0.5, 1.0]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_writes_between_the_elements_of_a_view() -> None:
    """as_strided_ reaches memory that no element of the input has; kernels would not write it."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.as_strided_((4,), (1,))
        doubled = y * 2
        x.add_(1)
        return doubled

    memories = [torch.arange(8.0) for _ in range(2)]
    for call, memory in zip((fn, fusee.compile(fn)), memories):
        call(memory[::2], torch.ones(4))
    assert torch.equal(*memories)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_an_error_behind_an_optimizers_first_step() -> None:
    """The step takes back the state that it has begun, which guards would look at."""
    layer = nn.Linear(4, 4)
    adam = torch.optim.Adam(layer.parameters(), lr=0.1)

    def fn(x: Tensor) -> Any:
        layer(x).sum().backward()
        adam.step()
        return int("no number")

    compiled = fusee.compile(fn)
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            compiled(torch.ones(4))
    assert [int(state["step"]) for state in adam.state.values()] == [3, 3]


def test_deep_copies_of_what_lies_on_a_tensor() -> None:
    def of_input(x: Any) -> Any:
        one, other = copy.deepcopy([x, x.grad])
        return other, one.grad is other, one.note, one.note is x.note

    def of_result() -> Any:
        x = torch.ones(3)
        x.note = [1]  # type: ignore[attr-defined]
        y = copy.deepcopy(x)
        return y.note, y.note is x.note  # type: ignore[attr-defined]

    x = torch.zeros(3)
    x.grad, x.note = torch.ones(3), ["a"]  # type: ignore[attr-defined]
    alike(of_input, x)
    alike(of_result)


def test_all_attributes_of_a_result() -> None:
    def fn(is_first: bool) -> Any:
        x, y = torch.ones(3), torch.zeros(3)
        x.note = 1  # type: ignore[attr-defined]
        own = vars(x)
        own["more"], size = 2, len(own)
        y.__dict__.update(note=own)
        return (own, x, y, size) if is_first else (x, y, own, size)

    compiled = fusee.compile(fn)
    for is_first in (True, False):
        *_, size = found = compiled(is_first)
        own = next(part for part in found if isinstance(part, dict))
        x, y = (part for part in found if isinstance(part, Tensor))
        assert own == {"note": 1, "more": 2} and size == 1
        assert vars(x) is own and y.note is own  # type: ignore[attr-defined]


def test_an_empty_out_lies_as_the_result() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        z = torch.ones(3)
        out, other = torch.empty(0), torch.empty(0, dtype=torch.bool)
        torch.add(x, z, out=out)
        torch.lt(z, y, out=other)
        return out, out.stride(), other, other.stride(), torch.exp(y, out=torch.empty(0)).stride()

    x, y = torch.randn(4, 2, 3).permute(1, 0, 2), torch.randn(2, 3, 4).transpose(1, 2)
    found = fusee.compile(fn)(x, y)
    assert found[1::2] == fn(x, y)[1::2] and found[0].stride() == found[1] == (3, 6, 1)
    assert found[4] == (12, 1, 4)


def test_hooks_in_a_tensors_own_dict() -> None:
    def fn(x: Tensor) -> Any:
        x._backward_hooks = collections.OrderedDict()
        x._backward_hooks[7] = lambda grad: grad * 10
        handle = x.register_hook(lambda grad: grad + 1)
        count = len(x._backward_hooks)
        (x * 2).sum().backward()
        handle.remove()
        return x.grad, count, len(x._backward_hooks)

    results = [call(torch.ones(3, requires_grad=True)) for call in (fn, fusee.compile(fn))]
    assert str(results[0]) == str(results[1])


def test_asking_a_view_for_its_node_makes_it_anew() -> None:
    """Without this a hook would go on the node of before."""

    def fn() -> list[Tensor]:
        heard: list[Tensor] = []
        base = torch.tensor([1.0], requires_grad=True).clone()
        view, other = base[:], base[:]
        print(end="")
        view.mul_(2)
        other.grad_fn  # noqa: B018
        other.register_hook(heard.append)
        (view + other).sum().backward()
        return heard

    assert fusee.compile(fn)() == fn() == [torch.ones(1)]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_operators_that_take_no_tensors_run_once_in_each_call() -> None:
    library = torch.library.Library("fusee_bare", "FRAGMENT")
    ran: list[str] = []

    def define(schema: str, result: Callable[[], Any]) -> Any:
        name = schema.partition("(")[0]
        library.define(schema)

        def run() -> Any:
            ran.append(name)
            return result()

        library.impl(name, run, "CompositeImplicitAutograd")
        return getattr(torch.ops.fusee_bare, name)

    @torch.library.custom_op("fusee_bare::known", mutates_args=())
    def known(x: int) -> Tensor:
        ran.append("known")
        return torch.ones(2) * x

    @known.register_fake
    def of_known(x: int) -> Tensor:
        return torch.empty(2)

    operators: dict[str, Callable[[], Any]] = {
        "nothing": define("nothing() -> None", lambda: None),
        "counted": define("counted() -> int", lambda: len(ran)),
        "made": define("made() -> Tensor", lambda: torch.ones(2)),
        "known": lambda: known(3),
    }

    def call(operator: Callable[[], Any]) -> Any:
        return operator()

    for name, operator in operators.items():
        again = fusee.compile(functools.partial(call, operator))
        for _ in range(3):
            ran.clear()
            found = again()
            assert ran == [name]
            assert name != "counted" or found == 1


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_tensors_and_calls_within_functionalization() -> None:
    """A wrapper in C++ has no memory: kernels that were given one wrote to address 0."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        x.add_(1)
        return y, torch.ones(2).view(1, 2).squeeze_()

    compiled = fusee.compile(fn)
    for call in (compiled, fn, compiled):
        assert [x.tolist() for x in call(torch.ones(3))] == [[2] * 3, [1, 1]]
        x = torch._to_functional_tensor(torch.ones(3))
        torch._enable_functionalization(reapply_views=True)
        try:
            found = call(x)
        finally:
            torch._disable_functionalization()
        torch._sync(x)  # type: ignore[attr-defined]
        assert torch._from_functional_tensor(x).tolist() == [2] * 3
        for y in found:
            torch._sync(y)  # type: ignore[attr-defined]
        assert [torch._from_functional_tensor(y).sum().item() for y in found] == [6, 2]


@torch.jit.script
def tripled(x, times: float):  # type: ignore[no-untyped-def]
    return x * times


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:.*torch.jit")
def test_scripted_functions_refuse_what_they_do_not_declare() -> None:
    call: Any = fusee.compile(lambda x, times: tripled(x, times) + 1)
    assert call(torch.ones(2), 3.0).tolist() == [4.0, 4.0]
    assert call(torch.ones(2, dtype=torch.int64), 3).dtype is torch.float32  # it becomes a float
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor"):
        call("text", 3.0)


@torch.jit.script
def paired(  # type: ignore[no-untyped-def]
    pair: tuple[Tensor, float], added: list[Tensor], table: dict[str, list[float]]
):
    added.append(pair[0] * pair[1])
    table["more"] = [1.0]
    return added[0] + added[1], added, table, pair


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_functions_get_copies_of_the_containers_that_they_declare() -> None:
    def fn(x: Tensor, added: list[Tensor], table: dict[str, list[float]]) -> Any:
        return paired([x, 2], added, table), paired((x, 3.0), (x,), {"own": [2]}), added, table

    fast = fusee.compile(fn, fullgraph=True)
    for size in (2, 3):
        given: Any = torch.ones(size), [torch.ones(size)], {"one": [2.0, 3.0]}
        assert repr(fast(*given)) == repr(fn(*given))
        assert len(given[1]) == len(given[2]) == 1


class Scripted(torch.jit.ScriptModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    @torch.jit.script_method  # type: ignore[attr-defined]
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x * self.weight


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:.*torch.jit")
def test_torchscript_within_a_compiled_function() -> None:
    """What scripts and traces reads weights and frames: it runs between two graphs."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + 1

    def fn(x: Tensor) -> Any:
        one, other = Scripted(), Local()
        scripted, traced = torch.jit.script(other), torch.jit.trace(other, (x,))
        saved = io.BytesIO()
        torch.jit.save(scripted, saved)
        return one(x), scripted(x) - other(x), traced(x) - other(x), len(saved.getvalue()) > 0

    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        first, second, third, is_saved = fusee.compile(fn)(x)
        assert torch.equal(first, x) and is_saved
        assert not second.any() and not third.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_places_of_repeated_rows_have_the_dtype_of_the_counts(dtype: torch.dtype) -> None:
    def fn(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return x.repeat_interleave(counts, dim=0), torch.repeat_interleave(counts) + 1

    given = torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 3], dtype=dtype)
    for got, want in zip(fusee.compile(fn)(*given), fn(*given), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)


def test_parts_put_into_a_tensor() -> None:
    """By an operator that is called without all arguments, or with a source that does not fit."""

    def fits(x: Tensor) -> Tensor:
        y = torch.slice_scatter(torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.int64))
        y = torch.slice_scatter(y, x[:2], 0, 1)
        return torch.slice_scatter(y, x[:, :2], 1, end=2)

    def misfit(x: Tensor, n: int, is_used: bool) -> Any:
        told: list[Any] = []
        for put in (
            lambda src: torch.slice_scatter(x, src),
            lambda src: torch.slice_scatter(x, src[:, None].expand(n, 3)),
            lambda src: torch.select_scatter(x, src, 0, 0),
            lambda src: torch.diagonal_scatter(x, src),
        ):
            try:
                found = put(torch.ones(n))
                told.append(found * 2 if is_used else None)
            except RuntimeError as error:
                told.append(str(error))
        return told

    x = torch.arange(12.0).view(3, 4)
    alike(fits, x)
    for n in (1, 3, 4, 9):
        for is_used in (True, False):
            alike(misfit, x, n, is_used)


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # a call that warns would run in Python
def test_complex_numbers_where_16_bit_floats_are_the_default() -> None:
    def fn() -> Any:
        made = torch.full((2,), 1j)
        return made, str(made.dtype), str(made.real.dtype)

    torch.set_default_dtype(torch.float16)
    try:
        alike(fn)
    finally:
        torch.set_default_dtype(torch.float32)


class Modifiers:
    """As torch.jit has them: told apart by `is`."""

    IGNORE = "ignore (leave as it is)"
    COUNT = 12345678


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_texts_and_numbers_that_are_told_apart_by_is() -> None:
    def fn(x: Tensor) -> Any:
        made: Any = lambda: None  # noqa: E731
        made.modifier, made.count = Modifiers.IGNORE, Modifiers.COUNT
        text = Modifiers.IGNORE
        y = x * 2
        print(end="")
        return made, text is Modifiers.IGNORE, y

    compiled = fusee.compile(fn)
    for _ in range(2):
        made, is_it, _ = compiled(torch.ones(2))
        assert is_it and made.modifier is Modifiers.IGNORE and made.count is Modifiers.COUNT


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:.*torch.jit")
def test_attributes_that_cpp_gives() -> None:
    """The class has a __getattr__, which is no function of Python's."""

    def fn(x: Tensor) -> Tensor:
        unit: Any = torch.jit.CompilationUnit("def f(x):\n    return x + 1\n")
        try:
            y: Tensor = unit.f(x)
        except AttributeError:
            y = x
        return y

    assert fusee.compile(fn)(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fn", [lambda x: x.var(0, keepdim=True), lambda x: x.std(0, True, True)])
def test_asking_for_refusals_tells_nothing(fn: Callable[[Tensor], Tensor]) -> None:
    """ATen would be asked with one element, of whose variance it warns."""
    x = torch.rand(4, 3)
    torch.testing.assert_close(fusee.compile(lambda x: fn(x) * 2)(x), fn(x) * 2)


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        print(end="")
        return x * 3


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [Static, lambda: torch.jit.trace(Checked(), torch.ones(2))])
def test_modules_whose_forward_is_no_plain_function(make: Callable[[], Any]) -> None:
    """TorchScript's raises where a class is asked for it, and a static method takes no module."""
    module, x = make(), torch.ones(2)

    def fn(x: Tensor) -> Any:
        y = module(x)
        print(end="")
        return module(y)

    assert torch.equal(fusee.compile(fn)(x), fn(x))
    assert torch.equal(fusee.compile(module)(x), module(x))
