"""Plots of a GPU benchmark's JSON: ``python benchmarks/plots.py REPORT.json DIR`` writes speedup.png, buffer_len.png and tokens.png."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from contenders import CENTRAL_ROWS, SWEEP, SWEPT_TOKENS, Cell
from report import MODELS, TWO_PLANES, best, shape

matplotlib.use("Agg")
from matplotlib import patheffects, pyplot
from matplotlib.axes import Axes

Cells = Mapping[Cell, list[dict[str, Any]]]
Points = dict[int, float]

INK, FAINT = "#22272e", "#8b949e"
HERO, BLUE, TEAL, PURPLE, ORANGE = "#0b5cad", "#7fb2e5", "#1b9e8a", "#8250bf", "#e8710a"
OUTLINE = [patheffects.withStroke(linewidth=2.5, foreground="white")]
VALUE = {"fontsize": 8, "fontweight": "bold", "path_effects": OUTLINE, "zorder": 4}
TWO_PLANES_LABEL = "ours, fp32 in two planes"
STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#d0d7de",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
}


def draw(result: dict[str, Any], directory: Path) -> None:
    """Write the three figures; what is not measured stays away."""
    cells = {Cell(**entry["cell"]): entry["rows"] for entry in result["cells"]}
    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        "speedup": (_speedup, "Speed-up of one decode step over the fastest public kernel that rewrites the state, T = 1"),
        "buffer_len": (_buffer_len, f"Time of a step over the buffer length, fp32 in two planes, B = {CENTRAL_ROWS}"),
        "tokens": (_tokens, f"Time of a step over the number of new tokens, fp32 state, B = {CENTRAL_ROWS}"),
    }
    for name, (plot, title) in figures.items():
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(1, len(MODELS), figsize=(13.5, 4.8), sharey=name == "speedup")
            for model, ax in zip(MODELS, axes, strict=True):
                ax.set_title(shape(Cell(model, 1, 1, 1, "fp32")).replace(" x ", " \u00d7 "))
                plot(ax, cells, model)
            handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
            handles = {TWO_PLANES_LABEL: handles.pop(TWO_PLANES_LABEL), **handles} if TWO_PLANES_LABEL in handles else handles
            figure.suptitle(title, x=0.012, y=0.975, ha="left", fontsize=13, fontweight="bold")
            source = f"{result['device']['name']}, commit {result['commit'][:12]}: medians over cold data, averaged over the flush cycle"
            figure.text(0.012, 0.885, source, color=FAINT, fontsize=9)
            figure.legend(
                handles.values(), handles.keys(), loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=4, frameon=False, fontsize=9
            )
            figure.subplots_adjust(left=0.05, right=0.99, top=0.8, bottom=0.24, wspace=0.14)
            figure.savefig(directory / f"{name}.png", dpi=120)
            pyplot.close(figure)


def _line(ax: Axes, points: Points, label: str, color: str, **style: Any) -> None:
    if points:
        ax.plot(list(points), list(points.values()), label=label, color=color, **{"marker": "o", "markersize": 4, **style})


def _values(ax: Axes, points: Points, form: str, color: str, *, below: bool = False) -> None:
    for x, y in points.items():
        place = (0, -13) if below else (0, 6)
        ax.annotate(format(y, form), (x, y), place, textcoords="offset points", ha="center", color=color, **VALUE)


def _speedup(ax: Axes, cells: Cells, model: str) -> None:
    batches = sorted({cell.rows for cell in cells})

    def over(state: str, maker: str, format_: str) -> Points:
        found = {}
        for rows in batches:
            cell = cells.get(Cell(model, 1, rows, 1, state), [])
            base = best(cell, "standard", "public") or best(cell, "standard", "ours")
            replay = best(cell, "replay", maker, format_)
            if base and replay:
                found[rows] = base["us"] / replay["us"]
        return found

    ax.axhline(1.0, color=FAINT, linewidth=1.2)
    hero = over("fp32", "ours", TWO_PLANES)
    _line(ax, over("fp32", "ours", "int16/int8"), "ours, 16 bits read as int8", TEAL)
    _line(ax, over("fp32", "ours", "fp32"), "ours, fp32 in one plane", BLUE)
    _line(ax, over("bf16", "ours", "bf16"), "ours, bf16 (over bf16)", PURPLE)
    _line(ax, over("fp32", "FlashInfer", "fp32"), "FlashInfer replay, fp32", ORANGE, linestyle="--")
    _line(ax, over("bf16", "FlashInfer", "bf16"), "FlashInfer replay, bf16 (over bf16)", ORANGE, linestyle=":")
    _line(ax, hero, TWO_PLANES_LABEL, HERO, linewidth=2.6, markersize=5.5, zorder=3)
    _values(ax, hero, ".2f", HERO)
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(rows) for rows in batches])
    ax.minorticks_off()
    ax.set_xlabel("batch B")
    ax.set_ylim(0, max(4.0, ax.get_ylim()[1] * 1.05))
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel("speed-up")


def _buffer_len(ax: Axes, cells: Cells, model: str) -> None:
    for tokens, color in zip(SWEPT_TOKENS, (HERO, TEAL, ORANGE), strict=True):
        rows = cells.get(Cell(model, 1, CENTRAL_ROWS, tokens, "fp32"), [])
        for acceptance, style in {"full": "-", "histogram": ":"}.items():
            points = {}
            for length in SWEEP:
                row = best([row for row in rows if row["buffer_len"] == length], "replay", "ours", TWO_PLANES, acceptance)
                if row:
                    points[length] = row["us"]
            kept = "" if tokens == 1 else ", all tokens kept" if acceptance == "full" else ", some drafts rejected"
            _line(ax, points, f"T = {tokens}{kept}", color, linestyle=style, markersize=4 if acceptance == "full" else 0)
            if points and acceptance == "full":
                shortest = min(points, key=points.__getitem__)
                _values(ax, {shortest: points[shortest]}, ".0f", color, below=True)
    ax.set_xticks(SWEEP, [str(length) for length in SWEEP])
    ax.set_xlabel("buffer length L")
    ax.set_ylim(0, ax.get_ylim()[1] * 1.05)
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel("µs a step")


def _tokens(ax: Axes, cells: Cells, model: str) -> None:
    every = sorted({cell.tokens for cell in cells})

    def over(kernel: str, maker: str, format_: str, acceptance: str = "full") -> Points:
        found = {}
        for tokens in every:
            name = "standard" if tokens == 1 and kernel != "replay" else kernel
            row = best(cells.get(Cell(model, 1, CENTRAL_ROWS, tokens, "fp32"), []), name, maker, format_, acceptance)
            if row:
                found[tokens] = row["us"]
        return found

    _line(ax, over("snapshots", "ours", "fp32"), "our standard kernel, a state a token", FAINT)
    for kernel, (name, style) in {"snapshots": ("a state a token", "--"), "last state": ("the last state only", ":")}.items():
        points = over(kernel, "public", "fp32")
        if max(points, default=1) > 1:
            _line(ax, points, f"public kernel, {name}", INK, linestyle=style)
    _line(ax, over("replay", "FlashInfer", "fp32"), "FlashInfer replay, fp32", ORANGE, linestyle="--")
    _line(ax, over("replay", "ours", "fp32"), "ours, fp32 in one plane", BLUE)
    _line(ax, over("replay", "ours", "int16/int8"), "ours, 16 bits read as int8", TEAL)
    hero = over("replay", "ours", TWO_PLANES)
    _line(ax, hero, TWO_PLANES_LABEL, HERO, linewidth=2.6, markersize=5.5, zorder=3)
    _values(ax, hero, ".0f", HERO, below=True)
    ax.set_yscale("log")
    ticks = [tick for tick in (50, 100, 200, 500, 1000, 2000, 5000, 10000) if ax.get_ylim()[0] <= tick <= ax.get_ylim()[1]]
    ax.set_yticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=ax.get_ylim()[0] * 0.75)
    ax.set_xticks(every)
    ax.set_xlabel("new tokens T")
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel("µs a step")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
