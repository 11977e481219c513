"""Changes by the host to the rows of a decode batch, by kernel on a GPU and by reference elsewhere."""

from collections.abc import Callable
from functools import partial

from common.kernels.base.operands import RowState, RowUpdates
from common.ops import reference


def row_updater(state: RowState) -> Callable[[RowUpdates], None]:
    """Return a function that writes the host's changes between two steps."""
    if state.words.device.type != "cuda":
        return partial(reference.update_rows, state)
    # Imported here, so that a process on a CPU loads no triton.
    from common.kernels.elementwise.update_rows import RowUpdater

    return RowUpdater(state)
