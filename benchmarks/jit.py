"""Cold and warm start of one specialization: ``python benchmarks/jit.py --json FILE``.

Each sample is a fresh process. Cold: from the call of ``jit.compile`` on an empty cache to its return, so rendering, the
imports of Jinja and NVRTC, the compile and the write to disk are in it. Warm: the same call when the module is on disk:
lookup, verification and read of the binary. The interpreter's start and ``import replayssm_jit.jit`` are reported beside
them; the CUDA driver's own load is not part of either, and no GPU is needed. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
from typing import Any

CHILD = """
import pickle, sys, time
start = time.perf_counter()
from replayssm_jit import jit
imported = time.perf_counter() - start
module, arch = pickle.load(sys.stdin.buffer)
start = time.perf_counter()
entry = jit.compile(module, arch)
print(time.perf_counter() - start, imported, entry.meta["compiler"], sep="\\t")
"""


def sample(module: Any, arch: str | None, cache: str) -> tuple[float, float, str]:
    """Seconds of the call, seconds of the import, and the compiler, in a fresh process."""
    environment = {**os.environ, "REPLAYSSM_CACHE_DIR": cache, "REPLAYSSM_EXTRA_CACHE_DIRS": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=pickle.dumps((module, arch)), env=environment, stdout=subprocess.PIPE, check=True
    )
    call, imported, compiler = done.stdout.decode().rstrip("\n").split("\t")
    return float(call), float(imported), compiler


def measure(module: Any, arch: str | None, repeats: int) -> dict[str, Any]:
    """Medians and extremes over fresh processes."""
    cold, warm, imports, compiler = [], [], [], ""
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(sample(module, arch, cache)[0])
            call, imported, compiler = sample(module, arch, cache)
            warm.append(call)
            imports.append(imported)
    return {
        "module": module.name,
        "arch": arch or platform.machine(),
        "compiler": compiler,
        "cold_s": statistics.median(cold),
        "cold_max_s": max(cold),
        "warm_s": statistics.median(warm),
        "warm_max_s": max(warm),
        "import_s": statistics.median(imports),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--arch", default="sm_90", help="target of the CUDA module (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="fresh processes of each kind (default: %(default)s)")
    arguments = parser.parse_args()

    from replayssm_jit.specs import Mamba2Spec

    spec = Mamba2Spec(heads=128, groups=8, head_dim=64, state_dim=128, buffer_len=16, max_tokens=1)
    cuda = measure(spec.module("step", "cuda"), arguments.arch, arguments.repeats)
    cpu = measure(spec.module("step", "cpu"), None, arguments.repeats)
    result = {
        **cuda,
        "repeats": arguments.repeats,
        "cpu_backend": cpu,
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }
    for backend, row in (("cuda", cuda), ("cpu", cpu)):
        print(f"{backend}: {row['module']}, {row['arch']}, {row['compiler']}")
        print(f"  cold {row['cold_s'] * 1e3:7.1f} ms, slowest {row['cold_max_s'] * 1e3:.1f}")
        print(f"  warm {row['warm_s'] * 1e3:7.2f} ms, slowest {row['warm_max_s'] * 1e3:.2f}, import {row['import_s'] * 1e3:.0f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
