"""Interface by which a worker's loop reports its steps, traced or not."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from common.base.trace_events import Key

WAIT = "wait"
"""Phase in which the host only waits for the device."""

_NOTHING = nullcontext()


class Trace:
    """Receiver of a loop's reports; the base class keeps nothing."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for a turn of the loop; turns without events are dropped."""
        return _NOTHING

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a part of a turn; phases may nest."""
        return _NOTHING

    def device(self, size: int, unit: str) -> AbstractContextManager[None]:
        """Return a context for the launch of a step over `size` rows or tokens."""
        return _NOTHING

    def join(self, keys: Iterable[Key]) -> None:
        """Name these requests in the next step."""

    def finish(self) -> None:
        """Write the rest, after the loop's end."""
