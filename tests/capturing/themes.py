"""What programs may be about beside plain Python: each program draws a few of these themes.

A theme adds rows to what vocabulary.py has (the same notation), so programs mix its rows with all
others. Kinds of its own: W tensor of some rows of 3, IX integer tensor, N array, Q deque, GS
generator that is sent to, GT generator of tensors, RG random generator, NN module, X exception.
No row reads memory that nobody has written to (`empty`, what `resize_` adds): it differs by chance.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

__all__ = ["THEMES", "Theme", "blocks", "rows", "words"]

Rows = dict[str, list[str]]


@dataclass(frozen=True)
class Theme:
    """Rows of one theme.

    preamble     what programs of it define beside vocabulary.PREAMBLE
    expressions  by kind; statements are lines, managers stand in `with`
    blocks       statements of several lines: {0} is a new name, {0:I} one of that kind from there
                 on, {0:I!} also after the block; a line `...` is a block of any statements
    parameters   more parameters: name, kind, expressions for arguments
    state        globals by kind
    changes      what may be done between two calls
    around       managers that the whole call may run in
    """

    preamble: str = ""
    expressions: Rows = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    managers: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    parameters: list[tuple[str, str, list[str]]] = field(default_factory=list)
    state: Rows = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    around: list[str] = field(default_factory=list)


def words(text: str) -> list[str]:
    """What stands between semicolons."""
    return [word for word in " ".join(text.split()).split("; ") if word]


def blocks(text: str) -> list[str]:
    """What stands between blank lines."""
    return textwrap.dedent(text).strip().split("\n\n")


def rows(**kinds: str) -> Rows:
    return {kind: words(text) for kind, text in kinds.items()}


VALUES = Theme(
    expressions=rows(
        IX="""
            torch.tensor([0, 1, 2, 3]); torch.tensor([<I>, 0, 1, 2]); <IX> + <I>; <IX> // <IX>;
            torch.tensor([<I> % 5, -1, 1, <I> % 4]); <IX> % <I>; <IX> ** <I>; <T>.long();
            <IX>.flip(0); <T>.argsort(); <T>.argmax().repeat(4); torch.bincount(<IX>.clamp(-2, 9));
            torch.searchsorted(<T>, <T>); torch.arange(<I> % 9); <IX> << (<I> % 70);
            <IX>.to(torch.int8);
            torch.where(<T> > 0)[0]; <IX>.to(torch.int32); <IX>.cumsum(0); torch.div(<IX>, <I>,
            rounding_mode='floor'); <IX> * 2 ** 62; torch.gcd(<IX>, <IX>); ~<IX>; <IX>.clamp(0, 3)
        """,
        T="""
            torch.take(<T>, <IX>); <T>[<IX>]; <T>.index_select(0, <IX>); <T>.gather(0, <IX>);
            <T>.scatter(0, <IX>, <T>); <T>.index_add(0, <IX>, <T>);
            torch.linalg.inv(<V>).reshape(4);
            torch.linalg.cholesky(<V>).reshape(-1); torch.linalg.solve(<V>, <V>)[0].repeat(2);
            F.embedding(<IX>, <V>)[:2].reshape(4); <T> * (<IX> // <I>); <IX> % <IX> + <T>;
            F.one_hot(<IX>, 4)[0] * <T>; F.cross_entropy(<V>, <IX>[:2]) + <T>;
            F.nll_loss(<V>, <IX>[:2]) + <T>; F.binary_cross_entropy(<T>, <T>) + <T>;
            F.binary_cross_entropy(<T>.sigmoid(), <T>.sigmoid()) * <T>; torch.full((<I> % 9,), <F>);
            <T>.narrow(0, <I>, 2).repeat(2); <T>.view(<I>, 2).reshape(-1);
            torch.repeat_interleave(<T>, <IX>.clamp(-1, 9))[:4]; torch.ones(4)[<IX>];
            torch.arange(4)[<I>] * <T>;
            <T>.to(torch.int8).float(); torch.split(<T>, [<I>, 2])[0].sum() + <T>;
            <T>[<I>:].repeat(2);
            <T>.select(0, <I>) + <T>; torch.logdet(<V>) + <T>; <T>[<I>] * <T>; <T>[:<I>].max() +
            <T>;
            torch.tensor([1.0, 2.0]).expand(<I> % 9, 2).reshape(-1); <T>.roll(<I>); <IX> * <F>;
            torch.stack([<T>, <T>])[<I>]; torch.unbind(<V>)[<I>].repeat(2); <T> / <I>;
            <T>.kthvalue(<I>).values + <T>; <T>.topk(<I>).values.sum() + <T>; <T>[<IX>,
            None].sum(1);
            torch.cat([<T>, <T>]).view(-1, <I>).sum(0); <T>.reshape(<I>, -1).sum(0).sum() + <T>
        """,
        I="""
            int(<IX>[0]); <T>.argmax().item(); <IX>.max().item(); 7 // <I>; 7 % (<I>); [1, 2][<I>];
            int(<S>); <D>[<S>]; 2 ** (<I> % 70); <I> * 2 ** 62; <IX>[<I>].item(); (1, 2, 3)[<I>];
            <IX>.numel(); <IX>.tolist()[0]; range(3)[<I>]; <T>.nonzero().shape[0]; <T>.size(<I>)
        """,
        F="1 / <F>; float(<S>); <F> ** <I>; <T>[<I>].item(); <T>.max().item(); <F> % <F>",
        B="(<IX> > <I>).any(); torch.equal(<T>, <T>); <IX> is <IX>; <T>.isnan().any()",
    ),
    statements=words("""
        torch._assert(<B>, 'not so'); assert <T>.min() > -9, <S>; assert <T>.shape == (4,);
        <T>[<IX>] = <F>; <T>.index_add_(0, <IX>, <T>); <T>.scatter_(0, <IX>, <T>); <T>[<I>] = <I>;
        <T>.index_fill_(0, <IX>, <F>); <T>[<IX>[:2]] += <T>[:2]; torch.linalg.inv(<V>);
        torch.linalg.cholesky(<V>); torch.linalg.lu_factor(<V>); <T>[:0].max(); <IX>.add_(<I>);
        torch.max(<T>[:0], 0); <T>.index_copy_(0, <IX>, <T>); <T>.put_(<IX>, <T>); <IX>[<I>] = <I>;
        log.append(torch.ones(4)[<I>]); torch.linalg.solve(<V>, <V>); <IX>.copy_(<T>);
        <T>.masked_fill_(<T> > <I>, <F>); <T>[<I>:<I>] = <T>; <T>[<T> > 0] += <T>; log.append(<IX>);
        <T>.view(<I>); <T> + <T>[:<I>]; <V>[<I>, <I>] = <F>; <T>.masked_select(<T> > <I>)[<I>]
    """),
)

MODES = Theme(
    preamble="""
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Heard(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        log.append(("heard", getattr(func, "__name__", "")))
        return func(*args, **(kwargs or {}))


class Changing(TorchFunctionMode):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * self.by if func is torch.sin or func is torch.Tensor.add else found


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def by_default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield dtype
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def without(x):
    return x * 2 + torch.ones(4)


@torch.inference_mode()
def inferring(x):
    return x * 2 + torch.ones(4)
""",
    expressions=rows(
        T="""
            torch.ones(4, device='cpu'); (<V> @ <V>).reshape(4); without(<T>); inferring(<T>);
            torch.tensor([1.0, <F>, 3.0, 4.0]); torch.empty(4).fill_(<F>); torch.arange(4.0);
            torch.zeros(4, dtype=torch.float64) + <T>; <T>.to(torch.get_default_dtype());
            F.linear(<T>, torch.eye(4)); torch.sin(<T>).add(1); <T>.cpu(); <T>.type_as(<T>);
            torch.inference_mode()(branching)(<T>); torch.full_like(<T>, <I>); <T>.to(<T>.device);
            torch.linspace(0, 1, 4); torch.as_tensor([<F>, 1, 2, 3]); <T>.double(); <T>.bfloat16()
        """,
        B="""
            torch.is_inference_mode_enabled(); <T>.is_inference(); torch.is_autocast_enabled('cpu');
            <T>.device.type == 'cpu'; torch.get_default_dtype() is torch.float32;
            <T>.dtype == <T>.dtype; <T>.is_leaf; <T>.grad_fn is None; <T>.is_floating_point()
        """,
        S="str(<T>.dtype); str(torch.get_default_device()); str(torch.get_default_dtype())",
    ),
    statements=words("""
        torch.set_default_dtype(torch.float64); torch.set_default_dtype(torch.float32);
        torch.set_grad_enabled(<B>); torch.set_default_device('cpu'); log.append(<T>.dtype);
        <T>.requires_grad_(<B>); log.append(torch.ones(1).dtype); log.append(<T>.device)
    """),
    managers=words("""
        torch.device('cpu'); torch.device('meta'); Heard(); Changing(<I>); Dispatched();
        torch.inference_mode(); torch.inference_mode(<B>); torch.no_grad(); torch.enable_grad();
        torch.autocast('cpu', dtype=torch.bfloat16); torch.autocast('cpu', enabled=<B>);
        by_default(torch.float64); torch.set_grad_enabled(<B>); torch.random.fork_rng();
        torch.no_grad(), Heard(); Heard(), Changing(2); torch.autograd.set_grad_enabled(<B>)
    """),
    blocks=blocks("""
        with Dispatched() as {0}:
            ...
        log.append({0}.seen > 0)

        {0} = Heard()
        with {0}:
            ...
        with {0}:
            ...

        {0} = torch.no_grad()
        {0}.__enter__()
        try:
            ...
        finally:
            {0}.__exit__(None, None, None)

        with contextlib.ExitStack() as {0}:
            {0}.enter_context(torch.no_grad())
            {0}.callback(log.append, <I>)
            ...
            {0}.enter_context(managed('x'))
            ...

        @torch.no_grad()
        def {0}({1}):
            return {1} * 2 + <T>
        <=T> = {0}(<T>)
    """),
    changes=words("""
        torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False);
        torch.set_default_device('cpu')
    """),
    around=words("""
        torch.no_grad(); torch.inference_mode(); torch.device('cpu'); torch.device('meta'); Heard();
        Changing(3); torch.autocast('cpu', dtype=torch.bfloat16); by_default(torch.float64);
        Dispatched(); torch.enable_grad()
    """),
)

OUT = Theme(
    expressions=rows(
        T="""
            torch.add(<T>, <T>, out=<T>); torch.mul(<T>, <I>, out=<T>[:]); torch.sin(<T>, out=<T>);
            torch.sin(<T>, out=torch.empty(0)); torch.cat([<T>[:2], <T>[1:3]], out=<T>);
            torch.sum(<V>, 0, out=torch.empty(2)).repeat(2); torch.where(<T> > 0, <T>, <T>,
            out=<T>);
            torch.sort(<T>, out=(torch.empty(4), torch.empty(4, dtype=torch.long)))[0];
            torch.arange(4, out=<T>); torch.matmul(<V>, <V>, out=<V>).reshape(4);
            torch.clamp(<T>, min=<F>, out=<T>); torch.cumsum(<T>, 0, out=<T>);
            torch.max(<V>, 0, out=(torch.empty(0), torch.empty(0,
            dtype=torch.long))).values.repeat(2);
            torch.add(<T>, <T>, out=<V>.t().reshape(4)); torch.full((4,), <F>, out=<T>);
            torch.stack([<T>[:2], <T>[2:]], out=<V>).reshape(-1); torch.pow(<T>, 2, out=<T>);
            torch.ones(4, out=<T>); torch.index_select(<T>, 0, torch.arange(4), out=<T>)
        """
    ),
    statements=words("""
        torch.mul(<T>, <T>, out=<T>); torch.add(<T>, 1, out=<T>[:2]); torch.cat([<T>, <T>],
        out=<T>);
        torch.add(<V>, <I>, out=<V>); torch.add(<T>[:2], 1, out=<T>); torch.sin(<T>, out=<T>[::2]);
        torch.add(<T>, <T>, out=torch.empty(4, dtype=torch.long)); torch.eye(2, out=<V>);
        torch.add(<T>, <T>, out=torch.empty(4, dtype=torch.float64)); torch.mm(<V>, <V>, out=<T>);
        torch.gt(<T>, 0, out=<T>); torch.add(<V>, 1, out=<V>.t()); torch.sum(<T>, 0, out=<T>);
        torch.exp(<T>, out=<T>.view(2, 2)); log.append(torch.neg(<T>, out=torch.empty(2)));
        torch.topk(<T>, 2, out=(<T>, torch.empty(2, dtype=torch.long))); torch.abs(<T>[1:],
        out=<T>[:3])
    """),
    blocks=blocks("""
        {0:T!} = torch.ones(<I> % 6)
        torch.add(<T>, <T>, out={0})
        ...

        {0} = torch.zeros(2, 4)
        for {1} in range(2):
            torch.mul(<T>, <F>, out={0}[{1}])
        log.append({0})
    """),
)

OUTSIDE = Theme(
    preamble="""
import bisect
import heapq
import itertools
import types
import weakref

QUEUE = collections.deque([1, 2, 3], maxlen=5)
GROUPS = collections.defaultdict(list)
SEEN = {"a"}
HOLDER = Record(1, [4, 5])
HEAP = [1, 4, 7]
CHAIN = collections.ChainMap({}, {"a": 1, "z": 2})
TALLY = collections.Counter("aab")


class Recording(list):
    def append(self, item):
        log.append("recorded")
        super().append(item)


class Missing(dict):
    def __missing__(self, key):
        log.append(("missing", key))
        self[key] = len(self)
        return self[key]


class Guarded:
    __slots__ = ("_value", "__weakref__")
    made = 0

    def __init__(self, value):
        self._value = value
        type(self).made += 1

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        log.append(("set", value))
        if isinstance(value, int) and value < 0:
            raise ValueError("negative")
        self._value = value

    @value.deleter
    def value(self):
        self._value = None


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    size: int
    name: str = "f"


@dataclasses.dataclass(slots=True)
class Counted:
    n: int = 0
    of: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.of["n"] = self.n


class Watched:
    def __init__(self):
        object.__setattr__(self, "changes", 0)
        self.first = 1

    def __setattr__(self, name, value):
        object.__setattr__(self, "changes", self.changes + 1)
        object.__setattr__(self, name, value)

    def __getattribute__(self, name):
        return 5 if name == "five" else object.__getattribute__(self, name)


RECORDING = Recording([1])
MISSING = Missing(a=1)
GUARDED = Guarded(3)
COUNTED = Counted(2)
WATCHED = Watched()
REGISTRY = {"box": Box(2, WEIGHT), "items": [1, 2], "deep": {"q": QUEUE, "t": [WEIGHT]}}
FACTORY = {1: Frozen(1), Frozen(2): 2}
""",
    expressions=rows(
        I="""
            len(QUEUE); QUEUE[0]; QUEUE.pop(); QUEUE.popleft(); len(GROUPS[<S>]); <Q>[-1]; len(<Q>);
            HOLDER.size; HOLDER.parts[-1]; REGISTRY['box'].count; REGISTRY['items'][-1]; TALLY[<S>];
            REGISTRY['box'].bump(<I>); heapq.heappop(HEAP); CHAIN['a']; CHAIN.get(<S>, <I>);
            MISSING[<S>]; len(RECORDING); RECORDING[-1]; GUARDED.value; COUNTED.n; COUNTED.of['n'];
            WATCHED.first; WATCHED.five; WATCHED.changes; Guarded.made; Frozen(<I>).size;
            bisect.bisect(<LI>, <I>); hash(Frozen(1)) - hash(Frozen(1)); FACTORY.get(Frozen(<I>),
            0);
            <Q>.index(<I>); getattr(GUARDED, '_value'); len(CHAIN); sum(QUEUE); max(TALLY.values());
            weakref.ref(<O>)().count; (Frozen(<I>) < Frozen(<I>)) + 1; Guarded(<I>).value;
            next(itertools.chain(<Q>, <LI>)); len(vars(WATCHED)); COUNTED.of.setdefault(<S>, <I>)
        """,
        Q="""
            QUEUE; collections.deque(<LI>); collections.deque(<LI>, 3); <Q>.copy();
            REGISTRY['deep']['q']
        """,
        LI="""
            list(<Q>); REGISTRY['items']; HOLDER.parts; HEAP; sorted(TALLY.values()); RECORDING;
            list(itertools.islice(<LI>, 2)); GROUPS[<S>]; list(MISSING.values());
            heapq.nsmallest(2, <LI>); list(itertools.accumulate(<LI>)); Recording(<LI>)
        """,
        D="REGISTRY['deep'].copy(); dict(MISSING); MISSING; TALLY; COUNTED.of; dict(CHAIN)",
        O="REGISTRY['box']; copy.copy(<O>); Box(<I>, REGISTRY['deep']['t'][0])",
        T="REGISTRY['deep']['t'][0]; REGISTRY['box'].w; sum(REGISTRY['deep']['t']) + <T>",
        B="<I> in <Q>; <S> in SEEN; <S> in GROUPS; <S> in CHAIN; Frozen(1) in FACTORY; <I> in HEAP",
        S="repr(QUEUE); repr(HOLDER); repr(Frozen(<I>)); repr(COUNTED); str(TALLY); min(SEEN)",
    ),
    statements=words("""
        QUEUE.append(<I>); QUEUE.appendleft(<I>); QUEUE.rotate(<I>); <Q>.extend(<LI>); <Q>[0] = <I>;
        del <Q>[0]; QUEUE.clear(); <Q>.remove(<I>); <Q>.reverse(); GROUPS[<S>].append(<I>);
        GROUPS[<S>] += <LI>[:2]; SEEN.add(<S>); SEEN.discard(<S>); SEEN.update(<LS>);
        SEEN.remove(<S>);
        HOLDER.parts.append(<I>); HOLDER.size += <I>; HOLDER.parts = <LI>; HOLDER.late = <T>;
        REGISTRY['box'].count += <I>; REGISTRY['items'].append(<I>); REGISTRY[<S>] = <O>;
        REGISTRY['deep']['t'].append(<T>); REGISTRY['deep']['t'][0] = <T>; REGISTRY.pop(<S>);
        REGISTRY['deep']['t'][0].add_(1); REGISTRY['box'].w = <T>; heapq.heappush(HEAP, <I>);
        CHAIN[<S>] = <I>; CHAIN.maps[0].clear(); del CHAIN['z']; TALLY.update(<S>); TALLY[<S>] -=
        <I>;
        RECORDING.append(<I>); RECORDING.extend(<LI>[:2]); MISSING.pop(<S>, None); MISSING[<S>] =
        <I>;
        GUARDED.value = <I>; GUARDED.value += <I>; del GUARDED.value; GUARDED._value = <T>;
        GUARDED.other = <I>; COUNTED.n += 1; COUNTED.of[<S>] = <I>; WATCHED.first = <I>;
        WATCHED.second = <T>; del WATCHED.first; Box.total = <I>; Guarded.made = <I>; Box.late =
        <I>;
        Frozen(1).size = 2; FACTORY[Frozen(<I>)] = <I>; HEAP.sort(reverse=True); QUEUE.insert(1,
        <I>);
        log.append(<Q>); log.append(GUARDED); log.append(copy.copy(HOLDER)); log.append(WATCHED);
        HEAP[:] = <LI>; TABLE.update(TALLY); type(<O>).total += 1; QUEUE.extend(QUEUE.copy());
        log.append(types.SimpleNamespace(a=<I>, b=<T>)); GROUPS.default_factory = None; del
        Box.late;
        REGISTRY['deep']['self'] = REGISTRY; setattr(Box, 'total', <I>); HOLDER.__dict__.clear()
    """),
    blocks=blocks("""
        for {0:I} in <Q>:
            ...

        for {0:S}, {1} in sorted(GROUPS.items()):
            ...

        for {0:I}, {1:I} in itertools.product(<LI>[:2], <LI>[:2]):
            ...

        {0} = Guarded(<I>)
        {0}.value = <I>
        {0}.value = <T>
        log.append({0})

        while QUEUE:
            {0:I} = QUEUE.popleft()
            ...
            if {0} > 1: break
    """),
    state={"Q": ["QUEUE"], "LI": ["HEAP", "RECORDING"], "R": ["HOLDER"], "SL": []},
    parameters=[
        ("queue", "Q", ["collections.deque([1, 2])", "collections.deque([3], 2)", "QUEUE"]),
        ("holder", "R", ["Record(2, [1])", "HOLDER", "Record(2, items)"]),
    ],
    changes=words("""
        QUEUE.append(9); GROUPS['a'].append(1); SEEN.add('zz'); HOLDER.size = 8; Box.total = 3;
        GUARDED.value = 6; COUNTED.n = 5; WATCHED.first = 4; TALLY['a'] = 9; MISSING['q'] = 7;
        REGISTRY['box'] = Sub(3, WEIGHT); REGISTRY['items'] = [9]; HEAP.clear(); RECORDING.clear();
        Box.bump = lambda self, by=1: by; Sub.extra = 4; Box.scaled = lambda self, x: x - self.w
    """),
)

GENERATORS = Theme(
    preamble="""
import itertools


def echo(k):
    got = k
    for _ in range(4):
        try:
            got = yield got
            log.append(("got", got))
        except ValueError as error:
            log.append(("caught", str(error)))
            got = -1


def careful(k):
    try:
        with Manager("gen"):
            yield k
            yield k + 1
    except KeyError:
        yield -5
    finally:
        log.append("careful")


def tensors(t):
    for i in range(3):
        t = t * 2
        received = yield t
        if received is not None:
            t = t + received
    return t


def chained(k):
    a = yield from careful(k)
    b = yield from (i * 2 for i in range(k % 3))
    c = yield from echo(k) if k % 2 else iter([k])
    return a, b, c


def stubborn(k):
    try:
        yield k
    except GeneratorExit:
        log.append("asked to go")
        raise
    except BaseException as error:
        log.append(type(error).__name__)
        yield 99


def running(k):
    total = 0
    for _ in range(4):
        total += yield total


class Counter:
    def __init__(self, k):
        self.k = k

    def __iter__(self):
        return self

    def __next__(self):
        self.k -= 1
        if self.k < 0:
            raise StopIteration
        return self.k


RUNNING = echo(5)
next(RUNNING)
STEPS = stepping(4)
""",
    expressions=rows(
        GS="""
            echo(<I>); careful(<I>); chained(<I>); stubborn(<I>); running(<I>); RUNNING;
            stepping(<I>)
        """,
        GT="tensors(<T>); (t * <F> for t in <LT>); map(torch.sin, <LT>); (<T> + i for i in <LI>)",
        I="""
            next(<GS>); next(<GS>, -1); <GS>.send(None); sum(itertools.islice(<G>, 3));
            next(Counter(<I>)); sum(Counter(<I> % 5)); next(STEPS, 0); RUNNING.send(<I>);
            len(list(itertools.takewhile(lambda i: i < 3, <G>))); next(iter(Counter(2)));
            sum(a * b for a, b in zip(<G>, <G>)); max(<G>, default=0); next((i for i in <LI> if i >
            1), 0);
            RUNNING.throw(ValueError('thrown')); functools.reduce(lambda a, b: a + b, <G>, 0)
        """,
        T="""
            next(<GT>); sum(<GT>) + <T>; torch.stack(list(<GT>)).sum(0); functools.reduce(torch.add,
            <GT>, <T>); next(<GT>, <T>); max((t.sum() for t in <LT>)) + <T>
        """,
        G="Counter(<I> % 4); careful(<I>); chained(<I>); itertools.chain(<G>, <LI>); STEPS",
        LI="""
            [*careful(<I>)]; list(itertools.islice(<GS>, 2)); [*Counter(<I> % 4)]; [x for x in <G>]
        """,
        LT="list(<GT>); [*<GT>]",
        B="<I> in <G>; any(i > 1 for i in <G>); <GS> is <GS>; <GS>.gi_frame is None",
    ),
    statements=words("""
        next(<GS>); <GS>.send(<I>); <GS>.send(None); <GS>.throw(ValueError('in')); <GS>.close();
        <GS>.throw(KeyError('k')); RUNNING.send(<I>); RUNNING.close(); log.append(next(<GS>, None));
        log.append(next(<GT>)); log.append(<GT>); log.append(<GS>); next(STEPS); STEPS.close();
        next(tensors(<T>)).add_(1); a, *b = <G>; del <GS>; return <GS>; return <GT>;
        for v in <GS>: break; [*zip(<G>, <G>)]; <GT>.send(None); kept.extend(list(<G>)[:3]);
        log.append([*<GT>])
    """),
    blocks=blocks("""
        {0} = echo(<I>)
        next({0})
        for {1:I} in range(3):
            log.append({0}.send({1}))
            ...
        {0}.close()

        {0:GS} = <GS>
        try:
            next({0})
            ...
            {0}.throw(Odd(<I>))
        except (ValueError, StopIteration) as {1}:
            log.append(repr({1}))

        {0} = tensors(<T>)
        {1:T!} = next({0})
        ...
        try:
            {2:T!} = {0}.send(<T>)
        except StopIteration as {3}:
            log.append({3}.value)

        def {0}({1:I}):
            {2} = yield {1}
            try:
                yield {2}, <T>
                ...
            finally:
                log.append(<I>)
        {3:GS!} = {0}(<I>)
        next({3})
        log.append({3}.send(<I>))

        for {0:T} in <GT>:
            ...

        for {0:I} in <GS>:
            log.append({0})
            if {0} is None or {0} > 1: break
            ...

        def {0}({1:I}):
            if {1} > 0:
                yield {1}
                yield from {0}({1} - 1)
            ...
        log.append([*{0}(<I> % 4)])

        with contextlib.closing(<GS>) as {0}:
            log.append(next({0}))
            ...
    """),
    parameters=[("given", "GS", ["echo(2)", "stepping(3)", "careful(1)", "chained(3)"])],
    state={"GS": ["RUNNING"]},
)

NUMPY = Theme(
    preamble="""
import numpy as np

ARRAY = np.array([1.0, -2.0, 3.0, 0.5], dtype=np.float32)
GRID = np.arange(4.0).reshape(2, 2)
""",
    expressions=rows(
        N="""
            np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32); ARRAY; <N> + <N>; <N> * <F>; <N> -
            <I>;
            <T>.detach().numpy(); <T>.numpy(); np.where(<N> > 0, <N>, <N>); <N>[::-1]; <N>.copy();
            np.cumsum(<N>); np.abs(<N>); np.concatenate([<N>[:2], <N>[2:]]); <N>.astype(np.float64);
            np.zeros(4); np.ones(4, dtype=np.float32); np.maximum(<N>, <N>); <N>.reshape(2,
            2).T.reshape(4);
            np.array(<LI>[:4]); np.full(4, <I>); np.asarray(<T>); -<N>; <N>.clip(0, <I>);
            np.sort(<N>);
            np.stack([<N>, <N>]).sum(0); <N> / <N>; <N> // 2; <N>.astype(int); <N> @ np.eye(4);
            np.array(<T>); <N> > <N>; np.arange(4); np.linspace(0, 1, 4); np.add(<N>, <N>); <N> *
            <T>;
            np.sqrt(<N>); <N>[:]; np.roll(<N>, <I>); GRID.reshape(-1); <N>.astype(np.int8); <N> ** 2
        """,
        T="""
            torch.from_numpy(<N>); torch.as_tensor(<N>); torch.tensor(<N>); <T> +
            torch.as_tensor(<N>);
            <T> * float(<N>[0]); torch.from_numpy(<N>).float(); torch.tensor(<N>.tolist());
            torch.from_numpy(<T>.detach().numpy()); <T> * <N>.sum(); <T> + <N>
        """,
        I="""
            int(<N>[0]); <N>.shape[0]; int(np.argmax(<N>)); <N>.ndim; len(<N>); int(<N>.sum());
            np.int64(<I>) + 1; <N>.size; <N>.itemsize; np.count_nonzero(<N>); <N>.astype(int)[<I>]
        """,
        F="""
            float(<N>.sum()); np.float64(<F>); <N>.mean(); <N>[<I>]; np.dot(<N>, <N>); np.max(<N>);
            np.float32(<F>) * <F>; <N>.item(0); <N>.std()
        """,
        B="""
            (<N> > 0).any(); np.array_equal(<N>, <N>); <N> is <N>; <N>.flags.writeable;
            np.allclose(<N>, <N>); <N>.dtype == np.float32; isinstance(<N>, np.ndarray); bool(<N>[0]
            > 0);
            np.shares_memory(<N>, <N>); np.isnan(<N>).any()
        """,
        S="str(<N>.dtype); type(<N>[0]).__name__; type(<F>).__name__; <N>.dtype.name",
        LI="<N>.astype(int).tolist(); [int(i) for i in <N>]; list(<N>.shape)",
    ),
    statements=words("""
        <N>[0] = <F>; <N>[:2] += 1; np.add(<N>, <N>, out=<N>); log.append(<N>); <N>.fill(<I>);
        <N>[<N> > 0] = 0; <N>.sort(); <N>[:] = <N>; <N> *= 2; ARRAY[<I>] = <I>; np.copyto(<N>, <N>);
        log.append(<N>.sum()); log.append(<N>[0]); <N>.resize(2, 2); <T>.numpy()[0] = <F>;
        torch.from_numpy(<N>).add_(1); <T>.copy_(torch.as_tensor(<N>)); <N>.shape = (2, 2);
        log.append(<N>.tolist()); np.negative(<N>, out=<N>); <N>.setflags(write=False);
        log.append(np.random.RandomState(0).rand(2)); assert <N>.all(); GRID[0] = <N>[:2]; <T>[:] =
        <F>
    """),
    blocks=blocks("""
        for {0} in <N>:
            log.append({0} * 2)
            ...

        with np.errstate(all='ignore'):
            {0:N!} = <N> / <N>
            ...

        {0:N!} = <T>.detach().numpy()
        {0}[1:] *= 2
        ...
    """),
    parameters=[
        (
            "arr",
            "N",
            [
                "np.arange(4.0)",
                "np.ones(4, np.float32)",
                "ARRAY",
                "ARRAY[::-1]",
                "np.arange(4)",
                "np.ones((4, 2))[:, 0]",
                "x.detach().numpy()",
            ],
        )
    ],
    state={"N": ["ARRAY"]},
    changes=["ARRAY[0] = 9", "GRID[1, 1] = 7"],
)

LOGGING = Theme(
    preamble="""
