"""Slots for the next tokens of decoding sequences: with a slot a sequence is in a row, without it rests. Torch-free."""

from collections.abc import Iterable
from functools import reduce

from common.kv.tables import num_held, num_lacking, num_slots
from common.wire.values.kv_layout import Counts
from common.wire.values.pool_shape import are_enough, plus
from decode_worker.sequences.capacity import Capacity
from decode_worker.sequences.rows import Rows
from decode_worker.sequences.sequence import DecodeSequence


class Slots:
    """Rows of the batch, and active sequences that rest for want of a block or a mask."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity, self.rows = capacity, Rows()
        self.resting: list[DecodeSequence] = []  # longest first

    def make(self) -> None:
        """Give every row a slot for its next token; rows without a block, or with a slow grammar, rest."""
        rested, self.resting = self.resting, []
        for sequence in rested:
            if sequence.num_in_flight:
                self.resting.append(sequence)
            else:
                self.enter(sequence)
        rows = self.rows.sequences
        for sequence in [row for row in rows if row.num_scheduled > row.num_slots or (row.grammar and row.is_skipped)]:
            if sequence.is_skipped or not self._has_slot(sequence):
                self.rows.leave(sequence)
                self.resting.append(sequence)

    def enter(self, sequence: DecodeSequence) -> None:
        """Put a sequence into a row; without a slot or with a slow grammar the sequence rests first."""
        if not sequence.is_skipped and self._has_slot(sequence):
            self.rows.enter(sequence)
        else:
            self.resting.append(sequence)

    def leave(self, sequence: DecodeSequence) -> None:
        """Take a sequence out of its row, or end its rest."""
        self.rows.leave(sequence)
        if sequence in self.resting:
            self.resting.remove(sequence)

    def was_late(self, sequence: DecodeSequence) -> None:
        """Count a step without a token because the mask was late; a later step tries again."""
        if not sequence.ended:
            sequence.mask_slot.num_late += 1
            sequence.num_scheduled -= 1
            if sequence.row < 0 and sequence not in self.resting and not sequence.is_paused:
                self.resting.append(sequence)

    def is_starved(self, lingering: Iterable[DecodeSequence]) -> bool:
        """Tell whether resting sequences need more blocks than `lingering` sequences will free."""
        if not self.resting:
            return False
        unready = (sequence for sequence in self.resting if not sequence.num_in_flight and not sequence.is_skipped)
        waiting = map(_num_lacking, unready)
        coming = (num_held(sequence.tables) for sequence in lingering)
        nothing = self.capacity.layout.nothing
        return not are_enough(reduce(plus, coming, nothing), reduce(plus, waiting, nothing)) and (
            self.capacity.allocator.is_exhausted()
        )

    def _has_slot(self, sequence: DecodeSequence) -> bool:
        """Tell whether the next token has a slot; allocates blocks if needed and free.

        Without a slot, a sequence gives sealed blocks back that the token does not see.
        """
        if sequence.num_scheduled <= sequence.num_slots:
            return True
        if not self.capacity.allocator.fetch(_num_lacking(sequence)):
            if not sequence.num_in_flight:
                self.capacity.let_go(sequence)
            return False
        for group, place in self.capacity.grow(sequence.tables, sequence.num_scheduled):
            self.rows.grown(sequence, group, place, sequence.tables[group].block_ids[place])
        sequence.num_slots = num_slots(sequence.tables)
        return True


def _num_lacking(sequence: DecodeSequence) -> Counts:
    """Return the blocks missing for a slot of the next token."""
    return num_lacking(sequence.tables, sequence.num_scheduled, sequence.num_scheduled)
