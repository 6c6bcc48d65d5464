"""Ordinary programs, classes and functions: each is a function of one tensor.

Written as models and libraries write them; what they do is compared with eager in test_ordinary.py.
"""

# mypy: ignore-errors
# ruff: noqa

import abc, collections, contextlib, copy, dataclasses, enum, functools, itertools, operator, types, typing, weakref, math, string, threading
import torch
from torch import nn, Tensor

T = typing.Any


@dataclasses.dataclass
class Cfg:
    a: int = 2
    b: float = 0.5
    names: list = dataclasses.field(default_factory=lambda: ["x", "y"])

    def scaled(self):
        return self.a * self.b

    @property
    def total(self):
        return self.a + self.b


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    y: int = 1


@dataclasses.dataclass(slots=True, order=True)
class Slotted:
    x: int
    y: int = 1


@dataclasses.dataclass
class Out:
    last: T = None
    hidden: T = None

    def __post_init__(self):
        self.count = 1


class Color(enum.Enum):
    RED = 1
    GREEN = 2

    @property
    def scale(self):
        return self.value * 2


class Flag(enum.Flag):
    A = 1
    B = 2


class IE(enum.IntEnum):
    ONE = 1
    TWO = 2


class Base(abc.ABC):
    @abc.abstractmethod
    def f(self, x): ...


class Impl(Base):
    def f(self, x):
        return x + 1


class P(typing.NamedTuple):
    a: T
    b: T = 3

    def both(self):
        return self.a + self.b


Pt = collections.namedtuple("Pt", "x y")


class Desc:
    def __set_name__(self, o, n):
        self.n = "_" + n

    def __get__(self, o, t=None):
        return self if o is None else getattr(o, self.n, 0)

    def __set__(self, o, v):
        setattr(o, self.n, v * 2)


class WithDesc:
    d = Desc()


class Lazy:
    def __getattr__(self, n):
        if n.startswith("v"):
            return len(n)
        raise AttributeError(n)


