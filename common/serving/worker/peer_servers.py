"""Memory servers of other pools: a connection and a mapping for each pool.

A connection lasts while a worker of the pool is known or a block of the pool is in use here. So offered blocks outlive
the worker that offered them. Pools of another host are read by NIXL, others by the transport of this worker's device.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import zmq

from common.base.errors import ConfigError, KVError, MemoryLost, TransferFailed
from common.device.engine.engine import Engine, describe_device
from common.kv.proof import is_over, prove_path
from common.kv.transport import NIXL, PeerPool, Pull, check_compatible, make_transport
from common.memory.base.host import host_id
from common.memory.base.nixl_agent import ucx_transports
from common.memory.base.slots import Slots, slots_for
from common.memory.client.gate_connection import Gate
from common.memory.client.peer_pool_client import PeerMessage, PeerPoolClient
from common.settings.config import Config
from common.wire.messages.handoff import KVPoolExport

logger = logging.getLogger(__name__)

GREETING_S = 2.0
"""Longest wait for a server's reply with the pool's place; normally a moment."""
GATE_GREETING_S = 20.0
"""The same through a gate, which starts a process for each visit."""


@dataclass(slots=True, eq=False)
class PeerServer:
    """The memory server of another pool."""

    peer: PeerPoolClient
    pool: PeerPool | None = None  # None until mapped
    num_workers: int = 0  # workers of the pool, known or being proven

    @property
    def problem(self) -> str:
        """Reason why the server sends nothing any more; empty if the server works."""
        return self.peer.problem


def export_of(engine: Engine, worker: tuple[str, int], advertise: str) -> KVPoolExport:
    """Describe this worker's pool for other workers; `advertise` is `net.advertise`."""
    worker_id, epoch = worker
    return KVPoolExport(
        worker_id=worker_id,
        epoch=epoch,
        transport=engine.transport.name,
        device_uuid=describe_device(engine.device)[1],
        pool_id=engine.shared.pool_id,
        memory_socket=str(engine.shared.client.path.absolute()),
        layout=engine.pool.layout,
        host=host_id(advertise),
        gate=engine.shared.client.gate,
    )


