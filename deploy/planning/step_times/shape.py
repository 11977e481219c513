"""Sizes of a model behind step times: weights, products, and KV kept."""

from dataclasses import dataclass, replace
from pathlib import Path

from common.base.errors import ConfigError, ModelError
from common.models.config import DecoderConfig, cached_dtype
from common.models.forms import Target, forms_on
from common.models.held import sized_model
from common.models.reading import AS_STORED, KEEP

DTYPE = "bfloat16"
BYTES = 2
"""Bytes of a weight that is not in 8 bits, and of an element of keys and values in the model's dtype."""
ALL_EXPERTS = 1_000_000
"""Tokens of a step that reads all experts."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder."""

    num_layers: int
    layer_weights: int  # of all layers, applied to each prompt token
    step_bytes: int  # weights read by a decode step of any batch, experts to choose from left out
    weight_bytes: int  # all weights, except norms and biases
    kv_bytes: int  # of a token in all layers that see all tokens
    pair_products: int  # of a pair of tokens in attention of such layers, up to a factor common to all models
    token_bytes: int  # held by a step for each token
    logit_bytes: int  # held by a step for each row of logits
    expert_bytes: int = 0  # weights of all experts to choose from
    expert_share: float = 0.0  # of these experts that a token chooses
    window: int = 0  # tokens seen by a token in layers with a window, itself included; 0 without such layers
    window_bytes: int = 0  # of a token in all layers with a window
    window_pairs: int = 0  # as `pair_products`, of layers with a window
    state_bytes: int = 0  # of a sequence in all layers with states
    matrix_bytes: int = 0  # held by a step of any size, for a matrix in 8 bits made plain
    widening_bytes: int = 0  # read and written by each prompt step to make codes in groups plain

    def read_bytes(self, num_tokens: float) -> float:
        """Return the weights read by a step, where tokens choose experts without preference."""
        unread_share: float = (1.0 - self.expert_share) ** num_tokens
        return self.step_bytes + self.expert_bytes * (1.0 - unread_share)

    def context_bytes(self, num_tokens: float) -> float:
        """Return the bytes that a sequence of `num_tokens` holds."""
        return self.kv_bytes * num_tokens + self.window_bytes * min(num_tokens, self.window) + self.state_bytes

    def moved_bytes(self, num_tokens: float) -> float:
        """Return the bytes that a sequence's next token reads, and of states also writes."""
        return self.context_bytes(num_tokens) + self.state_bytes

    def with_cache(self, kv_dtype: str) -> "ModelShape":
        """Return the shape with keys and values in `kv.dtype`, of a shape whose keys and values are in 16 bits."""
        if kv_dtype == "auto":
            return self
        return replace(self, kv_bytes=self.kv_bytes // BYTES, window_bytes=self.window_bytes // BYTES)

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step."""
        return self.matrix_bytes + num_tokens * self.token_bytes + num_logit_rows * self.logit_bytes


def read_shape(
    path: Path, target: Target, kv_dtype: str = "auto", quantization: str = AS_STORED, head: str = KEEP
) -> ModelShape:
    """Read the shape of a model's directory or GGUF file; raises ConfigError for a model that plan does not know.

    Args:
        target: what the model is to be served on.
        kv_dtype: as `kv.dtype` of workers.
        quantization: as `model.quantization` of workers; a model that keeps packed weights has AS_STORED only.
        head: as `model.head` of workers.
    """
    try:
        return shape_of(sized_model(path, forms_on(target, quantization), head), kv_dtype)
    except ModelError as error:
        raise ConfigError(str(error)) from None


def shape_of(config: DecoderConfig, kv_dtype: str = "auto") -> ModelShape:
    """Return the shape of a model with `kv.dtype`; raises ConfigError where its cache cannot be in it."""
    groups = config.cache_groups(1, cached_dtype(kv_dtype, DTYPE, has_latents=bool(config.latents)))
    pairs = config.pair_products
    any_step, matrix_bytes = config.step_weights(0), config.activation_bytes(0, 0)
    experts = config.num_weights - any_step
    return ModelShape(
        num_layers=len(config.layers),
        layer_weights=config.token_weights,
        step_bytes=config.step_bytes(0, BYTES),
        weight_bytes=config.weight_bytes(BYTES),
        kv_bytes=sum(group.token_bytes for group in groups if group.grows and not group.window),
        pair_products=pairs.everywhere,
        token_bytes=config.activation_bytes(1, 0) - matrix_bytes,
        logit_bytes=config.activation_bytes(0, 1) - matrix_bytes,
        expert_bytes=config.step_bytes(ALL_EXPERTS, BYTES) - config.step_bytes(0, BYTES),
        expert_share=(config.step_weights(1) - any_step) / experts if experts else 0.0,
        window=max(group.window for group in groups),
        window_bytes=sum(group.token_bytes for group in groups if group.window),
        window_pairs=pairs.in_window,
        state_bytes=sum(group.block_bytes for group in groups if not group.grows),
        matrix_bytes=matrix_bytes,
        widening_bytes=config.widening_bytes(BYTES),
    )
