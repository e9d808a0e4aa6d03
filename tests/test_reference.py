"""The float64 reference against right values of the field's own references, and its own consistency."""

from pathlib import Path

import numpy as np
import pytest
import torch

from replayssm_jit.reference import gdn_recurrence, kda_recurrence, mamba2_recurrence

DATA = Path(__file__).parent / "data"
ROUNDING = 1e-13  # float64; torch's vectorised exp differs in its last bit with the place in a tensor
CASES = ("mamba2", "gdn", "kda_softplus", "kda_lower_bound")


def load(case):
    with np.load(DATA / f"{case}.npz") as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive.files}


def run(case, data, rows=slice(None), state=None, **options):
    """One recurrence over some rows of a case's tokens."""
    if case == "mamba2":
        names, recurrence, first = ("x", "dt", "B", "C"), mamba2_recurrence, "state0"
        options |= {name: data[name] for name in ("A", "D", "dt_bias")} | {"z": data["z"][rows]}
    else:
        names, first = ("q", "k", "v", "a", "b"), "state0_vk"
        recurrence = gdn_recurrence if case == "gdn" else kda_recurrence
        options |= {name: data[name] for name in ("A_log", "dt_bias") if name in data}
        if case == "kda_lower_bound":
            options |= {"gate": "lower_bound", "lower_bound": float(data["lower_bound"])}
    return recurrence(*(data[name][rows] for name in names), data[first] if state is None else state, **options)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


# The Mamba-2 values are float64, the others float32 by a float32 recurrence.
@pytest.mark.parametrize(("case", "bound"), [("mamba2", 1e-12), ("gdn", 1e-6), ("kda_softplus", 1e-6), ("kda_lower_bound", 1e-6)])
def test_right_values(case, bound):
    data = load(case)
    suffix = "" if case == "mamba2" else "_vk"
    y, state = run(case, data)
    assert error(y, data["y"]) < bound
    assert error(state, data["state_final" + suffix]) < bound
    y17, state17 = run(case, data, slice(0, 17))
    assert error(y17, data["y"][:17]) < bound
    assert error(state17, data["state_after_17" + suffix]) < bound


@pytest.mark.parametrize("case", CASES[1:])
def test_gate_in_the_recurrence_equals_precomputed(case):
    """The stored g is the gate's float32 value: given as it is, it must lead to the same outputs."""
    data = load(case)
    want, _ = run(case, data)
    recurrence = gdn_recurrence if case == "gdn" else kda_recurrence
    beta = torch.sigmoid(data["b"].double())
    got, _ = recurrence(*(data[n] for n in "qkv"), data["g"], beta, data["state0_vk"], gate="precomputed", beta="value")
    assert error(got, want) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_tree_is_its_paths(case):
    data = load(case)
    parents = [-1, 0, 1, 0, 3, 3, -1, 6]
    y, last = run(case, data, slice(0, 8), parents=parents)
    for node in range(8):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone, state = run(case, data, path)
        assert error(alone[-1], y[node]) < ROUNDING
    assert error(state, last) < ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_continuing_from_a_state(case):
    data = load(case)
    y, state = run(case, data)
    head, middle = run(case, data, slice(0, 13))
    tail, end = run(case, data, slice(13, None), state=middle)
    assert error(torch.cat([head, tail]), y) < ROUNDING
    assert error(end, state) < ROUNDING


def test_large_softplus_has_no_cut_off():
    """Beyond torch's threshold of 20, softplus is still log(1 + e^x)."""
    one = torch.ones(1, 1, 1)
    y, _ = mamba2_recurrence(one, torch.tensor([[21.0]]), one, one, torch.zeros(1, 1, 1), A=torch.tensor([-0.0]))
    assert float(y) - 21 == pytest.approx(float(torch.log1p(torch.exp(torch.tensor(-21.0, dtype=torch.float64)))), rel=1e-5)


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1]])
def test_parents_out_of_range(parents):
    data = load("mamba2")
    with pytest.raises(ValueError, match="parents"):
        run("mamba2", data, slice(0, len(parents)), parents=parents)
