"""Importing costs next to nothing and does nothing: fresh processes, as a user has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def fresh(code: str, **environment: str) -> str:
    """Run code in a new interpreter that finds the package in this tree."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_files_and_no_cuda(tmp_path):
    """Nothing is written anywhere in a home of one's own, no CUDA library is loaded, no context made, no warning printed."""
    code = """
import sys, warnings
import torch
before = set(sys.modules)  # torch may bring the CUDA bindings itself
warnings.simplefilter("error")
import replayssm_jit
names = [getattr(replayssm_jit, name) for name in replayssm_jit.__all__]
import replayssm_jit.cache, replayssm_jit.wrapper, replayssm_jit.reference, replayssm_jit.specs, replayssm_jit.models
heavy = {name for name in set(sys.modules) - before if name.split(".")[0] in ("cuda", "jinja2", "ninja", "rich", "click")}
assert not heavy, heavy
assert not torch.cuda.is_initialized()
maps = open("/proc/self/maps").read()
assert "nvrtc" not in maps.lower() or "libtorch_cuda" in maps  # torch's CUDA build links it
"""
    home = tmp_path / "home"
    home.mkdir()
    places = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR")}
    assert fresh(code, **places) == ""
    assert list(home.rglob("*")) == []


def test_time_beyond_torch():
    """Everything public, at most 0.2 s after torch; the best of a few runs, as other processes may disturb."""
    code = """
import torch, time
start = time.perf_counter()
import replayssm_jit
for name in replayssm_jit.__all__:
    getattr(replayssm_jit, name)
print(time.perf_counter() - start)
"""
    assert min(float(fresh(code)) for _ in range(3)) <= 0.2


@pytest.mark.parametrize("module", ["replayssm_jit", "replayssm_jit.jit", "replayssm_jit.jit.params", "replayssm_jit.jit.module"])
def test_without_torch(module):
    """The JIT serves processes that have no torch, and its import reaches for nothing heavy."""
    code = f"""
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # an import would raise
import {module}
heavy = {{"jinja2", "ninja", "cuda", "rich", "click", "importlib.metadata"}} & set(sys.modules)
assert not heavy, heavy
"""
    fresh(code)


def test_unknown_names():
    code = """
import replayssm_jit
assert "ReplayCache" in dir(replayssm_jit)
try:
    replayssm_jit.ReplayCash
except AttributeError as error:
    print(error)
"""
    assert "ReplayCash" in fresh(code)
