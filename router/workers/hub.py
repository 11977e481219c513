"""asyncio wrapper around `common.wire.transport.sockets.Hub`.

ZeroMQ's descriptor is edge-triggered: the descriptor turns readable once for any number of messages, and a send may
swallow the edge. Invariant: another receive is scheduled after every send, and after every receive that left messages.
So no message waits for the next edge.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from common.settings.config import NetSection
from common.wire.messages.worker import Knock, Message
from common.wire.messages.worker_id import is_from
from common.wire.transport.sockets import Hub
from router.dispatch.incidents import Incidents

logger = logging.getLogger(__name__)

LINGER_MS = 200
MAX_TURN_S = 0.005
"""Longest handling of messages before clients have a turn."""

MAX_WORKER_FRAME_BYTES = 1 << 20
"""Limit, because large frames hold up every stream; a step of 1024 rows is 50 kB."""

Handler = Callable[[bytes, Any], None]
"""Function to handle a message, given the connection's identity."""
Handlers = Mapping[type[Message], Handler]
Undelivered = list[tuple[bytes, Message]]
OnUnreachable = Callable[[Undelivered], None]
SendTo = Callable[[bytes, Message], bool]
"""Function to queue a message for a connection; returns False when the connection is gone."""


class AsyncHub:
    """Hub on the event loop; calls a message type's handler for every received message.

    A message without a handler is dropped, and so is a message in the name of another than the connection's owner.

    Messages sent to lost connections are soon reported to `on_unreachable`, with the identities.
    """

    def __init__(self, net: NetSection, endpoint: str, max_frame_bytes: int = MAX_WORKER_FRAME_BYTES) -> None:
        """Bind; raise ConfigError when the endpoint cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._hub = Hub(self._context, net, endpoint, max_frame_bytes=max_frame_bytes)
        except BaseException:  # whatever the error, close the context of an unfinished hub
            self._context.destroy(linger=0)
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handlers: Handlers = {}
        self._on_unreachable: OnUnreachable | None = None
        self._scheduled = False
        self._undelivered: Undelivered = []

    @property
    def endpoint(self) -> str:
        return self._hub.endpoint

    @property
    def num_dropped(self) -> int:
        """Number of frames dropped here, received or sent."""
        return self._hub.drops.dropped

    def start(self, handlers: Handlers, on_unreachable: OnUnreachable) -> None:
        """Begin to receive; call once, on the event loop."""
        self._handlers, self._on_unreachable = handlers, on_unreachable
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._hub.socket.fileno(), self._receive)
        self._schedule()

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue a message for a worker, without waiting; return False when the connection is gone."""
        is_connected = self._hub.send(identity, message)
        if not is_connected and self._loop is not None:
            if not self._undelivered:
                self._loop.call_soon(self._report_undelivered)  # later, because the sender may be mid-change
            self._undelivered.append((identity, message))
        self._schedule()
        return is_connected

    def refuse(self, identity: bytes, message: Message, why: str) -> None:
        """Drop a received message; counted, and logged at a bounded rate."""
        self._hub.refuse(identity, message, why)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._hub.socket.fileno())
            self._loop = None
        self._hub.close(linger_ms=LINGER_MS)
        self._context.destroy(linger=0)

    def _report_undelivered(self) -> None:
        undelivered, self._undelivered = self._undelivered, []
        if self._on_unreachable is not None:
            self._on_unreachable(undelivered)

    def _schedule(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._scheduled = False
        if self._loop is None:
            return  # closed meanwhile
        until_s = time.monotonic() + MAX_TURN_S
        for identity, message in self._hub.receive():
            try:
                self._handle(identity, message)
            except Exception:  # a bug in handling a message must not cut off all workers
                logger.exception("handling %s from %r failed", type(message).__name__, identity[:60])
            if time.monotonic() > until_s:
                break
        if self._hub.socket.poll(0, zmq.POLLIN):
            self._schedule()

    def _handle(self, identity: bytes, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self.refuse(identity, message, "a router does not receive it")
        elif not is_from(identity, message):
            self.refuse(identity, message, "not in the name of whose connection it is")
        else:
            handler(identity, message)


@dataclass(frozen=True, slots=True)
class Links:
    """Connections of the router to workers and memory servers, with their time limits and the log of incidents."""

    net: NetSection
    router_epoch: int
    send: SendTo
    clock: Callable[[], float] = time.monotonic
    incidents: Incidents = field(default_factory=Incidents)

    def knock(self, connection: bytes) -> bool:
        """Send a knock; return whether the connection exists."""
        return self.send(connection, Knock(self.router_epoch))
