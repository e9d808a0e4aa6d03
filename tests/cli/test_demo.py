"""The demo on tiny arguments, and every way to call it wrongly."""

import json
import os
import subprocess
import sys

import pytest
import torch

from replayssm_jit import cli
from replayssm_jit.cli import serve
from replayssm_jit.jit.errors import UnsupportedDeviceError

KEYS = [
    *("model", "backend", "mode", "batch", "tokens_per_step", "buffer_len", "state_bytes_standard", "state_bytes_replay"),
    *("us_standard", "us_replay", "speedup", "max_rel_error"),
]
TINY = ["demo", "--model", "falcon-h1-tiny-90m", "--batch", "4", "--layers", "2", "--steps", "40"]
CONFIG = {
    "model_type": "granitemoehybrid",
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 2,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "mamba"],
}
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:15:{i:02}.6805900,{50 + i},{5 + i}\n" for i in range(20))


def run(args, capsys):
    """Exit code, stdout and stderr; stderr never holds more than one line."""
    code = cli.run([str(a) for a in args])
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 1, err
    return code, out, err


def test_rows_have_exactly_the_keys(device, tmp_path, capsys):
    path = tmp_path / "rows.json"
    code, out, err = run([*TINY, "--backend", device.type, "--tokens-per-step", 3, "--buffer-len", 8, "--json", path], capsys)
    assert (code, err) == (0, "")
    assert "decode" in out
    assert "verify" in out
    decode, verify = json.loads(path.read_text())
    for row, mode, tokens in ((decode, "decode", 1), (verify, "verify", 3)):
        assert list(row) == KEYS
        assert (row["model"], row["backend"], row["mode"]) == ("falcon-h1-tiny-90m", device.type, mode)
        assert (row["batch"], row["tokens_per_step"], row["buffer_len"]) == (4, tokens, 8)
        assert row["state_bytes_standard"] == 2 * 4 * (1 + tokens) * 24 * 32 * 64 * 4
        assert 0 < row["state_bytes_replay"] < row["state_bytes_standard"]
        assert row["speedup"] == pytest.approx(row["us_standard"] / row["us_replay"], rel=0.05)
        assert 0 < row["max_rel_error"] < 1e-2


def test_config_trace_and_one_plane(device, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float32"}))
    (tmp_path / "trace.csv").write_text(TRACE)
    options = ["--config", tmp_path, "--trace", tmp_path / "trace.csv", "--read-dtype", "float32", "--json", tmp_path / "rows.json"]
    code, out, err = run(["demo", "--backend", device.type, "--batch", 3, "--steps", 60, "--acceptance", 0.5, *options], capsys)
    assert (code, err) == (0, "")
    assert tmp_path.name in out
    for row in json.loads((tmp_path / "rows.json").read_text()):
        assert row["max_rel_error"] < 1e-5


def test_sixteen_bit_state(device, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "mamba_ssm_cache_dtype": "bfloat16"}))
    code, _, err = run(["demo", "--config", tmp_path, "--backend", device.type, "--batch", 2, "--steps", 30], capsys)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("options", "kept"), [(["--read-dtype", "int8"], 4), (["--checkpoint-dtype", "int8"], 1), (["--checkpoint-dtype", "float8_e4m3fn"], 1)]
)
def test_rows_with_scales(options, kept, device, tmp_path, capsys):
    path = tmp_path / "rows.json"
    code, _, err = run([*TINY, "--backend", device.type, *options, "--json", path], capsys)
    assert (code, err) == (0, "")
    for row in json.loads(path.read_text()):
        scales = 4 * 32 if kept == 1 else 0  # of a state of 32 x 64
        assert row["state_bytes_standard"] == 2 * 4 * (1 + row["tokens_per_step"]) * 24 * (32 * 64 * kept + scales)
        assert 0 < row["state_bytes_replay"] < row["state_bytes_standard"]


def test_an_error_beyond_the_bound_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(serve, "output_bound", lambda spec: 1e-9)
    path = tmp_path / "rows.json"
    code, _, err = run([*TINY, "--backend", "cpu", "--json", path], capsys)
    assert code == 1
    assert err.startswith("replayssm-jit: error: decode: outputs differ by")
    assert len(json.loads(path.read_text())) == 2


