"""Connections of clients to a memory server: accepted, read, written, and closed without waiting."""

import itertools
import logging
import math
import selectors
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.memory.base.channel import Channel, Gone, HungUp
from common.memory.base.poller import AwakeSelector
from common.memory.blocks.answers import Answer
from common.memory.server.listener import Listener
from common.memory.server.processes import Processes
from common.wire.messages.memory import PoolWanted, WeightsWanted
from common.wire.messages.memory_reports import MAX_CLIENTS

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Client:
    """A connection, of a worker after its greeting."""

    number: int
    channel: Channel
    process: int
    received_s: float  # time of the last message, or of the connection
    worker: tuple[str, int] | None = None  # id and epoch, after the greeting
    is_decoding: bool = False
    is_peer: bool = False  # reads a pool, and leases no blocks
    wanted: WeightsWanted | PoolWanted | None = None  # memory that the client waits for
    wanted_until_s: float = math.inf
    is_running: bool = False  # has knocked: its loop runs, and knocks again and again
    gone: Gone | None = None  # reason to drop the client
    ended_s: float = math.inf  # time of the connection's end

    def __str__(self) -> str:
        return f"{self.worker[0]}.{self.worker[1]:x}" if self.worker else f"process {self.process}"


class Connections:
    """Connected clients by number.

    Args:
        processes: wakes the server at the end of a client's process.
        awake_s: time for which the server stays awake after a message.
    """

    def __init__(self, listener: Listener, processes: Processes, awake_s: float) -> None:
        self.clients: dict[int, Client] = {}
        self._listener = listener
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._awake = AwakeSelector(self._selector, awake_s)
        for source in (listener, processes):
            self._selector.register(source, selectors.EVENT_READ)

    def wait(self, wait_s: float) -> Iterator[Client]:
        """Accept new clients; yield clients with messages, or with room for unsent messages."""
        for key in self._awake.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (client := self.clients.get(key.data)) is not None:
                yield client

    def send(self, answers: Iterable[Answer]) -> None:
        """Send answers to their clients; a client that does not read is marked as gone."""
        for answer in answers:
            client = self.clients[answer.client]
            try:
                client.channel.send(answer.message, answer.descriptor)
            except HungUp:
                logger.debug("%s is gone; its end is read next", client)
            except Gone as gone:
                client.gone = gone  # dropped in the next turn, because another client's end may be in progress

    def flush(self, client: Client) -> None:
        """Go on sending; raises Gone. After a hang-up the client's last messages are still read before the end."""
        try:
            client.channel.flush()
        except HungUp:
            client.channel.unsent.clear()

    def select(self, client: Client) -> None:
        """Select a client for reading, and for writing if messages are unsent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.channel.unsent else 0)
        if self._selector.get_key(client.channel).events != events:
            self._selector.modify(client.channel, events, client.number)

    def remove(self, client: Client) -> None:
        self._selector.unregister(client.channel)
        client.channel.close()
        del self.clients[client.number]

    def close(self) -> None:
        self._listener.close()
        for client in self.clients.values():
            client.channel.close()
        self._selector.close()

    def _accept(self) -> None:
        if (accepted := self._listener.accept()) is None:
            return
        connection, process = accepted
        if len(self.clients) >= MAX_CLIENTS:
            logger.warning("a connection of process %d is refused: there are %d", process, MAX_CLIENTS)
            connection.close()
            return
        number = next(self._numbers)
        channel = Channel(connection)
        self.clients[number] = Client(number, channel, process, time.monotonic())
        self._selector.register(channel, selectors.EVENT_READ, number)