import logging
import warnings


class Keeping(logging.Handler):
    def emit(self, record):
        log.append((record.levelname, record.getMessage(), record.funcName, COUNT))


class Named(logging.LoggerAdapter):
    def process(self, msg, kwargs):
        return f"[{self.extra['who']}] {msg}", kwargs


logger = logging.getLogger("fuzzed")
logger.handlers[:] = [Keeping()]
logger.setLevel(0)
logger.disabled = logger.propagate = False
quiet = logging.getLogger("fuzzed.quiet")
adapted = Named(logger, {"who": "me"})


def shown(message, category, filename, lineno, file=None, line=None):
    log.append(("warned", category.__name__, str(message), COUNT))


def warn_about(k):
    warnings.warn(f"about {k}", RuntimeWarning, stacklevel=2)
    return k
""",
    expressions=rows(
        I="warn_about(<I>); logger.level // 10; len(log) % 7; logger.getEffectiveLevel()",
        B="logger.isEnabledFor(logging.INFO); logger.disabled; quiet.isEnabledFor(20)",
        S="logger.name; logging.getLevelName(20); logging.getLevelName(logger.level)",
    ),
    statements=words("""
        logger.info('v %s', <I>); logger.warning(<S>); logger.debug('d %r', <LI>); print(<I>);
        logger.error('t %s', <T>.shape); logger.setLevel(logging.INFO); logger.setLevel(10);
        warnings.warn(<S>); warnings.warn('w', DeprecationWarning); warn_about(<I>); print(<T>);
        print(<S>, <I>, sep='-', end='|'); logger.log(30, 'l'); adapted.info('v %s', <I>);
        logger.info('sum %s', <T>.sum()); print(<LI>, <B>); logger.info('%d of %d', <I>);
        logger.warning('t %s', <T>); quiet.info('unseen'); print(f'{<T>}'); print(log[-1:]);
        logger.disabled = <B>; warnings.warn(UserWarning(<S>)); print(<O>.count, <T>.sum().item())
    """),
    blocks=blocks("""
        with warnings.catch_warnings(record=True) as {0}:
            warnings.simplefilter('always')
            ...
            warnings.warn(<S>)
            ...
        log.append([str({1}.message) for {1} in {0} if str({1}.message) in 'abzzz'])

        with warnings.catch_warnings():
            warnings.simplefilter('error')
            warn_about(<I>)
            ...

        with warnings.catch_warnings():
            warnings.simplefilter('always')
            warnings.showwarning = shown
            warn_about(<I>)
            <=T> = <T>
            warn_about(<I>)

        try:
            ...
            raise Odd(<I>)
        except Odd:
            logger.exception('failed')
            ...

        with contextlib.redirect_stdout(io.StringIO()) as {0}:
            print(<I>)
            ...
        log.append({0}.getvalue())
    """),
    changes=["logger.setLevel(40)", "logger.setLevel(10)", "logger.disabled = True"],
)

ARGUMENTS = Theme(
    expressions=rows(
        I="many_ints[0]; size[0]; sum(size); options['k']; options['k'] + n; len(word); num + 1",
        F="factor; factor * n; num; abs(factor); factor ** 2; round(factor, 1); options['f']",
        S="word; word + str(n); word.strip(); f'{factor}{num}'; dtype.__str__(); word[:n]",
        B="""
            maybe is None; not word; factor > 1; n > 2; num == n; word == 'a'; options['b']; 'k' in
            options
        """,
        T="""
            x * factor; x + n * num; torch.full((4,), num); x.to(dtype).float(); x * options['k'];
            (x if maybe is None else x * maybe); torch.ones(size).sum() + x; <T> * num; <T> +
            factor;
            <T>.reshape(size).reshape(4); torch.arange(n % 9 + 3)[:4] * <F>; <T>[:n].sum() + <T>;
            torch.zeros(4, dtype=dtype); <T>.roll(n); <T> ** num; torch.clamp(<T>, max=factor);
            F.pad(<T>[:2], (n % 3, 2)).sum() + <T>; <T>[n:].sum() * <T>; x.expand(n % 9, 4).sum(0)
        """,
        LI="[n] * (n % 4); list(range(n)); list(size); many_ints[:n]; many_ints[1:]",
    ),
    statements=words("""
        log.append((n, factor, word, num)); options['k'] += 1; log.append(x * n); n += 1; num = num
        + 1;
        maybe = n; log.append(x.to(dtype)); options[word] = num; word += 'b'; factor *= 2;
        log.append(torch.full((n % 9,), num)); log.append(x[:n] * factor); x *= factor
    """),
    parameters=[
        (
            "factor",
            "F",
            ["0.5", "2.0", "-1.0", "1", "float('nan')", "float('inf')", "1e30", "-0.0"],
        ),
        ("word", "S", ["'a'", "''", "'fuzz'", "'zz'", "'1'"]),
        ("size", "P", ["(4,)", "(2, 2)", "(1, 4)", "(0, 3)", "torch.Size([4])"]),
        ("maybe", "O", ["None", "2", "Box(1, x)", "torch.tensor(3.0)"]),
        ("num", "I", ["1", "2.5", "True", "0", "-3", "2 ** 40", "torch.tensor(2)", "5"]),
        ("dtype", "S", ["torch.float32", "torch.float64", "torch.int64", "torch.bool"]),
        ("many_ints", "LI", ["(1, 2, 3)", "[4, 5, 6, 7]", "range(3)", "[1.5, 2.5]"]),
        (
            "options",
            "D",
            ["{'k': 1, 'f': 0.5, 'b': True}", "{'b': False, 'k': 2.0, 'f': 1}", "{'k': 3}"],
        ),
    ],
)

METADATA = Theme(
    expressions=rows(
        T="""
            <T>.as_strided((4,), (1,)); <T>.as_strided((2, 2), (1, 1)).reshape(4); <T>.expand(2,
            4)[0];
            <T>.unsqueeze(0).squeeze(0); <V>.diagonal().repeat(2); <V>.T.reshape(-1);
            <T>.chunk(2)[0].repeat(2);
            <T>.view(torch.int32).view(torch.float32); <T>.unbind()[0] + <T>; <T>[None, :].t()[:,
            0];
            <V>.flatten(); <T>.view_as(<T>); <T>.narrow(0, 1, 2).repeat(2); <T>.unfold(0, 2, 1)[:,
            0].sum() + <T>;
            <V>[0].repeat(2); <T>.data; <T>.movedim(0, -1); torch.atleast_2d(<T>)[0];
            <T>.as_strided((4,), (0,));
            <V>.permute(1, 0).contiguous().view(4); <T>[torch.arange(4)]; <T>.select(0, 1) * <T>;
            OVERLAP[:4]; OVERLAP[1:5]; OVERLAP[::2][:4]; <T>.detach().clone();
            <V>.t().clone().reshape(4)
        """,
        V="""
            <V>.mT; <V>[:, [1, 0]]; <T>.as_strided((2, 2), (1, 2)); <V>.swapaxes(0, 1);
            OVERLAP[:4].view(2, 2)
        """,
        I="""
            <T>.stride()[0]; <T>.storage_offset(); <V>.stride(0); <T>.numel(); <T>._version * 0;
            <V>.size(1); <T>.untyped_storage().nbytes(); <T>.element_size(); <T>.ndim; <T>.dim()
        """,
        B="""
            <T>.is_contiguous(); <V>.T.is_contiguous(); <T>._is_view();
            (lambda a, b: a.data_ptr() == b.data_ptr())(<T>, <T>);
            <T>._base is <T>; <T>.is_set_to(<T>); <T>.stride() == <T>.stride()
        """,
    ),
    statements=words("""
        <T>.unsqueeze_(0); <T>.squeeze_(); <V>.t_(); <V>.transpose_(0, 1); <T>.resize_(2, 2);
        <T>.resize_(6).fill_(<I>);
        <T>.resize_(<I> % 6).fill_(<I>); <T>.set_(<T>); <T>.as_strided_((2,), (1,));
        <T>.data = <T>; <V>.data = <V>;
        <T>.requires_grad_(<B>); <T>.detach_(); <T>.resize_as_(<T>); <T>.unsqueeze_(-1).add_(1);
        <V>.swapaxes_(0, 1); <T>.data.mul_(2); <T>.data[0] = <F>; <V>.diagonal().fill_(<F>);
        <T>[1:].add_(<T>[:-1]); <T>.expand(2, 4).add_(1); <T>.as_strided((2, 2), (1, 1)).add_(1);
        <T>.copy_(<V>.reshape(-1)); OVERLAP[:4].mul_(2); OVERLAP[2:].copy_(OVERLAP[:-2]);
        <T>.squeeze_(0);
        <T>.view(2, 2).t_(); <T>.grad = None; <T>.set_(); log.append(<T>.stride());
        log.append(<V>.stride());
        <T>.untyped_storage().resize_(64); <T>[:2].zero_(); <T>.swap_dims_(0, 0);
        <T>.as_strided_((4,), (1,));
        <T>.requires_grad = <B>; <V>.squeeze_(0).unsqueeze_(0); <T>.data = <T>[:2]; <T>.resize_(4)
    """),
    blocks=blocks("""
        {0:T!} = <T>[:]
        <=T>.add_(1)
        {0}.mul_(2)
        ...

        {0:V!} = <T>.view(2, 2)
        {0}.t_()
        {0}[0].add_(<I>)
        ...

        {0:T!} = <T>.clone()
        {0}.unsqueeze_(0)
        ...
        {0}.squeeze_(0)

        for {0:T} in <T>.view(2, 2).unbind():
            {0}.mul_(<F>)
    """),
    preamble="""
