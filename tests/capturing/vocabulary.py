"""The words that random programs are made of; programs.py puts them together.

`<I>` and the like stand for an expression of that kind: Int, Float, Bool, Str, Tensor of 4, View of
2 x 2, Object (a Box), FuNction of an int, Pair, Record, SLotted, Generator; Lists of Ints, Strs,
Tensors; Dict of ints, Mapping to tensors, SEt of ints.
"""

from __future__ import annotations

__all__ = ["EXPRESSIONS", "PREAMBLE", "SIMPLE"]

PREAMBLE = """
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import io
import math
import operator
import re
import sys
import zlib

import torch
import torch.nn.functional as F

log = []
COUNT = 3
SCALE = 0.5
WEIGHT = torch.tensor([0.5, -1.0, 2.0, 0.25])
TABLE = {"a": 1, "b": 2}
NAMES = ["a", "b", "c"]


class Odd(ValueError):
    def __init__(self, amount):
        super().__init__(f"odd {amount}")
        self.amount = amount


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    size: int
    parts: list = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left, right):
        self.left = left
        self.right = right


class Box:
    total = 7

    def __init__(self, count, w):
        self.count = count
        self.w = w
        self.parts = [count, count + 1]

    @property
    def double(self):
        return self.count * 2

    @double.setter
    def double(self, value):
        log.append(("double", value))
        self.count = value // 2

    def bump(self, by=1):
        self.count += by
        return self.count

    def scaled(self, x):
        return x * self.w + self.total

    def __call__(self, x):
        return x - self.w

    def __getitem__(self, k):
        return self.parts[k]

    def __setitem__(self, k, value):
        self.parts[k] = value

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        for part in self.parts:
            yield part

    def __contains__(self, k):
        return k in self.parts

    def __eq__(self, other):
        return isinstance(other, Box) and self.count == other.count

    __hash__ = None

    def __add__(self, k):
        return type(self)(self.count + k, self.w)

    def __iadd__(self, k):
        self.count += k
        return self

    @classmethod
    def of(cls, count):
        return cls(count, torch.ones(4))

    @staticmethod
    def half(k):
        return k // 2


class Sub(Box):
    total = 9

    def bump(self, by=1):
        log.append("sub")
        return super().bump(by + 1)

    def __getattr__(self, name):
        if name.startswith("__") or name == "missing":
            raise AttributeError(name)
        return len(name)


class Manager:
    def __init__(self, name, swallow=False):
        self.name = name
        self.swallow = swallow

    def __enter__(self):
        log.append(("enter", self.name))
        return self

    def __exit__(self, kind, error, traceback):
        log.append(("exit", self.name, None if kind is None else kind.__name__))
        return self.swallow and kind is not None and issubclass(kind, Exception)


@contextlib.contextmanager
def managed(name):
    log.append(("begin", name))
    try:
        yield len(name)
    finally:
        log.append(("end", name))


def opaque(k):
    return zlib.crc32(str(k).encode()) % 5


def noted(k, *rest, scale=2, **named):
    log.append(("noted", k, len(rest), sorted(named)))
    return k * scale % 1000


def counted(k):
    global COUNT
    COUNT += k
    return COUNT


def checked(k):
    if k % 2:
        raise Odd(k)
    return k + 1


def branching(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def stepping(k):
    try:
        for i in range(k % 5):
            yield i
            log.append(("step", i))
    finally:
        log.append("stepped")


def delegating(k):
    got = yield from stepping(k)
    yield got
    return k


def twice(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        log.append(function.__name__)
        return function(*args, **kwargs) + function(*args, **kwargs)

    return wrapper
"""


def _words(text: str) -> list[str]:
    """What stands between semicolons."""
    return " ".join(text.split()).split("; ")


