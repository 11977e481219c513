"""Dense decoder shared by Qwen3 and Llama 3: grouped-query attention and a gated MLP, pre-norm.

An architecture file turns its config.json into a `DecoderConfig`; architectures differ only in data.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.ops.base import AttentionWeights, ForwardBatch, Ops, Residual


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Settings of the forward pass; all sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    inverse_frequencies: tuple[float, ...]  # [head_dim / 2], radians a position
    dtype: str  # of the checkpoint


class Piece(NamedTuple):
    """A checkpoint tensor and its place in a stacked tensor: rows `[begin, begin + shape[0])`."""

    checkpoint_name: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    attention: AttentionWeights
    o: Tensor  # [hidden, q_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


def weight_pieces(config: DecoderConfig) -> dict[str, list[Piece]]:
    """Return the checkpoint tensors stacked into each of the decoder's tensors, by the decoder tensor's name."""
    pieces = {
        "embed": [Piece("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), 0)],
        "norm": [Piece("model.norm.weight", (config.hidden_size,), 0)],
    }
    if not config.tied_embeddings:
        pieces["lm_head"] = [Piece("lm_head.weight", (config.vocab_size, config.hidden_size), 0)]
    for i in range(config.num_layers):
        for name, stacked in _layer_pieces(config, f"model.layers.{i}").items():
            pieces[f"layers.{i}.{name}"] = stacked
    return pieces


def _layer_pieces(config: DecoderConfig, prefix: str) -> dict[str, list[Piece]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_q_heads * dim, config.num_kv_heads * dim
    pieces = {
        "attention_norm": [Piece(f"{prefix}.input_layernorm.weight", (hidden,), 0)],
        "qkv": [
            Piece(f"{prefix}.self_attn.q_proj.weight", (q_rows, hidden), 0),
            Piece(f"{prefix}.self_attn.k_proj.weight", (kv_rows, hidden), q_rows),
            Piece(f"{prefix}.self_attn.v_proj.weight", (kv_rows, hidden), q_rows + kv_rows),
        ],
        "o": [Piece(f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows), 0)],
        "mlp_norm": [Piece(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0)],
        "gate_up": [
            Piece(f"{prefix}.mlp.gate_proj.weight", (inner, hidden), 0),
            Piece(f"{prefix}.mlp.up_proj.weight", (inner, hidden), inner),
        ],
        "down": [Piece(f"{prefix}.mlp.down_proj.weight", (hidden, inner), 0)],
    }
    if config.qk_norm:
        pieces["q_norm"] = [Piece(f"{prefix}.self_attn.q_norm.weight", (dim,), 0)]
        pieces["k_norm"] = [Piece(f"{prefix}.self_attn.k_norm.weight", (dim,), 0)]
    return pieces


def rope_table(config: DecoderConfig, max_positions: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of every position's half angles: `[max_positions, head_dim]` fp32."""
    frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


class Decoder:
    """Weights and the forward pass over them.

    Args:
        tensors: as named by `weight_pieces`, all on the same device and of the same dtype.
        max_positions: longest sequence served, in tokens.
    """

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], max_positions: int) -> None:
        self.config = config
        self.embed = tensors["embed"]
        self.norm = tensors["norm"]
        self.lm_head = tensors["embed"] if config.tied_embeddings else tensors["lm_head"]
        rope = rope_table(config, max_positions, self.embed.device)
        self.layers = [self._layer(tensors, f"layers.{i}", rope) for i in range(config.num_layers)]

    def _layer(self, tensors: dict[str, Tensor], prefix: str, rope: Tensor) -> LayerWeights:
        config = self.config
        return LayerWeights(
            attention_norm=tensors[f"{prefix}.attention_norm"],
            qkv=tensors[f"{prefix}.qkv"],
            attention=AttentionWeights(
                q_norm=tensors.get(f"{prefix}.q_norm"),
                k_norm=tensors.get(f"{prefix}.k_norm"),
                norm_eps=config.norm_eps,
                rope=rope,
                num_q_heads=config.num_q_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
            o=tensors[f"{prefix}.o"],
            mlp_norm=tensors[f"{prefix}.mlp_norm"],
            gate_up=tensors[f"{prefix}.gate_up"],
            down=tensors[f"{prefix}.down"],
        )

    def forward(self, batch: ForwardBatch, ops: Ops) -> Tensor:
        """Write K and V of all tokens; return logits of the tokens wanted by `batch`, fp32 `[num_wanted, vocab]`."""
        return self.logits(self.hidden(batch, ops), ops)

    def logits(self, x: Residual, ops: Ops) -> Tensor:
        """Return logits of all or some rows of the result of `hidden`: fp32 `[num_tokens, vocab]`."""
        return ops.logits(x, self.norm, self.config.norm_eps, self.lm_head)

    def hidden(self, batch: ForwardBatch, ops: Ops) -> Residual:
        """Write K and V of all tokens; return the residual stream of the wanted tokens behind the last layer."""
        eps, last_layer = self.config.norm_eps, len(self.layers) - 1
        batch = ops.begin(batch, self.config.num_q_heads)
        x = ops.embed(batch.token_ids, self.embed)
        for layer_id, layer in enumerate(self.layers):
            qkv = ops.norm_linear(x, layer.attention_norm, eps, layer.qkv)
            if layer_id == last_layer and batch.last_tokens is not None:
                attended = ops.attention_of_last(qkv, layer.attention, layer_id, batch)
                x = Residual(x.rows[batch.last_tokens])  # only K and V of the other tokens are needed
            else:
                attended = ops.attention(qkv, layer.attention, layer_id, batch)
            x = ops.linear_add(attended, layer.o, x)
            inner = ops.norm_gate_up(x, layer.mlp_norm, eps, layer.gate_up)
            x = ops.linear_add(inner, layer.down, x)
        return x
