"""Every REPLAYSSM_* environment variable, in one place. They are read when used, never at import."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable as the documentation shows it."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("REPLAYSSM_CACHE_DIR", "~/.cache/replayssm-jit", "Where compiled modules are kept."),
    Variable("REPLAYSSM_EXTRA_CACHE_DIRS", "none", "Read-only directories of compiled modules, looked up first; separated like PATH."),
    Variable("REPLAYSSM_DISABLE_JIT", "0", "1: never compile; a module found in no directory is an error."),
    Variable("REPLAYSSM_VERBOSE", "0", "1: report every lookup and compile on stderr."),
    Variable("REPLAYSSM_LINEINFO", "0", "1: compile with line information for profilers and debuggers."),
    Variable("REPLAYSSM_DEBUG", "0", "1: check values that need a device synchronisation: slots in range, distinct and committed."),
    Variable(
        "REPLAYSSM_LOG_LEVEL",
        "0",
        "1: print calls of caches and wrappers made from then on, with shapes; 2: keep inputs of one that fails.",
    ),
    Variable("REPLAYSSM_LOG_DIR", "replayssm-dumps", "Where level 2 keeps them, for replayssm-jit rerun."),
)


def cache_dir() -> str:
    """Directory of compiled modules; may not exist."""
    chosen = os.environ.get("REPLAYSSM_CACHE_DIR")
    directory = os.path.expanduser(chosen) if chosen else os.path.join(_user_cache_dir(), "replayssm-jit")
    if directory.startswith("~"):  # a user without a home: a place that cannot be written, rather than "~" in the working directory
        return os.path.join(os.devnull, directory)
    return os.path.abspath(directory)


def extra_cache_dirs() -> list[str]:
    """Read-only directories that are looked up before the cache."""
    listed = os.environ.get("REPLAYSSM_EXTRA_CACHE_DIRS", "")
    return [os.path.abspath(os.path.expanduser(d)) for d in listed.split(os.pathsep) if d]


def jit_disabled() -> bool:
    """Whether compiling is forbidden."""
    return _flag("REPLAYSSM_DISABLE_JIT")


def verbose() -> bool:
    """Whether lookups and compiles are reported."""
    return _flag("REPLAYSSM_VERBOSE")


def lineinfo() -> bool:
    """Whether modules carry line information."""
    return _flag("REPLAYSSM_LINEINFO")


def debug() -> bool:
    """Whether values on the device are checked, at the price of a synchronisation."""
    return _flag("REPLAYSSM_DEBUG")


def log_level() -> int:
    """How much is told about calls: 0 nothing, 1 shapes, 2 also the inputs of a call that fails.

    Raises
    ------
    ValueError
        The variable holds something else.
    """
    text = os.environ.get("REPLAYSSM_LOG_LEVEL", "").strip() or "0"
    if text not in ("0", "1", "2"):
        raise ValueError(f"REPLAYSSM_LOG_LEVEL must be 0, 1 or 2, got {text!r}")
    return int(text)


def log_dir() -> str:
    """Directory of the inputs that level 2 keeps; may not exist."""
    return os.path.abspath(os.path.expanduser(os.environ.get("REPLAYSSM_LOG_DIR") or "replayssm-dumps"))


def report(message: str) -> None:
    """Print one line to stderr when REPLAYSSM_VERBOSE is set."""
    if verbose():
        print(f"replayssm-jit: {message}", file=sys.stderr, flush=True)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _user_cache_dir() -> str:
    # What platformdirs answers, without its import, which a warm start would pay for.
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA") or os.path.expanduser("~\\AppData\\Local")
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches")
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return xdg if os.path.isabs(xdg) else os.path.expanduser("~/.cache")
