"""The disk cache: hits, misses, and everything that can be wrong with a directory."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import warnings

import pytest
from jit_helpers import answer, fresh, module

from replayssm_jit import jit
from replayssm_jit.jit import nvrtc, scratch, store

needs_nvrtc = pytest.mark.skipif(nvrtc.identity() is None, reason="NVRTC is not installed")
BACKENDS = ["cpu", pytest.param("cuda", marks=needs_nvrtc)]
ARCH = {"cpu": None, "cuda": "sm_90"}


def only_entry(cache):
    (listed,) = jit.cache_list(str(cache))
    return listed


# ---- hits and misses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_warm_start_only_reads(home, backend):
    cold = fresh(home, backend, 1, 2)
    assert (cold["compiled"], cold["answers"]) == (2, [101, 102])
    assert "jinja2" in cold["loaded"]
    assert "write" in cold["events"]  # the watch sees what a cold start does
    warm = fresh(home, backend, 1, 2)
    assert warm == {"answers": [101, 102], "problems": [], "warnings": [], "compiled": 0, "events": [], "loaded": []}


def test_the_package_loads_without_torch(home):
    assert "torch" not in fresh(home, "cpu", 1)["loaded"]


def test_entry_is_readable_by_people_and_programs(home, cache):
    entry = jit.compile(module("cpu", 3))
    assert entry.directory.startswith(str(cache / "add_3-"))
    assert sorted(os.listdir(entry.directory)) == ["add_3.cpp", "add_3.so", "module.json"]
    assert entry.source_path == os.path.join(entry.directory, "add_3.cpp")
    assert entry.binary_path == os.path.join(entry.directory, "add_3.so")
    with open(os.path.join(entry.directory, "module.json")) as file:
        told = json.load(file)
    assert told["name"] == "add_3"
    assert told["constants"] == {"addend": 3}
    assert told["source"]["bytes"] == os.path.getsize(entry.source_path)
    assert told["binary"]["sha256"] == store.sha256(entry.binary)


def test_load_gives_the_same_kernel_again(home):
    kernel = jit.load(module("cpu", 1))
    assert jit.load(module("cpu", 1)) is kernel
    assert jit.load(module("cpu", 1), kernel.entry.meta["arch"]) is kernel
    assert jit.load(module("cpu", 2)) is not kernel


def test_a_name_does_not_hide_a_difference(home):
    """Two modules of one name never answer for each other."""
    other = jit.ModuleSpec("add_1", "cpu/add", "cpu", module("cpu").params, (("addend", 41),))
    assert answer(jit.load(module("cpu", 1))) == 101
    assert answer(jit.load(other)) == 141
    assert len(jit.cache_list()) == 2


@pytest.mark.parametrize("edited", ["templates/cpu/add.cpp.jinja", "csrc/plus.h"])
def test_an_edited_template_is_noticed_whatever_its_date_and_size(home, edited):
    assert fresh(home, "cpu", 1)["answers"] == [101]
    path = home / edited
    status = path.stat()
    text = path.read_text()
    path.write_text(text.replace("a + b", "a - b").replace("{{ addend }}", "{{ -addend}}"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    told = fresh(home, "cpu", 1)
    assert (told["answers"], told["compiled"]) == ([99], 1)
    path.write_text(text)  # and back: the first binary is still there
    told = fresh(home, "cpu", 1)
    assert (told["answers"], told["compiled"]) == ([101], 0)


def test_an_edit_that_does_not_reach_the_source_compiles_nothing(home):
    assert fresh(home, "cpu", 1)["compiled"] == 1
    (home / "csrc/unused.h").write_text("// nobody includes this")
    assert fresh(home, "cpu", 1)["compiled"] == 0


def test_a_template_edited_while_it_is_rendered(home, monkeypatch):
    """What is published under a digest is what that digest's templates render to."""
    from replayssm_jit.jit import render

    plus = home / "csrc/plus.h"
    old, new = plus.read_text(), plus.read_text().replace("a + b", "a - b")
    real = render.render
    edits = [new]

    def rendering(wanted):
        source = real(wanted)
        if edits:
            plus.write_text(edits.pop())
        return source

    monkeypatch.setattr(render, "render", rendering)
    assert answer(jit.load(module("cpu", 1))) == 99
    assert fresh(home, "cpu", 1)["answers"] == [99]
    plus.write_text(old)
    assert fresh(home, "cpu", 1)["answers"] == [101]


