"""What is refused is refused as CPython and torch do it: class, words, attributes of errors."""

# Programs under test: mistakes are meant.
# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import math
import operator
import re
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusee
from tests.capturing.same import Traced
from tests.capturing.test_found import alike

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    size: int
    parts: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int = 1


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class D:
    def __init__(s):
        s.x = 1

    @property
    def p(s):
        return s.missing

    @property
    def w(s):
        return 1


class S:
    __slots__ = ("a",)


class A:
    z = 1
    __slots__ = ("a", "__dict__")


class Abs:
    pass


class Fall:
    def __getattr__(s, n):
        raise AttributeError("fall " + n)


class BadLen:
    def __len__(s):
        return -1


class BadBool:
    def __bool__(s):
        return 2


class BadIter:
    def __iter__(s):
        return 3


class BadInit:
    def __init__(s):
        return 3


class BadIndex:
    def __index__(s):
        return "a"


class BadHash:
    def __hash__(s):
        return "a"


class BadStr:
    def __str__(s):
        return 3

    def __repr__(s):
        return 4


class BadEq:
    def __eq__(s, o):
        raise ValueError("eq")


class Mgr:
    def __enter__(s):
        return 1


EXPRESSIONS = r"""
    delattr(a, 'q') ;; delattr(a, 'z') ;; delattr(a, 'a') ;; delattr(NS, 'q') ;;
    delattr(f, 'q') ;; delattr(D(), 'q') ;; delattr(D(), 'w') ;; delattr(3, 'q') ;;
    delattr(a, 'mro') ;; a.q ;; a.a ;; NS.q ;; f.q ;; D().q ;; d.p ;; setattr(d, 'w', 2) ;;
    S().a ;; setattr(S(), 'b', 1) ;; delattr(S(), 'a') ;; (1).x ;; None.x ;; [].x ;; x.foo ;;
    torch.foo ;; math.foo ;; D.q ;; super(D, d).q ;; Frozen(1).b ;; setattr(Frozen(1), 'a', 3) ;;
    delattr(Frozen(1), 'a') ;; {}['a'] ;; {1: 2}[3] ;; {}[1, 2] ;; [][0] ;; list([1])['a'] ;;
    'a' + 1 ;; 1 + 'a' ;; [1] + (1,) ;; len(3) ;; int('x') ;; [1] < 'a' ;; {}.popitem() ;;
    [].pop() ;; set().pop() ;; next(iter([])) ;; (1, 2)[5] ;; 'abc'[9] ;; range(3)[7] ;; D()() ;;
    D(3) ;; d[0] ;; d + 1 ;; 1 + d ;; -d ;; d < d ;; d <= 1 ;; iter(d) ;; len(d) ;; [*d] ;;
    hash([]) ;; hash({}) ;; {[]: 1} ;; {[]} ;; 1 in 3 ;; 1 in d ;; x in d ;; d(1) ;; [*3] ;;
    {**3} ;; f() ;; f(1, 2, 3) ;; f(1, d=1) ;; f(1, a=1) ;; f(*3) ;; f(**3) ;; f(**{1: 2}) ;;
    (lambda a: a)() ;; (lambda a: a)(1, 2) ;; (lambda a: a)(b=1) ;; 1 // 0 ;; 1 % 0 ;; 1.0 / 0 ;;
    1.0 // 0 ;; 0 ** -1 ;; 'x' % 3 ;; '%d' % 'x' ;; '%s %s' % 'x' ;; '%(a)s' % {} ;;
    '{}'.format() ;; '{a}'.format() ;; '{0.q}'.format(d) ;; '{:d}'.format('a') ;;
    format(1, 'q') ;; f"{1:q}" ;; f"{'a':d}" ;; f"{d:>5}" ;; format(d, '5') ;; int([]) ;;
    float('x') ;; float([]) ;; complex('x') ;; chr(-1) ;; ord('ab') ;; [1].index(2) ;;
    [1].remove(3) ;; 'a'.index('b') ;; sorted([1, 'a']) ;; sorted(3) ;; max([]) ;; max(1) ;;
    min() ;; sum(['a']) ;; sum([[1]]) ;; dict([1]) ;; dict([(1, 2, 3)]) ;; dict(3) ;; list(3) ;;
    tuple(3) ;; set(3) ;; set([[]]) ;; isinstance(1, 2) ;; issubclass(1, int) ;; getattr(d, 1) ;;
    setattr(d, 1, 2) ;; hasattr(d, 1) ;; range('a') ;; range(1, 2, 0) ;; slice() ;; zip(1) ;;
    map(1) ;; map(abs, 3) ;; list(map(abs, ['a'])) ;; enumerate(3) ;; reversed({1}) ;;
    reversed(3) ;; 'a'.join([1]) ;; 'a'.join(3) ;; bytes('a') ;; round('a') ;; abs('a') ;;
    divmod(1, 0) ;; divmod('a', 1) ;; pow(2, -1, 4) ;; pow('a', 2) ;; [1, 2].insert('a', 1) ;;
    [0] * 'a' ;; [0] * 1.5 ;; {1: 2}.update(3) ;; {1: 2}.update([1]) ;; {1} | [2] ;;
    {1}.union(3) ;; {1}.remove(2) ;; collections.deque().pop() ;; collections.deque([1])[3] ;;
    collections.deque(maxlen=-1) ;; collections.deque([1]).remove(2) ;;
    collections.deque([1]).index(5) ;; collections.Counter(3) ;;
    collections.OrderedDict().popitem() ;; collections.OrderedDict(a=1).move_to_end('b') ;;
    collections.defaultdict(3) ;; collections.defaultdict(None)['a'] ;; Pair(1) ;;
    Pair(1, 2)._replace(third=3) ;; Pair(1, 2).third ;; Pair._make([1]) ;; Record() ;;
    Record(1, 2, 3) ;; dataclasses.replace(Record(1), q=1) ;; dataclasses.fields(3) ;;
    Color(9) ;; Color['X'] ;; Color.X ;; Color.RED.q ;; functools.partial() ;;
    functools.partial(3) ;; functools.reduce(f, []) ;; functools.reduce(f, 3) ;; math.sqrt(-1) ;;
    math.log(0) ;; math.sqrt('a') ;; math.factorial(-1) ;; math.exp(1000) ;;
    operator.itemgetter(3)([1]) ;; operator.itemgetter() ;; operator.attrgetter('zz')(d) ;;
    operator.methodcaller('zz')(d) ;; operator.add(1, 'a') ;; operator.index(1.5) ;;
    itertools.islice([1], -1) ;; list(itertools.islice([1], 'a')) ;;
    list(itertools.starmap(f, [1])) ;; list(itertools.product(3)) ;;
    list(itertools.combinations([1], -1)) ;; list(zip([1], 3)) ;;
    list(zip([1], [1, 2], strict=True)) ;; next(iter(()), ) ;; next(3) ;; iter(3) ;;
    iter(3, 4) ;; Fall().x ;; bool(BadBool()) ;; bool(BadLen()) ;; len(BadLen()) ;;
    list(BadIter()) ;; BadInit() ;; list([1])[BadIndex()] ;; hash(BadHash()) ;; {BadHash(): 1} ;;
    str(BadStr()) ;; repr(BadStr()) ;; f"{BadStr()}" ;; [1] == BadEq() ;; BadEq() in [1] ;;
    [BadEq()].index(1) ;; [1].index(BadEq()) ;; type('X', (3,), {}) ;; type('X', (bool,), {}) ;;
    type(3, (), {}) ;; super().x ;; re.compile('(') ;; re.match('a', 3) ;; int('1', 99) ;;
    'a'.split('') ;; 'abc'.replace(1, 2) ;; 'a'.encode('nope') ;; b'\xff'.decode() ;;
    bytearray([300]) ;; bytes([300]) ;; (1).to_bytes(0, 'big') ;; 1 << -1 ;; 'a' * -1 + 3 ;;
    [1, 2, 3][::0] ;; [][1:2] + 3 ;; x.view(3) ;; x + torch.ones(3) ;; x @ x.view(4, 1)[:2] ;;
    torch.cat([]) ;; torch.stack([x, x[:2]]) ;; x[5] ;; x[0, 0] ;; x['a'] ;; x[None, 5] ;;
    x.sum(3) ;; x.reshape(3, -1) ;; x.expand(2) ;; x.to('nope') ;; torch.tensor('a') ;;
    torch.tensor([1, 'a']) ;; torch.ones('a') ;; torch.ones(-1) ;; x.transpose(0, 5) ;;
    F.linear(x, x.view(2, 2)) ;; x.add() ;; x.add(1, 2, 3) ;; torch.add(x, q=1) ;; x < 'a' ;;
    x + None ;; None + x ;; -'a' ;; ~1.5 ;; x.size(9) ;; x.item() ;; float(x) ;; int(x) ;;
    bool(x) ;; len(torch.tensor(1)) ;; iter(torch.tensor(1)) ;; [*torch.tensor(1)] ;; x.foo() ;;
    x.shape[9] ;; x.dtype.q ;; x.fill_('a') ;; x.copy_(torch.ones(3)) ;; x.normal_(-1, -1) ;;
    torch.zeros(2).index_fill_(0, torch.tensor([5]), 1) ;; x.unsqueeze(9) ;; x.squeeze('a') ;;
    torch.arange(1, 0) ;; torch.linspace(0, 1, -1) ;; torch.full((2,), 'a') ;;
    torch.nn.Linear(2, 2)(x) ;; torch.nn.Linear('a', 2) ;; torch.nn.ReLU()() ;;
    torch.nn.Module()(x) ;; torch.nn.Parameter(3) ;; torch.nn.functional.dropout(x, 2.0) ;;
    torch.where(x, x, x) ;; torch.where(x > 0, x, 'a') ;; x.backward() ;; x.sum().backward() ;;
    x.requires_grad_(3) ;; torch.tensor([1]).requires_grad_() ;; x.numpy().q ;; x.type('q') ;;
    x.split(0) ;; x.split([1, 1]) ;; x.chunk(0) ;; torch.max(x[:0]) ;; x[:0].argmax() ;;
    x.topk(9) ;; x.sort(9) ;; x.gather(0, x) ;; x.scatter(0, x, x) ;; x.masked_fill(x, 1) ;;
    x.permute(0, 1) ;; torch.einsum('ij', x) ;; torch.mm(x, x) ;; torch.dot(x, x[:2]) ;;
    x.clamp() ;; x.pow('a') ;; x.repeat() ;; x.flip(5) ;; x.roll(1, 9) ;;
    x.view(torch.float64, 3) ;; x.stride(5) ;; raise ValueError('v') from 3 ;; raise D from D ;;
    raise ValueError from int ;; raise 3 ;; raise f from None ;; raise ;; del nothing ;;
    match 3: case f(): pass ;; [*Color.RED] ;; f(*Color.RED)
"""

