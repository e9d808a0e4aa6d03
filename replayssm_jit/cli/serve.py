"""One phase of the demo: a small server loop whose every step runs replay and the standard kernel on the same tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from .. import reference, synthetic
from ..cache import ReplayCache
from ..rounding import LARGEST
from ..specs import ReplaySpec
from ..standard import StandardKernel
from ..traffic import acceptance_histogram
from ..wrapper import ReplayWrapper
from .trace import Request, Server

#: Root-mean-square relative error of rounding to a dtype (for fp32: of a recurrence's sums in it; for multiples of a row's scale: where
#: the largest number of a row is five times its root mean square).
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2.5e-4, torch.bfloat16: 2e-3, torch.float8_e4m3fn: 2.7e-2, torch.int8: 1.1e-2}
_SAMPLED_HEADS = 4


def reading_bound(spec: ReplaySpec) -> float:
    """Largest relative error of one token's output that is explained by its own rounding and by reading the state through its plane."""
    return 5 * (_ROUNDING[spec.dtype] + _ROUNDING[spec.read_dtype])


def output_bound(spec: ReplaySpec) -> float:
    """The same between replay and the standard kernel, which rounds a state narrower than fp32 at every token: that adds up."""
    exact = spec.checkpoint_dtype is torch.float32
    return reading_bound(spec) + (0 if exact else 40 * _ROUNDING[spec.checkpoint_dtype])


@dataclass
class Row:
    """One line of the demo's result; the fields are the keys of its JSON."""

    model: str
    backend: str
    mode: str
    batch: int
    tokens_per_step: int
    buffer_len: int
    state_bytes_standard: int
    state_bytes_replay: int
    us_standard: float
    us_replay: float
    speedup: float
    max_rel_error: float


@dataclass
class Summary:
    """What a phase did beside its row."""

    row: Row
    steps: int
    requests: int
    finished: int
    context_tokens: int
    generated_tokens: int
    state_error: float
    output_bound: float
    state_bound: float


@dataclass
class _Step:
    rows: int
    us_replay: float
    us_standard: float
    history: int
    flushes: int


