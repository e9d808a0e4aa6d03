"""The same inputs give the same bits: alone, in any batch, given in any form, a hundred times over."""

import pytest
import torch
from harness import FAMILIES, Harness, make_inputs, make_weights, same_bits, small_spec, with_format

from replayssm_jit import ReplayCache, ReplayWrapper, kernels, tactics


def snapshot(cache):
    return [{k: v.clone() for k, v in layer.items()} for layer in cache.layers]


def restore(cache, saved):
    for layer, was in zip(cache.layers, saved, strict=True):
        for name, tensor in layer.items():
            tensor.copy_(was[name])


def prepared(family, device, slots, **changes):
    """Slots in every phase: some will flush in a step of four tokens, some not."""
    harness = Harness(small_spec(family, **changes), device, slots=slots, seed=30)
    for _ in range(3):
        harness.step([(s, 4) for s in range(slots)], [harness.randint(0, 4) for _ in range(slots)])
    assert len({harness.flushes(s, 4) for s in range(slots)}) == 2
    harness.poison()
    tokens = harness.make_inputs(4 * slots)
    inputs = {k: v.unflatten(0, (slots, 4)).to(harness.device) for k, v in tokens.items()}
    return harness, inputs


def run(harness, inputs, slots, **plan):
    index = torch.tensor(slots, dtype=torch.int32, device=harness.device)
    harness.wrapper.plan(index, **({"num_tokens": 4} | plan))
    return harness.wrapper.run(0, **inputs)


