"""What the GPU benchmark's numbers say: the bars with their verdicts, and tables of the whole matrix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contenders import FORMATS, Cell

Row = dict[str, Any]
Measured = dict[str, Any]  # a cell with its rows, as the runner writes it

MAMBA, GDN, KDA = "nemotron-3-super-120b-a12b", "qwen3.5-122b-a10b", "kimi-k3"
KDA_64 = "glm-5.3-flash"  # KDA with the Gated DeltaNet model's number of heads
TWO_PLANES = "fp32/bf16"


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
    *(Bar(_cell(model, 256), "int16/int8", OUR_PLANES, 0.75, 0.65, 0.56) for model in (MAMBA, GDN, KDA)),
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


def best(rows: Iterable[Row], kernel: str, maker: str, state: str | None = None, acceptance: str = "full") -> Row | None:
    """The fastest row of a kernel. Maker ``public``: anyone but us."""
    fitting = [
        row
        for row in rows
        if row["us"] is not None
        and row["kernel"] == kernel
        and row["acceptance"] == acceptance
        and (row["maker"] == maker or (maker == "public" and row["maker"] != "ours"))
        and state in (None, row["state"])
    ]
    return min(fitting, key=lambda row: float(row["us"]), default=None)


# ---- bars -----------------------------------------------------------------------------------------------------------


def bars(measured: Sequence[Measured]) -> list[Row]:
    """One row a bar, in the order of :data:`BARS`."""
    cells = {Cell(**entry["cell"]): entry for entry in measured}
    return [_bar(bar, cells.get(bar.cell), cells.get(bar.against.cell or bar.cell)) for bar in BARS]


def _bar(bar: Bar, mine: Measured | None, theirs: Measured | None) -> Row:
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
        missing = [r["error"] for r in mine["rows"] if ours is None and r["maker"] == "ours" and r["state"] == bar.state and r["error"]]
        return row | {"verdict": f"not measured: {missing[0] if missing else 'nothing to compare with'}"}
    ratio = ours["us"] / base["us"]
    verdict = "met" if ratio <= bar.bar else f"missed by {ratio / bar.bar - 1:.1%}"
    if mine["run"] != theirs["run"]:
        verdict += " (two runs)"
    row |= {
        "us": ours["us"],
        "p95": ours["p95"],
        "buffer_len": ours["buffer_len"],
        "copy_share": ours["copy_share"],
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
    device, measured = result["device"], result["cells"]
    used = ", ".join(f"{name} {version or 'absent'}" for name, version in result["versions"].items())
    losses = slower(measured)
    single = sum(entry["cell"]["tokens"] == 1 for entry in measured)
    parts = [
        "# GPU benchmark",
        f"{device['name']}, driver {device['driver']}; {used}; commit {result['commit']}; {result['date']}.",
        f"```\n{result['command']}\n```",
        "Microseconds of one layer's step: median of CUDA-graph replays over cold data, averaged over the flush cycle. Measured by torch "
        "in the same run, TB/s: " + ", ".join(f"{name} {rate / 1e6:.2f}" for name, rate in result["rates"].items()) + ".",
        "## Bars",
        "Ratios of medians; the best buffer length of 16, 32 and 64. Standard: the fastest public kernel that reads and writes the state.",
        bars_table(result["bars"]),
        f"One new token, checkpoint of the standard kernel's precision, {single} cells: slower than the fastest standard kernel in "
        + ("none." if not losses else f"{len(losses)}:\n\n" + "\n".join(f"* {loss}" for loss in losses)),
        "## All cells",
        "In brackets the buffer length that was best.",
        *_matrix(measured),
    ]
    failures = _failures(measured)
    if failures:
        parts += ["## Not measured", "\n".join(f"* {failure}" for failure in failures)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _matrix(measured: Sequence[Measured]) -> list[str]:
    """One table a model, share of heads, number of tokens and precision; batches are its columns."""
    tables: dict[tuple[str, int, int, str], dict[int, list[Row]]] = {}
    for entry in measured:
        cell = Cell(**entry["cell"])
        tables.setdefault((cell.model, cell.shards, cell.tokens, cell.state), {})[cell.rows] = entry["rows"]
    order = {state: place for place, state in enumerate(FORMATS)}
    parts = []
    for (model, shards, tokens, state), batches in sorted(tables.items()):
        columns = sorted(batches)
        cell = Cell(model, shards, columns[0], tokens, state)
        keys = dict.fromkeys(
            (row["kernel"], row["maker"], row["state"], row["acceptance"]) for b in columns for row in batches[b] if row["us"] is not None
        )
        lines = [_line([state, *(f"B={b}" for b in columns)]), _line(["---"] * (len(columns) + 1))]
        for kernel, maker, format_, acceptance in sorted(keys, key=lambda k: (k[0] == "replay", k[1] == "ours", order[k[2]], k[3])):
            name = f"{maker} {kernel}" + (f" {format_}" if kernel == "replay" else "") + (", histogram" if acceptance != "full" else "")
            found = [best(batches[b], kernel, maker, format_, acceptance) for b in columns]
            lines.append(_line([name, *(_time(row) for row in found)]))
        parts.append(f"### {shape(cell)} ({model}, 1/{shards} of the heads), T={tokens}, {state}\n\n" + "\n".join(lines))
    return parts


def _failures(measured: Sequence[Measured]) -> list[str]:
    """What did not run, with its reason, and in how many cells."""
    counts: dict[str, int] = {}
    for entry in measured:
        for row in entry["rows"]:
            if row["us"] is None:
                name = f"{row['maker']} {row['kernel']} {row['state']}: {row['error']}"
                counts[name] = counts.get(name, 0) + 1
    return [f"{name} ({count} cells)" for name, count in counts.items()]


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['us']:.1f}" + (f" ({row['buffer_len']})" if row["buffer_len"] else "")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _line(values: Iterable[object]) -> str:
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"
