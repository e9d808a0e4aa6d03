"""A cache and tiny templates of one's own for every test."""

import pytest
from jit_helpers import write_templates

from replayssm_jit import jit
from replayssm_jit.jit import build, env, render, store


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache directory of this test, not made yet."""
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def home(tmp_path, monkeypatch, cache):
    """A directory with tiny templates, which this process and fresh ones render from; nothing is kept in memory."""
    home = write_templates(tmp_path / "sources")
    monkeypatch.setattr(render, "source_dirs", lambda: (str(home / "templates"), str(home / "csrc")))
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(build, "_memory", {})
    monkeypatch.setattr(store, "_warned", set())
    render.digest.cache_clear()
    yield home
    render.digest.cache_clear()
