"""Rows of the batch, kept dense, and changes for the batch's tensors.

The batch is rows `[0, len(rows))`; when a row is left, the last row moves into the gap. However often rows change hands
between two steps, the tensors get a single set of changes. Torch-free.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from decode_worker.sequences.sequence import DecodeSequence

NO_SLOT = -1


class SharedPrefix(NamedTuple):
    """Prefix of a row shared with other rows, as `SharedPrefixes` holds it on the device."""

    number: int  # equal for all rows of the prefix, and for no others
    num_tokens: int


UNSHARED = SharedPrefix(-1, 0)


@dataclass(frozen=True, slots=True)
class Fill:
    """`row` holds `sequence` from now on.

    The host knows all state but the last token and the length of a moved sequence. Both are on the device in row
    `source`, because the device may be ahead of the host. A new sequence has source -1, and its `state_slot` is to be
    filled; a moved sequence keeps the contents of its slot.
    """

    row: int
    sequence: DecodeSequence
    source: int = -1
    state_slot: int = NO_SLOT
    prefix: SharedPrefix = UNSHARED


@dataclass(frozen=True, slots=True)
class Clear:
    """`row` becomes padding."""

    row: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Place `index` of the block table of `row` for a group is `block_id`."""

    row: int
    group: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Share:
    """`row` shares `prefix` with other rows from now on."""

    row: int
    prefix: SharedPrefix


Change = Fill | Clear | Grow | Share
"""Taken together, changes name each filled or cleared row once; sources are rows before all changes."""


class Rows:
    """Sequences by row."""

    def __init__(self) -> None:
        self.sequences: list[DecodeSequence] = []
        self.state_slots: dict[DecodeSequence, int] = {}  # with adjusted logits: distinct slots below max_rows
        self.prefixes: Mapping[DecodeSequence, SharedPrefix] = {}  # of rows with a shared prefix
        self.num_spared = 0  # KV tokens spared by reading each prefix once
        self.has_logprobs = False  # some row asks for log-probabilities
        self._applied: list[DecodeSequence] = []  # by row, as the tensors have it
        self._grown: list[tuple[DecodeSequence, int, int, int]] = []  # sequence, group, index, block_id
        self._reshared: list[DecodeSequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def enter(self, sequence: DecodeSequence) -> None:
        """Put a sequence into the next row."""
        sequence.row = len(self.sequences)
        self.sequences.append(sequence)

    def leave(self, sequence: DecodeSequence) -> None:
        """Take a sequence out of its row, if any."""
        if sequence.row < 0:
            return
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[sequence.row] = last
            last.row = sequence.row
        sequence.row = -1

    def grown(self, sequence: DecodeSequence, group: int, index: int, block_id: int) -> None:
        """Record a new block in a sequence's table for a group."""
        self._grown.append((sequence, group, index, block_id))

    def share(self, prefixes: Mapping[DecodeSequence, SharedPrefix]) -> None:
        """Replace all shared prefixes."""
        before, self.prefixes = self.prefixes, prefixes
        changed = {**before, **prefixes}
        self._reshared += [each for each in changed if before.get(each) != prefixes.get(each)]

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call."""
        applied, self._applied = self._applied, list(self.sequences)
        grown, self._grown = self._grown, []
        reshared, self._reshared = self._reshared, []
        changes: list[Change] = []
        if applied != self.sequences:
            sources = {sequence: row for row, sequence in enumerate(applied)}
            self._assign_slots(sources)
            self.prefixes = {each: prefix for each, prefix in self.prefixes.items() if each.row >= 0}
            self.has_logprobs = any(sequence.request.sampling.num_logprobs for sequence in self.sequences)
            for row, sequence in enumerate(self.sequences):
                source = sources.get(sequence, -1)
                if source != row:
                    slot, prefix = self.state_slots.get(sequence, NO_SLOT), self.prefixes.get(sequence, UNSHARED)
                    changes.append(Fill(row, sequence, source, slot, prefix))
            changes += [Clear(row) for row in range(len(self.sequences), len(applied))]
        changes += [Share(each.row, self.prefixes.get(each, UNSHARED)) for each in reshared if each.row >= 0]
        if changes:
            self.num_spared = _num_spared(self.prefixes.values())
        changes += [Grow(sequence.row, *place) for sequence, *place in grown if sequence.row >= 0]
        return changes

    def _assign_slots(self, applied: Container[DecodeSequence]) -> None:
        """Give each new sequence a slot if needed; free the slots of sequences without a row."""
        for sequence in [sequence for sequence in self.state_slots if sequence.row < 0]:
            del self.state_slots[sequence]
        taken = set(self.state_slots.values())
        free = (slot for slot in count() if slot not in taken)
        for sequence in self.sequences:
            if sequence not in applied and sequence.request.sampling.adjusts_logits:
                self.state_slots[sequence] = next(free)


def _num_spared(prefixes: Iterable[SharedPrefix]) -> int:
    """Return spared tokens: for each prefix, its tokens times its rows less 1.

    Args:
        prefixes: by row.
    """
    return sum((num_rows - 1) * prefix.num_tokens for prefix, num_rows in Counter(prefixes).items())
