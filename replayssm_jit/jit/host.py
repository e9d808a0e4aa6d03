"""C++ source -> shared object, through the host's compiler, driven by ninja."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from . import scratch
from .compiled import Compiled, Resources
from .errors import CompileError, CompilerNotFoundError

ENTRY_POINT = "kernel"

_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp"),
    # Not -ffast-math: NaN and infinity keep their meaning, and sums keep their order.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_JOB_BYTES = 1 << 30  # memory that one compile may take; bounds the number of jobs


def options(arch: str, lineinfo: bool) -> list[str]:
    """Options of one compile; part of the module's key."""
    return [*_FLAGS, "-g1"] if lineinfo else list(_FLAGS)


@cache
def fingerprint() -> str:
    """Name of this CPU: modules are compiled for it alone."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    found = []
    try:
        # The first block describes the first core; reading on would take milliseconds on a large machine.
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            block = file.read(16384).split(b"\n\n")[0].decode(errors="replace")
        for line in block.splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                found.append(f"{key.strip()}={value.strip()}")
    except OSError:
        found.append(platform.processor())
    # A home directory may be shared by hosts whose C libraries differ.
    found.append(os.confstr("CS_GNU_LIBC_VERSION") or "" if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}) else "")
    return f"{platform.machine()}-{hashlib.sha256(chr(10).join(found).encode()).hexdigest()[:12]}"


def identity() -> str | None:
    """Which compiler would compile, told without running it; None when there is none."""
    try:
        command = compiler()
    except CompilerNotFoundError:
        return None
    binary = os.path.realpath(command[0])
    status = os.stat(binary)
    return f"{shlex.join([binary, *command[1:]])} {status.st_size} {status.st_mtime_ns}"


def version() -> str:
    """First line of the compiler's ``--version``."""
    return _version(*compiler())


@cache
def _version(*compiler: str) -> str:
    command = [*compiler, "--version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise CompilerNotFoundError(f"{shlex.join(command)} does not run: {error}") from error


def compiler() -> list[str]:
    """Command of the C++ compiler: ``$CXX``, else the first of g++, c++, clang++.

    Raises
    ------
    CompilerNotFoundError
        There is none.
    """
    chosen = os.environ.get("CXX", "").strip()
    for candidate in [shlex.split(chosen)] if chosen else [["g++"], ["c++"], ["clang++"]]:
        path = shutil.which(candidate[0])
        if path:
            return [path, *candidate[1:]]
    if chosen:
        raise CompilerNotFoundError(f"the C++ compiler CXX={chosen!r} was not found")
    raise CompilerNotFoundError("no C++ compiler (g++, c++ or clang++) was found: install one, or name one in CXX")


@dataclass(frozen=True)
class Job:
    """One translation unit to compile."""

    name: str
    source: str
    options: list[str]


def compile(name: str, source: str, opts: list[str]) -> Compiled:
    """Compile one translation unit."""
    return compile_many([Job(name, source, opts)], 1)[0]


def compile_many(jobs: Sequence[Job], parallel: int | None = None) -> list[Compiled]:
    """Compile several translation units at once.

    Parameters
    ----------
    jobs : sequence of Job
        Their names must differ.
    parallel : int, optional
        Most compilers at once; by default one a core, and no more than the free memory allows.

    Raises
    ------
    CompilerNotFoundError
        No C++ compiler or no ninja.
    CompileError
        The compiler refused a source; the message names it and carries the log.
    """
    with scratch.directory() as directory:
        return _run_ninja(jobs, directory, parallel or _parallel())


def _run_ninja(jobs: Sequence[Job], directory: str, parallel: int) -> list[Compiled]:
    lines = ["rule cxx", "  command = $command", "  description = $out"]
    for job in jobs:
        with open(os.path.join(directory, f"{job.name}.cpp"), "w") as file:
            file.write(job.source)
        command = shlex.join([*compiler(), *job.options, f"{job.name}.cpp", "-o", f"{job.name}.so"])
        lines += [f"build {job.name}.so: cxx {job.name}.cpp", f"  command = {command.replace('$', '$$')}"]
    with open(os.path.join(directory, "build.ninja"), "w") as file:
        file.write("\n".join(lines) + "\n")
    ninja = [_ninja(), "-C", directory, "-j", str(parallel), "-k", "0"]  # one that fails does not stop the others
    done = subprocess.run(ninja, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        failed = [job.name for job in jobs if not os.path.exists(os.path.join(directory, f"{job.name}.so"))]
        raise CompileError(f"{', '.join(failed)}: {version()} failed\n{done.stdout.strip()}")
    compiled = []
    for job in jobs:
        with open(os.path.join(directory, f"{job.name}.so"), "rb") as binary:
            compiled.append(Compiled(binary.read(), Resources(), done.stdout))
    return compiled


def _ninja() -> str:
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
    else:
        found = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if not found:
        raise CompilerNotFoundError("ninja was not found: pip install ninja")
    return found


def _parallel() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return cores
    return max(1, min(cores, free // _JOB_BYTES))
