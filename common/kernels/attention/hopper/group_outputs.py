"""Results of a program of decode attention for a group, the query heads of a KV head: an output, or a unit. Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.kernels.attention.decode_parts import NO_KEYS, begun, folded, joined_units, output_of
from common.kernels.attention.hopper.register_tiles import dims_of_rows

BEFORE_AT_ONCE = gl.constexpr(4)  # units loaded at once


@gluon.jit
def join_units(
    out_ptr,  # of the group
    sinks_ptr,  # of all heads, or None
    v_scale,  # as in `output_of`
    group_head,  # first head of the group
    before,  # units shared with other rows, as in `begin_whole`
    num_before,
    parts,  # partial_ptr, maxima_ptr, sums_ptr, arrivals_ptr
    first_head,  # of the group in the context's first unit, over all heads of all units
    num_units,
    are_runs,
    NUM_Q: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    UNITS_AT_ONCE: gl.constexpr,
    RUN_PARTS: gl.constexpr,
):
    """Write the output of a context whose units have all been stored."""
    partial_ptr, maxima_ptr, sums_ptr, _ = parts
    MIN_DIM: gl.constexpr = min(HEAD_DIM, 128)  # a warp has a row, at most
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // MIN_DIM, MIN_DIM // 4], [4, 1], [1, 0])
    layout_heads: gl.constexpr = gl.SliceLayout(1, layout)
    group = gl.arange(0, HEADS, layout_heads)
    elements = group[:, None] * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))[None, :]
    nothing = (
        gl.zeros([HEADS, HEAD_DIM], gl.float32, layout),
        gl.full([HEADS], NO_KEYS, gl.float32, layout_heads),
        gl.zeros([HEADS], gl.float32, layout_heads),
    )
    masks = ((group < GROUP)[:, None], group < GROUP)
    heads = first_head + group
    unit_ptrs = (partial_ptr + first_head * HEAD_DIM + elements, maxima_ptr + heads, sums_ptr + heads)
    whole = begun(nothing, sinks_ptr, group_head + group, masks[1])
    whole = _joined_before(whole, before, num_before, elements, group, masks, 1, HEAD_DIM)
    whole = joined_units(
        whole, nothing, unit_ptrs, masks, num_units, are_runs, NUM_Q, HEAD_DIM, UNITS_AT_ONCE, RUN_PARTS
    )
    gl.store(out_ptr + elements, output_of(whole, v_scale).to(out_ptr.dtype.element_ty), mask=masks[0])


@gluon.jit
def _joined_before(whole, before, num_before, elements, heads, masks, AXIS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Join the group's shared parts, if any, to `whole`."""
    acc_ptr, maxima_ptr, sums_ptr, stride = before
    for first in range(0, num_before, BEFORE_AT_ONCE):
        units = ()
        for i in gl.static_range(BEFORE_AT_ONCE):
            unit = (first + i) * stride
            exists = first + i < num_before
            acc = gl.load(acc_ptr + unit * HEAD_DIM + elements, mask=masks[0] & exists, other=0.0)
            row_max = gl.load(maxima_ptr + unit + heads, mask=masks[1] & exists, other=NO_KEYS)
            row_sum = gl.load(sums_ptr + unit + heads, mask=masks[1] & exists, other=0.0)
            units = units + ((acc, row_max, row_sum),)  # type: ignore[assignment]
        for i in gl.static_range(BEFORE_AT_ONCE):
            whole = folded(whole, units[i], AXIS)
    return whole


@gluon.jit
def units_before(
    before, seq, kv_head, is_any,
    NUM_KV: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, MAX_QUERIES: gl.constexpr,
):  # fmt: skip
    """Return pointers to the units that a row shares, as taken by `begin_whole`, and the number of these units."""
    partial_ptr, maxima_ptr, sums_ptr, units_ptr, pieces_ptr, places_ptr = before
    unit = gl.load(units_ptr + seq, mask=is_any, other=0).to(gl.int64)
    num_units = gl.load(pieces_ptr + seq, mask=is_any, other=0)
    place = gl.load(places_ptr + seq, mask=is_any, other=0)
    query = (unit * NUM_KV + kv_head) * MAX_QUERIES + place * HEADS
    ptrs = (partial_ptr + query * HEAD_DIM, maxima_ptr + query, sums_ptr + query, NUM_KV * MAX_QUERIES)
    return ptrs, num_units


@gluon.jit
def begin_whole(
    nothing,
    sinks_ptr,  # of all heads, or None
    group_head,  # first head of the group
    before,  # pointers into `SharedParts` at the group's first head of the first unit, and queries from unit to unit
    num_before,  # number of shared units, which precede the context's own
    GROUP: gl.constexpr,
    CACHE: gl.constexpr,  # type of the cache, as in `dims_of_rows`
):
    """Begin a context with its sinks and shared units joined; `nothing` gives the layout."""
    acc = nothing[0]
    HEAD_DIM: gl.constexpr = acc.shape[0]
    dims = dims_of_rows(HEAD_DIM, gl.SliceLayout(1, acc.type.layout), CACHE)
    group = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    elements = group[None, :] * HEAD_DIM + dims[:, None]
    masks = ((group < GROUP)[None, :], group < GROUP)
    whole = begun(nothing, sinks_ptr, group_head + group, masks[1])
    return _joined_before(whole, before, num_before, elements, group, masks, 0, HEAD_DIM)


@gluon.jit
def store_unit(parts, unit, first_head, NUM_Q: gl.constexpr, GROUP: gl.constexpr, CACHE: gl.constexpr):
    """Store a unit for the program that joins; `first_head`: of the group, over all heads of all units."""
    partial_ptr, maxima_ptr, sums_ptr, _ = parts
    acc, row_max, row_sum = unit
    HEAD_DIM: gl.constexpr = acc.shape[0]
    dims = dims_of_rows(HEAD_DIM, gl.SliceLayout(1, acc.type.layout), CACHE)
    group = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    heads = first_head + group
    gl.store(partial_ptr + heads[None, :] * HEAD_DIM + dims[:, None], acc, mask=(group < GROUP)[None, :])
    gl.store(maxima_ptr + heads, row_max, mask=group < GROUP)
    gl.store(sums_ptr + heads, row_sum, mask=group < GROUP)


@gluon.jit
def store_whole(out_ptr, whole, v_scale, GROUP: gl.constexpr, CACHE: gl.constexpr):
    """Write the output of a context whose parts were all computed by the program; `out_ptr`: of the group."""
    acc, _, row_sum = whole
    HEAD_DIM: gl.constexpr = acc.shape[0]
    dims = dims_of_rows(HEAD_DIM, gl.SliceLayout(1, acc.type.layout), CACHE)
    group = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    out = acc / gl.where(row_sum > 0, row_sum, 1.0)[None, :]  # a row of padding gives zeros
    if v_scale is not None:
        out = out * v_scale
    elements = group[None, :] * HEAD_DIM + dims[:, None]
    gl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=(group < GROUP)[None, :])
