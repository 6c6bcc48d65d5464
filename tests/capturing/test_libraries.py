"""Python's library and torch's tensors, as models use them, captured whole."""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors
# ruff: noqa: UP031, UP032

from __future__ import annotations

import collections
import copy
import functools
import io
import itertools
import math
import operator
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fusee
from fusee.capture.sources import writer
from tests.capturing.same import Traced, same, shape_of
from tests.capturing.test_language import signature

T = Any
X = torch.arange(6.0).reshape(2, 3) - 2

# ------------------------------------------------------------------------------ libraries


@functools.lru_cache
def cached(n: int) -> int:
    return n * 10


def wrapping(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs) + 1

    return wrapped


@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences(is_sorted: bool) -> None:
    lstm = torch.nn.LSTM(3, 4, batch_first=True)

    def fn(x: T, lengths: T) -> T:
        row = pack_padded_sequence(x + 1, lengths, batch_first=True, enforce_sorted=is_sorted)
        row, _ = lstm(row)
        out, kept = pad_packed_sequence(row, batch_first=True)
        return out * 2, kept

    traced = Traced(fn)
    for lengths in ([4, 2, 1], [3, 3, 2]):
        given = torch.randn(3, 4, 3), torch.tensor(lengths if is_sorted else lengths[::-1])
        torch.testing.assert_close(traced(*given), fn(*given))
    whole = [stop for stop in traced.stops if "depend on the lengths" in stop]
    assert {stop.split()[0] for stop in whole} == {"pack_padded_sequence", "pad_packed_sequence"}
    assert not any(one.function is pack_padded_sequence for one in traced.functions)


@wrapping
def wrapped(x: T) -> T:
    return x * 2


def with_functools(x: T) -> T:
    add = functools.partial(torch.add, alpha=2)
    half = functools.partial(signature, x, c=1)
    total = functools.reduce(lambda a, b: a + b, [x, x, x])
    return add(x, x), half(x, d=1)[0], total, cached(4), wrapped(x), wrapped.__name__


def with_itertools(x: T) -> T:
    rows = list(x)
    return (
        list(itertools.chain(rows, [1])), list(itertools.product([1, 2], repeat=2)),
        list(itertools.accumulate([1, 2, 3])), list(itertools.islice(itertools.count(), 3)),
        list(itertools.zip_longest([1], [2, 3])), list(itertools.combinations(range(3), 2)),
        list(itertools.starmap(operator.add, [(1, 2)])), list(itertools.repeat(1, 2)),
        [(k, list(g)) for k, g in itertools.groupby([1, 1, 2])], list(itertools.permutations("ab")),
        list(itertools.takewhile(lambda n: n < 2, [1, 2, 1])), list(itertools.pairwise([1, 2, 3])),
        list(itertools.chain.from_iterable([[1], [2]])), list(itertools.compress([1, 2], [0, 1])),
    )  # fmt: skip


def with_operator(x: T) -> T:
    pick, name = operator.itemgetter(1, 0), operator.attrgetter("shape")
    return (
        operator.add(x, 1), operator.mul(x, x), pick([3, 4]), name(x), operator.neg(x),
        operator.methodcaller("sum", 0)(x), operator.truth([]), operator.contains([1], 1),
        operator.index(3), operator.iadd([1], [2]), operator.matmul(x, x.T),
        operator.methodcaller("sum", dim=0, keepdim=True)(x), operator.attrgetter("T.shape")(x),
    )  # fmt: skip


def with_collections(x: T) -> T:
    count = collections.Counter("abca")
    groups: Any = collections.defaultdict(list)
    groups["a"].append(x)
    queue = collections.deque([1, 2, 3], maxlen=3)
    queue.append(4)
    queue.appendleft(0)
    order = collections.OrderedDict([("b", 1), ("a", x)])
    order.move_to_end("b")
    chain = collections.ChainMap({"a": 1}, {"b": 2})
    return groups, queue, order, list(order), count.most_common(1), chain["b"], queue.pop()


