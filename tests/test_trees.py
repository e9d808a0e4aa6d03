"""Trees of drafts: verification of all nodes in one launch and commit of an accepted path, judged path by path."""

import itertools

import pytest
import torch
from harness import DELTA, DTYPES, FAMILIES, FORMATS, SHORT, Harness, crossed, path_to, same_bits, small_spec, with_format
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MODES = ("fixed", "padded", "packed")
EXACT = {"dtype": torch.float32, **with_format("fp32")}


def chain(nodes):
    return list(range(-1, nodes - 1))


def star(nodes):
    return [-1, *[0] * (nodes - 1)]


def binary(nodes):
    return [(t - 1) // 2 if t else -1 for t in range(nodes)]


def spine(nodes):
    """A chain with a leaf beside each of its nodes."""
    return [-1 if t < 2 else t - 2 if t % 2 == 0 else t - 3 for t in range(nodes)]


def roots(nodes):
    return [-1] * nodes


def random_step(harness, mode):
    """One step of random trees, rows of any number of nodes and padding among them."""
    most = harness.spec.max_tokens
    if mode == "fixed":
        t = harness.randint(1, most)
        rows = [(slot, t) for slot, _ in harness.random_rows(range(1, 2))]
    else:
        rows = harness.random_rows(range(most + 1))
    rows.insert(harness.randint(0, len(rows)), (-1, rows[0][1]))
    trees = [harness.random_tree(t) for _, t in rows]
    harness.step(rows, mode=mode, width=harness.randint(max(1, *(t for _, t in rows)), most) if mode == "padded" else None, trees=trees)


def run_cycles(harness, mode="padded", cycles=3):
    """Steps of trees, of drafts in a row and of one token, until every slot has folded often enough."""
    folds = [0] * harness.num_slots
    while min(folds) < cycles:
        before = [s.position for s in harness.slots]
        kind = harness.randint(0, 3)
        if kind < 3:
            random_step(harness, mode)
        else:
            harness.step(harness.random_rows(range(1, 2)), mode=mode)
        folds = [n + (s.position > was) for n, s, was in zip(folds, harness.slots, before, strict=True)]
    harness.finish()


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), crossed(FAMILIES, MODES, always=lambda family, mode: family == "mamba2" or mode == "packed"))
def test_random_trees(family, mode, device):
    """Other trees in every row, rows of 0 and 1 nodes, padding, two layers, random paths kept, plain decode in between."""
    run_cycles(Harness(small_spec(family), device, layers=2, slots=4, seed=200), mode)


