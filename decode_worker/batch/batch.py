"""All tensors of a decode step, allocated once because captured graphs hold the addresses.

State lives on the device and advances there: a step leaves each row ready for the next step. So the next step can be
launched before the host has seen the last step's tokens. The host only writes changes (`apply`), in stream order
between two steps. A row with seq_len 0 is padding.
"""

from collections.abc import Callable
from functools import partial

import torch

from common.device.steps.adjustments import Adjustments, SlotFill, make_grammar_masks
from common.device.steps.row_state import RowLayout
from common.device.steps.word_uploader import WordStage
from common.kernels.base.row_operands import RowState, RowUpdates
from common.ops import reference
from common.ops.base import ForwardBatch
from common.wire.values.pool_shape import PoolShape
from decode_worker.batch.row_updates import RowStage, table_places
from decode_worker.sequences.rows import NO_SLOT, Change, Fill


class DecodeBatch:
    """Row state of up to `max_rows` sequences of up to `max_len` tokens, with blocks of a pool of shape `pool`."""

    def __init__(self, max_rows: int, max_len: int, pool: PoolShape, vocab: int, device: torch.device) -> None:
        self.max_len = max_len
        places = table_places(pool, max_rows, max_len)
        layout = RowLayout(max_rows, places[-1].end)
        self.state = layout.make_state(device)
        self.state.state_slots.fill_(NO_SLOT)
        self.block_tables = tuple(
            self.state.block_tables[each.begin : each.end].view(max_rows, each.row_places) for each in places
        )  # of each group [max_rows, max_blocks] int32
        self.cu_seqlens = torch.arange(max_rows + 1, dtype=torch.int32, device=device)  # [max_rows + 1]
        self.adjustments = Adjustments(max_rows, vocab, device)
        # A place for each active sequence, and for ended sequences still read by one of two steps in flight.
        self.grammars = make_grammar_masks(3 * max_rows, max_rows, vocab, device)
        self.words = WordStage(device)  # packed changes; marked as launched behind the next step
        self._stage = RowStage(layout, places, max_len, self.words)
        self._update = row_updater(self.state)

    def forward_batch(self, num_rows: int, *, shares_prefixes: bool = False) -> ForwardBatch:
        """Return the first rows as input of the model, with shared prefixes if `shares_prefixes`."""
        state = self.state
        return ForwardBatch(
            token_ids=state.token_ids[:num_rows],
            positions=state.positions[:num_rows],
            slots=(),
            block_tables=tuple(table[:num_rows] for table in self.block_tables),
            seq_lens=state.seq_lens[:num_rows],
            cu_seqlens=self.cu_seqlens[: num_rows + 1],
            last_tokens=None,
            max_query_len=1,
            max_seq_len=self.max_len,
            prefixes=state.prefixes.rows(num_rows) if shares_prefixes else None,
        )

    def apply(self, changes: list[Change]) -> None:
        """Write the changes of a turn to the tensors in one launch; also fill slots of new rows."""
        new = [change for change in changes if isinstance(change, Fill) and change.source < 0]
        self.adjustments.fill([_slot_fill(fill) for fill in new if fill.state_slot != NO_SLOT])
        if changes:
            self._update(self._stage.pack(changes))


def _slot_fill(fill: Fill) -> SlotFill:
    """Return all tokens of a new sequence but the last, counted by the next step."""
    sequence = fill.sequence
    num_outputs = max(0, sequence.num_outputs - 1)
    return SlotFill(
        fill.state_slot, sequence.request.sampling, sequence.token_ids[:-1], num_outputs, place=sequence.mask_slot.place
    )


def row_updater(state: RowState) -> Callable[[RowUpdates], None]:
    """Return a function that writes the host's changes between two steps."""
    if state.words.device.type != "cuda":
        return partial(reference.update_rows, state)
    # Imported here, so that a process on a CPU loads no triton.
    from common.kernels.elementwise.update_rows import RowUpdater

    return RowUpdater(state)
