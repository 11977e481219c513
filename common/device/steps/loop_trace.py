"""What a worker's loop tells about its steps and requests, whether somebody listens or not."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from common.base.trace_events import Key

WAIT = "wait"
"""The phase in which the host has nothing to do but wait for the device."""

_NOTHING = nullcontext()


class Trace:
    """What a loop tells about its steps; this one keeps nothing."""

    def turn(self) -> AbstractContextManager[None]:
        """Around one turn of the loop; turns in which nothing happens are not kept."""
        return _NOTHING

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a turn; phases may nest."""
        return _NOTHING

    def device(self, size: int, unit: str) -> AbstractContextManager[None]:
        """Around the launch of a step over `size` rows or tokens."""
        return _NOTHING

    def join(self, keys: Iterable[Key]) -> None:
        """The next step is one of these requests', too."""

    def meet(self, key: Key) -> None:
        """This phase is one of the request's."""

    def stretch(self, name: str, key: Key, begin_s: float, end_s: float) -> None:
        """A request waited, or was busy with something of its own, on `time.monotonic`."""

    def finish(self) -> None:
        """The loop has ended: write what is left."""


UNTRACED = Trace()
