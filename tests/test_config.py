"""Options, settings, artefacts and the layout of errors."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusee import config, errors, log
from fusee.backends.onnx import OnnxOptions
from fusee.backends.openvino import OpenVINOOptions
from fusee.backends.registry import EngineOptions
from fusee.backends.tvm import TvmOptions
from fusee.config import Options, knob
from fusee.errors import OptionError, SettingError


def test_defaults_and_given_options(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("FUSEE_CHECK")  # on in all tests
    assert Options.parse(None) == Options()
    assert Options.parse({"threads": 2, "fuse": False}) == Options(threads=2, fuse=False)
    assert Options.parse(Options(cache=False)).cache is False
    assert Options.parse({"memory_budget": 0}).memory_budget == 0


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"treads": 1}, ["'treads'", "'threads'; known options: derive_weights", "name"]),
        ({"threads": True}, ["takes int from 0 to 1024", "not True (bool)"]),
        ({"threads": -1}, ["takes int from 0 to 1024", "not -1 (int)"]),
        ({"threads": 100_000}, ["takes int from 0 to 1024"]),
        ({"vector_bits": 64}, ["takes one of 0, 128, 256, 512"]),
        ({"fuse": 1}, ["takes bool", "not 1 (int)"]),
        ({"memory_budget": 1.5}, ["takes float from 0 to 1", "not 1.5 (float)"]),
        ({"memory_budget": float("nan")}, ["takes float from 0 to 1", "not nan"]),
        ({"memory_budget": True}, ["takes float from 0 to 1", "not True (bool)"]),
        ({3: 1}, ["the option 3 does not exist"]),
    ],
)
def test_wrong_options_are_refused(given: Any, parts: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(given)
    for part in [*parts, "docs/errors.md#option-error"]:
        assert part in str(caught.value)


def test_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("FUSEE_CACHE_SIZE", "64M")
    environment.setenv("FUSEE_CHECK", "yes")
    environment.setenv("FUSEE_DUMP", "somewhere")
    assert config.settings().cache_size == 64 * 2**20
    assert config.settings().dump == Path("somewhere")
    assert Options.parse({}).check is True


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("FUSEE_CACHE_DIRR", "x", "'FUSEE_CACHE_DIR'; known variables"),
        ("FUSEE_CACHE_SIZE", "much", "FUSEE_CACHE_SIZE takes int >= 0, not 'much'"),
        ("FUSEE_CACHE_SIZE", "-1", "takes int >= 0, not '-1'"),
        ("FUSEE_KEEP_CAPTURES", "2", "takes one of 'auto', '1', '0', not '2'"),
        ("FUSEE_CPU", "avx3", "takes one of '', 'sse', .*, not 'avx3'"),
    ],
)
def test_wrong_variables_are_refused(
    environment: pytest.MonkeyPatch, name: str, value: str, part: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(SettingError, match=part):
        config.settings()


def test_artefacts_reach_who_asked() -> None:
    records: list[log.Record] = []
    undo = log.subscribe(records.append, "loops", "host")
    with log.graph("net"):
        log.publish("loops", "k0", lambda: "for i")
        log.publish("graph", "", lambda: pytest.fail("nobody wants the graph"))
    log.publish("host", "", "def call")
    undo()
    log.publish("host", "", lambda: pytest.fail("nobody listens any more"))
    assert records == [
        log.Record("loops", "k0", "net", "for i"),
        log.Record("host", "", "", "def call"),
    ]
    assert not log.wants("loops")


def test_unknown_artefacts_are_refused() -> None:
    with pytest.raises(SettingError, match="'loops'; known artefacts: all, graph"):
        log.subscribe(print, "loop")
    wrong: Any = 3
    with pytest.raises(SettingError, match="a function of one Record, not int"):
        log.subscribe(wrong, "loops")
    assert not log.wants("loops")


def test_dump_numbers_files_per_graph(tmp_path: Path) -> None:
    undo = log.subscribe(log.dump_to(tmp_path))
    for _ in range(2):
        with log.graph("net"):
            log.publish("graph", "", "g")
            log.publish("llvm", "kernel 1", "ir")
    undo()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    names = ["00_graph.py", "01_llvm_kernel_1.ll"]
    assert found == [f"{folder}/{name}" for folder in ("000_net", "001_net") for name in names]


def test_errors_have_one_layout_and_survive_pickling() -> None:
    error = errors.MissingFake("w", where="a.py:1 in f:   x", did="d", remedy="t")
    rows = ["w", "  a.py:1 in f:   x", "  did    d", "  try    t"]
    assert str(error) == "\n".join([*rows, "  more   docs/errors.md#missing-fake"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_user_line_is_the_innermost_outside_torch() -> None:
    trace = (
        '  File "/home/me/train.py", line 4, in forward\n    return self.fc(x)\n'
        '  File "/lib/torch/nn/linear.py", line 9, in forward\n    return F.linear(x)\n'
    )
    assert errors.user_line(trace) == "/home/me/train.py:4 in forward:   return self.fc(x)"
    assert errors.user_line(None) is None


def test_each_error_has_a_section() -> None:
    docs = Path(__file__).parent.parent / "docs"
    sections = (docs / "errors.md").read_text()
    for name, kind in vars(errors).items():
        is_ours = isinstance(kind, type) and kind.__module__ == errors.__name__
        if is_ours and not name.startswith("_"):
            assert f'<a id="{errors.anchor(kind)}"></a>' in sections, name


ENGINES: dict[str, type[config.Table]] = {
    "every engine": EngineOptions,
    "openvino": OpenVINOOptions,
    "onnxrt": OnnxOptions,
    "tvm": TvmOptions,
}


def line(row: config.Knob) -> str:
    """The row of docs/options.md about an option, and of the environment variable it has."""
    default = repr(row.default)
    if isinstance(row.default, Path):
        default = str(row.default).replace(str(config._default_cache_dir()), "~/.cache/fusee")
    is_setting = row in config.knobs(config.Settings)
    about = f"{row.help} (`{row.env}`)" if row.env and not is_setting else row.help
    known = (
        "" if row.default in ((), frozenset(), None, "") or row.default == {} else f"`{default}`"
    )
    return f"| `{row.env if is_setting else row.name}` | {row.values} | {known} | {about} |"


@pytest.mark.parametrize("table", [*config.TABLES, *ENGINES.values()])
def test_the_page_of_options_has_each_row(table: type[config.Table]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "options.md").read_text().splitlines()
    for row in config.knobs(table):
        assert line(row) in page, "put this row into docs/options.md"


def test_an_option_of_an_engine_is_one_line(environment: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class More(EngineOptions):
        streams: int = knob(1, "requests at a time", env="TEST_STREAMS", least=1)

    assert More.parse({"streams": 2, "name": "net"}) == More(streams=2, name="net")
    with pytest.raises(OptionError, match=r"'streams' takes int >= 1, not 0[\s\S]*at a time"):
        More.parse({"streams": 0})
    with pytest.raises(OptionError, match="'streams'; known options: disabled_ops, name, streams"):
        More.parse({"steams": 2})
    environment.setenv("TEST_STREAMS", "3")
    assert More.parse({}).streams == 3
    environment.setenv("TEST_STREAMS", "many")
    with pytest.raises(SettingError, match="TEST_STREAMS takes int >= 1, not 'many'"):
        More.parse({})
    assert line(config.knobs(More)[-1]) == (
        "| `streams` | int >= 1 | `1` | requests at a time (`TEST_STREAMS`) |"
    )


def test_each_option_has_a_reader() -> None:
    package = Path(config.__file__).parent
    sources = [p.read_text() for p in package.rglob("*.py") if p.name != "config.py"]
    tables: list[type[config.Table]] = [*config.TABLES, *ENGINES.values()]
    for row in (row for table in tables for row in config.knobs(table)):
        assert any(f".{row.name}" in source for source in sources), row.name
