"""A step and its commit as ``torch.library`` operators, for ``torch.compile``, ``torch.export`` and other tracers.

:func:`run` and :func:`commit` are what :class:`replayssm_jit.ReplayWrapper` does, without its plan and its state between calls: they name
every tensor that they read or change, so a tracer sees the whole step. Eager engines are served faster by the wrapper. Results
are the same bits. The operators themselves are ``torch.ops.replayssm_jit.step`` and ``torch.ops.replayssm_jit.commit``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from . import checks
from .arguments import StepArguments
from .cache import ReplayCache
from .kernels import COMMIT, CompactKernel, CursorKernel, RingPlace, StepKernel, ring_place
from .specs import ReplaySpec, spec_from
from .tokens import MAX_LAYOUTS, TokenLayout, signature

_STEP = (
    "(str spec, Tensor(a!)[] cache, Tensor[] cursors, Tensor?[] weights, Tensor slots, Tensor? num_tokens, Tensor? cu_seqlens, "
    "Tensor? parents, Tensor?[] inputs, int layer, int pad_slot) -> Tensor"
)
_COMMIT = (
    "(Tensor(a!) ring_start, Tensor(b!) history, Tensor(c!) position, Tensor(d!) error, Tensor(e!)[] rings, Tensor slots, "
    "Tensor? num_tokens, int tokens, Tensor num_accepted, Tensor? accepted, int buffer_len, int ring_len, int pad_slot) -> ()"
)


def run(
    cache: ReplayCache,
    layer: int,
    slots: torch.Tensor,
    *,
    num_tokens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    pad_slot: int = -1,
    **inputs: torch.Tensor | None,
) -> torch.Tensor:
    """One layer's step; see :meth:`replayssm_jit.ReplayWrapper.run`.

    Parameters
    ----------
    cache : ReplayCache
        Checkpoints, rings, cursors and weights.
    layer : int
        Layer of the cache.
    slots : torch.Tensor
        int32 ``[rows]`` on the cache's device: the slot of each row; negative or ``pad_slot`` marks padding.
    num_tokens : torch.Tensor, optional
        int32 ``[rows]``: new tokens of each row, 0 to ``max_tokens``. When absent every row brings all of its inputs' tokens.
    cu_seqlens : torch.Tensor, optional
        int32 ``[rows + 1]``: inputs are packed; takes the place of ``num_tokens``.
    parents : torch.Tensor, optional
        int32 ``[rows, T]`` (packed: ``[tokens]``): rows bring trees; see :meth:`replayssm_jit.ReplayWrapper.plan`.
    pad_slot : int
        Slot that marks padding beside negative ones.
    **inputs : torch.Tensor
        Inputs by the names of ``spec.inputs``, ``[rows, T, outer, inner]`` (packed: ``[tokens, outer, inner]``).

    Returns
    -------
    torch.Tensor
        ``[rows, T, H, P]`` (packed: ``[tokens, H, P]``), activation dtype.

    Raises
    ------
    ValueError, TypeError
        An argument is missing, unknown, or has the wrong shape, dtype, device or stride; the message names it.
    """
    spec = cache.spec
    names = [item.name for item in spec.inputs]
    for name in inputs:
        if name not in names:
            raise TypeError(f"unknown argument {name!r}; {spec.family} takes {names}")
    tensors, weights = cache.layers[layer], cache.weights[layer]
    out: torch.Tensor = torch.ops.replayssm_jit.step(
        cache.spec_text,
        list(tensors.values()),
        [cache.cursors[name] for name in spec.step_cursors],
        [None if weights is None else weights.get(weight.name) for weight in spec.weights],
        slots,
        num_tokens,
        cu_seqlens,
        parents,
        [inputs.get(name) for name in names],
        layer,
        pad_slot,
    )
    return out


def commit(
    cache: ReplayCache,
    slots: torch.Tensor,
    num_tokens: torch.Tensor | int,
    num_accepted: torch.Tensor,
    *,
    accepted: torch.Tensor | None = None,
    pad_slot: int = -1,
) -> None:
    """Close a step; see :meth:`replayssm_jit.ReplayWrapper.commit`.

    Parameters
    ----------
    cache : ReplayCache
        Whose cursors move.
    slots : torch.Tensor
        int32 ``[rows]``.
    num_tokens : torch.Tensor or int
        int32 ``[rows]``, or one count for all rows: new tokens each row brought.
    num_accepted : torch.Tensor
        int32 ``[rows]``: how many of them are kept; 0 aborts the row's step.
    accepted : torch.Tensor, optional
        int32 ``[rows, nodes]``, of a tree: the accepted path.
    pad_slot : int
        Slot that marks padding beside negative ones.

    Raises
    ------
    ValueError, TypeError
        An argument has the wrong shape, dtype, device or range.
    """
    spec = cache.spec
    if isinstance(num_tokens, torch.Tensor):
        lengths, tokens = num_tokens, 0
    else:
        lengths, tokens = None, checks.plain_int("num_tokens (or an int32 tensor)", num_tokens, 1, spec.max_tokens)
    cursors = cache.ring_start, cache.history, cache.position, cache.error
    rings = [] if accepted is None else cache.rings
    counts = lengths, tokens, num_accepted, accepted
    torch.ops.replayssm_jit.commit(*cursors, rings, slots, *counts, spec.buffer_len, spec.ring_len, pad_slot)


# ---- operators ------------------------------------------------------------------------------------------------------


class Step:
    """One step without a plan: kernel, parameter struct and accepted signatures of one spec, of chains or of trees.

    Parameters
    ----------
    spec : ReplaySpec
        What the cache tensors hold.
    device : torch.device
        Where they are.
    kind : {"step", "tree"}
        Which kernel.
    names : mapping
        What errors call tensors of the cache, cursors and slots, where that is not their own name.
    """

    def __init__(self, spec: ReplaySpec, device: torch.device, kind: str, names: Mapping[str, str] | None = None) -> None:
        self.spec, self.device, self._names = spec, device, names or {}
        self.kernel = StepKernel(spec, device, kind)
        self.arguments = StepArguments(self.kernel.params, spec)
        self.weights = [weight.name for weight in spec.weights]
        self.inputs = [item.name for item in spec.inputs]
        self._layouts: dict[tuple[Any, ...], TokenLayout] = {}

    def run(
        self,
        given: Mapping[str, torch.Tensor | None],
        inputs: Mapping[str, torch.Tensor | None],
        out: torch.Tensor | None = None,
        **flags: int,
    ) -> torch.Tensor:
        """Launch.

        Parameters
        ----------
        given : mapping
            Cache tensors, weights, ``ring_start``, ``history``, ``slots``, ``num_tokens``, ``cu_seqlens`` and ``parents``.
        inputs : mapping
            Token inputs.
        out : torch.Tensor, optional
            Where to write.
        **flags : int
            Further fields of the parameter struct.
        """
        layout = self._layout(given, inputs, out)
        if out is None:
            out = torch.empty(layout.out_shape, dtype=self.spec.dtype, device=self.device)
        slots = given["slots"]
        assert slots is not None  # the layout has refused it
        fields, launch = self.kernel.plan(slots.numel())
        for name, tensor in given.items():
            if tensor is not None:
                fields[name] = tensor.data_ptr()
                if name in self.spec.cache_tensors:
                    fields[f"{name}_slot"] = tensor.stride(0)
        self.arguments.pack(fields | flags, None)
        self.arguments.stamp({}, None, layout)
        self.arguments.point(inputs, out)
        launch(self.arguments.address)
        return out

    def _layout(
        self, given: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None], out: torch.Tensor | None
    ) -> TokenLayout:
        """Validate everything, once a signature."""
        key = (*(signature(given, None) or ()), *(signature(inputs, out) or ()))
        layout = self._layouts.get(key)
        if layout is None:
            rows, packed, parents = self._check(given), given["cu_seqlens"] is not None, given["parents"]
            width = None if parents is None else checks.parents(parents, rows, self.spec.max_tokens, self.device, packed)
            layout = TokenLayout(self.spec, self.device, inputs, out, rows, width, packed)
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout

    def _check(self, given: Mapping[str, torch.Tensor | None]) -> int:
        """Validate all but the inputs; returns the number of rows."""
        spec, device = self.spec, self.device

        def called(name: str) -> str:
            return self._names.get(name, name)

        slots, history = (checks.tensor(called(name), given[name]) for name in ("slots", "history"))
        num_tokens, cu_seqlens = given["num_tokens"], given["cu_seqlens"]
        for name in spec.step_cursors:
            checks.vector(called(name), given[name], history.numel(), spec.cursors[name], device)
        for name, (shape, dtype) in spec.cache_tensors.items():
            checks.cache_tensor(called(name), given[name], (history.numel(), *shape), dtype, device)
        for weight in spec.weights:
            if given[weight.name] is not None:
                checks.weight(weight.name, given[weight.name], spec.shape(*weight.dims), device)
            elif not weight.optional:
                raise TypeError(f"missing weight {weight.name!r}; {spec.family} needs it: call cache.set_weights once")
        rows = slots.numel()
        checks.vector(called("slots"), slots, rows, torch.int32, device)
        checks.rows(called("slots"), rows)
        if num_tokens is not None and cu_seqlens is not None:
            raise ValueError("num_tokens and cu_seqlens exclude each other")
        if num_tokens is not None:
            checks.vector("num_tokens", num_tokens, rows, torch.int32, device)
        if cu_seqlens is not None:
            checks.vector("cu_seqlens", cu_seqlens, rows + 1, torch.int32, device)
        return rows


@lru_cache(maxsize=64)
def _spec(text: str) -> ReplaySpec:
    return spec_from(json.loads(text))


# Parameter structs are rewritten by every call, and a launch on the CPU lets other threads run: each thread has its own.
@lru_cache(maxsize=64)
def _step_of(text: str, device: torch.device, kind: str, thread: int) -> Step:
    return Step(_spec(text), device, kind)


@lru_cache(maxsize=64)
def _cursors_of(device: torch.device, thread: int) -> CursorKernel:
    return CursorKernel(device)


@lru_cache(maxsize=64)
def _compact_of(device: torch.device, rings: tuple[RingPlace, ...], thread: int) -> CompactKernel:
    return CompactKernel(device, rings)


@torch.library.custom_op("replayssm_jit::step", mutates_args=("cache",), schema=_STEP)
def _step(
    spec: str,
    cache: Sequence[torch.Tensor],
    cursors: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    slots: torch.Tensor,
    num_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    parents: torch.Tensor | None,
    inputs: Sequence[torch.Tensor | None],
    layer: int,
    pad_slot: int,
) -> torch.Tensor:
    step = _step_of(spec, cache[0].device, "step" if parents is None else "tree", threading.get_ident())
    given: dict[str, torch.Tensor | None] = {
        **dict(zip(step.spec.cache_tensors, cache, strict=True)),
        **dict(zip(step.weights, weights, strict=True)),
        **dict(zip(step.spec.step_cursors, cursors, strict=True)),
        "slots": slots,
        "num_tokens": num_tokens,
        "cu_seqlens": cu_seqlens,
        "parents": parents,
    }
    tokens = dict(zip(step.inputs, inputs, strict=True))
    return step.run(given, tokens, layer=layer, pad_slot=pad_slot, num_slots=cache[0].shape[0])


@_step.register_fake
def _(
    spec: str,
    cache: Sequence[torch.Tensor],
    cursors: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    slots: torch.Tensor,
    num_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    parents: torch.Tensor | None,
    inputs: Sequence[torch.Tensor | None],
    layer: int,
    pad_slot: int,
) -> torch.Tensor:
    first, known = inputs[0], _spec(spec)
    if first is None:
        raise TypeError(f"missing argument {known.inputs[0].name!r}")
    return first.new_empty((*first.shape[:-2], *known.shape("H", "P")), dtype=known.dtype)


@torch.library.custom_op("replayssm_jit::commit", mutates_args=("ring_start", "history", "position", "error", "rings"), schema=_COMMIT)
def _commit(
    ring_start: torch.Tensor,
    history: torch.Tensor,
    position: torch.Tensor,
    error: torch.Tensor,
    rings: Sequence[torch.Tensor],
    slots: torch.Tensor,
    num_tokens: torch.Tensor | None,
    tokens: int,
    num_accepted: torch.Tensor,
    accepted: torch.Tensor | None,
    buffer_len: int,
    ring_len: int,
    pad_slot: int,
) -> None:
    device, rows = slots.device, slots.numel()
    vectors = {"slots": slots, "num_accepted": num_accepted} | ({} if num_tokens is None else {"num_tokens": num_tokens})
    for name, tensor in vectors.items():
        checks.vector(name, tensor, rows, torch.int32, device)
    cursors = {"ring_start": ring_start, "history": history, "position": position}
    for name, tensor in cursors.items():
        checks.vector(name, tensor, history.numel(), torch.int64 if name == "position" else torch.int32, device)
    checks.vector("error", error, 1, torch.int32, device)
    step = {**vectors, "ring_start": ring_start, "history": history}
    fields = {"tokens": tokens, "buffer_len": buffer_len, "ring_len": ring_len, "pad_slot": pad_slot}
    if accepted is not None:
        step["accepted"] = checks.nodes("accepted", accepted, rows, ring_len - buffer_len, device)
        fields["width"] = accepted.shape[1]
    fields |= {name: tensor.data_ptr() for name, tensor in step.items()}
    thread = threading.get_ident()
    if accepted is not None:
        _compact_of(device, tuple(map(ring_place, rings)), thread).launch(rows, **fields)
    _cursors_of(device, thread).launch(rows, op=COMMIT, position=position.data_ptr(), error=error.data_ptr(), **fields)


@_commit.register_fake
def _(*_: Any) -> None:
    return None
