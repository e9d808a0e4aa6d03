"""The GPU benchmark's own logic, without a GPU: what is measured in which order, what a run leaves behind, what is made of it."""

import importlib
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# A source distribution has the tests, but no benchmarks.
DIRECTORY = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not DIRECTORY.exists(), reason="benchmarks are not here")
RATES = {"copy": 4e6, "update": 4e6, "read": 4e6}


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules."""
    monkeypatch.syspath_prepend(str(DIRECTORY))
    names = ("contenders", "rivals", "report", "gpu")
    modules = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    yield modules
    for name in (*names, "plots"):
        sys.modules.pop(name, None)


@pytest.fixture
def stubbed(bench, monkeypatch):
    """A run without a device: kernels are functions, and their times are made up. ``measured`` has the name of every cell that ran."""
    c, stub = bench.contenders, SimpleNamespace(bench=bench, measured=[], kernels={}, lost=False)

    def build(name):
        def built(cell):
            stub.measured.append(cell.name)
            return [lambda: stub.kernels.get(name, lambda cell: torch.ones(2))(cell)]

        return built

    def ours(cell):
        both = [("standard", cell.state, None), ("replay", c.HEADLINE[cell.state], 16)]
        return [c.Contender("ours", kernel, state, {"": build(kernel)}, 1e6, length) for kernel, state, length in both]

    def rival(cell):
        return [c.Contender("rival", "standard", cell.state, {"first": build("first"), "second": build("second")}, 1e6)]

    monkeypatch.setattr(c, "ours", ours)
    monkeypatch.setattr(bench.rivals, "of", rival)
    monkeypatch.setattr(c, "time_graph", lambda launches: (10.0 * len(launches), 11.0))
    monkeypatch.setattr(bench.gpu, "Tensors", lambda cell: cell)
    monkeypatch.setattr(bench.gpu, "device_lost", lambda: stub.lost)
    monkeypatch.setattr(bench.gpu, "compile_all", lambda cells, arch: None)
    monkeypatch.setattr(bench.gpu, "bandwidth", lambda: RATES)
    monkeypatch.setattr(bench.gpu, "versions", lambda: {"rival": "1.0"})
    monkeypatch.setattr(bench.gpu, "machine", lambda: {"name": "stub", "driver": "0", "arch": "sm_90"})
    monkeypatch.setattr(bench.gpu, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(bench.report, "matrix", lambda: [c.Cell(bench.report.GDN, 1, rows, 1, "fp32") for rows in (8, 32, 64)])
    monkeypatch.setattr(bench.report, "bar_cells", lambda: [c.Cell(bench.report.GDN, 1, 8, 1, "fp32")])
    monkeypatch.setenv("REPLAYSSM_COMMIT", "abc")
    return stub


def names(result):
    return [(entry["cell"]["rows"], entry["run"]) for entry in result["cells"]]


def test_order(bench):
    """Every cell once; the plots' come first, then T = 1 and 4, whole models before their shares."""
    cells = bench.report.matrix()
    assert len(set(cells)) == len(cells) == 3 * 2 * 7 * 5 * 2
    at = {cell: i for i, cell in enumerate(cells)}

    def span(**wanted):
        found = [i for cell, i in at.items() if wanted.items() <= asdict(cell).items()]
        return min(found), max(found)

    decode = span(shards=1, tokens=1, state="fp32")
    assert decode == (0, 20)
    assert span(shards=1, tokens=8, state="fp32", rows=256)[1] < span(shards=1, tokens=4, state="fp32", rows=512)[0]
    assert span(shards=1, tokens=4, state="fp32")[1] < span(shards=1, tokens=4, state="bf16")[0]
    assert span(shards=1, tokens=4)[1] < span(shards=8, tokens=1)[0]
    assert span(shards=8, tokens=4)[1] < span(shards=1, tokens=2, rows=8)[0]


