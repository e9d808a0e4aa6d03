"""Formats of the checkpoint beyond plain numbers: scaled planes, copies for reading, stochastic rounding, and what a monitor sees."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from emulator import emulated
from harness import (
    CUDA,
    FAMILIES,
    FLIPS,
    FORMATS,
    Harness,
    crossed,
    decode_planes,
    make_inputs,
    make_weights,
    quantised,
    read,
    recurrence,
    relative_error,
    same_bits,
    small_spec,
    stored,
    two_planes,
    with_format,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replayssm_jit import ReplayCache, ReplayWrapper, kernels
from replayssm_jit.rounding import distance
from replayssm_jit.standard import StandardKernel

SCALED = [name for name, (_, read_dtype) in FORMATS.items() if read_dtype.itemsize == 1]
NARROW = [name for name, (checkpoint, _) in FORMATS.items() if checkpoint != torch.float32]
SMALL = {"heads": 2, "groups": 1, "head_dim": 32, "state_dim": 64}


def allocate(device, slots=2, layers=1, **changes):
    return ReplayCache.allocate(small_spec("mamba2", **SMALL | changes), num_layers=layers, num_slots=slots, device=device)


# ---- what is stored -------------------------------------------------------------------------------------------------


def judge_codes(cache, state):
    """Codes, scales and copies of slot 1 against the format's definition, bit for bit."""
    spec, layer = cache.spec, {name: tensor[1].cpu() for name, tensor in cache.layers[0].items()}
    codes, scale = quantised(state, torch.int16 if spec.checkpoint_dtype == torch.int16 else spec.read_dtype)
    assert torch.equal(layer["scale"].isnan(), scale.isnan())
    assert same_bits(layer["scale"].nan_to_num(7.0), scale.nan_to_num(7.0))
    if spec.copied:
        assert same_bits(layer["state"], state)
        assert same_bits(layer["read_copy"], codes)
    elif spec.checkpoint_dtype == torch.int16:
        upper, lower = two_planes(spec, layer["state"][None], kernels.backend_of(cache.device))
        assert torch.equal(256 * upper[0] + lower[0], codes.long())
        assert torch.equal(upper[0], codes.long() + 128 >> 8)
    else:
        assert same_bits(layer["state"], codes)


@pytest.mark.parametrize("state_format", SCALED)
def test_scaled_rows(state_format, device):
    """Random rows of every size, rows of zeros, of one number, of powers of two and ties, with and without a NaN or an infinity."""
    cache = allocate(device, **with_format(state_format))
    generator = torch.Generator().manual_seed(130)
    state = torch.randn(cache.spec.shape("H", "P", "N"), generator=generator)
    state *= 10.0 ** torch.randint(-28, 28, (2, 32, 1), generator=generator)
    state[0, 0], state[0, 1], state[0, 2] = 0.0, -3.0, 2.0**-101
    state[0, 3], state[0, 4, 5], state[0, 5, 7], state[1, 0, 63] = 2.0**-100, torch.nan, torch.inf, -torch.inf
    state[0, 6], state[0, 7] = 3.4e38, -0.0
    state[0, 8] = torch.arange(64) - 31.5  # halves of steps, once the largest is one of 127
    state[0, 8, 0] = 127.0
    state[0, 9] = 2.0 ** -torch.arange(64)
    cache.load_state(0, [1], state[None].to(device))
    judge_codes(cache, state)
    got = cache.read_state(0, [1])[0].cpu()
    want = (
        state
        if cache.spec.copied
        else decode_planes(cache.spec, {k: v.cpu() for k, v in cache.layers[0].items()}, kernels.backend_of(cache.device))[1]
    )
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))
    if not cache.spec.copied:
        assert bool(got[0, 4].isnan().all()), "a row that is not finite must not read as numbers"
        assert not got[0, 2].any(), "a row below 2^-100 is stored as zeros"


