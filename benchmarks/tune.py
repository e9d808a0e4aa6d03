"""Measures how many heads a block should serve: ``python benchmarks/tune.py --write`` renews the table that launches follow.

One layer's step of the bars' models, T = 1, cycle average as in gpu.py, for powers of two of rows. The table has, for each family, from
which number of heads in a batch (rows times heads) on how many of them a block serves.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import contenders
import gpu
from report import GDN, KDA_64, MAMBA, TWO_PLANES

from replayssm_jit import tactics

TABLE = Path(tactics.__file__).parent / "data" / "tactics.json"
ROWS = [2**i for i in range(10)]
CANDIDATES = (1, 2, 4)
GAIN = 0.99  # a change that brings less is noise


def measure(model: str, rows: int) -> dict[int, float]:
    """Microseconds a step by heads a block."""
    cell = contenders.Cell(model, 1, rows, 1, "fp32")
    tensors = contenders.Tensors(cell)
    (replay,) = (c for c in contenders.ours(cell) if (c.state, c.buffer_len) == (TWO_PLANES, 16))
    times = {}
    for heads in CANDIDATES:
        with mock.patch.object(tactics, "measured_heads", lambda *_, heads=heads: heads):
            times[heads] = contenders.time_graph(replay.variants[""](tensors))[0]
    return times


def thresholds(times: dict[int, dict[int, float]]) -> list[list[int]]:
    """From the times of each batch's size: ``[from which size on, heads a block]``, the first from 0 on."""
    found: list[list[int]] = []
    for size, row in sorted(times.items()):
        best = min(row, key=row.__getitem__)
        if not found:
            found.append([0, best])
        elif row[best] < GAIN * row[found[-1][1]]:
            found.append([size, best])
    return found


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", type=Path, nargs="?", const=TABLE, metavar="FILE", help="write the table, by default that of the package"
    )
    arguments = parser.parse_args()
    table: dict[str, Any] = {"device": gpu.machine()["name"], "commit": gpu.commit(), "heads_per_block": {}}
    for model in (MAMBA, GDN, KDA_64):
        spec = contenders.Cell(model, 1, 1, 1, "fp32").spec(TWO_PLANES)
        times = {}
        for rows in ROWS:
            times[rows * spec.heads] = measure(model, rows)
            print(model, rows, {heads: round(us, 1) for heads, us in times[rows * spec.heads].items()}, flush=True)
        table["heads_per_block"][spec.family] = thresholds(times)
    text = json.dumps(table) + "\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
