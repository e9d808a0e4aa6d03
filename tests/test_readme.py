"""The README's example runs as written, and its tables and commands are true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm_jit import cli
from replayssm_jit.jit.env import VARIABLES

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_example_runs(tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(example.splitlines()) <= 40
    path = tmp_path / "example.py"
    path.write_text(example)
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([3, 4, 32, 64])")


def _environment():
    root = str(Path(__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_environment_variables(variable):
    row = next((line for line in README.splitlines() if line.startswith(f"| `{variable.name}` |")), "")
    assert row.replace("`", "") == f"| {variable.name} | {variable.default} | {variable.meaning} |"


def test_no_other_environment_variables():
    named = {
        name
        for path in (Path(__file__).parents[1] / "replayssm_jit").rglob("*.py")
        for name in re.findall(r"REPLAYSSM_[A-Z_]+[A-Z]", path.read_text())
    }
    assert named == set(re.findall(r"REPLAYSSM_[A-Z_]+[A-Z]", README))


def test_commands_exist(capsys):
    for name, options in re.findall(r"^replayssm-jit ([a-z]+)([^#\n]*)", README, re.MULTILINE):
        assert cli.run([name, "--help"]) == 0
        text = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", options):
            assert option in text


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/method.md", "docs/engines.md", "docs/adding-a-family.md"])
def test_pages_name_files_that_exist(page):
    root = Path(__file__).parents[1]
    text = (root / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((root / page).parent / link).exists(), link
    for path in re.findall(r"`((?:replayssm_jit|templates|csrc|tests|docs)/[\w/.]+\.\w+)`", text):
        assert (root / path).exists(), path
    for name in re.findall(r"^  (\w+\.py) ", text, re.MULTILINE):
        assert (root / "replayssm_jit" / name).exists(), name
