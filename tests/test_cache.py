"""Checkpoints and rings of a slot outside the step: allocate, adopt, reset, load, read, flush."""

import re
import sys
from pathlib import Path

import pytest
import torch
from harness import (
    FAMILIES,
    FORMATS,
    Harness,
    bits,
    crossed,
    decode_planes,
    same_bits,
    small_spec,
    stored,
    two_planes,
    upper_plane,
    with_format,
)

from replayssm_jit import ReplayCache, kernels


def allocate(family, device, slots=3, layers=1, **changes):
    return ReplayCache.allocate(small_spec(family, **changes), num_layers=layers, num_slots=slots, device=device)


@pytest.mark.parametrize("family", FAMILIES)
def test_allocate(family, device):
    cache = allocate(family, device, slots=5, layers=2)
    assert len(cache.layers) == 2
    total = 0
    for layer in cache.layers:
        assert layer.keys() == cache.spec.cache_tensors.keys()
        for name, (shape, dtype) in cache.spec.cache_tensors.items():
            assert layer[name].shape == (5, *shape)
            assert layer[name].dtype == dtype
            total += layer[name].numel() * dtype.itemsize
    for cursor, dtype in ((cache.ring_start, torch.int32), (cache.history, torch.int32), (cache.position, torch.int64)):
        assert cursor.dtype == dtype
        assert cursor.tolist() == [0] * 5
    assert cache.bytes_per_slot * 5 == total + 5 * 16
    assert not cache.read_state(1, [0, 4]).any()
    cache.check()


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
def test_large_caches_ask_for_huge_pages():
    cache = ReplayCache.allocate(small_spec("mamba2"), 1, 4096, device="cpu")
    state = cache.layers[0]["state"]
    assert state.nbytes > 8 << 20
    assert not state.any()
    middle, flags = state.data_ptr() + state.nbytes // 2, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
        elif line.startswith("VmFlags:") and first <= middle < last:
            flags = line.split()
    assert "hg" in flags


# ---- formats --------------------------------------------------------------------------------------------------------


