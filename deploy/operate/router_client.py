"""Connection of an operator to a router, at the endpoint for workers, open only to the router's user or with the
secret.

HTTP is not used, because any client may connect there, and a full queue keeps operators out.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import zmq

from common.settings.config import NetSection
from common.wire.messages.operator import OperatorMessage
from common.wire.messages.worker import Message
from common.wire.messages.worker_id import connection_of, make_epoch, make_id
from common.wire.transport.endpoints import ROUTER_SOCKET, resolved
from common.wire.transport.sockets import Spoke

LINGER_MS = 1000
"""Milliseconds for a last message to get out."""

Answer = TypeVar("Answer", bound=Message)
Saying = Callable[[str, int], OperatorMessage]
"""Maker of a message in the name of an operator, given by id and epoch."""


class Operator:
    """A connection to a router; use `dialed`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", net: NetSection) -> None:
        self._id, self._epoch = make_id("operator", ""), make_epoch()
        identity = connection_of(self._id, self._epoch)
        self._spoke = Spoke(context, net, resolved(net.router_endpoint, ROUTER_SOCKET), identity)

    def send(self, saying: Saying) -> None:
        """Send a message without an answer."""
        self._spoke.send(saying(self._id, self._epoch))

    def ask(
        self, saying: Saying, kind: type[Answer], timeout_s: float, is_it: Callable[[Answer], bool] = lambda _: True
    ) -> Answer | None:
        """Send a message and wait for its answer; None after the timeout."""
        self.send(saying)
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            self._spoke.socket.poll(int(1000 * left_s) + 1)
            for message in self._spoke.receive():
                if isinstance(message, kind) and is_it(message):
                    return message
        return None

    def close(self) -> None:
        self._spoke.close(LINGER_MS)


@contextmanager
def dialed(net: NetSection) -> Iterator[Operator]:
    """Connect to the router of the endpoint, present or not."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        operator = Operator(context, net)
        try:
            yield operator
        finally:
            operator.close()
    finally:
        context.term()
