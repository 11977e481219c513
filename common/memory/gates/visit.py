"""A visit of another host's worker: a connection to the memory server here, and a lender of the pool.

    GateVisit ──▶ greeted ──PoolRegion──▶ lender begun ──PoolLent──▶ open ──farewell, silence, a gap, an end──▶ over

A visit with staging lends that rather than the pool. The lender ends before the connection. So the worker cannot read
a block whose claim has ended.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import UnionType

from common.base.errors import ConfigError, MemoryLost, WireError
from common.memory.client.connection import Connection
from common.memory.gates.lending import Lending, LendingFailed
from common.wire.messages.frames import decode, encode
from common.wire.messages.gates import GateFrame, GateMessage, GateOver, GateVisit, PoolLent, StagingFrame
from common.wire.messages.memory import MemoryMessage, MemoryVisit, PoolRegion
from common.wire.messages.staging import BlocksStaged, BlocksStaging, StagingRegion, StagingWanted
from common.wire.messages.worker import Message

Reply = Callable[[GateMessage], None]
"""Sends a message to the worker."""


class VisitOver(Exception):
    """A visit that must end; the message is the reason."""


class Visit:
    """A visit; every method raises VisitOver, upon which the caller calls `close`.

    Args:
        reply: sends a message to the worker.
    """

    def __init__(self, path: Path, visit: GateVisit, reply: Reply) -> None:
        self.number, self.worker, self._reply = visit.visit, f"{visit.worker_id}.{visit.epoch:x}", reply
        self._transports = visit.ucx_transports
        self._staging = StagingWanted(visit.num_slots, visit.slot_bytes) if visit.num_slots else None
        self._reply_staged: Reply = reply
        self._num_sent = self._num_received = 0
        self.lending: Lending | None = None
        self.heard_s = time.monotonic()
        try:
            self.connection = Connection(path, MemoryVisit(visit.worker_id, visit.epoch, visit.pool_id))
        except (OSError, MemoryLost) as error:
            raise VisitOver(f"memory server {path}: {error}") from None

    def pass_on(self, carried: GateFrame) -> None:
        """Pass a message of the worker to the memory server."""
        self.heard_s = time.monotonic()
        number, self._num_received = self._num_received, self._num_received + 1
        if carried.number != number:
            raise VisitOver(f"messages {number} to {carried.number - 1} got lost")
        self._send(carried.frame, MemoryMessage)

    def stage(self, carried: StagingFrame, reply: Reply) -> None:
        """Pass a `BlocksStaging` to the memory server; `reply` takes answers to this and later ones."""
        self._reply_staged = reply
        self._send(carried.frame, BlocksStaging)

    def serve(self) -> None:
        """Pass messages of the memory server to the worker, and lend its pool."""
        try:
            for message, descriptor in self.connection.receive():
                self._take(message, descriptor)
        except (MemoryLost, ConfigError) as error:
            raise VisitOver(str(error)) from None

    def lend(self) -> None:
        """Tell the worker of the lender, which has something to say."""
        assert self.lending is not None, "it was begun"
        try:
            lent = self.lending.told()
        except LendingFailed as failed:
            raise VisitOver(str(failed)) from None
        self._reply(PoolLent(self.number, lent.metadata, lent.address, lent.num_bytes))

    def close(self, reason: str) -> None:
        """End the lender, then the claims, and tell the worker."""
        if self.lending is not None:
            self.lending.close()
        self.connection.close()
        self._reply(GateOver(self.number, reason))

    def _send(self, frame: bytes, kind: type[MemoryMessage] | UnionType) -> None:
        try:
            message = decode(frame)
            if not isinstance(message, kind):
                raise VisitOver(f"{type(message).__name__} is no message to a memory server")
            self.connection.send(message)
        except (WireError, MemoryLost) as error:
            raise VisitOver(str(error)) from None

    def _take(self, message: Message, descriptor: int | None) -> None:
        try:
            match message:
                case BlocksStaged():
                    self._reply_staged(StagingFrame(self.number, encode(message)))
                    return
                case StagingRegion():
                    self._begin_lending(descriptor)
                    return
                case PoolRegion() if self._staging is not None:
                    self.connection.send(self._staging)
                case PoolRegion():
                    self._begin_lending(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._reply(GateFrame(self.number, self._num_sent, encode(message)))
        self._num_sent += 1

    def _begin_lending(self, descriptor: int | None) -> None:
        if self.lending is not None:
            return
        if descriptor is None:
            raise VisitOver("the pool is in a GPU's memory, which a worker on a GPU reads, through staging")
        self.lending = Lending(descriptor, f"lender-{self.worker}-{self.number:x}", self._transports)
