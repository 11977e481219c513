"""The `Ops` protocol, a model's view of the machine, and the batch and caches handed to operations.

Operations have the granularity of fused kernels. So one `forward` is fast both for prompts (GEMM) and for decode
(GEMV), without knowing which of the two runs.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from common.base.activation import Activation as Activation
from common.kernels.base.attention_operands import AttentionWeights as AttentionWeights  # models know no kernels
from common.kernels.base.attention_operands import Division, SharedDivision, SharedPrefixes
from common.kernels.base.delta_operands import DeltaWeights as DeltaWeights
from common.kernels.base.latent_operands import LatentWeights as LatentWeights
from common.ops.base.experts import ExpertWeights, Router, Routing
from common.ops.base.weight import Weight


class GroupCache(NamedTuple):
    """Cache of a group of layers, and what its layers have in common."""

    blocks: Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    # of latents [num_blocks, num_layers, 1, block_size, 1, rank + rope_dim], of states [.., 1, 1, rows, row]
    num_q_heads: int  # 0 for states
    window: int = 0  # tokens seen by a token, itself included; 0: all

    @property
    def has_states(self) -> bool:
        return self.num_q_heads == 0

    @property
    def has_latents(self) -> bool:
        return self.blocks.shape[2] == 1 and not self.has_states


class DecodeWork(NamedTuple):
    """Division of a decode step's attention over a group of KV blocks; holds for all layers of the group."""

    division: Division
    shared: SharedDivision | None  # made from `ForwardBatch.prefixes`


class RowsWork(NamedTuple):
    """Single tokens, each with its own context, divided among programs; holds for all layers of a group of latents."""

    block_tables: Tensor  # [num_rows, max_blocks] int32
    seq_lens: Tensor  # [num_rows] int32: keys that the token sees, 0 for padding
    divisions: tuple[Division, ...]  # of the rows of each launch


