"""Runs the CUDA kernels without a GPU: rendered source -> C++ against ``emulator.h`` -> a module of the host.

What it tells: a kernel's results, its barriers and the lanes of its collectives, races that change bits (run it with two seeds),
missing waits and misaligned vector accesses. What it does not: speed, registers, memory ordering, accesses out of bounds.

``emulated`` is a context in which caches on the CPU run the CUDA backend; ``pytest --emulate SEED`` puts tests into it. An instruction
that a kernel newly uses needs a function in ``emulator.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from replayssm_jit import kernels
from replayssm_jit.jit import env, host, render
from replayssm_jit.jit.module import ModuleSpec

_HEADER = (Path(__file__).parent / "emulator.h").read_text()
_ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\s*;")
_OPERAND = re.compile(r'"[+=]?[a-z]"\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')
_ENTRY = """
static Params emulated_params;
extern "C" void emulate(const Params* params, const unsigned* grid, unsigned threads, unsigned shared, unsigned seed) {
  emulated_params = *params;
  emulator::body = [] { kernel(emulated_params); };
  emulator::launch({grid[0], grid[1], grid[2]}, threads, shared, seed);
}
"""
#: Shared memory that a block of Hopper may take.
MAX_DYNAMIC_SMEM = 227 << 10


def translate(source: str, arch: int = 900) -> str:
    """C++ of a rendered CUDA source: every PTX statement becomes a call, ``asm("op.x %0;" : "=r"(a) : "r"(b))`` -> ``ptx_op_x(a, b);``."""

    def call(match: re.Match[str]) -> str:
        statement = match[1]
        instruction = statement.split('"')[1].split()[0].rstrip(";")
        # A list of sections: outputs, inputs, clobbers. Operands that are both stand once, as outputs.
        operands = ", ".join(_OPERAND.findall(statement))
        return f"ptx_{re.sub('[^A-Za-z0-9]+', '_', instruction)}({operands});"

    body = _ASM.sub(call, source)
    body = re.sub(r"extern __shared__ __align__\(16\) char (\w+)\[\];", r"char* \1 = emulator::shared_base();", body)
    return f"#define EMULATED_ARCH {arch}\n{_HEADER}\n{body}\n{_ENTRY}"


class EmulatedKernel:
    """What :class:`replayssm_jit.jit.driver.CudaKernel` is on a device."""

    max_dynamic_smem = MAX_DYNAMIC_SMEM

    def __init__(self, module: ModuleSpec) -> None:
        self.module, self.seed = module, 0
        self._function = build(translate(render.render(module)), module.name)

    def launch(self, address: int, grid: tuple[int, int, int], block: int, smem: int, stream: int = 0, overlap: bool = False) -> None:
        self._function(ctypes.c_void_p(address), (ctypes.c_uint * 3)(*grid), block, smem, self.seed)


def build(source: str, name: str) -> ctypes._CFuncPtr:
    options = ["-O2", "-g1", "-std=c++20", "-fPIC", "-shared", "-march=native", "-ffp-contract=off", "-w", "-fno-strict-aliasing"]
    digest = hashlib.sha256("\0".join([source, *options, host.version()]).encode()).hexdigest()[:16]
    path = Path(env.cache_dir() or ".") / "emulated" / f"{name}-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(host.compile(name, source, options).binary)
        partial.rename(path)
    return ctypes.CDLL(str(path)).emulate


@contextlib.contextmanager
def emulated(seed: int = 0) -> Iterator[None]:
    """Within it, tensors on the CPU are served by the CUDA backend; ``seed`` draws the order of blocks, warps and lanes."""
    before = kernels.backend_of, kernels.load

    @functools.cache
    def load(module: ModuleSpec, device: object) -> EmulatedKernel:
        kernel = EmulatedKernel(module)
        kernel.seed = seed
        return kernel

    kernels.backend_of, kernels.load = (lambda device: "cuda"), load
    try:
        yield
    finally:
        kernels.backend_of, kernels.load = before
