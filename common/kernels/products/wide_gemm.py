"""Product of many tokens and a weight matrix of gate and up, or of signed bytes, with all that follows in one kernel.

A kernel behind the product would write the product to memory and read it again. For a gate that is four times the size
of the result, and would take a tenth of the time. Here a program multiplies a tile of tokens by 256 rows of weights. It
applies scales and the gate to the product in registers. Equally many rows of gate and of up lie beside each other in
shared memory and are one operand to the matrix unit.

The product itself is the usual design for this GPU; see `tiles.drawn`. Fetching goes on while the groups finish a tile.

Written in Gluon, Triton's lower layer, because in Gluon warps can have different tasks. Hopper only; Triton's
interpreter does not run Gluon.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.kernels.base.gate import ACTIVATIONS, gated
from common.kernels.base.gpu import gpu_of
from common.kernels.base.items import announced
from common.kernels.products.tiles.drawn import BAND, HALF, ROWS, fetch, make_slots, multiply, place, store

TILE_BYTES = 128  # of a row of a tile of tokens or weights
STAGES, GATED_STAGES = 3, 4  # as many as shared memory has room for
LAYOUTS = {bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}
"""Layouts of every tile, by the bits of an element."""


@gluon.jit
def _multiply(
    shared,
    work,
    scales,
    out_desc,
    m,
    n,
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
    IS_CODES: gl.constexpr = x_ring.dtype == gl.int8
    SUMS: gl.constexpr = gl.int32 if IS_CODES else gl.float32
    shape: gl.constexpr = [16, HALF, 32] if IS_CODES else [16, WIDTH, 16]  # of codes, WIDTH is too wide
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=shape)
    out = out_smem.index(GROUP)
    slot = 0
    phase = 0
    item_phase = 0
    item = announced(item_smem, item_full, item_phase)
    while item < tiles_m * tiles_n:
        mbarrier.arrive(item_empty, count=1)
        tile_m, tile_n = place(item, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, WIDTH], SUMS, layout)
        y, slot, phase = multiply(shared, steps, slot, phase, acc, GROUP)
        first = (2 * tile_m + GROUP) * ROWS
        if IS_CODES:
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
            y = y.to(gl.float32) * x_scales[:, None] * row_scales[None, :]
        if GATED:
            gate, up = gl.split(gl.permute(gl.reshape(y, [ROWS, 2, HALF]), (0, 2, 1)))
            store(out, out_desc, first, tile_n * HALF, gated(gate, up, ACTIVATION))
        else:
            store(out, out_desc, first, tile_n * WIDTH, y)
        item_phase ^= 1
        item = announced(item_smem, item_full, item_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "m"])  # differ from step to step
def _wide_gemm_kernel(
    x_desc,  # [m, k], tiles of ROWS x BLOCK_K
    x_scales_ptr,  # of codes: [m] fp32; else None
    weight_desc,  # [n, k], tiles of HALF x BLOCK_K; [2 * n, k] if GATED: gate, then up
    scales_ptr,  # of codes: [n] fp32, [2 * n] if GATED; else None
    out_desc,  # [m, n], tiles of ROWS x WIDTH
    ticket_ptr,  # [1] int32, items drawn so far: initially 0
    m,  # of codes; else None
    n,
    tiles_m,  # of 2 * ROWS tokens
    tiles_n,
    steps,  # tiles of K
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
            (_multiply, (shared, work, scales, out_desc, m, n, 0, GATED, BAND, ACTIVATION)),
            (_multiply, (shared, work, scales, out_desc, m, n, 1, GATED, BAND, ACTIVATION)),
            (fetch, (shared, work, x_desc, weight_desc, ticket_ptr, n, GATED, BAND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )


def wide_gemm(
    x: Tensor,  # [m, k], contiguous: 16 bits, or int8
    weight: Tensor,  # [n, k] of the same dtype, contiguous; [2 * n, k] with an activation: gate, then up
    dtype: torch.dtype,  # of the result, 16 bits
    *,
    x_scales: Tensor | None = None,  # of int8: fp32 [m, 1]
    scales: Tensor | None = None,  # of int8: fp32 [n, 1], or [2 * n, 1]
    activation: str | None = None,  # of the gate, if gated; without, of int8 only
) -> Tensor:
    """Return `x @ weight.T`, or `activation(gate) * up`, of what codes stand for: `[m, n]`.

    `n` must be a multiple of 8, and `k` of 8, or of 16 with int8.
    """
    (m, k), n, is_gated = x.shape, weight.shape[0] // (1 if activation is None else 2), activation is not None
    assert dtype.itemsize == 2 and weight.dtype == x.dtype, (
        f"result {dtype}: 16 bits needed; x {x.dtype}, weight {weight.dtype}: alike needed"
    )
    assert weight.shape[1] == k and x.is_contiguous() and weight.is_contiguous(), (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: contiguous, alike in k needed"
    )
    if x_scales is None or scales is None:
        assert x.element_size() == 2 and is_gated, f"x {x.dtype}: 16 bits and a gate, or scales needed"
    else:
        assert x.dtype == torch.int8, f"x {x.dtype}: int8 needed with scales"
        assert x_scales.shape == (m, 1) and scales.shape == (weight.shape[0], 1), "a scale for each token and row"
        assert x_scales.is_contiguous() and scales.is_contiguous(), "scales: contiguous"
    assert activation is None or activation in ACTIVATIONS, f"activation {activation}: one of {ACTIVATIONS} needed"
    least_k = 16 // x.element_size()
    assert m > 0 and n % 8 == k % least_k == 0, f"m {m}, n {n}, k {k}: at least one, and multiples of 8 and {least_k}"
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    width = HALF if is_gated else 2 * HALF
    block_k, tile_layout = TILE_BYTES // x.element_size(), LAYOUTS[8 * x.element_size()]
    tiles_m, tiles_n = -(-m // (2 * ROWS)), -(-n // width)
    num_sms = gpu_of(x.device).num_sms
    _wide_gemm_kernel[(min(num_sms, tiles_m * tiles_n),)](
        x_desc=TensorDescriptor.from_tensor(x, [ROWS, block_k], tile_layout),
        x_scales_ptr=x_scales,
        weight_desc=TensorDescriptor.from_tensor(weight, [HALF, block_k], tile_layout),
        scales_ptr=scales,
        out_desc=TensorDescriptor.from_tensor(out, [ROWS, width], LAYOUTS[16]),
        ticket_ptr=torch.zeros(1, dtype=torch.int32, device=x.device),
        m=None if scales is None else m,
        n=n,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        steps=-(-k // block_k),
        ROWS=ROWS,
        HALF=HALF,
        WIDTH=width,
        BLOCK_K=block_k,
        STAGES=GATED_STAGES if is_gated else STAGES,
        BAND=BAND,
        GATED=is_gated,
        ACTIVATION=activation,
        num_warps=4,  # warps of a group; other warps come on top
    )
    return out
