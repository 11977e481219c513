"""One pool of KV blocks: its memory, who uses it, and who gets blocks of it.

A worker asks for blocks ahead of need, so that no step waits for them; it gets what it asks for at once and whole, of
every group, or waits: so nobody waits for blocks of one group while it keeps others of another from him. Those that
decode come first, as what they have begun would be lost; prompts leave them a reserve to grow into. While somebody
waits all others are asked to give back what they hold in hand.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from common.memory.backing import Memory
from common.memory.block_index import BlockIndex
from common.memory.exchange import Answer
from common.wire.kv_layout import Counts, KVLayout
from common.wire.memory_messages import BlocksLeased, PoolShortage
from common.wire.pool_shape import are_enough, minus


@dataclass(frozen=True, slots=True)
class User:
    """A worker, as far as a pool cares."""

    client: int
    worker: tuple[str, int]  # id and epoch
    is_decoding: bool = False
    is_guest: bool = False  # it takes offers to pull them, and leases nothing


@dataclass(slots=True, eq=False)
class Pool:
    """Memory, who has its blocks, and who wants some."""

    layout: KVLayout
    pool_id: int
    memory: Memory
    index: BlockIndex
    reserve: float  # share that prompts leave to what is being decoded
    users: dict[int, User] = field(default_factory=dict)
    wants: dict[int, Counts] = field(default_factory=dict)  # by client, first come first
    passed: Counter[int] = field(default_factory=Counter)  # blocks that others got before one that waits for longer
    is_short: bool = False  # as users were told
    num_done: int = 0  # how often blocks were sealed, or have changed hands

    def in_order(self) -> list[int]:
        """Those that wait: who decodes, and wants least, before all others, first come first."""

        def place(client: int) -> tuple[bool, int]:
            is_decoding = self.users[client].is_decoding
            return not is_decoding, sum(self.wants[client]) if is_decoding else 0

        return sorted(self.wants, key=place)  # stable

    def may_pass(self, waiting: list[int], wanted: Counts) -> bool:
        """Whether prompts that wait for much may wait for that longer: for half as many blocks as they want, in all."""
        return not any(self.users[client].is_decoding for client in waiting) and all(
            self.passed[client] + sum(wanted) <= sum(self.wants[client]) // 2 for client in waiting
        )

    def forget(self, client: int) -> None:
        """It waits no more."""
        self.wants.pop(client, None)
        del self.passed[client]

    def num_spare(self, client: int) -> int:
        """Blocks that may be filled for what a client asks for: none while somebody waits for some."""
        return 0 if self.wants else minus(self.index.num_free, self._reserve_before(client))[0]

    def deal(self) -> list[Answer]:
        """Give blocks to those that wait, in order; who wants little may pass who wants much, for a while."""
        answers, available = [], self.index.num_free
        waiting: list[int] = []
        for client in self.in_order():
            wanted, reserve = self.wants[client], self._reserve_before(client)
            is_next = are_enough(minus(available, reserve), wanted)
            if is_next or (self.may_pass(waiting, wanted) and are_enough(minus(self.index.num_free, reserve), wanted)):
                self.passed.update(dict.fromkeys(waiting, sum(wanted)))
                self.forget(client)
                block_ids = self.index.lease(client, wanted)
                leased = BlocksLeased(*packed(block_ids, self.index.generations(block_ids)))
                answers.append(Answer(client, leased))
            else:
                waiting.append(client)
            available = minus(available, wanted)
        if self.is_short != bool(self.wants):
            self.is_short = bool(self.wants)
            users = [user.client for user in self.users.values() if not user.is_guest]
            answers += [Answer(client, PoolShortage(self.is_short)) for client in users]
        return answers

    def _reserve_before(self, client: int) -> Counts:
        """Blocks that it leaves to what is being decoded."""
        index = self.index
        decoding = [user.client for user in self.users.values() if user.is_decoding]
        is_decoding = bool(index.offers) or any(index.holds(client) for client in decoding)
        if client in decoding or not is_decoding:
            return index.shape.layout.nothing
        return tuple(int(self.reserve * count) for count in index.shape.num_blocks)


def packed(block_ids: np.ndarray, generations: np.ndarray) -> tuple[bytes, bytes]:
    """As these travel: ids, [num_blocks] intp, and generations, [num_blocks] int32."""
    return block_ids.astype(np.int32).tobytes(), generations.tobytes()
