"""The loop of a gate: visits of workers from other hosts, each by a random number."""

import logging
import time
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path

import zmq

from common.memory.base.nixl_agent import ucx_transports
from common.memory.gates.visit import Visit, VisitOver
from common.settings.config import NetSection
from common.wire.messages.gates import GateFrame, GateMessage, GateOver, GateVisit, StagingFrame
from common.wire.messages.worker import Message
from common.wire.transport.sockets import Hub

logger = logging.getLogger(__name__)

LEASE = 4
"""Multiple of `net.worker_timeout_s` after which a silent worker's claims end. The worker itself gives up after one."""
WAIT_MS = 200
MAX_VISITS = 256


class Gate:
    """Owner of all visits to a memory server; a lost visit is never resumed."""

    def __init__(self, path: Path, endpoint: str, net: NetSection) -> None:
        self.path, self.lease_s = path, LEASE * net.worker_timeout_s
        self.transports = ucx_transports(net.ucx_transports)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.hub = Hub(self.context, net, endpoint)
        self.visits: dict[int, Visit] = {}
        self.poller = zmq.Poller()
        self.poller.register(self.hub.socket, zmq.POLLIN)

    def turn(self) -> None:
        """Handle messages and ends within `WAIT_MS`."""
        readable = dict(self.poller.poll(WAIT_MS)).keys()
        for identity, message in self.hub.receive():
            self._handle(identity, message)
        for visit in list(self.visits.values()):
            self._guard(visit, partial(self._tend, visit, readable))

    def close(self) -> None:
        for visit in list(self.visits.values()):
            self._end(visit, "the gate ends")
        self.hub.close(linger_ms=200)
        self.context.term()

    def _handle(self, identity: bytes, message: Message) -> None:
        match message:
            case GateVisit():
                self._begin(identity, message)
            case GateFrame() if (visit := self.visits.get(message.visit)) is not None:
                self._guard(visit, partial(visit.pass_on, message))
            case StagingFrame() if (visit := self.visits.get(message.visit)) is not None:
                self._guard(visit, partial(visit.stage, message, partial(self._reply, identity)))
            case GateFrame() | StagingFrame():
                self.hub.send(identity, GateOver(message.visit, "the gate knows no such visit, or not any more"))
            case GateOver():
                if (visit := self.visits.get(message.visit)) is not None:
                    self._end(visit, message.reason)
            case _:
                self.hub.refuse(identity, message, "no gate receives it")

    def _begin(self, identity: bytes, message: GateVisit) -> None:
        reply = partial(self._reply, identity)
        if message.visit in self.visits:
            return
        problem = ""
        if message.ucx_transports != self.transports:
            problem = f"net.ucx_transports: {message.ucx_transports!r} there, {self.transports!r} here"
        elif len(self.visits) >= MAX_VISITS:
            problem = f"there are {MAX_VISITS} visits"
        try:
            if problem:
                raise VisitOver(problem)
            visit = Visit(self.path, message, reply)
        except VisitOver as over:
            logger.warning("%s is refused: %s", message.worker_id, over)
            reply(GateOver(message.visit, str(over)))
            return
        self.visits[visit.number] = visit
        self.poller.register(visit.connection, zmq.POLLIN)
        logger.info("%s visits pool %x", visit.worker, message.pool_id)

    def _reply(self, identity: bytes, answer: GateMessage) -> None:
        self.hub.send(identity, answer)

    def _tend(self, visit: Visit, readable: Container[object]) -> None:
        if visit.lending is not None and visit.lending.fileno() in readable:
            visit.lend()
        had_lender = visit.lending is not None
        visit.serve()
        if visit.lending is not None and not had_lender:
            self.poller.register(visit.lending.fileno(), zmq.POLLIN)
        if time.monotonic() - visit.heard_s > self.lease_s:
            raise VisitOver(f"not a word for {self.lease_s:.0f} s")

    def _guard(self, visit: Visit, work: Callable[[], None]) -> None:
        try:
            work()
        except VisitOver as over:
            self._end(visit, str(over))

    def _end(self, visit: Visit, reason: str) -> None:
        del self.visits[visit.number]
        self.poller.unregister(visit.connection)
        if visit.lending is not None and visit.lending.fileno() in dict(self.poller.sockets):
            self.poller.unregister(visit.lending.fileno())
        visit.close(reason)
        logger.info("%s: the visit is over: %s", visit.worker, reason)
