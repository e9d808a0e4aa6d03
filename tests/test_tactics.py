"""Launch geometry: the measured table, and what becomes of it where heads or shared memory are few."""

import pytest
import torch
from harness import FAMILIES, small_spec

from replayssm_jit import GdnSpec, tactics

H200 = 227 << 10


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table(family):
    """It starts at zero, rises, and names no more heads than a block has warps."""
    sizes, heads = zip(*tactics._measured()[family], strict=True)
    assert sizes[0] == 0
    assert list(sizes) == sorted(set(sizes))
    assert set(heads) <= {1, 2, 4}
    assert list(heads) == sorted(set(heads))


def test_heads_of_a_block():
    """As the table says, at most the heads of a key head, fewer where shared memory would let fewer blocks run."""
    shape = {"head_dim": 128, "state_dim": 128}
    spec = GdnSpec(heads=64, key_heads=16, **shape)
    assert [tactics.heads_per_block(spec, rows, H200) for rows in (1, 64, 256)] == [1, 2, 4]
    assert tactics.heads_per_block(GdnSpec(heads=64, key_heads=64, **shape), 256, H200) == 1
    limit = tactics.smem_bytes(spec, 2) * tactics.min_blocks(spec) + 3 * 1024
    assert tactics.heads_per_block(spec, 256, limit) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_with_too_little_memory(family):
    spec = small_spec(family)
    with pytest.raises(ValueError, match=r"need \d+ bytes of shared memory a block, but this device has 1024"):
        tactics.heads_per_block(spec, 1, 1024)


def test_blocks_of_a_row():
    """A row that flushes is divided in small batches, any row where the device would stay half empty; of many rows some."""
    spec = GdnSpec(heads=8, key_heads=8, head_dim=128, state_dim=128, buffer_len=16, max_tokens=1)
    assert [tactics.splits(spec, rows, 8) for rows in (1, 16, 32, 60, 128)] == [(2, 2, 1), (2, 2, 16), (2, 1, 32), (2, 1, 49), (1, 1, 0)]
    assert tactics.splits(spec, 8, 64) == (2, 1, 8)  # all of few rows, which nobody puts in order
    for rows in range(1, 140):
        splits, plain, divided = tactics.splits(spec, rows, 8)
        assert plain == 1 or (plain <= splits and divided == rows)
        assert rows < 16 or divided * 8 <= tactics.EXTRA_BLOCKS
        assert divided in (0, rows) or tactics.flush_spread(spec, rows) == 0  # those that flush come first
    few_warps = GdnSpec(heads=8, key_heads=8, head_dim=128, state_dim=64, buffer_len=64, max_tokens=16, dtype=torch.float32)
    assert tactics.warps(few_warps) == 1
    assert tactics.splits(few_warps, 16, 8) == (8, 1, 7)  # nobody else has the slabs of a row that is not divided
    narrow = GdnSpec(heads=8, key_heads=8, head_dim=64, state_dim=128, buffer_len=16, max_tokens=1)
    assert tactics.splits(narrow, 1, 8) == (1, 1, 0)  # a slab a warp
