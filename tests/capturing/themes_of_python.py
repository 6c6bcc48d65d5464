"""More themes of random programs, as themes.py has them: what Python and torch offer besides."""

from __future__ import annotations

from tests.capturing.themes import Theme, blocks, rows, words

__all__ = ["THEMES"]

ASYNC = Theme(
    preamble="""
class Waiting:
    def __init__(self, k):
        self.k = k

    def __await__(self):
        got = yield self.k
        log.append(("woke", got))
        return self.k + 1


def driven(coroutine):
    told = 5
    try:
        while True:
            told = coroutine.send(None if told == 5 else told) + 1
    except StopIteration as stop:
        return stop.value


class Room:
    def __init__(self, swallow=False):
        self.swallow = swallow

    async def __aenter__(self):
        log.append("enters")
        return await Waiting(1)

    async def __aexit__(self, kind, error, traceback):
        log.append(("leaves", kind and kind.__name__))
        return self.swallow


async def adding(x, k):
    y = x + await Waiting(k % 3)
    log.append("added")
    return y * 2


async def ticking(k):
    try:
        for i in range(k % 4):
            yield i
            await Waiting(i)
    finally:
        log.append("ticked")


async def gathering(k):
    return [i async for i in ticking(k) if i != 1]


@contextlib.asynccontextmanager
async def leased(k):
    await Waiting(0)
    try:
        yield k
    finally:
        log.append("released")
""",
    expressions=rows(
        T="driven(adding(<T>, <I>))",
        LI="driven(gathering(<I>))",
        I="driven(Waiting(<I> % 5).__await__()); len(driven(gathering(<I>)))",
    ),
    statements=words("""
        log.append(driven(adding(<T>, <I>))); adding(<T>, <I>).close();
        log.append(driven(gathering(<I>)))
    """),
    blocks=blocks("""
        async def {0}({1:T}, {2:I}):
            async with Room(<B>) as {3:I}:
                ...
                {1} = await adding({1}, {3})
            return {1}
        <=T> = driven({0}(<T>, <I>))

        async def {0}({1:I}):
            total_ = 0
            async for {2:I} in ticking({1}):
                total_ += {2}
                ...
                if <B>: break
            else:
                ...
            return total_
        log.append(driven({0}(<I>)))

        async def {0}({1:I}):
            async with leased({1}) as {2:I}:
                ...
                return {2} + await Waiting({2} % 3)
        try:
            log.append(driven({0}(<I>)))
        except (ValueError, KeyError) as {3}:
            log.append(repr({3}))

        async def {0}({1:T}):
            try:
                ...
                return await adding({1}, <I>)
            finally:
                await Waiting(2)
        log.append(driven({0}(<T>)))
    """),
)

