"""Decode, verification and flush against the float64 reference: every way a batch can look."""

import pytest
import torch
from harness import (
    ARITHMETIC,
    FAMILIES,
    Harness,
    crossed,
    dense,
    precisions,
    projection_views,
    relative_error,
    same_bits,
    small_spec,
    with_format,
)

from replayssm_jit import ReplayCache, kernels

MODES = ("fixed", "padded", "packed")


def random_step(harness, mode, lengths=None):
    """One step with random rows, lengths and acceptances."""
    most = harness.spec.max_tokens
    if mode == "fixed":
        t = harness.randint(1, most)
        rows = [(slot, t) for slot, _ in harness.random_rows(range(1, 2))]
    else:
        rows = harness.random_rows(range(most + 1) if lengths is None else lengths)
    harness.step(rows, mode=mode, width=harness.randint(max(1, *(t for _, t in rows)), most) if mode == "padded" else None)


def run_cycles(harness, mode, cycles=3):
    """Random steps until every slot has folded at least ``cycles`` times' worth of history."""
    folds = [0] * harness.num_slots
    for _ in range(400):
        before = [s.position for s in harness.slots]
        random_step(harness, mode)
        folds = [n + (s.position > was) for n, s, was in zip(folds, harness.slots, before, strict=True)]
        if min(folds) >= cycles:
            break
    assert min(folds) >= cycles
    harness.finish()


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), crossed(FAMILIES, MODES, always=lambda family, mode: family == "mamba2" or mode == "packed"))
def test_random_batches(family, mode, device):
    """Rows in any order, desynchronised, random acceptance (none included), two layers, three flush cycles of every slot."""
    run_cycles(Harness(small_spec(family), device, layers=2, slots=4, seed=1), mode)


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_slots(family, device):
    """From zero states and empty rings, without a load."""
    run_cycles(Harness(small_spec(family), device, slots=3, seed=2, load=False), "padded")


@pytest.mark.parametrize(("family", "mode"), crossed(FAMILIES, MODES, always=lambda _, mode: mode == "fixed"))
def test_plain_decode_fills_and_folds(family, mode, device):
    """One token a step, always kept: the history runs 0..L, then folds, the ring wraps again and again."""
    harness = Harness(small_spec(family), device, slots=3, seed=3)
    seen = set()
    for _ in range(3 * harness.spec.ring_len):
        seen.add(harness.slots[0].history)
        harness.step([(2, 1), (0, 1), (1, 1)], [1, 1, 1], mode=mode)
    assert seen == set(range(harness.spec.buffer_len + 1))
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_ring_start(family, device):
    """A history that wraps at every place, folded and read."""
    spec = small_spec(family)
    harness = Harness(spec, device, slots=spec.ring_len, seed=4)
    for slot, model in enumerate(harness.slots):
        model.ring_start = slot
    harness.cache.ring_start.copy_(torch.arange(spec.ring_len, dtype=torch.int32))
    rows = [(slot, spec.max_tokens) for slot in range(spec.ring_len)]
    for accepted in (spec.max_tokens, spec.max_tokens - 1, spec.max_tokens, 2):
        harness.step(rows, [accepted] * len(rows))
    harness.finish()