def patterns(count: int) -> torch.Tensor:
    """float32 bit patterns: random ones, and every kind of edge with every kind of lower half."""
    generator = torch.Generator().manual_seed(40)
    upper = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7FFF, 0x7F81]
    lower = [0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
    edges = [(u << 16) | low for u in upper for low in lower]
    random = torch.randint(0, 2**32, (count - len(edges),), generator=generator, dtype=torch.int64)
    values = torch.cat([torch.tensor(edges, dtype=torch.int64), random])
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("family", ["mamba2"])  # encoding knows no family
def test_two_planes_keep_every_pattern(family, device):
    """Load and read are exact for every float32 pattern; NaN keeps its sign only."""
    cache = allocate(family, device, slots=4, **with_format("fp32_bf16"))
    shape = cache.spec.shape("H", "P", "N")
    values = patterns(4 * torch.Size(shape).numel()).reshape(4, *shape)
    cache.load_state(0, [3, 1, 0, 2], values.to(device))
    want = torch.where(values.isnan(), torch.where(bits(values) < 0, -0x400000, 0x7FC00000).to(torch.int32), bits(values))
    assert torch.equal(bits(cache.read_state(0, [3, 1, 0, 2]).cpu()), want)
    # The memory itself: the upper plane of a head, then the lower one.
    held = cache.layers[0]["state"][[3, 1, 0, 2]].cpu()
    backend = kernels.backend_of(cache.device)
    assert torch.equal(bits(decode_planes(cache.spec, {"state": held}, backend)), want)
    number = ~values.isnan()
    assert torch.equal(two_planes(cache.spec, held, backend)[0][number], (bits(upper_plane(values)) >> 16).long()[number])


@pytest.mark.parametrize("family", ["mamba2"])
def test_one_plane_keeps_every_pattern(family, device):
    """Also those that are not numbers, with all that they carry."""
    cache = allocate(family, device, slots=4, **with_format("fp32"))
    shape = cache.spec.shape("H", "P", "N")
    values = patterns(4 * torch.Size(shape).numel()).reshape(4, *shape)
    cache.load_state(0, [3, 1, 0, 2], values.to(device))
    assert torch.equal(bits(cache.read_state(0, [3, 1, 0, 2]).cpu()), bits(values))


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("family", ["mamba2"])
def test_load_and_read(family, layout, dtype, state_format, device):
    """Both layouts and every dtype, rounded to nearest even where the checkpoint or the tensor is narrower; any strides."""
    cache = allocate(family, device, slots=4, layers=2, **with_format(state_format))
    generator = torch.Generator().manual_seed(41)
    given = (torch.randn(2, *cache.spec.shape("H", "P", "N"), generator=generator) * 100).to(dtype)
    kept = stored(cache.spec, given.double()) if dtype != cache.spec.checkpoint_dtype else given.double()
    arranged = given if layout == "vk" else given.transpose(2, 3).contiguous()
    spread = torch.stack([arranged, arranged], dim=-1).to(device)[..., 0]  # no dense dimension
    cache.load_state(1, [2, 0], spread, layout=layout)
    assert same_bits(cache.read_state(1, [2, 0]).cpu(), kept.float())
    assert same_bits(cache.read_state(1, [2, 0], layout="kv").cpu(), kept.float().transpose(2, 3).contiguous())
    out = torch.full_like(spread, 7.0)
    assert cache.read_state(1, [2, 0], out=out, layout=layout) is out
    want = kept.float().to(dtype)
    assert same_bits(out.cpu(), want if layout == "vk" else want.transpose(2, 3).contiguous())
    assert not cache.layers[0]["state"].view(torch.uint8).any(), "another layer changed"
    assert not cache.read_state(1, [1, 3]).any(), "another slot changed"


@pytest.mark.parametrize("family", ["mamba2"])
def test_a_checkpoint_beyond_fp16(family, device):
    cache = allocate(family, device, **with_format("fp16"))
    state = torch.full((1, *cache.spec.shape("H", "P", "N")), 1e6, device=device)
    cache.load_state(0, [0], state)
    assert bool((cache.read_state(0, [0]) == torch.inf).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_negative_slots_are_skipped(family, device):
    cache = Harness(small_spec(family), device, slots=3, load=False).cache
    state = torch.ones(3, *cache.spec.shape("H", "P", "N"), device=device)
    cache.load_state(0, [-1, 1, -5], state)
    out = torch.full_like(state, 3.0)
    cache.read_state(0, [1, -1, 2], out=out)
    assert [float(out[i].min()) for i in range(3)] == [1.0, 3.0, 0.0]
    cache.reset([-1, -2])
    cache.flush([-3])
    assert float(cache.read_state(0, [1]).min()) == 1.0


# ---- moving slots ---------------------------------------------------------------------------------------------------


def same_future(family, device, prepare, positions, **changes):
    """A slot that lived and was then prepared, against a fresh one: every later output and every state has the same bits."""
    spec = small_spec(family, **changes)
    used, fresh = (Harness(spec, device, layers=2, slots=2, seed=42, load=False) for _ in range(2))
    for _ in range(7):
        used.step([(1, 4)], [3])
    assert used.slots[1].history
    assert used.slots[1].position
    for harness in (used, fresh):
        harness.generator.manual_seed(43)
        prepare(harness)
        assert harness.cache.position[1] == positions
        assert harness.cache.history[1] == harness.cache.ring_start[1] == 0
    for _ in range(9):
        t = used.randint(1, 4)
        assert fresh.randint(1, 4) == t
        for a, b in zip(used.step([(1, t)]), fresh.step([(1, t)]), strict=True):
            assert same_bits(a, b)
        for a, b in zip(used.cache.layers, fresh.cache.layers, strict=True):
            for name in a:
                assert same_bits(a[name][1], b[name][1]), name
    used.finish()


LIVES = crossed(FAMILIES, FORMATS, always=lambda family, name: name == "fp32_bf16" or (family, name) == ("mamba2", "bf16"))


@pytest.mark.parametrize(("family", "state_format"), LIVES)
def test_reset_is_a_fresh_slot(family, state_format, device):
    same_future(family, device, lambda harness: harness.reset([-1, 1]), 0, **with_format(state_format))


@pytest.mark.parametrize(("family", "state_format"), LIVES)
def test_load_is_a_fresh_slot(family, state_format, device):
    same_future(family, device, lambda harness: harness.load(1, position=2**33), 2**33, **with_format(state_format))


@pytest.mark.parametrize(("family", "state_format"), LIVES)
def test_flush(family, state_format, device):
    """Everything committed is folded; positions advance; a second flush and an empty history change nothing."""
    harness = Harness(small_spec(family, **with_format(state_format)), device, layers=2, slots=4, seed=44)
    for _ in range(3):
        harness.step([(0, 4), (1, 4), (2, 4)], [2, 4, 0])
    harness.flush([2, -1, 1, 0])
    for slot in range(4):
        harness.judge_state(slot)
    harness.judge_cursors()
    assert harness.cache.history.tolist() == [0] * 4
    assert harness.cache.position.tolist() == [6, 12, 0, 0]
    before = [layer["state"].clone() for layer in harness.cache.layers]
    harness.flush([0, 1, 2, 3])
    assert all(same_bits(layer["state"], was) for layer, was in zip(harness.cache.layers, before, strict=True))
    harness.step([(s, 3) for s in range(4)])
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_flush_then_load_continues(family, device):
    """An engine's prefill: fold, take the state out, put it into another slot, go on there within fp32."""
    harness = Harness(small_spec(family), device, slots=2, seed=45)
    for _ in range(4):
        harness.step([(0, 4)], [3])
    harness.flush([0])
    position = harness.cache.position[:1].clone()
    for layout in ("vk", "kv"):
        state = harness.cache.read_state(0, [0], layout=layout)
        harness.cache.load_state(0, [1], state, layout=layout, positions=position)
        assert same_bits(harness.cache.layers[0]["state"][0], harness.cache.layers[0]["state"][1])
        assert harness.cache.position.tolist() == [12, 12]