OVERLAP = torch.arange(8.0)
""",
    parameters=[
        (
            "z",
            "T",
            [
                "OVERLAP[:4]",
                "OVERLAP[2:6]",
                "x",
                "y[:]",
                "torch.ones(1, 4)[0]",
                "x.view(2, 2).T.reshape(4)",
            ],
        ),
        (
            "u",
            "T",
            [
                "OVERLAP[1:5]",
                "OVERLAP[::2]",
                "torch.ones(1).expand(4)",
                "z",
                "x.as_strided((4,), (1,))",
            ],
        ),
        (
            "grid",
            "V",
            [
                "torch.ones(2, 2)",
                "x.view(2, 2)",
                "torch.arange(4.0).view(2, 2).t()",
                "OVERLAP.view(4, 2)[:2]",
            ],
        ),
    ],
    state={"T": ["OVERLAP[:4]"]},
    changes=["OVERLAP.add_(1)", "WEIGHT.unsqueeze_(0).squeeze_(0)", "OVERLAP = torch.ones(8)"],
)

RECURRENCES = Theme(
    expressions=rows(
        T="""
            functools.reduce(lambda a, b: a * 0.5 + b, <LT>, <T>); rolled(<T>, <I> % 9);
            nested(<T>, <I> % 6); unrolled(<T>); torch.tanh(<T>) * 0.5 + <T> * 0.5
        """,
        I="fib(<I> % 7); collatz(<I> % 12); depth(<LI>)",
    ),
    preamble="""
