"""What is measured: each contender turns a workload into launches over fresh data, ours and rivals alike.

A workload is one layer's step of a batch in the steady state: row r holds a history of ``T (1 + (r + phase) mod k)`` tokens,
``k = floor(L / T)`` steps being a flush cycle at full acceptance. One launch then carries its share of flushes; where the batch
has fewer rows than the cycle has phases, launches of all phases are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from replayssm_jit import Mamba2Spec, ReplayCache, ReplaySpec, ReplayWrapper
from replayssm_jit.specs import DeltaSpec
from replayssm_jit.standard import StandardKernel

Launch = Callable[[], object]
DEVICE = "cuda"


@dataclass(frozen=True)
class Workload:
    """One layer's step: a spec, a batch, new tokens a row, and how many distinct layers to rotate over."""

    spec: ReplaySpec
    rows: int
    tokens: int
    launches: int

    @property
    def cycle(self) -> int:
        """Steps from flush to flush at full acceptance."""
        return self.spec.buffer_len // self.tokens

    def histories(self, phase: int) -> torch.Tensor:
        """History of each row, int32."""
        return (self.tokens * (1 + (torch.arange(self.rows) + phase) % self.cycle)).to(torch.int32)


def inputs(spec: ReplaySpec, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random inputs of a step."""
    made = {}
    for item in spec.inputs:
        if item.optional:
            continue
        made[item.name] = torch.randn(rows, tokens, *spec.shape(item.outer, item.inner), device=DEVICE).to(spec.dtype_of(item.dtype))
    return made


def weights(spec: ReplaySpec) -> dict[str, torch.Tensor]:
    """Random weights of a layer: decays between slow and fast."""
    heads = spec.heads
    if isinstance(spec, Mamba2Spec):
        return {"A": -torch.rand(heads, device=DEVICE) - 0.1, "D": torch.randn(heads, device=DEVICE), "dt_bias": torch.randn(heads, device=DEVICE)}
    dt_bias = torch.randn(*spec.shape(*spec.weights[1].dims), device=DEVICE)
    return {"A_log": torch.rand(heads, device=DEVICE), "dt_bias": dt_bias}


def replay(work: Workload) -> list[Launch]:
    """Our replay kernel."""
    spec = work.spec
    phases = min(work.cycle, work.launches) if work.rows < work.cycle else 1
    launches: list[Launch] = []
    for phase in range(phases):
        cache = ReplayCache.allocate(spec, max(1, work.launches // phases), work.rows, DEVICE)
        cache.history.copy_(work.histories(phase))
        cache.ring_start.copy_(torch.randint(0, spec.ring_len, (work.rows,)))
        wrapper = ReplayWrapper(cache)
        wrapper.plan(list(range(work.rows)), work.tokens)
        for index, layer in enumerate(cache.layers):
            fill(spec, layer)
            cache.set_weights(index, **weights(spec))
            given = inputs(spec, work.rows, work.tokens)
            out = torch.empty(work.rows, work.tokens, *spec.shape("H", "P"), device=DEVICE, dtype=spec.dtype)
            launches.append(lambda w=wrapper, i=index, g=given, o=out: w.run(i, out=o, **g))  # type: ignore[misc]
    return launches


def fill(spec: ReplaySpec, layer: dict[str, torch.Tensor]) -> None:
    """Plausible contents of a layer's cache tensors."""
    for name, tensor in layer.items():
        tensor.normal_() if name not in ("ring_d", "ring_g", "ring_beta", "ring_k_norm") else tensor.uniform_(0.0, 0.1)
    if "ring_g" in layer:
        layer["ring_g"].neg_()
    if isinstance(spec, DeltaSpec):
        layer["ring_k_norm"].copy_(layer["ring_k"].float().square().sum(-1).add(1e-6).rsqrt())
        layer["state"].mul_(0.1)


def standard(work: Workload) -> list[Launch]:
    """Our standard kernel, which reads and writes the state at every token."""
    spec = replace(work.spec, read_dtype=work.spec.checkpoint_dtype)
    kernel = StandardKernel(spec, torch.device(DEVICE, 0))
    slots = torch.arange(work.rows, dtype=torch.int32, device=DEVICE)
    launches: list[Launch] = []
    for _ in range(work.launches):
        state = torch.randn(work.rows, *spec.shape("H", "P", "N"), device=DEVICE, dtype=spec.checkpoint_dtype)
        out = torch.empty(work.rows, work.tokens, *spec.shape("H", "P"), device=DEVICE, dtype=spec.dtype)
        given = {**inputs(spec, work.rows, work.tokens), **weights(spec)}
        launches.append(kernel.prepare(state, slots, out=out, tensors=given))
    return launches


def time_graph(launches: list[Launch], repeats: int = 20) -> tuple[float, float]:
    """Median and 95th percentile of one launch, in microseconds: all launches in one CUDA graph, over cold data."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        samples = []
        for _ in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / len(launches))
    samples = sorted(samples[2:])
    return samples[len(samples) // 2], samples[int(len(samples) * 0.95)]