NS = types.SimpleNamespace(a=1)
REFUSED = [text.strip() for text in EXPRESSIONS.split(";;")]
SHARE = 30


def f(a, b=2, *, c=3):
    return a


def told(run, *given):
    torch.manual_seed(0)
    return re.sub("0x[0-9a-f]+", "0x", repr(run(torch.arange(4.0), *given)))


@pytest.mark.parametrize("first", range(0, len(REFUSED), SHARE))
def test_as_python_refuses_it(first):
    d, a, differing = D(), A(), []
    for text in REFUSED[first : first + SHARE]:
        is_statement = text.startswith(("raise", "del ", "match"))
        line = text.replace(": case", ":\n            case") if is_statement else f"return {text}"
        source = f"""
def fn(x, d, a):
    try:
        {line}
    except Exception as e:
        of = type(getattr(e, "obj", None)).__name__
        return type(e).__name__, str(e), getattr(e, "name", None), of, repr(e.__context__)
"""
        names = dict(globals())
        exec(source, names)
        traced = Traced(names["fn"])
        for _ in range(2):
            want, got = told(names["fn"], d, a), told(traced, d, a)
            if want != got:
                differing.append((text, want, got))
    assert not differing


@pytest.mark.parametrize("given", [3, [1], zip([1], [2]), {1: 2}.items()], ids=type)
def test_what_is_no_mapping_is_refused_between_graphs_too(given):
    def fn(x, given):
        return {"x": x.sin(), **given}

    for run in (fn, Traced(fn)):
        with pytest.raises(TypeError, match=f"'{type(given).__name__}' object is not a mapping"):
            run(torch.ones(2), given)


