"""Ordinary programs, the language and Python's library: each is a function of one tensor.

Written as models and libraries write them; what they do is compared with eager in test_ordinary.py.
"""

# mypy: ignore-errors
# ruff: noqa

import bisect, collections, contextlib, datetime, decimal, fractions, functools, heapq, inspect, io, itertools, json, logging, math, operator, os, pathlib, random, re, statistics, string, sys, textwrap, time, types, typing, uuid, warnings, zlib, struct, hashlib, queue, traceback, numbers, pprint, secrets, platform, locale, calendar, copy
import torch
from torch import nn
import torch.nn.functional as F

D = {"a": 1, "b": 2}
L = [1, 2, 3]


def match_it(x):
    out = []
    for v in (1, "a", [1, 2], {"k": 3}, (1, 2, 3), None, 2.5):
        match v:
            case int(n) if n > 0:
                out.append(n)
            case str():
                out.append("s")
            case [a, b]:
                out.append(a + b)
            case {"k": k}:
                out.append(k)
            case (a, *rest):
                out.append(rest)
            case None:
                out.append("none")
            case _:
                out.append("else")
    return x * out[0], out


def walrus(x):
    if (n := x.shape[0]) > 1:
        x = x * n
    return x, [y for k in range(3) if (y := k * 2) > 1]


def star(x):
    a, *b = [1, 2, 3]
    return x * a, {**D, "c": 3}, [*b, *L], (lambda *a, **k: (a, k))(*L, **D)


def kwonly(x):
    def f(a, /, b, *, c=1, **k):
        return a * b + c + sum(k.values())

    return f(x, 2, c=3, d=4)


def closures(x):
    fs = [lambda y, i=i: y + i for i in range(3)]
    gs = [lambda y: y * j for j in range(3)]
    return fs[1](x), gs[0](x)


def nonlocal_it(x):
    n = 0

    def inc():
        nonlocal n
        n += 1
        return n

    inc()
    inc()
    return x * n


def fmt(x):
    return (
        x,
        f"{1.5:.2f}|{'a':>4}|{D}|{L!r}|{x.shape}|{x.dtype}|{3:03d}",
        "{0}-{b}".format(1, b=2),
        "%s %d" % ("a", 3),
        "a".join(["b", "c"]),
        "x".center(5, "*"),
        str(x.device),
    )


def fmt_self(x):
    n = 3
    return x, f"{n=}", f"{x.ndim=}"


def itertools_all(x):
    return x, [
        list(a)
        for a in (
            itertools.chain([1], [2]),
            itertools.product([1, 2], repeat=2),
            itertools.permutations([1, 2, 3], 2),
            itertools.combinations([1, 2, 3], 2),
            itertools.accumulate([1, 2, 3]),
            itertools.accumulate([1, 2, 3], operator.mul),
            itertools.islice(itertools.count(2), 3),
            itertools.takewhile(lambda a: a < 2, [1, 2, 1]),
            itertools.dropwhile(lambda a: a < 2, [1, 2, 1]),
            itertools.filterfalse(lambda a: a % 2, [1, 2, 3]),
            itertools.starmap(pow, [(2, 3)]),
            itertools.zip_longest([1, 2], [3], fillvalue=0),
            itertools.compress([1, 2, 3], [1, 0, 1]),
            itertools.repeat(1, 2),
            itertools.pairwise([1, 2, 3]),
            itertools.combinations_with_replacement([1, 2], 2),
        )
    ]


def itertools_group(x):
    return (
        x,
        [(k, list(g)) for k, g in itertools.groupby([1, 1, 2, 3, 3])],
        [(k, [v for v in g]) for k, g in itertools.groupby("aAbB", key=str.lower)],
    )


def itertools_tee(x):
    a, b = itertools.tee([1, 2, 3])
    return x, list(a), next(b)


def itertools_cycle(x):
    c = itertools.cycle([1, 2])
    return x * next(c) * next(c) * next(c)


def itertools_tensors(x):
    return (
        [a + b for a, b in itertools.pairwise([x, x + 1, x + 2])],
        list(itertools.accumulate([x, x, x]))[2],
        [a * b for a, b in itertools.combinations([x, x + 1, x + 2], 2)],
    )


