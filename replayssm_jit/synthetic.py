"""Random weights, tokens and prefill states with the rates of trained models: what demo and benchmarks run on."""

from __future__ import annotations

import math

import torch

from .specs import ReplaySpec


def weights(spec: ReplaySpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Every weight of one layer, float32, drawn as the models' own initialisation draws them.

    Decay rates ``A`` (or ``exp(A_log)``) are spread over 1 to 16, step sizes (softplus of the bias) over 0.001 to 0.1.
    """

    def uniform(low: float, high: float, shape: tuple[int, ...]) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)

    drawn = {}
    for weight in spec.weights:
        shape = spec.shape(*weight.dims)
        if weight.name == "A":
            drawn[weight.name] = -uniform(1, 16, shape)
        elif weight.name == "A_log":
            drawn[weight.name] = uniform(1, 16, shape).log()
        elif weight.name == "dt_bias":
            step = uniform(math.log(1e-3), math.log(0.1), shape).exp()
            drawn[weight.name] = step + torch.log(-torch.expm1(-step))  # inverse of softplus
        else:
            drawn[weight.name] = torch.ones(shape, device=generator.device)
    return drawn


class TokenPool:
    """Random inputs, drawn once; a step takes views of them.

    Parameters
    ----------
    spec : ReplaySpec
        Names, shapes and dtypes. Optional inputs are left out, as the published models leave them out.
    size : int
        Most tokens a step takes.
    generator : torch.Generator
        Source of randomness; its device is the pool's.
    """

    DEPTH = 512

    def __init__(self, spec: ReplaySpec, size: int, generator: torch.Generator) -> None:
        self._pools: dict[str, torch.Tensor] = {}
        for item in spec.inputs:
            if not item.optional:
                shape = (self.DEPTH + size, *spec.shape(item.outer, item.inner))
                self._pools[item.name] = torch.randn(shape, generator=generator, device=generator.device).to(spec.dtype_of(item.dtype))

    def take(self, key: int, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        """Inputs ``[rows, tokens, ...]``; the same key gives the same values."""
        start = key * 37 % self.DEPTH
        return {name: pool[start : start + rows * tokens].view(rows, tokens, *pool.shape[1:]) for name, pool in self._pools.items()}


class StatePool:
    """Random prefill states of one slot, drawn once; every key takes another view."""

    def __init__(self, spec: ReplaySpec, generator: torch.Generator) -> None:
        self._shape = spec.shape("H", "P", "N")
        self._size = spec.state_elements
        self._pool = 0.5 * torch.randn(2 * self._size, generator=generator, device=generator.device)

    def take(self, key: int) -> torch.Tensor:
        """One state ``[H, P, N]``, float32."""
        start = key * 4099 % self._size
        return self._pool[start : start + self._size].view(self._shape)
