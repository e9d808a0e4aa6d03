"""Slots that move whole: forks, and bytes on the host."""

import copy
import math

import pytest
import torch
from harness import FAMILIES, FORMATS, Harness, bits, same_bits, small_spec, with_format

from replayssm_jit import ReplayCache
from replayssm_jit.specs import spec_from


def lived(family, device, seed=60, slots=4, **changes):
    """A harness whose slots are in the middle of their lives: folded, wrapped around the ring, with tokens pending."""
    harness = Harness(small_spec(family, **changes), device, layers=2, slots=slots, seed=seed)
    for _ in range(6):
        harness.step([(s, 4) for s in range(slots)], [harness.randint(1, 4) for _ in range(slots)])
    while not wrapped(harness, 0):
        harness.step([(0, 2)], [2])
    harness.poison()
    return harness


def wrapped(harness, slot):
    model = harness.slots[slot]
    return model.position and model.history and model.ring_start + model.history > harness.spec.ring_len


def picture(cache):
    tensors = [t for layer in cache.layers for t in layer.values()]
    return [bits(t).clone() for t in (*tensors, *cache.cursors.values(), cache.error)]


def unchanged(cache, before):
    return all(torch.equal(a, b) for a, b in zip(before, picture(cache), strict=True))


def same_slot(one, a, other, b):
    """Checkpoint and live ring entries bit for bit, and cursors."""
    live = ~one.dead()[a].to(one.device)
    for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
        for name in mine:
            if name.startswith("ring_"):
                assert same_bits(mine[name][a][:, live], theirs[name][b][:, live]), name
            else:
                assert same_bits(mine[name][a], theirs[name][b]), name
    for name, cursor in one.cache.cursors.items():
        assert cursor[a] == other.cache.cursors[name][b], name


def same_future(one, a, other, b, steps=8):
    """Slot ``a`` of one harness and ``b`` of another: the same tokens give the same bits, and what the reference says."""
    for harness in (one, other):
        harness.generator.manual_seed(61)
    for _ in range(steps):
        t = one.randint(1, 4)
        assert other.randint(1, 4) == t
        for mine, theirs in zip(one.step([(a, t)]), other.step([(b, t)]), strict=True):
            assert same_bits(mine, theirs)
    same_slot(one, a, other, b)


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_forks_are_independent(family, state_format, device):
    """Two copies of a slot with tokens pending in a wrapped ring, and a pair that is skipped: each goes its own way from there."""
    harness = lived(family, device, **with_format(state_format))
    harness.cache.copy_slots([0, -1, 0, 3], [2, 1, 3, -5])
    for fork in (2, 3):
        harness.slots[fork] = copy.deepcopy(harness.slots[0])
        same_slot(harness, 0, harness, fork)
    harness.judge_cursors()
    for _ in range(8):
        harness.step(harness.random_rows(range(5)), mode="padded", width=4)
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_continues_bitwise(family, device):
    one, other = lived(family, device), lived(family, device)
    other.cache.copy_slots(torch.tensor([0], dtype=torch.int32, device=device), torch.tensor([2], dtype=torch.int32, device=device))
    other.slots[2] = copy.deepcopy(other.slots[0])
    same_future(one, 0, other, 2)


def test_slots_are_permuted(device):
    """Sources are read before destinations are written."""
    harness, same = lived("mamba2", device), lived("mamba2", device)
    harness.cache.copy_slots([0, 1, 2], [1, 2, 0])
    for a, b in ((0, 1), (1, 2), (2, 0), (3, 3)):
        same_slot(same, a, harness, b)


