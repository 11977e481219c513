"""Rows and blocks left for sequences. Torch-free."""

from collections import Counter

from common.kv.blocks import Allocator
from common.kv.tables import Tables, held_by, num_lacking, num_seen, take_gone
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import plus
from decode_worker.sequences.row_queue import Group, group_of
from decode_worker.sequences.sequence import DecodeSequence


class Capacity:
    """Rows of the batch and blocks of the pool.

    Args:
        max_len: tokens of the longest sequence that fits a row of the batch.
        step_tokens: most tokens of a prompt chunk computed here.
    """

    def __init__(self, allocator: Allocator, max_num_seqs: int, max_len: int, step_tokens: int) -> None:
        self.allocator, self.layout = allocator, allocator.shape.layout
        self.max_num_seqs, self.step_tokens = max_num_seqs, step_tokens
        self.max_len = min(max_len, allocator.shape.most_tokens(step_tokens))
        self.num_taken = 0  # rows taken, or promised to reserved sequences
        self.num_rows: Counter[Group] = Counter()  # taken or promised, by group
        self.num_rows_of: Counter[int] = Counter()  # taken or promised, by client

    def objection(self, sequence: DecodeSequence) -> str:
        """Return why a sequence can never be decoded here, even by an idle worker; empty if decoding is possible."""
        if sequence.max_total_tokens <= self.max_len:
            return ""
        return (
            f"prompt and max_tokens are {sequence.max_total_tokens} tokens, this decode worker takes at most "
            f"{self.max_len}; lower max_tokens or shorten the prompt"
        )

    def has_room(self, num_tokens: int) -> bool:
        """Tell whether a row is free, and blocks for a new sequence and for each other sequence to grow."""
        return self.has_row() and self.has_blocks(num_seen(self.layout, num_tokens))

    def has_row(self, but: int = 0) -> bool:
        """Tell whether a row is free beside `but` others; rows of reserved sequences are taken."""
        return self.num_taken + but < self.max_num_seqs

    def has_blocks(self, counts: Counts) -> bool:
        """Tell whether `counts` blocks are leased and free, and one more for each sequence to grow."""
        return self.allocator.fetch(plus(counts, self.num_growing))

    @property
    def num_growing(self) -> Counts:
        """A block for each taken row, in every group that may grow."""
        return tuple(self.num_taken if group.grows else 0 for group in self.layout.groups)

    def count_row(self, sequence: DecodeSequence, count: int) -> None:
        """Count a row as taken (1) or given back (-1) by a sequence."""
        group, client = group_of(sequence), sequence.request.client
        self.num_taken += count
        self.num_rows[group] += count
        self.num_rows_of[client] += count
        if not self.num_rows[group]:
            del self.num_rows[group]
        if not self.num_rows_of[client]:
            del self.num_rows_of[client]

    @property
    def client(self) -> int | None:
        """Client of all rows; None if there are several, or none."""
        return next(iter(self.num_rows_of)) if len(self.num_rows_of) == 1 else None

    def grow(self, tables: Tables, num_tokens: int) -> list[tuple[int, int]]:
        """Allocate the blocks missing for a slot of token `num_tokens`; return group and place of each.

        The caller has checked for free blocks.
        """
        fresh = self.allocator.allocate(num_lacking(tables, num_tokens, num_tokens))
        pairs = enumerate(zip(tables, fresh, strict=True))
        return [(group, at) for group, (table, ids) in pairs for at in table.extend(num_tokens, num_tokens, ids)]

    def let_go(self, sequence: DecodeSequence) -> None:
        """Free sealed blocks that the next token does not see; no launched step may touch the sequence."""
        for table in sequence.tables:
            table.extend(sequence.num_scheduled, sequence.num_slots)
        self.allocator.free(take_gone(sequence.tables))

    def free(self, sequence: DecodeSequence) -> None:
        """Free all blocks of a sequence; no launched step may touch any."""
        tables, sequence.tables = sequence.tables, ()
        self.allocator.free(held_by(tables))
