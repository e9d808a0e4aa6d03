"""Logged calls: nothing when off, one line a call, and files from which a failed call can be repeated."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from emulator import emulated
from harness import CUDA, FAMILIES, Harness, projection_views, relative_error, same_bits, small_spec, with_format

from replayssm_jit import ReplayCache, ReplayWrapper, cli, dump
from replayssm_jit.blob import bit_view, rearranged

LOGGED = {
    ReplayCache: {"set_weights", "reset", "load_state", "read_state", "flush", "materialize", "copy_slots", "export", "import_"},
    ReplayWrapper: {"plan", "run", "commit"},
}


@pytest.fixture
def level(monkeypatch, tmp_path):
    """Sets the level; files go to a directory of the test's own."""
    monkeypatch.setenv("REPLAYSSM_LOG_DIR", str(tmp_path / "dumps"))
    return lambda value: monkeypatch.setenv("REPLAYSSM_LOG_LEVEL", str(value))


def lived(family, device, **precision):
    harness = Harness(small_spec(family, **precision), device, layers=2, seed=65, layout=projection_views(1))
    for _ in range(3):
        harness.step([(s, 4) for s in range(4)], [1, 2, 3, 4])
    return harness


def inputs_of(harness):
    """Inputs of three rows as unaligned views of a projection."""
    tokens = {k: v.unflatten(0, (3, 4)).to(harness.device) for k, v in harness.make_inputs(12).items()}
    return harness.layout(tokens, 2)


def files(tmp_path):
    return sorted((tmp_path / "dumps").glob("*")) if (tmp_path / "dumps").exists() else []


def test_off_wraps_nothing(level, tmp_path, capsys, device):
    level("")
    harness = lived("mamba2", device)
    for owner in (harness.cache, harness.wrapper):
        assert not LOGGED[type(owner)] & vars(owner).keys()
        assert not any(hasattr(getattr(type(owner), name), "__wrapped__") for name in LOGGED[type(owner)])
    assert capsys.readouterr().err == ""
    assert not files(tmp_path)


@pytest.mark.parametrize("value", ["3", "-1", "on", "1.0"])
def test_unknown_levels(level, value, device):
    level(value)
    with pytest.raises(ValueError, match=f"REPLAYSSM_LOG_LEVEL must be 0, 1 or 2, got '{value}'"):
        ReplayCache.allocate(small_spec("mamba2"), 1, 1, device)


def test_level_one_prints_shapes(level, tmp_path, capsys, device):
    level(1)
    harness = lived("mamba2", device)
    cache, wrapper = harness.cache, harness.wrapper
    capsys.readouterr()
    wrapper.plan([2, 0, -1], 4)
    wrapper.run(0, **inputs_of(harness), out=None)
    index = wrapper.slots
    wrapper.commit(index, 4, torch.tensor([1, 1, 1], dtype=torch.int32, device=device))
    cache.import_([1], cache.export([0]))
    cache.reset(range(2))
    with pytest.raises(ValueError, match="layer"):
        wrapper.run(9)
    lines = capsys.readouterr().err.splitlines()
    starts = ["Wrapper.plan([2, 0, -1], 4)", "Wrapper.run(0, x=bfloat16[3, 4, 6, 64] strides [", "Wrapper.commit(int32[3] on "]
    starts += ["Cache.export([0])", "Cache.import_([1], bytes[", "Cache.reset(range(0, 2))", "Wrapper.run(9)"]
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"replayssm-jit: Replay{start}"), line
    assert not files(tmp_path)


