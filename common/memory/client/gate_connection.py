"""A worker's connection to the memory server of another host's pool, through the gate there.

No kernel tells of the death of another host. So questions are asked more often than within a host, and
`net.worker_timeout_s` without an answer is a loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from common.base.errors import ConfigError, MemoryLost, WireError
from common.memory.base.nixl_agent import ucx_transports
from common.memory.base.slots import Slots
from common.memory.client.connection import Arrived
from common.memory.client.stager import Stager
from common.settings.config import NetSection
from common.wire.messages.frames import decode, encode
from common.wire.messages.gates import GateFrame, GateOver, GateVisit, PoolLent
from common.wire.messages.memory import MemoryMessage, MemoryRefused, MemoryVisit
from common.wire.messages.worker import Message
from common.wire.messages.worker_id import connection_of, make_epoch
from common.wire.transport.sockets import Spoke

MAX_UNANSWERED = 5
FAREWELL_MS = 200


@dataclass(frozen=True, slots=True)
class Gate:
    """The place of another host's pool."""

    endpoint: str
    net: NetSection
    context: "zmq.Context[zmq.Socket[bytes]]" = field(default_factory=zmq.Context.instance)
    slots: Slots | None = None  # of staging; None to read the pool itself

    def dial(self, greeting: MemoryVisit) -> "GateConnection":
        """Open a visit; raises MemoryLost if the endpoint cannot be dialed."""
        try:
            return GateConnection(self, greeting)
        except ConfigError as error:
            raise MemoryLost(f"gate {self.endpoint}: {error}") from None


class GateConnection:
    """A visit; see `Connection`. Claims end with the visit, on either side's word or silence."""

    is_sending, has_ended, num_unsent_bytes = False, False, 0
    max_unanswered = MAX_UNANSWERED

    def __init__(self, gate: Gate, greeting: MemoryVisit) -> None:
        self.gate, self.visit = gate, make_epoch()
        self.ask_s = gate.net.worker_timeout_s / (MAX_UNANSWERED + 1)
        self._num_sent = self._num_received = 0
        self._identity = connection_of(greeting.worker_id, greeting.epoch) + f"/{self.visit:x}".encode()
        self.spoke = Spoke(gate.context, gate.net, gate.endpoint, self._identity)
        transports = ucx_transports(gate.net.ucx_transports)
        slots = gate.slots or (0, 0)
        self.spoke.send(GateVisit(greeting.worker_id, greeting.epoch, self.visit, greeting.pool_id, transports, *slots))

    @property
    def pollable(self) -> "zmq.Socket[bytes]":
        """Readable when a message has come."""
        return self.spoke.socket

    def send(self, message: MemoryMessage) -> None:
        self.spoke.send(GateFrame(self.visit, self._num_sent, encode(message)))
        self._num_sent += 1

    def receive(self) -> Iterator[Arrived]:
        """Yield arrived messages; raises ConfigError for a refusal, and MemoryLost at the end."""
        for message in self.spoke.receive():
            match message:
                case PoolLent() if message.visit == self.visit:
                    yield message, None
                case GateFrame() if message.visit == self.visit:
                    yield self._opened(message), None
                case GateOver() if message.visit == self.visit:
                    raise MemoryLost(self.problem(message.reason))
                case _:
                    self.spoke.refuse(message, "it is of no visit of this worker")

    def stager(self) -> "Stager":
        """Open a socket for staging, to be used and closed by one thread; raises MemoryLost."""
        try:
            spoke = Spoke(self.gate.context, self.gate.net, self.gate.endpoint, self._identity + b"/staging")
        except ConfigError as error:
            raise MemoryLost(self.problem(str(error))) from None
        return Stager(spoke, self.visit)

    def problem(self, what: str) -> str:
        """Prefix `what` with the gate's endpoint, for an error message."""
        return f"gate {self.gate.endpoint}: {what}"

    def close(self) -> None:
        self.spoke.send(GateOver(self.visit, "the worker needs it no more"))
        self.spoke.close(linger_ms=FAREWELL_MS)

    def _opened(self, carried: GateFrame) -> Message:
        number, self._num_received = self._num_received, self._num_received + 1
        if carried.number != number:
            raise MemoryLost(self.problem(f"messages {number} to {carried.number - 1} got lost"))
        try:
            message = decode(carried.frame)
        except WireError as error:
            raise MemoryLost(self.problem(str(error))) from None
        if isinstance(message, MemoryRefused):
            raise ConfigError(self.problem(message.reason))
        return message
