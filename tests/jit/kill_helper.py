"""Kill processes in the middle of a build, and see that the next one works at once.

``python kill_helper.py TEMPLATES BACKEND MODE COUNT SEED`` prints one JSON line. It forks its victims, so that neither they nor
their successors pay for imports, and their whole life is the build. MODE:

random
    kill -9 at a random moment of a build, until COUNT victims died of it
steps
    kill -9 before and after the k-th operation on the disk, for every k; a write dies half done
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import jinja2  # noqa: F401  # paid for once, before any fork
import ninja  # noqa: F401
from jit_helpers import answer, module, use_templates

from replayssm_jit import jit
from replayssm_jit.jit import host, store

OPERATIONS = ("mkdir", "rename", "replace", "fsync", "open", "close", "rmdir", "unlink", "listdir")


def fork(work, *arguments):
    """Run ``work`` in a child; 0 is success."""
    child = os.fork()
    if child:
        return child
    try:
        code = 0 if work(*arguments) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 2
    os._exit(code)


def build(addend):
    """Build one module and try it."""
    if BACKEND == "cpu":
        return answer(jit.load(module("cpu", addend))) == 100 + addend
    entry = jit.compile(module("cuda", addend), "sm_90")
    return entry.binary[:4] == b"\x7fELF" and entry.meta["constants"] == {"addend": addend}


def die_at(addend, step, after):
    """Build one module, and die before or after one operation on the disk, if there are that many."""
    done = 0

    def reached():
        nonlocal done
        done += 1
        return done == step

    def deadly(real):
        def operation(*arguments, **keywords):
            now = reached()
            if now and not after:
                die()
            result = real(*arguments, **keywords)
            if now:
                die()
            return result

        return operation

    def deadly_write(path, content):
        if reached():
            with open(path, "wb") as file:
                file.write(content if after else content[: len(content) // 2])
            die()
        write(path, content)

    for name in OPERATIONS:
        setattr(os, name, deadly(getattr(os, name)))
    write, store._write = store._write, deadly_write
    return build(addend)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def randomly(count, rng):
    """Victims die at a random moment of a build."""
    life = min(survived(addend)[1] for addend in range(3))
    rounds, killed, worked, slowest = 0, 0, 0, 0.0
    while killed < count:
        rounds += 1
        victim = fork(build, 100 + rounds)
        time.sleep(rng.uniform(0, life))
        os.kill(victim, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(victim, 0)[1])
        good, seconds = survived(100 + rounds)
        worked, slowest = worked + good, max(slowest, seconds)
    return {"rounds": rounds, "killed": killed, "worked": worked, "slowest": slowest}


def stepwise():
    """Victims die at every operation in turn, until one lives."""
    rounds, killed, worked, slowest = 0, 0, 0, 0.0
    for after in (False, True):
        for step in range(1, 1000):
            rounds += 1
            died = os.WIFSIGNALED(os.waitpid(fork(die_at, rounds, step, after), 0)[1])
            good, seconds = survived(rounds)
            killed, worked, slowest = killed + died, worked + good, max(slowest, seconds)
            if not died:
                break
    return {"rounds": rounds, "killed": killed, "worked": worked, "slowest": slowest}


def survived(addend):
    """Whether the next process builds the module, and how long that took."""
    started = time.monotonic()
    status = os.waitpid(fork(build, addend), 0)[1]
    return status == 0, time.monotonic() - started


def main(home, backend, mode, count, seed):
    """Run one mode."""
    global BACKEND
    BACKEND = backend
    use_templates(home)
    if backend == "cpu":
        host.version()  # remembered by every child
    else:
        import cuda.bindings.nvrtc  # noqa: F401
    told = randomly(int(count), random.Random(int(seed))) if mode == "random" else stepwise()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
