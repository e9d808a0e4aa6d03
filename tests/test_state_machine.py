"""Random lives of slots: hypothesis draws sequences of every public operation; the Python model judges each.

Two caches of one spec live side by side, one of them views of a pool with gaps, and slots move between them. A step may wait for its
commit while other slots run, move and end. A slot that goes on from a rounded checkpoint is judged fold by fold: every number must be what
an exact fold rounds to, with the random bits of its place where rounding is stochastic. ``make fuzz`` goes on for longer, with other
sequences every time.
"""

import pytest
import torch
from harness import (
    DTYPES,
    FAMILIES,
    STATE_FP32,
    Harness,
    bits,
    dense,
    kept_nodes,
    path_to,
    projection_views,
    relative_error,
    same_bits,
    small_spec,
    with_format,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from test_step import pool

from replayssm_jit import ReplayCache, functional

SLOTS = 4
#: Calls of public methods that one family's default run makes at least in plain formats, on the CPU.
CALLS = 8000

#: Window, activations, checkpoint, rounding. Few, so that compiling does not take the time.
PLAIN = [
    ((1, 1), "fp32", "fp32", "nearest"),
    ((4, 3), "fp32", "fp32_bf16", "nearest"),
    ((5, 5), "bf16", "fp32_bf16", "nearest"),
    ((6, 2), "fp16", "fp32", "nearest"),
]
#: Checkpoints that a fold rounds, or that steps read a scaled copy of; by default every third is a family's, in ``make fuzz`` all are.
NARROW = [
    ((4, 3), "bf16", "int16_int8", "nearest"),
    ((5, 2), "bf16", "int8", "nearest"),
    ((4, 3), "bf16", "int16_int8", "stochastic"),
    ((5, 2), "fp32", "int8", "stochastic"),
    ((6, 2), "fp16", "fp32_fp8", "nearest"),
    ((3, 3), "bf16", "fp8", "nearest"),
    ((6, 2), "bf16", "fp32_int8", "nearest"),
    ((3, 3), "bf16", "fp8", "stochastic"),
    ((4, 3), "fp32", "bf16", "nearest"),
    ((4, 3), "bf16", "bf16", "stochastic"),
    ((5, 2), "fp32", "fp16", "nearest"),
    ((5, 2), "fp16", "fp16", "stochastic"),
]
LAYOUTS = {"dense": dense, "aligned views": projection_views(0), "unaligned views": projection_views(1)}

either = st.sampled_from([0, 0, 1])
indices = st.lists(st.sampled_from([*range(SLOTS), -1, -7]), min_size=1, max_size=SLOTS + 1, unique=True)


class Lives(RuleBasedStateMachine):
    """Slots of two small caches, any of them padded, recycled, away as bytes or in the middle of a step at any time."""

    family, device, calls, specs = "mamba2", torch.device("cpu"), 0, PLAIN

    @initialize(
        data=st.data(),
        layers=st.integers(1, 2),
        seed=st.integers(0, 2**16),
        pad_slot=st.sampled_from([-1, 0]),
        load=st.booleans(),
        debug=st.booleans(),
    )
    def start(self, data, layers, seed, pad_slot, load, debug):
        (buffer_len, max_tokens), dtype, state_format, rounding = data.draw(st.sampled_from(self.specs), label="spec")
        group = {"groups" if self.family == "mamba2" else "key_heads": 1}
        size = {"heads": 2, "head_dim": 64, "state_dim": 64, "buffer_len": buffer_len, "max_tokens": max_tokens}
        precision = {"dtype": DTYPES[dtype], "rounding": rounding, **with_format(state_format)}
        spec = small_spec(self.family, **size, **group, **precision)
        one = Harness(spec, self.device, layers=layers, slots=SLOTS, seed=seed, pad_slot=pad_slot, load=load)
        adopted = ReplayCache.from_tensors(spec, [pool(spec, SLOTS, self.device, 48 + 1024 * layer) for layer in range(layers)])
        adopted.reset(range(SLOTS))
        other = Harness(spec, self.device, seed=seed + 1, load=load, cache=adopted, weights=one.weights)
        self.sides = [one, other]
        self.waiting = []  # steps without a commit: harness, rows, accepted, fresh
        self.away = []  # blobs, and what their slots were
        self.debug = debug
        for harness in self.sides:
            harness.cache.debug = debug
        self.count(2 * layers + 6)

    # ---- what may happen --------------------------------------------------------------------------------------------

    def count(self, calls):
        type(self).calls += calls

    def open(self, harness):
        """Slots whose last step has no commit yet."""
        return {slot for slot, model in enumerate(harness.slots) if model.uncommitted}

    def closed(self, harness, slots):
        """Those of some slots that may be changed now."""
        return [slot for slot in slots if slot < 0 or not harness.slots[slot].uncommitted] or [-1]

    def rows(self, data, harness, lengths):
        """Distinct slots and padding in any order, each with a length."""
        return [(slot, data.draw(lengths, label="tokens")) for slot in self.closed(harness, data.draw(indices, label="slots"))]

    def accepted(self, data, rows):
        """Mostly possible counts; now and then impossible ones, which debug mode would refuse."""
        possible = [st.integers(0, t) for _, t in rows]
        if self.debug:
            return [data.draw(counts, label="accepted") for counts in possible]
        return [
            data.draw(st.one_of(counts, st.integers(-1, t + 1)), label="accepted") for counts, (_, t) in zip(possible, rows, strict=True)
        ]

    # ---- steps ------------------------------------------------------------------------------------------------------

    def trees(self, data, rows):
        """Parents of every row's tokens."""
        return [[data.draw(st.integers(-1, t - 1), label="parent") for t in range(count)] for _, count in rows]

    def paths(self, data, trees):
        """Mostly a path of every tree; now and then one that falls, which debug mode would refuse."""
        chosen = [path_to(tree, data.draw(st.integers(-1, len(tree) - 1), label="node")) for tree in trees]
        if self.debug or data.draw(st.integers(0, 7), label="possible"):
            return chosen
        return [path[::-1] for path in chosen]

    @rule(
        data=st.data(),
        side=either,
        mode=st.sampled_from(["fixed", "padded", "packed"]),
        layout=st.sampled_from([*LAYOUTS]),
        drafts=st.sampled_from(["row", "row", "tree"]),
    )
    def step(self, data, side, mode, layout, drafts):
        harness = self.sides[side]
        most = harness.spec.max_tokens
        lengths = st.just(data.draw(st.integers(1, most))) if mode == "fixed" else st.integers(0, most)
        harness.layout = LAYOUTS[layout]
        rows = self.rows(data, harness, lengths)
        self.run(data, harness, rows, mode, self.trees(data, rows) if drafts == "tree" else None)

    @precondition(lambda self: not all(harness.planned is None for harness in self.sides))
    @rule(data=st.data(), side=either)
    def step_again(self, data, side):
        """The batch of the last plan again, without a plan."""
        harness = self.sides[side]
        if harness.planned is not None:
            rows, mode, width, trees = harness.planned
            if not self.open(harness) & {slot for slot, t in rows if t}:
                self.run(data, harness, rows, mode, trees, plan=False, width=None if trees is None else width)

    def run(self, data, harness, rows, mode, trees, plan=True, width=None):
        most = harness.spec.max_tokens
        if mode == "padded" and width is None:
            width = data.draw(st.integers(max(1, *(t for _, t in rows)), most), label="width")
        accepted = self.accepted(data, rows) if trees is None else self.paths(data, trees)
        late = data.draw(st.booleans(), label="late")
        harness.step(rows, accepted, mode=mode, width=width, commit=False, plan=plan, trees=trees)
        self.count(plan + harness.num_layers)
        self.waiting.append((harness, *harness.pending))
        if not late:
            self.commit(len(self.waiting) - 1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def commit_late(self, data):
        """Any of the steps that wait, whatever has been planned or run since."""
        self.commit(data.draw(st.integers(0, len(self.waiting) - 1), label="which"))

    def commit(self, which):
        harness, rows, accepted, fresh = self.waiting.pop(which)
        harness.commit(rows, accepted, fresh)
        given = [a if isinstance(a, int) else len(a) for a in accepted]
        kept = [len(kept_nodes(a, t)) for (_, t), a in zip(rows, accepted, strict=True)]
        if any(harness.live(slot) and a != b for (slot, _), a, b in zip(rows, given, kept, strict=True)):
            with pytest.raises(RuntimeError, match="num_accepted"):
                harness.cache.check()
        harness.cache.check()
        self.count(2)

    @rule(data=st.data(), side=either, mode=st.sampled_from(["padded", "packed"]))
    def plan(self, data, side, mode):
        """A batch that is planned and then not run, its slots in the middle of a step or not."""
        harness = self.sides[side]
        lengths = st.integers(0, harness.spec.max_tokens)
        harness.plan([(slot, data.draw(lengths, label="tokens")) for slot in data.draw(indices, label="slots")], mode)
        self.count(1)

    @rule(data=st.data(), side=either, commit=st.booleans(), drafts=st.sampled_from(["row", "row", "tree"]))
    def step_as_an_operator(self, data, side, commit, drafts):
        """The torch.library form of a step; it is committed by either form."""
        harness = self.sides[side]
        rows = self.rows(data, harness, st.just(data.draw(st.integers(1, harness.spec.max_tokens))))
        trees = self.trees(data, rows) if drafts == "tree" else None
        accepted = self.accepted(data, rows) if trees is None else self.paths(data, trees)
        wrapper, harness.wrapper = harness.wrapper, _Operators(harness)
        harness.step(rows, accepted, mode="fixed", commit=False, trees=trees)
        self.count(harness.num_layers)
        if not commit:
            harness.wrapper = wrapper
        harness.planned = None
        self.waiting.append((harness, *harness.pending))
        self.commit(len(self.waiting) - 1)
        harness.wrapper = wrapper

    # ---- slots ------------------------------------------------------------------------------------------------------

    @rule(side=either, slots=indices)
    def reset(self, side, slots):
        self.sides[side].reset(self.closed(self.sides[side], slots))
        self.count(1)

    @rule(side=either, slots=indices)
    def flush(self, side, slots):
        harness = self.sides[side]
        slots = self.closed(harness, slots)
        harness.flush(slots)
        for slot in slots:
            if slot >= 0:
                harness.judge_state(slot)
        self.count(1)

    @rule(side=either, slots=indices, position=st.integers(0, 2**40), layout=st.sampled_from(["vk", "kv"]))
    def load(self, side, slots, position, layout):
        harness = self.sides[side]
        for slot in self.closed(harness, slots)[:1]:
            if slot >= 0:
                harness.load(slot, position, layout)
                self.count(harness.num_layers)

    @rule(side=either, slots=indices, layout=st.sampled_from(["vk", "kv"]))
    def read(self, side, slots, layout):
        """Checkpoints as they are, tokens pending or not; rows of no slot keep what they held."""
        harness = self.sides[side]
        slots = self.closed(harness, slots)
        for layer in range(harness.num_layers):
            out = torch.full((len(slots), *harness.spec.shape("H", *("PN" if layout == "vk" else "NP"))), 7.0, device=self.device)
            assert harness.cache.read_state(layer, slots, out, layout=layout) is out
            for row, slot in enumerate(slots):
                if slot < 0:
                    assert bool((out[row] == 7.0).all())
                else:
                    assert same_bits(out[row] if layout == "vk" else out[row].mT, harness.cache.read_state(layer, [slot])[0])
        for slot in slots:
            if slot >= 0:
                harness.judge_state(slot)
        self.count(harness.num_layers)

    @rule(data=st.data(), side=either, destinations=indices)
    def copy(self, data, side, destinations):
        """Forks and permutations; pairs with a negative entry are skipped."""
        harness = self.sides[side]
        destinations = self.closed(harness, destinations)
        allowed = st.sampled_from([*self.closed(harness, range(SLOTS)), -1])
        sources = [data.draw(allowed, label="source") for _ in destinations]
        harness.cache.copy_slots(sources, destinations)
        before = [model.copy() for model in harness.slots]
        for a, b in zip(sources, destinations, strict=True):
            if a >= 0 and b >= 0:
                harness.slots[b] = before[a].copy()
        self.count(1)

    @rule(data=st.data(), side=either, destinations=indices, move=st.booleans())
    def materialize(self, data, side, destinations, move):
        """True states at any boundary, into a tensor or into slots that are no sources; some rows are skipped."""
        harness = self.sides[side]
        destinations = self.closed(harness, destinations)
        allowed = [slot for slot in self.closed(harness, range(SLOTS)) if slot not in destinations]
        sources = [data.draw(st.sampled_from([*allowed, -1]), label="source") for _ in destinations]
        tokens = [data.draw(st.integers(-1, harness.slots[slot].history if slot >= 0 else 0), label="tokens") for slot in sources]
        positions = [-1 if count < 0 else harness.slots[max(slot, 0)].position + count for slot, count in zip(sources, tokens, strict=True)]
        given = torch.tensor(positions, dtype=torch.int64, device=harness.device)
        harness.poison()
        out = harness.cache.materialize(sources, given, **{"destination": destinations} if move else {})
        for row, (slot, count) in enumerate(zip(sources, tokens, strict=True)):
            skipped = slot < 0 or count < 0 or (move and destinations[row] < 0)
            states = [] if skipped else [harness.state_at(slot, layer, count) for layer in range(harness.num_layers)]
            if move and not skipped:
                harness.arrive(destinations[row], harness.slots[slot], count, states)
            for layer in range(0 if move else harness.num_layers):
                if skipped:
                    assert not out[layer, row].any()
                else:
                    assert relative_error(out[layer, row], states[layer]) <= STATE_FP32
        harness.judge_cursors()
        self.count(1)

    @rule(side=either, slots=indices)
    def export(self, side, slots):
        """Preempt: the slots' bytes are kept, and the slots are used for something else."""
        harness = self.sides[side]
        slots = [slot for slot in self.closed(harness, slots) if slot >= 0]
        if slots:
            harness.poison()
            self.away.append((harness.cache.export(slots), [harness.slots[slot].copy() for slot in slots]))
            harness.reset(slots[:1])
            self.count(2)

    @precondition(lambda self: self.away)
    @rule(data=st.data(), side=either)
    def import_(self, data, side):
        """Resume, in either cache, in any slots, once or often; a negative one is left away."""
        harness = self.sides[side]
        blob, models = self.away[data.draw(st.integers(0, len(self.away) - 1), label="blob")]
        free = [slot for slot in self.closed(harness, data.draw(st.permutations(range(SLOTS)))) if slot >= 0]
        slots = [free.pop() if free and data.draw(st.booleans(), label="wanted") else -1 for _ in models]
        harness.cache.import_(slots, blob)
        for slot, model in zip(slots, models, strict=True):
            if slot >= 0:
                harness.slots[slot] = model.copy()
        self.count(1)

    @precondition(lambda self: self.away)
    @rule(data=st.data(), side=either)
    def import_damaged(self, data, side):
        """A blob that is not whole is refused whole."""
        harness = self.sides[side]
        blob, models = self.away[data.draw(st.integers(0, len(self.away) - 1), label="blob")]
        damaged = bytearray(blob)
        place = data.draw(st.integers(0, len(blob) - 1), label="place")
        if data.draw(st.booleans(), label="truncated"):
            del damaged[place:]
        else:
            damaged[place] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        before = picture(harness.cache)
        with pytest.raises(ValueError, match="blob"):
            harness.cache.import_([-1] * len(models), damaged)
        assert all(torch.equal(a, b) for a, b in zip(before, picture(harness.cache), strict=True))
        self.count(1)

    # ---- objects ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.waiting)
    @rule(side=either, pad_slot=st.integers(-1, SLOTS - 1))
    def adopt(self, side, pad_slot):
        """The same memory under a new cache and a new wrapper, which may call another slot padding."""
        harness = self.sides[side]
        old = harness.cache
        cache = ReplayCache.from_tensors(harness.spec, old.layers, old.cursors)
        cache.debug = self.debug
        harness.use(cache, pad_slot)
        self.count(2 + harness.num_layers)

    @precondition(lambda self: self.debug and self.waiting)
    @rule(data=st.data())
    def misuse(self, data):
        """What must not happen before the commit is refused by name in debug mode, and changes nothing."""
        harness, rows, _, _ = self.waiting[data.draw(st.integers(0, len(self.waiting) - 1), label="step")]
        busy = sorted(self.open(harness) & {slot for slot, _ in rows})
        if not busy:
            return
        slot = data.draw(st.sampled_from(busy), label="slot")
        cache, wrapper = harness.cache, harness.wrapper
        index = torch.tensor([slot], dtype=torch.int32, device=self.device)
        inputs = {name: tensor.to(self.device)[None] for name, tensor in harness.make_inputs(1).items()}
        wrapper.plan([slot], 1)
        harness.planned = None
        calls = {
            "run": lambda: wrapper.run(0, **inputs),
            "reset": lambda: cache.reset([slot]),
            "flush": lambda: cache.flush(index),
            "load_state": lambda: cache.load_state(0, [slot], torch.zeros(1, *harness.spec.shape("H", "P", "N"), device=self.device)),
            "copy_slots": lambda: cache.copy_slots([-1, slot], [slot, -1]),
            "export": lambda: cache.export([slot]),
        }
        before = picture(cache)
        with pytest.raises(RuntimeError, match=f"slot {slot} .*was not committed"):
            calls[data.draw(st.sampled_from([*calls]), label="call")]()
        with pytest.raises(ValueError, match="num_accepted"):
            wrapper.commit(index, 1, index.new_tensor([2]))
        assert all(torch.equal(a, b) for a, b in zip(before, picture(cache), strict=True))
        self.count(3)

    @invariant()
    def cursors(self):
        for harness in getattr(self, "sides", ()):
            harness.judge_cursors()

    def teardown(self):
        while getattr(self, "waiting", ()):
            self.commit(0)
        for harness in getattr(self, "sides", ()):
            harness.finish()
            self.count(1)


class _Operators:
    """Steps by :mod:`replayssm_jit.functional` in the wrapper's place."""

    def __init__(self, harness):
        self.harness = harness

    def plan(self, slots, num_tokens, parents):
        self.slots, self.parents = slots, parents

    def run(self, layer, out, **inputs):
        cache, pad_slot = self.harness.cache, self.harness.pad_slot
        return out.copy_(functional.run(cache, layer, self.slots, parents=self.parents, pad_slot=pad_slot, **inputs))

    def commit(self, slots, num_tokens, num_accepted, accepted=None):
        functional.commit(self.harness.cache, slots, num_tokens, num_accepted, accepted=accepted, pad_slot=self.harness.pad_slot)


def picture(cache):
    """The bits of all that a cache holds."""
    tensors = [tensor for layer in cache.layers for tensor in layer.values()]
    return [bits(tensor).clone() for tensor in (*tensors, *cache.cursors.values(), cache.error)]


@pytest.mark.parametrize("formats", ["plain", "narrow"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lives(family, formats, device, request):
    longer = request.config.getoption("--fuzz")
    slow = device.type != "cpu" or request.config.getoption("--emulate") is not None
    lives, calls = (100, CALLS) if formats == "plain" else (40, CALLS // 3)
    specs = PLAIN if formats == "plain" else NARROW if longer else NARROW[FAMILIES.index(family) :: len(FAMILIES)]
    machine = type("Lives", (Lives,), {"family": family, "device": device, "calls": 0, "specs": specs})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=longer or (10 if slow else lives),
            stateful_step_count=60,
            deadline=None,
            derandomize=not longer,
            database=None,
            print_blob=True,
            # The default run does not shrink: it takes minutes, and its sequences are fixed.
            phases=[Phase.generate, Phase.shrink] if longer else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{family}, {formats} formats, on {device}: {machine.calls} calls")
    assert machine.calls >= calls or longer or slow