@pytest.mark.parametrize("state_format", SCALED)
def test_any_row(state_format):
    cache = allocate("cpu", **with_format(state_format))
    numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(hnp.arrays("float32", (64,), elements=numbers))
    def judge(row):
        state = torch.zeros(cache.spec.shape("H", "P", "N"))
        state[1, 17] = torch.from_numpy(row)
        cache.load_state(0, [1], state[None])
        if cache.spec.copied:
            state = cache.read_state(0, [1])[0]  # NaN keeps no payload across hosts
            assert torch.equal(state[1, 17].nan_to_num(7.0), torch.from_numpy(row).nan_to_num(7.0))
        judge_codes(cache, state)

    judge()


@pytest.mark.parametrize(("state_format", "bound"), [("int8", 0.5 / 127), ("fp8", 0.5 / 14), ("int16_int8", 0.5 / 32639)])
def test_rounding_error(state_format, bound, device):
    """Never more than half a step of the row's largest magnitude."""
    cache = allocate(device, **with_format(state_format))
    state = torch.randn(cache.spec.shape("H", "P", "N"), generator=torch.Generator().manual_seed(131))
    cache.load_state(0, [1], state[None].to(device))
    error = (cache.read_state(0, [1])[0].cpu() - state).abs() / state.abs().amax(-1, keepdim=True)
    assert 0.9 * bound < float(error.max()) < 1.01 * bound


@pytest.mark.parametrize("state_format", NARROW)
def test_distance_before_rounding(state_format, device):
    """The judge of folds: nothing where a number is kept as it should be, half a step where its neighbour is."""
    cache = allocate(device, **with_format(state_format))
    state = torch.randn(cache.spec.shape("H", "P", "N"), generator=torch.Generator().manual_seed(138)).to(device)
    cache.load_state(0, [1], state[None])
    kept, scale = cache.read_state(0, [1])[0], cache.layers[0]["scale"][1] if cache.spec.scaled else None
    step = step_size(cache.spec, state.double())
    assert float((distance(cache.spec, kept, state, scale) / state.abs().amax()).max()) < 1e-6
    size = 1 if state_format != "fp8" else 0.5  # a step of most numbers is smaller than that of the largest
    beside = distance(cache.spec, kept, state + size * step, scale)
    assert float((beside > 0.4 * size * step).double().mean()) > 0.8


# ---- stochastic rounding --------------------------------------------------------------------------------------------


class Folds:
    """Slots with one state, each of which folds the same three tokens; seeds and positions differ."""

    def __init__(self, spec, device, seeds, positions=None, layers=1, size=1.0):
        self.spec, self.device, self.count = spec, device, len(seeds)
        harness = Harness(spec, device, layers=layers, slots=self.count, seed=132, load=False)
        self.cache, self.wrapper = harness.cache, harness.wrapper
        self.loaded = []
        for layer in range(layers):
            state = size * torch.randn(spec.shape("H", "P", "N"), generator=harness.generator).to(device)
            self.cache.load_state(layer, range(self.count), state.expand(self.count, *state.shape))
            self.loaded.append(self.cache.read_state(layer, [0])[0])
        if spec.stochastic:
            self.cache.cursors["seed"].copy_(torch.tensor(seeds))
        if positions is not None:
            self.cache.position.copy_(torch.tensor(positions))
        self.tokens = [harness.make_inputs(3) for _ in range(layers)]

    def bring(self, order):
        """The tokens to slots in some order of rows."""
        slots = torch.tensor(order, dtype=torch.int32, device=self.device)
        self.wrapper.plan(slots, 3)
        for layer, tokens in enumerate(self.tokens):
            self.wrapper.run(layer, **{k: v.expand(len(order), *v.shape).contiguous().to(self.device) for k, v in tokens.items()})
        self.wrapper.commit(slots, 3, torch.full_like(slots, 3))

    def states(self, layer=0):
        return self.cache.read_state(layer, range(self.count)).cpu()