def with_strings(x: T) -> T:
    name, width = "layer", 3.14159
    parts = (
        f"{name}.{width:.2f}.{x.shape[0]:>3}.{name!r}",
        "%s-%d" % (name, 3),
        "{}:{k}".format(1, k=2),
    )
    return (
        x, parts, name.upper(), "a,b".split(","), "-".join(c for c in name), name.replace("l", "L"),
        name.startswith(("la", "x")), "ay" in name, name[1:3], name.find("y"), " a ".strip(),
        "abc".isalpha(), "a.b.c".rsplit(".", 1), name.encode(), "x" * 3, ord("a"), chr(98),
        "ß".casefold(), "a".zfill(3), "k=v".partition("="), str(3), repr("a"),
        "".join(sorted("cab")),
    )  # fmt: skip


def with_math(x: T) -> T:
    return (
        x * math.sqrt(2), math.pi, math.floor(2.5), math.ceil(2.5), math.log(8, 2), math.inf,
        math.isnan(math.nan), math.prod([2, 3]), abs(-3), round(2.567, 1), divmod(7, 3),
        pow(2, 5, 7), min(3, 1), max([1, 5], key=lambda v: -v),
        sum([1, 2], 3), int("12"), float("1.5"), 7 // 2,
        -7 % 3, 2**-1, 1 << 3, 6 & 3, 6 | 1, 6 ^ 2, ~5, bool([]), complex(1, 2), hex(17), bin(3),
        any([0, 1]), all([]), min([], default=4), math.gcd(12, 8), 1_000, 0.1 + 0.2,
    )  # fmt: skip


def with_lists(x: T) -> T:
    a = [3, 1, 2]
    a.sort(reverse=True)
    a.insert(0, 9)
    a.extend(range(2))
    a.remove(1)
    b = a.copy()
    b[1:3] = [7, 7, 7]
    del b[0]
    b += [x]
    last = a.pop()
    a.reverse()
    pairs = sorted([("b", 2), ("a", 3)], key=lambda p: p[1], reverse=True)
    return (
        x,
        a,
        b,
        last,
        a.index(3),
        a.count(2),
        pairs,
        a[::-1],
        a[-1],
        a * 2,
        a < [5],
        [1, 2] == [1, 2],
    )


def with_dicts(x: T) -> T:
    d: Any = {"a": 1, "b": x}
    d.update(c=3)
    d.setdefault("e", []).append(4)
    popped = d.pop("a")
    got = d.get("z", 5), d.get("b"), "b" in d, "z" not in d
    keys, values, items = list(d), list(d.values()), [k for k, v in d.items()]
    del d["c"]
    merged = d | {"q": 1}
    last = merged.popitem()
    return d, popped, got, keys, values, items, merged, last, dict.fromkeys("ab", 0), len(d), {**d}


def with_sets(x: T) -> T:
    s = {1, 2, 3}
    s.add(4)
    s.discard(9)
    s -= {1}
    frozen = frozenset([1, 2])
    return x, s, s & {2}, s | {8}, s ^ {2}, 2 in s, s.issubset(range(9)), frozen, {2} <= s, len(s)


def with_loops(x: T) -> T:
    total, k = x, 0
    while True:
        k += 1
        if k == 2:
            continue
        if k > 4:
            break
        total = total + k
    for i, (a, b) in enumerate(zip([1, 2], reversed([3, 4])), start=1):
        total = total * i + a - b
    else:
        total = total + 100
    return total if k > 3 and not None else None, [y := n for n in range(3)], y


def with_copies(x: T) -> T:
    nested = [[1], {"a": x}]
    shallow, deep = copy.copy(nested), copy.deepcopy([1, [2]])
    return nested, shallow, deep


def assertions(x: T) -> T:
    assert x.dim() == 2, "two dimensions"
    assert isinstance(x, torch.Tensor)
    return x


def lambdas_and_conditionals(x: T) -> T:
    choose = {"relu": torch.relu, "tanh": torch.tanh, "id": lambda y: y}
    acts = [choose[n] for n in ("relu", "tanh", "id")]
    for act in acts:
        x = act(x)
    flag = None
    return x if flag is None else -x, flag or "default", flag and 1, 1 < 2 < 3, not flag


# ------------------------------------------------------------------------------ tensors