def test_dates_and_clocks_do_not_matter(home, cache):
    assert fresh(home, "cpu", 1)["compiled"] == 1
    for moment in (0, 10**10):
        for root in (home, cache):
            for directory, _, files in os.walk(root):
                for path in [directory, *(os.path.join(directory, file) for file in files)]:
                    os.utime(path, (moment, moment))
        told = fresh(home, "cpu", 1)
        assert (told["answers"], told["compiled"]) == ([101], 0)


def test_two_versions_share_one_cache(home, tmp_path):
    """Each finds its own modules, and neither disturbs the other."""
    later = tmp_path / "later"
    shutil.copytree(home, later)
    plus = later / "csrc/plus.h"
    plus.write_text(plus.read_text().replace("a + b", "a + b + 1000"))
    for turn in range(3):
        for version, expected in ((home, 101), (later, 1101)):
            told = fresh(version, "cpu", 1)
            assert told["answers"] == [expected]
            assert told["compiled"] == (turn == 0)


# ---- damage -----------------------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)


def remove(path):
    path.unlink()


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


def replace_by_another(path):
    """What looks whole but is not what was asked for."""
    shutil.copy(sys.executable, path)


@pytest.mark.parametrize("damage", [truncate, empty, flip, remove, replace_by_directory, replace_by_another])
@pytest.mark.parametrize("victim", ["*/*.so", "*/module.json", ".keys/*"])
def test_damage_is_noticed_and_repaired(home, cache, victim, damage):
    assert fresh(home, "cpu", 1)["compiled"] == 1
    (path,) = cache.glob(victim)
    damage(path)
    assert len(jit.cache_verify()) == (not victim.startswith("."))
    told = fresh(home, "cpu", 1)
    assert (told["answers"], told["problems"]) == ([101], [])
    # A lost key needs no new binary.
    assert told["compiled"] == (not victim.startswith("."))
    if damage is replace_by_directory and victim.startswith("."):
        return  # cannot be replaced by a rename; every start renders again, and says so
    told = fresh(home, "cpu", 1)
    assert (told["answers"], told["compiled"], told["events"], told["warnings"]) == ([101], 0, [], [])
    assert jit.cache_verify() == []


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_source_is_told_by_verify(home, cache, damage):
    jit.compile(module("cpu", 1))
    (path,) = cache.glob("*/*.cpp")
    damage(path)
    (broken,) = jit.cache_verify()
    assert "add_1.cpp" in broken.problem


def test_a_key_that_names_another_entry(home, cache):
    """Even a key file that was written over by another's does not mislead."""
    fresh(home, "cpu", 1, 2)
    one, two = sorted((cache / ".keys").iterdir())
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert fresh(home, "cpu", 1, 2)["answers"] == [101, 102]


def test_a_file_where_an_entry_belongs(home, cache):
    entry = jit.compile(module("cpu", 1))
    shutil.rmtree(entry.directory)
    with open(entry.directory, "w") as file:
        file.write("not a directory")
    assert fresh(home, "cpu", 1)["answers"] == [101]
    assert os.path.isdir(entry.directory)


# ---- directories that cannot be written --------------------------------------------------------------------------


def a_file(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [lambda tmp: "/proc/replayssm", a_file, lambda tmp: a_file(tmp) / "below"], ids=["proc", "file", "below"])
def test_unwritable_cache_works_in_memory_with_one_warning(home, tmp_path, backend, place):
    told = fresh(home, backend, 1, 2, REPLAYSSM_CACHE_DIR=str(place(tmp_path)))
    assert (told["answers"], told["problems"], told["compiled"]) == ([101, 102], [], 2)
    (warning,) = told["warnings"]
    assert str(place(tmp_path)) in warning
    assert "REPLAYSSM_CACHE_DIR" in warning


