"""The wheel stands alone: built, installed into a clean environment, and run outside the tree."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_wheel_runs_the_demo(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file():
                assert f"replayssm_jit/{path.relative_to(ROOT).as_posix()}" in packed
    assert "replayssm_jit/py.typed" in packed

    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python, site = home / "bin" / "python", next(home.glob("lib/python*/site-packages"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # Dependencies come from this environment; a folder named in a .pth file is searched, but its own .pth files are not, so
    # that an editable install of this tree stays out of sight.
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))))

    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"REPLAYSSM_CACHE_DIR": str(tmp_path / "cache")}
    where = run(python, "-c", "import replayssm_jit; print(replayssm_jit.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(home)
    options = ["--model", "falcon-h1-tiny-90m", "--batch", "2", "--layers", "1", "--steps", "8", "--json", "rows.json"]
    run(home / "bin" / "replayssm-jit", "demo", *options, cwd=tmp_path, env=env)
    assert (tmp_path / "rows.json").exists()
