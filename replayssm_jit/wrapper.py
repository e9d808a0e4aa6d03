"""plan / run / commit: one forward step of a batch over every layer of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import checks, logging
from .arguments import StepArguments
from .cache import ReplayCache, Slots, on_host
from .kernels import StepKernel
from .tokens import MAX_LAYOUTS, Signature, TokenLayout, signature


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
    ValueError, TypeError
        ``max_rows`` is missing or not positive, ``use_cuda_graph`` is asked for on the CPU, or an argument is none at all.
    """

    def __init__(self, cache: ReplayCache, *, use_cuda_graph: bool = False, max_rows: int | None = None, pad_slot: int = -1) -> None:
        if not isinstance(cache, ReplayCache):
            raise TypeError(f"cache must be a ReplayCache, got {type(cache).__name__}")
        if not isinstance(pad_slot, int) or isinstance(pad_slot, bool) or pad_slot >= cache.num_slots:
            raise ValueError(f"pad_slot must be an int below {cache.num_slots}, got {pad_slot!r}")
        if use_cuda_graph:
            if cache.device.type != "cuda":
                raise ValueError(f"use_cuda_graph needs a cache on a CUDA device, got {cache.device}")
            checks.plain_int("max_rows (with use_cuda_graph)", max_rows, 1)
        elif max_rows is not None:
            raise ValueError("max_rows belongs to use_cuda_graph=True")
        self.cache, self.spec, self.pad_slot = cache, cache.spec, pad_slot
        self._steps = {"step": StepKernel(self.spec, cache.device)}  # "tree" joins them with the first plan that has parents
        params = self._steps["step"].params
        self._frozen = _FrozenBuffers(cache, max_rows, pad_slot) if max_rows is not None else None
        self._rows = 0
        # In which order the blocks of a step take its rows; a commit leaves those first that the next step will flush, since they
        # take longest. Any permutation is right, so a batch that changes in between costs nothing but time.
        self._order: torch.Tensor | None = None
        self._plan_fields: dict[str, int] = {}
        self._layouts: dict[tuple[Any, ...], TokenLayout] = {}
        self._layers = {layer: StepArguments(params, self.spec) for layer in range(len(cache.layers))}
        logging.attach(self, ("plan", "run", "commit"))

    # ---- plan ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        slots: Slots,
        num_tokens: int | torch.Tensor = 1,
        *,
        cu_seqlens: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
    ) -> None:
        """Fix the batch of the steps to come. Host work only; no device value is read, never inside a capture.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[rows]`` on the cache's device: the slot of each row; negative or ``pad_slot`` marks padding. The tensor is
            kept, not copied (with ``use_cuda_graph`` it is copied into the fixed buffer). A sequence travels through pinned
            memory, without a synchronisation.
        num_tokens : int or torch.Tensor
            New tokens of every row, 1 to ``max_tokens``; or int32 ``[rows]``, 0 to ``max_tokens`` each, with inputs padded to
            a common length.
        cu_seqlens : torch.Tensor, optional
            int32 ``[rows + 1]``: inputs are packed, ``[tokens, heads, dim]``, and row r owns tokens
            ``cu_seqlens[r] : cu_seqlens[r + 1]``. Takes the place of ``num_tokens``.
        parents : torch.Tensor, optional
            int32 ``[rows, T]`` (packed: ``[tokens]``): each row's tokens are nodes of a tree of drafts, and node t follows node
            ``parents[r, t]`` of its row, less than t; -1 is the last committed token, and more than one node may follow it. What is
            no such node counts as -1; entries past a row's length are not read. Absent: node t follows node t - 1.

        Raises
        ------
        ValueError, TypeError
            An argument has the wrong shape, dtype, device or range; or differs from what a graph has frozen.
        """
        cache = self.cache
        given = cache.check_slots(slots, pad_slot=self.pad_slot)
        rows = len(given)
        fixed = 0
        lengths: torch.Tensor | None = None
        if cu_seqlens is not None:
            if isinstance(num_tokens, torch.Tensor) or num_tokens != 1:
                raise ValueError("num_tokens and cu_seqlens exclude each other")
            checks.vector("cu_seqlens", cu_seqlens, rows + 1, torch.int32, cache.device)
        elif isinstance(num_tokens, torch.Tensor):
            lengths = checks.vector("num_tokens", num_tokens, rows, torch.int32, cache.device)
        else:
            fixed = self._fixed_tokens(num_tokens)
        if parents is not None:
            checks.parents(parents, rows, self.spec.max_tokens, cache.device, cu_seqlens is not None, fixed)
        if cache.watching:
            self._check_lengths(given, lengths, cu_seqlens)
            if parents is not None:
                self._check_trees(given, _row_values(parents, _counts(rows, fixed, lengths, cu_seqlens), cu_seqlens))
        step = self._step_kernel("step" if parents is None else "tree")
        if self._frozen is None:
            index = cache.to_device(given)
        else:
            index, lengths, cu_seqlens, parents = self._frozen.update(given, fixed, lengths, cu_seqlens, parents)
            rows = index.numel()
        fields, self._launch = step.plan(rows)
        if self._order is None or self._order.numel() != rows:
            self._order = torch.arange(rows, dtype=torch.int32, device=cache.device) if step.ordered(rows) else None
        self._slots, self._lengths, self._cu_seqlens, self._parents = index, lengths, cu_seqlens, parents
        self._rows, self._tokens, self._packed = rows, fixed, cu_seqlens is not None
        # What inputs must bring: tokens a row, or when packed at most so many in all; None: any number.
        self._width = parents.shape[-1] if parents is not None else fixed or None
        self._plan_fields = {
            **fields,
            "slots": index.data_ptr(),
            "num_tokens": 0 if lengths is None else lengths.data_ptr(),
            "cu_seqlens": 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            "parents": 0 if parents is None else parents.data_ptr(),
            "pad_slot": self.pad_slot,
            "order": 0 if self._order is None else self._order.data_ptr(),
        }

    @property
    def slots(self) -> torch.Tensor:
        """int32 ``[rows]``: the planned slots; with ``use_cuda_graph`` the fixed buffer, which an engine may also write itself."""
        self._check_planned()
        return self._slots

    @property
    def planned(self) -> dict[str, torch.Tensor | int | None] | None:
        """Arguments of the plan that stands; None before the first."""
        if not self._rows:
            return None
        if self._cu_seqlens is not None:
            return {"slots": self._slots, "cu_seqlens": self._cu_seqlens, "parents": self._parents}
        lengths = self._tokens if self._lengths is None else self._lengths
        return {"slots": self._slots, "num_tokens": lengths, "parents": self._parents}

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
        cache = self.cache
        if type(layer) is not int or layer not in self._layers:
            cache.check_layer(layer)
        bound = self._layers[layer]
        given = signature(tensors, out)
        if bound.signature != given or bound.plan is not self._plan_fields or bound.weights is not cache.weights[layer]:
            self._bind(bound, layer, given, tensors, out)
        if out is None:
            out = torch.empty(bound.out_shape, dtype=self.spec.dtype, device=cache.device)
        if cache.debug and cache.watching:
            lengths = _counts(self._rows, self._tokens, self._lengths, self._cu_seqlens)
            trees = None if self._parents is None else _row_values(self._parents, lengths, self._cu_seqlens)
            cache.open(layer, self._slots, lengths, self.pad_slot, trees)
        bound.point(tensors, out)
        self._launch(bound.address)
        return out

    # ---- commit -------------------------------------------------------------------------------------------------

    def commit(
        self, slots: torch.Tensor, num_tokens: torch.Tensor | int, num_accepted: torch.Tensor, *, accepted: torch.Tensor | None = None
    ) -> None:
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
        accepted : torch.Tensor, optional
            int32 ``[rows, nodes]``, of a tree: the accepted path, ``num_accepted`` nodes of the row from a root on. Their ring
            entries move together, in all layers. Nodes that do not increase, or that the row did not bring, are no path: the row
            keeps none, which :meth:`ReplayCache.check` reports. That each follows the one before is checked in debug mode only.
            Absent: the first ``num_accepted`` nodes.

        Raises
        ------
        ValueError, TypeError
            An argument has the wrong shape, dtype, device or range; in debug mode a count is out of range, or a path none of the
            row's tree.
        """
        index = self.cache.check_slots(checks.tensor("slots", slots), pad_slot=self.pad_slot)
        assert isinstance(index, torch.Tensor)
        if isinstance(num_tokens, torch.Tensor):
            checks.vector("num_tokens", num_tokens, len(index), torch.int32, self.cache.device)
        else:
            self._fixed_tokens(num_tokens)
        checks.vector("num_accepted", num_accepted, len(index), torch.int32, self.cache.device)
        if accepted is not None:
            checks.nodes("accepted", accepted, len(index), self.spec.max_tokens, self.cache.device)
        if self.cache.watching:
            self._check_counts("num_accepted", index, num_accepted, num_tokens)
            self._check_paths(index, num_tokens, num_accepted, accepted)
        order = self._order if self._order is not None and self._order.numel() == index.numel() else None
        self.cache.commit(index, num_tokens, num_accepted, accepted, self.pad_slot, order)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _check_planned(self) -> None:
        if not self._rows:
            raise RuntimeError("call plan before run")

    def _fixed_tokens(self, num_tokens: int) -> int:
        return checks.plain_int("num_tokens (or an int32 tensor)", num_tokens, 1, self.spec.max_tokens)

    def _step_kernel(self, kind: str) -> StepKernel:
        if kind not in self._steps:
            self._steps[kind] = StepKernel(self.spec, self.cache.device, kind)
            self.cache.prepare_paths()
        return self._steps[kind]

    def _check_trees(self, slots: torch.Tensor | list[int], trees: list[list[int]]) -> None:
        """Debug mode: every node follows an earlier one, or none."""
        for row, slot, tree in self._live(slots, trees):
            for t, parent in enumerate(tree):
                if not -1 <= parent < t:
                    raise ValueError(f"parents of row {row} (slot {slot}) must be from -1 to {t - 1} for node {t}, got {parent}")

    def _check_paths(
        self, slots: torch.Tensor, num_tokens: torch.Tensor | int, num_accepted: torch.Tensor, accepted: torch.Tensor | None
    ) -> None:
        """Debug mode: what is accepted is a path of the tree that the slot has run."""
        counts = num_accepted.tolist()
        limits = [num_tokens] * len(counts) if isinstance(num_tokens, int) else num_tokens.tolist()
        paths = [list(range(count)) for count in counts] if accepted is None else accepted.tolist()
        for row, slot, (count, limit, path) in self._live(slots, list(zip(counts, limits, paths, strict=True))):
            where = f"accepted[{row}] (slot {slot})"
            if count > len(path):
                raise ValueError(f"{where} must have num_accepted={count} nodes, got {len(path)}")
            tree, last = self.cache.tree_of(slot), -1
            limit = limit if tree is None else min(limit, len(tree))
            for node in path[:count]:
                if not last < node < limit:
                    raise ValueError(f"{where} must rise from node to node below {limit}, got {path[:count]}")
                if tree is not None and tree[node] != last:
                    raise ValueError(f"{where} must be a path of the row's tree, but node {node} follows {tree[node]}, got {path[:count]}")
                last = node

    def _live(self, slots: torch.Tensor | list[int], values: list[Any]) -> Iterator[tuple[int, int, Any]]:
        """Row, slot and value of the rows that are no padding."""
        for row, (slot, value) in enumerate(zip(slots.tolist() if isinstance(slots, torch.Tensor) else slots, values, strict=True)):
            if 0 <= slot != self.pad_slot:
                yield row, slot, value

    def _check_lengths(self, slots: torch.Tensor | list[int], lengths: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> None:
        """Debug mode: row lengths, which only the device knows, are in range."""
        if cu_seqlens is not None:
            if int(cu_seqlens[0]) < 0:
                raise ValueError(f"cu_seqlens[0] must not be negative, got {int(cu_seqlens[0])}")
            self._check_counts("the difference of cu_seqlens", slots, cu_seqlens.diff(), self.spec.max_tokens)
        elif lengths is not None:
            self._check_counts("num_tokens", slots, lengths, self.spec.max_tokens)

    def _check_counts(self, name: str, slots: torch.Tensor | list[int], counts: torch.Tensor, most: torch.Tensor | int) -> None:
        """Debug mode: counts on the device are from 0 to each row's most, but for padding, whose counts nobody reads."""
        limits = [most] * len(slots) if isinstance(most, int) else most.tolist()
        for row, slot, (count, limit) in self._live(slots, list(zip(counts.tolist(), limits, strict=True))):
            if not 0 <= count <= limit:
                raise ValueError(f"{name}[{row}] (slot {slot}) must be from 0 to {limit}, got {count}")

    def _bind(
        self,
        bound: StepArguments,
        layer: int,
        given: Signature | None,
        tensors: dict[str, torch.Tensor | None],
        out: torch.Tensor | None,
    ) -> None:
        """Validate a layer's arguments, once a signature, and write everything that it and the plan decide."""
        self._check_planned()
        key = (self._rows, self._width, self._packed, *(given or ()))
        layout = self._layouts.get(key) if given is not None else None
        if layout is None:
            layout = TokenLayout(self.spec, self.cache.device, tensors, out, self._rows, self._width, self._packed)
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        assert given is not None  # the layout has refused what is no tensor
        if bound.weights is None or bound.weights is not self.cache.weights[layer]:
            fields = self.cache.step_fields(layer)  # refuses a layer without the weights it needs
            bound.pack(fields, self.cache.weights[layer])
        bound.stamp(self._plan_fields, given, layout)