def test_missing_home_and_default_place(home, tmp_path):
    told = fresh(home, "cpu", 1, REPLAYSSM_CACHE_DIR="", HOME=str(tmp_path / "nobody"), XDG_CACHE_HOME="")
    assert told["answers"] == [101]
    assert len(jit.cache_list(str(tmp_path / "nobody/.cache/replayssm-jit"))) == 1


@pytest.mark.parametrize("failing", ["mkdir", "fsync", "rename", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_failing_write_leaves_nothing_half_done(home, cache, monkeypatch, failing, number):
    real = getattr(os, failing)

    def refuse(path, *arguments, **keywords):
        if isinstance(path, int) or str(path).startswith(str(cache)):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, failing, refuse)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert answer(jit.load(module("cpu", 1))) == 101
        assert answer(jit.load(module("cpu", 2))) == 102
    (warning,) = warned
    assert warning.category is jit.CacheWarning
    assert os.strerror(number) in str(warning.message)
    monkeypatch.undo()
    assert [entry for entry in jit.cache_list(str(cache)) if entry.problem] == []
    assert not cache.exists() or not list((cache / ".tmp").glob("*"))


def test_a_full_disk(home, tmp_path):
    """A real one: a small file system of a private mount namespace."""
    disk = tmp_path / "disk"
    disk.mkdir()
    told = tmp_path / "told"
    here = os.path.dirname(__file__)
    script = (
        f"mount -t tmpfs -o size=64k none {disk} && dd if=/dev/zero of={disk}/fill bs=1k count={{fill}} 2>/dev/null; "
        f"{sys.executable} {here}/jit_helpers.py {home} cpu 1 2 > {told} && df {disk} >/dev/null"
    )
    environment = {**os.environ, "REPLAYSSM_CACHE_DIR": str(disk / "cache"), "PYTHONPATH": os.path.dirname(os.path.dirname(here))}
    for fill in (48, 64):  # full at the second module's publication, and from the start
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script.format(fill=fill)]
        if shutil.which("unshare") is None or subprocess.run([*command[:4], "true"]).returncode:
            pytest.skip("user namespaces are not available")
        subprocess.run(command, env=environment, check=True)
        seen = json.loads(told.read_text())
        assert (seen["answers"], seen["problems"]) == ([101, 102], [])
        assert len(seen["warnings"]) == 1
        assert "No space left" in seen["warnings"][0]


