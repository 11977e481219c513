"""Tells the router of a memory server: that it is there, how full it is, and whose process has ended.

Never waits, and has no thread: the server's loop calls `tend` at each turn. Nothing that a router says is urgent here,
so its sockets are looked at then and not selected, as their descriptors tell of a message once only. Without a router
the server serves all the same.
"""

import logging
import math
import time
from collections.abc import Callable

import zmq

from common.config import NetSection
from common.wire.endpoints import ROUTER_SOCKET, resolved
from common.wire.memory_reports import MemoryHeartbeat, MemoryReady, WorkerEnded
from common.wire.messages import Knock, Message, Refused, Reregister, Welcome
from common.wire.operator_messages import Leave
from common.wire.sockets import Spoke
from common.wire.worker_id import BEAT_SUFFIX, connection_of

logger = logging.getLogger(__name__)

LAST_WORDS_MS = 200
COMPLAINT_S = 10.0
"""Without an answer, after which the log says so, once: a router with another secret does not even refuse."""


class Announcer:
    """Dials on construction; raises ConfigError for an endpoint that cannot be dialed."""

    def __init__(self, net: NetSection, ready: MemoryReady) -> None:
        self.ready = ready
        self.heartbeat_s = net.heartbeat_s
        self.endpoint = resolved(net.router_endpoint, ROUTER_SOCKET)
        self.is_refused = self.is_dismissed = False
        self.beaten_s = time.monotonic()
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
        return max(0.0, self.beaten_s + self.heartbeat_s - time.monotonic())

    def tend(self, heartbeat: Callable[[], MemoryHeartbeat]) -> None:
        """Heed what the router said, and say that this server is alive, if it is time."""
        for spoke in (self.main, self.beat):
            for message in spoke.receive():
                self._heed(spoke, message)
        now_s = time.monotonic()
        if now_s > self.complain_s:
            self._complain()
        if not self.due_s:
            self.beaten_s = now_s
            if not self.is_refused:
                self.beat.send(heartbeat())

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
            "no answer yet from a router at %s; is one running, with the same net.secret_file? Workers are served "
            "all the same", self.endpoint,
        )  # fmt: skip

    def _heed(self, spoke: Spoke, message: Message) -> None:
        match message:
            case Welcome():
                self.complain_s = math.inf
                logger.info("registered with the router at %s", self.endpoint)
            case Reregister():
                self.announce()
            case Refused() if not self.is_refused:
                self.is_refused = True
                logger.error("the router refused this memory server, which serves without it: %s", message.reason)
            case Leave():
                self.is_dismissed = True
                logger.info("leaving: %s", message.reason)
            case Knock() | Refused():
                pass
            case _:
                spoke.refuse(message, "no memory server receives it")
