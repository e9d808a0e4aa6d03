"""Options of one family: which inputs and weights are given, and how they are read."""

import pytest
import torch
from harness import Harness, small_spec, with_format
from test_step import run_cycles


@pytest.mark.parametrize("optional", [set(), {"D"}, {"z"}, {"dt_bias"}, {"D", "z"}], ids=lambda o: "+".join(sorted(o)) or "none")
def test_mamba2_optional_tensors(optional, device):
    run_cycles(Harness(small_spec("mamba2"), device, slots=2, seed=80, optional=optional), "padded")


@pytest.mark.parametrize("dt_dtype", [torch.float32, None], ids=["fp32 dt", "activation dt"])
@pytest.mark.parametrize("dt_softplus", [True, False])
def test_mamba2_dt(dt_softplus, dt_dtype, device):
    spec = small_spec("mamba2", dt_softplus=dt_softplus, dt_dtype=dt_dtype)
    run_cycles(Harness(spec, device, slots=2, seed=81), "padded")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mamba2_extreme_dt(dtype, device):
    """Softplus far from zero on both sides, decays of nearly 1 and of exactly 0: finite and right."""
    spec = small_spec("mamba2", dtype=dtype, **with_format("fp32"))
    harness = Harness(spec, device, slots=2, seed=82, optional={"D"})
    make = harness.make_inputs

    def extreme(tokens):
        inputs = make(tokens)
        steps = torch.tensor([-60.0, -20.0, -5.0, 0.0, 5.0, 15.0, 25.0, 60.0])
        choice = torch.randint(0, len(steps), inputs["dt"].shape, generator=harness.generator)
        inputs["dt"] = steps[choice].to(inputs["dt"].dtype)
        return inputs

    harness.make_inputs = extreme
    run_cycles(harness, "padded")
