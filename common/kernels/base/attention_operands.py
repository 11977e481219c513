"""Bundles of tensors that attention kernels take whole."""

from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIMS = (32, 64, 128, 256, 512)
"""Head sizes supported by attention kernels."""
E4M3_TYPES = (torch.float8_e4m3fn, torch.uint8)
"""Types of a cache of e4m3 numbers; bytes where a GPU has no instructions for e4m3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Inputs of attention besides Q, K and V."""

    q_norm: Tensor | None  # [head_dim], or None where the architecture has no query/key norm
    k_norm: Tensor | None  # [head_dim]
    norm_eps: float
    rope: Tensor  # [max_positions, head_dim] fp32: cos of the half angles, then sin of them
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of scores
    group: int = 0  # of KV blocks, with the layer's cache
    window: int = 0  # tokens seen by a token, itself included; 0: all
    bias: Tensor | None = None  # [(q_heads + 2 * kv_heads) * head_dim], added to Q, K and V before norms
    norms_values: bool = False  # V heads are normed like Q and K, without weights
    shares_kv: bool = False  # V is K before norm and rotation: the input has no rows for V
    query_factors: Tensor | None = None  # [max_positions] fp32: of Q, by position, behind the rotation
    sinks: Tensor | None = None  # [q_heads] fp32: a score of no token, in the sum of weights only
    k_scale: float = 1.0  # of an e4m3 cache, where keys are the stored numbers times the scale
    v_scale: float = 1.0  # as k_scale, of values

    @property
    def num_heads(self) -> int:
        """Return the heads of the input: Q, K, and V unless shared."""
        return self.num_q_heads + (1 if self.shares_kv else 2) * self.num_kv_heads

    def cache_scales(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the factors of keys and values in a cache of `dtype`."""
        return (self.k_scale, self.v_scale) if dtype in E4M3_TYPES else (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOperands:
    """Queries of prompts, and the blocks that they read.

    Query i of a sequence sees its first `seq_len - query_len + i + 1` keys. Tokens outside `cu_seqlens` are not
    computed.
    """

    q: Tensor  # [num_tokens, num_q_heads, head_dim], contiguous
    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_cache: Tensor  # as k_cache
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    cu_seqlens: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32
    scale: float  # of scores, the scale of keys in an e4m3 cache included
    window: int = 0  # tokens seen by a token, itself included; 0: all. Blocks out of sight are not read
    sinks: Tensor | None = None  # [num_q_heads] fp32: a score of no token, in the sum of weights only
    v_scale: float = 1.0  # of values in an e4m3 cache


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Rows of a decode batch whose block tables begin with the same blocks, a row for each sequence.

    Rows with equal numbers have equal `num_tokens`, fewer than any of these rows has keys.
    """

    numbers: Tensor  # [num_rows] int32: equal for rows with the same beginning; -1: no shared beginning is known
    num_tokens: Tensor  # [num_rows] int32: a multiple of the block size; meaningful for rows with a number

    def rows(self, num_rows: int) -> "SharedPrefixes":
        """Return views of the first rows."""
        return SharedPrefixes(self.numbers[:num_rows], self.num_tokens[:num_rows])


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a decode step's attention into items; holds for all layers and KV heads (`decode_division`)."""

    items: Tensor  # [max_items, ITEM_WORDS] int32
    counts: Tensor  # [1 + num_layers] int32: items; then for each layer, items drawn by programs beyond their first
    max_joins: int  # contexts whose parts are spread over several items, at most
    num_slots: int  # programs that run at once


@dataclass(frozen=True, slots=True)
class SharedDivision:
    """Division of attention over keys shared by rows of a decode step (`shared_division`).

    A bundle is some rows of a group. Items of a bundle follow each other, and each is a unit of the bundle's rows.
    """

    own_begins: Tensor  # [num_rows] int32: first tile that each row attends alone; 0 for a row without shared keys
    units: Tensor  # [num_rows] int32: first item of each row with shared keys
    pieces: Tensor  # [num_rows] int32: number of items of each row with shared keys
    places: Tensor  # [num_rows] int32: place of the row in its bundle
    members: Tensor  # [num_rows] int32: rows with shared keys, group after group
    items: Tensor  # [max_items, SHARED_ITEM_WORDS] int32
    num_items: Tensor  # [1] int32
    tokens: int  # rows of a bundle, at most
    num_slots: int  # programs that run at once


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Results of the items of a `SharedDivision`; all layers share an instance, because layers run in sequence."""

    partial: Tensor  # [max_items, num_kv_heads, max_queries, head_dim] fp32: weighted sums of values
    maxima: Tensor  # [max_items, num_kv_heads, max_queries] fp32: maxima of scores, in units of log2
    sums: Tensor  # [max_items, num_kv_heads, max_queries] fp32: sums of weights
