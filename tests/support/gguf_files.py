"""GGUF files, written with the package `gguf` from a model directory as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
PLAIN = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

Choose = Callable[[str], Type]
"""Returns the type of a tensor, by its name in GGUF."""


def every(kind: Type) -> Choose:
    """All matrices in a type, norms and biases in F32."""
    return lambda name: Type.F32 if "norm" in name or name.endswith("bias") else kind


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model directory by their names in GGUF, Q and K of Llama's in the order of the converter."""
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"]
    architecture = _architecture(ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in _stored(directory).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if ".experts." in name:
            before, _, rest = name.partition(".experts.")
            number, _, side = rest.partition(".")
            experts.setdefault(f"{before}.experts.{side}", {})[int(number)] = tensor
            continue
        if ARCHITECTURES[kind] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = permuted(tensor, heads)
        found[str(names.get_name(name, (".weight", ".bias")))] = tensor
    for name, each in experts.items():
        found[str(names.get_name(name, (".weight",)))] = torch.stack([each[number] for number in sorted(each)])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _rope_factors(rope, config["head_dim"])
    return found


def permuted(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K in the order of a rotation of neighbours, as llama.cpp's converter puts them."""
    rows = matrix.shape[0] // heads // 2
    return matrix.reshape(heads, 2, rows, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def write_gguf(
    path: Path,
    directory: Path,
    choose: Choose = every(Type.F32),  # noqa: B008 - a function without state
    *,
    changes: Mapping[str, torch.Tensor | None] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split_tensors: int = 0,
) -> Path:
    """Write a model directory as one file, or as parts of at most `split_tensors` tensors; returns the first part.

    Args:
        changes: tensors of other contents, or None for tensors left out, by their names in GGUF.
        metadata: adds more entries.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]], split_max_tensors=split_tensors)
    _add_config(writer, config)
    add_tokenizer(writer, directory)
    metadata(writer)
    tensors: dict[str, torch.Tensor | None] = {**tensors_of(directory), **(changes or {})}
    for name, tensor in tensors.items():
        if tensor is not None:
            data, kind = packed(tensor, choose(name))
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def packed(tensor: torch.Tensor, kind: Type) -> tuple[Any, Type]:
    """A tensor's bytes in a type, by the package itself."""
    if kind in (Type.F32, Type.F16):
        return tensor.to(PLAIN[kind]).contiguous().numpy(), kind
    return gguf.quants.quantize(tensor.float().contiguous().numpy(), kind), kind


def unpacked(tensor: torch.Tensor, kind: Type) -> torch.Tensor:
    """The elements that a file has of a tensor in a type, fp32."""
    if kind in (Type.F32, Type.F16):
        return tensor.to(PLAIN[kind]).float()
    data, _ = packed(tensor, kind)
    return torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32))


def _rope_factors(rope: Mapping[str, float], head_dim: int) -> torch.Tensor:
    """What Llama 3.1 divides each frequency by, as llama.cpp's converter computes it."""
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factor, low, high, context = (
        rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    smooth = (context * frequencies / (2 * torch.pi) - low) / (high - low)
    return 1 / ((1 - smooth.clamp(0, 1)) / factor + smooth.clamp(0, 1))


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(each for each, its_name in gguf.MODEL_ARCH_NAMES.items() if its_name == name)


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(directory.glob("*.safetensors")) for name, each in load_file(path).items()}


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    head_dim = config.get("head_dim")
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    """Add a byte-level tokenizer's metadata."""
    content = json.loads((directory / "tokenizer.json").read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {number: text for text, number in content["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    ids = range(max(texts) + 1)
    kinds = [_kind(added.get(number)) for number in ids]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in ids])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]])
    eos = json.loads((directory / "config.json").read_text()).get("eos_token_id")
    if isinstance(eos, int):
        writer.add_eos_token_id(eos)
    config = directory / "tokenizer_config.json"
    template = json.loads(config.read_text()).get("chat_template") if config.exists() else None
    if template:
        writer.add_chat_template(template)


def _kind(added: dict[str, Any] | None) -> int:
    if added is None:
        return NORMAL
    return CONTROL if added["special"] else USER_DEFINED