def rolled(x, k):
    y = x
    for _ in range(k):
        y = y + 0.1 * torch.sin(y)
    return y


def nested(x, k):
    return x if k <= 0 else nested(x * 0.5 + 1, k - 1) + x


def unrolled(x):
    states = [x]
    while len(states) < 8:
        states.append(states[-1] * 0.5 + states[0])
    return sum(states)


def fib(k):
    return k if k < 2 else fib(k - 1) + fib(k - 2)


def collatz(k):
    steps = 0
    while k > 1:
        k = k // 2 if k % 2 == 0 else 3 * k + 1
        steps += 1
    return steps


def depth(items):
    return 0 if not items else 1 + depth(items[1:])
""",
    blocks=blocks("""
        {0:T!} = <T>
        for {1:I} in range(12):
            {0} = {0} * 0.5 + <T>

        {0:T!} = <T>
        {1:T!} = <T>
        for {2} in range(9):
            {0}, {1} = {1}, {0} + {1} * 0.25
        ...

        {0:LT!} = []
        for {1:I} in range(6):
            {0}.append(<T> + {1})
            ...

        {0} = 0
        while {0} < 10:
            {0} += 1
            <=T> = <T> * 0.5
            if <I> > 5 + {0}: break

        {0:T!} = <T>
        for {1:I} in range(7):
            {0} = torch.tanh({0}) * <F>
            if {0}.sum() > <I>:
                break
            ...

        def {0}({1}, {2}):
            return {2} if {1} <= 0 else {0}({1} - 1, {2} * 0.5 + 1)
        log.append({0}(<I> % 9, <T>))

        {0} = {{}}
        def {1}({2}):
            if {2} not in {0}:
                {0}[{2}] = {2} if {2} < 2 else {1}({2} - 1) + {1}({2} - 2)
            return {0}[{2}]
        log.append({1}(<I> % 12))

        for {0:I} in range(4):
            for {1:I} in range({0}):
                <=T> = <T> + {1}
    """),
)

TRAINING = Theme(
    preamble="""