def tensor_attributes(x: T) -> T:
    n, m = x.shape
    return (
        x.shape, x.size(), x.size(0), x.dim(), x.ndim, x.dtype, x.device, x.numel(), len(x),
        x.is_contiguous(), x.T, x.mT, x.stride(), x.requires_grad, x.is_floating_point(), n * m,
        x.new_zeros(2), x.dtype.is_floating_point, x.device.type, x.shape[-1], x.is_cuda, x.layout,
        x.element_size(), torch.is_tensor(x), x.data, x.shape.numel(), x.real, x.nelement(),
        x.storage_offset(), x.grad_fn, x.grad, x.is_leaf, x.get_device(), x.type(), [*x.shape],
        x.shape == (2, 3), torch.Size([2]), x.itemsize,
    )  # fmt: skip


def tensor_indexing(x: T) -> T:
    y = x.clone()
    y[0] = 5
    y[:, 1:] += 1
    y[y > 3] = 0
    rows = torch.tensor([1, 0])
    return y, x[0], x[..., -1], x[None], x[:, ::2], x[rows], x[0, 1], x[[1, 0]], x[x.shape[0] - 1 :]


def tensor_making(x: T) -> T:
    return (
        torch.zeros(2, 3), torch.ones_like(x), torch.arange(3), torch.tensor([1.0, 2]),
        torch.full((2,), 3), torch.cat([x, x]), torch.stack([x, x]), torch.eye(2), torch.empty(0),
        x.new_tensor([1, 2]), torch.tensor(3), torch.as_tensor([1.5]), torch.linspace(0, 1, 3),
    )  # fmt: skip


def tensor_in_place(x: T) -> T:
    y = x + 1
    view = y[0]
    view.mul_(2)
    y += 1
    y.add_(x).clamp_(min=0)
    torch.relu_(y)
    return y, view


def argument_in_place(x: T) -> T:
    x.add_(1)
    x[0] = 9
    x *= 2
    return x


LSTM = torch.nn.LSTM(3, 4)
ATTENTION = torch.nn.MultiheadAttention(3, 1)


def whole_modules(x: T) -> T:
    return LSTM(x), ATTENTION(x, x, x)


def random_numbers(x: T) -> T:
    return (
        torch.rand(2),
        torch.randn_like(x),
        torch.nn.functional.dropout(x, 0.5),
        torch.randperm(4),
    )


def many_results(x: T) -> T:
    values, indices = x.max(1)
    top = torch.topk(x, 2)
    return (
        values,
        indices,
        top,
        top.values,
        x.split(1),
        x.chunk(2),
        x.unbind(),
        x.sort(),
        x.mean((0, 1)),
    )


def unused_parts(x: T) -> T:
    x.exp()
    x.numel()
    return x.sum()


def compares(x: T) -> T:
    return (
        x == 0,
        x != x,
        (x > 0) & (x < 2),
        ~(x > 0),
        x is x,
        x is None,
        -x,
        +x,
        abs(x),
        x // 2,
        x % 2,
    )


def returns_input(x: T) -> T:
    return x, (x, x), [x.view(-1), x.view(-1)]


def returns_nothing(x: T) -> None:
    x + 1


def returns_constant(x: T) -> int:
    return 3


PROGRAMS = [
    with_functools, with_itertools, with_operator, with_collections, with_strings, with_math,
    with_lists, with_dicts, with_sets, with_loops, with_copies, assertions,
    lambdas_and_conditionals, tensor_attributes, tensor_indexing, tensor_making,
    tensor_in_place, argument_in_place, random_numbers, whole_modules, many_results,
    unused_parts, compares, returns_input, returns_nothing, returns_constant,
]  # fmt: skip


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_whole(fn: Callable[..., Any], grad: bool) -> None:
    if grad and fn is argument_in_place:
        return  # a leaf must not be written to
    same(fn, X.clone().requires_grad_(grad))


def test_methods_in_cpp_are_called_between_graphs() -> None:
    """What pybind11 keeps of a function cannot be made again: trying ended the process."""
    store = torch.distributed.HashStore()

    def counted(x: Any) -> Any:
        store.set("calls", str(int(store.get("calls")) + 1) if store.check(["calls"]) else "1")
        return x + 1

    call = fusee.compile(counted, backend="eager")
    for count in (b"1", b"2", b"3"):
        torch.testing.assert_close(call(torch.ones(2)), torch.ones(2) + 1)
        assert store.get("calls") == count


