"""Launching the modules: what a kernel of a spec needs on a device, from parameter struct to grid.

Cache and wrapper both launch through here, so that geometry is decided in one place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from . import jit, tactics
from .jit.module import ModuleSpec
from .jit.params import ParamStruct
from .specs import FOLD_LAYERS, ReplaySpec

CURSOR_PARAMS = ParamStruct.of(
    ptr=(
        *("slots", "num_tokens", "num_accepted", "accepted", "positions", "targets"),
        *("ring_start", "history", "position", "seed", "error", "order"),
    ),
    i32=("rows", "tokens", "buffer_len", "ring_len", "pad_slot", "op", "width", "spread"),
)
COMMIT, FLUSH, RESET, MOVE = range(4)

COMPACT_PARAMS = ParamStruct.of(
    ptr=("slots", "num_tokens", "num_accepted", "accepted", "ring_start", "history", "rings"),
    i32=("rows", "tokens", "buffer_len", "ring_len", "pad_slot", "width", "num_rings", "threads"),
)

STATE_PARAMS = ParamStruct.of(
    ptr=("state", "read_copy", "scale", "tensor", "slots"),
    i64=("state_slot", "read_copy_slot", "scale_slot", "tensor_row", "tensor_head", "tensor_p", "tensor_n"),
    i32=("rows", "num_heads", "pad_slot", "tensor_dtype", "store", "threads"),
)
ENCODE, DECODE, COMPARE = range(3)
#: Code of a tensor's dtype in the state kernel; 0 means "no tensor: write zeros".
STATE_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def backend_of(device: torch.device) -> str:
    """Name of the backend that serves a device.

    Raises
    ------
    ValueError
        The device is neither a CUDA device nor the CPU.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {device}")
    return device.type


def current_stream(device: torch.device) -> int:
    """Handle of torch's current stream on a CUDA device, 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


@cache
def load(module: ModuleSpec, device: torch.device) -> Any:
    """Load a module for a device; CUDA modules belong to the device's primary context."""
    if device.type == "cpu":
        return jit.load(module)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch create the primary context that the module is loaded into
        return jit.load(module)


class CursorKernel:
    """The cursors of a set of rows: commit, flush, reset."""

    def __init__(self, device: torch.device) -> None:
        backend = backend_of(device)
        self._device = device
        self._kernel = load(ModuleSpec("cursors", f"{backend}/cursors", backend, CURSOR_PARAMS, ()), device)
        self._buffer = CURSOR_PARAMS.buffer()

    def launch(self, rows: int, **values: int) -> None:
        """Run one operation over ``rows`` rows."""
        CURSOR_PARAMS.pack(self._buffer, rows=rows, **values)
        self._kernel.launch(ctypes.addressof(self._buffer), (1, 1, 1), tactics.CURSOR_THREADS, 0, current_stream(self._device))


RingPlace = tuple[int, int, int, int]


def ring_place(ring: torch.Tensor) -> RingPlace:
    """Where a ring lies: address, bytes from slot to slot, heads or groups, bytes of an entry."""
    return ring.data_ptr(), ring.stride(0) * ring.itemsize, ring.shape[1], ring[0, 0, 0].numel() * ring.itemsize


class CompactKernel:
    """Ring entries of the accepted nodes of trees, moved together before the cursors move.

    Made outside a capture: the table of the rings, of all layers, is copied to the device.
    """

    def __init__(self, device: torch.device, rings: Sequence[RingPlace]) -> None:
        backend = backend_of(device)
        self._device, self._count = device, len(rings)
        self._kernel = load(ModuleSpec("compact", f"{backend}/compact", backend, COMPACT_PARAMS, ()), device)
        self._table = torch.tensor(rings, dtype=torch.int64, device=device)
        self._buffer = COMPACT_PARAMS.buffer()

    def launch(self, rows: int, **values: int) -> None:
        """Run over ``rows`` rows of all rings."""
        table = {"rings": self._table.data_ptr(), "num_rings": self._count}
        COMPACT_PARAMS.pack(self._buffer, rows=rows, threads=torch.get_num_threads(), **table, **values)
        self._kernel.launch(ctypes.addressof(self._buffer), (self._count, rows, 1), 128, 0, current_stream(self._device))


class StateKernel:
    """Encode a tensor into checkpoints, decode checkpoints into a tensor, or compare what steps read with the whole."""

    def __init__(self, spec: ReplaySpec, device: torch.device) -> None:
        backend = backend_of(device)
        self._device = device
        constants = {"head_dim": spec.head_dim, "state_dim": spec.state_dim, "state_format": spec.state_format}
        name = f"state_p{spec.head_dim}_n{spec.state_dim}_{spec.state_format}"
        self._kernel = load(ModuleSpec(name, f"{backend}/state", backend, STATE_PARAMS, tuple(sorted(constants.items()))), device)
        self._buffer = STATE_PARAMS.buffer()

    def launch(self, rows: int, num_heads: int, **values: int) -> None:
        """Run over ``rows`` rows of ``num_heads`` heads."""
        STATE_PARAMS.pack(self._buffer, rows=rows, num_heads=num_heads, threads=torch.get_num_threads(), **values)
        self._kernel.launch(ctypes.addressof(self._buffer), (num_heads, rows, 1), 128, 0, current_stream(self._device))


