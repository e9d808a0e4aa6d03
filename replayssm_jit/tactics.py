"""Launch geometry of the CUDA kernels: shared memory, and how a batch is divided among blocks."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .specs import ReplaySpec

WARPS = 4
MULTIPROCESSORS = 132  # of an H200, for which launches are measured
EXTRA_BLOCKS = 3 * MULTIPROCESSORS  # of rows that may flush
FEW_HEADS = 1024  # of all rows: a small batch, in which latency is all that a step takes
SMEM_EVERYWHERE = 99 << 10  # bytes that a block may take on every supported device
CURSOR_THREADS = 256
ROW_BYTES = 48  # struct Row, aligned
#: Batches whose rows a commit puts in order: fewer rows run all at once anyway, more are beyond what its one block holds.
ORDERED_ROWS = range(16, 16 * CURSOR_THREADS + 1)


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of a step kernel's ``struct Shared``: what every block takes, what it takes per head that it serves, and per warp.

    The rendered source asserts that it computes the same sizes.
    """

    fixed: int
    per_head: int
    per_warp: int


@cache
def fold_smem(spec: ReplaySpec) -> int:
    """Dynamic shared memory of a block of the fold kernel, which serves one head; its source asserts the same."""
    act, length = spec.dtype.itemsize, spec.buffer_len
    row, value_row = spec.state_dim * act + 16, spec.head_dim * act + 16
    if spec.family == "mamba2":
        return _round_up(length * (row + value_row) + (length + 1) * 4, 16)
    factors = _fold_factors(spec)
    if spec.family == "gdn":
        head = factors + _fold_room(spec) * 4
        return _round_up(length, 8) * row + head + _fold_room(spec) * 4 + WARPS * _unit_values(spec)
    split_row, float_row = (spec.state_dim + 8) * 2, (spec.state_dim + 4) * 4
    short = length <= 32
    front = length * float_row
    if spec.state_format in ("int8", "int16_int8") and short:
        front = _round_up(_byte_columns(spec, length) + length * WARPS * 4, 16)
    columns = front + max(_round_up(length, 16) * float_row, 3 * length * split_row if short else 0)
    partial = (2 if length > 16 else 1) * WARPS * 32 * 16
    return columns + _round_up(max(partial, WARPS * _unit_values(spec)) + spec.state_dim * 4 + factors, 16)


