"""What ``replayssm-jit cache`` shows and does."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import env
from .store import CorruptError, Store


@dataclass(frozen=True)
class CachedModule:
    """One entry of a directory of modules.

    Parameters
    ----------
    directory : str
        Where it lies.
    name, backend, arch : str
        What it is; empty when its description cannot be read.
    bytes : int
        Size of its files.
    problem : str
        What is wrong with it; empty when nothing is.
    """

    directory: str
    name: str
    backend: str
    arch: str
    bytes: int
    problem: str


def cache_list(directory: str | None = None) -> list[CachedModule]:
    """Every module in a directory (by default the cache), each verified against its digests.

    A broken one does no harm: it is rebuilt when it is next asked for.
    """
    store = Store(directory or env.cache_dir())
    return [_inspect(store, name) for name in store.names()]


def cache_verify(directory: str | None = None) -> list[CachedModule]:
    """The broken modules in a directory (by default the cache)."""
    return [module for module in cache_list(directory) if module.problem]


def cache_clear(directory: str | None = None) -> int:
    """Delete every module in a directory (by default the cache), and nothing else; return how many there were."""
    return Store(directory or env.cache_dir()).clear()


def _inspect(store: Store, entry_name: str) -> CachedModule:
    directory = os.path.join(store.root, entry_name)
    try:
        size = sum(os.path.getsize(os.path.join(directory, file)) for file in os.listdir(directory))
    except OSError:
        size = 0
    try:
        entry = store.read(entry_name, with_source=True)
    except (CorruptError, OSError) as error:
        return CachedModule(directory, "", "", "", size, str(error))
    return CachedModule(directory, entry.name, entry.meta["backend"], entry.meta["arch"], size, "")