def _counts(rows: int, fixed: int, lengths: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> list[int]:
    """Debug mode: tokens of every row."""
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
    return [fixed] * rows if lengths is None else lengths.tolist()


def _row_values(nodes: torch.Tensor, counts: list[int], cu_seqlens: torch.Tensor | None) -> list[list[int]]:
    """Debug mode: every row's part of a tensor of nodes, padded or packed."""
    values = nodes.tolist()
    if cu_seqlens is None:
        return [row[:count] for row, count in zip(values, counts, strict=True)]
    return [values[start : start + count] for start, count in zip(cu_seqlens.tolist(), counts, strict=False)]


class _FrozenBuffers:
    """Slots, row lengths and trees at fixed addresses for CUDA graphs."""

    def __init__(self, cache: ReplayCache, max_rows: int, pad_slot: int) -> None:
        self._cache, self._max_rows, self._padding = cache, max_rows, min(pad_slot, -1)
        self._slots = torch.full((max_rows,), self._padding, dtype=torch.int32, device=cache.device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=cache.device)
        self._cu_seqlens = torch.zeros(max_rows + 1, dtype=torch.int32, device=cache.device)
        self._parents = torch.full((max_rows * cache.spec.max_tokens,), -1, dtype=torch.int32, device=cache.device)
        self._mode: tuple[str, int] | None = None
        self._nodes = 0  # a row, -1 when packed, 0 without trees

    def update(
        self,
        slots: torch.Tensor | list[int],
        tokens: int,
        lengths: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        parents: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Copy a batch into the buffers, in stream order; rows that it does not have become padding."""
        rows, most = len(slots), self._max_rows
        if rows > most:
            raise ValueError(f"slots must have at most max_rows={most} rows, got {rows}")
        mode = ("cu_seqlens", 0) if cu_seqlens is not None else ("num_tokens tensor", 0) if lengths is not None else ("num_tokens", tokens)
        if self._mode not in (None, mode):
            raise ValueError(f"num_tokens was frozen as {self._mode} by the first plan, got {mode}")
        nodes = 0 if parents is None else -1 if cu_seqlens is not None else parents.shape[1]
        if self._mode is not None and nodes != self._nodes:
            raise ValueError(f"parents were frozen with {self._nodes} nodes a row (0: none, -1: packed) by the first plan, got {nodes}")
        if parents is not None and parents.numel() > self._parents.numel():
            raise ValueError(f"parents must have at most {self._parents.numel()} nodes, got {parents.numel()}")
        self._mode, self._nodes = mode, nodes
        if isinstance(slots, list):
            padded = slots + [self._padding] * (most - rows)
            self._slots.copy_(on_host(padded, pin_memory=True), non_blocking=True)
        else:
            self._slots[:rows].copy_(slots, non_blocking=True)
            if rows < most:
                self._slots[rows:].fill_(self._padding)
        if lengths is not None:
            self._lengths[:rows].copy_(lengths, non_blocking=True)
            if rows < most:
                self._lengths[rows:].zero_()
            lengths = self._lengths
        if cu_seqlens is not None:
            self._cu_seqlens[: rows + 1].copy_(cu_seqlens, non_blocking=True)
            if rows < most:
                self._cu_seqlens[rows + 1 :].copy_(cu_seqlens[-1:].expand(most - rows), non_blocking=True)
            cu_seqlens = self._cu_seqlens
        if parents is not None:
            self._parents[: parents.numel()].copy_(parents.flatten(), non_blocking=True)
            parents = self._parents if nodes < 0 else self._parents[: most * nodes].view(most, nodes)
        return self._slots, lengths, cu_seqlens, parents