# What ATen refuses for dtypes, numbers and axes, where nobody asks for the result.
UNUSED = """
    F.avg_pool2d(x, 2) ;; F.max_pool2d(x, 2) ;; F.glu(x) ;; F.pad(x, (1, 1, 1, 1), "reflect") ;;
    F.grid_sample(x, torch.zeros(1, 2, 2, 2)) ;; F.unfold(x, 2) ;; F.fold(x[0], (3, 3), 2) ;;
    F.interpolate(x, (5, 5), mode="bilinear") ;; F.interpolate(x, (5, 5), mode="bicubic") ;;
    F.interpolate(x, (5, 5), mode="bilinear", antialias=True) ;; F.interpolate(x, (2, 2)) ;;
    F.adaptive_avg_pool2d(x, 2) ;; F.huber_loss(x, x) ;; x.logcumsumexp(0) ;; x.argmax() ;;
    torch.aminmax(x) ;; x.nansum() ;; torch.bucketize(x, torch.ones(2)) ;; x.uniform_() ;;
    x.random_() ;; x.normal_() ;; x.fill_(1j) ;; x.mul_(1j) ;; torch.complex(x, x) ;;
    x.masked_fill_(x, 1) ;; torch.bitwise_not(x) ;; x.uniform_(3, 1) ;; x.random_(5, 2) ;;
    x.clamp_() ;; F.smooth_l1_loss(x, x, beta=-1.0) ;; F.softshrink(x, -1) ;; F.celu(x, 0.0) ;;
    torch.mvlgamma(x, 0) ;; F.avg_pool2d(x, 2, divisor_override=0) ;; torch.bucketize(x, x) ;;
    x.sort(9) ;; torch.unique(x, dim=9) ;; x.max() ;; x.masked_select(x) ;;
    torch.hann_window(3, dtype=x.dtype) ;; torch.unique(torch.empty(1, 0, 0, 2), dim=1) ;;
    torch.fft.fft(x[:, :0]) ;; torch.hash_tensor(x[:0], 1) ;; F.conv2d(x[:0], x[:0]) ;;
    F.adaptive_avg_pool2d(x[..., :0], 5) ;; F.interpolate(x[..., :0], 3, mode="bilinear") ;;
    torch.as_strided_copy(x, (4, 9)) ;; torch.as_strided_copy(x, (9, 9), (9, 1)) ;;
    torch.diagonal_scatter(x[0, 0], x[0, 0, 0], 4) ;; F.gelu(x, approximate="none of these") ;;
    torch._foreach_sub([x], True) ;; torch._foreach_sub([x], [1.5]) ;; torch._foreach_norm([x]) ;;
    torch._foreach_maximum([x, x], [x, x]) ;; torch._foreach_add([x], [x], alpha=True) ;;
    torch._foreach_clamp_min([x], 1) ;; torch._foreach_pow([x], -1) ;; torch._foreach_sign([x])
"""


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float32])
def test_refused_where_nobody_uses_the_result(dtype):
    differing = []
    for text in UNUSED.split(";;"):
        source = f"""
def fn(x):
    try:
        {text.strip()}
    except Exception as e:
        return type(e).__name__, str(e)
    return torch.initial_seed(), torch.rand(1).item()
"""
        names = dict(globals())
        exec(source, names)
        told = []
        for call in (names["fn"], Traced(names["fn"])):
            torch.manual_seed(0)
            told.append(call(torch.arange(16).view(1, 1, 4, 4).to(dtype)))
        if told[0] != told[1]:
            differing.append((text.strip(), *told))
    assert not differing


