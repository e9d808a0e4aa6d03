"""Bad arguments: an error that names the argument, before anything is touched."""

import copy

import pytest
import torch
from harness import FAMILIES, Harness, bits, make_inputs, small_spec

from replayssm_jit import Mamba2Spec, ReplayCache, ReplayWrapper

INT = torch.int32


class Bench:
    """A cache in the middle of its life, with a plan of three rows of two tokens and the inputs of one layer."""

    def __init__(self, family, device):
        self.harness = Harness(small_spec(family), device, layers=2, slots=4, seed=90)
        self.harness.step([(0, 3), (2, 3)], [2, 3])
        self.spec, self.cache, self.wrapper, self.device = self.harness.spec, self.harness.cache, self.harness.wrapper, device
        packed = make_inputs(self.spec, 6, self.harness.generator, set(self.harness.optional))
        self.inputs = {k: v.unflatten(0, (3, 2)).to(device) for k, v in packed.items()}
        self.slots = self.index(2, 0, 1)
        self.counts = self.index(2, 2, 2)
        self.state = torch.randn(3, *self.spec.shape("H", "P", "N"), device=device)
        self.wrapper.plan(self.slots, 2)

    def index(self, *values, dtype=INT):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def run(self, layer=0, out=None, **changes):
        return self.wrapper.run(layer, out=out, **{**self.inputs, **changes})

    def pool(self, **changes):
        """Tensors of one layer, as an engine would bring them."""
        tensors = {
            name: torch.zeros(4, *shape, dtype=dtype, device=self.device) for name, (shape, dtype) in self.spec.cache_tensors.items()
        }
        return {k: v for k, v in {**tensors, **changes}.items() if v is not None}

    def tree(self, nodes=2):
        """Parents of three rows: all nodes of a row follow its first one."""
        return self.index(*[-1, *[0] * nodes][:nodes] * 3).view(3, nodes)

    def cursors(self, **changes):
        cursors = {
            "ring_start": self.index(0, 0, 0, 0),
            "history": self.index(0, 0, 0, 0),
            "position": self.index(0, 0, 0, 0, dtype=torch.int64),
        }
        return {k: v for k, v in {**cursors, **changes}.items() if v is not None}

    def out(self, dtype=None, device=None, shape=None):
        shape = (3, 2, *self.spec.shape("H", "P")) if shape is None else shape
        return torch.zeros(shape, dtype=dtype or self.spec.dtype, device=device or self.device)

    def picture(self):
        """Bits of everything a failed call must leave as it was."""
        cache, wrapper = self.cache, self.wrapper
        tensors = [t for layer in cache.layers for t in layer.values()] + [cache.ring_start, cache.history, cache.position, cache.error]
        weights = [{k: v.data_ptr() for k, v in layer.items()} for layer in cache.weights]
        return [bits(t).clone() for t in tensors], weights, copy.copy(wrapper._plan_fields), wrapper.slots.tolist()

    def refuses(self, call, match, kinds=(ValueError, TypeError)):
        tensors, *rest = self.picture()
        with pytest.raises(kinds, match=rf"(?<!\w){match}(?!\w)"):
            call()
        after, *rest_after = self.picture()
        assert rest == rest_after
        assert all(torch.equal(a, b) for a, b in zip(tensors, after, strict=True))
        self.run()  # the plan still stands


@pytest.fixture
def bench(device):
    return Bench("mamba2", device)


def cases(table):
    """``{id: (call, match)}`` as parameters."""
    return pytest.mark.parametrize(("call", "match"), [pytest.param(*case, id=name) for name, case in table.items()])


# ---- specs ----------------------------------------------------------------------------------------------------------

COUNTS = [0, -1, 2.0, True, "4", None]
SPEC = [
    *(("heads", value) for value in COUNTS),
    *(("groups", value) for value in [*COUNTS, 4, 12]),
    *(("head_dim", value) for value in (0, 16, 48, 256, 64.0, "64", None)),
    *(("state_dim", value) for value in (0, 32, 96, 512, 128.0, "128", None)),
    *(("buffer_len", value) for value in [*COUNTS, 65, 1000]),
    *(("max_tokens", value) for value in [*COUNTS, 9, 17]),
    *(("dtype", value) for value in (torch.float64, torch.int8, "bf16", None)),
    *(("checkpoint_dtype", value) for value in (torch.float64, torch.int16, "fp32", None)),
    *(("read_dtype", value) for value in (torch.float16, torch.int16, torch.float8_e5m2, None)),
    *(("rounding", value) for value in ("stochastic", "up", None, True)),  # a float32 checkpoint is exact
    *(("dt_dtype", value) for value in (torch.float16, torch.float64, "fp32")),
    *(("dt_softplus", value) for value in (None, 1, "yes")),
]


