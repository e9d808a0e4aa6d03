"""Published models: name -> spec, and a Hugging Face ``config.json`` -> spec."""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import specs
from .specs import ReplaySpec

_SPEC_NAMES = {"mamba2": "Mamba2Spec", "gdn": "GdnSpec", "kda": "KdaSpec"}


class ModelError(ValueError):
    """A model or a config.json that cannot be turned into a spec; the message is one line."""


@dataclass(frozen=True)
class Model:
    """Shapes of a model's recurrent layers, at tensor-parallel size 1.

    Parameters
    ----------
    name : str
        Name of the model.
    family : {"mamba2", "gdn", "kda"}
        Which recurrence it uses.
    fields : dict
        Arguments of the family's spec: shapes, and the gate's form where there is a choice.
    layers : int, optional
        Recurrent layers, where known.
    """

    name: str
    family: str
    fields: Mapping[str, Any]
    layers: int | None = None

    def spec(self, **options: Any) -> ReplaySpec:
        """Build the spec.

        Parameters
        ----------
        **options
            Fields that the model leaves open, such as ``buffer_len``, ``max_tokens`` and dtypes.

        Raises
        ------
        ModelError
            The kernels do not cover the model's shapes or its family; the message names the field.
        """
        family: type[ReplaySpec] | None = getattr(specs, _SPEC_NAMES[self.family], None)
        if family is None:
            raise ModelError(f"{self.name}: the {self.family} family is not supported by this version")
        fields = {**self.fields, **options}
        checkpoint = fields.get("checkpoint_dtype", torch.float32)
        if checkpoint is not torch.float32:
            fields.setdefault("read_dtype", checkpoint)
        try:
            return family(**fields)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{self.name}: {error}") from error


def published() -> dict[str, Model]:
    """Every model whose shapes ship with the package, by name."""
    text = importlib.resources.files(__package__).joinpath("data/models.json").read_text(encoding="utf-8")
    return {name: _model(name, dict(entry)) for name, entry in json.loads(text).items()}


