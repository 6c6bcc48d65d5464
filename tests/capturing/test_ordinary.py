"""Some 300 ordinary programs: what eager gives, no function run eagerly, and as few graphs."""

from __future__ import annotations

import contextlib
import itertools
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.capturing import ordinary_classes, ordinary_library, ordinary_torch
from tests.capturing.same import Traced, shape_of

# What is called by the others.
CALLED = {"disp", "fib", "who", "cm", "sit"}

# These end graphs, of which there are at most so many.
GRAPHS = {
    **dict.fromkeys(
        """
        cmp_key exc_tb datetimes insp strings hashes pprint_it async_it tensor_set
        """.split(),
        0,
    ),
    **dict.fromkeys(
        """
        weak_key weak_value weak_ref_made singledispatch redirect counter heap heap_tuple
        dates decimals jsons rnd rnd_global log_it map_break filter_break islice_break
        print_it exec_it eval_it star_call queue_it script_mod req_grad rand_seed gen_t
        autograd_in tensor_print
        """.split(),
        1,
    ),
    **dict.fromkeys(
        """
        cached_prop cache_info timing timing2 chain_break zip_break gen_break hook_inside
        nonzero_mid boolmask unique_it item_it item_branch tolist data_set req_grad2
        req_grad3 req_attr hook_t retain resize_ set_ pack_seq bool_t cache_attr
        deepcopy_mod deepcopy_t param_make fn_attr metaclass_local init_subclass_local weak_proxy
        """.split(),
        2,
    ),
    **dict.fromkeys(
        """
        packed
        """.split(),
        6,
    ),
    **dict.fromkeys(
        """
        make_linear
        """.split(),
        8,
    ),
}

_LAZY = (map, filter, zip, enumerate, itertools.chain, types.GeneratorType)


def programs() -> Iterator[Any]:
    for module in (ordinary_classes, ordinary_library, ordinary_torch):
        for name, found in vars(module).items():
            is_own = getattr(found, "__module__", "") == module.__name__
            if isinstance(found, types.FunctionType) and is_own and name not in CALLED:
                yield pytest.param(found, id=name)


def drained(x: Any) -> Any:
    """With lists in place of iterators."""
    if type(x) is tuple:
        return tuple(map(drained, x))
    return (type(x), [*map(drained, x)]) if isinstance(x, _LAZY) else x


def outcome(call: Callable[..., Any], count: int) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    args = (torch.randn(2, 3),) * count
    try:
        return shape_of(drained(call(*args)))
    except Exception as error:  # noqa: BLE001  # the exception is what is compared
        return type(error), str(error)


@pytest.mark.parametrize("program", list(programs()))
def test_as_in_eager(program: Any) -> None:
    traced, count = Traced(program), program.__code__.co_argcount and 1
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        want = outcome(program, count)
        for _ in range(2):
            assert outcome(traced, count) == want, traced.stops
        assert outcome(program, count) == want
    if isinstance(want[0], type) and issubclass(want[0], Exception):
        return
    if program.__name__ in GRAPHS:
        assert len(traced.graphs) <= GRAPHS[program.__name__]
        assert not any(stop.startswith("eager") for stop in traced.stops), traced.stops
    else:
        assert not traced.stops and len(traced.graphs) <= 1, traced.stops
