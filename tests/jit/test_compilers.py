"""NVRTC and the host's compiler: what they produce, and how they fail."""

import json
import re
import sys
from pathlib import Path

import pytest
from jit_helpers import answer, fresh, module

from replayssm_jit import jit
from replayssm_jit.jit import host, nvrtc

SPILLING = """{{ params_struct }}
extern "C" __global__ void __launch_bounds__(1024, 2) kernel(const __grid_constant__ Params p) {
  __shared__ float tile[256];
  float v[64];
  const float* in = (const float*)p.input;
  float* out = (float*)p.output;
  tile[threadIdx.x & 255] = in[threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = in[i * 1024 + threadIdx.x] + tile[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = v[i] * v[63 - i] + v[(i * 7) % 64];
}
"""
STACK = """{{ params_struct }}
extern "C" __global__ void kernel(const __grid_constant__ Params p) {
  int v[40];
  for (int i = 0; i < 40; ++i) v[i] = i;
  for (int i = 0; i < p.count; ++i) v[((const int*)p.input)[i]] = v[i] + 1;
  ((int*)p.output)[0] = v[p.count];
  ((int*)p.output)[1] = v[p.count + 1];
}
"""


needs_nvrtc = pytest.mark.skipif(nvrtc.identity() is None, reason="NVRTC is not installed")


def test_host_module_runs(home):
    assert answer(jit.load(module("cpu", 11))) == 111


def test_host_keeps_nan_and_infinity(home):
    (home / "templates/cpu/nan.cpp.jinja").write_text("""{{ params_struct }}
extern "C" void kernel(const Params* p) {
  volatile float zero = 0.0f;
  float nan = zero / zero, inf = 1.0f / zero;
  *(int*)p->output = (nan != nan) + 2 * (inf - 1.0f == inf) + 4 * (-inf < inf) + 8 * !(nan < inf);
}
""")
    assert answer(jit.load(module("cpu", template="nan"))) == 15


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100f", "sm_120f"])
def test_cubin_without_a_gpu(home, arch):
    entry = jit.compile(module("cuda"), arch)
    assert entry.binary[:4] == b"\x7fELF"
    assert entry.meta["arch"] == arch
    assert entry.meta["entry_point"] == "kernel"
    assert entry.meta["params"] == {
        "size": 24,
        "fields": [
            {"name": "input", "type": "ptr", "offset": 0},
            {"name": "output", "type": "ptr", "offset": 8},
            {"name": "count", "type": "i32", "offset": 16},
        ],
    }
    used = entry.resources
    assert 0 < used.registers <= 32
    assert (used.spill_stores, used.spill_loads, used.stack, used.static_smem) == (0, 0, 0, 0)


@needs_nvrtc
def test_spills_stack_and_shared_memory_are_told(home):
    (home / "templates/cuda/spilling.cu.jinja").write_text(SPILLING)
    (home / "templates/cuda/stack.cu.jinja").write_text(STACK)
    spilling = jit.compile(module("cuda", template="spilling"), "sm_80").resources
    assert spilling.registers == 32
    assert spilling.spill_stores > 0
    assert spilling.spill_loads > 0
    assert spilling.static_smem == 1024
    stack = jit.compile(module("cuda", template="stack"), "sm_80").resources
    assert stack.stack >= 160
    assert stack.spill_stores == 0


@needs_nvrtc
def test_family_targets_before_nvrtc_knew_them(monkeypatch):
    opts = nvrtc.options("sm_100f", False)
    monkeypatch.setattr(nvrtc, "_version", lambda: (12, 8))
    assert nvrtc._supported(opts)[0] == "--gpu-architecture=sm_100"
    assert "--no-cache" not in nvrtc._supported(opts)
    monkeypatch.setattr(nvrtc, "_version", lambda: (12, 9))
    assert nvrtc._supported(opts)[0] == "--gpu-architecture=sm_100f"
    assert "--no-cache" in nvrtc._supported(opts)


@needs_nvrtc
def test_resources_are_told_at_every_compile(home, tmp_path):
    """NVRTC may answer from a cache of its own, and says nothing then."""
    for turn in range(3):
        fresh(home, "cuda", 1, REPLAYSSM_CACHE_DIR=str(tmp_path / f"cache{turn}"))
        (meta,) = (json.loads(path.read_text()) for path in tmp_path.glob(f"cache{turn}/*/module.json"))
        assert meta["resources"]["registers"] > 0


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_nvrtc)])
def test_a_refused_source_shows_the_log_and_stays(home, cache, backend):
    path = home / f"templates/{backend}/add.{'cpp' if backend == 'cpu' else 'cu'}.jinja"
    path.write_text(path.read_text() + "\nint broken = undeclared_thing;\n")
    with pytest.raises(jit.CompileError) as raised:
        jit.compile(module(backend), None if backend == "cpu" else "sm_90")
    text = str(raised.value)
    assert text.splitlines()[0].startswith("add_1: ")
    assert "undeclared_thing" in text
    kept = Path(re.search(r"the source is (\S+)\)", text)[1])
    assert "int broken" in kept.read_text()
    assert jit.cache_list() == []


