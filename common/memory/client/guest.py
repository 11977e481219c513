"""A worker's end of a connection to another pool's memory server: it reads blocks there, and has none.

    offered ──accept──▶ claimed, for as long as it is pulled ──free──▶ the server's
       └──decline──▶ the server's                                        ▲
    looked for ──PromptBlocks──▶ read, for as long as it is pulled ──free─┘

What was pulled counts only if the connection stands when the pull is over: with its end the claims are void, and the
blocks may be another's.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.base.errors import ConfigError, MemoryLost
from common.memory.client.client import PoolClaim
from common.memory.client.connection import Connection
from common.memory.client.pulse import Pulse
from common.wire.messages.memory import (
    BlocksFreed,
    KVAccepted,
    KVDeclined,
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

OfGuest = KVOffer | PromptBlocks
"""What a memory server tells a guest of blocks that it may read."""


class Guest:
    """Never waits: `claim` is there when the server has answered, and `problem` says why it is lost.

    Raises MemoryLost when nobody is there.

    Args:
        worker: id and epoch of this worker.
        pool_id, layout: of the pool to read.
    """

    def __init__(
        self,
        path: Path,
        worker: tuple[str, int],
        pool_id: int,
        layout: KVLayout,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.pool_id, self.layout = path, pool_id, layout
        self.problem = ""
        self.claim: PoolClaim | None = None
        try:
            self.connection = Connection(path, MemoryVisit(*worker, pool_id))
        except OSError as error:
            raise MemoryLost(f"memory server {path}: {error.strerror}") from None
        self._pulse = Pulse(clock=clock)
        self._said: list[OfGuest] = []

    def receive(self) -> list[OfGuest]:
        """What was offered and found since the last time."""
        self.look()
        said, self._said = self._said, []
        return said

    def look(self) -> None:
        """See whether the connection stands, and what came: if it does not, no matter what is still to come."""
        if self.problem:
            return
        try:
            for message, descriptor in self.connection.receive():
                self._pulse.heard()
                self._heed(message, descriptor)
            if self.connection.has_ended:
                self._lose("it closed the connection")
        except (MemoryLost, ConfigError) as lost:
            self.problem = self.problem or str(lost)

    def tend(self) -> None:
        """See to the server's being there."""
        if self._pulse.asks():
            self._send(MemoryKnock())
        if silence := self._pulse.silence:
            self._lose(silence)

    def receive_offer(self, offer: KVOffer) -> None:
        """Own the request of an offer; its blocks stay the server's."""
        self._send(KVReceived(offer.request_id, offer.attempt))

    def accept(self, offer: KVOffer) -> None:
        """Claim the blocks of an offer; then they are what they are until they are freed, or the connection ends."""
        self._send(KVAccepted(offer.request_id, offer.attempt))

    def decline(self, offer: KVOffer) -> None:
        """Let others have the blocks of an offer."""
        self._send(KVDeclined(offer.request_id, offer.attempt))

    def look_up(self, request_id: str, attempt: int, digests: Sequence[bytes]) -> None:
        """Ask for the blocks of a text, from the first of these on, that are there: a `PromptBlocks` is the answer."""
        self._send(PromptWanted(request_id, attempt, pack_keys(digests), block_us=0, num_blocks=0, priority=0))

    def free(self, said: OfGuest) -> None:
        """Nothing here reads the blocks of an accepted offer, or what was found, any more."""
        self._send(BlocksFreed(said.block_ids, said.generations))

    def report_fault(self, problem: str) -> None:
        """Say, last of all, that the device met a fault here: it may have written there, too."""
        self._send(MemoryTainted(problem))

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        """Give up all claims; nothing may be read any more."""
        self.problem = self.problem or "closed"
        self.connection.close()
        if self.claim is not None and self.claim.descriptor is not None:
            os.close(self.claim.descriptor)
            self.claim = None

    def _heed(self, message: Message, descriptor: int | None) -> None:
        if descriptor is not None and self.claim is not None:
            os.close(descriptor)
        match message:
            case KVOffer() | PromptBlocks():
                self._said.append(message)
            case PoolRegion() if self.claim is None:
                self.claim = self._claimed(message, descriptor)
            case MemoryTainted():
                self._lose(message.problem)
            case _:  # a welcome, and answers to our knocks
                pass

    def _claimed(self, region: PoolRegion, descriptor: int | None) -> PoolClaim | None:
        """None if it cannot be a pool of the layout."""
        if len(region.num_blocks) != len(self.layout.groups):
            self._lose(f"its pool has {shown(region.num_blocks)} blocks, for {len(self.layout.groups)} groups")
            if descriptor is not None:
                os.close(descriptor)
            return None
        shape = PoolShape(self.layout, region.num_blocks)
        return PoolClaim(region.handle, descriptor, shape.num_bytes, region.pool_id, shape)

    def _send(self, message: MemoryMessage) -> None:
        if self.problem:
            return
        try:
            self.connection.send(message)
        except MemoryLost as lost:
            self.problem = str(lost)

    def _lose(self, what: str) -> None:
        self.problem = self.problem or self.connection.problem(what)
