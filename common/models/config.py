"""Sizes of a decoder as data: a family's file turns config.json into a `DecoderConfig`. Needs no torch."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from common.wire.values.kv_layout import CacheKind, KVGroup


class Piece(NamedTuple):
    """A checkpoint tensor and its place in a stacked tensor: rows `[begin, begin + shape[0])`."""

    checkpoint_name: str
    shape: tuple[int, ...]
    begin: int = 0


Pieces = dict[str, list[Piece]]
"""Checkpoint tensors stacked into each tensor of a model, by the name of the model's tensor."""


class Heads(NamedTuple):
    """Geometry of attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention over the whole context, behind a norm."""

    heads: Heads
    inverse_frequencies: tuple[float, ...]  # [head_dim / 2], radians a position
    qk_norm: bool = False  # query and key heads are normed before the rotation
    has_bias: bool = False  # added to Q, K and V

    @property
    def q_width(self) -> int:
        return self.heads.num_q_heads * self.heads.head_dim

    @property
    def kv_width(self) -> int:
        return self.heads.num_kv_heads * self.heads.head_dim

    def pieces(self, hidden_size: int, prefix: str) -> Pieces:
        q_width, kv_width, name = self.q_width, self.kv_width, f"{prefix}.self_attn"
        pieces = {
            "attention_norm": [Piece(f"{prefix}.input_layernorm.weight", (hidden_size,))],
            "qkv": [
                Piece(f"{name}.q_proj.weight", (q_width, hidden_size)),
                Piece(f"{name}.k_proj.weight", (kv_width, hidden_size), q_width),
                Piece(f"{name}.v_proj.weight", (kv_width, hidden_size), q_width + kv_width),
            ],
            "o": [Piece(f"{name}.o_proj.weight", (hidden_size, q_width))],
        }
        if self.has_bias:
            pieces["qkv_bias"] = [
                Piece(f"{name}.q_proj.bias", (q_width,)),
                Piece(f"{name}.k_proj.bias", (kv_width,), q_width),
                Piece(f"{name}.v_proj.bias", (kv_width,), q_width + kv_width),
            ]
        if self.qk_norm:
            pieces["q_norm"] = [Piece(f"{name}.q_norm.weight", (self.heads.head_dim,))]
            pieces["k_norm"] = [Piece(f"{name}.k_norm.weight", (self.heads.head_dim,))]
        return pieces


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))` behind a norm."""

    inner: int

    def pieces(self, hidden_size: int, prefix: str) -> Pieces:
        name, inner = f"{prefix}.mlp", self.inner
        return {
            "mlp_norm": [Piece(f"{prefix}.post_attention_layernorm.weight", (hidden_size,))],
            "gate_up": [
                Piece(f"{name}.gate_proj.weight", (inner, hidden_size)),
                Piece(f"{name}.up_proj.weight", (inner, hidden_size), inner),
            ],
            "down": [Piece(f"{name}.down_proj.weight", (hidden_size, inner))],
        }


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer; equal layers have weights of equal shapes and run equal kernels."""

    attention: Attention
    mlp: GatedMLP

    def num_weights(self, hidden_size: int) -> int:
        """Return the elements of all matrices, each of which is multiplied by every token."""
        return hidden_size * (2 * self.attention.q_width + 2 * self.attention.kv_width + 3 * self.mlp.inner)

    def width(self, hidden_size: int) -> int:
        """Return the elements of a token held at once by the layer."""
        return 2 * self.attention.q_width + 2 * self.attention.kv_width + 3 * self.mlp.inner + 4 * hidden_size


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Settings of the forward pass; all sizes in elements."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    dtype: str  # of the checkpoint
    layers: tuple[Layer, ...]

    @property
    def heads(self) -> tuple[Heads, ...]:
        """Return the distinct attention heads of all layers, in order of their first layers."""
        return tuple(dict.fromkeys(layer.attention.heads for layer in self.layers))

    @property
    def step_weights(self) -> int:
        """Return the elements of all matrices read by a decode step of any batch."""
        return sum(layer.num_weights(self.hidden_size) for layer in self.layers) + self.vocab_size * self.hidden_size

    def cache_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """Return the group of KV blocks of each of `heads`, for all layers with these heads."""
        count = Counter(layer.attention.heads for layer in self.layers)
        return tuple(_cache(heads, count[heads], block_size, dtype) for heads in self.heads)

    def pieces(self) -> Pieces:
        """Return the checkpoint tensors of all weights."""
        table_shape = (self.vocab_size, self.hidden_size)
        pieces = {
            "embed": [Piece("model.embed_tokens.weight", table_shape)],
            "norm": [Piece("model.norm.weight", (self.hidden_size,))],
        }
        if not self.tied_embeddings:
            pieces["lm_head"] = [Piece("lm_head.weight", table_shape)]
        for number, layer in enumerate(self.layers):
            for part in (layer.attention, layer.mlp):
                of_part = part.pieces(self.hidden_size, f"model.layers.{number}")
                pieces |= {f"layers.{number}.{name}": stacked for name, stacked in of_part.items()}
        return pieces

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step, doubled for the allocator's rounding.

        Each logit row counts four times, for copies of the logits, token counts and the sampler's intermediate results.
        """
        width = max(layer.width(self.hidden_size) for layer in self.layers)
        return 2 * (num_tokens * width * 4 + num_logit_rows * self.vocab_size * 4 * 4)

    def table_bytes(self, max_len: int) -> int:
        """Return the bytes of the rotary tables for sequences of `max_len` tokens."""
        tables = dict.fromkeys(layer.attention.inverse_frequencies for layer in self.layers)
        return sum(max_len * 2 * len(frequencies) * 4 for frequencies in tables)


def _cache(heads: Heads, num_layers: int, block_size: int, dtype: str) -> KVGroup:
    return KVGroup(CacheKind.FULL, num_layers, heads.num_kv_heads, heads.head_dim, block_size, 0, dtype)
