"""Decode workers' pools with replies: the next turn of a chat may find missing blocks there.

    KVPoolExport ──▶ being proven ──▶ known: prefixes are looked up there
                       ▲  └──a problem, a pause──┐     │
                       └─────────────────────────┴─────┘ the server is lost.

No request depends on such a pool: blocks not found there are computed.
"""

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from common.base.errors import KVError
from common.serving.worker.peer_servers import PeerServer, PeerServers
from common.wire.messages.handoff import KVPoolExport

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between two proofs of a failing path, doubled each time."""


@dataclass(slots=True, eq=False)
class ReplyPool:
    """An incarnation of a decode worker with a pool of replies."""

    export: KVPoolExport
    proof: Generator[None, None, tuple[PeerServer, float]] | None = None
    server: PeerServer | None = None  # set once the path is proven
    gb_per_s: float = 0.0
    next_try_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S  # after the next failed proof


class ReplyPools:
    """Reply pools by worker id. A single path is proven at a time, in small pieces, so the loop never waits.

    Args:
        is_on: false ignores all pools, so `find` finds none.
    """

    def __init__(self, peers: PeerServers, *, clock: Callable[[], float] = time.monotonic, is_on: bool = True) -> None:
        self.peers, self._clock, self._is_on = peers, clock, is_on
        self.by_id: dict[str, ReplyPool] = {}

    @property
    def is_proving(self) -> bool:
        """Tell whether a path is being proven."""
        return any(pool.proof is not None for pool in self.by_id.values())

    def add(self, export: KVPoolExport) -> None:
        """Add a decode worker's pool, in place of an earlier incarnation's."""
        known = self.by_id.get(export.worker_id)
        if not self._is_on or (known is not None and known.export == export):
            return
        if known is not None:
            self.leave(known.export.worker_id, known.export.epoch)
        self.by_id[export.worker_id] = ReplyPool(export)

    def leave(self, worker_id: str, epoch: int) -> None:
        """Forget a dead incarnation of a decode worker."""
        pool = self.by_id.get(worker_id)
        if pool is None or pool.export.epoch != epoch:
            return
        del self.by_id[worker_id]
        if pool.proof is not None:
            pool.proof.close()
        if pool.server is not None:
            self.peers.leave(pool.server)

    def find(self, worker_id: str, epoch: int) -> ReplyPool | None:
        """Return the pool of an incarnation; None without a proven path."""
        pool = self.by_id.get(worker_id)
        is_there = pool is not None and pool.export.epoch == epoch and pool.server is not None
        return pool if is_there else None

    def prove_next(self) -> None:
        """Drive the current or next due proof by a piece."""
        now_s = self._clock()
        due = [pool for pool in self.by_id.values() if not pool.server and (pool.proof or now_s >= pool.next_try_s)]
        if due:
            self._continue(max(due, key=lambda pool: pool.proof is not None))

    def lose(self, server: PeerServer) -> None:
        """Leave a lost memory server, and retry later."""
        for pool in self.by_id.values():
            if pool.server is server:
                self.peers.leave(server)
                pool.server = None
                self._pause(pool)

    def close(self) -> None:
        for pool in self.by_id.values():
            if pool.proof is not None:
                pool.proof.close()
        self.peers.close()

    def _continue(self, pool: ReplyPool) -> None:
        proof = pool.proof = pool.proof or self.peers.prove(pool.export)
        try:
            next(proof)
        except StopIteration as proven:
            pool.proof, (pool.server, pool.gb_per_s) = None, proven.value
            pool.pause_s = FIRST_PAUSE_S
            logger.info("replies can be taken from %s: %.1f GB/s", pool.export.worker_id, pool.gb_per_s)
        except KVError as problem:
            pool.proof = None
            logger.warning("replies of %s are computed again: %s", pool.export.worker_id, problem)
            self._pause(pool)

    def _pause(self, pool: ReplyPool) -> None:
        pool.next_try_s = self._clock() + pool.pause_s
        pool.pause_s = min(2 * pool.pause_s, LONGEST_PAUSE_S)
