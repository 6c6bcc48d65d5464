"""Calls that Python or torch make a story of, and capture takes as one: autograd functions,
checkpoints, patterns, deep copies, warnings, logs.
"""

# Programs under test: mistakes are meant, and so are other ways to say a thing.
# mypy: ignore-errors

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusee
from tests.capturing.same import Traced, same

T = Any
X = torch.arange(6.0).reshape(2, 3) - 2
SCALE = 2.0
SEEN: list[Any] = []

# ------------------------------------------------------------------------------ autograd functions


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: T, x: T, power: int) -> T:
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx: T, grad: T) -> T:
        (x,) = ctx.saved_tensors
        return ctx.power * x ** (ctx.power - 1) * grad * SCALE, None


class Two(torch.autograd.Function):
    @staticmethod
    def forward(x: T) -> T:
        return x * SCALE, x + 1

    @staticmethod
    def setup_context(ctx: T, inputs: T, output: T) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: T, grad: T, other: T) -> T:
        return grad * SCALE


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: T, x: T) -> T:
        return x + 1

    @staticmethod
    def backward(ctx: T, grad: T) -> T:
        raise NotImplementedError("no way back")


class Telling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: T, x: T) -> T:
        SEEN.append(x.shape)
        return x + 1

    @staticmethod
    def backward(ctx: T, grad: T) -> T:
        return grad


class ByItsRule(torch.autograd.Function):
    """Twice x; `rule` gives the gradient of it and of what was saved."""

    @staticmethod
    def forward(ctx: T, x: T, rule: T) -> T:
        ctx.save_for_backward(x)
        ctx.rule = rule
        return x * 2

    @staticmethod
    def backward(ctx: T, grad: T) -> T:
        return ctx.rule(grad, *ctx.saved_tensors), None


BY_DATA = {
    "item": lambda g, x: g * x.sum().item(),
    "a list": lambda g, x: g * sum(x.flatten().tolist()),
    "a branch": lambda g, x: g * 2 if x.sum() > 0 else g * 3,
    "numpy": lambda g, x: torch.from_numpy(g.detach().numpy() * x.numpy()),
    "a mask": lambda g, x: g * x[x > 0].sum(),
    "places": lambda g, x: g.clone().index_fill_(0, (x.sum(-1) > 0).nonzero()[:, 0], 0.0),
}


@pytest.mark.parametrize("rule", BY_DATA.values(), ids=BY_DATA)
def test_a_backward_by_data_costs_its_function_alone(rule: T) -> None:
    """The joint graph runs it on tensors without data."""
    layer = nn.Linear(3, 3)

    def program(x: T) -> T:
        return ByItsRule.apply(layer(x).sin(), rule).cos() + 1

    compiled = fusee.compile(program)
    for x in (torch.ones(4, 3), -torch.ones(4, 3), torch.ones(4, 3)):
        found = []
        for call in (program, compiled):
            layer.zero_grad()
            call(x).sum().backward()
            found.append(layer.weight.grad)
        torch.testing.assert_close(found[1], found[0])
    traced = Traced(program)
    traced(torch.ones(4, 3))
    assert len(traced.graphs) == 2 and traced.stops


OUTS = {
    "a product": lambda g, x: torch.mm(g, x.t() @ x, out=torch.empty_like(g)),
    "several": lambda g, x: g * torch.max(x, 1, True, out=(x[:, :1] * 1, X[:, :1].long()))[0],
    "what was saved": lambda g, x: torch.mul(g, 2, out=x),
    "a part": lambda g, x: torch.add(g, x, out=torch.zeros(2, *g.shape)[1]),
}


class ByName(ByItsRule):
    @staticmethod
    def backward(ctx: T, grad: T) -> T:
        return OUTS[ctx.rule](grad, *ctx.saved_tensors), None


@pytest.mark.parametrize("rule", OUTS)
def test_a_backward_writes_by_out(rule: str) -> None:
    def program(x: T) -> T:
        return ByName.apply(x.sin(), rule).cos()

    traced, found = Traced(program), []
    for call in (program, traced):
        x = X.clone().requires_grad_()
        found += torch.autograd.grad(call(x).sum(), x)
    torch.testing.assert_close(*found)
    assert bool(traced.stops) == (rule == "what was saved")


