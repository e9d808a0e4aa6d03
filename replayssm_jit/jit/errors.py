"""What can go wrong between a module's description and its launch. The first line of every message tells all that matters."""

from __future__ import annotations


class JitError(RuntimeError):
    """Base of every error raised by :mod:`replayssm_jit.jit`."""


class CompilerNotFoundError(JitError):
    """The compiler that a backend needs (NVRTC, or a C++ compiler and ninja) is not installed."""


class CompileError(JitError):
    """A compiler refused a rendered source; the message ends with the compiler's log."""


class TemplateError(JitError):
    """A template is missing, or uses a name that its module does not define."""


class ModuleNotBuiltError(JitError):
    """Compiling is disabled and no directory holds the module."""


class DriverError(JitError):
    """The CUDA driver is missing or refused a call."""


class UnsupportedDeviceError(JitError):
    """The GPU is older than the kernels allow."""


class CacheWarning(UserWarning):
    """The disk cache cannot be used; modules live in memory only and every process compiles its own."""
