"""Everyday Python on numbers that vary: arguments, sizes, what tensors hold."""

# ruff: noqa: F401, UP031, UP032  # modules that the table's expressions name

from __future__ import annotations

import bisect
import collections
import copy
import dataclasses
import datetime
import enum
import fractions
import functools
import heapq
import itertools
import json
import math
import numbers
import operator
import os.path
import pathlib
import re
import statistics
import string
import struct
import textwrap
import types
from typing import Any

import numpy as np
import pytest
import torch

from tests.capturing.same import Traced, shape_of

X = torch.ones(3)


class Obj:
    w2 = "two"
    w3 = "three"


class E(enum.Enum):
    A = 2
    B = 3


class FL(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True, order=True)
class D:
    n: Any
    s: str = ""


NT = collections.namedtuple("NT", "a b")
TABLE = {2: "two", 3: "three", (3, "3"): "t"}
cached = functools.lru_cache(lambda n, s="": (n * 2, s))


def kw(**k: Any) -> Any:
    return sorted(k.items())


def star(*a: Any, s: str = "d") -> Any:
    return a, s


# One a line; the program gets what it gives, or the error.
EXPRESSIONS = r"""
sorted([f"{n}", f"{n+1}", "25"])
max(["a", "b"], key=lambda s: f"{s}{n}")
TABLE.get((n, f"{n}"))
"%(n)s" % {"n": n}
f"{n:>6}|{n:<6d}|{n:^6}|{n:06}|{n:+}|{n:x}|{n:b}|{n:e}|{n:,}"
"{:{w}d}".format(n, w=n + 3)
f"{n}ab"[::-1]
int(f"{n}1", 16)
"a2b3".find(str(n))
[1, 2, 3, 4, 5][n]
getattr(Obj(), f"w{n}")
hasattr(Obj, f"w{n}")
(lambda o: (setattr(o, f"z{n}", n), vars(o))[1])(Obj())
isinstance(f"{n}", str), isinstance(n, int), isinstance(n, bool)
isinstance(n, numbers.Integral), isinstance(n, (str, float))
type(n + 0.5), type(n / 1), type(n // 1), type(-n), type(n ** 2), type(n ** -1) if n else 0
json.dumps({"n": n})
os.path.join("a", f"{n}"), os.path.normpath(f"a//{n}/..")
pathlib.PurePosixPath(f"a/{n}.txt").suffix
str(ValueError(n)), repr(ValueError(n, f"{n}"))
round(n / 3, 2), round(n, -1), round(n + 0.5)
divmod(n, 3), divmod(-n, 3), divmod(7, n)
7 / n
n ** 3, 2 ** n, n ** 0.5, pow(n, 2, 5), pow(2, n), (-2) ** n
n << 2, n >> 1, n & 6, n | 8, n ^ 5, ~n, 1 << n
n.to_bytes(2, "big"), int.from_bytes(bytes([n]), "big")
(n).__add__(1), n.__index__(), n.__mul__(2), n.__eq__(3), int.__add__(n, 1)
float(n).is_integer(), (n / 2).as_integer_ratio(), (n / 2).hex(), n.as_integer_ratio()
math.sqrt(n), math.floor(n / 2), math.ceil(n / 2), math.gcd(n, 6), math.log2(n), math.exp(n)
math.hypot(n, 3)
fractions.Fraction(n, 3) + 1
statistics.mean([n, 2, 3]), statistics.median([n, 5, 1])
list(range(n)), list(range(n, 0, -1)), list(range(0, 10, n)), range(n)[-1], len(range(n))
n in range(3), range(5).index(n), range(n) == range(3)
list(itertools.islice(range(10), n)), list(itertools.repeat("a", n))
list(itertools.combinations(range(4), n)), list(itertools.chain([n], [1]))
list(itertools.accumulate([n, 1, 2])), list(itertools.islice(itertools.count(n), 2))
[(k, list(g)) for k, g in itertools.groupby([1, 2, 3, 4], key=lambda i: i > n)]
functools.reduce(operator.add, [n, 1, 2])
functools.reduce(lambda a, b: a * b, range(1, n + 1), 1)
functools.reduce(operator.add, [f"{n}", "a"])
cached(n), cached(n, f"{n}")
slice(n).indices(10), slice(1, n), [1, 2, 3, 4][slice(n)]
bisect.bisect([1, 2, 3, 4], n), bisect.bisect_left(["2", "3"], f"{n}")
bisect.bisect([1, 3, 5], n, key=lambda v: v + n)
heapq.nsmallest(n, [3, 1, 2]), heapq.nlargest(2, [n, 1, 5])
heapq.merge([n], [1]).__class__.__name__
(lambda h: (heapq.heappush(h, n), heapq.heappop(h)))([1, 2, 3])
heapq.nsmallest(1, ["5", f"{n}"])
collections.Counter([n, 3, n]), collections.Counter("aab").most_common(n)
collections.Counter([f"{n}", "3"])
collections.OrderedDict([(n, 1), ("a", n)]), collections.defaultdict(int, {n: 1})[n]
collections.ChainMap({n: 1}, {3: 2})[3]
NT(n, f"{n}"), NT(n, 1)._replace(b=n), NT(n, 2) == (3, 2), NT(n, 2)._asdict()
NT._make([n, 1])
D(n), D(n, f"{n}"), D(n) == D(3), D(n) < D(3, "a"), hash(D(n)) == hash(D(3))
dataclasses.asdict(D(n)), dataclasses.replace(D(1), n=n), repr(D(n, f"{n}"))
E(n)
FL(n), FL.A | n, FL(n) & 2, FL(3) == n
datetime.timedelta(days=n), str(datetime.date(2020, 1, n))
datetime.timedelta(seconds=n) * n, datetime.date(2020, 1, 1) + datetime.timedelta(n)
struct.pack("<i", n), struct.unpack("<i", struct.pack("<i", n)), struct.calcsize(f"{n}s")
np.zeros(n).shape, np.arange(n).tolist(), np.int64(n), np.float32(n) / 2, np.array([n, 1.5])
np.ones((2, n)).sum(), np.eye(n)[0], np.linspace(0, 1, n), np.full(2, n), np.arange(4)[n]
np.arange(4).reshape(-1, n), np.repeat([1, 2], n), np.tile([1], n), np.power(2, n)
np.clip(n, 0, 3), np.sqrt(n), np.random.RandomState(n).randint(5)
hash(n), hash((n, 1)), hash(f"{n}") == hash(str(n)), id(n) == id(n)
hash(n) == hash(n + 0.0)
(lambda d: (d.setdefault(n, []).append(1), d.pop(3, None), d))({})
{**{f"a{n}": 1}, "b": 2}, kw(**{f"a{n}": n}), kw(**dict(zip(["a", "b"], range(n))))
star(*range(n)), dict.fromkeys(range(n), n), dict([(n, 1)]), {n: 1} | {3: 2}
set(range(n)) | {n}, {1, 2, 3} - {n}, frozenset([n, 1]) == frozenset([1, 3])
{n} <= {1, 2, 3}, sorted({n, 3, 1})
copy.copy([n]), copy.deepcopy({"a": [n, f"{n}"]}), types.SimpleNamespace(a=n)
types.SimpleNamespace(a=n) == types.SimpleNamespace(a=3)
x.new_zeros(n).shape, x[:n], x.repeat(n), x.view(-1, 1).expand(-1, n), torch.arange(n)
torch.full((2,), n), torch.tensor([n, 1]), torch.tensor(n), torch.ones(n, 2).sum()
torch.eye(n), x.roll(n), x ** n, torch.linspace(0, 1, n)
x.sum(n), x.unsqueeze(n)
torch.Size([n, 2]), torch.Size((n,)).numel(), torch.zeros(2, n).shape
str(torch.zeros(n).shape), torch.zeros(n).size(0) + n, list(torch.zeros(n, 2).shape)
torch.zeros(n).numel()
re.match(r"(\d)", f"{n}a").group(1), re.findall("[0-9]+", f"a{n}b{n + 1}")
re.sub(f"{n}", "z", "a2b3"), re.compile(f"[{n}]").search("a3") is None
string.Template("$n").substitute(n=n), textwrap.wrap(f"aaa {n} bbb ccc", n + 5)
string.capwords(f"a {n}")
eval("n + 1", {"n": n}), (lambda: n)(), (lambda n=n: n)()
[f() for f in [lambda i=i: i * n for i in range(2)]]
x.shape[0] + n, x.shape[0] * n, f"{x.shape[0]}{n}", x.dim() - n, (x.shape[0] + n) // 2
x.numel() == n, x.size(-1) > n, tuple(x.shape) + (n,), [*x.shape, n]
print(n, f"{n}", sep=f"{n}"), print(x.shape, n, end="\n")
[a := n + 1, a * 2], (b := f"{n}") + b
n.foo
len(n)
[*n]
f"{n:q}"
{[n]: 1}
x[n + 10]
(_ for _ in ()).throw(ValueError(n))
""".strip().splitlines()

