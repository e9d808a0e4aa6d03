"""What a checkpoint keeps of a number, from the definitions of docs/method.md: what rounding in kernels is judged by.

Like :mod:`replayssm_jit.reference` it shares nothing with the kernels. A kernel folds in float32 and rounds the result, so its error
cannot be told from a rounded number itself, but from the numbers that round to it: :func:`distance` is how far the true one is from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .specs import ReplaySpec

#: What the largest magnitude of a row becomes in a scaled format.
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.int16: 32639}
#: Bits of the mantissa, exponent of the least normal number.
_FLOATS = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float8_e4m3fn: (3, -6)}
_WORD = 0xFFFFFFFF


def random_bits(spec: ReplaySpec, seed: Tensor, position: Tensor, layer: int) -> Tensor:
    """The 16 bits that stochastic rounding draws for every number of a state.

    Parameters
    ----------
    spec : ReplaySpec
        Shape of the state.
    seed, position : Tensor
        int64 ``[...]``: the slot's seed, and its position before the fold.
    layer : int
        Of the cache.

    Returns
    -------
    Tensor
        int64 ``[..., H, P, N]``, from 0 to 65535.
    """
    fold = _mix(_mix(seed) + position) + (layer << 32)
    rows = torch.arange(spec.heads * spec.head_dim, device=seed.device)
    key = _shift(_mix(fold[..., None] + rows), 32)
    word = key[..., None] + torch.arange(spec.state_dim // 2, device=seed.device) * 0x9E3779B9 & _WORD
    word = (word ^ word >> 16) * 0x7FEB352D & _WORD
    word = (word ^ word >> 15) * 0x846CA68B & _WORD
    word = word ^ word >> 16
    pairs = torch.stack([word & 0xFFFF, word >> 16], -1)
    return pairs.view(*seed.shape, *spec.shape("H", "P", "N"))


def distance(spec: ReplaySpec, kept: Tensor, want: Tensor, scale: Tensor | None = None, random: Tensor | None = None) -> Tensor:
    """How far numbers are from those that a checkpoint keeps as what it holds: the error before it was rounded, at least.

    Parameters
    ----------
    spec : ReplaySpec
        The checkpoint's format.
    kept, want : Tensor
        ``[..., P, N]``: what the checkpoint holds, and what it was to hold, float64.
    scale : Tensor, optional
        ``[..., P]``: the rows' scales, where there are any. Each is judged by the row's largest magnitude.
    random : Tensor, optional
        :func:`random_bits` of a fold that rounded stochastically.

    Returns
    -------
    Tensor
        ``[..., P, N]`` float64, not a number where the checkpoint holds none.
    """
    dtype, kept, want = spec.checkpoint_dtype, kept.double(), want.double()
    if dtype is torch.float32:
        return (kept - want).abs()
    # A number goes up if it is at least this part of the way to the next one.
    up = torch.full_like(want, 0.5) if random is None else (random + 0.5) / 65536
    if random is not None and dtype is torch.bfloat16:
        up = 1 - random / 65536
    error = torch.zeros_like(want)
    if scale is not None:
        most = scale.double()[..., None] * LARGEST[dtype]
        error = (most - want.abs().amax(-1, keepdim=True)).abs().expand_as(want)
        empty = most == 0  # the least row that is kept as numbers has 2^-100
        error = torch.where(empty, (error - 2.0**-100).clamp_min(0), error)
        unit = torch.where(empty, 1.0, scale.double()[..., None])
        kept, want = torch.where(empty, 0.0, kept / unit), torch.where(empty, 0.0, want / unit)
    if dtype in _FLOATS:
        mantissa, least = _FLOATS[dtype]
        kept = kept.float().to(dtype).double()
        size, exponent = torch.frexp(kept.abs())
        exponent = torch.where(kept == 0, least, exponent - 1).clamp_min(least)
        above = (exponent.long() - mantissa + 1023 << 52).view(torch.float64)  # a power of two, exact on every device
        below = torch.where((size == 0.5) & (exponent > least), above / 2, above)
        # Magnitudes are rounded; zero is what it is from either side.
        want = torch.where(kept == 0, want.abs(), want * kept.sign())
        kept = kept.abs()
        below = torch.where(kept == 0, 0.0, below)
    else:
        kept = kept.round()
        above = below = torch.ones_like(want)
    outside = torch.maximum(kept - (1 - up) * below - want, want - (kept + up * above)).clamp_min(0)
    return torch.maximum(error, outside if scale is None else outside * unit)


def _mix(z: Tensor) -> Tensor:
    """A hash of 64 bits; int64 wraps as uint64 does."""
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, count: int) -> Tensor:
    """To the right, zeros from the left."""
    return z >> count & (1 << 64 - count) - 1
