"""Which sizes and numbers from outside vary: those become inputs of a graph, the others constants.

By what `dynamic` says, by name, by a second value, and by what an earlier process of the same job
has seen.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusee import log
from fusee.capture.bytecode import first_line
from fusee.capture.sources import Dict, Held, Item, Local, Origin, SizeOf
from fusee.capture.torch_api import Mark, compiler_setting, dynamo_switch, marks
from fusee.config import CaptureOptions, settings
from fusee.errors import CacheWarning, warn
from fusee.runtime.cache import code_key, content_key, write_whole

# ---------------------------------------------------------------------------- names

# Where modules keep what one writes as `self.layer`.
TABLES = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_ENTRY = re.compile(r"(.+):(\d+)")


class _Name(NamedTuple):
    """One entry of a list of sources. `axis` None: all of a tensor's."""

    text: str
    axis: int | None

    @classmethod
    def of(cls, entry: str) -> _Name:
        found = _ENTRY.fullmatch(entry)
        return cls(entry, None) if found is None else cls(found[1], int(found[2]))

    def fits(self, ours: str, torchs: str) -> bool:
        """Whether it names an object that we call `ours`, and TorchDynamo `torchs`.

        TorchDynamo's names end with brackets, so that a pattern need not match to their end.
        """
        if self.text in (ours, short := TABLES.sub(r".\1", ours), torchs):
            return True
        try:
            pattern = re.compile(self.text)
        except re.error:  # a name such as x[0](
            return False
        return bool(pattern.match(torchs) or pattern.fullmatch(ours) or pattern.fullmatch(short))


def torchs_name(origin: Origin) -> str:
    """What TorchDynamo calls an object: `L['self']._modules['a'].scale`."""
    root, *parts = origin.path()
    is_global = isinstance(getattr(root, "value", None), dict)  # of a module's variables
    text = "G" if is_global else str(root)
    for part in parts:
        text = part.words_after(text)
    text = re.sub(r"^\.s(?=\d)", "___stack", text).removeprefix(".c_")
    return text if is_global else re.sub(r"^\w+", lambda name: f"L[{name[0]!r}]", text)


class Named:
    """Sizes and numbers that options, or torch.compiler.config, name as varying.

    source   torch._dynamo.variables.builder.is_dynamic_source, is_dynamic_value
    """

    def __init__(self, options: CaptureOptions) -> None:
        def entries(name: str) -> list[str]:
            return compiler_setting(name).replace(" ", "").split(",")

        given = (*options.dynamic_sources, *options.unbacked_sources)
        listed = [*given, *entries("dynamic_sources"), *entries("unbacked_sources")]
        self.names = [*map(_Name.of, filter(None, listed))]
        self.values = {*map(int, filter(None, entries("dynamic_values")))}

    def __call__(self, origin: Origin, value: Any) -> bool:
        """Whether they name the number, or size, at an origin."""
        if value in self.values and type(value) is int:
            return True
        if not self.names:
            return False
        axis, of = (origin.axis, origin.of) if isinstance(origin, SizeOf) else (None, origin)
        ours, torchs = str(of), torchs_name(of)
        return any(
            (axis is None or name.axis in (None, axis)) and name.fits(ours, torchs)
            for name in self.names
        ) or any(name.text == str(origin) for name in self.names)


# ---------------------------------------------------------------------------- varying


def is_learning_rate(origin: Origin) -> bool:
    """Whether `optimizer.param_groups[k]["lr"]` is there, which schedulers change at each step."""
    group = origin.parent
    groups = group.parent if isinstance(group, Item) else None
    is_group = isinstance(groups, Item) and groups.key == "param_groups"
    return is_group and isinstance(origin, Item) and origin.key == "lr"