def test_run_that_is_stopped_goes_on(stubbed, tmp_path):
    """A file has every cell that was finished when the run died; the next run measures the others only."""
    file = tmp_path / "f.json"

    def stop(cell):
        if cell.rows == 32:
            raise KeyboardInterrupt
        return torch.ones(2)

    stubbed.kernels["replay"] = stop
    with pytest.raises(KeyboardInterrupt):
        stubbed.bench.gpu.main(["--json", str(file)])
    assert names(json.loads(file.read_text())) == [(8, 0)]

    stubbed.kernels.clear()
    stubbed.measured.clear()
    assert stubbed.bench.gpu.main(["--json", str(file), "--minutes", "0"]) == 0
    assert not stubbed.measured
    assert stubbed.bench.gpu.main(["--json", str(file)]) == 0
    assert {name.split("-b")[1] for name in stubbed.measured} == {"32-t1-fp32", "64-t1-fp32"}
    result = json.loads(file.read_text())
    assert names(result) == [(8, 0), (32, 2), (64, 2)]
    assert [run["rates"] for run in result["runs"]] == [RATES] * 3
    stubbed.measured.clear()
    assert stubbed.bench.gpu.main(["--json", str(file)]) == 0
    assert not stubbed.measured
    assert not list(tmp_path.glob("*.new"))


def test_only_bars(stubbed, tmp_path, capsys):
    """The report and the last line say how much of the whole matrix that is, also once another run has gone on."""
    file, tables = tmp_path / "f.json", tmp_path / "f.md"
    arguments = ["--json", str(file), "--markdown", str(tables)]
    assert stubbed.bench.gpu.main(["--only", "bars", *arguments]) == 0
    assert names(json.loads(file.read_text())) == [(8, 0)]
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 3 cells, ")
    assert "commit abc; 1 of 3 cells." in tables.read_text()
    assert stubbed.bench.gpu.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 of 3 cells, ")
    assert "commit abc; 3 of 3 cells." in tables.read_text()


def test_other_commit_is_refused(stubbed, tmp_path, monkeypatch):
    file = tmp_path / "f.json"
    stubbed.bench.gpu.main(["--json", str(file), "--minutes", "0"])
    before = file.read_bytes()
    monkeypatch.setenv("REPLAYSSM_COMMIT", "def")
    with pytest.raises(SystemExit, match=r"is of commit abc"):
        stubbed.bench.gpu.main(["--json", str(file)])
    assert file.read_bytes() == before


def test_contender_that_raises(stubbed, tmp_path, capsys):
    """Its row says why, the other variants and contenders count, and the run goes on."""

    def broken(cell):
        raise RuntimeError("no module\nat all")

    stubbed.kernels |= {"first": broken, "standard": lambda cell: torch.tensor([1.0, float("nan")])}
    file, tables = tmp_path / "f.json", tmp_path / "f.md"
    assert stubbed.bench.gpu.main(["--json", str(file), "--markdown", str(tables)]) == 0
    result = json.loads(file.read_text())
    assert names(result) == [(8, 0), (32, 0), (64, 0)]
    for entry in result["cells"]:
        standard, replay, rival = entry["rows"]
        assert (standard["us"], standard["variants"]) == (None, {"": "ArithmeticError: outputs are not finite"})
        assert (replay["us"], replay["p95"]) == (10.0, 11.0)
        assert (rival["us"], rival["variant"]) == (10.0, "second")
        assert rival["variants"] == {"first": "RuntimeError: no module", "second": 10.0}
    text = tables.read_text()
    assert "* rival standard fp32 first, RuntimeError: no module: 3 cells, qwen3.5-122b-a10b-tp1-b8-t1-fp32 first" in text
    assert "* ours standard fp32, ArithmeticError: outputs are not finite: 3 cells" in text


