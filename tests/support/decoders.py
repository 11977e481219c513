"""Decoders of Qwen3-4B's shapes with few layers, for tests of kernels and runners."""

from common.models.config import DecoderConfig
from common.models.reading import decoder_config
from common.models.settings import Settings

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def qwen3_4b(*, num_layers: int, max_positions: int) -> DecoderConfig:
    """The config of a shortened Qwen3-4B."""
    changes = {"num_hidden_layers": num_layers, "max_position_embeddings": max_positions}
    return decoder_config(Settings(QWEN3_4B | changes, "Qwen3-4B"))
