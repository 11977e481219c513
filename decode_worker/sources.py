"""The prefill workers that this decode worker can pull from.

Each offers its pool; it is mapped and proven before anything is pulled, and the answer goes to the prefill
worker and to the router. A pool that cannot be proven is offered again.
"""

import logging
from dataclasses import dataclass

from common.device.engine import Engine
from common.errors import KVError, TransferFailed
from common.kv.proof import prove_path
from common.kv.transport import PeerPool, check_compatible
from common.wire.handoff_messages import KVPathResult, KVPoolExport
from common.wire.messages import KVPathReport
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


class Sources:
    """Prefill workers by id."""

    def __init__(self, engine: Engine, hub: Hub, worker_id: str, epoch: int) -> None:
        self.engine = engine
        self.hub = hub
        self.worker_id, self.epoch = worker_id, epoch
        self.by_id: dict[str, Source] = {}

    def meet(self, identity: bytes, export: KVPoolExport) -> KVPathReport:
        """Map and prove a prefill worker's pool, answer it, and return what the router should know.

        A worker met before is only answered again: a restarted router has forgotten the answer. An earlier
        incarnation of it must be forgotten.
        """
        error = ""
        source = self.find(export.worker_id, export.epoch)
        try:
            source = source or self._prove(identity, export)
        except KVError as problem:
            error = str(problem)
            logger.error("no KV path from %s: %s", export.worker_id, error)
        self.hub.send(identity, KVPathResult(self.worker_id, self.epoch, error))
        return KVPathReport(
            worker_id=self.worker_id,
            epoch=self.epoch,
            prefill_worker_id=export.worker_id,
            prefill_epoch=export.epoch,
            transport=export.transport,
            gb_per_s=source.gb_per_s if source else 0.0,
            error=error,
        )

    def find(self, worker_id: str, epoch: int) -> Source | None:
        """That very incarnation, if we can pull from it."""
        source = self.by_id.get(worker_id)
        return source if source is not None and source.epoch == epoch else None

    def forget(self, source: Source) -> None:
        """It is dead; waits for copies under way."""
        del self.by_id[source.worker_id]
        source.pool.close()

    def close(self) -> None:
        for source in self.by_id.values():
            source.pool.close()

    def _prove(self, identity: bytes, export: KVPoolExport) -> Source:
        check_compatible(export, self.engine.pool, self.engine.transport.name)
        pool = self.engine.transport.open_peer(export, self.engine.device)
        try:
            gb_per_s = prove_path(pool, export, self.engine.pool, self.engine.allocator)
        except KVError as error:
            pool.close()
            raise TransferFailed(f"{export.transport} from {export.worker_id}: {error}") from None
        logger.info("KV path from %s: %s, %.1f GB/s", export.worker_id, export.transport, gb_per_s)
        source = self.by_id[export.worker_id] = Source(export.worker_id, export.epoch, identity, pool, gb_per_s)
        return source