PROTOCOLS = Theme(
    preamble="""
import abc
import typing


class Money:
    def __init__(self, amount, unit="e"):
        self.amount = amount
        self.unit = unit

    def __add__(self, other):
        if not isinstance(other, Money):
            return NotImplemented
        return Money(self.amount + other.amount, self.unit)

    def __radd__(self, other):
        log.append("radd")
        return Money(self.amount + other, self.unit) if isinstance(other, int) else NotImplemented

    def __sub__(self, other):
        return Money(self.amount - getattr(other, "amount", other), self.unit)

    def __mul__(self, k):
        return Money(self.amount * k, self.unit)

    __rmul__ = __mul__

    def __neg__(self):
        return Money(-self.amount)

    def __bool__(self):
        log.append("asked")
        return self.amount != 0

    def __lt__(self, other):
        return self.amount < other.amount

    def __eq__(self, other):
        return isinstance(other, Money) and self.amount == other.amount

    def __hash__(self):
        return hash(self.unit)

    def __repr__(self):
        return f"{self.amount}{self.unit}"

    def __format__(self, spec):
        return f"{self.amount:{spec}}!" if spec else repr(self)

    def __int__(self):
        return int(self.amount)

    def __float__(self):
        return self.amount / 2

    def __index__(self):
        log.append("index")
        return int(self.amount) % 3

    def __abs__(self):
        return abs(self.amount)

    def __round__(self, digits=0):
        return (round(self.amount), digits)

    def __divmod__(self, k):
        return self.amount // k, self.amount % k

    def __iadd__(self, k):
        self.amount += k if isinstance(k, int) else k.amount
        return self

    def __matmul__(self, x):
        return x * self.amount

    def __rmatmul__(self, x):
        return x - self.amount

    def __contains__(self, k):
        return k == self.unit

    def __copy__(self):
        log.append("copied")
        return Money(self.amount, self.unit)


class Shape(abc.ABC):
    names: typing.ClassVar[list] = []

    @abc.abstractmethod
    def area(self): ...

    @property
    @abc.abstractmethod
    def title(self): ...

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.names.append(cls.__name__)

    def double(self):
        return self.area() * 2


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side * self.side

    @property
    def title(self):
        return f"square {self.side}"


class Left:
    def told(self, k):
        return ["left", k]

    def __getattr__(self, name):
        if name.startswith("any_"):
            return name
        return super().__getattr__(name) if hasattr(super(), "__getattr__") else missing(name)


class Right:
    def told(self, k):
        return ["right", k]

    def __setattr__(self, name, value):
        log.append(("sets", name))
        super().__setattr__(name, value)

    def __delattr__(self, name):
        log.append(("deletes", name))
        super().__delattr__(name)


class Both(Left, Right):
    __slots__ = ()

    def told(self, k):
        return super().told(k) + super(Left, self).told(k)


def missing(name):
    raise AttributeError(f"no {name}")


class Window(collections.abc.Sequence):
    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        log.append("len")
        return len(self.parts)

    def __getitem__(self, k):
        return Window(self.parts[k]) if isinstance(k, slice) else self.parts[k]


class Names(collections.abc.MutableMapping):
    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key.lower()]

    def __setitem__(self, key, value):
        self.held[key.lower()] = value

    def __delitem__(self, key):
        del self.held[key.lower()]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class Hinted:
    def __init__(self, k):
        self.k = k

    def __iter__(self):
        return self

    def __next__(self):
        if self.k <= 0:
            raise StopIteration
        self.k -= 1
        return self.k

    def __length_hint__(self):
        log.append("hint")
        return self.k


@functools.total_ordering
class Ranked:
    def __init__(self, k):
        self.k = k

    def __lt__(self, other):
        return self.k < other.k

    def __eq__(self, other):
        return self.k == other.k


class Point(typing.NamedTuple):
    x: int
    y: int = 2

    def total(self):
        return self.x + self.y


WALLET = Money(5)
SIDES = [Square(2), Square(3)]
BOTH = Both()
WINDOW = Window([1, 2, 3])
HELD = Names({"a": 1, "b": 2})
""",
    expressions=rows(
        MO="""
            WALLET; Money(<I>); <MO> + <MO>; <MO> * <I>; sum([<MO>, <MO>]); -<MO>; <I> + <MO>;
            max(<MO>, <MO>); copy.copy(<MO>); sorted([<MO>, <MO>])[0]; <MO> - <I>; <MO> or <MO>
        """,
        I="""
            int(<MO>); abs(<MO>); [4, 5, 6][<MO>]; <MO>.amount; divmod(<MO>, 2)[0]; round(<MO>)[0];
            SIDES[0].area(); SIDES[1].double(); len(BOTH.told(<I>)); WINDOW[<I> % 3]; len(WINDOW);
            sum(WINDOW); WINDOW.index(2); HELD['A']; HELD.get(<S>, <I>); len([*HELD]);
            len(Shape.names); Point(<I>).total(); Point(<I>)._replace(y=<I>).y;
            len([*Hinted(<I>)]);
            operator.index(<MO>); (Ranked(<I>) >= Ranked(<I>)) + 1; sum(Hinted(<I> % 5));
            HELD.setdefault(<S>, <I>); HELD.pop(<S>, 0); operator.length_hint(Hinted(2)) + 1
        """,
        F="float(<MO>); float(WALLET) * <F>",
        B="""
            bool(<MO>); <MO> < <MO>; <MO> == <MO>; 'e' in <MO>; not <MO>;
            isinstance(SIDES[0], Shape);
            2 in WINDOW; <S> in HELD; <MO> in [<MO>, <MO>]; Ranked(<I>) <= Ranked(<I>);
            {<MO>: 1} == {<MO>: 1}; isinstance(WINDOW, collections.abc.Sequence);
            BOTH.any_thing == <S>
        """,
        S="""
            f"{<MO>}"; f"{<MO>:>4}"; repr(<MO>); str(<MO>); SIDES[0].title; BOTH.any_name;
            '{0}-{0:03d}'.format(<MO>); '%s' % <MO>; repr(Point(<I>)); str([<MO>])
        """,
        LI="""
            [*WINDOW]; list(WINDOW[1:]); list(reversed(WINDOW)); list(Hinted(<I> % 4));
            BOTH.told(<I>);
            [*Point(<I>)]; list(HELD.values()); sorted(Hinted(<I> % 4)); [*(<I> for _ in WINDOW)]
        """,
        D="dict(HELD); {**HELD}; {m: 1 for m in [1, 2]}; dict(HELD.items())",
        T="WALLET @ <T>; <T> @ WALLET; <T> * int(<MO>); <T>[<MO>] + <T>; <T> * WALLET.amount",
    ),
    statements=words("""
        WALLET.amount = <I>; WALLET += <I>; WALLET += <MO>; log.append(<MO>); WALLET.unit = <S>;
        SIDES[0].side = <I>; BOTH.name = <I>; del BOTH.name; HELD[<S>] = <I>; del HELD['A'];
        HELD.update(<D>); WINDOW.parts = <LI>; WINDOW.parts.append(<I>); SIDES.append(Square(<I>));
        log.append(<MO> + 'x'); a, b = Hinted(<I>); a, *b = WINDOW; log.append({<MO>, <MO>});
        Shape(); BOTH.absent; kept += WINDOW; kept.extend(Hinted(2)); kept[:1] = Hinted(<I> % 3);
        log.append(Point(*WINDOW[:2])); WALLET.__class__ = Money; log.append(sorted([<MO>, <MO>]));
        many[<MO>] = <T>; Money.made = <I>; HELD.popitem(); HELD.clear(); <T>[<MO>] = <F>
    """),
    blocks=blocks("""
        class {0}(Square):
            def area(self):
                ...
                return super().area() + self.extra
            @functools.cached_property
            def extra(self):
                log.append('extra')
                return <I>
        {1} = {0}(<I>)
        log.append(({1}.double(), {1}.area(), {1}.title))

        class {0}(Both):
            def __getattribute__(self, name):
                if name == 'hidden':
                    return <I>
                return super().__getattribute__(name)
        {1} = {0}()
        {1}.late = <I>
        log.append(({1}.hidden, {1}.late, {1}.told(<I>), {1}.any_x))

        for {0:I} in WINDOW:
            ...

        for {0:S}, {1:I} in HELD.items():
            ...

        match Point(<I>, <I>):
            case Point(x=1, y={0:I}):
                ...
            case Point({0}, 2 | 3):
                ...
            case ({0}, {1:I}) if {1} > <I>:
                ...

        match WALLET:
            case Money(amount=0 | 5) as {0:MO}:
                ...
            case Money(unit='a'):
                ...
    """),
    parameters=[("purse", "MO", ["Money(1)", "Money(0)", "WALLET", "Money(3, 'a')"])],
    state={"MO": ["WALLET"]},
    changes=["WALLET.amount = 9", "Money.__neg__ = lambda self: self", "WINDOW.parts = [7]"],
)

