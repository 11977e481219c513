"""A worker's part in a pool that it has to itself, with every block at hand: what it offers stays here."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from common.memory.shared_pool import OfPrompt, SharedPool
from common.wire.memory_messages import KVOffer
from common.wire.packing import pack_ids
from common.wire.sampling_params import SamplingParams
from tests.allocator import BlockAllocator


class LonePool:
    """Stands in for `SharedPool`; a test puts what it is told into `arriving`."""

    pool_id, num_done, problem, is_sending = 7, 0, "", False
    client = SimpleNamespace(path=Path("/nowhere/memory.sock"))

    def __init__(self, allocator: BlockAllocator) -> None:
        self.magazine = allocator
        self.offered: list[KVOffer] = []
        self.arriving: list[OfPrompt] = []
        self.is_busy = False  # as it was last told
        self._descriptor = os.eventfd(0)  # at which nothing ever arrives

    @property
    def shared(self) -> SharedPool:
        return cast(SharedPool, self)

    def receive(self) -> list[OfPrompt]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def offer(
        self,
        target: tuple[str, int],
        key: tuple[str, int],
        token_ids: Sequence[int],
        num_outputs: int,
        sampling: SamplingParams,
        block_ids: Sequence[int],
        chain: tuple[bytes, bytes] = (b"", b""),
    ) -> bool:
        tokens, ids = pack_ids(token_ids), pack_ids(block_ids)
        generations = self.magazine.release(block_ids).tobytes()
        self.offered.append(KVOffer(*target, *key, tokens, num_outputs, sampling, ids, generations, 0, *chain))
        return True

    def tend(self, level: int, floor: int, *, is_busy: bool = False) -> None:
        self.is_busy = is_busy

    def take_problem(self) -> str:
        return ""

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)
