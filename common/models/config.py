"""Sizes of a decoder as data: a family's file turns config.json into a `DecoderConfig`. Needs no torch."""

from dataclasses import dataclass

from msgspec.structs import replace

from common.base.errors import ConfigError
from common.models.quantization.rules import Quantization
from common.models.sizes.attention import Attention, Heads, PairProducts
from common.models.sizes.codes import Codes
from common.models.sizes.delta_rule import DeltaRule
from common.models.sizes.experts import Experts
from common.models.sizes.latent import Latent
from common.models.sizes.mlp import GatedMLP
from common.models.sizes.parallel_experts import ParallelExperts
from common.models.sizes.quantized import (
    HEAD,
    is_of_experts,
    kept,
    quantized,
    saved_bytes,
    widened_bytes,
    widening_bytes,
    with_head,
)
from common.models.sizes.stacks import Source, Stacks, stacked
from common.wire.values.kv_layout import E4M3, KVGroup, scales_digest

Mixer = Attention | Latent | DeltaRule
MLP = GatedMLP | Experts | ParallelExperts


def cached_dtype(choice: str, dtype: str, *, has_latents: bool) -> str:
    """Return the dtype of keys and values, as `kv.dtype` chooses, of a model in `dtype`; raises ConfigError."""
    if choice == "auto":
        return dtype
    if has_latents:
        raise ConfigError(
            "kv.dtype = 'fp8': this model caches latents, not keys and values, and latents in fp8 are not supported; "
            "set auto"
        )
    return E4M3


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer; equal layers have weights of equal shapes and run equal kernels."""

    mixer: Mixer
    mlp: MLP
    is_scaled: bool = False  # the residual stream is multiplied by a weight at the end

    def num_weights(self, hidden_size: int) -> float:
        """Return the elements of all matrices."""
        return self.mixer.num_weights(hidden_size) + self.mlp.num_rows * hidden_size

    def token_weights(self, hidden_size: int) -> int:
        """Return the elements that a token is multiplied by."""
        return self.mixer.num_weights(hidden_size) + self.mlp.token_rows * hidden_size

    def step_weights(self, hidden_size: int, num_tokens: int) -> float:
        """Return the elements read by a decode step of `num_tokens` sequences; of experts those chosen, on average."""
        return self.mixer.num_weights(hidden_size) + self.mlp.step_rows(num_tokens) * hidden_size

    def stacks(self, source: Source, prefix: str) -> Stacks:
        """Return the layer's weights, of which `prefix` begins the names in a checkpoint."""
        stacks = source.norms.stacks(source, prefix)
        stacks |= self.mixer.stacks(source, prefix) | self.mlp.stacks(source, prefix)
        if self.is_scaled:
            stacks["scale"] = stacked([(f"{prefix}.layer_scalar", 1)])._replace(dtype="float32")
        return stacks


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
    embed_scale: float = 1.0  # of the input's rows
    logit_cap: float = 0.0  # logits become cap * tanh(logits / cap); 0: they stay
    exceeds_float16: bool = False  # activations are beyond 65504, the largest number of float16
    quantization: Quantization | None = None  # of the checkpoint; matrices are made plain at load, but for `kept`
    scheme: str = ""  # in which products are held, quantized at load; "": as the checkpoint has them, or plain
    kept: tuple[tuple[str, Codes], ...] = ()  # stacks held in the checkpoint's own codes, by name
    held_as: str = ""  # for the log: in which codes of the checkpoint matrices stay, and why others do not
    head: str = ""  # scheme in which the matrix of logits is held, quantized at load; "": as it is

    @property
    def codes(self) -> str:
        """Return all that determines which numbers matrices hold, beside the checkpoint; "" if nothing is quantized."""
        return repr((self.scheme, sorted(self.kept), self.head)) if self._has_codes else ""

    @property
    def hidden_size(self) -> int:
        return self.source.hidden_size

    @property
    def num_weights(self) -> int:
        """Return the elements of all matrices, without the input's table; packed elements count by their bytes."""
        of_layers = sum(layer.num_weights(self.hidden_size) for layer in self.layers)
        return round(self.hidden_size * self.vocab_size + of_layers)

    @property
    def token_weights(self) -> int:
        """Return the elements of matrices of layers that a token is multiplied by."""
        return sum(layer.token_weights(self.hidden_size) for layer in self.layers)

    @property
    def pair_products(self) -> PairProducts:
        pairs, window = {True: 0, False: 0}, 0
        for mixer in (layer.mixer for layer in self.layers):
            if not isinstance(mixer, DeltaRule):
                size = mixer.window if isinstance(mixer, Attention) else 0
                pairs[size > 0] += mixer.pair_products
                window = max(window, size)
        return PairProducts(pairs[False], pairs[True], window)

    def step_weights(self, num_tokens: int) -> int:
        """Return the elements of matrices read by a decode step of `num_tokens` sequences, on average.

        Packed elements count by their bytes.
        """
        of_layers = sum(layer.step_weights(self.hidden_size, num_tokens) for layer in self.layers)
        return round(self.hidden_size * self.vocab_size + of_layers)

    def step_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Return the bytes of matrices read by a decode step, on average, with plain elements of `element_bytes`."""
        plain_bytes = self.step_weights(num_tokens) * element_bytes
        if not self._has_codes:
            return plain_bytes
        stacks, unread = self.stacks(), 0.0
        for name in filter(is_of_experts, stacks):
            mlp = self.layers[int(name.split(".")[1])].mlp
            assert isinstance(mlp, Experts | ParallelExperts)
            unread += (1.0 - mlp.read_share(num_tokens)) * saved_bytes({name: stacks[name]}, element_bytes)
        return plain_bytes - saved_bytes(stacks, element_bytes) + round(unread)

    def weight_bytes(self, element_bytes: int) -> int:
        """Return the bytes of all matrices with plain elements of `element_bytes`, the input's table included."""
        table = self.hidden_size * self.vocab_size if self.has_own_head else 0
        plain_bytes = (self.num_weights + table) * element_bytes
        return plain_bytes - saved_bytes(self.stacks(), element_bytes) if self._has_codes else plain_bytes

    def widening_bytes(self, element_bytes: int) -> int:
        """Return the bytes that a step of many tokens moves to make codes in groups plain: each read and written."""
        return widening_bytes(self.stacks(), element_bytes) if self._has_codes else 0

    @property
    def has_own_head(self) -> bool:
        """Tell whether the matrix of logits is another one in memory than the input's table."""
        return not self.tied_embeddings or bool(self.head) or HEAD in dict(self.kept)

    @property
    def _has_codes(self) -> bool:
        return bool(self.scheme or self.kept or self.head)

    @property
    def groups(self) -> tuple[Mixer, ...]:
        """Return a mixer of each group of KV blocks, in the order of layers; groups of states come last."""
        mixers: dict[object, Mixer] = {}
        for layer in self.layers:
            mixers.setdefault(layer.mixer.group, layer.mixer)
        return tuple(sorted(mixers.values(), key=lambda mixer: isinstance(mixer, DeltaRule)))

    @property
    def heads(self) -> tuple[Heads, ...]:
        """Return the heads of each group of KV blocks that attention reads."""
        return tuple(mixer.heads for mixer in self.groups if isinstance(mixer, Attention))

    @property
    def latents(self) -> tuple[Latent, ...]:
        """Return the latent attention of each group of KV blocks that holds latents."""
        return tuple(mixer for mixer in self.groups if isinstance(mixer, Latent))

    @property
    def q_heads(self) -> tuple[int, ...]:
        """Return the query heads of each group of KV blocks; 0 for a group of states."""
        return tuple(mixer.num_q_heads for mixer in self.groups)

    def cache_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """Return the groups of KV blocks, in the order of `groups`."""
        return tuple(self._cache(mixer, block_size, dtype) for mixer in self.groups)

    def _cache(self, mixer: Mixer, block_size: int, dtype: str) -> KVGroup:
        """Return the cache of the layers that are in a group with `mixer`."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer.group == mixer.group]
        group = mixer.cache(len(mixers), block_size, dtype)
        if group.dtype != E4M3:
            return group
        scales = [each.kv_scales for each in mixers if isinstance(each, Attention)]
        return replace(group, scales=scales_digest(scales))

    def stacks(self) -> Stacks:
        """Return all weights."""
        stacks = {
            "embed": self.source.matrix("model.embed_tokens.weight", self.vocab_size),
            "norm": self.source.norm("model.norm.weight", self.hidden_size),
        }
        if self.has_own_head:
            stored = "model.embed_tokens.weight" if self.tied_embeddings else "lm_head.weight"
            stacks["lm_head"] = self.source.matrix(stored, self.vocab_size)
        for number, layer in enumerate(self.layers):
            of_layer = layer.stacks(self.source, f"model.layers.{number}")
            stacks |= {f"layers.{number}.{name}": stack for name, stack in of_layer.items()}
        stacks = quantized(stacks, self.scheme) if self.scheme else kept(stacks, dict(self.kept))
        return with_head(stacks, self.head) if self.head else stacks

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return beginnings of names of checkpoint tensors that are not needed."""
        return (*self.source.ignored, "lm_head.weight") if self.tied_embeddings else self.source.ignored

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step, doubled for the allocator's rounding.

        Each logit row counts four times, for copies of the logits, token counts and the sampler's intermediate results.
        """
        hidden = self.hidden_size
        widths = [each.mixer.activation_elements + each.mlp.activation_elements(hidden) for each in self.layers]
        width = max(widths) + 4 * hidden
        of_matrix = widened_bytes(self.stacks()) if self._has_codes else 0
        return 2 * (num_tokens * width * 4 + num_logit_rows * self.vocab_size * 4 * 4 + of_matrix)

    def table_bytes(self, max_len: int) -> int:
        """Return the bytes of the rotary tables for sequences of `max_len` tokens."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention | Latent)]
        tables = {(mixer.rope, mixer.rope_dim) for mixer in mixers}
        return sum(max_len * (rope_dim + (rope.growth is not None)) * 4 for rope, rope_dim in tables)
