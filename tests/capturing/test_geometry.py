"""Writes that change a tensor's shape, strides or memory, and writes to memory that is shared."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from fusee.errors import FuseeWarning
from fusee.fake.layouts import meet
from tests.capturing.same import Traced

Program = Callable[..., Any]
Inputs = Callable[[], tuple[Tensor, ...]]


def _seen(run: Program, inputs: Inputs) -> tuple[Any, ...]:
    """What a call shows: results and arguments with their layout, aliases, and torch's warnings."""
    torch.manual_seed(0)
    args = inputs()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = run(*args)
        except RuntimeError as error:
            return (str(error).splitlines()[0],)
    results = result if isinstance(result, (tuple, list)) else (result,)
    # TorchDynamo says it once more, of its stand-ins
    told = sorted({str(w.message) for w in said if w.category is UserWarning} - _of_dynamo(said))
    tensors = [x for x in (*results, *args) if isinstance(x, Tensor)]
    places = [x.untyped_storage().data_ptr() for x in tensors]
    rows = [
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.untyped_storage().nbytes())
        for x in tensors
    ]
    values = [x.detach().clone() for x in tensors]
    return (
        rows,
        [places.index(p) for p in places],
        [id(x) in map(id, args) for x in results],
        (told),
        values,
    )


def _of_dynamo(said: list[warnings.WarningMessage]) -> set[str]:
    return {str(w.message) for w in said if "it had shape torch.Size(" in str(w.message)}


def _check(
    run: Program,
    inputs: Inputs,
    routes: tuple[str, ...] = ("compile", "stock"),
    dynamic: bool | None = None,
) -> None:
    want = _seen(run, inputs)
    for route in routes:
        torch._dynamo.reset()
        compiled: Program = (
            fusee.compile(run, dynamic=dynamic, options={"prices": False})
            if route == "compile"
            else torch.compile(run, backend="fusee")
        )
        for _ in range(2):
            got = _seen(compiled, inputs)
            assert got[:-1] == want[:-1], route
            if len(want) > 1:
                torch.testing.assert_close(got[-1], want[-1])
            else:
                assert got == want


def _x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)))


OUTS: dict[str, tuple[Program, Inputs]] = {
    "empty": (lambda x, o: torch.sin(x, out=o), lambda: (_x(), torch.zeros(0))),
    "small": (lambda x, o: torch.sin(x, out=o), lambda: (_x(8, 8), torch.zeros(3))),
    "large": (lambda x, o: torch.sin(x, out=o), lambda: (_x(), torch.zeros(5, 5))),
    "same": (lambda x, o: torch.sin(x, out=o), lambda: (_x(), torch.zeros(4, 4))),
    "turned": (lambda x, o: torch.sin(x, out=o), lambda: (_x(), torch.zeros(4, 4).t())),
    "view": (lambda x, o: torch.sin(x, out=o), lambda: (_x(), torch.zeros(8, 8)[:2, :2])),
    "double": (lambda x, o: torch.sin(x, out=o), lambda: (_x(), torch.zeros(0).double())),
    "used": (
        lambda x, o: (x + 1, torch.mm(x, x, out=o) * 2, o + 1),
        lambda: (_x(), torch.zeros(0)),
    ),
    "pair": (
        lambda x, o, i: torch.sort(x, 0, out=(o, i)),
        lambda: (_x(), torch.zeros(2), torch.zeros(0, dtype=torch.int64)),
    ),
    "no operand": (lambda o: torch.arange(5, out=o), lambda: (torch.zeros(0),)),
    "operator": (lambda x, o: torch.ops.aten.sin.out(x, out=o) + 1, lambda: (_x(), torch.zeros(0))),
    "intermediate": (lambda x: torch.sin(x, out=torch.zeros(0)), lambda: (_x(),)),
    "small intermediate": (lambda x: torch.sin(x, out=torch.zeros(3)), lambda: (_x(),)),
    "empty view": (lambda x, y: (torch.sin(x, out=y[:0]), y + 1), lambda: (_x(), _x(8, 8))),
    "view of intermediate": (lambda x: _over(x * 1), lambda: (_x(),)),
    "twice": (
        lambda x, o: [torch.mul(x, k, out=o).sum() for k in (1, 2)],
        lambda: (_x(), torch.zeros(0)),
    ),
}


