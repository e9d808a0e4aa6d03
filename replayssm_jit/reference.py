"""The recurrences in float64, one function a family: what every kernel is judged by.

They take the inputs of one sequence, token by token, in the order in which the papers write them, and share nothing with
the kernels: no ring, no cursors, no fold. All arithmetic is float64; the inputs keep the rounding they arrive with.

A tree of drafts is a sequence whose token t follows ``parents[t]`` instead of ``t - 1`` (-1: it follows the initial state).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .specs import ReplaySpec


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` without a cut-off."""
    return torch.logaddexp(x, torch.zeros_like(x))


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def mamba2_recurrence(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = True,
    parents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2, one sequence.

    ``d = softplus(dt + dt_bias)``, ``S <- exp(A d) S + d x B^T``, ``y = S C + D x``, then ``y *= silu(z)``.
    Source: Dao and Gu, "Transformers are SSMs: generalized models and efficient algorithms through structured state space
    duality", 2024, the recurrent form with scalar A; gate and skip as in the state-spaces reference.

    Parameters
    ----------
    x : Tensor
        ``[T, H, P]``.
    dt : Tensor
        ``[T, H]``, before bias and softplus.
    B, C : Tensor
        ``[T, G, N]``; H / G consecutive heads share a group.
    state : Tensor
        ``[H, P, N]``, before the first token; not modified.
    A : Tensor
        ``[H]``, negative.
    D, dt_bias : Tensor, optional
        ``[H]``; absent means zero.
    z : Tensor, optional
        ``[T, H, P]``; absent means no gate.
    dt_softplus : bool
        Apply softplus to ``dt + dt_bias``.
    parents : sequence of int, optional
        ``[T]``: the token that token t follows, less than t; -1 is the initial state. Absent: ``t - 1``.

    Returns
    -------
    y : Tensor
        ``[T, H, P]`` float64.
    state : Tensor
        ``[H, P, N]`` float64, after the last token.
    """
    heads, groups = x.shape[1], B.shape[1]
    x, B, C = x.double(), _expand(B, heads // groups), _expand(C, heads // groups)
    d = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    d = softplus(d) if dt_softplus else d
    decay = torch.exp(A.double() * d)

    def token(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        S = decay[t, :, None, None] * S + (d[t, :, None] * x[t])[:, :, None] * B[t, :, None, :]
        y = (S @ C[t, :, :, None]).squeeze(-1)
        if D is not None:
            y = y + D.double()[:, None] * x[t]
        if z is not None:
            y = y * torch.nn.functional.silu(z[t].double())
        return y, S

    return _walk(token, x.shape[0], state, x.shape[1:], parents)


def gdn_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "softplus",
    beta: str = "logit",
    qk_norm: bool = True,
    scale: float | None = None,
    parents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet, one sequence.

    ``S <- exp(g) S``, ``u = beta (v - S k)``, ``S <- S + u k^T``, ``y = S q``.
    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: improving Mamba2 with delta rule", 2024, equation 10; gates
    and normalisation as in flash-linear-attention's layer.

    Parameters
    ----------
    q, k : Tensor
        ``[T, HK, K]``; HV / HK consecutive value heads share a key head.
    v : Tensor
        ``[T, HV, V]``.
    a : Tensor
        ``[T, HV]``, gate input, or g itself when precomputed.
    b : Tensor
        ``[T, HV]``, beta's logit or value.
    state : Tensor
        ``[HV, V, K]``, before the first token; not modified.
    A_log, dt_bias : Tensor, optional
        ``[HV]``, of the softplus gate; absent means zero.
    gate : {"softplus", "precomputed"}
        ``g = -exp(A_log) softplus(a + dt_bias)``, or ``g = a``.
    beta : {"logit", "value"}
        ``beta = sigmoid(b)``, or ``beta = b``.
    qk_norm : bool
        Normalise q and k to unit length (epsilon 1e-6 under the root).
    scale : float, optional
        Factor of q, after normalisation; ``K ** -0.5`` when absent.
    parents : sequence of int, optional
        As in :func:`mamba2_recurrence`.

    Returns
    -------
    y : Tensor
        ``[T, HV, V]`` float64.
    state : Tensor
        ``[HV, V, K]`` float64, after the last token.
    """
    g = _gate(gate, a, A_log, dt_bias, None)
    return _delta_rule(q, k, v, g[..., None], b, state, beta, qk_norm, scale, parents)


def kda_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate: str = "softplus",
    lower_bound: float = -5.0,
    beta: str = "logit",
    qk_norm: bool = True,
    scale: float | None = None,
    parents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, one sequence: Gated DeltaNet whose gate decays every key channel by itself.

    ``S <- S Diag(exp(g))``, ``u = beta (v - S k)``, ``S <- S + u k^T``, ``y = S q``.
    Source: Kimi team, "Kimi Linear: an expressive, efficient attention architecture", 2025, equation 1; gates as in
    flash-linear-attention's layer.

    Parameters
    ----------
    q, k : Tensor
        ``[T, HK, K]``; HV / HK consecutive value heads share a key head.
    v : Tensor
        ``[T, HV, V]``.
    a : Tensor
        ``[T, HV, K]``, gate input, or g itself when precomputed.
    b : Tensor
        ``[T, HV]``, beta's logit or value.
    state : Tensor
        ``[HV, V, K]``, before the first token; not modified.
    A_log : Tensor, optional
        ``[HV]``; absent means zero.
    dt_bias : Tensor, optional
        ``[HV, K]`` or ``[HV * K]``; absent means zero.
    gate : {"softplus", "lower_bound", "precomputed"}
        ``g = -exp(A_log) softplus(a + dt_bias)``, ``g = lower_bound sigmoid(exp(A_log) (a + dt_bias))``, or ``g = a``.
    lower_bound : float
        Least g of the lower-bound gate, negative.
    beta, qk_norm, scale, parents
        As in :func:`gdn_recurrence`.

    Returns
    -------
    y : Tensor
        ``[T, HV, V]`` float64.
    state : Tensor
        ``[HV, V, K]`` float64, after the last token.
    """
    g = _gate(gate, a, A_log, dt_bias, lower_bound)
    return _delta_rule(q, k, v, g, b, state, beta, qk_norm, scale, parents)


def recurrence(
    spec: ReplaySpec,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    state: Tensor,
    parents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of a spec's family with the spec's options.

    Parameters
    ----------
    spec : ReplaySpec
        Family and options. Heads and dimensions are taken from the tensors, so some heads may be computed alone, and several sequences
        as further heads.
    inputs : mapping
        ``[T, outer, inner]``, by the names of ``spec.inputs``.
    weights : mapping
        By the names of ``spec.weights``.
    state, parents
        As in :func:`mamba2_recurrence`.

    Returns
    -------
    y, state : Tensor
        ``[T, H, P]`` and ``[H, P, N]``, float64.
    """
    families: dict[str, Callable[..., tuple[Tensor, Tensor]]]
    families = {"mamba2": mamba2_recurrence, "gdn": gdn_recurrence, "kda": kda_recurrence}
    names = {"mamba2": ("dt_softplus",), "gdn": ("gate", "beta", "qk_norm", "scale")}
    names["kda"] = (*names["gdn"], "lower_bound")
    options: dict[str, Any] = {name: getattr(spec, name) for name in names[spec.family]}
    options |= {item.name: inputs.get(item.name) for item in spec.inputs if item.optional}
    tokens = (inputs[item.name] for item in spec.inputs if not item.optional)
    return families[spec.family](*tokens, state, parents=parents, **options, **weights)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    state: Tensor,
    beta: str,
    qk_norm: bool,
    scale: float | None,
    parents: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule with a gate ``[T, HV, K]`` (or ``[T, HV, 1]``) on the key axis."""
    ratio = v.shape[1] // k.shape[1]
    q, k, v = _expand(q, ratio), _expand(k, ratio), v.double()
    if qk_norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    if beta not in ("logit", "value"):
        raise ValueError(f"beta must be logit or value, got {beta!r}")
    strength = torch.sigmoid(b.double()) if beta == "logit" else b.double()
    decay = torch.exp(g)

    def token(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        S = S * decay[t, :, None, :]
        u = strength[t, :, None] * (v[t] - (S @ k[t, :, :, None]).squeeze(-1))
        S = S + u[:, :, None] * k[t, :, None, :]
        return (S @ q[t, :, :, None]).squeeze(-1), S

    return _walk(token, v.shape[0], state, v.shape[1:], parents)


def _gate(kind: str, a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The log decay g, in the shape of ``a``."""
    a = a.double()
    if kind == "precomputed":
        return a
    if dt_bias is not None:
        a = a + dt_bias.double().reshape(a.shape[1:])
    rate = torch.ones(a.shape[1], dtype=a.dtype, device=a.device) if A_log is None else torch.exp(A_log.double())
    rate = rate.reshape(-1, *[1] * (a.ndim - 2))
    if kind == "softplus":
        return -rate * softplus(a)
    if kind == "lower_bound" and lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * a)
    raise ValueError(f"gate {kind!r} is not one of this family's")


def _expand(x: Tensor, ratio: int) -> Tensor:
    """``[T, G, N]`` to ``[T, G * ratio, N]`` float64: every group's row, once for each of its heads."""
    return x.double().repeat_interleave(ratio, dim=1)


def _walk(
    token: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    tokens: int,
    state: Tensor,
    shape: Sequence[int],
    parents: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Apply ``token`` along the sequence or, with ``parents``, down the tree."""
    outputs = state.new_zeros((tokens, *shape), dtype=torch.float64)
    S = state.double()
    after: list[Tensor] = []  # states of a tree's nodes; a chain needs only the last one
    for t in range(tokens):
        if parents is not None:
            if not -1 <= parents[t] < t:
                raise ValueError(f"parents[{t}] must be in -1..{t - 1}, got {parents[t]}")
            S = state.double() if parents[t] < 0 else after[parents[t]]
        outputs[t], S = token(t, S)
        if parents is not None:
            after.append(S)
    return outputs, S