@pytest.mark.parametrize("window", [(16, 16), (33, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_windows(family, window, device):
    run_cycles(Harness(small_spec(family, buffer_len=window[0], max_tokens=window[1]), device, slots=2, seed=201), "packed")


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_of_trees(family, device):
    """Chain, star, binary tree, spine and nothing but roots, of 16 nodes each, in one batch; every path of them is kept once."""
    harness = Harness(small_spec(family, buffer_len=16, max_tokens=16), device, slots=5, seed=202)
    trees = [shape(16) for shape in (chain, star, binary, spine, roots)]
    for leaf in (15, 0, 14, 7):
        harness.step([(s, 16) for s in range(5)], [path_to(tree, leaf) for tree in trees], trees=trees)
    harness.finish()


# Trees and formats meet in no code of their own: each dtype, and one format of each kind.
USUAL = {("bf16", "fp32_bf16"), ("fp32", "fp32"), ("fp16", "int8")}


@pytest.mark.parametrize(
    ("family", "dtype", "state_format"),
    crossed(FAMILIES, DTYPES.values(), FORMATS, always=lambda _, dtype, name: (SHORT[dtype], name) in USUAL),
    ids=str,
)
def test_dtypes(family, dtype, state_format, device):
    run_cycles(Harness(small_spec(family, dtype=dtype, **with_format(state_format)), device, slots=2, seed=203))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_ring_start(family, device):
    """Paths that are moved together across every place where the ring wraps."""
    spec = small_spec(family)
    harness = Harness(spec, device, slots=spec.ring_len, seed=204)
    for slot, model in enumerate(harness.slots):
        model.ring_start = slot
    harness.cache.ring_start.copy_(torch.arange(spec.ring_len, dtype=torch.int32))
    rows = [(slot, 4) for slot in range(spec.ring_len)]
    for path in ([1, 2], [0, 3], [1, 2, 3], [3], []):
        tree = [-1] * 4
        for parent, node in itertools.pairwise(path):
            tree[node] = parent
        harness.step(rows, [path] * len(rows), trees=[tree] * len(rows))
    harness.finish()


@settings(max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_any_tree(family, device, data):
    """Whatever tree and path hypothesis draws, a plain token after it, and what a fold makes of both."""
    spec = small_spec(family, heads=2, **{"groups" if family == "mamba2" else "key_heads": 1}, buffer_len=9, max_tokens=9, **EXACT)
    harness = Harness(spec, device, slots=1, seed=205)
    for _ in range(3):
        nodes = data.draw(st.integers(1, 9), label="nodes")
        tree = [data.draw(st.integers(-1, t - 1), label="parent") for t in range(nodes)]
        harness.step([(0, nodes)], [path_to(tree, data.draw(st.integers(-1, nodes - 1), label="last"))], trees=[tree])
        harness.step([(0, 1)], [1])
    harness.finish()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_is_no_tree(family, mode, device):
    """Parents t - 1 give the bits of none, in outputs, rings and checkpoints, whichever way they are committed."""
    one, other = (Harness(small_spec(family), device, layers=2, slots=3, seed=206) for _ in range(2))
    for _ in range(10):
        lengths = range(4, 5) if mode == "fixed" else range(5)
        rows = one.random_rows(lengths)
        assert other.random_rows(lengths) == rows
        trees = [chain(t) for _, t in rows]
        accepted = [one.randint(0, t) for _, t in rows]
        assert [other.randint(0, t) for _, t in rows] == accepted
        outputs = one.step(rows, accepted, mode=mode), other.step(rows, [list(range(a)) for a in accepted], mode=mode, trees=trees)
        assert all(same_bits(a, b) for a, b in zip(*outputs, strict=True))
        for a, b in zip(one.cache.layers, other.cache.layers, strict=True):
            live = ~one.dead().to(one.device)
            for name in a:
                mask = slice(None) if name == "state" else live[:, None].expand(a[name].shape[:3])
                assert same_bits(a[name][mask], b[name][mask]), name
    one.finish()
    other.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_commit_a_step_late(family, device):
    """The next batch is planned already, without a tree, when the paths of the last one are committed."""
    harness = Harness(small_spec(family), device, slots=4, seed=207)
    for _ in range(8):
        rows = harness.random_rows(range(5))
        harness.step(rows, mode="padded", width=4, trees=[harness.random_tree(t) for _, t in rows], commit=False)
        late = harness.pending
        harness.plan(harness.random_rows(range(1, 2)), "padded")
        harness.commit(*late)
    harness.finish()


@pytest.mark.parametrize("family", DELTA)
def test_branches_do_not_meet(family, device):
    """A node that is not finite reaches those below it only: neither another branch's outputs nor what the ring keeps of it."""
    one, other = (Harness(small_spec(family), device, slots=1, seed=208) for _ in range(2))
    tokens = one.make_inputs(4)
    other.make_inputs(4)
    broken = {k: v.clone() for k, v in tokens.items()}
    broken["v"][1] = torch.inf
    tree, path = [-1, 0, 0, 2], [0, 2, 3]
    want = one.run([(0, 4)], [tokens], trees=[tree])[0]
    other.plan([(0, 4)], "fixed", 4, [tree])
    got = other.wrapper.run(0, **{k: v[None].to(device) for k, v in broken.items()})
    assert same_bits(got[:, path], want[:, path])
    assert not bool(got[:, 1].isfinite().any())
    one.commit([(0, 4)], [path], [tokens])
    other.commit([(0, 4)], [path], [tokens])
    live = [(one.slots[0].ring_start + i) % one.spec.ring_len for i in range(one.slots[0].history)]
    assert same_bits(one.cache.layers[0]["ring_u"][:, :, live], other.cache.layers[0]["ring_u"][:, :, live])
    other.step([(0, 4)], [4])
    other.finish()


@pytest.mark.parametrize("decay", [0.0, -20.0, "mixed"])
@pytest.mark.parametrize("family", DELTA)
def test_gate_strength(family, decay, device):
    """No decay at all up to one that leaves nothing: sums along a path never leave the exponential's range."""
    spec = small_spec(family, gate="precomputed", buffer_len=16, max_tokens=16, **EXACT)
    choices = torch.tensor([0.0, -1e-7, -1e-3, -1.0, -5.0, -20.0, -80.0] if decay == "mixed" else [decay])
    harness = Harness(spec, device, slots=1, seed=209)
    make = harness.make_inputs

    def inputs(tokens):
        values = make(tokens)
        return values | {"g": choices[torch.randint(0, len(choices), values["g"].shape, generator=harness.generator)]}

    harness.make_inputs = inputs
    for _ in range(6):
        tree = harness.random_tree(16)
        harness.step([(0, 16)], [path_to(tree, 15)], trees=[tree])
    harness.finish()


# ---- what is impossible ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_parents_that_are_no_nodes(family, device):
    """Of themselves, of later nodes, of none that exist: taken as -1, and no memory but the row's is read."""
    harness = Harness(small_spec(family), device, slots=2, seed=210)
    inputs = {k: v[None].to(device) for k, v in harness.make_inputs(4).items()}

    def run(*parents):
        harness.wrapper.plan([1], 4, parents=torch.tensor([parents], dtype=torch.int32, device=device))
        return harness.wrapper.run(0, **inputs)

    want = run(-1, 0, -1, 2)
    for wrong in (2, 3, 4, 2**31 - 1, -2, -(2**31)):
        assert same_bits(run(-1, 0, wrong, 2), want)
    assert not same_bits(run(-1, 0, 1, 2), want)


BAD_PATHS = [[1, 0], [0, 0], [0, 4], [4], [-1, 0], [0, 2**31 - 1], [-(2**31)], [0, 1, 1, 3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_paths_that_are_none(family, device):
    """Nodes that fall, repeat, or that the row did not bring: counted as zero, and check() raises once."""
    harness = Harness(small_spec(family), device, slots=2, seed=211)
    for path in BAD_PATHS:
        harness.cache.check()
        before = harness.slots[1].history + harness.slots[1].position
        harness.step([(1, 4), (0, 4)], [path, [0, 2]], trees=[[-1, 0, 0, 2]] * 2)
        assert harness.slots[1].history + harness.slots[1].position == before
        with pytest.raises(RuntimeError, match="num_accepted"):
            harness.cache.check()
    harness.finish()


def test_more_accepted_than_a_path_has_room_for(device):
    harness = Harness(small_spec("mamba2"), device, slots=2, seed=212)
    index = {"dtype": torch.int32, "device": device}
    slots, path = torch.tensor([1, 0], **index), torch.tensor([[0], [0]], **index)
    harness.step([(1, 4), (0, 4)], trees=[chain(4)] * 2, commit=False)
    before = harness.cache.history.tolist()
    harness.wrapper.commit(slots, 4, torch.tensor([2, 0], **index), accepted=path)
    with pytest.raises(RuntimeError, match="num_accepted"):
        harness.cache.check()
    assert harness.cache.history.tolist() == before
