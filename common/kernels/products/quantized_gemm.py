"""Product of many tokens and a weight matrix, both in codes: scaled, and gated where it is of gate and up.

Libraries leave sums of signed bytes, or gate and up of e4m3, which a further kernel would read. Here both end in
registers. See `tiles.drawn` for the product. A tile is of 256 rows, or of 128 rows of gate and as many of up.

A few hundred tokens and a matrix of few rows make tiles for few multiprocessors. Such a product can be made in parts:
tiles are half as wide, and programs share the columns of a row.

The matrix unit adds products of e4m3 with about 14 bits, which is far finer than the codes.

Written in Gluon, for Hopper only; Triton's interpreter does not run Gluon.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.kernels.base.codes import LARGEST
from common.kernels.base.gate import ACTIVATIONS, gated
from common.kernels.base.gpu import gpu_of
from common.kernels.base.items import announced
from common.kernels.products.tiles.drawn import BAND, HALF, ROWS, fetch, make_slots, multiply, place, store

BLOCK_K = 128
STAGES, GATED_STAGES, PART_STAGES = 3, 4, 6  # as many as shared memory has room for
MAX_SPLITS = 8
MIN_STEPS = 8  # of a part, because the first takes longer than the rest
CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
OUT_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _multiply(
    shared,
    work,
    scales,
    out_desc,
    parts_ptr,
    m,
    n,
    splits,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    BAND: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiply ROWS tokens of every item: the task of four warps. Elements past the edges are zero, and not stored."""
    x_ring, weight_ring, out_smem, item_smem, item_full, item_empty, _, _ = shared
    tiles_m, tiles_n, steps = work
    x_scales_ptr, scales_ptr = scales
    ROWS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = weight_ring.shape[1]
    HALF: gl.constexpr = WIDTH // 2
    SUMS: gl.constexpr = gl.int32 if x_ring.dtype == gl.int8 else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, HALF, 32])  # 256 is too wide
    out = out_smem.index(GROUP)
    slot = 0
    phase = 0
    item_phase = 0
    item = announced(item_smem, item_full, item_phase)
    while item < tiles_m * tiles_n * splits:
        mbarrier.arrive(item_empty, count=1)
        tile_m, tile_n = place(item // splits, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, WIDTH], SUMS, layout)
        acc, slot, phase = multiply(shared, steps, slot, phase, acc, GROUP)
        first = (2 * tile_m + GROUP) * ROWS
        tokens = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        if GATED:
            outputs = tile_n * HALF + columns % HALF
            rows = columns // HALF * n + outputs
        else:
            outputs = tile_n * WIDTH + columns
            rows = outputs
        x_scales = gl.load(x_scales_ptr + tokens, mask=tokens < m, other=0.0)
        row_scales = gl.load(scales_ptr + rows, mask=outputs < n, other=0.0)
        y = acc.to(gl.float32) * x_scales[:, None] * row_scales[None, :]
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(y, [ROWS, 2, HALF]), (0, 2, 1)))
            store(out, out_desc, first, tile_n * HALF, gated(gate, up, ACTIVATION))
        elif parts_ptr is None:
            store(out, out_desc, first, tile_n * WIDTH, y)
        else:
            places = ((item % splits).to(gl.int64) * m + tokens[:, None]) * n + outputs[None, :]
            gl.store(parts_ptr + places, y, mask=(tokens < m)[:, None] & (outputs < n)[None, :])
        item_phase ^= 1
        item = announced(item_smem, item_full, item_phase)
    if parts_ptr is None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "m", "steps", "splits"])  # differ from step to step
