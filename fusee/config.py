"""Every knob of Fusee: name, type, default, environment variable, one line of help.

`Options` are per compiled function, `Settings` per process; an engine's are a Table of its own, in
its folder. Reading, checks, messages and the tables of docs/options.md follow from the rows.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self, get_type_hints

from fusee.errors import OptionError, SettingError, choices

# Read by scripts/, not by the package; listed so that they do not count as unknown.
SCRIPT_VARIABLES = ("FUSEE_TORCH_INDEX",)

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Knob(NamedTuple):
    """One row of a Table. `choices` empty: any value of the type, `least` to `most`.

    takes     what messages call its values, where the type says too little
    convert   from what a user gives to the option; raises ValueError where it is none, OptionError
              to say more
    """

    name: str
    type: type
    default: Any
    help: str
    env: str | None = None
    choices: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None
    takes: str = ""
    convert: Callable[[Any], Any] | None = None

    @property
    def values(self) -> str:
        """What values it takes: `bool`, `int >= 0`, `one of 0, 128, 256, 512`."""
        kind = self.takes or _CALLED.get(self.type, self.type.__name__)
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.most is not None:
            return f"{kind} from {self.least} to {self.most}"
        return kind if self.least is None else f"{kind} >= {self.least}"

    def taken(self, value: Any, what: str = "option") -> Any:
        """The option of a value given in Python. raises OptionError"""
        try:
            value = value if self.convert is None else self.convert(value)
        except OptionError:
            raise
        except ValueError:
            fits = False
        else:
            fits = self.convert is not None or self._fits(value)
        if fits:
            return Path(value).expanduser() if self.type is Path else value
        raise OptionError(
            f"{what} {self.name!r} takes {self.values}, not {value!r} ({type(value).__name__})",
            remedy=f"{self.name}={self.default!r}, the default: {self.help}",
        )

    def _fits(self, value: Any) -> bool:
        if self.type is Path:
            return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))
        if self.type is Mapping:
            return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        # bool is a subclass of int: True must not pass for a number of threads.
        if self.choices:
            return (type(value), value) in [(type(one), one) for one in self.choices]
        if type(value) is not self.type and not (self.type is float and type(value) is int):
            return False
        number: Any = value
        if self.least is not None and not number >= self.least:  # NaN, too
            return False
        return self.most is None or number <= self.most

    def read(self, text: str) -> Any:
        """The option of an environment variable; empty is as good as none. raises SettingError"""
        word = text.strip().lower()
        if not word:
            return self.default
        if self.type is bool and word in _WORDS:
            return _WORDS[word]
        if self.type is int:
            unit = _SIZE_UNITS.get(word[-1].upper(), 1)
            digits = word if unit == 1 else word[:-1]
            if digits.isdecimal():
                return int(digits) * unit
        if self.type is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if self.type is str and (not self.choices or word in self.choices):
            return word if self.choices else text
        if self.type is Path:
            return Path(text).expanduser()
        values = "1 or 0" if self.type is bool else self.values
        raise SettingError(
            f"{self.env} takes {values}, not {text!r}",
            remedy=f"unset it for the default, {self.default!r}: {self.help}",
        )


_CALLED: dict[type, str] = {Path: "a path", Mapping: "a dict", tuple: "names, comma-separated"}


def knob(default: Any, help: str, env: str | None = None, **more: Any) -> Any:
    """A dataclass field that carries the rest of its row. A function as default is called.

    more   `choices`, `least`, `most`, `takes` and `convert` of Knob
    """
    given = {"default_factory": default} if callable(default) else {"default": default}
    return field(**given, metadata={"help": help, "env": env, **more})


@dataclass(frozen=True)
class Table:
    """A table of `knob(...)` rows, and the values of them that somebody gave."""

    @classmethod
    def parse(cls, given: Mapping[str, object] | Table | None = None) -> Self:
        """The options that a user gave, on top of the environment's and the defaults.

        raises   OptionError naming the nearest known option and listing all; SettingError
        """
        if isinstance(given, Table):
            return given  # type: ignore[return-value]  # nobody gives another table
        rows = knobs(cls)
        values = {
            row.name: row.read(os.environ[row.env])
            for row in rows
            if row.env is not None and row.env in os.environ
        }
        return cls(**{**values, **taken(given or {}, rows)})


def taken(
    given: Mapping[str, object], rows: Iterable[Knob], what: str = "option"
) -> dict[str, Any]:
    """What a user gave, by rows. raises OptionError"""
    known = {row.name: row for row in rows}
    for name in given:
        if name not in known:
            raise OptionError(
                f"the {what} {name!r} does not exist", remedy=choices(name, known, f"known {what}s")
            )
    return {name: known[name].taken(value, what) for name, value in given.items()}


_rows: dict[type, tuple[Knob, ...]] = {}


def knobs(table: type[Table]) -> tuple[Knob, ...]:
    """The rows of a table, in the order of their declaration."""
    if table not in _rows:
        hints = get_type_hints(table)
        rows = []
        for item in fields(table):
            hint = hints[item.name]
            kind = getattr(hint, "__origin__", hint)  # tuple of tuple[str, ...]
            kind = kind if isinstance(kind, type) else hint.__args__[0]  # Path of Path | None
            default = item.default if item.default_factory is MISSING else item.default_factory()
            rows.append(Knob(item.name, kind, default, **item.metadata))
        _rows[table] = tuple(rows)
    return _rows[table]


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "fusee"
    try:
        return Path.home() / ".cache" / "fusee"
    except RuntimeError:  # no home folder is known for this user
        return Path(tempfile.gettempdir()) / "fusee"


@dataclass(frozen=True)
class Options(Table):
    """Options of one compiled function: torch.compile(m, backend="fusee", options={...})."""

    derive_weights: bool = knob(
        True, "in inference fold, cast and prepack parameters once and keep the results"
    )
    channels_last: bool = knob(True, "let convolutional networks run in channels-last layout")
    fuse: bool = knob(True, "merge loops into fewer passes over memory")
    prices: bool = knob(
        True,
        "run a graph as it was captured where by measured prices its calls cost less than kernels,"
        " and a function that ends graphs by Python where its calls take less time so",
        env="FUSEE_PRICES",
    )
    memory_budget: float = knob(
        1.0,
        "in training, how much memory values saved for the backward may take: 1 for all that"
        " only costly work could bring back, 0 for none that any work could",
        least=0,
        most=1,
    )
    graphs: bool = knob(True, "on a GPU, record calls that repeat as CUDA graphs, and replay them")
    threads: int = knob(
        0, "threads a kernel may use; 0 follows torch.get_num_threads()", least=0, most=1024
    )
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


def _names(value: Any) -> tuple[str, ...]:
    """A list of names, or one text with commas."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise ValueError
    return tuple(name.replace(" ", "") for name in listed if name.strip())