@pytest.mark.parametrize(("field", "value"), SPEC, ids=lambda x: str(x))
def test_spec(field, value):
    with pytest.raises((ValueError, TypeError), match=rf"(?<!\w){field}(?!\w)"):
        small_spec("mamba2", **{field: value})


def test_spec_takes_keywords_only():
    with pytest.raises(TypeError):
        Mamba2Spec(8, 64, 128)
    with pytest.raises(TypeError, match="head_size"):
        Mamba2Spec(heads=8, head_dim=64, state_dim=128, head_size=3)


def test_spec_is_frozen():
    with pytest.raises(AttributeError):
        small_spec("mamba2").heads = 12


# ---- caches ---------------------------------------------------------------------------------------------------------


@cases(
    {
        "no layers": (lambda b: ReplayCache.allocate(b.spec, 0, 2, b.device), "num_layers"),
        "layers not an int": (lambda b: ReplayCache.allocate(b.spec, 1.0, 2, b.device), "num_layers"),
        "negative slots": (lambda b: ReplayCache.allocate(b.spec, 1, -1, b.device), "num_slots"),
        "slots a bool": (lambda b: ReplayCache.allocate(b.spec, 1, True, b.device), "num_slots"),
        "another kind of device": (lambda b: ReplayCache.allocate(b.spec, 1, 2, "meta"), "device"),
        "no spec": (lambda b: ReplayCache.allocate(None, 1, 2, b.device), "spec"),
    }
)
def test_allocate(bench, call, match):
    bench.refuses(lambda: call(bench), match)


def adopt(b, cursors=None, **changes):
    return ReplayCache.from_tensors(b.spec, [b.pool(), b.pool(**changes)], cursors)


@cases(
    {
        "no layers": (lambda b: ReplayCache.from_tensors(b.spec, []), "layers"),
        "no state": (lambda b: ReplayCache.from_tensors(b.spec, [b.pool(state=None)]), "state"),
        "a ring missing": (lambda b: adopt(b, ring_x=None), "ring_x"),
        "a tensor too many": (lambda b: adopt(b, ring_y=b.state), "ring_y"),
        "not a tensor": (lambda b: adopt(b, ring_x=[1.0]), "ring_x"),
        "other slots": (lambda b: adopt(b, ring_x=b.pool()["ring_x"][:3]), "ring_x"),
        "other shape": (lambda b: adopt(b, ring_b=b.pool()["ring_b"].flatten(1, 2)), "ring_b"),
        "other dtype": (lambda b: adopt(b, state=b.pool()["state"].half()), "state"),
        "other device": (lambda b: adopt(b, ring_d=b.pool()["ring_d"].to("meta")), "ring_d"),
        "inner stride": (lambda b: adopt(b, state=b.pool()["state"].transpose(2, 3).contiguous().transpose(2, 3)), "state"),
        "unaligned base": (lambda b: adopt(b, ring_x=unaligned(b.pool()["ring_x"], 1)), "ring_x"),
        "unaligned slots": (lambda b: adopt(b, state=unaligned(b.pool()["state"], 0, 2)), "state"),
        "overlapping slots": (lambda b: adopt(b, state=b.pool()["state"][:1].expand(4, -1, -1, -1)), "state"),
        "cursor missing": (lambda b: adopt(b, b.cursors(history=None)), "history"),
        "cursor dtype": (lambda b: adopt(b, b.cursors(position=b.index(0, 0, 0, 0))), "position"),
        "cursor shape": (lambda b: adopt(b, b.cursors(ring_start=b.index(0, 0, 0))), "ring_start"),
        "cursor stride": (lambda b: adopt(b, b.cursors(history=b.index(*[0] * 8)[::2])), "history"),
        "cursor device": (lambda b: adopt(b, b.cursors(history=b.index(0, 0, 0, 0).to("meta"))), "history"),
    }
)
def test_from_tensors(bench, call, match):
    bench.refuses(lambda: call(bench), match)


def unaligned(tensor, shift, gap=0):
    """The same shape, ``shift`` elements off a 16-byte boundary, slots ``gap`` elements apart."""
    size = tensor[0].numel()
    memory = torch.zeros(shift + tensor.shape[0] * (size + gap), dtype=tensor.dtype, device=tensor.device)
    return memory[shift:].unflatten(0, (tensor.shape[0], size + gap))[:, :size].unflatten(1, tensor.shape[1:])


