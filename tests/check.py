"""One `check` for every test: a compiled call must do what eager does.

    check(torch.softmax, torch.randn(3, 5), -1)              through torch.compile
    check(fn, x, capture="fx")                               without Dynamo: quick, for many samples
    check(fn, x, dynamic=True, again=[(y,), (z,)])           other sizes must not compile again
    check(module, x, options={"fuse": False}, backend="eager")

Compared are values (float64 arbitrates, see tests/compare.py), dtype, shape, strides, which outputs
share memory with which inputs, what happened to the inputs and to a module's own tensors, and the
type of exception. The second call must compile nothing and leave the first call's results alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fusee.backends import lookup
from tests.capture import capture as captured
from tests.compare import Exact, Mismatch, assert_same, measured

Args = tuple[Any, ...]
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass
class Checked:
    """What a check saw: the compiled result, and the graphs that the backend was given."""

    result: Any
    graphs: list[fx.GraphModule] = field(default_factory=list)


@dataclass
class _Run:
    """One call: its result or exception, and its arguments and callee as they are afterwards."""

    result: Any
    error: BaseException | None
    args: Any
    state: dict[str, Tensor]


def check(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    backend: str | Backend = "fusee",
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    capture: Literal["dynamo", "fx"] = "dynamo",
    again: Sequence[Args] = (),
    graphs: int | None = None,
    oracle: bool = True,
) -> Checked:
    """Compile `fn`, call it twice and compare with eager. Inference: gradients are off.

    again    more tuples of arguments that the compiled function must serve without compiling again
    graphs   how many graphs the backend must be given; unless said, one or more
    oracle   whether float64 arbitrates; without it, torch.testing's tolerances
    raises   Mismatch
    """
    given = dict(kwargs or {})
    seen: list[fx.GraphModule] = []
    chosen = lookup(backend, options)

    def counting(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(gm)
        return chosen(gm, inputs)

    subject = _twin(fn)
    if capture == "fx":
        compiled = _through_fx(subject, args, given, counting)
    else:
        torch._dynamo.reset()
        compiled = torch.compile(subject, backend=counting, dynamic=dynamic, fullgraph=fullgraph)
    with torch.no_grad():
        first = _compare(fn, subject, compiled, args, given, oracle)
        if first.error is not None:
            return Checked(None, seen)
        if graphs is not None and len(seen) != graphs:
            raise Mismatch(f"{len(seen)} graphs were compiled, expected {graphs}")
        if not seen and capture == "dynamo":
            raise Mismatch("nothing was compiled")
        kept = copy_tree(first.result)
        count = len(seen)
        # The module has seen one call: from here on eager must have, too.
        fn = _twin(subject)
        for more in (args, *again):
            _compare(fn, subject, compiled, more, given, oracle)
            fn = _twin(subject)
            if len(seen) != count:
                raise Mismatch(f"compiled again for {_signature(more)}")
    _assert_kept(first.result, kept)
    return Checked(first.result, seen)


def _compare(
    fn: Callable[..., Any],
    subject: Callable[..., Any],
    compiled: Callable[..., Any],
    args: Args,
    kwargs: dict[str, Any],
    oracle: bool,
) -> _Run:
    want = _call(_twin(fn), None, args, kwargs)
    got = _call(compiled, subject, args, kwargs)
    if want.error is not None or got.error is not None:
        _assert_same_error(got.error, want.error)
        return got
    exact: list[Exact] = []

    def exact_run() -> Exact:
        if not exact:
            run = lambda: _call(in_float64(_twin(fn)), None, *in_float64((args, kwargs)))  # noqa: E731
            exact.append(measured(run))
        return exact[0]

    def exact_part(part: Callable[[_Run], Any]) -> Callable[[], Any] | None:
        if not oracle:
            return None

        def compute() -> Any:
            run, longest = exact_run()
            # Not every program runs in float64; then torch.testing's tolerances decide.
            return Exact(part(run) if run.error is None else part(want), longest)

        return compute

    assert_same(got.result, want.result, exact_part(lambda run: run.result))
    assert_same(got.args, want.args, exact_part(lambda run: run.args))
    assert_same(got.state, want.state, exact_part(lambda run: run.state))
    if (ours := sharing(got.args, got.result)) != (eagers := sharing(want.args, want.result)):
        raise Mismatch(f"shared memory: got {ours}, eager gives {eagers}")
    return got


def _call(fn: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> _Run:
    args, kwargs = copy_tree((args, kwargs))
    torch.manual_seed(0)
    result, error = None, None
    try:
        result = fn(*args, **kwargs)
    except Exception as raised:  # noqa: BLE001  the type of any exception is what is compared
        error = raised
    owner = fn if owner is None else owner
    state = {**owner.state_dict()} if isinstance(owner, nn.Module) else {}
    return _Run(result, error, (args, kwargs), state)


def copy_tree(tree: Any) -> Any:
    """A copy whose tensors have the same sizes, strides and sharing of memory."""
    memory: dict[int, torch.UntypedStorage] = {}
    made: dict[int, Tensor] = {}

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.deepcopy(x) if isinstance(x, torch.Generator) else x
        if id(x) not in made:
            made[id(x)] = _copy_tensor(x, memory)
        return made[id(x)]

    return pytree.tree_map(leaf, tree)


def _copy_tensor(x: Tensor, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    if x.layout != torch.strided or type(x) not in (Tensor, nn.Parameter) or x.is_quantized:
        return x.detach().clone().requires_grad_(x.requires_grad)
    storage = x.untyped_storage()
    if storage.data_ptr() not in memory or not storage.nbytes():
        memory[storage.data_ptr()] = storage.clone()
    twin = torch.empty(0, dtype=x.dtype, device=x.device)
    twin.set_(memory[storage.data_ptr()], x.storage_offset(), x.shape, x.stride())
    twin = torch._neg_view(twin) if x.is_neg() else twin
    twin = twin.conj() if x.is_conj() else twin
    return twin.requires_grad_(x.requires_grad)


def _twin(fn: Callable[..., Any]) -> Callable[..., Any]:
    return copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn


def in_float64(tree: Any) -> Any:
    """Tensors of a tree in twice their precision; of a module, in place."""
    if isinstance(tree, nn.Module):
        return tree.double()
    wider = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.double() if x.is_floating_point() else x.to(wider.get(x.dtype, x.dtype))

    return pytree.tree_map(leaf, tree)


def sharing(args: Any, result: Any) -> list[tuple[int, int | None]]:
    """For each tensor, inputs first: which earlier one's memory it shares, and how far from that.

    In bytes. Where results begin in memory that nobody else sees is not compared (docs/open.md).
    """
    seen: dict[int, int] = {}
    found: list[tuple[int, int | None]] = []
    identity: dict[int, int] = {}
    leaves = pytree.tree_leaves((args, result))
    for position, x in enumerate(leaves):
        if not isinstance(x, Tensor) or x.layout != torch.strided or not x.numel():
            continue
        owner = seen.setdefault(x.untyped_storage().data_ptr(), position)
        same = identity.setdefault(id(x), position)
        if owner != position or same != position:
            apart = x.data_ptr() - leaves[owner].data_ptr()
            found.append((owner, apart if same == position else None))
    return found


def _assert_same_error(got: BaseException | None, want: BaseException | None) -> None:
    if got is not None and want is None:
        raise Mismatch("the compiled function raises, eager does not") from got
    if got is None and want is not None:
        raise Mismatch("eager raises, the compiled function does not") from want
    # Dynamo wraps what a graph raises while it traces; the cause keeps eager's type.
    if not isinstance(got, type(want)) and not isinstance(want, type(got)):
        raise Mismatch(f"raises {type(got).__name__}, eager {type(want).__name__}") from got


def _assert_kept(first: Any, kept: Any) -> None:
    try:
        assert_same(first, kept)
    except Mismatch as error:
        raise Mismatch(f"a later call changed the first call's result: {error}") from error


def _through_fx(
    fn: Callable[..., Any], args: Args, kwargs: dict[str, Any], backend: Backend
) -> Callable[..., Any]:
    """`fn` captured with placeholders for its tensors; all else is a constant of the graph."""

    def leaves(tree: Any) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]

    try:
        gm, rebuild = captured(lambda pos, named: fn(*pos, **named), copy_tree((args, kwargs)))
    except Exception as raised:  # noqa: BLE001  what eager raises, the compiled call must raise
        error = raised

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        return fail
    compiled = backend(gm, leaves((args, kwargs)))
    return lambda *pos, **named: rebuild(compiled(*leaves((pos, named))))


def _signature(args: Args) -> str:
    shapes = [tuple(x.shape) for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    return f"shapes {shapes}"
