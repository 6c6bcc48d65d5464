"""Names of torch.compiler for what cannot be here: each says in one error what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from fusee.capture.policy import POLICY
from fusee.errors import FuseeError, OptionError, nearest

__all__ = [
    "PrecompileError",
    "config",
    "load_compiled_function",
    "precompile",
    "set_enable_guard_collectives",
]

# What `precompile` raises.
PrecompileError = FuseeError

_NEXT_PROCESS = (
    "FUSEE_KEEP_CAPTURES=1, and fusee.compiler.save_cache_artifacts(): a process that loads them"
    " neither captures nor compiles"
)


def load_compiled_function(file: Any, *, f_globals: Any = None, external_data: Any = None) -> Any:
    """torch.compiler's reads what torch.compile(...).aot_compile() wrote. raises OptionError"""
    _refuse("load_compiled_function() reads what nothing here writes", _NEXT_PROCESS)


class _Precompile:
    """torch.compiler.precompile writes a program that TorchInductor has compiled."""

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        """raises OptionError"""
        _refuse("precompile is TorchInductor's", _NEXT_PROCESS)

    load = capture


precompile = _Precompile()


def set_enable_guard_collectives(enabled: bool) -> bool:
    """Whether ranks agree before one compiles: they never do. True raises OptionError."""
    if enabled:
        _refuse(
            "ranks cannot agree here before one of them compiles: nothing is exchanged meanwhile",
            "leave it out; where one rank may compile for longer than the others' time-out,"
            " torch.distributed.barrier() after the first step",
        )
    return False


class _NoSetting(OptionError, AttributeError):
    """So that hasattr() and getattr() with a default work."""


class Config:
    """torch.compiler.config, as far as it is settings of ours.

    recompile_limit   versions of each piece that are kept where compile() is not told; 8
    """

    __slots__ = ()

    @property
    def recompile_limit(self) -> int:
        return POLICY.recompile_limit

    @recompile_limit.setter
    def recompile_limit(self, value: int) -> None:
        if type(value) is not int or value < 1:
            raise OptionError(f"recompile_limit={value!r} is not an int > 0", did="changed nothing")
        POLICY.recompile_limit = value

    def __getattr__(self, name: str) -> NoReturn:
        known = ["recompile_limit", *_INSTEAD]
        close = nearest(name, known)
        hint = f"{close!r}; " if close and close != name else ""
        raise _NoSetting(
            f"fusee.compiler.config has no setting {name!r}",
            did="changed nothing",
            remedy=_INSTEAD.get(name, f"{hint}its settings: recompile_limit; docs/options.md"),
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name == "recompile_limit":
            object.__setattr__(self, name, value)
        else:
            self.__getattr__(name)


# What one uses here for settings of torch.compiler.config.
_INSTEAD = {
    "cache_key_tag": "FUSEE_CACHE_DIR=folder: one for each tag",
    "fail_on_recompile_limit_hit": 'fusee.compiler.set_stance("fail_on_recompile")',
    "force_disable_caches": 'FUSEE_CACHE_SIZE=0, or options={"cache": False}',
    "job_id": "FUSEE_KEEP_CAPTURES=1",
    "log_file_name": "FUSEE_DUMP=folder",
    "verbose": "FUSEE_LOG=all",
}

config = Config()


def _refuse(what: str, instead: str) -> NoReturn:
    raise OptionError(what, did="changed nothing", remedy=instead)