def _over(x: Tensor) -> tuple[Tensor, Tensor]:
    """An empty view grows over the memory that it is a view of."""
    return torch.sin(torch.ones(4), out=x.view(-1)[:0]), x + 1


@pytest.mark.parametrize("case", OUTS)
def test_out_is_resized_as_eager_does(case: str) -> None:
    stock = case in ("empty", "small", "used", "view of intermediate")
    _check(*OUTS[case], routes=("compile", "stock") if stock else ("compile",))


def test_no_neighbour_is_written_to() -> None:
    kept = [torch.zeros(3) for _ in range(200)]
    with pytest.warns(UserWarning, match="resized"):
        fusee.compile(lambda x, o: torch.sin(x, out=o))(torch.randn(8, 8), kept[100])
    assert kept[100].shape == (8, 8)
    assert not any(x.any() for k, x in enumerate(kept) if k != 100)


def test_rest_of_the_graph_stays_compiled() -> None:
    def run(x: Tensor, o: Tensor) -> Tensor:
        y = torch.tanh(x) * 2
        torch.sin(y, out=o)
        return o.exp() + y

    compiled = fusee.compile(run)
    compiled(torch.randn(128, 128), torch.zeros(0))
    kernels = [row.origin for report in fusee.report(compiled) for row in report.kernels]
    assert any("tanh" in origin for origin in kernels) and any("exp" in o for o in kernels)


def _turned(name: str, *args: Any) -> Program:
    def run(x: Tensor) -> Tensor:
        y = torch.sin(x)
        getattr(x, name)(*args)
        return x + 1 if name in ("squeeze_", "unsqueeze_") else (x * 2, y)  # type: ignore[return-value]

    return run


