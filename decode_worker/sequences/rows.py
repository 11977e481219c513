"""The rows of the batch, kept dense, and what the batch's tensors must be told of them.

The batch is rows `[0, len(rows))`; when one leaves, the last moves into its place. However often rows
change hands between two steps, the tensors are told once, of the outcome. Torch-free.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from decode_worker.sequences.sequence import DecodeSequence

NO_SLOT = -1


class SharedPrefix(NamedTuple):
    """What a row has in common with others, as `SharedPrefixes` tells the device."""

    number: int  # the same of all that share it, and of no others
    num_tokens: int


UNSHARED = SharedPrefix(-1, 0)


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
    prefix: SharedPrefix = UNSHARED


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


@dataclass(frozen=True, slots=True)
class Share:
    """What is known of the prefix that `row` shares with others is this from now on."""

    row: int
    prefix: SharedPrefix


Change = Fill | Clear | Grow | Share
"""Those taken together name every filled or cleared row once, and sources as they were before all of them."""


class Rows:
    """Sequences by row."""

    def __init__(self) -> None:
        self.sequences: list[DecodeSequence] = []
        self.state_slots: dict[DecodeSequence, int] = {}  # of those whose logits are adjusted: each its own, below rows
        self.prefixes: Mapping[DecodeSequence, SharedPrefix] = {}  # of those that share one with others
        self.num_spared = 0  # tokens whose KV a step need not read if it reads each prefix once
        self.has_logprobs = False  # whether any of them asks for log-probabilities
        self._told: list[DecodeSequence] = []  # by row, what the tensors hold
        self._grown: list[tuple[DecodeSequence, int, int, int]] = []  # sequence, group, index, block_id
        self._reshared: list[DecodeSequence] = []

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

    def share(self, prefixes: Mapping[DecodeSequence, SharedPrefix]) -> None:
        """These sequences share prefixes from now on, and no others."""
        before, self.prefixes = self.prefixes, prefixes
        whoever = {**before, **prefixes}
        self._reshared += [each for each in whoever if before.get(each) != prefixes.get(each)]

    def take_changes(self) -> list[Change]:
        """What has changed since the last call."""
        told, self._told = self._told, list(self.sequences)
        grown, self._grown = self._grown, []
        reshared, self._reshared = self._reshared, []
        changes: list[Change] = []
        if told != self.sequences:
            sources = {sequence: row for row, sequence in enumerate(told)}
            self._assign_slots(sources)
            self.prefixes = {each: prefix for each, prefix in self.prefixes.items() if each.row >= 0}
            self.has_logprobs = any(sequence.sampling.num_logprobs for sequence in self.sequences)
            for row, sequence in enumerate(self.sequences):
                source = sources.get(sequence, -1)
                if source != row:
                    changes.append(self._fill(row, sequence, source))
            changes += [Clear(row) for row in range(len(self.sequences), len(told))]
        changes += [Share(each.row, self.prefixes.get(each, UNSHARED)) for each in reshared if each.row >= 0]
        if changes:
            self.num_spared = _num_spared(self.prefixes.values())
        changes += [Grow(sequence.row, *place) for sequence, *place in grown if sequence.row >= 0]
        return changes

    def _fill(self, row: int, sequence: DecodeSequence, source: int) -> Fill:
        slot, prefix = self.state_slots.get(sequence, NO_SLOT), self.prefixes.get(sequence, UNSHARED)
        return Fill(row, sequence, source, slot, prefix)

    def _assign_slots(self, told: Container[DecodeSequence]) -> None:
        """A slot for each new sequence that needs one; who left has none."""
        for sequence in [sequence for sequence in self.state_slots if sequence.row < 0]:
            del self.state_slots[sequence]
        taken = set(self.state_slots.values())
        free = (slot for slot in count() if slot not in taken)
        for sequence in self.sequences:
            if sequence not in told and sequence.sampling.adjusts_logits:
                self.state_slots[sequence] = next(free)


def _num_spared(prefixes: Iterable[SharedPrefix]) -> int:
    """Of prefixes by row, tokens of all but one row of each."""
    return sum((num_rows - 1) * prefix.num_tokens for prefix, num_rows in Counter(prefixes).items())
