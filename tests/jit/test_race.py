"""Threads and processes that want the same module at once, and locks whose owners do not answer."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from jit_helpers import answer, finish, fresh, module, start

from replayssm_jit import jit
from replayssm_jit.jit import build, nvrtc, store

needs_nvrtc = pytest.mark.skipif(nvrtc.identity() is None, reason="NVRTC is not installed")


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=needs_nvrtc)])
def test_many_processes_on_one_cold_cache(home, backend):
    wanted = [1, 2, 3]
    processes = [start(home, backend, *wanted[i % 3 :], *wanted[: i % 3]) for i in range(8)]
    told = [finish(process) for process in processes]
    assert all(sorted(t["answers"]) == [101, 102, 103] and not t["problems"] and not t["warnings"] for t in told)
    assert 3 <= sum(t["compiled"] for t in told) <= 6
    assert [entry.name for entry in jit.cache_list()] == ["add_1", "add_2", "add_3"]
    assert jit.cache_verify() == []


def test_many_processes_without_locks(home, cache):
    """Where locks do not work, each process compiles, and the first to publish wins."""
    cache.mkdir()
    (cache / ".locks").write_text("no directory, so no locks")
    told = [finish(process) for process in [start(home, "cpu", 1) for _ in range(6)]]
    assert all(t["answers"] == [101] and not t["problems"] and not t["warnings"] for t in told)
    assert len(jit.cache_list()) == 1
    assert jit.cache_verify() == []
    assert fresh(home, "cpu", 1)["compiled"] == 0


def test_many_processes_repair_one_damaged_entry(home, cache):
    fresh(home, "cpu", 1)
    (binary,) = cache.glob("*/*.so")
    binary.write_bytes(b"broken")
    told = [finish(process) for process in [start(home, "cpu", 1) for _ in range(6)]]
    assert all(t["answers"] == [101] and not t["problems"] and not t["warnings"] for t in told)
    assert jit.cache_verify() == []


def test_many_processes_while_others_clear(home, cache):
    processes = [start(home, "cpu", i % 4) for i in range(12)]
    while any(process.poll() is None for process in processes):
        jit.cache_clear()
        time.sleep(0.005)
    told = [finish(process) for process in processes]
    assert all(t["answers"] == [100 + i % 4] and not t["problems"] for i, t in enumerate(told))


def test_threads_share_one_compile_and_one_kernel(home, monkeypatch):
    compiled = []
    real = build._compile
    monkeypatch.setattr(build, "_compile", lambda *arguments: (compiled.append(arguments[1]), real(*arguments))[1])
    gate = threading.Barrier(12)
    kernels: dict[int, jit.Kernel] = {}

    def work(i):
        gate.wait()
        kernels[i] = jit.load(module("cpu", i % 3))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 3
    assert len({id(kernel) for kernel in kernels.values()}) == 3
    assert all(answer(kernels[i]) == 100 + i % 3 for i in range(12))


HOLDER = """
import sys, time
from replayssm_jit.jit.store import Store
with Store(sys.argv[1]).turn(sys.argv[2]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(home, cache):
    """A process that holds the lock of ``add_1``."""
    entry = jit.compile(module("cpu", 1))
    jit.cache_clear()
    paths = [os.path.dirname(os.path.dirname(os.path.dirname(__file__))), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", HOLDER, str(cache), os.path.basename(entry.directory)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_living_owner_is_waited_for(home, holder):
    waiting = start(home, "cpu", 1)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.7)
    holder.kill()
    assert finish(waiting)["answers"] == [101]


def test_a_killed_owner_holds_nothing(home, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    started = time.monotonic()
    assert fresh(home, "cpu", 1)["answers"] == [101]
    assert time.monotonic() - started < 20


def test_a_stopped_owner_is_waited_for_a_bounded_time(home, holder, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.2)
    holder.send_signal(signal.SIGSTOP)
    assert answer(jit.load(module("cpu", 1))) == 101


def test_a_reader_never_waits(home, holder, cache, monkeypatch):
    """The entry is there already: nobody asks for the lock."""
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.0)
    jit.compile(module("cpu", 1))
    told = fresh(home, "cpu", 1)
    assert (told["answers"], told["compiled"], told["events"]) == ([101], 0, [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_during_a_compile_holds_nothing(home, cache, tmp_path):
    """Neither the parent's thread lock nor its file lock lives on in the child."""
    code = f"""
import os, signal, threading, time
import jit_helpers
from replayssm_jit import jit
from replayssm_jit.jit import build
jit_helpers.use_templates({str(home)!r})
inside, real = threading.Event(), build._compile
def slow(*arguments):
    inside.set()
    time.sleep(600)
build._compile = slow
threading.Thread(target=jit.load, args=(jit_helpers.module("cpu", 1),), daemon=True).start()
inside.wait()
build._compile = real
if os.fork():
    os.kill(os.getpid(), 9)
signal.alarm(20)
print(jit_helpers.answer(jit.load(jit_helpers.module("cpu", 1))), flush=True)
signal.alarm(0)
time.sleep(600)
"""
    here = os.path.dirname(__file__)
    paths = [here, os.path.dirname(os.path.dirname(here)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout.readline() == "101\n"  # the child does not wait for a thread that it does not have
        jit.cache_clear()
        started = time.monotonic()
        assert fresh(home, "cpu", 1)["answers"] == [101]  # and what it inherited keeps nobody waiting
        assert time.monotonic() - started < 20
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