WEIGHTS = {
    "mamba2": {"A": (6,), "D": (6,), "dt_bias": (6,)},
    "gdn": {"A_log": (6,), "dt_bias": (6,)},
    "kda": {"A_log": (6,), "dt_bias": (6, 128)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_set_weights(family, device):
    bench = Bench(family, device)
    good = {name: -torch.ones(shape, device=device) for name, shape in WEIGHTS[family].items()}
    for name, tensor in good.items():
        bad = [
            tensor.to(torch.bfloat16),
            tensor.double(),
            tensor[:-1].clone(),
            tensor[None],
            tensor.to("meta"),
            torch.stack([tensor, tensor], -1)[..., 0],
            [1.0] * 6,
            3.0,
        ]
        for value in bad:
            bench.refuses(lambda name=name, value=value: bench.cache.set_weights(0, **{**good, name: value}), name)
    bench.refuses(lambda: bench.cache.set_weights(0, **good, bias=good["dt_bias"]), "bias")
    for layer in (2, -1, 1.0, None, True):
        bench.refuses(lambda layer=layer: bench.cache.set_weights(layer, **good), "layer")


def test_missing_weight(bench):
    bench.refuses(lambda: bench.cache.set_weights(0, D=torch.ones(6, device=bench.device)), "A")


def test_run_before_set_weights(bench):
    cache = ReplayCache.allocate(bench.spec, num_layers=1, num_slots=4, device=bench.device)
    wrapper = ReplayWrapper(cache)
    wrapper.plan(bench.slots, 2)
    with pytest.raises(RuntimeError, match="set_weights"):
        wrapper.run(0, **bench.inputs)
    with pytest.raises(RuntimeError, match="set_weights"):
        cache.flush([0])
    assert not any(bool(t.any()) for t in cache.layers[0].values())


BAD_SLOTS = {
    "empty list": lambda b: [],
    "too large": lambda b: [0, 4, 1],
    "repeated": lambda b: [1, 2, 1],
    "floats": lambda b: [0.0, 1.0, 2.0],
    "bools": lambda b: [True, False, 2],
    "int64": lambda b: b.index(0, 1, 2, dtype=torch.int64),
    "two-dimensional": lambda b: b.index(0, 1, 2)[None],
    "empty": lambda b: b.index(),
    "strided": lambda b: b.index(0, 1, 2, 3, 0, 1)[::2],
    "other device": lambda b: b.index(0, 1, 2).to("meta"),
    "an int": lambda b: 1,
    "None": lambda b: None,
}
WITH_SLOTS = {
    "plan": lambda b, slots: b.wrapper.plan(slots, 2),
    "reset": lambda b, slots: b.cache.reset(slots),
    "flush": lambda b, slots: b.cache.flush(slots),
    "load_state": lambda b, slots: b.cache.load_state(0, slots, b.state),
    "read_state": lambda b, slots: b.cache.read_state(0, slots),
    "commit": lambda b, slots: b.wrapper.commit(slots, 2, b.counts),
}


@pytest.mark.parametrize("slots", BAD_SLOTS)
@pytest.mark.parametrize("call", WITH_SLOTS)
def test_slots(bench, call, slots):
    bench.refuses(lambda: WITH_SLOTS[call](bench, BAD_SLOTS[slots](bench)), "slots")


@cases(
    {
        "layer": (lambda b: b.cache.load_state(2, b.slots, b.state), "layer"),
        "negative layer": (lambda b: b.cache.load_state(-1, b.slots, b.state), "layer"),
        "rows": (lambda b: b.cache.load_state(0, b.slots, b.state[:2]), "state"),
        "shape": (lambda b: b.cache.load_state(0, b.slots, b.state.transpose(2, 3)), "state"),
        "kv shape": (lambda b: b.cache.load_state(0, b.slots, b.state, layout="kv"), "state"),
        "dtype": (lambda b: b.cache.load_state(0, b.slots, b.state.double()), "state"),
        "device": (lambda b: b.cache.load_state(0, b.slots, b.state.to("meta")), "state"),
        "not a tensor": (lambda b: b.cache.load_state(0, b.slots, [1.0]), "state"),
        "layout": (lambda b: b.cache.load_state(0, b.slots, b.state, layout="nk"), "layout"),
        "positions dtype": (lambda b: b.cache.load_state(0, b.slots, b.state, positions=b.slots), "positions"),
        "positions shape": (lambda b: b.cache.load_state(0, b.slots, b.state, positions=b.slots.long()[:2]), "positions"),
        "positions list": (lambda b: b.cache.load_state(0, b.slots, b.state, positions=[0, 0, 0]), "positions"),
    }
)
def test_load_state(bench, call, match):
    bench.refuses(lambda: call(bench), match)


@cases(
    {
        "layer": (lambda b: b.cache.read_state(2, b.slots), "layer"),
        "shape": (lambda b: b.cache.read_state(0, b.slots, b.state[:2]), "out"),
        "dtype": (lambda b: b.cache.read_state(0, b.slots, b.state.long()), "out"),
        "device": (lambda b: b.cache.read_state(0, b.slots, b.state.to("meta")), "out"),
        "layout": (lambda b: b.cache.read_state(0, b.slots, layout=None), "layout"),
        "not a tensor": (lambda b: b.cache.read_state(0, b.slots, 1.0), "out"),
    }
)
def test_read_state(bench, call, match):
    bench.refuses(lambda: call(bench), match)


def materialize(**arguments):
    """A call with one thing wrong; ``b`` in arguments stands for the bench."""
    return lambda b: b.cache.materialize(
        **{"slots": b.slots, **{name: value(b) if callable(value) else value for name, value in arguments.items()}}
    )


def stacked(b, *rows):
    return torch.stack([b.state[: rows[0] if rows else 3]] * 2)


@cases(
    {
        "slots": (materialize(slots=[4]), "slots"),
        "no slots": (materialize(slots=[]), "slots"),
        "positions dtype": (materialize(positions=lambda b: b.slots), "positions"),
        "positions shape": (materialize(positions=lambda b: b.slots.long()[:2]), "positions"),
        "positions stride": (materialize(positions=lambda b: b.index(*range(6), dtype=torch.int64)[::2]), "positions"),
        "positions device": (materialize(positions=lambda b: b.slots.long().to("meta")), "positions"),
        "positions list": (materialize(positions=[0, 0, 0]), "positions"),
        "out a float": (materialize(out=1.0), "out"),
        "out of no layers": (materialize(out=[]), "out"),
        "out of one layer": (materialize(out=lambda b: [b.state]), "out"),
        "out of nothing": (materialize(out=lambda b: torch.zeros((), device=b.device)), "out"),
        "out of floats": (materialize(out=[1.0, 2.0]), "out"),
        "out shape": (materialize(out=lambda b: stacked(b, 2)), "out"),
        "out dtype": (materialize(out=lambda b: stacked(b).double()), "out"),
        "out device": (materialize(out=lambda b: stacked(b).to("meta")), "out"),
        "out dtypes": (materialize(out=lambda b: [b.state, b.state.half()]), "out"),
        "out strides": (materialize(out=lambda b: [b.state, b.state.mT.contiguous().mT]), "out"),
        "layout": (materialize(layout="nk"), "layout"),
        "kv out": (materialize(out=stacked, layout="kv"), "out"),
        "index alone": (materialize(index=[0, 1, 2]), "index"),
        "index shape": (materialize(out=stacked, index=[0, 1]), "index"),
        "index dtype": (materialize(out=stacked, index=lambda b: b.slots.long()), "index"),
        "index too large": (materialize(out=stacked, index=[0, 1, 3]), "index"),
        "index repeated": (materialize(out=stacked, index=[0, 1, 1]), "index"),
        "index device": (materialize(out=stacked, index=lambda b: b.slots.to("meta")), "index"),
        "index an int": (materialize(out=stacked, index=0), "index"),
        "destination and out": (materialize(out=stacked, destination=[0, 1, 3]), "destination"),
        "destination and index": (materialize(index=[0, 1, 2], destination=[0, 1, 3]), "destination"),
        "destination shape": (materialize(destination=[3]), "destination"),
        "destination repeated": (materialize(destination=[3, 3, -1]), "destination"),
        "destination too large": (materialize(destination=[4, -1, -1]), "destination"),
        "destination dtype": (materialize(destination=lambda b: b.slots.long()), "destination"),
        "destination device": (materialize(destination=lambda b: b.slots.to("meta")), "destination"),
        "destination of another row": (materialize(slots=[2, 0, 1], destination=[3, 2, -1]), "destination"),
    }
)
def test_materialize(bench, call, match):
    bench.refuses(lambda: call(bench), match)


# ---- wrapper --------------------------------------------------------------------------------------------------------


@cases(
    {
        "pad_slot too large": (lambda b: ReplayWrapper(b.cache, pad_slot=4), "pad_slot"),
        "pad_slot a bool": (lambda b: ReplayWrapper(b.cache, pad_slot=True), "pad_slot"),
        "pad_slot a float": (lambda b: ReplayWrapper(b.cache, pad_slot=-1.0), "pad_slot"),
        "rows without a graph": (lambda b: ReplayWrapper(b.cache, max_rows=4), "max_rows"),
        "no cache": (lambda b: ReplayWrapper(None), "cache"),
    }
)
def test_wrapper(bench, call, match):
    bench.refuses(lambda: call(bench), match)


def test_graph_wrapper(bench):
    if bench.device.type == "cpu":
        bench.refuses(lambda: ReplayWrapper(bench.cache, use_cuda_graph=True, max_rows=4), "use_cuda_graph")
        return
    for rows in (None, 0, -3, 2.0, True):
        bench.refuses(lambda rows=rows: ReplayWrapper(bench.cache, use_cuda_graph=True, max_rows=rows), "max_rows")
    wrapper = ReplayWrapper(bench.cache, use_cuda_graph=True, max_rows=2)
    with pytest.raises(ValueError, match="slots"):
        wrapper.plan(bench.slots, 2)
    wrapper.plan(bench.slots[:2], 2)
    for bad in (1, bench.counts[:2]):
        with pytest.raises(ValueError, match="num_tokens"):
            wrapper.plan(bench.slots[:2], bad)
    assert wrapper.slots.tolist() == [2, 0]


def test_calls_before_plan(bench):
    wrapper = ReplayWrapper(bench.cache)
    bench.refuses(lambda: wrapper.run(0, **bench.inputs), "plan", RuntimeError)
    bench.refuses(lambda: wrapper.slots, "plan", RuntimeError)


@cases(
    {
        **{
            f"num_tokens {n!r}": (lambda b, n=n: b.wrapper.plan(b.slots, n), "num_tokens")
            for n in (0, 5, -1, 2.0, True, None, "2", [2, 2, 2])
        },
        "lengths shape": (lambda b: b.wrapper.plan(b.slots, b.counts[:2]), "num_tokens"),
        "lengths dtype": (lambda b: b.wrapper.plan(b.slots, b.counts.long()), "num_tokens"),
        "lengths device": (lambda b: b.wrapper.plan(b.slots, b.counts.to("meta")), "num_tokens"),
        "lengths stride": (lambda b: b.wrapper.plan(b.slots, b.index(*[2] * 6)[::2]), "num_tokens"),
        "cu_seqlens shape": (lambda b: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 2, 4)), "cu_seqlens"),
        "cu_seqlens dtype": (lambda b: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 2, 4, 6).long()), "cu_seqlens"),
        "cu_seqlens list": (lambda b: b.wrapper.plan(b.slots, cu_seqlens=[0, 2, 4, 6]), "cu_seqlens"),
        "cu_seqlens device": (lambda b: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 2, 4, 6).to("meta")), "cu_seqlens"),
        "both int": (lambda b: b.wrapper.plan(b.slots, 2, cu_seqlens=b.index(0, 2, 4, 6)), "cu_seqlens"),
        "both tensors": (lambda b: b.wrapper.plan(b.slots, b.counts, cu_seqlens=b.index(0, 2, 4, 6)), "cu_seqlens"),
        "parents list": (lambda b: b.wrapper.plan(b.slots, 2, parents=[[-1, 0]] * 3), "parents"),
        "parents flat": (lambda b: b.wrapper.plan(b.slots, 2, parents=b.tree().flatten()), "parents"),
        "parents rows": (lambda b: b.wrapper.plan(b.slots, 2, parents=b.tree()[:2]), "parents"),
        "parents nodes": (lambda b: b.wrapper.plan(b.slots, 2, parents=b.tree(3)), "parents"),
        "too many parents": (lambda b: b.wrapper.plan(b.slots, b.counts, parents=b.tree(5)), "parents"),
        "no parents": (lambda b: b.wrapper.plan(b.slots, b.counts, parents=b.tree(0)), "parents"),
        "parents dtype": (lambda b: b.wrapper.plan(b.slots, 2, parents=b.tree().long()), "parents"),
        "parents device": (lambda b: b.wrapper.plan(b.slots, 2, parents=b.tree().to("meta")), "parents"),
        "parents stride": (lambda b: b.wrapper.plan(b.slots, 2, parents=b.tree(4)[:, :2]), "parents"),
        "packed parents": (lambda b: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 2, 4, 6), parents=b.tree()), "parents"),
        "packed stride": (lambda b: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 2, 4, 6), parents=b.tree(4).view(12)[::2]), "parents"),
    }
)
def test_plan(bench, call, match):
    bench.refuses(lambda: call(bench), match)