ENUMS = Theme(
    preamble="""
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    C = A | B


class Kind(str, enum.Enum):
    SUM = "sum"
    MAX = "max"

    def apply(self, x):
        return getattr(x, self.value)()

    @classmethod
    def default(cls):
        return cls.SUM


class Planet(enum.Enum):
    EARTH = (1, 2.0)
    MARS = (2, 3.0)

    def __init__(self, place, mass):
        self.place = place
        self.mass = mass

    @property
    def heavy(self):
        return self.mass > 2


MODE = Kind.SUM
STATE = Flags.A
BY_KIND = {Kind.SUM: 1, Kind.MAX: 2, Level.LOW: 5}
""",
    expressions=rows(
        EN="MODE; Kind.SUM; Kind.MAX; Kind('sum'); Kind[<S>]; Kind.default(); list(Kind)[<I> % 2]",
        I="""
            Level.HIGH; Level(<I>) + 1; BY_KIND[<EN>]; len(Level); Planet.MARS.place; STATE.value;
            Level.LOW + <I>; BY_KIND.get(Level.LOW, <I>); len(list(Flags)); int(Level.HIGH);
            max(Level); {1: 4, 3: 6}[Level(<I>)]; Planet((<I>, 2.0)).place
        """,
        B="""
            <EN> is Kind.SUM; <EN> == 'sum'; STATE & Flags.A == Flags.A; Flags.B in STATE;
            bool(STATE & Flags.B); Level.LOW < <I>; <I> in BY_KIND; isinstance(<EN>, str);
            Planet.MARS.heavy; <EN> in (Kind.MAX,); Level.HIGH in <LI>
        """,
        S="""
            <EN>.name; <EN>.value; str(<EN>); repr(STATE); f"{<EN>}"; f"{Level.LOW}"; MODE.upper()
        """,
        T="""
            <EN>.apply(<T>) + <T>; <T> * Level.HIGH; <T> * Planet.EARTH.mass;
            getattr(<T>, MODE)() + <T>
        """,
        LI="[*Level]; [m.value for m in Level]; sorted(Level); [p.place for p in Planet]",
        LS="[k.name for k in Kind]; list(Kind.__members__)",
    ),
    statements=words("""
        MODE = <EN>; STATE |= Flags.B; STATE = STATE ^ Flags.A; BY_KIND[<EN>] = <I>; Kind.OTHER;
        log.append(<EN>); log.append(STATE); table[Level.LOW] = <I>; Level(9); Kind.SUM = 3;
        log.append(Flags.A | Flags.B); STATE = ~STATE; log.append(<EN>.missing)
    """),
    blocks=blocks("""
        match <EN>:
            case Kind.SUM:
                ...
            case Kind.MAX | 'other':
                ...

        match Level(<I> % 2 * 2 + 1):
            case Level.LOW:
                ...
            case _:
                ...

        for {0:EN} in Kind:
            log.append({0}.apply(<T>))
            ...
    """),
    state={"EN": ["MODE"]},
    changes=["MODE = Kind.MAX", "STATE = Flags.C", "BY_KIND[Kind.SUM] = 9"],
)

