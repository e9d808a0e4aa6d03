"""What is measured: a contender turns a cell's tensors into launches over cold data; ours here, others' in ``rivals.py``.

A cell is one layer's step of a batch: model, share of its heads, rows, new tokens a row, precision of the state. Its contenders
take the same inputs and weights. Launch i works on its own slots, which together are several times the L2 cache, and the
histories of all slots follow the stationary distribution of :mod:`replayssm_jit.traffic`: the launches of one pass carry their
share of flushes, so their mean is the average over the flush cycle. Cursors stand still, so every pass does the same work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise

import torch

from replayssm_jit import ReplayCache, ReplaySpec, ReplayWrapper, models, synthetic, tactics
from replayssm_jit.jit import ModuleSpec
from replayssm_jit.standard import StandardKernel
from replayssm_jit.traffic import Steady, acceptance_histogram
from replayssm_jit.traffic import steady as _steady

DEVICE = torch.device("cuda", 0)
COLD_BYTES = 600e6  # of state in all launches of a pass: ten times the L2 of a Hopper GPU
MAX_LAUNCHES = 576
PHASES = 64  # rows of a pass, at least: as many as the longest cycle has steps

Launch = Callable[[], torch.Tensor]
steady = cache(_steady)

#: Formats of the checkpoint: (checkpoint_dtype, read_dtype). A name that ends in STOCHASTIC is the same with stochastic rounding.
FORMATS = {
    "fp32/bf16": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "fp32/int8": (torch.float32, torch.int8),
    "fp32/fp8": (torch.float32, torch.float8_e4m3fn),
    "int16/int8": (torch.int16, torch.int8),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.int8),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
}
STOCHASTIC = ", stochastic"

#: The format that a cell is about, by the dtype of its standard kernels' state.
HEADLINE = {"fp32": "fp32/bf16", "bf16": "bf16"}
#: Formats that compete with it where the model is whole, and those that are measured once a model.
BESIDE = {"fp32": ("fp32", "int16/int8"), "bf16": ()}
ONCE = {
    "fp32": ("fp32/int8", "fp32/fp8", "int8", "int8" + STOCHASTIC, "fp8", "fp8" + STOCHASTIC, "int16/int8" + STOCHASTIC),
    "bf16": ("bf16" + STOCHASTIC,),
}

#: Buffer lengths that have been best for so many new tokens, the usual one first; and those of the cells that look at the length itself.
BUFFER_LENS = {1: (16, 8, 32), 2: (16, 32), 4: (32,), 6: (32, 64), 8: (32, 64)}
SWEEP = (8, 16, 24, 32, 48, 64)
SWEPT_TOKENS = (1, 4, 8)
CENTRAL_ROWS = 256  # of the cells where all of that is measured

#: Chance of keeping 0..4 tokens of T = 4, and the chance of a draft by which as many are kept for other T.
HISTOGRAM = (0.0, 0.15, 0.20, 0.25, 0.40)
DRAFT_RATE = 0.79


def acceptances(tokens: int) -> dict[str, tuple[float, ...]]:
    """Histograms that are measured for T tokens: every draft kept, and a typical one."""
    full = {"full": (0.0,) * tokens + (1.0,)}
    if tokens == 1:
        return full
    return full | {"histogram": HISTOGRAM if tokens == len(HISTOGRAM) - 1 else tuple(acceptance_histogram(tokens, DRAFT_RATE))}


@dataclass(frozen=True)
class Cell:
    """One point of the matrix.

    Parameters
    ----------
    model : str
        Published model.
    shards : int
        Tensor-parallel size: the cell has one share of the heads.
    rows, tokens : int
        Batch, and new tokens of every row.
    state : {"fp32", "bf16"}
        Dtype of the standard kernels' state.
    """

    model: str
    shards: int
    rows: int
    tokens: int
    state: str

    @property
    def name(self) -> str:
        """Name of the cell's file."""
        return f"{self.model}-tp{self.shards}-b{self.rows}-t{self.tokens}-{self.state}"

    def formats(self) -> dict[str, tuple[int, ...]]:
        """Formats of the checkpoint that compete here, and the buffer lengths of each."""
        headline, usual = HEADLINE[self.state], BUFFER_LENS[self.tokens]
        central = self.shards == 1 and self.rows == CENTRAL_ROWS
        found = {headline: SWEEP if central and self.state == "fp32" and self.tokens in SWEPT_TOKENS else usual}
        if central or (self.shards == 1 and self.tokens == 1):
            found |= dict.fromkeys(BESIDE[self.state], usual if central else usual[:1])
        if central and self.tokens == 1:
            found |= dict.fromkeys(ONCE[self.state], usual[:1])
        return found

    def spec(self, state_format: str, buffer_len: int = 16) -> ReplaySpec:
        """Spec of a format; raises ValueError where the kernels do not cover it."""
        return _spec(self.model, self.shards, self.tokens, state_format, buffer_len)


