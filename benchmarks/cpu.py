"""Bandwidth shares of the CPU kernels: standard against replay, beside the ceilings of the memory, in one run.

Every number is an average over whole flush cycles with the rows' phases spread evenly (row r starts at history ``T (1 + r mod L/T)``),
over a state of at least ``--gigabytes``, so no cache holds it. Contenders take turns; a round measures the ceilings, every contender
over a whole cycle, and the ceilings again. Ratios are formed within a round, where neighbours on a shared machine treat all alike,
and rounds during which a ceiling moved by more than a tenth are left out. A virtual machine's memory may change between states that last
seconds to minutes: rounds whose read rates are alike are one state, and medians over the rounds of each state are reported.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from replayssm_jit import jit, memory, specs, synthetic
from replayssm_jit.jit.module import ModuleSpec
from replayssm_jit.jit.params import ParamStruct
from replayssm_jit.kernels import COMMIT, CURSOR_PARAMS

BANDWIDTH_PARAMS = ParamStruct.of(ptr=("data", "sink"), i64=("bytes", "ahead"), i32=("op", "threads"), f32=("addend",))
READ, UPDATE = range(2)

SHAPES: dict[str, dict[str, int]] = {  # Nemotron-3-Super, Qwen3.5-122B, Kimi-Linear-48B
    "mamba2": {"heads": 128, "head_dim": 64, "state_dim": 128, "groups": 8},
    "gdn": {"heads": 64, "head_dim": 128, "state_dim": 128, "key_heads": 16},
    "kda": {"heads": 32, "head_dim": 128, "state_dim": 128, "key_heads": 32},
}


def make_spec(family: str, **options: Any) -> specs.ReplaySpec:
    """The benchmark's spec of a family."""
    kind = {"mamba2": "Mamba2Spec", "gdn": "GdnSpec", "kda": "KdaSpec"}[family]
    return getattr(specs, kind)(**SHAPES[family], **options)


class Arena:
    """Memory for cache tensors: as a cache allocates it, or without huge pages."""

    def __init__(self, huge_pages: bool) -> None:
        self._huge = huge_pages

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor."""
        if self._huge:
            return memory.zeros(shape, dtype, torch.device("cpu"))
        count = math.prod(shape)
        small = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        small.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(small, dtype=dtype, count=count).view(shape).zero_()


class Launch:
    """A kernel bound to its packed parameters; the tensors live as long as it does."""

    def __init__(self, module: ModuleSpec, keep: object = None, **values: Any) -> None:
        self._kernel = jit.load(module)
        self._buffer = module.params.buffer()
        self._keep = (keep, values)
        module.params.pack(self._buffer, **{k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()})

    def __call__(self) -> None:
        self._kernel.launch(ctypes.addressof(self._buffer))


def bandwidth(state: torch.Tensor, op: int, ahead: int, threads: int) -> Launch:
    """One pass over the state's memory."""
    module = ModuleSpec("bandwidth", "cpu/bandwidth", "cpu", BANDWIDTH_PARAMS, ())
    sink = torch.zeros(1)
    return Launch(module, data=state, sink=sink, bytes=state.numel() * state.itemsize, ahead=ahead, op=op, threads=threads)


def step_values(spec: specs.ReplaySpec, rows: int, tokens: int, threads: int) -> dict[str, Any]:
    """What step and standard kernels both take: inputs, weights, output, sizes."""
    generator = torch.Generator().manual_seed(0)
    inputs = synthetic.TokenPool(spec, rows * tokens, generator).take(0, rows, tokens)
    inputs["out"] = torch.empty(rows, tokens, *spec.shape("H", "P"), dtype=spec.dtype)
    sizes = {"rows": rows, "tokens": tokens, "num_heads": spec.heads, "pad_slot": -1, "threads": threads}
    strides = {
        f"{name}_{axis}": stride
        for name, tensor in inputs.items()
        for axis, stride in zip(("row", "token", "outer"), tensor.stride(), strict=False)
    }
    return {**inputs, **synthetic.weights(spec, generator), **sizes, **strides}


