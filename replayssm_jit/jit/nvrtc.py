"""CUDA source -> cubin, through NVRTC. Needs no GPU, no CUDA toolkit and no host compiler."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Any

from .compiled import Compiled, Resources
from .errors import CompileError, CompilerNotFoundError

ENTRY_POINT = "kernel"
_WHEEL = re.compile(r"(nvidia_cuda_nvrtc(?:_cu\d+)?|cuda_bindings)-([^-]+)\.dist-info")


def options(arch: str, lineinfo: bool) -> list[str]:
    """Options of one compile; part of the module's key.

    NVRTC's own cache is off: what it answers from there comes without the log that tells registers and spills. Lambdas
    are device functions without saying so, which versions before 13.5 otherwise refuse.
    """
    chosen = [f"--gpu-architecture={arch}", "-std=c++17", "-default-device", "--ptxas-options=-v", "--no-cache"]
    return [*chosen, "-lineinfo"] if lineinfo else chosen


@cache
def identity() -> str | None:
    """Which NVRTC would compile, told without loading it; None when there is none."""
    wheels = _wheels()
    if wheels:
        return wheels
    try:  # a toolkit's NVRTC, whose version only the library itself knows
        return version()
    except CompilerNotFoundError:
        return None


@cache
def version() -> str:
    """Version of the NVRTC that is loaded, with its wheel's where it came in one.

    Raises
    ------
    CompilerNotFoundError
        cuda-python or NVRTC is not installed.
    """
    wheels = _wheels()
    return f"NVRTC {'.'.join(map(str, _version()))}" + (f" ({wheels})" if wheels else "")


@cache
def _wheels() -> str:
    """Versions of NVRTC's wheels, and the major version of the bindings, which decides between them.

    They come from the names of metadata directories: importing :mod:`importlib.metadata` and loading NVRTC would cost
    a warm start more than everything else together.
    """
    found: dict[str, str] = {}
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")
        except OSError:
            continue
        for name in names:
            wheel = _WHEEL.fullmatch(name)
            if wheel:
                found.setdefault(wheel[1], wheel[2])
    bindings = found.pop("cuda_bindings", "").split(".")[0]
    return " ".join([f"cuda_bindings-{bindings}", *(f"{name}-{found[name]}" for name in sorted(found))]) if found else ""


def _version() -> tuple[int, int]:
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return major, minor


def compile(name: str, source: str, opts: list[str]) -> Compiled:
    """Compile one translation unit.

    Raises
    ------
    CompilerNotFoundError
        cuda-python or NVRTC is not installed.
    CompileError
        NVRTC refused the source or an option; the message carries its log.
    """
    nvrtc = _nvrtc()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        encoded = [option.encode() for option in _supported(opts)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: {version()} failed ({result.name}) with {' '.join(opts)}\n{log}")
        return Compiled(_read(nvrtc, program, "CUBIN"), _resources(log), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _supported(opts: list[str]) -> list[str]:
    # Family targets (sm_100f) and the cache came with NVRTC 12.9; before it the plain target serves the same devices.
    if _version() >= (12, 9):
        return opts
    return [re.sub(r"^(--gpu-architecture=sm_\d+)f$", r"\1", option) for option in opts if option != "--no-cache"]


def _resources(log: str) -> Resources:
    def numbers(pattern: str) -> list[int]:
        return [int(found) for found in re.findall(pattern, log)]

    registers = numbers(r"Used (\d+) registers")
    if not registers:
        return Resources()
    return Resources(  # a function that was not inlined has its own line
        registers=max(registers),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack=max(numbers(r"(\d+) bytes stack frame"), default=0),
        static_smem=max(numbers(r"(\d+) bytes smem"), default=0),
    )


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilerNotFoundError(f"cuda-python is not installed ({error}): pip install 'replayssm-jit[cu13]' or [cu12]") from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise RuntimeError or their own error when the library is absent
        reason = str(error).splitlines()[0]
        raise CompilerNotFoundError(f"NVRTC cannot be loaded ({reason}): pip install 'replayssm-jit[cu13]' or [cu12]") from error
    return nvrtc


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    size: int = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = b" " * size  # the bindings write into it
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


def _checked(nvrtc: Any, returned: Any) -> Any:
    result, *values = returned
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {result.name}")
    return values[0] if len(values) == 1 else tuple(values)
