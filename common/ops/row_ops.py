"""The host's changes to the rows of a decode batch, by kernel on a GPU and by reference elsewhere."""

import torch

from common.kernels.operands import RowState, RowUpdates
from common.ops import reference


class RowOps:
    """Writes rows between two steps."""

    def __init__(self, device: torch.device) -> None:
        self._has_kernels = device.type == "cuda"
        if self._has_kernels:
            # Imported here, so that a process on a CPU loads no triton.
            from common.kernels.update_rows import update_rows

            self._update_rows = update_rows

    def update(self, state: RowState, updates: RowUpdates) -> None:
        """Write what the host changed."""
        if self._has_kernels:
            self._update_rows(state, updates)
        else:
            reference.update_rows(state, updates)