def sorts(x):
    l = [(2, "b"), (1, "c")]
    l.sort(key=lambda t: t[1], reverse=True)
    return (
        x,
        l,
        sorted(D.items(), key=operator.itemgetter(1)),
        sorted("bca"),
        min(L, key=lambda v: -v),
        max(D, key=D.get),
    )


def sort_stable_tensors(x):
    return sorted([x, x[:2], x[:1]], key=len)[0]


def exc_from(x):
    try:
        try:
            1 / 0
        except ZeroDivisionError as e:
            raise ValueError("v") from e
    except ValueError as e:
        return x, str(e), type(e.__cause__).__name__


def exc_finally(x):
    log = []
    try:
        log.append(1)
        return x, log
    finally:
        log.append(2)


def exc_else(x):
    for k in range(3):
        try:
            if k == 1:
                raise KeyError(k)
        except (KeyError, IndexError) as e:
            x = x + e.args[0]
        else:
            x = x * 2
        finally:
            x = x + 1
    else:
        x = x - 1
    return x


def exc_class(x):
    class E(Exception):
        def __init__(s, m, c):
            super().__init__(m)
            s.c = c

    try:
        raise E("m", 3)
    except E as e:
        return x * e.c, str(e), e.args


def exc_group(x):
    try:
        raise ExceptionGroup("g", [ValueError(1)])
    except* ValueError as g:
        y = x + 1
    return y


def exc_notes(x):
    try:
        e = ValueError("a")
        e.add_note("n")
        raise e
    except ValueError as e2:
        return x, e2.__notes__


def exc_tb(x):
    try:
        raise ValueError("q")
    except ValueError:
        s = traceback.format_exc()
    return x, "ValueError: q" in s


def suppress(x):
    with contextlib.suppress(KeyError):
        D["zz"]
        x = x * 100
    return x + 1


def exitstack(x):
    log = []
    with contextlib.ExitStack() as s:
        s.enter_context(contextlib.nullcontext())
        s.callback(log.append, 1)
        s.push(lambda *a: log.append(2))
    return x, log


@contextlib.contextmanager
def cm(log):
    log.append("in")
    try:
        yield 5
    finally:
        log.append("out")


def contextman(x):
    log = []
    with cm(log) as v:
        x = x * v
    return x, log


def contextdeco(x):
    class C(contextlib.ContextDecorator):
        def __enter__(s):
            return s

        def __exit__(s, *a):
            return False

    @C()
    def f(y):
        return y + 1

    return f(x)


def redirect(x):
    b = io.StringIO()
    with contextlib.redirect_stdout(b):
        print("hi")
    return x + 1, b.getvalue()


def closing(x):
    class C:
        done = False

        def close(s):
            s.done = True

    c = C()
    with contextlib.closing(c):
        y = x + 1
    return y, c.done


def chainmap(x):
    c = collections.ChainMap({"a": 1}, {"b": 2})
    d = c.new_child({"a": 5})
    return x * c["b"] + d["a"], dict(d), len(c)


def counter(x):
    c = collections.Counter("aabc")
    c.update("a")
    c["z"] += 2
    return (
        x * c["a"],
        c.most_common(2),
        sum(c.values()),
        c - collections.Counter("a"),
        list(c.elements()),
    )


def ordered(x):
    o = collections.OrderedDict(a=1, b=2)
    o.move_to_end("a")
    o["c"] = x
    p = o.popitem(last=False)
    return o, p, list(reversed(o)), o == o


def defaultd(x):
    d = collections.defaultdict(list)
    d["a"].append(x)
    d["b"]
    return d, d.get("q"), collections.defaultdict(int, {"a": 1})


def dd_fromkeys(x):
    return (
        x,
        collections.defaultdict.fromkeys("ab", 1),
        dict.fromkeys(["a"], []),
        collections.OrderedDict.fromkeys("ab"),
    )


def deque(x):
    d = collections.deque([1, 2, 3], maxlen=3)
    d.append(x)
    d.rotate(1)
    d.appendleft(5)
    return d, d.popleft(), d.maxlen, d[0], d.index(2) if 2 in d else -1


def userdict(x):
    u = collections.UserDict(a=1)
    u["b"] = x
    return u["b"], u.data["a"], "a" in u


def userlist(x):
    u = collections.UserList([1, 2])
    u.append(3)
    return x * len(u), u.data


def bisects(x):
    l = [1, 3, 5]
    bisect.insort(l, 4)
    return x * bisect.bisect(l, 3), l, bisect.bisect_left(l, 3)


