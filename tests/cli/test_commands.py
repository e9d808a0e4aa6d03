"""The other commands."""

from pathlib import Path

import pytest

from replayssm_jit import __version__, cli, jit, kernels, models
from replayssm_jit.jit import ModuleSpec


def run(args, capsys):
    code = cli.run(args)
    return code, *capsys.readouterr()


def test_help_and_version(capsys):
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    assert all(name in out for name in ("demo", "cache", "models"))
    assert run(["--version"], capsys)[:2] == (0, f"replayssm-jit, version {__version__}\n")
    code, _, err = run([], capsys)
    assert code == 2
    assert "Usage" in err


@pytest.mark.parametrize("args", [["frobnicate"], ["cache", "frobnicate"], ["models", "surplus"], ["--frobnicate"]])
def test_wrong_commands(args, capsys):
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_models(capsys):
    code, out, _ = run(["models"], capsys)
    assert code == 0
    assert all(name in out for name in models.published())


def test_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = run(["cache", "list"], capsys)
    assert code == 0
    assert "0 modules" in out

    entry = jit.compile(ModuleSpec("cursors", "cpu/cursors", "cpu", kernels.CURSOR_PARAMS, ()))
    code, out, _ = run(["cache", "list"], capsys)
    assert code == 0
    assert "1 modules" in out
    assert "cursors-" in out
    assert run(["cache", "verify"], capsys)[0] == 0

    Path(entry.binary_path).write_bytes(b"garbage")
    code, out, err = run(["cache", "verify"], capsys)
    assert code == 1
    assert "cursors-" in out
    assert "1 modules are damaged" in err
    assert "damaged" in run(["cache", "list"], capsys)[1]

    keep = tmp_path / "cache" / "notes.txt"
    keep.write_text("not ours")
    code, out, _ = run(["cache", "clear"], capsys)
    assert code == 0
    assert "1 modules deleted" in out
    assert keep.exists()
    assert "0 modules" in run(["cache", "list"], capsys)[1]
