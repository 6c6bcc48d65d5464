"""`route`: each test runs by all three."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reference.routes import ROUTES, Route, routes


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    yield from routes(request.param)
