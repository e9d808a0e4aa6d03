"""The true state of a slot at any committed boundary: prefix caching, preemption, going on from the middle."""

import pytest
import torch
from harness import (
    FAMILIES,
    FORMATS,
    STATE_FP32,
    Harness,
    bits,
    crossed,
    recurrence,
    relative_error,
    same_bits,
    small_spec,
    stored,
    with_format,
)
from test_moves import lived, picture, unchanged

from replayssm_jit import ReplayCache

CASES = crossed(
    FAMILIES, FORMATS, always=lambda family, name: name == "fp32_bf16" or (family, name) in {("mamba2", "bf16"), ("gdn", "fp32")}
)


def true_state(harness, layer, slot, tokens):
    """The float64 recurrence over some committed tokens, from what the cache holds as checkpoint."""
    start = harness.cache.read_state(layer, [slot])[0].double().cpu()
    inputs = {name: values[:tokens] for name, values in harness.slots[slot].inputs[layer].items()}
    return recurrence(harness.spec, inputs, harness.weights[layer], start)[1]


def int64(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def boundaries(harness):
    """Every slot at every boundary that its ring holds: slots, positions, tokens past the checkpoint."""
    rows = [(slot, model.position + j, j) for slot, model in enumerate(harness.slots) for j in range(model.history + 1)]
    slots, positions, counts = zip(*rows, strict=True)
    return list(slots), int64(positions, harness.device), counts


@pytest.mark.parametrize(("family", "state_format"), CASES)
def test_every_boundary(family, state_format, device):
    """From the checkpoint to the last token of a wrapped ring, dead entries NaN; the sources keep every bit."""
    harness = lived(family, device, **with_format(state_format))
    slots, positions, counts = boundaries(harness)
    before = picture(harness.cache)
    got = harness.cache.materialize(slots, positions)
    assert unchanged(harness.cache, before)
    assert got.shape == (2, len(slots), *harness.spec.shape("H", "P", "N"))
    assert got.dtype == torch.float32
    for layer in range(2):
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if count == 0:
                assert same_bits(got[layer, row], harness.cache.read_state(layer, [slot])[0])
            error = relative_error(got[layer, row], true_state(harness, layer, slot, count))
            assert error <= STATE_FP32, f"slot {slot}, layer {layer}, {count} tokens: {error:.3g}"


@pytest.mark.parametrize(("family", "state_format"), CASES)
def test_the_last_boundary_is_a_flush(family, state_format, device):
    """Bit for bit: materialize, flush and read_state, and the flush inside a step."""
    harness, other = (lived(family, device, **with_format(state_format)) for _ in range(2))
    while harness.slots[0].history + 4 <= harness.spec.buffer_len:
        for h in (harness, other):
            h.step([(0, 2)], [2])
    got = harness.cache.materialize([0])
    harness.flush([0])
    other.step([(0, 4)], [0])
    assert other.slots[0].history == 0
    for layer in range(2):
        flushed = harness.cache.read_state(layer, [0])[0]
        assert same_bits(flushed.cpu(), stored(harness.spec, got[layer, 0].double().cpu()).float())
        assert same_bits(harness.cache.layers[layer]["state"][0], other.cache.layers[layer]["state"][0])


@pytest.mark.parametrize(("family", "state_format"), CASES)
def test_destinations_live_on(family, state_format, device):
    """Slots that take over a state go on as if its last token had been the end of a prefill, and so does the source."""
    harness = lived(family, device, **with_format(state_format))
    history = harness.slots[0].history
    positions = int64([harness.slots[0].position + j for j in (history // 2, history, 0)], device)
    states = [[true_state(harness, layer, 0, j) for layer in range(2)] for j in (history // 2, history, 0)]
    before = [[bits(tensor[0]).clone() for tensor in layer.values()] for layer in harness.cache.layers]
    assert harness.cache.materialize([0, 0, 0], positions, destination=[2, -1, 1]) is None
    for was, layer in zip(before, harness.cache.layers, strict=True):
        assert all(torch.equal(a, bits(tensor[0])) for a, tensor in zip(was, layer.values(), strict=True))
    for slot, row, tokens in ((2, 0, history // 2), (1, 2, 0)):
        harness.arrive(slot, harness.slots[0], tokens, states[row])
    harness.judge_cursors()
    for _ in range(6):
        harness.step([(slot, 4) for slot in range(4)])
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_back_to_a_boundary(family, device):
    """A row may name its own slot, which forgets what came after."""
    harness = lived(family, device)
    state = [true_state(harness, layer, 0, 1) for layer in range(2)]
    position = harness.slots[0].position + 1
    harness.cache.materialize([0], int64([position], device), destination=[0])
    harness.arrive(0, harness.slots[0], 1, state)
    for _ in range(6):
        harness.step([(0, 4)])
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_into_another_cache(family, device):
    """Out through a tensor, in through load_state: the request goes on elsewhere within fp32."""
    harness, other = lived(family, device), Harness(small_spec(family), device, layers=2, slots=2, seed=60)
    position = harness.cache.position[:1] + harness.cache.history[:1]
    for layout in ("vk", "kv"):
        states = harness.cache.materialize([0], position, layout=layout)
        for layer in range(2):
            other.cache.load_state(layer, [1], states[layer], layout=layout, positions=position)
        history = harness.slots[0].history
        other.arrive(1, harness.slots[0], history, [true_state(harness, layer, 0, history) for layer in range(2)])
    for _ in range(6):
        other.step([(1, 4)])
    other.finish()


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_publishing_prefixes(family, dtype, layout, device):
    """An engine's pool: one tensor a layer, elements by index, rows that are skipped in every way."""
    harness = lived(family, device)
    shape = harness.spec.shape("H", "P", "N") if layout == "vk" else harness.spec.shape("H", "N", "P")
    memory = [torch.full((5, *shape, 2), 7.0, dtype=dtype, device=device) for _ in range(2)]
    pool = [m[..., 1] for m in memory]  # no dense dimension
    ends = [model.position + model.history for model in harness.slots]
    positions = int64([ends[0] - 1, -1, ends[2], ends[3], ends[0]], device)
    assert harness.cache.materialize([0, 1, 2, 3, -1], positions, out=pool, index=[3, 0, 4, -1, 2], layout=layout) is pool
    for layer in range(2):
        assert bool((memory[layer][..., 0] == 7).all())
        assert bool((pool[layer][:3] == 7).all()), "a row that was to be skipped"
        exact = harness.cache.materialize([0, 2], positions[[0, 2]], layout=layout)[layer].to(dtype)
        assert same_bits(pool[layer][3:], exact)
        for element, slot, count in ((3, 0, harness.slots[0].history - 1), (4, 2, harness.slots[2].history)):
            want = true_state(harness, layer, slot, count)
            want = (want if layout == "vk" else want.transpose(1, 2)).to(dtype)
            assert relative_error(pool[layer][element], want) <= {torch.float32: STATE_FP32}.get(dtype, 2e-4)
    harness.cache.check()


@pytest.mark.parametrize("family", ["mamba2"])  # addressing knows no family
def test_one_tensor_or_one_a_layer(family, device):
    harness = lived(family, device)
    cache, shape = harness.cache, harness.spec.shape("H", "P", "N")
    whole = cache.materialize([2, 0])
    stacked = torch.zeros(2, *shape[:1], 2, *shape[1:], device=device).movedim(1, 2)  # heads outermost
    assert cache.materialize([2, 0], out=stacked) is stacked
    pool = torch.zeros(3, 2, *shape, device=device)  # an element holds all its layers
    cache.materialize([2, 0], out=pool.unbind(1), index=torch.tensor([2, 1], dtype=torch.int32, device=device))
    assert same_bits(stacked.contiguous(), whole)
    assert same_bits(pool[[2, 1]].transpose(0, 1).contiguous(), whole)
    assert not pool[0].any()
    skipped = cache.materialize([2, -1, 0], int64([-1, 3, -1], device))
    assert not skipped.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_out_of_range(family, device):
    """The device skips the row and says so once; in debug mode the host names row and value."""
    harness = lived(family, device)
    cache, model = harness.cache, harness.slots[0]
    for wrong in (model.position - 1, model.position + model.history + 1, -2, 2**40):
        before = picture(cache)
        positions = int64([wrong, harness.slots[2].position], device)
        out = cache.materialize([0, 2], positions)
        assert not out[:, 0].any()
        assert out[:, 1].any()
        with pytest.raises(RuntimeError, match="position"):
            cache.check()
        cache.materialize([0], positions[:1], destination=[1])
        with pytest.raises(RuntimeError, match="position"):
            cache.check()
        cache.check()
        assert unchanged(cache, before)
        cache.debug = True
        low, high = model.position, model.position + model.history
        for destination in (None, [3, 1]):
            with pytest.raises(ValueError, match=rf"positions\[1\] \(slot 0\) must be from {low} to {high}, or -1, got {wrong}"):
                cache.materialize([2, 0], positions.flip(0), destination=destination)
        cache.debug = False
        assert unchanged(cache, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_change(family, device):
    """A fold takes the weights that stand when it is asked for."""
    harness = lived(family, device)
    before = harness.cache.materialize([0])
    if family == "mamba2":
        harness.cache.set_weights(1, A=harness.weights[1]["A"].to(device) * 3)
        after = harness.cache.materialize([0])
        assert same_bits(after[0], before[0])
        assert not same_bits(after[1], before[1])
        bare = ReplayCache.allocate(harness.spec, 1, 2, device)
        with pytest.raises(RuntimeError, match="set_weights"):
            bare.materialize([0])
    else:
        bare = ReplayCache.from_tensors(harness.spec, harness.cache.layers, vars(harness.cache))
        assert same_bits(bare.materialize([0]), before)


@pytest.mark.parametrize("family", ["mamba2"])
def test_more_layers_than_a_launch(family, device):
    """Each layer's own tensors, wherever it stands in its launch."""
    spec = small_spec(family, heads=2, groups=1, head_dim=32, state_dim=64, buffer_len=2, max_tokens=1)
    cache = ReplayCache.allocate(spec, 260, 1, device)
    for layer in range(260):
        cache.set_weights(layer, A=-torch.ones(2, device=device))
        cache.load_state(layer, [0], torch.full((1, *spec.shape("H", "P", "N")), layer + 1.0, device=device))
    got = cache.materialize([0])
    assert got.flatten(1).min(dim=1)[0].tolist() == got.flatten(1).max(dim=1)[0].tolist() == [layer + 1.0 for layer in range(260)]


def test_an_open_slot(device):
    harness = lived("mamba2", device)
    harness.cache.debug = True
    harness.step([(0, 4)], commit=False)
    for call in (lambda: harness.cache.materialize([0]), lambda: harness.cache.materialize([1], destination=[0])):
        with pytest.raises(RuntimeError, match="slot 0"):
            call()


# ---- an engine's prefill in the slot's own memory ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_format", ["fp32", "fp32_bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_place(family, state_format, layout, device):
    """A second prompt: fold, lay the slot out as plain fp32 where it is, let a prefill work on that, encode it where it is."""
    harness = lived(family, device, **with_format(state_format))
    cache = harness.cache
    harness.flush([1, 0])
    want = [harness.slots[0].checkpoint, harness.slots[1].checkpoint]
    for layer in range(2):
        slots = cache.layers[layer]["state"][:2]
        plain = slots if layout == "vk" else slots.view(2, *harness.spec.shape("H", "N", "P"))
        others = bits(cache.layers[layer]["state"][2:]).clone()
        assert cache.read_state(layer, [1, 0], out=plain, layout=layout) is plain
        for row, slot in ((0, 1), (1, 0)):
            error = relative_error(plain[row] if layout == "vk" else plain[row].mT, want[slot][layer])
            assert error <= STATE_FP32
        plain.mul_(2)
        cache.load_state(layer, [1, 0], plain, layout=layout)
        assert torch.equal(bits(cache.layers[layer]["state"][2:]), others)
    for slot in range(2):
        model = harness.slots[slot] = harness._fresh(want[slot])
        harness.settle(slot, model, [2 * state for state in want[slot]])
    harness.step([(slot, 3) for slot in range(4)])
    harness.finish()


# ---- CUDA graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured(family):
    """One graph of publishing, moving and folding, replayed with other slots and positions."""
    device = torch.device("cuda", 0)
    harness = lived(family, device)
    cache = harness.cache
    slots, index, destination, folded = (torch.full((2,), -1, dtype=torch.int32, device=device) for _ in range(4))
    positions = torch.full((2,), -1, dtype=torch.int64, device=device)
    pool = torch.zeros(2, 3, *harness.spec.shape("H", "P", "N"), dtype=torch.bfloat16, device=device)

    def work():
        cache.materialize(slots, positions, out=pool, index=index)
        cache.materialize(slots, positions, destination=destination)
        cache.flush(folded)

    before = picture(cache)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    assert unchanged(cache, before)
    for source, target in ((0, 2), (3, 1)):
        model = harness.slots[source]
        position = model.position + model.history - 1
        states = [true_state(harness, layer, source, model.history - 1) for layer in range(2)]
        slots[0], positions[0], index[0], destination[0], folded[1] = source, position, target, target, source
        graph.replay()
        for layer in range(2):
            assert relative_error(pool[layer, target], states[layer].to(torch.bfloat16)) <= 2e-4
        harness.arrive(target, model, model.history - 1, states)
        harness._fold(source)
        harness.judge_cursors()
    harness.finish()
