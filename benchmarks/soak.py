"""Nothing lost: ``python benchmarks/soak.py --trace CSV`` serves requests of a trace for long, and judges every one at its end.

Requests are admitted as the trace says. On the way they are preempted (their slots' bytes leave, the slots serve others, and the bytes
return to any slot), forked (two requests go on from one), folded out of turn, and run beside padding, idle rows and rows of other
lengths; drafts are accepted at random, now and then none, and a free slot is full of NaN. At its end a request's position must be the
count of its tokens, and its state, layer by layer, the float64 recurrence over them, within the bound of an fp32 checkpoint; so must
be its outputs, within rounding. A checkpoint that is narrower (``--format``, ``--rounding``) is judged at every fold: each of its
numbers must be what a state within the bound of the recurrence rounds to, with the random bits of its place where rounding is
stochastic. The recurrence then goes on from the rounded numbers. The exit code is 1 if a single request is not what it should be.

On the CPU shapes are tiny, on CUDA those of published models; the reference runs beside the kernels on the same device. When its time is
up, or on SIGTERM or Ctrl-C, it judges who is left and ends; ``--json`` is also written on the way, so that a kill leaves what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from replayssm_jit import ReplayCache, ReplayWrapper, __version__, reference, rounding, synthetic
from replayssm_jit.cli.serve import reading_bound
from replayssm_jit.cli.trace import Request, Server, read_trace
from replayssm_jit.specs import ROUNDINGS, SPECS, STATE_FORMATS, ReplaySpec
from replayssm_jit.traffic import acceptance_histogram

#: Relative Frobenius error of an fp32 checkpoint; largest error of a number in a narrower one's fold before it is rounded, in units of
#: its own size or its head's root mean square, whichever is more.
STATE_BOUND, FOLD_BOUND = 2e-6, 1e-5
ACCEPTANCE = 0.8
#: Chances in a step: that somebody is preempted, forks, is folded; that a row that may verify drafts decodes one token, does nothing,
#: or has none of its tokens accepted.
PREEMPT, FORK, FOLD = 0.05, 0.05, 0.05
DECODE, IDLE, ABORT = 0.3, 0.02, 0.05
#: Steps that a preempted request stays away at most, tokens that a fork generates at most.
AWAY, FORK_TOKENS = 40, 200

_GROUPS = {"mamba2": "groups", "gdn": "key_heads", "kda": "key_heads"}
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "cpu": {
        "mamba2": {"heads": 1, "groups": 1, "head_dim": 32, "state_dim": 64},
        "gdn": {"heads": 1, "key_heads": 1, "head_dim": 64, "state_dim": 64},
        "kda": {"heads": 1, "key_heads": 1, "head_dim": 64, "state_dim": 64},
    },
    "cuda": {  # Nemotron-3-Super, Qwen3.5-122B, Kimi-Linear-48B
        "mamba2": {"heads": 128, "groups": 8, "head_dim": 64, "state_dim": 128},
        "gdn": {"heads": 64, "key_heads": 16, "head_dim": 128, "state_dim": 128},
        "kda": {"heads": 32, "key_heads": 32, "head_dim": 128, "state_dim": 128},
    },
}


@dataclass
class Life:
    """One request, or a fork of one."""

    line: int  # of the reference
    seat: int | None  # of the server; a fork has none
    to_go: int
    tokens: int  # committed so far, the context included
    seed: int  # of its rounding
    history: int = 0  # of the tokens, those that are not in the checkpoint
    error: float = 0.0  # worst of its folds
    slot: int | None = None  # None while it is away
    blob: bytes = b""
    back: int = 0  # step of its return


@dataclass
class Result:
    """What one family's soak found; the fields are the keys of its JSON."""

    family: str
    backend: str
    state_format: str
    rounding: str
    state_bound: float
    output_bound: float
    tokens: int = 0
    steps: int = 0
    requests: int = 0
    forks: int = 0
    preemptions: int = 0
    aborts: int = 0
    flushes: int = 0
    judged: int = 0
    lost: int = 0
    state_error: float = 0.0
    output_error: float = 0.0
    seconds: float = 0.0


