"""Groups of decode rows that attend together to a shared prefix, and the division of this attention over programs.

Rows with equal numbers (`SharedPrefixes`) begin with the same blocks. Such a group attends to the shared blocks in
bundles of limited size, so a bundle reads keys and values once, not each row. `decode_division` deals out the rest of
each context, from the context's own first tile on. The own first tile begins a run of the context's parts, so rows with
parts of different lengths belong to different groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.attention.decode_parts import MAX_PARTS, PART_TILES, RUN_PARTS, TILE, num_tiles_of, part_tiles_of
from common.kernels.attention.shared_parts import LARGE_BUNDLE, MAX_SHARING_ROWS, SMALL_BUNDLE, max_shared_items
from common.kernels.base.attention_operands import SharedDivision, SharedPrefixes
from common.kernels.base.checks import check_column
from common.kernels.base.pdl import wait_for_predecessor

MIN_TOKENS = 4  # rows of a bundle, at least: a KV head has at most 16 query heads
SHARED_ITEM_WORDS = 4  # int32 words read by `load_shared_item`
MIN_ROWS = 64  # so that few kernels are compiled


@triton.jit
def load_shared_item(item_ptr):
    """Load first and number of the bundle's places among members, first tile, and tile after the last."""
    return tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2), tl.load(item_ptr + 3)