from torch import nn

torch.manual_seed(3)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
NORM = nn.BatchNorm1d(2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.5)
LEAF = torch.tensor([1.0, 2.0, -1.0, 0.5], requires_grad=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -1.0, 2.0, 0.5]))
        self.register_buffer("seen", torch.zeros(()))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.calls = 0

    def forward(self, x, scale=1):
        self.calls += 1
        if self.training:
            self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return x * self.weight * scale


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0


def doubling(x):
    x.grad_fn  # or torch dies, if x is a view whose base was written to
    x.register_hook(lambda g: g * 2)


NET = Net()
HOOKED = []
""",
    expressions=rows(
        T="""
            MODEL(<T>); <NN>(<T>); NET(<T>); NET(<T>, scale=<I>); LEAF * <T>; NET.weight + <T>;
            LEAF;
            torch.autograd.grad(<T>.sum(), LEAF, allow_unused=True)[0]; Doubled.apply(<T>);
            torch.autograd.grad((LEAF * <T>).sum(), LEAF, create_graph=True)[0] * LEAF;
            NORM(<V>).reshape(4); F.mse_loss(<T>, <T>) + <T>; F.linear(<T>, MODEL[0].weight);
            <T>.detach(); (LEAF * LEAF * <T>); NET.layers[0](<T>); F.softmax(<T>, 0); F.relu(LEAF +
            <T>);
            LEAF.grad; <T>.detach().requires_grad_(); torch.utils.checkpoint.checkpoint(NET, <T>,
            use_reentrant=False); F.layer_norm(<T>, (4,)); <T>.norm() * LEAF; LEAF.clone()
        """,
        NN="MODEL; NET; MODEL[0]; NET.layers[1]; torch.nn.Identity()",
        I="NET.calls; len(MODEL); len(list(MODEL.parameters())); len(HOOKED)",
        B="NET.training; <T>.requires_grad; LEAF.grad is None; <T>.is_leaf; <T>.grad_fn is None",
        LT="list(NET.parameters()); [LEAF, <T>]; list(NET.buffers())",
    ),
    statements=words("""
        <T>.sum().backward(); (LEAF * <T>).sum().backward(); MODEL(<T>).sum().backward();
        OPTIMIZER.step();
        OPTIMIZER.zero_grad(); NET.train(<B>); NET.calls = 0; LEAF.grad = None; NET.eval();
        NET.zero_grad();
        NET.weight.requires_grad_(<B>); log.append(<T>.requires_grad); log.append(LEAF.grad);
        MODEL.eval();
        NET(<T>).pow(2).sum().backward(); LEAF.data.add_(1); LEAF.add_(1); <T>.retain_grad();
        <T>.backward(torch.ones(4)); <T>.mul_(LEAF); <T>[0] = LEAF[1]; doubling(<T>);
        (LEAF * <T>).sum().backward(retain_graph=True); torch.nn.utils.clip_grad_norm_([LEAF], 1.0);
        NET.layers.append(torch.nn.ReLU()); NET.extra = <I>; NET.weight.data.mul_(0.5);
        log.append(NET.seen);
        NET.register_forward_hook(lambda m, a, out: HOOKED.append(1)); del NET.extra
    """),
    managers=words("torch.no_grad(); torch.enable_grad(); torch.set_grad_enabled(<B>)"),
    blocks=blocks("""
        for {0} in range(3):
            OPTIMIZER.zero_grad()
            {1} = F.mse_loss(MODEL(<T>), <T>)
            {1}.backward()
            OPTIMIZER.step()
            log.append({1}.detach())

        {0:T!} = <T>.detach().clone().requires_grad_()
        ({0} * {0} * <T>).sum().backward()
        log.append({0}.grad)
        ...

        {0} = (LEAF ** 3 * <T>).sum()
        {1:T!}, = torch.autograd.grad({0}, LEAF, create_graph=True)
        {2}, = torch.autograd.grad({1}.sum(), LEAF, allow_unused=True)
        log.append({2})

        with torch.no_grad():
            NET.weight.sub_(0.1 * <T>)
            ...

        with torch.no_grad():
            {0:T} = NET(<T>)
            ...
        <=T> = NET(<T>)
    """),
    parameters=[("leaf", "T", ["torch.ones(4, requires_grad=True)", "LEAF", "LEAF * 2", "x"])],
    state={"T": ["LEAF"], "NN": ["NET", "MODEL"]},
    changes=[
        "NET.eval()",
        "NET.weight.requires_grad_(False)",
        "LEAF.grad = None",
        "NET.calls = 5",
        "NET.layers[1] = nn.Tanh()",
        "MODEL[0].weight.data.mul_(2)",
        "NET.extra = 1",
    ],
    around=["torch.no_grad()"],
)

RANDOMNESS = Theme(
    preamble="""
