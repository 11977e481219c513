"""Sees which rows of a decode batch share prefixes, when others came or left. Torch-free.

Who just came is computed alone until then, which is right, only slower; who left is told the device by its row.
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
"""Of a prefix: to read a shorter one once takes hardly less time than to read it for each row."""
REST = 50
"""For so many times as long as it took to group rows they stay as they are: steps wait for it."""


class PrefixSharing:
    """Of all rows.

    Args:
        group: of KV blocks, whose tables are compared.
    """

    def __init__(self, group: KVGroup, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.group, self._clock = group, clock
        self._min_places = group.num_places(MIN_TOKENS)
        self._grouped: list[DecodeSequence] = []  # rows as they were when they were grouped last
        self._rests_until_s = 0.0

    def tend(self, rows: Rows) -> None:
        """Group rows anew, if others are there and the last time is long enough ago."""
        begin_s = self._clock()
        if rows.sequences == self._grouped or not self.group.is_append_only:
            return
        if begin_s < self._rests_until_s:
            self._grouped = []  # who left shares nothing when it is back, though all are there again
            return
        self._grouped = list(rows.sequences)
        rows.share(self._prefixes(rows))
        end_s = self._clock()
        self._rests_until_s = end_s + REST * (end_s - begin_s)

    def spared_bytes(self, rows: Rows) -> int:
        """What a step need not read if it reads each prefix once."""
        return rows.num_spared * self.group.token_bytes

    def _prefixes(self, rows: Rows) -> dict[DecodeSequence, SharedPrefix]:
        """By sequence, for those that share one; who goes on sharing keeps the number, where that is possible."""
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
        """Those that begin as others do, if only as far as is worth it; in most batches nobody does."""
        beginnings = [sequence.tables[0].block_ids[: self._min_places].tobytes() for sequence in sequences]
        counts = Counter(beginnings)
        return [sequence for sequence, begin in zip(sequences, beginnings, strict=True) if counts[begin] > 1]

    def _lasting_blocks(self, sequence: DecodeSequence) -> bytes:
        """Those that the device has written all of: it has a token more than are known here, or several."""
        num_places = (len(sequence.token_ids) - 1) // self.group.block_size
        return memoryview(sequence.tables[0].block_ids)[:num_places].tobytes()
