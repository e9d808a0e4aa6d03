"""Tiny templates, and fresh processes that load modules rendered from them.

``python jit_helpers.py TEMPLATES BACKEND ADDEND...`` loads (cpu) or compiles (cuda) the modules ``add_<addend>`` and
prints one JSON line: what they answer, and what the process did on the way.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

from replayssm_jit import jit
from replayssm_jit.jit import env, render

ROOT = Path(__file__).resolve().parents[2]
PARAMS = jit.ParamStruct.of(ptr=("input", "output"), i32=("count",))

FILES = {
    "templates/cpu/add.cpp.jinja": """{{ params_struct }}
{% include "plus.h" %}
extern "C" void kernel(const Params* p) {
  for (int i = 0; i < p->count; ++i) ((int*)p->output)[i] = plus(((const int*)p->input)[i], {{ addend }});
}
""",
    "templates/cuda/add.cu.jinja": """{{ params_struct }}
{% include "cuda/device.h" %}
{% include "plus.h" %}
extern "C" __global__ void kernel(const __grid_constant__ Params p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  auto add = [&](auto value) { return plus(value, {{ addend }}); };
  if (i < p.count) ((int*)p.output)[i] = add(((const int*)p.input)[i]);
}
""",
    "templates/cuda/device.h": "#define inline __device__ inline\n",
    "csrc/plus.h": "inline int plus(int a, int b) { return a + b; }\n",
}


def write_templates(home: Path) -> Path:
    """Write the tiny templates below a directory."""
    for name, content in FILES.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return home


def module(backend: str, addend: int = 1, template: str = "add") -> jit.ModuleSpec:
    """The module that adds a constant to every element."""
    return jit.ModuleSpec(f"add_{addend}", f"{backend}/{template}", backend, PARAMS, (("addend", addend),))


def answer(kernel: jit.Kernel) -> int:
    """What an addition kernel makes of 100."""
    source, target = (ctypes.c_int * 1)(100), (ctypes.c_int * 1)()
    buffer = PARAMS.buffer()
    PARAMS.pack(buffer, input=ctypes.addressof(source), output=ctypes.addressof(target), count=1)
    kernel.launch(ctypes.addressof(buffer))
    return target[0]


def use_templates(home: str) -> None:
    """Render from other templates in this process."""
    render.source_dirs = lambda: (os.path.join(home, "templates"), os.path.join(home, "csrc"))
    render.digest.cache_clear()


def fresh(home: Path, backend: str, *addends: int, **environment: str) -> dict:
    """Load modules in a fresh process, and wait for it."""
    return finish(start(home, backend, *addends, **environment))


def start(home: Path, backend: str, *addends: int, **environment: str) -> subprocess.Popen:
    """Load modules in a fresh process."""
    command = [sys.executable, __file__, str(home), backend, *map(str, addends)]
    paths = [environment.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> dict:
    """What a process of :func:`start` printed; it must have ended well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{out}\n{err}"
    return json.loads(out.splitlines()[-1])


def main(home: str, backend: str, *addends: str) -> None:
    """What a fresh process does; see the module's docstring."""
    import warnings

    events: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "subprocess.Popen", "fcntl.lockf"):
            events.append(event)
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            events.append("write")

    use_templates(home)
    reports: list[str] = []
    env.report = reports.append
    answers: list[int] = []
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sys.addaudithook(watch)
        for addend in map(int, addends):
            try:
                if backend == "cpu":
                    answers.append(answer(jit.load(module(backend, addend))))
                else:
                    entry = jit.compile(module(backend, addend), "sm_90")
                    answers.append(100 + entry.meta["constants"]["addend"] if entry.binary[:4] == b"\x7fELF" else -1)
            except jit.JitError as error:
                problems.append(f"{type(error).__name__}: {error}")
    loaded = [name for name in ("torch", "jinja2", "cuda.bindings", "ninja", "importlib.metadata") if name in sys.modules]
    told = {"answers": answers, "problems": problems, "warnings": [str(w.message) for w in warned]}
    print(json.dumps({**told, "compiled": sum(r.startswith("compiled") for r in reports), "events": events, "loaded": loaded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
