"""Memory of a decode batch's rows in a single piece: the place of each column, and the words of a row.

The memory is a single piece, because a launch takes longer with more addresses. The columns follow from the sampling
parameters declared by the wire.
"""

from operator import attrgetter
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from common.kernels.base.attention_operands import SharedPrefixes
from common.kernels.base.row_operands import RowState
from common.kernels.base.sampling_operands import SamplingTensors
from common.wire.values.sampling_params import PADDING, SAMPLING_COLUMNS, SamplingParams

ALIGNMENT_WORDS = 64
"""Alignment of every column, because kernels are recompiled for addresses with less."""
FORMATS = {"float32": "f", "int32": "i", "int64": "q"}
HEADS = ("token_ids", "positions", "seq_lens")
"""Columns advanced by steps and moved with rows; first and consecutive, for the kernel."""

_RECORD = Struct("=iii" + "".join(FORMATS[column.dtype] for column in SAMPLING_COLUMNS))
_values_of = attrgetter(*(column.name for column in SAMPLING_COLUMNS))


def row_record(state_slot: int, prefix: tuple[int, int], params: SamplingParams) -> bytes:
    """Pack a row's words, without heads and block tables, in the order of `RowLayout.record_places`.

    Args:
        prefix: the row's number and tokens in `SharedPrefixes`.
    """
    return _RECORD.pack(state_slot, *prefix, *_values_of(params))


class RowLayout:
    """Places in `RowState.words` for `max_rows` rows and `num_entries` block-table entries in all."""

    def __init__(self, max_rows: int, num_entries: int) -> None:
        self.max_rows, self.num_entries = max_rows, num_entries
        self.column_words = -(-max_rows // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
        sizes = [1, 1, 1, *(np.dtype(column.dtype).itemsize // 4 for column in SAMPLING_COLUMNS)]
        ends = self.column_words * (len(HEADS) + np.cumsum(sizes))
        self._begins = [len(HEADS) * self.column_words, *ends[:-1].tolist()]  # in the order of records
        self.tables_begin = int(ends[-1])
        words = [(begin + word, size) for begin, size in zip(self._begins, sizes, strict=True) for word in range(size)]
        first_places, strides = np.array(words, np.int32).T
        self.record_places = first_places + strides * np.arange(max_rows, dtype=np.int32)[:, None]
        """Place of each word of a row's `row_record`: [max_rows, num_words] int32."""
        self.prefix_places = self.record_places[:, 1:3]
        """Columns of `record_places` for the prefix."""

    def make_state(self, device: torch.device) -> RowState:
        """Make a state of padding rows."""
        words = torch.zeros(self.tables_begin + self.num_entries, dtype=torch.int32, device=device)

        def column(begin: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return words[begin : begin + self.max_rows * dtype.itemsize // 4].view(dtype)

        heads = {name: column(number * self.column_words) for number, name in enumerate(HEADS)}
        slots_begin, numbers_begin, tokens_begin, *begins = self._begins
        sampling = {
            each.name: column(begin, getattr(torch, each.dtype)).fill_(getattr(PADDING, each.name))
            for each, begin in zip(SAMPLING_COLUMNS, begins, strict=True)
        }
        return RowState(
            words=words,
            column_words=self.column_words,
            **heads,
            state_slots=column(slots_begin),
            prefixes=SharedPrefixes(column(numbers_begin).fill_(-1), column(tokens_begin)),
            block_tables=words[self.tables_begin :],
            sampling=SamplingTensors(**sampling),
        )