def test_the_time_limit_ends_a_long_run(capsys):
    code, out, _ = run([*TINY[:-1], "1000000", "--backend", "cpu", "--seconds", 1], capsys)
    assert code == 0
    assert "verify" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "falcon-h1-tiny"], "did you mean falcon-h1-tiny-90m"),
        (["--model", "falcon-h1-tiny-90m", "--config", "x"], "--model and --config exclude each other"),
        (["--config", "missing/config.json"], "cannot read missing/config.json: No such file"),
        (["--trace", "missing.csv"], "--trace: cannot read missing.csv: No such file"),
        (["--backend", "tpu"], "'tpu' is not one of"),
        (["--acceptance", "1.5"], "1.5 is not in the range"),
        (["--acceptance", "-0.1"], "-0.1 is not in the range"),
        (["--acceptance", "nan"], "not in the range"),
        (["--acceptance", "often"], "'often' is not a valid float"),
        (["--tokens-per-step", "1"], "1 is not in the range"),
        (["--tokens-per-step", "17"], "17 is not in the range"),
        (["--tokens-per-step", "8", "--buffer-len", "4"], "--tokens-per-step must be at most --buffer-len 4"),
        (["--buffer-len", "0"], "0 is not in the range"),
        (["--buffer-len", "65"], "65 is not in the range"),
        (["--read-dtype", "int4"], "'int4' is not one of"),
        (["--read-dtype", "float16"], "checkpoint_dtype/read_dtype must be one of"),
        (["--checkpoint-dtype", "bfloat16", "--read-dtype", "int8"], "checkpoint_dtype/read_dtype must be one of"),
        (["--checkpoint-dtype", "int16"], "--checkpoint-dtype int16: the standard kernel has no int16 state"),
        (["--batch", "0"], "0 is not in the range"),
        (["--batch", "many"], "'many' is not a valid integer"),
        (["--layers", "0"], "0 is not in the range"),
        (["--batch", "4096", "--layers", "512"], "GiB, more than is free"),
        (["--steps", "0"], "0 is not in the range"),
        (["--seconds", "0"], "0.0 is not in the range"),
        (["--seconds", "nan"], "nan is not in the range"),
        (["--seed", "x"], "'x' is not a valid integer"),
        (["--seed", str(2**64)], "not in the range"),
        (["--json", "missing/rows.json"], "--json: there is no directory"),
        (["--json", "."], "is a directory"),
        (["--frobnicate"], "No such option"),
        (["surplus"], "unexpected extra argument"),
    ],
)
def test_wrong_arguments(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(["demo", *options], capsys)
    assert code == 2
    assert err.startswith("replayssm-jit: error: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"model_type": "llama"}', "has no supported recurrent layers"),
        (json.dumps({**CONFIG, "mamba_d_head": 48}), "head_dim must be one of"),
        (json.dumps({**CONFIG, "mamba_n_groups": 3}), "groups must divide heads=8"),
    ],
)
def test_broken_config(content, message, tmp_path, capsys):
    config, rows = tmp_path / "config.json", tmp_path / "rows.json"
    config.write_text(content)
    rows.write_text("old")
    code, _, err = run(["demo", "--config", config, "--json", rows], capsys)
    assert code == 2
    assert message in err
    assert rows.read_text() == "old"


def test_no_cuda_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run([*TINY, "--backend", "cuda"], capsys)
    assert (code, err) == (2, "replayssm-jit: error: --backend cuda: torch finds no CUDA device\n")


def test_unsupported_gpu(monkeypatch, capsys):
    def refuse(*_):
        raise UnsupportedDeviceError("GPU 0 (Tesla T4, sm_75) is not supported: sm_80 or newer is needed")

    monkeypatch.setattr("replayssm_jit.kernels.load", refuse)
    code, _, err = run(TINY, capsys)
    assert (code, err) == (2, "replayssm-jit: error: GPU 0 (Tesla T4, sm_75) is not supported: sm_80 or newer is needed\n")


def test_missing_compiler(tmp_path):
    env = os.environ | {"CXX": "no-such-compiler", "REPLAYSSM_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_jit", *TINY, "--backend", "cpu"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "replayssm-jit: error: the C++ compiler CXX='no-such-compiler' was not found\n"