TEXTS = Theme(
    preamble="""
import string
import textwrap

WORDS = "the quick brown fox"
PATTERN = re.compile(r"(?P<first>\\w)(\\w*)")
LISTED = ["a", ["b", {"c": (1, [2])}]]
NESTED = (1, [2, 3], {"k": [4]})
GREETING = string.Template("hi $who, $k")
BYTES = b"abc"
""",
    expressions=rows(
        S="""
            '%r' % (LISTED,); '%s and %d' % (<S>, <I>); '%(a)s' % <D>; '%r' % (NESTED,);
            f"{LISTED}";
            '{0[0]}{1.count}'.format(LISTED, <O>); f"{<I>:>{<I> % 9}}"; f"{<F>:08.3f}";
            f"{<S>!r:>6}";
            WORDS.title(); WORDS.split()[<I>]; ' '.join(reversed(WORDS.split()));
            <S>.center(7, '*');
            WORDS.replace(<S>, 'X'); WORDS.partition('q')[2]; <S>.zfill(5); <S>.join(<LS>);
            <S> * 2;
            PATTERN.sub(r'\\2\\1', WORDS); PATTERN.match(WORDS)['first']; WORDS[<I>:]; <S>[::-1];
            GREETING.substitute(who=<S>, k=<I>); textwrap.shorten(WORDS, 12); BYTES.decode();
            str(NESTED); repr(LISTED); WORDS.translate({113: 'Q'}); WORDS.strip('thex');
            ascii(<S>);
            ''.join(sorted(<S>)); WORDS.format(); '{:,}'.format(<I> * 1000); f"{<I>:b}{<I>:#x}";
            '%5.2f|%-5s|' % (<F>, <S>); f"{<LI>}{<D>}"; '{a} {b}'.format(**<D>); f"{<B>:>6}";
            f"{<T>.shape}"; f"{<T>.dtype} {<T>.dim()}"; str(<T>.shape); WORDS.expandtabs();
            <S>.swapcase();
            '%s' % (<LI>,); '%s %s' % tuple(LISTED); '%r' % <P>; '%s' % [NESTED]; hex(<I>);
            chr(97 + <I> % 20)
        """,
        I="""
            len(WORDS); WORDS.count('o'); WORDS.find(<S>); ord(<S>[0]); int('1' + str(<I>));
            BYTES[<I>];
            len(PATTERN.findall(WORDS)); WORDS.index(<S>); int(f"{abs(<I>)}", 16);
            len(BYTES + b'x');
            sum(map(ord, <S>)); len(re.split('o', WORDS)); WORDS.rfind('o', 0, <I>); len(LISTED[1])
        """,
        B="""
            <S>.isalpha(); WORDS.startswith(<S>); <S> < <S>; <S> in WORDS; 'q' in WORDS;
            <S>.isdigit();
            re.search(<S>, WORDS) is None; WORDS.endswith(('x', <S>));
            bool(re.fullmatch('.*o.*', <S>))
        """,
        LS="""
            WORDS.split(); list(<S>); PATTERN.findall(<S>)[:0] + [<S>]; WORDS.split('o', <I> % 3);
            [m[0] for m in PATTERN.finditer(WORDS)]; <S>.splitlines();
            sorted(WORDS.split(), key=len);
            [w for w in WORDS.split() if <S> in w]; textwrap.wrap(WORDS, 9)
        """,
    ),
    statements=words("""
        WORDS += <S>; WORDS = WORDS.upper(); LISTED[1][0] = <S>; LISTED[1][1]['c'][1].append(<I>);
        NESTED[1].append(<I>); NESTED[2]['k'] = <I>; log.append(WORDS);
        log.append('%r' % (NESTED,));
        log.append(f"{NESTED} {LISTED!r}"); log.append('{}'.format(NESTED)); LISTED.append(<S>);
        log.append('%d' % <S>); log.append('{x}'.format(y=1)); log.append('%s %s' % <S>);
        log.append(f"{<S>:d}"); log.append(str(<O>.parts)); log.append('%r %s' % (<LI>, <D>));
        log.append(f"{<R>}"); BYTES = BYTES + bytes([<I> % 200]);
        log.append(repr((<LI>, <D>, <SE>)))
    """),
    parameters=[
        (
            "shown",
            "P",
            ["(1, [2, 3])", "NESTED", "([x], 2)[1:]", "(items, items)", "({'a': items}, 'b')"],
        )
    ],
    changes=["WORDS = 'pack my box'", "NESTED[1].append(9)", "LISTED[1][0] = 'z'", "BYTES = b'zz'"],
)

