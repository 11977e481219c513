"""Operators' requests: the load of all workers, role changes, and drains of workers or memory servers."""

import logging
import time
from collections.abc import Callable

from common.wire.messages.operator import (
    DrainAnswer,
    DrainWanted,
    Leave,
    LoadReport,
    LoadWanted,
    WorkerLoad,
)
from common.wire.messages.worker import Role
from router.dispatch.dispatcher import Dispatcher
from router.placement.member import Member
from router.placement.worker_pool import WorkerPool
from router.workers.hub import SendTo
from router.workers.memory_servers import MemoryServer, MemoryServers

logger = logging.getLogger(__name__)

REASON = "an operator asked for it (baton drain)"
ASK_AGAIN_S = 10.0
"""Pause before asking a member to leave again, in case the message was lost."""


class Operators:
    """Handler of operators' messages; keeps no state.

    Args:
        send: queues a message for a connection.
    """

    def __init__(
        self,
        pool: WorkerPool,
        memory_servers: MemoryServers,
        dispatcher: Dispatcher,
        send: SendTo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._memory_servers, self._dispatcher, self._send = pool, memory_servers, dispatcher, send
        self._clock = clock

    def on_load_wanted(self, identity: bytes, _: LoadWanted) -> None:
        """Answer with the load of all workers."""
        serving = {worker for worker in self._pool if worker.is_serving}
        workers = tuple(_load(worker, len(self._pool.paths.partners(worker) & serving)) for worker in self._pool)
        self._send(identity, LoadReport(self._dispatcher.queue_sizes()[0], workers))

    def on_drain_wanted(self, identity: bytes, wanted: DrainWanted) -> None:
        """Ask the named member to leave, unless already leaving; answer with the number of needing completions."""
        if (worker := self._pool.find(wanted.name)) is not None:
            if wanted.incarnation in (0, worker.epoch) and not worker.draining:
                self._request_leave(worker)
            num_requests = len(self._dispatcher.lifecycle.needing(worker))
            self._send(identity, DrainAnswer(wanted.name, worker.epoch, num_requests))
        elif (server := self._memory_servers.find(wanted.name)) is not None:
            if wanted.incarnation in (0, server.ready.epoch):
                self._request_leave(server)
            self._send(identity, DrainAnswer(wanted.name, server.ready.epoch, 0))
        else:
            self._send(identity, DrainAnswer(wanted.name, 0, 0))

    def _request_leave(self, member: Member | MemoryServer) -> None:
        """Ask a member to leave, at most every `ASK_AGAIN_S`, because operators ask several times a second."""
        if self._clock() - member.asked_to_leave_s >= ASK_AGAIN_S:
            member.asked_to_leave_s = self._clock()
            logger.info("%s is to leave: %s", member, REASON)
            self._send(member.connection, Leave(REASON))


def _load(worker: Member, num_partners: int) -> WorkerLoad:
    ready, beat = worker.ready, worker.beat
    return WorkerLoad(
        name=worker.id,
        incarnation=worker.epoch,
        role=ready.role,
        pid=ready.pid,
        is_serving=worker.is_serving,
        has_spoken=beat is not None,
        num_partners=num_partners,
        num_prompts=worker.work.num_outstanding,
        num_rows=beat.num_running + beat.num_handoffs if beat and ready.role is Role.DECODE else 0,
        most_rows=ready.max_num_seqs,
        pool_id=ready.pool_id,
        num_blocks=worker.num_blocks,
        num_used_blocks=max(0, worker.num_used_blocks),
        num_steps=sum(beat.steps.durations) if beat else 0,
        step_us=beat.steps.total_us if beat else 0,
    )
