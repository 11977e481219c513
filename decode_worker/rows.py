"""The rows of the batch, kept dense, and the log of what the batch's tensors must be told.

The batch is rows `[0, len(rows))`; when one leaves, the last moves into its place. Every change is
logged, and the log is applied in order before the next step: so the tensors follow the rows
although several changes may touch one row between two steps. Torch-free.
"""

from dataclasses import dataclass

from decode_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Fill:
    """A sequence enters `row`: all of the row's state is written from the host."""

    row: int
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Move:
    """The state of row `source` is copied to row `target`, on the device: it may be ahead of the host."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Clear:
    """`row` becomes padding."""

    row: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Entry `index` of the block table of `row` is `block_id`."""

    row: int
    index: int
    block_id: int


Change = Fill | Move | Clear | Grow


class Rows:
    """Sequences by row."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def enter(self, sequence: Sequence) -> None:
        """Put a sequence into the next row."""
        sequence.row = len(self.sequences)
        self.sequences.append(sequence)
        self._changes.append(Fill(sequence.row, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out; harmless when it is in no row."""
        if sequence.row < 0:
            return
        last = self.sequences.pop()
        last_row = len(self.sequences)
        if last is not sequence:
            self.sequences[sequence.row] = last
            self._changes.append(Move(last_row, sequence.row))
            last.row = sequence.row
        self._changes.append(Clear(last_row))
        sequence.row = -1

    def grow(self, sequence: Sequence, block_id: int) -> None:
        """Append a block to a sequence's table."""
        self._changes.append(Grow(sequence.row, len(sequence.block_ids), block_id))
        sequence.block_ids.append(block_id)

    def take_changes(self) -> list[Change]:
        """The log since the last call."""
        changes, self._changes = self._changes, []
        return changes