class StateWork(NamedTuple):
    """Sequences of a step that bring tokens which their states have not seen."""

    is_new: Tensor  # [num_seqs] bool


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens and sequences computed by one step; ragged, without padding between sequences.

    A decode batch has the last token of each sequence (`max_query_len` 1). The token's position is seq_len - 1, and the
    slot of this position follows from the block table. A row may be padding, with slot -1 and seq_len 0. Nothing is
    written for padding, and its output is unspecified but finite.
    """

    token_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int32, from 0 in each sequence
    slots: tuple[Tensor, ...]  # of each group [num_tokens] int64: for K and V, -1 for padding; () in a decode batch
    block_tables: tuple[Tensor, ...]  # of each group of KV blocks [num_seqs, max_blocks] int32
    seq_lens: Tensor  # [num_seqs] int32: KV length, tokens of the step included
    cu_seqlens: Tensor  # [num_seqs + 1] int32: begins of the sequences' tokens, then the end
    last_tokens: Tensor | None  # [num_seqs] int64: last token of each sequence, if only these logits are wanted
    max_query_len: int
    max_seq_len: int
    num_keys: int = 0  # at least the sum of seq_lens; 0 where the host knows no bound (captured steps)
    prefixes: SharedPrefixes | None = None  # of a decode batch, where shared blocks are to be read once for all rows
    work: tuple[DecodeWork | RowsWork | StateWork | None, ...] = ()  # of each group, made by `Ops.begin`

    def present(self) -> Tensor:
        """Return a positive number for each token, and 0 for padding: `[num_tokens]` int32."""
        return self.seq_lens if self.one_token_each else (self.slots[0] >= 0).int()

    @property
    def one_token_each(self) -> bool:
        return self.max_query_len == 1 and self.token_ids.shape[0] == self.seq_lens.shape[0]

    def one_query_each(self) -> "ForwardBatch":
        """Return the batch for attention of the last tokens alone: equal keys, unchanged fields by token."""
        bounds = torch.arange(self.seq_lens.shape[0] + 1, dtype=torch.int32, device=self.cu_seqlens.device)
        return replace(self, cu_seqlens=bounds, max_query_len=1)


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual stream between the addition of a product and the next norm."""

    rows: Tensor  # [num_tokens, hidden]
    parts: Tensor | None = None  # [splits, num_tokens, hidden]: to be added to `rows`, in place, by the norm

    def of(self, tokens: Tensor) -> "Residual":
        """Return a copy of some tokens, chosen by index."""
        return Residual(self.rows[tokens], None if self.parts is None else self.parts[:, tokens])


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm over the last dimension."""

    weight: Tensor  # [width]
    eps: float


class Ops(Protocol):
    """Fused operations; activations are `[num_tokens, ...]` in the model's dtype."""

    @property
    def shares_prefixes(self) -> bool:
        """Tell whether blocks shared by rows are read once, so that `ForwardBatch.prefixes` has an effect."""
        ...

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with work common to `attention` of all layers done; the first call of a step."""
        ...

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0) -> Residual:
        """Return rows of `table [vocab, hidden]`, times `scale` in the table's dtype: `[num_tokens, hidden]`."""
        ...

    def norm_linear(self, x: Residual, norm: Norm, weight: Weight) -> Tensor:
        """Return `rms_norm(x) @ weight.T`: `[num_tokens, out]`."""
        ...

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Apply query/key norm and RoPE, write K and V into the pool, and attend causally over the pool.

        `layer_id` is the layer's place in the cache of its group, `weights.group`.
        `qkv [num_tokens, weights.num_heads * head_dim]` -> `[num_tokens, q_heads * head_dim]`.
        """
        ...

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Do `attention`, but return only `batch.last_tokens`: `[num_seqs, q_heads * head_dim]`."""
        ...

    def latent_attention(
        self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        """Norm latents and rotate, write latents and shared keys into the pool, and attend causally over the pool.

        `q [num_tokens, num_heads * query_dim]` and `kv [num_tokens, rank + rope_dim]` have contiguous columns:
        `[num_tokens, num_heads * value_dim]`.
        """
        ...

    def latent_attention_of_last(
        self, q: Tensor, kv: Tensor, weights: LatentWeights, layer_id: int, batch: ForwardBatch
    ) -> Tensor:
        """Do `latent_attention`, but return only `batch.last_tokens`: `[num_seqs, num_heads * value_dim]`."""
        ...

    def delta_rule(self, x: Tensor, weights: DeltaWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Convolve, and advance the states of the sequences by the gated delta rule; norm and gate the result.

        `x [num_tokens, channels + value_width + 2 * value_heads]` -> `[num_tokens, value_width]`.
        """
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return `x * sigmoid(gate)`."""
        ...

    def linear_add(self, x: Tensor, weight: Weight, residual: Residual) -> Residual:
        """Return `residual + x @ weight.T`; may reuse the memory of `residual`, to which a norm has added its parts."""
        ...

    def linear_norm_add(
        self, x: Tensor, weight: Weight, norm: Norm, residual: Residual, scale: Tensor | None = None
    ) -> Residual:
        """Return `(residual + rms_norm(x @ weight.T)) * scale`; may reuse memory as `linear_add` does.

        `scale`: `[1]` fp32, or None for 1.
        """
        ...

    def norm_add(self, x: Tensor, norm: Norm, residual: Residual, scale: Tensor | None = None) -> Residual:
        """Return `(residual + rms_norm(x)) * scale`, as `linear_norm_add` does."""
        ...

    def norm_gate_up(
        self, x: Residual, norm: Norm, gate_up: Weight, activation: Activation = Activation.SILU
    ) -> Tensor:
        """Return `activation(g) * u`: `g, u = rms_norm(x) @ gate_up.T`, halves of `gate_up [2 * inner, hidden]`."""
        ...

    def norm(self, x: Residual, norm: Norm) -> Tensor:
        """Return `rms_norm(x)`: `[num_tokens, hidden]`."""
        ...

    def norm_route(self, x: Residual, norm: Norm, router: Router, present: Tensor) -> tuple[Tensor, Routing]:
        """Return `rms_norm(x)`, and the experts that `router` chooses by it.

        Padding, where `present [num_tokens]` int32 is 0, has none.
        """
        ...

    def experts_add(self, x: Tensor, routing: Routing, weights: ExpertWeights, residual: Residual) -> Residual:
        """Return `residual + experts(x)`, the weighted sum of each token's experts of `x`, which is 0 for padding.

        May reuse memory as `linear_add` does.
        """
        ...

    def experts_norm_add(
        self, x: Tensor, routing: Routing, weights: ExpertWeights, norm: Norm, residual: Residual
    ) -> Residual:
        """Return `residual + rms_norm(experts(x))`, as `experts_add` does."""
        ...

    def logits(self, x: Residual, norm: Norm, weight: Weight, cap: float = 0.0) -> Tensor:
        """Return `rms_norm(x) @ weight.T` as fp32: `[num_tokens, vocab]`; with a cap, `cap * tanh(logits / cap)`."""
        ...