_GETTERS = [operator.itemgetter(0), operator.itemgetter(2), operator.itemgetter(0, 2)]
_CALLERS = [
    operator.methodcaller("count", 2), operator.methodcaller("count", 4),
    operator.methodcaller("index", 4), operator.methodcaller("__getitem__", 1),
]  # fmt: skip
_NAMED = [operator.methodcaller("replace", real=k) for k in (1, 2, 3)]


class _Complex(collections.namedtuple("_Complex", "real imag")):
    def replace(self, real):
        return real + self.imag


@pytest.mark.parametrize(
    ("owner", "asked"),
    [
        ([2, 3, 4], _GETTERS), ([2, 4, 4], _CALLERS), (_Complex(2, 3), _NAMED),
        (_Complex(2, 3), [operator.attrgetter("real"), operator.attrgetter("imag")]),
    ],
)  # fmt: skip
def test_what_a_getter_from_outside_asks_for_is_a_fact(owner, asked) -> None:
    def fn(x, ask):
        return x + 1, ask(owner)

    traced, x = Traced(fn), torch.ones(2)
    for ask in (*asked, *asked):
        assert str(traced(x, ask)) == str(fn(x, ask))
    assert len(traced.graphs) <= len(asked)


class _Answering(types.ModuleType):
    """A module with a class of its own, as transformers and tensorly make one."""

    rows = 3

    @property
    def scale(self) -> float:
        return self.__dict__["_scale"]

    def __getattr__(self, name: str) -> float:
        if name == "lazy":
            return 5.0
        raise AttributeError(f"no {name}")


_ANSWERING = _Answering("_answering")


class _Bound(functools.partial):
    __slots__ = "func"

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func


class _Irreps(tuple):
    def __getitem__(self, k: Any) -> Any:
        return super().__getitem__(k)

    def __len__(self) -> int:
        return super().__len__()

    def __repr__(self) -> str:
        return f"{self[0]}"


_BOUND = _Bound(functools.partial(operator.mul, 3))
_IRREPS = _Irreps((1, 2, 3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * _ANSWERING.scale + _ANSWERING.lazy + _ANSWERING.plain + _ANSWERING.rows,
        lambda x: x * hasattr(_ANSWERING, "scale") + hasattr(_ANSWERING, "nothing"),
        lambda x: _BOUND(x) + 1,
        lambda x: x * _IRREPS[1] + len(_IRREPS) + sum(_IRREPS[1:]),
        lambda x: _Irreps((x, x + 1))[1],
        lambda x: x + (threading.get_ident() in {7: x}) + (threading.get_ident() > 0),
    ],
)
def test_classes_as_other_libraries_have_them(fn: Callable[[T], T]) -> None:
    _ANSWERING._scale, _ANSWERING.plain = 2.0, 7.0
    assert len(same(fn, X).graphs) == 1
    traced = Traced(fn)
    for scale in (2.0, 9.0):
        _ANSWERING._scale = scale
        assert traced(X).tolist() == fn(X).tolist()


def draws(x: T) -> T:
    from matplotlib.figure import Figure

    y = x * 2
    figure = Figure()
    axes = figure.add_subplot(projection="3d" if x.dim() > 1 else None)
    found = axes.plot(*y.numpy()) if x.dim() > 1 else axes.hist(y.numpy())
    return y + 1, len(found)


def images(x: T) -> T:
    from PIL import Image

    made = Image.fromarray((x * 20).to(torch.uint8).numpy())
    return torch.from_numpy(numpy.array(made.resize((4, 4)))).float() + 1


def statistics(x: T) -> T:
    from scipy import optimize, stats

    y = x.flatten().double()
    least = optimize.minimize(lambda at: float(((torch.from_numpy(at) - y) ** 2).sum()), y * 0)
    return y * stats.pearsonr(y.numpy(), y.sin().numpy())[0], least.x.round(3)


def tells(x: T) -> T:
    from rich.console import Console

    y = x * 2
    console = Console(file=io.StringIO(), width=40)
    console.print(f"[bold]{tuple(y.shape)}")
    return y + 1, console.file.getvalue()