def test_nothing_to_copy(device):
    harness = lived("mamba2", device)
    before = picture(harness.cache)
    harness.cache.copy_slots([-1, -1, 2], [1, -2, -1])
    harness.cache.copy_slots([1, 1, 1, 1], [-1, 1, -1, -1])
    assert unchanged(harness.cache, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_copy(family):
    """One graph, replayed with other slots."""
    device = torch.device("cuda", 0)
    harness = lived(family, device)
    source, destination = (torch.full((3,), -1, dtype=torch.int32, device=device) for _ in range(2))
    before = picture(harness.cache)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        harness.cache.copy_slots(source, destination)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        harness.cache.copy_slots(source, destination)
    assert unchanged(harness.cache, before)
    for pairs in ([(0, 2), (-1, 1), (0, 3)], [(3, 1), (2, -1), (-1, -1)]):
        source.copy_(torch.tensor([a for a, _ in pairs], dtype=torch.int32))
        destination.copy_(torch.tensor([b for _, b in pairs], dtype=torch.int32))
        graph.replay()
        for a, b in pairs:
            if a >= 0 and b >= 0:
                harness.slots[b] = copy.deepcopy(harness.slots[a])
                same_slot(harness, a, harness, b)
    for _ in range(4):
        harness.step(harness.random_rows(range(5)), mode="padded", width=4)
    harness.finish()


BAD_COPIES = {
    "fewer destinations": ([0, 1], [2], "destination"),
    "a repeated destination": ([0, 1], [2, 2], "destination"),
    "a source too large": ([4], [0], "source"),
    "a destination too large": ([0], [4], "destination"),
    "none": ([], [], "source"),
    "an int": (0, 1, "source"),
    "int64": ([0], torch.tensor([1]), "destination"),
    "two-dimensional": (torch.zeros(1, 1, dtype=torch.int32), [1], "source"),
    "another device": ([0], torch.zeros(1, dtype=torch.int32, device="meta"), "destination"),
}


@pytest.mark.parametrize("case", BAD_COPIES)
def test_bad_copies(case, device):
    source, destination, match = BAD_COPIES[case]
    harness = lived("mamba2", device)
    before = picture(harness.cache)
    source, destination = (x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for x in (source, destination))
    with pytest.raises((ValueError, TypeError), match=match):
        harness.cache.copy_slots(source, destination)
    assert unchanged(harness.cache, before)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_blob_has_planes_in_rows(device):
    """Whatever order a device keeps them in, the bytes are the upper plane of a head and then the lower one, row by row."""
    cache = ReplayCache.allocate(small_spec("mamba2", **with_format("fp32_bf16")), num_layers=1, num_slots=2, device=device)
    state = torch.randn(2, *cache.spec.shape("H", "P", "N"), generator=torch.Generator().manual_seed(61))
    cache.load_state(0, [1, 0], state.to(device))
    planes = torch.stack([bits(state) + 0x8000 >> 16, bits(state) & 0xFFFF], dim=2).to(torch.int16)
    blob = cache.export([1, 0])
    assert planes.numpy().tobytes() in blob
    cache.reset([0, 1])
    cache.import_([0, 1], blob)
    assert same_bits(cache.read_state(0, [0, 1]).cpu(), state)


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_preempt_and_resume(family, state_format, device):
    """Out of one cache with tokens pending in a wrapped ring, into another slot of another cache: bitwise as if never moved."""
    one, other = (lived(family, device, **with_format(state_format)) for _ in range(2))
    before = picture(one.cache)
    blob = one.cache.export([3, 0])
    assert unchanged(one.cache, before)
    assert isinstance(blob, bytes)
    other.step([(1, 4), (2, 4)])
    for layer in other.cache.layers:
        for name, tensor in layer.items():
            tensor[1:3] = math.nan if name.startswith("ring_") else 7
    other.cache.import_([1, 2], blob)
    for a, b in ((3, 1), (0, 2)):
        other.slots[b] = copy.deepcopy(one.slots[a])
    other.judge_cursors()
    for a, b in ((0, 2), (3, 1)):
        same_slot(one, a, other, b)
        same_future(one, a, other, b)
    for slot in (0, 3):
        same_slot(one, slot, one, slot)
    other.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_ring_start_and_history(family, device):
    """One slot of each; empty histories included."""
    spec = small_spec(family, buffer_len=3, max_tokens=2)
    pairs = [(start, history) for start in range(spec.ring_len) for history in range(spec.buffer_len + 1)]
    one, other = (ReplayCache.allocate(spec, 1, len(pairs), device) for _ in range(2))
    for cache in (one, other):
        for tensor in cache.layers[0].values():
            tensor.copy_(torch.randn(tensor.shape))
    one.ring_start.copy_(torch.tensor([start for start, _ in pairs], dtype=torch.int32))
    one.history.copy_(torch.tensor([history for _, history in pairs], dtype=torch.int32))
    one.position.copy_(torch.arange(len(pairs)) * 2**40)
    was = {name: tensor.clone() for name, tensor in other.layers[0].items()}
    other.import_(range(len(pairs)), one.export(range(len(pairs))))
    for cursor in ("ring_start", "history", "position"):
        assert torch.equal(getattr(one, cursor), getattr(other, cursor))
    for name, tensor in other.layers[0].items():
        for slot, (start, history) in enumerate(pairs):
            live = [(start + i) % spec.ring_len for i in range(history)]
            dead = [i for i in range(spec.ring_len) if i not in live]
            if name == "state":
                assert same_bits(tensor[slot], one.layers[0][name][slot])
            else:
                assert same_bits(tensor[slot][:, live], one.layers[0][name][slot][:, live])
                assert same_bits(tensor[slot][:, dead], was[name][slot][:, dead])


def test_only_live_entries_travel(device):
    """A blob is the checkpoints, the histories and at most a few hundred bytes beside them."""
    cache = lived("mamba2", device, slots=3, buffer_len=64).cache
    for slots in ([1], [0, 1, 2]):
        whole = len(slots) * 2 * math.prod(cache.spec.shape("H", "P", "N")) * 4
        entry = cache.spec.bytes_per_slot - whole // (2 * len(slots))
        ring = 2 * sum(cache.history[slots].tolist()) * entry // cache.spec.ring_len
        assert whole + ring <= len(cache.export(slots)) <= whole + ring + 1200


def test_some_slots_of_a_blob(device):
    one, other = lived("mamba2", device), lived("mamba2", device)
    blob = one.cache.export([0, 1, 2])
    before = picture(other.cache)
    other.cache.import_([-1, -2, -1], blob)
    assert unchanged(other.cache, before)
    other.cache.import_([-1, 3, -1], bytearray(blob))
    other.slots[3] = copy.deepcopy(one.slots[1])
    same_slot(one, 1, other, 3)
    other.judge_cursors()
    other.finish()


def test_pools_of_an_engine(device):
    """Slots far apart in one pool that holds everything."""
    spec = small_spec("mamba2")
    pools = []
    for _ in range(2):
        layer, memory = {}, torch.zeros(4, 2**17, dtype=torch.int32, device=device)
        start = 0
        for name, (shape, dtype) in spec.cache_tensors.items():
            count = math.prod(shape) * dtype.itemsize // 4
            layer[name] = memory[:, start : start + count].view(dtype).unflatten(1, shape)
            start += -(-count // 4) * 4
        pools.append(layer)
    adopted = ReplayCache.from_tensors(spec, pools)
    harness = Harness(spec, device, seed=60, cache=adopted)
    for _ in range(6):
        harness.step([(s, 4) for s in range(4)], [harness.randint(1, 4) for _ in range(4)])
    harness.cache.copy_slots([0], [3])
    same_slot(harness, 0, harness, 3)
    harness.slots[3] = copy.deepcopy(harness.slots[0])
    harness.cache.import_([2], harness.cache.export([1]))
    harness.slots[2] = copy.deepcopy(harness.slots[1])
    same_slot(harness, 1, harness, 2)
    harness.step([(s, 4) for s in range(4)])
    harness.finish()


def test_blobs_that_are_refused(device):
    """Truncated anywhere, damaged anywhere, longer, of another version, or not ours at all: refused whole."""
    cache = lived("mamba2", device, heads=2, groups=1, head_dim=32, state_dim=64).cache
    blob = cache.export([1, 0])
    before = picture(cache)
    places = sorted({0, 1, 15, 16, 20, 24, 31, 32, 63, 64, 70, len(blob) // 2, len(blob) - 1})
    bad = [blob[:n] for n in places] + [blob + b"\0", blob * 2, b"", b"PK\3\4" + blob[4:], b"{}" * 500]
    bad += [blob[:n] + bytes([blob[n] ^ 1]) + blob[n + 1 :] for n in [*places, *range(64, len(blob), 997)]]
    for wrong in bad:
        with pytest.raises(ValueError, match="blob"):
            cache.import_([2, 3], wrong)
    for wrong in (None, "blob", 3, torch.zeros(3), [1, 2]):
        with pytest.raises(TypeError, match="blob"):
            cache.import_([2, 3], wrong)
    version = blob[:16] + (2).to_bytes(4, "little") + blob[20:]
    with pytest.raises(ValueError, match="version 1, got 2"):
        cache.import_([2, 3], version)
    for slots in ([2], [0, 1, 2], [2, 2], [2, 4], [], None, 1):
        with pytest.raises((ValueError, TypeError), match="slots"):
            cache.import_(slots, blob)
    assert unchanged(cache, before)


def test_a_blob_of_another_cache(device):
    spec = small_spec("mamba2")
    cache = ReplayCache.allocate(spec, 2, 2, device)
    others = {
        "buffer_len": small_spec("mamba2", buffer_len=9),
        "heads": small_spec("mamba2", heads=8),
        "dt_softplus": small_spec("mamba2", dt_softplus=False),
        "read_dtype": small_spec("mamba2", **with_format("fp32")),
        "family": small_spec("gdn"),
    }
    for name, other in others.items():
        blob = ReplayCache.allocate(other, 2, 1, device).export([0])
        with pytest.raises(ValueError, match=rf"blob .*differs in .*{name}"):
            cache.import_([1], blob)
    with pytest.raises(ValueError, match="2 layers, got 3"):
        cache.import_([1], ReplayCache.allocate(spec, 3, 1, device).export([0]))


def test_slots_that_cannot_be_exported(device):
    cache = ReplayCache.allocate(small_spec("mamba2"), 1, 2, device)
    for slots in ([-1], [0, -1], [0, 0], [2], [], None, torch.zeros(2, dtype=torch.int32, device=device)):
        with pytest.raises((ValueError, TypeError), match="slots"):
            cache.export(slots)


def test_debug_names_an_open_slot(device):
    harness = lived("mamba2", device)
    cache = harness.cache
    blob = cache.export([0])
    cache.debug = True
    harness.step([(0, 4)], commit=False)
    moves = (lambda: cache.copy_slots([0], [1]), lambda: cache.copy_slots([1], [0]), lambda: cache.export([1, 0]))
    for move in (*moves, lambda: cache.import_([0], blob)):
        with pytest.raises(RuntimeError, match="slot 0"):
            move()
    cache.copy_slots([1], [2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("state_format", FORMATS)
def test_a_spec_in_words(family, state_format):
    spec = small_spec(family, dtype=torch.float16, **with_format(state_format))
    assert spec_from(spec.describe()) == spec
    with pytest.raises(ValueError, match="family"):
        spec_from(spec.describe() | {"family": "mamba3"})
    with pytest.raises(TypeError, match="rows"):
        spec_from(spec.describe() | {"rows": 3})