@pytest.mark.parametrize("family", FAMILIES)
def test_run_other_nodes(family, device):
    """Inputs of as many tokens as the plan has parents for."""
    bench = Bench(family, device)
    wide = {k: torch.cat([v, v], 1) for k, v in bench.inputs.items()}
    packed = {k: v.flatten(0, 1) for k, v in bench.inputs.items()}
    wrapper, name = ReplayWrapper(bench.cache), bench.spec.inputs[0].name
    wrapper.plan(bench.slots, bench.counts, parents=bench.tree(3))
    for inputs in (bench.inputs, wide, packed):
        bench.refuses(lambda inputs=inputs: wrapper.run(0, **inputs), name)
    wrapper.plan(bench.slots, cu_seqlens=bench.index(0, 2, 4, 5), parents=bench.tree().flatten()[:5])
    bench.refuses(lambda: wrapper.run(0, **packed), name)
    wrapper.run(0, **{k: v[:5] for k, v in packed.items()})


@pytest.mark.parametrize("layer", [2, -1, 0.0, True, None, "0"])
def test_run_layer(bench, layer):
    bench.refuses(lambda: bench.run(layer), "layer")


def spread(x):
    """The same values without a dense innermost dimension."""
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_run_inputs(family, device):
    """Every input: absent, of a wrong type, dtype, device, rows, tokens, heads, width, or stride."""
    bench = Bench(family, device)
    for item in bench.spec.inputs:
        good = bench.inputs[item.name]
        bad = [
            good.double(),
            good.to(torch.float16),
            good.to(torch.int32),
            good.to("meta"),
            good[:2],
            good[:, :1],
            torch.cat([good, good], 1),
            good[:, :, :-1],
            good[..., :-1],
            good.flatten(0, 1),
            good[None],
            good.tolist(),
            1.0,
        ]
        if not item.optional:
            bad.append(None)
        if item.inner is not None:
            bad.append(spread(good))
        for value in bad:
            bench.refuses(lambda name=item.name, value=value: bench.run(**{name: value}), item.name)
    bench.refuses(lambda: bench.run(w=bench.inputs[bench.spec.inputs[0].name]), "w")
    bench.refuses(lambda: bench.wrapper.run(0), bench.spec.inputs[0].name)
    bench.refuses(lambda: bench.run(**{bench.spec.weights[0].name: bench.counts.float()}), bench.spec.weights[0].name)


