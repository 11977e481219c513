"""Writes text to a file descriptor from a thread, so that no caller waits for a reader, a terminal or a disk."""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

MAX_QUEUED_BYTES = 4 << 20
FLUSH_S = 1.0
"""Longest wait for the last lines to be read."""


class BackgroundWriter:
    """Queues lines and writes them in order; the descriptor stays the caller's.

    A line is lost when the queue is full, or when writing fails (a closed pipe, a full disk). The next line that is
    written is followed by what `report` makes of the number of lost ones.
    """

    def __init__(self, descriptor: int, report: Callable[[int], str] = lambda num_lost: "") -> None:
        self._descriptor = descriptor
        self._report = report
        self._lines: deque[bytes] = deque()
        self._num_queued_bytes = 0  # with those of the line that is being written
        self._num_lost = 0  # since the last report
        self._is_cut = False  # the last line, for an error
        self._changed = threading.Condition()
        threading.Thread(target=self._write_forever, name="writer", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()

    def write(self, text: str) -> None:
        """Queue whole lines; returns at once."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._num_queued_bytes + len(data) > MAX_QUEUED_BYTES:
                self._num_lost += 1
                return
            self._lines.append(data)
            self._num_queued_bytes += len(data)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, for FLUSH_S at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_queued_bytes, FLUSH_S)

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line, num_lost = self._lines.popleft(), self._num_lost
            report = self._report(num_lost) if num_lost else ""
            is_written = self._put(line + report.encode(errors="backslashreplace"))
            with self._changed:
                self._num_lost += -num_lost if is_written else 1
                self._num_queued_bytes -= len(line)
                self._changed.notify_all()

    def _put(self, data: bytes) -> bool:
        """Write all of it; False after an error.

        Not through `sys.stderr`: a process cannot end in order while a thread waits in there for a reader.
        """
        left = b"\n" + data if self._is_cut else data
        num_bytes = len(left)
        try:
            while left:
                left = left[self._put_some(left) :]
        except OSError:
            self._is_cut |= len(left) < num_bytes
            return False
        self._is_cut = False
        return True

    def _put_some(self, data: bytes) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # somebody with the same file made it so
            select.select([], [self._descriptor], [])
            return 0