PROGRAM = """
def fn(x, t, n):
    y = x * 2
    {}
    try:
        found = {}
    except Exception as error:
        found = type(error).__name__, str(error)
    return y, found
"""
INTS, FLOATS = [2, 3, 4, 0, -1], [2.0, 2.5, -1.5, 0.0, math.inf]
# What n is, and some of what it is in turn.
KINDS: dict[str, tuple[str, list[Any]]] = {
    "an int": ("pass", [*INTS, True, None]),
    "a float": ("pass", FLOATS),
    "a size": ("n = x.shape[0]", [2, 3, 4, 0, 1]),
    "an int of a tensor": ("n = t.item()", INTS),
    "a float of a tensor": ("n = t.item()", FLOATS),
}


def outcome(fn: Any, *args: Any) -> Any:
    try:
        return shape_of(fn(*args))
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        return type(error), str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_everyday_python_on_numbers_that_vary(kind: str) -> None:
    line, values = KINDS[kind]
    for text in EXPRESSIONS:
        space = dict(globals())
        exec(PROGRAM.format(line, f"({text})"), space)
        fn, traced = space["fn"], Traced(space["fn"])
        for value in values:
            x = torch.arange(float(value if kind == "a size" else 4))
            t = torch.tensor(value) if "tensor" in kind else None
            want = outcome(fn, x, t, value)
            assert outcome(traced, x, t, value) == want, (text, value, traced.stops)


