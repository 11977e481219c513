"""A worker's part in a pool that it shares: blocks of it, and prompts that change hands in it."""

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
"""What a memory server says of one prompt."""
MANY_UNSENT_BYTES = MAX_UNSENT_BYTES // 16
"""What steps in flight may still add is far below the rest, at which the channel gives up."""
FIRST_BLOCKS, FIRST_S = 4, 60.0
"""Of each group at hand when a worker starts, and how long to wait for one: the pool may be full."""
FIRST_SHARE = 16
"""Of a group that has few, at most one part in so many: who starts gives nothing back until it serves."""


class SharedPool:
    """Speaks with the memory server on behalf of one worker; never waits for it.

    When the server is lost, `problem` says so, and what is at hand is all there will be; if its memory `is_tainted`,
    not even that is of use.
    """

    def __init__(self, client: MemoryClient, claim: PoolClaim, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.client, self.pool_id, self._clock = client, claim.pool_id, clock
        self.problem, self._is_told = "", False
        self.is_tainted = False  # what is in it may be damaged
        self._answers: dict[tuple[str, int], KVReceived | KVAccepted] = {}  # to offers, by request, not sent yet
        self._pulse = Pulse(clock=clock)
        self.num_done = 0  # how often blocks of the pool were sealed, or have changed hands, as the server said last
        self.magazine = Magazine(claim.shape, self._send, clock=clock)

    def await_blocks(self) -> None:
        """Wait until there are some at hand, as a worker needs one to start; raises MemoryLost if none come."""
        end_s, one = self._clock() + FIRST_S, tuple(1 for _ in self.magazine.capacity)
        level = tuple(min(FIRST_BLOCKS, count // FIRST_SHARE) for count in self.magazine.capacity)
        while not self.magazine.fetch(one):
            self.magazine.tend(level, one)
            select.select([self], [], [], ASK_S)
            self.receive()
            if self.problem or self._clock() > end_s:
                raise MemoryLost(self.problem or f"memory server {self.client.path}: no KV block for {FIRST_S:.0f} s")

    def receive(self) -> list[OfPrompt]:
        """What concerns prompts; what concerns blocks is heeded here."""
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
                    self.magazine.shortage(is_short=message.is_short)
                case KVOffer() | KVReceived() | KVDeclined() | PromptBlocks():
                    prompts.append(message)
        return prompts

    def tend(self, level: Counts, floor: Counts, *, is_busy: bool = False) -> None:
        """See to blocks at hand, as `Magazine.tend` has it, and to the server's being there; call after `receive`."""
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
        """Give a complete prompt's blocks to a decode worker; false if the server is lost.

        The blocks are not this worker's any more. `receive` tells whether the decode worker received the offer.

        Args:
            target: worker id and epoch.
            key: request id and attempt.
            token_id: the token just sampled.
            chain: of keys: its root, and the digest of the last full block; b"" if nothing is to be sealed.
        """
        num_sealed, ids = self.magazine.readings.num_first(block_ids), pack_ids(block_ids)
        generations = self.magazine.release(block_ids).tobytes()
        self._send(KVOffer(*target, *key, token_id, ids, generations, num_sealed, *chain))
        return not self.problem

    def receive_offer(self, offer: KVOffer) -> None:
        """Own the request of an offer; its blocks stay the server's. Sent with `tend`, or before anything else."""
        self._answers[offer.request_id, offer.attempt] = KVReceived(offer.request_id, offer.attempt)

    def accept(self, offer: KVOffer) -> None:
        """The blocks of the offer are in use here from now on.

        That is said in `tend`, or before anything else is: it need not hold up a step, as nobody gets blocks that were
        offered to a worker whose end is not certain.
        """
        self.magazine.adopt(unpack_array(offer.block_ids), unpack_array(offer.generations), offer.num_sealed)
        self._answers[offer.request_id, offer.attempt] = KVAccepted(offer.request_id, offer.attempt)

    def by_group(self, offer: KVOffer) -> Sequence[Sequence[int]]:
        """The blocks of the offer."""
        return self.magazine.shape.by_group(unpack_array(offer.block_ids))

    def decline(self, offer: KVOffer) -> None:
        """Let others have the blocks of the offer."""
        self._send(KVDeclined(offer.request_id, offer.attempt))

    def leave(self) -> None:
        """Let others have all but what a launched step may still write; last of all."""
        block_ids = self.magazine.in_use
        self._send(PoolLeft(pack_ids(block_ids), pack_ids(self.magazine.generations(block_ids))))
        if not self.problem:
            with suppress(MemoryLost):
                self.client.finish_sending()

    def take_problem(self) -> str:
        """Why the server is lost, once; it must not be polled any more."""
        told, self._is_told = self._is_told, bool(self.problem)
        return "" if told else self.problem

    @property
    def is_sending(self) -> bool:
        """Whether something could not be sent at once: `receive` goes on with it."""
        return self.client.is_sending and not self.problem

    @property
    def is_behind(self) -> bool:
        """Whether so much is unsent that no more should be begun: the server has not read for a while."""
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
