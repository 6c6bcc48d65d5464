"""Everyday Python on objects from outside: all that is done with a kind of object."""

# ruff: noqa: F401  # modules that the table's lines name

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import functools
import heapq
import io
import itertools
import json
import operator
import random
import re
import string
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.capturing.same import Traced, shape_of

# mypy: ignore-errors


class Pt:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __repr__(self):
        return f"Pt({self.a!r})"

    def __eq__(self, o):
        return isinstance(o, Pt) and self.a == o.a

    def __hash__(self):
        return hash(self.a)


class Ob:
    cls = [1]  # noqa: RUF012

    def __init__(self):
        self.n = 1
        self.l = [1, 2]
        self.d = {"k": 1}
        self.t = torch.ones(2)

    def __bool__(self):
        return self.n > 0

    def __len__(self):
        return 7

    def __call__(self, v=1):
        self.n += v
        return self.n

    def meth(self, v):
        self.l.append(v)
        return self

    @property
    def p(self):
        return self.n * 2

    @p.setter
    def p(self, v):
        self.n = v

    @classmethod
    def c(cls, v):
        return cls.__name__, v

    @staticmethod
    def s(v):
        return v + 1

    def __iter__(self):
        yield from self.l

    def __contains__(self, v):
        return v in self.l

    def __enter__(self):
        self.n += 10
        return self

    def __exit__(self, *e):
        self.n -= 5
        return True

    def __reversed__(self):
        return iter(self.l[::-1])

    def __format__(self, s):
        return f"<{s}>"

    def __index__(self):
        return 1

    def __getattr__(self, n):
        if n.startswith("auto"):
            return n
        raise AttributeError(n)


NT = collections.namedtuple("NT", "a b")

MADE: dict[str, Callable[[int], Any]] = {
    "list": lambda k: [3, 1, 2] if k % 2 == 0 else [1, "a", None, torch.ones(2)][: k + 1],
    "tlist": lambda k: [torch.ones(2) * i for i in range(k + 1)],
    "dict": lambda k: (
        {"a": 1, "b": [2], 3: torch.ones(2)} if k % 2 == 0 else {f"k{i}": i for i in range(k)}
    ),
    "set": lambda k: {1, 2, 3 + k},
    "obj": lambda k: Ob(),
    "deque": lambda k: collections.deque([1, 2, 3 + k], maxlen=4),
    "odict": lambda k: collections.OrderedDict([("z", 1), ("a", k)]),
    "ddict": lambda k: collections.defaultdict(list, {"a": [k]}),
    "counter": lambda k: collections.Counter("abca" + "b" * k),
    "tup": lambda k: (1, [2, k], torch.ones(2), NT(1, [k])),
    "str": lambda k: ["a,b c", "", "Hello World", "x1y22"][k % 4],
    "gen": lambda k: (i * 2 for i in range(k + 2)),
    "it": lambda k: iter([1, 2, 3, 4][: k + 2]),
    "arr": lambda k: np.arange(4.0) + k,
    "none": lambda k: None,
    "ns": lambda k: types.SimpleNamespace(a=k, b=[1]),
    "bytes": lambda k: bytearray(b"ab" * (k + 1)),
    "frozen": lambda k: frozenset({1, k}),
    "mod": lambda k: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()),
    "pt": lambda k: Pt(k, [1]),
}

