"""Steps as torch.library operators: the wrapper's bits, honest schemas, whole decode steps under torch.compile."""

import copy
import threading

import pytest
import torch
from harness import FAMILIES, Harness, bits, same_bits, small_spec

from replayssm_jit import ReplayCache, functional

MODES = ("fixed", "padded", "packed")
INT = torch.int32


def shapes(family):
    """Small enough for opcheck, which runs an operator many times."""
    shape = {"head_dim": 64, "state_dim": 64, "buffer_len": 4, "max_tokens": 2, "dtype": torch.bfloat16}
    return small_spec(family, **shape)


def harness_of(family, device, **changes):
    """Four slots, two layers, histories of every length."""
    harness = Harness(shapes(family), device, layers=2, seed=70, **changes)
    harness.step([(s, 2) for s in range(4)], [0, 1, 2, 2])
    harness.step([(s, 2) for s in range(2, 4)], [0, 1])
    return harness


def batch(harness, mode):
    """Slots, lengths and inputs of three rows, one of them padding; what run takes beside them."""
    slots = torch.tensor([3, -1, 1], dtype=INT, device=harness.device)
    lengths = torch.tensor([2, 2, 2] if mode == "fixed" else [2, 1, 1], dtype=INT, device=harness.device)
    total = 6 if mode == "fixed" else 4
    tokens = {k: v.to(harness.device) for k, v in harness.make_inputs(6).items()}
    inputs = {k: v[:total] if mode == "packed" else v.unflatten(0, (3, 2)) for k, v in tokens.items()}
    offsets = torch.tensor([0, 2, 3, 4], dtype=INT, device=harness.device)
    form = {"fixed": {}, "padded": {"num_tokens": lengths}, "packed": {"cu_seqlens": offsets}}[mode]
    return slots, lengths, inputs, form


def tree_of(mode, device):
    """Parents for such a batch, and a path of each row: its second node alone, whose parent is no node."""
    parents = torch.tensor([-1, -1, -1, -1] if mode == "packed" else [[-1, -1]] * 3, dtype=INT, device=device)
    return parents, torch.tensor([[1], [0], [1]], dtype=INT, device=device)


def same_caches(one, other):
    for a, b in zip(one.layers, other.layers, strict=True):
        assert all(same_bits(a[name], b[name]) for name in a)
    for cursor in ("ring_start", "history", "position", "error"):
        assert torch.equal(getattr(one, cursor), getattr(other, cursor))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_wrappers_bits(family, mode, device):
    one, other = (harness_of(family, device) for _ in range(2))
    for _ in range(5):
        slots, lengths, inputs, form = batch(one, mode)
        one.wrapper.plan(slots, **(form or {"num_tokens": 2}))
        for layer in range(2):
            want = one.wrapper.run(layer, **inputs)
            assert same_bits(functional.run(other.cache, layer, slots, **form, **inputs), want)
        accepted = torch.tensor([1, 1, 1], dtype=INT, device=device)
        one.wrapper.commit(slots, lengths, accepted)
        functional.commit(other.cache, slots, lengths, accepted)
        same_caches(one.cache, other.cache)
    accepted = torch.tensor([0, 0, 9], dtype=INT, device=device)
    functional.commit(other.cache, slots, 2, accepted)
    with pytest.raises(RuntimeError, match="num_accepted"):
        other.cache.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_trees(family, mode, device):
    one, other = (harness_of(family, device) for _ in range(2))
    for _ in range(4):
        slots, lengths, inputs, form = batch(one, mode)
        parents, path = tree_of(mode, device)
        one.wrapper.plan(slots, **(form or {"num_tokens": 2}), parents=parents)
        for layer in range(2):
            want = one.wrapper.run(layer, **inputs)
            assert same_bits(functional.run(other.cache, layer, slots, **form, parents=parents, **inputs), want)
        accepted = torch.tensor([1, 1, 0], dtype=INT, device=device)
        one.wrapper.commit(slots, lengths, accepted, accepted=path)
        functional.commit(other.cache, slots, lengths, accepted, accepted=path)
        same_caches(one.cache, other.cache)


