"""The prefill workers that this decode worker takes prompts from.

Each says where its pool is. One that is ours, too, needs nothing else; another is visited at its memory server, mapped
and proven before anything is pulled. The answer goes to the prefill worker and to the router. A pool that cannot be
proven is named again. The running batch never waits for a proof.
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
    """One incarnation of a prefill worker that we can take prompts from."""

    export: KVPoolExport
    identity: bytes
    gb_per_s: float
    visit: Visit | None  # where its pool is another one than ours


@dataclass(slots=True, eq=False)
class Meeting:
    """A pool that is being mapped and proven, or waits for that."""

    identity: bytes
    export: KVPoolExport
    proof: Generator[None, None, Source]


class Sources:
    """Prefill workers by id, and those whose pools are to be proven, one after the other."""

    def __init__(self, engine: Engine, visits: Visits, hub: Hub) -> None:
        self.engine, self.visits = engine, visits
        self.hub = hub
        self.worker_id, self.epoch = visits.worker
        self._reports: list[KVPathReport] = []
        self.by_id: dict[str, Source] = {}
        self.meetings: deque[Meeting] = deque()

    def meet(self, identity: bytes, export: KVPoolExport) -> None:
        """Have a prefill worker's pool proven, unless that is under way; an earlier incarnation must be forgotten."""
        if not any(_is_of(meeting, export.worker_id, export.epoch) for meeting in self.meetings):
            self.meetings.append(Meeting(identity, export, self._prove(identity, export)))

    def tend(self) -> list[KVPathReport]:
        """Go on with a proof; when one is over the prefill worker is answered. Returns what the router should know."""
        if self.meetings:
            self._go_on(self.meetings[0])
        reports, self._reports = self._reports, []
        return reports

    def find(self, worker_id: str, epoch: int) -> Source | None:
        """That very incarnation, if we can pull from it."""
        source = self.by_id.get(worker_id)
        return source if source is not None and source.export.epoch == epoch else None

    def epochs(self, worker_id: str) -> set[int]:
        """Of its incarnations that are proven or to be proven."""
        proven = {source.export.epoch for source in self.by_id.values() if source.export.worker_id == worker_id}
        return proven | {m.export.epoch for m in self.meetings if m.export.worker_id == worker_id}

    def forget(self, worker_id: str, epoch: int) -> Source | None:
        """That incarnation is dead. Returns it if it was proven."""
        for meeting in [m for m in self.meetings if _is_of(m, worker_id, epoch)]:
            self.meetings.remove(meeting)
            meeting.proof.close()
        source = self.find(worker_id, epoch)
        if source is not None:
            self._drop(source)
        return source

    def lose(self, visit: Visit) -> None:
        """A visit has ended for want of its server: who meets us there has no path, until one is proven again."""
        for source in [source for source in self.by_id.values() if source.visit is visit]:
            self._drop(source)
            self._tell(source.identity, source.export, 0.0, visit.problem)

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
        self._tell(meeting.identity, meeting.export, gb_per_s, error)

    def _drop(self, source: Source) -> None:
        del self.by_id[source.export.worker_id]
        if source.visit is not None:
            self.visits.leave(source.visit)

    def _tell(self, identity: bytes, export: KVPoolExport, gb_per_s: float, error: str) -> None:
        is_shared = self._is_shared(export)
        self.hub.send(identity, KVPathResult(self.worker_id, self.epoch, is_shared, error))
        if not (error or is_shared):
            self.hub.send(identity, export_of(self.engine, self.visits.worker))
        self._reports.append(self._report(export, gb_per_s, error))

    def _prove(self, identity: bytes, export: KVPoolExport) -> Generator[None, None, Source]:
        """Map a pool and prove it; a worker met before is only answered again, as a restarted router has forgotten."""
        if known := self.find(export.worker_id, export.epoch):
            return known
        if self._is_shared(export):  # both have seen the proof block of its owner
            source = self.by_id[export.worker_id] = Source(export, identity, 0.0, None)
            return source
        visit, gb_per_s = yield from self.visits.prove(export)
        source = self.by_id[export.worker_id] = Source(export, identity, gb_per_s, visit)
        return source

    def _is_shared(self, export: KVPoolExport) -> bool:
        return export.pool_id == self.engine.shared.pool_id

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
