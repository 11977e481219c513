"""A record in memory of two workers: until when a prompt step has their GPU alone.

The prefill worker claims the GPU for a step and releases it after. The decode worker reads the record before each
launch. A claim ends by itself at a told time, so a prefill worker that dies holds the GPU no longer than that.
"""

from struct import Struct

PAGE_BYTES = 16
LONGEST_US = 10_000_000
"""Longest claim; a longer one is of a writer with another clock, or no claim at all."""
_WORD = Struct("=Q")
_WRITER_AT, _UNTIL_AT = 0, 8


class TurnPage:
    """The record: its writer's epoch, and the end of its claim in microseconds of the host's monotonic clock.

    Words are written one after the other, so a reader sees the claim's end last.
    """

    def __init__(self, memory: bytearray | memoryview) -> None:
        self._memory = memory

    def claim(self, writer: int, until_us: int) -> None:
        """Claim the GPU until a time; ends any earlier claim."""
        _WORD.pack_into(self._memory, _UNTIL_AT, 0)
        _WORD.pack_into(self._memory, _WRITER_AT, writer)
        _WORD.pack_into(self._memory, _UNTIL_AT, until_us)

    def release(self, writer: int) -> None:
        """End the claim, unless it is of another writer: one that took over after this one was thought dead."""
        if _WORD.unpack_from(self._memory, _WRITER_AT)[0] == writer:
            _WORD.pack_into(self._memory, _UNTIL_AT, 0)

    def claimed_until_us(self, now_us: int) -> int:
        """Return the end of the present claim; 0 if there is none, or if it is over."""
        (until_us,) = _WORD.unpack_from(self._memory, _UNTIL_AT)
        return int(until_us) if now_us < until_us <= now_us + LONGEST_US else 0
