"""Sizes and integers that vary: one version serves all, and is right for each."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import logging
import math
import operator
import string
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

import fusee
from fusee import log
from fusee.capture.entries import live
from fusee.errors import ConstantSizeError, FuseeWarning, GraphBreakError, OptionError
from tests.capturing.same import Traced

SIZES = (6, 9, 8, 11, 16, 5)
FORM = "{:>4} of {}"


def same(want: Any, got: Any) -> None:
    """Values, classes, dtypes and strides."""
    assert type(want) is type(got), (want, got)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    elif isinstance(want, (tuple, list)):
        assert len(want) == len(got)
        for one, other in zip(want, got, strict=True):
            same(one, other)
    else:
        assert want == got


def slices(x: Tensor) -> Any:
    return x[1:-1], x[: x.shape[0] // 2], x[::2]


def branch(x: Tensor) -> Any:
    return x * 2 if x.shape[0] > 4 else x - 1


def text(x: Tensor) -> Any:
    return x + 1, f"{x.shape[0]:>4} rows of {x.shape}"


def shapes(x: Tensor) -> Any:
    rows, columns = x.shape
    more = torch.Size((rows, 2)), (*x.shape[:-1], 7), tuple(x.shape), [*x.shape]
    return torch.zeros(rows, columns) + x, (rows, columns), x.size(), len(x), x.numel(), more


def arithmetic(x: Tensor) -> Any:
    n = x.size(0)
    numbers = math.floor(n / 2), math.ceil(n * 0.5), max(n, 5), min(n, 100), n % 3, -n // 2, n / 2
    more = math.comb(n, 2), math.perm(n, 3), math.comb(n + 2, 4)
    return x / math.sqrt(n), x * (1 / n), numbers, divmod(n, 4), n**2, abs(-n), n << 1, more


def padded(x: Tensor) -> Any:
    n = x.shape[0]
    whole = (n + 7) // 8 * 8
    return F.pad(x, (0, 0, 0, whole - n)).view(whole // 8, 8, -1)


def attention(x: Tensor) -> Any:
    q = x.view(1, x.shape[0], 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def views(x: Tensor) -> Any:
    return (
        x.view(-1), x.reshape(x.shape[0], 2, -1).transpose(0, 1), x.T.contiguous(),
        x.expand(3, *x.shape), x[None].repeat(2, 1, 1), x.as_strided((x.shape[0], 2), (4, 1)),
        torch.cat([x, x * 2]), torch.stack([x, x], 1), x.chunk(2, dim=1)[0], x.unbind(1)[0],
    )  # fmt: skip


def made(x: Tensor) -> Any:
    n = x.shape[0]
    places = torch.arange(n)
    return x + places[:, None], torch.ones(n, n).tril() @ x, torch.empty_like(x).fill_(2)


def reductions(x: Tensor) -> Any:
    return (
        F.layer_norm(x, (x.shape[-1],)), x.mean(0), x.var(1), x.std(), x.max(0).values,
        x.cumsum(0), x.softmax(0), torch.einsum("ij,kj->ik", x, x),
    )  # fmt: skip


def lookups(x: Tensor) -> Any:
    places = torch.arange(x.shape[0])
    return x[places // 2], F.embedding(places % 5, torch.ones(5, 3)), F.one_hot(places % 3, 3)


def windows(x: Tensor) -> Any:
    resized = F.interpolate(x[None, None], scale_factor=2)
    return resized, F.conv1d(x.T[None], torch.ones(4, 4, 3), padding=1)


def written(x: Tensor) -> Any:
    y = x.clone()
    y[: x.shape[0] // 2] = 0
    y += 1
    return y


def kept(x: Tensor) -> Any:
    class Held:
        size: int

    held = Held()
    held.size = x.shape[0]
    sizes = [x.shape[0]]
    sizes.append(x.shape[1])
    return x * held.size, sum(sizes), sizes


def truths(x: Tensor) -> Any:
    n = x.shape[0]
    assert isinstance(n, int) and type(n) is int
    assert (x * 2).shape == x.shape
    return x * n, n > 3, not n, bool(x.shape[1]), n == x.shape[1], n in (3, 4)


def floats(x: Tensor) -> Any:
    n = x.shape[0]
    whole = int(n / 2), int(n * 0.25), round(n / 2), round(n / 4), math.floor(n * 1.5 + 0.5), int(n)
    other = n**0.5, n**-0.5, abs(n / 3), (n / 3) % 2, n / 2 > 400, n * 0.5 >= 1e9, float(n) == 3.5
    return x * n**-0.5, whole, other, n == 6.5, max(n / 2, 1.0), pow(n, 2), pow(n, 2, 7)


def bits(x: Tensor) -> Any:
    n = x.shape[0]
    masks = n & 7, n & 0b1011000, n & -8, 12 & n, n | 5, n ^ 5, n ^ -3, ~n, -n & 6
    return x * (n & 3), masks, n.real, n.imag, n.denominator, n.conjugate(), n.__add__(2)


def texts_of(x: Tensor) -> Any:
    n, shape = x.shape[0], x.shape
    made = (
        str(n),
        repr(n),
        "a" + str(n) + "b",
        operator.mod("%d of %s", (n, "x")),
        FORM.format(n, n),
    )
    return (
        x + 1,
        made,
        f"{n!r}",
        str(shape),
        f"{[*shape]}",
        "x".join(map(str, shape)),
        f"{n / 3:.2f}",
    )


def contained(x: Tensor) -> Any:
    n = x.shape[0]
    found = (
        n in range(2, 100),
        n in range(1000, 4, -1),
        n in {800, 1600},
        n in [700, n],
        100 in x.shape,
    )
    return x * 2, found, x.shape in [(3, 4)], x.shape.numel(), [int(s) for s in x.shape]


def copied(x: Tensor) -> Any:
    n = x.shape[0]
    return x * 2, copy.copy(n), copy.deepcopy([n, {"n": n}]), copy.deepcopy(x.shape)


@pytest.mark.parametrize("backend", ["eager", "fusee"])
@pytest.mark.parametrize(
    "program",
    [
        floats, bits, texts_of, contained, copied,
        slices, branch, text, shapes, arithmetic, padded, attention, views, made, reductions,
        lookups, windows, written, kept, truths,
    ],
)  # fmt: skip
def test_one_version_serves_all_sizes(program: Callable[[Tensor], Any], backend: str) -> None:
    traced = Traced(program)
    compiled = fusee.compile(program, backend=backend)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, 4)
            traced(x)
            same(program(x), compiled(x))
        assert len(traced.graphs) == 2  # for the first size, and for all
        warnings.simplefilter("ignore")  # of the variance of one element
        for n in (1, 0):
            x = torch.randn(n, 4)
            same(_told(program, x), _told(compiled, x))


def _told(program: Callable[[Tensor], Any], x: Tensor) -> Any:
    """What a program gives, or the class of the error that it raises."""
    try:
        return program(x)
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        return type(error)


def loop(x: Tensor) -> Tensor:
    total = x[0]
    for k in range(x.shape[0]):
        total = total + x[k]
    return total


def key(x: Tensor) -> Tensor:
    return x + {x.shape[0]: 1}[x.shape[0]]


def texts(x: Tensor) -> tuple[Tensor, str]:
    return x + 1, str(x.shape[0]).rjust(3)


def deleted(x: Tensor) -> Any:
    n, numbers = x.shape[0], {6: 1, 9: 2, 8: 3}
    del numbers[n]
    return x + 1, numbers, numbers.pop(n, 0)


@pytest.mark.parametrize("program", [loop, key, texts, deleted])
def test_where_the_number_is_needed_each_size_has_a_version(
    program: Callable[[Tensor], Any],
) -> None:
    traced = Traced(program)
    for n in (6, 9, 8):
        x = torch.randn(n, 4)
        same(program(x), traced(x))
    assert len(traced.graphs) <= 3


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    size: int


class Derived(list[Any]):
    """A class of the program's."""