LIBRARY = Theme(
    preamble="""
import bisect
import contextvars
import heapq
import itertools
import threading
import types
import weakref

LEVEL = contextvars.ContextVar("LEVEL", default=2)
LOCAL = threading.local()
LOCAL.k = 3
BAG = types.SimpleNamespace(k=1, w=WEIGHT, parts=[1])
ORDERED = collections.OrderedDict(a=1, b=2, c=3)
HEAPED = [1, 3, 5]
OWNED = Box(4, WEIGHT)
SEEN_BY = weakref.ref(OWNED)
LIVING = weakref.WeakKeyDictionary()


class Keyed:
    pass


KEY = Keyed()
LIVING[KEY] = 7


@functools.singledispatch
def told(x):
    return "other"


@told.register
def _(x: int):
    return f"int {x}"


@told.register(list)
def _(x):
    return f"list {len(x)}"


def compare(a, b):
    log.append((a, b))
    return (a > b) - (a < b)


class Partial:
    def base(self, k, by=1):
        return k + by

    more = functools.partialmethod(base, by=5)


PARTIAL = Partial()
""",
    expressions=rows(
        I="""
            LEVEL.get(); LOCAL.k; BAG.k; ORDERED['a']; SEEN_BY().count; LIVING[KEY];
            PARTIAL.more(<I>);
            bisect.bisect_left(HEAPED, <I>); heapq.heappop(HEAPED); ORDERED.popitem()[1];
            len(ORDERED);
            next(itertools.count(<I>)); functools.reduce(operator.mul, <LI>, 1) % 1000;
            len(told(<I>));
            operator.add(<I>, <I>); operator.itemgetter(-1)(<LI>); collections.Counter(<LI>)[<I>];
            sum(itertools.repeat(<I>, 3)); max(<LI>, key=lambda i: -i); getattr(BAG, <S>, <I>);
            heapq.nlargest(1, <LI>)[0]; len(vars(BAG)); math.gcd(<I>, 6); math.isqrt(abs(<I>));
            min(ORDERED.values()); heapq.heappushpop(HEAPED, <I>); math.comb(5, <I> % 6);
            sum(HEAPED);
            functools.partial(max, <I>)(<I>); math.prod(<LI>) % 100; math.floor(<F>);
            <I>.bit_length()
        """,
        LI="""
            list(itertools.chain.from_iterable([<LI>, <LI>]));
            list(itertools.accumulate(<LI>, max));
            [k for k, _ in itertools.groupby(<LI>)];
            sorted(<LI>, key=functools.cmp_to_key(compare));
            list(itertools.compress(<LI>, [1, 0, <B>]));
            list(itertools.starmap(operator.add, zip(<LI>, <LI>)));
            list(itertools.zip_longest(<LI>[:2], <LI>[:1], fillvalue=0))[0:0];
            list(ORDERED.values());
            list(itertools.dropwhile(lambda i: i < 2, <LI>));
            list(heapq.merge(<LI>[:1], <LI>[:1]));
            [a for a, b in itertools.combinations(<LI>[:3], 2)];
            [a for a, b in itertools.pairwise(<LI>)];
            list(itertools.islice(itertools.cycle(<LI> or [1]), 3)); [*map(operator.neg, <LI>)];
            BAG.parts;
            [sum(g) for _, g in itertools.groupby(<LI>, lambda i: i % 2)]; HEAPED;
            <LI>.__getitem__(slice(2));
            list(collections.Counter(<LI>).elements());
            [*itertools.filterfalse(lambda i: i > 1, <LI>)]
        """,
        D="""
            ORDERED; vars(BAG).copy(); dict(ORDERED); collections.Counter(<LI>);
            collections.ChainMap(<D>, {'a': 9}).copy().maps[0]; dict.fromkeys(<LS>, <I>);
            {k: len([*g]) for k, g in itertools.groupby(<LS>)}
        """,
        S="told(<I>); told(<LI>); told(<S>); next(iter(ORDERED)); repr(ORDERED); repr(BAG.parts)",
        B="""
            SEEN_BY() is OWNED; KEY in LIVING; <S> in ORDERED; hasattr(BAG, <S>);
            operator.lt(<I>, <I>)
        """,
        T="BAG.w; operator.mul(<T>, <I>); torch.stack([*itertools.repeat(<T>, 2)]).sum(0)",
        O="SEEN_BY(); OWNED; weakref.proxy(OWNED)",
    ),
    statements=words("""
        LEVEL.set(<I>); LOCAL.k = <I>; LOCAL.late = <T>; BAG.k += 1; BAG.new = <I>;
        BAG.parts.append(<I>);
        ORDERED.move_to_end('a'); ORDERED['z'] = <I>; ORDERED.popitem(last=False);
        del ORDERED['b'];
        heapq.heappush(HEAPED, <I>); heapq.heapify(HEAPED); bisect.insort(HEAPED, <I>);
        LIVING[KEY] = <I>;
        OWNED.count = <I>; del BAG.new; log.append(ORDERED); log.append(BAG);
        log.append(LEVEL.get());
        contextvars.copy_context().run(LEVEL.set, <I>); operator.setitem(<LI>, 0, <I>);
        LIVING.clear();
        operator.iadd(kept, <LI>[:2]); log.append(itertools.count(<I>));
        log.append(PARTIAL.more(<I>));
        ORDERED.update(<D>); log.append([*itertools.permutations(<LI>[:2])]);
        operator.delitem(<D>, 'a')
    """),
    blocks=blocks("""
        {0} = LEVEL.set(<I>)
        ...
        LEVEL.reset({0})

        for {0:I}, {1} in itertools.groupby(sorted(<LI>), lambda i: i % 3):
            log.append(({0}, [*{1}]))
            ...

        @functools.lru_cache(maxsize=2)
        def {0}({1:I}):
            log.append(('called', {1}))
            return {1} + 1
        log.append([{0}(<I>), {0}(1), {0}(<I>), {0}.cache_info().hits])

        @functools.singledispatch
        def {0}({1}):
            return <I>
        @{0}.register(str)
        def _({1}):
            return len({1})
        log.append(({0}(<S>), {0}(<I>)))

        {0}, {1} = itertools.tee(<LI>)
        log.append((next({0}, 0), [*{1}]))
        ...
        log.append([*{0}])
    """),
    changes=[
        "LEVEL.set(8)",
        "LOCAL.k = 6",
        "BAG.k = 7",
        "ORDERED['y'] = 4",
        "OWNED.count = 1",
        "ORDERED.move_to_end('a')",
    ],
)

