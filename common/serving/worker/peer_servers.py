"""Visits of a worker to memory servers of other pools: a connection and a mapping for each pool.

A visit lasts while a worker of the pool is known or a block of the pool is in use here. So offered blocks outlive the
worker that offered them.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import zmq

from common.base.errors import KVError, MemoryLost, TransferFailed
from common.device.engine.engine import Engine, describe_device
from common.kv.proof import prove_path
from common.kv.transport import PeerPool, check_compatible
from common.memory.client.peer_pool_client import PeerMessage, PeerPoolClient
from common.wire.messages.handoff import KVPoolExport

logger = logging.getLogger(__name__)

GREETING_S = 2.0
"""Longest wait for a server's reply with the pool's place; normally a moment."""


@dataclass(slots=True, eq=False)
class Visit:
    """A visited pool."""

    peer: PeerPoolClient
    pool: PeerPool | None = None  # None until mapped
    num_workers: int = 0  # workers of the pool, known or being met

    @property
    def problem(self) -> str:
        """Reason why the server sends nothing any more; empty if the server works."""
        return self.peer.problem


def export_of(engine: Engine, worker: tuple[str, int]) -> KVPoolExport:
    """Describe this worker's pool for visitors."""
    worker_id, epoch = worker
    return KVPoolExport(
        worker_id=worker_id,
        epoch=epoch,
        transport=engine.transport.name,
        device_uuid=describe_device(engine.device)[1],
        pool_id=engine.shared.pool_id,
        memory_socket=str(engine.shared.client.path.absolute()),
        layout=engine.pool.layout,
    )


class Visits:
    """Visits by pool.

    Args:
        worker: id and epoch of this worker.
        poller: wakes the loop on an offer.
    """

    def __init__(self, engine: Engine, worker: tuple[str, int], poller: zmq.Poller) -> None:
        self.engine, self.worker, self.poller = engine, worker, poller
        self.by_pool: dict[int, Visit] = {}

    def prove(self, export: KVPoolExport) -> Generator[None, None, tuple[Visit, float]]:
        """Open a visit to another worker's pool, and measure the path; return the visit and its GB/s.

        Call `leave` once for each visit returned. Raises KVError.
        """
        check_compatible(export, self.engine.pool, self.engine.transport.name)
        visit = yield from self.open(export)
        try:
            return visit, (yield from self._proven(visit))
        except BaseException as error:
            self.leave(visit)
            if isinstance(error, KVError):
                raise TransferFailed(f"{export.transport} from {export.worker_id}: {error}") from None
            raise  # closed while waiting, because the worker was forgotten

    def open(self, export: KVPoolExport) -> Generator[None, None, Visit]:
        """Open a visit to another worker's pool and map the pool; call `leave` once. Raises TransferFailed."""
        visit = self.by_pool.get(export.pool_id) or self._begun(export)
        visit.num_workers += 1
        try:
            end_s = time.monotonic() + GREETING_S
            while not self._is_mapped(visit, export):
                if time.monotonic() > end_s:
                    raise TransferFailed(f"memory server {export.memory_socket}: not a word for {GREETING_S:.0f} s")
                yield
        except BaseException:
            self.leave(visit)
            raise
        return visit

    def leave(self, visit: Visit) -> None:
        """Count a worker of the pool less."""
        visit.num_workers -= 1

    def receive(self) -> list[tuple[Visit, PeerMessage]]:
        """Return the messages of all servers."""
        return [(visit, said) for visit in self.by_pool.values() for said in visit.peer.receive()]

    def tend(self, is_used: Callable[[Visit], bool]) -> list[Visit]:
        """End visits without use; return lost visits, whose claims are void."""
        for visit in self.by_pool.values():
            visit.peer.keep_alive()
        over = [v for v in self.by_pool.values() if v.problem or not (v.num_workers or is_used(v))]
        lost = [visit for visit in over if visit.problem]
        for visit in over:
            self._end(visit)
        return lost

    def report_fault(self, problem: str) -> None:
        """Tell every server about a device fault here, which may have written into the server's memory."""
        for visit in self.by_pool.values():
            visit.peer.report_fault(problem)

    def close(self) -> None:
        for visit in list(self.by_pool.values()):
            self._end(visit)

    def _proven(self, visit: Visit) -> Generator[None, None, float]:
        """Prove the path; return GB/s."""
        assert visit.pool is not None, "what is open is mapped"
        proof = prove_path(visit.pool, visit.peer.pool_id, self.engine.pool, self.engine.allocator)
        with closing(proof):
            while True:
                try:
                    next(proof)
                except StopIteration as over:
                    return float(over.value)
                if visit.problem:
                    raise TransferFailed(visit.problem)
                yield

    def _begun(self, export: KVPoolExport) -> Visit:
        try:
            peer = PeerPoolClient(Path(export.memory_socket), self.worker, export.pool_id, export.layout)
        except MemoryLost as lost:
            raise TransferFailed(
                f"{lost}: there is the pool of worker {export.worker_id}; both workers need to reach it at that path"
            ) from None
        self.poller.register(peer, zmq.POLLIN)
        visit = self.by_pool[export.pool_id] = Visit(peer)
        return visit

    def _is_mapped(self, visit: Visit, export: KVPoolExport) -> bool:
        """Map the pool once its place is known; tell whether the pool is mapped."""
        visit.peer.poll()
        if visit.problem:
            raise TransferFailed(visit.problem)
        if visit.pool is None and visit.peer.claim is not None:
            visit.pool = self.engine.transport.open_peer(visit.peer.claim, export.worker_id, self.engine.device)
        return visit.pool is not None

    def _end(self, visit: Visit) -> None:
        """Close the visit, after copies under way."""
        if visit.problem:
            logger.warning("what was offered there is lost: %s", visit.problem)
        del self.by_pool[visit.peer.pool_id]
        self.poller.unregister(visit.peer)
        if visit.pool is not None:
            visit.pool.close()
        visit.peer.close()