@pytest.mark.parametrize(
    "package, fn", [("matplotlib", draws), ("PIL", images), ("scipy", statistics), ("rich", tells)]
)
@pytest.mark.parametrize("shape", [(6,), (3, 4)])
def test_packages_that_draw_or_compute_on_arrays_run_in_python(
    package: str, fn: T, shape: T
) -> None:
    """Their code, followed, was a hundred graphs, and gigabytes for a surface."""
    pytest.importorskip(package)
    if fn is images and len(shape) == 1:
        shape = 2, 6
    traced = Traced(fn)
    want, got = (run(torch.arange(12.0)[: math.prod(shape)].reshape(shape)) for run in (fn, traced))
    assert str(got) == str(want)
    assert len(traced.functions) == 1
    assert any("Python runs by itself" in stop for stop in traced.stops)


# ------------------------------------------------------------------------------ odd classes


class Listed(dict[str, Any]):
    """A dict with attributes that says itself what its `__dict__` is, as munch's does."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    @property
    def __dict__(self) -> Any:
        return {key: [value] for key, value in self.items()}


def test_a_class_says_itself_what_its_dict_is() -> None:
    kept = Listed(scale=2.0, inner=Listed(n=3))

    def fn(x: torch.Tensor) -> Any:
        inner = kept.inner
        y = x * kept.scale * inner.n
        made = Listed(a=y)
        return (
            made.a + 1,
            type(inner),
            vars(inner),
            made.__dict__,
            object.__getattribute__(made, "keys")(),
        )

    assert len(same(fn, torch.ones(2)).graphs) == 1


def test_methods_that_cython_has_compiled_are_not_those_of_the_class_in_c() -> None:
    random = pytest.importorskip("numpy.random.mtrand")

    class Odd(dict):
        __contains__ = random.ranf  # takes one argument at most

    def fn(x: torch.Tensor, odd: Any) -> Any:
        return x * ("a" in odd)

    for compiled in fn, fusee.compile(fn):
        with pytest.raises(TypeError, match="at most 1 positional argument"):
            compiled(torch.ones(2), Odd(a=1))


class Doubling:
    """What wraps a method, and says that it is what it wraps, as wrapt's decorators do."""

    def __init__(self, wrapped: Any) -> None:
        self.__wrapped__ = wrapped

    __class__ = property(lambda self: type(self.__wrapped__))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __get__(self, obj: Any, kind: Any) -> Any:
        return Doubling(self.__wrapped__.__get__(obj, kind))

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args) * 2


class Wrapped:
    @Doubling
    def method(self, x: T) -> T:
        return x + 1

    @Doubling
    @classmethod
    def of_class(cls, x: T) -> T:
        return x + 2

    @Doubling
    @staticmethod
    def static(x: T) -> T:
        return x + 3

    @Doubling
    def __call__(self, x: T) -> T:
        return x + 4


@pytest.mark.filterwarnings("ignore:.*nothing of it became a graph:fusee.errors.FuseeWarning")
def test_proxies_are_not_what_they_say() -> None:
    obj, net = Wrapped(), Doubling(torch.nn.ReLU())
    functions = [obj.method, Wrapped.of_class, obj.of_class, obj.static, obj, net]
    functions += [lambda x, f=f: f(x.sin()) for f in functions]
    functions += [lambda x: Wrapped.of_class(x) + obj.of_class(x) + obj.static(x) + obj.method(x)]
    for function in functions:
        torch.testing.assert_close(fusee.compile(function)(X), function(X))


def test_what_an_object_holds_in_c() -> None:
    core = pytest.importorskip("pydantic_core")

    def fn(x: torch.Tensor, url: Any, other: Any) -> Any:
        return (
            x * (url == other),
            str(url),
            x * len(f"{url}"),
            {url: 3}[other] if url == other else 0,
        )

    compiled = fusee.compile(fn)
    urls = [core.Url(f"http://{name}.org") for name in ("a", "bcd", "a")]
    for url, other in itertools.product(urls, urls):
        want, got = fn(X, url, other), compiled(X, url, other)
        assert got[0].equal(want[0]) and got[1] == want[1] and got[2].equal(want[2])
        assert got[3] == want[3]