def test_what_is_not_there_is_not_deleted():
    def fn(x, y):
        found = []
        for tensor in (x, x * 2, y):
            try:
                del tensor.w
            except AttributeError as error:
                found.append((str(error), error.name, error.obj is None))
        return x + 1, found

    traced = Traced(fn)
    for is_there in (False, True, False):
        told = []
        for run in (fn, traced):
            y = torch.ones(2)
            if is_there:
                y.w = 3
            told.append((str(run(torch.ones(2), y)), vars(y)))
        assert told[0] == told[1]


METHODS = [
    (lambda: collections.OrderedDict(a=1, b=2), lambda d: d.move_to_end("a")),
    (lambda: collections.OrderedDict(a=1, b=2, c=3), lambda d: d.move_to_end("c", last=False)),
    (lambda: collections.OrderedDict(b=1, a=2), lambda d: [d.move_to_end("b"), dict(d), {**d}]),
    (lambda: collections.Counter("aab"), lambda d: iter(d)),
    (lambda: collections.defaultdict(list, a=[1]), lambda d: iter(d)),
]


@pytest.mark.parametrize(("make", "change"), METHODS)
def test_order_and_iterators_of_dicts(make, change):
    def fn(x, d):
        found = change(d)
        return x + 1, found

    traced = Traced(fn)
    for _ in range(2):
        told = []
        for run in (fn, traced):
            d = make()
            _, found = run(torch.ones(2), d)
            told.append((str(d), type(found), str(found) if type(found) is list else None))
        assert told[0] == told[1]


