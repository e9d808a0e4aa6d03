"""Public kernels that are present, each called as its package documents, on the same tensors as ours.

FlashInfer's modules are used where they are ready (its wheel of modules, or ``flashinfer/data/aot``): building one takes minutes.
Set ``FLASHINFER_DISABLE_JIT=`` (empty) to let it build. Its Gated DeltaNet and KDA kernels for Hopper need the CUTLASS DSL and
are not covered.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
from functools import cache, partial
from typing import Any

import torch
from contenders import DEVICE, Cell, Contender, Launch, Tensors, acceptances, steady, then

from replayssm_jit.traffic import Steady

WINDOW = 16  # FlashInfer's longest

#: Packages that take part, and the module that each is needed for.
PACKAGES = {
    "triton": "triton",
    "flashinfer": "flashinfer.mamba",
    "mamba_ssm": "mamba_ssm.ops.triton.selective_state_update",
    "fla": "fla.ops.kda.fused_recurrent",
}


@cache
def version(package: str) -> str | None:
    """Version of a package; None, and a line that says why, where it cannot be imported."""
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    try:
        if package == "flashinfer":  # modules built where there is no driver do not name the library that they need
            ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        importlib.import_module(PACKAGES[package])
    except Exception as error:  # a package that does not fit the others may raise anything
        print(f"{package} is absent: {error}")
        return None
    return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def of(cell: Cell) -> list[Contender]:
    """Rivals of a cell among the packages present."""
    found: list[Contender] = []
    spec = cell.spec(cell.state)
    moved = cell.rows * spec.standard_step_bytes(cell.tokens)
    one_write = cell.rows * spec.standard_step_bytes()
    if spec.family == "mamba2":
        if cell.tokens == 1 and version("mamba_ssm"):
            found.append(Contender("mamba_ssm", "standard", cell.state, {"Triton": _mamba_standard}, moved))
        if cell.tokens == 1 and version("flashinfer"):
            variants = {name: partial(_flashinfer_standard, algorithm=name) for name in ("simple", "vertical", "horizontal")}
            found.append(Contender("FlashInfer", "standard", cell.state, variants, moved))
        if version("flashinfer"):
            one_plane = cell.spec(cell.state, WINDOW)
            for name, histogram in acceptances(cell.tokens).items():
                phases = steady(WINDOW, cell.tokens, histogram)
                bytes_ = cell.rows * one_plane.step_bytes(cell.tokens, phases.mean_history, phases.flush_share)
                builds = {a: partial(_flashinfer_replay, phases=phases, algorithm=a) for a in ("monolith", "two-kernel")}
                found.append(Contender("FlashInfer", "replay", cell.state, builds, bytes_, WINDOW, name))
    elif version("fla"):
        layouts = {"V first": True, "K first": False}
        if spec.family == "kda":
            builds = {name: partial(_fla_kda, v_first=v_first) for name, v_first in layouts.items()}
            found.append(Contender("fla", "standard" if cell.tokens == 1 else "snapshots", cell.state, builds, moved))
        else:
            builds = {f"in place, {name}": partial(_fla_gdn_in_place, v_first=v_first) for name, v_first in layouts.items()}
            builds["as published"] = _fla_gdn
            found.append(Contender("fla", "standard" if cell.tokens == 1 else "last state", cell.state, builds, one_write))
    return found


# ---- Mamba-2 --------------------------------------------------------------------------------------------------------


def _mamba_weights(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A, D and dt_bias as views that repeat a head's value, which is how these packages are told that it is one."""
    spec, weights = tensors.spec, tensors.weights
    return {
        "A": weights["A"][:, None, None].expand(spec.shape("H", "P", "N")),
        **{name: weights[name].to(dtype)[:, None].expand(spec.shape("H", "P")) for name in ("D", "dt_bias")},
    }


def _mamba_inputs(tensors: Tensors, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**given, "dt": given["dt"][..., None].expand(given["x"].shape)}


def _one_token(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[:, 0] for name, tensor in given.items()}


def _mamba_standard(tensors: Tensors) -> list[Launch]:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    weights = _mamba_weights(tensors, torch.float32)
    state = tensors.states().view(*tensors.slots.shape, *tensors.spec.shape("H", "P", "N"))
    return [
        partial(selective_state_update, mine, **_one_token(_mamba_inputs(tensors, given)), **weights, dt_softplus=True)
        for mine, given in zip(state, tensors.inputs, strict=True)
    ]


def _flashinfer_standard(tensors: Tensors, algorithm: str) -> list[Launch]:
    from flashinfer.mamba import selective_state_update

    weights = _mamba_weights(tensors, tensors.spec.dtype)
    state = tensors.states()
    launches: list[Launch] = []
    for slots, given, out in zip(tensors.slots, tensors.inputs, tensors.outputs(), strict=True):
        arguments = {**_one_token(_mamba_inputs(tensors, given)), **weights, "state_batch_indices": slots, "out": out[:, 0]}
        launches.append(partial(selective_state_update, state, **arguments, dt_softplus=True, algorithm=algorithm))
    return launches


