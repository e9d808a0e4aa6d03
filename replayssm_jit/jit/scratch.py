"""Temporary directories that name their owner, so that what a killed process leaves is recognised and deleted later."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator

LEFTOVER_SECONDS = 86400.0
_PREFIX = "replayssm-jit"


@contextlib.contextmanager
def directory(parent: str | None = None) -> Iterator[str]:
    """A new directory in ``parent`` (made when missing; the system's place by default), deleted at the end."""
    path = os.path.join(parent or tempfile.gettempdir(), f"{_PREFIX}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    if parent:
        os.makedirs(parent, exist_ok=True)
    os.mkdir(path, 0o755 if parent else 0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(parent: str | None, older_than: float) -> None:
    """Delete directories that were made more than ``older_than`` seconds ago and whose owner no longer runs on this host."""
    parent = parent or tempfile.gettempdir()
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            if name.startswith(f"{_PREFIX}-") and not _owner_runs(name) and time.time() - os.stat(path).st_mtime >= older_than:
                shutil.rmtree(path, ignore_errors=True)


def _owner_runs(name: str) -> bool:
    host, pid = name[len(_PREFIX) + 1 :].rsplit("-", 2)[:2]
    if host != socket.gethostname():
        return False  # cannot be told: age alone decides
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        pass
    return True
