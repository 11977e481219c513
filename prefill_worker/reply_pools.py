"""Pools of decode workers that are not ours, where replies are: a next turn may find there what ours lacks.

    KVPoolExport ──▶ being proven ──▶ known: texts are looked for there
                       ▲  └──a problem, a pause──┐     │
                       └─────────────────────────┴─────┘ the visit is lost

Nothing depends on one: what is not found there is computed.
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
"""Between two proofs of a path that fails, twice as long each time."""


@dataclass(slots=True, eq=False)
class Holder:
    """One incarnation of a decode worker."""

    export: KVPoolExport
    proof: Generator[None, None, tuple[Visit, float]] | None = None
    visit: Visit | None = None  # once it is proven
    gb_per_s: float = 0.0
    next_try_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S  # after the next proof that fails


class Holders:
    """By worker id; one path is proven at a time, bit by bit, and nobody waits for that.

    Args:
        is_on: otherwise nobody is visited, and nothing is found anywhere.
    """

    def __init__(self, visits: Visits, *, clock: Callable[[], float] = time.monotonic, is_on: bool = True) -> None:
        self.visits, self._clock, self._is_on = visits, clock, is_on
        self.by_id: dict[str, Holder] = {}

    @property
    def is_proving(self) -> bool:
        """Whether a path is being proven."""
        return any(holder.proof is not None for holder in self.by_id.values())

    def meet(self, export: KVPoolExport) -> None:
        """A decode worker says where its pool is; an earlier incarnation of it is gone."""
        known = self.by_id.get(export.worker_id)
        if not self._is_on or (known is not None and known.export == export):
            return
        if known is not None:
            self.leave(known.export.worker_id, known.export.epoch)
        self.by_id[export.worker_id] = Holder(export)

    def leave(self, worker_id: str, epoch: int) -> None:
        """That incarnation is dead, or blocks do not travel between us."""
        holder = self.by_id.get(worker_id)
        if holder is None or holder.export.epoch != epoch:
            return
        del self.by_id[worker_id]
        if holder.proof is not None:
            holder.proof.close()
        if holder.visit is not None:
            self.visits.leave(holder.visit)

    def find(self, worker_id: str, epoch: int) -> Holder | None:
        """That very incarnation, if blocks travel from its pool."""
        holder = self.by_id.get(worker_id)
        is_there = holder is not None and holder.export.epoch == epoch and holder.visit is not None
        return holder if is_there else None

    def tend(self) -> None:
        """Go on with a proof."""
        now_s = self._clock()
        due = [h for h in self.by_id.values() if h.visit is None and (h.proof is not None or now_s >= h.next_try_s)]
        if due:
            self._go_on(max(due, key=lambda holder: holder.proof is not None))

    def lose(self, visit: Visit) -> None:
        """A visit has ended for want of its server."""
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
