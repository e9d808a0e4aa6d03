"""FlashInfer's signatures on this package's kernels: the wrapper's bits, the caller's bookkeeping, refusals by name."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from harness import FORMATS, make_inputs, make_weights, recurrence, relative_error, same_bits, small_spec

from replayssm_jit import ReplayCache, ReplayWrapper, interop

SLOTS, INT = 5, torch.int32
ONE_PLANE = ["fp32", "bf16", "fp16"]


class Engine:
    """Rings, cursors and weights as an engine with FlashInfer's kernels keeps them, and the float64 state of every slot."""

    def __init__(self, device, seed=90, dtype=torch.bfloat16, state_format="fp32", **changes):
        checkpoint, _ = FORMATS[state_format]
        self.spec = small_spec("mamba2", dtype=dtype, checkpoint_dtype=checkpoint, read_dtype=checkpoint, **changes)
        self.device, self.generator = device, torch.Generator().manual_seed(seed)
        cache = ReplayCache.allocate(self.spec, 1, SLOTS, device)
        self.tensors = cache.layers[0]
        for name, tensor in self.tensors.items():
            tensor.fill_(torch.nan if name != "state" else 0)
        state = torch.randn(SLOTS, *self.spec.shape("H", "P", "N"), generator=self.generator).to(checkpoint)
        self.tensors["state"].copy_(state)
        self.wanted = list(state.double())
        self.weights = make_weights(self.spec, self.generator, {"D", "dt_bias"})
        self.ring_start = torch.tensor([0, 3, 11, 7, 5], dtype=INT, device=device)
        self.history = torch.zeros(SLOTS, dtype=INT, device=device)

    def rings(self):
        return [self.tensors[name] for name in ("state", "ring_x", "ring_b", "ring_d")] + [self.ring_start, self.history]

    def inputs(self, *leading):
        """Inputs of the spec's names and shapes ``[*leading, outer, inner]`` on the device."""
        tokens = make_inputs(self.spec, torch.Size(leading).numel(), self.generator, {"z"})
        return {name: tensor.unflatten(0, leading).to(self.device) for name, tensor in tokens.items()}

    def tied(self, inputs):
        """The same, and the weights, in FlashInfer's shapes: one number a head, expanded."""
        spec = self.spec
        a, d, bias = (self.weights[name].to(self.device) for name in ("A", "D", "dt_bias"))
        return inputs | {
            "dt": inputs["dt"][..., None].expand(*inputs["dt"].shape, spec.head_dim),
            "A": a[:, None, None].expand(*spec.shape("H", "P", "N")),
            "D": d[:, None].expand(*spec.shape("H", "P")),
            "dt_bias": bias[:, None].expand(*spec.shape("H", "P")),
            "dt_softplus": spec.dt_softplus,
        }

    def accept(self, slots, lengths, counts):
        """What the caller does after sampling."""
        for slot, t, a in zip(slots, lengths, counts, strict=True):
            if slot >= 0 and t:
                h = int(self.history[slot])
                if h + t > self.spec.buffer_len:
                    self.ring_start[slot] = (self.ring_start[slot] + h) % self.spec.ring_len
                    self.history[slot] = a
                else:
                    self.history[slot] = h + a

    def refer(self, slot, tokens, accepted):
        """Wanted outputs of one row, and the slot's state after the accepted tokens."""
        y, _ = recurrence(self.spec, tokens, self.weights, self.wanted[slot])
        kept = {name: tensor[:accepted] for name, tensor in tokens.items()}
        _, self.wanted[slot] = recurrence(self.spec, kept, self.weights, self.wanted[slot])
        return y

    def randint(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.generator))


