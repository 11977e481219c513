"""Changes by the host between two decode steps, written to the batch in one launch, however many.

Rows may change places: a single program reads all last tokens and lengths to move, before writing any. No other state
is read, so no read can come too late.
"""

from typing import Any

import triton
import triton.language as tl

from common.kernels.base import row_operands
from common.kernels.base.checks import check_column
from common.kernels.base.row_operands import RowState, RowUpdates

HEAD_WORDS = tl.constexpr(row_operands.HEAD_WORDS)
BLOCK = 256  # entries of a program


@triton.jit(do_not_specialize=["num_rows", "num_entries"])  # one binary for all update sizes
def _update_rows_kernel(
    words_ptr,  # int32, see RowUpdates
    state_ptr,  # [num_words] int32, see RowState
    num_rows,
    num_entries,
    COLUMN_WORDS: tl.constexpr,
    MAX_ROWS: tl.constexpr,  # power of two, at least num_rows
    BLOCK: tl.constexpr,
):
    """Grid: (1 + cdiv(num_entries, BLOCK),). The first program writes the heads of rows, the others all entries."""
    program = tl.program_id(0)
    if program > 0:
        entries = (program - 1) * BLOCK + tl.arange(0, BLOCK)
        present = entries < num_entries
        entry_ptr = words_ptr + HEAD_WORDS * num_rows + entries
        place = tl.load(entry_ptr, mask=present, other=0)
        tl.store(state_ptr + place, tl.load(entry_ptr + num_entries, mask=present), mask=present)
        return

    updates = tl.arange(0, MAX_ROWS)
    inside = updates < num_rows
    head_ptr = words_ptr + HEAD_WORDS * updates
    row = tl.load(head_ptr, mask=inside, other=0)
    source = tl.load(head_ptr + 1, mask=inside, other=-1)
    token = tl.load(head_ptr + 2, mask=inside)
    seq_len = tl.load(head_ptr + 3, mask=inside)
    has_moved = inside & (source >= 0)
    positions_ptr = state_ptr + COLUMN_WORDS
    seq_lens_ptr = state_ptr + 2 * COLUMN_WORDS
    moved = tl.load(state_ptr + source, mask=has_moved)
    moved_len = tl.load(seq_lens_ptr + source, mask=has_moved)
    tl.debug_barrier()  # every thread has read
    seq_len = tl.where(has_moved, moved_len, seq_len)
    tl.store(state_ptr + row, tl.where(has_moved, moved, token), mask=inside)
    tl.store(positions_ptr + row, tl.maximum(seq_len - 1, 0), mask=inside)
    tl.store(seq_lens_ptr + row, seq_len, mask=inside)


class RowUpdater:
    """Writer of updates into a state, by the rules of `reference.update_rows`.

    The compiled binary is looked up once. Triton finds a binary by the kinds of all arguments, which takes longer than
    the launch. Here the kinds never change, because the words of all updates are aligned alike.
    """

    def __init__(self, state: RowState) -> None:
        _check(state)
        self._words, self._max_rows = state.words, state.token_ids.shape[0]
        self._constants = (state.column_words, triton.next_power_of_2(self._max_rows), BLOCK)
        self._compiled: Any = None  # stays None in the interpreter

    def __call__(self, updates: RowUpdates) -> None:
        num_rows, num_entries = updates.num_rows, updates.num_entries
        assert num_rows <= self._max_rows, f"{num_rows} rows: the batch has {self._max_rows}"
        grid = (1 + -(-num_entries // BLOCK), 1, 1)
        launch = (self._compiled or _update_rows_kernel)[grid]
        launched = launch(updates.words, self._words, num_rows, num_entries, *self._constants)
        self._compiled = self._compiled or launched


def _check(state: RowState) -> None:
    words, max_rows = state.words, state.token_ids.shape[0]
    check_column("words", words, words.numel())
    assert words.numel() < 1 << 31, "words are counted in int32"
    for number, column in enumerate((state.token_ids, state.positions, state.seq_lens)):
        check_column("the head of rows", column, max_rows)
        begin = column.storage_offset() - words.storage_offset()
        assert begin == number * state.column_words >= number * max_rows, f"the head of rows begins at {begin}"
