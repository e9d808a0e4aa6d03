"""What every compiler returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """What one kernel uses, in bytes (registers: a thread's count). None: the compiler did not say."""

    registers: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    stack: int | None = None
    static_smem: int | None = None


@dataclass(frozen=True)
class Compiled:
    """A finished binary and what is known of it."""

    binary: bytes
    resources: Resources
    log: str