class Vec:
    def __init__(self, x):
        self.x = x

    def __add__(self, o):
        return Vec(self.x + (o.x if isinstance(o, Vec) else o))

    __radd__ = __add__

    def __mul__(self, o):
        return Vec(self.x * o)

    def __eq__(self, o):
        return isinstance(o, Vec) and o.x is self.x

    def __hash__(self):
        return 1

    def __getitem__(self, i):
        return self.x[i]

    def __len__(self):
        return len(self.x)

    def __iter__(self):
        return iter([self.x, self.x + 1])

    def __contains__(self, o):
        return o == "x"

    def __call__(self, y):
        return self.x + y

    def __bool__(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False

    def __neg__(self):
        return Vec(-self.x)

    def __repr__(self):
        return "Vec"


class Meta(type):
    def __call__(cls, *a, **k):
        o = super().__call__(*a, **k)
        o.made = True
        return o

    def __getitem__(cls, i):
        return i + 1


class WithMeta(metaclass=Meta):
    def __init__(self, v):
        self.v = v


class Reg:
    kinds = {}

    def __init_subclass__(cls, key=None, **k):
        super().__init_subclass__(**k)
        Reg.kinds[key] = cls


class RegA(Reg, key="a"):
    def go(self, x):
        return x * 3


class TD(typing.TypedDict):
    a: int
    b: int


class SeqView(collections.abc.Sequence):
    def __init__(s, n):
        s.n = n

    def __len__(s):
        return s.n

    def __getitem__(s, i):
        if i >= s.n:
            raise IndexError
        return i


class MapView(collections.abc.MutableMapping):
    def __init__(s):
        s.d = {}

    def __getitem__(s, k):
        return s.d[k]

    def __setitem__(s, k, v):
        s.d[k] = v

    def __delitem__(s, k):
        del s.d[k]

    def __iter__(s):
        return iter(s.d)

    def __len__(s):
        return len(s.d)


class Copying:
    def __init__(s):
        s.v = [1, 2]

    def __copy__(s):
        o = Copying()
        o.v = s.v + [3]
        return o

    def __deepcopy__(s, m):
        o = Copying()
        o.v = copy.deepcopy(s.v, m) + [4]
        return o


class Plain:
    def __init__(s):
        s.v = [1, 2]
        s.w = {"a": (1, [2])}
        s.me = s


class Reducing:
    def __init__(s, a):
        s.a = a

    def __reduce__(s):
        return (Reducing, (s.a + 1,))


class State:
    def __init__(s):
        s.a = 1
        s.b = 2

    def __getstate__(s):
        return {"a": s.a}

    def __setstate__(s, d):
        s.__dict__.update(d)
        s.b = 9


class Slots:
    __slots__ = ("a", "b")

    def __init__(s):
        s.a = 1
        s.b = [2]


CFG = Cfg()
FZ = Frozen(1)
PL = Plain()
LOCAL = threading.local()
LOCAL.v = 3
TDV = {"a": 1, "b": 2}
SLOTTED = Slotted(3)
WK = weakref.WeakKeyDictionary()
WV = weakref.WeakValueDictionary()
_KEY = Plain()
WK[_KEY] = 5
WV["a"] = _KEY
PROXY = weakref.proxy(_KEY)
REF = weakref.ref(_KEY)


def dataclass_make(x):
    c = Cfg(a=3)
    return x * c.scaled() + c.total, c


def dataclass_replace(x):
    c = dataclasses.replace(CFG, a=5)
    return x * c.a, c


def dataclass_replace_frozen(x):
    c = dataclasses.replace(FZ, x=5)
    return x * c.x + c.y, c


def dataclass_asdict(x):
    return x * dataclasses.asdict(CFG)["a"], dataclasses.asdict(CFG)


def dataclass_astuple(x):
    return x * dataclasses.astuple(FZ)[0]


def dataclass_fields(x):
    return x * sum(isinstance(getattr(CFG, f.name), int) for f in dataclasses.fields(CFG)), [
        f.name for f in dataclasses.fields(Cfg)
    ]


def dataclass_eq(x):
    return x * (FZ == Frozen(1)) + hash(FZ) * 0


def dataclass_slots(x):
    s = Slotted(1, 2)
    return x * s.x + (s < Slotted(2)), s


def dataclass_out(x):
    o = Out(last=x + 1, hidden=(x, x * 2))
    return o


def dataclass_local(x):
    @dataclasses.dataclass
    class L:
        a: int = 1

    return x * L(3).a


def dataclass_is(x):
    return x + dataclasses.is_dataclass(CFG)


def dataclass_slotted_outside(x):
    return x * SLOTTED.x, dataclasses.replace(SLOTTED, y=4)


def enum_use(x):
    return x * Color.RED.scale * Color(2).value * Color["GREEN"].value, [c.name for c in Color]


def enum_flag(x):
    return x * ((Flag.A | Flag.B).value), Flag.A in (Flag.A | Flag.B)


def enum_int(x):
    return x * IE.TWO + IE(1), IE.ONE < IE.TWO


def enum_local(x):
    class E(enum.Enum):
        A = 3

    return x * E.A.value


def enum_str(x):
    return x, f"{Color.RED} {Color.RED!r} {IE.ONE}", str(Color.GREEN)


def abc_use(x):
    return Impl().f(x), isinstance(Impl(), Base), issubclass(Impl, Base)


def abc_abstract(x):
    try:
        Base()
    except TypeError as e:
        return x + 1, "abstract" in str(e)


def abc_local(x):
    class A(abc.ABC):
        @abc.abstractmethod
        def f(self): ...

    class B(A):
        def f(self):
            return 4

    return x * B().f()


def abc_check(x):
    return (
        x
        + isinstance([], collections.abc.Sequence)
        + isinstance({}, collections.abc.Mapping)
        + isinstance(lambda: 1, collections.abc.Callable)
        + isinstance(iter([]), collections.abc.Iterator)
    )


def namedtuple_use(x):
    p = P(x)
    q = p._replace(b=4)
    a, b = q
    return p.both() + b, q._asdict(), q


def namedtuple_make(x):
    return Pt._make([x, 1]), Pt(x=x, y=2).x, Pt._fields


def namedtuple_local(x):
    Q = collections.namedtuple("Q", "a b")
    q = Q(x, 2)
    return q.a * q.b


def namedtuple_class_local(x):
    class Q(typing.NamedTuple):
        a: int
        b: int = 2

    return x * Q(3).b


def typeddict(x):
    d: TD = {"a": 1, "b": 2}
    return x * d["a"] + TD(a=1, b=5)["b"]


def typeddict_local(x):
    class D(typing.TypedDict):
        a: int

    return x * D(a=4)["a"]


def descriptor(x):
    w = WithDesc()
    w.d = 3
    return x * w.d, vars(w)


def getattr_use(x):
    l = Lazy()
    return x * l.vvv + getattr(l, "nope", 1), hasattr(l, "v1")


def operators(x):
    v = Vec(x) + Vec(x) + 1
    v = 2 + v
    v = v * 3
    return (-v).x, len(v), v[0], "x" in v, v == v, v(x), bool(v), list(v)[1], repr(v)


def with_class(x):
    with Vec(x) as v:
        return v.x + 1


def metaclass(x):
    return x * WithMeta(3).v + WithMeta(1).made + WithMeta[3]


def metaclass_local(x):
    class M(type):
        def __new__(m, n, b, d):
            d["k"] = 7
            return super().__new__(m, n, b, d)

    class C(metaclass=M):
        pass

    return x * C.k


def registry(x):
    return Reg.kinds["a"]().go(x)


def init_subclass_local(x):
    seen = []

    class A:
        def __init_subclass__(cls, **k):
            seen.append(cls.__name__)

    class B(A):
        pass

    return x * len(seen)


def seq_view(x):
    v = SeqView(3)
    return x * sum(v), 2 in v, v.index(1), list(reversed(v)), v.count(1)


def seq_view_for(x):
    for i in SeqView(4):
        x = x + i
        if i == 2:
            break
    return x


def map_view(x):
    m = MapView()
    m["a"] = x
    m.update(b=2)
    return m.pop("a"), m.get("c", 1), dict(m), "b" in m, list(m.items()), m.setdefault("z", 3)


def copy_copy(x):
    c = copy.copy(CFG)
    c.a = 9
    return x * c.a + CFG.a, c


def deepcopy_cfg(x):
    c = copy.deepcopy(CFG)
    c.names.append("z")
    return x * len(c.names), c, CFG


def copy_custom(x):
    c = copy.copy(Copying())
    d = copy.deepcopy(Copying())
    return x * len(c.v), c.v, d.v


def deepcopy_cycle(x):
    c = copy.deepcopy(PL)
    return x * len(c.v), c.me is c, c.w


def copy_reduce(x):
    return x * copy.copy(Reducing(2)).a, copy.deepcopy(Reducing(3)).a


def copy_state(x):
    c = copy.copy(State())
    return x * c.b, vars(c)


def copy_slots(x):
    c = copy.copy(Slots())
    d = copy.deepcopy(Slots())
    return x * c.a, d.b


def copy_frozen(x):
    return x * copy.copy(FZ).x + copy.deepcopy(FZ).x


def copy_tuple(x):
    return copy.copy((1, [2])), copy.deepcopy((1, [2])), x + 1


def copy_method_dict(x):
    d = {"a": [x]}
    e = d.copy()
    e["b"] = 1
    return e, d


def deepcopy_enum(x):
    return x, copy.deepcopy({"c": Color.RED, "t": torch.float32})


def deepcopy_defaultdict(x):
    d = collections.defaultdict(list, a=[1])
    return x, copy.deepcopy(d), copy.copy(d)


def thread_local(x):
    return x * LOCAL.v


def thread_local_write(x):
    LOCAL.w = 4
    return x * LOCAL.w + getattr(LOCAL, "nope", 1)


def weak_key(x):
    return x * WK[_KEY] + len(WK)


def weak_value(x):
    return x * len(WV["a"].v), "a" in WV, WV.get("q")


def weak_proxy(x):
    return x * len(PROXY.v)


def weak_ref(x):
    return x * len(REF().v)


def weak_ref_made(x):
    p = Plain()
    r = weakref.ref(p)
    return x * len(r().v)


def generic_alias(x):
    def f(a: list[int], b: dict[str, int] = None) -> tuple[int, ...]:
        return x

    return (
        f([1]),
        isinstance(list[int], types.GenericAlias),
        typing.get_origin(list[int]),
        typing.get_args(dict[str, int]),
    )


G = typing.TypeVar("G")


class Box(typing.Generic[G]):
    def __init__(self, v):
        self.v = v


def generic_class(x):
    return Box[int](3).v * x, Box(x).v


def optional_ann(x):
    y: typing.Optional[int] = None
    z: list[Tensor] = [x]
    return z[0] + (y or 1)


def cached_prop(x):
    class A:
        n = 0

        @functools.cached_property
        def v(self):
            self.n += 1
            return 5

    a = A()
    return x * a.v + a.v, a.n


def class_attr(x):
    class A:
        k = [1]

    A.k.append(2)
    A.z = 3
    return x * len(A.k) + A.z


def class_static(x):
    class A:
        s = 2

        @staticmethod
        def f(a):
            return a + 1

        @classmethod
        def g(cls, a):
            return a * cls.s

    return A.f(x) + A().g(x)


def super_mro(x):
    class A:
        def f(self):
            return ["A"]

    class B(A):
        def f(self):
            return ["B"] + super().f()

    class C(A):
        def f(self):
            return ["C"] + super().f()

    class D(B, C):
        def f(self):
            return ["D"] + super().f()

    return x, D().f(), [c.__name__ for c in D.__mro__]


def slots_use(x):
    s = Slots()
    s.a = 5
    del s.b
    return x * s.a, hasattr(s, "b")


def singledispatch(x):
    return disp(x), disp(3), disp("a")


@functools.singledispatch
def disp(a):
    return "other"


@disp.register
def _(a: int):
    return a + 1


@disp.register
def _(a: torch.Tensor):
    return a * 2


def total_order(x):
    @functools.total_ordering
    class A:
        def __init__(s, v):
            s.v = v

        def __eq__(s, o):
            return s.v == o.v

        def __lt__(s, o):
            return s.v < o.v

    return x, A(1) <= A(2), A(3) > A(2), max(A(1), A(5)).v


def partialmethod(x):
    class A:
        def f(self, a, b):
            return a + b

        g = functools.partialmethod(f, 2)

    return A().g(x)


def wraps_local(x):
    def deco(f):
        @functools.wraps(f)
        def w(*a, **k):
            return f(*a, **k) + 1

        return w

    @deco
    def g(y):
        "doc"
        return y * 2

    return g(x), g.__name__, g.__doc__


def lru(x):
    return x * fib(6)


@functools.lru_cache(None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def cache_info(x):
    return x * fib(5) + 0 * fib.cache_info().hits


def partial_use(x):
    f = functools.partial(torch.add, alpha=2)
    g = functools.partial(f, x)
    return g(x), g.func is torch.add, g.keywords


def reduce_use(x):
    return functools.reduce(operator.add, [x, x, x]), functools.reduce(
        lambda a, b: a * b, range(1, 4), 1
    )


def cmp_key(x):
    return x, sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a))