def test_complex_numbers_of_two_dtypes() -> None:
    """Refused where nobody uses the result, too."""

    def fn(x: Tensor, y: Tensor) -> None:
        torch.complex(x, y)

    for x, y in ((torch.ones(2), torch.ones(2).double()), (torch.arange(2), torch.arange(2))):
        alike(fn, x, y)


def test_masks_that_are_no_bools() -> None:
    def fn(x: Tensor, mask: Tensor) -> list[str]:
        told = []
        for fill in (x.masked_fill, x.masked_fill_):
            for value in (0.5, torch.tensor(0.5)):
                with pytest.raises(RuntimeError, match="only supports boolean masks") as error:
                    fill(mask, value)
                told.append(str(error.value))
        return told

    alike(fn, torch.zeros(3), torch.ones(3, dtype=torch.uint8))


def put_at(x: Tensor, at: Any, value: Any) -> Tensor:
    x = x * 1
    x[at] = value
    return x * 2


MASKED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, m: put_at(x, m, 0.5),
    lambda x, m: put_at(x, (m, ...), torch.ones(())),
    lambda x, m: put_at(x, (..., m), 0.5),
    lambda x, m: put_at(x, m, x[m] + 1),
    lambda x, m: x.index_put((m,), torch.ones(1)),
    lambda x, m: x[m],
]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", MASKED)
def test_masks_of_other_sizes(fn: Callable[[Tensor, Tensor], Tensor], dynamic: bool | None) -> None:
    """Not even where the sizes varied alike before."""
    compiled = fusee.compile(fn, dynamic=dynamic, options={"prices": False})
    for size, mask in ((5, 5), (5, 3), (3, 5), (3, 3), (0, 3), (4, 4)):
        x, m = torch.randn(size), torch.arange(mask) % 2 == 0
        if size != mask:
            with pytest.raises(IndexError, match="The shape of the mask"):
                compiled(x, m)
        else:
            torch.testing.assert_close(compiled(x, m), fn(x, m))
    for call in (fn, fusee.compile(fn, dynamic=dynamic)):
        with pytest.raises(IndexError):
            call(torch.randn(4, 6), torch.ones(3, 6, dtype=torch.bool))


def test_targets_of_other_sizes() -> None:
    compiled = fusee.compile(F.multilabel_margin_loss, dynamic=True)
    for classes in (5, 4):
        x, target = torch.randn(3, classes), torch.zeros(3, classes, dtype=torch.int64)
        torch.testing.assert_close(compiled(x, target), F.multilabel_margin_loss(x, target))
        with pytest.raises(RuntimeError, match="inconsistent target size"):
            compiled(x, target[:, 1:])


def gradient_of_softmax(grad: Tensor, y: Tensor) -> Tensor:
    return torch._softmax_backward_data(grad, y, 1, torch.float32)


def index_select(x: Tensor, at: Tensor) -> Tensor:
    return x.index_select(0, at)


def index_add(x: Tensor, source: Tensor) -> Tensor:
    return x.index_add(0, torch.arange(len(source)), source)


def attention(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask)


def unfold(x: Tensor, kernel: Tensor) -> Tensor:
    return F.unfold(x, kernel.shape, padding=-1)


