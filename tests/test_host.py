"""What a step costs the host: nothing is allocated, nothing is kept."""

import gc
import sys

import pytest
import torch
from harness import FAMILIES, Harness, small_spec
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Names of the torch operators of a block; a tensor cannot be allocated without one."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["fixed", "padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_allocates_nothing(family, mode, device):
    """Plan with slots on the device, run into a given output, commit: no torch operator, and a thousand leave no object behind."""
    harness = Harness(small_spec(family), device, slots=3, seed=130)
    wrapper, spec = harness.wrapper, harness.spec
    slots, lengths = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([2, 0, -1], [2, 2, 2]))
    form = {"fixed": {"num_tokens": 2}, "padded": {"num_tokens": lengths}, "packed": {"cu_seqlens": lengths.new_tensor([0, 2, 4, 6])}}[mode]
    leading = (6,) if mode == "packed" else (3, 2)
    inputs = {name: tensor.unflatten(0, leading).to(device) for name, tensor in harness.make_inputs(6).items()}
    out = torch.empty(*leading, *spec.shape("H", "P"), dtype=spec.dtype, device=device)

    def step():
        wrapper.plan(slots, **form)
        wrapper.run(0, out=out, **inputs)
        wrapper.commit(slots, lengths, lengths)

    step()
    with Operators() as operators:
        step()
    assert operators.seen == []
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(300):
        step()
    gc.collect()
    assert sys.getallocatedblocks() - before < 30
