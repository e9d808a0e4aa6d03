"""Environment variables: read when used, all of them in one table."""

import os
import re

import pytest
from jit_helpers import ROOT, answer, module

from replayssm_jit import jit
from replayssm_jit.jit import env


def test_every_variable_is_in_the_table():
    named = set()
    for directory in ("replayssm_jit", "examples"):
        for path in (ROOT / directory).rglob("*.py"):
            named |= set(re.findall(r"REPLAYSSM_[A-Z]+(?:_[A-Z]+)*", path.read_text()))
    assert named == {variable.name for variable in env.VARIABLES}


def test_readme_has_the_table():
    readme = (ROOT / "README.md").read_text().replace("`", "")
    for variable in env.VARIABLES:
        assert f"| {variable.name} | {variable.default} | {variable.meaning} |" in readme


@pytest.mark.parametrize(
    ("text", "meaning"), [("1", True), ("true", True), ("yes", True), ("0", False), ("", False), ("off", False), ("No ", False)]
)
def test_flags(monkeypatch, text, meaning):
    for name, read in (("DISABLE_JIT", env.jit_disabled), ("VERBOSE", env.verbose), ("LINEINFO", env.lineinfo), ("DEBUG", env.debug)):
        assert not read()
        monkeypatch.setenv(f"REPLAYSSM_{name}", text)
        assert read() is meaning


def test_directories(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_dir() == "/home/somebody/.cache/replayssm-jit"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/x")
    assert env.cache_dir() == "/var/cache/x/replayssm-jit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    assert env.cache_dir() == "/home/somebody/.cache/replayssm-jit"
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", "~/modules")
    assert env.cache_dir() == "/home/somebody/modules"
    assert env.extra_cache_dirs() == []
    monkeypatch.setenv("REPLAYSSM_EXTRA_CACHE_DIRS", os.pathsep.join(["/one", "", "~/two"]))
    assert env.extra_cache_dirs() == ["/one", "/home/somebody/two"]


def test_a_user_without_a_home(home, monkeypatch, tmp_path):
    """As in containers with a made-up user: modules live in memory, and nothing appears in the working directory."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("REPLAYSSM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    with pytest.warns(jit.CacheWarning, match="REPLAYSSM_CACHE_DIR"):
        kernel = jit.load(module("cpu", 1))
    assert answer(kernel) == 101
    assert sorted(os.listdir()) == before


def test_verbose_goes_to_stderr(monkeypatch, capsys):
    env.report("silent")
    monkeypatch.setenv("REPLAYSSM_VERBOSE", "1")
    env.report("loud")
    assert capsys.readouterr() == ("", "replayssm-jit: loud\n")