class Varying:
    """Which numbers and sizes from outside are inputs of the graphs of a function.

    dynamic       as compile() has it: None, from their second value on; True, at once; False, never
    with_symbols  whether the backend takes graphs with open sizes; else sizes are constants
    with_unbacked the same of sizes that only the data knows; else graphs end at them
    as_torch      whether it gets them as from TorchDynamo, which makes inputs of all symbols
    known         by the words of an origin: False for one whose value the program needs
    fixed         words of those that a relation made a constant of in one version
    """

    def __init__(
        self,
        function: types.FunctionType | None = None,
        dynamic: bool | None = None,
        *,
        with_symbols: bool = True,
        with_unbacked: bool = True,
        as_torch: bool = False,
        options: CaptureOptions | None = None,
    ) -> None:
        self.dynamic, self.with_symbols = dynamic, with_symbols
        self.with_unbacked, self.as_torch = with_unbacked, as_torch
        self.options = options or CaptureOptions.parse()
        self.known: dict[str, bool] = {}
        self.fixed: set[str] = set()
        self.job: Job | None = None
        self.begin()
        if function is not None and (job := job_named(compiler_setting("job_id"))) is not None:
            self.job, self.at = job, first_line(function)
            self.key = f"{function.__qualname__} {code_key(function.__code__, placed=False)[:12]}"
            for words, seen in job.seen(self.key).items():
                if dynamic is not False or all(type(value) is float for value in seen):
                    self.known[words] = True
                    text = f"{words} is an input: it was {', '.join(map(str, seen))} in {job.name}"
                    log.publish("dynamic", function.__qualname__, text)

    def begin(self) -> None:
        """A capture begins: what torch.compiler.config says now, holds."""
        self.named = Named(self.options)

    def marks(self, x: torch.Tensor) -> Mapping[int, Mark]:
        """What is said of a tensor's sizes, by axis."""
        return marks(x)

    def __call__(self, origin: Origin, value: Any) -> bool:
        """Whether the number or size at an origin is an input; `value` is what it is now."""
        if is_learning_rate(origin):
            return self.known.get(str(origin), True)
        if not self.with_symbols and isinstance(origin, SizeOf):
            return False
        if isinstance(origin, Item) and isinstance(origin.of, Dict):
            owner = origin.of.of
            if isinstance(owner, Held) and hasattr(type(owner.value), "_dynamo_marked_static"):
                return False
        if self.known and (known := self.known.get(str(origin))) is not None:
            return known
        if self.dynamic is True and isinstance(origin, (SizeOf, Local)):
            return True
        return self.named(origin, value)

    def settings(self) -> Any:
        """All that decides what a capture leaves open."""
        inputs = sorted(words for words, is_input in self.known.items() if is_input)
        named = self.named.names, sorted(self.named.values)
        return self.dynamic, inputs, named, self.reads_sizes, self.reads_numbers

    @property
    def reads_sizes(self) -> bool:
        """Whether graphs go on behind sizes that only data knows."""
        name, given = "capture_dynamic_output_shape_ops", self.options
        is_on = given.capture_dynamic_output_shape_ops or dynamo_switch(name)
        return self.with_unbacked and is_on

    @property
    def reads_numbers(self) -> bool:
        """Whether graphs go on behind numbers that tensors hold."""
        is_on = self.options.capture_scalar_outputs or dynamo_switch("capture_scalar_outputs")
        return self.with_unbacked and is_on

    def is_any(self) -> bool:
        """Whether anything but a learning rate may be an input."""
        named = self.named.names or self.named.values
        return bool(self.dynamic is True or named or any(self.known.values()))

    def learn(self, changed: Iterable[tuple[str, bool, Any, Any]]) -> Iterator[str]:
        """Note what has other values in a call, as Fact.varying says; those that are inputs now."""
        seen: dict[str, list[Any]] = {}
        for words, is_input, was, now in changed:
            if not is_input and words not in self.fixed:
                self.fixed.add(words)  # once it may have been by chance
            elif not is_input:
                self.need(words)
            elif words not in self.known and (type(now) is float or self.dynamic is not False):
                self.known[words] = True
                seen[words] = [was, now]
                yield words
        if self.job is not None and seen:
            self.job.learn(self.key, self.at, seen)

    def retry(self, changed: Iterable[tuple[str, bool, Any, Any]]) -> bool:
        """Take for inputs, once more, what versions differ in. Whether that is anything new."""
        if self.dynamic is False or not self.with_symbols:
            return False
        new = {words for words, is_input, was, now in changed if is_input and was != now}
        new -= {words for words in new if self.known.get(words) and words not in self.fixed}
        self.known.update(dict.fromkeys(new, True))
        return bool(new)

    def need(self, words: str) -> None:
        """Note that the program needs the value of one: it is a constant of each version."""
        self.known[words] = False


