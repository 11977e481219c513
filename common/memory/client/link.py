"""Link of a worker to a memory server, which never raises: a loss sets `problem`, and later messages are dropped."""

import time
from collections.abc import Callable

from common.base.errors import MemoryLost
from common.memory.base.channel import MAX_UNSENT_BYTES
from common.memory.client.connection import Connection
from common.memory.client.gate_connection import GateConnection
from common.wire.messages.memory import KVDeclined, KVOffer, MemoryKnock, MemoryMessage

MANY_UNSENT_BYTES = MAX_UNSENT_BYTES // 16
"""Bound for new work; launched steps add far less than the rest up to the channel's limit."""


class ServerLink:
    """A worker's link to a memory server; never waits. Questions also tell the server of a live worker.

    `problem` is the reason of a loss, or "".
    """

    def __init__(self, connection: Connection | GateConnection, clock: Callable[[], float] = time.monotonic) -> None:
        self.connection, self.problem, self._clock = connection, "", clock
        self._is_told = False
        self._received_s = self._asked_s = clock()
        self._num_unanswered = 0  # questions since the last message

    def send(self, *messages: MemoryMessage) -> None:
        """Send messages, if the server is not lost."""
        for message in messages:
            if not self.problem:
                try:
                    self.connection.send(message)
                except MemoryLost as lost:
                    self.lose(str(lost))

    def decline(self, offer: KVOffer) -> None:
        """Decline an offer, so the server may lease its blocks."""
        self.send(KVDeclined(offer.request_id, offer.attempt))

    def keep_alive(self) -> None:
        """Ask whether the server is alive, when due; a long silence is a loss."""
        if self._clock() - self._asked_s > self.connection.ask_s:
            self._asked_s = self._clock()
            self._num_unanswered += 1
            self.send(MemoryKnock())
        if self._num_unanswered > self.connection.max_unanswered:
            silent_s = self._clock() - self._received_s
            self.lose(self.connection.problem(f"not a word for {silent_s:.0f} s"))

    def count_received(self) -> None:
        """Count a message from the server as an answer."""
        self._received_s, self._num_unanswered = self._clock(), 0

    def lose(self, problem: str) -> None:
        """Treat the server as lost; the first problem counts."""
        self.problem = self.problem or problem

    def take_problem(self) -> str:
        """Return the reason of a loss, once; afterwards the server must not be polled."""
        told, self._is_told = self._is_told, bool(self.problem)
        return "" if told else self.problem

    @property
    def is_sending(self) -> bool:
        """Tell whether messages are unsent; `receive` goes on sending."""
        return self.connection.is_sending and not self.problem

    @property
    def is_behind(self) -> bool:
        """Tell whether too much is unsent to begin more work, because the server has not read for a while."""
        return self.connection.num_unsent_bytes > MANY_UNSENT_BYTES and not self.problem