@pytest.mark.parametrize("family", FAMILIES)
def test_run_packed_inputs(family, device):
    bench = Bench(family, device)
    bench.wrapper.plan(bench.slots, cu_seqlens=bench.index(0, 2, 4, 6))
    padded, bench.inputs = bench.inputs, {k: v.flatten(0, 1) for k, v in bench.inputs.items()}
    for item in bench.spec.inputs:
        good = bench.inputs[item.name]
        bad = [padded[item.name], good.double(), good[:, :-1], good.to("meta")]
        if item is not bench.spec.inputs[0]:
            bad.append(good[:5])
        for value in bad:
            bench.refuses(lambda name=item.name, value=value: bench.run(**{name: value}), item.name)


@cases(
    {
        "dtype": (lambda b: b.run(out=b.out(dtype=torch.float32)), "out"),
        "device": (lambda b: b.run(out=b.out(device="meta")), "out"),
        "rows": (lambda b: b.run(out=b.out()[:2]), "out"),
        "tokens": (lambda b: b.run(out=torch.cat([b.out(), b.out()], 1)), "out"),
        "heads": (lambda b: b.run(out=b.out()[:, :, 1:]), "out"),
        "width": (lambda b: b.run(out=b.out()[..., 1:]), "out"),
        "stride": (lambda b: b.run(out=spread(b.out())), "out"),
        "packed": (lambda b: b.run(out=b.out().flatten(0, 1)), "out"),
        "a list": (lambda b: b.run(out=[1.0]), "out"),
    }
)
def test_run_out(bench, call, match):
    bench.refuses(lambda: call(bench), match)


