"""Division of a decode batch's contexts over programs, by the amount to read, not by sequence.

A captured step has a fixed grid, but contexts of any lengths. So the first kernel of a step looks at all lengths and
deals out items for all layers. An item is a run of parts (`decode_parts`) of one context. Contexts long beside a
program's share of the batch are cut into several items, the rest stay whole. Long items come first (longest processing
time, Graham, 1969), so the last items to end are short.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import (
    MAX_PARTS,
    PART_TILES,
    RUN_PARTS,
    TILE,
    first_tile_of,
    num_tiles_of,
    part_tiles_of,
)
from common.kernels.base.attention_operands import Division, SharedDivision
from common.kernels.base.checks import check_column
from common.kernels.base.pdl import wait_for_predecessor

ITEM_WORDS = 9  # words of `load_item`, then of the context: number of items, number of units, own first tile
MOST_PROGRAMS_PER_SM = 3
MIN_ROWS = 128  # so that few kernels are compiled
JOIN_TILES = 16  # tiles computed in the time of joining many contexts; contexts are not cut to save less
SIZE_CLASSES = 6  # classes of item sizes, each down to two thirds of the class before


@triton.jit
def load_item(item_ptr):
    """Load row, length in tokens, first tile, tile after the last, join (-1: context is whole), parts of a unit.

    Callable from Gluon, like `load_join`, `load_own_begin` and `next_item`.
    """
    row = tl.load(item_ptr)
    seq_len = tl.load(item_ptr + 1)
    begin = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    join = tl.load(item_ptr + 4)
    unit_parts = tl.load(item_ptr + 5)
    return row, seq_len, begin, end, join, unit_parts


@triton.jit
def load_join(item_ptr):
    """Load the number of items of the item's context, and the number of units stored by these items."""
    return tl.load(item_ptr + 6), tl.load(item_ptr + 7)


@triton.jit
def load_own_begin(item_ptr):
    """Load the first tile of the item's context that is seen and not shared; tiles before are of other rows, too."""
    return tl.load(item_ptr + 8)


@triton.jit
def next_item(draws_ptr, num_items):
    """Draw a KV head's next item for a program past its first; `num_items` or more means none."""
    drawn = num_items
    if tl.num_programs(0) < num_items:
        drawn = tl.num_programs(0) + tl.atomic_add(draws_ptr, 1, sem="relaxed")
    return drawn