def test_names_and_texts_of_numbers_that_vary_stay_in_the_graph() -> None:
    def fn(x: Any, n: int) -> Any:
        x = x * 2
        made = dict(zip([n, f"a{n}"], [getattr(Obj, f"w{n}"), 1]))
        told = re.sub(r"\d", lambda found: str(int(found[0]) + n), "a1")
        keys = {D(n): x, NT(n, 1): x + 1, D(n, "b"): 1}  # C code asks for their hashes
        return keys[D(n)] + keys[NT(n, 1)], made, told, os.path.join("a", f"{n}"), {D(n), D(3)}

    traced = Traced(fn)
    for n in (2, 3):
        assert outcome(traced, torch.ones(2), n) == outcome(fn, torch.ones(2), n)
    assert not traced.stops


def test_a_write_before_what_a_number_raises_is_done() -> None:
    def fn(x: Any, n: float) -> int:
        x.add_(1)
        return int(n)

    traced = Traced(fn)
    for n in (1.5, 2.5, math.inf, 3.5, math.nan):
        x, y = torch.ones(2), torch.ones(2)
        assert outcome(traced, x, n) == outcome(fn, y, n)
        assert x.tolist() == y.tolist()


# ------------------------------------------------------------------------ numbers that are printed


def shown_in_a_text(x: Any, log: Any) -> Any:
    y = x.sin()
    log.append(f"mean {y.mean().item():.4f}")
    return y.cos() * 2


def shown_by_a_format(x: Any, log: Any) -> Any:
    y = x.sin()
    log.append("mean {:.3f} of {}".format(y.mean().item(), len(x)) + "!")
    return y.cos() * 2


def shown_by_percent(x: Any, log: Any) -> Any:
    y = x.sin()
    log.append("mean %.3f" % y.mean().item())
    return y.cos() * 2


def shown_beside_names(x: Any, log: Any) -> Any:
    y = x.sin()
    log.append(dict(a=f"{y.max().item():.3f}", b=len(x)))
    return y.cos() * 2


def letter_by_letter(x: Any, log: Any) -> Any:
    y = x.sin()
    for letter in f"{y.mean().item():.1f}":
        y = y * 1.5
        log.append(letter)
    return y.cos() * 2


no_texts: dict[str, Any] = {}


def refused(x: Any, log: Any) -> Any:
    y = x.sin()
    try:
        log.append(no_texts[f"{y.mean().item():.3f}"])
    except KeyError as error:
        log.append(error.args)
    return y.cos() * 2


def shown_among_others(x: Any, log: Any) -> Any:
    y = x.sin()
    log.append(" ".join(["mean", f"{y.mean().item():.4f}", f"of {y.max().item()}"]))
    return y.cos() * 2


def shown_at_last(x: Any, log: Any) -> Any:
    y = x.sin()
    return f"mean {y.mean().item():.4f}", (y.cos() * 2).tolist()


AS_TEXTS = (
    shown_in_a_text,
    shown_by_a_format,
    shown_by_percent,
    shown_beside_names,
    shown_among_others,
    shown_at_last,
)


@pytest.mark.parametrize("fn", [*AS_TEXTS, letter_by_letter, refused])
def test_a_text_that_is_another_at_each_call(fn: Any) -> None:
    """What follows it stays compiled, and has few versions."""
    traced, entries = Traced(fn), []
    logs: tuple[list[Any], list[Any]] = ([], [])
    for k in range(12):
        x = torch.arange(4.0) * (k - 7) / 5
        results = [run(x, log) for run, log in zip((fn, traced), logs)]
        assert shape_of(results[1]) == shape_of(results[0])
        entries.append(traced.entries)
    assert logs[0] == logs[1]
    if fn in AS_TEXTS:
        assert entries[-1] == entries[5] < 10
        assert not any(site.is_full for site in traced.compiled.sites.values())


def test_what_only_prints_is_not_told_of() -> None:
    """A function without a graph loses nothing where Python runs it; one with graphs does."""

    def told(fn: Any) -> list[str]:
        traced, found = Traced(fn), list[str]()
        traced.compiled.notice = lambda text, where: found.append(text)
        for k in range(12):
            traced(X, f"loss {k / 7:.3f}")
        return [text for text in found if "compiled versions" in text]

    assert not told(lambda x, text: print(text, end=""))
    assert told(lambda x, text: (x * 2, text))