ONES, ROW, THREE = torch.ones(3, 4), torch.ones(1, 2, 3), torch.tensor(3.0)
LOOKED_AT = [
    (gradient_of_softmax, ((ONES, ONES), (ONES, ONES[:, 1:]), (ONES, ONES[0]))),
    (index_select, ((THREE, torch.tensor(0)), (THREE, torch.tensor([0, 0])))),
    (index_select, ((THREE, torch.tensor([0])), (THREE, torch.tensor([1])))),
    (index_add, ((ONES, ONES[:2]), (ONES, ONES[:2, :1]), (ONES, ONES[:2, 1:]))),
    (attention, ((ROW, torch.ones(2, 2)), (ROW, torch.ones(2, 2, 2)), (ROW, torch.ones(3, 2)))),
    (attention, ((ROW[None], torch.ones(1, 1, 2, 2)), (ROW[None], torch.ones(1, 2, 2, 2)))),
    (unfold, ((torch.ones(1, 1, 5, 5), ROW[0]),)),
]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("fn, calls", LOOKED_AT)
def test_operands_that_no_meta_kernel_looks_at(fn, calls, gradients, dynamic) -> None:
    compiled = fusee.compile(fn, dynamic=dynamic, options={"prices": False})
    for args in calls:
        args = [x.clone().requires_grad_(gradients and x.is_floating_point()) for x in args]
        try:
            want = fn(*args)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                compiled(*args)
        else:
            torch.testing.assert_close(compiled(*args), want)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.clamp_(), lambda x: x.sub_(True), lambda x: x.add_(1, alpha=True),
        lambda x: x.masked_fill_(torch.ones(3, dtype=torch.int64), 1.0),
        lambda x: x.masked_fill_(x > 0, 2j),
    ],
)  # fmt: skip
def test_refusals_of_numbers_by_writes(write: Callable[[Tensor], Tensor]) -> None:
    """Capture hears of them, so that the program's handler does."""

    def fn(x: Tensor) -> str:
        try:
            write(x)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "written"

    assert fusee.compile(fn)(torch.ones(3)) == fn(torch.ones(3)) != "written"


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_tensors_of_more_axes_than_iterators_take() -> None:
    def fn(x: Tensor) -> list[Any]:
        told: list[Any] = [x.sum(), (x + 1).shape]
        for reduce in (torch.sum, torch.mean, torch.amax, torch.count_nonzero):
            with pytest.raises(RuntimeError, match="only tensors with up to 64 dims") as error:
                reduce(x, 0)
            told.append(str(error.value))
        return told

    alike(fn, torch.ones([1] * 65))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64], ids=str)
def test_writes_whose_operators_lack_a_tag(dtype):
    """25 operators in place are not marked as element-wise where those without a write are."""

    def fn(x, other):
        with pytest.raises(RuntimeError, match="different dtypes") as error:
            x.heaviside_(other)
        return x, str(error.value)

    alike(fn, torch.ones(3), torch.ones(3).to(dtype))


def test_batch_norm_of_nothing_counts_nothing() -> None:
    """What the graph makes itself is known ahead, and computed by ATen."""

    def made() -> Tensor:
        return F.batch_norm(torch.empty(0, 5), torch.zeros(5), torch.ones(5), training=True)

    def given(x: Tensor, mean: Tensor, weight: Tensor) -> Any:
        return F.batch_norm(x, mean, weight + 1, weight, training=True).sin() + 1, mean

    assert fusee.compile(made)().shape == (0, 5)
    alike(given, torch.empty(0, 5), torch.zeros(5), torch.ones(5, requires_grad=True))


@pytest.mark.parametrize(
    "move",
    [
        lambda x, there: (x * 2).to(there),
        lambda x, there: torch.zeros(3, device=there, requires_grad=True) * x,
        lambda x, there: torch.empty_like(x, device=there),
    ],
)
def test_devices_that_torch_is_built_without(move: Callable[[Tensor, str], Tensor]) -> None:
    own = torch.accelerator.current_accelerator()
    there = "cuda:0" if own is None or own.type != "cuda" else "xpu:0"
    x = torch.randn(3, requires_grad=True)
    for function in move, fusee.compile(move):
        with pytest.raises(AssertionError, match=f"not compiled with {there[:-2].upper()}"):
            function(x, there)
