"""kill -9 in the middle of compiles and renames: the next process works at once, and nothing broken stays."""

import os
import subprocess
import sys

import pytest
from jit_helpers import finish, fresh, module

from replayssm_jit import jit
from replayssm_jit.jit import nvrtc, scratch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
needs_nvrtc = pytest.mark.skipif(nvrtc.identity() is None, reason="NVRTC is not installed")
HERE = os.path.dirname(__file__)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's place for temporary files, for the children of this test only."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def run_helper(home, backend, mode, count=0, seed=0, **environment):
    paths = [HERE, os.path.dirname(os.path.dirname(HERE)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    command = [sys.executable, "-W", "ignore", os.path.join(HERE, "kill_helper.py"), str(home), backend, mode, str(count), str(seed)]
    return finish(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def check(told, cache, temporary):
    print(told)
    assert told["worked"] == told["rounds"]
    assert told["slowest"] < 20  # nobody waited for the dead: that would take a minute
    assert jit.cache_verify(str(cache)) == []
    for leftovers in (cache / ".tmp", temporary):
        scratch.sweep(str(leftovers), 0)
        assert [path.name for path in leftovers.iterdir() if path.name.startswith("replayssm-jit")] == []


# The constant is text in the binary, so that a script can stand in for the compiler and still answer what was asked.
TEXT_KERNEL = """{{ params_struct }}
static const volatile char text[] = "ADDEND={{ '%08d' % addend }}";
extern "C" void kernel(const Params* p) {
  int addend = 0;
  for (int i = 7; text[i]; ++i) addend = 10 * addend + (text[i] - '0');
  *(int*)p->output = *(const int*)p->input + addend;
}
"""
SCRIPT = """#!/bin/sh
[ "$1" = --version ] && echo "quick 1" && exit
for out; do :; done
LC_ALL=C sed "s/ADDEND=00000000/$(grep -o 'ADDEND=[0-9]*' "${{out%.so}}.cpp")/" {prebuilt} > "$out"
"""


@pytest.fixture
def quick_compiler(home, tmp_path):
    """A compiler that takes no time, so that the kills fall on what the cache does."""
    (home / "templates/cpu/add.cpp.jinja").write_text(TEXT_KERNEL)
    prebuilt = tmp_path / "prebuilt.so"
    prebuilt.write_bytes(jit.compile(module("cpu", 0)).binary)
    script = tmp_path / "quick"
    script.write_text(SCRIPT.format(prebuilt=prebuilt))
    script.chmod(0o755)
    return str(script)


def test_two_hundred_kills_at_random_moments(home, cache, temporary, quick_compiler):
    told = run_helper(home, "cpu", "random", 200, seed=1, CXX=quick_compiler)
    assert told["killed"] == 200
    check(told, cache, temporary)


def test_a_kill_at_every_operation_on_the_disk(home, cache, temporary, quick_compiler):
    told = run_helper(home, "cpu", "steps", CXX=quick_compiler)
    assert told["killed"] > 40
    check(told, cache, temporary)


def test_kills_during_a_real_compile(home, cache, temporary):
    check(run_helper(home, "cpu", "random", 10, seed=2), cache, temporary)


@needs_nvrtc
def test_kills_during_a_compile_by_nvrtc(home, cache, temporary):
    check(run_helper(home, "cuda", "random", 10, seed=3), cache, temporary)


def test_the_cache_serves_after_all_that(home, cache, quick_compiler):
    rounds = run_helper(home, "cpu", "random", 5, seed=4, CXX=quick_compiler)["rounds"]
    told = fresh(home, "cpu", *range(101, 101 + rounds), CXX=quick_compiler)
    assert told["answers"] == list(range(201, 201 + rounds))
    assert (told["compiled"], told["warnings"]) == (0, [])