VIEWS = Theme(
    preamble="""
TREE = {"a": {"b": [1, 2]}, "c": {"d": 3}}
POOL = {1, 2, 5}
NUMBERS = frozenset({1, 3})
""",
    expressions=rows(
        SE="""
            <SE> - <SE>; <SE> ^ <SE>; POOL; set(<D>.values()); {*<LI>}; <SE>.union(<LI>);
            POOL & NUMBERS;
            <SE>.difference(<LI>); {i for i in <LI> if i in POOL}; set(<LI>) | POOL; POOL.copy()
        """,
        I="""
            POOL.pop(); len(<D>.keys() & {'a'}); len(<D>.items()); TREE['c']['d'];
            TREE['a']['b'][-1];
            <D>.popitem()[1]; len(<D>.keys() | TREE.keys()); sum(POOL); max(POOL);
            min(<SE>, default=0);
            sum(<D>.values()); len(POOL - <SE>); next(iter(<D>.values()), 0); len({**TREE, **<D>});
            next(reversed(<D>.values()), 0); <D>.pop(<S>); <D>[<S>]
        """,
        B="""
            POOL <= <SE>; <SE> < POOL; POOL.isdisjoint(<SE>); <D>.keys() == TABLE.keys();
            ('a', <I>) in <D>.items();
            <I> in <D>.values(); <SE> == <SE>; 'a' in TREE; TREE.get('z') is None;
            <D>.keys() >= {'a'};
            POOL.issuperset(<LI>); NUMBERS == {1, 3}; <D>.items() == <D>.items()
        """,
        D="""
            TREE['c']; dict(TREE['c']); {k: v for k, v in <D>.items() if v}; <D> | <D>;
            {k: i for i, k in enumerate(<LS>)}; dict(sorted(<D>.items()));
            dict(reversed(<D>.items())); {**<D>, **{'c': <I>}}; dict([('a', <I>), ('z', <I>)])
        """,
        LI="""
            [*<D>.values()]; [v for _, v in sorted(<D>.items())]; TREE['a']['b']; sorted(POOL);
            sorted(<SE> | POOL)
        """,
        LS="[*<D>]; [*reversed(<D>)]; list(<D>.keys()); sorted(TREE); [k for k in TREE]",
    ),
    statements=words("""
        POOL.add(<I>); POOL.discard(<I>); POOL.remove(<I>); POOL |= <SE>; POOL -= {1};
        POOL.update(<LI>);
        POOL.clear(); POOL.symmetric_difference_update(<LI>); TREE['c']['d'] = <I>;
        TREE[<S>] = <D>;
        TREE['a']['b'].append(<I>); del TREE['c']; TREE.setdefault(<S>, {})['n'] = <I>; <D> |= <D>;
        <D>.update(z=<I>); <D>.update([('y', <I>)]); <D>.setdefault(<S>, <I>); <D>[<S>] = <I>;
        log.append(<D>.keys()); log.append(list(<D>.items())); log.append(POOL);
        log.append(sorted(<SE>));
        for v in list(<D>): del <D>[v]; log.append(<D>.items()); log.append((<D>.values(), <I>));
        <SE>.intersection_update(<LI>); <D>.pop('a', None); TREE['a'] |= {'e': [<I>]}; del <D>[<S>]
    """),
    blocks=blocks("""
        for {0:S} in <D>:
            ...
            if <I> > 3: break

        for {0:S}, {1:I} in <D>.items():
            table[{0} + 'x'] = {1}
            if len(table) > 6: break

        for {0:I} in POOL.copy():
            POOL.discard({0})
            ...

        {0} = <D>.keys()
        <=D>[<S>] = <I>
        log.append((len({0}), 'a' in {0}, sorted({0})))

        {0} = iter(<D>.items())
        log.append(next({0}, None))
        ...
        log.append([*{0}])

        try:
            for {0:I} in <SE>:
                POOL.add({0} + <I>)
                if len(POOL) > 9: break
        except RuntimeError as {1}:
            log.append(str({1}))
    """),
    state={"SE": ["POOL"], "D": ["TREE['c']"]},
    changes=["POOL.add(8)", "TREE['c'] = {'d': 4, 'e': 5}", "TREE['a']['b'] = [7]", "POOL = {4}"],
)

GROUPS = Theme(
    preamble="""
class Fault(Exception):
    def __init__(self, k):
        super().__init__(f"fault {k}")
        self.k = k


def failing(k):
    found = []
    for i in range(k % 4):
        try:
            raise Fault(i) if i % 2 else ValueError(i)
        except Exception as error:
            found.append(error)
    if found:
        raise ExceptionGroup("several", found)
    return k


def noting(k):
    try:
        return checked(k)
    except ValueError as error:
        error.add_note(f"at {k}")
        raise


class Guarding(contextlib.ContextDecorator):
    def __enter__(self):
        log.append("guards")

    def __exit__(self, *error):
        log.append(("guarded", error[0] and error[0].__name__))
        return error[0] is KeyError


@Guarding()
def guarded(k):
    if k % 3 == 0:
        raise KeyError(k)
    return k


@contextlib.contextmanager
def retrying(times):
    try:
        yield times
    except Fault as fault:
        log.append(("retried", fault.k))
        if times < 2:
            raise ValueError("gave up") from fault
""",
    expressions=rows(
        I="failing(<I>); noting(<I>); guarded(<I>) or 0; guarded(1)",
        X="Fault(<I>); ExceptionGroup('e', [Fault(<I>), ValueError(<S>)]); OSError(2, <S>)",
        S="repr(<X>); str(<X>)",
    ),
    statements=words("""
        failing(<I>); raise <X>; noting(<I>); guarded(<I>); raise <X> from Fault(<I>);
        log.append(<X>);
        raise ExceptionGroup('x', [KeyError(<S>), Fault(<I>)])
    """),
    managers=words(
        "Guarding(); retrying(<I>); retrying(1), Guarding(); contextlib.suppress(Fault)"
    ),
    blocks=blocks("""
        try:
            ...
            failing(<I>)
        except* Fault as {0}:
            log.append([str(e) for e in {0}.exceptions])
            log.append(<T>)
        except* ValueError as {1}:
            log.append(len({1}.exceptions))

        try:
            try:
                failing(<I>)
            except* ValueError:
                log.append(<I>)
                raise
        except ExceptionGroup as {0}:
            log.append((str({0}), len({0}.exceptions)))

        try:
            noting(<I>)
            ...
        except Odd as {0}:
            log.append({0}.__notes__)

        with contextlib.ExitStack() as {0}:
            {0}.callback(log.append, 'last')
            {0}.enter_context(Guarding())
            {0}.push(lambda *e: log.append(e[0] and e[0].__name__))
            ...
            raise <X>

        try:
            raise <X>
        except Exception as {0}:
            {1} = {0}
            try:
                raise Fault(<I>) from {1}
            except Fault as {2}:
                log.append(repr(({2}.__cause__, {2}.__context__, {2}.__suppress_context__)))
        log.append(repr({1}))

        {0} = None
        for {1:I} in range(3):
            try:
                ...
                noting({1})
            except Odd as {2}:
                {0} = {2}
                continue
            finally:
                log.append(('round', {1}))
            log.append(repr({0} and {0}.__context__))
    """),
)