EXPRESSIONS: dict[str, list[str]] = {
    "I": _words("""
        1; 3; <I> + <I>; <I> - <I>; <I> * 2; <I> // 2; <I> % 3; len(<LI>); <LI>[0]; <LI>[-1];
        <LI>[<I> % 2]; <D>['a']; <D>.get('c', <I>); <O>.count; <O>.double; <O>.bump();
        <O>.bump(by=<I>); <O>[0]; len(<O>); sum(<LI>); <FN>(<I>); <T>.shape[0]; <T>.dim();
        (<I> if <B> else <I>); max(<I>, <I>); min(<LI>); next(<G>, -1);
        sum(i * 2 for i in <LI> if i % 2); opaque(<I>); noted(<I>, *<LI>);
        noted(<I>, scale=<I>, **<D>); counted(<I>); checked(<I>); int(<F>); abs(<I>); len(<S>);
        <P>.first; <P>[0]; <R>.size; <SL>.left; Box.half(<I>); <O>.total;
        getattr(<O>, 'extra', <I>); [5, *<LI>].index(5); hash(<I>); <LI>.count(<I>); len(<SE>);
        Color.RED.value; len({**<D>, 'z': <I>}); id(<O>) * 0; twice(noted)(<I>);
        (lambda a, b=<I>: a + b)(<I>); int(<T>.sum().item() > 0);
        functools.reduce(lambda a, b: a - b, <LI>, 0); int(<T>[0]); <LI>.pop(); <D>.pop('b', 0);
        sorted(<LI>, key=lambda i: -i)[0]; <R>.parts[-1]; len(<LT>); <D>.setdefault('d', <I>);
        list(<D>.values())[0]; <O>.missing; (<I> % 9) ** 2; ~<I>; -<I>; (<I> or <I>);
        (<B> and <I>); [*<LI>, <I>][-1]; len(list(<G>)); dict(zip(<LS>, <LI>)).get('a', 0);
        functools.partial(noted, <I>, scale=3)(); divmod(<I>, 3)[1]; round(<F>); len(locals());
        eval('n'); len([*map(noted, <LI>)]); <O>.__class__.half(<I>); len(dir());
        next(reversed(<LI>), 0); (lambda *a, **k: len(a) + len(k))(*<LI>, **<D>);
        sum(v for v in <D>.values())
    """),
    "F": _words("""
        0.5; 1.5; <F> * <F>; <I> / 2; <F> + <I>; <T>.sum().item(); float(<I>); -<F>
    """),
    "B": _words("""
        True; flag; <I> < <I>; <I> == <I>; not <B>; <B> and <B>; <B> or <B>; <I> in <LI>;
        <S> in <D>; isinstance(<O>, Sub); <T> is <T>; <O> is <O>; <O> == <O>;
        hasattr(<O>, 'extra'); <LI> == <LI>; <LI> is <LI>; bool(<LI>); <I> in <SE>; <D> == <D>;
        any(i > 2 for i in <LI>); all(<LI>); <I> in <O>; <T>.shape == <T>.shape; <S> == <S>;
        0 < <I> < 4; <T>.sum() > 0; (<T> > 0).any(); type(<O>) is Box; callable(<FN>);
        <LT>[0] is <T>; <T>.requires_grad; <I> is not None; <P> == <P>;
        issubclass(type(<O>), Box); torch.is_grad_enabled(); <V>.is_contiguous(); <SE> <= <SE>;
        torch.is_tensor(<T>); bool(<O>)
    """),
    "S": _words("""
        'a'; 'zz'; <LS>[0]; f'{<I>}-{<I>:03d}'; str(<I>); '-'.join(<LS>); <S> + 'b'; <S>.upper();
        repr(<LI>); f'{<F>:.2f}{<B>!r}'; type(<O>).__name__; <LS>[-1][:1]; str(<D>); '%s' % <I>;
        '{}'.format(<I>); Color(<I>).name; str(<P>); <R>.__class__.__name__; repr(<R>);
        type(<G>).__name__; next(iter(<D>), 'none'); repr(<SE>);
        re.sub('[a-m]', '.', <S>); (re.match('(a*)', <S>) or [''])[0]
    """),
    "T": _words("""
        x; torch.ones(4); <T> + <T>; <T> * <F>; <T> - <I>; torch.relu(<T>); torch.sin(<T>);
        <T>.clone(); torch.where(<T> > 0, <T>, <T>); <T>.flip(0); <T>[:]; <LT>[0]; <LT>[-1];
        <O>.w; <V>.reshape(4); torch.full((4,), <F>); <M>['u']; <T>.view(4); <T>.detach();
        <T>.add_(<I>); <T>.mul_(<F>); <O>.scaled(<T>); <O>(<T>); branching(<T>); -<T>;
        torch.cat([<T>[:2], <T>[2:]]); torch.stack(<LT>).sum(0); <I> - <T>; <T> @ torch.eye(4);
        (<T> if <B> else <T>); functools.reduce(torch.add, <LT>); sum(<LT>); <T>.expand(4);
        torch.arange(4) * <F>; <T>.to(torch.float32); <T>.to(torch.float64).float(); <T> ** 2;
        torch.add(<T>, <T>, alpha=<I> + 0); <T>.abs().sqrt(); <T>.cumsum(0);
        torch.tensor([<I>, 1, 2, 3]) * <F>; <T>.new_zeros(4); torch.zeros_like(<T>);
        <V>.t().reshape(-1); [*<LT>][0]; <T>.sort().values; torch.split(<T>, 2)[0].repeat(2);
        (<T> > <I>) * <T>; <T>.contiguous(); <T>.sum() + <T>; <T>.max() - <T>;
        torch.add(<T>, 1, out=<T>); <T>.nonzero().sum() + <T>;
        WEIGHT[torch.tensor([<I> % 6, 0, 1, 2])]; torch.take(<T>, torch.tensor([0, 1, <I> % 5, 3]));
        copy.deepcopy(<T>)
    """),
    "V": _words("""
        torch.ones(2, 2); x.view(2, 2); <T>.view(2, 2); <T>.reshape(2, 2); <V>.t(); <V> + 1;
        <V> @ <V>; <T>[:2] + <V>; <V>.transpose(0, 1); <V>.add_(1); <T>.unflatten(0, (2, 2))
    """),
    "LI": _words("""
        [1, 2]; [3]; [<I>, <I>]; [i + 1 for i in <LI>]; <LI>[:4] + <LI>[:4]; <LI>[1:]; list(<LI>);
        sorted(<LI>); [*<LI>, <I>]; list(range(<I> % 5)); list(<D>.values()); <O>.parts;
        [i for i in <LI> if i > 1]; list(map(<FN>, <LI>)); list(reversed(<LI>)); <LI>.copy();
        list(<G>); list(<O>); [k for k, _ in enumerate(<LI>)]; <R>.parts; sorted(<SE>);
        <LI>[::-1]; [a * b % 9 for a, b in zip(<LI>, <LI>)]; list(filter(None, <LI>));
        <LI>[:3] * 2; copy.deepcopy(<LI>); list(<T>.shape); [i for i in <LI>[:4] for _ in range(2)];
        [noted(i) for i in <LI>]; [opaque(i) for i in <LI>]
    """),
    "LT": _words("""
        [torch.ones(4)]; [<T>]; [<T>, <T>]; [t * 2 for t in <LT>]; <LT> + [<T>];
        list(<M>.values()); <LT>[:1]; <LT>.copy(); [branching(t) for t in <LT>]
    """),
    "LS": _words("""
        ['a', 'b']; [<S>]; list(<D>); sorted(<D>); [s + 'x' for s in <LS>]; <S>.split('-');
        list(<S>); [k for k, v in <D>.items() if v]
    """),
    "D": _words("""
        {'a': 1, 'b': 0}; {'a': <I>}; dict(<D>); {**<D>, 'b': <I>};
        {k: v + 1 for k, v in <D>.items()}; dict(a=<I>, b=2); dict(zip(<LS>, <LI>)); <D>.copy();
        <D> | {'q': <I>}; collections.defaultdict(int, <D>); collections.OrderedDict(<D>);
        collections.Counter(<LS>)
    """),
    "M": _words("""
        {'u': torch.ones(4)}; {'u': <T>}; {'u': <T>, 'v': <T>}; {**<M>, 'w': <T>}; dict(u=<T>)
    """),
    "SE": _words("""
        {1, 2}; {<I>, 5}; set(<LI>); {i % 2 for i in <LI>}; <SE> | <SE>; <SE> & {1, 2};
        frozenset(<LI>)
    """),
    "O": _words("""
        Box(1, torch.ones(4)); box; Box(<I>, <T>); Sub(<I>, <T>); Box.of(<I>); <O> + <I>;
        type(<O>)(<I>, <T>)
    """),
    "FN": _words("""
        (lambda a: a + 1); noted; (lambda a: a * <I> % 100); opaque; (lambda a, k=<I>: a - k);
        <O>.bump; functools.partial(noted, scale=<I>); twice(noted); Box.half; <LI>.count
    """),
    "P": _words("""
        Pair(1, 2); Pair(<I>, <I>); Pair(first=<I>, second=<LI>); <P>._replace(first=<I>);
        (<I>, <T>)
    """),
    "R": _words("""
        Record(1); Record(<I>, <LI>); Record(size=<I>); dataclasses.replace(<R>, size=<I>)
    """),
    "SL": _words("""
        Slotted(1, 2); Slotted(<I>, <I>); Slotted(<I>, <T>)
    """),
    "G": _words("""
        iter([1, 2]); iter(<LI>); stepping(<I>); delegating(<I>); (i + <I> for i in <LI>);
        map(<FN>, <LI>); enumerate(<LI>); zip(<LI>, <LI>); filter(None, <LI>)
    """),
}