# What is done with one, `a`; `x` is a tensor.
LINES = {
    "list": r"""
        a.append(x.sum()); a.extend([1, 2]); a.insert(1, "i"); a.pop(); a.pop(0); a.remove(1);
        a.reverse(); a.sort(key=str); a.clear(); a.copy(); a.index(1); a.count(1); a + [1]; a * 2;
        a.__iadd__([5]); a.__imul__(2); a[0]; a[-1]; a[::-1]; a[1:]; a.__setitem__(0, x);
        a.__setitem__(slice(0, 2), [7, 8, 9]); a.__delitem__(0);
        a.__delitem__(slice(None, None, 2)); 1 in a; sorted(map(str, a)); list(reversed(a));
        list(zip(a, a)); [*a, *a]; a == [3, 1, 2]; a < [4]; len(a); max(a); sum(a);
        list(map(type, a)); list(enumerate(a, 1)); [v for v in a if v]; any(a); all(a);
        dict(enumerate(a)); ",".join(map(str, a)); a.sort(); a.sort(reverse=True); a.extend(a);
        a.extend(v for v in a[:2]); heapq.heapify(a); heapq.heappush(a, 0); bisect.insort(a, 2);
        a is a[:]; tuple(a); set(map(id, a)) and 1; copy.copy(a); copy.deepcopy(a);
        list.append(a, 1); operator.iadd(a, [1]); operator.setitem(a, 0, 5); operator.delitem(a, 0);
        a.__len__(); iter(a).__next__(); next(iter(a), 0);
        functools.reduce(lambda p, q: q, a, None); a.pop(10); a.remove("zz"); a["x"]; a.foo;
        json.dumps(a, default=str); isinstance(a, collections.abc.Sequence); repr(a[:1]);
        random.Random(1).shuffle(a); a.__class__; a.__contains__(1); a.append(a) or len(a);
        (a.append(1), a.pop(), a.append(2)); [a.append(i) for i in range(3)];
        a.__reversed__().__next__(); itertools.chain(a, a).__next__();
        list(itertools.islice(a, 1, None)); print(a[:1]);
    """,
    "tlist": r"""
        torch.stack(a); torch.cat(a); sum(a); a.append(a[0] * 2);
        a.sort(key=lambda t: -t[0].item()); max(a, key=lambda t: t.sum()); [t.add_(1) for t in a];
        torch._foreach_add(a, 1); [t.shape for t in a];
        torch.stack([*map(torch.sin, a)]); a[0].mul_(3); a.__setitem__(0, x); a.reverse();
        a[0] in a; a.index(a[-1]); a.count(a[0]); a.remove(a[0]); a == a; a == a[:];
        copy.deepcopy(a); functools.reduce(torch.add, a); torch.einsum("i,i->", a[0], a[-1]);
        list(zip(*a)); [*a[0]]; dict(zip("abc", a)); torch.nn.utils.rnn.pad_sequence(a);
        torch.nn.utils.parameters_to_vector(a); torch.meshgrid(*a, indexing="ij");
        torch.broadcast_tensors(*a); torch.block_diag(*a); {id(t): t for t in a}.__len__();
        any(t is a[0] for t in a); a.pop().sub_(1); a.insert(0, a.pop());
    """,
    "dict": r"""
        a["new"] = x; a.get("a"); a.get("zz", x); a.pop("a"); a.pop("zz", None); a.pop("zz");
        a.setdefault("q", []).append(1); a.update(z=1); a.update({"a": 5}); a.update([("b", 1)]);
        a | {"r": 1}; a.__ior__({"w": 2}); a.popitem(); a.clear(); a.copy(); list(a);
        list(a.items()); list(a.values()); list(a.keys()); sorted(map(str, a)); "a" in a; len(a);
        {**a, "y": 1}; {str(k): v for k, v in a.items()}; dict(a); list(reversed(a)); a == dict(a);
        a.keys() & {"a"}; a.keys() | {"q"}; a.keys() - {"a"}; ("a", 1) in a.items();
        1 in a.values(); max(a, key=str); min(a.items(), key=str); next(iter(a));
        next(iter(a.items())); a["zz"]; a.__delitem__("zz"); [a.pop(k) for k in list(a)];
        [a.__setitem__(k, 0) for k in a]; [a.__setitem__(str(k) + "_", 0) for k in a];
        dict.fromkeys(a, 0); dict.get(a, "a"); copy.deepcopy(a);
        json.dumps({str(k): str(v) for k, v in a.items()});
        {v: k for k, v in a.items() if isinstance(v, int)}; list(map(str, a.items()));
        collections.ChainMap({}, a)["zz"]; collections.ChainMap({"a": 9}, a)["a"];
        collections.OrderedDict(a).popitem(False); types.MappingProxyType(a).get("a");
        a.items() == dict(a).items(); operator.itemgetter("a")(a);
        "{a}".format(**{k: v for k, v in a.items() if isinstance(k, str)}); "%(a)s" % a;
        (lambda **k: sorted(k))(**{str(k): v for k, v in a.items()}); a.foo; a[[]];
        isinstance(a, collections.abc.Mapping); bool(a); dict(a, n=1); a.get; a.__contains__("a");
        {k: (v * 2 if isinstance(v, torch.Tensor) else v) for k, v in a.items()}; len(a.keys());
        print(sorted(map(str, a)));
    """,
    "set": r"""
        a.add(9); a.discard(1); a.remove(2); a.remove(99); a.pop() in (1, 2, 3, 4, 5, 6); a | {7};
        a & {1}; a - {1}; a ^ {1, 8}; a.update([5, 6]); a.__ior__({9});
        a.intersection_update({1, 2}); a.difference_update([1]);
        a.symmetric_difference_update({1, 9}); a.clear(); a.copy() is a; 1 in a; sorted(a); len(a);
        a <= {1, 2, 3, 4}; a == {1, 2, 3}; a.isdisjoint({9}); a.issubset(range(10));
        a.union([1], [2]); frozenset(a); max(a); sum(a); {v * 2 for v in a}; [v for v in sorted(a)];
        a.add([]); set(map(str, a)); list(a) == list(a); hash(frozenset(a)) == hash(frozenset(a));
        a.foo; bool(a); copy.copy(a); [a.add(v + 10) for v in list(a)]; repr(sorted(a));
        (a.add(1), a.add(x.dim())); any(v > 2 for v in a); a > {1}; tuple(sorted(a));
        a.__contains__(1); a.__len__();
    """,
    "obj": r"""
        a.n; a.n += 1; a.l.append(x); a.d.update(z=1); a.t.add_(1); a.meth(5).l; a.p; a.p = 9;
        a.c(1); a.s(1); a(); a(5); bool(a); not a; len(a); list(a); 2 in a; [*reversed(a)];
        f"{a:q}"; [10, 20, 30][a]; a.auto_x; a.zz; getattr(a, "zz", 3); hasattr(a, "auto1");
        setattr(a, "new", x); delattr(a, "n"); del a.l; vars(a)["q"] = 1; sorted(vars(a));
        a.__dict__.update(w=2); a.__class__.cls; type(a).cls.append(2) if False else 1;
        a.cls is Ob.cls; a.cls.copy(); isinstance(a, Ob); a == a; a != 1; a is not None;
        Ob.meth(a, 3).l; a.meth.__self__ is a; a.meth.__func__ is Ob.meth; a.meth.__name__;
        list(map(a.s, [1, 2])); functools.partial(a, 2)(); copy.copy(a).l is a.l;
        copy.deepcopy(a).l; sorted([a], key=lambda o: o.n)[0] is a;
        operator.attrgetter("n", "p")(a); operator.methodcaller("s", 3)(a); a.__class__ = Ob;
        object.__setattr__(a, "v", 2); a.__getattr__("auto9"); a.l[0], a.l[1] = a.l[1], a.l[0];
        a.n, a.m = 5, 6; a.d["k"] += 1; a.l += [3]; a.t = a.t * 2; a.x = a.y = x;
        [setattr(a, f"f{i}", i) for i in range(2)]; {a: 1}[a]; hash(a) == hash(a);
        max([a], key=len) is a; sum(a); dict.fromkeys([a]).__len__(); any(a);
        a.l.pop() if a else None; a.__iter__().__next__(); weakref.ref(a)() is a; str(type(a));
        callable(a); dir(a)[-3:]; a and 5; a or 6; iter(a).__class__.__name__; a.t.grad; a.t.note;
        a.n.bit_length(); a.missing();
    """,
    "deque": r"""
        a.append(1); a.appendleft(x); a.pop(); a.popleft(); a.rotate(1); a.extend([7, 8, 9]);
        a.extendleft([1, 2]); a.insert(1, 5); a.remove(2); a.reverse(); a.clear(); a.copy();
        a.count(1); a.index(2); a.maxlen; a[0]; a[-1]; a.__setitem__(0, 9); a.__delitem__(0);
        len(a); list(a); 1 in a; a + a; a * 2; a == collections.deque([1, 2, 3]); sorted(a);
        a.__iadd__([1]); [*reversed(a)]; max(a); a[9]; a.foo; copy.copy(a);
        list(itertools.islice(a, 1, 3)); (a.append(1), a.append(2), a.popleft()); bool(a); sum(a);
        tuple(a); collections.deque(a, 2); [a.popleft() for _ in range(len(a))];
    """,
    "odict": r"""
        a.move_to_end("z"); a.move_to_end("a", last=False); a.popitem(); a.popitem(last=False);
        a["n"] = 1; list(a); list(a.items()); a == {"a": 0, "z": 1};
        a == collections.OrderedDict(a); a.pop("z"); a.setdefault("q", 2); a.update(b=1);
        [*reversed(a)]; dict(a); a.copy(); a | {"r": 1}; a.clear(); next(iter(a)); len(a);
        a.move_to_end("zz"); sorted(a); a.__delitem__("z"); a.get("z"); list(reversed(a.items()));
        collections.OrderedDict.fromkeys("ab", 1);
    """,
    "ddict": r"""
        a["q"].append(1); a["a"]; a["zz"]; a.get("zz"); "zz" in a; a.default_factory; len(a);
        dict(a); a.setdefault("r", 5); a.copy(); a.pop("a"); list(a.items()); a.__missing__("m");
        copy.deepcopy(a); a | {"w": 1}; [a[k].append(k) for k in "ab"]; sum(map(len, a.values()));
        a.update(z=1); a["x"] = x; a["c"] += [1]; sorted(a); a == {"a": [0]};
        collections.defaultdict(int, b=1)["q"]; a.default_factory = None;
    """,
    "counter": r"""
        a["a"]; a["zz"]; a.most_common(1); a.update("aa"); a.subtract("ab"); a + a;
        a - collections.Counter("a"); a & a; a | a; +a; -a; sorted(a.elements()); a.total(); len(a);
        a["q"] += 2; dict(a); a.pop("a"); a == a; a <= a; max(a, key=a.get); sum(a.values());
        a.copy(); a.clear(); a.__delitem__("zz"); a["a"] = x; list(a);
    """,
    "tup": r"""
        a[0]; a[1].append(5); a[2].add_(1); a[3].b.append(1); a[3]._replace(a=2); a[3]._asdict();
        a + (1,); a * 2; a[::-1]; len(a); a.index(1); a.count(1); b, c, *d = a; hash(a[:1]);
        a[3] == NT(1, [0]); a[3] < NT(2, []); [*a]; dict(zip("abcd", a)); a[1] in a; a == a;
        max(a[1]); a[3][1][0]; a[0] = 1; a[1] += [1]; a[9]; isinstance(a[3], tuple); a[3]._fields;
        NT(*a[3]); NT._make(a[3]); copy.deepcopy(a); tuple(reversed(a)); sorted(a[1]);
        operator.itemgetter(0, 3)(a); (*a, 1); a[1:3]; a.foo; (lambda p, q, *r: r)(*a);
    """,
    "str": r"""
        a.upper(); a.split(); a.split(","); a.partition(","); a[0]; a[::-1]; len(a); a + "z"; a * 2;
        "a" in a; a.replace("a", "b"); a.find("b"); a.index("b"); a.startswith(("a", "H"));
        a.title(); a.encode(); f"{a:>10}"; f"{a!r}"; "%s|%5s" % (a, a); sorted(a); list(a);
        set(a) == set(a); a.join("xy"); a.isalpha(); a.zfill(9); a.center(9, "*"); int(a); float(a);
        a.count("l"); a.translate(str.maketrans("ab", "ba")); re.findall(r"\w+", a);
        re.sub(r"\d", lambda m: str(int(m[0]) + 1), a);
        re.match(r"(\w)", a) and re.match(r"(\w)", a).groups(); a.splitlines(); a.casefold();
        a < "b"; a == "Hello World"; hash(a) == hash(a); max(a); {a: 1}[a]; getattr(torch, a, None);
        a.strip("Hd"); ord(a[0]); a.swapcase().lower(); a.rsplit(None, 1); a.format(1);
        a.isidentifier(); [c for c in a if c.isupper()]; dict.fromkeys(a); ",".join(a);
        a.expandtabs(); string.Template("$a").substitute(a=a);
    """,
    "gen": r"""
        next(a); list(a); sum(a); a.send(None); [v for v in a]; next(a, None); max(a);
        (next(a), next(a)); list(zip(a, a)); 4 in a; b, *c = a; a.close(); a.throw(KeyError);
        list(itertools.islice(a, 1)); tuple(a) + tuple(a); any(v > 1 for v in a);
        sorted(a, reverse=True); dict(enumerate(a)); iter(a) is a; a.gi_frame is None;
        torch.tensor([*a]); [x * v for v in a]; set(a); functools.reduce(operator.add, a); len(a);
        a[0]; (list(a), next(a, "end")); list(map(str, a)); itertools.chain(a, [1]).__next__();
        {*a}; min(a, default=3);
    """,
    "it": r"""
        next(a); list(a); sum(a); [v for v in a]; (next(a), list(a)); 2 in a;
        operator.length_hint(a); copy.copy(a).__next__(); list(zip(a, a)); b, *c = a; next(a, None);
        iter(a) is a; tuple(a); max(a); any(v > 1 for v in a); list(itertools.chain(a, [1]));
        [x + v for v in a]; list(enumerate(a)); a.__next__(); a.foo; (next(a), next(a), next(a, 0));
        dict(zip("ab", a)); set(a);
    """,
    "arr": r"""
        a.sum(); a + 1; a * a; a[0]; a[::2]; a.mean(); np.sin(a); a.reshape(2, 2); a.astype(int);
        a.tolist(); a.__iadd__(1); a.__setitem__(0, 9); a.fill(2); a.sort(); a[a > 1];
        np.where(a > 1, a, 0); torch.from_numpy(a) + x; torch.tensor(a); torch.as_tensor(a).add_(1);
        x.numpy() + a; a @ a; a.max(); a.argmax(); np.concatenate([a, a]); np.stack([a, a]); a.T;
        a.shape; a.dtype; a.copy(); a.cumsum(); np.dot(a, a); np.linalg.norm(a); float(a[0]);
        int(a.sum()); bool(a.any()); len(a); [v for v in a]; list(a); a == a; (a == a).all();
        a.std(); np.exp(a).astype(np.float32); a.clip(0, 1); np.mean(a, axis=0); np.median(a);
        np.percentile(a, 50); np.unique(a); np.argsort(-a); a[[0, 1]]; a[None]; a.ravel();
        np.zeros_like(a); np.arange(len(a)); np.linspace(0, a.max(), 3); np.isnan(a).any(); a / 0;
        np.log(a); a ** 2; a // 2; a % 2; -a; abs(a); a > 1; np.maximum(a, 1); a.min(initial=0);
        np.outer(a, a); np.einsum("i,i", a, a); np.pad(a, 1); np.roll(a, 1); a.flags.writeable;
        a.strides; a.nbytes; np.array2string(a); repr(a); str(a.dtype); a.item(0); a.view(np.int64);
        a.byteswap().dtype; np.float32(a[0]) * x; a[0] * x; x * a; x + a[0]; a * x;
        np.asarray(x) + a; isinstance(a, np.ndarray); a.foo; a["z"]; a[10]; a + [1, 2];
        a.reshape(3, 3); np.vectorize(lambda v: v + 1)(a); np.apply_along_axis(np.sum, 0, a);
        list(map(float, a)); max(a); sum(a); sorted(a);
    """,
    "ns": r"""
        a.a; a.b.append(1); a.c = x; a.a += 1; vars(a); a == types.SimpleNamespace(a=0, b=[1]);
        repr(a); delattr(a, "a"); a.zz; hasattr(a, "b"); sorted(vars(a)); copy.copy(a).b is a.b;
        setattr(a, "q", 1); a.__dict__["w"] = 2; types.SimpleNamespace(**vars(a)).a; a.b += [2];
    """,
    "bytes": r"""
        a.append(1); a[0]; a[0] = 65; a.extend(b"z"); bytes(a); a.decode(); len(a); a + b"q";
        a[::-1]; a.hex(); a.find(b"b"); list(a); memoryview(a)[0]; a.pop(); a.clear();
        int.from_bytes(a, "big"); a == b"ab"; a.upper(); a.__iadd__(b"x");
        torch.frombuffer(a, dtype=torch.uint8); sum(a); a.copy(); a * 2; del a[0];
    """,
    "mod": r"""
        a(torch.ones(1, 2)); a[0].weight.shape; len(a); a.append(torch.nn.Tanh()) and len(a);
        a.add_module("z", torch.nn.ReLU()) or list(dict(a.named_modules())); a.eval().training;
        a.train(False).training; list(a.state_dict()); [p.shape for p in a.parameters()];
        a[0].bias.data.zero_(); a.requires_grad_(False)[0].weight.requires_grad; a.zero_grad();
        a.apply(lambda m: setattr(m, "seen", 1)) and a[0].seen; a[-1]; a[:1]; a.pop(1);
        a.insert(0, torch.nn.ReLU()) and len(a);
        a.__setitem__(1, torch.nn.Sigmoid()) or a(torch.ones(1, 2)); a.__delitem__(1) or len(a);
        a.register_buffer("bf", x) or a.bf; a.register_parameter("pp", None) or a.pp;
        a[0].register_forward_hook(lambda m, i, o: o * 2) and a(torch.ones(1, 2));
        a.double()[0].weight.dtype; a.half()[0].bias.dtype;
        a.to(torch.float64)(torch.ones(1, 2, dtype=torch.float64));
        copy.deepcopy(a)(torch.ones(1, 2)); a.load_state_dict(a.state_dict());
        a.get_submodule("0").in_features; a.get_parameter("0.weight").shape;
        sum(p.numel() for p in a.parameters()); repr(a); a.extra = 5; a[0].weight.add_(1);
        torch.no_grad()(lambda: a[0].weight.add_(1))();
        a[0].weight = torch.nn.Parameter(torch.ones(2, 2)); a[0].weight = x; del a[0].bias;
        a[0].bias = None; a.foo; a[5]; isinstance(a, torch.nn.Module);
        [type(m).__name__ for m in a]; [n for n, _ in a.named_parameters()];
        a.extend([torch.nn.ReLU()]) and len(a); hash(a) == hash(a); a == a;
        a.children().__next__().in_features;
        torch.nn.utils.parameters_to_vector(a.parameters()).shape;
        torch.func.functional_call(a, dict(a.named_parameters()), (torch.ones(1, 2),));
        a.forward(torch.ones(1, 2)); a.__call__(torch.ones(1, 2)); vars(a)["training"];
        a._modules["0"].weight.sum(); a[0].extra_repr(); a.type(torch.float32)[0].weight.dtype;
        a.share_memory() is a; torch.nn.init.ones_(a[0].weight).sum(); a(torch.ones(1, 3)); a("x");
    """,
    "pt": r"""
        a.a; a.b.append(1); a.a = 5; a.c = 1; repr(a); a == Pt(0, []); hash(a) == hash(a.a);
        {a: 1}[a]; a in {a}; a in [Pt(0, 1)]; [Pt(0, 1)].index(a); hasattr(a, "__dict__");
        copy.copy(a).b is a.b; copy.deepcopy(a).a; del a.b; getattr(a, "b"); setattr(a, "b", x);
        Pt.__slots__; {Pt(0, 1), a}.__len__(); f"{a}"; sorted([a], key=lambda p: p.a)[0] is a;
        vars(a); a.a, a.b = a.b, a.a; [Pt(0, 1)].count(a); max([a], key=hash) is a; type(a)(1, 2);
        a != 5; not a; str([a]); {1: a}[1].b;
    """,
}