def index(values, device, dtype=INT):
    return torch.tensor(values, dtype=dtype, device=device)


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state_format", ONE_PLANE)
def test_replay_is_the_wrappers_bits(state_format, packed, device):
    """Outputs, rings and states over many flushes, cursors moved by the caller; padding rows keep their outputs."""
    one, other = (Engine(device, state_format=state_format) for _ in range(2))
    wrapped = ReplayCache.from_tensors(
        one.spec, [other.tensors], {"ring_start": other.ring_start, "history": other.history, **position(device)}
    )
    wrapped.set_weights(0, **{name: tensor.to(device) for name, tensor in other.weights.items()})
    wrapper = ReplayWrapper(wrapped)
    slots = [3, -1, 0, 4, 1]
    for step in range(12):
        most = one.spec.max_tokens
        lengths = [one.randint(0, most) for _ in slots] if packed else [most] * len(slots)
        counts = [one.randint(0, t) for t in lengths]
        leading = (sum(lengths),) if packed else (len(slots), most)
        inputs = one.inputs(*leading)
        form = {"cu_seqlens": index([0, *torch.tensor(lengths).cumsum(0).tolist()], device)} if packed else {"num_tokens": most}
        wrapper.plan(slots, **form)
        want = wrapper.run(0, **inputs)
        out = torch.full_like(want, 7.0)
        given, out_ = ({k: v[None] for k, v in inputs.items()}, out[None]) if packed else (inputs, out)
        options = {"cu_seqlens": form["cu_seqlens"], "max_seqlen": most} if packed else {"algorithm": "monolith", "d_split": 2}
        indices = index(slots, device, torch.int64 if step % 2 else INT)
        got = interop.checkpointing_ssu(*one.rings(), out=out_, state_batch_indices=indices, **one.tied(given), **options)
        assert got is out_
        starts = [sum(lengths[:r]) for r in range(len(slots))]
        for r, slot in enumerate(slots):
            rows = slice(starts[r], starts[r] + lengths[r]) if packed else r
            assert bool((out[rows] == 7.0).all()) if slot < 0 else same_bits(out[rows], want[rows])
        one.accept(slots, lengths, counts)
        wrapper.commit(index(slots, device), index(lengths, device), index(counts, device))
        assert same_bits(one.tensors["state"], other.tensors["state"])
        assert torch.equal(one.history, other.history)
        assert torch.equal(one.ring_start, other.ring_start)
    assert int(wrapped.position.max()) > one.spec.buffer_len


def position(device):
    return {"position": torch.zeros(SLOTS, dtype=torch.int64, device=device)}


def test_replay_against_the_reference(device):
    """Slots by row, fp32: outputs of every step, and at last the states, folded by a step of which nothing is kept."""
    engine = Engine(device, dtype=torch.float32, max_tokens=3)
    rows, most = range(SLOTS), 3
    for step in range(16):
        inputs = engine.inputs(SLOTS, most)
        out = torch.empty(SLOTS, most, *engine.spec.shape("H", "P"), device=device)
        interop.checkpointing_ssu(*engine.rings(), out=out, **engine.tied(inputs))
        counts = [0 if step == 15 else engine.randint(1, most) for _ in rows]
        for r in rows:
            y = engine.refer(r, {name: tensor[r].cpu() for name, tensor in inputs.items()}, counts[r])
            assert relative_error(out[r], y) < 1e-5
        engine.accept(rows, [most] * SLOTS, counts)
        if step < 15:
            continue
        for r in rows:
            if not int(engine.history[r]):
                assert relative_error(engine.tensors["state"][r], engine.wanted[r]) < 1e-6
        assert not bool(engine.history.all())


