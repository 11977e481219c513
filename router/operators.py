"""What operators ask for: that a worker or memory server finishes what it has, and ends."""

import logging
from collections.abc import Callable

from common.wire.messages import Message
from common.wire.operator_messages import DrainAnswer, DrainWanted, Leave
from router.dispatcher import Dispatcher
from router.memory_servers import MemoryServers
from router.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

REASON = "an operator asked for it (baton drain)"


class Operators:
    """Answers each; remembers nobody.

    Args:
        send: queues a message for a connection.
    """

    def __init__(
        self,
        pool: WorkerPool,
        memory_servers: MemoryServers,
        dispatcher: Dispatcher,
        send: Callable[[bytes, Message], bool],
    ) -> None:
        self._pool, self._memory_servers, self._dispatcher, self._send = pool, memory_servers, dispatcher, send

    def on_drain(self, identity: bytes, wanted: DrainWanted) -> None:
        """Have who is named leave, unless it does, and say how many requests need it."""
        if (worker := self._pool.find(wanted.name)) is not None:
            if wanted.incarnation in (0, worker.epoch) and not worker.draining:
                logger.info("%s is asked to leave: %s", worker, REASON)
                self._send(worker.connection, Leave(REASON))
            num_requests = len(self._dispatcher.needing(worker))
            self._send(identity, DrainAnswer(wanted.name, worker.epoch, num_requests))
        elif (server := self._memory_servers.find(wanted.name)) is not None:
            if wanted.incarnation in (0, server.ready.epoch):
                logger.info("%s is asked to leave: %s", server, REASON)
                self._send(server.connection, Leave(REASON))
            self._send(identity, DrainAnswer(wanted.name, server.ready.epoch, 0))
        else:
            self._send(identity, DrainAnswer(wanted.name, 0, 0))
