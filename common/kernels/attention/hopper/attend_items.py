"""Attention of a program's items, one after the other: the task of four warps. Gluon, Hopper only."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from common.kernels.attention.decode_division import load_item, load_join, load_own_begin
from common.kernels.attention.decode_parts import NO_KEYS, first_tile_of, folded, num_tiles_of, part_tiles_of
from common.kernels.attention.hopper.columns import column_sum
from common.kernels.attention.hopper.group_outputs import begin_whole, join_units, store_unit, store_whole, units_before
from common.kernels.attention.hopper.new_token import begin_part, begin_token
from common.kernels.attention.hopper.tile_attention import attend_tile
from common.kernels.base.items import advance, announced
from common.kernels.base.last_program import is_last


@gluon.jit
def attend_items(
    shared,  # as in the kernel, like all arguments that are no constants
    warps_smem,  # as in `column_max`
    division,
    pool,
    token,
    out_ptr,
    parts,
    before,
    sinks_ptr,
    scale_log2,
    v_scale,
    NUM_KV: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ITEM_WORDS: gl.constexpr,
    PART_TILES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    RUN_PARTS: gl.constexpr,
    UNITS_AT_ONCE: gl.constexpr,
    MAX_QUERIES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NORMS_VALUES: gl.constexpr,
    SHARES_KV: gl.constexpr,
    WINDOW: gl.constexpr,
    PDL: gl.constexpr,
):
    """Attend every item, to its output or its units: the task of four warps."""
    k_ring, _, q_smem, _, item_smem, item_full, item_empty, _, _ = shared
    items_ptr, counts_ptr, _ = division
    _, _, _, arrivals_ptr = parts
    STAGES: gl.constexpr = k_ring.shape[0]
    TILE: gl.constexpr = k_ring.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.shape[2]
    ROWS: gl.constexpr = q_smem.shape[0]
    NUM_Q: gl.constexpr = NUM_KV * GROUP
    CACHE: gl.constexpr = k_ring.dtype
    IS_NARROW: gl.constexpr = k_ring.dtype != q_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, ROWS, 16])
    mma_rows: gl.constexpr = gl.SliceLayout(0, mma)  # queries
    no_acc = gl.zeros([HEAD_DIM, ROWS], gl.float32, mma)
    nothing = (no_acc, gl.full([ROWS], NO_KEYS, gl.float32, mma_rows), gl.zeros([ROWS], gl.float32, mma_rows))
    no_sums = gl.zeros([TILE, ROWS], gl.float32, mma)
    item = gl.program_id(0)
    item_ptr = items_ptr + item // NUM_KV * ITEM_WORDS
    seq, seq_len, begin, end, join, unit_parts = load_item(item_ptr)  # perhaps of no item
    num_items = gl.load(counts_ptr) * NUM_KV
    slot = 0
    phase = 0
    item_phase = 0
    while item < num_items:
        kv_head = item % NUM_KV
        num_tiles = num_tiles_of(seq_len, TILE)  # the new key may be alone in the last tile
        first_tile = first_tile_of(seq_len, WINDOW, TILE)
        num_seen = num_tiles - first_tile
        part_tiles = part_tiles_of(num_seen, PART_TILES, MAX_PARTS)
        past = gl.maximum(seq_len - 1, 0)  # keys of earlier steps, which is also the new key's position
        writes = (end == num_tiles) & (seq_len > 0)
        new_scores, new_value = begin_token(
            shared, token, pool, seq, past, kv_head, item == gl.program_id(0), writes, mma,
            NUM_KV, GROUP, BLOCK_SIZE, HAS_NORM, HAS_BIAS, NORMS_VALUES, SHARES_KV, PDL,
        )  # fmt: skip
        new_scores = new_scores * scale_log2
        new_value = new_value[:, None] + no_acc
        first_head = join.to(gl.int64) * (MAX_PARTS * NUM_Q) + kv_head * GROUP  # of the context's units
        last_part = first_tile + (num_seen - 1) // part_tiles * part_tiles  # first tile of the part with the new key
        part = begin_part(begin == last_part, new_value, new_scores, no_sums)
        own_begin = first_tile
        num_before = 0
        group_before = (before[0], before[1], before[2], NUM_KV * MAX_QUERIES)
        if MAX_QUERIES > 0:  # keys shared with other rows come first
            own_begin = load_own_begin(item_ptr)
            group_before, num_before = units_before(
                before, seq, kv_head, own_begin > 0, NUM_KV, HEADS, HEAD_DIM, MAX_QUERIES
            )
        unit = nothing  # parts joined so far, and below, runs
        whole = nothing
        if join < 0:
            whole = begin_whole(nothing, sinks_ptr, kv_head * GROUP, group_before, num_before, GROUP, CACHE)
        tiles_left = part_tiles  # of the part
        parts_left = unit_parts
        for tile in range(begin, end):
            first_key = 0
            if WINDOW > 0:
                first_key = seq_len - WINDOW - tile * TILE
            part = attend_tile(
                shared, warps_smem, part, slot, phase, first_key, past - tile * TILE, scale_log2, BLOCK_SIZE, WINDOW
            )
            slot, phase = advance(slot, phase, STAGES)
            tiles_left -= 1
            if (tiles_left == 0) | (tile + 1 == end):  # the part ends
                tiles_left = part_tiles
                acc, row_max, sums = part
                row_sum = column_sum(sums, warps_smem) if IS_NARROW else gl.sum(sums, axis=0)
                unit = folded(unit, (acc, row_max, row_sum), 0)
                part = begin_part(tile + 1 == last_part, new_value, new_scores, no_sums)
                parts_left -= 1
                if (parts_left == 0) | (tile + 1 == end):  # the unit ends, too
                    parts_left = unit_parts
                    if join < 0:
                        whole = folded(whole, unit, 0)
                    else:
                        which = (tile - own_begin) // (part_tiles * unit_parts)
                        store_unit(parts, unit, first_head + which * NUM_Q, NUM_Q, GROUP, CACHE)
                    unit = nothing
        group_out_ptr = out_ptr + (seq.to(gl.int64) * NUM_Q + kv_head * GROUP) * HEAD_DIM
        if join < 0:
            store_whole(group_out_ptr, whole, v_scale, GROUP, CACHE)
        else:
            num_pieces, num_units = load_join(item_ptr)
            if is_last(arrivals_ptr + join * NUM_KV + kv_head, num_pieces):
                join_units(
                    group_out_ptr, sinks_ptr, v_scale, kv_head * GROUP, group_before, num_before,
                    parts, first_head, num_units, unit_parts == RUN_PARTS,
                    NUM_Q, GROUP, HEADS, HEAD_DIM, UNITS_AT_ONCE, RUN_PARTS,
                )  # fmt: skip
        item = announced(item_smem, item_full, item_phase)
        mbarrier.arrive(item_empty, count=1)
        item_phase ^= 1
        item_ptr = items_ptr + gl.minimum(item, num_items - 1) // NUM_KV * ITEM_WORDS
        seq, seq_len, begin, end, join, unit_parts = load_item(item_ptr)
        tl.debug_barrier()  # all warps are done with the queries