def caught(function: Callable[[], Any]) -> str:
    try:
        return str(function())
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        return f"{error!r} {type(error.__context__)}"


@pytest.mark.parametrize(
    "told",
    [
        lambda n, x: repr(ValueError(n, [n])), lambda n, x: str(ValueError(f"of {n}")),
        lambda n, x: repr(ValueError(f"of {n}")), lambda n, x: repr(KeyError(f"of {n}")),
        lambda n, x: str(ExceptionGroup("g", [ValueError(n)]).exceptions),
        lambda n, x: f"{[n]}{(n, 'a')}{dict(n=n)}", lambda n, x: repr([n, {"a": (n,)}]),
        lambda n, x: str(Pair(n, n + 1)), lambda n, x: f"{Pair(n, [n])}",
        lambda n, x: repr(Record(n)), lambda n, x: str(collections.deque([n])),
        lambda n, x: str(collections.Counter(a=n)), lambda n, x: repr(Derived([n])),
        lambda n, x: operator.mod("%s of %d", (n, n)),
        lambda n, x: operator.mod("%(n)s", dict(n=n)),
        lambda n, x: str.format("{} {!r} {n:>4}", n, n, n=n),
        lambda n, x: str.format("{0.first}", Pair(n, 1)),
        lambda n, x: format(n, "03d") + hex(n) + str(n / 2),
        lambda n, x: " ".join([str(n), f"{n}"]),
        lambda n, x: str(slice(n)) + str(range(n)), lambda n, x: str(torch.Size([n])),
        lambda n, x: repr([str(n) == "5", f"{n}" != "7", (str(n),) == ("7",), [str(n)] == ["8"]]),
        lambda n, x: repr(["3" in [str(n)], str(n) in ("5", "7"), {"7": 1}.get(str(n))]),
        lambda n, x: repr([list(str(n)), [*f"{n}-a"], str(n)[0], max(str(n))]),
        lambda n, x: caught(lambda: (lambda *a: a)(*str(n))),
        lambda n, x: string.Template("$n").substitute(n=n), lambda n, x: json.dumps([n]),
        lambda n, x: str(types.SimpleNamespace(n=n)), lambda n, x: str(functools.partial(max, n)),
        lambda n, x: caught(lambda: n + "a"), lambda n, x: caught(lambda: "a" + n),
        lambda n, x: caught(lambda: n[0]), lambda n, x: caught(lambda: n()),
        lambda n, x: caught(lambda: [].pop(n)), lambda n, x: caught(lambda: {}[n]),
        lambda n, x: caught(lambda: n.missing), lambda n, x: caught(lambda: [*n]),
        lambda n, x: caught(lambda: int(f"a{n}")), lambda n, x: caught(lambda: x.view(n, n)),
        lambda n, x: (n is n, n + 300 is n + 300, (n > 3) is True, n is None, n - 1 is n - 1),
        lambda n, x: caught(lambda: x.size(n)), lambda n, x: caught(lambda: x + torch.ones(n)),
    ],
)  # fmt: skip
def test_texts_of_what_holds_a_number_that_varies(told: Callable[[int, Tensor], str]) -> None:
    def program(n: int, x: Tensor) -> Any:
        return x + 1, told(n, x)

    traced = Traced(program)
    for n in (3, 5, 7, 8):
        same(program(n, torch.ones(4)), traced(n, torch.ones(4)))
    sized = Traced(lambda x: program(x.shape[0], x))
    for n in (3, 5, 7, 8):
        same(program(n, torch.ones(n)), sized(torch.ones(n)))


