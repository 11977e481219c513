"""Product of a few tokens and a matrix of codes of 4 bits, by rings of tiles and `wgmma`, with codes in registers.

Every program has a ring of codes and one of tokens in shared memory, filled by the tensor memory accelerator. Codes are
on the way before the wait for the predecessor. A thread reads 16 bytes of a row, which are what it holds of the tall
operand of eight products (`common.ops.base.packing`). So no code changes threads, and tokens lie as they are. While the
matrix unit multiplies a block, the codes of the next one are widened.

Sums begin at zero with each group of columns, and are scaled and added up in fp32. An offset is a factor of the sum of
the group's tokens, which the matrix unit finds by a product with ones.

Written in Gluon, as `ring_gemm` is. Hopper only; Triton's interpreter does not run Gluon.
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

from common.kernels.base.checks import check_ending
from common.kernels.base.items import advance
from common.kernels.base.pdl import wait_for_predecessor
from common.kernels.products.tiles.ending import store_product
from common.kernels.products.tiles.nibble_operands import (
    CONSTRAINTS,
    codes_layout,
    parts_of,
    prefetch,
    widened,
    widening,
)
from common.kernels.products.tiles.ring import ROWS, WARPS, describe, tokens_of_tile
from common.kernels.products.wide_codes import check_codes_alone

BLOCK = 128  # columns in 64 bytes of a row
MIDDLE = 8  # subtracted from codes without offsets
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def tile_tokens(num_tokens: int, group: int, *, is_gated: bool, has_offsets: bool) -> int:
    """Return the tokens of a program, as many as have their sums in registers.

    Beside the sums of gate and of up, those of a group and of its inputs take registers, and small groups more.
    """
    many = 64
    if is_gated:
        many >>= (group < BLOCK) + has_offsets
    return min(tokens_of_tile(num_tokens), many)


@gluon.jit
def _load_codes(weight_desc, ring, barrier, slot, row, n, block, BLOCKS: gl.constexpr, SIDES: gl.constexpr):
    """Begin loading a slot's codes, from the block of columns `block` on."""
    for i in gl.static_range(BLOCKS):
        for side in gl.static_range(SIDES):
            place = ring.index((slot * BLOCKS + i) * SIDES + side)
            tma.async_copy_global_to_shared(weight_desc, [side * n + row, (block + i) * 32], barrier, place)


