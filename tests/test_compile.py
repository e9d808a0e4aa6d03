"""Every default specialization compiles for every architecture, without a GPU, and keeps to its registers."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from harness import FAMILIES, FORMATS, small_spec, with_format

from replayssm_jit import jit, models, tactics

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
    """One spec a distinct specialization among the published models, with default options."""
    distinct = {}
    for name, model in models.published().items():
        if model.family in FAMILIES:
            spec = model.spec(buffer_len=16)
            distinct.setdefault(spec.module("step", "cuda"), (name, spec))
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
def test_windows(family):
    judge(compiled([small_spec(family, buffer_len=length, max_tokens=t) for length, t in ((1, 1), (16, 8), (32, 4), (64, 1))]))


@pytest.mark.parametrize("family", FAMILIES)
def test_standard(family):
    specs = [small_spec(family, **with_format(name)) for name in ("fp32", "bf16")]
    judge(compiled(specs, "standard"))


def test_shared_memory_fits():
    """Every corner of what a spec accepts launches on Hopper (227 KiB a block), for small and large batches."""
    shapes = itertools.product((32, 64, 80, 128), (64, 128, 256), FORMATS, (torch.bfloat16, torch.float32))
    for (head_dim, state_dim, state_format, dtype), (length, t) in itertools.product(shapes, ((1, 1), (16, 16), (64, 1), (64, 16))):
        options = {"dtype": dtype, "head_dim": head_dim, "state_dim": state_dim, **with_format(state_format)}
        spec = small_spec("mamba2", heads=16, groups=1, buffer_len=length, max_tokens=t, **options)
        for rows in (1, 16, 512):
            heads = tactics.heads_per_block(spec, rows)
            assert tactics.smem_bytes(spec, heads) <= 227 * 1024, f"{spec} at {rows} rows: {heads} heads a block"
