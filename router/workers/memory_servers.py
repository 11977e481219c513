"""Registry of memory servers: device, memory use and last heartbeat of each.

Nothing is assigned to a memory server, so a loss costs nothing here. Workers notice a lost memory server by themselves,
leave and say so.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.wire.messages.memory_reports import MemoryHeartbeat, MemoryReady
from common.wire.messages.worker import Refused, Reregister, Welcome
from common.wire.messages.worker_id import connection_of
from router.dispatch.incidents import Kind
from router.placement.member import Member
from router.workers.hub import Links, Undelivered

logger = logging.getLogger(__name__)

MAX_SERVERS = 256


@dataclass(slots=True, eq=False)
class MemoryServer:
    """An incarnation of a memory server."""

    ready: MemoryReady
    last_seen_s: float
    joined_s: float
    beat: MemoryHeartbeat | None = None
    asked_to_leave_s: float = -math.inf  # time of the last Leave

    @property
    def id(self) -> str:
        return self.ready.server_id

    @property
    def connection(self) -> bytes:
        """Identity of the server's main socket."""
        return connection_of(self.id, self.ready.epoch)

    def num_blocks_in_use(self, workers: Iterable[Member]) -> int:
        """Return the number of KV blocks used by texts now, without idle leased and merely cached blocks.

        A block read by several workers counts once for each, up to the number of leased blocks.
        """
        if self.beat is None:
            return 0
        used = sum(worker.num_used_blocks for worker in workers if worker.uses(self.id, self.ready.epoch))
        most = self.beat.num_blocks - self.beat.num_free_blocks
        return min(most, used + self.beat.num_offered_blocks + self.beat.num_quarantined_blocks)

    def __str__(self) -> str:
        return f"memory server {self.id} (epoch {self.ready.epoch:x}, pid {self.ready.pid})"


class MemoryServers:
    """Memory servers by id, each under a single epoch at a time."""

    def __init__(self, links: Links) -> None:
        self._links, self._send, self._clock = links, links.send, links.clock
        self._timeout_s = links.net.worker_timeout_s
        self._checked_s = self._clock()
        self._servers: dict[str, MemoryServer] = {}

    def __iter__(self) -> Iterator[MemoryServer]:
        return iter(self._servers.values())

    def find(self, server_id: str) -> MemoryServer | None:
        return self._servers.get(server_id)

    def get(self, server_id: str, epoch: int) -> MemoryServer | None:
        """Return the server of exactly the given epoch, if registered."""
        server = self._servers.get(server_id)
        return server if server is not None and server.ready.epoch == epoch else None

    def on_ready(self, identity: bytes, ready: MemoryReady) -> None:
        """Admit a memory server; refuse another living server with the same id."""
        known = self._servers.get(ready.server_id)
        if known is None and len(self._servers) >= MAX_SERVERS:
            self._send(identity, Refused(f"{MAX_SERVERS} memory servers are registered, which is the limit"))
            return
        if known is not None and known.ready.epoch != ready.epoch:
            self._send(known.connection, Refused(_id_conflict(ready)))
            self._remove(known, f"started again as epoch {ready.epoch:x}, pid {ready.pid}")
            known = None
        if known is None:
            now_s = self._clock()
            server = self._servers[ready.server_id] = MemoryServer(ready, last_seen_s=now_s, joined_s=now_s)
            logger.info("%s joined: %s", server, ready.device)
            self._links.incidents.add(Kind.JOINED, f"memory server {server.id} on {ready.device}")
        self._send(identity, Welcome(self._links.router_epoch))

    def on_heartbeat(self, identity: bytes, beat: MemoryHeartbeat) -> None:
        """Record a heartbeat; ask an unknown server to register, and refuse a server whose id is taken."""
        server = self._servers.get(beat.server_id)
        if server is None:
            self._send(identity, Reregister(self._links.router_epoch))
        elif server.ready.epoch != beat.epoch:
            self._send(identity, Refused(_id_conflict(server.ready)))
        else:
            if _owned(beat) != (_owned(server.beat) if server.beat else (0, 0)):
                logger.info(
                    "%s owns %.2f GB of weights and %d KV blocks, %.2f GB are left; used by %s",
                    server, beat.weights_bytes / 1e9, beat.num_blocks, beat.free_bytes / 1e9,
                    ", ".join(beat.worker_ids) or "nobody",
                )  # fmt: skip
            server.beat, server.last_seen_s = beat, self._clock()

    def on_unreachable(self, undelivered: Undelivered) -> None:
        """Remove servers with lost connections; servers still alive register again."""
        identities = {identity for identity, _ in undelivered}
        for server in list(self):
            if server.connection in identities:
                self._remove(server, "its connection is gone")

    def check(self) -> None:
        """Remove silent servers, unless the router itself stood still, and knock at all others."""
        now_s = self._clock()
        was_asleep, self._checked_s = now_s - self._checked_s > self._timeout_s / 2, now_s
        for server in list(self):
            silence_s = now_s - server.last_seen_s
            if silence_s > self._timeout_s and not was_asleep:
                self._remove(server, f"no heartbeat for {silence_s:.1f} s (net.worker_timeout_s = {self._timeout_s:g})")
            else:
                self._links.knock(server.connection)

    def _remove(self, server: MemoryServer, reason: str) -> None:
        del self._servers[server.id]
        was_asked = server.asked_to_leave_s > -math.inf
        log, how = (logger.info, "gone after leaving") if was_asked else (logger.warning, "lost")
        log("%s is %s: %s", server, how, reason)
        self._links.incidents.add(Kind.LEFT if was_asked else Kind.LOST, f"memory server {server.id}: {reason}")


def _owned(beat: MemoryHeartbeat) -> tuple[int, int]:
    """Return the values logged on a change."""
    return beat.weights_bytes, beat.num_blocks


def _id_conflict(ready: MemoryReady) -> str:
    return f"another has its id, pid {ready.pid} on {ready.device}; each memory server needs its own memory.id"
