"""How a slot's history is distributed when it serves for long: what a cycle average has to weigh.

A slot with history h that brings T tokens flushes when ``h + T > L``; of the T it then keeps a, so that its history becomes a (after
a flush) or h + a. With a drawn from an acceptance histogram this is a Markov chain on 0..L, and a benchmark that samples rows from
its stationary distribution sees flushes as often as a server does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def acceptance_histogram(tokens: int, rate: float) -> list[float]:
    """Probabilities of keeping a = 0..tokens inputs when every draft is accepted with the same chance until the first refusal.

    Parameters
    ----------
    tokens : int
        Inputs a step: the token that is certain, and ``tokens - 1`` drafts.
    rate : float
        Chance that a draft is accepted, 0 to 1.

    Returns
    -------
    list of float
        ``tokens + 1`` probabilities; that of 0 is 0, since the first input is always kept.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must be from 0 to 1, got {rate}")
    return [0.0] + [rate**a * (1 - rate) for a in range(tokens - 1)] + [rate ** (tokens - 1)]


@dataclass(frozen=True)
class Steady:
    """The stationary state of a slot.

    Parameters
    ----------
    buffer_len, tokens : int
        L and T.
    histories : tuple of float
        Probability of every history 0..L at the start of a step.
    """

    buffer_len: int
    tokens: int
    histories: tuple[float, ...]

    @property
    def mean_history(self) -> float:
        """Mean history at the start of a step."""
        return sum(h * p for h, p in enumerate(self.histories))

    @property
    def flush_share(self) -> float:
        """Share of steps that flush."""
        return sum(p for h, p in enumerate(self.histories) if h + self.tokens > self.buffer_len)

    def phases(self, rows: int) -> list[int]:
        """Histories of a batch spread evenly over the distribution: row i lies at its quantile ``(i + 1/2) / rows``.

        The rows come interleaved, so that neighbours are in different phases.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        ordered, h, below = [], 0, self.histories[0]
        for i in range(rows):
            while below <= (i + 0.5) / rows and h < self.buffer_len:
                h += 1
                below += self.histories[h]
            ordered.append(h)
        stride = next(s for s in range(max(1, int(rows * 0.618)), rows + 1) if _coprime(s, rows))
        return [ordered[i * stride % rows] for i in range(rows)]


def steady(buffer_len: int, tokens: int, acceptance: Sequence[float]) -> Steady:
    """Stationary distribution of the history of a slot that starts empty.

    Parameters
    ----------
    buffer_len : int
        L, the most history a slot may hold.
    tokens : int
        T, new tokens a step, at most ``buffer_len``.
    acceptance : sequence of float
        Probability of keeping 0..T of them; sums to 1.

    Returns
    -------
    Steady
        The distribution over 0..L, with its mean and its share of flushes.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    if not 1 <= tokens <= buffer_len:
        raise ValueError(f"tokens must be from 1 to buffer_len={buffer_len}, got {tokens}")
    if len(acceptance) != tokens + 1 or min(acceptance) < 0 or abs(sum(acceptance) - 1) > 1e-9:
        raise ValueError(f"acceptance must be {tokens + 1} probabilities that sum to 1, got {list(acceptance)}")
    size = buffer_len + 1
    move = torch.zeros(size, size, dtype=torch.float64)
    for h in range(size):
        base = 0 if h + tokens > buffer_len else h
        for a, chance in enumerate(acceptance):
            move[h, base + a] += chance
    # A step taken or not with equal chance has the same stationary distribution and no period, so its powers converge.
    lazy = (move + torch.eye(size, dtype=torch.float64)) / 2
    for _ in range(64):
        lazy = lazy @ lazy
        lazy /= lazy.sum(dim=1, keepdim=True)
    return Steady(buffer_len, tokens, tuple(lazy[0].tolist()))


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1
