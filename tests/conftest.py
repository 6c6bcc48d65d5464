"""What every test starts from: two threads, a fixed seed, an empty cache of its own."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

for _name in [name for name in os.environ if name.startswith("FUSEE_")]:
    del os.environ[_name]

# Every stage is verified in every test; an explicit option still decides for its own test.
os.environ["FUSEE_CHECK"] = "1"

import hypothesis  # noqa: E402
import torch  # noqa: E402  the environment must be clean before fusee is imported

from fusee import config  # noqa: E402
from fusee.capture.captured import Entry  # noqa: E402
from fusee.capture.entries import listeners  # noqa: E402
from fusee.errors import MissingPackage  # noqa: E402
from tests.counting import Counting  # noqa: E402
from tests.seeds import forget_stacks  # noqa: E402

forget_stacks()

# The same examples each time: a change is judged by what it changes. `--hypothesis-profile=search`
# looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-sizes", action="store_true", help="all models over sizes that vary")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that needs a package of an extra that is not installed is skipped, and says so."""
    try:
        yield
    except MissingPackage as error:
        pytest.skip(str(error).splitlines()[0])
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if root in ("", "fusee", "tests", "bench") or importlib.util.find_spec(root) is not None:
            raise
        pytest.skip(f"{root} is not installed")


# What is tested here are kernels, of graphs so small that they would run as they were captured.
KERNELS = frozenset(
    "aten autodiff backends codegen loops opinfo replay runtime targets test_raising.py"
    " test_libraries.py test_symbols.py test_unbacked.py".split()
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    parts = item.path.relative_to(Path(__file__).parent).parts
    os.environ["FUSEE_PRICES"] = str(int(KERNELS.isdisjoint(parts)))


@pytest.fixture(scope="session", autouse=True)
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share one cache on disk, which starts empty and is not the user's."""
    os.environ["FUSEE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["FUSEE_KEEP_CAPTURES"] = "0"  # tests would find each other's
    config.settings.cache_clear()
    torch.set_num_threads(2)
    yield
    del os.environ["FUSEE_CACHE_DIR"], os.environ["FUSEE_KEEP_CAPTURES"]
    config.settings.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Collections pass over what is older than a module's tests: torch has 300,000 objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sets FUSEE_* variables for one test; settings are read anew."""
    config.settings.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    config.settings.cache_clear()


@pytest.fixture
def cache_dir(environment: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder for one test."""
    environment.setenv("FUSEE_CACHE_DIR", str(tmp_path / "cache"))
    config.settings.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def backend() -> Counting:
    """Runs graphs as they are and keeps them."""
    return Counting()


@pytest.fixture
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def entries() -> Iterator[list[Entry]]:
    """The versions that are made during a test, as they come."""
    made: list[Entry] = []
    listeners.append(made.append)
    yield made
    listeners.remove(made.append)
