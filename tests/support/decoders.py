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

QWEN3_5_4B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "intermediate_size": 6144,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def qwen3_30b_a3b() -> DecoderConfig:
    """The config of a Qwen3-30B-A3B of one layer."""
    return decoder_config(Settings(QWEN3_30B_A3B, "Qwen3-30B-A3B"))


def qwen3_5_4b() -> DecoderConfig:
    """The config of a Qwen3.5-4B of four layers: each kind of layer is there."""
    return decoder_config(Settings(QWEN3_5_4B, "Qwen3.5-4B"))


def qwen3_4b(*, num_layers: int, max_positions: int) -> DecoderConfig:
    """The config of a shortened Qwen3-4B."""
    changes = {"num_hidden_layers": num_layers, "max_position_embeddings": max_positions}
    return decoder_config(Settings(QWEN3_4B | changes, "Qwen3-4B"))
