"""What the host changed between two decode steps, written to the batch in one launch however much it is.

Rows may change places: all last tokens and lengths that move are read by one program, before it writes any. No
other state is read, so nothing else can be read too late.
"""

import triton
import triton.language as tl

from common.kernels import operands
from common.kernels.checks import check_column
from common.kernels.operands import RowState, RowUpdates

NUM_HEAD_COLUMNS = tl.constexpr(operands.NUM_HEAD_COLUMNS)
BLOCK = 1024  # block table entries of a program


@triton.jit
def _store_column(target_ptrs, words_ptr, updates, inside, num_rows):
    """Store what the words at `words_ptr` are the bits of, one or two words each; returns where the next ones begin."""
    if target_ptrs.dtype.element_ty.primitive_bitwidth == 64:
        low = tl.load(words_ptr + 2 * updates, mask=inside).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(words_ptr + 2 * updates + 1, mask=inside).to(tl.int64) << 32
        tl.store(target_ptrs, (high | low).to(target_ptrs.dtype.element_ty, bitcast=True), mask=inside)
        return words_ptr + 2 * num_rows
    else:
        bits = tl.load(words_ptr + updates, mask=inside)
        tl.store(target_ptrs, bits.to(target_ptrs.dtype.element_ty, bitcast=True), mask=inside)
        return words_ptr + num_rows


@triton.jit(do_not_specialize=["num_rows", "num_entries", "entries_begin"])  # one binary for every turn
def _update_rows_kernel(
    words_ptr,  # [num_words] int32, see RowUpdates
    token_ids_ptr,  # [max_rows] int32
    positions_ptr,  # [max_rows] int32
    seq_lens_ptr,  # [max_rows] int32
    state_slots_ptr,  # [max_rows] int32
    block_tables_ptr,  # [max_rows * max_blocks] int32
    sampling_ptrs,  # each [max_rows], of any type of 4 or 8 bytes
    num_rows,
    num_entries,
    entries_begin,  # words before those of the block tables
    MAX_ROWS: tl.constexpr,  # power of two, at least num_rows
    BLOCK: tl.constexpr,
):
    """Grid: (1 + cdiv(num_entries, BLOCK),). The first program all but the block tables, the others those."""
    program = tl.program_id(0)
    if program > 0:
        entries = (program - 1) * BLOCK + tl.arange(0, BLOCK)
        present = entries < num_entries
        entry_ptr = words_ptr + entries_begin + entries
        place = tl.load(entry_ptr, mask=present, other=0)
        tl.store(block_tables_ptr + place, tl.load(entry_ptr + num_entries, mask=present), mask=present)
        return

    updates = tl.arange(0, MAX_ROWS)
    inside = updates < num_rows
    column_ptr = words_ptr + updates
    row = tl.load(column_ptr, mask=inside, other=0)
    source = tl.load(column_ptr + num_rows, mask=inside, other=-1)
    token = tl.load(column_ptr + 2 * num_rows, mask=inside)
    has_moved = inside & (source >= 0)
    moved = tl.load(token_ids_ptr + source, mask=has_moved)
    moved_len = tl.load(seq_lens_ptr + source, mask=has_moved)
    tl.debug_barrier()  # every thread has read
    tl.store(token_ids_ptr + row, tl.where(has_moved, moved, token), mask=inside)
    seq_len = tl.where(has_moved, moved_len, tl.load(column_ptr + 3 * num_rows, mask=inside))
    tl.store(seq_lens_ptr + row, seq_len, mask=inside)
    tl.store(positions_ptr + row, tl.maximum(seq_len - 1, 0), mask=inside)
    tl.store(state_slots_ptr + row, tl.load(column_ptr + 4 * num_rows, mask=inside), mask=inside)
    begin_ptr = words_ptr + NUM_HEAD_COLUMNS * num_rows
    for i in tl.static_range(len(sampling_ptrs)):
        begin_ptr = _store_column(sampling_ptrs[i] + row, begin_ptr, updates, inside, num_rows)


def update_rows(state: RowState, updates: RowUpdates) -> None:
    """Write the updates into the state, by the rules of `reference.update_rows`."""
    _check(state, updates)
    _update_rows_kernel[(1 + triton.cdiv(updates.num_entries, BLOCK),)](
        words_ptr=updates.words,
        token_ids_ptr=state.token_ids,
        positions_ptr=state.positions,
        seq_lens_ptr=state.seq_lens,
        state_slots_ptr=state.state_slots,
        block_tables_ptr=state.block_tables,
        sampling_ptrs=state.sampling.columns(),
        num_rows=updates.num_rows,
        num_entries=updates.num_entries,
        entries_begin=state.num_words(updates.num_rows, 0),
        MAX_ROWS=triton.next_power_of_2(state.token_ids.shape[0]),
        BLOCK=BLOCK,
        num_warps=4,
    )


def _check(state: RowState, updates: RowUpdates) -> None:
    max_rows = state.token_ids.shape[0]
    assert updates.num_rows <= max_rows, f"{updates.num_rows} rows: the batch has {max_rows}"
    check_column("words", updates.words, state.num_words(updates.num_rows, updates.num_entries))
    for column in state.sampling.columns():
        check_column("a column of sampling parameters", column, max_rows, column.dtype)
        assert column.element_size() in (4, 8), f"sampling parameters of {column.dtype}: 4 or 8 bytes needed"
    assert state.block_tables.is_contiguous(), "block_tables are contiguous"
    assert state.block_tables.numel() < 1 << 31, "entries of block_tables are counted in int32"