class FoldKernel:
    """Slots of all layers brought to given positions, in one launch.

    Parameters
    ----------
    spec : ReplaySpec
        Shapes and precision.
    layers : int
        How many.
    device : torch.device
        Where they are.
    """

    def __init__(self, spec: ReplaySpec, layers: int, device: torch.device) -> None:
        backend = backend_of(device)
        self._spec, self._params, self._device, self._layers = spec, spec.fold_params, device, layers
        self._kernel = load(spec.module("fold", backend), device)
        self._smem = tactics.fold_smem(spec) if backend == "cuda" else 0
        if backend == "cuda" and self._smem > self._kernel.max_dynamic_smem:
            raise tactics.too_large(spec, self._smem, self._kernel.max_dynamic_smem)
        self._buffer = self._params.buffer()
        self._table = torch.empty(layers * spec.layer_params.size, dtype=torch.uint8, device=device)

    def describe(self, layers: Sequence[Mapping[str, int]]) -> None:
        """Write the table: fields of ``spec.layer_params`` for each layer. It stays where it is, since captured launches read it."""
        params = self._spec.layer_params
        table = params.buffer(self._layers)
        for i, fields in enumerate(layers):
            params.pack(table, i, **fields)
        self._table.copy_(torch.frombuffer(table, dtype=torch.uint8))

    def launch(self, rows: int, out: Sequence[int] = (), **values: int) -> None:
        """Run over ``rows`` rows; ``out`` are addresses, one a layer."""
        for first in range(0, self._layers, FOLD_LAYERS):
            count = min(FOLD_LAYERS, self._layers - first)
            shape = {"rows": rows, "num_heads": self._spec.heads, "first_layer": first, "num_layers": count}
            shape["threads"] = torch.get_num_threads()
            table = self._table.data_ptr() + first * self._spec.layer_params.size
            self._params.pack(self._buffer, layers=table, out=out[first : first + count], **shape, **values)
            grid = (self._spec.heads, rows, count)
            self._kernel.launch(ctypes.addressof(self._buffer), grid, tactics.WARPS * 32, self._smem, current_stream(self._device))


class StepKernel:
    """Decode, verification and flush of one spec on one device; ``kind`` "tree": of rows whose tokens are nodes of a tree."""

    def __init__(self, spec: ReplaySpec, device: torch.device, kind: str = "step") -> None:
        backend = backend_of(device)
        self.spec, self.params, self._device = spec, spec.step_params, device
        self._kernel = load(spec.module(kind, backend), device)
        self._backend = backend
        self._geometry = cache(self._find_geometry)  # asked for at every step, by size of the batch
        self.plan(rows=1)  # a shape that does not fit the device is refused here, not at the first batch

    def ordered(self, rows: int) -> bool:
        """Whether the order of rows matters: not where all run at once, however many blocks each has; and the CPU balances by itself."""
        return self._backend == "cuda" and rows in tactics.ORDERED_ROWS and self._geometry(rows)[0]["divided"] < rows

    def plan(self, rows: int) -> tuple[dict[str, int], Callable[[int], None]]:
        """Fields that depend on the batch's size alone, and its launch: a call with the address of the packed struct."""
        fields = {"rows": rows, "num_heads": self.spec.heads, "threads": torch.get_num_threads()}
        kernel = self._kernel
        if self._backend == "cpu":
            return fields, lambda address: kernel.launch(address)
        geometry, launch = self._geometry(rows)
        return fields | geometry, launch

    def _find_geometry(self, rows: int) -> tuple[dict[str, int], Callable[[int], None]]:
        """Fields that say how a launch is divided, and the launch."""
        heads = tactics.heads_per_block(self.spec, rows, self._kernel.max_dynamic_smem)
        blocks = tactics.blocks(self.spec, heads)
        splits, plain, divided = tactics.splits(self.spec, rows, blocks)
        grid = (blocks, rows + (splits - 1) * divided, 1)
        smem, threads = tactics.smem_bytes(self.spec, heads), tactics.warps(self.spec) * 32
        kernel, device = self._kernel, self._device

        def launch_cuda(address: int) -> None:
            kernel.launch(address, grid, threads, smem, current_stream(device), True)

        return {"heads_per_block": heads, "splits": splits, "plain_splits": plain, "divided": divided}, launch_cuda


def one_plane(spec: ReplaySpec) -> ReplaySpec:
    """The spec whose checkpoint is read whole: what the standard kernel of the same precision takes."""
    return replace(spec, read_dtype=spec.checkpoint_dtype, rounding="nearest")
