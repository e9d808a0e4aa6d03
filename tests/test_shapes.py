"""Every shape family of published models, and odd ratios, over three flush cycles."""

import pytest
from harness import Harness
from test_step import run_cycles

from replayssm_jit import Mamba2Spec

# head_dim, state_dim, heads per group. The models' group counts only repeat a group, so two groups stand for eight.
MAMBA2 = {
    "nemotron-3-nano-30b-a3b": (64, 128, 8),
    "nemotron-3-nano-4b": (80, 128, 12),
    "nemotron-nano-9b-v2": (80, 128, 16),
    "nemotron-3-super-120b-a12b": (64, 128, 16),
    "nemotron-3-ultra-550b-a55b": (64, 128, 32),
    "mamba2-2.7b": (64, 128, 80),
    "bamba-9b": (64, 128, 128),
    "granite-4.0-h-tiny": (64, 128, 48),
    "granite-4.0-h-350m": (32, 128, 48),
    "falcon-h1-34b": (128, 256, 16),
    "falcon-h1-7b": (128, 256, 24),
    "falcon-h1-1.5b": (64, 256, 48),
    "falcon-h1-tiny-90m": (32, 64, 24),
    "three heads a group": (64, 128, 3),
    "five heads a group": (80, 64, 5),
    "one head a group": (128, 128, 1),
}


@pytest.mark.parametrize("model", MAMBA2)
def test_mamba2(model, device):
    head_dim, state_dim, ratio = MAMBA2[model]
    groups = 2 if ratio <= 16 else 1
    spec = Mamba2Spec(heads=groups * ratio, groups=groups, head_dim=head_dim, state_dim=state_dim, buffer_len=4, max_tokens=3)
    run_cycles(Harness(spec, device, slots=2, seed=20), "padded")
