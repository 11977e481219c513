"""Changes of rows, packed as words for the device."""

from array import array
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from common.device.steps.row_state import RowLayout, row_record
from common.device.steps.word_uploader import WordStage
from common.kernels.base.row_operands import HEAD_WORDS, RowUpdates
from common.kv.tables import BlockTable
from common.wire.values.pool_shape import PoolShape
from common.wire.values.sampling_params import PADDING
from decode_worker.sequences.rows import NO_SLOT, UNSHARED, Change, Clear, Fill, Grow, Share

_PADDING = np.frombuffer(row_record(NO_SLOT, UNSHARED, PADDING), np.int32)


class TablePlaces(NamedTuple):
    """Range of a group's block tables in `RowState.block_tables`, row after row."""

    begin: int
    end: int
    row_places: int
    first_id: int  # first block id of the group; device tables count from here


def table_places(pool: PoolShape, max_rows: int, max_len: int) -> list[TablePlaces]:
    """Return the range of each group, in order."""
    row_places = [group.num_places(max_len) for group in pool.layout.groups]
    ends = list(accumulate(count * max_rows for count in row_places))
    columns = zip([0, *ends[:-1]], ends, row_places, pool.begins, strict=True)
    return [TablePlaces(*column) for column in columns]


class Entries(NamedTuple):
    """Places and words of `RowUpdates`: int32, equally many."""

    places: SequenceOf[int] | np.ndarray
    words: SequenceOf[int] | np.ndarray


class RowStage:
    """Packer of changes. Whatever the host counts, nothing is written beyond a row's own block tables.

    Args:
        places: of each group.
        max_len: tokens of a row.
        words: takes the packed changes; the caller marks them as launched.
    """

    def __init__(self, layout: RowLayout, places: SequenceOf[TablePlaces], max_len: int, words: WordStage) -> None:
        self.layout, self.places, self.max_len, self._words = layout, places, max_len, words

    def pack(self, changes: SequenceOf[Change]) -> RowUpdates:
        """Pack changes; launch the result before packing others."""
        heads, pieces = array("i"), list[Entries]()
        for change in changes:
            if isinstance(change, Fill):
                sequence = change.sequence
                seq_len = min(self.max_len, sequence.num_scheduled)
                heads.extend((change.row, change.source, sequence.token_ids[-1], seq_len))
                record = np.frombuffer(row_record(change.state_slot, change.prefix, sequence.sampling), np.int32)
                pieces.append(Entries(self.layout.record_places[change.row], record))
                groups = zip(sequence.tables, self.places, strict=True)
                pieces += [self._table(change.row, *of_group) for of_group in groups]
            elif isinstance(change, Clear):
                heads.extend((change.row, -1, 0, 0))
                pieces.append(Entries(self.layout.record_places[change.row], _PADDING))
        pieces.append(self._grown([change for change in changes if isinstance(change, Grow)]))
        pieces.append(self._shared([change for change in changes if isinstance(change, Share)]))
        num_entries = sum(len(piece.places) for piece in pieces)
        num_words = len(heads) + 2 * num_entries
        buffer = self._words.room(num_words)
        places, entries = [piece.places for piece in pieces], [piece.words for piece in pieces]
        np.concatenate((heads, *places, *entries), out=buffer.array[:num_words])
        return RowUpdates(buffer.words, len(heads) // HEAD_WORDS, num_entries)

    def _table(self, row: int, table: BlockTable, places: TablePlaces) -> Entries:
        """Return the entries of a sequence's whole table in a group."""
        block_ids = np.array(table.block_ids, np.int32)[table.num_gone : places.row_places]
        begin = self.layout.tables_begin + places.begin + row * places.row_places + table.num_gone
        if places.first_id:
            block_ids -= places.first_id
        return Entries(np.arange(begin, begin + len(block_ids), dtype=np.int32), block_ids)

    def _grown(self, changes: SequenceOf[Grow]) -> Entries:
        """Return the entries of grown tables, for all groups."""
        targets, block_ids = array("i"), array("i")
        for grow in changes:
            begin, _, row_places, first_id = self.places[grow.group]
            if grow.index < row_places:
                targets.append(self.layout.tables_begin + begin + grow.row * row_places + grow.index)
                block_ids.append(grow.block_id - first_id)
        return Entries(targets, block_ids)

    def _shared(self, changes: SequenceOf[Share]) -> Entries:
        rows = np.array([share.row for share in changes], np.intp)
        words = array("i", chain.from_iterable(share.prefix for share in changes))
        return Entries(self.layout.prefix_places[rows].ravel(), words)
