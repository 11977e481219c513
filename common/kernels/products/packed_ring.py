"""Product of a few tokens and a matrix of packed codes, by rings of tiles and `wgmma`, with codes in registers.

Every program has a ring of codes and one of tokens in shared memory, filled by the tensor memory accelerator. Codes are
on the way before the wait for the predecessor. A thread reads 16 bytes of a row, its part of the tall operand of eight
products of 4 bits or four of 8 (`common.ops.base.packing`). So no code changes threads, and tokens lie as they are. The
codes of the next block are widened while the matrix unit multiplies one.

Sums begin at zero with each block of BLOCK columns, and are scaled and added up in fp32. An offset is a factor of the
sum of the block's tokens, which the matrix unit finds by a product with ones. Narrower groups would end too many sums.
Their codes become elements before the product, rounded as `widen` rounds them, and a single sum goes on. So do codes
with offsets and a gate beside many tokens, whose sums would not fit in registers.

Written in Gluon, as `ring_gemm` is. Hopper only; Triton's interpreter does not run Gluon.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.kernels.base.items import advance
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.packed_checks import NAMES, ROW_BYTES, check_packed_product
from common.kernels.products.tiles.ending import store_product
from common.kernels.products.tiles.packed_floats import factors_of_rows, floating
from common.kernels.products.tiles.packed_operands import (
    MIDDLE,
    codes_layout,
    constraints,
    operand_of,
    scaling,
    widening,
    words_layout,
)
from common.kernels.products.tiles.packed_rings import load_codes, load_tokens, make_rings, norms_of, share_token
from common.kernels.products.tiles.packed_scales import of_groups, of_words, starts_of_groups
from common.kernels.products.tiles.ring import MAX_TOKENS, ROWS, WARPS, describe, tokens_of_tile

BLOCK = 128  # columns that are multiplied at once
MANY_TOKENS = 32  # beyond, a thread has no registers for sums of gate and up, of a block and of its tokens


def makes_elements(num_tokens: int, group: int, *, is_gated: bool, has_offsets: bool) -> bool:
    """Tell whether codes become elements before a product, because that takes fewer instructions or registers."""
    return group % BLOCK > 0 or (has_offsets and is_gated and num_tokens > MANY_TOKENS)


@gluon.jit
def _next_operand(
    ring, arrived, tokens_arrived, slot, phase, next_slot, next_phase, next_x_slot, next_x_phase, has_next,
    words, INDEX: gl.constexpr, SOME: gl.constexpr, HAS_NORM: gl.constexpr, dtype: gl.constexpr,
    BITS: gl.constexpr, WIDEN: gl.constexpr, CONSTRAINTS: gl.constexpr, CODES_LAYOUT: gl.constexpr,
    WORDS_LAYOUT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the operand of the block behind block INDEX of a slot; before the next slot, await it and its tokens.

    A wait for a barrier, though passed before, stands between these codes and the wait for the product. Without it,
    the assembler puts the wait for the product first.
    """
    if INDEX < SOME - 1:
        a = operand_of(
            ring, slot * SOME + INDEX + 1, words, dtype, BITS, WIDEN, CONSTRAINTS, CODES_LAYOUT, WORDS_LAYOUT, LAYOUT
        )  # fmt: skip
        mbarrier.wait(arrived.index(slot), phase)
    else:
        mbarrier.wait(arrived.index(next_slot), next_phase, pred=has_next)
        a = operand_of(
            ring, next_slot * SOME, words, dtype, BITS, WIDEN, CONSTRAINTS, CODES_LAYOUT, WORDS_LAYOUT, LAYOUT
        )  # fmt: skip
        if HAS_NORM:
            mbarrier.wait(arrived.index(next_slot), next_phase, pred=has_next)
        else:
            mbarrier.wait(tokens_arrived.index(next_x_slot), next_x_phase, pred=has_next)
    return a