def applies(x: T) -> T:
    y = Cube.apply(x * 2, 3)
    first, second = Two.apply(y)
    return first + 1, second, second.requires_grad


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_autograd_functions(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = X.clone().requires_grad_(grad)
    traced = same(applies, x)
    assert len(traced.graphs) == 1
    monkeypatch.setattr(__import__(__name__, fromlist=["SCALE"]), "SCALE", 5.0)
    got, want = traced(x), applies(x)
    torch.testing.assert_close(got, want)
    # without gradients nothing but `forward` counts; what `backward` reads is a fact otherwise
    assert len(traced.graphs) == 2
    if grad:
        grads = [torch.autograd.grad(y[0].sum(), x)[0] for y in (got, want)]
        torch.testing.assert_close(*grads)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: T, x: T, is_written: bool) -> T:
        if is_written:
            ctx.mark_dirty(x.add_(1))
        return x, x.shape[0]

    @staticmethod
    def backward(ctx: T, grad: T, _: T) -> T:
        return grad, None


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(x: T) -> T:
        return x

    @staticmethod
    def setup_context(ctx: T, inputs: T, output: T) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: T, grad: T) -> T:
        return grad


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx: T, x: T, w: T, with_second: bool) -> T:
        ctx.save_for_backward(x, w if with_second else None)
        return x * w, None, w * 2 if with_second else None, x.shape[0], "mean"

    @staticmethod
    def backward(ctx: T, grad: T, none: T, second: T, *others: T) -> T:
        x, w = ctx.saved_tensors
        assert none is others[0] is others[1] is None
        more = 0 if w is None else second * 2
        return grad * 3, grad * x + more, None


@pytest.mark.parametrize("with_second", [False, True])
def test_an_autograd_function_gives_constants_beside_tensors(with_second: bool) -> None:
    def fn(x: T, w: T) -> T:
        first, none, second, *others = Several.apply(x.sin(), w, with_second)
        return first + (0 if second is None else second), none, *others

    traced, grads = Traced(fn), []
    for run in (fn, traced):
        x, w = X.clone().requires_grad_(), X.mul(2).requires_grad_()
        found, *others = run(x, w)
        assert others == [None, len(X), "mean"]
        grads.append((found, *torch.autograd.grad(found.sum(), (x, w))))
    torch.testing.assert_close(*grads)
    assert not traced.stops


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_an_input_that_an_autograd_function_gives_back(grad: bool) -> None:
    def fn(x: T, is_written: bool) -> T:
        z = x.clone()
        with torch.no_grad():
            y, count = Back.apply(z, is_written)
        try:
            Saving.apply(z.detach())
        except RuntimeError as error:
            count = str(error)
        return y is z, y.requires_grad, (y * z).sum(), count

    for is_written in (False, True):
        x = X.clone().requires_grad_(grad)
        wants, gets = fn(x, is_written), fusee.compile(fn)(x, is_written)
        assert (wants[:2], wants[3]) == (gets[:2], gets[3])
        if grad:
            torch.testing.assert_close(*[torch.autograd.grad(r[2], x)[0] for r in (wants, gets)])


def test_an_autograd_function_with_effects_runs_in_python() -> None:
    def tells(x: T) -> T:
        return Telling.apply(x) * 2

    traced, x = Traced(tells), X.clone().requires_grad_()
    for count in (1, 2):
        torch.testing.assert_close(traced(x), X * 2 + 2)
        assert len(SEEN) == count
    assert any("more than compute tensors" in stop for stop in traced.stops)


def goes_forward(x: T) -> T:
    return OnlyForward.apply(x * 2) + 1


def test_an_autograd_function_without_a_way_back() -> None:
    same(goes_forward, X)
    same(goes_forward, X.clone().requires_grad_(), breaks=True)


# ------------------------------------------------------------------------------ checkpoint


def checkpointed(x: T) -> T:
    def part(a: T, by: T) -> T:
        return torch.sin(a) * by

    y = checkpoint(part, x, 2, use_reentrant=False)
    return checkpoint(lambda a: a + 1, y, use_reentrant=False) * 3


def checkpointed_with_statistics(x: T, norm: T) -> T:
    return checkpoint(norm, x, use_reentrant=False)


def checkpointed_otherwise(x: T) -> T:
    return checkpoint(torch.sin, x, use_reentrant=True)


def test_checkpoint() -> None:
    x = X.clone().requires_grad_()
    traced = same(checkpointed, x)
    marks = [n.meta.get("ac_graph_id") for n in traced.graphs[0].graph.nodes if "call" in n.op]
    assert marks == [0, 0, 1, None]
    same(checkpointed_with_statistics, X, nn.BatchNorm1d(3), breaks=True)
    same(checkpointed_with_statistics, X, nn.BatchNorm1d(3).eval())
    same(checkpointed_otherwise, x)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_reentrant_checkpoint_that_nothing_goes_back_through(grad: bool, learns: bool) -> None:
    """It is in the graph, and eager's warning is given at each call."""
    layer = nn.Linear(3, 3)
    traced = Traced(lambda x: checkpoint(layer, x, use_reentrant=True) * 2)
    for n in (2, 2, 4):
        x = torch.randn(n, 3, requires_grad=learns)
        with torch.set_grad_enabled(grad), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            got = traced(x)
        assert len(told) == (not learns) and got.requires_grad == (learns and grad)
        torch.testing.assert_close(got, layer(x) * 2)
    assert not traced.stops


