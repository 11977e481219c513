"""A worker's part in a shared pool: blocks, and handoffs of prompts."""

import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from common.base.errors import MemoryLost
from common.memory.client.client import MemoryClient, PoolClaim
from common.memory.client.connection import ASK_S
from common.memory.client.lease_cache import LeaseCache
from common.memory.client.link import ServerLink
from common.wire.messages.memory import (
    BlocksLeased,
    KVAccepted,
    KVDeclined,
    KVOffer,
    KVReceived,
    MemoryKnock,
    MemoryMessage,
    MemoryTainted,
    PoolLeft,
    PoolShortage,
    PromptBlocks,
)
from common.wire.values.flags import pack_flags, unpack_flags
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids, unpack_array

PromptMessage = KVOffer | KVReceived | KVDeclined | PromptBlocks
"""Messages about a single prompt."""
RECEIVED = BlocksLeased, PoolShortage, KVOffer, KVReceived, KVDeclined, PromptBlocks, MemoryKnock, MemoryTainted
FIRST_BLOCKS, FIRST_S = 4, 60.0
"""Blocks of each group at hand when a worker starts, and longest wait for some, because the pool may be full."""
FIRST_SHARE = 16
"""Largest share of a small group at hand at start: 1/16, because a starting worker gives nothing back."""


class SharedPool(ServerLink):
    """A worker's messages to its memory server about the pool; never waits.

    After the loss of the server `problem` is set, and no more blocks come. If the memory `is_tainted`, even blocks at
    hand are useless.
    """

    def __init__(self, client: MemoryClient, claim: PoolClaim, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(client.connection, clock)
        self.client, self.pool_id = client, claim.pool_id
        self.is_tainted = False  # blocks may be damaged by a device fault
        self._answers: dict[tuple[str, int], KVReceived | KVAccepted] = {}  # unsent answers to offers, by request
        self.num_done = 0  # seals and changes of hands in the pool, as last told by the server
        self.leases = LeaseCache(claim.shape, self.send, clock=clock)

    def await_blocks(self) -> None:
        """Wait for a block of each group, needed to start; raises MemoryLost after `FIRST_S`."""
        end_s, one = self._clock() + FIRST_S, tuple(1 for _ in self.leases.capacity)
        level = tuple(min(FIRST_BLOCKS, count // FIRST_SHARE) for count in self.leases.shape.shares)
        while not self.leases.fetch(one):
            self.leases.update(level, one)
            select.select([self], [], [], ASK_S)
            self.receive()
            if self.problem or self._clock() > end_s:
                raise MemoryLost(self.problem or f"memory server {self.client.path}: no KV block for {FIRST_S:.0f} s")
        self.leases.demand.use(one)

    def receive(self) -> list[PromptMessage]:
        """Return messages about prompts; messages about blocks are handled here."""
        prompts: list[PromptMessage] = []
        if self.problem:
            return prompts
        try:
            messages = self.client.receive(*RECEIVED)
        except MemoryLost as lost:
            self.lose(str(lost))
            return prompts
        for message in messages:
            self.count_received()
            match message:
                case MemoryKnock():
                    self.num_done = message.num_done
                case BlocksLeased():
                    self.leases.receive(message)
                case MemoryTainted():
                    self.is_tainted = True
                    self.lose(message.problem)
                case PoolShortage():
                    self.leases.demand.shortage(is_short=message.is_short)
                case KVOffer() | KVReceived() | KVDeclined() | PromptBlocks():
                    prompts.append(message)
        return prompts

    def update(self, level: Counts, floor: Counts, *, is_busy: bool = False) -> None:
        """Send answers, ask for blocks (see `LeaseCache.update`), and watch the server; call after `receive`."""
        self.send()
        self.leases.update(level, floor, is_busy=is_busy)
        self.keep_alive()

    def offer(
        self,
        target: tuple[str, int],
        key: tuple[str, int],
        token_id: int,
        block_ids: Sequence[int],
        chain: tuple[bytes, bytes] = (b"", b""),
    ) -> bool:
        """Give a complete prompt's blocks to a decode worker; return False if the server is lost.

        The blocks are not this worker's any more. `receive` tells whether the decode worker received the offer.

        Args:
            target: worker id and epoch.
            key: request id and attempt.
            token_id: the token just sampled.
            chain: root of the key chain, and digest of the last full block; b"" if no block will be sealed.
        """
        are_sealed, ids = pack_flags(self.leases.references.are_read(block_ids)), pack_ids(block_ids)
        generations = self.leases.release(block_ids).tobytes()
        self.send(KVOffer(*target, *key, token_id, ids, generations, are_sealed, *chain))
        return not self.problem

    def receive_offer(self, offer: KVOffer) -> None:
        """Take over the request of an offer; the blocks stay the server's.

        The answer is sent by `update`, or before the next message.
        """
        self._answers[offer.request_id, offer.attempt] = KVReceived(offer.request_id, offer.attempt)

    def accept(self, offer: KVOffer) -> None:
        """Put the blocks of an offer in use here.

        The answer is sent by `update`, or before the next message, so no step waits for it. A delay is safe because the
        server quarantines offered blocks if this worker dies.
        """
        block_ids = unpack_array(offer.block_ids)
        are_sealed = unpack_flags(offer.are_sealed, len(block_ids))
        self.leases.adopt(block_ids, unpack_array(offer.generations), are_sealed)
        self._answers[offer.request_id, offer.attempt] = KVAccepted(offer.request_id, offer.attempt)

    def by_group(self, offer: KVOffer) -> Sequence[Sequence[int]]:
        """Return the blocks of an offer, by group."""
        return self.leases.shape.by_group(unpack_array(offer.block_ids))

    def sealed_of(self, offer: KVOffer) -> set[int]:
        """Return the sealed blocks of an offer."""
        block_ids = np.frombuffer(offer.block_ids, np.int32)
        return set(block_ids[unpack_flags(offer.are_sealed, len(block_ids))].tolist())

    def leave(self) -> None:
        """Give all blocks to others, except blocks that launched steps may still write; call last of all."""
        block_ids = self.leases.in_use
        self.send(PoolLeft(pack_ids(block_ids), pack_ids(self.leases.generations(block_ids))))
        if not self.problem:
            with suppress(MemoryLost):
                self.client.finish_sending()

    def send(self, *messages: MemoryMessage) -> None:
        """Send answers to offers, and then messages."""
        answers, self._answers = self._answers, {}
        super().send(*answers.values(), *messages)

    def fileno(self) -> int:
        return self.client.connection.fileno()

    def lose(self, problem: str) -> None:
        """Treat the server as lost: no more blocks come."""
        super().lose(problem)
        self.leases.is_lost = True
