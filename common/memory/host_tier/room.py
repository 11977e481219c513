"""Host memory that grows slowly, piece by piece, in a thread.

Pinning memory holds up every process on the device. So a piece is small, a pause follows, and finished pieces are in
use while others are made. If host memory runs short, the room stays as large as it is.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from common.base.errors import MemoryShort
from common.memory.base.host_ram import available_bytes, ram_bytes
from common.memory.devices.backing import HostPiece

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * 1024 * 1024
LEFT_SHARE = 16
"""Left to other processes: 1/16 of the host's memory."""
END_S = 5.0
"""Longest wait for the thread at the end."""


class HostRoom:
    """Pieces of host memory, up to `num_bytes`.

    Args:
        num_bytes: of all pieces.
        make: makes a piece of so many bytes, in the room's thread; raises MemoryShort.
        pause: pause after a piece, as a multiple of its duration.
        left_bytes: returns the bytes that pieces may still take.
    """

    def __init__(
        self,
        num_bytes: int,
        make: Callable[[int], HostPiece],
        *,
        pause: float = 0.0,
        left_bytes: Callable[[], int] = lambda: available_bytes() - ram_bytes() // LEFT_SHARE,
    ) -> None:
        self.piece_bytes = min(PIECE_BYTES, num_bytes)
        self.num_pieces = num_bytes // self.piece_bytes
        self.pieces: list[HostPiece] = []
        self._make, self._pause, self._left_bytes = make, pause, left_bytes
        self._made: SimpleQueue[HostPiece] = SimpleQueue()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, unless started already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host memory", daemon=True)
            self._thread.start()

    def grow(self) -> int:
        """Take over new pieces; return their number."""
        num_before = len(self.pieces)
        while not self._made.empty():
            self.pieces.append(self._made.get())
        return len(self.pieces) - num_before

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces taken over."""
        return len(self.pieces) * self.piece_bytes

    @property
    def is_made(self) -> bool:
        """Tell whether the thread has ended, so no piece will come."""
        return self._thread is not None and not self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread and free all pieces."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(END_S)
        self.grow()
        while self.pieces:
            self.pieces.pop().close()

    def _run(self) -> None:
        begun_s, num_made, problem = time.monotonic(), 0, ""
        while num_made < self.num_pieces and not (problem or self._is_over.is_set()):
            piece_s = time.monotonic()
            problem = self._make_one()
            num_made += not problem
            self._is_over.wait(self._pause * (time.monotonic() - piece_s))
        num_bytes, took_s = num_made * self.piece_bytes, time.monotonic() - begun_s
        if problem:
            logger.warning("the host tier stays at %.2f GB: %s", num_bytes / 1e9, problem)
        else:
            logger.info("the host tier has its %.2f GB of host memory, after %.1f s", num_bytes / 1e9, took_s)

    def _make_one(self) -> str:
        """Make a piece; return the problem, or ""."""
        if (left := self._left_bytes()) < self.piece_bytes:
            return f"{max(0, left) / 1e9:.2f} GB more of host memory can be had; lower memory.host_tier_bytes"
        try:
            self._made.put(self._make(self.piece_bytes))
        except MemoryShort as short:
            return str(short)
        return ""