class Phase:
    """Replay and standard states of the same requests.

    Parameters
    ----------
    spec : ReplaySpec
        What every layer is; a step brings ``spec.max_tokens`` tokens a row.
    device : torch.device
        Where it runs.
    layers, batch : int
        Layers, and requests served at once.
    acceptance : float
        Chance that a draft is accepted.
    trace : list of Request
        Which requests come when.
    seed : int
        Of all that is random.
    """

    def __init__(
        self, spec: ReplaySpec, device: torch.device, layers: int, batch: int, acceptance: float, trace: list[Request], seed: int
    ) -> None:
        self.spec, self.device, self.layers, self.batch = spec, device, layers, batch
        self.tokens = spec.max_tokens
        generator = torch.Generator(device=device).manual_seed(seed)
        self._random = random.Random(seed)
        histogram = acceptance_histogram(self.tokens, acceptance)
        self._acceptance = list(accumulate(histogram))
        self.server = Server(trace, batch, sum(a * chance for a, chance in enumerate(histogram)))

        self.cache = ReplayCache.allocate(spec, num_layers=layers, num_slots=batch, device=device)
        self.wrapper = ReplayWrapper(self.cache)
        self.standard = StandardKernel(spec, device)
        # The standard kernel cannot take a token back, so it keeps one snapshot a token; `_accepted` is the one that counts.
        shape = (batch * self.tokens, *spec.shape("H", "P", "N"))
        self.snapshots = [torch.zeros(shape, dtype=spec.checkpoint_dtype, device=device) for _ in range(layers)]
        scaled = self.standard.spec.scaled
        self.scales = [torch.zeros(shape[:3], device=device) if scaled else None for _ in range(layers)]
        self._accepted = [slot * self.tokens for slot in range(batch)]
        self._history = [0] * batch
        self._planned: list[int] = []

        self.weights = [synthetic.weights(spec, generator) for _ in range(layers)]
        for layer, weights in enumerate(self.weights):
            self.cache.set_weights(layer, **weights)
        self.pool = synthetic.TokenPool(spec, batch * self.tokens, generator)
        self.states = synthetic.StatePool(spec, generator)
        self.sampled = [_SampledHead(self, i) for i in range(min(_SAMPLED_HEADS, batch))]
        self.worst = torch.zeros((), device=device)
        self._log: list[_Step] = []

    def run(self, steps: int, deadline: float, progress: Callable[[], None]) -> int:
        """Serve until ``steps`` are done or the deadline (``time.monotonic``) has passed; returns the steps done."""
        done = 0
        while done < steps and (done == 0 or time.monotonic() < deadline):
            for slot, number in self.server.admit():
                self._load(slot, number)
            if self.server.active:
                self._step(done)
                done += 1
                progress()
        return done

    def _load(self, slot: int, number: int) -> None:
        """Take over the state that a prefill of this request would leave behind, on both sides."""
        for layer in range(self.layers):
            state = self.states.take(number * self.layers + layer)
            self.cache.load_state(layer, [slot], state[None])
            self._keep(layer, slot * self.tokens, state)
            for head in self.sampled:
                head.load(layer, slot, self._kept(layer, slot * self.tokens))
        self._accepted[slot] = slot * self.tokens
        self._history[slot] = 0

    def _keep(self, layer: int, index: int, state: torch.Tensor) -> None:
        """A state as a snapshot of the standard kernel."""
        snapshot, scales = self.snapshots[layer][index], self.scales[layer]
        if scales is not None:
            scales[index] = state.abs().amax(-1) / LARGEST[snapshot.dtype]
            state = state / scales[index][..., None]
            state = state if snapshot.is_floating_point() else state.round()
        snapshot.copy_(state)

    def _kept(self, layer: int, index: int | torch.Tensor) -> torch.Tensor:
        """Snapshots as float32."""
        states, scales = self.snapshots[layer][index].float(), self.scales[layer]
        return states if scales is None else states * scales[index][..., None]

    def _step(self, number: int) -> None:
        spec, tokens, slots = self.spec, self.tokens, list(self.server.active)
        rows = len(slots)
        if slots != self._planned:
            self._slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
            self._write_slots = self._slots[:, None] * tokens + torch.arange(tokens, dtype=torch.int32, device=self.device)
            self.wrapper.plan(self._slots, tokens)
            shape = (rows, tokens, *spec.shape("H", "P"))
            self._outputs = [[torch.empty(shape, dtype=spec.dtype, device=self.device) for _ in range(self.layers)] for _ in range(2)]
            self._planned = slots
        inputs = [self.pool.take(number * self.layers + layer, rows, tokens) for layer in range(self.layers)]
        read_slots = torch.tensor([self._accepted[slot] for slot in slots], dtype=torch.int32, device=self.device)
        launches = [
            self.standard.prepare(
                self.snapshots[layer],
                read_slots,
                self._write_slots,
                scale=self.scales[layer],
                out=self._outputs[1][layer],
                tensors=inputs[layer] | self.weights[layer],
            )
            for layer in range(self.layers)
        ]

        def replay() -> None:
            for layer in range(self.layers):
                self.wrapper.run(layer, out=self._outputs[0][layer], **inputs[layer])

        def standard() -> None:
            for launch in launches:
                launch()

        # Taking turns, neither side always finds the caches as the other left them.
        order = (replay, standard) if number % 2 else (standard, replay)
        times = dict(zip(order, _microseconds(self.device, order), strict=True))
        flushes = sum(self._history[slot] + tokens > spec.buffer_len for slot in slots)
        history = sum(self._history[slot] for slot in slots)
        self._log.append(_Step(rows, times[replay], times[standard], history, flushes))

        counts = {}
        for slot in slots:
            drawn = self._random.choices(range(tokens + 1), cum_weights=self._acceptance)[0]
            counts[slot] = min(drawn, self.server.active[slot])
        self._check(slots, inputs, counts)
        self.wrapper.commit(self._slots, tokens, torch.tensor(list(counts.values()), dtype=torch.int32, device=self.device))
        for slot, count in counts.items():
            self._history[slot] = count + (0 if self._history[slot] + tokens > spec.buffer_len else self._history[slot])
            self._accepted[slot] = slot * tokens + count - 1
        self.server.accept(counts)

    def _check(self, slots: list[int], inputs: list[dict[str, torch.Tensor]], counts: dict[int, int]) -> None:
        for layer in range(self.layers):
            got, want = (side[layer].float().flatten(2) for side in self._outputs)
            error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
            self.worst = torch.maximum(self.worst, error.nan_to_num(torch.inf).max())
        for head in self.sampled:
            if head.live and head.slot in counts:
                row = slots.index(head.slot)
                error = head.step(row, inputs[head.layer], self._outputs[0][head.layer], counts[head.slot])
                self.worst = torch.maximum(self.worst, error.to(self.worst))

    def finish(self, model: str) -> Summary:
        """Fold everything, compare the final states, and sum up."""
        self.cache.check()
        spec, state_error = self.spec, 0.0
        slots = list(self.server.active)
        if slots:
            self.cache.flush(slots)
            index = torch.tensor([self._accepted[slot] for slot in slots], device=self.device)
            for layer in range(self.layers):
                got, want = self.cache.read_state(layer, slots), self._kept(layer, index)
                state_error = max(state_error, float(((got - want).norm() / want.norm()).nan_to_num(torch.inf)))
        # Full batches where there are enough of them, else the usual ones.
        full = sum(step.rows == self.batch for step in self._log)
        usual = self.batch if full >= spec.buffer_len else statistics.mode(step.rows for step in self._log)
        timed = [step for step in self._log if step.rows == usual]
        cells = len(timed) * usual
        history, flush_share = sum(s.history for s in timed) / cells, sum(s.flushes for s in timed) / cells
        standard, replay = (_cycle_average([getattr(s, key) for s in timed], spec.buffer_len) for key in ("us_standard", "us_replay"))
        row = Row(
            model=model,
            backend=self.device.type,
            mode="decode" if self.tokens == 1 else "verify",
            batch=usual,
            tokens_per_step=self.tokens,
            buffer_len=spec.buffer_len,
            state_bytes_standard=round(usual * self.layers * self.standard.spec.standard_step_bytes(self.tokens)),
            state_bytes_replay=round(usual * self.layers * spec.step_bytes(self.tokens, history, flush_share)),
            us_standard=round(standard, 1),
            us_replay=round(replay, 1),
            speedup=round(standard / replay, 3),
            max_rel_error=float(f"{float(self.worst):.3g}"),
        )
        exact = spec.checkpoint_dtype is torch.float32
        return Summary(
            row,
            steps=len(self._log),
            requests=self.server.admitted,
            finished=self.server.finished,
            context_tokens=self.server.context_tokens,
            generated_tokens=self.server.generated_tokens,
            state_error=state_error,
            output_bound=output_bound(spec),
            state_bound=1e-5 if exact else 40 * _ROUNDING[spec.checkpoint_dtype],
        )