MODULES = Theme(
    preamble="""
from torch import nn
from torch.nn.utils import parametrize

torch.manual_seed(7)


class Halved(nn.Module):
    def forward(self, w):
        return w / 2


class Cell(nn.Module):
    def __init__(self, k=4):
        super().__init__()
        self.lin = nn.Linear(k, k)
        self.register_buffer("mean", torch.zeros(k))
        self.register_buffer("steps", torch.tensor(0), persistent=False)
        self.scale = nn.Parameter(torch.ones(k) * 0.5)
        self.history = []
        self.cache = {}

    def forward(self, x, keep=False):
        self.steps += 1
        out = self.lin(x) * self.scale + self.mean
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(out.detach(), alpha=0.1)
        if keep:
            self.history.append(out.detach())
            self.cache["last"] = out.shape[0]
        return out

    @property
    def width(self):
        return self.lin.in_features

    def extra_repr(self):
        return f"width={self.width}"


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleDict({"a": Cell(), "b": nn.Tanh()})
        self.weights = nn.ParameterList([torch.ones(4), torch.zeros(4)])
        self.named = nn.ParameterDict({"p": torch.full((4,), 0.25)})
        self.order = ["a", "b"]

    def forward(self, x):
        for name in self.order:
            x = self.cells[name](x)
        for w in self.weights:
            x = x + w
        return x * self.named["p"]


CELL = Cell()
MANY = Many()
HALF = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Halved())
NORMED = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
ADAM = torch.optim.Adam(CELL.parameters(), lr=0.05)
SCHEDULE = torch.optim.lr_scheduler.StepLR(ADAM, 1, 0.5)
HEARD = []


def hook(module, args, out):
    HEARD.append(type(module).__name__)
    return out + 1


def before(module, args):
    HEARD.append("pre")
    return (args[0] * 2,)
""",
    expressions=rows(
        T="""
            CELL(<T>); CELL(<T>, keep=<B>); MANY(<T>); HALF(<T>); NORMED(<T>); CELL.lin(<T>);
            CELL.mean;
            MANY.cells['a'](<T>); CELL.scale * <T>; sum(MANY.weights) + <T>; MANY.named['p'];
            HALF.weight[0];
            nn.functional.layer_norm(<T>, (4,), CELL.scale); nn.LayerNorm(4)(<T>);
            CELL.steps * <T>;
            nn.Sequential(CELL, nn.ReLU())(<T>); CELL.get_parameter('scale');
            CELL.state_dict()['mean'];
            nn.Dropout(0.0)(<T>); CELL.forward(<T>);
            torch.cat([*CELL.parameters()][1:2] + [<T>])[:4];
            nn.utils.parameters_to_vector(CELL.parameters())[:4]; CELL.history[-1];
            nn.Bilinear(4, 4, 4)(<T>, <T>)
        """,
        I="""
            CELL.width; len(CELL.history); CELL.cache.get('last', <I>); len(HEARD);
            int(CELL.steps); len(MANY.order);
            len(list(MANY.named_parameters())); len(CELL._forward_hooks);
            sum(p.numel() for p in CELL.parameters());
            len(CELL.state_dict()); len(MANY.cells); len([*MANY.modules()]); SCHEDULE.last_epoch
        """,
        B="""
            CELL.training; CELL.scale.requires_grad; CELL.scale.grad is None;
            hasattr(CELL, 'extra');
            'a' in MANY.cells; parametrize.is_parametrized(HALF); isinstance(CELL.lin, nn.Linear)
        """,
        S="""
            repr(CELL)[:9]; [*CELL.state_dict()][0]; MANY.order[0]; type(CELL.lin).__name__;
            CELL.extra_repr()
        """,
        F="ADAM.param_groups[0]['lr']; SCHEDULE.get_last_lr()[0]",
        LT="[*CELL.parameters()][:1]; list(MANY.weights); CELL.history",
        NN="CELL; MANY; CELL.lin; nn.Identity()",
    ),
    statements=words("""
        CELL.train(<B>); CELL.eval(); CELL.steps.zero_(); CELL.mean = <T>.detach();
        MANY.order.reverse();
        CELL.register_forward_hook(hook); CELL.register_forward_pre_hook(before);
        CELL.lin.register_forward_hook(hook);
        CELL._forward_hooks.clear(); MANY.cells['b'] = nn.ReLU(); MANY.order.append('b');
        CELL.history.clear();
        CELL(<T>).sum().backward(); ADAM.step(); ADAM.zero_grad();
        ADAM.zero_grad(set_to_none=False);
        SCHEDULE.step(); ADAM.param_groups[0]['lr'] = <F>; CELL.load_state_dict(CELL.state_dict());
        CELL.requires_grad_(<B>); CELL.scale.data.mul_(0.5); CELL.extra = <I>; del CELL.extra;
        MANY.zero_grad();
        CELL.register_buffer('late', <T>.detach()); CELL.cache.clear();
        nn.init.ones_(CELL.scale); CELL.double().float();
        CELL.apply(lambda m: HEARD.append(type(m).__name__)); CELL.lin = nn.Linear(4, 4);
        log.append(CELL.cache);
        nn.utils.clip_grad_norm_([CELL.scale], 0.5); log.append([*CELL.state_dict()]);
        CELL.missing;
        CELL.scale = nn.Parameter(torch.ones(4)); CELL.scale = <T>;
        log.append(ADAM.state_dict()['param_groups'][0]['lr'])
    """),
    blocks=blocks("""
        for {0:I} in range(2):
            ADAM.zero_grad()
            {1} = (CELL(<T>) - <T>.detach()).pow(2).mean()
            {1}.backward()
            ADAM.step()
            SCHEDULE.step()
            log.append({1}.detach())

        {0} = CELL.register_forward_hook(hook)
        ...
        <=T> = CELL(<T>)
        {0}.remove()

        for {0:S}, {1:T} in CELL.named_parameters():
            log.append(({0}, {1}.shape))

        class {0}(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = CELL
                self.k = <I>
            def forward(self, x):
                ...
                return self.inner(x) * self.k
        {1:NN} = {0}()
        log.append({1}(<T>))

        with torch.no_grad():
            for {0:T} in CELL.parameters():
                {0}.mul_(0.9)

        {0} = copy.deepcopy(CELL)
        log.append({0}(<T>))
        ...
        log.append({0}(<T>) - CELL(<T>))

        {0} = torch.optim.SGD([CELL.scale], lr=0.1, momentum=0.9)
        CELL(<T>).sum().backward()
        {0}.step()
        log.append(CELL.scale.detach().clone())
    """),
    changes=[
        "CELL.eval()",
        "CELL.mean = torch.ones(4)",
        "MANY.order = ['b', 'a']",
        "CELL.extra = 2",
        "CELL.register_forward_hook(hook)",
        "MANY.cells['b'] = nn.Sigmoid()",
        "CELL.scale.requires_grad_(False)",
    ],
    around=["torch.no_grad()", "torch.autocast('cpu', dtype=torch.bfloat16)"],
)

