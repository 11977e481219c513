"""Blocks of prompts that are still being computed, pulled while the prefill worker goes on.

    KVProgress ──▶ begun ──KVHandoff, take──▶ the handoff's, which pulls the rest
                     └──abort, silence, source lost, blocks wanted──▶ leaving ──copies over──▶ free

Nobody keeps the source blocks for us: they may be another prompt's before a copy ends. What was copied
counts only if the handoff of the same attempt follows, as then they have been this prompt's all the time.
So nothing here is owed to anyone, and it is the first to go when a sequence wants blocks.
"""

import time
from dataclasses import dataclass, field

from common.kv.pool import KVPool
from common.kv.transport import PeerPool
from decode_worker.copies import Copies
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import Key

SILENCE_S = 30.0
"""After so long without progress or handoff, a prompt is not expected any more."""


@dataclass(slots=True, eq=False)
class Begun:
    """Blocks of ours for a whole prompt and its first token, filled from the first on."""

    source_pool: PeerPool
    block_ids: list[int]
    heard_s: float
    source_ids: list[int] = field(default_factory=list)  # that pulls were started for
    copies: Copies = field(default_factory=Copies)


class Ahead:
    """Owner of blocks until they are taken or free."""

    def __init__(self, scheduler: DecodeScheduler, pool: KVPool) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.begun: dict[Key, Begun] = {}
        self.leaving: list[Begun] = []  # given up; copies into the blocks may be under way

    def __len__(self) -> int:
        return len(self.begun) + len(self.leaving)

    def begin(self, key: Key, source_pool: PeerPool, num_tokens: int) -> None:
        """Make ready for a prompt of `num_tokens`, if there is room for a sequence of its length."""
        if key not in self.begun and self.scheduler.has_room(num_tokens + 1):
            block_ids = self.scheduler.allocator.allocate(self.scheduler.num_blocks(num_tokens + 1))
            self.begun[key] = Begun(source_pool, block_ids, time.monotonic())

    def pull(self, key: Key, source_ids: list[int]) -> None:
        """The first blocks of a prompt are complete: start pulling those that are new, if it was begun."""
        begun = self.begun.get(key)
        if begun is None:
            return
        new = slice(len(begun.source_ids), len(source_ids))
        begun.heard_s = time.monotonic()
        if len(source_ids) > len(begun.block_ids):  # it is not the prompt that was begun
            self._give_up([key])
        elif source_ids[new]:
            begun.copies.start(begun.source_pool, source_ids[new], self.pool, begun.block_ids[new])
            begun.source_ids = source_ids
        if begun.copies.problem and key in self.begun:  # the handoff may have better luck
            self._give_up([key])

    def find(self, key: Key, source_pool: PeerPool, source_ids: list[int]) -> Begun | None:
        """What was begun of a handoff of `source_ids`."""
        begun = self.begun.get(key)
        if begun is None or begun.source_pool is not source_pool:
            return None
        if begun.source_ids != source_ids[: len(begun.source_ids)]:
            return None
        return begun

    def take(self, key: Key) -> None:
        """The handoff owns it from now on; every copy may still be under way."""
        del self.begun[key]

    def drop(self, request_id: str, attempt: int) -> None:
        """Give up every attempt of a request up to `attempt`."""
        self._give_up([key for key in self.begun if key[0] == request_id and key[1] <= attempt])

    def drop_source(self, source_pool: PeerPool) -> None:
        """Give up what comes from a source."""
        self._give_up([key for key, begun in self.begun.items() if begun.source_pool is source_pool])

    def drop_all(self, but: Key | None = None) -> None:
        """Give up everything, perhaps but one."""
        self._give_up([key for key in self.begun if key != but])

    def tend(self) -> None:
        """Give up what nothing was heard of, and free what is no longer copied into."""
        if not self:
            return
        now_s = time.monotonic()
        self._give_up([key for key, begun in self.begun.items() if now_s - begun.heard_s > SILENCE_S])
        over = [begun for begun in self.leaving if begun.copies.over()]
        self.leaving = [begun for begun in self.leaving if begun not in over]
        for begun in over:
            self.scheduler.allocator.free(begun.block_ids)

    def blocks(self) -> list[list[int]]:
        """Block ids of every entry."""
        return [begun.block_ids for begun in [*self.begun.values(), *self.leaving]]

    def _give_up(self, keys: list[Key]) -> None:
        self.leaving += [self.begun.pop(key) for key in keys]