@pytest.mark.parametrize("precision", [{}, {"rounding": "stochastic", **with_format("int16_int8")}], ids=["", "int16_int8"])
@pytest.mark.parametrize("mode", ["fixed", "padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_failed_run_is_repeated(family, mode, precision, level, tmp_path, capsys, device):
    """A launch that fails leaves its inputs; repeated, the call gives the bits that it would have given."""
    level(2)
    good, bad = lived(family, device, **precision), lived(family, device, **precision)
    assert not files(tmp_path)
    rows = [(3, 4), (-1, 4), (0, 4)] if mode == "fixed" else [(3, 4), (-1, 2), (0, 1)]
    total = sum(t for _, t in rows)
    inputs = inputs_of(good)
    if mode == "packed":
        inputs = {k: v.flatten(0, 1)[:total] for k, v in inputs.items()}
    for harness in (good, bad):
        harness.plan(rows, mode)
    want = good.wrapper.run(1, **inputs)

    def fail(address):
        raise RuntimeError("the device has left")

    bad.wrapper._launch = fail
    with pytest.raises(RuntimeError, match="the device has left"):
        bad.wrapper.run(1, **inputs)
    (path,) = files(tmp_path)
    assert f"raised RuntimeError: the device has left; for its inputs: replayssm-jit rerun {path}" in capsys.readouterr().err
    level(0)
    assert same_bits(dump.rerun(str(path)), want)
    assert cli.run(["rerun", str(path)]) == 0
    assert f"ReplayWrapper.run passed, which returned torch.bfloat16{list(want.shape)}" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["emulated", CUDA])
def test_a_run_is_repeated_on_another_device(there, level, tmp_path, request):
    """Of a GPU's inputs on the host: the backends arrange two planes differently."""
    if request.config.getoption("--emulate") is not None:
        pytest.skip("needs the CPU backend beside the other")
    level(2)
    with emulated(5) if there == "emulated" else nullcontext():
        harness = lived("mamba2", "cpu" if there == "emulated" else "cuda")
        harness.plan([(3, 4), (-1, 4), (0, 4)], "fixed")
        inputs = inputs_of(harness)
        launch = harness.wrapper._launch

        def fail(address):
            launch(address)
            raise RuntimeError("the device has left")

        harness.wrapper._launch = fail
        out = torch.zeros(3, 4, *harness.spec.shape("H", "P"), dtype=harness.spec.dtype, device=harness.device)
        with pytest.raises(RuntimeError, match="the device has left"):
            harness.wrapper.run(1, out=out, **inputs)
    (path,) = files(tmp_path)
    level(0)
    assert relative_error(dump.rerun(str(path), "cpu"), out) < 2e-3


def test_a_commit_of_trees_is_repeated(level, tmp_path, device):
    """Its file holds the rings whose entries it moves."""
    level(2)
    harness = lived("gdn", device)
    harness.step([(3, 4), (1, 4)], trees=[[-1, 0, 0, 2]] * 2, commit=False)
    cache, index = harness.cache, {"dtype": torch.int32, "device": device}

    def fail(rows, **values):
        raise RuntimeError("the device has left")

    cache.prepare_paths().launch = fail
    with pytest.raises(RuntimeError, match="the device has left"):
        harness.wrapper.commit(
            torch.tensor([3, 1], **index), 4, torch.tensor([3, 1], **index), accepted=torch.tensor([[0, 2, 3]] * 2, **index)
        )
    (path,) = files(tmp_path)
    held = dump.load(str(path))
    assert held["slots"] == [1, 3]
    for layer, tensors in enumerate(cache.layers):
        for name, tensor in tensors.items():
            live = rearranged(cache, name, bit_view(tensor)[[1, 3]], to_rows=True)
            assert torch.equal(held["layers"][layer][name], live.cpu())
    level(0)
    dump.rerun(str(path))


def test_calls_that_are_refused(level, tmp_path, capsys, device):
    """Every logged call: repeated from its file, it is refused in the same words."""
    level(2)
    harness = lived("mamba2", device)
    cache, wrapper, inputs = harness.cache, harness.wrapper, inputs_of(harness)
    state = torch.zeros(1, *harness.spec.shape("H", "P", "N"), device=device)
    index = torch.tensor([1, 2], dtype=torch.int32, device=device)
    blob = cache.export([0])
    calls = {
        "set_weights": lambda: cache.set_weights(1, A=state),
        "reset": lambda: cache.reset([0, 9]),
        "load_state": lambda: cache.load_state(0, [1, 2], state),
        "read_state": lambda: cache.read_state(0, [1], layout="xy"),
        "flush": lambda: cache.flush([1, 1]),
        "materialize": lambda: cache.materialize(index, out=[state, state]),
        "copy_slots": lambda: cache.copy_slots([1], index),
        "export": lambda: cache.export([-1]),
        "import_": lambda: cache.import_([1], blob[:-1]),
        "plan": lambda: wrapper.plan([1, 2], 9),
        "run": lambda: wrapper.run(0, **inputs),
        "commit": lambda: wrapper.commit(index, 4, index[:1]),
    }
    assert calls.keys() == set.union(*LOGGED.values())
    for name, call in calls.items():
        wrapper.plan([1, 2], 4)
        with pytest.raises((ValueError, TypeError)) as first:
            call()
        (path,) = files(tmp_path)
        assert path.name.startswith(f"Replay{'Wrapper' if name in LOGGED[ReplayWrapper] else 'Cache'}.{name}-{os.getpid()}-")
        level(0)
        with pytest.raises(type(first.value)) as again:
            dump.rerun(str(path))
        assert str(again.value) == str(first.value)
        capsys.readouterr()
        assert cli.run(["rerun", str(path)]) == 1
        assert str(first.value).splitlines()[0] in capsys.readouterr().err
        level(2)
        path.unlink()


def test_moves_leave_no_file(level, tmp_path, device):
    level(2)
    harness = lived("mamba2", device)
    harness.cache.copy_slots([0], [1])
    harness.cache.import_([2], harness.cache.export([0]))
    harness.cache.flush([0])
    harness.cache.materialize([0], destination=[3])
    harness.cache.reset([1])
    assert not files(tmp_path)


def test_a_crash_of_the_process(tmp_path):
    """The file is there when the process is not."""
    code = """
import os, sys
sys.path.insert(0, "tests")
from test_logging import inputs_of, lived
harness = lived("mamba2", "cpu")
harness.wrapper.plan([3, 1, 0], 4)
harness.wrapper._launch = lambda address: os.abort()
harness.wrapper.run(0, **inputs_of(harness))
"""
    root = Path(__file__).parents[1]
    env = os.environ | {"REPLAYSSM_LOG_LEVEL": "2", "REPLAYSSM_LOG_DIR": str(tmp_path / "dumps"), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode < 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("replayssm-jit: ReplayWrapper.run(0, ") or "Abort" in done.stderr
    (path,) = files(tmp_path)
    harness = lived("mamba2", torch.device("cpu"))
    harness.wrapper.plan([3, 1, 0], 4)
    assert same_bits(dump.rerun(str(path)), harness.wrapper.run(0, **inputs_of(harness)))


def test_a_full_disk(level, tmp_path, capsys, monkeypatch, device):
    level(2)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REPLAYSSM_LOG_DIR", str(tmp_path / "file" / "dumps"))
    harness = lived("mamba2", device)
    harness.cache.reset([0])
    assert "the inputs of ReplayCache.reset cannot be kept" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_files_that_are_no_dumps(content, tmp_path, capsys):
    path = tmp_path / "file.pt"
    if content is None:
        torch.save({"format": 0}, path)
    else:
        path.write_bytes(content)
    assert cli.run(["rerun", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert cli.run(["rerun", str(tmp_path / "absent.pt")]) == 2
