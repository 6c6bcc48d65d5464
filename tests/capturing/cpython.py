"""`python -m tests.capturing.cpython MODULE...`: CPython's own tests, each compiled, twice.

Prints a line for each test that passes by itself and not compiled, as `module Class.test`, and last
`n of m` for each module. What takes more than `MOST_S` is left out.

source   https://github.com/python/cpython, Lib/test
"""

from __future__ import annotations

import builtins
import contextlib
import doctest
import importlib
import io
import signal
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fusee

MOST_S = 10.0


class Slow(BaseException):
    pass


def tests_of(found: Any) -> Iterator[unittest.TestCase]:
    for one in found:
        if isinstance(one, unittest.TestSuite):
            yield from tests_of(one)
        elif not isinstance(one, doctest.DocTestCase):
            if isinstance(getattr(type(one), one._testMethodName, None), types.FunctionType):
                yield one


def outcome(test: unittest.TestCase, body: Callable[[Any], Any] | None = None) -> str:
    """What becomes of a test, whose body may be another function."""
    result, one = unittest.TestResult(), type(test)(test._testMethodName)
    names = {**vars(builtins)}
    if body is not None:
        setattr(one, test._testMethodName, types.MethodType(lambda self: body(self), one))
    signal.setitimer(signal.ITIMER_REAL, MOST_S, 1)  # again where a callback takes the error
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            one.run(result)
    except Slow:
        return "slow"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        vars(builtins).update(names)
    said = result.errors or result.failures
    if said and "Slow" in said[0][1]:
        return "slow"
    if result.expectedFailures:
        return "failed"
    return "skipped" if result.skipped else "failed" if said else "passed"


def main() -> None:
    def stop(*_: Any) -> None:
        raise Slow

    signal.signal(signal.SIGALRM, stop)
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        module = importlib.import_module(f"test.{name}")
        count = differing = 0
        for test in tests_of(unittest.TestLoader().loadTestsFromModule(module)):
            if outcome(test) != "passed" or outcome(test) != "passed":
                continue  # nor would some a second time
            kind, count = type(test), count + 1
            compiled = fusee.compile(getattr(kind, test._testMethodName), backend="eager")
            if "failed" in (outcome(test, compiled), outcome(test, compiled)):
                differing += 1
                print(f"{name} {kind.__name__}.{test._testMethodName}")
        print(f"{differing} of {count}", flush=True)


if __name__ == "__main__":
    main()
