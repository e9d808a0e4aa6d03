"""What each family is: shapes, ring contents, inputs, byte counts.

A spec is the only place that knows them. It knows nothing of compilers: :meth:`ReplaySpec.module` returns the plain
description (name, template, constants, parameter struct) that :mod:`replayssm_jit.jit` turns into a kernel.

Dimensions carry one letter in every family:

====  =========================================  ==========================
dim   Mamba-2                                    Gated DeltaNet, KDA
====  =========================================  ==========================
H     heads                                      value heads
G     groups                                     key heads
P     head_dim                                   head_dim of values (V)
N     state_dim                                  head_dim of keys (K)
R     ring_len = buffer_len + max_tokens         the same
====  =========================================  ==========================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from . import tactics
from .jit.module import ModuleSpec
from .jit.params import ParamStruct

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)

#: Checkpoint formats: (checkpoint_dtype, read_dtype) -> name used in templates and module names. Equal dtypes are one plane; a
#: 16-bit or 8-bit plane below a checkpoint twice as wide is its upper half; an 8-bit one below fp32 is a copy beside it.
STATE_FORMATS: dict[tuple[torch.dtype, torch.dtype], str] = {
    (torch.float32, torch.float32): "fp32",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.float16, torch.float16): "fp16",
    (torch.int8, torch.int8): "int8",
    (torch.float8_e4m3fn, torch.float8_e4m3fn): "fp8",
    (torch.float32, torch.bfloat16): "fp32_bf16",
    (torch.int16, torch.int8): "int16_int8",
    (torch.float32, torch.int8): "fp32_int8",
    (torch.float32, torch.float8_e4m3fn): "fp32_fp8",
}
ROUNDINGS = ("nearest", "stochastic")

MAX_BUFFER_LEN = 64
MAX_TOKENS = 16

#: Layers of one launch of the fold kernel; its parameters name a tensor for each.
FOLD_LAYERS = 256


@dataclass(frozen=True)
class Ring:
    """One tensor of the ring: ``[slots, outer, ring_len, inner]`` (``inner`` absent when None)."""

    name: str
    outer: str
    inner: str | None
    dtype: str  # "activation" or "fp32"


@dataclass(frozen=True)
class Input:
    """One per-token input of a step: ``[rows, T, outer, inner]``, or ``[tokens, outer, inner]`` when packed."""

    name: str
    outer: str
    inner: str | None
    dtype: str  # "activation", "fp32", or the name of a spec field that holds a dtype
    optional: bool = False


@dataclass(frozen=True)
class Weight:
    """One per-layer constant, fp32 and contiguous."""

    name: str
    dims: tuple[str, ...]
    optional: bool = False


def _positive(name: str, value: object, accepted: str = "a positive int") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def _one_of(name: str, value: object, accepted: tuple[Any, ...]) -> None:
    # Types are compared, too: 64.0 and True equal accepted ints, but would reach templates and names as what they are.
    if type(value) is not type(accepted[0]) or value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(str, accepted))}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ReplaySpec:
    """What every family shares.

    Parameters
    ----------
    heads : int
        Heads on this rank (value heads in Gated DeltaNet and KDA).
    head_dim : int
        Rows of one head's state (P, or V).
    state_dim : int
        Columns of one head's state (N, or K).
    buffer_len : int
        L, the most history a slot may hold before it is folded; 1 to 64.
    max_tokens : int
        T_max, the most new tokens a row may bring to a step; 1 to min(16, buffer_len).
    dtype : torch.dtype
        Activation dtype: bfloat16, float16 or float32.
    checkpoint_dtype, read_dtype : torch.dtype
        Precision of the checkpoint and of what ordinary steps read of it. Equal dtypes mean one plane (float32, bfloat16,
        float16, int8, float8_e4m3fn). float32 with bfloat16 means two 16-bit planes that together are the exact float32,
        int16 with int8 the same one size down; float32 with int8 or float8_e4m3fn a separate copy for reading. 8-bit planes
        have one float32 scale a row of the state.
    rounding : {"nearest", "stochastic"}
        How a flush rounds to a checkpoint narrower than float32. Stochastic rounding draws from the slot's seed and position.

    Raises
    ------
    ValueError
        A value is outside what the kernels accept; the message names the argument.
    """

    heads: int
    head_dim: int
    state_dim: int
    buffer_len: int = 16
    max_tokens: int = 1
    dtype: torch.dtype = torch.bfloat16
    checkpoint_dtype: torch.dtype = torch.float32
    read_dtype: torch.dtype = torch.bfloat16
    rounding: str = "nearest"

    family: ClassVar[str]
    rings: ClassVar[tuple[Ring, ...]]
    inputs: ClassVar[tuple[Input, ...]]
    weights: ClassVar[tuple[Weight, ...]]
    head_dims: ClassVar[tuple[int, ...]]
    state_dims: ClassVar[tuple[int, ...]]

    def __post_init__(self) -> None:
        _positive("heads", self.heads)
        _one_of("head_dim", self.head_dim, self.head_dims)
        _one_of("state_dim", self.state_dim, self.state_dims)
        _positive("buffer_len", self.buffer_len)
        _positive("max_tokens", self.max_tokens)
        if self.buffer_len > MAX_BUFFER_LEN:
            raise ValueError(f"buffer_len must be at most {MAX_BUFFER_LEN}, got {self.buffer_len}")
        if self.max_tokens > min(MAX_TOKENS, self.buffer_len):
            raise ValueError(f"max_tokens must be at most min({MAX_TOKENS}, buffer_len={self.buffer_len}), got {self.max_tokens}")
        _one_of("dtype", self.dtype, ACTIVATIONS)
        if (self.checkpoint_dtype, self.read_dtype) not in tuple(STATE_FORMATS):  # a tuple asks for no hash
            pairs = ", ".join(f"{c}/{r}" for c, r in STATE_FORMATS)
            raise ValueError(f"checkpoint_dtype/read_dtype must be one of {pairs}, got {self.checkpoint_dtype}/{self.read_dtype}")
        _one_of("rounding", self.rounding, ROUNDINGS)
        if self.stochastic and self.checkpoint_dtype is torch.float32:
            raise ValueError("rounding='stochastic' needs a checkpoint_dtype narrower than float32, which is stored exactly")

    # ---- shapes -------------------------------------------------------------------------------------------------

    @property
    def groups_(self) -> int:
        """G: groups (Mamba-2) or key heads (Gated DeltaNet, KDA)."""
        raise NotImplementedError

    @property
    def ring_len(self) -> int:
        """R = L + T_max, the physical length of the ring."""
        return self.buffer_len + self.max_tokens

    @property
    def state_format(self) -> str:
        """Name of the checkpoint's format."""
        return STATE_FORMATS[self.checkpoint_dtype, self.read_dtype]

    @property
    def scaled(self) -> bool:
        """Whether the read plane has 8 bits, and so a scale a row of the state."""
        return self.read_dtype.itemsize == 1

    @property
    def copied(self) -> bool:
        """Whether steps read a copy beside the checkpoint, instead of the checkpoint or its upper plane."""
        return self.scaled and self.checkpoint_dtype is torch.float32

    @property
    def two_planes(self) -> bool:
        """Whether steps read the upper plane of a checkpoint."""
        return not self.copied and self.checkpoint_dtype is not self.read_dtype

    @property
    def stochastic(self) -> bool:
        """Whether a flush rounds stochastically."""
        return self.rounding == "stochastic"

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes by dimension letter."""
        return {"H": self.heads, "G": self.groups_, "P": self.head_dim, "N": self.state_dim, "R": self.ring_len}

    def shape(self, *letters: str | None) -> tuple[int, ...]:
        """Sizes of the named dimensions; None is dropped."""
        return tuple(self.dims[letter] for letter in letters if letter is not None)

    def dtype_of(self, declared: str) -> torch.dtype:
        """Resolve the dtype that a ring or an input declares."""
        if declared == "activation":
            return self.dtype
        if declared == "fp32":
            return torch.float32
        value = getattr(self, declared)
        assert isinstance(value, torch.dtype)
        return value

    # ---- cache tensors ------------------------------------------------------------------------------------------

    @cached_property
    def cache_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every cache tensor of one layer: name -> (shape after the slot dimension, dtype)."""
        tensors = self.state_tensors
        for ring in self.rings:
            tensors[f"ring_{ring.name}"] = (self.shape(ring.outer, "R", ring.inner), self.dtype_of(ring.dtype))
        return tensors

    @property
    def state_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Those of ``cache_tensors`` that hold the checkpoint: ``state``, and what goes with it."""
        tensors = {"state": (self.shape("H", "P", "N"), self.checkpoint_dtype)}
        if self.copied:
            tensors["read_copy"] = (self.shape("H", "P", "N"), self.read_dtype)
        if self.scaled:
            tensors["scale"] = (self.shape("H", "P"), torch.float32)
        return tensors

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes of cache that one slot takes in one layer; cursors, a few bytes a slot and cache, are not counted."""
        return sum(_numel(shape) * dtype.itemsize for shape, dtype in self.cache_tensors.values())

    @cached_property
    def cursors(self) -> dict[str, torch.dtype]:
        """Cursors ``[slots]`` of a cache, shared by its layers; reset and load set all of them."""
        cursors = {"ring_start": torch.int32, "history": torch.int32, "position": torch.int64}
        return cursors | {"seed": torch.int64} if self.stochastic else cursors

    @property
    def step_cursors(self) -> tuple[str, ...]:
        """Those that a step reads."""
        return tuple(name for name in self.cursors if self.stochastic or name != "position")

    # ---- traffic ------------------------------------------------------------------------------------------------

    @property
    def state_elements(self) -> int:
        """Elements of one slot's state in one layer."""
        return self.heads * self.head_dim * self.state_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot's checkpoint in one layer, with its scales and read copy."""
        return sum(_numel(shape) * dtype.itemsize for shape, dtype in self.state_tensors.values())

    def ring_bytes_per_token(self) -> int:
        """Bytes of one ring entry that an ordinary step reads, all heads of one layer."""
        return sum(
            _numel(self.shape(r.outer, r.inner)) * self.dtype_of(r.dtype).itemsize for r in self.rings if r.name not in self.fold_only_rings
        )

    fold_only_rings: ClassVar[frozenset[str]] = frozenset()

    def step_bytes(self, tokens: int, history: float, flush_share: float) -> float:
        """Average cache bytes that one row of one layer moves in a step (inputs and outputs not counted).

        Parameters
        ----------
        tokens : int
            New tokens of the row.
        history : float
            Mean history in the ring.
        flush_share : float
            Share of steps that flush: they read and write the whole checkpoint, with its scales and read copy.

        Returns
        -------
        float
            Bytes read plus bytes written.
        """
        whole = self.state_bytes
        read = self.state_elements * self.read_dtype.itemsize + (self.heads * self.head_dim * 4 if self.scaled else 0)
        all_ring = sum(_numel(self.shape(r.outer, r.inner)) * self.dtype_of(r.dtype).itemsize for r in self.rings)
        state = (1 - flush_share) * read + flush_share * 2 * whole
        ring = self.ring_bytes_per_token() * history + all_ring * tokens
        return state + ring

    def standard_step_bytes(self, tokens: int = 1) -> float:
        """Bytes of state that the standard recurrence moves for one row and layer: one read, one written snapshot a token."""
        return self.state_bytes * (1 + tokens)

    # ---- in words -----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Family and fields as JSON values; :func:`spec_from` reads them back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"family": self.family} | {name: DTYPE_NAMES[v] if isinstance(v, torch.dtype) else v for name, v in values.items()}

    # ---- kernels ------------------------------------------------------------------------------------------------

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of this specialization."""
        return {
            "family": self.family,
            "head_dim": self.head_dim,
            "state_dim": self.state_dim,
            "heads_per_group": self.heads // self.groups_,
            "buffer_len": self.buffer_len,
            "max_tokens": self.max_tokens,
            "dtype": DTYPE_NAMES[self.dtype],
            "state_format": self.state_format,
            "stochastic": self.stochastic,
        }

    @cached_property
    def step_params(self) -> ParamStruct:
        """Parameters of the step kernel: decode, verification and flush."""
        tokens = (*(i.name for i in self.inputs), "out")
        return ParamStruct.of(
            ptr=(
                *self.cache_tensors,
                *tokens,
                *(w.name for w in self.weights),
                *("slots", "order", "num_tokens", "cu_seqlens", "parents", *self.step_cursors),
            ),
            i64=(
                *(f"{name}_slot" for name in self.cache_tensors),
                *(f"{name}_{axis}" for name in tokens for axis in ("row", "token", "outer")),
            ),
            # keep_padding leaves the outputs of padding rows as they are, instead of zero; what splits are is said in tactics.py.
            i32=(
                *("rows", "tokens", "num_heads", "num_slots", "pad_slot", "keep_padding", "aligned", "threads", "layer"),
                *("heads_per_block", "splits", "plain_splits", "divided"),
            ),
        )

    @cached_property
    def layer_params(self) -> ParamStruct:
        """What the cache knows of one layer: its tensors and weights. A fold reads a table of these, one a layer."""
        return ParamStruct.of(
            ptr=(*self.cache_tensors, *(w.name for w in self.weights)),
            i64=tuple(f"{name}_slot" for name in self.cache_tensors),
            name="Layer",
        )

    @cached_property
    def fold_params(self) -> ParamStruct:
        """Parameters of the fold kernel, which brings slots of all layers to given positions.

        Row r folds ``slots[r]`` up to ``positions[r]`` and leaves the state in element ``targets[r]`` of ``out[layer]``: a slot of
        the cache itself where ``out_dtype`` is 0.
        """
        return ParamStruct.of(
            ptr=("layers", "slots", "positions", "targets", *self.cursors, "error", f"out[{FOLD_LAYERS}]"),
            i64=("out_row", "out_head", "out_p", "out_n"),
            i32=("rows", "num_heads", "first_layer", "num_layers", "out_dtype", "threads"),
            tables=(self.layer_params,),
        )

    @cached_property
    def standard_params(self) -> ParamStruct:
        """Parameters of the standard kernel, which reads and writes the state at every token.

        Row r reads its state from ``slots[r]`` and writes the state after token t to ``write_slots[r, t]``.
        """
        tokens = (*(i.name for i in self.inputs), "out")
        return ParamStruct.of(
            ptr=(*self.state_tensors, *tokens, *(w.name for w in self.weights), "slots", "write_slots"),
            i64=(
                *(f"{name}_slot" for name in self.state_tensors),
                *(f"{name}_{axis}" for name in tokens for axis in ("row", "token", "outer")),
            ),
            i32=("rows", "tokens", "num_heads", "pad_slot", "aligned", "heads_per_block", "threads"),
        )

    def module(self, kind: str, backend: str) -> ModuleSpec:
        """Describe the module that runs a kernel of this spec.

        Parameters
        ----------
        kind : {"step", "tree", "fold", "standard"}
            ``step`` is decode, verification and flush; ``tree`` the same where a row's new tokens are nodes of a tree; ``fold`` brings
            slots to a position outside a step; ``standard`` is the recurrence that rewrites its state every token.
        backend : {"cuda", "cpu"}
            Where it runs.

        Returns
        -------
        ModuleSpec
            What :func:`replayssm_jit.jit.load` takes.
        """
        # A fold reads the rings, not the inputs: how those are given does not concern it.
        constants = ReplaySpec.constants(self) if kind == "fold" else self.constants()
        if kind == "standard":
            _one_of("read_dtype (the standard kernel has one plane)", self.read_dtype, (self.checkpoint_dtype,))
            for name in ("buffer_len", "max_tokens", "stochastic"):
                del constants[name]
            params = self.standard_params
        else:
            params = self.fold_params if kind == "fold" else self.step_params
            constants["tree"] = kind == "tree"
            if backend == "cuda":
                constants |= tactics.constants(self, kind)
        return ModuleSpec(
            name=ReplaySpec.module_name(self, kind) if kind == "fold" else self.module_name(kind),
            template=f"{backend}/{self.family}_{'step' if kind == 'tree' else kind}",
            backend=backend,
            params=params,
            constants=tuple(sorted(constants.items())),
        )

    def module_name(self, kind: str) -> str:
        """Name of a module for humans: family, kind, shape, precision."""
        ring = f"_l{self.buffer_len}_t{self.max_tokens}" if kind != "standard" else ""
        ratio = self.heads // self.groups_
        state = self.state_format + ("_stochastic" if kind != "standard" and self.stochastic else "")
        return f"{self.family}_{kind}_p{self.head_dim}_n{self.state_dim}_g{ratio}{ring}_{DTYPE_NAMES[self.dtype]}_{state}"


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(ReplaySpec):
    """Mamba-2 (state space duality).

    ``d = softplus(dt + dt_bias)``, ``S <- exp(A d) S + d x B^T``, ``y = S C + D x``, then optionally ``y *= silu(z)``.
    Source: Dao and Gu, "Transformers are SSMs", 2024, the recurrent form.

    Parameters
    ----------
    groups : int
        Groups of heads that share B and C; must divide ``heads``.
    dt_softplus : bool
        Apply softplus to ``dt + dt_bias``.
    dt_dtype : torch.dtype, optional
        Dtype of ``dt``: the activation dtype (default) or float32.
    """

    groups: int = 1
    dt_softplus: bool = True
    dt_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved to the activation dtype

    family: ClassVar[str] = "mamba2"
    head_dims: ClassVar[tuple[int, ...]] = (32, 64, 80, 128)
    state_dims: ClassVar[tuple[int, ...]] = (64, 128, 256)
    rings: ClassVar[tuple[Ring, ...]] = (
        Ring("x", "H", "P", "activation"),
        Ring("b", "G", "N", "activation"),
        Ring("d", "H", None, "fp32"),
    )
    inputs: ClassVar[tuple[Input, ...]] = (
        Input("x", "H", "P", "activation"),
        Input("dt", "H", None, "dt_dtype"),
        Input("B", "G", "N", "activation"),
        Input("C", "G", "N", "activation"),
        Input("z", "H", "P", "activation", optional=True),
    )
    weights: ClassVar[tuple[Weight, ...]] = (
        Weight("A", ("H",)),
        Weight("D", ("H",), optional=True),
        Weight("dt_bias", ("H",), optional=True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("groups", self.groups)
        if self.heads % self.groups:
            raise ValueError(f"groups must divide heads={self.heads}, got {self.groups}")
        if self.dt_dtype is None:
            object.__setattr__(self, "dt_dtype", self.dtype)
        _one_of("dt_softplus", self.dt_softplus, (True, False))
        _one_of("dt_dtype", self.dt_dtype, (self.dtype, torch.float32))

    @property
    def groups_(self) -> int:
        return self.groups

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"dt_softplus": self.dt_softplus, "dt_dtype": DTYPE_NAMES[self.dt_dtype]}

    def module_name(self, kind: str) -> str:
        name = super().module_name(kind)
        if self.dt_dtype is not self.dtype:
            name += f"_dt{DTYPE_NAMES[self.dt_dtype]}"
        return name if self.dt_softplus else name + "_rawdt"


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(ReplaySpec):
    """What Gated DeltaNet and Kimi Delta Attention share: ``u = beta (v - S k)``, ``S <- S + u k^T``, ``y = S q``.

    ``heads`` are value heads, ``head_dim`` is that of values (V), ``state_dim`` that of keys (K).

    Parameters
    ----------
    key_heads : int
        Heads of q and k; must divide ``heads``.
    qk_norm : bool
        L2-normalise q and k in the kernel: ``x / sqrt(sum(x^2) + 1e-6)``.
    scale : float, optional
        Factor of q, ``state_dim ** -0.5`` by default.
    gate : str
        ``"softplus"``: ``g`` holds raw gate logits and the log decay is ``-exp(A_log) softplus(g + dt_bias)``;
        ``"precomputed"``: ``g`` holds the log decay itself, at most 0.
    gate_dtype : torch.dtype, optional
        Dtype of ``g``: by default the activation dtype for logits and float32 for a precomputed decay.
    beta : {"logit", "value"}
        ``beta`` holds logits, to which the kernel applies a sigmoid in float32, or the value itself.
    beta_dtype : torch.dtype, optional
        Dtype of ``beta``: the activation dtype (default) or float32.
    """

    key_heads: int = 1
    qk_norm: bool = True
    scale: float = None  # type: ignore[assignment]  # resolved to state_dim ** -0.5
    gate: str = "softplus"
    gate_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved by the gate's form
    beta: str = "logit"
    beta_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved to the activation dtype

    head_dims: ClassVar[tuple[int, ...]] = (64, 128, 256)
    state_dims: ClassVar[tuple[int, ...]] = (64, 128, 256)
    gates: ClassVar[tuple[str, ...]] = ("softplus", "precomputed")
    fold_only_rings: ClassVar[frozenset[str]] = frozenset({"v", "beta"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("key_heads", self.key_heads)
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads={self.heads}, got {self.key_heads}")
        _one_of("qk_norm", self.qk_norm, (True, False))
        _one_of("gate", self.gate, self.gates)
        _one_of("beta", self.beta, ("logit", "value"))
        defaults = {
            "scale": self.state_dim**-0.5,
            "gate_dtype": torch.float32 if self.gate == "precomputed" else self.dtype,
            "beta_dtype": self.dtype,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not isinstance(self.scale, float) or not 0 < self.scale < float("inf"):
            raise ValueError(f"scale must be a positive float, got {self.scale!r}")
        _one_of("gate_dtype", self.gate_dtype, (self.dtype, torch.float32))
        _one_of("beta_dtype", self.beta_dtype, (self.dtype, torch.float32))

    @property
    def groups_(self) -> int:
        return self.key_heads

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "qk_norm": self.qk_norm,
            "scale": self.scale,
            "gate": self.gate,
            "gate_dtype": DTYPE_NAMES[self.gate_dtype],
            "beta": self.beta,
            "beta_dtype": DTYPE_NAMES[self.beta_dtype],
        }

    def module_name(self, kind: str) -> str:
        parts = [super().module_name(kind), self.gate, DTYPE_NAMES[self.gate_dtype], f"beta{self.beta}", DTYPE_NAMES[self.beta_dtype]]
        if not self.qk_norm:
            parts.append("rawqk")
        if self.scale != self.state_dim**-0.5:
            parts.append(f"scale{self.scale:g}")
        return "_".join(parts)


def _delta_rings(gate_inner: str | None) -> tuple[Ring, ...]:
    # Raw keys stay exact operands and rounding a normalised key would cost accuracy in the state; v and beta let a flush
    # recompute u from the full-precision checkpoint, while ordinary steps read u.
    return (
        Ring("k", "G", "N", "activation"),
        Ring("k_norm", "G", None, "fp32"),
        Ring("v", "H", "P", "activation"),
        Ring("u", "H", "P", "activation"),
        Ring("beta", "H", None, "fp32"),
        Ring("g", "H", gate_inner, "fp32"),
    )


def _delta_inputs(gate_inner: str | None) -> tuple[Input, ...]:
    return (
        Input("q", "G", "N", "activation"),
        Input("k", "G", "N", "activation"),
        Input("v", "H", "P", "activation"),
        Input("g", "H", gate_inner, "gate_dtype"),
        Input("beta", "H", None, "beta_dtype"),
    )


@dataclass(frozen=True, kw_only=True)
class GdnSpec(DeltaSpec):
    """Gated DeltaNet: ``S <- exp(g) S``, then the delta rule; ``g`` is a scalar a value head.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024. The ring keeps raw k with ``1 / sqrt(sum(k^2) + 1e-6)``
    (1 without ``qk_norm``), raw v, u, beta and the log decay g.
    """

    family: ClassVar[str] = "gdn"
    rings: ClassVar[tuple[Ring, ...]] = _delta_rings(None)
    inputs: ClassVar[tuple[Input, ...]] = _delta_inputs(None)
    weights: ClassVar[tuple[Weight, ...]] = (
        Weight("A_log", ("H",), optional=True),
        Weight("dt_bias", ("H",), optional=True),
    )


@dataclass(frozen=True, kw_only=True)
class KdaSpec(DeltaSpec):
    """Kimi Delta Attention: ``S <- S Diag(exp(g))``, then the delta rule; ``g`` has one entry a key channel.

    Source: Kimi Team, "Kimi Linear", 2025. A third form of the gate, ``"lower_bound"``, is
    ``g = lower_bound sigmoid(exp(A_log) (g + dt_bias))``.

    Parameters
    ----------
    lower_bound : float
        The bound of the ``"lower_bound"`` gate, below 0.
    """

    lower_bound: float = -5.0

    family: ClassVar[str] = "kda"
    gates: ClassVar[tuple[str, ...]] = ("softplus", "lower_bound", "precomputed")
    rings: ClassVar[tuple[Ring, ...]] = _delta_rings("N")
    inputs: ClassVar[tuple[Input, ...]] = _delta_inputs("N")
    weights: ClassVar[tuple[Weight, ...]] = (
        Weight("A_log", ("H",), optional=True),
        Weight("dt_bias", ("H", "N"), optional=True),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lower_bound, float) or not float("-inf") < self.lower_bound < 0:
            raise ValueError(f"lower_bound must be a finite float below 0, got {self.lower_bound!r}")

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"lower_bound": self.lower_bound}

    def module_name(self, kind: str) -> str:
        name = super().module_name(kind)
        return name + f"_lb{-self.lower_bound:g}" if self.gate == "lower_bound" else name


SPECS: dict[str, type[ReplaySpec]] = {spec.family: spec for spec in (Mamba2Spec, GdnSpec, KdaSpec)}


def spec_from(description: Mapping[str, Any]) -> ReplaySpec:
    """The spec that :meth:`ReplaySpec.describe` describes.

    Raises
    ------
    ValueError, TypeError
        It describes none.
    """
    values = dict(description)
    family = values.pop("family", None)
    if family not in SPECS:
        raise ValueError(f"family must be one of {', '.join(SPECS)}, got {family!r}")
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return SPECS[family](**{name: dtypes.get(v, v) if name.endswith("dtype") else v for name, v in values.items()})


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out
