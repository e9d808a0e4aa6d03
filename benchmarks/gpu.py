"""Ours and every public kernel present, side by side on one GPU: ``python benchmarks/gpu.py --json F --markdown F``.

The cells of the bars come first (``--only bars``: nothing else), then the full matrix: three models at 1/1 and 1/8 of their heads, seven
batches, five numbers of new tokens, fp32 and bf16 states, what matters most first. The JSON is written while the run goes on; where it
exists already, of the same commit and device, what it has is not measured again. Exit code 3: a kernel took the device
down; run again to go on with the next cell. ``report.py`` and ``plots.py`` make tables and plots of the JSON anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import contenders
import report
import rivals
import torch
from contenders import Cell, Contender, Launch, Tensors

from replayssm_jit import jit

Row = dict[str, Any]

SAVE_SECONDS = 5.0


def machine() -> dict[str, str]:
    """The GPU, its driver, and the architecture that our modules are compiled for; creates no CUDA context."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {"name": name, "driver": driver, "arch": import_module("replayssm_jit.jit.driver").device_arch(0)}


def commit() -> str:
    """The commit measured: REPLAYSSM_COMMIT, or what git says."""
    if "REPLAYSSM_COMMIT" in os.environ:
        return os.environ["REPLAYSSM_COMMIT"]
    try:
        done = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None: absent."""
    packages = {package: rivals.version(package) for package in rivals.PACKAGES}
    return {"python": sys.version.split()[0], "torch": torch.__version__, **packages}


# ---- compiling ------------------------------------------------------------------------------------------------------


def compile_module(module: jit.ModuleSpec, arch: str) -> str:
    """Compile into the cache; the error, if any, comes back when the module is loaded."""
    try:
        jit.compile(module, arch)
    except jit.JitError as error:
        return f"{module.name}: {first_line(error)}"
    return ""


def compile_all(cells: Iterable[Cell], arch: str) -> None:
    """Compile our modules of all cells, every core at work. The compilers are forked before this process has a CUDA context."""
    begin = time.perf_counter()
    modules = {module: None for cell in cells for contender in contenders.ours(cell) for module in contender.modules}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        errors = sorted({error for error in pool.map(compile_module, modules, [arch] * len(modules)) if error})
    print(f"{len(modules)} modules compiled in {time.perf_counter() - begin:.0f} s, {len(errors)} refused", flush=True)
    for error in errors[:5]:
        print(f"  {error}")


# ---- measuring ------------------------------------------------------------------------------------------------------


def bandwidth(gigabytes: float = 2.0) -> dict[str, float]:
    """Bytes a microsecond of a copy, an in-place update and a read, by torch."""
    a = torch.ones(int(gigabytes * 1e9 / 4), device=contenders.DEVICE)
    b = torch.ones_like(a)
    rows = a[: len(a) // 8192 * 8192].view(-1, 8192)
    size = a.numel() * a.itemsize
    operations: dict[str, tuple[float, list[list[Launch]]]] = {
        "copy": (2 * size, [[lambda: torch.mul(a, 1.0, out=b)]]),  # a kernel: in a graph, copy_ would be left to the copy engine
        "update": (2 * size, [[lambda: a.mul_(1.0)]]),
        "read": (size, [[lambda: a.sum()], [lambda: rows.sum(1)], [lambda: a.amax()]]),
    }
    return {
        name: moved / min(contenders.time_graph(launches)[0] for launches in candidates) for name, (moved, candidates) in operations.items()
    }


def measure(contender: Contender, tensors: Tensors) -> Row:
    """Time a contender's variants; its row has the fastest. One that raises leaves its error there."""
    row: Row = {
        "maker": contender.maker,
        "kernel": contender.kernel,
        "state": contender.state,
        "buffer_len": contender.buffer_len,
        "acceptance": contender.acceptance,
        "bytes": round(contender.bytes),
        "us": None,
        "variants": {},
    }
    for name, build in contender.variants.items():
        launches: list[Launch] = []
        try:
            launches = build(tensors)
            contenders.check(launches)
            us, p95 = (round(time, 3) for time in contenders.time_graph(launches))
        except Exception as error:
            row["variants"][name] = first_line(error)
            if device_lost():
                return row | {"lost": True}
            continue
        row["variants"][name] = us
        if row["us"] is None or us < row["us"]:
            row |= {"us": us, "p95": p95, "variant": name}
    return row


