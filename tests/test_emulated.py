"""The CUDA kernels without a GPU: a short run of each on the emulator, and proof that the emulator sees what is missing.

``make test-emulated`` runs every behaviour test this way.
"""

import os
import subprocess
import sys

import emulator
import pytest
import test_step
import test_trees
import torch
from harness import FAMILIES, Harness, small_spec

BARRIERS = {"mamba2": 1, "gdn": 2, "kda": 4}
TREE_BARRIERS = {"kda": 1}  # those that trees alone have, the first ones
CPU = torch.device("cpu")


def cycles(family, seed, trees=False):
    with emulator.emulated(seed):
        harness = Harness(small_spec(family), CPU, slots=3, seed=1)
        (test_trees if trees else test_step).run_cycles(harness, "packed")
        return harness.cache.read_state(0, [0, 1, 2])


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cycles_in_any_order(family, trees):
    """Against the reference, and to the bit whatever order blocks, warps and lanes run in."""
    assert torch.equal(cycles(family, 1, trees), cycles(family, 2, trees))


@pytest.mark.parametrize(
    ("family", "barrier", "trees"),
    [
        *(
            pytest.param(family, at, False, marks=[] if family == "mamba2" else pytest.mark.slow)
            for family, count in BARRIERS.items()
            for at in range(count)
        ),
        *(pytest.param(family, at, True, marks=pytest.mark.slow) for family, count in TREE_BARRIERS.items() for at in range(count)),
    ],
)
def test_every_barrier_is_needed(family, barrier, trees, monkeypatch):
    """A step kernel that lacks any one of its barriers gives wrong results here."""

    def without(source, *args):
        parts = source.split("__syncthreads();")
        if f"TREE = {str(trees).lower()}" in source:  # neither the cursors nor plain steps among trees
            assert len(parts) == BARRIERS[family] + 1 + trees * TREE_BARRIERS.get(family, 0)
            parts[barrier : barrier + 2] = [f"{parts[barrier]};{parts[barrier + 1]}"]
        return translate("__syncthreads();".join(parts), *args)

    translate = emulator.translate
    monkeypatch.setattr(emulator, "translate", without)
    with pytest.raises(AssertionError):
        cycles(family, 0, trees)


def test_divergence_is_named():
    """Lanes that meet at different instructions end the process with a line that says where."""
    source = """
struct Params { int unused; };
extern "C" __global__ void kernel(const __grid_constant__ Params p) {
  if (threadIdx.x < 16) __syncwarp(); else __shfl_sync(~0u, 1, 0);
}
"""
    script = f"""
import ctypes, emulator
function = emulator.build(emulator.translate({source!r}), "diverges")
function(b"0000", (ctypes.c_uint * 3)(1, 1, 1), 32, 0, 0)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "lanes diverge at" in done.stderr