import random

GENERATOR = torch.Generator()
GENERATOR.manual_seed(5)
DICE = random.Random(1)
""",
    expressions=rows(
        T="""
            torch.rand(4); torch.randn_like(<T>); F.dropout(<T>, 0.5);
            torch.bernoulli(torch.full((4,), 0.5));
            torch.randperm(4) * <F>; torch.rand(4, generator=GENERATOR); <T>.clone().uniform_();
            torch.randn(4);
            torch.randint(0, 9, (4,)) * 1.0; torch.normal(<T>, 1.0); <T> * DICE.random();
            torch.rand_like(<T>);
            torch.multinomial(torch.ones(4), 4) * 1.0; F.dropout(<T>, 0.5, training=<B>); <T> *
            random.random();
            torch.normal(0.0, 1.0, (4,)); torch.empty(4).normal_(generator=GENERATOR);
            F.gumbel_softmax(<T>, dim=0)
        """,
        I="""
            DICE.randint(0, 3); random.randrange(4); torch.randint(0, 4, ()).item();
            torch.initial_seed() % 7;
            DICE.choice(<LI>); int(torch.rand(1).item() * 3)
        """,
        LI="DICE.sample([1, 2, 3], 2); torch.randperm(3).tolist(); random.sample(<LI>, len(<LI>))",
        B="torch.rand(()) > 0.5; DICE.random() > 0.5; bool(random.getrandbits(1))",
    ),
    statements=words("""
        torch.manual_seed(<I>); GENERATOR.manual_seed(3); <T>.uniform_(); <T>.normal_(0, 1);
        random.seed(1);
        DICE.shuffle(<LI>); log.append(torch.rand(2)); log.append(DICE.random());
        <T>.bernoulli_(0.5);
        log.append(torch.get_rng_state().sum()); torch.set_rng_state(torch.get_rng_state());
        DICE.seed(<I>);
        <T>.random_(0, 5); <T>.exponential_(); <T>.uniform_(generator=GENERATOR);
        random.shuffle(<LI>)
    """),
    managers=words("torch.random.fork_rng(); torch.random.fork_rng(), Manager('r')"),
    changes=["torch.manual_seed(11)", "GENERATOR.manual_seed(9)", "DICE.seed(4)", "random.seed(2)"],
)

EXCEPTIONS = Theme(
    preamble="""