PROGRAM = """
def fn(x, a):
    y, r = x * 2, None
    try:
        {}
    except Exception as error:
        return y, type(error).__name__, str(error), a
    if hasattr(r, "__next__"):
        r = [*itertools.islice(r, 3)]
    return y + 1, type(r).__name__, r, a
"""
ADDRESS = re.compile("0x[0-9a-f]{6,}")


def outcome(fn: Any, kind: str, k: int) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    torch.utils.hooks.RemovableHandle.next_id = 0
    a, x, printed = MADE[kind](k), torch.arange(4.0), io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            found = fn(x, a)
        except Exception as error:  # noqa: BLE001  # the exception is what is compared
            found = type(error).__name__, str(error)
    return ADDRESS.sub("", str(shape_of((found, a)))), printed.getvalue()


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.filterwarnings("ignore")
def test_everyday_python_on_objects_from_outside(kind: str) -> None:
    for text in LINES[kind].split(";"):
        line = text.strip()
        with contextlib.suppress(SyntaxError):
            line = f"r = ({compile(line, '', 'eval') and line})"
        space = dict(globals())
        exec(PROGRAM.format(line or "r = vars()"), space)
        fn, traced = space["fn"], Traced(space["fn"])
        for k in (0, 1, 0):
            assert outcome(traced, kind, k) == outcome(fn, kind, k), (line, k, traced.stops)


