"""Every tensor that a decode step reads or writes: allocated once, because graphs know them by address.

State lives on the device and advances there: a step leaves each row ready for the next one, so the
next can be launched before the host has seen this one's tokens. The host only writes what changed
(`apply`), in stream order between two steps. A row with seq_len 0 is padding.
"""

import torch
from torch import Tensor

from common.device.adjustments import Adjustments, SlotFill, make_grammar_masks
from common.device.sampling_tensors import sampling_tensors
from common.kernels.operands import RowState, SamplingTensors
from common.ops.base import ForwardBatch
from common.ops.row_ops import RowOps
from common.wire.pool_shape import PoolShape
from common.wire.sampling_params import PADDING
from decode_worker.row_updates import RowUploader, table_places
from decode_worker.rows import NO_SLOT, Change, Fill


class DecodeBatch:
    """Row state of up to `max_rows` sequences of up to `max_len` tokens, with blocks of a pool of that shape."""

    def __init__(self, max_rows: int, max_len: int, pool: PoolShape, vocab: int, device: torch.device) -> None:
        self.max_len = max_len
        places = table_places(pool, max_rows, max_len)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.state = RowState(
            token_ids=zeros(max_rows, dtype=torch.int32),
            positions=zeros(max_rows, dtype=torch.int32),
            seq_lens=zeros(max_rows, dtype=torch.int32),
            state_slots=torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=device),
            block_tables=zeros(places[-1].end, dtype=torch.int32),
            sampling=sampling_tensors([PADDING] * max_rows, device),
        )
        self.block_tables = tuple(
            self.state.block_tables[each.begin : each.end].view(max_rows, each.row_places) for each in places
        )  # of each group [max_rows, max_blocks] int32
        self.cu_seqlens = torch.arange(max_rows + 1, dtype=torch.int32, device=device)  # [max_rows + 1]
        self.adjustments = Adjustments(max_rows, vocab, device)
        # A place for each active sequence, and for each that ended while a step in flight may read there.
        self.grammars = make_grammar_masks(2 * max_rows, max_rows, vocab, device)
        self._ops = RowOps(device)
        self._uploader = RowUploader(places, max_len, device)

    def forward_batch(self, num_rows: int) -> ForwardBatch:
        """The first rows, as the model wants them."""
        state = self.state
        return ForwardBatch(
            token_ids=state.token_ids[:num_rows],
            positions=state.positions[:num_rows],
            slot_mapping=None,
            block_tables=tuple(table[:num_rows] for table in self.block_tables),
            seq_lens=state.seq_lens[:num_rows],
            cu_seqlens=self.cu_seqlens[: num_rows + 1],
            last_tokens=None,
            max_query_len=1,
            max_seq_len=self.max_len,
        )

    def sampling_rows(self, num_rows: int) -> SamplingTensors:
        """Sampling parameters of the first rows."""
        return self.state.sampling.rows(num_rows)

    def apply(self, changes: list[Change]) -> None:
        """Bring the tensors up to date with the changes of one turn: one upload, one launch, and what slots take."""
        new = [change for change in changes if isinstance(change, Fill) and change.source < 0]
        self.adjustments.fill([_slot_fill(fill) for fill in new if fill.state_slot != NO_SLOT])
        if changes and (updates := self._uploader.upload(changes)).words.numel():
            self._ops.update(self.state, updates)


def _slot_fill(fill: Fill) -> SlotFill:
    """All of a new sequence's tokens but the last, which the next step counts."""
    sequence = fill.sequence
    num_outputs = max(0, sequence.num_outputs - 1)
    return SlotFill(fill.state_slot, sequence.sampling, sequence.token_ids[:-1], num_outputs, place=sequence.place)