class Failing:
    def __init__(self, when):
        self.when = when

    def __enter__(self):
        if self.when == 0:
            raise Odd("enter")
        return self

    def __exit__(self, kind, error, traceback):
        log.append(("left", kind and kind.__name__, str(error)))
        if self.when == 1:
            raise Odd("exit") from error
        return self.when == 2


class Base(Exception):
    code = 3

    def __str__(self):
        return f"base {self.code}"


class Derived(Base, KeyError):
    pass


def attempt(function, *args):
    try:
        return function(*args)
    except (ValueError, KeyError) as error:
        log.append(repr(error))
        return 0
    else:
        log.append("never")
    finally:
        log.append("attempted")


def swallowing(k):
    try:
        if k % 2:
            raise Derived(k)
    finally:
        return k


def lasting(k):
    for i in range(3):
        try:
            if i == k % 3:
                continue
            if i == 2:
                break
        finally:
            log.append(("last", i))
    return i
""",
    expressions=rows(
        I="""
            attempt(checked, <I>); attempt(<FN>, <I>); swallowing(<I>); lasting(<I>); attempt(int,
            <S>);
            Derived.code; len(str(<X>)); len(<X>.args); attempt(lambda: <LI>[9]); attempt(next,
            iter(()))
        """,
        X="""
            ValueError(<I>); Odd(<I>); Derived(<S>, <I>); KeyError(<S>); RuntimeError(<T>); Base();
            ExceptionGroup('g', [ValueError(<I>)])
        """,
        S="str(<X>); repr(<X>); type(<X>).__name__",
        T="attempt(torch.add, <T>, <T>); attempt(branching, <T>)",
        B="isinstance(<X>, KeyError); <X>.__cause__ is None; issubclass(Derived, Base)",
    ),
    statements=words("""
        raise <X>; raise <X> from None; raise <X> from <X>; log.append(<X>); attempt(checked, <I>);
        <X>.add_note('n'); swallowing(<I>); log.append(repr(<X>)); raise Derived; <T>.nothing; <T> +
        'a';
        torch.add(<T>); torch.cat([]); torch.ones(2) + torch.ones(3); <T>.view(3); <I> + <S>; <I>();
        {}[<S>];
        torch.ones(4).reshape(<I>, 3); (1).missing; None.attribute; raise StopIteration; raise
        NotImplementedError;
        int('x'); unknown_name; torch.stack([<T>, <T>[:2]]); <LI>[<S>]; raise <I>;
        log.append(sys.exc_info()[0])
    """),
    managers=words("""
        Failing(0); Failing(1); Failing(2); Failing(3); Failing(<I>);
        contextlib.suppress(Exception);
        contextlib.suppress(KeyError), Failing(1); Manager('w', swallow=True), Failing(1);
        Failing(2), Manager('i'); contextlib.closing(stepping(<I>))
    """),
    blocks=blocks("""
        try:
            ...
            raise Derived(<I>)
        except Base as {0:X}:
            log.append(({0}.code, {0}.args))
            ...
        except Exception:
            ...
            raise
        finally:
            ...

        try:
            try:
                ...
                raise <X>
            finally:
                log.append('inner')
                ...
        except Exception as {0}:
            log.append((repr({0}), repr({0}.__context__)))

        for {0:I} in range(3):
            try:
                ...
                if {0} == 1: break
            except Exception:
                continue
            finally:
                log.append({0})

        try:
            ...
        except RuntimeError as {0}:
            log.append(str({0}))
        else:
            ...

        try:
            with Failing(<I> % 4) as {0}:
                ...
        except Odd as {1}:
            log.append((str({1}), repr({1}.__cause__), repr({1}.__context__)))

        {0:I} = 0
        while True:
            {0} += 1
            try:
                if {0} > 3: break
                ...
                if {0} == 2: raise <X>
            except Exception as {1}:
                log.append(type({1}).__name__)

        try:
            raise <X>
        except Exception as {0}:
            try:
                raise <X>
            except Exception as {1}:
                log.append(repr({1}.__context__))
            log.append(sys.exc_info()[1] is {0})

        def {0}():
            try:
                ...
                return <I>
            finally:
                log.append('returned')
                ...
        log.append({0}())

        try:
            {0}
        except NameError as {1}:
            log.append({1}.name)
    """),
)

SCOPES = Theme(
    preamble="""
class Registered:
    known = []

    def __init_subclass__(cls, tag="none", **kwargs):
        super().__init_subclass__(**kwargs)
        log.append(("registered", cls.__name__, tag))


class Meta(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        log.append(("made", cls.__name__))
        return made


class Made(metaclass=Meta):
    def __init__(self, k=0):
        self.k = k


class Positive:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name, 0)

    def __set__(self, obj, value):
        if value < 0:
            raise ValueError(f"{self.name} {value}")
        setattr(obj, self.name, value)


class Described:
    size = Positive()

    def __init__(self, k):
        self.size = k

    @functools.cached_property
    def cached(self):
        log.append("cached")
        return self.size * 2

    @functools.singledispatchmethod
    def kind(self, arg):
        return "other"

    @kind.register
    def _(self, arg: int):
        return "int"


def maker(k):
    count = k

    def more(by=1):
        nonlocal count
        count += by
        return count

    def told():
        return count

    return more, told


MORE, TOLD = maker(3)
DESCRIBED = Described(2)


@functools.lru_cache(maxsize=None)
def cached(k):
    log.append(("computed", k))
    return k * 2


def variadic(a, /, b=2, *args, c=3, **kwargs):
    return (a, b, args, c, sorted(kwargs))


def defaulted(k, into=[]):
    into.append(k)
    return len(into)