def step_size(spec, state):
    """Distance of the two neighbours of a number in the checkpoint, at most."""
    row = state.abs().amax(-1, keepdim=True)
    scaled = {"int8": row / 127, "fp8": row / 14, "int16_int8": row / 32639}
    if spec.state_format in scaled:
        return scaled[spec.state_format]
    return state.abs() * {"bf16": 2.0**-7, "fp16": 2.0**-10}[spec.state_format] + 2.0**-24


@pytest.mark.parametrize("state_format", NARROW)
@pytest.mark.parametrize("family", FAMILIES)
def test_draws(family, state_format, device):
    """Every number goes to one of its two neighbours; seed, position and layer decide which, slot and batch do not."""
    found = []
    for rounding, seeds in (("nearest", [0] * 4), ("stochastic", [5, 5, 6, 5]), ("stochastic", [6, 5, 5, 5])):
        spec = small_spec(family, rounding=rounding, **with_format(state_format))
        folds = Folds(spec, device, seeds, [9, 9, 9, 10], layers=2)
        for order in ([3, 0], [2, 1]) if seeds[0] == 5 else ([0, 1, 2, 3],):
            folds.bring(order)
            folds.cache.flush(order)
        found.append([folds.states(layer) for layer in range(2)])
    nearest, one, other = found
    for layer in range(2):
        assert same_bits(one[layer][0], one[layer][1])
        assert same_bits(one[layer][0], other[layer][1])
        assert same_bits(one[layer][2], other[layer][0])
        moved = (one[layer] - nearest[layer]).abs()
        assert bool((moved <= 1.01 * step_size(spec, nearest[layer])).all())
        away = moved > 0.3 * step_size(spec, nearest[layer]) if state_format != "fp8" else moved > 0
        for slot in (0, 2, 3):
            share = float(away[slot].float().mean())
            assert 0.22 < share < 0.28, f"a quarter of the numbers goes to the neighbour that is not nearest, not {share:.3f}"
        for slot in (2, 3):  # another seed, another position: independent draws
            both = float((away[0] & away[slot]).float().mean())
            assert 0.07 < both < 0.13, f"{both:.3f} of the numbers move in both"


@pytest.mark.parametrize("state_format", NARROW)
def test_a_step_draws_what_a_flush_draws(state_format, device):
    """A flush inside a step and one between steps fold the same history: the same bits."""
    folds = Folds(small_spec("mamba2", rounding="stochastic", **with_format(state_format)), device, [1, 1])
    folds.bring([0, 1])
    folds.bring([0, 1])
    folds.cache.flush([1])
    folds.bring([0])  # 3 + 3 + 3 > 8
    states = folds.states()
    assert folds.cache.position.tolist() == [6, 6]
    assert same_bits(states[0], states[1])


@pytest.mark.parametrize("state_format", NARROW)
def test_unbiased(state_format, device):
    """Over many seeds the mean is the number itself, and neighbours are drawn independently."""
    seeds = list(range(256))
    shape = {"heads": 2, "groups": 1, "head_dim": 32, "state_dim": 64}
    folds = Folds(small_spec("mamba2", rounding="stochastic", **shape, **with_format(state_format)), device, seeds)
    exact = Folds(small_spec("mamba2", **shape, **with_format("fp32")), device, [0])
    exact.cache.load_state(0, [0], folds.loaded[0][None])
    for each in (folds, exact):
        each.bring(range(each.count))
        each.cache.flush(range(each.count))
    want, got = exact.states()[0].double(), folds.states().double()
    error = (got - want) / step_size(folds.spec, want)
    assert float(error.abs().max()) < 1.01
    draws = error.square().sum()  # variance of the sum of all errors, were they independent and of mean 0
    assert float(draws) > 0.02 * error.numel()
    assert abs(float(error.sum())) < 4 * float(draws) ** 0.5
    means = error.sum(0).square().sum() / draws  # of 4,096 sums over the seeds
    assert abs(float(means) - 1) < 5 * (2 / want.numel()) ** 0.5
    for axis, name in enumerate(("seed", "head", "row", "column")):
        a, b = error.narrow(axis, 0, error.shape[axis] - 1), error.narrow(axis, 1, error.shape[axis] - 1)
        together = float((a * b).sum() / (a.square() * b.square()).sum().sqrt())
        assert abs(together) < 5, f"neighbours along the {name} axis are drawn together"


