"""What a model may ask of the machine: the `Ops` protocol, and the batch it is asked for.

The cut is at the granularity of fused kernels, so that one `forward` is fast both for prompts
(GEMM) and for decode (GEMV) without knowing which of the two it runs.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from common.kernels.base.operands import AttentionWeights as AttentionWeights  # models know no kernels
from common.kernels.base.operands import Division, SharedDivision, SharedPrefixes


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Which tokens of which sequences one step computes; ragged, without padding between sequences.

    A decode batch has one token a sequence (`max_query_len` 1), the last: its position is seq_len - 1, its
    slot that position's in the block table. Layers of the models here are all of the first group of blocks.
    A row may be padding: its slot is -1 and its seq_len 0; nothing is written for it and its output is
    unspecified but finite.
    """

    token_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int32, from 0 in each sequence
    slot_mapping: (
        Tensor | None
    )  # [num_tokens] int64: where K and V of the token go, -1 for padding; None in a decode batch
    block_tables: tuple[Tensor, ...]  # of each group of KV blocks [num_seqs, max_blocks] int32
    seq_lens: Tensor  # [num_seqs] int32: KV length, this step's tokens included
    cu_seqlens: Tensor  # [num_seqs + 1] int32: where each sequence's tokens begin
    last_tokens: Tensor | None  # [num_seqs] int64: each sequence's last token, if only their logits are wanted
    max_query_len: int
    max_seq_len: int
    num_keys: int = 0  # at least the sum of seq_lens; 0 where the host knows no bound (captured steps)
    prefixes: SharedPrefixes | None = None  # of a decode batch, where blocks that rows share are to be read once
    shared: SharedDivision | None = None  # of these, where `Ops.begin` has made one, as the next
    division: Division | None = None  # of a decode batch

    @property
    def one_token_each(self) -> bool:
        return self.max_query_len == 1 and self.token_ids.shape[0] == self.seq_lens.shape[0]

    def one_query_each(self) -> "ForwardBatch":
        """What attention of each sequence's last token alone reads: the same keys; token by token nothing changes."""
        bounds = torch.arange(self.seq_lens.shape[0] + 1, dtype=torch.int32, device=self.cu_seqlens.device)
        return replace(self, cu_seqlens=bounds, max_query_len=1)


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream between a product that was added to it and the norm that follows."""

    rows: Tensor  # [num_tokens, hidden]
    parts: Tensor | None = None  # [splits, num_tokens, hidden] fp32: what the norm still adds to `rows`, where they lie

    def of(self, tokens: Tensor) -> "Residual":
        """A copy of some tokens, by their indices."""
        return Residual(self.rows[tokens], None if self.parts is None else self.parts[:, tokens])


class Ops(Protocol):
    """Activations are `[num_tokens, ...]` in the model's dtype; weights are `[out, in]`, contiguous."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether blocks that rows share are read once: `ForwardBatch.prefixes` has an effect."""
        ...

    def begin(self, batch: ForwardBatch, num_q_heads: int) -> ForwardBatch:
        """The batch with what `attention` of all layers shares worked out; comes before anything else of a step."""
        ...

    def embed(self, token_ids: Tensor, table: Tensor) -> Residual:
        """Rows of `table [vocab, hidden]`: `[num_tokens, hidden]`."""
        ...

    def norm_linear(self, x: Residual, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """`rms_norm(x) @ weight.T`: `[num_tokens, out]`."""
        ...

    def attention(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """Query/key norm, RoPE, write of K and V into the pool, causal attention over the pool.

        `qkv [num_tokens, (q_heads + 2 * kv_heads) * head_dim]` -> `[num_tokens, q_heads * head_dim]`.
        """
        ...

    def attention_of_last(self, qkv: Tensor, weights: AttentionWeights, layer_id: int, batch: ForwardBatch) -> Tensor:
        """`attention`, of which only `batch.last_tokens` are wanted: `[num_seqs, q_heads * head_dim]`."""
        ...

    def linear_add(self, x: Tensor, weight: Tensor, residual: Residual) -> Residual:
        """`residual + x @ weight.T`; may reuse the memory of `residual`, to which a norm has added its parts."""
        ...

    def norm_gate_up(self, x: Residual, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """`silu(g) * u` with `g, u = rms_norm(x) @ gate_up.T`, halves of `gate_up [2 * inner, hidden]`."""
        ...

    def logits(self, x: Residual, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """`rms_norm(x) @ weight.T` as fp32: `[num_tokens, vocab]`."""
        ...