def replay(spec: specs.ReplaySpec, state: torch.Tensor, arena: Arena, tokens: int, threads: int) -> Callable[[], None]:
    """A replayed step with its commit, full acceptance, on the given checkpoints."""
    slots_n, period = state.shape[0], spec.buffer_len // tokens
    slots = torch.arange(slots_n, dtype=torch.int32)
    history = (tokens * (1 + slots % period)).to(torch.int32)
    accepted = torch.full_like(slots, tokens)
    ring_start, position = torch.zeros_like(slots), torch.zeros(slots_n, dtype=torch.int64)
    error = torch.zeros(1, dtype=torch.int32)
    cache = {"state": state}
    for name, (shape, dtype) in spec.cache_tensors.items():
        if name != "state":
            cache[name] = arena.zeros((slots_n, *shape), dtype)
    values: dict[str, Any] = {f"{name}_slot": tensor.stride(0) for name, tensor in cache.items()}
    cursors = {"slots": slots, "ring_start": ring_start, "history": history}
    step = Launch(spec.module("step", "cpu"), **cache, **cursors, **values, **step_values(spec, slots_n, tokens, threads))
    commit = Launch(
        ModuleSpec("cursors", "cpu/cursors", "cpu", CURSOR_PARAMS, ()),
        **cursors,
        rows=slots_n,
        tokens=tokens,
        pad_slot=-1,
        num_accepted=accepted,
        position=position,
        error=error,
        buffer_len=spec.buffer_len,
        ring_len=spec.ring_len,
        op=COMMIT,
    )

    def run() -> None:
        step()
        commit()

    return run


def standard(spec: specs.ReplaySpec, state: torch.Tensor, tokens: int, threads: int) -> Launch:
    """The standard recurrence in place."""
    rows = state.shape[0]
    slots = torch.arange(rows, dtype=torch.int32)
    values = step_values(spec, rows, tokens, threads)
    write_slots = slots[:, None].expand(rows, tokens).contiguous()
    return Launch(spec.module("standard", "cpu"), state=state, state_slot=state.stride(0), slots=slots, write_slots=write_slots, **values)


def seconds(run: Callable[[], None], times: int) -> float:
    """Mean wall time of one call."""
    begin = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begin) / times


