"""Every knob of Fusee: name, type, default, environment variable, one line of help.

`Options` are per compiled function, `Settings` per process. Both are tables of `knob(...)` rows;
docs/options.md is written from them.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from fusee.errors import OptionError, SettingError, nearest

__all__ = ["Knob", "Options", "Settings", "describe", "knobs", "settings"]

# Read by scripts/, not by the package; listed so that they do not count as unknown.
SCRIPT_VARIABLES = ("FUSEE_TORCH_INDEX",)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")
_SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

_rows: dict[type, tuple[Knob, ...]] = {}


class Knob(NamedTuple):
    """One row of the tables below. `choices` empty: any value of the type, `least` to `most`."""

    name: str
    type: type
    default: Any
    env: str | None
    help: str
    choices: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None


def knob(
    default: Any,
    help: str,
    env: str | None = None,
    choices: tuple[Any, ...] = (),
    least: int | None = None,
    most: int | None = None,
) -> Any:
    """A dataclass field that carries the rest of its row. A function as default is called."""
    metadata = {"help": help, "env": env, "choices": choices, "least": least, "most": most}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "fusee"
    try:
        return Path.home() / ".cache" / "fusee"
    except RuntimeError:  # no home folder is known for this user
        return Path(tempfile.gettempdir()) / "fusee"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one compiled function: torch.compile(m, backend="fusee", options={...})."""

    derive_weights: bool = knob(
        True, "in inference fold, cast and prepack parameters once and keep the results"
    )
    channels_last: bool = knob(True, "let convolutional networks run in channels-last layout")
    fuse: bool = knob(True, "merge loops into fewer passes over memory")
    memory_budget: float = knob(
        1.0,
        "in training, how much memory values saved for the backward may take: 1 for all that"
        " only costly work could bring back, 0 for none that any work could",
        least=0,
        most=1,
    )
    threads: int = knob(0, "threads a kernel may use; 0 follows torch.get_num_threads()", least=0)
    vector_bits: int = knob(
        0, "width of vector registers; 0 is the host's widest", choices=(0, 128, 256, 512)
    )
    cache: bool = knob(True, "read and write object code in the cache on disk")
    check: bool = knob(
        False,
        "verify loops, kernels, memory plan and LLVM IR after the stage that made them",
        env="FUSEE_CHECK",
    )
    name: str = knob("", "what this function is called in logs, dumps and reports")

    @classmethod
    def parse(cls, given: Mapping[str, object] | Options | None = None) -> Options:
        """Options from the mapping a user gave, on top of the environment's defaults.

        raises   OptionError naming the nearest known option and listing all; SettingError
        """
        if isinstance(given, Options):
            return given
        base = _from_environment(cls, os.environ)
        if not given:
            return base
        table = {row.name: row for row in knobs(cls)}
        for name, value in given.items():
            if name not in table:
                raise _unknown_option(name, table)
            _check_option(table[name], value)
        return replace(base, **given)  # type: ignore[arg-type]  # checked row by row above


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the process, read once from the environment."""

    log: tuple[str, ...] = knob(
        (), "comma-separated artefacts to print on stderr, or 'all'", env="FUSEE_LOG"
    )
    dump: Path | None = knob(
        None, "folder that receives every artefact as a numbered file", env="FUSEE_DUMP"
    )
    cache_dir: Path = knob(
        _default_cache_dir, "folder of the object code cache", env="FUSEE_CACHE_DIR"
    )
    cpu: str = knob(
        "",
        "instruction set to generate for instead of the host's own; for tests",
        env="FUSEE_CPU",
        choices=("", "sse", "avx2", "avx512", "neon"),
    )
    cache_size: int = knob(
        2**30,
        "the cache's limit in bytes, or with K, M, G; 0 turns it off",
        env="FUSEE_CACHE_SIZE",
        least=0,
    )
    keep_captures: bool = knob(
        False,
        "keep what is captured in the cache folder, for the next process",
        env="FUSEE_KEEP_CAPTURES",
    )


@functools.cache
def settings() -> Settings:
    """The process's settings. Tests that change the environment call settings.cache_clear().

    raises   SettingError for a FUSEE_* variable that is unknown or has a wrong value
    """
    known = [row.env for table in (Options, Settings) for row in knobs(table) if row.env]
    known += SCRIPT_VARIABLES
    for name in os.environ:
        if name.startswith("FUSEE_") and name not in known:
            raise _unknown_variable(name, known)
    return _from_environment(Settings, os.environ)


def knobs(table: type[Options] | type[Settings]) -> tuple[Knob, ...]:
    """The rows of a table, in the order of their declaration."""
    if table not in _rows:
        hints = get_type_hints(table)
        _rows[table] = tuple(
            Knob(item.name, _plain_type(hints[item.name]), _default(item), **item.metadata)
            for item in fields(table)
        )
    return _rows[table]


def describe(row: Knob) -> str:
    """What values a knob takes: `bool`, `int >= 0`, `one of 0, 128, 256, 512`."""
    if row.choices:
        return "one of " + ", ".join(map(str, row.choices))
    if row.most is not None:
        return f"{row.type.__name__} from {row.least} to {row.most}"
    if row.least is not None:
        return f"{row.type.__name__} >= {row.least}"
    return row.type.__name__


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _plain_type(hint: Any) -> type:
    if isinstance(hint, type) and not getattr(hint, "__args__", ()):
        return hint
    if getattr(hint, "__origin__", None) is tuple:
        return tuple
    return Path


def _fits(row: Knob, value: object) -> bool:
    # bool is a subclass of int: True must not pass for a number of threads.
    if type(value) is not row.type and not (row.type is float and type(value) is int):
        return False
    if row.choices:
        return value in row.choices
    number: Any = value
    if row.least is not None and not number >= row.least:
        return False
    return row.most is None or number <= row.most


def _check_option(row: Knob, value: object) -> None:
    if not _fits(row, value):
        raise OptionError(
            f"option {row.name!r} takes {describe(row)}, not {value!r} ({type(value).__name__})",
            did="stopped before compiling",
            remedy=f"{row.name}={row.default!r}, the default: {row.help}",
        )


def _unknown_option(name: object, table: Mapping[str, Knob]) -> OptionError:
    close = nearest(str(name), table)
    hint = f"{close!r}; " if close else ""
    return OptionError(
        f"an option named {name!r} does not exist",
        did="stopped before compiling",
        remedy=f"{hint}known options: {', '.join(table)}",
    )


def _unknown_variable(name: str, known: list[str]) -> SettingError:
    close = nearest(name, known)
    hint = f"{close}; " if close else ""
    return SettingError(
        f"the environment variable {name} is not one of Fusee's",
        did="stopped, since a misspelt variable would silently do nothing",
        remedy=f"{hint}known variables: {', '.join(sorted(known))}",
    )


_Table = TypeVar("_Table", Options, Settings)


def _from_environment(table: type[_Table], environment: Mapping[str, str]) -> _Table:
    found: dict[str, Any] = {}
    for row in knobs(table):
        if row.env is not None and row.env in environment:
            found[row.name] = _read(row, environment[row.env])
    return table(**found)


def _read(row: Knob, text: str) -> object:
    lowered = text.strip().lower()
    if row.type is bool and lowered in _TRUE + _FALSE:
        return lowered in _TRUE
    if row.type is int and (value := _size_bytes(lowered)) is not None:
        return value
    if row.type is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if row.type is str and (not row.choices or lowered in row.choices):
        return lowered if row.choices else text
    if row.type is Path:
        return Path(text).expanduser() if text else row.default
    raise SettingError(
        f"{row.env}={text!r} is not of type {describe(row)}",
        did="stopped before compiling",
        remedy=f"unset it for the default, {row.default!r}: {row.help}",
    )


def _size_bytes(text: str) -> int | None:
    unit = _SIZE_UNITS.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    return int(digits) * unit if digits.isdecimal() else None
