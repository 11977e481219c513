"""Protocols of a model, all that engine, memory budget, warm-up and runners know of an architecture."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from common.models.layers.tasks import Task as Task
from common.models.sizes.attention import Heads, PairProducts
from common.models.sizes.latent import Latent
from common.models.sizes.rope import Rope
from common.models.sizes.stacks import Stacks
from common.ops.base import ForwardBatch, Ops, Residual
from common.wire.values.kv_layout import KVGroup


class ModelConfig(Protocol):
    """Sizes of a model, known from config.json before any weight is read."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def dtype(self) -> str:
        """Return the checkpoint's dtype."""
        ...

    @property
    def num_weights(self) -> int:
        """Return the elements of all matrices, without the input's table; packed elements count by their bytes."""
        ...

    @property
    def exceeds_float16(self) -> bool:
        """Tell whether activations are beyond 65504, so that float16 gives no text."""
        ...

    def step_weights(self, num_tokens: int) -> int:
        """Return the elements of matrices read by a decode step of `num_tokens` sequences; packed ones by their bytes.

        Experts that no sequence has chosen are not read; their number is a mean over choices without preference.
        """
        ...

    def step_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Return the bytes of matrices read by a decode step, on average, with plain elements of `element_bytes`."""
        ...

    @property
    def token_weights(self) -> int:
        """Return the elements of matrices of layers that a token is multiplied by."""
        ...

    @property
    def pair_products(self) -> PairProducts:
        """Return the products of attention in a prompt."""
        ...

    @property
    def heads(self) -> tuple[Heads, ...]:
        """Return the heads of each group of KV blocks that attention reads."""
        ...

    @property
    def latents(self) -> tuple[Latent, ...]:
        """Return the latent attention of each group of KV blocks that holds latents."""
        ...

    @property
    def q_heads(self) -> tuple[int, ...]:
        """Return the query heads of each group of KV blocks; 0 for a group of states."""
        ...

    def cache_groups(self, block_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """Return the groups of KV blocks: one for all layers with equal caches."""
        ...

    def stacks(self) -> Stacks:
        """Return all weights, and how they come from a checkpoint."""
        ...

    def activation_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Return an upper bound of the bytes held at once by a step."""
        ...

    def table_bytes(self, max_len: int) -> int:
        """Return the bytes of a model beside its weights, made for sequences of `max_len` tokens."""
        ...


class Model(Protocol):
    """Weights on a device, and the forward pass over them."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: ForwardBatch, ops: Ops) -> Tensor:
        """Write K and V of all tokens; return logits of the tokens wanted by `batch`, fp32 `[num_wanted, vocab]`."""
        ...

    def hidden(self, batch: ForwardBatch, ops: Ops) -> Residual:
        """Write K and V of all tokens; return the residual stream of the wanted tokens behind the last layer."""
        ...

    def logits(self, x: Residual, ops: Ops) -> Tensor:
        """Return logits of all or some rows of the result of `hidden`: fp32 `[num_tokens, vocab]`."""
        ...

    def embedded(self, token_ids: Tensor, ops: Ops) -> Residual:
        """Return the input of the first layer for tokens: `[num_tokens, hidden]`."""
        ...

    def zeros(self, num_tokens: int) -> Residual:
        """Return a residual stream of zeros, to warm up with."""
        ...

    def mxfp4_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each matrix in MXFP4: a checkpoint's name of the scales, uint8 values of two a byte, uint8 scales."""
        ...

    def attention_tasks(self, ops: Ops, batch: ForwardBatch, *, of_last: bool = False) -> list[Task]:
        """Return attention of each distinct layer over `batch`; `of_last`: of the last layer of a prompt."""
        ...

    def product_tasks(self, ops: Ops, num_tokens: int) -> list[Task]:
        """Return products and norms of each distinct layer for `num_tokens`, with and without parts to add."""
        ...


def rope_table(rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Return cosines, then sines, of every position's half angles: `[max_positions, head_dim]` fp32.

    Dimensions without a frequency do not turn.
    """
    num_turned = len(rope.inverse_frequencies)
    frequencies = torch.zeros(head_dim // 2)
    frequencies[:num_turned] = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    table[..., :num_turned] *= rope.factor
    return table.flatten(1).to(device)


def query_factors(rope: Rope, max_positions: int, device: torch.device) -> Tensor | None:
    """Return the factor of queries at every position: `[max_positions]` fp32; None where it is 1."""
    if rope.growth is None:
        return None
    turns = torch.arange(max_positions, device=device).div(rope.growth.period, rounding_mode="floor").float()
    return 1.0 + rope.growth.rate * torch.log1p(turns)