@pytest.mark.parametrize("state_format", ["fp32", "fp32_bf16", "int16_int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_in_any_batch(family, state_format, device):
    slots = 40
    harness, inputs = prepared(family, device, slots, **with_format(state_format))
    saved = snapshot(harness.cache)
    alone, after = {}, {}
    for s in range(0, slots, 3):
        restore(harness.cache, saved)
        alone[s] = run(harness, {k: v[s : s + 1] for k, v in inputs.items()}, [s])[0]
        after[s] = {k: v[s].clone() for k, v in harness.cache.layers[0].items()}
    for batch in (torch.arange(slots), torch.randperm(slots, generator=harness.generator), torch.arange(0, slots, 3), torch.arange(6, 13)):
        restore(harness.cache, saved)
        out = run(harness, {k: v[batch.to(v.device)] for k, v in inputs.items()}, batch.tolist())
        for row, s in enumerate(batch.tolist()):
            if s in alone:
                assert same_bits(out[row], alone[s]), f"slot {s}: outputs differ in a batch of {len(batch)}"
                for name, want in after[s].items():
                    assert same_bits(harness.cache.layers[0][name][s], want), f"slot {s}: {name} differs in a batch of {len(batch)}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_a_block(family, head_dim, device, monkeypatch):
    """However many heads a block serves, alone or by several of its warps."""
    results = []
    for heads in (1, 2, 3, 4) if family == "kda" else (1, 2, 3):
        monkeypatch.setattr(tactics, "heads_per_block", lambda *_, heads=heads: heads)
        results.append(six_rows(family, device, head_dim))
    same_everywhere(results)


#: Blocks of a row that flushes and of any other, and the rows for which there are so many.
SPLITS = [(1, 1, 0), (2, 1, 6), (2, 2, 6), (2, 1, 3), (3, 2, 6), (4, 1, 5)]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_row(family, heads, device, monkeypatch):
    """Among however many blocks a row is divided, where it flushes and where it does not."""
    monkeypatch.setattr(tactics, "heads_per_block", lambda *_: heads)
    results = []
    for splits in SPLITS:
        monkeypatch.setattr(tactics, "splits", lambda *_, splits=splits: splits)
        results.append(six_rows(family, device, 128))
    same_everywhere(results)


def six_rows(family, device, head_dim):
    if device.type == "cpu" and kernels.backend_of(device) == "cpu":
        pytest.skip("blocks are a matter of CUDA")
    harness, inputs = prepared(family, device, 6, head_dim=head_dim)
    return run(harness, inputs, list(range(6))), snapshot(harness.cache)


def same_everywhere(results):
    for out, after in results[1:]:
        assert same_bits(out, results[0][0])
        for now, want in zip(after, results[0][1], strict=True):
            for name, tensor in now.items():
                assert same_bits(tensor, want[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_row_lengths_in_every_form(family, device):
    """An int, a tensor with padded inputs, packed rows: the same bits."""
    harness, inputs = prepared(family, device, 5)
    saved = snapshot(harness.cache)
    inputs = {k: v[:, :3] for k, v in inputs.items()}
    lengths = torch.tensor([3] * 5, dtype=torch.int32, device=device)
    slots = [4, 2, 0, 1, 3]
    want = run(harness, inputs, slots, num_tokens=3)
    forms = {
        "lengths": (inputs, {"num_tokens": lengths}),
        "padded": ({k: torch.cat([v, v[:, :1]], 1) for k, v in inputs.items()}, {"num_tokens": lengths}),
        "packed": (
            {k: v.flatten(0, 1) for k, v in inputs.items()},
            {"num_tokens": 1, "cu_seqlens": torch.arange(0, 16, 3, dtype=torch.int32, device=device)},
        ),
    }
    for form, (given, plan) in forms.items():
        restore(harness.cache, saved)
        got = run(harness, given, slots, **plan)
        assert same_bits(got.unflatten(0, (5, 3)) if form == "packed" else got[:, :3], want), form


@pytest.mark.parametrize("family", FAMILIES)
def test_dead_entries_change_no_bit(family, device):
    """Whatever the ring holds outside the histories, and memory beside the slots of the batch: zeros, NaN, infinity."""
    harness, inputs = prepared(family, device, 6)
    saved, dead, slots = snapshot(harness.cache), harness.dead().to(device), [4, 1, 2, 0]
    results = []
    for value in (0.0, float("nan"), float("inf"), -1e30):
        restore(harness.cache, saved)
        for name, tensor in harness.cache.layers[0].items():
            if name != "state":
                tensor.masked_fill_(dead[:, None, :, None] if tensor.dim() == 4 else dead[:, None], value)
            for other in (3, 5):
                tensor[other].fill_(value)
        out = run(harness, {name: tensor[slots] for name, tensor in inputs.items()}, slots)
        results.append((out, harness.cache.layers[0]["state"][slots]))
    for out, state in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(state, results[0][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_times(family, device):
    harness, inputs = prepared(family, device, 8)
    saved = snapshot(harness.cache)
    want = run(harness, inputs, list(range(8)))
    state = snapshot(harness.cache)
    for _ in range(100):
        restore(harness.cache, saved)
        assert same_bits(run(harness, inputs, list(range(8))), want)
        for name, tensor in harness.cache.layers[0].items():
            assert same_bits(tensor, state[0][name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_threads(family):
    """The CPU's share of work per thread does not change a bit."""
    harness, inputs = prepared(family, torch.device("cpu"), 5)
    saved = snapshot(harness.cache)
    want = run(harness, inputs, [4, 2, 0, 1, 3])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            restore(harness.cache, saved)
            assert same_bits(run(harness, inputs, [4, 2, 0, 1, 3]), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [17, 300, 5000])
def test_large_batches(rows, device):
    """A batch of many rows, in whatever order the device takes them, is the sum of its parts, step after step."""
    spec = small_spec("mamba2", head_dim=32, state_dim=64)
    generator = torch.Generator().manual_seed(31)
    weights = {k: v.to(device) for k, v in make_weights(spec, generator, set()).items()}
    whole, parts = (ReplayCache.allocate(spec, num_layers=1, num_slots=rows, device=device) for _ in range(2))
    one, many = ReplayWrapper(whole), ReplayWrapper(parts)
    for cache in (whole, parts):
        cache.set_weights(0, **weights)
    for _ in range(6):
        slots = torch.randperm(rows, generator=generator).to(torch.int32)
        slots[torch.randperm(rows, generator=generator)[: rows // 10]] = -1
        counts, accepted = (torch.randint(0, high, (rows,), generator=generator, dtype=torch.int32) for high in (5, 5))
        accepted = torch.minimum(accepted, counts)
        inputs = {k: v.unflatten(0, (rows, 4)).to(device) for k, v in make_inputs(spec, 4 * rows, generator, set()).items()}
        slots, counts, accepted = slots.to(device), counts.to(device), accepted.to(device)
        one.plan(slots, counts)
        out = one.run(0, **inputs)
        one.commit(slots, counts, accepted)
        size = 15 if rows <= 300 else 1500
        for start in range(0, rows, size):
            part = slice(start, start + size)
            many.plan(slots[part], counts[part])
            assert same_bits(many.run(0, **{k: v[part] for k, v in inputs.items()}), out[part])
            many.commit(slots[part], counts[part], accepted[part])
        for name, tensor in whole.layers[0].items():
            assert same_bits(tensor, parts.layers[0][name]), name
        assert torch.equal(whole.history, parts.history)
        assert torch.equal(whole.position, parts.position)
    assert int(whole.position.max()) > 0