class Soak:
    """One family's requests, their slots, and their float64 states.

    Parameters
    ----------
    spec : ReplaySpec
        What every layer is.
    device : torch.device
        Where kernels and reference run.
    layers, batch : int
        Layers, and requests served at once; as many forks may live beside them.
    trace : list of Request
        Which requests come when.
    seed : int
        Of all that is random.
    """

    def __init__(self, spec: ReplaySpec, device: torch.device, layers: int, batch: int, trace: list[Request], seed: int) -> None:
        self.spec, self.device, self.layers = spec, device, range(layers)
        self.random = random.Random(seed)
        generator = torch.Generator(device=device).manual_seed(seed)
        histograms = [acceptance_histogram(tokens, ACCEPTANCE) for tokens in range(1, spec.max_tokens + 1)]
        self.acceptance = [list(accumulate(histogram)) for histogram in histograms]
        self.server = Server(trace, batch, sum(a * chance for a, chance in enumerate(histograms[-1])))
        slots = batch + batch // 2  # fewer than lives, so that some wait for a slot
        self.cache = ReplayCache.allocate(spec, layers, slots, device)
        self.wrapper = ReplayWrapper(self.cache)
        self.weights = [synthetic.weights(spec, generator) for _ in self.layers]
        for layer, weights in enumerate(self.weights):
            self.cache.set_weights(layer, **weights)
        self.pool = synthetic.TokenPool(spec, (slots + 1) * spec.max_tokens, generator)
        self.states = synthetic.StatePool(spec, generator)
        self.free_slots, self.free_lines = list(range(slots)), list(range(2 * batch))
        for slot in self.free_slots:
            self._poison(slot)
        shape = (2 * batch, *spec.shape("H", "P", "N"))
        self.wanted = [torch.zeros(shape, dtype=torch.float64, device=device) for _ in self.layers]
        self.squares = [torch.zeros(2, 2 * batch, dtype=torch.float64, device=device) for _ in self.layers]  # of errors and of outputs
        self.lives: list[Life] = []
        self.exact = spec.checkpoint_dtype is torch.float32
        bounds = STATE_BOUND if self.exact else FOLD_BOUND, reading_bound(spec)
        self.result = Result(spec.family, device.type, spec.state_format, spec.rounding, *bounds)

    def run(self, goes_on: Callable[[Result], bool]) -> Result:
        """Serve for as long as is wanted after a step, then judge who is left."""
        start, result = time.monotonic(), self.result
        while goes_on(result):
            self._admit()
            self._disturb()
            self._step()
            result.steps += 1
            result.requests, result.seconds = self.server.admitted, round(time.monotonic() - start, 1)
        while self.lives:
            self._return(always=True)
            self._end([life for life in self.lives if life.slot is not None])
        self.cache.check()
        result.seconds = round(time.monotonic() - start, 1)
        return result

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _take_slot(self) -> int:
        return self.free_slots.pop(self.random.randrange(len(self.free_slots)))

    def _release(self, slot: int) -> None:
        self._poison(slot)
        self.free_slots.append(slot)

    def _poison(self, slot: int) -> None:
        """What a request leaves behind must not matter to the next one: bytes that are no number in any floating format."""
        for layer in self.cache.layers:
            for tensor in layer.values():
                tensor[slot].view(torch.int8).fill_(-1)

    def _admit(self) -> None:
        """Requests of the trace: a prefill's states are loaded, in either layout."""
        for seat, number in self.server.admit():
            context = 1 + number * 97 % 4096
            life = Life(self.free_lines.pop(), seat, self.server.active[seat], context, self.random.getrandbits(63))
            self.lives.append(life)
            for layer in self.layers:
                self.wanted[layer][life.line] = self.states.take(number * len(self.layers) + layer).double()
                self.squares[layer][:, life.line] = 0
            if self.free_slots:
                self._load(life)
            else:  # it waits for a slot, as if preempted at once
                life.back = self.result.steps

    def _load(self, life: Life) -> None:
        life.slot = self._take_slot()
        layout = self.random.choice(["vk", "kv"])
        positions = torch.tensor([life.tokens], dtype=torch.int64, device=self.device)
        for layer in self.layers:
            state = self.wanted[layer][life.line : life.line + 1].float()
            given = state if layout == "vk" else state.mT.contiguous()
            self.cache.load_state(layer, [life.slot], given, layout=layout, positions=positions)
        self._fold([life], loaded=True)
        if self.spec.stochastic:
            self.cache.cursors["seed"][life.slot] = life.seed

    def _fold(self, lives: list[Life], loaded: bool = False) -> None:
        """These have just been folded, or loaded: judge a checkpoint that has been rounded, and let the recurrence go on from it."""
        lives = [life for life in lives if loaded or life.history]
        if lives and not self.exact:
            slots, lines = [life.slot for life in lives], [life.line for life in lives]
            seeds, positions = (
                torch.tensor(values, dtype=torch.int64, device=self.device)
                for values in ([life.seed for life in lives], [life.tokens - life.history for life in lives])
            )
            for layer in self.layers:
                kept, want = self.cache.read_state(layer, slots).double(), self.wanted[layer][lines]
                scale = self.cache.layers[layer]["scale"][slots] if self.spec.scaled else None
                random = rounding.random_bits(self.spec, seeds, positions, layer) if self.spec.stochastic and not loaded else None
                size = torch.maximum(want.abs(), want.square().mean((2, 3), keepdim=True).sqrt())
                error = rounding.distance(self.spec, kept, want, scale, random) / size
                for life, worst in zip(lives, error.amax((1, 2, 3)).nan_to_num(torch.inf).tolist(), strict=True):
                    life.error = max(life.error, worst)
                self.wanted[layer][lines] = kept
        for life in lives:
            life.history = 0

    def _return(self, always: bool = False) -> None:
        """Requests that were away come back, to whatever slot is free."""
        for life in self.lives:
            if life.slot is None and self.free_slots and (always or life.back <= self.result.steps):
                if life.blob:
                    life.slot = self._take_slot()
                    self.cache.import_([life.slot], life.blob)
                    life.blob = b""
                else:
                    self._load(life)

    def _disturb(self) -> None:
        """Preemptions, forks and folds, by chance."""
        self._return()
        here = [life for life in self.lives if life.slot is not None]
        if here and self.random.random() < PREEMPT:
            life = self.random.choice(here)
            assert life.slot is not None
            life.blob = self.cache.export([life.slot])
            self._release(life.slot)
            life.slot, life.back = None, self.result.steps + self.random.randint(1, AWAY)
            here.remove(life)
            self.result.preemptions += 1
        if here and self.free_slots and self.free_lines and self.random.random() < FORK:
            life = self.random.choice(here)
            own = {"line": self.free_lines.pop(), "seat": None, "to_go": self.random.randint(1, FORK_TOKENS), "slot": self._take_slot()}
            fork = replace(life, **own)
            self.cache.copy_slots([life.slot], [fork.slot])
            for kept in (*self.wanted, *(squares.T for squares in self.squares)):
                kept[fork.line] = kept[life.line]
            self.lives.append(fork)
            self.result.forks += 1
        if here and self.random.random() < FOLD:
            folded = self.random.sample(here, (len(here) + 1) // 2)
            self.cache.flush([life.slot for life in folded])
            self._fold(folded)
            self.result.flushes += 1

    # ---- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        rows: list[Life | None] = [life for life in self.lives if life.slot is not None]
        if not rows:
            return
        rows.append(None)  # padding
        self.random.shuffle(rows)
        lengths, counts = [], []
        for life in rows:
            length, count = self._draw(life)
            lengths.append(length)
            counts.append(count)
        width = self.spec.max_tokens
        inputs = [self.pool.take(self.result.steps * len(self.layers) + layer, len(rows), width) for layer in self.layers]
        index = self._on_device([-1 if life is None else life.slot for life in rows])
        outputs = self._run(index, lengths, inputs)
        most = self.spec.buffer_len
        self._fold([life for life, length in zip(rows, lengths, strict=True) if life and length and life.history + length > most])
        self._refer(rows, counts, inputs, outputs)
        self.wrapper.commit(index, self._on_device(lengths), self._on_device(counts))
        finished = {}
        for life, count in zip(rows, counts, strict=True):
            if life is not None:
                life.tokens += count
                life.history += count
                life.to_go -= count
                self.result.tokens += count
                if life.seat is not None:
                    finished[life.seat] = count
        self._end([life for life in rows if life is not None and life.to_go <= 0])
        self.server.accept(finished)

    def _draw(self, life: Life | None) -> tuple[int, int]:
        """Tokens that a row brings, and how many of them are accepted."""
        length = 1 if self.random.random() < DECODE else self.random.randint(1, self.spec.max_tokens)
        if self.random.random() < IDLE:
            return 0, 0
        if self.random.random() < ABORT:
            self.result.aborts += 1
            return length, 0
        count = self.random.choices(range(length + 1), cum_weights=self.acceptance[length - 1])[0]
        return length, min(count, length if life is None else life.to_go)

    def _run(self, index: torch.Tensor, lengths: list[int], inputs: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Outputs ``[rows, T, H, P]`` of every layer, given padded or packed."""
        if self.random.random() < 0.5:
            self.wrapper.plan(index, self._on_device(lengths))
            return [self.wrapper.run(layer, **inputs[layer]) for layer in self.layers]
        width = self.spec.max_tokens
        places = [row * width + t for row, length in enumerate(lengths) for t in range(length)]
        if not places:
            places = [0]  # the one token of nobody
        kept = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.wrapper.plan(index, cu_seqlens=self._on_device([0, *accumulate(lengths)]))
        outputs = []
        for layer in self.layers:
            out = self.wrapper.run(layer, **{name: x.flatten(0, 1)[kept] for name, x in inputs[layer].items()})
            padded = out.new_zeros(len(lengths) * width, *out.shape[1:])
            padded[kept] = out
            outputs.append(padded.unflatten(0, (len(lengths), width)))
        return outputs

    def _refer(
        self, rows: list[Life | None], counts: list[int], inputs: list[dict[str, torch.Tensor]], outputs: list[torch.Tensor]
    ) -> None:
        """The reference over the accepted tokens, of all rows at once: rows are further heads."""
        for t in range(max(counts)):
            kept = [(row, life.line) for row, (life, count) in enumerate(zip(rows, counts, strict=True)) if life is not None and count > t]
            if not kept:
                return
            chosen, lines = torch.tensor(kept, dtype=torch.int64, device=self.device).T
            for layer in self.layers:
                tokens = {name: x[chosen, t].flatten(0, 1)[None] for name, x in inputs[layer].items()}
                weights = {name: w.repeat(len(kept), *[1] * (w.dim() - 1)) for name, w in self.weights[layer].items()}
                y, state = reference.recurrence(self.spec, tokens, weights, self.wanted[layer][lines].flatten(0, 1))
                self.wanted[layer][lines] = state.unflatten(0, (len(kept), -1))
                y = y[0].unflatten(0, (len(kept), -1))
                for sums, values in zip(self.squares[layer], (outputs[layer][chosen, t].double() - y, y), strict=True):
                    sums.index_add_(0, lines, values.square().sum((1, 2)))

    def _on_device(self, values: list[int | None]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # ---- judgement --------------------------------------------------------------------------------------------------

    def _end(self, lives: list[Life]) -> None:
        """Fold, compare, free."""
        if not lives:
            return
        result = self.result
        slots = [life.slot for life in lives]
        lines = torch.tensor([life.line for life in lives], dtype=torch.int64, device=self.device)
        self.cache.flush(slots)
        self._fold(lives)
        positions = self.cache.position[torch.tensor(slots, device=self.device)].tolist()
        outputs = torch.zeros(len(lives), dtype=torch.float64, device=self.device)
        states = torch.tensor([life.error for life in lives], dtype=torch.float64, device=self.device)
        for layer in self.layers:
            want = self.wanted[layer][lines].flatten(1)  # of a rounded checkpoint its own numbers, as its last fold left them
            error = (self.cache.read_state(layer, slots).flatten(1).double() - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-30)
            states = torch.maximum(states, error.nan_to_num(torch.inf))
            squares = self.squares[layer][:, lines]
            outputs = torch.maximum(outputs, (squares[0] / squares[1].clamp_min(1e-30)).sqrt().nan_to_num(torch.inf))
        for life, position, state, output in zip(lives, positions, states.tolist(), outputs.tolist(), strict=True):
            good = position == life.tokens and state <= result.state_bound and output <= result.output_bound
            if not good:
                print(f"lost: {life}: position {position}, state error {state:.3g}, output error {output:.3g}", file=sys.stderr)
            result.judged += 1
            result.lost += not good
            result.state_error, result.output_error = max(result.state_error, state), max(result.output_error, output)
            self.lives.remove(life)
            self.free_lines.append(life.line)
            assert life.slot is not None
            self._release(life.slot)


class Session:
    """What all families share: the time that is left, what the screen and the JSON file say.

    Parameters
    ----------
    options : argparse.Namespace
        Of the command line.
    device : torch.device
        Where the soak runs.
    """

    EVERY = 15.0  # seconds between two lines where no bar can be drawn, and between two writes of the file

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.results: list[Result] = []
        self.ends = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self._stopped, self._told = False, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[found]}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=Console(soft_wrap=True, highlight=False))

    def stop(self, *_: object) -> None:
        """Let no family begin, and the one that runs come to its end."""
        self._stopped = True

    def soak(self, family: str, families_left: int, trace: list[Request]) -> None:
        """One family, for its share of the tokens or of the time that is left."""
        options, start = self.options, time.monotonic()
        if self._stopped:
            return
        seconds = max(self.ends - start, 1e-3) / families_left
        task = self.progress.add_task(family, total=1.0, found="")

        def tell(result: Result, done: float) -> str:
            found = f"{result.tokens} tokens, {result.judged} judged, {result.lost} lost"
            self.progress.update(task, completed=min(done, 1.0), found=found)
            return found

        def goes_on(result: Result) -> bool:
            now = time.monotonic()
            done = max(result.tokens / options.tokens, (now - start) / seconds)
            found = tell(result, done)
            if now - self._told > self.EVERY:
                self._told = now
                if not self.progress.console.is_terminal:
                    self.progress.console.print(f"{family}: {found}")
                self.write([*self.results, result])
            return done < 1 and not self._stopped

        checkpoint, read = next(pair for pair, name in STATE_FORMATS.items() if name == options.format)
        precision = {"checkpoint_dtype": checkpoint, "read_dtype": read, "rounding": options.rounding}
        window = {"buffer_len": options.buffer_len, "max_tokens": options.max_tokens}
        spec = SPECS[family](**SHAPES[self.device.type][family], **window, **precision)
        result = Soak(spec, self.device, options.layers, options.batch, trace, options.seed).run(goes_on)
        self.results.append(result)
        self.write(self.results)
        tell(result, 1.0)
        self.progress.console.print(
            f"{family}: {result.tokens} tokens of {result.requests} requests and {result.forks} forks, {result.preemptions} preemptions, "
            f"{result.steps} steps in {result.seconds:.0f} s; {result.judged} judged, {result.lost} lost; "
            f"worst state error {result.state_error:.2g} of {result.state_bound}, worst output error {result.output_error:.2g}"
        )

    def write(self, results: list[Result]) -> None:
        """The file with what is known; a kill in the middle leaves the one before."""
        if path := self.options.json:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text(json.dumps(_report(self.options, self.device, results), indent=1) + "\n")
            os.replace(temporary, path)


def main(args: list[str] | None = None) -> int:
    """Run from the command line; 1 if a request is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="CSV", help="TIMESTAMP, ContextTokens, GeneratedTokens (default: the demo's)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--families", nargs="+", choices=[*SPECS], default=[*SPECS], help="default: all")
    parser.add_argument("--tokens", type=int, default=10**6, help="most tokens a family (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="end after about this long, all families together")
    parser.add_argument("--format", choices=[*STATE_FORMATS.values()], default="fp32_bf16", help="checkpoint_read (default: %(default)s)")
    parser.add_argument("--rounding", choices=ROUNDINGS, default="nearest", help="of a flush (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="requests served at once (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--buffer-len", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=4, help="most tokens a row brings to a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args(args)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the shapes are tiny: more threads, torch's and the kernels', would wait for each other
    trace = read_trace(options.trace)
    session = Session(options, device)
    before = {number: signal.signal(number, session.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with session.progress:
            for number, family in enumerate(options.families):
                session.soak(family, len(options.families) - number, trace)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    results = session.results
    return int(len(results) < len(options.families) or any(result.lost or not result.judged for result in results))


def _report(options: argparse.Namespace, device: torch.device, results: list[Result]) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    given = [word if Path(word) != options.trace else "TRACE.csv" for word in sys.argv[1:]]
    return {
        "command": " ".join(["python benchmarks/soak.py", *given]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": name,
        "versions": {"replayssm-jit": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "rows": [vars(result) for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
