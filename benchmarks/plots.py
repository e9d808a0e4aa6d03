"""Plots of a GPU benchmark's JSON: ``python benchmarks/plots.py REPORT.json DIR``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from contenders import BUFFER_LENS, Cell
from report import GDN, KDA, MAMBA, TWO_PLANES, best, shape

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

MODELS = (MAMBA, GDN, KDA)
BATCH = 256  # of the plots over L and T
REPLAYS = (("ours", TWO_PLANES), ("ours", "fp32"), ("ours", "int16/int8"), ("FlashInfer", "fp32"))

Cells = dict[Cell, list[dict[str, Any]]]


def draw(result: dict[str, Any], directory: Path) -> None:
    """Write ``speedup.png``, ``buffer_len.png`` and ``tokens.png``."""
    cells = {Cell(**entry["cell"]): entry["rows"] for entry in result["cells"]}
    directory.mkdir(parents=True, exist_ok=True)
    for name, plot in {"speedup": _speedup, "buffer_len": _buffer_len, "tokens": _tokens}.items():
        figure, axes = pyplot.subplots(1, len(MODELS), figsize=(15, 4.5), layout="constrained")
        for model, ax in zip(MODELS, axes, strict=True):
            ax.set_title(shape(Cell(model, 1, 1, 1, "fp32")))
            plot(ax, cells, model)
            ax.grid(alpha=0.3)
            if ax.get_legend_handles_labels()[1]:
                ax.legend(fontsize=8)
        figure.suptitle(f"{result['device']['name']}, commit {result['commit']}")
        figure.savefig(directory / f"{name}.png", dpi=120)
        pyplot.close(figure)


def _line(ax: Axes, points: dict[int, float], **style: Any) -> None:
    if points:
        ax.plot(list(points), list(points.values()), marker="o", markersize=4, **style)


def _axis(ax: Axes, label: str, ticks: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xlabel(label)


def _speedup(ax: Axes, cells: Cells, model: str) -> None:
    """Over the fastest public standard kernel of the same state dtype, by batch."""
    batches = sorted({cell.rows for cell in cells})
    contenders = [("fp32", maker, state) for maker, state in REPLAYS]
    contenders += [("bf16", maker, "bf16") for maker in ("ours", "FlashInfer")]
    for state, maker, format_ in contenders:
        points = {}
        for rows in batches:
            cell = cells.get(Cell(model, 1, rows, 1, state), [])
            base = best(cell, "standard", "public") or best(cell, "standard", "ours")
            replay = best(cell, "replay", maker, format_)
            if base and replay:
                points[rows] = base["us"] / replay["us"]
        _line(ax, points, label=f"{maker} {format_}", linestyle="-" if maker == "ours" else "--")
    ax.axhline(1.0, color="black", linewidth=0.8)
    _axis(ax, "batch", batches)
    ax.set_ylabel("speed-up over the standard kernel, T=1")


def _buffer_len(ax: Axes, cells: Cells, model: str) -> None:
    """Time over L, two planes, by new tokens."""
    for tokens in sorted({cell.tokens for cell in cells}):
        rows = cells.get(Cell(model, 1, BATCH, tokens, "fp32"), [])
        points = {}
        for buffer_len in BUFFER_LENS:
            row = best([row for row in rows if row["buffer_len"] == buffer_len], "replay", "ours", TWO_PLANES)
            if row:
                points[buffer_len] = row["us"]
        _line(ax, points, label=f"T={tokens}")
    ax.set_ylim(bottom=0)
    _axis(ax, "buffer length L", BUFFER_LENS)
    ax.set_ylabel(f"µs a step, fp32/bf16, B={BATCH}")


def _tokens(ax: Axes, cells: Cells, model: str) -> None:
    """Time over T: replay, and the kernels that read and write the state."""
    every = sorted({cell.tokens for cell in cells})
    series = [("replay", maker, state) for maker, state in REPLAYS]
    series += [("snapshots", "ours", "fp32"), ("snapshots", "public", "fp32"), ("last state", "public", "fp32")]
    for kernel, maker, state in series:
        points = {}
        for tokens in every:
            name = "standard" if tokens == 1 and kernel != "replay" else kernel
            row = best(cells.get(Cell(model, 1, BATCH, tokens, "fp32"), []), name, maker, state)
            if row:
                points[tokens] = row["us"]
        if kernel == "replay" or len(points) > 1:
            _line(ax, points, label=f"{maker} {kernel} {state}", linestyle="-" if maker == "ours" else "--")
    ax.set_yscale("log")
    ax.set_xticks(every)
    ax.set_xlabel("new tokens T")
    ax.set_ylabel(f"µs a step, fp32 state, B={BATCH}")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