# ---- schemas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "trees"), [*((mode, False) for mode in MODES), ("packed", True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_opcheck_step(family, mode, trees, device):
    harness = harness_of(family, device)
    slots, _, inputs, form = batch(harness, mode)
    tree, _ = tree_of(mode, device)
    cache, spec = harness.cache, harness.spec
    weights = [cache.weights[0].get(weight.name) for weight in spec.weights]
    tokens = [inputs.get(item.name) for item in spec.inputs]
    layer = list(cache.layers[0].values())
    for tensor in layer:  # opcheck compares values, and NaN differs from itself
        tensor.view(torch.int16).zero_()
    cursors = [cache.cursors[name] for name in spec.step_cursors]
    lengths = form.get("num_tokens"), form.get("cu_seqlens")
    args = (cache.spec_text, layer, cursors, weights, slots, *lengths, tree if trees else None, tokens)
    torch.library.opcheck(torch.ops.replayssm_jit.step.default, (*args, 0, -1))


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
def test_opcheck_commit(lengths, trees, device):
    cache = harness_of("mamba2", device).cache
    slots, counts, accepted = (torch.tensor(x, dtype=INT, device=device) for x in ([3, -1, 1], [2, 2, 1], [1 if trees else 2, 9, 2]))
    cursors = cache.ring_start, cache.history, cache.position, cache.error
    for tensor in cache.rings:  # as above
        tensor.view(torch.int16).zero_()
    rings, path = (cache.rings, tree_of("fixed", device)[1]) if trees else ([], None)
    counts = counts if lengths else None, 0 if lengths else 2, accepted, path
    args = (*cursors, rings, slots, *counts, cache.spec.buffer_len, cache.spec.ring_len, -1)
    torch.library.opcheck(torch.ops.replayssm_jit.commit.default, args)


# ---- torch.compile --------------------------------------------------------------------------------------------------


def decode_step(cache, slots, accepted, inputs, parents=None, path=None):
    """What a model does between two samplings, other operations before, between and after the layers; they round nothing."""
    outputs = []
    for layer in range(2):
        scaled = {name: tensor * 2**layer if tensor.dim() == 4 else tensor for name, tensor in inputs.items()}
        outputs.append(functional.run(cache, layer, slots, parents=parents, **scaled) * 0.5)
    functional.commit(cache, slots, 2, accepted, accepted=path)
    return torch.cat(outputs, dim=-1)


def test_a_compiled_decode_step(device):
    compiled_against_eager("mamba2", device, "inductor")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_traced_decode_step(family, device):
    """Without the compiler behind it, which takes its time: every family, and batches of other sizes."""
    compiled_against_eager(family, device, "aot_eager", sizes=(3, 3, 2, 4))


def test_a_traced_step_of_trees(device):
    tree, path = tree_of("fixed", device)
    compiled_against_eager("gdn", device, "aot_eager", (3, 3), tree, path)


