"""What happens when a module is asked for.

On a hit: a request's digest names a key file, the key file an entry, and the entry is read and verified. Nothing is
rendered and no compiler is loaded. On a miss: render, look the source up by content, compile, publish, and link the
request to the entry.
"""

from __future__ import annotations

import json
import time

from . import env, host, nvrtc, render, scratch
from .errors import CompileError, JitError, ModuleNotBuiltError
from .module import ModuleSpec
from .store import FORMAT, Entry, Store, describe, sha256

_COMPILERS = {"cuda": nvrtc, "cpu": host}
_memory: dict[str, Entry] = {}  # entries that could not be written to disk


def find_or_compile(module: ModuleSpec, arch: str) -> Entry:
    """Find a compiled module, or compile it."""
    compiler = _COMPILERS[module.backend]
    options = compiler.options(arch, env.lineinfo())
    request = _request(module, arch, options)
    for directory in env.extra_cache_dirs():
        entry = Store(directory).find(request, None)
        if entry:
            return _found(entry)
    store = Store(env.cache_dir())
    identity = compiler.identity()
    # Without a compiler of our own any compiler's module will do.
    known = None if identity is None or env.jit_disabled() else sha256(identity.encode())[:16]
    entry = store.find(request, known)
    if entry:
        return _found(entry)
    if env.jit_disabled():
        searched = ", ".join([*env.extra_cache_dirs(), store.root])
        raise ModuleNotBuiltError(
            f"{module.name} for {arch} is in none of {searched} and REPLAYSSM_DISABLE_JIT is set: run once with "
            "REPLAYSSM_DISABLE_JIT=0 where compiling is allowed, and name its cache directory in REPLAYSSM_EXTRA_CACHE_DIRS"
        )
    source, request = _render(module, arch, options)
    version = compiler.version()
    identity = compiler.identity()
    digest = sha256(json.dumps([FORMAT, source, version, options, arch]).encode())
    entry_name = f"{module.name}-{digest[:16]}"
    with store.turn(entry_name):
        entry = store.get(entry_name) or _memory.get(entry_name)
        if entry is None:
            entry = _compile(store, entry_name, module, arch, source, version, options)
    if entry.directory is None:
        _memory[entry_name] = entry
    elif identity is not None:
        store.link(request, sha256(identity.encode())[:16], entry_name)
    return entry


def _compile(store: Store, entry_name: str, module: ModuleSpec, arch: str, source: str, version: str, options: list[str]) -> Entry:
    compiler = _COMPILERS[module.backend]
    suffix = render.SUFFIXES[module.backend]
    started = time.perf_counter()
    try:
        compiled = compiler.compile(module.name, source, options)
    except CompileError as error:
        kept = store.keep_failed(module.name + suffix, source)
        raise CompileError(f"{error}\n(for {arch}; the source is {kept or 'lost: the cache is not writable'})") from None
    except OSError as error:
        raise JitError(f"{module.name}: cannot write the compiler's files: {error}") from error
    env.report(f"compiled {entry_name} for {arch} in {time.perf_counter() - started:.2f} s")
    meta = {
        "name": module.name,
        "template": module.template,
        "backend": module.backend,
        "arch": arch,
        "compiler": version,
        "options": options,
        "constants": dict(module.constants),
        "entry_point": compiler.ENTRY_POINT,
        "params": {"size": module.params.size, "fields": module.params.layout()},
    }
    entry = store.publish(entry_name, describe(meta, source, compiled, suffix), source, compiled.binary)
    store.sweep()
    scratch.sweep(None, scratch.LEFTOVER_SECONDS)
    return entry


def _render(module: ModuleSpec, arch: str, options: list[str]) -> tuple[str, str]:
    """Source and request digest that belong together, though a template be edited meanwhile."""
    while True:
        render.digest.cache_clear()
        request = _request(module, arch, options)
        source = render.render(module)
        render.digest.cache_clear()
        if _request(module, arch, options) == request:
            return source, request


def _request(module: ModuleSpec, arch: str, options: list[str]) -> str:
    return sha256(json.dumps([FORMAT, module.digest, arch, options, render.digest(module.backend)]).encode())[:32]


def _found(entry: Entry) -> Entry:
    env.report(f"found {entry.directory}")
    return entry
