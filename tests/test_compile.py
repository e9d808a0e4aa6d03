"""Every default specialization compiles for every architecture, without a GPU, and keeps to its registers."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from harness import DELTA, FAMILIES, FORMATS, small_spec, with_format

from replayssm_jit import jit, models, tactics
from replayssm_jit.jit.module import ModuleSpec
from replayssm_jit.kernels import COMPACT_PARAMS, CURSOR_PARAMS

ARCHS = ("sm_80", "sm_90", "sm_100f", "sm_120f")


def compiled(specs, kind="step"):
    """Compile specs for every architecture, two at a time; resources by spec and architecture."""
    jobs = [(spec, arch) for spec in specs for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        entries = list(pool.map(lambda job: jit.compile(job[0].module(kind, "cuda"), job[1]), jobs))
    return {(entry.name, arch): entry.resources for (_, arch), entry in zip(jobs, entries, strict=True)}


def judge(resources):
    spilled = [f"{name} for {arch}: {r}" for (name, arch), r in resources.items() if r.spill_stores or r.spill_loads or r.stack]
    assert not spilled, "\n".join(spilled)
    assert all(0 < r.registers <= 255 for r in resources.values())


def model_specs():
    """One spec a kind of kernel among the published models, default options.

    The ratio of heads to groups only scales addresses, so large ratios share one.
    """
    distinct = {}
    for name, model in models.published().items():
        if model.family in FAMILIES:
            spec = model.spec(buffer_len=16)
            ratio = min(16 if model.family == "mamba2" else 2, spec.heads // spec.groups_)
            kind = (*sorted((k, v) for k, v in spec.constants().items() if k != "heads_per_group"), ratio)
            distinct.setdefault(kind, (name, spec))
    return dict(distinct.values())


MODELS = model_specs()


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Plain decode and drafts."""
    spec = MODELS[name]
    judge(compiled([spec, replace(spec, max_tokens=4)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_formats(family):
    """One plane and two, every activation dtype."""
    dtypes = [("fp32", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32_bf16", torch.float16)]
    judge(compiled([small_spec(family, buffer_len=16, dtype=dtype, **with_format(name)) for name, dtype in dtypes]))


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_formats(family):
    """8-bit planes, copies and stochastic rounding, in steps and in folds."""
    options = [with_format(name) for name in ("int16_int8", "fp8", "fp32_int8")]
    options += [{"rounding": "stochastic", **with_format(name)} for name in ("bf16", "int8")]
    specs = [small_spec(family, buffer_len=16, **chosen) for chosen in options]
    judge(compiled(specs[:1], "fold"))
    specs += [small_spec(family, buffer_len=16, max_tokens=1, state_dim=width, **with_format("int16_int8")) for width in (64, 128, 256)]
    judge(compiled(specs))
    judge(compiled([small_spec(family, **with_format("int8"))], "standard"))


@pytest.mark.parametrize("family", FAMILIES)
def test_windows(family):
    judge(compiled([small_spec(family, buffer_len=length, max_tokens=t) for length, t in ((16, 8), (32, 4), (64, 1))]))


@pytest.mark.parametrize("family", FAMILIES)
def test_trees(family):
    windows = [small_spec(family, buffer_len=length, max_tokens=t) for length, t in ((16, 4), (16, 16), (64, 8))]
    formats = [("fp32", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
    specs = [small_spec(family, buffer_len=16, max_tokens=8, dtype=dtype, **with_format(name)) for name, dtype in formats]
    judge(compiled(windows + specs, "tree"))


def test_commit():
    """The kernels of every commit: cursors, and the entries of a path."""
    kernels = {"cursors": CURSOR_PARAMS, "compact": COMPACT_PARAMS}
    modules = [ModuleSpec(name, f"cuda/{name}", "cuda", params, ()) for name, params in kernels.items()]
    judge({(module.name, arch): jit.compile(module, arch).resources for module in modules for arch in ARCHS})


@pytest.mark.parametrize("family", FAMILIES)
def test_folds(family):
    """Windows, formats and shapes; a fold is another kernel than the step's."""
    shapes = [((16, 4), "fp32_bf16", {"head_dim": 128}), ((32, 4), "bf16", {}), ((16, 4), "fp32_bf16", {"head_dim": 128, "state_dim": 256})]
    shapes += [((64, 16), "fp32", {"dtype": torch.float32}), ((8, 4), "fp16", {"dtype": torch.float16})]
    specs = [small_spec(family, buffer_len=length, max_tokens=t, **with_format(name), **size) for (length, t), name, size in shapes]
    judge(compiled(specs, "fold"))
    for spec in specs:
        assert tactics.fold_smem(spec) <= 227 * 1024


@pytest.mark.parametrize("family", FAMILIES)
def test_standard(family):
    specs = [small_spec(family, **with_format(name)) for name in ("fp32", "bf16")]
    judge(compiled(specs, "standard"))


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_memory(family):
    """Every corner launches on Hopper (227 KiB a block), but for 256 rows or columns of a delta rule; what does not is refused by name."""
    corners = itertools.product(FORMATS, (torch.bfloat16, torch.float32), ((1, 1), (16, 16), (64, 1), (64, 16)))
    family_spec = type(small_spec(family))
    shapes = itertools.product(family_spec.head_dims, family_spec.state_dims)
    for (head_dim, state_dim), (state_format, dtype, (length, t)) in itertools.product(shapes, corners):
        options = {"dtype": dtype, "head_dim": head_dim, "state_dim": state_dim, **with_format(state_format)}
        spec = small_spec(family, heads=32, buffer_len=length, max_tokens=t, **options)
        for rows, limit in itertools.product((1, 16, 512), (227, 163, 99)):
            if tactics.smem_bytes(spec, 1) > limit * 1024:
                assert limit < 227 or (family in DELTA and 256 in (head_dim, state_dim)), f"{spec} does not fit on Hopper"
                with pytest.raises(ValueError, match="shared memory"):
                    tactics.heads_per_block(spec, rows, limit * 1024)
                continue
            heads = tactics.heads_per_block(spec, rows, limit * 1024)
            assert tactics.smem_bytes(spec, heads) <= limit * 1024, f"{spec} at {rows} rows: {heads} heads a block"