# ------------------------------------------------------------------------------ re, copy

WORD = re.compile(r"(\w+)-(\d+)")


def patterns(x: T, text: str) -> T:
    found = WORD.match(text)
    parts = re.split("-", text), re.sub("[0-9]", "#", text), re.findall(r"\d", text)
    if re.search("layer", text, re.IGNORECASE) is None:
        return x, parts
    return (
        x * int(found[2]),
        found.group(1),
        parts,
        WORD,
        [m.start() for m in re.finditer("-", text)],
    )


def deep_copies(x: T, given: T) -> T:
    made = {"twice": [x, x], "sizes": (1, 2), "given": given, "none": (x, None)}
    copied = copy.deepcopy(made)
    copied["twice"][0].add_(1)
    copied["given"].append(3)
    return made, copied, copy.deepcopy((1, "a")), copied["twice"][0] is copied["none"][0]


def deep_copies_parameters(x: T) -> T:
    return copy.deepcopy([x])


def test_patterns_and_deep_copies() -> None:
    same(patterns, X, "Layer-12")
    same(patterns, X, "norm-1")
    same(deep_copies, X, [1, [2]])
    same(deep_copies_parameters, X.clone().requires_grad_(), breaks=True)


def test_another_pattern_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(patterns)
    traced(X, "layer-2")
    monkeypatch.setattr(__import__(__name__, fromlist=["WORD"]), "WORD", re.compile("(l)(.*)2"))
    with pytest.raises(ValueError, match="invalid literal"):
        traced(X, "layer-2")


# ------------------------------------------------------------------------------ what is said

LOG = logging.getLogger("tests.capturing.said")


def warns(x: T, log: T) -> T:
    log.append("before")
    careful(x)  # the caller
    log.append("after")
    return x + 1, log


def careful(x: T) -> None:
    warnings.warn(f"{x.shape[0]} rows", stacklevel=2)
    warnings.warn("old", DeprecationWarning, stacklevel=1)  # the line


def catches(x: T, log: T) -> T:
    try:
        warns(x, log)
    except UserWarning as error:
        log.append(str(error))
    return x * 2, log


@pytest.mark.parametrize("action", ["always", "once", "default", "ignore", "error"])
@pytest.mark.parametrize("fn", [warns, catches])
def test_warnings(fn: Callable[..., Any], action: str) -> None:
    def run(call: Callable[..., Any]) -> Any:
        globals().pop("__warningregistry__", None)
        told: list[Any] = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter(action)
            for _ in range(3):
                log: list[str] = []
                try:
                    call(X, log)
                except Warning as error:
                    log.append(repr(error))
                told.append(log)
        return told, [(str(w.message), w.category, w.filename, w.lineno) for w in said]

    traced = Traced(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced(X, [])
    assert run(traced) == run(fn)
    assert len(traced.graphs) == 1 and not traced.stops


def logs(x: T) -> T:
    LOG.debug("quiet")
    LOG.warning("%d rows", x.shape[0])
    LOG.log(logging.INFO, "made")
    logging.error("from the root")
    return x + 1


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING, logging.CRITICAL])
def test_logs(level: int, caplog: Any) -> None:
    def told(call: Callable[..., Any]) -> Any:
        caplog.clear()
        with caplog.at_level(level):
            call(X)
        return [(r.name, r.lineno, r.funcName, r.pathname, r.getMessage()) for r in caplog.records]

    # pytest's handler keeps records in a list, which any code could read
    traced = Traced(logs)
    traced(X)
    assert told(traced) == told(logs)
    assert told(traced) == told(logs)
    assert all("may tell others" in stop for stop in traced.stops)


FORMAT = "%(name)s %(lineno)s %(funcName)s %(message)s"