def first_line(error: BaseException) -> str:
    """Kind and first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def device_lost() -> bool:
    """Whether an error on the device has ended this process's use of it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def measure_cell(cell: Cell) -> list[Row]:
    """All contenders of a cell, one after the other; what they allocate is freed in between."""
    tensors = Tensors(cell)
    rows: list[Row] = []
    for contender in [*contenders.ours(cell), *rivals.of(cell)]:
        rows.append(measure(contender, tensors))
        if rows[-1].get("lost"):
            break
    gc.collect()  # tracebacks of errors keep tensors in circles
    gc.freeze()  # what is left are modules, and looking at those takes longer than many a cell
    return rows


# ---- running --------------------------------------------------------------------------------------------------------


def load(file: Path | None, same: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run has left in a file; SystemExit where that was another commit or device."""
    if file is None or not file.exists():
        return {**same, "runs": [], "cells": []}
    kept: dict[str, Any] = json.loads(file.read_text())
    other = [f"{name} {kept.get(name)}" for name in same if kept.get(name) != same[name]]
    if other:
        raise SystemExit(f"{file} is of {', '.join(other)}: name another file")
    return kept


def save(result: dict[str, Any], file: Path) -> None:
    """Write everything, a cell a line; a run that is killed meanwhile leaves the file as it was."""
    head = json.dumps({name: value for name, value in result.items() if name != "cells"}, indent=1)
    cells = ",\n".join(json.dumps(cell) for cell in result["cells"])
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(f'{head[:-2]},\n "cells": [\n{cells}\n ]\n}}\n')
    fresh.replace(file)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["bars"], help="only the cells that the bars need")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after so many minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="go on with what is there, and write everything there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()

    device = machine()
    result = load(arguments.json, {"commit": commit(), "device": device})
    wanted = report.bar_cells() if arguments.only else report.all_cells()
    done = {Cell(**entry["cell"]) for entry in result["cells"]}
    todo = [cell for cell in wanted if cell not in done]
    compile_all(todo, device["arch"])

    rates, used = bandwidth(), versions()
    print(f"{device['name']}, driver {device['driver']}, " + ", ".join(f"{name} {version or 'absent'}" for name, version in used.items()))
    print("TB/s: " + ", ".join(f"{name} {rate / 1e6:.2f}" for name, rate in rates.items()), flush=True)
    command = " ".join(["python", "benchmarks/gpu.py", *(sys.argv[1:] if argv is None else argv)])
    result["runs"].append({"date": time.strftime("%Y-%m-%d %H:%M"), "command": command, "versions": used, "rates": rates})
    saved, lost = time.perf_counter(), False
    for number, cell in enumerate(todo):
        clock = time.perf_counter()
        if clock - begin > arguments.minutes * 60:
            print(f"{len(todo) - number} cells left for a later run")
            break
        rows = measure_cell(cell)
        result["cells"].append({"cell": asdict(cell), "run": len(result["runs"]) - 1, "rows": rows})
        now = time.perf_counter()
        print(f"[{number + 1}/{len(todo)}] {cell.name} {now - clock:.1f} s: {report.line(rows)}", flush=True)
        lost = any(row.get("lost") for row in rows)
        if lost:
            break
        if arguments.json and now - saved > SAVE_SECONDS:
            save(result, arguments.json)
            saved = now

    if arguments.json:
        save(result, arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(result))
    print(report.bars_table(report.bars(result)))
    print(f"{report.coverage(result)}, {time.perf_counter() - begin:.0f} s")
    return 3 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
