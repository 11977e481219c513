"""Prompts that a prefill worker of the same pool hands over: their blocks change hands, and nothing is copied.

KVOffer ──▶ waiting ──a row and a block for it to grow──▶ accepted: the scheduler's
               └──abort, refusal, standstill, blocks wanted for what is decoded──▶ declined: free
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import ErrorCode
from common.kv.tables import Tables, held_by, num_handed_over, num_lacking, tables_handed_over
from common.memory.shared_pool import SharedPool
from common.serving.standstill import Standstill
from common.serving.vocabulary import stranger
from common.wire.kv_layout import Counts
from common.wire.memory_messages import KVOffer
from common.wire.packing import unpack_array
from common.wire.pool_shape import plus, shown
from decode_worker.attempts import Attempts
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sealing import Sealing
from decode_worker.sequence import DecodeSequence, Key

BLOCKS_AT_HAND = 16
"""Of each group while nothing is decoded, unless the pool is small."""


Failure = tuple[Key, ErrorCode, str]
"""A handoff that will not come, and why."""


def sequence_of(offer: KVOffer) -> DecodeSequence:
    """What will be decoded of an offer."""
    token_ids = unpack_array(offer.token_ids)
    sequence = DecodeSequence(offer.request_id, offer.attempt, token_ids, offer.num_outputs, offer.sampling)
    sequence.offered_s = time.monotonic()
    return sequence


def flaw(
    offered: Sequence[Sequence[int]], sequence: DecodeSequence, scheduler: DecodeScheduler, vocab_size: int
) -> tuple[ErrorCode, str] | None:
    """Why a prompt in these blocks, by group, can never be decoded here: nobody else shall wait behind it."""
    num_offered = tuple(map(len, offered))
    if objection := scheduler.objection(sequence):
        return ErrorCode.NEVER_FITS, objection
    if problem := stranger(sequence.token_ids, vocab_size):
        return ErrorCode.INTERNAL, problem
    if num_offered != (num_blocks := num_handed_over(scheduler.layout, len(sequence.token_ids) - 1)):
        return ErrorCode.INTERNAL, f"{shown(num_offered)} blocks offered, its tokens fill {shown(num_blocks)}"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """An offer, and what will be decoded of it."""

    offer: KVOffer
    sequence: DecodeSequence
    tables: Tables


class Offers:
    """Keeps offers until there is room; nobody else may take them meanwhile."""

    def __init__(
        self, shared: SharedPool, scheduler: DecodeScheduler, aborts: Attempts, sealing: Sealing, vocab_size: int
    ) -> None:
        self.shared, self.scheduler, self.aborts, self.vocab_size = shared, scheduler, aborts, vocab_size
        self.sealing, self.standstill = sealing, Standstill()
        self.waiting: deque[Waiting] = deque()
        self._failures: list[Failure] = []

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def shortage(self) -> str:
        """Why there are no blocks, when there are none."""
        return "no KV blocks come any more without the memory server" if self.shared.problem else "out of KV blocks"

    def tend(self, foreseen: Counts) -> str:
        """See that blocks are at hand for every sequence to grow, and for some that may come, beside those foreseen.

        Returns why the owner of the pool is lost, once.
        """
        is_still = bool(self.waiting) and not self.scheduler.num_taken
        if self.standstill.is_over(is_still=is_still, num_done=self.shared.num_done):
            reason = "no KV blocks come free for those before it, and nobody gets on in the pool"
            self._give_up_latest(ErrorCode.STANDSTILL, reason)
        floor = self.scheduler.num_growing
        idle = (min(BLOCKS_AT_HAND, count // BLOCKS_AT_HAND) for count in self.scheduler.allocator.capacity)
        self.shared.tend(level=tuple(map(max, plus(floor, foreseen), idle)), floor=floor)
        return self.shared.take_problem()

    def add(self, offer: KVOffer) -> None:
        """Queue an offer, or decline what can never be decoded here or was aborted before."""
        sequence, offered = sequence_of(offer), self.shared.by_group(offer)
        if self.aborts.cover(*sequence.key):
            self.shared.decline(offer)
        elif found := flaw(offered, sequence, self.scheduler, self.vocab_size):
            self.shared.decline(offer)
            self._failures.append((sequence.key, *found))
        else:
            tables = tables_handed_over(self.scheduler.layout, len(sequence.token_ids) - 1, offered)
            self.waiting.append(Waiting(offer, sequence, tables))

    def accept(self, start_older: Callable[[float], None] = lambda before_s: None) -> list[DecodeSequence]:
        """The oldest that there is room for, reserved: their KV is complete.

        Args:
            start_older: gives rows to what was handed over elsewhere before that, if it needs nothing else.
        """
        accepted = []
        while self.waiting:
            start_older(self.waiting[0].sequence.offered_s)
            if not self._has_room(self.waiting[0]):
                break
            waiting = self.waiting.popleft()
            self.shared.accept(waiting.offer)
            self.scheduler.reserve(waiting.sequence, waiting.tables)
            self.sealing.begin(waiting.sequence, waiting.offer)
            accepted.append(waiting.sequence)
        return accepted

    def abort(self, request_id: str, attempt: int) -> None:
        """Decline every attempt up to `attempt`; those that are still to come the aborts tell."""
        for waiting in list(self.waiting):
            if waiting.offer.request_id == request_id and waiting.offer.attempt <= attempt:
                self.waiting.remove(waiting)
                self.shared.decline(waiting.offer)

    def make_way(self) -> bool:
        """Give the blocks of the latest offer to what is decoded already; whether there was one."""
        if not self.waiting:
            return False
        self._give_up_latest(ErrorCode.PREEMPTED, f"{self.shortage}, what is decoded already goes first")
        return True

    def decline_all(self) -> list[DecodeSequence]:
        """Give every offer back; returns their sequences."""
        waiting, self.waiting = self.waiting, deque()
        for each in waiting:
            self.shared.decline(each.offer)
        return [each.sequence for each in waiting]

    def has(self, key: Key) -> bool:
        """Whether it waits; what was accepted is the scheduler's."""
        return any(waiting.sequence.key == key for waiting in self.waiting)

    def take_failures(self) -> list[Failure]:
        """Offers that nothing will come of."""
        failures, self._failures = self._failures, []
        return failures

    def _give_up_latest(self, code: ErrorCode, reason: str) -> None:
        """Its blocks are at hand then, and nobody else's."""
        latest = self.waiting.pop()
        self.shared.accept(latest.offer)
        self.scheduler.allocator.free(held_by(latest.tables))
        self._failures.append((latest.sequence.key, code, reason))

    def _has_room(self, waiting: Waiting) -> bool:
        num_tokens = len(waiting.sequence.token_ids)
        lacking = num_lacking(waiting.tables, num_tokens, num_tokens)
        return self.scheduler.has_row() and self.scheduler.has_blocks(lacking)
