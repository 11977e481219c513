"""A worker's part in a pool that it has to itself, with every block at hand: what it offers stays here."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from common.memory.client.shared_pool import PromptMessage, SharedPool
from common.wire.messages.memory import KVOffer
from common.wire.values.packing import pack_ids
from tests.support.allocator import BlockAllocator


class LonePool:
    """Stands in for `SharedPool`; a test puts what it is told into `arriving`."""

    pool_id, num_done, problem, is_sending, is_behind, is_tainted = 7, 0, "", False, False, False
    client = SimpleNamespace(path=Path("/nowhere/memory.sock"), gate="")

    def __init__(self, allocator: BlockAllocator) -> None:
        self.leases = allocator
        self.offered: list[KVOffer] = []
        self.arriving: list[PromptMessage] = []
        self.is_busy = self._is_told = False  # as it was last told, and that there is a problem
        self._descriptor = os.eventfd(0)  # at which nothing ever arrives

    @property
    def shared(self) -> SharedPool:
        return cast(SharedPool, self)

    def receive(self) -> list[PromptMessage]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def offer(
        self,
        target: tuple[str, int],
        key: tuple[str, int],
        token_id: int,
        block_ids: Sequence[int],
        chain: tuple[bytes, bytes] = (b"", b""),
    ) -> bool:
        ids = pack_ids(block_ids)
        generations = self.leases.release(block_ids).tobytes()
        self.offered.append(KVOffer(*target, *key, token_id, ids, generations, bytes(-(-len(block_ids) // 8)), *chain))
        return not self.problem

    def receive_offer(self, offer: KVOffer) -> None: ...

    def update(self, level: int, floor: int, *, is_busy: bool = False) -> None:
        self.is_busy = is_busy

    def take_problem(self) -> str:
        told, self._is_told = self._is_told, bool(self.problem)
        return "" if told else self.problem

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)