@pytest.mark.parametrize("state_format", NARROW)
@pytest.mark.parametrize("family", FAMILIES)
def test_moved_slots_draw_the_same(family, state_format, device):
    """Copied to another slot, and exported to another cache: the same bits, flush after flush."""
    spec = small_spec(family, rounding="stochastic", **with_format(state_format))
    one, other = Folds(spec, device, [11, 12, 13], [5, 6, 2**40], layers=2), Folds(spec, device, [0, 1], layers=2)
    one.bring([0, 2])
    one.cache.copy_slots([2], [1])
    other.tokens = one.tokens
    for a, b in zip(one.cache.weights, other.cache.weights, strict=True):
        b.update(a)
    other.cache.import_([1], one.cache.export([2]))
    assert other.cache.cursors["seed"].tolist() == [0, 13]
    for _ in range(7):
        one.bring([1, 2])
        other.bring([1])
    assert one.cache.position[2] > 2**40 + 3
    for layer in range(2):
        states = one.states(layer)
        assert same_bits(states[1], states[2])
        assert same_bits(states[1], other.states(layer)[1])
        for name in spec.state_tensors:
            assert same_bits(one.cache.layers[layer][name][2], other.cache.layers[layer][name][1])


def exact_tokens(spec, count):
    """Tokens that do not decay, and numbers of so few bits that every way to fold them gives the same float32."""
    generator = torch.Generator().manual_seed(136)

    def multiples(unit, most, *dims):
        return unit * torch.randint(-most, most + 1, (count, *spec.shape(*dims)), generator=generator)

    if spec.family == "mamba2":
        tokens = {"x": multiples(2**-4, 32, "H", "P"), "B": multiples(2**-5, 32, "G", "N"), "C": multiples(1, 1, "G", "N")}
        tokens |= {"dt": torch.full((count, *spec.shape("H")), 0.5)}
        return tokens, {"A": torch.full(spec.shape("H"), -(2.0**-127))}
    signs = torch.ones(1, 1)
    while len(signs) < spec.state_dim:  # orthogonal rows
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    keys = signs[3 : 3 + count, None].expand(-1, spec.groups_, -1) / 8
    gate = spec.inputs[3]
    tokens = {"q": keys, "k": keys, "v": multiples(2**-9, 127, "H", "P"), "beta": torch.full((count, *spec.shape("H")), 0.5)}
    return tokens | {"g": torch.zeros(count, *spec.shape(gate.outer, gate.inner))}, {}


