"""Reader of memory servers' reports on KV blocks, which keeps the prefix map in step.

A pool's reports are requested while a worker uses the pool, the server is registered, and placement has a choice.
Missed reports show as a gap in the sequence, or as silence. Then all reports of the pool are void and requested anew,
at most once a second. A restart of the router or a server is handled likewise.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from common.settings.config import NetSection
from common.wire.messages.memory_reports import BlockEvent, KVEvents
from common.wire.messages.worker import KVEventsWanted
from common.wire.values.block_key import unpack_short_keys
from common.wire.values.packing import unpack_ids
from router.placement.capacity import has_choice
from router.placement.member import Member
from router.placement.predictions import PoolName
from router.placement.prefix_map import MAX_REPORTED, PoolContents
from router.placement.worker_pool import WorkerPool
from router.workers.hub import SendTo
from router.workers.memory_servers import MemoryServer, MemoryServers

logger = logging.getLogger(__name__)

ASK_S = 1.0
SUSPENDED_S = 60.0
"""Pause before asking again, after a server reported too many blocks."""


@dataclass(slots=True)
class Progress:
    """Progress of a pool's reports."""

    contents: PoolContents
    next_sequence: int | None = None  # None: reports have to begin anew
    is_asked: bool = False  # True: the server was asked to begin anew
    ask_s: float = -math.inf  # earliest time to ask
    received_s: float = -math.inf


class KVEventReader:
    """Reader of block events of all pools.

    Args:
        send: queues a message for a connection.
        is_on: False: no server is asked.
    """

    def __init__(
        self,
        net: NetSection,
        pool: WorkerPool,
        servers: MemoryServers,
        send: SendTo,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_on: bool = True,
    ) -> None:
        self._timeout_s, self._is_on = net.worker_timeout_s, is_on
        self._pool, self._servers, self._send, self._clock = pool, servers, send, clock
        self._progress: dict[PoolName, Progress] = {}

    def check(self) -> None:
        """Forget pools without reports, and request missing reports; call after every arrival or departure."""
        wanted = self._wanted()
        for name in self._progress.keys() - wanted.keys():
            del self._progress[name]
            self._pool.prefixes.forget(name)
        now_s = self._clock()
        for name, server in wanted.items():
            contents, progress = self._pool.prefixes.contents(name), self._progress.get(name)
            if progress is None or progress.contents is not contents:
                progress = self._progress[name] = Progress(contents)
            if progress.next_sequence is not None and now_s - progress.received_s > self._timeout_s:
                self._reset(name, progress, f"nothing was heard for {now_s - progress.received_s:.1f} s")
            if progress.next_sequence is None and now_s >= progress.ask_s:
                progress.is_asked, progress.ask_s = True, now_s + ASK_S
                self._send(server.connection, KVEventsWanted(name[1]))

    def on_events(self, _: bytes, events: KVEvents) -> None:
        """Apply events in sequence; a gap voids the pool's reports."""
        name = events.server_id, events.pool_id
        progress = self._progress.get(name)
        if progress is None or self._servers.get(events.server_id, events.epoch) is None:
            return
        if progress.next_sequence is None and (events.sequence or not progress.is_asked):
            return  # sent before the request for reports
        if events.sequence == 0:
            progress.contents.begin()
        elif progress.next_sequence != events.sequence:
            self._reset(name, progress, f"message {progress.next_sequence} is missing, before {events.sequence}")
            self.check()
            return
        progress.next_sequence, progress.received_s = events.sequence + 1, self._clock()
        contents = progress.contents
        _apply(events, contents)
        if contents.is_overfull:
            self._suspend(
                name, f"it told of {len(contents.reported)} blocks, more than the {contents.num_blocks} that it has"
            )
        if self._pool.prefixes.num_reported > MAX_REPORTED:
            self._make_room(events.server_id)

    def _make_room(self, latest: str) -> None:
        """Void the reports of the server with most reported blocks, because all reports exceed `MAX_REPORTED`.

        So a lying server costs no other server. A server below its share of the limit is never chosen. Among equals,
        the latest reporter is chosen.
        """
        num_reported = Counter[str]()
        for (server_id, _), progress in self._progress.items():
            num_reported[server_id] += progress.contents.num_reported
        most = max(num_reported, key=lambda server_id: (num_reported[server_id], server_id == latest))
        for name in [name for name in self._progress if name[0] == most]:
            self._suspend(
                name,
                f"it told of {num_reported[most]} blocks, the most where there is room for {MAX_REPORTED} of all pools",
            )

    def _suspend(self, name: PoolName, reason: str) -> None:
        """Void a pool's reports, and do not ask again for `SUSPENDED_S`."""
        progress = self._progress[name]
        progress.ask_s = self._clock() + SUSPENDED_S
        self._reset(name, progress, reason)

    def _wanted(self) -> dict[PoolName, MemoryServer]:
        """Return the pools to read, with the reporting server of each; without a choice, only pools already read."""
        found = ((worker.pool, self._server_of(worker)) for worker in self._pool)
        reporting = {name: server for name, server in found if server is not None}
        if self._is_on and has_choice(self._pool):
            return reporting
        # A choice may soon exist again.
        return {name: server for name, server in reporting.items() if name in self._progress}

    def _server_of(self, worker: Member) -> MemoryServer | None:
        ready = worker.ready
        is_found = ready.memory_server_id and ready.kv_layout.is_reusable
        return self._servers.get(ready.memory_server_id, ready.memory_server_epoch) if is_found else None

    def _reset(self, name: PoolName, progress: Progress, reason: str) -> None:
        """Void a pool's reports."""
        progress.next_sequence, progress.is_asked = None, False
        progress.contents.forget_reports()
        logger.warning("it is not known any more which KV blocks are in pool %x of memory server %s: %s",
                       name[1], name[0], reason)  # fmt: skip


def _apply(events: KVEvents, contents: PoolContents) -> None:
    contents.copy_us = events.copy_us
    keys, begin = unpack_short_keys(events.keys), 0
    for kind, length in zip(events.kinds, unpack_ids(events.runs), strict=True):
        contents.apply(BlockEvent(kind), keys[begin : begin + length])
        begin += length