@triton.jit(do_not_specialize=["num_rows"])
def _share_kernel(
    numbers_ptr,  # [num_rows] int32, of `SharedPrefixes`
    num_tokens_ptr,  # [num_rows] int32, of `SharedPrefixes`
    seq_lens_ptr,  # [num_rows] int32, 0 for padding
    own_begins_ptr,  # [num_rows] int32, of `SharedDivision`, as are all pointers to `num_items_ptr`
    units_ptr,
    pieces_ptr,
    places_ptr,
    members_ptr,
    items_ptr,
    num_items_ptr,
    num_rows,
    NUM_KV: tl.constexpr,
    SLOTS: tl.constexpr,  # programs that run at once
    TOKENS: tl.constexpr,  # rows of a bundle
    SHARED_ITEM_WORDS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least num_rows
    TILE: tl.constexpr,
    PART_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (1,). Every KV head has the same items."""
    rows = tl.arange(0, ROWS)
    inside = rows < num_rows
    wait_for_predecessor(PDL)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=inside, other=0)
    numbers = tl.load(numbers_ptr + rows, mask=inside, other=-1)
    num_tokens = tl.load(num_tokens_ptr + rows, mask=inside, other=0)

    part_tiles = part_tiles_of(num_tiles_of(seq_lens, TILE), PART_TILES, MAX_PARTS)
    run_tiles = part_tiles * RUN_PARTS
    shared = num_tokens // TILE // run_tiles * run_tiles
    can_share = (numbers >= 0) & (shared > 0) & (num_tokens < seq_lens)
    group = tl.where(can_share, numbers.to(tl.int64) << 32 | part_tiles.to(tl.int64), -1 - rows.to(tl.int64))
    same = group[:, None] == group[None, :]  # [ROWS, ROWS]
    sharers = tl.sum(same.to(tl.int32), axis=1)
    rank = tl.sum((same & (rows[None, :] < rows[:, None])).to(tl.int32), axis=1)
    is_shared = sharers > 1
    shared = tl.where(is_shared, shared, 0)
    leads = is_shared & (rank == 0)
    tl.store(own_begins_ptr + rows, shared, mask=inside)

    bundles = tl.where(leads, tl.cdiv(sharers, TOKENS), 0)  # of groups, at the leader's row, like all below
    all_tiles = tl.sum(bundles * shared, axis=0) * NUM_KV
    pieces = tl.maximum(shared * SLOTS // tl.maximum(all_tiles, 1), 1)  # at most as many as run at once
    piece_tiles = tl.cdiv(shared, pieces)  # as even as possible
    pieces = tl.cdiv(shared, tl.maximum(piece_tiles, 1))
    led = tl.where(leads, sharers, 0)
    first_member = tl.cumsum(led, axis=0) - led
    items = bundles * pieces
    first_item = tl.cumsum(items, axis=0) - items
    tl.store(num_items_ptr, tl.sum(items, axis=0))

    follows = same & leads[None, :]
    member = tl.sum(tl.where(follows, first_member[None, :], 0), axis=1) + rank
    unit = tl.sum(tl.where(follows, first_item[None, :], 0), axis=1) + rank // TOKENS * pieces
    tl.store(members_ptr + member, rows, mask=is_shared)
    tl.store(units_ptr + rows, unit, mask=is_shared)
    tl.store(pieces_ptr + rows, pieces, mask=inside)
    tl.store(places_ptr + rows, rank % TOKENS, mask=is_shared)
    for bundle in range(tl.max(bundles, axis=0)):
        for piece in range(tl.max(pieces, axis=0)):
            item_ptr = items_ptr + (first_item + bundle * pieces + piece) * SHARED_ITEM_WORDS
            present = (bundle < bundles) & (piece < pieces)
            tl.store(item_ptr, first_member + bundle * TOKENS, mask=present)
            tl.store(item_ptr + 1, tl.minimum(sharers - bundle * TOKENS, TOKENS), mask=present)
            tl.store(item_ptr + 2, piece * piece_tiles, mask=present)
            tl.store(item_ptr + 3, tl.minimum((piece + 1) * piece_tiles, shared), mask=present)


def bundle_queries(num_rows: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return the queries of a bundle for a batch of `num_rows`."""
    return SMALL_BUNDLE if num_rows << _log_heads(num_q_heads, num_kv_heads) <= SMALL_BUNDLE else LARGE_BUNDLE


def tokens_of_bundle(queries: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return the number of rows with `queries` queries in all."""
    return queries >> _log_heads(num_q_heads, num_kv_heads)


def _log_heads(num_q_heads: int, num_kv_heads: int) -> int:
    return (num_q_heads // num_kv_heads - 1).bit_length()


def share(
    prefixes: SharedPrefixes,
    seq_lens: Tensor,  # [num_rows] int32, this step's token included; 0 is padding; `MAX_SHARING_ROWS` at most
    tokens: int,
    num_kv_heads: int,
    num_slots: int,
    *,
    pdl: bool = False,
) -> SharedDivision:
    """Return the items of a step's shared attention, equal for every layer; `num_slots` programs run at once.

    `tokens`: most rows of a bundle.
    """
    num_rows = seq_lens.shape[0]
    check_column("seq_lens", seq_lens, num_rows)
    check_column("numbers", prefixes.numbers, num_rows)
    check_column("num_tokens", prefixes.num_tokens, num_rows)
    assert num_rows <= MAX_SHARING_ROWS, f"{num_rows} rows: at most {MAX_SHARING_ROWS} are told apart"
    assert tokens >= MIN_TOKENS, f"bundles of {tokens} rows: at least {MIN_TOKENS} needed"

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=seq_lens.device)

    division = SharedDivision(
        own_begins=empty(num_rows),
        units=empty(num_rows),
        pieces=empty(num_rows),
        places=empty(num_rows),
        members=empty(num_rows),
        items=empty(max_shared_items(num_rows, num_kv_heads, num_slots), SHARED_ITEM_WORDS),
        num_items=empty(1),
        tokens=tokens,
        num_slots=num_slots,
    )
    _share_kernel[(1,)](
        numbers_ptr=prefixes.numbers,
        num_tokens_ptr=prefixes.num_tokens,
        seq_lens_ptr=seq_lens,
        own_begins_ptr=division.own_begins,
        units_ptr=division.units,
        pieces_ptr=division.pieces,
        places_ptr=division.places,
        members_ptr=division.members,
        items_ptr=division.items,
        num_items_ptr=division.num_items,
        num_rows=num_rows,
        NUM_KV=num_kv_heads,
        SLOTS=num_slots,
        TOKENS=tokens,
        SHARED_ITEM_WORDS=SHARED_ITEM_WORDS,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(num_rows)),
        TILE=TILE,
        PART_TILES=PART_TILES,
        MAX_PARTS=MAX_PARTS,
        RUN_PARTS=RUN_PARTS,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return division
