"""A worker's connection to another pool's memory server: reads blocks there, and leases none.

    accept:        an offered block is claimed during the pull, until `free`.
    decline:       an offered block is the server's again.
    PromptBlocks:  blocks found by `look_up` are read during the pull, until `free`.

A pull counts only if the connection stands at its end. The end of the connection voids claims, so the blocks may have
been leased again. Within a host an end is seen at once; of another host an answer to a later question is proof.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError, MemoryLost
from common.memory.base.nixl_agent import ucx_transports
from common.memory.base.slots import Slots
from common.memory.client.client import PoolClaim
from common.memory.client.connection import Connection
from common.memory.client.gate_connection import Gate, GateConnection
from common.memory.client.link import ServerLink
from common.memory.client.stager import Stager
from common.wire.messages.gates import PoolLent
from common.wire.messages.memory import (
    BlocksFreed,
    KVAccepted,
    KVOffer,
    KVReceived,
    MemoryKnock,
    MemoryMessage,
    MemoryTainted,
    MemoryVisit,
    PoolRegion,
    PromptBlocks,
    PromptWanted,
)
from common.wire.messages.worker import Message
from common.wire.values.block_key import pack_keys
from common.wire.values.kv_layout import KVLayout
from common.wire.values.pool_shape import PoolShape, shown

PeerMessage = KVOffer | PromptBlocks
"""Messages about blocks of a peer pool that this worker may read."""


class PeerPoolClient(ServerLink):
    """A worker's link to another pool's memory server; never waits.

    `claim` is set once the server has answered. `problem` says why the connection is lost. Raises MemoryLost if no
    server listens.

    Args:
        place: socket of the server, or its gate if the server is on another host.
        worker: id and epoch of this worker.
        pool_id, layout: pool to read.
    """

    def __init__(
        self,
        place: Path | Gate,
        worker: tuple[str, int],
        pool_id: int,
        layout: KVLayout,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool_id, self.layout = pool_id, layout
        self.claim: PoolClaim | None = None
        self._lent: PoolLent | None = None
        self._lent_region: PoolRegion | None = None
        self._num_asked = self._num_answered = 0  # questions, which are answered in order
        self._place, visit = place, MemoryVisit(*worker, pool_id)
        try:
            super().__init__(Connection(place, visit) if isinstance(place, Path) else place.dial(visit), clock)
        except OSError as error:
            raise MemoryLost(f"memory server {place}: {error.strerror}") from None
        self._received: list[PeerMessage] = []

    def receive(self) -> list[PeerMessage]:
        """Return offers and found blocks since the last call."""
        self.poll()
        received, self._received = self._received, []
        return received

    def poll(self) -> None:
        """Take arrived messages and check the connection.

        The end of the connection is a problem even if unread messages remain.
        """
        if self.problem:
            return
        try:
            has_ended = self.connection.has_ended  # first, because a refusal may arrive just before the end
            for message, descriptor in self.connection.receive():
                self.count_received()
                self._handle(message, descriptor)
            if has_ended:
                self.lose(self.connection.problem("it closed the connection"))
        except (MemoryLost, ConfigError) as lost:
            self.lose(str(lost))

    def send(self, *messages: MemoryMessage) -> None:
        self._num_asked += sum(isinstance(message, MemoryKnock) for message in messages)
        super().send(*messages)

    def ask(self) -> int:
        """Ask the memory server whether claims stand; return the number of the question."""
        self.send(MemoryKnock())
        return self._num_asked

    def has_answered(self, question: int) -> bool:
        """Tell whether the server has answered, so that claims stood when the question was asked."""
        self.poll()
        return self._num_answered >= question and not self.problem

    def receive_offer(self, offer: KVOffer) -> None:
        """Take over the request of an offer; the blocks stay the server's."""
        self.send(KVReceived(offer.request_id, offer.attempt))

    def accept(self, offer: KVOffer) -> None:
        """Claim the blocks of an offer; their bytes stay valid until `free` or the end of the connection."""
        self.send(KVAccepted(offer.request_id, offer.attempt))

    def look_up(self, request_id: str, attempt: int, digests: Sequence[bytes], first: int = 0) -> None:
        """Ask for blocks of a text's places from `first` on, by their digests; a `PromptBlocks` answers."""
        self.send(PromptWanted(request_id, attempt, pack_keys(digests), 0, self.layout.nothing, 0, first))

    def free(self, message: PeerMessage) -> None:
        """Give back the blocks of an accepted offer or of a `PromptBlocks`."""
        self.send(BlocksFreed(message.block_ids, message.generations))

    def report_fault(self, problem: str) -> None:
        """Report a fault of the device as the last message, because the fault may have damaged the pool."""
        self.send(MemoryTainted(problem))

    def close(self) -> None:
        """Close the connection and give up all claims; no block may be read afterwards."""
        self.lose("closed")
        self.connection.close()
        if self.claim is not None and self.claim.descriptor is not None:
            os.close(self.claim.descriptor)
            self.claim = None

    def _handle(self, message: Message, descriptor: int | None) -> None:
        if descriptor is not None and self.claim is not None:
            os.close(descriptor)
        match message:
            case KVOffer() | PromptBlocks():
                self._received.append(message)
            case MemoryKnock():
                self._num_answered += 1
            case PoolLent():
                self._lent = message
                self._claim_lent()
            case PoolRegion() if isinstance(self._place, Gate):
                self._lent_region = message
                self._claim_lent()
            case PoolRegion() if self.claim is None:
                self.claim = self._claimed(message, descriptor)
            case MemoryTainted():
                self.lose(self.connection.problem(message.problem))
            case _:  # a welcome
                pass

    def _claimed(self, region: PoolRegion, descriptor: int | None) -> PoolClaim | None:
        """Return a claim; None, and a problem, if the pool does not fit the layout."""
        if len(region.num_blocks) != len(self.layout.groups):
            groups = f"its pool has {shown(region.num_blocks)} blocks, for {len(self.layout.groups)} groups"
            self.lose(self.connection.problem(groups))
            if descriptor is not None:
                os.close(descriptor)
            return None
        shape = PoolShape(self.layout, region.num_blocks, region.floor)
        return PoolClaim(region.handle, descriptor, shape.num_bytes, region.pool_id, shape)

    def _stager(self) -> Stager:
        assert isinstance(self.connection, GateConnection), "a gate lends staging"
        return self.connection.stager()

    def _claim_lent(self) -> None:
        """Set the claim once both its halves have come, in either order."""
        lent, region = self._lent, self._lent_region
        if lent is None or region is None or self.claim is not None or not isinstance(self._place, Gate):
            return
        if (claim := self._claimed(region, None)) is not None:
            transports = ucx_transports(self._place.net.ucx_transports)
            self.claim = LentClaim(
                b"", None, claim.num_bytes, claim.pool_id, claim.shape,
                lent.metadata, lent.address, lent.num_bytes, transports, self, self._place.slots, self._stager,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LentClaim(PoolClaim):
    """A pool on another host, lent by an agent of NIXL, itself or through staging."""

    metadata: bytes  # of the agent
    address: int  # of the lent memory, in the agent's process
    num_lent_bytes: int  # of that memory
    ucx_transports: str
    witness: PeerPoolClient  # on whose connection the claim lives
    slots: Slots | None = None  # of staging, if that is lent rather than the pool
    open_stager: Callable[[], Stager] | None = None  # for the thread that stages
