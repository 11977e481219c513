"""Progress of prompts still being computed: blocks are pulled ahead if there is room, or later by a hint."""

import time
from collections.abc import Sequence

from common.kv.pool import KVPool
from common.memory.base.copy_costs import pull_us
from common.serving.prompts.requests import Key, is_attempt
from common.wire.messages.handoff import DecodeRequest, KVProgress
from common.wire.values.kv_layout import KVLayout
from common.wire.values.packing import unpack_ids
from common.wire.values.resumption import bytes_to_resume
from decode_worker.arrivals.ahead import SILENCE_S, Ahead, Begun
from decode_worker.arrivals.announced import Announced
from decode_worker.arrivals.pulled_prompt import Handoff
from decode_worker.arrivals.sources import Sources
from decode_worker.sequences.row_queue import RowQueue
from decode_worker.sequences.scheduler import DecodeScheduler
from decode_worker.sequences.sequence import DecodeSequence

MAX_HINTS = 64
LONG_US = 5000.0
"""Pulls of cached blocks that take longer are avoided: a look-up takes less."""


class EarlyPulls:
    """Prompts pulled ahead, and hints of prompts without room yet.

    Args:
        waiting: complete prompts, which come first.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        pool: KVPool,
        sources: Sources,
        announced: Announced,
        waiting: RowQueue[Handoff],
    ) -> None:
        self.scheduler, self.sources, self.announced, self.waiting = scheduler, sources, announced, waiting
        self.ahead = Ahead(scheduler, pool)
        self.hints: dict[Key, tuple[KVProgress, float]] = {}  # latest progress without room yet, with its time

    def progress(self, message: KVProgress) -> None:
        """Pull the complete blocks of an announced prompt once there is room."""
        request_id, attempt = key = (message.request_id, message.attempt)
        source_ids, source = unpack_ids(message.block_ids), self.sources.find(message.worker_id, message.epoch)
        self.drop(request_id, attempt - 1 if source_ids else attempt)
        sequence = self.announced.find(key)
        if not source_ids or source is None or source.server is None or source.server.pool is None or sequence is None:
            return
        if _is_mostly_here(self.scheduler.layout, sequence, message.num_tokens, source.gb_per_s):
            return
        pool = source.server.pool
        complete = pool.shape.by_group(source_ids)
        if not self.waiting and _may_be_of(self.scheduler.layout, message.num_tokens, complete):
            self.ahead.begin(key, pool, message.num_tokens)
        if key in self.ahead.begun:
            self.ahead.pull(key, source_ids, unpack_ids(message.generations))
        elif len(self.hints) < MAX_HINTS:
            self.hints[key] = message, time.monotonic()

    def follow_hint(self) -> None:
        """Begin with the oldest hint if there is room by now; complete prompts come first."""
        if self.waiting or not self.hints:
            return
        key, (message, progress_s) = next(iter(self.hints.items()))
        if has_room := self.scheduler.capacity.has_room(message.num_tokens + 1):
            self.progress(message)
        if has_room or time.monotonic() - progress_s > SILENCE_S:
            del self.hints[key]

    def find(self, handoff: Handoff) -> Begun | None:
        """Return the part of a handoff pulled ahead, if any."""
        sequence, pool = handoff.sequence, handoff.server.pool
        if pool is None:
            return None
        num_tokens = len(sequence.token_ids) - 1
        return self.ahead.find(sequence.key, pool, num_tokens, handoff.source_ids, handoff.generations)

    def drop(self, request_id: str, attempt: int) -> None:
        """Give up every attempt up to `attempt`, whether begun or only hinted at."""
        self.ahead.drop(request_id, attempt)
        for key in [key for key in self.hints if is_attempt(key, request_id, attempt)]:
            del self.hints[key]

    def drop_begun(self, but: Key | None = None) -> None:
        """Give up every prompt pulled ahead except `but`."""
        self.ahead.drop_all(but)
        self.ahead.free_dropped()

    def forget(self, worker_id: str, epoch: int) -> None:
        """Forget a dead prefill worker: give up prompts pulled ahead; offers of complete prompts stay."""
        source = self.sources.forget(worker_id, epoch)
        if source is not None and source.server is not None and source.server.pool is not None:
            self.ahead.drop_source(source.server.pool)


def _is_mostly_here(layout: KVLayout, sequence: DecodeSequence, num_tokens: int, gb_per_s: float) -> bool:
    """Tell whether most of a prompt is cached here, as the router expects, and would take long to be pulled again.

    Once complete, such a prompt is looked up, and only the rest is pulled.
    """
    request = sequence.request
    if not isinstance(request, DecodeRequest) or 2 * request.num_known < num_tokens or not gb_per_s:
        return False
    return pull_us(bytes_to_resume(layout, request.num_known // layout.block_size), gb_per_s) > LONG_US


def _may_be_of(layout: KVLayout, num_tokens: int, complete: Sequence[Sequence[int]]) -> bool:
    """Tell whether a prompt of `num_tokens` can have so many complete blocks, by group."""
    pairs = zip(layout.groups, complete, strict=True)
    return all(len(ids) * group.block_size <= num_tokens for group, ids in pairs)