TURNS: dict[str, tuple[Any, ...]] = {
    "t_": (), "transpose_": (0, 1), "swapaxes_": (0, 1), "unsqueeze_": (0,), "squeeze_": (),
    "resize_": (2, 2), "as_strided_": ((2, 2), (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("inside", [False, True])
def test_geometry_is_changed_in_place(name: str, inside: bool) -> None:
    run = _turned(name, *TURNS[name])
    program = (lambda x: run(x * 1)) if inside else run
    _check(program, lambda: (_x(1, 3) if name == "squeeze_" else _x(2, 3),), routes=("compile",))


@pytest.mark.parametrize("name", ["unsqueeze_", "as_strided_"])
def test_what_is_turned_may_have_two_names(name: str) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        getattr(y, name)(*TURNS[name])
        return x.repeat(2, 1, 1)

    compiled = fusee.compile(run, backend="eager")
    for is_same in (False, True, False):
        found = []
        for each in (run, compiled):
            x = torch.arange(6.0).reshape(2, 3)
            found.append(each(x, x if is_same else x.clone()))
        assert torch.equal(*found)


def test_memory_is_exchanged_in_place() -> None:
    def grown(x: Tensor) -> Tensor:
        return x.resize_(5, 5).fill_(1.0) + 1

    def exchanged(x: Tensor, y: Tensor) -> Tensor:
        x.set_(y)  # type: ignore[call-overload]  # torch's stub lacks this form
        return x + 1

    _check(grown, lambda: (_x(),))
    _check(lambda x: grown(x * 1), lambda: (_x(),), routes=("compile",))
    _check(exchanged, lambda: (_x(), _x(9)))
    _check(lambda x, y: exchanged(x * 1, y), lambda: (_x(), _x(9)), routes=("compile",))


@pytest.mark.parametrize("ends", ["resize_", "untyped_storage"])
def test_memory_beyond_the_elements_is_eagers(ends: str) -> None:
    def run(x: Tensor, out: Tensor, writes: bool) -> tuple[Tensor, Tensor]:
        y = x.abs().sqrt()[:2]
        if writes:
            out.data = y
            y = out
        return (
            y.resize_(5) if ends == "resize_" else torch.tensor(y.untyped_storage().tolist())
        ), y

    compiled = fusee.compile(run)
    for writes in (False, True):
        found = [each(torch.arange(5.0), torch.ones(1), writes) for each in (run, compiled)]
        torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:.*a view is turned in place")
def test_gradients_through_what_changed_in_place() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).unsqueeze_(0).t_() if x.dim() == 1 else x * w
        y.squeeze_()
        return (y * y).sum()

    def view(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).unsqueeze(0).t_()
        y.cumsum_(1)
        return (y * x).sum()

    for fn in (run, view):
        how = [fusee.compile(fn, dynamic=dynamic) for dynamic in (None, True)]
        grads = []
        for call in (fn, *how, torch.compile(fn, backend="fusee")):
            w = torch.full((5,), 2.0, requires_grad=True)
            call(torch.arange(5.0), w).backward()
            grads.append(w.grad)
        torch.testing.assert_close(grads[1:], grads[:1] * 3)


@pytest.mark.filterwarnings("ignore:.*reads as another tensor")
def test_a_part_of_open_size_that_is_read_as_it_is_written() -> None:
    def run(x: Tensor) -> Tensor:
        part = x.narrow(1, 0, 1)
        x += part
        return x

    compiled = fusee.compile(run, dynamic=True)
    for n in (5, 4):
        x = torch.rand(n, n)
        torch.testing.assert_close(compiled(x.clone()), run(x.clone()))


def test_a_shuffle_that_moves_nothing_is_a_copy() -> None:
    x = torch.rand(2, 2, 3)
    found = fusee.compile(lambda x: F.channel_shuffle(x, 2))(x)
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_an_input_that_is_turned_beside_autograd(mode: Any) -> None:
    def run(x: Tensor, w: Tensor) -> Any:
        with mode():
            x.unsqueeze_(0)
        (x * w).sum().backward()
        return x.shape, w.grad

    def of_a_leaf(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            w[:].unsqueeze_(0), x.unsqueeze_(0)
        return x.sum()

    for fn in (run, of_a_leaf):
        told = []
        for call in (fn, fusee.compile(fn, backend="eager")):
            w = torch.full((5,), 2.0, requires_grad=True)
            told.append((call(torch.arange(5.0), w), call(w.detach()[:], w)))
        assert str(told[0]) == str(told[1])


def test_what_autograd_cannot_save_is_eagers_to_refuse() -> None:
    def run(w: Tensor) -> Tensor:
        w * torch.inference_mode()(torch.sin)(torch.ones(3))
        return w + 1

    w = torch.ones(3, requires_grad=True)
    for call in (run, fusee.compile(run)):
        with pytest.raises(RuntimeError, match="Inference tensors"):
            call(w)


def test_parts_of_nothing() -> None:
    def run(x: Tensor, n: int) -> Any:
        parts = x.split(n)
        return [part.shape for part in (*parts, *x.chunk(n + 1), *x.unsafe_split(n))], parts[0] + 1

    traced = Traced(run)
    for size, n in ((0, 2), (4, 2), (0, 3), (4, 3), (0, 0), (3, 1)):
        assert str(traced(torch.ones(size, 2), n)) == str(run(torch.ones(size, 2), n))


def test_out_within_a_step_that_is_differentiated() -> None:
    def run(x: Tensor, w: Tensor, o: Tensor) -> Tensor:
        loss = (x * w).tanh().sum()
        torch.sin(x, out=o)
        return loss + (o * w).sum()

    grads = []
    for call in (run, fusee.compile(run)):
        w, o = torch.full((5,), 2.0, requires_grad=True), torch.zeros(0)
        call(torch.arange(5.0), w, o).backward()
        grads.append((w.grad, o))
    torch.testing.assert_close(grads[0], grads[1])


# ------------------------------------------------------------------------------ shared memory


def _both(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    b.mul_(3)
    return a.sum() + b.sum()


def _apart() -> tuple[Tensor, Tensor]:
    return torch.arange(7.0), torch.arange(7.0)


def _slices(first: slice, second: slice) -> Inputs:
    def make() -> tuple[Tensor, Tensor]:
        whole = torch.arange(8.0)
        return whole[first], whole[second]

    return make


PLACES = {
    "shifted": _slices(slice(1, 8), slice(0, 7)),
    "halves": _slices(slice(0, 4), slice(4, 8)),
    "inside": _slices(slice(0, 8), slice(2, 4)),
    "one memory": _slices(slice(0, 8), slice(0, 8)),
    "interleaved": _slices(slice(0, 8, 2), slice(1, 8, 2)),
}


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("grad", [False, True])
def test_inputs_that_share_memory_are_written_to(case: str, grad: bool) -> None:
    def with_weight(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return (_both(a, b) * w).sum() + (a * w).sum()

    ways = [fusee.compile(with_weight, backend=name) for name in ("fusee", "aot_eager")]
    for compiled in (*ways, torch.compile(with_weight, backend="fusee")):
        for make in (_apart, PLACES[case], _apart, PLACES[case]):  # compiled for others at first
            results = []
            for call in (with_weight, compiled):
                a, b = make()
                w = torch.tensor(2.0, requires_grad=grad)
                out = call(a, b, w)
                if grad:
                    out.backward()
                results.append((a, b, out.detach(), w.grad))
            torch.testing.assert_close(*results, rtol=0, atol=0)


def test_parts_of_one_memory_meet_where_they_have_an_element_in_common() -> None:
    generator = random.Random(0)
    meeting = 0
    for _ in range(3000):
        base = torch.arange(generator.choice((24, 36, 60)))
        one, other = (_part(base, generator) for _ in range(2))
        want = not {*one.flatten().tolist()}.isdisjoint(other.flatten().tolist())
        distance = other.storage_offset() - one.storage_offset()
        assert meet(one, other, int(distance)) == want, (one, other)
        meeting += want
    assert 500 < meeting < 2500


def _part(x: Tensor, generator: random.Random) -> Tensor:
    x = x.view(generator.choice((1, 2, 3, 6)), -1)
    for axis in (0, 1):
        first = generator.randrange(max(1, x.shape[axis] // 2))
        step = generator.choice((1, 1, 2, 3))
        x = x.transpose(0, axis)[first : first + 7 : step].transpose(0, axis)
    return x.t() if generator.random() < 0.3 else x


def test_parts_in_steps_that_lie_apart_are_compiled() -> None:
    def rotate(x: Tensor) -> Tensor:
        x[..., ::2].mul_(x[..., 1::2])
        x[:, :3].add_(x[:, 3:])
        return x * 2

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        compiled = fusee.compile(rotate, fullgraph=True)
        x, y = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
        assert torch.equal(compiled(x), rotate(y)) and torch.equal(x, y)


def test_disjoint_parts_of_one_memory_are_compiled() -> None:
    compiled = fusee.compile(_both, fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)
        compiled(*PLACES["halves"]())
    assert fusee.report(compiled)[0].kernels


def test_calls_with_overlapping_inputs_say_that_they_run_eagerly() -> None:
    compiled = fusee.compile(_both)
    with pytest.warns(FuseeWarning, match="share memory, and .* is written to"):
        compiled(*PLACES["shifted"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuseeWarning)  # once is enough
        compiled(*PLACES["shifted"]())


def _refused(x: torch.Tensor) -> torch.Tensor:
    try:
        return x[1:].add_(x[:-1])
    except RuntimeError:
        return x - 1


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize(
    ("run", "inputs"),
    [
        (lambda b: torch.add(b[1:], 1, out=b[:-1]), lambda: (torch.arange(8.0),)),
        (lambda b: b[1:].add_(b[:-1]), lambda: (torch.arange(8.0),)),
        (lambda a: a.add_(1), lambda: (torch.zeros(1).expand(4),)),
        (lambda a: a.add_(a.t()), lambda: (_x(),)),
        (lambda b: b[4:].copy_(b[:4]), lambda: (torch.arange(8.0),)),
        (lambda b: b[1:].copy_(b[:-1]), lambda: (torch.arange(8.0),)),
        (lambda b: b[::2].copy_(b[1:5]), lambda: (torch.arange(8.0),)),
        (lambda b: b[::2].__setitem__(slice(None), b[:4]), lambda: (torch.arange(8.0),)),
        (lambda b: b.as_strided((2, 2), (1, 1)).add_(1), lambda: (torch.arange(8.0),)),
        (lambda b: b.scatter_(0, torch.arange(8), b), lambda: (torch.arange(8.0),)),
        (lambda b: torch.mm(b, b, out=b), lambda: (torch.ones(4, 4),)),
        (_refused, lambda: (torch.arange(8.0),)),
        (lambda b: copy.deepcopy(b[1:3]), lambda: (torch.arange(8.0),)),
        (lambda a: a.mT[0].fill_(1) + a[0], lambda: (_x(3, 5)[:, :1].expand(3, 5),)),
        (lambda a: a.mT[0].fill_(1) + a.mT[1], lambda: (_x(7, 5).unfold(0, 3, 1),)),
        (lambda a: (a.as_strided((2, 2), (1, 1)), a.mul_(2))[0] + 0, lambda: (_x()[:, ::2],)),
        (lambda a: (a.mul_(2), a.as_strided((2, 2), (1, 1)))[1] + 0, lambda: (_x()[:, ::2],)),
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_memory_that_is_shared_is_eagers_to_write_or_copy(
    run: Program, inputs: Inputs, dynamic: bool | None
) -> None:
    _check(run, inputs, ("compile",), dynamic)


@pytest.mark.parametrize(
    "run",
    [
        lambda z: torch.view_as_real(z).clone(), lambda z: (z[0, 0].real.clone(), z.imag[1] * 1),
        lambda z: (torch.view_as_real(z * 2).clone(), z + 1), lambda z: z.mT.real.contiguous(),
    ],
)  # fmt: skip
def test_copies_of_what_a_call_gives_a_view_of(run: Program) -> None:
    _check(run, lambda: (torch.randn(2, 2, dtype=torch.complex64),), routes=("compile",))


@pytest.mark.parametrize(
    "read",
    [
        lambda x, base: x.is_set_to(base[::2]),
        lambda x, base: base[:4].is_set_to(base[:4]),
        lambda x, base: x._is_view(),
        lambda x, base: x._base is base,
        lambda x, base: x._version,
    ],
)
def test_what_a_tensor_is_a_part_of(read: Program) -> None:
    def program(x: Tensor, base: Tensor) -> Any:
        return x * 2, read(x, base)

    base = torch.arange(8.0)
    base.add_(1)
    assert Traced(program)(base[::2], base)[1] == read(base[::2], base)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["fusee", "eager"])
def test_what_is_written_through_data_is_not_counted(backend: str, grad: bool) -> None:
    def run(x: Tensor) -> Any:
        x.data.mul_(2.0)
        x.data[0].zero_()
        x.data.view(-1)[1:].add_(1.0)
        return x * 3, x.data, x.detach()

    def outcome(function: Program) -> Any:
        leaf = torch.arange(4.0)
        part = leaf[:]
        leaf.requires_grad_(grad)
        saved = leaf * leaf.detach()
        scaled, data, detached = function(leaf)
        data.add_(1.0)
        counts = leaf._version, part.is_leaf
        if grad:
            saved.sum().backward()
        detached.add_(1.0)
        return counts, leaf._version, part, leaf, leaf.grad, scaled

    torch.testing.assert_close(outcome(fusee.compile(run, backend=backend)), outcome(run))


# ---------------------------------------------------------------------------- layouts
# Results as a CPU's kernels lay them out, which torch's own metas do not say.

_A = torch.rand(4, 5, 6)
_TURNED = torch.rand(6, 5, 4).permute(2, 1, 0)
_IMAGES = torch.rand(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
_VOLUMES = [
    torch.rand(count, 3, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    for count in (1, 2)
]
_LABELS = torch.zeros(2, 5, 5, dtype=torch.long)
_ORDERS = [(_A, _TURNED), (_TURNED, _A), (_A[:, :1], _TURNED), (_TURNED[:, :1], _A)]


def _in_two_orders(function: Any) -> list[Any]:
    return [(function, args) for args in _ORDERS]


@pytest.mark.parametrize(("function", "args"), [
    *_in_two_orders(torch.copysign), *_in_two_orders(torch.logical_and),
    *_in_two_orders(torch.logical_or), *_in_two_orders(torch.logical_xor),
    *_in_two_orders(torch.xlogy), *_in_two_orders(torch.special.xlog1py),
    *_in_two_orders(torch.floor_divide), *_in_two_orders(torch.logaddexp),
    *_in_two_orders(torch.heaviside), *_in_two_orders(torch.logaddexp2),
    *_in_two_orders(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    (lambda a, b: F.binary_cross_entropy(a, b, reduction="none"), _ORDERS[0]),
    (lambda a, b: F.binary_cross_entropy(a, b, reduction="none"), _ORDERS[1]),
    (lambda x: F.channel_shuffle(x, 4), (_IMAGES,)),
    (lambda x: F.channel_shuffle(x, 2) + 1, (_A[None].expand(2, 4, 5, 6),)),
    (F.rrelu, (_IMAGES - 0.5,)),
    (lambda x: F.rrelu(x, training=True) * 2, (_TURNED - 0.5,)),
    *[(torch.normal, args) for args in (*_ORDERS, (1.0, _TURNED), (_TURNED, 1.0))],
    (torch.poisson, (_TURNED,)), (torch._standard_gamma, (_TURNED,)),
    (lambda x: F.grid_sample(x, x.mT[:, :2].movedim(1, 3), align_corners=False), (_IMAGES,)),
    (lambda x: torch.fft.hfft(torch.complex(x, x).expand(2, *x.shape)), (_A,)),
    (lambda x: x.index_put((torch.tensor([1]),), x[:1] * 2) @ x.mT, (_A.unfold(2, 2, 1)[0],)),
    (lambda x: x.index_put((torch.tensor([1]),), x[:1] * 2), (_TURNED[:, ::2],)),
    (F.logsigmoid, (_IMAGES,)), (F.logsigmoid, (_TURNED,)),
    (lambda x: x.masked_fill(x > 0.5, 0), (_TURNED,)),
    (lambda x: x.index_fill(0, torch.arange(1), 0.5), (_TURNED[:, ::2],)),
    (lambda x: x.index_fill(0, torch.arange(1), torch.tensor(0.5)), (_TURNED[:, ::2],)),
    (lambda x: x.sum().masked_scatter(x > 0.5, x), (_TURNED,)),
    (lambda x, y: F.nll_loss(x, y, reduction="none"), (_IMAGES, _LABELS)),
    (lambda x, y: F.nll_loss(x, y, reduction="none"), (_IMAGES, _LABELS.mT)),
    *[
        (lambda x, w: F.conv_transpose3d(x, w), (x, torch.ones(3, 2, k, k, k, dtype=x.dtype)))
        for x in (*_VOLUMES, _VOLUMES[0].double())
        for k in (2, 4)
    ],
])  # fmt: skip
def test_layouts(function: Any, args: tuple[Tensor, ...]) -> None:
    def told(*args: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        result = function(*args)
        return result, result.stride()

    for backend in ("eager", "fusee"):
        torch.manual_seed(0)
        want = told(*args)
        torch.manual_seed(0)
        got = fusee.compile(told, backend=backend)(*args)
        torch.testing.assert_close(got[0], want[0])
        assert got[0].stride() == want[0].stride() == want[1] == got[1]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.interpolate(x, size=7), lambda x: F.max_pool1d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"),
    ],
)  # fmt: skip
def test_strides_of_lines(fn: Program, grad: bool, dynamic: bool | None) -> None:
    """Lines that are interpolated lie in rows, as do the greatest without their places."""
    fast = fusee.compile(fn, dynamic=dynamic, options={"prices": False})
    for order in itertools.permutations(range(3)):
        x = torch.arange(90.0).view(3, 6, 5).permute(order).requires_grad_(grad)
        want, got = fn(x), fast(x)
        assert got.equal(want) and got.stride() == want.stride()


@pytest.mark.parametrize(
    "fn",
    [
        torch.round, lambda x: x + x, lambda x: x.round().view(torch.int16),
        lambda x: x.expand(1, 1, *x.shape), lambda x: x.expand(1, 2, 1, *x.shape),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "x",
    [torch.ones(2)[::2], torch.ones(1, 8).T, torch.ones(3, 1, 4).movedim(1, -1)],
    ids=lambda x: str(x.stride()),
)
def test_axes_of_one_element_of_open_strides(fn: Program, x: Tensor) -> None:
    """They lie anywhere in what is contiguous, whose results are rows; added ones as in ATen."""
    got, want = fusee.compile(fn, dynamic=True, options={"prices": False})(x), fn(x)
    assert got.equal(want) and got.stride() == want.stride()


ODD_AXES: dict[str, Callable[[], Tensor]] = {
    "one channel": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "one pixel": lambda: torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "one image": lambda: torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "an axis put in": lambda: torch.randn(8, 4).unsqueeze(1),
    "anywhere": lambda: torch.randn(8, 4).as_strided((8, 1, 4), (4, 77, 1)),
    "turned": lambda: torch.randn(4, 8).t().unsqueeze(1),
}


@pytest.mark.parametrize("name", ODD_AXES)
def test_strides_along_axes_of_one_element(name: str) -> None:
    """They tell how the next convolution lies, whose channels are several."""
    x, weight = ODD_AXES[name](), torch.randn(2, 1, 1, 1)

    def fn(x: Tensor) -> list[Tensor]:
        found = [x * 2, x + x, 1 - x, x > 0, x**2, x.relu(), x.clone(), x.double(), x / x]
        found += [
            torch.where(x > 0, x, 0.0),
            torch.zeros_like(x),
            x.clamp(0, 1),
            x + x.new_ones(()),
        ]
        found += [torch.lerp(x, x * 2, 0.5), F.gelu(x), x.sort(-1).values, x.sigmoid() * x]
        if x.dim() == 4:
            wide = weight.expand(2, x.shape[1], 1, 1)
            found += [F.conv2d(x * 0.5, wide), F.avg_pool2d(x * 2, 1), F.max_pool2d(x, 1)]
        return found

    want = fn(x)
    for options in ({"prices": False}, {}):
        for got, there in zip(fusee.compile(fn, options=options)(x), want, strict=True):
            assert got.stride() == there.stride()
    given = x.clone().requires_grad_()
    for got, there in zip(fusee.compile(fn, options={"prices": False})(given), want, strict=True):
        assert got.stride() == there.stride()


def test_strides_of_what_is_chosen_by_index() -> None:
    """As eager's, axes of one element included: a program may ask `is_contiguous()`."""
    all_, two, one = slice(None), torch.tensor([0, 0]), torch.tensor([0])
    places = [
        (all_, two), (two,), (all_, all_, one), (one, all_, two), (all_, one), (two.view(1, 2),),
        (all_, two.view(2, 1).expand(2, 2)), (two, two, all_), (all_, two[::2], two),
    ]  # fmt: skip
    programs = []
    for shape in itertools.product((1, 2, 3), repeat=3):
        for order in itertools.permutations(range(3)):
            x = torch.zeros([shape[k] for k in order]).permute(*(order.index(k) for k in range(3)))
            x = x.as_strided(
                shape, [7 if n == 1 and k else s for k, n, s in zip(order, shape, x.stride())]
            )
            programs.append(x)

    z = torch.zeros(3, 4, dtype=torch.complex64).t()

    def fn() -> Any:
        return [x[at].stride() for x in programs for at in places], z.angle().stride()

    assert fusee.compile(fn, backend="eager")() == fn()


REPEATED: dict[str, Callable[[], Tensor]] = {
    "number": lambda: torch.tensor([2.0]).expand(3),
    "rows": lambda: torch.ones(1, 4).expand(3, 4),
    "columns": lambda: torch.ones(3, 4)[:, :1].expand(3, 4),
    "windows": lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
}


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("backend", ["fusee", "openvino"])
@pytest.mark.parametrize("name", REPEATED)
def test_writes_to_inputs_whose_elements_share_memory(name: str, backend: str) -> None:
    def first(u: Tensor, m: Tensor) -> Any:
        u[0] = 1
        return u + 1, m[m > 0]

    def part(u: Tensor, m: Tensor) -> Any:
        u[..., 0:1][0].mul_(2)
        return u[:, None].sum(0), u.cumsum(0), m * 2

    for fn in (first, part):
        compiled = fusee.compile(fn, backend=backend)
        for _ in range(2):
            outcomes: list[str] = []
            for each in (fn, compiled):
                u = REPEATED[name]()
                try:
                    outcomes.append(str(each(u, torch.tensor([1.0, -1, 2]))) + str(u))
                except RuntimeError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]


FACTORIES: dict[str, Program] = {
    "ones": lambda x: torch.ones(4, out=x),
    "full": lambda x: torch.full((4,), 2.0, out=x),
    "arange": lambda x: torch.arange(4, out=x),
    "normal": lambda x: torch.normal(0.0, 1.0, (4,), out=x),
    "add": lambda x: torch.add(x, 1, out=x),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_a_factory_writes_to_no_longer_requires_gradients(name: str) -> None:
    @torch.no_grad()
    def fn(x: Tensor) -> Tensor:
        return FACTORIES[name](x)[x > 0]

    seen = []
    for run in (fn, fusee.compile(fn)):
        torch.manual_seed(0)
        x = torch.ones(4, requires_grad=True)
        seen.append((run(x).tolist(), x.tolist(), x.requires_grad))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("backend", ["fusee", "eager"])
def test_a_view_of_a_leaf_that_nobody_reads(backend: str) -> None:
    """Written to without gradients: torch refuses to tell its history, of which none is needed."""

    def fn(leaf: Tensor) -> None:
        unread = leaf.reshape(2, 2).add_(1)  # noqa: F841
        raise ValueError("behind it")

    fast, leaf = fusee.compile(fn, backend=backend), torch.ones(4, requires_grad=True)
    with torch.no_grad(), pytest.raises(ValueError, match="behind it"):
        fast(leaf)
    assert leaf.tolist() == [2.0] * 4


@pytest.mark.parametrize("is_operand", [False, True])
def test_out_keeps_its_strides(is_operand: bool) -> None:
    """The meta kernel of sort gives `out=` those of a copy."""

    def program(x: Tensor, q: Tensor) -> Tensor:
        places = torch.empty(0, dtype=torch.int64)
        return torch.sort(q if is_operand else x, dim=0, out=(q, places))[0] * 2

    found = []
    for run in (program, fusee.compile(program, options={"prices": False})):
        memory = torch.linspace(2, -2, 16)
        got = run(torch.linspace(1, -1, 8), memory[::2])
        found.append([got, memory])
    torch.testing.assert_close(*found)
