"""The only owner of blocks between "prompt computed" and "decode worker done pulling".

    prefill scheduler ──keep──▶ handoff table ──release | expire | drop_target──▶ free

A lease that the decode worker renews bounds how long blocks are kept. Blocks of a lease that ran out
are free although the target may still hold their ids: it starts no pull on a lease that it has not
seen renewed (see decode_worker.intake), and the router drops what a superseded attempt says.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from common.kv.blocks import Allocator
from prefill_worker.sequence import Key


@dataclass(slots=True)
class Kept:
    """Blocks kept for one decode worker."""

    worker_id: str
    epoch: int
    block_ids: list[int]
    deadline_s: float


class HandoffTable:
    """Kept blocks by (request_id, attempt). Torch-free; the caller brings the time."""

    def __init__(self, allocator: Allocator, lease_s: float) -> None:
        self.allocator = allocator
        self.lease_s = lease_s
        self.kept: dict[Key, Kept] = {}

    def keep(self, key: Key, worker_id: str, epoch: int, block_ids: list[int], now_s: float) -> None:
        """Take ownership of `block_ids` for a decode worker's incarnation."""
        self.kept[key] = Kept(worker_id, epoch, block_ids, now_s + self.lease_s)

    def renew(self, worker_id: str, epoch: int, keys: Iterable[Key], now_s: float) -> list[Key]:
        """Extend the leases that this incarnation holds; returns those keys."""
        held = [key for key in keys if self._holder(key) == (worker_id, epoch)]
        for key in held:
            self.kept[key].deadline_s = now_s + self.lease_s
        return held

    def by_holder(self, keys: Iterable[Key]) -> dict[tuple[str, int], list[Key]]:
        """Those of `keys` that are kept, by the incarnation that they are kept for."""
        held: defaultdict[tuple[str, int], list[Key]] = defaultdict(list)
        for key in keys:
            if (holder := self._holder(key)) is not None:
                held[holder].append(key)
        return held

    def release(self, worker_id: str, epoch: int, key: Key) -> bool:
        """The holder is done; False, and harmless, for anybody else or a second time."""
        if self._holder(key) != (worker_id, epoch):
            return False
        self._free(key)
        return True

    def drop_target(self, worker_id: str, epoch: int) -> list[Key]:
        """That incarnation is dead: free what was kept for it."""
        return self._free_all(
            [key for key, kept in self.kept.items() if (kept.worker_id, kept.epoch) == (worker_id, epoch)]
        )

    def expire(self, now_s: float) -> list[Key]:
        """Free what nobody claimed in time."""
        return self._free_all([key for key, kept in self.kept.items() if kept.deadline_s < now_s])

    def blocks(self) -> list[list[int]]:
        """Block ids of every entry."""
        return [kept.block_ids for kept in self.kept.values()]

    def _holder(self, key: Key) -> tuple[str, int] | None:
        kept = self.kept.get(key)
        return (kept.worker_id, kept.epoch) if kept else None

    def _free_all(self, keys: list[Key]) -> list[Key]:
        for key in keys:
            self._free(key)
        return keys

    def _free(self, key: Key) -> None:
        self.allocator.free(self.kept.pop(key).block_ids)
