"""Module description -> rendered source -> compiled module -> launch.

One file, one job: :mod:`.render` (Jinja), :mod:`.nvrtc` and :mod:`.host` (compilers), :mod:`.store` (disk),
:mod:`.build` (what happens on a hit and on a miss), :mod:`.inventory` (upkeep of the cache), :mod:`.launch` and
:mod:`.driver` (loading and launching), :mod:`.env` (environment variables). Nothing here knows a model family or needs
torch.
"""

from __future__ import annotations

import os
import threading

from . import build, host
from .errors import (
    CacheWarning,
    CompileError,
    CompilerNotFoundError,
    DriverError,
    JitError,
    ModuleNotBuiltError,
    TemplateError,
    UnsupportedDeviceError,
)
from .inventory import CachedModule, cache_clear, cache_list, cache_verify
from .launch import HostKernel, Kernel
from .module import ModuleSpec
from .params import Field, ParamStruct
from .store import Entry

__all__ = [
    "CacheWarning",
    "CachedModule",
    "CompileError",
    "CompilerNotFoundError",
    "DriverError",
    "Entry",
    "Field",
    "JitError",
    "Kernel",
    "ModuleNotBuiltError",
    "ModuleSpec",
    "ParamStruct",
    "TemplateError",
    "UnsupportedDeviceError",
    "cache_clear",
    "cache_list",
    "cache_verify",
    "compile",
    "load",
]

_Key = tuple[ModuleSpec, str, "int | None"]
_kernels: dict[_Key, Kernel] = {}
_building: dict[_Key, threading.Lock] = {}


def load(module: ModuleSpec, arch: str | None = None, device: int | None = None) -> Kernel:
    """Load a module, compiling it when no directory has it.

    Parameters
    ----------
    module : ModuleSpec
        What to load.
    arch : str, optional
        Architecture, such as ``sm_90``; by default the device's, or this CPU's.
    device : int, optional
        Ordinal of the GPU; by default the current one. Ignored by the cpu backend.

    Returns
    -------
    Kernel
        The same object for the same arguments, from any thread.

    Raises
    ------
    JitError
        One of its kinds: no compiler, a refused source, compiling disabled, no driver, an old GPU.
    """
    if module.backend == "cuda":
        from . import driver

        device = driver.current_device() if device is None else device
        arch = arch or driver.device_arch(device)
    else:
        arch, device = arch or host.fingerprint(), None
    key = (module, arch, device)
    kernel = _kernels.get(key)
    if kernel is None:
        with _building.setdefault(key, threading.Lock()):
            kernel = _kernels.get(key)
            if kernel is None:
                entry = compile(module, arch)
                kernel = _kernels[key] = HostKernel(entry) if device is None else driver.CudaKernel(entry, device)
    return kernel


def compile(module: ModuleSpec, arch: str | None = None) -> Entry:
    """Find or compile a module without loading it; a CUDA module needs no GPU for this.

    Parameters
    ----------
    module : ModuleSpec
        What to compile.
    arch : str, optional
        Architecture, such as ``sm_90`` (required for CUDA); the cpu backend compiles for this CPU alone.

    Returns
    -------
    Entry
        Paths of source and binary, and the compiler's metadata.

    Raises
    ------
    JitError
        One of its kinds: no compiler, a refused source, compiling disabled.
    """
    if module.backend == "cpu":
        if arch not in (None, host.fingerprint()):
            raise ValueError(f"arch must be None or this CPU's {host.fingerprint()!r} for the cpu backend, got {arch!r}")
        arch = host.fingerprint()
    elif module.backend != "cuda":
        raise ValueError(f"backend must be 'cuda' or 'cpu', got {module.backend!r}")
    elif not arch:
        raise ValueError("arch must be given for the cuda backend, such as 'sm_90'")
    return build.find_or_compile(module, arch)


# A child forked while another thread builds must not wait for that thread, which it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_building.clear)
