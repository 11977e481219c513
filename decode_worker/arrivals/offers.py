"""Prompts handed over by a prefill worker of the same pool: the blocks change owner, and nothing is copied.

KVOffer ──▶ waiting ──a row and a block for the next token──▶ accepted: the scheduler's
               └──abort, refusal, blocks wanted by decoding sequences──▶ declined: free
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.base.errors import ErrorCode
from common.kv.tables import Tables, held_by, num_lacking, num_seen, tables_handed_over
from common.memory.client.shared_pool import SharedPool
from common.serving.prompts.requests import Fail
from common.wire.messages.memory import KVOffer
from common.wire.values.kv_layout import Counts, KVLayout
from common.wire.values.pool_shape import plus, shown
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence

IDLE_BLOCKS = 16
"""Free blocks of each group to keep leased while idle, unless the pool is small."""
IDLE_SHARE = 16
"""Divisor of the pool's blocks; the quotient bounds the blocks leased while idle."""


def flaw(offered: Sequence[Sequence[int]], sequence: DecodeSequence, layout: KVLayout) -> str:
    """Return why offered blocks, by group, cannot hold the prompt; empty if they can."""
    num_offered, num_blocks = tuple(map(len, offered)), num_seen(layout, len(sequence.token_ids))
    if num_offered == num_blocks:
        return ""
    return f"{shown(num_offered)} blocks offered, its tokens fill {shown(num_blocks)}"


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """An offer, with the sequence to decode."""

    offer: KVOffer
    sequence: DecodeSequence
    tables: Tables


class Offers:
    """Queue of offers until there is room; no other worker may take a queued offer."""

    def __init__(self, shared: SharedPool, scheduler: DecodeScheduler, sealing: Sealing, fail: Fail) -> None:
        self.shared, self.scheduler, self.sealing, self.fail = shared, scheduler, sealing, fail
        self.waiting: RowQueue[Waiting] = RowQueue(scheduler.capacity.num_rows_of.__getitem__)

    @property
    def shortage(self) -> str:
        """Reason why no blocks are left, for a message about a failed request."""
        return "no KV blocks come any more without the memory server" if self.shared.problem else "out of KV blocks"

    def lease_blocks(self, foreseen: Counts) -> str:
        """Keep blocks at hand for every sequence to grow, for foreseen handoffs, and some more while idle.

        States do not grow, so none is kept idle.

        Return why the memory server of the pool is lost, once.
        """
        floor = self.scheduler.capacity.num_growing
        columns = zip(self.scheduler.layout.groups, self.scheduler.allocator.shape.shares, strict=True)
        idle = (min(IDLE_BLOCKS, count // IDLE_SHARE) if group.grows else 0 for group, count in columns)
        self.shared.update(level=tuple(map(max, plus(floor, foreseen), idle)), floor=floor)
        return self.shared.take_problem()

    def add(self, sequence: DecodeSequence, offer: KVOffer) -> None:
        """Queue an offer, or decline an offer whose blocks cannot hold the prompt."""
        offered = self.shared.by_group(offer)
        if problem := flaw(offered, sequence, self.scheduler.layout):
            self.shared.decline(offer)
            self.fail(sequence.key, ErrorCode.INTERNAL, problem)
        else:
            is_plain, num_tokens = self.scheduler.layout.is_append_only, len(sequence.token_ids) - 1
            sealed = set[int]() if is_plain else self.shared.sealed_of(offer)
            tables = tables_handed_over(self.scheduler.layout, num_tokens, offered, sealed)
            self.waiting.add(Waiting(offer, sequence, tables))

    def has_blocks_for_next(self) -> bool:
        """Tell whether blocks are at hand for the next token of the first offer, and for each sequence to grow."""
        waiting = self.waiting.first()
        if waiting is None:
            return False
        num_tokens = len(waiting.sequence.token_ids)
        return self.scheduler.capacity.has_blocks(num_lacking(waiting.tables, num_tokens, num_tokens))

    def start_next(self) -> DecodeSequence | None:
        """Accept the first offer and reserve a row, if there is room; the KV is complete."""
        waiting = self.waiting.first()
        if waiting is None or not self.scheduler.capacity.has_row() or not self.has_blocks_for_next():
            return None
        self.waiting.remove(waiting)
        self.shared.accept(waiting.offer)
        self.scheduler.reserve(waiting.sequence, waiting.tables)
        self.sealing.begin(waiting.sequence, waiting.offer)
        return waiting.sequence

    def abort(self, request_id: str, attempt: int) -> None:
        """Decline every attempt up to `attempt`."""
        self._decline(self.waiting.find(request_id, attempt))

    def release_blocks(self) -> bool:
        """Free the blocks of the last offer for decoding sequences; tell whether there was an offer.

        The offer is accepted first, so the blocks stay leased by the decode worker.
        """
        if not self.waiting:
            return False
        last = self.waiting.last()
        self.waiting.remove(last)
        self.shared.accept(last.offer)
        self.scheduler.allocator.free(held_by(last.tables))
        reason = f"{self.shortage}, what is decoded already goes first"
        self.fail(last.sequence.key, ErrorCode.PREEMPTED, reason)
        return True

    def drop_all(self) -> None:
        """Decline every offer."""
        self._decline(list(self.waiting))

    def _decline(self, offers: list[Waiting]) -> None:
        for waiting in offers:
            self.waiting.remove(waiting)
            self.shared.decline(waiting.offer)
