"""State of a decode batch on the device, and changes to it."""

from dataclasses import dataclass

from torch import Tensor

from common.kernels.base.attention_operands import SharedPrefixes
from common.kernels.base.sampling_operands import SamplingTensors

HEAD_WORDS = 4
"""int32 words of `RowUpdates` for a row that is filled, cleared or moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """State of a decode batch on the device, a row for each sequence; a row with seq_len 0 is padding.

    All other tensors are views of `words`. `token_ids`, `positions` and `seq_lens` come first, each `column_words`
    behind the one before.
    """

    words: Tensor  # [num_words] int32
    column_words: int
    token_ids: Tensor  # int32 words from each of the first three columns to the next
    positions: Tensor  # [max_rows] int32: the last token, whose KV is not written yet
    seq_lens: Tensor  # [max_rows] int32: position of the last token
    state_slots: Tensor  # [max_rows] int32: slot of `AdjustmentTensors`; -1 without one
    prefixes: SharedPrefixes  # each [max_rows]
    block_tables: Tensor  # [num_entries] int32: block tables of all groups of KV blocks
    sampling: SamplingTensors  # each [max_rows]


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """Rows and words of `RowState.words` to write, in a tensor read by the device where the host wrote it.

    First come four words of each row: row, source, token, seq_len. Then come `num_entries` places in `RowState.words`,
    and then the words to store there; no place is in the first three columns. With `source` -1, the row's last token
    becomes `token` and the length `seq_len`. Otherwise both are copied from row `source`, as before the update.
    """

    words: Tensor  # int32, at least [HEAD_WORDS * num_rows + 2 * num_entries], of a buffer, pinned where there is a GPU
    num_rows: int  # rows, each written once
    num_entries: int  # entries; a place may occur twice, with equal words