def compiled_against_eager(family, device, backend, sizes=(3, 3, 3), parents=None, path=None):
    torch.compiler.reset()
    one, other = (harness_of(family, device) for _ in range(2))
    step = torch.compile(decode_step, fullgraph=True, backend=backend)
    places = [tensor.data_ptr() for layer in other.cache.layers for tensor in layer.values()]
    for rows in sizes:
        slots = torch.randperm(4, generator=one.generator)[:rows].to(device, INT)
        accepted = torch.full((rows,), 2 if path is None else 1, dtype=INT, device=device)
        inputs = {k: v.unflatten(0, (rows, 2)).to(device) for k, v in one.make_inputs(2 * rows).items()}
        want, got = (run(cache, slots, accepted, inputs, parents, path) for run, cache in ((decode_step, one.cache), (step, other.cache)))
        assert same_bits(got, want)
        same_caches(one.cache, other.cache)
    assert places == [tensor.data_ptr() for layer in other.cache.layers for tensor in layer.values()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step(family):
    """The operators in a CUDA graph, warmed up on padding."""
    device = torch.device("cuda", 0)
    one, other = (harness_of(family, device) for _ in range(2))
    slots = torch.full((3,), -1, dtype=INT, device=device)
    accepted = torch.full((3,), 2, dtype=INT, device=device)
    inputs = {k: v.unflatten(0, (3, 2)).to(device) for k, v in one.make_inputs(6).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode_step(other.cache, slots, accepted, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode_step(other.cache, slots, accepted, inputs)
    for chosen in ([3, 0, 1], [2, 3, 1]):
        slots.copy_(torch.tensor(chosen, dtype=INT))
        want = decode_step(one.cache, slots, accepted, inputs)
        graph.replay()
        assert same_bits(got, want)
        same_caches(one.cache, other.cache)


def test_threads(device):
    """Steps of several threads at once do not share their parameters."""
    want = harness_of("mamba2", device)
    others = [harness_of("mamba2", device) for _ in range(3)]
    slots, lengths, inputs, form = batch(want, "fixed")

    def live(cache):
        for _ in range(20):
            for layer in range(2):
                functional.run(cache, layer, slots, **form, **inputs)
            functional.commit(cache, slots, lengths, lengths)

    live(want.cache)
    threads = [threading.Thread(target=live, args=(harness.cache,)) for harness in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for harness in others:
        same_caches(want.cache, harness.cache)


# ---- bad input ------------------------------------------------------------------------------------------------------


BAD_RUNS = {
    "unknown input": ({"w": 1.0}, "w"),
    "missing input": ({"x": None}, "x"),
    "input dtype": ({"C": torch.float32}, "C"),
    "slots dtype": ({"slots": torch.int64}, "slots"),
    "no slots": ({"slots": None}, "slots"),
    "lengths shape": ({"num_tokens": torch.ones(2, dtype=INT)}, "num_tokens"),
    "both": ({"num_tokens": torch.ones(3, dtype=INT), "cu_seqlens": torch.zeros(4, dtype=INT)}, "num_tokens"),
    "parents dtype": ({"parents": torch.zeros(3, 2)}, "parents"),
    "parents shape": ({"parents": torch.zeros(6, dtype=INT)}, "parents"),
    "other nodes": ({"parents": torch.zeros(3, 1, dtype=INT)}, "x"),
    "offsets shape": ({"cu_seqlens": torch.zeros(3, dtype=INT)}, "cu_seqlens"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_bad_runs(case, device):
    harness = harness_of("mamba2", device)
    changes, match = BAD_RUNS[case]
    slots, _, inputs, _ = batch(harness, "fixed")
    given = {"slots": slots, **inputs}
    for name, value in changes.items():
        given[name] = given[name].to(value) if isinstance(value, torch.dtype) else value
        if isinstance(given[name], torch.Tensor):
            given[name] = given[name].to(device)
    before = [bits(t).clone() for t in harness.cache.layers[0].values()]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"(?<!\w){match}(?!\w)"):
        functional.run(harness.cache, 0, **given)
    assert all(torch.equal(a, bits(b)) for a, b in zip(before, harness.cache.layers[0].values(), strict=True))


def test_bad_commits(device):
    harness = harness_of("mamba2", device)
    slots, lengths, _, _ = batch(harness, "fixed")
    before = copy.deepcopy(harness.cache.history)
    for args, match in (
        ((slots, 3, lengths), "num_tokens"),
        ((slots, True, lengths), "num_tokens"),
        ((slots, lengths[:2], lengths), "num_tokens"),
        ((slots, lengths, lengths[:2]), "num_accepted"),
        ((slots, lengths, lengths.long()), "num_accepted"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            functional.commit(harness.cache, *args)
    for path in (lengths, lengths.view(3, 1).long(), lengths.view(1, 3), lengths.repeat(3).view(3, 3)):
        with pytest.raises((ValueError, TypeError), match="accepted"):
            functional.commit(harness.cache, slots, lengths, lengths, accepted=path)
    assert torch.equal(before, harness.cache.history)


def test_a_layer_without_weights(device):
    harness = harness_of("mamba2", device)
    slots, _, inputs, _ = batch(harness, "fixed")
    cache = ReplayCache.allocate(harness.spec, 1, 4, device)
    with pytest.raises(TypeError, match="missing weight 'A'.*set_weights"):
        functional.run(cache, 0, slots, **inputs)
