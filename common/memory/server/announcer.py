"""Messages of a memory server to the router: registration, heartbeats, ended workers, block events.

The announcer never waits, and has no thread: the server's loop calls `update` at each turn. `update` polls the sockets,
because a ZeroMQ descriptor signals a message only once, and nothing from the router is urgent. Without a router the
server serves all the same.
"""

import logging
import math
import time
from collections.abc import Callable

import zmq

from common.base.version import VERSION
from common.memory.blocks.event_log import EventLog
from common.settings.config import NetSection
from common.wire.messages.memory_reports import KVEvents, MemoryHeartbeat, MemoryReady, WorkerEnded
from common.wire.messages.operator import Leave
from common.wire.messages.worker import Knock, KVEventsWanted, Message, Refused, Reregister, Welcome
from common.wire.messages.worker_id import BEAT_SUFFIX, connection_of
from common.wire.transport.endpoints import ROUTER_SOCKET, resolved
from common.wire.transport.sockets import Spoke

logger = logging.getLogger(__name__)

FLUSH_MS = 200
EVENTS_S = 0.01
"""Time between two messages of block events: soon enough for routing, without a cost per block."""
WARN_S = 10.0
"""Silence before a single warning, because a router with another secret never answers."""


class Announcer:
    """Connection of a memory server to the router; raises ConfigError for an invalid endpoint.

    The server sets `log_of`, which returns the event log of a pool id, or None.
    """

    def __init__(self, net: NetSection, ready: MemoryReady) -> None:
        self.ready = ready
        self.heartbeat_s = net.heartbeat_s
        self.endpoint = resolved(net.router_endpoint, ROUTER_SOCKET)
        self.is_refused = self.is_leaving = False
        self.log_of: Callable[[int], EventLog | None] = lambda pool_id: None
        self.logs: dict[int, EventLog] = {}  # of pools requested by the router
        self.timeout_s = net.worker_timeout_s
        self.beat_s = self.received_s = self.events_sent_s = time.monotonic()
        self.announced_s = -math.inf
        self.warn_s = self.beat_s + WARN_S
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = connection_of(ready.server_id, ready.epoch)
        try:
            self.main = Spoke(self.context, net, self.endpoint, identity)
            self.beat = Spoke(self.context, net, self.endpoint, identity + BEAT_SUFFIX, keep_last=True)
        except BaseException:
            self.context.destroy(linger=0)
            raise

    def announce(self) -> None:
        """Register with the router; call `update` from now on."""
        self.announced_s = time.monotonic()
        self.main.send(self.ready)

    @property
    def due_s(self) -> float:
        """Seconds until `update` has something to send."""
        due_s = self.beat_s + self.heartbeat_s
        if any(log.has_news for log in self.logs.values()):
            due_s = min(due_s, self.events_sent_s + EVENTS_S)
        return max(0.0, due_s - time.monotonic())

    def update(self, heartbeat: Callable[[], MemoryHeartbeat]) -> None:
        """Handle the router's messages; send heartbeats and block events when due."""
        for spoke in (self.main, self.beat):
            for message in spoke.receive():
                self._handle(spoke, message)
        now_s = time.monotonic()
        if now_s > self.warn_s:
            self._warn_of_silence()
        is_beat = now_s >= self.beat_s + self.heartbeat_s
        if is_beat:
            self.beat_s = now_s
            if not self.is_refused:
                self.beat.send(heartbeat())
        if is_beat or now_s >= self.events_sent_s + EVENTS_S:
            self._send_events(now_s, is_beat)

    def report_ended(self, worker_id: str, epoch: int) -> None:
        """Report the end of a worker at once, because its streams wait for a replay."""
        if not self.is_refused:
            self.main.send(WorkerEnded(self.ready.server_id, self.ready.epoch, worker_id, epoch))

    def close(self) -> None:
        self.beat.close()
        self.main.close(linger_ms=FLUSH_MS)
        self.context.term()

    def _warn_of_silence(self) -> None:
        self.warn_s = math.inf
        logger.warning(
            "no answer yet from a router at %s; is one running, of this version, %s, with the same net.secret_file? "
            "Workers are served all the same", self.endpoint, VERSION,
        )  # fmt: skip

    def _send_events(self, now_s: float, is_beat: bool) -> None:
        """Send block events; a heartbeat sends even an empty message, so the router notices losses."""
        if now_s - self.received_s > self.timeout_s:
            self._stop_logs()  # a live router asks again; until then events must not pile up
        for pool_id, log in list(self.logs.items()):
            if not log.is_on:
                del self.logs[pool_id]
            elif is_beat or log.has_news:
                self.events_sent_s = now_s
                self.main.send(KVEvents(self.ready.server_id, self.ready.epoch, pool_id, *log.take()))

    def _stop_logs(self) -> None:
        for log in self.logs.values():
            log.stop()
        self.logs.clear()

    def _begin_log(self, pool_id: int) -> None:
        """Begin the log of a pool, if the pool exists."""
        if (log := self.log_of(pool_id)) is not None:
            log.begin()
            self.logs[pool_id] = log

    def _handle(self, spoke: Spoke, message: Message) -> None:
        self.received_s = time.monotonic()
        match message:
            case Welcome():
                self.warn_s = math.inf
                logger.info("registered with the router at %s", self.endpoint)
            case Reregister() if self.received_s - self.announced_s > self.heartbeat_s / 2:
                self._stop_logs()
                self.announce()
            case KVEventsWanted():
                self._begin_log(message.pool_id)
            case Refused() if not self.is_refused:
                self.is_refused = True
                self._stop_logs()
                logger.error("the router refused this memory server, which serves without it: %s", message.reason)
            case Leave():
                self.is_leaving = True
                logger.info("leaving: %s", message.reason)
            case Knock() | Refused() | Reregister():
                pass  # behind a link that was cut, heartbeats have waited, and the router answers each
            case _:
                spoke.refuse(message, "no memory server receives it")
