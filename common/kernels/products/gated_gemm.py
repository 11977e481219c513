"""Gated half of an MLP for many tokens: `activation(x @ gate.T) * (x @ up.T)` in a single kernel.

A separate gate kernel would write the product to memory and read it again, four times the size of the result. That
would take a tenth of the time. Here a program multiplies a tile of tokens by equally many rows of gate and of up. The
rows lie beside each other in shared memory and are one operand to the matrix unit. The gate is applied to the product
in registers.

The product itself is the usual design for this GPU; see `tiles.drawn`. Fetching goes on while the groups apply the
gate.

Written in Gluon, Triton's lower layer, because in Gluon warps can have different tasks. Hopper only; Triton's
interpreter does not run Gluon.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from common.kernels.base.gate import ACTIVATIONS, SILU, gated
from common.kernels.base.gpu import gpu_of
from common.kernels.base.items import announced
from common.kernels.products.tiles.drawn import BAND, HALF, ROWS, fetch, make_slots, multiply, place, store

BLOCK_K = 64
STAGES = 4
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # of every tile


@gluon.jit
def _multiply(shared, work, out_desc, GROUP: gl.constexpr, BAND: gl.constexpr, ACTIVATION: gl.constexpr):
    """Multiply ROWS tokens of every item: the task of four warps. Elements past the edges are zero, and not stored."""
    x_ring, weight_ring, out_smem, item_smem, item_full, item_empty, _, _ = shared
    tiles_m, tiles_n, steps = work
    ROWS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = weight_ring.shape[1]
    HALF: gl.constexpr = WIDTH // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, WIDTH, 16])
    out = out_smem.index(GROUP)
    slot = 0
    phase = 0
    item_phase = 0
    item = announced(item_smem, item_full, item_phase)
    while item < tiles_m * tiles_n:
        mbarrier.arrive(item_empty, count=1)
        tile_m, tile_n = place(item, tiles_m, tiles_n, BAND)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        acc, slot, phase = multiply(shared, steps, slot, phase, acc, GROUP)
        gate, up = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, HALF]), (0, 2, 1)))
        store(out, out_desc, (2 * tile_m + GROUP) * ROWS, tile_n * HALF, gated(gate, up, ACTIVATION))
        item_phase ^= 1
        item = announced(item_smem, item_full, item_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m"])  # differs from step to step
def _gated_gemm_kernel(
    x_desc,  # [m, k], tiles of ROWS x BLOCK_K
    weight_desc,  # [2 * n, k], gate, then up; tiles of HALF x BLOCK_K
    out_desc,  # [m, n], tiles of ROWS x HALF
    ticket_ptr,  # [1] int32, items drawn so far: initially 0
    n,
    tiles_m,  # of 2 * ROWS tokens
    tiles_n,
    steps,  # tiles of K
    ROWS: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Grid: any size. Programs draw items of 2 * ROWS tokens and HALF outputs until none is left."""
    shared = make_slots(x_desc, weight_desc, out_desc, STAGES, ROWS, HALF, BLOCK_K, HALF)
    work = (tiles_m, tiles_n, steps)
    gl.warp_specialize(
        [
            (_multiply, (shared, work, out_desc, 0, BAND, ACTIVATION)),
            (_multiply, (shared, work, out_desc, 1, BAND, ACTIVATION)),
            (fetch, (shared, work, x_desc, weight_desc, ticket_ptr, n, True, BAND)),
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
    tiles_m, tiles_n = -(-m // (2 * ROWS)), -(-n // HALF)
    num_sms = gpu_of(x.device).num_sms
    _gated_gemm_kernel[(min(num_sms, tiles_m * tiles_n),)](
        x_desc=TensorDescriptor.from_tensor(x, [ROWS, BLOCK_K], LAYOUT),
        weight_desc=TensorDescriptor.from_tensor(weight, [HALF, BLOCK_K], LAYOUT),
        out_desc=TensorDescriptor.from_tensor(out, [ROWS, HALF], LAYOUT),
        ticket_ptr=torch.zeros(1, dtype=torch.int32, device=x.device),
        n=n,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        steps=-(-k // BLOCK_K),
        ROWS=ROWS,
        HALF=HALF,
        BLOCK_K=BLOCK_K,
        STAGES=STAGES,
        BAND=BAND,
        ACTIVATION=activation,
        num_warps=4,  # warps of a group; other warps come on top
    )
    return out