NESTS = Theme(
    preamble="""
@torch.no_grad()
def frozen(x, k=2):
    with torch.enable_grad():
        y = x * k
    return y + 1


@torch.autocast("cpu", dtype=torch.bfloat16)
def mixed(x):
    return torch.outer(x, x) @ torch.eye(x.shape[0])


class Switched:
    def __init__(self, on):
        self.on = on

    def __enter__(self):
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.on)
        return self

    def __exit__(self, *error):
        torch.set_grad_enabled(self.before)


ROOT = torch.tensor([1.0, -1.0, 0.5, 2.0], requires_grad=True)
""",
    expressions=rows(
        T="""
            frozen(<T>); frozen(ROOT); mixed(<T>)[0].float(); ROOT * <T>;
            torch.no_grad()(lambda t: t * 2)(ROOT);
            torch.inference_mode()(lambda t: t + 1)(<T>); (ROOT @ torch.eye(4));
            F.linear(<T>, torch.eye(4)).float();
            torch.mm(<V>, <V>).reshape(4); (ROOT.detach() * <T>); torch.enable_grad()(frozen)(ROOT)
        """,
        B="""
            ROOT.requires_grad; <T>.requires_grad; torch.is_autocast_enabled('cpu');
            <T>.is_inference()
        """,
        S="str((<V> @ <V>).dtype); str(torch.get_autocast_dtype('cpu'))",
    ),
    statements=words("""
        log.append((ROOT * <T>).requires_grad); log.append((<V> @ <V>).dtype);
        (ROOT * <T>).sum().backward();
        log.append(ROOT.grad); ROOT.grad = None; log.append(torch.is_grad_enabled());
        torch.set_grad_enabled(<B>);
        torch.set_autocast_enabled('cpu', <B>); log.append(mixed(<T>).dtype); <T>.requires_grad_()
    """),
    managers=words("""
        Switched(<B>); torch.no_grad(), torch.enable_grad(); torch.autocast('cpu', torch.float16);
        torch.autocast('cpu', torch.bfloat16), torch.no_grad();
        torch.inference_mode(), Switched(<B>);
        torch.autocast('cpu', enabled=False); torch.inference_mode(False);
        torch.set_grad_enabled(<B>), Switched(True);
        torch.autograd.grad_mode.set_multithreading_enabled(<B>);
        torch.autograd.set_detect_anomaly(<B>)
    """),
    blocks=blocks("""
        with torch.autocast('cpu', dtype=torch.bfloat16):
            <=V> = (<V> @ <V>)
            with torch.autocast('cpu', enabled=False):
                log.append((<V>.float() @ <V>.float()).dtype)
                ...
            log.append((<V> @ <V>).dtype)

        with torch.no_grad():
            {0:T!} = ROOT * <T>
            with torch.enable_grad():
                {1:T!} = ROOT * <T>
                ...
        log.append(({0}.requires_grad, {1}.requires_grad))

        with torch.inference_mode():
            {0} = <T> * 2
            ...
        log.append({0}.is_inference())

        try:
            with torch.no_grad(), Switched(True):
                ...
                raise ValueError(<S>)
        except ValueError:
            log.append(torch.is_grad_enabled())

        for {0:B} in (True, False):
            with torch.set_grad_enabled({0}):
                log.append((ROOT * <T>).requires_grad)
                ...
    """),
    state={"T": ["ROOT"]},
    around=[
        "torch.no_grad()",
        "torch.autocast('cpu', dtype=torch.bfloat16)",
        "torch.inference_mode()",
        "torch.enable_grad()",
    ],
    changes=["ROOT.requires_grad_(False)", "ROOT.grad = None", "torch.set_grad_enabled(False)"],
)

THEMES: dict[str, Theme] = {
    "async": ASYNC,
    "protocols": PROTOCOLS,
    "enums": ENUMS,
    "texts": TEXTS,
    "library": LIBRARY,
    "views": VIEWS,
    "groups": GROUPS,
    "modules": MODULES,
    "nests": NESTS,
}
