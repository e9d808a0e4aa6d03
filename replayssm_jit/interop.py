"""Functions with the signatures of ``flashinfer.mamba``, for engines that call those already.

They run this package's kernels on the caller's tensors as they are: the ring of Mamba-2 is laid out like FlashInfer's, the flush rule is
the same, and the caller moves ``ring_start`` and ``prev_num_accepted_tokens`` between steps as it does there. A state tensor of theirs
is one plane, so steps read all of it; two planes need a :class:`replayssm_jit.ReplayCache`. Arguments that choose among FlashInfer's own
kernels are accepted and change nothing. What has no counterpart here is refused by name. Both functions serve the CPU, too.
"""

from __future__ import annotations

import threading
from functools import lru_cache

import torch

from . import checks
from .functional import Step
from .kernels import backend_of
from .specs import Mamba2Spec
from .standard import StandardKernel

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = {
    "ring_x": "x_cache",
    "ring_b": "B_cache",
    "ring_d": "dt_cache",
    "history": "prev_num_accepted_tokens",
    "slots": "state_batch_indices",
}


def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    """One layer's replay step of Mamba-2, as ``flashinfer.mamba.checkpointing_ssu``.

    The buffer holds ``L = R - T`` tokens. A row whose ``prev_num_accepted_tokens`` and new tokens together exceed L folds its history
    into ``state``; the caller then advances ``ring_start`` by that history, modulo R, and the accepted tokens become the history;
    otherwise they join it.

    Parameters
    ----------
    state : torch.Tensor
        ``[slots, H, P, N]``, float32, bfloat16 or float16, dense inside a slot.
    x_cache, B_cache, dt_cache : torch.Tensor
        The ring: ``[slots, H, R, P]`` and ``[slots, G, R, N]`` in the activation dtype, and ``[slots, H, R]`` float32 (after bias and
        softplus).
    ring_start, prev_num_accepted_tokens : torch.Tensor
        int32 ``[slots]``; only read.
    x, z, out : torch.Tensor
        ``[rows, T, H, P]``; with ``cu_seqlens`` ``[1, tokens, H, P]``. The output rows of padding are left as they are.
    dt : torch.Tensor
        ``[rows, T, H, P]`` of stride 0 along P, activation dtype or float32.
    A, D, dt_bias : torch.Tensor
        ``[H, P, N]``, ``[H, P]``, ``[H, P]``, of stride 0 along P and N. float32 and dense along H they are used where they are;
        others are converted at every call.
    B, C : torch.Tensor
        ``[rows, T, G, N]``.
    dt_softplus : bool
        Apply softplus to ``dt + dt_bias``.
    state_batch_indices : torch.Tensor, optional
        ``[rows]``: each row's slot; int64 is converted at every call. Row r's is r when absent.
    pad_slot_id : int
        Marks padding rows, as every negative slot does.
    cu_seqlens, max_seqlen : torch.Tensor and int, optional
        int32 ``[rows + 1]`` of packed inputs, and T, the most tokens a row may have.
    philox_rounds, d_split, enable_pdl, cb_scaled, cumAdt_vec, cb_old, precompute_heads_per_cta, algorithm
        Ignored.

    Returns
    -------
    torch.Tensor
        ``out``.

    Raises
    ------
    ValueError, TypeError
        An argument has the wrong shape, dtype, device or stride, or is ``state_scale`` or ``rand_seed``; the message names it.
    """
    _refuse(state_scale=state_scale, rand_seed=rand_seed)
    if out is None:
        raise TypeError("out must be a tensor, got NoneType")
    packed = cu_seqlens is not None
    if packed != (max_seqlen is not None):
        raise ValueError(f"max_seqlen belongs to cu_seqlens, and is needed with it, got {max_seqlen}")
    shape = _shape("x", x, 4)
    if packed and shape[0] != 1:
        raise ValueError(f"x must have shape [1, tokens, heads, dim] with cu_seqlens, got {list(shape)}")
    tokens = checks.plain_int("max_seqlen", max_seqlen, 1) if packed else shape[1]
    groups, ring_len = _shape("B", B, 4)[2], _shape("x_cache", x_cache, 4)[2]
    if not 1 <= tokens <= ring_len - tokens:
        raise ValueError(f"x_cache must have at least twice as many entries as a row has tokens, {2 * tokens}, got {ring_len}")
    spec = _spec(state, x, dt, groups, ring_len - tokens, tokens, dt_softplus)
    inputs = {"x": x, "dt": _per_head("dt", dt, 3), "B": B, "C": C, "z": z}
    if packed:
        inputs = {name: None if tensor is None else tensor[0] for name, tensor in inputs.items()}
    rows = shape[0] if cu_seqlens is None else checks.tensor("cu_seqlens", cu_seqlens).numel() - 1
    given = {
        "state": state,
        "ring_x": x_cache,
        "ring_b": B_cache,
        "ring_d": dt_cache,
        "ring_start": ring_start,
        "history": prev_num_accepted_tokens,
        **_weights(A, D, dt_bias),
        "slots": _slots("state_batch_indices", state_batch_indices, (rows,), state.device),
        "num_tokens": None,
        "cu_seqlens": cu_seqlens,
        "parents": None,
    }
    step = _step(spec, state.device, threading.get_ident())
    step.run(given, inputs, out[0] if packed else out, pad_slot=pad_slot_id, keep_padding=1)
    return out


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    intermediate_state_scales: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    cache_steps: int = 0,
    algorithm: str = "auto",
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One layer's standard Mamba-2 recurrence, as ``flashinfer.mamba.selective_state_update``: the state is rewritten at every token.

    Parameters
    ----------
    state : torch.Tensor
        ``[slots, H, P, N]``, float32, bfloat16 or float16, dense inside a slot.
    x, z, out : torch.Tensor
        ``[rows, H, P]``, or ``[rows, T, H, P]``. The output rows of padding are zero.
    dt : torch.Tensor
        As ``x``, of stride 0 along P.
    A, D, dt_bias, B, C, dt_softplus, pad_slot_id
        As in :func:`checkpointing_ssu`, B and C without T where x has none.
    state_batch_indices : torch.Tensor, optional
        ``[rows]``: the slot that each row reads. Row r's is r when absent.
    dst_state_batch_indices : torch.Tensor, optional
        The slot that each row writes after its last token, ``[rows]``, or after every token, ``[rows, T]``. Without it the slot
        that the row reads.
    cache_steps : int
        With 1 or more, inputs without T count as ``T = 1``, and so does the output.
    philox_rounds, algorithm, backend
        Ignored.

    Returns
    -------
    torch.Tensor
        ``out``, or a fresh tensor.

    Raises
    ------
    ValueError, TypeError
        An argument has the wrong shape, dtype, device or stride, or is one of ``state_scale``, ``rand_seed``, ``cu_seqlens``,
        ``num_accepted_tokens``, ``disable_state_update`` and those that begin with ``intermediate``; the message names it. Drafts
        are verified by :func:`checkpointing_ssu`, which needs none of them.
    """
    _refuse(
        state_scale=state_scale,
        rand_seed=rand_seed,
        disable_state_update=disable_state_update or None,
        intermediate_states_buffer=intermediate_states_buffer,
        intermediate_state_indices=intermediate_state_indices,
        intermediate_state_scales=intermediate_state_scales,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
    )
    dims = checks.tensor("x", x).dim()
    if dims not in (3, 4):
        raise ValueError(f"x must have 3 or 4 dimensions [rows, heads, dim] or [rows, T, heads, dim], got shape {list(x.shape)}")
    rows, groups = x.shape[0], _shape("B", B, dims)[-2]
    inputs = {"x": x, "dt": _per_head("dt", dt, dims - 1), "B": B, "C": C} | ({} if z is None else {"z": z})
    if dims == 3:
        inputs = {name: checks.tensor(name, tensor).unsqueeze(1) for name, tensor in inputs.items()}
    spec = _spec(state, x, dt, groups, 1, 1, dt_softplus)
    tokens = inputs["x"].shape[1]
    slots = _slots("state_batch_indices", state_batch_indices, (rows,), state.device)
    write_slots = None
    if dst_state_batch_indices is not None:
        every = checks.tensor("dst_state_batch_indices", dst_state_batch_indices).dim() > 1
        shape = (rows, tokens) if every else (rows,)
        write_slots = _slots("dst_state_batch_indices", dst_state_batch_indices, shape, state.device)
        write_slots = (write_slots if every else write_slots[:, None].expand(rows, tokens)).contiguous()
    if out is None:
        out = torch.empty(x.shape if cache_steps < 1 else inputs["x"].shape, dtype=x.dtype, device=x.device)
    target = out if checks.tensor("out", out).dim() == 4 else out.unsqueeze(1)
    weights = {name: weight for name, weight in _weights(A, D, dt_bias).items() if weight is not None}
    _standard(spec, state.device).run(state, slots, write_slots, out=target, pad_slot=pad_slot_id, **inputs, **weights)
    return out


# ---- helpers --------------------------------------------------------------------------------------------------------


def _refuse(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} has no counterpart here: it must be left out")


def _shape(name: str, value: object, dims: int) -> tuple[int, ...]:
    tensor = checks.tensor(name, value)
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {list(tensor.shape)}")
    return tuple(tensor.shape)


def _per_head(name: str, value: object, dims: int) -> torch.Tensor:
    """The first ``dims`` dimensions of a tensor that is constant along the others, where its strides say so."""
    tensor = checks.tensor(name, value)
    if tensor.dim() < dims + 1 or any(
        stride and size > 1 for stride, size in zip(tensor.stride()[dims:], tensor.shape[dims:], strict=True)
    ):
        raise ValueError(
            f"{name} must be one number a head: {dims} dimensions and then stride 0, got shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )
    while tensor.dim() > dims:
        tensor = tensor.select(-1, 0)
    return tensor


def _weights(A: torch.Tensor, D: torch.Tensor | None, dt_bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    weights: dict[str, torch.Tensor | None] = {}
    for name, value in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        weights[name] = None if value is None and name != "A" else _per_head(name, value, 1).to(torch.float32).contiguous()
    return weights


def _slots(name: str, given: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Slots as int32; row r's is r when absent."""
    if given is None:
        return torch.arange(shape[0], dtype=torch.int32, device=device)
    return checks.typed(name, given, shape, (torch.int32, torch.int64), device).to(torch.int32)


