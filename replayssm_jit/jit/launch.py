"""Compiled module -> something to launch. CUDA modules are in :mod:`.driver`; modules of the host are loaded here."""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

from . import scratch
from .errors import JitError
from .store import Entry


class Kernel(Protocol):
    """One loaded kernel."""

    entry: Entry

    def launch(
        self,
        buffer_address: int,
        grid: tuple[int, int, int] = ...,
        block: int = ...,
        smem: int = ...,
        stream: int = ...,
        overlap: bool = ...,
    ) -> None:
        """Launch with the packed parameter struct at ``buffer_address``; the struct is read before this returns."""


class HostKernel:
    """A kernel of the cpu backend; a launch runs it to its end and needs the parameters only."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        try:
            self._function = _load(entry)[entry.meta["entry_point"]]
        except (OSError, AttributeError) as error:
            raise JitError(f"{entry.name}: cannot load the module: {error}") from error
        self._function.argtypes = [ctypes.c_void_p]
        self._function.restype = None

    def launch(
        self,
        buffer_address: int,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: int = 1,
        smem: int = 0,
        stream: int = 0,
        overlap: bool = False,
    ) -> None:
        """Run the kernel with the packed parameter struct at ``buffer_address``."""
        self._function(buffer_address)


def _load(entry: Entry) -> ctypes.CDLL:
    if entry.binary_path:
        try:
            return ctypes.CDLL(entry.binary_path)
        except OSError:  # cleared since it was read, or on a file system that forbids execution
            pass
    with scratch.directory() as directory:
        path = os.path.join(directory, entry.meta["binary"]["file"])
        with open(path, "wb") as file:
            file.write(entry.binary)
        return ctypes.CDLL(path)
