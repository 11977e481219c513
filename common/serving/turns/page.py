"""A record in memory of the workers of a GPU: the present turn, and the decode step at work.

A turn is a prompt step with the whole GPU. The prefill worker claims it for a time, and releases it after the step.
A decode worker launches one step in each turn, and tells whose streams it decodes. A claim ends by itself at a told
time, so a prefill worker that dies delays streams no longer than that.
"""

import mmap
from struct import Struct

PAGE_BYTES = 40
LONGEST_US = 10_000_000
"""Longest claim; a longer one is of a writer with another clock, or no claim at all."""
_WORD = Struct("=Q")
_TURN_AT, _TURN_UNTIL_AT, _STEP_AT, _STEP_UNTIL_AT, _CLIENT_AT = 0, 8, 16, 24, 32


class TurnPage:
    """The record; times are microseconds of the host's monotonic clock.

    Words are written one after the other. An end is written last and read first, so what it belongs to is no older.
    """

    def __init__(self, memory: bytearray | memoryview | mmap.mmap) -> None:
        self._memory = memory

    def claim(self, turn: int, until_us: int) -> None:
        """Begin a turn, which ends at a time at the latest; ends any earlier turn."""
        self._write(_TURN_AT, turn, _TURN_UNTIL_AT, until_us)

    def release(self, turn: int) -> None:
        """End a turn, unless another has begun."""
        if self._word(_TURN_AT) == turn:
            self._put(_TURN_UNTIL_AT, 0)

    def turn(self, now_us: int) -> int:
        """Return the present turn; 0 if there is none."""
        return self._read(_TURN_AT, _TURN_UNTIL_AT, now_us)

    def decode(self, step_us: int, until_us: int, client: int | None = None) -> None:
        """Record a launched decode step that takes `step_us` alone; decoding counts as over at `until_us`.

        Args:
            client: of all streams; None if there are several.
        """
        self._put(_CLIENT_AT, 0 if client is None else client + 1)
        self._write(_STEP_AT, step_us, _STEP_UNTIL_AT, until_us)

    def step_us(self, now_us: int) -> int:
        """Return the time of a decode step alone; 0 if nothing is decoded."""
        return self._read(_STEP_AT, _STEP_UNTIL_AT, now_us)

    def client(self) -> int | None:
        """Return the client of all streams; None if there are several."""
        client = self._word(_CLIENT_AT)
        return client - 1 if client else None

    def _write(self, at: int, value: int, until_at: int, until_us: int) -> None:
        self._put(until_at, 0)
        self._put(at, value)
        self._put(until_at, until_us)

    def _read(self, at: int, until_at: int, now_us: int) -> int:
        is_present = now_us < self._word(until_at) <= now_us + LONGEST_US
        return self._word(at) if is_present else 0

    def _put(self, at: int, value: int) -> None:
        _WORD.pack_into(self._memory, at, value)

    def _word(self, at: int) -> int:
        return int(_WORD.unpack_from(self._memory, at)[0])
