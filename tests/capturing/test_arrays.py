"""NumPy in compiled functions: results, dtypes, scalars, memory and errors as NumPy has them."""

from __future__ import annotations

import copy
import operator
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusee
from tests.capturing.numpy_programs import DTYPES, agree, calls, data, functions
from tests.capturing.same import Traced
from tests.counting import Counting

A = np.arange(12.0).reshape(4, 3)
X = torch.linspace(-1, 1, 6).reshape(2, 3)
SCALE = np.array([1.0, 2.0, 3.0])

# ------------------------------------------------------------------------------ one graph


def arithmetic(a: Any) -> Any:
    return np.sin(a) + 1, 2 - a, a @ a.T, divmod(a, 2), abs(-a), 2**a, a == a[0], a > 3


def scalars(a: Any) -> Any:
    s = a.sum()
    return s, s / len(a), a.max() + 1, np.float32(2) * s, isinstance(s, float), type(s), a[1, 2]


def views(a: Any) -> Any:
    b = a * 2
    return b.T, b[1:], b[0, 0], a.T, a[:, ::2], a.reshape(3, 4), a.ravel(), a.real, np.squeeze(a)


def writes(a: Any) -> Any:
    a[0] += 1
    b = a[1:3]
    b *= 10
    a[:, 0] = [5, 6, 7, 8]
    a[1:] = a[:-1]
    np.add(a, 1, out=a)
    np.negative(np.arange(4) // 4, out=a.reshape(-1)[:4])
    a.T[0, 0] = -1
    a.sort(axis=0)
    return b


def makes(a: Any) -> Any:
    z = np.zeros((4, 3), np.float32)
    z[1] = a[0]
    made = np.array([a[0], a[1]]), np.array([[1, 2], [3.5, 4]]), np.eye(3), np.full(2, 7)
    return z, made, np.arange(4)[:, None] + a, np.linspace(0, 1, 3), np.ones_like(a, dtype=int)


def dtypes(a: Any) -> Any:
    b, d = a.astype(np.float32), a.astype("i4")
    return b, d, d // 2, d / 2, d % 3, b + d, b + 1, b + np.float64(1), d + True, d.dtype == int


def joins(a: Any) -> Any:
    row = np.concatenate([a, a * 2], axis=1)
    return row, np.stack([a[0], a[1]]), np.where(a > 2, a, 0), np.clip(a, 1, 5), np.split(row, 2)


def algebra(a: Any) -> Any:
    m = a[:3] + np.eye(3)
    root = np.linalg.cholesky(m @ m.T), np.linalg.matrix_power(m, 3), np.linalg.det(m)
    return np.fft.fft(a), np.linalg.inv(m), np.linalg.solve(m, a[0]), np.einsum("ij->j", a), root


def walks(a: Any) -> Any:
    for row in a:
        a = a + row.sum()
    x, y, z = a[0]
    means = [r.mean() for r in a]
    for row in a.T[0] * 1:
        means.append(row)
        a *= 2  # what the next turn sees
    for item in (b := a[0]):
        b += item
    return a, x, y, z, len(a), means, sum(a[0]), [*reversed(a[1])]


def statistics(a: Any) -> Any:
    return {"std": a.std(axis=0), "all": [a.argmax(), a.min(axis=1)], "norm": np.linalg.norm(a)}


def orders(a: Any) -> Any:
    return np.sin(a.T), (a.T + 1).copy(), np.sum(a.T[None], axis=1), np.zeros_like(a.T)


def silently(a: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return a / 0


def of_a_tensor(x: torch.Tensor) -> Any:
    y = x.numpy()
    y += 1
    return y, torch.from_numpy(np.exp(y)) * 2, x * 2, torch.as_tensor(y[0]), np.asarray(x).T


def beside_tensors(x: Any) -> Any:
    a = SCALE * 2
    return x * a.sum(), x * np.float32(0.5), x + np.sqrt(16), torch.tensor(a), x / np.prod(x.shape)


def of_sizes(x: Any) -> Any:
    """Each fixes the size, as what a program must know does."""
    n = x.shape[0]
    numbers = np.sqrt(n), np.ceil(n / 2), np.log2(n), np.max(x.shape), np.clip(n, 1, 4), np.int64(n)
    rows = x.reshape(n, np.prod(x.shape[1:])), x.view(int(np.prod(x.shape))), x[np.minimum(n, 1)]
    return (
        numbers,
        rows,
        x[:, 0] * torch.from_numpy(np.arange(n)),
        np.zeros(x.shape),
        x * np.mean(n),
    )


ONE_GRAPH = [
    arithmetic, scalars, views, writes, makes, dtypes, joins, algebra, walks, statistics, orders,
    silently,
]  # fmt: skip


@pytest.mark.parametrize("fn", ONE_GRAPH, ids=lambda fn: fn.__name__)
def test_arrays_are_one_graph(fn: Callable[..., Any]) -> None:
    assert agree(fn, A) == []


@pytest.mark.parametrize("fn", [of_a_tensor, beside_tensors], ids=lambda fn: fn.__name__)
def test_arrays_and_tensors(fn: Callable[..., Any]) -> None:
    assert agree(fn, X) == []


def test_numpy_takes_sizes() -> None:
    traced = Traced(of_sizes)
    for n in (2, 3, 5):
        assert agree(of_sizes, torch.randn(n, 4), traced=traced) == []


@pytest.mark.parametrize("fn", ONE_GRAPH[:7], ids=lambda fn: fn.__name__)
def test_our_own_backend(fn: Callable[..., Any]) -> None:
    a, b = A.copy(), A.copy()
    with np.errstate(all="ignore"):
        want = fn(a)
    got = fusee.compile(fn)(b)
    torch.testing.assert_close(_plain(got), _plain(want), equal_nan=True)
    np.testing.assert_allclose(a, b)


def _plain(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_plain(item) for item in x if not isinstance(item, type)]
    return np.array(x)


# ------------------------------------------------------------------------------ made of constants


def parts(x: Any) -> Any:
    ends = np.cumsum([0, 1, 2])
    a, b, c = ends
    return x[:, a:b], x[:, b:c], [x[:, :n] for n in ends], ends.tobytes(), ends.tolist(), ends


def written(x: Any) -> Any:
    a = np.arange(4)
    b = a[1:3]
    b += 10
    shown = str(b), f"{a[1]}", repr(a), bool(a[1] > 3), int(a[2]), [*map(int, np.sort(-a))]
    a[0] = 7
    return shown, a.tolist(), b, x * a[0], np.nonzero(a > 7)[0], np.argsort(-a), a


def mixed(x: Any) -> Any:
    a, y = np.zeros(3), x.numpy()
    a[1] = 2
    before = a.tolist()
    np.add(y[0], 1, out=a)
    return before, a * 2, a


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("fn", [parts, written, mixed], ids=lambda fn: fn.__name__)
def test_elements_of_constants_are_known(fn: Callable[..., Any], is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        assert agree(fn, X) == []


def test_elements_are_known_until_something_else_writes_them() -> None:
    def by_torch(x: Any) -> Any:
        a = np.zeros(3)
        view = a[1:]
        tensor = torch.from_numpy(view)
        tensor += x[0, 0]
        return a.tolist()

    def by_numpy(x: Any) -> Any:
        a = np.zeros(3)
        a[:2] = x.numpy()[0, :2]
        return a.tolist()

    for fn in (by_torch, by_numpy):
        agree(fn, X)
    with torch.inference_mode():
        agree(by_numpy, X)


def test_an_array_is_empty_until_it_is_written() -> None:
    def program(x: Any) -> Any:
        a = np.empty(3)
        a.fill(2)
        return float(a[0]) + x

    agree(program, X)


def test_a_cache_by_what_numpy_makes_of_a_list() -> None:
    cache: dict[Any, Any] = {}

    def constant(value: Any) -> Any:
        array = np.asarray(value)
        key = array.shape, array.dtype, array.tobytes(), torch.float32
        if key not in cache:
            cache[key] = torch.as_tensor(array.copy(), dtype=torch.float32)
        return cache[key]

    def program(x: Any) -> Any:
        return x * constant([1.0, 2.0, 3.0]) + constant([3])

    traced = Traced(program)
    for _ in range(2):
        assert torch.equal(traced(X), program(X)) and traced.stops == []


def test_numbers_of_numpy_are_pythons_to_what_asks_no_dtype() -> None:
    def program(x: Any, v: Any, k: Any) -> Any:
        y, z = x.clone(), x.clone()
        y[..., 0] = v
        y[:, k] = k
        filled = z.masked_fill(x > 0, v), x.new_full((k,), v), torch.full((2,), v), z.fill_(v)
        return y, filled, x.clone().uniform_(0, v) < v, torch.add(x, x, alpha=k)

    def looks(x: Any, v: Any) -> Any:
        return torch.tensor(v), torch.as_tensor(v), torch.tensor(v, dtype=torch.float16) + x

    for k in (np.int64(1), np.int32(1), np.uint8(1)):
        assert agree(program, X, np.float64(0.25), k) == []
    assert agree(lambda x, v: x.fill_(v) if v else x, X, np.float32(0.1))
    for v in (np.float64(2), np.float32(2), np.int16(2), np.bool_(True)):
        assert agree(lambda x, v=v: looks(x, np.sqrt(np.square(v))), X) == []


def test_methods_of_numpys_numbers_are_asked_while_capturing() -> None:
    def program(x: Any, k: Any, v: Any) -> Any:
        rows = np.ceil(np.log(x.shape[1] + 1)).astype("int").item()
        whole = k.item(), k.tolist(), type(k).item(k), k.sum(), np.argmax([1, 3, 2]).item()
        real = v.astype(np.float64), v.round(1), v.is_integer(), v.dtype, [*range(9)][k]
        return x[:rows] * real[0] + whole[0], whole, real

    for kind in (np.int8, np.int64):
        for v in (np.float16(0.75), np.float32(3), np.float64(0.1)):
            assert agree(program, X, kind(2), v) == []


def _of_known_numbers(x: Any) -> Any:
    known = np.prod(x.shape), np.float64(2.5), np.float32(2.5), np.uint8(3), np.bool_(True)
    methods = "item", "tolist", "copy", "conj", "sum", "ravel", "tobytes", "__copy__", "__array__"
    found = [getattr(k, name)() for k in known for name in methods]
    shaped = [k.reshape(1) + 1 for k in known] + [k.repeat(3) for k in known]
    cast = [(k.astype(int), k.astype(np.float32), copy.deepcopy(k), f"{k}") for k in known]
    asked = known[0].is_integer(), known[1].as_integer_ratio(), known[3].bit_count()
    return found, shaped, cast, asked, np.float64.item(known[1]), np.generic.tolist(known[3]), x * 2


def _of_constants(x: Any) -> Any:
    ramp = np.polynomial.legendre.legval(0.5, np.array([1.0, 2, 3]))
    return x * float(ramp), np.polynomial.polynomial.polyval(0.5, np.array([1.0, 2.0]))


@pytest.mark.parametrize("program", [_of_known_numbers, _of_constants])
def test_methods_and_polynomials_of_what_is_known(program: Callable[[Any], Any]) -> None:
    assert agree(program, X) == []


# ------------------------------------------------------------------------------ Python runs it


def test_a_parted_loop_over_what_it_writes() -> None:
    def program(a: Any) -> Any:
        seen = []
        for x in a:
            a *= 2
            seen.append(complex(x))
        return seen

    assert agree(program, SCALE)


def test_arrays_that_a_graph_writes_are_held_apart_at_once() -> None:
    """A piece that writes to an array ends where it must: it is run twice, not from each place."""

    def program(a: Any, x: torch.Tensor) -> Any:
        for k in range(20):
            a[0] += k
        return complex(a[0]) + x.sum()

    assert len(agree(program, SCALE, X)) == 1


def test_autograd_hears_nothing_of_a_write_to_an_array() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x * x
        x.detach().numpy()[1:] *= 2
        return y.sum()

    x, given = (torch.ones(3, requires_grad=True) for _ in range(2))
    for run, leaf in ((program, x), (Traced(program), given)):
        run(leaf).backward()
    assert x.grad is not None and given.grad is not None and torch.equal(x.grad, given.grad)
    assert x._version == given._version == 0


@pytest.mark.parametrize("make", [Traced, fusee.compile])
def test_nobody_counts_writes_to_an_array(make: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        x.detach().numpy()[1:] *= 2
        torch.from_numpy(x.numpy()).mul_(3)
        return x + 1

    for run in (fn, make(fn)):
        x = torch.ones(4)
        view, w = x[:], torch.ones(4, requires_grad=True)
        loss = (w * x).sum()
        assert run(x).tolist() == [4, 7, 7, 7]
        loss.backward()
        x.requires_grad_()
        assert w.grad is not None and w.grad.tolist() == [3, 6, 6, 6]
        assert (x._version, view.is_leaf) == (0, True)


def test_a_tensor_of_an_array_is_one_of_inference_mode() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.from_numpy(x.detach().numpy()).is_inference()

    with torch.inference_mode():
        assert Traced(program)(torch.ones(3))


def test_a_write_to_memory_that_is_shared_is_before_the_graph() -> None:
    def program(a: Any, b: Any) -> Any:
        c = b * 2
        for _ in range(20):
            c = c + 1
        a[0] = 7
        return b + c

    whole = np.arange(4.0)

    def shared(_: Any) -> Any:
        return program(whole[:3], whole[1:])

    agree(shared, 0)


def draws(a: Any) -> Any:
    np.random.seed(0)
    return a * 2 + np.random.rand(3) - 1


def backwards(a: Any) -> Any:
    b = a + 1
    return b[::-1] * 2, b


def as_python(a: Any) -> Any:
    return float(a.sum()), (a * 2).tolist(), a[0, 0].item(), int(a[1, 1]), f"{a[0, 1]:.1f}"


def branches(a: Any) -> Any:
    return a / 2 if a.sum() > 3 else a


def by_value(a: Any) -> Any:
    return np.unique(a), a[a > 3], np.nonzero(a), np.allclose(a, a), np.cbrt(a - 5), np.argsort(a)


def refused(a: Any) -> Any:
    try:
        return a + np.ones(5)
    except ValueError as error:
        return str(error)


def of_records(a: Any) -> Any:
    r = np.zeros(3, dtype=[("x", "f8"), ("n", "i4")])
    r["x"] = a[0]
    return r["x"] * 2


def of_other_packages(a: Any) -> Any:
    kinds = pytest.importorskip("ml_dtypes")
    small = a.astype(kinds.float8_e4m3fn) + np.ones(a.shape, kinds.float8_e4m3fn)
    return small.astype(np.float32), a.astype(kinds.bfloat16).astype(np.float32)


def reduces(a: Any) -> Any:
    return (
        np.add.reduce(a * 2),
        np.multiply.outer(a[0], a[1]),
        np.array(["a", "b"]),
        a.astype(object),
    )


def twins(a: Any) -> Any:
    """dtypes of C's that are equal to others, which torch does not take."""
    n, b = np.ulonglong(3), a.astype("q")
    return (2**40 + n) >> n, type(n + 1), np.array([1, 2], "Q") + n, type(b[0, 0]), b * 2


def sparse(a: Any) -> Any:
    found: list[Any] = []
    for x in (torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()):
        for force in (False, True):
            try:
                found.append(x.numpy(force=force))
            except TypeError as error:
                found.append(str(error))
    return a * 2, found


@pytest.mark.parametrize(
    "fn",
    [
        draws,
        backwards,
        as_python,
        branches,
        by_value,
        refused,
        of_records,
        of_other_packages,
        reduces,
        twins,
        sparse,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_differs_runs_in_python(fn: Callable[..., Any]) -> None:
    stops = agree(fn, A)
    assert stops and not any(stop.startswith("eager") for stop in stops), stops


def of_tensors(x: Any) -> Any:
    double, made = np.dtype("float"), np.concatenate([x.T, x.T + 1])
    return np.ones_like(x.T), np.full_like(x, 2.4, dtype=double), made, np.sort(x), np.stack([x[0]])


def test_functions_that_take_tensors_for_arrays() -> None:
    traced = Traced(of_tensors)
    for want, got in zip(of_tensors(X), traced(X.clone()), strict=True):
        assert type(got) is type(want) and got.dtype == want.dtype and np.array_equal(got, want)
        assert got.strides == want.strides
    assert traced.stops == []


def test_lists_of_arrays_come_after_any_backends_graph() -> None:
    listed = fusee.compile(lambda a: (a * 2).tolist(), backend=Counting(), fullgraph=True)
    for a in (np.arange(5), np.arange(5.0)):
        assert listed(a) == (a * 2).tolist()


def test_errors_of_values_are_numpys() -> None:
    def inverse(a: Any) -> Any:
        try:
            return np.linalg.inv(a)
        except np.linalg.LinAlgError as error:
            return str(error)

    def picks(a: Any, i: Any) -> Any:
        return a[i]

    agree(inverse, np.zeros((2, 2)))
    agree(picks, A, np.array([0, 9]))
    agree(lambda a, b: a // b, np.array([1, 2]), np.array([0, 1]))
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        fusee.compile(lambda a: a / 0)(A)


# ------------------------------------------------------------------------------ guards


def test_layouts_are_guarded() -> None:
    traced = Traced(lambda a: a.T + 1)
    for a in (A, A + 1, A.astype("f4"), A.T, A[:2], A[::2]):
        got, want = traced(a), a.T + 1
        assert (got.dtype, got.strides) == (want.dtype, want.strides) and (got == want).all()
    assert traced.entries == 5


def test_memory_in_common_is_guarded() -> None:
    def writes_one(a: Any, b: Any) -> Any:
        a += 1
        return b * 2

    traced = Traced(writes_one)
    assert traced(np.zeros(3), np.zeros(3)).sum() == 0
    whole = np.zeros(4)
    assert traced(whole[:3], whole[1:]).tolist() == [2, 2, 0]
    assert whole.tolist() == [1, 1, 1, 0]
    x = torch.zeros(3)
    assert traced(x.numpy(), x).tolist() == [2, 2, 2]


def test_numbers_that_change_become_inputs() -> None:
    traced = Traced(lambda a, s: np.sin(a) * s)
    for k in range(5):
        got, want = traced(A, np.float32(k)), np.sin(A) * np.float32(k)
        assert got.dtype == want.dtype and np.allclose(got, want)
    assert traced.entries == 2 and traced.stops == []


def test_read_only_arrays() -> None:
    fixed = A.copy()
    fixed.flags.writeable = False
    assert agree(lambda a: (a[1:], a + 1), fixed) == []
    agree(lambda a: a.fill(0), fixed)


def test_torch_dynamo_is_not_imported() -> None:
    program = (
        "import sys, numpy as np, fusee\n"
        "print(fusee.compile(lambda a: np.sin(a).sum() + np.ones(2))(np.ones(3)))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ indexing

_SLICES = st.builds(
    slice, *[st.one_of(st.none(), st.integers(-5, 5))] * 2, st.sampled_from([None, 1, 2, -1])
)
_INDICES = st.one_of(
    st.integers(-3, 2), _SLICES, st.sampled_from([None, Ellipsis]),
    st.sampled_from([[0, 2], [1, -1, 0]]),
    st.sampled_from([np.array([2, 0]), np.array([[0], [1]]), np.array([True, False, True])]),
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(_INDICES, st.lists(_INDICES, min_size=1, max_size=4).map(tuple)), st.booleans())
def test_indexing(index: Any, is_written: bool) -> None:
    def reads(a: Any, index: Any) -> Any:
        found = a[index]
        return found, found + 1

    def writes(a: Any, index: Any) -> Any:
        a[index] = a[index] * 10
        a[index] += 1
        return a.sum()

    agree(writes if is_written else reads, data("f8", (3, 3, 3)), index, calls=1)


_PLACES = [
    np.array([2, 0]), np.array([[0], [-1]], np.int32), np.arange(6)[::-2] // 2, np.array([1.0]),
    np.array([0, 3]), np.zeros(0, int), np.array([1, 0, 1], np.uint8), np.arange(3) != 1,
    np.ones((3, 3), bool), np.array(1), np.bool_(True), np.int16(1), np.broadcast_to(1, (2, 2)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:indexing with dtype")
@pytest.mark.parametrize("place", _PLACES, ids=lambda x: f"{x.dtype} {x.shape}")
def test_tensors_are_indexed_by_arrays_as_in_eager_mode(place: Any) -> None:
    def reads(x: Any, place: Any) -> Any:
        y = x * 2
        return y[place].sin(), y[1:, place] + 1, y[place, np.arange(1)]

    def writes(x: Any, place: Any) -> Any:
        y, z = x.sin(), x.new_zeros(3, 3)
        y[place] = y[0] * 3
        z[place, place] += 1
        return y * z

    is_mask = place.dtype in (np.bool_, np.uint8)
    is_plain = place.ndim and not is_mask and 3 not in place
    for function in reads, writes:
        for x in torch.rand(3, 3), torch.rand(3, 3).t(), torch.rand(3, 3, requires_grad=True):
            traced = Traced(function)
            agree(function, x, place, traced=traced)
            assert len(traced.graphs) == 1 or not is_plain


# ------------------------------------------------------------------------------ all functions

# NumPy's own result means nothing, or is BLAS's for infinities, or depends on who else refers to an
# array; or none of `calls` is for them.
_LEFT_OUT = set(
    """
    empty empty_like searchsorted dot inner vdot item resize broadcast_arrays cholesky matrix_power
    tensorinv put_along_axis row_stack fix
""".split()
)
_BASES = {"numpy.linalg." + name for name in ("qr", "svd", "eig", "eigh")}
_MOST = 12  # calls of each function


def _calling(function: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args: function(*args, **kwargs)


@pytest.mark.parametrize("name", [n for n in functions() if n.split(".")[-1] not in _LEFT_OUT])
def test_function(name: str) -> None:
    """Whatever a function is given, it gives what NumPy gives, in the graph or outside."""
    function, taken = functions()[name], []
    for dtype in DTYPES:
        # what LAPACK makes of NaN is its own affair
        is_odd = np.dtype(dtype).kind == "f" and "linalg" not in name
        for args, kwargs in calls(dtype, is_odd):
            try:
                with np.errstate(all="ignore"):
                    function(*copy.deepcopy(args), **kwargs)
            except Exception:  # noqa: BLE001, S112  # not what this function takes
                continue
            # without full rank bases are any: LAPACKs of different processors choose others
            if name in _BASES and np.any(
                np.linalg.matrix_rank(args[0]) < min(np.shape(args[0])[-2:])
            ):
                continue
            taken.append((args, kwargs))
    assert taken
    for args, kwargs in taken[:: len(taken) // _MOST + 1]:
        agree(_calling(function, kwargs), *args, calls=1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [np.int64, np.int8, np.float32])
def test_numbers_of_numpy_that_vary_meet_tensors(make: Any) -> None:
    native = fusee.compile(lambda x, n: x * n + n)
    for n in (2, 3, 7, 5):
        want = X * make(n) + make(n)
        torch.testing.assert_close(native(X, make(n)), want)


def _logs(x: Any) -> Any:
    return np.sqrt(x) / (x - 1), np.log(x) + 1


def _logs_quietly(x: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _logs(x)


def _logs_strictly(x: Any) -> Any:
    with np.errstate(all="raise"):
        return _logs(x)


def _logs_in_place(x: Any) -> Any:
    x /= 2.0
    return np.log(x)


@pytest.mark.parametrize("fn", [_logs, _logs_quietly, _logs_strictly, _logs_in_place])
def test_wrong_values_are_warned_of_as_numpy_does(fn: Any) -> None:
    traced = Traced(fn)
    for value in (3.0, 0.0, 1.0, -1.0, np.inf, np.nan, 5.0):
        told = []
        for run in (fn, traced):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    found = str(run(np.array([value, 2.0])))
                except FloatingPointError as error:
                    found = str(error)
            told.append((found, [str(one.message) for one in said]))
        # a graph that writes to what it is given can't run again for the sake of a warning
        assert told[0] == told[1] or (fn is _logs_in_place and told[0][0] == told[1][0])
    assert fn not in (_logs, _logs_in_place) or len(traced.graphs) == 1


def without_elements(a: Any) -> Any:
    made = a[:0], a[:0] * 2, a[:, :0], np.zeros((0, 3))
    tensors = [f(x) for x in made for f in (torch.from_numpy, torch.tensor)]
    arrays = [x.detach().numpy() for x in (torch.ones(0, 3), torch.from_numpy(a)[1:1])]
    tensors += map(torch.from_numpy, arrays)
    return [x.strides for x in (*made, *arrays)], made, tensors


def test_strides_of_arrays_without_elements() -> None:
    def told(found: Any) -> Any:
        seen, arrays, tensors = found
        places = [(x.stride(), x.storage_offset()) for x in tensors]
        return seen, [x.strides for x in arrays], places

    traced = Traced(without_elements)
    assert told(traced(A.copy())) == told(without_elements(A.copy()))
    assert traced.stops == []


def test_memory_of_arrays_stays_as_large_as_it_is() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * 2, torch.from_numpy((x * 2).numpy()[1:]), torch.as_tensor(x.numpy())

    for run in (Traced(fn), fn):
        ours, *of_arrays = run(torch.ones(4))
        assert ours.resize_(9).numel() == 9
        for made in of_arrays:
            assert made.storage_offset() == 0
            with pytest.raises(RuntimeError, match="not resizable"):
                made.resize_(9)


def test_an_array_is_written_to_in_the_mode_that_is_on_there() -> None:
    def fn(a: Any) -> Any:
        print(end="")
        with torch.inference_mode(False):
            a[0] = 4
        return lambda: a

    made = np.ones(3)
    with torch.inference_mode():
        Traced(fn)(made)
    assert made.tolist() == [4, 1, 1]


def test_an_arrays_memory_that_is_written_to_with_gradients_keeps_them_over_a_break() -> None:
    leaf = torch.ones(3, requires_grad=True)

    def fn(a: Any) -> Any:
        made = torch.as_tensor(np.add(a, a))
        made.mul_(leaf)
        print(end="")
        return made.sum()

    for run in (fn, Traced(fn)):
        (found,) = torch.autograd.grad(run(SCALE), leaf)
        assert found.tolist() == [2, 4, 6]


def test_copies_by_the_copy_module() -> None:
    def fn(x: torch.Tensor) -> Any:
        a, memo = x.numpy() * 2, {}  # type: ignore[var-annotated]
        b, c, number = copy.copy(a), copy.deepcopy([a.T, a.T], memo), x.sum().item()
        b[0] = 9
        again = copy.copy(number), copy.deepcopy([number, x.tolist()])
        return a, b, c, c[0] is c[1], c[0].strides, copy.copy(a.sum()), again

    for x in (torch.ones(3), torch.arange(6.0).reshape(2, 3)):
        assert str(Traced(fn)(x)) == str(fn(x))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_check_of_numpys_before_what_is_drawn_into_an_input() -> None:
    """The graph ends at what it would warn of, and has drawn nothing then."""
    array = np.array([1.0, -2.0], np.float32)

    def fn(y: torch.Tensor) -> Any:
        found = np.sqrt(array)
        y.uniform_()
        return found

    compiled, drawn = fusee.compile(fn), []
    for call in (fn, compiled, compiled):
        torch.manual_seed(3)
        y = torch.ones(4)
        assert np.isnan(call(y)[1])
        drawn.append(y)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_the_base_of_an_array_that_a_graph_gives() -> None:
    """scipy looks at the size of a base, which is an array where there is one."""

    def fn(a: Any) -> Any:
        b = a * 2
        return b, b[:2]

    for made in fusee.compile(fn)(A):
        assert made.base is None or isinstance(made.base, np.ndarray)


ARRAYS = [np.array([1.0, 3.0], dtype=kind) for kind in ("f2", "f4", "f8", "i4", "i8", "?")]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: str(a.dtype))
def test_a_number_of_numpys_that_torch_refuses_to_store(array: np.ndarray) -> None:
    """Of float64 it is a float of Python's as well, and integers are taken."""

    def puts(x: torch.Tensor, give: Any) -> list[float]:
        x[:] = give(array)
        return x.tolist()

    for give in (np.max, lambda a: a[0], lambda a: np.max(a) * 2):
        told = []
        for function in (puts, fusee.compile(puts)):
            try:
                told.append(str(function(torch.zeros(2), give)))
            except TypeError as error:
                told.append(str(error))
        assert told[0] == told[1]


def _linear(name: str) -> Callable[..., Any]:
    return lambda a: getattr(np.linalg, name)(a)


@pytest.mark.parametrize(
    "fn",
    [
        *map(_linear, ("pinv", "inv", "det", "slogdet", "cond", "qr")),
        lambda a: np.linalg.pinv(a * 0 + np.arange(36, dtype="f4").reshape(6, 6)),
        lambda a: np.linalg.solve(a, np.arange(6, dtype="f4")),
        lambda a: np.average(a, axis=0, weights=np.arange(6)),
        lambda a: np.add(a, np.ones(6), out=np.empty_like(a)),
        lambda a: np.cov(a[:3] + 1000),
    ],
)
@pytest.mark.parametrize("kind", ["f4", "c8"])
def test_singles_are_computed_as_numpy_computes_them(fn: Callable[..., Any], kind: str) -> None:
    """Its linear algebra has doubles within, as has what gives doubles."""
    hilbert = (1 / (np.arange(6)[:, None] + np.arange(6) + 1)).astype(kind)
    want, found = fn(hilbert), fusee.compile(fn, backend="eager")(hilbert)
    for x, y in zip(*[r if isinstance(r, tuple) else (r,) for r in (want, found)], strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * np.abs(x).max())


class Money:
    """Of an array, each element asks it, as NumPy sees it."""

    def __rmul__(self, x: Any) -> Any:
        return "rmul", type(x).__name__

    def __eq__(self, x: object) -> Any:
        return "eq"

    __hash__ = object.__hash__


class Prior(Money):
    __array_priority__ = 1.0


class Alone(Money):
    __array_ufunc__ = None


@pytest.mark.filterwarnings("ignore::fusee.errors.FuseeWarning")
@pytest.mark.parametrize("kind", [Money, Prior, Alone])
def test_objects_as_operands_of_arrays(kind: type[Money]) -> None:
    """NumPy gives them each element, unless their class says that it sees to arrays itself."""

    def fn(x: Any, one: Money) -> Any:
        y = np.sin(x)
        return y * one, y == one, y.sum()

    x, one = np.arange(3.0), kind()
    for want, got in zip(fn(x, one), fusee.compile(fn)(x, one), strict=True):
        assert type(want) is type(got) and str(want) == str(got)


@pytest.mark.parametrize("compared", [operator.gt, operator.ge, operator.eq, np.greater])
def test_comparisons_of_numpys_bools(compared: Callable[..., Any]) -> None:
    """Where NumPy's False for an operand is its False for the result as well."""
    traced = Traced(lambda x, k: (x + 1, compared(k, 2)))
    for number in (np.int64(7), np.int64(8), np.bool_(True), np.bool_(False)):
        made = traced(torch.ones(2), number)[1]
        assert type(made) is np.bool_ and made == compared(number, 2)


TABLE = np.linspace(0.25, 2.0, 8)


def _reads_an_element(x: torch.Tensor, i: int) -> Any:
    return x * TABLE[i], x + float(TABLE[i]), float(TABLE[i - 1]), TABLE[:i].sum()


def test_elements_at_places_that_vary() -> None:
    traced = Traced(lambda x, i: x * TABLE[i] + TABLE[i])
    for i in range(1, 7):
        assert torch.equal(traced(X, i), X * TABLE[i] + TABLE[i])
    assert traced.entries <= 2 and not traced.stops
    for i in (-1, 0):
        assert torch.equal(traced(X, i), X * TABLE[i] + TABLE[i])
    for i in (8, -9):
        with pytest.raises(IndexError, match=f"index {i} is out of bounds for axis 0 with size 8"):
            traced(X, i)
    traced = Traced(_reads_an_element)
    for i in range(1, 5):
        got, want = traced(X, i), _reads_an_element(X, i)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[2:] == want[2:]
        assert type(got[2]) is float and type(got[3]) is np.float64
    assert not traced.stops, traced.stops


def test_scalars_of_numpy_in_lists_of_numbers() -> None:
    def scaled(x: torch.Tensor, table: Any) -> Any:
        return (
            *torch._foreach_mul([x, x], [table[0], table[1] / 3]),
            torch.tensor([table[0], 2, table[1]]),
            torch.nn.functional.interpolate(x[None, None], scale_factor=[table[3] * 4, 2.0]),
        )

    traced = Traced(scaled)
    x = torch.randn(2, 3)
    for table in (TABLE, TABLE[::2].copy(), TABLE.astype(np.float32)):
        for got, want in zip(traced(x, table), scaled(x, table), strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want)
    assert not [stop for stop in traced.stops if "raises" in stop], traced.stops


@pytest.mark.parametrize("number", [lambda i: TABLE[i], lambda i: float(TABLE[i])])
def test_a_schedule_of_numpys_for_an_optimizer(number: Callable[[int], Any]) -> None:
    def training() -> tuple[Callable[[int], Any], torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        optimizer = torch.optim.AdamW([weight])

        def step(i: int) -> Any:
            optimizer.param_groups[0]["lr"] = number(i)
            optimizer.zero_grad()
            weight.sin().sum().backward()
            optimizer.step()

        return step, weight

    (step, weight), (other, expected) = training(), training()
    traced = Traced(step)
    for i in range(5):
        traced(i)
        other(i)
        torch.testing.assert_close(weight, expected)
    assert all("backward()" in stop for stop in traced.stops), traced.stops
