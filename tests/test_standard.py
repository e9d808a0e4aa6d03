"""The standard kernel, which replay is compared with, against the float64 reference."""

import pytest
import torch
from harness import (
    ARITHMETIC,
    DTYPES,
    FAMILIES,
    FLIPS,
    SHORT,
    crossed,
    make_inputs,
    make_weights,
    projection_views,
    recurrence,
    relative_error,
    same_bits,
    small_spec,
    stored,
    with_format,
)

from replayssm_jit import kernels
from replayssm_jit.standard import StandardKernel

OPTIONAL = {"D", "dt_bias", "z", "A_log"}


class Standard:
    """Random states in a pool, and what the recurrence makes of them: float32 within a launch, rounded where it is written."""

    def __init__(self, spec, device, rows, tokens, seed=60, optional=OPTIONAL):
        self.spec, self.kernel = spec, StandardKernel(spec, device)
        generator = torch.Generator().manual_seed(seed)
        self.weights = make_weights(spec, generator, optional)
        packed = make_inputs(spec, rows * tokens, generator, optional)
        self.inputs = {k: v.unflatten(0, (rows, tokens)) for k, v in packed.items()}
        self.state = torch.randn(2 * rows, *spec.shape("H", "P", "N"), generator=generator).to(spec.checkpoint_dtype)
        self.slots = torch.randperm(2 * rows, generator=generator)[:rows].to(torch.int32)
        self.device = device

    def run(self, state, layout=None, **options):
        inputs = {k: v.to(self.device) for k, v in self.inputs.items()}
        inputs = inputs if layout is None else layout(inputs, 2)
        weights = {k: v.to(self.device) for k, v in self.weights.items()}
        return self.kernel.run(state, self.slots.to(self.device), **inputs, **weights, **options)

    def want(self, row, state):
        outputs, states = [], []
        for t in range(next(iter(self.inputs.values())).shape[1]):
            token = {k: v[row, t : t + 1] for k, v in self.inputs.items()}
            y, state = recurrence(self.spec, token, self.weights, state)
            outputs.append(y[0])
            states.append(stored(self.spec, state))
        return torch.stack(outputs), states


def judge(spec, device, got, want):
    rounding = float((want.to(spec.dtype).double() - want).norm() / want.norm())
    assert relative_error(got, want) <= rounding + 2 * (ARITHMETIC[kernels.backend_of(device)] + FLIPS[spec.state_format])


@pytest.mark.parametrize(
    ("family", "dtype", "state_format"),
    crossed(
        FAMILIES,
        DTYPES.values(),
        ["fp32", "bf16", "fp16"],
        always=lambda family, dtype, name: (
            family == "mamba2" or (SHORT[dtype], name) in {("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "bf16")}
        ),
    ),
)
def test_in_place(family, dtype, state_format, device):
    """Every token rewrites its row's slot; other slots keep their bits."""
    spec = small_spec(family, dtype=dtype, **with_format(state_format))
    standard = Standard(spec, device, rows=3, tokens=5)
    state = standard.state.clone().to(device)
    out = standard.run(state)
    for row, slot in enumerate(standard.slots.tolist()):
        y, states = standard.want(row, standard.state[slot].double())
        judge(spec, device, out[row], y)
        assert relative_error(state[slot], states[-1]) <= (1e-6 if state_format == "fp32" else FLIPS[state_format])
    others = sorted(set(range(6)) - set(standard.slots.tolist()))
    assert same_bits(state[others].cpu(), standard.state[others])


@pytest.mark.parametrize("family", FAMILIES)
def test_snapshots(family, device):
    """Verification of drafts the standard way: the state after every token goes to a slot of its own, or nowhere."""
    spec = small_spec(family, **with_format("fp32"))
    standard = Standard(spec, device, rows=2, tokens=4)
    pool = torch.full((12, *standard.state.shape[1:]), torch.nan, dtype=spec.checkpoint_dtype)
    pool[:4] = standard.state
    write = torch.randperm(8).reshape(2, 4).to(torch.int32) + 4
    skipped, write[1, 1] = int(write[1, 1]), -1
    state = pool.clone().to(device)
    out = standard.run(state, write_slots=write.to(device))
    assert same_bits(state[:4].cpu(), standard.state)
    for row, slot in enumerate(standard.slots.tolist()):
        y, states = standard.want(row, standard.state[slot].double())
        judge(spec, device, out[row], y)
        for t in range(4):
            if write[row, t] >= 0:
                assert relative_error(state[int(write[row, t])], states[t]) <= 1e-6
    assert state[skipped].isnan().all()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_of_a_projection(family, shift, device):
    spec = small_spec(family, **with_format("fp32"))
    standard = Standard(spec, device, rows=2, tokens=3)
    want, got = standard.state.clone().to(device), standard.state.clone().to(device)
    assert same_bits(standard.run(got, projection_views(shift)), standard.run(want))
    assert same_bits(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_rows(family, device):
    spec = small_spec(family, **with_format("fp32"))
    standard = Standard(spec, device, rows=3, tokens=2)
    standard.slots[1] = -1
    for pad_slot in (-1, int(standard.slots[0])):
        state = standard.state.clone().to(device)
        standard.run(state, pad_slot=pad_slot)
        idle = set(range(6)) - {int(s) for s in standard.slots if s not in (-1, pad_slot)}
        assert same_bits(state[sorted(idle)].cpu(), standard.state[sorted(idle)])


def test_tokens_at_a_time(device):
    """One launch of T tokens and T launches give the same states."""
    spec = small_spec("mamba2", **with_format("fp32"))
    standard = Standard(spec, device, rows=2, tokens=6)
    together, alone = standard.state.clone().to(device), standard.state.clone().to(device)
    standard.run(together)
    inputs = standard.inputs
    for t in range(6):
        standard.inputs = {k: v[:, t : t + 1] for k, v in inputs.items()}
        standard.run(alone)
    assert relative_error(alone, together) < 5e-7
