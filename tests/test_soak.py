"""The soak itself: a short one finds nothing lost, and a cache that loses something is found out."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from harness import FAMILIES

from replayssm_jit import ReplayCache

# A source distribution has the tests, but no benchmarks.
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks/soak.py is not here")


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_lost(soak, tmp_path, capsys):
    """Every admitted request and every fork is judged."""
    assert soak.main(["--tokens", "3000", "--batch", "8", "--json", str(tmp_path / "soak.json")]) == 0
    report = json.loads((tmp_path / "soak.json").read_text())
    assert [row["family"] for row in report["rows"]] == list(FAMILIES)
    for row in report["rows"]:
        assert row["tokens"] >= 3000
        assert row["judged"] == row["requests"] + row["forks"]
        assert row["lost"] == 0
        assert min(row[name] for name in ("forks", "preemptions", "aborts", "flushes")) > 0
    assert capsys.readouterr().out.count(" 0 lost; ") == len(FAMILIES)


@pytest.mark.parametrize(("family", "state_format", "rounding"), [("mamba2", "fp8", "nearest"), ("gdn", "int16_int8", "stochastic")])
def test_rounded_checkpoints(soak, family, state_format, rounding, monkeypatch):
    """Judged fold by fold, and able to fail: with the random bits of another layer nearly every request is lost."""
    arguments = ["--tokens", "3000", "--batch", "8", "--families", family, "--format", state_format, "--rounding", rounding]
    assert soak.main(arguments) == 0
    if rounding == "stochastic":
        draw = soak.rounding.random_bits
        monkeypatch.setattr(soak.rounding, "random_bits", lambda spec, seed, position, layer: draw(spec, seed, position, layer + 1))
    else:
        monkeypatch.setattr(soak, "FOLD_BOUND", 1e-8)
    assert soak.main(arguments) == 1


@pytest.mark.parametrize("ends", ["time", "signal"])
def test_it_ends_with_what_it_has(soak, ends, tmp_path, monkeypatch):
    """When its time is up, and when it is told to: whoever was admitted is judged, and the file is whole."""
    path, step = tmp_path / "soak.json", soak.Soak._step

    def stopped(self):
        step(self)
        if self.result.steps == 40:
            os.kill(os.getpid(), signal.SIGTERM)

    if ends == "signal":
        monkeypatch.setattr(soak.Soak, "_step", stopped)
    monkeypatch.setattr(soak.Session, "EVERY", 0.05)
    limit = ["--minutes", "0.05"] if ends == "time" else []
    assert soak.main(["--tokens", "1000000000", "--batch", "8", *limit, "--json", str(path)]) == (ends == "signal")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == (1 if ends == "signal" else len(FAMILIES))
    for row in rows:
        assert row["judged"] == row["requests"] + row["forks"] > 0
        assert row["lost"] == 0
    assert list(tmp_path.iterdir()) == [path]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def stale_cursors(monkeypatch):
    """Bytes return without their history."""
    real = ReplayCache.import_

    def import_(self, slots, blob):
        real(self, slots, blob)
        self.history[slots] = 0

    monkeypatch.setattr(ReplayCache, "import_", import_)


def shared_ring(monkeypatch):
    """A fork that is copied without the last tensor of its ring."""
    real = ReplayCache.copy_slots

    def copy_slots(self, source, destination):
        name = list(self.layers[0])[-1]
        kept = self.layers[0][name][destination].clone()
        real(self, source, destination)
        self.layers[0][name][destination] = kept

    monkeypatch.setattr(ReplayCache, "copy_slots", copy_slots)


@pytest.mark.parametrize("fault", [stale_cursors, shared_ring], ids=lambda f: f.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_is_found(soak, family, fault, monkeypatch, capsys):
    fault(monkeypatch)
    assert soak.main(["--tokens", "3000", "--batch", "8", "--families", family]) == 1
    assert "lost: Life(" in capsys.readouterr().err
