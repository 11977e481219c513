"""Types of JSON values, and the reader for JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any, TypeAlias

from common.base.errors import ConfigError

Json: TypeAlias = Any
"""A JSON value; an alias, because a recursive union asks for casts everywhere."""
JsonObject: TypeAlias = dict[str, Json]

HF_QUANT_CONFIG, QUANTIZE_CONFIG, QUANT_CONFIG = "hf_quant_config.json", "quantize_config.json", "quant_config.json"
QUANTIZATION_FILES = (HF_QUANT_CONFIG, QUANTIZE_CONFIG, QUANT_CONFIG)
"""Files beside config.json that say how weights are quantized: of ModelOpt, of old GPTQ, and of old AWQ."""


GEMMA3: JsonObject = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
LEFT_OUT = {"gemma3_text": GEMMA3, "gemma3": GEMMA3}
"""Fields of text models that published files leave out, by `model_type` of the text model or of what it stands in."""


def read_json(path: Path) -> JsonObject:
    """Return the object in a file; raises ConfigError with the file's name and the problem."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; fetch the model again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object; fetch the model again")
    return content


def text_fields(config: JsonObject) -> JsonObject:
    """Return a model's config with the fields of its text model first, where the text model is one of several.

    `model_type` is that of the text model, and absent if the text model names none.
    """
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {key: value for key, value in config.items() if key != "model_type"}
    kind = inner.get("model_type") or config.get("model_type")
    return LEFT_OUT.get(str(kind), {}) | outer | inner
