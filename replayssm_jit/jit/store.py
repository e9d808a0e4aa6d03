"""Compiled modules on disk, found by content.

A directory of modules holds::

    <name>-<hash>/          one module; the hash covers source, compiler, options and architecture
        <name>.cu|.cpp      rendered source, for humans
        <name>.cubin|.so    binary
        module.json         digests of both, parameter layout, options, resource usage
    .keys/<request>-<compiler>   names the module that answers a request, so that a warm start renders nothing
    .failed/                the last source of each module that a compiler refused
    .locks/  .tmp/          see below

Every file appears whole: a module is written to ``.tmp``, synced, and renamed. A reader takes no lock and believes
nothing whose digest is wrong. Writers of one module take turns through a lock that the system drops when its owner
dies, wait for it a bounded time, and go on without it; two that race write the same thing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from . import scratch
from .compiled import Compiled, Resources
from .errors import CacheWarning

try:
    import fcntl
except ImportError:  # no such locks on Windows: racing processes each compile
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

FORMAT = 1  # of the directory and of module.json; part of every key
BINARY_SUFFIXES = {"cuda": ".cubin", "cpu": ".so"}

_ENTRY_NAME = re.compile(r".+-[0-9a-f]{16}")
_LOCK_SECONDS = 60.0  # several times what a compile takes
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Entry:
    """One compiled module.

    Parameters
    ----------
    name : str
        Name of the module's specialization.
    directory : str or None
        Where it lies; None when it is in memory only.
    binary : bytes
        The cubin or shared object.
    source : str or None
        Rendered source; None when it was not read from ``source_path``.
    meta : dict
        What ``module.json`` says.
    """

    name: str
    directory: str | None
    binary: bytes
    meta: dict[str, Any]
    source: str | None = None

    @property
    def source_path(self) -> str | None:
        """Path of the rendered source."""
        return self.directory and os.path.join(self.directory, self.meta["source"]["file"])

    @property
    def binary_path(self) -> str | None:
        """Path of the binary."""
        return self.directory and os.path.join(self.directory, self.meta["binary"]["file"])

    @property
    def resources(self) -> Resources:
        """Registers, spills, stack and static shared memory, where the compiler told them."""
        return Resources(**self.meta["resources"])


class CorruptError(Exception):
    """An entry is not what its digests say."""


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


def describe(meta: dict[str, Any], source: str, compiled: Compiled, extension: str) -> dict[str, Any]:
    """Complete what ``module.json`` says with the files' names and digests."""
    name = meta["name"]
    files = {"source": (extension, source.encode()), "binary": (BINARY_SUFFIXES[meta["backend"]], compiled.binary)}
    described = {"format": FORMAT, **meta, "resources": asdict(compiled.resources)}
    for kind, (suffix, content) in files.items():
        described[kind] = {"file": name + suffix, "sha256": sha256(content), "bytes": len(content)}
    return described