def heap(x):
    h = []
    [heapq.heappush(h, v) for v in (3, 1, 2)]
    return (
        x * heapq.heappop(h),
        h,
        heapq.nlargest(2, [1, 5, 3]),
        heapq.nsmallest(1, [4, 2]),
        list(heapq.merge([1, 3], [2])),
    )


def heap_tuple(x):
    h = [(2, "b"), (1, "a")]
    heapq.heapify(h)
    return x * heapq.heappop(h)[0], heapq.heapreplace(h, (5, "z"))


def dates(x):
    d = datetime.date(2020, 1, 2)
    t = datetime.timedelta(days=3)
    return x * (d + t).day, (d + t).isoformat(), d < d + t


def datetimes(x):
    return (
        x,
        datetime.datetime(2020, 1, 2, 3).strftime("%Y"),
        datetime.datetime.fromisoformat("2020-01-01").year,
    )


def decimals(x):
    return x * float(decimal.Decimal("1.1") * 2), str(decimal.Decimal("1.10"))


def fracs(x):
    return x * float(fractions.Fraction(1, 3) + 1), fractions.Fraction(2, 4).denominator


def regex(x):
    m = re.match(r"(\w+)-(?P<n>\d+)", "ab-12")
    return (
        x * int(m["n"]),
        m.groups(),
        re.sub(r"\d", "#", "a1"),
        [a.start() for a in re.finditer("a", "banana")],
        re.compile("b").search("abc").span(),
        m.groupdict(),
    )


def re_fn(x):
    return x, re.sub(r"\d", lambda m: str(int(m[0]) + 1), "a1b2")


def jsons(x):
    return x * json.loads('{"a": 3}')["a"], json.dumps({"a": [1, 2.5, None]}, sort_keys=True)


def paths(x):
    p = pathlib.Path("/a/b.txt")
    return x, p.name, p.suffix, str(p.parent / "c"), p.with_suffix(".md").stem


def ospath(x):
    return x, os.path.join("a", "b"), os.path.basename("/x/y.z"), os.path.splitext("y.z")


def osenv(x):
    return x * len(os.environ.get("NOPE_X", "ab")), os.getenv("NOPE_Y", "d")


def rnd(x):
    r = random.Random(3)
    return x * r.random(), r.randint(1, 9), r.choice([1, 2, 3]), r.sample(range(9), 3)


def rnd_global(x):
    random.seed(1)
    a = random.random()
    l = [1, 2, 3]
    random.shuffle(l)
    return x * a, l, random.uniform(0, 1)


def timing(x):
    t = time.perf_counter()
    y = x + 1
    dt = time.perf_counter() - t
    return y, dt >= 0


def timing2(x):
    t = time.time()
    y = x * 2
    return y, time.time() - t < 100, time.monotonic() > 0


def log_it(x):
    logging.getLogger("quiet").debug("x %s", 1)
    return x + 1


def sig(x):
    return (
        x * len(inspect.signature(fmt).parameters),
        list(inspect.signature(kwonly).parameters),
        inspect.signature(lambda a, b=2: a).parameters["b"].default,
    )


def insp(x):
    return (
        x,
        inspect.isfunction(fmt),
        inspect.isclass(int),
        inspect.ismethod(x.add),
        inspect.getfullargspec(lambda a, *b, c=1: 1).args,
    )


def hints(x):
    def f(a: int, b: str = "x") -> float: ...

    return x, f.__annotations__, typing.get_type_hints(f)


def mod_attr(x):
    M.value = 3
    y = x * M.value
    del M.value
    return y, hasattr(M, "value")


M = types.ModuleType("M")


def math_all(x):
    return (
        x * math.sqrt(4) * math.prod([1, 2])
        + math.gcd(4, 6)
        + math.isclose(1, 1.0)
        + math.floor(2.5)
        + math.log2(8)
        + math.inf * 0
        if False
        else x * math.pi
    )


def stats(x):
    return x * statistics.mean([1, 2, 3]), statistics.median([1, 5, 2])


def strings(x):
    return (
        x,
        string.ascii_lowercase[:3],
        string.Template("$a").substitute(a=1),
        "a,b".split(","),
        "abc".partition("b"),
        "A".lower().title().strip("x").replace("a", "b"),
        "ab".encode().hex(),
        "abc".translate(str.maketrans("a", "z")),
        textwrap.dedent("  a"),
    )