def test_a_wider_signature_is_checked_again(bench):
    """A signature that was accepted before does not let another one through."""
    bench.run()
    bench.refuses(lambda: bench.run(x=bench.inputs["x"].float()), "x")
    bench.run()
    bench.refuses(lambda: bench.run(x=bench.inputs["x"][:, :1]), "x")


@cases(
    {
        "slots a list": (lambda b: b.wrapper.commit([2, 0, 1], 2, b.counts), "slots"),
        "tokens zero": (lambda b: b.wrapper.commit(b.slots, 0, b.counts), "num_tokens"),
        "tokens too many": (lambda b: b.wrapper.commit(b.slots, 5, b.counts), "num_tokens"),
        "tokens a bool": (lambda b: b.wrapper.commit(b.slots, True, b.counts), "num_tokens"),
        "tokens a float": (lambda b: b.wrapper.commit(b.slots, 2.0, b.counts), "num_tokens"),
        "tokens shape": (lambda b: b.wrapper.commit(b.slots, b.counts[:1], b.counts), "num_tokens"),
        "tokens dtype": (lambda b: b.wrapper.commit(b.slots, b.counts.long(), b.counts), "num_tokens"),
        "accepted an int": (lambda b: b.wrapper.commit(b.slots, 2, 2), "num_accepted"),
        "accepted a list": (lambda b: b.wrapper.commit(b.slots, 2, [2, 2, 2]), "num_accepted"),
        "accepted shape": (lambda b: b.wrapper.commit(b.slots, 2, b.counts[:2]), "num_accepted"),
        "accepted dtype": (lambda b: b.wrapper.commit(b.slots, 2, b.counts.long()), "num_accepted"),
        "accepted device": (lambda b: b.wrapper.commit(b.slots, 2, b.counts.to("meta")), "num_accepted"),
        "accepted stride": (lambda b: b.wrapper.commit(b.slots, 2, b.index(*[2] * 6)[::2]), "num_accepted"),
        "path list": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=[[0, 1]] * 3), "accepted"),
        "path flat": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.counts), "accepted"),
        "path rows": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.tree()[:2]), "accepted"),
        "path nodes": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.tree(5)), "accepted"),
        "path of none": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.tree(0)), "accepted"),
        "path dtype": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.tree().long()), "accepted"),
        "path device": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.tree().to("meta")), "accepted"),
        "path stride": (lambda b: b.wrapper.commit(b.slots, 2, b.counts, accepted=b.tree(4)[:, ::2]), "accepted"),
    }
)
def test_commit(bench, call, match):
    bench.refuses(lambda: call(bench), match)