def _quantized_gemm_kernel(
    x_desc,  # [m, k] int8 or e4m3, tiles of ROWS x BLOCK_K
    x_scales_ptr,  # [m] fp32
    weight_desc,  # [n, k] alike, tiles of HALF x BLOCK_K; [2 * n, k] if GATED: gate, then up
    scales_ptr,  # [n] fp32; [2 * n] if GATED
    out_desc,  # [m, n], tiles of ROWS x WIDTH; or None
    parts_ptr,  # [splits, m, n] fp32; or None
    ticket_ptr,  # [1] int32, items drawn so far: initially 0
    m,
    n,
    tiles_m,  # of 2 * ROWS tokens
    tiles_n,
    steps,  # tiles of K of an item
    splits,  # items of a tile, that share its columns
    ROWS: gl.constexpr,
    HALF: gl.constexpr,
    WIDTH: gl.constexpr,  # outputs of a program
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Grid: any size. Programs draw items of 2 * ROWS tokens and WIDTH outputs until none is left."""
    shared = make_slots(x_desc, weight_desc, out_desc, STAGES, ROWS, HALF, BLOCK_K, WIDTH)
    work = (tiles_m, tiles_n, steps)
    scales = (x_scales_ptr, scales_ptr)
    gl.warp_specialize(
        [
            (_multiply, (shared, work, scales, out_desc, parts_ptr, m, n, splits, 0, GATED, BAND, ACTIVATION)),
            (_multiply, (shared, work, scales, out_desc, parts_ptr, m, n, splits, 1, GATED, BAND, ACTIVATION)),
            (fetch, (shared, work, x_desc, weight_desc, ticket_ptr, n, GATED, BAND, splits)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )


def num_splits(m: int, n: int, k: int, num_sms: int) -> int:
    """Return how many parts `quantized_gemm_parts` best makes; 1 if there are tiles for more than half of the GPU."""
    tiles = -(-m // (2 * ROWS)) * -(-n // HALF)
    return max(1, min(num_sms // tiles, k // BLOCK_K // MIN_STEPS, MAX_SPLITS))


def quantized_gemm(
    x: Tensor,  # [m, k] int8 or e4m3, contiguous
    x_scales: Tensor,  # fp32 [m, 1]
    weight: Tensor,  # [n, k] alike, contiguous; [2 * n, k] with an activation: gate, then up
    scales: Tensor,  # fp32 [n, 1], or [2 * n, 1]
    dtype: torch.dtype,  # of the result, 16 bits
    *,
    activation: str | None = None,  # of the gate, if gated
) -> Tensor:
    """Return `x @ weight.T`, or `activation(gate) * up`, of what codes stand for: `[m, n]`.

    `n` must be a multiple of 8, and `k` of 16.
    """
    m, n = x.shape[0], weight.shape[0] // (1 if activation is None else 2)
    assert activation is None or activation in ACTIVATIONS, f"activation {activation}: one of {ACTIVATIONS} needed"
    assert dtype.itemsize == 2, f"results in {dtype}: 16 bits needed"
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    width = 2 * HALF if activation is None else HALF
    out_desc = TensorDescriptor.from_tensor(out, [ROWS, width], OUT_LAYOUT)
    _launch(x, x_scales, weight, scales, n, width, out_desc=out_desc, activation=activation)
    return out


def quantized_gemm_parts(
    x: Tensor,  # [m, k] int8 or e4m3, contiguous
    x_scales: Tensor,  # fp32 [m, 1]
    weight: Tensor,  # [n, k] alike, contiguous
    scales: Tensor,  # fp32 [n, 1]
    splits: int,
) -> Tensor:
    """Return `x @ weight.T` in parts that are to be added: fp32 `[splits, m, n]`."""
    parts = torch.empty((splits, x.shape[0], weight.shape[0]), device=x.device)
    _launch(x, x_scales, weight, scales, weight.shape[0], HALF, parts=parts)
    return parts


def _launch(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    n: int,
    width: int,  # outputs of a program
    *,
    out_desc: TensorDescriptor | None = None,
    parts: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Launch the kernel, to write whole results or parts."""
    m, k = x.shape
    assert x.dtype == weight.dtype and x.dtype in LARGEST, f"x {x.dtype}, weight {weight.dtype}: codes, alike, needed"
    assert weight.shape[1] == k and x.is_contiguous() and weight.is_contiguous(), (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: contiguous, alike in k needed"
    )
    assert x_scales.shape == (m, 1) and scales.shape == (weight.shape[0], 1), "a scale for each token and row"
    assert x_scales.is_contiguous() and scales.is_contiguous(), "scales: contiguous"
    assert m > 0 and n % 8 == k % 16 == 0, f"m {m}, n {n}, k {k}: at least one, and multiples of 8 and 16"
    half, splits = (HALF if parts is None else HALF // 2), (1 if parts is None else parts.shape[0])
    tiles_m, tiles_n = -(-m // (2 * ROWS)), -(-n // width)
    stages = PART_STAGES if parts is not None else STAGES if activation is None else GATED_STAGES
    _quantized_gemm_kernel[(min(gpu_of(x.device).num_sms, tiles_m * tiles_n * splits),)](
        x_desc=TensorDescriptor.from_tensor(x, [ROWS, BLOCK_K], CODES_LAYOUT),
        x_scales_ptr=x_scales,
        weight_desc=TensorDescriptor.from_tensor(weight, [half, BLOCK_K], CODES_LAYOUT),
        scales_ptr=scales,
        out_desc=out_desc,
        parts_ptr=parts,
        ticket_ptr=torch.zeros(1, dtype=torch.int32, device=x.device),
        m=m,
        n=n,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        steps=-(-k // (BLOCK_K * splits)),
        splits=splits,
        ROWS=ROWS,
        HALF=half,
        WIDTH=width,
        BLOCK_K=BLOCK_K,
        STAGES=stages,
        BAND=BAND,
        GATED=activation is not None,
        ACTIVATION=activation,
        num_warps=4,  # warps of a group; other warps come on top
    )
