"""The rows' changes as the words that the device is sent, and the way there."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from common.device.sampling_tensors import sampling_words
from common.device.word_uploader import WordUploader
from common.kernels.operands import RowUpdates
from common.wire.pool_shape import PoolShape
from common.wire.sampling_params import PADDING
from decode_worker.rows import NO_SLOT, Change, Clear, Fill, Grow


class TablePlaces(NamedTuple):
    """Where the block tables of a group lie in `RowState.block_tables`, row after row."""

    begin: int
    end: int
    row_places: int
    first_id: int  # of the group: tables on the device count from there


def table_places(pool: PoolShape, max_rows: int, max_len: int) -> list[TablePlaces]:
    """Of each group, one after the other."""
    row_places = [group.num_places(max_len) for group in pool.layout.groups]
    ends = list(accumulate(count * max_rows for count in row_places))
    columns = zip([0, *ends[:-1]], ends, row_places, pool.proof_ids, strict=True)
    return [TablePlaces(*column) for column in columns]


class RowUploader:
    """Packs changes and sends them. Whatever the host counts, nothing is written beyond a row's own block tables.

    Args:
        places: of each group.
        max_len: tokens of a row.
    """

    def __init__(self, places: SequenceOf[TablePlaces], max_len: int, device: torch.device) -> None:
        self.places = places
        self.max_len = max_len
        self._uploader = WordUploader(device)

    def upload(self, changes: SequenceOf[Change]) -> RowUpdates:
        """The changes on the device."""
        rows = [change for change in changes if not isinstance(change, Grow)]
        entries = list(self._entries(changes))
        targets, blocks = [target for target, _ in entries], [block_ids for _, block_ids in entries]
        words = np.concatenate((*_columns(rows, self.max_len), *targets, *blocks))
        return RowUpdates(self._uploader.send(words), len(rows), sum(map(len, targets)))

    def _entries(self, changes: SequenceOf[Change]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Block table entries to be written, and the blocks, in pieces: int32."""
        for change in changes:
            if isinstance(change, Fill):
                for table, places in zip(change.sequence.tables, self.places, strict=True):
                    block_ids = np.array(table.block_ids[table.num_gone : places.row_places], np.int32)
                    begin = places.begin + change.row * places.row_places + table.num_gone
                    yield np.arange(begin, begin + len(block_ids), dtype=np.int32), block_ids - places.first_id
        grown = [change for change in changes if isinstance(change, Grow)]
        yield from (self._grown(number, grown) for number in range(len(self.places)))

    def _grown(self, number: int, changes: SequenceOf[Grow]) -> tuple[np.ndarray, np.ndarray]:
        """Of one group."""
        begin, _, row_places, first_id = self.places[number]
        grown = [grow for grow in changes if grow.group == number and grow.index < row_places]
        targets = np.array([begin + grow.row * row_places + grow.index for grow in grown], np.int32)
        return targets, np.array([grow.block_id - first_id for grow in grown], np.int32)


def _columns(changes: SequenceOf[Fill | Clear], max_len: int) -> list[np.ndarray]:
    """What the rows are told, as `RowUpdates` has it: int32."""
    heads, sampling = [], []
    for change in changes:
        params, source, token, seq_len, slot = PADDING, -1, 0, 0, NO_SLOT
        if isinstance(change, Fill):
            sequence = change.sequence
            params, source, slot = sequence.sampling, change.source, change.state_slot
            token, seq_len = sequence.token_ids[-1], min(max_len, sequence.num_scheduled)
        heads.append((change.row, source, token, seq_len, slot))
        sampling.append(params)
    return [np.array(heads, np.int32).T.ravel(), *sampling_words(sampling)]
