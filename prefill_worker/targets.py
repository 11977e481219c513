"""Decode workers as targets of handoffs.

The router names decode workers. The prefill worker dials each, and sends the pool's location until the decode worker
has proven a KV path. No blocks are offered before the proof.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from common.base.errors import ConfigError
from common.settings.config import NetSection
from common.wire.messages.handoff import KVPathResult, KVPoolExport
from common.wire.messages.worker import DecodePeer, Message
from common.wire.messages.worker_id import connection_of, is_from
from common.wire.transport.sockets import Spoke

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds between two pool exports to a target, doubled each time; a failure may pass, and a proof takes time."""


@dataclass(slots=True)
class Target:
    """An incarnation of a decode worker."""

    worker_id: str
    epoch: int
    spoke: Spoke
    proven: bool = False
    is_shared: bool = False  # the target uses the same pool
    problem: str = ""  # error of the last proof
    next_export_s: float = 0.0  # time of the next pool export; inf when proven
    pause_s: float = FIRST_PAUSE_S  # after the next export


class Targets:
    """Decode workers by id, each with a connection."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", net: NetSection, export: KVPoolExport, poller: zmq.Poller
    ) -> None:
        self.context = context
        self.net = net
        self.export = export
        self.poller = poller
        self.by_id: dict[str, Target] = {}

    def join(self, message: DecodePeer) -> None:
        """Dial a decode worker, in place of an earlier incarnation.

        A known incarnation gets the pool export again, because a restarted router waits for the report.
        """
        known = self.by_id.get(message.worker_id)
        if known and known.epoch == message.epoch:
            known.next_export_s, known.pause_s = 0.0, FIRST_PAUSE_S
            return
        if known:
            self.leave(known.worker_id, known.epoch)
        identity = connection_of(self.export.worker_id, self.export.epoch)
        try:
            spoke = Spoke(self.context, self.net, message.handoff_endpoint, identity)
        except ConfigError as error:
            logger.error("cannot dial decode worker %s: %s", message.worker_id, error)
            return
        self.by_id[message.worker_id] = Target(message.worker_id, message.epoch, spoke)
        self.poller.register(spoke.socket, zmq.POLLIN)
        logger.info("dialing decode worker %s at %s", message.worker_id, message.handoff_endpoint)

    def leave(self, worker_id: str, epoch: int) -> None:
        """Hang up on a dead incarnation."""
        target = self.by_id.get(worker_id)
        if target and target.epoch == epoch:
            del self.by_id[worker_id]
            self.poller.unregister(target.spoke.socket)
            target.spoke.close()

    def export_pool(self) -> None:
        """Send the pool export to every target with a due `next_export_s`."""
        now_s = time.monotonic()
        for target in self.by_id.values():
            if now_s >= target.next_export_s:
                target.next_export_s = now_s + target.pause_s
                target.pause_s = min(2 * target.pause_s, LONGEST_PAUSE_S)
                target.spoke.send(self.export)

    def handle_result(self, result: KVPathResult) -> None:
        """Record whether a target's path is proven; after a failure the pool export is sent again."""
        target = self.by_id.get(result.worker_id)
        if target is None or target.epoch != result.epoch:
            return
        was_proven, target.proven, target.is_shared = target.proven, not result.error, result.is_shared
        if target.proven:
            target.next_export_s = math.inf
        elif was_proven:
            target.next_export_s, target.pause_s = time.monotonic() + FIRST_PAUSE_S, FIRST_PAUSE_S
        if result.error and result.error != target.problem:
            logger.error("no KV path to decode worker %s, trying on: %s", target.worker_id, result.error)
        target.problem = result.error

    def proven(self, worker_id: str, epoch: int) -> Target | None:
        """Return the target of an incarnation; None without a proven path."""
        target = self.by_id.get(worker_id)
        return target if target and target.epoch == epoch and target.proven else None

    def receive(self) -> Iterator[tuple[Target, Message]]:
        """Yield messages of targets; a message in a foreign name is refused."""
        for target in list(self.by_id.values()):
            for message in target.spoke.receive():
                if is_from(connection_of(target.worker_id, target.epoch), message):
                    yield target, message
                else:
                    target.spoke.refuse(message, f"it names another worker than {target.worker_id}")

    def num_dropped_frames(self) -> int:
        return sum(target.spoke.drops.dropped for target in self.by_id.values())

    def close(self) -> None:
        for target in self.by_id.values():
            target.spoke.close(linger_ms=200)