@cache
def _spec(model: str, shards: int, tokens: int, state_format: str, buffer_len: int) -> ReplaySpec:
    checkpoint, read = FORMATS[state_format.removesuffix(STOCHASTIC)]
    options = {
        "buffer_len": buffer_len,
        "max_tokens": tokens,
        "checkpoint_dtype": checkpoint,
        "read_dtype": read,
        "rounding": "stochastic" if state_format.endswith(STOCHASTIC) else "nearest",
    }
    spec = models.by_name(model).spec(**options)
    groups = "groups" if spec.family == "mamba2" else "key_heads"
    return replace(spec, heads=spec.heads // shards, **{groups: spec.groups_ // shards})


class Tensors:
    """What the contenders of a cell share.

    Attributes
    ----------
    weights : dict
        Of the layer, float32.
    inputs : list of dict
        Of each launch, ``[rows, T, ...]``.
    slots : torch.Tensor
        int32 ``[launches, rows]``: the slots of each launch.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell, self.spec = cell, cell.spec(cell.state)
        rows, tokens = cell.rows, cell.tokens
        wanted = COLD_BYTES / (rows * self.spec.state_elements * self.spec.checkpoint_dtype.itemsize)
        self.passes = max(1, PHASES // rows)  # launches that together hold every phase
        launches = -(-min(max(wanted, 2), MAX_LAUNCHES) // self.passes) * self.passes
        self.slots = torch.arange(int(launches) * rows, dtype=torch.int32, device=DEVICE).view(-1, rows)
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        self.weights = synthetic.weights(self.spec, self.generator)
        self._state = self.random(*self.spec.shape("H", "P", "N")) * 0.1
        pools = {
            item.name: self.random(*self.slots.shape, tokens, *self.spec.shape(item.outer, item.inner)).to(self.spec.dtype_of(item.dtype))
            for item in self.spec.inputs
            if not item.optional
        }
        self.inputs = [{name: pool[i] for name, pool in pools.items()} for i in range(len(self.slots))]

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal values, float32."""
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def states(self, copies: int = 1) -> torch.Tensor:
        """States of all slots, ``copies`` places for each: ``[slots * copies, H, P, N]``, dtype of the cell."""
        count = self.slots.numel() * copies
        state = torch.empty(count, *self._state.shape, dtype=self.spec.checkpoint_dtype, device=DEVICE)
        return state.copy_(self._state)

    def fill(self, cache: ReplayCache) -> None:
        """Plausible checkpoints and rings."""
        everyone = self.slots.view(-1)
        cache.load_state(0, everyone, self._state.expand(len(everyone), *self._state.shape))
        layer = cache.layers[0]
        for name, tensor in layer.items():
            if name in ("ring_d", "ring_beta"):
                tensor.uniform_(0.0, 0.1)
            elif name == "ring_g":
                tensor.uniform_(-0.1, 0.0)
            elif name.startswith("ring_"):
                tensor.normal_()
        if "ring_k_norm" in layer:
            norm = torch.linalg.vector_norm(layer["ring_k"], dim=-1, dtype=torch.float32)
            layer["ring_k_norm"].copy_(norm.square_().add_(1e-6).rsqrt_())

    def outputs(self) -> torch.Tensor:
        """Outputs of all launches, NaN until they are written."""
        shape = (*self.slots.shape, self.cell.tokens, *self.spec.shape("H", "P"))
        return torch.full(shape, float("nan"), dtype=self.spec.dtype, device=DEVICE)

    def histories(self, phases: Steady) -> torch.Tensor:
        """History of every slot, int32."""
        found = torch.tensor(phases.phases(self.passes * self.cell.rows), dtype=torch.int32, device=DEVICE)
        return found.repeat(len(self.slots) // self.passes)

    def snapshots(self) -> torch.Tensor:
        """int32 ``[launches, rows, T]``: a place for the state after each token; rows start from the last one of the step before."""
        places = torch.arange(self.slots.numel() * self.cell.tokens, dtype=torch.int32, device=DEVICE)
        return places.view(*self.slots.shape, self.cell.tokens)


@dataclass(frozen=True)
class Contender:
    """A kernel in a cell.

    Parameters
    ----------
    maker : str
        ``ours``, or the package it comes from.
    kernel : {"replay", "standard", "snapshots", "last state"}
        ``standard`` reads and writes the state once, T = 1; ``snapshots`` also keeps the state after every draft, so that the
        rejected can be dropped; ``last state`` cannot drop any.
    state : str
        Format of the state.
    variants : mapping
        Ways to run it; the fastest counts.
    bytes : float
        That its launch moves, as the spec counts: state and ring, not inputs and outputs.
    buffer_len : int, optional
        L of a replay kernel.
    acceptance : str
        Histogram that the histories follow.
    modules : tuple of ModuleSpec
        To compile beforehand.
    """

    maker: str
    kernel: str
    state: str
    variants: Mapping[str, Callable[[Tensors], list[Launch]]]
    bytes: float = 0.0
    buffer_len: int | None = None
    acceptance: str = "full"
    modules: tuple[ModuleSpec, ...] = field(default=(), repr=False)


def ours(cell: Cell) -> list[Contender]:
    """Our standard kernel, and replay in every format and buffer length."""
    spec = cell.spec(cell.state)
    kernel = "standard" if cell.tokens == 1 else "snapshots"
    moved = cell.rows * spec.standard_step_bytes(cell.tokens)
    found = [Contender("ours", kernel, cell.state, {"": _standard}, moved, modules=(spec.module("standard", "cuda"),))]
    for state_format, buffer_lens in cell.formats().items():
        histograms = acceptances(cell.tokens)
        if state_format != HEADLINE[cell.state]:
            histograms = {"full": histograms["full"]}
        for buffer_len in buffer_lens:
            spec = cell.spec(state_format, buffer_len)
            modules = (spec.module("step", "cuda"),)
            for name, histogram in histograms.items():
                phases = steady(buffer_len, cell.tokens, histogram)
                moved = cell.rows * spec.step_bytes(cell.tokens, phases.mean_history, phases.flush_share)
                build = partial(_replay, spec=spec, phases=phases)
                found.append(Contender("ours", "replay", state_format, {"": build}, moved, buffer_len, name, modules))
    return found


def _replay(tensors: Tensors, spec: ReplaySpec, phases: Steady) -> list[Launch]:
    cache = ReplayCache.allocate(spec, 1, tensors.slots.numel(), DEVICE)
    cache.set_weights(0, **tensors.weights)
    tensors.fill(cache)
    # The last step's commit brings every row to its phase, and leaves the order of rows that it would leave in an engine.
    history = tensors.histories(phases)
    accepted = history.clamp(max=tensors.cell.tokens)
    cache.history.copy_(history - accepted)
    cache.ring_start.random_(spec.ring_len)
    ordered = tensors.cell.rows in tactics.ORDERED_ROWS
    wrapper = ReplayWrapper(cache)
    launches: list[Launch] = []
    for slots, given, out in zip(tensors.slots, tensors.inputs, tensors.outputs(), strict=True):
        if ordered and launches:  # every launch keeps its own order
            wrapper = ReplayWrapper(cache)
        wrapper.plan(slots, tensors.cell.tokens)
        wrapper.commit(slots, tensors.cell.tokens, accepted[slots.long()])
        run = partial(wrapper.run, 0, out=out, **given)
        launches.append(run if ordered else partial(_planned, wrapper, slots, tensors.cell.tokens, run))
    return launches


def _planned(wrapper: ReplayWrapper, slots: torch.Tensor, tokens: int, run: Launch) -> torch.Tensor:
    """Plan, which launches nothing, and run: hundreds of launches share a wrapper, since each takes the host a while to make."""
    wrapper.plan(slots, tokens)
    return run()


def _standard(tensors: Tensors) -> list[Launch]:
    kernel = StandardKernel(tensors.spec, DEVICE)
    state = tensors.states(tensors.cell.tokens)
    launches: list[Launch] = []
    for places, given, out in zip(tensors.snapshots(), tensors.inputs, tensors.outputs(), strict=True):
        run = kernel.prepare(state, places[:, -1].contiguous(), places, out=out, tensors={**given, **tensors.weights})
        launches.append(partial(then, run, out))
    return launches


def then(run: Callable[[], object], out: torch.Tensor) -> torch.Tensor:
    """Run, and return the output that it writes."""
    run()
    return out


def check(launches: list[Launch]) -> None:
    """Run every launch once and refuse outputs that are not finite."""
    if not torch.isfinite(torch.stack([launch() for launch in launches])).all():
        raise ArithmeticError("outputs are not finite")


@cache
def _stream() -> torch.cuda.Stream:
    """Where graphs are captured and replayed. One for all: memory that a launch allocates is reused on its own stream only."""
    return torch.cuda.Stream()


def time_graph(launches: list[Launch], samples: int = 20, least_us: float = 1000.0, most_us: float = 100e3) -> tuple[float, float]:
    """Median and 95th percentile of one launch, in microseconds.

    All launches are one CUDA graph, several times over where they take less than ``least_us``; replays follow each other without a
    gap, and each sample is the mean over one replay. Where ``samples`` of them would take more than ``most_us`` there are fewer, but
    at least ten.
    """
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 2)]
    with torch.cuda.stream(stream):
        passes = 1
        if len(launches) < PHASES:
            marks[0].record()
            for launch in launches:
                launch()
            marks[1].record()
            marks[1].synchronize()
            passes = int(min(16, max(1, least_us / (marks[0].elapsed_time(marks[1]) * 1e3))))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()  # torch.cuda.graph would return all cached memory to the device first, and ask for it again
        try:
            for _ in range(passes):
                for launch in launches:
                    launch()
        finally:
            graph.capture_end()
        marks[0].record()
        graph.replay()
        graph.replay()
        marks[1].record()
        marks[1].synchronize()
        replay_us = marks[0].elapsed_time(marks[1]) * 1e3 / 2
        marks = marks[1 : 2 + max(10, min(samples, int(most_us / replay_us)))]
        for mark in marks:
            mark.record()
            graph.replay()
        stream.synchronize()
    found = sorted(a.elapsed_time(b) * 1e3 / (passes * len(launches)) for a, b in pairwise(marks))
    return statistics.median(found), found[-(-len(found) * 95 // 100) - 1]
