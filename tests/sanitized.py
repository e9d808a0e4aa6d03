"""Every kernel once over a few flush cycles, small: what compute-sanitizer watches (`.ci/gpu`)."""

import torch

from replayssm_jit import GdnSpec, KdaSpec, Mamba2Spec, ReplayCache, ReplayWrapper
from replayssm_jit.kernels import one_plane
from replayssm_jit.standard import StandardKernel

SHAPE = {"heads": 6, "head_dim": 128, "state_dim": 128, "buffer_len": 8, "max_tokens": 3}
SPECS = (Mamba2Spec(groups=2, **SHAPE), GdnSpec(key_heads=2, **SHAPE), KdaSpec(key_heads=2, **SHAPE))
ROWS = 20


def main(device: torch.device) -> None:
    """Steps, trees, flushes, materialized states, moves."""
    torch.manual_seed(0)
    counts = {"dtype": torch.int32, "device": device}
    for spec in SPECS:
        cache = ReplayCache.allocate(spec, num_layers=2, num_slots=ROWS, device=device)
        weights = {}
        for weight in spec.weights:
            value = torch.rand(spec.shape(*weight.dims), device=device)
            weights[weight.name] = -value if weight.name == "A" else value
        for layer in range(2):
            cache.set_weights(layer, **weights)
        wrapper = ReplayWrapper(cache)
        slots = torch.arange(ROWS - 1, -1, -1, **counts)
        slots[3] = -1

        def inputs(spec=spec):
            shape = {i.name: spec.shape(i.outer, i.inner) for i in spec.inputs}
            return {i.name: torch.randn(ROWS, 3, *shape[i.name], device=device).to(spec.dtype_of(i.dtype)) for i in spec.inputs}

        parents = torch.tensor([[-1, 0, 0]], **counts).repeat(ROWS, 1)
        for step in range(8):
            tree = {"parents": parents} if step % 2 else {}
            wrapper.plan(slots, 3, **tree)
            for layer in range(2):
                out = wrapper.run(layer, **inputs())
                assert torch.isfinite(out).all()
            if tree:
                accepted = torch.tensor([[0, 2]], **counts).repeat(ROWS, 1)
                wrapper.commit(slots, 3, torch.randint(0, 3, (ROWS,), **counts), accepted=accepted)
            else:
                wrapper.commit(slots, 3, torch.randint(0, 4, (ROWS,), **counts))
        cache.materialize(slots, out=torch.empty(2, ROWS, *spec.shape("H", "P", "N"), device=device))
        cache.flush(slots)
        cache.copy_slots([0, 1], [2, 4])
        cache.import_([5], cache.export([1]))
        cache.read_state(0, slots)
        cache.check()
        standard = one_plane(spec)
        state = torch.randn(ROWS, *spec.shape("H", "P", "N"), device=device)
        StandardKernel(standard, device).run(state, torch.arange(ROWS, **counts), **inputs(), **weights)
    print("every kernel ran")


if __name__ == "__main__":
    main(torch.device("cuda", 0))
    torch.cuda.synchronize()
