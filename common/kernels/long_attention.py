"""Causal attention of long prompt steps: K and V are gathered from their blocks first, then read in large tiles.

Reading scattered blocks costs a matrix unit more waiting than copying them costs memory: a step of
thousands of tokens reads every key many times and gathers it once. The tiles are fetched by the
tensor memory accelerator (FlashAttention-2, Dao 2023, on contiguous K and V). Query tiles of all
sequences lie on one grid axis as in `prefill_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
BLOCK_M, BLOCK_N = 128, 64  # queries and keys of a tile
MAX_REGISTERS = 128  # of a thread: so that two programs share a multiprocessor, one computing while one waits
GATHER_TOKENS = 16  # of one program; divides every block size
MAX_KEYS = 65536  # of one step: what gathering may take of memory
MIN_TOKENS = 1024  # of a step; below, gathering does not pay


@triton.jit
def _gather_kernel(
    k_cache_ptr,  # [num_blocks, block_size, num_kv, head_dim], strided
    v_cache_ptr,  # the same
    block_tables_ptr,  # [num_seqs, max_blocks] int32, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int32
    k_ptr,  # [num_keys, num_kv, head_dim], contiguous
    v_ptr,  # the same
    num_seqs,
    table_stride,
    stride_block,  # of both caches, in elements, as the next one
    stride_token,
    WIDTH: tl.constexpr,  # num_kv * head_dim
    COLUMNS: tl.constexpr,  # power of two, at least WIDTH
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    TOKENS: tl.constexpr,
):
    """Grid: (num_keys // TOKENS + num_seqs,). One program TOKENS tokens of a sequence, K and V."""
    seqs = tl.arange(0, MAX_SEQS)
    lens = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    ends = tl.cumsum(lens, axis=0)
    part = tl.program_id(0)
    first_parts = (ends - lens) // TOKENS + seqs
    seq = tl.sum(((first_parts <= part) & (seqs < num_seqs)).to(tl.int32), axis=0) - 1
    seq_len = tl.load(seq_lens_ptr + seq)
    begin = tl.sum(tl.where(seqs < seq, lens, 0), axis=0)
    tokens = (part - begin // TOKENS - seq) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    inside = (tokens < seq_len)[:, None] & (columns < WIDTH)[None, :]
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < seq_len, other=0).to(tl.int64)
    source = (blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token)[:, None] + columns[None, :]
    target = (begin + tokens).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(k_ptr + target, tl.load(k_cache_ptr + source, mask=inside, other=0.0), mask=inside)
    tl.store(v_ptr + target, tl.load(v_cache_ptr + source, mask=inside, other=0.0), mask=inside)


@triton.jit
def _attend(
    acc,  # [BLOCK_M, HEAD_DIM] fp32, not yet normalized
    row_max,  # [BLOCK_M] fp32, in units of log2
    row_sum,  # [BLOCK_M] fp32
    q,  # [BLOCK_M, HEAD_DIM]
    query_positions,  # [BLOCK_M] int32
    k_desc,  # [num_keys, num_kv * head_dim]
    v_desc,  # the same
    row,  # of the sequence's first key
    column,  # of the KV head
    begin,
    end,
    scale_log2,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys [begin, end) into the running softmax; `begin` is a multiple of BLOCK_N, as is `end` unless MASKED."""
    for start in tl.range(begin, end, BLOCK_N):
        scores = tl.dot(q, k_desc.load([row + start, column]).T, input_precision="ieee")
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            scores = tl.where(keys[None, :] <= query_positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        v = v_desc.load([row + start, column])
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_seqs"])  # differs from batch to batch
def _long_attention_kernel(
    q_desc,  # [num_tokens, num_q * head_dim], tiles of BLOCK_M x HEAD_DIM
    k_desc,  # [num_keys, num_kv * head_dim], tiles of BLOCK_N x HEAD_DIM
    v_desc,  # the same
    cu_seqlens_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_tokens, num_q, head_dim], contiguous
    scale_log2,  # softmax scale times log2(e)
    num_seqs,
    NUM_Q: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    MAX_SEQS: tl.constexpr,  # power of two, at least num_seqs
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (NUM_Q, num_tokens // BLOCK_M + num_seqs). One program a query tile of a head, longest contexts first."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seqs = tl.arange(0, MAX_SEQS)
    first_tiles = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0) // BLOCK_M + seqs
    seq = tl.sum(((first_tiles <= tile) & (seqs < num_seqs)).to(tl.int32), axis=0) - 1
    token = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - token
    first_query = (tile - token // BLOCK_M - seq) * BLOCK_M
    if first_query >= query_len:
        return

    row = tl.sum(tl.load(seq_lens_ptr + seqs, mask=seqs < seq, other=0), axis=0)  # of the sequence's first key
    seq_len = tl.load(seq_lens_ptr + seq)
    prior = seq_len - query_len
    queries = first_query + tl.arange(0, BLOCK_M)
    positions = prior + queries
    column = (head // GROUP) * HEAD_DIM
    q = q_desc.load([token + first_query, head * HEAD_DIM])
    unmasked_end = (prior + first_query + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(seq_len, prior + first_query + BLOCK_M)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max = tl.full((BLOCK_M,), -1e38, tl.float32)  # finite: rows past the sequence's end may see nothing
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, positions, k_desc, v_desc, row, column,
        0, unmasked_end, scale_log2, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, positions, k_desc, v_desc, row, column,
        unmasked_end, end, scale_log2, BLOCK_N, MASKED=True,
    )  # fmt: skip
    rows = (token + queries).to(tl.int64)[:, None] * (NUM_Q * HEAD_DIM) + head * HEAD_DIM
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows + tl.arange(0, HEAD_DIM)[None, :], out, mask=(queries < query_len)[:, None])


def is_long(q: Tensor, num_keys: int) -> bool:
    """Whether a step is of the kind that this is for; `num_keys` are the keys of all its sequences, 0 if unknown."""
    num_tokens, _, head_dim = q.shape
    return num_tokens > MIN_TOKENS and 0 < num_keys <= MAX_KEYS and head_dim in (64, 128) and q.element_size() == 2


def long_attention(
    q: Tensor,  # [num_tokens, num_q_heads, head_dim], contiguous
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], strided
    v_cache: Tensor,
    block_tables: Tensor,  # [num_seqs, max_blocks] int32
    cu_seqlens: Tensor,  # [num_seqs + 1] int32
    seq_lens: Tensor,  # [num_seqs] int32, each at least its number of queries and at least 1
    num_keys: int,  # the sum of seq_lens
    scale: float,
) -> Tensor:
    """What `prefill_attention` gives: `[num_tokens, num_q_heads, head_dim]`. Takes `num_keys` tokens of K and V."""
    num_tokens, num_q, head_dim = q.shape
    num_seqs, num_kv = seq_lens.shape[0], k_cache.shape[2]
    assert q.is_contiguous(), f"q strides {q.stride()}: contiguous needed"
    assert k_cache.stride() == v_cache.stride(), "k and v caches are laid out alike"
    assert k_cache.stride()[2:] == (head_dim, 1), f"cache strides {k_cache.stride()}: contiguous heads needed"
    k, v = _gathered(k_cache, v_cache, block_tables, seq_lens, num_keys)
    out = torch.empty_like(q)
    keys = [BLOCK_N, head_dim]
    _long_attention_kernel[(num_q, num_tokens // BLOCK_M + num_seqs)](
        q_desc=TensorDescriptor.from_tensor(q.view(num_tokens, -1), [BLOCK_M, head_dim]),
        k_desc=TensorDescriptor.from_tensor(k, keys),
        v_desc=TensorDescriptor.from_tensor(v, keys),
        cu_seqlens_ptr=cu_seqlens,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        scale_log2=scale * LOG2_E,
        num_seqs=num_seqs,
        NUM_Q=num_q,
        GROUP=num_q // num_kv,
        HEAD_DIM=head_dim,
        MAX_SEQS=max(64, triton.next_power_of_2(num_seqs)),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_warps=8,
        num_stages=2,
        maxnreg=MAX_REGISTERS,
    )
    return out


def _gathered(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """K and V of all sequences, one after another: each `[num_keys, num_kv_heads * head_dim]`."""
    num_seqs, width = seq_lens.shape[0], k_cache.shape[2] * k_cache.shape[3]
    k = torch.empty((num_keys, width), dtype=k_cache.dtype, device=k_cache.device)
    v = torch.empty_like(k)
    _gather_kernel[(num_keys // GATHER_TOKENS + num_seqs,)](
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        block_tables_ptr=block_tables,
        seq_lens_ptr=seq_lens,
        k_ptr=k,
        v_ptr=v,
        num_seqs=num_seqs,
        table_stride=block_tables.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        BLOCK_SIZE=k_cache.shape[1],
        MAX_SEQS=max(64, triton.next_power_of_2(num_seqs)),
        TOKENS=GATHER_TOKENS,
        num_warps=8,
    )
    return k, v