def test_a_function_that_is_bound_to_itself(capsys: Any) -> None:
    def odd() -> None: ...

    odd.__self__ = odd  # as networkx marks what it has wrapped

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(odd.__name__, callable(odd))
        print(odd)
        return y * 2

    assert fusee.compile(fn)(X).equal(fn(X))


NAMES = frozenset({("a", "b"), ("c", 1)})
PAIRS = {("a", "b"), (1, 2)}


def test_sets_of_pairs_from_outside() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * (("a", "b") in NAMES), ("c", True) in NAMES, x * ((1, 2) in PAIRS), len(PAIRS)

    assert len(same(fn, torch.ones(2)).graphs) == 1
    compiled = fusee.compile(fn)
    for change in PAIRS.clear, lambda: PAIRS.add((True, 2)), lambda: PAIRS.add((1, 2)), PAIRS.clear:
        got, want = compiled(X), fn(X)
        assert got[0].equal(want[0]) and got[2].equal(want[2]) and got[3] == want[3]
        change()


def test_what_writes_an_attribute_is_the_class_in_c() -> None:
    class Meta(type):
        def __setattr__(cls, name: str, value: Any) -> None: ...

    assert writer(Meta, deletes=False) is type.__setattr__  # object's refuses
    assert writer(Doubling, deletes=True) is object.__delattr__


def own(base: type) -> type:
    """A class that shows other elements than it holds, and writes others than it is given."""

    class Own(base):
        def __iter__(self) -> Any:
            return iter([7])

        def __len__(self) -> int:
            return 5

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value * 2)

        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key) * 10

        def refused(self, *args: Any) -> Any:
            raise ValueError

        update = extend = append = copy = keys = values = items = refused

    return Own


def held(x: Any) -> Any:
    if isinstance(x, dict):
        return list(dict.items(x))
    kind = type(x).__mro__[1]
    return sorted(kind.__iter__(x)), kind.__len__(x)


@pytest.mark.parametrize(
    "base, given, write",
    [
        (list, [1, 2], list.append),
        (collections.deque, [1, 2], collections.deque.append),
        (set, [1, 2], set.add),
        (dict, {3: 4}, lambda x, one: x.setdefault(one, one)),
        (collections.OrderedDict, {}, lambda x, one: x.__setitem__(one, one)),
    ],
)
def test_containers_are_read_as_they_lie(base: Any, given: Any, write: Any) -> None:
    kind = own(base)

    def fn(x: torch.Tensor, outside: Any, is_whole: bool) -> Any:
        made = base.__new__(kind)
        write(made, 3)
        write(outside, 3)
        y = x.sin() * len(outside)
        if not is_whole:
            print(end="")
        write(made, 4)
        write(outside, 5)
        return y.cos(), list(made), list(outside), held(made), held(outside), 7 in made, 3 in made

    for is_whole in True, False:
        found = []
        for function in fn, fusee.compile(fn):
            outside = base.__new__(kind)
            base.__init__(outside, given)
            found.append([shape_of(function(X, outside, is_whole)) for _ in range(3)])
            found[-1].append(held(outside))
        assert found[0] == found[1]


class Pair(tuple):
    def __iter__(self) -> Any:
        return iter([7])

    def __len__(self) -> int:
        return 5


class Whole(int):
    def __rmul__(self, other: Any) -> Any:
        return "asked"

    def __index__(self) -> int:
        return 1


class Part(float):
    def __radd__(self, other: Any) -> Any:
        return "asked"


def test_what_derives_from_tuple_int_and_float() -> None:
    def fn(x: torch.Tensor, is_whole: bool) -> Any:
        pair, n, part = Pair((1, 2)), Whole(3), Part(0.5)
        y = x * n + part
        if not is_whole:
            print(end="")
        read = [*tuple.__iter__(pair)], [*pair], len(pair), tuple.__len__(pair)
        return y.sin() * n, [1, 2, 3, 4][n], range(9)[n], "ab"[:n], 2 * n, 2 + part, read

    for is_whole in True, False:
        want, got = fn(X, is_whole), fusee.compile(fn)(X, is_whole)
        assert shape_of(got) == shape_of(want)
