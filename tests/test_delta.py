"""What Gated DeltaNet and KDA have beyond Mamba-2: gates, beta, normalised keys, and a triangular solve in every step."""

from dataclasses import replace

import pytest
import torch
from harness import DELTA, FORMATS, Harness, small_spec, with_format
from test_step import run_cycles

GATES = {"gdn": ("softplus", "precomputed"), "kda": ("softplus", "lower_bound", "precomputed")}
CASES = [(family, gate) for family in DELTA for gate in GATES[family]]
EXACT = {"dtype": torch.float32, **with_format("fp32")}


def edited(harness, **edits):
    """Give a harness inputs of another kind: name -> function of (inputs, generator) that returns new values."""
    make = harness.make_inputs

    def inputs(tokens):
        values = make(tokens)
        for name, edit in edits.items():
            values[name] = edit(values[name].float(), harness.generator).to(values[name].dtype)
        return values

    harness.make_inputs = inputs
    return harness


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "gate"), CASES)
def test_gates(family, gate, device):
    run_cycles(Harness(small_spec(family, gate=gate), device, slots=2, seed=110), "padded")


@pytest.mark.parametrize("optional", [set(), {"A_log"}, {"dt_bias"}], ids=lambda o: "+".join(sorted(o)) or "none")
@pytest.mark.parametrize(("family", "gate"), [case for case in CASES if case[1] != "precomputed"])
def test_absent_weights(family, gate, optional, device):
    """Absent A_log and dt_bias count as zero."""
    run_cycles(Harness(small_spec(family, gate=gate), device, slots=2, seed=111, optional=optional), "padded")


@pytest.mark.parametrize(
    "options",
    [
        {"beta": "value"},
        {"beta": "value", "beta_dtype": torch.float32},
        {"beta_dtype": torch.float32, "gate_dtype": torch.float32},
        {"gate": "precomputed", "gate_dtype": torch.bfloat16},
        {"qk_norm": False, "scale": 0.05},
        {"scale": 1.0},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
@pytest.mark.parametrize("family", DELTA)
def test_options(family, options, device):
    harness = Harness(small_spec(family, **options), device, slots=2, seed=112)
    if not harness.spec.qk_norm:  # keys no longer than 1, or the recurrence itself grows without bound
        edited(harness, k=lambda k, _: k / k.norm(dim=-1, keepdim=True).clamp_min(1e-3) * 0.9)
    run_cycles(harness, "padded")


@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "state_dim"),
    [
        (4, 4, 128, 128),
        (4, 2, 128, 128),
        (6, 2, 128, 128),
        (8, 2, 128, 128),
        (3, 3, 64, 64),
        (5, 1, 64, 128),
        (6, 2, 128, 64),
        (2, 1, 256, 64),
        (2, 1, 64, 256),
        (2, 2, 256, 256),
    ],
)
@pytest.mark.parametrize("family", DELTA)
def test_shapes(family, heads, key_heads, head_dim, state_dim, device):
    """Published shapes, other ratios of value to key heads (odd ones too), and every head_dim and state_dim."""
    spec = small_spec(family, heads=heads, key_heads=key_heads, head_dim=head_dim, state_dim=state_dim, buffer_len=4, max_tokens=3)
    run_cycles(Harness(spec, device, slots=2, seed=113), "padded")


# ---- the step that flushes ------------------------------------------------------------------------------------------

KEPT = [(name, "nearest") for name in FORMATS]
KEPT += [(name, "stochastic") for name, (checkpoint, _) in FORMATS.items() if checkpoint != torch.float32]


