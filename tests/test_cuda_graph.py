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


#: Cycles that work keeps its stream busy: what is not waited for comes too late.
SPIN = 200_000


class AmongOtherNodes:
    """Four steps of all layers, each behind another kind of node: a step is launched before what precedes it has ended.

    The steps share their slots and, but for the last one, the tensors of their inputs, which are NaN until the nodes before write them.
    """

    def __init__(self, harness, rows):
        self.harness, self.rows, self.tokens = harness, rows, harness.spec.max_tokens
        self.given = [self.buffers() for _ in range(4)]  # what the steps are to read
        self.shared, self.ahead = self.buffers(), self.buffers()  # what they read
        shape = (4, LAYERS, rows, self.tokens, *harness.spec.shape("H", "P"))
        self.outputs, self.echo = (torch.zeros(shape, dtype=harness.spec.dtype, device=harness.device) for _ in range(2))
        self.accepted = torch.zeros(4, rows, dtype=torch.int32, device=harness.device)
        self.side = torch.cuda.Stream()
        self.wrapper, self.idle = (ReplayWrapper(harness.cache, use_cuda_graph=True, max_rows=rows) for _ in range(2))
        for wrapper in (self.wrapper, self.idle):
            wrapper.plan([-1] * rows, self.tokens)

    def buffers(self):
        example = self.harness.make_inputs(0)
        shape, device = (self.rows, self.tokens), self.harness.device
        return [{k: torch.zeros(*shape, *v.shape[1:], dtype=v.dtype, device=device) for k, v in example.items()} for _ in range(LAYERS)]

    def copy(self, to, number):
        """Ends with a copy, which is no kernel."""
        for layer, inputs in enumerate(to):
            for name, tensor in inputs.items():
                tensor.copy_(self.given[number][layer][name])

    def compute(self, to, number):
        """Ends with a kernel that knows nothing of the one behind it."""
        for layer, inputs in enumerate(to):
            for name, tensor in inputs.items():
                torch.mul(self.given[number][layer][name], 1, out=tensor)

    def step(self, number, inputs):
        for layer in range(LAYERS):
            self.wrapper.run(layer, out=self.outputs[number, layer], **inputs[layer])

    def commit(self, number):
        self.wrapper.commit(self.wrapper.slots, self.tokens, self.accepted[number])

    def __call__(self):
        main, side = torch.cuda.current_stream(), self.side
        # Behind the join of a stream, which goes on beside the next steps.
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            self.copy(self.shared, 0)
            first = side.record_event()
            torch.cuda._sleep(SPIN)
            self.compute(self.ahead, 3)
            last = side.record_event()
        main.wait_event(first)
        self.step(0, self.shared)
        self.commit(0)
        # Behind a copy.
        torch.cuda._sleep(SPIN)
        self.copy(self.shared, 1)
        self.step(1, self.shared)
        # Another stream reads the outputs while the same cache's slots go on.
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            self.echo[1].copy_(self.outputs[1])
        self.commit(1)
        # Behind a step that does nothing, which itself follows a kernel.
        torch.cuda._sleep(SPIN)
        self.compute(self.shared, 2)
        self.idle.run(0, out=self.echo[2, 0], **self.shared[0])
        self.step(2, self.shared)
        main.wait_event(last)
        torch.cuda._sleep(SPIN)
        # Behind a commit.
        self.commit(2)
        self.step(3, self.ahead)
        self.commit(3)
        main.wait_stream(side)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "in streams"])
@pytest.mark.parametrize("rows", [4, 200])  # only in small batches does a step ask for memory before it waits
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_among_other_nodes(family, rows, captured):
    """The same bits as one launch at a time, though a step may start while what precedes it still runs."""
    slots = rows + 2
    harness, twin = (Harness(small_spec(family), "cuda", layers=LAYERS, slots=slots, seed=105, load=False) for _ in range(2))
    for layer in range(LAYERS):
        state = torch.randn(slots, *harness.spec.shape("H", "P", "N"), device="cuda")
        for each in (harness, twin):
            each.cache.load_state(layer, range(slots), state)
    steps = AmongOtherNodes(harness, rows)
    replay = steps
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # on padding alone
        for _ in range(2):
            steps()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        replay = graph.replay
    for _ in range(8):
        count = harness.randint(1, rows)
        chosen = torch.randperm(slots, generator=harness.generator)[:count].int().cuda()
        for tensor in (t for number in steps.given for layer in number for t in layer.values()):
            tensor.copy_(torch.randn(tensor.shape, generator=harness.generator))
            tensor[count:] = torch.nan
        for tensor in (t for inputs in (steps.shared, steps.ahead) for layer in inputs for t in layer.values()):
            tensor.fill_(torch.nan)
        steps.outputs.fill_(torch.nan)
        steps.echo.fill_(torch.nan)
        steps.accepted.copy_(torch.randint(0, steps.tokens + 1, steps.accepted.shape, generator=harness.generator))
        steps.wrapper.plan(chosen, steps.tokens)
        replay()
        torch.cuda.synchronize()
        twin.wrapper.plan(chosen, steps.tokens)
        for number, inputs in enumerate(steps.given):
            for layer in range(LAYERS):
                want = twin.wrapper.run(layer, **{name: x[:count] for name, x in inputs[layer].items()})
                torch.cuda.synchronize()
                got = steps.outputs[number, layer]
                assert same_bits(got[:count], want), f"step {number}, layer {layer}"
                assert not bits(got[count:]).any(), f"step {number}, layer {layer}: padding"
            twin.wrapper.commit(chosen, steps.tokens, steps.accepted[number, :count].contiguous())
            torch.cuda.synchronize()
        assert same_bits(steps.echo[1], steps.outputs[1])
        assert not bits(steps.echo[2, 0]).any()
    for now, want in zip(harness.cache.layers, twin.cache.layers, strict=True):
        assert all(same_bits(now[name], want[name]) for name in want)
    for name in harness.cache.cursors:
        assert torch.equal(harness.cache.cursors[name], twin.cache.cursors[name]), name
    assert bool((harness.cache.position > harness.spec.buffer_len).any())
