"""Gated half of an MLP for many tokens: `activation(x @ gate.T) * (x @ up.T)` in a single kernel.

A separate gate kernel would write the product to memory and read it again, four times the size of the result. That
would take a tenth of the time. Here a program multiplies a tile of tokens by equally many rows of gate and of up. The
rows lie beside each other in shared memory and are one operand to the matrix unit. The gate is applied to the product
in registers.

The product itself is the usual design for this GPU. Each multiprocessor has a program, which draws tiles (`items`). One
warp fetches operands by the tensor memory accelerator; two groups of four warps multiply, 64 tokens each. Fetching goes
on while the groups apply the gate.

Written in Gluon, Triton's lower layer, because in Gluon warps can have different tasks. Hopper only; Triton's
interpreter does not run Gluon.
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

from common.kernels.base.gate import ACTIVATIONS, SILU, gated
from common.kernels.base.gpu import gpu_of
from common.kernels.base.items import advance, announce, announced, draw

ROWS = 64  # tokens of a group of four warps, multiplied at once
BLOCK_N = 128  # outputs of a program: rows of gate, and as many of up
BLOCK_K = 64
STAGES = 4
BAND = 32  # tiles of tokens that take turns at the same weights, which stay in the L2 cache meanwhile
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # of every tile


@gluon.jit
def _place(item, tiles_m, tiles_n, BAND: gl.constexpr):
    """Return an item's tile of tokens and tile of outputs."""
    band = item // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    within = item - band * (BAND * tiles_n)
    return band * BAND + within % height, within // height


@gluon.jit
def _fetch(shared, work, x_desc, weight_desc, ticket_ptr, n, BAND: gl.constexpr):
    """Draw items and fetch tiles of tokens, gate and up, as slots become free: the task of a warp."""
    x_ring, weight_ring, _, item_smem, item_full, item_empty, full, empty = shared
    tiles_m, tiles_n, steps = work
    STAGES: gl.constexpr = weight_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = weight_ring.shape[1] // 2
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    slot = 0
    phase = 1  # the first wait for an empty slot returns at once
    item_phase = 1
    item = draw(ticket_ptr)
    while item < tiles_m * tiles_n:
        tile_m, tile_n = _place(item, tiles_m, tiles_n, BAND)
        announce(item, item_smem, item_empty, item_phase)
        mbarrier.arrive(item_full, count=1)
        item_phase ^= 1
        for step in range(steps):
            start = step * BLOCK_K
            barrier = full.index(slot)
            weights = weight_ring.index(slot)
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(barrier, (2 * ROWS + 2 * BLOCK_N) * BLOCK_K * 2)
            for half in gl.static_range(2):  # halves of the tokens, for a group each; of the weights, gate and up
                row = (2 * tile_m + half) * ROWS
                tma.async_copy_global_to_shared(x_desc, [row, start], barrier, x_ring.index(2 * slot + half))
                rows = weights.slice(half * BLOCK_N, BLOCK_N)
                tma.async_copy_global_to_shared(weight_desc, [half * n + tile_n * BLOCK_N, start], barrier, rows)
            slot, phase = advance(slot, phase, STAGES)
        item = draw(ticket_ptr)
    announce(item, item_smem, item_empty, item_phase)  # no item: the groups end
    mbarrier.arrive(item_full, count=1)


