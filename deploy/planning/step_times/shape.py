"""Sizes of a dense model behind step times: bytes read, products, and KV kept."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError
from common.base.json_file import Json

BYTES = 2
"""Bytes of a weight, and of an element of K and V: bfloat16."""
MAX_BYTES = 1 << 20
"""Limit of a config.json."""
FIELDS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
"""Names in config.json."""
LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with attention and gated MLPs, as in config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def num_q_heads(self) -> int:
        return self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def layer_weights(self) -> int:
        """Weights of all layers, applied to each prompt token."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        per_layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return self.num_hidden_layers * per_layer

    @property
    def step_bytes(self) -> int:
        """Bytes of weights read by a decode step of any batch."""
        return BYTES * (self.layer_weights + self.hidden_size * self.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, except norms and biases."""
        return self.step_bytes + BYTES * self.hidden_size * self.vocab_size * (not self.tie_word_embeddings)

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step, as `DecoderConfig` does."""
        rows = (self.num_q_heads * 2 + self.num_kv_heads * 2) * self.head_dim
        width = rows + 3 * self.intermediate_size + 4 * self.hidden_size
        return 2 * (num_tokens * width * 4 + num_logit_rows * self.vocab_size * 4 * 4)

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token in all layers."""
        return 2 * BYTES * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def pair_products(self) -> int:
        """Multiplications for a pair of tokens in attention, up to a factor common to all models."""
        return self.num_hidden_layers * self.num_attention_heads * self.head_dim


def shape_of(settings: Mapping[str, Json]) -> ModelShape:
    """Read the shape from the contents of a config.json; raises ConfigError for missing or bad sizes."""
    filled = dict(settings)
    filled.setdefault("num_key_value_heads", filled.get("num_attention_heads"))
    if not filled.get("head_dim") and filled.get("num_attention_heads"):
        filled["head_dim"] = filled.get("hidden_size", 0) // filled["num_attention_heads"]
    for name in FIELDS:
        value = filled.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise ConfigError(f"{name} = {value!r} in config.json: 1 to {LARGEST}; plan knows dense decoders only")
    is_tied = filled.get("tie_word_embeddings", False) is True
    return ModelShape(**{name: filled[name] for name in FIELDS}, tie_word_embeddings=is_tied)


def read_shape(directory: Path) -> ModelShape:
    """Read the shape of a model directory; raises ConfigError without a readable config.json."""
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            settings = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; name a model directory with its config.json") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: no JSON object")
    return shape_of(settings)
