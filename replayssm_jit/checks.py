"""Checks of arguments: each raises an error that names the argument, what was given and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

#: Alignment of every cache tensor's base and slot stride, in bytes: the width of one vector load.
ALIGNMENT = 16

#: Rows of one batch: the second dimension of a CUDA grid.
MAX_ROWS = 65535
_INT32_MIN = -(2**31)


def tensor(name: str, value: object) -> torch.Tensor:
    """A tensor of any kind."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    return value


def plain_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """An int, and no bool, from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        accepted = f"an int from {low} to {high}" if high is not None else "a positive int" if low == 1 else f"an int of at least {low}"
        raise ValueError(f"{name} must be {accepted}, got {value!r}")
    return value


def typed(
    name: str, value: object, shape: tuple[int, ...], dtypes: Collection[torch.dtype], device: torch.device | None, hint: str = ""
) -> torch.Tensor:
    """A tensor of one of some dtypes, of a given shape, on a given device (None: any)."""
    given = tensor(name, value)
    if given.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}{hint}, got {given.dtype}")
    if tuple(given.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}")
    if device is not None and given.device != device:
        raise ValueError(f"{name} must be on {device}, got {given.device}")
    return given


def vector(name: str, value: object, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous vector of a given size."""
    return contiguous(name, value, (size,), dtype, device)


def contiguous(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of a given shape."""
    given = typed(name, value, shape, (dtype,), device)
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {given.stride()}")
    return given


def nodes(name: str, value: object, rows: int, most: int, device: torch.device, width: int = 0) -> torch.Tensor:
    """A contiguous int32 table of nodes of trees: ``width`` a row, or any number from 1 to ``most`` if 0."""
    given = tensor(name, value)
    if given.dim() != 2 or not 1 <= given.shape[1] <= most:
        raise ValueError(f"{name} must have shape [{rows}, nodes] with 1 to {most} nodes a row, got {list(given.shape)}")
    return contiguous(name, given, (rows, width or given.shape[1]), torch.int32, device)


def parents(value: object, rows: int, most: int, device: torch.device, packed: bool, width: int = 0) -> int:
    """Parents of the nodes of all rows; returns the nodes a row, or all of them when packed."""
    if packed:
        return vector("parents", value, tensor("parents", value).numel(), torch.int32, device).numel()
    return nodes("parents", value, rows, most, device, width).shape[1]


def same_rows(name: str, count: int, other: str, rows: int) -> None:
    """As many rows as another argument has."""
    if count != rows:
        raise ValueError(f"{name} must have as many rows as {other}, {rows}, got {count}")


def rows(name: str, count: int) -> None:
    """No more rows than one launch can have."""
    if count > MAX_ROWS:
        raise ValueError(f"{name} must have at most {MAX_ROWS} rows, got {count}")


def cache_tensor(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor ``[slots, ...]`` whose slots are dense, aligned and apart from each other."""
    given = typed(name, value, shape, (dtype,), device)
    slots, slot_stride, inner = shape[0], given.stride(0), torch.empty(shape[1:], device="meta").stride()
    if given.stride()[1:] != inner:
        raise ValueError(f"{name} must be contiguous after the slot dimension (strides {inner}), got {given.stride()[1:]}")
    if slots > 1 and slot_stride < math.prod(shape[1:]):
        raise ValueError(f"{name} must have slots that do not overlap (a stride of at least {math.prod(shape[1:])}), got {slot_stride}")
    alignment = ALIGNMENT if len(shape) > 3 else dtype.itemsize  # scalars of a ring are read one by one
    if given.data_ptr() % alignment or (slots > 1 and slot_stride * dtype.itemsize % alignment):
        raise ValueError(f"{name} must start at, and step its slots by, a multiple of {alignment} bytes")
    return given


def weight(name: str, value: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A contiguous float32 tensor of a given shape."""
    given = typed(name, value, shape, (torch.float32,), device, " (convert it once, when the model is loaded)")
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {given.stride()}")
    return given


def slot_values(name: str, values: Sequence[Any], num_slots: int, pad_slot: int = -1, repeats: bool = False) -> None:
    """Slots that the host knows: ints below ``num_slots``, none twice; negative ones and ``pad_slot`` are padding."""
    if not values:
        raise ValueError(f"{name} must have at least one row, got none")
    if set(map(type, values)) == {int} and max(values) < num_slots and (low := min(values)) >= _INT32_MIN:
        live = values if low > max(pad_slot, -1) else [slot for slot in values if 0 <= slot != pad_slot]
        if repeats or len(set(live)) == len(live):
            return
    seen: dict[int, int] = {}
    for row, slot in enumerate(values):
        if not isinstance(slot, int) or isinstance(slot, bool):
            raise TypeError(f"{name}[{row}] must be an int, got {slot!r}")
        if not _INT32_MIN <= slot < num_slots:
            raise ValueError(f"{name}[{row}] must be below {num_slots} (negative: padding) and fit in an int32, got {slot}")
        if not repeats and 0 <= slot != pad_slot and seen.setdefault(slot, row) != row:
            raise ValueError(f"{name} must not repeat a slot, but rows {seen[slot]} and {row} both name {slot}")