def by_name(name: str) -> Model:
    """Look a published model up; case does not matter.

    Raises
    ------
    ModelError
        There is no such model; the message names the nearest ones.
    """
    models = published()
    if name.lower() in models:
        return models[name.lower()]
    import difflib

    near = difflib.get_close_matches(name.lower(), models, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "`replayssm-jit models` lists them"
    raise ModelError(f"unknown model {name!r}; {hint}")


def _model(name: str, entry: dict[str, Any]) -> Model:
    family, layers = entry.pop("family"), entry.pop("layers", None)
    return Model(name, family, entry, layers)


# ---- Hugging Face config.json ---------------------------------------------------------------------------------------


def from_config(path: str | Path) -> Model:
    """Read the recurrent layers' shapes from a Hugging Face ``config.json``.

    Parameters
    ----------
    path : str or Path
        The file, or the directory that holds it.

    Returns
    -------
    Model
        Shapes under the name of the model's directory; the activation and state dtypes where the file names them.

    Raises
    ------
    ModelError
        The file is missing, is not JSON, describes no supported model or lacks a field; the message is one line.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(config).__name__}")
    name = str(config.get("_name_or_path") or path.resolve().parent.name).rstrip("/").rsplit("/", 1)[-1]
    return parse_config(config, name)


def parse_config(config: Mapping[str, Any], name: str = "model") -> Model:
    """The same for a config that is already a dict."""
    # Multimodal models keep the language model's fields in text_config.
    text = config.get("text_config")
    source = _Source(name, {**config, **text} if isinstance(text, Mapping) else config)
    model_type = source.get("model_type")
    # The first Mamba-2 checkpoints have no model_type: the layer's name is all that tells them from Mamba-1.
    if model_type is None and isinstance(config.get("ssm_cfg"), Mapping):
        return _state_spaces(source)
    for prefixes, reader in _READERS:
        if any(str(model_type).startswith(prefix) for prefix in prefixes):
            return reader(source)
    known = ", ".join(prefix for prefixes, _ in _READERS for prefix in prefixes)
    raise ModelError(f"{name}: model_type {model_type!r} has no supported recurrent layers; known are {known}")


class _Source:
    """A config with checked access."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, config

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{self.name}: config.json has no {key}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.name}: {key} must be a positive int, got {value!r}")
        return value

    def section(self, key: str) -> _Source:
        value = self.config.get(key)
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.name}: config.json has no {key} section")
        return _Source(self.name, value)

    def count(self, key: str, wanted: Iterable[str]) -> int | None:
        """How many layers of a list (or of a string, one letter a layer) are of the wanted kinds."""
        value = self.config.get(key)
        return sum(kind in wanted for kind in value) if isinstance(value, (list, str)) else None

    def dtypes(self) -> dict[str, Any]:
        """Activation and state dtypes where the config names them."""
        fields: dict[str, Any] = {}
        for field, keys in (
            ("dtype", ("dtype", "torch_dtype")),
            ("checkpoint_dtype", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")),
        ):
            value = next((self.config[k] for k in keys if self.config.get(k) not in (None, "auto")), None)
            if value is None:
                continue
            dtype = getattr(torch, str(value).removeprefix("torch."), None)
            if dtype not in specs.ACTIVATIONS:
                accepted = ", ".join(str(d).removeprefix("torch.") for d in specs.ACTIVATIONS)
                raise ModelError(f"{self.name}: {field} must be one of {accepted}, got {value!r}")
            fields[field] = dtype
        return fields


def _mamba2(source: _Source, heads: int, groups: int, head_dim: int, state_dim: int, layers: int | None) -> Model:
    limit = source.get("time_step_limit")
    if limit is not None and not _unlimited(limit):
        raise ModelError(f"{source.name}: time_step_limit must be [0, Infinity] (the kernels do not clamp dt), got {limit}")
    fields = {"heads": heads, "groups": groups, "head_dim": head_dim, "state_dim": state_dim, **source.dtypes()}
    return Model(source.name, "mamba2", fields, layers)


def _unlimited(limit: Any) -> bool:
    """Whether ``time_step_limit`` clamps nothing; newer files spell infinity as ``{"__float__": "Infinity"}``."""
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    except (TypeError, ValueError, KeyError):
        return False
    return low <= 0 and high == math.inf


def _nemotron_h(source: _Source) -> Model:
    layers = source.count("layers_block_type", ("mamba",)) or source.count("hybrid_override_pattern", "M")
    return _mamba2(
        source,
        source.integer("mamba_num_heads"),
        source.integer("n_groups"),
        source.integer("mamba_head_dim"),
        source.integer("ssm_state_size"),
        layers,
    )


def _hybrid(source: _Source) -> Model:
    """Bamba, Granite 4 and Falcon-H1: one set of ``mamba_*`` fields; a head_dim of "auto" follows from the expansion."""
    heads = source.integer("mamba_n_heads")
    if source.get("mamba_d_head") in (None, "auto"):
        inner = source.get("mamba_d_ssm") or source.integer("mamba_expand", 2) * source.integer("hidden_size")
        if inner % heads:
            raise ModelError(f"{source.name}: mamba_n_heads={heads} does not divide the {inner} inner channels")
        head_dim = inner // heads
    else:
        head_dim = source.integer("mamba_d_head")
    total = source.integer("num_hidden_layers")
    if source.get("model_type") == "bamba":
        layers: int | None = total - len(source.get("attn_layer_indices") or ())
    elif source.get("model_type") == "falcon_h1":
        layers = total
    else:
        layers = source.count("layer_types", ("mamba",))
    if layers == 0:
        raise ModelError(f"{source.name}: layer_types has no mamba layer")
    return _mamba2(source, heads, source.integer("mamba_n_groups"), head_dim, source.integer("mamba_d_state"), layers)


def _mamba2_plain(source: _Source) -> Model:
    return _mamba2(
        source,
        source.integer("num_heads"),
        source.integer("n_groups"),
        source.integer("head_dim"),
        source.integer("state_size"),
        source.integer("num_hidden_layers"),
    )


def _state_spaces(source: _Source) -> Model:
    layer = source.section("ssm_cfg")
    if layer.get("layer") != "Mamba2":
        raise ModelError(f"{source.name}: ssm_cfg.layer must be Mamba2, got {layer.get('layer')!r}")
    head_dim = layer.integer("headdim", 64)
    heads = layer.integer("expand", 2) * source.integer("d_model") // head_dim
    return _mamba2(source, heads, layer.integer("ngroups", 1), head_dim, layer.integer("d_state", 128), source.integer("n_layer"))


def _qwen_gdn(source: _Source) -> Model:
    fields = {
        "heads": source.integer("linear_num_value_heads"),
        "key_heads": source.integer("linear_num_key_heads"),
        "head_dim": source.integer("linear_value_head_dim"),
        "state_dim": source.integer("linear_key_head_dim"),
        **source.dtypes(),
    }
    layers = source.count("layer_types", ("linear_attention",))
    if layers is None and source.get("num_hidden_layers") is not None:
        # Every full_attention_interval-th layer is attention.
        total = source.integer("num_hidden_layers")
        layers = total - total // source.integer("full_attention_interval", 4)
    return Model(source.name, "gdn", fields, layers)


def _kimi_kda(source: _Source) -> Model:
    section = source.section("linear_attn_config")
    heads, head_dim = section.integer("num_heads"), section.integer("head_dim")
    fields = {"heads": heads, "key_heads": heads, "head_dim": head_dim, "state_dim": head_dim, **source.dtypes()}
    bound = section.get("gate_lower_bound")
    if bound is None:
        fields["gate"] = "softplus"
    elif isinstance(bound, (int, float)) and bound < 0:
        fields |= {"gate": "lower_bound", "lower_bound": float(bound)}
    else:
        raise ModelError(f"{source.name}: gate_lower_bound must be negative, got {bound!r}")
    kda_layers = section.get("kda_layers")
    layers = len(kda_layers) if isinstance(kda_layers, list) else source.count("layer_types", ("linear_attention",))
    return Model(source.name, "kda", fields, layers)


#: model_type prefixes -> reader; more specific prefixes come first.
_READERS: tuple[tuple[tuple[str, ...], Callable[[_Source], Model]], ...] = (
    (("nemotron_h",), _nemotron_h),
    (("bamba", "granitemoehybrid", "falcon_h1"), _hybrid),
    (("mamba2",), _mamba2_plain),
    (("qwen3_next", "qwen3_5"), _qwen_gdn),
    (("kimi_linear", "kimi_k3", "glm5_next"), _kimi_kda),
)
