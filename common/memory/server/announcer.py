"""Tells the router of a memory server: that it is there, how full it is, whose process has ended, which blocks it has.

Never waits, and has no thread: the server's loop calls `tend` at each turn. Nothing that a router says is urgent here,
so its sockets are looked at then and not selected, as their descriptors tell of a message once only. Without a router
the server serves all the same.
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

LAST_WORDS_MS = 200
EVENTS_S = 0.01
"""Between two messages of blocks: often enough for where the next prompt goes, and nobody pays block by block."""
COMPLAINT_S = 10.0
"""Without an answer, after which the log says so, once: a router with another secret does not even refuse."""


class Announcer:
    """Dials on construction; raises ConfigError for an endpoint that cannot be dialed.

    `log_of` is the server's to set: what becomes of blocks of a pool, by its id, if there is such a pool.
    """

    def __init__(self, net: NetSection, ready: MemoryReady) -> None:
        self.ready = ready
        self.heartbeat_s = net.heartbeat_s
        self.endpoint = resolved(net.router_endpoint, ROUTER_SOCKET)
        self.is_refused = self.is_dismissed = False
        self.log_of: Callable[[int], EventLog | None] = lambda pool_id: None
        self.logs: dict[int, EventLog] = {}  # of pools that the router wants to hear of
        self.timeout_s = net.worker_timeout_s
        self.beaten_s = self.heard_s = self.told_s = time.monotonic()
        self.complain_s = self.beaten_s + COMPLAINT_S
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = connection_of(ready.server_id, ready.epoch)
        try:
            self.main = Spoke(self.context, net, self.endpoint, identity)
            self.beat = Spoke(self.context, net, self.endpoint, identity + BEAT_SUFFIX, keep_last=True)
        except BaseException:
            self.context.destroy(linger=0)
            raise

    def announce(self) -> None:
        """Register; from now on call `tend`."""
        self.main.send(self.ready)

    @property
    def due_s(self) -> float:
        """Seconds until `tend` has something to say."""
        due_s = self.beaten_s + self.heartbeat_s
        if any(log.has_news for log in self.logs.values()):
            due_s = min(due_s, self.told_s + EVENTS_S)
        return max(0.0, due_s - time.monotonic())

    def tend(self, heartbeat: Callable[[], MemoryHeartbeat]) -> None:
        """Heed what the router said, and say that this server is alive, if it is time."""
        for spoke in (self.main, self.beat):
            for message in spoke.receive():
                self._heed(spoke, message)
        now_s = time.monotonic()
        if now_s > self.complain_s:
            self._complain()
        is_beat = now_s >= self.beaten_s + self.heartbeat_s
        if is_beat:
            self.beaten_s = now_s
            if not self.is_refused:
                self.beat.send(heartbeat())
        if is_beat or now_s >= self.told_s + EVENTS_S:
            self._tell_events(now_s, is_beat)

    def tell_ended(self, worker_id: str, epoch: int) -> None:
        """A worker has hung up: at once, as its streams wait for another."""
        if not self.is_refused:
            self.main.send(WorkerEnded(self.ready.server_id, self.ready.epoch, worker_id, epoch))

    def close(self) -> None:
        self.beat.close()
        self.main.close(linger_ms=LAST_WORDS_MS)
        self.context.term()

    def _complain(self) -> None:
        self.complain_s = math.inf
        logger.warning(
            "no answer yet from a router at %s; is one running, of this version, %s, with the same net.secret_file? "
            "Workers are served all the same", self.endpoint, VERSION,
        )  # fmt: skip

    def _tell_events(self, now_s: float, is_beat: bool) -> None:
        """Of blocks that came or went; with a heartbeat even of none, so that the router notices what it missed."""
        if now_s - self.heard_s > self.timeout_s:
            self._stop_telling()  # it will ask again, if it lives; till then nothing is to pile up
        for pool_id, log in list(self.logs.items()):
            if not log.is_on:
                del self.logs[pool_id]
            elif is_beat or log.has_news:
                self.told_s = now_s
                self.main.send(KVEvents(self.ready.server_id, self.ready.epoch, pool_id, *log.take()))

    def _stop_telling(self) -> None:
        for log in self.logs.values():
            log.stop()
        self.logs.clear()

    def _begin_to_tell(self, pool_id: int) -> None:
        """From the beginning, if there is that pool and has not been given back meanwhile."""
        if (log := self.log_of(pool_id)) is not None:
            log.begin()
            self.logs[pool_id] = log

    def _heed(self, spoke: Spoke, message: Message) -> None:
        self.heard_s = time.monotonic()
        match message:
            case Welcome():
                self.complain_s = math.inf
                logger.info("registered with the router at %s", self.endpoint)
            case Reregister():
                self._stop_telling()
                self.announce()
            case KVEventsWanted():
                self._begin_to_tell(message.pool_id)
            case Refused() if not self.is_refused:
                self.is_refused = True
                self._stop_telling()
                logger.error("the router refused this memory server, which serves without it: %s", message.reason)
            case Leave():
                self.is_dismissed = True
                logger.info("leaving: %s", message.reason)
            case Knock() | Refused():
                pass
            case _:
                spoke.refuse(message, "no memory server receives it")