def _function(value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError
    return value


@dataclass(frozen=True)
class CaptureOptions(Table):
    """Options of fusee.compile itself, with any backend."""

    fallback: str | None = knob(
        None,
        'run graphs eagerly that the backend cannot compile, and warn ("eager"); else that is a'
        " `BackendError`",
        choices=(None, "eager"),
    )
    guard_filter_fn: Any = knob(
        None,
        "says, with a bool for each guard, which are checked before a version is used again;"
        " `fusee.compiler` has some",
        takes="a function",
        convert=_function,
    )
    dynamic_sources: tuple[str, ...] = knob(
        (),
        "sizes and numbers that are symbols from the first call on: names or regular expressions,"
        " ours or TorchDynamo's, an axis after a colon: `x`, `self.scale`, `L['x']:0`",
        env="FUSEE_DYNAMIC_SOURCES",
        convert=_names,
    )
    capture_dynamic_output_shape_ops: bool = knob(
        True,
        "graphs go on behind `nonzero`, `x[mask]`, `unique` and others whose results have a size"
        " that only the data knows; False: as `torch._dynamo.config` says",
    )
    capture_scalar_outputs: bool = knob(
        True,
        "graphs go on behind `x.item()`, `int(x)`, `float(x)`; False: as `torch._dynamo.config`"
        " says",
    )
    unbacked_sources: tuple[str, ...] = knob(
        (),
        "as `dynamic_sources`, for sizes that the program may not ask for",
        env="FUSEE_UNBACKED_SOURCES",
        convert=_names,
    )


@dataclass(frozen=True)
class Settings(Table):
    """Settings of the process, read once from the environment."""

    log: tuple[str, ...] = knob((), "artefacts to print on stderr, or `all`", env="FUSEE_LOG")
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
    keep_captures: str = knob(
        "auto",
        "whether what is captured is kept in the cache folder, for the next process; auto: large"
        " graphs of our own compiler",
        env="FUSEE_KEEP_CAPTURES",
        choices=("auto", "1", "0"),
    )
    job_id: str = knob(
        "",
        "a name under which processes remember which sizes vary; torch's `TORCH_COMPILE_JOB_ID` is"
        " one too",
        env="FUSEE_JOB_ID",
    )


TABLES = (Options, CaptureOptions, Settings)


@functools.cache
def settings() -> Settings:
    """The process's settings. Tests that change the environment call settings.cache_clear().

    raises   SettingError for a FUSEE_* variable that is unknown or has a wrong value
    """
    known = [row.env for table in TABLES for row in knobs(table) if row.env]
    known += SCRIPT_VARIABLES
    for name in os.environ:
        if name.startswith("FUSEE_") and name not in known:
            raise SettingError(
                f"the environment variable {name} is not one of Fusee's",
                did="stopped, since a misspelt variable would silently do nothing",
                remedy=choices(name, sorted(known), "known variables"),
            )
    return Settings.parse()