class Row(collections.UserList):
    """A list in Python."""


class Places:
    """What torch takes for a sequence, though it is of no class of such."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


@pytest.mark.parametrize("kind", [collections.deque, Row, Places])
@pytest.mark.parametrize(
    "make",
    [
        torch.tensor,
        torch.as_tensor,
        torch.FloatTensor,
        lambda data: torch.tensor([data, data]),
        lambda data: torch.tensor(data, dtype=torch.float64),
    ],
)
def test_sequences_that_are_no_lists_as_data_of_a_tensor(kind: Any, make: Any) -> None:
    def returns(rewards):
        found, total = collections.deque(), 0.0
        for reward in rewards[::-1]:
            total = reward + 0.9 * total
            found.appendleft(total)
        return make(kind(found)) * 2

    traced = Traced(returns)
    for rewards in ([1.0, 2.0], [3.0, 4.0], [0.5, 0.25, 2.0]):
        want, got = returns(rewards), traced(rewards)
        assert got.dtype is want.dtype and torch.equal(got, want)
    assert not traced.stops, traced.stops


@pytest.mark.parametrize(
    "make",
    [
        lambda x, n, r: torch.tensor([3.1, x.sum().double(), n]),
        lambda x, n, r: torch.tensor([[n, x[0]], [r, 2.1]], dtype=torch.float64),
        lambda x, n, r: torch.as_tensor([x.sum(), r], device="cpu"),
        lambda x, n, r: torch.Tensor([x[0], 0.1]),
        lambda x, n, r: torch.tensor([[r, 1], [n, True]]),
        lambda x, n, r: torch.tensor([True, x[0] > 1, False]),
    ],
)
def test_lists_of_tensors_beside_numbers_as_data_of_a_tensor(make: Any) -> None:
    def fn(x, n, r):
        return make(x, n, r) * 2

    traced = Traced(fn)
    for n, r in ((3, 2.5), (5, 0.1), (7, 4.3)):
        want, got = (f(torch.arange(1.0, 4.0), n, r) for f in (fn, traced))
        assert got.dtype is want.dtype and torch.equal(got, want)
    assert not traced.stops, traced.stops


def test_what_is_no_sequence_as_data_of_a_tensor() -> None:
    def outcome(call: Any) -> Any:
        try:
            return call(torch.ones(1)).tolist()
        except Exception as error:  # noqa: BLE001  # the exception is what is compared
            return type(error), str(error)

    for data in ({0: 1.0}, collections.UserDict({0: 1.0}), collections.UserString("ab"), {1.0}):

        def fn(x, data=data):
            return torch.tensor(data) + x

        assert outcome(Traced(fn)) == outcome(fn)

    for of in (lambda x: torch.from_numpy([x.sum()]), lambda x: torch.tensor([{0: x.sum()}])):
        assert outcome(Traced(of)) == outcome(of)


class Scratch(torch.nn.Module):
    """It keeps something for a while."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.gain = 2.0

    def forward(self, x):
        self.before = self.layer(x)
        y = self.before * self.gain
        del self.before
        return y + hasattr(self, "before")