def _spec(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, groups: int, buffer_len: int, max_tokens: int, dt_softplus: bool
) -> Mamba2Spec:
    _, heads, head_dim, state_dim = _shape("state", state, 4)
    for name, tensor in (("state", state), ("x", x), ("dt", checks.tensor("dt", dt))):
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
    if dt.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"dt must be float32 or of x's dtype {x.dtype}, got {dt.dtype}")
    backend_of(state.device)
    return _cached_spec(heads, groups, head_dim, state_dim, buffer_len, max_tokens, x.dtype, state.dtype, dt.dtype, bool(dt_softplus))


@lru_cache(maxsize=256)
def _cached_spec(
    heads: int,
    groups: int,
    head_dim: int,
    state_dim: int,
    buffer_len: int,
    max_tokens: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    dt_dtype: torch.dtype,
    dt_softplus: bool,
) -> Mamba2Spec:
    return Mamba2Spec(
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        state_dim=state_dim,
        buffer_len=buffer_len,
        max_tokens=max_tokens,
        dtype=dtype,
        checkpoint_dtype=state_dtype,
        read_dtype=state_dtype,
        dt_dtype=dt_dtype,
        dt_softplus=dt_softplus,
    )


# Parameter structs are rewritten by every call, and a launch on the CPU lets other threads run: each thread has its own.
@lru_cache(maxsize=64)
def _step(spec: Mamba2Spec, device: torch.device, thread: int) -> Step:
    return Step(spec, device, "step", _NAMES)


@lru_cache(maxsize=64)
def _standard(spec: Mamba2Spec, device: torch.device) -> StandardKernel:
    return StandardKernel(spec, device)