@triton.jit
def _pieces(tiles, part_tiles, longest, wanted, RUN_PARTS: tl.constexpr):
    """Return the number of pieces of each context and the parts of a piece.

    Contexts above `longest` tiles are cut into pieces of about `wanted` tiles.
    """
    num_parts = (tiles + part_tiles - 1) // part_tiles
    piece_parts = tl.maximum(tl.floor(wanted / part_tiles + 0.5).to(tl.int32), 1)
    pieces = tl.where(tiles > longest, (num_parts + piece_parts - 1) // piece_parts, 1)
    piece_parts = tl.maximum((num_parts + pieces - 1) // tl.maximum(pieces, 1), 1)  # as even as possible
    whole_runs = (piece_parts + RUN_PARTS - 1) // RUN_PARTS * RUN_PARTS
    piece_parts = tl.where(piece_parts < RUN_PARTS, piece_parts, whole_runs)
    return (num_parts + piece_parts - 1) // piece_parts, piece_parts


@triton.jit
def _best_pieces(
    tiles,
    part_tiles,
    share,
    NUM_KV: tl.constexpr,
    SLOTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    JOIN_TILES: tl.constexpr,
):
    """Return `_pieces` computed by programs in about equal time.

    `share`: tiles of each program that runs at once, if all have equally many. Best is as many pieces as programs, of
    about the share's size. With more pieces, programs have several in turn, so contexts of different lengths even out.
    Pieces must be smaller if few programs would work a piece longer than the rest.
    """
    exact, roomy = share * 1.1, share * 4 / 3
    exact_pieces, exact_parts = _pieces(tiles, part_tiles, exact, exact, RUN_PARTS)
    roomy_pieces, roomy_parts = _pieces(tiles, part_tiles, roomy, roomy, RUN_PARTS)
    coarse_pieces, coarse_parts = _pieces(tiles, part_tiles, roomy, share * 2 / 3, RUN_PARTS)
    fine_pieces, fine_parts = _pieces(tiles, part_tiles, share / 2, share / 3, RUN_PARTS)
    exact_fits = tl.sum(exact_pieces, axis=0) * NUM_KV <= SLOTS
    roomy_fits = tl.sum(roomy_pieces, axis=0) * NUM_KV <= SLOTS
    programs = tl.sum(coarse_pieces, axis=0) * NUM_KV
    idle = ((programs + SLOTS - 1) // SLOTS * SLOTS - programs) / tl.maximum(programs, 1)  # as a part of the share
    is_even = (idle * 3 <= 1) | (idle * share < JOIN_TILES)
    pieces = tl.where(is_even, coarse_pieces, fine_pieces)
    parts = tl.where(is_even, coarse_parts, fine_parts)
    pieces = tl.where(exact_fits, exact_pieces, tl.where(roomy_fits, roomy_pieces, pieces))
    return pieces, tl.where(exact_fits, exact_parts, tl.where(roomy_fits, roomy_parts, parts))


@triton.jit(do_not_specialize=["num_rows"])
def _divide_kernel(
    seq_lens_ptr,  # [num_rows] int32, 0 for padding
    own_begins_ptr,  # [num_rows] int32, of `SharedDivision`; anything if not SHARED
    items_ptr,  # [max_items, ITEM_WORDS] int32, of `Division`
    counts_ptr,  # [1 + num_layers] int32, of `Division`
    num_rows,
    num_layers,
    NUM_KV: tl.constexpr,
    SLOTS: tl.constexpr,  # programs that run at once
    ITEM_WORDS: tl.constexpr,
    SIZE_CLASSES: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least num_rows
    TILE: tl.constexpr,
    PART_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    JOIN_TILES: tl.constexpr,
    LAYERS: tl.constexpr,  # power of two, at least num_layers
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (1,). Every KV head has the same items."""
    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    wait_for_predecessor(PDL)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=inside, other=0)
    all_tiles = num_tiles_of(seq_lens, TILE)
    first = first_tile_of(seq_lens, WINDOW, TILE)
    part_tiles = part_tiles_of(all_tiles - first, PART_TILES, MAX_PARTS)
    own_begin = tl.zeros((ROWS,), tl.int32) + first  # begins a part, even a run
    if SHARED:
        own_begin = tl.load(own_begins_ptr + rows, mask=inside, other=0)
    tiles = all_tiles - own_begin
    num_parts = (tiles + part_tiles - 1) // part_tiles
    total = tl.maximum(tl.sum(tiles, axis=0), 1).to(tl.float32) * NUM_KV

    pieces, piece_parts = _best_pieces(tiles, part_tiles, total / SLOTS, NUM_KV, SLOTS, RUN_PARTS, JOIN_TILES)
    is_cut = pieces > 1
    pieces = tl.where(inside, tl.maximum(pieces, 1), 0)  # a row of padding is an item, too
    piece_tiles = tl.where(is_cut, piece_parts * part_tiles, tiles)
    unit_parts = tl.where(is_cut & (piece_parts < RUN_PARTS), 1, RUN_PARTS)
    units = (num_parts + unit_parts - 1) // unit_parts

    largest = tl.max(tl.where(inside, piece_tiles, 0), axis=0)
    size_class = tl.zeros((ROWS,), tl.int32)
    for smaller in tl.static_range(1, SIZE_CLASSES):
        size_class += (piece_tiles * 3**smaller <= largest * 2**smaller).to(tl.int32)
    begin = 0
    first_item = tl.zeros((ROWS,), tl.int32)
    size_class = 2 * size_class + (pieces == 1).to(tl.int32)  # items to be joined are done early
    for which in tl.static_range(2 * SIZE_CLASSES):
        counted = tl.where(size_class == which, pieces, 0)
        first_item = tl.where(size_class == which, begin + tl.cumsum(counted, axis=0) - counted, first_item)
        begin += tl.sum(counted, axis=0)
    join = tl.where(is_cut, tl.cumsum(is_cut.to(tl.int32), axis=0) - 1, -1)

    for piece in range(tl.max(pieces, axis=0)):
        item_ptr = items_ptr + (first_item + piece) * ITEM_WORDS
        present = piece < pieces
        tl.store(item_ptr, rows, mask=present)
        tl.store(item_ptr + 1, seq_lens, mask=present)
        tl.store(item_ptr + 2, own_begin + piece * piece_tiles, mask=present)
        tl.store(item_ptr + 3, own_begin + tl.minimum((piece + 1) * piece_tiles, tiles), mask=present)
        tl.store(item_ptr + 4, join, mask=present)
        tl.store(item_ptr + 5, unit_parts, mask=present)
        tl.store(item_ptr + 6, pieces, mask=present)
        tl.store(item_ptr + 7, units, mask=present)
        tl.store(item_ptr + 8, own_begin, mask=present)
    tl.store(counts_ptr, begin)
    layers = tl.arange(0, LAYERS)
    tl.store(counts_ptr + 1 + layers, tl.zeros((LAYERS,), tl.int32), mask=layers < num_layers)


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of a division, for all lengths of contexts."""

    max_items: int  # of each KV head
    max_joins: int


def limits_for(num_rows: int, num_kv_heads: int, num_slots: int) -> Limits:
    """Return limits of items and joins.

    A context is cut if longer than half of a program's share of a step; a piece is about a third of the share. Rounding
    to whole parts may leave a piece two thirds of the wanted tiles, and evening out half of the wanted tiles.
    """
    most_pieces = 6 * num_slots // num_kv_heads  # and at most one more for each context
    most_long = max(2 * num_slots // num_kv_heads, 1)
    return Limits(
        max_items=min(num_rows + most_pieces, num_rows * MAX_PARTS),
        max_joins=min(num_rows, most_long),
    )


def programs_per_sm(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the number of programs that share a multiprocessor: 3 if programs are few or just fit, else 2."""
    programs = num_rows * num_kv_heads
    three_are_a_wave = 11 * num_sms <= 4 * programs <= 12 * num_sms
    return 3 if 2 * programs < 3 * num_sms or three_are_a_wave else 2


def divide(
    seq_lens: Tensor,  # [num_rows] int32, this step's token included; 0 is padding
    num_kv_heads: int,
    num_slots: int,
    num_layers: int,
    *,
    window: int = 0,
    shared: SharedDivision | None = None,
    pdl: bool = False,
) -> Division:
    """Return the items of attention of a decode step, for each of `num_layers`; `num_slots` programs run at once.

    Tiles out of sight, and keys computed by the division `shared`, are left out. A row of padding is an item without
    tiles.

    Args:
        window: tokens seen by a token, itself included; 0: all. Excludes `shared`.
    """
    num_rows = seq_lens.shape[0]
    check_column("seq_lens", seq_lens, num_rows)
    assert window == 0 or shared is None, "beginnings of windows are not shared"
    limits = limits_for(num_rows, num_kv_heads, num_slots)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=seq_lens.device)

    division = Division(
        items=empty(limits.max_items, ITEM_WORDS),
        counts=empty(1 + num_layers),
        max_joins=limits.max_joins,
        num_slots=num_slots,
    )
    if num_rows == 0:
        return division
    _divide_kernel[(1,)](
        seq_lens_ptr=seq_lens,
        own_begins_ptr=seq_lens if shared is None else shared.own_begins,
        items_ptr=division.items,
        counts_ptr=division.counts,
        num_rows=num_rows,
        num_layers=num_layers,
        NUM_KV=num_kv_heads,
        SLOTS=num_slots,
        ITEM_WORDS=ITEM_WORDS,
        SIZE_CLASSES=SIZE_CLASSES,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(num_rows)),
        TILE=TILE,
        PART_TILES=PART_TILES,
        MAX_PARTS=MAX_PARTS,
        RUN_PARTS=RUN_PARTS,
        JOIN_TILES=JOIN_TILES,
        LAYERS=triton.next_power_of_2(num_layers),
        WINDOW=window,
        SHARED=shared is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return division