# ---- values on the device: debug mode -------------------------------------------------------------------------------


@pytest.fixture
def watched(bench, monkeypatch):
    """The bench in debug mode, its step closed."""
    bench.wrapper.commit(bench.slots, 2, bench.index(0, 0, 0))
    bench.cache.debug = True
    return bench


def test_debug_names_row_and_slot(watched):
    cases = {"row 2|\\[2\\]": (1, 0, 4), "rows 0 and 2|repeat": (1, 0, 1)}
    for match, slots in cases.items():
        index = watched.index(*slots)
        with pytest.raises(ValueError, match=match):
            watched.wrapper.plan(index, 2)
        with pytest.raises(ValueError, match=match):
            watched.cache.flush(index)


def test_debug_names_a_count_out_of_range(watched):
    """Lengths, offsets, accepted counts and positions, which only the device knows; those of padding rows are nobody's."""
    b = watched
    cases = {
        r"num_tokens\[1\].* 5": lambda: b.wrapper.plan(b.slots, b.index(2, 5, 2)),
        r"num_tokens\[2\].* -1": lambda: b.wrapper.plan(b.slots, b.index(2, 4, -1)),
        r"cu_seqlens\[1\].* -2": lambda: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 4, 2, 6)),
        r"cu_seqlens\[2\].* 5": lambda: b.wrapper.plan(b.slots, cu_seqlens=b.index(0, 1, 2, 7)),
        r"cu_seqlens\[0\].* -1": lambda: b.wrapper.plan(b.slots, cu_seqlens=b.index(-1, 0, 2, 4)),
        r"num_accepted\[0\].* 3": lambda: b.wrapper.commit(b.slots, 2, b.index(3, 0, 0)),
        r"num_accepted\[1\].* 2": lambda: b.wrapper.commit(b.slots, b.index(2, 1, 1), b.index(2, 2, 0)),
        r"positions.* -7 in row 1": lambda: b.cache.load_state(0, b.slots, b.state, positions=b.index(1, -7, 0, dtype=torch.int64)),
    }
    for match, call in cases.items():
        tensors, *rest = b.picture()
        with pytest.raises(ValueError, match=match):
            call()
        after, *rest_after = b.picture()
        assert rest == rest_after
        assert all(torch.equal(a, c) for a, c in zip(tensors, after, strict=True))
    b.wrapper.plan(b.index(2, -1, 1), b.index(2, 99, 1))
    b.wrapper.commit(b.index(2, -1, 1), 2, b.index(2, 99, 1))


