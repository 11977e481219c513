"""A few tokens times a weight matrix, with weights on their way before the input exists.

Every program has a ring of tiles in shared memory, filled by the tensor memory accelerator. The ring
is filled with weights before the wait for the predecessor, so that the memory never pauses between
two kernels; the tokens' tiles follow after it. A tile's barrier counts the bytes of both. The product
itself (`wgmma`, weights as the tall operand) costs nothing beside the reading, and neither does what
is done to a tile of tokens on its way: RMS norm is a weight for each column, and one factor for each
token that is known when all columns have passed. Where K is split over programs, the last of them to
arrive adds up the parts, always in the same order.

Written in Gluon, Triton's lower layer, since there a copy can be begun in one place and awaited in
another. Hopper only, two bytes an element; Triton's interpreter does not run it.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64  # of a tile of weights: what the four warps of a program multiply at once
WARPS = 4
MAX_TOKENS = 64
MAX_PARTS = 512  # programs of a product whose K is split


@gluon.jit
def _wait_for_predecessor():
    """As in `pdl`, for Gluon."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_weight(weight_desc, ring, arrived, slot, row, n, start, TILE_BYTES: gl.constexpr, SIDES: gl.constexpr):
    """Begin loading a slot's weights; its barrier waits for the tokens' bytes, too."""
    barrier = arrived.index(slot)
    mbarrier.expect(barrier, TILE_BYTES)
    tma.async_copy_global_to_shared(weight_desc, [row, start], barrier, ring.index(slot * SIDES))
    if SIDES == 2:
        tma.async_copy_global_to_shared(weight_desc, [n + row, start], barrier, ring.index(slot * SIDES + 1))


@gluon.jit
def _weigh(tokens, norm, squares, layout: gl.constexpr):
    """Multiply a tile of tokens by the norm's weight of each column, where it lies; adds to their squares."""
    x = tokens.load(layout).to(gl.float32)
    tokens.store((x * norm.to(gl.float32)[None, :]).to(tokens.dtype))
    fence_async_shared()
    gl.thread_barrier()
    return squares + x * x


@gluon.jit
def _joined(acc, parts_ptr, arrivals_ptr, elements, SPLITS: gl.constexpr, TILE: gl.constexpr):
    """Leave a part of the sums; returns whether it was the last one, and if so the sum of all."""
    gl.store(parts_ptr + gl.program_id(1) * TILE + elements, acc)
    gl.thread_barrier()  # the stores of every thread come before the arrival of the program
    last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == SPLITS - 1
    if last:
        gl.store(arrivals_ptr, 0)
        acc = gl.load(parts_ptr + elements)
        for part in gl.static_range(1, SPLITS):
            acc += gl.load(parts_ptr + part * TILE + elements)
    return last, acc