class PeerServers:
    """Memory servers by pool.

    Args:
        worker: id and epoch of this worker.
        poller: wakes the loop on an offer.
    """

    def __init__(self, engine: Engine, worker: tuple[str, int], poller: zmq.Poller, config: Config) -> None:
        self.engine, self.worker, self.poller, self.config = engine, worker, poller, config
        self._host = host_id(config.net.advertise)
        self._lingering: list[tuple[Pull, list[int]]] = []  # late pulls of proofs, and their target blocks
        self.by_pool: dict[int, PeerServer] = {}

    def prove(self, export: KVPoolExport) -> Generator[None, None, tuple[PeerServer, float]]:
        """Connect to the server of another worker's pool, and measure the path; return the server and its GB/s.

        Call `leave` once for each server returned. Raises KVError.
        """
        check_compatible(export, self.engine.pool, self.engine.transport.name)
        server = yield from self.open(export)
        try:
            gb_per_s = yield from self._proven(server)
            if self._is_distant(export) and gb_per_s < self.config.kv.min_gb_per_s:
                raise TransferFailed(
                    f"{gb_per_s:.3f} GB/s by {self.carrier(export)}, less than kv.min_gb_per_s = "
                    f"{self.config.kv.min_gb_per_s:g}; use a faster network, or lower the option"
                )
            return server, gb_per_s
        except BaseException as error:
            self.leave(server)
            if isinstance(error, KVError):
                raise TransferFailed(f"{self.carrier(export)} from {export.worker_id}: {error}") from None
            raise  # closed while waiting, because the worker was forgotten

    def open(self, export: KVPoolExport) -> Generator[None, None, PeerServer]:
        """Connect to the server of another worker's pool and map the pool; call `leave` once. Raises TransferFailed."""
        server = self.by_pool.get(export.pool_id) or self._begun(export)
        server.num_workers += 1
        try:
            place, wait_s = f"memory server {export.memory_socket}", GREETING_S
            if self._is_distant(export):
                place, wait_s = f"gate {export.gate}", GATE_GREETING_S
            end_s = time.monotonic() + wait_s
            while not self._is_mapped(server, export):
                if time.monotonic() > end_s:
                    raise TransferFailed(f"{place}: not a word for {wait_s:.0f} s")
                yield
        except BaseException:
            self.leave(server)
            raise
        return server

    def leave(self, server: PeerServer) -> None:
        """Count a worker of the pool less."""
        server.num_workers -= 1

    def carrier(self, export: KVPoolExport) -> str:
        """Return what carries blocks of a worker's pool, in words."""
        if self._is_distant(export):
            return f"{NIXL} {ucx_transports(self.config.net.ucx_transports)}"
        return self.engine.transport.name

    def receive(self) -> list[tuple[PeerServer, PeerMessage]]:
        """Return the messages of all servers."""
        return [(server, message) for server in self.by_pool.values() for message in server.peer.receive()]

    def check(self, is_used: Callable[[PeerServer], bool]) -> list[PeerServer]:
        """Close connections without use; return lost servers, whose claims are void."""
        for pull, block_ids in [each for each in self._lingering if is_over(each[0])]:
            self._lingering.remove((pull, block_ids))
            self.engine.allocator.free(block_ids)
        for server in self.by_pool.values():
            server.peer.keep_alive()
        over = [v for v in self.by_pool.values() if v.problem or not (v.num_workers or is_used(v))]
        lost = [server for server in over if server.problem]
        for server in over:
            self._end(server)
        return lost

    def report_fault(self, problem: str) -> None:
        """Tell every server about a device fault here, which may have written into the server's memory."""
        for server in self.by_pool.values():
            server.peer.report_fault(problem)

    def close(self) -> None:
        for server in list(self.by_pool.values()):
            self._end(server)

    def _proven(self, server: PeerServer) -> Generator[None, None, float]:
        """Prove the path; return GB/s."""
        assert server.pool is not None, "what is open is mapped"
        ours, allocator = self.engine.pool, self.engine.allocator
        proof = prove_path(server.pool, server.peer.pool_id, ours, allocator, self._linger)
        with closing(proof):
            while True:
                try:
                    next(proof)
                except StopIteration as over:
                    return float(over.value)
                if server.problem:
                    raise TransferFailed(server.problem)
                yield

    def _begun(self, export: KVPoolExport) -> PeerServer:
        place: Path | Gate = Path(export.memory_socket)
        if self._is_distant(export):
            if not export.gate:
                raise TransferFailed(
                    f"the pool of worker {export.worker_id} is to be read by NIXL, and its memory server has no gate: "
                    "set net.advertise there, and install nixl on both hosts"
                )
            place = Gate(export.gate, self.config.net, slots=self._slots(export))
        try:
            peer = PeerPoolClient(place, self.worker, export.pool_id, export.layout)
        except MemoryLost as lost:
            raise TransferFailed(
                f"{lost}: there is the pool of worker {export.worker_id}; both workers need to reach it at that place"
            ) from None
        self.poller.register(peer.connection.pollable, zmq.POLLIN)
        server = self.by_pool[export.pool_id] = PeerServer(peer)
        return server

    def _is_mapped(self, server: PeerServer, export: KVPoolExport) -> bool:
        """Map the pool once its place is known; tell whether the pool is mapped."""
        server.peer.poll()
        if server.problem:
            raise TransferFailed(server.problem)
        if server.pool is None and server.peer.claim is not None:
            transport = self.engine.transport
            if self._is_distant(export):
                try:
                    transport = make_transport(NIXL, self.engine.device)
                except ConfigError as error:
                    raise TransferFailed(str(error)) from None
            server.pool = transport.open_peer(server.peer.claim, export.worker_id, self.engine.device)
        return server.pool is not None

    def _is_distant(self, export: KVPoolExport) -> bool:
        """Tell whether a pool is read by NIXL: if its host is another, or if either side chose so."""
        return NIXL in (export.transport, self.engine.transport.name) or export.host not in ("", self._host)

    def _slots(self, export: KVPoolExport) -> Slots | None:
        """Return the staging to read a pool through; None to read it as it is, as host memory can be."""
        is_staged = self.engine.device.type != "cpu" or self.config.kv.always_stage
        return slots_for(export.layout) if is_staged else None

    def _linger(self, pull: Pull, block_ids: list[int]) -> None:
        self._lingering.append((pull, block_ids))

    def _end(self, server: PeerServer) -> None:
        """Close the connection, after copies under way."""
        if server.problem:
            logger.warning("what was offered there is lost: %s", server.problem)
        del self.by_pool[server.peer.pool_id]
        self.poller.unregister(server.peer.connection.pollable)
        if server.pool is not None:
            server.pool.close()
        server.peer.close()