SIMPLE: list[str] = _words("""
    log.append(('at', <I>)); log.append(<T>); log.append(<LI>); log.append(<S>); <LI>.append(<I>);
    <LI>.extend(<LI>[:2]); <LI>.insert(0, <I>); <LI>.reverse(); <LI>.sort(); <LI>[:1] = [<I>];
    <LI>[1:] = <LI>; <LI>[-1] += <I>; del <LI>[0]; <LI>.clear(); <LI>.remove(<LI>[0]);
    <D>['a'] = <I>; <D>['n'] = <I>; <D>['a'] += <I>; <D>.update(<D>); <D>.pop('a'); <D>.clear();
    <D>.popitem(); <SE>.add(<I>); <SE>.discard(<I>); <LT>.append(<T>); <LT>[0] = <T>;
    <LT>[0] += <T>; <LT>.pop(); <M>['u'] = <T>; <M>['v'] = <T>; <M>['u'].add_(<I>); <M>['u'] += 1;
    <T>.add_(<T>); <T>.mul_(<F>); <T>.zero_(); <T>[0] = <F>; <T>[1:3] = <T>[:2].clone();
    <T>[<I>] += 1; <T>.copy_(<T>); <V>[0].add_(<I>); <V>[:, 0] = 2.0; <V>.t_();
    <T>[<T> > 0] = 0.0; <T>.fill_(<F>); <T>.relu_(); <V>.t()[0] -= <I>; <T>.data.add_(1);
    <T>.unsqueeze_(0).squeeze_(0); <T>.clamp_(min=<F>); <O>.count = <I>; <O>.count += <I>;
    <O>.double = <I>; <O>.w = <T>; <O>.w += <T>; <O>.extra = <I>; <O>.extra = <T>;
    del <O>.parts[0]; <O>[0] = <I>; <O>.parts = <LI>; <O>.parts.append(<I>); <O>.bump();
    <O>.__dict__['late'] = <I>; setattr(<O>, 'extra', <I>); <R>.size = <I>; <R>.parts.append(<I>);
    del <O>.extra; <SL>.left = <I>; <SL>.right = <T>; total += <I>; kept.append(<I>);
    kept[:] = <LI>; COUNT += <I>; SCALE = <F>; WEIGHT = <T>; TABLE = <D>; TABLE['a'] = <I>;
    NAMES.append(<S>); NAMES = <LS>; kept = <LI>; total = <I>; assert <B>, 'asserted';
    raise ValueError(<S>); raise Odd(<I>); checked(<I>); raise KeyError(<I>) from Odd(<I>);
    counted(<I>); opaque(<I>); noted(<I>, <I>, k=<I>); return <T>; return <I>, <LT>; return <O>;
    return <FN>; return <G>; a, b = <I>, <I>; del <D>['b']; del <O>.w, <O>.count;
    first, *rest = <LI>; <T>.requires_grad; box = <O>; items += <LI>[:2]; x += <T>; y = y + <T>;
    x = x * <F>; del items; many = [t + 1 for t in many]; n, flag = <I>, <B>;
    n = n + 1 if <B> else opaque(n); for v in <LI>: noted(v); (walrus := <I>); Box.total;
    print(end=''); functools.lru_cache(<FN>)(<I>); <O> += <I>; global_box = <O>;
    log.append([i for i in (j * 2 for j in <LI>)]); log.extend(sorted(<D>.items())); x += <I>;
    log.append((<T>, <V>)); table['t'] = <I>; box.w.mul_(2); box.self = box; many.append(many[0]);
    raise; import math; log.append(<G>); log.append(<O>); log.append(<FN>); log.append(<SL>);
    log.append(<R>); <T>.backward; torch.manual_seed(0); log.append(torch.rand(4)); next(<G>);
    <T>.sum().backward()
""")