def test_debug_names_a_node(watched):
    """Parents that are no earlier node, and accepted nodes that are no path of the tree that has run; padding's are nobody's."""
    b = watched
    tree = b.index(-1, 0, 0, 2, -1, -1, 0, 1, -1, 0, 1, 2).view(3, 4)
    inputs = {k: torch.cat([v, v], 1) for k, v in b.inputs.items()}

    def plan(at, parent, **form):
        parents = tree.clone()
        parents[at] = parent
        b.wrapper.plan(b.slots, **(form or {"num_tokens": 4}), parents=parents if not form else parents.flatten())

    packed = {"cu_seqlens": b.index(0, 4, 8, 12)}
    for match, call in {
        r"parents of row 1 \(slot 0\) .*-1 to 1 for node 2, got 2": lambda: plan((1, 2), 2),
        r"parents of row 0 \(slot 2\) .*-1 to -1 for node 0, got 0": lambda: plan((0, 0), 0, **packed),
        r"parents of row 2 \(slot 1\) .*-1 to 2 for node 3, got -2": lambda: plan((2, 3), -2, **packed),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    for form in ({}, packed):
        plan((0, 3), 2, **form)
        b.wrapper.run(0, **(inputs if not form else {k: v.flatten(0, 1) for k, v in inputs.items()}))
        before = [bits(t).clone() for t in (*b.cache.layers[0].values(), b.cache.history)]
        paths = b.index(0, 2, 3, 1, 2, 3, 0, 1, 2).view(3, 3)
        for match, counts, changes in {
            (r"accepted\[0\] \(slot 2\) .*node 3 follows 2", (3, 0, 0), (0, 1, 1)),
            (r"accepted\[1\] \(slot 0\) .*node 2 follows 0", (3, 2, 3), (1, 0, 1)),
            (r"accepted\[2\] \(slot 1\) .*rise", (3, 1, 3), (2, 2, 1)),
            (r"accepted\[2\] \(slot 1\) .*below 4", (3, 1, 3), (2, 2, 4)),
            (r"accepted\[2\] \(slot 1\) .*num_accepted=4", (3, 1, 4), (2, 2, 2)),
        }:
            wrong = paths.clone()
            wrong[changes[:2]] = changes[2]
            with pytest.raises(ValueError, match=match):
                b.wrapper.commit(b.slots, 4, b.index(*counts), accepted=wrong)
        with pytest.raises(ValueError, match=r"accepted\[0\] .*node 2 follows 0"):  # the first three are no path
            b.wrapper.commit(b.slots, 4, b.index(3, 0, 0))
        assert all(torch.equal(a, bits(t)) for a, t in zip(before, (*b.cache.layers[0].values(), b.cache.history), strict=True))
        b.wrapper.commit(b.slots, 4, b.index(3, 0, 3), accepted=paths)
    b.wrapper.plan(b.index(2, -1, 1), 4, parents=b.index(*[-1, 0, 0, 2, 9, 9, 9, 9, -1, 0, 1, 2]).view(3, 4))
    b.wrapper.run(0, **inputs)
    b.wrapper.commit(b.index(2, -1, 1), 4, b.index(1, 99, 1), accepted=paths[:, :1].clone().fill_(0))


def test_debug_names_the_open_slot(watched):
    """Run twice without a commit would fold twice."""
    watched.run()
    watched.run(1)
    cursors = watched.cache.history.tolist()
    for layer in range(2):
        with pytest.raises(RuntimeError, match="slot 2"):
            watched.run(layer)
    watched.wrapper.commit(watched.slots, watched.index(0, 0, 0), watched.index(0, 0, 0))  # of a step that brought nothing
    for move in (watched.cache.reset, watched.cache.flush, lambda slots: watched.cache.load_state(0, slots, watched.state[:1])):
        with pytest.raises(RuntimeError, match="slot 0"):
            move([0])
    assert watched.cache.history.tolist() == cursors
    watched.wrapper.commit(watched.slots, 2, watched.counts)
    watched.run()


def test_debug_allows_padding(device):
    """Padding rows may repeat, and may run as often as they like: warm-up and capture do."""
    bench = Bench("mamba2", device)
    bench.cache.debug = True
    wrapper = ReplayWrapper(bench.cache, pad_slot=0)
    for slots in ([0, 0, -1], bench.index(0, 0, -1)):
        wrapper.plan(slots, 2)
        for _ in range(2):
            assert not bits(wrapper.run(0, **bench.inputs)).any()


def test_padding_slots_as_a_list(bench):
    wrapper = ReplayWrapper(bench.cache, pad_slot=0)
    wrapper.plan([0, 0, 3], 2)
    wrapper.run(0, **bench.inputs)


def test_debug_variable(bench, monkeypatch):
    for value, debug in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("REPLAYSSM_DEBUG", value)
        assert ReplayCache.allocate(bench.spec, 1, 1, bench.device).debug is debug