@gluon.jit
def _load_tokens(x_desc, ring, barrier, slot, token, block, BLOCKS: gl.constexpr, PARTS: gl.constexpr):
    """Begin loading a slot's tokens, from the block of columns `block` on, by parts of blocks that share scales."""
    for i in gl.static_range(BLOCKS * PARTS):
        start = block * 128 + i * (128 // PARTS)
        tma.async_copy_global_to_shared(x_desc, [token, start], barrier, ring.index(slot * (BLOCKS * PARTS) + i))


@gluon.jit
def _of_groups(ptr, starts, inside, block, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr):
    """Load the scales, or offsets, of each part of a block, `[ROWS, 1]` each, as a tuple; none without `ptr`."""
    numbers = ()
    if ptr is not None:
        group = block * PARTS if PARTS > 1 else block // (GROUP // 128)
        for part in gl.static_range(PARTS):
            mask = inside & (group + part < NUM_GROUPS)
            some = gl.load(ptr + starts + (group + part), mask=mask, other=0.0).to(gl.float32)
            numbers = numbers + (some[:, None],)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _prefetch_groups(ptr, starts, block, BLOCKS: gl.constexpr, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr,
                     PARTS: gl.constexpr):  # fmt: skip
    """Ask for the lines of the scales, or offsets, of BLOCKS blocks; for none without `ptr`."""
    if ptr is not None:
        BYTES: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        group = block * PARTS if PARTS > 1 else block // (GROUP // 128)
        LINES: gl.constexpr = (BLOCKS * 128 // GROUP * BYTES + 127) // 128 + 1
        for line in gl.static_range(LINES):
            prefetch(ptr + starts + gl.minimum(group + line * (128 // BYTES), NUM_GROUPS - 1))


@gluon.jit
def _scale_of_norm(x_ptr, eps, K: gl.constexpr, num_warps: gl.constexpr):
    """Return the inverse root of the mean square of a token."""
    COLUMNS: gl.constexpr = 256 * num_warps
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    columns = gl.arange(0, COLUMNS, layout)
    squares = gl.zeros([COLUMNS], gl.float32, layout)
    for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
        x = gl.load(x_ptr + i * COLUMNS + columns, mask=columns < K - i * COLUMNS, other=0.0).to(gl.float32)
        squares += x * x
    return gl.rsqrt(gl.sum(squares, axis=0) / K + eps)


@gluon.jit
def _store_normed(ring, x_ptr, norms, scale, columns, K: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a token times the norm's weights, and `scale`, in all rows of the tiles of a ring."""
    for i in gl.static_range(len(norms)):
        x = gl.load(x_ptr + i * WIDTH + columns, mask=columns < K - i * WIDTH, other=0.0)
        y = (x.to(gl.float32) * norms[i].to(gl.float32) * scale).to(x.dtype)
        ring.index(i).store(gl.broadcast(y[None, :], gl.zeros([8, WIDTH], x.dtype, LAYOUT))[0])
    fence_async_shared()


@gluon.jit(do_not_specialize=["m"])
def _nibble_ring_kernel(
    x_desc,  # [m, K], tiles of BLOCK_M x 128 / PARTS
    x_ptr,  # [K], if HAS_NORM
    norm_ptr,  # [K], if HAS_NORM
    weight_desc,  # [n, K / 4] numbers of 4 codes, tiles of ROWS x 32; [2 * n, K / 4] if GATED: gate, then up
    scales_ptr,  # [n, K / GROUP]; twice the rows if GATED
    offsets_ptr,  # as scales_ptr, or None
    residual_ptr,  # [m, n], if HAS_RESIDUAL; may be out_ptr
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n] if SPLITS is 1, else [SPLITS, m, n] fp32
    eps,
    m,
    n,
    K: gl.constexpr,
    GROUP: gl.constexpr,  # columns that share a scale
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
    num_warps: gl.constexpr,
):
    """Grid: (cdiv(n, ROWS) * TOKEN_TILES, SPLITS). A program computes ROWS outputs of a tile's tokens over a part of K.

    Programs of the same rows are neighbours, so the cache of the GPU has their codes.
    """
    SIDES: gl.constexpr = 2 if GATED else 1
    PARTS: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    NUM_GROUPS: gl.constexpr = K // GROUP
    CODE_BYTES: gl.constexpr = BLOCKS * SIDES * ROWS * 64
    TOKEN_BYTES: gl.constexpr = BLOCKS * BLOCK_M * 256
    dtype: gl.constexpr = x_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_M, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    row = gl.program_id(0) // TOKEN_TILES * ROWS
    token = gl.program_id(0) % TOKEN_TILES * BLOCK_M
    first = gl.program_id(1) * (TILES * BLOCKS)
    ring = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * BLOCKS * SIDES, ROWS, 32], weight_desc.layout)
    x_shape: gl.constexpr = [TOKEN_STAGES * BLOCKS * PARTS, BLOCK_M, 128 // PARTS]
    token_ring = gl.allocate_shared_memory(dtype, x_shape, x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tokens_arrived = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    for slot in gl.static_range(TOKEN_STAGES):
        mbarrier.init(tokens_arrived.index(slot), count=1)
    fence_async_shared()
    for slot in gl.static_range(STAGES):
        mbarrier.expect(arrived.index(slot), CODE_BYTES)
    for slot in gl.static_range(0 if HAS_NORM else TOKEN_STAGES):
        mbarrier.expect(tokens_arrived.index(slot), TOKEN_BYTES)
    for slot in gl.static_range(STAGES):
        _load_codes(weight_desc, ring, arrived.index(slot), slot, row, n, first + slot * BLOCKS, BLOCKS, SIDES)

    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside_n = rows < n
    starts = ()
    for side in gl.static_range(SIDES):
        start = (gl.minimum(rows, n - 1).to(gl.int64) + side * n) * NUM_GROUPS
        starts = starts + (start,)  # type: ignore[assignment]
        _prefetch_groups(scales_ptr, start, first, TILES * BLOCKS, NUM_GROUPS, GROUP, PARTS)
        _prefetch_groups(offsets_ptr, start, first, TILES * BLOCKS, NUM_GROUPS, GROUP, PARTS)
    mbarrier.wait(arrived.index(0), 0)
    a = widened(ring.index(0).load(CODES_LAYOUT), dtype, WIDEN, CONSTRAINTS, operand)
    WIDTH: gl.constexpr = 128 // PARTS
    x_layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [2, 16], [num_warps, 1], [1, 0])
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, x_layout))
    norms = ()
    if HAS_NORM:
        for i in gl.static_range(TOKEN_STAGES * BLOCKS * PARTS):
            norm = gl.load(norm_ptr + i * WIDTH + columns, mask=columns < K - i * WIDTH, other=0.0)
            norms = norms + (norm,)  # type: ignore[assignment]
    wait_for_predecessor(PDL)
    scale = 1.0
    if HAS_NORM:
        if dtype == gl.float16:  # which might not hold the token before it is scaled
            scale = _scale_of_norm(x_ptr, eps, K, num_warps)
        _store_normed(token_ring, x_ptr, norms, scale, columns, K, WIDTH, x_layout)
        scale = 1.0
        if dtype != gl.float16:
            scale = _scale_of_norm(x_ptr, eps, K, num_warps)
    for slot in gl.static_range(0 if HAS_NORM else TOKEN_STAGES):
        some = tokens_arrived.index(slot)
        _load_tokens(x_desc, token_ring, some, slot, token, first + slot * BLOCKS, BLOCKS, PARTS)

    ones = gl.full([ROWS, 128 // PARTS], 1.0, dtype, operand)
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
        for i in gl.static_range(BLOCKS * SIDES):
            block = first + tile * BLOCKS + i // SIDES
            scales = _of_groups(scales_ptr, starts[i % SIDES], inside_n, block, NUM_GROUPS, GROUP, PARTS)
            offsets = _of_groups(offsets_ptr, starts[i % SIDES], inside_n, block, NUM_GROUPS, GROUP, PARTS)
            parts = parts_of(a, PARTS, operand)
            for part in gl.static_range(PARTS):
                x = token_ring.index((x_slot * BLOCKS + i // SIDES) * PARTS + part).permute((1, 0))
                sums = warpgroup_mma(parts[part], x, zero, use_acc=False, is_async=True)
                if offsets_ptr is not None:
                    x_sums = warpgroup_mma(ones, x, zero, use_acc=False, is_async=True)
                # A wait for a barrier, though passed before, stands between the next block's codes and the wait for
                # the product. Without it, the assembler puts the wait for the product first.
                if part == 0:
                    if i < BLOCKS * SIDES - 1:
                        numbers = ring.index(slot * (BLOCKS * SIDES) + i + 1).load(CODES_LAYOUT)
                        a = widened(numbers, dtype, WIDEN, CONSTRAINTS, operand)
                        mbarrier.wait(arrived.index(slot), phase)
                    else:
                        mbarrier.wait(arrived.index(next_slot), next_phase, pred=tile + 1 < TILES)
                        numbers = ring.index(next_slot * (BLOCKS * SIDES)).load(CODES_LAYOUT)
                        a = widened(numbers, dtype, WIDEN, CONSTRAINTS, operand)
                        if HAS_NORM:
                            mbarrier.wait(arrived.index(next_slot), next_phase, pred=tile + 1 < TILES)
                        else:
                            mbarrier.wait(tokens_arrived.index(next_x_slot), next_x_phase, pred=tile + 1 < TILES)
                if offsets_ptr is not None:
                    sums, x_sums, a = warpgroup_mma_wait(0, deps=[sums, x_sums, a])
                else:
                    sums, a = warpgroup_mma_wait(0, deps=[sums, a])
                if i % SIDES == 0:
                    acc = gl.fma(sums, scales[part], acc)
                    if offsets_ptr is not None:
                        acc = gl.fma(x_sums, offsets[part], acc)
                else:
                    up_acc = gl.fma(sums, scales[part], up_acc)
                    if offsets_ptr is not None:
                        up_acc = gl.fma(x_sums, offsets[part], up_acc)
        if tile + STAGES < TILES:
            later = first + (tile + STAGES) * BLOCKS
            mbarrier.expect(arrived.index(slot), CODE_BYTES)
            _load_codes(weight_desc, ring, arrived.index(slot), slot, row, n, later, BLOCKS, SIDES)
        if tile + TOKEN_STAGES < TILES:
            later = first + (tile + TOKEN_STAGES) * BLOCKS
            some = tokens_arrived.index(x_slot)
            mbarrier.expect(some, TOKEN_BYTES)
            _load_tokens(x_desc, token_ring, some, x_slot, token, later, BLOCKS, PARTS)
        slot, phase, x_slot, x_phase = next_slot, next_phase, next_x_slot, next_x_phase

    if HAS_NORM:
        acc *= scale
        up_acc *= scale
    tokens = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    inside = inside_n[:, None] & (tokens < m)[None, :]
    elements = tokens[None, :].to(gl.int64) * n + rows[:, None]
    store_product(
        acc, up_acc, bias_ptr, residual_ptr, out_ptr, rows, inside_n, elements, inside, m * n, SPLITS, HAS_RESIDUAL,
        GATED, ACTIVATION,
    )  # fmt: skip


def nibble_ring(
    x: Tensor,  # [m, k] in 16 bits, contiguous
    weight: Tensor,  # packed uint8 [n, k / 2]; [2 * n, k / 2] with an activation
    scales: Tensor,  # fp16 or fp32 [n, groups]; twice the rows with an activation
    offsets: Tensor | None,  # as `scales`
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
    (m, k), n = x.shape, weight.shape[0] // (1 if activation is None else 2)
    group, has_offsets = check_codes_alone(weight, scales, offsets).group, offsets is not None
    assert x.dtype in NAMES, f"x of {x.dtype}: 16 bits needed"
    assert x.is_contiguous() and weight.shape[1] * 2 == k, f"x {tuple(x.shape)}, {weight.shape[1]} bytes: alike"
    shape = (splits, m, n) if splits > 1 else (m, n)
    assert out.shape == shape and out.is_contiguous(), f"out {tuple(out.shape)}: contiguous {shape} needed"
    assert splits == 1 or (residual is None and activation is None), f"{splits} splits: parts are sums alone"
    assert norm is None or (norm.shape == (k,) and m == splits == 1), (
        f"{m} tokens, {splits} splits: norms of one, [{k}]"
    )
    assert residual is None or residual.shape == (m, n), f"residual {tuple(residual.shape)}: ({m}, {n}) needed"
    check_ending(n, bias, activation)
    assert block_k % BLOCK == 0 and min(stages, token_stages) > 1, f"{block_k} columns, {stages}, {token_stages} slots"
    block_m = tile_tokens(m, group, is_gated=activation is not None, has_offsets=has_offsets)
    tiles = -(-k // (block_k * splits))
    token_tiles, width = -(-m // block_m), min(group, BLOCK)
    _nibble_ring_kernel[(-(-n // ROWS) * token_tiles, splits)](
        x_desc=describe(x, [block_m, width]),
        weight_desc=describe(weight.view(torch.int16), [ROWS, BLOCK // 4]),
        x_ptr=x,
        norm_ptr=x if norm is None else norm,
        scales_ptr=scales,
        offsets_ptr=offsets,
        residual_ptr=out if residual is None else residual,
        bias_ptr=bias,
        out_ptr=out,
        eps=eps,
        m=m,
        n=n,
        K=k,
        GROUP=group,
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
        GATED=activation is not None,
        ACTIVATION=activation,
        PDL=pdl,
        WIDEN=widening(NAMES[x.dtype], 0 if has_offsets else MIDDLE),
        CONSTRAINTS=CONSTRAINTS,
        CODES_LAYOUT=codes_layout(),
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return out
