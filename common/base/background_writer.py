"""Background writing of text to a file descriptor, so no caller waits for a reader, a terminal or a disk."""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

MAX_QUEUED_BYTES = 4 << 20
FLUSH_S = 1.0
"""Longest wait for a reader of the last lines."""


class BackgroundWriter:
    """Queue of lines written in order by a thread; the caller keeps the descriptor.

    A line is lost when the queue is full, or when a write fails (a closed pipe, a full disk). The next line written is
    followed by `report` of the number of lost lines.
    """

    def __init__(self, descriptor: int, report: Callable[[int], str] = lambda num_lost: "") -> None:
        self._descriptor = descriptor
        self._report = report
        self._lines: deque[bytes] = deque()
        self._num_queued_bytes = 0  # includes the line being written
        self._num_lost = 0  # since the last report
        self._is_cut = False  # an error cut the last line
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
        """Wait until all lines are written, for FLUSH_S at most."""
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
        """Write all of `data`; return False after an error.

        Bypasses `sys.stderr`: a process cannot end in order while a thread waits in there for a reader.
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
        except BlockingIOError:  # another user of the file made it non-blocking
            select.select([], [self._descriptor], [])
            return 0
