"""Prefill workers whose prompts this decode worker takes.

Each prefill worker names its pool. The own pool needs nothing else. The memory server of another pool is connected, and
the pool is mapped and proven before anything is pulled. The answer goes to the prefill worker and to the router. A
prefill worker names a pool again if the proof failed. The running batch never waits for a proof.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from common.base.errors import KVError
from common.device.engine.engine import Engine
from common.serving.worker.peer_servers import PeerServer, PeerServers, export_of
from common.wire.messages.handoff import KVPathResult, KVPoolExport
from common.wire.messages.worker import SHARED_POOL, KVPathReport, Message
from common.wire.transport.sockets import Hub

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Source:
    """An incarnation of a prefill worker from which prompts can be taken."""

    export: KVPoolExport
    identity: bytes
    gb_per_s: float
    server: PeerServer | None  # None: the worker shares this worker's pool


@dataclass(slots=True, eq=False)
class Proof:
    """A pool being mapped and proven, or waiting for its proof."""

    identity: bytes
    export: KVPoolExport
    progress: Generator[None, None, Source]


class Sources:
    """Prefill workers by id, and workers whose pools wait for a proof, proven one after the other.

    Args:
        hub: connections of prefill workers.
        send: sends a message to the router.
    """

    def __init__(self, engine: Engine, peers: PeerServers, hub: Hub, send: Callable[[Message], None]) -> None:
        self.engine, self.peers, self.hub, self.send = engine, peers, hub, send
        self.worker_id, self.epoch = peers.worker
        self.by_id: dict[str, Source] = {}
        self.proofs: deque[Proof] = deque()

    def add(self, identity: bytes, export: KVPoolExport) -> None:
        """Queue a proof of a prefill worker's pool, unless queued already; forget earlier incarnations first."""
        if not any(_is_of(proof, export.worker_id, export.epoch) for proof in self.proofs):
            self.proofs.append(Proof(identity, export, self._prove(identity, export)))

    def prove_next(self) -> None:
        """Continue the first proof; when over, answer its prefill worker and report the path to the router."""
        if not self.proofs:
            return
        first, error, gb_per_s = self.proofs[0], "", 0.0
        try:
            next(first.progress)
            return
        except StopIteration as proven:
            gb_per_s = proven.value.gb_per_s
        except KVError as problem:
            error = str(problem)
            logger.error("no KV path from %s: %s", first.export.worker_id, error)
        self.proofs.popleft()
        self._answer(first.identity, first.export, gb_per_s, error)

    def find(self, worker_id: str, epoch: int) -> Source | None:
        """Return the source of exactly `epoch`, if the path is proven."""
        source = self.by_id.get(worker_id)
        return source if source is not None and source.export.epoch == epoch else None

    def epochs(self, worker_id: str) -> set[int]:
        """Return the epochs of a worker's incarnations, proven or to be proven."""
        proven = {source.export.epoch for source in self.by_id.values() if source.export.worker_id == worker_id}
        return proven | {proof.export.epoch for proof in self.proofs if proof.export.worker_id == worker_id}

    def forget(self, worker_id: str, epoch: int) -> Source | None:
        """Forget a dead incarnation; return its source if proven."""
        for proof in [proof for proof in self.proofs if _is_of(proof, worker_id, epoch)]:
            self.proofs.remove(proof)
            proof.progress.close()
        source = self.find(worker_id, epoch)
        if source is not None:
            self._drop(source)
        return source

    def lose(self, server: PeerServer) -> None:
        """Drop the sources of a lost memory server; their paths are down until proven again."""
        for source in [source for source in self.by_id.values() if source.server is server]:
            self._drop(source)
            self._answer(source.identity, source.export, 0.0, server.problem)

    def close(self) -> None:
        for proof in self.proofs:
            proof.progress.close()
        self.peers.close()

    def _drop(self, source: Source) -> None:
        del self.by_id[source.export.worker_id]
        if source.server is not None:
            self.peers.leave(source.server)

    def _answer(self, identity: bytes, export: KVPoolExport, gb_per_s: float, error: str) -> None:
        is_shared = self._is_shared(export)
        self.hub.send(identity, KVPathResult(self.worker_id, self.epoch, is_shared, error))
        if not (error or is_shared):
            self.hub.send(identity, export_of(self.engine, self.peers.worker, self.peers.config.net.advertise))
        transport = SHARED_POOL if is_shared else self.peers.carrier(export)
        peers = self.worker_id, self.epoch, export.worker_id, export.epoch
        self.send(KVPathReport(*peers, transport, gb_per_s, error))

    def _prove(self, identity: bytes, export: KVPoolExport) -> Generator[None, None, Source]:
        """Map a pool and prove the path.

        A known worker is only answered again, because a restarted router has forgotten the path.
        """
        if known := self.find(export.worker_id, export.epoch):
            return known
        if self._is_shared(export):  # both workers have checked the pool owner's proof block
            source = self.by_id[export.worker_id] = Source(export, identity, 0.0, None)
            return source
        server, gb_per_s = yield from self.peers.prove(export)
        source = self.by_id[export.worker_id] = Source(export, identity, gb_per_s, server)
        return source

    def _is_shared(self, export: KVPoolExport) -> bool:
        return export.pool_id == self.engine.shared.pool_id


def _is_of(proof: Proof, worker_id: str, epoch: int) -> bool:
    return (proof.export.worker_id, proof.export.epoch) == (worker_id, epoch)