@gluon.jit
def _begin_products(a, x, ones, total, zero, HAS_OFFSETS: gl.constexpr, SCALED: gl.constexpr):
    """Begin a block's product, added to `total` if SCALED, and with offsets the sum of its tokens: return a tuple."""
    if SCALED:
        sums = (warpgroup_mma(a, x, total, is_async=True),)
    else:
        sums = (warpgroup_mma(a, x, zero, use_acc=False, is_async=True),)
    if HAS_OFFSETS:
        sums = sums + (warpgroup_mma(ones, x, zero, use_acc=False, is_async=True),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _end_products(total, sums, a, scales, offsets):
    """Await what `_begin_products` began; return `total` with it, scaled, and the operand that was made meanwhile."""
    if len(offsets) > 0:
        product, x_sum, a = warpgroup_mma_wait(0, deps=[sums[0], sums[1], a])
        total = gl.fma(product, scales[0], total)
        total = gl.fma(x_sum, offsets[0], total)
    else:
        product, a = warpgroup_mma_wait(0, deps=[sums[0], a])
        total = gl.fma(product, scales[0], total) if len(scales) > 0 else product
    return total, a


@gluon.jit
def _refill(
    weight_desc, x_desc, ring, token_ring, arrived, tokens_arrived, slot, x_slot, row, token, n, first, tile,
    TILES: gl.constexpr, STAGES: gl.constexpr, TOKEN_STAGES: gl.constexpr, BLOCKS: gl.constexpr, SIDES: gl.constexpr,
    WIDE: gl.constexpr, CODE_BYTES: gl.constexpr, TOKEN_BYTES: gl.constexpr,
):  # fmt: skip
    """Begin loading what the slots of a multiplied tile hold next, if there is more."""
    if tile + STAGES < TILES:
        later = first + (tile + STAGES) * BLOCKS
        mbarrier.expect(arrived.index(slot), CODE_BYTES)
        load_codes(weight_desc, ring, arrived.index(slot), slot, row, n, later, BLOCKS, SIDES, WIDE)
    if tile + TOKEN_STAGES < TILES:
        later = first + (tile + TOKEN_STAGES) * BLOCKS
        some = tokens_arrived.index(x_slot)
        mbarrier.expect(some, TOKEN_BYTES)
        load_tokens(x_desc, token_ring, some, x_slot, token, later, BLOCKS)


@gluon.jit(do_not_specialize=["m"])
def _packed_ring_kernel(
    x_desc,  # [m, K], tiles of BLOCK_M x 128
    x_ptr,  # [K], if HAS_NORM
    norm_ptr,  # [K], if HAS_NORM
    weight_desc,  # [n, K * BITS / 16] numbers, tiles of ROWS x 32; twice the rows if GATED: gate, then up
    scales_ptr,  # [n, K / GROUP], of e2m1 numbers of two scales; twice the rows if GATED
    offsets_ptr,  # as scales_ptr, or None
    factors_ptr,  # [n] of rows of e2m1, or None; twice the rows if GATED
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    eps,
    m,
    n,
    K: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # columns that share a scale, or a number of two
    SCALED: gl.constexpr,  # elements are multiplied, not codes
    TILES: gl.constexpr,  # of a part of K, of BLOCKS blocks each; the last ones may lie behind K, and are zeros
    STAGES: gl.constexpr,  # slots of codes; at most TILES
    TOKEN_STAGES: gl.constexpr,  # slots of tokens; at most TILES, and as many if HAS_NORM
    BLOCKS: gl.constexpr,  # in a slot
    BLOCK_M: gl.constexpr,  # tokens of a program
    TOKEN_TILES: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    HAS_NORM: gl.constexpr,  # of a lone token
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    WIDEN: gl.constexpr,  # instructions and constraints of their operands
    CONSTRAINTS: gl.constexpr,
    CODES_LAYOUT: gl.constexpr,
    WORDS_LAYOUT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: (cdiv(n, ROWS) * TOKEN_TILES, SPLITS). A program computes ROWS outputs of a tile's tokens over a part of K.

    Programs of the same rows are neighbours, so the cache of the GPU has their codes.
    """
    SIDES: gl.constexpr = 2 if GATED else 1
    SOME: gl.constexpr = BLOCKS * SIDES  # blocks of a slot
    WIDE: gl.constexpr = BITS // 4  # tiles of a block
    NUM_GROUPS: gl.constexpr = K // GROUP
    WIDTH: gl.constexpr = 128
    CODE_BYTES: gl.constexpr = SOME * WIDE * ROWS * 64
    TOKEN_BYTES: gl.constexpr = BLOCKS * BLOCK_M * 256
    dtype: gl.constexpr = x_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    of_groups_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, WORDS_LAYOUT)))
    row = gl.program_id(0) // TOKEN_TILES * ROWS
    token = gl.program_id(0) % TOKEN_TILES * BLOCK_M
    first = gl.program_id(1) * (TILES * BLOCKS)
    ring, token_ring, arrived, tokens_arrived = make_rings(
        x_desc, weight_desc, STAGES, SOME * WIDE, CODE_BYTES, TOKEN_STAGES, BLOCKS,
        0 if HAS_NORM else TOKEN_BYTES,
    )  # fmt: skip
    for slot in gl.static_range(STAGES):
        load_codes(weight_desc, ring, arrived.index(slot), slot, row, n, first + slot * BLOCKS, BLOCKS, SIDES, WIDE)

    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside_n = rows < n
    scale_rows, inside = rows, inside_n
    if SCALED:
        scale_rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_groups_layout))
        inside = scale_rows < n
    starts = starts_of_groups(scales_ptr, offsets_ptr, scale_rows, n, first, SIDES, TILES * BLOCKS, NUM_GROUPS, GROUP)
    words, next_words = (), ()
    if SCALED:  # those of the next block are loaded a block ahead
        words = of_words(scales_ptr, offsets_ptr, starts[0], inside, first, NUM_GROUPS, GROUP, WIDE, of_groups_layout)
        second = first + 1 // SIDES
        next_words = of_words(
            scales_ptr, offsets_ptr, starts[1 % SIDES], inside, second, NUM_GROUPS, GROUP, WIDE, of_groups_layout
        )
    mbarrier.wait(arrived.index(0), 0)
    a = operand_of(ring, 0, words, dtype, BITS, WIDEN, CONSTRAINTS, CODES_LAYOUT, WORDS_LAYOUT, operand)
    x_layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [2, 16], [num_warps, 1], [1, 0])
    norms, scale = (), 1.0
    if HAS_NORM:
        norms = norms_of(norm_ptr, TOKEN_STAGES * BLOCKS, K, WIDTH, x_layout)
    wait_for_predecessor(PDL)
    if HAS_NORM:
        scale = share_token(token_ring, x_ptr, norms, eps, K, WIDTH, x_layout, num_warps)
    for slot in gl.static_range(0 if HAS_NORM else TOKEN_STAGES):
        some = tokens_arrived.index(slot)
        load_tokens(x_desc, token_ring, some, slot, token, first + slot * BLOCKS, BLOCKS)

    ones = gl.full([ROWS, WIDTH], 1.0, dtype, operand)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    up_acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout)
    slot = 0
    phase = 0
    x_slot = 0
    x_phase = 0
    if not HAS_NORM:
        mbarrier.wait(tokens_arrived.index(0), 0)
    for tile in range(TILES):
        next_slot, next_phase = advance(slot, phase, STAGES)
        next_x_slot, next_x_phase = advance(x_slot, x_phase, TOKEN_STAGES)
        for i in gl.static_range(SOME):
            block = first + tile * BLOCKS + i // SIDES
            scales, offsets, these = (), (), ()
            if SCALED:
                these, third = next_words, block + 2 // SIDES
                next_words = of_words(
                    scales_ptr, offsets_ptr, starts[i % SIDES], inside, third, NUM_GROUPS, GROUP, WIDE, of_groups_layout
                )
            else:
                scales = of_groups(scales_ptr, starts[i % SIDES], inside, block, NUM_GROUPS, GROUP)
                offsets = of_groups(offsets_ptr, starts[i % SIDES], inside, block, NUM_GROUPS, GROUP)
            x = token_ring.index(x_slot * BLOCKS + i // SIDES).permute((1, 0))
            total = acc if i % SIDES == 0 else up_acc
            sums = _begin_products(a, x, ones, total, zero, len(offsets) > 0, SCALED)
            a = _next_operand(
                ring, arrived, tokens_arrived, slot, phase, next_slot, next_phase, next_x_slot, next_x_phase,
                tile + 1 < TILES, these, i, SOME, HAS_NORM, dtype, BITS, WIDEN, CONSTRAINTS, CODES_LAYOUT,
                WORDS_LAYOUT, operand,
            )  # fmt: skip
            total, a = _end_products(total, sums, a, scales, offsets)
            if i % SIDES == 0:
                acc = total
            else:
                up_acc = total
        _refill(
            weight_desc, x_desc, ring, token_ring, arrived, tokens_arrived, slot, x_slot, row, token, n, first, tile,
            TILES, STAGES, TOKEN_STAGES, BLOCKS, SIDES, WIDE, CODE_BYTES, TOKEN_BYTES,
        )  # fmt: skip
        slot, phase, x_slot, x_phase = next_slot, next_phase, next_x_slot, next_x_phase

    if HAS_NORM:
        acc *= scale
        up_acc *= scale
    if factors_ptr is not None:
        acc *= factors_of_rows(factors_ptr, rows, inside_n)
        if GATED:
            up_acc *= factors_of_rows(factors_ptr, n + rows, inside_n)
    tokens = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    inside_out = inside_n[:, None] & (tokens < m)[None, :]
    elements = tokens[None, :].to(gl.int64) * n + rows[:, None]
    store_product(
        acc, up_acc, bias_ptr, residual_ptr, out_ptr, rows, inside_n, elements, inside_out, m * n, SPLITS,
        HAS_RESIDUAL, GATED, ACTIVATION,
    )  # fmt: skip


def packed_ring(
    x: Tensor,  # [m, k] in 16 bits, contiguous
    weight: Tensor,  # packed uint8 [n, k / 2], or packed int8 [n, k]; twice the rows with an activation
    scales: Tensor,  # fp16 or fp32 [n, groups], or of e2m1 uint8; twice the rows with an activation
    offsets: Tensor | None,  # as `scales`
    factors: Tensor | None,  # fp32 [n, 1], of e2m1; twice the rows with an activation
    out: Tensor,  # [m, n], or fp32 parts [splits, m, n]; overwritten
    *,
    block_k: int,
    stages: int,
    token_stages: int,
    splits: int = 1,
    norm: Tensor | None = None,  # [k], of a lone token, without splits only
    eps: float = 0.0,
    residual: Tensor | None = None,  # [m, n], without splits only; may be `out`
    bias: Tensor | None = None,  # [n], without a gate only
    activation: str | None = None,  # of the gate, if gated
    pdl: bool = False,
) -> Tensor:
    """Write `norm(x) @ weight.T + bias`, then `+ residual` or `activation(gate) * up`, to `out`; return `out`.

    With `splits`, write parts, the first with the bias. A slot of a ring has `block_k` columns, a multiple of BLOCK.
    There are `stages` slots of codes and `token_stages` of tokens, two at least; of a normed token as many as needed.
    """
    packed = check_packed_product(
        x,
        weight,
        scales,
        offsets,
        factors,
        out,
        splits=splits,
        norm=norm,
        residual=residual,
        bias=bias,
        activation=activation,
    )
    assert block_k % BLOCK == 0 and min(stages, token_stages) > 1, f"{block_k} columns, {stages}, {token_stages} slots"
    (m, k), bits, is_gated, has_offsets = x.shape, packed.bits, activation is not None, offsets is not None
    group = packed.group_of_number
    is_scaled = makes_elements(m, group, is_gated=is_gated, has_offsets=has_offsets)
    block_m = min(tokens_of_tile(m), MAX_TOKENS)
    n, tiles, token_tiles = weight.shape[0] // (2 if is_gated else 1), -(-k // (block_k * splits)), -(-m // block_m)
    name, middle = NAMES[x.dtype], 0 if has_offsets else MIDDLE
    if packed.is_float:
        widen, of_word = floating(name, 2)
    elif is_scaled:
        widen = scaling(name, bits, has_offsets=has_offsets)
        of_word = constraints(bits, has_scales=True, has_offsets=has_offsets)
    else:
        widen, of_word = widening(name, bits, middle), constraints(bits)
    _packed_ring_kernel[(-(-n // ROWS) * token_tiles, splits)](
        x_desc=describe(x, [block_m, BLOCK]),
        weight_desc=describe(weight.view(torch.int16), [ROWS, ROW_BYTES // 2]),
        x_ptr=x,
        norm_ptr=x if norm is None else norm,
        scales_ptr=scales.view(torch.uint16) if packed.is_float else scales,
        offsets_ptr=offsets,
        factors_ptr=factors,
        residual_ptr=out if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        eps=eps,
        m=m,
        n=n,
        K=k,
        BITS=bits,
        GROUP=group,
        SCALED=is_scaled,
        TILES=tiles,
        STAGES=min(stages, tiles),
        TOKEN_STAGES=tiles if norm is not None else min(token_stages, tiles),
        BLOCKS=block_k // BLOCK,
        BLOCK_M=block_m,
        TOKEN_TILES=token_tiles,
        ROWS=ROWS,
        SPLITS=splits,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=is_gated,
        ACTIVATION=activation,
        PDL=pdl,
        WIDEN=widen,
        CONSTRAINTS=of_word,
        CODES_LAYOUT=codes_layout(),
        WORDS_LAYOUT=words_layout(max(packed.block // group, 1)),
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return out
