"""Memory servers of other pools than ours, at which this worker is a guest: a connection and a mapping for each pool.

A visit lasts as long as a worker of that pool is known or something of it is used here: what a worker has offered
outlives it.
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
from common.memory.client.guest import Guest, OfGuest
from common.wire.messages.handoff import KVPoolExport

logger = logging.getLogger(__name__)

GREETING_S = 2.0
"""For a server to say where its pool is; it takes a moment."""


@dataclass(slots=True, eq=False)
class Visit:
    """One pool."""

    guest: Guest
    pool: PeerPool | None = None  # once it is mapped
    num_workers: int = 0  # of that pool, that are known or being met

    @property
    def problem(self) -> str:
        """Why nothing comes from there any more, if that is so."""
        return self.guest.problem


def export_of(engine: Engine, worker: tuple[str, int]) -> KVPoolExport:
    """Where our own pool is, for others to visit."""
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
    """By pool.

    Args:
        worker: id and epoch of this worker.
        poller: wakes the loop up when something was offered.
    """

    def __init__(self, engine: Engine, worker: tuple[str, int], poller: zmq.Poller) -> None:
        self.engine, self.worker, self.poller = engine, worker, poller
        self.by_pool: dict[int, Visit] = {}

    def prove(self, export: KVPoolExport) -> Generator[None, None, tuple[Visit, float]]:
        """At the server of another worker's pool, and blocks travel from there, at so many GB/s. To be left once.

        Raises KVError.
        """
        check_compatible(export, self.engine.pool, self.engine.transport.name)
        visit = yield from self.open(export)
        try:
            return visit, (yield from self._proven(visit))
        except BaseException as error:
            self.leave(visit)
            if isinstance(error, KVError):
                raise TransferFailed(f"{export.transport} from {export.worker_id}: {error}") from None
            raise  # it is forgotten meanwhile

    def open(self, export: KVPoolExport) -> Generator[None, None, Visit]:
        """At the server of another worker's pool, which is mapped then; raises TransferFailed. To be left once."""
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
        """One worker less."""
        visit.num_workers -= 1

    def receive(self) -> list[tuple[Visit, OfGuest]]:
        """What was offered and found."""
        return [(visit, said) for visit in self.by_pool.values() for said in visit.guest.receive()]

    def tend(self, is_used: Callable[[Visit], bool]) -> list[Visit]:
        """End visits that nobody has a use for; returns those that are lost, whose claims are void."""
        for visit in self.by_pool.values():
            visit.guest.tend()
        over = [v for v in self.by_pool.values() if v.problem or not (v.num_workers or is_used(v))]
        lost = [visit for visit in over if visit.problem]
        for visit in over:
            self._end(visit)
        return lost

    def report_fault(self, problem: str) -> None:
        """Say at every server that the device met a fault here, and may have written there."""
        for visit in self.by_pool.values():
            visit.guest.report_fault(problem)

    def close(self) -> None:
        for visit in list(self.by_pool.values()):
            self._end(visit)

    def _proven(self, visit: Visit) -> Generator[None, None, float]:
        """GB/s."""
        assert visit.pool is not None, "what is open is mapped"
        proof = prove_path(visit.pool, visit.guest.pool_id, self.engine.pool, self.engine.allocator)
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
            guest = Guest(Path(export.memory_socket), self.worker, export.pool_id, export.layout)
        except MemoryLost as lost:
            raise TransferFailed(
                f"{lost}: there is the pool of worker {export.worker_id}; both workers need to reach it at that path"
            ) from None
        self.poller.register(guest, zmq.POLLIN)
        visit = self.by_pool[export.pool_id] = Visit(guest)
        return visit

    def _is_mapped(self, visit: Visit, export: KVPoolExport) -> bool:
        """It is as soon as it is known where it lies."""
        visit.guest.look()
        if visit.problem:
            raise TransferFailed(visit.problem)
        if visit.pool is None and visit.guest.claim is not None:
            visit.pool = self.engine.transport.open_peer(visit.guest.claim, export.worker_id, self.engine.device)
        return visit.pool is not None

    def _end(self, visit: Visit) -> None:
        """Waits for copies under way."""
        if visit.problem:
            logger.warning("what was offered there is lost: %s", visit.problem)
        del self.by_pool[visit.guest.pool_id]
        self.poller.unregister(visit.guest)
        if visit.pool is not None:
            visit.pool.close()
        visit.guest.close()