@pytest.mark.parametrize(
    ("family", "state_format"),
    crossed(
        FAMILIES,
        NARROW,
        always=lambda *case: case in {("mamba2", "int16_int8"), ("mamba2", "bf16"), ("mamba2", "fp8"), ("gdn", "int8"), ("kda", "fp16")},
    ),
)
@pytest.mark.parametrize("other", ["emulated", CUDA])
def test_backends_draw_alike(family, state_format, other, request):
    """A slot moves from the CPU to the CUDA backend with tokens in its ring and is folded on both: the same bytes."""
    if request.config.getoption("--emulate") is not None:
        pytest.skip("needs the CPU backend beside the other")
    form = {"dt_softplus": False} if family == "mamba2" else {"gate": "precomputed", "beta": "value", "qk_norm": False}
    form |= {"groups" if family == "mamba2" else "key_heads": 1}
    spec = small_spec(family, heads=2, state_dim=64, rounding="stochastic", **with_format(state_format), **form)
    tokens, weights = exact_tokens(spec, 2)
    generator = torch.Generator().manual_seed(137)
    most = {"int8": 127 * 2.0**-3, "fp8": 448 * 2.0**-5, "int16_int8": 32639 * 2.0**-11}.get(state_format, 16.0)
    state = most * 2.0 ** -torch.randint(0, 4, spec.shape("H", "P", "N"), generator=generator)
    state *= 1 - 2 * torch.randint(0, 2, state.shape, generator=generator)
    state[..., 0] = most

    here = ReplayCache.allocate(spec, num_layers=2, num_slots=3, device="cpu")
    wrapper = ReplayWrapper(here)
    slots = torch.arange(3, dtype=torch.int32)
    wrapper.plan(slots, 2)
    for layer in range(2):
        here.set_weights(layer, **weights)
        here.load_state(layer, slots, state.expand(3, *state.shape), positions=torch.tensor([7, 7, 2**40]))
        inputs = {
            i.name: tokens[i.name].to(spec.dtype_of(i.dtype)).expand(3, *tokens[i.name].shape).contiguous()
            for i in spec.inputs
            if i.name in tokens
        }
        wrapper.run(layer, **inputs)
    wrapper.commit(slots, 2, torch.full_like(slots, 2))
    here.cursors["seed"].copy_(torch.tensor([5, 2**62, 5]))
    blob = here.export(slots)
    here.flush(slots)
    want = here.export(slots)
    drawn = [*here.read_state(0, slots), here.read_state(1, [0])[0]]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.equal(a, b), "seed, position and layer decide"
    with emulated(5) if other == "emulated" else nullcontext():
        device = torch.device("cpu" if other == "emulated" else "cuda")
        there = ReplayCache.allocate(spec, num_layers=2, num_slots=5, device=device)
        for layer in range(2):
            there.set_weights(layer, **{name: w.to(device) for name, w in weights.items()})
        moved = [4, 0, 3]
        there.import_(moved, blob)
        there.flush(moved)
        assert there.export(moved) == want


def test_fresh_slots_have_no_seed(device):
    folds = Folds(small_spec("mamba2", rounding="stochastic", **with_format("bf16")), device, [3, 4, 5])
    folds.cache.reset([1])
    folds.cache.load_state(0, [2], folds.loaded[0][None])
    assert folds.cache.cursors["seed"].tolist() == [3, 0, 0]
    assert "seed" not in allocate(device).cursors


# ---- the monitor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
def test_read_error(state_format, device):
    """Against the definition of what is read, per layer; some slots or all; nothing where all is read or zero."""
    cache = allocate(device, slots=5, layers=3, **with_format(state_format))
    generator = torch.Generator().manual_seed(133)
    assert not cache.read_error().any()
    wholes = []
    for layer in range(2):
        state = 10.0**layer * torch.randn(3, *cache.spec.shape("H", "P", "N"), generator=generator)
        cache.load_state(layer, [4, 0, 2], state.to(device))
        whole = cache.read_state(layer, [4, 0, 2]).cpu().double()
        wholes.append((whole, read(cache.spec, state.double() if cache.spec.copied else whole)))
    for slots, rows in ((None, [0, 1, 2]), ([0, -1], [1]), (torch.tensor([2, 4], dtype=torch.int32, device=device), [2, 0])):
        found = cache.read_error(slots)
        assert found.device == cache.device
        assert tuple(found.shape) == (3, 2)
        for layer, (whole, seen) in enumerate(wholes):
            want = [relative_error(seen[rows], whole[rows]), float((seen - whole)[rows].abs().max())]
            assert found[layer].tolist() == pytest.approx(want, rel=1e-4, abs=1e-30)
        assert not found[2].any()
    assert bool(found[0, 0]) == (cache.spec.checkpoint_dtype != cache.spec.read_dtype)