def test_what_is_said_of_a_number_that_varies(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def program(n: int, x: Tensor) -> Tensor:
        print(n, [n])
        logging.getLogger("of sizes").warning("%s of %d", n, n)
        with contextlib.suppress(UserWarning):
            warnings.warn(f"of {n}", stacklevel=1)
        return x * n

    compiled = fusee.compile(program, backend="eager")
    told = []
    for run in (program, compiled):
        caplog.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for n in (3, 5, 7):
                run(n, torch.ones(n))
        told.append([capsys.readouterr().out, caplog.messages, [str(w.message) for w in warned]])
    assert told[0] == told[1]


def test_where_an_exception_was_raised_is_no_number_of_the_programs() -> None:
    def program(x: Tensor, k: int) -> Any:
        try:
            if k > 3:
                raise ValueError(k)
            if k > 2:
                raise KeyError(k)
            x = {1: x}[k]
        finally:
            x.sum().item()
        return x

    traced = Traced(program)
    for k in (2, 3, 4, 5, 2, 1):
        found = []
        for run in (program, traced):
            try:
                found.append(run(torch.ones(2), k))
            except (ValueError, KeyError) as error:
                found.append(repr(error))
        same(*found)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, n: x[n], lambda x, n: x[0][n], lambda x, n: x[n, 0], lambda x, n: x[:, n],
        lambda x, n: x.select(1, n), lambda x, n: x.narrow(0, n, 1), lambda x, n: x.view(n, -1),
        lambda x, n: x.expand(n, 3), lambda x, n: x.split([n, 2]), lambda x, n: x.unfold(0, n, 1),
        lambda x, n: x.repeat(n), lambda x, n: torch.arange(0, 5, n), lambda x, n: torch.eye(n),
        lambda x, n: x.topk(n), lambda x, n: x.sum(n), lambda x, n: x.unflatten(0, (n, 2)),
        lambda x, n: x @ torch.ones(n, 2), lambda x, n: torch.cat([x, torch.ones(n, 3)]),
    ],
)  # fmt: skip
def test_what_is_refused_for_a_number_that_varies(use: Callable[[Tensor, int], Any]) -> None:
    def program(x: Tensor, n: int) -> Any:
        use(x, n)  # nobody uses it
        return x + 1

    compiled = Traced(program)
    for n in (2, 1, 4, -2, 3, 0, 9, -7):
        x = torch.arange(12.0).reshape(4, 3)
        found = []
        for run in (program, compiled):
            try:
                found.append(run(x, n))
            except (RuntimeError, IndexError) as error:
                found.append(f"{type(error)}: {error}".splitlines()[0])
        same(*found)


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (lambda x: torch.sin(x @ torch.eye(3)).softmax(-1) * x.sum(0), 4),
        (lambda x: F.layer_norm(x, (3, 3)).amax((0, 2)), 3),
        (lambda x: x + torch.ones(x.shape[0], 1, 1), 3),
        (lambda x: x.flatten(), 4),
        (lambda x: x.expand(4, 3, 3) if x.shape[0] < 2 else x.mT @ x, 3),
        (lambda x: -x if x.shape[0] == 1 else x + 1, 4),
    ],
)
def test_a_size_of_one_has_a_version_where_it_is_told_apart(
    program: Callable[[Tensor], Tensor], count: int
) -> None:
    """Each is called with none too, which is a version."""
    traced, compiled = Traced(program), fusee.compile(program)
    for n in (4, 5, 1, 7, 0, 2):
        x = torch.randn(n, 3, 3)
        want = _told(program, x)
        same(want, _told(traced, x))
        same(want, _told(compiled, x))
    assert len(traced.graphs) == count


def test_a_size_that_met_a_number_by_chance_stays_open() -> None:
    def program(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 16 else x - 1

    traced = Traced(program)
    for n in (6, 16, 20, 24, 16, 9, 31):
        x = torch.randn(n, 2)
        same(program(x), traced(x))
    assert len(traced.graphs) <= 3


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x + y, lambda x, y: x @ y.T, lambda x, y: x.T @ y, lambda x, y: x.mul_(y),
        lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.stack([x, y]),
        lambda x, y: torch.where(x > 0, x, y), lambda x, y: torch.bmm(x[None], y.T[None]),
        lambda x, y: F.linear(x, y), lambda x, y: x.view(y.shape[0], 4),
        lambda x, y: x.expand_as(y), lambda x, y: x.addcmul(y, y),
        lambda x, y: x.reshape(y.shape[0], -1, 2), lambda x, y: F.layer_norm(x, y.shape[1:]),
        lambda x, y: torch.einsum("ij,ij->i", x, y), lambda x, y: x.copy_(y), lambda x, y: x[y > 0],
        lambda x, y: F.cross_entropy(x, y.argmax(1)), lambda x, y: x.masked_fill(y > 0, 1),
        lambda x, y: F.conv1d(x.T[None], y.T[:, :, None]), lambda x, y: x[: y.shape[0]] - y,
        lambda x, y: x.gather(0, y.argmax(0, keepdim=True)), lambda x, y: x.lerp(y, 0.5),
        lambda x, y: torch.dot(x[:, 0], y[:, 0]), lambda x, y: torch.mv(x.T, y[:, 0]),
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None]),
        lambda x, y: F.interpolate(x.T[None], scale_factor=0.25),  # of 2 nothing is left
    ],
)  # fmt: skip
def test_wrong_sizes_raise_eagers_errors(use: Callable[[Tensor, Tensor], Any]) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return use(x + 1, y + 1)

    compiled = fusee.compile(program)
    sizes = [(6, 4, 6, 4), (9, 4, 9, 4), (8, 4, 8, 4), (8, 4, 5, 4), (5, 4, 7, 4), (4, 4, 4, 3)]
    for n, k, m, j in (*sizes, (7, 3, 6, 5), (2, 4, 3, 4), (10, 4, 10, 4)):
        x, y = torch.randn(n, k), torch.randn(m, j)
        found = []
        for run in (program, compiled):
            try:
                found.append(run(x.clone(), y.clone()))
            except (RuntimeError, IndexError, ValueError) as error:
                found.append(f"{type(error)}: {error}".splitlines()[0])
        same(*found)


