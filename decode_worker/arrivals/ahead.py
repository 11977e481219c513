"""Blocks of prompts still being computed, pulled while the prefill worker goes on.

    KVProgress ──▶ begun ──KVOffer, take──▶ the handoff's, which pulls the rest
                     └──abort, silence, source lost, blocks wanted──▶ dropped ──copies over──▶ free.

The source blocks are not kept for this worker: another prompt may fill a block before a copy ends. So a copy counts
only if the same generations of the source blocks are offered later. Then the blocks belonged to the prompt all the
time.

So no other party depends on these blocks. They go first when a sequence wants blocks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.copies import Copies, missing
from common.kv.pool import KVPool
from common.kv.tables import BlockTable, Tables, held_by, num_seen, tables_handed_over
from common.kv.transport import PeerPool
from common.serving.prompts.requests import Key, is_attempt
from decode_worker.sequences.scheduler import DecodeScheduler

SILENCE_S = 30.0
"""A prompt without progress or offer for so long is given up."""


@dataclass(slots=True, eq=False)
class Begun:
    """Leased blocks for a whole prompt and the first output, filled from the first block on.

    Only groups whose full blocks stay unchanged are filled ahead.
    """

    source_pool: PeerPool
    num_tokens: int  # of the prompt
    tables: Tables
    progress_s: float
    source_ids: Sequence[Sequence[int]]  # by group: source blocks of all pulls so far
    generations: dict[int, int] = field(default_factory=dict)  # by source block, when its pull began
    copies: Copies = field(default_factory=Copies)


class Ahead:
    """Owner of blocks until a handoff takes the blocks or they are free."""

    def __init__(self, scheduler: DecodeScheduler, pool: KVPool) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.begun: dict[Key, Begun] = {}
        self.dropped: list[Begun] = []  # given up; copies may be under way

    def __len__(self) -> int:
        return len(self.begun) + len(self.dropped)

    def begin(self, key: Key, source_pool: PeerPool, num_tokens: int) -> None:
        """Reserve blocks for a prompt of `num_tokens`, if there is room for such a sequence."""
        if key not in self.begun and self.scheduler.capacity.has_room(num_tokens + 1):
            layout = self.scheduler.layout
            fresh = self.scheduler.allocator.allocate(num_seen(layout, num_tokens + 1))
            tables = tables_handed_over(layout, num_tokens, fresh)
            self.begun[key] = Begun(source_pool, num_tokens, tables, time.monotonic(), [[] for _ in tables])

    def pull(self, key: Key, source_ids: list[int], generations: list[int]) -> None:
        """Start pulling the new complete blocks of a prompt, if the prompt was begun."""
        begun = self.begun.get(key)
        if begun is None:
            return
        begun.progress_s = time.monotonic()
        complete = begun.source_pool.shape.by_group(source_ids)
        if not all(map(_has_places, begun.tables, complete)):  # not the prompt that was begun
            self._drop([key])
        else:
            new = missing(begun.tables, complete, begun.source_ids)
            if new.source_ids:
                begun.copies.start(begun.source_pool, new.source_ids, self.pool, new.target_ids)
                begun.source_ids = complete
                begun.generations = dict(zip(source_ids, generations, strict=True)) | begun.generations  # oldest wins
        if begun.copies.problem and key in self.begun:  # a pull after the offer may succeed
            self._drop([key])

    def find(
        self,
        key: Key,
        source_pool: PeerPool,
        num_tokens: int,
        source_ids: Sequence[Sequence[int]],
        generations: dict[int, int],
    ) -> Begun | None:
        """Return the entry of a prompt if source, length, blocks by group and generations match the offer."""
        begun = self.begun.get(key)
        if begun is None or begun.source_pool is not source_pool or begun.num_tokens != num_tokens:
            return None
        if not begun.generations.items() <= generations.items():
            return None
        pairs = zip(begun.source_ids, source_ids, strict=True)
        return begun if all(ids == handed[: len(ids)] for ids, handed in pairs) else None

    def take(self, key: Key) -> None:
        """Hand an entry to its handoff, the owner from now on; copies may still be under way."""
        del self.begun[key]

    def drop(self, request_id: str, attempt: int) -> None:
        """Give up every attempt of a request up to `attempt`."""
        self._drop([key for key in self.begun if is_attempt(key, request_id, attempt)])

    def drop_source(self, source_pool: PeerPool) -> None:
        self._drop([key for key, begun in self.begun.items() if begun.source_pool is source_pool])

    def drop_all(self, but: Key | None = None) -> None:
        """Give up every prompt except `but`."""
        self._drop([key for key in self.begun if key != but])

    def free_dropped(self) -> None:
        """Give up prompts after a long silence, and free given up blocks whose copies are over."""
        if not self:
            return
        now_s = time.monotonic()
        self._drop([key for key, begun in self.begun.items() if now_s - begun.progress_s > SILENCE_S])
        over = [begun for begun in self.dropped if begun.copies.over()]
        self.dropped = [begun for begun in self.dropped if begun not in over]
        for begun in over:
            self.scheduler.allocator.free(held_by(begun.tables))

    def _drop(self, keys: list[Key]) -> None:
        self.dropped += [self.begun.pop(key) for key in keys]


def _has_places(table: BlockTable, complete: Sequence[int]) -> bool:
    """Tell whether a table can hold so many complete, unchanging blocks."""
    return len(complete) <= (len(table.block_ids) if table.group.is_append_only else 0)
