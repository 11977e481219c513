"""A worker's part in a shared pool: blocks, and handoffs of prompts."""

import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.base.errors import MemoryLost
from common.memory.base.channel import MAX_UNSENT_BYTES
from common.memory.client.client import MemoryClient, PoolClaim
from common.memory.client.magazine import Magazine
from common.memory.client.pulse import ASK_S, Pulse
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
from common.wire.messages.worker import Message
from common.wire.values.kv_layout import Counts
from common.wire.values.packing import pack_ids, unpack_array

OfPrompt = KVOffer | KVReceived | KVDeclined | PromptBlocks
"""Messages about a single prompt."""
MANY_UNSENT_BYTES = MAX_UNSENT_BYTES // 16
"""Bound for new work; launched steps add far less than the rest up to the channel's limit."""
FIRST_BLOCKS, FIRST_S = 4, 60.0
"""Blocks of each group at hand when a worker starts, and longest wait for some, because the pool may be full."""
FIRST_SHARE = 16
"""Largest share of a small group at hand at start: 1/16, because a starting worker gives nothing back."""


class SharedPool:
    """A worker's messages to its memory server about the pool; never waits.

    After the loss of the server `problem` is set, and no more blocks come. If the memory `is_tainted`, even blocks at
    hand are useless.
    """

    def __init__(self, client: MemoryClient, claim: PoolClaim, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.client, self.pool_id, self._clock = client, claim.pool_id, clock
        self.problem, self._is_told = "", False
        self.is_tainted = False  # blocks may be damaged by a device fault
        self._answers: dict[tuple[str, int], KVReceived | KVAccepted] = {}  # unsent answers to offers, by request
        self._pulse = Pulse(clock=clock)
        self.num_done = 0  # seals and changes of hands in the pool, as last told by the server
        self.magazine = Magazine(claim.shape, self._send, clock=clock)

    def await_blocks(self) -> None:
        """Wait for a block of each group, needed to start; raises MemoryLost after `FIRST_S`."""
        end_s, one = self._clock() + FIRST_S, tuple(1 for _ in self.magazine.capacity)
        level = tuple(min(FIRST_BLOCKS, count // FIRST_SHARE) for count in self.magazine.capacity)
        while not self.magazine.fetch(one):
            self.magazine.tend(level, one)
            select.select([self], [], [], ASK_S)
            self.receive()
            if self.problem or self._clock() > end_s:
                raise MemoryLost(self.problem or f"memory server {self.client.path}: no KV block for {FIRST_S:.0f} s")

    def receive(self) -> list[OfPrompt]:
        """Return messages about prompts; messages about blocks are handled here."""
        prompts: list[OfPrompt] = []
        for message in self._received():
            self._pulse.heard()
            match message:
                case MemoryKnock():
                    self.num_done = message.num_done
                case BlocksLeased():
                    self.magazine.leased(message)
                case MemoryTainted():
                    self.is_tainted = True
                    self._lose(message.problem)
                case PoolShortage():
                    self.magazine.demand.shortage(is_short=message.is_short)
                case KVOffer() | KVReceived() | KVDeclined() | PromptBlocks():
                    prompts.append(message)
        return prompts

    def tend(self, level: Counts, floor: Counts, *, is_busy: bool = False) -> None:
        """Tend blocks at hand (see `Magazine.tend`) and the server's pulse; call after `receive`."""
        self._send_answers()
        self.magazine.tend(level, floor, is_busy=is_busy)
        if self._pulse.asks():
            self._send(MemoryKnock())
        if silence := self._pulse.silence:
            self._lose(f"memory server {self.client.path}: {silence}")

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
        num_sealed, ids = self.magazine.leases.readings.num_first(block_ids), pack_ids(block_ids)
        generations = self.magazine.leases.release(block_ids).tobytes()
        self._send(KVOffer(*target, *key, token_id, ids, generations, num_sealed, *chain))
        return not self.problem

    def receive_offer(self, offer: KVOffer) -> None:
        """Take over the request of an offer; the blocks stay the server's.

        The answer is sent by `tend`, or before the next message.
        """
        self._answers[offer.request_id, offer.attempt] = KVReceived(offer.request_id, offer.attempt)

    def accept(self, offer: KVOffer) -> None:
        """Put the blocks of an offer in use here.

        The answer is sent by `tend`, or before the next message, so no step waits for it. A delay is safe because the
        server quarantines offered blocks if this worker dies.
        """
        self.magazine.leases.adopt(unpack_array(offer.block_ids), unpack_array(offer.generations), offer.num_sealed)
        self._answers[offer.request_id, offer.attempt] = KVAccepted(offer.request_id, offer.attempt)

    def by_group(self, offer: KVOffer) -> Sequence[Sequence[int]]:
        """Return the blocks of an offer, by group."""
        return self.magazine.shape.by_group(unpack_array(offer.block_ids))

    def decline(self, offer: KVOffer) -> None:
        """Decline an offer, so the server may lease its blocks."""
        self._send(KVDeclined(offer.request_id, offer.attempt))

    def leave(self) -> None:
        """Give all blocks to others, except blocks that launched steps may still write; call last of all."""
        block_ids = self.magazine.leases.in_use
        self._send(PoolLeft(pack_ids(block_ids), pack_ids(self.magazine.leases.generations(block_ids))))
        if not self.problem:
            with suppress(MemoryLost):
                self.client.finish_sending()

    def take_problem(self) -> str:
        """Return the reason of a loss, once; afterwards the server must not be polled."""
        told, self._is_told = self._is_told, bool(self.problem)
        return "" if told else self.problem

    @property
    def is_sending(self) -> bool:
        """Tell whether messages are unsent; `receive` goes on sending."""
        return self.client.is_sending and not self.problem

    @property
    def is_behind(self) -> bool:
        """Tell whether too much is unsent to begin more work, because the server has not read for a while."""
        return self.client.num_unsent_bytes > MANY_UNSENT_BYTES and not self.problem

    def fileno(self) -> int:
        return self.client.fileno()

    def _received(self) -> Sequence[Message]:
        if self.problem:
            return ()
        try:
            return self.client.receive(
                BlocksLeased, PoolShortage, KVOffer, KVReceived, KVDeclined, PromptBlocks, MemoryKnock, MemoryTainted
            )
        except MemoryLost as lost:
            self._lose(str(lost))
            return ()

    def _send_answers(self) -> None:
        answers, self._answers = self._answers, {}
        for message in answers.values():
            self._send(message)

    def _send(self, message: MemoryMessage) -> None:
        self._send_answers()
        if self.problem:
            return
        try:
            self.client.send(message)
        except MemoryLost as lost:
            self._lose(str(lost))

    def _lose(self, problem: str) -> None:
        self.problem = self.problem or problem
        self.magazine.lost()
