"""Sizes of a decoder as data: a family's file turns config.json into a `DecoderConfig`. Needs no torch."""

from collections import Counter
from dataclasses import dataclass

from common.models.mixers import Attention, Heads, Mixer
from common.models.stacks import Source, Stacks, stacked
from common.wire.values.kv_layout import KVGroup


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))` behind a norm."""

    inner: int

    @property
    def num_rows(self) -> int:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return 3 * self.inner

    def stacks(self, source: Source, prefix: str) -> Stacks:
        name, hidden = f"{prefix}.mlp", source.hidden_size
        rows = [(f"{name}.gate_proj.weight", self.inner), (f"{name}.up_proj.weight", self.inner)]
        return {
            "mlp_norm": source.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            "gate_up": stacked(rows, hidden),
            "down": source.matrix(f"{name}.down_proj.weight", hidden, self.inner),
        }


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer; equal layers have weights of equal shapes and run equal kernels."""

    mixer: Mixer
    mlp: GatedMLP

    @property
    def num_rows(self) -> int:
        """Return the rows of all matrices, each as wide as the residual stream."""
        return self.mixer.num_rows + self.mlp.num_rows


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Settings of the forward pass; all sizes in elements."""

    vocab_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    dtype: str  # of the checkpoint
    layers: tuple[Layer, ...]
    source: Source

    @property
    def hidden_size(self) -> int:
        return self.source.hidden_size

    @property
    def step_weights(self) -> int:
        """Return the elements of all matrices read by a decode step of any batch."""
        return self.hidden_size * (sum(layer.num_rows for layer in self.layers) + self.vocab_size)

    @property
    def groups(self) -> tuple[object, ...]:
        """Return what is equal among the layers of each group of KV blocks; groups of attention come first."""
        keys = dict.fromkeys(group_key(layer.mixer) for layer in self.layers)
        return tuple(sorted(keys, key=lambda key: not isinstance(key, Heads)))

    @property
    def heads(self) -> tuple[Heads, ...]:
        """Return the heads of each group of KV blocks that attention reads."""
        return tuple(key for key in self.groups if isinstance(key, Heads))

    @property
    def q_heads(self) -> tuple[int, ...]:
        """Return the query heads of each group of KV blocks; 0 for a group of states."""
        return tuple(key.num_q_heads if isinstance(key, Heads) else 0 for key in self.groups)

    def cache_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """Return the groups of KV blocks, in the order of `groups`."""
        count = Counter(group_key(layer.mixer) for layer in self.layers)
        mixers = {group_key(layer.mixer): layer.mixer for layer in self.layers}
        return tuple(mixers[key].cache(count[key], block_size, dtype) for key in self.groups)

    def stacks(self) -> Stacks:
        """Return all weights."""
        stacks = {
            "embed": self.source.matrix("model.embed_tokens.weight", self.vocab_size),
            "norm": self.source.norm("model.norm.weight", self.hidden_size),
        }
        if not self.tied_embeddings:
            stacks["lm_head"] = self.source.matrix("lm_head.weight", self.vocab_size)
        for number, layer in enumerate(self.layers):
            for part in (layer.mixer, layer.mlp):
                of_part = part.stacks(self.source, f"model.layers.{number}")
                stacks |= {f"layers.{number}.{name}": stack for name, stack in of_part.items()}
        return stacks

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return beginnings of names of checkpoint tensors that are not needed."""
        return (*self.source.ignored, "lm_head.weight") if self.tied_embeddings else self.source.ignored

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step, doubled for the allocator's rounding.

        Each logit row counts four times, for copies of the logits, token counts and the sampler's intermediate results.
        """
        width = max(layer.num_rows for layer in self.layers) + 4 * self.hidden_size
        return 2 * (num_tokens * width * 4 + num_logit_rows * self.vocab_size * 4 * 4)

    def table_bytes(self, max_len: int) -> int:
        """Return the bytes of the rotary tables for sequences of `max_len` tokens."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        tables = {mixer.inverse_frequencies: mixer.heads.head_dim for mixer in mixers}
        return sum(max_len * head_dim * 4 for head_dim in tables.values())


def group_key(mixer: Mixer) -> object:
    """Return what is equal among the layers of a group: heads, or the sizes of a state."""
    return mixer.heads if isinstance(mixer, Attention) else mixer
