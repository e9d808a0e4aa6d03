"""When a row folds and what a commit leaves, for every history, ring start, row length and acceptance of small rings."""

import itertools

import pytest
import torch
from harness import FAMILIES, Harness, small_spec

WINDOWS = [(L, T) for L in range(1, 7) for T in range(1, min(L, 4) + 1)]


@pytest.mark.parametrize(
    ("family", "buffer_len", "max_tokens"),
    [
        # The delta rules share the rule, the places in the ring and the cursors with Mamba-2, but not the code that fills the ring.
        pytest.param(family, *window, marks=[] if family == "mamba2" or window[0] <= 3 else pytest.mark.slow)
        for family in FAMILIES
        for window in WINDOWS
    ],
)
def test_every_case(family, buffer_len, max_tokens, device):
    """One slot a case, all in one batch: outputs, new ring entries, folds, untouched memory and cursors are judged.

    A step and its commit lead from one (history, ring start) to another, and all of both are tried, so longer lives hold nothing new.
    """
    group = {"groups": 1, "head_dim": 32} if family == "mamba2" else {"key_heads": 1, "head_dim": 64}
    spec = small_spec(family, heads=1, state_dim=64, buffer_len=buffer_len, max_tokens=max_tokens, **group)
    cases = [
        (h, start, t, a)
        for h, start, t in itertools.product(range(buffer_len + 1), range(spec.ring_len), range(max_tokens + 1))
        for a in range(-1, t + 2)
    ]
    harness = Harness(spec, device, slots=len(cases), seed=50)
    for slot, (h, start, _, _) in enumerate(cases):
        harness.slots[slot].ring_start = start
        harness.fill(slot, harness.make_inputs(h))
    order = torch.randperm(len(cases), generator=harness.generator).tolist()
    folds = sum(t > 0 and h + t > buffer_len for h, _, t, _ in cases)
    assert folds
    harness.step([(slot, cases[slot][2]) for slot in order], [cases[slot][3] for slot in order], mode="padded", width=max_tokens)
    assert sum(model.position > 0 for model in harness.slots) == folds
    with pytest.raises(RuntimeError, match="num_accepted"):
        harness.cache.check()
    harness.finish()
