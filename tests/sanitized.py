"""Every kernel over a few steps, small: what compute-sanitizer watches (`.ci/gpu`). ``python tests/sanitized.py [FAMILY ...]``."""

import sys

import torch
from harness import FAMILIES, make_inputs, make_weights, small_spec, with_format

from replayssm_jit import ReplayCache, ReplayWrapper
from replayssm_jit.kernels import one_plane
from replayssm_jit.standard import StandardKernel

FORMATS = (
    with_format("fp32_bf16"),
    with_format("int16_int8"),
    with_format("fp32_int8"),
    {"rounding": "stochastic", **with_format("int8")},
    {"rounding": "stochastic", **with_format("bf16")},
)
OPTIONAL = {"D", "dt_bias", "z", "A_log"}
ROWS = 20  # enough for their order to matter


class Life:
    """Slots with histories so long that in the first steps some rows flush and others do not."""

    def __init__(self, spec, device):
        self.spec, self.device, self.generator = spec, device, torch.Generator().manual_seed(0)
        self.cache = ReplayCache.allocate(spec, num_layers=2, num_slots=ROWS, device=device)
        self.wrapper = ReplayWrapper(self.cache)
        self.weights = {name: w.to(device) for name, w in make_weights(spec, self.generator, OPTIONAL).items()}
        for layer in range(2):
            self.cache.set_weights(layer, **self.weights)
            self.cache.load_state(layer, range(ROWS), self.states())
        self.cache.history.copy_(spec.buffer_len - torch.arange(ROWS) % (spec.max_tokens + 2))
        self.slots = self.counts(range(ROWS - 1, -1, -1))
        self.slots[3] = -1

    def counts(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def drawn(self, most):
        """A number for every row."""
        return torch.randint(0, most + 1, (ROWS,), generator=self.generator).int().to(self.device)

    def inputs(self):
        tokens = make_inputs(self.spec, ROWS * self.spec.max_tokens, self.generator, OPTIONAL)
        return {name: t.unflatten(0, (ROWS, -1)).to(self.device) for name, t in tokens.items()}

    def states(self):
        return torch.randn(ROWS, *self.spec.shape("H", "P", "N"), generator=self.generator).to(self.device)

    def step(self, lengths, accepted, path=None, parents=None):
        self.wrapper.plan(self.slots, lengths, parents=parents)
        for layer in range(2):
            assert torch.isfinite(self.wrapper.run(layer, **self.inputs())).all()
        self.wrapper.commit(self.slots, lengths, accepted, accepted=path)

    def steps(self):
        tokens = self.spec.max_tokens
        for _ in range(3):
            self.step(tokens, self.drawn(tokens))
            lengths = self.drawn(tokens)
            self.step(lengths, lengths)
        assert self.cache.position.any(), "no row has flushed"

    def trees(self):
        parents = self.counts([[-1, 0, 0, 2]]).repeat(ROWS, 1)
        for _ in range(3):
            self.step(4, self.drawn(3), self.counts([[0, 2, 3]]).repeat(ROWS, 1), parents)

    def folds(self):
        out = torch.empty(2, ROWS, *self.spec.shape("H", "P", "N"), device=self.device)
        self.cache.materialize(self.slots, out=out)
        self.cache.materialize([0, 1], destination=[2, 1])
        self.cache.flush(self.slots)
        self.cache.read_state(0, self.slots)
        self.cache.read_error()
        self.cache.check()

    def moves(self):
        self.cache.copy_slots([0, 1], [2, 4])
        self.cache.import_([5], self.cache.export([1]))
        self.cache.reset([6])

    def standard(self):
        kernel = StandardKernel(one_plane(self.spec), self.device)
        kernel.run(self.states(), self.counts(range(ROWS)), **self.inputs(), **self.weights)


def main(device, families):
    """One token and drafts in every format; trees, moves and the standard kernel in the default one."""
    for family in families:
        for chosen in FORMATS:
            one, drafts = (Life(small_spec(family, head_dim=128, buffer_len=16, max_tokens=t, **chosen), device) for t in (1, 4))
            one.steps()
            drafts.steps()
            if chosen is FORMATS[0]:
                drafts.trees()
                drafts.moves()
                drafts.standard()
            drafts.folds()
    print(f"every kernel of {', '.join(families)} ran")


if __name__ == "__main__":
    main(torch.device("cuda", 0), sys.argv[1:] or FAMILIES)
    torch.cuda.synchronize()
