"""What a decode batch keeps of its rows, in one piece of memory: where each column lies there, and what fills a row.

In one piece, because a launch takes the longer the more addresses it is given. Which columns there are follows from the
sampling parameters that the wire declares.
"""

from operator import attrgetter
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from common.kernels.base.operands import RowState, SamplingTensors, SharedPrefixes
from common.wire.values.sampling_params import PADDING, SAMPLING_COLUMNS, SamplingParams

ALIGNMENT_WORDS = 64
"""Of every column, as memory of its own would have: kernels are compiled anew for addresses that have less."""
FORMATS = {"float32": "f", "int32": "i", "int64": "q"}
HEADS = ("token_ids", "positions", "seq_lens")
"""Which steps advance, and rows that move take along: the kernel finds them first, each a column after the other."""

_RECORD = Struct("=iii" + "".join(FORMATS[column.dtype] for column in SAMPLING_COLUMNS))
_values_of = attrgetter(*(column.name for column in SAMPLING_COLUMNS))


def row_record(state_slot: int, prefix: tuple[int, int], params: SamplingParams) -> bytes:
    """All that a row is told beside its head and its block tables, word after word, as `RowLayout.record_places`.

    Args:
        prefix: its number and tokens of `SharedPrefixes`.
    """
    return _RECORD.pack(state_slot, *prefix, *_values_of(params))


class RowLayout:
    """Where everything lies in `RowState.words` of `max_rows` rows and block tables of `num_entries` in all."""

    def __init__(self, max_rows: int, num_entries: int) -> None:
        self.max_rows, self.num_entries = max_rows, num_entries
        self.column_words = -(-max_rows // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
        sizes = [1, 1, 1, *(np.dtype(column.dtype).itemsize // 4 for column in SAMPLING_COLUMNS)]
        ends = self.column_words * (len(HEADS) + np.cumsum(sizes))
        self._begins = [len(HEADS) * self.column_words, *ends[:-1].tolist()]  # as records have it
        self.tables_begin = int(ends[-1])
        words = [(begin + word, size) for begin, size in zip(self._begins, sizes, strict=True) for word in range(size)]
        first_places, strides = np.array(words, np.int32).T
        self.record_places = first_places + strides * np.arange(max_rows, dtype=np.int32)[:, None]
        """Of each row, where the words of `row_record` go: [max_rows, num_words] int32."""
        self.prefix_places = self.record_places[:, 1:3]
        """Of these, where those of its prefix go."""

    def make_state(self, device: torch.device) -> RowState:
        """Of nothing but padding."""
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
