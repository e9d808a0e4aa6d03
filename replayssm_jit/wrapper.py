"""plan / run / commit: one forward step of a batch over every layer of a cache."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .cache import ReplayCache, Slots, _check_vector
from .kernels import StepKernel
from .specs import Input


class ReplayWrapper:
    """Runs steps of a batch.

    ``plan`` once per batch composition, ``run`` once a layer, ``commit`` once a step after sampling. A slot that has run is
    open until exactly one commit closes it, in stream order before any later run, reset or move of that slot.

    Parameters
    ----------
    cache : ReplayCache
        Checkpoints, rings and cursors.
    use_cuda_graph : bool
        Keep slots and row lengths in buffers at fixed addresses, which ``plan`` updates in place, so that a captured step
        serves other slots at replay. Rows and the way their lengths are given are frozen by the first ``plan``.
    max_rows : int, optional
        Rows of the captured step; a smaller batch is padded. Required with ``use_cuda_graph``.
    pad_slot : int
        Slot index that marks a padding row, beside any negative one. Engines that reserve slot 0 set 0.

    Raises
    ------
    ValueError
        ``max_rows`` is missing or not positive, or ``use_cuda_graph`` is asked for on the CPU.
    """

    def __init__(self, cache: ReplayCache, *, use_cuda_graph: bool = False, max_rows: int | None = None, pad_slot: int = -1) -> None:
        if not isinstance(pad_slot, int) or isinstance(pad_slot, bool) or pad_slot >= cache.num_slots:
            raise ValueError(f"pad_slot must be an int below {cache.num_slots}, got {pad_slot!r}")
        if use_cuda_graph:
            if cache.device.type != "cuda":
                raise ValueError(f"use_cuda_graph needs a cache on a CUDA device, got {cache.device}")
            if not isinstance(max_rows, int) or max_rows < 1:
                raise ValueError(f"max_rows must be a positive int with use_cuda_graph, got {max_rows!r}")
        elif max_rows is not None:
            raise ValueError("max_rows belongs to use_cuda_graph=True")
        self.cache, self.spec, self.pad_slot = cache, cache.spec, pad_slot
        self._step = StepKernel(self.spec, cache.device)
        self._frozen = _FrozenBuffers(cache.device, max_rows) if max_rows is not None else None
        self._rows = 0
        self._plan_fields: dict[str, int] = {}
        self._layers: list[_BoundLayer | None] = [None] * len(cache.layers)
        self._declared: dict[str, Input] = {item.name: item for item in self.spec.inputs}
        self._required = {name for name, item in self._declared.items() if not item.optional}

    # ---- plan ---------------------------------------------------------------------------------------------------

    def plan(self, slots: Slots, num_tokens: int | torch.Tensor = 1, *, cu_seqlens: torch.Tensor | None = None) -> None:
        """Fix the batch of the steps to come. Host work only; no device value is read, never inside a capture.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[rows]`` on the cache's device: the slot of each row; negative or ``pad_slot`` marks padding. The tensor is
            kept, not copied (with ``use_cuda_graph`` it is copied into the fixed buffer).
        num_tokens : int or torch.Tensor
            New tokens of every row, 1 to ``max_tokens``; or int32 ``[rows]``, 0 to ``max_tokens`` each, with inputs padded to
            a common length.
        cu_seqlens : torch.Tensor, optional
            int32 ``[rows + 1]``: inputs are packed, ``[tokens, heads, dim]``, and row r owns tokens
            ``cu_seqlens[r] : cu_seqlens[r + 1]``. Takes the place of ``num_tokens``.

        Raises
        ------
        ValueError, TypeError
            An argument has the wrong shape, dtype, device or range; or differs from what a graph has frozen.
        """
        index = self.cache.slots_tensor(slots)
        rows = index.numel()
        fixed = 0
        lengths: torch.Tensor | None = None
        if cu_seqlens is not None:
            if num_tokens != 1:
                raise ValueError("num_tokens and cu_seqlens exclude each other")
            _check_vector("cu_seqlens", cu_seqlens, rows + 1, torch.int32, self.cache.device)
        elif isinstance(num_tokens, torch.Tensor):
            _check_vector("num_tokens", num_tokens, rows, torch.int32, self.cache.device)
            lengths = num_tokens
        else:
            self._check_num_tokens(num_tokens)
            fixed = num_tokens
        if self._frozen is not None:
            index, lengths, cu_seqlens = self._frozen.update(index, fixed, lengths, cu_seqlens, self.pad_slot)
            rows = index.numel()
        self._slots, self._lengths, self._cu_seqlens = index, lengths, cu_seqlens
        self._rows, self._tokens, self._packed = rows, fixed, cu_seqlens is not None
        self._plan_fields = {
            "slots": index.data_ptr(),
            "num_tokens": 0 if lengths is None else lengths.data_ptr(),
            "cu_seqlens": 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            "pad_slot": self.pad_slot,
            **self._step.constants(rows),
        }
        self._layers = [None] * len(self._layers)

    @property
    def slots(self) -> torch.Tensor:
        """int32 ``[rows]``: the planned slots; with ``use_cuda_graph`` the fixed buffer, which an engine may also write itself."""
        self._check_planned()
        return self._slots

    # ---- run ----------------------------------------------------------------------------------------------------

    def run(self, layer: int, *, out: torch.Tensor | None = None, **tensors: torch.Tensor | None) -> torch.Tensor:
        """One layer's step: outputs of the new tokens; their inputs join the ring, the checkpoint is folded where due.

        Parameters
        ----------
        layer : int
            Layer of the cache.
        out : torch.Tensor, optional
            Where to write, ``[rows, T, H, P]`` (packed: ``[tokens, H, P]``), activation dtype, innermost dimension dense.
        **tensors : torch.Tensor
            Inputs by the names of ``spec.inputs``, ``[rows, T, outer, inner]`` (packed: ``[tokens, outer, inner]``), any
            strides with a dense innermost dimension: views of a packed projection are taken as they are.

        Returns
        -------
        torch.Tensor
            ``out``. Rows of padding and tokens past a row's length are zero.

        Raises
        ------
        ValueError, TypeError
            An argument is missing, unknown, or has the wrong shape, dtype, device or stride; the message names it.
        RuntimeError
            There is no plan, or the layer's weights are not set; or, in debug mode, a slot has not been committed since it last ran.
        """
        self._check_planned()
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(self._layers):
            raise ValueError(f"layer must be an int from 0 to {len(self._layers) - 1}, got {layer!r}")
        bound = self._layers[layer]
        signature = _signature(tensors, out)
        if bound is None or bound.signature != signature or bound.weights is not self.cache.weights[layer]:
            bound = self._layers[layer] = self._bind(layer, tensors, out, signature)
        if out is None:
            out = torch.empty(bound.out_shape, dtype=self.spec.dtype, device=self.cache.device)
        if self.cache.debug:
            self.cache.mark_open(self._slots, layer)
        words = bound.words
        addresses = words[bound.out_index] = out.data_ptr()
        for name, index in bound.inputs:
            address = tensors[name].data_ptr()  # type: ignore[union-attr]  # bound.inputs lists the ones present
            words[index] = address
            addresses |= address
        bound.flags[bound.aligned_index] = bound.aligned_strides and addresses % 16 == 0
        self._step.launch(bound.address, self._rows, self._plan_fields["heads_per_block"])
        return out

    # ---- commit -------------------------------------------------------------------------------------------------

    def commit(self, slots: torch.Tensor, num_tokens: torch.Tensor | int, num_accepted: torch.Tensor) -> None:
        """Close a step: accepted tokens join the history, the others are overwritten later.

        All arguments are those of the step that ran, so an engine that schedules ahead may commit at the start of the next one.

        Parameters
        ----------
        slots : torch.Tensor
            int32 ``[rows]``.
        num_tokens : torch.Tensor or int
            int32 ``[rows]``, or one count for all rows: new tokens each row brought.
        num_accepted : torch.Tensor
            int32 ``[rows]``: how many of them are kept (1 + accepted drafts); 0 aborts the row's step. A count above
            ``num_tokens`` is taken as 0 and reported by :meth:`ReplayCache.check`.

        Raises
        ------
        ValueError, TypeError
            An argument has the wrong shape, dtype, device or range.
        """
        if not isinstance(slots, torch.Tensor):
            raise TypeError(f"slots must be an int32 tensor, got {type(slots).__name__}")
        index = self.cache.slots_tensor(slots)
        if isinstance(num_tokens, torch.Tensor):
            _check_vector("num_tokens", num_tokens, index.numel(), torch.int32, self.cache.device)
        else:
            self._check_num_tokens(num_tokens)
        _check_vector("num_accepted", num_accepted, index.numel(), torch.int32, self.cache.device)
        self.cache.commit(index, num_tokens, num_accepted, self.pad_slot)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _check_planned(self) -> None:
        if not self._rows:
            raise RuntimeError("call plan before run")

    def _check_num_tokens(self, num_tokens: int) -> None:
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or not 1 <= num_tokens <= self.spec.max_tokens:
            raise ValueError(
                f"num_tokens must be an int from 1 to max_tokens={self.spec.max_tokens} or an int32 tensor, got {num_tokens!r}"
            )

    def _bind(self, layer: int, tensors: dict[str, torch.Tensor | None], out: torch.Tensor | None, signature: Any) -> _BoundLayer:
        """Validate one layer's arguments and pack everything that their signature decides."""
        unknown = tensors.keys() - self._declared.keys()
        if unknown:
            hint = "; weights are set once, by cache.set_weights" if unknown & {w.name for w in self.spec.weights} else ""
            raise TypeError(f"unknown argument {sorted(unknown)[0]!r}; {self.spec.family} takes {sorted(self._declared)}{hint}")
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        missing = self._required - present.keys()
        if missing:
            raise TypeError(f"missing argument {sorted(missing)[0]!r}; {self.spec.family} needs {sorted(self._required)}")

        first = present[self.spec.inputs[0].name]
        tokens = self._leading(self.spec.inputs[0].name, first)
        fields = dict(self._plan_fields)
        fields |= self.cache.step_fields(layer)
        fields["tokens"] = 0 if self._packed else tokens[-1]
        aligned = True
        for name, tensor in present.items():
            item = self._declared[name]
            dtype = self.spec.dtype_of(item.dtype)
            fields |= self._check_tokens(name, tensor, (*tokens, *self.spec.shape(item.outer, item.inner)), dtype, item.inner is not None)
            aligned &= item.inner is None or self._wide(name, fields, tensor)
        out_shape = (*tokens, *self.spec.shape("H", "P"))
        target = out if out is not None else torch.empty(out_shape, dtype=self.spec.dtype, device="meta")
        fields |= self._check_tokens("out", target, out_shape, self.spec.dtype, True, check_device=out is not None)
        aligned &= self._wide("out", fields, target)

        params = self._step.params
        buffer = params.buffer()
        params.pack(buffer, **fields)
        inputs = tuple((name, params.index[name]) for name in present)
        return _BoundLayer(
            signature, self.cache.weights[layer], buffer, inputs, params.index["out"], _i32_index(params, "aligned"), aligned, out_shape
        )

    def _leading(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Leading dimensions of every token input: (rows, T), or (tokens,) when packed."""
        dims = 3 if self._packed else 4
        if tensor.dim() != dims:
            layout = "[tokens, outer, inner]" if self._packed else "[rows, T, outer, inner]"
            raise ValueError(f"{name} must have {dims} dimensions {layout}, got shape {list(tensor.shape)}")
        if self._packed:
            return (tensor.shape[0],)
        rows, width = tensor.shape[:2]
        if rows != self._rows:
            raise ValueError(f"{name} must have the plan's {self._rows} rows, got shape {list(tensor.shape)}")
        if self._tokens and width != self._tokens:
            raise ValueError(f"{name} must have the plan's {self._tokens} tokens a row, got shape {list(tensor.shape)}")
        if not 1 <= width <= self.spec.max_tokens:
            raise ValueError(f"{name} must have 1 to max_tokens={self.spec.max_tokens} tokens a row, got shape {list(tensor.shape)}")
        return (rows, width)

    def _check_tokens(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, check_device: bool = True
    ) -> dict[str, int]:
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if check_device and tensor.device != self.cache.device:
            raise ValueError(f"{name} must be on {self.cache.device}, got {tensor.device}")
        strides = tensor.stride()
        if dense and strides[-1] != 1 and shape[-1] > 1:
            raise ValueError(f"{name} must have a dense innermost dimension, got strides {strides}")
        row, token, outer = (strides[0], strides[0], strides[1]) if self._packed else strides[:3]
        return {f"{name}_row": row, f"{name}_token": token, f"{name}_outer": outer}

    @staticmethod
    def _wide(name: str, fields: dict[str, int], tensor: torch.Tensor) -> bool:
        """Whether the strides allow 16-byte loads."""
        return all(fields[f"{name}_{axis}"] * tensor.dtype.itemsize % 16 == 0 for axis in ("row", "token", "outer"))


class _BoundLayer:
    """One layer's packed parameters and the places of the addresses that change from call to call."""

    __slots__ = (
        "signature",
        "weights",
        "buffer",
        "address",
        "words",
        "flags",
        "inputs",
        "out_index",
        "aligned_index",
        "aligned_strides",
        "out_shape",
    )

    def __init__(
        self,
        signature: Any,
        weights: dict[str, torch.Tensor] | None,
        buffer: Any,
        inputs: tuple[tuple[str, int], ...],
        out_index: int,
        aligned_index: int,
        aligned_strides: bool,
        out_shape: tuple[int, ...],
    ) -> None:
        self.signature, self.weights, self.buffer, self.inputs = signature, weights, buffer, inputs
        self.out_index, self.aligned_index, self.aligned_strides = out_index, aligned_index, aligned_strides
        self.out_shape = out_shape
        self.address = ctypes.addressof(buffer)
        # All 8-byte members come first, so an address is a word of the buffer at its field's index.
        view = memoryview(buffer).cast("B")
        self.words = view[: len(view) // 8 * 8].cast("Q")
        self.flags = view.cast("i")


class _FrozenBuffers:
    """Slots and row lengths at fixed addresses for CUDA graphs."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._slots = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._cu_seqlens = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._mode: tuple[str, int] | None = None

    def update(
        self, slots: torch.Tensor, tokens: int, lengths: torch.Tensor | None, cu_seqlens: torch.Tensor | None, pad_slot: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        rows = slots.numel()
        if rows > self._slots.numel():
            raise ValueError(f"slots must have at most max_rows={self._slots.numel()} rows, got {rows}")
        mode = ("cu_seqlens", 0) if cu_seqlens is not None else ("num_tokens tensor", 0) if lengths is not None else ("num_tokens", tokens)
        if self._mode not in (None, mode):
            raise ValueError(f"num_tokens was frozen as {self._mode} by the first plan, got {mode}")
        self._mode = mode
        self._slots[:rows].copy_(slots, non_blocking=True)
        self._slots[rows:].fill_(min(pad_slot, -1))
        if lengths is not None:
            self._lengths[:rows].copy_(lengths, non_blocking=True)
            self._lengths[rows:].zero_()
            lengths = self._lengths
        if cu_seqlens is not None:
            self._cu_seqlens[: rows + 1].copy_(cu_seqlens, non_blocking=True)
            self._cu_seqlens[rows + 1 :].copy_(cu_seqlens[-1:].expand(self._slots.numel() - rows), non_blocking=True)
            cu_seqlens = self._cu_seqlens
        return self._slots, lengths, cu_seqlens


def _signature(tensors: dict[str, torch.Tensor | None], out: torch.Tensor | None) -> tuple[Any, ...]:
    """What validation depends on: names, shapes, strides and dtypes."""
    parts: list[Any] = [None if out is None else (out.shape, out.stride(), out.dtype, out.device)]
    for name, tensor in tensors.items():
        parts.append((name, None) if tensor is None else (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    return tuple(parts)


def _i32_index(params: Any, name: str) -> int:
    """Index of an int32 field in an int view of the packed struct."""
    offset = next(row["offset"] for row in params.layout() if row["name"] == name)
    return int(offset) // 4
