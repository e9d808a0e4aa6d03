"""What the GPU benchmark's numbers say, the bars with their verdicts and the matrix: ``python benchmarks/report.py JSON [MARKDOWN]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any

from contenders import CENTRAL_ROWS, DRAFT_RATE, FORMATS, HEADLINE, ONCE, STOCHASTIC, SWEEP, SWEPT_TOKENS, Cell

Row = dict[str, Any]
Measured = dict[str, Any]  # a cell with its rows, as the runner writes it

MAMBA, GDN, KDA = "nemotron-3-super-120b-a12b", "qwen3.5-122b-a10b", "kimi-k3"
MODELS = (MAMBA, GDN, KDA)
KDA_64 = "glm-5.3-flash"  # KDA with the Gated DeltaNet model's number of heads
TWO_PLANES = HEADLINE["fp32"]
ROWS = (1, 8, 32, 64, 128, 256, 512)
TOKENS = (1, 2, 4, 6, 8)


@dataclass(frozen=True)
class Against:
    """What a bar divides by: the fastest row of a kernel."""

    name: str
    kernel: str
    maker: str = "public"
    state: str | None = None
    cell: Cell | None = None  # another cell than the bar's own


@dataclass(frozen=True)
class Bar:
    """Our replay in a format, best buffer length, over something else: at most ``bar``.

    ``floor`` is what the bytes allow at the rate of a copy, in the same units.
    """

    cell: Cell
    state: str
    against: Against
    bar: float
    aim: float | None = None
    floor: float | None = None


STANDARD = Against("standard", "standard")
PUBLIC_REPLAY = Against("FlashInfer replay", "replay", maker="FlashInfer")
OUR_PLANES = Against("our fp32/bf16", "replay", maker="ours", state=TWO_PLANES)


def _cell(model: str, rows: int, tokens: int = 1, state: str = "fp32") -> Cell:
    return Cell(model, 1, rows, tokens, state)


BARS = (
    Bar(_cell(MAMBA, 256), TWO_PLANES, STANDARD, 0.34, 0.30, 0.28),
    Bar(_cell(MAMBA, 32), TWO_PLANES, STANDARD, 0.45, 0.38),
    Bar(_cell(MAMBA, 1), TWO_PLANES, STANDARD, 0.95, 0.80),
    Bar(_cell(MAMBA, 256, 4), TWO_PLANES, PUBLIC_REPLAY, 0.62, 0.55, 0.51),
    Bar(_cell(MAMBA, 256, state="bf16"), "bf16", PUBLIC_REPLAY, 0.75, 0.69, 0.63),
    Bar(_cell(GDN, 256), TWO_PLANES, STANDARD, 0.38, 0.33, 0.30),
    Bar(_cell(GDN, 256, 4), TWO_PLANES, replace(STANDARD, name="one standard T=1 step", cell=_cell(GDN, 256)), 0.48, 0.42, 0.39),
    Bar(_cell(GDN, 1), TWO_PLANES, STANDARD, 1.00, 0.85),
    Bar(_cell(KDA, 256), TWO_PLANES, STANDARD, 0.36, 0.31, 0.28),
    *(Bar(_cell(model, 256), "int16/int8", OUR_PLANES, 0.75, 0.65, 0.56) for model in MODELS),
    Bar(_cell(MAMBA, 256), "fp32", STANDARD, 0.71),
    Bar(_cell(GDN, 256), "fp32", STANDARD, 0.62),
    Bar(_cell(GDN, 256), TWO_PLANES, STANDARD, 0.50),
    Bar(_cell(KDA_64, 256), TWO_PLANES, replace(OUR_PLANES, name="our Gated DeltaNet", cell=_cell(GDN, 256)), 1.25),
)


def bar_cells() -> list[Cell]:
    """Cells that the bars need."""
    return list(dict.fromkeys(cell for bar in BARS for cell in (bar.cell, bar.against.cell) if cell))


def shape(cell: Cell) -> str:
    """Family and sizes of a cell."""
    spec = cell.spec(cell.state)
    family = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "KDA"}[spec.family]
    heads = f"{spec.heads}/{spec.groups_}" if spec.family == "gdn" else str(spec.heads)
    return f"{family} {heads} x {spec.head_dim} x {spec.state_dim}"


def best(rows: Iterable[Row], kernel: str | None, maker: str, state: str | None = None, acceptance: str = "full") -> Row | None:
    """The fastest row of a kernel, or of any. Maker ``public``: anyone but us."""
    fitting = [
        row
        for row in rows
        if row["us"] is not None
        and kernel in (None, row["kernel"])
        and row["acceptance"] == acceptance
        and (row["maker"] == maker or (maker == "public" and row["maker"] != "ours"))
        and state in (None, row["state"])
    ]
    return min(fitting, key=lambda row: float(row["us"]), default=None)


# ---- bars -----------------------------------------------------------------------------------------------------------


def bars(result: dict[str, Any]) -> list[Row]:
    """One row a bar, in the order of :data:`BARS`."""
    cells = {Cell(**entry["cell"]): entry for entry in result["cells"]}
    rates = [run["rates"] for run in result["runs"]]
    return [_bar(bar, cells.get(bar.cell), cells.get(bar.against.cell or bar.cell), rates) for bar in BARS]


def _bar(bar: Bar, mine: Measured | None, theirs: Measured | None, rates: Sequence[dict[str, float]]) -> Row:
    row: Row = {
        "shape": shape(bar.cell),
        "rows": bar.cell.rows,
        "tokens": bar.cell.tokens,
        "state": bar.state,
        "against": bar.against.name,
        "bar": bar.bar,
        "aim": bar.aim,
        "floor": bar.floor,
    }
    if mine is None or theirs is None:
        return row | {"verdict": "not measured"}
    ours = best(mine["rows"], "replay", "ours", bar.state)
    against = bar.against
    base = best(theirs["rows"], against.kernel, against.maker, against.state)
    if base is None and against.maker == "public":  # better than nothing, and the column names its maker
        base = best(theirs["rows"], against.kernel, "ours")
    own = best(theirs["rows"], "standard", "ours") or best(theirs["rows"], "snapshots", "ours")
    row["own_standard_us"] = own and own["us"]
    if ours is None or base is None:
        failed = [error for r in mine["rows"] if (r["maker"], r["state"]) == ("ours", bar.state) for error in _errors(r).values()]
        return row | {"verdict": f"not measured: {failed[0] if ours is None and failed else 'nothing to compare with'}"}
    ratio = ours["us"] / base["us"]
    verdict = "met" if ratio <= bar.bar else f"missed by {ratio / bar.bar - 1:.1%}"
    if mine["run"] != theirs["run"]:
        verdict += " (two runs)"
    row |= {
        "us": ours["us"],
        "p95": ours["p95"],
        "buffer_len": ours["buffer_len"],
        "copy_share": ours["bytes"] / ours["us"] / rates[mine["run"]]["copy"],
        "base_us": base["us"],
        "base": f"{base['maker']} {base['variant']}".strip(),
        "ratio": ratio,
        "verdict": verdict,
    }
    accepted = best(mine["rows"], "replay", "ours", bar.state, "histogram")
    if accepted:
        divisor = best(theirs["rows"], "replay", against.maker, against.state, "histogram") if against is PUBLIC_REPLAY else base
        row["histogram_ratio"] = divisor and accepted["us"] / divisor["us"]
    return row


def bars_table(rows: Sequence[Row]) -> str:
    """The bars as Markdown."""
    head = (
        *("shape", "B", "T", "checkpoint", "µs (p95)", "L", "of copy rate", "against", "its µs", "our standard"),
        *("ratio", "bar", "aim [floor]", "verdict", "ratio at .15/.20/.25/.40"),
    )
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        known = "us" in row
        goal = " ".join([_number(row["aim"], 2), f"[{row['floor']:.2f}]" if row["floor"] else ""]).strip()
        lines.append(
            _line(
                [
                    *(row["shape"], row["rows"], row["tokens"], row["state"]),
                    f"{row['us']:.1f} ({row['p95']:.1f})" if known else "",
                    row.get("buffer_len", ""),
                    f"{row['copy_share']:.0%}" if known else "",
                    f"{row['against']} ({row['base']})" if known else row["against"],
                    _number(row.get("base_us"), 1),
                    _number(row.get("own_standard_us"), 1),
                    f"**{row['ratio']:.3f}**" if known else "",
                    _number(row["bar"], 2),
                    goal,
                    row["verdict"],
                    _number(row.get("histogram_ratio"), 3),
                ]
            )
        )
    return "\n".join(lines) + "\n"


# ---- the whole matrix -----------------------------------------------------------------------------------------------


def matrix() -> list[Cell]:
    """Every cell of the full matrix, the ones that matter most first."""
    cells = starmap(Cell, product(MODELS, (1, 8), ROWS, TOKENS, ("fp32", "bf16")))
    return sorted(cells, key=_place)


def _place(cell: Cell) -> tuple[Any, ...]:
    """What the plots show: decode at 1/1 of the heads, and every T at one batch. Then T = 1 and 4 at 1/1, at 1/8, and other T."""
    whole = cell.shards == 1
    plotted = whole and (cell.tokens == 1 or (cell.rows == CENTRAL_ROWS and cell.state == "fp32"))
    stage = (False,) if plotted else (True, cell.tokens not in (1, 4), not whole)
    return (*stage, cell.state != "fp32", cell.tokens)


def all_cells() -> list[Cell]:
    """Those of the bars, then the rest of the matrix: what a run measures that nothing stops."""
    return list(dict.fromkeys([*bar_cells(), *matrix()]))


def coverage(result: dict[str, Any]) -> str:
    """How much of all that is there."""
    cells, measured = all_cells(), {Cell(**entry["cell"]) for entry in result["cells"]}
    return f"{len(measured.intersection(cells))} of {len(cells)} cells"


def line(rows: Sequence[Row]) -> str:
    """A cell in one line: the fastest of each kind."""
    parts = []
    for maker, kernel, state in dict.fromkeys((row["maker"], row["kernel"], row["state"]) for row in rows):
        row = best(rows, kernel, maker, state)
        window = f" L={row['buffer_len']}" if row and row["buffer_len"] else ""
        parts.append(f"{maker} {kernel} {state}{window} " + (f"{row['us']:.1f}" if row else "-"))
    return ", ".join(parts)


def slower(measured: Sequence[Measured]) -> list[str]:
    """Cells of one new token where our best replay of the state's own precision loses to the fastest standard kernel, anyone's."""
    found = []
    for entry in measured:
        cell = Cell(**entry["cell"])
        standard = [row for maker in ("public", "ours") if (row := best(entry["rows"], "standard", maker))]
        replay = best(entry["rows"], "replay", "ours", TWO_PLANES if cell.state == "fp32" else cell.state)
        if cell.tokens == 1 and standard and replay:
            ratio = replay["us"] / min(row["us"] for row in standard)
            if ratio > 1:
                found.append(f"{shape(cell)}, {cell.state}, B={cell.rows}: {ratio:.2f}")
    return found


def markdown(result: dict[str, Any]) -> str:
    """The report."""
    device, measured, runs = result["device"], result["cells"], result["runs"]
    cells = {Cell(**entry["cell"]): entry["rows"] for entry in measured}
    losses = slower(measured)
    single = sum(cell.tokens == 1 for cell in cells)
    spreads = sorted(row["p95"] / row["us"] - 1 for rows in cells.values() for row in rows if row["us"] is not None)
    parts = [
        "# GPU benchmark",
        f"{device['name']}, driver {device['driver']}; commit {result['commit']}; {coverage(result)}.",
        *(_run(run) for run in runs),
        "Microseconds of one layer's step over cold data, averaged over the flush cycle: median of 20 samples (10 of kernels that take "
        "milliseconds), each the mean over the replay of a CUDA graph of about a millisecond or more. p95 is above the median by "
        f"{_quantile(spreads, 0.5):.1%} in the middle of all rows, by {_quantile(spreads, 0.95):.1%} in nineteen of twenty.",
        "## Bars",
        "Ratios of medians, each side the fastest of its buffer lengths and variants. Standard: the fastest public kernel that reads and "
        "writes the state.",
        bars_table(bars(result)),
        f"One new token, checkpoint of the standard kernel's precision, {single} cells: slower than the fastest standard kernel in "
        + ("none." if not losses else f"{len(losses)}:\n\n" + "\n".join(f"* {loss}" for loss in losses)),
        *_formats(cells),
        *_lengths(cells),
        *_matrix(cells),
        *_details(measured, runs),
    ]
    failures = _failures(cells)
    if failures:
        parts += ["## Not measured", "\n".join(f"* {failure}" for failure in failures)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _run(run: dict[str, Any]) -> str:
    """When and how, with what, and the rates of the memory that torch reached meanwhile."""
    used = ", ".join(f"{name} {version or 'absent'}" for name, version in run["versions"].items())
    rates = ", ".join(f"{name} {rate / 1e6:.2f}" for name, rate in run["rates"].items())
    return f"{run['date']}; {used}; measured by torch, TB/s: {rates}.\n\n```\n{run['command']}\n```"


def _formats(cells: dict[Cell, list[Row]]) -> list[str]:
    """Every format of the checkpoint, where all are measured."""
    names = [name + rounding for name in FORMATS for rounding in ("", STOCHASTIC)]
    columns = {}
    for model in MODELS:
        rows = [row for state in HEADLINE for row in cells.get(_cell(model, CENTRAL_ROWS, state=state), [])]
        columns[model] = {name: row for name in names if (row := best(rows, "replay", "ours", name))}
    shown = [name for name in names if any(name in found for found in columns.values())]
    if not shown:
        return []
    lines = [_line(["checkpoint / read", *(shape(_cell(model, 1)) for model in MODELS)]), _line(["---"] * (len(MODELS) + 1))]
    for name in shown:
        found = [(columns[model].get(name), columns[model].get(TWO_PLANES)) for model in MODELS]
        lines.append(_line([name, *(_ratio(row, base) for row, base in found)]))
    return [
        f"## Formats of the checkpoint, B={CENTRAL_ROWS}, T=1",
        f"Ours; in brackets the ratio to {TWO_PLANES}.",
        "\n".join(lines),
    ]


def _lengths(cells: dict[Cell, list[Row]]) -> list[str]:
    """Time over L of the two planes."""
    lines = [_line(["shape", "T", *(f"L={length}" for length in SWEEP)]), _line(["---"] * (len(SWEEP) + 2))]
    for model in MODELS:
        for tokens in SWEPT_TOKENS:
            rows = cells.get(_cell(model, CENTRAL_ROWS, tokens), [])
            found = [best([row for row in rows if row["buffer_len"] == length], "replay", "ours", TWO_PLANES) for length in SWEEP]
            if any(found):
                lines.append(_line([shape(_cell(model, 1)), tokens, *(_number(row and row["us"], 1) for row in found)]))
    return [f"## Buffer length, {TWO_PLANES}, B={CENTRAL_ROWS}", "\n".join(lines)] if len(lines) > 2 else []


def _matrix(cells: dict[Cell, list[Row]]) -> list[str]:
    """One table a model and share of heads: ours and its ratio to the fastest public kernel, by T, state and batch."""
    parts = []
    for model, shards in sorted({(cell.model, cell.shards) for cell in cells}, key=_model_order):
        batches = sorted({cell.rows for cell in cells if (cell.model, cell.shards) == (model, shards)})
        lines = [_line(["T", "checkpoint", *(f"B={b}" for b in batches)]), _line(["---"] * (len(batches) + 2))]
        for tokens, state in sorted(
            {(cell.tokens, cell.state) for cell in cells if cell.model == model}, key=lambda k: (k[1] != "fp32", k)
        ):
            for acceptance in ("full", "histogram"):
                found = []
                for rows in batches:
                    measured = cells.get(Cell(model, shards, rows, tokens, state), [])
                    mine = best(measured, "replay", "ours", HEADLINE[state], acceptance)
                    # What rewrites the state at every token does not know how many will be kept.
                    theirs = [row for row in measured if row["kernel"] != "replay" or row["acceptance"] == acceptance]
                    found.append(_ratio(mine, best(({**row, "acceptance": "full"} for row in theirs), None, "public")))
                if any(found):
                    name = HEADLINE[state] + (", histogram" if acceptance != "full" else "")
                    lines.append(_line([tokens, name, *found]))
        if len(lines) > 2:
            parts.append(f"### {_title(model, shards)}\n\n" + "\n".join(lines))
    if not parts:
        return []
    return [
        "## Ours, best buffer length, and in brackets its ratio to the fastest public kernel",
        "Of the same state dtype, whatever its kind: standard, replay, snapshots (the state after every token), or for Gated DeltaNet at "
        "T > 1 one that keeps the last state only, so that no draft can be rejected. Histogram: .15/.20/.25/.40 for 1 … 4 of T=4; for "
        f"other T each draft is kept with a chance of {DRAFT_RATE}, as many in the mean. Without it every token is kept.",
        *parts,
    ]


def _model_order(table: tuple[str, int]) -> tuple[int, int]:
    return (*MODELS, KDA_64).index(table[0]), table[1]


def _title(model: str, shards: int) -> str:
    return f"{shape(Cell(model, shards, 1, 1, 'fp32'))} ({model}, 1/{shards} of the heads)"


def _details(measured: Sequence[Measured], runs: Sequence[dict[str, Any]]) -> list[str]:
    """One table a model and share of heads: every contender, batches as columns."""
    order = {name: place for place, name in enumerate(FORMATS)}
    tables: dict[tuple[str, int], dict[tuple[Any, ...], dict[int, str]]] = {}
    for entry in measured:
        cell = Cell(**entry["cell"])
        lines = tables.setdefault((cell.model, cell.shards), {})
        for kernel, maker, state, acceptance in dict.fromkeys(
            (r["kernel"], r["maker"], r["state"], r["acceptance"]) for r in entry["rows"]
        ):
            row = best(entry["rows"], kernel, maker, state, acceptance)
            if row and state not in ONCE[cell.state]:  # those have a table of their own
                place = (cell.state != "fp32", cell.tokens, kernel == "replay", maker == "ours", order[state.removesuffix(STOCHASTIC)])
                name = f"{maker} {kernel} {state}" + (", histogram" if acceptance != "full" else "")
                length = f" L{row['buffer_len']}" if row["buffer_len"] else ""
                share = row["bytes"] / row["us"] / runs[entry["run"]]["rates"]["copy"]
                lines.setdefault((*place, name), {})[cell.rows] = f"{row['us']:.1f}{length} {share:.0%}"
    parts = []
    for model, shards in sorted(tables, key=_model_order):
        found = tables[model, shards]
        batches = sorted({rows for line in found.values() for rows in line})
        lines = [_line(["T", "", *(f"B={b}" for b in batches)]), _line(["---"] * (len(batches) + 2))]
        lines += [_line([key[1], key[-1], *(found[key].get(b, "") for b in batches)]) for key in sorted(found)]
        parts.append(f"### {_title(model, shards)}\n\n" + "\n".join(lines))
    intro = "µs, the buffer length that was best, and the share of the rate of a copy that the bytes of state and ring (by the spec) make."
    return ["## All cells", intro, *parts]


def _failures(cells: dict[Cell, list[Row]]) -> list[str]:
    """What did not run, with its reason, and in how many cells."""
    places: dict[str, dict[str, None]] = {}
    for cell, rows in cells.items():
        for row in rows:
            for variant, error in _errors(row).items():
                name = " ".join(filter(None, [row["maker"], row["kernel"], row["state"], variant]))
                lost = " (took the device down, the rest of the cell was not measured)" if row.get("lost") else ""
                places.setdefault(f"{name}, {error}{lost}", {})[cell.name] = None
    return [f"{name}: {len(where)} cells, {next(iter(where))} first" for name, where in places.items()]


def _errors(row: Row) -> dict[str, str]:
    """Variants that raised."""
    return {variant: found for variant, found in row["variants"].items() if isinstance(found, str)}


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _ratio(row: Row | None, base: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['us']:.1f}" + (f" ({row['us'] / base['us']:.2f})" if base else "")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _line(values: Iterable[object]) -> str:
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"


if __name__ == "__main__":
    report = markdown(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(report)
    else:
        print(report)