def measure(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """All contenders of one family, interleaved."""
    arena = Arena(args.huge_pages)
    options = {"buffer_len": args.buffer_len, "max_tokens": args.tokens, "dtype": torch.bfloat16}
    one = make_spec(family, **options, read_dtype=torch.float32)
    two = replace(one, read_dtype=torch.bfloat16)
    slots = int(args.gigabytes * 1e9 / (one.state_elements * 4)) + 1
    shape = (slots, *one.shape("H", "P", "N"))
    plain, planes = arena.zeros(shape, torch.float32), arena.zeros(shape, torch.float32)
    period = args.buffer_len // args.tokens
    size = plain.numel() * 4

    ceilings = {
        "read": [bandwidth(plain, READ, ahead, args.threads) for ahead in (0, 1024, 4096)],
        "update": [bandwidth(plain, UPDATE, ahead, args.threads) for ahead in (0, 1024)],
    }
    contenders: dict[str, tuple[specs.ReplaySpec, Callable[[], None], int]] = {
        "standard": (one, standard(one, plain, args.tokens, args.threads), 4),
        "replay fp32": (one, replay(one, plain, arena, args.tokens, args.threads), period),
        "replay fp32/bf16": (two, replay(two, planes, arena, args.tokens, args.threads), period),
    }

    def ceiling_rates() -> dict[str, float]:
        moved = {"read": size, "update": 2 * size}
        return {name: moved[name] / min(seconds(run, 2) for run in runs) for name, runs in ceilings.items()}

    rounds: list[dict[str, float]] = []
    for _ in range(args.repeats + 1):
        before = ceiling_rates()
        times = {name: seconds(run, count) for name, (_, run, count) in contenders.items()}
        after = ceiling_rates()
        drift = max(abs(after[name] / before[name] - 1) for name in before)
        rounds.append({**{name: max(before[name], after[name]) for name in before}, **times, "drift": drift})
    rounds = rounds[1:]  # the first one warms up
    states = [summarize(family, contenders, state, slots, args) for state in memory_states(rounds)]
    return {"states": states, "rounds": rounds}


def memory_states(rounds: list[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Steady rounds (all, if none is), those together whose read rates lie within a seventh above the slowest; the slowest state first."""
    states: list[list[dict[str, float]]] = []
    steady = [r for r in rounds if r["drift"] <= 0.1] or rounds
    for r in sorted(steady, key=lambda r: r["read"]):
        if not states or r["read"] > states[-1][0]["read"] * 8 / 7:
            states.append([])
        states[-1].append(r)
    return states


def summarize(
    family: str,
    contenders: dict[str, tuple[specs.ReplaySpec, Callable[[], None], int]],
    rounds: list[dict[str, float]],
    slots: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Medians over the rounds of one state of the memory."""
    period = args.buffer_len // args.tokens
    history, share = args.tokens * (period + 1) / 2, 1 / period
    rows: list[dict[str, Any]] = []
    for name, (spec, _, _) in contenders.items():
        moved = slots * (spec.standard_step_bytes() if name == "standard" else spec.step_bytes(args.tokens, history, share))
        ceiling = "update" if name == "standard" else "read"
        rows.append(
            {
                "family": family,
                "kernel": name,
                "slots": slots,
                "us_step": statistics.median(r[name] for r in rounds) * 1e6,
                "bytes_step": moved,
                "gb_s": statistics.median(moved / r[name] for r in rounds) / 1e9,
                "share": statistics.median(moved / r[name] / r[ceiling] for r in rounds),
                "speedup": statistics.median(r["standard"] / r[name] for r in rounds),
                "speedup_range": [pick(r["standard"] / r[name] for r in rounds) for pick in (min, max)],
            }
        )
    return {
        "read_gb_s": statistics.median(r["read"] for r in rounds) / 1e9,
        "update_gb_s": statistics.median(r["update"] for r in rounds) / 1e9,
        "rounds": len(rounds),
        "rows": rows,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--gigabytes", type=float, default=1.0, help="least size of the fp32 state")
    parser.add_argument("--tokens", type=int, default=1, help="new tokens of every row and step, all accepted; divides --buffer-len")
    parser.add_argument("--buffer-len", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9, help="measured rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--huge-pages", action=argparse.BooleanOptionalAction, default=True, help="ask the kernel for huge pages")
    parser.add_argument("--json", type=Path, help="write everything here")
    args = parser.parse_args()
    if args.buffer_len % args.tokens:
        parser.error("--tokens must divide --buffer-len")
    torch.set_num_threads(args.threads)

    load_before = os.getloadavg()
    report: dict[str, Any] = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": args.threads,
            "system": platform.platform(),
            "scheduling": scheduling(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "compiler": jit.host.version()},
        "date": time.strftime("%Y-%m-%d"),
        "load_before": load_before,
        "families": {},
    }
    for family in args.families:
        result = report["families"][family] = measure(family, args)
        for state in result["states"]:
            ceilings = f"read {state['read_gb_s']:.1f} GB/s, in-place read + write {state['update_gb_s']:.1f} GB/s"
            print(f"{family}: {ceilings}, {state['rounds']} of {args.repeats} rounds")
            print(f"  {'kernel':<18} {'us/step':>9} {'GB/s':>6} {'share':>6} {'speed-up':>8} {'range':>11}")
            for row in state["rows"]:
                low, high = row["speedup_range"]
                measured = f"{row['us_step']:>9.0f} {row['gb_s']:>6.1f} {row['share']:>6.0%} {row['speedup']:>8.2f}"
                print(f"  {row['kernel']:<18} {measured} {low:>5.2f}-{high:.2f}")
    report["load_after"] = os.getloadavg()
    print(f"load average before {load_before[0]:.2f}, after {report['load_after'][0]:.2f}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def scheduling() -> str:
    """How this process is scheduled: on a busy machine that decides what can be measured."""
    policies = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}
    return f"{policies.get(os.sched_getscheduler(0), 'unknown')}, nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def cpu_name() -> str:
    """Model name of this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
