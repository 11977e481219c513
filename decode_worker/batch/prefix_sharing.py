"""Detection of shared prefixes in the decode batch when rows have changed. Torch-free.

Until then a new row is computed alone, which is correct but slower. The device learns of a lost row from the row's own
change.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from common.wire.values.kv_layout import KVGroup
from decode_worker.batch.prefix_groups import prefix_groups
from decode_worker.sequences.rows import UNSHARED, Rows, SharedPrefix
from decode_worker.sequences.sequence import DecodeSequence

MIN_TOKENS = 256
"""Shortest prefix in tokens; sharing a shorter prefix saves hardly any time."""
REST = 50
"""Rest after grouping, in durations of the grouping, because steps wait meanwhile."""


class PrefixSharing:
    """Shared prefixes of all rows.

    Args:
        group: KV group whose block tables are compared.
    """

    def __init__(self, group: KVGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.group, self._clock = group, clock
        self._min_places = group.num_places(MIN_TOKENS)
        self._grouped: list[DecodeSequence] = []  # rows of the last grouping
        self._rests_until_s = 0.0

    def regroup(self, rows: Rows) -> None:
        """Group rows anew if rows have changed and the rest is over."""
        begin_s = self._clock()
        if rows.sequences == self._grouped or not self.group.is_append_only:
            return
        if begin_s < self._rests_until_s:
            self._grouped = []  # a returned row shares nothing, even if all are back
            return
        self._grouped = list(rows.sequences)
        rows.share(self._prefixes(rows))
        end_s = self._clock()
        self._rests_until_s = end_s + REST * (end_s - begin_s)

    def spared_bytes(self, rows: Rows) -> int:
        """Return the KV bytes that a step is spared by reading each prefix once."""
        return rows.num_spared * self.group.token_bytes if rows.num_spared else 0

    def _prefixes(self, rows: Rows) -> dict[DecodeSequence, SharedPrefix]:
        """Return shared prefixes by sequence; a lasting group keeps its number if possible."""
        alike = self._alike(rows.sequences)
        groups = prefix_groups([self._lasting_blocks(sequence) for sequence in alike], self._min_places)
        members = [[alike[row] for row in group.rows] for group in groups]
        before = [rows.prefixes.get(sequences[0], UNSHARED).number for sequences in members]
        free, taken = (number for number in count() if number not in before), {UNSHARED.number}
        prefixes: dict[DecodeSequence, SharedPrefix] = {}
        for group, sequences, number in zip(groups, members, before, strict=True):
            if number in taken:
                number = next(free)
            taken.add(number)
            prefix = SharedPrefix(number, group.num_places * self.group.block_size)
            prefixes |= dict.fromkeys(sequences, prefix)
        return prefixes

    def _alike(self, sequences: Sequence[DecodeSequence]) -> list[DecodeSequence]:
        """Return sequences that begin like another for at least `MIN_TOKENS` tokens; none in most batches."""
        beginnings = [sequence.tables[0].block_ids[: self._min_places].tobytes() for sequence in sequences]
        counts = Counter(beginnings)
        return [sequence for sequence, begin in zip(sequences, beginnings, strict=True) if counts[begin] > 1]

    def _lasting_blocks(self, sequence: DecodeSequence) -> bytes:
        """Return the ids of blocks completely written by the device, which may be tokens ahead of the host."""
        num_places = (len(sequence.token_ids) - 1) // self.group.block_size
        return memoryview(sequence.tables[0].block_ids)[:num_places].tobytes()
