"""Prefill workers whose prompts this decode worker takes.

Each prefill worker names its pool. The own pool needs nothing else. The memory server of another pool is visited, and
the pool is mapped and proven before anything is pulled. The answer goes to the prefill worker and to the router. A
prefill worker names a pool again if the proof failed. The running batch never waits for a proof.
"""

import logging
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from common.base.errors import KVError
from common.device.engine.engine import Engine
from common.serving.worker.peer_servers import Visit, Visits, export_of
from common.wire.messages.handoff import KVPathResult, KVPoolExport
from common.wire.messages.worker import SHARED_POOL, KVPathReport
from common.wire.transport.sockets import Hub

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Source:
    """An incarnation of a prefill worker from which prompts can be taken."""

    export: KVPoolExport
    identity: bytes
    gb_per_s: float
    visit: Visit | None  # None: the worker shares this worker's pool


@dataclass(slots=True, eq=False)
class Meeting:
    """A pool being mapped and proven, or waiting for its proof."""

    identity: bytes
    export: KVPoolExport
    proof: Generator[None, None, Source]


class Sources:
    """Prefill workers by id, and workers whose pools wait for a proof, proven one after the other."""

    def __init__(self, engine: Engine, visits: Visits, hub: Hub) -> None:
        self.engine, self.visits = engine, visits
        self.hub = hub
        self.worker_id, self.epoch = visits.worker
        self._reports: list[KVPathReport] = []
        self.by_id: dict[str, Source] = {}
        self.meetings: deque[Meeting] = deque()

    def add(self, identity: bytes, export: KVPoolExport) -> None:
        """Queue a proof of a prefill worker's pool, unless queued already; forget earlier incarnations first."""
        if not any(_is_of(meeting, export.worker_id, export.epoch) for meeting in self.meetings):
            self.meetings.append(Meeting(identity, export, self._prove(identity, export)))

    def tend(self) -> list[KVPathReport]:
        """Continue the first proof and answer its prefill worker when over; return reports for the router."""
        if self.meetings:
            self._go_on(self.meetings[0])
        reports, self._reports = self._reports, []
        return reports

    def find(self, worker_id: str, epoch: int) -> Source | None:
        """Return the source of exactly `epoch`, if the path is proven."""
        source = self.by_id.get(worker_id)
        return source if source is not None and source.export.epoch == epoch else None

    def epochs(self, worker_id: str) -> set[int]:
        """Return the epochs of a worker's incarnations, proven or to be proven."""
        proven = {source.export.epoch for source in self.by_id.values() if source.export.worker_id == worker_id}
        return proven | {m.export.epoch for m in self.meetings if m.export.worker_id == worker_id}

    def forget(self, worker_id: str, epoch: int) -> Source | None:
        """Forget a dead incarnation; return its source if proven."""
        for meeting in [m for m in self.meetings if _is_of(m, worker_id, epoch)]:
            self.meetings.remove(meeting)
            meeting.proof.close()
        source = self.find(worker_id, epoch)
        if source is not None:
            self._drop(source)
        return source

    def lose(self, visit: Visit) -> None:
        """Drop the sources of a lost memory server; their paths are down until proven again."""
        for source in [source for source in self.by_id.values() if source.visit is visit]:
            self._drop(source)
            self._answer(source.identity, source.export, 0.0, visit.problem)

    def close(self) -> None:
        for meeting in self.meetings:
            meeting.proof.close()
        self.visits.close()

    def _go_on(self, meeting: Meeting) -> None:
        error, gb_per_s = "", 0.0
        try:
            next(meeting.proof)
            return
        except StopIteration as proven:
            gb_per_s = proven.value.gb_per_s
        except KVError as problem:
            error = str(problem)
            logger.error("no KV path from %s: %s", meeting.export.worker_id, error)
        self.meetings.popleft()
        self._answer(meeting.identity, meeting.export, gb_per_s, error)

    def _drop(self, source: Source) -> None:
        del self.by_id[source.export.worker_id]
        if source.visit is not None:
            self.visits.leave(source.visit)

    def _answer(self, identity: bytes, export: KVPoolExport, gb_per_s: float, error: str) -> None:
        is_shared = self._is_shared(export)
        self.hub.send(identity, KVPathResult(self.worker_id, self.epoch, is_shared, error))
        if not (error or is_shared):
            self.hub.send(identity, export_of(self.engine, self.visits.worker))
        transport = SHARED_POOL if is_shared else export.transport
        peers = self.worker_id, self.epoch, export.worker_id, export.epoch
        self._reports.append(KVPathReport(*peers, transport, gb_per_s, error))

    def _prove(self, identity: bytes, export: KVPoolExport) -> Generator[None, None, Source]:
        """Map a pool and prove the path.

        A worker met before is only answered again, because a restarted router has forgotten the path.
        """
        if known := self.find(export.worker_id, export.epoch):
            return known
        if self._is_shared(export):  # both workers have checked the pool owner's proof block
            source = self.by_id[export.worker_id] = Source(export, identity, 0.0, None)
            return source
        visit, gb_per_s = yield from self.visits.prove(export)
        source = self.by_id[export.worker_id] = Source(export, identity, gb_per_s, visit)
        return source

    def _is_shared(self, export: KVPoolExport) -> bool:
        return export.pool_id == self.engine.shared.pool_id


def _is_of(meeting: Meeting, worker_id: str, epoch: int) -> bool:
    return (meeting.export.worker_id, meeting.export.epoch) == (worker_id, epoch)