@pytest.mark.parametrize(("mode", "pad_slot"), [("fixed", 0), ("padded", -1), ("packed", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_rows(family, pad_slot, mode, device):
    """Negative slots and ``pad_slot`` read and write no cache, whatever their inputs hold; slot 0 is ordinary unless chosen."""
    harness = Harness(small_spec(family), device, slots=4, seed=5, pad_slot=pad_slot)
    for _ in range(8):
        rows = [(-1, 2), (1, 2), (max(pad_slot, -1), 2), (3, 2), (-7, 2)]
        if pad_slot != 0:
            rows.append((0, 2))
        harness.step(rows, [2] * len(rows), mode=mode)
    assert harness.slots[0].position > 0 or pad_slot == 0
    harness.step([(-1, 1)], [1], mode=mode)
    for slot in range(4):
        harness.judge_state(slot)


@pytest.mark.parametrize("mode", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_tokens(family, mode, device):
    """T = 0 does nothing, also with a full history, alone or among others."""
    harness = Harness(small_spec(family), device, slots=3, seed=6)
    full = harness.spec.buffer_len
    while harness.slots[1].history < full:
        harness.step([(1, 1)], [1])
    harness.step([(0, 0), (1, 0), (2, 3)], [0, 0, 3], mode=mode)
    harness.step([(0, 0), (1, 0)], [0, 0], mode=mode)
    if mode == "padded":
        harness.step([(0, 0), (1, 0)], [0, 0], mode=mode, width=2)
    assert harness.slots[1].history == full
    harness.step([(1, 1), (0, 4)], [1, 4], mode=mode)
    assert harness.slots[1].history == 1
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_rows_among_verification_rows(family, device):
    """Prompt tails of one token, prompts as long as a window, plain decode and drafts in one launch."""
    harness = Harness(small_spec(family), device, slots=4, seed=7)
    harness.reset([0, 1])
    for _ in range(6):
        harness.step([(0, 1), (3, 4), (1, 4), (2, 1)], [1, harness.randint(1, 4), 4, 1], mode="packed")
    harness.finish()


# ---- shapes of tokens and history -----------------------------------------------------------------------------------


WINDOWS = [(1, 1), (2, 2), (3, 1), (5, 5), (16, 1), (16, 4), (16, 16), (33, 7), (64, 1), (64, 16)]
USUAL = {"mamba2": {(1, 1), (2, 2), (5, 5), (16, 16), (33, 7), (64, 1), (64, 16)}}


@pytest.mark.parametrize(
    ("family", "buffer_len", "max_tokens"),
    [
        pytest.param(
            family, *window, marks=[] if window in USUAL.get(family, {(1, 1), (5, 5), (16, 1), (33, 7), (64, 16)}) else pytest.mark.slow
        )
        for family in FAMILIES
        for window in WINDOWS
    ],
)
def test_windows(family, buffer_len, max_tokens, device):
    """L from 1 to 64, T from 1 to 16, T_max = L: every T in turn until each slot has folded three times."""
    spec = small_spec(family, buffer_len=buffer_len, max_tokens=max_tokens)
    harness = Harness(spec, device, slots=2, seed=8)
    t, folds, last = 0, 0, 0
    while folds < 3 or t < max_tokens:
        tokens = t % max_tokens + 1
        harness.step([(1, tokens), (0, tokens)], [tokens, harness.randint(0, tokens)])
        folds += harness.slots[1].position > last
        last = harness.slots[1].position
        t += 1
    harness.finish()


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype", "state_format"), [case for family in FAMILIES for case in precisions(family)], ids=str)
def test_dtypes(family, dtype, state_format, device):
    run_cycles(Harness(small_spec(family, dtype=dtype, **with_format(state_format)), device, slots=2, seed=9), "padded")


# ---- layouts of inputs and caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "shift"), [("fixed", 0), ("padded", 1), ("packed", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_of_a_projection(family, shift, mode, device):
    """Inputs are views of one packed projection, at any alignment the dtype allows, and give the bits of contiguous ones."""
    spec = small_spec(family)
    views = Harness(spec, device, slots=3, seed=10, layout=projection_views(shift))
    plain = Harness(spec, device, slots=3, seed=10, layout=dense)
    for _ in range(8):
        t = views.randint(1, 4)
        assert plain.randint(1, 4) == t
        rows = [(2, t), (0, t), (1, t)]
        for a, b in zip(views.step(rows, mode=mode), plain.step(rows, mode=mode), strict=True):
            assert same_bits(a, b)
    views.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_output_views(family, device):
    """``out`` may be any view with a dense innermost dimension; nothing outside it is written."""
    spec = small_spec(family)
    harness = Harness(spec, device, slots=2, seed=11)
    fresh = [{k: v.to(device)[None] for k, v in harness.make_inputs(3).items()}]
    for offset in (0, 8, 1):
        harness.wrapper.plan([1], 3)
        want = harness.wrapper.run(0, **fresh[0])
        memory = torch.full((2, 5, spec.heads, spec.head_dim + 24), 7.0, dtype=spec.dtype, device=device)
        out = memory[:1, 1:4, :, offset : offset + spec.head_dim]
        got = harness.wrapper.run(0, out=out, **fresh[0])
        assert got is out
        assert same_bits(out, want)
        out.fill_(7.0)
        assert bool((memory == 7.0).all())


def pool(spec, num_slots, device, gap):
    """Cache tensors whose slots lie ``gap`` bytes beyond their size apart, in memory full of ones, NaN in all floating formats."""
    layer = {}
    for name, (shape, dtype) in spec.cache_tensors.items():
        size = torch.Size(shape).numel()
        step = (size * dtype.itemsize + gap + 15) // 16 * 16
        memory = torch.full((num_slots, step), -1, dtype=torch.int8, device=device).view(dtype)
        layer[name] = memory[:, :size].unflatten(1, shape)
    return layer


@pytest.mark.parametrize("state_format", ["fp32", "fp32_bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adopted_pool(family, state_format, device):
    """Slots as strided views of a pool: right values, and the memory between slots keeps its bits."""
    spec = small_spec(family, **with_format(state_format))
    layers = [pool(spec, 3, device, 48), pool(spec, 3, device, 1024)]
    gaps = [[t.as_strided((3, t.stride(0)), (t.stride(0), 1))[:, t[0].numel() :] for t in layer.values()] for layer in layers]
    cache = ReplayCache.from_tensors(spec, layers)
    cache.reset([0, 1, 2])
    run_cycles(Harness(spec, device, seed=12, cache=cache), "padded")
    assert all(bool(gap.isnan().all()) for layer in gaps for gap in layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_adopted_cursors(family, device):
    """Cursors of the engine are used where they are."""
    spec = small_spec(family)
    cursors = {
        "ring_start": torch.full((2,), 5, dtype=torch.int32, device=device),
        "history": torch.zeros(2, dtype=torch.int32, device=device),
        "position": torch.tensor([2**40, 7], dtype=torch.int64, device=device),
    }
    cache = ReplayCache.from_tensors(spec, [pool(spec, 2, device, 0)], cursors)
    cache.layers[0]["state"].zero_()
    assert cache.position is cursors["position"]
    harness = Harness(spec, device, seed=13, cache=cache, load=False)
    for model, position in zip(harness.slots, (2**40, 7), strict=True):
        model.ring_start, model.position = 5, position
    run_cycles(harness, "fixed")
    assert cursors["position"][0] > 2**40


@pytest.mark.parametrize("family", FAMILIES)
def test_huge_slot_strides(family, device):
    """Slots 10^8 elements apart; on CUDA a pool past 2^31 elements."""
    stride = 10**8 if device.type == "cpu" else 2**30
    spec = small_spec(family, checkpoint_dtype=torch.bfloat16)
    layer = {}
    for name, (shape, dtype) in spec.cache_tensors.items():
        # The CPU maps pages of an empty tensor only where they are touched.
        step = stride if dtype.itemsize == 2 or device.type == "cpu" else stride // 2
        memory = torch.empty(3 * step if name != "ring_d" else 3 * 1024, dtype=dtype, device=device)
        layer[name] = memory.unflatten(0, (3, -1))[:, : torch.Size(shape).numel()].unflatten(1, shape)
    cache = ReplayCache.from_tensors(spec, [layer])
    cache.reset([0, 1, 2])
    harness = Harness(spec, device, seed=14, cache=cache)
    for _ in range(12):
        random_step(harness, "fixed")
    harness.finish()


# ---- acceptance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_acceptance(family, device):
    """Nothing kept: the history is unchanged, or empty after a flush; the slot goes on as if the step had not been."""
    harness = Harness(small_spec(family), device, slots=2, seed=15)
    for _ in range(2):
        harness.step([(0, 4), (1, 4)], [0, 3])
    assert harness.slots[0].history == 0
    while harness.slots[0].history + 4 <= harness.spec.buffer_len:
        harness.step([(0, 4)], [2])
    harness.step([(0, 4)], [0])
    assert harness.slots[0].history == 0
    assert harness.slots[0].position > 0
    harness.step([(0, 1)], [0])
    harness.step([(0, 2), (1, 2)], [2, 0])
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_impossible_acceptance(family, device):
    """More than the row brought, or fewer than none: counted as zero, and check() raises once."""
    harness = Harness(small_spec(family), device, slots=2, seed=16)
    harness.step([(1, 2), (0, 2)], [2, 2])
    for count in (3, 100, 2**31 - 1, -1, -(2**31)):
        harness.cache.check()
        before = harness.slots[1].history + harness.slots[1].position
        harness.step([(1, 2), (0, 2)], [count, 1])
        assert harness.slots[1].history + harness.slots[1].position == before
        with pytest.raises(RuntimeError, match="num_accepted"):
            harness.cache.check()
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_commit_a_step_late(family, device):
    """An engine that schedules ahead commits at the start of the next step, with the arguments of the step that ran."""
    harness = Harness(small_spec(family), device, slots=4, seed=17)
    harness.step([(0, 2), (3, 2)], commit=False)
    for _ in range(12):
        late = harness.pending
        harness.plan(harness.random_rows(range(1, 2)), "padded")  # another batch is planned already
        harness.commit(*[late[i] for i in (0, 1, 2)])
        harness.step(harness.random_rows(range(5)), mode="padded", commit=False)
    harness.commit(*harness.pending)
    harness.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_count_for_all_rows(family, device):
    """``commit`` takes an int where every row brought as many."""
    harness = Harness(small_spec(family), device, slots=3, seed=18)
    for accepted in ([3, 0, 2], [4, 1, 2], [1, 1, 1]):
        harness.step([(0, 4), (2, 4), (1, 4)], accepted, commit=False)
        rows, _, fresh = harness.pending
        index = {"dtype": torch.int32, "device": device}
        harness.wrapper.commit(torch.tensor([0, 2, 1], **index), 4, torch.tensor(accepted, **index))
        harness.commit_model(rows, accepted, fresh)
        harness.judge_cursors()
    harness.finish()


# ---- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_verification_equals_single_steps(family, device):
    """T tokens in one step and one at a time, with fp32 activations and one fp32 plane: the same up to fp32."""
    spec = small_spec(family, dtype=torch.float32, **with_format("fp32"))
    one, many = (Harness(spec, device, slots=1, seed=19) for _ in range(2))
    for _ in range(5):
        tokens = many.make_inputs(4)
        together = many.run([(0, 4)], [tokens])[0][0]
        many.commit([(0, 4)], [4], [tokens])
        for i in range(4):
            single = {k: v[i : i + 1] for k, v in tokens.items()}
            alone = one.run([(0, 1)], [single])[0][0]
            one.commit([(0, 1)], [1], [single])
            assert relative_error(alone[0], together[i]) < 2 * ARITHMETIC[kernels.backend_of(device)]