def test_weights_of_other_dtypes(device):
    """bfloat16 D and dt_bias, and a strided A, are the numbers they hold."""
    engine = Engine(device)
    engine.weights |= {name: engine.weights[name].bfloat16().float() for name in ("D", "dt_bias")}
    inputs = engine.inputs(SLOTS, 4)
    tied = engine.tied(inputs)
    want, got = (torch.empty(SLOTS, 4, *engine.spec.shape("H", "P"), dtype=torch.bfloat16, device=device) for _ in range(2))
    interop.checkpointing_ssu(*engine.rings(), out=want, **tied)
    wide = torch.stack([tied["A"][:, 0, 0]] * 2, dim=1)[:, 0]
    narrow = {name: engine.weights[name].bfloat16().to(device)[:, None].expand(-1, engine.spec.head_dim) for name in ("D", "dt_bias")}
    interop.checkpointing_ssu(*engine.rings(), out=got, **tied | narrow | {"A": wide[:, None, None].expand_as(tied["A"])})
    assert same_bits(got, want)


# ---- the standard recurrence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 1, 3])
@pytest.mark.parametrize("elsewhere", [None, "last", "every"])
def test_standard(elsewhere, tokens, device):
    """In place, to another slot, or every token's state to a slot of its own."""
    engine = Engine(device, dtype=torch.float32)
    state = torch.cat([engine.tensors["state"]] * 4)  # rooms of their own for what is written elsewhere
    slots, count = [4, -1, 0], tokens or 1
    for _ in range(3):
        inputs = engine.inputs(3, count)
        given = engine.tied(inputs if tokens else {name: tensor[:, 0] for name, tensor in inputs.items()})
        every = torch.arange(SLOTS, SLOTS + 3 * count).view(3, count)
        target = {None: None, "last": every[:, -1].contiguous(), "every": every}[elsewhere]
        target = target if target is None else target.to(device, INT)
        before = state.clone()
        out = interop.selective_state_update(
            state,
            **given,
            state_batch_indices=index(slots, device),
            dst_state_batch_indices=target,
            algorithm="simple",
            backend="flashinfer",
        )
        assert out.shape == (3, *([] if tokens is None else [tokens]), *engine.spec.shape("H", "P"))
        for r, slot in enumerate(slots):
            got = out[r] if tokens else out[r][None]
            if slot < 0:
                assert not got.any()
                continue
            if elsewhere is None:
                wanted = engine.wanted[slot]
            else:
                wanted = before[slot].double().cpu()
            for t in range(count):
                y, wanted = recurrence(engine.spec, {name: x[r, t : t + 1].cpu() for name, x in inputs.items()}, engine.weights, wanted)
                assert relative_error(got[t : t + 1], y) < 1e-5
                if elsewhere == "every":
                    assert relative_error(state[int(every[r, t])], wanted) < 1e-6
            if elsewhere == "last":
                assert relative_error(state[int(every[r, -1])], wanted) < 1e-6
            if elsewhere is None:
                engine.wanted[slot] = wanted
                assert relative_error(state[slot], wanted) < 1e-6
            else:
                assert same_bits(state[slot], before[slot])


def test_standard_shapes(device):
    """Without indices row r is slot r; an output may be given; one token may be asked for as a T of 1."""
    engine = Engine(device)
    given = engine.tied({name: tensor[:, 0] for name, tensor in engine.inputs(SLOTS, 1).items()})
    states = [engine.tensors["state"].clone() for _ in range(3)]
    want = interop.selective_state_update(states[0], **given)
    out = torch.empty_like(want)
    assert interop.selective_state_update(states[1], out=out, **given) is out
    wide = interop.selective_state_update(states[2], cache_steps=1, **given)
    assert wide.shape == (SLOTS, 1, *want.shape[1:])
    for other in (out, wide[:, 0]):
        assert same_bits(other, want)


# ---- bad input ------------------------------------------------------------------------------------------------------


def replay(engine, **changes):
    out = torch.empty(SLOTS, 4, *engine.spec.shape("H", "P"), dtype=torch.bfloat16, device=engine.device)
    names = ("state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")
    return dict(zip(names, engine.rings(), strict=True)) | engine.tied(engine.inputs(SLOTS, 4)) | {"out": out} | changes


def changed(name, edit):
    return lambda given: given | {name: edit(given[name])}


