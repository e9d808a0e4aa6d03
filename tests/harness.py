"""What a cache must hold and a step must return, kept in Python and judged by the float64 reference.

:class:`Harness` drives a cache and a wrapper through random steps. Beside every slot it keeps a :class:`SlotModel`: the state of
the last flush, the state after every committed token, the committed inputs that the ring must hold, and the cursors. Before each
step all ring memory outside the histories is filled with NaN; after it, outputs, checkpoints, rings and cursors are compared, and
everything that the step had no business to touch must have kept its bits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
import torch

from replayssm_jit import GdnSpec, KdaSpec, Mamba2Spec, ReplayCache, ReplayWrapper, kernels
from replayssm_jit.reference import recurrence, softplus
from replayssm_jit.rounding import LARGEST, distance, random_bits
from replayssm_jit.specs import STATE_FORMATS

#: The device as a parameter of a test.
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])

# ---- tolerances -----------------------------------------------------------------------------------------------------
# An output is the rounding of a value with an arithmetic error e: it lies within |round(want) - want| + 2 |e| of what is wanted, so
# the rounding is taken from the wanted values themselves and only e is a constant.
# Error of the arithmetic before the output is rounded. CPU: fp32 FMA over sums of 64 to 256 terms. CUDA: fp32 operands enter
# the tensor cores as two bf16 terms, good to 2^-17 each.
ARITHMETIC = {"cpu": 1e-6, "cuda": 6e-6}
# A kernel's fp32 error (2e-7) moves a value across a rounding boundary now and then: 2 * 2e-7 / 2^-8 of those in bf16, by 2^-7 each, is
# 6e-5 in the norm, and a third of it for fp16; few values flip, so they scatter by a factor of three. That concerns what the standard
# kernel stores, and u, which a step reads from a ring in the activation dtype.
# In 8 bits single flips count: one is 1/127 of its row's largest magnitude (int8) or up to 1/14 (fp8), among 8,192 numbers a head.
FLIPS = {"fp32": 0.0, "bf16": 2e-4, "fp16": 7e-5, "int8": 6e-4, "fp8": 3e-3}
FLIPS_U = {torch.float32: 0.0, torch.bfloat16: 2e-4, torch.float16: 7e-5}
# Families whose flushing steps take their outputs from the folded state.
FOLDS_FIRST = {"cuda": ("gdn", "kda")}
# Two planes or one, the fp32 chain of checkpoints is good to this.
STATE_FP32 = 1e-6
# Error of one number of a fold before it is rounded, in units of its own size or its head's root mean square, whichever is more.
FOLD = 1e-5


def norm(x: torch.Tensor) -> float:
    return float(x.double().norm())


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; NaN anywhere gives NaN, which fails every comparison."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return norm(got - want) / max(norm(want), 1e-30)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor, so that NaN equals itself and 0 differs from -0."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


# ---- planes ---------------------------------------------------------------------------------------------------------


def upper_plane(x: torch.Tensor) -> torch.Tensor:
    """What an ordinary step reads of an fp32 checkpoint in two planes: bf16, to nearest, ties away from zero."""
    pattern = x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    upper = ((pattern + 0x8000) >> 16) & 0xFFFF
    return (upper << 16).to(torch.int64).sub(2**32 * (upper >> 15)).to(torch.int32).view(torch.float32)


def quantised(state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a state ``[..., N]`` (in ``dtype``) and the float32 scale of each row ``[...]``, from the format's definition."""
    rows = state.float()
    most = rows.abs().amax(-1)
    zero, bad = most < 2.0**-100, ~most.isfinite()
    most = torch.where(zero | bad, 1.0, most)
    steps = rows * (torch.full_like(most, LARGEST[dtype]) / most)[..., None]  # int / tensor would multiply by a reciprocal
    steps = torch.where((zero | bad)[..., None], 0.0, steps)
    if not dtype.is_floating_point:
        steps = steps.round()
    codes = steps.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return codes, torch.where(bad, torch.nan, torch.where(zero, 0.0, most / LARGEST[dtype]))


def stored(spec, state: torch.Tensor) -> torch.Tensor:
    """A float64 state as the checkpoint keeps it; an fp32 checkpoint stays float64, so that its own error is seen."""
    if spec.checkpoint_dtype == torch.float32:
        return state
    if not spec.scaled:
        return state.to(spec.checkpoint_dtype).double()
    codes, scale = quantised(state, spec.checkpoint_dtype)
    return (codes.float() * scale[..., None]).double()


