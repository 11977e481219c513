"""The prefill workers that this decode worker can pull from.

Each offers its pool; it is mapped and proven before anything is pulled, and the answer goes to the prefill
worker and to the router. A pool that cannot be proven is offered again. The running batch never waits for a proof.
"""

import logging
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from common.device.engine import Engine
from common.errors import KVError, TransferFailed
from common.kv.proof import prove_path
from common.kv.transport import PeerPool, SharedPeerPool, check_compatible
from common.wire.handoff_messages import KVPathResult, KVPoolExport
from common.wire.messages import SHARED_POOL, KVPathReport
from common.wire.sockets import Hub

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Source:
    """One incarnation of a prefill worker whose pool we can pull from."""

    worker_id: str
    epoch: int
    identity: bytes
    pool: PeerPool
    gb_per_s: float


@dataclass(slots=True, eq=False)
class Meeting:
    """A pool that is being mapped and proven, or waits for that."""

    identity: bytes
    export: KVPoolExport
    proof: Generator[None, None, Source]


class Sources:
    """Prefill workers by id, and those whose pools are to be proven, one after the other."""

    def __init__(self, engine: Engine, hub: Hub, worker_id: str, epoch: int) -> None:
        self.engine = engine
        self.hub = hub
        self.worker_id, self.epoch = worker_id, epoch
        self.by_id: dict[str, Source] = {}
        self.meetings: deque[Meeting] = deque()

    def meet(self, identity: bytes, export: KVPoolExport) -> None:
        """Have a prefill worker's pool proven, unless that is under way; an earlier incarnation must be forgotten."""
        if not any(_is_of(meeting, export.worker_id, export.epoch) for meeting in self.meetings):
            self.meetings.append(Meeting(identity, export, self._prove(identity, export)))

    def tend(self) -> KVPathReport | None:
        """Go on with a proof; when it is over answer the prefill worker, and return what the router should know."""
        if not self.meetings:
            return None
        error, gb_per_s, meeting = "", 0.0, self.meetings[0]
        try:
            next(meeting.proof)
            return None
        except StopIteration as proven:
            gb_per_s = proven.value.gb_per_s
        except KVError as problem:
            error = str(problem)
            logger.error("no KV path from %s: %s", meeting.export.worker_id, error)
        self.meetings.popleft()
        is_shared = self._is_shared(meeting.export)
        self.hub.send(meeting.identity, KVPathResult(self.worker_id, self.epoch, is_shared, error))
        return self._report(meeting.export, gb_per_s, error)

    def find(self, worker_id: str, epoch: int) -> Source | None:
        """That very incarnation, if we can pull from it."""
        source = self.by_id.get(worker_id)
        return source if source is not None and source.epoch == epoch else None

    def epochs(self, worker_id: str) -> set[int]:
        """Of its incarnations that are proven or to be proven."""
        proven = {source.epoch for source in self.by_id.values() if source.worker_id == worker_id}
        return proven | {m.export.epoch for m in self.meetings if m.export.worker_id == worker_id}

    def forget(self, worker_id: str, epoch: int) -> Source | None:
        """That incarnation is dead; waits for copies under way. Returns it if it was proven."""
        for meeting in [m for m in self.meetings if _is_of(m, worker_id, epoch)]:
            self.meetings.remove(meeting)
            meeting.proof.close()
        source = self.find(worker_id, epoch)
        if source is not None:
            del self.by_id[worker_id]
            source.pool.close()
        return source

    def close(self) -> None:
        for meeting in self.meetings:
            meeting.proof.close()
        for source in self.by_id.values():
            source.pool.close()

    def _prove(self, identity: bytes, export: KVPoolExport) -> Generator[None, None, Source]:
        """Map a pool and prove it; a worker met before is only answered again, as a restarted router has forgotten."""
        if known := self.find(export.worker_id, export.epoch):
            return known
        if self._is_shared(export):  # both have seen the proof block of its owner
            logger.info("KV path from %s: a pool that both share", export.worker_id)
            source = Source(export.worker_id, export.epoch, identity, SharedPeerPool(self.engine.pool.shape), 0.0)
            self.by_id[export.worker_id] = source
            return source
        check_compatible(export, self.engine.pool, self.engine.transport.name)
        pool = self.engine.transport.open_peer(export, self.engine.device)
        try:
            gb_per_s = yield from prove_path(pool, export, self.engine.pool, self.engine.allocator)
        except KVError as error:
            pool.close()
            raise TransferFailed(f"{export.transport} from {export.worker_id}: {error}") from None
        except GeneratorExit:  # it is forgotten meanwhile
            pool.close()
            raise
        logger.info("KV path from %s: %s, %.1f GB/s", export.worker_id, export.transport, gb_per_s)
        source = self.by_id[export.worker_id] = Source(export.worker_id, export.epoch, identity, pool, gb_per_s)
        return source

    def _is_shared(self, export: KVPoolExport) -> bool:
        return self.engine.shared is not None and export.pool_id == self.engine.shared.pool_id

    def _report(self, export: KVPoolExport, gb_per_s: float, error: str) -> KVPathReport:
        return KVPathReport(
            worker_id=self.worker_id,
            epoch=self.epoch,
            prefill_worker_id=export.worker_id,
            prefill_epoch=export.epoch,
            transport=SHARED_POOL if self._is_shared(export) else export.transport,
            gb_per_s=gb_per_s,
            error=error,
        )


def _is_of(meeting: Meeting, worker_id: str, epoch: int) -> bool:
    return (meeting.export.worker_id, meeting.export.epoch) == (worker_id, epoch)
