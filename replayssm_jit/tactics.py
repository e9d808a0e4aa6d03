"""Launch geometry of the CUDA kernels: shared memory, and how many heads a block serves for a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .specs import ReplaySpec

WARPS = 4
HEADS_MAX = 8


@dataclass(frozen=True)
class Geometry:
    """Threads of a block and bytes of its dynamic shared memory."""

    threads: int
    smem: int


@lru_cache(maxsize=None)
def geometry(spec: ReplaySpec) -> Geometry:
    """Geometry of a spec's step kernel; the rendered source asserts that it computes the same size."""
    return Geometry(WARPS * 32, smem_bytes(spec))


def constants(spec: ReplaySpec) -> dict[str, int]:
    """Constants of the rendered source that launch geometry must agree with."""
    return {"smem_bytes": smem_bytes(spec), "max_heads_per_block": max_heads_per_block(spec)}


def max_heads_per_block(spec: ReplaySpec) -> int:
    """Most heads whose decays a block has room for."""
    return min(spec.heads // spec.groups_, HEADS_MAX)


def smem_bytes(spec: ReplaySpec) -> int:
    """Bytes of the step kernel's ``struct Shared``."""
    act = spec.dtype.itemsize
    tiles = -(-spec.max_tokens // 8)
    entries = -(-(spec.buffer_len + spec.max_tokens) // 16) * 16
    pitch = spec.state_dim * act + 16
    heads = max_heads_per_block(spec)
    queries = tiles * 8 * pitch
    keys = entries * pitch
    values = WARPS * 2 * entries * 16 * act
    gram = tiles * 8 * (entries + 8) * 4
    decays = heads * (2 * entries + 17) * 4
    return -(-(queries + keys + values + gram + decays) // 16) * 16


def heads_per_block(spec: ReplaySpec, rows: int) -> int:
    """Heads a block serves: as few as it takes to fill the device, more where the batch is large."""
    slabs = spec.head_dim // 16
    return min(max_heads_per_block(spec), max(1, WARPS // slabs) if rows < 16 else 4)


def standard_grid(spec: ReplaySpec, rows: int) -> tuple[int, int, int]:
    """Grid of the standard kernel: a warp serves 16 rows of a head's state, or 8 where 16 do not fit in its registers."""
    rows_per_warp = 16 if spec.state_dim <= 128 else 8
    units = spec.heads * spec.head_dim // rows_per_warp
    return (-(-units // WARPS), rows, 1)