class _SampledHead:
    """One head of one slot and layer, followed by the float64 reference."""

    def __init__(self, phase: Phase, index: int) -> None:
        spec = phase.spec
        self.spec, self.slot, self.live = spec, index * phase.batch // _SAMPLED_HEADS % phase.batch, False
        self.layer = index % phase.layers
        head = (index * 2 + 1) * spec.heads // (2 * _SAMPLED_HEADS)
        self._index = {"H": slice(head, head + 1), "G": slice(group := head * spec.groups_ // spec.heads, group + 1)}
        weights = phase.weights[self.layer]
        self._weights = {w.name: weights[w.name][self._index[w.dims[0]]] for w in spec.weights if w.name in weights}
        self._outer = {i.name: i.outer for i in spec.inputs}

    def load(self, layer: int, slot: int, state: torch.Tensor) -> None:
        """Follow the slot's new request."""
        if (layer, slot) == (self.layer, self.slot):
            self._state, self.live = state[self._index["H"]].double(), True

    def step(self, row: int, inputs: dict[str, torch.Tensor], out: torch.Tensor, accepted: int) -> torch.Tensor:
        """Relative error of the new tokens' outputs; afterwards the accepted ones count."""
        tokens = {name: x[row][:, self._index[self._outer[name]]] for name, x in inputs.items()}
        want, _ = self._apply(tokens)
        got = out[row][:, self._index["H"]].double()
        _, self._state = self._apply({name: x[:accepted] for name, x in tokens.items()})
        error: torch.Tensor = (got - want).norm() / want.norm().clamp_min(1e-30)
        return error.nan_to_num(torch.inf)

    def _apply(self, tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.recurrence(self.spec, tokens, self._weights, self._state)


def _microseconds(device: torch.device, parts: tuple[Callable[[], None], ...]) -> list[float]:
    """Time each part: of the device alone on CUDA, of the calls on the CPU."""
    if device.type != "cuda":
        times = []
        for part in parts:
            start = time.perf_counter()
            part()
            times.append((time.perf_counter() - start) * 1e6)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]  # the device waits while the host enqueues, so that it never waits for the host later
    events[0].record()
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]


def _cycle_average(times: list[float], cycle: int) -> float:
    """Median over the means of whole cycles: a cycle holds its share of flushes, the median drops interrupted ones."""
    if len(times) < 2 * cycle:
        return statistics.mean(times)
    return statistics.median(statistics.mean(times[i : i + cycle]) for i in range(0, len(times) - cycle + 1, cycle))
