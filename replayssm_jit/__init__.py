"""JIT-compiled replay kernels for the recurrent layers of hybrid language models.

A checkpoint of the state and a small ring of recent inputs stand in for a state that is rewritten at every token.
Names load on first use, so importing the package (or :mod:`replayssm_jit.jit`, which needs no torch) stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import ReplayCache as ReplayCache
    from .specs import GdnSpec as GdnSpec
    from .specs import KdaSpec as KdaSpec
    from .specs import Mamba2Spec as Mamba2Spec
    from .specs import ReplaySpec as ReplaySpec
    from .wrapper import ReplayWrapper as ReplayWrapper

_HOMES = {
    "ReplaySpec": "specs",
    "Mamba2Spec": "specs",
    "GdnSpec": "specs",
    "KdaSpec": "specs",
    "ReplayCache": "cache",
    "ReplayWrapper": "wrapper",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