OPEN_VIEWS: list[Callable[[Tensor], Any]] = [
    lambda x: x.view(-1, 2, 6), lambda x: x.view(x.shape[0], 3, 4).transpose(0, 2)[None],
    lambda x: x.permute(1, 0).reshape(-1), lambda x: x.t().contiguous().view(12, -1),
    lambda x: x.view(x.shape[0] // 2, 2, 12).permute(0, 2, 1).reshape(-1, 24),
    lambda x: x[:, None].expand(-1, 5, -1), lambda x: x.view(1, *x.shape).squeeze(),
    lambda x: x[1:-1:2], lambda x: x[-3:], lambda x: x[: x.shape[0] - 1, ::3], lambda x: x[100:],
    lambda x: x[-100:2], lambda x: x[-1], lambda x: x.select(0, x.shape[0] - 2),
    lambda x: x.split([2, x.shape[0] - 2]), lambda x: x.split(4, 1), lambda x: x.unbind(1)[3],
    lambda x: x.chunk(3, 1), lambda x: x.split(x.shape[0] // 2), lambda x: x.unflatten(1, (2, -1)),
    lambda x: torch.arange(1, x.shape[0], 2), lambda x: torch.full((x.shape[0],), 2),
    lambda x: torch.ones(x.shape[0], dtype=torch.int8), lambda x: x.T.relu_().add_(x.T),
    lambda x: x + x.shape.numel(), lambda x: torch.empty_like(x.T).fill_(1), lambda x: x.T.clone(),
    lambda x: x.view(x.shape[0], 1, 12)[:, 0], lambda x: x.T.unsqueeze(-1) + x.T.unsqueeze(1),
]  # fmt: skip


@pytest.mark.parametrize("program", OPEN_VIEWS)
def test_views_and_new_tensors_of_open_sizes_lie_as_eagers(
    program: Callable[[Tensor], Any],
) -> None:
    traced = Traced(program)
    for n in (6, 8, 10, 4, 14):
        x = torch.randn(n, 12)
        with torch.no_grad():
            same(program(x.clone()), traced(x.clone()))
    assert len(traced.graphs) == 2


def test_sizes_that_were_equal_and_are_not() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()

    def together(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    apart, sums = Traced(program), Traced(together)
    for n, m in ((4, 4), (5, 5), (6, 7), (8, 3)):
        x, y = torch.randn(n), torch.randn(m)
        same(program(x, y), apart(x, y))
        if n == m:
            same(together(x, y), sums(x, y))
    assert len(apart.graphs) == 2 and len(sums.graphs) == 2
    with pytest.raises(RuntimeError):
        sums(torch.randn(8), torch.randn(3))


def test_numbers_that_a_size_has_no_form_for() -> None:
    def program(x: Tensor, n: int) -> Any:
        try:
            found = (
                ~n % 4,
                n // -2,
                n % -3,
                7 % n,
                n >> 1,
                n ^ 5,
                n**2,
                -7 // n,
                3 / n,
                divmod(n, 3),
            )
        except ZeroDivisionError as error:
            return x, str(error)
        return x * n, found

    compiled = fusee.compile(program, backend="eager")
    for n in (3, 4, -5, 6, 0, 1, 2):
        x = torch.randn(3)
        same(program(x, n), compiled(x, n))


def test_integers_of_either_sign_divide() -> None:
    """An argument is known to be no divisor of zero by a relation: one for each sign."""

    def heads(x: Tensor, n: int) -> Any:
        return x.view(x.shape[0], abs(n), 12 // abs(n)).sum(1), -7 // n, 7 % n, x.shape[0] // n

    traced, compiled = Traced(heads), fusee.compile(heads)
    for rows, n in ((3, 2), (8, 3), (6, 4), (5, -6), (9, -2), (4, 6), (7, -1)):
        x = torch.randn(rows, 12)
        same(heads(x, n), traced(x, n))
        same(heads(x, n), compiled(x, n))
    assert len(traced.graphs) <= 3
    with pytest.raises(ZeroDivisionError):
        compiled(torch.randn(2, 12), 0)


def test_numbers_in_tuples_vary() -> None:
    def program(x: Tensor, size: tuple[int, int], *more: Any) -> Any:
        resized = F.interpolate(x, size=size)
        return resized * more[0], size, more[1]["at"][0] + 1

    traced = Traced(program)
    for n, m, scale in ((4, 6, 2), (5, 9, 3), (8, 7, 5), (3, 12, 4)):
        x = torch.randn(1, 2, 4, 4)
        given = (n, m), scale, {"at": (m, "a")}
        same(program(x, *given), traced(x, *given))
    assert len(traced.graphs) == 2


def test_a_relation_decides_which_version() -> None:
    def program(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 8 == 0 else x - 1

    traced = Traced(program)
    for n in (3, 5, 16, 24, 7, 32, 11):
        x = torch.randn(n, 2)
        same(program(x), traced(x))
    assert len(traced.graphs) <= 3


def test_dynamic() -> None:
    def program(x: Tensor) -> Tensor:
        return x * x.shape[0]

    for dynamic, versions in ((None, 2), (True, 1), (False, 4)):
        graphs: list[Any] = []

        def backend(gm: torch.fx.GraphModule, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(gm)
            return gm.forward

        backend.__dict__["takes_symbols"] = True
        compiled = fusee.compile(program, backend=backend, dynamic=dynamic)
        for n in (3, 9, 5, 7):
            x = torch.randn(n, 2)
            same(program(x), compiled(x))
        assert len(graphs) == versions


def test_marks() -> None:
    def program(x: Tensor) -> Tensor:
        return x * x.shape[0]

    traced = Traced(program)
    for n in (3, 4, 5):
        x = torch.randn(n, 2)
        fusee.compiler.mark_dynamic(x, 0, min=2, max=64)
        same(program(x), traced(x))
    assert len(traced.graphs) == 1
    traced = Traced(program)
    for n in (3, 9, 5):
        x = torch.randn(n, 2)
        fusee.compiler.mark_static(x, 0)
        same(program(x), traced(x))
    assert len(traced.graphs) <= 3


def test_a_marked_size_that_the_program_needs() -> None:
    x = torch.randn(3, 2)
    fusee.compiler.mark_dynamic(x, 0)
    with pytest.raises(ConstantSizeError, match="in loop"):
        fusee.compile(loop)(x)
    x = torch.randn(3, 2)
    fusee.compiler.mark_dynamic(x, 0)
    with pytest.raises(ConstraintViolationError, match="in loop"):
        fusee.compile(loop)(x)
    x = torch.randn(3, 2)
    fusee.compiler.maybe_mark_dynamic(x, 0)
    same(loop(x), fusee.compile(loop)(x))


def test_a_size_of_0_or_1_that_is_marked_is_a_constant() -> None:
    traced = Traced(lambda x: x * 2)
    for n in (5, 7, 1, 0, 9, 1):
        x = torch.randn(n, 2)
        fusee.compiler.mark_dynamic(x, 0)
        same(x * 2, traced(x))
    assert len(traced.graphs) <= 3


def test_sizes_are_constants_where_open_ones_end_the_graph_and_none_may_end() -> None:
    def program(x: Tensor) -> Any:
        return x + 1, x.tolist()

    whole = fusee.compile(program, fullgraph=True)
    assert whole(torch.ones(2))[1] == [1.0, 1.0]
    with pytest.warns(FuseeWarning, match="each set of sizes has a version"):
        assert whole(torch.ones(4))[1] == [1.0] * 4
    assert whole(torch.ones(3))[1] == [1.0] * 3
    fusee.compiler.mark_dynamic(x := torch.ones(2), 0)
    with pytest.raises(GraphBreakError, match="tolist"):
        fusee.compile(program, fullgraph=True)(x)


@pytest.mark.parametrize(
    "function", [F.leaky_relu, F.elu, F.celu, F.softplus, F.hardshrink, F.softshrink]
)
def test_sizes_are_parameters_of_pointwise_functions(function: Any) -> None:
    compiled = fusee.compile(lambda x: function(x, x.shape[0]), dynamic=True)
    for n in (2, 5, 3):
        x = torch.linspace(-4, 4, n).requires_grad_(function is not F.celu)
        want, got = function(x, n), compiled(x)
        torch.testing.assert_close(got, want)
        if want.requires_grad:
            grads = [torch.autograd.grad(y.sum(), x)[0] for y in (got, want)]
            torch.testing.assert_close(*grads)
    assert len(fusee.report(compiled)) == 1


def every_other(x: Tensor, y: Tensor) -> Tensor:
    return x[::2] + y[::2]


def in_rows(x: Tensor, y: Tensor) -> Tensor:
    return x.view(-1, 4) * y.view(-1, 4)


def in_pairs(x: Tensor, y: Tensor) -> Tensor:
    return x.unfold(0, 2, 2)[:, 0] * y.unfold(0, 2, 2)[:, 0]


@pytest.mark.parametrize("program", [every_other, in_rows, in_pairs])
def test_a_quotient_of_sizes_that_is_1_is_broadcast(program: Any) -> None:
    compiled = fusee.compile(program, dynamic=True)
    step = 4 if program is in_rows else 2
    for n, m in ((1, 4), (4, 1), (3, 3), (1, 1), (1, 5)):
        x, y = torch.randn(n * step), torch.randn(m * step)
        same(program(x, y), compiled(x, y))


def unbacked_check(x: Tensor) -> Tensor:
    torch._check(x.shape[0] > 2)
    return x * 2 if x.shape[0] > 2 else x


def unbacked_assert(x: Tensor) -> Tensor:
    assert x.shape[0] > 2
    return x[2] + x.sum(0)


def unbacked_view(x: Tensor) -> Any:
    return x.view(-1), torch.cat([x, x]).softmax(0), x @ x.T, x * x.shape[0], x.shape


@pytest.mark.parametrize("mark", [fusee.compiler.mark_unbacked, mark_unbacked])
@pytest.mark.parametrize("program", [unbacked_check, unbacked_assert, unbacked_view])
@pytest.mark.parametrize("backend", ["fusee", "aot_eager", lambda gm, _: gm.forward])
def test_a_size_that_is_marked_as_unbacked(backend: Any, program: Any, mark: Any) -> None:
    graphs: list[Any] = []
    found = fusee.backends.lookup(backend)

    def counted(gm: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(gm)
        return found(gm, examples)

    if isinstance(backend, str):
        counted.__dict__["takes_symbols"] = True
    compiled = fusee.compile(program, backend=counted, fullgraph=True)
    for n in (5, 1, 3, 9, 1) if program is unbacked_view else (5, 3, 9):
        x = torch.randn(n, 3)
        mark(x, 0)
        torch.testing.assert_close(compiled(x), program(x))
    assert len(graphs) == 1
    if program is not unbacked_view:
        for run in (compiled, program):
            with pytest.raises((RuntimeError, AssertionError)):
                run(torch.randn(2, 3))


def test_a_branch_on_a_size_that_is_marked_as_unbacked() -> None:
    for program, says in (
        (
            branch,
            r"x\.size\(0\) is marked as unbacked, and the program needs whether x\.size\(0\) > 4",
        ),
        (loop, "is marked as unbacked, and the program needs x"),
    ):
        marked, x = torch.randn(7, 2), torch.randn(7, 2)
        fusee.compiler.mark_unbacked(marked, 0)
        for given, names in ((marked, ""), (x, "x:0"), (x, "L['x']")):
            said = f"{says}[^>]*test_symbols.py.* in {program.__name__}"
            with pytest.raises(ConstantSizeError, match=said):
                fusee.compile(program, options={"unbacked_sources": names})(given)


def test_a_number_that_is_named_as_unbacked() -> None:
    def program(x: Tensor, n: int) -> Tensor:
        return x * n if x.dim() == 1 else x * (n if n > 4 else 0)

    compiled = fusee.compile(program, options={"unbacked_sources": "n"})
    for n in (0, 1, 7):
        torch.testing.assert_close(compiled(torch.ones(2), n), torch.full((2,), float(n)))
    with pytest.raises(ConstantSizeError, match=r"n is marked as unbacked, .* needs whether n > 4"):
        compiled(torch.ones(2, 2), 3)


def test_operators_may_fix_an_unbacked_size_unless_it_is_strict() -> None:
    y = torch.randn(5, 2)
    for strict in (False, True):
        x = torch.randn(5, 2)
        fusee.compiler.mark_unbacked(x, 0, strict=strict)
        compiled = fusee.compile(lambda x: x + y)
        if strict:
            with pytest.raises(ConstantSizeError, match="needs x"):
                compiled(x)
        else:
            torch.testing.assert_close(compiled(x), x + y)


def test_ends_and_groups_of_unbacked_sizes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return (x + y) * 2 if x.shape[0] < 100 else x

    compiled = fusee.compile(program)
    for n in (5, 1, 8):
        x, y = torch.randn(n, 2), torch.randn(n, 2)
        for one in (x, y):
            fusee.compiler.mark_unbacked(one, 0, shape_id="batch", max=64)
        torch.testing.assert_close(compiled(x, y), program(x, y))
    (piece,) = [one for one in live if one.call is compiled]
    assert len(piece.entries) == 1
    fusee.compiler.mark_unbacked(y := torch.randn(3, 2), 0, shape_id="batch")
    with pytest.raises(OptionError, match="of the same shape_id 'batch' is 8"):
        compiled(x, y)


def test_training_with_batches_of_many_sizes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def step(run: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss = run(x, y)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    compiled = fusee.compile(loss_of)
    for n in SIZES:
        x, y = torch.randn(n, 4), torch.randint(0, 3, (n,))
        for want, got in zip(step(loss_of, x, y), step(compiled, x, y), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("with_grad", [True, False])
def test_dropout_of_open_sizes_draws_as_eager(with_grad: bool) -> None:
    told: list[str] = []

    def program(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.3) + 1

    compiled = fusee.compile(program)
    undo = log.subscribe(lambda record: told.append(record.text), "host")
    for n in SIZES:
        found = []
        for run in (program, compiled):
            x = torch.linspace(-1, 1, n * 8).view(n, 8).requires_grad_(with_grad)
            torch.manual_seed(n)
            out = run(x)
            found.append([out, *(torch.autograd.grad(out.sum(), x) if with_grad else ())])
        same(*found)
    undo()
    assert not any("native_dropout" in text for text in told)
    assert len(told) == 2 + 2 * with_grad


@pytest.mark.parametrize("p", [0.3, 2.0, -1.0, math.nan])
@pytest.mark.parametrize("with_grad", [True, False])
def test_dropout_of_nothing_is_its_argument(p: float, with_grad: bool) -> None:
    def program(x: Tensor) -> Any:
        x = x * 2
        try:
            return x, torch.dropout(x, p, False) is x
        except RuntimeError as error:
            return x, str(error)

    compiled = fusee.compile(program, dynamic=True)
    for n in SIZES:
        x = torch.ones(n, 2).requires_grad_(with_grad)
        assert compiled(x)[1] == program(x)[1]


@pytest.mark.parametrize("with_grad", [True, False])
def test_an_open_number_to_powers_lies_in_rows(with_grad: bool) -> None:
    compiled = fusee.compile(lambda x, k: (k**x, k ** x.tanh()), dynamic=True)
    for k in (3, 1, 0):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_(with_grad)
        ours, eager = ([*run(x.mT, k)] for run in (compiled, lambda x, k: (k**x, k ** x.tanh())))
        same(ours, eager)
        assert [y.stride() for y in ours] == [y.stride() for y in eager]


@pytest.mark.parametrize(
    "f", [lambda x: x.view(-1).sum(), lambda x: x.view(x.shape[0], -1) + 1, lambda x: x.flatten(1)]
)
def test_views_beside_axes_of_one_element(f: Callable[..., Tensor]) -> None:
    """torch's own rule takes those whose strides do not fit."""
    compiled = fusee.compile(f, dynamic=True)
    for size in ((1, 7, 1, 8), (1, 6, 1, 3), (1, 9, 1, 5)):
        x, told = torch.arange(float(math.prod(size))).view(size)[..., ::2], list[str]()
        for run in (compiled, f):
            try:
                told.append(repr(run(x)))
            except RuntimeError as error:
                told.append(str(error))
        assert told[0] == told[1]


@pytest.mark.parametrize("learns", [False, True])
def test_sizes_that_only_a_dropped_input_has(learns: bool) -> None:
    """A dead step says that the one input's size is the other's and one."""

    def f(p: Tensor, q: Tensor) -> Tensor:
        pooled = F.max_pool1d(q, 2, 1, 1)
        p[:1].lerp(pooled, 0.3)
        return pooled * 2

    compiled = fusee.compile(f, dynamic=True)
    for n in (16, 5):
        p, q = torch.randn(n, n + 1), torch.randn(n, n, requires_grad=learns)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = compiled(p, q)
        torch.testing.assert_close(found, f(p, q))
        if learns:
            got, want = (torch.autograd.grad(y.sum(), q) for y in (found, f(p, q)))
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(3, 2), (0, 2)])
@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout])
@pytest.mark.parametrize("with_grad", [True, False])
def test_dropout_of_everything_draws_nothing(drop: Any, shape: Any, with_grad: bool) -> None:
    def program(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        y = drop(x, 1.0, training=True)
        return y * k, y.sum() + torch.rand(())

    compiled = fusee.compile(program)
    for k in (2, 3, 4):
        found = []
        for run in (program, compiled):
            torch.manual_seed(0)
            x = torch.full(shape, float("nan")).requires_grad_(with_grad)
            out = run(x, k)
            found.append([*out, *(torch.autograd.grad(out[0].sum(), x) if with_grad else ())])
        torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_attention_of_open_heads_draws_as_eager() -> None:
    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)

    compiled = fusee.compile(program, fullgraph=True, dynamic=True)
    for n, head in ((5, 8), (6, 12), (7, 16)):
        found = []
        for run in (program, compiled):
            x = torch.linspace(-1, 1, 4 * n * head).view(2, 2, n, head).requires_grad_()
            torch.manual_seed(n)
            out = run(x)
            found.append([out, *torch.autograd.grad(out.sum(), x)])
        torch.testing.assert_close(*found)


def test_strides_that_are_not_dense() -> None:
    def program(x: Tensor) -> Any:
        return x * 2, x.transpose(0, 1), x.reshape(-1)

    traced = Traced(program)
    for n in SIZES:
        x = torch.randn(4, n).T
        same(program(x), traced(x))
    assert len(traced.graphs) == 2


def wide(x: Tensor) -> Any:
    return x.sin() * 2, x.T, x.reshape(-1), x @ torch.ones(3, 2), x.sum(1), x.stride(), x[1:]


def packed(x: Tensor) -> Any:
    y = x.as_strided((2, 4, 1, 3), (x.stride(0), x.stride(0) // 2, 1, 1)) if x.stride(0) > 99 else x
    return y.view(4, 3, 1) + 1, y.contiguous().view(-1)


def changed(x: Tensor) -> Any:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize("program", [wide, packed, changed])
@pytest.mark.parametrize("how", [{}, {"backend": "eager"}, {"dynamic": True}])
def test_strides_that_vary_by_themselves(program: Any, how: dict[str, Any]) -> None:
    traced, compiled = Traced(program), fusee.compile(program, **how)
    for step in (7, 9, 11, 30):
        found = []
        for run in (program, traced, compiled):
            x = torch.linspace(0, 3, 4 * step).view(4, step)[:, :3]
            found.append((run(x), x))
        same(found[0], found[1])
        same(found[0], found[2])
    assert len(traced.graphs) == 2
    for step in (2, 1, 0):  # elements lie in one another
        found = []
        for run in (program, compiled):
            x = torch.linspace(0, 3, 40).as_strided((4, 3), (step, 1))
            found.append((_told(run, x), x))
        same(*found)


def test_the_stride_of_an_axis_that_is_marked_static_is_a_constant() -> None:
    traced = Traced(lambda x: x * 2)
    for step in (7, 9, 11):
        x = torch.randn(4, step)[:, :3]
        fusee.compiler.mark_static(x)
        traced(x)
    assert len(traced.graphs) <= 3


def test_gradients_of_inputs_whose_strides_vary() -> None:
    def loss_of(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).softmax(1).cos().sum()

    compiled = fusee.compile(loss_of, fullgraph=True)
    for step in (7, 9, 11, 30):
        found = []
        for run in (loss_of, compiled):
            torch.manual_seed(0)
            whole = torch.randn(4, step, requires_grad=True)
            weight = torch.randn(3, 2, requires_grad=True)
            loss = run(whole[:, :3], weight)
            found.append([loss.detach(), *torch.autograd.grad(loss, (whole, weight))])
        torch.testing.assert_close(*found)
    (piece,) = [one for one in live if one.call is compiled]
    assert len(piece.entries) == 2


def test_floats_that_were_rounded_twice_have_no_exact_floor() -> None:
    def program(x: Tensor) -> Any:
        n = x.shape[0]
        return x + 0, int(n / 49 * 49), int(n * 0.1 * 10), math.floor(n / 3 + 0.1)

    compiled = fusee.compile(program, backend="eager", recompile_limit=200)
    for n in (10, 99, 11, 101, 108, 64, 110, 55, 7):
        same(program(torch.ones(n)), compiled(torch.ones(n)))


def test_open_places_among_others() -> None:
    def program(x: Tensor, i: int) -> Any:
        x[i, 1:] = 3
        x[..., i, 0] += i
        return x[i, :] * 2, x[None, ..., i], x[i, i // 2, i + 1], x.sum(0)

    traced = Traced(program)
    for i in (1, 2, 3, 0):
        x = torch.randn(5, 4, 5)
        same(program(x.clone(), i), traced(x, i))
    assert len(traced.graphs) == 2
    for run in (program, traced):
        with pytest.raises(
            IndexError, match="index 7 is out of bounds for dimension 0 with size 5"
        ):
            run(torch.randn(5, 4, 5), 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.randn(5, 4, 5)
        same(program(x.clone(), -2), traced(x, -2))


def test_an_error_of_kernels_tells_the_size_of_the_call() -> None:
    def program(x: Tensor, i: Tensor) -> Tensor:
        return x[i] + torch.cat([x, x[:1]])[i]

    compiled = fusee.compile(program)
    for n in (4, 3, 5):
        same(program(torch.ones(n), torch.arange(n)), compiled(torch.ones(n), torch.arange(n)))
        for place in (n, n + 1):
            with pytest.raises(IndexError, match=f"{place} .* dimension 0 with size {n}$"):
                compiled(torch.ones(n), torch.tensor([place]))


@pytest.mark.parametrize(
    "call",
    [
        lambda n: collections.deque(range(9), maxlen=n), lambda n: pow(2, n),
        lambda n: list(itertools.product("ab", repeat=n))[-1],
        lambda n: list(itertools.combinations(range(5), n)),
    ],
)  # fmt: skip
def test_c_code_takes_open_integers(call: Callable[[int], Any]) -> None:
    def program(x: Tensor, n: int) -> Any:
        return x * 2, call(n)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = fusee.compile(program)
        for n in (2, 3, 1):
            same(program(torch.ones(3), n), compiled(torch.ones(3), n))


def test_what_a_backward_finds_out_of_sizes_is_known_of_results() -> None:
    """That one is a number, here: a result had a size that no input shows any more."""

    def fn(x: Tensor, n: int) -> tuple[Tensor, ...]:
        half, sums = x.shape[0] // 2, [part.sum() for part in x.split(2)]
        moved = torch.cat([x[half:], x[:half]])
        return moved, x.reshape(-1), x.sum() / max(n, 1), *sums, x.new_zeros(n + 1, x.size(0))

    compiled = fusee.compile(fn, backend="aot_eager")
    for n in (2, 3, 4, 5, 1, 0, 7):
        x = torch.ones(n, 4).requires_grad_()
        for got, want in zip(compiled(x, n), fn(x, n), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("fn", [
    lambda x, n: x * min(0.5, (1 + n) / (10 + n)),  # a decay that warms up
    lambda x, n: x * max(0.0, min(0.9, 1 - (1 + n / 1.0) ** -0.66)),
    lambda x, n: x if n / (n + 5) < 0.5 else x * 2,
    lambda x, n: x * (n * n / (n + 1) > 7.5),
    lambda x, n: x * (1 if math.sqrt(n) * 0.3 < 1.1 + 1 / (n + 1) else 2),
])  # fmt: skip
def test_a_comparison_of_floats_is_a_condition(fn: Any) -> None:
    traced, native = Traced(fn), fusee.compile(fn)
    for n in (3, 5, 9, 8, 20, 21, 33, 47, 60, 7, 1, 10000, 2):
        want = fn(torch.ones(3), n)
        assert traced(torch.ones(3), n).equal(want)
        torch.testing.assert_close(native(torch.ones(3), n), want)
    assert len(traced.graphs) <= 3


def test_a_long_comparison_of_floats_asks_for_the_number() -> None:
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        decay = n / (n + 3)
        for _ in range(60):
            decay = decay * 0.99 + decay / (n + 3)
        return x * (decay < 0.5)

    traced = Traced(fn)
    for n in (3, 5, 9):
        assert traced(torch.ones(3), n).equal(fn(torch.ones(3), n))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_end_at_the_first_that_is_negative(reduction: str) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.multilabel_margin_loss(x, y, reduction=reduction)
        return loss, torch.autograd.grad(loss.sum(), x)[0]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, y, reduction=reduction)

    compiled = fusee.compile(loss)
    for n in (8, 6, 7):
        x = torch.randn(n, 5, requires_grad=True)
        y = torch.tensor([[3, 0, -1, 1, 2], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0]] * n)[:n]
        want, grad = fn(x, y)
        found = compiled(x, y)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], grad)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: F.interpolate(x, scale_factor=n),
        lambda x, n: F.interpolate(x, scale_factor=(n, 1.5), mode="bilinear"),
        lambda x, n: torch.histogram(x, bins=3, range=(-n, n)),
        lambda x, n: F.fractional_max_pool2d(x, 2, output_ratio=(1 / n, 0.5)) if n > 1 else x,
    ],
)
def test_open_numbers_in_lists_of_floats(fn: Callable[[Tensor, int], Any]) -> None:
    compiled = fusee.compile(fn, fullgraph=True)
    for n in (2, 3, 4):
        x = torch.rand(1, 2, 6, 6)
        torch.manual_seed(0)
        want = fn(x, n)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x, n), want)


class Annealed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.by, None


@pytest.mark.parametrize(
    ("fn", "is_open"),
    [
        (lambda x, by: Annealed.apply(x, by), True),
        (lambda x, by: F.gumbel_softmax(x, tau=by), True),
        (lambda x, by: F.leaky_relu(x, by), False),
        (lambda x, by: F.softplus(x, by), False),
        (lambda x, by: F.threshold(x, by, 0), False),
        (lambda x, by: x.scatter(0, torch.tensor([0]), by), False),
    ],
    ids=["function", "gumbel", "slope", "beta", "threshold", "scatter"],
)
def test_floats_of_integers_as_parameters(fn: Any, is_open: bool) -> None:
    """One version for all where torch only computes with the float, else one for each."""

    def program(x: Tensor, step: int) -> Tensor:
        return fn(x.sin(), 2 / (1 + math.exp(-step / 10)) - 0.5) * 2

    compiled = fusee.compile(program)
    for step in (3, 4, 6):
        results = []
        for run in (program, compiled):
            x = torch.arange(4.0, requires_grad=True)
            torch.manual_seed(step)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # it would tell of a graph that runs eagerly
                y = run(x, step)
            results.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
        torch.testing.assert_close(*results)
    (piece,) = [one for one in live if one.call is compiled]
    assert len(piece.entries) == (2 if is_open else 3)