def _flashinfer_replay(tensors: Tensors, phases: Steady, algorithm: str) -> list[Launch]:
    from flashinfer.mamba import allocate_checkpointing_ssu_scratch, checkpointing_ssu

    spec, rows, tokens = tensors.spec, tensors.cell.rows, tensors.cell.tokens
    count, ring_len = tensors.slots.numel(), WINDOW + tokens
    like = {"dtype": spec.dtype, "device": DEVICE}
    cache = {
        "state": tensors.states(),
        "x_cache": torch.empty(count, spec.heads, ring_len, spec.head_dim, **like).normal_(),
        "B_cache": torch.empty(count, spec.groups_, ring_len, spec.state_dim, **like).normal_(),
        "dt_cache": torch.empty(count, spec.heads, ring_len, device=DEVICE).uniform_(0.0, 0.1),
        "ring_start": torch.randint(ring_len, (count,), dtype=torch.int32, device=DEVICE),
        "prev_num_accepted_tokens": tensors.histories(phases),
        **_mamba_weights(tensors, spec.dtype),
    }
    if algorithm == "two-kernel":
        scratch = allocate_checkpointing_ssu_scratch(rows, spec.heads, tokens, WINDOW, spec.dtype, DEVICE)
        cache |= zip(("cb_scaled", "cumAdt_vec", "cb_old"), scratch, strict=True)
    launches: list[Launch] = []
    for slots, given, out in zip(tensors.slots, tensors.inputs, tensors.outputs(), strict=True):
        arguments = {**cache, **_mamba_inputs(tensors, given), "state_batch_indices": slots, "out": out}
        launches.append(partial(checkpointing_ssu, **arguments, dt_softplus=True, algorithm=algorithm))
    return launches


# ---- Gated DeltaNet, KDA --------------------------------------------------------------------------------------------


def _fla_state(tensors: Tensors, copies: int, v_first: bool) -> torch.Tensor:
    """States of all slots in one of the package's layouts; their values do not matter."""
    state = tensors.states(copies)
    return state if v_first else state.view(len(state), *tensors.spec.shape("H", "N", "P"))


def _fla_kda(tensors: Tensors, v_first: bool) -> list[Launch]:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    spec: Any = tensors.spec
    rows, tokens = tensors.cell.rows, tensors.cell.tokens
    fixed = {
        **tensors.weights,
        "initial_state": _fla_state(tensors, tokens, v_first),
        "state_v_first": v_first,
        "num_accepted_tokens": None if tokens == 1 else torch.full((rows,), tokens, dtype=torch.int32, device=DEVICE),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": spec.lower_bound if spec.gate == "lower_bound" else None,
    }
    launches: list[Launch] = []
    for places, given, out in zip(tensors.snapshots(), tensors.inputs, tensors.outputs(), strict=True):
        run = partial(fused_recurrent_kda_fwd, **given, **fixed, ssm_state_indices=places, inplace_final_state=True, out=out)
        launches.append(partial(then, run, out))
    return launches


def _fla_gdn_in_place(tensors: Tensors, v_first: bool) -> list[Launch]:
    """The package's kernel with its final state over the initial one, which is how engines that derive from it run it."""
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd_kernel as kernel

    spec: Any = tensors.spec
    rows, tokens, block = tensors.cell.rows, tensors.cell.tokens, 8
    state = _fla_state(tensors, 1, v_first)
    state = state.view(*tensors.slots.shape, *state.shape[1:])
    run = partial(
        kernel[(-(-spec.head_dim // block) * rows * spec.heads,)],
        **tensors.weights,
        gk=None,
        gv=None,
        cu_seqlens=None,
        scale=spec.scale,
        T=tokens,
        H=spec.key_heads,
        HV=spec.heads,
        K=spec.state_dim,
        V=spec.head_dim,
        BK=spec.state_dim,
        BV=block,
        IS_BETA_HEADWISE=True,
        USE_QK_L2NORM_IN_KERNEL=True,
        APPLY_BETA_SIGMOID=True,
        ALLOW_NEG_EIGVAL=False,
        STATE_V_FIRST=v_first,
        num_warps=1,
        num_stages=3,
    )
    launches: list[Launch] = []
    for mine, given, out in zip(state, tensors.inputs, tensors.outputs(), strict=True):
        launches.append(partial(then, partial(run, **given, o=out, h0=mine, ht=mine), out))
    return launches


def _fla_gdn(tensors: Tensors) -> list[Launch]:
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd

    spec: Any = tensors.spec
    state = tensors.states().view(*tensors.slots.shape, *spec.shape("H", "P", "N"))
    options = dict.fromkeys(("output_final_state", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"), True)

    def run(**arguments: Any) -> torch.Tensor:
        return fused_recurrent_gated_delta_rule_fwd(**arguments, **tensors.weights, **options, scale=spec.scale)[0]

    return [partial(run, **given, initial_state=mine) for mine, given in zip(state, tensors.inputs, strict=True)]
