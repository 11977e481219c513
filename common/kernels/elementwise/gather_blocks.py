"""Copy of a handoff: whole KV blocks from a peer's pool, mapped by address, into the local pool, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.base.checks import check_column

WORDS_PER_PROGRAM = 4096  # 16 KiB


@triton.jit(
    do_not_specialize=["source_ptr"], do_not_specialize_on_alignment=["source_ids_ptr", "target_ids_ptr"]
)  # one binary for all handoffs
def _gather_blocks_kernel(
    source_ptr,  # address of [source_blocks, WORDS] int32, aligned to 16 bytes, perhaps on another GPU
    source_ids_ptr,  # [num_copies] int32
    target_ptr,  # [target_blocks, WORDS] int32
    target_ids_ptr,  # [num_copies] int32
    WORDS: tl.constexpr,  # int32 words of a block; a multiple of 4
    BLOCK: tl.constexpr,
):
    """Grid: (num_copies, cdiv(WORDS, BLOCK)). A program copies BLOCK words of a block, 16 bytes an access."""
    copy = tl.program_id(0)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < WORDS
    source = tl.multiple_of(source_ptr.to(tl.pointer_type(tl.int32)), 16)
    source_block = tl.load(source_ids_ptr + copy).to(tl.int64) * WORDS
    target_block = tl.load(target_ids_ptr + copy).to(tl.int64) * WORDS
    data = tl.load(source + source_block + words, mask=inside)
    tl.store(target_ptr + target_block + words, data, mask=inside)


def gather_blocks(source_ptr: int, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy block `source_ids[i]` of the pool at address `source_ptr` to block `target_ids[i]` of `target`, for all i.

    `target` is `[num_blocks, block_bytes]` uint8, contiguous, with block_bytes a multiple of 16. Ids are `[num_copies]`
    int32 on the target's device, `target_ids` distinct. The source has blocks of equal size; the owner keeps the copied
    blocks unchanged until the copy is done.
    """
    assert source_ptr % 16 == 0, f"source address {source_ptr:#x}: a multiple of 16 needed"
    assert target.ndim == 2 and target.dtype == torch.uint8 and target.is_contiguous(), "target is contiguous uint8"
    assert target.shape[1] % 16 == 0 and target.data_ptr() % 16 == 0, f"{target.shape[1]} B a block: 16 must divide it"
    check_column("source_ids", source_ids, source_ids.shape[0])
    check_column("target_ids", target_ids, source_ids.shape[0])
    for ids in (source_ids, target_ids):
        assert ids.device == target.device, f"ids on {ids.device}, target on {target.device}: one device needed"
    if source_ids.shape[0] == 0:
        return
    words = target.shape[1] // 4
    _gather_blocks_kernel[(source_ids.shape[0], triton.cdiv(words, WORDS_PER_PROGRAM))](
        source_ptr=source_ptr,
        source_ids_ptr=source_ids,
        target_ptr=target.view(torch.int32),
        target_ids_ptr=target_ids,
        WORDS=words,
        BLOCK=WORDS_PER_PROGRAM,
        num_warps=8,
    )
