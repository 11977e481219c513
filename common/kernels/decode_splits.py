"""A context divided over programs (Flash-Decoding, Dao et al., 2023): how many parts, of which keys, and joining them.

The grid is fixed when a CUDA graph is captured, so it cannot follow the contexts: the number of splits
follows from the batch, and each program derives from seq_len which keys are its own, if any. A split
without keys writes nothing, and nothing of it is read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.pdl import wait_for_predecessor

LOG2_E = 1.4426950408889634
TILE = 64  # keys that are multiplied at once; a split has whole tiles
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4  # with more, what a program saves by a shorter part is lost on combining


@triton.jit
def divide_keys(seq_len, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Keys of a split, whole tiles and at least one, and how many splits have any: the first so many, none for padding.

    The last of these ends where the sequence does, the others where the next begins. For Gluon, too.
    """
    tiles = (seq_len + TILE - 1) // TILE
    split_keys = tl.maximum((tiles + NUM_SPLITS - 1) // NUM_SPLITS, 1) * TILE
    return split_keys, (seq_len + split_keys - 1) // split_keys


@triton.jit
def _combine_kernel(
    partial_ptr,  # [num_seqs, num_q, NUM_SPLITS, head_dim] fp32
    lse_ptr,  # [num_seqs, num_q, NUM_SPLITS] fp32, in units of log2
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_seqs, num_q, head_dim], contiguous
    NUM_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (num_seqs, NUM_Q). One program a head; splits that had no keys were never written and are not read."""
    seq = tl.program_id(0)
    _, num_live = divide_keys(tl.load(seq_lens_ptr + seq), NUM_SPLITS, TILE)
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
    max_num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
    device: torch.device,
) -> DecodeWorkspace:
    """Room for any batch of up to `max_num_seqs` rows on a GPU of `num_sms` multiprocessors."""
    splits = (n * num_splits_for(n, num_kv_heads, num_sms) for n in range(1, max_num_seqs + 1))
    parts = max(splits) * num_q_heads
    return DecodeWorkspace(
        partial=torch.empty((parts, head_dim), dtype=torch.float32, device=device),
        lse=torch.empty((parts,), dtype=torch.float32, device=device),
        num_sms=num_sms,
    )


def check_room(workspace: DecodeWorkspace, num_seqs: int, num_q_heads: int, num_splits: int, head_dim: int) -> None:
    """Whether the parts of a launch fit."""
    parts, room = num_seqs * num_q_heads * num_splits, workspace.lse.shape[0]
    assert parts <= room, f"{num_seqs} rows of {num_splits} splits: {parts} parts, the workspace holds {room}"
    assert workspace.partial.shape[1] == head_dim, f"workspace {tuple(workspace.partial.shape)}: head_dim differs"


def combine(out: Tensor, seq_lens: Tensor, workspace: DecodeWorkspace, num_splits: int, *, pdl: bool) -> None:
    """The splits' results into `out [num_seqs, num_q_heads, head_dim]`, contiguous; zeros for padding."""
    num_seqs, num_q, head_dim = out.shape
    _combine_kernel[(num_seqs, num_q)](
        partial_ptr=workspace.partial,
        lse_ptr=workspace.lse,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        NUM_Q=num_q,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        TILE=TILE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
