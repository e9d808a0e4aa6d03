"""Host cost of a step: ``python benchmarks/host.py --json FILE`` times run, plan and commit on the CPU side.

Launches are replaced by nothing, so what is left is what Python does: validation by signature, packing, allocation of outputs. On a CUDA
device the same calls are timed with their launches too, on shapes so small that the queue never fills; an element-wise torch
operation stands beside them as a scale. Of each call the torch operators are counted, without which it allocates no tensor, and what
Python's allocator has kept after a thousand calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm_jit import Mamba2Spec, ReplayCache, ReplayWrapper, jit, synthetic


def microseconds(call: Callable[[], object], calls: int = 500, repeats: int = 11) -> float:
    """Median over repeats of the mean of many calls, none of which waits for the device."""
    samples = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - begin) / calls * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(samples[1:])


class Operators(TorchDispatchMode):
    """Counts the torch operators of a block."""

    count = 0

    def __torch_dispatch__(self, operator: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def allocations(call: Callable[[], object], calls: int = 1000) -> dict[str, int]:
    """Torch operators of one call, and blocks of Python's allocator that many calls leave behind."""
    call()
    with Operators() as operators:
        call()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(calls):
        call()
    gc.collect()
    return {"torch_operators": operators.count, "blocks_kept": max(0, sys.getallocatedblocks() - before)}


def operations(device: torch.device, rows: int) -> dict[str, Callable[[], object]]:
    """What an engine calls in a step, on one small layer."""
    spec = Mamba2Spec(heads=2, groups=1, head_dim=32, state_dim=64, buffer_len=16, max_tokens=4)
    cache = ReplayCache.allocate(spec, 1, rows, device)
    generator = torch.Generator(device).manual_seed(0)
    cache.set_weights(0, **synthetic.weights(spec, generator))
    given = synthetic.TokenPool(spec, rows, generator).take(0, rows, 1)
    wrapper = ReplayWrapper(cache)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    accepted = torch.ones_like(slots)
    wrapper.plan(slots)
    out = wrapper.run(0, **given)

    def plan_and_run() -> None:
        wrapper.plan(slots)
        wrapper.run(0, out=out, **given)

    return {
        "run": lambda: wrapper.run(0, **given),
        "run, out given": lambda: wrapper.run(0, out=out, **given),
        "plan": lambda: wrapper.plan(slots),
        "plan and first run": plan_and_run,
        "commit": lambda: wrapper.commit(slots, 1, accepted),
        "torch.add, out given": lambda: torch.add(out, out, out=out),
    }


def nothing(*_: object) -> None:
    """Stand in for a launch."""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--rows", type=int, default=64, help="batch (default: %(default)s)")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    calls = operations(device, arguments.rows)
    rows: dict[str, dict[str, float]] = {name: {} for name in calls}
    kernel: type[jit.Kernel] = jit.HostKernel
    if device.type == "cuda":
        kernel = import_module("replayssm_jit.jit.driver").CudaKernel
        for name, call in calls.items():
            rows[name]["launched_us"] = microseconds(call)
    with mock.patch.object(kernel, "launch", nothing):
        for name, call in calls.items():
            if not name.startswith("torch"):
                rows[name]["host_us"] = microseconds(call)
                rows[name] |= allocations(call)

    print(f"{'':24}{'host, us':>10}{'with its launch, us':>22}{'torch operators':>18}{'blocks kept':>14}")
    for name, row in rows.items():
        host, launched = (f"{row[key]:.1f}" if key in row else "" for key in ("host_us", "launched_us"))
        counts = "".join(f"{row[key]:>{width}}" for key, width in (("torch_operators", 18), ("blocks_kept", 14)) if key in row)
        print(f"{name:24}{host:>10}{launched:>22}{counts}")
    if arguments.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        result = {"command": " ".join(["python", *sys.argv]), "device": device.type, **versions, "batch": arguments.rows, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