def read(spec, state: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A stored state as an ordinary step reads it; with ``scale`` where the rows' largest magnitudes do not tell it."""
    if spec.state_format == "fp32_bf16":
        return upper_plane(state).double()
    if not spec.scaled or spec.state_format in ("int8", "fp8"):
        return state
    if spec.copied:
        codes, scale = quantised(state, spec.read_dtype)
        return codes.double() * scale.double()[..., None]
    scale = (quantised(state, spec.checkpoint_dtype)[1] if scale is None else scale).double()[..., None]
    codes = torch.where(scale > 0, state.double() / scale, 0.0).round().long()
    return (codes + 128 >> 8) * 256 * scale


def two_planes(spec, state: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower plane ``[slots, H, P, N]`` of checkpoints, as integers, from where each backend keeps them."""
    raw = state.contiguous().view(torch.int8)
    if backend == "cuda":  # 64 bytes of each of 16 rows side by side
        raw = raw.view(-1, spec.state_dim * state.itemsize // 2 // 64, 16, 64).transpose(1, 2).contiguous()
    half = {1: torch.int8, 2: torch.int16}[state.itemsize // 2]
    planes = raw.view(half).view(*state.shape[:2], 2, *state.shape[2:]).long()
    return planes[:, :, 0], planes[:, :, 1]


def decode_planes(spec, layer: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
    """The checkpoints ``[slots, H, P, N]`` of a layer as values, written from the format's definition."""
    state = layer["state"]
    if spec.checkpoint_dtype == torch.int16:
        upper, lower = two_planes(spec, state, backend)
        return (upper * 256 + lower).float() * layer["scale"][..., None]
    if spec.state_format != "fp32_bf16":
        return state.float() * layer["scale"][..., None] if spec.scaled and not spec.copied else state.float()
    upper, lower = two_planes(spec, state, backend)
    pattern = ((upper << 16) + lower + 2**31) % 2**32 - 2**31
    return pattern.to(torch.int32).view(torch.float32)


# ---- families -------------------------------------------------------------------------------------------------------


def make_weights(spec, generator: torch.Generator, optional: set[str]) -> dict[str, torch.Tensor]:
    """Weights of one layer, float32: decays from slow to fast over the heads (and key channels)."""

    def uniform(low, high, dims):
        return low + (high - low) * torch.rand(spec.shape(*dims), generator=generator)

    weights = {}
    for weight in spec.weights:
        if weight.optional and weight.name not in optional:
            continue
        if weight.name in ("A", "A_log"):
            rate = uniform(math.log(0.05), math.log(8.0), weight.dims)
            weights[weight.name] = -rate.exp() if weight.name == "A" else rate
        elif weight.name == "dt_bias" and spec.family == "mamba2" and not spec.dt_softplus:
            weights[weight.name] = uniform(0.01, 0.1, weight.dims)
        else:
            low, high = {"D": (-1.0, 1.0), "dt_bias": (-4.0, -1.0)}[weight.name]
            weights[weight.name] = uniform(low, high, weight.dims)
    if spec.family != "mamba2" and spec.gate == "precomputed":
        return {}
    return weights


def make_inputs(spec, tokens: int, generator: torch.Generator, optional: set[str]) -> dict[str, torch.Tensor]:
    """Inputs of some tokens ``[tokens, outer, inner]`` in their dtypes."""
    inputs = {}
    for item in spec.inputs:
        if item.optional and item.name not in optional:
            continue
        x = torch.randn(tokens, *spec.shape(item.outer, item.inner), generator=generator)
        if item.name == "dt":
            x = x - 1 if spec.dt_softplus else x.abs() * 0.2
        elif item.name == "g" and spec.gate == "precomputed":
            x = -(x - 2).exp()
        elif item.name == "beta" and spec.beta == "value":
            x = torch.sigmoid(x)
        inputs[item.name] = x.to(spec.dtype_of(item.dtype))
    return inputs


def log_decay(spec, inputs, weights) -> torch.Tensor:
    """Log decay of Gated DeltaNet ``[tokens, H]`` or KDA ``[tokens, H, N]``, float64."""
    g = inputs["g"].double()
    if spec.gate == "precomputed":
        return g
    g = g + weights.get("dt_bias", torch.zeros(())).double()
    rate = weights.get("A_log", torch.zeros(spec.heads)).double().exp().reshape(-1, *[1] * (g.dim() - 2))
    return -rate * softplus(g) if spec.gate == "softplus" else spec.lower_bound * torch.sigmoid(rate * g)


def key_scale(spec, inputs) -> torch.Tensor:
    """What raw keys are multiplied with, ``[tokens, G]``, float64."""
    k = inputs["k"].double()
    return torch.rsqrt(k.square().sum(-1) + 1e-6) if spec.qk_norm else torch.ones(k.shape[:2], dtype=torch.float64)


def ring_values(spec, inputs, weights) -> dict[str, tuple[torch.Tensor, float]]:
    """What the ring must hold of some tokens ``[tokens, outer, inner]``, with a relative tolerance (0: exact bits)."""
    if spec.family == "mamba2":
        d = inputs["dt"].double() + weights.get("dt_bias", torch.zeros(spec.heads)).double()
        return {"x": (inputs["x"], 0.0), "b": (inputs["B"], 0.0), "d": (softplus(d) if spec.dt_softplus else d, 1e-6)}
    beta = inputs["beta"].double()
    return {
        "k": (inputs["k"], 0.0),
        "k_norm": (key_scale(spec, inputs), 1e-6),
        "v": (inputs["v"], 0.0),
        "beta": (torch.sigmoid(beta) if spec.beta == "logit" else beta, 1e-6),
        "g": (log_decay(spec, inputs, weights), 2e-6),
    }


def query_size(spec, inputs) -> torch.Tensor:
    """Norm that an output of a random state of norm 1 has, ``[tokens, H]``."""
    if spec.family == "mamba2":
        size = inputs["C"].double().norm(dim=-1)
    else:
        q = inputs["q"].double()
        size = spec.scale * q.norm(dim=-1) * (torch.rsqrt(q.square().sum(-1) + 1e-6) if spec.qk_norm else 1)
    size = size.repeat_interleave(spec.heads // spec.groups_, dim=1) / spec.state_dim**0.5
    return size if "z" not in inputs else size * torch.nn.functional.silu(inputs["z"].double()).square().mean(-1).sqrt()


def with_ring(spec, inputs, weights, state, tip) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The state that a later step sees: ``state`` and the ring's entries of some tokens that ran when the step saw ``tip``.

    Mamba-2's ring holds inputs, so this is the recurrence; a delta rule's holds u, rounded to the activation dtype, which is
    returned beside the state, unrounded ``[tokens, H, P]``.
    """
    if spec.family == "mamba2":
        return recurrence(spec, inputs, weights, state)[1], None
    values = {name: values.double() for name, (values, _) in ring_values(spec, inputs, weights).items()}
    keys = (values["k"] * values["k_norm"][..., None]).repeat_interleave(spec.heads // spec.groups_, dim=1)
    decay = values["g"].exp().unflatten(1, (spec.heads, 1))  # [tokens, H, 1] or [tokens, H, 1, N]
    decay = decay[..., None] if decay.dim() == 3 else decay
    us = torch.zeros(keys.shape[0], *spec.shape("H", "P"), dtype=torch.float64)
    for t in range(keys.shape[0]):
        tip = tip * decay[t]
        us[t] = values["beta"][t, :, None] * (values["v"][t] - (tip @ keys[t, :, :, None])[..., 0])
        tip = tip + us[t, :, :, None] * keys[t, :, None, :]
        state = state * decay[t] + us[t].to(spec.dtype).double()[:, :, None] * keys[t, :, None, :]
    return state, us


def path_to(tree: list[int] | None, node: int) -> list[int]:
    """Nodes from a root to ``node``; without a tree every token follows the one before."""
    if tree is None:
        return list(range(node + 1))
    return [*path_to(tree, tree[node]), node] if node >= 0 else []


# ---- laying inputs out ----------------------------------------------------------------------------------------------


def dense(tensors: dict[str, torch.Tensor], leading: int) -> dict[str, torch.Tensor]:
    """As they are: every tensor contiguous."""
    return tensors


def projection_views(shift: int = 0):
    """A layout: the same values as views of one wide projection per dtype, NaN between them.

    ``shift`` moves every view by that many elements: 0 keeps 16-byte alignment, 1 leaves only the dtype's own.
    """

    def layout(tensors: dict[str, torch.Tensor], leading: int) -> dict[str, torch.Tensor]:
        views = {}
        for dtype in {t.dtype for t in tensors.values()}:
            part = {name: t for name, t in tensors.items() if t.dtype == dtype}
            places, width = {}, 16 + shift
            for name, t in part.items():
                size = math.prod(t.shape[leading:])
                places[name] = slice(width, width + size)
                width += (size + 31) // 16 * 16 + shift
            rows = next(iter(part.values())).shape[:leading]
            packed = torch.full((*rows, width + shift), math.nan, dtype=dtype, device=next(iter(part.values())).device)
            for name, t in part.items():
                views[name] = packed[..., places[name]].unflatten(-1, t.shape[leading:])
                views[name].copy_(t)
        return {name: views[name] for name in tensors}

    return layout


# ---- the model ------------------------------------------------------------------------------------------------------


def kept_nodes(accepted: int | list[int], tokens: int) -> list[int]:
    """Which of a row's tokens a count or a path keeps; what is impossible keeps none."""
    if isinstance(accepted, int):
        return list(range(accepted)) if 0 <= accepted <= tokens else []
    rising = all(a < b for a, b in itertools.pairwise([-1, *accepted, tokens]))
    return accepted if rising else []


@dataclass
class SlotModel:
    """One slot: float64 states per layer, the history's inputs per layer, cursors."""

    checkpoint: list[torch.Tensor]
    ring_start: int = 0
    position: int = 0
    history: int = 0
    seed: int = 0
    uncommitted: int = 0  # tokens of a step that ran and has no commit yet
    inputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    tip: list[torch.Tensor] = field(default_factory=list)  # after every committed token, from the checkpoint
    read_tip: list[torch.Tensor] = field(default_factory=list)  # what the next step sees: read plane and ring

    def copy(self) -> SlotModel:
        """Another slot of the same content; tensors are never changed in place, so they may be shared."""
        return replace(self, **{name: list(getattr(self, name)) for name in ("checkpoint", "inputs", "tip", "read_tip")})


class Harness:
    """A cache, a wrapper and the model of what they must do.

    Parameters
    ----------
    optional : set of str
        Optional inputs and weights that are given.
    layout : callable
        Lays a dictionary of inputs out in memory; same values, other strides.
    load : bool
        Start from random states and random ring starts instead of fresh slots.
    cache : ReplayCache, optional
        Use this one, and its device.
    weights : list of dict, optional
        Weights of every layer; random when absent.
    """

    def __init__(
        self,
        spec,
        device,
        *,
        layers: int = 1,
        slots: int = 4,
        seed: int = 0,
        pad_slot: int = -1,
        optional: set[str] = frozenset({"D", "dt_bias", "z", "A_log"}),
        layout=dense,
        load: bool = True,
        cache: ReplayCache | None = None,
        weights: list[dict[str, torch.Tensor]] | None = None,
    ) -> None:
        self.spec, self.device, self.optional, self.layout, self.pad_slot = spec, torch.device(device), optional, layout, pad_slot
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = ReplayCache.allocate(spec, num_layers=layers, num_slots=slots, device=device) if cache is None else cache
        self.device = self.cache.device
        self.num_slots, self.num_layers = self.cache.num_slots, len(self.cache.layers)
        self.weights = [make_weights(spec, self.generator, set(optional)) for _ in range(self.num_layers)] if weights is None else weights
        self.use(self.cache, pad_slot)
        self.slots: list[SlotModel] = []
        zero = torch.zeros(spec.shape("H", "P", "N"), dtype=torch.float64)
        for _ in range(self.num_slots):
            self.slots.append(self._fresh([zero] * self.num_layers))
        if load:
            for slot in range(self.num_slots):
                self.load(slot)
                self.slots[slot].ring_start = self.randint(0, spec.ring_len - 1)
            starts = torch.tensor([s.ring_start for s in self.slots], dtype=torch.int32)
            self.cache.ring_start.copy_(starts)

    def use(self, cache: ReplayCache, pad_slot: int) -> None:
        """Go on with another cache of the same content and a new wrapper."""
        self.cache, self.pad_slot, self.planned = cache, pad_slot, None
        self.wrapper = ReplayWrapper(cache, pad_slot=pad_slot)
        for layer, weights in enumerate(self.weights):
            cache.set_weights(layer, **{k: v.to(self.device) for k, v in weights.items()})

    # ---- randomness -------------------------------------------------------------------------------------------------

    def randint(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def make_inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Inputs of one layer ``[tokens, outer, inner]``."""
        return make_inputs(self.spec, tokens, self.generator, set(self.optional))

    def random_rows(self, lengths: range, rows: int | None = None) -> list[tuple[int, int]]:
        """Distinct slots in any order, each with a random length."""
        order = torch.randperm(self.num_slots, generator=self.generator).tolist()
        rows = self.randint(1, self.num_slots) if rows is None else rows
        return [(slot, self.randint(lengths.start, lengths.stop - 1)) for slot in order[:rows]]

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _fresh(self, states: list[torch.Tensor]) -> SlotModel:
        kept = [stored(self.spec, s) for s in states]
        empty = self.make_inputs(0)
        return SlotModel(kept, inputs=[dict(empty) for _ in kept], tip=list(kept), read_tip=[read(self.spec, s) for s in kept])

    def load(self, slot: int, position: int = 0, layout: str = "vk") -> None:
        """Random states through ``load_state``, values exact in the checkpoint's dtype where rows have no scales."""
        shape, dtype = self.spec.shape("H", "P", "N"), torch.float32 if self.spec.scaled else self.spec.checkpoint_dtype
        states = [torch.randn(shape, generator=self.generator).to(dtype) for _ in range(self.num_layers)]
        positions = torch.tensor([position], dtype=torch.int64, device=self.device)
        for layer, state in enumerate(states):
            given = state[None].to(self.device)
            self.cache.load_state(layer, [slot], given if layout == "vk" else given.mT, layout=layout, positions=positions)
        self.slots[slot] = self._fresh([s.double() for s in states])
        self.slots[slot].position = position
        if self.spec.stochastic:
            self.slots[slot].seed = self.randint(-(2**62), 2**62)
            self.cache.cursors["seed"][slot] = self.slots[slot].seed

    def fill(self, slot: int, tokens: dict[str, torch.Tensor]) -> None:
        """Put committed tokens ``[h, outer, inner]`` of the one layer into a slot's empty history without a step."""
        model = self.slots[slot]
        count = next(iter(tokens.values())).shape[0]
        places = [(model.ring_start + i) % self.spec.ring_len for i in range(count)]
        entries = {name: values for name, (values, _) in ring_values(self.spec, tokens, self.weights[0]).items()}
        seen, us = with_ring(self.spec, tokens, self.weights[0], model.read_tip[0], model.read_tip[0])
        for name, values in (entries if us is None else entries | {"u": us}).items():
            ring = self.cache.layers[0][f"ring_{name}"]
            ring[slot][:, places] = values.to(ring.dtype).to(self.device).transpose(0, 1)
        model.inputs, model.history = [tokens], count
        model.tip = [recurrence(self.spec, tokens, self.weights[0], model.tip[0])[1]]
        model.read_tip = [seen]
        self.cache.ring_start[slot], self.cache.history[slot] = model.ring_start, model.history

    def reset(self, slots: list[int]) -> None:
        self.cache.reset(slots)
        zero = torch.zeros(self.spec.shape("H", "P", "N"), dtype=torch.float64)
        for slot in slots:
            if slot >= 0:
                self.slots[slot] = self._fresh([zero] * self.num_layers)

    def flush(self, slots: list[int]) -> None:
        self.poison()
        self.cache.flush(slots)
        for slot in slots:
            if slot >= 0:
                self._fold(slot)

    def held(self, slot: int) -> list[torch.Tensor]:
        """The cache's own checkpoints of a slot, per layer."""
        return [self.cache.read_state(layer, [slot])[0].cpu().double() for layer in range(self.num_layers)]

    def scales(self, slot: int, layer: int) -> torch.Tensor | None:
        """The rows' scales of a checkpoint that is stored in multiples of them."""
        return self.cache.layers[layer]["scale"][slot].cpu() if self.spec.scaled and not self.spec.copied else None

    def settle(self, slot: int, source: SlotModel, states: list[torch.Tensor]) -> None:
        """``slot`` has just become what folds of ``source`` make of some states: judge that.

        Which way a value close to a boundary rounds is not the model's to say. So it goes on from the cache's own bits, once they are
        judged: all that steps read of them, and the checkpoint itself where it is narrower than fp32; an fp32 one is judged by the
        unrounded recurrence for as long as the slot lives.
        """
        model = self.slots[slot]
        model.checkpoint, held = list(states), self.held(slot)
        self.judge_fold(slot, source)
        if self.spec.checkpoint_dtype != torch.float32:
            model.checkpoint = held
        model.tip = list(model.checkpoint)
        model.read_tip = [read(self.spec, state, self.scales(slot, layer)) for layer, state in enumerate(held)]

    def arrive(self, slot: int, source: SlotModel, tokens: int, states: list[torch.Tensor]) -> None:
        """``slot`` has taken over what ``source`` was after some tokens of its history."""
        self.slots[slot] = self._fresh(states)
        self.slots[slot].position, self.slots[slot].seed = source.position + tokens, source.seed
        self.settle(slot, source, states)

    def _fold(self, slot: int) -> None:
        model = self.slots[slot]
        if model.history:
            self.settle(slot, model, model.tip)
        model.ring_start = (model.ring_start + model.history) % self.spec.ring_len
        model.position += model.history
        model.history = 0
        model.inputs = [{k: v[:0] for k, v in inputs.items()} for inputs in model.inputs]

    def state_at(self, slot: int, layer: int, tokens: int) -> torch.Tensor:
        """The true state after some of the tokens in a slot's history."""
        model = self.slots[slot]
        inputs = {name: values[:tokens] for name, values in model.inputs[layer].items()}
        return recurrence(self.spec, inputs, self.weights[layer], model.checkpoint[layer])[1]

    def live(self, slot: int) -> bool:
        return 0 <= slot != self.pad_slot

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(
        self,
        rows: list[tuple[int, int]],
        accepted: list[int] | list[list[int]] | None = None,
        *,
        mode: str = "fixed",
        width: int | None = None,
        commit: bool = True,
        plan: bool = True,
        trees: list[list[int]] | None = None,
    ) -> list[torch.Tensor]:
        """Plan, run every layer, judge, commit.

        Parameters
        ----------
        rows : list of (slot, T)
            One per batch row.
        accepted : list of int or list of list of int, optional
            Per row a count, or a path of its tree; random when absent.
        mode : {"fixed", "padded", "packed"}
            Equal lengths as an int; lengths as a tensor with padded inputs; or ``cu_seqlens``.
        width : int, optional
            Padded width.
        commit : bool
            Commit at once; otherwise the arguments of :meth:`commit` are left in ``pending``.
        plan : bool
            Plan; otherwise the plan of an earlier step with the same rows and mode stands.
        trees : list of list of int, optional
            Per row the parents of its tokens.

        Returns
        -------
        list of Tensor
            Outputs per layer.
        """
        lengths = [t for _, t in rows]
        if accepted is None:
            accepted = [self.randint(0, t) for t in lengths] if trees is None else [self.random_path(tree) for tree in trees]
        fresh = [self.make_inputs(sum(lengths)) for _ in range(self.num_layers)]
        outputs = self.run(rows, fresh, mode=mode, width=width, plan=plan, trees=trees)
        if commit:
            self.commit(rows, accepted, fresh)
        else:
            self.pending = (rows, accepted, fresh)
        return outputs

    def run(self, rows, fresh, *, mode="fixed", width=None, plan=True, trees=None):
        """Plan and run every layer on the given inputs (packed, one dictionary a layer), and judge everything but cursors."""
        spec, lengths = self.spec, [t for _, t in rows]
        starts = [sum(lengths[:i]) for i in range(len(rows) + 1)]
        width = max([*lengths, 1]) if width is None else width
        if plan:
            self.plan(rows, mode, width, trees)
        self.poison()
        before = [{name: t.clone() for name, t in layer.items()} for layer in self.cache.layers]
        outputs = []
        for layer in range(self.num_layers):
            inputs = fresh[layer]
            if mode != "packed":
                inputs = {name: self._pad(t, starts, width) for name, t in inputs.items()}
            for slot_row, (slot, _) in enumerate(rows):
                if not self.live(slot):
                    where = slot_row if mode != "packed" else slice(starts[slot_row], starts[slot_row + 1])
                    inputs = {name: t.clone() for name, t in inputs.items()}
                    for t in inputs.values():
                        t[where] = math.nan
            inputs = self.layout({name: t.to(self.device) for name, t in inputs.items()}, 1 if mode == "packed" else 2)
            leading = (sum(lengths),) if mode == "packed" else (len(rows), width)
            out = torch.full((*leading, *spec.shape("H", "P")), math.nan, dtype=spec.dtype, device=self.device)
            outputs.append(self.wrapper.run(layer, out=out, **inputs))
        for layer, out in enumerate(outputs):
            assert out.dtype == spec.dtype
            for r, (slot, t) in enumerate(rows):
                got = out[starts[r] : starts[r + 1]] if mode == "packed" else out[r, :t]
                if mode != "packed":
                    assert not bits(out[r, t:]).any(), f"row {r}: output past its {t} tokens is not zero"
                if not self.live(slot):
                    assert not bits(got).any(), f"padding row {r}: output is not zero"
                elif t:
                    tokens = {k: v[starts[r] : starts[r + 1]] for k, v in fresh[layer].items()}
                    self.judge_output(got, slot, layer, tokens, None if trees is None else trees[r])
        self.judge_cache(rows, fresh, before, trees)
        for slot, t in rows:
            if self.live(slot) and t:
                self.slots[slot].uncommitted = t
        return outputs

    def plan(self, rows, mode: str, width: int = 1, trees: list[list[int]] | None = None) -> None:
        self.planned = (rows, mode, width, trees)
        slots = torch.tensor([s for s, _ in rows], dtype=torch.int32, device=self.device)
        lengths = torch.tensor([t for _, t in rows], dtype=torch.int32)
        parents = None if trees is None else self.parents(trees, mode, width)
        if mode == "fixed":
            assert len(set(lengths.tolist())) == 1
            self.wrapper.plan(slots, rows[0][1], parents=parents)
        elif mode == "padded":
            self.wrapper.plan(slots, lengths.to(self.device), parents=parents)
        else:
            offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
            self.wrapper.plan(slots, cu_seqlens=offsets.to(self.device), parents=parents)

    def parents(self, trees: list[list[int]], mode: str, width: int) -> torch.Tensor:
        """The trees of all rows as ``plan`` takes them; what lies past a row's nodes is nobody's."""
        if mode == "packed":
            values = [parent for tree in trees for parent in tree]
        else:
            values = [tree + [2**30] * (width - len(tree)) for tree in trees]
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def random_tree(self, nodes: int) -> list[int]:
        return [self.randint(-1, t - 1) for t in range(nodes)]

    def random_path(self, tree: list[int]) -> list[int]:
        """From a root to some node, or nothing."""
        return path_to(tree, self.randint(-1, len(tree) - 1))

    def _pad(self, packed: torch.Tensor, starts: list[int], width: int) -> torch.Tensor:
        """``[tokens, ...]`` to ``[rows, width, ...]``, NaN past a row's length."""
        out = packed.new_full((len(starts) - 1, width, *packed.shape[1:]), math.nan)
        for r in range(len(starts) - 1):
            out[r, : starts[r + 1] - starts[r]] = packed[starts[r] : starts[r + 1]]
        return out

    def commit(self, rows, accepted: list[int] | list[list[int]], fresh) -> None:
        """Commit on the device and in the model; counts above a row's length (or negative) and what is no path are taken as zero."""
        counts = {"device": self.device, "dtype": torch.int32}
        slots, lengths = torch.tensor([s for s, _ in rows], **counts), torch.tensor([t for _, t in rows], **counts)
        if isinstance(accepted[0], int):
            self.wrapper.commit(slots, lengths, torch.tensor(accepted, **counts))
        else:
            width = max(1, *map(len, accepted))
            paths = torch.tensor([path + [2**30] * (width - len(path)) for path in accepted], **counts)
            before = [{name: t.clone() for name, t in layer.items()} for layer in self.cache.layers]
            self.wrapper.commit(slots, lengths, torch.tensor([len(path) for path in accepted], **counts), accepted=paths)
            self.judge_moves(rows, accepted, before)
        self.commit_model(rows, accepted, fresh)
        self.judge_cursors()

    def judge_moves(self, rows, accepted, before) -> None:
        """Ring entries of every accepted path lie together, bit for bit, and nothing else has changed."""
        for was, now in zip(before, self.cache.layers, strict=True):
            for (slot, t), path in zip(rows, accepted, strict=True):
                if not self.live(slot):
                    continue
                first = self.slots[slot].ring_start + self.slots[slot].history
                for to, node in enumerate(kept_nodes(path, t)):
                    for name, tensor in was.items():
                        if name.startswith("ring_"):
                            tensor[slot][:, (first + to) % self.spec.ring_len] = tensor[slot][:, (first + node) % self.spec.ring_len]
            assert all(same_bits(was[name], now[name]) for name in was)

    def commit_model(self, rows, accepted, fresh) -> None:
        start = 0
        for (slot, t), a in zip(rows, accepted, strict=True):
            nodes = kept_nodes(a, t)
            if self.live(slot):
                model = self.slots[slot]
                if t:
                    model.uncommitted = 0
                seen = [self.seen(slot, t, layer) for layer in range(self.num_layers)]
                if self.flushes(slot, t):
                    self._fold(slot)
                for layer in range(self.num_layers):
                    kept = {k: v[[start + node for node in nodes]] for k, v in fresh[layer].items()}
                    model.inputs[layer] = {k: torch.cat([v, kept[k]]) for k, v in model.inputs[layer].items()}
                    if nodes:
                        model.read_tip[layer], _ = with_ring(self.spec, kept, self.weights[layer], model.read_tip[layer], seen[layer])
                        model.tip[layer] = recurrence(self.spec, kept, self.weights[layer], model.tip[layer])[1]
                model.history += len(nodes)
            start += t

    def flushes(self, slot: int, t: int) -> bool:
        return t > 0 and self.slots[slot].history + t > self.spec.buffer_len

    def seen(self, slot: int, t: int, layer: int) -> torch.Tensor:
        """The state that a step of ``t`` tokens, which has run, sees: read plane and ring, or what it folded, in bf16 if that is read."""
        model, spec = self.slots[slot], self.spec
        if spec.family not in FOLDS_FIRST.get(kernels.backend_of(self.device), ()) or not self.flushes(slot, t):
            return model.read_tip[layer]
        state = self.held(slot)[layer] if spec.checkpoint_dtype == torch.float32 else model.tip[layer]
        return state if spec.dtype == torch.float32 or spec.state_format in ("fp32", "fp16") else state.bfloat16().double()

    # ---- poison and judgement ---------------------------------------------------------------------------------------

    def dead(self) -> torch.Tensor:
        """Ring entries outside the histories and the steps that wait for a commit, bool ``[slots, R]``."""
        entry = torch.arange(self.spec.ring_len)
        start = torch.tensor([s.ring_start for s in self.slots])[:, None]
        history = torch.tensor([s.history + s.uncommitted for s in self.slots])[:, None]
        return (entry - start) % self.spec.ring_len >= history

    def poison(self) -> None:
        """NaN in all ring memory outside the histories."""
        dead = self.dead().to(self.device)
        for layer in self.cache.layers:
            for name, tensor in layer.items():
                if name.startswith("ring_"):
                    tensor.masked_fill_(dead[:, None, :, None] if tensor.dim() == 4 else dead[:, None], math.nan)

    def judge_output(self, got, slot: int, layer: int, tokens, tree: list[int] | None = None) -> None:
        """Outputs of a row against the recurrence continued from what the step reads; of a tree, path by path."""
        spec, seen = self.spec, self.seen(slot, got.shape[0], layer)
        wanted, states, state = [], [], seen
        for t in range(got.shape[0]):
            path, start = ([t], state) if tree is None else (path_to(tree, t), seen)
            y, state = recurrence(spec, {k: v[path] for k, v in tokens.items()}, self.weights[layer], start)
            wanted.append(y[-1])
            states.append(state.norm(dim=(1, 2)))
        where = f"slot {slot}, layer {layer}, history {self.slots[slot].history}, {got.shape[0]} tokens: output"
        self._judge_rounded(where, got.double().cpu(), torch.stack(wanted), torch.stack(states) * query_size(spec, tokens))

    def _judge_rounded(self, where: str, got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> None:
        """Values ``[tokens, H, P]`` in the activation dtype against what they are the rounding of.

        ``terms`` ``[tokens, H]`` is how large the sums behind them would be without cancellation.
        """
        spec = self.spec
        arithmetic = ARITHMETIC[kernels.backend_of(self.device)] + (0 if spec.family == "mamba2" else FLIPS_U[spec.dtype])
        rounding = want.to(spec.dtype).double() - want
        size = torch.maximum(want.norm(dim=-1), terms)
        error, allowed = norm(got - want), norm(rounding) + 2 * arithmetic * norm(size)
        assert error <= allowed, f"{where} error {error:.3g} > {allowed:.3g}, norm {norm(want):.3g}"
        # The same head by head and token by token, so that one wrong head does not hide among right ones.
        excess = (got - want).norm(dim=-1) / (rounding.norm(dim=-1) + 8 * arithmetic * size).clamp_min(1e-30)
        worst = divmod(int(excess.argmax()), want.shape[1])
        assert bool((excess <= 1).all()), f"{where} of token and head {worst} is {float(excess.max()):.3g} x its bound"

    def judge_state(self, slot: int) -> None:
        """The checkpoint against the model's: the fp32 chain within its error, a narrower one bit for bit; and a copy for reading."""
        model = self.slots[slot]
        for layer, (got, want) in enumerate(zip(self.held(slot), model.checkpoint, strict=True)):
            where = f"slot {slot}, layer {layer}, position {model.position}"
            if self.spec.copied:
                tensors = self.cache.layers[layer]
                copy, scale = quantised(got, self.spec.read_dtype)
                assert same_bits(tensors["read_copy"][slot].cpu(), copy), f"{where}: read_copy"
                assert same_bits(tensors["scale"][slot].cpu(), scale), f"{where}: scale"
            if self.spec.checkpoint_dtype != torch.float32:
                assert torch.equal(got, want), f"{where}: {int((got != want).sum())} numbers of the checkpoint have changed"
                continue
            if not want.any():
                assert not got.any(), f"{where}: a fresh state is not zero"
                continue
            error = relative_error(got, want)
            assert error <= STATE_FP32, f"{where}: state error {error:.3g}"
            heads = (got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2)).clamp_min(1e-30)
            assert bool((heads <= 4 * STATE_FP32).all()), f"{where}: head {int(heads.argmax())} has state error {float(heads.max()):.3g}"

    def judge_fold(self, slot: int, source: SlotModel) -> None:
        """A checkpoint that a fold of ``source`` has just written, against the model's, which is not rounded."""
        if self.spec.checkpoint_dtype == torch.float32:
            return self.judge_state(slot)
        for layer, (got, want) in enumerate(zip(self.held(slot), self.slots[slot].checkpoint, strict=True)):
            random = None
            if self.spec.stochastic:
                random = random_bits(self.spec, torch.tensor(source.seed), torch.tensor(source.position), layer)
            error = distance(self.spec, got, want, self.scales(slot, layer), random)
            size = torch.maximum(want.abs(), want.square().mean((1, 2), keepdim=True).sqrt())
            assert bool((error <= FOLD * size).all()), (
                f"slot {slot}, layer {layer}, position {source.position}: an error of {float((error / size).max()):.3g} before rounding"
            )

    def judge_cursors(self) -> None:
        got = {name: cursor.tolist() for name, cursor in self.cache.cursors.items()}
        assert got == {name: [getattr(s, name) for s in self.slots] for name in got}

    def judge_cache(self, rows, fresh, before, trees=None) -> None:
        """After the runs of a step, before its commit: what was written is right, and nothing else was."""
        spec, cpu = self.spec, torch.device("cpu")
        written = torch.zeros(self.num_slots, spec.ring_len, dtype=torch.bool)
        flushed = set()
        start = 0
        for row, (slot, t) in enumerate(rows):
            if self.live(slot):
                model = self.slots[slot]
                places = [(model.ring_start + model.history + i) % spec.ring_len for i in range(t)]
                written[slot, places] = True
                if self.flushes(slot, t):
                    flushed.add(slot)
                for layer in range(self.num_layers):
                    tokens = {k: v[start : start + t] for k, v in fresh[layer].items()}
                    for name, (want, tolerance) in ring_values(spec, tokens, self.weights[layer]).items():
                        got = self.cache.layers[layer][f"ring_{name}"][slot][:, places].to(cpu).transpose(0, 1)
                        if tolerance == 0:
                            assert same_bits(got, want.to(got.dtype)), f"slot {slot}: ring_{name} is not the exact input"
                        else:
                            # A log decay acts through its exponential, whose relative error is the exponent's absolute one: half a unit
                            # in the last place of fp32 is invisible there, while a sigmoid's far tail loses relative accuracy.
                            floor = 6e-8 if name == "g" else 1e-12
                            assert torch.allclose(got.double(), want.double(), rtol=tolerance, atol=floor), f"slot {slot}: ring_{name}"
                    if spec.family != "mamba2" and t:
                        tip = self.seen(slot, t, layer)
                        if trees is None:
                            _, want = with_ring(spec, tokens, self.weights[layer], tip, tip)
                        else:
                            paths = [{k: v[path_to(trees[row], node)] for k, v in tokens.items()} for node in range(t)]
                            want = torch.stack([with_ring(spec, path, self.weights[layer], tip, tip)[1][-1] for path in paths])
                        got = self.cache.layers[layer]["ring_u"][slot][:, places].to(cpu).transpose(0, 1)
                        terms = tokens["v"].double().norm(dim=-1)
                        self._judge_rounded(f"slot {slot}, layer {layer}: ring_u", got.double(), want, terms)
            start += t
        untouched = [s for s in range(self.num_slots) if s not in flushed]
        keep = ~written.to(self.device)
        for layer, (was, now) in enumerate(zip(before, self.cache.layers, strict=True)):
            for name in spec.state_tensors:
                assert same_bits(now[name][untouched], was[name][untouched]), f"layer {layer}: {name} changed without a flush"
            for name in was:
                if name.startswith("ring_"):
                    a, b = (bits(x[name]) for x in (was, now))
                    mask = keep[:, None, :, None] if a.dim() == 4 else keep[:, None]
                    assert not ((a != b) & mask).any(), f"layer {layer}: {name} changed outside the step's new entries"
        for slot in flushed:
            self._judge_fold(slot)
        self.judge_cursors()

    def _judge_fold(self, slot: int) -> None:
        model = self.slots[slot]
        kept, model.checkpoint = model.checkpoint, model.tip
        self.judge_fold(slot, model)
        model.checkpoint = kept

    def finish(self) -> None:
        """Fold everything and compare every slot's state."""
        self.flush(list(range(self.num_slots)))
        for slot in range(self.num_slots):
            self.judge_state(slot)
        self.judge_cursors()
        self.cache.check()


# ---- specs ----------------------------------------------------------------------------------------------------------


def small_spec(family: str, **changes):
    """A small spec of a family, with two groups of three heads, whose slots flush every few steps."""
    base = {"heads": 6, "head_dim": 64, "state_dim": 128, "buffer_len": 8, "max_tokens": 4}
    if family == "mamba2":
        return Mamba2Spec(**base | {"groups": 2} | changes)
    return {"gdn": GdnSpec, "kda": KdaSpec}[family](**base | {"key_heads": 2} | changes)


FAMILIES = ("mamba2", "gdn", "kda")
DELTA = tuple(family for family in FAMILIES if family != "mamba2")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHORT = {dtype: name for name, dtype in DTYPES.items()}

#: checkpoint_dtype, read_dtype
FORMATS = {name: pair for pair, name in STATE_FORMATS.items()}


def crossed(first, *others, always):
    """Cases ``(a, b, ...)`` of every combination; those of which ``always`` is not true are marked slow: they add no code path."""
    return [case if always(*case) else pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(first, *others)]


def precisions(family):
    """Cases of ``(dtype, state_format)``: every pair of formats, by default each format and each dtype at least once."""
    usual = {("bf16", name) for name in FORMATS} | {("fp32", "fp32"), ("fp32", "fp32_bf16"), ("fp16", "fp32_bf16"), ("fp16", "fp16")}
    usual |= {("fp32", "int16_int8"), ("fp16", "int8")}
    if family != "mamba2":
        usual -= {("bf16", "fp16"), ("fp16", "fp32_bf16")}
    return crossed([family], DTYPES.values(), FORMATS, always=lambda _, dtype, name: (SHORT[dtype], name) in usual)


def with_format(name: str) -> dict[str, torch.dtype]:
    checkpoint, read_dtype = FORMATS[name]
    return {"checkpoint_dtype": checkpoint, "read_dtype": read_dtype}
