"""Answers waiting for readers: counts unread bytes, and cuts off clients.

Every wait for a client has a bound. A connection ends if its client reads nothing for long. The unread bytes of all
clients together are limited, and so are the bytes of each client. Beyond a limit, the largest answer of the client with
most unread bytes is cut off.
"""

import asyncio
import contextlib
import fcntl
import logging
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""Time after which a client reading nothing is cut off."""
REST_S = 0.25
"""Time between two writes of a stream to a slow client."""
CLIENT_SHARE = 4
"""Divisor of `max_unread_bytes` for the limit of a single client."""
PATIENCE_S = 10.0
"""Least age of a waiting answer before a cut for size."""
MAX_CHECK_S = 1.0


class Reason(StrEnum):
    STALLED = "stalled"  # the client has read nothing for long
    SIZE = "size"  # too many bytes were unread


@dataclass(slots=True, eq=False)
class UnreadAnswer:
    """An answer with more bytes than its connection takes at once."""

    transport: asyncio.Transport
    client: str
    stall_s: float  # longest time without a read
    since_s: float
    read_s: float  # time of the client's last known read
    num_left: int = 0  # bytes at the last look, including the kernel's, and later writes

    @property
    def num_bytes(self) -> int:
        """Bytes held by the process."""
        return self.transport.get_write_buffer_size()

    def check(self, now_s: float) -> None:
        """Note whether the client has read anything."""
        num_left = self.num_bytes + _num_sent_bytes(self.transport)
        if num_left < self.num_left:
            self.read_s = now_s
        self.num_left = num_left


class Unread(Collector):
    """All waiting answers. Transports stay owned by the connections."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._waiting: set[UnreadAnswer] = set()
        self._num_cut: Counter[Reason] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all waiting answers held by the process."""
        return sum(each.num_bytes for each in self._waiting)

    def begin(self, transport: asyncio.Transport, client: str, stall_s: float) -> UnreadAnswer:
        """Watch an answer until `end`; the transport may be aborted meanwhile."""
        now_s = self._clock()
        waiting = UnreadAnswer(transport, client, stall_s, now_s, now_s)
        waiting.check(now_s)
        self._waiting.add(waiting)
        self._check_later()
        return waiting

    def end(self, waiting: UnreadAnswer) -> None:
        """Forget an answer after the last read or a lost connection."""
        self._waiting.discard(waiting)

    def check(self) -> None:
        """Cut off clients reading nothing, and answers beyond the limits of size."""
        now_s = self._clock()
        for each in list(self._waiting):
            each.check(now_s)
            if now_s - each.read_s >= each.stall_s:
                self._cut(each, Reason.STALLED, f"its reader has read nothing for {each.stall_s:g} s")
        while (largest := self._too_large(now_s)) is not None:
            limit = (
                f"at most router.max_unread_bytes = {self._max_bytes}, or {self._max_bytes // CLIENT_SHARE} of a client"
            )
            self._cut(largest, Reason.SIZE, f"{self.num_bytes} bytes are unread, {limit}")

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("baton_unread_bytes", "of answers that wait for their readers", value=self.num_bytes)
        yield GaugeMetricFamily("baton_unread_answers", "answers that wait for their readers", value=len(self._waiting))
        family = CounterMetricFamily(
            "baton_unread_answers_cut",
            "answers ended because nobody read them, or too much was unread",
            labels=["reason"],
        )
        for reason in Reason:
            family.add_metric([reason.value], self._num_cut[reason])
        yield family

    def _check_later(self) -> None:
        if self._timer is None and self._waiting:
            check_s = min(MAX_CHECK_S, *(each.stall_s / 4 for each in self._waiting))
            self._timer = asyncio.get_running_loop().call_later(check_s, self._check_again)

    def _check_again(self) -> None:
        self._timer = None
        self.check()
        self._check_later()

    def _too_large(self, now_s: float) -> UnreadAnswer | None:
        """Return the largest answer of the client with most unread bytes; None within the limits.

        Answers younger than `PATIENCE_S` are spared.
        """
        held: Counter[str] = Counter()
        for each in self._waiting:
            held[each.client] += each.num_bytes
        if held.total() <= self._max_bytes and max(held.values(), default=0) * CLIENT_SHARE <= self._max_bytes:
            return None
        late = [each for each in self._waiting if now_s - each.since_s >= PATIENCE_S]
        return max(late, key=lambda each: (held[each.client], each.num_bytes), default=None)

    def _cut(self, waiting: UnreadAnswer, reason: Reason, why: str) -> None:
        logger.warning("an answer with %d unread bytes is cut off: %s", waiting.num_bytes, why)
        self._num_cut[reason] += 1
        self._waiting.discard(waiting)
        waiting.transport.abort()


class Output:
    """Bytes of a connection on the way to the client, watched while the write buffer is full."""

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._waiting: UnreadAnswer | None = None
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self.client = ""
        """Client charged for unread bytes: the address, or the client named by a request."""

    def pause(self, transport: asyncio.Transport | None) -> None:
        """Begin to watch a full write buffer, because the client reads slowly or not at all."""
        self._is_writable.clear()
        self.watch(transport)

    def watch(self, transport: asyncio.Transport | None) -> None:
        """Watch the bytes of a transport, unless lost."""
        if self._waiting is None and transport is not None:
            self._waiting = self._unread.begin(transport, self.client, WRITE_S)

    def resume(self) -> None:
        """End the watch after the client has read, or has gone."""
        self._is_writable.set()
        if self._waiting is not None:
            self._unread.end(self._waiting)
            self._waiting = None

    @property
    def is_full(self) -> bool:
        """True while the client has yet to read most pending bytes."""
        return not self._is_writable.is_set()

    def write(self, transport: asyncio.Transport | None, data: bytes, *, is_chunked: bool) -> None:
        """Write a part of a begun response without waiting for the client, because unread bytes have separate bounds.

        A part goes to the transport in one call, because thousands pass a second. Raises ConnectionError when the
        client is gone.
        """
        if transport is None or transport.is_closing():
            raise ConnectionError("the client is gone")
        if not data:
            return  # an empty chunk would end the response
        if is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)
        if self._waiting is not None:
            self._waiting.num_left += len(data)

    async def rest(self) -> None:
        """Wait until the client has read most pending bytes, for `REST_S` at most.

        Deliveries gather meanwhile, so fewer events follow.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._is_writable.wait()


def _num_sent_bytes(transport: asyncio.Transport) -> int:
    """Return bytes in the kernel's queue, not yet acknowledged by the client's kernel."""
    connection = transport.get_extra_info("socket")
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), "little")
    except (OSError, ValueError):  # the connection is gone; a closed socket has descriptor -1
        return 0
