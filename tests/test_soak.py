"""The soak itself: a short one finds nothing lost, and a cache that loses something is found out."""

import importlib.util
import json
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
    assert capsys.readouterr().out.count(" 0 lost") == len(FAMILIES)


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
