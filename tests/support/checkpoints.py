"""Tiny random checkpoints, written by transformers, so that ours is compared with the original."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.mxfp4 import pack_experts, round_experts

VOCAB = 300

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}

LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
}
GROUPS = {"n_group": 4, "topk_group": 2}
HYBRID = {
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
GPT_OSS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "sliding_window": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": YARN | {"factor": 8.0, "truncate": False},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": (
        "qwen3",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-odd-group": ("qwen2", {"num_attention_heads": 14, "hidden_size": 96}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 64}),
    "mistral-window": ("mistral", {"sliding_window": 24, "num_hidden_layers": 2}),
    "ministral": (
        "ministral",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3.5": ("qwen3_5_text", HYBRID),
    "qwen3-moe": (
        "qwen3_moe",
        EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": False},
    ),
    "qwen3-moe-unnormed": ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3.5-moe": ("qwen3_5_moe_text", HYBRID | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3-next": ("qwen3_next", HYBRID | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "gemma3": (
        "gemma3_text",
        {
            "tie_word_embeddings": False,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-mxfp4": ("gpt_oss", GPT_OSS | {"layer_types": None, "intermediate_size": 64}),
    "gemma4": (
        "gemma4_text",
        GEMMA4 | {"tie_word_embeddings": False, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB},
    ),
    "gemma4-experts": (
        "gemma4_text",
        GEMMA4
        | {
            "tie_word_embeddings": False,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4-unified": ("gemma4_unified_text", GEMMA4 | {"attention_k_eq_v": False}),
    "llama3-scaled": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "deepseek-v2-lite": ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v2": (
        "deepseek_v2",
        LATENT | GROUPS | {"q_lora_rank": 48, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek-v3": ("deepseek_v3", LATENT | GROUPS | {"q_lora_rank": 48, "routed_scaling_factor": 2.5}),
    "mistral4": (
        "mistral4",
        LATENT
        | {
            "head_dim": 48,
            "q_lora_rank": 48,
            "first_k_dense_replace": 0,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3},
        },
    ),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1], "rope_parameters": YARN, "pad_token_id": None},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN | {"truncate": False, "factor": 4.0}}),
    "ministral3": (
        "ministral3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
}


NORMS_ARE_OFFSETS = ("qwen3_5", "qwen3_next", "gemma3")
"""Beginnings of values of `model_type` whose norms are stored as offsets from 1."""

WRAPPED = ("kimi_k25", "qwen3_5", "qwen3_5_moe", "mistral3", "gemma3", "gemma4", "gemma4_unified")
"""Values of `model_type` whose text model stands inside another."""

LIKE_OTHERS = {"kimi_k2": "deepseek_v3"}
"""Values of `model_type` that transformers does not know, and those with the same computation."""

CLASSES = {"mistral4": "Mistral4ForCausalLM"}
"""Names of classes that AutoModelForCausalLM does not find."""

OTHERS = {
    "qwen3_5_moe": ("model.visual.blocks.0.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"),
    "qwen3_5": ("model.visual.blocks.0.weight", "mtp.layers.0.weight"),
    "kimi_k25": ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"),
    "mistral3": ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"),
    "gemma3": ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    "gemma4": ("model.vision_tower.patch_embedder.input_proj.weight", "model.embed_vision.embedding_projection.weight"),
    "gemma4_unified": ("model.vision_embedder.patch_dense.weight", "model.embed_audio.embedding_projection.weight"),
}


def _wrapped(name: str, prefix: str) -> str:
    if prefix.startswith("language_model."):
        return f"language_model.{name}"
    return name.replace("model.", prefix, 1)


def wrap_checkpoint(source: Path, directory: Path, model_type: str, prefix: str) -> None:
    """Write a checkpoint as published: its config inside `text_config`, and tensors that text does not need."""
    tensors = load_file(source / "model.safetensors")
    wrapped = {_wrapped(name, prefix): tensor for name, tensor in tensors.items()}
    others = {name: torch.zeros(3) for name in OTHERS[model_type]}
    save_file(wrapped | others, directory / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": text}))


def write_checkpoint(
    variant: str,
    directory: Path,
    *,
    shard_bytes: str = "5GB",
    dtype: torch.dtype = torch.float32,
    sizes: dict[str, Any] | None = None,
) -> Any:
    """Write the variant to `directory` with a tokenizer; returns the transformers model, in eval mode.

    Args:
        sizes: settings that replace the variant's own.
    """
    import transformers

    model_type, changes = VARIANTS[variant]
    torch.manual_seed(sum(variant.encode()))
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **changes, **(sizes or {})})
    model = _make_model(model_type, config).to(dtype).eval()
    with torch.no_grad():
        drawn = ("layer_scalar", "e_score_correction_bias")
        buffers = [each for each in model.named_buffers() if each[0].endswith(drawn)]
        for name, parameter in (*model.named_parameters(), *buffers):
            _draw(name, parameter, norms_are_offsets=model_type.startswith(NORMS_ARE_OFFSETS))
            if model_type == "gpt_oss" and "gate_up_proj" in name:
                parameter.mul_(8.0)  # so that clamps change something
        if variant.endswith("mxfp4"):
            round_experts(model)
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    if variant.endswith("mxfp4"):
        pack_experts(directory)
    write_tokenizer(directory)
    return model


def _make_model(model_type: str, config: Any) -> Any:
    import transformers

    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])._from_config(config, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _draw(name: str, parameter: torch.Tensor, *, norms_are_offsets: bool) -> None:
    """Larger than the usual 0.02: tiny models otherwise ignore their context and hide mistakes."""
    if name.endswith("A_log"):
        parameter.uniform_(0.01, 16.0).log_()
    elif name.endswith("dt_bias"):
        parameter.normal_(1.0, 0.5)
    elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        parameter.normal_(1.0, 0.2)
    elif "norm" not in name or (norms_are_offsets and not name.endswith("linear_attn.norm.weight")):
        parameter.normal_(0.0, 0.15)
    else:
        parameter.normal_(1.0, 0.2)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer of at most VOCAB tokens, `<eos>` being token 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, and the dog sleeps on"] * 20, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