""",
    expressions=rows(
        I="""
            MORE(<I>); TOLD(); Made(<I>).k; Described(<I>).size; DESCRIBED.size; DESCRIBED.cached;
            cached(<I>);
            defaulted(<I>); len(variadic(<I>, *<LI>)); variadic(<I>, c=<I>)[3]; [lambda: i for i in
            <LI>][0]();
            sum([(lambda j: j + each)(1) for each in <LI>]); [y for y in [1, 2]][0];
            len({j: [i for i in range(j % 4)] for j in <LI>});
            (lambda f: f(f, <I> % 6))(lambda f, k: 1 if k < 1 else k * f(f, k - 1));
            maker(<I>)[0](2);
            (lambda *, k=<I>: k)(); [f() for f in [lambda i=i: i for i in <LI>]][-1]; type('Anew',
            (), {'k': <I>}).k;
            operator.itemgetter(0)(<LI>); operator.attrgetter('count')(<O>);
            operator.methodcaller('bump')(<O>)
        """,
        S="""
            DESCRIBED.kind(<I>); DESCRIBED.kind(<S>); maker.__name__; str(variadic(<I>, <I>, z=<I>))
        """,
        LI="[i + j for i in <LI>[:2] for j in <LI>[:2]]; [*{i for i in <LI>}]",
        D="{k: v for k, v in zip(<LS>, <LI>)}; {str(i): i for i in <LI>}",
        FN="""
            MORE; cached; defaulted; (lambda a: (lambda b: a + b)(<I>)); maker(<I>)[0];
            functools.partial(defaulted)
        """,
        T="(lambda t: t + t)(<T>); [t * 2 for t in <LT>][0]; (lambda: <T> * 2)()",
        LT="[t for t in <LT> for _ in range(2)][:3]; [(lambda: t)() for t in <LT>]",
    ),
    statements=words("""
        MORE(<I>); DESCRIBED.size = <I>; Registered.known.append(<I>); cached.cache_clear(); del x;
        global_late = <I>;
        log.append(variadic(<I>, *<LI>, k=<I>)); defaulted(<I>); log.append(cached(<I>)); maker.k =
        <I>;
        log.append([f() for f in [lambda: i for i in <LI>[:3]]]); del DESCRIBED._size;
        log.append(sorted(locals())[:2]);
        a = b = <LI>; a.append(1); (a, (b, *c)) = <I>, <LI>; a[0], a = <I>, <LI>; variadic();
        variadic(b=1);
        assert (w := <I>) is not None; log.append([i for i in <LI> if (h := i) > 1]);
        log.append((max([(last := i) for i in <LI>]), last)); log.append(<FN>.__name__); exec('n +
        1'); log.append(vars(<O>).get('count'))
    """),
    blocks=blocks("""
        class {0}(Registered, tag='t'):
            value = <I>
            def get(self):
                return self.value + <I>
        log.append({0}().get())

        class {0}(Box):
            def __init__(self, k):
                super().__init__(k, <T>)
                self.k = k
            @property
            def twice(self):
                return self.k * 2
            def bump(self, by=1):
                return super().bump(by) + self.k
        {1:O!} = {0}(<I>)
        log.append(({1}.twice, {1}.bump()))

        @dataclasses.dataclass
        class {0}:
            a: int = <I>
            b: list = dataclasses.field(default_factory=list)
        {1:R} = {0}()
        {1}.b.append(<I>)
        log.append({1}.b)

        {0} = <I>
        def {1}({2:I}=<I>):
            nonlocal {0}
            {0} += {2}
            ...
            return {0}
        log.append(({1}(), {1}(2), {0}))

        def {0}({1:I}, *{2}, k=<I>, **{3}):
            def {4}({5:I}):
                ...
                return {1} + {5} + k
            return {4}
        log.append({0}(<I>, 1, k=2)(<I>))

        {0} = []
        for {1} in range(3):
            def {2}(k={1}):
                return k + {1}
            {0}.append({2})
        log.append([f() for f in {0}])

        @twice
        def {0}({1:I}):
            ...
            return <I>
        log.append({0}(<I>))

        {0} = collections.namedtuple('Made', 'a b')(<I>, <T>)
        {1:I!}, {2:T!} = {0}
        log.append({0}._asdict()['a'])
    """),
    changes=[
        "MORE(4)",
        "cached.cache_clear()",
        "maker.__defaults__ = None",
        "DESCRIBED.size = 9",
        "variadic.__kwdefaults__ = {'c': 7}",
        "noted.__kwdefaults__ = {'scale': 3}",
        "globals().update(opaque=lambda k: 2)",
        "globals().update(SCALE=2.5, COUNT=7)",
    ],
)

SIZES = Theme(
    expressions=rows(
        W="""
            wide; longer; <W> * <F>; <W> + <W>; <W>[1:]; <W>[:<I> % 4]; <W>.relu(); <W>.softmax(0);
            torch.cat([<W>, <W>]); <W>.cumsum(0); <W>.flip(0); <W>.clone(); <W>[::2]; <W>.add_(1);
            <W> + torch.ones(<W>.shape[0], 1); <W>.t().t(); torch.zeros_like(<W>);
            <W>.reshape(-1, 3); <W>.view(<W>.shape); torch.zeros(len(<W>), 3); <W>.roll(1, 0);
            <W> @ torch.eye(3); torch.where(<W> > 0, <W>, 0.0); <W>.new_zeros(<W>.size(0), 3);
            F.pad(<W>, (0, 0, 1, 0)); torch.stack(list(<W>)); <W>.sort(0).values; <W>.repeat(2, 1);
            F.layer_norm(<W>, (3,)); torch.arange(<W>.shape[0])[:, None] * <W>; <W>.detach();
            <W>.narrow(0, 0, <W>.shape[0] // 2); <W>.expand(<W>.shape[0], 3); <W>.tril();
            <W>.unsqueeze(0).squeeze(0); <W>.split(<I> % 4 + 1)[0]; <W>.unflatten(0, (-1, 2))[:, 0];
            torch.add(<W>, 1, out=<W>); <W>.t().contiguous().t(); <W>.index_select(0,
            torch.arange(<W>.shape[0] - 1)); F.conv1d(<W>.t(), torch.ones(3, 3, 2)).t()
        """,
        T="""
            <W>.sum() + <T>; <W>.mean() * <T>; <W>.sum(1)[:1] + <T>; F.pad(<W>.sum(0), (0, 1));
            <W>.max() - <T>; <W>.reshape(-1)[:4] + 0; <T> * <W>.shape[0]; <T> + len(<W>);
            <W>.std() + <T>; <W>[<I>].sum() + <T>; <T> / <W>.shape[0]; (<W> @ <W>.t())[0, 0] * <T>
        """,
        I="""
            <W>.shape[0]; len(<W>); <W>.numel(); <W>.size(0) // 2; <W>.shape[0] * 2 - 1;
            <W>.stride(0); max(<W>.shape); <W>.shape.numel() % 5; [*<W>.shape][-1]; <W>.dim();
            math.ceil(<W>.shape[0] / 2); hash(<W>.shape[0]); <W>.nbytes; <W>.shape[<I>];
            int(str(<W>.shape[0])); sum(<W>.shape)
        """,
        F="<W>.shape[0] / 2; math.sqrt(<W>.shape[0]); <W>.shape[0] ** 0.5; float(len(<W>))",
        B="""
            <W>.shape[0] > 3; <W>.shape == <W>.shape; len(<W>) in <LI>; <W>.shape[0] % 2 == 0;
            <W>.is_contiguous(); not <W>.shape[0] - 2; <W>.shape[0] is <W>.shape[0] + 0;
            isinstance(<W>.shape[0], int); <W>.shape[0] in <D>
        """,
        S="str(<W>.shape); f'{<I>} of {<LI>}'; str(len(<W>)); repr([<W>.shape[0]])",
        LI="""
            list(<W>.shape); [<W>.shape[0], <I>]; list(range(<W>.shape[0])); [len(r) for r in <W>];
            sorted(<W>.shape)
        """,
        D="{'a': <W>.shape[0]}; {<S>: len(<W>)}; dict(zip('ab', <W>.shape))",
        SE="{<W>.shape[0]}; set(<W>.shape)",
    ),
    statements=words("""
        log.append(<W>.shape); log.append(<W>); <W>.mul_(2); <W>[0] = 1.0; <W>[1:].zero_();
        <W>[<W>.shape[0] - 1] += 1; log.append((len(<W>), <W>.shape)); <W>[:, 0] = <W>.shape[0];
        box.extra = <W>.shape[0]; table['s'] = len(<W>); wide = <W>; log.append({<W>.shape[0]: 1});
        assert <W>.shape[0] > 1, <S>; kept.append(<W>.shape[0]); raise ValueError(<W>.shape);
        wide = torch.cat([wide, <W>]); longer = longer[1:]; <W>.t_().t_(); <W>.resize_(<I> % 5, 3)
    """),
    blocks=blocks("""
        for {0:I} in range(<W>.shape[0]):
            ...

        for {0} in <W>:
            log.append({0}.sum())
            ...

        {0:W!} = <W>
        while {0}.shape[0] > 2:
            {0} = {0}[1:]
            ...

        {0:I!}, {1:I!} = <W>.shape
    """),
    parameters=[
        ("wide", "W", [f"torch.arange({3 * n}.0).reshape({n}, 3) - 4" for n in (2, 4, 5, 7, 1, 0)]),
        ("longer", "W", ["torch.ones(3, 3)", "torch.ones(6, 3)", "torch.ones(3, 8).t()", "WIDE"]),
    ],
    preamble="""
WIDE = torch.ones(4, 3)
""",
    state={"W": ["WIDE"]},
    changes=["WIDE = torch.ones(6, 3)", "WIDE = torch.zeros(3, 3)", "WIDE.resize_(2, 3)"],
)

THEMES: dict[str, Theme] = {
    "values": VALUES,
    "modes": MODES,
    "out": OUT,
    "outside": OUTSIDE,
    "generators": GENERATORS,
    "numpy": NUMPY,
    "logging": LOGGING,
    "arguments": ARGUMENTS,
    "metadata": METADATA,
    "recurrences": RECURRENCES,
    "training": TRAINING,
    "randomness": RANDOMNESS,
    "exceptions": EXCEPTIONS,
    "scopes": SCOPES,
    "sizes": SIZES,
}