def flushing_cases():
    """Every format with each of 1, 4 and 16 tokens, a buffer length with each; by default every format once, and every window."""
    for family in DELTA:
        for i, kept in enumerate(KEPT):
            windows = (((1, 8, 16, 32, 64)[i % 5], 1), ((8, 16, 32, 64)[i % 4], 4), ((16, 32, 64)[i // 3 % 3], 16))
            for place, window in enumerate(windows):
                yield pytest.param(family, *kept, *window, marks=[] if place == i % 3 else pytest.mark.slow)


@pytest.mark.parametrize(("family", "state_format", "rounding", "buffer_len", "tokens"), flushing_cases())
def test_a_step_that_flushes(family, state_format, rounding, buffer_len, tokens, device):
    """Its outputs, and those of the step after, with the longest history, the shortest that is folded, and the longest that is not."""
    spec = small_spec(family, buffer_len=buffer_len, max_tokens=tokens, rounding=rounding, **with_format(state_format))
    harness = Harness(spec, device, slots=3, seed=121)
    for slot, history in enumerate((buffer_len, buffer_len - tokens + 1, buffer_len - tokens)):
        harness.fill(slot, harness.make_inputs(history))
    rows = [(2, tokens), (0, tokens), (1, tokens)]
    assert [harness.flushes(*row) for row in rows] == [False, True, True]
    harness.step(rows, [tokens, tokens, tokens // 2])
    assert [model.history for model in harness.slots] == [tokens, tokens // 2, buffer_len]
    harness.step(rows)


@pytest.mark.parametrize("state_format", ["int8", "int16_int8", "fp32_int8"])
@pytest.mark.parametrize("state_dim", [64, 256])
@pytest.mark.parametrize("family", DELTA)
def test_columns_of_bytes(family, state_dim, state_format, device):
    """One new token, whose columns are bytes, in states of other widths: a step that flushes and one that does not."""
    spec = small_spec(family, buffer_len=8, max_tokens=1, state_dim=state_dim, **with_format(state_format))
    harness = Harness(spec, device, slots=2, seed=122)
    for slot, history in enumerate((8, 5)):
        harness.fill(slot, harness.make_inputs(history))
    harness.step([(0, 1), (1, 1)])
    harness.step([(0, 1), (1, 1)])


# ---- hard numbers ---------------------------------------------------------------------------------------------------


def nearly_parallel(k, generator):
    """Every key within 10^-3 of one direction."""
    base = torch.ones_like(k[:1]) + 0.1 * torch.arange(k.shape[-1])
    return base + 1e-3 * k


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("family", DELTA)
def test_nearly_parallel_keys(family, strength, device):
    """Every token rewrites what the one before wrote: the solve must not amplify errors."""
    spec = small_spec(family, beta="value", beta_dtype=torch.float32, max_tokens=8, **EXACT)
    harness = Harness(spec, device, slots=2, seed=114)
    run_cycles(edited(harness, k=nearly_parallel, beta=lambda b, _: torch.full_like(b, strength)), "padded")


@pytest.mark.parametrize("family", DELTA)
def test_equal_keys(family, device):
    """One key for every token of a step and its history."""
    harness = Harness(small_spec(family, **EXACT), device, slots=2, seed=115)
    run_cycles(edited(harness, k=lambda k, _: torch.ones_like(k)), "padded")


@pytest.mark.parametrize("form", ["logit", "value"])
@pytest.mark.parametrize("family", DELTA)
def test_extreme_beta(family, form, device):
    """Beta of exactly 0 and 1, and close to both."""
    values = [0.0, 1.0, 1e-6, 1 - 1e-6, 0.5] if form == "value" else [-100.0, 100.0, -15.0, 15.0, 0.0]
    spec = small_spec(family, beta=form, beta_dtype=torch.float32, **EXACT)

    def choose(beta, generator):
        return torch.tensor(values)[torch.randint(0, len(values), beta.shape, generator=generator)]

    run_cycles(edited(Harness(spec, device, slots=2, seed=116), beta=choose), "padded")


@pytest.mark.parametrize("family", DELTA)
def test_zero_keys(family, device):
    """A key of zeros writes nothing, and its norm is not infinite."""
    harness = Harness(small_spec(family, **EXACT), device, slots=2, seed=117)
    run_cycles(edited(harness, k=lambda k, g: k * torch.randint(0, 2, (k.shape[0], 1, 1), generator=g)), "padded")


@pytest.mark.parametrize("decay", [0.0, -20.0, "mixed"])
@pytest.mark.parametrize("family", DELTA)
def test_gate_strength(family, decay, device):
    """No decay at all up to one that leaves nothing, over a window of 64 tokens: finite and right."""
    spec = small_spec(family, gate="precomputed", buffer_len=64, max_tokens=16, **EXACT)
    choices = torch.tensor([0.0, -1e-7, -1e-3, -1.0, -5.0, -20.0, -80.0] if decay == "mixed" else [decay])

    def choose(g, generator):
        return choices[torch.randint(0, len(choices), g.shape, generator=generator)]

    harness = edited(Harness(spec, device, slots=1, seed=118), g=choose)
    for _ in range(9):  # more than two windows
        harness.step([(0, 16)], [16])
    assert harness.slots[0].position > 64
    harness.finish()


@pytest.mark.parametrize("bound", [-5.0, -20.0])
def test_lower_bound(bound, device):
    """Logits far beyond both ends of the sigmoid."""
    spec = replace(small_spec("kda", gate="lower_bound", lower_bound=bound, **EXACT), gate_dtype=torch.float32)
    harness = Harness(spec, device, slots=2, seed=119)
    run_cycles(edited(harness, g=lambda g, _: g * 50), "padded")


@pytest.mark.parametrize("family", DELTA)
def test_reading_does_not_enter_the_checkpoint(family, device):
    """The same tokens through one plane and two, fp32 and bf16 rings of u: checkpoints agree to fp32."""
    specs = [small_spec(family, **with_format(name)) for name in ("fp32", "fp32_bf16")]
    one, two = (Harness(spec, device, slots=2, seed=120) for spec in specs)
    for _ in range(24):
        for harness in (one, two):
            harness.step([(0, 4), (1, 4)], [3, 4])
    for harness in (one, two):
        harness.finish()
    states = [harness.cache.read_state(0, [0, 1]) for harness in (one, two)]
    assert float((states[0] - states[1]).norm() / states[0].norm()) < 1e-6