@gluon.jit
def _multiply(shared, work, out_desc, GROUP: gl.constexpr, BAND: gl.constexpr, ACTIVATION: gl.constexpr):
    """Multiply ROWS tokens of every item: the task of four warps. Elements past the edges are zero, and not stored."""
    x_ring, weight_ring, out_smem, item_smem, item_full, item_empty, full, empty = shared
    tiles_m, tiles_n, steps = work
    STAGES: gl.constexpr = weight_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = weight_ring.shape[1]
    BLOCK_N: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, WIDTH, 16])
    out = out_smem.index(GROUP)
    slot = 0
    phase = 0
    item_phase = 0
    item = announced(item_smem, item_full, item_phase)
    while item < tiles_m * tiles_n:
        mbarrier.arrive(item_empty, count=1)
        tile_m, tile_n = _place(item, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            weights = weight_ring.index(slot).permute((1, 0))
            acc = warpgroup_mma(x_ring.index(2 * slot + GROUP), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the product before has ended, and its slot is free
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1, pred=step > 0)
            slot, phase = advance(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, BLOCK_N]), (0, 2, 1)))
        tma.store_wait(0)  # of the item before
        out.store(gated(gate, up, ACTIVATION).to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [(2 * tile_m + GROUP) * ROWS, tile_n * BLOCK_N], out)
        item_phase ^= 1
        item = announced(item_smem, item_full, item_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m"])  # differs from step to step
def _gated_gemm_kernel(
    x_desc,  # [m, k], tiles of ROWS x BLOCK_K
    weight_desc,  # [2 * n, k], gate, then up; tiles of BLOCK_N x BLOCK_K
    out_desc,  # [m, n], tiles of ROWS x BLOCK_N
    ticket_ptr,  # [1] int32, items drawn so far: initially 0
    n,
    tiles_m,  # of 2 * ROWS tokens
    tiles_n,
    steps,  # tiles of K
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Grid: any size. Programs draw items of 2 * ROWS tokens and BLOCK_N outputs until none is left."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, BLOCK_K], x_desc.layout)
    weight_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], weight_desc.layout)
    out_smem = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS, BLOCK_N], out_desc.layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(item_full, count=1)
    mbarrier.init(item_empty, count=2)  # both groups
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    shared = (x_ring, weight_ring, out_smem, item_smem, item_full, item_empty, full, empty)
    work = (tiles_m, tiles_n, steps)
    gl.warp_specialize(
        [
            (_multiply, (shared, work, out_desc, 0, BAND, ACTIVATION)),
            (_multiply, (shared, work, out_desc, 1, BAND, ACTIVATION)),
            (_fetch, (shared, work, x_desc, weight_desc, ticket_ptr, n, BAND)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )


def gated_gemm(
    x: Tensor,  # [m, k], contiguous, 16 bits
    weight: Tensor,  # [2 * n, k], contiguous: gate, then up
    activation: str = SILU,
) -> Tensor:
    """Return `activation(x @ gate.T) * (x @ up.T)`: `[m, n]`. `n` and `k` must be multiples of 8."""
    (m, k), n = x.shape, weight.shape[0] // 2
    assert x.element_size() == 2 and weight.dtype == x.dtype, f"x {x.dtype}, weight {weight.dtype}: 16 bits, alike"
    assert weight.shape == (2 * n, k) and x.is_contiguous() and weight.is_contiguous(), (
        f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: contiguous, [m, k] and [2 * n, k] needed"
    )
    assert activation in ACTIVATIONS, f"activation {activation}: one of {ACTIVATIONS} needed"
    assert m > 0 and n % 8 == k % 8 == 0, f"m {m}, n {n}, k {k}: at least one, and multiples of 8"
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tiles_m, tiles_n = -(-m // (2 * ROWS)), -(-n // BLOCK_N)
    num_sms = gpu_of(x.device).num_sms
    _gated_gemm_kernel[(min(num_sms, tiles_m * tiles_n),)](
        x_desc=TensorDescriptor.from_tensor(x, [ROWS, BLOCK_K], LAYOUT),
        weight_desc=TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], LAYOUT),
        out_desc=TensorDescriptor.from_tensor(out, [ROWS, BLOCK_N], LAYOUT),
        ticket_ptr=torch.zeros(1, dtype=torch.int32, device=x.device),
        n=n,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        steps=-(-k // BLOCK_K),
        ROWS=ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=STAGES,
        BAND=BAND,
        ACTIVATION=activation,
        num_warps=4,  # warps of a group; other warps come on top
    )
    return out