class Telling:
    __slots__ = ("gain", "told")

    def __init__(self):
        self.gain, self.told = 3.0, []

    def __delattr__(self, name):
        self.told.append(name)
        super().__delattr__(name)


class Managed:
    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, x):
        self._value = x

    @value.deleter
    def value(self):
        del self._value

    def __delattr__(self, name):
        object.__delattr__(self, name)


def _deletes(obj, x):
    y = x * obj.gain
    del obj.gain
    return y, hasattr(obj, "gain")


def _deletes_through_a_property(obj, x):
    obj.value = x * 2
    y = obj.value
    del obj.value
    return y, hasattr(obj, "_value")


def _deletes_what_is_not_there(obj, x):
    try:
        delattr(obj, "nothing")
    except AttributeError as error:
        return x + 1, str(error)


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda model, x: model(x), Scratch),
        (_deletes, Scratch),
        (_deletes, Telling),
        (_deletes_through_a_property, Managed),
        (_deletes_what_is_not_there, Scratch),
        (_deletes_what_is_not_there, Telling),
        (lambda obj, x: object.__delattr__(obj, "told") or x + 1, Telling),
    ],
)
def test_attributes_that_a_method_of_the_class_deletes(fn: Any, kind: Any) -> None:
    traced = Traced(fn)
    for _ in range(2):
        outcomes = []
        for call in (fn, traced):
            torch.manual_seed(0)
            obj = kind()
            outcomes.append(shape_of((call(obj, torch.ones(2, 3)), obj, getattr(obj, "told", 0))))
        assert outcomes[0] == outcomes[1]
    assert not traced.stops, traced.stops
