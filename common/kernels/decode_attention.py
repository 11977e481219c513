"""Attention of one token a sequence, with the context split over programs (Flash-Decoding, Dao et al., 2023).

The grid is fixed when a CUDA graph is captured, so it cannot follow the contexts: the number of
splits follows from the batch, and each program derives from seq_len which keys are its own, if any.
All query heads of a KV head share one tile, so K and V are read once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import wait_for_predecessor

LOG2_E = 1.4426950408889634
BLOCK_N = 64  # keys of a tile
MIN_ROWS = 16  # of a matrix product on tensor cores
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4  # with more, what a program saves by a shorter part is lost on combining
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit
def _split_keys(seq_len, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of one split: a multiple of BLOCK_N, at least one tile, equal over the splits."""
    tiles = tl.cdiv(seq_len, BLOCK_N)
    return tl.maximum(tl.cdiv(tiles, NUM_SPLITS), 1) * BLOCK_N


@triton.jit(do_not_specialize=["table_stride"])  # differs from batch to batch in a prefill worker
def _decode_attention_kernel(
    q_ptr,  # [num_seqs, num_q, head_dim], contiguous
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # the same
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_seqs, num_q, head_dim], contiguous; written here if NUM_SPLITS is 1
    partial_ptr,  # [num_seqs, num_q, NUM_SPLITS, head_dim] fp32
    lse_ptr,  # [num_seqs, num_q, NUM_SPLITS] fp32, in units of log2
    scale_log2,  # softmax scale times log2(e)
    table_stride,
    stride_block,  # of both caches, in elements, as the next two
    stride_token,
    stride_head,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    ROWS: tl.constexpr,  # power of two, at least GROUP and MIN_ROWS
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_seqs, num_kv, NUM_SPLITS). One program a split of a sequence's keys, for one KV head."""
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    split_keys = _split_keys(seq_len, NUM_SPLITS, BLOCK_N)
    begin = split * split_keys
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    k_ptr = k_cache_ptr + kv_head * stride_head
    v_ptr = v_cache_ptr + kv_head * stride_head
    wait_for_predecessor(PDL)
    if (begin >= seq_len) & (NUM_SPLITS > 1):  # a single split goes on, to write zeros for a row of padding
        return

    group = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_DIM)[None, :]
    heads = seq.to(tl.int64) * NUM_Q + kv_head * GROUP + group  # [ROWS], over all sequences
    present = (group < GROUP)[:, None]
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + columns, mask=present, other=0.0)

    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    end = tl.minimum(seq_len, begin + split_keys)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        elements = (blocks * stride_block + (keys % BLOCK_SIZE) * stride_token)[:, None] + columns
        k = tl.load(k_ptr + elements, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(inside[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + elements, mask=inside[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max

    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # a row of padding gives zeros
    if NUM_SPLITS == 1:
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty), mask=present)
    else:
        parts = heads * NUM_SPLITS + split
        tl.store(partial_ptr + parts[:, None] * HEAD_DIM + columns, out, mask=present)
        tl.store(lse_ptr + parts, row_max + tl.log2(row_sum), mask=group < GROUP)


@triton.jit
def _combine_kernel(
    partial_ptr,  # [num_seqs, num_q, NUM_SPLITS, head_dim] fp32
    lse_ptr,  # [num_seqs, num_q, NUM_SPLITS] fp32, in units of log2
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_seqs, num_q, head_dim], contiguous
    NUM_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_seqs, NUM_Q). One program a head; splits that had no keys were never written and are not read."""
    seq = tl.program_id(0)
    seq_len = tl.load(seq_lens_ptr + seq)
    num_live = tl.cdiv(seq_len, _split_keys(seq_len, NUM_SPLITS, BLOCK_N))
    head = seq.to(tl.int64) * NUM_Q + tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    columns = tl.arange(0, HEAD_DIM)
    live = splits < num_live
    wait_for_predecessor(PDL)
    parts = head * NUM_SPLITS + splits
    lse = tl.load(lse_ptr + parts, mask=live, other=-1e38)  # finite, since all of a row may be padding
    partial = tl.load(partial_ptr + parts[:, None] * HEAD_DIM + columns[None, :], mask=live[:, None], other=0.0)
    shares = tl.where(live, tl.exp2(lse - tl.max(lse, axis=0)), 0.0)
    total = tl.sum(shares, axis=0)
    out = tl.sum(partial * shares[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where splits leave their results; one is enough for all layers, which run one after another."""

    partial: Tensor  # [max_heads_and_splits, head_dim] fp32
    lse: Tensor  # [max_heads_and_splits] fp32
    num_sms: int


def num_splits_for(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts that each context is divided into: a power of two up to MAX_SPLITS, the fewer the larger the batch."""
    wanted = max(PROGRAMS_PER_SM * num_sms // (num_seqs * num_kv_heads), 1)
    return int(min(1 << (wanted.bit_length() - 1), MAX_SPLITS))


def make_workspace(
    max_num_seqs: int, num_q_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, device: torch.device
) -> DecodeWorkspace:
    """Room for any batch of up to `max_num_seqs` rows on a GPU of `num_sms` multiprocessors."""
    parts = max(n * num_splits_for(n, num_kv_heads, num_sms) for n in range(1, max_num_seqs + 1)) * num_q_heads
    return DecodeWorkspace(
        partial=torch.empty((parts, head_dim), dtype=torch.float32, device=device),
        lse=torch.empty((parts,), dtype=torch.float32, device=device),
        num_sms=num_sms,
    )


def decode_attention(
    q: Tensor,  # [num_seqs, num_q_heads, head_dim], contiguous
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_cache: Tensor,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    seq_lens: Tensor,  # [num_seqs] int32; 0 is padding
    scale: float,
    workspace: DecodeWorkspace,
    *,
    pdl: bool = False,
) -> Tensor:
    """Each query sees the `seq_len` keys of its sequence: `[num_seqs, num_q_heads, head_dim]`, zeros for padding."""
    _check(q, k_cache, v_cache, block_tables, seq_lens)
    num_seqs, num_q, head_dim = q.shape
    num_kv = k_cache.shape[2]
    out = torch.empty_like(q)
    if num_seqs == 0:
        return out
    num_splits = num_splits_for(num_seqs, num_kv, workspace.num_sms)
    assert num_seqs * num_q * num_splits <= workspace.lse.shape[0], f"{num_seqs} rows: more than the workspace holds"
    assert workspace.partial.shape[1] == head_dim, f"workspace {tuple(workspace.partial.shape)}: head_dim differs"
    _decode_attention_kernel[(num_seqs, num_kv, num_splits)](
        q_ptr=q,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=block_tables,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        partial_ptr=workspace.partial,
        lse_ptr=workspace.lse,
        scale_log2=scale * LOG2_E,
        table_stride=block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        NUM_Q=num_q,
        GROUP=num_q // num_kv,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(num_q // num_kv)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        NUM_SPLITS=num_splits,
        BLOCK_N=BLOCK_N,
        PDL=pdl,
        num_warps=NUM_WARPS,
        launch_pdl=pdl,
        num_stages=1 if q.dtype == torch.float32 else NUM_STAGES,
    )
    if num_splits > 1:
        _combine(out, seq_lens, workspace, num_splits, pdl=pdl)
    return out


def _combine(out: Tensor, seq_lens: Tensor, workspace: DecodeWorkspace, num_splits: int, *, pdl: bool) -> None:
    """The splits' results into `out [num_seqs, num_q_heads, head_dim]`."""
    num_seqs, num_q, head_dim = out.shape
    _combine_kernel[(num_seqs, num_q)](
        partial_ptr=workspace.partial,
        lse_ptr=workspace.lse,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        NUM_Q=num_q,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        BLOCK_N=BLOCK_N,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    num_seqs, num_q, head_dim = q.shape
    assert q.is_contiguous(), f"q strides {q.stride()}: contiguous needed"
    assert head_dim in (32, 64, 128, 256), f"head_dim {head_dim}: 32, 64, 128 or 256 needed"
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(), "k and v caches are laid out alike"
    assert k_cache.shape[3] == head_dim and k_cache.stride(3) == 1, f"cache {tuple(k_cache.shape)}: head_dim differs"
    assert k_cache.dtype == v_cache.dtype == q.dtype, f"cache {k_cache.dtype}, q {q.dtype}: one dtype needed"
    assert num_q % k_cache.shape[2] == 0, f"{num_q} query heads: a multiple of {k_cache.shape[2]} needed"
    assert block_tables.shape[0] == num_seqs and block_tables.stride(1) == 1, "block_tables are [num_seqs, max_blocks]"
    assert seq_lens.shape == (num_seqs,), f"seq_lens {tuple(seq_lens.shape)}: one a row needed"
    for ids in (block_tables, seq_lens):
        assert ids.dtype == torch.int32, f"{ids.dtype}: block_tables and seq_lens are int32"