def test_lost_device(stubbed, tmp_path):
    """The run ends and says so; the next one goes on behind the cell."""
    file = tmp_path / "f.json"

    def crash(cell):
        stubbed.lost = True
        raise RuntimeError("illegal address")

    stubbed.kernels["replay"] = crash
    assert stubbed.bench.gpu.main(["--json", str(file)]) == 3
    result = json.loads(file.read_text())
    assert names(result) == [(8, 0)]
    assert [row["us"] for row in result["cells"][0]["rows"]] == [10.0, None]
    stubbed.lost = False
    stubbed.kernels.clear()
    assert stubbed.bench.gpu.main(["--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert names(result) == [(8, 0), (32, 1), (64, 1)]
    assert "took the device down" in stubbed.bench.report.markdown(result)


# ---- what is made of it ---------------------------------------------------------------------------------------------


@pytest.fixture
def result(bench, monkeypatch):
    """The bars' cells as if every contender ran at three quarters of the rate of a copy."""
    monkeypatch.setattr(bench.rivals, "version", lambda package: "1.0")
    run = {"date": "2026-01-01 00:00", "command": "python benchmarks/gpu.py", "versions": {"fla": None}, "rates": RATES}
    cells = []
    for cell in [*bench.report.bar_cells(), bench.contenders.Cell(bench.report.KDA, 8, 8, 2, "bf16")]:
        rows = []
        for contender in [*bench.contenders.ours(cell), *bench.rivals.of(cell)]:
            us = contender.bytes / 3e6
            row = {name: getattr(contender, name) for name in ("maker", "kernel", "state", "buffer_len", "acceptance", "bytes")}
            variants = dict.fromkeys(contender.variants, us)
            rows.append(row | {"us": us, "p95": us * 1.01, "variants": variants, "variant": next(iter(variants))})
        cells.append({"cell": asdict(cell), "run": 0, "rows": rows})
    return {"commit": "abc", "device": {"name": "stub", "driver": "0", "arch": "sm_90"}, "runs": [run], "cells": cells}


def test_tables(bench, result):
    """Bars divide what they say, a missed one says by how much, and a matrix with holes is no obstacle."""
    bars = bench.report.bars(result)
    assert [row["verdict"] for row in bars].count("not measured") == 0
    mamba = bars[0]
    length = mamba["buffer_len"]
    steady = bench.contenders.steady(length, 1, (0.0, 1.0))
    spec = bench.contenders.Cell(bench.report.MAMBA, 1, 256, 1, "fp32").spec("fp32/bf16", length)
    want = spec.step_bytes(1, steady.mean_history, steady.flush_share) / spec.standard_step_bytes()
    assert mamba["ratio"] == pytest.approx(want)
    assert mamba["copy_share"] == pytest.approx(0.75)
    (missed,) = [row for row in bars if row["bar"] == 1.25]
    assert missed["ratio"] > 0
    for entry in result["cells"]:
        for row in entry["rows"]:
            if row["state"] == "fp32/bf16":
                row["us"] *= 4
    late = bench.report.bars(result)[0]
    assert late["verdict"] == f"missed by {4 * want / 0.34 - 1:.1%}"

    text = bench.report.markdown(result)
    assert f"{len(bench.report.bar_cells()) + 1} of {3 * 2 * 7 * 5 * 2 + 1} cells." in text  # one bar's cell is not of the matrix
    assert "## Formats of the checkpoint" in text
    assert "| int8, stochastic |" in text
    assert "KDA 12 x 128 x 128 (kimi-k3, 1/8 of the heads)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| Mamba-2 128 x 64 x 128 | 4 |")]
    assert line.count("|") == 3 + len(bench.contenders.SWEEP)
    assert "" not in [value.strip() for value in line.split("|")[1:-1]]
    result["cells"] = []
    assert bench.report.markdown(result).count("not measured") == len(bars)


@pytest.mark.parametrize("cells", [None, 1, 0])
def test_plots(bench, result, tmp_path, cells):
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("plots")
    result["cells"] = result["cells"][:cells]
    plots.draw(result, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"speedup.png", "buffer_len.png", "tokens.png"}
    assert all(file.stat().st_size > 10_000 for file in tmp_path.iterdir())


# ---- contenders -----------------------------------------------------------------------------------------------------


def test_contenders_run(bench, monkeypatch):
    """Ours as the benchmark builds them, on the CPU with two heads: every launch serves its own slots and gives finite outputs."""
    c = bench.contenders
    real, served = c._spec, []

    class Spy(c.ReplayWrapper):
        def run(self, *arguments, **tensors):
            served.append(self.slots.tolist())
            return super().run(*arguments, **tensors)

    monkeypatch.setattr(c, "ReplayWrapper", Spy)
    monkeypatch.setattr(c, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(c, "COLD_BYTES", 1e6)
    monkeypatch.setattr(c, "_spec", lambda *arguments: replace(real(*arguments), heads=2, groups=1))
    for rows in (2, 16):  # where launches share a wrapper, and where they do not
        cell = c.Cell(bench.report.MAMBA, 8, rows, 2, "fp32")
        tensors = c.Tensors(cell)
        found = c.ours(cell)
        assert {(x.kernel, x.buffer_len, x.acceptance) for x in found} == {
            ("snapshots", None, "full"),
            *(("replay", length, name) for length in (16, 32) for name in ("full", "histogram")),
        }
        for contender in found:
            launches = contender.variants[""](tensors)
            assert len(launches) == len(tensors.slots) >= 64 // rows
            served.clear()
            c.check(launches)
            c.check(launches)  # cursors stand still: the same again
            assert contender.kernel != "replay" or served == 2 * tensors.slots.tolist()
        with pytest.raises(ArithmeticError):
            c.check([*launches, partial(torch.full_like, launches[0](), float("nan"))])