BAD_REPLAYS = {
    "state_scale": lambda given: given | {"state_scale": given["state"][:, :, :, 0]},
    "rand_seed": lambda given: given | {"rand_seed": torch.zeros(1, dtype=torch.int64)},
    "state": changed("state", lambda t: t.to(torch.int8)),
    "x_cache": changed("x_cache", lambda t: t[:, :, :7]),
    "B_cache": changed("B_cache", lambda t: t[:, :1]),
    "dt_cache": changed("dt_cache", lambda t: t.bfloat16()),
    "ring_start": changed("ring_start", lambda t: t.long()),
    "prev_num_accepted_tokens": changed("prev_num_accepted_tokens", lambda t: t[None]),
    "x": changed("x", lambda t: t[:, :, 0]),
    "dt": changed("dt", lambda t: t.contiguous()),
    "A": changed("A", lambda t: t.contiguous()),
    "B": changed("B", lambda t: t.float()),
    "C": changed("C", lambda t: t[:, :3]),
    "D": changed("D", lambda t: t[:-1]),
    "dt_bias": changed("dt_bias", lambda t: t.contiguous()),
    "z": changed("z", lambda t: t.mT),
    "out": changed("out", lambda t: t.float()),
    "out ": changed("out", lambda t: None),
    "max_seqlen": lambda given: given | {"max_seqlen": 4},
    "state_batch_indices": lambda given: given | {"state_batch_indices": torch.zeros(SLOTS, 2, dtype=INT)},
}


@pytest.mark.parametrize("case", BAD_REPLAYS)
def test_bad_replays(case, device):
    engine = Engine(device)
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    given = BAD_REPLAYS[case](replay(engine))
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    with pytest.raises((ValueError, TypeError), match=rf"(?<!\w){case.strip()}(?!\w)"):
        interop.checkpointing_ssu(**given)
    assert all(same_bits(tensor, before[name]) for name, tensor in engine.tensors.items())


BAD_UPDATES = {
    **dict.fromkeys(("state_scale", "rand_seed", "intermediate_states_buffer", "intermediate_state_indices"), torch.zeros(1)),
    **dict.fromkeys(("intermediate_state_scales", "cu_seqlens", "num_accepted_tokens"), torch.zeros(1)),
    "disable_state_update": True,
    "dst_state_batch_indices": torch.zeros(SLOTS, 2, dtype=INT),
    "state_batch_indices": torch.zeros(SLOTS, 2, dtype=INT),
    "x": torch.zeros(2, 2),
    "A": torch.zeros(6, 64, 128),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_bad_updates(case, device):
    engine = Engine(device)
    given = engine.tied({name: tensor[:, 0] for name, tensor in engine.inputs(SLOTS, 1).items()})
    value = BAD_UPDATES[case]
    before = engine.tensors["state"].clone()
    with pytest.raises((ValueError, TypeError), match=rf"(?<!\w){case}(?!\w)"):
        interop.selective_state_update(
            **{"state": engine.tensors["state"], **given, case: value.to(device) if isinstance(value, torch.Tensor) else value}
        )
    assert same_bits(engine.tensors["state"], before)


@pytest.mark.parametrize("name", ["checkpointing_ssu", "selective_state_update"])
def test_signatures(name):
    """Parameters, their order and their defaults are FlashInfer's, where it is installed."""
    found = find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("flashinfer is not installed")
    source = Path(found.origin).with_name("mamba") / f"{name}.py"
    (theirs,) = (f for f in ast.walk(ast.parse(source.read_text())) if isinstance(f, ast.FunctionDef) and f.name == name)
    names = [argument.arg for argument in theirs.args.args]
    defaults = [ast.literal_eval(default) for default in theirs.args.defaults]
    ours = inspect.signature(getattr(interop, name)).parameters
    assert list(ours) == names
    required = len(names) - len(defaults)
    assert all(ours[key].default is inspect.Parameter.empty for key in names[:required])
    assert [ours[key].default for key in names[required:]] == defaults