@gluon.jit(do_not_specialize=["m"])
def _ring_gemm_kernel(
    x_desc,  # [m, k], tiles of BLOCK_M x BLOCK_K
    weight_desc,  # [n, k], tiles of ROWS x BLOCK_K; [2 * n, k] if GATED: gate, then up
    norm_ptr,  # [k], if HAS_NORM
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    out_ptr,  # [m, n]
    parts_ptr,  # [cdiv(n, ROWS), SPLITS, ROWS, BLOCK_M] fp32, if SPLITS > 1
    arrivals_ptr,  # [cdiv(n, ROWS)] int32, all 0, if SPLITS > 1
    m,
    n,
    eps,
    TILES: gl.constexpr,  # of one part of K
    STAGES: gl.constexpr,  # slots of the ring; at most TILES
    BLOCK_M: gl.constexpr,  # at least m
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: (cdiv(n, ROWS), SPLITS). One program ROWS outputs of all tokens, one part of K."""
    SIDES: gl.constexpr = 2 if GATED else 1
    TILE_BYTES: gl.constexpr = (ROWS * SIDES + BLOCK_M) * BLOCK_K * 2
    dtype: gl.constexpr = weight_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    token_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [num_warps, 1], [1, 0])
    row = gl.program_id(0) * ROWS
    begin = gl.program_id(1) * (TILES * BLOCK_K)
    ring = gl.allocate_shared_memory(dtype, [STAGES * SIDES, ROWS, BLOCK_K], weight_desc.layout)
    token_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    fence_async_shared()
    for slot in gl.static_range(STAGES):
        _load_weight(weight_desc, ring, arrived, slot, row, n, begin + slot * BLOCK_K, TILE_BYTES, SIDES)
    norm_ptr += begin + gl.arange(0, BLOCK_K, gl.SliceLayout(0, token_layout))
    if HAS_NORM:
        norm = gl.load(norm_ptr)
    if PDL:
        _wait_for_predecessor()
    for slot in gl.static_range(STAGES):
        start = begin + slot * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [0, start], arrived.index(slot), token_ring.index(slot))

    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    up_acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    squares = gl.zeros([BLOCK_M, BLOCK_K], gl.float32, token_layout)
    slot = 0
    phase = 0
    for tile in range(TILES):
        start = begin + tile * BLOCK_K
        mbarrier.wait(arrived.index(slot), phase)
        if HAS_NORM:
            squares = _weigh(token_ring.index(slot), norm, squares, token_layout)
            norm = gl.load(norm_ptr + gl.minimum(tile + 1, TILES - 1) * BLOCK_K)
        x = token_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(ring.index(slot * SIDES), x, acc, is_async=True)
        if GATED:
            up_acc = warpgroup_mma(ring.index(slot * SIDES + 1), x, up_acc, is_async=True)
            acc, up_acc = warpgroup_mma_wait(0, deps=[acc, up_acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if tile + STAGES < TILES:
            _load_weight(weight_desc, ring, arrived, slot, row, n, start + STAGES * BLOCK_K, TILE_BYTES, SIDES)
            tma.async_copy_global_to_shared(
                x_desc, [0, start + STAGES * BLOCK_K], arrived.index(slot), token_ring.index(slot)
            )
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    part_rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    last = True
    if SPLITS > 1:
        TILE: gl.constexpr = ROWS * BLOCK_M
        parts_ptr += gl.program_id(0) * (SPLITS * TILE)
        elements = part_rows[:, None] * BLOCK_M + tokens[None, :]
        last, acc = _joined(acc, parts_ptr, arrivals_ptr + gl.program_id(0), elements, SPLITS, TILE)
    if last:
        if HAS_NORM:
            mean = gl.sum(squares, axis=1) / (TILES * BLOCK_K)
            scale = gl.convert_layout(gl.rsqrt(mean + eps), gl.SliceLayout(0, layout))[None, :]
            acc *= scale
            up_acc *= scale
        if GATED:
            acc = acc / (1.0 + gl.exp(-acc)) * up_acc
        rows = row + part_rows
        elements = tokens[None, :] * n + rows[:, None]
        inside = (rows < n)[:, None] & (tokens < m)[None, :]
        if HAS_RESIDUAL:
            acc += gl.load(residual_ptr + elements, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + elements, acc.to(out_ptr.dtype.element_ty), mask=inside)


class RingWorkspace:
    """What programs that share an output leave for the last of them; for the launches of one stream."""

    def __init__(self, device: torch.device) -> None:
        self.arrivals = torch.zeros(MAX_PARTS, dtype=torch.int32, device=device)
        self.parts = torch.empty(MAX_PARTS, ROWS, MAX_TOKENS, dtype=torch.float32, device=device)


def ring_gemm(
    x: Tensor,  # [m, k], contiguous, m up to MAX_TOKENS
    weight: Tensor,  # [n, k], or [2 * n, k] if gated
    out: Tensor,  # [m, n], any dtype; overwritten
    workspace: RingWorkspace,
    *,
    block_k: int,
    stages: int,
    splits: int = 1,
    norm: Tensor | None = None,  # [k]; x in bfloat16, which holds every x times a norm's weight
    eps: float = 0.0,
    residual: Tensor | None = None,  # [m, n]; may be `out`
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`rms_norm(x) @ weight.T`, then `+ residual` or `silu(gate) * up`; returns `out`.

    `k` is a multiple of `splits * block_k`; it is split only without a norm and ungated.
    """
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    row_tiles, tiles = -(-n // ROWS), k // (splits * block_k)
    assert 1 <= m <= MAX_TOKENS, f"{m} tokens: 1 to {MAX_TOKENS} here"
    assert x.element_size() == 2 and weight.dtype == x.dtype, f"x {x.dtype}, weight {weight.dtype}: 16 bits, alike"
    assert weight.shape[1] == k and x.is_contiguous() and weight.is_contiguous(), "x and weight: contiguous, alike in k"
    assert k % (splits * block_k) == 0, f"{k} columns: a multiple of {splits} x {block_k} needed"
    assert out.shape == (m, n) and out.is_contiguous(), f"out {tuple(out.shape)}: ({m}, {n}) needed"
    assert residual is None or (residual.shape == (m, n) and residual.is_contiguous()), "the residual is like out"
    assert splits == 1 or (norm is None and not gated), "with a norm or a gate, K is not split"
    assert splits == 1 or row_tiles * splits <= MAX_PARTS, f"{row_tiles} x {splits} parts: at most {MAX_PARTS}"
    assert norm is None or x.dtype is torch.bfloat16, f"x {x.dtype}: a norm is fused for bfloat16 only"
    block_m = max(8, 1 << (m - 1).bit_length())
    _ring_gemm_kernel[(row_tiles, splits)](
        _descriptor(x, [block_m, block_k]),
        _descriptor(weight, [ROWS, block_k]),
        x if norm is None else norm,
        out if residual is None else residual,
        out,
        workspace.parts,
        workspace.arrivals,
        m,
        n,
        eps,
        TILES=tiles,
        STAGES=min(stages, tiles),
        BLOCK_M=block_m,
        ROWS=ROWS,
        BLOCK_K=block_k,
        SPLITS=splits,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return out


def _descriptor(matrix: Tensor, tile: list[int]) -> TensorDescriptor:
    dtype = gl.float16 if matrix.dtype is torch.float16 else gl.bfloat16
    return TensorDescriptor.from_tensor(matrix, tile, gl.NVMMASharedLayout.get_default_for(tile, dtype))