@needs_nvrtc
def test_an_unknown_architecture_is_one_clear_error(home):
    with pytest.raises(jit.CompileError, match=r"^add_1: NVRTC .*--gpu-architecture=sm_12345"):
        jit.compile(module("cuda"), "sm_12345")


@pytest.mark.parametrize(("backend", "arch"), [("cuda", None), ("cuda", ""), ("cpu", "sm_90"), ("metal", None)])
def test_bad_arguments(home, cache, backend, arch):
    with pytest.raises(ValueError, match="arch must be|backend must be"):
        jit.compile(module(backend), arch)
    assert not cache.exists()


def test_missing_host_compiler(home, cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(jit.CompilerNotFoundError, match=r"^the C\+\+ compiler CXX='no-such-compiler' was not found$"):
        jit.load(module("cpu"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(jit.CompilerNotFoundError, match=r"^no C\+\+ compiler"):
        jit.load(module("cpu"))
    assert not cache.exists()


def test_broken_host_compiler(home, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(jit.CompilerNotFoundError, match="false --version does not run"):
        jit.load(module("cpu"))


def test_missing_ninja(home, monkeypatch):
    monkeypatch.setenv("CXX", str(host.compiler()[0]))
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(jit.CompilerNotFoundError, match="^ninja was not found"):
        jit.load(module("cpu"))


def test_missing_cuda_python(home, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc.version.cache_clear()
    with pytest.raises(jit.CompilerNotFoundError, match="^cuda-python is not installed"):
        jit.compile(module("cuda"), "sm_90")
    assert not cache.exists()


@needs_nvrtc
def test_missing_nvrtc(home, cache, monkeypatch):
    """The library is absent; what others compiled is found all the same."""
    found = jit.compile(module("cuda", 1), "sm_90")
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", _absent)
    monkeypatch.setattr(nvrtc, "_wheels", lambda: "")
    nvrtc.version.cache_clear()
    nvrtc.identity.cache_clear()
    try:
        assert jit.compile(module("cuda", 1), "sm_90").directory == found.directory
        with pytest.raises(jit.CompilerNotFoundError, match=r"^NVRTC cannot be loaded \(no libnvrtc\)"):
            jit.compile(module("cuda", 2), "sm_90")
    finally:
        nvrtc.identity.cache_clear()


def _absent():
    raise RuntimeError("no libnvrtc\nanywhere")


def test_compile_many(home, tmp_path):
    sources = [f'extern "C" int kernel(const void*) {{ return {i}; }}' for i in range(5)]
    jobs = [host.Job(f"m{i}", source, host.options("", False)) for i, source in enumerate(sources)]
    compiled = host.compile_many(jobs, 2)
    assert len({c.binary for c in compiled}) == 5
    with pytest.raises(jit.CompileError, match="^m1: "):
        host.compile_many([jobs[0], host.Job("m1", "oops", jobs[0].options)], 2)
    assert host.compile_many([]) == []


def test_cxx_with_arguments(home, monkeypatch):
    monkeypatch.setenv("CXX", f"{host.compiler()[0]} -DUNUSED")
    assert answer(jit.load(module("cpu"))) == 101


def test_line_information_is_its_own_module(home, monkeypatch):
    plain = jit.compile(module("cpu"))
    monkeypatch.setenv("REPLAYSSM_LINEINFO", "1")
    lined = jit.compile(module("cpu"))
    assert lined.directory != plain.directory
    assert b".debug_line" in lined.binary
    assert b".debug_line" not in plain.binary
    assert "-lineinfo" in nvrtc.options("sm_90", True)


def test_another_compiler_is_another_module(home, tmp_path):
    """A changed compiler is noticed by its file; the same compiler under another date compiles nothing again."""
    wrapper = tmp_path / "cxx"
    script = '#!/bin/sh\n[ "$1" = --version ] && echo "mycxx {version}" && exit\nexec g++ "$@"\n'
    wrapper.write_text(script.format(version=1))
    wrapper.chmod(0o755)
    assert fresh(home, "cpu", 1, CXX=str(wrapper))["compiled"] == 1
    wrapper.touch()
    assert fresh(home, "cpu", 1, CXX=str(wrapper))["compiled"] == 0
    wrapper.write_text(script.format(version=2))
    told = fresh(home, "cpu", 1, CXX=str(wrapper))
    assert (told["compiled"], told["answers"]) == (1, [101])
    assert len(jit.cache_list()) == 2


@needs_nvrtc
def test_another_nvrtc_is_another_module(home, tmp_path):
    (tmp_path / "nvidia_cuda_nvrtc-99.9.9.dist-info").mkdir()
    assert fresh(home, "cuda", 1)["compiled"] == 1
    assert fresh(home, "cuda", 1)["compiled"] == 0
    assert fresh(home, "cuda", 1, PYTHONPATH=str(tmp_path))["compiled"] == 1
    assert fresh(home, "cuda", 1, PYTHONPATH=str(tmp_path))["compiled"] == 0
    assert fresh(home, "cuda", 1)["compiled"] == 0