def test_in_memory_entries_are_compiled_once_a_process(home, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", "/proc/replayssm")
    with pytest.warns(jit.CacheWarning):
        first = jit.compile(module("cpu", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.compile(module("cpu", 1)) is first
    assert first.directory is None
    assert first.binary_path is None
    assert "plus" in first.source
    assert answer(jit.load(module("cpu", 1))) == 101


def test_the_cache_vanishes_while_in_use(home, cache):
    jit.compile(module("cpu", 1))
    shutil.rmtree(cache)
    assert answer(jit.load(module("cpu", 1))) == 101
    assert only_entry(cache).problem == ""


def test_the_cache_vanishes_in_the_middle_of_a_write(home, cache, monkeypatch):
    """Somebody clears it once: the write begins anew, and nobody is told."""
    real, left = store._write, [1]

    def write(path, content):
        if left and path.endswith(".so"):
            left.pop()
            shutil.rmtree(cache)
        real(path, content)

    monkeypatch.setattr(store, "_write", write)
    entry = jit.compile(module("cpu", 1))  # a warning would be an error here
    assert not left
    assert entry.directory is not None
    assert fresh(home, "cpu", 1)["compiled"] == 0


# ---- directories looked up first ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_extra_directories_come_before_the_cache(home, tmp_path, cache, backend):
    shipped = tmp_path / "shipped"
    fresh(home, backend, 1, REPLAYSSM_CACHE_DIR=str(shipped))
    extra = os.pathsep.join(["", str(tmp_path / "missing"), str(shipped)])
    told = fresh(home, backend, 1, REPLAYSSM_EXTRA_CACHE_DIRS=extra)
    assert (told["answers"], told["compiled"], told["events"]) == ([101], 0, [])
    assert not cache.exists()
    told = fresh(home, backend, 1, 2, REPLAYSSM_EXTRA_CACHE_DIRS=extra)
    assert (told["answers"], told["compiled"]) == ([101, 102], 1)
    assert only_entry(cache).name == "add_2"
    assert len(jit.cache_list(str(shipped))) == 1


def test_extra_directory_serves_any_compiler_but_not_other_templates(home, tmp_path):
    shipped = tmp_path / "shipped"
    fresh(home, "cpu", 1, REPLAYSSM_CACHE_DIR=str(shipped))
    wrapper = tmp_path / "cxx"
    wrapper.write_text('#!/bin/sh\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    environment = {"CXX": str(wrapper), "REPLAYSSM_EXTRA_CACHE_DIRS": str(shipped)}
    assert fresh(home, "cpu", 1, **environment)["compiled"] == 0
    plus = home / "csrc/plus.h"
    plus.write_text(plus.read_text().replace("a + b", "a - b"))
    told = fresh(home, "cpu", 1, **environment)
    assert (told["answers"], told["compiled"]) == ([99], 1)


def test_a_damaged_extra_directory_is_passed_over(home, tmp_path):
    shipped = tmp_path / "shipped"
    fresh(home, "cpu", 1, REPLAYSSM_CACHE_DIR=str(shipped))
    for binary in shipped.glob("*/*.so"):
        truncate(binary)
    told = fresh(home, "cpu", 1, REPLAYSSM_EXTRA_CACHE_DIRS=str(shipped))
    assert (told["answers"], told["compiled"]) == ([101], 1)
    assert len(jit.cache_verify(str(shipped))) == 1  # never written to


@pytest.mark.parametrize("backend", BACKENDS)
def test_jit_disabled(home, cache, backend):
    (problem,) = fresh(home, backend, 1, REPLAYSSM_DISABLE_JIT="1")["problems"]
    assert problem.startswith("ModuleNotBuiltError: add_1 for ")
    assert str(cache) in problem
    assert "REPLAYSSM_DISABLE_JIT=0" in problem
    assert not cache.exists()
    fresh(home, backend, 1, REPLAYSSM_DISABLE_JIT="0")
    told = fresh(home, backend, 1, REPLAYSSM_DISABLE_JIT="1", CXX="no-such-compiler")
    assert (told["answers"], told["problems"], told["events"]) == ([101], [], [])


# ---- upkeep -------------------------------------------------------------------------------------------------------


def test_list_and_clear_touch_only_what_is_ours(home, cache):
    jit.compile(module("cpu", 1))
    jit.compile(module("cpu", 2))
    (cache / "thesis.txt").write_text("not ours")
    (cache / "photos").mkdir()
    listed = jit.cache_list()
    assert [entry.name for entry in listed] == ["add_1", "add_2"]
    assert all(entry.bytes > 1000 and entry.backend == "cpu" and not entry.problem for entry in listed)
    assert jit.cache_clear() == 2
    assert jit.cache_list() == []
    assert sorted(path.name for path in cache.iterdir() if path.name != ".tmp") == ["photos", "thesis.txt"]
    assert jit.cache_clear() == 0
    assert fresh(home, "cpu", 1)["compiled"] == 1


def test_upkeep_of_a_missing_directory_makes_nothing(cache):
    assert jit.cache_list() == []
    assert jit.cache_verify() == []
    assert jit.cache_clear() == 0
    assert not cache.exists()


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_kept(home, cache):
    dead = subprocess.Popen(["true"])
    dead.wait()
    places = {}
    for who, pid in (("dead", dead.pid), ("living", os.getppid())):
        for age in (0, 2 * scratch.LEFTOVER_SECONDS):
            with scratch.directory(str(cache / ".tmp")) as path:
                place = path.replace(f"-{os.getpid()}-", f"-{pid}-")
                os.rename(path, place)
            os.utime(place, (time.time() - age,) * 2)
            places[who, age > 0] = place
    jit.compile(module("cpu", 1))
    assert {key for key, place in places.items() if os.path.exists(place)} == {("dead", False), ("living", False), ("living", True)}
    jit.cache_clear()
    assert {key for key, place in places.items() if os.path.exists(place)} == {("living", False), ("living", True)}
