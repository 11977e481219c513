"""The rows of the batch, kept dense, and what the batch's tensors must be told of them.

The batch is rows `[0, len(rows))`; when one leaves, the last moves into its place. However often rows
change hands between two steps, the tensors are told once, of the outcome. Torch-free.
"""

from collections.abc import Container
from dataclasses import dataclass
from itertools import count

from decode_worker.sequence import DecodeSequence

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Fill:
    """`row` holds `sequence` from now on.

    All of its state is known to the host but for two things: the last token of a sequence that moved, and its length,
    are in row `source`, on the device, which may be ahead of the host. A new sequence has source -1.
    So it is with what is kept for it in `state_slot`: a new one's is to be filled.
    """

    row: int
    sequence: DecodeSequence
    source: int = -1
    state_slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class Clear:
    """`row` becomes padding."""

    row: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Place `index` of the block table that `row` has for a group is `block_id`."""

    row: int
    group: int
    index: int
    block_id: int


Change = Fill | Clear | Grow
"""Those taken together name every filled or cleared row once, and sources as they were before all of them."""


class Rows:
    """Sequences by row."""

    def __init__(self) -> None:
        self.sequences: list[DecodeSequence] = []
        self.state_slots: dict[DecodeSequence, int] = {}  # of those whose logits are adjusted: each its own, below rows
        self.has_logprobs = False  # whether any of them asks for log-probabilities
        self._told: list[DecodeSequence] = []  # by row, what the tensors hold
        self._grown: list[tuple[DecodeSequence, int, int, int]] = []  # sequence, group, index, block_id

    def __len__(self) -> int:
        return len(self.sequences)

    def enter(self, sequence: DecodeSequence) -> None:
        """Put a sequence into the next row."""
        sequence.row = len(self.sequences)
        self.sequences.append(sequence)

    def leave(self, sequence: DecodeSequence) -> None:
        """Take a sequence out; harmless when it is in no row."""
        if sequence.row < 0:
            return
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[sequence.row] = last
            last.row = sequence.row
        sequence.row = -1

    def grown(self, sequence: DecodeSequence, group: int, index: int, block_id: int) -> None:
        """A sequence's table for a group has another place."""
        self._grown.append((sequence, group, index, block_id))

    def take_changes(self) -> list[Change]:
        """What has changed since the last call."""
        told, self._told = self._told, list(self.sequences)
        grown, self._grown = self._grown, []
        changes: list[Change] = []
        if told != self.sequences:
            sources = {sequence: row for row, sequence in enumerate(told)}
            self._assign_slots(sources)
            self.has_logprobs = any(sequence.sampling.num_logprobs for sequence in self.sequences)
            for row, sequence in enumerate(self.sequences):
                source = sources.get(sequence, -1)
                if source != row:
                    changes.append(Fill(row, sequence, source, self.state_slots.get(sequence, NO_SLOT)))
            changes += [Clear(row) for row in range(len(self.sequences), len(told))]
        changes += [Grow(sequence.row, *place) for sequence, *place in grown if sequence.row >= 0]
        return changes

    def _assign_slots(self, told: Container[DecodeSequence]) -> None:
        """A slot for each new sequence that needs one; who left has none."""
        for sequence in [sequence for sequence in self.state_slots if sequence.row < 0]:
            del self.state_slots[sequence]
        taken = set(self.state_slots.values())
        free = (slot for slot in count() if slot not in taken)
        for sequence in self.sequences:
            if sequence not in told and sequence.sampling.adjusts_logits:
                self.state_slots[sequence] = next(free)
