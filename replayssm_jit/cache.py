"""Planes, rings and cursors of a set of slots, and moving slots in and out.

A cache owns (``allocate``) or adopts (``from_tensors``) the tensors of several layers that share one set of cursors.
Cursors live on the device and are moved by a commit alone, once a step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import kernels
from .kernels import COMMIT, FLUSH, RESET, STATE_DTYPES
from .specs import ReplaySpec

Slots = torch.Tensor | Sequence[int]

#: Alignment of every cache tensor's base and slot stride, in bytes: the width of one vector load.
ALIGNMENT = 16


class ReplayCache:
    """Checkpoints, rings and cursors of ``num_slots`` slots in every layer.

    Use :meth:`allocate` or :meth:`from_tensors`.

    Attributes
    ----------
    spec : ReplaySpec
        Shapes and precision of every layer.
    layers : list of dict of torch.Tensor
        Per layer ``state`` ``[slots, H, P, N]`` in the checkpoint dtype and the rings ``ring_*`` ``[slots, outer, R, inner]``.
        With two planes the memory of ``state`` holds, per slot and head, the upper plane and then the lower one.
    ring_start, history : torch.Tensor
        int32 ``[slots]``: where the history begins in the ring, and how many committed tokens it holds.
    position : torch.Tensor
        int64 ``[slots]``: tokens folded into the checkpoint so far.
    error : torch.Tensor
        int32 ``[1]``, sticky error bits; see :meth:`check`.
    debug : bool
        Check values that need a device synchronisation (slots in range and distinct, no slot run twice without a commit).
        Defaults to the environment variable ``REPLAYSSM_DEBUG``.
    """

    def __init__(self, spec: ReplaySpec, layers: list[dict[str, torch.Tensor]], cursors: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        self.layers = layers
        state = layers[0]["state"]
        self.device = state.device
        self.num_slots = state.shape[0]
        self.ring_start = cursors["ring_start"]
        self.history = cursors["history"]
        self.position = cursors["position"]
        self.weights: list[dict[str, torch.Tensor] | None] = [None] * len(layers)
        self.error = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.debug = os.environ.get("REPLAYSSM_DEBUG", "0") not in ("", "0")
        self._open: set[int] = set()
        self._cursors = kernels.CursorKernel(self.device)
        self._state = kernels.StateKernel(spec, self.device)
        self._step: kernels.StepKernel | None = None

    # ---- construction -------------------------------------------------------------------------------------------

    @classmethod
    def allocate(cls, spec: ReplaySpec, num_layers: int, num_slots: int, device: torch.device | str = "cuda") -> ReplayCache:
        """Allocate fresh slots: zero checkpoints, empty rings.

        Parameters
        ----------
        spec : ReplaySpec
            Shapes and precision.
        num_layers, num_slots : int
            Layers that share the cursors, and slots in each.
        device : torch.device or str
            A CUDA device or the CPU.

        Raises
        ------
        ValueError
            A count is not positive, or the device is of another type.
        """
        for name, value in (("num_layers", num_layers), ("num_slots", num_slots)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        where = _indexed(torch.device(device))
        layers = [
            {name: torch.zeros(num_slots, *shape, dtype=dtype, device=where) for name, (shape, dtype) in spec.cache_tensors.items()}
            for _ in range(num_layers)
        ]
        return cls(spec, layers, _fresh_cursors(num_slots, where))

    @classmethod
    def from_tensors(
        cls, spec: ReplaySpec, layers: Sequence[Mapping[str, torch.Tensor]], cursors: Mapping[str, torch.Tensor] | None = None
    ) -> ReplayCache:
        """Adopt an engine's tensors; nothing is copied or cleared.

        Parameters
        ----------
        spec : ReplaySpec
            Shapes and precision.
        layers : sequence of mappings
            Per layer every tensor of ``spec.cache_tensors``: dimension 0 is the slot, at any stride that is a multiple of
            16 bytes; the others are contiguous.
        cursors : mapping, optional
            ``ring_start`` and ``history`` (int32 ``[slots]``) and ``position`` (int64 ``[slots]``). Fresh ones when absent.

        Raises
        ------
        ValueError
            A tensor is missing, or has the wrong shape, stride, alignment or device.
        TypeError
            A tensor has the wrong dtype.
        """
        if not layers:
            raise ValueError("layers must name at least one layer, got none")
        state = layers[0].get("state")
        if not isinstance(state, torch.Tensor) or state.dim() == 0:
            raise ValueError("layers[0] must have a tensor 'state'")
        device, num_slots = state.device, state.shape[0]
        kernels.backend_of(device)
        adopted: list[dict[str, torch.Tensor]] = []
        for i, layer in enumerate(layers):
            if set(layer) != set(spec.cache_tensors):
                raise ValueError(f"layers[{i}] must have the tensors {sorted(spec.cache_tensors)}, got {sorted(layer)}")
            for name, (shape, dtype) in spec.cache_tensors.items():
                _check_cache_tensor(f"layers[{i}][{name!r}]", layer[name], (num_slots, *shape), dtype, device)
            adopted.append(dict(layer))
        if cursors is None:
            cursors = _fresh_cursors(num_slots, device)
        for name, dtype in _CURSORS.items():
            if name not in cursors:
                raise ValueError(f"cursors must have {sorted(_CURSORS)}, got {sorted(cursors)}")
            _check_vector(f"cursors[{name!r}]", cursors[name], num_slots, dtype, device)
        return cls(spec, adopted, cursors)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes one slot takes in all layers, cursors included."""
        return len(self.layers) * self.spec.bytes_per_slot + 16

    def set_weights(self, layer: int, **weights: torch.Tensor | None) -> None:
        """Name a layer's constants, once, when the model is loaded. A step needs them, and so does every fold.

        Parameters
        ----------
        layer : int
            Layer of the cache.
        **weights : torch.Tensor
            By the names of ``spec.weights``: Mamba-2 ``A`` ``[H]`` (negative), ``D`` and ``dt_bias`` ``[H]`` (optional); Gated
            DeltaNet ``A_log`` and ``dt_bias`` ``[H]`` (optional); KDA ``A_log`` ``[H]`` and ``dt_bias`` ``[H, N]`` (optional).
            float32, contiguous; kept, not copied.

        Raises
        ------
        ValueError, TypeError
            A weight is missing, unknown, or has the wrong shape, dtype, device or stride; the message names it.
        """
        self._layer(layer)
        declared = {weight.name: weight for weight in self.spec.weights}
        unknown = weights.keys() - declared.keys()
        if unknown:
            raise TypeError(f"unknown weight {sorted(unknown)[0]!r}; {self.spec.family} takes {sorted(declared)}")
        present = {name: tensor for name, tensor in weights.items() if tensor is not None}
        for name, weight in declared.items():
            if name in present:
                self._check_weight(name, present[name], self.spec.shape(*weight.dims))
            elif not weight.optional:
                raise TypeError(f"missing weight {name!r}; {self.spec.family} needs it")
        self.weights[layer] = present

    # ---- moving slots -------------------------------------------------------------------------------------------

    def reset(self, slots: Slots) -> None:
        """Make slots fresh: zero checkpoint, empty ring, position 0.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[n]`` on the cache's device; negative entries are skipped.
        """
        index = self.slots_tensor(slots)
        for layer in self.layers:
            self._launch_state(layer, index)
        self._launch_cursors(index, RESET)

    def load_state(
        self, layer: int, slots: Slots, state: torch.Tensor, *, layout: str = "vk", positions: torch.Tensor | None = None
    ) -> None:
        """Take over states that a prefill left behind; the slots' rings become empty.

        Parameters
        ----------
        layer : int
            Layer of the cache.
        slots : torch.Tensor or sequence of int
            int32 ``[n]``; negative entries are skipped.
        state : torch.Tensor
            ``[n, H, P, N]`` (``layout="vk"``) or ``[n, H, N, P]`` (``"kv"``), float32, bfloat16 or float16, any strides.
        layout : {"vk", "kv"}
            Which of the state's two dimensions is innermost; transformers and flash-linear-attention keep "kv".
        positions : torch.Tensor, optional
            int64 ``[n]``: tokens each state has seen; 0 when absent.
        """
        index = self.slots_tensor(slots)
        tensors = self._layer(layer)
        view = self._state_view("state", state, index.numel(), layout)
        if positions is not None:
            _check_vector("positions", positions, index.numel(), torch.int64, self.device)
        self._launch_state(tensors, index, view)
        self._launch_cursors(index, RESET, positions=positions)

    def read_state(self, layer: int, slots: Slots, out: torch.Tensor | None = None, *, layout: str = "vk") -> torch.Tensor:
        """Decode checkpoints. Tokens still in the ring are not in them: :meth:`flush` first for the state after all that is committed.

        Parameters
        ----------
        layer : int
            Layer of the cache.
        slots : torch.Tensor or sequence of int
            int32 ``[n]``; rows of negative entries are left as they are (zero in a fresh ``out``).
        out : torch.Tensor, optional
            Where to write: ``[n, H, P, N]`` (``"vk"``) or ``[n, H, N, P]`` (``"kv"``), float32, bfloat16 or float16.
        layout : {"vk", "kv"}
            Layout of ``out``.

        Returns
        -------
        torch.Tensor
            ``out``, or a fresh float32 tensor.
        """
        index = self.slots_tensor(slots)
        tensors = self._layer(layer)
        if out is None:
            shape = self.spec.shape("H", "P", "N") if layout == "vk" else self.spec.shape("H", "N", "P")
            out = torch.zeros(index.numel(), *shape, dtype=torch.float32, device=self.device)
        self._launch_state(tensors, index, self._state_view("out", out, index.numel(), layout), store=1)
        return out

    def flush(self, slots: Slots) -> None:
        """Fold every committed token now: the history becomes empty and ``position`` advances.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[n]``; negative entries are skipped. Enqueue between a commit and the next run.
        """
        index = self.slots_tensor(slots)
        rows = index.numel()
        if self._step is None:
            self._step = kernels.StepKernel(self.spec, self.device)
        step = self._step
        constants = step.constants(rows)
        buffer = step.params.buffer()
        for layer in range(len(self.layers)):
            step.params.pack(buffer, **self.step_fields(layer), **constants, slots=index.data_ptr(), pad_slot=-1, fold_only=1)
            step.launch(ctypes.addressof(buffer), rows, constants["heads_per_block"])
        self._launch_cursors(index, FLUSH)

    def check(self) -> None:
        """Raise what a commit found wrong on the device; waits for it.

        Raises
        ------
        RuntimeError
            A commit counted more accepted tokens than its row had brought (or fewer than 0); it was taken as 0.
        """
        if int(self.error.item()) & 1:
            self.error.zero_()
            raise RuntimeError("a commit's num_accepted was negative or above the row's num_tokens; it was counted as 0")

    # ---- what the wrapper uses ----------------------------------------------------------------------------------

    def commit(self, slots: torch.Tensor, num_tokens: torch.Tensor | int, num_accepted: torch.Tensor, pad_slot: int) -> None:
        """Close a step; see :meth:`replayssm_jit.ReplayWrapper.commit`."""
        tokens = {"tokens": num_tokens} if isinstance(num_tokens, int) else {"num_tokens": num_tokens.data_ptr()}
        self._cursors.launch(
            slots.numel(),
            slots=slots.data_ptr(),
            num_accepted=num_accepted.data_ptr(),
            ring_start=self.ring_start.data_ptr(),
            history=self.history.data_ptr(),
            position=self.position.data_ptr(),
            error=self.error.data_ptr(),
            buffer_len=self.spec.buffer_len,
            ring_len=self.spec.ring_len,
            pad_slot=pad_slot,
            op=COMMIT,
            **tokens,
        )
        if self.debug:
            self._open.difference_update(slots.tolist())

    def step_fields(self, layer: int) -> dict[str, int]:
        """Fields of the step's parameter struct that name a layer's tensors and weights."""
        weights = self.weights[layer]
        if weights is None:
            if any(not weight.optional for weight in self.spec.weights):
                raise RuntimeError(f"layer {layer} has no weights yet; call cache.set_weights({layer}, ...) once")
            weights = self.weights[layer] = {}
        values = {name: tensor.data_ptr() for name, tensor in weights.items()}
        values |= {"ring_start": self.ring_start.data_ptr(), "history": self.history.data_ptr()}
        for name, tensor in self._layer(layer).items():
            values[name] = tensor.data_ptr()
            values[f"{name}_slot"] = tensor.stride(0)
        return values

    def slots_tensor(self, slots: Slots, name: str = "slots") -> torch.Tensor:
        """Validate slots and bring them to the device.

        Raises
        ------
        ValueError
            Not one-dimensional, empty, not contiguous, on another device, or (a sequence, or in debug mode) out of range or repeated.
        TypeError
            Not int32.
        """
        if not isinstance(slots, torch.Tensor):
            values = list(slots)
            self._check_slot_values(name, values)
            return torch.tensor(values, dtype=torch.int32, device=self.device)
        if slots.dim() != 1 or slots.numel() == 0:
            raise ValueError(f"{name} must have shape [rows] with at least one row, got {list(slots.shape)}")
        _check_vector(name, slots, slots.numel(), torch.int32, self.device)
        if self.debug:
            self._check_slot_values(name, slots.tolist())
        return slots

    def mark_open(self, slots: torch.Tensor, layer: int) -> None:
        """Debug mode: note that slots run, and refuse one whose last step has no commit yet."""
        if layer != 0:
            return
        values = [s for s in slots.tolist() if s >= 0]
        for row, slot in enumerate(values):
            if slot in self._open:
                raise RuntimeError(f"slot {slot} (row {row}) has run and was not committed; commit it before it runs again")
        self._open.update(values)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _check_slot_values(self, name: str, values: list[Any]) -> None:
        if not values:
            raise ValueError(f"{name} must have at least one row, got none")
        seen: dict[int, int] = {}
        for row, slot in enumerate(values):
            if not isinstance(slot, int) or isinstance(slot, bool):
                raise TypeError(f"{name}[{row}] must be an int, got {slot!r}")
            if slot >= self.num_slots:
                raise ValueError(f"{name}[{row}] must be below {self.num_slots} (negative: padding), got {slot}")
            if slot >= 0 and seen.setdefault(slot, row) != row:
                raise ValueError(f"{name} must not repeat a slot, but rows {seen[slot]} and {row} both name {slot}")

    def _check_weight(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32 (convert it once, when the model is loaded), got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")

    def _layer(self, layer: int) -> dict[str, torch.Tensor]:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(self.layers):
            raise ValueError(f"layer must be an int from 0 to {len(self.layers) - 1}, got {layer!r}")
        return self.layers[layer]

    def _state_view(self, name: str, tensor: torch.Tensor, rows: int, layout: str) -> torch.Tensor:
        if layout not in ("vk", "kv"):
            raise ValueError(f"layout must be 'vk' or 'kv', got {layout!r}")
        letters = ("H", "P", "N") if layout == "vk" else ("H", "N", "P")
        shape = (rows, *self.spec.shape(*letters))
        if tensor.dtype not in STATE_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)} ({layout}), got {list(tensor.shape)}")
        if tensor.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got {tensor.device}")
        return tensor if layout == "vk" else tensor.transpose(2, 3)

    def _launch_state(self, layer: dict[str, torch.Tensor], index: torch.Tensor, view: torch.Tensor | None = None, store: int = 0) -> None:
        state = layer["state"]
        values = {"slots": index.data_ptr(), "state": state.data_ptr(), "state_slot": state.stride(0), "pad_slot": -1, "store": store}
        if view is not None:
            strides = zip(("tensor_row", "tensor_head", "tensor_p", "tensor_n"), view.stride(), strict=True)
            values |= {"tensor": view.data_ptr(), "tensor_dtype": STATE_DTYPES[view.dtype], **dict(strides)}
        self._state.launch(index.numel(), self.spec.heads, **values)

    def _launch_cursors(self, index: torch.Tensor, op: int, positions: torch.Tensor | None = None) -> None:
        self._cursors.launch(
            index.numel(),
            slots=index.data_ptr(),
            positions=0 if positions is None else positions.data_ptr(),
            ring_start=self.ring_start.data_ptr(),
            history=self.history.data_ptr(),
            position=self.position.data_ptr(),
            buffer_len=self.spec.buffer_len,
            ring_len=self.spec.ring_len,
            pad_slot=-1,
            op=op,
        )
        if self.debug:
            self._open.difference_update(index.tolist())


_CURSORS = {"ring_start": torch.int32, "history": torch.int32, "position": torch.int64}


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    kernels.backend_of(device)
    return device


def _fresh_cursors(num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(num_slots, dtype=dtype, device=device) for name, dtype in _CURSORS.items()}


def _check_vector(name: str, tensor: torch.Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """A contiguous vector of a given size, dtype and device."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        raise TypeError(f"{name} must be a tensor of {dtype}, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if tuple(tensor.shape) != (size,):
        raise ValueError(f"{name} must have shape [{size}], got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}")


def _check_cache_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        raise TypeError(f"{name} must be a tensor of {dtype}, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    inner = torch.empty(shape[1:], device="meta").stride()
    if tensor.stride()[1:] != inner:
        raise ValueError(f"{name} must be contiguous after the slot dimension (strides {inner}), got {tensor.stride()[1:]}")
    if tensor.data_ptr() % ALIGNMENT or (shape[0] > 1 and tensor.stride(0) * dtype.itemsize % ALIGNMENT):
        raise ValueError(f"{name} must start at, and step its slots by, a multiple of {ALIGNMENT} bytes")