class Store:
    """One directory of compiled modules.

    Parameters
    ----------
    root : str
        The directory; need not exist.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    # ---- reading ------------------------------------------------------------------------------------------------

    def find(self, request: str, compiler: str | None) -> Entry | None:
        """Look up the module that answers a request.

        Parameters
        ----------
        request : str
            Digest of everything that was asked for.
        compiler : str or None
            Digest of the compiler that would answer it; None accepts any.
        """
        if compiler is not None:
            return self._follow(f"{request}-{compiler}")
        try:
            keys = sorted(key for key in os.listdir(self._path(".keys")) if key.startswith(request))
        except OSError:
            return None
        return next((entry for key in keys if (entry := self._follow(key))), None)

    def _follow(self, key: str) -> Entry | None:
        try:
            with open(self._path(".keys", key), "rb") as file:
                content = file.read()
        except OSError:
            return None
        name, _, digest = content.decode(errors="replace").partition(" ")
        if digest.rstrip("\n") != sha256(f"{key} {name}".encode()):
            return None
        return self.get(name)

    def get(self, entry_name: str) -> Entry | None:
        """Read an entry by its name; None when it is missing or corrupt."""
        try:
            return self.read(entry_name)
        except (OSError, CorruptError):
            return None

    def read(self, entry_name: str, with_source: bool = False) -> Entry:
        """Read an entry and verify it.

        Raises
        ------
        OSError
            A file is missing or unreadable.
        CorruptError
            A file differs from its digest.
        """
        directory = self._path(entry_name)
        with open(os.path.join(directory, "module.json"), "rb") as file:
            meta = _parse(file.read())
        binary = self._verified(directory, meta, "binary")
        source = self._verified(directory, meta, "source").decode() if with_source else None
        return Entry(meta["name"], directory, binary, meta, source)

    @staticmethod
    def _verified(directory: str, meta: dict[str, Any], kind: str) -> bytes:
        with open(os.path.join(directory, meta[kind]["file"]), "rb") as file:
            content = file.read()
        if sha256(content) != meta[kind]["sha256"]:
            raise CorruptError(f"{meta[kind]['file']} differs from its digest")
        return content

    def names(self) -> list[str]:
        """Names of all entries, good and bad."""
        try:
            return sorted(name for name in os.listdir(self.root) if _ENTRY_NAME.fullmatch(name))
        except OSError:
            return []

    # ---- writing ------------------------------------------------------------------------------------------------

    def publish(self, entry_name: str, meta: dict[str, Any], source: str, binary: bytes) -> Entry:
        """Write an entry; when another process was first, keep its.

        A cache that cannot be written gives an entry in memory and one warning.
        """
        entry = self._attempt(lambda: self._publish(entry_name, meta, source, binary))
        return entry or Entry(meta["name"], None, binary, meta, source)

    def _publish(self, entry_name: str, meta: dict[str, Any], source: str, binary: bytes) -> Entry:
        target = self._path(entry_name)
        with self._staging() as staging:
            finished = os.path.join(staging, entry_name)
            os.mkdir(finished)
            _write(os.path.join(finished, meta["source"]["file"]), source.encode())
            _write(os.path.join(finished, meta["binary"]["file"]), binary)
            _write(os.path.join(finished, "module.json"), _serialise(meta))
            _sync(finished)
            while True:
                try:
                    os.rename(finished, target)
                    _sync(self.root)
                    return Entry(meta["name"], target, binary, meta, source)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                present = self.get(entry_name)
                if present:
                    return present
                self._discard(target)

    def link(self, request: str, compiler: str, entry_name: str) -> None:
        """Let a request be answered by an entry from now on."""
        self._attempt(lambda: self._link(f"{request}-{compiler}", entry_name))

    def _link(self, key: str, entry_name: str) -> None:
        os.makedirs(self._path(".keys"), exist_ok=True)
        with self._staging() as staging:
            finished = os.path.join(staging, key)
            _write(finished, f"{entry_name} {sha256(f'{key} {entry_name}'.encode())}\n".encode())
            os.replace(finished, self._path(".keys", key))

    def _attempt(self, write: Callable[[], T]) -> T | None:
        """Run a write to the cache; one that fails costs a warning, never an error."""
        try:
            try:
                return write()
            except FileNotFoundError:  # somebody cleared the cache meanwhile
                return write()
        except OSError as error:
            self._warn(error)
            return None

    def _staging(self) -> contextlib.AbstractContextManager[str]:
        return scratch.directory(self._path(".tmp"))

    @contextlib.contextmanager
    def turn(self, entry_name: str) -> Iterator[None]:
        """Wait for other processes that build the same entry; never fails, never waits for ever."""
        lock = self._lock(entry_name)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def _lock(self, entry_name: str) -> int | None:
        if fcntl is None:
            return None
        try:
            os.makedirs(self._path(".locks"), exist_ok=True)
            lock = os.open(self._path(".locks", entry_name), os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                # A record lock, not flock: a forked child does not inherit it, so it dies with its owner.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > deadline:
                    os.close(lock)
                    return None
            time.sleep(_POLL_SECONDS)

    def _discard(self, path: str) -> None:
        """Remove a directory in one step for all readers: rename it away, then delete it."""
        with self._staging() as staging, contextlib.suppress(FileNotFoundError):
            os.rename(path, os.path.join(staging, "discarded"))

    # ---- housekeeping -------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete what processes that were killed long ago left behind."""
        scratch.sweep(self._path(".tmp"), scratch.LEFTOVER_SECONDS)

    def clear(self) -> int:
        """Delete every module, and nothing that is not ours; return how many there were."""
        names = self.names()
        for name in names:
            with contextlib.suppress(OSError):
                self._discard(self._path(name))
        for name in (".keys", ".locks", ".failed"):
            shutil.rmtree(self._path(name), ignore_errors=True)
        scratch.sweep(self._path(".tmp"), 0)
        return len(names)

    def keep_failed(self, file_name: str, source: str) -> str | None:
        """Keep a source that did not compile, for the reader of its error."""
        try:
            os.makedirs(self._path(".failed"), exist_ok=True)
            with open(self._path(".failed", file_name), "w") as file:
                file.write(source)
        except OSError:
            return None
        return self._path(".failed", file_name)

    def _path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def _warn(self, error: OSError) -> None:
        if self.root not in _warned:
            _warned.add(self.root)
            warnings.warn(
                f"the module cache {self.root} cannot be written ({error.strerror or error}): modules are compiled anew in every "
                "process; set REPLAYSSM_CACHE_DIR to a writable directory",
                CacheWarning,
                stacklevel=2,
            )


_warned: set[str] = set()


def _serialise(meta: dict[str, Any]) -> bytes:
    """``module.json``: the description and, as its member ``digest``, the digest of all other members."""
    return json.dumps({**meta, "digest": _digest(meta)}, indent=1, sort_keys=True).encode()


def _parse(content: bytes) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads(content)
        if meta.pop("digest") == _digest(meta):
            return meta
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CorruptError("module.json differs from its digest")


def _digest(meta: dict[str, Any]) -> str:
    return sha256(json.dumps(meta, sort_keys=True).encode())


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: str) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
