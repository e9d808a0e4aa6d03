"""Published shapes, and specs from Hugging Face configs."""

import json

import pytest
import torch

from replayssm_jit import models, specs
from replayssm_jit.models import ModelError

SUPPORTED = {family for family, name in (("mamba2", "Mamba2Spec"), ("gdn", "GdnSpec"), ("kda", "KdaSpec")) if hasattr(specs, name)}


@pytest.mark.parametrize("name", models.published())
def test_every_published_model_has_a_spec(name):
    model = models.by_name(name)
    if model.family not in SUPPORTED:
        pytest.skip(f"family {model.family} has no spec")
    spec = model.spec(buffer_len=16, max_tokens=4)
    assert spec.heads == model.fields["heads"]
    assert spec.bytes_per_slot > spec.state_elements * 4


def test_names_ignore_case_and_suggest():
    assert models.by_name("Nemotron-3-Nano-4B").fields["heads"] == 96
    with pytest.raises(ModelError, match="did you mean .*nemotron-3-nano-4b"):
        models.by_name("nemotron-3-nano-4")
    with pytest.raises(ModelError, match="replayssm-jit models"):
        models.by_name("zzzz")


CONFIGS = {
    "nemotron_h": (
        {
            "model_type": "nemotron_h",
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "hybrid_override_pattern": "M-M*M-",
            "torch_dtype": "bfloat16",
            "mamba_ssm_cache_dtype": "float32",
            "time_step_limit": [0.0, float("inf")],
        },
        (
            "mamba2",
            {"heads": 96, "groups": 8, "head_dim": 80, "state_dim": 128, "dtype": torch.bfloat16, "checkpoint_dtype": torch.float32},
            3,
        ),
    ),
    "nemotron_h by block types": (
        {
            "model_type": "nemotron_h",
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "layers_block_type": ["mamba", "moe", "mamba", "attention"],
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
        },
        ("mamba2", {"heads": 8, "groups": 8, "head_dim": 64, "state_dim": 128}, 2),
    ),
    "bamba": (
        {
            "model_type": "bamba",
            "hidden_size": 4096,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_expand": 2,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
        },
        ("mamba2", {"heads": 128, "groups": 1, "head_dim": 64, "state_dim": 128}, 29),
    ),
    "granite": (
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 1536,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
        },
        ("mamba2", {"heads": 48, "groups": 1, "head_dim": 64, "state_dim": 128}, 3),
    ),
    "falcon_h1": (
        {
            "model_type": "falcon_h1",
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_ssm": 3072,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "num_hidden_layers": 44,
        },
        ("mamba2", {"heads": 24, "groups": 1, "head_dim": 128, "state_dim": 256}, 44),
    ),
    "mamba2": (
        {"model_type": "mamba2", "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "num_hidden_layers": 64},
        ("mamba2", {"heads": 128, "groups": 8, "head_dim": 64, "state_dim": 128}, 64),
    ),
    "state-spaces": (
        {"d_model": 2560, "n_layer": 64, "ssm_cfg": {"layer": "Mamba2"}},
        ("mamba2", {"heads": 80, "groups": 1, "head_dim": 64, "state_dim": 128}, 64),
    ),
    "qwen3_next": (
        {
            "model_type": "qwen3_next",
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "linear_key_head_dim": 128,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
        },
        ("gdn", {"heads": 32, "key_heads": 16, "head_dim": 128, "state_dim": 128}, 36),
    ),
    "qwen3_5": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
                "linear_num_value_heads": 48,
                "linear_num_key_heads": 16,
                "linear_value_head_dim": 128,
                "linear_key_head_dim": 128,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "mamba_ssm_dtype": "float32",
            },
        },
        ("gdn", {"heads": 48, "key_heads": 16, "head_dim": 128, "state_dim": 128, "checkpoint_dtype": torch.float32}, 3),
    ),
    "kimi_linear": (
        {
            "model_type": "kimi_linear",
            "linear_attn_config": {"num_heads": 32, "head_dim": 128, "kda_layers": [1, 2, 3], "full_attn_layers": [4]},
        },
        ("kda", {"heads": 32, "key_heads": 32, "head_dim": 128, "state_dim": 128, "gate": "softplus"}, 3),
    ),
    "kimi_k3": (
        {"model_type": "kimi_k3", "text_config": {"linear_attn_config": {"num_heads": 96, "head_dim": 128, "gate_lower_bound": -5.0}}},
        ("kda", {"heads": 96, "key_heads": 96, "head_dim": 128, "state_dim": 128, "gate": "lower_bound", "lower_bound": -5.0}, None),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, tmp_path):
    config, (family, fields, layers) = CONFIGS[name]
    path = tmp_path / "my-model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    for given in (path, path.parent):
        model = models.from_config(given)
        assert (model.name, model.family, dict(model.fields), model.layers) == ("my-model", family, fields, layers)
    if family in SUPPORTED:
        assert model.spec().heads == fields["heads"]


def _without(name, key):
    return {k: v for k, v in CONFIGS[name][0].items() if k != key}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' has no supported recurrent layers"),
        ({}, "model_type None has no supported"),
        (_without("nemotron_h", "mamba_num_heads"), "config.json has no mamba_num_heads"),
        ({**CONFIGS["nemotron_h"][0], "n_groups": "8"}, "n_groups must be a positive int, got '8'"),
        ({**CONFIGS["nemotron_h"][0], "n_groups": True}, "n_groups must be a positive int"),
        ({**CONFIGS["nemotron_h"][0], "dtype": "int8"}, "dtype must be one of"),
        ({**CONFIGS["nemotron_h"][0], "dtype": ["bfloat16"]}, "dtype must be one of"),
        ({**CONFIGS["nemotron_h"][0], "time_step_limit": [0.01, 0.1]}, "time_step_limit must be"),
        ({**CONFIGS["nemotron_h"][0], "time_step_limit": "never"}, "time_step_limit must be"),
        ({**CONFIGS["bamba"][0], "mamba_n_heads": 100}, "does not divide"),
        ({**CONFIGS["granite"][0], "layer_types": ["attention"]}, "no mamba layer"),
        ({"ssm_cfg": {"layer": "Mamba1"}}, "ssm_cfg.layer must be Mamba2"),
        ({"model_type": "kimi_linear"}, "no linear_attn_config section"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 1, "head_dim": 128, "gate_lower_bound": 5}}, "must be negative"),
    ],
)
def test_unsupported_configs(config, message):
    with pytest.raises(ModelError, match=message) as error:
        models.parse_config(config)
    assert "\n" not in str(error.value)


def test_shapes_that_no_kernel_covers():
    model = models.parse_config({**CONFIGS["nemotron_h"][0], "mamba_head_dim": 48})
    with pytest.raises(ModelError, match="head_dim must be one of"):
        model.spec()


def test_low_precision_state_is_read_as_it_is():
    spec = models.parse_config({**CONFIGS["nemotron_h"][0], "mamba_ssm_cache_dtype": "float16"}).spec()
    assert (spec.checkpoint_dtype, spec.read_dtype) == (torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), ("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("\xff", "not valid JSON")]
)
def test_broken_files(content, message, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=message) as error:
        models.from_config(path)
    assert "\n" not in str(error.value)
