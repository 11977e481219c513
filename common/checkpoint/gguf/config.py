"""Settings of a model as config.json would have them, from a GGUF file's metadata and tensors."""

import math
import struct
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.json_file import Json, JsonObject
from common.checkpoint.gguf.model_file import GGUFModel

TABLE, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


class Architecture(NamedTuple):
    """Meaning of a value of `general.architecture`."""

    model_type: str
    turns_neighbours: bool = False  # rows of Q and K are in the order of a rotation of neighbouring dimensions


ARCHITECTURES = {
    "llama": Architecture("llama", turns_neighbours=True),  # Mistral too
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe"),
}
COUNTS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
EXPERT_COUNTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SCALING_FACTORS = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
UNUSUAL = {
    "attn_factor": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_ext_factor": (1.0, -1.0),
    "yarn_log_multiplier": (0.0,),
}
"""Further keys of a scaling, and the values without effect."""


def architecture_of(model: GGUFModel) -> Architecture:
    """Return the architecture; raises ConfigError for one that is not supported."""
    name = model.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{model.path}: general.architecture = {name!r:.80} is not supported in GGUF, only "
            f"{', '.join(ARCHITECTURES)}; serve the model's safetensors"
        )
    return ARCHITECTURES[name]


def config_of(model: GGUFModel) -> JsonObject:
    """Return the settings; raises ConfigError for metadata that is missing or not supported.

    Values are checked by the model's family, as those of config.json.
    """
    architecture, name = architecture_of(model), model.text("general.architecture")
    table = model.tensors.get(TABLE)
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{model.path}: has no matrix {TABLE}; serve another file of this model")
    config: JsonObject = {
        "model_type": architecture.model_type,
        "vocab_size": table.shape[0],
        "tie_word_embeddings": HEAD not in model.tensors,
        **{key: _needed(model, f"{name}.{each}") for key, each in COUNTS.items()},
        "rms_norm_eps": _decimal(model, f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": model.decimal(f"{name}.rope.freq_base"),
        "sliding_window": model.whole(f"{name}.attention.sliding_window"),
    }
    config = {key: value for key, value in config.items() if value is not None}
    config |= (
        _mlp(model, f"{name}.", architecture) | _heads(model, f"{name}.", config) | _scaling(model, f"{name}.rope")
    )
    if architecture.model_type == "llama" and config.get("sliding_window"):
        config["model_type"] = "mistral"
    return config


def rope_factors(model: GGUFModel) -> tuple[float, ...] | None:
    """Return the numbers that rotary frequencies are divided by, one for each pair; None without them."""
    stored = model.tensors.get(ROPE_FACTORS)
    if stored is None:
        return None
    if stored.type.name != "F32" or len(stored.shape) != 1 or stored.shape[0] > 1 << 12:
        raise ConfigError(f"{model.path}: {ROPE_FACTORS} is {stored.type.name} {list(stored.shape)}, F32 is needed")
    with stored.path.open("rb") as file:
        file.seek(stored.begin)
        factors = struct.unpack(f"<{stored.shape[0]}f", file.read(stored.num_bytes))
    if not all(math.isfinite(each) and each > 0 for each in factors):
        raise ConfigError(f"{model.path}: {ROPE_FACTORS} has numbers that are not positive; fetch the file again")
    return factors


def _needed(model: GGUFModel, key: str) -> Json:
    value = model.metadata.get(key)
    if value is None:
        raise ConfigError(f"{model.path}: {key} is missing; serve another file of this model")
    return value


def _decimal(model: GGUFModel, key: str) -> float | None:
    """Return a number that must be there."""
    _needed(model, key)
    return model.decimal(key)


def _mlp(model: GGUFModel, prefix: str, architecture: Architecture) -> JsonObject:
    """Return the widths of MLPs or experts."""
    if architecture.model_type != "qwen3_moe":
        experts = model.whole(f"{prefix}expert_count")
        if experts:
            raise ConfigError(
                f"{model.path}: {prefix}expert_count = {experts}: experts are supported for qwen3moe alone; serve the "
                "model's safetensors"
            )
        return {"intermediate_size": _needed(model, f"{prefix}feed_forward_length")}
    found: JsonObject = {key: _needed(model, f"{prefix}{each}") for key, each in EXPERT_COUNTS.items()}
    return found | {"norm_topk_prob": True, "intermediate_size": found["moe_intermediate_size"]}


def _heads(model: GGUFModel, prefix: str, config: JsonObject) -> JsonObject:
    """Return the size of a head, and the share of it that turns."""
    key_length, value_length = (model.whole(f"{prefix}attention.{each}_length") for each in ("key", "value"))
    turned = model.whole(f"{prefix}rope.dimension_count")
    if value_length not in (None, key_length):
        raise ConfigError(
            f"{model.path}: {prefix}attention.value_length = {value_length}, and key_length = {key_length}: equal "
            "ones are needed; serve another model"
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if key_length is None and type(hidden) is int and type(heads) is int and heads and hidden % heads == 0:
        key_length = hidden // heads
    shares = {"partial_rotary_factor": turned / key_length} if turned and key_length else {}
    return ({} if key_length is None else {"head_dim": key_length}) | shares


def _scaling(model: GGUFModel, prefix: str) -> JsonObject:
    """Return the scaling of rotary frequencies in the keys of config.json; empty for none.

    A factor without a kind is that of a linear scaling, in old files by another key.
    """
    kind = model.text(f"{prefix}.scaling.type")
    if kind == "none":
        return {}
    if kind is None:
        factor = model.decimal(f"{prefix}.scaling.factor")
        factor = model.decimal(f"{prefix}.scale_linear") if factor is None else factor
        return {} if factor in (None, 0.0, 1.0) else {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    table: JsonObject = {
        "rope_type": kind,
        "original_max_position_embeddings": model.whole(f"{prefix}.scaling.original_context_length"),
        **{key: model.decimal(f"{prefix}.scaling.{each}") for key, each in SCALING_FACTORS.items()},
    }
    for key, usual in UNUSUAL.items():
        value = model.decimal(f"{prefix}.scaling.{key}")
        if value is not None and value not in usual:
            raise ConfigError(
                f"{model.path}: {prefix}.scaling.{key} = {value} is not supported; serve the model's safetensors"
            )
    return {"rope_scaling": {key: value for key, value in table.items() if value is not None}}