@pytest.mark.parametrize(
    ("state_format", "bound"), [("fp32_bf16", 3e-3), ("int16_int8", 1.2e-2), ("fp32_int8", 1.2e-2), ("fp32_fp8", 3e-2)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_read_error_of_a_life(family, state_format, bound, device):
    """After many flushes it is still that of one rounding."""
    harness = Harness(small_spec(family, **with_format(state_format)), device, slots=2, seed=134)
    for _ in range(12):
        harness.step([(0, 4), (1, 4)], [4, 3])
    relative, largest = harness.cache.read_error()[0].tolist()
    assert 0.1 * bound < relative < bound
    assert largest > 0


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_tensors(device):
    """What an engine brings for a scaled format, and for stochastic rounding, is checked by name."""
    spec = small_spec("mamba2", rounding="stochastic", **SMALL, **with_format("int16_int8"))
    pool = {name: torch.zeros(2, *shape, dtype=dtype, device=device) for name, (shape, dtype) in spec.cache_tensors.items()}
    cursors = {name: torch.zeros(2, dtype=dtype, device=device) for name, dtype in spec.cursors.items()}
    assert ReplayCache.from_tensors(spec, [pool], cursors).cursors["seed"] is cursors["seed"]
    bad = {
        "scale": [pool["scale"].half(), pool["scale"][:, :1], pool["scale"].mT.contiguous().mT],
        "state": [pool["state"].half(), pool["state"].view(torch.int8)],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name):
                ReplayCache.from_tensors(spec, [pool | {name: value}], cursors)
    with pytest.raises(ValueError, match="scale"):
        ReplayCache.from_tensors(spec, [{name: t for name, t in pool.items() if name != "scale"}], cursors)
    with pytest.raises(ValueError, match="seed"):
        ReplayCache.from_tensors(spec, [pool], {name: t for name, t in cursors.items() if name != "seed"})
    with pytest.raises(TypeError, match="seed"):
        ReplayCache.from_tensors(spec, [pool], cursors | {"seed": cursors["seed"].int()})


@pytest.mark.parametrize("slots", [[], [5], [0, 0], [0.5], 1])
def test_bad_slots_of_the_monitor(slots, device):
    with pytest.raises((ValueError, TypeError), match="slots"):
        allocate(device).read_error(slots)


def test_scale_of_the_standard_kernel(device):
    """A state of 8 bits needs one, another takes none."""
    for state_format in ("int8", "bf16"):
        cache = allocate(device, **with_format(state_format))
        kernel = StandardKernel(cache.spec, device)
        scale = None if state_format == "int8" else torch.zeros(2, 2, 32, device=device)
        with pytest.raises(ValueError, match="scale"):
            kernel.run(cache.layers[0]["state"], torch.zeros(1, dtype=torch.int32, device=device), scale=scale, x=torch.zeros(1, 1, 2, 32))


@pytest.mark.parametrize(("changes", "match"), [(with_format("int16_int8"), "no int16 state"), ({"rounding": "stochastic"}, "to nearest")])
def test_what_the_standard_kernel_has_not(changes, match, device):
    spec = small_spec("mamba2", **SMALL | with_format("bf16") | changes)
    with pytest.raises(ValueError, match=f"the standard kernel .*{match}"):
        StandardKernel(spec, device)


@pytest.mark.parametrize("state_format", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_standard_kernel(family, state_format, device):
    """Plain decode with a state of 8 bits: float32 within a launch, a row rounded when it is stored."""
    spec = small_spec(family, **with_format(state_format))
    generator = torch.Generator().manual_seed(135)
    weights = make_weights(spec, generator, {"D", "dt_bias", "A_log"})
    tokens = make_inputs(spec, 4, generator, set())
    cache = ReplayCache.allocate(spec, num_layers=1, num_slots=3, device=device)
    cache.load_state(0, [2], torch.randn(1, *spec.shape("H", "P", "N"), generator=generator).to(device))
    before = cache.read_state(0, [2])[0].cpu().double()
    slots = torch.tensor([2], dtype=torch.int32, device=device)
    given = {k: v[None].to(device) for k, v in tokens.items()} | {k: v.to(device) for k, v in weights.items()}
    out = StandardKernel(spec, device).run(cache.layers[0]["state"], slots, scale=cache.layers[0]["scale"], **given)
    want, final = recurrence(spec, tokens, weights, before)
    assert relative_error(out[0].cpu(), want) < 2e-3
    assert relative_error(cache.read_state(0, [2])[0].cpu(), stored(spec, final)) < FLIPS[state_format]
    assert not cache.read_state(0, [0, 1]).any()
