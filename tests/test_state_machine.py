"""Random lives of slots: hypothesis draws sequences of plan, run, commit, reset, load and flush; the Python model judges each."""

import pytest
import torch
from harness import FAMILIES, Harness, small_spec, with_format
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

SLOTS = 4

#: Specializations are few, so that compiling does not take the time.
WINDOWS = [(1, 1), (4, 3), (5, 5)]


class Lives(RuleBasedStateMachine):
    """Slots of a small cache, any of them padded, recycled or in the middle of a step at any time."""

    family, device = "mamba2", torch.device("cpu")

    @initialize(
        window=st.sampled_from(WINDOWS),
        state_format=st.sampled_from(["fp32", "fp32_bf16"]),
        seed=st.integers(0, 2**16),
        pad_slot=st.sampled_from([-1, 0]),
        load=st.booleans(),
    )
    def start(self, window, state_format, seed, pad_slot, load):
        shape = {"heads": 2, "head_dim": 64, "state_dim": 64, "buffer_len": window[0], "max_tokens": window[1]}
        group = {"groups" if self.family == "mamba2" else "key_heads": 1}
        spec = small_spec(self.family, **shape, **group, dtype=torch.float32, **with_format(state_format))
        self.harness = Harness(spec, self.device, slots=SLOTS, seed=seed, pad_slot=pad_slot, load=load)
        self.harness.pending = None

    def rows(self, data, lengths):
        """Distinct slots and padding in any order, each with a length."""
        slots = data.draw(st.lists(st.sampled_from([*range(SLOTS), -1, -2]), min_size=1, max_size=6, unique=True), label="slots")
        return [(slot, data.draw(lengths, label="tokens")) for slot in slots]

    def accepted(self, data, rows):
        """Mostly possible counts, now and then impossible ones."""
        return [data.draw(st.one_of(st.integers(0, t), st.integers(-1, t + 1)), label="accepted") for _, t in rows]

    def idle(self):
        return self.harness.pending is None

    @precondition(idle)
    @rule(data=st.data(), mode=st.sampled_from(["fixed", "padded", "packed"]), late=st.booleans())
    def step(self, data, mode, late):
        most = self.harness.spec.max_tokens
        lengths = st.just(data.draw(st.integers(1, most))) if mode == "fixed" else st.integers(0, most)
        rows = self.rows(data, lengths)
        accepted = self.accepted(data, rows)
        width = data.draw(st.integers(max(1, *(t for _, t in rows)), most), label="width") if mode == "padded" else None
        self.harness.pending = None
        self.harness.step(rows, accepted, mode=mode, width=width, commit=not late)
        self.expect_error(rows if not late else [], accepted)

    @precondition(lambda self: not self.idle())
    @rule()
    def commit_late(self):
        rows, accepted, fresh = self.harness.pending
        self.harness.pending = None
        self.harness.commit(rows, accepted, fresh)
        self.expect_error(rows, accepted)

    def expect_error(self, rows, accepted):
        if any(self.harness.live(slot) and not 0 <= a <= t for (slot, t), a in zip(rows, accepted, strict=False)):
            with pytest.raises(RuntimeError, match="num_accepted"):
                self.harness.cache.check()
        self.harness.cache.check()

    @precondition(idle)
    @rule(slots=st.lists(st.sampled_from([*range(SLOTS), -1]), min_size=1, unique=True))
    def reset(self, slots):
        self.harness.reset(slots)

    @precondition(idle)
    @rule(slots=st.lists(st.sampled_from([*range(SLOTS), -1]), min_size=1, unique=True))
    def flush(self, slots):
        self.harness.flush(slots)
        for slot in slots:
            if slot >= 0:
                self.harness.judge_state(slot)

    @precondition(idle)
    @rule(slot=st.integers(0, SLOTS - 1), position=st.integers(0, 2**40))
    def load(self, slot, position):
        self.harness.load(slot, position)

    @invariant()
    def cursors(self):
        if hasattr(self, "harness"):
            self.harness.judge_cursors()

    def teardown(self):
        if hasattr(self, "harness") and self.idle():
            self.harness.finish()


def run(family, device, examples, steps, phases):
    machine = type("Lives", (Lives,), {"family": family, "device": device})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_lives(family, device):
    # No shrinking: it takes minutes, and the seed is fixed.
    run(family, device, 25 if family == "mamba2" else 12, 30, [Phase.generate])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_lives(family, device):
    run(family, device, 400, 60, [Phase.generate, Phase.shrink])
