"""asyncio wrapper around `Spoke` of `common.wire.transport.sockets`, as `router.workers.hub` is around `Hub`."""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from common.settings.config import NetSection
from common.wire.messages.worker import Message
from common.wire.transport.sockets import Spoke

logger = logging.getLogger(__name__)

LINGER_MS = 200
MAX_TURN_S = 0.005
"""Longest handling of messages before clients have a turn."""


class AsyncSpoke:
    """Connection to a hub on the event loop; calls `on_message` for every received message.

    Construct and close on the event loop.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        net: NetSection,
        endpoint: str,
        identity: bytes,
        on_message: Callable[[Message], None],
    ) -> None:
        self._spoke = Spoke(context, net, endpoint, identity)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._spoke.socket.fileno(), self._receive)
        self._scheduled = self._is_closed = False

    def send(self, message: Message) -> None:
        """Queue a message, without waiting."""
        self._spoke.send(message)
        self._schedule()

    def close(self) -> None:
        """Close the connection; `on_message` is not called any more."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._spoke.socket.fileno())
            self._spoke.close(LINGER_MS)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._scheduled = False
        if self._is_closed:
            return
        until_s = time.monotonic() + MAX_TURN_S
        for message in self._spoke.receive():
            try:
                self._on_message(message)
            except Exception:  # a bug in handling a message must not cut off all clients
                logger.exception("handling %s failed", type(message).__name__)
            if self._is_closed:
                return
            if time.monotonic() > until_s:
                break
        if self._spoke.socket.poll(0, zmq.POLLIN):
            self._schedule()