# ---------------------------------------------------------------------------- jobs
# What the processes of a job have seen vary, kept beside the cache under the job's name, as text.
#
#     jobs/NAME/1f0c2a9d8e7b6a54.json
#
# Ranks and restarts of a job share it. Whoever has something new writes all that is known as
# another file, named after its content, and then deletes the files that it has read, which say
# less. So processes need no lock: in any order, the union of what is there says all.
#
# source   torch/_dynamo/pgo.py, which keeps a file for each rank

_FORMAT = "fusee job 1"
_MOST = 8  # values that are listed of each; two show that it varies

# By function: where it begins, and by the words of an argument's size the values that it had.
_Rows = dict[str, tuple[str, dict[str, list[Any]]]]


def job_named(torchs: str) -> Job | None:
    """The job that FUSEE_JOB_ID names, or torch's own setting; None if no one does."""
    chosen = settings()
    name = chosen.job_id or torchs
    return _opened(chosen.cache_dir, name) if name and chosen.cache_size else None


@functools.cache
def _opened(folder: Path, name: str) -> Job:
    return Job(folder / "jobs", name)


class Job:
    """What is known of one job."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        plain = re.sub(r"[^\w.-]", "_", name).lstrip(".")[:80]
        self.folder = folder / (plain if plain == name else f"{plain}-{content_key(name)[:8]}")
        self._rows: _Rows = {}
        self._told: set[Path] = set()
        self._lock = threading.Lock()
        self._read()

    def seen(self, function: str) -> Mapping[str, list[Any]]:
        """What varies of a function, by words, with values that it had."""
        return self._rows.get(function, ("", {}))[1]

    def learn(self, function: str, at: str, seen: Mapping[str, list[Any]]) -> None:
        """Keep that something varies. A folder that cannot be written to costs one warning."""
        with self._lock:
            if not self._add({function: (at, dict(seen))}):
                return
            read = self._read()
            text = json.dumps(
                {
                    "format": _FORMAT,
                    "functions": {
                        name: {"at": at, "varies": rows} for name, (at, rows) in self._rows.items()
                    },
                },
                indent=1,
                sort_keys=True,
            )
            path = self.folder / f"{content_key(text)[:16]}.json"
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(path, text.encode())
                for old in read:
                    if old != path:
                        old.unlink(missing_ok=True)
            except OSError as error:
                self._tell(self.folder, f"cannot be written to: {error.strerror}")

    def _add(self, rows: _Rows) -> bool:
        """Unite; whether anything is new."""
        before = json.dumps(self._rows, sort_keys=True)
        for function, (at, more) in rows.items():
            _, known = self._rows.setdefault(function, (at, {}))
            for words, seen in more.items():
                known[words] = sorted({*known.get(words, ()), *seen})[:_MOST]
        return before != json.dumps(self._rows, sort_keys=True)

    def _read(self) -> list[Path]:
        """Add all that is there; the files that it was in."""
        while True:
            paths, found = sorted(self.folder.glob("*.json")), []
            try:
                for path in paths:
                    found.append((path, path.read_text()))
            except FileNotFoundError:  # another process has written one that says more
                continue
            except (OSError, UnicodeDecodeError) as error:
                self._tell(path, f"cannot be read: {error}")
            break
        good = []
        for path, text in found:
            try:
                self._add(_parsed(text))
                good.append(path)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._tell(path, f"is damaged or of another version: {error}")
        return good

    def _tell(self, path: Path, what: str) -> None:
        if path not in self._told:
            self._told.add(path)
            warn(
                CacheWarning,
                f"what the job {self.name!r} has learned {what} ({path})",
                did="went on without it",
                remedy="delete it, or let FUSEE_CACHE_DIR name another folder",
            )


def _parsed(text: str) -> _Rows:
    """The rows of a file. raises ValueError, TypeError, KeyError or AttributeError"""
    found = json.loads(text)
    if found["format"] != _FORMAT:
        raise ValueError(f"its format is {found['format']!r}, not {_FORMAT!r}")
    rows = {name: (row["at"], dict(row["varies"])) for name, row in found["functions"].items()}
    for at, varies in rows.values():
        values = [x for seen in varies.values() for x in seen]
        if type(at) is not str or any(type(x) not in (int, float) for x in values):
            raise ValueError("a value is no number")
    return rows
