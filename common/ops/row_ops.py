"""What is done to the rows of a decode batch outside the model, by kernel on a GPU and by reference elsewhere."""

import torch
from torch import Tensor

from common.kernels.operands import RowState, RowUpdates
from common.ops import reference


class RowOps:
    """Slots of a step, if its attention asks for them, and the host's changes between two.

    Args:
        pdl: launch the kernels of a step before their predecessors have finished.
    """

    def __init__(self, device: torch.device, *, pdl: bool) -> None:
        self._has_kernels = device.type == "cuda"
        self._pdl = pdl
        if self._has_kernels:
            # Imported here, so that a process on a CPU loads no triton.
            from common.kernels import row_slots, update_rows

            self._row_slots, self._update_rows = row_slots.row_slots, update_rows.update_rows

    def slots(self, positions: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
        """Where K and V of each row's position go: `[num_rows]` int64, -1 for padding."""
        if self._has_kernels:
            return self._row_slots(positions, seq_lens, block_tables, block_size, pdl=self._pdl)
        return reference.row_slots(positions, seq_lens, block_tables, block_size)

    def update(self, state: RowState, updates: RowUpdates) -> None:
        """Write what the host changed."""
        if self._has_kernels:
            self._update_rows(state, updates)
        else:
            reference.update_rows(state, updates)
