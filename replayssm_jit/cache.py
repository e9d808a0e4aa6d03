"""Planes, rings and cursors of a set of slots, and moving slots in and out.

A cache owns (``allocate``) or adopts (``from_tensors``) the tensors of several layers that share one set of cursors.
Cursors live on the device and are moved by a commit alone, once a step.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence

import torch

from . import checks, kernels, logging, memory, tactics
from .blob import bit_view, export_slots, import_slots
from .jit import env
from .kernels import COMMIT, COMPARE, DECODE, ENCODE, FLUSH, MOVE, RESET, STATE_DTYPES
from .specs import ReplaySpec

Slots = torch.Tensor | Sequence[int]


class ReplayCache:
    """Checkpoints, rings and cursors of ``num_slots`` slots in every layer.

    Use :meth:`allocate` or :meth:`from_tensors`.

    Attributes
    ----------
    spec : ReplaySpec
        Shapes and precision of every layer.
    spec_text : str
        The same as JSON, for operators that take plain values.
    layers : list of dict of torch.Tensor
        Per layer ``state`` ``[slots, H, P, N]`` in the checkpoint dtype and the rings ``ring_*`` ``[slots, outer, R, inner]``.
        With two planes the memory of ``state`` holds, per slot and head, the upper plane and then the lower one, on CUDA with
        the 64-byte pieces of every 16 rows side by side. 8-bit planes add ``scale`` ``[slots, H, P]``, and beside a float32
        checkpoint ``read_copy`` ``[slots, H, P, N]``.
    ring_start, history : torch.Tensor
        int32 ``[slots]``: where the history begins in the ring, and how many committed tokens it holds.
    position : torch.Tensor
        int64 ``[slots]``: tokens folded into the checkpoint so far.
    cursors : dict of torch.Tensor
        All of them by name. With stochastic rounding also ``seed``, int64 ``[slots]``, which decides with the position what a
        flush draws: 0 in a fresh or loaded slot, the engine's to set, and moved with the slot.
    error : torch.Tensor
        int32 ``[1]``, sticky error bits; see :meth:`check`.
    debug : bool
        Check values that need a device synchronisation: slots in range and distinct, row lengths and counts in range, no slot
        run twice, reset, folded or moved while its step has no commit. Defaults to the environment variable
        ``REPLAYSSM_DEBUG``. Nothing is checked while a graph is captured.
    """

    def __init__(self, spec: ReplaySpec, layers: list[dict[str, torch.Tensor]], cursors: Mapping[str, torch.Tensor]) -> None:
        self.spec = spec
        self.spec_text = json.dumps(spec.describe())
        self.layers = layers
        state = layers[0]["state"]
        self.device = state.device
        self.num_slots = state.shape[0]
        self.cursors = {name: cursors[name] for name in spec.cursors}
        self.ring_start = cursors["ring_start"]
        self.history = cursors["history"]
        self.position = cursors["position"]
        self.weights: list[dict[str, torch.Tensor] | None] = [None] * len(layers)
        self.error = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.debug = env.debug()
        self._open: dict[int, set[int]] = {}  # debug mode: slots that ran without a commit since, and in which layers
        self._trees: dict[int, list[int]] = {}  # debug mode: parents of the nodes that they ran
        self._cursors = kernels.CursorKernel(self.device)
        self._state = kernels.StateKernel(spec, self.device)
        self._compact: kernels.CompactKernel | None = None
        self._fold_kernel: kernels.FoldKernel | None = None
        self._described: list[dict[str, torch.Tensor] | None] | None = None  # weights that the fold kernel's table knows
        moves = ("reset", "load_state", "read_state", "read_error", "flush", "materialize", "copy_slots", "export", "import_")
        logging.attach(self, ("set_weights", *moves))

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
        ValueError, TypeError
            A count is not positive, the device is of another type, or ``spec`` is none.
        """
        _check_spec(spec)
        checks.plain_int("num_layers", num_layers, 1)
        checks.plain_int("num_slots", num_slots, 1)
        where = _indexed(torch.device(device))
        layers = [
            {name: memory.zeros((num_slots, *shape), dtype, where) for name, (shape, dtype) in spec.cache_tensors.items()}
            for _ in range(num_layers)
        ]
        return cls(spec, layers, _fresh_cursors(spec, num_slots, where))

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
            16 bytes and keeps slots apart; the others are contiguous.
        cursors : mapping, optional
            Every tensor of ``spec.cursors``, ``[slots]``: ``ring_start`` and ``history`` (int32), ``position`` and, with
            stochastic rounding, ``seed`` (int64). Fresh ones when absent.

        Raises
        ------
        ValueError
            A tensor is missing, or has the wrong shape, stride, alignment or device.
        TypeError
            A tensor has the wrong dtype.
        """
        _check_spec(spec)
        if not layers:
            raise ValueError("layers must name at least one layer, got none")
        state = checks.tensor("layers[0]['state']", layers[0].get("state"))
        if state.dim() == 0 or state.shape[0] == 0:
            raise ValueError(f"layers[0]['state'] must have at least one slot, got shape {list(state.shape)}")
        device, num_slots = state.device, state.shape[0]
        kernels.backend_of(device)
        adopted: list[dict[str, torch.Tensor]] = []
        for i, layer in enumerate(layers):
            if set(layer) != set(spec.cache_tensors):
                raise ValueError(f"layers[{i}] must have the tensors {sorted(spec.cache_tensors)}, got {sorted(layer)}")
            adopted.append(
                {
                    name: checks.cache_tensor(f"layers[{i}][{name!r}]", layer[name], (num_slots, *shape), dtype, device)
                    for name, (shape, dtype) in spec.cache_tensors.items()
                }
            )
        if cursors is None:
            cursors = _fresh_cursors(spec, num_slots, device)
        for name, dtype in spec.cursors.items():
            if name not in cursors:
                raise ValueError(f"cursors must have {sorted(spec.cursors)}, got {sorted(cursors)}")
            checks.vector(f"cursors[{name!r}]", cursors[name], num_slots, dtype, device)
        return cls(spec, adopted, cursors)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes one slot takes in all layers, cursors included."""
        return len(self.layers) * self.spec.bytes_per_slot + sum(dtype.itemsize for dtype in self.spec.cursors.values())

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
        self.check_layer(layer)
        declared = {weight.name: weight for weight in self.spec.weights}
        unknown = weights.keys() - declared.keys()
        if unknown:
            raise TypeError(f"unknown weight {sorted(unknown)[0]!r}; {self.spec.family} takes {sorted(declared)}")
        present = {name: tensor for name, tensor in weights.items() if tensor is not None}
        for name, weight in declared.items():
            if name in present:
                checks.weight(name, present[name], self.spec.shape(*weight.dims), self.device)
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
        index = self._closed(slots)
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
            ``[n, H, P, N]`` (``layout="vk"``) or ``[n, H, N, P]`` (``"kv"``), float32, bfloat16 or float16, any strides. It may lie in
            the slots' own memory, where a prefill has worked on it as plain float32.
        layout : {"vk", "kv"}
            Which of the state's two dimensions is innermost; transformers and flash-linear-attention keep "kv".
        positions : torch.Tensor, optional
            int64 ``[n]``: tokens each state has seen; 0 when absent.
        """
        self.check_layer(layer)
        index = self._closed(slots)
        view = self._state_view("state", state, index.numel(), layout)
        if positions is not None:
            checks.vector("positions", positions, index.numel(), torch.int64, self.device)
            if self.watching and int(positions.min()) < 0:
                raise ValueError(f"positions must not be negative, got {int(positions.min())} in row {int(positions.argmin())}")
        if _overlap(view, self.layers[layer]["state"]):
            view = view.clone()  # planes of one slot would be written over elements that another one still reads
        self._launch_state(self.layers[layer], index, view)
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
            Where to write: ``[n, H, P, N]`` (``"vk"``) or ``[n, H, N, P]`` (``"kv"``), float32, bfloat16 or float16. It may be the
            slots' own memory, for a prefill to work on; they are no checkpoints then until :meth:`load_state` takes them back.
        layout : {"vk", "kv"}
            Layout of ``out``.

        Returns
        -------
        torch.Tensor
            ``out``, or a fresh float32 tensor.
        """
        self.check_layer(layer)
        index = self.to_device(self.check_slots(slots))
        if out is None:
            shape = self.spec.shape("H", "P", "N") if layout == "vk" else self.spec.shape("H", "N", "P")
            out = torch.zeros(index.numel(), *shape, dtype=torch.float32, device=self.device)
        view = self._state_view("out", out, index.numel(), layout)
        if _overlap(view, self.layers[layer]["state"]):
            plain = view.clone()
            self._launch_state(self.layers[layer], index, plain, store=DECODE)
            view.copy_(plain)
        else:
            self._launch_state(self.layers[layer], index, view, store=DECODE)
        return out

    def read_error(self, slots: Slots | None = None) -> torch.Tensor:
        """How far what steps read is from the whole checkpoints: a monitor for production, enqueued without a synchronisation.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int, optional
            int32 ``[n]``, negative entries are skipped; every slot when absent. Enqueue between a commit and the next run.

        Returns
        -------
        torch.Tensor
            float64 ``[layers, 2]`` on the cache's device: per layer the relative Frobenius error of the read plane, and the largest
            absolute one. 0 with one plane and where all checkpoints are zero.
        """
        index = torch.arange(self.num_slots, dtype=torch.int32, device=self.device) if slots is None else self._closed(slots)
        sums = torch.zeros(len(self.layers), index.numel(), self.spec.heads, 3, dtype=torch.float64, device=self.device)
        for layer, tensors in enumerate(self.layers):
            for first in range(0, index.numel(), checks.MAX_ROWS):
                rows = index[first : first + checks.MAX_ROWS]
                self._launch_state(tensors, rows, store=COMPARE, tensor=sums[layer, first].data_ptr())
        squares = sums[..., :2].sum(dim=(1, 2))
        relative = (squares[:, 0] / squares[:, 1].clamp_min(1e-300)).sqrt()
        return torch.stack([relative, sums[..., 2].amax(dim=(1, 2))], dim=1)

    def flush(self, slots: Slots) -> None:
        """Fold every committed token now: the history becomes empty and ``position`` advances.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[n]``; negative entries are skipped. Enqueue between a commit and the next run.
        """
        index = self._closed(slots)
        self._fold(index, targets=index)
        self._launch_cursors(index, FLUSH)

    def materialize(
        self,
        slots: Slots,
        positions: torch.Tensor | None = None,
        *,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        index: Slots | None = None,
        layout: str = "vk",
        destination: Slots | None = None,
    ) -> torch.Tensor | Sequence[torch.Tensor] | None:
        """The true state of slots after a given number of tokens, all layers, by one launch. The slots stay as they are.

        Any boundary between two tokens that the ring still holds can be had: from the checkpoint, ``position[slot]``, to the last
        committed token, ``position[slot] + history[slot]``. A later flush passes it, so enqueue between a commit and the next run.
        The state is folded as a flush folds it (``docs/method.md``), in float32, and rounded to where it goes. Nothing waits for the
        device, and the call may be captured once it has been made outside a capture.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[n]``; negative entries are skipped. One slot may be named often, at several positions.
        positions : torch.Tensor, optional
            int64 ``[n]``: tokens the state has seen, counted as ``position`` counts them; -1 skips the row. All that is committed
            when absent. A position outside its slot's range skips the row and is reported by :meth:`check`.
        out : torch.Tensor or sequence of torch.Tensor, optional
            Where to write: one tensor ``[layers, n, H, P, N]`` (``layout="vk"``) or ``[layers, n, H, N, P]`` (``"kv"``), or one a
            layer without the first dimension, all of the same dtype and strides. float32, bfloat16 or float16; any strides.
        index : torch.Tensor or sequence of int, optional
            int32 ``[n]``, with ``out``: which element of ``out``'s dimension ``n`` a row goes to, so that ``out`` may be a pool of any
            size. Negative entries skip the row; none may be named twice.
        layout : {"vk", "kv"}
            Layout of ``out``.
        destination : torch.Tensor or sequence of int, optional
            int32 ``[n]``, instead of ``out``: slots of this cache that take the states over, as with :meth:`load_state`: checkpoint, empty
            ring, ``position``. Negative entries skip the row. A row may name its own slot, which then forgets what came after the
            position; the slot of another row it may not.

        Returns
        -------
        torch.Tensor, sequence of torch.Tensor or None
            ``out``, or a fresh float32 tensor with zeros in the rows that were skipped; None with ``destination``.

        Raises
        ------
        ValueError, TypeError
            An argument has the wrong shape, dtype, device or layout, or excludes another; slots are out of range or repeated
            (sequences, or in debug mode); in debug mode a position is out of range.
        RuntimeError
            A layer's weights are missing; in debug mode a slot has run and was not committed.
        """
        source = self._closed(slots, repeats=True)
        rows = source.numel()
        if positions is not None:
            checks.vector("positions", positions, rows, torch.int64, self.device)
        if destination is not None:
            if out is not None or index is not None:
                raise ValueError("destination excludes out and index")
            targets = self._closed(destination, "destination")
            checks.same_rows("destination", targets.numel(), "slots", rows)
            self._check_apart(slots, destination)
            self._check_positions(source, positions)
            self._fold(source, positions, targets)
            self._launch_cursors(source, MOVE, positions, targets)
            return None
        if index is not None and out is None:
            raise ValueError("index needs out")
        count = None
        if index is not None and out is not None:
            count = _pool_size(out)
            given = self.check_slots(index, "index", limit=count)
            checks.same_rows("index", len(given), "slots", rows)
        if out is None:
            letters = ("H", "P", "N") if layout == "vk" else ("H", "N", "P")
            out = torch.zeros(len(self.layers), rows, *self.spec.shape(*letters), dtype=torch.float32, device=self.device)
        views = self._out_views(out, rows if count is None else count, layout)
        self._check_positions(source, positions)
        self._fold(source, positions, None if index is None else self.to_device(given), views)
        return out

    def copy_slots(self, source: Slots, destination: Slots) -> None:
        """Copy slots whole, all layers: checkpoint, ring, cursors. Source and copy then go on independently (fork, beam search).

        All sources are read before a destination is written, so slots may be permuted. Enqueued on the current stream without a
        synchronisation, and may be captured; enqueue between a commit and the next run.

        Parameters
        ----------
        source, destination : torch.Tensor or sequence of int
            int32 ``[n]``; a pair with a negative entry is skipped. A source may be named often, a destination once.

        Raises
        ------
        ValueError, TypeError
            Slots have the wrong shape, dtype or device, are out of range or repeated (sequences, or in debug mode), or the two
            differ in length.
        RuntimeError
            In debug mode: a slot has run and was not committed.
        """
        from_index, to_index = self._closed(source, "source", repeats=True), self._closed(destination, "destination")
        checks.same_rows("destination", to_index.numel(), "source", from_index.numel())
        with torch.inference_mode():  # an engine may have allocated its pool in it
            # A skipped pair repeats the first one that counts, which changes nothing; if none does, slot 0 becomes slot 0.
            counts = (from_index >= 0) & (to_index >= 0)
            first = counts.int().argmax(dim=0, keepdim=True)
            pair = []
            for index in (from_index, to_index):
                instead = torch.where(counts.any(), index.index_select(0, first), 0)
                pair.append(torch.where(counts, index, instead).long())
            tensors = [bit_view(tensor) for layer in self.layers for tensor in layer.values()]
            for tensor in (*tensors, *self.cursors.values()):
                tensor.index_copy_(0, pair[1], tensor.index_select(0, pair[0]))

    def export(self, slots: Slots) -> bytes:
        """Pack slots into bytes on the host: for offloading, preemption, another process. Waits for the device.

        Checkpoints travel as they are, rings without their dead entries, so a slot continues bitwise wherever it is imported.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[n]``, none negative. They are left as they are.

        Returns
        -------
        bytes
            Describes itself: format version, spec, layers, cursors, digest.
        """
        given = self._closed(slots).tolist()
        checks.slot_values("slots", given, self.num_slots)
        if min(given) < 0:
            raise ValueError(f"slots must not be negative, got {min(given)} in row {given.index(min(given))}")
        return export_slots(self, given)

    def import_(self, slots: Slots, blob: bytes | bytearray | memoryview) -> None:
        """Unpack what :meth:`export` returned into slots of this cache, which need not be the ones it came from.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            int32 ``[n]``, one for each exported slot, in the same order; a negative one is skipped.
        blob : bytes
            From a cache of an equal spec and as many layers.

        Raises
        ------
        ValueError, TypeError
            The blob is truncated, damaged or foreign, or the slots do not fit it; nothing has been touched then.
        """
        given = self._closed(slots).tolist()
        checks.slot_values("slots", given, self.num_slots)
        import_slots(self, given, blob)

    def check(self) -> None:
        """Raise what was found wrong on the device; waits for it.

        Raises
        ------
        RuntimeError
            A commit counted more accepted tokens than its row had brought (or fewer than 0), or its nodes were no path; it was
            taken as 0. Or a position of :meth:`materialize` was none that its slot could be brought to; the row was skipped.
        """
        bits = int(self.error.item())
        if bits:
            self.error.zero_()
            raise RuntimeError("; ".join(text for bit, text in _ERRORS.items() if bits & bit))

    # ---- what the wrapper uses ----------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        """Whether values on the device are to be checked now: in debug mode, but not while a graph is captured."""
        return self.debug and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def commit(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor | int,
        num_accepted: torch.Tensor,
        accepted: torch.Tensor | None,
        pad_slot: int,
        order: torch.Tensor | None,
    ) -> None:
        """Close a step; see :meth:`replayssm_jit.ReplayWrapper.commit`."""
        step = {
            "slots": slots.data_ptr(),
            "num_accepted": num_accepted.data_ptr(),
            "ring_start": self.ring_start.data_ptr(),
            "history": self.history.data_ptr(),
            "buffer_len": self.spec.buffer_len,
            "ring_len": self.spec.ring_len,
            "pad_slot": pad_slot,
            **({"tokens": num_tokens} if isinstance(num_tokens, int) else {"num_tokens": num_tokens.data_ptr()}),
            **({} if accepted is None else {"accepted": accepted.data_ptr(), "width": accepted.shape[1]}),
        }
        if accepted is not None:
            self.prepare_paths().launch(slots.numel(), **step)
        self._cursors.launch(
            slots.numel(),
            position=self.position.data_ptr(),
            error=self.error.data_ptr(),
            op=COMMIT,
            order=0 if order is None else order.data_ptr(),
            spread=tactics.flush_spread(self.spec, slots.numel()),
            **step,
        )
        if self.watching:
            counts = [num_tokens] * slots.numel() if isinstance(num_tokens, int) else num_tokens.tolist()
            for slot, count in zip(slots.tolist(), counts, strict=True):
                if count > 0:  # a row that did nothing closes no other step of its slot
                    self._open.pop(slot, None)
                    self._trees.pop(slot, None)

    def prepare_paths(self) -> kernels.CompactKernel:
        """What a commit of trees launches; made with the first plan that has parents, since it cannot be in a capture."""
        if self._compact is None:
            self._compact = kernels.CompactKernel(self.device, [kernels.ring_place(ring) for ring in self.rings])
        return self._compact

    @property
    def rings(self) -> list[torch.Tensor]:
        """Rings of all layers."""
        return [tensor for layer in self.layers for name, tensor in layer.items() if name.startswith("ring_")]

    def layer_fields(self, layer: int) -> dict[str, int]:
        """Fields of a parameter struct that name a layer's tensors and weights."""
        weights = self.weights[layer]
        if weights is None:
            if any(not weight.optional for weight in self.spec.weights):
                raise RuntimeError(f"layer {layer} has no weights yet; call cache.set_weights({layer}, ...) once")
            weights = self.weights[layer] = {}
        values = {name: tensor.data_ptr() for name, tensor in weights.items()}
        for name, tensor in self.layers[layer].items():
            values[name] = tensor.data_ptr()
            values[f"{name}_slot"] = tensor.stride(0)
        return values

    def step_fields(self, layer: int) -> dict[str, int]:
        """Fields of the step's parameter struct that the cache decides."""
        cursors = {name: self.cursors[name].data_ptr() for name in self.spec.step_cursors}
        return self.layer_fields(layer) | cursors | {"layer": layer, "num_slots": self.num_slots}

    def check_layer(self, layer: object) -> None:
        """Refuse what is no layer of this cache."""
        checks.plain_int("layer", layer, 0, len(self.layers) - 1)

    def check_slots(
        self, slots: Slots, name: str = "slots", *, pad_slot: int = -1, repeats: bool = False, limit: int | None = None
    ) -> torch.Tensor | list[int]:
        """Validate slots, without bringing them to the device.

        Parameters
        ----------
        slots : torch.Tensor or sequence of int
            What the caller gave.
        name : str
            What the caller calls it.
        pad_slot : int
            Marks padding, beside negative entries.
        repeats : bool
            Whether a slot may be named twice.
        limit : int, optional
            What indices must stay below; the cache's slots by default.

        Raises
        ------
        ValueError
            Not one-dimensional, empty, not contiguous, on another device, or (a sequence, or in debug mode) out of range or repeated.
        TypeError
            Not int32.
        """
        limit = self.num_slots if limit is None else limit
        if not isinstance(slots, torch.Tensor):
            try:
                values = list(slots)
            except TypeError:
                raise TypeError(f"{name} must be an int32 tensor or a sequence of ints, got {slots!r}") from None
            checks.slot_values(name, values, limit, pad_slot, repeats)
            checks.rows(name, len(values))
            return values
        if slots.dim() != 1 or slots.numel() == 0:
            raise ValueError(f"{name} must have shape [rows] with at least one row, got {list(slots.shape)}")
        checks.vector(name, slots, slots.numel(), torch.int32, self.device)
        checks.rows(name, slots.numel())
        if self.watching:
            checks.slot_values(name, slots.tolist(), limit, pad_slot, repeats)
        return slots

    def to_device(self, slots: torch.Tensor | list[int]) -> torch.Tensor:
        """Bring checked slots to the device; nothing waits for it."""
        if isinstance(slots, torch.Tensor):
            return slots
        if self.device.type == "cpu":
            return on_host(slots)
        return on_host(slots, pin_memory=True).to(self.device, non_blocking=True)

    def open(self, layer: int, slots: torch.Tensor, lengths: list[int], pad_slot: int, trees: list[list[int]] | None) -> None:
        """Debug mode: note that a layer of these slots runs, and refuse a slot whose last step of it has no commit yet."""
        rows = [(row, slot) for row, (slot, t) in enumerate(zip(slots.tolist(), lengths, strict=True)) if 0 <= slot != pad_slot and t > 0]
        for row, slot in rows:
            if layer in self._open.get(slot, ()):
                raise RuntimeError(f"slot {slot} (row {row}) has run layer {layer} and was not committed; commit it before it runs again")
        for row, slot in rows:
            self._open.setdefault(slot, set()).add(layer)
            if trees is not None:
                self._trees[slot] = trees[row]

    def tree_of(self, slot: int) -> list[int] | None:
        """Debug mode: parents of the nodes that an open slot has run; None if it has run no tree."""
        return self._trees.get(slot)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _closed(self, slots: Slots, name: str = "slots", repeats: bool = False) -> torch.Tensor:
        """Slots on the device that are about to be changed or moved; in debug mode none of them may be open."""
        given = self.check_slots(slots, name, repeats=repeats)
        if self.watching and self._open:
            for row, slot in enumerate(given.tolist() if isinstance(given, torch.Tensor) else given):
                if slot in self._open:
                    raise RuntimeError(f"slot {slot} ({name}[{row}]) has run and was not committed; commit it before anything else")
        return self.to_device(given)

    def _check_apart(self, slots: Slots, destination: Slots) -> None:
        """Where the host knows them: no destination is the source of another row, which would see it half written."""
        if not self.watching and (isinstance(slots, torch.Tensor) or isinstance(destination, torch.Tensor)):
            return
        source, to = ([int(slot) for slot in given] for given in (slots, destination))
        for row, slot in enumerate(to):
            if slot >= 0 and any(other == slot for i, other in enumerate(source) if i != row and to[i] >= 0):
                raise ValueError(f"destination[{row}] must not be the slot of another row, got {slot}")

    def _check_positions(self, slots: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Debug mode: every position is one that its slot can be brought to."""
        if positions is None or not self.watching:
            return
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            low = int(self.position[max(slot, 0)])
            high = low + int(self.history[max(slot, 0)])
            if slot >= 0 and position != -1 and not low <= position <= high:
                raise ValueError(f"positions[{row}] (slot {slot}) must be from {low} to {high}, or -1, got {position}")

    def _out_views(self, out: object, rows: int, layout: str) -> list[torch.Tensor]:
        """Per layer where to write, ``[rows, H, P, N]``: of one dtype, at the same strides."""
        count = len(self.layers)
        if not isinstance(out, torch.Tensor | list | tuple):
            raise TypeError(f"out must be a tensor or a sequence of one tensor a layer, got {type(out).__name__}")
        shape = list(out.shape) if isinstance(out, torch.Tensor) else [len(out)]
        if not shape or shape[0] != count:
            raise ValueError(f"out must have {count} layers, one of its elements each, got {shape}")
        views = [self._state_view(f"out[{layer}]", tensor, rows, layout) for layer, tensor in enumerate(out)]
        for layer, view in enumerate(views):
            if view.dtype != views[0].dtype:
                raise TypeError(f"out[{layer}] must have the dtype of out[0], {views[0].dtype}, got {view.dtype}")
            if view.stride() != views[0].stride():
                raise ValueError(f"out[{layer}] must have the strides of out[0], got {out[layer].stride()}")
        return views

    def _fold(
        self,
        index: torch.Tensor,
        positions: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        views: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Bring slots to positions and leave the states in ``views``, or in the slots ``targets``, in one launch."""
        if self._fold_kernel is None:
            self._fold_kernel = kernels.FoldKernel(self.spec, len(self.layers), self.device)
        if self._described is None or any(now is not then for now, then in zip(self.weights, self._described, strict=True)):
            self._fold_kernel.describe([self.layer_fields(layer) for layer in range(len(self.layers))])
            self._described = list(self.weights)
        values = {
            "slots": index.data_ptr(),
            "positions": 0 if positions is None else positions.data_ptr(),
            "targets": 0 if targets is None else targets.data_ptr(),
            "error": self.error.data_ptr(),
        }
        values |= {name: cursor.data_ptr() for name, cursor in self.cursors.items()}
        addresses: list[int] = []
        if views is not None:
            addresses = [view.data_ptr() for view in views]
            values |= dict(zip(("out_row", "out_head", "out_p", "out_n"), views[0].stride(), strict=True))
            values["out_dtype"] = STATE_DTYPES[views[0].dtype]
        self._fold_kernel.launch(index.numel(), addresses, **values)

    def _state_view(self, name: str, value: object, rows: int, layout: str) -> torch.Tensor:
        if layout not in ("vk", "kv"):
            raise ValueError(f"layout must be 'vk' or 'kv', got {layout!r}")
        letters = ("H", "P", "N") if layout == "vk" else ("H", "N", "P")
        tensor = checks.typed(name, value, (rows, *self.spec.shape(*letters)), STATE_DTYPES, self.device, f" in layout {layout!r}")
        return tensor if layout == "vk" else tensor.transpose(2, 3)

    def _launch_state(
        self, layer: dict[str, torch.Tensor], index: torch.Tensor, view: torch.Tensor | None = None, store: int = ENCODE, tensor: int = 0
    ) -> None:
        values = {"slots": index.data_ptr(), "pad_slot": -1, "store": store, "tensor": tensor}
        for name in self.spec.state_tensors:
            values |= {name: layer[name].data_ptr(), f"{name}_slot": layer[name].stride(0)}
        if view is not None:
            strides = zip(("tensor_row", "tensor_head", "tensor_p", "tensor_n"), view.stride(), strict=True)
            values |= {"tensor": view.data_ptr(), "tensor_dtype": STATE_DTYPES[view.dtype], **dict(strides)}
        self._state.launch(index.numel(), self.spec.heads, **values)

    def _launch_cursors(
        self, index: torch.Tensor, op: int, positions: torch.Tensor | None = None, targets: torch.Tensor | None = None
    ) -> None:
        self._cursors.launch(
            index.numel(),
            slots=index.data_ptr(),
            positions=0 if positions is None else positions.data_ptr(),
            targets=0 if targets is None else targets.data_ptr(),
            **{name: cursor.data_ptr() for name, cursor in self.cursors.items()},
            buffer_len=self.spec.buffer_len,
            ring_len=self.spec.ring_len,
            pad_slot=-1,
            op=op,
        )


_ERRORS = {
    1: "a commit's num_accepted was negative or above the row's num_tokens, or accepted was no path; it counted as 0",
    2: "a position to materialize was below its slot's checkpoint or above its last committed token; the row was skipped",
}


def on_host(values: list[int], pin_memory: bool = False) -> torch.Tensor:
    """An int32 tensor of ints; torch reuses its pinned memory only when the copies enqueued from it are done, so nothing waits."""
    out = torch.empty(len(values), dtype=torch.int32, pin_memory=pin_memory)
    return out.copy_(torch.frombuffer(array("i", values), dtype=torch.int32))  # several times faster than torch.tensor


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors span common bytes."""
    (a, b), (c, d) = (
        (t.data_ptr(), t.data_ptr() + t.itemsize * (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))))
        for t in (one, other)
    )
    return a < d and c < b


def _pool_size(out: object) -> int:
    """Elements that an index into ``out`` may name; what is no such thing is refused later, by name."""
    if isinstance(out, torch.Tensor):
        return out.shape[1] if out.dim() > 1 else 0
    first = out[0] if isinstance(out, list | tuple) and out else None
    return first.shape[0] if isinstance(first, torch.Tensor) and first.dim() else 0


def _check_spec(spec: object) -> None:
    if not isinstance(spec, ReplaySpec):
        raise TypeError(f"spec must be a Mamba2Spec, GdnSpec or KdaSpec, got {type(spec).__name__}")


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    kernels.backend_of(device)
    return device


def _fresh_cursors(spec: ReplaySpec, num_slots: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(num_slots, dtype=dtype, device=device) for name, dtype in spec.cursors.items()}