@contextlib.contextmanager
def written(level: int) -> Iterator[io.StringIO]:
    """What logs write to a stream, as programs set it up."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(FORMAT))
    before, logging.root.handlers = logging.root.handlers, [handler]
    LOG.setLevel(level)
    try:
        yield stream
    finally:
        logging.root.handlers = before
        LOG.setLevel(logging.NOTSET)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING, logging.CRITICAL])
def test_what_only_a_stream_gets_follows_the_graph(level: int) -> None:
    traced = Traced(logs)
    for _ in range(2):
        told = []
        for fn in (logs, traced):
            with written(level) as stream:
                fn(X)
            told.append(stream.getvalue())
        assert told[0] == told[1] != ""
    assert not traced.stops and len(traced.graphs) == 1


class Keeping(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__()
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(f"{record.lineno} {record.getMessage()}")


class Shouting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        KEPT.append(record.msg)
        return super().format(record)


class Written:
    """A stream in Python."""

    def write(self, text: str) -> None:
        KEPT.append(text)

    def flush(self) -> None:
        """Nothing waits."""


KEPT: list[str] = []


def reads_what_is_said(x: T) -> T:
    LOG.warning("said")
    warnings.warn("warned", stacklevel=1)
    return x * len(KEPT)


def _with_handler(handler: logging.Handler) -> Any:
    LOG.addHandler(handler)
    return functools.partial(LOG.removeHandler, handler)


def _with_filter(_: T) -> Any:
    kept = logging.Filter()
    kept.filter = lambda record: not KEPT.append(record.msg)
    LOG.addFilter(kept)
    return functools.partial(LOG.removeFilter, kept)


def _with_formatter(_: T) -> Any:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(Shouting())
    return _with_handler(handler)


def _with_errors(stream: T) -> Any:
    before, sys.stderr = sys.stderr, stream
    return functools.partial(setattr, sys, "stderr", before)


def _with_show(_: T) -> Any:
    before, warnings.showwarning = warnings.showwarning, lambda *args, **k: KEPT.append("w")
    return functools.partial(setattr, warnings, "showwarning", before)


@pytest.mark.parametrize(
    "seeing",
    [
        lambda: _with_handler(Keeping(KEPT)), lambda: _with_filter(0),
        lambda: _with_formatter(0), lambda: _with_errors(Written()), lambda: _with_show(0),
        lambda: _with_handler(logging.StreamHandler(Written())),
    ],
)  # fmt: skip
def test_what_code_of_the_programs_sees_is_said_at_once(seeing: Callable[[], Any]) -> None:
    traced = Traced(reads_what_is_said)
    with written(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings._showwarnmsg_impl = SHOW  # type: ignore[attr-defined]  # pytest's appends to a list
        traced(X)
        undo = seeing()
        try:
            told = []
            for fn in (reads_what_is_said, traced, traced):
                KEPT.clear()
                told.append((fn(X).tolist(), KEPT[:]))
        finally:
            undo()
    assert told[0] == told[1] == told[2], traced.stops
    assert told[0][1] and any("may tell others" in stop for stop in traced.stops)


def _shows() -> Any:
    """What shows warnings as long as nobody has put something in its place."""
    spec = importlib.util.find_spec("warnings")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh._showwarnmsg_impl


SHOW = _shows()


def reads_its_warnings(x: T, said: list[Any]) -> T:
    warnings.warn("one", stacklevel=1)
    return x * len(said)


def catches_its_warnings(x: T) -> T:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.warn("one", stacklevel=1)
        return x * len(said), said[0].lineno


def test_a_list_of_warnings_is_read() -> None:
    traced = Traced(reads_its_warnings)
    for fn in (reads_its_warnings, traced, traced):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert (fn(X, said) == X).all()
            assert (fn(X, []) == 0).all()
    same(catches_its_warnings, X, breaks=True)


def names_its_caller(x: T) -> T:
    warnings.warn("one", stacklevel=2)
    return x + 1


def test_a_warning_names_the_line_of_who_calls() -> None:
    told = []
    for fn in (names_its_caller, Traced(names_its_caller).compiled.call):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fn(X)
        told.append([(one.filename, one.lineno) for one in said])
    assert told[0] == told[1]


@functools.lru_cache(None)
def once(logger: T, text: str) -> None:
    logger.warning(text)


def logs_once(x: T) -> T:
    once(LOG, "said once")
    return x + 1


def test_what_is_said_once() -> None:
    traced = Traced(logs_once)
    with written(logging.WARNING) as stream:
        for _ in range(3):
            traced(X)
    assert stream.getvalue().count("once said once") == 1 == stream.getvalue().count("\n")
    assert len(traced.graphs) == 1 and not traced.stops


def logs_what_changes(x: T) -> T:
    LOG.error("%s", x * 2)
    return x + 1


def test_a_log_of_tensors_ends_the_graph(caplog: Any) -> None:
    same(logs_what_changes, X, breaks=True)
    assert "tensor([[-4." in caplog.text


@pytest.mark.filterwarnings("ignore:.*runs eagerly", "ignore:The PyTorch API of nested tensors")
def test_attention_of_nested_tensors() -> None:
    """They have the fast path alone, and no graph takes them."""
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    attend = layer.self_attn
    for fn in (layer, lambda x: attend(x, x, x)[0]):
        with torch.no_grad():
            want, got = fn(x), fusee.compile(fn)(x)
        torch.testing.assert_close(got.to_padded_tensor(0), want.to_padded_tensor(0))