@cache
def shared_memory(spec: ReplaySpec) -> SharedMemory:
    """Shared memory of a spec's step kernel."""
    act, tokens, length, ring = spec.dtype.itemsize, spec.max_tokens, spec.buffer_len, spec.ring_len
    row, value_row = spec.state_dim * act + 16, spec.head_dim * act + 16
    terms = 3 if act == 4 else 2
    if spec.family == "mamba2":
        own = terms * tokens * (_round_up(ring, 16) // 2 + 4) * 4 + (tokens + length + 2) * 4
        columns = _byte_columns(spec, tokens) if multiplies_bytes(spec) else 0
        return SharedMemory((tokens + _round_up(ring, 8)) * row + columns, ring * value_row, _round_up(own, 16))

    coefficients = terms * 2 * tokens * (_round_up(length, 16) // 2 + 4) * 4
    if spec.family == "gdn":
        columns = _byte_columns(spec, 2) if multiplies_bytes(spec) else 0
        fixed = _round_up((2 * tokens + _round_up(length, 8)) * row + columns + _fold_room(spec) * 4, 16)
        head = max(length * value_row, _fold_factors(spec)) + tokens * value_row + _fold_room(spec) * 4
        return SharedMemory(fixed, head, _round_up(max(coefficients, _unit_values(spec)), 16) + _delta_factors(tokens) + ROW_BYTES)

    scratch = _round_up(max(tokens * spec.state_dim * (4 + act), terms * 8 * (spec.state_dim + 8) * 2), 16) if tokens > 1 else 0
    return SharedMemory(0, _new_tokens(spec) + _round_up(length * value_row + coefficients, 16), scratch)


def multiplies_bytes(spec: ReplaySpec) -> bool:
    """Whether a step multiplies its read plane as integers, by columns of bytes."""
    return spec.read_dtype is torch.int8 and (spec.family == "mamba2" or spec.max_tokens == 1)


def _byte_columns(spec: ReplaySpec, columns: int) -> int:
    return _round_up(columns * (3 * (spec.state_dim + 32) + 4), 16)


def _new_tokens(spec: ReplaySpec) -> int:
    """Of a head of KDA: what a step knows of its new tokens, whether it flushes or not."""
    tokens = spec.max_tokens
    columns = (3 if spec.dtype.itemsize == 4 else 2) * 2 * tokens * (spec.state_dim + 8) * 2
    if multiplies_bytes(spec):
        columns = max(columns, _byte_columns(spec, 2))
    return _delta_factors(tokens) + columns + tokens * (spec.head_dim * spec.dtype.itemsize + 16)


def _delta_factors(tokens: int) -> int:
    tiles = -(-tokens // 8)
    row = (4 if tokens <= 4 else 8 * (tiles + 1 - tiles % 2)) * 4
    return _round_up(2 * tokens * row + 3 * tokens * 4, 16)


def _fold_blocks(spec: ReplaySpec) -> tuple[int, int]:
    """Entries of a block of the exact fold, and blocks."""
    stays = spec.state_dim <= 128 and spec.dtype.itemsize == 2 and spec.family == "gdn"
    entries = _round_up(spec.buffer_len, 8)
    block = min(entries, 32) if stays else entries
    return block, -(-spec.buffer_len // block)


def _fold_room(spec: ReplaySpec) -> int:
    block, blocks = _fold_blocks(spec)
    return block * blocks


def _unit_values(spec: ReplaySpec) -> int:
    block, blocks = _fold_blocks(spec)
    return blocks * block * 16 * spec.dtype.itemsize


def _fold_factors(spec: ReplaySpec) -> int:
    block, blocks = _fold_blocks(spec)
    return _round_up((blocks * block * (_round_up(block - 8, 16) + 8 + 3) + blocks) * 4, 16)


def constants(spec: ReplaySpec, kind: str) -> dict[str, int]:
    """Constants of a rendered source, ``step``, ``tree`` or ``fold``, that launch geometry must agree with."""
    if kind == "fold":
        stays = spec.family == "kda" and spec.scaled and spec.state_dim <= 128 and spec.dtype.itemsize == 2  # in registers
        blocks = 3 if spec.buffer_len * max(spec.state_dim, 128) <= 32 * 128 and not stays else 2
        return {"smem": fold_smem(spec), "warps": WARPS, "min_blocks": blocks, "read_once": False, "few_heads": FEW_HEADS}
    memory, blocks = shared_memory(spec), min_blocks(spec)
    if kind == "tree":  # paths take registers, too
        blocks = min(blocks, 2 if spec.family == "kda" and spec.dtype is torch.float32 else 3)
    return {
        "smem": smem_bytes(spec, 1),
        "smem_per_head": memory.per_head,
        "smem_per_warp": memory.per_warp,
        "warps": warps(spec),
        "min_blocks": blocks,
        # KDA reads more of its rings than the others: they stay in L2 if the state makes room. Mamba-2's flush reads the plane again.
        "read_once": spec.family == "kda",
        "few_heads": FEW_HEADS,
        "integers": multiplies_bytes(spec),
    }


def flush_spread(spec: ReplaySpec, rows: int) -> int:
    """Over how many sixteenths of a launch a commit spreads the rows that will flush: until their blocks would be the last to end.

    In small batches they come first, among those that may be divided.
    """
    if rows * spec.heads < FEW_HEADS:
        return 0
    if spec.family != "kda":
        return 10
    return 2 if spec.scaled else 8  # planes of bytes: the other rows are done sooner


def warps(spec: ReplaySpec) -> int:
    """Warps of a step kernel's block: four, or fewer where they would need more shared memory than any device has."""
    memory = shared_memory(spec)
    if spec.family == "kda":
        return WARPS
    least = memory.fixed + memory.per_head
    return next((count for count in (4, 2) if least + count * memory.per_warp <= SMEM_EVERYWHERE), 1)


def min_blocks(spec: ReplaySpec) -> int:
    """Blocks that must fit on a multiprocessor: it bounds the registers of a thread."""
    narrow = spec.state_dim * spec.read_dtype.itemsize <= 256 and spec.dtype is torch.bfloat16
    if spec.family == "mamba2":
        if spec.buffer_len > 32 or spec.dtype is torch.float32:
            return 3
        lean = spec.state_format in ("fp32_bf16", "bf16") and spec.max_tokens == 1  # the others would spill
        if narrow and lean and spec.buffer_len <= 16:
            return 5
        return 3 if spec.max_tokens > 8 or spec.state_dim > 128 else 4
    if spec.max_tokens > 8 or (spec.family == "kda" and (spec.buffer_len > 32 or (spec.scaled and spec.state_dim > 128))):
        return 2
    if spec.family == "kda":
        spills = spec.max_tokens > 1 or spec.rounding == "stochastic" or (spec.scaled and not multiplies_bytes(spec))
    else:
        spills = spec.scaled and (spec.copied or spec.rounding == "stochastic" or spec.max_tokens > 1)
    return 4 if narrow and spec.buffer_len <= 16 and not spills else 3


def smem_bytes(spec: ReplaySpec, heads: int) -> int:
    """Dynamic shared memory of a block that serves ``heads`` heads."""
    memory = shared_memory(spec)
    step = memory.fixed + heads * memory.per_head + warps(spec) * memory.per_warp
    if spec.family != "kda":
        return step
    return max(step, max(fold_smem(spec), memory.per_warp) + _new_tokens(spec) + ROW_BYTES)  # a flush takes the memory of all heads


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def too_large(spec: ReplaySpec, smem: int, smem_limit: int) -> ValueError:
    """The error of a spec whose blocks need more shared memory than the device has."""
    return ValueError(
        f"head_dim={spec.head_dim}, state_dim={spec.state_dim}, buffer_len={spec.buffer_len}, max_tokens={spec.max_tokens} and "
        f"dtype={spec.dtype} need {smem} bytes of shared memory a block, but this device has {smem_limit}; "
        "a smaller buffer_len needs less"
    )


@cache
def _measured() -> dict[str, list[list[int]]]:
    text = importlib.resources.files(__package__).joinpath("data/tactics.json").read_text(encoding="utf-8")
    table: dict[str, list[list[int]]] = json.loads(text)["heads_per_block"]
    return table


def measured_heads(family: str, size: int) -> int:
    """Heads a block should serve where a batch has ``size`` of them, rows times heads: data/tactics.json, by benchmarks/tune.py."""
    return [heads for least, heads in _measured()[family] if least <= size][-1]


def heads_per_block(spec: ReplaySpec, rows: int, smem_limit: int) -> int:
    """Heads a block serves: as few as it takes to fill the device, more where the batch is large.

    Parameters
    ----------
    spec : ReplaySpec
        Shapes and precision.
    rows : int
        Rows of the batch.
    smem_limit : int
        Bytes of shared memory that a block of the device may take.

    Raises
    ------
    ValueError
        Not even one head fits.
    """
    if smem_bytes(spec, 1) > smem_limit:
        raise too_large(spec, smem_bytes(spec, 1), smem_limit)
    most = spec.heads if spec.family == "kda" else spec.heads // spec.groups_
    heads = min(most, measured_heads(spec.family, rows * spec.heads), warps(spec))
    reserved = 1024  # by the system, a block
    while heads > 1 and (smem_bytes(spec, heads) + reserved) * min_blocks(spec) > smem_limit + reserved:
        heads -= 1
    return heads


def blocks(spec: ReplaySpec, heads: int) -> int:
    """Blocks of a row that serve ``heads`` heads each: of one group, in KDA any that follow each other."""
    groups = 1 if spec.family == "kda" else spec.groups_
    return groups * -(-(spec.heads // groups) // heads)


def splits(spec: ReplaySpec, rows: int, blocks: int) -> tuple[int, int, int]:
    """How the rows of each head's state, by 16, are divided among blocks, in small batches.

    Parameters
    ----------
    spec : ReplaySpec
        Shapes and precision.
    rows : int
        Rows of the batch.
    blocks : int
        Blocks that serve a row where it is not divided.

    Returns
    -------
    splits : int
        Among how many, where the row flushes and is one of the first ``divided``.
    plain : int
        Where it is not: more than one only if all rows are divided.
    divided : int
        Rows, in the order of the launch, for which there are so many blocks.
    """
    most = -(-spec.head_dim // 16 // warps(spec))
    if most == 1 or rows * spec.heads >= FEW_HEADS:
        return 1, 1, 0
    # Blocks of rows that turn out not to flush cost little, and ask early for what the others need.
    divided = min(rows, EXTRA_BLOCKS // (blocks * (most - 1))) if rows in ORDERED_ROWS else rows
    plain = most if divided == rows and rows * blocks <= MULTIPROCESSORS else 1
    return (most, plain, divided) if divided else (1, 1, 0)


def standard_grid(spec: ReplaySpec, rows: int) -> tuple[int, int, int]:
    """Grid of the standard kernel: a warp serves 16 rows of a head's state, or 8 where 16 do not fit in its registers."""
    rows_per_warp = 16 if spec.state_dim <= 128 else 8
    units = spec.heads * spec.head_dim // rows_per_warp
    return (-(-units // WARPS), rows, 1)
