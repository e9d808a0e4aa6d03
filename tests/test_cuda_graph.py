"""A whole step of several layers with its commit, captured once and replayed with other slots, lengths and acceptances."""

import warnings

import pytest
import torch
from harness import FAMILIES, Harness, bits, same_bits, small_spec

from replayssm_jit import ReplayWrapper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS, LAYERS, SLOTS = 4, 3, 6
MODES = ("fixed", "lengths", "packed")


class CapturedStep:
    """Static inputs, outputs, counts and a graph of run, run, run, commit."""

    def __init__(self, harness, mode, pad_slot=-1, trees=False):
        self.harness, self.mode = harness, mode
        self.spec, self.device = harness.spec, harness.device
        self.tokens = self.spec.max_tokens
        self.wrapper = ReplayWrapper(harness.cache, use_cuda_graph=True, max_rows=ROWS, pad_slot=pad_slot)
        leading = (ROWS * self.tokens,) if mode == "packed" else (ROWS, self.tokens)
        example = harness.make_inputs(0)
        self.inputs = [
            {k: torch.zeros(*leading, *v.shape[1:], dtype=v.dtype, device=self.device) for k, v in example.items()} for _ in range(LAYERS)
        ]
        self.counts, self.accepted = (torch.zeros(ROWS, dtype=torch.int32, device=self.device) for _ in range(2))
        self.paths = torch.zeros(ROWS, self.tokens, dtype=torch.int32, device=self.device) if trees else None
        # Warm-up and capture run on padding rows only: they touch no slot.
        self.plan([(-1, self.tokens)] * ROWS, [[-1] * self.tokens] * ROWS if trees else None)
        before = self.picture()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.step()
        assert all(same_bits(a, b) for a, b in zip(before, self.picture(), strict=True)), "warm-up or capture touched a slot"

    def picture(self):
        cache = self.harness.cache
        tensors = [t for layer in cache.layers for t in layer.values()]
        return [t.clone() for t in (*tensors, cache.ring_start, cache.history, cache.position, cache.error)]

    def plan(self, rows, trees=None):
        slots = torch.tensor([s for s, _ in rows], dtype=torch.int32, device=self.device)
        lengths = torch.tensor([t for _, t in rows], dtype=torch.int32)
        self.counts.zero_()
        self.counts[: len(rows)] = lengths.to(self.device)
        parents = None if trees is None else self.harness.parents(trees, self.mode, self.tokens)
        if self.mode == "fixed":
            self.wrapper.plan(slots, self.tokens, parents=parents)
        elif self.mode == "lengths":
            self.wrapper.plan(slots, lengths.to(self.device), parents=parents)
        else:
            offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
            self.wrapper.plan(slots, cu_seqlens=offsets.to(self.device), parents=parents)

    def step(self):
        outputs = [self.wrapper.run(layer, **inputs) for layer, inputs in enumerate(self.inputs)]
        self.wrapper.commit(self.wrapper.slots, self.counts, self.accepted, accepted=self.paths)
        return outputs

    def replay(self, rows, accepted, trees=None):
        """Fill the static inputs, plan outside the graph, replay, and judge by the model."""
        harness, lengths = self.harness, [t for _, t in rows]
        starts = [sum(lengths[:i]) for i in range(len(rows) + 1)]
        fresh = [harness.make_inputs(sum(lengths)) for _ in range(LAYERS)]
        for static, values in zip(self.inputs, fresh, strict=True):
            for name, tensor in static.items():
                tensor.fill_(torch.nan)
                for r in range(len(rows)):
                    where = slice(starts[r], starts[r + 1]) if self.mode == "packed" else (r, slice(0, lengths[r]))
                    tensor[where] = values[name][starts[r] : starts[r + 1]].to(self.device)
        self.accepted.zero_()
        for r, kept in enumerate(accepted):
            self.accepted[r] = kept if trees is None else len(kept)
            if trees is not None:
                self.paths[r, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        self.plan(rows, *([] if trees is None else [trees]))
        harness.poison()
        self.graph.replay()
        for layer, out in enumerate(self.outputs):
            for r, (slot, t) in enumerate(rows):
                got = out[starts[r] : starts[r + 1]] if self.mode == "packed" else out[r, :t]
                if harness.live(slot) and t:
                    tokens = {k: v[starts[r] : starts[r + 1]] for k, v in fresh[layer].items()}
                    harness.judge_output(got, slot, layer, tokens, None if trees is None else trees[r])
                else:
                    assert not bits(got).any()
            if self.mode != "packed":
                assert not bits(out[len(rows) :]).any()
        harness.commit_model(rows, accepted, fresh)
        harness.judge_cursors()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_step(family, mode):
    harness = Harness(small_spec(family), "cuda", layers=LAYERS, slots=SLOTS, seed=100)
    captured = CapturedStep(harness, mode)
    most = harness.spec.max_tokens
    for _ in range(80):
        lengths = range(most, most + 1) if mode == "fixed" else range(most + 1)
        rows = harness.random_rows(lengths, rows=harness.randint(1, ROWS))
        captured.replay(rows, [harness.randint(0, t) for _, t in rows])
    assert min(model.position for model in harness.slots) > harness.spec.buffer_len
    harness.finish()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_trees(family, mode):
    """Trees and paths are as much the replay's as slots are; their form is frozen like that of the lengths."""
    harness = Harness(small_spec(family), "cuda", layers=LAYERS, slots=SLOTS, seed=104)
    captured = CapturedStep(harness, mode, trees=True)
    most = harness.spec.max_tokens
    for _ in range(40):
        rows = harness.random_rows(range(most, most + 1) if mode == "fixed" else range(most + 1), rows=harness.randint(1, ROWS))
        trees = [harness.random_tree(t) for _, t in rows]
        captured.replay(rows, [harness.random_path(tree) for tree in trees], trees)
    with pytest.raises(ValueError, match="parents"):
        captured.plan([(0, most)])
    harness.finish()


def test_an_engine_writes_the_buffers_itself():
    """Replay without plan: slots go straight into the wrapper's buffer."""
    harness = Harness(small_spec("mamba2"), "cuda", layers=LAYERS, slots=SLOTS, seed=101)
    captured = CapturedStep(harness, "fixed")
    buffer = captured.wrapper.slots
    address = buffer.data_ptr()

    def write(rows):
        captured.counts.zero_()
        captured.counts[: len(rows)] = captured.tokens
        buffer.fill_(-1)
        buffer[: len(rows)] = torch.tensor([s for s, _ in rows], dtype=torch.int32)

    captured.plan = write
    for slots in ([3, 0], [1, 5, 2, 4], [0, 3, 1]):
        captured.replay([(s, captured.tokens) for s in slots], [2] * len(slots))
    assert captured.wrapper.slots.data_ptr() == address
    harness.finish()


@pytest.mark.parametrize("graph", [True, False])
def test_slots_that_the_host_knows(graph):
    """Lists reach the device without a synchronisation; the ones before them are still read by what is enqueued."""
    harness = Harness(small_spec("mamba2"), "cuda", layers=LAYERS, slots=SLOTS, seed=103)
    captured = CapturedStep(harness, "fixed")
    wrapper = captured.wrapper if graph else harness.wrapper
    lists = [harness.random_rows(range(1, 2), rows=harness.randint(1, ROWS)) for _ in range(40)]
    lists = [[slot for slot, _ in rows] for rows in lists]
    wrapper.plan(lists[0], captured.tokens)
    seen = []
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(20_000_000)
        for slots in lists:
            wrapper.plan(slots, captured.tokens)
            seen.append(wrapper.slots.clone() if graph else wrapper.slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slots, on_device in zip(lists, seen, strict=True):
        assert on_device.tolist() == slots + [-1] * (len(on_device) - len(slots))
    if graph:
        plan = captured.plan
        captured.plan = lambda rows: (plan(rows), wrapper.plan([slot for slot, _ in rows], captured.tokens))
        for slots in lists[:6]:
            captured.replay([(slot, captured.tokens) for slot in slots], [3] * len(slots))
    harness.finish()


def test_impossible_acceptance_in_a_graph():
    harness = Harness(small_spec("mamba2"), "cuda", layers=LAYERS, slots=SLOTS, seed=102)
    captured = CapturedStep(harness, "fixed")
    captured.replay([(1, 4), (2, 4)], [5, 4])
    with pytest.raises(RuntimeError, match="num_accepted"):
        harness.cache.check()
    harness.finish()
