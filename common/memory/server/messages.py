"""Messages of clients to a memory server: a greeting first, then a handler for each message type."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from common.memory.base.channel import Gone
from common.memory.blocks.answers import Answer, ProtocolError
from common.memory.blocks.pool import User
from common.memory.server.allocations import Allocations
from common.memory.server.connections import Client
from common.memory.server.processes import Processes
from common.memory.server.staging import Stagings
from common.wire.messages.memory import (
    MemoryHello,
    MemoryKnock,
    MemoryRefused,
    MemoryTainted,
    MemoryVisit,
    MemoryWelcome,
    OfBlocks,
    OfPeers,
    PoolWanted,
    WeightsFilled,
    WeightsProgress,
    WeightsWanted,
)
from common.wire.messages.memory_reports import MemoryReady
from common.wire.messages.staging import BlocksStaging, StagingWanted
from common.wire.messages.worker import Message

logger = logging.getLogger(__name__)

Handler = Callable[[Client, Any], Iterable[Answer]]


class Messages:
    """Handlers of messages; `handle` raises ProtocolError, and Gone for a client to drop.

    Args:
        server: identity of the memory server.
        clients: connected clients by number.
        processes: takes the process descriptor of a worker.
    """

    def __init__(
        self,
        server: MemoryReady,
        clients: Mapping[int, Client],
        allocations: Allocations,
        processes: Processes,
        stagings: Stagings,
    ) -> None:
        self.gate = ""  # endpoint for workers of other hosts
        self.server, self.clients, self.allocations, self.processes = server, clients, allocations, processes
        self.regions, self.pools, self.stagings = allocations.regions, allocations.pools, stagings
        self._handlers: dict[type[Message], Handler] = {
            WeightsWanted: self._allocate,
            PoolWanted: self._allocate,
            WeightsProgress: lambda client, message: self.regions.progressed(client.number, message.num_filled),
            WeightsFilled: self._fill,
            MemoryKnock: self._knock,
            MemoryTainted: self._taint,
            StagingWanted: self._want_staging,
            BlocksStaging: lambda client, message: self.stagings.stage(client.number, message),
            **dict.fromkeys(get_args(OfBlocks), lambda client, message: self.pools.handle(client.number, message)),
        }

    def handle(self, client: Client, message: Message, descriptor: int | None) -> Iterable[Answer]:
        """Handle a message, and return answers to any clients; closes the descriptor."""
        if isinstance(message, MemoryHello):
            self.processes.add(client.number, descriptor)
            return self._greet(client, message)
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(message, MemoryVisit):
            return self._greet_peer(client, message)
        if client.worker is None:
            raise ProtocolError("it has not said who it is")
        handler = self._handlers.get(type(message))
        if handler is None or (client.is_peer and not isinstance(message, OfPeers)):
            raise ProtocolError(type(message).__name__)
        return handler(client, message)

    def _greet(self, client: Client, hello: MemoryHello | MemoryVisit) -> Iterable[Answer]:
        """Record a client's identity and send a welcome.

        An incarnation may have a single connection, because the end of a second would pass for the end of the worker.
        """
        worker = hello.worker_id, hello.epoch
        if client.worker or any(other.worker == worker for other in self.clients.values()):
            raise ProtocolError(f"{worker[0]}.{worker[1]:x} is connected already")
        client.worker, client.is_decoding = worker, isinstance(hello, MemoryHello) and hello.is_decoding
        client.channel.send(MemoryWelcome(self.server.server_id, self.server.epoch, self.gate))
        return ()

    def _greet_peer(self, client: Client, visit: MemoryVisit) -> Iterable[Answer]:
        self._greet(client, visit)
        client.is_peer = True
        answers = self.pools.visit(User(client.number, (visit.worker_id, visit.epoch), is_peer=True), visit.pool_id)
        if not answers:
            client.channel.send(MemoryRefused(f"there is no pool {visit.pool_id:x} here, or not any more"))
            raise Gone(f"it wants to visit a pool {visit.pool_id:x}")
        logger.info("%s is a peer, to pull KV blocks", client)
        return answers

    def _allocate(self, client: Client, message: WeightsWanted | PoolWanted) -> Iterable[Answer]:
        if client.wanted is not None:
            raise ProtocolError(type(message).__name__)
        return self.allocations.add(client, message)

    def _want_staging(self, client: Client, wanted: StagingWanted) -> Iterable[Answer]:
        pool = self.pools.of_client.get(client.number)
        return self.stagings.want(client.number, pool if client.is_peer else None, wanted)

    def _fill(self, client: Client, message: WeightsFilled) -> Iterable[Answer]:
        logger.info("%s has filled its region of %.2f GB", client, message.num_bytes / 1e9)
        return self.regions.filled(client.number)

    def _knock(self, client: Client, knock: MemoryKnock) -> Iterable[Answer]:
        client.is_running = True
        pool = self.pools.of_client.get(client.number)
        return [Answer(client.number, MemoryKnock(pool.num_done if pool is not None else 0))]

    def _taint(self, faulty: Client, message: MemoryTainted) -> list[Answer]:
        """Retire memory mapped by a client with a device fault, and tell its other users.

        A killed process has written only allowed memory. A faulty kernel may have written anywhere in the memory mapped
        by the process, other workers' blocks and weights included. So no new worker maps the memory, and all users stop
        at once. Requests are computed again from tokens.
        """
        sharers = self.regions.taint(faulty.number) | self.pools.taint(faulty.number)
        others = sorted((sharers - {faulty.number}) & self.clients.keys())
        logger.error(
            "%s met a fault of its device, and may have written anywhere in its weights and KV blocks: nobody new gets "
            "those, and these workers start again with others: %s. The fault: %s",
            faulty, ", ".join(str(self.clients[number]) for number in others) or "no other", message.problem,
        )  # fmt: skip
        problem = f"the device met a fault in {faulty}, which may have damaged what both map: {message.problem}"
        return [Answer(number, MemoryTainted(problem)) for number in others]
