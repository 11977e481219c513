"""Decode workers' pools with replies: the next turn of a chat may find missing blocks there.

    KVPoolExport ──▶ being proven ──▶ known: prefixes are looked up there
                       ▲  └──a problem, a pause──┐     │
                       └─────────────────────────┴─────┘ the visit is lost.

No request depends on such a pool: blocks not found there are computed.
"""

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from common.base.errors import KVError
from common.serving.worker.peer_servers import Visit, Visits
from common.wire.messages.handoff import KVPoolExport

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between two proofs of a failing path, doubled each time."""


@dataclass(slots=True, eq=False)
class Holder:
    """An incarnation of a decode worker with a pool of replies."""

    export: KVPoolExport
    proof: Generator[None, None, tuple[Visit, float]] | None = None
    visit: Visit | None = None  # set once the path is proven
    gb_per_s: float = 0.0
    next_try_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S  # after the next failed proof


class Holders:
    """Holders by worker id. A single path is proven at a time, in small pieces, so the loop never waits.

    Args:
        is_on: false turns visits off, so `find` finds no holder.
    """

    def __init__(self, visits: Visits, *, clock: Callable[[], float] = time.monotonic, is_on: bool = True) -> None:
        self.visits, self._clock, self._is_on = visits, clock, is_on
        self.by_id: dict[str, Holder] = {}

    @property
    def is_proving(self) -> bool:
        """Tell whether a path is being proven."""
        return any(holder.proof is not None for holder in self.by_id.values())

    def add(self, export: KVPoolExport) -> None:
        """Note a decode worker's pool, in place of an earlier incarnation's."""
        known = self.by_id.get(export.worker_id)
        if not self._is_on or (known is not None and known.export == export):
            return
        if known is not None:
            self.leave(known.export.worker_id, known.export.epoch)
        self.by_id[export.worker_id] = Holder(export)

    def leave(self, worker_id: str, epoch: int) -> None:
        """Forget a dead incarnation of a decode worker."""
        holder = self.by_id.get(worker_id)
        if holder is None or holder.export.epoch != epoch:
            return
        del self.by_id[worker_id]
        if holder.proof is not None:
            holder.proof.close()
        if holder.visit is not None:
            self.visits.leave(holder.visit)

    def find(self, worker_id: str, epoch: int) -> Holder | None:
        """Return the holder of an incarnation; None without a proven path."""
        holder = self.by_id.get(worker_id)
        is_there = holder is not None and holder.export.epoch == epoch and holder.visit is not None
        return holder if is_there else None

    def tend(self) -> None:
        """Drive the current or next due proof by a piece."""
        now_s = self._clock()
        due = [h for h in self.by_id.values() if h.visit is None and (h.proof is not None or now_s >= h.next_try_s)]
        if due:
            self._go_on(max(due, key=lambda holder: holder.proof is not None))

    def lose(self, visit: Visit) -> None:
        """End a visit after the memory server's loss, and retry later."""
        for holder in self.by_id.values():
            if holder.visit is visit:
                self.visits.leave(visit)
                holder.visit = None
                self._pause(holder)

    def close(self) -> None:
        for holder in self.by_id.values():
            if holder.proof is not None:
                holder.proof.close()
        self.visits.close()

    def _go_on(self, holder: Holder) -> None:
        proof = holder.proof = holder.proof or self.visits.prove(holder.export)
        try:
            next(proof)
        except StopIteration as proven:
            holder.proof, (holder.visit, holder.gb_per_s) = None, proven.value
            holder.pause_s = FIRST_PAUSE_S
            logger.info("replies can be taken from %s: %.1f GB/s", holder.export.worker_id, holder.gb_per_s)
        except KVError as problem:
            holder.proof = None
            logger.warning("replies of %s are computed again: %s", holder.export.worker_id, problem)
            self._pause(holder)

    def _pause(self, holder: Holder) -> None:
        holder.next_try_s = self._clock() + holder.pause_s
        holder.pause_s = min(2 * holder.pause_s, LONGEST_PAUSE_S)