def ints(x):
    return (
        x,
        (5).bit_length(),
        int("ff", 16),
        (3).to_bytes(2, "big"),
        int.from_bytes(b"\x01\x02", "big"),
        7 // 2,
        -7 % 3,
        divmod(7, 3),
        2**10,
        1_000,
        round(2.567, 1),
        float("inf"),
        (2.0).is_integer(),
        (0.5).as_integer_ratio(),
        complex(1, 2).conjugate(),
        float.fromhex("0x1p3"),
    )


def byteses(x):
    return (
        x,
        bytearray(b"ab") + b"c",
        memoryview(b"abc")[1],
        struct.pack("<I", 3),
        struct.unpack("<I", b"\x03\0\0\0"),
    )


def hashes(x):
    return x, hashlib.md5(b"a").hexdigest(), zlib.crc32(b"a")


def sets(x):
    s = {1, 2}
    s |= {3}
    s.discard(1)
    return x * len(s), s & {3}, s - {3}, s ^ {9}, s <= {2, 3, 4}, frozenset(s), {k % 2 for k in s}


def dicts(x):
    d = dict(a=1)
    d |= {"b": x}
    d.setdefault("c", []).append(1)
    e = {k: v for k, v in d.items() if k != "b"}
    return (
        d,
        e,
        d.pop("a"),
        list(d),
        d.keys() & {"b"},
        dict(zip("ab", [1, 2])),
        d.keys() <= {"b", "c"},
        {**e, "z": 1} | {"y": 2},
    )


def dict_views(x):
    d = {"a": 1, "b": 2}
    return (
        x,
        list(d.items()),
        sorted(d.values()),
        d.items() >= {("a", 1)},
        next(iter(d)),
        list(reversed(d)),
    )


def lists(x):
    l = [3, 1]
    l += [2]
    l.insert(0, 9)
    l.reverse()
    l[1:2] = [7, 8]
    del l[0]
    return (
        x,
        l,
        l.index(7),
        l.count(1),
        l * 2,
        l[::-1],
        [*range(3)],
        l.copy(),
        [[0] * 2 for _ in range(2)],
    )


def slices(x):
    return (
        x[..., None],
        x[:, :2] if x.ndim > 1 else x[:2],
        x[slice(1, None)],
        x[[0, 1]],
        x[torch.tensor([0, 1])],
        x[None],
        x[-1],
    )


def comp(x):
    return (
        [[a * b for b in range(2)] for a in range(2)],
        {a: b for a, b in enumerate("ab")},
        sum(a for a in range(4)),
        any(a > 1 for a in L),
        all(a for a in L),
        x,
    )


def gen_fn(x):
    def g(n):
        for i in range(n):
            r = yield i
            if r:
                yield r

    it = g(3)
    next(it)
    it.send(5)
    return x * sum(it)


def gen_any_effect(x):
    log = []
    r = any(log.append(i) or i == 1 for i in range(4))
    s = all(log.append(i) is None and i < 1 for i in range(4))
    return x * len(log), log, r, s


def gen_in(x):
    log = []

    def g():
        for i in range(4):
            log.append(i)
            yield i

    return x, 1 in g(), log


def gen_unpack(x):
    def g():
        yield 1
        yield 2

    a, b = g()
    return x * a * b


def gen_yield_from(x):
    def a():
        r = yield from b()
        yield r

    def b():
        yield 1
        return 7

    return x * sum(a())


def gen_return(x):
    return (x * i for i in range(3))


def gen_escape(x):
    def g():
        yield x
        yield x + 1

    it = g()
    next(it)
    return it


def map_escape(x):
    return map(lambda a: a * 2, [x, x + 1])


def filter_escape(x):
    return filter(None, [0, 1, 2]), x


def zip_escape(x):
    return zip([x], [1]), x + 1


def enum_escape(x):
    return enumerate([x, x + 1], 5)


def chain_escape(x):
    return itertools.chain([x], [x + 1])


def map_break(x):
    m = map(lambda a: a * 2, [x, x + 1])
    a = next(m)
    sys.stdout.write("")
    return a, next(m)


def filter_break(x):
    m = filter(lambda a: a > 1, [1, 2, 3])
    sys.stdout.write("")
    return x * next(m)


