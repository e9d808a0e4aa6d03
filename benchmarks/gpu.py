"""Ours and every public kernel present, side by side on one GPU: ``python benchmarks/gpu.py --only bars --json F --markdown F``.

Without ``--only bars`` the full matrix follows the bars' cells: three models at 1/1 and 1/8 of their heads, seven batches, five
numbers of new tokens, fp32 and bf16 states. With ``--out DIR`` each cell is a file there, and a later run of the same commit on the same
device goes on where this one stopped. Exit code 3: a kernel took the device down; run again to go on with the next cell.
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

MODELS = ("nemotron-3-super-120b-a12b", "qwen3.5-122b-a10b", "kimi-k3")
ROWS = (1, 8, 32, 64, 128, 256, 512)
TOKENS = (1, 4, 2, 6, 8)  # the ones that matter most first


def matrix() -> list[Cell]:
    """Every cell of the full matrix."""
    return [
        Cell(model, shards, rows, tokens, state)
        for shards in (1, 8)
        for tokens in TOKENS
        for state in ("fp32", "bf16")
        for model in MODELS
        for rows in ROWS
    ]


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


def measure(contender: Contender, tensors: Tensors, rates: dict[str, float]) -> Row:
    """Time a contender's variants; its row has the fastest."""
    row: Row = {
        "maker": contender.maker,
        "kernel": contender.kernel,
        "state": contender.state,
        "buffer_len": contender.buffer_len,
        "acceptance": contender.acceptance,
        "bytes": contender.bytes,
        "us": None,
        "variants": {},
        "error": contender.unsupported,
    }
    for name, build in contender.variants.items():
        launches: list[Launch] = []
        try:
            launches = build(tensors)
            contenders.check(launches)
            us, p95 = contenders.time_graph(launches)
        except Exception as error:
            row["variants"][name] = row["error"] = first_line(error)
            if device_lost():
                return row | {"lost": True}
            continue
        row["variants"][name] = us
        if row["us"] is None or us < row["us"]:
            row |= {"us": us, "p95": p95, "variant": name}
            row |= {f"{kind}_share": contender.bytes / us / rate for kind, rate in rates.items()}
    return row if row["us"] is None else row | {"error": ""}


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


def measure_cell(cell: Cell, rates: dict[str, float]) -> list[Row]:
    """All contenders of a cell, one after the other; what they allocate is freed in between."""
    tensors = Tensors(cell)
    rows: list[Row] = []
    for contender in [*contenders.ours(cell), *rivals.of(cell)]:
        rows.append(measure(contender, tensors, rates))
        if rows[-1].get("lost"):
            break
    gc.collect()
    return rows


# ---- running --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["bars"], help="only the cells that the bars need")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep cells in files there, and skip those that are there already")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after so many minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the plots there")
    arguments = parser.parse_args()
    begin = time.perf_counter()

    device, revision = machine(), commit()
    same = {"commit": revision, "device": device["name"]}
    wanted = list(dict.fromkeys([*report.bar_cells(), *([] if arguments.only else matrix())]))
    done: dict[Cell, dict[str, Any]] = {}
    for cell in wanted if arguments.out else ():
        file = arguments.out / f"{cell.name}.json"
        if file.exists() and (kept := json.loads(file.read_text())).items() >= same.items():
            done[cell] = kept
    todo = [cell for cell in wanted if cell not in done]
    compile_all(todo, device["arch"])

    rates = bandwidth()
    used = versions()
    print(f"{device['name']}, driver {device['driver']}, " + ", ".join(f"{name} {version or 'absent'}" for name, version in used.items()))
    print("TB/s: " + ", ".join(f"{name} {rate / 1e6:.2f}" for name, rate in rates.items()), flush=True)
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    lost = False
    for number, cell in enumerate(todo):
        if time.perf_counter() - begin > arguments.minutes * 60:
            print(f"{len(todo) - number} cells left for a later run")
            break
        clock = time.perf_counter()
        rows = measure_cell(cell, rates)
        done[cell] = {**same, "run": started, "rates": rates, "cell": asdict(cell), "rows": rows}
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{cell.name}.json").write_text(json.dumps(done[cell], indent=1) + "\n")
        print(f"[{number + 1}/{len(todo)}] {cell.name} {time.perf_counter() - clock:.1f} s: {report.line(rows)}", flush=True)
        lost = any(row.get("lost") for row in rows)
        if lost:
            break

    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": revision,
        "device": device,
        "versions": used,
        "rates": rates,
        "cells": list(done.values()),
    }
    result["bars"] = report.bars(result["cells"])
    text = report.markdown(result)
    print(text if arguments.only else report.bars_table(result["bars"]))
    print(f"{time.perf_counter() - begin:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.plots:
        import plots

        plots.draw(result, arguments.plots)
    return 3 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