def chain_break(x):
    m = itertools.chain([x], [x + 1])
    a = next(m)
    sys.stdout.write("")
    return a + next(m)


def zip_break(x):
    m = zip([x, x + 1], range(5))
    a = next(m)
    sys.stdout.write("")
    return a[0] + next(m)[1]


def gen_break(x):
    def g():
        for i in range(3):
            yield x * i

    m = g()
    a = next(m)
    sys.stdout.write("")
    return a + next(m)


def islice_break(x):
    m = itertools.islice(itertools.count(3), 5)
    next(m)
    sys.stdout.write("")
    return x * next(m)


def map_gen(x):
    return list(map(lambda a, b: a + b, [x, x], (i for i in range(2))))


def getframe(x):
    return x, sys._getframe().f_code.co_name, sys._getframe().f_lineno > 0


def getframe_caller(x):
    return x, who()


def who():
    return sys._getframe(1).f_code.co_name


def curframe(x):
    f = inspect.currentframe()
    return x, f.f_code.co_name


def intern(x):
    return x, sys.intern("abc")


def print_it(x):
    print("a", end="")
    return x + 1


def assert_it(x):
    assert x.shape[0] > 0, "bad"
    return x + 1


def global_write(x):
    global GW
    GW = 5
    return x * GW


GW = 1


def del_it(x):
    y = x + 1
    del y
    z = [1, 2]
    del z[0]
    return x, z


def ternary(x):
    return x if x.ndim else None, not x.ndim, x.ndim and 1 or 2, 1 < x.ndim < 5


def while_it(x):
    n = 0
    while True:
        n += 1
        if n == 2:
            continue
        if n > 4:
            break
        x = x + n
    else:
        x = x * 100
    return x


def recursion(x):
    def r(n):
        return x if n == 0 else r(n - 1) + 1

    return r(5)


def type_make(x):
    C = type("C", (), {"k": 3, "f": lambda s: s.k})
    return x * C().f()


def isinst(x):
    return (
        x,
        isinstance(x, torch.Tensor),
        isinstance(1, (int, str)),
        isinstance(1, int | str),
        issubclass(bool, int),
        callable(len),
        type(x) is torch.Tensor,
    )


def operator_mod(x):
    return (
        operator.add(x, 1),
        operator.itemgetter(1)(L),
        operator.attrgetter("shape")(x),
        operator.methodcaller("sum")(x),
        operator.mul(2, 3),
        operator.contains(L, 2),
        operator.index(3),
    )


def exec_it(x):
    ns = {}
    exec("a=3", ns)
    return x * ns["a"]


def eval_it(x):
    return x * eval("1+2")


def globals_it(x):
    return x * globals()["GW"]


def locals_it(x):
    a = 1
    return x, sorted(locals())


def setattr_it(x):
    o = types.SimpleNamespace(a=1)
    setattr(o, "b", 2)
    delattr(o, "a")
    return x * o.b, vars(o), o


def nested_tuple(x):
    (a, (b, c)), d = ((1, (2, 3)), 4)
    return x * a * b * c * d


def star_call(x):
    return torch.cat([*([x] * 2)], dim=0), max(*L), print(*[], end="", sep="")


def chained_cmp(x):
    return x, 1 < 2 < 3, "a" < "b", [1, 2] < [1, 3], (1,) == (1,)


def lazy_import(x):
    import math as mm
    from collections import OrderedDict as OD

    return x * mm.pi, OD(a=1)


def queue_it(x):
    q = queue.Queue()
    q.put(3)
    return x * q.get()


def uuid_it(x):
    return x, len(str(uuid.UUID(int=3)))


def warn_it(x):
    warnings.warn("w")
    return x + 1


def numbers_abc(x):
    return x, isinstance(1, numbers.Number), isinstance(1.5, numbers.Integral)


def pprint_it(x):
    return x, pprint.pformat({"a": 1})


def type_subscript(x):
    return x, list[int] == list[int], typing.Optional[int], typing.Union[int, str]


def attr_chain(x):
    return x, getattr(getattr(x, "shape"), "__len__")()


def int_enum_like(x):
    return x.sum(dim=int("0"))


def context_reuse(x):
    c = contextlib.nullcontext(3)
    with c as a, c as b:
        return x * a * b


def async_it(x):
    async def f():
        return x + 1

    try:
        f().send(None)
    except StopIteration as e:
        return e.value
